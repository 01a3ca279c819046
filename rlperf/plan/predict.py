"""Predict: what the given configuration does; what the job leaves open is filled in by the planner, and said."""

from __future__ import annotations

import numpy as np

from rlperf.cost.reject import Reject
from rlperf.errors import InfeasibleError
from rlperf.plan.answer.phases import judge_configuration
from rlperf.plan.answer.plan import Prediction
from rlperf.plan.answer.run_cost import Stretch, run_totals
from rlperf.plan.judge.decisions import decide_screened
from rlperf.plan.judge.evaluate import Evaluation, Holding, Judge
from rlperf.plan.question.context import Context
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.screen import FINALISTS, FORGIVEN, Screened, screen
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.specs.pool import Attribute, Role, of_role
from rlperf.told import Tell, quiet, within


def predict_job(context: Context, *, facts: FrameworkFacts | None = None) -> Prediction:
    """Prediction of a job whose pools are pinned; open values are those of its plan, named in ``assumed``.

    A configuration that does not fit the memory is predicted all the same, with ``fits`` False and the first knob to
    turn; so is one that a rule or limit refuses, which the first of its warnings says.

    Raises
    ------
    SpecError : the job has several tasks; ask for one (`Job.of_task`), or plan the job
    InfeasibleError : the pinned degrees cannot be laid out at all
    """
    return predicted(context, facts=facts)[1]


def predicted(
    context: Context, *, facts: FrameworkFacts | None = None, report: Tell | None = None
) -> tuple[Evaluation, Prediction]:
    """The judged configuration beside its prediction."""
    _, configuration, refused = chosen(context, facts, report or quiet)
    rl_steps = 0, context.job.horizon.rl_steps - 1
    evaluation, found = judge_configuration(context, context.tasks[0], configuration, rl_steps)
    stretch = Stretch(rl_steps, configuration.mode, configuration.pools, found, configuration.scorers)
    update = {
        "assumed": (*filled_in(context.job, configuration), *found.assumed),
        "run": run_totals(context, [stretch]),
        "fits": found.fits and not refused,
        "warnings": (*refused, *found.warnings),
    }
    return evaluation, found.model_copy(update=update)


def evaluate_job(context: Context, facts: FrameworkFacts | None = None) -> tuple[Evaluation, tuple[str, ...]]:
    """The judged configuration of a job's first task, and what was filled in."""
    demand, configuration, refused = chosen(context, facts)
    evaluation = Judge(context, context.tasks[0]).evaluate(demand, configuration)
    return evaluation, (*refused, *filled_in(context.job, configuration))


def held_by_job(context: Context) -> Holding:
    """What a job's first task holds in memory: of `evaluate_job` all that needs no simulation."""
    demand, configuration, _ = pinned(context)
    return Judge(context, context.tasks[0]).holds(demand, configuration)


def chosen(
    context: Context, facts: FrameworkFacts | None = None, tell: Tell = quiet
) -> tuple[Demand, Configuration, tuple[str, ...]]:
    """What a plan of the job would run; its demand, and what was refused.

    Where all is pinned, or nothing passes every rule and limit, it is what `pinned` finds: no knob that has a default
    (the stages of a pipeline, a scoring budget) is turned of what is asked for as it stands.
    """
    task, screened = context.tasks[0], _screened(context, facts, tell=within(tell, 0.0, 0.4))
    if not screened.configurations:
        return pinned(context, facts)
    if not screened.configurations[1:]:
        return screened.demands[int(screened.demand[0])], screened.configurations[0], ()
    decision = decide_screened(context, task, facts, screened, within(tell, 0.4, 0.6))
    best = decision.evaluations[int(np.argmin(decision.objective))]
    return best.demand, best.configuration, ()


def pinned(context: Context, facts: FrameworkFacts | None = None) -> tuple[Demand, Configuration, tuple[str, ...]]:
    """What a job pins, with what it leaves open as closed forms have it; its demand, and what was refused."""
    screened = _screened(context, facts, keep=1)
    refused: tuple[str, ...] = ()
    if not screened.configurations:
        # what memory and the device allow is looked for first, so that a broken rule is not taken for a lack of memory
        why = sorted(screened.rejected.items(), key=lambda item: -item[1])
        refused = ("nothing passes every rule and limit: " + "; ".join(f"{count:,} {reason}" for reason, count in why),)
        for forgiven in (FORGIVEN & ~int(Reject.MEMORY | Reject.KV | Reject.HOST_MEMORY), FORGIVEN):
            screened = _screened(context, None, keep=1, forgiven=forgiven)
            if screened.configurations:
                break
    if not screened.configurations:
        raise InfeasibleError("the pinned layout cannot be laid out", nearest_miss="; ".join(screened.misses) or None)
    return screened.demands[int(screened.demand[0])], screened.configurations[0], refused


def _screened(
    context: Context, facts: FrameworkFacts | None, keep: int = FINALISTS, forgiven: int = 0, tell: Tell = quiet
) -> Screened:
    """The candidates of a job of one task over its whole horizon."""
    job = context.job.of_task()
    task = context.tasks[0]
    demands = tuple(task.source.demand(batch, None, job.seed) for batch in task.batches)
    return screen(context, task, demands, facts, keep=keep, forgiven=forgiven, report=tell)


def _is_open(stated: object, attribute: Attribute) -> bool:
    if isinstance(stated, tuple):
        return len(stated) > 1
    return stated is None and attribute.decided in ("searched", "derived")


def filled_in(job: Job, configuration: Configuration) -> tuple[str, ...]:
    """What the job left open and the configuration states, in words."""
    roles: tuple[Role, ...] = ("rollout", "trainer")
    alone = "sharing: devices: a task by itself, which may have all of them; beside others a plan gives it a part"
    found = [alone] if job.sharing == "devices" and any(job.pool(role).devices is None for role in roles) else []
    for role in roles:
        pool, spec = configuration.pool(role), job.pool(role)
        opened = {
            name: value
            for name, value in pool.layout
            if len(getattr(spec.layout, name) or ()) != 1
            and value not in (0, 1, False, "none")
            and name != "data_parallel"
        }
        if spec.devices is None:
            opened = {"devices": pool.devices, **opened}
        opened |= {
            each.name: getattr(pool.settings, each.name)
            for each in of_role(role, "settings")
            if each.name != "backend"
            and getattr(pool.settings, each.name) is not None
            and _is_open(getattr(spec.settings, each.name), each)
        }
        if role == "trainer" and spec.settings.backend is None and len(job.trainer_backends) > 1:
            opened["backend"] = pool.settings.backend
        if opened:
            found.append(f"{role}: " + ", ".join(f"{name} {value}" for name, value in opened.items()))
    apart = job.pool("critic")
    if apart.apart and len(apart.devices or ()) != 1:
        found.append(f"critic: devices {configuration.pool('critic').devices}")
    return tuple(found)
