"""Batches that are trained on several times (ppo_epochs, max_epochs, num_iterations): seconds, passes, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlperf import plan_job, predict_job
from rlperf.errors import SpecError
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.export import plan_texts
from rlperf.frameworks.imports import import_config
from rlperf.plan.answer.plan import Prediction
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.question.context import resolve
from rlperf.plan.search.screen import screen
from rlperf.sim.rl_step.rollout_counted import SCREENED_RL_STEPS
from rlperf.specs.job import Job

LAUNCHES = {
    "verl==0.9": ("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B {}={}",
                  "actor_rollout_ref.actor.ppo_epochs"),
    "openrlhf==0.9": ("python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen3-8B --vllm_num_engines 8 --{} {}",
                      "max_epochs"),
    "skyrl": ("python -m skyrl.train.entrypoints.main_base trainer.policy.model.path=Qwen/Qwen3-8B {}={}",
              "trainer.update_epochs_per_batch"),
}  # fmt: skip


def job_of(epochs: int, framework: str = "verl", **job: Any) -> dict[str, Any]:
    task = {"name": "t", "workload": "math", "prompts_per_step": 64, "group_size": 8, "max_response_tokens": 4096}
    return {
        "architecture": "Qwen3-4B", "cluster": "dgx_h100", "nodes": 1, "framework": framework, "tasks": [task],
        "pools": [{"role": "trainer", "settings": {"epochs": epochs}}], **job,
    }  # fmt: skip


def test_training_is_repeated_and_nothing_else() -> None:
    layout = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "ulysses": 1, "zero_stage": 3}
    budgets = {"backend": "fsdp2", "token_budget": 16384, "scoring_token_budget": 16384, "parked": False}

    def predicted(epochs: int) -> Prediction:
        trainer = {"role": "trainer", "layout": layout, "settings": {**budgets, "epochs": epochs}}
        return predict_job({**job_of(epochs), "pools": [trainer]})

    one, three = predicted(1), predicted(3)
    assert three.stages_s.training == pytest.approx(3.0 * one.stages_s.training)
    assert three.stages_s.model_copy(update={"training": one.stages_s.training}) == one.stages_s
    assert three.rl_step_s == pytest.approx(one.rl_step_s + 2.0 * one.stages_s.training)


def test_a_critic_is_trained_as_often() -> None:
    """On the trainer's devices, where both networks' updates follow one another, and on devices of its own."""

    def asked(epochs: int, mode: str, *pools: dict[str, Any]) -> float:
        job = job_of(epochs, "openrlhf", nodes=2, algorithm="ppo", modes=[mode], limits={"staleness": 1})
        return predict_job({**job, "pools": [{**job["pools"][0], **trainer}, *pools]}).stages_s.training

    trainer: dict[str, Any] = {}
    assert asked(4, "colocated") == pytest.approx(4.0 * asked(1, "colocated"), rel=1e-6)
    trainer = {"devices": 4}
    apart = {"role": "rollout", "devices": 8}, {"role": "critic", "placement": "own", "devices": 4}
    assert asked(4, "disaggregated", *apart) == pytest.approx(4.0 * asked(1, "disaggregated", *apart), rel=1e-6)


def test_further_epochs_make_one_update_off_policy() -> None:
    """slime's rule: the ratio of a single update is 1 and no pass of the old policy is made; of more it is."""
    once, twice = (predict_job(job_of(epochs, "slime")).stages_s for epochs in (1, 2))
    assert twice.scoring == pytest.approx(2.0 * once.scoring, rel=0.01)


def test_closed_form_grows_as_the_events_do() -> None:
    seconds = []
    for epochs in (1, 3):
        context = resolve(Job.model_validate(job_of(epochs)))
        task = context.tasks[0]
        demand = task.source.demand(task.batches[0], None, 0)
        found = screen(context, task, (demand,), keep=1)
        evaluation = Judge(context, task).evaluate(demand, found.configurations[0])
        seconds.append((float(found.rl_step_s[0]), float(evaluation.seconds.rl_step_s[:SCREENED_RL_STEPS].mean())))
    closed, events = (after - before for before, after in zip(*seconds, strict=True))
    assert closed == pytest.approx(events, rel=0.03)


def test_parts_of_training_add_up_over_the_epochs() -> None:
    rows = [row for row in predict_job(job_of(3)).operators if row.role == "trainer"]
    assert sum(row.seconds for row in rows) == pytest.approx(predict_job(job_of(3)).stages_s.training, rel=1e-6)
    once = {row.operator: row.seconds for row in predict_job(job_of(1)).operators if row.role == "trainer"}
    assert all(row.seconds == pytest.approx(3.0 * once[row.operator], rel=1e-6) for row in rows)


@pytest.mark.parametrize("framework", LAUNCHES)
def test_launch_scripts_say_how_often(framework: str, tmp_path: Path) -> None:
    """They were read as one, with a warning that training takes several times what is predicted."""
    words, key = LAUNCHES[framework]
    for times in (1, 4):
        (tmp_path / "run.sh").write_text(words.format(key, times) + "\n")
        imported = import_config([tmp_path / "run.sh"], framework)
        assert (imported.run.trainer.epochs or 1) == times
        found = audit(imported, plan=False, predict=False).findings
        assert not [each for each in found if each.key == key]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["verl", "openrlhf", "trl", "skyrl", "rlinf"])
def test_files_say_what_the_plan_says(framework: str, tmp_path: Path) -> None:
    plan = plan_job(job_of(3, framework))
    for name, text in plan_texts(plan, framework).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    files = sorted(each for each in tmp_path.rglob("config*") if each.suffix in (".sh", ".yaml"))
    imported = import_config(files, framework)
    assert imported.run.trainer.epochs == 3
    found = audit(imported, plan=False)
    assert found.predicted is not None
    assert found.predicted.rl_step_s == pytest.approx(plan.phases[0].predicted.rl_step_s, rel=1e-9)


@pytest.mark.parametrize("framework", ["slime", "nemo_rl", "areal", "miles"])
def test_frameworks_without_a_key_refuse_them(framework: str) -> None:
    with pytest.raises(SpecError, match=r"has no key for trainer\.epochs"):
        plan_job(job_of(3, framework))
