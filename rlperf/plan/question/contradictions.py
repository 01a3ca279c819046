"""What a job asks that cannot be answered, whatever the plan; each with its place in the job's document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from rlperf.cost.dtypes import DTYPES
from rlperf.errors import Problem, did_you_mean
from rlperf.plan.question.techniques import LENT_HINT, untold_lending
from rlperf.sim.rl_step.site import TrainerStack
from rlperf.specs.cluster import Cluster, Device
from rlperf.specs.hardware import Hardware
from rlperf.specs.job import Job, Task
from rlperf.specs.modes import MODES
from rlperf.specs.objectives import OBJECTIVES
from rlperf.specs.pool import ATTRIBUTES, LayoutChoice, PoolSpec
from rlperf.specs.reader import Document


def _otherwise(job: Job, pool: PoolSpec) -> list[tuple[str, str]]:
    """(what is wrong, what to do) of a pool beside rollout and trainer that is not as the trainer's."""
    if pool.role in ("rollout", "trainer"):
        return []
    if pool.apart:
        return _critic_apart(job, pool)
    trainer = job.pool("trainer")
    names = [name for name in ("devices", "cluster") if getattr(pool, name) not in (None, getattr(trainer, name))]
    if pool.layout not in (LayoutChoice(), trainer.layout):
        names.append("a layout")
    if not names:
        return []
    hint = "placement: own" if pool.role == "critic" else "state it among the scorers"
    message = (
        f"the {pool.role} pool states {' and '.join(names)} of its own, but it is planned on the trainer's devices"
    )
    return [(message, f"{hint}, or leave the pool out")]


def _critic_apart(job: Job, pool: PoolSpec) -> list[tuple[str, str]]:
    """What a critic on devices of its own cannot have: no critic at all, a layout of its own."""
    found = []
    if "critic" not in job.all_roles:
        found.append((f"{job.algorithm} trains no critic, and the critic pool states devices", "algorithm: ppo"))
    trainer = job.pool("trainer")
    for part in ("layout", "settings"):
        ours, theirs = (getattr(each, part).stated() for each in (pool, trainer))
        if unlike := sorted(n for n, value in ours.items() if n != "data_parallel" and theirs.get(n) != value):
            words = f"the critic pool states {part} ({', '.join(unlike)}) that the trainer's does not"
            found.append((words, "leave it out: it takes the trainer's, in another data parallel width"))
    return found


class _Where:
    """Makes problems at a place of the job's document, where there is one."""

    def __init__(self, document: Document | None, *place: str | int) -> None:
        self.document, self.place = document, place

    def __call__(self, message: str, suggestion: str, *below: str | int) -> Problem:
        if self.document is None:
            return Problem(message, suggestion=suggestion)
        return self.document.problem((*self.place, *below), message, suggestion)


def _too_few_nodes(pool: PoolSpec, engines: Hardware | None, problem: _Where) -> list[Problem]:
    """A pool on a cluster of its own that asks for more devices than its nodes have."""
    wanted = max(pool.devices or (0,))
    if engines is None or pool.cluster is None or wanted <= engines.cluster.devices:
        return []
    words = f"{pool.nodes} node{'s' * (pool.nodes != 1)} of {pool.cluster}: {engines.cluster.devices} devices"
    return [problem(f"{words}, the pool asks for {wanted}", "raise nodes or leave them out", "nodes")]


def contradictions(
    job: Job, cluster: Cluster | None, trained: Hardware | None, engines: Hardware | None, document: Document | None
) -> list[Problem]:
    """What the job asks that cannot be answered, whatever the plan; ``trained``, ``engines``: what either runs on."""
    found = []
    found += [] if engines is None else _without_unit(job, "rollout", engines.device, document)
    found += [] if trained is None else _without_unit(job, "trainer", trained.device, document)
    if OBJECTIVES[job.objective.minimize].needs_price or job.limits.usd_per_step is not None:
        found += _without_price(job, cluster, engines, _Where(document))
    for index, task in enumerate(job.tasks):
        found += _task_contradictions(job, task, _Where(document, "tasks", index))
    for index, pool in enumerate(job.pools):
        found += _pool_contradictions(job, pool, cluster, _Where(document, "pools", index))
        found += _too_few_nodes(pool, engines, _Where(document, "pools", index))
    least, beside = sum(min(scorer.devices) for scorer in job.scorers if scorer.devices), job.pool("critic")
    critic = min(beside.devices or (1,)) if beside.apart else 0
    if cluster is not None and least + critic >= cluster.devices:
        who = " and ".join(["the scorers take"] * (least > 0) + ["the critic takes"] * (critic > 0))
        where, hint = "scorers" if least else "pools", "lower their devices, or raise nodes"
        found.append(_Where(document)(f"{who} all {cluster.devices} devices of the cluster", hint, where))
    elif cluster is not None:
        found += _no_split(job, cluster.devices - least - critic, _Where(document, "pools"))
    return found


