"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed form in engines."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rlperf.cost.attention import Heads, visible_pairs
from rlperf.cost.dtypes import cache_bytes
from rlperf.cost.latent import (
    absorption_s,
    latent_decode_attention_s,
    latent_decode_fit,
    latent_prefill_attention_s,
    latent_prefill_fit,
)
from rlperf.cost.layers.layer import Matrix
from rlperf.cost.layers.softmax import Softmax, attention_operator
from rlperf.cost.replica import Operator, Replica
from rlperf.cost.roofline import gemm_s
from rlperf.layout import FloatArray
from rlperf.specs.architecture import LatentAttention
from rlperf.specs.engine_calibration import EngineCalibration
from rlperf.specs.hardware import Hardware


class Latent(Softmax):
    """Keys and values are rebuilt from one latent a token, which alone is cached, with a rotary key."""

    unmeasured = "latent attention has no kernel table"
    absorbs_prompts: ClassVar[bool] = False
    """Whether an engine takes queries of prompts to the latents, too: two products of every head, in 16 bits."""
    copied_cache = True
    extra_kernels = 7
    """Counted by hand: two more down projections with their norms, absorption into query and output, merging split
    contexts."""

    def lacks(self, hw: Hardware, engine: EngineCalibration) -> str:
        """Nothing where its kernels were timed on the device."""
        found = latent_prefill_fit(hw, "bf16", engine.engine), latent_decode_fit(hw, "bf16", engine.engine)
        if any(fit is None for fit in found):
            return self.unmeasured
        elsewhere = dict.fromkeys(fit.timed_on for fit in found if fit and fit.timed_on)
        return f"latent attention was timed on {', '.join(elsewhere)}" if elsewhere else ""

    @property
    def ranks(self) -> LatentAttention:
        """Its numbers in the architecture."""
        assert self.arch.latent is not None
        return self.arch.latent

    @property
    def key_dim(self) -> int:
        return self.ranks.nope_head_dim + self.ranks.rope_head_dim

    @property
    def value_dim(self) -> int:
        return self.ranks.value_head_dim

    @property
    def key_heads(self) -> int:
        return self.arch.heads

    @property
    def cached_values(self) -> int:
        """Values cached per token: the latent and the rotary key, copied on every device."""
        return self.ranks.kv_rank + self.ranks.rope_head_dim

    def matrices(self) -> tuple[Matrix, ...]:
        mla, h = self.ranks, self.arch.hidden
        wide = mla.q_rank * (2 if mla.gate_reads_queries else 1)
        query = [Matrix("qkv", h, self.query_width)]
        if mla.q_rank:
            down = Matrix("qkv", h, mla.q_rank, "copied", fused="down")
            query = [down, Matrix("qkv", wide, self.query_width)]
        gated = wide if mla.gate_reads_queries else h
        absorbed = self.arch.heads * (mla.nope_head_dim + mla.value_head_dim)
        return (
            *query,
            Matrix("qkv", h, self.cached_values, "copied", fused="down"),
            Matrix("latent", mla.kv_rank, absorbed, batched=2 if self.absorbs_prompts else 0),
            Matrix("output", self.value_width, h, "inputs"),
            *((Matrix("gate", gated, self.gate_width),) if self.gate_width else ()),
        )

    @property
    def gate_width(self) -> int:
        """Values of the output gate: as many as the output has, or one a head; 0 without."""
        return self.value_width * self.arch.attention_gate + self.arch.heads * self.arch.attention_gate_heads

    def other_parameters(self) -> int:
        """Norms of the two latents."""
        return self.ranks.q_rank + self.ranks.kv_rank

    def tensors(self) -> int:
        norms = 1 + (self.ranks.q_rank > 0)
        return super().tensors() + norms + 3 * self.arch.qkv_bias + 2 * self.arch.qk_norm

    def decode_operators(self, replica: Replica, count: float, requests: FloatArray, kv: FloatArray) -> list[Operator]:
        mla = self.ranks
        seconds = latent_decode_attention_s(
            replica.hw, requests, kv, replica.heads(self.arch), mla.kv_rank, mla.rope_head_dim,
            kv_dtype=replica.kv_dtype, engine=replica.engine.engine, kernel=replica.engine.decode_kernel,
        )  # fmt: skip
        flop = 2.0 * kv * replica.heads(self.arch) * (self.cached_values + mla.kv_rank)
        moved = kv * self.cached_values * cache_bytes(replica.kv_dtype)
        seconds = seconds + self._absorption_s(replica, requests)
        return [attention_operator(replica, "latent attention", count, seconds, flop, moved)]

    def _absorption_s(self, replica: Replica, requests: FloatArray) -> FloatArray:
        """Queries to the latents and values back, beyond the one product that stands for them among all tokens'."""
        mla, heads, engine = self.ranks, replica.heads(self.arch), replica.engine.engine
        widths = mla.nope_head_dim, mla.value_head_dim
        absorbed = sum(absorption_s(replica.hw, requests, heads, width, mla.kv_rank, engine) for width in widths)
        plain = gemm_s(replica.hw, requests, heads * sum(widths), mla.kv_rank, replica.roles.projection)
        return np.maximum(absorbed - plain, 0.0)

    def prefill_operators(
        self, replica: Replica, count: float, sequences: FloatArray, query: FloatArray, kv: FloatArray
    ) -> list[Operator]:
        width = self.key_dim + self.value_dim
        local = replica.heads(self.arch)
        heads = Heads(local, local, self.key_dim, self.value_dim, window=self.window)
        seconds = latent_prefill_attention_s(
            replica.hw, heads, sequences, query, kv, kv_dtype=replica.kv_dtype, engine=replica.engine.engine,
            kernel=replica.engine.prefill_kernel, cache_values=self.cached_values,
        )  # fmt: skip
        flop = 2.0 * sequences * visible_pairs(query, kv, window=self.window) * local * width
        moved = sequences * (query * local + kv * replica.kv_heads(self.arch)) * width * 2.0
        return [attention_operator(replica, "latent attention", count, seconds, flop, moved)]

    def cache_bytes_per_token(self, replica: Replica) -> float:
        return self.cached_values * cache_bytes(replica.kv_dtype)

    def kept_values(self, tensor: FloatArray) -> FloatArray:
        mla, heads = self.ranks, self.arch.heads
        ranks = 2.0 * (mla.q_rank + mla.kv_rank) + mla.rope_head_dim
        return ranks + (2.0 * self.query_width + 2.0 * self.value_width + heads * mla.nope_head_dim) / tensor
