"""Speculative decoding: what it costs, what it yields, when it pays, and who may be asked for it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlperf
from rlperf.api import ask
from rlperf.calibrate.rl_step.predict import predict_step
from rlperf.calibrate.rl_step.rows import read_row
from rlperf.calibrate.speculation.acceptance import curves_of, fit_speculation
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.validate import validate_file
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.operators import recording_s
from rlperf.cost.parameters import parameters
from rlperf.cost.replica import Replica
from rlperf.cost.speculation import DRAFT_KERNELS, VERIFY_KERNELS, draft_head, draft_memory, speculating
from rlperf.errors import ExportError, InfeasibleError, SpecError
from rlperf.frameworks.adapter import Source, framework_facts
from rlperf.frameworks.drafting import drafting_of
from rlperf.frameworks.expressible import as_framework_runs, precision_words, unsayable
from rlperf.frameworks.fields import Target
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.readback import read_back
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.run import BatchFacts, RolloutRun, Run, TrainerRun
from rlperf.layout import Layout
from rlperf.plan.answer.plan import Plan
from rlperf.sim.rl_step.engine import tabulate
from rlperf.sim.rollout.closed_form import take_census
from rlperf.sim.rollout.options import EngineOptions, Speculation
from rlperf.sim.rollout.replica import simulate_replica
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.job import Job
from rlperf.specs.modes import Mode
from rlperf.specs.profiles import load_architecture
from rlperf.specs.speculation import DraftSetting, tokens_per_step
from rlperf.specs.speculation_calibration import Yield, load_speculation

ROOMY = EngineLimits(kv_tokens=np.inf, max_running=64)


@cache
def plain(model: str = "Qwen3-8B", device: str = "h100_sxm") -> EngineStepCost:
    return engine_step_cost(
        Replica.of(load_architecture(model), load_hardware(device), load_engine_calibration("vllm"), Layout.of())
    )


@cache
def drafted(
    word: str, stated: float | None = None, model: str = "Qwen3-8B", device: str = "h100_sxm"
) -> EngineStepCost:
    wanted = DraftSetting.parse(word)
    assert wanted is not None
    replica = Replica.of(load_architecture(model), load_hardware(device), load_engine_calibration("vllm"), Layout.of())
    return speculating(plain(model, device), replica, wanted, load_speculation().tokens(wanted, stated))


def requests(seed: int, n: int = 96) -> Trajectories:
    rng = np.random.default_rng(seed)
    return Trajectories.of(rng.integers(50, 400, n).tolist(), np.minimum(rng.lognormal(6.5, 0.8, n), 6000).astype(int))


def gain(word: str, running: float, context: float, **changes: Any) -> float:
    """Throughput over that without speculation."""
    device = changes.get("device", "h100_sxm")
    without = plain(changes.get("model", "Qwen3-8B"), device).decode_s(running, running * context)
    return float(without / drafted(word, **changes).decode_s(running, running * context))


# -- cost ---------------------------------------------------------------------------------------------------------


def test_no_drafts_cost_what_nothing_costs() -> None:
    table = drafted("eagle3:0-5").drafted
    assert table is not None and DraftSetting.parse("eagle3:0") is None
    none = replace(plain(), drafted=replace(table, drafts=np.zeros_like(table.drafts)))
    b = np.arange(1.0, 300.0)
    assert none.decode_s(b, b * 3000.0) == pytest.approx(plain().decode_s(b, b * 3000.0), rel=1e-12)
    mixed = (b, b * 900.0, 700.0, 1e5, 3.0)
    assert none.engine_step_s(*mixed) == pytest.approx(plain().engine_step_s(*mixed), rel=1e-12)
    alone = (0.0, 0.0, 700.0, 1e5, 3.0)
    assert none.engine_step_s(*alone) == pytest.approx(plain().engine_step_s(*alone), rel=1e-12)


def test_it_wins_where_few_requests_run_and_less_or_nothing_where_many_do() -> None:
    thin, full = gain("eagle3:3", 1, 2000), gain("eagle3:3", 256, 500)
    assert thin > 1.5 and full < thin
    assert gain("eagle3:7", 256, 500) < gain("eagle3:3", 256, 500)  # more drafts lose sooner
    poor = {"model": "MiMo-7B-RL", "device": "h20_sxm"}
    assert gain("mtp:3", 128, 1000, **poor) < 1.0 < gain("mtp:3", 1, 1000, **poor)


def test_seven_drafts_are_slower_than_none_in_a_full_batch_where_three_still_pay() -> None:
    """As published of RL rollouts: k = 3 1.5 to 2.0 times faster, k = 7 slower than none."""
    for running in (192, 256, 512):
        assert gain("eagle3:7", running, 500) < 0.95 < 1.0 < gain("eagle3:3", running, 500)
    assert 1.5 < gain("eagle3:3", 16, 2000) < 2.0


def with_engine(word: str, **changes: Any) -> tuple[EngineStepCost, EngineStepCost]:
    """Cost of Qwen3-8B on one H100 without and with drafts, all of them accepted, by a vLLM that is set otherwise."""
    wanted, engine = DraftSetting.parse(word), load_engine_calibration("vllm").model_copy(update=changes)
    assert wanted is not None
    replica = Replica.of(load_architecture("Qwen3-8B"), load_hardware("h100_sxm"), engine, Layout.of())
    cost, certain = engine_step_cost(replica), Yield((1.0,) * (wanted.most + 1), 0.0)
    return cost, speculating(cost, replica, wanted, certain)


def test_a_verification_beyond_the_largest_graph_is_issued_layer_by_layer() -> None:
    """vLLM's graphs hold 512 tokens: 64 requests with 7 drafts, 65 no more; with larger ones nothing is issued."""
    engine = load_engine_calibration("vllm")
    held = engine.graph_buckets
    slow = engine.overhead.model_copy(update={"uncaptured": 1e-3})
    _, small = with_engine("ngram:7", overhead=slow)
    _, large = with_engine("ngram:7", overhead=slow, graph_buckets=(*held, *range(576, 2048, 64)))
    inside, outside = np.array([8.0, 64.0]), np.array([65.0, 96.0])
    assert held[-1] == 512
    assert small.decode_s(inside, 0.0) == pytest.approx(large.decode_s(inside, 0.0), rel=1e-9)
    issued = 1e-3 * load_architecture("Qwen3-8B").layers
    assert (small.decode_s(outside, 0.0) > issued).all() and (large.decode_s(outside, 0.0) < issued).all()


