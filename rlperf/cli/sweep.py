"""``rlperf sweep``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Literal

import typer

from rlperf.cli.output import AsJson, console, print_json, progress
from rlperf.errors import InfeasibleError


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="A job, and which of its fields vary.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the results; the same one resumes.")],
    backend: Annotated[
        Literal["processes", "dask", "ray"], typer.Option(help="Where points are computed.")
    ] = "processes",
    address: Annotated[str | None, typer.Option(help="Dask scheduler or Ray head; default: one is started.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default one per core.", min=1)] = None,
    figures: Annotated[bool, typer.Option(help="Draw the figures that the sweep's axes allow.")] = True,
    as_json: AsJson = False,
) -> None:
    """A grid or a list over any field of a job: results.parquet, results.csv, figures.

    Example: rlperf sweep sweep.yaml --out sweep/
    """
    from rlperf.api import sweep_job

    try:
        with progress("sweeping") as bar:
            found = sweep_job(file, out, workers=workers, backend=backend, address=address, report=bar)
            names = ["results.parquet", "results.csv", "columns.csv"]
            if figures:
                from rlperf.report.sweep_figures import write_sweep_figures

                bar(1.0, "done, drawing figures")
                names += [path.name for path in write_sweep_figures(found, out)]
    except KeyboardInterrupt:
        warnings.filterwarnings("ignore", message=".*still being processed by the workers")  # as was asked for
        print(f"what is done is kept in {out}: the same command goes on from there", file=sys.stderr)
        raise
    best = found.best()
    if as_json:
        print_json({"points": found.checked.points, "counts": found.counts, "best": best, "files": names})
    else:
        from rlperf.report.sweep_text import print_sweep

        screen = console()
        print_sweep(found, screen)
        screen.print(f"wrote {out}: " + ", ".join(names))
    if best is None:
        raise InfeasibleError("no point of the sweep can be run; the column reason says why")
