"""Exported files run as planned: units, versions, placement and parking of every framework, and back again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

import rlperf
from rlperf.api import ask
from rlperf.errors import SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.export import ExportedPhase, export_run, write_plan
from rlperf.frameworks.imports import Imported, import_config, job_of
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.run import Run, ref
from rlperf.plan.question.words import settings_words
from rlperf.specs.job import Job
from rlperf.specs.modes import Mode
from rlperf.specs.pool import PoolSpec
from studies.round_trip.run import plans

from .framework_samples import SHIPPED, sample_run, with_values
from .quick import slow_but

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
DENSE: dict[str, Any] = {
    "run.architecture": "Qwen3-8B", "run.algorithm": "grpo", "run.mode": "colocated", "run.staleness": 0,
    "run.devices": 16, "run.nodes": 2, "trainer.devices": 16, "rollout.devices": 16, "trainer.tensor_parallel": 1,
    "trainer.pipeline_parallel": 1, "trainer.virtual_pipeline": 1, "trainer.context_parallel": 1, "trainer.ulysses": 1,
    "trainer.expert_parallel": 1, "trainer.data_parallel": 16, "trainer.sequence_parallel": False,
    "trainer.offload": "none", "trainer.activation_recompute": "full", "rollout.tensor_parallel": 2,
    "rollout.data_parallel": 8, "rollout.expert_parallel": 1, "rollout.attention_data_parallel": 1,
    "batch.prompts_per_step": 128, "batch.mini_batch": 64, "batch.group_size": 8,
}  # fmt: skip


def _run(framework: str, **changes: Any) -> Run:
    """A run on two nodes, colocated, dense and data parallel but for ``changes`` (names with __ for a dot)."""
    given = {name.replace("__", "."): value for name, value in changes.items()}
    return with_values(sample_run(Random(3), framework), {**DENSE, **given}).completed()


def _written(run: Run, framework: str, version: str | None = None) -> tuple[ExportedPhase, dict[str, Any]]:
    phase = export_run(run, adapter_of(framework), key_table(framework).version(version), "config")
    return phase, {setting.key: setting.value for setting in phase.emission.settings}


def _imported(phase: ExportedPhase, framework: str, folder: Path) -> Imported:
    for name, text in phase.files.items():
        (folder / name).write_text(text)
    return import_config(sorted(folder.iterdir(), key=lambda path: (path.suffix == ".sh", path.name)), framework)


@pytest.mark.parametrize(("mode", "staleness"), [("one_step_off", 1), ("async", 1), ("async", 3)])
def test_verls_sampler_counts_the_versions_that_a_sample_spans(mode: str, staleness: int, tmp_path: Path) -> None:
    """replay_buffer.py:511: step - step of submission + 1; a threshold of 1 drops every sample that is late."""
    apart = {"trainer__devices": 8, "rollout__devices": 8, "trainer__data_parallel": 8, "rollout__data_parallel": 4}
    run = _run("verl", run__mode=mode, run__staleness=staleness, **apart)
    phase, written = _written(run, "verl", "0.9")
    assert written["trainer.v1.sampler.max_off_policy_threshold"] == staleness + 1
    back = _imported(phase, "verl==0.9", tmp_path).run
    assert (back.mode, back.staleness) == (mode, staleness)


LORA = [
    ("verl", "megatron", "vllm"), ("verl", "fsdp2", "vllm"), ("nemo_rl", "megatron", "vllm"),
    ("nemo_rl", "fsdp2", "vllm"), ("areal", "fsdp2", "sglang"), ("areal", "megatron", "vllm"),
    ("openrlhf", "deepspeed", "vllm"), ("trl", "deepspeed", "vllm"),
]  # fmt: skip


@pytest.mark.parametrize(("framework", "backend", "engine"), LORA)
def test_the_rank_of_adapters_is_where_the_trainer_reads_it(
    framework: str, backend: str, engine: str, tmp_path: Path
) -> None:
    zero = {"megatron": 1, "fsdp2": 3, "deepspeed": 3}[backend]
    run = _run(
        framework, trainer__backend=backend, trainer__lora_rank=32, rollout__backend=engine, trainer__zero_stage=zero
    )
    phase, written = _written(run, framework)
    key = {"verl": "actor_rollout_ref.model." + ("lora.rank" if backend == "megatron" else "lora_rank"),
           "nemo_rl": "policy.megatron_cfg.peft.dim" if backend == "megatron" else "policy.dtensor_cfg.lora_cfg.dim",
           "areal": "actor.lora_rank", "openrlhf": "ds.lora.rank", "trl": "lora_r"}[framework]  # fmt: skip
    assert written[key] == 32
    if framework == "trl":  # PEFT's own list of a family leaves most matrices out
        assert written["lora_target_modules"] == ["all-linear"]
    assert not [lost for lost in phase.emission.limitations if "lora" in lost.asked]
    imported = _imported(phase, framework, tmp_path)
    assert imported.run.trainer.lora_rank == 32
    assert (imported.unknown, imported.illegal) == ((), ())


def test_attention_data_parallel_of_nemo_rl_takes_experts_over_the_whole_replica(tmp_path: Path) -> None:
    """TP8 with expert parallel 32 is vLLM's TP8 x DP4; without it the file would be a replica of 8 GPUs."""
    wide = {"rollout__tensor_parallel": 32, "rollout__attention_data_parallel": 4,
            "run__architecture": "Qwen3-235B-A22B", "rollout__devices": 64, "trainer__devices": 64,
            "run__devices": 64, "run__nodes": 8, "trainer__data_parallel": 64,
            "trainer__backend": "fsdp2", "rollout__backend": "vllm"}  # fmt: skip
    phase, written = _written(_run("nemo_rl", rollout__data_parallel=2, **wide), "nemo_rl")
    vllm = "policy.generation.vllm_cfg."
    assert (written[vllm + "tensor_parallel_size"], written[vllm + "expert_parallel_size"]) == (8, 32)
    back = _imported(phase, "nemo_rl", tmp_path).run.rollout
    assert (back.tensor_parallel, back.attention_data_parallel, back.expert_parallel) == (32, 4, 32)
    rules = {rule.id: rule for rule in framework_facts("nemo_rl").rules}
    names = _run("nemo_rl", rollout__data_parallel=2, **wide).names()
    assert rules["generation_attention_dp"].holds(names) == False  # noqa: E712


