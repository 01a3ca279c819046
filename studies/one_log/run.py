"""One log makes it yours: fit on one configuration of a framework, predict its others; and the prior that this takes.

    python studies/one_log/run.py            per framework: errors of the others before and after, with medians
    python studies/one_log/run.py --forgotten    the same as a stranger: overheads of a relative in place of its own
    python studies/one_log/run.py --write    writes expected.csv, and the prior into hwprofiles/calibrations

A row of ``measured/rl_step.csv`` stands in for a log of three rl_steps with its stage seconds: rows are means of some.
The prior of every pair is found without the group that the log is of; of a stranger, without all rows of its framework,
and from the others as strangers. Measured rl_steps are found through RLPERF_DATA (default: ../shared/data beside the
checkout).
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.leave_out_rl_step import stranger
from rlperf.calibrate.logs.fit import LogFit, fit_log
from rlperf.calibrate.logs.prior import Evidence, evidence_of, log_prior
from rlperf.calibrate.rl_step.job import context_of
from rlperf.calibrate.rl_step.predict import DEFAULT_LAW, STAGES, StepPrediction, predict_step
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.calibrate.tables import read_table
from rlperf.errors import InfeasibleError, SpecError
from rlperf.specs.calibration import Z95
from rlperf.specs.rl_calibration import FrameworkCalibration, load_framework_calibration
from rlperf.specs.stage_spread import LogPrior
from rlperf.specs.step_log import StepLog

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("RLPERF_DATA", ROOT.parent / "shared" / "data")) / "measured" / "rl_step.csv"
PRIOR = ROOT / "hwprofiles" / "calibrations" / "log_prior.yaml"
COLUMNS = {"step_s": "rl_step_s", "train_s": "training_s"}
METRICS = ("step_s", *STAGES)
STEPS = 3
"""rl_steps that a row stands in for, all alike."""
LOGS = 5
"""Rows of a group that stand in for logs at most."""
ONE_MODEL = "all, of one model"
"""Pairs whose log is of the row's own model."""
FITTED = "nemo_rl"
"""The framework whose rl_steps are behind its constants; its releases are groups of their own."""


@dataclass(frozen=True)
class Pair:
    """One figure of a row under the shipped constants, and after the log of another configuration.

    ``one_model``: the log is of the row's own model, and differs in batch, lengths, layout, devices or mode alone
    """

    framework: str
    log: str
    row: str
    metric: str
    measured: float
    before: float
    after: float
    sigma: float
    one_model: bool

    @property
    def inside(self) -> bool:
        """Whether the figure lies in the 90 % interval of the posterior."""
        return abs(np.log(self.measured / self.after)) <= Z95 * self.sigma


def measured_rows(table: Path = DATA) -> list[StepRow]:
    """Rows that can be predicted, with what they measured."""
    return [row for row in read_all(StepRow, read_table(table))[0] if row.measured]


def group_of(row: StepRow) -> str:
    """Whose error a row shares: a framework with its trainer, of one release or source, on one kind of device.

    A log is of one cluster: errors on H100 say nothing of those on GB200.
    """
    release = f" {row.release}" if row.framework.startswith(FITTED) else ""
    return f"{row.framework} {row.row.group}{release} {row.hardware.device.name}"


def fitted(row: StepRow) -> bool:
    return bool(load_framework_calibration(row.framework).calibrated_on)


def log_of(row: StepRow) -> StepLog:
    """The row as a log."""
    stated = {name: seconds for name, seconds in row.measured.items() if name in METRICS}
    columns = {COLUMNS.get(name, name): [seconds] * STEPS for name, seconds in stated.items()}
    return StepLog.of(range(1, STEPS + 1), framework=row.framework, source=row.row_id, **columns)


Frameworks = Callable[[StepRow], FrameworkCalibration]
"""The calibration that a row is predicted with."""


def shipped(row: StepRow) -> FrameworkCalibration:
    return load_framework_calibration(row.framework).at_release(row.release)


def forgotten(row: StepRow) -> FrameworkCalibration:
    return stranger(load_framework_calibration(row.framework)).at_release(row.release)


def evidence(rows: Sequence[StepRow], framework: Frameworks = shipped) -> dict[str, Evidence]:
    """What the rows say of the prior, by row; those that cannot be laid out say nothing."""
    found = {}
    for row in rows:
        try:
            found[row.row_id] = evidence_of(context_of(row, DEFAULT_LAW, framework(row)), log_of(row), group_of(row))
        except (InfeasibleError, SpecError):
            continue
    return found


def prior_without(
    rows: Sequence[StepRow], known: dict[str, Evidence], one: StepRow, framework: Frameworks = shipped
) -> LogPrior:
    """The prior of a row's framework from all groups but its own; of a stranger, from all other frameworks."""

    def tells(row: StepRow) -> bool:
        if framework is forgotten:
            return shipped(row).framework != shipped(one).framework
        return fitted(row) == fitted(one) and group_of(row) != group_of(one)

    return log_prior([known[row.row_id] for row in rows if row.row_id in known and tells(row)])


