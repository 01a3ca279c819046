"""Import: an existing configuration or launch script as a Job with pinned pools, nothing executed, no key lost."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import yaml
from pydantic import ValidationError

from rlperf.errors import Problem, SpecError
from rlperf.frameworks.adapter import Adapter, Source, framework_facts, is_other_program, read_run
from rlperf.frameworks.fields import MANDATORY, Target
from rlperf.frameworks.hub import architecture_at, hub_name
from rlperf.frameworks.keytable import ABSENT, Value, key_table
from rlperf.frameworks.planned import mixed_lengths
from rlperf.frameworks.registry import FRAMEWORKS, adapter_of, split_name
from rlperf.frameworks.run import Run
from rlperf.frameworks.run_of import to_job
from rlperf.frameworks.scorer_keys import read_scorers
from rlperf.frameworks.sources import read_source
from rlperf.plan.answer.reading import plan_in
from rlperf.plan.compare import job_of_plan
from rlperf.specs.job import Job
from rlperf.specs.labels import last_part
from rlperf.specs.profiles import load_architecture, load_cluster
from rlperf.specs.reader import Document, read_document, validate
from rlperf.specs.releases import read_as
from rlperf.workload import PRESETS

DEFAULT_CLUSTER = "dgx_h100"
DEFAULT_WORKLOAD = "math"
_SEEN = ("data.max_images_per_prompt", "multimodal-keys")
"""Keys of OpenRLHF and slime that a file of prompts with images states."""


@dataclass(frozen=True)
class UnknownKey:
    """A key that this version does not have: where it stands, and what it may have meant."""

    key: str
    where: str
    suggestion: str | None


@dataclass(frozen=True)
class Imported:
    """A configuration as it was understood."""

    adapter: Adapter
    target: Target
    source: Source
    run: Run
    understood: frozenset[str]
    unknown: tuple[UnknownKey, ...]
    illegal: tuple[UnknownKey, ...]
    unread: tuple[UnknownKey, ...] = ()
    """Keys of trainers that rlperf does not know, which the framework has."""
    newer: str = ""
    """That the release that was named is newer than every known one, and for which it is taken."""

    @property
    def framework(self) -> str:
        """Name and version, as a job states them."""
        return f"{self.adapter.name}=={self.target.version}"

    @property
    def carried(self) -> dict[str, Value]:
        """Keys that the job form does not speak of; an export takes them along."""
        return {key: value for key, value in self.source.keys.items() if key not in self.understood}

    def where(self, key: str) -> str:
        """``file:line`` of a key, or of nothing where it is a default."""
        file, line = self.source.lines.get(key, ("", None))
        return f"{file}:{line}" if line else file

    def filled(self) -> dict[str, Value]:
        """Keys that were left to the version's defaults and matter to performance."""
        keys = self.target.table.keys(self.target.version, self.target.backend)
        return {
            key: keys[key].default
            for entry in self.adapter.fields
            for key in entry.keys
            if key in keys and key not in self.source.keys and keys[key].default is not ABSENT
        }

    @property
    def absent_bases(self) -> tuple[str, ...]:
        """Configurations that it builds on, that nobody named and whose values are not those of the defaults."""
        known = framework_facts(self.adapter.name, self.target.version).configurations
        return tuple(base for base in self.source.bases if not any(fnmatchcase(base, each) for each in known))


def import_config(paths: Sequence[Path | str], framework: str | None = None) -> Imported:
    """Read a configuration: YAML with its bases, hydra overrides, launch scripts or flags.

    ``framework`` (``verl``, ``verl==0.8``) is recognised from the keys where it is not given; so is the newest version
    that knows every key.

    Raises
    ------
    SpecError : a file cannot be read, or no framework (or several) could have written it
    """
    source = read_source(paths)
    if not source.keys:
        raise SpecError(Problem("holds no settings", str(paths[0])))
    return understand(source, framework, str(paths[0]))


def understand(source: Source, framework: str | None = None, file: str = "") -> Imported:
    """A source as a framework's configuration."""
    name, version = split_name(framework) if framework else (None, None)
    _rolls_out(source, file)
    adapter = adapter_of(name) if name else detect(source, file)
    version = version or newest_version(adapter, source)
    target = adapter.target(source, version)
    source = _with_names(source, target)
    try:
        run, understood = read_run(adapter, source, target)
        scorers, read = read_scorers(run, adapter.name, source.keys, target.defaults(target.backend))
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        if isinstance(error, SpecError):
            raise
        if asked := _asked_of_the_shell(source, target) or _of_another_type(source, target):
            raise SpecError(asked) from error
        none = isinstance(error, ZeroDivisionError)
        wrong = "is 0 where others are divided by it" if none else f"has the wrong type for {adapter.title}: {error}"
        raise SpecError(Problem(f"a value {wrong}", file)) from error
    unknown, illegal = check_keys(source, target)
    theirs = {*others, "optim"} if (others := other_trainers(run)) else set()
    unread = tuple(each for each in unknown if theirs & set(each.key.split(".")))
    known = tuple(each for each in unknown if each not in unread)
    run = replace(run, scorers=scorers)
    newer = read_as(adapter.name, version, target.table.versions)
    return Imported(adapter, target, source, run, understood | read, known, illegal, unread, newer)


