"""Adaptive pipelines: partition, placement and schedule planned together."""

from rlperf.plan.pipeline.express import beyond_frameworks
from rlperf.plan.pipeline.list_schedule import Policy
from rlperf.plan.pipeline.optimize import PipelinePlan, optimize, passes_within
from rlperf.plan.pipeline.problem import PipelineProblem
from rlperf.plan.pipeline.search import Freedom
from rlperf.plan.pipeline.standard import StandardSchedule, standard_schedules, uniform_partition

__all__ = [
    "Freedom",
    "PipelinePlan",
    "PipelineProblem",
    "Policy",
    "StandardSchedule",
    "beyond_frameworks",
    "optimize",
    "passes_within",
    "standard_schedules",
    "uniform_partition",
]
