"""One synchronous rl_step from its inputs, through the rollout and pipeline simulators, as a performance graph.

What `rlperf.diagnose` finds on a graph is scored against this: every vertex is known, faults can be planted in the
inputs, and the seconds that a cause costs are simulated again without it (`studies.root_cause.remedies`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.diagnose.rollout_graph import add_rollout, samples_of
from rlperf.errors import SpecError
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.pipeline import StageCosts, one_f_one_b
from rlperf.sim.rollout import EngineOptions, ReplicaCosts, Trajectories, simulate_rollout
from rlperf.sim.rollout.replica import PLAIN
from rlperf.sim.rollout.routing import Routing


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What a synchronous rl_step consists of; D data-parallel ranks of P pipeline stages, M micro-batches, R replicas.

    Attributes
    ----------
    trajectories, replicas, routing, options : the rollout, as `simulate_rollout` takes them
    reward_s : reward of each rank's share [s] ``[D]``
    scoring_s : scoring passes of each rank [s] ``[D]``
    scored_tokens : tokens that each rank scores and trains on [tokens] ``[D]``
    trainer : pipeline costs of each rank; all with P stages and M micro-batches (1F1B) ``D x``
    microbatch_tokens : [tokens] ``[D, M]``
    gradient_sync_s : reduction of gradients over the data-parallel group of each pipeline stage [s] ``[P]``
    optimizer_s : optimizer of each rank [s] ``[D]``
    weight_sync_s : new weights to each replica [s] ``[R]``
    recompute_share : share of a backward pass that recomputes activations [1]
    data_movement_s, offload_s, controller_s : between the stages, with everybody waiting [s]
    colocated : replica r and data-parallel rank r are the same devices
    devices : GPUs in all
    """

    trajectories: Trajectories
    replicas: tuple[ReplicaCosts, ...]
    reward_s: FloatArray
    scoring_s: FloatArray
    scored_tokens: FloatArray
    trainer: tuple[StageCosts, ...]
    microbatch_tokens: FloatArray
    gradient_sync_s: FloatArray
    optimizer_s: FloatArray
    weight_sync_s: FloatArray
    routing: Routing | IntArray = "static_group"
    options: EngineOptions = PLAIN
    recompute_share: float = 0.0
    data_movement_s: float = 0.0
    offload_s: float = 0.0
    controller_s: float = 0.0
    colocated: bool = True
    devices: int = 0

    def __post_init__(self) -> None:
        ranks = len(self.trainer)
        sizes = {a.shape[0] for a in (self.reward_s, self.scoring_s, self.scored_tokens, self.optimizer_s)}
        if not ranks or sizes != {ranks} or self.microbatch_tokens.shape[0] != ranks:
            raise SpecError("rl_step: reward, scoring, tokens, optimizer and trainer need one entry per rank")
        if self.weight_sync_s.size != len(self.replicas):
            raise SpecError("rl_step: weight_sync_s needs one entry per replica")
        if self.colocated and len(self.replicas) != ranks:
            raise SpecError("rl_step: colocated replicas and data-parallel ranks are the same devices, one each")


def simulate_step(inputs: StepInputs) -> g.PerformanceGraph:
    """The performance graph of one synchronous rl_step; `PerformanceGraph.rl_step_s` is its time."""
    result = simulate_rollout(inputs.trajectories, inputs.replicas, routing=inputs.routing, options=inputs.options)
    pools = ("rank",) if inputs.colocated else ("rollout", "trainer")
    build = g.GraphBuilder(pools, inputs.devices)
    trainer = len(pools) - 1
    ranks = np.arange(len(inputs.trainer))
    now = inputs.controller_s
    last = build.add(g.CONTROLLER, 0.0, now, at=g.Place(pool=trainer))
    ends = add_rollout(build, result, inputs.trajectories, now, last)
    now += result.makespan_s
    last = build.barrier(ends, now)
    last = build.add(g.REWARD, now, now + inputs.reward_s, after=last, at=g.Place(pool=trainer, rank=ranks))
    now += float(inputs.reward_s.max())
    last = build.barrier(last, now, pool=trainer)
    for activity, seconds in ((g.DATA_MOVEMENT, inputs.data_movement_s), (g.OFFLOAD, inputs.offload_s)):
        last = build.add(activity, now, now + seconds, after=last, at=g.Place(pool=trainer))
        now += seconds
    scoring = (now, now + inputs.scoring_s)
    last = build.add(g.SCORING, *scoring, work=inputs.scored_tokens, after=last, at=g.Place(pool=trainer, rank=ranks))
    now += float(inputs.scoring_s.max())
    last = build.barrier(last, now, pool=trainer)
    last, now = _add_training(build, inputs, now, last, trainer)
    replicas = np.arange(len(inputs.replicas))
    sync = build.add(
        g.WEIGHT_SYNC, now, now + inputs.weight_sync_s, after=last, kind=g.WEIGHTS, at=g.Place(pool=0, rank=replicas)
    )
    build.barrier(sync, now + float(inputs.weight_sync_s.max()))
    return build.freeze(samples_of(result.timelines, [r.limits.max_running for r in inputs.replicas]))


