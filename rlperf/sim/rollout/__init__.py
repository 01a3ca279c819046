"""Rollout: the engine with its tail. Replicas event by event, and a closed form for screening."""

from rlperf.sim.rollout.closed_form import StepCensus, closed_form_makespan_s, take_census
from rlperf.sim.rollout.options import EngineOptions, Speculation
from rlperf.sim.rollout.replica import simulate_replica
from rlperf.sim.rollout.rollout import LostSeconds, Replica, RolloutResult, simulate_rollout
from rlperf.sim.rollout.timeline import ReplicaTimeline, Segments
from rlperf.sim.rollout.token_loop import run_token_loop
from rlperf.sim.rollout.trajectories import Trajectories

__all__ = [
    "EngineOptions",
    "LostSeconds",
    "Replica",
    "ReplicaTimeline",
    "RolloutResult",
    "Segments",
    "Speculation",
    "StepCensus",
    "Trajectories",
    "closed_form_makespan_s",
    "run_token_loop",
    "simulate_replica",
    "simulate_rollout",
    "take_census",
]
