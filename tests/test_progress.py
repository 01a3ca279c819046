"""Work that takes long says so on stderr, with and without a terminal."""

from __future__ import annotations

import re
import time

import pytest

import rlperf
from rlperf.cli import output

JOB = {"model": "Qwen3-4B", "gpus": 8, "max_response": 1024, "prompts": 16, "group": 2}


def test_without_a_terminal_a_line_is_printed_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "QUIET_S", 0.01)
    with output.progress("planning") as bar:
        rlperf.plan_job(report=bar, **JOB)
    said = capsys.readouterr()
    assert said.out == ""
    shares = [int(share) for share in re.findall(r"^planning .*: (\d+)%, \d+ s$", said.err, re.MULTILINE)]
    assert len(shares) > 3 and shares == sorted(shares)
    assert "judging" in said.err


def test_one_long_step_is_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "QUIET_S", 0.01)
    with output.progress("planning") as bar:
        bar(0.25, "screening")
        time.sleep(0.2)  # nothing is reported meanwhile
    said = capsys.readouterr().err
    assert said.count("planning screening: 25%") > 1
    time.sleep(0.05)
    assert capsys.readouterr().err == ""  # and nothing behind the end


def test_quick_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("planning") as bar:
        bar(0.5, "task")
    assert capsys.readouterr().err == ""
