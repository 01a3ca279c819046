"""Replicas that read prompts for the others: a naive loop, limits, closed form against events, brute force, keys."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.cost.reject import Reject
from rlperf.errors import SpecError
from rlperf.frameworks.export import plan_texts
from rlperf.frameworks.imports import import_config
from rlperf.plan.answer.gains import gains
from rlperf.plan.answer.prediction import assumptions, idle_fractions
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import resolve
from rlperf.plan.search.rollout_columns import rollout_columns
from rlperf.plan.search.screen import screen
from rlperf.sim.rl_step.rollout_counted import SCREENED_RL_STEPS
from rlperf.sim.rollout.apart import Apart, simulate_apart, writing_cost, written
from rlperf.sim.rollout.rollout import simulate_rollout
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.job import Job

COST = EngineStepCost(
    tokens=np.array([0.0, 256.0, 8192.0]), linear_s=np.array([0.008, 0.01, 0.25]), host_s=0.001,
    decode_per_kv_token_s=4e-8, prefill_per_request_s=2e-5, prefill_per_pair_s=2e-9,
    mixed_linear_s=np.array([0.015, 0.015, 0.25]),
)  # fmt: skip
LIMITS = EngineLimits(kv_tokens=np.inf, max_running=64)


def agents(seed: int, count: int = 24, most_turns: int = 6) -> Trajectories:
    """Turns with tools between them; a context is all that came before."""
    rng = np.random.default_rng(seed)
    turns = rng.integers(1, most_turns + 1, count)
    offsets = np.concatenate([[0], np.cumsum(turns)]).astype(np.int64)
    responses, answers = rng.integers(2, 150, offsets[-1]), rng.integers(20, 3000, offsets[-1])
    owner = np.repeat(np.arange(count), turns)
    grown = np.concatenate([[0], np.cumsum(responses + answers)])[:-1]
    prompts = rng.integers(200, 4000, count)[owner] + grown - grown[offsets[owner]]
    latency = rng.exponential(1.0, offsets[-1])
    return Trajectories(prompts, responses, latency, offsets, np.arange(count, dtype=np.int64), np.zeros(count))


@dataclass(eq=False)
class Engine:
    """One replica of the naive loop: queued (trajectory, when), and what it computes now."""

    queue: list[tuple[float, int]] = field(default_factory=list)
    running: dict[int, list[int]] = field(default_factory=dict)
    free_s: float = 0.0


def naive_loop(work: Trajectories, readers: int, writers: int, apart: Apart) -> float:
    """Engine_step by engine_step over all replicas at once, each turn read, sent, written; the end of the last [s]."""
    cost, budget = writing_cost(COST), LIMITS.token_budget
    read, write = [Engine() for _ in range(readers)], [Engine() for _ in range(writers)]
    link = [0.0] * readers
    turn, kept = work.offsets[:-1].tolist(), [0] * len(work)
    for i in range(len(work)):
        read[i % readers].queue.append((0.0, i))
    part: list[dict[int, int]] = [{} for _ in range(readers)]
    end = 0.0
    while True:
        acts = [(max(e.free_s, 0.0 if e.running else min(e.queue)[0]), k) for k, e in enumerate(read + write)
                if e.running or e.queue]  # fmt: skip
        if not acts:
            return end
        now, k = min(acts)
        if k < readers:
            engine, left, requests, tokens, pairs, done = read[k], budget, 0, 0, 0, []
            for at, i in sorted(engine.queue):
                if at > now or left <= 0:
                    break
                start = part[k].get(i, min(kept[i], int(work.prompt_tokens[turn[i]]) - 1) // 16 * 16)
                size = min(left, int(work.prompt_tokens[turn[i]]) - start)
                left, requests, tokens = left - size, requests + 1, tokens + size
                pairs += size * start + size * (size + 1) // 2
                part[k][i] = start + size
                if start + size == work.prompt_tokens[turn[i]]:
                    done.append((at, i))
            engine.free_s = now + float(COST.engine_step_s(0, 0, tokens, pairs, requests))
            for entry in done:
                i = entry[1]
                engine.queue.remove(entry)
                del part[k][i]
                kept[i] = int(work.prompt_tokens[turn[i]])
                link[k] = max(link[k], engine.free_s) + apart.token_s * int(work.prompt_tokens[turn[i]])
                write[i % writers].queue.append((link[k] + apart.message_s, i))
            continue
        engine = write[k - readers]
        keys, begun = sum(context for context, _ in engine.running.values()), []
        for entry in sorted(engine.queue):
            if entry[0] <= now and len(engine.running) < LIMITS.max_running:
                begun.append(entry[1])
                engine.queue.remove(entry)
                context, more = int(work.prompt_tokens[turn[entry[1]]]), int(work.response_tokens[turn[entry[1]]])
                engine.running[entry[1]] = [context + 1, max(more - 1, 1)]
        old, size = len(engine.running) - len(begun), len(engine.running)
        pairs = sum(engine.running[i][0] for i in begun)
        step = cost.engine_step_s(old, keys + old, len(begun), pairs, len(begun)) if begun else cost.decode_s(
            size, keys + size
        )  # fmt: skip
        engine.free_s = now + float(step)
        for i, each in list(engine.running.items()):
            each[0], each[1] = each[0] + 1, each[1] - 1
            if each[1] == 0:
                del engine.running[i]
                end = max(end, engine.free_s)
                if turn[i] + 1 < work.offsets[i + 1]:
                    read[i % readers].queue.append((engine.free_s + float(work.tool_latency_s[turn[i]]), i))
                    turn[i] += 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("readers", [1, 2])
def test_both_kinds_in_turn_are_the_naive_loop_of_all_at_once(seed: int, readers: int) -> None:
    apart = Apart(readers, 2e-6, 5e-4)
    single = agents(seed, most_turns=1)
    found = simulate_apart(single, 4, apart, cost=COST, limits=LIMITS).makespan_s
    assert found == pytest.approx(naive_loop(single, readers, 4 - readers, apart), rel=0.005)
    several = agents(seed)
    found = simulate_apart(several, 4, apart, cost=COST, limits=LIMITS).makespan_s
    assert found == pytest.approx(naive_loop(several, readers, 4 - readers, apart), rel=0.03)


def test_prompts_that_cost_nothing_to_read_and_send_leave_the_writers_alone() -> None:
    rng = np.random.default_rng(1)
    work = Trajectories.of(rng.integers(100, 900, 48), rng.integers(50, 900, 48))
    free = replace(COST, tokens=np.array([0.0, 256.0]), linear_s=np.zeros(2), mixed_linear_s=None, host_s=0.0,
                   prefill_per_request_s=0.0, prefill_per_pair_s=0.0, decode_per_request_s=1e-3)  # fmt: skip
    found = simulate_apart(work, 4, Apart(1), cost=free, limits=LIMITS)
    alone = simulate_rollout(work, 3, cost=free, limits=LIMITS)
    assert found.makespan_s == pytest.approx(alone.makespan_s, rel=0.005)  # but the one engine_step of its first token
    assert found.generated_tokens == alone.generated_tokens and len(found.readers) == 1


def test_a_slower_link_and_slower_reading_are_never_faster() -> None:
    work = agents(3)
    links = [Apart(1, each * 2e-6, each * 1e-3) for each in (0.0, 1.0, 10.0, 100.0)]
    ends = [simulate_apart(work, 3, each, cost=COST, limits=LIMITS).makespan_s for each in links]
    assert ends == sorted(ends) and ends[-1] > 1.05 * ends[0]
    slower = [replace(COST, prefill_per_pair_s=each * 2e-9) for each in (1.0, 10.0)]
    reads = [simulate_apart(work, 3, links[0], cost=each, limits=LIMITS).makespan_s for each in slower]
    assert reads[1] > reads[0]


def test_readers_bind_where_prompts_are_long() -> None:
    work = Trajectories.of(np.full(64, 8000), np.full(64, 4))
    steps = 64 * 8000 / LIMITS.token_budget
    reading_s = steps * float(COST.engine_step_s(0, 0, LIMITS.token_budget, 0, 1)) + 64 * 2e-9 * 8000**2 / 2
    one, two = (simulate_apart(work, 6, Apart(n), cost=COST, limits=LIMITS).makespan_s for n in (1, 2))
    assert one == pytest.approx(reading_s, rel=0.05)
    assert two == pytest.approx(reading_s / 2, rel=0.05)


def test_nobody_left_to_write_is_refused() -> None:
    with pytest.raises(SpecError, match="none writes"):
        simulate_apart(agents(0), 2, Apart(2), cost=COST, limits=LIMITS)
    context = resolve(job_of([2]))
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    none, some = (rollout_columns(context, task.architecture, demand, devices) for devices in (2, 4))
    assert none.count and (none.flags != 0).all() and (none.flags == int(Reject.READERS)).any()
    assert (some.flags == 0).any()


def test_what_writers_serve_has_come_with_its_first_token() -> None:
    served = written(agents(0))
    assert (served.cached_tokens == served.prompt_tokens - 1).all()
    assert (served.final_tokens >= agents(0).final_tokens).all()


# -- jobs ---------------------------------------------------------------------------------------------------------


def job_of(readers: list[int], workload: str = "math", framework: str = "slime", **task: Any) -> Job:
    return Job.model_validate(
        {
            "architecture": "Qwen3-4B", "cluster": "dgx_h100", "nodes": 1, "framework": framework, "engine": "sglang",
            "tasks": [{"name": "t", "workload": workload, "prompts_per_step": 32, "group_size": 8,
                       "max_prompt_tokens": 4096, "max_response_tokens": 4096, **task}],
            "pools": [{"role": "rollout", "layout": {"tensor_parallel": 1},
                       "settings": {"prefill_replicas": readers, "max_running": 64, "memory_fraction": 0.8}},
                      {"role": "trainer", "layout": {"tensor_parallel": 2, "context_parallel": 1}}],
        }
    )  # fmt: skip


@pytest.mark.parametrize("workload", ["math", "searching"])
@pytest.mark.parametrize("readers", [1, 2])
def test_closed_form_is_the_events(workload: str, readers: int) -> None:
    context = resolve(job_of([readers], workload))
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,), keep=1)
    judged = Judge(context, task).evaluate(demand, found.configurations[0])
    columns = rollout_columns(context, task.architecture, demand, 8)
    closed = columns.makespan_s[columns.flags == 0]
    assert closed.size == 1
    events = judged.rollout.makespan_s[:SCREENED_RL_STEPS]
    assert float(events.mean()) == pytest.approx(float(closed[0]), rel=0.03)
    assert judged.rollout.writers.tolist() == [8 - readers] * len(demand.tables)


def test_the_program_chooses_as_brute_force_does() -> None:
    def planned(readers: list[int]) -> tuple[float, int | None]:
        phase = plan_job(resolve(job_of(readers, "searching"))).phases[0]
        pool = next(each for each in phase.pools if each.role == "rollout")
        return phase.predicted.rl_step_s, pool.settings.prefill_replicas

    pinned = [planned([each]) for each in (0, 1, 2)]
    assert [chosen for _, chosen in pinned] == [0, 1, 2]
    best = min(pinned)
    found = planned([0, 1, 2])
    assert found[0] == pytest.approx(best[0], rel=1e-6)
    assert found[1] == best[1]


def test_with_turns_they_are_refused_where_the_rollout_runs_ahead() -> None:
    ahead = {"modes": ["async"], "limits": {"staleness": 4}}
    job = Job.model_validate({**job_of([0, 2], "searching", "verl").model_dump(exclude_unset=True), **ahead})
    with pytest.raises(SpecError, match="not predicted in modes that run ahead"):
        resolve(job)
    resolve(Job.model_validate({**job_of([0, 2], "math", "verl").model_dump(exclude_unset=True), **ahead}))


@pytest.mark.parametrize("readers", [1, 7])
def test_all_replicas_are_counted(readers: int) -> None:
    context = resolve(job_of([readers], "searching"))
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    evaluation = Judge(context, task).evaluate(demand, screen(context, task, (demand,), keep=1).configurations[0])
    assert evaluation.rollouts[0].all_devices == 8
    assert 0.0 < sum(idle_fractions(evaluation).values()) <= 1.0
    assert not any("simulated" in note for note in assumptions(context, evaluation))


def test_a_plan_says_what_they_gained() -> None:
    context = resolve(job_of([1]))
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,), keep=1)
    evaluation = Judge(context, task).evaluate(demand, found.configurations[0])
    (line,) = gains(context, task, evaluation)
    assert line.startswith("prompts read by 1 of 8 replicas (") and "times as fast" in line


def test_slime_and_verl_have_a_key_and_read_it_back(tmp_path: Path) -> None:
    import rlperf

    for framework, key in (("slime", "--prefill-num-servers 2"), ("verl", "decode_replicas: 3")):
        plan = rlperf.plan_job(job_of([2], framework=framework))
        name, text = next(each for each in plan_texts(plan, framework).items() if key in each[1])
        file = tmp_path / framework / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        assert import_config([file], framework).run.rollout.prefill_replicas == 2


def test_a_plan_over_two_nodes_has_only_groups_that_fit_into_one() -> None:
    """verl places an engine that reads and those that write for it on one node: one reader of 16 is no plan."""
    import rlperf

    for readers, most in ((1, 8), (2, 16)):
        plan = rlperf.plan_job(job_of([readers], framework="verl").model_copy(update={"nodes": 2}))
        pool = next(each for each in plan.phases[0].pools if each.role == "rollout")
        assert pool.devices <= most and pool.settings.prefill_replicas == readers
        assert plan_texts(plan, "verl")


@pytest.mark.parametrize("framework", ["nemo_rl", "openrlhf", "areal", "trl", "skyrl", "rlinf"])
def test_frameworks_without_a_key_refuse_it_by_name(framework: str) -> None:
    import rlperf

    with pytest.raises(SpecError, match=r"no key for rollout\.prefill_replicas"):
        rlperf.plan_job(job_of([1], framework=framework))


def test_an_audit_of_turns_that_run_ahead_is_of_engines_that_read_their_own_prompts(tmp_path: Path) -> None:
    """Neither memory nor time was predicted, as nothing tells what engines gain there that read for others."""
    from rlperf.files import audit_config
    from rlperf.frameworks.audit.verdict import lines_of, verdict_of

    said = "actor_rollout_ref.rollout.disaggregation.enabled=True "
    keys = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-4B algorithm.adv_estimator=grpo "
        "data.train_batch_size=32 actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=4 "
        "trainer.v1.separate_async.parameter_sync_step=2 actor_rollout_ref.actor.use_dynamic_bsz=True "
        "actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.checkpoint_engine.backend=nccl "
        "actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.v1.trainer_mode=separate_async "
        "trainer.nnodes=1 trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.nnodes=1 "
        "actor_rollout_ref.rollout.n_gpus_per_node=8 actor_rollout_ref.rollout.disaggregation.decode_replicas=3 "
    )
    found = []
    for name, text in (("apart.sh", keys + said), ("own.sh", keys)):
        (tmp_path / name).write_text(text)
        found.append(audit_config(tmp_path / name, cluster="dgx_h100", plan=False))
    apart, own = found
    assert apart.predicted is not None and own.predicted is not None and not own.cautions
    assert apart.predicted.rl_step_s == own.predicted.rl_step_s
    verdict = verdict_of(apart)
    assert verdict is not None and any("as if every engine read its own prompts" in line for line in lines_of(verdict))
