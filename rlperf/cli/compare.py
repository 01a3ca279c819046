"""``rlperf compare``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlperf.cli.output import AsJson, TaskName, console, print_json, print_table, progress

if TYPE_CHECKING:
    from rlperf.api import Question
    from rlperf.plan.compare import JobComparison, Side

SCHEMA_VERSION = 1


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Job, plan.yaml or framework configuration.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The other one.")],
    cluster: Annotated[
        str | None, typer.Option(help="Cluster of a framework configuration; default: the other's.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Lengths of a configuration: preset, model or trace; default: the other's.")
    ] = None,
    task: TaskName = None,
    draws: Annotated[int, typer.Option(min=3, help="Common draws of the groups.")] = 12,
    as_json: AsJson = False,
) -> None:
    """Two jobs, plans or framework configurations on the same drawn rl_steps: which is faster, and is it certain?

    Example: rlperf compare plan/plan.yaml run_grpo.yaml --cluster dgx_h100 --workload math
    """
    from rlperf.plan.compare import compare_jobs

    with progress("comparing"):
        jobs = [_job(path, task) for path in (first, second)]
        a, b = (
            own or _configuration(path, other, cluster, workload)
            for path, own, other in zip((first, second), jobs, reversed(jobs), strict=True)
        )
        found = compare_jobs(a.question.context, b.question.context, (a.question.facts, b.question.facts), draws=draws)
    sides = (replace(side, filled=(*own.taken, *side.filled)) for side, own in ((found.first, a), (found.second, b)))
    found = replace(found, first=next(sides), second=next(sides))
    if as_json:
        print_json(summary_of(found, first, second))
    else:
        _print(found, first, second)


@dataclass(frozen=True)
class _Asked:
    """A side, and what was taken for it that its file does not say."""

    question: Question
    taken: tuple[str, ...] = ()


def _job(path: Path, task: str | None) -> _Asked | None:
    """A job file or a plan; None: a framework's configuration."""
    from rlperf.api import ask
    from rlperf.specs.reader import read_document

    if path.suffix in (".yaml", ".yml", ".json"):
        document = read_document(path)
        keys = set(document.data) if isinstance(document.data, dict) else set()
        if {"job", "phases"} <= keys or {"architecture", "tasks"} & keys:
            return _Asked(ask(path, task=task))
    return None


def _configuration(path: Path, other: _Asked | None, cluster: str | None, workload: str | None) -> _Asked:
    """A framework's configuration as a resolved job, where none are given on its header's or the other side's cluster,
    and the other's lengths.

    The file of a plan for A100 was compared on the H100 that an import assumes: 88 % faster than its plan.
    """
    from rlperf.api import ask
    from rlperf.frameworks.imports import (
        import_config,
        job_of,
        planned_cluster,
        planned_workload,
        usual_cluster,
        usual_workload,
    )  # fmt: skip

    job = other.question.context.job if other else None
    lengths = job.tasks[0].workload if job and len(job.tasks) == 1 else None
    beside = {"cluster": job.cluster if job else None, "workload": lengths if isinstance(lengths, str) else None}
    named = {name: value for name, value in beside.items() if value and not Path(value).suffix and "/" not in value}
    imported = import_config([path])
    whose = dict.fromkeys(named, ", as of the other")
    for name, planned in (("cluster", planned_cluster(imported)), ("workload", planned_workload(imported))):
        if planned:
            named[name], whose[name] = planned, ", as its header says"
    given = {"cluster": cluster, "workload": workload}
    usual = {"cluster": usual_cluster(imported)[0], "workload": usual_workload(imported)[0]}
    values = {name: given[name] or named.get(name) or usual[name] for name in usual}
    taken = tuple(f"{name} {values[name]}{whose.get(name, '')}" for name in usual if given[name] is None)
    return _Asked(ask(job_of(imported, **values, name=path.stem)), taken)


def summary_of(found: JobComparison, first: Path, second: Path) -> dict[str, Any]:
    """The comparison as plain data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": found.verdict(first.stem, second.stem),
        "step": {**asdict(found.step), "apart": found.step.apart},
        "device_seconds_per_token": {**asdict(found.device_token), "apart": found.device_token.apart},
        "sides": [_side(path, side) for path, side in ((first, found.first), (second, found.second))],
    }


def _side(path: Path, side: Side) -> dict[str, Any]:
    from rlperf.sim.rl_step.uncertainty import CALIBRATED

    configuration = side.evaluation.configuration
    return {
        "file": str(path),
        "mode": configuration.mode,
        "devices": configuration.devices,
        "rl_step_s": side.evaluation.rl_step_s,
        "draws_s": side.draws_s.tolist(),
        "stages_s": dict(zip([*(name.removesuffix("_s") for name in CALIBRATED), "rest"], side.stages_s, strict=True)),
        "assumed": list(side.filled),
    }


def _print(found: JobComparison, first: Path, second: Path) -> None:
    from rlperf.sim.rl_step.uncertainty import CALIBRATED
    from rlperf.units import human_seconds

    screen = console()
    left, right = _names(first, second)
    screen.print(found.verdict(left, right), style="bold", markup=False)
    rows = []
    names = [*(name.removesuffix("_s").replace("_", " ") for name in CALIBRATED), "rest"]
    for name, a, b in zip(names, found.first.stages_s, found.second.stages_s, strict=True):
        rows.append((name, human_seconds(float(a)), human_seconds(float(b)), f"{b / a:.2f}" if a > 0 else ""))
    a, b = found.first.evaluation.rl_step_s, found.second.evaluation.rl_step_s
    rows.append(("rl_step", human_seconds(a), human_seconds(b), f"{found.step.ratio:.2f}"))
    devices = [side.evaluation.configuration.devices for side in (found.first, found.second)]
    rows.append(("devices", str(devices[0]), str(devices[1]), ""))
    print_table(("", left, right, "second / first"), rows)
    per_token = found.device_token
    screen.print(
        f"device-seconds per trained token: {per_token.ratio:.2f} ({per_token.low:.2f} .. {per_token.high:.2f})"
    )
    for name, side in ((left, found.first), (right, found.second)):
        for text in side.filled:
            screen.print(f"assumed in {name}: {text}", markup=False)


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Both files by their stems, by as many folders more as tell them apart: every plan is called plan.yaml."""
    for parts in range(1, 1 + min(len(first.parts), len(second.parts))):
        left, right = (Path(*path.with_suffix("").parts[-parts:]) for path in (first, second))
        if left != right:
            return str(left), str(right)
    return str(first), str(second)
