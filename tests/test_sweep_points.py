"""Points of a sweep: numbering, grouping, and the same answers as the planner gives for one job at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlperf.api import ask, asked, plan_job, sweep_job
from rlperf.errors import InfeasibleError, SpecError
from rlperf.plan.predict import predict_job
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.screen import screen
from rlperf.report.plan_files import plan_yaml
from rlperf.specs.job import Job
from rlperf.sweep import Sweep, SweepResult, check_sweep, read_sweep
from rlperf.sweep.columns import DECIDED, RESULTS, columns_of
from rlperf.sweep.paths import with_values
from rlperf.sweep.space import groups_of

JOB: dict[str, Any] = {
    "name": "small", "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "price": "2.50 USD/h",
    "trainer_backends": ["megatron"], "framework": "nemo_rl",
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 16, "group_size": 4,
               "max_prompt_tokens": 1024, "max_response_tokens": 4096}],
}  # fmt: skip
TP = "pools.rollout.layout.tensor_parallel"
TRAINER_TP = "pools.trainer.layout.tensor_parallel"


def job_of(found: SweepResult, row: dict[str, Any]) -> Job:
    def read(value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) and value.startswith("[") else value

    values = tuple((path, read(row[path])) for path in found.checked.varied if row[path] is not None)
    return Job.model_validate(with_values(found.checked.base, values))


def screened_alone(job: Job) -> tuple[float, Configuration] | None:
    """Objective and configuration that the planner's own screen finds for one job."""
    question = ask(job)
    task = question.context.tasks[0]
    demands = tuple(task.source.demand(batch, None, job.seed) for batch in task.batches)
    found = screen(question.context, task, demands, question.facts, keep=1)
    return (float(found.objective[0]), found.configurations[0]) if found.configurations else None


def decided(configuration: Configuration) -> dict[str, Any]:
    """The columns of a sweep that say what the planner has decided."""
    found: dict[str, Any] = {"mode": configuration.mode, "devices": configuration.devices}
    for column in DECIDED:
        value = getattr(getattr(configuration.pool(column.role), column.attribute.part), column.attribute.name)
        found[column.name] = int(value) if isinstance(value, bool) else value
    return found


def assert_screened_alone(found: SweepResult, rows: list[dict[str, Any]]) -> None:
    """Each row is what the planner's screen says to its point alone: value, layouts and settings."""
    for row in rows:
        alone = screened_alone(job_of(found, row))
        if alone is None:
            assert row["status"] == "infeasible" and row["reason"]
            continue
        objective, configuration = alone
        assert row["status"] == "ok", row["reason"]
        assert row["objective_value"] == pytest.approx(objective, rel=1e-12)
        expected = decided(configuration)
        assert {name: row[name] for name in expected} == expected


@pytest.fixture(scope="module")
def mixed() -> SweepResult:
    grid = {
        "nodes": [1, 2],
        "tasks.math.mini_batch": [8, 16],
        "modes": ["colocated", "disaggregated"],
        TP: [1, 2, 3],
        TRAINER_TP: [1, 4],
        "pools.rollout.settings.max_running": [32, 256],
        "objective": ["step_time", "usd_per_step"],
    }
    return sweep_job(Sweep(job=JOB, grid=grid), workers=1)


def test_every_point_is_what_the_planner_screens_for_it_alone(mixed: SweepResult) -> None:
    rows = mixed.frame.to_dicts()
    assert len(rows) == 2 * 2 * 2 * 3 * 2 * 2 * 2
    assert_screened_alone(mixed, rows[::9])


@pytest.mark.slow
def test_partial_rollouts_and_all_that_a_point_leaves_open_are_the_planners_too() -> None:
    """Splits, modes and backends compete for each point; engines that closed forms take for equal fall as they do."""
    job = {**JOB, "framework": "verl==0.9.1", "trainer_backends": ["fsdp2", "megatron"], "nodes": 2}
    grid = {
        "tasks.math.over_provision": [1.0, 1.5], "modes": ["one_step_off", ["colocated", "one_step_off", "async"]],
        "limits.staleness": [1], "pools.trainer.layout.offload": ["none", ["none", "optimizer"]], TP: [1, 4],
    }  # fmt: skip
    found = sweep_job(Sweep(job=job, grid=grid), workers=1)
    assert found.counts == {"ok": 16}
    assert_screened_alone(found, found.frame.to_dicts())
    synced = found.frame.filter(found.frame["modes"] == "one_step_off")
    whole, partial = (synced.filter(synced["tasks.math.over_provision"] == x)["rollout_s"] for x in (1.0, 1.5))
    assert (partial < whole).all()


TRAINER = "pools.trainer.layout."


