"""The graph of a predicted configuration, and what turning a knob of its rollout wins, simulated again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rlperf.cost.engine_step import EngineLimits
from rlperf.diagnose import graph as g
from rlperf.diagnose.advice import Advice
from rlperf.diagnose.explain import FLOOR, Explanation, explain_graph, ranked, simulated
from rlperf.diagnose.faults import Thresholds
from rlperf.diagnose.remedies import evened, without_long, without_tools
from rlperf.diagnose.rollout_graph import add_rollout, samples_of
from rlperf.layout import FloatArray, IntArray
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.judge.timeline import execution_in
from rlperf.sim.rl_step.modes import first_chunk_s, sync_pauses
from rlperf.sim.rl_step.rollout_stage import Replicas
from rlperf.sim.rollout import RolloutResult, Trajectories
from rlperf.sim.rollout.routing import Routing
from rlperf.sim.rollout.tail import GroupSource, PartialRollouts
from rlperf.specs.modes import MODES, Form, ModeTraits
from rlperf.specs.trainer_capability import DEGREES

_TRAINING = (
    ("forward_s", g.FORWARD), ("recompute_s", g.RECOMPUTE), ("backward_s", g.BACKWARD), ("bubble_s", g.BUBBLE),
    ("host_s", g.OTHER), ("exposed_tp_s", g.COMMUNICATION), ("exposed_cp_s", g.COMMUNICATION),
    ("exposed_ep_s", g.COMMUNICATION), ("exposed_pp_s", g.COMMUNICATION), ("exposed_dp_s", g.COMMUNICATION),
    ("optimizer_s", g.OPTIMIZER), ("offload_s", g.OFFLOAD),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class PredictedSteps:
    """Some predicted rl_steps of one configuration, one after another.

    Attributes
    ----------
    trajectories, results : the rollout of each rl_step
    replicas, routing : with which it was simulated
    before : activities and seconds between rollout and training, in order [s] ``[rl_steps]`` each
    training : activities of the trainer and their seconds, in order [s] ``[rl_steps]`` each
    weight_sync_s, fixed_s : [s] ``[rl_steps]``
    mode, form : name of the execution mode, and how rl_steps wait for each other in it as its framework takes weights
    steady_s : rollout seconds per batch where the engines are refilled, what a weight sync takes from them included
        but for its own seconds, which follow: some of these pass beside them [s] ``[rl_steps]``
    first_s, chunks : of a streamed rl_step: when its first chunk goes to the trainer [s] ``[rl_steps]``, and the pieces
        in which the batch is trained [1]
    devices : GPUs in all
    degrees : of the trainer's layout those above 1 whose devices wait for each other within a layer or a batch
    joined_s : rollouts that engines on the trainer's devices join on the way [s] ``[rl_steps]``; None: none do
    """

    trajectories: tuple[Trajectories, ...]
    results: tuple[RolloutResult, ...]
    replicas: Replicas
    before: tuple[tuple[int, FloatArray], ...]
    training: tuple[tuple[int, FloatArray], ...]
    weight_sync_s: FloatArray
    fixed_s: FloatArray
    mode: str
    form: Form
    steady_s: FloatArray
    devices: int
    first_s: FloatArray
    rl_step_s: FloatArray
    chunks: int = 1
    routing: Routing = "round_robin"
    degrees: tuple[str, ...] = ()
    joined_s: FloatArray | None = None

    @classmethod
    def of(cls, evaluation: Evaluation) -> PredictedSteps:
        """From what the judge of the planner found for one configuration."""
        seconds, count = evaluation.seconds, len(evaluation.rollouts)
        parts = []
        total = evaluation.training.total_s.reshape(count, -1).sum(axis=1)
        # Critics train as well: their seconds are in the stage, not in the breakdown of the policy's update.
        factor = seconds.training_s / np.maximum(total, 1e-12)
        for name, activity in _TRAINING:
            each = np.broadcast_to(getattr(evaluation.training, name), evaluation.training.total_s.shape)
            parts.append((activity, each.reshape(count, -1).sum(axis=1) * factor))
        batch, layout = evaluation.configuration.batch, evaluation.configuration.pool("trainer").layout
        return cls(
            trajectories=evaluation.served,
            results=evaluation.rollouts,
            replicas=evaluation.replicas,
            before=(
                (g.REWARD, seconds.reward_s), (g.DATA_MOVEMENT, seconds.data_movement_s),
                (g.OFFLOAD, seconds.offload_s), (g.SCORING, seconds.scoring_s),
            ),
            training=tuple(parts),
            weight_sync_s=seconds.weight_sync_s,
            fixed_s=seconds.other_s,
            mode=evaluation.configuration.mode,
            form=Form(int(execution_in(evaluation).form)),
            steady_s=_refilled_s(evaluation),
            devices=evaluation.configuration.devices,
            first_s=np.broadcast_to(first_chunk_s(execution_in(evaluation), seconds), seconds.rl_step_s.shape),
            rl_step_s=seconds.rl_step_s,
            chunks=evaluation.framework.chunks(batch.prompts, batch.updates),
            degrees=tuple(name for name in _WAITING if getattr(layout, name) > 1),
            joined_s=seconds.rollout_s if evaluation.replicas.lent else None,
        )  # fmt: skip

    @property
    def traits(self) -> ModeTraits:
        """The row of the mode."""
        return MODES[self.mode]

    @property
    def flows(self) -> bool:
        """Whether batches flow into each other, so that no rollout of one batch can be told apart."""
        return self.form is Form.REFILLED

    @property
    def whole(self) -> bool:
        """Whether a rollout is a vertex or two, with nothing in it that could be told apart or simulated again."""
        return self.flows or self.traits.streams or self.joined_s is not None

    def graph(self) -> g.PerformanceGraph:
        """The performance graph. Asynchronous rollouts are one vertex per rl_step, at their steady rate; streamed ones
        two, the first chunk and the rest."""
        pools = ("rank",) if self.traits.shares_devices else ("rollout", "trainer")
        build = g.GraphBuilder(pools, self.devices)
        overlaps = self.traits.runs_ahead
        rolled, now = None, 0.0
        for k in range(len(self.results)):
            last = None if rolled is None else rolled
            begin = now
            if self.traits.streams:
                both, now = self._streamed(build, k, begin, last)
            elif overlaps:
                ends, now_r = self._rollout(build, k, begin, last)
                trained, now_t = self._trainer(build, k, begin, last, with_rollout=False)
                now = max(now_r, now_t)
                both = build.barrier(np.concatenate([ends, trained]), now, rl_step=k)
                both, now = self._awaited(build, k, begin, now, both)
            else:
                ends, now = self._rollout(build, k, begin, last)
                met = build.barrier(ends, now, rl_step=k)
                both, now = self._trainer(build, k, now, met, with_rollout=True)
            sync = self.weight_sync_s[k]
            rolled = build.add(g.WEIGHT_SYNC, now, now + sync, after=both, kind=g.WEIGHTS, at=g.Place(rl_step=k))
            now += float(sync)
        samples = [samples_of(r.timelines, [self.replicas.limits.max_running] * len(r.timelines)) for r in self.results]
        joined = g.EngineSamples(
            *(np.concatenate([getattr(s, name) for s in samples]) for name in g.EngineSamples.__dataclass_fields__)
        )
        return build.freeze(None if self.whole else joined)

    def _rollout(self, build: g.GraphBuilder, k: int, now: float, after: IntArray | None) -> tuple[IntArray, float]:
        if self.flows or self.joined_s is not None:
            end = now + float((self.steady_s if self.joined_s is None else self.joined_s)[k])
            return build.add(g.ROLLOUT, now, end, after=after, at=g.Place(rl_step=k)), end
        if not self.traits.runs_ahead:
            after = build.add(g.CONTROLLER, now, now + self.fixed_s[k], after=after, at=g.Place(rl_step=k))
            now += float(self.fixed_s[k])
        ends = add_rollout(build, self.results[k], self.trajectories[k], now, after, rl_step=k)
        now += self.results[k].makespan_s
        if not self.traits.runs_ahead:
            return ends, now
        seconds = self.before[0][1][k]
        met = build.barrier(ends, now, rl_step=k)
        return build.add(g.REWARD, now, now + seconds, after=met, at=g.Place(rl_step=k)), now + float(seconds)

    def _awaited(
        self, build: g.GraphBuilder, k: int, begin: float, now: float, after: IntArray
    ) -> tuple[IntArray, float]:
        """Batches that flow: once all that the staleness bound lets start is under way, the trainer waits for one."""
        wait = float(self.rl_step_s[k] - self.weight_sync_s[k]) - (now - begin)
        if not self.flows or wait <= NO_GAIN * float(self.rl_step_s[k]):
            return after, now
        return build.add(g.ROLLOUT, now, now + wait, after=after, at=g.Place(rl_step=k)), now + wait

    def _streamed(self, build: g.GraphBuilder, k: int, now: float, after: IntArray | None) -> tuple[IntArray, float]:
        """All chunks but the last are trained beside the rollout, from the first on; the last one after it."""
        makespan = self.results[k].makespan_s
        first = float(self.first_s[k])
        begun = build.add(g.ROLLOUT, now, now + first, after=after, at=g.Place(rl_step=k))
        rest = build.add(g.ROLLOUT, now + first, now + makespan, after=begun, at=g.Place(rl_step=k))
        reward = self.before[0][1][k]
        done = build.add(g.REWARD, now + makespan, now + makespan + reward, after=rest, at=g.Place(rl_step=k))
        beside, ended = begun, now + first
        if self.chunks > 1:
            beside, ended = self._trainer(build, k, ended, begun, with_rollout=False, share=1.0 - 1.0 / self.chunks)
        now = max(ended, now + makespan + float(reward))
        met = build.barrier(np.concatenate([beside, done]), now, rl_step=k)
        return self._trainer(build, k, now, met, with_rollout=False, share=1.0 / self.chunks)

    def _trainer(
        self,
        build: g.GraphBuilder,
        k: int,
        now: float,
        after: IntArray | None,
        *,
        with_rollout: bool,
        share: float = 1.0,
    ) -> tuple[IntArray, float]:
        chain = [*self.before, *self.training]
        if not with_rollout:
            chain = [(g.CONTROLLER, self.fixed_s), *((a, s) for a, s in chain if a != g.REWARD)]
        pool = 0 if self.traits.shares_devices else 1
        last = after
        for activity, seconds in chain:
            if seconds[k] > 0 or last is None:
                last = build.add(activity, now, now + share * seconds[k], after=last, at=g.Place(pool=pool, rl_step=k))
                now += share * float(seconds[k])
        assert last is not None
        return last, now


def _refilled_s(evaluation: Evaluation) -> FloatArray:
    """R_s + p - Y of `step_seconds`: engines that take weights in flight stand still for less than the whole sync.

    Of every rl_step: agents' engines have what their own trainer leaves.
    """
    seconds = evaluation.seconds
    steady = 0.0 if seconds.rollout_steady_s is None else seconds.rollout_steady_s
    sync, pause, _ = sync_pauses(execution_in(evaluation), seconds)
    return np.broadcast_to(np.maximum(steady + pause - sync, 0.0), seconds.rl_step_s.shape)


NOTHING_REFUSED: Mapping[str, bool] = {}
NO_GAIN = 1e-3
"""Share of an rl_step below which a simulated gain is none."""


def explain_prediction(
    steps: PredictedSteps, *, floor: float = FLOOR, notes: tuple[str, ...] = (),
    able: Mapping[str, bool] = NOTHING_REFUSED,
) -> Explanation:  # fmt: skip
    """Explain predicted rl_steps; advice on the rollout carries gains simulated again with the knob turned.

    ``able`` : of knobs that a framework may lack, which it has: no other is turned
    """
    if steps.replicas.apart is not None:
        notes += ("prompts are read apart: reading and sending a later turn shows as tools",)
    # A predicted controller takes what its framework takes: a cost of the plan, never a fault.
    found = explain_graph(steps.graph(), floor=floor, limits=replace(Thresholds(), serial=np.inf), notes=notes)
    tried: dict[str, float] = {}

    ahead = steps.traits.runs_ahead

    def better(advice: Advice) -> Advice:
        if advice.knob not in _KNOBS or steps.whole:
            return advice
        if advice.knob not in tried:
            tried[advice.knob] = found.rl_step_s - _KNOBS[advice.knob](steps)
        return replace(advice, gain_s=tried[advice.knob], predicted_by="simulation")

    causes = []
    for cause in found.causes:
        if cause.kind in _REMOVED and not steps.whole:
            cause = simulated(cause, found.rl_step_s - _REMOVED[cause.kind](steps).graph().rl_step_s(), found.rl_step_s)
        # a prediction has nothing that broke: what stands out in it is what the configuration pays
        advices = (_further(a) if ahead and cause.kind in _LONG else a for a in cause.advice if able.get(a.knob, True))
        # on shared devices nothing would run beside the rollout any more, which its seconds do not count
        advices = (a for a in advices if not (ahead and a.knob == "colocate"))
        if cause.kind == "exposed_communication":
            advices = (each for a in advices for each in _fewer(a, steps.degrees))
        turned = (better(advice) for advice in advices)
        # a knob that was turned and won nothing is no advice
        least = NO_GAIN * found.rl_step_s
        worth = tuple(a for a in turned if a.predicted_by != "simulation" or (a.gain_s or 0.0) > least)
        causes.append(replace(cause, nature="structure", advice=worth))
    return replace(found, causes=ranked([c for c in causes if c.share >= floor]))


_LONG = ("tail", "long_trajectory")


def _further(advice: Advice) -> Advice:
    """Where training runs beside the rollout already, what is left of staleness."""
    if advice.knob != "staleness":
        return advice
    return replace(advice, action="asynchronous: engines go on with other prompts before a batch has ended")


_WAITING = tuple(name for name in DEGREES if name not in ("expert_tensor_parallel", "virtual_pipeline", "shard_size"))


def _fewer(advice: Advice, degrees: Sequence[str]) -> Iterator[Advice]:
    """Advice on the degrees that a layout has: to keep tensor parallelism in a node came where there is none."""
    if advice.knob != "tensor_parallel":
        yield advice
    elif degrees:
        yield replace(advice, knob=degrees[0], action=f"less {' or '.join(degrees)}")


def _simulated(steps: PredictedSteps, old: RolloutResult, served: Trajectories) -> RolloutResult:
    """A rollout with as many replicas as ``old`` has: of a large one a part was simulated."""
    return replace(steps.replicas, count=len(old.timelines) + len(old.readers)).serve(served, steps.routing)


def _again(
    steps: PredictedSteps,
    *,
    routing: Routing | None = None,
    limits: EngineLimits | None = None,
    trajectories: tuple[Trajectories, ...] | None = None,
) -> PredictedSteps:
    """The same rl_steps with the rollout simulated again."""
    served = trajectories or steps.trajectories
    replicas = replace(steps.replicas, limits=limits or steps.replicas.limits)
    moved = replace(steps, routing=routing or steps.routing, replicas=replicas, trajectories=served)
    results = tuple(_simulated(moved, old, one) for one, old in zip(served, steps.results, strict=True))
    return replace(moved, results=results)


def _more_cache(steps: PredictedSteps) -> float:
    limits = steps.replicas.limits
    return _again(steps, limits=replace(limits, kv_tokens=2.0 * limits.kv_tokens)).graph().rl_step_s()


def _more_running(steps: PredictedSteps) -> float:
    limits = steps.replicas.limits
    return _again(steps, limits=replace(limits, max_running=2 * limits.max_running)).graph().rl_step_s()


OVER_PROVISION = 2.0
"""Groups under way for one that is waited for: what APRIL (arXiv 2509.18521) starts, and `rlperf plan --what-if`."""


def _carried_over(steps: PredictedSteps) -> float:
    """Unfinished groups go on in the next rl_step, as `PartialRollouts` has it: rollouts of the first one's share.

    Turns with tools cannot be stopped and continued: they stay as they are.
    """
    graph, old, served = steps.graph(), steps.results[0], steps.trajectories[0]
    if not served.single_turn:
        return graph.rl_step_s()
    groups, run = np.unique(served.group).size, PartialRollouts(OVER_PROVISION)
    share = run.steady_s(GroupSource(served), partial(_simulated, steps, old), groups) / old.makespan_s
    rolls = np.isin(graph.activity, g.IN_ROLLOUT)
    return graph.what_if_s(g.Change(np.where(rolls, min(share, 1.0), 1.0)))


def _served(change: Callable[[Trajectories], Trajectories]) -> Callable[[PredictedSteps], PredictedSteps]:
    return lambda steps: _again(steps, trajectories=tuple(change(one) for one in steps.trajectories))


_REMOVED: dict[str, Callable[[PredictedSteps], PredictedSteps]] = {
    "tail": _served(evened),
    "long_trajectory": _served(without_long),
    "tool": _served(without_tools),
    "kv_cache": lambda steps: _again(steps, limits=replace(steps.replicas.limits, kv_tokens=np.inf)),
}
"""Causes in the rollout, where removing one changes what the others' engine_steps cost: simulated again. All other
causes of a prediction lie on a chain of stages, where the replayed graph is exact."""
_KNOBS: dict[str, Callable[[PredictedSteps], float]] = {
    "routing": lambda steps: _again(steps, routing="least_loaded").graph().rl_step_s(),
    "kv_dtype": _more_cache,
    "memory_fraction": _more_cache,
    "max_running": _more_running,
    "partial_rollout": _carried_over,
}
"""Seconds of an rl_step with a knob turned, where no other layout is needed for it. ``kv_dtype`` and
``memory_fraction`` stand for a cache twice as large."""
