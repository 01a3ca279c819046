"""Risk of running out of memory: its probability, one limit for all that ask, and what a framework's loss holds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import rlperf
from rlperf.api import ask
from rlperf.cli.main import app
from rlperf.cost.batching import Microbatches
from rlperf.cost.collectives import host_copy_s
from rlperf.cost.memory_risk import out_of_memory_risk, spread_at
from rlperf.cost.parameters import parameters
from rlperf.cost.reject import Reject
from rlperf.cost.trainer.memory import MemoryParts, trainer_memory
from rlperf.cost.trainer_device import UpdateOptions
from rlperf.layout import Layout
from rlperf.plan.search.columns import Columns
from rlperf.plan.search.splits import splits
from rlperf.plan.search.trainer_columns import trainer_columns_of, trainer_grid
from rlperf.sim.rl_step.overheads import routing_skew, trainer_in_framework
from rlperf.sim.rl_step.trainer_bytes import TrainerBytes, trainer_bytes, transition_seconds
from rlperf.specs.hardware import load_hardware
from rlperf.specs.job import Job
from rlperf.specs.pool import PoolSettings, Settings
from rlperf.specs.profiles import load_architecture
from rlperf.specs.rl_calibration import load_framework_calibration
from rlperf.specs.trainer_calibration import load_trainer

BYTES = np.array([40.0, 70.0, 79.0, 80.0, 81.0, 100.0])


def test_the_risk_is_the_chance_that_a_lognormal_peak_exceeds_the_device() -> None:
    random = np.random.default_rng(1)
    drawn = np.exp(random.normal(0.0, np.log(1.07) / 1.6448536, 200_000))
    risk = out_of_memory_risk(BYTES, 80.0, 1 / 1.07, 1.07)
    assert np.all(np.diff(risk) > 0)
    for predicted, expected in zip(BYTES, risk, strict=True):
        assert np.mean(predicted * drawn > 80.0) == pytest.approx(expected, abs=0.004)


@pytest.mark.parametrize("risk", [0.001, 0.005, 0.05, 0.5, 0.7])
def test_the_largest_peak_at_a_risk_has_that_risk(risk: float) -> None:
    largest = 80.0 / spread_at(risk, 0.87, 1.07)
    assert float(out_of_memory_risk(largest, 80.0, 0.87, 1.07)) == pytest.approx(risk)


# -- one limit ---------------------------------------------------------------------------------------------------------

JOBS: dict[str, dict[str, Any]] = {
    "dense": {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2},
    "experts": {"architecture": "Qwen3-30B-A3B", "cluster": "dgx_h100", "nodes": 4},
    "apart": {"architecture": "Qwen3-8B", "cluster": "dgx_a100", "nodes": 2, "modes": "one_step_off"},
}


def job(name: str, **changes: object) -> Job:
    """A small job that no framework's rule narrows."""
    task = {"name": "math", "workload": "math", "prompts_per_step": 64, "group_size": 8,
            "mini_batch": 64, "max_prompt_tokens": 1024, "max_response_tokens": 8192}  # fmt: skip
    return Job.model_validate({"name": name, "framework": "verl", "tasks": [task], **JOBS[name], **changes})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "dense" else pytest.mark.slow) for name in JOBS]
)
def test_a_plan_keeps_the_risk_of_its_job(name: str) -> None:
    few = {"pools": [{"role": "trainer", "layout": {"context_parallel": 1, "ulysses": 1, "pipeline_parallel": 1}}]}
    tight = rlperf.plan_job(job(name, limits={"out_of_memory_risk": 1e-6, "staleness": 1}, **few))
    usual = rlperf.plan_job(job(name, limits={"staleness": 1}, **few))
    for plan, risk in ((usual, 0.01), (tight, 1e-6)):
        uses = plan.phases[0].predicted.memory_bytes
        assert sum(use.risk for use in uses.values()) <= risk
        assert all(use.total <= use.allowed < use.limit for use in uses.values())
    # off the beaten path nothing is preferred but time, and more memory allowed takes none
    bold = {"minimize": "step_time", "bold": True}
    freed = rlperf.plan_job(job(name, limits={"staleness": 1}, objective=bold, **few))
    assert tight.objective >= freed.objective * (1 - 1e-9)


