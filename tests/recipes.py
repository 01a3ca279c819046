"""Blocks of docs/contributing.md, for the tests that try them as they stand."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def page() -> str:
    """The page."""
    return (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")


def recipe(title: str) -> str:
    """The block with a title."""
    (found,) = re.findall(rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```', page(), re.MULTILINE | re.DOTALL)
    return str(found)
