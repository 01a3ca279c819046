"""Which framework? One job planned under the rules of each, side by side, those that cannot run it with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlperf.alternatives import job_and_folder, judged_plan
from rlperf.api import Jobs, ask, job_of, question_of
from rlperf.errors import ExportError, InfeasibleError, Problem, SolverError, SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.export import losses, plan_texts
from rlperf.frameworks.registry import FRAMEWORKS, adapter_of, split_name
from rlperf.plan.answer import notebook
from rlperf.plan.answer.plan import Plan
from rlperf.plan.answer.whole import WholeStep
from rlperf.plan.compare import compare_weighted
from rlperf.plan.planner import plan_job
from rlperf.plan.question.words import layout_words
from rlperf.processes import over_cores
from rlperf.report.plan_text import paired_words
from rlperf.specs.job import Job
from rlperf.specs.objectives import OBJECTIVES
from rlperf.told import Tell, quiet
from rlperf.units import human_bytes, human_seconds

if TYPE_CHECKING:
    import polars as pl

ALL = "all"
DRAWS = 4
"""Common draws of the prompt groups on which two plans are told apart."""
BORROWED = "with overheads of"
"""What an id says of a framework's calibration that is a relative's (`FrameworkCalibration.borrowed_by`)."""


@dataclass(frozen=True)
class RankedFramework:
    """One framework's plan for the job, or why it has none.

    Attributes
    ----------
    framework : name and version
    plan : its best plan; None: refused
    loss : its objective over the first one's - 1
    apart : whether its objective can be told from the first one's; None of the first
    lost : what its files cannot express of the plan, in words
    why_not : why it is refused; empty where there is a plan
    """

    framework: str
    plan: Plan | None = None
    loss: float | None = None
    apart: bool | None = None
    lost: tuple[str, ...] = ()
    why_not: str = ""

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Which of its constants are a relative's, or lie outside of what was measured."""
        uses = [phase.predicted.calibration for phase in self.plan.phases] if self.plan else []
        ids = (f"nobody measured its rl_steps: {name}" for use in uses for name in use.ids if BORROWED in name)
        return tuple(dict.fromkeys((*ids, *(note for use in uses for note in use.notes))))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know of its plan before any number."""
        phases = self.plan.phases if self.plan else ()
        return tuple(dict.fromkeys(words for phase in phases for words in phase.predicted.warnings))

    def row(self) -> dict[str, Any]:
        """One flat row."""
        named: dict[str, Any] = {"framework": self.framework, "why_not": self.why_not}
        if self.plan is None:
            return named
        step = WholeStep.of(self.plan)
        return {
            **named,
            "rl_step_s": step.rl_step_s, "low_s": step.low_s, "high_s": step.high_s,
            "objective": self.plan.objective, "loss": self.loss, "apart": self.apart,
            "modes": ", ".join(_modes(self.plan)), "rollout": _layout(self.plan, "rollout"),
            "trainer": _layout(self.plan, "trainer"), "peak_memory_bytes": _peak(self.plan),
            "not_expressed": "; ".join(self.lost), "borrowed": "; ".join(self.borrowed),
        }  # fmt: skip


HEAD = ("framework", "rl_step", "against the first", "rollout", "trainer", "mode", "peak memory")


@dataclass(frozen=True)
class FrameworkRanking:
    """Frameworks by what the job minimises, best first; those that are refused last, in the order given."""

    rows: tuple[RankedFramework, ...]

    @property
    def best(self) -> Plan | None:
        """The first one's plan; None where every framework is refused."""
        return self.rows[0].plan

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the plans themselves."""
        return {"schema_version": 1, "rows": [each.row() for each in self.rows]}

    def to_frame(self) -> pl.DataFrame:
        """One row per framework."""
        return notebook.frame([each.row() for each in self.rows])

    def cells(self) -> list[tuple[str, ...]]:
        """Cells of every framework that has a plan, under `HEAD`."""
        return [_cells(each, each.plan, index == 0) for index, each in enumerate(self.rows) if each.plan]

    def notes(self) -> list[str]:
        """Warnings, what verdicts mean, whose overheads are borrowed, what files cannot express, who is refused."""
        plans = [each.plan for each in self.rows if each.plan]
        others = [(each.loss or 0.0, each.apart) for each in self.rows[1:] if each.apart is not None]
        lines = [*self._warnings(), *([words] if (words := paired_words(others)) else [])]
        if len(plans) > 1 and (what := plans[0].job.objective.minimize) != "step_time":
            lines.append(f"ranked and told apart by {OBJECTIVES[what].meaning}, which this job minimises")
        if len(plans) > 1 and any(len(plan.phases) > 1 for plan in plans):
            lines.append(
                "of several phases the objective adds up what they take: by that plans are ranked and told apart"
            )
        lines += [f"{each.framework}: {words}" for each in self.rows for words in each.borrowed]
        lines += [f"not in the files of {each.framework}: {words}" for each in self.rows for words in each.lost]
        return lines + [f"refused: {each.framework}: {each.why_not}" for each in self.rows if each.plan is None]

    def _warnings(self) -> list[str]:
        """Those of all plans once, others behind their framework's name."""
        planned = [each for each in self.rows if each.plan]
        common = [words for words in (planned[0].warnings if planned else ())
                  if all(words in each.warnings for each in planned)]  # fmt: skip
        own = [f"{each.framework}: {words}" for each in planned for words in each.warnings if words not in common]
        return [f"warning: {words}" for words in (*common, *own)]

    def __str__(self) -> str:
        return "\n".join(["  ".join(cells) for cells in self.cells()] + self.notes())

    def _repr_html_(self) -> str:
        return notebook.table(HEAD, self.cells()) + notebook.table(("note",), [(line,) for line in self.notes()])


