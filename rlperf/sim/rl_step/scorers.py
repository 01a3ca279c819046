"""What teachers, reward models and judges take of an rl_step: closed form over pairs, and event by event.

A scorer reads every sequence, as it ends or when the whole rollout has, and the trainer waits for the last verdict.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlperf.layout import FloatArray, IntArray, taken
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.rollout_stage import RolloutStage
from rlperf.sim.rollout.rollout import RolloutResult
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.scorer import Scorer
from rlperf.workload import LengthTable

READ = 4096
"""Sequences of an rl_step whose ends the closed form follows, evenly spread where there are more."""


@dataclass(frozen=True, eq=False)
class Ends:
    """When the sequences of an rl_step end in a rollout of which only the seconds of an engine_step are known.

    Attributes
    ----------
    prompt, generated : tokens of every sequence ``[sequences]``
    kept : those that are scored ``[scored]``
    work : of the scorer, by sequence, 1 in all ``[scored]``
    """

    prompt: FloatArray
    generated: FloatArray
    kept: IntArray
    work: FloatArray
    _counts: dict[tuple[int, int], FloatArray] = field(default_factory=dict)

    @classmethod
    def of(cls, demand: Demand, scorer: Scorer, replicate: int) -> Ends:
        """Of one rl_step of a demand."""
        table = demand.trajectories[replicate]
        prompt, generated = (np.asarray(n, dtype=np.float64) for n in (table.prompt_tokens, table.response_tokens))
        kept = scored(generated.size, scorer.share)
        work = read_tokens(demand.tables[replicate], scorer) + float(scorer.response_tokens)
        some = np.unique(np.linspace(0, kept.size - 1, min(kept.size, READ)).round().astype(np.int64))
        return cls(prompt, generated, kept[some], work[some] / work[some].sum())

    def counts(self, replicas: int, slots: int) -> FloatArray:
        """Engine_steps until each sequence ends, their running requests, and their cached tokens ``[3][sequences]``."""
        share = -(-self.generated.size // replicas)
        key = (replicas, max(min(slots, share), 1))
        if key not in self._counts:
            found = np.zeros((3, self.generated.size))
            for own in (np.arange(r, self.generated.size, replicas) for r in range(min(replicas, self.generated.size))):
                found[:, own] = _decoded(self.prompt[own], self.generated[own], key[1])
            self._counts[key] = found
        return self._counts[key]

    def seconds(self, rollout: RolloutStage) -> tuple[FloatArray, FloatArray]:
        """Ends of those that are scored, and of the last of all, by the pace of every rollout [s].

        Returns
        -------
        ``[rollouts][scored]``, ``[rollouts]``; what a rollout has beside its paced engine_steps is in neither
        """
        ends, last = np.zeros((rollout.makespan_s.size, self.kept.size)), np.zeros(rollout.makespan_s.size)
        replicas = np.broadcast_to(rollout.writers, rollout.makespan_s.shape)
        for pool in {*zip(replicas.tolist(), rollout.slots.tolist(), strict=True)}:
            here = np.flatnonzero((replicas == pool[0]) & (rollout.slots == pool[1]))
            every = rollout.pace_s[here] @ self.counts(*pool)
            ends[here], last[here] = every[:, self.kept], every.max(axis=1)
        return ends, last


def _decoded(prompt: FloatArray, generated: FloatArray, slots: int) -> FloatArray:
    """`Ends.counts` of one replica that decodes ``slots`` sequences at once; the next starts as one ends.

    >>> _decoded(np.zeros(3), np.array([2.0, 4.0, 2.0]), 2).tolist()
    [[2.0, 4.0, 4.0], [4.0, 8.0, 8.0], [4.0, 12.0, 12.0]]

    A cache that cannot hold all of them to their ends is left out: engines admit greedily, and preempt later.
    """
    start, busy = np.zeros(generated.size), np.sort(generated[:slots]).tolist()
    for index in range(slots, generated.size):
        start[index] = heapq.heapreplace(busy, busy[0] + generated[index])
    end = start + generated
    at = np.concatenate([start, end])
    order = np.argsort(at, kind="stable")
    width = np.diff(at[order], prepend=0.0)
    sign = np.where(order < start.size, 1.0, -1.0)
    running = np.concatenate([[0.0], np.cumsum(sign)[:-1]])
    change = np.concatenate([prompt, -(prompt + generated)])[order]
    cached = np.concatenate([[0.0], np.cumsum(change)[:-1]]) + np.concatenate([[0.0], np.cumsum(running * width)[:-1]])
    place = np.empty(at.size, dtype=np.int64)
    place[order] = np.arange(at.size)
    ends = place[start.size :]
    return np.stack([end, np.cumsum(running * width)[ends], np.cumsum((cached + running * width / 2.0) * width)[ends]])


@dataclass(frozen=True, eq=False)
class ScorerStage:
    """One scorer on one layout.

    Attributes
    ----------
    own : on devices of its own; else on the trainer's, in turn
    overlap : sequences are scored as they end; only on devices of its own
    makespan_s : all sequences of an rl_step, at hand at once, mean over the rl_steps [s]
    single_s : the longest one alone [s]
    transition_s : weights to shared devices and away again [s]
    ends : when its sequences end, of every rl_step ``[replicates]``
    fields : numbers returned per response token, mean over all sequences [1]
    awake_bytes : of a device that its engine takes [bytes]
    """

    own: bool
    overlap: bool
    makespan_s: float
    single_s: float
    transition_s: float
    ends: tuple[Ends, ...]
    fields: float = 0.0
    awake_bytes: float = 0.0

    @property
    def streams(self) -> bool:
        """Whether it works while the rollout does."""
        return self.own and self.overlap

    def exposed_s(self, rollout: RolloutStage) -> FloatArray:
        r"""Seconds from the last response to the last score, of every rollout [s] ``[rollouts]``.

        .. math:: \max\left(t_1,\; \max_k \left(e_k + M b_k\right) - R\right)

        M the work of all, b_k its share in sequences that end no earlier than e_k, t_1 the longest alone: a queue that
        is fed as responses end. Without overlap M, on shared devices with the weights' way there and back.
        """
        shape = rollout.makespan_s.shape
        if not self.streams:
            return np.full(shape, self.makespan_s + (0.0 if self.own else self.transition_s))
        told = [ends.seconds(rollout) for ends in self.ends]
        scale = rollout.makespan_s / np.mean([last for _, last in told], axis=0)
        waits = [self._behind_s(of.work, ends, last, scale) for of, (ends, last) in zip(self.ends, told, strict=True)]
        return np.asarray(np.mean(waits, axis=0))

    def _behind_s(self, work: FloatArray, ends: FloatArray, last: FloatArray, scale: FloatArray) -> FloatArray:
        """`exposed_s` of one rl_step, its ends [s] times ``scale`` [1]."""
        order = np.argsort(ends, axis=1)
        behind = np.cumsum(work[order][:, ::-1], axis=1)[:, ::-1]
        in_turn = np.take_along_axis(ends, order, axis=1) * scale[:, None]
        late: FloatArray = (in_turn + self.makespan_s * behind).max(axis=1)
        return np.maximum(late - last * scale, min(self.single_s, self.makespan_s))


@dataclass(frozen=True, eq=False)
class Beside:
    """What all scorers together add to rl_steps; arrays ``[pairs]``.

    Attributes
    ----------
    waits_s : the rl_step waits for those with devices of their own, after the rollout [s]
    shared_s : those that take turns with the trainer [s]
    busy_s : what a batch takes the slowest of those with devices of their own [s]
    fields : numbers returned per response token, mean over all sequences [1]
    """

    waits_s: FloatArray
    shared_s: FloatArray
    busy_s: FloatArray
    fields: float = 0.0

    @classmethod
    def of(cls, stages: Sequence[ScorerStage], exposed: Sequence[FloatArray]) -> Beside:
        """Of scorers with what each lets an rl_step wait: those with devices of their own at the same time."""
        zero = np.zeros(np.shape(exposed[0]))
        own = [seconds for stage, seconds in zip(stages, exposed, strict=True) if stage.own]
        shared = [seconds for stage, seconds in zip(stages, exposed, strict=True) if not stage.own]
        busy = max((stage.makespan_s for stage in stages if stage.own), default=0.0)
        return cls(
            waits_s=np.asarray(np.maximum.reduce(own) if own else zero),
            shared_s=np.asarray(sum(shared, zero)),
            busy_s=zero + busy,
            fields=sum(stage.fields for stage in stages),
        )

    def take(self, index: IntArray) -> Beside:
        """Some rl_steps, by index."""
        return taken(self, index)

    @classmethod
    def closed(cls, stages: Sequence[ScorerStage], rollout: RolloutStage, r: IntArray) -> Beside | None:
        """Closed form beside the rollouts ``r``; None where nobody scores."""
        if not stages:
            return None
        rows, back = np.unique(r, return_inverse=True)
        few = rollout.take(rows)
        return cls.of(stages, [stage.exposed_s(few)[back] for stage in stages])


def scored(sequences: int, share: float) -> IntArray:
    """Which sequences a scorer with a share of them reads, evenly spread.

    >>> scored(6, 0.5).tolist(), scored(3, 1.0).tolist()
    ([0, 2, 4], [0, 1, 2])
    """
    count = max(round(sequences * share), 1)
    return np.arange(count) * sequences // count


def read_tokens(table: LengthTable, scorer: Scorer) -> IntArray:
    """Tokens that a scorer reads of each of its sequences, instructions included [tokens] ``[scored]``."""
    whole = table.trajectories()
    total = whole.prompt_tokens + whole.response_tokens
    if whole.append_tokens is not None:
        total = total + whole.append_tokens
    return np.asarray(total[scored(len(total), scorer.share)] + scorer.prompt_tokens)


@dataclass(eq=False)
class ScorerEvents:
    """Scorers simulated event by event; what candidates share is simulated once."""

    _finish: dict[tuple[object, ...], float] = field(default_factory=dict)

    def exposed_s(
        self, demand: Demand, scorer: Scorer, stage: ScorerStage, key: tuple[object, ...],
        serve: Callable[[Trajectories], RolloutResult], rollouts: Sequence[RolloutResult], rollout: RolloutStage,
    ) -> FloatArray:  # fmt: skip
        """Seconds from the last response to the last score of every rl_step [s] ``[replicates]``.

        Parameters
        ----------
        key : what tells the scorer and its replicas from others
        serve : simulates what its replicas are given
        rollouts : of which it scores what each has finished, when it has; all of it at once without overlap
        rollout : their stage ``[replicates]``

        Notes
        -----
        Where an rl_step is so large that only some replicas were simulated, the closed form stands in for when its
        sequences end.
        """
        found = []
        for index, result in enumerate(rollouts):
            read = read_tokens(demand.tables[index], scorer)
            known = len(result.finish_s) == demand.trajectories[index].n
            ends = result.finish_s[scored(len(result.finish_s), scorer.share)]
            arrival = ends if stage.streams and known else np.zeros(1)
            name = (*key, demand.keys[index], arrival.tobytes())
            if name not in self._finish:
                requests = Trajectories.of(read, np.full(len(read), scorer.response_tokens), arrival_s=arrival)
                self._finish[name] = float(serve(requests).finish_s.max())
            end = self._finish[name]
            if not stage.streams:
                found.append(end + (0.0 if stage.own else stage.transition_s))
            elif known:
                found.append(max(end - result.makespan_s, 0.0))
            else:
                found.append(float(stage.exposed_s(rollout.take(slice(index, index + 1)))[0]))
        return np.array(found)
