"""Engines on the trainer's devices while it waits: a naive loop, limits, closed form against events, program, keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlperf.api import ask
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.errors import SpecError
from rlperf.explaining import explain
from rlperf.frameworks.export import plan_texts
from rlperf.frameworks.imports import import_config
from rlperf.layout import Layout
from rlperf.plan.answer.gains import gains
from rlperf.plan.answer.memory_uses import memory_uses
from rlperf.plan.compare import job_of_plan
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.timeline import step_view
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import Context, resolve
from rlperf.plan.search.screen import screen
from rlperf.sim.rl_step.rollout_counted import SCREENED_RL_STEPS, Counted, counted_lent_s
from rlperf.sim.rollout.lent import AT, joined_curve_s, joined_s, read_off_s
from rlperf.sim.rollout.rollout import RolloutResult, simulate_rollout
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.job import Job
from rlperf.specs.pool import Settings

COST = EngineStepCost(
    tokens=np.array([0.0, 256.0, 8192.0]), linear_s=np.array([0.008, 0.01, 0.25]), host_s=0.001,
    decode_per_kv_token_s=4e-8, decode_per_request_s=1e-4,
)  # fmt: skip
LIMITS = EngineLimits(kv_tokens=np.inf, max_running=64)
FREE = replace(COST, tokens=np.array([0.0, 1.0]), linear_s=np.zeros(2), host_s=0.0)
"""Nothing but what requests that decode take: reading again is free."""


def responses(seed: int, count: int = 96) -> Trajectories:
    rng = np.random.default_rng(seed)
    return Trajectories.of(rng.integers(50, 150, count), np.ceil(rng.exponential(300.0, count)).astype(int))


def naive_loop(work: Trajectories, replicas: int, more: int, at_s: float) -> float:
    """Engine_step by engine_step: those that run at ``at_s`` stop, and all that is left is dealt anew; the last end."""
    left, context = work.response_tokens.tolist(), work.prompt_tokens.tolist()
    begun = [False] * len(left)
    held = [[i for i in range(len(left)) if i % replicas == k] for k in range(replicas)]

    def run(members: list[int], now: float, until: float) -> float:
        members = list(members)
        while members:
            fresh, old = [i for i in members if not begun[i]], [i for i in members if begun[i]]
            if fresh:
                tokens = sum(context[i] for i in fresh)
                pairs = sum(context[i] * (context[i] + 1) // 2 for i in fresh)
                keys = sum(context[i] + 1 for i in old)
                now += float(COST.engine_step_s(len(old), keys, tokens, pairs, len(fresh)))
            else:
                now += float(COST.decode_s(len(old), sum(context[i] + 1 for i in old)))
            if now > until:
                return until
            for i in list(members):
                context[i], left[i] = context[i] + begun[i], left[i] - 1
                begun[i] = True
                if left[i] == 0:
                    members.remove(i)
        return now

    first = max(run(members, 0.0, at_s) for members in held)
    rest = [[i for i in members if left[i]] for members in held]
    if not any(rest):
        return first
    share, moved = replicas / (replicas + more), []
    for members in rest:
        stays = [i for k, i in enumerate(members) if np.ceil((k + 1) * share - 1e-9) > np.ceil(k * share - 1e-9)]
        moved += [i for i in members if i not in stays]
        members[:] = stays
    for i in moved:  # what it wrote last is in nobody's cache, and is read with the rest
        begun[i], context[i] = False, context[i] + begun[i]
    return max(run(members, at_s, np.inf) for members in [*rest, *(moved[k::more] for k in range(more))])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_replicas_that_join_are_the_naive_loop(seed: int, share: float) -> None:
    work = responses(seed)
    alone = simulate_rollout(work, 2, cost=COST, limits=LIMITS)
    at_s = share * alone.makespan_s
    found = joined_s(work, alone, 2, at_s, cost=COST, limits=LIMITS)
    # a request that ends in the engine_step of the cut is dealt by one and not by the other
    assert found == pytest.approx(naive_loop(work, 2, 2, at_s), rel=0.015)


def test_help_that_costs_nothing_is_never_slower_and_earlier_and_more_of_it_is_better() -> None:
    """As means of many: nobody knows who is long when requests are dealt, so that one rollout may be unlucky."""
    curves = []
    for seed in range(12):
        work = responses(seed)
        alone = simulate_rollout(work, 2, cost=FREE, limits=LIMITS)
        two, six = (joined_curve_s(work, alone, n, cost=FREE, limits=LIMITS) for n in (2, 6))
        assert (read_off_s(np.array([two, six]), 0.5 * alone.makespan_s) <= alone.makespan_s).all()
        curves.append(np.array([two, six]) / alone.makespan_s)
    two, six = np.mean(curves, axis=0)
    assert (two <= 1.003).all() and (six <= two + 0.003).all() and two[0] < 0.7 and six[0] < two[0] - 0.1
    assert (np.diff(two) > 0.0).all() and (np.diff(six) > 0.0).all()


def test_from_the_begin_it_is_a_rollout_on_all_of_them() -> None:
    work = responses(7)
    alone = simulate_rollout(work, 3, cost=COST, limits=LIMITS)
    late = joined_curve_s(work, alone, 3, cost=COST, limits=LIMITS)
    whole = simulate_rollout(work, 6, cost=COST, limits=LIMITS).makespan_s
    assert late[0] == pytest.approx(whole, rel=0.02) and late[-1] == alone.makespan_s
    assert joined_s(work, alone, 3, 2.0 * alone.makespan_s, cost=COST, limits=LIMITS) == alone.makespan_s


def test_between_the_shares_that_are_simulated_it_is_read_off() -> None:
    work = responses(3, 400)
    alone = simulate_rollout(work, 4, cost=COST, limits=LIMITS)
    curve = joined_curve_s(work, alone, 4, cost=COST, limits=LIMITS)
    for share in (0.05, 0.25, 0.55, 0.85):
        at_s = share * alone.makespan_s
        exact = joined_s(work, alone, 4, at_s, cost=COST, limits=LIMITS)
        assert read_off_s(curve[None], [at_s])[0] == pytest.approx(exact, rel=0.03)
    worse = np.linspace(11.0, 12.0, len(AT))
    worse[-1] = 10.0
    assert read_off_s(worse[None], [5.0]).tolist() == [10.0]  # who moves reads again: then nobody joins


def test_those_that_may_be_last_tell_when_it_ends() -> None:
    """Of 12 replicas two are simulated: as sums of many rollouts a thousandth less, of each one a few hundredths."""
    ratios = []
    for seed in range(8):
        work = responses(seed, 480)
        alone = simulate_rollout(work, 6, cost=COST, limits=LIMITS)
        whole, few = (joined_curve_s(work, alone, 6, cost=COST, limits=LIMITS, heaviest=count) for count in (None, 1))
        assert (few <= whole).all() and few[-1] == alone.makespan_s
        ratios.append(few / whole)
    assert np.min(ratios) > 0.93 and np.mean(ratios) > 0.985


def test_caches_and_places_that_bind_nobody_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    context = resolve(job_of([True]))
    demand = context.tasks[0].source.demand(context.tasks[0].batches[0], None, 0)
    counted, simulated = Counted(demand), list[EngineLimits]()

    def alone(*asked: Any, limits: EngineLimits, **rest: Any) -> RolloutResult:
        simulated.append(limits)
        return simulate_rollout(*asked, limits=limits, **rest)

    monkeypatch.setattr("rlperf.sim.rl_step.rollout_counted.simulate_rollout", alone)
    kv_tokens, running = np.array([3e4, 4e5, 5e5, 5e5, 5e5]), np.array([32, 32, 32, 40, 8])
    layout = Layout.of(data_parallel=np.full(5, 4)).flat()
    curves = counted_lent_s(Settings(), (COST,), layout, np.zeros(5, dtype=np.int64), kv_tokens, running, counted, 8)
    each_of = SCREENED_RL_STEPS
    assert [(each.kv_tokens, each.max_running) for each in simulated[::each_of]] == [(3e4, 32), (4e5, 32), (5e5, 8)]
    assert (curves[1] == curves[2]).all() and (curves[1] != curves[[0, 4]]).any(axis=1).all()


# -- jobs ---------------------------------------------------------------------------------------------------------


def job_of(
    borrows: list[bool], framework: str = "verl==main", mode: str = "one_step_off", rollout: int = 4, **task: Any
) -> Job:
    return Job.model_validate(
        {
            "architecture": "Qwen3-4B", "cluster": "dgx_h100", "nodes": 2, "framework": framework, "modes": [mode],
            "limits": {"staleness": 1}, "objective": {"minimize": "step_time", "bold": True},
            "tasks": [{"name": "t", "workload": "math", "prompts_per_step": 16, "group_size": 8, "mini_batch": 16,
                       "max_response_tokens": 8192, **task}],
            "pools": [{"role": "rollout", "devices": rollout, "layout": {"tensor_parallel": 1},
                       "settings": {"borrows": borrows, "max_running": 32, "memory_fraction": 0.8}},
                      {"role": "trainer", "devices": 16 - rollout}],
        }
    )  # fmt: skip


def judged(job: Job) -> tuple[Context, Evaluation, float]:
    """Context, the judged best of the screen, and the screen's seconds of it."""
    context = resolve(job)
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,), keep=1)
    return context, Judge(context, task).evaluate(demand, found.configurations[0]), float(found.rl_step_s[0])


