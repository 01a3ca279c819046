"""Scoring is cut as it is stated: by its own tokens or its own count, whatever way the actor's microbatches are cut."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from rlperf.api import ask
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.export import export_run
from rlperf.frameworks.imports import import_config, job_of
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.registry import adapter_of, split_name
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.predict import evaluate_job
from rlperf.sim.rl_step.trainer_stage import closed_training
from rlperf.specs.job import Job
from tests.framework_samples import sample_run, with_values

LONGEST = 1024 + 8192


def job(framework: str = "verl", microbatch: int | None = None, **settings: object) -> Job:
    """Everything pinned but how scoring is cut; 32 sequences on each of 8 ranks."""
    task = {
        "name": "math", "workload": "math", "prompts_per_step": 64, "group_size": 4, "mini_batch": 16,
        "max_prompt_tokens": 1024, "max_response_tokens": 8192,
    }  # fmt: skip
    trainer = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "activation_recompute": "full"}
    counted = {"token_budget": 20480} if microbatch is None else {}
    pools = [
        {"role": "rollout", "layout": {"tensor_parallel": 1}, "settings": {"memory_fraction": 0.6, "max_running": 64}},
        {"role": "trainer", "layout": {**trainer, "microbatch": microbatch},
         "settings": {"backend": "megatron", "parked": True, **counted, **settings}},
    ]  # fmt: skip
    return Job.model_validate({
        "architecture": "Qwen2.5-1.5B", "cluster": "dgx_h100", "nodes": 1, "framework": framework, "tasks": [task],
        "pools": pools,
    })  # fmt: skip


def judged(asked: Job) -> Evaluation:
    return evaluate_job(ask(asked).context)[0]


@pytest.mark.parametrize("count", [1, 8, 32])
def test_a_count_of_its_own_cuts_scoring_beside_a_token_budget(count: int) -> None:
    """Judge and screen cut 32 sequences into 32 / count microbatches, as beside a count; training keeps its budget."""
    plain, own = judged(job()), judged(job(scoring_microbatch=count))
    assert np.all(own.scored.batches.count == 32 // count)
    assert np.array_equal(own.trainer.scoring_s, judged(job(microbatch=1, scoring_microbatch=count)).trainer.scoring_s)
    assert np.array_equal(own.updated.batches.count, plain.updated.batches.count)
    context = ask(job(scoring_microbatch=count)).context
    settings, layout = context.job.pool("trainer").settings.filled(), own.trainer.layout.take([0])
    screened = closed_training(
        context.site, own.stack, context.tasks[0].architecture, own.demand, layout, settings, np.array([20480])
    )[1]
    assert float(screened[0]) == pytest.approx(float(own.trainer.scoring_s.mean()), rel=0.05)
    stated = own.configuration.pool("trainer").settings
    assert (stated.scoring_microbatch, stated.scoring_token_budget) == (count, None)


def test_memory_holds_as_many_as_are_scored_at_once() -> None:
    """Up to two of the longest, and all of a rank whatever allows more; less than training holds adds nothing."""
    one, two, all_, more = (float(judged(job(scoring_microbatch=n)).held.peak[0]) for n in (1, 2, 32, 512))
    plain, twice, any_ = (
        float(judged(job(scoring_token_budget=n)).held.peak[0]) for n in (20480, 2 * LONGEST, 512 * LONGEST)
    )
    assert one == plain == two == twice
    assert 1.2 * plain < all_ == more == any_


def test_a_stated_budget_goes_before_a_count() -> None:
    both = judged(job(scoring_token_budget=40960, scoring_microbatch=1))
    alone = judged(job(scoring_token_budget=40960))
    assert np.array_equal(both.trainer.scoring_s, alone.trainer.scoring_s)


def test_tokens_of_its_own_cut_scoring_beside_a_count() -> None:
    counted, own = judged(job(microbatch=1)), judged(job(microbatch=1, scoring_token_budget=20480))
    assert np.all(counted.scored.batches.count == 32)
    assert np.array_equal(own.scored.batches.count, judged(job()).scored.batches.count)
    assert np.array_equal(own.updated.batches.count, counted.updated.batches.count)


def test_a_count_is_tokens_where_the_bins_of_all_ranks_are_dealt_out_together() -> None:
    """NeMo-RL's logprob_mb_tokens is its longest sequence times logprob_batch_size."""
    count = judged(job("nemo_rl", scoring_microbatch=4))
    tokens = judged(job("nemo_rl", scoring_token_budget=4 * LONGEST))
    assert np.array_equal(count.trainer.scoring_s, tokens.trainer.scoring_s)


VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 \\
    data.max_prompt_length=1024 data.max_response_length=8192 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \\
    actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=8 trainer.nnodes=1 """
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
TOKENS = f"{A}use_dynamic_bsz=True {A}ppo_max_token_len_per_gpu=20480 "


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        (f"{TOKENS}{R}log_prob_use_dynamic_bsz=False {R}log_prob_micro_batch_size_per_gpu=8", 4),
        (f"{TOKENS}{R}log_prob_use_dynamic_bsz=False {R}log_prob_micro_batch_size=64", 4),
        (f"{A}ppo_micro_batch_size_per_gpu=1 {R}log_prob_use_dynamic_bsz=True "
         f"{R}log_prob_max_token_len_per_gpu={32 * LONGEST}", 1),
        (f"{TOKENS}{R}log_prob_max_token_len_per_gpu={32 * LONGEST} {R}log_prob_micro_batch_size_per_gpu=1", 1),
    ],
)  # fmt: skip
def test_verl_scores_as_its_own_switch_says(keys: str, count: int, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(VERL + keys + "\n")
    read = job_of(import_config([script], "verl==0.6"), cluster="dgx_h100")
    assert np.all(judged(read).scored.batches.count == count)


@pytest.mark.parametrize("framework", ["openrlhf", "slime", "areal", "skyrl", "nemo_rl", "verl==0.6"])
def test_files_say_the_count_or_name_it_as_lost(framework: str) -> None:
    name, asked = split_name(framework)
    version = key_table(name).version(asked)
    values = {
        "trainer.token_budget": 20480, "trainer.scoring_token_budget": None, "trainer.scoring_microbatch": 7,
        "trainer.packing": True, "run.mode": "colocated",
    }  # fmt: skip
    run = with_values(sample_run(Random(3), name, version), values)
    phase = export_run(run, adapter_of(name), version, "config")
    lost = [each.asked for each in phase.emission.limitations if "scoring" in each.asked]
    said = {setting.key: setting.value for setting in phase.emission.settings}
    if name == "verl":
        assert (said[R + "log_prob_use_dynamic_bsz"], said[R + "log_prob_micro_batch_size_per_gpu"]) == (False, 7)
    if name == "nemo_rl":
        assert said["policy.sequence_packing.logprob_mb_tokens"] == 7 * run.batch.longest_tokens
    assert lost == ([] if name in ("nemo_rl", "verl") else ["scoring in microbatches of 7 sequences"])


def test_verl_from_0_8_takes_one_way_for_both(tmp_path: Path) -> None:
    """Its workers assert it; those of before cut each as it says."""
    script = tmp_path / "run.sh"
    script.write_text(f"{VERL}{TOKENS}{R}log_prob_use_dynamic_bsz=False {R}log_prob_micro_batch_size_per_gpu=8\n")
    wrong = {
        version: [f.rule for f in audit(import_config([script], f"verl=={version}"), plan=False).findings]
        for version in ("0.6", "0.7", "0.8", "0.9")
    }
    assert {version for version, rules in wrong.items() if "dynamic_agree" in rules} == {"0.8", "0.9"}


def test_memory_that_scoring_alone_exceeds_is_given_fewer_sequences(tmp_path: Path) -> None:
    script, key = tmp_path / "run.sh", f"{R}log_prob_micro_batch_size_per_gpu"
    fused = "actor_rollout_ref.model.use_fused_kernels=True"
    script.write_text(
        f"{VERL}{TOKENS}{fused} {R}log_prob_use_dynamic_bsz=False {key}=64\n".replace("1.5B", "7B").replace(
            "rollout.n=4", "rollout.n=16"
        )
    )
    found = audit(import_config([script], "verl==0.6"), cluster="dgx_h100", plan=False).findings
    trainer = next(each for each in found if each.rule == "out_of_memory" and each.role == "trainer")
    fewer = trainer.settings[key]
    assert trainer.settings == {key: fewer, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": fewer}
    assert fewer in (8, 16, 32)
