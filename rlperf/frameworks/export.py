"""Export: a Plan (or a Job with pinned pools) as files that a framework of a named version loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlperf.errors import ExportError, SpecError
from rlperf.frameworks.adapter import Adapter, Emission, Limitation, Source, framework_facts, keyless_values, read_run
from rlperf.frameworks.carried import Carried, as_imported, carried_keys
from rlperf.frameworks.expressible import check_algorithm
from rlperf.frameworks.fields import Setting, Target
from rlperf.frameworks.hub import hub_name
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.phases import checkpoints, in_order
from rlperf.frameworks.planned import planned_for
from rlperf.frameworks.readback import own_maxima, read_back, unstated
from rlperf.frameworks.registry import adapter_of, split_name
from rlperf.frameworks.run import Run, ref
from rlperf.frameworks.run_all import RunAll, run_all_of
from rlperf.frameworks.run_of import data_names, from_job, from_phase
from rlperf.frameworks.scorer_keys import routed, scorer_settings
from rlperf.plan.answer.plan import Phase, Plan
from rlperf.plan.answer.reading import plan_in
from rlperf.plan.question.context import keys_of
from rlperf.specs.architecture import Architecture
from rlperf.specs.framework import Rule
from rlperf.specs.job import Job
from rlperf.specs.job_document import read_job_document
from rlperf.specs.own_files import folder_of
from rlperf.specs.profiles import load_architecture, load_cluster
from rlperf.specs.reader import validate
from rlperf.specs.trainer_calibration import load_trainer
from rlperf.specs.writer import is_export, write_folder
from rlperf.units import human_seconds

_USUAL = (None, "bf16", "fp16", False, "adam", "none")
_MUST_BE_SAID = {
    ref("rollout.rollout_dtype"): (
        "the checkpoint's own type",
        "decode is slower and the cache smaller than predicted",
    ),
    ref("rollout.kv_dtype"): ("a KV cache in the weights' type", "the cache holds fewer tokens than predicted"),
    ref("trainer.optimizer"): ("Adam", "8 bytes of moments a parameter where 4 were predicted, and another update"),
    ref("trainer.router_replay"): ("routers choose anew in scoring and training", "nothing is recorded or moved"),
    ref("trainer.shared_prefix"): (
        "every response computes its prompt",
        "scoring and training take longer than predicted",
    ),
    ref("run.weight_sync"): ("its usual weight sync", "weights travel in another way than predicted"),
    ref("trainer.freeze_vision"): (
        "the vision tower is trained too",
        "its backward comes on top of the predicted training",
    ),
    ref("batch.max_positions"): ("those of the checkpoint", "longer requests are refused: change its config.json"),
}
"""Setting -> what runs where no key says it, and the loss."""


@dataclass(frozen=True)
class ExportedPhase:
    """The files of one phase, before they are written."""

    stem: str
    files: Mapping[str, str]
    emission: Emission
    unreadable: tuple[Limitation, ...] = ()
    """What it cannot read of the checkpoint of the phase before."""


def write_plan(
    plan: Plan, framework: str | None, out: Path | str, *, folder: Path | str | None = None
) -> tuple[Path, ...]:
    """Write a plan for ``framework`` (``verl==0.9``; default: the job's) into the folder ``out``.

    One configuration and launch script per phase, ``run_all.sh`` where there are several, and ``EXPORT.md`` with what
    was decided and what the framework cannot express. Every key and rule is checked before the first file is written.

    Raises
    ------
    ExportError : the framework or version cannot run the plan, or a rule of it is broken; all reasons are listed
    """
    return write_folder(out, plan_texts(plan, framework, folder=folder), is_export)


def plan_texts(plan: Plan, framework: str | None = None, *, folder: Path | str | None = None) -> dict[str, str]:
    """What `write_plan` writes: name -> text, ``EXPORT.md`` last."""
    adapter, version = _framework(framework or plan.job.framework)
    phases = _exported(plan, adapter, version, folder)
    decided = [_decided(phase, plan.job) for phase in plan.phases]
    order = run_all_of(plan, [phase.files for phase in phases], [phase.unreadable for phase in phases])
    return _texts(phases, adapter, version, decided, order)


def losses(plan: Plan, framework: str | None = None, *, folder: Path | str | None = None) -> tuple[str, ...]:
    """What of a plan ``framework`` (default: the job's) cannot express, in words; empty where it states every value."""
    adapter, version = _framework(framework or plan.job.framework)
    try:
        phases = _exported(plan, adapter, version, folder)
    except ExportError as error:
        return tuple(line.strip() for line in str(error).splitlines())
    return tuple(dict.fromkeys(str(lost) for phase in phases for lost in phase.emission.limitations))


def _devices_per_node(job: Job, folder: Path | str | None) -> int:
    return job.devices_per_node or load_cluster(job.cluster, folder=folder).devices_per_node


def _for(adapter: Adapter, run: Run, job: Job) -> Run:
    """The run as another framework than the job's scores the old policy: by its own rule."""
    own = adapter_of(split_name(job.framework)[0]).name
    return run if adapter.name == own else replace(run, old_policy=None)


def _exported(plan: Plan, adapter: Adapter, version: str, folder: Path | str | None) -> list[ExportedPhase]:
    """The files of every phase."""
    job = plan.job
    per_node = _devices_per_node(job, folder)
    first, names = plan.phases[0].rl_steps[0], data_names([phase.tasks for phase in plan.phases])
    runs = []
    for phase in plan.phases:
        steps = steps_of(job, phase, plan.phases[-1])
        run = with_prediction(_for(adapter, from_phase(phase, job, per_node, folder), job), phase, first, steps)
        runs.append(replace(run, data=names[phase.tasks]) if len(names) > 1 else run)
    stems = [f"phase_{index + 1:02d}" for index in range(len(runs))] if len(runs) > 1 else ["config"]
    return [
        export_run(run, adapter, version, stem, _decided(phase, job), lost=own_maxima(phase), folder=folder)
        for phase, run, stem in zip(plan.phases, in_order(runs), stems, strict=True)
    ]


def write_job(
    job: Job, framework: str | None, out: Path | str, *, carried: Carried | None = None,
    folder: Path | str | None = None,
) -> tuple[Path, ...]:  # fmt: skip
    """Write a job whose pools are pinned; what was ``carried`` along by its import is kept."""
    adapter, version = _framework(framework or job.framework)
    per_node = _devices_per_node(job, folder)
    header = [f"{job.name}: pinned pools of the job, not planned"]
    run = _for(adapter, from_job(job, per_node, folder), job)
    phase = export_run(run, adapter, version, "config", header, carried=carried, folder=folder)
    return write_folder(out, _texts([phase], adapter, version, [header]), is_export)


def write_file(path: Path | str, framework: str | None, out: Path | str) -> tuple[Path, ...]:
    """Write what a file holds: a plan, or a job with pinned pools (and the keys that its import carried along)."""
    document = read_job_document(path)
    folder = folder_of(path)
    if plan := plan_in(document):
        return write_plan(plan, framework, out, folder=folder)
    return write_job(validate(document, Job), framework, out, carried=carried_keys(path), folder=folder)


def export_run(
    run: Run,
    adapter: Adapter,
    version: str,
    stem: str,
    decided: Sequence[str] = (),
    *,
    lost: Sequence[Limitation] = (),
    carried: Carried | None = None,
    folder: Path | str | None = None,
) -> ExportedPhase:
    """The files of one run, checked; ``lost``: what none says. Of one ``carried`` only changes are written anew."""
    before = _as_imported(carried, adapter, version)
    if before is not None and carried is not None:
        run = as_imported(run, before, carried)
    run, renamed = _in_its_keys(run, adapter, folder)
    check_algorithm(run, framework_facts(adapter.name, version))
    adapted, limitations = adapter.adapt(run, version)
    _has_critic(adapted, adapter, version)
    _has_trainer(adapted, adapter, version)
    table = key_table(adapter.name)
    target = Target(table, version, adapted.trainer.backend or "")
    emission = adapter.emit(adapted, target)
    if carried is not None:
        emission = with_carried(emission, carried, before, adapter, target)
    if run.scorers:
        beside = scorer_settings(run, adapter.name, target, {s.key for s in emission.settings if s.value})
        kept = [s for s in emission.settings if not any(f"{new.key}.".startswith(f"{s.key}.") for new in beside)]
        emission = replace(emission, settings=(*kept, *beside), limitations=(*emission.limitations, *routed(run)))
    readable, unreadable = checkpoints(adapted, adapter.name, target)
    emission = replace(emission, settings=(*emission.settings, *readable))
    unsaid = [*unreadable, *_unsaid(adapter, emission)]
    if "/" not in hub_name(run.architecture):
        unsaid.append(Limitation(f"checkpoint {run.architecture}", "its bare name", "nobody published it: state yours"))
    emission = replace(emission, limitations=(*lost, *renamed, *limitations, *emission.limitations, *unsaid))
    new = carried.source.additions if carried is not None else frozenset()
    broken = [
        *illegal_keys([setting for setting in emission.settings if setting.key not in new], target),
        *refusals(emission.run, adapter.name, version, folder=folder, told=carried is None),
    ]
    if broken:
        raise ExportError("the plan breaks its rules", f"{adapter.name}=={version}", dict(broken))
    header = [f"{adapter.title} {version}, written by rlperf.", *decided]
    header += [f"NOT EXPRESSED: {limitation}" for limitation in emission.limitations]
    files = adapter.render(emission, stem, header)
    if carried is None:
        # An adapter that changes a run says so; one that says nothing is held to the plan itself.
        meant = adapted if len(emission.limitations) > len(lost) else replace(run, mode=adapted.mode)
        runs = keyless_values(framework_facts(adapter.name, version), meant)
        silent = unstated(meant, read_back(files, adapter, version), emission.limitations, adapter.fields, runs)
        emission = replace(emission, limitations=(*emission.limitations, *silent))
    return ExportedPhase(stem, files, emission, unreadable)


def _in_its_keys(run: Run, adapter: Adapter, folder: Path | str | None) -> tuple[Run, tuple[Limitation, ...]]:
    """The run under the trainer backend whose keys the framework has for its own, and that it was renamed."""
    backend = run.trainer.backend
    keys = keys_of(load_trainer(backend, folder=folder), adapter.name) if backend else backend
    if keys == backend:
        return run, ()
    lost = Limitation(f"trainer {backend}", f"the keys of {keys}", "whatever sets the two apart is yours to state")
    return replace(run, trainer=run.trainer.having(backend=keys)), (lost,)


def _has_trainer(run: Run, adapter: Adapter, version: str) -> None:
    """An `ExportError` where the framework has no such trainer, and the adapter knew no other for it."""
    backend, known = run.trainer.backend, framework_facts(adapter.name, version).backends
    if backend is not None and backend not in known:
        nearest = f"trainer_backends: {known[0]}, and plan again"
        raise ExportError(f"it has no {backend} trainer", adapter.name, {"nearest": nearest})


def _has_critic(run: Run, adapter: Adapter, version: str) -> None:
    """An `ExportError` where a critic has devices of its own and the framework no keys for them."""
    if run.critic_devices and not framework_facts(adapter.name, version).critic_apart:
        nearest = "a critic pool without placement, and plan again"
        raise ExportError("it has no keys for a critic on devices of its own", adapter.name, {"nearest": nearest})


def _unsaid(adapter: Adapter, emission: Emission) -> list[Limitation]:
    """Settings, and the mode, that no key of the emission states: this framework, engine or version has none."""
    stated = {setting.key: setting.value for setting in emission.settings}
    lost = []
    for at, (nearest, loss) in _MUST_BE_SAID.items():
        value = emission.run.value(at)
        entries = [entry for entry in adapter.fields if entry.at == at]
        able = [entry for entry in entries if entry.takes(value)]
        said = any(stated.get(key) == e.unit.write(value, emission.run) for e in able for key in e.keys)
        if value not in _USUAL and not said:
            lost.append(Limitation(f"{at} {value}", nearest, loss))
    if words := emission.run.traits.had_by.get(adapter.name):
        asked = f"mode {emission.run.mode} ({words})"
        lost.append(Limitation(asked, "the launch without it", "no key of the adapter switches it on: add it by hand"))
    return lost


def illegal_keys(settings: Iterable[Setting], target: Target) -> list[tuple[str, str]]:
    """(key, what is wrong) of every setting that the version does not accept."""
    wrong = []
    for setting in settings:
        spec = target.table.find(setting.key, target.version, target.backend)
        if spec is None and target.table.is_section(setting.key, target.version):
            continue
        if spec is None:
            wrong.append((setting.key, f"is no key of {target.table.framework} {target.version}"))
        elif complaint := spec.complaint(setting.value):
            wrong.append((setting.key, complaint))
    return wrong


def refusals(
    run: Run, framework: str, version: str, *, folder: Path | str | None = None, told: bool = True
) -> list[tuple[str, str]]:
    """(key, what is wrong) of every rule of the framework that the run breaks.

    ``told``: also of rules that the framework never tells of, which a plan keeps to and a user's own file need not.
    """
    names = run.names(architecture_of(run, folder))
    facts = framework_facts(framework, version)
    broken = facts.refused(names, run.trainer.backend or "")
    asked = (rule for rule in facts.rules if told or rule.stage != "never")
    return [(rule.key, said(rule, names)) for rule in asked if rule.id in broken]


def said(rule: Rule, names: Mapping[str, object]) -> str:
    """The rule's message with its values filled in."""
    return rule.says.format_map(names)


def architecture_of(run: Run, folder: Path | str | None = None) -> Architecture | None:
    """The run's architecture, or None where it is not known by name."""
    try:
        return load_architecture(run.architecture, folder)
    except SpecError:
        return None


def steps_of(job: Job, phase: Phase, final: Phase) -> tuple[int, int] | None:
    """First and last rl_step of a phase; None where the job states no length: the run goes on as the framework's does.

    The last phase goes on to the end of the run, where the job states one.
    """
    start, last = phase.rl_steps
    if phase is final and job.run is not None and job.run.rl_steps is not None:
        last = max(last, start + job.run.rl_steps - 1) if start == 0 else max(last, job.run.rl_steps - 1)
    elif job.horizon.rl_steps == 1:
        return None
    return start, last


def with_prediction(run: Run, phase: Phase, first_rl_step: int, steps: tuple[int, int] | None) -> Run:
    """The run with what a writer says about the phase: its rl_steps, and predicted stages for predicted losses."""
    return replace(
        run,
        rl_steps=steps and steps[1] - steps[0] + 1,
        last_rl_step=steps and steps[1] - first_rl_step + 1,
        training_s=phase.predicted.stages_s.training or None,
        rollout_s=phase.predicted.stages_s.rollout or None,
    )


def _as_imported(carried: Carried | None, adapter: Adapter, version: str) -> Run | None:
    """The run of the carried configuration, if it is this framework's and version's."""
    if carried is None or (carried.framework, carried.version) != (adapter.name, version):
        return None
    return read_run(adapter, carried.source, adapter.target(carried.source, version))[0]


def with_carried(
    emission: Emission, carried: Carried, before: Run | None, adapter: Adapter, target: Target
) -> Emission:
    """The imported keys with what the run changes against them; nothing else moves.

    The imported configuration is emitted as it was read (``before``); a key that comes out of both emissions alike was
    not changed by the job, and stays as the user wrote it. For another framework or version only the keys that exist
    there go along.
    """
    why = {setting.key: setting.why for setting in emission.settings}
    if before is None:
        own = {setting.key for setting in emission.settings}
        extra = [Setting(key, value, "as imported") for key, value in carried.source.keys.items()
                 if carried.framework == adapter.name and key not in own and target.has(key)]  # fmt: skip
        return replace(emission, settings=(*emission.settings, *extra))
    adapted, _ = adapter.adapt(before, target.version)
    emitted = adapter.emit(adapted, target)
    old = {setting.key: setting.value for setting in emitted.settings}
    known = {key: value for key, value in carried.source.keys.items() if _accepted(key, carried.source, target)}
    # what is only read, and goes before the key that is written, would still say what was there
    stale = {key for entry in adapter.fields for key in entry.keys if entry.read_only and key not in old
             and emission.run.value(entry.at) not in (None, emitted.run.value(entry.at))}  # fmt: skip
    kept = {key: Setting(key, value, why.get(key, "as imported")) for key, value in known.items() if key not in stale}
    lost = [Limitation(f"imported key {key}", "left out", f"{adapter.title} {target.version} does not have it")
            for key in carried.source.keys if key not in known]  # fmt: skip
    for setting in emission.settings:
        if setting.key not in old or old[setting.key] != setting.value:
            kept[setting.key] = setting
    same_mode = before.mode == emission.run.mode
    entry = carried.source.entry if same_mode and carried.source.entry else emission.entry
    base = carried.source.bases if before.recipe and same_mode else emission.base
    limitations = (*emission.limitations, *lost)
    return replace(emission, settings=tuple(kept.values()), entry=entry, base=base, limitations=limitations)


def _accepted(key: str, source: Source, target: Target) -> bool:
    """Whether an imported key may stand: known, the head of a section, or marked as new by the user."""
    return target.has(key) or target.table.is_section(key, target.version) or key in source.additions


def _framework(text: str) -> tuple[Adapter, str]:
    name, asked = split_name(text)
    adapter = adapter_of(name)
    return adapter, key_table(adapter.name).version(asked)


def _decided(phase: Phase, job: Job) -> list[str]:
    """What was decided and why, as comment lines."""
    said = phase.predicted
    low, high = human_seconds(said.low_s), human_seconds(said.high_s)
    lines = [
        f"Job {job.name}: {', '.join(phase.tasks)}, rl_steps {phase.rl_steps[0]} to {phase.rl_steps[1]}, {phase.mode}.",
        planned_for(phase, job),
        f"Predicted: {human_seconds(said.rl_step_s)} per rl_step ({low} .. {high}).",
    ]
    if phase.binds:
        lines.append(f"Holds the choice back: {', '.join(phase.binds)}.")
    if phase.runner_up:
        other = phase.runner_up
        why = f", {other.why_not}" if other.why_not else ""
        differs = ", ".join(other.differs) or "same layout"
        lines.append(f"Runner-up: {differs} ({100 * other.loss:+z.1f} %, {other.verdict}{why}).")
    return lines


def _texts(
    phases: Sequence[ExportedPhase],
    adapter: Adapter,
    version: str,
    decided: Sequence[Sequence[str]],
    order: RunAll | None = None,
) -> dict[str, str]:
    """All files by name, the report last."""
    found = {name: text for phase in phases for name, text in phase.files.items()}
    if order is not None:
        found["run_all.sh"] = order.text
    said = () if order is None else order.says
    return {**found, "EXPORT.md": _report(phases, adapter, version, decided, said)}


def _report(
    phases: Sequence[ExportedPhase],
    adapter: Adapter,
    version: str,
    decided: Sequence[Sequence[str]],
    said: Sequence[str] = (),
) -> str:
    lines = [f"# {adapter.title} {version}", "", *(f"- `run_all.sh`: {line}" for line in said), *([""] if said else [])]
    for phase, words in zip(phases, decided, strict=True):
        lines += [f"## {phase.stem}", "", *(f"- {line}" for line in words), ""]
        lines += [f"Files: {', '.join(phase.files)}", ""]
        lines += _limits(phase.emission.limitations)
        lines += ["| key | value | why |", "|---|---|---|"]
        lines += [f"| `{s.key}` | `{s.value}` | {s.why} |" for s in phase.emission.settings]
        lines.append("")
    lines.append("Yours to set: data files, checkpoint paths, how often to save, reward function.")
    return "\n".join(lines) + "\n"


def _limits(limitations: Sequence[Limitation]) -> list[str]:
    if not limitations:
        return []
    rows = [f"| {item.asked} | {item.nearest} | {item.loss} |" for item in limitations]
    return ["| cannot be expressed | nearest | loss |", "|---|---|---|", *rows, ""]
