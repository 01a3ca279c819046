"""What stands beside rollout and trainer, and what it takes of an rl_step."""

from __future__ import annotations

from pydantic import Field

from rlperf.specs.frozen import Frozen
from rlperf.specs.scorer import ScorerKind


class ScorerUse(Frozen):
    """What one scorer takes of an rl_step."""

    name: str
    kind: ScorerKind
    seconds: float = Field(description="that its engine takes for all sequences at hand at once")
    waits_s: float = Field(description="from the last response to its last score")
    memory_bytes: float = Field(description="per device while awake")


class CriticUse(Frozen):
    """What a critic on devices of its own takes of an rl_step, beside the trainer."""

    devices: int
    values_s: float = Field(description="that its scoring pass takes")
    training_s: float = Field(description="that its updates take")
    waits_s: float = Field(description="that the trainer waits for it, where it is the slower one")
