"""rl_steps of a framework or release left out: its constants forgotten, its rows predicted by what remains.

A framework left out has the overheads of its relative, as one that nobody measured would (`RELATIVES`, and what
`rlperf.calibrate.rl_step.software` says of unknown ones): mechanisms that were read from its source stay, for they are
no measurement. What the relative itself has from the framework goes with it, and what is believed without it stands in
(`believed`); host time of engines is pooled over the rollouts of all others (`rlperf.calibrate.engine_host_pool`).
A release left out is forgotten by the fit of its framework, which starts from the overheads of such a stranger; one
that no fit saw is left out as it stands. Both sides are scored on rows that no shipped fit saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.engine_host_pool import HOST
from rlperf.calibrate.leave_out import LeftOutGroup, conformal, group_of, in_turn
from rlperf.calibrate.rl_step.framework import constant, fit_framework, overhead, with_constants
from rlperf.calibrate.rl_step.predict import StepPrediction, predict_step
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.calibrate.tables import Table
from rlperf.calibrate.trainers.constants import OF_STACK
from rlperf.calibrate.validate import PredictedFigure
from rlperf.calibrate.validate_rl_step import NEEDED, predictions_of
from rlperf.errors import InfeasibleError, SpecError
from rlperf.specs.engine_host import load_engine_hosts
from rlperf.specs.rl_calibration import FrameworkCalibration, load_framework_calibration
from rlperf.specs.trainer_pace import load_trainer_paces
from rlperf.told import Tell, quiet

RELATIVES: Mapping[str, str] = {
    "nemo_rl_megatron": "verl_megatron",
    "nemo_rl_dtensor": "verl_fsdp",
    "verl_megatron": "nemo_rl_megatron",
    "verl_fsdp": "nemo_rl_dtensor",
    "slime": "verl_megatron",
    "miles": "verl_megatron",
    "openrlhf": "verl_fsdp",
    "trl": "verl_fsdp",
    "areal": "verl_fsdp",
}
"""Whose measured overheads stand in for a framework's: the same kind of trainer."""
OVERHEADS = (
    "engine_host", "engine_host_per_request", "step", "training.update", "training.scoring_pass", "training.moe_layer",
)  # fmt: skip
"""Constants that are forgotten with a framework or release."""
FITTED = "nemo_rl_megatron"
"""The one calibration that whole rl_steps were fitted to; a release of it is forgotten by fitting again."""


def predict_groups(path: Path, table: Table, by: str, tell: Tell = quiet) -> list[LeftOutGroup]:
    """Steps and stages of every framework's or release's rows, as shipped and with the group forgotten."""
    table.need(*NEEDED)
    if by not in ("framework", "version"):
        raise SpecError(f"of rl_steps a framework or a version can be left out, not a {by}")
    rows = [row for row in read_all(StepRow, table)[0] if row.measured]
    groups: dict[str, list[StepRow]] = {}
    for row in rows:
        name = row.software.framework if by == "framework" else group_of(row.row, "version")
        groups.setdefault(name, []).append(row)
    fits = {name: _forgotten(rows, members, by) for name, members in groups.items() if name}
    found = []
    for name in in_turn(list(fits), tell):
        forget = fits[name]
        seen = [one for row in groups[name] for one in _figures(row, None)]
        left = [one for row in groups[name] for one in _figures(row, forget(row.framework))]
        unseen = [not one.used_in_calibration for one in seen]
        found.append(
            LeftOutGroup(
                name,
                in_fit=len({one.row_id for one in seen if one.used_in_calibration}),
                seen=tuple(one for one, kept in zip(seen, unseen, strict=True) if kept),
                left_out=tuple(one for one, kept in zip(left, unseen, strict=True) if kept),
                borrowed=RELATIVES.get(groups[name][0].framework, "") if by == "framework" else "",
            )
        )
    found = [group for group in found if group.left_out]
    return conformal(found) if by == "framework" else found


def _forgotten(rows: Sequence[StepRow], members: Sequence[StepRow], by: str) -> Callable[[str], FrameworkCalibration]:
    """Calibrations by name, without what the group's rows said."""
    fitted: dict[str, FrameworkCalibration] = {}

    def calibration(name: str) -> FrameworkCalibration:
        if name not in fitted:
            own = load_framework_calibration(name)
            told = set(own.step.provenance.rows) & {row.row_id for row in members}
            fitted[name] = own
            if by == "framework":
                fitted[name] = stranger(own)
            elif name == FITTED and told:
                fitted[name] = refit(own, [row for row in rows if row.row_id in set(own.step.provenance.rows) - told])
        return fitted[name]

    return calibration


def stranger(own: FrameworkCalibration) -> FrameworkCalibration:
    """The framework with the measured overheads of its relative, but for those that the relative has from it.

    Host terms of its engine and the pace of its trainer are those pooled over the others' rows, and its own intervals
    are forgotten, too.
    """
    relative = load_framework_calibration(RELATIVES[own.id])
    host = load_engine_hosts().of_stranger(own.framework)
    lent = with_constants(
        own,
        {
            name: believed(name, own.framework)
            if overhead(relative, name).provenance.taken_from == own.framework
            else constant(relative, name)
            for name in OVERHEADS
            if name not in HOST
        },
    )
    pace = load_trainer_paces().of_stranger(own.framework, own.trainers[0])
    return lent.model_copy(update={"pace": pace, **{name: getattr(host, name) for name in HOST}}).as_stranger()


def believed(name: str, without: str) -> float:
    """What the other frameworks say of an overhead: those that measured it, else those that judged it on their own [s].

    The geometric mean; where all have it from ``without``, what the trainers' pool believes before a row.

    >>> own = constant(load_framework_calibration("verl_fsdp"), "training.update")
    >>> round(believed("training.update", "nemo_rl") / own, 9)
    1.0
    """
    others = [overhead(each, name) for each in map(load_framework_calibration, RELATIVES) if each.framework != without]
    own = [each for each in others if not each.provenance.taken_from and each.value > 0.0]
    chosen = [each for each in own if each.provenance.n] or own
    if chosen:
        return float(np.exp(np.mean([np.log(each.value) for each in chosen])))
    start = next((one.start for one in OF_STACK if one.name == name.rpartition(".")[2]), None)
    if start is None:
        raise SpecError(f"no framework but {without} says anything of {name}")
    return start


def refit(own: FrameworkCalibration, rows: Sequence[StepRow]) -> FrameworkCalibration:
    """Overheads fitted to some rows, from those of the relative on; rows of one configuration share one weight."""
    keys = [row.configuration for row in rows]

    def residuals(candidate: FrameworkCalibration) -> list[float]:
        found = []
        for row in rows:
            prediction, weight = predict_step(row, framework=candidate), keys.count(row.configuration) ** -0.5
            found += [weight * float(np.log(prediction.stage_s(name) / s)) for name, s in row.measured.items() if s > 0]
        return found

    return fit_framework(stranger(own), residuals, OVERHEADS)


def _figures(row: StepRow, framework: FrameworkCalibration | None) -> list[PredictedFigure]:
    try:
        found: StepPrediction = predict_step(row, framework=framework)
    except InfeasibleError:
        return []
    return predictions_of(found)
