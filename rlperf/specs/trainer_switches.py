"""Switches of a training stack: what it overlaps, captures, drops and compiles, unless its user says otherwise."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlperf.specs.frozen import Frozen

Graph = Literal["none", "partial", "full_iteration"]
"""What CUDA graphs capture: nothing, parts of a layer (attention, router, preprocessing), or a whole iteration."""


def _not_counted(batching: str) -> str:
    if batching == "count":
        raise ValueError("cutting by count is what a job asks for (`microbatch`), no trait of a framework")
    return batching


Batching = Annotated[Literal["rank", "all", "count"], AfterValidator(_not_counted)]
"""Which sequences are cut into microbatches together; ``count`` is set for a job, and no file states it."""


class Switches(Frozen):
    """How a stack runs: facts of its configuration. What a switch is worth is a constant of `Timing`."""

    data_overlap: bool = Field(
        True, description="gradients and gathered weights travel under compute, bucket by bucket"
    )
    tensor_overlap: bool = Field(
        True, description="tensor-parallel traffic is cut up and sent under the products (userbuffers, async TP)"
    )
    gathers_once: bool = Field(
        True,
        description="matrices behind a norm share one gather of their tensor-parallel input, not one each",
    )
    gathers_narrow: bool = Field(
        False, description="tensor-parallel ranks cast what 8-bit products read before they gather it"
    )
    expert_overlap: bool = Field(
        False, description="all-to-all of experts runs under another microbatch's compute (combined 1F1B)"
    )
    pipeline_overlap: bool = Field(True, description="activations travel to the next stage under compute")
    cuda_graph: Graph = Field("none", description="what CUDA graphs capture: none, partial or full_iteration")
    dispatcher: Literal["alltoall", "deepep", "hybridep"] = Field(
        "alltoall",
        description="a copy per expert, or (DeepEP, HybridEP) one per device in a node and one per node beyond",
    )
    drops_tokens: bool = Field(
        False,
        description="experts have a capacity and are padded to it: shapes are known, nothing waits for the router",
    )
    ring: Literal["balanced", "unbalanced"] = Field(
        "balanced", description="whether context-parallel ranks hold a part from both ends of a causal sequence"
    )
    fused: bool = Field(True, description="small passes are fused, by a compiler or by hand, not run one by one")
    rowwise: bool = Field(False, description="8-bit products scale every row, not the whole tensor")

    def changed(self, stated: Switches) -> Switches:
        """These, with what another states in their place.

        >>> Switches(fused=False).changed(Switches(dispatcher="deepep")).fused
        False
        """
        return self.model_copy(update={name: getattr(stated, name) for name in stated.model_fields_set})
