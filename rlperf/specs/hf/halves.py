"""What reading a Hugging Face configuration passes between its parts: what is given, and a half of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlperf.specs.hf.families import Family
from rlperf.specs.hf.fields import Fields

_SKIPPED = {
    "mixer": ("attention", "self_attn", "self_attention", "attn", "mixer"),
    "mlp": ("mlp", "feed_forward", "ffn", "moe"),
}
"""Words by which a file says that a layer goes without one of its halves."""


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
    by_layer: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Numbers that the file lists with one entry for each layer, and that differ."""

    def apart(self, index: int) -> Fields:
        """What the file states of one layer alone: ``per_layer_config``, by the number of the layer, and lists."""
        stated = self.fields.listed("per_layer_config")
        keys = [f"{index:0{width}d}" for width in range(1, 5)]
        key = next((key for key in keys if isinstance(stated, dict) and key in stated), keys[0])
        found: Any = stated.get(key) if isinstance(stated, dict) else None
        listed = {name: values[index] for name, values in self.by_layer.items()}
        return self.fields.beside({**listed, **(found if isinstance(found, dict) else {})}, "per_layer_config", key)

    def skips(self, index: int, half: str) -> bool:
        """Whether a layer goes without its ``mixer`` or ``mlp`` (Transformers' ``skip`` of a layer)."""
        own = self.apart(index)
        words = own.items("skip")
        known = [word for words in _SKIPPED.values() for word in words]
        unknown = [str(word) for word in words if word not in known]
        if unknown:
            own.note("skip", f"rlperf does not know {', '.join(unknown)}; it knows {', '.join(known)}")
        return any(word in _SKIPPED[half] for word in words)

    @property
    def gated(self) -> bool:
        """Whether feed-forwards have a gate."""
        return self.fields.flag("mlp_gated", default=self.family.gated)


@dataclass(frozen=True)
class ReadHalf:
    """A half of a layer: its kind, and the fields of a `Variant` in which it differs."""

    kind: str
    changes: tuple[tuple[str, Any], ...] = ()


Mixer = tuple[ReadHalf, ...]
"""Mixers that run side by side; almost always one."""
FULL = ReadHalf("full")
NONE = ReadHalf("none")
