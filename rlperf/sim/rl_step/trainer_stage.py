"""Training and scoring of one rl_step: microbatches as the framework cuts them, then seconds of updates and passes.

The closed form knows the moments of the lengths, for a million layouts; the events cut the real lengths of every
optimizer update, for one. What a framework does to its microbatches (packing, balance, cutting those of all ranks
together, padding) is said once, here, for both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from rlperf.cost.batching import Microbatches, slowest_lengths, slowest_slices
from rlperf.cost.collectives import host_copy_s
from rlperf.cost.layers.vision import TowerWork
from rlperf.cost.memory_parameters import OFFLOADS_OPTIMIZER
from rlperf.cost.muon import muon_s, with_muon
from rlperf.cost.packing import packed_over_ranks, sorted_over_ranks
from rlperf.cost.scoring import scoring_pass
from rlperf.cost.speculation import training_share
from rlperf.cost.trainer_device import BEFORE_HOPPER, UpdateOptions
from rlperf.cost.training import TrainingCost, optimizer_bytes, training_update
from rlperf.layout import OFFLOAD, FloatArray, IntArray, Layout, taken
from rlperf.sim.rl_step.data_movement import route_bytes
from rlperf.sim.rl_step.demand import Demand, LengthMoments
from rlperf.sim.rl_step.overheads import (
    held_parameters,
    padded_microbatches,
    parked_s,
    routing_skew,
    scoring_in_framework_s,
    shared_prefix_s,
    training_in_framework_s,
)
from rlperf.sim.rl_step.site import Site, TrainerStack
from rlperf.specs.architecture import Architecture
from rlperf.specs.framework import Pads
from rlperf.specs.pool import Settings
from rlperf.specs.rl_calibration import FrameworkCalibration


def cut_by_budget(packing: bool, framework: FrameworkCalibration) -> bool:
    """Whether microbatches are cut by tokens; else by a number of sequences.

    Unpacked sequences are cut by tokens only where a framework sorts those of all ranks together.
    """
    batching = framework.training.batching
    return batching == "all" or (packing and batching != "count")


def scoring_by_budget(settings: Settings, framework: FrameworkCalibration) -> bool:
    """Whether scoring is cut by tokens: as training, unless one of two sizes alone is stated of packed scoring."""
    by_tokens, by_count = settings.scoring_token_budget is not None, settings.scoring_microbatch is not None
    if framework.training.batching == "all" or not settings.packing or by_tokens == by_count:
        return cut_by_budget(settings.packing, framework)
    return by_tokens


def most_scored_tokens(settings: Settings, framework: FrameworkCalibration, longest: int) -> int | None:
    """Tokens of a scoring microbatch of the ``longest`` sequences; None: nothing is stated, so as in training.

    A count is the tokens of as many longest sequences where the bins of all ranks are dealt out together.
    """
    count, budget = settings.scoring_microbatch, settings.scoring_token_budget
    if budget is not None and scoring_by_budget(settings, framework):
        return budget
    return None if count is None else count * longest


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
class Cuts:
    """How the sequences of an rl_step are cut into microbatches.

    Attributes
    ----------
    framework : whose rules hold
    layout : data-parallel ranks, and sequences per microbatch where none is cut by tokens ``[layouts]``
    parts : passes into which the rl_step's sequences are cut: optimizer updates, or 1 for scoring
    token_budget : tokens per microbatch and replica ``[layouts]``
    packing : whether sequences are packed
    by_budget : whether they are cut by tokens; else by count
    shared_prefix : whether a prompt is computed once for the members of its group that a microbatch holds
    """

    framework: FrameworkCalibration
    layout: Layout
    parts: int
    token_budget: npt.ArrayLike
    packing: bool
    by_budget: bool
    shared_prefix: bool = False

    @property
    def unpadded(self) -> bool:
        """Whether sequences of a microbatch stand one behind the other."""
        return self.packing or self.together

    @property
    def together(self) -> bool:
        """Whether the sequences of all ranks are cut together."""
        return self.framework.training.batching == "all"

    @property
    def even(self) -> bool:
        """Whether the ranks' tokens are evened out within a pass; else over the whole rl_step only."""
        balance = self.framework.training.balance
        return {"update": True, "batch": self.parts == 1, "budget": self.by_budget, "none": False}[balance]

    @property
    def pads(self) -> Pads:
        """To what sequences are padded; what is packed counts as padded to its microbatch, which is not at all."""
        return "microbatch" if self.unpadded else self.framework.training.pads

    def _padded_tokens(self, demand: Demand) -> FloatArray:
        """Length of every sequence of a replicate, where all are padded alike, ``[replicates]``.

        Ranks that pad to what they generated differ in it, and all wait for that with the longest.
        """
        limit = np.full(len(demand.tables), float(demand.batch.longest_tokens))
        return limit if self.pads == "limit" else np.array(demand.longest_padded)

    def lengths(self, demand: Demand, replicate: int) -> FloatArray:
        """Sequences of a replicate as they are trained [tokens]."""
        lengths = demand.lengths(replicate)
        same = self.pads == "microbatch"
        return lengths if same else np.full_like(lengths, self._padded_tokens(demand)[replicate])

    def closed(self, demand: Demand) -> Microbatches:
        """From the moments of the lengths ``[layouts]``; what is cut together, from those of one rl_step."""
        moments = demand.moments
        if self.pads != "microbatch":
            each = self._padded_tokens(demand)
            moments = LengthMoments(float(each.mean()), float((each**2).mean()), float(each.mean()))
        found = Microbatches.from_moments(
            self.layout, demand.batch.sequences / self.parts, moments.mean, moments.mean_square, moments.longest,
            token_budget=self.token_budget if self.by_budget else None, packing=self.unpadded, balanced=self.even,
        )  # fmt: skip
        if self.together:
            found = self.cut_together(found, np.array_split(demand.lengths(0), self.parts))
        return self.finished(found, demand)

    def cut_together(self, found: Microbatches, passes: list[FloatArray]) -> Microbatches:
        """Counts and padding of what is cut together, means over the passes; ranks as uneven as they were found."""
        shape = np.broadcast_shapes(np.shape(self.token_budget), np.shape(found.count), self.layout.shape)
        ranks = np.broadcast_to(self.layout.data_parallel, shape)
        pairs = np.stack([ranks.ravel(), np.broadcast_to(self.token_budget, shape).ravel()])
        kinds, of = np.unique(pairs, axis=1, return_inverse=True)
        cut = packed_over_ranks(passes, kinds) if self.packing else sorted_over_ranks(passes, kinds)
        count, tokens, squares = cut[:, of.reshape(-1)].reshape(3, *shape)
        if self.packing:
            share = found.count / count
            tokens, squares = found.tokens * share, found.sum_squares * share
        return Microbatches.of(tokens, squares, np.broadcast_to(found.max_len, shape), count)

    def finished(self, found: Microbatches, demand: Demand) -> Microbatches:
        """As they run: prompts that are shared once, padded as the framework does."""
        budget = self.token_budget if self.by_budget else None
        kept = self.once(found, demand) if self.shared_prefix and demand.batch.group_size > 1 else found
        return padded_microbatches(self.framework, self.layout, kept, budget)

    def once(self, found: Microbatches, demand: Demand) -> Microbatches:
        r"""The same with the prompt of a group computed once for the members that share a microbatch.

        Of g members ceil(g / m) prompts are computed, m the members that a microbatch holds: prompt and m responses
        within its budget, or its number of sequences. A response sees its prompt all the same, so that of the pairs
        only those within the prompt go, :math:`(l_i^2 - p^2)` being left of every other member.
        """
        batch, (prompt, square) = demand.batch, demand.prompt_moments
        each = np.maximum(batch.sequences / self.parts / self.layout.data_parallel, 1.0)
        room = np.asarray(self.layout.microbatch, dtype=np.float64)
        if self.by_budget:
            room = (np.asarray(self.token_budget) - prompt) / max(demand.moments.mean - prompt, 1.0)
        members = np.clip(np.floor(np.minimum(room, each)), 1.0, batch.group_size)
        spared = 1.0 - np.ceil(batch.group_size / members) / batch.group_size
        tokens = found.tokens * found.count - spared * prompt * each
        squares = found.sum_squares * found.count - spared * square * each
        count = found.count
        if self.by_budget:
            count = np.maximum(np.ceil(count * tokens / (found.tokens * found.count) - 1e-9), 1.0)
        return Microbatches.of(tokens / count, squares / count, np.broadcast_to(found.max_len, tokens.shape), count)


