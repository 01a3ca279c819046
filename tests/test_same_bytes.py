"""The same job gives the same files: whatever the hash seed, the number of threads, the day and the load."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """\
name: two
architecture: Qwen3-30B-A3B
cluster: dgx_h100
nodes: 2
trainer_backends: [megatron]
pools: [{role: trainer, layout: {tensor_parallel: [1, 2], context_parallel: 1, pipeline_parallel: 2}}]
tasks:
  - {name: math, workload: math, prompts_per_step: 32, group_size: 4, max_prompt_tokens: 512, max_response_tokens: 2048}
"""


COMMANDS = """\
from rlperf.cli.main import app

for words in (
    ["plan", "job.yaml", "--out", "plan"], ["simulate", "job.yaml", "--out", "rollout"],
    ["predict", "job.yaml", "--figure", "step.svg"], ["report", "plan"],
):
    assert not app(words, standalone_mode=False), words
"""
"""One process for all four: hash seed and threads are a process's."""


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_two_hash_seeds_and_two_numbers_of_threads(tmp_path: Path) -> None:
    found = []
    for seed, threads in (("0", "1"), ("4711", "2")):
        folder = tmp_path / seed
        folder.mkdir()
        (folder / "job.yaml").write_text(JOB)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, "POLARS_MAX_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", COMMANDS], cwd=folder, env=environment, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(digests(folder))
    assert {"plan/plan.yaml", "plan/timeline.svg", "plan/report.html", "step.svg"} <= set(found[0])
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_pipeline_line_of_a_plan_does_not_ask_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is so busy that every search's time is over at once, the line is still the same."""
    from rlperf.api import ask
    from rlperf.plan.pipeline import search
    from rlperf.plan.planner import plan_job
    from rlperf.specs.job import Job
    from rlperf.specs.reader import parse_document, validate

    question = ask(validate(parse_document(JOB, "job.yaml"), Job))

    def lines() -> list[str]:
        plan = plan_job(question.context, facts=question.facts)
        return [line for phase in plan.phases for line in (*phase.binds, *phase.predicted.advice) if "pipeline" in line]

    before, now = lines(), iter(range(0, 10**9, 1000))
    monkeypatch.setattr(search.time, "monotonic", lambda: next(now))
    assert lines() == before != []
