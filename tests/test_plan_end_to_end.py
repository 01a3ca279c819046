"""From a job to a plan and its files, on small inputs that the test makes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

import rlperf
from rlperf.api import ask, plan_job, predict_job
from rlperf.errors import InfeasibleError, SpecError
from rlperf.layout import Layout
from rlperf.plan.answer.plan import GroupTime, Plan
from rlperf.plan.answer.prediction import assumptions
from rlperf.plan.judge.decisions import rl_step_groups
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.judge.stage_means import contenders
from rlperf.plan.judge.value import judged_objective
from rlperf.plan.question.context import Context
from rlperf.plan.question.demand import batches
from rlperf.plan.question.words import layout_words
from rlperf.plan.search.rollout_columns import IMPOSSIBLE, rollout_columns
from rlperf.plan.search.screen import screen
from rlperf.plan.search.splits import splits
from rlperf.plan.search.trainer_columns import TrainerColumns, trainer_columns_of, trainer_grid
from rlperf.report.plan_files import plan_yaml, read_plan, write_plan_files
from rlperf.report.plan_text import best_rows, markdown, runner_up_words
from rlperf.sim.rl_step import rollout_stage
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.uncertainty import log_sigma
from rlperf.sim.rollout import routing
from rlperf.sim.rollout.routing import telling_replicas
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.architecture import Architecture
from rlperf.specs.job import Job
from rlperf.specs.pool import LayoutValues
from rlperf.units import human_seconds

SMALL: dict[str, object] = {
    "name": "small",
    "architecture": "Qwen3-0.6B",
    "cluster": "dgx_h100",
    "tasks": [
        {
            "name": "math", "workload": "math", "prompts_per_step": 16, "group_size": 4, "mini_batch": 8,
            "max_prompt_tokens": 512, "max_response_tokens": 1024,
        }
    ],
}  # fmt: skip


def job(**changes: object) -> Job:
    return Job.model_validate({**SMALL, **changes})


@pytest.fixture(scope="module")
def small() -> Plan:
    """The plan of the small job as it stands."""
    return plan_job(job())


def trace(path: Path, steps: int = 2, prompts: int = 16, group: int = 4, scale: float = 200.0, seed: int = 0) -> Path:
    """A small PolyTrace recording of log-normal lengths."""
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True, exist_ok=True)
    for step in range(steps):
        lines = [
            json.dumps(
                {
                    "step": step, "rank": 0, "dp_rank": 0, "tp_rank": 0, "local_index": i,
                    "input": int(rng.integers(20, 200)), "n_sampling": group, "validate": False,
                    "output": np.minimum(rng.lognormal(np.log(scale), 0.8, group).astype(int) + 1, 1024).tolist(),
                }
            )
            for i in range(prompts)
        ]  # fmt: skip
        (path / f"packed_lengths_step_{step}.jsonl").write_text("\n".join(lines) + "\n")
    return path


def test_public_names() -> None:
    assert len(rlperf.__all__) <= 28
    for name in rlperf.__all__:
        assert getattr(rlperf, name) is not None
    assert set(rlperf.__all__) <= set(dir(rlperf))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rlperf.nothing


def test_a_plan_is_complete_and_reads_back(tmp_path: Path) -> None:
    plan = plan_job(job(modes=["colocated", "disaggregated"], price="2 USD/h"))
    assert plan.status == "optimal"
    assert plan.mip_gap == 0.0
    phase = plan.phases[0]
    assert phase.rl_steps == (0, 0)
    assert {pool.role for pool in phase.pools} == {"rollout", "trainer", "reference"}
    assert all(pool.layout.devices == pool.devices for pool in phase.pools)
    predicted = phase.predicted
    assert predicted.low_s < predicted.rl_step_s < predicted.high_s
    assert predicted.fits
    assert plan.objective == pytest.approx(predicted.rl_step_s, rel=1e-4)
    assert predicted.usd_per_step == pytest.approx(predicted.rl_step_s * 8 * 2 / 3600)
    assert sum(predicted.stages_s.model_dump().values()) == pytest.approx(predicted.rl_step_s)
    assert predicted.tokens_per_s_per_device == pytest.approx(predicted.trained_tokens / predicted.rl_step_s / 8)
    for role in ("rollout", "trainer"):
        use = predicted.memory_bytes[role]  # type: ignore[index]
        assert sum(use.parts.values()) == pytest.approx(use.total)
        shares = [row.share for row in predicted.operators if row.role == role]
        assert sum(shares) == pytest.approx(1.0, abs=0.05)
    written = write_plan_files(plan, tmp_path / "out")
    assert [path.name for path in written] == ["plan.yaml", "report.md", "timeline.svg", "timeline.png"]
    assert read_plan(written[0]) == plan
    assert "rl_step" in markdown(plan)
    assert yaml.safe_load(plan_yaml(plan))["schema_version"] == 1


def test_predict_of_the_plan_gives_the_plans_numbers(small: Plan) -> None:
    phase = small.phases[0]
    pools = []
    for role in ("rollout", "trainer"):
        pool = phase.pool(role)  # type: ignore[arg-type]
        settings = pool.settings.model_dump(exclude_none=True)
        pools.append({"role": role, "devices": pool.devices, "layout": pool.layout.model_dump(), "settings": settings})
    pinned = predict_job(job(pools=pools))
    assert pinned.rl_step_s == pytest.approx(phase.predicted.rl_step_s, rel=1e-9)
    assert pinned.memory_bytes == phase.predicted.memory_bytes


@pytest.mark.slow
def test_pruning_does_not_cut_the_optimum() -> None:
    question = ask(job(modes=["colocated", "disaggregated", "one_step_off"], limits={"staleness": 1}))
    context, task = question.context, question.context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    pruned = screen(context, task, (demand,), question.facts)
    every = screen(context, task, (demand,), question.facts, prune=False, keep=10**6)
    assert pruned.objective[0] == pytest.approx(every.objective.min(), rel=1e-12)
    assert len(every.configurations) >= len(pruned.configurations)
    judge = Judge(context, task)
    values = [judged_objective(context, judge.evaluate(demand, c)) for c in every.configurations[:40]]
    judged = [judged_objective(context, judge.evaluate(demand, c)) for c in pruned.configurations[:12]]
    assert min(judged) == pytest.approx(min(values), rel=2e-3)


def trainer_columns(
    context: Context, architecture: Architecture, demand: Demand, devices: int, *, colocated: bool
) -> TrainerColumns:
    """The trainer's columns on one number of devices."""
    grid = trainer_grid(context, architecture, demand.batch.longest_tokens, ((devices, 0),), colocated)
    return trainer_columns_of(context, architecture, demand, grid)[devices, 0]


