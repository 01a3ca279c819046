"""miles: what it has otherwise than slime, whose fork it is, and that its own parser takes what is written for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rlperf.api import ask, plan_job, predict_job
from rlperf.errors import ExportError, InfeasibleError, SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.answer import Audit
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.export import export_run, write_file, write_plan
from rlperf.frameworks.imports import Imported, import_config, job_of, job_text, keys_text, with_architecture
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.run import Run
from rlperf.frameworks.slime.reading import DEFAULTS
from rlperf.specs.job import Job

from .framework_samples import sample_run, with_values
from .quick import slow_but

FLAGS = {
    "actor-num-nodes": 1, "actor-num-gpus-per-node": 4, "rollout-num-gpus": 4, "rollout-num-gpus-per-engine": 2,
    "hf-checkpoint": "/ckpt/Qwen3-8B", "rollout-batch-size": 32, "n-samples-per-prompt": 8, "global-batch-size": 256,
    "rollout-max-prompt-len": 1024, "rollout-max-response-len": 4096, "tensor-model-parallel-size": 2,
    "use-dynamic-batch-size": True, "max-tokens-per-gpu": 6144, "num-rollout": 100, "pause-generation-mode": "retract",
}  # fmt: skip


def text(*, entry: str = "train.py", **flags: Any) -> str:
    given = {**FLAGS, **{key.replace("_", "-"): value for key, value in flags.items()}}
    said = [f"--{key}" + ("" if value is True else f" {value}") for key, value in given.items() if value is not None]
    return f"python3 {entry} {' '.join(said)}\n"


def read(folder: Path, framework: str | None = None, **given: Any) -> Imported:
    (folder / "run.sh").write_text(text(**given))
    return import_config([folder / "run.sh"], framework)


def judged(folder: Path, **given: Any) -> Audit:
    return audit(read(folder, **given), cluster="dgx_h100", workload="math", plan=False, gains=False)


def errors(found: Audit) -> set[str]:
    return {each.rule for each in found.findings if each.severity == "error"}


def test_a_script_is_known_by_what_slime_has_not(tmp_path: Path) -> None:
    found = read(tmp_path)
    run = found.run
    assert (found.adapter.name, found.target.version, found.unknown, found.illegal) == ("miles", "main", (), ())
    assert (run.mode, run.devices, run.trainer.devices, run.rollout.devices) == ("disaggregated", 8, 4, 4)
    assert (run.trainer.token_budget, run.batch.mini, run.rollout.max_running) == (6144, 32, 512)
    assert read(tmp_path, pause_generation_mode=None).adapter.name == "slime"
    filtered = "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    filtering = read(tmp_path, pause_generation_mode=None, dynamic_sampling_filter_path=filtered)
    assert (filtering.adapter.name, filtering.run.algorithm) == ("miles", "dapo")
    assert read(tmp_path, "miles==0.0.2").target.version == "0.0"
    clean = judged(tmp_path)
    assert errors(clean) == set() and clean.predicted is not None and clean.predicted.rl_step_s > 0


@pytest.mark.parametrize(("folder", "name"), [
    ('"${MILES:?set MILES to your miles checkout}"', "miles"), ("/srv/miles/", "miles"), ("$MILES_DIR", "miles"),
    ('"${SLIME:?set SLIME to your slime checkout}"', "slime"), ("/srv/miles/slime", "slime"), ("smiles", "slime"),
])  # fmt: skip
def test_a_script_without_own_flags_is_known_by_the_checkout_that_it_goes_to(
    folder: str, name: str, tmp_path: Path
) -> None:
    """A plan of 2 min 42 s was audited as slime's, from the very file written for it: 2 min 29 s."""
    (tmp_path / "run.sh").write_text(f"cd {folder}\n" + text(pause_generation_mode=None))
    assert import_config([tmp_path / "run.sh"]).adapter.name == name


def test_defaults_are_those_of_its_own_parser() -> None:
    """slime's reader fills in what both have; no value of it may differ from what miles' parser lists."""
    table = {key: spec.default for key, spec in key_table("miles").keys("0.0").items()}
    forced = {"use-distributed-optimizer": True}  # set_default_megatron_args
    assert {key: table[key] for key in DEFAULTS if key not in forced} == {
        key: value for key, value in DEFAULTS.items() if key not in forced
    }


