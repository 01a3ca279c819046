"""Scaling loss: activities whose time does not fall (or rises) as devices are added, fitted over several scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.diagnose.explain import FLOOR, Explanation, explain_graph
from rlperf.diagnose.faults import Fault, Thresholds
from rlperf.errors import SpecError
from rlperf.layout import FloatArray, IntArray
from rlperf.units import human_seconds, human_share

# What should not grow with the devices. A stage that only stays as long as it was is a limit of the plan and is ranked
# in `activities`; tail and imbalance of the other stages are found within one scale.
_SERIAL = (g.CONTROLLER, g.DATA_MOVEMENT, g.WEIGHT_SYNC, g.OFFLOAD, g.COMMUNICATION, g.REWARD)


@dataclass(frozen=True)
class ScalingLoss:
    r"""Time of one activity over the number of devices N, :math:`t = a N^s` (least squares in logarithms).

    Attributes
    ----------
    activity : name
    slope : s [1]
    ideal : the slope of ideal scaling: that of the tokens, minus 1; 0 where the batch grows with the devices [1]
    share : of the rl_step at the largest scale [1]
    loss : ScalAna's ranking, |slope - ideal| x share [1]
    excess_s : time at the largest scale beyond ideal scaling from the smallest [s]
    """

    activity: str
    slope: float
    ideal: float
    share: float
    loss: float
    excess_s: float

    def __str__(self) -> str:
        named = self.activity.replace("_", " ")
        return f"{named} goes with devices ^ {self.slope:.2f}, {human_share(self.share)} of the rl_step"


@dataclass(frozen=True)
class ScalingExplanation:
    """Explanations at every scale, and what does not scale.

    Attributes
    ----------
    devices : ascending ``[scales]``
    rl_step_s : seconds per rl_step at each ``[scales]``
    scaling_loss_s : seconds per rl_step at the largest scale beyond ideal scaling from the smallest [s]
    activities : by loss, the largest first
    largest : explanation of the largest scale, causes that need several scales included
    """

    devices: tuple[int, ...]
    rl_step_s: tuple[float, ...]
    ideal: float
    scaling_loss_s: float
    activities: tuple[ScalingLoss, ...]
    largest: Explanation

    def __str__(self) -> str:
        steps = zip(self.devices, self.rl_step_s, strict=True)
        takes = ", ".join(f"{devices:,} devices {human_seconds(seconds)}" for devices, seconds in steps)
        lost = f"{human_seconds(self.scaling_loss_s)} lost against ideal (devices ^ {self.ideal:g})"
        return "\n".join([f"scaling: {takes}; {lost}", *(f"  {each}" for each in self.activities[:3])])


def explain_scales(
    graphs: Sequence[g.PerformanceGraph],
    *,
    floor: float = FLOOR,
    limits: Thresholds | None = None,
    notes: Sequence[str] = (),
) -> ScalingExplanation:
    """Explain the largest of several scales of one job: graphs at different numbers of devices, in any order."""
    ordered = sorted(graphs, key=lambda graph: graph.devices)
    devices = np.array([graph.devices for graph in ordered], dtype=np.float64)
    if devices.size < 2 or np.unique(devices).size < devices.size or devices[0] < 1:
        raise SpecError("scaling: at least two different numbers of devices are due")
    slope = ideal_slope(ordered, devices)
    steps = np.array([graph.rl_step_s() for graph in ordered])
    last = ordered[-1]
    found, faults = [], []
    for activity in np.unique(np.concatenate([graph.activity for graph in ordered])):
        if activity == g.BARRIER:
            continue
        seconds = np.array([activity_s(graph, int(activity)) for graph in ordered])
        if not np.all(seconds > 0):
            continue
        fitted = float(np.polyfit(np.log(devices), np.log(seconds), 1)[0])
        fair = float(seconds[0] * (devices[-1] / devices[0]) ** slope)
        share = float(seconds[-1] / steps[-1])
        excess = float(seconds[-1]) - fair
        name = g.ACTIVITIES[activity]
        found.append(ScalingLoss(name, fitted, slope, share, abs(fitted - slope) * share, excess))
        if activity in _SERIAL and fitted > max(slope, 0.0) + 0.25 and excess > floor * steps[-1]:
            faults.append(_growing(last, int(activity), fitted, slope, fair / float(seconds[-1])))
    loss = float(steps[-1] - steps[0] * (devices[-1] / devices[0]) ** slope)
    return ScalingExplanation(
        tuple(int(n) for n in devices),
        tuple(steps.tolist()),
        slope,
        loss,
        tuple(sorted(found, key=lambda a: -a.loss)),
        explain_graph(last, floor=floor, limits=limits, extra_faults=faults, notes=notes),
    )


def ideal_slope(graphs: Sequence[g.PerformanceGraph], devices: FloatArray) -> float:
    """d ln(tokens) / d ln(devices) - 1: 0 where the batch grows with the devices, -1 where it stays (strong scaling).

    Rounded to the nearest hundredth, since drawn lengths move the tokens a little.
    """
    work = np.array([_tokens(graph) for graph in graphs])
    if not np.all(work > 0):
        return 0.0
    return round(float(np.polyfit(np.log(devices), np.log(work), 1)[0]) - 1.0, 2)


def _tokens(graph: g.PerformanceGraph) -> float:
    for activities in ((g.DECODE, g.ROLLOUT), (g.SCORING,), (g.TRAINING, g.FORWARD)):
        mask = graph.is_any(activities) & np.isfinite(graph.work)
        if mask.any():
            return float(graph.work[mask].sum()) / max(np.unique(graph.rl_step).size, 1)
    return 0.0


def activity_s(graph: g.PerformanceGraph, activity: int) -> float:
    """Seconds per rl_step of an activity on the rank that spends most on it; of the longest trajectory in a rollout."""
    mask = graph.activity == activity
    if not mask.any():
        return 0.0
    owner = graph.unit if activity in g.IN_ROLLOUT and (graph.unit[mask] >= 0).all() else graph.rank * 4096 + graph.part
    total = np.zeros(1)
    for step in np.unique(graph.rl_step):
        own = mask & (graph.rl_step == step)
        ids = _dense(owner[own])
        total = total + (np.bincount(ids, graph.duration_s[own]).max() if ids.size else 0.0)
    return float(total[0]) / max(np.unique(graph.rl_step).size, 1)


def _dense(values: IntArray) -> IntArray:
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _growing(graph: g.PerformanceGraph, activity: int, slope: float, ideal: float, fair: float) -> Fault:
    """An activity that does not scale, as a fault of the largest scale."""
    own = graph.activity == activity
    name = g.ACTIVITIES[activity]
    kind = "controller" if activity == g.CONTROLLER else "scaling"
    evidence = f"its time goes with devices ^ {slope:.2f}, ideal is ^ {ideal:.2f}"
    change = g.Change(np.where(own, min(fair, 1.0), 1.0))
    return Fault(kind, name.replace("_", " "), evidence, change, own, rank=-1 if activity == g.CONTROLLER else -2)
