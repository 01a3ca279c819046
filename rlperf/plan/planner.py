"""The planner: slots of a job screened and judged, solved as one program, and explained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlperf.errors import InfeasibleError
from rlperf.layout import IntArray
from rlperf.plan.answer.baseline import DefaultsOf, against_defaults, against_static
from rlperf.plan.answer.phases import merged, phase_of
from rlperf.plan.answer.plan import DefaultsComparison, HandoverCost, Phase, Plan, SwitchGain
from rlperf.plan.answer.run_cost import Stretch, run_totals
from rlperf.plan.answer.sensitivity import sensitivities, with_values
from rlperf.plan.judge.decisions import Decision, decide
from rlperf.plan.judge.handovers import change_s, changes_of, handovers_of, over_horizon, per_second
from rlperf.plan.judge.shared import shared_by_all
from rlperf.plan.question.context import Context
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.formulation import Program, Slot, value_of
from rlperf.plan.search.solve import Solution, solve
from rlperf.specs.framework import FrameworkFacts
from rlperf.told import Tell, quiet

NEVER_S = 1e7
"""Switching cost where the user states none: no gain is worth it."""


def plan_job(
    context: Context, *, facts: FrameworkFacts | None = None, report: Tell | None = None,
    defaults: DefaultsOf | None = None, remarks: bool = True,
) -> Plan:  # fmt: skip
    """The best plan for a resolved job.

    Parameters
    ----------
    facts : the framework's validity rules; candidates that break one are not planned
    report : called with the share done and a text
    defaults : what the framework runs by default, to compare with
    remarks : look for what would help beside the plan: a free schedule of the pipeline, a batch that divides

    Raises
    ------
    InfeasibleError : nothing fits; with what was rejected, the nearest miss and limits to relax
    SolverError : the integer program was not solved

    Returns
    -------
    Plan; its objective and bound are those of the judged program.
    """
    tell = report or quiet
    decisions = _with_room(context, shared_by_all(context, facts, over_horizon(context, decide(context, facts, tell))))
    tell(0.9, "solving")
    program = program_of(context, decisions, facts)
    solution, static = solve(program), _static(program)
    interval: tuple[float, float] | None = None
    unsure: SwitchGain | None = None
    if static is not None:
        paid = (_paid(decisions, solution), _paid(decisions, static[1]))
        interval = against_static(context, decisions, solution.chosen, static[1].chosen, paid)
        if static[1].chosen != solution.chosen and interval[0] <= 0.0:
            unsure = _unsure(decisions, solution, static[1], interval)
            program, solution, interval = *static, (0.0, 0.0)
    phases, switching = _phases(context, program, decisions, solution, remarks, facts), _paid(decisions, solution)
    handovers = _handover_cost(context, decisions, solution)
    objective = _value(decisions, solution.chosen) + switching
    return Plan(
        job=context.job,
        asked=context.asked,
        status="optimal" if solution.gap <= 1e-6 else "feasible",
        objective=objective,
        bound=min(solve(with_values(program, decisions, [d.value for d in decisions])).bound, objective),
        mip_gap=solution.gap,
        candidates=sum(decision.screened.candidates for decision in decisions),
        combinations=sum(decision.screened.combinations for decision in decisions),
        rejected=_rejected(decisions),
        screen_regret=_regret(program, decisions),
        static_objective=static and _value(decisions, static[1].chosen) + _paid(decisions, static[1]),
        static_low=interval and interval[0],
        static_high=interval and interval[1],
        switching=unsure,
        handovers=handovers,
        defaults=_against(context, decisions, solution, defaults, switching),
        run=run_totals(
            context, [Stretch.of(phase) for phase in phases], handover_s=handovers.per_rl_step_s if handovers else 0.0
        ),
        phases=tuple(merged(phases)),
    )


def _with_room(context: Context, decisions: list[Decision]) -> list[Decision]:
    """All of them; refused where tasks that run at once take more devices than there are, each the fewest that it can.

    Raises
    ------
    InfeasibleError : with what each takes at least, and how many nodes would hold all
    """
    if context.job.sharing != "devices":
        return decisions
    first = [each for each in decisions if each.rl_steps[0] == decisions[0].rl_steps[0]]
    least = {each.task.task.name: min(e.configuration.devices for e in each.evaluations) for each in first}
    needed, cluster = sum(least.values()), context.cluster
    if needed > cluster.devices:
        each = ", ".join(f"{name} {devices}" for name, devices in least.items())
        raise InfeasibleError(
            f"tasks that run at once (sharing: devices) take at least {needed} devices ({each}), and there are "
            f"{cluster.devices}",
            nearest_miss=f"{-(-needed // cluster.devices_per_node)} nodes hold them; "
            "one after the other (sharing: time) each has all devices",
        )
    return decisions


def _value(decisions: Sequence[Decision], chosen: Sequence[int]) -> float:
    """Objective of the chosen columns over all rl_steps, without prices of the beaten path and changes of layout."""
    return sum(d.weight * float(d.value[c]) for d, c in zip(decisions, chosen, strict=True))


def _against(
    context: Context, decisions: list[Decision], solution: Solution, defaults: DefaultsOf | None, switching: float
) -> DefaultsComparison | None:
    """The plan against the framework's defaults; None if not asked for, or where engines have their own cluster."""
    if defaults is None or context.own_rollout:
        return None
    return against_defaults(context, decisions, solution.chosen, switching, defaults)


