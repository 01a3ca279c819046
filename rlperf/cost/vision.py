"""Prefill of a vision tower in front of a language model, and the images of a task that pass through it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.cost.attention import prefill_attention_s
from rlperf.cost.roofline import Array, as_float, gemm_s, small_op_s
from rlperf.layout import FloatArray
from rlperf.specs.architecture import VisionTower
from rlperf.specs.hardware import Hardware


@dataclass(frozen=True)
class Images:
    """Images, or pairs of video frames, in the prompts of a task.

    Attributes
    ----------
    share : of a prompt's tokens that are images [1]
    tokens : of one image, as the language model sees it [tokens]
    """

    share: float
    tokens: float

    def patches(self, vision: VisionTower) -> float:
        """Patches of one image before merging [1]."""
        return self.tokens * float(vision.spatial_merge) ** 2


def vision_prefill_s(
    hw: Hardware, vision: VisionTower, images: Array, patches: Array, tensor_parallel: Array = 1
) -> FloatArray:
    """Seconds of a vision tower over ``images`` of ``patches`` each.

    Per layer: query/key/value and output products, attention without a mask (windowed layers attend blocks of the
    window), feed-forward, four small passes; then the merger. Products are split over ``tensor_parallel`` devices.

    Parameters
    ----------
    images : images in one call [1]
    patches : of one image: ceil(width / patch) ceil(height / patch) ceil(frames / temporal patch) [1]

    Notes
    -----
    Constants are those of the language model's kernels: extrapolated, heads here are narrower than 128.
    """
    n_images, each = as_float(images), as_float(patches)
    rows, h, split = n_images * each, float(vision.hidden), as_float(tensor_parallel)
    width = vision.ffn_hidden / split
    head_dim = h / vision.heads
    products = gemm_s(hw, rows, 3.0 * h / split, h) + gemm_s(hw, rows, h, h / split)
    products = products + gemm_s(hw, rows, (2.0 if vision.gated else 1.0) * width, h) + gemm_s(hw, rows, h, width)
    small = 4.0 * small_op_s(hw, rows * h * 6.0)
    heads = np.maximum(vision.heads / split, 1.0)
    whole = prefill_attention_s(hw, n_images, each, each, heads, heads, head_dim, causal=False)
    full = vision.layers if vision.full_attention_layers is None or not vision.window else vision.full_attention_layers
    attention = full * whole
    if vision.window and full < vision.layers:
        side = max(vision.window // (vision.patch_size * vision.spatial_merge), 1) * vision.spatial_merge
        block = np.maximum(np.minimum(float(side * side), each), 1.0)  # of an image without patches: none
        blocks = prefill_attention_s(
            hw, n_images * np.ceil(each / block), block, block, heads, heads, head_dim, causal=False
        )
        attention = attention + (vision.layers - full) * blocks
    merged = float(vision.spatial_merge) ** 2
    merger = gemm_s(hw, rows / merged, merged * h, merged * h) + gemm_s(
        hw, rows / merged, vision.output_hidden, merged * h
    )
    return np.asarray(vision.layers * (products + small) + attention + merger)


ENCODED_TOKENS = 8192.0
"""Language tokens whose images an engine encodes in one call."""


def encode_s_per_token(
    hw: Hardware, vision: VisionTower | None, images: Images | None, tensor_parallel: Array
) -> float:
    """Seconds that the tower adds to a prefilled prompt token, in calls of `ENCODED_TOKENS`; 0 without images."""
    if vision is None or images is None or not images.share:
        return 0.0
    count = max(ENCODED_TOKENS / images.tokens, 1.0)
    seconds = vision_prefill_s(hw, vision, count, images.patches(vision), tensor_parallel)
    return images.share * float(seconds) / (count * images.tokens)
