r"""Stage factors: how far a running job's stages are from their predictions, and what that says of other layouts.

The logarithm of measured over predicted seconds of a stage is the sum of an error that all layouts share (device,
software) and one of the layout's own,

.. math:: e_c = c + o_c, \quad \operatorname{var} e_c = \sigma^2, \quad \operatorname{corr}(e_c, e_{c'}) = \rho
   = 1 - \omega^2

with :math:`\sigma` of the calibration and :math:`\omega` the share of a layout's own error (`OWN_SHARE`). A log of n
rl_steps states :math:`m`, the median of the logarithms, with variance :math:`v = \pi s^2 / (2 n)`. Then (normal
conditioning)

.. math:: e_c \mid m \sim N\!\Big(\frac{\sigma^2}{\sigma^2 + v} m, \; \frac{\sigma^2 v}{\sigma^2 + v}\Big), \qquad
   e_{c'} \mid e_c \sim N(\rho e_c, (1 - \rho^2)\, \sigma^2)

so that few or noisy rl_steps leave the factor near 1, and another layout takes over only the shared part.

Stages that a log does not time by themselves it tells together, where nothing overlaps: what its rl_steps leave beside
the timed ones and what is predicted of the rest. With :math:`w_i` their shares of the predicted seconds, that is
:math:`r = \sum_i w_i e_i` and noise u, so that of each :math:`m_i = r / w_i` with the others as its noise,
:math:`v_i = (u^2 + \sum_{j \ne i} w_j^2 \sigma_j^2) / w_i^2`.

That holds of errors that predictions have. Where m is more than `SURPRISE` of its standard deviations
:math:`\sqrt{\sigma^2 + v}` off, something else is the matter (a node, a setting), and no layout is known to be free of
it: then :math:`\rho = 1`, and all layouts are expected to take as many times their seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlperf.layout import FloatArray, IntArray
from rlperf.plan.judge.evaluate import Evaluation, scaled_seconds
from rlperf.plan.question.context import Context, TaskContext
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rl_step.uncertainty import OWN_SHARE, stage_sigmas
from rlperf.specs.modes import MODES
from rlperf.specs.stage_spread import SURPRISE
from rlperf.specs.step_log import StepLog

STAGES = ("rollout", "scoring", "training", "weight_sync")
SHARED = dict(zip(STAGES, 1.0 - OWN_SHARE**2, strict=False))
"""Correlation of the errors of two layouts of one stage."""
NOISE = 0.05
"""Noise of a logged stage where the framework's reruns state none [1]: judged."""
NOISE_WEIGHT = 2.0
"""rl_steps that the assumed noise counts for beside the log's own scatter."""


@dataclass(frozen=True)
class StageFactor:
    """Measured over predicted of one stage, as the log and the calibration have it together.

    Attributes
    ----------
    log_ratio, noise, rl_steps : median of ln(measured / predicted), its scatter per rl_step, and the rl_steps used
    prior : standard deviation of the calibration, sigma [1]
    """

    stage: str
    log_ratio: float
    noise: float
    rl_steps: int
    prior: float

    @property
    def variance(self) -> float:
        """Of the median before the log was read, sigma^2 + v."""
        return self.prior**2 + np.pi / 2.0 * self.noise**2 / max(self.rl_steps, 1)

    @property
    def weight(self) -> float:
        """Share of the log's word in the estimate, sigma^2 / (sigma^2 + v)."""
        return self.prior**2 / self.variance if self.rl_steps and self.prior else 0.0

    @property
    def surprise(self) -> float:
        """How far the median is from the prediction, in standard deviations of that.

        >>> round(StageFactor("rollout", 0.9, 0.05, 20, 0.1).surprise, 1)
        8.9
        """
        return self.log_ratio / float(np.sqrt(self.variance)) if self.weight else 0.0

    @property
    def shared(self) -> float:
        """Correlation of the error with that of another layout; whole where it is none that predictions have."""
        return 1.0 if abs(self.surprise) > SURPRISE else SHARED[self.stage]

    @property
    def mean(self) -> float:
        """Expected logarithm of the factor of the layout that ran."""
        return self.weight * self.log_ratio

    @property
    def sigma(self) -> float:
        """Standard deviation of that logarithm."""
        return self.prior * float(np.sqrt(1.0 - self.weight))

    @property
    def value(self) -> float:
        """Median factor of the layout that ran.

        >>> round(StageFactor("rollout", 0.2, 0.05, 20, 0.1).value, 3), StageFactor("rollout", 0.2, 0.05, 0, 0.1).value
        (1.217, 1.0)
        """
        return float(np.exp(self.mean))


