"""Memory of a trainer pool: what it takes while it trains, while a colocated engine runs, and on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlperf.cost.batching import Microbatches
from rlperf.cost.collectives import host_copy_s
from rlperf.cost.parameters import parameters, routed_parameters
from rlperf.cost.trainer.memory import MemoryParts, trainer_memory
from rlperf.cost.trainer.parallel import in_shards
from rlperf.cost.trainer_device import UpdateOptions
from rlperf.layout import FloatArray, IntArray, Layout
from rlperf.sim.rl_step.cuts import cut_by_budget, most_scored_tokens, scoring_by_budget
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.overheads import copies_gradients, holds_gradients_whole, routing_skew
from rlperf.sim.rl_step.site import Site, TrainerStack
from rlperf.sim.rl_step.stage_seconds import usual_sync_fit
from rlperf.sim.rl_step.trainer_stage import with_optimizer
from rlperf.specs.architecture import Architecture
from rlperf.specs.pool import Settings


@dataclass(frozen=True, eq=False)
class TrainerBytes:
    """Bytes per device [bytes]: peak of training, while the engine runs, on the host, and parked there meanwhile.

    ``syncing`` : while weights are sent to an engine that shares the device
    ``reference`` : of a reference that stays on the devices, in peak and idle beside ``parts``
    """

    peak: FloatArray
    idle: FloatArray
    syncing: FloatArray
    host: FloatArray
    parked: FloatArray
    parts: MemoryParts
    reference: FloatArray


def trainer_bytes(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, budget: npt.ArrayLike, parked: npt.ArrayLike,
) -> TrainerBytes:  # fmt: skip
    """Memory of trainer layouts with full microbatches of the longest sequences: what must fit on the worst rl_step.

    ``budget``: tokens per microbatch and replica; ``parked``: 1 where the states wait in host memory ``[layouts]``.
    Where microbatches are cut by count they hold what `full_microbatches` says. Experts receive tokens as unevenly as
    time is charged for. A scoring pass counts where its microbatches are larger than those of training. Parked states
    leave their gradients behind, which nobody needs between two rl_steps, unless the framework copies them. A reference
    that stays on the devices counts as weights do; the weights stay where the framework parks the rest alone.
    """
    stack, demand = with_optimizer(stack, architecture, settings), site.trained(demand)
    of_rank = demand.batch.sequences / layout.data_parallel
    by_tokens = budget if cut_by_budget(settings.packing, stack.framework) else None
    trained = full_microbatches(demand, settings, by_tokens, layout.microbatch, of_rank / demand.batch.updates)
    park = np.asarray(parked)
    skew = routing_skew(stack.framework, layout)
    ends = (settings.first_stage_layers, settings.last_stage_layers)
    options = UpdateOptions(
        settings.compute_dtype, settings.lora_rank, skew=skew, chunked_loss=settings.chunked_loss, ends=ends,
        lora_jobs=settings.lora_jobs, whole_gradients=holds_gradients_whole(stack.framework, settings),
        frozen_tower=settings.freeze_vision, trained_draft=site.trained_draft,
    )  # fmt: skip
    patches = demand.images_per_token * trained.tokens * demand.patches(architecture)
    parts, every = _updated(site, stack, architecture, layout, trained, options, patches)
    reference = _reference_bytes(site, stack, architecture, layout, settings.lora_rank)
    resident = reference * max(stack.framework.training.resident_reference, site.hardware.device.unified_memory)
    states = every.states + resident
    kept = (every.weights + resident) * stack.framework.training.kept_weights
    freed = every.gradients * (1.0 - copies_gradients(stack.framework, layout))
    waiting = park * (states - freed - kept)
    peak = parts.total + states - parts.states
    by_tokens = None
    if scoring_by_budget(settings, stack.framework):
        by_tokens = most_scored_tokens(settings, stack.framework, demand.batch.longest_tokens) or budget
    count = settings.scoring_microbatch or layout.microbatch
    scored = full_microbatches(demand, settings, by_tokens, count, of_rank)
    networks = site.networks(architecture)
    scoring_by = [one for alone, one in networks if stack.scoring_passes(alone, demand.batch.updates_of_a_job)]
    more = scored.tokens > trained.tokens
    shape = np.broadcast_shapes(trained.tokens.shape, layout.shape, park.shape)
    if np.any(more) and scoring_by:
        more = np.broadcast_to(more, np.broadcast_shapes(more.shape, layout.shape))
        few, apart = scored.of_rows(more), layout.flat(more)
        options = replace(options, skew=routing_skew(stack.framework, apart))
        scored_by = scoring_by[0], site.hardware, stack.calibration, apart, few, options
        scoring = np.zeros(more.shape)
        scoring[more] = trainer_memory(*scored_by, forward_only=True).total
        beside = _beside_scoring(stack, parts, every, park, scoring_by[0] is networks[0][1])
        peak = np.maximum(peak, np.where(more, scoring + resident + beside, 0.0))
    idle, syncing = _beside_an_engine(stack, parts, states, kept, park)
    each = peak, idle, syncing, every.host + waiting + reference - resident, waiting, resident
    peak, idle, syncing, host, waiting, resident = (np.broadcast_to(held, shape) for held in each)
    found = TrainerBytes(peak, idle, syncing, host, waiting, parts, resident)
    return _in_one_memory(found) if site.hardware.device.unified_memory else found


def _in_one_memory(apart: TrainerBytes) -> TrainerBytes:
    """Where device and host have one memory, nothing leaves it for the host; parked states are back while it trains."""
    peak, idle = apart.peak + apart.host - apart.parked, apart.idle + apart.host
    return replace(apart, peak=peak, idle=idle, syncing=idle, host=np.zeros_like(apart.host))


def _beside_an_engine(
    stack: TrainerStack, parts: MemoryParts, states: FloatArray, kept: FloatArray, park: IntArray
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """What stands beside a colocated engine: while it runs, and while it is sent weights.

    Parked weights are back on the devices for that, or come out of host memory a bucket at a time.
    """
    fit = usual_sync_fit(stack.framework, colocated=True)
    sent = np.zeros(()) if fit.from_host else parts.weights
    idle = np.where(park == 1, kept, states) + parts.context
    return idle, np.where(park == 1, np.maximum(kept, sent) + parts.context, idle) + fit.bucket


def _beside_scoring(
    stack: TrainerStack, parts: MemoryParts, every: MemoryParts, park: IntArray, first: bool
) -> FloatArray:  # fmt: skip
    """What stays beside the network that scores: optimizer states, and the weights of the other of policy and critic.

    ``first``: the policy scores, or there is no other. Parked, only weights that the framework leaves.
    """
    other = every.weights - parts.weights if first else parts.weights
    left = other * stack.framework.training.kept_weights
    return np.asarray(np.where(park == 1, left, every.optimizer + other))


def _updated(
    site: Site, stack: TrainerStack, architecture: Architecture, layout: Layout, trained: Microbatches,
    options: UpdateOptions, patches: FloatArray,
) -> tuple[MemoryParts, MemoryParts]:  # fmt: skip
    """Memory of the policy's update, larger than that of a critic without logits; and with the states of both."""
    held = [
        trainer_memory(
            network, site.hardware, stack.calibration, layout, trained,
            replace(options, trained_draft=alone.trained_draft), patches=patches,
        )
        for alone, network in site.networks(architecture)
    ]  # fmt: skip
    states = ("weights", "gradients", "optimizer", "host")
    both = {name: sum((getattr(one, name) for one in held), np.zeros(())) for name in states}
    return held[0], held[0].with_(**both)


