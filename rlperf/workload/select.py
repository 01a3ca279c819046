"""Which law: several families and mixtures are fitted, compared, and the comparison is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlperf.errors import SpecError
from rlperf.workload.laws import Law, fit_law, kolmogorov_smirnov
from rlperf.workload.lengths import Float, Mask
from rlperf.workload.tails import LEAST_EXCESSES, fit_tail, threshold_of

OPEN = (
    ("lognormal",),
    ("gamma",),
    ("weibull",),
    ("loglogistic",),
    ("lognormal", "lognormal"),
    ("gamma", "gamma"),
    ("gamma", "lognormal"),
    ("lognormal", "lognormal", "lognormal"),
    ("gamma", "gamma", "lognormal"),
    ("gamma", "gamma", "gamma"),
)
# What lies beyond a cap was not recorded. A tail lighter than or like an exponential means that stopping does not get
# less likely as a response grows; heavier tails may fit as well below the cap and then promise anything beyond it.
CENSORED = (
    ("gamma",),
    ("weibull",),
    ("normal",),
    ("gamma", "gamma"),
    ("weibull", "weibull"),
    ("gamma", "gamma", "gamma"),
)
PROMPTS = (("lognormal",), ("gamma",), ("lognormal", "lognormal"), ("lognormal",) * 3, ("lognormal",) * 4)
MUCH_CENSORED = 1.0 / 3.0
_LEAST_DISTINCT = 4


@dataclass(frozen=True)
class TriedLaw:
    """One family or mixture that was tried."""

    name: str
    parameters: int
    log_likelihood: float
    bic: float
    ks: float
    mean_error: float


@dataclass(frozen=True)
class Choice:
    """The law, the comparison (best first), and the other laws that the data leave possible, with their weights."""

    law: Law
    candidates: tuple[TriedLaw, ...]
    alternatives: tuple[tuple[float, Law], ...] = ()


def choose_law(
    x: Float,
    censored: Mask,
    *,
    families: Sequence[tuple[str, ...]] | None = None,
    reference: Law | None = None,
    design_effect: float = 1.0,
    like: Law | None = None,
    smallest_sigma: float = 0.005,
    piled: bool = False,
) -> Choice:
    """The law of lengths x [n] and the comparison, best first.

    Criterion: BIC + ((E[L] - mean) / se)^2, BIC = -2 log L / d + p log(n / d). The design effect d = 1 + (m - 1) icc
    counts m correlated responses to one prompt as what they tell (Kish 1965, sec. 8.2). The second term asks that the
    law keep the mean, on which every total rests, where nothing is censored. Above one third censored the shape is not
    in the data: the shape of `reference` (a large uncensored sample) is taken and only its scale is fitted. The
    longest get a tail of their own, where there are enough of them and the cap does not cut it. `like` asks for the
    form of another law (families, threshold of the tail, fixed shape): what is fitted are its parameters.
    """
    if not x.size:
        raise SpecError("no lengths to fit: the recording holds no complete prompt group")
    share = float(censored.mean())
    if like is not None:
        sources: Sequence[tuple[str, ...] | Law] = [replace(like, tail=None)]
    elif families is None and share > MUCH_CENSORED and reference is not None:
        sources = [reference, *(f for f in CENSORED if len(f) == 1)]
    else:
        distinct = np.unique(x[~censored]).size
        every = CENSORED if share > 0.02 else OPEN
        # A mixture of as many components as there are lengths would fit each of them.
        suited = [f for f in every if len(f) == 1 or distinct >= _LEAST_DISTINCT * len(f)]
        sources = families or (suited if distinct > 1 else every[:1])
    threshold = threshold_of(x, censored) if families is None and like is None else None
    if like is not None and like.tail is not None and np.count_nonzero(x > like.tail.threshold) >= LEAST_EXCESSES:
        threshold = like.tail.threshold
    longest = None if threshold is None else fit_tail(x, censored, threshold, None if like is None else like.tail)
    tried: list[tuple[Law, TriedLaw]] = []
    for source in sources:
        # Below the threshold the bulk is fitted as if the rest were censored there: the likelihoods add up.
        above = censored if threshold is None else x > threshold
        lengths = x if threshold is None else np.minimum(x, threshold)
        law, log_likelihood = fit_law(source, lengths, above, smallest_sigma=smallest_sigma, piled=piled)
        if longest is not None:
            law, log_likelihood = replace(law, tail=longest[0]), log_likelihood + longest[1]
        tried.append((law, _judge(law, log_likelihood, x, censored, design_effect)))
    if like is None and isinstance(
        sources[0], Law
    ):  # the data do not choose among shapes: all stay possible, the reference leads
        return Choice(tried[0][0], tuple(c for _, c in tried), tuple((0.5, law) for law, _ in tried[1:]))
    criterion = {c.name: c.bic + (c.mean_error if not censored.any() else 0.0) ** 2 for _, c in tried}
    tried.sort(key=lambda pair: criterion[pair[1].name])
    best = criterion[tried[0][1].name]
    weights = [(float(np.exp(0.5 * (best - criterion[c.name]))), law) for law, c in tried[1:]]
    return Choice(tried[0][0], tuple(c for _, c in tried), tuple((w, law) for w, law in weights if w > 0.05))


def _judge(law: Law, log_likelihood: float, x: Float, censored: Mask, effect: float) -> TriedLaw:
    cap = float(x[censored].min()) if censored.any() else None
    parameters = law.to_vector().size
    error = max(float(x.std()) / np.sqrt(x.size / effect), 1e-9)
    return TriedLaw(
        law.name,
        int(parameters),
        log_likelihood,
        -2.0 * log_likelihood / effect + parameters * float(np.log(max(x.size / effect, 2.0))),
        kolmogorov_smirnov(law, np.ceil(np.where(censored, x + 1.0, x)), None if cap is None else cap + 1.0),
        float(np.clip((law.mean(cap) - float(np.mean(x))) / error, -1e3, 1e3)),
    )
