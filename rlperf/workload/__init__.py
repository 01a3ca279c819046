"""Workloads: PolyTrace as the language of lengths. Reads, models, generates and judges RLVR length workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlperf.workload.lengths import LengthTable, concat

if TYPE_CHECKING:
    from rlperf.workload.fitting import fit_model
    from rlperf.workload.library import PRESETS, load_model, save_model
    from rlperf.workload.model import LengthModel
    from rlperf.workload.readers import read_recording
    from rlperf.workload.records import Recording
    from rlperf.workload.sampling import forecast_lengths, sample_lengths

__all__ = [
    "PRESETS",
    "LengthModel",
    "LengthTable",
    "Recording",
    "concat",
    "fit_model",
    "forecast_lengths",
    "load_model",
    "read_recording",
    "sample_lengths",
    "save_model",
]

_WHERE = {
    "PRESETS": "library",
    "save_model": "library",
    "fit_model": "fitting",
    "forecast_lengths": "sampling",
    "sample_lengths": "sampling",
    "load_model": "library",
    "LengthModel": "model",
    "read_recording": "readers",
    "Recording": "records",
}


def __getattr__(name: str) -> Any:
    """Load what needs pydantic or scipy only when it is asked for."""
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f"rlperf.workload.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'rlperf.workload' has no attribute {name!r}")
