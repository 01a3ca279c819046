"""What can be explained besides a log: a job, a plan, and a job at other numbers of devices."""

from __future__ import annotations

from dataclasses import replace

from rlperf.diagnose.predicted import PredictedSteps
from rlperf.errors import Problem, SpecError
from rlperf.plan.answer.phases import evaluate_phase, phase_words, phases_of
from rlperf.plan.answer.plan import Phase, Plan
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.judge.timeline import execution_in, step_view
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import Context
from rlperf.sim.rl_step.modes import step_seconds
from rlperf.sim.rl_step.stage_seconds import refilled_s
from rlperf.specs.cluster import Cluster
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES, Form
from rlperf.units import human_share

LITTLE = 0.01
"""Share of the training's seconds by which it is changed to see what an rl_step keeps of them [1]."""


def steps_of_job(context: Context, facts: FrameworkFacts | None = None) -> tuple[PredictedSteps, tuple[str, ...]]:
    """Predicted rl_steps of a job's first task, and what was filled in where the job leaves things open."""
    evaluation, filled = evaluate_job(context, facts)
    return PredictedSteps.of(evaluation), (*_waits(evaluation), *(f"filled in: {text}" for text in filled))


def steps_of_plan(plan: Plan, context: Context, task: str | None = None) -> tuple[PredictedSteps, tuple[str, ...]]:
    """Predicted rl_steps of the phase of a plan (that runs ``task``) that takes the most time.

    ``context`` : of its job
    """
    phase = max(phases_of(plan, task), key=lambda p: p.predicted.rl_step_s * (p.rl_steps[1] - p.rl_steps[0] + 1))
    _, evaluation = evaluate_phase(context, phase)
    return PredictedSteps.of(evaluation), (*_waits(evaluation), *_phase_note(plan, phase))


def _waits(evaluation: Evaluation) -> tuple[str, ...]:
    """Which pool waits for the other, where they work at the same time; and where neither sets the pace."""
    if not MODES[evaluation.configuration.mode].runs_ahead:
        return ()
    idle = step_view(evaluation).idle_share
    most = max(idle, key=lambda pool: idle[pool])
    shares = ", ".join(f"{pool} {human_share(share)}" for pool, share in idle.items())
    return (f"the {most} pool waits most; without work, of each pool's device time: {shares}", *_bound(evaluation))


def _bound(evaluation: Evaluation) -> tuple[str, ...]:
    """That the bound on staleness sets the pace, so that the trainer's losses above are more than an rl_step saves."""
    execution, rollout = execution_in(evaluation), evaluation.rollout
    if execution.form != Form.REFILLED:
        return ()
    stages = replace(evaluation.seconds, rollout_s=rollout.makespan_s)
    less = replace(stages, training_s=(1.0 - LITTLE) * stages.training_s)
    less = replace(less, rollout_steady_s=refilled_s(rollout, execution, less))
    spared = float((step_seconds(execution, stages) - step_seconds(execution, less)).mean())
    kept = spared / (LITTLE * float(stages.training_s.mean()))
    if not LITTLE < kept < 1.0 - LITTLE:
        return ()
    bound = f"the bound on staleness ({evaluation.configuration.staleness}) sets the pace"
    saved = f"of a second less in scoring, training or weight sync an rl_step keeps {kept:.1f} s"
    return (f"{bound}: {saved} (losses and gains here are of all of it)",)


def _phase_note(plan: Plan, phase: Phase) -> tuple[str, ...]:
    if len(plan.phases) == 1:
        return ()
    return (f"the phase that takes the most time: {phase_words(phase)}",)


def scaled_job(job: Job, cluster: Cluster, devices: int) -> Job:
    """The job on another number of devices: pinned pools and data_parallel grow or shrink alike, the batch stays.

    Raises
    ------
    SpecError : the number does not fill whole nodes, or a pinned pool cannot be scaled to it
    """
    per_node = cluster.devices_per_node
    if devices < 1 or devices % per_node:
        raise SpecError(Problem(f"{devices} devices do not fill nodes of {per_node}", suggestion="use a multiple"))
    factor = devices / cluster.devices

    def scaled(values: tuple[int, ...] | None, what: str) -> tuple[int, ...] | None:
        if values is None:
            return None
        made = tuple(round(v * factor) for v in values)
        if any(abs(m - v * factor) > 1e-9 or m < 1 for m, v in zip(made, values, strict=True)):
            raise SpecError(f"{what} {list(values)} cannot be scaled by {factor:g} to {devices} devices")
        return made

    pools = []
    for pool in job.pools:
        layout = pool.layout.model_copy(update={"data_parallel": scaled(pool.layout.data_parallel, "data_parallel")})
        wanted = scaled(pool.devices, f"devices of {pool.role}")
        pools.append(pool.model_copy(update={"devices": wanted, "layout": layout}))
    return job.model_copy(update={"nodes": devices // per_node, "pools": tuple(pools)})
