r"""The posterior behind `fit_log`: what one log says of constants and stages, on top of what was known.

Stage ``s`` of rl_step ``t`` is

.. math:: \ln m_{st} = \ln p_{st}(\theta) + a_s + b_s + \varepsilon_{st}

p the simulator's seconds at the rl_step's lengths under constants :math:`\theta` (in logarithms), a the error that all
configurations of a framework share on this cluster, b that of the configuration that ran, :math:`\varepsilon` the noise
of an rl_step. All have normal priors around the shipped values; the posterior is that of the model made linear around
its mean (Gauss-Newton). So whoever explains a miss is asked in proportion to how uncertain it was: seconds per update
where they are most of a stage, the stage's factor where they are not, and b takes what one configuration cannot tell
from a.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.layout import FloatArray
from rlperf.specs.stage_spread import STAGES, SURPRISE, LogPrior

WHOLE = "rl_step"
"""What all stages make together, by the mode; where a log states no stage it is all there is."""
ENGINE = "engine"
"""Rollout, weight sync and transitions together, where a log's timer of the rollout holds them all."""
Seconds = Mapping[str, FloatArray]
"""Stage, `WHOLE` or `ENGINE` -> seconds of every rl_step ``[rl_steps]``."""
Simulator = Callable[[Mapping[str, float], Mapping[str, float]], Seconds]
"""Seconds under constants and stage factors, both over those at the start [1]."""
STEP = 0.1
"""Change of a logarithm over which slopes are taken [1]."""
ROUNDS = 3
NOISE_WEIGHT = 2.0
"""rl_steps that the assumed noise counts for beside the log's own scatter."""


@dataclass(frozen=True, eq=False)
class Slopes:
    """Logarithms of simulated seconds and how they move with constants and stage factors.

    ``at``: ln seconds ``[rl_steps]``; ``of``: d ln seconds by (constants, stage factors), mean over rl_steps
    """

    at: Mapping[str, FloatArray]
    of: Mapping[str, FloatArray]


@dataclass(frozen=True, eq=False)
class Posterior:
    """What constants and stages are, after the log.

    Attributes
    ----------
    constants : their names
    mean, covariance : of (ln constant over its start, ln shared factor of every stage)
    prior : standard deviations before
    noise : of an rl_step around its mean, by observation [1]
    surprise : how far the mean of an observation was from its prediction before, in standard deviations of that [1];
        those beyond `SURPRISE` tell nothing of constants and stages
    slopes : at the mean
    """

    constants: tuple[str, ...]
    mean: FloatArray
    covariance: FloatArray
    prior: FloatArray
    noise: Mapping[str, float]
    surprise: Mapping[str, float]
    slopes: Slopes

    def sigma(self, name: str, within: Mapping[str, float]) -> float:
        """Standard deviation of ln(measured / predicted) of a stage, or `WHOLE`, of another configuration [1]."""
        slope = self.slopes.of[name]
        own = sum((slope[len(self.constants) + k] * within[stage]) ** 2 for k, stage in enumerate(STAGES))
        return float(np.sqrt(max(float(slope @ self.covariance @ slope), 0.0) + own))

    @property
    def told(self) -> FloatArray:
        """Share of every unknown's prior variance that the log took away [1]."""
        return np.asarray(1.0 - np.diag(self.covariance) / self.prior**2)


def posterior(simulate: Simulator, measured: Seconds, constants: Mapping[str, float], prior: LogPrior) -> Posterior:
    """The posterior of a log.

    Parameters
    ----------
    measured : what the log states, not-a-number where it does not
    constants : standard deviation of the logarithm of every constant before the log
    """
    names, count = tuple(constants), len(constants)
    stages = [getattr(prior, stage) for stage in STAGES]
    widths = np.array([*constants.values(), *(each.between for each in stages), *(each.within for each in stages)])
    widths = np.asarray(np.maximum(widths, 1e-4), np.float64)
    x: FloatArray = np.zeros(widths.size)
    noise = {name: _assumed(prior, name) for name in measured}
    surprise: dict[str, float] = {}
    for _ in range(ROUNDS):
        slopes = slopes_at(simulate, names, x)
        rows, targets = [], []
        for name, seconds in measured.items():
            known = np.isfinite(seconds) & (seconds > 0)
            misses = np.log(seconds[known]) - slopes.at[name][known]
            noise[name] = _noise(misses, _assumed(prior, name))
            # a stage's own error of the configuration moves it as the shared one does
            row = np.concatenate([slopes.of[name], slopes.of[name][count:]])
            expected = float(np.sqrt((row**2 * widths**2).sum() + noise[name] ** 2 / misses.size))
            if abs(surprise.setdefault(name, float(misses.mean()) / expected)) > SURPRISE:
                continue
            rows.append(np.tile(row, (misses.size, 1)) / noise[name])
            targets.append((misses + row @ x) / noise[name])
        design, target = np.vstack([np.zeros((0, widths.size)), *rows]), np.concatenate([np.zeros(0), *targets])
        precision = design.T @ design + np.diag(widths**-2.0)
        x = np.asarray(np.linalg.solve(precision, design.T @ target), np.float64)
    shared = count + len(STAGES)
    covariance = np.asarray(np.linalg.inv(precision), np.float64)[:shared, :shared]
    slopes = slopes_at(simulate, names, x * (np.arange(x.size) < shared))
    return Posterior(names, x[:shared], covariance, widths[:shared], noise, surprise, slopes)


def _assumed(prior: LogPrior, name: str) -> float:
    """Noise of an observation before the log; what holds a rollout has its noise."""
    return float(getattr(prior, "rollout" if name in (WHOLE, ENGINE) else name).noise)


def _noise(misses: FloatArray, assumed: float) -> float:
    """Noise of an rl_step: the scatter of the misses around their mean, and what was assumed."""
    scatter = float(((misses - misses.mean()) ** 2).sum()) if misses.size else 0.0
    return float(np.sqrt((NOISE_WEIGHT * assumed**2 + scatter) / (NOISE_WEIGHT + max(misses.size - 1, 0))))


def slopes_at(simulate: Simulator, names: Sequence[str], x: FloatArray) -> Slopes:
    """Logarithms and slopes at constants and factors (shared and own together) of ``x``."""
    count = len(names)
    here = np.concatenate([x[:count], x[count : count + len(STAGES)] + x[count + len(STAGES) :]])

    def at(moved: FloatArray) -> dict[str, FloatArray]:
        values = np.exp(moved)
        found = simulate(dict(zip(names, values[:count], strict=True)), dict(zip(STAGES, values[count:], strict=True)))
        return {name: np.log(np.maximum(seconds, 1e-9)) for name, seconds in found.items()}

    middle = at(here)
    moved = [at(here + STEP * (np.arange(here.size) == k)) for k in range(here.size)]
    slopes = {
        name: np.array([float((there[name] - logs).mean()) / STEP for there in moved]) for name, logs in middle.items()
    }
    return Slopes(middle, slopes)
