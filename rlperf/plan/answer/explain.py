"""Why a configuration was chosen: what binds it, and what another one does otherwise."""

from __future__ import annotations

import numpy as np

from rlperf.plan.answer.divisible import uneven_samples
from rlperf.plan.answer.memory_uses import memory_uses
from rlperf.plan.answer.prediction import idle_fractions
from rlperf.plan.judge.at_once import evicted_share, refills
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.search.configuration import Configuration
from rlperf.sim.rl_step.pairs import Pairs
from rlperf.sim.rl_step.stage_seconds import APART, sync_seconds, usual_sync_fit
from rlperf.specs.modes import MODES
from rlperf.units import human_seconds

NOTEWORTHY = 0.1
"""A cause is named when it takes at least this share."""
EVICTED = "KV cache: what was evicted is computed again"
IDLE = "devices: "
"""How the words begin that say how many stay idle."""


def binding(context: Context, task: TaskContext, evaluation: Evaluation) -> list[str]:
    """What holds the configuration back, largest first."""
    found = []
    seconds, step = evaluation.seconds, evaluation.rl_step_s
    lost_by = idle_fractions(evaluation)
    of_step = float(seconds.rollout_s.mean()) / step
    ahead = evaluation.rollout.ahead_s is not None and refills(evaluation)
    if ahead and (lost := evicted_share(evaluation) * of_step) >= NOTEWORTHY:
        found.append((lost, f"{EVICTED} ({100 * lost:.0f} % of the rl_step)"))
    for cause, words in (
        ("tail", "tail: the longest responses run in a nearly empty batch"),
        ("imbalance", "imbalance: replicas wait for the slowest one"),
        ("tool_wait", "tools: engines wait for tool answers"),
        ("preemption", EVICTED),
    ):
        lost = lost_by.get(cause, 0.0) * of_step
        if lost >= NOTEWORTHY:
            found.append((lost, f"{words} ({100 * lost:.0f} % of the rl_step)"))
    for pool, other in (("rollout", "trainer"), ("trainer", "rollout")):
        lost = lost_by.get(f"{pool}_waits", 0.0)
        if lost >= NOTEWORTHY:
            found.append((lost, f"{pool} pool: waits for the {other} ({100 * lost:.0f} % of its device time)"))
    for role, use in memory_uses(context, evaluation).items():
        share = use.total / use.allowed
        if share > 1.0 - NOTEWORTHY:
            words = f"memory: the {role} takes {100 * share:.0f} % of what the risk of running out allows"
            found.append((share - 1.0 + NOTEWORTHY, words))
    idle = context.cluster.devices - _devices_of(context, evaluation.configuration)
    shared = context.job.sharing == "devices" and len(context.job.tasks) > 1  # the other tasks have the rest
    if idle > 0 and not shared:
        devices = context.cluster.devices
        found.append((idle / devices, _idle_words(evaluation.configuration, idle, devices)))
    for name, words in (
        ("weight_sync_s", "weight sync"),
        ("reward_s", "reward"),
        ("offload_s", "sleep, wake and offload"),
        ("other_s", "the framework's own overhead"),
    ):
        part = float(getattr(seconds, name).mean()) / step
        if part >= NOTEWORTHY:
            more = _faster_sync(context, task, evaluation) if name == "weight_sync_s" else ""
            found.append((part, f"{words} ({100 * part:.0f} % of the rl_step{more})"))
    return [words for _, words in sorted(found, key=lambda item: -item[0])]


def _idle_words(configuration: Configuration, idle: int, devices: int) -> str:
    """How many of ``devices`` stay idle, and that the samples of an update divide over fewer, where they do."""
    samples = uneven_samples(configuration.mode, configuration.batch, devices)
    why = f": {samples:,} samples an update do not divide over all" if samples else ""
    return f"{IDLE}{idle} of {devices} stay idle{why}"


def _faster_sync(context: Context, task: TaskContext, evaluation: Evaluation) -> str:
    """What another way of the framework's weights would take, where it takes less than half as long."""
    mode, framework, first = evaluation.configuration.mode, evaluation.framework, np.zeros(1, dtype=np.int64)
    pairs = Pairs(evaluation.rollout, evaluation.trainer, first, first)
    used = usual_sync_fit(framework, MODES[mode].shares_devices).transport
    apart = not MODES[mode].shares_devices
    known = (fit for fit in framework.weight_sync if (fit.transport in APART) == apart and not fit.provenance.assumed)
    seconds = {
        name: float(sync_seconds(context.site, evaluation.stack, task.architecture, mode, pairs, name)[0])
        for name in (used, *(fit.transport for fit in known))
    }
    best = min(seconds, key=lambda name: seconds[name])
    if seconds[best] > 0.5 * seconds[used]:
        return f", by {used}"
    return f": {human_seconds(seconds[used])} by {used}, {human_seconds(seconds[best])} with weight_sync: {best}"


def _devices_of(context: Context, configuration: Configuration) -> int:
    """Devices of the job's own cluster that a configuration takes."""
    return configuration.pool("trainer").devices if context.own_rollout else configuration.devices


def differences(chosen: Configuration, other: Configuration) -> list[str]:
    """What ``other`` does otherwise, in words such as ``rollout tensor_parallel 4 instead of 2``."""
    found = []
    if chosen.mode != other.mode:
        found.append(f"{other.mode} instead of {chosen.mode}")
    for name, theirs in other.settings.model_dump().items():
        ours = getattr(chosen.settings, name)
        if ours != theirs:
            found.append(f"{name} {theirs} instead of {ours}")
    for pool in chosen.pools:
        rival = other.pool(pool.role)
        if pool.role in ("reference", "critic"):
            if pool.own_devices != rival.own_devices:
                found.append(f"{pool.role} on {rival.devices} instead of {pool.devices} devices of its own")
            continue
        budgets = (pool.settings.token_budget, rival.settings.token_budget)
        for mine, its in ((pool.layout, rival.layout), (pool.settings, rival.settings)):
            for name, theirs in its.model_dump().items():
                ours = getattr(mine, name)
                follows = name == "scoring_token_budget" and (ours, theirs) == budgets
                if ours != theirs and name not in ("data_parallel", "sequence_parallel") and not follows:
                    said, own = ("unset" if value is None else value for value in (theirs, ours))
                    found.append(f"{pool.role} {name} {said} instead of {own}")
        if pool.devices != rival.devices:
            found.append(f"{pool.role} on {rival.devices} instead of {pool.devices} devices")
    return found or ["data_parallel alone"]
