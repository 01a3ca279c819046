"""Judge: one configuration with the event simulator and the real lengths, over the demand's rl_steps.

The screen's closed forms rank a million candidates; the judge has the last word on the few that are left, and it is
what `predict` shows. Every candidate sees the same rl_steps: differences between candidates are not noise of lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlperf.cost.batching import Microbatches, slowest_lengths
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.scoring import scoring_pass
from rlperf.cost.training import TrainingCost, training_update
from rlperf.layout import FloatArray, IntArray, Layout
from rlperf.plan.answer.plan import SettingsValues
from rlperf.plan.judge.configuration import Configuration, layout_of
from rlperf.plan.judge.stage_seconds import PairSeconds, pair_seconds
from rlperf.plan.judge.stages import StageEnds, layer_profile, staged, stated_ends
from rlperf.plan.question.context import Context, TaskContext, Trainer
from rlperf.plan.question.demand import Demand
from rlperf.plan.search.rollout_columns import (
    Flow,
    ReplicaMemory,
    RolloutColumns,
    Tabulated,
    engine_limits,
    interrupted_seconds,
    replica_memory,
    steady_seconds,
    tabulate,
)
from rlperf.plan.search.trainer_columns import TrainerColumns, scoring_passes, trainer_bytes, transition_seconds
from rlperf.sim.rl_step.overheads import (
    padded_microbatches,
    routing_skew,
    scoring_in_framework_s,
    training_in_framework_s,
)
from rlperf.sim.rl_step.stages import group_seconds
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.replica import PLAIN
from rlperf.sim.rollout.rollout import RolloutResult, simulate_rollout
from rlperf.sim.rollout.routing import route
from rlperf.sim.rollout.tail import GroupSource, PartialRollouts, Serve
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.job import PoolSettings, PoolSpec
from rlperf.specs.rl_calibration import FrameworkCalibration

POLICY_RL_STEPS, POLICY_WARM_UP = 5, 2
"""rl_steps simulated under partial rollouts, and how many of them fill the buffer first."""


SIMULATED_WHOLE, SIMULATED, FEWEST = 32_768, 8_192, 3
"""Trajectories of an rl_step up to which every replica is simulated, about how many of a larger one are, and the least
number of replicas."""


def telling_replicas(trajectories: Trajectories, replicas: int) -> IntArray:
    """Replicas that are simulated, in order: all, or of a large rl_step those that tell how long it takes.

    Many requests per replica make replicas alike; the makespan is that of the fullest or of the longest response. Half
    of those kept are the fullest, and the one with the longest response; the others stand evenly between fullest and
    emptiest, so that idle time is not that of the fullest alone.

    >>> telling_replicas(Trajectories.of(1, [5, 1, 2, 3]), 2).tolist()
    [0, 1]
    """
    n = len(trajectories)
    count = max(SIMULATED * replicas // n, FEWEST)
    if n <= SIMULATED_WHOLE or count >= replicas:
        return np.arange(replicas)
    chosen, tokens = route(trajectories, "round_robin", np.ones(replicas)), trajectories.generated_tokens
    fullest = np.argsort(-np.bincount(chosen, tokens, replicas), kind="stable")
    longest = chosen[int(np.argmax(tokens))]
    evenly = fullest[np.linspace(0, replicas - 1, count - count // 2 + 1).round().astype(np.int64)]
    wanted = [*fullest[: count // 2].tolist(), int(longest), *evenly[1:].tolist()]
    return np.array(sorted(set(wanted)), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What the judge found for one configuration.

    Attributes
    ----------
    seconds : stages and rl_step of every replicate [s] ``[replicates]``
    rollouts : the simulated rollouts, one per replicate
    rollout, trainer : the columns that were costed, one row per replicate
    training : breakdown of the optimizer updates of the first replicate
    scoring : breakdown of one scoring pass of the first replicate
    cost, memory : the engine's cost table, and its memory per device ``[1]``
    framework : behaviour and overheads of the framework with this trainer
    served : what the simulated replicas serve, one per replicate; a part of the rl_step where it is large
    options : how the engine schedules
    """

    configuration: Configuration
    demand: Demand
    seconds: PairSeconds
    rollouts: tuple[RolloutResult, ...]
    rollout: RolloutColumns
    trainer: TrainerColumns
    training: TrainingCost
    scoring: TrainingCost
    microbatches: Microbatches
    cost: EngineStepCost
    memory: ReplicaMemory
    framework: FrameworkCalibration
    served: tuple[Trajectories, ...] = ()
    options: EngineOptions = PLAIN

    @property
    def rl_step_s(self) -> float:
        """Seconds per rl_step, mean over the replicates."""
        return float(self.seconds.rl_step_s.mean())


