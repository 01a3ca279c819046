"""A plan from its file: predicted as it stands, from any folder."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import rlperf
from rlperf.api import ask, judge, load_job
from rlperf.cli.main import app
from rlperf.cli.schema import schema_of
from rlperf.errors import InfeasibleError, SpecError
from rlperf.plan.predict import chosen, evaluate_job
from rlperf.plan.search.splits import splits
from rlperf.report.plan_files import plan_yaml
from rlperf.sim.rl_step.trainer_stage import closed_training
from rlperf.specs.job import Job
from rlperf.sweep.spec import Sweep
from tests.test_plan_end_to_end import SMALL, trace


def written(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path


def test_predict_of_a_plan_file_gives_the_plans_own_numbers(tmp_path: Path) -> None:
    trace(tmp_path / "here" / "lengths")
    task = {**SMALL["tasks"][0], "workload": "lengths"}  # type: ignore[index]
    plan = rlperf.plan_job(written(tmp_path / "here", tasks=[task]))
    file = tmp_path / "there" / "plan.yaml"
    file.parent.mkdir()
    file.write_text(plan_yaml(plan))
    assert rlperf.predict_job(file) == rlperf.predict_job(plan) == plan.phases[0].predicted
    shown = CliRunner().invoke(app, ["predict", str(file), "--json"])
    said = json.loads(shown.stdout)
    assert said["predicted"]["rl_step_s"] == plan.phases[0].predicted.rl_step_s
    assert set(said) == {"schema_version", "job", "predicted", "operators", "assumed", "calibration"}
    jsonschema.validate(said, schema_of("predict"))


def test_predict_of_a_plan_has_its_run(tmp_path: Path) -> None:
    """A plan said what its 500 rl_steps take and cost, and its file, predicted, nothing of them."""
    plan = rlperf.plan_job(written(tmp_path, run={"rl_steps": 500}, price="2 USD/h"))
    assert plan.run is not None and rlperf.predict_job(plan).run == plan.run
    grouped = rlperf.plan_job(written(tmp_path, horizon={"rl_steps": 4, "group": 2}, run={"rl_steps": 500}))
    assert rlperf.predict_job(grouped).run in (None, grouped.run)  # of several phases it is the plan's to say


@pytest.mark.parametrize(("tasks", "words"), [(["other"], "a phase is of other"), ([], "a phase is of no task")])
@pytest.mark.parametrize("command", ["predict", "report", "export"])
def test_a_plan_of_a_task_that_its_job_lacks_is_refused(
    tmp_path: Path, command: str, tasks: list[str], words: str
) -> None:
    data = yaml.safe_load(plan_yaml(small_plan()))
    data["phases"][0]["tasks"] = tasks
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(data))
    shown = CliRunner().invoke(app, [command, str(file), *(["--out", str(tmp_path / "out")] * (command != "predict"))])
    assert isinstance(shown.exception, SpecError) and words in str(shown.exception)


@pytest.mark.parametrize(
    ("part", "changes"),
    [("layout", {"ulysses": "0"}), ("layout", {"tensor_parallel": 0}), ("layout", {"zero_stage": -1}),
     ("settings", {"memory_fraction": 0.0}), ("settings", {"prefill_replicas": -1})],
)  # fmt: skip
def test_a_plan_with_degrees_that_no_pool_can_have_is_refused(
    tmp_path: Path, part: str, changes: dict[str, object]
) -> None:
    data = yaml.safe_load(plan_yaml(small_plan()))
    (name,) = changes
    data["phases"][0]["pools"][0][part] |= changes
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(SpecError, match=f"{part}.{name}"):
        rlperf.predict_job(file)


def test_a_plan_without_one_of_its_pools_is_refused(tmp_path: Path) -> None:
    data = yaml.safe_load(plan_yaml(small_plan()))
    data["phases"][0]["pools"] = [pool for pool in data["phases"][0]["pools"] if pool["role"] != "trainer"]
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(SpecError, match="a phase has no trainer pool"):
        rlperf.predict_job(file)


@cache
def small_plan() -> rlperf.Plan:
    return rlperf.plan_job(Job.model_validate(SMALL))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective": "token_time", "modes": "colocated", "trainer_backends": "fsdp2"},
        {"objective": {"minimize": "step_time", "bold": True}, "limits": {"step": "300 s"}},
        {"pools": [{"role": "rollout", "devices": {"min": 4, "max": 8, "factor": 2},
                    "settings": {"kv_dtype": ["bf16", "fp8"], "prefix_caching": True, "memory_fraction": [0.5, 0.9]}},
                   {"role": "trainer", "layout": {"offload": ["none", "optimizer"], "tensor_parallel": 2}}]},
    ],
)  # fmt: skip
def test_the_schema_of_a_job_takes_what_the_reader_takes(changes: dict[str, object]) -> None:
    Job.model_validate({**SMALL, **changes})
    jsonschema.validate({**SMALL, **changes}, schema_of("job"))
    for wrong in ({"nodes": "two"}, {"pools": [{"role": "rollout", "settings": {"kv_dtype": 5}}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**SMALL, **wrong}, schema_of("job"))


def test_the_schema_of_a_sweep_takes_what_the_reader_takes() -> None:
    sweep = {
        "job": SMALL,
        "method": "events",
        "grid": {"tasks.0.max_response_tokens": ["4k", "8k"]},
        "points": [{"nodes": 2}],
    }
    Sweep.model_validate(sweep)
    jsonschema.validate(sweep, schema_of("sweep"))
    for wrong in ({"method": "guess"}, {"job": 5}, {"axes": {}}, {"grid": [1]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**sweep, **wrong}, schema_of("sweep"))


def test_a_plan_file_without_the_budget_that_it_packs_to_is_refused(tmp_path: Path) -> None:
    data = yaml.safe_load(plan_yaml(small_plan()))
    trainer = next(pool for pool in data["phases"][0]["pools"] if pool["role"] == "trainer")
    assert trainer["settings"].pop("token_budget")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(SpecError, match="token_budget is missing"):
        rlperf.predict_job(tmp_path / "plan.yaml")


def test_a_plan_file_with_a_trainer_that_its_job_does_not_have_is_refused(tmp_path: Path) -> None:
    data = yaml.safe_load(plan_yaml(small_plan()))
    trainer = next(pool for pool in data["phases"][0]["pools"] if pool["role"] == "trainer")
    trainer["settings"]["backend"] = ""
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(SpecError, match="which the job does not have"):
        rlperf.predict_job(tmp_path / "plan.yaml")


def test_a_plan_file_with_other_devices_than_its_layout_takes_is_refused(tmp_path: Path) -> None:
    data = yaml.safe_load(plan_yaml(small_plan()))
    data["phases"][0]["pools"][1]["devices"] = 0
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(SpecError, match="has 0 devices, and a layout of 8"):
        rlperf.predict_job(tmp_path / "plan.yaml")


@pytest.mark.parametrize("command", ["predict", "simulate"])
def test_a_job_has_no_second_phase(command: str, tmp_path: Path) -> None:
    """It was predicted as if it had not been asked for one."""
    trace(tmp_path / "lengths")
    task = {**SMALL["tasks"][0], "workload": "lengths"}  # type: ignore[index]
    said = CliRunner().invoke(app, [command, str(written(tmp_path, tasks=[task])), "--phase", "2"])
    assert isinstance(said.exception, SpecError) and "no phase 2: a job has none" in str(said.exception)


def test_phases_of_a_plan_are_predicted_one_by_one(tmp_path: Path) -> None:
    trace(tmp_path / "lengths", steps=2, scale=150.0)
    task = {**SMALL["tasks"][0], "workload": "lengths"}  # type: ignore[index]
    plan = rlperf.plan_job(written(tmp_path, tasks=[task], horizon={"rl_steps": 2, "group": 1}))
    merged = judge(plan)[2]
    assert merged.rl_step_s == pytest.approx(plan.phases[0].predicted.rl_step_s, rel=1e-12)
    with pytest.raises(SpecError, match="no phase 9"):
        judge(plan, phase=9)


def test_a_framework_brings_its_own_engine_and_its_modes(tmp_path: Path) -> None:
    plan = rlperf.plan_job(written(tmp_path, framework="slime"))
    assert (plan.job.engine, plan.phases[0].pool("rollout").settings.backend) == ("sglang", "sglang")
    question = ask(written(tmp_path, modes=["colocated", "disaggregated"]))
    assert {split.mode for split in splits(question.context)} == {"colocated"}


def test_a_plan_file_is_planned_anew_as_its_job_was_asked(tmp_path: Path) -> None:
    """Under verl a plan of TRL kept TRL's padding and budget (2 min 32 s for 2 min 0 s)."""
    job = rlperf.short_job("Qwen3-0.6B", 8, framework="trl", prompts=16, max_response="1k")
    file = tmp_path / "plan.yaml"
    file.write_text(plan_yaml(rlperf.plan_job(job)))
    asked = load_job(file)
    assert asked.stated() == {**job.stated(), "pools": [], "scorers": []}
    for other in ("openrlhf", "slime"):
        under = CliRunner().invoke(app, ["plan", str(file), "--framework", other, "--json"])
        assert json.loads(under.stdout)["objective"] == rlperf.plan_job(job, framework=other).objective
    said = CliRunner().invoke(app, ["predict", str(file), "--framework", "openrlhf"]).stdout
    assert "not the plan of plan.yaml: its job, filled in as openrlhf runs it" in said
    assert "not the plan" not in CliRunner().invoke(app, ["predict", str(file)]).stdout
    again = json.loads(CliRunner().invoke(app, ["plan", str(file), "--json"]).stdout)
    assert again["candidates"] > 10, "its pools were pinned by the command, and planned anew from Python"


