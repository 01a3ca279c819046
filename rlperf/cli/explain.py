"""``rlperf explain``."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlperf.cli.output import AsJson, console, default_job, print_json, progress

if TYPE_CHECKING:
    from rlperf.diagnose.explain import Explanation
    from rlperf.diagnose.graph import PerformanceGraph
    from rlperf.diagnose.scaling import ScalingExplanation

Notes = tuple[str, ...]


def explain(
    source: Annotated[
        list[Path] | None,
        typer.Argument(help="Job, plan.yaml, framework log, per-rank timings (JSONL), or PolyTrace files or folder."),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Numbers of devices, as 64,128,256: a job is predicted at each; of several logs, one each."),
    ] = None,
    floor: Annotated[float, typer.Option(min=0.0, max=1.0, help="Smallest share of an rl_step to report.")] = 0.01,
    token_s: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds per generated token, for recordings of lengths only.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Write a figure to this .svg or .png file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Why is it slow? Root causes of an rl_step's time, ranked, with the path to each and the knobs that remove it.

    Example: rlperf explain run.log; rlperf explain job.yaml --scale 64,128,256
    """
    with progress("explaining"):
        found, scaling = _explain(source or [default_job()], _numbers(scale), floor, token_s)
    if figure is not None:
        _write_figure(found, scaling, figure)
    if as_json:
        print_json(_plain(found, scaling))
        return
    _print(found, scaling)
    if figure is not None:
        console().print(f"figure: {figure}", soft_wrap=True)


def _numbers(text: str | None) -> tuple[int, ...]:
    from rlperf.errors import SpecError

    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts) or len(set(parts)) < len(parts):
        raise SpecError(f"--scale {text}: different whole numbers are due, such as 64,128,256")
    return tuple(int(part) for part in parts)


def _explain(
    sources: list[Path], scale: tuple[int, ...], floor: float, token_s: float | None
) -> tuple[Explanation, ScalingExplanation | None]:
    from rlperf.diagnose.explain import explain_graph
    from rlperf.diagnose.predicted import explain_prediction
    from rlperf.diagnose.scaling import explain_scales
    from rlperf.errors import Problem, SpecError

    missing = [Problem("no such file or folder", str(path)) for path in sources if not path.exists()]
    if missing:
        raise SpecError(missing)
    if sources[0].suffix in (".yaml", ".yml"):
        if len(sources) > 1:
            raise SpecError("one job or plan at a time; logs may be several, with --scale")
        if scale:
            return _job_at_scales(sources[0], scale, floor)
        steps, notes = _predicted(sources[0])
        return explain_prediction(steps, floor=floor, notes=notes), None
    recorded = _recorded(sources, token_s)
    if recorded is not None:
        return explain_graph(recorded[0], floor=floor, notes=recorded[1]), None
    if len(scale) not in (0, len(sources)) or (len(sources) > 1 and not scale):
        raise SpecError(f"{len(sources)} logs need --scale with as many numbers of devices")
    graphs = [_log(path, devices) for path, devices in zip(sources, scale or (0,), strict=True)]
    if len(graphs) == 1:
        return explain_graph(graphs[0], floor=floor), None
    found = explain_scales(graphs, floor=floor)
    return found.largest, found


def _predicted(path: Path) -> tuple[Any, Notes]:
    from rlperf.api import ask
    from rlperf.diagnose.sources import steps_of_job, steps_of_plan
    from rlperf.plan.answer.plan import Plan
    from rlperf.specs.reader import read_document, validate

    document = read_document(path)
    if isinstance(document.data, dict) and "phases" in document.data:
        return steps_of_plan(validate(document, Plan), path.resolve().parent)
    question = ask(path)
    return steps_of_job(question.context, question.facts)


def _job_at_scales(path: Path, scale: tuple[int, ...], floor: float) -> tuple[Explanation, ScalingExplanation | None]:
    from rlperf.api import ask, facts_of
    from rlperf.diagnose.peers import Thresholds
    from rlperf.diagnose.predicted import explain_prediction
    from rlperf.diagnose.scaling import explain_scales
    from rlperf.diagnose.sources import scaled_job, steps_of_job
    from rlperf.errors import SpecError
    from rlperf.plan.question.context import resolve

    question = ask(path)
    if len(scale) < 2:
        raise SpecError("--scale needs at least two numbers of devices")
    jobs = [scaled_job(question.job, question.context.cluster, devices) for devices in sorted(scale)]
    predicted = [steps_of_job(resolve(job, folder=path.resolve().parent), facts_of(job)) for job in jobs]
    graphs = [steps.graph() for steps, _ in predicted]
    last, notes = predicted[-1]
    found = explain_scales(graphs, floor=floor, limits=replace(Thresholds(), serial=math.inf), notes=notes)
    largest = explain_prediction(last, floor=floor, notes=notes)
    known = {(c.kind, c.where) for c in largest.causes}
    faults = tuple(c for c in found.largest.faults if (c.kind, c.where) not in known)
    return replace(largest, causes=(*faults, *largest.causes)), found