def test_the_reference_is_loaded_by_its_switch(tmp_path: Path) -> None:
    """slime/ray/placement_group.py:178, and miles': a loss of coefficient 0 costs its pass all the same."""
    for framework in ("slime", "miles"):
        assert read(tmp_path, framework, use_kl_loss=True, kl_loss_coef=0.0).run.reference
        assert read(tmp_path, framework, kl_coef=0.1).run.reference
        assert not read(tmp_path, framework, kl_loss_coef=0.1).run.reference


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"tensor-model-parallel-sizes": 2}, "unknown_key"),
        ({"train_backend": "fsdp"}, "fsdp_backend"),
        ({"sglang_pp_size": 2}, "engine_pipeline"),
        ({"decoder_last_pipeline_num_layers": 4}, "one_stage_ends"),
        ({"update_weight_transfer_mode": "p2p", "colocate": True}, "p2p_colocated"),
        ({"update_weight_transfer_mode": "p2p", "prefill_num_servers": 1}, "p2p_prefill"),
        ({"lora_rank": 16, "megatron_to_hf_mode": "bridge", "colocate": True}, "lora_targets"),
        ({"lora_rank": 16, "target_modules": "all-linear", "colocate": True}, "lora_bridge"),
        ({"lora_rank": 16, "target_modules": "all-linear", "megatron_to_hf_mode": "bridge"}, "lora_colocated"),
        ({"advantage_estimator": "ppo", "critic_num_gpus_per_node": 2}, "critic_as_wide"),
        ({"enable_mtp_training": True}, "draft_layers"),
        ({"qkv_format": "bshd"}, "plain_rows"),
        ({"rollout_max_context_len": 1024}, "context_holds_prompts"),
        ({"save_interval": 10}, "save_needs_folder"),
        ({"num_rollout": None}, "length_stated"),
        ({"recompute_logprobs_via_prefill": True}, "recompute_by_prefill"),
        ({"kl_coef": 0.1, "kl_loss_coef": 0.1}, "two_kl"),  # slime's, cited anew
    ],
)
def test_what_its_validators_or_workers_refuse_is_found(given: dict[str, Any], rule: str, tmp_path: Path) -> None:
    found = audit(read(tmp_path, "miles==0.0.2", **given), predict=False)
    level = "warning" if rule == "lora_colocated" else "error"  # nobody notices that
    assert rule in {each.rule for each in found.findings if each.severity == level}


def test_rules_of_the_origin_are_cited_or_left_out() -> None:
    own, origin = ({rule.id: rule for rule in framework_facts(name).rules} for name in ("miles", "slime"))
    assert "flops_balance" in origin and "flops_balance" not in own  # it has no such flag
    shared = own.keys() & origin.keys() - {"engine_pipeline", "no_key_trainer_shard_size"}
    assert len(shared) > 20
    for name in shared:
        assert own[name].require == origin[name].require and "slime/" not in own[name].source


def test_a_fork_cannot_cite_what_its_origin_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlperf.specs.framework import FACTS, facts_data, facts_document

    for name in ("slime", "miles"):
        whole = (FACTS / f"{name}.yaml").read_text()
        (tmp_path / f"{name}.yaml").write_text(whole.replace("  two_kl:", "  two_kll:"))
    monkeypatch.setattr("rlperf.specs.framework.FACTS", tmp_path)
    caches = (facts_document, facts_data)
    for cached in caches:
        cached.cache_clear()
    try:
        with pytest.raises(SpecError, match=r"miles\.yaml:\d+: cites\.two_kll: slime has no such rule .*two_kl\?"):
            facts_document("miles")
    finally:
        for cached in caches:
            cached.cache_clear()


def test_a_bound_on_staleness_is_read_and_written(tmp_path: Path) -> None:
    found = read(tmp_path, entry="train_async.py", fully_async=True, max_weight_staleness=3)
    assert (found.run.mode, found.run.staleness) == ("async", 3)
    example = read(
        tmp_path, entry="train_async.py", max_weight_staleness=2,
        rollout_function_path="fully_async_rollout.generate_rollout_fully_async",
    )  # fmt: skip
    assert (example.run.mode, example.run.staleness) == ("async", 2)
    run = found.run
    for version, said in (("main", "--fully-async"), ("0.0", "--rollout-function-path fully_async_rollout.")):
        phase = export_run(run, adapter_of("miles"), version, "run")
        written = phase.files["run.sh"]
        assert said in written and "--max-weight-staleness 3" in written and phase.emission.limitations == ()
    one = read(tmp_path, entry="train_async.py")
    assert (one.run.mode, one.run.staleness) == ("one_step_off", 1)


