"""Key tables and reference pages: generated, and equal to what the generator makes today."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from random import Random

import pytest

from rlperf.cost.dtypes import DTYPES
from rlperf.errors import SpecError
from rlperf.frameworks.adapter import Source, framework_facts, states
from rlperf.frameworks.export import export_run
from rlperf.frameworks.fields import field
from rlperf.frameworks.generate import FACTS, READERS, table_text
from rlperf.frameworks.hub import architecture_at, hub_name
from rlperf.frameworks.keytable import ABSENT, KeySpec, key_table, parse_table
from rlperf.frameworks.reference import page
from rlperf.frameworks.registry import FRAMEWORKS, adapter_of
from rlperf.frameworks.run import BatchFacts, PoolRun, RolloutRun, Run, TrainerRun, ref
from rlperf.plan.question.pool import BatchSettings
from rlperf.specs.framework import facts_data, facts_document
from rlperf.specs.pool import ATTRIBUTES
from rlperf.specs.profiles import load_architecture, profile_names

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


@pytest.fixture
def facts_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of facts with the files of one framework, which the test may change."""
    caches = (framework_facts, facts_document, facts_data, key_table)
    for suffix in ("yaml", "tsv"):
        shutil.copy(FACTS / f"slime.{suffix}", tmp_path)
    monkeypatch.setattr("rlperf.specs.framework.FACTS", tmp_path)
    monkeypatch.setattr("rlperf.frameworks.keytable.FACTS", tmp_path)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (r"^title:", "titl:", r"titl: unknown field \(did you mean title\?\)"),
        (r"stage: worker", "stage: wrker", r"rules\.\d+\.stage: Input should be 'parse'"),
        (r"(colocated: \{)[^:]*:", r'\1"0.1-":', r"modes\.colocated\.0\.1-: '0\.1' is no listed version: "),
        (r"^unknown_keys: .*", "copied_gradients: {fsdp2: {all: 0}}", r"gradients\.fsdp2: backends are megatron"),
        (r"^unknown_keys: .*", "copied_gradients: {megatron: {0.1-: 0}}", r"'0\.1' is no listed version: "),
        (r"^  colocated:", "  colocatd:", r"there is no such execution mode \(did you mean colocated\?\)"),
        (r"(require: .*)architecture\.heads\b", r"\1architecture.headz",
         r"require: there is no architecture\.headz that a rule may ask \(did you mean heads\?\)"),
        (r"(require: .*)trainer\.", r"\1trainr.", r"there is no trainr\.\w+ .*did you mean trainer\?"),
        (r"(require: .*)run\.(\w+)", r"\1run.\2z", r"there is no run\.\w+z that a rule may ask"),
        (r"(says: .*)\{architecture\.heads\}", r"\1{architecture.headz}", r"says: there is no architecture\.headz"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_facts_is_said_with_its_line(
    right: str, wrong: str, message: str, facts_of_its_own: Path
) -> None:
    file = facts_of_its_own / "slime.yaml"
    text = file.read_text()
    changed = re.sub(right, wrong, text, count=1, flags=re.M)
    assert changed != text
    line = next(i for i, (a, b) in enumerate(zip(text.split("\n"), changed.split("\n"), strict=True), 1) if a != b)
    file.write_text(changed)
    with pytest.raises(SpecError, match=rf"slime\.yaml:{line}: .*{message}") as told:
        framework_facts("slime")
    assert "pydantic" not in str(told.value)


def test_what_is_wrong_in_a_key_table_is_said_with_its_line() -> None:
    for row in ("x\t1\t4-", "x\tmany"):
        with pytest.raises(SpecError, match=r"t\.tsv:3: x: "):
            parse_table(f"# versions: 1 2 3\n[a.b]\n{row}\n", "t")


# -- names of a run ---------------------------------------------------------------------------------------------------


def test_a_key_table_cannot_speak_of_a_field_that_a_run_has_not() -> None:
    with pytest.raises(LookupError, match="tensor_paralel"):
        field("trainer.tensor_paralel", "actor.tp")


@pytest.mark.slow
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
    for path in sorted((ROOT / "rlperf" / "frameworks").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if ".having(" in text else ():
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


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_a_key_takes_is_one_of_its_choices(framework: str) -> None:
    """Engines in four bits were planned, and written as ``int4_wo``, which no engine has a word for."""
    table, adapter = key_table(framework), adapter_of(framework)
    for entry in adapter.fields:
        keys = [table.find(key, version) for key in entry.keys for version in table.versions]
        words = {entry.unit.write(value, Run()) for value in entry.unit.takes or ()} - {None}
        assert all(words <= set(key.choices) for key in keys if key and key.choices), entry.at


@pytest.mark.parametrize(
    ("framework", "engine", "said"),
    [
        ("verl", "vllm", {"bf16", "fp16", "fp8"}),
        ("nemo_rl", "vllm", {"bf16", "fp16", "fp32", "fp8"}),
        ("slime", "sglang", {"bf16", "fp8", "fp8_block", "int4_wo"}),
        ("miles", "sglang", {"bf16", "fp8", "fp8_block", "mxfp8", "int4_wo"}),
        ("skyrl", "vllm", {"bf16", "fp8"}),  # in four bits no checkpoint is trained
    ],
)
def test_precisions_of_engines_are_those_that_the_framework_can_launch(
    framework: str, engine: str, said: set[str]
) -> None:
    adapter, backends = adapter_of(framework), framework_facts(framework).backends
    asked = (ref("rollout.rollout_dtype"), backends)
    assert {dtype for dtype in DTYPES if states(adapter, None, engine, *asked, dtype)} == said


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_stages_are_planned_uneven_where_a_key_states_them(framework: str) -> None:
    """Else stating the layers of the last stage beats the plan: 12 % of the updates of an 8B model on PP3 in verl."""
    stated = {each.at for each in adapter_of(framework).fields}
    assert framework_facts(framework).states_stages == (ref("trainer.last_stage_layers") in stated)


def test_every_repository_is_read_as_the_architecture_that_it_was_written_for() -> None:
    """No two have one: of a checkpoint only the architecture that its name looks like is read."""
    names = profile_names("architectures")
    assert [architecture_at(hub_name(name)) for name in names] == list(names)
