"""Splits: the modes of a job with the devices that each pool takes, and what such a split occupies and costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from rlperf.plan.question.context import Context
from rlperf.plan.question.objective import Usage
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.scorer_columns import seat_counts, seats, smooth
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.objectives import OBJECTIVES
from rlperf.specs.pool import Role

ROLES: tuple[Role, Role] = ("rollout", "trainer")


@dataclass(frozen=True)
class Split:
    """A mode and how many devices each pool takes; colocated pools share theirs.

    ``scorers``: devices of its own of every scorer; 0: it takes turns with the trainer. ``critic``: of a critic's own.
    """

    mode: Mode
    rollout: int
    trainer: int
    scorers: tuple[int, ...] = ()
    critic: int = 0

    @property
    def trains(self) -> tuple[int, int]:
        """Devices of the trainer, and of a critic's own."""
        return self.trainer, self.critic

    @property
    def beside(self) -> int:
        """Devices beside those of rollout and trainer."""
        return sum(self.scorers) + self.critic

    @property
    def total(self) -> int:
        """Devices that the split takes together."""
        return self.beside + (self.rollout if MODES[self.mode].shares_devices else self.rollout + self.trainer)

    def usage(self, context: Context) -> Usage:
        """Devices and price of the pools."""
        return Usage(
            self.total,
            context.usd_per_s(0 if MODES[self.mode].shares_devices else self.rollout, self.trainer + self.beside),
        )


def usage_of(context: Context, configuration: Configuration) -> Usage:
    """Devices and price of a configuration's pools."""
    rollout, trainer = (configuration.pool(role).devices for role in ROLES)
    own = tuple(scorer.own_devices for scorer in configuration.scorers)
    critic = sum(pool.own_devices for pool in configuration.pools)
    return Split(configuration.mode, rollout, trainer, own, critic).usage(context)


def splits(context: Context) -> list[Split]:
    """Modes with device counts: what the user pins or opens, else all devices, or eighths of them between two pools.

    Scorers and a critic with devices of their own leave the rest to both.
    """
    seated = seats(context)
    critics = {own: _of_critic(context, context.cluster.devices - sum(own)) for own in seated}
    pinned = sum(map(len, critics.values())) == 1  # else other numbers of theirs leave what divides well
    found = [
        replace(split, critic=critic)
        for own in seated
        for critic in critics[own]
        for mode in context.job.modes
        if own in seats(context.of(mode))  # files may seat a scorer by the mode
        for split in _splits_beside(context, mode, context.cluster.devices - sum(own) - critic, own, rounds=pinned)
    ]
    return list(dict.fromkeys(found))


def _of_critic(context: Context, total: int) -> list[int]:
    """Devices of its own that a critic may take of so many: as stated, else `seat_counts`; 0: none."""
    pool = context.job.pool("critic")
    if not pool.apart:
        return [0]
    stated = pool.devices or seat_counts(total, context.cluster.devices_per_node)
    return [devices for devices in stated if devices < total]


def _splits_beside(context: Context, mode: Mode, total: int, own: tuple[int, ...], *, rounds: bool) -> list[Split]:
    """Splits of ``total`` devices between rollout and trainer beside scorers on devices of their ``own``.

    Where those leave part of a node, also of the whole nodes that are left: not every framework shares one out.
    ``rounds`` : also of the nodes of them that divide well
    """
    rollout, trainer = context.job.pool("rollout").devices, context.job.pool("trainer").devices
    node = context.cluster.devices_per_node
    rounded = _rounded(total, node) if rounds else ()
    if MODES[mode].shares_devices:
        counts = *_counts(context, total), *rounded
        both = sorted(set(rollout or trainer or counts) & set(trainer or rollout or counts))
        return [Split(mode, n, n, own) for n in both if not own or n <= total]
    if context.own_rollout:
        cluster = context.rollout_hardware.cluster
        most, own_node = cluster.devices, cluster.devices_per_node
        engines = rollout or tuple(dict.fromkeys((most, *_rounded(most, own_node), *_paired(most, own_node))))
        trainers = trainer or (total, *rounded)
        return [Split(mode, r, t, own) for r in engines for t in trainers if r <= most and t <= total]
    totals = _rest(total, node)
    if context.job.sharing == "devices":  # tasks leave some to each other
        totals = _counts(context, total)
    elif _money_counts(context):
        totals = _halves(total, node)
    return [
        Split(mode, r, t, own)
        for both in (*totals, *rounded)
        for r, t in _pools(both, node, rollout or (), trainer or ())
        if r >= 1 and t >= 1 and r + t <= both
    ]