def test_drafts_called_one_by_one_take_what_a_call_takes_the_host() -> None:
    """Two layers' worth of calls a draft; beyond what the device does meanwhile every call counts."""
    slow, slower = (with_engine("eagle3:3", eager_call=call)[1].decode_s(1.0, 0.0) for call in (50e-6, 80e-6))
    calls = 12 * (3 * DRAFT_KERNELS + VERIFY_KERNELS)
    assert float(slower - slow) == pytest.approx(calls * 30e-6, rel=1e-6)
    fast, faster = (with_engine("eagle3:3", eager_call=call)[1].decode_s(512.0, 0.0) for call in (1e-6, 2e-6))
    assert float(faster - fast) == pytest.approx(12 * VERIFY_KERNELS * 1e-6, rel=1e-6)  # drafts hide behind the device


def test_a_range_is_as_fast_as_the_best_of_its_numbers_and_never_slower_than_none() -> None:
    b = np.arange(1.0, 600.0)
    at = {word: drafted(word).decode_s(b, b * 4096.0) for word in ("eagle3:1", "eagle3:2", "eagle3:3", "eagle3:0-3")}
    best = np.minimum.reduce([plain().decode_s(b, b * 4096.0), at["eagle3:1"], at["eagle3:2"], at["eagle3:3"]])
    assert at["eagle3:0-3"] == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("word", ["eagle3:1", "eagle3:4", "ngram:3"])
def test_more_acceptance_is_never_slower(word: str) -> None:
    found = [drafted(word, stated).decode_s(32.0, 1e5) for stated in (0.2, 0.5, 0.8, 1.0)]
    # the engine's work per token stays, so a token never costs more than before
    assert all(later <= earlier for earlier, later in pairwise(found))


def test_a_factor_on_an_engine_step_is_on_its_drafts_too() -> None:
    for cost in (plain(), drafted("eagle3:3"), replace(plain(), mixed_linear_s=None)):
        for step in ((8.0, 8e3, 0.0, 0.0, 0.0), (8.0, 8e3, 512.0, 2e5, 2.0)):
            assert float(cost.scaled(1.7).engine_step_s(*step)) == pytest.approx(1.7 * float(cost.engine_step_s(*step)))


