"""RLinf's reasoning task: what its files say, what its validators refuse, and what rlperf does not read of it."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from rlperf.api import predict_job
from rlperf.errors import ExportError, SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit import audit
from rlperf.frameworks.export import export_run
from rlperf.frameworks.imports import Imported, import_config, job_of
from rlperf.frameworks.keytable import nest
from rlperf.frameworks.registry import adapter_of

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


def test_the_fsdp_trainer_has_its_own_switches(tmp_path: Path) -> None:
    run = read(tmp_path, FSDP).run
    assert (run.trainer.backend, run.trainer.zero_stage, run.trainer.activation_recompute) == ("fsdp2", 3, "full")
    assert (run.trainer.token_budget, run.trainer.microbatch, run.trainer.scoring_microbatch) == (None, 1, 2)
    assert (run.trainer.packing, run.trainer.parked, run.trainer.data_parallel) == (False, True, 8)
    kept = read(tmp_path, {**FSDP, "actor.fsdp_config.reshard_after_forward": False, "actor.enable_offload": False})
    assert (kept.run.trainer.zero_stage, kept.run.trainer.parked) == (2, False)


@pytest.mark.parametrize(
    ("placement", "devices", "mode"),
    [
        ({"actor,rollout,reward": "all"}, 16, "colocated"),
        ({"actor": "0-7", "rollout,reward": "8-15"}, 16, "streaming"),
        ({"actor": "0-3,4-7:4-7", "rollout": "8-11", "reward": 8}, 12, "streaming"),
        ({"actor": {"node_group": "a", "placement": "0-7"}, "rollout": {"placement": "8-15"}}, 16, "streaming"),
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
        ({**APART, "runner.enable_dynamic_batch_size": True}, "streamed_batches", "runner.enable_dynamic_batch_size"),
        ({"data.rollout_batch_size": 127, "algorithm.group_size": 7}, "batch_by_dp", "data.rollout_batch_size"),
    ],
)  # fmt: skip
def test_what_the_framework_asserts_is_found(tmp_path: Path, keys: dict[str, Any], rule: str, key: str) -> None:
    found = audit(read(tmp_path, KEYS | keys), predict=False)
    assert rule in {each.rule for each in found.findings if each.key == key and each.severity == "error"}


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
        ({"cluster.component_placement": {"reward": "0-7"}}, "component_placement.actor is mandatory"),
    ],
)
def test_what_rlperf_does_not_read_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        job_of(read(tmp_path, KEYS | keys))


def test_ranks_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is no range of ranks"):
        read(tmp_path, {**KEYS, "cluster.component_placement": {"actor": "0..7", "rollout": "0-7"}})


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
