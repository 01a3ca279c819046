"""What every framework file provides, and the pieces that it is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from string import Formatter
from typing import Protocol

from pydantic import ValidationError

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.frameworks.fields import Field, Setting, Target
from rlperf.frameworks.hub import architecture_at
from rlperf.frameworks.keyless import keyless_rules, misspelled
from rlperf.frameworks.keytable import KeyTable, Value, key_table
from rlperf.frameworks.planned import Planned
from rlperf.frameworks.run import Ref, RolloutRun, Run, names_of_rules
from rlperf.specs.framework import OF_RELEASES, FrameworkFacts, Rule, facts_document
from rlperf.specs.framework_names import FRAMEWORKS, LISTED
from rlperf.specs.keyless_settings import running
from rlperf.specs.modes import MODES
from rlperf.specs.pool import Role
from rlperf.specs.profiles import load_architecture
from rlperf.specs.reader import Document, problems_of
from rlperf.specs.releases import versions_of
from rlperf.specs.rule_expressions import asked_in


@dataclass(frozen=True)
class Limitation:
    """What a framework cannot express, the nearest that it can, and what that costs."""

    asked: str
    nearest: str
    loss: str

    def __str__(self) -> str:
        return f"{self.asked}; nearest: {self.nearest}; {self.loss}"


_NO_ROLLOUT = frozenset({"sft", "dpo", "kto", "orpo", "rm", "reward", "generation", "eval"})
_ROLLS_OUT = frozenset({"grpo", "ppo", "dapo", "rloo", "rl"})


def is_other_program(entry: str) -> bool:
    """Whether a program trains on answers that are given (or a scorer), or trains nothing, by the words of its name.

    >>> [is_other_program(name) for name in ("verl.trainer.fsdp_sft_trainer", "examples/run_dpo.py", "run_grpo_rm.py")]
    [True, True, False]
    """
    words = {*re.split(r"[._\s]+", entry.rpartition("/")[2].lower())}
    return bool(words & _NO_ROLLOUT) and not words & _ROLLS_OUT


@dataclass(frozen=True)
class Source:
    """A configuration as it was read: keys with the line each stands on, defaults not filled in yet.

    ``entry`` is the program that a launch script runs; ``keys`` are dotted paths or flag names.
    """

    keys: Mapping[str, Value]
    lines: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    entry: str = ""
    bases: tuple[str, ...] = ()
    additions: frozenset[str] = frozenset()
    """Keys that the user marked as new (hydra's ``+``)."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Flag -> its word on the command line, whatever it reads as."""
    launcher: Mapping[str, Value] = field(default_factory=dict)
    """What the launcher (accelerate, torchrun) is told: ``num_processes`` and the like; no keys of the framework."""
    folder: str = ""
    """Where a script goes (``cd``) before it runs the program, as it says it."""
    planned: Planned = field(default_factory=Planned)
    worked_out: Mapping[str, str] = field(default_factory=dict)
    """Key -> ``file:line`` where a program works its value out: it is left to its default."""
    lends: frozenset[str] = frozenset()
    """Sections at the top of which aliases elsewhere repeat something (YAML's anchors)."""

    @property
    def files(self) -> tuple[str, ...]:
        """Files that keys stand in."""
        return tuple(dict.fromkeys(file for file, _ in self.lines.values() if file))


@dataclass(frozen=True)
class Emission:
    """What goes into a configuration: settings in order, what could not be said, and how to launch it."""

    settings: tuple[Setting, ...]
    limitations: tuple[Limitation, ...]
    entry: str
    base: tuple[str, ...] = ()
    run: Run = field(default_factory=Run)


class Adapter(Protocol):
    """One framework: a field table read in both directions, and its file format."""

    name: str
    title: str
    fields: tuple[Field, ...]

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """The nearest run that the version can express, and what was lost."""
        ...

    def emit(self, run: Run, target: Target) -> Emission:
        """Settings for a run that ``adapt`` returned."""
        ...

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """File name -> text: the configuration and the launch command."""
        ...

    def detect(self, source: Source) -> float:
        """How likely it is that the source is this framework's, 0 to 1."""
        ...

    def target(self, source: Source, version: str | None) -> Target:
        """Version and backend that the source is for."""
        ...

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """The run that the source describes, defaults filled in, and the keys that were understood."""
        ...


@cache
def framework_facts(framework: str, version: str | None = None) -> FrameworkFacts:
    """What a framework is in one version: modes, passes, overlaps and the rules that hold there.

    Raises
    ------
    SpecError : its file is wrong, with the line of each problem: fields, versions, names that no rule may ask

    >>> framework_facts("verl", "0.9").modes["async"].startswith("V1 separate_async")
    True
    """
    document = facts_document(framework)
    if document is None:
        known = did_you_mean(framework, FRAMEWORKS) or f"one of {LISTED}"
        raise SpecError(Problem(f"nothing is known of a framework named {framework!r}", suggestion=known))
    table = key_table(framework)
    chosen = table.version(version)
    modes, problems = _modes(document, chosen, table.versions)
    modes |= {row.name: row.had_by[framework] for row in MODES.values() if framework in row.had_by}
    data = {**document.data, "versions": table.versions, "version": chosen, "modes": modes}
    try:
        facts = FrameworkFacts.model_validate(data)
    except ValidationError as error:
        problems += problems_of(error, Document(data, document.lines, document.file), FrameworkFacts)
        raise SpecError(problems) from error
    problems += _rule_problems(facts, document) + _span_problems(facts, document)
    if problems:
        raise SpecError(problems)
    adapter: Adapter = import_module(f"rlperf.frameworks.{framework}").ADAPTER
    derived = _keyless(adapter, table, chosen, facts.backends, facts.rules)
    runs = tuple(each for each in facts.runs if chosen in versions_of(each.versions, table.versions))
    return facts.model_copy(update={"rules": (*facts.rules, *derived), "runs": runs})


def read_run(adapter: Adapter, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
    """The run that a source describes, with what the framework runs where it has no key, and the keys understood."""
    run, understood = adapter.read(source, target)
    given = keyless_values(framework_facts(adapter.name, target.version), run)
    decided = {at: values[0] for at, values in given.items() if len(values) == 1}
    run = run.having({at: value for at, value in decided.items() if run.value(at) is None and _asked(at, run)})
    return _of_its_kind(run), understood


def keyless_values(facts: FrameworkFacts, run: Run) -> dict[Ref, tuple[Value, ...]]:
    """What may run of settings that no key states, in the mode of a run: several where its devices decide."""
    roles: tuple[Role, ...] = ("rollout", "trainer")
    known = ((role, running(facts.runs, role, (run.mode,))) for role in roles)
    return {Ref(role, name): values for role, given in known for name, values in given.items()}


def _of_its_kind(run: Run) -> Run:
    """Without experts nothing splits them, whatever Megatron takes for expert tensor parallel."""
    try:
        dense = load_architecture(architecture_at(run.architecture)).experts is None
    except SpecError:
        return run
    if not dense:
        return run
    return replace(run, trainer=run.trainer.having(expert_tensor_parallel=1), rollout=_whole_engines(run.rollout))


def _whole_engines(rollout: RolloutRun) -> RolloutRun:
    """Data-parallel ranks of vLLM, which without experts are engines of their own (0.14 v1/engine/core.py:921)."""
    ranks = rollout.attention_data_parallel
    if rollout.backend != "vllm" or ranks == 1:
        return rollout
    return rollout.having(
        attention_data_parallel=1,
        tensor_parallel=rollout.tensor_parallel // ranks,
        data_parallel=rollout.data_parallel and rollout.data_parallel * ranks,
        num_engines=rollout.num_engines and rollout.num_engines * ranks,
        max_running=rollout.max_running and rollout.max_running // ranks,
    )


def _asked(at: Ref, run: Run) -> bool:
    """Whether the run has use for a field: nothing is parked on devices that nobody else takes."""
    return at.name != "parked" or run.traits.shares_devices


def _modes(document: Document, version: str, versions: Sequence[str]) -> tuple[dict[str, str], list[Problem]]:
    """Mode -> how it is run, of those that a version has; and what of ``modes:`` cannot be read."""
    modes: dict[str, str] = {}
    stated = document.data.get("modes")
    if not isinstance(stated, dict) or not stated:
        return modes, [document.problem(("modes",), "must name at least one mode, such as colocated: {all: always}")]
    problems: list[Problem] = []
    for mode, spans in stated.items():
        if mode not in MODES:
            hint = did_you_mean(str(mode), MODES) or f"modes are {', '.join(MODES)}"
            problems.append(document.problem(("modes", mode), "there is no such execution mode", hint))
        if not isinstance(spans, dict):
            problems.append(document.problem(("modes", mode), "versions are due, such as {all: how it is run}"))
            continue
        for span, words in spans.items():
            try:
                modes |= {mode: words} if version in versions_of(str(span), versions) else {}
            except ValueError as error:
                problems.append(document.problem(("modes", mode, str(span)), str(error)))
    return modes, problems


def _rule_problems(facts: FrameworkFacts, document: Document) -> list[Problem]:
    """Rules that would never be answered: versions that are not listed, names that do not exist."""
    known = dict(names_of_rules())
    known["run"] |= _own_names(facts.name)
    problems = []
    for index, rule in enumerate(facts.rules):
        try:
            versions_of(rule.versions, facts.versions)
        except ValueError as error:
            problems.append(document.problem(("rules", index, "versions"), str(error)))
        filled = (name.partition(".") for _, name, _, _ in Formatter().parse(rule.says) if name)
        asked = {
            "require": asked_in(rule.require),
            "when": asked_in(rule.when) if rule.when else frozenset(),
            "says": frozenset((group, name) for group, _, name in filled),
        }
        for part, names in asked.items():
            for group, name in sorted(names):
                if name not in known.get(group, ()):
                    hint = did_you_mean(name, known[group]) if group in known else did_you_mean(group, known)
                    where = ("rules", index, part)
                    problems.append(document.problem(where, f"there is no {group}.{name} that a rule may ask", hint))
    return problems


def _span_problems(facts: FrameworkFacts, document: Document) -> list[Problem]:
    """Facts that no trainer would ever be given: of trainers and versions that the framework has not."""
    problems = []
    for index, setting in enumerate(facts.runs):
        try:
            versions_of(setting.versions, facts.versions)
        except ValueError as error:
            problems.append(document.problem(("runs", index, "versions"), str(error)))
    spans = [("counts", facts.counts), ("old_policy_in", facts.old_policy_in)]
    spans += [("sends", span) for span in facts.sends] + [("reward_hidden", span) for span in facts.reward_hidden]
    for name, span in spans:
        try:
            versions_of(span, facts.versions)
        except ValueError as error:
            problems.append(document.problem((name,), str(error)))
    stated: dict[str, Mapping[str, Mapping[str, object]]] = {name: getattr(facts, name) for name in OF_RELEASES}
    for name, backend, told in ((name, *each) for name, of in stated.items() for each in of.items()):
        if backend not in facts.backends:
            problems.append(document.problem((name, backend), f"backends are {', '.join(facts.backends)}"))
        for span in told:
            try:
                versions_of(span, facts.versions)
            except ValueError as error:
                problems.append(document.problem((name, backend, span), str(error)))
    return problems


def _own_names(framework: str) -> frozenset[str]:
    """Names of the frozen tables (`Run.facts`) that a framework's module or package has."""
    owned = (
        value
        for value in vars(import_module(f"rlperf.frameworks.{framework}")).values()
        if isinstance(value, type) and is_dataclass(value) and value.__name__.endswith("Facts")
    )
    return frozenset(entry.name for table in owned for entry in fields(table))


def _keyless(
    adapter: Adapter, table: KeyTable, version: str, backends: Sequence[str], said: Sequence[Rule]
) -> list[Rule]:
    """Rules against what no key states, unless it is what the adapter reads from a file that says nothing."""
    empty: dict[str, Run | None] = {}
    for backend in backends:
        try:
            empty[backend] = adapter.read(Source({}), Target(table, version, backend))[0]
        except (SpecError, ValueError, TypeError, KeyError):  # a file without its allocation says nothing at all
            empty[backend] = None
    return keyless_rules(adapter.fields, table, version, empty, said)


def checked(adapter: Adapter) -> Adapter:
    """The adapter, every key of its table of fields known to a version of its key table.

    Raises
    ------
    LookupError : a key is none of the framework's; what stands under it would be left out of every file
    """
    if wrong := misspelled(adapter.fields, key_table(adapter.name)):
        raise LookupError(f"{adapter.name}.tsv has in no version: {'; '.join(wrong)}")
    return adapter


def node_shape(devices: int, per_node: int) -> tuple[int, int] | None:
    """(nodes, devices per node) of a pool, or None where its nodes would differ.

    >>> node_shape(16, 8), node_shape(4, 8), node_shape(12, 8)
    ((2, 8), (1, 4), None)
    """
    if devices <= per_node:
        return 1, devices
    return (devices // per_node, per_node) if devices % per_node == 0 else None


def states(
    adapter: Adapter, version: str | None, engine: str, at: Ref, backends: Sequence[str] = ("",), value: object = None
) -> bool:
    """Whether a file of the version, for this engine and one of the trainers, can say a ``value`` of a run's field."""
    table, others = key_table(adapter.name), {"vllm", "sglang"} - {engine}
    entries = [entry for entry in adapter.fields if entry.at == at]
    entries = [entry for entry in entries if not any(other in key for key in entry.keys for other in others)]
    number = table.version(version)
    return any(entry.states(table, number, backend, value) for entry in entries for backend in backends)
