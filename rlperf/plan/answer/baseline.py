"""The plan against the framework's defaults, and against one layout for all: the same rl_steps, judged the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlperf.layout import FloatArray
from rlperf.plan.answer.memory_uses import memory_uses
from rlperf.plan.answer.plan import DefaultsComparison
from rlperf.plan.judge.decisions import Decision
from rlperf.plan.judge.engine_cache import cache_shortage
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.stage_means import calibration_ids, stage_means, stage_sigma_array
from rlperf.plan.judge.value import judged_objective
from rlperf.plan.question.context import Context, counting, with_stated
from rlperf.plan.question.pool import ScorerPlan
from rlperf.plan.question.words import layout_words
from rlperf.plan.search.screen import FORGIVEN, screen
from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.sim.rl_step.uncertainty import OWN_SHARE, Comparison, compare_draws, unshared_error
from rlperf.specs.modes import Mode
from rlperf.specs.pool import PoolSpec
from rlperf.units import human_bytes, with_probability


@dataclass(frozen=True)
class Defaults:
    """What a framework runs by default: pools with layout and settings, or why nothing can be said.

    ``notes`` : what had to be assumed, in words
    """

    title: str
    mode: Mode = "colocated"
    backend: str = ""
    pools: tuple[PoolSpec, ...] = ()
    notes: tuple[str, ...] = ()
    why_not: str | None = None

    @classmethod
    def unknown(cls, title: str, why: str) -> Defaults:
        """Nothing can be said, and why."""
        return cls(title, why_not=why)


DefaultsOf = Callable[[str, Batch, int], Defaults]
"""Defaults for an architecture by name, a batch, and a number of devices."""


@dataclass(eq=False)
class _Judged:
    """Defaults that were judged, by what they depend on."""

    context: Context
    defaults: DefaultsOf
    _judges: dict[tuple[object, ...], tuple[Context, Judge]] = field(default_factory=dict)
    _found: dict[tuple[object, ...], Evaluation | str] = field(default_factory=dict)

    def evaluate(self, decision: Decision, chosen: Evaluation) -> tuple[Defaults, Context, Evaluation | str]:
        """The defaults on the rl_steps, batch and devices of a slot's choice; in words why they do not run."""
        demand, batch = chosen.demand, chosen.configuration.batch
        seated = chosen.configuration.scorers
        devices = chosen.configuration.devices - sum(scorer.own_devices for scorer in seated)
        asked = decision.task.task.architecture or self.context.job.architecture
        stated = self.defaults(asked, batch, devices)
        if stated.why_not is not None:
            return stated, self.context, stated.why_not
        key = (decision.task.task.name, batch, devices, tuple(scorer.own_devices for scorer in seated))
        if key not in self._judges:
            context = pinned_to(self.context, stated, seated)
            self._judges[key] = (context, Judge(context, decision.task))
        context, judge = self._judges[key]
        one = (*key, demand.keys)
        if one not in self._found:
            self._found[one] = _run(context, judge, decision, demand)
        return stated, context, self._found[one]


def pinned_to(context: Context, stated: Defaults, seated: Sequence[ScorerPlan] = ()) -> Context:
    """The context of the same job with the framework's defaults for pools, mode and trainer, scorers where they sit."""
    there = {s.name: {"placement": (s.placement,), "devices": (s.devices,) if s.own_devices else None} for s in seated}
    scorers = tuple(one.model_copy(update=there.get(one.name)) for one in context.job.scorers)
    limits = context.job.limits.model_copy(update={"out_of_memory_risk": 1.0})
    changes = {"pools": stated.pools, "modes": (stated.mode,), "trainer_backends": (stated.backend,)}
    job = context.job.model_copy(update={**changes, "scorers": scorers, "limits": limits})
    cut = job.pool("trainer")
    trainers = (replace(t, framework=counting(t.framework, cut)) for t in context.trainers)
    kept = tuple(trainer for trainer in trainers if trainer.backend == stated.backend)
    return replace(context, job=job, trainers=kept, scorers=with_stated(context.scorers, scorers))


def _run(context: Context, judge: Judge, decision: Decision, demand: Demand) -> Evaluation | str:
    """The defaults judged, or why they do not run: what they leave open is filled in by the screen."""
    found = screen(context, decision.task, (demand,), None, keep=1, forgiven=FORGIVEN)
    if not found.configurations:
        return "; ".join(found.misses) or "no layout"
    evaluation = judge.evaluate(demand, found.configurations[0])
    if short := cache_shortage(evaluation):
        return short
    device = context.hardware.device.usable_memory
    for role, use in memory_uses(context, evaluation).items():
        if use.total > device:
            return f"the {role} needs {human_bytes(use.total)} of {human_bytes(device)} per device"
    return evaluation