def _asked_of_the_shell(source: Source, target: Target) -> list[Problem]:
    """Keys of numbers and flags that a script leaves to what runs where it is started, with how to say them."""
    found = []
    for key, value in source.keys.items():
        spec = target.table.find(key, target.version)
        unset = _OF_THE_SHELL.search(value) if isinstance(value, str) else None
        if unset and spec is not None and spec.complaint("text"):
            file, line = source.lines.get(key, ("", None))
            hint = "state it in a second file, behind this one"
            hint = f"say {unset[1]}=VALUE behind the file, or {hint}" if unset[1] else hint
            found.append(Problem(f"{key} is {value}, which only the shell knows", file, line, hint))
    return found


def _of_another_type(source: Source, target: Target) -> list[Problem]:
    """Keys that hold what they do not take, where nothing could be made of it."""
    said = {illegal.key: illegal.suggestion for illegal in check_keys(source, target)[1]}
    places = {key: source.lines.get(key, ("", None)) for key in said}
    return [Problem(f"{key}: {why}", *places[key]) for key, why in said.items()]


def _rolls_out(source: Source, file: str) -> None:
    """A `SpecError` where another program of a framework runs: its keys would be read as those of a GRPO."""
    other = is_other_program(source.entry)
    if other or source.keys.get("loss-type") == "sft_loss":
        program = source.entry if other else f"{source.entry} --loss-type sft_loss"
        hint = "rlperf predicts those that do: verl.trainer.main_ppo, openrlhf.cli.train_ppo_ray, trl grpo ..."
        raise SpecError(Problem(f"{program} does not train on what it rolls out", file, suggestion=hint))


def other_trainers(run: Run) -> tuple[str, ...]:
    """Trainers that a file names and rlperf does not know."""
    return tuple(getattr(run.facts, "others", ()))


_OF_THE_SHELL = re.compile(r"\$(?:\(|(?:\{oc\.env:)?\{?([A-Za-z_]\w*)(?![\w.:]))")
"""A variable or a command of the shell; no resolver (``${subtract:1,2}``) nor key (``${runner.steps}``) of a YAML."""
_VARIABLE = re.compile(r"\$\{?(?:oc\.env:)?(\w+)")
"""What the environment of a launch would have filled in."""
_TYPED = {"slime": "miles"}
"""Where the flags of a framework were listed without types: the fork whose own parser has them."""


def _with_names(source: Source, target: Target) -> Source:
    """The source with text as it stands on the command line: a name may be ``007`` or ``null``."""
    typed = key_table(_TYPED.get(target.table.framework, target.table.framework))
    version = target.version if typed is target.table else typed.versions[-1]
    texts = {key for key in source.words if (spec := typed.find(key, version)) and spec.kind == "str"}
    named = {key: source.words[key] for key in texts if not isinstance(source.keys.get(key), str)}
    return replace(source, keys={key: named.get(key, value) for key, value in source.keys.items()})


def detect(source: Source, file: str = "") -> Adapter:
    """The framework that the keys belong to."""
    scores = sorted(((adapter_of(name).detect(source), name) for name in FRAMEWORKS), reverse=True)
    if scores[0][0] == 0.0:
        if {"architecture", "cluster"} <= set(source.keys) or any(key.startswith("phases") for key in source.keys):
            hint = (
                "`rlperf export` writes its framework's configuration, `rlperf predict` and `explain` read it, "
                "`rlperf explain LOG` and `rlperf calibrate logs LOG --job FILE` the log of its run"
            )
            raise SpecError(Problem("a job or plan of rlperf, not a framework's configuration", file, suggestion=hint))
        absent = f", and {', '.join(source.bases)}, which it names, is not here" if source.bases else ""
        hint = "name that file as well, or " if source.bases else ""
        told = f"no framework is recognised from its keys{absent}"
        raise SpecError(Problem(told, file, suggestion=f"{hint}--framework {'|'.join(FRAMEWORKS)}"))
    return adapter_of(scores[0][1])


def newest_version(adapter: Adapter, source: Source) -> str:
    """The newest version that knows most of the keys, and wants fewest that are not there."""
    table = key_table(adapter.name)
    counted = []
    for age, version in enumerate(reversed(table.versions)):
        target = adapter.target(source, version)
        counted.append((len(_unknown(source, target)) + len(unstated(adapter, source, target)), age, version))
    return min(counted)[2]


