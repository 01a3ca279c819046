"""The planner: slots of a job screened, solved as one program, re-judged by simulation, and explained."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlperf.errors import InfeasibleError, Rejection
from rlperf.layout import FloatArray
from rlperf.plan.configuration import Configuration
from rlperf.plan.context import Context, TaskContext
from rlperf.plan.evaluate import Evaluation, Judge
from rlperf.plan.explain import binding, differences
from rlperf.plan.formulation import Program, Slot
from rlperf.plan.plan import Phase, Plan, RunnerUp
from rlperf.plan.prediction import prediction_of
from rlperf.plan.screen import Screened, objective_of, screen
from rlperf.plan.solve import Solution, solve
from rlperf.plan.uncertainty import distinguishable, interval
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job

JUDGED = 12
"""Finalists per slot that the event simulator re-judges."""
TIE = 1e-6
"""Share of the objective that a doubling of a degree costs: decides between equals, for the simpler one."""
Report = Callable[[float, str], None]


@dataclass(frozen=True, eq=False)
class Decision:
    """A slot of the program with what stands behind its columns."""

    name: str
    task: TaskContext
    rl_steps: tuple[int, int]
    screened: Screened
    evaluations: tuple[Evaluation, ...]
    objective: FloatArray
    previous: int | None


def plan_job(context: Context, *, facts: FrameworkFacts | None = None, report: Report | None = None) -> Plan:
    """The best plan for a resolved job.

    Parameters
    ----------
    facts : the framework's validity rules; candidates that break one are not planned
    report : called with the share done and a text

    Raises
    ------
    InfeasibleError : nothing fits; with what was rejected, and the nearest miss
    SolverError : the integer program was not solved

    Returns
    -------
    Plan; its objective and bound are those of the judged program.
    """
    started = time.perf_counter()
    tell = report or (lambda _share, _text: None)
    decisions = decide(context, facts, tell)
    tell(0.9, "solving")
    program = program_of(context, decisions)
    solution = solve(program)
    phases = [_phase(context, decision, column) for decision, column in zip(decisions, solution.chosen, strict=True)]
    return Plan(
        job=context.job,
        status="optimal" if solution.gap <= 1e-6 else "feasible",
        objective=solution.objective,
        bound=solution.bound,
        mip_gap=solution.gap,
        candidates=sum(decision.screened.candidates for decision in decisions),
        rejected=_rejected(decisions),
        screen_regret=_regret(decisions, solution),
        seconds=time.perf_counter() - started,
        plan=tuple(merged(phases)),
    )


def decide(context: Context, facts: FrameworkFacts | None, tell: Report) -> list[Decision]:
    """Every slot, screened and judged."""
    decisions: list[Decision] = []
    groups = rl_step_groups(context.job)
    total = len(context.tasks) * len(groups)
    for task in context.tasks:
        judge = Judge(context, task)
        for index, rl_steps in enumerate(groups):
            tell(0.9 * len(decisions) / total, f"{task.task.name}, rl_steps {rl_steps[0]} to {rl_steps[1]}")
            demands = tuple(task.source.demand(batch, rl_steps, context.job.seed) for batch in task.batches)
            screened = screen(context, task, demands, facts)
            if not screened.configurations:
                raise _infeasible(context, task, rl_steps, screened)
            evaluations = tuple(
                judge.evaluate(demands[d], configuration)
                for d, configuration in zip(screened.demand[:JUDGED], screened.configurations[:JUDGED], strict=True)
            )
            objective = np.array(
                [judged_objective(context, e) * (1.0 + TIE * e.configuration.complexity) for e in evaluations]
            )
            name = f"{len(decisions)}"
            previous = len(decisions) - 1 if index else None
            decisions.append(Decision(name, task, rl_steps, screened, evaluations, objective, previous))
    return decisions


def rl_step_groups(job: Job) -> list[tuple[int, int]]:
    """(first, last) of every group of rl_steps in the horizon.

    >>> from types import SimpleNamespace as N
    >>> rl_step_groups(N(horizon=N(rl_steps=25, group=10)))
    [(0, 9), (10, 19), (20, 24)]
    """
    size = job.horizon.group or job.horizon.rl_steps
    return [(start, min(start + size, job.horizon.rl_steps) - 1) for start in range(0, job.horizon.rl_steps, size)]


def judged_objective(context: Context, evaluation: Evaluation) -> float:
    """Objective of one rl_step by the judge."""
    seconds = np.array([evaluation.step_s])
    return float(objective_of(context, evaluation.demand, evaluation.configuration.devices, seconds)[0])


def program_of(context: Context, decisions: list[Decision]) -> Program:
    """The judged columns as an integer program; without a stated switching cost the layout never changes."""
    serial: dict[tuple[object, ...], int] = {}
    slots = []
    switch = context.job.horizon.switch
    for decision in decisions:
        count = decision.rl_steps[1] - decision.rl_steps[0] + 1
        same = [serial.setdefault(_layout_key(e.configuration), len(serial)) for e in decision.evaluations]
        slots.append(
            Slot(
                name=decision.name,
                cost=decision.objective * count,
                configuration=np.array(same, dtype=np.int64),
                previous=decision.previous,
                switch=_switch_value(context, decision, switch),
            )
        )
    return Program(tuple(slots))


def _layout_key(configuration: Configuration) -> tuple[object, ...]:
    """What has to be equal for nothing to move: mode and pools, not the batch."""
    return (configuration.mode, configuration.staleness, configuration.pools)


def _switch_value(context: Context, decision: Decision, switch_s: float | None) -> float:
    """Cost of entering another layout, in the objective's unit; prohibitive where the user states none."""
    seconds = switch_s if switch_s is not None else 1e7
    best = decision.evaluations[int(np.argmin(decision.objective))]
    per_second = float(decision.objective.min()) / best.step_s
    return seconds * per_second