def pairs(rows: Sequence[StepRow], framework: Frameworks = shipped) -> list[Pair]:
    """Rows as logs, and the other configurations of their group: one framework, release, source and device."""
    known, found = evidence(rows, framework), []
    priors: dict[str, LogPrior] = {}

    @cache
    def before(row: StepRow) -> StepPrediction:
        return predict_step(row, framework=framework(row))

    for log in _logs(rows):
        others = [row for row in rows if group_of(row) == group_of(log) and row.configuration != log.configuration]
        if log.row_id not in known or not others:
            continue
        name = group_of(log)
        priors.setdefault(name, prior_without(rows, known, log, framework))
        fit = fit_log(context_of(log, DEFAULT_LAW, framework(log)), log_of(log), prior=priors[name])
        for row in others:
            if row.row_id in known:
                found += _pairs(log, row, fit, before(row))
    return found


def _logs(rows: Sequence[StepRow]) -> list[StepRow]:
    """Those that stand in for logs: some of every group."""
    groups: dict[str, list[StepRow]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    places = {name: np.linspace(0, len(some) - 1, min(len(some), LOGS)) for name, some in groups.items()}
    return [groups[name][round(k)] for name in groups for k in places[name].tolist()]


def _pairs(log: StepRow, row: StepRow, fit: LogFit, before: StepPrediction) -> list[Pair]:
    after = predict_step(row, framework=fit.calibration)
    names = {"step_s": "rl_step", **{column: stage.removesuffix("_s") for column, stage in STAGES.items()}}
    return [
        Pair(
            row.framework, log.row_id, row.row_id, metric, row.measured[metric],
            before.stage_s(metric), after.stage_s(metric), fit.spread[names[metric]],
            log.architecture == row.architecture,
        )
        for metric in METRICS
        if metric in row.measured
    ]  # fmt: skip


def table(found: Sequence[Pair]) -> list[dict[str, object]]:
    """Median error before and after by framework and figure [%], share inside, pairs."""
    lines = []
    groups = {
        name: [one for one in found if one.framework == name] for name in dict.fromkeys(one.framework for one in found)
    }
    groups |= {"all": list(found), ONE_MODEL: [one for one in found if one.one_model]}
    for framework, members in groups.items():
        for metric in METRICS:
            some = [one for one in members if one.metric == metric]
            if some:
                before, after = (
                    100.0 * float(np.median([abs(getattr(one, side) / one.measured - 1.0) for one in some]))
                    for side in ("before", "after")
                )
                lines.append(
                    {
                        "framework": framework, "figure": metric, "pairs": len(some), "before_pct": round(before, 1),
                        "after_pct": round(after, 1), "inside_pct": round(100 * np.mean([one.inside for one in some])),
                    }
                )  # fmt: skip
    return lines


def guide(lines: pl.DataFrame) -> list[str]:
    """Rows of the guide's table."""
    names = {
        "step_s": "rl_step",
        **{column: stage.removesuffix("_s").replace("_", " ") for column, stage in STAGES.items()},
    }
    return [
        f"| {line['framework']} | {names[line['figure']]} | {line['pairs']} | {line['before_pct']} % | "
        f"{line['after_pct']} % | {line['inside_pct']} % |"
        for line in lines.iter_rows(named=True)
    ]


def write(rows: Sequence[StepRow], lines: Sequence[dict[str, object]]) -> None:
    """expected.csv, and the prior from all rows."""
    with (HERE / "expected.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    known = evidence(rows)
    text = [
        "# How far stages of rl_steps are off before a log is read: written by studies/one_log/run.py --write",
        'source: "measured/rl_step.csv; groups: releases of NeMo-RL (fitted), sources of other rows (stranger), by'
        ' device"',
        'noise_source: "MLPerf Training v6.1 RLVR, single rl_steps of twelve runs: training and the rest 0.04, weight'
        ' sync 0.16; rollouts judged (there 0.25, of which its environment has most), the rest as a difference judged"',
    ]
    for side in ("fitted", "stranger"):
        found = log_prior(
            [known[row.row_id] for row in rows if row.row_id in known and fitted(row) == (side == "fitted")]
        )
        text.append(f"{side}:")
        for stage, prior in found:
            values = ", ".join(f"{name}: {value}" for name, value in prior)
            text.append(f"  {stage}: {{{values}}}")
    PRIOR.write_text("\n".join(text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forgotten", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    rows = measured_rows()
    lines = table(pairs(rows, forgotten if asked.forgotten else shipped))
    for line in lines:
        print("  ".join(f"{value!s:>18}" for value in line.values()))
    if asked.write:
        write(rows, lines)


if __name__ == "__main__":
    main()
