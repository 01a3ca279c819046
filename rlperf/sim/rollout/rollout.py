"""Many replicas: routing, the makespan, and where the device-seconds went that produced no tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.errors import SpecError
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.event_engine import EventEngine
from rlperf.sim.rollout.events import timeline_of
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.replica import PLAIN, check, simulate_replica
from rlperf.sim.rollout.routing import Routing, route
from rlperf.sim.rollout.timeline import ReplicaTimeline
from rlperf.sim.rollout.trajectories import Trajectories


@dataclass(frozen=True, eq=False)
class ReplicaCosts:
    """One replica of the engine: what its engine_steps cost, its limits, its devices."""

    cost: EngineStepCost
    limits: EngineLimits
    devices: int = 1


@dataclass(frozen=True)
class LostSeconds:
    """Device-seconds of a rollout that did not go into full batches, by cause; the causes do not overlap.

    Attributes
    ----------
    tail : after a replica's last admission, the share 1 - b(t) / b of its batch that has emptied [device s]
    imbalance : replicas that are done while others still run [device s]
    tool_wait : replicas without any request to compute, before they are done [device s]
    prefill_stall : what prefill adds to engine_steps that requests wait for in order to decode [device s]
    preemption : prefill of tokens that had been computed before [device s]
    """

    tail: float
    imbalance: float
    tool_wait: float
    prefill_stall: float
    preemption: float


@dataclass(frozen=True, eq=False)
class RolloutResult:
    """Outcome of a rollout over all replicas.

    Attributes
    ----------
    finish_s : end of each trajectory [s] ``[trajectories]``
    members : trajectories of each replica, in the order of its timeline
    timelines : one per replica
    devices : of each replica ``[replicas]``
    engines : what each replica was, the readers behind the others ``[replicas]``
    generated_tokens : of all trajectories [tokens]
    readers : timelines of replicas that only read prompts, beside those of the others; most often none
    roomy_tokens : of each replica's cache from which on nothing changes; infinite where a larger one could [tokens]
    full_places : whether more places of each replica could have changed anything
    """

    finish_s: FloatArray
    members: tuple[IntArray, ...]
    timelines: tuple[ReplicaTimeline, ...]
    devices: IntArray
    engines: tuple[ReplicaCosts, ...]
    generated_tokens: int
    readers: tuple[ReplicaTimeline, ...] = ()
    roomy_tokens: float = np.inf
    full_places: bool = False

    @cached_property
    def lost(self) -> LostSeconds:
        """Device-seconds without full batches, by cause: of the rollouts that are reported, and few are."""
        return lost_seconds((*self.timelines, *self.readers), self.engines)

    @property
    def makespan_s(self) -> float:
        """End of the last trajectory [s]."""
        return float(self.finish_s.max())

    @property
    def replica_finish_s(self) -> FloatArray:
        """End of each replica's last trajectory [s] ``[replicas]``."""
        return np.array([t.makespan_s for t in self.timelines])

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the whole rollout."""
        return self.generated_tokens / self.makespan_s

    @property
    def all_devices(self) -> int:
        """Of all replicas, those that only read prompts (as many devices each) with them."""
        return int(self.devices.sum()) + len(self.readers) * int(self.devices[0])

    @property
    def preemptions(self) -> int:
        """Of all replicas."""
        return sum(t.preemptions for t in self.timelines)

    @property
    def short_of_cache(self) -> bool:
        """Whether what was computed was evicted and computed again: a request's, or a context's that waited."""
        return bool(self.preemptions) or any(t.segments.recomputed.any() for t in self.timelines)


def simulate_rollout(
    trajectories: Trajectories,
    replicas: int | Sequence[ReplicaCosts],
    *,
    cost: EngineStepCost | None = None,
    limits: EngineLimits | None = None,
    devices_per_replica: int = 1,
    routing: Routing | IntArray = "round_robin",
    options: EngineOptions = PLAIN,
) -> RolloutResult:
    """Simulate a synchronous rollout over several replicas, event by event.

    Parameters
    ----------
    trajectories : all trajectories of the rl_step
    replicas : the replicas, which may differ; or how many equal ones of ``cost``, ``limits``, ``devices_per_replica``
    routing : one of `Routing`, or the replica of each trajectory ``[trajectories]``
    options : speculative decoding, tool concurrency (per replica)

    >>> cost = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=1.0)
    >>> limits = EngineLimits(kv_tokens=np.inf, max_running=8)
    >>> result = simulate_rollout(Trajectories.of(4, [3, 9]), 2, cost=cost, limits=limits)
    >>> result.replica_finish_s.tolist(), result.lost.imbalance
    ([3.0, 9.0], 6.0)
    """
    if isinstance(replicas, int):
        if cost is None or limits is None:
            raise SpecError("simulate_rollout: a number of replicas needs cost and limits")
        replicas = [ReplicaCosts(cost, limits, devices_per_replica)] * replicas
    if not replicas or not len(trajectories):
        raise SpecError("simulate_rollout: nothing to serve" if replicas else "simulate_rollout: no replicas")
    if isinstance(routing, str) and routing == "least_loaded":
        members, timelines = _pull(trajectories, replicas, options)
    else:
        chosen = route(trajectories, routing, _speed(replicas)) if isinstance(routing, str) else np.asarray(routing)
        if chosen.shape != (len(trajectories),) or chosen.min() < 0 or chosen.max() >= len(replicas):
            raise SpecError("simulate_rollout: routing must name a replica for every trajectory")
        members = tuple(np.flatnonzero(chosen == r) for r in range(len(replicas)))
        timelines = tuple(
            simulate_replica(trajectories.take(m), r.cost, r.limits, options=options)
            for m, r in zip(members, replicas, strict=True)
        )
    finish = np.zeros(len(trajectories))
    for m, timeline in zip(members, timelines, strict=True):
        finish[m] = timeline.trajectory_finish_s
    return RolloutResult(
        finish_s=finish,
        members=members,
        timelines=timelines,
        devices=np.array([r.devices for r in replicas], dtype=np.int64),
        engines=tuple(replicas),
        generated_tokens=int(trajectories.response_tokens.sum()),
        roomy_tokens=max(timeline.roomy_tokens for timeline in timelines),
        full_places=any(timeline.full_places for timeline in timelines),
    )


def _speed(replicas: Sequence[ReplicaCosts]) -> FloatArray:
    """Relative speed: engine_steps per second times requests, at each replica's own max_running (at most 256)."""

    @cache
    def speed(replica: ReplicaCosts) -> float:
        batch = min(replica.limits.max_running, 256)
        return batch / float(replica.cost.decode_s(batch, 0.0))

    speeds = [speed(replica) for replica in replicas]
    return np.array(speeds) / max(speeds)


