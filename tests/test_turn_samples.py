"""Turns that are samples of their own, and a tree of them computed once: counted by hand, metamorphic, events, keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlperf
from rlperf.cost.layers.vision import Images
from rlperf.errors import SpecError
from rlperf.frameworks.export import plan_texts
from rlperf.frameworks.imports import import_config
from rlperf.plan.answer.gains import gains
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import Context, resolve
from rlperf.plan.search.screen import FORGIVEN, screen
from rlperf.sim.rl_step.trainer_stage import closed_training
from rlperf.specs.job import Job
from rlperf.workload.lengths import LengthTable


def job_of(framework: str | None = None, workload: str = "searching", **settings: Any) -> Job:
    named = {} if framework is None else {"framework": framework}
    return Job.model_validate(
        {
            "architecture": "Qwen3-4B", "cluster": "dgx_h100", "nodes": 1, **named,
            "tasks": [{"name": "t", "workload": workload, "prompts_per_step": 32, "group_size": 8,
                       "max_prompt_tokens": 4096, "max_response_tokens": 8192}],
            "pools": [{"role": "rollout", "layout": {"tensor_parallel": 1}},
                      {"role": "trainer", "layout": {"context_parallel": 1, "ulysses": 1}, "settings": settings}],
        }
    )  # fmt: skip


def judged(workload: str = "searching", **settings: Any) -> tuple[Context, Evaluation]:
    context = resolve(job_of(workload=workload, token_budget=16_384, **settings))
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,), keep=1, forgiven=FORGIVEN)
    return context, Judge(context, task).evaluate(demand, found.configurations[0])


def trained_s(evaluation: Evaluation) -> float:
    return float((evaluation.seconds.training_s + evaluation.seconds.scoring_s).mean())


def test_turns_of_the_first_trajectories_with_the_context_before_each() -> None:
    table = LengthTable(
        [10, 25, 40, 10, 30, 8], [5, 6, 7, 9, 3, 4], [0, 0, 0, 0, 0, 1], [0] * 6, [0, 1, 2, 0, 1, 0],
        trajectory=[0, 0, 0, 1, 1, 2], append_tokens=[10, 9, 0, 11, 0, 0],
    )  # fmt: skip
    found = table.turns(2)
    assert (found.prompt_tokens + found.response_tokens).tolist() == [15, 31, 47, 19, 33]
    assert found.trajectory is None and found.group.tolist() == [0] * 5
    whole = table.trajectories()
    assert whole.append_tokens is not None
    last = whole.prompt_tokens + whole.response_tokens + whole.append_tokens
    assert last[:2].tolist() == [47, 33]  # what a tree computes once is what the last turn reads and writes


def test_of_one_turn_nothing_changes() -> None:
    apart, together = judged("math", turn_samples=True)[1], judged("math")[1]
    assert apart.rl_step_s == together.rl_step_s


def test_turns_apart_take_longer_and_a_tree_of_them_takes_as_long_as_together() -> None:
    apart, together = judged(turn_samples=True)[1], judged()[1]
    assert trained_s(apart) > 1.2 * trained_s(together)
    assert apart.seconds.rollout_s.tolist() == together.seconds.rollout_s.tolist()
    tree, shared = judged(turn_samples=True, shared_prefix=True)[1], judged(shared_prefix=True)[1]
    assert trained_s(tree) == trained_s(shared) < trained_s(apart)


def test_tokens_are_those_of_every_context() -> None:
    _, apart = judged(turn_samples=True)
    demand = apart.demand.by_turn
    for index, table in enumerate(apart.demand.tables):
        assert demand.lengths(index).sum() == (table.prompt_tokens + table.response_tokens).sum()
    assert demand.batch.sequences == round(float(np.mean([table.n for table in apart.demand.tables])))


def test_closed_form_is_the_events() -> None:
    context, apart = judged(turn_samples=True)
    pool = apart.configuration.pool("trainer")
    budget = np.array([pool.settings.token_budget or 0])
    site, stack = context.site, apart.stack
    layout = apart.trainer.layout.take([0])
    training, _, _ = closed_training(
        site, stack, context.tasks[0].architecture, apart.demand, layout, pool.settings.filled(), budget
    )
    assert float(apart.trainer.training_s.mean()) == pytest.approx(training.item(), rel=0.03)


def test_a_plan_says_what_the_tree_gains() -> None:
    context, tree = judged(turn_samples=True, shared_prefix=True)
    line = next(each for each in gains(context, context.tasks[0], tree) if "computed once" in each)
    assert "times as fast" in line
    assert judged(turn_samples=True)[1].rl_step_s > tree.rl_step_s


def test_skyrl_and_areal_have_a_key_and_read_it_back(tmp_path: Path) -> None:
    said = {"skyrl": "step_wise_trajectories", "areal": "export_style: individual"}
    for framework, key in said.items():
        texts = plan_texts(plan_job(resolve(job_of(framework, turn_samples=True))), framework)
        name, text = next(each for each in texts.items() if key in each[1])
        file = tmp_path / framework / name
        file.parent.mkdir()
        file.write_text(text)
        assert import_config([file], framework).run.trainer.turn_samples


@pytest.mark.parametrize("framework", ["verl", "nemo_rl", "openrlhf", "slime", "trl", "rlinf"])
def test_frameworks_without_a_key_refuse_it_by_name(framework: str) -> None:
    with pytest.raises(SpecError, match=r"no key for trainer\.turn_samples"):
        rlperf.plan_job(job_of(framework, turn_samples=True))


def test_turns_of_prompts_with_images_are_refused() -> None:
    context = resolve(job_of(turn_samples=True))
    task = context.tasks[0]
    demand = replace(task.source.demand(task.batches[0], None, 0), images=Images(0.5, 256.0))
    with pytest.raises(SpecError, match="turn_samples of prompts with images is not predicted"):
        _ = demand.by_turn