def _phases(
    context: Context, program: Program, decisions: list[Decision], solution: Solution, remarks: bool,
    facts: FrameworkFacts | None,
) -> list[Phase]:  # fmt: skip
    """The chosen column of every slot in words; slots that were judged together are put into words once."""
    made: dict[tuple[str, tuple[bytes, ...], Configuration, int], Phase] = {}
    found = []
    moves, rooms = sensitivities(context, program, decisions, solution.chosen), _rooms(context, decisions, solution)
    for decision, column, move, room in zip(decisions, solution.chosen, moves, rooms, strict=True):
        chosen = decision.evaluations[column]
        key = (decision.task.task.name, chosen.demand.keys, chosen.configuration, room)
        if key not in made:
            made[key] = phase_of(context, decision, column, room, remarks=remarks, facts=facts)
        found.append(made[key].model_copy(update={"rl_steps": decision.rl_steps, "sensitivity": move}))
    return found


def _rooms(context: Context, decisions: list[Decision], solution: Solution) -> list[int]:
    """Devices that every slot may take beside those that run at the same time."""
    devices = [d.evaluations[c].configuration.devices for d, c in zip(decisions, solution.chosen, strict=True)]
    most, taken = context.cluster.devices, dict.fromkeys((d.rl_steps[0] for d in decisions), 0)
    if context.job.sharing != "devices":
        return [sys.maxsize] * len(decisions)  # engines may have a cluster of their own beside it
    for decision, own in zip(decisions, devices, strict=True):
        taken[decision.rl_steps[0]] += own
    return [most - taken[d.rl_steps[0]] + own for d, own in zip(decisions, devices, strict=True)]


def program_of(context: Context, decisions: list[Decision], facts: FrameworkFacts | None = None) -> Program:
    """The judged columns as an integer program; without a stated switching cost the layout never changes.

    With the rules of a framework, a group of rl_steps has a trainer that reads the checkpoint of the group before.
    Tasks that share the devices (``sharing: devices``) run at the same time and take at most the whole cluster. Those
    that take turns pay for handovers; where a change between groups has a cost, it is one more of them.
    """
    serial: dict[tuple[object, ...], int] = {}
    together = context.job.sharing == "devices"
    handovers = handovers_of(context, decisions)
    chained = not (context.takes_turns and context.job.horizon.switch is not None)
    checkpoints = [None] * len(decisions) if facts is None else checkpoints_of(decisions, facts)
    slots = []
    for decision, anyway, written in zip(decisions, handovers.paid_anyway, checkpoints, strict=True):
        configurations = [e.configuration for e in decision.evaluations]
        same = [serial.setdefault(c.arrangement, len(serial)) for c in configurations]
        slots.append(
            Slot(
                name=decision.name,
                cost=decision.objective * decision.weight + anyway,
                configuration=np.array(same, dtype=np.int64),
                previous=decision.previous if chained else None,
                resumes=decision.previous,
                checkpoint=written,
                switch=_switch_value(context, decision),
                share=np.array([float(c.devices) for c in configurations]) if together else None,
                share_group=decision.rl_steps[0] if together else None,
            )
        )
    share_limit = float(context.cluster.devices) if together else None
    return Program(tuple(slots), share_limit=share_limit, handovers=handovers.paid_if_apart)


