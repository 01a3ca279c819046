"""Ranked causes of an rl_step's time: what each costs, alone and together, along which path, and what removes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from typing import Literal

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.diagnose.advice import Advice, advice_for
from rlperf.diagnose.faults import Fault, Thresholds, find_faults
from rlperf.diagnose.paths import fault_path, structural_path
from rlperf.diagnose.structure import structural_changes
from rlperf.units import human_seconds, human_share

FLOOR = 0.01
"""Share of the rl_step below which a loss is not reported: repeated runs of one configuration differ by more."""
MOST_TOGETHER = 6


@dataclass(frozen=True)
class Cause:
    """One reason why an rl_step takes as long as it does.

    Attributes
    ----------
    kind : name of the cause
    nature : ``fault`` (abnormal against its peers) or ``structure`` (what the plan pays by design)
    where : place in words
    loss_s : rl_step as it is, minus the rl_step with this cause alone made ideal [s]
    joint_s : the same, averaged over all orders of removing the faults (Shapley value): faults that hide each other
        have a small ``loss_s`` and a larger ``joint_s`` [s]
    share : larger of both over the rl_step [1]
    evidence : how it shows, in words
    path : from the end of the rl_step back to the root, in words
    advice : knobs that remove it
    method : how ``loss_s`` was found: the graph replayed, or the rl_step simulated again
    """

    kind: str
    nature: Literal["fault", "structure"]
    where: str
    loss_s: float
    joint_s: float
    share: float
    evidence: str
    path: tuple[str, ...]
    advice: tuple[Advice, ...]
    rank: int = -1
    part: int = -1
    method: Literal["replay", "simulation"] = "replay"

    @property
    def nature_words(self) -> str:
        """``fault`` or ``by design``."""
        return "fault" if self.nature == "fault" else "by design"

    def __str__(self) -> str:
        named = f"{self.kind.replace('_', ' ')} ({self.nature_words}) at {self.where}"
        return f"{named}: {human_seconds(self.loss_s)}, {human_share(self.share)}; {self.evidence}"


@dataclass(frozen=True)
class Interaction:
    """Two causes whose what-ifs do not add up.

    ``together_s`` is won by removing both; ``excess_s`` is that minus the sum of the single losses: positive where they
    hide each other, negative where each removes a part of the same wait.
    """

    kinds: tuple[str, str]
    together_s: float
    excess_s: float


@dataclass(frozen=True)
class Explanation:
    """Why an rl_step takes ``rl_step_s``.

    Attributes
    ----------
    rl_step_s : seconds per rl_step
    floor_s : losses below it are not reported [s]
    causes : as `ranked` orders them
    critical_s : seconds per rl_step of each activity on the critical path, the largest first
    interactions : pairs of causes that do not add up, above the floor
    notes : what was assumed or could not be seen
    """

    rl_step_s: float
    floor_s: float
    causes: tuple[Cause, ...]
    critical_s: tuple[tuple[str, float], ...] = ()
    interactions: tuple[Interaction, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"rl_step {human_seconds(self.rl_step_s)}"
        causes = [f"{cause}" for cause in self.causes] or ["nothing is abnormal"]
        return "\n".join([head, *causes, *(f"note: {note}" for note in self.notes)])

    @property
    def faults(self) -> tuple[Cause, ...]:
        """Causes that are abnormal."""
        return tuple(c for c in self.causes if c.nature == "fault")


def explain_graph(
    graph: g.PerformanceGraph,
    *,
    floor: float = FLOOR,
    limits: Thresholds | None = None,
    extra_faults: Sequence[Fault] = (),
    notes: Sequence[str] = (),
) -> Explanation:
    """Explain a performance graph.

    Parameters
    ----------
    floor : share of the rl_step below which nothing is reported [1]
    extra_faults : found by other means, such as a comparison of scales
    """
    rl_step_s = graph.rl_step_s()
    floor_s = floor * rl_step_s
    found = _without_doubles([*find_faults(graph, limits), *extra_faults])
    losses = _joint_losses(graph, found)
    pairs = list(zip(found, losses, strict=True))
    faults = [_cause(graph, f, alone, joint, rl_step_s) for f, (alone, joint) in pairs if max(alone, joint) >= floor_s]
    # What is a fault already is not said again as a cost of the plan.
    said = {c.kind for c in faults}
    changes = {name: change for name, change in structural_changes(graph).items() if name not in said}
    single = {name: rl_step_s - graph.what_if_s(change) for name, change in changes.items()}
    costs = [_structural(graph, name, changes[name], single[name], rl_step_s) for name in changes]
    costs = [c for c in costs if c.loss_s >= floor_s]
    together = {f.kind + ": " + f.where: (f.change, a) for f, (a, j) in pairs if max(a, j) >= floor_s}
    together |= {c.kind: (changes[c.kind], c.loss_s) for c in costs}
    found_pairs = _interactions(graph, together, rl_step_s, floor_s)
    return Explanation(
        rl_step_s, floor_s, ranked([*faults, *costs]), critical_seconds(graph), found_pairs, tuple(notes)
    )


def simulated(cause: Cause, loss_s: float, rl_step_s: float) -> Cause:
    """The cause with its loss found by simulating again. The joint loss of faults stays the graph's."""
    joint_s = cause.joint_s if cause.nature == "fault" else loss_s
    share = max(loss_s, joint_s) / rl_step_s if rl_step_s > 0 else 0.0
    evidence = cause.evidence if cause.nature == "fault" else _by_design(share)
    advice = tuple(replace(a, gain_s=loss_s) for a in cause.advice)
    return replace(
        cause, loss_s=loss_s, joint_s=joint_s, share=share, evidence=evidence, advice=advice, method="simulation"
    )


