"""Asynchronous RL in its steady state, event by event: rollout replicas, the queue of finished groups, the trainer.

The closed forms of `modes` take means and all slots busy. Here groups wait for their slowest sample, queues fill and
block, weight syncs pause or drain the engines, and the trainer starves now and then; the period, the staleness
*distribution* and the queue come out of it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlperf.errors import SpecError
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rl_step.replicas import Agents, RunGroup, RunReplica, TokenPace, TokenReplica, TurnReplica

Update = Literal["in_flight", "interrupt", "drain"]


@dataclass(frozen=True, eq=False)
class AsyncRun:
    """What runs.

    Attributes
    ----------
    response_tokens : generated tokens of the samples, drawn group by group with replacement [tokens] ``[groups, n]``
    batch : samples of one optimizer batch [samples]
    train_s : trainer's seconds per optimizer batch, scoring and data movement included [s]
    engines : the pace of a replica's tokens; or samples of several turns with the engine that serves them, under way
        until their last turn has ended
    replicas, slots : rollout replicas and the requests that each runs at once
    wait_s : reward of a sample, off the engine, after its last token [s]
    sync_s : weight sync; the trainer takes part in all of it [s]
    swap_s : what an engine stands still when it takes weights in flight or interrupted [s]
    sync_interval : optimizer batches per weight sync
    update : how engines take new weights. in_flight: requests go on with their old cache; interrupt: requests stop
        and recompute their cache; drain: nothing new starts until the samples under way have ended
    queue : capacity between rollout and trainer; nothing new starts while it is full [batches]
    max_staleness : k; at most (version + k + 1) sync intervals of samples have been started [1]
    groups : that have been started and not ended at most; None: any number
    samples : the same of samples, whatever group they are of
    whole_groups : a group starts when one replica has slots for all of it; engines start what they can of it
    train_cv : coefficient of variation of the trainer's time [1]
    """

    response_tokens: FloatArray
    batch: int
    train_s: float
    engines: TokenPace | Agents
    replicas: int = 1
    slots: int = 128
    wait_s: float = 0.0
    sync_s: float = 0.0
    swap_s: float = 0.0
    sync_interval: int = 1
    update: Update = "in_flight"
    queue: float | None = None
    max_staleness: int | None = None
    groups: int | None = None
    samples: int | None = None
    whole_groups: bool = False
    train_cv: float = 0.0

    def __post_init__(self) -> None:
        if self.response_tokens.ndim != 2 or not self.response_tokens.size:
            raise SpecError(f"response_tokens must be [groups, samples] (given: shape {self.response_tokens.shape})")
        if self.queue is None and self.max_staleness is None:
            raise SpecError("an asynchronous run needs a bound: queue or max_staleness")
        if self.batch < 1 or self.replicas < 1 or self.slots < 1 or self.sync_interval < 1:
            raise SpecError("batch, replicas, slots and sync_interval must be at least 1")
        if self.queue is not None and self.queue < 1:
            raise SpecError("a queue below one batch never feeds the trainer")


@dataclass(frozen=True, eq=False)
class AsyncResult:
    """The steady state.

    Attributes
    ----------
    period_s : seconds per optimizer batch, warm-up left out [s]
    samples_per_s : trained samples per second [1/s]
    staleness_counts : trained samples by weight versions behind, index = versions ``[max + 1]``
    queue_samples : time average of finished samples that wait for the trainer [samples]
    trainer_busy, slots_busy : share of time in training; share of rollout slots in use [1]
    """

    period_s: float
    samples_per_s: float
    staleness_counts: IntArray
    queue_samples: float
    trainer_busy: float
    slots_busy: float

    @property
    def staleness_mean(self) -> float:
        """Mean weight versions behind [1]."""
        versions = np.arange(self.staleness_counts.size)
        return float((versions * self.staleness_counts).sum() / self.staleness_counts.sum())


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch trained from ``start_s`` to ``end_s``."""

    start_s: float
    end_s: float
    version: int
    groups: tuple[RunGroup, ...]


# Event codes, in the order in which simultaneous events are handled: work ends before anything new starts.
_SAMPLE, _DONE, _TRAINED, _SYNCED = range(4)


