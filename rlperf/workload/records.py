"""What a recording holds besides lengths: reward times, DAPO filter decisions, tool latencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlperf.errors import Problem
from rlperf.workload.formats import DamagedError, number, whole
from rlperf.workload.lengths import Float, Int, LengthTable


@dataclass(frozen=True)
class RewardTiming:
    """Reward stage of one data-parallel rank in one rl_step (`reward_timings_step_N.jsonl`)."""

    rl_step: int
    rank: int
    reward_time_s: float

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> RewardTiming:
        return cls(
            whole(record, "step"),
            whole(record, "dp_rank", default=whole(record, "rank", default=0)),
            number(record, "reward_time_s"),
        )


@dataclass(frozen=True)
class FilterBatch:
    """One generation batch of DAPO and which of its prompts survived (`dapo_filter_indices.jsonl`)."""

    generation_batch: int
    prompts: int
    kept: int
    used: int
    train_prompts: int

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> FilterBatch:
        prompts = whole(record, "prompt_count", least=1)
        counts = []
        for key in ("kept_prompt_indices", "used_prompt_indices"):
            indices = record.get(key)
            if type(indices) is not list or not all(type(i) is int for i in indices):
                raise DamagedError(f"field {key!r} must be a list of prompt indices")
            if len(set(indices)) != len(indices) or any(not 0 <= i < prompts for i in indices):
                raise DamagedError(f"field {key!r} must hold different indices below prompt_count = {prompts}")
            counts.append(len(indices))
        stated = record.get("kept_prompt_count")
        if stated is not None and stated != counts[0]:
            raise DamagedError(f"kept_prompt_count says {stated}, but {counts[0]} indices are kept")
        if counts[1] > counts[0]:
            raise DamagedError(f"{counts[1]} prompts used, but only {counts[0]} kept")
        step, trained = whole(record, "workload_step"), whole(record, "train_batch_size", default=0)
        return cls(step, prompts, counts[0], counts[1], trained)


@dataclass(frozen=True)
class ToolLatency:
    """One tool call of a latency log."""

    rl_step: int
    tool: str
    latency_s: float


@dataclass(frozen=True)
class Recording:
    """Everything that was read from a set of PolyTrace files."""

    lengths: LengthTable
    rewards: tuple[RewardTiming, ...] = ()
    filters: tuple[FilterBatch, ...] = ()
    tool_latencies: tuple[ToolLatency, ...] = ()
    distributions: tuple[Mapping[str, Any], ...] = ()
    max_context_tokens: int | None = None
    cap_inferred: bool = False
    skipped: tuple[Problem, ...] = ()
    skipped_groups: int = 0
    files: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    samples_read: int = field(default=0)

    @property
    def empty(self) -> bool:
        """Whether it holds nothing: all records were damaged."""
        return not (self.lengths.n or self.rewards or self.filters or self.tool_latencies or self.distributions)


def reward_max_over_ranks(rewards: tuple[RewardTiming, ...]) -> Float:
    """Reward time [s] per rl_step: the slowest rank holds the rl_step back."""
    steps: Int = np.array(sorted({r.rl_step for r in rewards}), np.int64)
    return np.array([max(r.reward_time_s for r in rewards if r.rl_step == s) for s in steps], np.float64)
