"""Many measured serving rows asked at once with trial overheads: costs of their engine_steps stacked in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from rlperf.calibrate.inference_rows import Asked, CostTable, ServingCase, asked_of, replica_of, served
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.inference import with_overhead
from rlperf.cost.layers import stack_of
from rlperf.cost.operators import cached_token_held_s
from rlperf.layout import FloatArray

Measured = tuple[ServingCase, str, float]
"""A case, its primary metric, and the measured figure."""

PLACES = {"per_layer": 1.0, "per_expert_layer": 1.0, "step": 60.0}
"""Where an engine's fixed time may sit, and a factor that brings all of them to one range (layers of a large model)."""


@dataclass(frozen=True)
class StackedCost(EngineStepCost):
    """Costs of many replicas: every term is ``[rows]``, `linear_s` ``[rows, points]``, buckets ``[rows, most]``.

    Rows with fewer buckets than the most end in infinity; the token counts are common to all.
    """

    @classmethod
    def of(cls, costs: Sequence[EngineStepCost]) -> StackedCost:
        """Costs that share their token counts, stacked."""
        most = max(0 if one.graph_buckets is None else len(one.graph_buckets) for one in costs)
        buckets = np.full((len(costs), most), np.inf)
        for line, one in zip(buckets, costs, strict=True):
            if one.graph_buckets is not None:
                line[: len(one.graph_buckets)] = one.graph_buckets
        terms = {name: np.asarray([getattr(one, name) for one in costs], dtype=np.float64) for name in _TERMS}
        return cls(tokens=costs[0].tokens, graph_buckets=buckets, **terms)  # type: ignore[arg-type]

    def linear(self, tokens: FloatArray | float) -> FloatArray:
        x = np.broadcast_to(np.asarray(tokens, dtype=np.float64), (len(self.linear_s),))
        rows, last = np.arange(len(x)), len(self.tokens) - 2
        index = np.clip(np.searchsorted(self.tokens, x, side="right") - 1, 0, last)
        left, right = self.tokens[index], self.tokens[index + 1]
        low, high = self.linear_s[rows, index], self.linear_s[rows, index + 1]
        return np.asarray(low + np.maximum((x - left) / (right - left), 0.0) * (high - low))

    def padded(self, running: FloatArray | float) -> FloatArray:
        assert self.graph_buckets is not None
        x = np.broadcast_to(np.asarray(running, dtype=np.float64), (len(self.linear_s),))
        larger = np.where(self.graph_buckets >= x[:, None], self.graph_buckets, np.inf)
        bucket = larger.min(axis=1, initial=np.inf)
        return np.where((x > 0) & np.isfinite(bucket), bucket, x)


_TERMS = tuple(one.name for one in fields(EngineStepCost) if one.name not in ("tokens", "graph_buckets"))


class ServingStack:
    """Measured rows whose overheads are being fitted: what does not depend on these is worked out once.

    Costs are linear in the overheads but for what holds reading the cache to the memory's rate; that is asked of every
    distinct configuration once per factor on kernels. Answers are kept by value: fits that leave different rows out
    start from one point and share what they ask there.
    """

    def __init__(self, cases: Sequence[Measured], costs: CostTable) -> None:
        self.cases = tuple(cases)
        self._groups: dict[tuple[str, bool, bool], tuple[np.ndarray, StackedCost, Asked[FloatArray]]] = {}
        self._held: dict[float, FloatArray] = {}
        self._known: dict[tuple[str, bytes], FloatArray] = {}
        found = [costs.bare(case) for case, _, _ in cases]
        asked = [asked_of(case, slots) for (case, _, _), (_, slots) in zip(cases, found, strict=True)]
        kinds = [(one.loop, one.chunked, one.look_ahead) for one in asked]
        for kind in dict.fromkeys(kinds):
            rows = np.asarray([index for index, one in enumerate(kinds) if one == kind])
            cost = StackedCost.of([found[row][0] for row in rows])
            self._groups[kind] = (rows, cost, _stacked([asked[row] for row in rows]))
        self._layers = {
            "step": np.ones(len(cases)),
            "per_layer": np.asarray([float(case.arch.layers) for case, _, _ in cases]),
            "per_expert_layer": np.asarray([float(stack_of(case.arch).routes.sum()) for case, _, _ in cases]),
        }
        names = [(case.configuration, case.kv_dtype) for case, _, _ in cases]
        self._distinct = {name: case for name, (case, _, _) in zip(names, cases, strict=True)}
        order = {name: index for index, name in enumerate(self._distinct)}
        self._configuration = np.asarray([order[name] for name in names])
        self._devices = np.asarray([float(case.devices) for case, _, _ in cases])
        self._per_token = np.asarray([metric == "tpot_ms" for _, metric, _ in cases])

    def predicted(self, parameters: FloatArray, place: str) -> FloatArray:
        """Milliseconds per token of every row (inverse throughput where that is the metric) with trial overheads.

        ``parameters``: the fixed time at ``place`` over `PLACES` [s], seconds per request, factor on kernels.
        """
        key = (place, np.asarray(parameters, dtype=np.float64).tobytes())
        if key not in self._known:
            self._known[key] = self._predicted(parameters, place)
        return self._known[key]

    def _predicted(self, parameters: FloatArray, place: str) -> FloatArray:
        fixed, each, scale = (float(value) for value in parameters)
        host = fixed * PLACES[place] * self._layers[place]
        held = self._held_s(scale)
        result = np.empty(len(self.cases))
        for rows, bare, asked in self._groups.values():
            cost = replace(bare, **{name: getattr(bare, name) * scale for name in _TERMS})
            cost = replace(
                cost,
                host_s=cost.host_s + host[rows],
                host_per_request_s=cost.host_per_request_s + each,
                decode_per_kv_token_s=cost.decode_per_kv_token_s + held[rows],
            )
            seen = served(cost, asked)
            rate = self._devices[rows] / seen.output_tokens_per_s
            result[rows] = np.where(self._per_token[rows], seen.tpot_s * 1e3, rate)
        return result

    def _held_s(self, scale: float) -> FloatArray:
        if scale not in self._held:
            scaled = (replace(case, engine=with_overhead(case.engine, 0.0, scale)) for case in self._distinct.values())
            self._held[scale] = np.asarray([cached_token_held_s(replica_of(case)) for case in scaled])
        return np.asarray(self._held[scale][self._configuration])


def _stacked(asked: Sequence[Asked[float]]) -> Asked[FloatArray]:
    """Many questions of one kind as one."""
    numbers = {
        one.name: np.asarray([getattr(each, one.name) for each in asked], dtype=np.float64)
        for one in fields(Asked)
        if one.name not in ("loop", "chunked", "look_ahead")
    }
    return Asked(loop=asked[0].loop, chunked=asked[0].chunked, look_ahead=asked[0].look_ahead, **numbers)
