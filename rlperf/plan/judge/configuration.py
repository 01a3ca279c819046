"""Configuration: one candidate in full, as a plan states it; and the single-row layouts that the costs read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rlperf.layout import OFFLOAD, RECOMPUTE, Layout
from rlperf.plan.answer.plan import BatchSettings, LayoutValues, PoolPlan, SettingsValues
from rlperf.plan.question.context import Context
from rlperf.plan.search.candidates import uneven_ends
from rlperf.plan.search.rollout_columns import RolloutColumns
from rlperf.plan.search.trainer_columns import TrainerColumns
from rlperf.sim.rl_step.demand import Batch
from rlperf.sim.rl_step.engine import TOKEN_BUDGET, EngineSettings
from rlperf.sim.rl_step.trainer_stage import TrainerSettings
from rlperf.specs.architecture import Architecture
from rlperf.specs.job import PoolSettings, Role
from rlperf.specs.modes import MODES, Mode


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
            numbers = pool.layout.model_dump(exclude={"data_parallel", "microbatch", "zero_stage", "sequence_parallel"})
            total += sum(math.log2(n) for n in numbers.values() if isinstance(n, int) and n > 1)
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


def layout_values(layout: Layout) -> LayoutValues:
    """A scalar layout as a plan states it."""
    numbers = layout.to_dict()
    return LayoutValues.model_validate(
        {
            **numbers,
            "sequence_parallel": bool(numbers["sequence_parallel"]),
            "activation_recompute": RECOMPUTE[numbers["activation_recompute"]],
            "offload": OFFLOAD[numbers["offload"]],
        }
    )


def layout_of(values: LayoutValues) -> Layout:
    """The other way round: one flat row, as arrays of length 1.

    >>> layout_of(LayoutValues(tensor_parallel=4, activation_recompute="full")).activation_recompute.tolist()
    [2]
    """
    numbers = values.model_dump()
    numbers["activation_recompute"] = RECOMPUTE.index(values.activation_recompute)
    numbers["offload"] = OFFLOAD.index(values.offload)
    return Layout.of(**{name: [int(value)] for name, value in numbers.items()})


def engine_settings(values: SettingsValues) -> EngineSettings:
    """What the engine's cost reads of a plan's settings."""
    return EngineSettings(
        weight_dtype=values.rollout_dtype or "bf16",
        cache_dtype=values.kv_dtype or "bf16",
        prefix_caching=values.prefix_caching is not False,
        chunked_prefill=values.chunked_prefill is not False,
        token_budget=values.engine_token_budget or TOKEN_BUDGET,
        cuda_graphs=values.cuda_graphs,
    )


def trainer_settings(values: SettingsValues) -> TrainerSettings:
    """What the trainer's cost reads of a plan's settings."""
    return TrainerSettings(
        dtype=values.compute_dtype or "bf16",
        lora_rank=values.lora_rank,
        chunked_loss=bool(values.chunked_loss),
        freeze_vision=bool(values.freeze_vision),
        packing=values.packing is not False,
        scoring_token_budget=values.scoring_token_budget,
        scoring_microbatch=values.scoring_microbatch,
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
    engine, train = job.pool("rollout").settings, job.pool("trainer").settings
    backend = context.trainers[int(trainer.backend[t])].backend
    r_layout, t_layout = rollout.layout.take(r), trainer.layout.take(t)
    rollout_pool = PoolPlan(
        role="rollout",
        devices=int(r_layout.devices),
        device=context.rollout_hardware.cluster.device,
        layout=layout_values(r_layout),
        settings=SettingsValues(
            backend=engine.backend or job.engine,
            max_running=int(rollout.max_running[r]),
            memory_fraction=float(rollout.memory_fraction[r]),
            kv_dtype=engine.cache_dtype,
            rollout_dtype=engine.weight_dtype,
            prefix_caching=engine.caches_prefixes,
            chunked_prefill=engine.chunked_prefill is not False,
            engine_token_budget=engine.engine_token_budget or TOKEN_BUDGET,
            cuda_graphs=engine.cuda_graphs is not False,
        ),
    )
    trainer_settings = SettingsValues(
        backend=backend,
        token_budget=int(trainer.token_budget[t]),
        scoring_token_budget=train.scoring_token_budget or int(trainer.token_budget[t]),
        scoring_microbatch=train.scoring_microbatch,
        compute_dtype=train.compute_dtype or "bf16",
        packing=train.packing is not False,
        lora_rank=train.lora_rank,
        parked=bool(trainer.parked[t]) if MODES[mode].shares_devices else None,
        chunked_loss=bool(train.chunked_loss),
        freeze_vision=bool(train.freeze_vision) if architecture.vision else None,
        **_stage_ends(train, architecture.layers, int(t_layout.pipeline_parallel)),
    )
    roles: list[Role] = ["trainer", *(role for role in job.all_roles if role in ("reference", "critic"))]
    trained = [
        PoolPlan(
            role=role,
            devices=int(t_layout.devices),
            device=device,
            layout=layout_values(t_layout),
            settings=trainer_settings,
        )
        for role in roles
    ]
    staleness = MODES[mode].staleness(job.limits.staleness)
    return Configuration(mode, staleness, batch, (rollout_pool, *trained))


def _stage_ends(settings: PoolSettings, layers: int, pipeline: int) -> dict[str, int | None]:
    """Layers of the first and last stage: as stated, or where the layers do not divide; nothing where they do.

    Where one end is stated, the other holds as many as the stages between.
    """
    first, last = settings.first_stage_layers, settings.last_stage_layers
    if (first is None) != (last is None) and pipeline > 1:
        other = (layers - (first or last or 0)) // (pipeline - 1)
        first, last = first or other, last or other
    if first is None and last is None and pipeline > 1 and layers % pipeline:
        ends = uneven_ends(layers, np.asarray(pipeline))
        first, last = int(ends[0]), int(ends[1])
    return {"first_stage_layers": first, "last_stage_layers": last}
