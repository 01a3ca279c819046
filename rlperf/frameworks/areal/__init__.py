"""AReaL: its adapter, and the table of what its rules ask of a run besides."""

from rlperf.frameworks.areal.adapter import ADAPTER as ADAPTER
from rlperf.frameworks.areal.reading import ArealFacts as ArealFacts
