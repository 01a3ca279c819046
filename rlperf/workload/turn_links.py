"""What the turns of a trajectory share: effects of its prompt that resemble each other, and a part of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.workload.lengths import Float, Int

_LEAST_PAIRS = 200
_MOST = 0.95


@dataclass(frozen=True)
class TurnLinks:
    """Correlations [1] between turns.

    effect_corr   of the prompt effects of (first, later), (later, last), (first, last) turns
    carried       of a trajectory's own part with that of the turn before: second turn, later one, last after two
    """

    effect_corr: tuple[float, float, float]
    carried: tuple[float, float, float]


def link_turns(scores: Float, spread_sd: Float, kind: Int, turn: Int, trajectory: Int, group: Int) -> TurnLinks:
    """Links between turns [n] from their normal scores; kind 0 first, 1 later, 2 last,
    3 of law `later`, which shares the effect of 1; spread_sd of each turn's form.

    With c_ab the covariance of turns of different trajectories of one group, the prompt effects correlate by
    c_ab / sqrt(c_aa c_bb), and the own parts of turns that follow each other by (cov - c_ab) / sqrt((1 - c_aa)
    (1 - c_bb)). Spreads that differ between prompts, independently for both turns, lower the latter by E[s_a] E[s_b] =
    exp(-(spread_sd_a^2 + spread_sd_b^2) / 2).
    """
    merged = np.where(kind == 3, 1, kind)

    def effects(a: int, b: int) -> float:
        among = [_shared(scores, merged, trajectory, group, *pair) for pair in ((a, a), (b, b))]
        scale = among[0] * among[1]
        return _bounded(_shared(scores, merged, trajectory, group, a, b) / np.sqrt(scale)) if scale > 0 else 0.0

    def own(rows: Int) -> float:
        total, count = 0.0, 0
        for a, b in np.unique(np.c_[kind[rows - 1], kind[rows]], axis=0):
            pairs = rows[(kind[rows - 1] == a) & (kind[rows] == b)]
            if pairs.size < _LEAST_PAIRS:
                continue
            among = [_shared(scores, kind, trajectory, group, *pair) for pair in ((a, a), (b, b), (a, b))]
            together = float(np.cov(scores[pairs], scores[pairs - 1])[0, 1]) - among[2]
            lowered = float(np.exp(-0.5 * (spread_sd[pairs[0]] ** 2 + spread_sd[pairs[0] - 1] ** 2)))
            scale = max((1.0 - among[0]) * (1.0 - among[1]), 1e-3)
            total += pairs.size * together / np.sqrt(scale) / lowered
            count += pairs.size
        return _bounded(total / count) if count else 0.0

    after = np.flatnonzero(turn > 0)
    ends, late = kind[after] == 2, turn[after] > 1
    carried = own(after[~late & ~ends]), own(after[late & ~ends]), own(after[late & ends])
    return TurnLinks((effects(0, 1), effects(1, 2), effects(0, 2)), carried)


def _bounded(correlation: float) -> float:
    return float(np.clip(correlation, -_MOST, _MOST))


def _shared(scores: Float, kind: Int, trajectory: Int, group: Int, a: int, b: int) -> float:
    """c_ab: mean of z_a z_b over pairs of different trajectories of one group."""
    product, pairs = 0.0, 0.0
    for index, sign in ((group, 1.0), (trajectory, -1.0)):
        size = int(index.max()) + 1
        sums = [np.bincount(index[kind == one], scores[kind == one], size) for one in (a, b)]
        counts = [np.bincount(index[kind == one], minlength=size) for one in (a, b)]
        product, pairs = product + sign * float(sums[0] @ sums[1]), pairs + sign * float(counts[0] @ counts[1])
    return product / pairs if pairs >= _LEAST_PAIRS else 0.0


@dataclass(frozen=True, eq=False)
class TurnEffects:
    """Drawn effects [3, groups] of the first, a later and the last turn, and what widens their spreads."""

    effect: Float
    wide: Float

    def of(self, kind: int, group: Int) -> tuple[Float, Float]:
        """(effect, wide) of the responses' groups."""
        return self.effect[kind, group], self.wide[kind, group]


def correlated_effects(corr: tuple[float, float, float], groups: int, rng: np.random.Generator) -> TurnEffects:
    """Standard normal effects with these correlations; of correlations that contradict each other, the nearest ones."""
    matrix = np.eye(3)
    matrix[(0, 1, 0), (1, 2, 2)] = corr
    values, vectors = np.linalg.eigh(matrix + np.triu(matrix, 1).T)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    root /= np.linalg.norm(root, axis=1, keepdims=True)
    return TurnEffects(root @ rng.standard_normal((3, groups)), rng.standard_normal((3, groups)))
