"""Judge: one configuration with the event simulator and the real lengths, over the demand's rl_steps.

The screen's closed forms rank a million candidates; the judge has the last word on the few that are left, and it is
what `predict` shows. Every candidate sees the same rl_steps: differences between candidates are not noise of lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from rlperf.cost.batching import Microbatches
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.trainer.update import TrainingCost
from rlperf.errors import Problem, SpecError
from rlperf.layout import FloatArray, Layout
from rlperf.plan.judge.stages import StageEnds, better_ends, layer_profile, stated_ends
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.question.pool import PoolPlan
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.scorer_columns import ScorerWork, serving, stage_of
from rlperf.plan.search.trainer_columns import peak_limit
from rlperf.sim.remembered import Remembered
from rlperf.sim.rl_step.cuts import CutLengths, cut_by_budget
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.engine import (
    ReplicaMemory,
    Tabulated,
    apart_of,
    cache_granted,
    engine_limits,
    replica_memory,
    tabulate,
)
from rlperf.sim.rl_step.flow import Allowed, fewest
from rlperf.sim.rl_step.pairs import Pairs
from rlperf.sim.rl_step.rollout_stage import Replicas, RolloutEvents, RolloutStage, simulated_rollout
from rlperf.sim.rl_step.scorers import Beside, ScorerEvents, ScorerStage
from rlperf.sim.rl_step.site import Site, TrainerStack
from rlperf.sim.rl_step.stage_seconds import stage_seconds
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rl_step.trainer_bytes import TrainerBytes, trainer_bytes, transition_seconds
from rlperf.sim.rl_step.trainer_stage import (
    ScoringWork,
    TrainerStage,
    UpdateWork,
    simulated_scoring,
    simulated_training,
)
from rlperf.sim.rl_step.uncertainty import StageSigmas, drafted_sigma, interval, stage_sigmas, unmeasured_sigma
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.rollout import RolloutResult
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.pool import SettingsValues
from rlperf.specs.rl_calibration import FrameworkCalibration
from rlperf.specs.speculation import DraftSetting


@dataclass(frozen=True, eq=False)
class Holding:
    """What one configuration holds in memory: names as in `Evaluation`, but nothing is simulated for it."""

    configuration: Configuration
    demand: Demand
    backend: int
    memory: ReplicaMemory
    held: TrainerBytes
    critic_held: TrainerBytes | None


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What the judge found for one configuration.

    Attributes
    ----------
    seconds : stages and rl_step of every replicate [s] ``[replicates]``
    rollouts : the simulated rollouts, one per replicate
    rollout, trainer : their stages ``[replicates]``
    updated, scored : one optimizer update and one scoring pass, by part
    replicas : the engine's cost table, limits and number
    memory, held : bytes per device of the engine and of the trainer ``[1]``
    critic_held : of a critic on devices of its own; None where it has none
    stack : the trainer's backend, and the framework with it
    low_s, high_s : 5th and 95th percentile of an rl_step [s]
    unlike : standard deviation added for what is unlike all that was measured (`unmeasured_sigma`) [1]
    sigmas : spread of the calibrations behind each stage
    served : what the simulated replicas serve, one per replicate; a part of the rl_step where it is large
    scorers, exposed_s : their stages, and how long every rl_step waits for each, in the order of the configuration's
    beside : what they add to every rl_step; None where nobody scores
    """

    configuration: Configuration
    demand: Demand
    seconds: StageSeconds
    rollouts: tuple[RolloutResult, ...]
    rollout: RolloutStage
    trainer: TrainerStage
    updated: UpdateWork
    scored: ScoringWork
    replicas: Replicas
    memory: ReplicaMemory
    held: TrainerBytes
    stack: TrainerStack
    low_s: float
    high_s: float
    unlike: float
    sigmas: StageSigmas
    served: tuple[Trajectories, ...]
    scorers: tuple[ScorerStage, ...] = ()
    exposed_s: tuple[FloatArray, ...] = ()
    beside: Beside | None = None
    critic_held: TrainerBytes | None = None

    @property
    def backend(self) -> int:
        """Index of the trainer among the job's."""
        return int(self.trainer.backend[0])

    @property
    def rl_step_s(self) -> float:
        """Seconds per rl_step, mean over the replicates."""
        return float(self.seconds.rl_step_s.mean())

    @property
    def framework(self) -> FrameworkCalibration:
        """Behaviour and overheads of the framework with this trainer."""
        return self.stack.framework

    @property
    def cost(self) -> EngineStepCost:
        """What the engine's steps cost in the framework."""
        return self.replicas.cost

    @property
    def training(self) -> TrainingCost:
        """Breakdown of the optimizer updates ``[replicates x updates]``."""
        return self.updated.cost

    @property
    def microbatches(self) -> Microbatches:
        """Of the optimizer updates ``[replicates x updates]``."""
        return self.updated.batches


