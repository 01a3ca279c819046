"""Healthy rl_steps at several scales, and faults planted in them. Only seeds and inputs; the diagnosis sees graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.diagnose.graph import ENGINE, PerformanceGraph
from rlperf.sim.pipeline import StageCosts
from rlperf.sim.rollout import ReplicaCosts, Trajectories
from studies.root_cause.scenario import StepInputs, simulate_step

FloatArray = npt.NDArray[np.float64]
KINDS = ("slow_device", "slow_link", "long_trajectory", "data_imbalance", "slow_tool", "controller", "stage_imbalance",
         "kv_cache")  # fmt: skip
SCALES = (64, 128, 256)
DEVICES_PER_RANK = 8
STAGES, MICROBATCHES = 4, 8


@dataclass(frozen=True)
class Draw:
    """What one run is drawn from: the same at every scale but for the number of ranks."""

    median_tokens: float
    spread: float
    per_rank: int
    turns: bool
    host_s: float
    token_train_s: float
    colocated: bool
    noise: float


@dataclass(frozen=True)
class Plant:
    """A planted fault: kind, rank and pipeline stage where it sits (-1: nowhere in particular), strength."""

    kind: str
    rank: int
    part: int
    strength: float


def draw(rng: np.random.Generator, need_tools: bool, need_pools: bool | None = None) -> Draw:
    """A healthy run's parameters."""
    return Draw(
        median_tokens=float(rng.uniform(600, 3000)),
        spread=float(rng.uniform(0.25, 0.5)),
        per_rank=int(rng.choice([24, 32, 48])),
        turns=need_tools or bool(rng.random() < 0.4),
        host_s=float(rng.uniform(0.003, 0.008)),
        token_train_s=float(rng.uniform(2e-4, 5e-4)),
        colocated=bool(rng.random() < 0.6) if need_pools is None else need_pools,
        noise=float(rng.uniform(0.01, 0.03)),
    )


def inputs(base: Draw, devices: int, plants: tuple[Plant, ...], seed: int) -> StepInputs:
    """Inputs of an rl_step with faults planted. The same seed without plants is its healthy twin."""
    rng = np.random.default_rng([seed, devices])
    ranks = devices // DEVICES_PER_RANK
    by_kind = {p.kind: p for p in plants}
    count = ranks * base.per_rank
    group = np.arange(count) // 8
    shared = rng.normal(0, base.spread * 0.6, group[-1] + 1)[group]
    tokens = np.maximum(base.median_tokens * np.exp(shared + rng.normal(0, base.spread * 0.8, count)), 8)
    owner = np.arange(count) * ranks // count
    if plant := by_kind.get("data_imbalance"):
        owner = _skewed(owner, ranks, plant)
    if plant := by_kind.get("long_trajectory"):
        mine = np.flatnonzero(owner == plant.rank)[0]
        tokens[mine] = plant.strength * tokens.max()
    trajectories = _turns(base, tokens, group, owner, by_kind.get("slow_tool"), rng)
    replicas, train = _hardware(base, ranks, trajectories, by_kind)
    trained = np.bincount(owner, tokens + 300.0, ranks)
    # Packing by tokens: every micro-batch of a rank holds an equal part, but for a remainder.
    micro = trained[:, None] / MICROBATCHES * (1.0 + rng.uniform(-0.04, 0.04, (ranks, MICROBATCHES)))
    stage = np.full(STAGES, 1.0 / STAGES)
    if plant := by_kind.get("stage_imbalance"):
        moved = (plant.strength - 1.0) / STAGES
        stage = np.full(STAGES, 1.0 / STAGES - moved / (STAGES - 1))
        stage[plant.part] = 1.0 / STAGES + moved
    link = by_kind.get("slow_link")
    trainer = []
    for rank in range(ranks):
        forward = base.token_train_s * np.outer(stage * train[rank], micro[rank])
        transfer = np.repeat(micro[rank][None] * base.token_train_s * 0.01, STAGES - 1, axis=0)
        if link and link.part < STAGES - 1 and link.rank == rank:
            transfer[link.part] *= link.strength * 4.0
        zero = np.zeros_like(forward)
        trainer.append(StageCosts(forward, forward, forward, zero, zero, np.zeros(STAGES), transfer))
    sync = np.full(ranks, 2.0)
    if link and link.part == STAGES - 1:
        sync[link.rank] *= link.strength
    serial = by_kind.get("controller")
    return StepInputs(
        trajectories, replicas, reward_s=np.full(ranks, 3.0), scoring_s=0.3 * base.token_train_s * trained
        * train.max(axis=1), scored_tokens=trained, trainer=tuple(trainer), microbatch_tokens=micro,
        gradient_sync_s=np.full(STAGES, 0.8), optimizer_s=0.4 * train.max(axis=1), weight_sync_s=sync, routing=owner,
        recompute_share=0.25, data_movement_s=0.3, offload_s=1.5,
        controller_s=0.3 + (serial.strength * ranks / 32.0 if serial else 0.0), colocated=base.colocated,
        devices=devices,
    )  # fmt: skip


def _skewed(owner: npt.NDArray[np.int64], ranks: int, plant: Plant) -> npt.NDArray[np.int64]:
    """One rank takes trajectories from the others until it has ``strength`` times its share."""
    skewed = owner.copy()
    share = owner.size / ranks
    others = np.flatnonzero(owner != plant.rank)
    taken = others[:: max(int(others.size / ((plant.strength - 1.0) * share)), 1)]
    skewed[taken] = plant.rank
    return skewed


