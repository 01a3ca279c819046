"""Seconds of one microbatch in the mean and in the longest pipeline stage, host and uneven ends included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.cost.layers import stack_of
from rlperf.cost.trainer.parameters import stage_layers
from rlperf.cost.trainer_device import expert_share
from rlperf.layout import FloatArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.trainer_calibration import TrainerCalibration
from rlperf.specs.trainer_switches import Switches


def launch_s(
    arch: Architecture, trainer: TrainerCalibration, layout: Layout, switches: Switches, dtype: str
) -> FloatArray | float:
    """Seconds in which the host launches one pass of the mean layer; a graph of the whole iteration leaves none."""
    timing, stack = trainer.timing, stack_of(arch)
    left = {"none": 1.0, "partial": timing.graph_host, "full_iteration": 0.0}[switches.cuda_graph]
    moe: FloatArray | float = timing.host_moe_layer * stack.routed_share
    if arch.experts:
        held = sum(route.count * count for route, count in stack.routed) / arch.layers
        moe = moe + expert_share(trainer, dtype) * timing.host_expert * held / layout.expert_parallel
    waiting = timing.drop_host if switches.drops_tokens else 1.0
    waiting = waiting * (timing.hybrid_host if switches.dispatcher == "hybridep" else 1.0)
    return left * (timing.host_layer * (1.0 - stack.routed_share) + waiting * moe)


@dataclass(frozen=True)
class StageTimes:
    """One microbatch in a pipeline stage [s].

    Attributes
    ----------
    layers : of the mean stage [1]
    mean, longest : of the mean stage, and of the one that the others wait for
    host : by which launching holds the mean stage up
    """

    layers: FloatArray
    mean: FloatArray
    longest: FloatArray
    host: FloatArray

    def bubble_s(self, count: FloatArray, warm_up: FloatArray) -> FloatArray:
        """Waiting for the longest stage with every microbatch, and ``warm_up`` mean stages of fill and drain [s]."""
        return count * (self.longest - self.mean) + warm_up * self.mean


def warm_up(count: FloatArray, stages: FloatArray, chunks: FloatArray) -> FloatArray:
    r"""Stages of work that a device waits in fill and drain, and where microbatches are too few to go around [1].

    .. math:: \frac{p - 1 + (v - 1) \max(p - m, 0)}{v}

    Interleaved chunks take microbatches in groups of p (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): of fewer
    than p, a device has done each chunk before the first of them comes back around for the next.

    >>> [float(warm_up(np.asarray(m), np.asarray(8.0), np.asarray(v))) for m, v in ((8.0, 1.0), (8.0, 4.0), (2.0, 4.0))]
    [7.0, 1.75, 6.25]
    """
    return np.asarray((stages - 1.0 + (chunks - 1.0) * np.maximum(stages - count, 0.0)) / chunks)


def stage_times(
    arch: Architecture, trainer: TrainerCalibration, layout: Layout, device: FloatArray, host: FloatArray | float,
    first: FloatArray, last: FloatArray, hop: FloatArray, added: FloatArray | float = 0.0,
) -> StageTimes:  # fmt: skip
    """Stages of a pipeline whose fullest ones hold `stage_layers` layers and the last one the rest.

    Parameters
    ----------
    device, host : seconds of one layer on the device, and in which the host launches it [s]
    first, last : beside the layers of the first stage (vision tower) and of the last one (head) [s]
    hop : hand-over of the activations; added : of every stage (gradients are summed up) [s]
    """
    timing, stages, layers = trainer.timing, layout.pipeline_parallel.astype(np.float64), float(arch.layers)
    each = layers / stages
    busy = each * device + (last + first) / stages + added
    paced = paced_s(busy, each * host, timing.host_norm)
    mean = paced + hop + timing.microbatch
    fullest = stage_layers(arch, layout)
    rest = np.maximum(np.where(fullest > each, layers - fullest * (stages - 1.0), each), 0.0)
    longest = np.maximum(fullest * device + first, rest * device + last)
    longest = np.where(stages > 1.0, longest, each * device + (last + first)) + added
    longest = np.maximum(paced_s(longest, fullest * host, timing.host_norm) + hop + timing.microbatch, mean)
    return StageTimes(each, mean, longest, np.maximum(paced - busy, 0.0) + timing.microbatch)


def paced_s(device: FloatArray, host: FloatArray, norm: FloatArray | float) -> FloatArray:
    """Seconds of work that a host launches while a device runs it: the longer one, and more where they are close.

    (device^q + host^q)^(1/q): launches vary, so near the crossing each waits for the other at times.

    >>> float(paced_s(np.asarray(3.0), np.asarray(0.0), 8.0)), round(float(paced_s(np.ones(()), np.ones(()), 8.0)), 3)
    (3.0, 1.091)
    """
    longer = np.maximum(np.maximum(device, host), 1e-30)
    if np.all(norm >= 32.0):
        return np.asarray(longer)
    return np.asarray(longer * (1.0 + (np.minimum(device, host) / longer) ** norm) ** (1.0 / norm))
