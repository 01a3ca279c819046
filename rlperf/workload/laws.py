"""Laws of one length: mixtures of positive families, fitted with responses censored at the cap.

All laws are continuous on (0, inf) [tokens]; a sampled length is the law's value rounded up to a whole token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rlperf.errors import SpecError, did_you_mean
from rlperf.workload.lengths import Float, Mask
from rlperf.workload.tails import Tail

# Two free numbers per component, unconstrained, so that an optimiser and a Gaussian posterior can work on them.
FAMILIES: dict[str, tuple[str, str]] = {
    "lognormal": ("mu", "log_sigma"),
    "gamma": ("log_shape", "log_scale"),
    "weibull": ("log_shape", "log_scale"),
    "loglogistic": ("log_shape", "log_scale"),
    "normal": ("log_mean", "log_sd"),
}
_TINY = 1e-300
_HALF_LOG_2PI = 0.5 * np.log(2.0 * np.pi)


LARGEST = 50.0
"""Most that a parameter may be: they are logarithms, and e^50 is no number of tokens, nor its spread."""


@dataclass(frozen=True)
class Component:
    """One family with its two unconstrained numbers and its weight in the mixture."""

    family: str
    first: float
    second: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            hint = did_you_mean(self.family, FAMILIES) or f"known: {', '.join(FAMILIES)}"
            raise SpecError(f"unknown family {self.family!r} ({hint})")
        if not (abs(self.first) <= LARGEST and abs(self.second) <= LARGEST and 0.0 <= self.weight <= 1.0):
            raise SpecError(f"family {self.family}: parameters must lie within {LARGEST:g} and 0 <= weight <= 1")


def _log_pdf(family: str, a: float, b: float, x: Float) -> Float:
    from scipy.special import gammaln, log_ndtr

    if family == "lognormal":
        z = (np.log(x) - a) * np.exp(-b)
        return np.asarray(-_HALF_LOG_2PI - b - np.log(x) - 0.5 * z * z)
    if family == "normal":  # truncated below at 0: divided by the mass above 0
        mean = np.exp(a)
        z = (x - mean) * np.exp(-b)
        return np.asarray(-_HALF_LOG_2PI - b - 0.5 * z * z - log_ndtr(mean * np.exp(-b)))
    shape, log_y = np.exp(a), np.log(x) - b
    if family == "gamma":
        return np.asarray(shape * log_y - np.exp(log_y) - np.log(x) - gammaln(shape))
    if family == "weibull":
        return np.asarray(a + shape * log_y - np.log(x) - np.exp(np.minimum(shape * log_y, 700.0)))
    t = shape * log_y
    return np.asarray(a + t - np.log(x) - 2.0 * np.logaddexp(0.0, t))


def _tails(family: str, a: float, b: float, x: Float) -> tuple[Float, Float]:
    """P(X <= x) and P(X > x), each accurate where it is small."""
    from scipy.special import expit, gammainc, gammaincc, ndtr

    if family == "lognormal":
        z = (np.log(x) - a) * np.exp(-b)
        return np.asarray(ndtr(z)), np.asarray(ndtr(-z))
    if family == "normal":
        mean, scale = np.exp(a), np.exp(-b)
        below = ndtr(-mean * scale)
        upper = np.asarray(ndtr(-(x - mean) * scale) / (1.0 - below))
        return np.asarray((ndtr((x - mean) * scale) - below) / (1.0 - below)), upper
    shape, log_y = np.exp(a), np.log(x) - b
    if family == "gamma":
        return np.asarray(gammainc(shape, np.exp(log_y))), np.asarray(gammaincc(shape, np.exp(log_y)))
    if family == "weibull":
        h = np.exp(np.minimum(shape * log_y, 700.0))
        return np.asarray(-np.expm1(-h)), np.asarray(np.exp(-h))
    return np.asarray(expit(shape * log_y)), np.asarray(expit(-shape * log_y))


@dataclass(frozen=True)
class Law:
    """Mixture law of a positive length.

    f(x) = sum_c w_c f_c(x / s) / s, with sum_c w_c = 1; x [tokens], s = exp(log_scale) [1].
    Above the threshold u of a `tail`: P(X > x) = P_mixture(X > u) P_tail(Y > x - u), so that the bulk and the longest
    responses do not bend each other. With shape_fixed only s is a parameter: the shape comes from a larger sample.

    >>> law = Law.single("lognormal", 6.0, np.log(0.5))
    >>> round(float(law.quantile(np.array([0.5]))[0]), 1), round(law.mean(), 1)
    (403.4, 457.1)
    """

    components: tuple[Component, ...]
    log_scale: float = 0.0
    shape_fixed: bool = False
    tail: Tail | None = None

    def __post_init__(self) -> None:
        total = sum(c.weight for c in self.components)
        if not self.components or abs(total - 1.0) > 1e-6:
            raise SpecError(f"a law needs components whose weights sum to 1, not {total:g}")
        if not abs(self.log_scale) <= LARGEST:
            raise SpecError(f"log_scale must lie within {LARGEST:g}")

    @classmethod
    def single(cls, family: str, first: float, second: float) -> Law:
        return cls((Component(family, float(first), float(second)),))

    @property
    def name(self) -> str:
        families = "+".join(c.family for c in self.components)
        if self.tail is not None:
            families += "|pareto" + ("+runaway" if self.tail.runaway_share > 0 else "")
        return f"scaled({families})" if self.shape_fixed else families

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(c.family for c in self.components)

    def log_pdf(self, x: Float) -> Float:
        y = x * np.exp(-self.log_scale)
        parts = [np.log(max(c.weight, _TINY)) + _log_pdf(c.family, c.first, c.second, y) for c in self.components]
        value = np.asarray((parts[0] if len(parts) == 1 else np.logaddexp.reduce(parts, axis=0)) - self.log_scale)
        if self.tail is None:
            return value
        u = self.tail.threshold
        beyond = np.log(max(self._mixture_tails(np.array([u]))[1][0], _TINY))
        return np.asarray(np.where(x > u, beyond + self.tail.log_pdf(np.maximum(x - u, 0.0)), value))

    def tails(self, x: Float) -> tuple[Float, Float]:
        """P(X <= x) and P(X > x), shape of x."""
        low, high = self._mixture_tails(x)
        if self.tail is None:
            return low, high
        u = self.tail.threshold
        beyond = self._mixture_tails(np.array([u]))[1][0] * self.tail.survival(np.maximum(x - u, 0.0))
        return np.asarray(np.where(x > u, 1.0 - beyond, low)), np.asarray(np.where(x > u, beyond, high))

    def _mixture_tails(self, x: Float) -> tuple[Float, Float]:
        low, high = np.zeros_like(x, np.float64), np.zeros_like(x, np.float64)
        y = x * np.exp(-self.log_scale)
        for c in self.components:
            below, above = _tails(c.family, c.first, c.second, y)
            low, high = low + c.weight * below, high + c.weight * above
        return low, high

    def survival(self, x: float) -> float:
        """P(X > x)."""
        return float(self.tails(np.array([float(x)]))[1][0])

    def score(self, x: Float) -> Float:
        """Normal score z = Phi^-1(F(x)), from whichever tail is small."""
        from scipy.special import ndtri

        low, high = self.tails(x)
        z = np.where(low < 0.5, ndtri(np.clip(low, _TINY, 1.0)), -ndtri(np.clip(high, _TINY, 1.0)))
        return np.asarray(np.clip(z, -12.0, 12.0))

    def grid(self) -> tuple[Float, Float]:
        """(score, log length) on a fine grid: the inverse of `score` by interpolation."""
        return _grid(self)

    def _make_grid(self) -> tuple[Float, Float]:
        log_x = np.linspace(*self._log_span(), 8192)
        z = self.score(np.exp(log_x))
        keep = np.r_[True, np.diff(np.maximum.accumulate(z)) > 1e-9]
        return z[keep], log_x[keep]

    def from_score(self, z: Float) -> Float:
        """Lengths [tokens, continuous] of normal scores; the inverse of `score`."""
        scores, log_x = self.grid()
        return np.asarray(np.exp(np.interp(z, scores, log_x)))

    def quantile(self, p: Float) -> Float:
        from scipy.special import ndtri

        return self.from_score(np.asarray(ndtri(p), np.float64))

    def _log_span(self) -> tuple[float, float]:
        spans = [_span(c) for c in self.components]
        low, high = min(s[0] for s in spans) + self.log_scale, max(s[1] for s in spans) + self.log_scale
        return low, (high if self.tail is None else float(np.log(self.tail.longest())))

    def mean(self, cap: float | None = None) -> float:
        """E[min(X, cap)] = integral of P(X > x) over (0, cap) [tokens]."""
        top = cap if cap is not None else float(np.exp(self._log_span()[1]))
        x = np.r_[0.0, np.geomspace(min(1e-3, top / 10), top, 20_001)]
        above = np.r_[1.0, self.tails(x[1:])[1]]
        return float(np.sum(0.5 * (above[1:] + above[:-1]) * np.diff(x)))

    def to_vector(self) -> Float:
        """Unconstrained parameters: (first, second) of each component, then the log weight ratios to the first."""
        if self.shape_fixed:
            return np.array([self.log_scale])
        values = [v for c in self.components for v in (c.first, c.second)]
        ratios = [np.log(max(c.weight, 1e-12) / max(self.components[0].weight, 1e-12)) for c in self.components[1:]]
        tail = [] if self.tail is None else self.tail.to_vector().tolist()
        return np.array(values + ratios + tail)

    def with_vector(self, vector: Float) -> Law:
        """The same families with other parameters; the inverse of `to_vector`."""
        if self.shape_fixed:
            return replace(self, log_scale=float(vector[0]))
        k = len(self.components)
        logits = np.r_[0.0, vector[2 * k : 3 * k - 1]]
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        parts = (
            Component(c.family, float(vector[2 * i]), float(vector[2 * i + 1]), float(weights[i]))
            for i, c in enumerate(self.components)
        )
        tail = None if self.tail is None else self.tail.with_vector(vector[3 * k - 1 :])
        return replace(self, components=tuple(parts), tail=tail)

    def sorted(self) -> Law:
        """Components by their typical length, so that two fits of one law name them alike."""
        if self.shape_fixed:
            return self
        return replace(self, components=tuple(sorted(self.components, key=_typical)))

    def parameter_names(self) -> tuple[str, ...]:
        if self.shape_fixed:
            return ("log_scale",)
        names = [f"{c.family}[{i}].{n}" for i, c in enumerate(self.components) for n in FAMILIES[c.family]]
        ratios = [f"log_weight_ratio[{i}]" for i in range(1, len(self.components))]
        return (*names, *ratios, *(() if self.tail is None else self.tail.names()))


@lru_cache(maxsize=256)
def _grid(law: Law) -> tuple[Float, Float]:
    return law._make_grid()


def _typical(c: Component) -> float:
    """Rough log of the component's median."""
    if c.family == "lognormal":
        return c.first
    if c.family == "normal":
        return c.first
    return c.second + (c.first if c.family == "gamma" else 0.0)


