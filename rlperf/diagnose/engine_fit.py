"""How long an engine_step takes at a batch and a context, fitted to the engines' own statistics; and who is slower."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.layout import FloatArray


@dataclass(frozen=True, eq=False)
class EngineStepFit:
    r"""Seconds of an engine_step, :math:`t = c_0 + c_1 b + c_2 K`, common to all replicas.

    Attributes
    ----------
    coefficients : c_0 [s], c_1 [s per running request], c_2 [s per cached token]; empty without samples
    slowness : seconds of each replica over those fitted, relative to the median replica [1] ``[replicas]``
    running, keys : mean batch and cached tokens of each replica, weighted with seconds ``[replicas]``
    pool : of the replicas
    """

    coefficients: FloatArray
    slowness: FloatArray
    running: FloatArray
    keys: FloatArray
    pool: int = 0

    def relative_step_s(self, replica: int, batch_factor: float) -> float:
        """Engine_step seconds at ``batch_factor`` times the batch and its cache, over the present ones [1]."""
        if not self.coefficients.size or replica >= self.running.size or not np.isfinite(self.running[replica]):
            return batch_factor
        c0, c1, c2 = self.coefficients
        grows = float(c1 * self.running[replica] + c2 * self.keys[replica])
        return float((c0 + batch_factor * grows) / max(c0 + grows, 1e-12))


def fit_engines(graph: g.PerformanceGraph) -> EngineStepFit:
    """Fit engine_steps over all replicas, replicas that stand out left out; without samples, tokens of a replica per
    second of rollout stand for its speed."""
    samples = graph.samples
    mask = graph.is_any((g.ROLLOUT, g.DECODE)) & (graph.rank >= 0)
    pool = int(graph.pool[mask][0]) if mask.any() else 0
    none = np.zeros(0)
    if samples is None or samples.seconds.size < 4:
        whole = mask & (graph.activity == g.ROLLOUT)
        if not whole.any():
            return EngineStepFit(none, none, none, none, pool)
        size = int(graph.rank[whole].max()) + 1
        seconds = np.bincount(graph.rank[whole], graph.duration_s[whole], size)
        work = np.bincount(graph.rank[whole], np.nan_to_num(graph.work[whole]), size)
        rate = (
            seconds / np.where(work > 0, work, np.nan) if (work > 0).any() else np.where(seconds > 0, seconds, np.nan)
        )
        return EngineStepFit(none, rate / np.nanmedian(rate), none, none, pool)
    size = int(samples.replica.max()) + 1
    matrix = np.stack([np.ones(samples.steps.size), samples.running, samples.keys], axis=1)
    engine_step_s = samples.seconds / samples.steps
    weight = np.sqrt(samples.seconds) / engine_step_s
    slow = np.ones(size)
    weights = np.bincount(samples.replica, samples.seconds, size)
    known = weights > 0
    coefficients = np.zeros(3)
    for _ in range(4):
        # Replicas are put on one scale by their own slowness, so that one that is slow does not bend the fit.
        scaled = engine_step_s / slow[samples.replica]
        coefficients = _nonnegative(matrix * weight[:, None], scaled * weight)
        fitted = np.bincount(samples.replica, matrix @ coefficients * samples.steps, size)
        slow = np.where(known, weights / np.maximum(fitted, 1e-12), 1.0)
        slow = slow / np.median(slow[known])
    safe = np.where(known, weights, np.nan)
    return EngineStepFit(
        coefficients,
        np.where(known, slow, np.nan),
        np.bincount(samples.replica, samples.running * samples.seconds, size) / safe,
        np.bincount(samples.replica, samples.keys * samples.seconds, size) / safe,
        pool,
    )


def _nonnegative(matrix: FloatArray, values: FloatArray) -> FloatArray:
    """Least squares with coefficients of at least 0: a longer context or a larger batch is never faster."""
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    solution, _ = nnls(matrix / scale, values)
    return np.asarray(solution / scale, dtype=np.float64)
