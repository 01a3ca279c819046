"""What reading a Hugging Face configuration passes between its parts: what is given, and a half of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlperf.specs.hf_families import Family
from rlperf.specs.hf_fields import Fields


@dataclass(frozen=True)
class Given:
    """What is being read: the language part's fields, its family, and the outer configuration around it."""

    fields: Fields
    outer: Fields
    kind: str
    family: Family
    layers: int
    version: str = ""
    """Of the Transformers that wrote the file: a field of the outermost part."""

    def apart(self, index: int) -> Fields:
        """What the file states of one layer alone: ``per_layer_config``, by the number of the layer."""
        stated = self.fields.listed("per_layer_config")
        keys = [f"{index:0{width}d}" for width in range(1, 5)]
        key = next((key for key in keys if isinstance(stated, dict) and key in stated), keys[0])
        found: Any = stated.get(key) if isinstance(stated, dict) else None
        return self.fields.beside(found if isinstance(found, dict) else {}, "per_layer_config", key)


@dataclass(frozen=True)
class ReadHalf:
    """A half of a layer: its kind, and the fields of a `Variant` in which it differs."""

    kind: str
    changes: tuple[tuple[str, Any], ...] = ()


Mixer = tuple[ReadHalf, ...]
"""Mixers that run side by side; almost always one."""
FULL = ReadHalf("full")
NONE = ReadHalf("none")