def _span(c: Component) -> tuple[float, float]:
    """Range of log x that holds all but about 1e-12 of the component, kept within [1e-3, 1e12] tokens."""
    if c.family == "lognormal":
        low, high = c.first - 8 * np.exp(c.second), c.first + 8 * np.exp(c.second)
    elif c.family == "normal":
        low, high = np.log(1e-2), np.log(np.exp(c.first) + 8 * np.exp(c.second) + 1.0)
    elif c.family == "gamma":
        shape = np.exp(c.first)
        low, high = c.second + np.log(1e-12) / max(shape, 0.2), c.second + np.log(shape + 8 * np.sqrt(shape) + 32)
    elif c.family == "weibull":
        low, high = c.second - 28 * np.exp(-c.first), c.second + 3.4 * np.exp(-c.first)
    else:
        low, high = c.second - 28 * np.exp(-c.first), c.second + 28 * np.exp(-c.first)
    return float(np.clip(low, -7.0, 27.0)), float(np.clip(high, -6.0, 27.6))


def bounds(law: Law, smallest_sigma: float = 0.005) -> list[tuple[float, float]]:
    """Box for the optimiser: wide, but no component may collapse onto one value."""
    if law.shape_fixed:
        return [(-5.0, 5.0)]
    box: list[tuple[float, float]] = []
    for c in law.components:
        if c.family == "lognormal":
            # A wide log-normal beside another component is a tail that promises anything beyond the record.
            widest = np.log(3.0 if len(law.components) == 1 else 1.0)
            box += [(-2.0, 16.0), (np.log(smallest_sigma), widest)]
        elif c.family == "normal":
            box += [(-2.0, 16.0), (-2.0, 16.0)]
        else:
            box += [(np.log(0.2), np.log(200.0)), (-4.0, 16.0)]
    box += [(-9.0, 9.0)] * (len(law.components) - 1)
    return box if law.tail is None else [*box, *law.tail.bounds()]


