"""Vision tower in front of a language model: its layers in an engine and a trainer, and the images that pass it.

No half of a language layer, so it has no line in the table of kinds; what it is made of is stated here alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.cost.attention import Heads, prefill_attention_s
from rlperf.cost.layers.dense import activation_bytes, mlp
from rlperf.cost.layers.layer import Matrix
from rlperf.cost.roofline import Array, as_float, gemm_s, small_op_s
from rlperf.layout import RECOMPUTE, FloatArray, Layout
from rlperf.specs.architecture import Architecture, VisionTower
from rlperf.specs.calibration import PrefillFit
from rlperf.specs.hardware import Hardware
from rlperf.specs.trainer_calibration import TrainerCalibration


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


LIBRARY = "vllm"
"""Engine whose attention is the library's (flash-attention), which trainers call too."""
WIDEST = 96.0
"""Width of heads from which on kernels are those of the language model, timed at 128."""


def encoder_fit(hw: Hardware, engine: str, width: float) -> PrefillFit | None:
    """Constants of an engine's attention in heads nearest to ``width``; of the library where its own was not timed.

    None: the language model's kernels, for wider heads and where no tower was timed.
    """
    timed = hw.calibration.encoder
    fits = [fit for fit in timed if fit.kernel == engine] or [fit for fit in timed if fit.kernel == LIBRARY]
    if not fits or width > WIDEST:
        return None
    return min(fits, key=lambda fit: abs(fit.width - width))


def vision_prefill_s(
    hw: Hardware,
    vision: VisionTower,
    images: Array,
    patches: Array,
    tensor_parallel: Array = 1,
    *,
    engine: str = LIBRARY,
) -> FloatArray:
    """Seconds of a vision tower over ``images`` of ``patches`` each.

    Per layer: query/key/value and output products, attention without a mask (windowed layers attend blocks of the
    window), feed-forward, four small passes; then the merger. Products are split over ``tensor_parallel`` devices.

    Parameters
    ----------
    images : images in one call [1]
    patches : of one image: ceil(width / patch) ceil(height / patch) ceil(frames / temporal patch) [1]
    engine : whose attention runs

    Notes
    -----
    Products and small passes have the language model's constants, attention those of its own timings (`encoder_fit`),
    fitted for 256..65k patches of 1..32 images in 4 and 16 heads of 64, 72 and 80.
    """
    n_images, each = as_float(images), as_float(patches)
    rows, h, split = n_images * each, float(vision.hidden), as_float(tensor_parallel)
    head_dim = h / vision.heads
    products = sum((gemm_s(hw, rows, *matrix.on(split)) for matrix in tower_matrices(vision)), np.zeros(()))
    small = 4.0 * small_op_s(hw, rows * h * 6.0)
    number = np.maximum(vision.heads / split, 1.0)
    heads = Heads(number, number, head_dim, causal=False)
    fit = encoder_fit(hw, engine, head_dim)
    whole = prefill_attention_s(hw, heads, n_images, each, each, fit=fit)
    full = vision.layers if vision.full_attention_layers is None or not vision.window else vision.full_attention_layers
    attention = full * whole
    if vision.window and full < vision.layers:
        side = max(vision.window // (vision.patch_size * vision.spatial_merge), 1) * vision.spatial_merge
        block = np.maximum(np.minimum(float(side * side), each), 1.0)  # of an image without patches: none
        blocks = prefill_attention_s(hw, heads, n_images * np.ceil(each / block), block, block, fit=fit)
        attention = attention + (vision.layers - full) * blocks
    merged = rows / float(vision.spatial_merge) ** 2
    merger = sum((gemm_s(hw, merged, *matrix.on(1.0)) for matrix in merger_matrices(vision)), np.zeros(()))
    return np.asarray(vision.layers * (products + small) + attention + merger)


def tower_matrices(vision: VisionTower) -> tuple[Matrix, ...]:
    """Matrices of one of its layers."""
    h = vision.hidden
    attention = Matrix("qkv", h, 3 * h, parts=3), Matrix("output", h, h, "inputs")
    return (*attention, *mlp("ffn", h, vision.ffn_hidden, vision.gated))


def merger_matrices(vision: VisionTower) -> tuple[Matrix, ...]:
    """Matrices that turn merged patches into tokens of the language model, on every device."""
    merged = vision.hidden * vision.spatial_merge**2
    return Matrix("merger", merged, merged, "copied"), Matrix("merger", merged, vision.output_hidden, "copied")


def tower_bytes(arch: Architecture, layout: Layout, patches: Array) -> FloatArray:
    """Kept activations of the tower: 8 h + 8 q-k-v-o + MLP per patch and layer, or its inputs alone [bytes]."""
    if arch.vision is None:
        return np.zeros(())
    vision = arch.vision
    each = 16.0 * vision.hidden + activation_bytes(vision.ffn_hidden, vision.gated)
    full = layout.activation_recompute == RECOMPUTE.index("full")
    kept = np.where(full, 2.0 * vision.hidden, each / layout.tensor_parallel)
    return as_float(patches) * vision.layers * kept


@dataclass(frozen=True)
class TowerWork:
    """Images of a microbatch and patches of each, through the tower on the first stage."""

    images: Array = 0.0
    patches: Array = 0.0


NO_IMAGES = TowerWork()


def tower_seconds(
    arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout, work: TowerWork, *,
    frozen: bool = False,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """(forward, backward) of the vision tower over a microbatch's images.

    A backward takes twice the forward (extrapolated), one of a frozen tower nothing.
    """
    if arch.vision is None:
        return np.zeros(()), np.zeros(())
    rate = trainer.generation(hw.device).sustained
    number, each = as_float(work.images), as_float(work.patches)
    some = (number > 0) & (each > 0)
    seconds = vision_prefill_s(
        hw, arch.vision, np.where(some, number, 1.0), np.where(some, each, 1.0), layout.tensor_parallel
    )
    forward = np.where(some, seconds / rate, 0.0)
    return forward, (0.0 if frozen else 2.0) * forward


ENCODED_TOKENS = 8192.0
"""Language tokens whose images an engine encodes in one call."""


def encode_s_per_token(
    hw: Hardware, vision: VisionTower | None, images: Images | None, tensor_parallel: Array, engine: str = LIBRARY
) -> float:
    """Seconds that the tower adds to a prefilled prompt token, in calls of `ENCODED_TOKENS`; 0 without images."""
    if vision is None or images is None or not images.share:
        return 0.0
    count = max(ENCODED_TOKENS / images.tokens, 1.0)
    seconds = vision_prefill_s(hw, vision, count, images.patches(vision), tensor_parallel, engine=engine)
    return images.share * float(seconds) / (count * images.tokens)