@pytest.mark.parametrize("framework", ["verl", "slime", "nemo_rl"])
def test_experts_that_nothing_splits_are_stated(framework: str, tmp_path: Path) -> None:
    """Megatron reads an expert tensor parallel that is not stated as the tensor parallel (parallel_state.py)."""
    experts = {"trainer__backend": "megatron", "trainer__tensor_parallel": 4, "trainer__sequence_parallel": True,
               "trainer__expert_parallel": 8, "trainer__data_parallel": 4, "trainer__zero_stage": 1,
               "run__architecture": "Qwen3-30B-A3B"}  # fmt: skip
    phase, written = _written(_run(framework, **experts), framework)
    key = {"verl": A + "megatron.expert_tensor_parallel_size", "slime": "expert-tensor-parallel-size",
           "nemo_rl": "policy.megatron_cfg.expert_tensor_parallel_size"}[framework]  # fmt: skip
    assert written[key] == 1
    imported = _imported(phase, framework, tmp_path)
    assert imported.run.trainer.expert_tensor_parallel == 1
    if framework != "nemo_rl":  # whose own default is 1
        silent = {name: value for name, value in imported.source.keys.items() if name != key}
        source = type(imported.source)(silent, entry=imported.source.entry, bases=imported.source.bases)
        assert imported.adapter.read(source, imported.target)[0].trainer.expert_tensor_parallel == 4


@pytest.mark.parametrize("framework", ["slime", "miles"])
@pytest.mark.parametrize(("dtype", "recipe"), [("bf16", None), ("fp8", "blockwise"), ("mxfp8", "mxfp8")])
def test_megatron_trains_in_eight_bits_where_its_flags_say_so(
    framework: str, dtype: str, recipe: str | None, tmp_path: Path
) -> None:
    phase, keys = _written(_run(framework, trainer__backend="megatron", trainer__compute_dtype=dtype), framework)
    assert (keys.get("fp8-format"), keys.get("fp8-recipe")) == (recipe and "e4m3", recipe)
    assert keys.get("transformer-impl") == (recipe and "transformer_engine")
    assert not phase.emission.limitations
    assert (_imported(phase, framework, tmp_path).run.trainer.compute_dtype or "bf16") == dtype