@dataclass(eq=False)
class CutLengths:
    """Microbatches from real lengths; partitions that several pools share are made once."""

    _cuts: dict[tuple[object, ...], tuple[float, float, float, float]] = field(default_factory=dict)
    _slowest: dict[tuple[object, ...], list[FloatArray]] = field(default_factory=dict)

    def of(self, cuts: Cuts, demand: Demand) -> Microbatches:
        """Events: microbatches of every pass of every replicate ``[replicates x parts]``; ``cuts`` of one layout."""
        rows: list[tuple[float, float, float, float]] = []
        for index, table in enumerate(demand.keys):
            lengths = cuts.lengths(demand, index)
            name = (table, demand.batch.sequences, cuts.parts, cuts.pads, demand.batch.longest_tokens)
            passes = np.array_split(lengths, cuts.parts)
            fullest = self._fullest(cuts, name, lengths, passes)
            rows += [self._pass(cuts, (*name, k), *pair) for k, pair in enumerate(zip(passes, fullest, strict=True))]
        columns: FloatArray = np.array(rows).T
        return cuts.finished(Microbatches.of(*columns), demand)

    def _fullest(
        self, cuts: Cuts, name: tuple[object, ...], lengths: FloatArray, passes: list[FloatArray]
    ) -> list[FloatArray]:
        """Lengths of the fullest rank in every pass; which it is does not depend on the token budget.

        Where microbatches are cut by count every rank has as many sequences: one more would be a microbatch more.
        """
        ranks = int(np.ravel(cuts.layout.data_parallel)[0])
        key = (*name, ranks, cuts.even, cuts.by_budget)
        if key not in self._slowest:
            self._slowest[key] = (
                [slowest_lengths(part, ranks, alike=not cuts.by_budget) for part in passes]
                if cuts.even
                else [slowest_lengths(part, ranks, balanced=False) for part in passes]
                if cuts.framework.training.balance != "batch"
                else slowest_slices(lengths, ranks, cuts.parts)
            )
        return self._slowest[key]

    def _pass(
        self, cuts: Cuts, name: tuple[object, ...], whole: FloatArray, fullest: FloatArray
    ) -> tuple[float, float, float, float]:
        """Tokens, sum of squares, longest and count of one pass's microbatches on its fullest rank."""
        one, ranks = cuts.layout.take(0), int(np.ravel(cuts.layout.data_parallel)[0])
        budget = float(np.ravel(cuts.token_budget)[0]) if cuts.by_budget else None
        key = (*name, ranks, budget, int(one.microbatch), cuts.packing, cuts.unpadded, cuts.together, cuts.even)
        if key not in self._cuts:
            floor = None if budget is None else max(budget, float(whole.max()))
            alone = one.with_(data_parallel=1)
            made = Microbatches.from_lengths(alone, fullest, token_budget=floor, packing=cuts.unpadded)
            if cuts.together:
                made = cuts.cut_together(made, [whole])
            self._cuts[key] = (
                float(np.ravel(made.tokens)[0]), float(np.ravel(made.sum_squares)[0]),
                float(np.ravel(made.max_len)[0]), float(np.ravel(made.count)[0]),
            )  # fmt: skip
        return self._cuts[key]


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