def checkpoints_of(decisions: Sequence[Decision], facts: FrameworkFacts) -> list[IntArray | None]:
    """Numbers of what each column's checkpoints are laid out by, ``[columns]`` of every slot.

    None for a task whose groups share no such layout: each then stands by itself, and its files say so.
    """
    serial: dict[tuple[object, ...], int] = {}
    found = [
        np.array([serial.setdefault(e.configuration.checkpoint(facts), len(serial)) for e in decision.evaluations])
        for decision in decisions
    ]
    of_task: dict[str, list[IntArray]] = {}
    for decision, numbers in zip(decisions, found, strict=True):
        of_task.setdefault(decision.task.task.name, []).append(numbers)
    shared = {name: bool(set.intersection(*(set(each.tolist()) for each in every))) for name, every in of_task.items()}
    return [numbers if shared[d.task.task.name] else None for d, numbers in zip(decisions, found, strict=True)]


def _switch_value(context: Context, decision: Decision) -> float:
    """Cost of entering another layout, in the objective's unit; prohibitive where the user states none."""
    stated = context.job.horizon.switch
    return (NEVER_S if stated is None else stated) * per_second(decision)


def _static(program: Program) -> tuple[Program, Solution] | None:
    """The program in which a layout changes as seldom as can be, solved; None for a single slot at a time.

    Changes that cannot be avoided are paid as in the program itself.
    """
    if all(slot.previous is None for slot in program.slots) and not program.handovers:
        return None
    # no choice of columns saves as much as the whole range of their costs
    large = 10.0 * sum(float(slot.cost.max() - slot.cost.min()) for slot in program.slots) + 1e-6
    slots = tuple(replace(slot, switch=large) for slot in program.slots)
    kept = replace(
        program, slots=slots, handovers=tuple(replace(handover, cost=large) for handover in program.handovers)
    )
    found = solve(kept)
    objective = value_of(program, found.chosen)
    return kept, replace(found, objective=objective, bound=min(found.bound, objective))


def _paid(decisions: Sequence[Decision], solution: Solution) -> float:
    """What changes of layout cost, in the objective's unit."""
    slots = sum(d.weight * float(d.objective[c]) for d, c in zip(decisions, solution.chosen, strict=True))
    return max(solution.objective - slots, 0.0)


def _handover_cost(context: Context, decisions: Sequence[Decision], solution: Solution) -> HandoverCost | None:
    """What handovers between the tasks take of every rl_step; None where none are taken."""
    if not context.takes_turns:
        return None
    rl_steps = context.job.horizon.rl_steps
    changes, each = changes_of(context, decisions, solution.chosen) / rl_steps, change_s(context)
    return HandoverCost(change_s=each, changes=changes, per_rl_step_s=changes * each)


def _unsure(
    decisions: Sequence[Decision], solution: Solution, static: Solution, interval: tuple[float, float]
) -> SwitchGain:
    """What a change of layouts would save that takes less than one layout in fewer than 95 of 100 draws."""
    changing, kept = (_value(decisions, each.chosen) + _paid(decisions, each) for each in (solution, static))
    low, high = (1.0 - 1.0 / (1.0 + more) for more in interval)
    return SwitchGain(saves=1.0 - changing / kept, low=low, high=high)


def _regret(program: Program, decisions: list[Decision]) -> float:
    """What the screen's own first choices would have lost under the judge; changes of layout are free."""
    free = replace(program, slots=tuple(replace(slot, switch=0.0) for slot in program.slots), handovers=())
    screened = value_of(free, [decision.first for decision in decisions])
    return max(screened / solve(free).objective - 1.0, 0.0) if np.isfinite(screened) else 0.0


def _rejected(decisions: list[Decision]) -> dict[str, int]:
    total: dict[str, int] = {}
    for decision in decisions:
        for reason, count in decision.screened.rejected.items():
            total[reason] = total.get(reason, 0) + count
    return total
