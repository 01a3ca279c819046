"""Responses to one prompt resemble each other: a random effect per prompt, after the law of lengths.

Derivation in docs/theory/lengths.md. In normal scores z = Phi^-1(F(L)) of the uncensored law F:

    z_ij = sqrt(icc) * (beta * p_i + sqrt(1 - beta^2) * v_i) + sqrt(1 - icc) * e_ij,      v, e ~ N(0, 1)

i prompt, j response, p_i normal score of the prompt's length, icc intra-class correlation in normal scores [1], beta
correlation of the prompt's effect with the prompt's length [1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlperf.workload.laws import _TINY, Law, bounds
from rlperf.workload.lengths import Float, Int, Mask
from rlperf.workload.tails import PRIOR_PRECISION, log_prior

_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(40)
_LOG_NODE_WEIGHTS = np.log(_NODE_WEIGHTS / _NODE_WEIGHTS.sum())


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


def group_log_likelihood(law: Law, icc: float, beta: float, data: Grouped) -> Float:
    """Log likelihood [g] of each group, the prompt's effect integrated out.

    Below the cap the group is exchangeable normal and the integral is closed; the responses at the cap, which share
    one threshold c = z(cap), add E_u[P(z > c | u)^k] under the effect's law given the others (40-node Gauss-Hermite).
    """
    from scipy.special import log_ndtr

    z = law.score(data.lengths)
    jacobian = law.log_pdf(data.lengths) + 0.5 * z * z  # log f(x) - log phi(z), up to the constant that cancels
    size = data.n_groups
    m = np.bincount(data.group, minlength=size).astype(np.float64)
    total = np.bincount(data.group, z, size)
    squares = np.bincount(data.group, z * z, size)
    logs = np.bincount(data.group, jacobian, size)
    between, within = icc * (1.0 - beta**2), 1.0 - icc
    centre = np.sqrt(icc) * beta * data.prompt_score
    # exchangeable normal: determinant within^(m-1) (within + m between), inverse by Sherman-Morrison
    dev, dev2 = total - m * centre, squares - 2 * centre * total + m * centre**2
    spread = within + m * between
    value = logs - 0.5 * (
        np.where(m > 0, (m - 1) * np.log(within) + np.log(spread), 0.0) + (dev2 - between * dev**2 / spread) / within
    )
    rows = np.flatnonzero(data.censored)
    if rows.size:
        cut = float(law.score(np.array([data.cap]))[0])
        mean = centre[rows] + between * dev[rows] / spread[rows]
        sd = np.sqrt(between * within / spread[rows])
        effect = mean[:, None] + sd[:, None] * _NODES
        above = data.censored[rows, None] * log_ndtr((effect - cut) / np.sqrt(within))
        value[rows] += np.logaddexp.reduce(above + _LOG_NODE_WEIGHTS, axis=1)
    return np.asarray(value)


@dataclass(frozen=True)
class Dependence:
    """How the responses to one prompt resemble each other, and how that follows the prompt's length."""

    icc: float
    beta: float
    icc_se: float
    beta_se: float


def fit_dependence(law: Law, data: Grouped) -> Dependence:
    """Maximum likelihood of icc and beta given the law (inference functions for margins; Joe 2014, sec. 5.5).

    The law is fitted first and alone: with icc near 1 a joint fit bends the law to serve the dependence.
    """
    from scipy.optimize import minimize

    correlated = np.unique(data.prompt_score).size > 2
    size = max(int(data.lengths.size + data.censored.sum()), 1)
    if size <= data.n_groups:  # one response per prompt: nothing to compare
        return Dependence(0.0, 0.0, 1.0, 1.0)

    def objective(vector: Float) -> float:
        icc, beta = _unpack(vector)
        value = float(group_log_likelihood(law, icc, beta, data).sum())
        return -value / size if np.isfinite(value) else 1e6

    box = [(-7.0, 6.0), (-2.0, 2.0) if correlated else (0.0, 0.0)]
    found = minimize(objective, np.array([-1.0, 0.0]), method="L-BFGS-B", bounds=box, options={"ftol": 1e-11})
    icc, beta = _unpack(np.asarray(found.x))
    inverse, _ = inverse_information(lambda v: objective(v) * size, np.asarray(found.x), box)
    se = np.sqrt(np.diag(inverse))
    given_law = float(se[0]) * icc * (1.0 - icc)
    return Dependence(icc, beta, max(given_law, icc_error(icc, size, data.n_groups)), float(se[1]) * (1.0 - beta**2))


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


def _unpack(vector: Float) -> tuple[float, float]:
    return float(1.0 / (1.0 + np.exp(-vector[0]))), float(np.tanh(vector[1]))


def law_covariance(law: Law, data: Grouped, smallest_sigma: float = 0.005) -> Float:
    """Covariance [p, p] of the law's parameters from the groups: H^-1 (sum_g s_g s_g^T) H^-1.

    H observed information of the independence likelihood, s_g score of group g. The groups are the independent units,
    so a high icc widens the errors as it must (Varin, Reid and Firth, Statistica Sinica 21, 2011, sec. 2).
    """
    at = law.to_vector()
    box = bounds(law, smallest_sigma)

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
    objective: Callable[[Float], float], at: Float, box: list[tuple[float, float]]
) -> tuple[Float, Float]:
    """Inverse Hessian by central differences, and the Hessian; directions that the box holds are 0 in both."""
    width = np.array([b[1] - b[0] for b in box])
    low, high = np.array([b[0] for b in box]), np.array([b[1] for b in box])
    free = np.flatnonzero((width > 0) & (at - low > 1e-3 * width) & (high - at > 1e-3 * width))
    step = 1e-3 * np.maximum(1.0, np.abs(at) * 0.1)
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
