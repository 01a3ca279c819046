"""What README and its figure show is what its first command prints and draws."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

import matplotlib
import pytest
from typer.testing import CliRunner

from rlperf.cli.main import app
from tests.conftest import ROOT

FIGURE = ROOT / "docs" / "images" / "default_plan.svg"
AFTER = ("wrote", "not in the files of ")
"""How lines begin that say where the files are and what they lack: README says that in words."""
CREATOR = f"Matplotlib v{matplotlib.__version__},"
"""What draws alike to the last byte; another version moves letters."""


def words(figure: str) -> list[str]:
    """Texts of a figure, in their order."""
    return re.findall(r">([^<>\n]+)</text>", figure)


@pytest.mark.slow
def test_readme_and_its_figure_are_what_the_first_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["plan", "--out", str(tmp_path / "plan")])
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    shown = re.search(r"^```text\n(job .*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == list(takewhile(lambda line: not line.startswith(AFTER), lines))
    drawn, kept = (tmp_path / "plan" / "timeline.svg").read_text(), FIGURE.read_text()
    assert words(kept) and words(drawn) == words(kept), f"copy timeline.svg to {FIGURE.relative_to(ROOT)}"
    assert CREATOR not in kept or drawn == kept, "the words are the same, bars or their lengths are not"
