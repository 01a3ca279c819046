"""Seconds of one engine_step of one replica, as the rollout simulator needs it: a small table, linear in context.

The cost model (`rlperf.cost.inference`) tabulates it for one architecture, hardware and layout; a fit to recorded
engine latencies writes it directly. Between two completions the running requests only grow, so the seconds of many
engine_steps are an arithmetic series.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from rlperf.layout import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Drafted:
    """What drafted tokens change in an engine_step, for every number of drafts and of running requests.

    An engine_step with k drafts yields ``tokens[k]`` tokens of every request; its seconds over these are what one token
    costs, and nothing else of a rollout changes. Beyond the table, its last entries hold.

    Attributes
    ----------
    tokens : m, mean tokens of a request per engine_step ``[k]``
    added_s : what drafting and the wider verification add to an engine_step ``[k, running]``
    per_key_s : d_k, per cached token read [s] ``[k, running]``
    drafts : k at each number of running requests ``[running]``
    spread : standard deviation of ln m [1]
    """

    tokens: FloatArray
    added_s: FloatArray
    per_key_s: FloatArray
    drafts: IntArray
    spread: float = 0.0

    def at(self, running: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(m, added seconds, d_k) at numbers of running requests of any shape."""
        last = len(self.drafts) - 1
        b = np.clip(np.rint(running), 0, last).astype(np.int64)
        k = self.drafts[b]
        beyond = np.maximum(running / max(last, 1), 1.0)
        return self.tokens[k], self.added_s[k, b] * beyond, self.per_key_s[k, b]

    def scaled(self, factor: float) -> Drafted:
        """The same tokens in ``factor`` times the seconds."""
        return replace(self, added_s=factor * self.added_s, per_key_s=factor * self.per_key_s)

    @property
    def key(self) -> tuple[object, ...]:
        """All that tells it from another, by value."""
        return (self.spread, *(each.tobytes() for each in (self.tokens, self.added_s, self.per_key_s, self.drafts)))


FEW = 64
"""Running requests up to which an engine_step is taken for linear in them, where one slope has to do."""