@dataclass(eq=False)
class Judge:
    """Evaluates configurations of one task; remembers rollouts and partitions that candidates share."""

    context: Context
    task: TaskContext
    _rollouts: dict[tuple[object, ...], RolloutResult] = field(default_factory=dict)
    _batches: dict[tuple[object, ...], tuple[float, float, float, float]] = field(default_factory=dict)
    _slowest: dict[tuple[int, ...], FloatArray] = field(default_factory=dict)
    _costs: Tabulated = field(default_factory=dict)
    _parts: dict[tuple[int, int], tuple[Trajectories, IntArray | None]] = field(default_factory=dict)

    def evaluate(self, demand: Demand, configuration: Configuration) -> Evaluation:
        """Stages and rl_step of every replicate of ``demand``."""
        arch, count = self.task.architecture, len(demand.tables)
        rollout, results, memory = self._rollout(demand, configuration)
        served = tuple(
            self._served(demand, k, configuration.pool("rollout").layout.data_parallel)[0] for k in range(count)
        )
        trainer, training, scoring, batches = self._train(demand, configuration)
        rows = np.arange(count)
        seconds = pair_seconds(
            self.context, arch, demand, configuration.mode, configuration.staleness, rollout, trainer, rows, rows
        )
        framework = self.context.trainers[self._backend(configuration)].framework
        return Evaluation(
            configuration, demand, seconds, results, rollout, trainer, training, scoring, batches,
            rollout.costs[0], memory, framework, served, EngineOptions.of(self.context.engine),
        )  # fmt: skip

    def _rollout(
        self, demand: Demand, configuration: Configuration
    ) -> tuple[RolloutColumns, tuple[RolloutResult, ...], ReplicaMemory]:
        pool = configuration.pool("rollout")
        layout, settings = layout_of(pool.layout), pool.settings
        spec = PoolSpec(role="rollout", settings=PoolSettings.model_validate(settings.model_dump(exclude_none=True)))
        cost = tabulate(
            self.context,
            self.task.architecture,
            spec,
            layout,
            self._backend(configuration),
            known=self._costs,
            images=demand.images,
        )[0]
        fraction, running = np.array([settings.memory_fraction or 0.0]), np.array([settings.max_running or 1])
        memory = replica_memory(self.context, self.task.architecture, spec, layout, fraction, running)
        limits = engine_limits(spec, float(memory.kv_tokens[0]), int(running[0]))
        replicas = pool.layout.data_parallel
        options = EngineOptions.of(self.context.engine)
        # of precisions with equal bytes the limits are equal, but not what an engine_step takes
        precision = (spec.settings.weight_dtype, spec.settings.cache_dtype)
        results, engine_key = [], (*pool.layout.model_dump().items(), *precision)
        makespans = []

        def serve(trajectories: Trajectories, routing: IntArray | None = None) -> RolloutResult:
            return simulate_rollout(
                trajectories, replicas if routing is None else int(routing.max()) + 1, cost=cost, limits=limits,
                devices_per_replica=pool.devices // replicas, options=options,
                routing="round_robin" if routing is None else routing,
            )  # fmt: skip

        for index in range(len(demand.tables)):
            key = (id(demand.tables[index]), engine_key, limits, cost.host_s, cost.host_per_request_s)
            if key not in self._rollouts:
                self._rollouts[key] = serve(*self._served(demand, index, replicas))
            results.append(self._rollouts[key])
            makespans.append(self._policy_s(demand, index, serve, results[-1]))
        n = len(results)
        ones = np.ones(n)
        groups = [self._served(demand, index, replicas)[0].group for index in range(n)]
        steady = steady_seconds(cost, limits, replicas, demand)
        columns = RolloutColumns(
            layout=layout.take(np.zeros(n, dtype=np.int64)),
            engine=np.zeros(n, dtype=np.int64),
            memory_fraction=fraction[0] * ones,
            max_running=np.full(n, limits.max_running, dtype=np.int64),
            kv_tokens=memory.kv_tokens[0] * ones,
            makespan_s=np.array(makespans),
            steady_s=steady * ones,
            group_s=np.array([group_seconds(r.finish_s, g) for r, g in zip(results, groups, strict=True)]),
            recompute_s=interrupted_seconds(cost, limits, replicas, Flow.of(demand)) * ones,
            transition_s=2.0 * memory.weight_bytes[0] / self.context.rollout_hardware.device.host_bandwidth * ones,
            awake_bytes=memory.awake_bytes[0] * ones,
            asleep_bytes=memory.asleep_bytes[0] * ones,
            flags=np.zeros(n, dtype=np.int64),
            costs=(cost,),
            weight_dtype=spec.settings.weight_dtype,
        )
        return columns, tuple(results), memory

    def _served(self, demand: Demand, index: int, replicas: int) -> tuple[Trajectories, IntArray | None]:
        """What is simulated of one rl_step, and the replica of each trajectory where it is not all of them."""
        key = (id(demand.tables[index]), replicas)
        if key not in self._parts:
            whole = Trajectories.from_table(demand.tables[index])
            partial = demand.batch.over_provision > 1.0  # who is done first decides, so all have to run
            kept = np.arange(replicas) if partial else telling_replicas(whole, replicas)
            if len(kept) == replicas:
                self._parts[key] = (whole, None)
            else:
                chosen = route(whole, "round_robin", np.ones(replicas))
                some = np.flatnonzero(np.isin(chosen, kept))
                self._parts[key] = (whole.take(some), np.searchsorted(kept, chosen[some]))
        return self._parts[key]

    def _policy_s(self, demand: Demand, index: int, serve: Serve, result: RolloutResult) -> float:
        """Rollout seconds of an rl_step: the makespan; with partial rollouts the mean once the buffer has filled."""
        batch = demand.batch
        if batch.over_provision <= 1.0:
            return result.makespan_s
        source = GroupSource(Trajectories.from_table(demand.tables[index]), seed=self.context.job.seed + index)
        run = PartialRollouts(batch.over_provision).run(source, serve, batch.generated, POLICY_RL_STEPS)
        return float(np.mean([step.seconds for step in run.steps[POLICY_WARM_UP:]]))

    def _backend(self, configuration: Configuration) -> int:
        """Index of the trainer that a configuration names."""
        name = configuration.pool("trainer").settings.backend
        return next(i for i, each in enumerate(self.context.trainers) if each.backend == name)

    def _train(
        self, demand: Demand, configuration: Configuration
    ) -> tuple[TrainerColumns, TrainingCost, TrainingCost, Microbatches]:
        pool = configuration.pool("trainer")
        index = self._backend(configuration)
        trainer = self.context.trainers[index]
        layout, settings, arch = layout_of(pool.layout), pool.settings, self.task.architecture
        budget, scoring_budget = settings.token_budget, settings.scoring_token_budget or settings.token_budget
        count, updates = len(demand.tables), demand.batch.updates
        framework = trainer.framework
        per_update = padded_microbatches(framework, layout, self._microbatches(demand, layout, budget, updates), budget)
        whole = padded_microbatches(
            framework, layout, self._microbatches(demand, layout, scoring_budget, 1), scoring_budget
        )
        skew = routing_skew(framework, layout)
        training = self._update(trainer, demand, layout, per_update, configuration, skew)
        scoring = scoring_pass(
            arch, self.context.hardware, trainer.calibration, layout, whole,
            dtype=settings.compute_dtype or "bf16", skew=skew,
            images=demand.images_per_token * whole.tokens, patches=demand.patches(arch),
        )  # fmt: skip
        update_s = training_in_framework_s(framework, arch, layout, per_update, training.total_s)
        pass_s = scoring_in_framework_s(framework, arch, layout, whole, scoring.total_s)
        critics = 2.0 if "critic" in self.context.job.all_roles else 1.0
        passes = scoring_passes(self.context, trainer, updates)
        train_s = update_s.reshape(count, updates).sum(axis=1) * critics
        if settings.first_stage_layers and int(layout.pipeline_parallel[0]) > 1:
            train_s = train_s * self._stages(trainer, layout, per_update, settings, demand).factor
        memory = trainer_bytes(self.context, trainer, arch, demand, layout, settings)
        rows = np.zeros(count, dtype=np.int64)
        ones = np.ones(count)
        columns = TrainerColumns(
            backend=np.full(count, index, dtype=np.int64),
            layout=layout.take(rows),
            token_budget=np.full(count, budget or 0, dtype=np.int64),
            parked=np.full(count, int(bool(settings.parked)), dtype=np.int64),
            training_s=train_s,
            scoring_s=np.broadcast_to(pass_s, (count,)) * passes,
            transition_s=transition_seconds(self.context, memory) * ones,
            peak_bytes=memory.peak * ones,
            idle_bytes=memory.idle * ones,
            host_bytes=memory.host * ones,
            low=training.low.reshape(count, updates)[:, 0],
            high=training.high.reshape(count, updates)[:, 0],
            flags=np.zeros(count, dtype=np.int64),
        )
        return columns, training, scoring, per_update

    def _stages(
        self, trainer: Trainer, layout: Layout, batches: Microbatches, settings: SettingsValues, demand: Demand
    ) -> StageEnds:
        """The pipeline with the stages that the configuration states, against the cost model's own."""
        profile = layer_profile(
            self.task.architecture,
            self.context,
            trainer,
            layout,
            batches,
            demand,
            freeze_vision=bool(settings.freeze_vision),
        )
        stages, count = int(layout.pipeline_parallel[0]), int(np.ravel(batches.count)[0])
        return stated_ends(profile, self.task.architecture.layers, stages, count, settings)

    def staged(self, evaluation: Evaluation) -> Configuration | None:
        """The same configuration with its best first and last pipeline stage stated, where that is worth it."""
        made = evaluation.configuration, evaluation.microbatches, evaluation.demand
        return staged(self.context, self.task.architecture, *made)

    def _update(
        self, trainer: Trainer, demand: Demand, layout: Layout, batches: Microbatches,
        configuration: Configuration, skew: FloatArray,
    ) -> TrainingCost:  # fmt: skip
        settings, arch = configuration.pool("trainer").settings, self.task.architecture
        return training_update(
            arch, self.context.hardware, trainer.calibration, layout, batches,
            dtype=settings.compute_dtype or "bf16", lora_rank=settings.lora_rank,
            chunked_loss=bool(settings.chunked_loss), skew=skew, vision_frozen=bool(settings.freeze_vision),
            images=demand.images_per_token * batches.tokens, patches=demand.patches(arch),
        )  # fmt: skip

    def _microbatches(self, demand: Demand, layout: Layout, budget: int | None, updates: int) -> Microbatches:
        """Microbatches of every update of every replicate, from the real lengths ``[replicates x updates]``."""
        rows: list[tuple[float, float, float, float]] = []
        one = layout.take(0)
        alone, replicas = one.with_(data_parallel=1), int(one.data_parallel)
        for k in range(len(demand.tables)):
            for u, part in enumerate(np.array_split(demand.lengths(k), updates)):
                update = (id(demand.tables[k]), demand.batch.sequences, u, updates, replicas)
                key = (*update, budget, int(one.microbatch))
                if key not in self._batches:
                    # which replica is the slowest does not depend on the budget: partitioned once for all of them
                    if update not in self._slowest:
                        self._slowest[update] = slowest_lengths(part, replicas)
                    floor = None if budget is None else max(float(budget), float(part.max()))
                    made = Microbatches.from_lengths(alone, self._slowest[update], token_budget=floor)
                    self._batches[key] = (
                        float(made.tokens), float(made.sum_squares), float(made.max_len), float(made.count)
                    )  # fmt: skip
                rows.append(self._batches[key])
        columns: FloatArray = np.array(rows).T
        return Microbatches.of(*columns)
