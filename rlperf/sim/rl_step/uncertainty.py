r"""Intervals of an rl_step and of its stages: what a prediction says, and what validation scores it by.

Errors are log-normal and independent parts add in squares of the logarithm. ``low`` and ``high`` are the 5th and 95th
percentile everywhere; z = 1.645.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlperf.cost.basis import WEIGHT_ONLY
from rlperf.cost.layers import stack_of
from rlperf.layout import FloatArray
from rlperf.sim.rl_step.site import Site, TrainerStack
from rlperf.sim.rl_step.stage_seconds import usual_sync_fit
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rl_step.trainer_stage import TrainerStage
from rlperf.specs.architecture import Architecture
from rlperf.specs.calibration import Z95
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.rl_calibration import FrameworkCalibration

OWN_SHARE = 0.5
"""Share of a stage's calibration error that belongs to the layout, not to device and software: judged, unmeasured."""
CALIBRATED = ("rollout_s", "scoring_s", "training_s", "weight_sync_s")
"""Stages with a calibration of their own; the rest of the rl_step is the framework's."""


def log_sigma(low: float, high: float) -> float:
    """Standard deviation of the logarithm from a 5th and 95th percentile.

    >>> round(log_sigma(0.5, 2.0), 3)
    0.421
    """
    return float(np.log(high / low) / (2.0 * Z95))


@dataclass(frozen=True)
class StageSigmas:
    """Standard deviation of ln(measured / predicted) of each stage [1]."""

    rollout_s: float
    scoring_s: float
    training_s: float
    weight_sync_s: float
    rest: float


def stage_sigmas(site: Site, trainer: TrainerStage, mode: Mode) -> StageSigmas:
    """Spreads of the calibrations behind the stages of an rl_step with this trainer (its first row)."""
    framework, spread = site.trainers[int(trainer.backend[0])].framework, site.rollout_hardware.calibration.spread
    sync = usual_sync_fit(framework, MODES[mode].shares_devices).provenance
    training = log_sigma(float(trainer.low[0]), float(trainer.high[0]))
    return StageSigmas(
        rollout_s=log_sigma(spread.low, spread.high),
        scoring_s=training,
        training_s=training,
        weight_sync_s=log_sigma(sync.low, sync.high),
        rest=log_sigma(framework.step_spread.low, framework.step_spread.high) / 2.0,
    )


def distinguishable(sigmas: StageSigmas, first: StageSeconds, second: StageSeconds) -> bool:
    """Whether the intervals of the *difference* of two candidates leave out zero.

    Both candidates run on the same rl_steps, device and software, so what their stages share cancels; a stage that
    both run alike adds nothing. What is left is the layouts' own share of the calibration error.
    """
    variance = 0.0
    for name in CALIBRATED:
        a, b = float(getattr(first, name).mean()), float(getattr(second, name).mean())
        sigma = getattr(sigmas, name)
        if not np.isclose(a, b, rtol=1e-9):
            variance += (sigma * OWN_SHARE) ** 2 * (a**2 + b**2) + (sigma * (a - b)) ** 2
    drawn: FloatArray = first.rl_step_s - second.rl_step_s
    if len(drawn) > 1:
        variance += float(np.var(drawn, ddof=1) / len(drawn))
    return bool(abs(drawn.mean()) > Z95 * np.sqrt(variance))


def lengths_sigma(draws_s: FloatArray | Sequence[float]) -> float:
    """Standard deviation of ln t over rl_steps that differ by the lengths drawn; 0 of fewer than two [1]."""
    draws = np.log(np.asarray(draws_s, np.float64))
    return float(draws.std(ddof=1)) if draws.size > 1 else 0.0


