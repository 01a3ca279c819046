"""Agents whose engines are refilled at once: what evicted contexts cost, against the events of a long run."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlperf import audit_config, export_plan, plan_job
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.plan.answer.explain import EVICTED, binding
from rlperf.plan.answer.gains import fewer_at_once
from rlperf.plan.answer.prediction import _evicting, prediction_of
from rlperf.plan.judge.at_once import evicted_share, preemptions, refills
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.timeline import flow_in, steady_state
from rlperf.plan.question.context import Context, resolve
from rlperf.plan.question.demand import DRAWS
from rlperf.plan.search.screen import screen
from rlperf.sim.rl_step.ahead import AT, _in_turn, batches_beyond, settled_s
from rlperf.sim.rl_step.between_turns import BetweenTurns, first_steady_s
from rlperf.sim.rl_step.flow import Allowed, Flow, of_turns
from rlperf.sim.rl_step.refilled import interrupted_seconds, refilled
from rlperf.sim.rollout import EngineOptions, Trajectories
from rlperf.sim.rollout.replica import simulate_replica
from rlperf.specs.job import Job
from rlperf.units import human_seconds

COST = EngineStepCost(
    np.array([0.0, 64.0, 8192.0]), np.array([0.002, 0.004, 0.2]), host_s=0.004, decode_per_kv_token_s=2e-7,
    prefill_per_pair_s=1e-9, graph_buckets=np.array([1, 8, 16, 32, 64]),
)  # fmt: skip
GROUP = 8


def agents(seed: int, groups: int, tool_s: float) -> Trajectories:
    """Groups of agents with a prompt of their own, whose contexts grow by what they write and what tools answer."""
    rng = np.random.default_rng(seed)
    n = groups * GROUP
    offsets = np.concatenate([[0], np.cumsum(rng.integers(8, 40, n))])
    response, answer = rng.integers(20, 120, offsets[-1]), rng.integers(0, 300, offsets[-1])
    group, begin = np.repeat(np.arange(groups), GROUP), np.repeat(rng.integers(200, 2000, groups), GROUP)
    grown = np.concatenate([[0], np.cumsum(response + answer)[:-1]])
    owner = np.repeat(np.arange(n), np.diff(offsets))
    prompt = begin[owner] + grown - grown[offsets[:-1]][owner]
    return Trajectories(prompt, response, rng.exponential(tool_s, offsets[-1]), offsets, group, np.zeros(n))


def flow_of(drawn: Trajectories, under_way: int) -> Flow:
    """A flow of one replica with so many trajectories of an rl_step under way."""
    context, added, again = of_turns([drawn])
    first = drawn.prompt_tokens[drawn.offsets[:-1]].astype(np.float64)
    allowed = Allowed(under_way / len(drawn), under_way / len(drawn))
    prompts = replace(added, tokens=float(first.sum()), pairs=float((first**2).sum()) / 2.0)
    return Flow(
        float(len(drawn)), float(drawn.generated_tokens.sum()), prompts, context, added, again,
        allowed=allowed, copies=GROUP, waits=BetweenTurns.of([drawn]),
    )  # fmt: skip


def measured_s(drawn: Trajectories, limits: EngineLimits, under_way: int) -> float:
    """Seconds per rl_step in the middle of a long run: so many are under way, and the next starts as one ends."""
    order = np.random.default_rng(7).permuted(np.tile(np.unique(drawn.group), 4))
    parts = [drawn.take(np.flatnonzero(drawn.group == each)) for each in order]
    counts = np.concatenate([part.turns_per_trajectory for part in parts])
    joined = Trajectories(
        *(np.concatenate([getattr(part, name) for part in parts])
          for name in ("prompt_tokens", "response_tokens", "tool_latency_s")),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        group=np.repeat(np.arange(len(parts)), GROUP), arrival_s=np.zeros(counts.size),
    )  # fmt: skip
    options = EngineOptions(trajectories=under_way)
    ends = np.sort(simulate_replica(joined, COST, limits, options=options).trajectory_finish_s)
    first, last = 2 * under_way, ends.size - under_way
    return float(ends[last] - ends[first]) / (last - first) * len(drawn)


@pytest.mark.parametrize("tool_s", [0.5, 5.0])
def test_the_closed_form_is_the_events_of_a_long_run(tool_s: float) -> None:
    """Caches from a tenth of what is under way to all of it, places from few to all: the form without what is evicted
    and without who waits for a tool stood at 0.3 to 1.0 of these."""
    drawn, under_way = agents(1, 16, tool_s), 32
    flow = flow_of(drawn, under_way)
    whole, off, before = under_way * flow.context, [], []
    for share in (0.1, 0.3, 0.6, 2.0):
        for places in (6, 32):
            limits = EngineLimits(share * whole, max_running=places)
            found = refilled(COST, limits, 1, flow)
            events = measured_s(drawn, limits, under_way)
            off.append(found.seconds / events - 1.0)
            before.append(refilled(COST, limits, 1, replace(flow, waits=None)).seconds / events - 1.0)
    assert max(map(abs, off)) < 0.16 and abs(np.mean(off)) < 0.07
    assert min(before) < -0.4


def test_a_context_is_kept_until_the_cache_is_full() -> None:
    """The equation of `kept_s`, summed literally."""
    drawn = agents(2, 6, 4.0)
    waits, rng = BetweenTurns.of([drawn]), np.random.default_rng(3)
    last = np.zeros(drawn.n_turns, dtype=bool)
    last[drawn.offsets[1:] - 1] = True
    own = (drawn.final_tokens - np.repeat(drawn.beginnings, drawn.turns_per_trajectory))[~last]
    tool = drawn.tool_latency_s[~last]
    for _ in range(50):
        wait_s, rl_step_s = float(rng.uniform(0.0, 3.0)), float(rng.uniform(50.0, 500.0))
        room = float(rng.uniform(0.0, 1.2)) * float((own * (tool + wait_s)).sum()) / rl_step_s
        kept = waits.kept_s(room, wait_s, rl_step_s)
        tokens, pairs = waits.again(kept)
        if np.isinf(kept):
            assert (own * (tool + wait_s)).sum() / rl_step_s <= room * (1 + 1e-9) and tokens == pairs == 0.0
        elif kept < 0.0:
            assert (own * wait_s).sum() / rl_step_s >= room and tokens == pytest.approx(own.sum())
        else:
            assert (own * (np.minimum(tool, kept) + wait_s)).sum() / rl_step_s == pytest.approx(room)
            assert tokens == pytest.approx(own[tool > kept].sum())


def test_more_cache_and_faster_tools_are_never_slower() -> None:
    drawn = agents(4, 24, 3.0)
    flow = flow_of(drawn, 64)
    whole = 64 * flow.context
    caches = [refilled(COST, EngineLimits(each * whole, 64), 1, flow).seconds for each in np.linspace(0.1, 1.5, 15)]
    assert all(more <= less * (1 + 1e-6) for less, more in pairwise(caches))
    quicker = [flow_of(replace(drawn, tool_latency_s=each * drawn.tool_latency_s), 64) for each in (1.0, 0.5, 0.0)]
    tools = [refilled(COST, EngineLimits(0.4 * whole, 64), 1, each).seconds for each in quicker]
    assert all(more <= less * (1 + 1e-6) for less, more in pairwise(tools))


@pytest.mark.parametrize("tool_s", [0.01, 50.0, 5e4])
def test_trajectories_that_mostly_wait_for_their_tools_take_what_these_take(tool_s: float) -> None:
    """Little's law: as many trajectories end as are under way, over the time of each."""
    drawn = agents(6, 16, tool_s)
    flow = flow_of(drawn, 4)
    found = refilled(COST, EngineLimits(np.inf, max_running=64), 1, flow)
    waits = BetweenTurns.of([drawn])
    engine_s = found.running / 4 * found.seconds * 4  # who runs does so in their share of the time
    assert found.seconds * 4 == pytest.approx(waits.tool_total_s + engine_s, rel=1e-4)
    assert found.seconds >= waits.tool_total_s / 4