@pytest.mark.parametrize(("framework", "mode"), [("verl==main", "one_step_off"), ("slime", "disaggregated")])
@pytest.mark.parametrize("rollout", [4, 8])
def test_closed_form_is_the_events(framework: str, mode: str, rollout: int) -> None:
    _, evaluation, closed = judged(job_of([True], framework, mode, rollout))
    events = evaluation.seconds.rl_step_s[:SCREENED_RL_STEPS]
    assert float(events.mean()) == pytest.approx(closed, rel=0.03)
    assert (evaluation.seconds.rollout_s < 0.95 * evaluation.rollout.makespan_s).all()
    assert step_view(evaluation).timeline.rl_step_s == pytest.approx(float(evaluation.seconds.rl_step_s[0]), rel=1e-6)


def test_the_program_chooses_as_brute_force_does_and_says_what_they_gained() -> None:
    def planned(borrows: list[bool]) -> tuple[float, bool | None, tuple[str, ...]]:
        phase = plan_job(resolve(job_of(borrows))).phases[0]
        pool = next(each for each in phase.pools if each.role == "rollout")
        return phase.predicted.rl_step_s, pool.settings.borrows, phase.predicted.gains

    without, with_them, found = planned([False]), planned([True]), planned([False, True])
    assert with_them[0] < 0.9 * without[0]
    assert found[:2] == (pytest.approx(with_them[0], rel=1e-6), True)
    assert found[2][0].startswith("12 engines on the trainer's devices while it waits, in 4 of 4 rl_steps: rollout ")