def _no_split(job: Job, left: int, problem: _Where) -> list[Problem]:
    """Devices of rollout and trainer that none of the job's modes can give: apart too many, shared not the same."""
    pools = [job.pool(role) for role in ("rollout", "trainer")]
    rollout, trainer = (pool.devices or () for pool in pools)
    least = [min(devices or (1,)) for devices in (rollout, trainer)]
    if any(pool.cluster for pool in pools) or max(least) > left:  # said of the pool that asks for more than there are
        return []
    apart, shared = sum(least) <= left, not (rollout and trainer) or bool({*rollout} & {*trainer})
    if any(shared if MODES[mode].shares_devices else apart for mode in job.modes):
        return []
    mode, both = job.modes[0], f"rollout {least[0]} and trainer {least[1]}"
    if MODES[mode].shares_devices:
        hint = "state one number for both, or a mode that keeps them apart (async)"
        return [problem(f"{mode} shares devices, and they differ: {both}", hint)]
    words = f"{mode} keeps {both} devices apart: {sum(least)}, where there are {left}"
    return [problem(words, "lower devices, raise nodes, or take a mode that shares them (colocated)")]


def _without_price(job: Job, cluster: Cluster | None, engines: Hardware | None, problem: _Where) -> list[Problem]:
    """USD where the devices of a cluster have no price."""
    found, pool = [], job.pool("rollout")
    add = "add price: '2.50 USD/h' (per device) to the"
    if job.price is None and (cluster is None or cluster.price is None):
        found.append(problem("USD without a price", f"{add} job or cluster", "objective"))
    if pool.cluster is not None and (engines is None or engines.cluster.price is None):
        found.append(
            problem(f"USD without a price of {pool.cluster}", f"{add} rollout pool or its cluster", "objective")
        )
    return found


def _task_contradictions(job: Job, task: Task, problem: _Where) -> list[Problem]:
    """What a task leaves open though the answer would then be no choice at all."""
    found = []
    if len(task.max_response_tokens) > 1 and job.limits.truncated_fraction is None:
        found.append(
            problem(
                f"task {task.name} leaves max_response_tokens open, which changes what is learnt",
                "state limits.truncated_fraction, the most responses that may be cut",
                "max_response_tokens",
            )
        )
    if max(task.over_provision) > 1 and job.limits.staleness < 1:
        found.append(
            problem(
                f"task {task.name} opens partial rollouts, which train on tokens of earlier policy versions",
                "state limits.staleness of at least 1",
                "over_provision",
            )
        )
    opened = [n for n in ("prompts_per_step", "group_size") if len(getattr(task, n)) > 1]
    if opened and not OBJECTIVES[job.objective.minimize].per_token:
        found.append(
            problem(
                f"task {task.name} leaves {' and '.join(opened)} open: the smallest batch has the shortest rl_step",
                "minimize token_time (device-seconds per million trained tokens), or pin them",
                opened[0],
            )
        )
    return found