def test_screen_and_prediction_hold_a_trainer_against_the_same_risk() -> None:
    question = ask(job("dense", limits={"out_of_memory_risk": 0.2}))
    context, task = question.context, question.context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    grid = trainer_grid(context, task.architecture, demand.batch.longest_tokens, [(16, 0)], False)
    columns = trainer_columns_of(context, task.architecture, demand, grid, lenient=True)[16, 0]
    intervals = [(each.calibration.memory_low, each.calibration.memory_high) for each in context.trainers]
    low, high = np.array(intervals)[columns.backend].T
    risk = out_of_memory_risk(columns.peak_bytes, context.hardware.device.usable_memory, low, high)
    refused = (columns.flags & int(Reject.MEMORY)) != 0
    np.testing.assert_array_equal(refused, risk > 0.1)  # training has half of the job's risk
    assert 0 < refused.sum() < refused.size
    use = rlperf.plan_job(context.job).phases[0].predicted.memory_bytes["trainer"]
    assert float(
        out_of_memory_risk(use.allowed, use.limit, use.low / use.total, use.high / use.total)
    ) == pytest.approx(0.1)


@pytest.mark.parametrize(("engine", "fits"), [("vllm", True), ("sglang", False)])
def test_a_share_of_weights_and_cache_may_leave_too_little_for_the_rest(engine: str, fits: bool) -> None:
    """SGLang at 0.94 leaves 5 GB for 7 GB of workspace and graphs, on devices of its own, too."""
    rollout = {"role": "rollout", "layout": {"tensor_parallel": 2}, "settings": {"memory_fraction": 0.94}}
    apart = {"modes": "one_step_off", "limits": {"staleness": 1}, "pools": [{**rollout, "devices": 8}]}
    stated = job("dense", engine=engine, **apart)
    found = rlperf.predict_job(stated)
    use = found.memory_bytes["rollout"]
    assert sum(use.parts.values()) == pytest.approx(use.total)
    assert (found.fits, use.total <= use.limit) == (fits, fits)
    if not fits:
        with pytest.raises(rlperf.InfeasibleError, match=r"memory_fraction 0\.94 .* is .* too large"):
            rlperf.plan_job(stated)


def test_a_pinned_layout_above_the_risk_is_predicted_and_said_not_to_fit() -> None:
    trainer = {"role": "trainer", "layout": {"data_parallel": 16, "tensor_parallel": 1, "zero_stage": 3,
                                              "activation_recompute": "none"},
               "settings": {"backend": "fsdp2", "token_budget": 32768}}  # fmt: skip
    found = rlperf.predict_job(job("dense", pools=[trainer]))
    use = found.memory_bytes["trainer"]
    assert use.risk > 0.9
    assert not found.fits
    assert any("over what the risk allows" in line for line in found.advice)


def test_the_risk_is_said_in_text_and_json() -> None:
    found = CliRunner().invoke(app, ["predict", "--json"])
    said = json.loads(found.stdout)["predicted"]["memory_bytes"]
    assert all(0.0 <= use["risk"] <= 1.0 and use["allowed"] < use["limit"] for use in said.values())
    assert "risk to run out" in CliRunner().invoke(app, ["predict"], env={"COLUMNS": "160"}).stdout


# -- what a stack holds ------------------------------------------------------------------------------------------------


def held(framework: str, backend: str, **options: Any) -> MemoryParts:
    """Memory of an 8B's trainer in a framework, 16k tokens a microbatch."""
    trainer = trainer_in_framework(load_trainer(backend), load_framework_calibration(framework, backend))
    layout = Layout.of(data_parallel=8, zero_stage=3, activation_recompute=2)
    batch = Microbatches.of(16384.0, 16384.0 * 2048, 2048.0, 4.0)
    forward = options.pop("forward_only", False)
    return trainer_memory(
        load_architecture("Qwen3-8B"), load_hardware("h100_sxm"), trainer, layout, batch, UpdateOptions(**options),
        forward_only=forward,
    )  # fmt: skip


