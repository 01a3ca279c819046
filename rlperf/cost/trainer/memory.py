"""Device and host memory of a trainer: states by what shards them, activations by recompute mode and schedule position.

Derivations: ``docs/theory/memory.md``. Two moments compete, and the larger one is reported part by part: the backward
of the first pipeline stages, which keep the most microbatches, and the loss on the last stage, which keeps the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from rlperf.cost.batching import Microbatches
from rlperf.cost.layers import stack_of
from rlperf.cost.layers.vision import tower_bytes
from rlperf.cost.speculation import draft_head
from rlperf.cost.trainer.activations import layer_activations
from rlperf.cost.trainer.parallel import in_shards
from rlperf.cost.trainer.parameters import (
    OFFLOADS_ACTIVATIONS,
    OFFLOADS_OPTIMIZER,
    StageParameters,
    head_columns,
    in_flight,
    lora_parameters,
    stage_parameters,
)
from rlperf.cost.trainer_device import PLAIN, Keeping, UpdateOptions
from rlperf.layout import RECOMPUTE, FloatArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware
from rlperf.specs.trainer_calibration import TrainerCalibration


@dataclass(frozen=True)
class MemoryParts:
    """Peak memory of one device by what it is spent on; every field [bytes], broadcast together.

    Attributes
    ----------
    weights, gradients, optimizer : states that stay on the device
    activations : kept for the backward, and the working set of the layer at hand
    logits : of the loss, with what its forward and backward keep beside them
    communication : gathered weights, gradients on their way, exchange buffers
    workspace : libraries' scratch, fragmentation of the allocator
    context : device context and communicators, outside the allocator
    host : host memory that this device's process keeps (offloaded states and activations); not part of `total`
    low, high : 5th and 95th percentile of the total over the total [1]
    """

    weights: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    activations: FloatArray
    logits: FloatArray
    communication: FloatArray
    workspace: FloatArray
    context: FloatArray
    host: FloatArray
    low: float = 0.92
    high: float = 1.08

    @property
    def total(self) -> FloatArray:
        """All device parts together [bytes]."""
        return sum((getattr(self, name) for name in DEVICE_PARTS), np.zeros(()))

    @property
    def allocated(self) -> FloatArray:
        """What the framework's allocator reports: without context [bytes]."""
        return self.total - self.context

    @property
    def states(self) -> FloatArray:
        """Weights, gradients and optimizer: what stays between two microbatches [bytes]."""
        return self.weights + self.gradients + self.optimizer

    def with_(self, **changes: FloatArray) -> MemoryParts:
        """A copy with some parts replaced."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return MemoryParts(**{**values, **changes})


DEVICE_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "communication", "workspace", "context")


def trainer_memory(
    arch: Architecture,
    hw: Hardware,
    trainer: TrainerCalibration,
    layout: Layout,
    microbatches: Microbatches,
    options: UpdateOptions = PLAIN,
    *,
    forward_only: bool = False,
    patches: npt.ArrayLike = 0.0,
) -> MemoryParts:
    """Peak memory of one device during an optimizer update (or a forward-only pass), over layouts and microbatches.

    Three moments compete for the peak, and every part is reported at the one that wins: backward and loss
    (`_before_update`), and the optimizer's step.

    Parameters
    ----------
    options : narrow dtypes add the backend's narrow copies of the weights
    patches : image patches of a microbatch, kept through the vision tower of the first stage [1]
    forward_only : scoring: nothing is kept for a backward, no gradients, no optimizer on the device
    """
    stage = stage_parameters(arch, layout, options.ends, frozen_tower=options.frozen_tower)
    split = layout.context_parallel * layout.ulysses
    tokens, pairs = microbatches.tokens / split, microbatches.sum_squares / split
    states = _states(arch, trainer, layout, stage, options, forward_only)
    one = _activations(arch, trainer, layout, tokens, pairs, options, forward_only)
    counts = (np.ones(()),) * 3 if forward_only else in_flight(layout, microbatches)
    logits = _logit_bytes(arch, trainer, layout, tokens, options, forward_only)
    tower = np.zeros(()) if forward_only or options.frozen_tower else tower_bytes(arch, layout, patches)
    space, plain = trainer.workspace, 0.0 if forward_only or options.lora_rank else 1.0
    scratch, of_loss = (plain * each * stage.layer_dense for each in (space.weight_scratch, space.loss_scratch))
    ends = 4.0 * arch.hidden * tokens
    most = _before_update(layout, stage, states, one, counts, logits, ends, tower, (scratch, scratch + of_loss))
    communication = _communication(arch, trainer, layout, stage, tokens, options.lora_rank, forward_only)
    scratch = most.scratch + space.fixed
    loose = most.activations + most.logits + communication + scratch
    at_update = (0.0 if forward_only else 1.0) * space.optimizer_scratch * states.updated
    weights, gradients, optimizer = most.states
    # without buffers the only backward ends before all gradients exist; the update's temporaries come after it
    several, waits = microbatches.count > 1, options.whole_gradients and not forward_only
    absent = np.zeros(()) if space.gradient_buffers else np.where(several, 0.0, gradients)
    waiting: FloatArray = np.zeros(())
    if waits:
        waiting = np.where(several, whole_gradients(arch, trainer, layout, options) - gradients, 0.0)
    update_wins = at_update + absent > loose + waiting
    if waits:
        communication = communication + np.where(update_wins, 0.0, waiting)
    if not space.gradient_buffers:
        gradients = gradients - np.where(update_wins, 0.0, absent)
    scratch = scratch + np.where(update_wins, np.maximum(at_update - loose, -scratch), 0.0)
    loose = np.where(update_wins, at_update, loose)
    context = space.context + space.context_per_multiprocessor * (hw.device.multiprocessors or 0)
    return MemoryParts(
        weights, gradients, optimizer, most.activations, most.logits, communication,
        workspace=scratch + space.fragmentation * loose,
        context=np.broadcast_to(np.asarray(context), np.shape(loose)),
        host=states.host + counts[0] * (stage.layers * one.parked_dense + stage.routed_between * one.parked_routed),
        low=trainer.memory_low, high=trainer.memory_high,
    )  # fmt: skip


def whole_gradients(
    arch: Architecture, trainer: TrainerCalibration, layout: Layout, options: UpdateOptions
) -> FloatArray:
    r"""Gradients that wait unsharded for an update's last microbatch, :math:`P_{held}\, g` [bytes].

    P parameters trained on the device before ZeRO splits them, g bytes of a gradient as it is reduced: in that type
    PyTorch's FSDP2 adds them up (torch distributed/fsdp/_fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed);
    FSDP1 in that of the weights, counted as much. Sharded ones exist after the last backward alone.
    """
    held = replace(layout, zero_stage=np.minimum(layout.zero_stage, 1))
    storage = trainer.storage.model_copy(update={"gradient": trainer.storage.reduce})
    trainer = trainer.model_copy(update={"storage": storage})
    stage = stage_parameters(arch, layout, options.ends, frozen_tower=options.frozen_tower)
    states = _states(arch, trainer, held, stage, options, False)
    return np.asarray(states.first[1] + states.embedding[1] + states.head[1], np.float64)


Triple = tuple[FloatArray, FloatArray, FloatArray]


@dataclass(frozen=True)
class _States:
    """Bytes of (weights, gradients, optimizer) on a device, by layers (of a stage), embedding, head; on the host."""

    first: Triple
    between: Triple
    last: Triple
    embedding: Triple
    head: Triple
    host: FloatArray
    updated: FloatArray


@dataclass(frozen=True)
class _Most:
    """The fuller moment of a microbatch: states of its stage, and what is loose beside them [bytes]."""

    states: Triple
    activations: FloatArray
    logits: FloatArray
    scratch: FloatArray


def _before_update(
    layout: Layout, stage: StageParameters, states: _States, one: _Kept, counts: Triple, logits: FloatArray,
    ends: FloatArray, tower: FloatArray, scratches: tuple[FloatArray, FloatArray],
) -> _Most:  # fmt: skip
    """The backward of the first or second stage, or the loss on the last: whichever holds more.

    Parameters
    ----------
    counts : microbatches that the first, the second and the last stage keep [1]
    ends : what the head is given, and its gradient [bytes]
    tower : of the vision tower, which the first stage keeps [bytes]
    scratches : in the backward, and in the loss [bytes]
    """
    first, second, last = counts
    scratch, scratch_loss = scratches
    single = layout.pipeline_parallel == 1
    at_first = first * (stage.layers * one.dense + stage.routed_first * one.routed) + tower + one.working
    at_second = second * (stage.layers * one.dense + stage.routed_between * one.routed) + one.working
    at_loss = last * (stage.layers * one.dense + stage.routed_last * one.routed) + ends + np.where(single, tower, 0.0)
    # states of a stage: that of a pipeline of one is the first and the last
    each = zip(states.first, states.embedding, states.last, states.head, strict=True)
    of_first, of_last = zip(
        *((f + e + np.where(single, h, 0.0), np.where(single, f + e, z) + h) for f, e, z, h in each), strict=True
    )
    of_second = states.between
    held_first, held_second, held_last = (np.asarray(sum(of)) for of in (of_first, of_second, of_last))
    # states do not vary with the microbatch, what is loose does not with the data parallel: their sums vary with both
    between = layout.pipeline_parallel > 2
    second_wins = between & (at_second - at_first > held_first - held_second)
    beside_scratch = at_loss + logits + (scratch_loss - scratch)
    loss_wins = (beside_scratch - at_first > held_first - held_last) & (
        ~between | (beside_scratch - at_second > held_second - held_last)
    )
    weights, gradients, optimizer = (
        np.where(loss_wins, z, np.where(second_wins, b, f))
        for f, b, z in zip(of_first, of_second, of_last, strict=True)
    )
    return _Most(
        (weights, gradients, optimizer),
        activations=np.where(loss_wins, at_loss, np.where(second_wins, at_second, at_first)),
        logits=np.where(loss_wins, logits, 0.0),
        scratch=np.where(loss_wins, scratch_loss, scratch),
    )


def _bytes_per_parameter(
    trainer: TrainerCalibration, layout: Layout, shards: FloatArray, forward_only: bool, width: float
) -> Triple:
    """(weights, gradients, optimizer) bytes of one trained parameter after ZeRO; ZeRO k shards the last k of them.

    Where shards are wider than what computes (FSDP: fp32 and 16 bits), ZeRO 2 is what does not reshard after forward:
    the gathered copy stays beside the shards.
    """
    store, zero = trainer.storage, layout.zero_stage
    trained = 0.0 if forward_only else 1.0
    stays = (zero == 2) & in_shards(trainer, layout)
    held = np.where(stays, store.weight / shards + store.compute_weight, store.weight)
    return (
        (held + width) / np.where(zero >= 3, shards, 1.0),
        trained * store.gradient / np.where(zero >= 2, shards, 1.0),
        trained * store.optimizer / np.where(zero >= 1, shards, 1.0),
    )


def _states(
    arch: Architecture, trainer: TrainerCalibration, layout: Layout, stage: StageParameters,
    options: UpdateOptions, forward_only: bool,
) -> _States:  # fmt: skip
    """Of the model, on its last stage with those of a draft head that is trained beside it: all weights of that."""
    model = _network_states(arch, trainer, layout, stage, options, forward_only)
    head = draft_head(arch, options.trained_draft) if options.trained_draft else None
    if head is None:
        return model
    one = layout.with_(pipeline_parallel=1, virtual_pipeline=1)
    whole = replace(options, lora_rank=None)
    beside = _network_states(head.trained, trainer, one, stage_parameters(head.trained, one), whole, forward_only)
    weights, gradients, moments = (
        m + f + e for m, f, e in zip(model.head, beside.first, beside.embedding, strict=True)
    )
    return replace(
        model, head=(weights, gradients, moments), host=model.host + beside.host,
        updated=model.updated + beside.updated,
    )  # fmt: skip


def _network_states(
    arch: Architecture, trainer: TrainerCalibration, layout: Layout, stage: StageParameters,
    options: UpdateOptions, forward_only: bool,
) -> _States:  # fmt: skip
    """ZeRO shards by data parallelism, routed experts by their own; LoRA trains the adapters alone.

    Of several LoRA jobs weights and moments stand all, gradients and updates of one after the other.
    """
    shards = layout.shards.astype(np.float64)
    limit = np.where(layout.shard_size > 0, layout.shard_size, np.iinfo(np.int64).max)
    routed_shards = np.minimum(layout.expert_data_parallel, limit).astype(np.float64)
    lora_rank, jobs = options.lora_rank, float(options.lora_jobs)
    width = 0.0 if options.dtype in ("bf16", "fp16", "fp32") else trainer.storage.narrow_copy
    dense = _bytes_per_parameter(trainer, layout, shards, forward_only, width)
    routed = _bytes_per_parameter(trainer, layout, routed_shards, forward_only, width)
    table = _bytes_per_parameter(trainer, layout, shards, forward_only, 0.0)
    each_dense, each_routed = stage.layer_dense, stage.layer_experts
    frozen_dense, frozen_routed = np.zeros(()), np.zeros(())
    if lora_rank:
        base = trainer.storage.frozen_weight + width
        zero3 = layout.zero_stage >= 3
        of_dense, of_routed = base / np.where(zero3, shards, 1.0), base / np.where(zero3, routed_shards, 1.0)
        frozen_dense, frozen_routed = stage.layer_dense * of_dense, stage.layer_experts * of_routed
        # quantised weights leave the tables in 16 bits
        tables_at = np.maximum(base, trainer.storage.compute_weight) if base < 1.0 else base
        table = (tables_at / np.where(zero3, shards, 1.0), np.zeros(()), np.zeros(()))
        adapters = lora_parameters(arch, lora_rank)
        each_dense = adapters[0] / layout.tensor_parallel
        experts_of_layer = adapters[1] / (stack_of(arch).routed_share or 1.0)
        each_routed = experts_of_layer / (layout.expert_parallel * layout.expert_tensor_parallel)
    on_host = np.isin(layout.offload, OFFLOADS_OPTIMIZER)
    stays = (1.0, 1.0, np.where(on_host, 0.0, 1.0))

    def layers(experts: FloatArray) -> Triple:
        weights, gradients, moments = (
            stage.layers * each_dense * d + experts * each_routed * r for d, r in zip(dense, routed, strict=True)
        )
        frozen = stage.layers * frozen_dense + experts * frozen_routed
        return jobs * weights + frozen, gradients, jobs * moments

    first, between, last = layers(stage.routed_first), layers(stage.routed_between), layers(stage.routed_last)
    trained = stage.embedding - stage.frozen
    firsts = stage.embedding, trained, trained
    tables = [(first * part, stage.head * part) for first, part in zip(firsts, table, strict=True)]
    per_parameter = max(trainer.storage.optimizer, 1.0) * jobs
    at_ends = first[2] + tables[2][0], last[2] + tables[2][1]
    several = np.maximum(np.maximum(*at_ends), np.where(layout.pipeline_parallel > 2, between[2], 0.0))
    fullest = np.where(layout.pipeline_parallel == 1, at_ends[0] + tables[2][1], several)
    updated = fullest * stays[2] / per_parameter
    host = np.where(on_host, fullest, 0.0)
    return _States(
        first=(first[0], first[1], first[2] * stays[2]),
        between=(between[0], between[1], between[2] * stays[2]),
        last=(last[0], last[1], last[2] * stays[2]),
        embedding=(tables[0][0], tables[1][0], tables[2][0] * stays[2]),
        head=(tables[0][1], tables[1][1], tables[2][1] * stays[2]),
        host=host,
        updated=updated,
    )


@dataclass(frozen=True)
class _Kept:
    """Bytes of one microbatch: kept per layer and per expert layer, working set of one layer, kept in host memory."""

    dense: FloatArray
    routed: FloatArray
    working: FloatArray
    parked_dense: FloatArray
    parked_routed: FloatArray


def _activations(
    arch: Architecture, trainer: TrainerCalibration, layout: Layout, tokens: FloatArray, pairs: FloatArray,
    options: UpdateOptions, forward_only: bool,
) -> _Kept:  # fmt: skip
    """Recompute none keeps all, full the layer's input; selective drops modules that it names, or keeps some operators.

    Of a module that is made again, one layer's worth stands during its backward.
    """
    unfused = trainer.timing.kernel_attention == "unfused"
    keeping = Keeping(
        layout, dropout=unfused, unfused=unfused,
        linear_input=None if options.dtype in ("bf16", "fp16", "fp32") else 1.0, compiled=options.compiled,
        # a scoring pass drops what was gathered
        gathers_once=forward_only or options.switches_of(trainer).gathers_once,
    )  # fmt: skip
    kept = layer_activations(arch, keeping)
    space = trainer.workspace
    modules = options.recompute_modules
    dense, scores = kept.dense * tokens, kept.scores * pairs
    routed = kept.routed * tokens * options.skew
    boundary = kept.boundary * tokens
    full = layout.activation_recompute == RECOMPUTE.index("full")
    selective = layout.activation_recompute == RECOMPUTE.index("selective")
    zero = np.zeros(np.shape(full))
    if forward_only:
        working = boundary + space.backward_dense * dense + space.backward_moe * routed
        return _Kept(zero, zero, working, zero, zero)
    by_operator = selective & (space.selective == "operators")
    again = space.recompute_dense * dense + space.recompute_moe * routed + scores
    attention = (kept.core * tokens + scores) * ("core_attn" in modules)
    dropped = np.where(selective, attention + kept.feed_forward * tokens * ("mlp" in modules), 0.0)
    plain = space.backward_dense * dense + space.backward_moe * routed + dropped
    keep_dense = np.where(full, boundary, dense + scores - dropped)
    keep_dense = np.where(by_operator, kept.operators * tokens, keep_dense)
    hidden = kept.expert_hidden * tokens * options.skew if options.recompute_experts else 0.0
    keep_routed = np.where(full, 0.0, routed - hidden)
    parked = np.isin(layout.offload, OFFLOADS_ACTIVATIONS)
    return _Kept(
        dense=np.where(parked, 0.0, keep_dense),
        routed=np.where(parked, 0.0, keep_routed),
        working=np.where(full | by_operator, again, plain),
        parked_dense=np.where(parked, keep_dense, 0.0),
        parked_routed=np.where(parked, keep_routed, 0.0),
    )


def _logit_bytes(
    arch: Architecture,
    trainer: TrainerCalibration,
    layout: Layout,
    tokens: FloatArray,
    options: UpdateOptions,
    forward_only: bool,
) -> FloatArray:
    """Logits with what the loss keeps beside them: whole, or of one chunk, beside what stands whole all the same."""
    space = trainer.workspace
    split = space.logit_bytes if space.split_logit_bytes is None else space.split_logit_bytes
    eager = np.where(layout.tensor_parallel > 1, split, space.logit_bytes)
    each = space.compiled_logit_bytes if options.compiled_loss else eager
    if forward_only:
        each = 0.5 * each if space.scoring_logit_bytes is None else space.scoring_logit_bytes
    per_token = head_columns(arch, layout.tensor_parallel.astype(np.float64))
    if not options.chunked_loss:
        return np.asarray(tokens * per_token * each)
    whole = tokens * per_token * space.whole_logit_bytes * (0.5 if forward_only else 1.0)
    return np.asarray(whole + np.minimum(tokens, space.chunked_logits) * per_token * each)


def _communication(
    arch: Architecture, trainer: TrainerCalibration, layout: Layout, stage: StageParameters, tokens: FloatArray,
    lora_rank: int | None, forward_only: bool,
) -> FloatArray:  # fmt: skip
    """ZeRO-3: gathered layers, tables, and one layer's gradients on their way; pipeline: buffers of both neighbours."""
    store, space = trainer.storage, trainer.workspace
    layer = stage.layer_dense + stage.layer_experts
    largest = np.maximum(stage.embedding, stage.head)
    tables = 2.0 * (stage.embedding + stage.head) if space.root_stays else largest
    gathered = store.compute_weight * (space.gathered_layers * layer + tables)
    # a root's gradients wait in 16 bits until the backward is through, when no activations are left
    reduced = layer if space.root_stays else np.maximum(layer, largest)
    backward = 0.0 if forward_only or lora_rank else store.reduce * reduced
    # at ZeRO 2 what was gathered stands among the weights
    sharded = np.where(layout.zero_stage >= 3, gathered, 0.0) + np.where(in_shards(trainer, layout), backward, 0.0)
    stages = np.where(layout.pipeline_parallel > 1, 4.0 * tokens * arch.hidden, 0.0)
    return sharded + stages
