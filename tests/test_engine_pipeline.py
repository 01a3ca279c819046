"""An engine cut into pipeline stages: batches in flight, and what a rollout with short prompts gains by stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlperf.api import ask
from rlperf.cost.inference import ByTokens, engine_step_cost, tabulated
from rlperf.cost.replica import Replica, batches_in_flight
from rlperf.frameworks.audit.findings import engine_findings
from rlperf.layout import Layout
from rlperf.sim.rl_step.engine import tabulate
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.job import Job
from rlperf.specs.profiles import load_architecture
from tests.test_frameworks_audit import R, _audit

H100 = load_hardware("h100_sxm", "dgx_h100")
VLLM = load_engine_calibration("vllm")
STAGES, ACROSS = Layout.of(tensor_parallel=8, pipeline_parallel=4), Layout.of(tensor_parallel=32)


def test_prompts_that_fit_in_one_batch_keep_all_stages_but_one_idle() -> None:
    assert batches_in_flight(np.array([1, 2, 8]), 1000.0, 8192.0).tolist() == [1.0, 1.0, 1.0]
    assert batches_in_flight(np.array([1, 2, 8]), 4.0 * 8192, 8192.0).tolist() == [1.0, 2.0, 4.0]
    assert float(batches_in_flight(8, np.inf, 8192.0)) == 8.0


@pytest.mark.parametrize("model", ["Llama-3.1-70B", "DeepSeek-V3"])
def test_one_batch_passes_every_stage_before_its_next_token(model: str) -> None:
    """At 64 requests a replica reads its weights stage by stage: no faster than one stage that has them all."""
    arch = load_architecture(model)
    replica = Replica.of(arch, H100, VLLM, STAGES, batches=np.array(1.0))
    one = tabulated(replica, ByTokens.of(replica))
    even = engine_step_cost(Replica.of(arch, H100, VLLM, STAGES))
    alone = engine_step_cost(Replica.of(arch, H100, VLLM, Layout.of(tensor_parallel=8)))
    load = 64.0, 64.0 * 1000.0
    assert float(one.decode_s(*load)) >= float(alone.decode_s(*load)) > float(even.decode_s(*load))
    # sixteen requests touch fewer experts than 64, so that batches in flight save more than attention alone
    assert float(one.decode_s(*load) / even.decode_s(*load)) > (1.5 if arch.experts else 1.05)


def test_a_rollout_of_short_prompts_gains_nothing_by_stages_in_flight() -> None:
    """Of DeepSeek-V3 stages were faster than tensor parallelism over nodes at 32 requests, and take longer."""
    task = {"name": "t", "workload": "math", "prompts_per_step": 32, "group_size": 16, "mini_batch": 32,
            "max_prompt_tokens": 512, "max_response_tokens": 1024}  # fmt: skip
    asked = {"architecture": "DeepSeek-V3", "cluster": "dgx_h100", "nodes": 32, "framework": "nemo_rl", "tasks": [task]}
    context = ask(Job.model_validate(asked)).context
    one, settings = context.tasks[0], context.job.pool("rollout").settings.filled()
    demand = one.source.demand(one.batches[0], None, context.job.seed)
    assert demand.read_tokens(shared=True) == pytest.approx(demand.read_tokens(shared=False) / 16)

    def cost(layout: Layout, read: float) -> float:
        wide = replace(layout, data_parallel=np.asarray(8))
        found = tabulate(context.site, one.architecture, settings, wide, read_tokens=read)[0]
        return float(found.decode_s(32.0, 32.0 * 600.0))

    own = demand.read_tokens(settings.prefix_caching)
    assert cost(STAGES, own) > cost(ACROSS, own) > cost(STAGES, np.inf)
    assert cost(ACROSS, own) == cost(ACROSS, np.inf)


def test_an_engine_across_nodes_costs_time_and_nothing_fails(tmp_path: Path) -> None:
    """DeepSeek-V3 has no other: an audit of its plan warned of what the planner had weighed."""
    wide = {R + "tensor_model_parallel_size": 16, "trainer.nnodes": 2}
    audited = _audit(tmp_path, "verl", wide)
    found = {each.rule: each for each in audited.findings}
    assert found["tp_across_nodes"].severity == "hint"
    assert found["tp_across_nodes"].key == R + "tensor_model_parallel_size"
    copies = {R + "tensor_model_parallel_size": 8, R + "data_parallel_size": 2, "trainer.nnodes": 2}
    apart = _audit(tmp_path, "verl", copies).findings
    assert "tp_across_nodes" not in {each.rule for each in apart}, "two copies of the attention, each in a node"
    rack = engine_findings(audited.imported, None, domain=72)
    assert not [each for each in rack if each.rule == "tp_across_nodes"], "NVLink joins the nodes of a rack"


def test_ranks_of_a_dense_model_under_vllm_are_engines(tmp_path: Path) -> None:
    """They were read as copies of the attention around feed-forward layers of all ranks, as vLLM has it of experts."""
    ranks = {R + "tensor_model_parallel_size": 2, R + "data_parallel_size": 2, R + "max_num_seqs": 64}

    def rollout(engine: str, **model: str) -> tuple[int, int, int | None, int | None]:
        named = {f"actor_rollout_ref.model.{key}": value for key, value in model.items()}
        read = _audit(tmp_path, "verl", {**ranks, **named, R + "name": engine}).imported.run.rollout
        return read.tensor_parallel, read.attention_data_parallel, read.data_parallel, read.max_running

    assert rollout("vllm") == (2, 1, 4, 64)
    assert rollout("sglang")[:3] == (4, 2, 2)
    assert rollout("vllm", path="Qwen/Qwen3-30B-A3B") == (4, 2, 2, 128)
