"""RLinf's reasoning task: what its files say, what its validators refuse, and what rlperf does not read of it."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlperf.api import plan_job, predict_job
from rlperf.errors import ExportError, SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.export import export_run
from rlperf.frameworks.imports import Imported, import_config, job_of
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.run import RolloutRun
from rlperf.specs.job import Job
from studies.round_trip.run import plan_trip
from tests.nested import nest

from .framework_samples import sample_run

KEYS: dict[str, Any] = {
    "cluster.num_nodes": 1, "cluster.component_placement": {"actor,rollout,reward": "0-7"},
    "runner.task_type": "reasoning", "runner.seq_length": 8192, "runner.enable_dynamic_batch_size": True,
    "runner.max_tokens_per_mbs": 16384, "algorithm.adv_type": "grpo", "algorithm.group_size": 8,
    "algorithm.n_minibatches": 4, "algorithm.kl_beta": 0.0, "algorithm.recompute_logprobs": True,
    "algorithm.logprob_forward_micro_batch_size": 2, "rollout.return_logprobs": False,
    "algorithm.sampling_params.max_new_tokens": "${subtract:${runner.seq_length}, ${data.max_prompt_length}}",
    "rollout.rollout_backend": "sglang", "rollout.tensor_parallel_size": 2, "rollout.gpu_memory_utilization": 0.6,
    "rollout.enforce_eager": False, "rollout.max_running_requests": 128, "rollout.cuda_graph_max_bs": 128,
    "rollout.model.model_path": "/ckpt/Qwen2.5-7B", "data.rollout_batch_size": 128, "data.max_prompt_length": 1024,
    "actor.training_backend": "megatron", "actor.offload_weight": True, "actor.offload_optimizer": True,
    "actor.model.tensor_model_parallel_size": 2, "actor.model.sequence_parallel": True,
    "actor.model.recompute_granularity": "full", "actor.optim.use_distributed_optimizer": True,
}  # fmt: skip
APART = {"cluster.component_placement": {"actor": "0-3", "rollout": "4-7", "reward": "4-7"},
         "runner.enable_dynamic_batch_size": False}  # fmt: skip
FSDP = {key: value for key, value in KEYS.items() if not key.startswith(("actor.", "runner.enable"))} | {
    "actor.training_backend": "fsdp", "actor.fsdp_config.gradient_checkpointing": True, "actor.enable_offload": True,
}  # fmt: skip


def read(folder: Path, keys: dict[str, Any], framework: str | None = None) -> Imported:
    (folder / "run.yaml").write_text(yaml.safe_dump(nest(keys.items())))
    return import_config([folder / "run.yaml"], framework)


def test_a_configuration_is_read_with_what_the_validators_fill_in(tmp_path: Path) -> None:
    found = read(tmp_path, KEYS)
    run = found.run
    assert (found.adapter.name, found.target.version, found.unknown, found.illegal) == ("rlinf", "0.3", (), ())
    assert (run.mode, run.devices, run.nodes, run.devices_per_node) == ("colocated", 8, 1, 8)
    assert (run.batch.prompts, run.batch.group_size, run.batch.mini, run.batch.updates) == (128, 8, 32, 4)
    assert (run.batch.max_prompt_tokens, run.batch.max_response_tokens) == (1024, 7168), "its own resolver"
    assert (run.trainer.tensor_parallel, run.trainer.data_parallel, run.trainer.token_budget) == (2, 4, 16384)
    assert (run.trainer.parked, run.trainer.packing, run.trainer.activation_recompute) == (True, True, "full")
    assert (run.rollout.backend, run.rollout.tensor_parallel, run.rollout.max_running) == ("sglang", 2, 128)
    clean = audit(found, cluster="dgx_h100", plan=False, gains=False)
    assert [each for each in clean.findings if each.severity != "hint"] == []
    assert clean.predicted is not None and clean.predicted.rl_step_s > 0


def test_rows_of_one_length_cost_their_padding_with_megatron_too(tmp_path: Path) -> None:
    fixed = {**KEYS, "runner.enable_dynamic_batch_size": False}
    padded = {**fixed, "actor.model.variable_seq_lengths": False}
    packed, rows = (
        audit(read(tmp_path, keys), cluster="dgx_h100", plan=False, gains=False) for keys in (fixed, padded)
    )
    assert (packed.imported.run.trainer.packing, rows.imported.run.trainer.packing) == (True, False)
    assert packed.predicted is not None and rows.predicted is not None
    assert rows.predicted.stages_s.training > 1.2 * packed.predicted.stages_s.training
    assert rows.predicted.stages_s.rollout == packed.predicted.stages_s.rollout
    # filled by tokens, each sequence of a microbatch is as long as its budget: padding_seqlen * batch_size
    filled = audit(
        read(tmp_path, {**padded, "runner.enable_dynamic_batch_size": True}),
        cluster="dgx_h100",
        plan=False,
        gains=False,
    )
    assert filled.imported.run.trainer.packing is False
    assert filled.predicted is not None
    assert filled.predicted.stages_s.training == rows.predicted.stages_s.training


def test_the_fsdp_trainer_has_its_own_switches(tmp_path: Path) -> None:
    run = read(tmp_path, FSDP).run
    assert (run.trainer.backend, run.trainer.zero_stage, run.trainer.activation_recompute) == ("fsdp2", 3, "full")
    assert (run.trainer.token_budget, run.trainer.microbatch, run.trainer.scoring_microbatch) == (None, 1, 2)
    assert (run.trainer.packing, run.trainer.parked, run.trainer.data_parallel) == (False, True, 8)
    assert read(tmp_path, {**FSDP, "actor.enable_offload": False}).run.trainer.parked is False
    deferred = {**FSDP, "actor.fsdp_config.enable_gradient_accumulation": True}
    assert job_of(read(tmp_path, deferred)).pool("trainer").settings.whole_gradients is True
    assert not job_of(read(tmp_path, FSDP)).pool("trainer").settings.filled().whole_gradients


@pytest.mark.parametrize(
    ("keys", "stage"),
    [
        ({"reshard_after_forward": False}, 3),  # FSDP1, the default, does not read it
        ({"sharding_strategy": "shard_grad_op"}, 2),
        ({"sharding_strategy": "no_shard", "reshard_after_forward": True}, 0),
        ({"strategy": "fsdp2", "reshard_after_forward": False}, 2),
        ({"strategy": "fsdp2", "sharding_strategy": "no_shard"}, 3),
    ],
)
def test_the_strategy_says_which_key_shards(tmp_path: Path, keys: dict[str, Any], stage: int) -> None:
    found = read(tmp_path, {**FSDP, **{f"actor.fsdp_config.{key}": value for key, value in keys.items()}})
    assert found.run.trainer.zero_stage == stage


def test_sglang_takes_its_own_section_of_sampling_before_the_algorithms(tmp_path: Path) -> None:
    own = {**KEYS, "rollout.sampling_params": {"max_new_tokens": 2048, "do_sample": True}}
    assert read(tmp_path, own).run.batch.max_response_tokens == 2048
    vllm = read(tmp_path, {**own, "rollout.rollout_backend": "vllm"})
    assert vllm.run.batch.max_response_tokens == 7168
    assert ("idle_key", "rollout.sampling_params.max_new_tokens") in {
        (each.rule, each.key) for each in audit(vllm, predict=False).findings
    }
    with pytest.raises(SpecError, match=r"rollout\.sampling_params\.max_new_tokens is mandatory"):
        job_of(read(tmp_path, {**KEYS, "rollout.sampling_params": {"do_sample": True}}))


@pytest.mark.parametrize(
    ("placement", "devices", "mode"),
    [
        ({"actor,rollout,reward": "all"}, 16, "colocated"),
        ({"actor": "0-7", "rollout,reward": "8-15"}, 16, "streaming"),
        ({"actor": "0-3,4-7:4-7", "rollout": "8-11", "reward": 8}, 12, "streaming"),
        ({"actor": {"node_group": "cluster", "placement": "0-7"}, "rollout": {"placement": "8-15"}}, 16, "streaming"),
    ],
)
def test_pools_are_ranks_of_gpus(tmp_path: Path, placement: dict[str, Any], devices: int, mode: str) -> None:
    run = read(tmp_path, {**KEYS, "cluster.num_nodes": 2, "cluster.component_placement": placement}).run
    assert (run.devices, run.mode, run.nodes) == (devices, mode, 2)
    assert run.trainer.devices == (16 if mode == "colocated" else 8)


def test_pools_apart_overlap_within_a_step(tmp_path: Path) -> None:
    found = read(tmp_path, KEYS | APART)
    assert (found.run.mode, found.run.staleness, found.run.trainer.devices) == ("streaming", 0, 4)
    assert predict_job(job_of(found)).rl_step_s > 0


@pytest.mark.parametrize(
    ("keys", "rule", "key"),
    [
        ({"algorithm.recompute_logprobs": False}, "log_probs", "algorithm.recompute_logprobs"),
        ({"algorithm.group_size": 1}, "groups", "algorithm.group_size"),
        ({"runner.seq_length": 1024, "algorithm.sampling_params.max_new_tokens": 512}, "sequence_length",
         "runner.seq_length"),
        ({"runner.max_tokens_per_mbs": 4096}, "token_budget", "runner.max_tokens_per_mbs"),
        ({"rollout.tensor_parallel_size": 3}, "engines_divide", "rollout.tensor_parallel_size"),
        ({"actor.model.pipeline_model_parallel_size": 8, "actor.model.tensor_model_parallel_size": 1},
         "megatron_layers", "actor.model.pipeline_model_parallel_size"),
        ({"cluster.component_placement": {"actor": "0-5", "rollout": "4-7"}}, "placement",
         "cluster.component_placement"),
        ({"cluster.component_placement": {"actor,rollout": "0-7"}}, "reward_placed", "cluster.component_placement"),
        ({"cluster.component_placement": {"actor,rollout,reward": "0-3,5-8"}}, "contiguous",
         "cluster.component_placement"),
        ({"actor.model.encoder_seq_length": 4096}, "row_length", "actor.model.encoder_seq_length"),
        ({**APART, "runner.enable_dynamic_batch_size": True}, "streamed_batches", "runner.enable_dynamic_batch_size"),
        ({"data.rollout_batch_size": 127, "algorithm.group_size": 7}, "batch_by_dp", "data.rollout_batch_size"),
    ],
)  # fmt: skip
def test_what_the_framework_asserts_is_found(tmp_path: Path, keys: dict[str, Any], rule: str, key: str) -> None:
    found = audit(read(tmp_path, KEYS | keys), predict=False)
    assert rule in {each.rule for each in found.findings if each.key == key and each.severity == "error"}


@pytest.mark.parametrize("adv_type", ["grpo", "grpo_dynamic", "reinpp_baseline", "reinpp"])
def test_groups_are_asked_of_advantages_that_compare(tmp_path: Path, adv_type: str) -> None:
    found = audit(read(tmp_path, {**KEYS, "algorithm.adv_type": adv_type, "algorithm.group_size": 1}), predict=False)
    assert ("groups" in {each.rule for each in found.findings}) == (adv_type != "reinpp")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"actor.model.encoder_seq_length": 16384}, ("warning", "lengths_agree", "actor.model.encoder_seq_length")),
        ({"algorithm.sampling_params.max_new_tokens": 9000},
         ("warning", "response_length", "algorithm.sampling_params.max_new_tokens")),
        ({"algorithm.down_sampling.do_down_sampling": True},
         ("hint", "uncounted", "algorithm.down_sampling.do_down_sampling")),
        ({"algorithm.max_num_gen_batches": 2}, ("hint", "uncounted", "algorithm.max_num_gen_batches")),
        ({"actor.model.precision": "fp32"}, ("hint", "uncounted", "actor.model.precision")),
        ({"rollout.model.precision": 32}, ("hint", "uncounted", "rollout.model.precision")),
    ],
)  # fmt: skip
def test_what_changes_the_work_is_named(tmp_path: Path, keys: dict[str, Any], said: tuple[str, str, str]) -> None:
    def named(stated: dict[str, Any]) -> set[tuple[str, str, str]]:
        findings = audit(read(tmp_path, stated), predict=False).findings
        return {(each.severity, each.rule, each.key) for each in findings}

    plain = {**KEYS, "actor.model.encoder_seq_length": 8192, "actor.model.precision": "bf16",
             "algorithm.max_num_gen_batches": 1}  # fmt: skip
    assert said in named(plain | keys) - named(plain)


@pytest.mark.parametrize(("computed_in", "hinted"), [(None, True), ("fp32", True), ("bf16", False)])
def test_fsdp_in_fp32_that_computes_in_16_bits_is_what_is_predicted(
    tmp_path: Path, computed_in: str | None, hinted: bool
) -> None:
    keys = {"actor.model.precision": "fp32", "actor.fsdp_config.mixed_precision.param_dtype": computed_in}
    assert ("uncounted" in {each.rule for each in audit(read(tmp_path, FSDP | keys), predict=False).findings}) == hinted


def test_the_planner_asks_what_speaks_of_the_run() -> None:
    """Rules of ``run`` alone are asked of no pool, so these two speak of the rollout, too."""
    names = {"rollout": RolloutRun(devices=4), "batch": SimpleNamespace(group_size=1)}
    for mode, broken in (("streaming", {"fsdp_inference", "groups"}), ("colocated", {"groups"})):
        asked = {**names, "run": SimpleNamespace(mode=mode)}
        refused = set(framework_facts("rlinf").refused(asked, "fsdp2", about=("rollout",)))
        assert refused & {"fsdp_inference", "groups"} == broken


def test_fsdp_batches_divide_over_microbatches_and_gpus(tmp_path: Path) -> None:
    odd = {**FSDP, "algorithm.training_batch_size_per_gpu": 3}
    assert "fsdp_microbatches" in {each.rule for each in audit(read(tmp_path, odd), predict=False).findings}
    assert "fsdp_inference" in {each.rule for each in audit(read(tmp_path, FSDP | APART), predict=False).findings}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"runner.task_type": "embodied"}, "rlperf reads reasoning alone"),
        ({"algorithm.adv_type": "gae"}, "no critic of RLinf"),
        ({"critic.use_critic_model": True}, "no critic of RLinf"),
        ({"actor.model.is_lora": True}, "no adapters of RLinf"),
        ({"cluster.auto_scheduler": True}, "change their size"),
        ({"cluster.component_placement": {"actor": "0-3", "rollout": "4-6", "inference": "7"}}, "GPUs of its own"),
        (
            {"actor.training_backend": "fsdp", "actor.fsdp_config.sharding_strategy": "hybrid_shard"},
            "sharding within groups",
        ),
        ({"cluster.component_placement": {"reward": "0-7"}}, "component_placement.actor is mandatory"),
        (
            {
                "cluster.component_placement": {
                    "actor,reward": {"node_group": "a", "placement": "0-7"},
                    "rollout": "8-15",
                }
            },
            "ranks count within the group",
        ),
    ],
)
def test_what_rlperf_does_not_read_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        job_of(read(tmp_path, KEYS | keys))


@pytest.mark.parametrize("ranks", ["0..7", "7-4"])
def test_ranks_that_are_none_are_refused(tmp_path: Path, ranks: str) -> None:
    with pytest.raises(SpecError, match="is no range of ranks"):
        read(tmp_path, {**KEYS, "cluster.component_placement": {"actor": ranks, "rollout": "0-7"}})


def test_a_key_that_nobody_is_known_to_read_is_a_warning(tmp_path: Path) -> None:
    found = audit(read(tmp_path, {**KEYS, "rollout.tensor_paralel_size": 2}), predict=False).findings
    [typo] = [each for each in found if each.rule == "unknown_key"]
    assert (typo.severity, typo.key) == ("warning", "rollout.tensor_paralel_size")
    assert "tensor_parallel_size" in typo.advice


@pytest.mark.parametrize("version", framework_facts("rlinf").versions)
def test_exports_read_back_as_they_were_meant(tmp_path: Path, version: str) -> None:
    """Of 60 sampled exports of each release, 60 passed hydra and the release's own validators (docs/guide/audit.md)."""
    adapter, modes = adapter_of("rlinf"), set()
    for seed in range(24):
        try:
            phase = export_run(sample_run(Random(seed), "rlinf", version), adapter, version, "config")
        except ExportError:  # FSDP has one degree, and no pools apart: planned for it are neither
            continue
        (tmp_path / "config.sh").write_text(dict(phase.files)["config.sh"])
        back = import_config([tmp_path / "config.sh"], f"rlinf=={version}")
        meant = phase.emission.run
        assert (back.unknown, back.illegal, back.run.wrong) == ((), (), ()), seed
        cleared = "++rollout.sampling_params=null" in (tmp_path / "config.sh").read_text()
        assert cleared == (meant.rollout.backend == "sglang"), seed
        for name in ("mode", "reference", "devices", "nodes"):
            assert getattr(back.run, name) == getattr(meant, name), (seed, name)
        for name in ["prompts_per_step", "group_size", "mini_batch", "max_prompt_tokens", "max_response_tokens"]:
            assert getattr(back.run.batch, name) == getattr(meant.batch, name), (seed, name)
        layout = (
            "devices tensor_parallel pipeline_parallel context_parallel expert_parallel data_parallel zero_stage "
            "expert_tensor_parallel virtual_pipeline activation_recompute offload token_budget parked memory_fraction "
            "max_running cuda_graphs"
        )
        for pool in ("trainer", "rollout"):
            for name in layout.split():
                ours, theirs = getattr(getattr(meant, pool), name), getattr(getattr(back.run, pool), name)
                assert ours == theirs, (seed, pool, name)
        modes.add(meant.mode)
    assert modes == {"colocated", "streaming"}


@pytest.mark.parametrize(
    ("model", "workload"), [("Qwen3-8B", "math"), pytest.param("Qwen3-4B", "searching", marks=pytest.mark.slow)]
)
def test_plans_on_gpus_of_their_own_count_samples_as_the_files_do(model: str, workload: str) -> None:
    """A token budget there is none of a file's: the plan would be faster than what it exports by up to a sixth."""
    task = {
        "name": "t", "workload": workload, "prompts_per_step": 64, "group_size": 8, "mini_batch": 64,
        "max_prompt_tokens": 1024, "max_response_tokens": 2048,
    }  # fmt: skip
    job = {"architecture": model, "cluster": "dgx_h200", "nodes": 2, "framework": "rlinf", "tasks": [task]}
    found = plan_trip(Job.model_validate({**job, "modes": "streaming"}))
    assert found.same, (found.refused, found.excess, found.lost, found.findings)
    shared = plan_job(Job.model_validate({**job, "modes": "colocated"})).phases[0].pool("trainer").settings
    assert shared.token_budget is not None