def against_defaults(
    context: Context, decisions: Sequence[Decision], chosen: Sequence[int], switching: float, defaults: DefaultsOf
) -> DefaultsComparison:
    """What the framework's defaults would take over the whole horizon, and what the plan saves of it.

    Parameters
    ----------
    chosen : column of every decision
    switching : what changes of layout cost the plan, in the objective's unit
    """
    judged = _Judged(context, defaults)
    pairs: list[_Pair] = []
    title, notes = "", dict[str, None]()
    for decision, column in zip(decisions, chosen, strict=True):
        plan = decision.evaluations[column]
        stated, pinned, found = judged.evaluate(decision, plan)
        title = stated.title
        notes.update(dict.fromkeys(stated.notes))
        if isinstance(found, str):
            task = f"{decision.task.task.name}: " if len(context.tasks) > 1 else ""
            return DefaultsComparison(framework=title, why_not=task + found, notes=tuple(notes))
        notes.update(dict.fromkeys(_risks(context, pinned, found)))
        weight = decision.weight * judged_objective(context, plan) / plan.rl_step_s
        pairs.append(_Pair(weight, plan, found, decision.weight * judged_objective(pinned, found), pinned))
    ours = sum(pair.weight * pair.plan.rl_step_s for pair in pairs)
    theirs = sum(pair.objective for pair in pairs)
    ratio = _ratio(context, pairs)
    slower = (ours + switching) / ours
    return DefaultsComparison(
        framework=title,
        runs=_words(pairs[0].other),
        objective=theirs,
        saves=1.0 - (ours + switching) / theirs,
        low=1.0 - slower / ratio.low,
        high=1.0 - slower / ratio.high,
        notes=tuple(notes),
    )


def _risks(context: Context, pinned: Context, found: Evaluation) -> list[str]:
    """Which roles of the defaults are likelier to run out of memory than the job lets a plan be."""
    uses = memory_uses(replace(pinned, job=context.job), found)
    return [
        f"its {role} runs out of memory {with_probability(use.risk)}, more than the job allows"
        for role, use in uses.items()
        if use.total > use.allowed
    ]


def against_static(
    context: Context, decisions: Sequence[Decision], chosen: Sequence[int], kept: Sequence[int],
    paid: tuple[float, float],
) -> tuple[float, float]:  # fmt: skip
    """5th and 95th percentile of how much longer one layout for all rl_steps takes than the plan, over the plan [1].

    ``paid`` : what changes of layout cost the plan and the one layout, in the objective's unit
    """
    pairs = []
    for decision, column, static in zip(decisions, chosen, kept, strict=True):
        plan, other = decision.evaluations[column], decision.evaluations[static]
        ours, theirs = (decision.weight * judged_objective(context, each) for each in (plan, other))
        pairs.append(_Pair(ours / plan.rl_step_s, plan, other, theirs, context))
    whole, ratio = sum(pair.weight * pair.plan.rl_step_s for pair in pairs), _ratio(context, pairs)
    low, high = ((whole * each + paid[1]) / (whole + paid[0]) - 1.0 for each in (ratio.low, ratio.high))
    return low, high


@dataclass(frozen=True, eq=False)
class _Pair:
    """A slot's choice and what is put in its place.

    ``weight`` : objective of the slot per second of its choice's rl_step; ``objective`` : of the other, all rl_steps
    """

    weight: float
    plan: Evaluation
    other: Evaluation
    objective: float
    pinned: Context


def _ratio(context: Context, pairs: Sequence[_Pair]) -> Comparison:
    """The others over the plan with its interval: rl_steps that both saw, and errors that they do not share.

    Slots where both run the same have no error of their own: that of the others counts by their share of the whole.
    """
    differ = [pair for pair in pairs if pair.plan is not pair.other]
    own = 0.0
    if differ:
        ours = np.sum([pair.weight * stage_means(pair.plan) for pair in differ], axis=0)
        theirs = np.sum([pair.weight * stage_means(pair.other) for pair in differ], axis=0)
        shared = all(calibration_ids(context, p.plan) == calibration_ids(p.pinned, p.other) for p in differ)
        share = float(ours.sum()) / sum(pair.weight * pair.plan.rl_step_s for pair in pairs)
        sigma = stage_sigma_array(context, pairs[0].plan)
        own = min(share, 1.0) * unshared_error(ours, theirs, sigma, own_share=OWN_SHARE, shared=shared)
    weights = [pair.weight for pair in pairs]
    return compare_draws(
        _draws(weights, [pair.plan for pair in pairs]), _draws(weights, [pair.other for pair in pairs]), own=own
    )


def _draws(weights: Sequence[float], evaluations: Sequence[Evaluation]) -> FloatArray:
    """The horizon on each of the drawn rl_steps, all slots together ``[draws]``."""
    count = max(len(e.seconds.rl_step_s) for e in evaluations)
    return sum(
        (w * np.resize(e.seconds.rl_step_s, count) for w, e in zip(weights, evaluations, strict=True)), np.zeros(count)
    )


def _words(evaluation: Evaluation) -> str:
    """The defaults in a line."""
    engine, trainer = (evaluation.configuration.pool(role) for role in ("rollout", "trainer"))
    return (
        f"{evaluation.configuration.mode}, rollout {layout_words(engine.layout)} at memory_fraction "
        f"{engine.settings.memory_fraction:g}, trainer {trainer.settings.backend} {layout_words(trainer.layout)}"
    )
