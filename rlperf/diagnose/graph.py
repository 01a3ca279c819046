"""The performance graph of rl_steps: who worked on what for how long, what it waited for, and the same step replayed
with other durations.

Vertices are columns of arrays, so that a thousand ranks cost milliseconds; `PerformanceGraph.to_networkx` gives the
same graph to people. After ScalAna (Jin et al. 2020, arXiv 2009.01692, section III): a program performance graph is
the structure of the program with measured performance on its vertices; here rl_steps are the programs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rlperf.errors import SpecError
from rlperf.layout import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    import networkx

ACTIVITIES = (
    "rollout",
    "tail",
    "queue",
    "prefill",
    "decode",
    "preempted",
    "tool",
    "reward",
    "scoring",
    "training",
    "forward",
    "recompute",
    "backward",
    "communication",
    "bubble",
    "optimizer",
    "weight_sync",
    "data_movement",
    "offload",
    "controller",
    "barrier",
    "other",
)
"""What a vertex does. ``rollout`` and ``training`` stand for stages that are not divided further, ``tail`` for the part
of such a rollout beyond the mean response, ``bubble`` for a pipeline's idle time where its micro-batches are unknown; a
``barrier`` takes no time and stands where ranks wait."""
(ROLLOUT, TAIL, QUEUE, PREFILL, DECODE, PREEMPTED, TOOL, REWARD, SCORING, TRAINING, FORWARD, RECOMPUTE, BACKWARD,
 COMMUNICATION, BUBBLE, OPTIMIZER, WEIGHT_SYNC, DATA_MOVEMENT, OFFLOAD, CONTROLLER, BARRIER, OTHER,
) = range(22)  # fmt: skip
IN_ROLLOUT = (ROLLOUT, TAIL, QUEUE, PREFILL, DECODE, PREEMPTED, TOOL)
ENGINE = (ROLLOUT, TAIL, QUEUE, PREFILL, DECODE, PREEMPTED)
"""What grows when the device of an engine slows down."""
COMPUTE = (SCORING, TRAINING, FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER)
"""What grows when the device of a trainer slows down."""

EDGE_KINDS = ("data", "collective", "weights")
"""Names of the edge codes: what the target waited for."""
DATA, COLLECTIVE, WEIGHTS = range(3)


@dataclass(frozen=True, eq=False)
class EngineSamples:
    """What engines report while they decode (statistics lines of a log, or simulated segments) ``[samples]``.

    Attributes
    ----------
    replica : which one
    seconds, steps : duration and engine_steps of the sample [s], [1]
    running, keys : requests that decode, and cached tokens read per engine_step [1], [tokens]
    blocked : requests waited although slots were free: the cache had no room [flag]
    """

    replica: IntArray
    seconds: FloatArray
    steps: FloatArray
    running: FloatArray
    keys: FloatArray
    blocked: BoolArray


@dataclass(frozen=True)
class Change:
    """Something made ideal: durations multiplied by ``scale`` ``[vertices]``, and edges that remain ``[edges]``.

    Changes combine by product, so that pairs of causes can be removed together.
    """

    scale: FloatArray
    keep: BoolArray | None = None

    def __and__(self, other: Change) -> Change:
        keeps = [c.keep for c in (self, other) if c.keep is not None]
        return Change(self.scale * other.scale, np.logical_and.reduce(keeps) if keeps else None)


@dataclass(frozen=True, eq=False)
class PerformanceGraph:
    """Vertices with time and resources, and what each of them waited for.

    Attributes
    ----------
    activity : index into ACTIVITIES ``[vertices]``
    pool, rank, part : pool; replica or data-parallel rank in it; pipeline stage (-1: none) ``[vertices]``
    unit : trajectory or micro-batch (-1: none) ``[vertices]``
    rl_step : to which the vertex belongs ``[vertices]``
    start_s, end_s : of the work itself, waiting excluded [s] ``[vertices]``
    work : tokens processed, or bytes of a transfer; NaN where unknown ``[vertices]``
    edge_source, edge_target : the target could not start before the source had ended ``[edges]``
    edge_kind : index into EDGE_KINDS ``[edges]``
    pools : names of the pools
    devices : GPUs in all; 0 where unknown
    samples : statistics of the engines, where there are any
    """

    activity: IntArray
    pool: IntArray
    rank: IntArray
    part: IntArray
    unit: IntArray
    rl_step: IntArray
    start_s: FloatArray
    end_s: FloatArray
    work: FloatArray
    edge_source: IntArray
    edge_target: IntArray
    edge_kind: IntArray
    pools: tuple[str, ...]
    devices: int = 0
    samples: EngineSamples | None = None

    @property
    def shares_devices(self) -> bool | None:
        """Whether every rank both rolls out and trains; None where stages of a whole run do not tell."""
        return None if self.pools == ("run",) else self.pools[:1] in (("rank",), ("shared",))

    @property
    def vertices(self) -> int:
        """Number of vertices."""
        return int(self.activity.size)

    @property
    def duration_s(self) -> FloatArray:
        """Seconds of work of every vertex ``[vertices]``."""
        return self.end_s - self.start_s

    @cached_property
    def _order(self) -> Order:
        return Order.of(self.vertices, self.edge_source, self.edge_target)

    @cached_property
    def gap_s(self) -> FloatArray:
        """Start of every vertex after the last of what it waited for had ended [s] ``[vertices]``; negative where
        work was handed over before its end."""
        return self.start_s - self._order.ready_s(self.end_s)

    def rl_step_s(self, end_s: FloatArray | None = None) -> float:
        """Mean seconds of an rl_step, from the first start to the last end [s]."""
        if not self.vertices:
            return 0.0
        end = self.end_s if end_s is None else end_s
        return float((end.max() - self.start_s.min()) / np.unique(self.rl_step).size)

    def replay(self, change: Change) -> FloatArray:
        r"""Ends of all vertices with a change applied: the longest path [s] ``[vertices]``.

        .. math:: start_v = \\max_{u \\to v} end_u + gap_v, \\qquad end_v = start_v + scale_v (end^0_v - start^0_v)

        Gaps stay as they are. With scale 1 the recorded times come back.
        """
        order, gap = self._order, self.gap_s
        if change.keep is not None:
            order = Order.of(self.vertices, self.edge_source[change.keep], self.edge_target[change.keep])
        return order.replay(gap, self.duration_s * change.scale)

    def what_if_s(self, change: Change) -> float:
        """Seconds of an rl_step with a change applied [s]."""
        return self.rl_step_s(self.replay(change))

    def unchanged(self) -> Change:
        """A change that changes nothing."""
        return Change(np.ones(self.vertices))

    def is_any(self, activities: tuple[int, ...]) -> BoolArray:
        """Vertices of some activities ``[vertices]``."""
        return np.isin(self.activity, activities)

    def with_durations(self, duration_s: FloatArray) -> PerformanceGraph:
        """The same graph with other durations, times following from it."""
        end = self._order.replay(self.gap_s, duration_s)
        return replace(self, start_s=end - duration_s, end_s=end)

    def critical_path(self) -> IntArray:
        """Vertices from the first to the last to end, each one bound by the one before."""
        if not self.vertices:
            return np.zeros(0, dtype=np.int64)
        # Of several that end last the one added last: a barrier rather than what it waits for.
        at = self.vertices - 1 - int(np.argmax(self.end_s[::-1]))
        path = [at]
        while (at := self._order.binding(at, self.end_s)) >= 0:
            path.append(at)
        return np.array(path[::-1], dtype=np.int64)

    def name(self, vertex: int) -> str:
        """A vertex in words, as in ``decode of trajectory 17 on rollout 3``."""
        activity = ACTIVITIES[self.activity[vertex]].replace("_", " ")
        unit, part = int(self.unit[vertex]), int(self.part[vertex])
        what = "trajectory" if self.activity[vertex] in IN_ROLLOUT else "microbatch"
        text = activity + (f" of {what} {unit}" if unit >= 0 else "")
        text += f" on {self.pools[self.pool[vertex]]} {int(self.rank[vertex])}" if self.rank[vertex] >= 0 else ""
        return text + (f", pipeline stage {part}" if part >= 0 else "")

    def to_networkx(self) -> networkx.DiGraph[int]:
        """The graph with attributes on vertices (activity, pool, rank, part, unit, rl_step, start_s, end_s, work) and
        edges (kind, slack_s: by how much the source was early)."""
        import networkx as nx

        graph: networkx.DiGraph[int] = nx.DiGraph()
        names = ("rank", "part", "unit", "rl_step", "start_s", "end_s", "work")
        columns = [getattr(self, name).tolist() for name in names]
        for v, (activity, pool, *values) in enumerate(
            zip(self.activity.tolist(), self.pool.tolist(), *columns, strict=True)
        ):
            graph.add_node(
                v, activity=ACTIVITIES[activity], pool=self.pools[pool], **dict(zip(names, values, strict=True))
            )
        slack = (self._order.ready_s(self.end_s)[self.edge_target] - self.end_s[self.edge_source]).tolist()
        rows = zip(self.edge_source.tolist(), self.edge_target.tolist(), self.edge_kind.tolist(), slack, strict=True)
        graph.add_edges_from((u, v, {"kind": EDGE_KINDS[kind], "slack_s": s}) for u, v, kind, s in rows)
        return graph


@dataclass(frozen=True, eq=False)
class Order:
    """Edges sorted so that one pass over levels computes all ends."""

    size: int
    source: IntArray
    """Sources of the edges, sorted by level and target of the edge."""
    targets: IntArray
    """Vertices that wait for something, by level."""
    first_edge: IntArray
    """First edge of each entry of ``targets``, and the number of edges."""
    levels: IntArray
    """First entry of ``targets`` of each level, and their number."""

    @classmethod
    def of(cls, size: int, source: IntArray, target: IntArray) -> Order:
        """Levels of a graph: 0 where nothing is waited for, else one more than the highest source's (Kahn 1962)."""
        if source.size and (min(source.min(), target.min()) < 0 or max(source.max(), target.max()) >= size):
            raise SpecError("performance graph: an edge names a vertex that does not exist")
        waits = np.bincount(target, minlength=size)
        by_source = np.argsort(source, kind="stable")
        out, first = target[by_source], np.searchsorted(source[by_source], np.arange(size + 1))
        level = np.zeros(size, dtype=np.int64)
        front, reached, depth = np.flatnonzero(waits == 0), 0, 0
        while front.size:
            level[front] = depth
            reached += front.size
            counts = first[front + 1] - first[front]
            offsets = np.repeat(first[front] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
            hit, arrivals = np.unique(out[offsets + np.arange(int(counts.sum()))], return_counts=True)
            waits[hit] -= arrivals
            front = hit[waits[hit] == 0]
            depth += 1
        if reached < size:
            raise SpecError("performance graph: some vertices wait for each other in a circle")
        order = np.lexsort((target, level[target]))
        targets, first_edge = np.unique(level[target[order]] * size + target[order], return_index=True)
        starts = np.searchsorted(targets // max(size, 1), np.arange(1, depth + 1))
        ends = np.append(first_edge, source.size).astype(np.int64)
        return cls(size, source[order], targets % max(size, 1), ends, starts.astype(np.int64))

    def ready_s(self, end_s: FloatArray) -> FloatArray:
        """Latest end of what each vertex waits for; 0 where it waits for nothing [s]."""
        ready = np.zeros(self.size)
        if self.targets.size:
            ready[self.targets] = np.maximum.reduceat(end_s[self.source], self.first_edge[:-1])
        return ready

    def replay(self, gap_s: FloatArray, duration_s: FloatArray) -> FloatArray:
        """Ends of all vertices [s]."""
        end = gap_s + duration_s
        for low, high in zip(self.levels[:-1], self.levels[1:], strict=True):
            edges = slice(self.first_edge[low], self.first_edge[high])
            at = self.targets[low:high]
            ready = np.maximum.reduceat(end[self.source[edges]], self.first_edge[low:high] - self.first_edge[low])
            end[at] = ready + gap_s[at] + duration_s[at]
        return end

    @cached_property
    def _slot(self) -> IntArray:
        slot = np.full(self.size, -1, dtype=np.int64)
        slot[self.targets] = np.arange(self.targets.size)
        return slot

    def binding(self, vertex: int, end_s: FloatArray) -> int:
        """The source that ended last; -1 where the vertex waits for nothing."""
        slot = int(self._slot[vertex])
        if slot < 0:
            return -1
        sources = self.source[self.first_edge[slot] : self.first_edge[slot + 1]]
        return int(sources[np.argmax(end_s[sources])])


@dataclass(frozen=True, eq=False)
class Place:
    """Where vertices belong; -1: nowhere in particular. Everything broadcasts.

    Attributes
    ----------
    pool : index of the pool
    rank : replica, or data-parallel rank
    part : pipeline stage
    unit : trajectory, or micro-batch
    rl_step : number of the rl_step
    """

    pool: int = 0
    rank: IntArray | int = -1
    part: IntArray | int = -1
    unit: IntArray | int = -1
    rl_step: int = 0


ANYWHERE = Place()


@dataclass
class GraphBuilder:
    """Collects vertices and edges in blocks, then freezes them into a `PerformanceGraph`."""

    pools: tuple[str, ...]
    devices: int = 0
    _blocks: list[tuple[FloatArray, ...]] = field(default_factory=list)
    _edges: list[tuple[IntArray, IntArray, int]] = field(default_factory=list)
    _count: int = 0

    def add(
        self,
        activity: int,
        start_s: FloatArray | float,
        end_s: FloatArray | float,
        *,
        at: Place = ANYWHERE,
        work: FloatArray | float = np.nan,
        after: IntArray | None = None,
        kind: int = DATA,
    ) -> IntArray:
        """Add vertices; everything broadcasts. ``after`` of shape [n] goes edge by edge, of shape [1] to all."""
        columns = np.broadcast_arrays(activity, at.pool, at.rank, at.part, at.unit, at.rl_step, start_s, end_s, work)
        block = tuple(np.atleast_1d(np.asarray(c, dtype=np.float64)).ravel() for c in columns)
        index = np.arange(self._count, self._count + block[0].size, dtype=np.int64)
        self._blocks.append(block)
        self._count += index.size
        if after is not None and after.size:
            self.edge(after, index, kind)
        return index

    def edge(self, source: IntArray, target: IntArray, kind: int = DATA) -> None:
        """Add edges; one end may be a single vertex."""
        a, b = np.broadcast_arrays(source, target)
        self._edges.append((a.ravel(), b.ravel(), kind))

    def barrier(self, sources: IntArray, time_s: float, *, pool: int = 0, rl_step: int = 0) -> IntArray:
        """A vertex of no duration that waits for all of ``sources``."""
        at = self.add(BARRIER, time_s, time_s, at=Place(pool=pool, rl_step=rl_step))
        self.edge(sources, at, COLLECTIVE)
        return at

    def freeze(self, samples: EngineSamples | None = None) -> PerformanceGraph:
        """The finished graph."""
        columns = [np.concatenate(c) for c in zip(*self._blocks, strict=True)] if self._blocks else [np.zeros(0)] * 9
        whole = [column.astype(np.int64) for column in columns[:6]]
        source, target = (
            np.concatenate([e[i] for e in self._edges]).astype(np.int64) if self._edges else np.zeros(0, dtype=np.int64)
            for i in (0, 1)
        )
        kinds = [np.full(e[0].size, e[2], dtype=np.int64) for e in self._edges]
        kind = np.concatenate(kinds) if kinds else np.zeros(0, dtype=np.int64)
        activity, pool, rank, part, unit, rl_step = whole
        return PerformanceGraph(
            activity, pool, rank, part, unit, rl_step, columns[6], columns[7], columns[8], source, target, kind,
            self.pools, self.devices, samples,
        )  # fmt: skip