def test_logits_of_a_framework_are_counted_from_its_own_loss() -> None:
    logits = 16384 * 151936
    assert float(held("verl_fsdp", "fsdp2").logits) == 4 * logits  # the backend's eager loss holds 17.4
    assert float(held("verl_fsdp", "fsdp2", forward_only=True).logits) == 4 * logits
    fused = float(held("verl_fsdp", "fsdp2", chunked_loss=True).logits)
    assert fused <= 4 * 512 * 151936  # fused kernels never hold them whole
    # AReaL's chunks bound the fp32 part alone
    assert float(held("areal", "fsdp2", chunked_loss=True).logits) == pytest.approx(4 * logits + 4 * 512 * 151936)


def test_logits_of_trl_are_its_rows_of_16_bits_but_where_accelerate_widens_them() -> None:
    """17.4 bytes a logit of any loss left no colocated plan of an 8B with 16k tokens on eight H100."""
    logits = 16384 * 151936
    assert [float(held("trl", backend).logits) for backend in ("fsdp2", "deepspeed")] == [6 * logits] * 2
    assert float(held("trl", "fsdp2", forward_only=True).logits) == 4 * logits
    plain = load_trainer("ddp").workspace.logit_bytes
    assert float(held("trl", "ddp").logits) == plain * logits > 16 * logits


def test_gradients_of_trl_wait_whole_in_the_16_bits_that_it_reduces() -> None:
    """Its Trainer reduces FSDP2's gradients with an update's last microbatch; DeepSpeed's with every one."""
    one = Layout.of(data_parallel=8, zero_stage=3, microbatch=1)
    beside = {}
    for backend in ("fsdp2", "deepspeed"):
        context = ask(job("dense", framework="trl", modes="colocated", trainer_backends=[backend])).context
        (stack,), task = context.trainers, context.tasks[0]
        demand = task.source.demand(task.batches[0], None, 0)
        where = context.site, stack, task.architecture, demand, one, Settings(), 9216, 0
        plain = stack.framework.training.model_copy(update={"whole_gradients": False})
        sharded = replace(stack, framework=stack.framework.model_copy(update={"training": plain}))
        parts = trainer_bytes(*where).parts, trainer_bytes(where[0], sharded, *where[2:]).parts
        beside[backend] = float(parts[0].communication - parts[1].communication)
    # of fp32 shards, which exist after the last backward alone
    assert beside["fsdp2"] == pytest.approx((2.0 - 4.0 / 8.0) * parameters(task.architecture), rel=0.01)
    assert beside["deepspeed"] == 0.0


def bytes_of(
    name: str, exponent: float | None = None, ranks: int = 32, algorithm: str = "grpo", **settings: Any
) -> TrainerBytes:
    """Memory of a trainer of 4 nodes (32 ranks) with experts over eight devices."""
    context = ask(job(name).model_copy(update={"algorithm": algorithm})).context
    stack = next(each for each in context.trainers if each.backend == "megatron")
    if exponent is not None:
        training = stack.framework.training.model_copy(update={"skew_exponent": exponent})
        stack = replace(stack, framework=stack.framework.model_copy(update={"training": training}))
    task = context.tasks[0]
    layout = Layout.of(data_parallel=ranks, expert_parallel=8, zero_stage=1)
    demand = task.source.demand(task.batches[0], None, 0)
    filled = PoolSettings(**settings).filled() if settings else Settings()
    return trainer_bytes(context.site, stack, task.architecture, demand, layout, filled, 9216, 0)


