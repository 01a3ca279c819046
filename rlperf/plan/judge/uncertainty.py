r"""Intervals of an rl_step: errors of the stages, of the framework around them, and of the lengths drawn.

Stage errors are log-normal; those of different stages are independent. To first order

.. math:: \sigma^2 = \sum_s w_s^2 \sigma_s^2 + \sigma_f^2 + \sigma_r^2 + \sigma_l^2

with :math:`w_s` the stage's share of the rl_step, :math:`\sigma_s = \ln(high_s / low_s) / (2 z)` of its calibration,
:math:`\sigma_f` of the framework's left-out rl_steps, :math:`\sigma_r` of reruns of one setup, :math:`\sigma_l` of the
mean over the rl_steps drawn, z = 1.645. ``low`` and ``high`` are the 5th and 95th percentile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.layout import FloatArray
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.question.context import Context
from rlperf.sim.rl_step.stage_seconds import StageSeconds

Z = 1.6448536269514722
"""Standard normal quantile of 95 %."""
OWN_SHARE = 0.5
"""Share of a stage's calibration error that belongs to the layout, not to device and software: judged, unmeasured."""


@dataclass(frozen=True)
class StageSigmas:
    """Standard deviation of ln(measured / predicted) of each stage [1]."""

    rollout_s: float
    scoring_s: float
    training_s: float
    weight_sync_s: float
    rest: float


def log_sigma(low: float, high: float) -> float:
    """Standard deviation of the logarithm from a 5th and 95th percentile.

    >>> round(log_sigma(0.5, 2.0), 3)
    0.421
    """
    return float(np.log(high / low) / (2.0 * Z))


def stage_sigmas(context: Context, evaluation: Evaluation) -> StageSigmas:
    """Spreads from the calibrations in use."""
    trainer = context.trainers[int(evaluation.trainer.backend[0])]
    spread = context.rollout_hardware.calibration.spread
    sync = trainer.framework.weight_sync[0].provenance
    training = log_sigma(float(evaluation.trainer.low[0]), float(evaluation.trainer.high[0]))
    return StageSigmas(
        rollout_s=log_sigma(spread.low, spread.high),
        scoring_s=training,
        training_s=training,
        weight_sync_s=log_sigma(sync.low, sync.high),
        rest=log_sigma(trainer.framework.step_spread.low, trainer.framework.step_spread.high) / 2.0,
    )


def step_sigma(context: Context, evaluation: Evaluation) -> float:
    """Standard deviation of ln(rl_step) (symbols: module docstring)."""
    sigmas, seconds = stage_sigmas(context, evaluation), evaluation.seconds
    step = evaluation.rl_step_s
    framework = context.trainers[int(evaluation.trainer.backend[0])].framework
    total = sum(
        (float(getattr(seconds, name).mean()) / step * getattr(sigmas, name)) ** 2
        for name in ("rollout_s", "scoring_s", "training_s", "weight_sync_s")
    )
    drawn = seconds.rl_step_s
    lengths = float(np.std(drawn, ddof=1) / step) if len(drawn) > 1 else 0.0
    total += framework.rerun_spread**2 + lengths**2
    other = sum(
        float(getattr(seconds, name).mean()) for name in ("data_movement_s", "offload_s", "other_s", "reward_s")
    )
    return float(np.sqrt(total + (other / step * sigmas.rest) ** 2))


def interval(context: Context, evaluation: Evaluation) -> tuple[float, float]:
    """5th and 95th percentile of the rl_step [s]."""
    spread = float(np.exp(Z * step_sigma(context, evaluation)))
    return evaluation.rl_step_s / spread, evaluation.rl_step_s * spread


def distinguishable(context: Context, first: Evaluation, second: Evaluation) -> bool:
    """Whether the intervals of the *difference* of two candidates leave out zero.

    Both candidates run on the same rl_steps, device and software, so what their stages share cancels; a stage that
    both run alike adds nothing. What is left is the layouts' own share of the calibration error.
    """
    sigmas = stage_sigmas(context, first)
    variance = 0.0
    for name in ("rollout_s", "scoring_s", "training_s", "weight_sync_s"):
        a, b = _mean(first.seconds, name), _mean(second.seconds, name)
        sigma = getattr(sigmas, name)
        if not np.isclose(a, b, rtol=1e-9):
            variance += (sigma * OWN_SHARE) ** 2 * (a**2 + b**2) + (sigma * (a - b)) ** 2
    drawn: FloatArray = first.seconds.rl_step_s - second.seconds.rl_step_s
    if len(drawn) > 1:
        variance += float(np.var(drawn, ddof=1) / len(drawn))
    return bool(abs(first.rl_step_s - second.rl_step_s) > Z * np.sqrt(variance))


def _mean(seconds: StageSeconds, name: str) -> float:
    return float(getattr(seconds, name).mean())