@pytest.mark.slow
def test_a_plan_file_stands_for_its_job_everywhere(tmp_path: Path) -> None:
    plan = small_plan()
    file = tmp_path / "plan.yaml"
    file.write_text(plan_yaml(plan))
    assert load_job(file) == plan.question
    assert rlperf.plan_job(file).phases[0].pools == plan.phases[0].pools
    pinned = ask(file).job.pool("trainer")
    assert pinned.layout.tensor_parallel == (plan.phases[0].pool("trainer").layout.tensor_parallel,)
    sized = CliRunner().invoke(app, ["size", str(file), "--target", "step<=1h", "--json"])
    assert json.loads(sized.stdout)["best"]["nodes"] >= 1


def test_operators_add_up_to_the_stages_that_they_explain(tmp_path: Path) -> None:
    task = {**SMALL["tasks"][0], "prompts_per_step": 1, "group_size": 1, "mini_batch": 1}  # type: ignore[index]
    found = rlperf.predict_job(written(tmp_path, tasks=[task]))
    for role, stage in (("rollout", found.stages_s.rollout), ("trainer", found.stages_s.training)):
        parts = sum(row.seconds for row in found.operators if row.role == role)
        assert parts == pytest.approx(stage, rel=0.01)


def test_what_does_not_fit_is_said_in_words(tmp_path: Path) -> None:
    pinned = [{"role": "rollout", "layout": {"tensor_parallel": 3}}]
    with pytest.raises(InfeasibleError, match="no rollout layout is left: degrees do not multiply"):
        rlperf.plan_job(written(tmp_path, pools=pinned))
    eight = [{"role": "rollout", "layout": {"tensor_parallel": 8}}]  # 10 key heads, not that stages are 16 devices
    with pytest.raises(InfeasibleError, match="no rollout layout is left: attention heads"):
        rlperf.plan_job(written(tmp_path, architecture="Phi-3-medium-128k", pools=eight))
    with pytest.raises(InfeasibleError, match=r"the leanest trainer \(TP8 DP1.*recompute full\) needs"):
        rlperf.plan_job(written(tmp_path, architecture="Llama-3.1-405B", trainer_backends=["megatron"]))