def plan_frameworks(
    job: Jobs | None = None, frameworks: str | Sequence[str] = ALL, *, report: Tell | None = None,
    folder: Path | None = None, **values: Any,
) -> FrameworkRanking:  # fmt: skip
    """One job planned under each framework, ranked by what the job minimises (its rl_step, if it says nothing else).

    Parameters
    ----------
    frameworks : names (``["verl", "slime==0.3"]``, or ``"verl,slime"``), or ``"all"``
    folder : of a job object, as in `rlperf.api.ask`; that of a file is its own
    values : a job without a file, see `rlperf.api.job_of`

    Raises
    ------
    SpecError : a name that no framework has, or a job that every framework refuses for the same wrong field
    """
    names = names_of(frameworks)
    base, folder = job_and_folder(job_of(job, values), folder)
    tell = report or quiet
    found = over_cores(partial(_planned, base=base, folder=folder), {name: name for name in names}, tell)
    if len({each.why_not for each in found} - {""}) == 1 and not any(each.plan for each in found):
        ask(job_of(base, {"framework": names[0]}), folder=folder, to_plan=True)  # raises what all of them say
    return FrameworkRanking(tuple(_ranked(found, folder)))


def names_of(frameworks: str | Sequence[str]) -> tuple[str, ...]:
    """Names of frameworks, each once however it is spelt, all known.

    >>> names_of("verl, slime==0.3, VERL"), names_of(["nemo-rl"]), len(names_of("all")) > 5
    (('verl', 'slime==0.3'), ('nemo-rl',), True)
    """
    given = frameworks.split(",") if isinstance(frameworks, str) else frameworks
    names = tuple(dict.fromkeys(name.strip() for name in given))
    if not any(names):
        raise SpecError(f"no framework is named: {', '.join(FRAMEWORKS)}, or {ALL}")
    if "" in names:
        raise SpecError(Problem(f"{frameworks!r} has an empty name in it", suggestion="write it without the comma"))
    names = FRAMEWORKS if len(names) == 1 and names[0].lower() == ALL else names
    problems: list[Problem] = []
    known: dict[str, str] = {}
    for name in names:
        try:
            known.setdefault(_titled(name), name)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return tuple(known.values())


def _titled(name: str) -> str:
    """Name and version of a framework as they stand in its facts."""
    bare, version = split_name(name)
    facts = framework_facts(adapter_of(bare).name, version)
    return f"{facts.name} {facts.version}"


def _planned(name: str, *, base: Job, folder: Path | None, report: Tell) -> RankedFramework:
    row = RankedFramework(_titled(name))
    try:
        question = question_of(job_of(base, {"framework": name}), folder)
        plan = plan_job(question.context, facts=question.facts, report=report, defaults=question.defaults)
        plan_texts(plan, folder=folder)  # a plan that no file can state is none
    except (SpecError, InfeasibleError, SolverError, ExportError) as error:
        return replace(row, why_not="; ".join(line.strip() for line in str(error).splitlines()))
    return replace(row, plan=plan, lost=losses(plan, None, folder=folder))


def _ranked(found: Sequence[RankedFramework], folder: Path | None) -> list[RankedFramework]:
    """Best first, each held against the first on the same draws."""
    planned = sorted(((each.plan, each) for each in found if each.plan), key=lambda pair: pair[0].objective)
    rows: list[RankedFramework] = []
    sides = [judged_plan(plan, DRAWS, folder=folder).sides for plan, _ in planned]
    for (plan, row), side in zip(planned, sides, strict=True):
        apart = compare_weighted(sides[0], side).apart if rows else None
        rows.append(replace(row, loss=plan.objective / planned[0][0].objective - 1.0, apart=apart))
    return [*rows, *(each for each in found if each.plan is None)]


def _cells(row: RankedFramework, plan: Plan, first: bool) -> tuple[str, ...]:
    step = WholeStep.of(plan)
    took = f"{human_seconds(step.rl_step_s)} ({human_seconds(step.low_s)} .. {human_seconds(step.high_s)})"
    against = "" if first or row.loss is None else f"{100 * row.loss:+z.1f} %"
    against += ", cannot be told apart" if row.apart is False and not first else ""
    layouts = (_layout(plan, "rollout"), _layout(plan, "trainer"))
    return (row.framework, took, against, *layouts, ", ".join(_modes(plan)), human_bytes(_peak(plan)))


def _modes(plan: Plan) -> list[str]:
    return list(dict.fromkeys(phase.mode for phase in plan.phases))


def _layout(plan: Plan, role: Any) -> str:
    """Backend and degrees of a role, of each phase that has others."""
    pools = [phase.pool(role) for phase in plan.phases]
    return "; ".join(dict.fromkeys(f"{pool.settings.backend} {layout_words(pool.layout)}" for pool in pools))


def _peak(plan: Plan) -> float:
    """Most bytes on a device, of any role and phase."""
    return max(use.total for phase in plan.phases for use in phase.predicted.memory_bytes.values())
