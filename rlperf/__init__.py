"""rlperf: analytical performance model and parallel-strategy optimizer for RLVR.

Names are imported when they are first used, so that ``import rlperf`` costs milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlperf.version import __version__ as __version__

if TYPE_CHECKING:
    from rlperf.alternatives import what_if
    from rlperf.api import plan_job, predict_job, size_job, sweep_job
    from rlperf.comparing import compare_jobs
    from rlperf.errors import InfeasibleError, RlperfError, SpecError
    from rlperf.explaining import explain
    from rlperf.files import audit_config, calibrate_logs, export_plan, import_config, validate_measurements
    from rlperf.layout import Layout
    from rlperf.plan.answer.plan import Plan, Prediction
    from rlperf.plan.question.context import read_job
    from rlperf.ranking import plan_frameworks
    from rlperf.replanning import replan_job
    from rlperf.simulating import simulate_job
    from rlperf.specs.architecture import Architecture
    from rlperf.specs.cluster import Cluster
    from rlperf.specs.job import Job
    from rlperf.specs.profiles import load_architecture, load_cluster
    from rlperf.specs.short_job import short_job

_HOME = {
    "Architecture": "rlperf.specs.architecture",
    "Cluster": "rlperf.specs.cluster",
    "InfeasibleError": "rlperf.errors",
    "Job": "rlperf.specs.job",
    "Layout": "rlperf.layout",
    "Plan": "rlperf.plan.answer.plan",
    "Prediction": "rlperf.plan.answer.plan",
    "RlperfError": "rlperf.errors",
    "SpecError": "rlperf.errors",
    "audit_config": "rlperf.files",
    "calibrate_logs": "rlperf.files",
    "compare_jobs": "rlperf.comparing",
    "explain": "rlperf.explaining",
    "export_plan": "rlperf.files",
    "import_config": "rlperf.files",
    "load_architecture": "rlperf.specs.profiles",
    "load_cluster": "rlperf.specs.profiles",
    "plan_frameworks": "rlperf.ranking",
    "plan_job": "rlperf.api",
    "predict_job": "rlperf.api",
    "read_job": "rlperf.plan.question.context",
    "replan_job": "rlperf.replanning",
    "short_job": "rlperf.specs.short_job",
    "simulate_job": "rlperf.simulating",
    "size_job": "rlperf.api",
    "sweep_job": "rlperf.api",
    "validate_measurements": "rlperf.files",
    "what_if": "rlperf.alternatives",
}

__all__ = [
    "Architecture",
    "Cluster",
    "InfeasibleError",
    "Job",
    "Layout",
    "Plan",
    "Prediction",
    "RlperfError",
    "SpecError",
    "audit_config",
    "calibrate_logs",
    "compare_jobs",
    "explain",
    "export_plan",
    "import_config",
    "load_architecture",
    "load_cluster",
    "plan_frameworks",
    "plan_job",
    "predict_job",
    "read_job",
    "replan_job",
    "short_job",
    "simulate_job",
    "size_job",
    "sweep_job",
    "validate_measurements",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlperf' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