def test_what_validate_prints_follows_its_schema(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    head = "framework,architecture,gpu,n_gpus,global_batch,seq_len,measured_step_s"
    file.write_text(f"{head}\nmegatron,Qwen3-8B,h100_sxm,8,64,4096,10\nmegatron,Qwen3-8B,h100_sxm,8,,4096,10\n")
    shown = CliRunner().invoke(app, ["validate", str(file), "--kind", "training", "--json"])
    said = json.loads(shown.stdout)
    jsonschema.validate(said, schema_of("validate"))
    assert said["rows"] == said["predicted"] + sum(said["refused"].values()) == 2


def test_a_broken_rule_is_named_and_not_taken_for_a_lack_of_memory(tmp_path: Path) -> None:
    pools = [
        {"role": "rollout", "settings": {"memory_fraction": 0.9, "chunked_prefill": False}},
        {"role": "trainer", "settings": {"token_budget": 512, "packing": False}},
    ]
    task = {**SMALL["tasks"][0], "max_response_tokens": 4096}  # type: ignore[index]
    found = rlperf.predict_job(written(tmp_path, architecture="Qwen3-8B", tasks=[task], pools=pools))
    assert not found.fits and all(use.total <= use.limit for use in found.memory_bytes.values())
    assert "nothing passes every rule" in found.warnings[0]
    assert "costed as if it were on: rollout chunked_prefill: false" in found.assumed


def test_an_open_precision_without_a_key_of_the_framework_stays_bf16() -> None:
    pools = [{"role": "rollout", "settings": {"kv_dtype": ["bf16", "fp8"], "rollout_dtype": ["fp8", "bf16"]}}]
    for framework, engine, kv, weights in (
        ("verl", "vllm", ("bf16", "fp8"), ("fp8", "bf16")),
        ("areal", "sglang", ("bf16", "fp8"), ("bf16",)),
        ("openrlhf", "vllm", ("bf16",), ("bf16",)),
    ):
        asked = Job.model_validate({**SMALL, "framework": framework, "engine": engine, "pools": pools})
        settings = ask(asked).job.pool("rollout").settings
        assert (settings.kv_dtype, settings.rollout_dtype) == (kv, weights)
    pinned = [{"role": "rollout", "settings": {"kv_dtype": "fp8"}}]
    asked = Job.model_validate({**SMALL, "framework": "openrlhf", "pools": pinned})
    assert ask(asked).job.pool("rollout").settings.kv_dtype == ("fp8",)


def test_what_the_planner_chose_for_open_settings_is_named() -> None:
    pools = [
        {"role": "rollout", "devices": 8, "settings": {"kv_dtype": ["bf16", "fp8"], "max_running": 64}},
        {"role": "trainer", "devices": 8, "settings": {"token_budget": [4096, 8192], "parked": True}},
    ]
    assumed = rlperf.predict_job(Job.model_validate({**SMALL, "pools": pools})).assumed
    rollout, trainer = (next(line for line in assumed if line.startswith(role)) for role in ("rollout: ", "trainer: "))
    assert "kv_dtype fp8" in rollout and "memory_fraction 0." in rollout
    assert "token_budget" in trainer and "backend" in trainer
    assert not any(word in rollout + trainer for word in ("max_running", "rollout_dtype", "parked", "devices"))


def test_dapo_scores_no_reference_unless_told() -> None:
    assert "reference" not in Job.model_validate({**SMALL, "algorithm": "dapo"}).all_roles
    assert "reference" in Job.model_validate({**SMALL, "algorithm": "dapo", "reference": True}).all_roles
    assert "reference" in Job.model_validate(SMALL).all_roles


def test_dynamic_sampling_that_drops_nothing_is_said() -> None:
    def warned(algorithm: str = "dapo", **given: int) -> list[str]:
        task = {**SMALL["tasks"][0], **given}  # type: ignore[index]
        pools = [{"role": role, "layout": {"tensor_parallel": 1}} for role in ("rollout", "trainer")]
        asked = {**SMALL, "algorithm": algorithm, "tasks": [task], "pools": pools}
        return [line for line in rlperf.predict_job(asked).warnings if "dynamic sampling" in line]

    prompts = SMALL["tasks"][0]["prompts_per_step"]  # type: ignore[index]
    assert len(warned()) == 1 and "generated_prompts" in warned()[0]
    assert not warned("grpo") and not warned(generated_prompts=2 * prompts) and not warned(generated_prompts=prompts)
    with pytest.raises(ValueError, match="is below prompts_per_step"):
        warned(generated_prompts=prompts - 1)


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"modes": ["one_step_off"], "limits": {"staleness": 1}}, marks=pytest.mark.slow)]
)
def test_what_a_job_leaves_open_is_predicted_as_planned(changes: dict[str, object]) -> None:
    """It was the first choice of closed forms: 328 s for the first job where its plan takes 294."""
    job = rlperf.short_job("Qwen3-8B", 8, "h100", max_response="8k", prompts=64).model_dump(mode="json")
    asked = Job.model_validate({**job, **changes})
    plan, found = rlperf.plan_job(asked), rlperf.predict_job(asked)
    assert found.rl_step_s == plan.phases[0].predicted.rl_step_s
    assert rlperf.explain(asked).causes.rl_step_s == pytest.approx(rlperf.explain(plan).causes.rl_step_s)
    said = next(line for line in found.assumed if line.startswith("trainer: "))
    budget = plan.phases[0].pool("trainer").settings.scoring_token_budget
    assert (f"scoring_token_budget {budget}" in said) == (budget is not None)