def _replicas(run: AsyncRun) -> Sequence[RunReplica]:
    """Those of a run, idle."""
    engines = run.engines
    if isinstance(engines, Agents):
        look_s = engines.look_s
        return [TurnReplica(run.slots, engines, look_s) for _ in range(run.replicas)]
    tokens = run.response_tokens.astype(np.float64)
    # in the steady state a running request, of which long ones are more, has written half of its own
    written = float((tokens**2).mean()) / (2.0 * float(tokens.mean()))
    return [TokenReplica(run.slots, engines, tokens, written) for _ in range(run.replicas)]


class _Simulation:
    """State of a run. Not public: `simulate` drives it and reads the result."""

    def __init__(self, run: AsyncRun, seed: int) -> None:
        self.run = run
        self.random = np.random.default_rng(seed)
        self.group_size = run.response_tokens.shape[1]
        self.replicas = _replicas(run)
        self.stamps = [0] * run.replicas
        self.need = self.group_size if run.whole_groups and run.slots >= self.group_size else 1
        self.events: list[tuple[float, int, int, int, int, RunGroup | None]] = []
        self.serial = 0
        self.now_s = 0.0
        self.version = 0
        self.launched = self.open = 0
        self.ready: deque[RunGroup] = deque()
        self.ready_samples = 0
        self.pending: deque[tuple[RunGroup, int]] = deque()
        self.training: tuple[float, tuple[RunGroup, ...], int] | None = None
        self.trained_s = 0.0
        self.draining: float | None = None
        self.batches: list[_Batch] = []
        self.running = 0
        self.order: list[int] = []
        self.area_queue = 0.0
        self.area_running = 0.0
        self.marks: list[tuple[float, float, float]] = []

    # -- rollout ------------------------------------------------------------------------------------------------

    def may_start(self) -> bool:
        run = self.run
        if run.groups is not None and self.open >= run.groups:
            return False
        if run.queue is not None and self.ready_samples >= run.queue * run.batch:
            return False
        if run.max_staleness is None:
            return True
        return self.launched < (self.version + run.max_staleness + 1) * run.batch * run.sync_interval

    def next_row(self) -> int:
        """A group, drawn with replacement."""
        if not self.order:
            count = self.run.response_tokens.shape[0]
            self.order = self.random.integers(0, count, size=max(count, 256)).tolist()
        return self.order.pop()

    def start(self) -> None:
        """Fill free slots, the emptiest replica first, as far as the bounds allow."""
        most = np.inf if self.run.samples is None else self.run.samples
        touched: set[int] = set()
        while self.draining is None and self.running < most and (self.pending or self.may_start()):
            index = max(range(len(self.replicas)), key=lambda i: self.replicas[i].free)
            replica = self.replicas[index]
            if replica.free < self.need:
                break
            if not self.pending:
                size = self.group_size
                group = RunGroup(self.version, size, size, row=self.next_row())
                self.pending.extend((group, sample) for sample in range(size))
                self.launched += size
                self.open += 1
            for _ in range(self.need):
                replica.begin(self.now_s, *self.pending.popleft())
                self.running += 1
            touched.add(index)
        for index in touched:
            self.schedule(index)

    def schedule(self, index: int) -> None:
        """Announce when a replica has to be looked at; earlier announcements become void."""
        self.stamps[index] += 1
        if (due := self.replicas[index].due_s(self.now_s)) is not None:
            self.push(due, _SAMPLE, index, self.stamps[index], None)

    def push(self, time_s: float, kind: int, index: int, stamp: int, group: RunGroup | None) -> None:
        self.serial += 1
        heapq.heappush(self.events, (time_s, kind, self.serial, index, stamp, group))

    def look_at(self, index: int) -> None:
        """A sample of a replica may have ended."""
        if (group := self.replicas[index].ended(self.now_s)) is not None:
            self.running -= 1
            if self.run.wait_s > 0:
                self.push(self.now_s + self.run.wait_s, _DONE, index, 0, group)
            else:
                self.sample_done(group)
        self.schedule(index)

    def sample_done(self, group: RunGroup) -> None:
        group.left -= 1
        if group.left == 0:
            self.open -= 1
            self.ready.append(group)
            self.ready_samples += group.samples

    # -- trainer ------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Take a batch when the trainer is free and enough samples wait."""
        if self.training is not None or self.draining is not None or self.ready_samples < self.run.batch:
            return
        taken: list[RunGroup] = []
        count = 0
        while count < self.run.batch:
            group = self.ready.popleft()
            part = min(group.samples, self.run.batch - count)
            taken.append(RunGroup(group.version, 0, part))
            count += part
            group.samples -= part
            if group.samples:
                self.ready.appendleft(group)
        self.ready_samples -= count
        self.training = (self.now_s, tuple(taken), self.version)
        spread = self.run.train_cv
        factor = max(1.0 + spread * float(self.random.standard_normal()), 0.05) if spread else 1.0
        self.push(self.now_s + self.run.train_s * factor, _TRAINED, 0, 0, None)

    def trained(self) -> None:
        """A batch is trained: sync the weights if it is time, else take the next."""
        self.trained_s = self.now_s
        if (len(self.batches) + 1) % self.run.sync_interval:
            self.close_batch()
        elif self.run.update == "drain" and self.running:
            self.draining = self.now_s
        else:
            self.sync()

    def sync(self) -> None:
        run = self.run
        # While it drains and syncs, nothing new starts; in flight the engines only stop for the swap.
        engines_s = run.sync_s if run.update == "drain" else run.swap_s
        for index, replica in enumerate(self.replicas):
            replica.take_weights(self.now_s, engines_s, interrupted=run.update == "interrupt")
            self.schedule(index)
        self.draining = self.now_s if run.update == "drain" else None
        self.push(self.now_s + run.sync_s, _SYNCED, 0, 0, None)

    def close_batch(self) -> None:
        assert self.training is not None
        start, groups, version = self.training
        self.batches.append(_Batch(start, self.trained_s, version, groups))
        self.training = None
        self.marks.append((self.now_s, self.area_queue, self.area_running))

    def step_to(self, time_s: float) -> None:
        span = time_s - self.now_s
        self.area_queue += span * self.ready_samples
        self.area_running += span * self.running
        self.now_s = time_s

    def drive(self, batches: int) -> None:
        self.start()
        while len(self.batches) < batches:
            time_s, kind, _, index, stamp, group = heapq.heappop(self.events)
            if kind == _SAMPLE and stamp != self.stamps[index]:
                continue
            self.step_to(time_s)
            if kind == _SAMPLE:
                self.look_at(index)
            elif kind == _DONE:
                assert group is not None
                self.sample_done(group)
            elif kind == _TRAINED:
                self.trained()
            else:
                self.version += 1
                self.draining = None
                self.close_batch()
            if self.draining is not None and self.running == 0 and not self.syncing():
                self.sync()
            self.train()
            self.start()

    def syncing(self) -> bool:
        return any(event[1] == _SYNCED for event in self.events)


