"""Likelihood of responses in their groups, the effects per prompt (`prompt_effects`) integrated out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.workload.lengths import Float, Int
from rlperf.workload.prompt_effects import HALF_LOG_2PI, LOG_WEIGHTS, NODES, PromptEffects, log_student

# The effect of a group with responses at the cap: 40 Gauss-Hermite nodes; fewer where each spread needs its own.
_FINE = np.polynomial.hermite_e.hermegauss(40)
_COARSE = np.polynomial.hermite_e.hermegauss(16)


@dataclass(frozen=True, eq=False)
class Scored:
    """Responses as normal scores in their groups. log_pdf: log density of the lengths under their law."""

    z: Float  # [n] below the cap
    log_pdf: Float  # [n]
    group: Int  # [n]
    censored: Int  # [g] responses of the group that reached the cap
    prompt_score: Float  # [g]
    cut: float  # normal score of the cap

    @property
    def n_groups(self) -> int:
        return int(self.censored.size)

    @property
    def size(self) -> int:
        """Responses, those at the cap included."""
        return int(self.z.size + self.censored.sum())

    def thinned(self, most: int) -> Scored:
        """At most so many groups, every k-th."""
        stride = -(-self.n_groups // most)
        if stride <= 1:
            return self
        rows = self.group % stride == 0
        kept = slice(None, None, stride)
        group = self.group[rows] // stride
        return Scored(self.z[rows], self.log_pdf[rows], group, self.censored[kept], self.prompt_score[kept], self.cut)


def log_likelihood(effects: PromptEffects, data: Scored) -> Float:
    """Log likelihood [g] of each group."""
    y, log_h = effects.from_normal(data.z)
    jacobian = np.bincount(data.group, data.log_pdf - log_h, data.n_groups)
    cut = float(effects.from_normal(np.array([data.cut]))[0][0]) if data.censored.any() else np.inf
    return jacobian + (_odd(effects, y, cut, data) if effects.dof else _normal(effects, y, cut, data))


def _normal(effects: PromptEffects, y: Float, cut: float, data: Scored) -> Float:
    """Log density [g] of normal y: given the spread a group is exchangeable normal and the effect's integral is closed.

    The responses at the cap share one threshold and add E_u[P(y > cut | u)^k] under the effect's law given the others.
    """
    size, icc, corr = data.n_groups, effects.icc, effects.spread_corr
    count = np.bincount(data.group, minlength=size).astype(np.float64)[:, None]
    total = np.bincount(data.group, y, size)[:, None]
    squares = np.bincount(data.group, y * y, size)[:, None]
    known, left = effects.beta * data.prompt_score[:, None], 1.0 - effects.beta**2
    nodes, log_weights = (NODES, LOG_WEIGHTS) if effects.spread_sd else (np.zeros(1), np.zeros(1))
    # (u, t) given the prompt's length is normal: t by nodes, u given t in closed form
    t_variance = corr**2 * left + 1.0 - corr**2
    t = corr * known + np.sqrt(t_variance) * nodes
    centre = np.sqrt(icc) * (known + corr * left / np.sqrt(t_variance) * nodes)
    between = icc * (left - (corr * left) ** 2 / t_variance)
    within = effects.within(t)
    # exchangeable normal: determinant within^(m-1) (within + m between), inverse by Sherman-Morrison
    spread = within + count * between
    dev, dev2 = total - count * centre, squares - 2 * centre * total + count * centre**2
    value = -0.5 * (
        np.where(count > 0, (count - 1) * np.log(within) + np.log(spread), 0.0)
        + (dev2 - between * dev**2 / spread) / within
    )
    rows = np.flatnonzero(data.censored)
    if rows.size:
        mean = centre[rows] + between * dev[rows] / spread[rows]
        sd = np.sqrt(between * within[rows] / spread[rows])
        rule = _COARSE if effects.spread_sd else _FINE
        value[rows] += _all_above(mean, sd, within[rows], cut, data.censored[rows], rule)
    return np.asarray(np.logaddexp.reduce(value + log_weights, axis=1) - HALF_LOG_2PI * count[:, 0])


def _all_above(mean: Float, sd: Float, within: Float, cut: float, count: Int, rule: tuple[Float, Float]) -> Float:
    """log E_u[P(y > cut | u)^count], u ~ N(mean, sd^2) ``[groups, nodes of the spread]``, by Gauss-Hermite."""
    from scipy.special import log_ndtr

    nodes, weights = rule
    effect = mean[..., None] + sd[..., None] * nodes
    above = count[:, None, None] * log_ndtr((effect - cut) / np.sqrt(within)[..., None])
    return np.asarray(np.logaddexp.reduce(above + np.log(weights / weights.sum()), axis=-1))


def _odd(effects: PromptEffects, y: Float, cut: float, data: Scored) -> Float:
    """Log density [g] of y with Student errors, over nodes of the effect as dense as eight responses narrow it."""
    from scipy.special import stdtr

    icc, dof, left = effects.icc, effects.dof, 1.0 - effects.beta**2
    sd = np.sqrt(1.0 - icc)
    step = min(0.225, 0.6 * sd / np.sqrt(8.0 * icc * left + 1e-9))
    nodes = np.arange(-4.5, 4.5 + step, step)
    log_weights = -0.5 * nodes**2 - np.log(np.sum(np.exp(-0.5 * nodes**2)))
    centre = np.sqrt(icc) * (effects.beta * data.prompt_score[:, None] + np.sqrt(left) * nodes)
    value = np.empty((data.n_groups, nodes.size))
    for k in range(nodes.size):
        errors = (y - centre[data.group, k]) / sd
        value[:, k] = np.bincount(data.group, log_student(dof, errors) - np.log(sd), data.n_groups)
    if data.censored.any():
        value += data.censored[:, None] * np.log(np.maximum(stdtr(dof, (centre - cut) / sd), 1e-300))
    return np.asarray(np.logaddexp.reduce(value + log_weights, axis=1))