def test_a_cluster_with_slower_rollouts_has_slower_drafts() -> None:
    context = ask(job("eagle3:3")).context
    framework = context.trainers[0].framework
    slow = framework.model_copy(update={"factors": framework.factors.scaled({"rollout": 1.5})})
    there = replace(context.site, trainers=(replace(context.trainers[0], framework=slow),))
    settings = context.job.pool("rollout").settings.filled()
    one, other = (
        tabulate(site, context.tasks[0].architecture, settings, Layout.of())[0] for site in (context.site, there)
    )
    assert one.drafted is not None
    assert float(other.decode_s(4.0, 4e3)) == pytest.approx(1.5 * float(one.decode_s(4.0, 4e3)))


def test_the_pace_of_an_engine_step_is_that_of_one_token() -> None:
    cost = drafted("eagle3:3")
    fixed, each, per_key = cost.pace_s
    assert fixed + 64 * each + 1e5 * per_key == pytest.approx(float(cost.decode_s(64.0, 1e5)))


def test_a_head_has_no_tower_and_no_tables_of_its_own() -> None:
    own = load_architecture("Qwen3.5-35B-A3B")
    tower = load_architecture("Qwen2.5-VL-7B").vision
    seeing = own.model_copy(update={"vision": tower, "audio_parameters": 10**9, "lookup_parameters": 10**9})
    for method in ("mtp", "eagle3"):
        first, second = (draft_head(arch, method) for arch in (own, seeing))
        assert first is not None and second is not None
        assert parameters(first.arch) == parameters(second.arch)


def test_a_head_attends_whatever_the_last_layer_does() -> None:
    """A prediction layer of a hybrid is its attention, of whichever kind the recurrent layers are."""
    hybrid = load_architecture("Kimi-Linear-48B-A3B").model_copy(update={"prediction_layers": 1})
    ends = hybrid.model_copy(update={"mixers": (*hybrid.layer_mixers[:-1], "kda")})
    for one in (hybrid, ends):
        head = draft_head(one, "mtp")
        assert head is not None and head.arch.mixers == ("latent",)


def test_an_n_gram_drafts_for_nothing_and_a_head_does_not() -> None:
    assert drafted("ngram:3", 0.6).decode_s(8.0, 1e4) < drafted("eagle3:3", 0.6).decode_s(8.0, 1e4)


# -- events and closed form ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["eagle3:3", "eagle3:0-5"])
@pytest.mark.parametrize("limits", [ROOMY, EngineLimits(kv_tokens=np.inf, max_running=256)])
def test_the_closed_form_equals_the_events(word: str, limits: EngineLimits) -> None:
    served, cost = requests(3), drafted(word)
    events = simulate_replica(served, cost, limits).makespan_s
    assert float(take_census(served, limits).makespan_s(cost)) == pytest.approx(events, rel=1e-9)


def test_events_with_a_tight_cache_run_with_drafts() -> None:
    served, cost = requests(5), drafted("eagle3:3")
    tight = EngineLimits(kv_tokens=20_000, max_running=64)
    slow, fast = (simulate_replica(served, each, tight).makespan_s for each in (plain(), cost))
    assert fast < slow


@pytest.mark.parametrize("drafts", [1, 3])
def test_seconds_per_token_equal_engine_steps_that_yield_several(drafts: int) -> None:
    """Engine_steps of m tokens one by one (`DecodeClock`) take what the cost per token says, within 3 %."""
    served, cost = requests(7), drafted(f"ngram:{drafts}", 0.6)
    table = cost.drafted
    assert table is not None
    # the reference knows no head rows and no kernels of verification: leave them out on both sides
    b = np.arange(len(table.drafts), dtype=np.float64)
    wider = plain().linear((drafts + 1) * plain().padded(b)) - plain().linear(plain().padded(b))
    keys = np.full_like(table.per_key_s, plain().decode_per_kv_token_s)
    bare = replace(table, added_s=np.tile(wider, (drafts + 1, 1)), per_key_s=keys)
    exact = simulate_replica(served, plain(), ROOMY, options=EngineOptions(speculation=Speculation(drafts, 0.6)))
    fluid = simulate_replica(served, replace(plain(), drafted=bare), ROOMY)
    assert fluid.makespan_s == pytest.approx(exact.makespan_s, rel=0.03)


# -- acceptance ---------------------------------------------------------------------------------------------------