def test_rdma_is_p2p_and_predicted_as_such(tmp_path: Path) -> None:
    seconds = {}
    for mode in ("broadcast", "p2p"):
        found = read(tmp_path, update_weight_transfer_mode=mode)
        predicted = audit(found, cluster="dgx_h100", workload="math", plan=False, gains=False).predicted
        assert predicted is not None
        seconds[mode] = predicted.stages_s.weight_sync
    assert found.run.weight_sync == "rdma" and job_of(found).weight_sync == "rdma"
    assert seconds["p2p"] != seconds["broadcast"]
    exported = export_run(found.run, adapter_of("miles"), "0.0", "run")
    assert "--update-weight-transfer-mode p2p" in exported.files["run.sh"]
    lost = export_run(found.run, adapter_of("slime"), "main", "run").emission.limitations
    assert any("run.weight_sync rdma" in str(each) for each in lost)


def test_adapters_are_trained_where_engines_take_them(tmp_path: Path) -> None:
    given = {"lora_rank": 16, "target_modules": "all-linear", "megatron_to_hf_mode": "bridge", "colocate": True}
    found = judged(tmp_path, **given)
    assert found.imported.run.trainer.lora_rank == 16 and errors(found) == set()
    whole = judged(tmp_path, colocate=True)
    assert found.predicted is not None and whole.predicted is not None
    # engines serve the adapter beside the weights, which are sent all the same; none of their gradients is kept
    assert found.predicted.stages_s.rollout > whole.predicted.stages_s.rollout
    assert found.predicted.stages_s.weight_sync == whole.predicted.stages_s.weight_sync
    assert found.predicted.stages_s.offload < whole.predicted.stages_s.offload
    written = export_run(found.imported.run, adapter_of("miles"), "0.0", "run").files["run.sh"]
    assert "--megatron-to-hf-mode bridge" in written and "--target-modules all-linear" in written
    with pytest.raises(ExportError, match="no LoRA"):
        export_run(found.imported.run, adapter_of("slime"), "main", "run")


def test_adapters_are_not_planned_where_engines_take_none() -> None:
    rank = {"pools": [{"role": "trainer", "settings": {"lora_rank": 16}}], "algorithm": "grpo"}
    with pytest.raises(InfeasibleError):
        plan_job(Job.model_validate({**JOB, **rank}))
    plan = plan_job(Job.model_validate({**JOB, **rank, "modes": ["one_step_off", "colocated"]}))
    assert plan.phases[0].mode == "colocated"


JOB: dict[str, Any] = {
    "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "framework": "miles", "engine": "sglang",
    "algorithm": "ppo", "reference": True, "modes": ["one_step_off"], "limits": {"staleness": 1},
    "pools": [{"role": "critic", "placement": "own"}],
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 64, "group_size": 8, "mini_batch": 64,
               "max_prompt_tokens": 1024, "max_response_tokens": 4096}],
}  # fmt: skip


@pytest.mark.parametrize("mode", slow_but(("one_step_off", "colocated"), "colocated"))
def test_ppo_is_planned_with_a_critic_as_wide_as_the_actor(mode: str, tmp_path: Path) -> None:
    """placement_group.py create_placement_groups: on GPUs of its own whether engines share the actor's or not."""
    plan = plan_job(Job.model_validate({**JOB, "modes": [mode]}))
    (phase,) = plan.phases
    devices = {pool.role: pool.devices for pool in phase.pools}
    assert phase.predicted.critic is not None and phase.predicted.critic.devices == devices["trainer"]
    files = [path for path in write_plan(plan, None, tmp_path) if path.suffix == ".sh"]
    written = files[0].read_text()
    assert "--advantage-estimator ppo" in written and "--critic-num-nodes 1" in written
    assert "NOT EXPRESSED" not in written
    back = import_config(files, "miles")
    assert back.run.mode == mode and back.run.devices <= 16
    assert back.run.algorithm == "ppo" and back.run.critic_devices == devices["trainer"]
    assert predict_job(job_of(back, cluster="dgx_h100", workload="math")).rl_step_s == pytest.approx(
        phase.predicted.rl_step_s, rel=1e-9
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"pools": []}, "miles main trains a critic on devices of its own"),
        ({"pools": [], "modes": ["colocated"]}, r"in mode colocated .* critic on devices of its own \(a critic pool"),
    ],
)
def test_ppo_that_cannot_be_planned_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        ask(Job.model_validate({**JOB, **wrong}))


