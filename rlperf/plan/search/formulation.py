r"""The integer program over screened columns. Pure: arrays in, a `pulp.LpProblem` out; no solver is called here.

Sets
    slots :math:`k` (a task in a group of rl_steps), columns :math:`c \in C_k` (a configuration and its predicted cost),
    configurations :math:`f(c)` (equal in two slots when nothing has to be moved between them), checkpoints :math:`h(c)`
    (equal where one goes on from the other's).
Variables
    :math:`x_{kc} \in \{0, 1\}` column c serves slot k; :math:`y_{kf} \ge 0` slot k enters configuration f anew.

.. math::

    \min \sum_k \sum_c v_{kc} x_{kc} + \sum_{k} s_k \sum_f y_{kf}

    \text{choose:}\quad \sum_c x_{kc} = 1 \quad \forall k

    \text{switch:}\quad y_{kf} \ge \sum_{c: f(c) = f} x_{kc} - \sum_{c: f(c) = f} x_{k^- c} \quad \forall k, f

    \text{resume:}\quad \sum_{c: h(c) = h} x_{kc} \le \sum_{c: h(c) = h} x_{k^- c} \quad \forall k, h

    \text{handover:}\quad \text{the same between tasks that follow each other, at what all their handovers cost}

    \text{share:}\quad \sum_{k \in g} \sum_c u_{kc} x_{kc} \le U \quad \forall \text{ groups } g \text{ run together}

    \text{budget:}\quad \sum_k \sum_c w_{kc} x_{kc} \le W

On a chain of slots the switch rows are the linear relaxation of the uniform metric on a path, which is integral, so the
program is hard only through handovers, share and budget (Kleinberg and Tardos, J. ACM 49(5), 2002, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlperf.layout import FloatArray, IntArray

if TYPE_CHECKING:
    import pulp


@dataclass(frozen=True)
class Slot:
    """One decision: a task in a group of rl_steps, with its columns.

    Attributes
    ----------
    name : unique text, used in the names of variables and rows
    cost : v, objective of each column over the whole slot ``[columns]``
    configuration : f, equal numbers mean that nothing moves between two slots ``[columns]``
    previous : index of the slot before this one in time, or None
    resumes : index of the slot whose checkpoint it goes on from, or None
    checkpoint : h, equal numbers read each other's checkpoints ``[columns]`` (None: all do)
    switch : s, cost of entering another configuration than the previous slot's [unit of the objective]
    share : u, devices that each column takes while it runs ``[columns]`` (None: all of them, one task at a time)
    share_group : slots of equal group run at the same time
    budget : w, consumption of each column against the program's budget ``[columns]``
    """

    name: str
    cost: FloatArray
    configuration: IntArray
    previous: int | None = None
    resumes: int | None = None
    checkpoint: IntArray | None = None
    switch: float = 0.0
    share: FloatArray | None = None
    share_group: int | None = None
    budget: FloatArray | None = None


@dataclass(frozen=True)
class Handover:
    """Two slots that follow each other on the same devices; ``cost``: where their configurations differ, all times."""

    first: int
    second: int
    cost: float


@dataclass(frozen=True)
class Program:
    """All slots with what couples them."""

    slots: tuple[Slot, ...]
    share_limit: float | None = None
    budget_limit: float | None = None
    handovers: tuple[Handover, ...] = ()


@dataclass
class Formulation:
    """The pulp problem and the variables by (slot, column)."""

    problem: pulp.LpProblem
    choose: list[list[pulp.LpVariable]] = field(default_factory=list)


def formulate(program: Program) -> Formulation:
    """The integer program of ``program`` (symbols: module docstring)."""
    import pulp

    problem = pulp.LpProblem("rlperf_plan", pulp.LpMinimize)
    choose = [
        [problem.add_variable(f"x_{slot.name}_{c}", cat="Binary") for c in range(len(slot.cost))]
        for slot in program.slots
    ]
    terms = [
        (x, float(v))
        for xs, slot in zip(choose, program.slots, strict=True)
        for x, v in zip(xs, slot.cost, strict=True)
    ]
    for index, (slot, xs) in enumerate(zip(program.slots, choose, strict=True)):
        problem += pulp.lpSum(xs) == 1, f"choose_{slot.name}"
        if slot.previous is not None:
            change = Handover(slot.previous, index, slot.switch)
            terms += _change_rows(problem, program.slots, choose, change, ("y", "switch", slot.name))
        _resume_rows(problem, program.slots, choose, index)
    for handover in program.handovers:
        names = ("z", "handover", f"{program.slots[handover.first].name}_{program.slots[handover.second].name}")
        terms += _change_rows(problem, program.slots, choose, handover, names)
    _share_rows(problem, program, choose)
    if program.budget_limit is not None:
        used = [
            float(w) * x
            for slot, xs in zip(program.slots, choose, strict=True)
            if slot.budget is not None
            for x, w in zip(xs, slot.budget, strict=True)
        ]
        problem += pulp.lpSum(used) <= program.budget_limit, "budget"
    problem.setObjective(pulp.LpAffineExpression(terms))
    return Formulation(problem, choose)


def _change_rows(
    problem: pulp.LpProblem, slots: Sequence[Slot], choose: list[list[pulp.LpVariable]], change: Handover,
    names: tuple[str, str, str],
) -> list[tuple[pulp.LpVariable, float]]:  # fmt: skip
    """Rows of one possible change of configuration and the objective terms of their variables.

    ``names`` : of the variables, of the rows, and what both end in
    """
    import pulp

    if change.cost <= 0:
        return []
    before, slot = slots[change.first], slots[change.second]
    terms = []
    for f in np.unique(slot.configuration):
        y = problem.add_variable(f"{names[0]}_{names[2]}_{f}", lowBound=0)
        now = pulp.lpSum(choose[change.second][c] for c in np.flatnonzero(slot.configuration == f))
        then = pulp.lpSum(choose[change.first][c] for c in np.flatnonzero(before.configuration == f))
        problem += y >= now - then, f"{names[1]}_{names[2]}_{f}"
        terms.append((y, float(change.cost)))
    return terms


def _resume_rows(
    problem: pulp.LpProblem, slots: Sequence[Slot], choose: list[list[pulp.LpVariable]], index: int
) -> None:
    """Rows ``resume``: a slot goes on from a checkpoint that its column reads."""
    import pulp

    slot = slots[index]
    if slot.resumes is None or slot.checkpoint is None:
        return
    written = slots[slot.resumes].checkpoint
    for h in np.unique(slot.checkpoint):
        now = pulp.lpSum(choose[index][c] for c in np.flatnonzero(slot.checkpoint == h))
        then = pulp.lpSum(choose[slot.resumes][c] for c in np.flatnonzero(written == h))
        problem += now <= then, f"resume_{slot.name}_{h}"


def _share_rows(problem: pulp.LpProblem, program: Program, choose: list[list[pulp.LpVariable]]) -> None:
    """Rows ``share``: tasks that run at the same time take at most the cluster's devices."""
    import pulp

    if program.share_limit is None:
        return
    groups = sorted({slot.share_group for slot in program.slots if slot.share_group is not None})
    for group in groups:
        taken = [
            float(u) * x
            for slot, xs in zip(program.slots, choose, strict=True)
            if slot.share_group == group and slot.share is not None
            for x, u in zip(xs, slot.share, strict=True)
        ]
        problem += pulp.lpSum(taken) <= program.share_limit, f"share_{group}"