def _add_training(
    build: g.GraphBuilder, inputs: StepInputs, now: float, after: IntArray, pool: int
) -> tuple[IntArray, float]:
    """Pipelines of all ranks, gradient sync by pipeline stage, optimizer; last barrier and its time."""
    stages, count = inputs.trainer[0].forward_s.shape
    shape = PipelineShape.of(stages, count)
    done = np.empty((len(inputs.trainer), stages), dtype=np.int64)
    done_s = np.empty(done.shape)
    for rank, costs in enumerate(inputs.trainer):
        seconds = shape.durations(costs, inputs.recompute_share)
        end = now + shape.order.replay(np.zeros(shape.activity.size), seconds)
        tokens = inputs.microbatch_tokens[rank][shape.unit]
        index = np.empty(shape.activity.size, dtype=np.int64)
        for activity in np.unique(shape.activity):
            at = np.flatnonzero(shape.activity == activity)
            index[at] = build.add(
                int(activity),
                end[at] - seconds[at],
                end[at],
                work=tokens[at],
                at=g.Place(pool=pool, rank=rank, part=shape.part[at], unit=shape.unit[at]),
            )
        build.edge(index[shape.source], index[shape.target])
        build.edge(after, index[shape.firsts])
        done[rank], done_s[rank] = index[shape.lasts], end[shape.lasts]
    ranks = np.arange(len(inputs.trainer))
    finished, finish_s = [], np.empty(stages)
    for part in range(stages):
        ready = float(done_s[:, part].max())
        late = build.barrier(done[:, part], ready, pool=pool)
        finish_s[part] = ready + inputs.gradient_sync_s[part]
        here = g.Place(pool=pool, rank=ranks, part=part)
        sync = build.add(g.COMMUNICATION, ready, finish_s[part], after=late, at=here)
        updated_s = finish_s[part] + inputs.optimizer_s
        finished.append(build.add(g.OPTIMIZER, finish_s[part], updated_s, after=sync, at=here))
    now = float(finish_s.max() + inputs.optimizer_s.max())
    return build.barrier(np.concatenate(finished), now, pool=pool), now


@dataclass(frozen=True, eq=False)
class PipelineShape:
    """Vertices and edges of 1F1B on P devices with M micro-batches, the same for every rank.

    Transfers between neighbours are vertices of their own and pass one at a time per direction, in the order in which
    they are produced, as in `rlperf.sim.pipeline.simulate`.
    """

    activity: IntArray
    part: IntArray
    unit: IntArray
    source: IntArray
    target: IntArray
    firsts: IntArray
    lasts: IntArray
    order: g.Order

    @classmethod
    def of(cls, stages: int, count: int) -> PipelineShape:
        """The shape. Vertices lie as [kind, stage, micro-batch] with kinds F, recompute, B, transfer of F, of B."""
        kinds = (g.FORWARD, g.RECOMPUTE, g.BACKWARD, g.COMMUNICATION, g.COMMUNICATION)
        index = np.arange(len(kinds) * stages * count).reshape(len(kinds), stages, count)
        kind, part, unit = (axis.ravel() for axis in np.indices(index.shape))
        forward, again, backward, down, up = index
        edges = [(again, backward), (forward, down), (backward, up), (down[:-1], forward[1:]), (up[1:], again[:-1])]
        firsts, lasts = [], []
        for device, orders in enumerate(one_f_one_b(stages, count)):
            heads = np.array([(forward if op[0] == 0 else again)[device, op[2]] for op in orders])
            tails = np.array([(forward if op[0] == 0 else backward)[device, op[2]] for op in orders])
            edges.append((tails[:-1], heads[1:]))
            for code, link in ((0, down), (1, up)):
                sent = np.array([link[device, op[2]] for op in orders if op[0] == code])
                edges.append((sent[:-1], sent[1:]))
            firsts.append(heads[0])
            lasts.append(tails[-1])
        source, target = (np.concatenate([e[i].ravel() for e in edges]) for i in (0, 1))
        return cls(
            np.array(kinds)[kind], part, unit, source, target, np.array(firsts), np.array(lasts),
            g.Order.of(index.size, source, target),
        )  # fmt: skip

    def durations(self, costs: StageCosts, recompute_share: float) -> FloatArray:
        """Seconds of the vertices [s]."""
        backward = costs.backward_input_s + costs.backward_weight_s
        transfer = np.zeros((2, *backward.shape))
        transfer[0, :-1], transfer[1, 1:] = costs.transfer_s, costs.transfer_s
        parts = (costs.forward_s, backward * recompute_share, backward * (1.0 - recompute_share), *transfer)
        return np.stack(parts).ravel()
