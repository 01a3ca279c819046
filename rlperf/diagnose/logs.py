"""Performance graphs of real runs: stage seconds of a framework's log, or seconds per rank.

What a log does not tell (who waited for whom) is taken from how synchronous rl_steps run: stages follow each other, all
ranks meet between two stages. A log without ranks gives a chain; one with ranks shows who came last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.errors import Problem, SpecError
from rlperf.layout import IntArray
from rlperf.specs.reader import parse_json, read_text, reading
from rlperf.specs.step_log import STAGES, StepLog
from rlperf.units import MOST, MOST_COUNT, human_seconds

ORDER = (g.CONTROLLER, g.ROLLOUT, g.TAIL, g.REWARD, g.DATA_MOVEMENT, g.OFFLOAD, g.SCORING, g.TRAINING, g.FORWARD,
         g.RECOMPUTE, g.BACKWARD, g.COMMUNICATION, g.BUBBLE, g.OPTIMIZER, g.OTHER, g.WEIGHT_SYNC)  # fmt: skip
"""Stages in the order in which a synchronous rl_step runs them."""


class StepSeconds(Protocol):
    """Anything that tells the seconds of one rl_step by stage."""

    @property
    def rl_step(self) -> int:
        """Which rl_step."""
        ...

    @property
    def rl_step_s(self) -> float:
        """Its wall seconds; 0 or NaN where unknown [s]."""
        ...

    def items(self) -> Iterable[tuple[str, float]]:
        """(stage, seconds); names of ACTIVITIES."""
        ...


@dataclass
class LoggedStep:
    """Stage seconds of one rl_step of a framework's log.

    ``tail_share`` : at most this share of the rollout is spent beyond the mean response, 1 - mean / max length [1]
    """

    rl_step: int
    rl_step_s: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict)
    mean_tokens: float = 0.0
    max_tokens: float = 0.0

    @property
    def tail_share(self) -> float:
        """Upper bound of the rollout's share beyond the mean response [1]."""
        return 1.0 - self.mean_tokens / self.max_tokens if 0.0 < self.mean_tokens < self.max_tokens else 0.0

    def items(self) -> list[tuple[str, float]]:
        """(stage, seconds) in the order of an rl_step; the tail apart from the rest of the rollout."""
        found = []
        for activity in ORDER:
            seconds = self.seconds.get(activity, 0.0)
            if activity == g.ROLLOUT:
                seconds *= 1.0 - self.tail_share
            elif activity == g.TAIL:
                seconds = self.seconds.get(g.ROLLOUT, 0.0) * self.tail_share
            if seconds > 0:
                found.append((g.ACTIVITIES[activity], seconds))
        return found


@dataclass(frozen=True)
class RankTiming:
    """One line of a per-rank timing file.

    rl_step, rank : which; stage : name of ACTIVITIES; seconds : of work, waiting excluded [s]; tokens : processed, or
    NaN; part : pipeline stage, or -1; unit : trajectory or micro-batch, or -1
    """

    rl_step: int
    stage: str
    rank: int
    seconds: float
    tokens: float = float("nan")
    part: int = -1
    unit: int = -1


def logged_steps(log: StepLog) -> list[LoggedStep]:
    """The rl_steps of a framework's log that state any stage, one by one.

    Raises
    ------
    SpecError : no rl_step states the seconds of a stage
    """
    names = {name: code for code, name in enumerate(g.ACTIVITIES)}
    found = []
    for k in range(log.n):
        seconds = {names[stage]: float(getattr(log, f"{stage}_s")[k]) for stage in STAGES}
        known = {activity: s for activity, s in seconds.items() if s > 0}
        if known:
            whole, mean, longest = (
                float(np.nan_to_num(c[k])) for c in (log.rl_step_s, log.response_tokens, log.response_tokens_max)
            )
            found.append(LoggedStep(int(log.rl_step[k]), whole, known, mean, longest))
    if not found:
        hint = "`rlperf verdict CONFIG --log` holds whole rl_steps against what they should take"
        raise SpecError(Problem("no rl_step states the seconds of a stage", log.source or None, suggestion=hint))
    return found


def graph_of_steps(steps: Sequence[StepSeconds], devices: int = 0) -> g.PerformanceGraph:
    """Stages of rl_steps: a chain where they add up to at most ``rl_step_s``, what no timer covers being ``other``.

    Where they add up to more, the rollout runs beside the rest (asynchronous and streaming modes).
    """
    if not steps:
        raise SpecError("no rl_step to explain")
    build = g.GraphBuilder(("run",), devices)
    names = {name: code for code, name in enumerate(g.ACTIVITIES)}
    last, now = None, 0.0
    for step in steps:
        items = [(names.get(name, g.OTHER), float(seconds)) for name, seconds in step.items()]
        items.sort(key=lambda item: ORDER.index(item[0]) if item[0] in ORDER else len(ORDER))
        total = sum(seconds for _, seconds in items)
        if 0.0 < step.rl_step_s * (1.0 + OVERLAP) < total:
            beside, own = _beside(items)
            first, first_s = _chain(build, beside, now, last, step.rl_step)
            second, second_s = _chain(build, own, now, last, step.rl_step)
            ends = [index for index in (first, second) if index is not None]
            reached = max(first_s, second_s)
            last = build.barrier(np.concatenate(ends), reached, rl_step=step.rl_step)
            rest = [(g.OTHER, now + step.rl_step_s - reached)]
            now = reached
        else:
            rest = [*items, (g.OTHER, step.rl_step_s - total)]
        last, now = _chain(build, [item for item in rest if item[1] > 0], now, last, step.rl_step)
    return build.freeze()


