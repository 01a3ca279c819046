"""What a communication library adds to a network between nodes: latencies of its protocols, shares of the line rate."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rlperf.errors import Problem, SpecError
from rlperf.specs.calibration_files import find_calibration, read_calibration
from rlperf.specs.frozen import Frozen
from rlperf.units import NonNegativeInt, PositiveFloat, Seconds


class Protocol(Frozen):
    """Latencies of one protocol; those of a hop between nodes are without the link's own."""

    start: Seconds = Field(description="before the first byte moves")
    tree_step: Seconds = Field(description="from device to device inside a node, in a tree's chain")
    tree_hop: Seconds = Field(description="between nodes, in a tree")
    ring_step: Seconds = Field(description="from device to device inside a node, in a ring")
    ring_hop: Seconds = Field(description="between nodes, in a ring or from one device to another")


class NetworkProvenance(Frozen):
    """Where constants are from; ``low`` and ``high``: 5th and 95th percentile of measured over predicted [1]."""

    constants: tuple[str, ...]
    source: str
    date: str
    n: NonNegativeInt = 0
    low: PositiveFloat
    high: PositiveFloat


class NetworkCalibration(Frozen):
    """A communication library between nodes; the form is `rlperf.cost.network`."""

    id: str
    versions: str
    pair: PositiveFloat = Field(description="share of the line rate that flows between pairs of devices reach")
    ring: PositiveFloat = Field(description="the same of a ring")
    tree: PositiveFloat = Field(description="the same of a tree")
    low_bandwidth: PositiveFloat = Field(description="bus rate of the ``low`` protocol over the scale-up rate")
    low: Protocol = Field(description="every word carries a flag (LL)")
    line: Protocol = Field(description="every line of 128 bytes carries a flag (LL128)")
    bulk: Protocol = Field(description="chunks are announced after they have arrived (Simple)")
    rows: tuple[str, ...] = Field((), description="measured rows behind the constants: GPU, nodes, collective, bytes")
    provenance: tuple[NetworkProvenance, ...]
    notes: str = ""

    @property
    def interval(self) -> tuple[float, float]:
        """5th and 95th percentile of measured over predicted, any collective between nodes [1]: of its widest part."""
        return min(one.low for one in self.provenance), max(one.high for one in self.provenance)


def load_network_calibration(folder: Path | str | None) -> NetworkCalibration:
    """Constants of NCCL, the library that every framework communicates by; ``folder`` is the job's folder.

    >>> load_network_calibration(None).line.start
    1.4e-05
    """
    path = find_calibration("nccl", "networks", folder)
    if path is None:
        raise SpecError(Problem("no calibration for network library 'nccl'"))
    return read_calibration(path, NetworkCalibration)
