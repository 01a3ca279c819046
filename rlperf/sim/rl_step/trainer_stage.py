"""Training and scoring of one rl_step: microbatches as the framework cuts them, then seconds of updates and passes.

The closed form knows the moments of the lengths, for a million layouts; the events cut the real lengths of every
optimizer update, for one (`rlperf.sim.rl_step.cuts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from rlperf.cost.batching import Microbatches
from rlperf.cost.collectives import host_copy_s
from rlperf.cost.layers.vision import TowerWork
from rlperf.cost.speculation import training_share
from rlperf.cost.trainer.muon import muon_s, with_muon
from rlperf.cost.trainer.parallel import in_shards
from rlperf.cost.trainer.parameters import OFFLOADS_OPTIMIZER
from rlperf.cost.trainer.scoring import scoring_pass
from rlperf.cost.trainer.update import TrainingCost, optimizer_bytes, training_update
from rlperf.cost.trainer_device import BEFORE_HOPPER, UpdateOptions
from rlperf.layout import OFFLOAD, FloatArray, IntArray, Layout, taken
from rlperf.sim.rl_step.cuts import CutLengths, trainer_cuts
from rlperf.sim.rl_step.data_movement import route_bytes
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.overheads import (
    held_parameters,
    holds_gradients_whole,
    parked_s,
    routing_skew,
    scoring_in_framework_s,
    shared_prefix_s,
    training_in_framework_s,
)
from rlperf.sim.rl_step.site import Site, TrainerStack
from rlperf.specs.architecture import Architecture
from rlperf.specs.pool import Settings
from rlperf.specs.trainer_calibration import TrainerCalibration
from rlperf.specs.trainer_switches import Switches


@dataclass(frozen=True, eq=False)
class TrainerStage:
    """Seconds of trainers, one per pool or one per simulated rl_step; every array has shape ``[rows]``.

    Attributes
    ----------
    backend : index into ``Site.trainers``
    layout : of the pool
    parked : 1 where the states wait in host memory while a colocated engine runs
    training_s, scoring_s : all optimizer updates and all scoring passes of one rl_step [s]
    critic, critic_s, values_s : devices of a critic's own, and its updates and scoring pass beside these [s]; 0: none
    transition_s : parking the states and bringing them back, once per rl_step [s]
    low, high : 5th and 95th percentile of training over its prediction [1]
    """

    backend: IntArray
    layout: Layout
    parked: IntArray
    training_s: FloatArray
    scoring_s: FloatArray
    critic: IntArray
    critic_s: FloatArray
    values_s: FloatArray
    transition_s: FloatArray
    low: FloatArray
    high: FloatArray

    @property
    def busy_s(self) -> FloatArray:
        """Seconds of an rl_step that the trainer's devices are its own: updates and scoring, until a critic beside it
        has ended them, too, and moving of its states [s]."""
        return self.trained_s + np.maximum(self.scoring_s, self.values_s) + self.transition_s

    @property
    def trained_s(self) -> FloatArray:
        """Until policy and critic are updated [s]."""
        return np.maximum(self.training_s, self.critic_s)

    def take(self, index: IntArray | slice) -> Self:
        """Some rows, by index."""
        return taken(self, index)


@dataclass(frozen=True, eq=False)
class UpdateWork:
    """Optimizer updates, over layouts or over replicates and their updates.

    Attributes
    ----------
    cost : breakdown of the backend's own seconds
    each_s : one update in the framework [s]
    batches : its microbatches
    """

    cost: TrainingCost
    each_s: FloatArray
    batches: Microbatches


@dataclass(frozen=True, eq=False)
class ScoringWork(UpdateWork):
    """The same of scoring passes, and how many an rl_step has."""

    passes: int


def updated(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, batches: Microbatches,
) -> UpdateWork:  # fmt: skip
    """Seconds of one update of ``batches``, in the framework."""
    stack = with_optimizer(stack, architecture, settings)
    framework, hardware = stack.framework, site.hardware
    updates = site.updates(demand.batch) / site.epochs
    options = _options(site, stack, layout, settings, _head_share(stack, demand, layout, batches, updates))
    seen = TowerWork(demand.images_per_token * batches.tokens, demand.patches(architecture))
    update = _update(site, stack, architecture, site.updates(demand.batch), layout, batches, options, seen)
    if settings.optimizer == "muon":
        orthogonal = muon_s(architecture, hardware, stack.calibration, layout)
        update = replace(update, optimizer_s=update.optimizer_s + orthogonal)
    draft = 1.0 + (training_share(architecture, site.trained_draft) if site.trained_draft else 0.0)
    update_s = training_in_framework_s(framework, architecture, layout, batches, draft * update.total_s)
    if settings.router_replay != "none":
        update_s = update_s + replayed_s(site, architecture, layout, batches)
    if settings.shared_prefix and demand.batch.group_size > 1:
        update_s = update_s + shared_prefix_s(framework.training.prefix_update, architecture, layout, batches)
    return UpdateWork(update, update_s, batches)


def _head_share(
    stack: TrainerStack, demand: Demand, layout: Layout, batches: Microbatches, updates: float
) -> FloatArray | float:
    """Tokens through the head over all that a microbatch holds: of responses alone, or prompts and padding too [1].

    ``updates``: over how many passes the rl_step's sequences are spread
    """
    if stack.framework.training.head_tokens == "all":
        return 1.0
    held = updates * layout.data_parallel * batches.count * batches.tokens
    return np.minimum((demand.trained_tokens - demand.prompt_tokens) / held, 1.0)


def _options(
    site: Site, stack: TrainerStack, layout: Layout, settings: Settings, head: FloatArray | float
) -> UpdateOptions:
    skew, device = routing_skew(stack.framework, layout), site.hardware.device
    kernel = "flash" if device.generation.split()[0] in BEFORE_HOPPER else stack.framework.training.attention_kernel
    return UpdateOptions(
        settings.compute_dtype, settings.lora_rank, skew=skew, head_share=head, chunked_loss=settings.chunked_loss,
        attention_kernel=kernel, whole_gradients=holds_gradients_whole(stack.framework, settings),
        frozen_tower=settings.freeze_vision, switches=_switches(stack.calibration, settings),
    )  # fmt: skip


_DISPATCHERS: Mapping[str, Literal["alltoall", "deepep"]] = {"nccl": "alltoall", "deepep": "deepep"}


def _switches(trainer: TrainerCalibration, settings: Settings) -> Switches | None:
    """How the trainer runs, where its settings say more than its backend and framework do."""
    if not settings.expert_dispatch:
        return None
    return trainer.switches.changed(Switches(dispatcher=_DISPATCHERS[settings.expert_dispatch]))


def scored_once(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, scored: Microbatches,
) -> ScoringWork:  # fmt: skip
    """Seconds of one scoring pass over ``scored``, in the framework."""
    stack = with_optimizer(stack, architecture, settings)
    framework, head = stack.framework, _head_share(stack, demand, layout, scored, 1.0)
    read = TowerWork(demand.images_per_token * scored.tokens, demand.patches(architecture))
    passes = stack.scoring_passes(site, demand.batch.updates_of_a_job)
    reference = 1.0 / passes if passes and "reference" in site.roles else 0.0
    options = replace(_options(site, stack, layout, settings, head), adapted=1.0 - reference)
    one = scoring_pass(architecture, site.hardware, stack.calibration, layout, scored, options, tower=read)
    # a reference apart is not fetched so; under LoRA it is the policy without its adapters
    fetched = 1.0 if settings.lora_rank else 1.0 - reference
    scoring_s = one.total_s + fetched * _weights_s(site, stack, architecture, layout)
    pass_s = scoring_in_framework_s(framework, architecture, layout, scored, scoring_s, reference=reference)
    if settings.router_replay != "none":
        pass_s = pass_s + replayed_s(site, architecture, layout, scored)
    if settings.shared_prefix and demand.batch.group_size > 1:
        pass_s = pass_s + shared_prefix_s(framework.training.prefix_pass, architecture, layout, scored)
    return ScoringWork(one, pass_s, scored, passes)


def with_optimizer(stack: TrainerStack, architecture: Architecture, settings: Settings) -> TrainerStack:
    """The trainer with the states of the optimizer that its settings name."""
    if settings.optimizer == "adam":
        return stack
    return replace(stack, calibration=with_muon(stack.calibration, architecture))


def replayed_s(site: Site, architecture: Architecture, layout: Layout, batches: Microbatches) -> FloatArray:
    """Recorded experts of a stage's layers on their way from host memory to the device, all microbatches [s]."""
    split = (layout.context_parallel * layout.ulysses * layout.pipeline_parallel).astype(np.float64)
    return host_copy_s(site.hardware, batches.count * batches.tokens / split * route_bytes(architecture))