def simulate(run: AsyncRun, *, rl_steps: int, warmup: int | None = None, seed: int = 0) -> AsyncResult:
    """Simulate ``rl_steps`` optimizer batches after a warm-up (default: as many as the pipeline holds, and ten more).

    >>> lengths = np.full((1, 4), 100.0)
    >>> run = AsyncRun(lengths, batch=8, train_s=5.0, engines=TokenPace(0.1), slots=8, max_staleness=0)
    >>> simulate(run, rl_steps=5).period_s  # on-policy: 100 tokens x 0.1 s, then 5 s of training
    15.0
    """
    held = max(run.queue or 0.0, (run.max_staleness or 0) + 1.0) + run.replicas * run.slots / run.batch
    skip = int(np.ceil(held)) + 10 if warmup is None else warmup
    state = _Simulation(run, seed)
    state.drive(rl_steps + skip)
    first_s, queue_before, running_before = state.marks[skip - 1] if skip else (0.0, 0.0, 0.0)
    last_s, queue_after, running_after = state.marks[-1]
    span_s = last_s - first_s
    kept = state.batches[skip:]
    stale = [batch.version - group.version for batch in kept for group in batch.groups]
    weight = [group.samples for batch in kept for group in batch.groups]
    return AsyncResult(
        period_s=span_s / rl_steps,
        samples_per_s=rl_steps * run.batch / span_s,
        staleness_counts=np.bincount(stale, weights=weight).astype(np.int64),
        queue_samples=(queue_after - queue_before) / span_s,
        trainer_busy=sum(batch.end_s - batch.start_s for batch in kept) / span_s,
        slots_busy=(running_after - running_before) / span_s / (run.replicas * run.slots),
    )
