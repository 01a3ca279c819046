"""Responses to one prompt resemble each other: random effects per prompt, after the law of lengths.

The effects are in `rlperf.workload.prompt_effects`; here they are fitted, and the errors of a law fitted to grouped
responses are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rlperf.workload.effect_likelihood import Scored, log_likelihood
from rlperf.workload.laws import _TINY, Law, bounds
from rlperf.workload.lengths import Float, Int, Mask
from rlperf.workload.prompt_effects import PromptEffects
from rlperf.workload.tails import PRIOR_PRECISION, log_prior

_MOST_GROUPS = 1000  # settle which form, and its parameters
_LOG_DOF = (0.0, 5.0)
_SPREAD = ((0.02, 1.5), (-2.0, 2.0))


@dataclass(frozen=True, eq=False)
class Grouped:
    """Responses sorted into their groups, ready for the likelihood. Built once per fit."""

    lengths: Float  # [n] continuous, below the cap
    group: Int  # [n] of `lengths`
    censored: Int  # [g] responses of the group that reached the cap
    prompt_score: Float  # [g]
    cap: float

    @property
    def n_groups(self) -> int:
        return int(self.censored.size)

    @classmethod
    def build(cls, lengths: Float, censored: Mask, group: Int, prompt_score: Float, cap: float | None) -> Grouped:
        counts = np.bincount(group[censored], minlength=prompt_score.size).astype(np.int64)
        return cls(lengths[~censored], group[~censored], counts, prompt_score, np.inf if cap is None else float(cap))

    def within_tokens(self) -> Grouped:
        """The same lengths anywhere in their tokens: equal short ones would else make groups without any spread."""
        moved = self.lengths + np.random.default_rng(0).uniform(-0.5, 0.5, self.lengths.size)
        return replace(self, lengths=np.maximum(moved, 0.01))

    def scored(self, law: Law) -> Scored:
        """The same as normal scores of a law."""
        cut = float(law.score(np.array([self.cap]))[0]) if self.censored.any() else np.inf
        z, log_pdf = law.score(self.lengths), law.log_pdf(self.lengths)
        return Scored(z, log_pdf, self.group, self.censored, self.prompt_score, cut)


@dataclass(frozen=True)
class Dependence:
    """How the responses to one prompt resemble each other, and how that follows the prompt's length.

    icc                           intra-class correlation of the normal scores z of the lengths [1]
    spread_sd, spread_corr, dof   of the form that fits (`prompt_effects`); all 0: responses scatter alike and normally
    latent_icc                    icc of y in that form; alike, the icc
    """

    icc: float
    beta: float
    icc_se: float
    beta_se: float
    spread_sd: float = 0.0
    spread_corr: float = 0.0
    dof: float = 0.0
    latent_icc: float | None = None
    spread_sd_se: float = 0.0
    spread_corr_se: float = 0.0
    dof_se: float = 0.0

    @property
    def effects(self) -> PromptEffects:
        icc = self.icc if self.latent_icc is None else self.latent_icc
        return PromptEffects(icc, self.beta, self.spread_sd, self.spread_corr, self.dof)

    def draw(self, rng: np.random.Generator) -> Dependence:
        """With icc drawn from its error; that of y follows it in its odds."""
        icc = float(np.clip(self.icc + self.icc_se * rng.standard_normal(), 0.0, 0.999))
        if self.latent_icc is None:
            return replace(self, icc=icc)
        odds = self.latent_icc / (1.0 - self.latent_icc) * icc / (1.0 - icc) * (1.0 - self.icc) / max(self.icc, 1e-9)
        return replace(self, icc=icc, latent_icc=odds / (1.0 + odds))


def fit_dependence(law: Law, data: Grouped, like: PromptEffects | None = None, odd: bool = False) -> Dependence:
    """Maximum likelihood of the effects per prompt given the law (inference functions for margins; Joe 2014, sec. 5.5).

    The law is fitted first and alone: with icc near 1 a joint fit bends the law to serve the dependence. Of the forms
    alike, spread and, if asked for, odd that of the least BIC is taken, prompts being the independent units, or that of
    `like`.
    """
    scored = data.within_tokens().scored(law)
    if scored.size <= data.n_groups:  # one response per prompt: nothing to compare
        return Dependence(0.0, 0.0, 1.0, 1.0)
    correlated = np.unique(data.prompt_score).size > 2
    base = [(-7.0, 6.0), (-2.0, 2.0) if correlated else (0.0, 0.0)]
    alike = _maximise(scored, np.array([-1.0, 0.0]), base)
    fits = [(alike, scored, base)]
    if like is None or not like.alike:
        few = scored.thinned(_MOST_GROUPS)
        if like.dof > 0.0 if like is not None else odd:
            box = [*base, _LOG_DOF]
            fits.append((_maximise(few, np.r_[alike, 1.5], box), few, box))
        if like is None or like.spread_sd > 0.0:
            box = [*base, *_SPREAD]
            fits.append((_maximise(few, np.r_[alike, 0.3, 0.0], box), few, box))
        judged = fits if like is None else fits[1:]
        fits = [min(judged, key=lambda fit: 2.0 * _negative(few, fit[0]) + fit[0].size * np.log(few.n_groups))]
    vector, used, box = fits[0]
    # The laws of y other than the normal one are interpolated, too coarsely for differences over small steps.
    step = 1e-3 if vector.size == 2 else 2e-2
    inverse, _ = inverse_information(lambda v: _negative(used, v), vector, box, step)
    return _with_errors(_unpack(vector), np.sqrt(np.diag(inverse)), used)


def _with_errors(effects: PromptEffects, se: Float, data: Scored) -> Dependence:
    """Effects with the errors of their parameters, from those of the unconstrained ones."""
    icc, corr = effects.score_icc(), effects.spread_corr
    given_law = float(se[0]) * icc * (1.0 - icc)  # the odds of both icc move together
    return Dependence(
        icc=icc,
        beta=effects.beta,
        icc_se=max(given_law, icc_error(icc, data.size, data.n_groups)),
        beta_se=float(se[1]) * (1.0 - effects.beta**2),
        spread_sd=effects.spread_sd,
        spread_corr=corr,
        dof=effects.dof,
        latent_icc=None if effects.alike else effects.icc,
        spread_sd_se=float(se[2]) if effects.spread_sd else 0.0,
        spread_corr_se=float(se[3]) * (1.0 - corr**2) if effects.spread_sd else 0.0,
        dof_se=float(se[2]) * effects.dof if effects.dof else 0.0,
    )


def _maximise(data: Scored, start: Float, box: list[tuple[float, float]]) -> Float:
    from scipy.optimize import minimize

    def objective(vector: Float) -> float:
        value = _negative(data, vector) / data.size
        return value if np.isfinite(value) else 1e6

    return np.asarray(minimize(objective, start, method="L-BFGS-B", bounds=box, options={"ftol": 1e-11}).x)


def _negative(data: Scored, vector: Float) -> float:
    return -float(log_likelihood(_unpack(vector), data).sum())


def _unpack(vector: Float) -> PromptEffects:
    """Effects of the unconstrained parameters: two of the form alike, three of odd, four of spread."""
    icc, beta = float(1.0 / (1.0 + np.exp(-vector[0]))), float(np.tanh(vector[1]))
    if vector.size == 3:
        return PromptEffects(icc, beta, dof=float(np.exp(vector[2])))
    return PromptEffects(icc, beta, *((float(vector[2]), float(np.tanh(vector[3]))) if vector.size == 4 else ()))


def icc_error(icc: float, responses: int, prompts: int) -> float:
    """Standard error of an intra-class correlation whose mean and variance are estimated from the same sample.

    se = sqrt(2) (1 - icc) (1 + (m - 1) icc) / sqrt(m (m - 1) (G - 1)), m responses a prompt, G prompts (Donner 1986,
    International Statistical Review 54). Taken where larger than the error given the law.

    >>> round(icc_error(0.5, 800, 100), 3)
    0.043
    """
    m = responses / prompts
    if m <= 1.0 or prompts < 2:
        return 1.0
    return float(np.sqrt(2.0) * (1 - icc) * (1 + (m - 1) * icc) / np.sqrt(m * (m - 1) * (prompts - 1)))


def law_covariance(law: Law, data: Grouped) -> Float:
    """Covariance [p, p] of the law's parameters from the groups: H^-1 (sum_g s_g s_g^T) H^-1.

    H observed information of the independence likelihood, s_g score of group g. The groups are the independent units,
    so a high icc widens the errors as it must (Varin, Reid and Firth, Statistica Sinica 21, 2011, sec. 2).
    """
    at = law.to_vector()
    box = bounds(law)

    def per_group(vector: Float) -> Float:
        trial = law.with_vector(vector)
        value = np.bincount(data.group, trial.log_pdf(data.lengths), data.n_groups)
        if np.isfinite(data.cap):
            value = value + data.censored * np.log(max(trial.survival(data.cap), _TINY))
        return np.asarray(value)

    def objective(vector: Float) -> float:
        tail = law.with_vector(vector).tail
        return -float(per_group(vector).sum()) - (0.0 if tail is None else log_prior(tail))

    inverse, information = inverse_information(objective, at, box)
    steps = 1e-4 * np.maximum(1.0, np.abs(at))
    scores = np.stack([(per_group(at + h) - per_group(at - h)) / (2 * h.max()) for h in np.diag(steps)], axis=1)
    spread = scores.T @ scores * data.n_groups / max(data.n_groups - 1, 1)
    if law.tail is not None:  # the prior on the tail's shape counts as one more independent observation
        shape = law.parameter_names().index("tail.shape")
        spread[shape, shape] += PRIOR_PRECISION
    # Directions that the data leave flat have no score either: what is left of their unit variance is added back.
    return np.asarray(inverse @ spread @ inverse + inverse - inverse @ information @ inverse)


def draw_law(law: Law, covariance: Float, rng: np.random.Generator) -> Law:
    """The law with parameters drawn from their error [p, p]."""
    values, vectors = np.linalg.eigh(covariance)
    step = vectors @ (np.sqrt(np.maximum(values, 0.0)) * np.clip(rng.standard_normal(values.size), -2.5, 2.5))
    # A mixture's parameters are far from normal where a component is small: no step beyond one unit of log scale.
    return law.with_vector(law.to_vector() + np.clip(step, -1.0, 1.0))


def inverse_information(
    objective: Callable[[Float], float], at: Float, box: list[tuple[float, float]], relative_step: float = 1e-3
) -> tuple[Float, Float]:
    """Inverse Hessian by central differences, and the Hessian; directions that the box holds are 0 in both."""
    width = np.array([b[1] - b[0] for b in box])
    low, high = np.array([b[0] for b in box]), np.array([b[1] for b in box])
    free = np.flatnonzero((width > 0) & (at - low > 1e-3 * width) & (high - at > 1e-3 * width))
    step = relative_step * np.maximum(1.0, np.abs(at) * 0.1)
    moves = np.diag(step)
    hessian = np.zeros((free.size, free.size))
    centre = objective(at)
    for i, a in enumerate(free):
        hessian[i, i] = (objective(at + moves[a]) - 2 * centre + objective(at - moves[a])) / step[a] ** 2
        for j, b in enumerate(free[:i]):
            corners = [objective(at + p * moves[a] + q * moves[b]) * p * q for p in (1, -1) for q in (1, -1)]
            hessian[i, j] = hessian[j, i] = sum(corners) / (4 * step[a] * step[b])
    values, vectors = np.linalg.eigh(hessian)
    result = np.zeros((at.size, at.size))
    # A flat or negative direction is unknown, but not more than by one unit of its own (logarithmic) scale.
    information = np.zeros((at.size, at.size))
    result[np.ix_(free, free)] = (vectors / np.maximum(values, 1.0)) @ vectors.T
    information[np.ix_(free, free)] = (vectors * np.maximum(values, 0.0)) @ vectors.T
    return result, information