def test_of_several_steady_states_the_first_is_found() -> None:
    assert first_steady_s(lambda s: 2.0 if s < 3.0 else 9.0, 1.0) == pytest.approx(2.0, rel=1e-5)
    assert first_steady_s(lambda s: 5.0, 5.0) == 5.0


JOB: dict[str, Any] = {
    "architecture": "Qwen2.5-7B", "cluster": "dgx_h100", "nodes": 1, "framework": "areal", "modes": ["async"],
    "limits": {"staleness": 2},
    "tasks": [
        {"name": "software", "workload": "software_engineering", "prompts_per_step": 16, "group_size": 8,
         "max_prompt_tokens": 4096, "max_response_tokens": 28_000}
    ],
    "pools": [
        {"role": "rollout", "devices": 2, "layout": {"tensor_parallel": 1},
         "settings": {"memory_fraction": 0.9, "max_running": 64}},
        {"role": "trainer", "devices": 4, "layout": {"tensor_parallel": 1}},
    ],
}  # fmt: skip


def judged(most: int | None = None, job: dict[str, Any] = JOB) -> tuple[Context, Evaluation]:
    context = resolve(Job.model_validate({**job, "tasks": [{**job["tasks"][0], "max_trajectories": most}]}))
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,), keep=1)
    return context, Judge(context, task).evaluate(demand, found.configurations[0])


