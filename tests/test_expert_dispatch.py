"""Engines whose ranks send each token to its experts alone (DeepEP and its like), in jobs and in frameworks' files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlperf import plan_job, predict_job
from rlperf.errors import SpecError
from rlperf.frameworks.adapter import Target
from rlperf.frameworks.export import plan_texts
from rlperf.frameworks.imports import import_config
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.readback import read_back
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.run import BatchFacts, RolloutRun, Run, TrainerRun

WIDE = {"tensor_parallel": 64, "attention_data_parallel": 64, "expert_parallel": 64}


def job(dispatch: str | None, framework: str = "slime", layout: dict[str, int] | None = None) -> dict[str, Any]:
    settings: dict[str, Any] = {"rollout_dtype": "fp8", "max_running": 16384, "memory_fraction": 0.9}
    settings |= {"expert_dispatch": dispatch} if dispatch else {}
    task = {"name": "math", "workload": "math", "prompts_per_step": 1024, "max_response_tokens": 8192}
    pools = [
        {"role": "rollout", "devices": 64, "layout": WIDE if layout is None else layout, "settings": settings},
        {"role": "trainer", "devices": 64},
    ]
    return {
        "architecture": "DeepSeek-V3", "cluster": "dgx_h100", "nodes": 16, "framework": framework, "tasks": [task],
        "modes": ["one_step_off"], "limits": {"staleness": 1}, "pools": pools,
    }  # fmt: skip


def test_tokens_sent_to_their_experts_alone_take_less_than_all_tokens_to_all_ranks() -> None:
    """SGLang's published decode on 72 H100 gathers nothing, and no job could say so."""
    usual, gathered, sent = (predict_job(job(word)).stages_s.rollout for word in (None, "nccl", "deepep"))
    assert usual == gathered and 0.5 < sent / gathered < 0.8
    with pytest.raises(SpecError, match="expert_dispatch 'pigeon' is not one of nccl, deepep"):
        predict_job(job("pigeon"))


@pytest.mark.parametrize(("engine", "cluster", "own"), [
    ("trtllm", "gb200_nvl72", True), ("trtllm", "dgx_b200", False), ("vllm", "gb200_nvl72", False),
])  # fmt: skip
def test_an_engine_sends_by_its_own_kernels_inside_a_rack(engine: str, cluster: str, own: bool) -> None:
    """NCCL's gathering of all tokens over 32 of 72 devices was charged to TensorRT-LLM, which does not run it there."""
    layout, nodes = dict.fromkeys(WIDE, 32), 16 if cluster == "dgx_b200" else 32

    def asked(dispatch: str | None) -> float:
        question = {**job(dispatch, "verl", layout), "cluster": cluster, "engine": engine, "nodes": nodes}
        return predict_job(question).stages_s.rollout

    usual, gathered = asked(None), asked("nccl")
    assert 0.5 < usual / gathered < 0.9 if own else usual == gathered


def test_where_tokens_are_dispatched_experts_are_spread() -> None:
    few = {"name": "math", "workload": "math", "prompts_per_step": 64, "max_response_tokens": 1024}
    left = predict_job({**job("deepep", layout={"tensor_parallel": 64}), "tasks": [few]})
    assert any("expert_parallel 64" in each for each in left.assumed)


def test_trainers_send_a_token_once_where_the_job_says_so() -> None:
    """slime's and verl's recipes of large models train with DeepEP, and were predicted with a copy per expert."""

    def asked(dispatch: str | None) -> tuple[float, float]:
        settings = {"backend": "megatron"} | ({"expert_dispatch": dispatch} if dispatch else {})
        layout = {"tensor_parallel": 4, "pipeline_parallel": 4, "expert_parallel": 16, "context_parallel": 1}
        pools = [{"role": "trainer", "layout": layout, "settings": settings}]
        task = {"name": "math", "workload": "math", "prompts_per_step": 128, "max_response_tokens": 8192}
        found = predict_job(
            architecture="Qwen3-235B-A22B", cluster="dgx_h100", nodes=16, framework="slime", tasks=[task], pools=pools
        ).stages_s
        return found.training, found.scoring

    usual, copies, once = asked(None), asked("nccl"), asked("deepep")
    assert usual == copies
    assert all(0.6 < few / many < 0.99 for few, many in zip(once, copies, strict=True))


