"""A pool and a batch as a plan states them: every value decided, nothing open."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from rlperf.specs.frozen import Frozen
from rlperf.specs.pool import ATTRIBUTES, LayoutValues, Placement, PoolSpec, Role, SettingsValues
from rlperf.specs.scorer import Scorer, ScorerKind

_BUDGETS = ("token_budget", "scoring_token_budget", "parked")


class PoolPlan(Frozen):
    """A role with its devices, layout and settings. Colocated pools share the same devices."""

    role: Role
    devices: int
    device: str
    placement: Placement | None = Field(None, description="of a critic: own, on devices of its own")
    layout: LayoutValues
    settings: SettingsValues

    @model_validator(mode="after")
    def _devices_are_the_layouts(self) -> Self:
        if self.devices != self.layout.devices:
            raise ValueError(f"has {self.devices} devices, and a layout of {self.layout.devices}")
        return self

    @property
    def own_devices(self) -> int:
        """Devices beside those of rollout and trainer."""
        return self.devices if self.placement == "own" else 0

    def row(self) -> dict[str, Any]:
        """Columns of a frame, behind the role: devices, degrees, and the settings that a plan chooses."""
        chosen = ("max_running", "memory_fraction") if self.role == "rollout" else _BUDGETS
        settings = {name: getattr(self.settings, name) for name in ("backend", *chosen)}
        values = {"devices": self.devices, **self.layout.model_dump(), **settings}
        return {f"{self.role}_{name}": value for name, value in values.items()}

    def pinned(self) -> PoolSpec:
        """The pool as a job states it that leaves nothing open."""
        return PoolSpec(
            role=self.role, devices=(self.devices,), placement=self.placement, layout=self.layout.pinned(),
            settings=self.settings.pinned(),
        )  # fmt: skip


class ScorerPlan(Frozen):
    """A scorer with its engine; on shared devices it takes turns with the trainer."""

    name: str
    kind: ScorerKind
    placement: Placement
    devices: int
    device: str
    layout: LayoutValues
    settings: SettingsValues

    def pinned(self, scorer: Scorer) -> Scorer:
        """The job's scorer with nothing left open that an engine has."""
        foreign = [each.name for each in ATTRIBUTES if not each.belongs_to("rollout") or each.name == "borrows"]
        layout, settings = self.layout.pinned(), self.settings.pinned()
        decided = {
            "placement": (self.placement,),
            "devices": (self.devices,) if self.placement == "own" else None,
            "layout": layout.model_copy(update={name: None for name in foreign if name in dict(layout)}),
            "settings": settings.model_copy(update={name: None for name in foreign if name in dict(settings)}),
        }
        return scorer.model_copy(update=decided)

    @property
    def own_devices(self) -> int:
        """Devices that nobody else has."""
        return self.devices if self.placement == "own" else 0


class TaskTokens(Frozen):
    """Responses of one task of a mixed batch [tokens]."""

    task: str
    mean: float
    p95: float = Field(description="95th percentile")
    max_response_tokens: int = Field(description="that the task states; the batch has the longest")
    truncated_fraction: float = Field(description="responses cut at it")


class ResponseTokens(Frozen):
    """Responses that a phase is planned for, cut ones at the maximum length [tokens]."""

    mean: float
    p95: float = Field(description="95th percentile")
    tasks: tuple[TaskTokens, ...] = Field((), description="of a mixed batch, each by itself")


class BatchSettings(Frozen):
    """What one rl_step trains on; prompts_per_step and mini_batch count prompts."""

    prompts_per_step: int
    group_size: int
    mini_batch: int
    max_prompt_tokens: int
    max_response_tokens: int
    over_provision: float = Field(1.0, description="above 1: partial rollouts, unfinished responses are continued")
    max_trajectories: int | None = Field(None, description="under way at once; none: any number")
