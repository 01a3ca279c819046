"""``rlperf explain``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlperf.cli.output import AsJson, TaskName, console, default_job, print_json, progress
from rlperf.units import human_share

if TYPE_CHECKING:
    from rlperf.diagnose.explain import Explanation
    from rlperf.diagnose.scaling import ScalingExplanation


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
    task: TaskName = None,
    figure: Annotated[Path | None, typer.Option(help="Write a figure to this .svg or .png file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Why is it slow? Root causes of an rl_step's time, ranked, with the path to each and the knobs that remove it.

    Example: rlperf explain run.log; rlperf explain job.yaml --scale 64,128,256
    """
    from rlperf.explaining import explain as explain_source

    with progress("explaining"):
        explained = explain_source(
            source or [default_job()], scale=_numbers(scale), floor=floor, token_s=token_s, task=task
        )
    found, scaling = explained.causes, explained.scaling
    if figure is not None:
        _write_figure(found, scaling, figure)
    if as_json:
        print_json(explained.to_dict())
        return
    if explained.ended:
        console().print(explained.ended, style="bold red", markup=False, soft_wrap=True)
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


def _print(found: Explanation, scaling: ScalingExplanation | None) -> None:
    from rich.table import Table

    from rlperf.units import human_seconds as time

    screen = console()
    screen.print(f"rl_step [bold]{time(found.rl_step_s)}[/bold]; losses below {time(found.floor_s)} are not listed")
    path = ", ".join(f"{name.replace('_', ' ')} {time(seconds)}" for name, seconds in found.critical_s[:8])
    screen.print(f"critical path: {path}")
    if scaling is not None:
        screen.print(f"{scaling}")
    if not any(c.nature == "fault" for c in found.causes):
        screen.print("nothing is abnormal; what the rl_step pays by design:" if found.causes else "nothing is abnormal")
    table = Table(box=None, pad_edge=False)
    for name in ("", "cause", "loss", "share", "where, evidence"):
        table.add_column(name, justify="right" if name in ("loss", "share") else "left")
    for number, cause in enumerate(found.causes, start=1):
        nature = f"[bold]{cause.nature_words}[/bold]" if cause.nature == "fault" else cause.nature_words
        table.add_row(
            f"{number} {nature}", cause.kind.replace("_", " "), time(cause.loss_s), human_share(cause.share),
            f"{cause.where}: {cause.evidence}",
        )  # fmt: skip
    if found.causes:
        screen.print(table)
    for number, cause in enumerate(found.causes[:3], start=1):
        screen.print(f"{number} {cause.kind.replace('_', ' ')}")
        for hop in cause.path:
            screen.print(f"   <- {hop}")
        for advice in cause.advice[:3]:
            screen.print(f"   {advice}")
    for pair in found.interactions[:3]:
        how = "hide each other" if pair.excess_s > 0 else "overlap"
        screen.print(f"{pair.kinds[0]} and {pair.kinds[1]} {how}: together {time(pair.together_s)}, not the sum")
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
