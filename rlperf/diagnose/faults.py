"""Faults: what is abnormal against its peers (ranks, links, pipeline stages, trajectories), and the change that removes
it. Each detector reads the graph only; none knows what a healthy run looks like beyond what the peers show.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.diagnose.engine_fit import EngineFit, fit_engines
from rlperf.layout import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class Limits:
    """When something counts as abnormal.

    Attributes
    ----------
    rate : a device's seconds per unit of work over its peers' median
    link : a link's seconds per byte over its peers' median
    load : a rank's work over its peers' median
    stage : a pipeline stage's seconds over the mean of the stages
    abnormal : seconds over the peers' median where no work is known (ScalAna's threshold)
    tool : tool seconds of a rank over its peers' median
    deviations : and at least that many robust standard deviations above the peers
    gap : statistic of the spacing test above which the longest values stand apart (`apart`)
    queue : share of the requests' time in queues above which the engine is saturated
    serial : share of the rl_step from which serial work of the controller is a fault
    """

    rate: float = 1.1
    link: float = 1.4
    load: float = 1.3
    stage: float = 1.1
    abnormal: float = 1.3
    tool: float = 2.0
    deviations: float = 6.0
    gap: float = 5.0
    queue: float = 0.5
    serial: float = 0.05


@dataclass(frozen=True, eq=False)
class Fault:
    """Something abnormal.

    Attributes
    ----------
    kind : slow_device, slow_link, long_trajectory, data_imbalance, slow_tool, controller, stage_imbalance, kv_cache,
        queueing, slow_reward
    where : the place in words
    evidence : how it differs from its peers, in words
    change : what the graph would be without it
    vertices : those it makes slow, for the path ``[vertices]``
    rank, part, unit : the place; -1 where it has none
    pool : index of the pool; -1 where it has none
    """

    kind: str
    where: str
    evidence: str
    change: g.Change
    vertices: BoolArray
    rank: int = -1
    part: int = -1
    unit: int = -1
    pool: int = -1


def find_faults(graph: g.PerformanceGraph, limits: Limits | None = None) -> list[Fault]:
    """All abnormal things of a graph, whether they cost time or not."""
    known = limits or Limits()
    fit = fit_engines(graph)
    long = long_trajectories(graph, known)
    found = [*slow_devices(graph, fit, known), *slow_links(graph, known), *long]
    found += [*imbalance(graph, fit, long, known), *slow_tools(graph, known), *stages(graph, known)]
    cache = kv_cache(graph, fit)
    return [*found, *(cache or queueing(graph, known)), *slow_rewards(graph, known), *controller(graph, known)]


# -- helpers ----------------------------------------------------------------------------------------------------------


def by_rank(mask: BoolArray, rank: IntArray, values: FloatArray) -> FloatArray:
    """Sum of values by rank ``[highest rank + 1]``; NaN where a rank has no vertex."""
    size = int(rank.max(initial=-1)) + 1
    total = np.bincount(rank[mask], weights=values[mask], minlength=size)
    return np.where(np.bincount(rank[mask], minlength=size) > 0, total, np.nan)


def stands_out(values: FloatArray, factor: float, deviations: float) -> IntArray:
    """Peers above ``factor`` times the median and ``deviations`` robust standard deviations (1.4826 MAD) above it."""
    known = np.isfinite(values)
    if known.sum() < 3:
        return np.zeros(0, dtype=np.int64)
    median = float(np.median(values[known]))
    spread = 1.4826 * float(np.median(np.abs(values[known] - median)))
    return np.flatnonzero(known & (values > factor * median) & (values - median > deviations * spread) & (median > 0))


def apart(values: FloatArray, limit: float, most: int = 8, reach: int = 60) -> int:
    r"""How many of the largest values stand apart from the rest; 0 where none does.

    Two tests must agree. For the descending order statistics of any law with an exponential-like tail in log x, the
    normalised spacings :math:`D_k = k (\ln x_{(k)} - \ln x_{(k+1)})` are independent with one mean (Renyi 1953), so the
    ratio of one to the mean of the ``reach`` behind it follows F(2, 2 reach): 5 is exceeded once in 120 gaps. And the
    outliers lie further out than one in a hundred samples of that size would from a log-normal law with the robust
    spread of the values (1.4826 MAD of ln x).

    >>> apart(np.r_[np.linspace(90, 110, 40), 900.0], 5.0)
    1
    >>> apart(np.linspace(90, 110, 40), 5.0)
    0
    """
    logs = np.log(np.sort(values[values > 0])[::-1])
    most = min(most, max(logs.size // 20, 1), logs.size - 4)
    if most < 1:
        return 0
    spacing = (logs[:-1] - logs[1:]) * np.arange(1, logs.size)
    median = float(np.median(logs))
    far = median + 1.4826 * float(np.median(np.abs(logs - median))) * NormalDist().inv_cdf(1.0 - 0.01 / logs.size)
    for k in range(most, 0, -1):
        behind = spacing[k : k + reach]
        wide = spacing[k - 1] > limit * max(float(behind.mean()), 1e-9) and logs[k - 1] - logs[k] > np.log(1.3)
        if wide and logs[k - 1] > far:
            return k
    return 0


def _scaled(graph: g.PerformanceGraph, mask: BoolArray, factor: FloatArray | float) -> g.Change:
    scale = np.ones(graph.vertices)
    scale[mask] = factor if isinstance(factor, float) else factor[mask]
    return g.Change(scale)


def _place(graph: g.PerformanceGraph, pool: int, rank: int, part: int = -1) -> str:
    text = f"{graph.pools[pool]} {rank}"
    return text + (f", pipeline stage {part}" if part >= 0 else "")


# -- detectors --------------------------------------------------------------------------------------------------------


def slow_devices(graph: g.PerformanceGraph, fit: EngineFit, limits: Limits) -> list[Fault]:
    """Ranks whose compute takes longer per token than their peers': engine_steps at equal batch and context, and
    training and scoring."""
    found: list[Fault] = []
    for pool in range(len(graph.pools)):
        here = (graph.pool == pool) & (graph.rank >= 0)
        scale = np.ones(graph.vertices)
        worst: dict[int, tuple[float, set[int]]] = {}

        def note(rank: int, part: int, ratio: float, mask: BoolArray, scale: FloatArray = scale,
                 worst: dict[int, tuple[float, set[int]]] = worst) -> None:  # fmt: skip
            scale[mask] /= ratio
            before, parts = worst.get(rank, (1.0, set()))
            worst[rank] = (max(before, ratio), parts | {part})

        for rank in stands_out(fit.slowness, limits.rate, limits.deviations) if pool == fit.pool else ():
            mask = here & graph.is_any(g.ENGINE) & (graph.rank == rank)
            note(int(rank), -1, float(fit.slowness[rank]), mask)
        for mask, part in _peer_groups(graph, here):
            rates = _rates(graph, mask)
            for rank in stands_out(rates, limits.rate, limits.deviations):
                ratio = float(rates[rank] / np.nanmedian(rates))
                note(int(rank), part, ratio, mask & (graph.rank == rank))
        for rank, (ratio, parts) in worst.items():
            own = here & (graph.rank == rank) & (scale < 1.0)
            inner = {p for p in parts if p >= 0}
            part = inner.pop() if len(inner) == 1 else -1
            one = np.where(own, scale, 1.0)
            found.append(
                Fault("slow_device", _place(graph, pool, rank, part),
                      f"{ratio:.2f} times the seconds per token of its peers", g.Change(one), own, rank, part, -1, pool)
            )  # fmt: skip
    return found


def _peer_groups(graph: g.PerformanceGraph, here: BoolArray) -> list[tuple[BoolArray, int]]:
    """Vertices that do the same on every rank: by activity and pipeline stage, all rl_steps together."""
    groups = []
    for activity in g.COMPUTE:
        mask = here & (graph.activity == activity)
        groups += [(mask & (graph.part == part), int(part)) for part in np.unique(graph.part[mask])]
    return groups


def _rates(graph: g.PerformanceGraph, mask: BoolArray) -> FloatArray:
    """Seconds per unit of work of each rank; seconds where the work is unknown."""
    seconds = by_rank(mask, graph.rank, graph.duration_s)
    work = by_rank(mask, graph.rank, graph.work)
    return seconds / np.where(work > 0, work, np.nan) if np.isfinite(work).any() else seconds


def slow_links(graph: g.PerformanceGraph, limits: Limits) -> list[Fault]:
    """Links whose transfers take longer per byte than their peers': between pipeline stages, of a gradient group, to a
    replica."""
    found: list[Fault] = []
    moves = graph.is_any((g.COMMUNICATION, g.WEIGHT_SYNC)) & (graph.rank >= 0) & (graph.duration_s > 0)
    for pool in range(len(graph.pools)):
        here = moves & (graph.pool == pool)
        links = here & (graph.activity == g.COMMUNICATION) & (graph.unit >= 0)
        groups = here & (graph.activity == g.COMMUNICATION) & (graph.unit < 0) & (graph.part >= 0)
        plain = here & (graph.activity == g.COMMUNICATION) & (graph.unit < 0) & (graph.part < 0)
        span = int(graph.part.max(initial=0)) + 1
        for mask, keys in (
            (links, graph.rank * span + graph.part),
            (groups, graph.part),
            (plain, graph.rank),
            (here & (graph.activity == g.WEIGHT_SYNC), graph.rank),
        ):
            if not mask.any():
                continue
            rates = _link_rates(graph, mask, keys)
            for key in stands_out(rates, limits.link, limits.deviations):
                ratio = float(rates[key] / np.nanmedian(rates))
                own = mask & (keys == key)
                rank = -1 if mask is groups else int(graph.rank[own][0])
                part = int(graph.part[own][0])
                where = f"gradient group of pipeline stage {part}" if rank < 0 else _place(graph, pool, rank, part)
                found.append(
                    Fault("slow_link", where, f"{ratio:.2f} times the seconds per byte of its peers",
                          _scaled(graph, own, 1.0 / ratio), own, rank, part, -1, pool)
                )  # fmt: skip
    return found


def _link_rates(graph: g.PerformanceGraph, mask: BoolArray, keys: IntArray) -> FloatArray:
    seconds, work = by_rank(mask, keys, graph.duration_s), by_rank(mask, keys, graph.work)
    return seconds / np.where(work > 0, work, np.nan) if np.isfinite(work).any() else seconds


def long_trajectories(graph: g.PerformanceGraph, limits: Limits) -> list[Fault]:
    """Trajectories that stand apart from all others of their rl_step in generated tokens, runaways among them."""
    decode = (graph.activity == g.DECODE) & (graph.unit >= 0) & (graph.work > 0)
    scale = np.ones(graph.vertices)
    worst, names, evidence, rl_steps, total = (0.0, -1), "", "", 0, 0
    for step in np.unique(graph.rl_step[decode]):
        ids, unit = np.unique(graph.unit, return_inverse=True)
        mask = decode & (graph.rl_step == step)
        tokens = np.bincount(unit[mask], graph.work[mask], ids.size).astype(np.float64)
        count = apart(tokens, limits.gap)
        if not count:
            continue
        order = np.argsort(-tokens, kind="stable")
        units, peer = order[:count], float(tokens[order[count]])
        factor = np.ones(ids.size)
        factor[units] = peer / tokens[units]
        scale[mask] = factor[unit[mask]]
        rl_steps, total = rl_steps + 1, total + count
        longest = float(tokens[units[0]])
        if longest > worst[0]:
            median = float(np.median(tokens[tokens > 0]))
            worst = (longest, int(np.flatnonzero(mask & (unit == units[0]))[0]))
            names = ("runaway " if longest > 10.0 * median else "") + f"trajectory {ids[units[0]]}"
            evidence = f"{longest:,.0f} tokens; the longest of the others {peer:,.0f}, the median {median:,.0f}"
    if not total:
        return []
    at = worst[1]
    pool, rank = int(graph.pool[at]), int(graph.rank[at])
    more = f" and {total - 1} more" + (f" in {rl_steps} rl_steps" if rl_steps > 1 else "") if total > 1 else ""
    where = f"{names} on {_place(graph, pool, rank)}" + more
    unit_id = int(graph.unit[at])
    return [Fault("long_trajectory", where, evidence, g.Change(scale), scale < 1.0, rank, -1, unit_id, pool)]


def imbalance(graph: g.PerformanceGraph, fit: EngineFit, long: list[Fault], limits: Limits) -> list[Fault]:
    """Ranks that got more work than their peers: trajectories of a replica, tokens of a data-parallel rank."""
    found: list[Fault] = []
    even = np.ones(graph.vertices)
    for fault in long:
        even *= fault.change.scale
    work = graph.work * even
    for pool in range(len(graph.pools)):
        here = (graph.pool == pool) & (graph.rank >= 0)
        changes: dict[int, tuple[float, FloatArray]] = {}
        rollout = here & graph.is_any((g.DECODE, g.ROLLOUT)) & (graph.work > 0)
        trained = here & graph.is_any((g.FORWARD, g.TRAINING)) & (graph.part <= 0) & (graph.work > 0)
        for mask, scaled in ((rollout, g.IN_ROLLOUT), (trained, (*g.COMPUTE, g.COMMUNICATION))):
            load = by_rank(mask, graph.rank, work)
            median = float(np.nanmedian(load)) if np.isfinite(load).any() else 0.0
            for rank in stands_out(load, limits.load, limits.deviations):
                ratio = float(load[rank]) / median
                own = here & graph.is_any(scaled) & (graph.rank == rank) & ~(graph.is_any((g.TOOL, g.OPTIMIZER)))
                own &= ~((graph.activity == g.COMMUNICATION) & (graph.unit < 0))
                before, scale = changes.get(int(rank), (1.0, np.ones(graph.vertices)))
                # A replica with less to do decodes smaller batches: its engine_steps get shorter, not its responses.
                factor = fit.relative_step_s(int(rank), 1.0 / ratio) if mask is rollout else 1.0 / ratio
                scale = scale * np.where(own, factor, 1.0)
                if mask is rollout:
                    scale[here & (graph.rank == rank) & graph.is_any((g.QUEUE, g.PREEMPTED))] = 0.0
                changes[int(rank)] = (max(before, ratio), scale)
        for rank_, (ratio, scale) in changes.items():
            found.append(
                Fault("data_imbalance", _place(graph, pool, rank_), f"{ratio:.2f} times the tokens of its peers",
                      g.Change(scale), scale < 1.0, rank_, -1, -1, pool)
            )  # fmt: skip
    return found


def slow_tools(graph: g.PerformanceGraph, limits: Limits) -> list[Fault]:
    """Tool calls that take longer than the others': all of one replica, or single calls that hang."""
    tool = (graph.activity == g.TOOL) & (graph.rank >= 0) & (graph.duration_s > 0)
    if tool.sum() < 8:
        return []
    found: list[Fault] = []
    size = int(graph.rank.max()) + 1
    medians = np.full(size, np.nan)
    for rank in np.unique(graph.rank[tool]):
        medians[rank] = np.median(graph.duration_s[tool & (graph.rank == rank)])
    pool = int(graph.pool[tool][0])
    slow = stands_out(medians, limits.tool, limits.deviations)
    for rank in slow:
        own = tool & (graph.rank == rank)
        ratio = float(medians[rank] / np.nanmedian(medians))
        found.append(
            Fault("slow_tool", f"tools of {_place(graph, pool, int(rank))}", f"{ratio:.1f} times its peers' latency",
                  _scaled(graph, own, 1.0 / ratio), own, int(rank), -1, -1, pool)
        )  # fmt: skip
    rest = np.flatnonzero(tool & ~np.isin(graph.rank, slow))
    seconds = graph.duration_s[rest]
    count = apart(seconds, limits.gap)
    if count:
        order = np.argsort(-seconds, kind="stable")
        hung, peer = rest[order[:count]], float(seconds[order[count]])
        own = np.zeros(graph.vertices, dtype=np.bool_)
        own[hung] = True
        worst = int(hung[0])
        scale = np.where(own, peer / np.maximum(graph.duration_s, 1e-12), 1.0)
        found.append(
            Fault("slow_tool", graph.name(worst),
                  f"{graph.duration_s[worst]:,.1f} s; the slowest of the others {peer:,.1f} s, the median "
                  f"{np.median(seconds):,.2f} s", g.Change(scale), own, int(graph.rank[worst]), -1,
                  int(graph.unit[worst]), pool)
        )  # fmt: skip
    return found


