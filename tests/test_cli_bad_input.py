"""Wrong input: one message with every problem, file and line; the right exit code; nothing half-written."""

from __future__ import annotations

import json
import re
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
    "pools apart on more devices than there are": (
        "modes: [async]\nlimits: {staleness: 1}\npools: [{role: trainer, devices: 5}, {role: rollout, devices: 5}]\n",
        "",
        ("job.yaml:13: pools: async keeps rollout 5 and trainer 5 devices apart: 10, where there are 8", "raise nodes"),
    ),
    "pools that share other devices": (
        "pools: [{role: trainer, devices: 5}, {role: rollout, devices: 3}]\n", "",
        ("job.yaml:11: pools: colocated shares devices, and they differ: rollout 3 and trainer 5",),
    ),
    "a field of another place": (
        "pools: [{role: rollout, settings: {weight_snc: nccl}}]\n", "",
        ("settings.weight_snc: unknown field (did you mean weight_sync? it belongs to the top)",),
    ),
    "weights of the engine by another word": (
        "pools: [{role: rollout, settings: {weights_dtype: fp8}}]\n", "", ("(here it is rollout_dtype of the rollout",),
    ),
    "environments of a task": ("", "group_size: 4|environments: 4", ("unknown field (here it is max_trajectories)",)),
    "partial rollouts of turns": (
        "framework: slime\nmodes: [async]\nlimits: {staleness: 1}\n",
        "workload: math|workload: software_engineering\n    over_provision: 1.5",
        ("job.yaml:7: tasks.0.over_provision: partial rollouts of task math, which takes several turns",),
    ),
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


DEVICE = Path(__file__).parent.parent / "hwprofiles" / "devices" / "h100_sxm.yaml"


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("memory", "-96 GiB"), ("memory_bandwidth", "-2.9 TB/s"), ("host_bandwidth", "0 GB/s"),
        ("bf16", "-640 TFLOP/s"), ("bf16", "0 TFLOP/s"), ("host_link", "PCI5"),
    ],
)  # fmt: skip
def test_a_device_without_a_positive_rate_is_refused(
    field: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(rf"(?m)^(\s*(?:peaks: \{{.*?)?\b{field}: )[^,\n#}}]+", rf"\g<1>{wrong}", DEVICE.read_text(), count=1)
    assert text != DEVICE.read_text()
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "pigeon_9.yaml").write_text(text.replace("name: h100_sxm", "name: pigeon_9", 1))
    (tmp_path / "job.yaml").write_text(JOB.replace("dgx_h100", "generic:pigeon_9"))
    code, out, err = call(capsys, monkeypatch, "plan", str(tmp_path / "job.yaml"))
    assert (code, out) == (2, "") and "pigeon_9.yaml:" in err and field in err and wrong in err
    assert "did you mean PCIe5?" in err if field == "host_link" else "is negative" in err or "greater than 0" in err
    assert err.count("pigeon_9.yaml") == 1, err