def _beside(items: Iterable[tuple[int, float]]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Stages of the rollout, and the others."""
    found = list(items)
    return [each for each in found if each[0] in g.IN_ROLLOUT], [each for each in found if each[0] not in g.IN_ROLLOUT]


def too_long(steps: Sequence[LoggedStep]) -> list[str]:
    """What is said of rl_steps whose stages add up to more than they state for the whole, the worst one named."""
    over, against = list[tuple[LoggedStep, float, float]](), list[tuple[LoggedStep, float, float]]()
    for step in steps:
        rollout, rest = (sum(seconds for _, seconds in part) for part in _beside(step.seconds.items()))
        if 0.0 < (most := step.rl_step_s * (1.0 + OVERLAP)) < rollout + rest:
            (against if most < max(rollout, rest) else over).append((step, rollout, rest))
    said = []
    for found, verdict in ((over, _BESIDE), (against, _AGAINST)):
        if found:
            step, rollout, rest = max(found, key=lambda each: (each[1] + each[2]) / each[0].rl_step_s)
            said.append(
                f"in {len(found)} of {len(steps)} rl_steps the stages add up to more than the whole (rl_step "
                f"{step.rl_step}: rollout {human_seconds(rollout)} and others {human_seconds(rest)}, in all "
                f"{human_seconds(step.rl_step_s)}): {verdict}"
            )
    return said


_BESIDE = "the rollout is taken to run beside the others; in a synchronous run the log contradicts itself"
_AGAINST = "the log contradicts itself, even with the rollout beside the others; the stages are believed, not the whole"

OVERLAP = 0.02
"""Stages that add up to this much more than the rl_step must overlap."""


def _chain(
    build: g.GraphBuilder, items: Sequence[tuple[int, float]], now: float, last: IntArray | None, rl_step: int
) -> tuple[IntArray | None, float]:
    """Stages one after another; the last vertex and its end."""
    for activity, seconds in items:
        last = build.add(activity, now, now + seconds, after=last, at=g.Place(rl_step=rl_step))
        now += seconds
    return last, now


def read_rank_timings(path: Path | str) -> list[RankTiming]:
    """Lines of a per-rank timing file (JSONL): rl_step (or step), stage, rank, seconds, and where known tokens, part,
    unit. Every wrong line is reported."""
    names = set(g.ACTIVITIES)
    found: list[RankTiming] = []
    problems: list[Problem] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            with reading(path, number):
                record = parse_json(line, path, number)
                stage = str(record["stage"])
                made = RankTiming(
                    _index(record.get("rl_step", record.get("step", 0))), stage, _index(record["rank"]),
                    float(record["seconds"]), float(record.get("tokens", "nan")) or math.nan,
                    _index(record.get("part", -1)), _index(record.get("unit", -1)),
                )  # fmt: skip
        except SpecError as error:
            problems += [replace(p, suggestion=p.suggestion or DUE) for p in error.problems]
            continue
        if stage not in names:
            problems.append(Problem(f"unknown stage {stage!r}", str(path), number, f"one of {', '.join(g.ACTIVITIES)}"))
        elif not 0 <= made.seconds <= MOST:
            problems.append(Problem("seconds must be finite and not negative", str(path), number))
        elif np.isinf(made.tokens) or made.tokens < 0:
            problems.append(Problem("tokens must be finite and not negative", str(path), number))
        else:
            found.append(made)
    if problems or not found:
        raise SpecError(problems or f"{path}: no timings")
    return found


DUE = "a line needs stage, rank and seconds"


def _index(value: Any) -> int:
    number = int(value)
    if not -1 <= number <= MOST_COUNT:
        raise ValueError(f"{number:.4g} is no rank, rl_step, part or unit")
    return number


def graph_of_ranks(timings: Sequence[RankTiming], devices: int = 0) -> g.PerformanceGraph:
    """All ranks meet after each stage; inside a stage each rank's lines follow each other."""
    build = g.GraphBuilder(("rank",), devices)
    names = {name: code for code, name in enumerate(g.ACTIVITIES)}
    code = np.array([names[t.stage] for t in timings])
    columns = {
        name: np.array([getattr(t, name) for t in timings])
        for name in ("rl_step", "rank", "part", "unit", "tokens", "seconds")
    }
    at_end, now = None, 0.0
    for step in np.unique(columns["rl_step"]):
        here = columns["rl_step"] == step
        stages = sorted(set(code[here].tolist()), key=lambda c: ORDER.index(c) if c in ORDER else len(ORDER))
        for activity in stages:
            rows = np.flatnonzero(here & (code == activity))
            rows = rows[np.argsort(columns["rank"][rows], kind="stable")]
            rank, seconds = columns["rank"][rows], columns["seconds"][rows]
            first = np.concatenate([[True], rank[1:] != rank[:-1]])
            total = np.cumsum(seconds)
            ends = total - np.repeat((total - seconds)[first], np.diff(np.append(np.flatnonzero(first), rows.size)))
            index = build.add(
                activity,
                now + ends - seconds,
                now + ends,
                work=columns["tokens"][rows],
                at=g.Place(rank=rank, part=columns["part"][rows], unit=columns["unit"][rows], rl_step=int(step)),
            )
            if at_end is not None:
                build.edge(at_end, index[first])
            follows = np.flatnonzero(~first)
            if follows.size:
                build.edge(index[follows - 1], index[follows])
            lasts = np.append(first[1:], True)
            now += float(ends.max())
            at_end = build.barrier(index[lasts], now, rl_step=int(step))
    return build.freeze()