_SCORING = {"scoring_token_budget": None, "scoring_microbatch": None}
"""What trainers may differ in whose updates are the same."""
_STAGES = {"first_stage_layers": None, "last_stage_layers": None}
"""What costs read of means over stages do not depend on."""


@dataclass(eq=False)
class Judge:
    """Evaluates configurations of one task; remembers rollouts and all of a trainer that candidates share."""

    context: Context
    task: TaskContext
    _events: RolloutEvents = field(default_factory=RolloutEvents)
    _lengths: CutLengths = field(default_factory=CutLengths)
    _costs: Tabulated = field(default_factory=dict)
    _scorers: ScorerEvents = field(default_factory=ScorerEvents)
    _rolled: Remembered[tuple[ReplicaMemory, Replicas, RolloutStage, tuple[RolloutResult, ...]]] = field(
        default_factory=Remembered
    )
    _updated: Remembered[tuple[FloatArray, UpdateWork]] = field(default_factory=Remembered)
    _scored: Remembered[tuple[FloatArray, ScoringWork]] = field(default_factory=Remembered)
    _held: Remembered[TrainerBytes] = field(default_factory=Remembered)
    _stated: Remembered[StageEnds] = field(default_factory=Remembered)
    _better: Remembered[StageEnds | None] = field(default_factory=Remembered)

    def __post_init__(self) -> None:
        self._events.seed = self.context.job.seed

    def evaluate(self, demand: Demand, configuration: Configuration) -> Evaluation:
        """Stages and rl_step of every replicate of ``demand``."""
        site, index = site_of(self.context, configuration), self._backend(configuration)
        memory, replicas, rollout, results = self._rolled_out(demand, configuration, index)
        trainer, updated, scored, held, critic_held = self._train(demand, configuration, index)
        rows = np.arange(len(demand.tables))
        pairs = Pairs(rollout, trainer, rows, rows)
        scorers, exposed = self._beside(demand, configuration, results, rollout)
        beside = Beside.of(scorers, exposed) if scorers else None
        seconds = stage_seconds(
            site, self.task.architecture, demand, configuration.mode, configuration.staleness, pairs, beside
        )
        stack, served = site.trainers[index], self._events.served(demand, replicas)
        unlike = float(
            unmeasured_sigma(site, stack, self.task.architecture, rollout.weight_dtype, seconds, trainer.layout).mean()
        )
        unlike = float(np.hypot(unlike, drafted_sigma(replicas.cost, seconds)))
        low, high = interval(float(seconds.rl_step_s.mean()), seconds.rl_step_s, stack.framework, extra=unlike)
        return Evaluation(
            configuration, demand, seconds, results, rollout, trainer, updated, scored, replicas, memory, held,
            stack, low, high, unlike, stage_sigmas(site, trainer, configuration.mode), served,
            scorers, exposed, beside, critic_held,
        )  # fmt: skip

    def holds(self, demand: Demand, configuration: Configuration) -> Holding:
        """Memory of a configuration, where nobody asks for its seconds."""
        index = self._backend(configuration)
        held, *critic = [self._bytes(demand, pool, index, one) for pool, one in self._pools(configuration)]
        memory, _ = self._replicas(demand, configuration, index)
        return Holding(configuration, demand, index, memory, held, critic[0] if critic else None)

    def _beside(
        self, demand: Demand, configuration: Configuration, results: tuple[RolloutResult, ...],
        rollout: RolloutStage,
    ) -> tuple[tuple[ScorerStage, ...], tuple[FloatArray, ...]]:  # fmt: skip
        """Teachers, reward models and judges: their stages, and how long every rl_step waits for each."""
        stages, exposed = [], []
        for plan in configuration.scorers:
            one = next(each for each in self.context.scorers if each.scorer.name == plan.name)
            asked = ScorerWork.of(demand, one.scorer)
            replicas, memory = serving(self.context, one, self.task, asked.counted.demand, plan)
            whole = float(np.mean([r.makespan_s for r in self._events.results(asked.counted.demand, replicas)]))
            stage = stage_of(self.context, one.scorer, asked, plan, replicas, whole, memory)
            key = (plan.name, replicas.key)
            stages.append(stage)
            exposed.append(self._scorers.exposed_s(demand, one.scorer, stage, key, replicas.serve, results, rollout))
        return tuple(stages), tuple(exposed)

    def _rolled_out(
        self, demand: Demand, configuration: Configuration, backend: int
    ) -> tuple[ReplicaMemory, Replicas, RolloutStage, tuple[RolloutResult, ...]]:
        """The engine of a configuration, its stage in every replicate and the simulated rollouts behind it.

        All that is read of the trainer are its devices, which engines may borrow, and what its backend runs.
        """
        pool, lends = configuration.pool("rollout"), configuration.pool("trainer").devices

        def made() -> tuple[ReplicaMemory, Replicas, RolloutStage, tuple[RolloutResult, ...]]:
            memory, replicas = self._replicas(demand, configuration, backend)
            host_bandwidth = self.context.rollout_hardware.device.host_bandwidth
            leaving, dtype = 2.0 * float(memory.weight_bytes[0]) / host_bandwidth, pool.settings.filled().rollout_dtype
            layout, allowed = Layout.of_values(pool.layout), self._allowed(demand, configuration)
            rolled = simulated_rollout(self._events, demand, replicas, layout, leaving, dtype, allowed)
            return memory, replicas, *rolled

        return self._rolled.get((demand, pool, backend, configuration.mode, configuration.staleness, lends), made)

    def _replicas(self, demand: Demand, configuration: Configuration, backend: int) -> tuple[ReplicaMemory, Replicas]:
        """The engine of a configuration."""
        pool, site, arch = configuration.pool("rollout"), self.context.site, self.task.architecture
        layout, settings = Layout.of_values(pool.layout), pool.settings.filled()
        read = demand.read_tokens(settings.prefix_caching)
        cost = tabulate(site, arch, settings, layout, backend, self._costs, demand.images, read)[0]
        fraction = np.array([pool.settings.memory_fraction or 0.0])
        running = np.array([pool.settings.max_running or 1])
        memory = replica_memory(site, arch, settings, layout, fraction, running, demand)
        held = float(cache_granted(memory.kv_tokens, demand.request_tokens)[0])
        count, apart = pool.layout.data_parallel, apart_of(site, arch, settings, layout)[0]
        writers = max(count - settings.prefill_replicas, 1)
        most = fewest(demand.batch.under_way(writers), self._allowed(demand, configuration).requests)
        limits = engine_limits(settings, held, min(int(running[0]), most or int(running[0])))
        options = replace(EngineOptions.of(self.context.engine), trajectories=most)
        each = pool.devices // count
        lent = configuration.pool("trainer").devices // each if settings.borrows else 0
        return memory, Replicas(cost, limits, count, each, options, apart, lent)

    def _allowed(self, demand: Demand, configuration: Configuration) -> Allowed:
        """What its mode has under way at once."""
        framework = self.context.trainers[0].framework
        return Allowed.of(framework, configuration.mode, configuration.staleness, demand)

    def _backend(self, configuration: Configuration) -> int:
        """Index of the trainer that a configuration names."""
        name = configuration.pool("trainer").settings.backend
        known = [each.backend for each in self.context.trainers]
        if name not in known:
            wrong = f"the trainer is {name}, which the job does not have: {', '.join(known)}"
            raise SpecError(Problem(wrong, suggestion="see backend of the pool trainer"))
        return known.index(name)

    def _train(
        self, demand: Demand, configuration: Configuration, index: int
    ) -> tuple[TrainerStage, UpdateWork, ScoringWork, TrainerBytes, TrainerBytes | None]:
        """The trainer's stage in every replicate, an update by part, and its memory; a critic's on its own devices."""
        pool, site = configuration.pool("trainer"), site_of(self.context, configuration)
        training, updated = self._training(demand, pool, index, site)
        scoring, scored = self._scoring(demand, pool, index, site)
        held = self._bytes(demand, pool, index, site)
        count, updates = len(demand.tables), demand.batch.updates
        critic, values, critic_held, apart = np.zeros(count), np.zeros(count), None, 0
        if site.critic_apart:
            theirs = configuration.pool("critic")
            critic, _ = self._training(demand, theirs, index, site.critic)
            values, _ = self._scoring(demand, theirs, index, site.critic)
            critic_held, apart = self._bytes(demand, theirs, index, site.critic), theirs.devices
        rows, layout = np.zeros(count, dtype=np.int64), Layout.of_values(pool.layout)
        stage = TrainerStage(
            backend=np.full(count, index, dtype=np.int64),
            layout=layout.take(rows),
            parked=rows + int(bool(pool.settings.parked)),
            training_s=training,
            scoring_s=scoring,
            critic=rows + apart,
            critic_s=critic,
            values_s=values,
            transition_s=transition_seconds(site, held)[rows],
            low=updated.cost.low.reshape(count, updates)[:, 0],
            high=updated.cost.high.reshape(count, updates)[:, 0],
        )
        return stage, updated, scored, held, critic_held

    def _training(self, demand: Demand, pool: PoolPlan, index: int, site: Site) -> tuple[FloatArray, UpdateWork]:
        """Updates of one pool in every replicate [s], and one by part; however it scores, they are the same."""
        stack, layout, arch = site.trainers[index], Layout.of_values(pool.layout), self.task.architecture
        settings = pool.settings.filled()
        if pool.settings.token_budget is None and cut_by_budget(settings.packing, stack.framework):
            missing = Problem("the trainer's token_budget is missing", suggestion="it packs its sequences: state one")
            raise SpecError(missing)
        where = demand, site.roles, site.trained_draft, index, pool.layout
        training, updated = self._updated.get(
            (*where, pool.settings.model_copy(update=_SCORING | _STAGES)),
            lambda: simulated_training(
                site, stack, arch, demand, layout, settings, pool.settings.token_budget, self._lengths
            ),
        )
        if pool.settings.first_stage_layers and pool.layout.pipeline_parallel > 1:
            ends = self._stated.get(
                (*where, pool.settings.model_copy(update=_SCORING)),
                lambda: self._stages(stack, layout, updated.batches, pool.settings, demand),
            )
            training = training * ends.factor
        return training, updated

    def _scoring(self, demand: Demand, pool: PoolPlan, index: int, site: Site) -> tuple[FloatArray, ScoringWork]:
        """Scoring of one pool in every replicate [s], and one pass by part."""
        return self._scored.get(
            (demand, site.roles, site.old_policy, index, pool.layout, pool.settings.model_copy(update=_STAGES)),
            lambda: simulated_scoring(
                site, site.trainers[index], self.task.architecture, demand, Layout.of_values(pool.layout),
                pool.settings.filled(), pool.settings.token_budget, self._lengths,
            ),
        )  # fmt: skip

    def _bytes(self, demand: Demand, pool: PoolPlan, index: int, site: Site) -> TrainerBytes:
        """Memory of one pool."""
        return self._held.get(
            (demand, site.roles, site.old_policy, site.trained_draft, index, pool.layout, pool.settings),
            lambda: trainer_bytes(
                site, site.trainers[index], self.task.architecture, demand, Layout.of_values(pool.layout),
                pool.settings.filled(), np.array([pool.settings.token_budget or 0]),
                np.array([int(bool(pool.settings.parked))]),
            ),
        )  # fmt: skip

    def _stages(
        self, trainer: TrainerStack, layout: Layout, batches: Microbatches, settings: SettingsValues, demand: Demand
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
        stages, chunks = int(layout.pipeline_parallel[0]), int(layout.virtual_pipeline[0])
        return stated_ends(
            profile, self.task.architecture.layers, stages, int(np.ravel(batches.count)[0]), settings, chunks
        )

    def scoring_s(self, evaluation: Evaluation, other: Configuration) -> float:
        """Mean seconds until the last scoring has ended under another configuration of the same trainer [s]."""
        index = self._backend(other)
        each = [self._scoring(evaluation.demand, pool, index, site)[0] for pool, site in self._pools(other)]
        return float(np.maximum.reduce(each).mean())

    def peak(self, evaluation: Evaluation, other: Configuration) -> float:
        """Peak of the trainer, or of a critic apart, under another configuration of the same trainer [bytes]."""
        index = self._backend(other)
        return max(
            float(self._bytes(evaluation.demand, pool, index, site).peak[0]) for pool, site in self._pools(other)
        )

    def _pools(self, configuration: Configuration) -> list[tuple[PoolPlan, Site]]:
        """The pools that score and train, and the site of each."""
        site = site_of(self.context, configuration)
        found = [(configuration.pool("trainer"), site)]
        return [*found, (configuration.pool("critic"), site.critic)] if site.critic_apart else found

    def staged(self, evaluation: Evaluation) -> Configuration | None:
        """The same configuration with its best first and last stage, where that is worth it and neither is given."""
        configuration, demand = evaluation.configuration, evaluation.demand
        pool = configuration.pool("trainer")
        if (pool.settings.first_stage_layers, pool.settings.last_stage_layers) != (None, None):
            return None
        context, site = self.context.of(configuration.mode), site_of(self.context, configuration)
        where = demand, configuration.mode, site.roles, site.trained_draft, pool.layout
        ends = self._better.get(
            (*where, pool.settings.model_copy(update=_SCORING)),
            lambda: better_ends(context, self.task.architecture, pool, evaluation.microbatches, demand),
        )
        if ends is None:
            return None
        better = configuration.with_trainer(first_stage_layers=ends.first, last_stage_layers=ends.last)
        return None if self.peak(evaluation, better) > self.room(evaluation) else better

    def room(self, evaluation: Evaluation) -> float:
        """Most that the trainer's peak may be beside a colocated engine that sleeps [bytes]."""
        shared = evaluation.configuration.shares_memory
        asleep = float(evaluation.memory.asleep_bytes[0]) if shared else 0.0
        return peak_limit(self.context, evaluation.stack) - asleep


def site_of(context: Context, configuration: Configuration) -> Site:
    """Where a configuration runs, and with what: as files say it in its mode; a head is trained that drafts in it."""
    site = context.of(configuration.mode).site
    if site.trained_draft is None:
        return site
    drafts = DraftSetting.parse(configuration.pool("rollout").settings.filled().speculation)
    return replace(site, trained_draft=drafts.method if drafts else None)
