"""Memory of a trainer pool: what it takes while it trains, while a colocated engine runs, and on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlperf.cost.batching import Microbatches
from rlperf.cost.collectives import host_copy_s
from rlperf.cost.parameters import parameters, routed_parameters
from rlperf.cost.trainer_device import UpdateOptions
from rlperf.cost.trainer_memory import MemoryParts, trainer_memory
from rlperf.layout import FloatArray, Layout
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.overheads import routing_skew
from rlperf.sim.rl_step.site import Site, TrainerStack
from rlperf.sim.rl_step.trainer_stage import cut_by_budget, most_scored_tokens, with_optimizer
from rlperf.specs.architecture import Architecture
from rlperf.specs.pool import Settings


@dataclass(frozen=True, eq=False)
class TrainerBytes:
    """Bytes per device [bytes]: peak of training, while the engine runs, on the host, and parked there meanwhile."""

    peak: FloatArray
    idle: FloatArray
    host: FloatArray
    parked: FloatArray
    parts: MemoryParts


def trainer_bytes(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, budget: npt.ArrayLike, parked: npt.ArrayLike,
) -> TrainerBytes:  # fmt: skip
    """Memory of trainer layouts with full microbatches of the longest sequences: what must fit on the worst rl_step.

    ``budget``: tokens per microbatch and replica; ``parked``: 1 where the states wait in host memory ``[layouts]``.
    Without packing a microbatch is ``layout.microbatch`` sequences, all as long as the longest. Experts receive tokens
    as unevenly as time is charged for. A scoring pass counts where its microbatches are larger than those of training.
    """
    stack, demand = with_optimizer(stack, architecture, settings), site.trained(demand)
    longest = float(demand.batch.longest_tokens)
    tokens = np.asarray(budget, dtype=np.float64)
    by_budget = cut_by_budget(settings.packing, stack.framework)
    if not by_budget:
        tokens = np.broadcast_to(longest * np.asarray(layout.microbatch, np.float64), np.shape(tokens))
    park = np.asarray(parked)
    most = demand.batch.sequences / demand.batch.updates / layout.data_parallel * longest

    def full(tokens: FloatArray) -> Microbatches:
        return Microbatches.of(tokens, tokens * longest, longest, np.maximum(np.ceil(most / tokens), 1.0))

    skew = routing_skew(stack.framework, layout)
    ends = (settings.first_stage_layers, settings.last_stage_layers)
    options = UpdateOptions(
        settings.compute_dtype, settings.lora_rank, skew=skew, chunked_loss=settings.chunked_loss, ends=ends,
        lora_jobs=settings.lora_jobs,
    )  # fmt: skip
    patches = demand.images_per_token * tokens * demand.patches(architecture)
    hardware, calibration = site.hardware, stack.calibration
    parts = trainer_memory(architecture, hardware, calibration, layout, full(tokens), options, patches=patches)
    scored = most_scored_tokens(settings, stack.framework, demand.batch.longest_tokens)
    copies = site.networks
    states = parts.states * copies
    peak = parts.total + states - parts.states
    if scored and np.any(scored > tokens):
        whole = full(np.maximum(tokens, scored))
        scoring = trainer_memory(architecture, hardware, calibration, layout, whole, options, forward_only=True)
        peak = np.maximum(peak, scoring.total + np.where(park == 1, 0.0, parts.optimizer * copies))
    shape = np.broadcast_shapes(np.shape(tokens), layout.shape)
    reference = _reference_bytes(site, stack, architecture, layout, settings.lora_rank)
    return TrainerBytes(
        peak=np.broadcast_to(peak, shape),
        idle=np.broadcast_to(np.where(park == 1, 0.0, states) + parts.context, shape),
        host=np.broadcast_to(parts.host * copies + park * states + reference, shape),
        parked=np.broadcast_to(park * states, shape),
        parts=parts,
    )


def transition_seconds(site: Site, memory: TrainerBytes) -> FloatArray:
    """Parking the states and bringing them back, once per rl_step [s]."""
    return 2.0 * host_copy_s(site.hardware, memory.parked)


def _reference_bytes(
    site: Site, stack: TrainerStack, architecture: Architecture, layout: Layout, lora_rank: int | None
) -> FloatArray:
    """Host bytes per device of the frozen reference policy, which waits in host memory between its passes.

    Under LoRA it is the policy with its adapters switched off, and no copy of its own.
    """
    if "reference" not in site.roles or lora_rank:
        return np.zeros(())
    shards = np.where(layout.zero_stage >= 3, layout.shards, 1)
    split = layout.tensor_parallel * layout.pipeline_parallel * shards
    expert_split = layout.pipeline_parallel * layout.expert_parallel * layout.expert_tensor_parallel * shards
    width = stack.calibration.storage.frozen_weight
    routed = routed_parameters(architecture)
    dense = (parameters(architecture) - routed) / split
    return np.asarray(width * (dense + routed / expert_split), dtype=np.float64)