@pytest.mark.data
def test_acceptance_is_what_the_command_fits(measured_data: Path) -> None:
    found, shipped = fit_speculation(read_table(measured_data / "measured" / "speculation.csv")), load_speculation()
    for one, other in zip(found.acceptance, shipped.acceptance, strict=True):
        assert (one.method, round(one.first, 4), round(one.falls, 4)) == (other.method, other.first, other.falls)
    assert found.frozen.value == pytest.approx(shipped.frozen.value, abs=1e-4)


@pytest.mark.slow
@pytest.mark.data
def test_curves_of_a_model_left_out_are_predicted(measured_data: Path) -> None:
    """Up to three drafts, which is what recipes use; deeper ones differ by model (DeepSeek-V4-Pro falls to nothing)."""
    table, errors = read_table(measured_data / "measured" / "speculation.csv"), []
    for curve in curves_of(table):
        fit = fit_speculation(table, without=curve.model).of(curve.method)
        assert fit is not None
        usual = curve.drafts <= 3
        told = [tokens_per_step(fit.first, fit.falls, int(k)) for k in curve.drafts[usual]]
        errors += np.abs(np.array(told) / curve.tokens[usual] - 1.0).tolist()
    assert len(errors) > 25 and np.median(errors) < 0.05 and np.mean(errors) < 0.07


def test_a_logged_acceptance_goes_before_the_pooled_one() -> None:
    known, eagle = load_speculation(), DraftSetting("eagle3", 3, 3)
    pooled, stated, trained = known.tokens(eagle), known.tokens(eagle, 0.5), known.tokens(eagle, trained=True)
    assert stated.tokens[1] == pytest.approx(1.5) and stated.spread == 0.0 < pooled.spread
    assert pooled.tokens[3] == pytest.approx(known.frozen.value * trained.tokens[3])


def test_a_policy_that_moved_away_costs_deep_drafts_most() -> None:
    """A lower acceptance compounds with depth; a head that accepts everything in vain still yields one token."""
    known, eagle = load_speculation(), DraftSetting("eagle3", 8, 8)
    left = np.array(known.tokens(eagle).tokens) / np.array(known.tokens(eagle, trained=True).tokens)
    assert left[0] == 1.0 and (np.diff(left) < 0.0).all()
    assert left[known.frozen.drafts] == pytest.approx(known.frozen.value)
    useless = known.frozen.model_copy(update={"value": 0.01})
    assert useless.first(0.8, 0.96) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("model", "device", "word", "running", "length", "published"),
    [
        ("DeepSeek-R1", "h200_sxm", "mtp:1", 1, 1.82, 1.63),  # vllm pull 12755, the device presumed
        ("DeepSeek-V3", "h200_sxm", "mtp:1", 1, 1.90, 1.76),  # sglang pull 3582, the device presumed
        ("DeepSeek-R1", "gaudi3", "mtp:1", 4, 1.88, 1.60),  # HabanaAI/vllm-fork pull 1264
        ("DeepSeek-R1", "gaudi3", "mtp:1", 32, 1.88, 1.50),
    ],
)
def test_published_gains_of_serving_follow_from_the_accepted_length(
    model: str, device: str, word: str, running: int, length: float, published: float
) -> None:
    """Gains at the acceptance that was logged, so that cost alone is told; nothing of it is fitted."""
    architecture, hw, engine = load_architecture(model), load_hardware(device), load_engine_calibration("vllm")
    layout, wanted = Layout.of(tensor_parallel=8), DraftSetting.parse(word)
    assert wanted is not None
    without = engine_step_cost(Replica.of(architecture, hw, engine, layout, "fp8"))
    with_ = speculating(without, Replica.of(architecture, hw, engine, layout, "fp8"), wanted, Yield((1.0, length), 0.0))
    keys = running * 1500.0
    assert float(without.decode_s(running, keys) / with_.decode_s(running, keys)) == pytest.approx(published, rel=0.12)


# -- jobs and plans -----------------------------------------------------------------------------------------------


