"""Context: a job with everything that its names stand for. Every name that cannot be found is reported at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from rlperf.errors import Problem, SpecError
from rlperf.plan.question.contradictions import contradictions, incapable, untold, with_units
from rlperf.plan.question.demand import LengthSource, batches, shared_out
from rlperf.plan.question.drafting import check_drafts, trained_draft
from rlperf.plan.question.mixture import mixed
from rlperf.plan.question.techniques import check_length, check_techniques
from rlperf.sim.remembered import Remembered
from rlperf.sim.rl_step.demand import Batch
from rlperf.sim.rl_step.overheads import trainer_in_framework
from rlperf.sim.rl_step.site import Site, TrainerStack
from rlperf.specs.architecture import Architecture
from rlperf.specs.cluster import Cluster
from rlperf.specs.engine_calibration import EngineCalibration, load_engine_calibration
from rlperf.specs.given import as_path
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.job import Job, Task
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.pool import PoolSpec
from rlperf.specs.profiles import architecture_reading, is_path, load_architecture, load_cluster
from rlperf.specs.reader import Document, is_there, read_document, validate
from rlperf.specs.rl_calibration import FrameworkCalibration, framework_trainers, load_framework_calibration
from rlperf.specs.scorer import Scorer
from rlperf.specs.trainer_calibration import TrainerCalibration, load_trainer
from rlperf.specs.trainer_capability import DEGREES
from rlperf.workload import PRESETS

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class TaskContext:
    """A task with its architecture, lengths and the batches it leaves open."""

    task: Task
    architecture: Architecture
    source: LengthSource
    batches: tuple[Batch, ...]
    shape_note: str = ""
    """Which shape stands for the architecture's name, where it is not the shape's own."""
    parts: tuple[str, ...] = ()
    """Names of the tasks that are mixed in it; empty: it is one."""

    @property
    def names(self) -> tuple[str, ...]:
        """The job's tasks that it stands for."""
        return self.parts or (self.task.name,)


@dataclass(frozen=True, eq=False)
class ScorerContext:
    """A scorer with its architecture (None: the policy's) and the profile of its engine."""

    scorer: Scorer
    architecture: Architecture | None
    engine_profile: EngineCalibration

    def context(self, context: Context) -> Context:
        """What its engine is planned in: a job whose only pool is the scorer's, on the trainer's kind of devices."""
        pool = PoolSpec(role="rollout", layout=self.scorer.layout, settings=self.scorer.settings)
        return replace(
            context,
            job=context.job.model_copy(update={"pools": (pool,), "scorers": ()}),
            rollout_hardware=context.hardware,
            engine_profile=self.engine_profile,
            scorers=(),
            scores_prompts=self.scorer.reads_every_token,
            policy_moves=False,
        )


def with_stated(known: Sequence[ScorerContext], scorers: Sequence[Scorer]) -> tuple[ScorerContext, ...]:
    """The same scorers, as a job states them otherwise."""
    return tuple(replace(one, scorer=stated) for one, stated in zip(known, scorers, strict=True))