def trainer_cuts(
    stack: TrainerStack, demand: Demand, layout: Layout, settings: Settings, budget: npt.ArrayLike
) -> tuple[Cuts, Cuts]:
    """How an optimizer update and a scoring pass are cut into microbatches."""
    framework, packing, prefix = stack.framework, settings.packing, settings.shared_prefix
    scored = np.asarray(most_scored_tokens(settings, framework, demand.batch.longest_tokens) or budget)
    by_count = layout
    if settings.scoring_microbatch is not None:
        by_count = replace(layout, microbatch=np.full_like(layout.microbatch, settings.scoring_microbatch))
    return (
        Cuts(framework, layout, demand.batch.updates, budget, packing, cut_by_budget(packing, framework), prefix),
        Cuts(framework, by_count, 1, scored, packing, scoring_by_budget(settings, framework), prefix),
    )


def updated(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, batches: Microbatches,
) -> UpdateWork:  # fmt: skip
    """Seconds of one update of ``batches``, in the framework."""
    stack = with_optimizer(stack, architecture, settings)
    framework, hardware = stack.framework, site.hardware
    options = _options(site, stack, layout, settings)
    seen = TowerWork(demand.images_per_token * batches.tokens, demand.patches(architecture), settings.freeze_vision)
    update = _update(site, stack, architecture, demand.batch.updates, layout, batches, options, seen)
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


