"""Variants of one test: those named are run by default, all others with ``-m slow``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def slow_but(variants: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of a test, of which ``quick`` are run by default; pages go by their name without its ending."""
    every = {each.stem if isinstance(each, Path) else str(each): each for each in variants}
    missing = {str(each) for each in quick} - set(every)
    assert not missing, f"no variant {', '.join(sorted(missing))}"
    left_out = set(every) - {str(each) for each in quick}
    return [pytest.param(each, id=name, marks=[pytest.mark.slow] * (name in left_out)) for name, each in every.items()]
