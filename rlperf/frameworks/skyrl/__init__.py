"""SkyRL: its adapter, and the table of what its rules ask of a run besides."""

from rlperf.frameworks.skyrl.adapter import ADAPTER as ADAPTER
from rlperf.frameworks.skyrl.reading import SkyrlFacts as SkyrlFacts
