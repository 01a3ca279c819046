"""Work that takes long says so on stderr, with and without a terminal."""

from __future__ import annotations

import re
import time
from pathlib import Path

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
    shares = [int(share) for share in re.findall(r"^planning .*: (\d+) %, \d+ s$", said.err, re.MULTILINE)]
    assert len(shares) > 3 and shares == sorted(shares)
    assert "judging" in said.err


def test_one_long_step_is_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "QUIET_S", 0.01)
    with output.progress("planning") as bar:
        bar(0.25, "screening")
        time.sleep(0.2)  # nothing is reported meanwhile
    said = capsys.readouterr().err
    assert said.count("planning screening: 25 %") > 1
    time.sleep(0.05)
    assert capsys.readouterr().err == ""  # and nothing behind the end


def test_quick_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("planning") as bar:
        bar(0.5, "task")
    assert capsys.readouterr().err == ""


def test_a_repair_moves_with_every_change_that_is_tried(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        "data.train_batch_size=16 data.max_prompt_length=512 data.max_response_length=8192 trainer.nnodes=1 "
        "actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
        "actor_rollout_ref.model.enable_gradient_checkpointing=False\n"
    )
    told: list[tuple[float, str]] = []
    found = rlperf.audit_config(script, cluster="dgx_h100", plan=False, report=lambda *said: told.append(said))
    assert found.broken
    mending = [share for share, text in told if text.startswith("what would mend actor_rollout_ref.actor.ppo_micro")]
    assert len(set(mending)) > 2 and mending == sorted(mending) and mending[0] >= 0.25 and mending[-1] < 0.5


@pytest.mark.slow
def test_an_audit_and_a_ranking_move_with_their_parts(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-0.6B "
        "data.train_batch_size=16 data.max_prompt_length=512 data.max_response_length=1024 trainer.nnodes=1 "
        "actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.use_dynamic_bsz=True\n"
    )
    told: list[tuple[float, str]] = []
    rlperf.audit_config(script, cluster="dgx_h100", report=lambda share, text: told.append((share, text)))
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and max(shares) > 0.7
    gains = [share for share, text in told if text.startswith("what would be gained by actor_rollout_ref.")]
    assert len(set(gains)) > 1 and 0.1 <= min(gains) < max(gains) < 0.25  # every change that is judged moves it
    assert any(text.startswith("the best: ") for _, text in told)
    told.clear()
    rlperf.plan_frameworks(frameworks="verl,slime", report=lambda share, text: told.append((share, text)), **JOB)
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and min(shares) < 0.1 and max(shares) > 0.9
    assert {text.partition(":")[0] for _, text in told} == {"verl", "slime"}


def test_sizing_says_how_far_the_plan_of_each_number_of_nodes_is() -> None:
    """A cluster's nodes were named as each began, and nothing until the next."""
    told: list[tuple[float, str]] = []
    job = rlperf.short_job(**{**JOB, "model": "Qwen3-0.6B"})
    rlperf.size_job(job, "step<=1h", most_nodes=2, report=lambda *said: told.append(said))
    assert any(re.search(r"1 node: .*judging", text) for _, text in told)
    assert all(0.0 <= share <= 1.0 for share, _ in told) and len({share for share, _ in told}) > 5
