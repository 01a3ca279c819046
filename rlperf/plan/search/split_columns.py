"""The step of a screen: columns of one split -> columns that are left -> feasible pairs -> seconds and objective.

Arrays in, arrays out. The planner's screen asks it for every pair of a split, a sweep for the pairs that its points ask
for; both hear the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rlperf.cost.memory_risk import ENGINE_SPREAD, PHASES, spread_at
from rlperf.cost.reject import Reject
from rlperf.layout import BoolArray, FloatArray, IntArray, taken
from rlperf.plan.question.context import Context
from rlperf.plan.question.objective import Usage, objective_of
from rlperf.plan.question.pool import PoolPlan
from rlperf.plan.search.beaten_path import ROLLOUT_OWN, TRAINER_OWN, OffPath, crowding, price, rollout_departures
from rlperf.plan.search.configuration import Configuration, rollout_pool, trainer_pools
from rlperf.plan.search.fronts import rollout_criteria, trainer_criteria, undominated
from rlperf.plan.search.rollout_columns import RolloutColumns, awake_limits, usual_fraction
from rlperf.plan.search.rules import EngineRules, pair_rule_flags
from rlperf.plan.search.scorer_columns import ScorerColumn
from rlperf.plan.search.splits import Split
from rlperf.plan.search.trainer_columns import TrainerColumns, departures_of, peak_limits
from rlperf.sim.remembered import Remembered
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.engine import short_cache
from rlperf.sim.rl_step.pairs import Pairs
from rlperf.sim.rl_step.scorers import Beside
from rlperf.sim.rl_step.stage_seconds import stage_seconds
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rl_step.uncertainty import log_sigma
from rlperf.specs.architecture import Architecture
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.modes import MODES


@dataclass(frozen=True, eq=False)
class ScreenedPairs:
    """Pairs of columns with what each fell to; every array has shape ``[pairs]``.

    Attributes
    ----------
    r, t : rollout and trainer column
    flags : `Reject`; 0: a candidate
    rl_step_s : seconds, infinite where memory or a rule refuses the pair [s]
    objective : value per rl_step, infinite there too
    price : what leaving the beaten path adds to it, infinite there too
    """

    r: IntArray
    t: IntArray
    flags: IntArray
    rl_step_s: FloatArray
    objective: FloatArray
    price: FloatArray

    def candidates(self) -> ScreenedPairs:
        """Those that nothing refuses."""
        return taken(self, np.flatnonzero(self.flags == 0))


@dataclass(frozen=True, eq=False)
class SplitColumns:
    """Columns of both pools under one split of the devices, for one demand.

    Attributes
    ----------
    facts : rules of the framework; None: none
    forgiven : `Reject` flags that a lenient screen lets pass
    scorers : of every scorer its engine; None where none holds it
    """

    context: Context
    architecture: Architecture
    facts: FrameworkFacts | None
    demand: Demand
    split: Split
    rollout: RolloutColumns
    trainer: TrainerColumns
    forgiven: int = 0
    scorers: tuple[ScorerColumn | None, ...] = ()

    @cached_property
    def beside(self) -> tuple[ScorerColumn, ...]:
        """The engines of the scorers."""
        return tuple(each for each in self.scorers if each is not None)

    @cached_property
    def rollout_flags(self) -> IntArray:
        """What each rollout column falls to `Reject` ``[rollout columns]``.

        Rules count here, before columns are held against each other: an engine that the framework does not start, in
        stages say, would stand for those that it does.
        """
        rules = self.engine_rules
        flags = self.rollout.flags if rules is None else self.rollout.flags | rules.flags()
        return flags & ~self.forgiven

    @cached_property
    def engine_rules(self) -> EngineRules | None:
        """What the framework asks of engines alone."""
        if self.facts is None:
            return None
        context, backends = self.context, tuple(each.keys for each in self.context.trainers)
        return EngineRules(
            self.facts, self.rollout, backends, self.architecture, self.demand.batch, context.job,
            context.engine_profile.engine, self.split.mode, context.cluster.devices_per_node,
        )  # fmt: skip

    @cached_property
    def trainer_flags(self) -> IntArray:
        """What each trainer column falls to `Reject` ``[trainer columns]``."""
        return self.trainer.flags & ~self.forgiven

    def apart(self, r_key: IntArray, t_key: IntArray) -> SplitColumns:
        """The same where each key is a question of its own: nothing off the beaten path is told by another's columns.

        What a point pins, its own columns all have; needless stages are those beyond the least among them.
        """
        engines, trainer = self.rollout, self.trainer
        flat, domain = engines.layout.flat(), self.context.rollout_hardware.cluster.scale_up_domain
        backends = len(self.context.trainers)
        group = (t_key + 1) * backends + trainer.backend
        off = departures_of(self.context, self.architecture, self.demand, trainer, group)
        short = short_cache(engines.kv_tokens, self.demand.request_tokens)
        engines_off = rollout_departures(flat, engines.flags == 0, domain, engines.weight_share, short, r_key)
        return replace(
            self,
            rollout=replace(engines, departures=engines_off),
            trainer=replace(trainer, departures=off),
        )

    @cached_property
    def possible(self) -> bool:
        """Whether each pool has a column that nothing refuses."""
        pools = bool((self.rollout_flags == 0).any() and (self.trainer_flags == 0).any())
        return pools and len(self.beside) == len(self.scorers)

    def rollout_left(self, key: IntArray | None = None, *, prune: bool = True) -> IntArray:
        """Rollout columns from which the best pairs are made, the fastest first, of equals the roomiest cache.

        Of equal pairs the first is kept. Where the trainer sets the pace, slower engines cost nothing by closed forms,
        and seconds once events find that they set it after all.

        Parameters
        ----------
        key : best pairs are asked for each key alone; -1: of no use ``[rollout columns]``; None: one for all
        prune : leave out what another column of the same key dominates
        """
        rollout, alive = self.rollout, _alive(self.rollout_flags, key)
        # closed forms leave preemptions out: of engines that they take for equal, the roomiest cache comes first
        alive = alive[np.lexsort((-rollout.kv_tokens[alive], rollout.makespan_s[alive]))]
        if not prune:
            return alive
        return undominated(alive, *rollout_criteria(rollout, alive, self.split.mode), key)

    def trainer_left(self, key: IntArray | None = None, *, prune: bool = True) -> IntArray:
        """Trainer columns from which the best pairs are made, the fastest first (arguments: `rollout_left`)."""
        alive = _alive(self.trainer_flags, key)
        alive = alive[np.argsort(self.trainer.busy_s[alive], kind="stable")]
        if not prune:
            return alive
        criteria = trainer_criteria(
            self.trainer, alive, self.split.mode, visited=0 in self.split.scorers, lends=self.context.borrows,
            scored_apart=self.facts is not None and self.facts.states_scoring,
        )  # fmt: skip
        return undominated(alive, *criteria, key)

    def screened(self, r: IntArray, t: IntArray) -> ScreenedPairs:
        """Pairs of columns that are left: what memory, rules and limits refuse, and what the others take.

        What is refused without its seconds is not costed.
        """
        flags = self._refused(r, t)
        seconds, objective = np.full(len(r), np.inf), np.full(len(r), np.inf)
        costed = np.flatnonzero(flags == 0)
        if len(costed):
            usage = self.split.usage(self.context)
            seconds[costed] = self.seconds(r[costed], t[costed]).rl_step_s
            objective[costed] = objective_of(self.context, self.demand, usage, seconds[costed])
            flags[costed] |= self._over_limits(usage, seconds[costed])
        price = np.full(len(r), np.inf)
        price[costed] = self._price(r[costed], t[costed], seconds[costed], objective[costed])
        return ScreenedPairs(r, t, flags, seconds, objective, price)

    def _price(self, r: IntArray, t: IntArray, seconds: FloatArray, objective: FloatArray) -> FloatArray:
        """What leaving the beaten path adds to the objective of pairs ``[pairs]``."""
        rollout, trainer, spread = self.rollout, self.trainer, self.context.rollout_hardware.calibration.spread
        shares = MODES[self.split.mode].shares_devices
        crowded = crowding(rollout.memory_fraction[r], usual_fraction(self.context)) if shares else 0
        engines = OffPath(
            rollout.makespan_s[r], log_sigma(spread.low, spread.high), ROLLOUT_OWN, rollout.departures[r] + crowded,
            rollout.doubled[r] + (not shares),
        )  # fmt: skip
        sigma = log_sigma(trainer.low[t], trainer.high[t])
        own = OffPath(trainer.busy_s[t], sigma, TRAINER_OWN, trainer.departures[t], trainer.doubled[t])
        return price(objective, seconds, (engines, own), bold=self.context.job.objective.bold)

    def seconds(self, r: IntArray, t: IntArray) -> StageSeconds:
        """Stages and rl_step of pairs of columns [s] ``[pairs]``."""
        staleness = MODES[self.split.mode].staleness(self.context.job.limits.staleness)
        return stage_seconds(
            self.context.site, self.architecture, self.demand, self.split.mode, staleness,
            Pairs(self.rollout, self.trainer, r, t),
            Beside.closed([each.stage for each in self.beside], self.rollout, r),
        )  # fmt: skip

    def configuration(self, r: int, t: int) -> Configuration:
        """One pair as a plan states it."""
        mode = self.split.mode
        engines = self._engines.get((r,), lambda: rollout_pool(self.context, self.rollout, r))
        trained = self._trained.get((t,), lambda: trainer_pools(self.context, self.architecture, mode, self.trainer, t))
        return Configuration(
            mode=mode,
            staleness=MODES[mode].staleness(self.context.job.limits.staleness),
            batch=self.demand.batch,
            pools=(engines, *trained),
            scorers=tuple(each.plan for each in self.beside),
            layout_departures=(int(self.rollout.departures[r]), int(self.trainer.departures[t])),
            usual_fraction=usual_fraction(self.context),
        )

    @cached_property
    def _engines(self) -> Remembered[PoolPlan]:
        """Rollout pools by column: one stands in many pairs."""
        return Remembered()

    @cached_property
    def _trained(self) -> Remembered[tuple[PoolPlan, ...]]:
        """Pools on the trainer's devices by column."""
        return Remembered()

    def _refused(self, r: IntArray, t: IntArray) -> IntArray:
        """`Reject` flags of memory and of the rules about both pools ``[pairs]``."""
        flags = np.zeros(len(r), dtype=np.int64)
        together = MODES[self.split.mode].shares_devices or self.context.borrows
        if together and not self.forgiven & Reject.MEMORY:
            flags |= np.where(self._fit_together(r, t), 0, int(Reject.MEMORY))
        shared = [each.awake_bytes for each in self.beside if not each.stage.own]
        if shared and not self.forgiven & Reject.MEMORY:
            flags |= np.where(self._fit_in_turn(r, t, max(shared)), 0, int(Reject.MEMORY))
        if self.engine_rules is not None and not self.forgiven & Reject.FRAMEWORK:
            flags |= pair_rule_flags(self.engine_rules, self.trainer, r, t, self.split)
        return flags

    def _fit_together(self, r: IntArray, t: IntArray) -> BoolArray:
        """Whether nothing is too much on shared or lent devices ``[pairs]``."""
        return np.asarray(np.maximum.reduce(self._too_much(r, t)) <= 0.0)

    def _too_much(self, r: IntArray, t: IntArray) -> list[FloatArray]:
        """Bytes per device beyond what is allowed, by phase ``[pairs]``; negative where there is room.

        The engine awake beside the idle trainer, and asleep beside the training one, where they are on the same
        devices; and where they share them, the engine's weights, which are certain, beside those that it is sent.
        """
        rollout, trainer, context = self.rollout, self.trainer, self.context
        shared, nothing = MODES[self.split.mode].shares_devices, np.zeros(len(r))
        together = shared or context.borrows
        idle = trainer.idle_bytes[t] if together else nothing
        asleep = rollout.asleep_bytes[r] if together else nothing
        over = [
            rollout.awake_bytes[r] + idle - awake_limits(context, rollout.unbound_bytes[r] + idle),
            asleep + trainer.peak_bytes[t] - peak_limits(context, trainer.backend[t]),
        ]
        if shared:
            syncing = trainer.syncing_bytes[t]
            over.append(rollout.waking_bytes[r] + syncing - awake_limits(context, asleep + syncing))
        return over

    def lacking(self, r: IntArray, t: IntArray) -> FloatArray:
        """Bytes per device that pairs lack, where a lenient screen lets memory pass; a cache too small lacks a device.

        Of what fits nowhere the nearest miss is told and predicted, and not what would be fastest on other devices.
        """
        if not self.forgiven & Reject.MEMORY:
            return np.zeros(len(r))
        small = (self.rollout.flags[r] & int(Reject.KV)) > 0
        missing = sum(np.maximum(each, 0.0) for each in self._too_much(r, t))
        missing = missing + small * self.context.hardware.device.usable_memory
        return np.asarray(missing)

    @cached_property
    def scorer_room(self) -> float:
        """Bytes per device that a scorer in turn may have where the least lies beside it."""
        r, t = np.flatnonzero(self.rollout_flags == 0), np.flatnonzero(self.trainer_flags == 0)
        asleep, idle = self.rollout.asleep_bytes[r], self.trainer.idle_bytes[t]
        return float(self._spare_in_turn(r[[asleep.argmin()]], t[[idle.argmin()]])[0])

    def _fit_in_turn(self, r: IntArray, t: IntArray, awake_bytes: float) -> BoolArray:
        """Scorers on the trainer's devices: awake beside the idle trainer, and the sleeping engine."""
        return np.asarray(awake_bytes <= self._spare_in_turn(r, t))

    def _spare_in_turn(self, r: IntArray, t: IntArray) -> FloatArray:
        """Bytes per device beside the idle trainer, and the sleeping engine where it shares the devices ``[pairs]``."""
        beside = self.trainer.idle_bytes[t]
        if MODES[self.split.mode].shares_devices:
            beside = beside + self.rollout.asleep_bytes[r]
        risk = self.context.job.limits.out_of_memory_risk / PHASES
        return np.asarray(self.context.hardware.device.usable_memory - beside * spread_at(risk, *ENGINE_SPREAD))

    def _over_limits(self, usage: Usage, rl_step_s: FloatArray) -> IntArray:
        """`Reject.LIMIT` where an rl_step takes longer or costs more than the job allows ``[pairs]``."""
        limits, over = self.context.job.limits, np.zeros(len(rl_step_s), dtype=np.bool_)
        if limits.step is not None:
            over |= rl_step_s > limits.step
        if limits.usd_per_step is not None:
            over |= rl_step_s * (usage.usd_per_s or 0.0) > limits.usd_per_step
        return np.where(over, int(Reject.LIMIT) & ~self.forgiven, 0)


def _alive(flags: IntArray, key: IntArray | None) -> IntArray:
    """Columns that nothing refuses and a key asks for."""
    return np.flatnonzero((flags == 0) if key is None else (flags == 0) & (key >= 0))


def truncates(context: Context, demand: Demand) -> bool:
    """Whether a batch cuts more responses than the job allows, whatever the layout."""
    most = context.job.limits.truncated_fraction
    return most is not None and demand.truncated_fraction > most