def stages(graph: g.PerformanceGraph, limits: Limits) -> list[Fault]:
    """A pipeline stage with more work than the mean of the stages, on all ranks alike."""
    piped = graph.is_any((g.FORWARD, g.RECOMPUTE, g.BACKWARD)) & (graph.part >= 0)
    parts = np.unique(graph.part[piped])
    if parts.size < 2:
        return []
    typical = np.zeros(parts.size)
    for i, part in enumerate(parts):
        typical[i] = np.nanmedian(by_rank(piped & (graph.part == part), graph.rank, graph.duration_s))
    mean = float(typical.mean())
    worst = int(np.argmax(typical))
    if typical[worst] < limits.stage * mean:
        return []
    scale = np.ones(graph.vertices)
    for i, part in enumerate(parts):
        scale[piped & (graph.part == part)] = mean / typical[i]
    own = piped & (graph.part == parts[worst])
    pool = int(graph.pool[own][0])
    return [
        Fault("stage_imbalance", f"pipeline stage {int(parts[worst])} of {graph.pools[pool]}",
              f"{typical[worst] / mean:.2f} times the mean of the {parts.size} stages", g.Change(scale), own, -1,
              int(parts[worst]), -1, pool)
    ]  # fmt: skip


def kv_cache(graph: g.PerformanceGraph, fit: EngineFit) -> list[Fault]:
    """Requests that wait, or are evicted, although slots are free: the cache has no room for them."""
    if graph.samples is None or not graph.samples.blocked.any():
        return []
    ranks = np.unique(graph.samples.replica[graph.samples.blocked])
    waits = graph.is_any((g.QUEUE, g.PREEMPTED)) & np.isin(graph.rank, ranks) & (graph.pool == fit.pool)
    served = graph.is_any((g.PREFILL, g.DECODE)) & np.isin(graph.rank, ranks) & (graph.pool == fit.pool)
    waited, busy = (by_rank(mask, graph.rank, graph.duration_s) for mask in (waits, served))
    scale = np.where(waits, 0.0, 1.0)
    for rank in ranks:
        # Little's law: those who waited run instead, so the batch grows by the share of time they waited.
        more = 1.0 + float(waited[rank] / busy[rank]) if busy[rank] > 0 else 1.0
        scale[served & (graph.rank == rank)] = fit.relative_step_s(int(rank), more)
    blocked, samples = graph.samples.blocked, graph.samples
    share = float(samples.seconds[blocked].sum() / samples.seconds.sum())
    where = "all replicas" if ranks.size > 1 else f"{graph.pools[fit.pool]} {int(ranks[0])}"
    return [
        Fault("kv_cache", f"{graph.pools[fit.pool]}: {where}" if ranks.size > 1 else where,
              f"requests wait with free slots during {share:.0%} of the decode time, {np.nansum(waited):,.0f} s of "
              "waiting in all", g.Change(scale), waits, int(ranks[0]) if ranks.size == 1 else -1, -1, -1, fit.pool)
    ]  # fmt: skip


