"""What a framework runs where the user states model, devices and batch, and nothing that is there for speed or memory.

The keys for those are written as an export would write them; every other key keeps the default of its version, as an
import would read it. Numerics that the job states (dtypes, LoRA) are what is trained, and stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from rlperf.errors import RlperfError
from rlperf.frameworks.adapter import Adapter, Source, framework_facts, read_run
from rlperf.frameworks.fields import Target
from rlperf.frameworks.imports import UnknownKey, check_keys
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.registry import adapter_of, split_name
from rlperf.frameworks.run import BatchFacts, RolloutRun, Run, TrainerRun
from rlperf.frameworks.run_of import to_job
from rlperf.plan.answer.baseline import Defaults, DefaultsOf
from rlperf.plan.question.context import Context
from rlperf.sim.rl_step.demand import Batch
from rlperf.sim.rl_step.site import TrainerStack
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.pool import PoolSpec

PERFORMANCE = ("trainer", "rollout")
"""Groups of a run that are there for speed or memory."""
CHOSEN = "backend"
"""Of these, what a user chooses first: which trainer and which engine."""
NUMERICS = ("rollout_dtype", "kv_dtype", "compute_dtype", "lora_rank")


def defaults_of(context: Context) -> DefaultsOf:
    """The defaults of a job's framework, by architecture, batch and number of devices."""
    job, devices_per_node = context.job, context.cluster.devices_per_node
    name, asked = split_name(job.framework)
    adapter = adapter_of(name)
    version = key_table(adapter.name).version(asked)
    trainers = {trainer.backend: trainer for trainer in context.trainers}

    @cache
    def defaults(architecture: str, batch: Batch, devices: int) -> Defaults:
        return _defaults(job, trainers, adapter, version, architecture, batch, devices, devices_per_node)

    return defaults


def _defaults(
    job: Job, trainers: Mapping[str, TrainerStack], adapter: Adapter, version: str, architecture: str, batch: Batch,
    devices: int, devices_per_node: int,
) -> Defaults:  # fmt: skip
    facts = framework_facts(adapter.name, version)
    title = f"{adapter.name} {version}"
    usual = (name for native in facts.backends for name, trainer in trainers.items() if trainer.keys == native)
    backend = next(usual, next(iter(trainers)))
    keys, together = trainers[backend].keys, trainers[backend].framework.training.batching == "all"
    mode: Mode = next((mode for mode in facts.modes if MODES[mode].shares_devices), next(iter(facts.modes)))
    if not MODES[mode].shares_devices:
        return Defaults.unknown(title, f"it has no colocated mode, and how to split {devices} devices is for the user")
    run = _stated(job, keys, architecture, batch, devices, devices_per_node)
    try:
        run, unknown = _read(adapter, version, keys, run)
        names = run.names(None)
        broken = facts.refused(names, run.trainer.backend or "", about=("batch",))
        if said := [rule.said(names) for rule in facts.rules if rule.id in broken and rule.stage != "never"]:
            return Defaults.unknown(title, said[0])
        run = replace(run, trainer=_cut(run, together))
        made = to_job(run, framework=job.framework, cluster=job.cluster, workload="math")
    except (RlperfError, ValueError, TypeError, KeyError) as error:
        return Defaults.unknown(title, str(error))
    notes = [f"{key.key} is no key of it" for key in unknown]
    pools = tuple(_pool(job, pool, devices, backend) for pool in made.pools)
    opened = job.pool("rollout").settings
    for name, dtypes in (("rollout_dtype", opened.rollout_dtype), ("kv_dtype", opened.kv_dtype)):
        if dtypes is not None and len(dtypes) > 1:
            notes.append(f"its {name} is {_one_of(dtypes)}: the job leaves it open")
    if run.trainer.microbatch_stated is False:
        notes.append("it states no microbatch: one sequence")
    if run.rollout.max_running is None:
        notes.append("its engine's own max_running is not known: the best taken")
    return Defaults(title, "colocated", backend, pools, tuple(notes))


def _stated(job: Job, backend: str, architecture: str, batch: Batch, devices: int, devices_per_node: int) -> Run:
    """What the user has to state, in rlperf's words; degrees are 1 where nothing else is known."""
    per_node = min(devices, devices_per_node)
    return Run(
        architecture=architecture,
        algorithm=job.algorithm,
        reference=job.reference,
        devices=devices,
        nodes=-(-devices // per_node),
        devices_per_node=per_node,
        batch=BatchFacts(
            prompts_per_step=batch.prompts,
            group_size=batch.group_size,
            mini_batch=batch.mini_batch,
            max_prompt_tokens=batch.max_prompt_tokens,
            max_response_tokens=batch.max_response_tokens,
        ),
        trainer=TrainerRun(devices=devices, backend=backend),
        rollout=RolloutRun(devices=devices, backend=job.engine.split("==")[0]),
    ).completed()


def _read(adapter: Adapter, version: str, backend: str, stated: Run) -> tuple[Run, tuple[UnknownKey, ...]]:
    """The run that the framework makes of the stated keys alone."""
    adapted, _ = adapter.adapt(stated, version)
    emission = adapter.emit(adapted, Target(key_table(adapter.name), version, backend))
    left_out = {
        key
        for entry in adapter.fields
        for key in entry.keys
        if entry.at.group in PERFORMANCE and entry.at.name != CHOSEN
    }
    keys = {setting.key: setting.value for setting in emission.settings if setting.key not in left_out}
    source = Source(keys, entry=emission.entry, bases=emission.base)
    target = adapter.target(source, version)
    run, _ = read_run(adapter, source, target)
    run = replace(run, batch=stated.batch)
    return run, check_keys(source, target)[0]


def _cut(run: Run, together: bool) -> TrainerRun:
    """The trainer with its microbatches: by tokens as stated, else by count.

    Where the bins of all ranks are dealt out ``together``, a count is the tokens of as many longest sequences.
    """
    trainer, longest = run.trainer, run.batch.longest_tokens
    if trainer.token_budget is not None:
        return trainer.having(microbatch=None, scoring_microbatch=None)
    scored = trainer.scoring_microbatch or trainer.samples
    if together:
        return trainer.having(token_budget=trainer.samples * longest, scoring_token_budget=scored * longest)
    return trainer.having(microbatch=trainer.samples, scoring_microbatch=scored, scoring_token_budget=None)


def _one_of(dtypes: tuple[str, ...]) -> str:
    """Of the dtypes that a job leaves open the one that frameworks start from."""
    return "bf16" if "bf16" in dtypes else dtypes[0]


def _pool(job: Job, pool: PoolSpec, devices: int, backend: str) -> PoolSpec:
    """A pool of the defaults on the devices that are asked for, with the job's numerics."""
    asked = job.pool(pool.role).settings
    numerics = {name: getattr(asked, name) for name in NUMERICS if getattr(asked, name) is not None}
    numerics |= {name: (_one_of(value),) for name, value in numerics.items() if isinstance(value, tuple)}
    numerics |= {} if pool.role == "rollout" else {"backend": backend}
    counted = pool.layout.microbatch if pool.settings.token_budget is None else None
    return pool.model_copy(
        update={
            "devices": (devices,),
            "layout": pool.layout.model_copy(update={"data_parallel": None, "microbatch": counted}),
            "settings": pool.settings.model_copy(update=numerics),
        }
    )
