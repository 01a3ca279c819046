"""Sweeps: any field of a job over lists and ranges, point by point, on one machine or a cluster; resumable."""

from __future__ import annotations

from rlperf.sweep.result import SweepResult, read_result
from rlperf.sweep.run import run_sweep
from rlperf.sweep.spec import Checked, Sweep, check_sweep, read_sweep

__all__ = ["Checked", "Sweep", "SweepResult", "check_sweep", "read_result", "read_sweep", "run_sweep"]
