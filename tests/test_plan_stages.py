"""Pipeline stages of a plan: which first and last stage it states, and what that saves."""

from __future__ import annotations

import numpy as np
import pytest

from rlperf.api import ask, plan_job, predict_job
from rlperf.cost.batching import Microbatches
from rlperf.cost.stage_ends import stage_ends
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.plan.compare import job_of_plan
from rlperf.plan.judge.budgets import without_chunks
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.judge.stages import best_ends, layer_profile, least_s, makespan_s, partitions, stated_ends, uniform
from rlperf.plan.search.screen import screen
from rlperf.specs.job import Job
from rlperf.specs.pipeline_profile import LayerProfile
from rlperf.specs.pool import SettingsValues

TASK = {
    "name": "math", "workload": "math", "prompts_per_step": 32, "group_size": 4, "mini_batch": 32,
    "max_prompt_tokens": 512, "max_response_tokens": 2048,
}  # fmt: skip


def job(**changes: object) -> Job:
    base: dict[str, object] = {
        "architecture": "Qwen2.5-7B", "cluster": "dgx_h100", "framework": "nemo_rl", "trainer_backends": ["megatron"],
        "tasks": [TASK],
        "pools": [{"role": "trainer", "layout": {"pipeline_parallel": 4, "virtual_pipeline": 1}}],
    }  # fmt: skip
    return Job.model_validate({**base, **changes})


def test_stated_stages_are_planned_as_stated() -> None:
    """The judge tried uneven stages of its own beside them, and took those."""
    layout = {"pipeline_parallel": 4, "virtual_pipeline": 1}
    for stated in ({"first_stage_layers": 4}, {"first_stage_layers": 4, "last_stage_layers": 8}):
        pools = [{"role": "trainer", "layout": layout, "settings": stated}]
        settings = plan_job(job(pools=pools)).phases[0].pool("trainer").settings
        assert settings.first_stage_layers == 4
        assert settings.last_stage_layers == 8


def heavy_head(layers: int = 12, head: float = 3.0) -> LayerProfile:
    """Equal layers of 1 + 1 + 1 s, a head as heavy as ``head`` of them."""
    ones = [0.0, *([1.0] * layers), head]
    return LayerProfile.make("heavy head", "E" + "T" * layers + "L", ones, ones, ones)


def test_uniform_stages_have_the_closed_form() -> None:
    profile = heavy_head(head=0.0)
    assert makespan_s(profile, uniform(12, 4), 8) == pytest.approx((8 + 4 - 1) * 9.0)


def test_interleaved_stages_have_the_closed_form_and_give_layers_to_the_first_of_them() -> None:
    profile = heavy_head(layers=24, head=0.0)
    assert makespan_s(profile, uniform(12, 4), 8, chunks=2) == pytest.approx((2 * 8 + 4 - 1) * 9.0)
    ends = best_ends(heavy_head(layers=24), 24, 4, 16, chunks=2)
    assert ends.first % 2 == ends.last % 2 == 0
    assert ends.last < 6
    assert ends.factor < 1.0
    stated = SettingsValues(backend="megatron", first_stage_layers=ends.first, last_stage_layers=ends.last)
    assert stated_ends(heavy_head(layers=24), 24, 4, 16, stated, chunks=2) == ends


@pytest.mark.slow
def test_layers_that_divide_into_no_chunks_are_interleaved_with_uneven_ends() -> None:
    """94 layers on 8 stages: Megatron-Core takes 12 + 6 x 12 + 10 in two chunks each."""
    tasks = [{**TASK, "prompts_per_step": 64, "mini_batch": 64}]
    trainer = {"pipeline_parallel": 8, "virtual_pipeline": 2, "expert_parallel": 8, "tensor_parallel": 1}
    large = {"architecture": "Qwen3-235B-A22B", "nodes": 16, "framework": "slime", "tasks": tasks}
    plan = plan_job(job(**large, pools=[{"role": "trainer", "layout": trainer}]))
    settings = plan.phases[0].pool("trainer").settings
    assert settings.first_stage_layers and settings.last_stage_layers
    assert settings.first_stage_layers % 2 == settings.last_stage_layers % 2 == 0
    assert (94 - settings.first_stage_layers - settings.last_stage_layers) % 12 == 0
    single = {**trainer, "virtual_pipeline": 1}
    whole = plan_job(job(**large, pools=[{"role": "trainer", "layout": single}]))
    assert plan.phases[0].predicted.stages_s.training < whole.phases[0].predicted.stages_s.training


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    ends = best_ends(heavy_head(), 12, 4, 16)
    assert ends.last < 3
    assert ends.factor < 0.9
    tried = [makespan_s(heavy_head(), p, 16) for p in partitions(12, 4)]
    assert ends.makespan_s == pytest.approx(min(tried))
    stated = SettingsValues(backend="megatron", first_stage_layers=ends.first, last_stage_layers=ends.last)
    assert stated_ends(heavy_head(), 12, 4, 16, stated) == ends
    wrong = SettingsValues(backend="megatron", first_stage_layers=9, last_stage_layers=9)
    assert stated_ends(heavy_head(), 12, 4, 16, wrong).factor == 1.0