def test_device_counts_together_are_costed_as_each_alone() -> None:
    question = ask(job(nodes=2, trainer_backends=["fsdp2", "megatron"]))
    context, task = question.context, question.context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    grid = trainer_grid(
        context, task.architecture, demand.batch.longest_tokens, ((4, 0), (8, 0), (16, 0)), colocated=True
    )
    together = trainer_columns_of(context, task.architecture, demand, grid)
    for (devices, _), columns in together.items():
        alone = trainer_columns(context, task.architecture, demand, devices, colocated=True)
        assert (columns.layout.devices == devices).all()
        assert np.isfinite(columns.training_s).any()
        for name, value in vars(alone).items():
            if name == "layout":
                for axis, degrees in vars(value).items():
                    np.testing.assert_array_equal(getattr(columns.layout, axis), degrees)
            else:
                np.testing.assert_allclose(getattr(columns, name), value, rtol=1e-12, err_msg=name)


def test_combinations_count_what_a_screen_without_pruning_could_pair() -> None:
    question = ask(job(modes=["colocated", "disaggregated"]))
    context, task = question.context, question.context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,), None)
    every = screen(context, task, (demand,), None, prune=False, keep=10**6)
    pairs = 0
    for split in splits(context):
        rollout = rollout_columns(context, task.architecture, demand, split.rollout)
        trainer = trainer_columns(
            context, task.architecture, demand, split.trainer, colocated=split.mode == "colocated"
        )  # fmt: skip
        pairs += int((rollout.flags & IMPOSSIBLE == 0).sum()) * trainer.count
    assert found.combinations == every.combinations == pairs
    assert found.candidates < every.candidates  # pruned, some are never looked at one by one


