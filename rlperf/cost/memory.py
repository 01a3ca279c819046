"""Colocated phases of one rl_step as a timeline of bytes, and the first knob to turn when something does not fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.cost.trainer_memory import MemoryParts
from rlperf.layout import OFFLOAD, RECOMPUTE, FloatArray, Layout

OPTIMIZER_OFFLOAD = "optimizer offload"
ROLLOUT, SCORING, TRAINING, WEIGHT_SYNC = "rollout", "scoring", "training", "weight_sync"


@dataclass(frozen=True)
class EngineBytes:
    """What a colocated engine takes of one device; every field [bytes], broadcast with a `Layout`.

    Attributes
    ----------
    total : while it generates: weights, cache, activations, graphs, its own context
    weights : of those, the weights
    residue : what stays when it sleeps: CUDA graphs, context, communicators
    """

    total: FloatArray
    weights: FloatArray
    residue: FloatArray


@dataclass(frozen=True)
class Phase:
    """Bytes on a device and in host memory (per device) during one phase."""

    name: str
    device_bytes: FloatArray
    host_bytes: FloatArray


@dataclass(frozen=True)
class MemoryTimeline:
    """Phases in the order of an rl_step; the largest decides."""

    phases: tuple[Phase, ...]

    @property
    def peak_bytes(self) -> FloatArray:
        """Largest phase on the device [bytes]."""
        return np.asarray(np.max(np.broadcast_arrays(*(phase.device_bytes for phase in self.phases)), axis=0))

    @property
    def peak_phase(self) -> np.ndarray:
        """Index of that phase."""
        return np.asarray(np.argmax(np.broadcast_arrays(*(phase.device_bytes for phase in self.phases)), axis=0))

    @property
    def host_bytes(self) -> FloatArray:
        """Largest phase in host memory, per device [bytes]."""
        return np.asarray(np.max(np.broadcast_arrays(*(phase.host_bytes for phase in self.phases)), axis=0))

    def __getitem__(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)


def colocated_memory(
    training: MemoryParts,
    engine: EngineBytes,
    *,
    scoring: MemoryParts | None = None,
    sleep_level: int = 1,
    trainer_offloaded: bool = True,
    reference_bytes: float | FloatArray = 0.0,
    reference_offloaded: bool = True,
    sync_bucket_bytes: float = 2.0e9,
    pinned_copies: float = 1.0,
) -> MemoryTimeline:
    """Timeline of a trainer and an engine that take turns on the same devices.

    ============ ===================================== ===========================================
    phase        engine                                trainer
    ============ ===================================== ===========================================
    rollout      all of it                             context, or its states too if not offloaded
    scoring      asleep                                weights and the forward's working set, reference
    training     asleep                                all of it
    weight_sync  weights and residue, cache not yet    weights and one bucket
    ============ ===================================== ===========================================

    Parameters
    ----------
    training, scoring : of `trainer_memory` with and without ``forward_only``; without scoring that phase is left out
    sleep_level : 0 the engine keeps everything, 1 its weights wait in host memory, 2 they are dropped
    trainer_offloaded : weights, gradients and optimizer wait in host memory during rollout
    reference_bytes : weights of a reference policy on a device; needed while scoring only
    sync_bucket_bytes : gathered weights under way to the engine
    pinned_copies : host copies of an offloaded state (2 where pinned staging buffers double it)
    """
    asleep = engine.total if sleep_level == 0 else engine.residue
    in_host = engine.weights if sleep_level == 1 else np.zeros(())
    reference = np.asarray(reference_bytes, dtype=np.float64)
    waiting = np.zeros(()) if reference_offloaded else reference
    reference_host = pinned_copies * reference if reference_offloaded else np.zeros(())
    states = training.states
    idle = training.context + waiting + (0.0 if trainer_offloaded else states)
    parked = pinned_copies * states if trainer_offloaded else np.zeros(())
    always = training.host + reference_host
    phases = [Phase(ROLLOUT, engine.total + idle, always + parked)]
    if scoring is not None:
        moments = 0.0 if trainer_offloaded else training.gradients + training.optimizer
        elsewhere = pinned_copies * (training.gradients + training.optimizer) if trainer_offloaded else 0.0
        device = asleep + scoring.total + reference + moments
        phases.append(Phase(SCORING, device, always + in_host + elsewhere))
    phases.append(Phase(TRAINING, asleep + training.total + waiting, always + in_host))
    weights = training.weights + training.context + np.minimum(sync_bucket_bytes, engine.weights)
    others = training.gradients + training.optimizer
    awake = engine.total if sleep_level == 0 else engine.weights + engine.residue
    phases.append(
        Phase(
            WEIGHT_SYNC,
            awake + weights + waiting + (0.0 if trainer_offloaded else others),
            always + (pinned_copies * others if trainer_offloaded else 0.0),
        )
    )
    return MemoryTimeline(tuple(phases))


@dataclass(frozen=True)
class Knob:
    """One thing to change, what it frees on the device (at most), and why."""

    setting: str
    frees_bytes: float
    why: str


def knobs(layout: Layout, parts: MemoryParts, microbatch_tokens: float, chunked_loss: bool = False) -> list[Knob]:
    """What can be turned for one (scalar) layout, cheapest in time first.

    Order: a chunked loss costs nothing; sharding what data parallelism duplicates costs traffic that overlaps; smaller
    microbatches cost launches; recompute costs up to a third of the step; offload costs host copies.
    """
    found: list[Knob] = []
    logits, activations = float(parts.logits), float(parts.activations)
    shards = float(layout.shards)
    if not chunked_loss and logits > 0:
        found.append(Knob("fused or chunked loss", 0.9 * logits, "logits and their gradients stand whole in memory"))
    zero = int(layout.zero_stage)
    duplicated = {0: float(parts.optimizer), 1: float(parts.gradients), 2: float(parts.weights)}
    if zero < 3 and shards > 1:
        name = {0: "distributed optimizer (zero_stage 1)", 1: "zero_stage 2", 2: "zero_stage 3 (FSDP)"}[zero]
        found.append(Knob(name, duplicated[zero] * (1 - 1 / shards), "every data-parallel rank holds a copy"))
    if int(layout.tensor_parallel) > 1 and not int(layout.sequence_parallel):
        found.append(Knob("sequence_parallel", 0.3 * activations, "norms and residuals are kept on every tensor rank"))
    if microbatch_tokens > 1024 and activations + logits > 0:
        found.append(Knob("half the tokens per microbatch", 0.5 * (activations + logits), "both grow with tokens"))
    recompute = RECOMPUTE[int(layout.activation_recompute)]
    if recompute != "full":
        found.append(Knob("activation_recompute full", 0.8 * activations, f"recompute is {recompute}"))
    if OFFLOAD[int(layout.offload)] in ("none", "activations"):
        found.append(Knob(OPTIMIZER_OFFLOAD, float(parts.optimizer), "moments and master weights can wait in host"))
    states = float(parts.states)
    found.append(Knob("twice the tensor_parallel", 0.5 * states, "weights and their states halve"))
    return found


def first_knob(
    layout: Layout,
    parts: MemoryParts,
    limit_bytes: float,
    *,
    microbatch_tokens: float = 4096.0,
    chunked_loss: bool = False,
    timeline: MemoryTimeline | None = None,
    host_limit_bytes: float | None = None,
) -> Knob | None:
    """The first knob to turn for one (scalar) layout that does not fit; None where it fits.

    The cheapest that alone frees enough, else the one that frees most. Where a colocated timeline peaks in another
    phase than training, that phase's own knob comes first; host memory that runs out names what waits there.

    Parameters
    ----------
    limit_bytes : device memory that may be used [bytes]
    host_limit_bytes : host memory per device [bytes]
    """
    if timeline is not None:
        if host_limit_bytes is not None and float(timeline.host_bytes) > host_limit_bytes:
            return Knob("sleep_level 2, or less offload", float(timeline.host_bytes) - host_limit_bytes,
                        "host memory runs out: offloaded states, engine weights and reference wait there")  # fmt: skip
        excess = float(timeline.peak_bytes) - limit_bytes
        name = timeline.phases[int(timeline.peak_phase)].name
        if excess > 0 and name == ROLLOUT:
            return Knob("rollout memory fraction", excess, "the engine takes more than the trainer leaves")
        if excess > 0 and name == WEIGHT_SYNC:
            return Knob("smaller sync bucket", excess, "weights of trainer and engine stand side by side")
    else:
        excess = float(parts.total) - limit_bytes
    if excess <= 0:
        return None
    choices = knobs(layout, parts, microbatch_tokens, chunked_loss)
    enough = [knob for knob in choices if knob.frees_bytes >= excess and knob.setting != OPTIMIZER_OFFLOAD]
    if enough:
        return enough[0]
    # nothing alone is enough: begin with what frees most, offload only where it stands out by far
    return max(choices, key=lambda knob: knob.frees_bytes * (0.5 if knob.setting == OPTIMIZER_OFFLOAD else 1.0))