def _options(site: Site, stack: TrainerStack, layout: Layout, settings: Settings) -> UpdateOptions:
    skew, device = routing_skew(stack.framework, layout), site.hardware.device
    kernel = "flash" if device.generation.split()[0] in BEFORE_HOPPER else stack.framework.training.attention_kernel
    return UpdateOptions(
        settings.compute_dtype, settings.lora_rank, skew=skew, chunked_loss=settings.chunked_loss,
        attention_kernel=kernel,
    )  # fmt: skip


def scored_once(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, scored: Microbatches,
) -> ScoringWork:  # fmt: skip
    """Seconds of one scoring pass over ``scored``, in the framework."""
    stack = with_optimizer(stack, architecture, settings)
    framework, options = stack.framework, _options(site, stack, layout, settings)
    read = TowerWork(demand.images_per_token * scored.tokens, demand.patches(architecture))
    one = scoring_pass(architecture, site.hardware, stack.calibration, layout, scored, options, tower=read)
    passes = stack.scoring_passes(site.roles, demand.batch.updates_of_a_job, site.old_policy)
    reference = 1.0 / passes if passes and "reference" in site.roles else 0.0
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
    states = optimizer_bytes(architecture, stack.calibration, layout, options.lora_rank)
    fetched = parked_s(stack.framework, site.hardware, states) + _weights_s(site, stack, architecture, layout)
    return replace(cost, offload_s=cost.offload_s + np.where(parked, fetched, 0.0) / updates)


def _weights_s(site: Site, stack: TrainerStack, architecture: Architecture, layout: Layout) -> FloatArray:
    """The policy's weights, brought for one phase and taken back, where they wait in host memory between phases [s]."""
    if not stack.framework.training.parks_optimizer:
        return np.zeros(())
    held = held_parameters(architecture, layout) * stack.calibration.storage.weight
    return np.where(np.isin(layout.offload, OFFLOADS_OPTIMIZER), parked_s(stack.framework, site.hardware, held), 0.0)


def closed_training(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, budget: IntArray,
) -> tuple[FloatArray, FloatArray, TrainingCost]:  # fmt: skip
    """Closed form: all updates and all scoring passes of an rl_step [s] ``[layouts]``, and an update's breakdown."""
    demand = site.trained(demand)
    update, scoring = trainer_cuts(stack, demand, layout, settings, budget)
    where = site, stack, architecture, demand, layout, settings
    one, scored = updated(*where, update.closed(demand)), scored_once(*where, scoring.closed(demand))
    return one.each_s * demand.batch.updates * site.networks, scored.each_s * scored.passes, one.cost


def simulated_training(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, budget: int | None, known: CutLengths,
) -> tuple[FloatArray, UpdateWork]:  # fmt: skip
    """Events: the updates of the real lengths of every replicate [s] ``[replicates]``, and what is behind them."""
    demand = site.trained(demand)
    batches = known.of(trainer_cuts(stack, demand, layout, settings, np.asarray([budget or 0]))[0], demand)
    one = updated(site, stack, architecture, demand, layout, settings, batches)
    count, updates = len(demand.tables), demand.batch.updates
    return one.each_s.reshape(count, updates).sum(axis=1) * site.networks, one


def simulated_scoring(
    site: Site, stack: TrainerStack, architecture: Architecture, demand: Demand, layout: Layout,
    settings: Settings, budget: int | None, known: CutLengths,
) -> tuple[FloatArray, ScoringWork]:  # fmt: skip
    """Events: the same of scoring."""
    demand = site.trained(demand)
    scored = known.of(trainer_cuts(stack, demand, layout, settings, np.asarray([budget or 0]))[1], demand)
    one = scored_once(site, stack, architecture, demand, layout, settings, scored)
    return np.broadcast_to(one.each_s, (len(demand.tables),)) * one.passes, one