@pytest.mark.parametrize(
    ("added", "swap", "expected"),
    [
        ("price: -3 USD/h\n", "", ("job.yaml:11: price", "is negative")),
        ("modes: [colocate]\n", "", ("did you mean colocated?",)),
        ("objective: step_tim\n", "", ("did you mean step_time?",)),
        ("", "dgx_h100|h100_sxm", ("h100_sxm is a device: write generic:h100_sxm",)),
    ],
)
def test_names_and_prices_of_a_job(
    added: str, swap: str, expected: tuple[str, ...], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = tmp_path / "job.yaml"
    job.write_text((JOB.replace(*swap.split("|")) if swap else JOB) + added)
    code, out, err = call(capsys, monkeypatch, "plan", str(job))
    assert (code, out) == (2, "")
    for part in expected:
        assert part in err, err


BACKEND = """\
id: rowboat
title: A toy
relative: fsdp2
capability:
  zero_stages: {searched: [3]}
  activation_recompute: {searched: [full]}
  frameworks: {verl: fsdp2}
  source: none
"""


@pytest.mark.parametrize(
    ("right", "wrong", "line", "expected"),
    [
        ("relative: fsdp2", "relative: fdsp2", 3, "did you mean fsdp2?"),
        ("id: rowboat", "id: rowbot", 1, "write id: rowboat"),
        ("{verl: fsdp2}", "{zebra: fsdp2}", 7, "there is no such framework"),
        ("searched: [full]", "searched: [fulll]", 6, "activation_recompute"),
    ],
)
def test_a_mistake_in_a_backends_file_is_named_once_and_there(
    right: str, wrong: str, line: int, expected: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tmp_path / "calibrations" / "trainers"
    folder.mkdir(parents=True)
    (folder / "rowboat.yaml").write_text(BACKEND.replace(right, wrong))
    (tmp_path / "job.yaml").write_text(JOB + "trainer_backends: rowboat\n")
    code, out, err = call(capsys, monkeypatch, "plan", str(tmp_path / "job.yaml"))
    assert (code, out) == (2, "")
    assert f"rowboat.yaml:{line}: " in err and expected in err, err
    assert err.count(expected) == 1 and "framework: " not in err, err


def test_a_sweep_refuses_an_unknown_backend_and_names_a_misspelt_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("job: job.yaml\ngrid:\n  trainer_backends: [megatron, foo]\n")
    code, _, err = call(capsys, monkeypatch, "sweep", str(sweep), "--out", str(tmp_path / "out"))
    assert code == 2 and "trainer_backends: there is no trainer backend named 'foo'" in err and "peft_nf4" not in err
    sweep.write_text("job: job.yaml\ngrid:\n  tasks.0.prompts_per_step: {min: 8, max: 64, factr: 2}\n")
    code, _, err = call(capsys, monkeypatch, "sweep", str(sweep), "--out", str(tmp_path / "out"))
    assert code == 2 and "sweep.yaml:3" in err and "factr: unknown field, did you mean factor?" in err


def test_import_does_not_overwrite_a_job_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("trl grpo --model_name_or_path Qwen/Qwen3-0.6B --use_vllm true --num_generations 8\n")
    Path("job.yaml").write_text("mine")
    words = ("import", "run.sh", "--framework", "trl")
    code, out, err = call(capsys, monkeypatch, *words)
    assert (code, out, Path("job.yaml").read_text()) == (2, "", "mine") and "--force" in err
    for named in (("--force",), ("--out", "job.yaml")):
        Path("job.yaml").write_text("mine")
        assert call(capsys, monkeypatch, *words, *named)[0] == 0
        assert Path("job.yaml").read_text() != "mine"


@pytest.mark.parametrize(("mode", "advised"), [("colocated", False), ("one_step_off", True)])
def test_advice_to_colocate_is_for_those_who_do_not(mode: str, advised: bool) -> None:
    from rlperf.diagnose.advice import advice_for
    from rlperf.diagnose.graph import GraphBuilder
    from rlperf.specs.modes import MODES

    pools = ("rank",) if MODES[mode].shares_devices else ("rollout", "trainer")
    build = GraphBuilder(pools, 8)
    build.add(0, 0.0, 1.0)
    advice = advice_for("weight_sync", 1.0, shares_devices=build.freeze().shares_devices)
    assert any(each.knob == "colocate" for each in advice) == advised
    (untold,) = (each.action for each in advice_for("weight_sync", 1.0, shares_devices=None) if each.knob == "colocate")
    assert untold.startswith("unless they take turns already")


def test_a_closed_output_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``rlperf ... >&-``: Python has no stream there, and its last flush was a traceback."""
    monkeypatch.setattr("sys.stdout", None)
    assert call(capsys, monkeypatch, "--version") == (74, "", "error: standard output is closed\n")
