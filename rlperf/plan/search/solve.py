"""Solve the program: shortest path where nothing couples the chains, HiGHS otherwise."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlperf.errors import InfeasibleError, SolverError
from rlperf.layout import FloatArray, IntArray
from rlperf.plan.search.formulation import Program, Slot, formulate, value_of

if TYPE_CHECKING:
    import pulp


@dataclass(frozen=True)
class Solution:
    """Chosen column of every slot, the objective, a proven lower bound and how it was found."""

    chosen: tuple[int, ...]
    objective: float
    bound: float
    method: str

    @property
    def gap(self) -> float:
        """(objective - bound) / objective."""
        return max(self.objective - self.bound, 0.0) / abs(self.objective) if self.objective else 0.0


TIME_LIMIT_S = 60.0
"""What the solver may take [s]."""


def solve(program: Program, *, method: str = "auto") -> Solution:
    """Best column of every slot.

    Chains that no handover, share or budget row couples are solved exactly by a shortest path over time (``path``), the
    rest by the integer program (``program``); ``auto`` picks.

    Raises
    ------
    InfeasibleError : a slot without columns, or limits that no choice keeps
    SolverError : no solver answered in time
    """
    for slot in program.slots:
        if len(slot.cost) == 0:
            raise InfeasibleError(f"{slot.name}: no column is left")
    coupled = program.share_limit is not None or program.budget_limit is not None or bool(program.handovers)
    coupled = coupled or any(slot.resumes not in (None, slot.previous) for slot in program.slots)
    if method == "path" or (method == "auto" and not coupled):
        chosen = _shortest_paths(program)
        objective = value_of(program, chosen)
        if not np.isfinite(objective):
            raise InfeasibleError("no column of a slot reads the checkpoint of the slot before")
        return Solution(chosen, objective, objective, "shortest path")
    return _integer_program(program)


def _shortest_paths(program: Program) -> tuple[int, ...]:
    """Per chain of slots: cheapest path through the columns (Bellman), O(slots x columns)."""
    following = {slot.previous: index for index, slot in enumerate(program.slots) if slot.previous is not None}
    chosen = [0] * len(program.slots)
    for index, slot in enumerate(program.slots):
        if slot.previous is None:
            chain = [index]
            while chain[-1] in following:
                chain.append(following[chain[-1]])
            for position, column in zip(chain, _path([program.slots[i] for i in chain]), strict=True):
                chosen[position] = column
    return tuple(chosen)


def _path(chain: list[Slot]) -> list[int]:
    cost: FloatArray = np.asarray(chain[0].cost, dtype=np.float64)
    back: list[np.ndarray] = []
    for before, slot in pairwise(chain):
        reach, source = np.full(len(slot.cost), np.inf), np.zeros(len(slot.cost), dtype=np.int64)
        for c, f in enumerate(slot.configuration):
            read = _written(before, slot, c)
            if len(read):
                source[c] = read[np.argmin(cost[read])]
                reach[c] = cost[source[c]] + slot.switch
            same = read[before.configuration[read] == f]
            if len(same) and cost[same].min() < reach[c]:
                source[c] = same[np.argmin(cost[same])]
                reach[c] = cost[source[c]]
        cost = reach + slot.cost
        back.append(source)
    columns = [int(np.argmin(cost))]
    for source in reversed(back):
        columns.append(int(source[columns[-1]]))
    return columns[::-1]


def _written(before: Slot, slot: Slot, column: int) -> IntArray:
    """Columns of the slot before whose checkpoint a column reads."""
    if slot.resumes is None or slot.checkpoint is None:
        return np.arange(len(before.cost))
    return np.flatnonzero(before.checkpoint == slot.checkpoint[column])


def _integer_program(program: Program) -> Solution:
    import pulp

    scaled, scale = _scaled(program)
    formulation = formulate(scaled)
    _run(formulation.problem)
    status = formulation.problem.status
    if status == pulp.LpStatusInfeasible:
        raise InfeasibleError("no combination of columns keeps the limits that couple the tasks")
    if status != pulp.LpStatusOptimal:
        raise SolverError(f"HiGHS stopped with status {pulp.LpStatus[status]}")
    chosen = tuple(int(np.argmax([x.value() or 0.0 for x in xs])) for xs in formulation.choose)
    objective = value_of(program, chosen)
    bound = min(_proven_bound(formulation.problem) * scale, objective)
    return Solution(chosen, objective, bound, "HiGHS")


def _scaled(program: Program) -> tuple[Program, float]:
    """Costs divided by their median, so that the solver's tolerances mean the same in seconds and in USD."""
    scale = float(np.median([np.min(slot.cost) for slot in program.slots])) or 1.0
    slots = tuple(replace(slot, cost=slot.cost / scale, switch=slot.switch / scale) for slot in program.slots)
    handovers = tuple(replace(handover, cost=handover.cost / scale) for handover in program.handovers)
    return replace(program, slots=slots, handovers=handovers), scale


def _run(problem: pulp.LpProblem) -> None:
    """HiGHS on one thread, so that a plan does not depend on the machine."""
    import pulp

    solver = pulp.HiGHS(msg=False, timeLimit=TIME_LIMIT_S, gapRel=1e-9, threads=1)
    if not solver.available():
        raise SolverError("HiGHS is not installed (highspy)")
    try:
        with _BANNER:
            _past_the_banner()
        problem.solve(solver)
    except pulp.PulpSolverError as error:
        raise SolverError(f"HiGHS: {error}") from error


_BANNER = threading.Lock()
"""Standard output is the process's: two threads at once would each restore what the other had set."""


@cache
def _past_the_banner() -> None:
    """HiGHS 1.16 prints its banner once a process, before it can be told not to: then standard output is elsewhere."""
    import highspy

    try:
        kept = os.dup(1)
    except OSError:  # closed: nothing can be printed
        return
    try:
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            highspy.Highs()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _proven_bound(problem: pulp.LpProblem) -> float:
    """Lower bound that HiGHS proved."""
    return float(problem.solverModel.getInfo().mip_dual_bound)
