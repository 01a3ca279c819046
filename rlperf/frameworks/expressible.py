"""What the files of a framework can say of a job, asked before anything is planned: a plan assumes nothing else.

What a job leaves open is narrowed to what a file can state (modes, trainers, precisions), what has no key is what the
framework runs, and what a job states though no file can say it is named, for `rlperf plan` to refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rlperf.cost.dtypes import DTYPES
from rlperf.cost.stage_ends import stage_ends
from rlperf.errors import ExportError, Problem, SpecError
from rlperf.frameworks.adapter import framework_facts, states
from rlperf.frameworks.fields import Target
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.old_policy import in_its_files
from rlperf.frameworks.readback import USUAL
from rlperf.frameworks.registry import FRAMEWORKS, adapter_of, split_name
from rlperf.frameworks.run import Ref, RolloutRun, Run, TrainerRun, ref
from rlperf.frameworks.scorer_keys import Jobs, displaced_scorers, homeless_scorers, unsayable_scorers, ways_of
from rlperf.plan.question.context import engine_named, keys_of, with_trainers
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.specs.keyless_settings import running
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.pool import TOLD, PoolSettings, PoolSpec
from rlperf.specs.profiles import load_architecture, load_cluster, load_device
from rlperf.specs.releases import beyond, versions_of
from rlperf.specs.rl_calibration import load_framework_calibration
from rlperf.specs.trainer_calibration import load_trainer, trainer_names

PARTIAL, ELASTIC = ref("batch.over_provision"), ref("rollout.elastic")
IN_FLIGHT = ref("run.in_flight")
STAGE_ENDS = ("first_stage_layers", "last_stage_layers")
NOWHERE = ("lora_jobs",)
"""Settings that no framework has a key for: predicted, and never planned."""


def as_framework_runs(job: Job, facts: FrameworkFacts, folder: Path | None = None) -> Job:
    """The job as its framework can run it: its own engine where none is named; modes, trainers, dtypes that it has."""
    job = with_trainers(job, folder)
    natives = native_backends(job.trainer_backends, facts, folder)
    known = [(name, own) for name, own in zip(job.trainer_backends, natives, strict=True) if own in facts.backends]
    able = [(name, own) for name, own in known if _can_say(job, facts, own, folder)] or known
    backends = tuple(name for name, _ in able) or job.trainer_backends
    found = job.model_copy(update={"trainer_backends": backends})
    if "engine" not in job.model_fields_set and job.engine not in facts.engines:
        found = found.model_copy(update={"engine": facts.engines[0]})
    found = _with_its_modes(found, facts)
    if found.old_policy is None and (said := in_its_files(facts, found.modes)) is not None:
        found = found.model_copy(update={"old_policy": said})
    found = _with_sayable_placements(_without_unsayable(found, facts, folder), facts)
    return _counting(_refilling(_with_keyless_settings(found, facts, folder), facts), facts)


def modes_words(asked: Job, taken: Job) -> tuple[str, ...]:
    """What `as_framework_runs` made of a job's modes and its staleness, in words; none where it left them."""
    words = []
    fresh = ", ".join(mode for mode in taken.modes if mode not in asked.modes)
    gone = [mode for mode in asked.modes if mode not in taken.modes]
    renamed = [mode for mode in gone if fresh and MODES[mode].lag is None]
    if renamed:
        theirs = f"in files of {taken.framework} that is {fresh}"
        words.append(f"{', '.join(renamed)} at staleness {asked.limits.staleness}: {theirs}")
    if lacking := ", ".join(mode for mode in gone if mode not in renamed):
        critic = " with a critic where the job has it" if taken.algorithm == "ppo" else ""
        facts = framework_facts(*split_name(taken.framework))
        own = critic and not taken.pool("critic").apart and facts.critic_apart and facts.with_critic(gone, apart=True)
        hint = f" (a critic pool with placement: own runs {', '.join(own)})" if own else ""
        words.append(f"{taken.framework} does not run {lacking}{critic}: not planned{hint}")
    if taken.limits.staleness != asked.limits.staleness:
        limit, least = asked.limits.staleness, taken.limits.staleness
        words.append(f"{taken.framework} has no key for a staleness of {limit}: planned with {least}")
    return tuple(words)


