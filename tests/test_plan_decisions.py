"""Several tasks, phases, risk, sensitivity, the Pareto front and what to relax."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from rlperf import processes
from rlperf.api import ask, plan_job
from rlperf.errors import InfeasibleError, SpecError
from rlperf.plan.answer.plan import Plan
from rlperf.plan.judge import decisions, tuning
from rlperf.plan.judge.decisions import decide
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.judge.finalists import finalists_of
from rlperf.plan.question.context import resolve
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.relax import relaxations
from rlperf.plan.search.screen import screen
from rlperf.plan.search.splits import splits
from rlperf.report.plan_summary import summary_lines
from rlperf.report.plan_text import markdown, runner_up_words
from rlperf.specs.job import Job

TASK = {
    "name": "math", "workload": "math", "prompts_per_step": 32, "group_size": 4, "mini_batch": 16,
    "max_prompt_tokens": 512, "max_response_tokens": 2048,
}  # fmt: skip


def job(**changes: object) -> Job:
    base: dict[str, object] = {"architecture": "Qwen3-4B", "cluster": "dgx_h100", "tasks": [TASK]}
    return Job.model_validate({**base, **changes})


def drifting(folder: Path, short: float, long: float) -> Path:
    """A recording whose responses grow from rl_step to rl_step."""
    rng = np.random.default_rng(3)
    folder.mkdir()
    for step, scale in enumerate(np.geomspace(short, long, 4)):
        lines = [
            json.dumps(
                {
                    "step": step, "rank": 0, "dp_rank": 0, "tp_rank": 0, "local_index": i, "input": 100,
                    "n_sampling": 4, "validate": False,
                    "output": np.minimum(rng.lognormal(np.log(scale), 0.5, 4).astype(int) + 1, 2048).tolist(),
                }
            )
            for i in range(32)
        ]  # fmt: skip
        (folder / f"packed_lengths_step_{step}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def trainer(*tensor_parallel: int) -> dict[str, object]:
    """Few layouts, where the claim is of something else."""
    layout = {"tensor_parallel": tensor_parallel, "context_parallel": 1, "ulysses": 1}
    return {"role": "trainer", "layout": layout}


FEW: dict[str, object] = {"trainer_backends": ["fsdp2"], "pools": [trainer(1, 2)]}


def switching(task: dict[str, object], switch: str | None = None) -> Plan:
    """A plan of every rl_step of a recording, changes of layout at a price."""
    horizon = {"rl_steps": 4, "group": 1, **({"switch": switch} if switch else {})}
    return plan_job(job(tasks=[task], horizon=horizon, **FEW))


@pytest.fixture(scope="module")
def drift(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return {**TASK, "workload": str(drifting(tmp_path_factory.mktemp("recorded") / "drift", 40, 1500))}


@pytest.fixture(scope="module")
def free(drift: dict[str, object]) -> Plan:
    return switching(drift, "0 s")


@pytest.mark.slow
def test_phases_of_a_drifting_recording(drift: dict[str, object], free: Plan) -> None:
    never, dear = switching(drift), switching(drift, "1 h")
    assert len({phase.pools for phase in never.phases}) == 1
    assert free.objective <= never.objective * (1 + 1e-9)
    assert never.objective == pytest.approx(dear.objective, rel=1e-6)
    assert never.static_objective == pytest.approx(never.objective, rel=1e-6)
    assert free.static_objective is not None
    assert free.objective <= free.static_objective * (1 + 1e-9)
    # where the static plan is the plan there is nothing to be uncertain about
    assert (never.static_low, never.static_high) == pytest.approx((0.0, 0.0), abs=1e-12)
    assert free.static_low is not None and free.static_high is not None
    assert free.static_low <= free.static_objective / free.objective - 1.0 + 1e-6 <= free.static_high + 2e-6
    assert [phase.rl_steps for phase in never.phases] == [(0, 3)]
    assert never.objective == pytest.approx(4 * never.phases[0].predicted.rl_step_s, rel=1e-4)
    alone = plan_job(job(tasks=[{**drift, "rl_steps": 0}], **FEW))
    rollouts = [plan.phases[0].predicted.stages_s.rollout for plan in (never, alone)]
    assert rollouts[0] > 1.5 * rollouts[1]  # the later rl_steps are longer


def test_layouts_change_between_groups_only_where_that_surely_pays(free: Plan) -> None:
    plan = free
    changes = len({phase.pools for phase in plan.phases}) > 1
    if changes:  # one layout takes more in 95 of 100 draws
        assert plan.switching is None and plan.static_low is not None and plan.static_low > 0.0
        return
    assert plan.static_objective == pytest.approx(plan.objective, rel=1e-6)
    gain = plan.switching
    assert gain is None or (gain.low <= 0.0 <= gain.high and gain.low <= gain.saves <= gain.high)
    assert gain is None or any("not certain, so one is kept" in line for line in summary_lines(plan))
    (phase,) = plan.phases
    assert [group.rl_steps for group in phase.groups] == [(k, k) for k in range(4)]
    steps = [group.rl_step_s for group in phase.groups]
    assert phase.predicted.rl_step_s == pytest.approx(np.mean(steps)) and max(steps) > 1.1 * min(steps)
    assert len([line for line in markdown(plan).splitlines() if line.startswith("- rl_steps ")]) == 4


def test_concurrent_tasks_take_at_most_the_cluster() -> None:
    tasks = [TASK, {**TASK, "name": "short", "max_response_tokens": 512}]
    shared = plan_job(job(nodes=2, tasks=tasks, sharing="devices", **FEW))
    assert sum(phase.pool("trainer").devices for phase in shared.phases) <= 16
    assert {phase.tasks for phase in shared.phases} == {("math",), ("short",)}


@pytest.mark.parametrize(("engine", "modes"), [({"kv_dtype": ["bf16", "fp8"]}, ["colocated"]),
                                               ({}, ["colocated", "one_step_off"])])  # fmt: skip
def test_what_is_open_takes_no_place_among_the_finalists_of_tasks_that_run_at_once(
    engine: dict[str, list[str]], modes: list[str]
) -> None:
    """An open 8-bit cache halved the trainers that were judged of every number of devices: 0.5 % (20B on 40 MI300X)."""
    tasks = [TASK, {**TASK, "name": "short", "max_response_tokens": 512}]

    def finalists(settings: dict[str, object], modes: list[str]) -> set[Configuration]:
        pools = [{"role": "rollout", "settings": settings}, trainer(1, 2)]
        asked = job(nodes=2, tasks=tasks, sharing="devices", trainer_backends=["fsdp2"], pools=pools, modes=modes,
                    limits={"staleness": 1})  # fmt: skip
        context = ask(asked).context
        task = context.tasks[0]
        found = screen(context, task, (task.source.demand(task.batches[0], None, 0),))
        return set(finalists_of(context, found, 16))

    stated = [finalists(dict.fromkeys(engine, one), [mode])
              for one in engine.get("kv_dtype", [""]) for mode in modes]  # fmt: skip
    assert len(stated) == 2 and set.union(*stated) <= finalists(dict(engine), modes)


def test_more_tasks_at_once_than_nodes_share_one_or_are_told_what_they_need() -> None:
    """Two tasks on one node were told that no combination of columns keeps the limits that couple them."""
    tasks = [{**TASK, "max_response_tokens": 1024}, {**TASK, "name": "short", "max_response_tokens": 512}]
    shared = plan_job(job(tasks=tasks, sharing="devices", **FEW))
    devices = [phase.pool("trainer").devices for phase in shared.phases]
    assert len(devices) == 2 and sum(devices) <= 8 and all(8 % each == 0 for each in devices)
    pinned = [{**each, "devices": 8, "role": role} for role, each in (("rollout", {}), ("trainer", trainer(1, 2)))]
    with pytest.raises(InfeasibleError) as caught:
        plan_job(job(tasks=tasks, sharing="devices", trainer_backends=["fsdp2"], pools=pinned))
    assert "take at least 16 devices (math 8, short 8), and there are 8" in str(caught.value)
    assert "2 nodes hold them" in str(caught.value)


def test_risk_moves_the_objective_to_the_upper_end() -> None:
    mean: Plan = plan_job(job(**FEW))
    averse = plan_job(job(objective={"minimize": "step_time", "risk": 1.0}, **FEW))
    assert averse.objective == pytest.approx(averse.phases[0].predicted.high_s, rel=1e-4)
    assert averse.phases[0].predicted.high_s <= mean.phases[0].predicted.high_s * (1 + 1e-6)


def test_sensitivity_and_pareto_front_speak_of_the_plan() -> None:
    phase = plan_job(job(nodes=2, objective="token_time", price="2 USD/h", **FEW)).phases[0]
    assert {row.input for row in phase.sensitivity} == {
        "rollout slower", "rollout faster", "training and scoring slower", "training and scoring faster",
    }  # fmt: skip
    for row in phase.sensitivity:
        assert row.loss >= 0.0
        assert bool(row.switches_to) == (row.loss > 0)
        slower = row.change > 0
        assert (row.rl_step_s > phase.predicted.rl_step_s) == slower
    steps = [point.rl_step_s for point in phase.pareto]
    assert steps == sorted(steps)
    assert all(point.usd_per_step == pytest.approx(point.device_s * 2 / 3600) for point in phase.pareto)
    assert [point.device_s for point in phase.pareto if not point.differs] == [
        phase.predicted.rl_step_s * phase.pool("trainer").devices
    ]


def test_infeasible_limits_name_what_to_relax() -> None:
    with pytest.raises(InfeasibleError, match="without the limit on step it is feasible") as caught:
        plan_job(job(limits={"step": "1 ms"}))
    assert caught.value.exit_code == 1
    limits = {"step": "1 ms", "usd_per_step": "0.000001 USD"}
    both = job(nodes=2, limits=limits, price="2 USD/h", pools=[trainer(1)])
    with pytest.raises(InfeasibleError, match="without the limits on step and usd_per_step") as caught:
        plan_job(both)
    assert str(caught.value).count("the fastest rl_step") == 1  # of all splits, not of each


def test_a_limit_of_money_asks_for_few_devices_too() -> None:
    for limits, least in (({"usd_per_step": "1 USD"}, 8), ({"step": "1 h"}, 16)):
        context = ask(job(nodes=4, limits=limits, price="2 USD/h")).context
        assert min(split.total for split in splits(context)) == least
    with pytest.raises(InfeasibleError, match=r"takes [0-9].* and 0\.\d+ USD on 8 devices"):
        plan_job(job(limits={"usd_per_step": "0.000001 USD"}, price="2 USD/h", pools=[trainer(1)]))


def test_nothing_to_relax_where_the_model_is_too_large() -> None:
    question = ask(job(architecture="DeepSeek-V3"))
    context, task = question.context, question.context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    assert relaxations(context, task, question.facts, (demand,)) == []


def test_rollout_on_a_cluster_of_its_own() -> None:
    pools = [{"role": "rollout", "cluster": "hgx_h20", "nodes": 1}]
    plan = plan_job(job(modes=["disaggregated", "async"], limits={"staleness": 1}, pools=pools, price="3 USD/h"))
    phase = plan.phases[0]
    assert (phase.pool("rollout").device, phase.pool("rollout").devices) == ("h20_sxm", 8)
    assert (phase.pool("trainer").device, phase.pool("trainer").devices) == ("h100_sxm", 8)
    assert phase.predicted.usd_per_step is None  # nobody states a price for the H20 nodes
    assert phase.predicted.calibration.extrapolated
    with pytest.raises(ValueError, match="excludes mode colocated"):
        job(pools=pools)
    with pytest.raises(ValueError, match="only the rollout pool"):
        job(modes=["async"], limits={"staleness": 1}, pools=[{"role": "trainer", "cluster": "hgx_h20"}])


def test_open_precisions_are_chosen_and_each_is_planned_as_if_it_were_stated() -> None:
    def rollout(**settings: object) -> list[dict[str, object]]:
        return [{"role": "rollout", "settings": settings}, trainer(1)]

    def planned(weights: object, cache: object) -> Plan:
        pools = rollout(rollout_dtype=weights, kv_dtype=cache)
        return plan_job(job(pools=pools, architecture="Qwen3-8B", trainer_backends=["fsdp2"]))

    dtypes = ("bf16", "fp8")
    alone = {choice: planned(*choice) for choice in product(dtypes, dtypes)}
    both = planned([*dtypes], [*dtypes])
    settings = both.phases[0].pool("rollout").settings
    best = min(alone, key=lambda choice: alone[choice].objective)
    assert (settings.rollout_dtype, settings.kv_dtype) == best
    assert both.objective == pytest.approx(alone[best].objective, rel=1e-9)
    with pytest.raises(SpecError, match="there is no dtype named 'fp9'"):
        plan_job(job(pools=rollout(kv_dtype=["bf16", "fp9"])))
    with pytest.raises(SpecError, match="int4_wo is a type of weights alone: nothing is cached in it"):
        plan_job(job(pools=rollout(kv_dtype=["bf16", "int4_wo"])))


def test_precisions_of_equal_bytes_are_judged_each_by_its_own_engine_steps() -> None:
    """8-bit weights that are multiplied in 16 bit take the room of fp8 and more time."""
    pools = [
        {"role": "rollout", "settings": {"rollout_dtype": ["fp8", "int8_wo"], "max_running": 16}},
        {"role": "trainer", "settings": {"backend": "fsdp2"}},
    ]
    context = resolve(job(pools=pools, architecture="Qwen3-8B"))  # asked for a framework, it has no key for int8_wo
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,)).configurations
    judge, alone = Judge(context, task), {}
    for dtype in ("fp8", "int8_wo"):
        chosen = next(each for each in found if each.pool("rollout").settings.rollout_dtype == dtype)
        together = judge.evaluate(demand, chosen).rollouts[0].makespan_s
        alone[dtype] = Judge(context, task).evaluate(demand, chosen).rollouts[0].makespan_s
        assert together == alone[dtype]
    assert alone["fp8"] != alone["int8_wo"]


def test_no_other_choice_takes_the_devices_of_another_task() -> None:
    """Tasks that share the devices: with all of them each would be faster, which is no choice beside others."""
    one = {"prompts_per_step": 64, "group_size": 2, "max_prompt_tokens": 1024, "max_response_tokens": 4096}
    tasks = [{**one, "name": name, "workload": name} for name in ("math", "programming")]
    plan = plan_job(job(nodes=2, sharing="devices", tasks=tasks, architecture="Qwen3-8B", modes=["colocated"]))
    for phase in plan.phases:
        others = [*filter(None, [phase.runner_up]), *phase.next_best, *phase.pareto]
        words = [
            word for differs in (phase.simplest, *phase.ties, *(each.differs for each in others)) for word in differs
        ]
        taken = [int(word.split(" on ")[1].split()[0]) for word in words if word.endswith(" devices")]
        assert others and all(devices <= phase.pool("trainer").devices for devices in taken)
        ups = [*filter(None, [phase.runner_up]), *phase.next_best]
        assert not any(up.loss < 0.0 and up.distinguishable for up in ups)


@pytest.mark.parametrize("bold", [True, False])
def test_gap_bound_regret_and_runner_up_agree(bold: bool) -> None:
    """What takes less than the plan is named with the reason, and the bound is no more than it."""
    plan = plan_job(job(nodes=2, architecture="Qwen3-8B", objective={"minimize": "step_time", "bold": bold}))
    (phase,) = plan.phases
    assert phase.runner_up is not None
    others = [phase.runner_up, *phase.next_best]
    assert plan.screen_regret >= 0.0 and plan.mip_gap == 0.0
    assert all(other.priced >= -1e-12 for other in others)  # by what is minimised, none is better
    least = min(1.0, *(1.0 + other.loss for other in others))
    assert plan.bound <= plan.objective * least * (1 + 1e-9)
    assert all(bool(other.why_not) == (other.loss < 0.0) for other in others)
    words = "\n".join([*summary_lines(plan), runner_up_words(phase)])
    assert ("the least of all that was judged" in words) == (plan.bound > plan.objective * (1 - 5e-4))
    assert ("the plan is nearer to the beaten path" in words) == (phase.runner_up.loss < 0.0)
    if bold:
        assert plan.bound == pytest.approx(plan.objective, rel=1e-3)  # `TIE` alone decides between equals


def test_two_hundred_tasks_are_refused_with_the_reason() -> None:
    tasks = [{**TASK, "name": f"t{number}"} for number in range(200)]
    with pytest.raises(ValueError, match="200 tasks: at most 32"):
        job(tasks=tasks)
    assert len(job(tasks=tasks[:32]).tasks) == 32


@pytest.mark.slow
def test_tasks_over_cores_are_planned_as_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, whatever was judged in another process."""
    tasks = [{**TASK, "name": name, "workload": name} for name in ("math", "programming")]
    found = []
    for cores in (1, 2):
        monkeypatch.setattr(processes, "cores", lambda cores=cores: cores)
        monkeypatch.setattr(decisions, "HALF", 2.0)  # two tasks are few else
        found.append(plan_job(job(tasks=tasks, nodes=2)).to_dict())
    assert found[0] == found[1]


