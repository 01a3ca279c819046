"""One device of a trainer with its share of one microbatch: what layer kinds read and hand back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rlperf.cost.batching import Microbatches
from rlperf.cost.dtypes import dtype_of
from rlperf.layout import FloatArray, Layout
from rlperf.specs.hardware import Hardware
from rlperf.specs.speculation import Method
from rlperf.specs.trainer_calibration import Generation, TrainerCalibration
from rlperf.specs.trainer_switches import Switches


@dataclass(frozen=True)
class Work:
    """What one device computes in one microbatch [tokens], after context parallelism.

    ``tokens`` pass through the matrices; ``attention_tokens`` and ``pairs`` (sum of squares) through attention, where
    Ulysses gathers tokens and splits heads instead; ``stream_tokens`` through norms and residuals, where sequence
    parallelism splits once more.
    """

    tokens: FloatArray
    attention_tokens: FloatArray
    pairs: FloatArray
    max_len: FloatArray
    stream_tokens: FloatArray


def work_of(layout: Layout, microbatches: Microbatches) -> Work:
    """Share of one device in one microbatch; ring context parallelism balances the causal triangle."""
    ring = layout.context_parallel.astype(np.float64)
    split = ring * layout.ulysses
    tokens = microbatches.tokens / split
    spread = np.where(layout.sequence_parallel > 0, layout.tensor_parallel, 1).astype(np.float64)
    return Work(
        tokens=tokens,
        attention_tokens=microbatches.tokens / ring,
        pairs=microbatches.sum_squares / ring,
        max_len=microbatches.max_len,
        stream_tokens=tokens / spread,
    )


def sustained(generation: Generation, dtype: str) -> float:
    """Sustained over short-burst rate of matrix products for a dtype [1]."""
    if dtype in ("nvfp4", "mxfp4"):
        return generation.sustained_fp4
    return generation.sustained if dtype in ("bf16", "fp16", "fp32", "tf32") else generation.sustained_fp8


def expert_share(trainer: TrainerCalibration, dtype: str) -> FloatArray | float:
    """Share of what an expert costs in launches and gaps for a dtype: narrow inputs are cast expert by expert [1]."""
    return 1.0 if dtype_of(dtype).narrow else trainer.timing.wide_expert


Ends = tuple[int | None, int | None]
"""Layers of the first and of the last pipeline stage, where a run states them."""
EVEN: Ends = (None, None)


@dataclass(frozen=True)
class UpdateOptions:
    """How a trainer computes, beside its layout.

    Attributes
    ----------
    dtype : of the linear layers (bf16, fp16, fp8, mxfp8, nvfp4); attention, head and router stay in 16 bits
    lora_rank : rank of adapters on all linear layers; the base is frozen: no weight gradients, no moments
    lora_jobs : adapters that are trained in turn on the one base [1]
    adapted : share of the passes in which adapters run: a reference is the policy without them [1]
    frozen_tower : the vision tower is not trained: no backward, no gradients, no moments
    trained_draft : method of the draft head that is trained beside the model; None where none is
    skew : tokens of the busiest expert-parallel device over the mean (1 = balanced)
    head_share : of a microbatch's tokens those that go through the head [1]
    chunked_loss : the loss is computed chunk by chunk, its logits made again in the backward
    whole_gradients : gradients of sharded parameters are added up unsharded and reduced with the last microbatch
    recompute_experts : the expert activation function is recomputed, so that its inputs are not kept
    attention_kernel : "flash" (the newest on the device), "flash2" or "flash1" (the second or first FlashAttention)
    compiled : layers are compiled: what no backward reads is not kept
    compiled_loss : the loss is compiled too: no logits in fp32 stand in memory
    recompute_modules : what selective recompute repeats, by Megatron's names (core_attn, moe, mlp, ...)
    switches : how the stack runs, where not as its backend does by default
    ends : layers of the first and the last pipeline stage, where a run states them: memory counts the fullest
    """

    dtype: str = "bf16"
    lora_rank: int | None = None
    skew: FloatArray | float = 1.0
    head_share: FloatArray | float = 1.0
    chunked_loss: bool = False
    whole_gradients: bool = False
    recompute_experts: bool = False
    attention_kernel: str = "flash"
    compiled: bool = False
    compiled_loss: bool = False
    recompute_modules: tuple[str, ...] = ("core_attn",)
    switches: Switches | None = None
    ends: Ends = EVEN
    lora_jobs: int = 1
    adapted: float = 1.0
    frozen_tower: bool = False
    trained_draft: Method | None = None

    def switches_of(self, trainer: TrainerCalibration) -> Switches:
        """How the stack runs: as stated, else as its backend does."""
        return self.switches or trainer.switches


PLAIN = UpdateOptions()
BEFORE_HOPPER = ("Volta", "Turing", "Ampere", "Ada")
"""Generations of devices on which FlashAttention-2 is the newest kernel."""


@dataclass(frozen=True)
class TrainerDevice:
    """One device of a trainer, and what it does in one microbatch; layout and work are broadcast together."""

    hw: Hardware
    trainer: TrainerCalibration
    layout: Layout
    work: Work
    options: UpdateOptions = PLAIN

    @property
    def dtype(self) -> str:
        """Of the linear layers."""
        return self.options.dtype

    @cached_property
    def generation(self) -> Generation:
        """Constants of the trainer on this generation of devices."""
        return self.trainer.generation(self.hw.device)

    @cached_property
    def switches(self) -> Switches:
        """How the stack runs."""
        return self.options.switches_of(self.trainer)

    @cached_property
    def rate(self) -> FloatArray | float:
        """Sustained over short-burst rate of its matrix products [1].

        What 8-bit products sustain beyond 16-bit ones makes up for the casts in their kernel tables, most of which
        stacks share or fuse. Those that scale every row run each cast by itself, and the kernel that is timed.
        """
        return sustained(self.generation, "bf16" if self.switches.rowwise else self.dtype)

    @property
    def gathered_bytes(self) -> float:
        """Bytes of a value that tensor-parallel ranks gather; scales of rows are sought after the gather."""
        narrow = self.switches.gathers_narrow and not self.switches.rowwise
        return min(dtype_of(self.dtype).activation_bytes, 2.0) if narrow else 2.0

    @cached_property
    def kernel_factor(self) -> FloatArray | float:
        """Time of its attention kernel over the calibrated one [1].

        The first FlashAttention takes so many times the second's, which was the newest until Hopper's came; where a
        backend states no ``flash1``, its ``attention`` has it.
        """
        newest, second = self.generation.attention, self.generation.flash2
        if self.options.attention_kernel == "flash1" and np.any(self.trainer.timing.flash1):
            before = self.hw.device.generation.split()[0] in BEFORE_HOPPER
            return self.trainer.timing.flash1 * (newest if before else second)
        return second if self.options.attention_kernel == "flash2" else newest

    @cached_property
    def ring_wait(self) -> FloatArray:
        """Attention of a causal ring's slowest rank over that of the mean one [1]; (2 cp - 1) / cp if not balanced."""
        ring = self.layout.context_parallel.astype(np.float64)
        return (2.0 * ring - 1.0) / ring if self.switches.ring == "unbalanced" else np.ones(())

    @cached_property
    def tensor(self) -> FloatArray:
        """Devices that share a layer's matrices."""
        return self.layout.tensor_parallel.astype(np.float64)

    @property
    def frozen(self) -> bool:
        """Whether the base weights get no gradients."""
        return self.options.lora_rank is not None