FILES = [
    ("slime", "sglang", "megatron", "sglang-moe-a2a-backend", "deepep"),
    ("miles", "sglang", "megatron", "sglang-moe-a2a-backend", "deepep"),
    ("verl", "vllm", "megatron", "all2all_backend", "deepep_low_latency"),
    ("verl", "sglang", "megatron", "moe_a2a_backend", "deepep"),
    ("nemo_rl", "vllm", "megatron", "all2all_backend", "deepep_low_latency"),
    ("skyrl", "vllm", "megatron", "all2all_backend", "deepep_low_latency"),
]


@pytest.mark.parametrize(("framework", "engine", "trainer", "key", "word"), FILES)
def test_files_say_it_and_read_back_so(framework: str, engine: str, trainer: str, key: str, word: str) -> None:
    adapter, version = adapter_of(framework), key_table(framework).versions[-1]
    for dispatch in ("deepep", "nccl"):
        run = Run(
            architecture="Qwen3-30B-A3B",
            trainer=TrainerRun(backend=trainer, devices=8, token_budget=8192),
            rollout=RolloutRun(
                backend=engine, devices=8, tensor_parallel=8, attention_data_parallel=8, expert_parallel=8,
                expert_dispatch=dispatch,
            ),
            devices=8,
            batch=BatchFacts(prompts_per_step=32, group_size=8, max_prompt_tokens=1024, max_response_tokens=4096),
        ).completed()  # fmt: skip
        target = Target(key_table(framework), version, trainer)
        files = adapter.render(adapter.emit(adapter.adapt(run, version)[0], target), "config", [])
        assert any(key in text and word in text for text in files.values()) == (dispatch == "deepep")
        assert (read_back(files, adapter, version).rollout.expert_dispatch or "nccl") == dispatch


def test_what_every_framework_does_anyway_is_no_loss_in_its_files() -> None:
    plan = plan_job(
        architecture="Qwen3-30B-A3B", cluster="dgx_h100", framework="verl", trainer_backends=["megatron"],
        tasks=[{"name": "math", "workload": "math", "prompts_per_step": 64, "max_response_tokens": 4096}],
        pools=[{"role": role, "settings": {"expert_dispatch": "nccl"}} for role in ("rollout", "trainer")],
    )  # fmt: skip
    assert "expert_dispatch" not in plan_texts(plan, "verl")["EXPORT.md"]


TRAINED = [
    ("slime", "sglang", "moe-token-dispatcher-type"),
    ("miles", "sglang", "moe-token-dispatcher-type"),
    ("verl", "vllm", "moe_token_dispatcher_type"),
    ("nemo_rl", "vllm", "moe_token_dispatcher_type"),
    ("skyrl", "vllm", "moe_token_dispatcher_type"),
    ("areal", "sglang", "moe_token_dispatcher_type"),
]


