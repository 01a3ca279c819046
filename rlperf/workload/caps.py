"""The maximum response length of a recording that does not state it."""

from __future__ import annotations

import numpy as np

from rlperf.workload.lengths import Int


def infer_cap(response_tokens: Int) -> int | None:
    """Maximum length [tokens] at which a recording was cut off, or None where nothing was.

    A cap shows as a pile: k responses of exactly the longest length, where the density just below (the upper 2 % of the
    range) lets lambda = (count + 1) / width be expected. It is taken for a cap where P(Poisson(lambda) >= k) < 1e-3; a
    single longest response counts only where it is a multiple of 1000 or 1024 and at least 4000, which an uncut
    response is with a probability of about 0.2 %.

    >>> infer_cap(np.array([120, 700, 2000, 1999, 2000, 2000, 800])), infer_cap(np.array([12, 51, 30, 51]))
    (2000, None)
    """
    if not response_tokens.size:
        return None
    longest = int(response_tokens.max())
    k = int(np.count_nonzero(response_tokens == longest))
    if k == 1:
        return longest if longest >= 4000 and (longest % 1000 == 0 or longest % 1024 == 0) else None
    width = max(int(0.02 * longest), 1)
    below = int(np.count_nonzero((response_tokens < longest) & (response_tokens >= longest - width)))
    expected = (below + 1) / width
    # P(Poisson(lambda) >= k) <= lambda^k / k! for small lambda, and a normal bound otherwise
    tail = _poisson_tail(expected, k)
    return longest if tail < 1e-3 else None


def _poisson_tail(mean: float, k: int) -> float:
    """P(Poisson(mean) >= k)."""
    from scipy.special import gammainc

    return float(gammainc(k, mean))