def test_the_busiest_experts_hold_what_time_charges_them_for() -> None:
    even, uneven = bytes_of("experts", 0.0), bytes_of("experts", 0.2)
    framework = load_framework_calibration("verl_megatron")
    training = framework.training.model_copy(update={"skew_exponent": 0.2})
    skew = float(routing_skew(framework.model_copy(update={"training": training}), Layout.of(expert_parallel=8)))
    arch, hw = load_architecture("Qwen3-30B-A3B"), load_hardware("h100_sxm")
    assert skew == pytest.approx(8**0.2)
    assert float(uneven.peak) > float(even.peak)
    batch = Microbatches.of(9216.0, 9216.0**2, 9216.0, 4.0)
    layout = Layout.of(data_parallel=32, expert_parallel=8, zero_stage=1)
    alone = [
        float(trainer_memory(arch, hw, load_trainer("megatron"), layout, batch, UpdateOptions(skew=each)).activations)
        for each in (1.0, skew)
    ]
    assert float(uneven.parts.activations - even.parts.activations) == pytest.approx(alone[1] - alone[0], rel=1e-6)


def test_a_scoring_pass_over_larger_microbatches_counts() -> None:
    small = bytes_of("experts", ranks=8)
    equal = bytes_of("experts", ranks=8, scoring_token_budget=9216)
    large = bytes_of("experts", ranks=8, scoring_token_budget=400_000)
    assert float(equal.peak) == float(small.peak)
    assert float(large.peak) > float(small.peak)
    assert float(large.parts.total) == float(small.parts.total)  # training itself is what it was
    few = [float(bytes_of("experts", scoring_token_budget=n).peak) for n in (9216, 400_000)]
    assert few[0] == few[1]  # the 16 sequences of each of 32 ranks are no 400,000 tokens, and take less than training


def test_a_critic_on_the_same_devices_is_held_while_the_policy_scores() -> None:
    """The peak of scoring had its optimizer states, and its weights not."""
    policy = bytes_of("experts", ranks=8, scoring_token_budget=400_000)
    both = bytes_of("experts", ranks=8, algorithm="ppo", scoring_token_budget=400_000)
    layout, batch = (
        Layout.of(data_parallel=8, expert_parallel=8, zero_stage=1),
        Microbatches.of(9216.0, 9216.0**2, 9216.0, 4.0),
    )
    critic = trainer_memory(
        load_architecture("Qwen3-30B-A3B").critic, load_hardware("h100_sxm"), load_trainer("megatron"), layout, batch,
        UpdateOptions(),
    )  # fmt: skip
    states = float(critic.weights + critic.optimizer)
    assert float(both.peak - policy.peak) == pytest.approx(states, rel=1e-6) and critic.weights > 0


def test_host_memory_holds_the_reference_as_it_is_loaded_and_under_lora_not_at_all() -> None:
    dense = load_architecture("Qwen3-8B")
    context = ask(job("dense")).context
    stack = next(each for each in context.trainers if each.backend == "fsdp2")
    task = context.tasks[0]
    demand, layout = task.source.demand(task.batches[0], None, 0), Layout.of(data_parallel=16, zero_stage=3)

    def host(**settings: Any) -> float:
        filled = PoolSettings(**settings).filled()
        return float(trainer_bytes(context.site, stack, dense, demand, layout, filled, 9216, 0).host)

    assert host() == pytest.approx(4.0 * parameters(dense) / 16)  # fp32 shards, as the policy's own
    assert host(lora_rank=16) == 0.0


def test_nothing_leaves_a_memory_that_device_and_host_share() -> None:
    """A plan for DGX Sparks parked the trainer on the host, and let the engine have that memory a second time."""
    context = ask(job("dense")).context
    stack = next(each for each in context.trainers if each.backend == "fsdp2")
    task, layout = context.tasks[0], Layout.of(data_parallel=16, zero_stage=3, offload=1)
    sheet = context.site.hardware.device.model_copy(update={"unified_memory": True})
    shared = replace(context.site, hardware=replace(context.site.hardware, device=sheet))
    where = stack, task.architecture, task.source.demand(task.batches[0], None, 0), layout, Settings(), 9216
    for parked in (0, 1):
        apart, one = trainer_bytes(context.site, *where, parked), trainer_bytes(shared, *where, parked)
        assert one.host == 0.0 < apart.host
        assert one.idle == pytest.approx(float(apart.idle + apart.host))
        assert one.peak - apart.peak == pytest.approx(float(apart.host - apart.parked))  # those are back by then


