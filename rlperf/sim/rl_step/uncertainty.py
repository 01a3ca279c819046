"""Intervals of an rl_step: the groups that were drawn, the calibration's error, runs that differ by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlperf.layout import FloatArray
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.rl_calibration import FrameworkCalibration

Z95 = 1.6448536269514722
"""95th percentile of the standard normal."""


def bootstrap_groups(trajectories: Trajectories, random: np.random.Generator) -> Trajectories:
    """As many groups drawn with replacement: whole groups, since samples of one prompt go together.

    >>> t = Trajectories.of(10, [1, 2, 3, 4], group=[0, 0, 1, 1])
    >>> drawn = bootstrap_groups(t, np.random.default_rng(0))
    >>> len(drawn), len(set(drawn.group.tolist()))
    (4, 2)
    """
    order = np.argsort(trajectories.group, kind="stable")
    names, starts = np.unique(trajectories.group[order], return_index=True)
    ends = np.append(starts[1:], order.size)
    picks = random.integers(0, names.size, size=names.size)
    rows = np.concatenate([order[starts[k] : ends[k]] for k in picks])
    labels = np.repeat(np.arange(names.size), ends[picks] - starts[picks])
    return replace(trajectories.take(rows), group=labels)


def bootstrap_seconds(
    seconds: Callable[[Trajectories], float], trajectories: Trajectories, *, draws: int = 16, seed: int = 0
) -> FloatArray:
    """Step seconds of ``draws`` bootstrapped rl_steps [s] ``[draws]``; equal seeds draw equal groups."""
    random = np.random.default_rng(seed)
    return np.array([seconds(bootstrap_groups(trajectories, random)) for _ in range(draws)])


def interval(
    rl_step_s: float, draws_s: FloatArray | Sequence[float], framework: FrameworkCalibration, *, extra: float = 0.0
) -> tuple[float, float]:
    r"""5th and 95th percentile of one rl_step [s].

    The independent parts add in squares of the logarithm:

    .. math:: \ln\frac{high}{t} = \sqrt{(\ln h)^2 + z^2 (s_b^2 + s_r^2 + s_x^2)}

    h the 95th (below: 5th) percentile of measured over predicted on rows left out, s_b the spread of ln t over
    bootstrapped groups, s_r that of reruns of one setup (0 where h was measured, which holds it), s_x ``extra`` (what
    was assumed), z = 1.645.
    """
    draws = np.log(np.asarray(draws_s, np.float64))
    groups = float(draws.std(ddof=1)) if draws.size > 1 else 0.0
    spread = framework.step_spread
    reruns = framework.rerun_spread if spread.assumed else 0.0
    rest = Z95**2 * (groups**2 + reruns**2 + extra**2)
    below, above = min(np.log(spread.low), 0.0), max(np.log(spread.high), 0.0)
    return (
        rl_step_s * float(np.exp(-np.sqrt(below**2 + rest))),
        rl_step_s * float(np.exp(np.sqrt(above**2 + rest))),
    )


@dataclass(frozen=True)
class Comparison:
    """B's seconds over A's, with common random numbers.

    ``ratio`` > 1: A is faster. ``low``, ``high``: 5th and 95th percentile. ``apart``: the interval leaves out 1.
    """

    ratio: float
    low: float
    high: float

    @property
    def apart(self) -> bool:
        """Whether the two can be told apart."""
        return self.low > 1.0 or self.high < 1.0

    def sentence(self, a: str = "A", b: str = "B") -> str:
        """The verdict in words.

        >>> Comparison(1.25, 1.1, 1.4).sentence()
        'A beats B by 25 % (10 % .. 40 %)'
        >>> Comparison(0.8, 0.7, 1.05).sentence()
        'A and B cannot be told apart (B / A 0.80, 0.70 .. 1.05)'
        """
        if not self.apart:
            return f"{a} and {b} cannot be told apart ({b} / {a} {self.ratio:.2f}, {self.low:.2f} .. {self.high:.2f})"
        first, second, one = (a, b, self) if self.ratio > 1.0 else (b, a, self._inverse())
        gain, low, high = (100.0 * (value - 1.0) for value in (one.ratio, one.low, one.high))
        return f"{first} beats {second} by {gain:.0f} % ({low:.0f} % .. {high:.0f} %)"

    def _inverse(self) -> Comparison:
        return Comparison(1.0 / self.ratio, 1.0 / self.high, 1.0 / self.low)


def compare_draws(a_s: FloatArray, b_s: FloatArray, *, own: float = 0.0) -> Comparison:
    """Compare paired draws: row k of both saw the same groups, so what they share cancels.

    Parameters
    ----------
    a_s, b_s : step seconds on the same draws [s] ``[draws]``
    own : standard deviation of ln(ratio) from errors that the two do not share: calibrations of different stages,
        layouts or frameworks [1]

    >>> lengths = np.array([50.0, 80.0, 60.0, 90.0])
    >>> compare_draws(lengths, 1.3 * lengths).apart
    True
    """
    logs = np.log(np.asarray(b_s, np.float64) / np.asarray(a_s, np.float64))
    centre, spread = float(logs.mean()), float(logs.std(ddof=1)) if logs.size > 1 else 0.0
    width = Z95 * float(np.hypot(spread, own))
    return Comparison(float(np.exp(centre)), float(np.exp(centre - width)), float(np.exp(centre + width)))


def unshared_error(
    a: npt.ArrayLike, b: npt.ArrayLike, sigma: npt.ArrayLike, *, own_share: float, shared: bool = True
) -> float:
    r"""Standard deviation of ln(t_B / t_A) from calibration errors that do not cancel [1].

    With stage shares a_i, b_i of the two steps and s_i the error of the constants behind stage i,

    .. math:: s^2 = \sum_i s_i^2 \left[(b_i - a_i)^2 + \omega^2 (a_i^2 + b_i^2)\right]

    Two configurations on one device, engine and framework share s_i; omega is the layouts' own share of it (0 in a
    stage that both run alike). Nothing is shared (``shared`` False): :math:`s^2 = \sum s_i^2 (a_i^2 + b_i^2)`.

    Parameters
    ----------
    a, b : seconds of the stages of the two, same order [s] ``[stages]``
    sigma : s_i ``[stages]``
    own_share : omega [1]

    >>> unshared_error([50.0, 50.0], [100.0, 100.0], [0.1, 0.1], own_share=0.0)
    0.0
    """
    t_a, t_b, s = (np.asarray(value, np.float64) for value in (a, b, sigma))
    first, second = t_a / max(float(t_a.sum()), 1e-12), t_b / max(float(t_b.sum()), 1e-12)
    alone = first**2 + second**2
    if not shared:
        return float(np.sqrt((s**2 * alone).sum()))
    omega = np.where(np.isclose(t_a, t_b, rtol=1e-9), 0.0, own_share)
    return float(np.sqrt((s**2 * ((second - first) ** 2 + omega**2 * alone)).sum()))