def unstated(adapter: Adapter, source: Source, target: Target) -> tuple[str, ...]:
    """Keys that the version has no default for, and the source does not state: of those that are read."""
    keys = target.table.keys(target.version, target.backend)
    read = dict.fromkeys(key for entry in adapter.fields for key in entry.keys)
    return tuple(key for key in read if key in keys and keys[key].default == MANDATORY and key not in source.keys)


def _unknown(source: Source, target: Target) -> frozenset[str]:
    """Keys that the version does not have, nor the user has added."""
    found = (key for key in source.keys if target.table.find(key, target.version, target.backend) is None)
    table = target.table
    strange = (key for key in found if key not in source.additions and not table.is_section(key, target.version))
    keeps = framework_facts(table.framework, target.version).unknown_keys != "error"
    lends = {name for name in source.lends if keeps and not table.is_section(name, target.version)}
    return frozenset(key for key in strange if key.partition(".")[0] not in lends)  # others than anchors' own sections


def check_keys(source: Source, target: Target) -> tuple[tuple[UnknownKey, ...], tuple[UnknownKey, ...]]:
    """Keys that the version does not have, and keys with a value that it does not accept."""
    unknown, illegal, strange = [], [], _unknown(source, target)
    for key, value in source.keys.items():
        file, line = source.lines.get(key, ("", None))
        where = f"{file}:{line}" if line else file
        spec = target.table.find(key, target.version, target.backend)
        if spec is None and key not in strange:
            continue
        if spec is None:
            hint = target.table.suggestion(key, target.version, target.backend)
            unknown.append(UnknownKey(key, where, hint))
        elif complaint := spec.complaint(value):
            illegal.append(UnknownKey(key, where, complaint))
    return tuple(unknown), tuple(illegal)


def with_architecture(imported: Imported, name: str | None) -> Imported:
    """The configuration of a model whose shape goes by another name than its checkpoint; None: by its own."""
    return imported if name is None else replace(imported, run=replace(imported.run, architecture=name))


def planned_cluster(imported: Imported) -> str | None:
    """The cluster that the header of an exported file names; None where there is none, or it is not known here."""
    return _known_cluster(imported.source.planned.cluster)


def planned_rollout(imported: Imported, cluster: str | None) -> str | None:
    """The rollout's own cluster in the header of an exported file; None where another ``cluster`` is asked for."""
    planned = imported.source.planned
    return _known_cluster(planned.rollout) if cluster in (None, planned.cluster) else None


def _known_cluster(name: str) -> str | None:
    try:
        return name if name and load_cluster(name) else None
    except SpecError:
        return None


def planned_workload(imported: Imported) -> str | None:
    """The lengths that the header of an exported file names, several with their shares; None: none that ship."""
    planned = imported.source.planned.lengths
    named = mixed_lengths(planned) or (planned,)
    return planned if all(each in PRESETS for each in named) else None


def states_images(imported: Imported) -> bool:
    """Whether the file says that prompts hold images or video, of a model that sees.

    A dump of verl's whole configuration has both of its keys, whatever the data are; a script states the one it needs.
    """
    keys = imported.source.keys
    one = ("data.image_key" in keys) != ("data.video_key" in keys)
    said = one or any(keys.get(key) for key in _SEEN) or "vlm" in str(keys.get("data.default.processor"))
    try:
        return said and load_architecture(architecture_at(imported.run.architecture)).vision is not None
    except SpecError:  # a shape that nobody knows is reported where it is asked for
        return False


def usual_cluster(imported: Imported) -> tuple[str, str]:
    """The cluster that stands in where none is named, of the kind that the file states; why not DGX H100, or empty."""
    if imported.source.keys.get("trainer.device") != "npu":  # verl's alone: cuda where it is not stated
        return DEFAULT_CLUSTER, ""
    larger = imported.run.devices_per_node > load_cluster("ascend_910b_node").devices_per_node
    return "ascend_a3_supernode" if larger else "ascend_910b_node", "as the file's devices are NPUs"


def usual_workload(imported: Imported) -> tuple[str, str]:
    """Lengths that stand in where none are named, of the kind that the file states; why not math, or empty."""
    if states_images(imported):
        return "image", "as the file's prompts hold images"
    if imported.run.batch.turns > 1:
        return "tool_use", "as the file's trajectories have several turns"
    return DEFAULT_WORKLOAD, ""


def planned_reward(imported: Imported, workload: str | None) -> float | None:
    """Seconds of the rewards that the header of an exported file states; None where other lengths are asked for."""
    planned = imported.source.planned
    return planned.reward_s if workload in (None, planned.lengths) else None