def _update(
    site: Site, stack: TrainerStack, architecture: Architecture, updates: int, layout: Layout, batches: Microbatches,
    options: UpdateOptions, images: TowerWork,
) -> TrainingCost:  # fmt: skip
    """One optimizer update; where the framework parks states between phases, its share of fetching them once."""
    where = architecture, site.hardware, stack.calibration
    parked = np.isin(layout.offload, OFFLOADS_OPTIMIZER)
    if not stack.framework.training.parks_optimizer or not np.any(parked):
        return training_update(*where, layout, batches, options, tower=images)
    # on the device while the updates run: only activations are still offloaded
    both, activations, none = (OFFLOAD.index(word) for word in ("both", "activations", "none"))
    resident = np.where(layout.offload == both, activations, np.where(parked, none, layout.offload))
    cost = training_update(*where, replace(layout, offload=resident), batches, options, tower=images)
    states = optimizer_bytes(architecture, stack.calibration, layout, options)
    fetched = parked_s(stack.framework, site.hardware, states) + _weights_s(site, stack, architecture, layout)
    return replace(cost, offload_s=cost.offload_s + np.where(parked, fetched, 0.0) / updates)


def _weights_s(site: Site, stack: TrainerStack, architecture: Architecture, layout: Layout) -> FloatArray:
    """The policy's weights, brought for one phase and taken back, where they wait in host memory between phases [s]."""
    if not stack.framework.training.parks_optimizer:
        return np.zeros(())
    sharded = in_shards(stack.calibration, layout)
    held = held_parameters(architecture, layout, sharded) * stack.calibration.storage.weight
    return np.where(np.isin(layout.offload, OFFLOADS_OPTIMIZER), parked_s(stack.framework, site.hardware, held), 0.0)