def precision_words(asked: Job, taken: Job) -> tuple[str, ...]:
    """Which of several precisions and drafts the framework has no key or the engines' device no unit for, in words."""
    words, device = [], taken.pool("rollout").cluster or taken.cluster
    for name in ("rollout_dtype", "kv_dtype", "speculation"):
        given, kept = (getattr(job.pool("rollout").settings, name) or () for job in (asked, taken))
        if gone := ", ".join(word for word in given if word not in kept):
            unit = f" or {device} no unit" if name.endswith("_dtype") else ""
            words.append(f"{name} {gone}: not planned, as {taken.framework} has no key{unit} for it")
    return tuple(words)


def native_backends(backends: Sequence[str], facts: FrameworkFacts, folder: Path | None = None) -> tuple[str, ...]:
    """For each backend the one whose keys the framework has for it; names that nobody knows are reported elsewhere."""
    known = trainer_names(folder)

    def native(name: str) -> str:
        try:
            return keys_of(load_trainer(name, folder=folder), facts.name) if name in known else facts.backends[0]
        except SpecError:  # what is wrong with its file is reported where the job names it
            return facts.backends[0]

    return tuple(map(native, backends))


def _with_its_modes(job: Job, facts: FrameworkFacts) -> Job:
    """The job with the modes of its framework, each as its files say it.

    Two words for one file are one mode: one batch ahead is ``one_step_off``, whatever counts the batches. Where no key
    bounds the staleness, it is what the file reads back as.
    """
    adapter, version = adapter_of(facts.name), facts.version
    modes: dict[Mode, None] = {}
    staleness, known = job.limits.staleness, tuple(mode for mode in job.modes if mode in facts.modes)
    if job.algorithm == "ppo":
        known = facts.with_critic(known, apart=job.pool("critic").apart) or known
    for mode in known:
        if MODES[mode].lag is None:
            trainer, engine = TrainerRun(backend=facts.backends[0]), RolloutRun(backend=facts.engines[0])
            run = Run(mode=mode, staleness=job.limits.staleness, trainer=trainer, rollout=engine)
            try:
                said = adapter.adapt(run, version)[0]
            except ExportError:  # the version lacks it, which its facts say
                said = run
            staleness, mode = min(staleness, said.staleness), said.mode if said.mode in facts.modes else mode
        modes[mode] = None
    limits = job.limits.model_copy(update={"staleness": staleness})
    return job.model_copy(update={"modes": tuple(modes) or job.modes, "limits": limits})


def _with_keyless_settings(job: Job, facts: FrameworkFacts, folder: Path | None) -> Job:
    """The job with what its framework runs where it has no key: a plan assumes nothing that its files cannot say.

    What its modes run otherwise each asks alone (`Context.of`).
    """
    pools = {pool.role: pool for pool in job.pools}
    for role in dict.fromkeys(fixed.role for fixed in facts.runs):
        pool = pools.get(role) or PoolSpec(role=role)
        theirs = running(facts.runs, role, job.modes, _on_small_devices(job, facts, folder))
        given = {name: values for name, values in theirs.items() if len(values) == 1}
        stated = PoolSettings.model_validate({name: value for name, (value,) in given.items()})
        fresh = {name: getattr(stated, name) for name in given if name not in pool.settings.stated()}
        pools[role] = pool.model_copy(update={"settings": pool.settings.model_copy(update=fresh)})
    return job.model_copy(update={"pools": tuple(pools.values())})


def _on_small_devices(job: Job, facts: FrameworkFacts, folder: Path | None) -> bool | None:
    """Whether the engine counts the rollout's devices as small; None where nothing asks, or names lead nowhere."""
    if all(fixed.small_devices is None for fixed in facts.runs):
        return None
    pool = job.pool("rollout")
    try:
        device = load_device(load_cluster(pool.cluster or job.cluster, folder=folder).device, folder)
        return load_engine_calibration(engine_named(job)[0], folder=folder).counts_as_small(device)
    except SpecError:  # reported where the job is resolved
        return None