@pytest.mark.slow
def test_a_plan_that_runs_ahead_pays_for_contexts_that_are_evicted() -> None:
    """Agents that run ahead stood at less than half of what engines take that read every context again."""
    _, stale = judged(job={**JOB, "limits": {"staleness": 3}})
    events = steady_state(stale, rl_steps=20)
    assert events is not None and stale.rl_step_s == pytest.approx(events.period_s, rel=0.1)
    context, evaluation = judged()
    assert refills(evaluation) and evicted_share(stale) > evicted_share(evaluation) > 0.4
    assert any(words.startswith(f"{EVICTED} (") for words in binding(context, context.tasks[0], evaluation))
    (line,) = _evicting(context, context.tasks[0], evaluation, fewer=True)
    assert line.endswith(" of the rollout: raise memory_fraction or tensor_parallel, or lower max_trajectories")
    fewer_places = {**JOB["pools"][0], "settings": {**JOB["pools"][0]["settings"], "max_running": 16}}
    assert judged(job={**JOB, "pools": [fewer_places, JOB["pools"][1]]})[1].rl_step_s > evaluation.rl_step_s
    (line,) = fewer_at_once(context, context.tasks[0], evaluation)
    assert line.startswith("256 trajectories at once (max_trajectories) instead of 384: rl_step ")
    crowded, many = judged(300)
    (line,) = fewer_at_once(crowded, crowded.tasks[0], many)
    assert line.startswith("200 trajectories at once (max_trajectories) instead")
    assert judged(192)[1].rl_step_s < 0.7 * evaluation.rl_step_s < 0.7 * stale.rl_step_s
    context, few = judged(128)
    assert evicted_share(few) == 0.0 and fewer_at_once(context, context.tasks[0], few) == ()
    events = steady_state(few, rl_steps=20)
    assert events is not None and few.rl_step_s == pytest.approx(events.period_s, rel=0.08)


def test_what_the_program_has_under_way_is_what_fewer_are_told_instead_of() -> None:
    """verl 0.8 has 16 groups of a replica under way, and was told of all four batches that staleness allows."""
    small = {"role": "rollout", "devices": 2, "layout": {"tensor_parallel": 1}}
    pools = [{**small, "settings": {"memory_fraction": 0.45, "max_running": 64}}, JOB["pools"][1]]
    context, evaluation = judged(job={**JOB, "framework": "verl==0.8.0", "pools": pools})
    under_way = flow_in(evaluation).under_way(3.0, 2)
    assert 2 * under_way < 16 * 8 * 2 < 3 * 128
    (line,) = fewer_at_once(context, context.tasks[0], evaluation)
    assert f" trajectories at once (max_trajectories) instead of {2 * under_way:.0f}: " in line
    told = int(line.split()[0])
    assert human_seconds(judged(told, context.job.stated())[1].rl_step_s) in line.partition(" instead of ")[2]


