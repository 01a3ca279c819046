"""The answer of an audit, and its words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from rlperf.errors import Problem
from rlperf.frameworks.audit.beside_log import Compared
from rlperf.frameworks.audit.finding import LIKELY, Finding
from rlperf.frameworks.imports import Imported
from rlperf.plan.answer import notebook
from rlperf.plan.answer.plan import Phase, Plan, Prediction
from rlperf.plan.question.pool import PoolPlan
from rlperf.plan.question.words import layout_words
from rlperf.specs.job import Job
from rlperf.specs.pool import PoolSpec, of_role
from rlperf.units import human_risk, human_seconds, with_probability

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Audit:
    """What was found, sorted; the prediction of the configuration as it is; the planner's best on the same hardware."""

    imported: Imported
    job: Job | None
    findings: tuple[Finding, ...]
    predicted: Prediction | None
    best: Plan | None = None
    notes: tuple[str, ...] = ()
    unresolved: tuple[Problem, ...] = ()
    """Names that could not be looked up, for which nothing was predicted."""
    measured: tuple[Compared, ...] = ()
    unjudged: str = ""
    """What was not judged by a prediction, and why; among the notes too."""
    ended: str = ""
    """How the run of the log broke off, where it did."""
    cautions: tuple[str, ...] = ()
    """Why the log's seconds and the predicted ones may not compare: other lengths, a calibration that this log told."""
    shortage: str = ""
    """That the engine's cache holds no longest request, where it does not."""
    unlike: bool = False
    """Whether the log's responses are of other lengths than those predicted with, by more than `ALIKE`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `rlperf audit --json` prints it."""
        return {
            "schema_version": 1,
            "framework": self.imported.adapter.name,
            "version": self.imported.target.version,
            "passes": self.passes,
            "findings": [finding.to_dict() for finding in self.findings],
            "memory": memory_words(self),
            "predicted": self.predicted.model_dump(mode="json") if self.predicted else None,
            "best": self.best.phases[0].model_dump(mode="json") if self.best else None,
            "measured": [asdict(each) for each in self.measured],
            "ended": self.ended,
            "notes": [*self.cautions, *self.notes],
        }

    def to_frame(self) -> pl.DataFrame:
        """One row per finding."""
        found = [{**finding.to_dict(), "settings": str(finding.settings or "")} for finding in self.findings]
        return notebook.frame(found, [each.name for each in fields(Finding)])

    def __str__(self) -> str:
        return "\n".join(report(self))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def broken(self) -> bool:
        """Whether an error was found."""
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def passes(self) -> bool | None:
        """Whether a gate lets it through: no error, and it more likely than not keeps within memory, as its run did."""
        return self.passes_at(LIKELY)

    def passes_at(self, most_risk: float) -> bool | None:
        """Whether it passes where running out of memory may be so likely [1]; None: nothing was predicted."""
        if self.ended:
            return False
        if self.predicted is None:
            return False if self.broken else None
        others = any(each.severity == "error" and each.rule != "out_of_memory" for each in self.findings)
        return not others and risk_of(self.predicted) <= most_risk


def pools_words(phase: Phase) -> str:
    """``rollout 16 x TP2 DP8, trainer 16 x TP1 DP16, ZeRO-3 (fsdp2)``: devices and layout of a phase's main pools."""
    return ", ".join(
        f"{pool.role} {pool.devices} x {layout_words(pool.layout)} ({pool.settings.backend})"
        for pool in phase.pools
        if pool.role in ("rollout", "trainer") or pool.own_devices
    )


def best_words(best: Plan, job: Job | None) -> str:
    """Mode and layouts of the planner's best; where those are the file's own, what it sets otherwise."""
    phase = best.phases[0]
    now = {pool.role: pool for pool in job.pools} if job else {}
    changed = [each for pool in phase.pools if pool.role in now for each in _otherwise(pool, now[pool.role])]
    if job is not None and changed and phase.mode in job.modes and not any(layout for layout, _ in changed):
        return f"the file's layouts with {', '.join(words for _, words in changed)}"
    return f"{phase.mode}: {pools_words(phase)}"


def _otherwise(pool: PoolPlan, now: PoolSpec) -> Iterator[tuple[bool, str]]:
    """What a pool decides otherwise than the file: whether it is the layout's, and in words."""
    for each in of_role(pool.role):
        value, given = (getattr(getattr(part, each.part), each.name) for part in (pool, now))
        given = given[0] if isinstance(given, tuple) else given
        cut = each.name == "microbatch"  # by tokens, where there is a budget
        if each.decided in ("stated", "listed") or value in (None, given) or (cut and pool.settings.token_budget):
            continue
        yield each.part == "layout" and not cut, f"{pool.role} {each.name} {value} instead of {given or 'unset'}"


def risk_of(predicted: Prediction) -> float:
    """Probability that any pool runs out of device memory."""
    return 1.0 - float(np.prod([1.0 - use.risk for use in predicted.memory_bytes.values()]))


def too_large(findings: Sequence[Finding]) -> bool:
    """Whether running out of memory is among the errors."""
    return any(each.severity == "error" and each.rule == "out_of_memory" for each in findings)


def memory_words(found: Audit) -> str:
    """Whether the memory holds the configuration, and why it is no error where a plan would not take it."""
    if found.predicted is None or found.job is None:
        return ""
    ends = f"runs out of memory {with_probability(risk_of(found.predicted))}"
    if too_large(found.findings):
        return f"does not fit: {ends}" + (f"; {found.shortage}" if found.shortage else "")
    if found.shortage:
        return f"does not fit: {found.shortage}"
    if found.predicted.fits:
        return f"fits: {ends}"
    most = human_risk(found.job.limits.out_of_memory_risk)
    why = f"(out_of_memory_risk: {most}, half for each role)"
    return f"{ends}: a plan would not take it {why}, a gate stops it above {100 * LIKELY:.0f} %"


def report(found: Audit) -> Sequence[str]:
    """The audit as lines of text."""
    lines = [found.ended] if found.ended else []
    lines += [line for finding in found.findings for line in str(finding).splitlines()]
    if found.predicted is not None:
        said = found.predicted
        low, high = human_seconds(said.low_s), human_seconds(said.high_s)
        lines.append(f"predicted {human_seconds(said.rl_step_s)} per rl_step ({low} .. {high})")
        lines += [memory_words(found), *said.warnings]
    lines += [compared.words for compared in found.measured]
    lines += found.cautions
    if found.best is not None:
        seconds = human_seconds(found.best.phases[0].predicted.rl_step_s)
        lines.append(f"the planner's best on the same hardware: {seconds} ({best_words(found.best, found.job)})")
    lines += list(found.notes)
    return lines
