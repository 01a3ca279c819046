"""Composition: one rl_step (or several, where they overlap) as a Timeline, from the seconds of its stages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlperf.layout import FloatArray
from rlperf.sim.rl_step import timeline as tl
from rlperf.sim.rl_step.modes import Execution, first_chunk_s, latency_s, sync_pauses
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rollout.rollout import RolloutResult
from rlperf.specs.modes import Form


@dataclass(frozen=True)
class Transitions:
    """What a colocated pool does between its roles [s]: engine to sleep, trainer in, trainer out, engine awake."""

    sleep_s: float = 0.0
    onload_s: float = 0.0
    offload_s: float = 0.0
    wake_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All four [s]."""
        return self.sleep_s + self.onload_s + self.offload_s + self.wake_s


@dataclass(frozen=True, eq=False)
class StepStages:
    """Seconds of every stage of one batch; arrays hold one entry per replica or data-parallel rank.

    Attributes
    ----------
    rollout_s : end of each replica's rollout, from its begin [s] ``[replicas]``
    scoring_s, training_s : of each rank of the trainer, own work, waiting not included [s] ``[ranks]``
    reward_s : after the rollout, of each rank; what runs during it is hidden [s] ``[ranks]``
    reward_apart : reward runs on devices of its own (a judge model, sandboxes), the rollout pool waits meanwhile
    values_s, critic_s : the critic's values and updates on devices of its own [s]; 0 = part of scoring_s, training_s
    group_finish_s : end of each group, ascending; streaming feeds the trainer by it; None: evenly from the first chunk
        to the last [s] ``[groups]``
    rollout_steady_s : seconds per batch under continuous refill; None = the mean replica's busy time [s]
    rollout_group_s : from the start of a group to its last response, mean; None = the makespan [s]
    rollout_first_s : as in `StageSeconds`; None = told by ``rollout_group_s`` [s]
    weight_sync_s, data_movement_s, other_s, recompute_s, swap_s, scorer_s : as in `StageSeconds` [s]
    """

    rollout_s: FloatArray
    scoring_s: FloatArray = field(default_factory=lambda: np.zeros(1))
    training_s: FloatArray = field(default_factory=lambda: np.zeros(1))
    reward_s: FloatArray = field(default_factory=lambda: np.zeros(1))
    reward_apart: bool = False
    values_s: float = 0.0
    critic_s: float = 0.0
    group_finish_s: FloatArray | None = None
    rollout_steady_s: float | None = None
    rollout_group_s: float | None = None
    rollout_first_s: float | None = None
    weight_sync_s: float = 0.0
    data_movement_s: float = 0.0
    other_s: float = 0.0
    recompute_s: float = 0.0
    swap_s: float = 0.0
    scorer_s: float = 0.0
    transitions: Transitions = Transitions()

    @classmethod
    def of(cls, rollout: RolloutResult | npt.ArrayLike, **stages: object) -> StepStages:
        """From a simulated rollout (its replicas, groups of one finish time each) or seconds per replica."""
        arrays: dict[str, FloatArray] = {
            name: np.atleast_1d(np.asarray(stages.pop(name), np.float64))
            for name in ("scoring_s", "training_s", "reward_s")
            if name in stages
        }
        if isinstance(rollout, RolloutResult):
            arrays["rollout_s"] = rollout.replica_finish_s
            stages.setdefault("rollout_steady_s", steady_rollout_s(rollout))
            stages.setdefault("group_finish_s", np.sort(rollout.finish_s))
        else:
            arrays["rollout_s"] = np.atleast_1d(np.asarray(rollout, np.float64))
        return cls(**arrays, **stages)  # type: ignore[arg-type]

    def steady_s(self) -> float:
        """Seconds per batch under continuous refill [s]."""
        return float(self.rollout_s.mean()) if self.rollout_steady_s is None else self.rollout_steady_s

    def times(self) -> StageSeconds:
        """The same as plain numbers: every stage ends with its slowest rank."""
        return StageSeconds.of(
            rollout_s=float(self.rollout_s.max()),
            scoring_s=max(float(self.scoring_s.max()), self.values_s),
            training_s=max(float(self.training_s.max()), self.critic_s),
            weight_sync_s=self.weight_sync_s,
            rollout_steady_s=self.steady_s(),
            rollout_group_s=self.rollout_group_s,
            rollout_first_s=self.rollout_first_s,
            reward_s=float(self.reward_s.max()),
            data_movement_s=self.data_movement_s,
            offload_s=self.transitions.total_s,
            other_s=self.other_s,
            recompute_s=self.recompute_s,
            swap_s=self.swap_s,
            scorer_s=self.scorer_s,
        )


