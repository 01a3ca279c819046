"""The planner of pipelines: standard schedules as a floor, joint search, exact proof where the instance is small."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from rlperf.errors import InfeasibleError, Rejection
from rlperf.plan.pipeline.bounds import assignment_bound_s
from rlperf.plan.pipeline.exact import best_plan, structure_count
from rlperf.plan.pipeline.list_schedule import Policy
from rlperf.plan.pipeline.problem import PipelineProblem
from rlperf.plan.pipeline.search import Annealer, Budget, Candidate, Evaluator, Freedom
from rlperf.plan.pipeline.standard import StandardSchedule, standard_schedules, uniform_partition
from rlperf.sim.pipeline import Orders, PipelineTimeline, round_robin, simulate, v_shape

# Passes per device below which annealing one more start does less good than annealing the others longer.
_CHAIN_PER_DEVICE = 60

# Successive halving: how many go on at most, share of all passes, first temperature as a share of the makespan.
_ROUNDS: tuple[tuple[int, float, float], ...] = ((9, 0.75, 8e-3), (2, 0.25, 4e-3))

EVERYTHING = Freedom()

_Choice = tuple[PipelineTimeline, tuple[int, ...], str]
"""Timeline, layers of every stage, and what found it."""


@dataclass(frozen=True)
class PipelinePlan:
    """A partition, a placement and an order, with what they take and how far from optimal they can be.

    partition : layers of each stage; placement : device of each stage; orders : of each device
    makespan_s : of one iteration [s]; bound_s : no plan at all ends before [s]; gap : makespan / bound - 1 [-]
    work_bound_s : the plain bound, max(total work / P, heaviest layer) [s]
    optimal : makespan equals the bound, or an exact search has proven it (``proven``)
    source : name of the standard schedule it is, or ``search`` or ``exact``
    standards : what the standard schedules give; passes, seconds : what the search took
    """

    problem: PipelineProblem
    partition: tuple[int, ...]
    placement: tuple[int, ...]
    timeline: PipelineTimeline
    proven: bool
    source: str
    standards: tuple[StandardSchedule, ...]
    passes: int
    seconds: float

    @cached_property
    def bound_s(self) -> float:
        """An integer program's, solved when somebody asks [s]."""
        return self.makespan_s if self.proven else assignment_bound_s(self.problem)

    @property
    def work_bound_s(self) -> float:
        """The plain bound [s]."""
        return self.problem.work_bound_s

    @property
    def optimal(self) -> bool:
        """Whether no plan ends before."""
        return self.makespan_s <= self.bound_s * (1.0 + 1e-6)

    @property
    def makespan_s(self) -> float:
        """End of the last operation [s]."""
        return self.timeline.makespan_s

    @property
    def orders(self) -> Orders:
        """Operations of each device, in order."""
        return self.timeline.orders

    @property
    def gap(self) -> float:
        """makespan / bound - 1 [-]; 0 where proven optimal."""
        return max(0.0, self.makespan_s / self.bound_s - 1.0) if self.bound_s > 0.0 else 0.0

    @property
    def work_gap(self) -> float:
        """makespan / work bound - 1 [-]."""
        return max(0.0, self.makespan_s / self.work_bound_s - 1.0) if self.work_bound_s > 0.0 else 0.0


def optimize(
    problem: PipelineProblem,
    *,
    freedom: Freedom = EVERYTHING,
    passes: int | None = None,
    time_limit_s: float = 24.0,
    seed: int = 0,
    exact_nodes: int = 150_000,
    progress: Callable[[float], None] | None = None,
) -> PipelinePlan:
    """The best plan found for a pipeline; never slower than any standard schedule that fits.

    Starts from several numbers of stages per device and placements, anneals each a little, and goes on with the better
    half (successive halving). The search is reproducible as long as ``passes`` ends it and not ``time_limit_s``.

    Parameters
    ----------
    freedom : what may differ from the uniform interleaved pipeline (for asking what each decision is worth)
    passes : number of list passes (default: as many as fit about ``time_limit_s``)
    time_limit_s : wall-clock limit of the search [s]
    exact_nodes : after which the exact search of a small instance gives up (some seconds)
    progress : called now and then with the share of passes done

    Raises
    ------
    InfeasibleError : nothing found fits the memory; says what the nearest miss needs
    """
    began = time.monotonic()
    standards = standard_schedules(problem)
    evaluator = Evaluator(problem)
    budget = Budget(passes or passes_within(problem, time_limit_s), began + time_limit_s, progress)
    starts = _starts(problem, freedom)
    best = _anneal(evaluator, freedom, budget, starts, random.Random(seed))
    choices: list[_Choice] = [(s.timeline, s.partition, s.name) for s in standards if s.timeline is not None and s.runs]
    if freedom != EVERYTHING:
        choices = []
    if best is not None:
        choices.append((_timeline(evaluator, best), best.partition(problem.profile.layers), "search"))
    proven = None
    if freedom == EVERYTHING and _is_small(problem):
        limit = min((timeline.makespan_s for timeline, _, _ in choices), default=float("inf"))
        exact, proven = _exact(problem, limit, exact_nodes)
        choices += exact
    if not choices:
        raise _infeasible(problem, standards, len(starts))
    timeline, partition, source = min(choices, key=lambda choice: choice[0].makespan_s)
    return PipelinePlan(
        problem=problem,
        partition=partition,
        placement=timeline.placement,
        timeline=timeline,
        proven=proven is not None,
        source=source,
        standards=standards,
        passes=min(budget.used, budget.passes),
        seconds=time.monotonic() - began,
    )


