"""What columns share: counts of engine_steps serve every mode, however far it runs ahead."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlperf.api import ask
from rlperf.frameworks.adapter import framework_facts
from rlperf.layout import Layout
from rlperf.plan.search import columns, trainer_columns
from rlperf.plan.search.columns import Columns
from rlperf.plan.search.rollout_columns import RolloutColumns
from rlperf.plan.search.rules import uneven_parts
from rlperf.plan.search.screen import Screened, screen
from rlperf.plan.search.splits import Split, splits
from rlperf.sim.rl_step import rollout_counted
from rlperf.sim.rollout.closed_form import StepCensus
from rlperf.specs.job import Job


def test_modes_that_run_ahead_share_the_count_of_engine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.model_validate({
        "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "modes": ["one_step_off", "async"],
        "limits": {"staleness": 2}, "framework": "verl==0.9.1",
        "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 64, "group_size": 4,
                   "max_response_tokens": 2048}],
    })  # fmt: skip
    question = ask(job)
    context, task = question.context, question.context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    each = {split.mode: split for split in splits(context) if split.rollout == 8}
    counts, priced = [], []
    take, price = rollout_counted.take_census, StepCensus.makespan_s
    monkeypatch.setattr(rollout_counted, "take_census", lambda *args, **named: counts.append(1) or take(*args, **named))
    monkeypatch.setattr(StepCensus, "makespan_s", lambda *args: priced.append(1) or price(*args))
    shared = Columns(context, task, question.facts)
    first = shared.rollout(demand, each["one_step_off"])
    counted, told = len(counts), len(priced)
    ahead = shared.rollout(demand, each["async"])
    assert len(counts) == counted > 0 and len(priced) == told > 0
    alone = Columns(context, task, question.facts).rollout(demand, each["async"])
    assert len(counts) > counted
    for name in ("makespan_s", "steady_s", "recompute_s", "kv_tokens"):
        assert np.array_equal(getattr(ahead, name), getattr(alone, name))
    assert not np.array_equal(first.steady_s, ahead.steady_s)  # twice as many requests are under way


def test_a_screen_makes_the_engines_of_a_pool_once_in_all_modes_that_run_as_far_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """verl's files state in some modes what its trainer scores: engines are the same, and were made twice or more."""
    job = Job.model_validate({
        "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "framework": "verl==0.9.1",
        "modes": ["colocated", "one_step_off", "async"], "limits": {"staleness": 2}, "objective": "token_time",
        "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 64, "group_size": 4,
                   "max_response_tokens": 2048}],
    })  # fmt: skip
    question = ask(job)
    context, task, made = question.context, question.context.tasks[0], []
    make = columns.rollout_columns

    def counted(*args: Any, **named: Any) -> RolloutColumns:
        made.append((args[3], args[4].allowed))  # devices, and what is under way
        return make(*args, **named)

    monkeypatch.setattr(columns, "rollout_columns", counted)
    screen(context, task, (task.source.demand(task.batches[0], None, 0),), question.facts)
    assert len({context.of(split.mode).job.old_policy for split in splits(context)}) == 2
    assert len(made) == len(set(made)) > 4


def test_a_job_that_is_asked_again_with_other_engines_shares_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What-ifs plan one job again and again: most of every screen was the same count of engine_steps."""
    counts = []
    take = rollout_counted.take_census
    monkeypatch.setattr(rollout_counted, "take_census", lambda *args, **named: counts.append(1) or take(*args, **named))
    (first, some), (second, more) = (_screened("math", dtype, 1, counts) for dtype in ("bf16", "fp8"))
    assert some > 0 and more - some < some / 4  # what is left to count are other concurrencies
    assert not np.array_equal(first.rl_step_s[:4], second.rl_step_s[:4])


def test_agents_that_are_asked_about_with_another_trainer_are_not_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    serve = rollout_counted.serve_turns
    monkeypatch.setattr(rollout_counted, "serve_turns", lambda *args: counts.append(1) or serve(*args))
    (first, some), (second, more) = (_screened("searching", "bf16", tensor, counts) for tensor in (1, 2))
    assert some > 0 and more == some
    assert not np.array_equal(first.rl_step_s[:4], second.rl_step_s[:4])


def test_states_of_a_layout_are_counted_once_for_all_token_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of layouts and settings, to the last digit what a row of each by itself holds."""
    words = {"name": "t", "workload": "math", "prompts_per_step": 8, "group_size": 2, "max_response_tokens": 1536}
    base = {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "framework": "verl==0.9.1"}
    question = ask(Job.model_validate({**base, "tasks": [words]}))
    context, task = question.context, question.context.tasks[0]
    demand, whole = task.source.demand(task.batches[0], None, 0), trainer_columns.trainer_bytes
    grid = trainer_columns.trainer_grid(context, task.architecture, demand.batch.longest_tokens, [(8, 0)], True)
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(trainer_columns, "trainer_bytes", lambda *a: asked.append(a[4].shape) or whole(*a))
    tables = grid.bytes_of(context, task.architecture, demand, context.site, grid.layout)
    settings = math.prod(grid.settings)
    assert grid.settings[1] == 2 < settings and sum(each for each, *_ in asked) == len(grid.flags) // settings
    for trainer, table, rows in zip(context.trainers, tables, grid.rows(len(context.trainers)), strict=True):
        flat = whole(
            context.site, trainer, task.architecture, demand, grid.layout.take(rows),
            context.job.pool("trainer").settings.filled(), grid.token_budget[rows], grid.parked[rows],
        )  # fmt: skip
        for name in ("peak", "idle", "host", "parked"):
            assert np.array_equal(getattr(table, name).ravel(), getattr(flat, name))