def test_only_calibrations_in_use_are_named(tmp_path: Path) -> None:
    found = rlperf.predict_job(written(tmp_path, pools=[{"role": "trainer", "settings": {"backend": "fsdp2"}}]))
    assert "fsdp2" in found.calibration.ids and "megatron" not in found.calibration.ids


def test_a_data_sheet_of_low_confidence_is_said() -> None:
    predicted = rlperf.predict_job(Job.model_validate({**SMALL, "cluster": "generic:ascend_910b"}))
    assert any("ascend_910b is of low confidence" in note for note in predicted.calibration.notes)


def test_an_engine_without_graphs_launches_kernel_by_kernel() -> None:
    def rollout_s(graphs: bool) -> float:
        pool = {"role": "rollout", "layout": {"tensor_parallel": 1}, "settings": {"cuda_graphs": graphs}}
        return rlperf.predict_job(Job.model_validate({**SMALL, "pools": [pool]})).stages_s.rollout

    assert rollout_s(False) > 1.2 * rollout_s(True)


def test_stated_stages_are_costed_or_refused() -> None:
    def predicted(**settings: int) -> float:
        layout = {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 1}
        trainer = {"role": "trainer", "layout": layout, "settings": settings}
        job = {**SMALL, "trainer_backends": ["megatron"], "pools": [trainer]}
        return rlperf.predict_job(Job.model_validate(job)).stages_s.training

    even = predicted()
    assert predicted(first_stage_layers=6) == predicted(first_stage_layers=6, last_stage_layers=22) > 1.1 * even
    with pytest.raises(InfeasibleError):
        predicted(first_stage_layers=6, last_stage_layers=6)