def test_single_turns_that_run_ahead_are_preempted_and_wait_for_no_tool() -> None:
    task = {**JOB["tasks"][0], "name": "math", "workload": "math", "prompts_per_step": 64}
    short = {"role": "rollout", "devices": 2, "layout": {"tensor_parallel": 1}}
    pools = [{**short, "settings": {"memory_fraction": 0.3, "max_running": 1024}}, JOB["pools"][1]]
    context, evaluation = judged(job={**JOB, "tasks": [task], "pools": pools})
    assert refills(evaluation) and preemptions(evaluation) > 1.0
    (line,) = _evicting(context, context.tasks[0], evaluation, fewer=True)
    assert re.match(r"[\d,]+ preemptions per rl_step take ", line) and not fewer_at_once(
        context, context.tasks[0], evaluation
    )


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("most", [None, 64, 16])
@pytest.mark.parametrize(("framework", "mode"), [("areal", "async"), ("openrlhf", "async"), ("verl", "one_step_off")])
def test_the_events_of_a_plan_are_its_closed_form(framework: str, mode: str, most: int | None, caching: bool) -> None:
    """Before, the events waited for a replica with room for a whole group (1.9 times as long where it had room for
    one), read nothing again without prefix caching, and called engines drained whose tools still ran: 0.5 to 2.7."""
    rollout = {**JOB["pools"][0], "devices": 4}
    rollout["settings"] = {**rollout["settings"], "prefix_caching": caching}
    asked = {"framework": framework, "modes": [mode], "limits": {"staleness": 1 if mode == "one_step_off" else 2}}
    _, evaluation = judged(most, {**JOB, **asked, "pools": [rollout, JOB["pools"][1]]})
    events = steady_state(evaluation, rl_steps=20)
    assert events is not None and 0.82 < evaluation.rl_step_s / events.period_s < 1.1


@pytest.mark.parametrize(
    ("framework", "mode", "staleness", "rel"),
    [("nemo_rl", "async", 1, 0.1), ("nemo_rl", "async", 2, 0.15), ("nemo_rl", "async", 4, 0.1),
     ("verl", "one_step_off", 1, 0.02), ("slime", "one_step_off", 1, 0.02), ("openrlhf", "async", 2, 0.05)],
)  # fmt: skip
def test_staleness_is_told_alike(framework: str, mode: str, staleness: int, rel: float) -> None:
    """What the trainer has, engines have not: a staleness of 2 stood at 2.4 of the events, as if three batches ran.

    Where engines drain, events put a trajectory's tools behind its last token: 0.83 of them.
    """
    pools = [{**JOB["pools"][0], "settings": {"memory_fraction": 0.9 if mode == "async" else 0.6, "max_running": 64}}]
    asked = {"framework": framework, "modes": [mode], "limits": {"staleness": staleness}}
    _, evaluation = judged(job={**JOB, **asked, "pools": [*pools, JOB["pools"][1]]})
    events = steady_state(evaluation, rl_steps=30)
    assert events is not None and evaluation.rl_step_s == pytest.approx(events.period_s, rel=rel)


def test_batches_under_way_are_what_the_trainer_has_not() -> None:
    """Little's law, for engines that take S / b seconds: (k + 1) P = S + what passes beside them."""
    rng, k = np.random.default_rng(5), 3
    for _ in range(50):
        response, rest, apart, pause = rng.uniform(50.0, 900.0), rng.uniform(10.0, 300.0), rng.uniform(0.0, 50.0), 0.0
        table = response / (k + AT)[None, :]
        one = [np.array([each]) for each in (pause, rest, apart, 0.0)]
        found = float(settled_s(table, *one)[0])
        exact = (response + rest + apart) / (k + 1)
        if exact > 1.05 * (rest + apart) / (1.0 - AT[0]):  # else the trainer is never waited for
            assert found == pytest.approx(exact, rel=0.02)
            assert k + float(batches_beyond(np.array([exact]), *one[1:])[0]) == pytest.approx(response / exact)