@pytest.mark.parametrize(
    ("changes", "grid"),
    [
        ({"nodes": 2}, {TRAINER_TP: [1, 2, 4], TRAINER + "pipeline_parallel": [1, 2, 4], TP: [1, 4]}),
        (
            {"nodes": 2, "architecture": "Qwen3-30B-A3B"},
            {TRAINER + "pipeline_parallel": [1, 2], TRAINER + "expert_parallel": [1, 4, 8],
             TRAINER + "context_parallel": [1, 2]},
        ),
        (
            {"nodes": 4, "architecture": "Qwen3-32B", "framework": "verl==0.9.1",
             "trainer_backends": ["fsdp2", "megatron"]},
            {TRAINER_TP: [1, 2, 8], TP: [2, 8]},
        ),
    ],
    ids=["stages", "experts", "backends"],
)  # fmt: skip
def test_points_leave_the_beaten_path_at_the_planners_price(changes: dict[str, Any], grid: dict[str, Any]) -> None:
    """What a point pins is no departure of its own: needless is what lies beyond the least of that point."""
    found = sweep_job(Sweep(job={**JOB, **changes}, grid=grid), workers=1)
    assert_screened_alone(found, found.frame.to_dicts())


def test_who_sees_images_and_who_does_not_share_no_lengths() -> None:
    tasks = [{**JOB["tasks"][0], "workload": "image"}]
    grid = {"architecture": ["Qwen2.5-7B", "Qwen2.5-VL-7B"], "tasks.math.images.share": [0.1, 0.9]}
    found = sweep_job(Sweep(job={**JOB, "tasks": tasks}, grid=grid), workers=1)
    assert_screened_alone(found, found.frame.to_dicts())


def test_a_tensor_parallel_of_3_divides_nothing_and_says_so(mixed: SweepResult) -> None:
    thirds = mixed.frame.filter(mixed.frame[TP] == 3)
    assert set(thirds["status"]) == {"infeasible"}
    assert all(reason.startswith("rollout: ") and "degree" in reason for reason in thirds["reason"])


def test_intervals_hold_the_mean_and_stages_are_filled(mixed: SweepResult) -> None:
    fine = mixed.frame.filter(mixed.frame["status"] == "ok")
    assert (fine["low_s"] < fine["rl_step_s"]).all() and (fine["rl_step_s"] < fine["high_s"]).all()
    assert (fine["rollout_s"] > 0).all() and (fine["training_s"] > 0).all()
    assert (fine["device_s"] - fine["rl_step_s"] * fine["devices"]).abs().max() == 0.0
    usd = fine["rl_step_s"] * fine["devices"] * 2.5 / 3600.0
    assert ((fine["usd_per_step"] - usd).abs() < 1e-9).all()


def test_results_have_the_documented_columns(mixed: SweepResult) -> None:
    assert mixed.frame.columns == [column.name for column in mixed.columns]
    assert [column.name for column in mixed.columns][-len(RESULTS) :] == [column.name for column in RESULTS]
    for column in mixed.columns:
        kind = {"int": "Int64", "float": "Float64", "text": "String"}[column.kind]
        assert str(mixed.frame[column.name].dtype) == kind
        assert column.meaning


def test_events_are_what_predict_says() -> None:
    grid = {TP: [1, 2], TRAINER_TP: [1, 2], "tasks.math.max_response_tokens": [2048, 4096, 16384]}
    found = sweep_job(Sweep(job=JOB, method="events", grid=grid), workers=1)
    for row in found.frame.to_dicts()[::3]:
        question = ask(job_of(found, row))
        predicted = predict_job(question.context, facts=question.facts)
        assert row["rl_step_s"] == pytest.approx(predicted.rl_step_s, rel=1e-12)
        assert (row["low_s"], row["high_s"]) == pytest.approx((predicted.low_s, predicted.high_s))
        assert row["trainer_memory_bytes"] == pytest.approx(predicted.memory_bytes["trainer"].total)


@pytest.mark.slow
def test_plan_is_what_the_planner_says() -> None:
    from rlperf.api import plan_job

    found = sweep_job(Sweep(job=JOB, method="plan", grid={"nodes": [1], "limits.step": ["1 s", "1000 s"]}), workers=1)
    short, long = found.frame.to_dicts()
    assert short["status"] == "infeasible" and "nothing fits" in short["reason"]
    assert long["rl_step_s"] == plan_job(job_of(found, long)).phases[0].predicted.rl_step_s
    with pytest.raises(InfeasibleError):
        plan_job(job_of(found, short))


