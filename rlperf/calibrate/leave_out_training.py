"""Training with a framework, release, device or model family left out: constants pooled again, their rows predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from joblib import Parallel, delayed

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.leave_out import LeftOutGroup, group_of, in_turn
from rlperf.calibrate.pooling import Pooled
from rlperf.calibrate.tables import Table
from rlperf.calibrate.trainers.constants import timed_as
from rlperf.calibrate.trainers.rows import TrainingRow, digest
from rlperf.calibrate.trainers.timing_fits import TimingFit, fit_rows
from rlperf.calibrate.validate import PredictedFigure
from rlperf.calibrate.validate_training import NEEDED, figure_of
from rlperf.layout import BoolArray, IntArray
from rlperf.told import Tell, quiet


def predict_groups(path: Path, table: Table, by: str, tell: Tell = quiet) -> list[LeftOutGroup]:
    """Seconds of an optimizer update of every group's rows that fits do not see, with and without the group.

    Seen: constants pooled on the rows that fits may see (`rlperf.calibrate.trainers.rows.timing_part`). Left out: the
    same without any row of the group, from the prior on: ten seconds a group, two at once. Intervals are what either
    fit leaves open of the row (`rlperf.calibrate.trainers.doubt`).
    """
    table.need(*NEEDED)
    found, _ = read_all(TrainingRow, table)
    return groups_of(fit_rows(found), by, tell)


def groups_of(fit: TimingFit, by: str, tell: Tell = quiet) -> list[LeftOutGroup]:
    """The same of a fit of all rows that fits may see: one fit serves every way of grouping."""
    rows = fit.timed.rows
    names = np.array([group_of(row.row, by) for row in rows])
    scored_of = {name: np.flatnonzero((names == name) & ~fit.seen) for name in sorted(set(names.tolist()) - {""})}
    fitted = [name for name, scored in scored_of.items() if len(scored) and (fit.seen & (names == name)).any()]
    left_out = _left_out(fit, {name: names == name for name in fitted}, tell)
    groups = []
    for name, scored in scored_of.items():
        if not len(scored):
            continue
        seen, left = (names == name) & fit.seen, left_out.get(name, fit)
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


def _left_out(fit: TimingFit, members: Mapping[str, BoolArray], tell: Tell) -> dict[str, TimingFit]:
    """The fit without each of the groups, made anew; a process sends the constants back alone."""
    made = Parallel(n_jobs=2, return_as="generator")(delayed(_pooled_anew)(fit, held) for held in members.values())
    return {
        name: TimingFit(fit.timed, fit.seen & ~members[name], pooled, whole=fit)
        for name, pooled in zip(in_turn(list(members), tell), made, strict=True)
    }


def _pooled_anew(fit: TimingFit, held: BoolArray) -> Pooled:
    return fit.without(held).pooled


def _figures(fit: TimingFit, scored: IntArray) -> tuple[PredictedFigure, ...]:
    rows, seconds = fit.timed.rows, np.exp(fit.predicted)
    return tuple(figure_of(rows[i], fit.trainer(rows[i].backend), float(seconds[i])) for i in scored)


def _without_rows(fit: TimingFit, scored: Sequence[int] | IntArray) -> list[str]:
    """Backends of which a fit saw no row."""
    known = {timed_as(row.backend) for row, used in zip(fit.timed.rows, fit.seen, strict=True) if used}
    wanted = {fit.timed.rows[i].backend for i in scored}
    return sorted(name for name in wanted if timed_as(name) not in known)