def test_those_under_way_between_two_syncs_are_as_many_as_little_says() -> None:
    lengths = np.sort(np.random.default_rng(1).lognormal(0.0, 0.8, 64))
    lengths /= lengths.mean()
    for mean in (0.4, 1.0, 3.3):
        found = _in_turn(lengths, mean)
        assert found.mean() == pytest.approx(mean, rel=0.05) and found[0] >= found[-1]


@pytest.mark.slow
@pytest.mark.parametrize("most", [16, 32, 48])
def test_environments_for_a_few_groups_are_no_slower_than_for_fewer(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 trajectories of groups of 8 on four replicas, 16 were under way at once in the events.

    Of all draws: with the lengths of four the closed form is 1 to 8 % above the events, whichever they are.
    """
    monkeypatch.setattr("rlperf.plan.question.demand.REPLICATES", DRAWS)
    task = {**JOB["tasks"][0], "workload": "tool_use"}
    pools = [{**JOB["pools"][0], "devices": 4}, JOB["pools"][1]]
    _, evaluation = judged(most, {**JOB, "tasks": [task], "pools": pools})
    events = steady_state(evaluation, rl_steps=80)
    assert events is not None and events.period_s == pytest.approx(evaluation.rl_step_s, rel=0.05)


def test_engines_that_drain_have_one_batch_under_way() -> None:
    """OpenRLHF two batches ahead was told to evict as if three batches ran at once."""
    _, drained = judged(job={**JOB, "framework": "openrlhf"})
    allowed = Allowed.of(drained.framework, "async", 2, drained.demand)
    assert allowed == Allowed() and evicted_share(drained) < 0.1 < evicted_share(judged()[1])


def test_slime_bounds_trajectories_by_what_it_sends_to_an_engine(tmp_path: Path) -> None:
    """Its semaphore is held while tools run (slime/rollout/sglang_rollout.py:94), so that a script alone says it."""
    asked = {**JOB, "framework": "slime", "modes": ["one_step_off"], "limits": {"staleness": 1}}
    asked["tasks"] = [{**JOB["tasks"][0], "max_trajectories": 48}]
    asked["pools"] = [{"role": role, "devices": 4, "layout": {"tensor_parallel": 1}} for role in ("rollout", "trainer")]
    plan = plan_job(Job.model_validate(asked))
    export_plan(plan, tmp_path)
    text = (tmp_path / "config.sh").read_text()
    assert "--sglang-server-concurrency 12 " in text
    (tmp_path / "own.sh").write_text("\n".join(line for line in text.splitlines() if not line.startswith("#")))
    found = audit_config(tmp_path / "own.sh", cluster="dgx_h100", workload="software_engineering", plan=False).predicted
    assert found is not None and found.rl_step_s == pytest.approx(plan.phases[0].predicted.rl_step_s, rel=1e-9)


def test_new_weights_that_interrupt_void_contexts_that_wait() -> None:
    """AReaL clears the cache at every weight sync: what waits for a tool is read anew by its next turn."""
    drawn = agents(5, 16, 5.0)
    flow = flow_of(drawn, 32)
    found = refilled(COST, EngineLimits(np.inf, max_running=32), 1, flow)
    assert 0.0 < found.running < 32 and found.again_s == 0.0
    waits = BetweenTurns.of([drawn])
    own = waits.own[0] / waits.turns
    tokens = (32 - found.running) * own  # Little: whoever does not run waits for a tool
    alone = replace(flow, waits=None)
    limits = EngineLimits(np.inf, max_running=32)
    assert interrupted_seconds(COST, limits, 1, flow, found) - interrupted_seconds(
        COST, limits, 1, alone, replace(found, waiting_s=0.0)
    ) == pytest.approx(found.waiting_s)
    full = float(COST.engine_step_s(0.0, 0.0, float(limits.token_budget), 0.0, 1.0))
    assert found.waiting_s == pytest.approx(tokens / limits.token_budget * full, rel=0.15)


def test_a_plan_takes_the_best_of_the_numbers_that_may_be_under_way(tmp_path: Path) -> None:
    """Engines evict with many at once and wait for tools with few; files name the number, which no key states."""
    asked = {**JOB, "tasks": [{**JOB["tasks"][0], "max_trajectories": [64, 160, 384]}]}
    plan = plan_job(Job.model_validate(asked))
    assert plan.phases[0].settings.max_trajectories == 160
    export_plan(plan, tmp_path)
    assert "max_concurrent_rollouts: 20 " in (tmp_path / "config.yaml").read_text(), "groups of eight"
    audited = audit_config(tmp_path / "config.yaml", plan=False)
    assert audited.predicted is not None and not audited.findings
    assert audited.predicted.rl_step_s == pytest.approx(plan.phases[0].predicted.rl_step_s, rel=1e-9)


@pytest.mark.slow
def test_a_plan_bounds_trajectories_where_its_files_can(tmp_path: Path) -> None:
    """A number that the task states is no better than what is planned where it states none."""
    engines = {"layout": {"tensor_parallel": 2}, "settings": {"memory_fraction": 0.9, "max_running": 64}}
    trainer = {"layout": {"tensor_parallel": 4, "activation_recompute": "none"}, "settings": {"token_budget": 32096}}
    asked = {**JOB, "framework": "slime", "modes": ["colocated"], "limits": {}, "architecture": "Qwen3-8B"}
    asked["tasks"] = [{**JOB["tasks"][0], "prompts_per_step": 64}]
    asked["pools"] = [{"role": "rollout", **engines}, {"role": "trainer", **trainer}]
    plan = plan_job(Job.model_validate(asked))
    phase = plan.phases[0]
    assert phase.settings.max_trajectories == 256
    assert "256 trajectories at once: rollout " in " ".join(phase.predicted.gains)
    stated = {**asked, "tasks": [{**asked["tasks"][0], "max_trajectories": 256}]}
    assert plan.objective <= 1.001 * plan_job(Job.model_validate(stated)).objective
    export_plan(plan, tmp_path)
    assert "--sglang-server-concurrency 64 " in (tmp_path / "config.sh").read_text()
    audited = audit_config(tmp_path / "config.sh", plan=False)
    assert audited.predicted is not None and not audited.findings
    assert audited.predicted.rl_step_s == pytest.approx(phase.predicted.rl_step_s, rel=1e-9)
    verl = plan_job(Job.model_validate({**asked, "framework": "verl"})).phases[0]
    assert verl.settings.max_trajectories is None, "it has no key"


def test_fewer_trajectories_are_advised_where_they_were_judged_to_serve_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 prompts of agents on 16 H100: 1.6 % was evicted, and half as many at once took a fifth longer."""
    context, evaluation = judged()
    (line,) = prediction_of(context, context.tasks[0], evaluation).advice
    assert line.endswith(" of the rollout: raise memory_fraction or tensor_parallel, or lower max_trajectories")
    monkeypatch.setattr("rlperf.plan.answer.prediction.fewer_at_once", lambda *_: ())
    (line,) = prediction_of(context, context.tasks[0], evaluation).advice
    assert line.endswith(" of the rollout: raise memory_fraction or tensor_parallel")
    monkeypatch.setattr("rlperf.plan.answer.prediction._more_cache", lambda _: "")
    (line,) = prediction_of(context, context.tasks[0], evaluation).advice
    assert line.endswith(" of the rollout: fewer trajectories at once would gain nothing")


@pytest.mark.parametrize("framework", ["skyrl", "verl"])
def test_a_looser_limit_on_staleness_is_no_slower(framework: str, tmp_path: Path) -> None:
    """Files that bound no trajectories let all run that the staleness allows: a limit of 4 took twice as long as 1."""
    strict, loose = (
        plan_job(Job.model_validate({**JOB, "framework": framework, "limits": {"staleness": most}})) for most in (1, 4)
    )
    assert loose.objective <= 1.001 * strict.objective
    phase = loose.phases[0]
    assert phase.staleness == 1 and phase.settings.max_trajectories is None
    export_plan(loose, tmp_path)
    audited = audit_config(next(tmp_path.glob("config.*")), plan=False)
    assert audited.predicted is not None
    assert audited.predicted.rl_step_s == pytest.approx(phase.predicted.rl_step_s, rel=1e-9)