def _without_unit(
    job: Job, role: Literal["rollout", "trainer"], device: Device, document: Document | None
) -> list[Problem]:
    """Types of a pool's values that its device has no unit for, those of a pool that states none included."""
    found = []
    settings = job.pool(role).settings
    for name in ("rollout_dtype", "kv_dtype") if role == "rollout" else ("compute_dtype",):
        stated = getattr(settings, name) or ()
        place = next(
            (("pools", n, "settings", name) for n, pool in enumerate(job.pools) if pool.role == role), ("pools",)
        )
        problem, unsaid = _Where(document, *place), "" if stated else f"{name} of the {role} is bf16 unless stated: "
        words = (stated,) if isinstance(stated, str) else stated
        for word in words or (("bf16",) if name != "kv_dtype" else ()):
            if (lacking := _lacking(word, name, device)) is not None:
                lacks, hint = lacking
                verb = "reads" if name == "kv_dtype" else "multiplies"
                found.append(problem(f"{unsaid}{device.name} {verb} no {word}: it has no unit for {lacks}", hint))
    return found


def with_units(job: Job, device: Device) -> Job:
    """The job without those of several precisions of its engines that their device has no unit for.

    What is stated alone stays, to be refused by its name, and so do several of which none is left.
    """
    pool = job.pool("rollout")
    given = {name: getattr(pool.settings, name) or () for name in ("rollout_dtype", "kv_dtype")}
    able = {name: tuple(w for w in words if _lacking(w, name, device) is None) for name, words in given.items()}
    kept = {name: words for name, words in able.items() if words and words != given[name]}
    if not kept:
        return job
    narrowed = pool.model_copy(update={"settings": pool.settings.model_copy(update=kept)})
    pools = tuple(narrowed if each.role == "rollout" else each for each in job.pools)
    return job.model_copy(update={"pools": pools})


def _lacking(word: str, name: str, device: Device) -> tuple[str, str] | None:
    """(what its unit would be for, what to state instead) of a dtype, stated as ``name``, that a device does not have.

    Engines keep weights and caches in 8 bits on some devices that multiply none, and widen them as they read
    (`Device.reads_fp8`); a trainer has no such kernels. The scales of nvfp4 (8-bit floats, one for 16 values) are
    NVIDIA's alone.
    """
    dtype = DTYPES.get(word)
    if dtype is None:
        return None
    cached, trained = name == "kv_dtype", name == "compute_dtype"
    if word == "bf16" and device.peaks.bf16 is None and not cached:  # an unquantised cache is as the weights are
        return (
            "sixteen bits with the range of fp32",
            f"state {name}: fp16 in the pool's settings, where the framework has it",
        )
    if dtype.peak == "fp8" and device.peaks.fp8 is None and (trained or not device.reads_fp8):
        return "eight bits", "leave it out" + (": its trainer runs bf16" if trained and device.peaks.bf16 else "")
    if cached:
        return None
    if "fp4" in (dtype.peak, dtype.unit) and device.peaks.fp4 is None:
        if dtype.unit:
            return "scales of 32 values", "fp8, or fp8_block, where it has that"
        return "four bits", "fp8 where it has that; int4_wo or mxfp4 keep the weights alone in four bits"
    if word == "nvfp4" and device.vendor != "NVIDIA":
        return "its scales of 16 values", "w4a4_mxfp4 has scales of 32"
    return None


