"""Jobs without a file: options, keyword arguments, five questions; and what the command line says of itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import rlperf
from rlperf.api import job_of
from rlperf.cli import main
from rlperf.cli.init import _devices
from rlperf.errors import SpecError
from rlperf.specs.job import Job
from rlperf.specs.profiles import profile_root
from rlperf.specs.reader import parse_document, validate
from rlperf.specs.short_job import cluster_of, job_text, options_for, short_job
from rlperf.sweep import Sweep

SMALL: dict[str, Any] = {"model": "Qwen3-8B", "gpus": 8, "gpu": "h100", "max_response": "4k", "prompts": 32, "group": 4}


def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["rlperf", *args])
    with pytest.raises(SystemExit) as left:
        main.run()
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def options(values: dict[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_options_keywords_and_a_file_are_one_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = ask(capsys, monkeypatch, "predict", *options(SMALL), "--json")
    assert code == 0, err
    told = json.loads(out)["predicted"]["rl_step_s"]
    assert rlperf.predict_job(**SMALL).rl_step_s == pytest.approx(told, rel=1e-12)
    file = tmp_path / "job.yaml"
    file.write_text(job_text(short_job(**SMALL)))
    assert rlperf.predict_job(file).rl_step_s == pytest.approx(told, rel=1e-12)
    assert rlperf.predict_job(short_job(**SMALL).model_dump()).rl_step_s == pytest.approx(told, rel=1e-12)


def test_a_plan_under_another_framework_obeys_its_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(job_text(short_job(**SMALL)))
    code, _, err = ask(capsys, monkeypatch, "plan", str(file), "--framework", "trl", "--out", str(tmp_path / "plan"))
    assert code == 0, err
    plan = validate(parse_document((tmp_path / "plan" / "plan.yaml").read_text(), "plan.yaml"), rlperf.Plan)
    assert plan.job.framework == "trl"
    assert plan.phases[0].pool("trainer").settings.backend in ("fsdp2", "deepspeed", "accelerate_fsdp2")


@pytest.mark.slow
def test_several_frameworks_are_ranked_and_each_plan_gets_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("plan", *options({**SMALL, "mode": "one_step_off"}), "--framework", "verl,slime==0.3,trl")
    code, out, err = ask(capsys, monkeypatch, *asked, "--out", str(tmp_path))
    assert code == 0, err
    assert max(out.index(" verl "), out.index(" slime ")) < out.index("refused: trl")
    for name in ("verl", "slime-0.3"):
        plan = validate(parse_document((tmp_path / name / "plan.yaml").read_text(), "plan.yaml"), rlperf.Plan)
        assert plan.job.framework.replace("==", "-") == name and (tmp_path / name / "config" / "EXPORT.md").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slime-0.3", "verl"]
    code, out, err = ask(capsys, monkeypatch, *asked[:-1], "verl,trl", "--json")
    rows = json.loads(out)["rows"]
    assert [bool(row["why_not"]) for row in rows] == [False, True]
    assert ask(capsys, monkeypatch, *asked, "--what-if", "all")[0] == 2
    too_large = options({**SMALL, "model": "Qwen3-235B-A22B"})
    code, out, err = ask(capsys, monkeypatch, "plan", *too_large, "--framework", "verl,slime")
    assert (code, out.count("refused: "), "no framework has a plan" in err) == (1, 2, True)


@pytest.mark.parametrize(
    ("gpu", "gpus", "devices"),
    [("h100", 32, 32), ("a100", 4, 4), ("dgx_b200", 8, 8), ("l40s", 2, 2)],
)
def test_devices_are_whole_nodes_or_a_part_of_one(gpu: str, gpus: int, devices: int) -> None:
    from rlperf.specs.profiles import load_cluster

    fields = cluster_of(gpu, gpus)
    cluster = load_cluster(fields["cluster"], nodes=fields["nodes"], devices_per_node=fields.get("devices_per_node"))
    assert cluster.devices == devices
    assert cluster.rails >= 1


def test_profiles_of_ones_own_are_found_from_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--gpu` knew shipped names alone, took a cluster's file for a device's, and lost the path of a device."""
    sheet = (profile_root() / "devices" / "l40s.yaml").read_text().replace("name: l40s", "name: mine", 1)
    sheet = re.sub(r"(?m)^aliases:.*\n", "", sheet)
    nodes = (profile_root() / "clusters" / "dgx_h100.yaml").read_text()
    nodes = nodes.replace("name: dgx_h100", "name: rack").replace("device: h100_sxm", "device: mine")
    for kind, name, text in (("devices", "mine", sheet), ("clusters", "rack", nodes)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    for gpu in ("mine", "devices/mine.yaml", "rack", "./clusters/rack.yaml"):
        job = short_job("Qwen3-0.6B", 16, gpu)
        assert (job.name, rlperf.api.ask(job).context.cluster.device) == (f"Qwen3-0.6B-16x{Path(gpu).stem}", "mine")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(rlperf.SpecError, match=r"in no folder where .* \(move it to devices/mine.yaml beside the job"):
        short_job("Qwen3-0.6B", 16, "../devices/mine.yaml")


def test_init_asks_what_no_option_states_and_writes_the_same_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from io import StringIO

    monkeypatch.setattr("sys.stdin", StringIO("8 h100\n\n4k\n32 x 4\n"))
    file = tmp_path / "job.yaml"
    code, _, err = ask(capsys, monkeypatch, "init", "--model", "Qwen3-8B", "--out", str(file))
    assert code == 0, err
    assert validate(parse_document(file.read_text(), "job.yaml"), rlperf.Job) == short_job(**SMALL)
    code, _, err = ask(capsys, monkeypatch, "init", *options(SMALL), "--framework", "verl", "--out", str(file))
    assert code == 2
    assert "is there already" in err


def test_init_without_answers_writes_nothing_and_shows_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from io import StringIO

    monkeypatch.setattr("sys.stdin", StringIO("Qwen3-8B\n"))
    code, _, err = ask(capsys, monkeypatch, "init", "--out", str(tmp_path / "job.yaml"))
    assert code == 2
    assert "no answer to: Devices" in err and "as options" in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_init_asks_again_where_an_answer_is_wrong_and_refuses_a_wrong_option_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from io import StringIO

    file = tmp_path / "job.yaml"
    models, devices, batches = ["Qwen3-8Bz", "Qwen3-8B"], ["12 h100", "8 h100"], ["32 x", "0 x 4", "32 x 0", "32 x 4"]
    answers = [*models, *devices, "h100", "verl", "verl", "4k", *batches]
    monkeypatch.setattr("sys.stdin", StringIO("\n".join(answers) + "\n"))
    code, out, err = ask(capsys, monkeypatch, "init", "--out", str(file))
    assert code == 0, err
    assert (out + err).count("Error") == 7
    assert validate(parse_document(file.read_text(), "job.yaml"), rlperf.Job) == short_job(**SMALL)
    for wrong in (("--model", "Qwen3-8Bz"), ("--framework", "h100"), ("--gpus", "12")):
        monkeypatch.setattr("sys.stdin", StringIO(""))
        right = {"--model": "Qwen3-8B", "--gpus": "8", **dict([wrong])}
        given = [word for pair in right.items() for word in pair]
        code, _, err = ask(capsys, monkeypatch, "init", *given, "--out", str(tmp_path / "other.yaml"))
        assert code == 2 and wrong[1] in err
    code, out, _ = ask(capsys, monkeypatch, "init", "--help")
    assert code == 0 and "JOB" not in out


@pytest.mark.parametrize("answer", ["4 rtx4090", "4 x rtx4090", "4x rtx4090", "4xrtx4090", " 4  rtx4090 "])
def test_init_takes_devices_as_people_write_them(answer: str) -> None:
    assert _devices(answer) == (4, "rtx4090")
    assert _devices("16") == (16, None)
    for wrong in ("four rtx4090", "4x", "4 x rtx4090 more", "x rtx4090"):
        with pytest.raises(SpecError, match="write it as 32 h100"):
            _devices(wrong)


def test_a_file_that_is_there_is_told_by_what_is_wrong_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 1800, "num_hidden_layers": 4}))
    code, _, err = ask(capsys, monkeypatch, "profiles", "show", str(file))
    assert code == 2 and "is missing" in err and "did you mean" not in err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("plan", "--gpus", "8"), "by --model and --gpus; --model is missing"),
        (("plan", "job.yaml", "--max-response", "4k"), "change job.yaml itself"),
        (("plan", "--max-respons", "4k"), "no option --max-respons (did you mean --max-response?)"),
        (("explain", "run.log", "--log", "run.log"), "no option --log (it belongs to replan, verdict, audit;"),
        (("plan", "--model", "Qwen3-8B"), "--model needs --gpus"),
        (("plan", "job.yaml", "--model", "Qwen3-8B", "--gpus", "8"), "not both"),
        (("plan", "--model", "Qwen3-8B", "--gpus", "12"), "write 8 or 16"),
        (("plan", "--model", "Qwen3-8B", "--gpus", "8", "--max-response", "many"), "write it as 16384 or 16k"),
        (
            ("plan", "--model", "Qwen3-8B", "--gpus", "8", "--staleness", "2"),
            "behind, not 2 (leave it out, or mode k_step",
        ),
        (
            ("plan", "--model", "Qwen3-8B", "--gpus", "8", "--mode", "async", "--staleness", "0"),
            "staleness of at least 1",
        ),
        (
            ("plan", "--model", "Qwen3-8B", "--gpus", "8", "--workload", "mth"),
            "(did you mean math? It is a path, or one",
        ),
        (("plan", "--model", "Qwen3-8B", "--gpus", "8", "--mode", "colocated,asinc"), "did you mean async?"),
        (("size", "--model", "Qwen3-8B", "-t", "step<=1h", "--price", "h100"), "write it as h100=2.5,a100=1.3"),
        (("size", "--model", "Qwen3-8B", "-t", "step<=1h", "--price", "h100=2,h100=3"), "two prices of h100"),
        (("size", "--model", "Qwen3-8B", "-t", "step<=1h", "--price", "h100=-2"), "is negative"),
        (("plam",), "did you mean plan?"),
        (("zzzz",), "`rlperf --help` names them"),
    ],
)
def test_mistakes_are_told_in_a_line(
    given: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = ask(capsys, monkeypatch, *given)
    assert code == 2
    assert says in err
    assert len(err.splitlines()) == 1


def test_staleness_is_stated_where_the_mode_leaves_it_open() -> None:
    """By default the least that the mode needs; one that is always the same may be said, another is refused."""
    assert short_job(**SMALL, mode="async").limits.staleness == 1
    assert short_job(**SMALL, mode="async", staleness=4).limits.staleness == 4
    assert short_job(**SMALL, mode="one_step_off", staleness=1).limits.staleness == 1
    with pytest.raises(rlperf.SpecError, match="1 policy versions behind, not 4"):
        short_job(**SMALL, mode="one_step_off", staleness=4)
    with pytest.raises(rlperf.SpecError, match="async_"):
        short_job(**SMALL, mode="async_", staleness=4)


def test_several_modes_are_named_with_commas_and_allow_what_all_of_them_need() -> None:
    job = short_job(**SMALL, mode="colocated, async")
    assert (job.modes, job.limits.staleness) == (("colocated", "async"), 1)
    assert short_job(**SMALL, mode=["colocated", "async"], staleness=4).limits.staleness == 4
    assert short_job(**SMALL, mode="colocated,one_step_off", staleness=1).limits.staleness == 1
    with pytest.raises(rlperf.SpecError, match="colocated, one_step_off trains on samples 1 policy versions behind"):
        short_job(**SMALL, mode="colocated,one_step_off", staleness=2)
    assert "--mode colocated,async" in options_for(job)
    for staleness in (None, 2):
        with pytest.raises(rlperf.SpecError, match="at least one alternative"):
            short_job(**SMALL, mode=[], staleness=staleness)


def test_a_wrong_keyword_is_told_with_the_nearest() -> None:
    with pytest.raises(rlperf.SpecError, match=r"max_respons \(did you mean max_response\?\)"):
        job_of(None, {"model": "Qwen3-8B", "gpus": 8, "max_respons": "4k"})
    with pytest.raises(rlperf.SpecError, match="no job"):
        rlperf.plan_job()


def test_no_hint_where_nothing_is_near(tmp_path: Path) -> None:
    (tmp_path / "trace.yaml").write_text("a: 1")
    with pytest.raises(rlperf.SpecError, match=r"no such file$"):
        rlperf.plan_job(tmp_path / "zzz.yaml")
    with pytest.raises(rlperf.SpecError, match=r"did you mean trace.yaml\?"):
        rlperf.plan_job(tmp_path / "trce.yaml")


def test_version_and_completion(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(capsys, monkeypatch, "--version")[1] == f"rlperf {rlperf.__version__}\n"
    assert "--install-completion" in ask(capsys, monkeypatch, "--help")[1]


def test_tokens_are_written_as_16k_in_files_and_sweeps_too() -> None:
    job = short_job(**SMALL).model_dump(mode="json", exclude_none=True)
    job["tasks"][0] |= {"max_response_tokens": "16k", "max_prompt_tokens": "1k"}
    (task,) = job_of(job, {}).tasks
    assert (task.max_response_tokens, task.max_prompt_tokens) == ((16384,), 1024)
    job["tasks"][0]["max_response_tokens"] = {"min": "4k", "max": "16k", "factor": 2}
    assert job_of(job, {}).tasks[0].max_response_tokens == (4096, 8192, 16384)
    job["tasks"][0]["max_response_tokens"] = "16kk"
    with pytest.raises(rlperf.SpecError, match="'16kk' is not a number of tokens: write it as 16384 or 16k"):
        job_of(job, {})
    grid = {"tasks.*.max_response_tokens": ["4k", 8192], "tasks.*.max_prompt_tokens": "2k", "nodes": [1, 2]}
    swept = Sweep(job=job, grid=grid).grid
    assert swept == {"tasks.*.max_response_tokens": [4096, 8192], "tasks.*.max_prompt_tokens": 2048, "nodes": [1, 2]}


def test_token_budgets_are_written_so_too() -> None:
    """`max_response_tokens: 8k` was read, and `token_budget: 16k` beside it "not a positive whole number"."""
    settings = {"token_budget": ["16k", 24576], "scoring_token_budget": "32k"}
    pools = [{"role": "trainer", "settings": settings}, {"role": "rollout", "settings": {"engine_token_budget": "8k"}}]
    job = job_of({**short_job(**SMALL).model_dump(mode="json", exclude_none=True), "pools": pools}, {})
    assert isinstance(job, Job)
    trainer, rollout = job.pool("trainer").settings, job.pool("rollout").settings
    assert (trainer.token_budget, trainer.scoring_token_budget) == ((16384, 24576), 32768)
    assert rollout.engine_token_budget == 8192
    assert Sweep(job=job, grid={"pools.trainer.settings.token_budget": ["8k"]}).grid == {
        "pools.trainer.settings.token_budget": [8192]
    }