def test_engines_of_their_own_and_on_lent_devices_are_not_crossed_past_what_the_risk_allows() -> None:
    """Engines that fit beside one trainer were planned on the devices of another (a risk of 0.6 % for 0.5)."""
    settings = {"borrows": [False, True], "kv_dtype": "fp8"}
    task = {"name": "t", "workload": "math", "prompts_per_step": 64, "group_size": 8, "max_response_tokens": "16k"}
    asked = {
        "architecture": "Qwen3-14B", "cluster": "dgx_h100", "nodes": 2, "framework": "verl", "modes": ["one_step_off"],
        "limits": {"staleness": 1}, "tasks": [task], "pools": [{"role": "rollout", "settings": settings}],
    }  # fmt: skip
    plan = plan_job(resolve(Job.model_validate(asked)))
    assert all(use.total <= use.allowed for use in plan.phases[0].predicted.memory_bytes.values())


def test_a_trainer_that_never_waits_lends_nothing() -> None:
    context, lent, _ = judged(job_of([True], rollout=12, max_response_tokens=512))
    alone = Judge(context, context.tasks[0]).evaluate(lent.demand, lent.configuration.with_rollout(borrows=False))
    assert (lent.seconds.rollout_s == lent.rollout.makespan_s).all()
    assert lent.rl_step_s == pytest.approx(alone.rl_step_s, rel=1e-9)
    assert "in 0 of 4 rl_steps" in gains(context, context.tasks[0], lent)[0]


def test_a_plan_that_borrows_is_held_against_others_and_explained_as_it_is_planned() -> None:
    """`compare` and what-ifs refused what `plan` had found; `explain` told a rollout that nothing joins."""
    plan = plan_job(ask(job_of([True]), to_plan=True).context)
    job = job_of_plan(plan)
    assert ask(job).context.tasks[0].batches[0] == ask(plan.job).context.tasks[0].batches[0]
    told = explain(plan).causes.rl_step_s
    assert told == pytest.approx(plan.phases[0].predicted.rl_step_s, rel=1e-3)


def test_engines_stand_beside_the_trainers_states() -> None:
    context, evaluation, _ = judged(job_of([True]))
    uses = memory_uses(context, evaluation)
    assert "trainer, idle" in uses["rollout"].parts and "engine, asleep" in uses["trainer"].parts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "async"}, "mode async, in which no trainer waits"),
        ({"mode": "colocated"}, "mode colocated, in which no trainer waits"),
        ({"mode": "one_step_off", "framework": "nemo_rl"}, "mode one_step_off, in which no trainer waits"),
        ({"workload": "searching"}, "several turns"),
        ({"max_trajectories": 64}, "max_trajectories"),
    ],
)
def test_what_is_not_predicted_beside_it_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=f"borrows is not predicted with .*{words}"):
        resolve(job_of([True, False], **changes))


def test_only_verl_from_main_has_a_key(tmp_path: Path) -> None:
    for framework in ("verl==0.9", "slime", "areal", "openrlhf", "trl", "skyrl", "rlinf", "nemo_rl"):
        with pytest.raises(SpecError, match=r"has no key for rollout\.borrows"):
            ask(job_of([True], framework), to_plan=True)
    texts = plan_texts(plan_job(resolve(job_of([True], rollout=8))), "verl==main")
    text = next(each for each in texts.values() if "enable_switch: true" in each)
    for number, written in enumerate((text, text.replace("enable_switch: true", "enable_switch: false"))):
        file = tmp_path / f"{number}.yaml"
        file.write_text(written)
        assert import_config([file], "verl==main").run.rollout.borrows is (number == 0)
