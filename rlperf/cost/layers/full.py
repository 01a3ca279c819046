"""Full softmax attention; groups of query heads share keys and values (GQA: arXiv 2305.13245, section 2.2)."""

from __future__ import annotations

import numpy as np

from rlperf.cost.attention import (
    Heads,
    decode_attention_s,
    prefill_attention_s,
    prefill_fit,
    visible_pairs,
)
from rlperf.cost.collectives import all_reduce_s
from rlperf.cost.dtypes import cache_bytes
from rlperf.cost.layers.layer import Matrix
from rlperf.cost.layers.softmax import Softmax, attention_operator
from rlperf.cost.replica import Operator, Replica, network_operator
from rlperf.cost.trainer_device import Keeping
from rlperf.layout import FloatArray


class Full(Softmax):
    """Every query sees every earlier token."""

    @property
    def mean_dim(self) -> float:
        """Mean width of a key and a value head."""
        return (self.key_dim + self.value_dim) / 2.0

    def matrices(self) -> tuple[Matrix, ...]:
        arch = self.arch
        query = self.query_width * (2 if arch.attention_gate else 1) + arch.heads * arch.attention_gate_heads
        own = 0 if arch.borrows_cache else 1 if arch.values_are_keys else 2
        keys = arch.kv_heads * (self.key_dim * (own > 0) + self.value_dim * (own > 1))
        output = Matrix("output", self.value_width, arch.hidden, "inputs")
        if arch.query_rank:
            down = Matrix("qkv", arch.hidden, arch.query_rank, "copied", fused="down")
            keyed = Matrix("qkv", arch.hidden, keys, head_outputs=keys, head_count=arch.kv_heads, parts=own)
            return down, Matrix("qkv", arch.query_rank, query), keyed, output
        return (
            Matrix("qkv", arch.hidden, query + keys, head_outputs=keys, head_count=arch.kv_heads, parts=1 + own),
            output,
        )

    def other_parameters(self) -> int:
        """Biases, query and key norms, sinks."""
        arch = self.arch
        projected = sum(each.outputs for each in self.matrices() if each.name == "qkv" and each.cut != "copied")
        bias = projected * arch.qkv_bias + arch.hidden * arch.output_bias + arch.query_rank
        normed = arch.heads + arch.kv_heads if arch.qk_norm_whole else 2
        return bias + normed * arch.head_dim * arch.qk_norm + arch.heads * arch.attention_sinks

    def tensors(self) -> int:
        return super().tensors() + 3 * self.arch.qkv_bias + 2 * self.arch.qk_norm

    def token_operators(self, replica: Replica, count: float, whole: FloatArray, local: FloatArray) -> list[Operator]:
        found = super().token_operators(replica, count, whole, local)
        if self.arch.qk_norm_whole:
            # sums of squares of queries and keys in fp32: one value each per token
            at, squares = replica.attention_tensor, local * 8.0
            summed = all_reduce_s(replica.hw, squares, at, replica.within(at), implementation=replica.engine.all_reduce)
            found.append(network_operator(replica, "all-reduce", count, summed, squares * 2.0 * (at - 1.0) / at))
        return found

    def decode_operators(self, replica: Replica, count: float, requests: FloatArray, kv: FloatArray) -> list[Operator]:
        return [self._decode(replica, "full attention", count, requests, kv)]

    def _decode(self, replica: Replica, name: str, count: float, requests: FloatArray, kv: FloatArray) -> Operator:
        """Paged decode."""
        seconds = decode_attention_s(
            replica.hw, Heads(replica.heads(self.arch), replica.kv_heads(self.arch), self.mean_dim), requests, kv,
            kv_dtype=replica.kv_dtype, kernel=replica.engine.decode_kernel, windowed=self.window is not None,
        )  # fmt: skip
        values = 2.0 * kv * replica.kv_heads(self.arch) * self.mean_dim
        flop = 4.0 * kv * replica.heads(self.arch) * self.mean_dim
        return attention_operator(replica, name, count, seconds, flop, values * cache_bytes(replica.kv_dtype))

    def prefill_operators(
        self, replica: Replica, count: float, sequences: FloatArray, query: FloatArray, kv: FloatArray
    ) -> list[Operator]:
        return [self._prefill(replica, "full attention", count, sequences, query, kv)]

    def _prefill(
        self, replica: Replica, name: str, count: float, sequences: FloatArray, query: FloatArray, kv: FloatArray
    ) -> Operator:
        width = self.key_dim + self.value_dim
        heads = Heads(
            replica.heads(self.arch), replica.kv_heads(self.arch), self.key_dim, self.value_dim, window=self.window
        )
        fit, _ = prefill_fit(replica.hw, replica.kv_dtype, replica.engine.prefill_kernel)
        seconds = prefill_attention_s(replica.hw, heads, sequences, query, kv, fit=fit, cache_write=True)
        flop = 2.0 * sequences * visible_pairs(query, kv, window=self.window) * replica.heads(self.arch) * width
        moved = sequences * (query * replica.heads(self.arch) + kv * replica.kv_heads(self.arch)) * width * 2.0
        return attention_operator(replica, name, count, seconds, flop, moved)

    def cache_bytes_per_token(self, replica: Replica) -> FloatArray:
        """Keys and values of the heads on the device, unless they are another layer's."""
        own = 0.0 if self.arch.borrows_cache else 2.0
        return own * self.mean_dim * replica.kv_heads(self.arch) * cache_bytes(replica.kv_dtype)

    def kept_values(self, tensor: FloatArray) -> FloatArray:
        arch = self.arch
        kv = 2.0 * arch.kv_heads * self.mean_dim / np.minimum(tensor, arch.kv_heads)
        gate = self.query_width if arch.attention_gate else 0.0
        return (self.query_width + self.value_width + gate) / tensor + kv

    def kept_products(self, keeping: Keeping) -> FloatArray:
        """The first and the third product (queries and values), attention's output, what is scattered behind it."""
        arch, tensor = self.arch, keeping.tensor
        values = arch.kv_heads * self.value_dim / np.minimum(tensor, arch.kv_heads)
        scattered = np.where(tensor > 1, arch.hidden * keeping.spread, 0.0)
        outputs = (self.query_width + self.value_width) / tensor + values + scattered
        return outputs * keeping.width + 4.0 * arch.heads / tensor
