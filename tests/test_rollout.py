"""Rollouts: hand calculations, routing, lost seconds, policies for the tail, reward, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.errors import SpecError
from rlperf.sim.rollout import (
    EngineOptions,
    GroupSource,
    PartialRollouts,
    ReplicaCosts,
    Speculation,
    Trajectories,
    simulate_replica,
    simulate_rollout,
    take_census,
)
from rlperf.sim.rollout.routing import Routing
from rlperf.sim.rollout.step_seconds import tabulated
from rlperf.sim.rollout.tail import first_groups, generated_at
from rlperf.workload.lengths import LengthTable
from studies.rollout_tail.policies import DynamicSampling, Synchronous, TailBatching

from .token_loop import TokenLoop

SECOND = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=1.0)
"""Every engine_step takes one second."""
LINEAR = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=1.0, decode_per_request_s=0.1)
ROOMY = EngineLimits(kv_tokens=np.inf, max_running=10_000)


def many(seed: int, n: int = 64, groups: int = 16) -> Trajectories:
    rng = np.random.default_rng(seed)
    prompt = np.repeat(rng.integers(20, 80, groups), n // groups)
    return Trajectories.of(prompt, rng.geometric(0.01, n), group=np.arange(n) // (n // groups))


def test_max_running_makes_a_queue() -> None:
    """Two at once: 3 and 9 begin; the third enters when the first has ended at 3 s, and needs 3 steps more."""
    timeline = simulate_replica(Trajectories.of(4, [3, 9, 3]), SECOND, EngineLimits(np.inf, max_running=2))
    assert timeline.finish_s.tolist() == [3.0, 9.0, 6.0]
    assert timeline.scheduled_s.tolist() == [0.0, 0.0, 3.0]
    assert timeline.ttft_s.tolist() == [1.0, 1.0, 4.0]


def test_token_budget_cuts_prompts() -> None:
    """Budget 10: steps of 10, 9 + 1 decode ... the second prompt of 15 is complete in the third step."""
    limits = EngineLimits(np.inf, max_running=8, token_budget=10, prefix_caching=False)
    timeline = simulate_replica(Trajectories.of([8, 15], [6, 1]), SECOND, limits)
    # step 1: 8 + 2; step 2: 1 decode + 9; step 3: 1 decode + 4
    assert timeline.first_token_s.tolist() == [1.0, 3.0]
    assert timeline.segments.prefill_tokens[:3].tolist() == [10, 9, 4]
    assert timeline.finish_s.tolist() == [6.0, 3.0]


def test_prefill_first_stalls_decodes() -> None:
    limits = EngineLimits(np.inf, max_running=8, token_budget=10, chunked_prefill=False, prefix_caching=False)
    timeline = simulate_replica(Trajectories.of([8, 15], [6, 1]), SECOND, limits)
    assert timeline.first_token_s.tolist() == [1.0, 2.0]  # the second prompt alone, although it is above the budget
    assert timeline.finish_s.tolist() == [7.0, 2.0]
    assert timeline.segments.stalled.tolist()[:2] == [0, 1]


def test_preemption_recomputes() -> None:
    """4 blocks of 4: two requests of 4 + 8 tokens do not fit to their ends; the later one starts again."""
    limits = EngineLimits(16, max_running=8, block_tokens=4, prefix_caching=False, watermark=0.0)
    timeline = simulate_replica(Trajectories.of(4, [8, 8]), SECOND, limits)
    # both decode to 8 tokens (5 steps); the first takes a third block, the second is evicted with 5 tokens generated,
    # waits until 8 s, prefills 4 + 5 tokens (its 6th token) and decodes two more
    assert timeline.preemptions == 1
    assert timeline.finish_s.tolist() == [8.0, 11.0]
    assert timeline.segments.recomputed.sum() == 8


def test_contexts_evicted_while_their_tools_run_are_computed_again() -> None:
    """A context of 32 tokens waits for its tool; another of up to 64 needs one of its blocks, or has room beside it."""
    turns = Trajectories(
        prompt_tokens=np.array([17, 33, 33]), response_tokens=np.array([16, 1, 31]),
        tool_latency_s=np.array([20.0, 0, 0]), offsets=np.array([0, 2, 3]), group=np.array([0, 1]),
        arrival_s=np.array([0.0, 16.5]),
    )  # fmt: skip
    tight, roomy = (
        simulate_replica(turns, SECOND, EngineLimits(tokens, max_running=8, block_tokens=16, watermark=0.0))
        for tokens in (80, 128)
    )
    assert tight.preemptions == roomy.preemptions == 0
    assert (tight.hit_tokens, tight.segments.recomputed.sum()) == (16, 16)
    assert (roomy.hit_tokens, roomy.segments.recomputed.sum()) == (32, 0)


def test_prefix_caching_within_a_group_and_across_turns() -> None:
    turns = Trajectories(
        prompt_tokens=np.array([33, 33, 80]), response_tokens=np.array([5, 15, 2]),
        tool_latency_s=np.array([0, 4.0, 0]), offsets=np.array([0, 1, 3]), group=np.array([7, 7]),
        arrival_s=np.zeros(2),
    )  # fmt: skip
    timeline = simulate_replica(turns, SECOND, ROOMY)
    # second of the group: 32 of 33 tokens; its next turn: 33 + 15 - 1 tokens were computed, 2 full blocks of 16
    assert timeline.hit_tokens == 32 + 32
    assert timeline.arrival_s.tolist() == [0.0, 0.0, 19.0]
    assert timeline.finish_s.tolist() == [5.0, 15.0, 21.0]
    assert timeline.tool_wait_s == pytest.approx(4.0)


def test_bounded_tools_queue() -> None:
    offsets = np.array([0, 2, 4])
    turns = Trajectories(np.array([4, 9, 4, 9]), np.array([1, 1, 1, 1]), np.array([10.0, 0, 10.0, 0]), offsets,
                         np.array([0, 1]), np.zeros(2))  # fmt: skip
    free = simulate_replica(turns, SECOND, ROOMY)
    one = simulate_replica(turns, SECOND, ROOMY, options=EngineOptions(tool_concurrency=1))
    assert free.trajectory_finish_s.tolist() == [12.0, 12.0]
    assert one.trajectory_finish_s.tolist() == [12.0, 22.0]


def test_an_environment_that_is_full_starts_the_next_trajectory_as_one_ends() -> None:
    """Two turns of 2 tokens with a tool of 10 s between; one at a time holds its place while its tool runs."""
    turns = Trajectories(
        prompt_tokens=np.array([1, 4, 1, 4]), response_tokens=np.array([2, 2, 2, 2]),
        tool_latency_s=np.array([10.0, 0.0, 10.0, 0.0]), offsets=np.array([0, 2, 4]), group=np.array([0, 1]),
        arrival_s=np.zeros(2),
    )  # fmt: skip
    limits = EngineLimits(kv_tokens=np.inf, max_running=8)
    together, alone = (
        simulate_replica(turns, SECOND, limits, options=EngineOptions(trajectories=most)).trajectory_finish_s
        for most in (2, 1)
    )
    first = simulate_replica(turns.take(np.array([0])), SECOND, limits).trajectory_finish_s[0]
    assert alone.tolist() == pytest.approx([first, 2 * first])
    assert together.max() < 1.5 * first
    single = Trajectories.of(1, [5, 5, 5, 5])
    bound = simulate_replica(single, SECOND, limits, options=EngineOptions(trajectories=2))
    places = simulate_replica(single, SECOND, EngineLimits(kv_tokens=np.inf, max_running=2))
    assert bound.finish_s.tolist() == pytest.approx(places.finish_s.tolist())


def test_speculation_gains_its_expected_tokens() -> None:
    """k = 3, a = 0.5: 1.875 tokens a step, so 150 tokens after the first take 80 steps."""
    options = EngineOptions(speculation=Speculation(3, 0.5, draft_s=0.5))
    timeline = simulate_replica(Trajectories.of(4, [151]), SECOND, ROOMY, options=options)
    assert timeline.engine_steps == 81
    assert timeline.makespan_s == pytest.approx(1.0 + 80 * 1.5)


def test_graph_buckets_pad_the_batch() -> None:
    cost = EngineStepCost(np.array([0.0, 8.0]), np.array([0.0, 8.0]), graph_buckets=np.array([4.0, 8.0]))
    timeline = simulate_replica(Trajectories.of(1, [11] * 5), cost, ROOMY)
    assert timeline.makespan_s == pytest.approx(5.0 + 10 * 8.0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.5, 2.0, 10.0]))
def test_all_costs_scaled_scale_the_makespan(seed: int, scale: float) -> None:
    trajectories = many(seed)
    limits = EngineLimits(4000, max_running=20, token_budget=128)
    slow = EngineStepCost(LINEAR.tokens, LINEAR.linear_s, LINEAR.host_s * scale, 0.0, 0.0, 0.1 * scale)
    base = simulate_replica(trajectories, LINEAR, limits).makespan_s
    assert simulate_replica(trajectories, slow, limits).makespan_s == pytest.approx(scale * base, rel=1e-9)


@pytest.mark.parametrize("routing", ["round_robin", "static_group", "least_loaded", "prefix_aware"])
def test_every_routing_serves_every_trajectory_once(routing: Routing) -> None:
    trajectories = many(1)
    limits = EngineLimits(np.inf, max_running=4)
    result = simulate_rollout(trajectories, 3, cost=LINEAR, limits=limits, routing=routing)
    assert sorted(np.concatenate(result.members).tolist()) == list(range(64))
    assert result.finish_s.min() > 0
    assert result.makespan_s == pytest.approx(result.replica_finish_s.max())
    if routing in ("static_group", "prefix_aware"):
        own = [set(trajectories.group[members].tolist()) for members in result.members]
        assert sum(map(len, own)) == len(set.union(*own)) == len(np.unique(trajectories.group))


def test_central_queue_balances_better_than_a_split() -> None:
    limits = EngineLimits(np.inf, max_running=8)

    def mean_makespan(routing: Routing) -> float:
        runs = [simulate_rollout(many(s, 256, 32), 4, cost=SECOND, limits=limits, routing=routing) for s in range(12)]
        return float(np.mean([run.makespan_s for run in runs]))

    assert mean_makespan("least_loaded") < 0.97 * mean_makespan("static_group")


def test_replicas_may_differ() -> None:
    fast = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=0.25)
    replicas = [ReplicaCosts(fast, EngineLimits(np.inf, 8), devices=4), ReplicaCosts(SECOND, EngineLimits(np.inf, 8))]
    result = simulate_rollout(Trajectories.of(4, [40] * 30), replicas, routing="least_loaded")
    assert len(result.members[0]) > 2 * len(result.members[1])
    assert result.devices.tolist() == [4, 1]


def test_lost_seconds_by_hand() -> None:
    """One engine_step each second; replicas end at 3 s and 9 s; nothing queues."""
    result = simulate_rollout(Trajectories.of(4, [3, 5, 3, 9]), 2, cost=SECOND, limits=ROOMY)
    # replica 0 has both of 3: no tail; replica 1: 5 and 9: half its batch is empty for 4 s
    assert result.replica_finish_s.tolist() == [3.0, 9.0]
    assert (result.lost.imbalance, result.lost.tail) == (6.0, 2.0)
    assert (result.lost.tool_wait, result.lost.prefill_stall, result.lost.preemption) == (0.0, 0.0, 0.0)
    assert result.tokens_per_s == pytest.approx(20 / 9)


def test_replicas_of_one_cost_ask_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table, their speed and their lost seconds: with 512 small replicas each was a quarter of the rollout."""
    asked: list[float] = []
    decode_s = EngineStepCost.decode_s

    def counted(self: EngineStepCost, running: Any, kv_tokens: Any) -> Any:
        asked.append(np.size(running))
        return decode_s(self, running, kv_tokens)

    monkeypatch.setattr(EngineStepCost, "decode_s", counted)
    result = simulate_rollout(Trajectories.of(4, [3, 9, 2, 5]), 4, cost=SECOND, limits=ROOMY)
    assert len(asked) == 1  # what was lost is worked out where somebody asks
    assert result.lost.imbalance > 0.0 and len(asked) == 2
    assert tabulated(SECOND, 4, EngineOptions()) is tabulated(SECOND, 4, EngineOptions())