def _pools(both: int, node: int, rollout: tuple[int, ...], trainer: tuple[int, ...]) -> list[tuple[int, int]]:
    """Devices of rollout and trainer out of those of ``both``; empty: the planner's choice.

    Beside a pool that is pinned the other takes the rest, or the whole nodes of it.
    """
    if rollout and trainer:
        return list(product(rollout, trainer))
    if rollout:
        return [(r, t) for r in rollout for t in _rest(both - r, node)]
    shares = _shares(both, node)
    if trainer:
        return [(r, t) for t in trainer for r in sorted({*shares, *_rest(both - t, node)})]
    return [(r, both - r) for r in shares]


def _rest(left: int, node: int) -> tuple[int, ...]:
    """All devices that are left, and those of the whole nodes among them: not every framework shares a node out.

    >>> _rest(28, 8), _rest(6, 8), _rest(16, 8)
    ((28, 24), (6,), (16,))
    """
    return (left, left - left % node) if left > node and left % node else (left,)


def _rounded(total: int, node: int) -> tuple[int, ...]:
    """Devices of the most nodes that are 1, 3, 5 or 7 times a power of two, where those of ``total`` are not.

    Batches, experts and layers divide by no 49 nodes: one that idles may spare more than it could do.

    >>> _rounded(49 * 4, 4), _rounded(21 * 8, 8), _rounded(12 * 8, 8), _rounded(4, 8)
    ((192,), (160,), (), ())
    """
    nodes = total // node
    most = max((n << k for n in (1, 3, 5, 7) for k in range(nodes.bit_length()) if n << k <= nodes), default=nodes)
    return (most * node,) if most < nodes else ()


def _paired(total: int, node: int) -> tuple[int, ...]:
    """Devices of the most nodes that engines over two and over four of them take whole, where others would be left.

    >>> _paired(7 * 8, 8), _paired(8 * 8, 8), _paired(21 * 8, 8)
    ((48, 32), (), (160,))
    """
    nodes = total // node
    return tuple(dict.fromkeys((nodes - nodes % n) * node for n in (2, 4) if nodes % n and nodes > n))


def _counts(context: Context, total: int) -> tuple[int, ...]:
    """Device counts worth asking about: all, and node counts that divide better; where money counts, small ones too.

    Down to half of the nodes for a step time: with fewer, a power of two in between is no worse. Of more tasks at once
    than there are nodes some share one: halves of a node, quarters and so on fit into nodes whatever they are.
    """
    node = context.cluster.devices_per_node
    nodes = total // node
    fine = {*smooth(nodes), *range(1, 9)}
    together = context.job.sharing == "devices"
    least = 1 if _money_counts(context) or together else -(-nodes // 2)
    parts = {node >> k for k in range(1, node.bit_length())} if together and len(context.tasks) > nodes else set()
    return tuple(sorted({n * node for n in fine if least <= n <= nodes} | {total} | parts))


def _money_counts(context: Context) -> bool:
    """Whether fewer devices may be better, or are all that a limit leaves."""
    job = context.job
    return OBJECTIVES[job.objective.minimize].counts_devices or job.limits.usd_per_step is not None


def _halves(total: int, node: int) -> tuple[int, ...]:
    """Devices of all nodes, of half of them, and so on; each is split between two pools.

    >>> _halves(6 * 8, 8)
    (48, 24, 8)
    """
    nodes = total // node
    return tuple(dict.fromkeys([total, *((nodes >> k) * node for k in range(1, nodes.bit_length()))]))


def _shares(total: int, node: int) -> tuple[int, ...]:
    """Rollout devices of a split: multiples of a node, of devices on one node.

    Where others leave part of a node, multiples of the largest number that divides both.
    Where there are many nodes, multiples of an eighth of them, and counts that leave both pools a power of two or three
    times one, which divide batches.

    >>> _shares(24 * 8, 8)
    (24, 48, 64, 72, 96, 120, 128, 144, 168)
    >>> _shares(2 * 8 - 4, 8)
    (4, 8)
    """
    unit = gcd(total, node) if total > node else 1
    count = total // unit
    step = max(count // 8, 1)
    fine = smooth(count)
    both = {n for n in fine if count - n in fine}
    return tuple(n * unit for n in sorted({*range(step, count, step), *both}))


def longest_of_all(context: Context) -> int:
    """The longest sequence of any task [tokens]."""
    return max(batch.longest_tokens for task in context.tasks for batch in task.batches)
