"""Run: one configuration in rlperf's own words, between a Plan's phase, a Job and a framework's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from rlperf.errors import Problem, SpecError
from rlperf.plan.answer.plan import BatchSettings, Phase, PoolPlan
from rlperf.plan.question.context import with_trainers
from rlperf.specs.architecture import Architecture
from rlperf.specs.framework import architecture_group
from rlperf.specs.job import Algorithm, Job, Task
from rlperf.specs.modes import MODES, Mode, ModeTraits
from rlperf.specs.pool import LayoutChoice, LayoutValues, PoolSettings, PoolSpec, Role, SettingsValues
from rlperf.specs.trainer_calibration import load_trainer
from rlperf.specs.trainer_capability import DEGREES

Value = Any
TRAINER_SETTINGS = ("token_budget", "scoring_token_budget", "compute_dtype", "packing", "lora_rank", "parked",
                    "chunked_loss", "freeze_vision")  # fmt: skip
ENGINE_SETTINGS = ("max_running", "memory_fraction", "kv_dtype", "rollout_dtype", "prefix_caching", "chunked_prefill",
                   "engine_token_budget", "cuda_graphs")  # fmt: skip
LAYOUT = tuple(LayoutValues.model_fields)
BATCH = tuple(BatchSettings.model_fields)


@dataclass(frozen=True)
class Run:
    """One configuration: what a framework's file says, in rlperf's words and units.

    ``values`` maps names such as ``trainer.tensor_parallel``, ``rollout.max_running`` [requests], ``batch.mini_batch``
    [prompts], ``trainer.token_budget`` [tokens per microbatch and data-parallel rank] or ``run.mode`` to numbers, words
    and flags. Groups: ``run`` (architecture, algorithm, reference, mode, staleness, nodes, devices_per_node), ``batch``
    (`BatchSettings`), and the roles. A table rather than a class: the frameworks' field tables read and write it.
    """

    values: Mapping[str, Value] = field(default_factory=dict)

    def get(self, name: str, default: Value = None) -> Value:
        """A value, or ``default`` where it is not stated."""
        found = self.values.get(name)
        return default if found is None else found

    def number(self, name: str, default: int = 1) -> int:
        """A whole number, or ``default`` where it is not stated."""
        return int(self.get(name, default))

    @property
    def traits(self) -> ModeTraits:
        """What the run's mode is; taking turns where none is stated."""
        return MODES[self.get("run.mode", "colocated")]

    def with_(self, changes: Mapping[str, Value]) -> Run:
        """A copy with some values replaced."""
        return replace(self, values={**self.values, **changes})

    def group(self, name: str) -> SimpleNamespace:
        """All values of a group as attributes."""
        prefix = name + "."
        return SimpleNamespace(**{k.removeprefix(prefix): v for k, v in self.values.items() if k.startswith(prefix)})

    def names(self, architecture: Architecture | None = None) -> dict[str, object]:
        """Groups for `rlperf.specs.framework.Rule`, with the derived values that rules speak of."""
        groups: dict[str, object] = {
            name: self.group(name) for name in ("run", "batch", "trainer", "rollout", "critic", "reference")
        }
        batch, trainer, rollout = (self.group(name) for name in ("batch", "trainer", "rollout"))
        if self.get("batch.prompts_per_step") is not None:
            batch.samples = batch.prompts_per_step * self.number("batch.group_size")
            group = self.number("batch.group_size")
            mini = self.number("batch.mini_batch", batch.prompts_per_step)
            # Frameworks that count samples may state a number that is no multiple of the group: rules see it as it is.
            stated = self.number("batch.stated_samples", 0)
            batch.mini_batch_samples = stated if stated and -(-stated // group) == mini else mini * group
        if self.get("batch.max_prompt_tokens") is not None and self.get("batch.max_response_tokens") is not None:
            batch.sequence_tokens = batch.max_prompt_tokens + batch.max_response_tokens
        trainer.replica_devices = _product(
            self, "trainer", "tensor_parallel", "pipeline_parallel", "context_parallel", "ulysses"
        )
        rollout.replica_devices = _product(self, "rollout", "tensor_parallel", "pipeline_parallel")
        groups.update(batch=batch, trainer=trainer, rollout=rollout)
        if architecture is not None:
            groups["architecture"] = architecture_group(architecture)
        return groups


def _product(run: Run, group: str, *degrees: str) -> int:
    product = 1
    for degree in degrees:
        product *= run.number(f"{group}.{degree}")
    return product


def from_phase(phase: Phase, job: Job, devices_per_node: int) -> Run:
    """A phase of a plan as a run."""
    values: dict[str, Value] = {
        "run.architecture": _architecture_of(phase, job),
        "run.algorithm": job.algorithm,
        "run.reference": job.reference,
        "run.mode": phase.mode,
        "run.staleness": phase.staleness,
        "run.devices_per_node": devices_per_node,
        **{f"batch.{name}": getattr(phase.settings, name) for name in BATCH},
    }
    for pool in phase.pools:
        values.update(_pool_values(pool))
    devices = {pool.role: pool.devices for pool in phase.pools}
    total = devices["trainer"] if MODES[phase.mode].shares_devices else devices["trainer"] + devices["rollout"]
    values["run.devices"] = total
    values["run.nodes"] = -(-total // devices_per_node)
    return Run(values)


def _architecture_of(phase: Phase, job: Job) -> str:
    own = {task.architecture for task in job.tasks if task.name in phase.tasks and task.architecture}
    return next(iter(own)) if len(own) == 1 else job.architecture


def _pool_values(pool: PoolPlan) -> dict[str, Value]:
    values: dict[str, Value] = {f"{pool.role}.devices": pool.devices}
    values.update({f"{pool.role}.{name}": getattr(pool.layout, name) for name in LAYOUT})
    for name in SettingsValues.model_fields:
        if getattr(pool.settings, name) is not None:
            values[f"{pool.role}.{name}"] = getattr(pool.settings, name)
    return values


def from_job(job: Job, devices_per_node: int, folder: Path | str | None = None) -> Run:
    """A job whose pools are pinned as a run; ``folder``: the job's, whose profiles go before the shipped ones.

    Raises
    ------
    SpecError : something that a run needs is open or absent; every such field is named
    """
    problems: list[Problem] = []
    task = job.tasks[0]
    values: dict[str, Value] = {
        "run.architecture": task.architecture or job.architecture,
        "run.algorithm": job.algorithm,
        "run.reference": job.reference,
        "run.mode": (mode := _one("modes", job.modes, problems)),
        "run.staleness": MODES[mode].staleness(job.limits.staleness) if mode else 0,
        "run.devices_per_node": devices_per_node,
        "batch.prompts_per_step": _one("prompts_per_step", task.prompts_per_step, problems),
        "batch.group_size": _one("group_size", task.group_size, problems),
        "batch.mini_batch": _one("mini_batch", task.mini_batch or task.prompts_per_step, problems),
        "batch.max_prompt_tokens": task.max_prompt_tokens,
        "batch.max_response_tokens": _one("max_response_tokens", task.max_response_tokens, problems),
    }
    for role in ("rollout", "trainer", *(role for role in job.all_roles if role not in ("rollout", "trainer"))):
        values.update(_spec_values(job.pool(role), problems))
    if problems:
        raise SpecError(problems)
    if values.get("rollout.backend") is None:
        values["rollout.backend"] = job.engine
    if values.get("trainer.backend") is None:
        values["trainer.backend"] = _backend(job, values, folder)
    for role in ("rollout", "trainer"):
        if f"{role}.devices" not in values:
            problems.append(Problem(f"pool {role}: devices is not pinned", suggestion="run `rlperf plan` first"))
    if problems:
        raise SpecError(problems)
    colocated = MODES[values["run.mode"]].shares_devices
    total = values["trainer.devices"] + (0 if colocated else values["rollout.devices"])
    values.update({"run.devices": total, "run.nodes": -(-total // devices_per_node)})
    return Run(complete_layouts(values))


def _backend(job: Job, values: Mapping[str, Value], folder: Path | str | None) -> str:
    """The trainer's backend where the job pins none: the first that opens every degree it takes, else the first."""
    names = with_trainers(job, folder).trainer_backends
    taken = [degree for degree in DEGREES if degree != "shard_size" and values.get(f"trainer.{degree}", 1) > 1]
    able = (name for name in names if all(map(load_trainer(name, folder=folder).capability.searches, taken)))
    return next(able, names[0])


def complete_layouts(values: Mapping[str, Value]) -> dict[str, Value]:
    """``values`` with every layout degree stated and data_parallel following from the devices."""
    done = dict(values)
    for role in ("rollout", "trainer"):
        for name in LAYOUT:
            if done.get(f"{role}.{name}") is None and name != "data_parallel":
                done[f"{role}.{name}"] = LayoutValues.model_fields[name].default
        replica = 1
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "ulysses"):
            replica *= int(done[f"{role}.{name}"])
        devices = done.get(f"{role}.devices")
        if done.get(f"{role}.data_parallel") is None and devices is not None:
            done[f"{role}.data_parallel"] = max(int(devices) // replica, 1)
    return done


def _one(name: str, given: tuple[Value, ...] | None, problems: list[Problem]) -> Value:
    """The single value of a pinned field."""
    if given is not None and len(given) == 1:
        return given[0]
    if given is not None:
        problems.append(
            Problem(f"{name} is open ({len(given)} alternatives)", suggestion="run `rlperf plan`, or pin one")
        )
    return None


def _spec_values(pool: PoolSpec, problems: list[Problem]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name in LayoutChoice.model_fields:
        values[f"{pool.role}.{name}"] = _one(f"{pool.role}.{name}", getattr(pool.layout, name), problems)
    for name in PoolSettings.model_fields:
        given = getattr(pool.settings, name)
        where = f"{pool.role}.{name}"
        values[where] = _one(where, given, problems) if isinstance(given, tuple) else given
    values[f"{pool.role}.devices"] = _one(f"{pool.role}.devices", pool.devices, problems)
    return {name: value for name, value in values.items() if value is not None}


def to_job(run: Run, *, framework: str, cluster: str, workload: str, name: str = "imported") -> Job:
    """A run as a job with pinned pools: what `predict`, `plan` and `audit` read."""
    mode: Mode = run.get("run.mode", "colocated")
    staleness = run.number("run.staleness", 0) or MODES[mode].least_staleness
    prompts = run.number("batch.prompts_per_step")
    task = Task(
        name="task",
        workload=workload,
        prompts_per_step=(prompts,),
        group_size=(run.number("batch.group_size"),),
        mini_batch=(min(run.number("batch.mini_batch", prompts), prompts),),
        max_prompt_tokens=run.number("batch.max_prompt_tokens", 2048),
        max_response_tokens=(run.number("batch.max_response_tokens", 8192),),
    )
    algorithm: Algorithm = run.get("run.algorithm", "grpo")
    backend = run.get("trainer.backend")
    roles = [role for role in ("rollout", "trainer", "critic") if run.get(f"{role}.devices") is not None]
    return Job.model_validate(
        {
            "name": name,
            "architecture": run.get("run.architecture", "Qwen2.5-7B"),
            "cluster": cluster,
            "nodes": run.get("run.nodes"),
            "algorithm": algorithm,
            "reference": bool(run.get("run.reference", False)),
            "framework": framework,
            "trainer_backends": [backend] if backend else [],
            "engine": run.get("rollout.backend", "vllm"),
            "tasks": [task.model_dump()],
            "modes": mode,
            "limits": {"staleness": staleness},
            "pools": [_pool_spec(run, role) for role in roles],
        }
    )


def _pool_spec(run: Run, role: str) -> dict[str, Value]:
    """A pool as it stands in a job file: what the run states, pinned."""
    assert role in get_args(Role)
    settings = (*ENGINE_SETTINGS, "backend") if role == "rollout" else (*TRAINER_SETTINGS, "backend")
    layout = {name: run.get(f"{role}.{name}") for name in LAYOUT}
    chosen = {name: run.get(f"{role}.{name}") for name in settings}
    return {
        "role": role,
        "devices": run.get(f"{role}.devices"),
        "layout": {name: value for name, value in layout.items() if value is not None},
        "settings": {name: value for name, value in chosen.items() if value is not None},
    }
