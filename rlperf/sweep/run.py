"""Runs a sweep: tasks over joblib's backends (processes, or a Dask or Ray cluster), resumable, merged in the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.processes import cores, said_if_killed, worked
from rlperf.specs.given import as_count
from rlperf.specs.job import Job
from rlperf.specs.trainer_calibration import load_trainer
from rlperf.sweep.columns import Column, columns_of
from rlperf.sweep.evaluate import GroupEvaluator
from rlperf.sweep.paths import with_values
from rlperf.sweep.result import SweepResult
from rlperf.sweep.space import Group, groups_of
from rlperf.sweep.spec import Ask, Checked
from rlperf.sweep.store import NAMED, Store, SweepTask, context_digest, parquet, task_of
from rlperf.told import Tell, quiet

Backend = Literal["processes", "dask", "ray"]
LARGEST = 10_000
"""Points of a group that are evaluated at once; larger groups are cut."""
LEAST_TASKS = 24
"""Tasks that a sweep is cut into where it has groups enough: the grain of progress and of a resume."""
MOST_GROUPS = 8
"""Groups per task: how much work a kill can cost."""
FULL = 2_000
"""Points per task beyond which no further group joins."""
AT_ONCE = 8
"""Tasks per worker that are handed over at once where a backend returns results only all together."""

_evaluators: dict[str, GroupEvaluator] = {}
"""The evaluator of the sweep that this process works for; a worker keeps it from task to task."""


def run_sweep(
    checked: Checked, ask: Ask, out: Path | None = None, *, workers: int | None = None,
    backend: Backend = "processes", address: str | None = None, report: Tell | None = None,
) -> SweepResult:  # fmt: skip
    """Evaluate every point that is not there yet, then merge.

    Parameters
    ----------
    ask : resolves a job and the folder of its paths to context and framework rules; a module's function, since it
        travels to the workers by name
    out : folder of the results; None: a temporary one that is gone afterwards
    workers : processes; default one per core
    backend, address : where tasks run; the address of a Dask scheduler or a Ray head (default: one started here)
    report : called with the share done and a text

    Raises
    ------
    SpecError : names of the sweep that cannot be found, a folder that cannot be written, or a backend that is none
    """
    if wrong := _wrong_backend(workers, backend, address):
        raise SpecError(wrong)
    check_names(checked, ask)
    if out is None:
        with tempfile.TemporaryDirectory(prefix="rlperf-sweep-") as name:
            found = _run(checked, ask, Path(name), workers, backend, address, report)
            return SweepResult(checked, found.frame.lazy())
    return _run(checked, ask, out, workers, backend, address, report)


def _run(
    checked: Checked, ask: Ask, out: Path, workers: int | None, backend: Backend, address: str | None,
    report: Tell | None,
) -> SweepResult:  # fmt: skip
    store, count = Store.open(out), workers or cores()
    digest = context_digest(checked)
    tasks = tasks_of(checked, digest)
    missing = [task for task in tasks if not store.has(task)]
    done, total = checked.points - sum(task.points for task in missing), checked.points
    points = {task.key: task.points for task in missing}
    tell = report or quiet
    first = f", the first {min(count, len(missing)):,} under way" if missing and not done else ""
    tell(done / total, f"{done:,} of {total:,} points{first}")
    work = partial(
        run_task, base=checked.base, folder=checked.folder, method=checked.sweep.method, ask=ask,
        columns=columns_of(checked), sweep=digest,
    )  # fmt: skip
    for key, content in _results(work, missing, count, backend, address):
        store.put(key, content)
        done += points[key]
        tell(done / total, f"{done:,} of {total:,} points")
    import polars as pl

    return SweepResult(checked, pl.scan_parquet(store.merge(checked, tasks), glob=False), out)


def tasks_of(checked: Checked, digest: str) -> list[SweepTask]:
    """Groups in tasks; how they are cut depends on the sweep alone, so that any number of workers can resume it."""
    groups = [part for group in groups_of(checked) for part in _cut(group)]
    grain = max(1, min(MOST_GROUPS, len(groups) // LEAST_TASKS))
    found: list[SweepTask] = []
    held: list[Group] = []
    for group in groups:
        held.append(group)
        if len(held) >= grain or sum(len(each.ids) for each in held) >= FULL:
            found.append(task_of(held, digest))
            held = []
    if held:
        found.append(task_of(held, digest))
    return found


def _cut(group: Group) -> Iterator[Group]:
    for start in range(0, len(group.ids), LARGEST):
        yield group.part(slice(start, start + LARGEST))


def run_task(
    task: SweepTask, *, base: dict[str, Any], folder: Path | None, method: Any, ask: Ask, columns: tuple[Column, ...],
    sweep: str,
) -> tuple[str, bytes]:  # fmt: skip
    """Evaluate one task: its key and its rows as Parquet. Runs in a worker."""
    import polars as pl

    if sweep not in _evaluators:
        _evaluators.clear()
        _evaluators[sweep] = GroupEvaluator(base, folder, method, ask)
    evaluator = _evaluators[sweep]
    return task.key, parquet(pl.concat([evaluator.frame(group, columns) for group in task.groups]))


Work = Callable[[SweepTask], tuple[str, bytes]]


def _results(
    work: Work, tasks: list[SweepTask], workers: int, backend: Backend, address: str | None
) -> Iterator[tuple[str, bytes]]:
    """Results as they come, through joblib; distribution is the backend's business."""
    if backend == "processes" and (workers == 1 or len(tasks) <= 1):
        yield from map(work, tasks)
        return
    from joblib import Parallel, delayed

    with _cluster(backend, address, workers) as slots:
        if backend == "ray":
            # Ray's backend hands results over only when a whole batch is done
            size = AT_ONCE * slots
            for start in range(0, len(tasks), size):
                yield from Parallel(n_jobs=slots)(delayed(work)(task) for task in tasks[start : start + size])
            return
        parallel = Parallel(n_jobs=slots, return_as="generator_unordered", batch_size=1)
        with said_if_killed("run the same command again, with fewer --workers; what is done is kept"):
            yield from parallel(delayed(worked)(work, task, os.getpid()) for task in tasks)


