"""Whether the old policy is scored: planned, written and read as one, and what a job says of it where it is unusual."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rlperf.api import ask
from rlperf.frameworks.export import export_run
from rlperf.frameworks.imports import import_config, job_of
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.old_policy import usual
from rlperf.frameworks.readback import read_back
from rlperf.frameworks.registry import FRAMEWORKS, adapter_of
from rlperf.frameworks.run import Run
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.search.screen import screen
from rlperf.specs.job import Job
from tests.framework_samples import sample_run, with_values

NEVER, ALWAYS = {"openrlhf", "skyrl"}, {"slime"}
"""Without a key that leaves the pass out while engine and trainer share devices; without one that keeps it."""


def _run(framework: str, scored: bool, updates: int) -> Run:
    """A sampled run with so many updates, colocated, so that no mode decides."""
    random = Random(5)
    run = sample_run(random, framework)
    while run.mode != "colocated" or run.batch.updates < 2 or run.algorithm != "grpo":
        run = sample_run(random, framework)
    mini = run.batch.prompts if updates == 1 else run.batch.mini
    return with_values(run, {"run.old_policy": scored, "batch.mini_batch": mini})


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("scored", [False, True])
def test_one_update_is_read_as_it_was_planned_or_named_as_lost(framework: str, scored: bool) -> None:
    run, adapter, version = _run(framework, scored, 1), adapter_of(framework), key_table(framework).versions[-1]
    phase = export_run(run, adapter, version, "config")
    same = read_back(phase.files, adapter, version).old_policy == scored
    lost = [str(each) for each in phase.emission.limitations if "old_policy" in each.asked]
    assert same != bool(lost)
    assert same == (framework not in (ALWAYS if scored else NEVER))


def _job(tmp_path: Path, words: str) -> Job:
    path = tmp_path / "run.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo data.train_batch_size=64 {words}\n")
    return job_of(import_config([path], "verl"))


VERL = ("actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_mini_batch_size=64 ")  # fmt: skip


def test_a_job_says_what_is_unusual_alone(tmp_path: Path) -> None:
    assert _job(tmp_path, VERL).old_policy is None
    assert _job(tmp_path, VERL + "algorithm.rollout_correction.bypass_mode=True").old_policy is False


def test_pools_of_their_own_go_without_it_in_the_files_of_verl() -> None:
    assert usual("verl", "colocated", "fsdp2", 1)
    assert not usual("verl", "async", "fsdp2", 1)


def test_slime_scores_where_a_batch_has_several_updates() -> None:
    assert usual("slime", "colocated", "megatron", 2)
    assert not usual("slime", "colocated", "megatron", 1)


TWO = {"rlinf": ("colocated", "streaming"), "skyrl": ("colocated", "async")}
"""Frameworks that state in one mode what they cannot in another: how microbatches are cut, the old policy."""


@pytest.mark.parametrize("framework", TWO)
def test_modes_that_are_open_together_are_each_judged_as_alone(framework: str) -> None:
    job = Job.model_validate({
        "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "framework": framework,
        "modes": TWO[framework], "limits": {"staleness": 1},
        "pools": [{"role": "rollout", "layout": {"tensor_parallel": 1}, "settings": {"max_running": 64}}],
        "tasks": [{"name": "t", "workload": "math", "prompts_per_step": 32, "group_size": 4, "mini_batch": 32,
                   "max_prompt_tokens": 1024, "max_response_tokens": 512}],
    })  # fmt: skip
    both = ask(job).context
    task = both.tasks[0]
    demand, judge = task.source.demand(task.batches[0], None, 0), Judge(both, task)
    every = screen(both, task, (demand,)).configurations
    for mode in job.modes:
        alone = ask(job.model_copy(update={"modes": (mode,)})).context
        found = screen(alone, task, (demand,), keep=1).configurations[0]
        assert found in every
        assert judge.evaluate(demand, found).rl_step_s == Judge(alone, task).evaluate(demand, found).rl_step_s
