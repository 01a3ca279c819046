"""Configuration: one candidate in full, as a plan states it; and the single-row layouts that the costs read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from rlperf.cost.stage_ends import stage_ends
from rlperf.layout import Layout
from rlperf.plan.question.context import Context
from rlperf.plan.question.pool import BatchSettings, PoolPlan, ScorerPlan
from rlperf.plan.search.beaten_path import EXPERTS_SPREAD, SHARED_FRACTION, crowding, doublings
from rlperf.plan.search.rollout_columns import RolloutColumns, engine_settings
from rlperf.plan.search.trainer_columns import TrainerColumns
from rlperf.sim.rl_step.cuts import cut_by_budget
from rlperf.sim.rl_step.demand import Batch
from rlperf.specs.architecture import Architecture
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.pool import LayoutValues, Role


@dataclass(frozen=True)
class Configuration:
    """Mode, batch, the pools of every role, and the scorers beside them.

    ``layout_departures`` : how far off the beaten path the layouts of its engines and its trainer lie
    ``usual_fraction`` : share of memory for engines beside a waiting trainer from which on they leave it
    (both `rlperf.plan.search.beaten_path`)
    """

    mode: Mode
    staleness: int
    batch: Batch
    pools: tuple[PoolPlan, ...]
    scorers: tuple[ScorerPlan, ...] = ()
    layout_departures: tuple[int, int] = field(default=(0, 0), compare=False)
    usual_fraction: float = field(default=SHARED_FRACTION, compare=False)

    def pool(self, role: Role) -> PoolPlan:
        """The pool that serves ``role``."""
        return next(pool for pool in self.pools if pool.role == role)

    @property
    def devices(self) -> int:
        """Devices of all pools together."""
        rollout, trainer = self.pool("rollout").devices, self.pool("trainer").devices
        own = sum(scorer.own_devices for scorer in self.scorers) + sum(pool.own_devices for pool in self.pools)
        return own + (trainer if MODES[self.mode].shares_devices else rollout + trainer)

    @property
    def arrangement(self) -> tuple[object, ...]:
        """All but the batch: nothing has to be moved or restarted between two with the same."""
        return (self.mode, self.staleness, self.pools, self.scorers)

    @property
    def departures(self) -> tuple[int, int]:
        """How far off the beaten path its engines and its trainer lie."""
        engines, trainer = self.layout_departures
        if MODES[self.mode].shares_devices:
            engines += int(crowding(self.pool("rollout").settings.memory_fraction or 0.0, self.usual_fraction))
        return engines, trainer

    @property
    def off_path(self) -> tuple[int, tuple[int, int]]:
        """Departures from the beaten path, of engines and trainer together first: what is nearer to it is less."""
        return sum(self.departures), self.departures

    def checkpoint(self, facts: FrameworkFacts) -> tuple[object, ...]:
        """What its trainer's checkpoints are laid out by: one with the same goes on from them."""
        trainer, backend = self.pool("trainer"), self.pool("trainer").settings.backend or ""
        values = {**dict(trainer.layout), "devices": trainer.devices}
        return (backend, *(values[name] for name in facts.tied(backend)))

    @property
    def signature(self) -> tuple[object, ...]:
        """Mode, batch and layouts: what two candidates share that differ only in settings."""
        pools = tuple((pool.role, pool.devices, pool.settings.backend, pool.layout) for pool in self.pools)
        scorers = tuple((scorer.name, scorer.own_devices, scorer.layout) for scorer in self.scorers)
        return (self.mode, self.batch, pools, scorers)

    @property
    def variant(self) -> tuple[object, ...]:
        """What a job lists several of, and is judged as if it were stated, beside mode and trainer backend."""
        return (*self._engines, self.batch)

    @property
    def kind(self) -> tuple[object, ...]:
        """What closed forms are off by as a whole: mode, trainer backend, what engines are, who is waited for."""
        waits = self.batch.over_provision, self.batch.max_trajectories
        return (self.mode, self.pool("trainer").settings.backend, *self._engines, *waits)

    @property
    def alternative(self) -> tuple[object, ...]:
        """Its kind and its batch: what is judged as if it were stated where it is near."""
        return (*self.kind, self.batch)

    @property
    def _engines(self) -> tuple[object, ...]:
        """Precisions, caching, who reads, who borrows."""
        engine = self.pool("rollout").settings
        caches = engine.rollout_dtype, engine.kv_dtype, engine.prefix_caching
        return (*caches, engine.prefill_replicas, engine.borrows)

    @property
    def shares_memory(self) -> bool:
        """Whether engines stand beside the trainer's states: on shared devices, or on those that it lends."""
        return MODES[self.mode].shares_devices or bool(self.pool("rollout").settings.borrows)

    @property
    def doublings(self) -> tuple[float, float]:
        """How much there is to get wrong in the engines (devices of their own count) and in the trainer."""
        engines, trainer = (
            _doublings(pool.layout, bool(pool.settings.parked), spread)
            for pool, spread in ((self.pool("rollout"), 1), (self.pool("trainer"), EXPERTS_SPREAD))
        )
        return engines + (not MODES[self.mode].shares_devices), trainer

    def with_trainer(self, **settings: int | str | None) -> Configuration:
        """A copy whose trainer (and what shares its layout) has some settings replaced."""
        return self._having("settings", settings, engines=False)

    def keeping_activations(self) -> Configuration:
        """A copy whose trainer (and what shares its layout) recomputes nothing."""
        return self._having("layout", {"activation_recompute": "none"}, engines=False)

    def with_whole_stages(self) -> Configuration:
        """A copy whose trainer (and what shares its layout) runs every pipeline stage in one piece."""
        return self._having("layout", {"virtual_pipeline": 1}, engines=False)

    def with_rollout(self, **settings: float | str | None) -> Configuration:
        """A copy whose rollout pool has some settings replaced."""
        return self._having("settings", settings, engines=True)

    def _having(
        self, part: Literal["layout", "settings"], values: Mapping[str, float | str | None], *, engines: bool
    ) -> Configuration:
        pools = tuple(
            pool.model_copy(update={part: getattr(pool, part).model_copy(update=values)})
            if (pool.role == "rollout") is engines
            else pool
            for pool in self.pools
        )
        return replace(self, pools=pools)

    @property
    def settings(self) -> BatchSettings:
        """The batch as a plan states it."""
        b = self.batch
        return BatchSettings(
            prompts_per_step=b.prompts,
            group_size=b.group_size,
            mini_batch=b.mini_batch,
            max_prompt_tokens=b.max_prompt_tokens,
            max_response_tokens=b.max_response_tokens,
            over_provision=b.over_provision,
            max_trajectories=b.max_trajectories,
        )