def _pinned(**settings: object) -> Job:
    """A small job with everything pinned but what a test turns."""
    layouts = {"tensor_parallel": 1}, {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1}
    task = {
        "name": "math", "workload": "math", "prompts_per_step": 64, "group_size": 4, "mini_batch": 16,
        "max_prompt_tokens": 1024, "max_response_tokens": 16384,
    }  # fmt: skip
    pools = [
        {"role": "rollout", "layout": layouts[0], "settings": {"memory_fraction": 0.6, "max_running": 64}},
        {"role": "trainer", "layout": {**layouts[1], "microbatch": 2, "activation_recompute": "full"},
         "settings": {"backend": "megatron", "token_budget": 40960, "parked": True, **settings}},
    ]  # fmt: skip
    return Job.model_validate(
        {"architecture": "Qwen2.5-1.5B", "cluster": "dgx_h100", "nodes": 1, "tasks": [task], "pools": pools}
    )


def test_packing_changes_predictions_and_plans() -> None:
    """Two sequences per padded microbatch instead of 40,960 packed tokens: more passes, padding in them."""
    packed, padded = (rlperf.predict_job(_pinned(packing=value)) for value in (True, False))
    assert padded.stages_s.training > 1.1 * packed.stages_s.training
    assert padded.stages_s.scoring > 1.2 * packed.stages_s.scoring
    assert padded.stages_s.rollout == packed.stages_s.rollout
    several = rlperf.predict_job(_pinned(packing=False, scoring_microbatch=8))
    assert several.stages_s.scoring != padded.stages_s.scoring
    assert several.stages_s.training == padded.stages_s.training
    plans = [rlperf.plan_job(_pinned(packing=value)).phases[0].predicted for value in (True, False)]
    assert plans[1].stages_s.training == pytest.approx(padded.stages_s.training)
    assert plans[0].stages_s.training == pytest.approx(packed.stages_s.training)


def test_balance_and_batching_of_a_framework_change_screen_and_judge() -> None:
    """Tokens evened out once per batch leave the ranks of an update uneven; packing all ranks together fills bins."""

    def trained(packing: bool = True, **changes: object) -> tuple[float, float]:
        """Training by the judge and by the screen."""
        context = ask(_pinned(packing=packing)).context
        stack = context.trainers[0] if context.trainers[0].backend == "megatron" else context.trainers[1]
        training = stack.framework.training.model_copy(update=changes)
        changed = replace(stack, framework=stack.framework.model_copy(update={"training": training}))
        job = context.job.model_copy(update={"trainer_backends": ("megatron",)})
        asked = replace(context, trainers=(changed,), job=job)
        demand = chosen(asked)[0]
        judged = evaluate_job(asked)[0]
        arch, layout = asked.tasks[0].architecture, judged.trainer.layout.take(np.array([0]))
        settings, budget = asked.job.pool("trainer").settings.filled(), np.array([40960])
        closed = closed_training(asked.site, changed, arch, demand, layout, settings, budget)
        return float(judged.seconds.training_s.mean()), float(closed[0][0])

    update, batch, together = trained(balance="update"), trained(balance="batch"), trained(batching="all")
    for fidelity in (0, 1):
        assert batch[fidelity] > 1.02 * update[fidelity]
        assert together[fidelity] != update[fidelity]
    assert np.allclose([each[0] for each in (update, batch)], [each[1] for each in (update, batch)], rtol=0.15)
    assert trained(balance="budget") == update
    assert trained(packing=False, balance="budget") == trained(packing=False, balance="none")
    padded = [trained(packing=False, pads=to) for to in ("microbatch", "batch", "limit")]
    for fidelity in (0, 1):
        times = [each[fidelity] for each in padded]
        assert times[0] < times[1] <= times[2]
    assert padded[1][0] == pytest.approx(
        padded[1][1], rel=0.02
    )  # all are as long as the longest: nothing is left to chance


