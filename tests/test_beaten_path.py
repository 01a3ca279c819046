"""The beaten path: what lies off it, and what a candidate must gain to be planned all the same."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from rlperf.api import ask, plan_job, size_job
from rlperf.cost.reject import Reject
from rlperf.errors import InfeasibleError
from rlperf.layout import IntArray, Layout
from rlperf.plan.answer.plan import Phase
from rlperf.plan.question.words import layout_words
from rlperf.plan.search.beaten_path import (
    DOUBLING,
    SHARED_FRACTION,
    OffPath,
    doublings,
    experts_reach,
    price,
    rollout_departures,
    trainer_departures,
)
from rlperf.plan.search.candidates import Shape, trainer_layouts
from rlperf.plan.search.columns import Columns
from rlperf.plan.search.rollout_columns import rollout_columns
from rlperf.plan.search.screen import screen
from rlperf.plan.search.splits import splits
from rlperf.plan.size import _off_path
from rlperf.report import plan_text
from rlperf.report.plan_text import best_rows, kind_rows, print_plan
from rlperf.sim.rl_step.engine import short_cache
from rlperf.sim.rl_step.uncertainty import OWN_SHARE, Contenders
from rlperf.specs.calibration import Z95
from rlperf.specs.job import Job
from rlperf.specs.pool import LayoutChoice, PoolSpec
from rlperf.specs.profiles import load_architecture
from rlperf.specs.short_job import short_job
from rlperf.specs.trainer_calibration import load_trainer


def departures(
    architecture: str,
    layout: Layout,
    *,
    longest: int = 8192,
    microbatches: float = 64.0,
    fits: list[bool] | None = None,
) -> IntArray:
    """Of some layouts on devices that come eight to a scale-up domain."""
    flat = layout.flat()
    return trainer_departures(
        load_architecture(architecture), flat, np.zeros(flat.size, dtype=np.int64),
        np.ones(flat.size, dtype=np.bool_) if fits is None else np.array(fits),
        longest_tokens=longest, microbatches=np.full(flat.size, microbatches),
        reach=experts_reach(load_architecture(architecture), 8, 80e9), domain=8,
    )  # fmt: skip


def test_a_sequence_is_not_cut_smaller_than_anybody_published() -> None:
    ring = Layout.of(context_parallel=[1, 2, 4, 8], data_parallel=[8, 4, 2, 1])
    assert departures("Qwen3-8B", ring).tolist() == [0, 0, 1, 2]
    assert departures("Qwen3-8B", ring, longest=32768).tolist() == [0, 0, 0, 0]
    heads = Layout.of(ulysses=[1, 8], data_parallel=[8, 1])
    assert departures("Qwen3-8B", heads, longest=500).tolist() == [0, 3]


def test_matrices_are_not_cut_finer_than_anybody_published() -> None:
    """In a domain of 64 devices of GB200 a trainer of DeepSeek-V3 was planned at TP32."""
    layout = Layout.of(tensor_parallel=[1, 8, 16, 32], data_parallel=[64, 8, 4, 2])
    assert departures("Qwen2.5-32B", layout).tolist() == [0, 0, 1, 2]


def test_experts_are_spread_inside_a_node_and_left_whole() -> None:
    layout = Layout.of(expert_parallel=[1, 4, 8, 16, 4], expert_tensor_parallel=[1, 1, 1, 1, 2], data_parallel=16)
    assert departures("Qwen3-30B-A3B", layout).tolist() == [2, 0, 0, 1, 1]
    assert departures("Qwen3-8B", Layout.of(data_parallel=[8])).tolist() == [0]


def test_experts_that_fill_more_than_a_node_are_spread_over_as_many_devices() -> None:
    """Qwen3-235B-A22B and DeepSeek-V3 over 16 H100 are published recipes; over 64 the first is not."""
    layout = Layout.of(expert_parallel=[8, 16, 32, 64], data_parallel=64)
    assert departures("Qwen3-30B-A3B", layout).tolist() == [0, 1, 2, 3]
    assert departures("Qwen3-235B-A22B", layout).tolist() == [0, 0, 1, 2]
    assert departures("DeepSeek-V3", layout).tolist() == [0, 0, 0, 1]


def test_a_pipeline_is_as_long_as_memory_needs_and_has_work() -> None:
    layout = Layout.of(pipeline_parallel=[1, 2, 4, 8], data_parallel=[8, 4, 2, 1])
    assert departures("Qwen3-8B", layout).tolist() == [0, 1, 2, 3]
    assert departures("Qwen3-32B", layout, fits=[False, False, True, True]).tolist() == [0, 0, 0, 1]
    assert departures("Qwen3-32B", layout, fits=[False, False, True, True], microbatches=2.0).tolist() == [0, 0, 1, 2]


def test_stages_that_experts_over_several_nodes_or_an_optimizer_on_the_host_would_spare_are_no_departure() -> None:
    hosted = Layout.of(pipeline_parallel=[2, 4, 8], expert_parallel=8, offload=[1, 0, 0], data_parallel=64)
    assert departures("DeepSeek-V3", hosted).tolist() == [0, 0, 1]
    all_hosted = Layout.of(pipeline_parallel=[2, 8, 16], expert_parallel=[32, 8, 8], offload=1, data_parallel=64)
    assert departures("DeepSeek-V3", all_hosted).tolist() == [0, 0, 1]
    layout = Layout.of(pipeline_parallel=[2, 4, 8, 16], expert_parallel=[32, 16, 8, 8], data_parallel=64)
    assert departures("DeepSeek-V3", layout).tolist() == [0, 0, 0, 1]
    only = [True, True, False, False]  # what needs none of them is still off the path where nothing else fits
    assert departures("DeepSeek-V3", layout, fits=only).tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_experts_are_spread_though_a_trainer_that_nobody_timed_so_is_predicted_a_little_faster() -> None:
    """FSDP2 without expert parallel is 3 to 4 % faster here as predicted, and cannot be told apart."""
    asked = {"architecture": "Qwen3-30B-A3B", "cluster": "dgx_h100", "nodes": 8, "framework": "nemo_rl"}
    task = {**TASK, "prompts_per_step": 128, "max_prompt_tokens": 2048, "max_response_tokens": 16384}
    plan = plan_job(Job.model_validate({**asked, "tasks": [task]}))
    trainer = next(pool for pool in plan.phases[0].pools if pool.role == "trainer")
    assert trainer.layout.expert_parallel >= 4


@pytest.mark.slow
def test_experts_are_spread_beside_engines_that_leave_the_path_too() -> None:
    """Qwen3-235B on verl: engines over two nodes, which every rival has, had hidden what FSDP2 alone asks for."""
    plan = plan_job(short_job("Qwen3-235B-A22B", 128, "h100", framework="verl"))
    trainer = next(pool for pool in plan.phases[0].pools if pool.role == "trainer")
    assert plan.phases[0].pool("rollout").layout.tensor_parallel == 16
    assert trainer.layout.expert_parallel >= 4


def test_stages_are_a_power_of_two_or_divide_the_layers() -> None:
    odd = Layout.of(pipeline_parallel=[4, 5, 8, 12, 16], data_parallel=4)
    assert departures("Qwen3-32B", odd).tolist() == [0, 1 + 1, 1, 2 + 1, 2]  # 64 layers
    assert departures(
        "Qwen3-235B-A22B",
        Layout.of(expert_parallel=4, pipeline_parallel=[8, 12, 47], data_parallel=4),
    ).tolist() == [0, 1 + 1, 3]  # 94 layers: two on each of 47 stages
    # where only an odd pipeline fits, that it is one is the one departure
    only = [False, True, False, False, False]
    assert departures("Qwen3-32B", odd, fits=only)[1] == 1


def test_an_engine_spans_the_domains_that_its_weights_need() -> None:
    layout = Layout.of(tensor_parallel=[4, 8, 16, 32])
    roomy, light = np.zeros(4, dtype=np.bool_), np.array([0.6, 0.3, 0.15, 0.08])
    assert rollout_departures(layout, np.ones(4, dtype=np.bool_), 8, light, roomy).tolist() == [0, 0, 1, 2]
    assert rollout_departures(layout, np.array([False, False, True, True]), 8, light, roomy).tolist() == [0, 0, 0, 1]
    # weights that fill a domain need a second one, as published engines have; where there is none, they fit
    heavy = np.array([1.4, 0.69, 0.35, 0.17])
    assert rollout_departures(layout, heavy < 1.0, 8, heavy, roomy).tolist() == [0, 0, 0, 1]
    assert rollout_departures(layout, heavy < 1.0, 8, 1.0 + heavy, roomy).tolist() == [0, 0, 1, 2]


def test_stages_and_copies_of_the_attention_take_an_engine_off_the_path() -> None:
    """None of 66 published rl_steps has stages in an engine, none of 38 of mixtures of experts copies the attention."""
    layout = Layout.of(
        tensor_parallel=[16, 8, 8, 16], pipeline_parallel=[1, 2, 4, 1], attention_data_parallel=[1, 1, 1, 4],
        expert_parallel=[1, 1, 1, 16],
    )  # fmt: skip
    roomy, light, every = np.zeros(4, dtype=np.bool_), np.array([0.4, 0.4, 0.2, 0.4]), np.ones(4, dtype=np.bool_)
    assert rollout_departures(layout, every, 16, light, roomy).tolist() == [0, 1, 2 + 1, 1]
    # where nothing fits without, they are what is needed
    staged = np.array([False, True, True, False])
    assert rollout_departures(layout, staged, 16, light, roomy).tolist()[1:3] == [0, 1 + 1]


def test_an_engine_with_room_for_a_few_requests_is_off_the_path() -> None:
    layout, short = Layout.of(tensor_parallel=[1, 2, 4]), short_cache(np.array([3e4, 1e5, 3e5]), 16384.0)
    assert rollout_departures(layout, np.ones(3, dtype=np.bool_), 8, np.zeros(3), short).tolist() == [1, 0, 0]


@pytest.mark.slow
def test_engines_beside_a_waiting_trainer_leave_it_the_memory_that_published_ones_do() -> None:
    """A share that is stated departs from nothing; bold plans, and engines on devices of their own, take what helps."""
    asked = short_job("Qwen3-8B", gpus=8, framework="verl", mode="colocated", max_response=16384, prompts=256)

    def shared(**changes: object) -> tuple[float, bool]:
        phase = plan_job(Job.model_validate(asked.model_dump() | changes)).phases[0]
        return phase.pool("rollout").settings.memory_fraction or 0.0, phase.off_path

    assert shared() == (SHARED_FRACTION, False)
    assert shared(objective={"bold": True})[0] > SHARED_FRACTION
    stated = PoolSpec.model_validate({"role": "rollout", "settings": {"memory_fraction": 0.9}})
    assert shared(pools=[stated.model_dump()]) == (0.9, False)


@pytest.mark.slow
def test_an_engine_that_hides_behind_training_has_room_all_the_same() -> None:
    """Weights of a 32B fill an A100: an engine of one has room for three of the longest, and its rollout is hidden."""
    task = {"workload": "searching", "prompts_per_step": 64, "group_size": 16, "mini_batch": 32}
    job = Job.model_validate(
        {
            "architecture": "Qwen2.5-32B", "cluster": "dgx_a100", "nodes": 3, "framework": "areal",
            "modes": ["one_step_off"], "limits": {"staleness": 3},
            "tasks": [{"name": "t", **task, "max_prompt_tokens": 8192, "max_response_tokens": 512}],
        }
    )  # fmt: skip
    plan = plan_job(job)
    assert plan.phases[0].pool("rollout").layout.tensor_parallel == 2


def off_path(seconds: list[float], departures: list[int], *, sigma: float = 0.1, doubled: float = 0.0) -> OffPath:
    count = len(seconds)
    return OffPath(np.array(seconds), np.full(count, sigma), 0.5, np.array(departures), np.full(count, doubled))


def test_leaving_the_path_takes_more_than_what_two_cannot_be_told_apart_by() -> None:
    steps, training = np.array([100.0, 97.0, 80.0]), [40.0, 37.0, 20.0]
    priced = steps + price(steps, steps, [off_path(training, [0, 1, 1])], bold=False)
    assert priced[0] == 100.0
    assert priced[1] == pytest.approx(97.0 + Z95 * 0.5 * 0.1 * 37.0 * np.sqrt(2.0))
    assert np.argmin(priced[:2]) == 0  # 3 s in a stage of 40 s are within what a layout errs by
    assert np.argmin(priced) == 2  # 20 s are not
    bold = steps + price(steps, steps, [off_path(training, [0, 1, 1])], bold=True)
    assert bold.tolist() == steps.tolist()


def test_leaving_in_the_trainer_costs_the_same_beside_engines_that_all_rivals_share() -> None:
    """In squares the margin of engines across nodes, which every rival has, left next to nothing for the trainer's."""
    steps = np.array([100.0, 97.0])
    trainer = off_path([40.0, 37.0], [0, 1])
    alone = price(steps, steps, [trainer], bold=False)
    for departures in (0, 1):
        beside = price(steps, steps, [off_path([50.0, 50.0], [departures] * 2), trainer], bold=False)
        assert beside[1] - beside[0] == pytest.approx(alone[1] - alone[0])


