"""`rlperf workload` as a user runs it: exit codes, JSON keys, files, figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlperf.cli.workload import app
from rlperf.errors import SpecError
from rlperf.workload import load_model, read_recording
from rlperf.workload.sampling import mean_response_tokens, sample_lengths, sample_rl_steps
from rlperf.workload.writers import write_polytrace

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    table = sample_rl_steps(load_model("programming"), [0, 1, 2], 24, 4, max_response_tokens=16000, seed=1)
    write_polytrace(table, folder)
    return folder


@pytest.fixture(scope="module")
def fitted(trace: Path) -> Path:
    path = trace / "model.yaml"
    run(
        "fit",
        trace / "packed_lengths_step_0.jsonl",
        trace / "packed_lengths_step_1.jsonl",
        "-o",
        path,
        "--task",
        "code",
    )
    return path


def run(*arguments: object) -> str:
    result = RUNNER.invoke(app, [str(a) for a in arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_fit(fitted: Path) -> None:
    model = load_model(fitted)
    assert (model.task, model.group_size, model.prompts_per_step, model.max_response_tokens) == ("code", 4, 24, 16000)
    assert model.provenance.responses == 192


@pytest.mark.slow
def test_fidelity(fitted: Path, trace: Path) -> None:
    held_out = trace / "packed_lengths_step_2.jsonl"
    found = json.loads(run("fidelity", fitted, held_out, "--json", "--replicates", 40))
    assert set(found) >= {
        "system_bias",
        "interval_coverage",
        "interval_width_ratio",
        "group_max_ratio_error",
        "marginals",
    }
    assert found["marginals"][1]["name"] == "response_tokens"
    assert set(found["marginals"][1]) >= {"ks", "wasserstein", "quantiles_recorded", "quantiles_model"}
    assert found["group_max_ratio"]["low"] <= found["group_max_ratio"]["recorded"] <= found["group_max_ratio"]["high"]
    assert found["baseline"] is None
    assert found["system_bias_noise"] > 0
    text = run("fidelity", fitted, held_out, "--replicates", 20, "--fitted-on", trace / "packed_lengths_step_0.jsonl")
    assert "resampling what the model was fitted on instead" in text.replace("\n", " ")
    assert "E[max of a group] / E[L]" in text
    assert "not a replay on GPUs" in text


def test_show(fitted: Path, trace: Path) -> None:
    model = json.loads(run("show", fitted, "--json", "--max-response-tokens", 24000, "--rl-step", 5))
    assert model["truncated_fraction_low"] <= model["truncated_fraction"] <= model["truncated_fraction_high"]
    assert model["forecast"]["rl_step"] == 5
    assert model["candidates"][0]["name"] == model["law"]
    assert model["provenance"].startswith("fitted")
    recorded = json.loads(run("show", trace / "packed_lengths_step_0.jsonl", "--json"))
    assert (recorded["responses"], recorded["group_size"], recorded["max_response_tokens"]) == (96, 4, 16000)
    assert "assumed" in run("show", "image")
    assert "math" in run("show", "mixed")
    assert "turns" in run("show", "searching")


def test_what_was_left_out_is_shown_where_there_is_any(trace: Path, tmp_path: Path) -> None:
    """`workload show` said "skipped 0" and "incomplete groups 0" of every whole recording."""
    whole = trace / "packed_lengths_step_0.jsonl"
    assert "skipped" not in run("show", whole) and "incomplete" not in run("show", whole)
    assert json.loads(run("show", whole, "--json"))["incomplete_groups"] == 0
    cut = tmp_path / "cut.jsonl"
    cut.write_text(whole.read_text() + "{\n")
    assert re.search(r"skipped +1 ", run("show", cut, "--skip-damaged"))


def test_figures(fitted: Path, trace: Path, tmp_path: Path) -> None:
    run("show", fitted, "--figure", tmp_path / "model.svg")
    run("show", trace / "packed_lengths_step_0.jsonl", "--figure", tmp_path / "recording.png")
    for name in ("model.svg", "recording.png"):
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(SpecError, match="drawn as"):
        run("show", fitted, "--figure", tmp_path / "model.gif")


def test_figure_of_turns(tmp_path: Path) -> None:
    run("sample", "searching", "-o", tmp_path / "s", "--prompts", 12)
    run("show", tmp_path / "s", "--figure", tmp_path / "s.svg")
    assert (tmp_path / "s.svg").stat().st_size > 5000


def test_sample(tmp_path: Path) -> None:
    summary = json.loads(run("sample", "math", "-o", tmp_path / "s", "--prompts", 5, "--group-size", 3, "--rl-steps", 2,
                             "--first-rl-step", 7, "--max-response-tokens", 9000, "--json"))  # fmt: skip
    assert [Path(f).name for f in summary["files"]] == ["packed_lengths_step_7.jsonl", "packed_lengths_step_8.jsonl"]
    table = read_recording(tmp_path / "s").lengths
    assert (table.n, table.group_size, int(table.response_tokens.max())) == (30, 3, 9000)
    with pytest.raises(SpecError, match="at least 1"):
        run("sample", "math", "-o", tmp_path / "s", "--rl-steps", 0)


def test_convert(trace: Path, tmp_path: Path) -> None:
    for name in ("t.csv", "t.parquet", "t.json"):
        run("convert", trace / "packed_lengths_step_0.jsonl", "-o", tmp_path / name)
        assert read_recording(tmp_path / name).lengths.n == 96
    found = json.loads(run("convert", tmp_path / "t.csv", "-o", tmp_path / "folder", "--json"))
    assert read_recording(found["files"]).lengths.n == 96
    with pytest.raises(SpecError, match="write to a folder"):
        run("convert", tmp_path / "t.csv", "-o", tmp_path / "t.xml")


def test_few_and_odd_lengths(tmp_path: Path) -> None:
    """A table states its cap; a handful of responses is fitted with single families; what holds nothing is refused."""
    table = tmp_path / "t.csv"
    table.write_text("prompt_tokens,response_tokens,group,max_response_tokens\n9,20,0,40\n9,21,0,40\n12,5,1,40\n")
    assert read_recording(table).lengths.max_response_tokens == 40
    run("fit", table, "-o", tmp_path / "m.yaml")
    assert all("+" not in c.name for c in load_model(tmp_path / "m.yaml").candidates)
    table.write_text("prompt_tokens,response_tokens,max_response_tokens\n9,40,40\n9,40,40\n")
    with pytest.raises(SpecError, match="all 2 responses reached the maximum of 40"):
        run("fit", table, "-o", tmp_path / "m.yaml")
    table.write_text("prompt_tokens,response_tokens,max_response_tokens\n9,20,30\n9,20,40\n")
    with pytest.raises(SpecError, match="several values"):
        run("fit", table, "-o", tmp_path / "m.yaml")
    for option in ("--prompts", "--group-size"):
        with pytest.raises(SpecError, match="at least"):
            run("sample", "math", "-o", tmp_path / "s", option, 0)
    marked = tmp_path / "packed_lengths_step_0.jsonl"
    marked.write_bytes(b'\xef\xbb\xbf{"step": 0, "local_index": 0, "input": 9, "output": [4, 5]}\n')
    assert read_recording(marked).lengths.n == 2


def test_skip_damaged_counts_and_reports(trace: Path, tmp_path: Path) -> None:
    lines = (trace / "packed_lengths_step_0.jsonl").read_text().splitlines()
    path = tmp_path / "packed_lengths_step_0.jsonl"
    path.write_text("\n".join([lines[0], lines[1][:40], *lines[2:]]) + "\n")
    result = RUNNER.invoke(app, ["show", str(path), "--skip-damaged", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["skipped"] == 1
    assert "skipped 1 damaged" in result.stderr
    assert f"{path.name}:2" in result.stderr.replace("\n", "")
    with pytest.raises(SpecError, match="not valid JSON"):
        run("show", path)


def test_where_all_is_damaged_that_is_an_error(tmp_path: Path) -> None:
    """A recording of nothing was shown, with exit code 0: a script went on with it."""
    path = tmp_path / "packed_lengths_step_0.jsonl"
    path.write_text('{"step": 0, "output": "text"}\n{"step": \n')
    for command in (["show"], ["fit", "--out", str(tmp_path / "model.yaml")]):
        with pytest.raises(SpecError, match="nothing is left without what is damaged, 2 records"):
            run(*command, path, "--skip-damaged")
    assert not (tmp_path / "model.yaml").exists()


def test_distribution_files(tmp_path: Path) -> None:
    """The published parameter files in small: a mixture of prompts and responses, and sessions of one or two calls."""
    gmm = {"weights": [0.25, 0.75], "means": [[100, 4000], [150, 9000]], "covariances": [[[900, 0], [0, 4e6]]] * 2}
    names = ["input_1", "input_2", "output_1", "output_2"]
    covariance = [[100.0 * (i == j) for j in range(4)] for i in range(4)]
    two = {"feature_names": names, "mean_vector": [250, 480, 120, 300], "covariance_matrix": covariance}
    one = {
        "feature_names": ["input_1", "output_1"],
        "mean_vector": [300, 900],
        "covariance_matrix": [[400, 0], [0, 9e4]],
    }
    content = {
        "extraction_info": {"total_math_samples": 1000, "total_tool_calling_samples": 400},
        "math_task": {"gmm_parameters": gmm, "joint_distribution": {"correlation": 0.1}},
        "tool_calling_task": {"call_count_distribution": {"1": 100, "2": 300}, "sequence_models": {"1": one, "2": two}},
    }
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SpecError, match="choose one with --task"):
        run("fit", path, "-o", tmp_path / "m.yaml")
    run("fit", path, "-o", tmp_path / "m.yaml", "--task", "math")
    assert mean_response_tokens(load_model(tmp_path / "m.yaml")) == pytest.approx(7750, rel=0.02)
    run("fit", path, "-o", tmp_path / "t.yaml", "--task", "tool_use")
    sessions = sample_lengths(load_model(tmp_path / "t.yaml"), 400, 1, seed=0)
    assert sessions.n / 400 == pytest.approx(1.75, abs=0.1)
    assert sessions.response_tokens.sum() / 400 == pytest.approx(0.25 * 900 + 0.75 * 420, rel=0.1)
    del content["math_task"]["gmm_parameters"]  # type: ignore[attr-defined]
    path.write_text(json.dumps(content))
    with pytest.raises(SpecError, match="not as expected"):
        run("fit", path, "-o", tmp_path / "x.yaml", "--task", "math")
    assert not (tmp_path / "x.yaml").exists()


def test_wrong_input_ends_with_code_2(tmp_path: Path) -> None:
    code = "import sys; sys.argv[0] = 'rlperf'; from rlperf.cli.main import run; run()"
    arguments = ["workload", "fit", "nowhere", "-o", str(tmp_path / "m.yaml")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no such file" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "m.yaml").exists()


def test_tokens_are_written_as_in_jobs() -> None:
    """`plan --max-response 16k` was read, `workload show --max-response-tokens 16k` refused."""
    words, number = (run("show", "math", "--json", "--max-response-tokens", cap) for cap in ("16k", 16384))
    assert words == number
    for wrong in ("16x", "0"):
        refused = RUNNER.invoke(app, ["show", "math", "--max-response-tokens", wrong])
        said = " ".join(refused.output.replace("│", " ").split())
        assert refused.exit_code == 2 and "write it as 16384 or 16k" in said
