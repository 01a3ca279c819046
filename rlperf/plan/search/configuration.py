"""Configuration: one candidate in full, as a plan states it; and the single-row layouts that the costs read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlperf.plan.question.context import Context
from rlperf.plan.question.pool import BatchSettings, PoolPlan
from rlperf.plan.search.rollout_columns import RolloutColumns
from rlperf.plan.search.stage_ends import stage_ends
from rlperf.plan.search.trainer_columns import TrainerColumns
from rlperf.sim.rl_step.demand import Batch
from rlperf.specs.architecture import Architecture
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.pool import ATTRIBUTES, Role


@dataclass(frozen=True)
class Configuration:
    """Mode, batch and the pools of every role."""

    mode: Mode
    staleness: int
    batch: Batch
    pools: tuple[PoolPlan, ...]

    def pool(self, role: Role) -> PoolPlan:
        """The pool that serves ``role``."""
        return next(pool for pool in self.pools if pool.role == role)

    @property
    def devices(self) -> int:
        """Devices of all pools together."""
        rollout, trainer = self.pool("rollout").devices, self.pool("trainer").devices
        return trainer if MODES[self.mode].shares_devices else rollout + trainer

    @property
    def signature(self) -> tuple[object, ...]:
        """Mode, batch and layouts: what two candidates share that differ only in settings."""
        pools = tuple((pool.role, pool.devices, pool.settings.backend, pool.layout) for pool in self.pools)
        return (self.mode, self.batch, pools)

    @property
    def complexity(self) -> float:
        """How much there is to get wrong: doublings of every degree but data parallel, and switches turned on.

        An optimizer on the host is another optimizer: it weighs as much as a degree of 16.
        """
        total = 0.0
        for pool in (self.pool("rollout"), self.pool("trainer")):
            degrees = (getattr(pool.layout, each.name) for each in ATTRIBUTES if each.degree)
            total += sum(math.log2(n) for n in degrees if n > 1)
            total += 4 * (pool.layout.offload != "none") + bool(pool.settings.parked) + (pool.layout.shard_size > 0)
        return total + (not MODES[self.mode].shares_devices)

    def with_trainer(self, **settings: int) -> Configuration:
        """A copy whose trainer (and what shares its layout) has some settings replaced."""
        pools = tuple(
            pool
            if pool.role == "rollout"
            else pool.model_copy(update={"settings": pool.settings.model_copy(update=settings)})
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
        )


def configuration_of(
    context: Context,
    architecture: Architecture,
    batch: Batch,
    mode: Mode,
    rollout: RolloutColumns,
    r: int,
    trainer: TrainerColumns,
    t: int,
) -> Configuration:
    """The pair ``(r, t)`` of columns in full."""
    job, device = context.job, context.cluster.device
    engine, train = job.pool("rollout").settings.filled(), job.pool("trainer").settings.filled()
    backend = context.trainers[int(trainer.backend[t])].backend
    r_layout, t_layout = rollout.layout.take(r), trainer.layout.take(t)
    rollout_pool = PoolPlan(
        role="rollout",
        devices=int(r_layout.devices),
        device=context.rollout_hardware.cluster.device,
        layout=r_layout.values(),
        settings=engine.planned(
            "rollout",
            backend=engine.backend or job.engine,
            max_running=int(rollout.max_running[r]),
            memory_fraction=float(rollout.memory_fraction[r]),
            cuda_graphs=engine.cuda_graphs is not False,
        ),
    )
    stages = int(t_layout.pipeline_parallel)
    ends = stage_ends(architecture.layers, stages, train.first_stage_layers, train.last_stage_layers)
    trainer_settings = train.planned(
        "trainer",
        backend=backend,
        token_budget=int(trainer.token_budget[t]),
        scoring_token_budget=train.scoring_token_budget or int(trainer.token_budget[t]),
        parked=bool(trainer.parked[t]) if MODES[mode].shares_devices else None,
        freeze_vision=train.freeze_vision if architecture.vision else None,
        first_stage_layers=ends[0],
        last_stage_layers=ends[1],
    )
    roles: list[Role] = ["trainer", *(role for role in job.all_roles if role in ("reference", "critic"))]
    trained = [
        PoolPlan(
            role=role,
            devices=int(t_layout.devices),
            device=device,
            layout=t_layout.values(),
            settings=trainer_settings,
        )
        for role in roles
    ]
    staleness = MODES[mode].staleness(job.limits.staleness)
    return Configuration(mode, staleness, batch, (rollout_pool, *trained))
