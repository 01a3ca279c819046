"""Families as Transformers itself makes them: read from their default configuration to the parameters it counts.

Every row of ``transformers_families.jsonl`` is one ``model_type`` of the registries of causal language models and of
models from images to text, of Transformers 5.23.0 (newer ones: of 5.24.0): the sizes of its default configuration, and
the parameters of the module that ``from_config`` makes of it on the meta device (torch 2.13.0, 2.14.1): of the language
model, and, where the row states a tower, of what sees and hears beside it. Where no module can be made of the defaults,
the one number that they lack is stated, too (the width of a head, the layers that attend, the experts of a token).
Lists of layers are written as runs or as a period, layers that state numbers of their own as groups.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlperf.cost.layers import stack_of
from rlperf.cost.parameters import active_parameters, language_parameters, parameters, tower_parameters
from rlperf.errors import SpecError
from rlperf.specs.hf.config import from_hf
from rlperf.specs.hf.defaults import left_out
from rlperf.specs.hf.families import REFUSED
from rlperf.specs.hf.names import HEADS, HIDDEN, LAYERS

TABLE = Path(__file__).parent / "transformers_families.jsonl"
ROWS: dict[str, dict[str, Any]] = {
    row["family"]: row for row in (json.loads(line) for line in TABLE.read_text().splitlines())
}


def _written_out(value: Any) -> Any:
    """A value of the table as a configuration has it."""
    if not isinstance(value, dict):
        return value
    if set(value) == {"runs"}:
        return [word for word, times in value["runs"] for _ in range(times)]
    if set(value) == {"period", "of"}:
        return [value["period"][index % len(value["period"])] for index in range(value["of"])]
    if set(value) == {"layers"}:
        return {f"{layer:02d}": own for layers, own in value["layers"] for layer in layers}
    return {key: _written_out(inner) for key, inner in value.items()}


@pytest.mark.parametrize("family", ROWS)
def test_a_default_configuration_has_the_parameters_that_transformers_counts(family: str) -> None:
    row = ROWS[family]
    arch = from_hf(_written_out(row["config"]), name=family, source="transformers")
    assert language_parameters(arch) == pytest.approx(row["text"], rel=0.005)
    if "towers" in row:
        assert parameters(arch) == pytest.approx(row["text"] + row["towers"], rel=0.005)
        known = not any("taken by its sizes" in each for each in arch.assumed)
        assert tower_parameters(arch) == pytest.approx(row["towers"], rel=0.005 if known else 0.08)
    assert 0 < active_parameters(arch) <= language_parameters(arch)
    stack_of(arch)  # of kinds that rlperf has


def test_what_a_module_makes_of_a_field_is_what_is_counted() -> None:
    def counted(family: str, **changes: object) -> int:
        config = {**_written_out(ROWS[family]["config"]), **changes}
        return language_parameters(from_hf(config, name=family, source="transformers"))

    # gpt_bigcode reads multi_query alone
    assert counted("gpt_bigcode", num_key_value_heads=12) == counted("gpt_bigcode")
    assert counted("gpt_bigcode", multi_query=False) > counted("gpt_bigcode")
    # MiMo-V2-Flash has twice the key heads in sliding layers, stated or not
    doubled = counted("mimo_v2_flash", num_key_value_heads=8) - counted("mimo_v2_flash")
    layers = _written_out(ROWS["mimo_v2_flash"]["config"]["layer_types"])
    sliding, wide = layers.count("sliding_attention"), 4096 * (192 + 128)
    assert doubled == 4 * wide * (len(layers) - sliding) + 8 * wide * sliding
    with pytest.raises(SpecError, match="is_moe"):
        counted("doge", is_moe=True)


PARTS = ("text_config", "llm_config")


def _without_defaults(config: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The configuration without the numbers that are those of its class, and their names."""
    part = next((name for name in PARTS if name in config), None)
    inner = config[part] if part else config
    kind = str(inner.get("model_type", "")).removesuffix("_text")
    heads = {name: inner[name] for name in ("num_attention_heads",) if name in inner}
    class_has = left_out(kind, heads, part=bool(part), elsewhere=config if part else ())
    dropped = {name for name, value in class_has.items() if inner.get(name) == value}
    kept = {name: value for name, value in inner.items() if name not in dropped}
    return ({**config, part: kept} if part else kept), dropped


@pytest.mark.parametrize("family", ROWS)
def test_what_a_file_leaves_out_is_its_classs_default(family: str) -> None:
    """Without the numbers that its class has by default, a default configuration is the same model."""
    whole = _written_out(ROWS[family]["config"])
    bare, dropped = _without_defaults(whole)
    read = [from_hf(one, name=family, source="transformers") for one in (whole, bare)]
    said = [one for one in read[1].assumed if one not in read[0].assumed]
    assert read[0] == read[1].model_copy(update={"assumed": read[0].assumed}), dropped
    sizes = dropped & {*LAYERS, *HIDDEN, *HEADS}
    assert len(said) == bool(sizes) and all(name in said[0] for name in sizes)


def test_most_defaults_are_left_out_somewhere() -> None:
    dropped = [_without_defaults(_written_out(row["config"]))[1] for row in ROWS.values()]
    assert sum(map(bool, dropped)) >= 60
    assert {"num_experts", "moe_intermediate_size", "num_key_value_heads", "kv_lora_rank"} <= set().union(*dropped)


@pytest.mark.parametrize("family", ["dory", "inkling2_loop", "inkling2_loop_text"])
def test_layers_that_run_several_times_are_refused_as_such(family: str) -> None:
    sizes = {"hidden_size": 2560, "num_hidden_layers": 72, "num_attention_heads": 16, "intermediate_size": 7168}
    with pytest.raises(SpecError, match=f"{family.removesuffix('_text')} cannot be modelled: some of its layers run"):
        from_hf({"model_type": family, "vocab_size": 1000, **sizes}, name=family, source="transformers")


def test_the_table_is_of_many_families_and_none_that_is_refused() -> None:
    assert len(ROWS) >= 170
    assert sum("towers" in row for row in ROWS.values()) >= 40
    assert not set(ROWS) & set(REFUSED)