def job_of(
    imported: Imported, *, cluster: str | None = None, workload: str | None = None, name: str = "imported"
) -> Job:
    """The configuration as a job with pinned pools. GPU type and lengths are no keys of it: assumed if not given."""
    if imported.run.missing:
        raise SpecError([Problem(f"{key} is mandatory and not stated") for key in imported.run.missing])
    if imported.run.wrong:
        raise SpecError([Problem(f"cannot be a job: {text}") for text in imported.run.wrong])
    if imported.run.architecture in ("", "None"):  # made by a program, or left to its default
        raise SpecError(Problem("its model is not named", suggestion="--architecture NAME, or its config.json"))
    if (unset := _VARIABLE.search(imported.run.architecture)) and not _names_a_shape(imported.run.architecture):
        hint = f"say {unset[1]}=NAME behind the file, or --architecture NAME"
        raise SpecError(Problem(f"its model is named by ${unset[1]}, which it does not set", suggestion=hint))
    planned = imported.source.planned
    run = planned.told(imported.run) if workload in (None, planned.lengths) else imported.run
    run = replace(run, architecture=architecture_at(run.architecture))
    if run.critic_devices and run.traits.shares_devices and run.rollout.devices != run.trainer.devices:
        words = f"engines on {run.rollout.devices} devices take turns with the trainer and with its critic"
        raise SpecError(Problem(f"{words}: predicted only beside the trainer, on its {run.trainer.devices}"))
    try:
        return to_job(
            run,
            framework=imported.framework,
            cluster=cluster or planned_cluster(imported) or usual_cluster(imported)[0],
            workload=workload or planned_workload(imported) or usual_workload(imported)[0],
            name=name,
            reward_s=planned_reward(imported, workload),
            rollout_cluster=planned_rollout(imported, cluster),
        )
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise SpecError([Problem(f"cannot be a job: {text}") for text in problems]) from error
    except (ValueError, TypeError) as error:
        raise SpecError(Problem(f"cannot be a job: {error}")) from error


def _names_a_shape(checkpoint: str) -> bool:
    """Whether a checkpoint's own part says what its shape is, whatever folder the shell puts in front of it."""
    try:
        return "$" not in last_part(checkpoint) and bool(load_architecture(architecture_at(checkpoint)))
    except SpecError:
        return False


def job_text(job: Job) -> str:
    """The job as YAML, without what is default."""
    data = job.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    if job.reference and job.algorithm == "dapo":  # what is default of others is not of it
        data["reference"] = True
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def keys_text(imported: Imported) -> str:
    """The imported keys as YAML: what `rlperf export` takes along, so that export after import changes nothing."""
    source = imported.source
    data = {
        "framework": imported.adapter.name,
        "version": imported.target.version,
        "architecture": architecture_at(imported.run.architecture),
        "entry": source.entry,
        "bases": list(source.bases),
        "additions": sorted(source.additions),
        "launcher": dict(source.launcher),
        "keys": dict(source.keys),
    }
    head = "# Every key of the imported configuration; `rlperf export` keeps those that a job cannot state.\n"
    return head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def describe(imported: Imported) -> str:
    """What was imported, in one line."""
    run, launcher = imported.run, imported.source.launcher
    where = ""
    if imported.adapter.name == "trl" and not {"num_processes", "nproc_per_node", "visible_devices"} & set(launcher):
        where = " (assumed: name accelerate's config too, or a launch script that says --num_processes)"
    elif imported.adapter.name == "trl" and not run.traits.shares_devices and not _serves(launcher):
        where = f" ({run.rollout.devices} assumed for the server: name the script that starts it too)"
    gpus = "1 GPU" if run.devices == 1 else f"{run.devices} GPUs"
    return (
        f"{imported.adapter.title} {imported.target.version}: {hub_name(run.architecture)}, "
        f"{gpus}{where}, {run.mode}, {run.batch.prompts_per_step} prompts x {run.batch.group_size}"
        + (f" ({imported.newer})" if imported.newer else "")
    )


def own_document(path: Path) -> Document | None:
    """The file of a job or of a plan; None: a framework's configuration."""
    document = read_document(path) if path.suffix in (".yaml", ".yml", ".json") else None
    keys = set(document.data) if document and isinstance(document.data, dict) else set()
    return document if {"job", "phases"} <= keys or {"architecture", "tasks"} & keys else None


def read_job_or_config(
    path: Path, *, cluster: str | None = None, workload: str | None = None, architecture: str | None = None
) -> Job:
    """A job file as it is, a plan.yaml as the job with its first phase pinned, a framework's configuration as a job."""
    if document := own_document(path):
        plan = plan_in(document)
        return job_of_plan(plan) if plan else validate(document, Job)
    imported = with_architecture(import_config([path]), architecture)
    return job_of(imported, cluster=cluster, workload=workload, name=path.stem)


def _serves(launcher: Mapping[str, Value]) -> bool:
    """Whether a launch of TRL's server was read."""
    return any(key.startswith("vllm-serve.") for key in launcher)