@pytest.mark.parametrize(
    ("framework", "backend", "zero_stage", "copied", "kept", "resident"),
    [("verl", "megatron", 1, False, False, False), ("nemo_rl", "megatron", 1, False, False, False),
     ("areal", "megatron", 1, True, False, True), ("openrlhf", "deepspeed", 3, True, True, True),
     ("openrlhf", "deepspeed", 2, False, True, True), ("rlinf", "fsdp2", 3, True, False, False)],
)  # fmt: skip
def test_what_leaves_the_device_with_parked_states_is_what_a_framework_takes(
    framework: str, backend: str, zero_stage: int, copied: bool, kept: bool, resident: bool
) -> None:
    """Gradients are freed unless copied; weights go, but OpenRLHF's; a reference on the devices is as its weights."""
    context = ask(job("dense", framework=framework, modes="colocated", trainer_backends=[backend])).context
    (stack,), task = context.trainers, context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    layout = Layout.of(data_parallel=16, zero_stage=zero_stage, microbatch=1)
    where = context.site, stack, task.architecture, demand, layout, Settings(), 9216
    here, parked = trainer_bytes(*where, 0), trainer_bytes(*where, 1)
    parts, reference = parked.parts, float(parked.reference)
    assert parts.gradients > 0 and (reference > 0) == resident
    weights = parts.weights + reference
    waits = parts.optimizer + copied * parts.gradients + (not kept) * weights
    assert parked.parked == pytest.approx(waits)
    assert parked.host - here.host == pytest.approx(waits)
    left = parts.states + reference - kept * weights
    assert here.idle - parked.idle == pytest.approx(left)  # gradients leave the device either way
    assert transition_seconds(context.site, parked) == pytest.approx(2.0 * host_copy_s(context.site.hardware, waits))


@pytest.mark.parametrize(("framework", "backend"), [("openrlhf", "deepspeed"), ("trl", "deepspeed"), ("trl", "ddp")])
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_reference_is_whole_on_every_device_below_stage_3(framework: str, backend: str, zero_stage: int) -> None:
    """It was taken to wait in host memory everywhere: a 7B of OpenRLHF on eight H100 was planned 2 GB above them."""
    with_it, without = (
        ask(
            job("dense", framework=framework, modes="colocated", trainer_backends=[backend], reference=reference)
        ).context
        for reference in (True, False)
    )
    zero_stage = zero_stage if backend == "deepspeed" else 0
    layout, task = Layout.of(data_parallel=16, zero_stage=zero_stage, microbatch=1), with_it.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    one, none = (
        trainer_bytes(each.site, each.trainers[0], task.architecture, demand, layout, Settings(), 9216, 0)
        for each in (with_it, without)
    )
    held = 2.0 * parameters(task.architecture) / (16 if zero_stage == 3 else 1)
    assert float(one.reference) == pytest.approx(held) and float(none.reference) == 0.0
    assert float(one.peak - none.peak) == pytest.approx(held) == pytest.approx(float(one.idle - none.idle))
    assert float(one.host) == float(none.host)


def test_batches_that_are_open_have_bytes_of_their_own() -> None:
    """A pass over 32 prompts holds less than one over 512, whose updates are as large: the first was told for both."""
    task = {"name": "t", "workload": "math", "prompts_per_step": [32, 512], "group_size": 8, "mini_batch": 32,
            "max_prompt_tokens": 1024, "max_response_tokens": 8192}  # fmt: skip
    job = {
        "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "framework": "verl", "modes": ["colocated"],
        "objective": {"minimize": "token_time"}, "tasks": [task],
        "pools": [{"role": "trainer", "settings": {"scoring_token_budget": 400_000}}],
    }  # fmt: skip
    question = ask(job, to_plan=True)
    (asked,), (split, *_) = question.context.tasks, splits(question.context)
    demands = [asked.source.demand(batch, None, 0) for batch in asked.batches]
    columns = Columns(question.context, asked, question.facts)
    for demand in demands:
        alone = Columns(question.context, asked, question.facts).trainer(demand, split)
        np.testing.assert_array_equal(columns.trainer(demand, split).peak_bytes, alone.peak_bytes)