def test_a_bold_plan_is_faster_and_less_simple() -> None:
    plain = plan_job(job(nodes=2))
    bold = plan_job(job(nodes=2, objective={"minimize": "step_time", "bold": True}))
    assert degrees(plain) <= degrees(bold)
    assert bold.phases[0].predicted.rl_step_s <= plain.phases[0].predicted.rl_step_s * (1 + 1e-4)


def degrees(plan: Plan) -> int:
    """Product of all degrees but data parallel, both pools."""
    return int(
        np.prod(
            [
                n
                for role in ("rollout", "trainer")
                for name, n in plan.phases[0].pool(role).layout.model_dump().items()  # type: ignore[arg-type]
                if name.endswith("_parallel") and name not in ("data_parallel", "sequence_parallel")
            ]
        )
    )


def test_groups_of_rl_steps_that_are_alike_are_screened_and_judged_once() -> None:
    question = ask(job(horizon={"rl_steps": 30, "group": 10}))
    decisions = decide(question.context, question.facts, lambda _share, _text: None)
    assert len(decisions) == 3
    assert all(each.screened is decisions[0].screened for each in decisions)


class Named(NamedTuple):
    """What the judge is asked of a configuration here."""

    name: str
    batch: int


def test_a_configuration_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two finalists that preempt become one with a larger cache: it is not a plan's own runner-up."""
    roomy: Any = Named("roomy", 8192)
    monkeypatch.setattr(tuning, "with_more_cache", lambda judge, one: [] if one.configuration is roomy else [roomy])
    monkeypatch.setattr(tuning, "with_parked_trainer", lambda judge, evaluation: None)
    judged: Any = tuning.judge_all
    judge: Any = SimpleNamespace(
        context=SimpleNamespace(job=SimpleNamespace(limits=SimpleNamespace(truncated_fraction=None))),
        evaluate=lambda demand, configuration: SimpleNamespace(configuration=configuration),
    )
    demands: Any = (SimpleNamespace(batch=8192),)
    finalists: Any = [Named("a", 8192), Named("b", 8192)]
    first = judged(judge, demands, finalists, None, lambda share, text: None)
    assert [one.configuration for one in first] == [*finalists, roomy]
    again = judged(judge, demands, [roomy, Named("c", 8192)], None, lambda share, text: None, first)
    assert [one.configuration.name for one in again] == ["a", "b", "roomy", "c"]