def _refilling(job: Job, facts: FrameworkFacts) -> Job:
    """The job with generation batches of its prompts where filtering draws whole batches anew; of modes each asks.

    Where nothing is dropped, no more than what is trained on is rolled out.
    """
    if facts.refills == "none" and job.algorithm == "dapo":
        return _of_its_prompts(job, "generated_prompts")
    mixed = job.sharing == "mixed" and len(job.tasks) > 1  # whose generation batches are of several tasks
    ahead = any(MODES[mode].runs_ahead for mode in job.modes)
    if facts.refills != "batches" or job.algorithm != "dapo" or ahead or mixed:
        return job
    return _of_its_prompts(job, "generation_batch")


def _of_its_prompts(job: Job, name: str) -> Job:
    """The job whose tasks of one batch size have it for a field that they leave open, too."""
    tasks = (
        task.model_copy(update={name: task.prompts_per_step[0]})
        if getattr(task, name) is None and len(task.prompts_per_step) == 1
        else task
        for task in job.tasks
    )
    return job.model_copy(update={"tasks": tuple(tasks)})


COUNTS = (1, 2, 4, 8, 16)
"""Sequences of a microbatch that are tried where a framework takes no token budget."""


def _counting(job: Job, facts: FrameworkFacts) -> Job:
    """The job with microbatches counted where files state no tokens: of a release, or on a trainer's own devices.

    What the job states of its microbatches stays; of modes of both kinds each asks alone (`Context.of`).
    """
    trainer = job.pool("trainer")
    apart = facts.counts_apart and not any(MODES[mode].shares_devices for mode in job.modes)
    counts = apart or (facts.counts and facts.version in versions_of(facts.counts, facts.versions))
    if not counts or trainer.settings.token_budget is not None or trainer.layout.microbatch is not None:
        return job
    counted = trainer.model_copy(update={"layout": trainer.layout.model_copy(update={"microbatch": COUNTS})})
    others = tuple(pool for pool in job.pools if pool.role != "trainer")
    return job.model_copy(update={"pools": (*others, counted)})


def _without_unsayable(job: Job, facts: FrameworkFacts, folder: Path | None) -> Job:
    """The job with what its framework runs where it leaves a setting open that no key states."""
    pools, tasks = [], job.tasks
    if not _says(job, facts, PARTIAL):
        waits = {"over_provision": (1.0,)}
        tasks = tuple(task.model_copy(update=waits) if 1.0 in task.over_provision else task for task in tasks)
    for pool in job.pools:
        kept = {name: able for name, able, _ in _keyless(job, facts, pool, folder) if able}
        pools.append(pool.model_copy(update={"settings": pool.settings.model_copy(update=kept)}) if kept else pool)
    return job.model_copy(update={"pools": tuple(pools), "tasks": tasks})


def _together(job: Job) -> set[bool]:
    """Whether all roles are on the trainer's devices, in the modes that it leaves open."""
    takes_turns = job.algorithm == "ppo" and not job.pool("critic").apart
    return {takes_turns or MODES[mode].shares_devices for mode in job.modes}


def _with_sayable_placements(job: Job, facts: FrameworkFacts) -> Job:
    """The job with its scorers where files have keys for them; of one that files know nowhere, as it was."""
    modes = _together(job)
    targets = [Target(key_table(facts.name), facts.version, backend) for backend in facts.backends]
    found = []
    for scorer in job.scorers:
        ways = [ways_of(scorer.kind, facts.name, target, together=together) for target in targets for together in modes]
        said = {way.placement for each in ways for way in each}
        kept = tuple(placement for placement in scorer.placement if placement in said) or scorer.placement
        stated = {name for each in ways for way in each for name in way.keys.values()}
        layout = scorer.layout
        if not layout.pipeline_parallel and "max_running" in stated and "pipeline_parallel" not in stated:
            layout = layout.model_copy(update={"pipeline_parallel": (1,)})  # its engines have none either
        if (kept, layout) != (scorer.placement, scorer.layout):
            scorer = scorer.model_copy(update={"placement": kept, "layout": layout})
        found.append(scorer)
    return job.model_copy(update={"scorers": tuple(found)})


def _can_say(job: Job, facts: FrameworkFacts, backend: str, folder: Path | None) -> bool:
    """Whether files for one trainer can say what the job states of it: some keys are one trainer's alone."""
    pool = job.pool("trainer")
    return all(able for _, able, _ in _keyless(job, facts, pool, folder, (backend,)))


