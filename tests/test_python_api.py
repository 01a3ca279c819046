"""Python is the product too: every command is a function, with the same answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

import rlperf
from rlperf.alternatives import BASE, judged_plan
from rlperf.api import ask, job_of
from rlperf.cli.main import app
from rlperf.cli.output import console, print_table
from rlperf.errors import SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.plan.compare import compare_weighted, side_of
from rlperf.ranking import DRAWS, FrameworkRanking, _ranked
from rlperf.report.plan_text import markdown, memory_rows, print_plan
from rlperf.specs.framework_names import FRAMEWORKS
from rlperf.specs.job import Job
from rlperf.specs.profiles import profile_root
from rlperf.specs.short_job import SHORT
from rlperf.sweep import Sweep, read_result
from rlperf.sweep.paths import with_values
from rlperf.sweep.spec import check_sweep
from rlperf.techniques import gains
from rlperf.workload import fit_model, load_model, read_recording, sample_lengths


def few(job: Job) -> Job:
    """The job with few trainers left open: what is asked here is how, not which."""
    layout = {"tensor_parallel": [1, 2], "context_parallel": 1, "ulysses": 1, "pipeline_parallel": 1}
    return Job.model_validate({**job.stated(), "pools": [{"role": "trainer", "layout": layout}]})


LENGTHS = pl.DataFrame({"prompt_tokens": [1, 2], "response_tokens": [3, 4]})
JOB = few(rlperf.short_job("Qwen3-8B", 8, max_response="2k", prompts=16, group=4))


def test_what_if_tells_faster_from_slower_and_names_what_does_not_run() -> None:
    table = rlperf.what_if(
        JOB,
        {
            "nothing": {"name": "other"},
            "half": {"tasks.*.max_response_tokens": 1024},
            "one device": {"pools.rollout.devices": 8, "pools.rollout.layout.tensor_parallel": 3},
        },
        plan=False,
        draws=4,
    )
    base, nothing, half, impossible = table.rows
    assert base.name == BASE
    assert (nothing.ratio, nothing.apart) == (pytest.approx(1.0), False)
    assert half.apart
    assert half.ratio is not None and half.ratio < 0.8
    assert impossible.rl_step_s is None and impossible.why_not
    assert table.to_frame().height == 4
    assert "faster" in str(table)


def test_what_if_and_gains_ask_where_the_job_lies(tmp_path: Path) -> None:
    """A cluster that a log has told, in a calibration beside the job's file: every question hears of it."""
    (tmp_path / "job.yaml").write_text(JOB.model_dump_json(exclude_none=True))
    shipped = rlperf.predict_job(tmp_path / "job.yaml").rl_step_s
    own = tmp_path / "calibrations" / "frameworks"
    own.mkdir(parents=True)
    for source in (profile_root() / "calibrations" / "frameworks").glob("verl_*.yaml"):
        told = {**yaml.safe_load(source.read_text()), "factors": {"rollout": 2.0}}
        (own / source.name).write_text(yaml.safe_dump(told))
    slower = rlperf.predict_job(tmp_path / "job.yaml").rl_step_s
    assert slower > 1.1 * shipped
    of_file, of_job = (
        rlperf.what_if(asked, {}, plan=False, draws=1, folder=folder).rows[0].rl_step_s
        for asked, folder in ((tmp_path / "job.yaml", None), (JOB, tmp_path))
    )
    assert of_file == of_job == pytest.approx(slower, rel=0.1)
    planned = rlperf.plan_job(tmp_path / "job.yaml").phases[0].predicted.rl_step_s
    found = gains(tmp_path / "job.yaml", ("prefix caching",), draws=1)
    assert found.rl_step_s == pytest.approx(planned, rel=0.1)


def test_a_plan_stands_for_its_job() -> None:
    """`what_if` refused a plan, and `predict_job` of a plan took no notice of the words beside it."""
    plan = rlperf.plan_job(rlperf.short_job("Qwen3-4B", 8, max_response="4k", prompts=16))
    table = rlperf.what_if(plan, {"twice the nodes": {"nodes": 2}}, draws=1)
    assert [row.devices for row in table.rows] == [8, 16]
    assert rlperf.predict_job(plan).rl_step_s == pytest.approx(plan.phases[0].predicted.rl_step_s)
    assert rlperf.predict_job(plan, nodes=2).rl_step_s < 0.9 * rlperf.predict_job(plan).rl_step_s
    assert rlperf.plan_job(plan, nodes=2).job.nodes == 2
    swept = rlperf.sweep_job(Sweep(job=plan.job, grid={"nodes": [1, 2]}), workers=1)
    assert swept.to_frame()["nodes"].to_list() == [1, 2]
    assert rlperf.size_job(plan.job, "step<=1s", clusters="h100", most_nodes=1).rows[0].cluster == "dgx_h100"