def test_colocated_engines_take_the_critics_gpus_unless_told(tmp_path: Path) -> None:
    """miles_validate_args: what is predicted of neither is refused in words."""
    given = {"advantage_estimator": "ppo", "colocate": True, "rollout_num_gpus": None}
    spread, stated = read(tmp_path, **given).run, read(tmp_path, **{**given, "rollout_num_gpus": 4}).run
    assert (spread.critic_devices, spread.devices, spread.rollout.devices) == (4, 8, 8)
    assert (stated.critic_devices, stated.devices, stated.rollout.devices) == (4, 8, 4)
    few = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 4, "advantage_estimator": "ppo"}
    whole = read(tmp_path, **few).run
    assert (whole.devices, whole.nodes, whole.devices_per_node) == (8, 1, 8)
    found = judged(tmp_path, **given)
    assert found.predicted is None and found.passes is None
    assert any("critic" in note for note in found.notes)
    assert judged(tmp_path, **{**given, "rollout_num_gpus": 4}).predicted is not None


# -- its own parser ---------------------------------------------------------------------------------------------------


def sampled(random: Random, version: str) -> Run:
    """A run that a planner could have chosen, with what miles alone has."""
    run = sample_run(random, "miles", version)
    if run.mode == "colocated":
        return with_values(run, {"trainer.lora_rank": random.choice([None, 16])})
    if random.random() < 0.5:
        return with_values(run, {"run.weight_sync": "rdma"})
    devices = run.devices + run.trainer.devices
    critic = {"run.algorithm": "ppo", "run.critic_devices": run.trainer.devices, "run.devices": devices}
    return with_values(run, {**critic, "run.nodes": -(-devices // 8)})


def arguments(run: Run, version: str) -> list[str]:
    given = []
    for setting in export_run(run, adapter_of("miles"), version, "run").emission.settings:
        values = setting.value if isinstance(setting.value, list) else [setting.value]
        given += [f"--{setting.key}", *(str(value) for value in values if value is not True)]
    return given


@pytest.mark.slow
def test_its_own_parser_takes_sampled_exports() -> None:
    folder = Path(os.environ.get("MILES_RL", "/nowhere"))
    if not (folder / "miles").is_dir():
        pytest.skip("MILES_RL names no folder with the package unpacked (tests/miles_package.py)")
    random = Random(17)
    given = [arguments(sampled(random, "0.0"), "0.0") for _ in range(60)]
    broken = [[*given[0], "--globl-batch-size", "8"], [*given[0], "--lora-rank", "8", "--kl-coef", "1"],
              [*given[0], "--tensor-model-parallel-size", "3"]]  # fmt: skip
    program = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "miles_package.py"), str(folder)]
    run = subprocess.run(program, input=json.dumps(given + broken), capture_output=True, text=True, check=True)
    answers = json.loads(run.stdout)
    assert answers[:60] == [""] * 60
    assert all(answers[60:])
    shipped = subprocess.run([*program, "--keys"], capture_output=True, text=True, check=True).stdout
    assert shipped == (Path(__file__).parent.parent / "rlperf" / "frameworks" / "facts" / "miles.tsv").read_text()


@pytest.mark.parametrize("framework", ["miles", "slime"])
def test_a_checkpoint_whose_shape_was_named_keeps_its_path(framework: str, tmp_path: Path) -> None:
    """`rlperf import --architecture` says what a path is, not that another model is meant."""
    found = with_architecture(read(tmp_path, framework, hf_checkpoint="/ckpt/of-mine"), "Qwen3-8B")
    file = tmp_path / "job.yaml"
    file.write_text(job_text(job_of(found, cluster="dgx_h100")))
    file.with_suffix(".keys.yaml").write_text(keys_text(found))
    write_file(file, None, tmp_path / "same")
    assert "HF_CHECKPOINT=/ckpt/of-mine" in (tmp_path / "same" / "config.sh").read_text()
    file.write_text(file.read_text().replace("architecture: Qwen3-8B", "architecture: Qwen3-4B"))
    write_file(file, None, tmp_path / "other")
    assert "HF_CHECKPOINT=/ckpt/Qwen3-4B" in (tmp_path / "other" / "config.sh").read_text()


@pytest.mark.parametrize("name", ["prime-rl", "ROLL"])
def test_a_framework_without_sources_is_refused_by_name(name: str) -> None:
    with pytest.raises(SpecError, match=rf"nothing is known of the keys of {name}: .*known: areal, miles"):
        adapter_of(name)