def test_trajectories_from_a_table_with_turns() -> None:
    table = LengthTable(
        prompt_tokens=np.array([10, 30, 11]), response_tokens=np.array([4, 5, 6]), group=np.array([0, 0, 1]),
        rl_step=np.zeros(3, dtype=np.int64), turn=np.array([0, 1, 0]), trajectory=np.array([5, 5, 2]),
        cached_tokens=np.array([0, 8, 0]), tool_latency_s=np.array([1.5, 0.0, 0.0]),
    )  # fmt: skip
    made = Trajectories.from_table(table)
    assert (len(made), made.n_turns, made.offsets.tolist(), made.group.tolist()) == (2, 3, [0, 2, 3], [0, 1])
    assert made.generated_tokens.tolist() == [9, 6]
    assert made.cached_tokens is None  # the recorded hits are those of another engine
    kept = replace(made, cached_tokens=np.array([0, 8, 0])).take(np.array([1, 0]))
    assert kept.cached_tokens is not None
    assert (kept.offsets.tolist(), kept.cached_tokens.tolist()) == ([0, 1, 3], [0, 0, 8])


def test_refusals_list_every_problem() -> None:
    with pytest.raises(SpecError, match="needs 101 tokens of cache"):
        simulate_replica(Trajectories.of(50, [50]), SECOND, EngineLimits(64, 8))
    with pytest.raises(SpecError) as caught:
        simulate_replica(Trajectories.of(50, [50]), SECOND, EngineLimits(64, 0, token_budget=0))
    assert len(caught.value.problems) == 3
    with pytest.raises(SpecError, match="did you mean round_robin"):
        simulate_rollout(many(1), 2, cost=SECOND, limits=ROOMY, routing="round_robbin")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="no replicas"):
        simulate_rollout(many(1), [])
    with pytest.raises(SpecError, match="needs cost and limits"):
        simulate_rollout(many(1), 2)
    with pytest.raises(SpecError, match="name a replica"):
        simulate_rollout(many(1), 2, cost=SECOND, limits=ROOMY, routing=np.zeros(3, dtype=np.int64))
    with pytest.raises(SpecError, match="acceptance"):
        Speculation(2, 1.5)
    with pytest.raises(SpecError, match="not counted"):
        take_census(many(1), ROOMY, options=EngineOptions(speculation=Speculation(1, 0.5)))