def test_eight_bits_of_areal_are_those_of_the_checkpoint_too(tmp_path: Path) -> None:
    """Its section switches them on by being there; none is written with it, and the refusal says whose rule that is."""
    apart = {"trainer__devices": 8, "rollout__devices": 8, "trainer__data_parallel": 8, "rollout__data_parallel": 4}
    run = _run("areal", trainer__backend="megatron", trainer__zero_stage=1, run__mode="disaggregated", **apart)
    phase, _ = _written(run, "areal")
    assert _imported(phase, "areal", tmp_path).run.trainer.compute_dtype != "fp8"
    said = yaml.safe_load(phase.files["config.yaml"])
    said["actor"].setdefault("megatron", {})["fp8_config"] = {"mode": "e4m3", "recipe": "blockwise"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(said))
    narrow = import_config([tmp_path / "config.yaml"], "areal")
    assert (narrow.run.trainer.compute_dtype, narrow.run.rollout.rollout_dtype) == ("fp8", "fp8")
    pools = [{"role": "trainer", "settings": {"compute_dtype": "fp8"}}]
    with pytest.raises(SpecError, match="_validate_fp8_consistency"):
        ask(_job("areal", trainer_backends=["megatron"], modes=["disaggregated"], pools=pools), to_plan=True)


STATED = [("verl", "fsdp2", "async", False), ("areal", "fsdp2", "one_step_off", True)]
"""Frameworks whose exported files say in a mode what their own rule does not: whether the old policy is scored."""


@pytest.mark.parametrize(("framework", "backend", "mode", "scored"), STATED)
def test_an_audit_predicts_what_predict_does(
    framework: str, backend: str, mode: str, scored: bool, tmp_path: Path
) -> None:
    """It left out what a job's framework runs where the job says nothing: rl_steps of audits were 4 to 26 % off."""
    apart = {"trainer__devices": 8, "rollout__devices": 8, "trainer__data_parallel": 8, "rollout__data_parallel": 4}
    run = _run(framework, trainer__backend=backend, run__mode=mode, run__staleness=1, run__old_policy=scored, **apart)
    files = _imported(_written(with_values(run, SMALL), framework)[0], framework, tmp_path)
    job = job_of(files, cluster="dgx_h100", workload="math")
    assert job.old_policy is None  # as its framework's files say it
    told = audit(files, cluster="dgx_h100", workload="math", plan=False, gains=False)
    assert told.predicted is not None
    assert told.predicted.stages_s == rlperf.predict_job(job).stages_s


SMALL = {"batch.prompts_per_step": 32, "batch.mini_batch": 32, "batch.max_response_tokens": 512}


@pytest.mark.parametrize("version", ["0.6", "0.9", "main"])
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_the_critic_of_verl_is_parked_and_laid_out_as_planned(version: str, backend: str) -> None:
    zero = {"megatron": 1, "fsdp2": 3}[backend]
    run = _run("verl", run__algorithm="ppo", trainer__backend=backend, trainer__parked=True, trainer__zero_stage=zero)
    _, written = _written(run, "verl", version)
    offloads = {key.rpartition(".")[2]: value for key, value in written.items()
                if key.startswith("critic.") and key.endswith(("param_offload", "optimizer_offload"))}  # fmt: skip
    assert offloads == {"param_offload": True, "optimizer_offload": True}
    if backend == "megatron":
        assert written["critic.megatron.tensor_model_parallel_size"] == 1
    else:
        assert written["critic.model.enable_gradient_checkpointing"] is True


@pytest.mark.parametrize(
    ("dtype", "name"), [("fp8", "-FP8"), ("fp8_block", "-FP8"), ("mxfp8", "-MXFP8"), ("int4_wo", ""), ("bf16", "")]
)
def test_engines_of_fewer_bits_start_from_such_a_checkpoint(dtype: str, name: str, tmp_path: Path) -> None:
    """What is sent is quantised where the checkpoint is: one in 16 bits was written beside engines of eight."""
    phase, written = _written(_run("miles", rollout__rollout_dtype=dtype, trainer__backend="megatron"), "miles")
    assert written["hf-checkpoint"] == f"/ckpt/Qwen3-8B{name}"
    back = _imported(phase, "miles", tmp_path).run
    assert (back.rollout.rollout_dtype or "bf16") == dtype
    assert not [each for each in phase.emission.limitations if "rollout_dtype" in each.asked]


