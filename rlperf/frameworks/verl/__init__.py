"""verl: its adapter, and the table of what its rules ask of a run besides."""

from rlperf.frameworks.verl.adapter import ADAPTER as ADAPTER
from rlperf.frameworks.verl.reading import VerlFacts as VerlFacts