def test_layers_that_nobody_measured_widen_the_interval_and_are_said() -> None:
    """Recurrent layers have no kernel table; windows were not timed on A100, and latent attention not on H200."""
    sites = {
        "dgx_h100": ("Qwen2.5-1.5B", "gpt-oss-20b", "Qwen3.5-35B-A3B", "Moonlight-16B-A3B"),
        "dgx_a100": ("Qwen2.5-1.5B", "gpt-oss-20b"),
        "dgx_h200": ("Qwen2.5-1.5B", "Moonlight-16B-A3B"),
    }
    asked = {(name, site): {"architecture": name, "cluster": site} for site, names in sites.items() for name in names}
    found = {key: rlperf.predict_job(_pinned().model_copy(update=own)) for key, own in asked.items()}
    width = {key: np.log(each.high_s / each.low_s) for key, each in found.items()}
    for key in (("Qwen2.5-1.5B", "dgx_h100"), ("Moonlight-16B-A3B", "dgx_h100")):
        assert not found[key].calibration.extrapolated and found[key].calibration.notes == (), key
    assert not any("window" in note for note in found["gpt-oss-20b", "dgx_h100"].calibration.notes)
    for name, site, words in (
        ("gpt-oss-20b", "dgx_a100", "decodes of sliding-window attention have no fit of their own"),
        ("Qwen3.5-35B-A3B", "dgx_h100", "recurrent layers have no kernel table"),
        ("Moonlight-16B-A3B", "dgx_h200", "latent attention was timed on h100_sxm"),
    ):
        assert found[name, site].calibration.extrapolated, name
        assert any(words in note for note in found[name, site].calibration.notes), name
        assert width[name, site] > 1.02 * width["Qwen2.5-1.5B", site], name
    assert any("never timed" in note for note in found["Qwen3.5-35B-A3B", "dgx_h100"].calibration.notes)


@pytest.mark.parametrize(("framework", "engine", "runs"), [("slime", "sglang", True), ("verl", "vllm", False)])
def test_a_sequence_above_the_stated_budget_runs_where_the_framework_gives_it_a_microbatch(
    framework: str, engine: str, runs: bool
) -> None:
    """slime's example of Qwen3-4B states 9,216 tokens for sequences of up to 10,240: its audit passed, `predict` said
    that it does not run, `plan` refused it, and memory was counted without that sequence."""

    def job(budget: int) -> Job:
        task = {
            "name": "math",
            "workload": "math",
            "prompts_per_step": 32,
            "group_size": 8,
            "max_response_tokens": 8192,
        }
        trainer = {"role": "trainer", "devices": 8, "settings": {"token_budget": budget, "parked": False},
                   "layout": {"tensor_parallel": 2, "activation_recompute": "full"}}  # fmt: skip
        return Job.model_validate(
            {"architecture": "Qwen3-4B", "cluster": "dgx_h100", "nodes": 1, "framework": framework, "engine": engine,
             "trainer_backends": "megatron", "tasks": [task], "pools": [trainer]}
        )  # fmt: skip

    short, whole = (rlperf.predict_job(job(budget)) for budget in (9216, 10240))
    assert short.fits is runs and whole.fits
    assert short.memory_bytes["trainer"].total == whole.memory_bytes["trainer"].total
    if runs:
        assert rlperf.plan_job(job(9216)).phases[0].pool("trainer").settings.token_budget == 9216
    else:
        with pytest.raises(InfeasibleError, match="the token budget holds less than one longest sequence"):
            rlperf.plan_job(job(9216))