def job(speculation: Any, model: str = "Qwen3-8B", framework: str = "verl", **settings: Any) -> Job:
    task = {"name": "math", "workload": "math", "prompts_per_step": 32, "group_size": 8, "max_response_tokens": 4096}
    narrow = {"speculation": speculation, "max_running": [64], "memory_fraction": [0.8], **settings}
    pool = {"role": "rollout", "layout": {"tensor_parallel": [1, 2]}, "settings": narrow}
    asked = {"architecture": model, "cluster": "dgx_h100", "nodes": 1, "framework": framework, "tasks": [task],
             "modes": ["colocated"], "trainer_backends": ["fsdp2"]}  # fmt: skip
    return Job.model_validate({**asked, "pools": [pool]})


@cache
def planned(*words: str) -> Plan:
    return rlperf.plan_job(job(list(words), framework="nemo_rl"))


def step_s(*words: str) -> float:
    return planned(*words).phases[0].predicted.rl_step_s


def test_a_plan_with_drafts_open_is_the_best_of_the_pinned_ones() -> None:
    words = ("none", "eagle3:1", "eagle3:3")
    found = step_s(*words)
    assert found == pytest.approx(min(step_s(word) for word in words), rel=1e-9)
    assert found < step_s("none")
    rollout = next(pool for pool in planned(*words).phases[0].pools if pool.role == "rollout")
    assert rollout.settings.speculation in words and rollout.settings.speculation != "none"


def test_a_plan_says_what_its_drafts_gain() -> None:
    (said,) = planned("none", "eagle3:1", "eagle3:3").phases[0].predicted.gains
    assert said.startswith("drafts eagle3:") and "tokens per engine_step" in said
    ratio = float(said.rpartition("(")[2].split()[0])
    assert 1.1 < ratio < 2.5


def test_a_plan_is_no_slower_with_more_acceptance() -> None:
    few, many = (rlperf.plan_job(job("ngram:3", draft_acceptance=share)) for share in (0.3, 0.9))
    assert many.phases[0].predicted.rl_step_s < few.phases[0].predicted.rl_step_s


def test_no_drafts_in_a_job_is_no_speculation() -> None:
    assert step_s("eagle3:0") == step_s("none")


def test_a_head_takes_memory_of_the_cache() -> None:
    architecture, layout = load_architecture("Qwen3-8B"), Layout.of()
    replica = Replica.of(architecture, load_hardware("h100_sxm"), load_engine_calibration("vllm"), layout)
    wanted = DraftSetting.parse("eagle3:3")
    assert wanted is not None
    found = draft_memory(replica, wanted, np.array(64.0))
    # a layer of 193 M, a projection of 3 h^2 and a head of 32,000 tokens at two bytes; one layer's cache beside 36
    assert 0.6e9 < float(found.weight_bytes) < 1.1e9
    assert float(found.cache_share) == pytest.approx(1 / 36, rel=0.01)
    assert float(found.held_bytes) == 64 * 3 * architecture.vocab * 8


def test_recurrent_layers_write_a_state_for_every_draft() -> None:
    """30 layers of Qwen3.5-35B-A3B have 32 states of 128 x 128 in fp32: 63 MB a request and draft, held and written."""
    state = 30 * 32 * 128 * 128 * 4.0
    hybrid = Replica.of(
        load_architecture("Qwen3.5-35B-A3B"), load_hardware("h100_sxm"), load_engine_calibration("vllm"), Layout.of()
    )
    wanted = DraftSetting.parse("mtp:3")
    assert wanted is not None
    held = float(draft_memory(hybrid, wanted, np.array(64.0)).held_bytes)
    assert held == pytest.approx(64 * 3 * (state + hybrid.arch.vocab * 8.0), rel=1e-6)
    # written at 0.7 to 0.95 of the bandwidth; the convolution's inputs and outputs are a fiftieth beside it
    each = float(np.max(recording_s(hybrid))) * 3.35e12 / state
    assert 1.0 < each < 1.5
    assert float(np.max(recording_s(replace(hybrid, arch=load_architecture("Qwen3-8B"))))) == 0.0
    added = speculating(plain("Qwen3.5-35B-A3B"), hybrid, wanted, load_speculation().tokens(wanted, None)).drafted
    assert added is not None and added.added_s[3, 512] - added.added_s[3, 256] > 3 * 256 * state / 3.35e12


