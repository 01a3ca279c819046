"""One table of a pool's attributes: every form, array and column follows from it or agrees with it."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import rlperf
from rlperf.frameworks.run import RolloutRun, TrainerRun
from rlperf.layout import OFFLOAD, RECOMPUTE, Layout
from rlperf.plan.question.pool import PoolPlan
from rlperf.plan.search.rollout_columns import RolloutColumns
from rlperf.plan.search.trainer_columns import TrainerColumns
from rlperf.specs.pool import (
    ATTRIBUTES,
    LayoutChoice,
    LayoutValues,
    PoolSettings,
    PoolSpec,
    Settings,
    SettingsValues,
    of_role,
)
from rlperf.specs.trainer_capability import DEGREES

PACKAGE = Path(rlperf.__file__).parent
LAYOUT = tuple(each.name for each in ATTRIBUTES if each.part == "layout")
SETTINGS = tuple(each.name for each in ATTRIBUTES if each.part == "settings")
WRITTEN = {
    "calibrate/trainers/rows.py": "columns of a measured table, by the names that they have there",
    "calibrate/measure.py": "columns of the table that it writes: it runs alone, on the user's device",
    "calibrate/rl_step/job.py": "what a measured row states of a pool",
    "cost/trainer/microbatch.py": "what the operators of a layer read of a layout",
    "specs/trainer_capability.py": "typed keys of a backend's file; checked against the table above",
    "frameworks/trl.py": "what has to be 1 or off where TRL runs on accelerate",
}
"""Modules that list attributes on purpose, which is no list of what there is."""


def test_every_form_has_the_attributes_of_the_table_and_no_others() -> None:
    assert len(LAYOUT) >= 15 and len(SETTINGS) >= 20
    for form in (LayoutChoice, LayoutValues):
        assert tuple(form.model_fields) == LAYOUT
    for form in (PoolSettings, SettingsValues, Settings):
        assert tuple(form.model_fields) == SETTINGS
    assert tuple(field.name for field in fields(Layout)) == LAYOUT
    assert (RECOMPUTE[0], OFFLOAD[0]) == ("none", "none")


def test_what_is_left_out_is_none_in_a_question_and_the_default_in_what_costs_read() -> None:
    assert LayoutChoice().stated() == {} == PoolSettings().stated()
    for each in ATTRIBUTES:
        filled = LayoutValues() if each.part == "layout" else Settings()
        assert getattr(filled, each.name) == each.default
    layout = Layout.of().to_dict()
    assert [layout[name] for name in ("tensor_parallel", "shard_size", "offload")] == [1, 0, 0]


def test_columns_and_exchange_have_what_the_planner_decides() -> None:
    for role, columns, run in (("rollout", RolloutColumns, RolloutRun), ("trainer", TrainerColumns, TrainerRun)):
        searched = {each.name for each in of_role(role, "settings") if each.decided == "searched"}
        if role == "rollout":
            searched -= {"backend"}  # the engine is the job's
        assert searched <= {field.name for field in fields(columns)}
        assert {each.name for each in of_role(role)} <= set(run.model_fields)
    assert set(DEGREES) == {each.name for each in of_role("trainer", "layout") if each.degree}


def test_a_plan_s_pool_pinned_and_filled_is_itself() -> None:
    layout = LayoutValues(
        tensor_parallel=4, data_parallel=2, zero_stage=3, activation_recompute="full", sequence_parallel=True
    )
    settings = SettingsValues(backend="megatron", token_budget=4096, packing=False)
    pool = PoolPlan(role="trainer", devices=8, device="h100", layout=layout, settings=settings)
    spec = pool.pinned()
    assert PoolSpec.model_validate(spec.model_dump(mode="json", exclude_none=True)) == spec
    assert {name: value[0] for name, value in spec.layout} == dict(layout)
    assert spec.settings.filled() == settings.filled()
    assert settings.filled().planned("trainer").filled() == settings.filled()


@pytest.mark.parametrize(("role", "name", "value"), [("trainer", "rollout_dtype", "fp8"), ("rollout", "packing", True)])
def test_a_setting_of_another_pool_is_refused(role: str, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be set on a {role} pool"):
        PoolSpec.model_validate({"role": role, "settings": {name: value}})


@pytest.mark.parametrize(
    ("role", "name", "value"),
    [("rollout", "context_parallel", 2), ("rollout", "zero_stage", [0, 3]), ("trainer", "attention_data_parallel", 2)],
)
def test_a_degree_of_another_pool_is_refused_unless_it_changes_nothing(role: str, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be set on a {role} pool"):
        PoolSpec.model_validate({"role": role, "layout": {name: value}})
    plain = {"context_parallel": 1, "zero_stage": 0, "attention_data_parallel": 1}[name]
    PoolSpec.model_validate({"role": role, "layout": {name: plain}})


def test_no_list_of_attributes_is_written_twice() -> None:
    names, found = {each.name for each in ATTRIBUTES}, set()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if sum(f'"{name}"' in text for name in names) < 5:  # formatted code has no other quotes
            continue
        for node in ast.walk(ast.parse(text)):
            items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
            if sum(isinstance(item, ast.Constant) and item.value in names for item in items) >= 5:
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == set(WRITTEN), sorted(found ^ set(WRITTEN))