def _recorded(sources: list[Path], token_s: float | None) -> tuple[PerformanceGraph, Notes] | None:
    """The graph of PolyTrace files; None where the sources are something else."""
    from rlperf.calibrate.engine_trace import read_engine_traces
    from rlperf.diagnose.recorded import graph_of_recording, graph_of_traces
    from rlperf.specs.reader import first_record
    from rlperf.workload import read_recording

    first = sources[0]
    if first.is_dir() and any(first.rglob("*tfevents*")):
        return None
    archive = first.name.endswith((".tar.gz", ".tgz", ".tar"))
    inside = sorted(first.rglob("*.jsonl")) if first.is_dir() else [] if archive else [first]
    head = first_record(inside[0]) if inside else None
    known = head is not None and {"turns", "output", "reward_time_s"} & head.keys()
    if not (first.is_dir() or archive or known):
        return None
    files = [f for path in sources for f in (sorted(path.rglob("*.jsonl")) if path.is_dir() else [path])]
    if head is not None and "turns" in head:
        return graph_of_traces(read_engine_traces(files))
    return graph_of_recording(read_recording(sources, skip_damaged=True), token_s=token_s)


def _log(path: Path, devices: int) -> PerformanceGraph:
    from rlperf.diagnose.logs import graph_of_ranks, graph_of_steps, logged_steps, read_rank_timings
    from rlperf.frameworks.logs import read_log
    from rlperf.specs.reader import first_record

    head = first_record(path)
    if head is not None and "stage" in head:
        return graph_of_ranks(read_rank_timings(path), devices)
    return graph_of_steps(logged_steps(read_log([path])), devices)


def _plain(found: Explanation, scaling: ScalingExplanation | None) -> dict[str, Any]:
    plain: dict[str, Any] = {"schema_version": 1, **asdict(found), "critical_s": dict(found.critical_s)}
    if scaling is not None:
        plain["scaling"] = {
            "devices": scaling.devices,
            "rl_step_s": scaling.rl_step_s,
            "ideal_slope": scaling.ideal,
            "scaling_loss_s": scaling.scaling_loss_s,
            "activities": [asdict(a) for a in scaling.activities],
        }
    return plain


def _print(found: Explanation, scaling: ScalingExplanation | None) -> None:
    from rich.table import Table

    screen = console()
    screen.print(f"rl_step [bold]{found.rl_step_s:,.1f} s[/bold]; losses below {found.floor_s:,.1f} s are not listed")
    path = ", ".join(f"{name.replace('_', ' ')} {seconds:,.1f}" for name, seconds in found.critical_s[:8])
    screen.print(f"critical path, seconds: {path}")
    if scaling is not None:
        steps = ", ".join(f"{n}: {s:,.1f} s" for n, s in zip(scaling.devices, scaling.rl_step_s, strict=True))
        screen.print(
            f"scaling: {steps}; {scaling.scaling_loss_s:,.1f} s lost against ideal (devices ^ {scaling.ideal:g})"
        )
        for row in scaling.activities[:3]:
            screen.print(f"  {row.activity.replace('_', ' ')} goes with devices ^ {row.slope:.2f}, "
                         f"{row.share:.0%} of the rl_step")  # fmt: skip
    if not any(c.nature == "fault" for c in found.causes):
        screen.print("nothing is abnormal; what the rl_step pays by design:" if found.causes else "nothing is abnormal")
    table = Table(box=None, pad_edge=False)
    for name in ("", "cause", "seconds", "share", "where, evidence"):
        table.add_column(name, justify="right" if name in ("seconds", "share") else "left")
    for number, cause in enumerate(found.causes, start=1):
        mark = "[bold]fault[/bold]" if cause.nature == "fault" else "by design"
        table.add_row(
            f"{number} {mark}", cause.kind.replace("_", " "), f"{cause.loss_s:,.1f}", f"{cause.share:.0%}",
            f"{cause.where}: {cause.evidence}",
        )  # fmt: skip
    if found.causes:
        screen.print(table)
    for number, cause in enumerate(found.causes[:3], start=1):
        screen.print(f"{number} {cause.kind.replace('_', ' ')}")
        for hop in cause.path:
            screen.print(f"   <- {hop}")
        for advice in cause.advice[:3]:
            gain = "" if advice.gain_s is None else f" (at most {advice.gain_s:,.1f} s)"
            if advice.predicted_by == "simulation":
                gain = f" ({advice.gain_s:,.1f} s, simulated)"
            screen.print(f"   {advice.knob}: {advice.action}{gain}")
    for pair in found.interactions[:3]:
        how = "hide each other" if pair.excess_s > 0 else "overlap"
        screen.print(f"{pair.kinds[0]} and {pair.kinds[1]} {how}: together {pair.together_s:,.1f} s, not the sum")
    for note in found.notes:
        screen.print(f"note: {note}", style="dim")


def _write_figure(found: Explanation, scaling: ScalingExplanation | None, path: Path) -> None:
    from rlperf.errors import SpecError
    from rlperf.report.explain import explain_figure
    from rlperf.specs.writer import write_atomic

    form = path.suffix.lstrip(".")
    if form not in ("svg", "png"):
        raise SpecError(f"--figure {path}: .svg or .png is due")
    write_atomic(path, explain_figure(found, scaling, form))