def _wrong_backend(workers: int | None, backend: str, address: str | None) -> list[Problem]:
    """What no tasks run on: another backend, fewer than one worker, the address of a cluster that is not asked for."""
    known, found = get_args(Backend), []
    if backend not in known:
        words = f"backend {backend!r} is none of {', '.join(known)}"
        found.append(Problem(words, suggestion=did_you_mean(backend, known)))
    try:
        as_count(1 if workers is None else workers, "workers")
    except SpecError as error:
        found += error.problems
    if address is not None and backend == "processes":
        words = f"the address {address} is read by no processes of this machine"
        found.append(Problem(words, suggestion="backend dask, or ray"))
    return found


def _cluster(backend: Backend, address: str | None, workers: int) -> AbstractContextManager[int]:
    """The joblib backend that was asked for, and how many tasks it takes at once."""
    if backend == "processes":
        return nullcontext(workers)
    from rlperf.sweep import clusters

    return clusters.dask(address, workers) if backend == "dask" else clusters.ray(address, workers)


def check_names(checked: Checked, ask: Ask) -> None:
    """Every name of an axis is looked up before work starts; combinations that contradict each other become rows."""
    trials = [((path, value),) for path, values in checked.axes for value in values]
    named = [tuple(pair for pair in trial if _is_name(*pair)) for trial in [*trials, *checked.entries]]
    problems: dict[str, Problem] = {}
    for settings in dict.fromkeys(trial for trial in named if trial):
        try:
            ask(Job.model_validate(with_values(checked.base, settings)), checked.folder)
        except SpecError as error:
            # other problems are the combination's own: its points say so
            mine = [p for p in error.problems if any(str(value) in str(p) for _, value in settings)]
            problems |= {str(problem): problem for problem in mine}
        except ValueError:
            continue  # not valid alone: combinations have been tried when the sweep was read
    for path, value in dict.fromkeys(pair for trial in [*trials, *checked.entries] for pair in _trainers(trial)):
        try:
            load_trainer(value, folder=checked.folder)
        except SpecError as error:
            # looked up alone: whether the framework has it is a matter of the combination
            found = (p if p.file else Problem(f"{path}: {p.message}", None, None, p.suggestion) for p in error.problems)
            problems |= {str(problem): problem for problem in found}
    if problems:
        raise SpecError(list(problems.values()))


def _trainers(settings: tuple[tuple[str, Any], ...]) -> Iterator[tuple[str, str]]:
    """Names of trainer backends among some settings: one, or a list of them."""
    for path, value in settings:
        if path == "trainer_backends":
            yield from ((path, name) for name in ((value,) if isinstance(value, str) else value))


def _is_name(path: str, value: Any) -> bool:
    return path.rpartition(".")[2] in NAMED and isinstance(value, str)
