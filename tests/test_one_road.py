"""One road: a measured row turned into a job and asked through the public API gives the validator's number."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

import rlperf
from rlperf.calibrate.rl_step.job import job_of, lengths_of
from rlperf.calibrate.rl_step.predict import DEFAULT_LAW, predict_step
from rlperf.calibrate.rl_step.rows import StepRow, read_row
from rlperf.cost.engine_step import Drafted, EngineLimits, EngineStepCost
from rlperf.errors import RlperfError
from rlperf.plan.question.demand import _redrawn
from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.sim.rl_step.rollout_stage import Replicas, RolloutEvents
from rlperf.sim.rollout.apart import Apart
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.cluster import Cluster
from rlperf.specs.job import Job
from rlperf.specs.profiles import load_cluster
from rlperf.workload import LengthTable
from rlperf.workload.tables import write_table

from .quick import slow_but

SAME = 1e-9


def asked(row: StepRow, architecture: str, folder: Path) -> Job:
    """The row's job as a user would state it: a recording, a cluster and an architecture that are files or shipped."""
    folder.mkdir()
    # states the cap: the longest response that a log prints lies below it
    trace = write_table(lengths_of(row, DEFAULT_LAW), folder / "trace.csv")
    job = job_of(row, str(trace))
    return job.model_copy(update={"architecture": architecture, "cluster": _cluster(row.hardware.cluster, folder)})


def _cluster(cluster: Cluster, folder: Path) -> str:
    """The name of a shipped cluster, or a file where nodes of another size were measured."""
    if load_cluster(cluster.name).devices_per_node == cluster.devices_per_node:
        return cluster.name
    stated = {**cluster.model_dump(exclude_none=True), "host_memory": f"{cluster.host_memory:.0f} B", "nodes": 1}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(stated))
    return str(file)


@pytest.mark.data
@pytest.mark.parametrize("every", slow_but((1, 12), 12))
def test_measured_rows_asked_as_jobs_give_the_validators_number(
    every: int, measured_data: Path, tmp_path: Path
) -> None:
    folder, same = measured_data / "architectures", 0
    with (measured_data / "measured" / "rl_step.csv").open() as file:
        rows = list(csv.DictReader(file))[::every]
    for number, cells in enumerate(rows):
        try:
            row = read_row(cells, folder)
        except RlperfError:
            continue
        own = tmp_path / str(number)
        found = rlperf.predict_job(asked(row, str(folder / f"{cells['architecture']}.json"), own))
        expected = predict_step(row)
        assert found.rl_step_s == pytest.approx(expected.rl_step_s, rel=SAME), cells["row_id"]
        assert found.stages_s.training == pytest.approx(expected.stage_s("train_s"), rel=SAME), cells["row_id"]
        assert found.stages_s.scoring == pytest.approx(expected.stage_s("scoring_s"), rel=SAME), cells["row_id"]
        same += 1
    assert same >= 0.95 * len(rows)


def test_what_an_rl_step_is_called_makes_no_difference_to_what_is_remembered_of_it() -> None:
    """Groups of rl_steps with equal lengths are judged once; other lengths, other turns or another cap are others."""
    table = LengthTable.from_groups([10, 20], [[5, 7], [6, 9]], max_response_tokens=9)
    batch = Batch(2, 2, 2, 32, 9, 2)

    def key(**changes: object) -> bytes:
        return Demand("math", (0, 0), batch, (replace(table, **changes),), 0.0, 0.0, ()).keys[0]

    assert key(rl_step=table.rl_step + 7, task="x", source="y") == key()
    for changes in (
        {"response_tokens": table.response_tokens + 1},
        {"group": table.group[::-1].copy()},
        {"turn": table.turn + 1},
        {"max_response_tokens": 10},
        {"tool_latency_s": np.ones(4)},
    ):
        assert key(**changes) != key(), changes


@dataclass(frozen=True)
class Served:
    """A rollout that other limits would have changed."""

    number: int
    roomy_tokens: float = np.inf
    full_places: bool = True
    timelines: tuple[object, ...] = ()


def test_a_rollout_is_simulated_once_whoever_asks_and_again_for_whatever_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated: list[float] = []

    def serve(replicas: Replicas, trajectories: Trajectories, routing: object = None) -> Served:
        simulated.append(replicas.cost.host_s)
        return Served(len(simulated), roomy_tokens=max(replicas.limits.kv_tokens, 600.0))

    monkeypatch.setattr(Replicas, "serve", serve)
    table = LengthTable.from_groups([11, 22], [[33, 44], [55, 66]], max_response_tokens=99)

    def asked(over_provision: float = 1.0, **changes: object) -> object:
        batch = replace(Batch(2, 2, 2, 32, 99, 2), over_provision=over_provision)
        demand = Demand("math", (0, 0), batch, (table,), 0.0, 0.0, ())
        cost = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=1.0)
        replicas = Replicas(cost, EngineLimits(np.inf, 8), 1, 1, EngineOptions())
        of_cost = {name: value for name, value in changes.items() if hasattr(cost, name)}
        rest = {name: value for name, value in changes.items() if name not in of_cost}
        return RolloutEvents().results(demand, replace(replicas, cost=replace(cost, **of_cost), **rest))

    assert asked() == asked() == asked(limits=EngineLimits(np.inf, 9)) and len(simulated) == 1  # four requests
    assert asked(limits=EngineLimits(500.0, 2)) == asked(limits=EngineLimits(600.0, 2)) and len(simulated) == 2
    table_of = np.array([1.0])
    others = (
        {"over_provision": 1.5}, {"host_s": 2.0}, {"decode_per_kv_token_s": 1.0}, {"prefill_fixed_s": 1.0},
        {"graph_buckets": table_of}, {"mixed_linear_s": table_of},
        {"drafted": Drafted(table_of, table_of, table_of, np.array([0]))}, {"count": 2}, {"apart": Apart(1)},
        {"limits": EngineLimits(np.inf, 3)}, {"options": EngineOptions(async_scheduling=True)},
    )  # fmt: skip
    assert len({asked(), *(asked(**changes) for changes in others)}) == 1 + len(others)


def test_a_recording_without_groups_draws_prompts_not_clones() -> None:
    random = np.random.default_rng(0)
    lengths = random.permutation(np.arange(100, 612))
    table = LengthTable.from_groups(np.arange(10, 522), [[n] for n in lengths.tolist()], max_response_tokens=1024)
    drawn = _redrawn(table, Batch(64, 8, 64, 1024, 1024, 64), random)
    assert (drawn.n_groups, drawn.group_size) == (64, 8)
    assert sorted(drawn.response_tokens.tolist()) == sorted(lengths.tolist())  # all 512, each once
    for group in range(64):
        inside = drawn.group == group
        assert len(set(drawn.response_tokens[inside].tolist())) == 8
        assert len(set(drawn.prompt_tokens[inside].tolist())) == 1