def steady_rollout_s(rollout: RolloutResult) -> float:
    """Seconds per batch when finished requests are replaced at once: a full batch all the time, no tail [s].

    The device-seconds of the synchronous rollout less those lost to tail and imbalance, spread over all devices. It
    is a bound (nothing left of the tail), reached when the queue is deep enough.
    """
    devices = float(rollout.all_devices)
    lost = (rollout.lost.tail + rollout.lost.imbalance) / devices
    return max(rollout.makespan_s - lost, 0.05 * rollout.makespan_s)


DEEPEST = 64
"""Batches under way that are drawn: one takes at most twenty times its share of full engines (`steady_rollout_s`), so
that more of them change no rl_step, and each stands for four rl_steps of the timeline."""


class _Builder:
    """Spans of one mode over its pools; not public."""

    def __init__(self, execution: Execution, stages: StepStages, devices: tuple[int, int]) -> None:
        self.form = Form(int(execution.form))
        self.shared = bool(execution.shares_devices)
        self.stages = stages
        self.execution = execution
        self.interval = max(int(np.asarray(execution.sync_interval)), 1)
        pools, sizes = ["rollout", "trainer"], list(devices)
        if self.shared:
            pools, sizes = ["shared"], [devices[1]]
        self.trainer = len(pools) - 1
        self.critic = self.trainer
        self.reward = 0
        own = {"reward": stages.reward_apart, "critic": stages.values_s > 0 or stages.critic_s > 0}
        for name, apart in own.items():
            if apart:
                setattr(self, name, len(pools))
                pools.append(name)
                sizes.append(1)
        self.build = tl.TimelineBuilder(tuple(pools), tuple(sizes))

    def ranks(self, stage: int, pool: int, seconds: FloatArray, start_s: float, step: int) -> float:
        """One span per rank, all starting together, none where the stage takes no time; when the last one ends [s]."""
        if not np.any(seconds > 0):
            return start_s
        for rank, value in enumerate(seconds.tolist()):
            self.build.span(stage, pool, rank, start_s, start_s + value, rl_step=step)
        return start_s + float(seconds.max())

    def one(self, stage: int, pool: int, seconds: float, start_s: float, step: int) -> float:
        return self.ranks(stage, pool, np.array([seconds]), start_s, step)

    def rollout(self, start_s: float, step: int) -> float:
        at = self.ranks(tl.ROLLOUT, 0, self.stages.rollout_s, start_s, step)
        return self.ranks(tl.REWARD, self.reward, self.stages.reward_s, at, step)

    def work(self, start_s: float, step: int, share: float = 1.0) -> float:
        """Data movement, scoring and training, each beside a critic of its own devices, fixed overhead."""
        s, pool = self.stages, self.trainer
        at = self.one(tl.DATA_MOVEMENT, pool, s.data_movement_s * share, start_s, step)
        scored = self.ranks(tl.SCORING, pool, s.scoring_s * share, at, step)
        at = max(scored, self.one(tl.SCORING, self.critic, s.values_s * share, at, step))
        trained = self.ranks(tl.TRAINING, pool, s.training_s * share, at, step)
        at = max(trained, self.one(tl.TRAINING, self.critic, s.critic_s * share, at, step))
        return self.one(tl.OTHER, pool, s.other_s * share, at, step)

    def sync(self, start_s: float, step: int) -> float:
        if (step + 1) % self.interval:
            return start_s
        return self.one(tl.WEIGHT_SYNC, self.trainer, self.stages.weight_sync_s, start_s, step)


