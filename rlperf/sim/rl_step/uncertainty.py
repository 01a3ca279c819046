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
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.layers import stack_of
from rlperf.cost.trainer.update import experts_timed
from rlperf.layout import BoolArray, FloatArray, IntArray, Layout
from rlperf.sim.rl_step.site import Site, TrainerStack
from rlperf.sim.rl_step.stage_seconds import usual_sync_fit
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rl_step.trainer_stage import TrainerStage
from rlperf.specs.architecture import Architecture
from rlperf.specs.calibration import Z95
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.rl_calibration import FrameworkCalibration
from rlperf.specs.speculation_calibration import load_speculation

CALIBRATED = ("rollout_s", "scoring_s", "training_s", "weight_sync_s")
"""Stages with a calibration of their own; the rest of the rl_step is the framework's."""
OWN_SHARE: FloatArray = np.array([0.7, 0.5, 0.5, 0.5, 0.5])
r"""Share of a stage's calibration error that belongs to the layout, not to device and software; the rest stands last.

Measured: the spread of ln(measured / predicted) among layouts of one configuration over the calibration's own sigma.
Rollout: time per token in 362 sets that differ in parallel degrees alone (engine, release, architecture, device,
lengths and concurrency equal), 0.108 / 0.156. Training: 42 sets of layouts that no fit saw, 0.065 / 0.134
(`studies/measured_best/own_share.py`). No other stage has such sets: they take the trainer's.
"""


def log_sigma(low: npt.ArrayLike, high: npt.ArrayLike) -> FloatArray:
    """Standard deviation of the logarithm from a 5th and 95th percentile [1]; arrays broadcast.

    >>> round(float(log_sigma(0.5, 2.0)), 3)
    0.421
    """
    return np.asarray(np.log(np.asarray(high) / np.asarray(low)) / (2.0 * Z95))


@dataclass(frozen=True)
class StageSigmas:
    """Standard deviation of ln(measured / predicted) of each stage [1]."""

    rollout_s: float
    scoring_s: float
    training_s: float
    weight_sync_s: float
    rest: float

    @property
    def of_stages(self) -> FloatArray:
        """In the order of `stage_matrix` [1] ``[stages]``."""
        return np.array([*(getattr(self, name) for name in CALIBRATED), self.rest])


def stage_sigmas(site: Site, trainer: TrainerStage, mode: Mode) -> StageSigmas:
    """Spreads of the calibrations behind the stages of an rl_step with this trainer (its first row)."""
    framework, spread = site.trainers[int(trainer.backend[0])].framework, site.rollout_hardware.calibration.spread
    sync = usual_sync_fit(framework, MODES[mode].shares_devices).provenance
    training = float(log_sigma(trainer.low[0], trainer.high[0]))
    return StageSigmas(
        rollout_s=float(log_sigma(spread.low, spread.high)),
        scoring_s=training,
        training_s=training,
        weight_sync_s=float(log_sigma(sync.low, sync.high)),
        rest=float(log_sigma(framework.step_spread.low, framework.step_spread.high)) / 2.0,
    )


def stage_matrix(seconds: StageSeconds) -> FloatArray:
    """Seconds of the stages of `CALIBRATED`, the rest of the rl_step last [s] ``[candidates][stages]``."""
    rest = seconds.reward_s + seconds.data_movement_s + seconds.offload_s + seconds.other_s
    columns = (*(getattr(seconds, name) for name in CALIBRATED), rest)
    return np.stack([np.broadcast_to(each, np.shape(seconds.rl_step_s)) for each in columns], axis=-1)


