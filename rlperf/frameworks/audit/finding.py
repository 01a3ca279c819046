"""A finding of an audit: what is wrong with a key, when it shows, and what a change is predicted to gain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from rlperf.frameworks.fields import Field
from rlperf.frameworks.imports import Imported
from rlperf.frameworks.keytable import Flat, Value
from rlperf.frameworks.run import Ref, ref
from rlperf.units import human_seconds

Severity = Literal["error", "warning", "hint"]
"""error: it will fail or run out of memory; warning: it does nothing, or may fail; hint: it could be faster."""
SURELY, LIKELY = 0.9, 0.5
"""Probabilities of running out of memory from which an audit reports an error, and a warning."""
_RANK = {"error": 0, "warning": 1, "hint": 2}


@dataclass(frozen=True)
class Finding:
    """One thing to change.

    key, where : the key of the framework, and its file and line (empty: left to the default)
    when : when the framework itself would notice (launch, worker, run), or never
    gain_s : predicted seconds per rl_step that the change saves, where a change can be predicted
    settings : keys of the framework with values under which the finding goes, read back and judged; empty: none known
    role : the pool that it is about, where it is about one
    """

    severity: Severity
    key: str
    message: str
    advice: str = ""
    when: str = ""
    where: str = ""
    gain_s: float | None = None
    rule: str = ""
    settings: Flat = field(default_factory=dict)
    role: str = ""

    def __str__(self) -> str:
        gain = f"  [gain {human_seconds(self.gain_s)} per rl_step]" if self.gain_s else ""
        where = f"{self.where}: " if self.where else ""
        late = f" (noticed: {self.when})" if self.severity == "error" and self.when else ""
        lines = [f"{self.severity.upper():7} {self.key}{gain}", f"        {where}{self.message}{late}"]
        return "\n".join([*lines, *([f"        {self.advice}"] if self.advice else [])])

    def to_dict(self) -> dict[str, Value]:
        """The stable JSON form."""
        return dict(vars(self))


def sort(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then by predicted gain."""
    unique = {(finding.key, finding.message): finding for finding in findings}
    return tuple(sorted(unique.values(), key=lambda f: (_RANK[f.severity], -(f.gain_s or 0.0), f.key)))


def key_of(imported: Imported, at: Ref) -> str:
    """The key under which this framework and version states a field; the field's own name where it has none."""
    fields: tuple[Field, ...] = imported.adapter.fields
    target = imported.target
    for alias in (at, *_ALIASES.get(at, ())):
        found = [
            entry.key(target.table, target.version, target.backend)
            for entry in fields
            if entry.at == alias and not entry.read_only
        ]
        keys = [key for key in found if key is not None and _serves(key, imported)]
        if keys:
            return next((key for key in keys if key in imported.source.keys), keys[0])
    return str(at)


def _serves(key: str, imported: Imported) -> bool:
    """Whether a key belongs to the engine in use (vLLM's keys do nothing under SGLang)."""
    engine = imported.run.rollout.backend
    other = {"vllm": ("sglang.", "policy.generation.sglang"), "sglang": ("vllm.", "policy.generation.vllm")}
    return not key.startswith(other.get(str(engine), ("\0",))) or imported.adapter.name in ("openrlhf", "verl")


_ALIASES = {
    ref(name): tuple(map(ref, others.split()))
    for name, others in (
        ("trainer.offload", "trainer.offload_optimizer trainer.offload_all"),
        ("trainer.parked", "trainer.parks_optimizer trainer.offload_optimizer"),
        ("trainer.activation_recompute", "trainer.checkpointing"),
        ("trainer.token_budget", "trainer.microbatch"),
        ("batch.context_tokens", "rollout.engine_context"),
    )
}