@dataclass(frozen=True, eq=False)
class EngineStepCost:
    r"""Cost of one engine_step that decodes ``b`` requests and prefills ``n`` prompt tokens.

    .. math::

        t = h + h_r (b + r) + \Lambda
            + [b > 0] d_0 + d_s b + d_k K + [n > 0] p_0 + p_s r + p_v n + p_c P,\quad
        \Lambda = L(b^*) \text{ where } n = 0,\ L'(b + n) \text{ where } n > 0

    Attributes
    ----------
    tokens : token counts at which `linear_s` is tabulated, ascending [tokens] ``[points]``
    linear_s : L, all that depends on the number of tokens alone: GEMMs, experts, collectives, norms, head, and what
        decodes of few requests take beyond d_0 and d_s [s] ``[points]``; interpolated linearly, extended beyond the
        last point with the last slope
    mixed_linear_s : L', the same of engine_steps that hold prompts (n > 0), which no CUDA graph holds: not below what
        the host takes to issue their kernels [s] ``[points]``; by default `linear_s`
    host_s, host_per_request_s : h, h_r, scheduler and launches per engine_step and per running request [s]
    decode_fixed_s, decode_per_request_s : d_0, d_s of paged decode attention [s]
    decode_per_kv_token_s : d_k, per cached token read, summed over requests (K) [s]
    prefill_fixed_s, prefill_per_request_s : p_0, p_s, per engine_step with prefill and per prefilled request r [s]
    prefill_per_token_s : p_v, per prefilled token beside L: the vision tower of those that are images [s]
    prefill_per_pair_s : p_c, per (query token, visible key) pair P; a whole prompt of S tokens has S (S + 1) / 2 [s]
    graph_buckets : batch sizes captured in CUDA graphs, ascending; b* is the next bucket (empty: b* = b) ``[buckets]``
    drafted : with speculative decoding seconds are those of one token per request, t / m; None: nothing is drafted
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
    drafted: Drafted | None = None
    mixed_linear_s: FloatArray | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """All that tells it from another, by value."""
        drafted = None if self.drafted is None else self.drafted.key
        of = {each.name: getattr(self, each.name) for each in fields(self)} | {"drafted": drafted}
        return tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in of.values())

    def linear_table(self, mixed: bool) -> FloatArray:
        """`linear_s`, or that of engine_steps with prompts [s]."""
        return self.linear_s if self.mixed_linear_s is None or not mixed else self.mixed_linear_s

    def linear(self, tokens: FloatArray | float, mixed: bool = False) -> FloatArray:
        """L at any token count, of engine_steps without or with prompts [s]."""
        x, table = np.asarray(tokens, dtype=np.float64), self.linear_table(mixed)
        inside = np.asarray(np.interp(x, self.tokens, table), dtype=np.float64)
        if len(self.tokens) < 2:
            return inside
        slope = (table[-1] - table[-2]) / (self.tokens[-1] - self.tokens[-2])
        return np.asarray(inside + slope * np.maximum(x - self.tokens[-1], 0.0), dtype=np.float64)

    def padded(self, running: FloatArray | float) -> FloatArray:
        """Batch after padding to the next CUDA-graph bucket; larger batches run unpadded."""
        x = np.asarray(running, dtype=np.float64)
        if self.graph_buckets is None or len(self.graph_buckets) == 0:
            return x
        index = self.graph_buckets.searchsorted(x, side="left")
        bucket = self.graph_buckets[np.minimum(index, len(self.graph_buckets) - 1)]
        return np.where((x > 0) & (index < len(self.graph_buckets)), bucket, x)

    @cached_property
    def pace_s(self) -> FloatArray:
        """Seconds of a decoding engine_step: fixed, per running request (up to `FEW`), per cached token [s] ``[3]``.

        >>> EngineStepCost(np.array([0.0]), np.ones(1), decode_per_request_s=2.0, decode_per_kv_token_s=3.0).pace_s
        array([1., 2., 3.])
        """
        alone, few = (float(self.decode_s(float(running), 0.0)) for running in (1, FEW))
        each = (few - alone) / (FEW - 1)
        return np.array([alone - each, each, float(self.decode_per_key(np.asarray(float(FEW))))])

    def scaled(self, factor: float) -> EngineStepCost:
        """Every engine_step ``factor`` times as long.

        >>> cost = EngineStepCost(np.array([0.0]), np.ones(1), host_s=2.0, graph_buckets=np.array([8.0]))
        >>> float(cost.scaled(2.0).decode_s(8.0, 0.0))
        6.0
        """
        if factor == 1.0:
            return self
        terms = {each.name: getattr(self, each.name) for each in fields(self) if each.name.endswith("_s")}
        longer = {name: factor * value for name, value in terms.items() if value is not None}
        return replace(self, drafted=None if self.drafted is None else self.drafted.scaled(factor), **longer)

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
        drafted = self.drafted
        if drafted is not None:
            more = drafted.per_key_s - self.decode_per_kv_token_s
            drafted = replace(drafted, added_s=drafted.added_s + more * cached * np.arange(more.shape[1]))
        return replace(
            self,
            drafted=drafted,
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
        if self.drafted is not None:
            return self._drafted_s(self.drafted, b, k, n, pairs, r)
        linear = self._linear_s(b, n)
        seconds = self.host_s + self.host_per_request_s * (b + r) + linear
        seconds = (
            seconds + (b > 0) * self.decode_fixed_s + self.decode_per_request_s * b + self.decode_per_kv_token_s * k
        )
        seconds = (
            seconds + (n > 0) * self.prefill_fixed_s + self.prefill_per_request_s * r + self.prefill_per_pair_s * pairs
        )
        seconds = seconds + self.prefill_per_token_s * n
        return np.asarray(seconds, dtype=np.float64)

    def _linear_s(self, b: FloatArray, n: FloatArray) -> FloatArray:
        """Λ (class docstring), each table read only where an engine_step is of its kind [s]."""
        mixed = n > 0
        if mixed.all():
            return self.linear(b + n, mixed=True)
        if not mixed.any():
            return self.linear(self.padded(b))
        return np.where(mixed, self.linear(b + n, mixed=True), self.linear(self.padded(b)))

    def decode_fixed(self, running: FloatArray) -> FloatArray:
        """Seconds of a decode-only engine_step without its per-key part, of one token where tokens are drafted [s]."""
        b = np.asarray(running, dtype=np.float64)
        seconds = self._undrafted_s(b)
        if self.drafted is None:
            return seconds
        tokens, added, _ = self.drafted.at(b)
        return np.asarray(np.where(b > 0, (seconds + added) / tokens, seconds), dtype=np.float64)

    def _undrafted_s(self, b: FloatArray) -> FloatArray:
        """Seconds of a decode-only engine_step without its per-key part and without drafts [s]."""
        seconds = self.host_s + self.linear(self.padded(b)) + (b > 0) * self.decode_fixed_s
        return np.asarray(seconds + (self.host_per_request_s + self.decode_per_request_s) * b, dtype=np.float64)

    def decode_per_key(self, running: FloatArray) -> FloatArray:
        """d_k at a number of running requests, of one token where tokens are drafted [s]."""
        b = np.asarray(running, dtype=np.float64)
        if self.drafted is None:
            return np.full(b.shape, self.decode_per_kv_token_s)
        tokens, _, per_key = self.drafted.at(b)
        return np.asarray(per_key / tokens, dtype=np.float64)

    def _drafted_s(
        self, drafted: Drafted, b: FloatArray, k: FloatArray, n: FloatArray, pairs: FloatArray, r: FloatArray
    ) -> FloatArray:
        """One token of every request, and what prompts add to the engine_step that they share."""
        tokens, added, per_key = drafted.at(b)
        decode = np.where(b > 0, (self._undrafted_s(b) + added) / tokens + per_key / tokens * k, 0.0)
        idle = self.host_s + float(self.linear(0.0))
        more = np.where(b > 0, 0.0, idle)
        if np.any(n > 0):
            wide, spared = self.beside_prompts(b)
            prompts = self.linear(wide + n, mixed=True) - spared
            more = np.where(n > 0, prompts + self.prefill_fixed_s + self.prefill_per_token_s * n, more)
        per_request = self.prefill_per_request_s + self.host_per_request_s
        return np.asarray(decode + more + per_request * r + self.prefill_per_pair_s * pairs, dtype=np.float64)

    def beside_prompts(self, running: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Of decodes that draft beside prompts: tokens that they add to L', and seconds that L' spares of their own.

        Those are L of what they verify, but not what padding to a graph's batch took: beside prompts nothing is padded.
        """
        assert self.drafted is not None
        last = len(self.drafted.drafts) - 1
        wide = running * (1.0 + self.drafted.drafts[np.clip(np.rint(running), 0, last).astype(np.int64)])
        unpadded = (self.linear(running) - self.linear(self.padded(running))) / self.drafted.at(running)[0]
        return wide, np.where(running > 0, self.linear(wide), -self.host_s) - unpadded


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