def test_a_device_named_as_a_cluster_is_told_the_clusters_it_ships_in() -> None:
    with pytest.raises(
        rlperf.SpecError, match="write generic:mi300x, or mi300x_node, which has nodes as they are sold"
    ):
        rlperf.load_cluster("mi300x")


def test_what_if_refuses_names_alone() -> None:
    with pytest.raises(rlperf.SpecError, match="changes by their names are due"):
        rlperf.what_if(rlperf.short_job("Qwen3-4B", 8), ["fp8 rollouts"])  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"half": 2048}, ("nodes",)])
def test_what_if_refuses_changes_without_fields(changes: Any) -> None:
    with pytest.raises(SpecError, match="changes by their names are due"):
        rlperf.what_if(JOB, changes)


def test_numbers_of_numpy_are_numbers() -> None:
    """A notebook's counts come from arrays and columns: they were "no single value", or a sweep's TypeError."""
    given, span = rlperf.short_job("Qwen3-8B", np.int64(16), "h100", prompts=np.int64(64)), np.array([64, 128])
    assert given == rlperf.short_job("Qwen3-8B", 16, "h100", prompts=64)
    for values in (span, range(64, 129, 64), tuple(span), pl.Series(span)):
        task = {**given.stated()["tasks"][0], "prompts_per_step": values}
        assert job_of(given, {"tasks": [task]}).tasks[0].prompts_per_step == (64, 128)  # type: ignore[union-attr]
    grid = {"nodes": list(np.array([1, 2])), "tasks.*.max_response_tokens": span}
    swept = Sweep(job={**given.stated(), "nodes": np.int64(1)}, grid=grid)
    assert swept == Sweep(
        job={**given.stated(), "nodes": 1}, grid={"nodes": [1, 2], "tasks.*.max_response_tokens": [64, 128]}
    )
    json.dumps(swept.model_dump())


def test_what_if_refuses_a_field_that_no_job_has() -> None:
    with pytest.raises(rlperf.SpecError, match="typo"):
        rlperf.what_if(JOB, {"typo": {"tasks.*.max_respons": 5}})


def test_a_plan_prints_in_three_lines_and_names_its_workload() -> None:
    plan = rlperf.plan_job(JOB)
    lines = str(plan).splitlines()
    assert len(lines) == 3
    assert "colocated" in lines[0] and "rl_step" in lines[2] and "tokens/s" in lines[2]
    assert "; ".join(str(plan.phases[0].predicted).splitlines()) == lines[2]
    phase = plan.phases[0]
    assert phase.responses is not None and phase.responses.mean < phase.responses.p95 <= 2048
    cut = f"cap 2,048 ({100 * phase.predicted.truncated_fraction:.1f} % cut)"
    said = f"responses of math: mean {phase.responses.mean:,.0f}, 95th percentile {phase.responses.p95:,.0f}, {cut}"
    assert lines[1] == f"16 prompts x 4; {said}"
    assert said in " ".join(markdown(plan).split())
    screen = console()
    with screen.capture() as shown:
        print_plan(plan, screen)
    assert said in " ".join(shown.get().split())
    before = plan.model_dump(mode="json", exclude={"phases": {"__all__": {"responses"}}})
    assert "cap 2,048 (" in str(rlperf.Plan.model_validate(before))  # a plan.yaml that does not know them


def test_the_dict_of_a_plan_stands_for_it() -> None:
    """It was refused field by field, and `ask` of any dict raised a bare TypeError."""
    plan = rlperf.plan_job(JOB)
    told, step = plan.to_dict(), plan.phases[0].predicted.rl_step_s
    assert rlperf.predict_job(told).rl_step_s == pytest.approx(step)
    assert rlperf.plan_job(told).phases[0].predicted.rl_step_s == pytest.approx(step)
    assert rlperf.explain(told).causes.rl_step_s == pytest.approx(step)
    devices = (plan.phases[0].pool("rollout").devices,)
    assert ask(plan).job.pool("rollout").devices == ask(told).job.pool("rollout").devices == devices
    assert ask(JOB.stated()).job.name == JOB.name
    with pytest.raises(SpecError, match="a path, or an object of rlperf, is due"):
        ask(3)  # type: ignore[arg-type]