@pytest.mark.parametrize(("layers", "stages", "count", "chunks"), [(12, 4, 2, 1), (13, 3, 9, 1), (24, 4, 7, 2)])
def test_no_partition_ends_before_its_bound_and_the_best_of_all_is_found(
    layers: int, stages: int, count: int, chunks: int
) -> None:
    """Whatever the layers take: which partitions are simulated at all hangs on the bound."""
    random = np.random.default_rng(layers)
    for _ in range(3):
        times = random.uniform(0.0, 1.0, (3, layers + 2))
        profile = LayerProfile.make("mixed", "E" + "T" * layers + "L", *times.tolist())
        every = {p: makespan_s(profile, p, count, chunks) for p in partitions(layers // chunks, stages)}
        assert all(least_s(profile, p, count, chunks) <= s * (1 + 1e-9) for p, s in every.items())
        middle = layers / chunks / stages
        near = [s for p, s in every.items() if max(p[0], p[-1]) <= middle + 2 and min(p) >= max(middle - 6, 1)]
        assert best_ends(profile, layers, stages, count, chunks).makespan_s == min(near)


@pytest.mark.parametrize(("layers", "stages"), [(12, 2), (12, 4), (61, 8), (7, 3)])
def test_partitions_use_every_layer(layers: int, stages: int) -> None:
    found = partitions(layers, stages)
    assert found
    for partition in found:
        assert sum(partition) == layers
        assert len(partition) == stages
        assert min(partition) >= 1
        assert len(set(partition[1:-1])) <= 1
    assert sum(uniform(layers, stages)) == layers


def test_layers_of_a_mixed_architecture_have_their_own_times() -> None:
    question = ask(job(architecture="Nemotron-3-Nano-30B-A3B", nodes=2))
    context = question.context
    architecture = context.tasks[0].architecture
    layout = Layout.of(pipeline_parallel=[4], tensor_parallel=[4], data_parallel=[1])
    batches = Microbatches.of([8192.0], [8192.0 * 2048], [2048.0], [8.0])
    profile = layer_profile(architecture, context, context.trainers[0], layout, batches)
    assert profile.layers == architecture.layers + 2
    assert len(set(np.round(profile.work_s[1:-1], 9))) == len(set(profile.kinds)) - 2


@pytest.mark.slow
def test_a_plan_states_its_stages_where_the_framework_can_and_predict_agrees() -> None:
    plan = plan_job(job())
    trainer = plan.phases[0].pool("trainer")
    ends = (trainer.settings.first_stage_layers, trainer.settings.last_stage_layers)
    assert None not in ends
    assert ends[1] < 7  # the head of a 152k vocabulary weighs several of the 28 layers
    verl = plan_job(job(framework="verl==0.9.1")).phases[0].pool("trainer").settings
    assert verl.last_stage_layers is not None and verl.last_stage_layers < 7
    rollout = plan.phases[0].pool("rollout")
    pinned = {
        "role": "trainer",
        "layout": trainer.layout.model_dump(),
        "settings": trainer.settings.model_dump(exclude_none=True),
    }
    engine = {
        "role": "rollout",
        "layout": rollout.layout.model_dump(),
        "settings": rollout.settings.model_dump(exclude_none=True),
    }
    even = {name: value for name, value in pinned["settings"].items() if not name.endswith("_stage_layers")}
    without = predict_job(job(pools=[{**pinned, "settings": even}, engine]))
    assert plan.phases[0].predicted.stages_s.training < without.stages_s.training
    again = plan_job(job(pools=[pinned, engine]))
    assert again.phases[0].predicted.rl_step_s == pytest.approx(plan.phases[0].predicted.rl_step_s, rel=1e-9)


def test_a_fuller_stage_takes_more_memory() -> None:
    """Stages that a run states hold what it says, not what even ones would."""
    layout = {"pipeline_parallel": 4, "virtual_pipeline": 1, "tensor_parallel": 2, "activation_recompute": "full"}
    held = {}
    for first, last in ((7, 7), (10, 6), (16, 4)):
        settings = {"first_stage_layers": first, "last_stage_layers": last, "token_budget": 4096, "parked": True}
        trainer = {"role": "trainer", "layout": layout, "settings": settings}
        held[first] = predict_job(job(pools=[trainer])).memory_bytes["trainer"].parts["gradients"]
    table = held[10] - 10 * (held[16] - held[10]) / 6  # embedding or head
    assert held[7] == pytest.approx(table + 7 * (held[16] - held[10]) / 6)
    assert held[16] > 1.4 * held[7]


@pytest.mark.slow
def test_stages_are_stated_only_where_the_memory_holds_them() -> None:
    plan = plan_job(job())
    trainer = plan.phases[0].pool("trainer").settings
    assert trainer.first_stage_layers is not None and trainer.last_stage_layers is not None
    use = plan.phases[0].predicted.memory_bytes["trainer"]
    assert use.total <= use.allowed
    between = (28 - trainer.first_stage_layers - trainer.last_stage_layers) // 2
    assert max(trainer.first_stage_layers, between) > 7
    even = {"role": "trainer", "layout": {"pipeline_parallel": 4, "virtual_pipeline": 1},
            "settings": {"first_stage_layers": 7, "last_stage_layers": 7}}  # fmt: skip
    assert predict_job(job(pools=[even])).memory_bytes["trainer"].parts["weights"] < use.parts["weights"]


def test_a_plan_of_a_framework_that_spreads_layers_itself_plans_again() -> None:
    """AReaL has no key for them: its own plan was refused for the 9 + 10 + 9 layers of 28 that nobody had stated."""
    layout = {"pipeline_parallel": 3, "virtual_pipeline": 1, "tensor_parallel": 4}
    pools = [{"role": "trainer", "layout": layout}]
    first = plan_job(job(framework="areal", nodes=3, modes=["colocated"], pools=pools))
    pool = first.phases[0].pool("trainer")
    ends = (pool.settings.first_stage_layers, pool.settings.last_stage_layers)
    assert ends == stage_ends(28, 3, None, None) != (None, None)
    assert plan_job(job_of_plan(first)).phases[0].pool("trainer") == pool
    uneven = {**layout, "pipeline_parallel": 4, "tensor_parallel": 2}
    stated = [{"role": "trainer", "layout": uneven, "settings": {"first_stage_layers": 4, "last_stage_layers": 8}}]
    with pytest.raises(SpecError, match=r"no key for trainer.first_stage_layers \(4\)"):
        plan_job(job(framework="areal", modes=["colocated"], pools=stated))


def test_stages_in_one_piece_have_ends_of_their_own_where_layers_do_not_divide() -> None:
    """64 layers on three stages were judged as 21 1/3 each, and written, and run, as 21, 22 and 21: 1.3 % longer."""
    layout = {"tensor_parallel": 4, "pipeline_parallel": 3}
    asked = job(architecture="Qwen2.5-32B", nodes=3, framework="verl", modes=["colocated"],
                pools=[{"role": "trainer", "layout": layout}])  # fmt: skip
    question = ask(asked, to_plan=True)
    context, task = question.context, question.context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found, judge = screen(context, task, (demand,), question.facts), Judge(context, task)
    chunked = next(c for c in found.configurations if c.pool("trainer").layout.virtual_pipeline == 2)
    (whole,) = without_chunks(judge, judge.evaluate(demand, chunked))
    settings = whole.pool("trainer").settings
    assert whole.pool("trainer").layout.virtual_pipeline == 1
    assert (settings.first_stage_layers, settings.last_stage_layers) == stage_ends(64, 3, None, None) == (21, 21)