def _by_design(share: float) -> str:
    return f"without it the rl_step is {human_share(share, 1)} shorter"


def ranked(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """Faults first, then what the plan pays by design, each by seconds.

    Structural costs are often larger (a tail costs a third of many rl_steps) and known; a fault is news.
    """
    return tuple(sorted(causes, key=lambda c: (c.nature != "fault", -max(c.loss_s, c.joint_s))))


def critical_seconds(graph: g.PerformanceGraph) -> tuple[tuple[str, float], ...]:
    """Seconds per rl_step of each activity on the critical path, the largest first; gaps are ``waiting``."""
    path = graph.critical_path()
    steps = max(np.unique(graph.rl_step).size, 1)
    seconds = np.bincount(graph.activity[path], graph.duration_s[path], len(g.ACTIVITIES)) / steps
    rows = [(name, float(s)) for name, s in zip(g.ACTIVITIES, seconds, strict=True) if s > 0]
    gaps = float(np.maximum(graph.gap_s[path], 0.0).sum()) / steps
    if gaps > 1e-9 * max(graph.rl_step_s(), 1.0):
        rows.append(("waiting", gaps))
    return tuple(sorted(rows, key=lambda row: -row[1]))


def _without_doubles(found: list[Fault]) -> list[Fault]:
    """A kind is reported once per place; the first finding wins. Findings of one link or device are one fault."""
    merged: dict[tuple[str, int, int], Fault] = {}
    for fault in found:
        key = (fault.kind, fault.pool, fault.rank)
        before = merged.get(key)
        if before is None:
            merged[key] = fault
        elif fault.kind in ("slow_link", "slow_tool"):
            merged[key] = replace(
                before, change=before.change & fault.change, vertices=before.vertices | fault.vertices
            )
    return list(merged.values())


def _joint_losses(graph: g.PerformanceGraph, faults: list[Fault]) -> list[tuple[float, float]]:
    """(alone, Shapley value) of every fault [s]; beyond `MOST_TOGETHER` faults the small ones count alone only."""
    rl_step_s = graph.rl_step_s()
    alone = [rl_step_s - graph.what_if_s(fault.change) for fault in faults]
    if len(faults) < 2:
        return [(loss, loss) for loss in alone]
    every = graph.unchanged()
    for fault in faults:
        every &= fault.change
    best = graph.what_if_s(every)
    last = []
    for k in range(len(faults)):
        rest = graph.unchanged()
        for i, fault in enumerate(faults):
            rest = rest & fault.change if i != k else rest
        last.append(graph.what_if_s(rest) - best)
    weight = np.maximum(alone, last)
    chosen = np.argsort(-weight, kind="stable")[:MOST_TOGETHER].tolist()
    won: dict[frozenset[int], float] = {frozenset(): 0.0}
    for size in range(1, len(chosen) + 1):
        for subset in combinations(chosen, size):
            change = graph.unchanged()
            for i in subset:
                change &= faults[i].change
            won[frozenset(subset)] = rl_step_s - graph.what_if_s(change)
    joint = list(alone)
    n = len(chosen)
    for i in chosen:
        others = [s for s in won if i not in s]
        joint[i] = sum((won[s | {i}] - won[s]) / (n * comb(n - 1, len(s))) for s in others)
    return list(zip(alone, joint, strict=True))


def _cause(graph: g.PerformanceGraph, fault: Fault, alone: float, joint: float, rl_step_s: float) -> Cause:
    return Cause(
        fault.kind,
        "fault",
        fault.where,
        alone,
        joint,
        max(alone, joint) / rl_step_s,
        fault.evidence,
        fault_path(graph, fault),
        advice_for(fault.kind, alone, shares_devices=graph.shares_devices),
        fault.rank,
        fault.part,
    )


def _structural(graph: g.PerformanceGraph, name: str, change: g.Change, loss_s: float, rl_step_s: float) -> Cause:
    share = loss_s / rl_step_s if rl_step_s > 0 else 0.0
    where, path = structural_path(graph, name, change)
    advice = advice_for(name, loss_s, shares_devices=graph.shares_devices)
    return Cause(name, "structure", where, loss_s, loss_s, share, _by_design(share), path, advice)


def _interactions(
    graph: g.PerformanceGraph, causes: dict[str, tuple[g.Change, float]], rl_step_s: float, floor_s: float
) -> tuple[Interaction, ...]:
    """Pairs of the six largest causes whose sum differs from removing both by more than the floor."""
    largest = sorted(causes, key=lambda name: -causes[name][1])[:MOST_TOGETHER]
    found = []
    for a, b in combinations(largest, 2):
        together = rl_step_s - graph.what_if_s(causes[a][0] & causes[b][0])
        excess = together - causes[a][1] - causes[b][1]
        if abs(excess) >= max(floor_s, 1e-9):
            found.append(Interaction((a, b), together, excess))
    return tuple(sorted(found, key=lambda i: -abs(i.excess_s)))
