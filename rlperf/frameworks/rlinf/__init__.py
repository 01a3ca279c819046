"""RLinf: its adapter, and the table of what its rules ask of a run besides."""

from rlperf.frameworks.rlinf.adapter import ADAPTER as ADAPTER
from rlperf.frameworks.rlinf.adapter import RlinfFacts as RlinfFacts