def unmeasured_sigma(
    site: Site, stack: TrainerStack, architecture: Architecture, dtype: str, seconds: StageSeconds
) -> FloatArray:
    r"""Standard deviation that an architecture, a device or a precision unlike all measured ones adds [1] ``[rows]``.

    .. math:: s^2 = u^2 (\ell + d/4) + (1 - \ell) \left(w_r^2 s_r^2 + w_t^2 s_t^2\right)

    u the framework's ``unmeasured_spread``, for latent attention (:math:`\ell` = 1; no rl_step of another unmeasured
    kind has shown more) and, a quarter of its square, for a device that borrows constants (d = 1); else w_r the
    rollout's share of the rl_step and s_r the spread of serving rows whose kernels no table holds, where the engine
    runs such layers or such a precision; w_t the share of scoring and training, s_t the backend's own spread once
    more, where it trains layers that nobody has timed.
    """
    halves = stack_of(architecture).halves
    latent = architecture.latent is not None
    borrowed = site.rollout_hardware.calibration.extrapolated
    total = np.asarray(stack.framework.unmeasured_spread**2 * (latent + borrowed / 4.0) + 0.0 * seconds.rl_step_s)
    if not latent and (dtype in WEIGHT_ONLY or any(half.layer.unmeasured for half in halves)):
        spread = site.engine.spread_extrapolated
        total = total + (seconds.rollout_s / seconds.rl_step_s * log_sigma(spread.low, spread.high)) ** 2
    if not latent and any(half.layer.unmeasured_training for half in halves):
        share = (seconds.scoring_s + seconds.training_s) / seconds.rl_step_s
        total = total + (share * log_sigma(stack.calibration.low, stack.calibration.high)) ** 2
    return np.asarray(np.sqrt(total))


def step_factors(
    framework: FrameworkCalibration, *, lengths: npt.ArrayLike = 0.0, extra: npt.ArrayLike = 0.0
) -> tuple[FloatArray, FloatArray]:
    r"""5th and 95th percentile of rl_steps over their predictions [1].

    .. math:: \ln\frac{high}{t} = \sqrt{(\ln h)^2 + z^2 (s_l^2 + s_r^2 + s_x^2)}

    h the 95th (below: 5th) percentile of measured over predicted on rows left out, s_l the spread of ln t over the
    lengths drawn, s_r that of reruns of one setup (0 where h was measured, which holds it), s_x ``extra`` (what was
    assumed, `unmeasured_sigma`).
    """
    spread = framework.step_spread
    reruns = framework.rerun_spread if spread.assumed else 0.0
    rest = Z95**2 * (np.asarray(lengths) ** 2 + reruns**2 + np.asarray(extra) ** 2)
    below, above = min(np.log(spread.low), 0.0), max(np.log(spread.high), 0.0)
    return np.exp(-np.sqrt(below**2 + rest)), np.exp(np.sqrt(above**2 + rest))


def interval(
    rl_step_s: float, draws_s: FloatArray | Sequence[float], framework: FrameworkCalibration, *, extra: float = 0.0
) -> tuple[float, float]:
    """5th and 95th percentile of one rl_step [s]: `step_factors`, with the spread of ``draws_s`` over the lengths."""
    low, high = step_factors(framework, lengths=lengths_sigma(draws_s), extra=extra)
    return rl_step_s * float(low), rl_step_s * float(high)


def stage_interval(
    site: Site, trainer: TrainerStage, stage: str, seconds: float, mode: Mode, *, lengths: float = 0.0
) -> tuple[float, float]:
    """5th and 95th percentile of one stage [s]: the calibration behind it, reruns, and ``lengths`` (rollout) [1]."""
    framework = site.trainers[int(trainer.backend[0])].framework
    if stage == "weight_sync_s":
        spread = usual_sync_fit(framework, MODES[mode].shares_devices).provenance
        below, above = np.log(spread.low), np.log(spread.high)
    else:
        bands = framework.stage_spread
        backend, kernels = site.trainers[int(trainer.backend[0])].calibration, site.rollout_hardware.calibration.spread
        behind = kernels if stage == "rollout_s" else backend
        band = {"rollout_s": bands.rollout, "scoring_s": bands.scoring, "training_s": bands.training}[stage]
        below = np.hypot(np.log(behind.low), np.log(band[0]))
        above = np.hypot(np.log(behind.high), np.log(band[1]))
    rest = (Z95 * framework.rerun_spread) ** 2 + (Z95 * lengths) ** 2
    low = seconds * float(np.exp(-np.sqrt(below**2 + rest)))
    return low, seconds * float(np.exp(np.sqrt(above**2 + rest)))


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