def stage_factors(context: Context, recorded: Evaluation, log: StepLog) -> tuple[StageFactor, ...]:
    """Factors of the layout that ran, by stage.

    Parameters
    ----------
    recorded : the running configuration judged on the lengths of ``log``'s rl_steps, one replicate each
    """
    sigmas = stage_sigmas(context.site, recorded.trainer, recorded.configuration.mode)
    framework = context.trainers[int(recorded.trainer.backend[0])].framework
    assumed = framework.rerun_spread or NOISE
    found = []
    for stage in STAGES:
        measured: FloatArray = getattr(log, f"{stage}_s")
        predicted: FloatArray = getattr(recorded.seconds, f"{stage}_s")
        # where rollout and training overlap, a log's rollout is what the trainer waited, not what the engines took
        hidden = stage == "rollout" and MODES[recorded.configuration.mode].overlaps
        known = np.isfinite(measured) & (measured > 0) & (predicted > 0) & (not hidden)
        ratios = np.log(measured[known] / predicted[known])
        n = int(ratios.size)
        median = float(np.median(ratios)) if n else 0.0
        scatter = 1.4826 * float(np.median(np.abs(ratios - median))) if n else 0.0
        freedom = max(n - 1, 0)
        noise = float(np.sqrt((NOISE_WEIGHT * assumed**2 + freedom * scatter**2) / (NOISE_WEIGHT + freedom)))
        found.append(StageFactor(stage, median, noise, n, float(getattr(sigmas, f"{stage}_s"))))
    if MODES[recorded.configuration.mode].overlaps:
        return tuple(found)
    return _with_the_rest(found, recorded.seconds, log)


def _with_the_rest(found: list[StageFactor], predicted: StageSeconds, log: StepLog) -> tuple[StageFactor, ...]:
    """Stages that the log does not time, from what its rl_steps leave for them together.

    Its noise is `NOISE` of the rl_step however many there are: what else stands in one is known no better.
    """
    seconds = {stage: np.asarray(getattr(predicted, f"{stage}_s")) for stage in STAGES}
    silent = {each.stage: each for each in found if not each.rl_steps and float(seconds[each.stage].mean()) > 0.0}
    left = log.rl_step_s - (predicted.rl_step_s - sum(seconds.values()))
    left = left - sum(getattr(log, f"{each.stage}_s") for each in found if each.rl_steps)
    due = np.asarray(sum(seconds[stage] for stage in silent))
    if not silent or not (known := np.isfinite(left) & (left > 0)).any():
        return tuple(found)
    ratio, n = float(np.median(np.log(left[known] / due[known]))), int(known.sum())
    share = {stage: float((seconds[stage] / due).mean()) for stage in silent}
    own = NOISE * float((predicted.rl_step_s / due).mean())
    whole = own**2 + sum((share[stage] * each.prior) ** 2 for stage, each in silent.items())

    def told(each: StageFactor) -> StageFactor:
        w = share[each.stage]
        variance = whole / w**2 - each.prior**2
        return replace(each, log_ratio=ratio / w, noise=float(np.sqrt(variance * n * 2.0 / np.pi)), rl_steps=n)

    return tuple(told(each) if each.stage in silent else each for each in found)


@dataclass(frozen=True, eq=False)
class Errors:
    """Draws of the stages' factors, the same for every layout that is compared ``[draws]``."""

    factors: tuple[StageFactor, ...]
    ran: dict[str, FloatArray]
    other: dict[str, FloatArray]

    @classmethod
    def draw(cls, factors: tuple[StageFactor, ...], draws: int, random: np.random.Generator) -> Errors:
        """Joint draws of the layout that ran and of one that did not."""
        ran, other = {}, {}
        for factor in factors:
            one, two = random.standard_normal((2, draws))
            ran[factor.stage] = factor.mean + factor.sigma * one
            own = np.sqrt(1.0 - SHARED[factor.stage] ** 2) * factor.prior
            other[factor.stage] = factor.shared * ran[factor.stage] + own * two
        return cls(factors, ran, other)

    @classmethod
    def expected(cls, factors: tuple[StageFactor, ...]) -> Errors:
        """One draw: the medians."""
        ran = {factor.stage: np.array([factor.mean]) for factor in factors}
        return cls(factors, ran, {factor.stage: factor.shared * ran[factor.stage] for factor in factors})

    def of(self, evaluation: Evaluation, running: Evaluation) -> dict[str, FloatArray]:
        """Factors of a layout: stages that take as long as in the running one are that stage."""
        found = {}
        for stage in STAGES:
            a, b = (float(getattr(each.seconds, f"{stage}_s").mean()) for each in (evaluation, running))
            alike = bool(np.isclose(a, b, rtol=1e-9))
            found[stage] = np.exp(self.ran[stage] if alike else self.other[stage])
        return found


def scaled_steps(
    context: Context, task: TaskContext, evaluation: Evaluation, factor: dict[str, FloatArray], rows: IntArray
) -> FloatArray:
    """rl_steps of replicates ``rows`` of an evaluation with its stages scaled [s] ``[draws]``."""
    configuration = evaluation.configuration
    scaled = scaled_seconds(context.of(configuration.mode).site, task.architecture, evaluation, factor, rows)
    # the sync stands in the rl_step where nothing overlaps it; elsewhere its factor is left out
    more = 0.0 if MODES[configuration.mode].overlaps else (factor["weight_sync"] - 1.0) * scaled.weight_sync_s
    return np.asarray(scaled.rl_step_s + more)
