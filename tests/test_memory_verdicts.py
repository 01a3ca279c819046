"""Configurations that ran out of memory or fitted: the probability that rlperf gives them, and how lines are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlperf.cli.main import app
from rlperf.errors import SpecError
from rlperf.frameworks.audit.memory_verdicts import MemoryVerdict, predicted_risk, read_verdicts, report

LORA: dict[str, Any] = {
    "data.max_prompt_length": 512, "data.max_response_length": 1024, "actor_rollout_ref.model.lora_rank": 32,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True, "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.actor.fsdp_config.param_offload": True, "data.train_batch_size": 64,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True, "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1, "actor_rollout_ref.rollout.n": 5,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.25,
}  # fmt: skip


def row(**changes: Any) -> dict[str, Any]:
    """A line of the file, made up."""
    return {"id": "one", "source": "nobody#L1", "framework": "verl", "model": "Qwen2.5-7B", "gpu": "h100_sxm",
            "n_gpus": 1, "config": LORA, "verdict": "fits", "phase": "actor update", "note": "", **changes}  # fmt: skip


def probability(tmp_path: Path, **changes: Any) -> float:
    file = tmp_path / "verdicts.jsonl"
    file.write_text(json.dumps(row(**changes)))
    (verdict,) = read_verdicts(file)
    return predicted_risk(verdict).probability


def update(sequences: int, **keys: Any) -> dict[str, Any]:
    return {**LORA, "actor_rollout_ref.actor.ppo_micro_batch_size": sequences, **keys}


@pytest.mark.slow
def test_more_sequences_a_microbatch_are_a_larger_risk(tmp_path: Path) -> None:
    found = [probability(tmp_path, config=update(each)) for each in (8, 32, 64, 128, 512)]
    assert found == sorted(found)
    assert found[0] < 0.1 < 0.9 < found[-1]
    with_entropy = probability(tmp_path, config=update(64, **{"actor_rollout_ref.actor.entropy_coeff": 0.001}))
    assert with_entropy > found[2] + 0.05
    # padded to the maximum nothing is left to chance but the model's own error
    padded = probability(tmp_path, config=update(64, **{"actor_rollout_ref.model.use_remove_padding": False}))
    assert padded > found[2]
    # microbatches of all devices, as releases before 0.3 state them, are shared by the devices
    assert probability(tmp_path, config=update(128), n_gpus=2) < found[3]


def test_tensor_parallel_of_transformers_gathers_all_logits(tmp_path: Path) -> None:
    def tuned(**config: Any) -> float:
        row = {"seq_len": 32768, "micro_batch": "1 presumed", "gradient_checkpointing": True, **config}
        return probability(tmp_path, framework="TRL (FSDP2, SFT)", model="Qwen3-4B", n_gpus=16, config=row)

    assert tuned(tp=4) > 0.5
    assert tuned(cp=4) < 0.1


def test_lines_that_are_no_verdicts_are_named(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    file.write_text(json.dumps(row()) + "\n{}\n")
    with pytest.raises(SpecError) as found:
        report(file)
    assert found.value.problems[0].line == 2
    file.write_text("\n".join(json.dumps(each) for each in (row(), row(id="two", note="x: do not score"),
                                                            row(id="three", gpu="unknown"))))  # fmt: skip
    told = report(file)
    assert [risk.verdict.id for risk in told.risks] == ["one"]
    assert [name for name, _ in told.refused] == ["two", "three"]
    shown = CliRunner().invoke(app, ["validate", str(file), "--kind", "verdict"])
    assert "1 of 3 verdicts predicted" in shown.stdout
    again = CliRunner().invoke(app, ["validate", str(file), "--kind", "verdict", "--leave-out", "device"])
    assert "no --leave-out" in str(again.exception)
    said = json.loads(CliRunner().invoke(app, ["validate", str(file), "--kind", "verdict", "--json"]).stdout)
    assert said["verdicts"][0]["probability"] == told.risks[0].probability


@pytest.mark.parametrize("change", [{"framework": 4}, {"gpu": ["h100"]}, {"source": None}, {"note": 1.5}])
def test_words_that_are_none_are_a_line_that_is_no_verdict(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "verdicts.jsonl"
    file.write_text(json.dumps(row(**change)))
    with pytest.raises(SpecError, match="is no verdict") as found:
        report(file)
    assert found.value.problems[0].line == 1


def test_devices_below_one_are_not_stated(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="not stated"):
        probability(tmp_path, n_gpus=-8)


def test_rows_of_one_source_are_on_one_side_of_the_split() -> None:
    sides = {
        source: {MemoryVerdict(str(n), f"{source}#L{n}", "", "", "", 1, {}, True, "", "", n).apart for n in range(3)}
        for source in map(str, range(40))
    }
    assert all(len(side) == 1 for side in sides.values())
    assert 8 < sum(side == {True} for side in sides.values()) < 32


@pytest.mark.data
def test_published_verdicts(measured_data: Path) -> None:
    found = report(measured_data / "memory" / "verdicts.jsonl")
    assert len(found.risks) >= 34
    for apart in (True, False):
        side = [risk for risk in found.risks if risk.verdict.apart == apart]
        out = [risk.probability for risk in side if risk.verdict.ran_out]
        assert sum(p > 0.5 for p in out) >= 0.8 * len(out)
        assert all(risk.probability <= 0.9 for risk in side if not risk.verdict.ran_out)