def by_arrangement(configurations: Iterable[Configuration]) -> dict[tuple[object, ...], Configuration]:
    """One configuration of every arrangement: of several, which tasks have, the nearest to the beaten path."""
    found: dict[tuple[object, ...], Configuration] = {}
    for one in configurations:
        found[one.arrangement] = min(found.get(one.arrangement, one), one, key=lambda each: each.off_path)
    return found


@lru_cache(maxsize=4096)
def _doublings(layout: LayoutValues, parked: bool, spread: int) -> float:
    """Those of one pool: hundreds of candidates pair a few dozen."""
    return float(doublings(Layout.of_values(layout), np.array([parked]), spread)[0])


def rollout_pool(context: Context, rollout: RolloutColumns, r: int) -> PoolPlan:
    """The engines of column ``r`` in full."""
    layout = rollout.layout.take(r)
    return PoolPlan(
        role="rollout",
        devices=int(layout.devices),
        device=context.rollout_hardware.cluster.device,
        layout=layout.values(),
        settings=engine_settings(context, rollout, r),
    )


def trainer_pools(
    context: Context, architecture: Architecture, mode: Mode, trainer: TrainerColumns, t: int
) -> tuple[PoolPlan, ...]:
    """The trainer of column ``t`` in full, and the roles on its devices."""
    job, train, layout = context.job, context.job.pool("trainer").settings.filled(), trainer.layout.take(t)
    stages, chunks = int(layout.pipeline_parallel), int(layout.virtual_pipeline)
    ends = stage_ends(architecture.layers, stages, train.first_stage_layers, train.last_stage_layers, chunks)
    stack = context.trainers[int(trainer.backend[t])]
    by_budget = cut_by_budget(train.packing, stack.framework)
    budget = int(trainer.token_budget[t]) if by_budget else None
    settings = train.planned(
        "trainer",
        backend=stack.backend,
        token_budget=budget,
        scoring_token_budget=train.scoring_token_budget or (None if train.scoring_microbatch else budget),
        parked=bool(trainer.parked[t]) if MODES[mode].shares_devices else None,
        freeze_vision=train.freeze_vision if architecture.vision else None,
        first_stage_layers=ends[0],
        last_stage_layers=ends[1],
    )
    own = PoolPlan(
        role="trainer",
        devices=int(layout.devices),
        device=context.cluster.device,
        layout=layout.values(),
        settings=settings,
    )
    beside = [own.model_copy(update={"role": role}) for role in job.all_roles if role in ("reference", "critic")]
    if devices := int(trainer.critic[t]):
        apart = {"devices": devices, "placement": "own", "layout": layout.on(devices).values()}
        beside = [pool.model_copy(update=apart) if pool.role == "critic" else pool for pool in beside]
    return (own, *beside)
