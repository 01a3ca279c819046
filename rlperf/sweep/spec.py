"""Sweep: a job and the fields of it that vary, read from YAML and refused at once when it cannot be run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from rlperf.errors import Problem, SpecError
from rlperf.plan.answer.reading import plan_in
from rlperf.plan.question.context import Context
from rlperf.specs.choice import counted, plain
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.frozen import Frozen
from rlperf.specs.job import Job
from rlperf.specs.job_document import read_job_document
from rlperf.specs.reader import Document, Key, problems_of, read_document, validate
from rlperf.sweep.axes import MOST_POINTS, axis_length, axis_values
from rlperf.sweep.paths import with_values

Method = Literal["screen", "events", "plan"]
Ask = Callable[[Job, Path | None], tuple[Context, FrameworkFacts | None]]
"""Resolves a job (and the folder where its relative paths start) to its context and its framework's rules."""
TOKENS = (".max_prompt_tokens", ".max_response_tokens", "token_budget")
COMPANIONS = 64
"""Combinations with other axes that are tried before a value is called wrong."""


class Sweep(Frozen):
    """A sweep as its file states it.

    ``grid`` crosses its axes; ``points`` lists settings that belong together; both together: every entry of the list
    with every combination of the grid.
    """

    schema_version: Literal[1] = 1
    name: str = "sweep"
    job: str | dict[str, Any] = Field(description="path of a job file or of a plan.yaml, or the job itself")
    method: Method = Field(
        "screen",
        description="screen: closed forms, the best of what a point leaves open; events: that candidate by event "
        "simulation; plan: the whole planner",
    )
    grid: dict[str, Any] = Field(default_factory=dict, description="dotted path -> list, range or scalar")
    points: tuple[dict[str, Any], ...] = Field((), description="settings that belong together, one entry per point")

    @field_validator("job", mode="before")
    @classmethod
    def _fields_of_a_job(cls, given: Any) -> Any:
        return given.stated() if isinstance(given, Job) else plain(given)

    @field_validator("grid", "points", mode="before")
    @classmethod
    def _tokens_counted(cls, given: Any) -> Any:
        given = plain(given)
        return [_tokens_counted(entry) for entry in given] if isinstance(given, list) else _tokens_counted(given)

    @model_validator(mode="after")
    def _says_something(self) -> Sweep:
        if not self.grid and not self.points:
            raise ValueError("nothing varies: give grid or points")
        if any(not entry for entry in self.points):
            raise ValueError("an entry of points is empty")
        return self


def _tokens_counted(given: Any) -> Any:
    """Settings with numbers for ``16k``, so that an axis of tokens is one of numbers; wrong ones as they are."""

    def number(path: str, value: Any) -> Any:
        try:
            return counted(value) if str(path).endswith(TOKENS) else value
        except ValueError:  # the job says so, with the line
            return value

    return {path: number(path, value) for path, value in given.items()} if isinstance(given, dict) else given


@dataclass(frozen=True)
class Checked:
    """A sweep that can be run: its job, and its axes with their values.

    Attributes
    ----------
    base : data of the job, complete and valid
    folder : where relative paths of the job start
    entries : settings of ``points``; one empty entry where there is no list
    axes : (dotted path, values) of the grid
    """

    sweep: Sweep
    base: dict[str, Any]
    folder: Path | None
    entries: tuple[tuple[tuple[str, Any], ...], ...]
    axes: tuple[tuple[str, tuple[Any, ...]], ...]

    @property
    def points(self) -> int:
        """Number of points."""
        return len(self.entries) * math.prod(len(values) for _, values in self.axes)

    @property
    def varied(self) -> tuple[str, ...]:
        """Dotted paths of everything that varies, in the order of the file."""
        listed = [path for entry in self.entries for path, _ in entry]
        return tuple(dict.fromkeys([*listed, *(path for path, _ in self.axes)]))


def read_sweep(path: Path | str) -> Checked:
    """A sweep from its file; every problem with its line, before any work starts."""
    document = read_document(path)
    if (
        isinstance(document.data, dict)
        and "job" not in document.data
        and {"architecture", "tasks"} & set(document.data)
    ):
        hint = f"a sweep names it and what varies: {{job: {Path(path).name}, grid: {{nodes: [1, 2, 4]}}}}"
        raise SpecError(Problem("is a job, no sweep", str(path), suggestion=hint))
    return check_sweep(validate(document, Sweep), document=document, folder=Path(path).resolve().parent)