@pytest.mark.data
def test_verifications_of_recurrent_layers_are_told(measured_data: Path) -> None:
    """Four and eight tokens a request (Kimi Delta Attention): 2.5 and 4.5 decodes by what is read and written."""
    found = validate_file(measured_data / "kernels" / "kda.csv", "kernels").predictions
    for device, low in (("h100_sxm", 0.9), ("b200_sxm", 0.7), ("gb300", 0.7)):
        mine = [one for one in found if one.group.startswith(f"scan/{device}") and one.group.endswith("verify")]
        ratio = np.median([one.predicted / one.measured for one in mine])
        assert len(mine) >= 36 and low < ratio < 1.1, device
        assert not any(one.series_in_fit for one in mine)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"speculation": "mtp:3"}, "Qwen3-8B has no multi-token prediction layer"),
        ({"speculation": "ngram:3"}, "no acceptance of ngram drafts is known"),
        ({"speculation": "medusa:3"}, "nobody drafts by 'medusa'"),
        ({"speculation": "eagle3"}, "states no drafted tokens"),
        ({"speculation": "eagle3:3", "draft_acceptance": 1.5}, "is not a share"),
        ({"speculation": "ngram:3", "draft_acceptance": 0.5, "draft_training": True}, "no head to train"),
    ],
)
def test_what_nobody_can_draft_is_refused_by_name(asked: dict[str, Any], says: str) -> None:
    with pytest.raises((SpecError, ValueError), match=says):
        rlperf.plan_job(job(**asked))


@pytest.mark.parametrize(
    ("framework", "engine", "model", "word"),
    [
        ("verl", "vllm", "Qwen3-8B", "eagle3:3"),
        ("verl", "vllm", "MiMo-7B-RL", "mtp:2"),
        ("verl", "sglang", "MiMo-7B-RL", "mtp:2"),
        ("verl", "sglang", "Qwen3-8B", "ngram:4"),
        ("nemo_rl", "vllm", "Qwen3-8B", "eagle3:3"),
        ("slime", "sglang", "MiMo-7B-RL", "mtp:3"),
        ("slime", "sglang", "Qwen3-8B", "none"),
    ],
)
def test_files_say_what_is_drafted_and_read_back_so(framework: str, engine: str, model: str, word: str) -> None:
    adapter = adapter_of(framework)
    stated = job(word, model)
    run = Run(
        architecture=model,
        trainer=TrainerRun(backend="megatron", devices=8, token_budget=8192),
        rollout=RolloutRun(backend=engine, devices=8, speculation=word, draft_training=word.startswith("mtp")),
        devices=8,
        batch=BatchFacts(prompts_per_step=32, group_size=8, max_prompt_tokens=1024, max_response_tokens=4096),
    ).completed()
    version = key_table(framework).versions[-1]
    emission = adapter.emit(adapter.adapt(run, version)[0], Target(key_table(framework), version, "megatron"))
    back = read_back(adapter.render(emission, "config", []), adapter, version)
    assert (back.rollout.speculation or "none") == stated.pools[0].settings.speculation[0]
    assert bool(back.rollout.draft_training) == word.startswith("mtp")


@pytest.mark.parametrize(
    ("flags", "running"),
    [
        ({}, 512),
        ({"sglang-speculative-algorithm": "EAGLE"}, 48),
        ({"sglang-speculative-algorithm": "EAGLE", "sglang-max-running-requests": 256}, 256),
    ],
)
def test_sglang_runs_fewer_requests_with_drafts_unless_told(flags: dict[str, Any], running: int | None) -> None:
    adapter, version = adapter_of("slime"), key_table("slime").versions[-1]
    keys = {"rollout-batch-size": 32, "rollout-max-response-len": 4096, "global-batch-size": 32, **flags}
    source = Source(keys=keys)
    read, _ = adapter.read(source, adapter.target(source, version))
    assert read.rollout.max_running == running


def test_a_switching_number_is_no_key_of_any_framework() -> None:
    with pytest.raises(ExportError, match="switches with the number of requests"):
        drafting_of(Run(rollout=RolloutRun(speculation="eagle3:0-3")), "verl")


@pytest.mark.parametrize("framework", ["verl", "nemo_rl", "slime", "miles", "skyrl"])
def test_a_switching_number_is_refused_before_a_plan_and_left_out_of_several(framework: str) -> None:
    """It was planned, and then no file could be written: the plan was lost."""
    facts = framework_facts(framework)
    asked = job("mtp:0-3").model_copy(update={"framework": framework})
    (problem,) = (one for one in unsayable(asked, facts) if "speculation" in one.message)
    assert "no key for rollout.speculation (mtp:0-3)" in problem.message
    several = Job.model_validate(
        {
            **asked.stated(),
            "pools": [{"role": "rollout", "settings": {"speculation": ["none", "mtp:2", "mtp:0-3"]}}],
        }
    )
    taken = as_framework_runs(several, facts)
    assert taken.pool("rollout").settings.speculation == ("none", "mtp:2")
    assert f"speculation mtp:0-3: not planned, as {framework} has no key for it" in precision_words(several, taken)


