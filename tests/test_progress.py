"""Work that takes long says so on stderr, with and without a terminal."""

from __future__ import annotations

import re

import pytest

import rlperf
from rlperf.cli import output

JOB = {"model": "Qwen3-4B", "gpus": 8, "max_response": 1024, "prompts": 16, "group": 2}


def test_without_a_terminal_a_line_is_printed_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "QUIET_S", 0.0)
    with output.progress("planning") as bar:
        rlperf.plan_job(report=bar, **JOB)
    said = capsys.readouterr()
    assert said.out == ""
    shares = [int(share) for share in re.findall(r"^planning .*: (\d+)%$", said.err, re.MULTILINE)]
    assert len(shares) > 3 and shares == sorted(shares)
    assert "screening colocated on 8 devices" in said.err and "judging" in said.err


def test_quick_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("planning") as bar:
        bar(0.5, "task")
    assert capsys.readouterr().err == ""