@dataclass(frozen=True, eq=False)
class Contenders:
    """What tells candidates of one question apart; they run on the same lengths.

    Attributes
    ----------
    stages : their seconds as in `stage_matrix` [s] ``[candidates][stages]``
    sigma : error of the constants behind each ``[candidates][stages]``
    origin : number of the calibrations behind a candidate's trainer and overheads: other ones err otherwise
        ``[candidates]``
    unlike : standard deviation added for what is unlike all that was measured (`unmeasured_sigma`) ``[candidates]``
    draws : rl_steps on the common lengths [s] ``[candidates][draws]``
    """

    stages: FloatArray
    sigma: FloatArray
    origin: IntArray
    unlike: FloatArray
    draws: FloatArray

    def difference_sigma(self, row: int) -> FloatArray:
        r"""Standard deviation of the difference of each candidate to the one in ``row`` ``[candidates]``.

        .. math::

            s^2 = \sum_i \sigma_i^2 (a_i - b_i)^2 + \omega_i^2 \sigma_i^2 (a_i^2 + b_i^2)
                + |\sigma_{a,i}^2 - \sigma_i^2| a_i^2 + |\sigma_{b,i}^2 - \sigma_i^2| b_i^2

        over the stages that the two do not run alike: :math:`\sigma_i` the smaller of both errors is of device and
        software and cancels in the difference, but for the layouts' own share of it (:math:`\omega`, `OWN_SHARE`);
        where one's constants are less certain, the excess is its own. Of two trainers' constants nothing cancels. What
        is unlike all that was measured in one of them alone is its own, too; rl_steps drawn differ by lengths.
        """
        a, b = self.stages, self.stages[row]
        shared = np.minimum(self.sigma, self.sigma[row])
        apart = (self.origin != self.origin[row])[:, None] & (np.arange(a.shape[1]) > 0)
        shared = np.where(apart, 0.0, shared)
        parts = shared**2 * ((a - b) ** 2 + OWN_SHARE**2 * (a**2 + b**2))
        parts += (self.sigma**2 - shared**2) * a**2 + (self.sigma[row] ** 2 - shared**2) * b**2
        variance = np.where(np.isclose(a, b, rtol=1e-9), 0.0, parts).sum(axis=1)
        whole = np.maximum(self.draws.mean(axis=1), self.draws[row].mean())
        variance += np.abs(self.unlike**2 - self.unlike[row] ** 2) * whole**2
        if self.draws.shape[1] > 1:
            variance += np.var(self.draws - self.draws[row], axis=1, ddof=1) / self.draws.shape[1]
        return np.asarray(np.sqrt(variance))

    def apart(self, row: int) -> BoolArray:
        """Whether the interval of the difference to the candidate in ``row`` leaves out zero ``[candidates]``."""
        mean = self.draws.mean(axis=1)
        return np.asarray(np.abs(mean - mean[row]) > Z95 * self.difference_sigma(row))


def lengths_sigma(draws_s: FloatArray | Sequence[float]) -> float:
    """Standard deviation of ln t over rl_steps that differ by the lengths drawn; 0 of fewer than two [1]."""
    draws = np.log(np.asarray(draws_s, np.float64))
    return float(draws.std(ddof=1)) if draws.size > 1 else 0.0


def unmeasured_sigma(
    site: Site, stack: TrainerStack, architecture: Architecture, dtype: str, seconds: StageSeconds, layout: Layout
) -> FloatArray:
    r"""Standard deviation that an architecture, a device or a precision unlike all measured ones adds [1] ``[rows]``.

    .. math:: s^2 = u^2 (\ell + d/4) + (1 - \ell) \left(w_r^2 s_r^2 + w_t^2 s_t^2\right)

    u the framework's ``unmeasured_spread``, for latent attention (:math:`\ell` = 1; no rl_step of another unmeasured
    kind has shown more) and, a quarter of its square, for a device that borrows constants (d = 1); else w_r the
    rollout's share of the rl_step and s_r the spread of serving rows whose kernels no table holds, where the engine
    runs such layers or such a precision, or where the architecture's reader had to assume something; w_t the share of
    scoring and training, s_t the backend's own spread once more, where it trains layers that nobody has timed, or
    experts in a ``layout`` in which nobody has.
    """
    halves = stack_of(architecture).halves
    latent = architecture.latent is not None
    borrowed = site.rollout_hardware.calibration.extrapolated
    total = np.asarray(stack.framework.unmeasured_spread**2 * (latent + borrowed / 4.0) + 0.0 * seconds.rl_step_s)
    lacking = any(half.layer.lacks(site.rollout_hardware, site.engine) for half in halves)
    unlike = dtype in WEIGHT_ONLY or bool(architecture.assumed) or lacking
    if architecture.assumed or (not latent and unlike):
        spread = site.engine.spread_extrapolated
        total = total + (seconds.rollout_s / seconds.rl_step_s * log_sigma(spread.low, spread.high)) ** 2
    untimed = ~experts_timed(architecture, stack.calibration, layout)
    if not latent:
        layers = any(half.layer.unmeasured_training for half in halves)
        share = (seconds.scoring_s + seconds.training_s) / seconds.rl_step_s * (untimed | layers)
        total = total + (share * log_sigma(stack.calibration.low, stack.calibration.high)) ** 2
    return np.asarray(np.sqrt(total))