def test_a_stage_that_is_small_or_well_known_costs_little_to_change() -> None:
    steps = np.array([100.0])
    large, small, sure, far = (
        float(price(steps, steps, [one], bold=False)[0])
        for one in (
            off_path([40.0], [1]),
            off_path([4.0], [1]),
            off_path([40.0], [1], sigma=0.01),
            off_path([40.0], [7]),
        )
    )
    assert small == pytest.approx(large / 10.0) == pytest.approx(sure)
    assert far == pytest.approx(7.0 * large)  # each departure asks for as much: 32 stages beside 16 were cheap else


def test_on_the_path_a_doubling_must_gain_half_a_percent() -> None:
    steps = np.array([200.0])
    assert price(steps, steps, [off_path([50.0], [0], doubled=3.0)], bold=False)[0] == pytest.approx(3 * DOUBLING * 200)
    parked = doublings(Layout.of(tensor_parallel=[2, 2], offload=[0, 1]), np.array([0, 1]))
    assert parked.tolist() == [1.0, 6.0]
    experts = Layout.of(expert_parallel=[1, 2, 4, 8, 16], data_parallel=16)
    assert doublings(experts, np.zeros(5, dtype=np.int64), 4).tolist() == [0.0, 0.0, 0.0, 1.0, 2.0]


