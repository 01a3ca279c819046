"""What every form of a file is: frozen, and without fields that nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A form that cannot be changed, and that refuses a field it does not have and a number that is none."""

    # a plan reads few of the forms: each builds its validators when it first reads a file
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
    other_words: ClassVar[Mapping[str, str]] = {}
    """What is written elsewhere for a field of this form, and the field in words."""
