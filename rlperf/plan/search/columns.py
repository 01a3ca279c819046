"""Columns of slots, each computed once: modes and splits share what they do not change, and so do points of a sweep.

Whatever is kept is kept by the values that it was made from: the part of the job that its columns read, the lengths,
the batch, the devices. A screen keeps all of it while it works, a sweep the last of it from point to point.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial

import numpy as np

from rlperf.layout import BoolArray, IntArray, Layout
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.search.rollout_columns import RolloutColumns, rollout_columns, simulated
from rlperf.plan.search.rules import refused_engines, takes_longer, trainer_rule_flags
from rlperf.plan.search.scorer_columns import ScorerColumn, ScorerWork, scorer_column
from rlperf.plan.search.split_columns import SplitColumns
from rlperf.plan.search.splits import Split, splits
from rlperf.plan.search.trainer_columns import TrainerColumns, TrainerGrid, trainer_columns_of, trainer_grid
from rlperf.sim.remembered import Key, Remembered
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.engine import Tabulated
from rlperf.sim.rl_step.flow import Allowed
from rlperf.sim.rl_step.rollout_counted import Counted, Priced
from rlperf.sim.rl_step.simulated_rollouts import SimulatedRollouts
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.pool import Role

UNREAD = {"price", "objective", "modes", "name", "horizon", "run", "tasks", "sharing", "limits", "pools"}
"""Fields of a job that no column reads, or that stand in `_read_by` one by one."""
UNREAD_BY_ROLLOUT = UNREAD | {"old_policy"}
"""Those that no column of engines reads; which passes score may hang on the mode, and engines are then still alike."""


@dataclass(eq=False)
class ColumnStore:
    """What columns are made of and from; ``most``: of each kind that many are kept, None all.

    ``lengths``: engine_steps of lengths, which depend on nothing of a job that has a name; kept beyond the store's life
    """

    most: int | None = None
    lengths: Remembered[Counted] = field(default_factory=Remembered)
    rollout: Remembered[RolloutColumns] = field(init=False)
    tables: Remembered[Tabulated] = field(init=False)
    counted: Remembered[Counted] = field(init=False)
    priced: Remembered[Priced] = field(init=False)
    simulated: Remembered[SimulatedRollouts] = field(init=False)
    trainer: Remembered[dict[tuple[int, int], TrainerColumns]] = field(init=False)
    grids: Remembered[TrainerGrid] = field(init=False)
    fronts: Remembered[IntArray] = field(init=False)
    asked: Remembered[ScorerWork] = field(init=False)
    scorers: Remembered[ScorerColumn | None] = field(init=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            if not each.init:
                setattr(self, each.name, Remembered(self.most))


@dataclass(eq=False)
class Columns:
    """Columns of a task under every split.

    Attributes
    ----------
    facts : rules of the framework; None: none
    forgiven : `Reject` flags that a lenient screen lets pass; what they refuse is then costed, too
    repeated : the trainer's columns have been counted with another variant of the engine
    least : of engines that would have to be simulated columns are guessed, no more than they may take, until
        `simulated` asks for them
    """

    context: Context
    task: TaskContext
    facts: FrameworkFacts | None = None
    forgiven: int = 0
    store: ColumnStore = field(default_factory=ColumnStore)
    repeated: bool = False
    least: bool = False
    _in_modes: Remembered[Columns] = field(default_factory=Remembered, init=False)

    def variants(self) -> list[Columns]:
        """One per open precision and prefix caching of the engine; the trainer's columns are the same for all."""
        context = self.context
        pool = context.job.pool("rollout")
        settings = pool.settings.alternatives()
        if len(settings) == 1:
            return [self]
        others = tuple(each for each in context.job.pools if each.role != "rollout")
        pools = [(pool.model_copy(update={"settings": one}), *others) for one in settings]
        jobs = [context.job.model_copy(update={"pools": each}) for each in pools]
        return [
            replace(self, context=replace(context, job=job), repeated=number > 0) for number, job in enumerate(jobs)
        ]

    def of(self, demand: Demand, split: Split) -> SplitColumns:
        """Columns of both pools under one split."""
        own = self._in(split.mode)
        return SplitColumns(
            own.context, self.task.architecture, self.facts, demand, split, own.rollout(demand, split),
            own.trainer(demand, split), self.forgiven, own.scorers(demand, split),
        )  # fmt: skip

    def _in(self, mode: Mode) -> Columns:
        """Those of the job as files say it in a mode."""
        context = self.context.of(mode)
        return self if context is self.context else self._in_modes.get((mode,), lambda: replace(self, context=context))

    def seated(self, demand: Demand, split: Split) -> list[SplitColumns]:
        """Those of a split, and once more where scorers in turn with the trainer are faster in more than the least.

        What is gained may cost the trainer the parking of its states, so that pairs decide.
        """
        lean = self.of(demand, split)
        if not lean.possible or all(split.scorers):
            return [lean]
        roomy = self._in(split.mode).scorers(demand, split, lean.scorer_room)
        alike = all(a and b and a.plan == b.plan for a, b in zip(roomy, lean.scorers, strict=True))
        return [lean] if alike else [lean, replace(lean, scorers=roomy)]

    def scorers(self, demand: Demand, split: Split, room: float | None = None) -> tuple[ScorerColumn | None, ...]:
        """The engine of every scorer under a split; ``room`` see `scorer_column`."""
        found = []
        for one, own in zip(self.context.scorers, split.scorers, strict=True):
            devices = own or split.trainer
            beside = None if own else room
            key = (one.scorer.model_dump_json(), self._read_by_trainer, demand.keys)
            asked = self.store.asked.get(key, partial(ScorerWork.of, demand, one.scorer))
            made = partial(scorer_column, self.context, one, self.task, asked, devices, beside, own=own > 0)
            found.append(self.store.scorers.get((*key, devices, own > 0, beside), made))
        return tuple(found)

    def rollout(self, demand: Demand, split: Split) -> RolloutColumns:
        """Rollout columns of a split, by what its mode has under way; the mini-batch makes no difference to them."""
        if (own := self._in(split.mode)) is not self:
            return own.rollout(demand, split)
        devices, context, arch = split.rollout, self.context, self.task.architecture
        lenient, lent = self.forgiven != 0, split.trainer if self.context.borrows else 0
        refilled = demand.batch.over_provision > 1.0
        least, streams = self.least and not lenient and not refilled, MODES[split.mode].streams
        key = self._counted_key(demand, split)

        def made() -> RolloutColumns:
            counted = self._counted(demand, split)
            return rollout_columns(
                context, arch, demand, devices, counted, lenient=lenient, lent=lent, least=least, streams=streams
            )

        found = self.store.rollout.get((*key, devices, lenient, lent, least, streams), made)
        if refilled:
            # partial rollouts take the tail away: throughput is what is left, and the judge has the last word
            found = replace(found, makespan_s=np.minimum(found.makespan_s, found.steady_s))
        return found

    def simulated(self, source: SplitColumns, rows: IntArray) -> SplitColumns:
        """The columns of a split with the engines of ``rows`` simulated."""
        own, demand, split = self._in(source.split.mode), source.demand, source.split
        lent = split.trainer if own.context.borrows else 0
        counted = own._counted(demand, split)
        return replace(source, rollout=simulated(own.context, source.rollout, rows, counted, lent))

    def _counted(self, demand: Demand, split: Split) -> Counted:
        """What the columns of splits in one mode share."""
        store, key, alike = self.store, self._counted_key(demand, split), _served(demand)
        read, allowed = key[:2], self._allowed(demand, split)

        def own() -> Counted:
            # which requests share an engine_step depends neither on its cost nor on how far a mode runs ahead
            first = store.lengths.get(alike, lambda: Counted(demand))
            known = store.simulated.get(alike, SimulatedRollouts) if self.least else SimulatedRollouts()
            return replace(
                first, allowed=allowed, costs=store.tables.get(read, dict), simulated=known,
                priced=store.priced.get((*read, *alike), Priced), refuses=self._refuses,
            )  # fmt: skip

        return store.counted.get(key, own)

    @property
    def _refuses(self) -> Callable[[Layout], BoolArray] | None:
        """Engines that the framework starts in no mode, and that nobody needs to count."""
        if self.facts is None or self.forgiven:
            return None
        return partial(refused_engines, self.facts, self.task.architecture, self.context.engine_profile.engine)

    def _counted_key(self, demand: Demand, split: Split) -> Key:
        return self._read_by_rollout, demand.images, *_served(demand), self._allowed(demand, split)

    def _allowed(self, demand: Demand, split: Split) -> Allowed:
        """What a split's mode has under way."""
        ahead = MODES[split.mode].staleness(self.context.job.limits.staleness)
        return Allowed.of(self.context.trainers[0].framework, split.mode, ahead, demand)

    def trainer(self, demand: Demand, split: Split) -> TrainerColumns:
        """Trainer columns of a split; those of all splits that differ in devices alone are computed together."""
        arch, backends = self.task.architecture, tuple(each.keys for each in self.context.trainers)
        shared, per_node = MODES[split.mode].shares_devices, self.context.cluster.devices_per_node
        longer = takes_longer(self.facts, self.context.job)

        def refused(found: TrainerColumns) -> tuple[IntArray, IntArray]:
            return trainer_rule_flags(self.facts, found, backends, arch, demand.batch, per_node, longer=longer)

        def made() -> dict[tuple[int, int], TrainerColumns]:
            return trainer_columns_of(
                self.context, arch, demand, self._grid(demand, shared), lenient=self.forgiven != 0, refuse=refused,
                longer=longer,
            )  # fmt: skip

        return self.store.trainer.get(self._trainer_key(demand, shared), made)[split.trains]

    def trainer_left(self, source: SplitColumns) -> IntArray:
        """Trainer columns of a split that are left after pruning: the same for all modes with pools of their own."""
        split = source.split
        key = self._in(split.mode)._trainer_key(source.demand, MODES[split.mode].shares_devices)
        asked = (split.trains, self.forgiven, 0 in split.scorers, self.context.borrows)
        return self.store.fronts.get((*key, *asked), source.trainer_left)

    def _grid(self, demand: Demand, shared: bool) -> TrainerGrid:
        """Trainer layouts on every device count that a split asks for."""
        counts, longest = self._counts[shared], demand.batch.longest_tokens
        return self.store.grids.get(
            (self._read_by_trainer, longest, shared, counts),
            lambda: trainer_grid(self.context, self.task.architecture, longest, counts, shared),
        )

    def _trainer_key(self, demand: Demand, shared: bool) -> Key:
        lenient = self.forgiven != 0
        return (self._read_by_trainer, demand.keys, demand.images, demand.batch, shared, self._counts[shared], lenient)

    @cached_property
    def _counts(self) -> dict[bool, tuple[tuple[int, int], ...]]:
        """Devices of the trainer and of a critic's own in every split, by whether the pools share them."""
        found = splits(self.context)
        return {
            shared: tuple(dict.fromkeys(s.trains for s in found if MODES[s.mode].shares_devices == shared))
            for shared in (True, False)
        }

    @cached_property
    def _read_by_rollout(self) -> str:
        return _read_by("rollout", self.context.job, self.task, self.facts)

    @cached_property
    def _read_by_trainer(self) -> str:
        return _read_by("trainer", self.context.job, self.task, self.facts)


def _served(demand: Demand) -> Key:
    """What engines see of a demand."""
    batch = demand.batch
    return (demand.keys, demand.images, batch.generated, batch.group_size, batch.max_prompt_tokens,
            batch.max_response_tokens, batch.max_trajectories, batch.generation_batch)  # fmt: skip


def _read_by(role: Role, job: Job, task: TaskContext, facts: FrameworkFacts | None) -> str:
    """What the columns of a role read of a job, as text; devices, lengths and batch apart."""
    limits, of_role = job.limits, {pool.role: pool for pool in job.pools}
    pool = of_role[role].model_dump(mode="json", exclude={"devices"}) if role in of_role else None
    critic = job.pool("critic").model_dump(mode="json", exclude={"settings"}) if role == "trainer" else None
    rest = job.model_dump(mode="json", exclude=UNREAD_BY_ROLLOUT if role == "rollout" else UNREAD)
    clusters = [(each.cluster, each.nodes, each.devices if each.cluster else None) for each in job.pools]
    bounds = (limits.out_of_memory_risk, limits.host_memory)
    rules = facts and (facts.name, facts.version)
    return json.dumps([rest, pool, critic, clusters, bounds, task.task.architecture, rules], sort_keys=True)
