"""Seconds of engine_steps as plain numbers: `EngineStepCost` tabulated per batch, for loops over engine_steps."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

import numpy as np

from rlperf.cost.engine_step import EngineStepCost
from rlperf.errors import SpecError
from rlperf.layout import FloatArray
from rlperf.sim.rollout.options import EngineOptions


class EngineStepSeconds:
    """Seconds of a decoding and of a mixed engine_step (symbols: `EngineStepCost`).

    With speculation w = k + 1 tokens per request pass the linear layers, and drafting adds its own seconds.

    Attributes
    ----------
    fixed, fixed_s : of a decode-only engine_step without its per-key part, by batch 0 ... max_running [s]
    per_key, per_key_s : d_k, by batch; where the cost drafts tokens both are of one token per request [s]

    ``_wide``, ``_spared_s``: of `EngineStepCost.beside_prompts`, by batch.
    """

    def __init__(self, cost: EngineStepCost, max_running: int, options: EngineOptions) -> None:
        self.cost = cost
        self.width = options.tokens_in_flight
        draft = options.speculation
        self.draft_s = 0.0 if draft is None else draft.draft_s
        self.per_request_s = cost.host_per_request_s + cost.decode_per_request_s
        self.per_request_s += 0.0 if draft is None else draft.draft_per_request_s
        self.decode_once_s = cost.decode_fixed_s + self.draft_s
        batch = np.arange(max_running + 1, dtype=np.float64)
        linear = cost.linear(cost.padded(batch) * self.width)
        self.fixed = cost.host_s + linear + self.decode_once_s + self.per_request_s * batch
        self.per_key: FloatArray = np.full(max_running + 1, float(cost.decode_per_kv_token_s))
        self._wide: list[float] = []
        self._spared_s: list[float] = []
        if cost.drafted is not None:
            if draft is not None:
                raise SpecError("speculation is stated twice: in the cost of an engine_step, and in the options")
            self.fixed, self.per_key = cost.decode_fixed(batch), cost.decode_per_key(batch)
            wide, spared = cost.beside_prompts(batch)
            self._wide, self._spared_s = wide.tolist(), spared.tolist()
        self.per_key_s: list[float] = self.per_key.tolist()
        self.fixed_s: list[float] = self.fixed.tolist()
        self._tokens: list[float] = np.asarray(cost.tokens, dtype=np.float64).tolist()
        self._linear: list[float] = np.asarray(cost.linear_table(mixed=True), dtype=np.float64).tolist()

    def mixed_linear_s(self, tokens: float) -> float:
        """L of an engine_step with prompts at one token count [s]; the scalar twin of `EngineStepCost.linear`."""
        xs, ys = self._tokens, self._linear
        if len(xs) < 2 or tokens <= xs[0]:
            return ys[0]
        i = bisect_right(xs, tokens, 0, len(xs) - 1)
        return ys[i - 1] + (ys[i] - ys[i - 1]) * ((tokens - xs[i - 1]) / (xs[i] - xs[i - 1]))

    def mixed_s(self, running: int, keys: float, tokens: int, pairs: float, requests: int) -> float:
        """Seconds of an engine_step with prefill: ``tokens`` of ``requests`` prompts beside ``running`` decodes."""
        cost, drafted = self.cost, self.cost.drafted is not None
        beside = self._wide[running] if drafted else running * self.width
        host_s = 0.0 if drafted else cost.host_s  # with drafts it is among that of the decodes, or of what is spared
        seconds = host_s + cost.host_per_request_s * requests + self.mixed_linear_s(beside + tokens)
        seconds += cost.prefill_fixed_s + cost.prefill_per_request_s * requests + cost.prefill_per_pair_s * pairs
        seconds += cost.prefill_per_token_s * tokens
        if drafted:
            decodes = self.fixed_s[running] + self.per_key_s[running] * keys if running else 0.0
            return seconds - self._spared_s[running] + decodes
        if running:
            seconds += self.decode_once_s + self.per_request_s * running + self.per_key_s[running] * keys
        return seconds


@lru_cache(maxsize=64)
def tabulated(cost: EngineStepCost, max_running: int, options: EngineOptions) -> EngineStepSeconds:
    """Seconds of engine_steps, tabulated once for all the replicas that have this cost."""
    return EngineStepSeconds(cost, max_running, options)
