"""Wrong input: one message with every problem, file and line; the right exit code; nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlperf.cli.main import app, run

JOB = """\
name: small
architecture: Qwen3-0.6B
cluster: dgx_h100
tasks:
  - name: math
    workload: math
    prompts_per_step: 16
    group_size: 4
    max_prompt_tokens: 512
    max_response_tokens: 1024
"""


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line."""
    monkeypatch.setattr("sys.argv", ["rlperf", *arguments])
    with pytest.raises(SystemExit) as stopped:
        run()
    streams = capsys.readouterr()
    return int(stopped.value.code or 0), streams.out, streams.err


def packed(step: int, responses: list[int], index: int = 0) -> str:
    return json.dumps(
        {"step": step, "rank": 0, "dp_rank": 0, "tp_rank": 0, "local_index": index, "input": 20, "output": responses,
         "n_sampling": len(responses), "validate": False}
    )  # fmt: skip


CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "unknown field": ("nodes_: 2\n", "", ("job.yaml:11: nodes_: unknown field", "did you mean nodes?")),
    "missing unit": ("limits: {step: 300}\n", "", ("job.yaml:11", "300 has no unit", "'300 s'")),
    "wrong unit": ("limits: {step: 3 GB}\n", "", ("is in bytes, but s is due",)),
    "negative count": ("nodes: -1\n", "", ("job.yaml:11: nodes", "greater than 0")),
    "zero devices": ("pools: [{role: trainer, devices: 0}]\n", "", ("0 is not a positive whole number",)),
    "too many devices": ("pools: [{role: trainer, devices: 64}]\n", "", ("asks for 64 devices, the cluster has 8",)),
    "own devices for the reference": (
        "pools: [{role: reference, devices: 8}]\n", "", ("reference pool states devices", "leave the pool out")
    ),
    "usd without a price": ("objective: usd_per_step\n", "", ("USD without a price", "price:")),
    "unknown objective": ("objective: speed\n", "", ("job.yaml:11: objective", "'speed'")),
    "async without staleness": ("modes: [async]\n", "", ("needs limits.staleness",)),
    "unknown role": ("pools: [{role: trainr}]\n", "", ("pools.0.role", "'trainr'")),
    "engine setting on a trainer": (
        "pools: [{role: trainer, settings: {max_running: 8}}]\n", "", ("max_running cannot be set on a trainer pool",),
    ),
    "unknown word": (
        "pools: [{role: trainer, layout: {activation_recompute: half}}]\n", "", ("not one of none, selective, full",),
    ),
    "unknown architecture": ("", "Qwen3-0.6B|Qwen3-0.6C", ("Qwen3-0.6C", "did you mean")),
    "unknown cluster": ("", "dgx_h100|dgx_h1000", ("dgx_h1000", "did you mean dgx_h100?")),
    "unknown framework": ("framework: verll\n", "", ("verll", "did you mean verl?")),
    "engine that the framework does not run": ("framework: slime\nengine: vllm\n", "", ("slime", "sglang")),
    "mode that the framework does not run": ("modes: [disaggregated]\n", "", ("no mode disaggregated", "one_step_off")),
    "unknown engine": ("engine: vlm\n", "", ("vlm", "did you mean vllm?")),
    "unknown backend of an engine": (
        "pools: [{role: rollout, settings: {backend: vlm}}]\n", "", ("job.yaml:11: pools.0.settings.backend", "vllm?"),
    ),
    "unknown backend of a trainer": (
        "pools: [{role: trainer, settings: {backend: fsdp3}}]\n", "",
        ("job.yaml:11: pools.0.settings.backend", "'fsdp3'", "fsdp2?"),
    ),
    "unknown dtype": (
        "pools: [{role: rollout, settings: {kv_dtype: fp9}}]\n", "", ("job.yaml:11: pools.0.settings.kv_dtype", "fp8"),
    ),
    "missing trace": ("", "workload: math|workload: nowhere/trace.jsonl", ("nowhere/trace.jsonl", "no such workload")),
    "length above the positions": ("", "1024|900000", ("are above the", "positions of Qwen3-0.6B")),
    "duplicate key": ("name: other\n", "", ("job.yaml:11: name: stands twice",)),
    "broken yaml": ("pools: [\n", "", ("is not valid YAML",)),
    "batch without a limit on what it changes": (
        "", "max_response_tokens: 1024|max_response_tokens: [512, 1024]", ("limits.truncated_fraction",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_wrong_job(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    added, swap, expected = CASES[name]
    text = JOB
    if swap:
        old, new = swap.split("|")
        assert old in text
        text = text.replace(old, new)
    job = tmp_path / "job.yaml"
    job.write_text(text + added)
    for command in ("plan", "predict"):
        arguments = [command, str(job)] + (["--out", str(tmp_path / "out")] if command == "plan" else [])
        code, out, err = call(capsys, monkeypatch, *arguments)
        assert (code, out) == (2, ""), (code, out, err)
        assert "Traceback" not in err
        for part in expected:
            assert part in err, err
        assert not (tmp_path / "out").exists()


def test_every_problem_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        JOB.replace("Qwen3-0.6B", "Qwen9").replace("dgx_h100", "dgx_x").replace("workload: math", "workload: nothing")
    )
    code, _, err = call(capsys, monkeypatch, "plan", str(job))
    assert code == 2 and "framework" not in err
    for part in ("job.yaml:2", "Qwen9", "job.yaml:3", "dgx_x", "no such workload"):
        assert part in err, err


@pytest.mark.parametrize("damage", ["truncated", "empty", "not json", "negative length", "wrong field"])
def test_damaged_trace(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [packed(0, [30, 40, 50, 60], index) for index in range(16)]
    bad = {
        "truncated": [*lines[:-1], lines[-1][:-20]],
        "empty": [],
        "not json": [*lines, "hello"],
        "negative length": [*lines, packed(0, [30, -4, 50, 60], 16)],
        "wrong field": [*lines, lines[0].replace('"output"', '"outputs"')],
    }[damage]
    trace = tmp_path / "packed_lengths_step_0.jsonl"
    trace.write_text("\n".join(bad))
    job = tmp_path / "job.yaml"
    job.write_text(JOB.replace("workload: math", f"workload: {trace.name}"))
    code, out, err = call(capsys, monkeypatch, "plan", str(job), "--out", str(tmp_path / "out"))
    assert (code, out) == (2, ""), err
    assert "packed_lengths_step_0.jsonl" in err
    if damage != "empty":
        assert f"packed_lengths_step_0.jsonl:{len(bad)}" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_impossible_limits_are_infeasible_with_the_nearest_miss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB + "limits: {step: 1 ms}\n")
    code, out, err = call(capsys, monkeypatch, "plan", str(job))
    assert (code, out) == (1, "")
    assert "a limit of the job" in err
    assert "nearest miss: the fastest rl_step" in err


def test_a_model_too_large_for_the_cluster_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.replace("Qwen3-0.6B", "DeepSeek-V3"))
    code, _, err = call(capsys, monkeypatch, "plan", str(job))
    assert code == 1
    assert "nothing fits DeepSeek-V3 on 8 x h100_sxm" in err


def test_output_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    (tmp_path / "out").write_text("a file")
    code, out, err = call(capsys, monkeypatch, "plan", str(job), "--out", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert str(tmp_path / "out") in err
    assert (tmp_path / "out").read_text() == "a file"


@pytest.mark.parametrize(
    "arguments", [["plan", "no.yaml"], ["plam"], ["plan", "--no-such-option"], ["profiles", "show", "h100x"]]
)
def test_wrong_command_lines(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert err.strip()


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_a_command_has_its_options_whatever_the_process_was_called_with(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pytest", *words])
    assert "--out" in CliRunner().invoke(app, ["import", "--help"]).output
