"""Seconds of one engine_step of one replica, as the rollout simulator needs it: a small table, linear in context.

The cost model (`rlperf.cost.inference`) tabulates it for one architecture, hardware and layout; a fit to recorded
engine latencies writes it directly. Between two completions the running requests only grow, so the seconds of many
engine_steps are an arithmetic series.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlperf.layout import FloatArray


@dataclass(frozen=True)
class EngineStepCost:
    r"""Cost of one engine_step that decodes ``b`` requests and prefills ``n`` prompt tokens.

    .. math::

        t = h + h_r b + L(b^* + n)
            + [b > 0] d_0 + d_s b + d_k K + [n > 0] p_0 + p_s r + p_v n + p_c P

    Attributes
    ----------
    tokens : token counts at which `linear_s` is tabulated, ascending [tokens] ``[points]``
    linear_s : L, all that depends on the number of tokens alone: GEMMs, experts, collectives, norms, head [s]
        ``[points]``; interpolated linearly, extended beyond the last point with the last slope
    host_s, host_per_request_s : h, h_r, scheduler and launches per engine_step and per running request [s]
    decode_fixed_s, decode_per_request_s : d_0, d_s of paged decode attention [s]
    decode_per_kv_token_s : d_k, per cached token read, summed over requests (K) [s]
    prefill_fixed_s, prefill_per_request_s : p_0, p_s, per engine_step with prefill and per prefilled request r [s]
    prefill_per_token_s : p_v, per prefilled token beside L: the vision tower of those that are images [s]
    prefill_per_pair_s : p_c, per (query token, visible key) pair P; a whole prompt of S tokens has S (S + 1) / 2 [s]
    graph_buckets : batch sizes captured in CUDA graphs, ascending; b* is the next bucket (empty: b* = b) ``[buckets]``
    """

    tokens: FloatArray
    linear_s: FloatArray
    host_s: float = 0.0
    host_per_request_s: float = 0.0
    decode_fixed_s: float = 0.0
    decode_per_request_s: float = 0.0
    decode_per_kv_token_s: float = 0.0
    prefill_fixed_s: float = 0.0
    prefill_per_request_s: float = 0.0
    prefill_per_token_s: float = 0.0
    prefill_per_pair_s: float = 0.0
    graph_buckets: FloatArray | None = None

    def linear(self, tokens: FloatArray | float) -> FloatArray:
        """L at any token count [s]."""
        x = np.asarray(tokens, dtype=np.float64)
        inside = np.asarray(np.interp(x, self.tokens, self.linear_s), dtype=np.float64)
        if len(self.tokens) < 2:
            return inside
        slope = (self.linear_s[-1] - self.linear_s[-2]) / (self.tokens[-1] - self.tokens[-2])
        return np.asarray(inside + slope * np.maximum(x - self.tokens[-1], 0.0), dtype=np.float64)

    def padded(self, running: FloatArray | float) -> FloatArray:
        """Batch after padding to the next CUDA-graph bucket; larger batches run unpadded."""
        x = np.asarray(running, dtype=np.float64)
        if self.graph_buckets is None or len(self.graph_buckets) == 0:
            return x
        index = np.searchsorted(self.graph_buckets, x, side="left")
        bucket = self.graph_buckets[np.minimum(index, len(self.graph_buckets) - 1)]
        return np.where((x > 0) & (index < len(self.graph_buckets)), bucket, x)

    def behind_prefix(self, cached: float) -> EngineStepCost:
        """Of requests that each begin with ``cached`` tokens of the prefix cache, whose own tokens alone are counted.

        Exact, for everything is linear in the context: d_s + d_k cached, p_v + p_c cached.

        >>> cost = EngineStepCost(np.array([0.0]), np.zeros(1), decode_per_kv_token_s=2.0, prefill_per_pair_s=3.0)
        >>> behind = cost.behind_prefix(10.0)
        >>> float(behind.decode_s(1.0, 5.0)), float(cost.decode_s(1.0, 15.0))
        (30.0, 30.0)
        >>> float(behind.engine_step_s(0.0, 0.0, 4.0, 10.0, 1.0)), float(cost.engine_step_s(0.0, 0.0, 4.0, 50.0, 1.0))
        (150.0, 150.0)
        """
        return replace(
            self,
            decode_per_request_s=self.decode_per_request_s + self.decode_per_kv_token_s * cached,
            prefill_per_token_s=self.prefill_per_token_s + self.prefill_per_pair_s * cached,
        )

    def decode_s(self, running: FloatArray | float, kv_tokens: FloatArray | float) -> FloatArray:
        """Seconds of a decode-only engine_step.

        Parameters
        ----------
        running : b, requests that decode one token each [1], any shape
        kv_tokens : K, cached tokens of all of them together [tokens], broadcasts with ``running``
        """
        return self.engine_step_s(running, kv_tokens, 0.0, 0.0, 0.0)

    def engine_step_s(
        self,
        running: FloatArray | float,
        kv_tokens: FloatArray | float,
        prefill_tokens: FloatArray | float,
        prefill_pairs: FloatArray | float,
        prefill_requests: FloatArray | float,
    ) -> FloatArray:
        """Seconds of any engine_step (symbols: class docstring); all arguments broadcast."""
        b, k, n, pairs, r = (
            np.asarray(v, dtype=np.float64)
            for v in (running, kv_tokens, prefill_tokens, prefill_pairs, prefill_requests)
        )
        batch_tokens = np.where(n > 0, b + n, self.padded(b))
        seconds = self.host_s + self.host_per_request_s * (b + r) + self.linear(batch_tokens)
        seconds = (
            seconds + (b > 0) * self.decode_fixed_s + self.decode_per_request_s * b + self.decode_per_kv_token_s * k
        )
        seconds = (
            seconds + (n > 0) * self.prefill_fixed_s + self.prefill_per_request_s * r + self.prefill_per_pair_s * pairs
        )
        seconds = seconds + self.prefill_per_token_s * n
        return np.asarray(seconds, dtype=np.float64)


def recompute_s(cost: EngineStepCost, token_budget: float, running: float, context: float) -> float:
    """Seconds to prefill ``running`` interrupted requests of ``context`` tokens each again, prompt and response [s]."""
    tokens = running * context
    steps = float(cost.engine_step_s(0.0, 0.0, token_budget, 0.0, 1.0)) * tokens / token_budget
    return steps + cost.prefill_per_request_s * running + cost.prefill_per_pair_s * running * context**2 / 2.0


@dataclass(frozen=True)
class EngineLimits:
    """What bounds the running batch of one replica.

    Attributes
    ----------
    kv_tokens : cache capacity of the replica [tokens]
    max_running : requests that may run at once
    token_budget : tokens per engine_step (decodes and prefill chunks together)
    block_tokens : tokens of one cache block
    chunked_prefill : prefill is cut into chunks that share engine_steps with decodes; otherwise it goes first, alone
    prefix_caching : full blocks shared within a group and across turns are computed and kept once
    watermark : share of the blocks kept free at admission
    """

    kv_tokens: float
    max_running: int
    token_budget: int = 8192
    block_tokens: int = 16
    chunked_prefill: bool = True
    prefix_caching: bool = True
    watermark: float = 0.01
