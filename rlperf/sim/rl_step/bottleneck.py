"""What holds an rl_step back, and what would next: each stage made ideal in turn, by the closed form."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlperf.sim.rl_step.modes import Execution, step_seconds
from rlperf.sim.rl_step.stages import StageSeconds

STAGE_FIELDS = {
    "rollout": ("rollout_s", "rollout_steady_s", "rollout_first_s"),
    "reward": ("reward_s", "scorer_s"),
    "scoring": ("scoring_s",),
    "training": ("training_s",),
    "weight_sync": ("weight_sync_s", "swap_s", "recompute_s"),
    "data_movement": ("data_movement_s",),
    "offload": ("offload_s",),
    "other": ("other_s",),
}
"""Fields of `StageSeconds` that a stage owns."""


@dataclass(frozen=True)
class Bottleneck:
    """A stage and what the rl_step would save if it took no time [s]; ``share`` of the rl_step [1]."""

    stage: str
    gain_s: float
    share: float


@dataclass(frozen=True)
class NextBottleneck:
    """After the first stage has become ``speedup`` times as fast, ``stage`` holds the rl_step back most."""

    first: str
    speedup: float
    stage: str
    rl_step_s: float


def scaled(times: StageSeconds, stage: str, factor: float) -> StageSeconds:
    """The same stages with one of them ``factor`` times as long.

    >>> scaled(StageSeconds.of(rollout_s=10.0, training_s=4.0), "training", 0.5).training_s.item()
    2.0
    """
    changes: dict[str, object] = {}
    for name in STAGE_FIELDS[stage]:
        value = getattr(times, name)
        if value is not None:
            changes[name] = np.asarray(value, np.float64) * factor
    return replace(times, **changes)  # type: ignore[arg-type]


def bottlenecks(execution: Execution, times: StageSeconds) -> list[Bottleneck]:
    """Stages by what the rl_step would save without them, largest first; savings of overlapped stages do not add up.

    >>> found = bottlenecks(Execution("one_step_off"), StageSeconds.of(rollout_s=60.0, training_s=40.0))
    >>> [(one.stage, one.gain_s) for one in found]
    [('rollout', 20.0)]
    """
    whole = float(step_seconds(execution, times))
    found = []
    for stage in STAGE_FIELDS:
        gain = whole - float(step_seconds(execution, scaled(times, stage, 0.0)))
        if gain > 1e-9 * max(whole, 1e-12):
            found.append(Bottleneck(stage, gain, gain / whole))
    return sorted(found, key=lambda one: -one.gain_s)


FASTEST = 64.0
"""Times as fast that a stage is thought of at most [1]."""


def next_bottleneck(execution: Execution, times: StageSeconds) -> NextBottleneck | None:
    """How much faster the first stage must become until another one holds the rl_step back more; None: never.

    Found to 1 % by bisection on the speed-up.
    """
    found = bottlenecks(execution, times)
    if not found:
        return None
    first = found[0].stage

    def leader(speedup: float) -> str:
        rest = bottlenecks(execution, scaled(times, first, 1.0 / speedup))
        return rest[0].stage if rest else first

    if leader(FASTEST) == first:
        return None
    low, high = 1.0, FASTEST
    while high / low > 1.01:
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if leader(middle) == first else (low, middle)
    step = float(step_seconds(execution, scaled(times, first, 1.0 / high)))
    return NextBottleneck(first, high, leader(high), step)
