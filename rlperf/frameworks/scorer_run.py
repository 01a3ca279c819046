"""One scorer as a framework's files state it, in rlperf's words and units."""

from __future__ import annotations

from dataclasses import dataclass

from rlperf.specs.pool import Placement
from rlperf.specs.scorer import ScorerKind


@dataclass(frozen=True)
class ScorerRun:
    """A teacher, reward model or judge beside the pools; 0 devices: those of the trainer.

    share : of the sequences, where several have them; files do not say it, the rows of their data do
    prompt_tokens, response_tokens : read beside a sequence and written of it; what asks it states them, no file
    """

    name: str
    kind: ScorerKind
    placement: Placement
    architecture: str
    devices: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    attention_data_parallel: int = 1
    expert_parallel: int = 1
    memory_fraction: float | None = None
    max_running: int | None = None
    top_k: int = 1
    share: float = 1.0
    prompt_tokens: int = 0
    response_tokens: int = 1