def test_a_change_that_fits_nowhere_says_what_it_lacks() -> None:
    (_, row) = rlperf.what_if(JOB, {"large": {"architecture": "Qwen3-235B-A22B"}}, draws=1).rows
    assert re.search(
        r"nothing fits Qwen3-235B-A22B on .* \(the leanest trainer .* needs .* more per device\)", row.why_not
    )


def test_a_plan_is_exported_audited_and_explained(tmp_path: Path) -> None:
    plan = rlperf.plan_job(JOB)
    files = rlperf.export_plan(plan, tmp_path / "config", framework="verl")
    assert (tmp_path / "config" / "config.yaml") in files
    audit = rlperf.audit_config(tmp_path / "config" / "config.yaml", cluster="dgx_h100", plan=False)
    assert audit.predicted is not None
    assert rlperf.explain(plan).causes.rl_step_s > 0
    assert rlperf.explain(JOB, scale=(8, 16)).scaling is not None


def test_a_dict_is_a_job_in_the_words_of_either_form(tmp_path: Path) -> None:
    short = {"model": "Qwen3-8B", "gpus": 8, "max_response": "2k", "prompts": 16, "group": 4}
    as_words, as_fields = (rlperf.predict_job(each).rl_step_s for each in (short, JOB.stated()))
    assert as_words == as_fields == rlperf.predict_job(**short).rl_step_s
    assert rlperf.predict_job(short, framework="slime").calibration != rlperf.predict_job(short).calibration
    swept = rlperf.sweep_job({"job": short, "grid": {"tasks.*.max_response_tokens": ["1k", "2k"]}}, workers=1)
    first, second = swept.to_frame()["rl_step_s"]
    assert first < second
    with pytest.raises(rlperf.SpecError, match="target '' is not understood"):
        rlperf.size_job(short)
    for wrong, told in (({"job": 5, "grid": {"nodes": [1]}}, "sweep: job"), ({"grid": {"nodes": [1]}}, "is missing")):
        with pytest.raises(rlperf.SpecError, match=told):
            rlperf.sweep_job(wrong)