def closed_training(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, budget: IntArray,
) -> tuple[FloatArray, FloatArray, TrainingCost]:  # fmt: skip
    """Closed form: all updates and all scoring passes of an rl_step [s] ``[layouts]``, and an update's breakdown."""
    demand = site.trained(demand)
    update, scoring = (cut.closed(demand) for cut in trainer_cuts(stack, demand, layout, settings, budget))
    networks, how = site.networks(architecture), (demand, layout, settings)
    each = [updated(alone, stack, network, *how, update) for alone, network in networks]
    scored = [scored_once(alone, stack, network, *how, scoring) for alone, network in networks]
    updates_s = _sum(one.each_s for one in each) * site.updates(demand.batch)
    return updates_s, _sum(one.each_s * one.passes for one in scored), each[0].cost


def _sum(seconds: Iterable[FloatArray]) -> FloatArray:
    return sum(seconds, np.zeros(()))


def simulated_training(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, budget: int | None, known: CutLengths,
) -> tuple[FloatArray, UpdateWork]:  # fmt: skip
    """Events: the updates of the real lengths of every replicate [s] ``[replicates]``, and those of the policy."""
    demand = site.trained(demand)
    batches = known.of(trainer_cuts(stack, demand, layout, settings, np.asarray([budget or 0]))[0], demand)
    networks, how = site.networks(architecture), (demand, layout, settings, batches)
    each = [updated(alone, stack, network, *how) for alone, network in networks]
    count, updates = len(demand.tables), demand.batch.updates
    return _sum(one.each_s for one in each).reshape(count, updates).sum(axis=1) * site.epochs, each[0]


def simulated_scoring(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, budget: int | None, known: CutLengths,
) -> tuple[FloatArray, ScoringWork]:  # fmt: skip
    """Events: the scoring passes of every replicate [s] ``[replicates]``, and those of the policy."""
    demand = site.trained(demand)
    scored = known.of(trainer_cuts(stack, demand, layout, settings, np.asarray([budget or 0]))[1], demand)
    networks, how = site.networks(architecture), (demand, layout, settings, scored)
    each = [scored_once(alone, stack, network, *how) for alone, network in networks]
    return np.broadcast_to(_sum(one.each_s * one.passes for one in each), (len(demand.tables),)), each[0]
