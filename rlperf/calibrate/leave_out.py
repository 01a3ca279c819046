"""Leave one stack out: a whole framework, release, device or model family at a time, as a stranger would meet it.

Held-out rows (`rlperf.calibrate.splits`) share their stack with rows that a fit saw. Here constants are fitted again
without any row of a group, and the group's rows are predicted with what remains. Both sides are fitted by one rule and
scored on the same rows, of which neither fit saw any; nothing is written to the shipped constants.

A kind of measurements has a module ``rlperf.calibrate.leave_out_<kind>`` with
``predict_groups(path, table, by, tell)``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlperf.calibrate.statistics import absolute_percentage_errors, weighted_quantile
from rlperf.calibrate.tables import Row, Table, read_table
from rlperf.calibrate.validate import KINDS, SCHEMA_VERSION, PredictedFigure
from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.plan.answer import notebook
from rlperf.specs.calibration import Spread
from rlperf.told import Tell, quiet

if TYPE_CHECKING:
    import polars as pl

BY = ("framework", "engine", "version", "device", "family", "transport", "configuration", "shape")
"""What a group is: rows of one framework (engine, where rows are served: the same), one release of it, one device, one
family of models, one way of weights from trainer to engine; a part of all configurations (of served rows); one value of
a part of the shape (of kernels)."""

ALL, GROUPS = "all rows", "mean over groups"
_SIDES = ("seen", "left_out", "pooled")
_HEADER = (
    "| group | rows | configurations in the fit | seen: median | mean | p90 | inside | width "
    "| left out: median | mean | p90 | inside | width | pooled interval: inside | width | borrowed |\n|---|"
    + "---|"
    * 15
)


@dataclass(frozen=True)
class LeftOutGroup:
    """One group with both predictions of the same rows.

    Attributes
    ----------
    name : the framework, release, device or family
    in_fit : configurations of the group that the fit on the seen side saw; 0 says that it is a stranger to both
    seen, left_out : the same rows in the same order, predicted with and without the group's rows in the fit
    borrowed : whose constants stood in, where the group was all that its own had; empty where something was left
    """

    name: str
    in_fit: int
    seen: tuple[PredictedFigure, ...]
    left_out: tuple[PredictedFigure, ...]
    borrowed: str = ""


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of some rows [%]; ``inside`` is a share, ``width`` the median of high less low over predicted."""

    median: float
    mean: float
    p90: float
    bias: float
    inside: float
    width: float


@dataclass(frozen=True)
class LeaveOutLine:
    """One metric of one group: ``seen`` and ``left_out`` with the interval that rlperf would state for them.

    ``pooled`` has the interval from what the other groups missed when they were left out.
    """

    metric: str
    group: str
    rows: int
    in_fit: int
    seen: ErrorSummary
    left_out: ErrorSummary
    pooled: ErrorSummary
    borrowed: str = ""


