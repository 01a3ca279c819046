"""Lengths where only a mean is published: a stated law, cut at the cap, that reproduces the mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlperf.errors import SpecError

Float = NDArray[np.float64]
LAWS = ("lognormal", "gamma", "constant")


@dataclass(frozen=True)
class AssumedLengths:
    """A law of response lengths before they are cut, and what samples of one prompt share.

    Attributes
    ----------
    law : lognormal, gamma or constant
    cv : coefficient of variation before the cut [1]
    runaways : share of responses that go on to the cap whatever the law says (loops, repetition) [1]
    icc : share of the variance of ln(length) that lies between prompts [1]
    """

    law: str = "lognormal"
    cv: float = 1.2
    runaways: float = 0.0
    icc: float = 0.4

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise SpecError(f"law {self.law!r} is none of {', '.join(LAWS)}")
        if not 0.0 <= self.runaways < 1.0 or not 0.0 <= self.icc <= 1.0 or self.cv < 0.0:
            raise SpecError("runaways and icc lie between 0 and 1, cv is not negative")

    def __str__(self) -> str:
        text = "constant" if self.law == "constant" else f"{self.law} cv {self.cv:g}, icc {self.icc:g}"
        return text + (f", {100 * self.runaways:g} % runaways" if self.runaways else "")

    def draw(self, groups: int, group_size: int, mean: float, cap: float, seed: int = 0) -> Float:
        """Responses [tokens] ``[groups, group_size]`` whose mean after the cut at ``cap`` is ``mean``.

        The scale of the law is found by bisection on the drawn quantiles themselves, so the sample has the published
        mean. A mean at or above 98 % of the cap gives everything the cap.
        """
        if mean >= 0.98 * cap:
            return np.full((groups, group_size), cap)
        random = np.random.default_rng(seed)
        prompt = random.standard_normal((groups, 1))
        own = random.standard_normal((groups, group_size))
        shape = self._shape(np.sqrt(self.icc) * prompt + np.sqrt(1.0 - self.icc) * own)
        runaway = random.random((groups, group_size)) < self.runaways
        low, high = 1e-3 * mean, 1e4 * cap
        for _ in range(60):
            scale = float(np.sqrt(low * high))
            cut = np.where(runaway, cap, np.minimum(scale * shape, cap))
            low, high = (scale, high) if float(cut.mean()) < mean else (low, scale)
        return np.maximum(np.rint(cut), 1.0)

    def _shape(self, normal: Float) -> Float:
        """Standard normal scores turned into the law with mean 1."""
        if self.law == "constant" or self.cv == 0.0:
            return np.ones_like(normal)
        if self.law == "lognormal":
            sigma = np.sqrt(np.log1p(self.cv**2))
            return np.asarray(np.exp(sigma * normal - sigma**2 / 2.0), np.float64)
        from scipy.special import gammaincinv, ndtr

        k = self.cv**-2
        return np.asarray(gammaincinv(k, ndtr(normal)) / k, np.float64)
