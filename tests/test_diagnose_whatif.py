"""What-ifs equal the simulation with the cause removed; the graph's pipelines equal the pipeline simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.diagnose import graph as g
from rlperf.diagnose.explain import explain_graph
from rlperf.diagnose.structure import structural_changes
from rlperf.errors import SpecError
from rlperf.sim.pipeline import StageCosts, one_f_one_b, simulate
from rlperf.sim.rollout import ReplicaCosts, Trajectories, simulate_rollout
from studies.root_cause.remedies import REMOVABLE, explain_inputs, remove
from studies.root_cause.scenario import PipelineShape, StepInputs, simulate_step

RANKS, STAGES, MICROBATCHES = 6, 3, 5


def engine(factor: float = 1.0) -> EngineStepCost:
    return EngineStepCost(
        tokens=np.array([0.0, 64.0, 1024.0]), linear_s=factor * np.array([6e-3, 7e-3, 2e-2]), host_s=factor * 4e-3,
        decode_per_kv_token_s=factor * 2e-8,
    )  # fmt: skip


def healthy(seed: int = 0) -> StepInputs:
    rng = np.random.default_rng(seed)
    count = RANKS * 16
    tokens = (400 * np.exp(rng.normal(0, 0.3, count))).astype(np.int64)
    owner = np.arange(count) * RANKS // count
    trained = np.bincount(owner, tokens + 200.0)
    micro = np.repeat(trained[:, None] / MICROBATCHES, MICROBATCHES, axis=1)
    trainer = []
    for rank in range(RANKS):
        forward = 1e-4 * np.tile(micro[rank] / STAGES, (STAGES, 1))
        zero = np.zeros_like(forward)
        trainer.append(StageCosts(forward, forward, forward, zero, zero, np.zeros(STAGES), 0.05 * forward[:-1]))
    limits = EngineLimits(kv_tokens=np.inf, max_running=64)
    return StepInputs(
        Trajectories.of(200, tokens, group=np.arange(count) // 8), (ReplicaCosts(engine(), limits, 8),) * RANKS,
        reward_s=np.full(RANKS, 0.5), scoring_s=3e-5 * trained, scored_tokens=trained, trainer=tuple(trainer),
        microbatch_tokens=micro, gradient_sync_s=np.full(STAGES, 0.1), optimizer_s=np.full(RANKS, 0.05),
        weight_sync_s=np.full(RANKS, 0.4), routing=owner, recompute_share=0.25, data_movement_s=0.1, offload_s=0.3,
        controller_s=0.2, devices=8 * RANKS,
    )  # fmt: skip


def slow_device(inputs: StepInputs) -> StepInputs:
    replicas = list(inputs.replicas)
    replicas[2] = ReplicaCosts(engine(1.7), replicas[2].limits, 8)
    return replace(inputs, replicas=tuple(replicas))


def slow_link(inputs: StepInputs) -> StepInputs:
    trainer = list(inputs.trainer)
    transfer = trainer[4].transfer_s.copy()
    transfer[1] *= 60.0
    trainer[4] = replace(trainer[4], transfer_s=transfer)
    return replace(inputs, trainer=tuple(trainer))


def unbalanced_stage(inputs: StepInputs) -> StepInputs:
    share = np.array([0.8, 1.4, 0.8])[:, None]
    parts = ("forward_s", "backward_input_s", "backward_weight_s")
    trainer = (replace(c, **{name: getattr(c, name) * share for name in parts}) for c in inputs.trainer)
    return replace(inputs, trainer=tuple(trainer))


def small_cache(inputs: StepInputs) -> StepInputs:
    limits = EngineLimits(kv_tokens=3000.0, max_running=64)
    return replace(inputs, replicas=(ReplicaCosts(engine(), limits, 8),) * RANKS)


def long_trajectory(inputs: StepInputs) -> StepInputs:
    tokens = inputs.trajectories.response_tokens.copy()
    longest = tokens.max()
    tokens[np.flatnonzero(tokens == longest)[0]] = 8 * longest
    return replace(inputs, trajectories=replace(inputs.trajectories, response_tokens=tokens))


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        ("slow_device", slow_device),
        ("slow_link", slow_link),
        ("stage_imbalance", unbalanced_stage),
        ("kv_cache", small_cache),
    ],
)
def test_a_planted_fault_costs_what_its_removal_wins(kind: str, plant: object) -> None:
    """The reported seconds against the healthy twin, in which the fault was never planted."""
    inputs, twin = plant(healthy()), simulate_step(healthy()).rl_step_s()  # type: ignore[operator]
    found = explain_inputs(inputs)
    assert found.causes[0].kind == kind
    assert found.causes[0].method == "simulation"
    assert found.rl_step_s - found.causes[0].loss_s == pytest.approx(twin, rel=1e-12)


def test_a_long_trajectory_is_cut_to_the_longest_of_the_others() -> None:
    inputs = long_trajectory(healthy())
    tokens = inputs.trajectories.response_tokens
    by_hand = np.minimum(tokens, np.sort(tokens)[-2])
    shorter = replace(inputs, trajectories=replace(inputs.trajectories, response_tokens=by_hand))
    found = explain_inputs(inputs).causes[0]
    assert found.kind == "long_trajectory"
    assert simulate_step(inputs).rl_step_s() - found.loss_s == pytest.approx(
        simulate_step(shorter).rl_step_s(), rel=1e-12
    )


LINEAR = ("reward", "weight_sync", "data_movement", "offload", "controller", "recompute", "exposed_communication")


@pytest.mark.parametrize("seed", range(2))
def test_replayed_what_ifs_equal_simulations(seed: int) -> None:
    """Alone and in pairs: no time for a stage in the graph is the simulation with that stage's input at zero."""
    inputs = healthy(seed)
    graph = simulate_step(inputs)
    changes = structural_changes(graph)
    for a in LINEAR:
        once = remove(inputs, a)
        assert graph.what_if_s(changes[a]) == pytest.approx(simulate_step(once).rl_step_s(), rel=1e-12)
        for b in LINEAR:
            twice = simulate_step(remove(once, b)).rl_step_s()
            assert graph.what_if_s(changes[a] & changes[b]) == pytest.approx(twice, rel=1e-12)


