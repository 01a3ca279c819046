"""Rollout seconds of lengths in closed form, for judging a length model. The engine simulator lives in `rlperf.sim`.

A replica runs up to max_running trajectories at once; the next starts where one ends. An engine_step takes

    t = step_s + sequence_s * running + context_s * (tokens in the KV cache)

which sums over the whole rollout, whatever the order, to

    T = step_s * K + sequence_s * sum_i L_i + context_s * sum_i (L_i P_i + L_i (L_i + 1) / 2) + prefill_s * sum_i U_i

K engine_steps until the last trajectory ends (list scheduling in recorded order), L_i generated, P_i prompt, U_i prompt
tokens not found in the cache. Tool time of a trajectory counts as engine_steps that it waits. The rollout takes as long
as its slowest replica. Exact where every engine_step decodes all running trajectories and prefill does not overlap.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rlperf.workload.lengths import Float, LengthTable


@dataclass(frozen=True)
class LinearEngine:
    """An engine whose engine_step is linear in its load, and how many replicas share the prompts."""

    replicas: int
    max_running: int
    step_s: float
    sequence_s: float
    context_s: float
    prefill_s: float

    def __call__(self, table: LengthTable) -> float:
        """Rollout time [s] of one rl_step; prompt groups are dealt to the replicas one after the other."""
        rows = table.trajectories()
        generated = rows.response_tokens.astype(np.float64)
        index, _ = rows.group_index()
        replica = index % self.replicas
        prompts, kv = rows.prompt_tokens.astype(np.float64), _kv_token_steps(table)
        fresh = prompts if rows.cached_tokens is None else _uncached(table)
        wait = np.zeros(rows.n) if rows.tool_latency_s is None else np.asarray(rows.tool_latency_s)
        steps = generated + np.ceil(wait / max(self.step_s, 1e-9))
        linear = self.sequence_s * generated + self.context_s * kv + self.prefill_s * fresh
        work = np.bincount(replica, linear, self.replicas)
        spans = [makespan(steps[replica == r], self.max_running) for r in range(self.replicas)]
        return float(np.max(work + self.step_s * np.array(spans)))


def makespan(lengths: Float, slots: int) -> float:
    """Engine_steps until the last of the lengths ends, `slots` at a time, in order.

    >>> makespan(np.array([3.0, 1.0, 1.0, 4.0]), 2)
    6.0
    """
    if not lengths.size:
        return 0.0
    if lengths.size <= slots:
        return float(lengths.max())
    running = lengths[:slots].tolist()
    heapq.heapify(running)
    latest = max(running)
    for length in lengths[slots:].tolist():
        end = running[0] + length
        heapq.heapreplace(running, end)
        latest = max(latest, end)
    return float(latest)


def _kv_token_steps(table: LengthTable) -> Float:
    """Tokens in the KV cache summed over a trajectory's engine_steps [token steps], per trajectory."""
    length = table.response_tokens.astype(np.float64)
    area = length * table.prompt_tokens + 0.5 * length * (length + 1.0)
    return area if table.trajectory is None else np.asarray(np.bincount(table._trajectory_index()[1], area))


def _uncached(table: LengthTable) -> Float:
    assert table.cached_tokens is not None
    fresh = (table.prompt_tokens - table.cached_tokens).astype(np.float64)
    return fresh if table.trajectory is None else np.asarray(np.bincount(table._trajectory_index()[1], fresh))


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    replicas: int = Field(ge=1)
    max_running: int = Field(ge=1)
    step_s: float = Field(ge=0)
    sequence_s: float = Field(ge=0)
    context_s: float = Field(ge=0)
    prefill_s: float = Field(ge=0)


def reference_layouts() -> list[tuple[str, LinearEngine]]:
    """Layouts for the fidelity measure: latency-bound to throughput-bound, with and without queueing.

    Their constants are assumed round figures in `fidelity_layouts.yaml`; the measure is a ratio of times, not seconds.
    """
    import yaml

    path = Path(__file__).parent / "presets" / "fidelity_layouts.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    entries = [_Entry.model_validate(e) for e in content["layouts"]]
    return [(e.name, LinearEngine(**e.model_dump(exclude={"name"}))) for e in entries]


__all__ = ["LinearEngine", "makespan", "reference_layouts"]
