"""Blocks of docs/contributing.md, for the tests that try them as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def page(name: str = "contributing.md") -> str:
    """A page of the documentation."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def recipe(title: str, name: str = "contributing.md") -> str:
    """The block with a title."""
    (found,) = re.findall(rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```', page(name), re.MULTILINE | re.DOTALL)
    return str(found)


def copied_package(folder: Path, *also: str) -> Path:
    """A copy of the package that a recipe may add files to; ``also``: other folders and files of the repository.

    What is compiled goes along: a copy keeps its source's time, so that only what a recipe changes is compiled anew.
    """
    for name in ("rlperf", *also):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copy(source, folder / name)
    (folder / "hwprofiles").symlink_to(ROOT / "hwprofiles")
    return folder / "rlperf"


def run_in(folder: Path, *words: str, expected: Sequence[int] = (0,)) -> str:
    """What python says when it runs with the package of ``folder``."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode in expected, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