def test_a_maximum_that_cuts_too_much_is_not_judged_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths grow: what an earlier group of rl_steps may still cut at, a later one may not."""
    monkeypatch.setattr(tuning, "with_more_cache", lambda judge, evaluation: [])
    monkeypatch.setattr(tuning, "with_parked_trainer", lambda judge, evaluation: None)
    judged: Any = tuning.judge_all
    limits = SimpleNamespace(truncated_fraction=0.05)
    judge: Any = SimpleNamespace(
        context=SimpleNamespace(job=SimpleNamespace(limits=limits)),
        evaluate=lambda demand, one: SimpleNamespace(configuration=one),
    )
    demands: Any = tuple(
        SimpleNamespace(batch=cap, truncated_fraction=cut) for cap, cut in ((8192, 0.2), (16384, 0.01))
    )
    finalists: Any = [Named("a", 8192), Named("a", 16384)]

    def quiet(share: float, text: str) -> None:
        pass

    assert [one.configuration.batch for one in judged(judge, demands, finalists, None, quiet)] == [16384]
    limits.truncated_fraction = None
    assert [one.configuration.batch for one in judged(judge, demands, finalists, None, quiet)] == [8192, 16384]


@pytest.mark.parametrize("limit", ["step", "usd_per_step"])
def test_what_takes_too_long_in_a_group_is_not_chosen_there(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Another group's finalist is dropped beyond the limit; what this group's own screen let pass stays."""
    monkeypatch.setattr(decisions, "usage_of", lambda context, configuration: SimpleNamespace(usd_per_s=1.0))
    kept: Any = decisions._within_limits
    limits = SimpleNamespace(**{"step": None, "usd_per_step": None, limit: 100.0})
    context: Any = SimpleNamespace(job=SimpleNamespace(limits=limits))
    evaluations: Any = tuple(
        SimpleNamespace(configuration=name, rl_step_s=seconds)
        for name, seconds in (("own", 101.0), ("foreign", 99.0), ("slow", 102.0))
    )
    screened: Any = SimpleNamespace(configurations=["own"])
    assert [each.configuration for each in kept(context, screened, evaluations)] == ["own", "foreign"]


@pytest.mark.slow
def test_agents_whose_contexts_are_evicted_get_a_larger_cache() -> None:
    """Closed forms do not see what is read again: stated engines with more memory were 22 % faster.

    Off the beaten path, where shares beside a trainer are free.
    """
    task = {"name": "a", "workload": "software_engineering", "prompts_per_step": 32, "group_size": 8,
            "max_response_tokens": 32768}  # fmt: skip
    wide = {"role": "rollout", "layout": {"tensor_parallel": 4}}
    open_, stated = (
        plan_job(
            job(
                tasks=[task],
                architecture="Qwen3-8B",
                modes=["colocated"],
                nodes=1,
                pools=[wide | settings],
                framework="verl",
                objective={"bold": True},
            )
        )
        for settings in ({}, {"settings": {"memory_fraction": 0.8}})
    )
    assert open_.objective <= stated.objective * 1.005
