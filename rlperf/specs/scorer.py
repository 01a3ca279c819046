"""Scorer: a model beside the policy that reads the sequences of an rl_step before they are trained on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlperf.specs.choice import Counts
from rlperf.specs.frozen import Frozen
from rlperf.specs.pool import ATTRIBUTES, LayoutChoice, Placement, PoolSettings
from rlperf.units import NonNegativeInt, PositiveInt

ScorerKind = Literal["teacher", "reward", "judge", "reference"]
"""Teacher and reference return a log-probability of every token, a reward model one number, a judge text."""


def _as_tuple(given: object) -> object:
    return (given,) if isinstance(given, str) else given


class Scorer(Frozen):
    """A model that scores what the policy generated: who it is, what it reads and writes, and where it runs."""

    name: str = Field(min_length=1)
    kind: ScorerKind
    architecture: str | None = Field(None, description="default: the policy's")
    share: float = Field(1.0, gt=0, le=1, description="of the sequences, where teachers of several domains share them")
    prompt_tokens: NonNegativeInt = Field(0, description="read beside the sequence: instructions, a rubric")
    response_tokens: PositiveInt = Field(1, description="written per sequence; 1: it only reads")
    top_k: PositiveInt = Field(1, description="log-probabilities that a teacher returns per token")
    placement: Annotated[
        tuple[Placement, ...],
        BeforeValidator(_as_tuple, json_schema_input_type=Placement | list[Placement]),
        Field(
            min_length=1, description="own: devices of its own; shared: the trainer's, in turn; a list leaves it open"
        ),
    ] = ("own", "shared")
    devices: Counts | None = Field(None, description="of its own; default: the planner's choice")
    overlap: bool | None = Field(
        None,
        description="on devices of its own: sequences are scored as they end, while others are generated; default: as "
        "the framework hides rewards",
    )
    layout: LayoutChoice = LayoutChoice()
    settings: PoolSettings = PoolSettings()

    @model_validator(mode="after")
    def _is_an_engine(self) -> Scorer:
        stated = {**self.layout.stated(), **self.settings.stated()}
        given = [
            a.name for a in ATTRIBUTES if a.name in stated and (not a.belongs_to("rollout") or a.name == "borrows")
        ]
        if given:
            raise ValueError(f"{', '.join(given)} cannot be set on a scorer: it is served by an engine")
        if self.top_k > 1 and self.kind != "teacher":
            raise ValueError(f"only a teacher returns several log-probabilities per token (top_k), not a {self.kind}")
        if self.devices is not None and "own" not in self.placement:
            raise ValueError("devices are those of its own, and placement leaves only the trainer's")
        return self

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Where it may run: whoever states devices of its own wants them."""
        return ("own",) if self.devices is not None else self.placement

    @property
    def reads_every_token(self) -> bool:
        """Whether every token of the sequence goes through the head, not the last one alone."""
        return self.kind in ("teacher", "reference")

    @property
    def fields(self) -> float:
        """Numbers of 4 bytes returned per response token, mean over all sequences, read or not.

        A log-probability, and of several each the 8 bytes of an id.
        """
        if not self.reads_every_token:
            return 0.0
        return self.share * (1 if self.top_k == 1 else 3 * self.top_k)