def test_a_file_in_the_words_of_options_is_told_the_fields(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: Qwen3-8B\ngpus: 16\nprompts: 64\n")
    with pytest.raises(rlperf.SpecError) as refused:
        rlperf.plan_job(tmp_path / "job.yaml")
    said = str(refused.value)
    assert "job.yaml:1: model: unknown field (here it is architecture)" in said
    assert "job.yaml:3: prompts: unknown field (here it is prompts_per_step of an entry of tasks)" in said
    assert set(SHORT) <= set(Job.other_words) | set(Job.model_fields)


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(rlperf.SpecError, match="no such file"):
        rlperf.explain(tmp_path / "run.log")
    (tmp_path / "empty").mkdir()
    with pytest.raises(rlperf.SpecError, match="holds nothing to explain"):
        rlperf.explain(tmp_path / "empty")
    (tmp_path / "dump.jsonl").write_text(2 * '{"input": "why", "output": "because", "step": 1}\n')
    with pytest.raises(rlperf.SpecError, match="holds text, not numbers of tokens"):  # no rl_step of 0 s
        rlperf.explain(tmp_path / "dump.jsonl")
    (tmp_path / "job.yaml").write_text("name: x")
    with pytest.raises(rlperf.SpecError, match="architecture"):
        rlperf.export_plan(tmp_path / "job.yaml", tmp_path / "out")


def test_an_asynchronous_plan_speaks_of_pools_that_wait() -> None:
    """A rollout that runs ahead is never emptied: no tail, no emptying batch, but which pool waits for the other."""
    plan = rlperf.plan_job(JOB, modes=["one_step_off"], limits={"staleness": 1})
    phase = plan.phases[0]
    idle = phase.predicted.idle_fraction
    assert set(idle) == {"rollout_waits", "trainer_waits"}
    assert all(0.0 <= share <= 1.0 for share in idle.values())
    assert not [words for words in phase.binds if words.startswith(("tail", "imbalance"))]
    most = max(idle, key=lambda name: idle[name])
    if idle[most] >= 0.1:
        assert any(words.startswith(f"{most.removesuffix('_waits')} pool: waits") for words in phase.binds)
    assert any("pool waits most" in note for note in rlperf.explain(plan).causes.notes)


@pytest.mark.slow
def test_every_answer_prints_for_people(tmp_path: Path) -> None:
    job = few(rlperf.short_job("Qwen3-8B", 8, "h100", max_response="4k", prompts=32))
    sizing = rlperf.size_job(job, "step<=20min", most_nodes=2)
    assert str(sizing).startswith("step at most 20 min 0 s: 1 node of dgx_h100, ")
    assert sizing.doubt == ""
    assert sizing.plan is not None and sizing.best is not None and sizing.best.rl_step_s is not None
    between = 0.5 * (sizing.best.rl_step_s + sizing.plan.phases[0].predicted.high_s)
    tight = replace(sizing, target=replace(sizing.target, limit=between))
    assert tight.doubt.startswith("met in the mean: at the 95th percentile an rl_step takes ")
    swept = rlperf.sweep_job(
        Sweep(name="two", job=job.model_dump(mode="json", exclude_none=True), grid={"nodes": [1, 2]})
    )
    assert str(swept) == "two: 2 points (2 ok)"
    plan = rlperf.plan_job(job)
    said = str(rlperf.explain(plan)).splitlines()
    assert said[0].startswith("rl_step ") and "tail (by design) at " in "\n".join(said[1:])
    rlperf.export_plan(plan, tmp_path, framework="verl")
    audit = rlperf.audit_config(tmp_path / "config.yaml", cluster="dgx_h100", plan=False)
    assert "runs out of memory with a probability " in str(audit) and "Imported(" not in str(audit)
    assert max(len(str(each)) for each in (sizing, swept, audit)) < 4000


@pytest.mark.parametrize(
    ("named", "others"),
    [
        pytest.param("verl,slime", ("verl", "slime"), marks=pytest.mark.slow),
        ("slime==0.3, verl==0.9,", ("slime==0.3", "verl==0.9")),
    ],
)
def test_what_is_advised_for_several_frameworks_runs(named: str, others: tuple[str, ...]) -> None:
    """An engine that nobody stated is each framework's own, in a ranking as in a sweep."""
    with pytest.raises(SpecError) as raised:
        rlperf.predict_job(JOB.model_copy(update={"framework": named}))
    advised = re.search(r"(rlperf\.plan_frameworks\(job, .*\)) in Python", str(raised.value))
    assert advised
    ranking = eval(advised[1], {"rlperf": rlperf, "job": JOB})
    assert {row.plan.job.framework for row in ranking.rows} == set(others)
    swept = check_sweep(Sweep(job=JOB.stated(), grid={"framework": list(others)}))
    for name in others:
        ask(Job.model_validate(with_values(swept.base, (("framework", name),))))


def test_one_framework_and_a_comma_is_no_two() -> None:
    with pytest.raises(SpecError, match="write it without the comma"):
        rlperf.predict_job(JOB.model_copy(update={"framework": "verl,"}))


@pytest.mark.slow
def test_frameworks_are_ranked_by_the_objective_and_the_refused_stand_last_with_the_reason() -> None:
    job = few(rlperf.short_job("Qwen3-8B", 8, max_response="2k", prompts=16, group=4, mode="one_step_off"))
    ranking = rlperf.plan_frameworks(job, "slime,verl,trl")
    first, second, refused = ranking.rows
    assert ranking.best is first.plan and first.plan is not None and second.plan is not None
    assert first.plan.objective <= second.plan.objective and refused.plan is None
    assert second.loss == pytest.approx(second.plan.objective / first.plan.objective - 1.0)
    alone = rlperf.plan_job(job, framework=second.plan.job.framework)
    assert second.plan.objective == pytest.approx(alone.objective, rel=1e-12)
    assert refused.framework.startswith("trl ") and "one_step_off" in refused.why_not
    assert str(ranking).splitlines()[-1] == f"refused: {refused.framework}: {refused.why_not}"
    rows = ranking.to_dict()["rows"]
    page = (Path(__file__).parent.parent / "docs" / "interfaces.md").read_text().partition("--framework A,B --json")[2]
    assert set(rows[0]) <= set(re.findall(r"`(\w+)`", page.partition("\n## ")[0]))
    assert [row["framework"].split()[0] for row in rows][-1] == "trl" and rows[0]["low_s"] < rows[0]["rl_step_s"]
    assert rows[0]["peak_memory_bytes"] < 80 * 2**30 and rows[0]["modes"] == "one_step_off"


def test_a_ranking_says_whose_overheads_are_borrowed() -> None:
    rows = rlperf.plan_frameworks(JOB, ["verl", "skyrl"]).rows
    skyrl = next(row for row in rows if "skyrl" in row.framework)
    assert [words for words in skyrl.borrowed if "nobody measured its rl_steps" in words]
    assert rows[1].apart is False, "the same overheads cannot be told apart"


def test_a_ranking_tells_apart_by_what_it_ranks_by() -> None:
    """Twice as dear in the same seconds: the rl_steps cannot be told apart, what is minimised can."""
    first, second = rlperf.plan_frameworks(JOB, "verl,slime", objective={"minimize": "token_time"}).rows
    assert first.plan is not None
    for ratio, apart in ((1.0, False), (2.0, True)):
        dear = first.plan.model_copy(update={"objective": ratio * first.plan.objective})
        rows = _ranked([first, replace(second, plan=dear)], None)
        assert [row.apart for row in rows] == [None, apart]
        assert rows[1].loss == pytest.approx(ratio - 1.0)
    words = "told apart by device-seconds per 1e6 useful trained tokens"
    assert any(words in line for line in FrameworkRanking((first, second)).notes())


@pytest.mark.slow
def test_devices_that_a_framework_has_no_code_for_are_told() -> None:
    """A plan for TPUs under verl was written without a word."""
    job = JOB.model_copy(update={"cluster": "generic:mi300x"})
    ranking = rlperf.plan_frameworks(job, "verl,areal")
    foreign = "areal has code for devices of NVIDIA and Huawei, none for mi300x (AMD): figures are those of a port"
    own = {row.framework.split()[0]: row.warnings for row in ranking.rows}
    assert foreign in own["areal"] and not any("a port" in words for words in own["verl"])
    assert [line for line in ranking.notes() if "a port" in line] == [f"warning: areal main: {foreign}"]
    assert len([line for line in ranking.notes() if "are cut at" in line]) <= 1  # of all: told once
    vendors = {name: framework_facts(name).vendors for name in FRAMEWORKS}
    assert all("NVIDIA" in known for known in vendors.values()) and vendors["miles"] == vendors["slime"]


def test_plans_of_several_phases_are_told_apart_too() -> None:
    """By all that their phases take: one task's gain may be another's loss."""
    tasks = [JOB.tasks[0].model_copy(update={"name": name, "workload": name}) for name in ("math", "programming")]
    pools = [{"role": "rollout", "layout": {"tensor_parallel": 1}}, *JOB.stated()["pools"]]
    ranking = rlperf.plan_frameworks(JOB.model_copy(update={"tasks": tuple(tasks)}), "verl,slime", pools=pools)
    first, second = ranking.rows
    assert first.plan is not None and second.plan is not None and len(first.plan.phases) == 2
    assert (first.apart, type(second.apart)) == (None, bool)
    assert any("of several phases the objective adds up" in line for line in ranking.notes())
    swapped = first.plan.model_copy(update={"phases": first.plan.phases[::-1]})
    for ratio, apart in ((1.0, False), (2.0, True)):
        dear = swapped.model_copy(update={"objective": ratio * swapped.objective})
        assert _ranked([first, replace(second, plan=dear)], None)[1].apart is apart
    ours, theirs = (judged_plan(each, DRAWS).sides for each in (first.plan, second.plan))
    alone = [compare_weighted(ours[k : k + 1], theirs[k : k + 1]).ratio for k in (0, 1)]
    assert min(alone) < compare_weighted(ours, theirs).ratio < max(alone)
    seconds = [phase.predicted.rl_step_s for phase in first.plan.phases]
    assert sum(w * s for (w, _), s in zip(ours, seconds, strict=True)) == pytest.approx(first.plan.objective)


def test_lengths_of_the_phase_are_compared() -> None:
    """A plan of several groups of rl_steps, whose responses grow: the phase's own are drawn."""
    context = ask(JOB).context
    shares = [side_of(context, None, 4, rl_steps=span).evaluation.demand.rl_steps for span in ((0, 4), (5, 9))]
    assert shares == [(0, 4), (5, 9)]


@pytest.mark.parametrize("named", ["verl,", ",verl", "verl,,slime", ["verl", " "]])
def test_an_empty_name_among_frameworks_is_refused(named: str | list[str]) -> None:
    with pytest.raises(SpecError, match=r"has an empty name in it.*without the comma"):
        rlperf.plan_frameworks(JOB, named)


def test_no_framework_at_all_says_what_to_do() -> None:
    asked = ["plan", "--model", "Qwen3-32B", "--gpus", "2", "--gpu", "h100", "--framework", "verl,slime"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    assert "rlperf size" in str(result.exception) and "against the first" not in result.stdout
    assert result.stdout.count("refused: ") == 2


def test_a_ranking_refuses_what_no_framework_can_help() -> None:
    with pytest.raises(SpecError, match="did you mean slime"):
        rlperf.plan_frameworks(JOB, "verl,slimee")
    with pytest.raises(SpecError, match="architecture"):
        rlperf.plan_frameworks(JOB.model_copy(update={"architecture": "Qwen9-8B"}), "verl,slime")
    with pytest.raises(SpecError, match="no framework is named"):
        rlperf.plan_frameworks(JOB, [])


def test_tables_cut_no_word_and_know_no_negative_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        [f"head{k}" for k in range(6)], [["colocated", "one of a few words " * 4, "megatron, recompute full"] * 2]
    )
    print_table(("why",), [("b" * 200,)])
    shown = capsys.readouterr().out
    assert shown.count("colocated") == shown.count("megatron,") == shown.count("recompute") == 2
    assert shown.count("b") == 200 and "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert max(map(len, shown.splitlines())) == 80
    found = gains(JOB, ("prefix caching",), draws=1)
    kept = replace(found.rows[0], gain=-1e-9, low=-1e-9, high=-1e-9, engine_bytes=-1.0, trainer_bytes=-1.0)
    assert "-0" not in " ".join(replace(found, rows=(kept,)).cells()[0])


def test_what_a_device_borrows_is_said_once() -> None:
    job = JOB.model_copy(update={"cluster": "generic:rtx_4090", "architecture": "Qwen3-0.6B"})
    said = [note for note in rlperf.predict_job(job).calibration.notes if "rtx_4090" in note]
    assert said == ["rtx_4090 runs on the constants of rtx_pro_6000_server: the interval is wider"]


WORDS: dict[str, Any] = {"model": "Qwen3-8B", "gpus": 8}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rlperf.plan_job(42), "job: a path"),  # type: ignore[arg-type]
        (lambda: rlperf.plan_job([]), "job: a path"),  # type: ignore[arg-type]
        (lambda: rlperf.plan_job(**{**WORDS, "gpus": "eight"}), "gpus must be a whole number (given: 'eight')"),
        (lambda: rlperf.plan_job(**{**WORDS, "model": None}), "model must be text"),
        (lambda: rlperf.plan_job(**WORDS, mode=7, gpu=7), "gpu must be text"),
        (lambda: rlperf.size_job(rlperf.short_job("Qwen3-8B", 8), 10), "target 10"),  # type: ignore[arg-type]
        (lambda: rlperf.plan_job(**WORDS, staleness="2"), "staleness must be a whole number (given: '2')"),
        (lambda: rlperf.plan_job(model="Qwen3-8B", gpus=True), "gpus must be a whole number (given: True)"),
        (lambda: rlperf.plan_job("name: x\n" * 600), "job: no file has this name: File name too long (given: 'name: x"),
        (lambda: rlperf.plan_job("a\0b"), "job: no file has this name: embedded null byte"),
        (lambda: rlperf.what_if(JOB, {"x": {5: 3}}), "x: a dotted path is due"),  # type: ignore[dict-item]
        (lambda: rlperf.what_if(JOB, {"x": {"nodes": 1}}, draws=True), "draws: a whole number is due (given: True)"),
        (lambda: rlperf.size_job(JOB, "step<=1h", clusters=[None]), "clusters: names are due"),  # type: ignore[list-item]
        (lambda: rlperf.size_job(JOB, "step<=1h", clusters={"h100": 2}), "they cost as prices"),  # type: ignore[arg-type]
        (lambda: rlperf.size_job(JOB, "step<=1h", prices="h100=2"), "prices: USD per device"),  # type: ignore[arg-type]
        (lambda: rlperf.sweep_job(3), "sweep: a path"),  # type: ignore[arg-type]
        (lambda: rlperf.sweep_job({"job": JOB, "grid": {"nodes": [1]}}, 5), "out: a path"),  # type: ignore[arg-type]
        (lambda: rlperf.sweep_job({"job": JOB, "grid": {"nodes": [1]}}, folder=5), "folder: a path"),  # type: ignore[arg-type]
        (lambda: rlperf.sweep_job({"job": JOB, "grid": {"nodes": [1]}}, backend=None), "backend None"),  # type: ignore[arg-type]
        (lambda: read_result(5), "folder: a path"),  # type: ignore[arg-type]
        (lambda: rlperf.audit_config(3), "file: a path"),  # type: ignore[arg-type]
        (lambda: rlperf.explain(3), "file: a path"),  # type: ignore[arg-type]
        (lambda: rlperf.explain(JOB, floor="a"), "floor: a number from 0 to 1"),  # type: ignore[arg-type]
        (lambda: rlperf.explain(JOB, floor=2.0), "floor: a number from 0 to 1"),
        (lambda: rlperf.explain(JOB, scale=(8,)), "scale needs at least two numbers of devices"),
        (lambda: rlperf.explain(JOB, scale=("8", 16)), "scale: a whole number"),  # type: ignore[arg-type]
        (lambda: rlperf.export_plan(3, "out"), "plan: a path"),  # type: ignore[arg-type]
        (lambda: rlperf.export_plan("plan.yaml", None), "out: a path"),  # type: ignore[arg-type]
        (lambda: rlperf.export_plan("plan.yaml", "out", framework=5), "framework must be text"),  # type: ignore[arg-type]
        (lambda: rlperf.calibrate_logs("run.log", 3), "job: a path"),  # type: ignore[arg-type]
        (
            lambda: rlperf.export_plan(rlperf.short_job("Qwen3-8B", 8), "out"),
            "(given: a Job) (plan_job makes one of a job)",
        ),  # type: ignore[arg-type]
        (lambda: rlperf.read_job(LENGTHS), "job: a path, or an object of rlperf, is due (given: a DataFrame)"),  # type: ignore[arg-type]
        (lambda: rlperf.load_architecture(3), "architecture: a path, or an object of rlperf, is due (given: 3)"),  # type: ignore[arg-type]
        (lambda: rlperf.load_cluster({}), "cluster: a path"),  # type: ignore[arg-type]
        (lambda: fit_model("none.jsonl"), "none.jsonl: no such file"),
        (lambda: fit_model(LENGTHS), "recording: a path, or an object of rlperf, is due (given: a DataFrame) (write a"),  # type: ignore[arg-type]
        (lambda: read_recording(LENGTHS), "(given: a DataFrame) (write a table with write_csv"),  # type: ignore[arg-type]
        (lambda: read_recording([3]), "recording: a path"),  # type: ignore[list-item]
        (lambda: load_model(5), "length model: a path"),  # type: ignore[arg-type]
        (lambda: sample_lengths(load_model("math"), 4.5), "prompts: a whole number is due (given: 4.5)"),  # type: ignore[arg-type]
        (lambda: sample_lengths(load_model("math"), 4, 0), "group_size must be at least 1 (given: 0)"),
        (lambda: sample_lengths(load_model("math"), 4, seed=-1), "seed must be at least 0 (given: -1)"),
        (lambda: sample_lengths(load_model("math"), 4, max_response_tokens=-5), "max_response_tokens must be at least"),
        (lambda: read_recording(None), "(given: None)"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_type_is_an_error_of_ours(call: Callable[[], object], said: str) -> None:
    with pytest.raises(rlperf.RlperfError, match=re.escape(said)):
        call()


def test_a_frame_of_a_plan_tells_which_job_it_answers_and_what_was_chosen() -> None:
    """Rows of twelve jobs in a loop could not be told apart, and said no setting that decides whether they fit."""
    plan = rlperf.plan_job(JOB)
    row = plan.to_frame().to_dicts()[0]
    assert (row["job"], row["architecture"], row["cluster"], row["nodes"]) == (JOB.name, "Qwen3-8B", "dgx_h100", 1)
    rollout, trainer = (plan.phases[0].pool(role).settings for role in ("rollout", "trainer"))
    assert (row["rollout_max_running"], row["rollout_memory_fraction"]) == (
        rollout.max_running,
        rollout.memory_fraction,
    )
    assert row["trainer_token_budget"] == trainer.token_budget is not None
    assert f"memory fraction {rollout.memory_fraction}" in plan._repr_html_()


def test_parts_of_memory_stand_between_commas_alone() -> None:
    """`kv cache 27.4 GB, trainer, idle 17 GB` read as three parts."""
    predicted = rlperf.predict_job(JOB)
    rows = memory_rows(predicted)
    for (*_, parts), use in zip(rows, predicted.memory_bytes.values(), strict=True):
        largest = sorted(use.parts.values(), reverse=True)[:4]
        assert parts.count(",") == sum(value > 0 for value in largest) - 1
    assert "trainer idle" in rows[0][3]


def test_fields_stand_beside_words_that_do_not_say_them() -> None:
    """`plan_job(model=..., price="2 USD/h")` was an "unknown argument price", and no word said it otherwise."""
    asked = {"model": "Qwen3-8B", "gpus": 8, "max_response": "2k", "mode": "async", "staleness": 2}
    job = job_of(None, {**asked, "price": "2 USD/h", "limits": {"out_of_memory_risk": 0.1}, "name": "mine"})
    assert isinstance(job, Job)
    assert (job.price, job.name, job.tasks[0].max_response_tokens) == (2.0, "mine", (2048,))
    assert (job.limits.out_of_memory_risk, job.limits.staleness) == (0.1, 2)
    with pytest.raises(SpecError, match="nodes is said by model, gpus") as raised:
        job_of(None, {**asked, "nodes": 2, "maxresponse": 9, "prise": "2 USD/h"})
    hints = [problem.suggestion for problem in raised.value.problems]
    assert hints[1:] == ["did you mean max_response?", "did you mean price?"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodez": 1}, "job: nodez: unknown field (did you mean nodes?)"),
        ({"nodes": "two"}, "job: nodes: "),
        ({"tasks": [{"name": "math", "workload": "math"}]}, "job: tasks.0.prompts_per_step: is missing"),
    ],
)
def test_a_job_that_was_copied_with_changes_is_checked(changes: dict[str, Any], says: str) -> None:
    """`model_copy`, which loops of notebooks use, checks nothing: names were passed over, values were a TypeError."""
    with pytest.raises(SpecError, match=re.escape(says)):
        ask(JOB.model_copy(update=changes))
    assert ask(JOB.model_copy(update={"nodes": 2})).job.nodes == 2
    task = {**JOB.tasks[0].model_dump(exclude_unset=True), "prompts_per_step": 32}
    assert ask(JOB.model_copy(update={"tasks": [task]})).job.tasks[0].prompts_per_step == (32,)