@dataclass(frozen=True, eq=False)
class Context:
    """Everything a plan needs to know."""

    job: Job
    hardware: Hardware
    rollout_hardware: Hardware
    engine_profile: EngineCalibration
    trainers: tuple[TrainerStack, ...]
    tasks: tuple[TaskContext, ...]
    scorers: tuple[ScorerContext, ...] = ()
    scores_prompts: bool = False
    """Whether the engine returns a log-probability of every prompt token."""
    policy_moves: bool = True
    """Whether the engine's model is trained: a scorer's is not, and the head that drafts for it stays as good."""
    asked: Job | None = None
    """The job before its framework's files said what they can of it."""
    restate: Callable[[Job], Job] | None = None
    """What files of the framework make of a job; None: they are asked nothing."""
    keyless: frozenset[str] = frozenset()
    """Settings of its pools that files of the framework cannot state: the job's are what it runs."""
    warned: tuple[str, ...] = ()
    """What to know of the framework on these devices before any number."""
    _in_modes: Remembered[Context] = field(default_factory=Remembered, init=False)

    def of(self, mode: Mode) -> Context:
        """The job as files say it in one of its modes: where several are open, one may state what another cannot."""
        return self._in_modes.get((mode,), lambda: self._restated(mode))

    def _restated(self, mode: Mode) -> Context:
        if self.restate is None:
            return self
        alone = self.restate(self.job.model_copy(update={"modes": (mode,)}))
        job = alone.model_copy(update={"modes": self.job.modes})
        if job == self.job:
            return self
        trainers = (replace(t, framework=counting(t.framework, job.pool("trainer"))) for t in self.trainers)
        scorers = with_stated(self.scorers, job.scorers)
        return replace(self, job=job, trainers=tuple(trainers), scorers=scorers, restate=None)

    @cached_property
    def engine(self) -> EngineCalibration:
        """The engine's profile as the job runs it: without CUDA graphs, or with other kernels between experts."""
        settings, changed = self.job.pool("rollout").settings, dict[str, Any]()
        if settings.cuda_graphs is False:
            changed["cuda_graphs"] = False
        if settings.expert_dispatch:
            changed |= {"expert_dispatch": settings.expert_dispatch, "own_exchange": False}
        return self.engine_profile.model_copy(update=changed) if changed else self.engine_profile

    @property
    def read_as(self) -> tuple[str, ...]:
        """How the job is read where that may not be what is meant, in words.

        Shapes that stand for architectures under another label, a release that is extrapolated, and weights in flight
        in modes in which engines wait for them.
        """
        notes = [task.shape_note for task in self.tasks] + [each.framework.release_note for each in self.trainers]
        if self.job.in_flight_updates and not any(MODES[mode].runs_ahead for mode in self.job.modes):
            waits = "engines generate nothing while weights arrive, in_flight_updates changes nothing"
            notes.append(f"{', '.join(self.job.modes)}: {waits} (async, one_step_off: they do)")
        return tuple(dict.fromkeys(filter(None, notes)))

    @cached_property
    def site(self) -> Site:
        """Where the job's rl_steps run, and with what."""
        settings, apart = self.job.pool("trainer").settings.filled(), self.job.pool("critic").apart
        return Site(
            self.hardware,
            self.rollout_hardware,
            self.engine,
            self.trainers,
            tuple(role for role in self.job.all_roles if not apart or role != "critic"),
            # what R2 replays is recorded while the old policy is scored
            True if settings.router_replay == "R2" else self.job.old_policy,
            settings.lora_rank,
            self.scores_prompts,
            trained_draft(self.job),
            settings.router_replay,
            settings.lora_jobs,
            settings.turn_samples and not settings.shared_prefix,
            apart,
            self.policy_moves,
            settings.epochs,
        )

    @property
    def cluster(self) -> Cluster:
        """The cluster of the job."""
        return self.hardware.cluster

    @property
    def takes_turns(self) -> bool:
        """Whether several tasks use the same devices one after the other."""
        return self.job.sharing == "time" and len(self.tasks) > 1

    @property
    def borrows(self) -> bool:
        """Whether engines run on the trainer's devices, too, while it waits."""
        return bool(self.job.pool("rollout").settings.filled().borrows)

    @property
    def own_rollout(self) -> bool:
        """Whether rollout has a cluster of its own."""
        return self.rollout_hardware is not self.hardware

    def usd_per_s(self, rollout: int, trainer: int) -> float | None:
        """Price of pools of so many devices (colocated: of the trainer's alone) [USD/s]; None where one is missing."""
        prices = [self._price(hardware) for hardware in (self.rollout_hardware, self.hardware)]
        if any(price is None for price, count in zip(prices, (rollout, trainer), strict=True) if count):
            return None
        return (rollout * (prices[0] or 0.0) + trainer * (prices[1] or 0.0)) / 3600.0

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Clusters that nothing says a price of."""
        used = (self.hardware, self.rollout_hardware)
        return tuple(dict.fromkeys(each.cluster.name for each in used if self._price(each) is None))

    def _price(self, hardware: Hardware) -> float | None:
        if hardware is self.hardware and self.job.price is not None:
            return self.job.price
        return hardware.cluster.price


def read_job(path: Path | str) -> Job:
    """A job from its YAML file; every problem with its line."""
    return validate(read_document(as_path(path, "job")), Job)


def anchored(job: Job, folder: Path) -> Job:
    """The job with its relative paths made absolute, so that a plan of it reads back from any folder."""

    def whole(text: str, named: bool) -> str:
        given = Path(text).expanduser()
        found = next((path for path in (folder / given, given) if is_there(path)), None)
        return text if named or found is None else str(found.resolve())

    def known(text: str | None) -> str | None:
        return text and whole(text, not is_path(text))

    tasks = tuple(
        task.model_copy(
            update={
                "workload": whole(task.workload, task.workload in PRESETS),
                "architecture": known(task.architecture),
            }
        )
        for task in job.tasks
    )
    pools = tuple(pool.model_copy(update={"cluster": known(pool.cluster)}) for pool in job.pools)
    scorers = tuple(one.model_copy(update={"architecture": known(one.architecture)}) for one in job.scorers)
    names = {"architecture": known(job.architecture), "cluster": known(job.cluster)}
    return job.model_copy(update={**names, "tasks": tasks, "pools": pools, "scorers": scorers})


def resolve(job: Job, *, folder: Path | None = None, document: Document | None = None) -> Context:
    """Look up every name of a job.

    Parameters
    ----------
    folder : where relative paths of the job start
    document : the job's file, for line numbers

    Raises
    ------
    SpecError : all names that cannot be found, and limits that contradict the objective
    """
    problems: list[Problem] = []

    def attempt(look_up: Callable[[], Found], *where: str | int) -> Found | None:
        try:
            return look_up()
        except SpecError as error:
            for problem in error.problems:
                at_file = problem.file is not None or document is None
                problems.append(problem if at_file else document.problem(where, problem.message, problem.suggestion))  # type: ignore[union-attr]
            return None

    job = attempt(lambda: with_trainers(job, folder), "framework") or job
    size = {"nodes": job.nodes, "devices_per_node": job.devices_per_node}
    cluster = attempt(lambda: load_cluster(job.cluster, **size, folder=folder), "cluster")
    hardware = attempt(lambda: load_hardware(cluster.device, cluster, folder=folder), "cluster") if cluster else None
    rollout_hardware = attempt(partial(_rollout_hardware, job, hardware, folder), "pools") if hardware else None
    job = job if rollout_hardware is None else with_units(job, rollout_hardware.device)
    engine_name, engine_field = engine_named(job)
    engine = attempt(lambda: load_engine_calibration(engine_name, folder=folder), *engine_field)
    trainers = [
        attempt(partial(_trainer, job, backend, folder), *trainer_named(job, backend))
        for backend in job.trainer_backends
    ]
    shared = attempt(lambda: load_architecture(job.architecture, folder=folder, like=job.like), "architecture")
    tasks: list[TaskContext | None] = []
    for index, task in enumerate(job.tasks):
        own = shared
        if task.architecture:
            read = partial(load_architecture, task.architecture, folder=folder, like=job.like)
            own = attempt(read, "tasks", index, "architecture")
        tasks.append(attempt(partial(_task, job, task, own, folder), "tasks", index))
    scorers = [attempt(partial(_scorer, job, each, folder), "scorers", n) for n, each in enumerate(job.scorers)]
    found = attempt(partial(_mixed, job, tasks), "tasks") or []
    problems += contradictions(job, cluster, hardware, rollout_hardware, document)
    problems += untold(job, {task.task.name: task.source.turns for task in found}, trainers, document)
    problems += incapable(job, [trainer for trainer in trainers if trainer is not None], document)
    if problems:
        raise SpecError(problems)
    assert hardware is not None and rollout_hardware is not None and engine is not None
    return Context(
        job=_grouped(job, found),
        hardware=hardware,
        rollout_hardware=rollout_hardware,
        engine_profile=engine,
        trainers=tuple(t for t in trainers if t is not None),
        tasks=tuple(found),
        scorers=tuple(s for s in scorers if s is not None),
    )


GROUPS = 4
"""Groups of a horizon whose lengths drift, where the job states none: each is told by its middle rl_step, and four are
1.3 % from twenty where responses grow sevenfold over 80 of 200 rl_steps."""


def _grouped(job: Job, tasks: Sequence[TaskContext]) -> Job:
    """The horizon in groups where lengths drift beyond what was recorded: as one it would have the recorded lengths."""
    horizon = job.horizon
    if horizon.group or horizon.rl_steps == 1 or not any(task.source.drifts(horizon.rl_steps) for task in tasks):
        return job
    return job.model_copy(update={"horizon": horizon.model_copy(update={"group": -(-horizon.rl_steps // GROUPS)})})


def engine_named(job: Job) -> tuple[str, tuple[str | int, ...]]:
    """The rollout engine and the field that names it: the pool's backend goes before the job's engine."""
    for index, pool in enumerate(job.pools):
        if pool.role == "rollout" and pool.settings.backend is not None:
            return pool.settings.backend, ("pools", index, "settings", "backend")
    return job.engine, ("engine",)


def trainer_named(job: Job, backend: str) -> tuple[str | int, ...]:
    """The field that names a trainer backend: the trainer pool's, or the list of those that may train."""
    stated = (
        index for index, pool in enumerate(job.pools) if (pool.role, pool.settings.backend) == ("trainer", backend)
    )
    index = next(stated, None)
    return ("trainer_backends",) if index is None else ("pools", index, "settings", "backend")


