"""Published bus bandwidths of collectives, within a node and across nodes, against shipped constants.

Columns: gpu, nodes, n_gpus, collective, bytes, busbw_GBps; ``network`` (a link profile) or a word of it in ``note``.
Nothing is fitted here: the rows behind the constants are marked, all others are other people's machines.
"""

from __future__ import annotations

import re

from rlperf.calibrate.kernel_tables import COLLECTIVE_NAMES
from rlperf.calibrate.tables import Row, Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.cost.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    bus_share,
    collective_fit,
    reduce_scatter_s,
)
from rlperf.errors import SpecError
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_cluster, load_device
from rlperf.units import MOST

COLUMNS = ("gpu", "nodes", "n_gpus", "collective", "bytes", "busbw_GBps")
ROUNDING = 0.1
"""A bandwidth whose last digit stands for more than this share of it is no measurement."""

_SECONDS = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "all_to_all": all_to_all_s,
}
_NETWORKS = ((r"\befa", "efa_400"), (r"\broce", "roce_400"))
_EAGER = r"torch|nccl2\.27\.7"
"""Notes of a benchmark that launches from PyTorch, one call at a time."""


def _hardware(row: Row) -> Hardware:
    device = load_device(row.text("gpu"))
    cluster = load_cluster(f"generic:{device.name}")
    note = row.text("note").lower()
    network = row.text("network") or next((name for word, name in _NETWORKS if re.search(word, note)), cluster.network)
    return load_hardware(device.name, cluster.model_copy(update={"network": network}))


def outcome(table: Table) -> Outcome:
    """All rows of a table."""
    return each_row(table, lambda row: [figure(row)])


def figure(row: Row) -> PredictedFigure:
    """Microseconds of one row."""
    name = COLLECTIVE_NAMES.get(row.text("collective"), row.text("collective"))
    if name not in _SECONDS:
        raise SpecError(f"collective {name!r} is not one that rlperf knows")
    text, rate = row.text("busbw_GBps"), row.number("busbw_GBps") or 0.0
    digits = len(text.partition(".")[2])
    if rate <= 0 or 0.5 * 10.0**-digits > ROUNDING * rate:
        raise SpecError("bus bandwidth with too few digits")
    hw, devices, nodes, size = _hardware(row), row.count("n_gpus"), row.count("nodes"), row.count("bytes", most=MOST)
    measured = float(bus_share(name, devices)) * size / (rate * 1e9)
    eager = hw.calibration.host.eager_collective if re.search(_EAGER, row.text("note").lower()) else 0.0
    seconds = float(_SECONDS[name](hw, float(size), float(devices), devices / nodes)) + eager
    if nodes > 1:
        low, high = hw.library.interval
        used = any(re.fullmatch(pattern, _key(row)) for pattern in hw.library.rows)
        calibration = hw.library.id
    else:
        spread = collective_fit(hw, name).quality.spread
        low, high, used, calibration = spread.low, spread.high, False, hw.calibration.id
    return PredictedFigure(
        row_id=row.row_id,
        group=f"{name}, {'across nodes' if nodes > 1 else 'one node'}",
        metric="latency_us",
        measured=measured * 1e6,
        predicted=seconds * 1e6,
        low=seconds * low * 1e6,
        high=seconds * high * 1e6,
        calibration=calibration,
        assumed=(f"network={hw.network.name}",) if nodes > 1 else (),
        extrapolated=hw.calibration.extrapolated,
        used_in_calibration=used,
        stratum=f"{hw.device.name} x {nodes}",
    )


def _key(row: Row) -> str:
    return f"{row.text('gpu')} {row.text('nodes')} {row.text('collective')} {row.text('bytes')}"
