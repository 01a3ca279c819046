"""NeMo-RL: its adapter, and the table of what its rules ask of a run besides."""

from rlperf.frameworks.nemo_rl.adapter import ADAPTER as ADAPTER
from rlperf.frameworks.nemo_rl.settings import NemoRlFacts as NemoRlFacts
