"""Data movement: the batch from rollout through scoring to the trainer, by one controller or by transfer queues."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlperf.cost.layers import stack_of
from rlperf.layout import FloatArray
from rlperf.specs.architecture import Architecture, VisionTower
from rlperf.specs.rl_calibration import FrameworkCalibration

ID_BYTES = 8.0
"""Token ids, attention masks and positions are int64 tensors in every framework here."""
VALUE_BYTES = 4.0
"""Log-probabilities, rewards, advantages and returns are fp32, one per response token."""

ROUTE_BYTES = 4.0
"""Ids of experts are int32 tensors, as engines return them (assumed: some casts to fewer bytes exist)."""


@dataclass(frozen=True)
class BatchShape:
    """What one rl_step moves; numbers or arrays that broadcast.

    Attributes
    ----------
    sequences : samples of the rl_step [1]
    prompt_tokens, response_tokens : mean of a sample [tokens]
    max_prompt_tokens, max_response_tokens : to which a padding framework fills both [tokens]
    padded : 1 where tensors are padded to the maxima [flag]
    scoring_passes : log-probability passes whose result returns [1]
    value_fields : per-token results besides: rewards, advantages, returns [1]
    image_patches : patches of the images or video frames of a sample, before merging [1]
    patch_bytes : bytes of one patch (`patch_bytes`) [bytes]
    route_bytes : of a token's recorded experts, prompt and response (`route_bytes`) [bytes]
    """

    sequences: npt.ArrayLike
    prompt_tokens: npt.ArrayLike
    response_tokens: npt.ArrayLike
    max_prompt_tokens: npt.ArrayLike = 0
    max_response_tokens: npt.ArrayLike = 0
    padded: npt.ArrayLike = 0
    scoring_passes: npt.ArrayLike = 2
    value_fields: npt.ArrayLike = 3
    image_patches: npt.ArrayLike = 0
    patch_bytes: npt.ArrayLike = 0
    route_bytes: npt.ArrayLike = 0


def patch_bytes(tower: VisionTower) -> float:
    """Bytes of one patch as processors hand it over: 3 colours x patch^2 x temporal patch in fp32 [bytes].

    >>> tower = VisionTower(layers=1, hidden=1, heads=1, ffn_hidden=1, patch_size=14, temporal_patch=2,
    ...                     output_hidden=1, parameters=1)
    >>> patch_bytes(tower)
    4704.0
    """
    return 3.0 * tower.patch_size**2 * tower.temporal_patch * 4.0


def route_bytes(architecture: Architecture) -> float:
    """Bytes in which a token's experts are recorded: an id of 4 bytes for each, in every layer that routes [bytes].

    >>> from rlperf.specs.profiles import load_architecture
    >>> route_bytes(load_architecture("Qwen3-30B-A3B"))
    1536.0
    """
    return ROUTE_BYTES * sum(route.active * count for route, count in stack_of(architecture).routed)


def batch_bytes(shape: BatchShape) -> FloatArray:
    r"""Bytes of one rl_step's batch, counted once.

    .. math:: N \left[ (3 \cdot 8 + e)\,(P + R) + 4\,(s + v)\,R + i\,b \right]

    N sequences; P, R prompt and response tokens (the maxima where padded); ids, mask and positions at 8 bytes;
    s scoring passes and v value fields at 4; i patches of b bytes; e of the experts that routers are to repeat.

    >>> float(batch_bytes(BatchShape(1024, 100, 900, scoring_passes=2, value_fields=3)))
    43008000.0
    """
    f = np.float64
    padded = np.asarray(shape.padded, f)
    prompt = np.where(padded > 0, np.asarray(shape.max_prompt_tokens, f), np.asarray(shape.prompt_tokens, f))
    response = np.where(padded > 0, np.asarray(shape.max_response_tokens, f), np.asarray(shape.response_tokens, f))
    values = np.asarray(shape.scoring_passes, f) + np.asarray(shape.value_fields, f)
    each = (3.0 * ID_BYTES + np.asarray(shape.route_bytes, f)) * (prompt + response) + VALUE_BYTES * values * response
    return np.asarray(np.asarray(shape.sequences, f) * each + pixel_bytes(shape), f)


def pixel_bytes(shape: BatchShape) -> FloatArray:
    """Bytes of the images in one rl_step's batch, N i b of `batch_bytes`."""
    f = np.float64
    each = np.asarray(shape.image_patches, f) * np.asarray(shape.patch_bytes, f)
    return np.asarray(np.asarray(shape.sequences, f) * each, f)


def data_movement_s(framework: FrameworkCalibration, shape: BatchShape, nodes: npt.ArrayLike = 1) -> FloatArray:
    r"""Seconds per rl_step in which the batch is on its way.

    .. math:: t_{single} = N c + \frac{(2 + s) V - V_i}{r}, \qquad t_{distributed} = N c / n + \frac{V}{r n}

    V `batch_bytes`, V_i the images in it; a single controller takes the batch in from rollout (not its images: they
    came from its own data), hands it out to s scoring passes and to the trainer, all through one process at rate r
    [bytes/s]; distributed queues move it once, on n nodes at a time; c per sequence (tokenising, padding, bookkeeping)
    [s]. Padding counts through V.
    """
    volume = batch_bytes(shape)
    rate = framework.controller_rate.value
    each = np.asarray(shape.sequences, np.float64) * framework.per_sample.value
    if framework.controller == "distributed":
        n = np.maximum(np.asarray(nodes, np.float64), 1.0)
        return np.asarray(each / n + volume / (rate * n), np.float64)
    trips = 2.0 + np.asarray(shape.scoring_passes, np.float64)
    return np.asarray(each + (trips * volume - pixel_bytes(shape)) / rate, np.float64)