def test_every_removable_cause_leaves_inputs_that_run() -> None:
    inputs = long_trajectory(slow_link(healthy()))
    rl_step_s = simulate_step(inputs).rl_step_s()
    for kind in REMOVABLE:
        assert 0.0 < simulate_step(remove(inputs, kind)).rl_step_s() <= rl_step_s * 1.05
    with pytest.raises(KeyError):
        remove(inputs, "weather")


def test_a_bubble_is_what_stages_wait_for_each_other() -> None:
    """Equal stages without transfers: without the bubble the pipeline takes m (F + B) (Narayanan 2021, section 2.2)."""
    inputs = healthy()
    one = np.ones((STAGES, MICROBATCHES))
    costs = StageCosts(one, one, one, one, one, np.zeros(STAGES), np.zeros((STAGES - 1, MICROBATCHES)))
    inputs = replace(inputs, trainer=(costs,) * RANKS, recompute_share=0.0)
    graph = simulate_step(inputs)
    saved = graph.rl_step_s() - graph.what_if_s(structural_changes(graph)["pipeline_bubble"])
    assert saved == pytest.approx(3.0 * (STAGES - 1))


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 1), (4, 8), (5, 3)])
def test_pipelines_of_the_graph_equal_the_simulator(stages: int, count: int) -> None:
    rng = np.random.default_rng(stages)
    forward, backward, weight = (rng.uniform(0.5, 2.0, (stages, count)) for _ in range(3))
    zero = np.zeros_like(forward)
    transfer = rng.uniform(0.0, 1.0, (stages - 1, count))
    costs = StageCosts(forward, backward, weight, zero, zero, np.zeros(stages), transfer)
    expected = simulate(costs, range(stages), one_f_one_b(stages, count), merged=True)
    shape = PipelineShape.of(stages, count)
    seconds = shape.durations(costs, 0.3)
    end = shape.order.replay(np.zeros(seconds.size), seconds)
    assert end.max() == pytest.approx(expected.makespan_s, rel=1e-12)
    mine = end[shape.activity == g.FORWARD].reshape(stages, count)
    assert mine == pytest.approx(expected.end_s[0], rel=1e-12)


def test_the_graph_of_an_rl_step_holds_the_rollout() -> None:
    inputs = small_cache(healthy())
    result = simulate_rollout(inputs.trajectories, inputs.replicas, routing=inputs.routing)
    graph = simulate_step(inputs)
    decode = graph.activity == g.DECODE
    ends = np.zeros(len(inputs.trajectories))
    np.maximum.at(ends, graph.unit[decode], graph.end_s[decode])
    assert ends == pytest.approx(result.finish_s + inputs.controller_s, rel=1e-12)
    assert graph.samples is not None
    assert graph.samples.blocked.any()
    assert graph.work[decode].sum() == inputs.trajectories.response_tokens.sum()
    assert abs(graph.gap_s[graph.edge_target]).max() < 1e-9


def test_wrong_inputs_are_refused() -> None:
    inputs = healthy()
    with pytest.raises(SpecError, match="one entry per rank"):
        replace(inputs, reward_s=np.ones(2))
    with pytest.raises(SpecError, match="one entry per replica"):
        replace(inputs, weight_sync_s=np.ones(2))
    with pytest.raises(SpecError, match="same devices"):
        replace(inputs, replicas=inputs.replicas[:2], weight_sync_s=np.ones(2))


def test_nothing_is_abnormal_in_a_healthy_rl_step() -> None:
    found = explain_graph(simulate_step(healthy()))
    assert not found.faults
    assert sum(seconds for _, seconds in found.critical_s) == pytest.approx(found.rl_step_s)
    assert found.causes[0].kind == "tail"
