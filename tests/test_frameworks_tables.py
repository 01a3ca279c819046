"""Key tables and reference pages: generated, and equal to what the generator makes today."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from random import Random

import pytest

from rlperf.frameworks.adapter import Source, framework_facts
from rlperf.frameworks.export import export_run
from rlperf.frameworks.fields import field
from rlperf.frameworks.generate import FACTS, READERS, table_text
from rlperf.frameworks.keytable import ABSENT, KeySpec, key_table, parse_table
from rlperf.frameworks.reference import page
from rlperf.frameworks.registry import FRAMEWORKS, adapter_of
from rlperf.frameworks.run import BatchFacts, PoolRun, RolloutRun, TrainerRun, ref
from rlperf.plan.question.pool import BatchSettings
from rlperf.specs.pool import ATTRIBUTES
from rlperf.specs.profiles import load_architecture

from .framework_samples import SHIPPED, sample_run

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_reference_pages_are_up_to_date(framework: str) -> None:
    shipped = (ROOT / "docs" / "reference" / "frameworks" / f"{framework}.md").read_text(encoding="utf-8")
    assert shipped == page(framework), "run: python -m rlperf.frameworks.reference docs"


@pytest.mark.data
@pytest.mark.parametrize("framework", SHIPPED)
def test_key_tables_are_up_to_date(framework: str, measured_data: Path) -> None:
    versions, entries = READERS[framework](measured_data / "frameworks" / framework)
    shipped = (FACTS / f"{framework}.tsv").read_text(encoding="utf-8")
    assert shipped == table_text(framework, versions, entries), "run: python -m rlperf.frameworks.generate DATA"


def test_defaults_differ_by_version_and_backend() -> None:
    table = key_table("verl")
    running = "actor_rollout_ref.rollout.max_num_seqs"
    assert [table.keys(v, "fsdp2")[running].default for v in ("0.4", "0.8", "0.9", "main")] == [1024, 1024, 256, 256]
    strategy = "actor_rollout_ref.actor.strategy"
    assert table.keys("0.9", "megatron")[strategy].default == "megatron"
    assert table.keys("0.9", "fsdp2")[strategy].default == "fsdp"


def test_open_maps_take_any_key_and_sections_do_not() -> None:
    table = key_table("verl")
    assert table.find("actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space", "0.9") == KeySpec(
        "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space", ABSENT
    )
    assert table.find("actor_rollout_ref.rollout.engine_kwarg.vllm", "0.9") is None
    assert key_table("nemo_rl").find("policy.generation.vllm_kwargs.anything", "main") is not None


def test_a_table_is_read_as_it_is_written() -> None:
    text = "# versions: 1 2 3\n[a.b]\nx\t1\t-2\nx\t2\t3-\ny\t\t2-2\tm\tint:4|5\n"
    table = parse_table(text, "t")
    assert {version: table.keys(version)["a.b.x"].default for version in table.versions} == {"1": 1, "2": 1, "3": 2}
    assert "a.b.y" in table.keys("2", "m")
    assert "a.b.y" not in table.keys("2", "f")
    assert table.lifetime("a.b.y") == "2"
    assert table.lifetime("a.b.z") is None


@pytest.mark.parametrize(
    ("kind", "value", "legal"),
    [("bool", True, True), ("bool", 1, False), ("int", 2, True), ("int", 2.5, False), ("int", True, False),
     ("float", 2, True), ("float", "1e-6", True), ("float", "x", False), ("str", "x", True), ("str", ["x"], False),
     ("int", None, True), ("int", "${a.b}", True)],
)  # fmt: skip
def test_values_are_checked_by_type(kind: str, value: object, legal: bool) -> None:
    assert (KeySpec("k", ABSENT, kind).complaint(value) is None) == legal


# -- names of a run ---------------------------------------------------------------------------------------------------


def test_a_key_table_cannot_speak_of_a_field_that_a_run_has_not() -> None:
    with pytest.raises(LookupError, match="tensor_paralel"):
        field("trainer.tensor_paralel", "actor.tp")


def test_every_field_that_the_code_names_exists() -> None:
    """`ref` inside functions is only called when they run: here every literal is."""
    named = 0
    for path in sorted((ROOT / "rlperf").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if called == "ref" and isinstance(node.args[0], ast.Constant):
                assert ref(str(node.args[0].value)) is not None
                named += 1
    assert named > 20


def test_every_field_of_a_pool_that_the_code_changes_exists() -> None:
    """Likewise the names that `PoolRun.having` is called with."""
    known, named = set(TrainerRun.model_fields) | set(RolloutRun.model_fields), 0
    for path in sorted((ROOT / "rlperf" / "frameworks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "having":
                names = {keyword.arg for keyword in node.keywords} - {None}
                assert names <= known, (path.name, names - known)
                named += len(names)
    assert named > 100
    with pytest.raises(LookupError, match="offlode"):
        TrainerRun().having(offlode="none")


def test_a_run_says_what_a_plan_says() -> None:
    """Pools take layout and settings from their one table; a batch has the fields of a plan's."""
    assert {attribute.name for attribute in ATTRIBUTES} <= set(PoolRun.model_fields)
    assert set(BatchSettings.model_fields) <= {entry.name for entry in fields(BatchFacts)}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rules_ask_what_a_run_says(framework: str) -> None:
    """A misspelt name would leave a rule unanswered for ever."""
    version = key_table(framework).versions[-1]
    adapter = adapter_of(framework)
    run = sample_run(Random(4), framework, version)
    emission = export_run(run, adapter, version, "c").emission
    source = Source({setting.key: setting.value for setting in emission.settings})
    read, _ = adapter.read(source, adapter.target(source, version))
    groups = read.names(load_architecture(run.architecture))
    for rule in framework_facts(framework, version).rules:
        for group, name in re.findall(
            r"\b(run|batch|trainer|rollout|architecture)\.(\w+)", f"{rule.require} {rule.when}"
        ):
            assert hasattr(groups[group], name), (rule.id, group, name)
