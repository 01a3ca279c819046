"""Screen: every candidate of a slot by closed forms, pruned to those that can be part of a best plan.

A slot is one task in one group of rl_steps. Its candidates are pairs of a rollout column and a trainer column under a
mode, a split of the devices and a batch. Columns are pruned by dominance before they are paired, pairs by objective:

=============  =====================================================================================================
`Columns`      what is looked at: columns of both pools, each computed once
`SplitColumns` what is left of them, and the pairs that are made of what is left
`Tally`        what fell to what
`Screened`     what is kept: the best pairs as configurations
=============  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from rlperf.cost.reject import Reject
from rlperf.layout import FloatArray, IntArray
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.search.columns import Columns, ColumnStore
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.split_columns import ScreenedPairs, SplitColumns, truncates
from rlperf.plan.search.splits import longest_of_all, splits
from rlperf.plan.search.tally import Tally
from rlperf.sim.remembered import Remembered
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.rollout_counted import Counted
from rlperf.specs.framework import FrameworkFacts
from rlperf.told import Tell

FINALISTS = 64
"""Pairs per slot that the judge may look at; the screen keeps this many of the best."""
PER_KIND = 16
"""Pairs of every mode and trainer backend that are kept beside them, and of those that are fastest by themselves."""
PER_VARIANT = 16
"""Pairs of every batch, precision and prefix caching that are kept where several are open: as if it were stated."""
PER_POOL = 16
"""Pairs of the best engines that are kept with other trainers, and of the best trainer with other engines."""
PER_COUNT = 4
"""Of those, at most this many per device count where tasks compete for devices."""
_LENGTHS: Remembered[Counted] = Remembered(most=4)
"""Engine_steps of the lengths screened last, whoever asked: of a job that is asked again with other engines, another
trainer or other modes the lengths are the same."""
FORGIVEN = int(
    Reject.MEMORY | Reject.KV | Reject.HOST_MEMORY | Reject.NODE | Reject.BUDGET | Reject.FRAMEWORK | Reject.LIMIT
)
"""What a lenient screen lets pass: it can still be costed."""


@dataclass(frozen=True, eq=False)
class Screened:
    """What is left of one slot, best first: by objective and the price of leaving the beaten path.

    Attributes
    ----------
    configurations : the candidates
    objective : value per rl_step ``[candidates]``
    priced : the same with the price of leaving the beaten path ``[candidates]``
    rl_step_s : seconds per rl_step ``[candidates]``
    demand : index of each candidate's batch in ``demands``
    candidates, rejected : columns and pairs that were refused or costed one by one, and how many fell to what
    combinations : whole configurations among which the best was found: every rollout column with every trainer column
        whose degrees are possible at all, in every batch, mode and split. Dominance decides most of them unseen.
    misses : nearest misses in words, for when nothing is left
    lacks_memory : a trainer or an engine misses memory, wherever none is left
    """

    configurations: tuple[Configuration, ...]
    objective: FloatArray
    priced: FloatArray
    rl_step_s: FloatArray
    demand: IntArray
    demands: tuple[Demand, ...]
    candidates: int
    combinations: int
    rejected: dict[str, int]
    misses: tuple[str, ...]
    lacks_memory: bool


def screen(
    context: Context,
    task: TaskContext,
    demands: tuple[Demand, ...],
    facts: FrameworkFacts | None = None,
    *,
    prune: bool = True,
    keep: int = FINALISTS,
    forgiven: int = 0,
    store: ColumnStore | None = None,
    report: Tell | None = None,
) -> Screened:
    """All candidates of one slot by closed forms.

    Parameters
    ----------
    demands : one per batch that the task leaves open
    prune : drop dominated columns before pairing; False keeps every feasible pair (brute force, tests)
    keep : candidates kept, best first
    forgiven : `Reject` flags that a lenient screen lets pass (`FORGIVEN`), so that what breaks memory, a framework rule
        or a limit can be predicted and explained
    store : columns that other screens of the task have made
    report : called with the share done and a text
    """
    store = store or ColumnStore(lengths=_LENGTHS)
    variants = Columns(context, task, facts, forgiven, store, least=prune and not forgiven).variants()
    every, parts, tally = splits(context), list[_Part](), Tally()
    refused = [truncates(context, demand) and not forgiven & Reject.LIMIT for demand in demands]
    for index, demand in enumerate(demands):
        pieces = [] if refused[index] else list(product(variants, every))
        for columns, split in sorted(pieces, key=lambda piece: -piece[1].rollout):
            columns.rollout(demand, split)  # the largest pool tells the least that smaller ones take
        for number, (columns, split) in enumerate(pieces):
            if report is not None:
                share = (index + number / len(pieces)) / len(demands)
                report(share, f"screening {split.mode} on {split.total} devices")
            for again, source in enumerate(columns.seated(demand, split)):
                parts.append(_Part.of(index, columns, source, prune=prune, repeated=columns.repeated or again > 0))
    ranked, kept = _simulated(context, parts, keep, prune)
    for index, demand in enumerate(demands):
        if refused[index]:
            tally.truncated(context, demand)
        for part in ranked.parts:
            if part.demand == index:
                part.told(tally)
    return _screened(ranked, kept, demands, tally)


Kept = list[tuple[int, Configuration]]
"""Candidates that are left, with their positions."""


def _simulated(context: Context, parts: list[_Part], keep: int, prune: bool) -> tuple[_Ranked, Kept]:
    """The candidates of all parts and those that are kept, with every engine simulated that is in one of these.

    Engines that have not been simulated stand there with no more than the least that they may take. While one of them
    is in a candidate that is kept it is simulated; then whatever is left out is worse than what is kept, even so.
    """
    while True:
        ranked = _Ranked.of(parts)
        asked, kept = dict[int, list[int]](), ranked.kept(context, keep)
        for position, _ in kept:
            part, row = int(ranked.part_of[position]), int(ranked.row_of[position])
            column = int(parts[part].found.r[row])
            if parts[part].source.rollout.guessed[column]:
                asked.setdefault(part, []).append(column)
        if not asked:
            return ranked, kept
        parts = [part.simulated(np.unique(asked[i]), prune) if i in asked else part for i, part in enumerate(parts)]


def _crossed(r: IntArray, t: IntArray) -> tuple[IntArray, IntArray]:
    """Every column of one pool with every one of the other."""
    return np.repeat(r, len(t)), np.tile(t, len(r))


@dataclass(frozen=True, eq=False)
class _Part:
    """One split and batch: its pairs, and which of them are candidates; ``demand``: index of the batch.

    ``repeated``: the trainer's columns have been told with another part
    """

    demand: int
    columns: Columns
    source: SplitColumns
    repeated: bool
    pairs: ScreenedPairs
    found: ScreenedPairs

    @classmethod
    def of(cls, demand: int, columns: Columns, source: SplitColumns, *, prune: bool, repeated: bool) -> _Part:
        """The pairs of the columns that are left."""
        r, t = (np.zeros(0, dtype=np.int64) for _ in range(2))
        if source.possible:
            r = source.rollout_left(prune=prune)
            t = columns.trainer_left(source) if prune else source.trainer_left(prune=False)
        pairs = source.screened(*_crossed(r, t))
        return cls(demand, columns, source, repeated, pairs, pairs.candidates())

    def simulated(self, rows: IntArray, prune: bool) -> _Part:
        """The same with some rollout columns simulated."""
        source = self.columns.simulated(self.source, rows)
        return _Part.of(self.demand, self.columns, source, prune=prune, repeated=self.repeated)

    def told(self, tally: Tally) -> None:
        """Count what was looked at."""
        tally.columns(self.source, self.repeated)
        if self.source.possible:
            tally.pairs(self.source, self.pairs)


@dataclass(frozen=True, eq=False)
class _Ranked:
    """The candidates of all parts ``[candidates]``; ``ranked``: the best first, the price of the path and all.

    Where a lenient screen lets memory pass, those that lack the least of it go before.
    """

    parts: list[_Part]
    part_of: IntArray
    row_of: IntArray
    objective: FloatArray
    seconds: FloatArray
    priced: FloatArray
    ranked: IntArray

    @classmethod
    def of(cls, parts: list[_Part]) -> _Ranked:
        """Those of some parts."""
        nothing, sizes = np.zeros(0), [len(part.found.r) for part in parts]
        objective = np.concatenate([nothing, *(part.found.objective for part in parts)])
        priced = objective + np.concatenate([nothing, *(part.found.price for part in parts)])
        lacking = np.concatenate([nothing, *(part.source.lacking(part.found.r, part.found.t) for part in parts)])
        return cls(
            parts,
            np.repeat(np.arange(len(parts)), sizes),
            np.concatenate([nothing, *(np.arange(size) for size in sizes)]).astype(np.int64),
            objective,
            np.concatenate([nothing, *(part.found.rl_step_s for part in parts)]),
            priced,
            np.lexsort((priced, lacking)),
        )

    def kept(self, context: Context, keep: int) -> Kept:
        """The ``keep`` best as configurations, with their positions, and beside them the best of each kind.

        Where tasks compete for devices, they need candidates of every device count instead, of each mode and variant
        that is open as many as if it were stated.
        """
        apart = context.job.sharing == "devices" and keep > 1
        kept = _Shortlist(PER_COUNT if apart else None)

        def take(positions: IntArray, most: int) -> None:
            for position in positions:
                if len(kept.made) >= most:
                    return
                part, row = self.parts[self.part_of[position]], self.row_of[position]
                kept.offer(int(position), part.source.configuration(int(part.found.r[row]), int(part.found.t[row])))

        if apart:
            for positions in sorted(self._variants(by_mode=True), key=lambda own: float(self.priced[own[0]])):
                take(positions, len(kept.made) + keep)
            return list(kept.made.values())
        take(self.ranked, keep)
        if keep > 1:
            kinds = self._kinds(len(context.trainers))
            for positions in kinds:
                take(positions[:PER_KIND], keep + PER_KIND * len(kinds))
            for positions in self._beside_the_best():
                take(positions[:PER_POOL], len(kept.made) + PER_POOL)
            take(self._of_each_pipeline(), 2 * keep + len(kept.made))
            if context.takes_turns:
                take(self._of_each_split(longest_of_all(context)), 2 * keep + len(kept.made))
            variants = self._variants()
            for positions in variants if len(variants) > 1 else ():
                take(positions[:PER_VARIANT], len(kept.made) + PER_VARIANT)
        return list(kept.made.values())

    def _kinds(self, backends: int) -> list[IntArray]:
        """Of every mode and trainer backend, and what would be bold: closed forms are off by both; the best first."""
        modes = [part.source.split.mode for part in self.parts]
        mode_of = np.array([modes.index(mode) for mode in modes], dtype=np.int64)[self.part_of]
        kind = mode_of * backends + np.concatenate(
            [np.zeros(0, dtype=np.int64), *(part.source.trainer.backend[part.found.t] for part in self.parts)]
        )
        kinds = [self.ranked[kind[self.ranked] == code] for code in np.unique(kind)]
        kinds.append(np.argsort(self.objective, kind="stable"))
        return sorted(kinds, key=lambda own: float(self.objective[own[:1]].sum()))

    def _beside_the_best(self) -> Iterator[IntArray]:
        """Those with the engines of the best, and those with its trainer."""
        ranked = self.ranked
        for columns in (
            np.concatenate([part.found.r for part in self.parts]), np.concatenate([part.found.t for part in self.parts])
        ) if len(ranked) else ():  # fmt: skip
            yield ranked[(self.part_of[ranked] == self.part_of[ranked[0]]) & (columns[ranked] == columns[ranked[0]])]

    def _of_each_pipeline(self) -> IntArray:
        """With the engines of the best the best of each two numbers of trainer replicas and stages."""
        nothing = np.zeros(0, dtype=np.int64)
        beside, number = next(self._beside_the_best(), nothing), [nothing]
        for part in self.parts:
            layout = part.source.trainer.layout
            number.append((layout.data_parallel * 1000 + layout.pipeline_parallel)[part.found.t])
        return _first_of_each(beside, np.concatenate(number)[beside])

    def _of_each_split(self, longest_tokens: int) -> IntArray:
        """The best of each mode and number of the engines' devices that takes so long a sequence.

        Tasks that take turns may share what is best for none of them, and whose budget runs the sequences of all.
        """
        splits, runs = [(part.source.split.mode, part.source.split.rollout) for part in self.parts], [np.zeros(0, bool)]
        for part in self.parts:
            runs.append(part.source.trainer.token_budget[part.found.t] >= longest_tokens)
        ranked = self.ranked[np.concatenate(runs)[self.ranked]]
        of = np.array([splits.index(each) for each in splits], dtype=np.int64)[self.part_of[ranked]]
        return _first_of_each(ranked, of)

    def _variants(self, *, by_mode: bool = False) -> list[IntArray]:
        """Those of every `Configuration.variant` that a job lists; ``by_mode``: and of every mode."""

        def variant(source: SplitColumns) -> tuple[object, ...]:
            return source.demand.batch, source.context.job.pool("rollout").settings, by_mode and source.split.mode

        variants = [variant(part.source) for part in self.parts]
        of = np.array([variants.index(each) for each in variants], dtype=np.int64)[self.part_of[self.ranked]]
        return [self.ranked[of == code] for code in np.unique(of)]


def _first_of_each(positions: IntArray, group: IntArray) -> IntArray:
    """The first position of every group, in their order."""
    return np.asarray(positions[np.sort(np.unique(group, return_index=True)[1])])


def _screened(ranked: _Ranked, kept: Kept, demands: tuple[Demand, ...], tally: Tally) -> Screened:
    """What is left of all splits."""
    order = np.array([position for position, _ in kept], dtype=np.int64)
    return Screened(
        configurations=tuple(configuration for _, configuration in kept),
        objective=ranked.objective[order],
        priced=ranked.priced[order],
        rl_step_s=ranked.seconds[order],
        demand=np.array([ranked.parts[part].demand for part in ranked.part_of[order]], dtype=np.int64),
        demands=demands,
        candidates=tally.candidates,
        combinations=tally.combinations,
        rejected=tally.rejected,
        misses=tally.told(),
        lacks_memory=bool(tally.leanest or tally.roomiest),
    )


@dataclass(eq=False)
class _Shortlist:
    """Configurations that are kept; of those with equal layouts and precisions only the first.

    Attributes
    ----------
    per_count : at most this many of each device count, mode and variant; None: any number
    made : (position, configuration) by what tells them apart
    """

    per_count: int | None
    made: dict[tuple[object, ...], tuple[int, Configuration]] = field(default_factory=dict)
    _of_count: dict[tuple[object, ...], int] = field(default_factory=dict)

    def offer(self, position: int, candidate: Configuration) -> None:
        """Keep a candidate unless one like it is there, or enough of its device count."""
        key, alike = (candidate.signature, candidate.variant), (candidate.devices, candidate.mode, candidate.variant)
        if key in self.made or self._of_count.get(alike, 0) == self.per_count:
            return
        self._of_count[alike] = self._of_count.get(alike, 0) + 1
        self.made[key] = (position, candidate)