@pytest.mark.parametrize(("framework", "engine", "key"), TRAINED)
def test_files_say_it_of_trainers(framework: str, engine: str, key: str) -> None:
    adapter, version = adapter_of(framework), key_table(framework).versions[-1]
    for dispatch in ("deepep", "nccl"):
        run = Run(
            architecture="Qwen3-30B-A3B",
            trainer=TrainerRun(
                backend="megatron", devices=8, token_budget=8192, expert_parallel=8, expert_dispatch=dispatch
            ),
            rollout=RolloutRun(backend=engine, devices=8, tensor_parallel=2),
            devices=8,
            batch=BatchFacts(prompts_per_step=32, group_size=8, max_prompt_tokens=1024, max_response_tokens=4096),
        ).completed()
        target = Target(key_table(framework), version, "megatron")
        files = adapter.render(adapter.emit(adapter.adapt(run, version)[0], target), "config", [])
        lines = [line for text in files.values() for line in text.splitlines() if key in line]
        assert any("flex" in line for line in lines) == (dispatch == "deepep"), lines
        assert not (dispatch == "deepep" and any("alltoall" in line for line in lines))
        assert (read_back(files, adapter, version).trainer.expert_dispatch or "nccl") == dispatch


def test_sglang_spreads_experts_over_the_engine_that_dispatches_to_them(tmp_path: Path) -> None:
    flags = (
        "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --rollout-batch-size 64 "
        "--hf-checkpoint /ckpt/Qwen3-30B-A3B --n-samples-per-prompt 8 --rollout-max-response-len 8192 "
        "--rollout-num-gpus-per-engine 8 --sglang-dp-size 8 --sglang-enable-dp-attention --sglang-moe-a2a-backend "
    )
    for word, experts in (("none", 1), ("deepep", 8), ("mooncake", 8), ("none --sglang-enable-deepep-moe", 8)):
        (tmp_path / "run.sh").write_text(flags + word + "\n")
        rollout = import_config([tmp_path / "run.sh"], "slime").run.rollout
        assert (rollout.expert_parallel, rollout.expert_dispatch) == (experts, "nccl" if experts == 1 else "deepep")


@pytest.mark.parametrize("framework", ["areal", "trl", "openrlhf", "rlinf"])
def test_frameworks_without_a_key_refuse_it_by_name(framework: str) -> None:
    task = {"name": "math", "workload": "math", "prompts_per_step": 64, "max_response_tokens": 4096}
    pools = [{"role": "rollout", "settings": {"expert_dispatch": "deepep"}}]
    with pytest.raises(SpecError, match=r"no key for rollout\.expert_dispatch"):
        plan_job(architecture="Qwen3-30B-A3B", cluster="dgx_h100", framework=framework, tasks=[task], pools=pools)


@pytest.mark.parametrize("framework", ["verl", "nemo_rl", "skyrl"])
def test_vllm_is_told_the_requests_of_a_rank(framework: str) -> None:
    """Eight ranks of 512 requests each were read as a replica that runs 512, and written as ranks of 4,096."""
    adapter, version = adapter_of(framework), key_table(framework).versions[-1]
    run = Run(
        architecture="Qwen3-30B-A3B",
        trainer=TrainerRun(backend="megatron", devices=8, token_budget=8192),
        rollout=RolloutRun(
            backend="vllm", devices=8, tensor_parallel=8, attention_data_parallel=8, expert_parallel=8, max_running=4096
        ),
        devices=8,
        batch=BatchFacts(prompts_per_step=512, group_size=8, max_prompt_tokens=1024, max_response_tokens=4096),
    ).completed()
    target = Target(key_table(framework), version, "megatron")
    files = adapter.render(adapter.emit(adapter.adapt(run, version)[0], target), "config", [])
    lines = [line for text in files.values() for line in text.splitlines() if "max_num_seqs" in line]
    assert lines and all("512" in line for line in lines)
    assert read_back(files, adapter, version).rollout.max_running == 4096


def test_a_dense_model_has_no_experts_to_send_tokens_to() -> None:
    task = {"name": "math", "workload": "math", "prompts_per_step": 64, "max_response_tokens": 4096}
    for role in ("rollout", "trainer"):
        pools = [{"role": role, "settings": {"expert_dispatch": "deepep"}}]
        with pytest.raises(SpecError, match="Qwen3-8B has no experts to send tokens to"):
            predict_job(architecture="Qwen3-8B", cluster="dgx_h100", framework="slime", tasks=[task], pools=pools)
