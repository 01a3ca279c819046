"""What the responses to one prompt share, in normal scores. Derivation: docs/theory/lengths.md.

    y_ij = sqrt(icc) u_i + sqrt(1 - icc) s_i e_ij,      u_i = beta p_i + sqrt(1 - beta^2) v_i

i prompt, j response, p_i normal score of the prompt's length. Three forms:

    alike    s = 1, e ~ N(0, 1): the exchangeable normal law
    spread   s_i = exp(spread_sd t_i - spread_sd^2), t_i = spread_corr u_i + sqrt(1 - spread_corr^2) w_i: some prompts
             are answered alike by all responses, others briefly or at length (mixed-effects location scale model:
             Hedeker, Mermelstein and Demirtas 2008, Biometrics 64, 627)
    odd      s = 1, e ~ Student t of `dof`: a response that stops early or runs on does so by itself, not for its prompt

v, w ~ N(0, 1). z = Phi^-1(H(y)), H the law of y over all prompts, is the normal score of the length, so that the law of
lengths stays what it is. Alike, y = z.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rlperf.workload.lengths import Float

HALF_LOG_2PI = 0.5 * np.log(2.0 * np.pi)
# Normal effects by equal steps: eight responses narrow t to about 0.3 / spread_sd, less than Gauss-Hermite resolves.
NODES = np.linspace(-4.5, 4.5, 41)
LOG_WEIGHTS = -0.5 * NODES**2 - np.log(np.sum(np.exp(-0.5 * NODES**2)))
_MIDDLE = 0.1
_Y_GRID = np.sinh(np.linspace(-7.5, 7.5, 1201))  # to +-900: Student errors reach far


@dataclass(frozen=True)
class PromptEffects:
    """Parameters [1] of the effects per prompt; spread_sd = 0: all spread alike, dof = 0: normal errors."""

    icc: float
    beta: float = 0.0
    spread_sd: float = 0.0
    spread_corr: float = 0.0
    dof: float = 0.0

    @property
    def alike(self) -> bool:
        """Whether y is normal, so that it is its own normal score."""
        return self.spread_sd == 0.0 and self.dof == 0.0

    @property
    def _marginal(self) -> tuple[Float, Float]:
        """Of the law of y over all prompts, whatever beta: it says which prompt has which effect."""
        return _marginal(replace(self, beta=0.0))

    def within(self, t: Float) -> Float:
        """Variance of responses around their prompt's effect: (1 - icc) s^2, of mean 1 - icc over t."""
        return np.asarray((1.0 - self.icc) * np.exp(2.0 * self.spread_sd * (t - self.spread_sd)))

    def to_normal(self, y: Float) -> Float:
        """Normal scores z of the latent y."""
        return y if self.alike else np.asarray(np.interp(y, _Y_GRID, self._marginal[0]))

    def from_normal(self, z: Float) -> tuple[Float, Float]:
        """(y, log density of y) of normal scores z."""
        if self.alike:
            return z, np.asarray(-0.5 * z * z - HALF_LOG_2PI)
        grid, log_h = self._marginal
        y = np.interp(z, grid, _Y_GRID)
        return np.asarray(y), np.asarray(np.interp(y, _Y_GRID, log_h))

    def scores(self, effect: Float, wide: Float, own: Float) -> Float:
        """Normal scores z of u, w and the responses' own part, all standard normal and of shapes that broadcast."""
        from scipy.special import ndtr, stdtrit

        if self.dof:
            own = np.asarray(stdtrit(self.dof, np.clip(ndtr(own), 1e-12, 1.0 - 1e-12)), np.float64)
        t = self.spread_corr * effect + np.sqrt(1.0 - self.spread_corr**2) * wide
        return self.to_normal(np.sqrt(self.icc) * effect + np.sqrt(self.within(t)) * own)

    def draw(self, prompt_score: Float, group_size: int, rng: np.random.Generator) -> Float:
        """Normal scores [prompts, group_size] of responses to prompts of given scores."""
        effect = self.beta * prompt_score + np.sqrt(1.0 - self.beta**2) * rng.standard_normal(prompt_score.size)
        own = rng.standard_normal((prompt_score.size, group_size))
        wide = rng.standard_normal(prompt_score.size) if self.spread_sd else np.zeros(prompt_score.size)
        return self.scores(effect[:, None], wide[:, None], own)

    def score_icc(self) -> float:
        """Correlation of the normal scores z of two responses to one prompt: E_u,w[E[z | u, w]^2]; alike, the icc."""
        if self.alike:
            return self.icc
        from scipy.special import ndtri

        weight = np.exp(LOG_WEIGHTS)
        wide, wide_weight = (
            (NODES[::2], weight[::2] / weight[::2].sum()) if self.spread_sd else (np.zeros(1), np.ones(1))
        )
        own = ndtri((np.arange(200) + 0.5) / 200)
        means = self.scores(NODES[:, None, None], wide[:, None], own).mean(axis=-1)
        return float(weight @ means**2 @ wide_weight)

    def less(self, share: float) -> PromptEffects:
        """The effects without a share of the prompts' variance that all prompts of an rl_step have in common."""
        return replace(self, icc=self.icc * (1.0 - share) / (1.0 - self.icc * share))


@lru_cache(maxsize=64)
def _marginal(effects: PromptEffects) -> tuple[Float, Float]:
    """(z, log h) on the grid of y: normal score Phi^-1(H(y)) and log density, over all prompts.

    Spread: given t, y ~ N(sqrt(icc) spread_corr t, icc (1 - spread_corr^2) + within(t)). Odd: given u, Student.
    """
    from scipy.special import ndtr, ndtri, stdtr

    weight, icc = np.exp(LOG_WEIGHTS), effects.icc
    if effects.dof:
        sd = np.full(NODES.size, np.sqrt(1.0 - icc))
        x = (_Y_GRID[:, None] - np.sqrt(icc) * NODES) / sd
        # H(0) is a half: each side is read from its own tail, the other is not computed
        low, high = (
            stdtr(effects.dof, sign * x, where=sign * _Y_GRID[:, None] < _MIDDLE, out=np.ones_like(x)) @ weight
            for sign in (1.0, -1.0)
        )
        log_pdf = log_student(effects.dof, x)
    else:
        corr = effects.spread_corr
        sd = np.sqrt(icc * (1.0 - corr**2) + effects.within(NODES))
        x = (_Y_GRID[:, None] - np.sqrt(icc) * corr * NODES) / sd
        low, high = ndtr(x) @ weight, ndtr(-x) @ weight
        log_pdf = -0.5 * x * x - HALF_LOG_2PI
    z = np.where(low < 0.5, ndtri(np.maximum(low, 1e-300)), -ndtri(np.maximum(high, 1e-300)))
    return np.maximum.accumulate(z), np.log(np.maximum(np.exp(log_pdf) @ (weight / sd), 1e-300))


def log_student(dof: float, x: Float) -> Float:
    """Log density of Student's t."""
    from scipy.special import gammaln

    constant = gammaln(0.5 * (dof + 1.0)) - gammaln(0.5 * dof) - 0.5 * np.log(dof * np.pi)
    return np.asarray(constant - 0.5 * (dof + 1.0) * np.log1p(x * x / dof))