def two(a: list[float], b: list[float], *, origin: tuple[int, int] = (0, 0), sigma: float = 0.1) -> Contenders:
    stages = np.array([a, b])
    return Contenders(
        stages, np.full(stages.shape, sigma), np.array(origin), np.zeros(2), stages.sum(axis=1, keepdims=True)
    )


def test_what_two_candidates_share_cancels() -> None:
    one, other = [60.0, 5.0, 30.0, 1.0, 1.0], [60.0, 5.0, 27.0, 1.0, 1.0]
    own = OWN_SHARE[2] * 0.1 * np.hypot(30.0, 27.0)
    assert two(one, other).difference_sigma(0)[1] == pytest.approx(np.hypot(own, 0.1 * 3.0))
    # the constants of two trainers err each in its own way
    assert two(one, other, origin=(0, 1)).difference_sigma(0)[1] == pytest.approx(0.1 * np.hypot(30.0, 27.0))
    assert not two(one, other).apart(0)[1]
    assert two(one, [60.0, 5.0, 10.0, 1.0, 1.0]).apart(0)[1]


def test_less_certain_constants_are_a_candidate_s_own_error() -> None:
    one, other = [60.0, 5.0, 30.0, 1.0, 1.0], [60.0, 5.0, 20.0, 1.0, 1.0]
    sure = two(one, other)
    wide = replace(sure, sigma=np.array([[0.1] * 5, [0.3] * 5]))
    assert wide.difference_sigma(0)[1] > 1.5 * sure.difference_sigma(0)[1]


