"""Rollout: the engine with its tail. Replicas event by event, and a closed form for screening."""

from rlperf.sim.rollout.closed_form import StepCensus, take_census
from rlperf.sim.rollout.options import EngineOptions, Speculation
from rlperf.sim.rollout.replica import simulate_replica
from rlperf.sim.rollout.rollout import LostSeconds, ReplicaCosts, RolloutResult, simulate_rollout
from rlperf.sim.rollout.tail import GroupSource, PartialRollouts, PolicyRun
from rlperf.sim.rollout.timeline import ReplicaTimeline, Segments
from rlperf.sim.rollout.trajectories import Trajectories

__all__ = [
    "EngineOptions",
    "GroupSource",
    "LostSeconds",
    "PartialRollouts",
    "PolicyRun",
    "ReplicaCosts",
    "ReplicaTimeline",
    "RolloutResult",
    "Segments",
    "Speculation",
    "StepCensus",
    "Trajectories",
    "simulate_replica",
    "simulate_rollout",
    "take_census",
]
