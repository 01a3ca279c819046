"""A run of a plan's phase, a run of a job with pinned pools, and the job of a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

from rlperf.errors import Problem, SpecError
from rlperf.frameworks.hub import architecture_at
from rlperf.frameworks.old_policy import usual
from rlperf.frameworks.own_share import own_share
from rlperf.frameworks.planned import mixed_lengths
from rlperf.frameworks.run import BatchFacts, PoolRun, RolloutRun, Run, TrainerRun, Value
from rlperf.frameworks.scorer_run import ScorerRun
from rlperf.plan.answer.plan import Phase
from rlperf.plan.question.context import with_trainers
from rlperf.plan.question.demand import LengthSource
from rlperf.plan.question.pool import PoolPlan, ScorerPlan
from rlperf.specs.job import Job, Task
from rlperf.specs.modes import MODES
from rlperf.specs.pool import LayoutChoice, PoolSettings, PoolSpec, Role
from rlperf.specs.profiles import load_cluster, load_device
from rlperf.specs.scorer import Scorer
from rlperf.specs.short_job import task_name

T = TypeVar("T")


def from_phase(phase: Phase, job: Job, devices_per_node: int, folder: Path | str | None = None) -> Run:
    """A phase of a plan as a run; ``folder``: the job's, where its workloads lie."""
    pools = {pool.role: pool for pool in phase.pools}
    trainer, rollout = pools["trainer"], pools["rollout"]
    batch = BatchFacts(**dict(phase.settings), max_positions=job.max_positions).in_whole_groups()
    apart = pools["critic"].own_devices if "critic" in pools else 0
    devices = trainer.devices + (0 if MODES[phase.mode].shares_devices else rollout.devices) + apart
    run = Run(
        architecture=_architecture_of(phase, job),
        algorithm=job.algorithm,
        reference=job.reference,
        mode=phase.mode,
        weight_sync=job.weight_sync,
        in_flight=job.in_flight_updates,
        staleness=phase.staleness,
        checkpoint_every=(job.run.checkpoint_every if job.run else 0) or None,
        devices=devices,
        nodes=-(-devices // devices_per_node),
        devices_per_node=devices_per_node,
        batch=_with_tasks(batch, _tasks_of(phase, job), job, folder),
        trainer=TrainerRun(**_planned(trainer)),
        rollout=RolloutRun(**_planned(rollout), elastic=_goes_on(job)),
        critic=tuple(_planned(pools["critic"]).items()) if "critic" in pools else (),
        critic_devices=apart,
        scorers=tuple(_scorer(one, job, _architecture_of(phase, job)) for one in phase.scorers),
    )
    scored = job.old_policy
    if scored is None:  # modes differ in it
        scored = usual(job.framework, phase.mode, trainer.settings.backend, run.updates, folder)
    return replace(run, old_policy=scored)


def data_names(phases: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """A name of files and folders for the tasks of each phase, from theirs: no two share one.

    >>> data_names([("math 1",), ("math1",), ("math 1",), ("++",)])
    {('math 1',): 'math1', ('math1',): 'math1_2', ('++',): 'task'}
    """
    found: dict[tuple[str, ...], str] = {}
    for tasks in phases:
        plain = re.sub(r"\W", "", "_".join(tasks)) or "task"
        names = (plain, *(f"{plain}_{number}" for number in range(2, len(found) + 2)))
        found.setdefault(tasks, next(name for name in names if name not in found.values()))
    return found


def _goes_on(job: Job) -> bool | None:
    """Whether rollout has to go on without nodes that leave; None: nobody asks."""
    return True if job.run and job.run.spot and job.run.spot.pools == "rollout" else None


def _scorer(plan: ScorerPlan, job: Job, policy: str) -> ScorerRun:
    """A planned scorer; ``policy``: the architecture of one that has none of its own."""
    stated = next(one for one in job.scorers if one.name == plan.name)
    return ScorerRun(
        name=plan.name,
        kind=plan.kind,
        placement=plan.placement,
        architecture=stated.architecture or policy,
        devices=plan.devices,
        tensor_parallel=plan.layout.tensor_parallel,
        pipeline_parallel=plan.layout.pipeline_parallel,
        data_parallel=plan.layout.data_parallel,
        attention_data_parallel=plan.layout.attention_data_parallel,
        expert_parallel=plan.layout.expert_parallel,
        memory_fraction=plan.settings.memory_fraction,
        max_running=plan.settings.max_running,
        top_k=stated.top_k,
        share=stated.share,
        prompt_tokens=stated.prompt_tokens,
        response_tokens=stated.response_tokens,
    )


def _pinned_scorer(scorer: Scorer, policy: str, problems: list[Problem]) -> ScorerRun:
    """A scorer of a job that leaves nothing open about it."""
    where = f"scorer {scorer.name}"
    placement = _one(f"{where}.placement", scorer.placements, problems) or "shared"
    devices = _one(f"{where}.devices", scorer.devices, problems) or 0
    if placement == "own" and not devices:
        problems.append(Problem(f"{where}: devices is not pinned", suggestion="run `rlperf plan` first"))
    stated = {**scorer.layout.stated(), **scorer.settings.stated()}
    given = {each.name: stated[each.name] for each in fields(ScorerRun) if each.name in stated}
    return ScorerRun(
        *(scorer.name, scorer.kind, placement, scorer.architecture or policy, devices),
        top_k=scorer.top_k, share=scorer.share, prompt_tokens=scorer.prompt_tokens,
        response_tokens=scorer.response_tokens, **given,
    )  # fmt: skip


def _to_scorer(run: ScorerRun) -> dict[str, Value]:
    """A scorer as it stands in a job file."""
    degrees = ("tensor_parallel", "pipeline_parallel", "attention_data_parallel", "expert_parallel")
    settings = {"memory_fraction": run.memory_fraction, "max_running": run.max_running}
    return {
        "name": run.name,
        "kind": run.kind,
        "architecture": architecture_at(run.architecture) if run.architecture else None,
        "placement": run.placement,
        "devices": run.devices or None,
        "top_k": run.top_k,
        "share": run.share,
        "prompt_tokens": run.prompt_tokens,
        "response_tokens": run.response_tokens,
        "layout": {name: getattr(run, name) for name in degrees},
        "settings": {name: value for name, value in settings.items() if value is not None},
    }


def _tasks_of(phase: Phase, job: Job) -> tuple[Task, ...]:
    return tuple(task for task in job.tasks if task.name in phase.tasks) or job.tasks[:1]


def _with_tasks(batch: BatchFacts, tasks: tuple[Task, ...], job: Job, folder: Path | str | None) -> BatchFacts:
    """The batch with what its tasks say beside it; several are mixed in it."""
    if len(tasks) == 1:
        return _with_task(batch, tasks[0], job, folder)
    own = (replace(batch, prompts_per_step=task.prompts_per_step[0]) for task in tasks)
    each = [_with_task(one, task, job, folder) for one, task in zip(own, tasks, strict=True)]
    generated = sum(one.generated_prompts or one.prompts for one in each)
    dropped = generated if generated > batch.prompts else None
    return replace(batch, generated_prompts=dropped, turns=max(one.turns for one in each))


def _with_task(batch: BatchFacts, task: Task, job: Job, folder: Path | str | None) -> BatchFacts:
    """The batch with what its task says beside it: prompts that filtering drops, and turns of its trajectories."""
    try:
        source = LengthSource.open(task, Path(folder) if folder else None)
    except SpecError:  # lengths that are not there say nothing of turns
        return replace(batch, generated_prompts=task.generated_prompts, generation_batch=task.generation_batch)
    dropped = source.generated_per_trained() if job.algorithm == "dapo" else 1.0
    generated = task.generated_prompts or (round(batch.prompts * dropped) if dropped > 1.0 else None)
    more = generated if (generated or 0) > batch.prompts else None
    return replace(batch, generated_prompts=more, generation_batch=task.generation_batch, turns=source.turns)


def _architecture_of(phase: Phase, job: Job) -> str:
    own = {task.architecture for task in job.tasks if task.name in phase.tasks and task.architecture}
    return next(iter(own)) if len(own) == 1 else job.architecture


def _planned(pool: PoolPlan) -> dict[str, Value]:
    """What a plan states of a pool, by name."""
    return {"devices": pool.devices, **pool.layout.stated(), **pool.settings.stated()}


def from_job(job: Job, devices_per_node: int, folder: Path | str | None = None) -> Run:
    """A job whose pools are pinned as a run; ``folder``: the job's, whose profiles go before the shipped ones.

    Raises
    ------
    SpecError : something that a run needs is open or absent; every such field is named
    """
    problems: list[Problem] = []
    if job.sharing == "mixed" and len(job.tasks) > 1:
        raise SpecError(Problem("tasks mixed in one batch are exported from their plan", suggestion="rlperf plan"))
    task, mode = job.tasks[0], _one("modes", job.modes, problems)
    batch = BatchFacts(
        prompts_per_step=_one("prompts_per_step", task.prompts_per_step, problems),
        group_size=_one("group_size", task.group_size, problems) or 1,
        mini_batch=_one("mini_batch", task.mini_batch or task.prompts_per_step, problems),
        max_prompt_tokens=task.max_prompt_tokens,
        max_response_tokens=_one("max_response_tokens", task.max_response_tokens, problems),
        over_provision=_one("over_provision", task.over_provision, problems) or 1.0,
        max_trajectories=_one("max_trajectories", task.max_trajectories, problems),
        max_positions=job.max_positions,
    )
    batch = _with_task(batch.in_whole_groups(), task, job, folder)
    roles: tuple[Role, ...] = ("rollout", "trainer", *(r for r in job.all_roles if r not in ("rollout", "trainer")))
    pinned = {role: _pinned(job.pool(role), problems) for role in roles}
    policy = task.architecture or job.architecture
    scorers = tuple(_pinned_scorer(one, policy, problems) for one in job.scorers)
    if mode is None or problems:
        raise SpecError(problems)
    apart = job.pool("critic").apart and "critic" in pinned
    needed: tuple[Role, ...] = ("rollout", "trainer", "critic") if apart else ("rollout", "trainer")
    open_ = [role for role in needed if "devices" not in pinned[role]]
    problems += [Problem(f"pool {role}: devices is not pinned", suggestion="run `rlperf plan` first") for role in open_]
    if problems:
        raise SpecError(problems)
    run = Run(
        architecture=policy,
        algorithm=job.algorithm,
        reference=job.reference,
        mode=mode,
        weight_sync=job.weight_sync,
        in_flight=job.in_flight_updates,
        staleness=MODES[mode].staleness(job.limits.staleness),
        devices_per_node=devices_per_node,
        batch=batch,
        trainer=TrainerRun(**pinned["trainer"]),
        rollout=RolloutRun(**pinned["rollout"]),
        critic=tuple(pinned.get("critic", {}).items()),
        critic_devices=pinned["critic"]["devices"] if apart else 0,
        scorers=scorers,
    )
    devices = run.trainer.devices + (0 if run.traits.shares_devices else run.rollout.devices) + run.critic_devices
    backend, scored = run.trainer.backend or with_trainers(job, folder).trainer_backends[0], job.old_policy
    return replace(
        run,
        devices=devices,
        nodes=-(-devices // devices_per_node),
        old_policy=usual(job.framework, mode, backend, run.updates, folder) if scored is None else scored,
        trainer=run.trainer.having(backend=backend),
        rollout=run.rollout.having(backend=run.rollout.backend or job.engine),
    ).completed()


def _one(name: str, given: tuple[T, ...] | None, problems: list[Problem]) -> T | None:
    """The single value of a pinned field."""
    if given is not None and len(given) == 1:
        return given[0]
    if given is not None:
        problems.append(
            Problem(f"{name} is open ({len(given)} alternatives)", suggestion="run `rlperf plan`, or pin one")
        )
    return None


def _pinned(pool: PoolSpec, problems: list[Problem]) -> dict[str, Value]:
    """What a job pins of a pool, by name."""
    given = {**dict(pool.layout), **dict(pool.settings), "devices": pool.devices}
    pinned = {
        name: _one(f"{pool.role}.{name}", value, problems) if isinstance(value, tuple) else value
        for name, value in given.items()
    }
    return {name: value for name, value in pinned.items() if value is not None}


def to_job(
    run: Run, *, framework: str, cluster: str, workload: str, name: str = "imported", reward_s: float | None = None,
    rollout_cluster: str | None = None,
) -> Job:  # fmt: skip
    """A run as a job with pinned pools: what `predict`, `plan` and `audit` read."""
    batch = run.batch
    stated, group, mini = batch.stated_samples or 0, batch.group_size, batch.mini
    if group > 0 and mini > 0 and stated % group and batch.trained % mini:  # others are no batch, which Task says
        each = f"an update of {stated} samples is no whole groups of {group}"
        raise ValueError(f"{each}, as predictions count them: state a multiple")
    tasks = tuple(
        Task(
            name=task_name(lengths),
            workload=lengths,
            prompts_per_step=(prompts,),
            group_size=(batch.group_size,),
            mini_batch=(mini,),
            max_prompt_tokens=batch.max_prompt_tokens or 2048,
            max_response_tokens=(batch.max_response_tokens or 8192,),
            generated_prompts=generated,
            generation_batch=batch.generation_batch if run.algorithm == "dapo" else None,
            over_provision=(batch.over_provision,),
            max_trajectories=batch.max_trajectories and (batch.max_trajectories,),
        ).model_copy(update={"reward_s": reward_s})
        for lengths, prompts, mini, generated in _shares(workload, run)
    )
    critic = [{"role": "critic", "placement": "own", "devices": run.critic_devices}] if run.critic_devices else []
    ahead = run.staleness or run.traits.least_staleness
    if batch.over_provision > 1.0:  # what goes on in the next rl_step is trained on a version late
        ahead = max(ahead, 1)
    engines = _with_a_share(run.rollout, rollout_cluster or cluster)
    as_usual = run.old_policy == usual(framework, run.mode, run.trainer.backend, run.updates)
    return Job.model_validate(
        {
            "name": name,
            "architecture": run.architecture,
            "max_positions": batch.max_positions,
            "cluster": cluster,
            **_nodes_of(run, cluster, elsewhere=run.rollout.devices if rollout_cluster else 0),
            "algorithm": run.algorithm,
            "reference": run.reference,
            "old_policy": None if as_usual else run.old_policy,
            "framework": framework,
            "trainer_backends": [run.trainer.backend] if run.trainer.backend else [],
            "engine": run.rollout.backend or "vllm",
            "tasks": tasks,
            "sharing": "mixed" if len(tasks) > 1 else "time",
            "modes": run.mode,
            "weight_sync": run.weight_sync,
            "in_flight_updates": run.in_flight,
            "limits": {"staleness": ahead},
            "pools": [_pool_spec("rollout", engines, rollout_cluster), _pool_spec("trainer", run.trainer), *critic],
            "scorers": [_to_scorer(scorer) for scorer in run.scorers],
        }
    )


def _nodes_of(run: Run, cluster: str, *, elsewhere: int) -> dict[str, Value]:
    """Nodes of a run, and of scorers that have devices beside those that its pools count; how much of each it has.

    ``elsewhere`` : its devices that are on another cluster
    """
    try:
        whole = load_cluster(cluster).devices_per_node
    except SpecError:  # reported where the job is resolved
        return {"nodes": run.nodes}
    devices = run.devices + sum(scorer.devices for scorer in run.scorers if scorer.placement == "own") - elsewhere
    if elsewhere:
        return {"nodes": -(-devices // whole)}
    if run.devices_per_node < whole and devices == run.nodes * run.devices_per_node:
        return {"nodes": run.nodes, "devices_per_node": run.devices_per_node}
    larger = run.devices_per_node > whole  # one of the file's nodes is several of the cluster's
    return {"nodes": max(run.nodes, -(-devices // whole)) if larger or devices != run.devices else run.nodes}


def _shares(workload: str, run: Run) -> Iterator[tuple[str, int, int, int | None]]:
    """Lengths of each task of a batch, its prompts, those of an update and those rolled out (None: not stated).

    ``workload`` : of one task, or of several with their shares as headers say them (`mixed_lengths`)
    """
    batch = run.batch
    generated = batch.generated_prompts if run.algorithm == "dapo" else None
    whole = batch.trained, min(batch.mini, batch.trained), generated or (batch.prompts if batch.left_over else None)
    mixed = mixed_lengths(workload)
    if len(mixed) < 2:
        yield next(iter(mixed), workload), *whole
        return
    minis = _parted(whole[1], mixed.values())
    rolled = _parted(whole[2], minis) if whole[2] else [None] * len(minis)
    for name, mini, each in zip(mixed, minis, rolled, strict=True):
        yield name, mini * batch.updates, mini, each


def _parted(total: int, shares: Collection[int]) -> list[int]:
    """A whole number in parts as near to their shares as they come.

    >>> _parted(64, [96, 32]), _parted(10, [1, 1, 1])
    ([48, 16], [3, 4, 3])
    """
    ends = [round(total * each / sum(shares)) for each in accumulate(shares)]
    return [end - start for start, end in pairwise((0, *ends))]


def _with_a_share(rollout: RolloutRun, cluster: str) -> RolloutRun:
    """Engines with the share of memory that they take of their own accord, where the run states none."""
    if rollout.memory_fraction is not None:
        return rollout
    try:
        device = load_device(load_cluster(cluster).device)
        return rollout.having(memory_fraction=own_share(rollout, device))
    except SpecError:  # reported where the job is resolved
        return rollout


def _pool_spec(role: Role, pool: PoolRun, cluster: str | None = None) -> dict[str, Value]:
    """A pool as it stands in a job file: what the run states, pinned; ``cluster``: of its own."""
    stated = pool.stated()
    return {
        "role": role,
        "devices": pool.devices,
        "cluster": cluster,
        "layout": {name: stated[name] for name in LayoutChoice.model_fields if name in stated},
        "settings": {name: stated[name] for name in PoolSettings.model_fields if name in stated},
    }
