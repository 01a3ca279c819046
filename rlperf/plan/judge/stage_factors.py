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

Stages that a log does not time by themselves its rl_steps tell together: r, the one factor of all of them with which
the mode's rl_step, the timed stages as they were timed, takes what was logged. With :math:`w_i` how much of a change
of r each stands for, :math:`r = \sum_i w_i e_i` and noise u (how far r moves where an rl_step is a little longer or
shorter: without bound where stages are hidden), so that of each :math:`m_i = r / w_i` with the others as its noise,
:math:`v_i = (u^2 + \sum_{j \ne i} w_j^2 \sigma_j^2) / w_i^2`.

That holds of errors that predictions have. Where m is more than `SURPRISE` of its standard deviations
:math:`\sqrt{\sigma^2 + v}` off, something else is the matter (a node, a setting), and no layout is known to be free of
it: then :math:`\rho = 1`, and all layouts are expected to take as many times their seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlperf.layout import FloatArray, IntArray
from rlperf.plan.judge.evaluate import Evaluation, site_of
from rlperf.plan.judge.scaled import scaled_seconds
from rlperf.plan.question.context import Context, TaskContext
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
REACH, HALVINGS = 8.0, 40
"""Logarithm of the largest factor that is looked for, and halvings: 3000 times, to a hundred-millionth."""


@dataclass(frozen=True)
class StageFactor:
    """Measured over predicted of one stage, as the log and the calibration have it together.

    Attributes
    ----------
    log_ratio, noise, rl_steps : median of ln(measured / predicted), its scatter per rl_step, and the rl_steps used
    prior : standard deviation of the calibration, sigma [1]
    by_total : the log does not time the stage: its rl_steps tell of it
    """

    stage: str
    log_ratio: float
    noise: float
    rl_steps: int
    prior: float
    by_total: bool = False

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


def stage_factors(context: Context, task: TaskContext, recorded: Evaluation, log: StepLog) -> tuple[StageFactor, ...]:
    """Factors of the layout that ran, by stage.

    Parameters
    ----------
    recorded : the running configuration judged on the lengths of ``log``'s rl_steps, one replicate each
    """
    sigmas = stage_sigmas(context.site, recorded.trainer, recorded.configuration.mode)
    framework = context.trainers[int(recorded.trainer.backend[0])].framework
    assumed = framework.rerun_spread or NOISE
    traits, due = MODES[recorded.configuration.mode], recorded.seconds
    held = log.rollout_holds_sync(traits.shares_devices)
    found, timed = [], dict[str, FloatArray]()
    for stage in STAGES:
        measured: FloatArray = getattr(log, f"{stage}_s")
        predicted: FloatArray = getattr(due, f"{stage}_s")
        if held and stage == "rollout":
            predicted = predicted + due.weight_sync_s + due.offload_s
        # where rollout and training overlap, a log's rollout is what the trainer waited, not what the engines took
        hidden = stage == "rollout" and traits.overlaps
        known = np.isfinite(measured) & (measured > 0) & (predicted > 0) & (not hidden)
        ratios = np.log(measured[known] / predicted[known])
        n = int(ratios.size)
        median = float(np.median(ratios)) if n else 0.0
        scatter = 1.4826 * float(np.median(np.abs(ratios - median))) if n else 0.0
        freedom = max(n - 1, 0)
        noise = float(np.sqrt((NOISE_WEIGHT * assumed**2 + freedom * scatter**2) / (NOISE_WEIGHT + freedom)))
        found.append(StageFactor(stage, median, noise, n, float(getattr(sigmas, f"{stage}_s"))))
        if n:
            timed[stage] = np.where(known, measured / np.where(predicted > 0, predicted, 1.0), np.nan)
    if held and "rollout" in timed:
        timed["weight_sync"] = timed["rollout"]
    silent = [each.stage for each in found if not each.rl_steps and each.stage not in timed]
    told = _told_by_totals(_Totals(context, task, recorded, log.rl_step_s, timed), found, silent)
    return tuple(told.get(each.stage, each) for each in found)


@dataclass(frozen=True, eq=False)
class _Totals:
    """Logged rl_steps, and what the mode makes of the stages: those that were timed as they were timed.

    ``timed``: measured over predicted, by stage ``[rl_steps]``
    """

    context: Context
    task: TaskContext
    recorded: Evaluation
    logged_s: FloatArray
    timed: dict[str, FloatArray]

    def steps_s(self, factor: dict[str, FloatArray]) -> FloatArray:
        """rl_steps with these factors of the stages that were not timed, in the logarithm [s] ``[rl_steps]``."""
        scaled = {stage: np.exp(values) for stage, values in factor.items()}
        rows = np.arange(len(self.logged_s))
        return scaled_steps(self.context, self.task, self.recorded, {**self.timed, **scaled}, rows)

    def solved(self, silent: list[str], logged_s: FloatArray) -> FloatArray:
        """Logarithm of the one factor of the silent stages with which rl_steps take so long; ``-REACH`` where none."""
        low, high = np.full(len(logged_s), -REACH), np.full(len(logged_s), REACH)
        for _ in range(HALVINGS):
            middle = (low + high) / 2.0
            short = self.steps_s(dict.fromkeys(silent, middle)) < logged_s
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        return low


def _told_by_totals(totals: _Totals, found: list[StageFactor], silent: list[str]) -> dict[str, StageFactor]:
    """Stages that the log does not time, from what its rl_steps leave for them together.

    An rl_step's noise is `NOISE` however many there are: what else stands in one is known no better.
    """
    said = np.isfinite(totals.logged_s) & np.all([np.isfinite(each) for each in totals.timed.values()], axis=0)
    if not silent or not said.any():
        return {}
    common = totals.solved(silent, totals.logged_s)
    said &= common > -REACH
    at = dict.fromkeys(silent, common)
    moved = {
        stage: totals.steps_s({**at, stage: common + NOISE}) - totals.steps_s({**at, stage: common - NOISE})
        for stage in silent
    }
    whole = np.sum([*moved.values()], axis=0)
    said &= whole > 0.0
    if not (n := int(said.sum())):
        return {}
    share = {stage: float((each[said] / whole[said]).mean()) for stage, each in moved.items()}
    ratio = float(np.median(common[said]))
    reach = [totals.solved(silent, totals.logged_s * np.exp(sign * NOISE))[said] for sign in (-1.0, 1.0)]
    own = float(np.median(reach[1] - reach[0])) / 2.0
    priors = {each.stage: each.prior for each in found}
    spread = own**2 + sum((share[stage] * priors[stage]) ** 2 for stage in silent)

    def told(each: StageFactor) -> StageFactor:
        w = share[each.stage]
        noise = float(np.sqrt((spread / w**2 - each.prior**2) * n * 2.0 / np.pi))
        return replace(each, log_ratio=ratio / w, noise=noise, rl_steps=n, by_total=True)

    return {each.stage: told(each) for each in found if share.get(each.stage, 0.0) > 0.0}


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
    scaled = scaled_seconds(site_of(context, configuration), task.architecture, evaluation, factor, rows)
    # the sync stands in the rl_step where nothing overlaps it; elsewhere its factor is left out
    more = 0.0 if MODES[configuration.mode].overlaps else (factor["weight_sync"] - 1.0) * scaled.weight_sync_s
    return np.asarray(scaled.rl_step_s + more)
