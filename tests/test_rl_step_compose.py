"""Composed timelines: equal to the closed form in every mode, edges that respect time, work conserved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.sim.rl_step import timeline as tl
from rlperf.sim.rl_step.compose import StepStages, Transitions, compose_rl_step, steady_rollout_s
from rlperf.sim.rl_step.modes import Execution, step_seconds
from rlperf.sim.rollout.rollout import simulate_rollout
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.modes import MODES

SECONDS = st.floats(0.1, 200.0)
STAGES = st.builds(
    lambda rollout, training, others, own: StepStages.of(
        rollout,
        training_s=training,
        scoring_s=others[0],
        reward_s=others[1],
        weight_sync_s=others[2],
        data_movement_s=others[3],
        other_s=others[4],
        swap_s=0.5 * others[2],
        recompute_s=others[5],
        values_s=own[0],
        critic_s=own[1],
        rollout_group_s=0.3 * max(rollout),
        transitions=Transitions(1.0, 2.0, 3.0, 4.0),
    ),
    st.lists(SECONDS, min_size=1, max_size=4),
    st.lists(SECONDS, min_size=1, max_size=3),
    st.lists(st.floats(0.0, 30.0), min_size=6, max_size=6),
    st.tuples(st.sampled_from([0.0, 25.0]), st.sampled_from([0.0, 40.0])),
)


@settings(max_examples=150, deadline=None)
@given(
    STAGES,
    st.sampled_from(list(MODES)),
    st.integers(0, 4),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 6),
)
def test_step_equals_the_closed_form(
    stages: StepStages,
    mode: str,
    staleness: int,
    interval: int,
    in_flight: bool,
    interrupt: bool,
    group: bool,
    chunks: int,
) -> None:
    execution = Execution(mode, staleness, interval, int(in_flight), int(interrupt), int(group), chunks)
    line = compose_rl_step(execution, stages, rl_steps=12)
    closed = float(step_seconds(execution, stages.times()))
    if interval == 1 or not MODES[mode].runs_ahead:
        assert line.rl_step_s == pytest.approx(closed, rel=1e-6)
    else:  # syncs now and then: the mean of the terms is exact, their maximum is not
        assert closed * (1 - 1e-9) <= line.rl_step_s <= closed + stages.weight_sync_s + stages.recompute_s + 1e-6


@settings(max_examples=60, deadline=None)
@given(STAGES, st.sampled_from(list(MODES)))
def test_no_rank_does_two_things_at_once(stages: StepStages, mode: str) -> None:
    line = compose_rl_step(Execution(mode, staleness=2), stages, rl_steps=3)
    for pool in range(len(line.pools)):
        if line.pools[pool] == "rollout":
            continue  # replicas serve two batches at once while one drains
        for rank in np.unique(line.rank[line.pool == pool]):
            own = (line.pool == pool) & (line.rank == rank)
            order = np.argsort(line.start_s[own], kind="stable")
            assert np.all(line.start_s[own][order][1:] >= line.end_s[own][order][:-1] - 1e-9)


def test_stage_seconds_of_a_colocated_step() -> None:
    stages = StepStages.of(
        [50.0, 60.0],
        scoring_s=10.0,
        training_s=[18.0, 20.0],
        weight_sync_s=4.0,
        reward_s=[1.0, 2.0],
        data_movement_s=0.5,
        other_s=1.5,
        transitions=Transitions(1.0, 2.0, 3.0, 4.0),
    )
    line = compose_rl_step(Execution("colocated"), stages, trainer_devices=8)
    longest = {name: line.duration_s[line.stage == code].max() for code, name in enumerate(tl.STAGES)}
    assert longest == pytest.approx(
        {
            "rollout": 60,
            "reward": 2,
            "scoring": 10,
            "training": 20,
            "weight_sync": 4,
            "data_movement": 0.5,
            "offload": 3,
            "onload": 2,
            "wake": 4,
            "sleep": 1,
            "other": 1.5,
        }
    )
    assert line.rl_step_s == pytest.approx(sum(longest.values()))
    assert line.pools == ("shared",)


def test_streaming_lies_between_overlap_and_turns() -> None:
    finish = np.sort(np.random.default_rng(0).gamma(2.0, 20.0, 64))
    stages = StepStages.of([finish.max()], training_s=60.0, weight_sync_s=2.0, group_finish_s=finish)
    line = compose_rl_step(Execution("streaming", chunks=8), stages)
    serial = finish.max() + 62.0
    assert max(finish.max(), 60.0) + 2.0 < line.rl_step_s < serial
    # the last chunk is never trained before the last group is done
    assert line.rl_step_s >= finish.max() + 60.0 / 8 + 2.0 - 1e-9


def test_a_critic_on_devices_of_its_own_runs_beside() -> None:
    stages = StepStages.of([10.0], scoring_s=4.0, values_s=6.0, training_s=20.0, critic_s=15.0)
    line = compose_rl_step(Execution("disaggregated"), stages)
    assert line.rl_step_s == pytest.approx(10 + 6 + 20)
    assert line.pools == ("rollout", "trainer", "critic")
    assert line.idle_device_s().tolist() == pytest.approx([26.0, 12.0, 15.0])


def test_a_bound_that_nothing_reaches_draws_no_more() -> None:
    """A million versions behind took minutes: every one of them was four rl_steps of the timeline."""
    stages = StepStages.of([50.0, 60.0], rollout_steady_s=40.0, scoring_s=[5.0], training_s=[20.0], weight_sync_s=3.0)
    deep = Execution("async", staleness=1_000_000)
    drawn = compose_rl_step(deep, stages)
    assert len(drawn.start_s) < 5_000
    assert drawn.rl_step_s == pytest.approx(float(step_seconds(deep, stages.times())), rel=1e-9)


def test_reward_on_devices_of_its_own_leaves_the_rollout_pool_idle() -> None:
    together = StepStages.of([10.0], training_s=5.0, reward_s=[2.0, 4.0])
    apart = StepStages.of([10.0], training_s=5.0, reward_s=[2.0, 4.0], reward_apart=True)
    execution = Execution("disaggregated")
    one, other = compose_rl_step(execution, together), compose_rl_step(execution, apart)
    assert one.rl_step_s == other.rl_step_s == pytest.approx(19.0)
    assert other.pools == ("rollout", "trainer", "reward")
    assert other.idle_device_s()[0] > one.idle_device_s()[0]


def test_from_a_simulated_rollout() -> None:
    cost = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=0.01)
    limits = EngineLimits(kv_tokens=np.inf, max_running=64)
    lengths = np.random.default_rng(1).integers(10, 1000, 64)
    rollout = simulate_rollout(Trajectories.of(8, lengths), 4, cost=cost, limits=limits)
    stages = StepStages.of(rollout, training_s=3.0)
    assert stages.rollout_s.tolist() == rollout.replica_finish_s.tolist()
    assert steady_rollout_s(rollout) < rollout.makespan_s
    # decode-bound replicas without a tail: mean length instead of the longest
    line = compose_rl_step(Execution("disaggregated"), stages)
    assert line.rl_step_s == pytest.approx(rollout.makespan_s + 3.0)