def _exact(problem: PipelineProblem, limit_s: float, max_nodes: int) -> tuple[list[_Choice], float | None]:
    """The exact search's choice, if it is below the limit, and the shortest makespan if that is proven [s]."""
    found = best_plan(problem, limit_s, max_nodes=max_nodes)
    proven = found.makespan_s if found.proven else None
    if found.orders is None:
        return [], proven
    part = Candidate(found.cuts, found.placement, Policy(), ()).partition(problem.profile.layers)
    return [(simulate(problem.costs(found.cuts), found.placement, found.orders), part, "exact")], proven


def _is_small(problem: PipelineProblem) -> bool:
    """Whether the exact search has a chance; it knows no queues on links, so transfers must be free."""
    free = problem.bandwidth_bytes_per_s == float("inf") and problem.latency_s == 0.0
    operations = 3 * problem.profile.layers * problem.microbatches.count
    return free and operations <= 54 and structure_count(problem) <= 5000


def passes_within(problem: PipelineProblem, time_limit_s: float) -> int:
    """List passes that take about two thirds of the time on one core, as many on every machine.

    Most passes end early, so their cost grows slower than operations.
    """
    operations = 3 * 4 * problem.devices * problem.microbatches.count
    return max(200, int(time_limit_s / (2.4e-5 * operations**0.54)))


def _cuts(partition: tuple[int, ...]) -> tuple[int, ...]:
    edges, at = [], 0
    for part in partition[:-1]:
        at += part
        edges.append(at)
    return tuple(edges)


def _starts(problem: PipelineProblem, freedom: Freedom) -> list[Candidate]:
    """Uniform partitions of 1, 2, .. stages per device, round robin and back and forth, a few policies each."""
    P = problem.devices
    sequence = tuple(range(problem.microbatches.count))
    orders = [sequence]
    if not problem.microbatches.identical:
        by_size = sorted(sequence, key=lambda m: float(problem.microbatches.linear[m]))
        orders += [tuple(by_size), tuple(reversed(by_size))]
    if freedom.schedule:
        policies = [Policy(u, p, False) for u in (0.25, 0.5, 1.0, 4.0) for p in (0.05, 0.3)]
    else:
        policies = [Policy(u, 0.0, True) for u in (0.25, 0.5, 1.0, 4.0)]
    starts = []
    # One stage per device comes last: it is the hardest to get away from.
    for chunks in (*range(2, problem.stages_per_device + 1), 1):
        if not freedom.partition and chunks != 2 and problem.stages_per_device >= 2:
            continue
        part = uniform_partition(problem, chunks * P)
        if part is None:
            if chunks > 1:
                continue
            part = (1,) * (P - 1) + (problem.profile.layers - P + 1,)
        shapes = [round_robin(chunks * P, P)]
        if chunks > 1 and freedom.placement:
            shapes.insert(0, v_shape(chunks * P, P))
        starts += [
            Candidate(_cuts(part), shape, policy, order) for shape in shapes for policy in policies for order in orders
        ]
    return starts


def _anneal(
    evaluator: Evaluator,
    freedom: Freedom,
    budget: Budget,
    starts: list[Candidate],
    rng: random.Random,
) -> Candidate | None:
    """Rank the starts by one pass each, then anneal the best of each shape with successive halving."""
    annealer = Annealer(evaluator, freedom, budget, rng)
    ranked: list[tuple[float, int, Candidate]] = []
    for index, uniform in enumerate(starts):
        budget.spend()
        start = annealer.make_room(uniform, 400)
        found = evaluator.evaluate(start)
        if found is not None:
            ranked.append((found.makespan_s, index, start))
    if not ranked:
        return None
    shapes: dict[tuple[int, ...], tuple[float, int, Candidate]] = {}
    for entry in ranked:
        if entry[0] < shapes.get(entry[2].placement, (float("inf"),))[0]:
            shapes[entry[2].placement] = entry
    field = list(shapes.values())
    total = budget.passes - budget.used
    for level, (most, share, hot) in enumerate(_ROUNDS):
        keep = max(1, min(most, int(total * share / (_CHAIN_PER_DEVICE * evaluator.problem.devices))))
        if level:  # the first round takes different shapes, whatever they are worth before they are annealed
            field.sort(key=lambda e: e[:2])
        field = (field * keep)[:keep]
        annealed = []
        for cost, index, candidate in field:
            better, value = annealer.run(candidate, max(1, int(total * share / keep)), hot)
            annealed.append((min(value, cost), index, better if value <= cost else candidate))
        field = annealed
    return min(field, key=lambda e: e[:2])[2]


def _timeline(evaluator: Evaluator, best: Candidate) -> PipelineTimeline:
    """The exact times of the winner, from the stated order alone."""
    problem = evaluator.problem
    found = evaluator.evaluate(best)
    assert found is not None
    partition = best.partition(problem.profile.layers)
    costs = problem.stage_costs(partition)
    orders = found.orders(len(partition), problem.microbatches.count)
    return simulate(costs, best.placement, orders, merged=best.policy.merged, overlap=problem.overlap)


def _infeasible(problem: PipelineProblem, standards: tuple[StandardSchedule, ...], tried: int) -> InfeasibleError:
    misses = [s for s in standards if s.timeline is not None and s.reason]
    nearest = min(misses, key=lambda s: float(s.timeline.peak_memory_bytes.max()) if s.timeline else 0.0, default=None)
    return InfeasibleError(
        f"no pipeline of {problem.profile.name} on {problem.devices} devices fits the memory",
        [Rejection("does not fit the memory", tried + len(misses))],
        None if nearest is None else f"{nearest.name} {nearest.reason}",
    )
