"""Closed forms for screening: the makespan as a linear function of what the engine_steps cost.

Which requests share an engine_step depends on lengths and limits, not on seconds, as long as nothing happens at a
given time (no tools, all trajectories there from the start). So one count of engine_steps per workload and limits
(`StepCensus`) gives the makespan of any number of layouts by a matrix product, exactly. With tools or arrivals the
count holds for the cost it was taken with and is an approximation for others: the screen serves agents at the cost
of each engine instead (`turns`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.errors import SpecError
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.events import run_events
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.queued import Runs, count_queued, queue_applies
from rlperf.sim.rollout.replica import PLAIN, check, simulate_replica
from rlperf.sim.rollout.static import static_applies
from rlperf.sim.rollout.timeline import Segments
from rlperf.sim.rollout.trajectories import Trajectories

UNIT = EngineStepCost(tokens=np.array([0.0, 1.0]), linear_s=np.zeros(2), host_s=1.0)
"""One second per engine_step: for counting them."""


@dataclass(frozen=True, eq=False)
class StepCensus:
    r"""How often one replica's rollout runs which engine_step.

    .. math::

        T = h N + h_r (B + R) + \sum_j n_j L(x_j) + d_0 N_d + d_s B + d_k K + p_0 N_p + p_s R + p_c P + T_w

    Attributes
    ----------
    batch, batch_steps : decode-only engine_steps n_j that run with b requests (before padding) ``[batches]``
    mixed_tokens, mixed_steps : engine_steps with prefill by tokens x_j in the linear layers ``[mixed]``
    decoding_steps : N_d, engine_steps with at least one decode
    running_sum : B, decodes summed over engine_steps
    keys : K, cached tokens read, summed over engine_steps [tokens]
    prefill_requests, prefill_tokens, prefill_pairs : R, n, P, summed over engine_steps
    batch_keys : of K, what decode-only engine_steps of each batch read [tokens] ``[batches]``
    mixed : (requests that decode, keys that they read, prefilled tokens) of every engine_step with prefill
        ``[3, engine_steps]``
    wait_s : T_w, time without any request to compute [s]
    """

    batch: IntArray
    batch_steps: IntArray
    mixed_tokens: IntArray
    mixed_steps: IntArray
    decoding_steps: int
    running_sum: float
    keys: float
    prefill_requests: float
    prefill_tokens: float
    prefill_pairs: float
    batch_keys: FloatArray
    mixed: FloatArray
    wait_s: float = 0.0
    _weights: dict[tuple[bytes, bytes], tuple[FloatArray, FloatArray]] = field(default_factory=dict, repr=False)

    @property
    def steps(self) -> float:
        """Engine_steps altogether [1]."""
        return float(self.batch_steps.sum() + self.mixed_steps.sum())

    def makespan_s(self, cost: EngineStepCost) -> FloatArray:
        """Makespan of this replica for one cost, or for many at once [s].

        Parameters
        ----------
        cost : fields may carry leading axes of layouts: ``linear_s`` ``[..., points]``, other coefficients ``[...]``;
            ``tokens`` ``[points]`` and ``graph_buckets`` are common to all; with drafted tokens one at a time
        """
        if cost.drafted is not None:
            return np.asarray(self._drafted_s(cost) + self.wait_s, dtype=np.float64)
        decoding, prompts = self._linear_weights(cost)
        mixed = float(self.mixed_steps.sum())
        seconds = np.asarray(cost.linear_s, dtype=np.float64) @ decoding
        seconds = seconds + np.asarray(cost.linear_table(mixed=True), dtype=np.float64) @ prompts
        seconds = seconds + cost.host_s * self.steps
        seconds = seconds + cost.host_per_request_s * (self.running_sum + self.prefill_requests)
        seconds = seconds + cost.decode_fixed_s * self.decoding_steps
        seconds = seconds + cost.decode_per_request_s * self.running_sum
        seconds = seconds + cost.decode_per_kv_token_s * self.keys
        seconds = seconds + cost.prefill_fixed_s * mixed
        seconds = seconds + cost.prefill_per_request_s * self.prefill_requests
        seconds = seconds + cost.prefill_per_token_s * self.prefill_tokens
        seconds = seconds + cost.prefill_per_pair_s * self.prefill_pairs
        return np.asarray(seconds + self.wait_s, dtype=np.float64)

    def _drafted_s(self, cost: EngineStepCost) -> float:
        """The makespan where what a decode costs is tabulated by the number of running requests."""
        batch = self.batch.astype(np.float64)
        decodes = self.batch_steps * cost.decode_fixed(batch) + self.batch_keys * cost.decode_per_key(batch)
        running, keys, tokens = self.mixed
        mixed = cost.engine_step_s(running, keys, tokens, 0.0, 0.0)
        prompts = (cost.prefill_per_request_s + cost.host_per_request_s) * self.prefill_requests
        return float(decodes.sum() + mixed.sum() + prompts + cost.prefill_per_pair_s * self.prefill_pairs)

    def _linear_weights(self, cost: EngineStepCost) -> tuple[FloatArray, FloatArray]:
        """Engine_steps without and with prompts over the points of L: linear interpolation, transposed ``[points]``.

        Costs that were tabulated at the same points share them.
        """
        key = (np.asarray(cost.tokens).tobytes(), np.asarray(cost.graph_buckets).tobytes())
        if key not in self._weights:
            points = np.asarray(cost.tokens, dtype=np.float64)
            batch = cost.padded(self.batch.astype(np.float64))
            self._weights[key] = (
                _shared_out(points, batch, self.batch_steps),
                _shared_out(points, self.mixed_tokens, self.mixed_steps),
            )
        return self._weights[key]


def _shared_out(points: FloatArray, at: FloatArray | IntArray, count: IntArray) -> FloatArray:
    """Engine_steps of so many tokens over the points between which they lie ``[points]``."""
    weight = np.zeros(len(points))
    if len(points) == 1:
        weight[0] = count.sum()
        return weight
    upper = np.clip(np.searchsorted(points, at, side="left"), 1, len(points) - 1)
    share = np.maximum((at - points[upper - 1]) / (points[upper] - points[upper - 1]), 0.0)
    np.add.at(weight, upper, count * share)
    np.add.at(weight, upper - 1, count * (1.0 - share))
    return weight


def take_census(
    trajectories: Trajectories,
    limits: EngineLimits,
    *,
    cost: EngineStepCost = UNIT,
    options: EngineOptions = PLAIN,
) -> StepCensus:
    """Count the engine_steps of one replica's rollout, from one simulation.

    Parameters
    ----------
    trajectories : of one replica
    limits : of the replica
    cost : only matters with tools or arrivals: the cost for which waiting and batching are taken
    options : tool concurrency; the options' speculation is refused (a cost's `drafted` tokens are counted)

    >>> census = take_census(Trajectories.of(4, [1, 3]), EngineLimits(kv_tokens=np.inf, max_running=8))
    >>> census.batch.tolist(), census.batch_steps.tolist(), census.mixed_tokens.tolist(), census.keys
    ([1], [2], [8], 11.0)
    """
    if options.speculation is not None:
        raise SpecError("take_census: speculative decoding is not counted; simulate it event by event")
    check(trajectories, limits, options)
    queue = not static_applies(trajectories, limits, options) and queue_applies(trajectories, limits, options)
    runs: Runs | Segments | None = count_queued(trajectories, cost, limits, options) if queue else None
    wait_s = 0.0
    if runs is None:
        timeline = (run_events if queue else simulate_replica)(trajectories, cost, limits, options=options)
        runs, wait_s = timeline.segments, timeline.tool_wait_s
    prefill = runs.prefill_tokens > 0
    batch, batch_steps = _histogram(runs.running[~prefill], runs.steps[~prefill])
    batch_keys: FloatArray = np.bincount(runs.running[~prefill], runs.keys[~prefill])[batch].astype(np.float64)
    mixed, mixed_steps = _histogram((runs.running + runs.prefill_tokens)[prefill], np.ones(int(prefill.sum())))
    return StepCensus(
        batch=batch,
        batch_steps=batch_steps,
        mixed_tokens=mixed,
        mixed_steps=mixed_steps,
        decoding_steps=int(runs.steps[runs.running > 0].sum()),
        running_sum=float((runs.running * runs.steps).sum()),
        keys=float(runs.keys.sum()),
        prefill_requests=float(runs.prefill_requests.sum()),
        prefill_tokens=float(runs.prefill_tokens.sum()),
        prefill_pairs=float(runs.prefill_pairs.sum()),
        batch_keys=batch_keys,
        mixed=np.array([runs.running[prefill], runs.keys[prefill], runs.prefill_tokens[prefill]], dtype=np.float64),
        wait_s=max(wait_s, 0.0),
    )


def _histogram(values: IntArray, weights: npt.NDArray[Any]) -> tuple[IntArray, IntArray]:
    """Whole numbers that occur, in order, and the sum of their weights."""
    total = np.bincount(values, weights)
    found = np.flatnonzero(total)
    return found, total[found].astype(np.int64)
