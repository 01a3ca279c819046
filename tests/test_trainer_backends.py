"""Trainer backends are data: capability tables drive the candidates, a YAML adds one, frameworks run their own."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlperf import plan_job, predict_job
from rlperf.api import ask
from rlperf.cost.reject import Reject
from rlperf.errors import ExportError, SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.export import write_file, write_plan
from rlperf.frameworks.imports import import_config, job_of
from rlperf.layout import OFFLOAD, RECOMPUTE
from rlperf.plan.predict import evaluate_job
from rlperf.plan.search.candidates import Shape, trainer_layouts
from rlperf.specs.architecture import Architecture, Experts
from rlperf.specs.job import Job
from rlperf.specs.pool import LayoutChoice, PoolSpec
from rlperf.specs.profiles import PACKAGE
from rlperf.specs.rl_calibration import framework_trainers
from rlperf.specs.trainer_calibration import load_trainer, trainer_names
from rlperf.specs.trainer_capability import DEGREES, Capability

from .framework_samples import SHIPPED

DENSE = Architecture(
    name="tiny", source="test", hidden=64, layers=12, heads=8, kv_heads=2, head_dim=8, ffn_hidden=128, vocab=100
)
MOE = DENSE.model_copy(update={"feed_forwards": ("moe",), "experts": Experts(count=16, active=2, hidden=32)})
OFF = {**dict.fromkeys(DEGREES, 1), "shard_size": 0}
JOB: dict[str, Any] = {
    "name": "small", "architecture": "Qwen3-4B", "cluster": "dgx_h100", "nodes": 1,
    "tasks": [
        {
            "name": "math", "workload": "math", "prompts_per_step": 32, "group_size": 8, "mini_batch": 16,
            "max_prompt_tokens": 512, "max_response_tokens": 2048,
        }
    ],
}  # fmt: skip


def trainer_of(plan: Any) -> Any:
    return next(pool for pool in plan.phases[0].pools if pool.role == "trainer")


# -- capabilities -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", trainer_names())
@given(architecture=st.sampled_from([DENSE, MOE]), devices=st.sampled_from([1, 4, 8, 16, 24, 64]))
@settings(max_examples=8, deadline=None)
def test_the_planner_opens_what_the_table_says_and_nothing_else(
    name: str, architecture: Architecture, devices: int
) -> None:
    capability = load_trainer(name).capability
    layout, flags = trainer_layouts(Shape(architecture, devices, 8, 8192), PoolSpec(role="trainer"), capability)
    flat = layout.flat()
    for degree in DEGREES:
        if not capability.searches(degree):
            assert (getattr(flat, degree) == OFF[degree]).all(), degree
    assert set(np.unique(flat.zero_stage)) == set(capability.zero_stages.searched)
    assert {RECOMPUTE[code] for code in np.unique(flat.activation_recompute)} == set(
        capability.activation_recompute.searched
    )
    assert {OFFLOAD[code] for code in np.unique(flat.offload)} == set(capability.offload.searched)
    assert (flags == 0).any() or devices > 1


@pytest.mark.parametrize("name", trainer_names())
def test_what_a_backend_lacks_is_refused_where_a_job_states_it(name: str) -> None:
    capability = load_trainer(name).capability
    shape = Shape(MOE, 8, 8, 8192)
    for degree in DEGREES:
        value = 4 if degree == "shard_size" else 2
        choice = LayoutChoice.model_validate({degree: value})
        if degree == "virtual_pipeline":
            choice = LayoutChoice(virtual_pipeline=(2,), pipeline_parallel=(2,))
        _, flags = trainer_layouts(shape, PoolSpec(role="trainer", layout=choice), capability)
        assert ((flags & int(Reject.FRAMEWORK)) == 0).any() == capability.has(degree), degree
    for stage in range(4):
        _, flags = trainer_layouts(
            shape, PoolSpec(role="trainer", layout=LayoutChoice(zero_stage=(stage,))), capability
        )
        assert ((flags & int(Reject.FRAMEWORK)) == 0).any() == (stage in capability.zero_stages.all)


def test_exclusions_are_kept() -> None:
    """AutoTP shards nothing at ZeRO 3."""
    shape, capability = Shape(DENSE, 8, 8, 8192), load_trainer("deepspeed").capability
    layout, flags = trainer_layouts(shape, PoolSpec(role="trainer"), capability)
    kept = layout.flat(flags == 0)
    assert {3} == set(np.unique(layout.flat().zero_stage[layout.flat().tensor_parallel > 1])) - {2}
    assert (kept.zero_stage[kept.tensor_parallel > 1] == 2).all() and (kept.zero_stage == 3).any()


def test_a_table_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="need the degree pipeline_parallel"):
        Capability.model_validate(
            {"zero_stages": {"searched": [1]}, "activation_recompute": {"searched": ["none"]}, "uneven_ends": True,
             "source": "test"}
        )  # fmt: skip


# -- frameworks run their own trainers --------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", SHIPPED)
def test_rules_and_calibrations_name_the_same_backends(framework: str) -> None:
    assert set(framework_facts(framework).backends) == set(framework_trainers(framework))
    assert ask(Job.model_validate({**JOB, "framework": framework})).job.trainer_backends == framework_trainers(
        framework
    )


def test_openrlhf_is_planned_as_deepspeed_and_exports(tmp_path: Path) -> None:
    plan = plan_job(Job.model_validate({**JOB, "framework": "openrlhf"}))
    pool = trainer_of(plan)
    assert pool.settings.backend == "deepspeed"
    assert any(name == "deepspeed" for name in plan.phases[0].predicted.calibration.ids)
    files = write_plan(plan, None, tmp_path)
    back = import_config([next(path for path in files if path.name == "config.sh")])
    assert back.run.trainer.backend == "deepspeed"
    assert back.run.trainer.zero_stage == pool.layout.zero_stage
    job = job_of(back, cluster="dgx_h100")
    assert job.trainer_backends == ("deepspeed",)
    assert predict_job(job).calibration.extrapolated


@pytest.mark.parametrize(
    ("backend", "kind", "stage"), [("deepspeed", "DEEPSPEED", 2), ("fsdp2", "FSDP", 3), ("ddp", "MULTI_GPU", 0)]
)
def test_trl_is_planned_as_its_accelerate_config_says(tmp_path: Path, backend: str, kind: str, stage: int) -> None:
    pool = {"role": "trainer", "layout": {"zero_stage": stage}}
    small = {**JOB, "architecture": "Qwen3-0.6B", "framework": "trl", "trainer_backends": backend, "pools": [pool]}
    plan = plan_job(Job.model_validate(small))
    assert trainer_of(plan).settings.backend == backend
    files = {path.name: path for path in write_plan(plan, None, tmp_path)}
    launch = yaml.safe_load(files["config_accelerate.yaml"].read_text())
    assert launch["distributed_type"] == kind
    alone, both = (import_config([files[name] for name in names]).run
                   for names in (["config.yaml"], ["config.yaml", "config_accelerate.yaml"]))  # fmt: skip
    assert alone == both and both.devices == trainer_of(plan).devices
    assert (both.trainer.backend, both.trainer.zero_stage) == (backend, stage)


def test_a_plan_for_another_trainer_is_said_to_have_been_predicted_for_it(tmp_path: Path) -> None:
    plan = plan_job(Job.model_validate({**JOB, "trainer_backends": "fsdp2"}))
    write_plan(plan, "openrlhf", tmp_path / "ray")
    assert "predicted for fsdp2" in (tmp_path / "ray" / "EXPORT.md").read_text()
    deepspeed = plan_job(Job.model_validate({**JOB, "framework": "openrlhf"}))
    with pytest.raises(ExportError, match="has no deepspeed trainer"):
        write_plan(deepspeed, "verl", tmp_path / "verl")


def test_a_measured_backend_goes_before_an_unmeasured_one_in_certainty() -> None:
    wide = predict_job(Job.model_validate({**JOB, "framework": "trl", "trainer_backends": "deepspeed"}))
    narrow = predict_job(Job.model_validate({**JOB, "framework": "trl", "trainer_backends": "fsdp2"}))
    assert wide.calibration.extrapolated and not narrow.calibration.extrapolated
    assert any("no update of deepspeed was measured" in note for note in wide.calibration.notes)
    spread = []
    for backend in ("deepspeed", "fsdp2"):
        job = Job.model_validate({**JOB, "framework": "trl", "trainer_backends": backend})
        trainer = evaluate_job(ask(job).context)[0].trainer
        spread.append(float((trainer.high / trainer.low).mean()))
    assert spread[0] > spread[1]


@pytest.mark.parametrize("architecture", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_deepspeed_runs_the_modules_of_fsdp2_and_no_faster(architecture: str) -> None:
    """A layer of transformers takes as long whatever shards it; DeepSpeed adds traffic that it does not hide."""
    seconds = {}
    for backend in ("deepspeed", "fsdp2"):
        layout = {"zero_stage": 3, "activation_recompute": "full", "microbatch": 2, "offload": "none", "ulysses": 1}
        pools = [{"role": "trainer", "layout": layout}]
        job = {**JOB, "architecture": architecture, "nodes": 4, "framework": "trl", "trainer_backends": backend}
        job["pools"] = pools
        cost = evaluate_job(ask(Job.model_validate(job)).context)[0].training
        seconds[backend] = [float(np.mean(part)) for part in (cost.forward_s, cost.backward_s, cost.recompute_s)]
    for sharded, own in zip(seconds["deepspeed"], seconds["fsdp2"], strict=True):
        assert sharded == pytest.approx(own, rel=0.06)  # optimizer, contention and reduction are their own


def test_of_several_backends_the_best_is_planned() -> None:
    """Fronts keep the columns of a third backend apart: all together answer what the best of them answers alone."""
    small = {**JOB, "architecture": "Qwen3-0.6B", "framework": "trl", "objective": {"bold": True}}
    alone = [
        plan_job(Job.model_validate({**small, "trainer_backends": name})).objective
        for name in framework_trainers("trl")
    ]
    assert plan_job(Job.model_validate(small)).objective == pytest.approx(min(alone), rel=1e-9)


def test_nothing_below_the_frameworks_asks_for_a_backend_by_name() -> None:
    """Docstrings and descriptions may name one as an example; the tables that read words of measured rows do."""
    named, trainers = [], trainer_names()
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in ("frameworks", "calibrate"):
            continue
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in trainers):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and node.value in trainers:
                named.append(f"{path.name}:{node.lineno}: {node.value}")
    assert named == []


# -- adding a backend: one file ---------------------------------------------------------------------------------------

DOCS = Path(__file__).parent.parent / "docs" / "reference" / "profiles.md"
TOY = "id: toy" + DOCS.read_text().split("```yaml\nid: toy", 1)[1].split("```", 1)[0]
"""The recipe of the documentation, as it stands there."""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    folder = tmp_path / "calibrations" / "trainers"
    folder.mkdir(parents=True)
    (folder / "toy.yaml").write_text(TOY)
    return tmp_path


def test_a_backend_is_one_file_that_a_job_names(toy: Path, tmp_path: Path) -> None:
    asked = {**JOB, "trainer_backends": "toy", "pools": [{"role": "trainer", "layout": {"pipeline_parallel": [2, 4]}}]}
    (toy / "job.yaml").write_text(yaml.safe_dump(asked))
    plan = plan_job(toy / "job.yaml")
    pool = trainer_of(plan)
    assert pool.settings.backend == "toy"
    assert pool.layout.pipeline_parallel in (2, 4) and pool.layout.tensor_parallel == 1
    assert pool.layout.activation_recompute == "full"
    use = plan.phases[0].predicted.calibration
    assert "toy" in use.ids and use.extrapolated
    (toy / "plan.yaml").write_text(yaml.safe_dump(plan.model_dump(mode="json")))
    files = write_file(toy / "plan.yaml", None, tmp_path / "out")
    text = "\n".join(path.read_text() for path in files)
    assert "pipeline_model_parallel_size" in text and "the keys of megatron" in text
    assert plan_job(toy / "plan.yaml").objective == pytest.approx(plan.objective, rel=1e-9)


def test_what_a_file_leaves_out_is_its_relatives_with_twice_the_interval(toy: Path) -> None:
    own, megatron = load_trainer("toy", folder=toy), load_trainer("megatron")
    assert own.timing.collective == 2.0
    assert own.timing.model_copy(update={"collective": megatron.timing.collective}) == megatron.timing
    assert (own.storage, own.workspace, own.generations) == (megatron.storage, megatron.workspace, megatron.generations)
    assert np.log(own.high / own.low) == pytest.approx(2.0 * np.log(megatron.high / megatron.low))
    assert own.extrapolated and not megatron.extrapolated


def test_relatives_in_a_circle_and_files_without_constants_are_refused(toy: Path) -> None:
    file = toy / "calibrations" / "trainers" / "ring.yaml"
    file.write_text(TOY.replace("id: toy", "id: ring").replace("relative: megatron", "relative: ring"))
    with pytest.raises(SpecError, match="in a circle: ring - ring"):
        load_trainer("ring", folder=toy)
    alone = toy / "calibrations" / "trainers" / "alone.yaml"
    alone.write_text(TOY.replace("relative: megatron", "notes: none"))
    with pytest.raises(SpecError, match="state a relative"):
        load_trainer("alone", folder=toy)


def test_unknown_backends_are_refused_with_line_and_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**JOB, "trainer_backends": ["megatrn"]}))
    with pytest.raises(SpecError) as caught:
        ask(file)
    (problem,) = caught.value.problems
    assert "megatrn" in problem.message and "megatron" in str(problem.suggestion) and problem.line is not None


def test_a_framework_refuses_a_backend_that_it_does_not_have() -> None:
    with pytest.raises(SpecError, match=r"openrlhf .* has no fsdp2 trainer .trainer_backends: deepspeed"):
        ask(Job.model_validate({**JOB, "framework": "openrlhf", "trainer_backends": "fsdp2"}))


def test_settings_that_no_backend_has_are_refused() -> None:
    pool = {"role": "trainer", "settings": {"first_stage_layers": 10}}
    with pytest.raises(SpecError, match="fsdp2 has no first_stage_layers"):
        ask(Job.model_validate({**JOB, "trainer_backends": "fsdp2", "pools": [pool]}))


def test_nemo_rl_knows_automodel_by_the_keys_of_dtensor() -> None:
    question = ask(Job.model_validate({**JOB, "framework": "nemo_rl", "trainer_backends": "automodel"}))
    (trainer,) = question.context.trainers
    assert (trainer.backend, trainer.keys, trainer.framework.id) == ("automodel", "fsdp2", "nemo_rl_dtensor")
    plan = plan_job(question.job)
    assert trainer_of(plan).settings.backend == "automodel"


def test_the_command_line_shows_a_backend() -> None:
    from typer.testing import CliRunner

    from rlperf.cli.main import app

    found = CliRunner().invoke(app, ["profiles", "show", "ddp", "--json"])
    assert found.exit_code == 0
    assert '"relative": "fsdp2"' in found.stdout and '"zero_stages"' in found.stdout