def start(families: Sequence[str], x: Float) -> Law:
    """Starting law: the sorted lengths cut into as many parts as families, a last *runaway* part being the top 2 %."""
    k = len(families)
    cuts = np.linspace(0, 1, k + 1) if k < 3 else np.r_[np.linspace(0, 0.98, k), 1.0]
    return _start_from(families, np.sort(x), cuts)


def start_at_gaps(families: Sequence[str], x: Float) -> Law:
    """Starting law: the sorted lengths cut at their widest gaps (in log length), for lengths that pile up on values."""
    ordered = np.sort(x)
    if ordered.size < 2 * len(families):
        return start(families, x)
    edge = max(int(0.03 * ordered.size), 2)
    gaps = np.diff(np.log(ordered))
    gaps[:edge], gaps[-edge:] = -1.0, -1.0
    widest = np.sort(np.argsort(gaps)[::-1][: len(families) - 1] + 1)
    return _start_from(families, ordered, np.r_[0.0, widest / ordered.size, 1.0])


def _start_from(families: Sequence[str], ordered: Float, cuts: Float) -> Law:
    """One component per part of the sorted lengths, cut at the given shares."""
    k = len(families)
    parts = []
    for i, family in enumerate(families):
        lo, hi = int(cuts[i] * ordered.size), max(int(cuts[i + 1] * ordered.size), int(cuts[i] * ordered.size) + 2)
        part = np.log(ordered[lo:hi] if lo < ordered.size - 1 else ordered[-2:])
        centre, spread = float(part.mean()), float(max(part.std() * (1.0 if k == 1 else 1.5), 1e-3))
        weight = float(np.clip(cuts[i + 1] - cuts[i], 1e-3, 1.0))
        if family == "lognormal":
            parts.append(Component(family, centre, float(np.log(spread)), weight))
        elif family == "gamma":
            shape = 1.0 / spread**2
            parts.append(Component(family, float(np.log(shape)), centre - float(np.log(shape)), weight))
        else:
            if family == "normal":
                parts.append(
                    Component(
                        family, float(np.log(np.exp(part).mean())), float(np.log(max(np.exp(part).std(), 1.0))), weight
                    )
                )
                continue
            shape = (1.28 if family == "weibull" else 1.81) / spread
            parts.append(Component(family, float(np.log(shape)), centre + 0.3 * spread, weight))
    total = sum(c.weight for c in parts)
    return Law(tuple(replace(c, weight=c.weight / total) for c in parts))


