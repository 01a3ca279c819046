"""Weight syncs over links left out by group: packed broadcasts, shard to shard, remote memory; the fit that ships.

What holds for all of them is fitted on all of them (seconds per tensor), what a framework does on its own (pausing,
resuming, cache reset) per framework, and so is the share of a port that one sender reaches, remote memory apart.
Priors are wide, so that a group of which nothing is known stands at them: 20 us a tensor, 0.3 s, the rate between pairs
of devices, and for remote memory the 6 GB/s a device of a published write (Kimi-K2, 256 to 128 devices, 1.3 s;
``kernels/published_weight_sync.csv``). Paths that software binds (checkpoint engines, tensor by tensor) stay as shipped
and are scored on neither side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.leave_out import LeftOutGroup, group_of, in_turn
from rlperf.calibrate.tables import Row, Table
from rlperf.calibrate.validate import PredictedFigure
from rlperf.calibrate.validate_weight_sync import SyncCase, figure
from rlperf.errors import SpecError
from rlperf.specs.rl_calibration import WeightSyncFit
from rlperf.told import Tell, quiet

LINKS = ("packed_broadcast", "shard_to_shard", "rdma")
"""Transports that this fit is of."""
START: Mapping[str, tuple[float, float]] = {
    "per_tensor": (2e-5, 1.0),
    "fixed": (0.3, 1.0),
    "port": (1.0, 0.25),
    "remote": (0.17, 0.5),
}
"""Constant -> where it starts, and the standard deviation of its logarithm [s, s, 1, 1]."""
NOISE = 0.1
"""Standard deviation of ln(seconds) between measurements of one sync."""

Constants = Mapping[tuple[str, str], float]


def constants_of(case: SyncCase) -> dict[str, tuple[str, str]]:
    """Field of the fit -> (constant, whose): what the case shares with others."""
    port = ("remote", "") if case.fit.transport == "rdma" else ("port", case.owner)
    return {"per_tensor": ("per_tensor", ""), "fixed": ("fixed", case.owner), "hardware": port}


def with_links(case: SyncCase, constants: Constants) -> WeightSyncFit:
    """The case's fit with other constants; what they do not have stands at its start."""
    names = constants_of(case)
    return case.fit.model_copy(update={field: constants.get(key, START[key[0]][0]) for field, key in names.items()})


def fit_links(cases: Sequence[SyncCase]) -> Constants:
    """Least squares in ln(seconds) with priors; syncs of one configuration share one weight."""
    from scipy.optimize import least_squares

    keys = sorted({key for case in cases for key in constants_of(case).values()})
    start = np.log([START[name][0] for name, _ in keys])
    width = np.array([START[name][1] for name, _ in keys])
    setups = [(case.architecture.name, case.hardware.device.name, case.path) for case in cases]
    weight = np.array([setups.count(each) ** -0.5 for each in setups]) / NOISE

    def residuals(logs: np.ndarray) -> np.ndarray:
        found = dict(zip(keys, np.exp(logs).tolist(), strict=True))
        errors = [np.log(case.seconds_with(with_links(case, found)) / case.measured_s) for case in cases]
        return np.concatenate([weight * errors, (logs - start) / width])

    return dict(zip(keys, np.exp(least_squares(residuals, start).x).tolist(), strict=True))


def predict_groups(path: Path, table: Table, by: str, tell: Tell = quiet) -> list[LeftOutGroup]:
    """Every group of syncs over links, as shipped and with constants that none of its rows entered."""
    table.need("method", "architecture", "gpu", "measured_s")
    cases = [case for case in read_all(SyncCase, table)[0] if case.fit.transport in LINKS]
    if not cases:
        raise SpecError("no row of the table goes over links: nothing can be left out")
    names = sorted({sync_group(case.row, case, by) for case in cases} - {""})
    return [_without(cases, by, name) for name in in_turn(names, tell)]


def sync_group(row: Row, case: SyncCase, by: str) -> str:
    """The group of a sync: its transport, the framework whose constants serve, its device or model family."""
    if by == "transport":
        return case.fit.transport
    if by in ("framework", "engine", "version"):
        return case.owner if by != "version" else case.group
    return group_of(row, by)


def _without(cases: Sequence[SyncCase], by: str, name: str) -> LeftOutGroup:
    inside = [case for case in cases if sync_group(case.row, case, by) == name]
    outside = [case for case in cases if case not in inside]
    found = fit_links(outside) if outside else {}
    return LeftOutGroup(
        name,
        in_fit=sum(case.used for case in inside),
        seen=tuple(figure(case) for case in inside),
        left_out=tuple(_figure(case, found) for case in inside),
    )


def _figure(case: SyncCase, constants: Constants) -> PredictedFigure:
    shipped, seconds = figure(case), case.seconds_with(with_links(case, constants))
    scale = seconds / shipped.predicted
    low, high = shipped.low * scale, shipped.high * scale
    return replace(shipped, predicted=seconds, low=low, high=high, used_in_calibration=False)
