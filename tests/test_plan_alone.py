"""A plan's folder stands alone: moved elsewhere and asked from anywhere, it gives its own numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import rlperf
from rlperf.cli.main import app
from rlperf.frameworks.imports import read_job_or_config
from rlperf.report.plan_files import plan_yaml, read_plan
from rlperf.specs.profiles import profile_root
from rlperf.units import human_seconds
from tests.test_plan_end_to_end import SMALL, trace


def ran(*words: str) -> str:
    """Standard output of a command that succeeds."""
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's folder with a device, its constants, a cluster and lengths of its own."""
    folder = tmp_path_factory.mktemp("own")
    shipped = profile_root()
    device = yaml.safe_load((shipped / "devices" / "h100_sxm.yaml").read_text())
    device |= {"name": "slow_h100", "aliases": [], "memory_bandwidth": "2 TB/s"}
    constants = yaml.safe_load((shipped / "calibrations" / "devices" / "h100_sxm.yaml").read_text())
    constants |= {"device": "slow_h100"}
    cluster = yaml.safe_load((shipped / "clusters" / "dgx_h100.yaml").read_text())
    cluster |= {"name": "mine", "device": "slow_h100"}
    for name, data in (
        ("devices/slow_h100.yaml", device),
        ("calibrations/devices/slow_h100.yaml", constants),
        ("clusters/mine.yaml", cluster),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(yaml.safe_dump(data))
    trace(folder / "lengths")
    task = {**SMALL["tasks"][0], "workload": "lengths"}  # type: ignore[index]
    (folder / "job.yaml").write_text(yaml.safe_dump({**SMALL, "cluster": "./clusters/mine.yaml", "tasks": [task]}))
    return folder


def rollouts(folders: pytest.TempPathFactory) -> str:
    """Where `simulate` writes, which it says: one folder for what is compared, and not the current one."""
    return str(folders.getbasetemp() / "rollouts")


@pytest.fixture(scope="module")
def moved(own: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, str]:
    """The plan's file where it was moved, its rl_step [s] and what `simulate` said before; the job's folder is gone."""
    said = json.loads(ran("plan", str(own / "job.yaml"), "--out", str(own / "run"), "--json"))
    simulated = ran("simulate", str(own / "run" / "plan.yaml"), "--out", rollouts(tmp_path_factory), "--json")
    there = tmp_path_factory.mktemp("there") / "run"
    shutil.move(own / "run", there)
    shutil.rmtree(own)
    return there / "plan.yaml", said["phases"][0]["predicted"]["rl_step_s"], simulated


def test_a_moved_plan_gives_its_own_numbers_from_anywhere(
    moved: tuple[Path, float, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    undrawn: None,
) -> None:
    file, seconds, simulated = moved
    text = file.read_text()
    assert str(file.parent) not in text and "/own" not in text, "it names no folder of this machine"
    monkeypatch.chdir("/")
    predicted = json.loads(ran("predict", str(file), "--json"))["predicted"]
    assert predicted["rl_step_s"] == seconds == read_plan(file).phases[0].predicted.rl_step_s
    assert ran("simulate", str(file), "--out", rollouts(tmp_path_factory), "--json") == simulated
    ran("export", str(file), "--out", str(tmp_path / "files"))
    here = (file.parent / "config" / "config.yaml").read_text()
    assert (tmp_path / "files" / "config.yaml").read_text() == here
    ran("report", str(file), "--out", str(tmp_path / "report.html"))
    assert "are left out" not in (tmp_path / "report.html").read_text()
    ran("explain", str(file), "--json")


def test_a_plan_written_for_another_framework_says_what_its_files_do_there(tmp_path: Path) -> None:
    """A plan for verl was written for NeMo-RL without a word: there it takes longer, and runs out of memory."""
    plan = rlperf.plan_job(model="Qwen3-8B", gpus=16, max_response="8k", prompts=64)
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan))
    there_and_here = (("--framework", "nemo_rl", "--out", str(tmp_path / "n")), ("--out", str(tmp_path / "v")))
    said, own = (" ".join(ran("export", str(tmp_path / "plan.yaml"), *words).split()) for words in there_and_here)
    there = rlperf.audit_config(tmp_path / "n" / "config.sh", plan=False).predicted
    assert there is not None and not there.fits and there.rl_step_s > plan.phases[0].predicted.rl_step_s
    assert f"{human_seconds(there.rl_step_s)} per rl_step under nemo_rl" in said
    assert f"trainer {100 * there.memory_bytes['trainer'].risk:.0f} %" in said
    assert " under " not in own


def test_a_path_means_the_plans_own_file_before_one_of_the_current_folder(
    moved: tuple[Path, float, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, seconds, _ = moved
    (tmp_path / "clusters").mkdir()
    shutil.copy(profile_root() / "clusters" / "dgx_h100.yaml", tmp_path / "clusters" / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    assert rlperf.predict_job(file).rl_step_s == seconds


def test_what_an_earlier_plan_took_along_goes(moved: tuple[Path, float, str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(moved[0].parent, folder)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(SMALL))
    ran("plan", str(tmp_path / "job.yaml"), "--out", str(folder))
    assert not (folder / "plan.inputs").exists()


def test_a_plan_is_read_where_a_job_or_a_configuration_is_due(moved: tuple[Path, float, str]) -> None:
    job = read_job_or_config(moved[0])
    assert job.pools and job.modes == (read_plan(moved[0]).phases[0].mode,)


@pytest.mark.slow
def test_a_plan_of_options_takes_its_own_files_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "mine"
    here.mkdir()
    shape = {"model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24,
             "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 64000}  # fmt: skip
    (here / "config.json").write_text(json.dumps(shape))
    rows = [{"prompt_tokens": 100 + k, "response_tokens": 300 + 40 * (k % 9)} for k in range(64)]
    (here / "lengths.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(here)
    asked = ("--model", "config.json", "--workload", "lengths.jsonl", "--gpus", "8", "--prompts", "16", "--group", "4",
             "--max-response", "1k")  # fmt: skip
    said = json.loads(ran("plan", *asked, "--out", "plan", "--json"))
    assert said["job"]["name"] == "mine-8xh100" and said["phases"][0]["tasks"] == ["lengths"]
    assert f"path: {here}" in Path("plan/config/config.yaml").read_text()
    shutil.move("plan", tmp_path / "elsewhere")
    shutil.rmtree(here)
    monkeypatch.chdir(tmp_path)
    again = json.loads(ran("predict", "elsewhere/plan.yaml", "--json"))["predicted"]["rl_step_s"]
    assert again == pytest.approx(said["phases"][0]["predicted"]["rl_step_s"], rel=1e-9)
