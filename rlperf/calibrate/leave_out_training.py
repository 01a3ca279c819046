"""Training with a framework, release, device or model family left out: constants pooled again, their rows predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.leave_out import LeftOutGroup, group_of
from rlperf.calibrate.tables import Table
from rlperf.calibrate.timing_fits import TimingFit, fit_rows
from rlperf.calibrate.trainer_constants import timed_as
from rlperf.calibrate.trainer_rows import TrainingRow, digest
from rlperf.calibrate.validate import PredictedFigure
from rlperf.calibrate.validate_training import NEEDED, figure_of
from rlperf.layout import IntArray


def predict_groups(path: Path, table: Table, by: str) -> list[LeftOutGroup]:
    """Seconds of an optimizer update of every group's rows that fits do not see, with and without the group.

    Seen: constants pooled on the rows that fits may see (`rlperf.calibrate.trainer_rows.timing_part`). Left out: the
    same without any row of the group; along the same slopes, which are physics and hold nothing that was measured. Its
    interval is what rows of other groups missed when their fold was left out; those fits saw the group.
    """
    table.need(*NEEDED)
    found, _ = read_all(TrainingRow, table)
    return groups_of(fit_rows(found), by)


def groups_of(fit: TimingFit, by: str) -> list[LeftOutGroup]:
    """The same of a fit of all rows that fits may see: one fit serves every way of grouping."""
    rows = fit.timed.rows
    names = np.array([group_of(row.row, by) for row in rows])
    groups = []
    for name in sorted(set(names.tolist()) - {""}):
        members = names == name
        scored = np.flatnonzero(members & ~fit.seen)
        if not len(scored):
            continue
        seen = members & fit.seen
        left = fit.without(members) if seen.any() else fit
        groups.append(
            LeftOutGroup(
                name=name,
                in_fit=len({digest(rows[int(i)].configuration) for i in np.flatnonzero(seen)}),
                seen=_figures(fit, scored),
                left_out=_figures(left, scored),
                borrowed=", ".join(f"{own}: the pool" for own in _without_rows(left, scored)),
            )
        )
    return groups


def _figures(fit: TimingFit, scored: IntArray) -> tuple[PredictedFigure, ...]:
    rows, seconds = fit.timed.rows, np.exp(fit.predicted)
    return tuple(figure_of(rows[i], fit.trainer(rows[i].backend), float(seconds[i])) for i in scored)


def _without_rows(fit: TimingFit, scored: Sequence[int] | IntArray) -> list[str]:
    """Backends of which a fit saw no row."""
    known = {timed_as(row.backend) for row, used in zip(fit.timed.rows, fit.seen, strict=True) if used}
    wanted = {fit.timed.rows[i].backend for i in scored}
    return sorted(name for name in wanted if timed_as(name) not in known)