def test_trainer_columns_count_once_however_many_precisions_are_open() -> None:
    def looked_at(**settings: object) -> int:
        pools = [{"role": "rollout", "devices": 8, "settings": settings}, {"role": "trainer", "devices": 8}]
        context = ask(job(pools=pools)).context
        demand = context.tasks[0].source.demand(context.tasks[0].batches[0], None, 0)
        found = screen(context, context.tasks[0], (demand,))
        assert sum(found.rejected.values()) < found.candidates
        return found.candidates

    one = looked_at()
    trainer_alone = one - (looked_at(kv_dtype=["bf16", "fp8"]) - one)
    assert trainer_alone > 0.5 * one


def test_of_a_large_rl_step_some_replicas_tell_the_makespan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the threshold all replicas run; above it the fullest and the longest, which are the last to finish."""
    task = {**SMALL["tasks"][0], "prompts_per_step": 256, "group_size": 16, "mini_batch": 256}  # type: ignore[index]
    pools = [{"role": "rollout", "layout": {"tensor_parallel": 1}, "settings": {"max_running": 64}}]
    question = ask(job(nodes=2, tasks=[task], pools=pools, modes=["colocated"]))
    context, asked = question.context, question.context.tasks[0]
    demand = asked.source.demand(asked.batches[0], None, 0)
    configuration = screen(context, asked, (demand,), question.facts).configurations[0]
    whole = Judge(context, asked).evaluate(demand, configuration)
    assert {len(result.timelines) for result in whole.rollouts} == {16}
    monkeypatch.setattr(rollout_stage, "_SERVED", rollout_stage.HeldRollouts())
    monkeypatch.setattr(routing, "SIMULATED_WHOLE", 2048)
    monkeypatch.setattr(routing, "SIMULATED", 1024)
    part = Judge(context, asked).evaluate(demand, configuration)
    assert max(len(result.timelines) for result in part.rollouts) <= 5
    assert part.rl_step_s == pytest.approx(whole.rl_step_s, rel=0.01)
    assert part.rl_step_s <= whole.rl_step_s * (1 + 1e-12)  # replicas that are left out can only be later
    assert all(
        len(served) == len(result.finish_s) < 4096 for served, result in zip(part.served, part.rollouts, strict=True)
    )
    assert any("of 16 rollout replicas simulated" in note for note in assumptions(context, part))
    assert not any("replicas simulated" in note for note in assumptions(context, whole))


def test_of_many_replicas_some_are_simulated_however_little_each_has() -> None:
    rng = np.random.default_rng(0)
    few = Trajectories.of(100, rng.lognormal(7.0, 0.8, 4096).astype(np.int64))
    told = telling_replicas(few, 2048)
    assert len(told) <= 512 < 2048 == len(telling_replicas(few, 512)) * 4
    tokens = np.bincount(np.arange(4096) % 2048, few.generated_tokens, 2048)
    assert np.argmax(tokens) in told and np.argmax(few.generated_tokens) % 2048 in told
    assert np.argmin(tokens) in told  # idle time is not told by the fullest alone


def test_a_large_batch_is_drawn_fewer_times() -> None:
    tasks = [{**SMALL["tasks"][0], "prompts_per_step": n, "group_size": 16} for n in (4096, 4104)]  # type: ignore[index]
    for task, expected in zip(tasks, (4, 2), strict=True):
        asked = ask(job(tasks=[task])).context.tasks[0]
        assert len(asked.source.demand(asked.batches[0], None, 0).tables) == expected


def test_a_recorded_trace_is_used_as_it_is(tmp_path: Path) -> None:
    folder = trace(tmp_path / "trace")
    task = {**SMALL["tasks"][0], "workload": str(folder)}  # type: ignore[index]
    question = ask(job(tasks=[task]))
    source = question.context.tasks[0].source
    demand = source.demand(question.context.tasks[0].batches[0], None, 0)
    assert [table.n for table in demand.tables] == [64, 64]
    assert demand.trained_tokens > 0
    other = batches(question.job.tasks[0].model_copy(update={"prompts_per_step": (32,)}))[0]
    redrawn = source.demand(other, None, 0)
    assert redrawn.tables[0].n == 128
    assert any("redrawn" in note for note in redrawn.notes)
    assert plan_job(job(tasks=[task])).phases[0].predicted.rl_step_s > 0


def test_phases_without_a_switching_cost_keep_one_layout() -> None:
    plan = plan_job(job(horizon={"rl_steps": 4, "group": 2}))
    assert [phase.rl_steps for phase in plan.phases] in ([(0, 3)], [(0, 1), (2, 3)])
    assert len({phase.pools for phase in plan.phases}) == 1
    assert plan.objective == pytest.approx(4 * plan.phases[0].predicted.rl_step_s, rel=0.2)
    assert rl_step_groups(job(horizon={"rl_steps": 5, "group": 2})) == [(0, 1), (2, 3), (4, 4)]
    first = GroupTime(rl_steps=(0, 1), rl_step_s=7.0, low_s=6.0, high_s=8.0)
    phase = plan.phases[0].model_copy(update={"groups": (first, first.model_copy(update={"rl_steps": (2, 3)}))})
    told = best_rows(phase)[0]  # as the others in the table, which were judged in the first group
    assert told[0] == human_seconds(7.0) and told[-1] == "the plan in rl_steps 0 to 1"
    assert runner_up_words(phase).startswith("runner-up of rl_steps 0 to 1 ")


def test_modes_and_splits() -> None:
    context = ask(job(nodes=2, modes=["colocated", "async"], limits={"staleness": 2})).context
    found = splits(context)
    assert {(s.mode, s.rollout, s.trainer) for s in found} == {
        ("colocated", 8, 8), ("colocated", 16, 16), ("async", 8, 8),
    }  # fmt: skip
    plan = plan_job(job(nodes=2, modes=["async"], limits={"staleness": 2}))
    assert plan.phases[0].staleness == 2
    assert plan.phases[0].mode == "async"


def test_token_time_may_take_fewer_nodes(small: Plan) -> None:
    plan = plan_job(job(nodes=2, objective="token_time"))
    devices = plan.phases[0].pool("trainer").devices
    assert devices in (8, 16)
    alone = {8: small, 16: plan_job(job(nodes=2))}
    both = [each.phases[0].predicted.rl_step_s * n for n, each in alone.items()]
    assert plan.phases[0].predicted.rl_step_s * devices == pytest.approx(min(both), rel=0.05)


def test_open_batches_need_and_get_a_limit() -> None:
    task = {**SMALL["tasks"][0], "max_response_tokens": [256, 1024]}  # type: ignore[index]
    plan = plan_job(job(tasks=[task], limits={"truncated_fraction": 1.0}, objective="token_time"))
    assert plan.phases[0].settings.max_response_tokens in (256, 1024)
    with pytest.raises(InfeasibleError, match="cuts"):
        plan_job(job(tasks=[task], limits={"truncated_fraction": 0.0}))


@pytest.mark.parametrize("framework", ["nemo_rl", "verl", "slime"])
def test_layers_that_leave_a_remainder_are_planned_with_their_ends_stated(framework: str) -> None:
    engine = "sglang" if framework == "slime" else "vllm"
    trainer = {"role": "trainer", "layout": {"pipeline_parallel": 8}, "settings": {"backend": "megatron"}}
    plan = plan_job(job(pools=[trainer], framework=framework, engine=engine))
    settings = next(pool.settings for pool in plan.phases[0].pools if pool.role == "trainer")
    assert settings.first_stage_layers and settings.last_stage_layers
    assert settings.first_stage_layers + settings.last_stage_layers == 28 - 6 * 4


@pytest.mark.slow
def test_the_optimizer_goes_to_the_host_only_where_it_must() -> None:
    stays = plan_job(job(architecture="Qwen3-8B", pools=[{"role": "trainer", "settings": {"backend": "megatron"}}]))
    assert {pool.layout.offload for pool in stays.phases[0].pools} == {"none"}
    large = job(architecture="Qwen2.5-72B", nodes=2)
    plan = plan_job(large)
    trainer = next(pool for pool in plan.phases[0].pools if pool.role == "trainer")
    assert trainer.layout.offload == "optimizer"  # 1.2 TB of states on 16 devices of 80 GB
    with pytest.raises(InfeasibleError, match="device memory"):
        plan_job(large.model_copy(update={"pools": Job.model_validate({**SMALL, "pools": [
            {"role": "trainer", "layout": {"offload": "none"}}]}).pools}))  # fmt: skip


def test_what_does_not_fit_is_predicted_with_the_first_knob() -> None:
    pools = [
        {"role": "trainer", "layout": {"zero_stage": 0, "ulysses": 1, "activation_recompute": "none"},
         "settings": {"backend": "fsdp2", "token_budget": 30000, "parked": False}},
        {"role": "rollout", "settings": {"memory_fraction": 0.9}},
    ]  # fmt: skip
    found = predict_job(job(architecture="Qwen3-8B", pools=pools))
    assert not found.fits
    assert any("over what the risk allows" in line for line in found.advice)


def test_layout_words_and_round_trip() -> None:
    values = LayoutValues(
        tensor_parallel=2, data_parallel=4, activation_recompute="selective", shard_size=4, zero_stage=3
    )
    assert Layout.of_values(values).take(0).values() == values
    assert layout_words(values) == "TP2 DP4, ZeRO-3 over 4, recompute selective"


def test_identical_candidates_cannot_be_told_apart() -> None:
    question = ask(job())
    context, task = question.context, question.context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,), question.facts)
    judge = Judge(context, task)
    first = judge.evaluate(demand, found.configurations[0])
    assert not contenders([first, first]).apart(0).any()
    assert log_sigma(1.0, 1.0) == 0.0


@pytest.mark.slow
def test_opening_modes_never_makes_a_plan_slower() -> None:
    """Sixteen colocated candidates are better by the screen than any asynchronous one; the judge knows better."""
    task = {
        "name": "math", "workload": "math", "prompts_per_step": 128, "group_size": 8, "mini_batch": 128,
        "max_response_tokens": 8192,
    }  # fmt: skip
    asked = job(architecture="Qwen3-8B", nodes=2, framework="verl", tasks=[task], limits={"staleness": 1},
                objective={"bold": True})  # fmt: skip
    modes = ("colocated", "one_step_off", "async")
    alone, together = (
        [plan_job(asked.model_copy(update={"modes": each})).phases[0].predicted.rl_step_s for each in choices]
        for choices in ([(mode,) for mode in modes], [modes])
    )
    assert together[0] <= min(alone) * (1 + 1e-9)


def test_every_mode_is_judged() -> None:
    context, facts = ask(job(modes=["colocated", "async"], limits={"staleness": 1})).pair
    task = context.tasks[0]
    demands = tuple(task.source.demand(batch, None, 0) for batch in task.batches)
    found = screen(context, task, demands, facts, keep=2)
    assert {one.mode for one in found.configurations} == {"colocated", "async"}


def test_a_plan_with_a_run_but_no_price_reads_back(tmp_path: Path) -> None:
    plan = plan_job(job(run={"rl_steps": 20}))
    assert plan.run is not None and plan.run.usd is None
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan))
    assert read_plan(tmp_path / "plan.yaml") == plan


def test_a_target_for_a_run_of_unknown_length_is_refused() -> None:
    with pytest.raises(SpecError, match="number of rl_steps"):
        rlperf.api.size_job(job(), "run<=1d")
    with pytest.raises(SpecError, match="needs its number of rl_steps"):  # it was a run of one rl_step
        rlperf.api.size_job(job(run={"checkpoint": "60 s"}), "run<=1d")
