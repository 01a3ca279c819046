"""What a trainer backend can do: its degree axes, what is sharded, recomputed and offloaded, and what excludes what.

The table of one backend stands under ``capability`` in its file in ``hwprofiles/calibrations/trainers``. The planner
enumerates it and refuses what it leaves out; nothing in rlperf asks for a backend by name.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar, get_args

from pydantic import Field, model_validator

from rlperf.specs.frozen import Frozen

Degree = Literal[
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "ulysses",
    "expert_parallel",
    "expert_tensor_parallel",
    "virtual_pipeline",
    "shard_size",
]
"""Axes that a backend may have beside data parallel; context_parallel is a ring, shard_size the group of HSDP."""
DEGREES: tuple[Degree, ...] = get_args(Degree)
Use = Literal["searched", "stated"]
"""Opened by the planner, or taken only where a job states it."""
Value = TypeVar("Value")


class Options(Frozen, Generic[Value]):
    """Values of one setting: those that the planner tries, and those that it takes only where a job states them."""

    searched: tuple[Value, ...] = Field(min_length=1)
    stated: tuple[Value, ...] = ()

    @property
    def all(self) -> tuple[Value, ...]:
        """Every value that the backend has."""
        return (*self.searched, *self.stated)


class Requirement(Frozen):
    """What a layout must fulfil beyond its axes: an expression over ``trainer``, as in a framework's rules."""

    require: str
    source: str


class Capability(Frozen):
    """The capability table of one backend.

    Attributes
    ----------
    degrees : degree -> ``searched`` or ``stated``; a degree that is left out is always 1
    zero_stages : 0 replicas, 1 optimizer sharded, 2 gradients, 3 weights
    sequence_parallel : ``with_tensor`` (on wherever tensor_parallel is above 1, unless a job says so), ``stated``, none
    uneven_ends : layers of the first and last pipeline stage can be stated
    packing, lora : sequences are packed without padding; adapters are trained
    requires : combinations that it excludes
    frameworks : RL framework -> the backend whose keys and rules stand for this one there, where not its own
    """

    degrees: dict[Degree, Use] = Field(default_factory=dict)
    zero_stages: Options[Literal[0, 1, 2, 3]]
    activation_recompute: Options[Literal["none", "selective", "full"]]
    offload: Options[Literal["none", "optimizer", "activations", "both"]] = Options(searched=("none",))
    sequence_parallel: Literal["with_tensor", "stated"] | None = None
    uneven_ends: bool = False
    packing: bool = True
    lora: bool = True
    requires: tuple[Requirement, ...] = ()
    frameworks: dict[str, str] = Field(default_factory=dict)
    source: str

    @model_validator(mode="after")
    def _stages_come_with_a_pipeline(self) -> Capability:
        alone = "pipeline_parallel" not in self.degrees
        if alone and (self.uneven_ends or "virtual_pipeline" in self.degrees):
            raise ValueError("virtual_pipeline and uneven_ends need the degree pipeline_parallel")
        return self

    def has(self, degree: Degree) -> bool:
        """Whether the degree can be above 1."""
        return degree in self.degrees

    def searches(self, degree: Degree) -> bool:
        """Whether the planner opens the degree by itself."""
        return self.degrees.get(degree) == "searched"

    @property
    def usual_zero_stage(self) -> int:
        """What a run shards that does not say: the most of what the planner tries."""
        return max(self.zero_stages.searched)

    def keys_in(self, framework: str) -> str | None:
        """The backend whose keys a framework has for this one, where that is another."""
        return self.frameworks.get(framework)