def test_a_checkpoint_in_eight_bits_says_what_slimes_engines_serve(tmp_path: Path) -> None:
    """Its recipes for FP8 name the checkpoint alone; they were read as engines of 16 bits."""
    run = _run("slime", trainer__backend="megatron", rollout__rollout_dtype="fp8_block")
    phase, written = _written(run, "slime")
    assert "sglang-quantization" not in written
    imported = _imported(phase, "slime", tmp_path)
    assert job_of(imported).pool("rollout").settings.rollout_dtype == ("fp8_block",)


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "-BF16"), ("fp8_block", ""), ("fp8", ""), ("int4_wo", "-INT4")])
def test_a_checkpoint_published_in_eight_bits_needs_no_word_for_it(dtype: str, name: str, tmp_path: Path) -> None:
    """Kimi-K2 and DeepSeek-R1 name no precision: their engines were read in 16 bits, and had no room for a cache."""
    run = _run("slime", trainer__backend="megatron", rollout__rollout_dtype=dtype)
    phase, written = _written(replace(run, architecture="DeepSeek-R1"), "slime")
    assert written["hf-checkpoint"] == f"/ckpt/DeepSeek-R1{name}"
    back = _imported(phase, "slime", tmp_path)
    assert (back.run.rollout.rollout_dtype or "bf16") == dtype
    assert job_of(back).architecture in ("DeepSeek-R1", f"DeepSeek-R1{name}")


@pytest.mark.parametrize(
    ("framework", "words"),
    [("verl", "actor_rollout_ref.actor.fsdp_config.qat.enable=True"),
     ("skyrl", "trainer.policy.model.fake_int4_qat.enabled=true")],
)  # fmt: skip
def test_training_that_knows_of_its_engines_quantisation_is_no_job(framework: str, words: str, tmp_path: Path) -> None:
    """Engines in four bits were told as 16 without a word, and an audit passed."""
    phase, _ = _written(_run(framework), framework)
    imported = _imported(phase, framework, tmp_path)
    job_of(imported)
    script = next(path for path in tmp_path.iterdir() if path.suffix == ".sh")
    script.write_text(script.read_text().replace('"$@"', f'{words} "$@"'))
    with pytest.raises(SpecError, match="quantisation-aware"):
        job_of(import_config(sorted(tmp_path.iterdir(), key=lambda path: path.suffix == ".sh"), framework))


def test_trl_is_planned_as_it_runs() -> None:
    """Nothing is parked, forwards are padded counts, and the engine takes the whole batch at once."""
    plan = rlperf.plan_job(_job("trl"))
    trainer = next(pool for pool in plan.phases[0].pools if pool.role == "trainer")
    assert (trainer.settings.parked, trainer.settings.packing) == (False, False)
    # sequences are counted: as many plans as there are budgets were one, each other's runners-up
    assert trainer.settings.token_budget is trainer.settings.scoring_token_budget is None
    assert f"microbatch {trainer.layout.microbatch}" in settings_words(trainer)
    others = [plan.phases[0].runner_up, *plan.phases[0].next_best]
    assert not [words for each in others if each for words in each.differs if "token_budget" in words]