DRAWN = 5.0
"""Standard deviations that a sum of lengths stays below: all but one in three million draws."""


def full_microbatches(
    demand: Demand, settings: Settings, budget: npt.ArrayLike | None, count: npt.ArrayLike, of_rank: FloatArray
) -> Microbatches:
    r"""Microbatches of a pass over ``of_rank`` sequences of every rank on the worst rl_step ``[layouts]``.

    ``budget``: their tokens, of which no more come together than the pass has, and of which a longer sequence takes its
    own where that is more; None: they hold ``count`` sequences.
    Padded, all of these are as long as the longest that the job allows. Packed, one of them is; the others, of mean
    :math:`\bar l` and standard deviation s, come to less than

    .. math:: \min\left((k - 1)\, l_{max},\; (k - 1)\, \bar l + 5 s \sqrt{k - 1}\right)

    as if each were drawn by itself (those of one prompt are alike, but ranks have their tokens evened out).
    """
    longest, moments = float(demand.batch.longest_tokens), demand.moments
    spread = np.sqrt(max(moments.mean_square - moments.mean**2, 0.0))

    def most(held: FloatArray) -> FloatArray:
        others = held - 1.0
        drawn = others * moments.mean + DRAWN * spread * np.sqrt(others)
        return np.asarray(longest + np.minimum(others * longest, drawn if settings.packing else np.inf), np.float64)

    whole = np.maximum(np.ceil(of_rank), 1.0)
    if budget is not None:
        tokens = np.minimum(np.maximum(np.asarray(budget, np.float64), longest), most(whole))
        parts = of_rank * longest / tokens
    else:
        held = np.minimum(np.asarray(count, np.float64), whole)
        tokens, parts = most(held), of_rank / held
    return Microbatches.of(tokens, tokens * longest, longest, np.maximum(np.ceil(parts), 1.0))


def transition_seconds(site: Site, memory: TrainerBytes) -> FloatArray:
    """Parking the states and bringing them back, once per rl_step [s]."""
    return 2.0 * host_copy_s(site.hardware, memory.parked)


def _reference_bytes(
    site: Site, stack: TrainerStack, architecture: Architecture, layout: Layout, lora_rank: int | None
) -> FloatArray:
    """Bytes per device of the frozen reference policy: in host memory as it is loaded, on the device in 16 bits.

    Under LoRA it is the policy with its adapters switched off, and no copy of its own.
    """
    if "reference" not in site.roles or lora_rank:
        return np.zeros(())
    shards = np.where(in_shards(stack.calibration, layout), layout.shards, 1)
    split = layout.tensor_parallel * layout.pipeline_parallel * shards
    expert_split = layout.pipeline_parallel * layout.expert_parallel * layout.expert_tensor_parallel * shards
    width = 2.0 if stack.framework.training.resident_reference else stack.calibration.storage.frozen_weight
    routed = routed_parameters(architecture)
    dense = (parameters(architecture) - routed) / split
    return np.asarray(width * (dense + routed / expert_split), dtype=np.float64)
