"""A cache is judged by what one request holds: prompt and response at their most, what tools return in it."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlperf
from rlperf.api import ask
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.imports import Imported, import_config, job_of
from rlperf.plan.judge.engine_cache import cache_shortage
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.predict import evaluate_job

VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=32 \\
    data.max_prompt_length=2048 data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.max_num_seqs=64 actor_rollout_ref.rollout.n=4 trainer.nnodes=1 \\
    trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.gpu_memory_utilization={fraction}
"""
LONGEST, WORKLOAD = 2048 + 1024, "searching"


def imported(folder: Path, fraction: float) -> Imported:
    script = folder / "run.sh"
    script.write_text(VERL.format(fraction=fraction))
    return import_config([script], "verl")


def judged(folder: Path, fraction: float) -> Evaluation:
    job = job_of(imported(folder, fraction), cluster="dgx_a100", workload=WORKLOAD)
    return evaluate_job(ask(job).context)[0]


def holding(folder: Path, tokens: float) -> float:
    """The share of memory whose cache holds so many tokens."""
    low, high = (float(judged(folder, share).memory.kv_tokens[0]) for share in (0.3, 0.4))
    return 0.3 + 0.1 * (tokens - low) / (high - low)


def test_a_cache_that_holds_no_trajectory_is_short(tmp_path: Path) -> None:
    """Of a trajectory what searches return counts as response: verl ends it there."""
    request = judged(tmp_path, 0.4).demand.request_tokens
    assert request == LONGEST
    fraction = holding(tmp_path, request - 200.0)
    evaluation, given = judged(tmp_path, fraction), imported(tmp_path, fraction)
    assert 0.0 < float(evaluation.memory.kv_tokens[0]) < request - 100
    assert f"a request up to {request:,.0f}" in cache_shortage(evaluation)
    found = audit(given, cluster="dgx_a100", workload=WORKLOAD, plan=False, gains=False)
    assert found.predicted is not None and not found.predicted.fits
    starved = [each for each in found.findings if each.rule == "kv_starvation"]
    assert [each.severity for each in starved] == ["error"]
    assert f"less than one sequence of {request + 32:,.0f}" in starved[0].message


@pytest.mark.parametrize(("more", "short"), [(30.0, True), (64.0, False)])
def test_what_the_screen_refuses_and_what_is_said_to_fit_are_one(more: float, short: bool, tmp_path: Path) -> None:
    """Two blocks beyond a request: less is refused by the screen, and so does a prediction say."""
    request = judged(tmp_path, 0.4).demand.request_tokens
    evaluation = judged(tmp_path, holding(tmp_path, request + more))
    assert bool(cache_shortage(evaluation)) == short
    job = job_of(imported(tmp_path, holding(tmp_path, request + more)), cluster="dgx_a100", workload=WORKLOAD)
    assert rlperf.predict_job(job).fits != short


@pytest.mark.parametrize(("fraction", "told"), [(0.26, "cannot run"), (0.6, "times as fast")])
def test_a_gain_is_told_beside_a_rollout_that_runs(fraction: float, told: str) -> None:
    """Beside bf16 weights that left no room for a request fp8 was told 7.80 times as fast, where plans say 1.35."""
    settings = {"memory_fraction": fraction, "rollout_dtype": "fp8", "max_running": 16}
    task = {"name": "t", "workload": "math", "prompts_per_step": 16, "group_size": 4, "max_response_tokens": 4096}
    job = {
        "architecture": "Qwen3-8B",
        "cluster": "dgx_h100",
        "tasks": [task],
        "pools": [{"role": "rollout", "layout": {"tensor_parallel": 1}, "settings": settings}],
    }
    (line,) = (gain for gain in rlperf.predict_job(job).gains if "fp8 weights" in gain)
    assert told in line