TASK = {
    "name": "math", "workload": "math", "prompts_per_step": 64, "group_size": 8, "max_prompt_tokens": 512,
    "max_response_tokens": 3584,
}  # fmt: skip


@pytest.mark.slow
def test_stages_are_needed_where_only_a_budget_too_small_for_a_sequence_fits_fewer() -> None:
    """A token budget that no sequence fits into takes little memory, and trains nothing."""
    layout = {"tensor_parallel": 4, "context_parallel": 1, "activation_recompute": "full", "offload": "none"}
    task = {**TASK, "max_prompt_tokens": 2048, "max_response_tokens": 32768}
    job = {"architecture": "Qwen3-32B", "cluster": "dgx_h100", "nodes": 2, "trainer_backends": "megatron"}

    def phase(*budgets: int) -> Phase:
        pool = {"role": "trainer", "layout": layout, "settings": {"token_budget": budgets}}
        return plan_job(Job.model_validate({**job, "tasks": [task], "pools": [pool]})).phases[0]

    alone, beside = phase(40960), phase(4096, 40960)
    assert alone.pool("trainer").layout.pipeline_parallel == 2 and not alone.off_path
    assert beside.pools == alone.pools and not beside.off_path
    with pytest.raises(InfeasibleError, match="the token budget holds less than one longest sequence"):
        phase(4096)


