"""The first knob to turn when a trainer does not fit into its memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlperf.cost.trainer.memory import MemoryParts
from rlperf.layout import OFFLOAD, RECOMPUTE, Layout

OPTIMIZER_OFFLOAD = "optimizer offload"


@dataclass(frozen=True)
class MemoryKnob:
    """One thing to change, what it frees on the device (at most), and why; ``field``: of a pool that states it."""

    setting: str
    frees_bytes: float
    why: str
    field: str


def knobs(layout: Layout, parts: MemoryParts, microbatch_tokens: float, chunked_loss: bool = False) -> list[MemoryKnob]:
    """What can be turned for one (scalar) layout, cheapest in time first.

    Order: a chunked loss costs nothing; sharding what data parallelism duplicates costs traffic that overlaps; smaller
    microbatches cost launches; recompute costs up to a third of the step; offload costs host copies.
    """
    found: list[MemoryKnob] = []
    logits, activations = float(parts.logits), float(parts.activations)
    shards = float(layout.shards)
    if not chunked_loss and logits > 0:
        why = "logits and their gradients stand whole in memory"
        found.append(MemoryKnob("fused or chunked loss", 0.9 * logits, why, "chunked_loss"))
    zero = int(layout.zero_stage)
    duplicated = {0: float(parts.optimizer), 1: float(parts.gradients), 2: float(parts.weights)}
    if zero < 3 and shards > 1:
        name = {0: "distributed optimizer (zero_stage 1)", 1: "zero_stage 2", 2: "zero_stage 3 (FSDP)"}[zero]
        why = "every data-parallel rank holds a copy"
        found.append(MemoryKnob(name, duplicated[zero] * (1 - 1 / shards), why, "zero_stage"))
    if int(layout.tensor_parallel) > 1 and not int(layout.sequence_parallel):
        found.append(
            MemoryKnob(
                "sequence_parallel", 0.3 * activations, "norms and residuals are kept on every tensor rank",
                "sequence_parallel",
            )
        )  # fmt: skip
    if microbatch_tokens > 1024 and activations + logits > 0:
        found.append(
            MemoryKnob(
                "half the tokens per microbatch", 0.5 * (activations + logits), "both grow with tokens", "token_budget"
            )
        )
    recompute = RECOMPUTE[int(layout.activation_recompute)]
    if recompute != "full":
        why = f"recompute is {recompute}"
        found.append(MemoryKnob("activation_recompute full", 0.8 * activations, why, "activation_recompute"))
    if OFFLOAD[int(layout.offload)] in ("none", "activations"):
        found.append(
            MemoryKnob(
                OPTIMIZER_OFFLOAD, float(parts.optimizer), "moments and master weights can wait in host", "offload"
            )
        )
    # of a fixed number of devices: what ZeRO shards over all of them does not get smaller on wider replicas
    copied = (
        ("weights and their states", parts.states),
        ("weights and gradients", parts.states - parts.optimizer),
        ("weights", parts.weights),
    )
    if zero < len(copied):
        words, held = copied[zero]
        found.append(MemoryKnob("twice the tensor_parallel", 0.5 * float(held), f"{words} halve", "tensor_parallel"))
    return found


def first_knob(
    layout: Layout,
    parts: MemoryParts,
    limit_bytes: float,
    *,
    microbatch_tokens: float = 4096.0,
    chunked_loss: bool = False,
    set_by_planner: Collection[str] = (),
) -> MemoryKnob | None:
    """The first knob to turn for one (scalar) layout that does not fit; None where it fits or none is left.

    The cheapest that alone frees enough, else the one that frees most.

    Parameters
    ----------
    limit_bytes : device memory that may be used [bytes]
    set_by_planner : fields of which every value has been tried, and none fits
    """
    excess = float(parts.total) - limit_bytes
    if excess <= 0:
        return None
    every = knobs(layout, parts, microbatch_tokens, chunked_loss)
    choices = [knob for knob in every if knob.field not in set_by_planner]
    enough = [knob for knob in choices if knob.frees_bytes >= excess and knob.setting != OPTIMIZER_OFFLOAD]
    if enough:
        return enough[0]
    # nothing alone is enough: begin with what frees most, offload only where it stands out by far
    counts = {OPTIMIZER_OFFLOAD: 0.5}
    return max(choices, key=lambda knob: knob.frees_bytes * counts.get(knob.setting, 1.0), default=None)