# -- policies for the tail -----------------------------------------------------------------------------------------


def long_tailed(seed: int) -> Trajectories:
    """64 prompts of 8: short, but every tenth prompt has responses ten times as long."""
    rng = np.random.default_rng(seed)
    scale = np.where(rng.random(64) < 0.1, 3000.0, 300.0)
    return Trajectories.of(50, np.maximum(rng.gamma(4.0, np.repeat(scale, 8) / 4.0), 1), group=np.arange(512) // 8)


SERVE = partial(simulate_rollout, replicas=2, cost=LINEAR, limits=EngineLimits(np.inf, max_running=256))


def test_first_groups_wait_for_whole_groups() -> None:
    done, stop_s = first_groups(np.array([0, 0, 1, 1, 2, 2]), np.array([1.0, 9, 2, 3, 4, 5]), 2)
    assert done.tolist() == [False, False, True, True, True, True]
    assert stop_s == 5.0


def test_generated_at_counts_tokens() -> None:
    trajectories = Trajectories.of(4, [3, 9])
    result = simulate_rollout(trajectories, 1, cost=SECOND, limits=ROOMY)
    assert [generated_at(result, trajectories, t).tolist() for t in (0.5, 1.0, 2.5, 4.0, 20.0)] == [
        [0, 0],
        [1, 1],
        [2, 2],
        [3, 4],
        [3, 9],
    ]


@pytest.mark.parametrize("chunked", [True, False])
def test_preempted_requests_write_nothing_meanwhile(chunked: bool) -> None:
    """Token by token as the naive loop has them, at the end of every engine_step of a cache for a third of them."""
    limits = EngineLimits(4096.0, 64, chunked_prefill=chunked)
    trajectories = Trajectories.of(64, np.random.default_rng(3).integers(100, 500, 32))
    seen: list[tuple[float, list[int]]] = []

    class Watched(TokenLoop):
        def engine_step(self, *work: Any) -> None:
            super().engine_step(*work)
            seen.append((self.now, [request.generated for request in self.requests]))

    assert Watched(trajectories, LINEAR, limits, EngineOptions()).run().preemptions > 10
    result = simulate_rollout(trajectories, 1, cost=LINEAR, limits=limits)
    for at_s, generated in seen[::7]:
        assert generated_at(result, trajectories, at_s + 1e-6).tolist() == generated


def test_partial_rollouts_lose_no_token() -> None:
    run = PartialRollouts(over_provision=1.5).run(GroupSource(long_tailed(0), 1), SERVE, 32, 12)
    base = Synchronous().run(GroupSource(long_tailed(0), 1), SERVE, 32, 12)
    assert run.discarded_share == 0.0
    assert 0.0 < run.stale_share < 1.0
    assert run.seconds_per_token < base.seconds_per_token
    # what was trained and is not stale was generated in the same rl_step
    assert all(s.trained_tokens - s.stale_tokens <= s.generated_tokens for s in run.steps)


@pytest.mark.parametrize(("over_provision", "together"), [(1.5, 1), (2.0, 2), (2.5, 2), (3.0, 3), (4.0, 4)])
def test_partial_rollouts_of_equal_lengths_share_one_rollout(over_provision: float, together: int) -> None:
    """One rollout of what is in flight, then rl_steps that wait for nothing: of three that were counted two waited."""
    equal = Trajectories.of(np.full(256, 100), np.full(256, 500), group=np.repeat(np.arange(64), 4))
    run, source = PartialRollouts(over_provision), GroupSource(equal)
    whole_s = SERVE(source.draw(8 * together)).makespan_s
    assert run.steady_s(source, SERVE, 8) == pytest.approx(whole_s / together, rel=1e-6)


@pytest.mark.parametrize("over_provision", [1.5, 2.0, 2.5, 4.0])
def test_partial_rollouts_of_cut_lengths_take_what_a_long_run_takes(over_provision: float) -> None:
    rng = np.random.default_rng(2)
    cut = np.minimum(np.ceil(rng.exponential(600.0, 512)), 500).astype(np.int64)
    work, run = (
        Trajectories.of(np.full(512, 100), cut, group=np.repeat(np.arange(64), 8)),
        PartialRollouts(over_provision),
    )
    long = [step.seconds for step in run.run(GroupSource(work), SERVE, 16, 50).steps[2:]]
    assert run.steady_s(GroupSource(work), SERVE, 16) == pytest.approx(float(np.mean(long)), rel=0.03)


def test_tail_batching_stays_on_policy_and_discards() -> None:
    run = TailBatching(over_prompts=1.25).run(GroupSource(long_tailed(0), 1), SERVE, 32, 20)
    base = Synchronous().run(GroupSource(long_tailed(0), 1), SERVE, 32, 20)
    assert run.stale_share == 0.0
    assert run.discarded_share > 0.0
    assert run.seconds_per_group < base.seconds_per_group
    seconds = sorted(s.seconds for s in run.steps)
    assert seconds[-1] > 2 * seconds[0]  # long rounds between short ones


def test_dynamic_sampling_needs_several_batches() -> None:
    run = DynamicSampling(keep_share=0.3, generated_over_trained=2.0, seed=1).run(
        GroupSource(long_tailed(0), 1), SERVE, 16, 20
    )
    one = Synchronous().run(GroupSource(long_tailed(0), 1), SERVE, 32, 20)
    batches = sum(s.seconds for s in run.steps) / (sum(s.seconds for s in one.steps) / 20) / 20
    assert 1.4 < batches < 2.6  # 16 of 32 x 0.3 a batch
    assert all(s.groups == 16 for s in run.steps)
    assert run.discarded_share > 0.5
    with pytest.raises(SpecError, match="keep_share"):
        DynamicSampling(keep_share=0.0)


def test_partial_rollouts_refuse_several_turns() -> None:
    turns = Trajectories(np.array([4, 9]), np.array([1, 1]), np.zeros(2), np.array([0, 2]), np.zeros(1, dtype=np.int64),
                         np.zeros(1))  # fmt: skip
    with pytest.raises(SpecError, match="single-turn"):
        PartialRollouts().run(GroupSource(turns), SERVE, 1, 1)


@pytest.mark.parametrize("routing", ["round_robin", "static_group", "least_loaded", "prefix_aware"])
def test_more_replicas_than_trajectories(routing: Routing) -> None:
    result = simulate_rollout(Trajectories.of(4, [3, 9, 5]), 5, cost=SECOND, limits=ROOMY, routing=routing)
    assert sorted(result.replica_finish_s.tolist()) == [0.0, 0.0, 3.0, 5.0, 9.0]
    assert result.lost.imbalance == 28.0


def test_nothing_to_serve_takes_no_time() -> None:
    empty = Trajectories.of(4, [3, 9]).take(np.zeros(0, dtype=np.int64))
    assert simulate_replica(empty, SECOND, ROOMY).makespan_s == 0.0
    with pytest.raises(SpecError, match="nothing to serve"):
        simulate_rollout(empty, 1, cost=SECOND, limits=ROOMY)