@pytest.mark.parametrize(
    ("framework", "name", "refused"),
    [
        ("areal", "offload", ["none", "optimizer"]),  # its Megatron updates no optimizer on the host
        pytest.param("areal", "tensor_parallel", [4, 16], marks=pytest.mark.slow),  # leaves the node
    ],
)
def test_stages_are_needed_where_what_is_refused_alone_fits_fewer(
    framework: str, name: str, refused: list[int | str]
) -> None:
    """A value that the framework (or the node) does not take changes nothing of a plan, nor of what is said of it."""
    layout = {
        "tensor_parallel": 4, "context_parallel": 1, "activation_recompute": "full", "offload": "none",
        "virtual_pipeline": 1,
    }  # fmt: skip
    task = {**TASK, "max_prompt_tokens": 2048, "max_response_tokens": 14336}
    job = {"architecture": "Qwen3-32B", "cluster": "dgx_h100", "nodes": 2, "trainer_backends": "megatron",
           "framework": framework, "engine": "sglang", "modes": "colocated", "tasks": [task]}  # fmt: skip

    def phase(**opened: object) -> Phase:
        pool = {"role": "trainer", "layout": {**layout, **opened}, "settings": {"token_budget": 16384}}
        return plan_job(Job.model_validate({**job, "pools": [pool]})).phases[0]

    alone, beside = phase(), phase(**{name: refused})
    assert alone.pool("trainer").layout.pipeline_parallel == 2 and not alone.off_path
    assert beside.pools == alone.pools and not beside.off_path


def test_a_batch_that_divides_by_no_flatter_layout_is_no_need_of_stages() -> None:
    """24 devices and batches of 64 x 8: data parallel 24 and 12 are refused, and a pipeline is still off the path."""
    task = {**TASK, "mini_batch": 64}
    job = Job.model_validate({"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 3, "framework": "verl",
                              "trainer_backends": "megatron", "modes": "colocated", "tasks": [task]})  # fmt: skip
    question = ask(job)
    context, task_of = question.context, question.context.tasks[0]
    demand = task_of.source.demand(task_of.batches[0], None, 0)
    whole = next(split for split in splits(context) if split.trainer == 24)
    trainer = Columns(context, task_of, question.facts).trainer(demand, whole)
    by_batch = trainer.fits & (trainer.flags == int(Reject.FRAMEWORK))
    deep = (trainer.layout.pipeline_parallel > 1) & (trainer.flags == 0)
    assert by_batch.any() and (trainer.layout.pipeline_parallel[by_batch] == 1).any()
    assert deep.any() and (trainer.departures[deep] > 0).all()


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_the_price_is_in_the_screen_and_pruning_keeps_the_best(name: str) -> None:
    job = Job.model_validate({"architecture": name, "cluster": "dgx_h100", "nodes": 1, "tasks": [TASK]})
    question = ask(job)
    context, task = question.context, question.context.tasks[0]
    demands = (task.source.demand(task.batches[0], None, 0),)
    pruned, whole = (screen(context, task, demands, question.facts, prune=prune, keep=1) for prune in (True, False))
    assert pruned.objective[0] == pytest.approx(whole.objective[0], rel=1e-9)
    bold = replace(
        context, job=context.job.model_copy(update={"objective": job.objective.model_copy(update={"bold": True})})
    )
    fastest = screen(bold, task, demands, question.facts, keep=1)
    assert fastest.objective[0] <= pruned.objective[0]
    assert sum(pruned.configurations[0].departures) <= sum(fastest.configurations[0].departures)