def test_every_answer_is_plain_data_a_frame_and_a_table(tmp_path: Path) -> None:
    """What the reference promises of all answers held for half of them."""
    why = rlperf.explain(JOB)
    frame = why.to_frame()
    assert frame["loss_s"].to_list() == [cause.loss_s for cause in why.causes.causes]
    assert "at most" in frame["advice"][0] or "simulated" in frame["advice"][0]
    assert f"<td>{why.causes.causes[0].kind.replace('_', ' ')}</td><td>by design</td>" in why._repr_html_()
    grown = rlperf.explain(JOB, scale=(8, 16))
    assert str(grown.scaling).startswith("scaling: 8 devices ")
    assert str(grown.scaling) in str(grown) and str(grown.scaling) in grown._repr_html_()
    done = CliRunner().invoke(app, ["explain", str(saved(tmp_path)), "--json"])
    assert json.loads(done.stdout) == json.loads(json.dumps(why.to_dict()))
    found = gains(JOB, ("prefix caching",), draws=1)
    assert found.to_frame()["name"].to_list() == [row.name for row in found.rows]
    assert found.rows[0].name in found._repr_html_()
    rlperf.export_plan(rlperf.plan_job(JOB), tmp_path / "config")
    audit = rlperf.audit_config(tmp_path / "config" / "config.yaml", cluster="dgx_h100", plan=False)
    done = CliRunner().invoke(
        app, ["audit", str(tmp_path / "config" / "config.yaml"), "--cluster", "dgx_h100", "--no-plan", "--json"]
    )
    assert json.loads(done.stdout) == json.loads(json.dumps(audit.to_dict()))
    assert audit.to_frame().height == len(audit.findings)
    clean, calm = replace(audit, findings=()), replace(why, causes=replace(why.causes, causes=()))
    assert set(clean.to_frame().columns) == {"settings", *audit.to_frame().columns}  # loops filter columns of none, too
    assert calm.to_frame().columns == frame.columns
    noted = replace(calm, causes=replace(calm.causes, notes=("the trainer waits & waits",)))
    assert str(noted).splitlines()[-2:] == ["nothing is abnormal", "note: the trainer waits & waits"]
    assert noted._repr_html_().endswith("<p>nothing is abnormal</p><p>note: the trainer waits &amp; waits</p>")
    assert "<pre>" in audit._repr_html_()


def saved(folder: Path) -> Path:
    file = folder / "job.yaml"
    file.write_text(JOB.model_dump_json(exclude_none=True))
    return file


def test_a_sizing_in_a_line_says_what_its_seconds_are_of_and_why_nothing_meets_it() -> None:
    """The cheapest one's seconds stood behind a dearer one's name; where none met the target nothing said why."""
    sizing = rlperf.size_job(JOB, "step<=10min", prices={"h100": 2.5, "a100": 1.3}, most_nodes=1)
    assert re.search(r": 1 node of dgx_\w+, .* per rl_step, [\d.]+ USD: the cheapest", str(sizing))
    unmet = rlperf.size_job(JOB, "step<=1s", most_nodes=1)
    assert unmet.rows[0].note and str(unmet).endswith(unmet.rows[0].note)