def _phase(context: Context, decision: Decision, column: int) -> Phase:
    """The plan's words for the chosen column of a slot."""
    chosen = decision.evaluations[column]
    configuration = chosen.configuration
    others = [e for index, e in enumerate(decision.evaluations) if index != column]
    rank = np.argsort([judged_objective(context, e) for e in others], kind="stable")
    runner_up = _runner_up(context, decision, column, others[int(rank[0])]) if others else None
    return Phase(
        tasks=(decision.task.task.name,),
        rl_steps=decision.rl_steps,
        mode=configuration.mode,
        staleness=configuration.staleness,
        settings=configuration.settings,
        pools=configuration.pools,
        predicted=prediction_of(context, decision.task, chosen),
        runner_up=runner_up,
        tied=sum(not distinguishable(context, chosen, other) for other in others),
        binds=tuple(binding(context, chosen)),
    )


def _runner_up(context: Context, decision: Decision, column: int, other: Evaluation) -> RunnerUp:
    chosen = decision.evaluations[column]
    low, high = interval(context, other)
    return RunnerUp(
        step_s=other.step_s,
        low_s=low,
        high_s=high,
        loss=judged_objective(context, other) / float(decision.objective[column]) - 1.0,
        distinguishable=distinguishable(context, chosen, other),
        differs=tuple(differences(chosen.configuration, other.configuration)),
    )


def merged(phases: list[Phase]) -> list[Phase]:
    """Neighbouring phases of one task that decide alike become one; the first one's prediction stands for all."""
    found: list[Phase] = []
    for phase in phases:
        last = found[-1] if found else None
        alike = last is not None and (last.tasks, last.mode, last.settings, last.pools) == (
            phase.tasks, phase.mode, phase.settings, phase.pools,
        )  # fmt: skip
        if last is not None and alike and last.rl_steps[1] + 1 == phase.rl_steps[0]:
            found[-1] = last.model_copy(update={"rl_steps": (last.rl_steps[0], phase.rl_steps[1])})
        else:
            found.append(phase)
    return found


def _regret(decisions: list[Decision], solution: Solution) -> float:
    """What the screen's own first choice would have lost under the judge, over all slots."""
    screen_value = sum(float(d.objective[0]) * (d.rl_steps[1] - d.rl_steps[0] + 1) for d in decisions)
    judged = sum(
        float(d.objective[c]) * (d.rl_steps[1] - d.rl_steps[0] + 1)
        for d, c in zip(decisions, solution.chosen, strict=True)
    )
    return max(screen_value / judged - 1.0, 0.0)


def _rejected(decisions: list[Decision]) -> dict[str, int]:
    total: dict[str, int] = {}
    for decision in decisions:
        for reason, count in decision.screened.rejected.items():
            total[reason] = total.get(reason, 0) + count
    return total


def _infeasible(context: Context, task: TaskContext, rl_steps: tuple[int, int], screened: Screened) -> InfeasibleError:
    rows = sorted(screened.rejected.items(), key=lambda item: -item[1])
    return InfeasibleError(
        f"task {task.task.name}: nothing fits {task.architecture.name} on {context.cluster.devices} x "
        f"{context.cluster.device}",
        [Rejection(reason, count) for reason, count in rows],
        "; ".join(screened.misses) or None,
    )
