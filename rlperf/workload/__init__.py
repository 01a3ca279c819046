"""Workloads: PolyTrace as the language of lengths. Reads, models, generates and judges RLVR length workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlperf.workload.lengths import LengthTable, concat

if TYPE_CHECKING:
    from rlperf.workload.library import PRESETS, load_model
    from rlperf.workload.model import LengthModel
    from rlperf.workload.readers import read_polytrace, read_recording
    from rlperf.workload.records import Recording

__all__ = [
    "PRESETS",
    "LengthModel",
    "LengthTable",
    "Recording",
    "concat",
    "load_model",
    "read_polytrace",
    "read_recording",
]

_WHERE = {
    "PRESETS": "library",
    "load_model": "library",
    "LengthModel": "model",
    "read_polytrace": "readers",
    "read_recording": "readers",
    "Recording": "records",
}


def __getattr__(name: str) -> Any:
    """Load what needs pydantic or scipy only when it is asked for."""
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f"rlperf.workload.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'rlperf.workload' has no attribute {name!r}")
