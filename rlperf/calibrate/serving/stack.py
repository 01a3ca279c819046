"""Many measured serving rows asked at once with trial overheads: costs of their engine_steps stacked in arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from rlperf.calibrate.serving.rows import Asked, CostTable, ServingCase, asked_of, of_run_s, served
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.inference import uncaptured_layers
from rlperf.cost.layers import stack_of
from rlperf.cost.serving import Load, Served
from rlperf.layout import FloatArray, IntArray

Measured = tuple[ServingCase, str, float]
"""A case, its primary metric, and the measured figure."""


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

    def linear(self, tokens: FloatArray | float, mixed: bool = False) -> FloatArray:
        table = self.linear_table(mixed)
        x = np.broadcast_to(np.asarray(tokens, dtype=np.float64), (len(self.linear_s),))
        rows, last = np.arange(len(x)), len(self.tokens) - 2
        index = np.clip(np.searchsorted(self.tokens, x, side="right") - 1, 0, last)
        left, right = self.tokens[index], self.tokens[index + 1]
        low, high = table[rows, index], table[rows, index + 1]
        return np.asarray(low + np.maximum((x - left) / (right - left), 0.0) * (high - low))

    def padded(self, running: FloatArray | float) -> FloatArray:
        assert self.graph_buckets is not None
        x = np.broadcast_to(np.asarray(running, dtype=np.float64), (len(self.linear_s),))
        larger = np.where(self.graph_buckets >= x[:, None], self.graph_buckets, np.inf)
        bucket = larger.min(axis=1, initial=np.inf)
        return np.where((x > 0) & np.isfinite(bucket), bucket, x)


_OTHERS = ("tokens", "graph_buckets", "mixed_linear_s", "drafted")
_TERMS = tuple(one.name for one in fields(EngineStepCost) if one.name not in _OTHERS)


CONSTANTS = ("step", "per_layer", "per_expert_layer", "per_request", "uncaptured", "kernel_scale")
"""Constants of an engine in the order in which rows of trial constants have them [s, s, s, s, s, 1]."""

SCALES = (0.7, 0.77, 0.84, 0.9, 0.95, 1.0)
"""Factors on kernels at which costs are worked out; between them they are interpolated, above they are in proportion.
Below 1 a cost is no multiple of the kernels alone, since nothing gets faster than light (`rlperf.cost.replica`)."""


class ServingStack:
    """Measured rows whose overheads are being fitted: what does not depend on these is worked out once."""

    def __init__(self, cases: Sequence[Measured], costs: CostTable) -> None:
        self.cases = tuple(cases)
        self._groups: list[tuple[np.ndarray, list[StackedCost], Asked[FloatArray]]] = []
        found = [[costs.bare(case, scale) for scale in SCALES] for case, _, _ in cases]
        asked = [asked_of(case, one[-1][1]) for (case, _, _), one in zip(cases, found, strict=True)]
        kinds = [one.kind for one in asked]
        for kind in dict.fromkeys(kinds):
            rows = np.asarray([index for index, one in enumerate(kinds) if one == kind])
            stacked = [StackedCost.of([found[row][place][0] for row in rows]) for place in range(len(SCALES))]
            self._groups.append((rows, stacked, _stacked([asked[row] for row in rows])))
        self._layers = np.asarray([float(case.arch.layers) for case, _, _ in cases])
        self._routed = np.asarray([float(stack_of(case.arch).routes.sum()) for case, _, _ in cases])
        self._uncaptured = np.asarray([uncaptured_layers(case.engine, case.arch) for case, _, _ in cases])
        self._shares = np.asarray([case.engine.request_share / case.attention_data for case, _, _ in cases])
        self._devices = np.asarray([float(case.devices) for case, _, _ in cases])
        self.per_token = np.asarray([metric == "tpot_ms" for _, metric, _ in cases])

    @property
    def measured(self) -> FloatArray:
        """Milliseconds per token, or inverse throughput where that is the metric ``[rows]``."""
        return np.asarray([value if metric == "tpot_ms" else 1.0 / value for _, metric, value in self.cases])

    def predicted(self, constants: FloatArray) -> FloatArray:
        """The same of every row under trial constants ``[rows, CONSTANTS]`` (or ``[CONSTANTS]``, for all)."""
        result = np.empty(len(self.cases))
        for rows, _, _, seen in self._served(constants):
            rate = self._devices[rows] / seen.output_tokens_per_s
            result[rows] = np.where(self.per_token[rows], seen.tpot_s * 1e3, rate)
        return result

    def first_tokens_s(self, constants: FloatArray) -> FloatArray:
        """Mean time to first token over the run of every row that is a closed loop [s] ``[rows]``."""
        result = np.empty(len(self.cases))
        for rows, cost, asked, seen in self._served(constants):
            result[rows] = of_run_s(cost, asked, seen) if asked.loop == "closed" else np.nan
        return result

    def _served(self, constants: FloatArray) -> Iterator[tuple[IntArray, StackedCost, Asked[FloatArray], Served]]:
        """Rows of one kind after the other, and what their clients see."""
        step, layer, routed, each, uncaptured, scale = np.broadcast_to(constants, (len(self.cases), len(CONSTANTS))).T
        host = step + layer * self._layers + routed * self._routed
        for rows, stacked, asked in self._groups:
            cost = _at_scale(stacked, scale[rows])
            cost = replace(
                cost,
                host_s=cost.host_s + host[rows],
                host_per_request_s=cost.host_per_request_s + (each * self._shares)[rows],
                mixed_linear_s=np.maximum(cost.linear_s, uncaptured[rows, None] * self._uncaptured[rows]),
            )
            yield rows, cost, asked, served(cost, asked)


def _at_scale(stacked: Sequence[StackedCost], scale: FloatArray) -> StackedCost:
    """Costs at one factor on kernels per row, see `SCALES`."""
    below = np.clip(np.searchsorted(SCALES, scale, side="right") - 1, 0, len(SCALES) - 2)
    low, high = np.asarray(SCALES)[below], np.asarray(SCALES)[below + 1]
    share = np.clip((scale - low) / (high - low), 0.0, 1.0)
    beyond = np.maximum(scale, 1.0)  # below the first, where light is near everywhere, nothing gets faster
    terms: dict[str, Any] = {}
    for name in _TERMS:
        values = np.stack([getattr(one, name) for one in stacked])
        rows = np.arange(len(scale))
        mixed = (values[below, rows].T * (1.0 - share) + values[below + 1, rows].T * share) * beyond
        terms[name] = np.asarray(mixed.T)
    return replace(stacked[-1], **terms)


def _stacked(asked: Sequence[Asked[float]]) -> Asked[FloatArray]:
    """Many questions of one kind as one."""
    load = replace(asked[0].load, **_columns([one.load for one in asked], ("chunked", "look_ahead")))
    return Asked(loop=asked[0].loop, load=load, **_columns(asked, ("loop", "load")))


def _columns(alike: Sequence[Load] | Sequence[Asked[float]], but: tuple[str, ...]) -> dict[str, Any]:
    """The numbers of objects that are alike, each as an array ``[objects]``."""
    names = [one.name for one in fields(alike[0]) if one.name not in but]
    return {name: np.asarray([getattr(one, name) for one in alike], dtype=np.float64) for name in names}
