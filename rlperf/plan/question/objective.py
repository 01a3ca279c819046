"""The value that a plan minimises, of one rl_step or of many candidates: the job's row of `OBJECTIVES`."""

from __future__ import annotations

from dataclasses import dataclass

from rlperf.layout import FloatArray
from rlperf.plan.question.context import Context
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.objectives import OBJECTIVES, Spent


@dataclass(frozen=True)
class Usage:
    """What an rl_step occupies: devices, and USD per second where prices are stated."""

    devices: int
    usd_per_s: float | None


def objective_of(context: Context, demand: Demand, usage: Usage, rl_step_s: FloatArray) -> FloatArray:
    """Value to minimise per rl_step, in the unit of the job's objective ``[candidates]``."""
    spent = Spent(rl_step_s, usage.devices, usage.usd_per_s, demand.useful_tokens)
    return OBJECTIVES[context.job.objective.minimize].value(spent)