@pytest.mark.parametrize(
    ("release", "cluster", "mode", "requests", "tokens"),
    [("1.16", "dgx_h100", "colocated", 1024, 4096), ("1.16", "dgx_a100", "colocated", 1024, 4096),
     ("1.11", "dgx_h100", "disaggregated", 1024, 8192), ("1.16", "dgx_a100", "disaggregated", 256, 2048),
     ("1.10", "dgx_h100", "disaggregated", 1024, 16384), ("1.10", "dgx_a100", "disaggregated", 256, 8192)],
)  # fmt: skip
def test_the_server_of_trl_has_the_limits_that_vllm_sets_itself_on_its_device(
    release: str, cluster: str, mode: Mode, requests: int, tokens: int
) -> None:
    """The server is told neither: up to 1.10 vLLM's LLM class serves, then `vllm serve`. Each mode keeps its own."""
    asked = _job("trl", cluster=cluster, modes=[mode]).model_copy(update={"framework": f"trl=={release}"})
    settings = ask(asked).job.pool("rollout").settings.filled()
    assert (settings.max_running, settings.engine_token_budget) == (requests, tokens)
    both = ask(asked.model_copy(update={"modes": ("colocated", "disaggregated")})).context.of(mode).job
    assert both.pool("rollout").settings.filled() == settings
    other = {"role": "rollout", "settings": {"max_running": requests // 2}}
    with pytest.raises(SpecError, match=f"no key for rollout.max_running.*as it runs {requests}"):
        ask(asked.model_copy(update={"pools": (PoolSpec.model_validate(other),)}), to_plan=True)
    zero: dict[str, Any] = {"run__mode": mode, "trainer__backend": "deepspeed", "trainer__zero_stage": 3}
    zero |= {"rollout__devices": 2, "rollout__data_parallel": 1} if mode == "disaggregated" else {}
    for running, told in ((requests, False), (requests // 2, True)):
        run = _run("trl", rollout__max_running=running, rollout__engine_token_budget=tokens, **zero)
        written = _written(run, "trl", release)[0].emission.limitations
        lost = [each.asked for each in written if "rollout" in each.asked]
        assert any("max_running" in each for each in lost) == told
        assert not any("engine_token_budget" in each for each in lost)


def test_the_server_of_trl_keeps_its_devices(tmp_path: Path) -> None:
    apart = {"trainer__devices": 8, "rollout__devices": 8, "trainer__data_parallel": 8, "rollout__data_parallel": 4}
    run = _run("trl", run__mode="disaggregated", trainer__backend="deepspeed", trainer__zero_stage=3, **apart)
    phase, _ = _written(run, "trl")
    back = _imported(phase, "trl", tmp_path).run
    assert (back.rollout.devices, back.rollout.tensor_parallel, back.devices) == (8, 2, 16)
    assert back.rollout.memory_fraction == run.rollout.memory_fraction


# -- a plan is exactly what its export says ---------------------------------------------------------------------------


def _job(framework: str, **changes: Any) -> Job:
    task = {"name": "t", "workload": "math", "prompts_per_step": 64, "group_size": 8, "mini_batch": 32,
            "max_prompt_tokens": 1024, "max_response_tokens": 4096}  # fmt: skip
    given = {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "framework": framework, "tasks": [task]}
    return Job.model_validate({**given, **changes})


@pytest.mark.parametrize("seed", slow_but((1, 2), 2))
@pytest.mark.parametrize("framework", slow_but(SHIPPED, "nemo_rl", "trl"))
def test_an_exported_plan_reads_back_as_the_plan(framework: str, seed: int) -> None:
    """Issue 21: the imported files predict the plan's own rl_step, and an audit of them finds nothing."""
    *_, found = plans(framework, 1, seed)
    assert found.same, found


def test_every_field_of_what_runs_without_a_key_is_one_that_no_key_states() -> None:
    every = ((name, key_table(name), version) for name in SHIPPED for version in key_table(name).versions)
    for framework, table, version in every:
        fields = [entry for entry in adapter_of(framework).fields if entry.keys]
        stated = {str(entry.at) for entry in fields if not entry.outlived(table, version)}
        for spec in framework_facts(framework, version).runs:
            for name in spec.settings.stated():
                assert str(ref(f"{spec.role}.{name}")) not in stated, (framework, version)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_files_of_verl_have_no_key_that_its_newest_release_refuses(backend: str) -> None:
    """0.9.1 has neither (TypeErrors of workers/config/actor.py and engine.py): every file stated the first."""
    stage = 3 if backend == "fsdp2" else 1
    kept = {"trainer__zero_stage": stage, "trainer__parked": True, "trainer__router_replay": "none"}
    run = _run("verl", trainer__backend=backend, **kept)
    for version, stated in (("0.9", False), ("main", False), ("0.7", backend == "megatron")):
        written = _written(run, "verl", version)[1]
        assert A + "router_replay.mode" not in written  # nothing is replayed
        assert (A + "megatron.grad_offload" in written) == stated


@pytest.mark.parametrize("whole", [True, False])
def test_verl_defers_reductions_where_the_plan_does(whole: bool, tmp_path: Path) -> None:
    """A key of 0.9.1 (engine/fsdp/transformer_impl.py:692), which 0.9.0 would refuse: written where it is on."""
    run = _run("verl", trainer__backend="fsdp2", trainer__zero_stage=3, trainer__whole_gradients=whole)
    phase, written = _written(run, "verl", "0.9")
    key = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation"
    assert (written[key] if whole else key not in written) and not [
        one for one in phase.emission.limitations if "whole" in one.asked
    ]
    assert bool(_imported(phase, "verl==0.9", tmp_path).run.trainer.whole_gradients) == whole
    losses = [one.asked for one in _written(run, "verl", "0.8")[0].emission.limitations]
    assert any("whole_gradients" in asked for asked in losses) == whole


# -- a plan is for a run ----------------------------------------------------------------------------------------------

ENDS = ("total_training_steps", "save_freq", "max_num_steps", "max_steps", "total_train_steps", "num-rollout",
        "data.max_samples", "rollout.total_rollout_steps")  # fmt: skip


@pytest.mark.parametrize("framework", slow_but(SHIPPED, "verl", "openrlhf"))
def test_a_plan_without_a_length_exports_a_run_without_an_end(framework: str, tmp_path: Path) -> None:
    task = {"name": "t", "workload": "math", "prompts_per_step": 16, "group_size": 8, "max_response_tokens": 1024}
    layout = {"tensor_parallel": [1, 2], "context_parallel": 1, "ulysses": 1, "pipeline_parallel": 1}
    asked: dict[str, Any] = {"tasks": [task], "nodes": 1, "pools": [{"role": "trainer", "layout": layout}]}
    open_ended = rlperf.plan_job(_job(framework, **asked))
    write_plan(open_ended, None, tmp_path / "open")
    report = (tmp_path / "open" / "EXPORT.md").read_text()
    stated = [
        line
        for line in report.splitlines()
        if "| yours" not in line and any(f"`{end}" in line or f".{end}`" in line for end in ENDS)
    ]
    defaults = ("`-1`", "`1000000`", "`100000000`", "`null`", "`None`")
    assert [line for line in stated if not any(value in line for value in defaults)] == []
    ended = open_ended.model_copy(
        update={"job": _job(framework, **asked, run={"rl_steps": 70, "checkpoint_every": 10})}
    )
    write_plan(ended, None, tmp_path / "ended")
    last = {"verl": "`trainer.total_training_steps` | `70`", "nemo_rl": "`grpo.max_num_steps` | `70`",
            "openrlhf": f"`data.max_samples` | `{70 * 16}`", "slime": "`num-rollout` | `70`",
            "areal": "`total_train_steps` | `70`", "trl": "`max_steps` | `70`"}[framework]  # fmt: skip
    assert last in (tmp_path / "ended" / "EXPORT.md").read_text()


RESUMED: dict[str, tuple[str, tuple[str, Any]]] = {
    "verl": ("trainer.save_freq", ("trainer.resume_mode", "auto")),
    "nemo_rl": ("checkpointing.save_period", ("checkpointing.checkpoint_dir", "results/rlperf")),
    "openrlhf": ("ckpt.save_steps", ("ckpt.load_enable", True)),
    "slime": ("save-interval", ("load", "/ckpt/Qwen3-8B_slime")),
    "areal": ("saver.freq_steps", ("recover.mode", "auto")),
    "trl": ("save_steps", ("resume_from_checkpoint", "outputs/checkpoint-100")),
    "skyrl": ("trainer.ckpt_interval", ("trainer.resume_mode", "latest")),
    "rlinf": ("runner.save_interval", ("runner.resume_dir", "auto")),
}
KEPT = {
    "verl": "trainer.default_local_dir", "nemo_rl": "checkpointing.checkpoint_dir", "openrlhf": "ckpt.path",
    "slime": "save", "areal": "trial_name", "trl": "output_dir", "skyrl": "trainer.ckpt_path",
    "rlinf": "runner.logger.log_path",
}  # fmt: skip


@pytest.mark.parametrize("framework", RESUMED)
def test_a_later_phase_goes_on_where_the_one_before_ended(framework: str) -> None:
    backend = framework_facts(framework).backends[0]
    zero = 1 if backend == "megatron" else 3
    run = _run(framework, run__rl_steps=30, run__last_rl_step=80, trainer__backend=backend, trainer__zero_stage=zero)
    _, written = _written(run, framework)
    saved, resumed = RESUMED[framework]
    updates = run.batch.updates if framework == "trl" else 1
    assert written[saved] == 10 * updates  # rl_step 80 is one of every ten
    assert written[resumed[0]] == resumed[1]


@pytest.mark.parametrize("framework", KEPT)
def test_a_task_never_goes_on_from_the_checkpoint_of_another(framework: str) -> None:
    backend = framework_facts(framework).backends[0]
    zero = 1 if backend == "megatron" else 3
    kept = KEPT[framework]
    found = set()
    for data in ("math", "code"):
        run = _run(framework, run__rl_steps=30, run__data=data, trainer__backend=backend, trainer__zero_stage=zero)
        written = _written(run, framework)[1]
        found.add(written[kept])
        if framework == "rlinf":  # saves below the one and looks for the last below the other
            assert written[kept] == f"{written['runner.output_dir']}/{written['runner.experiment_name']}"
    assert len(found) == 2
