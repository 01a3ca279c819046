"""Causes removed from the trajectories of a rollout, which is then simulated again: what a cause costs by the simulator
itself, not estimated on the graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlperf.diagnose.peers import Thresholds, apart
from rlperf.layout import FloatArray
from rlperf.sim.rollout import Trajectories


def evened(served: Trajectories) -> Trajectories:
    """No trajectory generates more than the mean."""
    tokens = served.generated_tokens
    return _shortened(served, np.minimum(float(tokens.mean()) / tokens, 1.0))


def without_long(served: Trajectories) -> Trajectories:
    """Trajectories that stand apart are as long as the longest of the others."""
    tokens = served.generated_tokens.astype(np.float64)
    count = apart(tokens, Thresholds().gap)
    if not count:
        return served
    order = np.argsort(-tokens, kind="stable")
    factor = np.ones(tokens.size)
    factor[order[:count]] = tokens[order[count]] / tokens[order[:count]]
    return _shortened(served, factor)


def without_tools(served: Trajectories) -> Trajectories:
    """Tools answer at once."""
    return replace(served, tool_latency_s=np.zeros(served.n_turns))


def _shortened(served: Trajectories, factor: FloatArray) -> Trajectories:
    """Generated tokens times a factor per trajectory, prompts of later turns accordingly."""
    owner = served.turn_owner
    tokens = np.maximum(np.round(served.response_tokens * factor[owner]), 1).astype(np.int64)
    less = np.cumsum(served.response_tokens - tokens) - (served.response_tokens - tokens)
    less = less - less[served.offsets[:-1]][owner]
    cached = None if served.cached_tokens is None else np.maximum(served.cached_tokens - less, 0)
    return replace(
        served, response_tokens=tokens, prompt_tokens=np.maximum(served.prompt_tokens - less, 1), cached_tokens=cached
    )
