"""Splits: the modes of a job with the devices that each pool takes, and what such a split occupies and costs."""

from __future__ import annotations

from dataclasses import dataclass

from rlperf.plan.question.context import Context
from rlperf.plan.question.objective import Usage
from rlperf.plan.search.configuration import Configuration
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.objectives import OBJECTIVES
from rlperf.specs.pool import Role

ROLES: tuple[Role, Role] = ("rollout", "trainer")


@dataclass(frozen=True)
class Split:
    """A mode and how many devices each pool takes; colocated pools share theirs."""

    mode: Mode
    rollout: int
    trainer: int

    @property
    def total(self) -> int:
        """Devices that the split takes together."""
        return self.rollout if MODES[self.mode].shares_devices else self.rollout + self.trainer

    def usage(self, context: Context) -> Usage:
        """Devices and price of the pools."""
        return Usage(
            self.total, context.usd_per_s(0 if MODES[self.mode].shares_devices else self.rollout, self.trainer)
        )


def usage_of(context: Context, configuration: Configuration) -> Usage:
    """Devices and price of a configuration's pools."""
    rollout, trainer = (configuration.pool(role).devices for role in ROLES)
    return Split(configuration.mode, rollout, trainer).usage(context)


def splits(context: Context) -> list[Split]:
    """Modes with device counts: what the user pins or opens, else all devices, or eighths of them between two pools."""
    job, total = context.job, context.cluster.devices
    found = []
    for mode in job.modes:
        rollout, trainer = job.pool("rollout").devices, job.pool("trainer").devices
        if MODES[mode].shares_devices:
            counts = sorted(set(rollout or trainer or _counts(context)) & set(trainer or rollout or _counts(context)))
            found += [Split(mode, n, n) for n in counts]
            continue
        shares = _shares(total, context.cluster.devices_per_node)
        if context.own_rollout:
            own = context.rollout_hardware.cluster.devices
            found += [
                Split(mode, r, t) for r in rollout or (own,) for t in trainer or (total,) if r <= own and t <= total
            ]
            continue
        for r in rollout or shares:
            for t in trainer or (total - r,):
                if r >= 1 and t >= 1 and r + t <= total:
                    found.append(Split(mode, r, t))
    return list(dict.fromkeys(found))


def _counts(context: Context) -> tuple[int, ...]:
    """Device counts worth asking about: all, and node counts that divide better; where money counts, small ones too.

    Down to half of the nodes for a step time: with fewer, a power of two in between is no worse.
    """
    total, node = context.cluster.devices, context.cluster.devices_per_node
    nodes = total // node
    smooth = {n << k for n in (1, 3) for k in range(nodes.bit_length())} | set(range(1, 9))
    small = OBJECTIVES[context.job.objective.minimize].counts_devices or context.job.sharing == "devices"
    least = 1 if small else -(-nodes // 2)
    return tuple(sorted({n * node for n in smooth if least <= n <= nodes} | {total}))


def _shares(total: int, node: int) -> tuple[int, ...]:
    """Rollout devices of a split: multiples of a node (of an eighth where there are many), of devices on one node."""
    unit = node if total > node else 1
    count = total // unit
    step = max(count // 8, 1)
    return tuple(n * unit for n in range(step, count, step))
