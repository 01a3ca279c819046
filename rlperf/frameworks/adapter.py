"""What every framework file provides, and the pieces that it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from rlperf.frameworks.fields import Field, Setting, Target
from rlperf.frameworks.keytable import Value, key_table
from rlperf.frameworks.run import Ref, Run
from rlperf.specs.framework import FrameworkFacts, Rule, facts_data
from rlperf.specs.modes import MODES


@dataclass(frozen=True)
class Limitation:
    """What a framework cannot express, the nearest that it can, and what that costs."""

    asked: str
    nearest: str
    loss: str

    def __str__(self) -> str:
        return f"{self.asked}: cannot be expressed; nearest: {self.nearest}; {self.loss}"


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
    launcher: Mapping[str, Value] = field(default_factory=dict)
    """What the launcher (accelerate, torchrun) is told: ``num_processes`` and the like; no keys of the framework."""


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

    >>> framework_facts("verl", "0.9").modes["async"].startswith("V1 separate_async")
    True
    """
    data = dict(facts_data(framework))
    table = key_table(framework)
    chosen = table.version(version)
    modes = {
        mode: text
        for mode, spans in data.pop("modes").items()
        for span, text in spans.items()
        if _within(str(span), chosen, table.versions)
    }
    modes |= {row.name: row.had_by[framework] for row in MODES.values() if framework in row.had_by}
    rules = [Rule.model_validate(rule) for rule in data.pop("rules")]
    return FrameworkFacts.model_validate(
        {**data, "versions": table.versions, "version": chosen, "modes": modes, "rules": rules}
    )


def _within(span: str, version: str, versions: Sequence[str]) -> bool:
    if span == "all":
        return True
    first, dash, last = span.partition("-")
    last = last if dash else first
    low = versions.index(first) if first else 0
    high = versions.index(last) if last else len(versions) - 1
    return low <= versions.index(version) <= high


_ORGANISATIONS = (
    ("qwen", "Qwen"),
    ("llama", "meta-llama"),
    ("deepseek", "deepseek-ai"),
    ("gemma", "google"),
    ("mixtral", "mistralai"),
    ("mistral", "mistralai"),
    ("ministral", "mistralai"),
    ("gpt-oss", "openai"),
    ("nemotron", "nvidia"),
    ("nvidia", "nvidia"),
    ("glm", "zai-org"),
    ("phi", "microsoft"),
    ("kimi", "moonshotai"),
    ("moonlight", "moonshotai"),
    ("minimax", "MiniMaxAI"),
)


def hub_name(architecture: str) -> str:
    """The Hugging Face repository of a shipped architecture name; a path stays the folder it names.

    >>> hub_name("Qwen3-8B"), hub_name("/ckpt/mine/config.json"), hub_name("org/model")
    ('Qwen/Qwen3-8B', '/ckpt/mine', 'org/model')
    """
    if architecture.endswith("config.json"):
        return architecture.removesuffix("config.json").rstrip("/") or "."
    if "/" in architecture:
        return architecture
    lowered = architecture.lower()
    for start, organisation in _ORGANISATIONS:
        if lowered.startswith(start):
            return f"{organisation}/{architecture}"
    return architecture


def node_shape(devices: int, per_node: int) -> tuple[int, int] | None:
    """(nodes, devices per node) of a pool, or None where its nodes would differ.

    >>> node_shape(16, 8), node_shape(4, 8), node_shape(12, 8)
    ((2, 8), (1, 4), None)
    """
    if devices <= per_node:
        return 1, devices
    return (devices // per_node, per_node) if devices % per_node == 0 else None


def states(adapter: Adapter, version: str | None, engine: str, at: Ref) -> bool:
    """Whether a key of the version, and of this engine, holds a field of a run."""
    table = key_table(adapter.name)
    others = {"vllm", "sglang"} - {engine}
    keys = [entry.key(table, table.version(version), "") for entry in adapter.fields if entry.at == at]
    return any(key is not None and not any(other in key for other in others) for key in keys)