def drafted_sigma(cost: EngineStepCost, seconds: StageSeconds) -> float:
    r"""Standard deviation of ln t that drafted tokens add; 0 where nothing is drafted [1].

    .. math:: s = \frac{t_{rollout}}{t} \sqrt{s_a^2 + s_c^2}

    Symbols: `SpeculationCalibration.sigma`.
    """
    if cost.drafted is None:
        return 0.0
    unlike = load_speculation().sigma(cost.drafted.spread)
    return float((seconds.rollout_s / seconds.rl_step_s).mean() * unlike)


def step_factors(
    framework: FrameworkCalibration, *, lengths: npt.ArrayLike = 0.0, extra: npt.ArrayLike
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
    site: Site, trainer: TrainerStage, stage: str, seconds: float, mode: Mode, *, lengths: float
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
        kernels_low, kernels_high = (0.0, 0.0) if bands.whole else (np.log(behind.low), np.log(behind.high))
        below, above = np.hypot(kernels_low, np.log(band[0])), np.hypot(kernels_high, np.log(band[1]))
    reruns = 0.0 if framework.stage_spread.whole else framework.rerun_spread
    rest = (Z95 * reruns) ** 2 + (Z95 * lengths) ** 2
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

    def times(self, factor: float) -> Comparison:
        """The same of what every second costs, ``factor`` times as much in B as in A.

        >>> Comparison(1.0, 0.9, 1.1).times(2.0)
        Comparison(ratio=2.0, low=1.8, high=2.2)
        """
        return Comparison(self.ratio * factor, self.low * factor, self.high * factor)

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


def compare_draws(a_s: FloatArray, b_s: FloatArray, *, own: float = 0.0, ratio: float | None = None) -> Comparison:
    """Compare paired draws: row k of both saw the same groups, so what they share cancels.

    Parameters
    ----------
    a_s, b_s : step seconds on the same draws [s] ``[draws]``
    own : standard deviation of ln(ratio) from errors that the two do not share: calibrations of different stages,
        layouts or frameworks [1]
    ratio : of the seconds that the draws were drawn again from, which they then only spread around; None: theirs

    >>> lengths = np.array([50.0, 80.0, 60.0, 90.0])
    >>> compare_draws(lengths, 1.3 * lengths).apart
    True
    """
    logs = np.log(np.asarray(b_s, np.float64) / np.asarray(a_s, np.float64))
    centre = float(logs.mean()) if ratio is None else float(np.log(ratio))
    width = Z95 * float(np.hypot(float(logs.std(ddof=1)) if logs.size > 1 else 0.0, own))
    return Comparison(float(np.exp(centre)), float(np.exp(centre - width)), float(np.exp(centre + width)))


def unshared_error(
    a: npt.ArrayLike, b: npt.ArrayLike, sigma: npt.ArrayLike, *, own_share: npt.ArrayLike, shared: bool = True
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
    own_share : omega [1], of all stages or of each

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
