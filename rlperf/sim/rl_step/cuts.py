"""How a framework cuts the sequences of an rl_step into microbatches: for a million layouts, or from real lengths.

Packing, balance, cutting those of all ranks together, padding and waiting for one another are said once, here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from rlperf.cost.batching import Microbatches, slowest_lengths, slowest_slices
from rlperf.cost.packing import packed_over_ranks, slowest_in_step, sorted_over_ranks
from rlperf.layout import FloatArray, IntArray, Layout
from rlperf.sim.rl_step.demand import Demand, LengthMoments
from rlperf.sim.rl_step.overheads import padded_microbatches
from rlperf.sim.rl_step.site import TrainerStack
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
    in_step : data-parallel ranks that wait for one another in every microbatch ``[layouts]``
    """

    framework: FrameworkCalibration
    layout: Layout
    parts: int
    token_budget: npt.ArrayLike
    packing: bool
    by_budget: bool
    shared_prefix: bool = False
    in_step: npt.ArrayLike = 1

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
        return self.finished(self.waited_for(found, demand.lengths(0)), demand)

    def waited_for(self, found: Microbatches, lengths: FloatArray) -> Microbatches:
        """With the microbatches that ranks in step wait for, where each takes its sequences as they come.

        Bins of a budget are alike, and so is what is sorted or padded to one length: there nobody waits. Nor for more
        than the fullest rank where each has one microbatch.
        """
        if self.by_budget or self.together or self.pads != "microbatch" or np.max(self.in_step) <= 1:
            return found
        kinds, of = np.unique(
            np.stack([a.ravel() for a in np.broadcast_arrays(self.layout.microbatch, self.in_step, found.tokens)[:2]]),
            axis=1, return_inverse=True,
        )  # fmt: skip
        pairs = [slowest_in_step(lengths, *kind, packing=self.packing) for kind in kinds.T.tolist()]
        tokens, squares = np.array(pairs).T[:, of.reshape(-1)].reshape(2, *found.tokens.shape)
        slower = (tokens > found.tokens) & (found.count > 1.0)
        return replace(
            found,
            tokens=np.where(slower, tokens, found.tokens),
            sum_squares=np.where(slower, squares, found.sum_squares),
        )

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
        in_step = int(np.ravel(cuts.in_step)[0])
        shape = int(one.microbatch), in_step, cuts.packing, cuts.unpadded, cuts.together, cuts.even
        key = (*name, ranks, budget, *shape)
        if key not in self._cuts:
            floor = None if budget is None else max(budget, float(whole.max()))
            alone = one.with_(data_parallel=1)
            made = Microbatches.from_lengths(alone, fullest, token_budget=floor, packing=cuts.unpadded)
            if cuts.together:
                made = cuts.cut_together(made, [whole])
            made = cuts.waited_for(made, whole)
            self._cuts[key] = (
                float(np.ravel(made.tokens)[0]), float(np.ravel(made.sum_squares)[0]),
                float(np.ravel(made.max_len)[0]), float(np.ravel(made.count)[0]),
            )  # fmt: skip
        return self._cuts[key]


def trainer_cuts(
    stack: TrainerStack, demand: Demand, layout: Layout, settings: Settings, budget: npt.ArrayLike
) -> tuple[Cuts, Cuts]:
    """How an optimizer update and a scoring pass are cut into microbatches."""
    framework, packing, prefix = stack.framework, settings.packing, settings.shared_prefix
    scored = np.asarray(most_scored_tokens(settings, framework, demand.batch.longest_tokens) or budget)
    by_count = layout
    if settings.scoring_microbatch is not None:
        by_count = replace(layout, microbatch=np.full_like(layout.microbatch, settings.scoring_microbatch))
    reduced = stack.calibration.timing.reduce_every_microbatch
    trains, scores = ranks_in_step(layout, 2 if reduced else 3), ranks_in_step(layout, 3)
    by_budget = cut_by_budget(packing, framework), scoring_by_budget(settings, framework)
    return (
        Cuts(framework, layout, demand.batch.updates, budget, packing, by_budget[0], prefix, trains),
        Cuts(framework, by_count, 1, scored, packing, by_budget[1], prefix, scores),
    )


def ranks_in_step(layout: Layout, sharded: int) -> IntArray:
    """Data-parallel ranks that meet in every microbatch ``[layouts]``.

    Those whose weights (from ZeRO stage ``sharded`` on) are gathered or whose gradients are scattered together, and
    those whose experts lie on one another's devices.
    """
    inside = layout.context_parallel * layout.ulysses
    gathered = np.where(layout.zero_stage >= sharded, layout.shards // inside, 1)
    exchanged = layout.expert_parallel * layout.expert_tensor_parallel // (layout.tensor_parallel * inside)
    return np.asarray(np.clip(np.maximum(gathered, exchanged), 1, layout.data_parallel), np.int64)