def _rollout_hardware(job: Job, shared: Hardware, folder: Path | None) -> Hardware:
    """The rollout pool's own cluster where the job names one, else the job's; its most devices say how many nodes."""
    pool = job.pool("rollout")
    if pool.cluster is None:
        return shared
    cluster = load_cluster(pool.cluster, nodes=pool.nodes, folder=folder)
    if pool.price is not None:
        cluster = cluster.model_copy(update={"price": pool.price})
    if pool.nodes is None and pool.devices:
        cluster = cluster.model_copy(update={"nodes": -(-max(pool.devices) // cluster.devices_per_node)})
    return load_hardware(cluster.device, cluster, folder=folder)


def with_trainers(job: Job, folder: Path | str | None = None) -> Job:
    """The job with its trainer backends named: where it says nothing, that of its trainer pool, or its framework's.

    Of these where there are any, those that open every degree which the job pins: what a backend takes only when it is
    stated is no choice of a plan that leaves the degree open, either.
    """
    if job.trainer_backends:
        return job
    pool = job.pool("trainer")
    names = (pool.settings.backend,) if pool.settings.backend else framework_trainers(job.framework, folder)
    pinned = [name for name in DEGREES if name != "shard_size" and min(getattr(pool.layout, name) or (1,)) > 1]
    able = (name for name in names if all(map(load_trainer(name, folder=folder).capability.searches, pinned)))
    return job.model_copy(update={"trainer_backends": tuple(able) or names})


def before_any_log(context: Context, folder: Path | None, backends: Collection[str]) -> Context:
    """The context with its framework's overheads under these ``backends`` as shipped, whatever a folder's file says."""
    job = context.job
    trainers = (
        _trainer(job, each.backend, folder, False) if each.backend in backends else each for each in context.trainers
    )
    return replace(context, trainers=tuple(trainers))


def _trainer(job: Job, backend: str, folder: Path | None, own: bool = True) -> TrainerStack:
    """A trainer in the job's framework; without ``own`` overheads, whose calibration in the folder is passed over."""
    calibration = load_trainer(backend, folder=folder)
    keys = keys_of(calibration, job.framework)
    framework = load_framework_calibration(job.framework, keys, folder if own else None).by_transport(job.weight_sync)
    framework = counting(framework, job.pool("trainer"))
    if job.in_flight_updates is not None:
        framework = framework.model_copy(update={"in_flight_updates": job.in_flight_updates})
    return TrainerStack(backend, trainer_in_framework(calibration, framework), framework, keys)


def counting(framework: FrameworkCalibration, trainer: PoolSpec) -> FrameworkCalibration:
    """The framework that cuts packed microbatches by count where a pool states how many sequences, and no tokens.

    Frameworks that deal out the bins of all ranks make tokens of it, and are left as they are.
    """
    asked, own = trainer.settings, framework.training
    counted = asked.packing is not False and asked.token_budget is None and trainer.layout.microbatch is not None
    cut = "count" if counted else "rank"
    if own.batching in ("all", cut):
        return framework
    return framework.model_copy(update={"training": own.model_copy(update={"batching": cut})})


def keys_of(trainer: TrainerCalibration, framework: str) -> str:
    """The backend whose keys and rules a framework (with or without its version) has for ``trainer``."""
    name = framework.split("==")[0].strip().lower().replace("-", "_")
    return trainer.capability.keys_in(name) or trainer.id


def _scorer(job: Job, scorer: Scorer, folder: Path | None) -> ScorerContext:
    architecture = None if scorer.architecture is None else load_architecture(scorer.architecture, folder=folder)
    engine = load_engine_calibration(scorer.settings.backend or job.engine, folder=folder)
    if architecture is not None:
        check_length(job, scorer, architecture)
    return ScorerContext(scorer, architecture, engine)


def _task(job: Job, task: Task, architecture: Architecture | None, folder: Path | None) -> TaskContext:
    """Lengths and batches of a task; ``architecture`` None: not found, which is reported elsewhere."""
    problems: list[Problem] = []
    source, found = None, None
    try:
        source = LengthSource.open(task, folder, sees=architecture is not None and architecture.vision is not None)
    except SpecError as error:
        problems += error.problems
    try:
        dropped = source.generated_per_trained() if source and job.algorithm == "dapo" else 1.0
        found = shared_out(task, batches(task, dropped), job.pool("trainer").settings.filled().lora_jobs)
    except SpecError as error:
        problems += error.problems
    if problems or architecture is None or source is None or found is None:
        raise SpecError(problems)
    check_techniques(job, architecture)
    if architecture.classifies:
        what = f"task {task.name}: {architecture.name} gives a sequence a score, and generates nothing"
        raise SpecError(Problem(what, suggestion="name it among scorers, kind reward, and a policy with its own head"))
    longest = max(batch.longest_tokens for batch in found)
    positions = job.max_positions or architecture.max_positions
    if positions and longest > positions:
        raise SpecError(
            Problem(
                f"task {task.name}: prompt and response of {longest:,} tokens are above the "
                f"{positions:,} positions of {architecture.name}",
                suggestion="lower max_response_tokens or max_prompt_tokens; max_positions, if you override them",
            )
        )
    check_drafts(job, architecture)
    note = architecture_reading(task.architecture or job.architecture, folder, like=job.like).note
    return TaskContext(task, architecture, source, tuple(found), note)


def _mixed(job: Job, read: list[TaskContext | None]) -> list[TaskContext]:
    """The tasks that were found, or where all are mixed one that has them in its batch."""
    tasks = [task for task in read if task is not None]
    if job.sharing != "mixed" or len(tasks) < max(len(read), 2):
        return tasks
    task, source, found = mixed([(each.task, each.source, each.batches) for each in tasks])
    names = tuple(each.task.name for each in tasks)
    return [TaskContext(task, tasks[0].architecture, source, tuple(found), tasks[0].shape_note, names)]