def test_open_precisions_are_an_axis_or_the_planners() -> None:
    pools = [{"role": "rollout", "settings": {"kv_dtype": ["bf16", "fp8"]}}]
    opened, axis = {**JOB, "pools": pools}, "pools.rollout.settings.kv_dtype"
    refused = sweep_job(Sweep(job=opened, grid={"nodes": [1]}), workers=1).frame.to_dicts()[0]
    assert refused["status"] == "wrong" and "make it an axis, or sweep by method plan" in refused["reason"]
    rows = sweep_job(Sweep(job=JOB, grid={axis: ["bf16", "fp8"]}), workers=1).frame.to_dicts()
    assert rows[1]["rollout_s"] < rows[0]["rollout_s"]
    # where the framework has no key for it nothing is open
    closed = {**opened, "framework": "openrlhf", "trainer_backends": ["deepspeed"]}
    assert sweep_job(Sweep(job=closed, grid={"nodes": [1]}), workers=1).frame["status"].to_list() == ["ok"]


def test_settings_that_contradict_each_other_become_rows() -> None:
    grid = {"tasks.math.prompts_per_step": [8, 32], "tasks.math.mini_batch": [8, 32]}
    found = sweep_job(Sweep(job=JOB, grid=grid), workers=1)
    by_point = {tuple(row[path] for path in grid): row for row in found.frame.to_dicts()}
    assert by_point[(8, 32)]["status"] == "wrong" and "mini_batch" in by_point[(8, 32)]["reason"]
    assert [by_point[key]["status"] for key in ((8, 8), (32, 8), (32, 32))] == ["ok"] * 3


def test_what_nobody_foresaw_is_a_row_and_not_the_end() -> None:
    from rlperf.sweep.evaluate import GroupEvaluator

    def broken(job: Job, folder: Path | None) -> Any:
        if job.nodes == 2:
            raise ZeroDivisionError("made for the test")
        return asked(job, folder)

    checked = check_sweep(Sweep(job=JOB, grid={"nodes": [1, 2], TP: [1]}))
    evaluator = GroupEvaluator(checked.base, None, "screen", broken)
    first, second = [evaluator.frame(group, columns_of(checked)).row(0, named=True) for group in groups_of(checked)]
    assert first["status"] == "ok"
    assert second["status"] == "failed" and second["reason"] == "ZeroDivisionError: made for the test"


def test_a_list_of_points_is_crossed_with_the_grid() -> None:
    points = ({"nodes": 1, TP: 1}, {"nodes": 2, TP: 4}, {"nodes": 1, TP: 2})
    found = sweep_job(Sweep(job=JOB, points=points, grid={"seed": [0, 1]}), workers=1)
    assert found.frame["nodes"].to_list() == [1, 1, 2, 2, 1, 1]
    assert found.frame[TP].to_list() == [1, 1, 4, 4, 2, 2]
    assert found.frame["seed"].to_list() == [0, 1] * 3
    assert found.frame["rollout_tensor_parallel"].to_list() == [1, 1, 4, 4, 2, 2]


AXES = st.dictionaries(
    st.sampled_from(["nodes", "seed", TP, TRAINER_TP, "pools.trainer.layout.activation_recompute", "price"]),
    st.integers(1, 4),
    min_size=1,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(axes=AXES, listed=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=5))
def test_every_point_is_in_exactly_one_group(axes: dict[str, int], listed: list[tuple[int, int]]) -> None:
    words = ["none", "selective", "full", ["none", "full"]]
    grid = {
        path: (words[:n] if path.endswith("recompute") else [f"{k} USD/h" for k in range(1, n + 1)])
        if path.endswith(("recompute", "price"))
        else list(range(1, n + 1))
        for path, n in axes.items()
    }
    ulysses = "pools.trainer.layout.ulysses"
    points = tuple({"limits.staleness": a, ulysses: b} for a, b in listed)
    checked = check_sweep(Sweep(job=JOB, grid=grid, points=points))
    groups = list(groups_of(checked))
    ids = sorted(number for group in groups for number in group.ids)
    assert ids == list(range(checked.points))
    per_entry = math.prod(len(values) for _, values in checked.axes)
    for group in groups:
        for index, number in enumerate(group.ids):
            own = {path: values[index] for path, values in zip(group.fields, group.values, strict=True)}
            setting, at = {**dict(group.common), **own}, number % per_entry
            for path, values in reversed(checked.axes):
                assert setting[path] == values[at % len(values)]
                at //= len(values)
            if points:
                entry = points[number // per_entry]
                assert {path: setting[path] for path in entry} == entry


def test_a_job_in_place_of_a_sweep_is_told_what_a_sweep_is(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    with pytest.raises(SpecError, match=r"is a job, no sweep \(a sweep names it .* \{job: job.yaml, grid: "):
        read_sweep(tmp_path / "job.yaml")


def test_a_sweep_of_a_plans_file_is_one_of_the_job_that_it_answers(tmp_path: Path) -> None:
    """Every command that takes a job takes a plan.yaml; a sweep named fifteen unknown fields of it."""
    plan = plan_job(Job.model_validate(JOB))
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan))
    (tmp_path / "sweep.yaml").write_text("{job: plan.yaml, grid: {nodes: [1, 2]}}")
    assert read_sweep(tmp_path / "sweep.yaml").base == plan.question.stated()