@dataclass(frozen=True)
class Seconds:
    """Forward and backward seconds of one layer in one microbatch.

    ``attention`` is the part of the forward inside softmax attention, ``experts`` that of routed experts: what
    selective recompute repeats.
    """

    forward: FloatArray
    backward: FloatArray
    attention: FloatArray = field(default_factory=lambda: np.zeros(()))
    experts: FloatArray = field(default_factory=lambda: np.zeros(()))


@dataclass(frozen=True)
class Keeping:
    """How a trainer keeps activations.

    Attributes
    ----------
    layout : its tensor, sequence and expert parallel degrees divide; context parallelism divides tokens, not here
    dropout : residual and attention dropout keep one byte per value
    unfused : scores are materialised: 2 a s bytes of softmax (and 3 a s with dropout) per token
    width : bytes of an activation value
    linear_input : bytes of a value kept only as the input of a matrix (8-bit training keeps those narrow); None: width
    compiled : what no backward reads is not kept
    gathers_once : the split output of a norm is kept, not what each matrix behind it gathered for itself
    """

    layout: Layout
    dropout: bool = False
    unfused: bool = False
    width: float = 2.0
    linear_input: float | None = None
    compiled: bool = False
    gathers_once: bool = True

    @property
    def narrow(self) -> float:
        """Bytes of a value kept only as the input of a matrix."""
        return self.width if self.linear_input is None else self.linear_input

    @cached_property
    def tensor(self) -> FloatArray:
        """Devices that share a layer's matrices."""
        return self.layout.tensor_parallel.astype(np.float64)

    @cached_property
    def spread(self) -> FloatArray:
        """Share of a tensor-parallel device in what sequence parallelism splits [1]."""
        return np.where(self.layout.sequence_parallel > 0, 1.0 / self.tensor, 1.0)

    def norm_outputs(self, norms: float, readers: float) -> FloatArray:
        """Hidden states kept as inputs of the matrices behind ``norms``, of whom ``readers`` may gather their own [1].

        PyTorch's DTensor redistributes the input of every module by itself, and a linear layer saves what it computed
        with. Where nothing is split there is nothing to gather, and all of them save one tensor.
        """
        shared = norms * self.spread
        return shared if self.gathers_once else np.where(self.spread < 1.0, readers, shared)


@dataclass(frozen=True)
class Kept:
    """Bytes that one layer keeps per token and device from forward to backward.

    Attributes
    ----------
    dense : all but the routed experts and the core [bytes/token]
    core : inside softmax attention, which selective recompute drops [bytes/token]
    scores : the same, per (token, key) pair: unfused attention only [bytes/pair]
    routed : routed experts [bytes/token]
    expert_hidden : the part of ``routed`` that recomputing the expert activation drops [bytes/token]
    products : of ``dense`` and ``core``, what recompute by operator keeps: the output of every second product and
        of attention; None where nobody read which these are, and all is kept [bytes/token]
    feed_forward : of ``dense``, what recomputing the module ``mlp`` drops: nothing but of dense ones [bytes/token]
    """

    dense: FloatArray | float = 0.0
    core: FloatArray | float = 0.0
    scores: FloatArray | float = 0.0
    routed: FloatArray | float = 0.0
    expert_hidden: FloatArray | float = 0.0
    products: FloatArray | float | None = None
    feed_forward: FloatArray | float = 0.0

    @property
    def by_operator(self) -> FloatArray | float:
        """What recompute by operator keeps [bytes/token]."""
        return self.dense + self.core if self.products is None else self.products