def _turns(
    base: Draw,
    tokens: FloatArray,
    group: npt.NDArray[np.int64],
    owner: npt.NDArray[np.int64],
    tool: Plant | None,
    rng: np.random.Generator,
) -> Trajectories:
    """One to three turns with tool calls between them, where the run has tools."""
    whole = np.maximum(tokens.astype(np.int64), 4)
    if not base.turns:
        return Trajectories.of(500, whole, group=group)
    turns = rng.integers(1, 4, tokens.size)
    offsets = np.concatenate([[0], np.cumsum(turns)])
    index = np.repeat(np.arange(tokens.size), turns)
    turn = np.arange(offsets[-1]) - offsets[index]
    part = np.maximum(whole // turns, 1)[index]
    latency = 0.5 * np.exp(rng.normal(0, 0.5, offsets[-1]))
    if tool and tool.part < 0:
        latency = np.where(owner[index] == tool.rank, latency * tool.strength, latency)
    elif tool:
        called = np.flatnonzero((owner[index] == tool.rank) & (turn < turns[index] - 1))
        latency[called[0]] = 10.0 * tool.strength
    return Trajectories(500 + turn * (part + 200), part, latency, offsets, group, np.zeros(tokens.size))


def _hardware(
    base: Draw, ranks: int, trajectories: Trajectories, plants: dict[str, Plant]
) -> tuple[tuple[ReplicaCosts, ...], FloatArray]:
    """Replicas, and the slowness of every (rank, pipeline stage) in training."""
    slow, cache = plants.get("slow_device"), plants.get("kv_cache")
    load = np.bincount(trajectories.turn_owner, trajectories.final_tokens)
    per_replica = float(load.mean()) * base.per_rank
    room = max(per_replica * cache.strength, 1.1 * float(trajectories.final_tokens.max()) + 100) if cache else 1e9
    limits = EngineLimits(kv_tokens=room, max_running=256)
    train = np.ones((ranks, STAGES))
    replicas = []
    for rank in range(ranks):
        factor = slow.strength if slow and slow.rank == rank and (base.colocated or slow.part < 0) else 1.0
        replicas.append(ReplicaCosts(engine(base.host_s, factor), limits, DEVICES_PER_RANK))
    if slow and (base.colocated or slow.part >= 0):
        train[slow.rank, max(slow.part, 0)] = slow.strength
    return tuple(replicas), train


def engine(host_s: float, factor: float = 1.0) -> EngineStepCost:
    """Engine_step of one replica, all terms ``factor`` times as long."""
    return EngineStepCost(
        tokens=np.array([0.0, 64.0, 256.0, 1024.0, 8192.0]),
        linear_s=factor * np.array([6e-3, 6.5e-3, 8e-3, 1.8e-2, 0.14]),
        host_s=factor * host_s,
        host_per_request_s=factor * 2e-5,
        decode_per_kv_token_s=factor * 2.5e-8,
    )


def measured(graph: PerformanceGraph, noise: float, seed: int) -> PerformanceGraph:
    """The graph as a clock would see it: every vertex off by ``noise`` (sd), every replica by a third of it.

    Turns of one replica share thousands of engine_steps, so they differ among themselves by a tenth only.
    """
    rng = np.random.default_rng([seed, graph.vertices])
    size = int(graph.rank.max()) + 2
    common = rng.normal(0, noise / 3, size)[graph.rank]
    own = np.where(np.isin(graph.activity, ENGINE), noise / 10, noise)
    factor = np.maximum(1.0 + common + rng.normal(0, 1.0, graph.vertices) * own, 0.5)
    seen = graph.with_durations(graph.duration_s * factor)
    samples = graph.samples
    if samples is None:
        return seen
    jitter = 1.0 + rng.normal(0, noise / 3, size)[samples.replica] + rng.normal(0, noise, samples.seconds.size)
    return replace(seen, samples=replace(samples, seconds=samples.seconds * np.maximum(jitter, 0.5)))


def plant(kind: str, rng: np.random.Generator, colocated: bool) -> Plant:
    """A fault of a kind, at a place and of a strength drawn at random; it fits the smallest scale."""
    rank = int(rng.integers(0, min(SCALES) // DEVICES_PER_RANK))
    part = {"slow_device": int(rng.integers(0 if colocated else -1, STAGES)), "slow_tool": int(rng.integers(-1, 1))}
    part |= {"slow_link": int(rng.integers(0, STAGES)), "stage_imbalance": int(rng.integers(0, STAGES))}
    strength = {
        "slow_device": rng.uniform(1.2, 2.0), "slow_link": rng.uniform(4, 10), "long_trajectory": rng.uniform(3, 6),
        "data_imbalance": rng.uniform(1.6, 3.0), "slow_tool": rng.uniform(8, 25), "controller": rng.uniform(6, 25),
        "stage_imbalance": rng.uniform(1.2, 1.6), "kv_cache": rng.uniform(0.1, 0.35),
    }  # fmt: skip
    return Plant(kind, rank, part.get(kind, -1), float(strength[kind]))


def runs(base: Draw, plants: tuple[Plant, ...], seed: int) -> list[PerformanceGraph]:
    """Measured graphs of a run at every scale."""
    return [
        measured(simulate_step(inputs(base, devices, plants, seed)), base.noise, seed + devices) for devices in SCALES
    ]