def _screened(workload: str, dtype: str, tensor: int, counts: list[int]) -> tuple[Screened, int]:
    """A small job screened with a cache's dtype and a trainer's tensor parallelism, and what was counted by then."""
    task = {"name": "t", "workload": workload, "prompts_per_step": 8, "group_size": 2, "max_response_tokens": 1536}
    pools = [
        {"role": "trainer", "layout": {"tensor_parallel": tensor, "pipeline_parallel": 1, "context_parallel": 1}},
        {"role": "rollout", "settings": {"kv_dtype": dtype}, "layout": {"tensor_parallel": [1, 2]}},
    ]
    words = {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "framework": "verl==0.9.1", "tasks": [task]}
    question = ask(Job.model_validate({**words, "pools": pools}))
    own = question.context.tasks[0]
    demand = own.source.demand(own.batches[0], None, 0)
    return screen(question.context, own, (demand,), question.facts), len(counts)


def test_rows_of_a_layout_whose_fields_broadcast() -> None:
    """Fields that have the whole shape already, and those that are shared by all rows."""
    tensor, data = np.ix_([1, 2, 4], [1, 8])
    layout = Layout.of(tensor_parallel=tensor, data_parallel=data)
    assert layout.shape == (3, 2)
    flat = layout.flat()
    assert flat.tensor_parallel.tolist() == [1, 1, 2, 2, 4, 4] and flat.zero_stage.tolist() == [0] * 6
    assert flat.take(np.array([5, 0])).devices.tolist() == [32, 1]
    assert layout.flat(layout.devices > 8).devices.tolist() == [16, 32]
    mixed = Layout.of(tensor_parallel=[2, 4], pipeline_parallel=2)
    assert mixed.take([1]).pipeline_parallel.tolist() == [2] and mixed.take(1).devices == 8


def test_tasks_that_share_the_devices_leave_some_to_each_other() -> None:
    """Pools of their own that are open took every device, so that no two tasks had a place beside each other."""
    task = {"workload": "math", "prompts_per_step": 64, "group_size": 4, "max_response_tokens": 2048}
    job = Job.model_validate({
        "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 4, "modes": ["disaggregated"],
        "framework": "slime", "sharing": "devices", "tasks": [{"name": "a", **task}, {"name": "b", **task}],
    })  # fmt: skip
    totals = {split.total for split in splits(ask(job).context)}
    assert {16, 32} <= totals


@pytest.mark.parametrize(
    ("framework", "role", "devices", "other"), [("slime", "trainer", 4, 12), ("verl", "rollout", 4, 8)]
)
def test_beside_a_pinned_pool_the_other_takes_the_rest_or_its_whole_nodes(
    framework: str, role: str, devices: int, other: int
) -> None:
    """Beside a trainer of 4 an engine took 8 of 12 devices; beside an engine of 4 a trainer of 12 was all that was."""
    job = Job.model_validate({
        "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "modes": ["one_step_off"],
        "framework": framework, "limits": {"staleness": 1}, "pools": [{"role": role, "devices": devices}],
        "tasks": [{"name": "a", "workload": "math", "prompts_per_step": 64, "max_response_tokens": 2048}],
    })  # fmt: skip
    found = splits(ask(job).context)
    assert other in {split.rollout if role == "trainer" else split.trainer for split in found}


def test_pools_that_fill_no_nodes_together_are_refused_where_files_count_all_of_them() -> None:
    facts = framework_facts("areal")
    assert uneven_parts(facts, Split("async", 8, 4), 8, ()) == {"cluster": (12,)}
    assert uneven_parts(facts, Split("async", 12, 4), 8, ()) == {}