def frameworks_with(key: str, value: object = None) -> tuple[str, ...]:
    """Frameworks whose newest version has a key for a setting of a pool (that holds ``value``), or a mode.

    >>> "trl" in frameworks_with("rollout.speculation"), "verl" in frameworks_with("rollout.speculation")
    (False, True)
    """
    found = []
    for name in FRAMEWORKS:
        facts = framework_facts(name)
        if "." not in key:
            able = key in facts.modes
        else:
            adapter = adapter_of(name)
            able = any(states(adapter, None, engine, ref(key), facts.backends, value) for engine in facts.engines)
        if able:
            found.append(name)
    return tuple(found)


def unsayable(job: Job, facts: FrameworkFacts, folder: Path | None = None) -> list[Problem]:
    """Settings that a job states and no file of its framework can, where the framework runs something else."""
    found, table, asked = [], key_table(facts.name), split_name(job.framework)[1]
    if beyond(asked, table.versions) < 0:
        known = f"known: {', '.join(table.versions)}"
        found.append(Problem(f"{facts.name} {asked} is older than every release that is known", suggestion=known))
    for pool in job.pools:
        for name, able, usual in _keyless(job, facts, pool, folder):
            given = getattr(pool.settings, name)
            if not able:
                said = ", ".join(map(str, given)) if isinstance(given, tuple) else given
                message = f"{facts.name} {facts.version} has no key for {pool.role}.{name} ({said})"
                if why := facts.unwritten.get(f"{pool.role}.{name}"):
                    message = f"rlperf writes no {pool.role}.{name} ({said}) for {facts.name} {facts.version}: {why}"
                runs = "" if usual == (None,) else f", as it runs {' or '.join(map(str, usual))}"
                other = _said_elsewhere(facts, f"{pool.role}.{name}", given[0] if isinstance(given, tuple) else given)
                if name in NOWHERE:
                    other = "as no framework has a key; `rlperf predict` tells it"
                hint = f"its files could not say it: leave it out{runs}, {other}"
                found.append(Problem(message, suggestion=hint))
    for task in job.tasks:
        rolled = task.generated_prompts or 0
        if facts.refills == "none" and job.algorithm == "dapo" and rolled > max(task.prompts_per_step):
            message = f"{facts.name} drops no groups: all that task {task.name} rolls out are trained on, not {rolled}"
            found.append(Problem(message, suggestion="leave generated_prompts out, or name verl, nemo_rl or slime"))
        if 1.0 not in task.over_provision and not _says(job, facts, PARTIAL):
            asked_for = ", ".join(f"{each:g}" for each in task.over_provision)
            message = f"{facts.name} {facts.version} has no key for partial rollouts (over_provision {asked_for})"
            hint = "its rl_steps wait for every response: leave it out, or name slime or miles"
            found.append(Problem(message, suggestion=hint))
    targets = [Target(table, facts.version, each) for each in facts.backends]
    found += unsayable_scorers(job.scorers, facts.name, targets)
    found += homeless_scorers(job.scorers, facts.name, targets, _together(job))
    found += _unsayable_weights(job, facts)
    spot = job.run.spot if job.run else None
    if spot is not None and spot.pools == "rollout" and not _says(job, facts, ELASTIC):
        message = (
            f"run.spot: {facts.name} {facts.version} has no key for a rollout that goes on without nodes that leave"
        )
        hint = "its run stops and starts again, so state spot: {pools: all}; slime goes on"
        found.append(Problem(message, suggestion=hint))
    return found


def _said_elsewhere(facts: FrameworkFacts, key: str, value: object) -> str:
    """Where a setting has a key: with the framework's other engine, in its newest version, or in other frameworks."""
    adapter = adapter_of(facts.name)
    theirs = [each for each in facts.engines if states(adapter, facts.version, each, ref(key), facts.backends, value)]
    if theirs:
        return f"or state engine: {' or '.join(theirs)}, for which it has one"
    newest = {facts.name: f"{facts.name}=={key_table(facts.name).versions[-1]}"}
    elsewhere = ", ".join(newest.get(each, each) for each in frameworks_with(key, value))
    return f"or name one that has: {elsewhere}" if elsewhere else "or name another framework"