def test_the_table_of_kinds_has_the_runner_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ("", "colocated", "", f"{trainer} DP8", "", "") for trainer in ("megatron", "megatron", "megatron", "fsdp2")
    ]
    monkeypatch.setattr(plan_text, "best_rows", lambda phase: rows)
    assert kind_rows(None) == [rows[0], rows[1], rows[3]]  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_run_lists_the_best_and_the_best_of_every_mode_and_backend() -> None:
    limits, modes = {"staleness": 1}, ["colocated", "one_step_off"]
    asked = {"architecture": "Qwen3-4B", "cluster": "dgx_h100", "nodes": 1, "tasks": [TASK], "limits": limits}
    plan = plan_job(Job.model_validate({**asked, "modes": modes}))
    phase, rows = plan.phases[0], best_rows(plan.phases[0])
    assert len(rows) >= 10
    every = [(row[1], row[3].split()[0]) for row in rows]
    kinds = set(every)
    assert {mode for mode, _ in kinds} == set(modes)
    assert {backend for _, backend in kinds} == {"megatron", "fsdp2"}
    assert list(dict.fromkeys((row[1], row[3].split()[0]) for row in kind_rows(phase))) == list(dict.fromkeys(every))
    assert rows[1] in kind_rows(phase)  # the runner-up, of whatever kind
    screen = StringIO()
    print_plan(plan, Console(file=screen, width=80))
    said = screen.getvalue()
    assert max(map(len, said.splitlines())) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in said
    words = {word for row in kind_rows(phase) for cell in row for word in cell.split()}
    shown = said.partition("objective")[2].replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split()
    assert "one_step_off" in words and words <= set(shown)


def test_degrees_follow_the_devices() -> None:
    """Twelve nodes have pipelines of twelve; experts that are no power of two are spread over thirds of the devices."""

    def degrees(devices: int, name: str) -> Layout:
        shape = Shape(load_architecture(name), devices, 8, 4096)
        layout, flags = trainer_layouts(shape, PoolSpec(role="trainer"), load_trainer("megatron").capability)
        return layout.flat(flags == 0)

    assert {3, 6, 12, 24} <= set(degrees(96, "Qwen3-235B-A22B").pipeline_parallel.tolist())
    assert {5, 10} <= set(degrees(80, "Qwen3-32B").pipeline_parallel.tolist())
    assert {7, 14} <= set(degrees(112, "Qwen3-32B").pipeline_parallel.tolist())
    assert {3, 12, 24} <= set(degrees(96, "Kimi-K2").expert_parallel.tolist())


def test_engines_are_told_to_run_no_more_than_their_cache_has_room_for() -> None:
    """What an audit would call too many is not planned (`rlperf.frameworks.audit.findings.engine_findings`)."""
    task = {**TASK, "max_response_tokens": 32768, "prompts_per_step": 256}
    job = Job.model_validate({"architecture": "Qwen2.5-32B", "cluster": "dgx_a100", "nodes": 2, "tasks": [task]})
    question = ask(job)
    context, one = question.context, question.context.tasks[0]
    demand = one.source.demand(one.batches[0], None, 0)
    columns = rollout_columns(context, one.architecture, demand, 16)
    fitting = columns.take(np.flatnonzero(columns.flags == 0))
    held = fitting.kv_tokens / demand.moments.mean
    assert fitting.max_running.max() > 64
    assert (fitting.max_running <= np.maximum(2.0 * held, 64)).all()
    assert (fitting.max_running < 1024).any()


