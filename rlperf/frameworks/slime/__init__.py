"""slime: its adapter, and the table of what its rules ask of a run besides."""

from rlperf.frameworks.slime.adapter import ADAPTER as ADAPTER
from rlperf.frameworks.slime.reading import SlimeFacts as SlimeFacts