def _pool_contradictions(job: Job, pool: PoolSpec, cluster: Cluster | None, problem: _Where) -> list[Problem]:
    """What a pool states that nobody has, or that others contradict."""
    found = []
    for name in (each.name for each in ATTRIBUTES if each.unit == "dtype"):
        stated = getattr(pool.settings, name) or ()
        for word in (stated,) if isinstance(stated, str) else stated:
            if word not in DTYPES:
                longer = next((f"did you mean {name}?" for name in DTYPES if name.startswith(word)), None)
                hint = longer or did_you_mean(word, DTYPES) or f"one of {', '.join(DTYPES)}"
                found.append(problem(f"there is no dtype named {word!r}", hint, "settings", name))
            elif name != "rollout_dtype" and DTYPES[word].weights_alone:
                what = "nothing is cached in it" if name == "kv_dtype" else "nothing is computed in it"
                found.append(problem(f"{word} is a type of weights alone: {what}", "fp8, or bf16", "settings", name))
    backend = pool.settings.backend
    if pool.role != "rollout" and backend is not None and backend not in job.trainer_backends:
        found.append(
            problem(
                f"the {pool.role} pool's backend {backend!r} is none of the job's trainer_backends",
                f"one of {', '.join(job.trainer_backends)}",
                "settings",
                "backend",
            )
        )
    if pool.settings.optimizer == "muon" and pool.settings.lora_rank:
        found.append(
            problem("muon is for whole matrices, not for adapters", "leave out optimizer or lora_rank", "settings")
        )
    if pool.settings.optimizer == "muon" and pool.layout.offload and set(pool.layout.offload) <= {"optimizer", "both"}:
        words = "muon's products are no work for the host that the optimizer is offloaded to"
        found.append(problem(words, "offload: none, or optimizer: adam", "layout", "offload"))
    if pool.settings.shared_prefix:
        for name in ("context_parallel", "ulysses"):
            if min(getattr(pool.layout, name) or (1,)) > 1:
                words = f"shared_prefix over {name}: no rank of it knows who shares a prompt with whom"
                found.append(problem(words, f"{name}: 1, or leave shared_prefix out", "layout", name))
    if (pool.settings.lora_jobs or 1) > 1 and not pool.settings.lora_rank:
        found.append(problem("several lora_jobs train adapters", "state lora_rank", "settings", "lora_jobs"))
    found += [problem(message, hint) for message, hint in _otherwise(job, pool)]
    if cluster is not None and pool.cluster is None and pool.devices and min(pool.devices) > cluster.devices:
        found.append(
            problem(
                f"pool {pool.role} asks for {min(pool.devices)} devices, the cluster has {cluster.devices}",
                "lower devices or raise nodes",
                "devices",
            )
        )
    return found


def incapable(job: Job, trainers: Sequence[TrainerStack], document: Document | None) -> list[Problem]:
    """Trainer settings that the job states and none of its backends has."""
    settings = job.pool("trainer").settings
    index = next((i for i, pool in enumerate(job.pools) if pool.role == "trainer"), 0)
    asked = (
        ("packing", settings.packing is True, "packing"),
        ("lora_rank", settings.lora_rank is not None, "lora"),
        ("first_stage_layers", settings.first_stage_layers is not None, "uneven_ends"),
        ("last_stage_layers", settings.last_stage_layers is not None, "uneven_ends"),
    )
    found = []
    if (settings.lora_jobs or 1) > 1 and trainers and not any(each.framework.adapters for each in trainers):
        merged = f"{trainers[0].framework.framework} merges adapters into the weights that engines get"
        found.append(Problem(f"{merged}: {settings.lora_jobs} lora_jobs cannot share them", suggestion="lora_jobs: 1"))
    for name, stated, trait in asked:
        if stated and trainers and not any(getattr(each.calibration.capability, trait) for each in trainers):
            message = f"{', '.join(each.backend for each in trainers)} has no {name}"
            hint = "leave it out, or name another of trainer_backends"
            where = ("pools", index, "settings", name)
            found.append(document.problem(where, message, hint) if document else Problem(message, suggestion=hint))
    return found


def untold(
    job: Job, turns: Mapping[str, float], trainers: Sequence[TrainerStack | None], document: Document | None
) -> list[Problem]:
    """What no mechanism tells: readers of prompts beside a trainer that runs on, where turns read again what grew, and
    partial rollouts of turns. ``turns`` : the mean of tasks by their names, where it is known."""
    several = any(mean > 1 for mean in turns.values())
    in_flight = any(each.framework.in_flight_updates for each in trainers if each is not None)
    ahead = [mode for mode in job.modes if MODES[mode].runs_ahead]
    problem, found = _Where(document), []
    if lent := untold_lending(job, several, in_flight):
        found.append(problem(lent, LENT_HINT, "pools"))
    elif several and ahead and any(job.pool("rollout").settings.prefill_replicas or ()):
        words = f"prefill_replicas with several turns is not predicted in modes that run ahead ({', '.join(ahead)})"
        found.append(problem(words, "leave one of them out", "modes"))
    for index, task in enumerate(job.tasks):
        if turns.get(task.name, 1.0) > 1 and max(task.over_provision or (1.0,)) > 1:
            words = f"partial rollouts of task {task.name}, which takes several turns, are not predicted"
            found.append(problem(words, "leave over_provision out", "tasks", index, "over_provision"))
    return found