def check_sweep(sweep: Sweep, *, document: Document | None = None, folder: Path | None = None) -> Checked:
    """Axes expanded and every value tried on the job.

    Parameters
    ----------
    folder : where the path of the job file starts, or the paths of a job that stands in the sweep

    Raises
    ------
    SpecError : unknown fields, values that no point can take, empty ranges, too many points
    """
    where = document or Document(sweep.model_dump(), {}, sweep.name)
    job, job_folder = _job(sweep, where, folder)
    sizes = _sizes(sweep, where)
    total = max(len(sweep.points), 1) * math.prod(sizes.values())
    if total > MOST_POINTS:
        parts = " x ".join(f"{size:,}" for size in ([len(sweep.points)] if sweep.points else []) + [*sizes.values()])
        raise SpecError(
            where.problem(("grid",), f"{total:,} points ({parts}): at most {MOST_POINTS:,}", "thin out an axis")
        )
    entries = tuple(tuple(entry.items()) for entry in sweep.points) or ((),)
    axes = tuple((path, axis_values(given)) for path, given in sweep.grid.items())
    checked = Checked(sweep, job.stated(), job_folder, entries, axes)
    twice = sorted({path for entry in entries for path, _ in entry} & set(sweep.grid))
    problems = [where.problem(("grid", path), "stands in points as well") for path in twice]
    problems += _trials(checked, where)
    if len(job.tasks) > 1 and sweep.method != "plan":
        several = f"the job has {len(job.tasks)} tasks; method {sweep.method} looks at one"
        problems.append(where.problem(("method",), several, "write method: plan"))
    if problems:
        raise SpecError(problems)
    return checked


def _job(sweep: Sweep, where: Document, folder: Path | None) -> tuple[Job, Path | None]:
    if isinstance(sweep.job, dict):
        inner = Document(sweep.job, {k[1:]: n for k, n in where.lines.items() if k[:1] == ("job",)}, where.file)
        return validate(inner, Job), folder
    path = Path(sweep.job).expanduser()
    if folder is not None and not path.is_absolute():
        path = folder / path
    document = read_job_document(path)
    plan = plan_in(document)
    return plan.question if plan else validate(document, Job), path.resolve().parent


def _sizes(sweep: Sweep, where: Document) -> dict[str, int]:
    """Length of every axis, none of them made yet."""
    found, problems = {}, []
    for path, given in sweep.grid.items():
        try:
            found[path] = axis_length(given)
        except ValueError as error:
            problems.append(where.problem(("grid", path), str(error)))
    if problems:
        raise SpecError(problems)
    return found


def _trials(checked: Checked, where: Document) -> list[Problem]:
    """What is wrong with single values: unknown fields, and values that no combination makes valid."""
    problems: dict[str, Problem] = {}
    for path, values in checked.axes:
        for value in values:
            for problem in _tried(checked, ((path, value),), ("grid", path), where):
                problems.setdefault(str(problem), problem)
            if len(problems) > 20:
                return list(problems.values())
    for index, entry in enumerate(checked.entries):
        for problem in _tried(checked, entry, ("points", index), where) if entry else []:
            problems.setdefault(str(problem), problem)
        if len(problems) > 20:
            break
    return list(problems.values())


def _tried(checked: Checked, values: tuple[tuple[str, Any], ...], key: Key, where: Document) -> list[Problem]:
    """Problems of some settings, unless a combination with the other axes is valid."""
    first: list[Problem] = []
    for others in itertools.islice(_companions(checked, {path for path, _ in values}), COMPANIONS):
        try:
            data = with_values(checked.base, (*others, *values))
            Job.model_validate(data)
        except ValueError as error:
            if not isinstance(error, ValidationError):
                return [where.problem(key, str(error))]
            found = [
                where.problem(key, p.message, p.suggestion) for p in problems_of(error, Document(data, {}, ""), Job)
            ]
            first = first or found
            if all(item["type"] in ("extra_forbidden", "missing") for item in error.errors(include_url=False)):
                return found
        else:
            return []
    return first


def _companions(checked: Checked, paths: set[str]) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Settings of the other axes to try a value with: none, then some of their combinations."""
    yield ()
    others = [[(path, v) for v in values[:4]] for path, values in checked.axes if path not in paths]
    lists = [entry for entry in checked.entries[:8] if not paths & {path for path, _ in entry}] or [()]
    for entry in lists:
        for combination in itertools.product(*others):
            yield (*entry, *combination)