def _pull(
    trajectories: Trajectories, replicas: Sequence[ReplicaCosts], options: EngineOptions
) -> tuple[tuple[IntArray, ...], tuple[ReplicaTimeline, ...]]:
    """Least loaded: one central queue; at every event it goes to the emptiest replicas that have a free place."""
    engines = []
    for replica in replicas:
        check(trajectories, replica.limits, options)
        engines.append(EventEngine(trajectories, replica.cost, replica.limits, options, queued=False))
    arrival = trajectories.arrival_s
    queue = deque(np.lexsort((np.arange(len(trajectories)), arrival)).tolist())
    members: list[list[int]] = [[] for _ in engines]
    while True:
        # an engine without work can act as soon as it is done and the queue has something for it
        supply_s = float(arrival[queue[0]]) if queue else np.inf
        acts_s = [e.action_s if e.outstanding else max(e.now, supply_s) for e in engines]
        now = min(acts_s)
        if now == np.inf:
            break
        while queue and arrival[queue[0]] <= now:
            free = [
                (engine.outstanding, r)
                for r, engine in enumerate(engines)
                if engine.outstanding < engine.max_running and acts_s[r] <= now
            ]
            if not free:
                break
            r = min(free)[1]
            i = queue.popleft()
            engines[r].submit(i, now)
            members[r].append(i)
        for engine in engines:
            engine.more_to_come = bool(queue)
        min(engines, key=lambda engine: engine.action_s).advance()
    chosen = tuple(np.array(sorted(m), dtype=np.int64) for m in members)
    return chosen, tuple(timeline_of(engine, m) for engine, m in zip(engines, chosen, strict=True))


def lost_seconds(timelines: Sequence[ReplicaTimeline], replicas: Sequence[ReplicaCosts]) -> LostSeconds:
    """Device-seconds lost by cause (definitions: `LostSeconds`)."""
    makespan = max(t.makespan_s for t in timelines)
    total = np.zeros(5)
    decodes = _decode_seconds(timelines, replicas)
    for timeline, replica, alone_s in zip(timelines, replicas, decodes, strict=True):
        seg = timeline.segments
        prefill = seg.prefill_tokens > 0
        decode_s = np.where(prefill & (seg.running > 0), alone_s, 0.0)
        prefill_s = np.where(prefill, np.maximum(seg.seconds - decode_s, 0.0), 0.0)
        again = prefill_s * seg.recomputed / np.maximum(seg.prefill_tokens, 1)
        stall = np.where((seg.running > 0) | (seg.stalled > 0), prefill_s - again, 0.0)
        last = int(np.flatnonzero(prefill)[-1]) + 1 if prefill.any() else 0
        rest = seg.running[last:]
        tail = seg.seconds[last:] * (1.0 - rest / rest[0]) if len(rest) else np.zeros(1)
        causes = [tail.sum(), makespan - timeline.makespan_s, timeline.tool_wait_s, stall.sum(), again.sum()]
        total += replica.devices * np.array(causes)
    return LostSeconds(*total.tolist())


def _decode_seconds(timelines: Sequence[ReplicaTimeline], replicas: Sequence[ReplicaCosts]) -> list[FloatArray]:
    """Seconds that the decodes of every run of engine_steps would take alone; replicas of one cost at once."""
    found: list[FloatArray] = [np.zeros(0)] * len(timelines)
    alike: dict[EngineStepCost, list[int]] = {}
    for r, replica in enumerate(replicas):
        alike.setdefault(replica.cost, []).append(r)
    for cost, own in alike.items():
        running = np.concatenate([timelines[r].segments.running for r in own]).astype(np.float64)
        seconds = cost.decode_s(running, np.concatenate([timelines[r].segments.keys for r in own]))
        ends = np.cumsum([len(timelines[r].segments) for r in own])
        for r, part in zip(own, np.split(seconds, ends[:-1]), strict=True):
            found[r] = part
    return found
