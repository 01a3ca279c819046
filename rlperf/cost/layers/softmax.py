"""What all kinds of softmax attention share; the kinds are in `full`, `sliding` and `latent`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from rlperf.cost.attention import Heads, packed_attention_s, visible_pairs
from rlperf.cost.layers.layer import ContextValues, Layer
from rlperf.cost.replica import Operator, Replica, memory_operator
from rlperf.cost.roofline import sheet_flop_per_s, stream_s
from rlperf.cost.trainer_device import Keeping, Kept, Seconds, TrainerDevice
from rlperf.layout import BoolArray, FloatArray, IntArray


class Softmax(Layer, ABC):
    """Softmax attention over cached keys and values.

    A kind states its widths, its matrices, its cache and its seconds in an engine; training, rotary embedding, what
    context parallelism moves and what selective recompute drops follow from the widths.
    """

    @property
    def key_dim(self) -> int:
        """Width of one query and key head."""
        return self.arch.head_dim

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.arch.value_head_dim or self.arch.head_dim

    @property
    def key_heads(self) -> int:
        """Heads of keys and values in training."""
        return self.arch.kv_heads

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, or all."""
        return None

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.arch.heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of the attention output before its projection."""
        return self.arch.heads * self.value_dim

    @property
    def pair_flop(self) -> float:
        return 2.0 * (self.query_width + self.value_width)

    def attention_flop(self, tokens: FloatArray) -> FloatArray:
        return self.pair_flop * visible_pairs(tokens, tokens, window=self.window)

    def divides(self, heads: IntArray, tensor: IntArray) -> BoolArray:
        """Query heads are cut; keys and values too, or copied evenly where there are fewer heads than devices."""
        keys = self.arch.kv_heads
        evenly = self.copied_cache | (keys % heads == 0) | (heads % keys == 0)
        return np.asarray((self.arch.heads % heads == 0) & evenly)

    def token_operators(self, replica: Replica, count: float, whole: FloatArray, local: FloatArray) -> list[Operator]:
        rotated = local * (replica.heads(self.arch) + replica.kv_heads(self.arch)) * self.arch.head_dim * 4.0
        return [memory_operator(replica, "rope", count * (2.0 if self.arch.qk_norm else 1.0), rotated)]

    def training_s(self, device: TrainerDevice) -> Seconds:
        split = (device.layout.tensor_parallel * device.layout.ulysses).astype(np.float64)
        heads = self.arch.heads / split
        if device.trainer.timing.kernel_attention == "unfused":
            return self._unfused_s(device, heads)
        kv_heads = np.maximum(self.key_heads / split, 1.0)
        shape = Heads(heads, kv_heads, self.key_dim, self.value_dim, window=self.window)
        forward, backward = (self._ring_s(device, shape, backward=direction) for direction in (False, True))
        factor = device.kernel_factor * device.ring_wait
        return Seconds(forward * factor, backward * factor, forward * factor)

    def _ring_s(self, device: TrainerDevice, heads: Heads, *, backward: bool) -> FloatArray:
        """Flash attention of one microbatch: a kernel for every step of a ring, whose results are merged in between.

        Each of the cp steps pairs a rank's queries with the keys of one rank, a cp-th of the pairs, so that short
        sequences make small kernels. From the second on, the forward rescales and adds up outputs, the backward the
        gradients of queries, keys and values: read both, write one, of 2 bytes (TransformerEngine,
        ``AttnFuncWithCPAndKVP2P``; Liu et al. 2023, arXiv 2310.01889, algorithm 1).
        """
        work, steps = device.work, device.layout.context_parallel.astype(np.float64)
        each = packed_attention_s(
            device.hw, heads, work.attention_tokens, work.pairs / steps, work.max_len / steps, backward=backward
        )
        merged = np.asarray(heads.heads) * self.value_dim
        if backward:
            merged = np.asarray(heads.heads) * self.key_dim + np.asarray(heads.kv_heads) * (
                self.key_dim + self.value_dim
            )
        return steps * each + (steps - 1.0) * stream_s(device.hw, 6.0 * merged * work.attention_tokens)

    def _unfused_s(self, device: TrainerDevice, heads: FloatArray) -> Seconds:
        """Attention before flash kernels: two batched products over all pairs, softmax and dropout through memory.

        Forward 4 d a s^2 FLOP and 11 bytes per score (`_SCORE_BYTES`); backward twice both. The causal half is not
        skipped.
        """
        scores = heads * device.work.pairs
        flop = 4.0 * self.arch.head_dim * scores
        products = flop / (sheet_flop_per_s(device.hw, "fp16") * device.trainer.timing.batched_share)
        forward = (products + stream_s(device.hw, scores * _SCORE_BYTES)) * device.generation.attention
        return Seconds(forward, 2.0 * forward, forward)

    def pass_bytes(self, tensor: FloatArray) -> FloatArray:
        """Rotary embedding: 2 values of 2 bytes of queries and keys."""
        return 4.0 * (self.query_width + self.arch.kv_heads * self.arch.head_dim) / tensor

    def kept(self, keeping: Keeping) -> Kept:
        """Queries, keys, values and output; softmax statistics with flash kernels, whole scores without."""
        per_head = self.arch.heads / keeping.tensor
        each = (2 * keeping.width + 1.0) if keeping.dropout else keeping.width
        return Kept(
            dense=self.kept_values(keeping.tensor) * keeping.width,
            core=0.0 * keeping.tensor if keeping.unfused else 4.0 * per_head,
            scores=per_head * each if keeping.unfused else 0.0 * keeping.tensor,
            products=self.kept_products(keeping),
        )

    def kept_products(self, keeping: Keeping) -> FloatArray | None:
        """Of these, what recompute by operator keeps, statistics included [bytes/token]; None: not known."""
        return None

    @abstractmethod
    def kept_values(self, tensor: FloatArray) -> FloatArray:
        """Values per token of queries, keys, values and attention output (input of the output projection) [1]."""

    @property
    def context(self) -> ContextValues:
        arch, width = self.arch, self.arch.head_dim
        exchanged = 2 * self.query_width + 2 * arch.kv_heads * width
        return ContextValues(ring=2 * self.key_heads * width, heads=arch.kv_heads, exchanged=exchanged)


_SCORE_BYTES = 11.0
"""Bytes moved per score: product written 2, scale-mask-softmax 2 + 2, dropout 2 + 2 + 1 (values of 2 bytes, mask 1)."""


def attention_operator(
    replica: Replica, name: str, count: float, seconds: FloatArray, flop: FloatArray, moved: FloatArray
) -> Operator:
    """``count`` attention layers: their seconds, and FLOP and bytes of each at the rates of the data sheet."""
    return Operator(
        name,
        count * seconds,
        count * flop / sheet_flop_per_s(replica.hw, "bf16"),
        count * moved / replica.hw.device.memory_bandwidth,
        np.zeros(()),
    )