@pytest.mark.parametrize(("model", "gpus", "gpu"), [("Qwen2.5-7B", 8, "a100"), ("Qwen3-30B-A3B", 64, "h100")])
def test_plain_questions_get_layouts_that_people_run(model: str, gpus: int, gpu: str) -> None:
    """Neither a ring over the whole node nor a pipeline of a small model, and experts are spread inside a node."""
    layout = plan_job(model=model, gpus=gpus, gpu=gpu, framework="verl").phases[0].pool("trainer").layout
    longest = 2048 + 16384
    assert layout.pipeline_parallel == 1
    assert longest / (layout.context_parallel * layout.ulysses) >= 4096
    assert (layout.expert_parallel in (4, 8)) == (model == "Qwen3-30B-A3B")


@pytest.mark.slow
def test_a_size_is_no_number_of_nodes_that_only_odd_pipelines_divide() -> None:
    """On 56 devices every layout is off the path, and none is dearer for it there: 8B would run as PP7 on 7 nodes."""
    job = short_job("Qwen3-8B", None, "h100", max_response="16k")
    seven = plan_job(job.model_copy(update={"nodes": 7})).phases[0]
    assert seven.off_path and seven.pool("trainer").layout.pipeline_parallel == 7
    sized = size_job(job, f"step<={1.02 * seven.predicted.rl_step_s}s", most_nodes=16)
    rows = {row.nodes: row for row in sized.rows}
    assert sized.best is not None and sized.best.nodes == 8 and not sized.best.off_path
    assert rows[7].meets and rows[7].off_path and rows[7].note.startswith("off the beaten path: trainer PP7 ")
    assert sized.passed_over.startswith("7 x dgx_h100 would do, off the beaten path: ")
    bold = size_job(job, f"step<={1.02 * seven.predicted.rl_step_s}s", objective={"bold": True}, most_nodes=16)
    assert bold.best is not None and bold.best.nodes <= 7 and not bold.passed_over


def test_a_size_names_the_layouts_of_the_phase_that_is_off_the_path() -> None:
    """Of several phases the first may be fine; and an engine over more nodes than it needs is off the path, too."""
    plan = plan_job(model="Qwen3-8B", gpus=8, max_response="2k", prompts=64)
    fine = plan.phases[0]
    assert _off_path(plan) == ""
    stages = {role: {"pipeline_parallel": 7 if role == "rollout" else 4} for role in ("rollout", "trainer")}
    pools = tuple(
        pool.model_copy(update={"layout": pool.layout.model_copy(update=stages.get(pool.role, {}))})
        for pool in fine.pools
    )
    odd = fine.model_copy(update={"off_path": True, "pools": pools})
    words = _off_path(plan.model_copy(update={"phases": (fine, odd)}))
    layouts = {pool.role: layout_words(pool.layout) for pool in odd.pools}
    assert words == f"off the beaten path: trainer {layouts['trainer']}; rollout {layouts['rollout']}"
    assert "PP4" in words and "PP7" in words


@pytest.mark.slow
def test_a_size_off_the_path_is_taken_where_no_other_meets_the_target() -> None:
    job = short_job("Qwen3-8B", None, "h100", max_response="2k", prompts=64).model_copy(
        update={"pools": (PoolSpec(role="trainer", layout=LayoutChoice(context_parallel=(8,))),)}
    )
    alone = plan_job(job.model_copy(update={"nodes": 3})).phases[0]
    sized = size_job(job, f"step<={1.02 * alone.predicted.rl_step_s}s", most_nodes=4)
    assert sized.best is not None and sized.best.off_path and sized.best.nodes == 3 and not sized.passed_over
