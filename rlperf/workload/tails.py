"""The longest responses: a tail of its own above a threshold, because the longest one decides the rollout's makespan.

Excesses y = L - u over a high threshold u follow, for wide classes of laws, a generalised Pareto law (Coles 2001,
An Introduction to Statistical Modeling of Extreme Values, theorem 4.1):

    P(Y > y) = (1 - r) (1 + shape y / scale)^(-1 / shape) + r exp(-y / runaway_mean)

The second term, used only where the likelihood asks for it, is for runaways: responses that loop until something stops
them, a different thing from a long answer and often tens of times longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.workload.lengths import Float, Mask

TAIL_SHARES = (0.10, 0.05, 0.02)
LEAST_EXCESSES = 10
_MOST_CENSORED = 0.005
# 90th percentile of A^2 for excesses that follow the law, when its parameters come from the same sample: 0.7 to 1.1 for
# 40 to 500 excesses of shape -0.1 to 0.3 by Monte Carlo of this fit, nearly the same for all sizes.
_LARGEST_A2 = 0.8
# Weak prior on the shape, N(0.1, 0.15^2): lengths have exponential-like tails; a few dozen excesses alone give shapes
# between -0.6 and 1.2 (Martins and Stedinger 2000, Water Resources Research 36, 737, propose such a prior).
_PRIOR_SHAPE, _PRIOR_SD = 0.1, 0.15
PRIOR_PRECISION = 1.0 / _PRIOR_SD**2


@dataclass(frozen=True)
class Tail:
    """Law of the excess over `threshold` [tokens]; `runaway_share` is r, 0 where there are no runaways."""

    threshold: float
    log_scale: float
    shape: float
    runaway_share: float = 0.0
    runaway_log_mean: float = 0.0

    def to_vector(self) -> Float:
        """Unconstrained parameters; those of the runaways only where there are any."""
        values = [self.log_scale, self.shape]
        if self.runaway_share > 0:
            r = self.runaway_share
            values += [float(np.log(r / (1 - r))), self.runaway_log_mean]
        return np.array(values)

    def with_vector(self, vector: Float) -> Tail:
        """The same tail with other parameters; the inverse of `to_vector`."""
        shape = float(np.clip(vector[1], -0.4, 1.5))
        if self.runaway_share <= 0:
            return Tail(self.threshold, float(vector[0]), shape)
        share = float(np.clip(1.0 / (1.0 + np.exp(-vector[2])), 1e-6, 0.95))
        return Tail(self.threshold, float(vector[0]), shape, share, float(vector[3]))

    def names(self) -> tuple[str, ...]:
        base = ("tail.log_scale", "tail.shape")
        return (*base, "tail.logit_runaway_share", "tail.runaway_log_mean") if self.runaway_share > 0 else base

    def bounds(self) -> list[tuple[float, float]]:
        base = [(-2.0, 14.0), (-0.4, 1.5)]
        return [*base, (-9.0, 3.0), (0.0, 14.0)] if self.runaway_share > 0 else base

    def survival(self, excess: Float) -> Float:
        """P(Y > y), y [tokens] >= 0."""
        t = self._pareto(excess)
        if self.runaway_share <= 0:
            return t
        above = np.exp(-excess * np.exp(-self.runaway_log_mean))
        return np.asarray((1 - self.runaway_share) * t + self.runaway_share * above)

    def log_pdf(self, excess: Float) -> Float:
        """Log density of the excess [1 / token]."""
        y = excess * np.exp(-self.log_scale)
        if abs(self.shape) < 1e-6:
            log_t = -y
        else:
            base = 1.0 + self.shape * y
            log_t = np.where(base > 0, -(1.0 / self.shape + 1.0) * np.log(np.maximum(base, 1e-300)), -700.0)
        value = log_t - self.log_scale
        if self.runaway_share <= 0:
            return np.asarray(value)
        run = -excess * np.exp(-self.runaway_log_mean) - self.runaway_log_mean
        return np.asarray(np.logaddexp(np.log1p(-self.runaway_share) + value, np.log(self.runaway_share) + run))

    def _pareto(self, excess: Float) -> Float:
        y = excess * np.exp(-self.log_scale)
        if abs(self.shape) < 1e-6:
            return np.asarray(np.exp(-y))
        base = np.maximum(1.0 + self.shape * y, 1e-300)
        return np.asarray(np.where(1.0 + self.shape * y > 0, base ** (-1.0 / self.shape), 0.0))

    def longest(self) -> float:
        """Length [tokens] that one in 1e12 of the tail exceeds."""
        scale, shape = np.exp(self.log_scale), self.shape
        far = scale * (1e12**shape - 1.0) / shape if abs(shape) > 1e-6 else scale * 27.6
        if self.runaway_share > 0:
            far = max(far, 27.6 * np.exp(self.runaway_log_mean))
        return float(self.threshold + min(far, 1e11))


def threshold_of(x: Float, censored: Mask) -> float | None:
    """Threshold [tokens] of the tail, or None where too little lies above it or it is cut by the cap.

    The lowest of the 90th, 95th and 98th percentile at which the Anderson-Darling test does not reject the tail's law:
    the more excesses, the less is left open (Bader, Yan and Zhang 2018, Annals of Applied Statistics 12, 310).
    """
    if float(censored.mean()) > _MOST_CENSORED:
        return None
    found = None
    for share in TAIL_SHARES:
        threshold = float(np.floor(np.quantile(x, 1.0 - share)))
        above = x > threshold
        if np.count_nonzero(above) < LEAST_EXCESSES or np.unique(x[above]).size <= 3:
            break
        found = threshold
        if anderson_darling(fit_tail(x, censored, threshold)[0], x[above & ~censored] - threshold) <= _LARGEST_A2:
            break
    return found


def anderson_darling(tail: Tail, excess: Float) -> float:
    """A^2 of excesses [n] under a tail: their squared distance from its law, weighted towards both ends."""
    below = np.clip(1.0 - tail.survival(np.sort(excess)), 1e-12, 1.0 - 1e-12)
    weight = (2.0 * np.arange(1, below.size + 1) - 1.0) / below.size
    return -below.size - float(np.sum(weight * (np.log(below) + np.log1p(-below[::-1]))))


def fit_tail(x: Float, censored: Mask, threshold: float, like: Tail | None = None) -> tuple[Tail, float]:
    """Tail of the lengths x [n] above a threshold, by maximum posterior; returns it with its log likelihood.

    Runaways are kept only where they raise the log likelihood by more than two parameters are worth (BIC), or where
    `like` has them.
    """
    above = x > threshold
    excess, cut = x[above] - threshold, censored[above]
    start = Tail(threshold, float(np.log(np.median(excess) / np.log(2.0))), _PRIOR_SHAPE)
    if like is not None:
        same, _ = _maximise(like, excess, cut)
        return same, _log_likelihood(same, excess, cut)
    plain, plain_value = _maximise(start, excess, cut)
    longest = np.sort(excess)[-max(int(0.03 * excess.size), 3) :]
    share = float(np.clip(longest.size / excess.size, 0.01, 0.3))
    runaway, runaway_value = _maximise(
        Tail(threshold, plain.log_scale, _PRIOR_SHAPE, share, float(np.log(longest.mean()))), excess, cut
    )
    # A runaway is another kind of response, several times longer than the tail's own scale.
    apart = runaway.runaway_log_mean > runaway.log_scale + np.log(5.0)
    if apart and runaway_value - plain_value > float(np.log(excess.size)):
        return runaway, _log_likelihood(runaway, excess, cut)
    return plain, _log_likelihood(plain, excess, cut)


def log_prior(tail: Tail) -> float:
    """Log prior of the shape, up to a constant."""
    return -0.5 * ((tail.shape - _PRIOR_SHAPE) / _PRIOR_SD) ** 2


def _log_likelihood(tail: Tail, excess: Float, cut: Mask) -> float:
    beyond = np.log(np.maximum(tail.survival(excess[cut]), 1e-300))
    return float(tail.log_pdf(excess[~cut]).sum() + beyond.sum())


def _maximise(start: Tail, excess: Float, cut: Mask) -> tuple[Tail, float]:
    from scipy.optimize import minimize

    def objective(vector: Float) -> float:
        tail = start.with_vector(vector)
        value = _log_likelihood(tail, excess, cut) + log_prior(tail)
        return -value if np.isfinite(value) else 1e9

    found = minimize(objective, start.to_vector(), method="Nelder-Mead", options={"maxiter": 800, "xatol": 1e-4})
    return start.with_vector(np.asarray(found.x)), -float(found.fun)
