"""What was meant by a field that no form has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from rlperf.errors import did_you_mean, nearest

_TOP = "the top"


def meant_field(location: Sequence[str | int], spec: type[BaseModel]) -> str | None:
    """What was meant by an unknown field: what its form calls it, another place, or what is written like it, the
    fields beside it first."""
    forms, word = _forms(spec), str(location[-1])
    parent = next((part for part in reversed(location[:-1]) if isinstance(part, str)), _TOP)
    beside = [form for form, under in forms if under == parent]
    called = (getattr(form, "other_words", {}).get(word) for form in beside)
    if meant := next(filter(None, called), None):
        return f"here it is {meant}"
    if here := dict.fromkeys(under for form, under in forms if word in form.model_fields):
        return f"it belongs to {' or '.join(here)}"
    if near := did_you_mean(word, sorted(name for form in beside for name in form.model_fields)):
        return near
    elsewhere = nearest(word, sorted(name for form, _ in forms for name in form.model_fields))
    places = " or ".join(dict.fromkeys(under for form, under in forms if elsewhere in form.model_fields))
    return f"did you mean {elsewhere}? it belongs to {places}" if elsewhere else None


def _forms(spec: type[BaseModel]) -> list[tuple[type[BaseModel], str]]:
    """Every form reachable from ``spec``, and the field that it stands under."""
    pending: list[tuple[Any, str]] = [(spec, _TOP)]
    seen: dict[tuple[Any, str], None] = {}
    while pending:
        kind, parent = pending.pop()
        if (kind, parent) in seen:
            continue
        seen[kind, parent] = None
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            pending.extend((field.annotation, name) for name, field in kind.model_fields.items())
        else:
            pending.extend(
                (arg, parent)
                for arg in getattr(kind, "__args__", ())
                if isinstance(arg, type) or hasattr(arg, "__args__")
            )
    return [(kind, parent) for kind, parent in seen if isinstance(kind, type) and issubclass(kind, BaseModel)]