def _emitted(word: str, *, mode: Mode = "colocated", backend: str = "fsdp2") -> dict[str, Any]:
    """Keys of verl's file for engines of vLLM that draft."""
    version = key_table("verl").versions[-1]
    run = Run(
        architecture="MiMo-7B-RL", devices=16, mode=mode, staleness=1,
        trainer=TrainerRun(backend=backend, devices=8, token_budget=8192),
        rollout=RolloutRun(backend="vllm", devices=8, speculation=word),
        batch=BatchFacts(prompts_per_step=32, group_size=8, max_prompt_tokens=1024, max_response_tokens=4096),
    ).completed()  # fmt: skip
    emission = adapter_of("verl").emit(run, Target(key_table("verl"), version, backend))
    return {each.key.removeprefix("actor_rollout_ref.rollout."): each.value for each in emission.settings}


LAYER = {"model": "MiMo-7B-RL", "speculation": "mtp:1"}


def test_verl_loads_what_drafts_where_no_weight_sync_brings_it() -> None:
    """Its engines start from random weights: heads drafted noise, and apart engines lost them at the first sync."""
    head = _emitted("eagle3:3", mode="async")
    assert (head["load_format"], head["free_cache_engine"]) == ("auto", False)
    assert _emitted("mtp:2")["load_format"] == "auto", "FSDP's model has no such layer"
    assert "load_format" not in _emitted("mtp:2", backend="megatron").keys() | _emitted("ngram:2").keys()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"framework": "verl"}, "engines that sleep drop the weights of a draft head"),
        ({"framework": "verl", **LAYER, "draft_training": True}, "trains nothing"),
        ({"framework": "slime", "draft_training": True}, "enable-mtp-training trains the model's own layer"),
        ({"framework": "skyrl", **LAYER}, "no layer that drafts"),
    ],
)
def test_a_head_that_would_not_draft_is_no_plan(asked: dict[str, Any], says: str) -> None:
    """verl's engines keep none over their sleep, slime's trainer trains none, SkyRL's FSDP model has none."""
    mine = job(**{"speculation": "eagle3:3", **asked})
    trainers = () if asked["framework"] == "slime" else mine.trainer_backends
    with pytest.raises(InfeasibleError, match=says):
        rlperf.plan_job(mine.model_copy(update={"trainer_backends": trainers, "engine": ENGINES[mine.framework]}))


ENGINES = {"verl": "vllm", "slime": "sglang", "skyrl": "vllm"}


def test_skyrl_drafts_by_the_model_alone() -> None:
    """0.4 refuses every other method at launch; before, its weight sync loaded the policy into the head."""
    (problem,) = unsayable(job("eagle3:3", framework="skyrl"), framework_facts("skyrl"))
    assert "skyrl 0.4 has no key for rollout.speculation (eagle3:3)" in problem.message


@pytest.mark.parametrize("framework", ["areal", "openrlhf", "trl"])
def test_a_framework_without_a_key_refuses_it_by_name(framework: str) -> None:
    asked = job("eagle3:3").model_copy(update={"framework": framework})
    (problem,) = (one for one in unsayable(asked, framework_facts(framework)) if "speculation" in one.message)
    assert "no key for rollout.speculation (eagle3:3)" in problem.message
    assert not any("draft_acceptance" in one.message for one in unsayable(asked, framework_facts(framework)))


@pytest.mark.data
def test_the_rollout_of_an_rl_step_with_speculation_is_predicted(measured_data: Path) -> None:
    """miles logs 63.6 s; plain decoding would take half as long again."""
    cells = next(row.cells for row in read_table(measured_data / "measured" / "rl_step.csv") if row.text("speculation"))
    with_, without = (
        float(predict_step(read_row({**cells, "speculation": word})).evaluation.seconds.rollout_s.mean())
        for word in (cells["speculation"], "")
    )
    assert with_ == pytest.approx(float(cells["measured_rollout_s"]), rel=0.15) and without > 1.4 * with_