def negative_log_likelihood(law: Law, x: Float, weight: Float, censored: float, cap: float) -> float:
    """-sum_i w_i log f(x_i) - m log P(X > cap): lengths x below the cap, and m responses that reached it."""
    total = -float(np.dot(weight, law.log_pdf(x)))
    if censored:
        total -= censored * float(np.log(max(law.survival(cap), _TINY)))
    return total


def fit_law(
    families: Sequence[str] | Law, x: Float, censored: Mask, *, smallest_sigma: float = 0.005, piled: bool = False
) -> tuple[Law, float]:
    """Maximum likelihood of a mixture; returns the law and its log likelihood.

    x [n] lengths [tokens], > 0; censored [n]: the response reached the cap and would have gone on, so it says X > x
    (type-I censoring; Lawless, Statistical Models and Methods for Lifetime Data, 2003, eq. 2.2.3). Instead of families
    a law may be given to start from; of one with a fixed shape only the scale is fitted. piled: the lengths pile up on
    few values (prompts with a template), so that starting at the gaps between the piles is worth a try.
    """
    from scipy.optimize import minimize

    values, counts = np.unique(x[~censored], return_counts=True)
    n_censored = float(censored.sum())
    cap = float(x[censored].min()) if n_censored else np.inf
    if values.size < 2:
        centre = float(np.log(values[0])) if values.size else float(np.log(max(cap, 1.0)))
        law = Law.single("lognormal", centre, np.log(max(smallest_sigma, 0.02)))
        return law, -negative_log_likelihood(law, np.maximum(values, 0.5), counts.astype(float), n_censored, cap)
    weight = counts.astype(np.float64)
    first = families if isinstance(families, Law) else start(families, x)
    box = bounds(first, smallest_sigma)
    if first.shape_fixed:
        first = first.with_vector(np.array([np.log(np.median(x) / first.quantile(np.array([0.5]))[0])]))
    x0 = _clipped(first, box)

    def objective(vector: Float) -> float:
        value = negative_log_likelihood(first.with_vector(vector), values, weight, n_censored, cap)
        return value / x.size if np.isfinite(value) else 1e6

    starts = [x0]
    if piled and not isinstance(families, Law) and len(families) > 1:
        starts.append(_clipped(start_at_gaps(families, x), box))
    tries = [
        minimize(objective, v, method="L-BFGS-B", bounds=box, options={"maxiter": 300, "ftol": 1e-11}) for v in starts
    ]
    found = min(tries, key=lambda t: float(t.fun))
    best = first.with_vector(found.x)
    return best if isinstance(families, Law) else best.sorted(), -float(found.fun) * x.size


def _clipped(law: Law, box: list[tuple[float, float]]) -> Float:
    return np.asarray(np.clip(law.to_vector(), [b[0] for b in box], [b[1] for b in box]))


def kolmogorov_smirnov(law: Law, x: Float, cap: float | None = None) -> float:
    """KS distance sup |F_n - F| between lengths and a law, over the uncensored range only."""
    values, counts = np.unique(x, return_counts=True)
    steps = np.cumsum(counts) / x.size
    low = np.r_[0.0, steps[:-1]]
    inside = values < cap if cap is not None else np.ones(values.size, bool)
    if not inside.any():
        return 0.0
    # Lengths are whole tokens: the law's mass up to x is compared with the share <= x, and below x with the share < x.
    upper = np.abs(law.tails(values[inside])[0] - steps[inside])
    lower = np.abs(law.tails(np.maximum(values[inside] - 1.0, 1e-9))[0] - low[inside])
    return float(max(upper.max(), lower.max()))
