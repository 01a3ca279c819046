"""Engines that have to be simulated are guessed first, at the least that they may take: what is kept is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlperf.plan.question.context import Context, resolve
from rlperf.plan.search import screen as screening
from rlperf.plan.search.columns import Columns, ColumnStore
from rlperf.plan.search.rollout_columns import RolloutColumns
from rlperf.plan.search.screen import Screened, screen
from rlperf.plan.search.splits import splits
from rlperf.specs.job import Job


def context_of(
    settings: dict[str, Any], framework: str, mode: list[str], workload: str, model: str = "Qwen3-4B", nodes: int = 2
) -> Context:
    return resolve(
        Job.model_validate(
            {
                "architecture": model, "cluster": "dgx_h100", "nodes": nodes, "framework": framework, "modes": mode,
                "limits": {"staleness": 1 if "one_step_off" in mode else 0},
                "tasks": [{"name": "t", "workload": workload, "prompts_per_step": 32, "group_size": 8,
                           "max_prompt_tokens": 2048, "max_response_tokens": 4096}],
                "pools": [{"role": "rollout", "settings": settings}],
            }
        )
    )  # fmt: skip


LENT = context_of({"borrows": True}, "verl==main", ["one_step_off"], "math")
LARGE = context_of({"borrows": True}, "verl==main", ["one_step_off"], "math", "Qwen3-235B-A22B", 8)
AGENTS = context_of(
    {"memory_fraction": [0.2, 0.25, 0.5, 0.8]}, "verl", ["disaggregated"], "software_engineering", "Qwen3-8B"
)
APART = context_of({"prefill_replicas": [0, 1, 2]}, "slime", ["colocated", "disaggregated"], "searching")


def found(context: Context, *, least: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Screened, int]:
    """What is kept, and how many engines were simulated for it."""
    made: list[Columns] = []

    def columns(*asked: Any, **rest: Any) -> Columns:
        made.append(Columns(*asked, **{**rest, "least": least}))
        return made[-1]

    monkeypatch.setattr(screening, "Columns", columns)
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    kept = screen(context, task, (demand,), store=ColumnStore())
    held = {id(each.simulated): each.simulated for each in made[0].store.counted._held.values()}.values()
    served = {id(each.served): each.served for each in made[0].store.counted._held.values()}.values()
    kinds = [kind for each in held for kind in (each.apart, each.joined)] + [*served]
    return kept, sum(len(own) for kind in kinds for own in kind.values())


@pytest.mark.parametrize(
    ("context", "share"),
    [(LENT, 1.0), pytest.param(LARGE, 0.6, marks=pytest.mark.slow), (APART, 1.5), (AGENTS, 1.0)],
    ids=["lent", "large", "apart", "agents"],
)
def test_what_is_kept_is_what_simulating_all_keeps(
    context: Context, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few columns whose caches bind nobody, the roomiest first are some more than the leanest first."""
    every, all_of_them = found(context, least=False, monkeypatch=monkeypatch)
    few, some = found(context, least=True, monkeypatch=monkeypatch)
    assert few.configurations == every.configurations
    np.testing.assert_allclose(few.priced, every.priced, rtol=1e-12)
    np.testing.assert_allclose(few.rl_step_s, every.rl_step_s, rtol=1e-12)
    assert few.combinations == every.combinations
    assert 0 < some <= share * all_of_them


@pytest.mark.parametrize("context", [LENT, APART, AGENTS], ids=["lent", "apart", "agents"])
def test_a_guess_is_no_more_than_what_simulating_finds(context: Context) -> None:
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    for columns in Columns(context, task, least=True).variants():
        for split in sorted(splits(context), key=lambda each: -each.rollout):
            source = columns.of(demand, split)
            guessed = np.flatnonzero(source.rollout.guessed)
            known = source
            while len(left := np.flatnonzero(known.rollout.guessed)):
                known = columns.simulated(known, left)  # of agents the roomiest engines first
            known = known.rollout
            assert (_seconds(source.rollout)[guessed] <= _seconds(known)[guessed] * (1.0 + 1e-9)).all()


def test_agents_on_few_places_say_nothing_of_more_places() -> None:
    """Eight, served first, told that 256 take no less: 80.6 s was guessed of what takes 39.6."""
    context = context_of({"max_running": [8, 256], "memory_fraction": 0.9}, "verl", ["disaggregated"], "tool_use")
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    columns, (split,) = Columns(context, task, least=True), splits(context)
    columns.of(demand, split)  # of as many places as there are, on more replicas
    source = columns.of(demand, replace(split, rollout=split.rollout // 2))
    few = columns.simulated(source, np.flatnonzero(source.rollout.max_running == 8))
    known = few
    while len(left := np.flatnonzero(known.rollout.guessed)):
        known = columns.simulated(known, left)
    assert few.rollout.guessed.any()
    assert (few.rollout.makespan_s <= known.rollout.makespan_s * (1.0 + 1e-9)).all()


def _seconds(columns: RolloutColumns) -> Any:
    return columns.makespan_s[:, None] if columns.lent_s is None else columns.lent_s