def value_of(program: Program, chosen: Sequence[int]) -> float:
    """Objective of a choice of one column per slot, switching included; infinite where a limit is broken."""
    total = 0.0
    for slot, c in zip(program.slots, chosen, strict=True):
        total += float(slot.cost[c])
        if slot.previous is not None:
            before = program.slots[slot.previous].configuration[chosen[slot.previous]]
            total += slot.switch * bool(before != slot.configuration[c])
    for handover in program.handovers:
        pair = [program.slots[index].configuration[chosen[index]] for index in (handover.first, handover.second)]
        total += handover.cost * bool(pair[0] != pair[1])
    return total if _resumes(program, chosen) and _within_limits(program, chosen) else float("inf")


def _resumes(program: Program, chosen: Sequence[int]) -> bool:
    """Whether every slot reads the checkpoint that it goes on from."""
    return all(
        slot.resumes is None
        or slot.checkpoint is None
        or (written := program.slots[slot.resumes].checkpoint) is None
        or bool(written[chosen[slot.resumes]] == slot.checkpoint[c])
        for slot, c in zip(program.slots, chosen, strict=True)
    )


def _within_limits(program: Program, chosen: Sequence[int]) -> bool:
    pairs = list(zip(program.slots, chosen, strict=True))
    if program.share_limit is not None:
        groups = {slot.share_group for slot in program.slots if slot.share_group is not None}
        for group in groups:
            taken = sum(float(s.share[c]) for s, c in pairs if s.share_group == group and s.share is not None)
            if taken > program.share_limit * (1 + 1e-9):
                return False
    if program.budget_limit is not None:
        used = sum(float(s.budget[c]) for s, c in pairs if s.budget is not None)
        if used > program.budget_limit * (1 + 1e-9):
            return False
    return True