def compose_rl_step(
    execution: Execution,
    stages: StepStages,
    *,
    rollout_devices: int = 1,
    trainer_devices: int = 1,
    rl_steps: int | None = None,
) -> tl.Timeline:
    """The timeline of one rl_step; of several, after a warm-up, in modes where they overlap.

    ``rl_step_s`` of the result equals `modes.step_seconds` of the same stages (streaming: unless ``group_finish_s``
    states when each group ends, which then decides). Modes with a queue move whole batches here;
    `asynchronous.simulate` moves groups, and shows staleness.

    >>> stages = StepStages.of([50.0, 60.0], scoring_s=10.0, training_s=[18.0, 20.0], weight_sync_s=4.0)
    >>> compose_rl_step(Execution("colocated"), stages).rl_step_s
    94.0
    """
    builder = _Builder(execution, stages, (rollout_devices, trainer_devices))
    interval = builder.interval
    if builder.form is Form.BARRIER:
        return _barriered(builder, (rl_steps or 4) * interval)
    if builder.form is Form.REFILLED:
        lag = min(int(execution.lag), DEEPEST)
        return _refilled(builder, (rl_steps or 4) * interval * (lag + 1), lag)
    count = (rl_steps or 1) * interval
    at = 0.0
    for step in range(count):
        at = _serial(builder, at, step)
    return builder.build.freeze()


def _serial(b: _Builder, start_s: float, step: int) -> float:
    """A synchronous rl_step: everything in turn; streaming starts work on the groups that are done."""
    s = b.stages
    at = b.rollout(start_s, step)
    if b.form is Form.STREAMED:
        return b.sync(_streamed(b, start_s, step, at), step)
    if not b.shared:
        return b.sync(b.work(at, step), step)
    at = b.one(tl.SLEEP, 0, s.transitions.sleep_s, at, step)
    at = b.one(tl.ONLOAD, 0, s.transitions.onload_s, at, step)
    at = b.one(tl.OFFLOAD, 0, s.transitions.offload_s, b.work(at, step), step)
    return b.one(tl.WAKE, 0, s.transitions.wake_s, b.sync(at, step), step)


def _streamed(b: _Builder, start_s: float, step: int, rolled_s: float) -> float:
    """Chunks of the batch go to the trainer as their last group ends; the last one also waits for the reward."""
    s = b.stages
    chunks = max(int(np.asarray(b.execution.chunks)), 1)
    makespan = float(s.rollout_s.max())
    if s.group_finish_s is None:
        first = float(first_chunk_s(b.execution, s.times()))
        ready = np.linspace(first, makespan, chunks) if chunks > 1 else np.array([makespan])
    else:
        finish = np.sort(s.group_finish_s)
        ready = finish[np.ceil(np.arange(1, chunks + 1) / chunks * finish.size).astype(np.int64) - 1]
    at = start_s
    for index in range(chunks):
        last = index == chunks - 1
        at = b.work(max(at, rolled_s if last else start_s + float(ready[index])), step, 1.0 / chunks)
    return at


def _barriered(b: _Builder, count: int) -> tl.Timeline:
    """One step off: batch k + 1 is rolled out while batch k trains; both wait for each other at every weight sync."""
    at = b.rollout(0.0, 0)
    for step in range(count):
        trained = b.work(at, step)
        at = b.sync(max(trained, b.rollout(at, step + 1)), step)
    return _cut(b, count, b.interval)


def _refilled(b: _Builder, count: int, lag: int) -> tl.Timeline:
    """Batches flow: rollout every R_s + p, latency R + Q, at most ``lag`` + 1 between first token and trained."""
    s, e, times = b.stages, b.execution, b.stages.times()
    pause = float(sync_pauses(e, times)[1])
    # the syncs of the batches in front hold up a batch's rollout; groups train as they end, not as they were started
    late = float(latency_s(e, times, lag, e.grouped) - latency_s(e, times, 0, 0))
    begin, free, passed = 0.0, 0.0, -s.scorer_s
    ends: list[float] = []
    for step in range(count):
        gate = ends[step - lag - 1] if step > lag else 0.0
        begin = max(begin + (s.steady_s() + pause if step else 0.0), gate)
        passed = max(b.rollout(begin, step) + late, passed + s.scorer_s)
        free = b.sync(b.work(max(passed, free), step), step)
        ends.append(free)
    return _cut(b, count, b.interval * (lag + 1))


def _cut(b: _Builder, count: int, period: int) -> tl.Timeline:
    """Freeze, with the first half (a whole number of periods) as warm-up; what belongs to no whole rl_step is cut."""
    line = b.build.freeze()
    kept = line.rl_step < count
    return tl.Timeline(
        stage=line.stage[kept],
        pool=line.pool[kept],
        rank=line.rank[kept],
        start_s=line.start_s[kept],
        end_s=line.end_s[kept],
        rl_step=line.rl_step[kept],
        pools=line.pools,
        pool_devices=line.pool_devices,
        warmup=count // 2 // period * period,
    )
