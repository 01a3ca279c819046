"""Muon's update and states; routers that repeat recorded experts: bytes, passes, keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rlperf.cost.parameters import parameters
from rlperf.cost.trainer.muon import matrix_share, muon_s, newton_schulz_s, with_muon
from rlperf.errors import SpecError
from rlperf.frameworks.export import plan_texts, write_plan
from rlperf.frameworks.imports import import_config, job_of
from rlperf.layout import Layout
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import resolve
from rlperf.plan.search.screen import FORGIVEN, screen
from rlperf.sim.rl_step.data_movement import route_bytes
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.job import Job
from rlperf.specs.pool import PoolSettings
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import load_trainer

MOE = "Qwen3-30B-A3B"


def judged(architecture: str, **settings: Any) -> Evaluation:
    layout = {"tensor_parallel": 1, "expert_parallel": 8, "zero_stage": 1, "offload": "none", "pipeline_parallel": 1}
    if architecture != MOE:
        layout = {**layout, "expert_parallel": 1, "tensor_parallel": 2}
    job = Job.model_validate(
        {
            "architecture": architecture, "cluster": "dgx_h100", "nodes": 4, "framework": "verl==0.9.1",
            "trainer_backends": ["megatron"], "reference": False, "modes": "disaggregated",
            "tasks": [{"name": "m", "workload": "math", "prompts_per_step": 32, "max_response_tokens": 4096}],
            "pools": [
                {"role": "rollout", "devices": 16, "layout": {"tensor_parallel": 2, "expert_parallel": 1}},
                {"role": "trainer", "devices": 16, "layout": {**layout, "context_parallel": 1},
                 "settings": {"token_budget": 8192, **settings}},
            ],
        }
    )  # fmt: skip
    context = resolve(job)
    demand = context.tasks[0].source.demand(context.tasks[0].batches[0], None, 0)
    found = screen(context, context.tasks[0], (demand,), keep=1, forgiven=FORGIVEN)
    return Judge(context, context.tasks[0]).evaluate(demand, found.configurations[0])


@pytest.fixture(scope="module")
def h100() -> Hardware:
    return load_hardware("h100_sxm")


# -- Muon -------------------------------------------------------------------------------------------------------------


def test_newton_schulz_is_its_products(h100: Hardware) -> None:
    """4 m^2 n + 2 m^3 FLOP an iteration, whichever side is the shorter, no faster than the data sheet."""
    wide, tall = (newton_schulz_s(h100, *map(np.array, shape)) for shape in ((4096.0, 12288.0), (12288.0, 4096.0)))
    flop = 5 * (4 * 4096.0**2 * 12288.0 + 2 * 4096.0**3)
    assert wide == tall
    assert 0.5 < flop / 989.4e12 / float(wide) < 1.0


def test_ranks_share_the_matrices_down_to_one_each(h100: Hardware) -> None:
    arch, trainer = load_architecture("Qwen3-8B"), load_trainer("megatron")
    plain = muon_s(arch, h100, trainer, Layout.of(data_parallel=8, zero_stage=0))
    shared = [float(muon_s(arch, h100, trainer, Layout.of(data_parallel=n, zero_stage=1))) for n in (1, 2, 4)]
    assert float(plain) == pytest.approx(shared[0])
    assert shared[0] > shared[1] > shared[2] > shared[0] / 8
    many = [float(muon_s(arch, h100, trainer, Layout.of(data_parallel=n, zero_stage=1))) for n in (256, 512)]
    assert many[1] >= 0.9 * many[0]  # one matrix each is the least


def test_one_moment_less_for_matrices_alone() -> None:
    arch, trainer = load_architecture("Qwen3-8B"), load_trainer("megatron")
    share = matrix_share(arch)
    tables = 2 * arch.vocab * arch.hidden / parameters(arch)
    assert share == pytest.approx(1.0 - tables, abs=0.001)
    assert with_muon(trainer, arch).storage.optimizer == pytest.approx(trainer.storage.optimizer - 4.0 * share)


def test_muon_costs_time_and_spares_memory() -> None:
    adam, muon = judged("Qwen3-8B"), judged("Qwen3-8B", optimizer="muon")
    assert muon.rl_step_s > adam.rl_step_s
    owned = parameters(load_architecture("Qwen3-8B")) / 16
    assert float(adam.held.parts.optimizer[0] - muon.held.parts.optimizer[0]) == pytest.approx(
        4.0 * matrix_share(load_architecture("Qwen3-8B")) * owned, rel=0.05
    )


# -- router replay ----------------------------------------------------------------------------------------------------


def test_bytes_of_a_recorded_token() -> None:
    assert route_bytes(load_architecture(MOE)) == 48 * 8 * 4
    assert route_bytes(load_architecture("Qwen3-8B")) == 0


def test_replay_moves_its_record_and_r2_asks_for_the_old_policy() -> None:
    plain, r2, r3 = (judged(MOE, router_replay=word) for word in ("none", "R2", "R3"))
    moved = [float(e.seconds.data_movement_s.mean()) for e in (plain, r2, r3)]
    tokens = plain.demand.trained_tokens
    rate = plain.framework.controller_rate.value
    assert moved[2] - moved[0] == pytest.approx(tokens * 1536 * (2 + plain.scored.passes) / rate, rel=1e-6)
    assert moved[0] < moved[1] <= moved[2]
    assert r3.rl_step_s > plain.rl_step_s and r2.scored.passes == 1
    assert float(r3.seconds.training_s.mean()) > float(plain.seconds.training_s.mean())


def test_what_has_no_experts_has_nothing_to_replay() -> None:
    job = {
        "architecture": "Qwen3-8B", "cluster": "dgx_h100",
        "tasks": [{"name": "t", "workload": "math", "prompts_per_step": 8, "max_response_tokens": 1024}],
        "pools": [{"role": "trainer", "settings": {"router_replay": "R3"}}],
    }  # fmt: skip
    with pytest.raises(SpecError, match="no experts"):
        resolve(Job.model_validate(job))
    job["pools"] = [{"role": "trainer", "settings": {"optimizer": "muon", "lora_rank": 8}}]
    with pytest.raises(SpecError, match="not for adapters"):
        resolve(Job.model_validate(job))
    job["pools"] = [{"role": "trainer", "layout": {"offload": "optimizer"}, "settings": {"optimizer": "muon"}}]
    with pytest.raises(
        SpecError, match=r"muon's products are no work for the host .*offload: none, or optimizer: adam"
    ):
        resolve(Job.model_validate(job))
    with pytest.raises(ValidationError, match="router_replay 'R4'"):
        PoolSettings(router_replay="R4")


@pytest.mark.parametrize(
    ("framework", "settings", "key"),
    [
        ("verl==0.9.1", {"router_replay": "R3", "optimizer": "muon"}, "enable_rollout_routing_replay"),
        ("verl==0.9.1", {"router_replay": "R3"}, "actor.megatron.router_replay.mode"),
        ("verl==0.7", {"router_replay": "R3"}, "actor.router_replay.mode"),
        ("slime", {"router_replay": "R2", "optimizer": "muon"}, "use-routing-replay"),
        ("slime", {"router_replay": "R3"}, "use-rollout-routing-replay"),
    ],
)
def test_keys_are_written_and_read_back(framework: str, settings: dict[str, str], key: str, tmp_path: Any) -> None:
    job = {
        "architecture": MOE, "cluster": "dgx_h100", "nodes": 4, "framework": framework,
        "trainer_backends": ["megatron"],
        "tasks": [{"name": "t", "workload": "math", "prompts_per_step": 64, "max_response_tokens": 2048}],
        "pools": [{"role": "trainer", "settings": settings}],
    }  # fmt: skip
    plan = plan_job(resolve(Job.model_validate(job)))
    assert plan.phases[0].pool("trainer").layout.offload in ("none", "activations") or "optimizer" not in settings
    text = plan_texts(plan)["EXPORT.md"]
    assert key in text and "router_replay = " not in text and "optimizer = " not in text
    assert any("experts repeated" in line for line in plan.phases[0].predicted.gains)
    files = [f for f in write_plan(plan, None, tmp_path / "out") if f.suffix in (".yaml", ".sh")]
    back = job_of(import_config(files, framework)).pool("trainer").settings
    for name, value in settings.items():
        assert getattr(back, name) == value


def test_where_no_key_is_the_loss_is_named() -> None:
    job = {
        "architecture": MOE, "cluster": "dgx_h100", "nodes": 4, "framework": "openrlhf",
        "tasks": [{"name": "t", "workload": "math", "prompts_per_step": 64, "max_response_tokens": 2048}],
        "pools": [{"role": "trainer", "settings": {"router_replay": "R3"}}],
    }  # fmt: skip
    plan = plan_job(resolve(Job.model_validate(job)))
    assert "router_replay R3" in plan_texts(plan)["EXPORT.md"]
