"""Rollout seconds of lengths on engine layouts, by the rollout simulator: the system measure of `workload fidelity`.

Lengths know no simulator and the simulator knows no length model; they meet here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rlperf.cost.engine_memory import engine_limits
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.replica import Replica
from rlperf.layout import FloatArray, Layout
from rlperf.sim.rollout import EngineOptions, StepCensus, Trajectories, take_census
from rlperf.sim.rollout.routing import route
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.workload.fidelity import Rollouts
from rlperf.workload.lengths import LengthTable

ENGINE = "vllm"


@dataclass(frozen=True)
class EngineLayout:
    """Equal replicas of a shipped architecture on a shipped device; whole prompt groups go to replicas in equal shares.

    Attributes
    ----------
    architecture, device : names of profiles
    tensor_parallel : devices of one replica
    replicas : how many share the prompts
    max_running : requests that a replica runs at once
    """

    architecture: str
    device: str
    tensor_parallel: int
    replicas: int
    max_running: int

    @property
    def name(self) -> str:
        """As tables name it."""
        return (
            f"{self.architecture}, {self.replicas} x TP{self.tensor_parallel} {self.device}, {self.max_running} running"
        )

    @cached_property
    def engine(self) -> tuple[EngineStepCost, EngineLimits, EngineOptions]:
        """Cost of an engine_step, limits of one replica and how it schedules, by the shipped calibrations."""
        arch, hardware = load_architecture(self.architecture), load_hardware(self.device)
        engine, layout = load_engine_calibration(ENGINE), Layout.of(tensor_parallel=self.tensor_parallel)
        replica = Replica.of(arch, hardware, engine, layout)
        limits = replace(engine_limits(replica), max_running=self.max_running)
        return engine_step_cost(replica), limits, EngineOptions.of(engine)


LAYOUTS = (
    EngineLayout("Qwen2.5-7B", "h100_sxm", 1, 8, 1024),
    EngineLayout("Qwen2.5-32B", "h200_sxm", 4, 8, 1024),
    EngineLayout("Qwen2.5-7B", "h100_sxm", 1, 2, 256),
    EngineLayout("Qwen2.5-32B", "h200_sxm", 4, 2, 256),
    EngineLayout("Qwen2.5-14B", "h200_sxm", 2, 2, 32),
    EngineLayout("Qwen2.5-32B", "h200_sxm", 4, 2, 32),
)
"""From latency-bound (everything runs at once on many replicas) to queueing on few; 7B to 32B on two devices."""

MULTI_TURN = (LAYOUTS[0], LAYOUTS[3])
"""Recordings with tools need a simulation for every layout, so they are judged on two."""


@dataclass(frozen=True)
class CensusRollouts:
    """Rollout time of lengths on several layouts.

    Without tools, which requests share an engine_step does not depend on its seconds: one simulation serves all
    layouts of equal replicas and limits, exactly (`take_census`).
    """

    layouts: Sequence[EngineLayout]

    def __call__(self, table: LengthTable) -> FloatArray:
        """Seconds until the last trajectory of an rl_step ends [s] ``[layouts]``."""
        trajectories = Trajectories.from_table(table)
        shares: dict[int, list[Trajectories]] = {}
        counted: dict[tuple[int, EngineLimits, int | None], list[StepCensus]] = {}
        seconds = np.empty(len(self.layouts))
        for at, layout in enumerate(self.layouts):
            cost, limits, options = layout.engine
            if layout.replicas not in shares:
                shares[layout.replicas] = split(trajectories, layout.replicas)
            parts = shares[layout.replicas]
            own = None if trajectories.single_turn else at
            key = layout.replicas, unlimited_if_roomy(parts, limits), own
            if key not in counted:
                counted[key] = [take_census(part, key[1], cost=cost, options=options) for part in parts]
            seconds[at] = max(float(census.makespan_s(cost)) for census in counted[key])
        return seconds


def split(trajectories: Trajectories, replicas: int) -> list[Trajectories]:
    """What each replica serves; replicas without a prompt group are left out."""
    replica = route(trajectories, "static_group", np.ones(replicas))
    return [trajectories.take(np.flatnonzero(replica == r)) for r in np.unique(replica)]


def unlimited_if_roomy(parts: Sequence[Trajectories], limits: EngineLimits) -> EngineLimits:
    """The limits without the cache's, where it holds all that a replica is ever given."""

    def most(part: Trajectories) -> float:
        blocks = -(-(part.final_tokens[part.offsets[1:] - 1] + 1) // limits.block_tokens) + 1
        return float(blocks.sum() + 1) * limits.block_tokens

    roomy = max(map(most, parts)) <= (1.0 - limits.watermark) * limits.kv_tokens
    return replace(limits, kv_tokens=np.inf) if roomy else limits


def rollouts(multi_turn: bool = False) -> Rollouts:
    """The layouts of the system measure, ready to be asked for seconds."""
    layouts = MULTI_TURN if multi_turn else LAYOUTS
    return Rollouts(tuple(layout.name for layout in layouts), CensusRollouts(layouts))