def queueing(graph: g.PerformanceGraph, limits: Limits) -> list[Fault]:
    """Requests that wait for the engine longer than it serves them, the cache not being the reason."""
    waits = graph.activity == g.QUEUE
    served = graph.is_any((g.QUEUE, g.PREFILL, g.DECODE, g.PREEMPTED))
    share = float(graph.duration_s[waits].sum()) / max(float(graph.duration_s[served].sum()), 1e-12)
    if share < limits.queue:
        return []
    where = f"engines of {graph.pools[int(graph.pool[waits][0])]}"
    evidence = f"{share:.0%} of the requests' engine time is waiting for others"
    return [Fault("queueing", where, evidence, _scaled(graph, waits, 0.0), waits, pool=int(graph.pool[waits][0]))]


def slow_rewards(graph: g.PerformanceGraph, limits: Limits) -> list[Fault]:
    """A rank whose reward takes longer than its peers'."""
    mask = (graph.activity == g.REWARD) & (graph.rank >= 0)
    if not mask.any():
        return []
    seconds = by_rank(mask, graph.rank, graph.duration_s)
    pool = int(graph.pool[mask][0])
    found = []
    for rank in stands_out(seconds, limits.abnormal, limits.deviations):
        ratio = float(seconds[rank] / np.nanmedian(seconds))
        own = mask & (graph.rank == rank)
        found.append(
            Fault("slow_reward", f"reward of {_place(graph, pool, int(rank))}", f"{ratio:.2f} times its peers' seconds",
                  _scaled(graph, own, 1.0 / ratio), own, int(rank), -1, -1, pool)
        )  # fmt: skip
    return found


def controller(graph: g.PerformanceGraph, limits: Limits) -> list[Fault]:
    """Serial work of the controller that takes a large share of the rl_step."""
    own = graph.activity == g.CONTROLLER
    step = graph.step_s()
    seconds = float(graph.duration_s[own].sum()) / max(np.unique(graph.rl_step).size, 1)
    if step <= 0 or seconds < limits.serial * step:
        return []
    change = _scaled(graph, own, 0.0)
    return [Fault("controller", "controller", f"{seconds / step:.0%} of the rl_step, all ranks waiting", change, own)]