def _unsayable_weights(job: Job, facts: FrameworkFacts) -> list[Problem]:
    """Weights that arrive otherwise than the framework has it, where engines run ahead and no key says so."""
    asked, ahead = job.in_flight_updates, any(MODES[mode].runs_ahead for mode in job.modes)
    if asked is None or not ahead or _says(job, facts, IN_FLIGHT):
        return []
    own = load_framework_calibration(job.framework).in_flight_updates
    if asked == own:
        return []
    does = "take new weights while they generate" if own else "generate nothing while weights arrive"
    message = f"rlperf writes no in_flight_updates ({str(asked).lower()}) for {facts.name} {facts.version}"
    return [Problem(message, suggestion=f"leave it out, as its engines {does}, or name nemo_rl")]


def displaced(job: Job, facts: FrameworkFacts, *, turns: bool) -> list[Problem]:
    """Scorers that files of the job leave no place for, of a job whose tasks have one turn or several."""
    had: dict[Jobs, bool] = {"dapo": job.algorithm == "dapo", "turns": turns}
    jobs = [name for name, here in had.items() if here]
    targets = [Target(key_table(facts.name), facts.version, each) for each in facts.backends]
    return displaced_scorers(job.scorers, facts.name, targets, jobs)


def _says(job: Job, facts: FrameworkFacts, at: Ref) -> bool:
    """Whether some key of the job's framework and engine states a field of a run."""
    return states(adapter_of(facts.name), facts.version, engine_named(job)[0].split("==")[0], at, facts.backends)


def check_algorithm(run: Run, facts: FrameworkFacts) -> None:
    """Refuse what a framework has no keys for, in the words of its facts.

    Raises
    ------
    ExportError : an algorithm that is not planned for it either
    """
    if run.algorithm in facts.unplanned:
        nearest = f"algorithm: {' or '.join(facts.algorithms)}, or verl / OpenRLHF for {run.algorithm}"
        what = f"rlperf writes no {run.algorithm}{facts.why_not(run.algorithm)}"
        raise ExportError(what, facts.name, {"nearest": nearest})


def _keyless(
    job: Job, facts: FrameworkFacts, pool: PoolSpec, folder: Path | None, backends: Sequence[str] = ()
) -> list[tuple[str, tuple[Any, ...], tuple[Any, ...]]]:
    """(name, alternatives that files can say, what the framework runs) of settings of which no key says them all.

    Of several values each is asked for: a key may have words for some alone. What runs anyway needs no key.
    """
    if pool.role not in ("rollout", "trainer"):
        return []
    runs = running(facts.runs, pool.role, job.modes, _on_small_devices(job, facts, folder))
    adapter, engine = adapter_of(facts.name), engine_named(job)[0].split("==")[0]
    keys = backends or facts.backends
    found = []
    for name in pool.settings.stated():
        if name in ("backend", *TOLD):
            continue
        at, given, usual = ref(f"{pool.role}.{name}"), getattr(pool.settings, name), runs.get(name, (USUAL[name],))
        if name == "scoring_token_budget" and pool.settings.token_budget:
            usual = pool.settings.token_budget[:1]  # as in training, unless a key says otherwise
        if name in STAGE_ENDS:
            usual = (*usual, *(ends[STAGE_ENDS.index(name)] for ends in _own_ends(job, pool, folder)))
        values = given if isinstance(given, tuple) else (given,)
        if name.endswith("_dtype") and not DTYPES.keys() >= set(values):
            continue  # no type at all, which `rlperf.plan.question.contradictions` reports
        able = tuple(v for v in values if v in usual or states(adapter, facts.version, engine, at, keys, v))
        if able != values:
            found.append((name, able, usual))
    return found


def _own_ends(job: Job, pool: PoolSpec, folder: Path | None) -> list[tuple[int | None, int | None]]:
    """Layers of both ends of a pipeline that nobody states, of every degree that the pool states.

    Where layers do not divide, a plan states them, and a framework without a key spreads what is left over itself.
    """
    try:
        layers = load_architecture(job.architecture, folder=folder, like=job.like).layers
    except SpecError:  # reported where the job is resolved
        return []
    degrees = product(pool.layout.pipeline_parallel or (), pool.layout.virtual_pipeline or (1,))
    return [stage_ends(layers, stages, None, None, chunks) for stages, chunks in degrees]