@dataclass(frozen=True)
class LeaveOutReport:
    """Every group of a table left out in turn."""

    kind: str
    file: str
    by: str
    lines: tuple[LeaveOutLine, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        lines = [asdict(one) for one in self.lines]
        return {"schema_version": SCHEMA_VERSION, "kind": self.kind, "file": self.file, "by": self.by, "lines": lines}

    def to_frame(self) -> pl.DataFrame:
        """A row of each group and metric, its errors as ``left_out_median`` and the like."""
        rows = [
            {name: value for name, value in asdict(one).items() if not isinstance(value, dict)}
            | {f"{side}_{name}": value for side in _SIDES for name, value in asdict(getattr(one, side)).items()}
            for one in self.lines
        ]
        return notebook.frame(rows, list(rows[0]) if rows else [])

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def text_of(report: LeaveOutReport) -> str:
    """A table of Markdown a metric, as the docs hold it: the same rows with their group in the fit and without."""
    lines = []
    for metric in dict.fromkeys(one.metric for one in report.lines):
        lines += ["", f"{metric}, one {report.by} left out at a time", "", _HEADER]
        lines += [
            f"| {one.group} | {one.rows} | {one.in_fit} | {_errors(one.seen)} | {_errors(one.left_out)} "
            f"| {_interval(one.pooled)} | {one.borrowed} |"
            for one in report.lines
            if one.metric == metric
        ]
    return "\n".join(lines)


def _errors(one: ErrorSummary) -> str:
    return f"{one.median:.1f} % | {one.mean:.1f} % | {one.p90:.1f} % | {_interval(one)}"


def _interval(one: ErrorSummary) -> str:
    return f"{100.0 * one.inside:.0f} % | {one.width:.0f} %"


def family_of(architecture: str) -> str:
    """The family of a model by its name: the letters in front of its version or size.

    >>> [family_of(name) for name in ("Llama-3.1-8B", "Qwen2.5-7B", "gpt-oss-120b", "gpt-L24-h1024-a16", "Kimi-K2")]
    ['Llama', 'Qwen', 'gpt-oss', 'gpt', 'Kimi']
    """
    found = re.match(r"[A-Za-z]+(-oss|-J)?", architecture)
    return found.group() if found else architecture


def group_of(row: Row, by: str, framework: str = "framework", version: str = "framework_version") -> str:
    """The group of a row, empty where the row does not say; ``framework`` and ``version`` name the table's columns."""
    if by == "device":
        return row.text("gpu")
    if by == "family":
        return family_of(row.text("architecture"))
    if by in ("framework", "engine"):
        return row.text(framework)
    release = row.text(version)
    return f"{row.text(framework)} {release}" if release else ""


def in_turn(names: Sequence[str], tell: Tell) -> Iterator[str]:
    """Names, each told to ``tell`` before its fit.

    >>> list(in_turn(["a", "b"], lambda done, name: print(done, name)))
    0.0 a
    0.5 b
    ['a', 'b']
    """
    for number, name in enumerate(names):
        tell(number / len(names), name)
        yield name


def leave_out(path: Path | str, kind: str, by: str, tell: Tell = quiet) -> LeaveOutReport:
    """Fit again without each group in turn and sum up the errors.

    Raises
    ------
    SpecError : a group that is none of `BY`, a kind whose constants cannot be fitted again, an unreadable file, or one
        of which nothing can be left out
    """
    if by not in BY:
        raise SpecError(Problem(f"cannot leave out {by!r}; known: {', '.join(BY)}", suggestion=did_you_mean(by, BY)))
    predict = _predictor(kind)
    table = read_table(path)
    report = report_of(kind, table.file, by, predict(Path(path), table, by, tell))
    if not report.lines:
        raise SpecError(f"{table.file}: no {by} can be left out: its rows name none, or nothing else predicts them")
    return report


def _predictor(kind: str) -> Callable[[Path, Table, str, Tell], Sequence[LeftOutGroup]]:
    if kind not in KINDS:
        wrong = f"unknown kind {kind!r}: nothing can be left out; known: {', '.join(KINDS)}"
        raise SpecError(Problem(wrong, suggestion=did_you_mean(kind, KINDS)))
    name = f"rlperf.calibrate.leave_out_{kind}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise SpecError(f"kind {kind!r} has no fit to repeat: nothing can be left out") from error
    found: Callable[[Path, Table, str, Tell], Sequence[LeftOutGroup]] = module.predict_groups
    return found


def report_of(kind: str, file: str, by: str, groups: Sequence[LeftOutGroup]) -> LeaveOutReport:
    """ErrorSummary of every metric, group by group, then of all rows."""
    metrics = dict.fromkeys(one.metric for group in groups for one in group.left_out)
    lines = [line for metric in metrics for line in _lines(metric, [_only(group, metric) for group in groups])]
    return LeaveOutReport(kind, file, by, tuple(lines))


def _only(group: LeftOutGroup, metric: str) -> LeftOutGroup:
    seen, left = (tuple(one for one in figures if one.metric == metric) for figures in (group.seen, group.left_out))
    return replace(group, seen=seen, left_out=left)


def _lines(metric: str, groups: Sequence[LeftOutGroup]) -> list[LeaveOutLine]:
    groups = [group for group in groups if group.left_out]
    pooled = [_with(group.left_out, spread_of_others(groups, index)) for index, group in enumerate(groups)]
    lines = [
        LeaveOutLine(
            metric, group.name, len(group.left_out), group.in_fit,
            errors_of(group.seen), errors_of(group.left_out), errors_of(wider), group.borrowed,
        )
        for group, wider in zip(groups, pooled, strict=True)
    ]  # fmt: skip
    seen, left = ([one for group in groups for one in getattr(group, side)] for side in ("seen", "left_out"))
    whole = errors_of(seen), errors_of(left), errors_of([one for side in pooled for one in side])
    means = _mean([line.seen for line in lines]), _mean([line.left_out for line in lines])
    in_fit = sum(group.in_fit for group in groups)
    return [
        *lines,
        LeaveOutLine(metric, ALL, len(left), in_fit, whole[0], whole[1], whole[2]),
        LeaveOutLine(metric, GROUPS, len(left), in_fit, means[0], means[1], _mean([line.pooled for line in lines])),
    ]


def _mean(errors: Sequence[ErrorSummary]) -> ErrorSummary:
    return ErrorSummary(*np.mean([list(asdict(one).values()) for one in errors], axis=0).tolist())


def errors_of(figures: Sequence[PredictedFigure]) -> ErrorSummary:
    """Errors of some rows and how their intervals stand."""
    measured, predicted, low, high = (
        np.array([getattr(one, name) for one in figures]) for name in ("measured", "predicted", "low", "high")
    )
    errors = absolute_percentage_errors(predicted, measured)
    return ErrorSummary(
        median=float(np.median(errors)),
        mean=float(errors.mean()),
        p90=float(np.quantile(errors, 0.9)),
        bias=float(100.0 * np.median(predicted / measured - 1.0)),
        inside=float(((low <= measured) & (measured <= high)).mean()),
        width=float(100.0 * np.median((high - low) / predicted)),
    )


def spread_of_others(groups: Sequence[LeftOutGroup], index: int) -> Spread:
    """5th and 95th percentile of measured over predicted of the other groups, each left out, each of one weight.

    A group says nothing about its own interval; alone it has none (1 to 1).
    """
    others = [group.left_out for i, group in enumerate(groups) if i != index]
    if not others:
        return Spread(low=1.0, high=1.0)
    ratio = np.array([one.measured / one.predicted for side in others for one in side])
    weight = np.concatenate([np.full(len(side), 1.0 / len(side)) for side in others])
    order = np.argsort(ratio)
    share = (np.cumsum(weight[order]) - 0.5 * weight[order]) / weight.sum()
    low, high = np.exp(np.interp([0.05, 0.95], share, np.log(ratio[order])))
    return Spread(low=float(low), high=float(high))


def conformal(groups: Sequence[LeftOutGroup]) -> list[LeftOutGroup]:
    r"""The groups with the intervals of left-out figures widened by what leaving the others out has cost.

    Of one metric, to :math:`[p (l / p)^q, p (h / p)^q]` around a prediction p with its own interval l to h, q the 90th
    percentile of the other groups' misses over the half of their own intervals on that side (in ln), at least 1, each
    group left out and of one weight (locally weighted split conformal prediction: Lei et al. 2018, Distribution-free
    predictive inference for regression, section 5.2). So a row that said itself how uncertain it is widens no other. No
    group says anything about its own; a metric that no other has stays.
    """

    def widened(one: PredictedFigure, group: LeftOutGroup) -> PredictedFigure:
        q = max(missed([_only(other, one.metric).left_out for other in groups if other is not group]), 1.0)
        p = one.predicted
        return replace(one, low=p * min(one.low / p, 1.0) ** q, high=p * max(one.high / p, 1.0) ** q)

    return [replace(group, left_out=tuple(widened(one, group) for one in group.left_out)) for group in groups]


NARROWEST = 1e-3
"""Least half of an interval, in ln: none is left on a side where a prediction lies outside of its own."""


def missed(groups: Sequence[Sequence[PredictedFigure]]) -> float:
    """90th percentile of misses over the own interval's half (in ln), groups of one weight; 0 of none [1]."""
    groups = [side for side in groups if side]
    if not groups:
        return 0.0
    far = np.concatenate([[share_of_interval(one) for one in side] for side in groups])
    weight = np.concatenate([np.full(len(side), 1.0 / len(side)) for side in groups])
    return weighted_quantile(far, weight, 0.9)


def share_of_interval(one: PredictedFigure) -> float:
    """How far a figure lies from its prediction, of the way to the end of the interval on its side, in ln [1].

    >>> below = PredictedFigure("", "", "", 0.8, 1.0, 0.9, 1.3)
    >>> round(share_of_interval(below), 2), share_of_interval(replace(below, low=1.05)) > 100.0
    (2.12, True)
    """
    return float(abs(np.log(one.measured / one.predicted)) / reach_of_interval(one))


def reach_of_interval(one: PredictedFigure) -> float:
    """How far the interval of a figure goes on the side of what was measured, in ln [1]."""
    reach = one.high / one.predicted if one.measured > one.predicted else one.predicted / one.low
    return max(float(np.log(reach)), NARROWEST)


def _with(figures: Sequence[PredictedFigure], spread: Spread) -> tuple[PredictedFigure, ...]:
    return tuple(replace(one, low=one.predicted * spread.low, high=one.predicted * spread.high) for one in figures)
