"""``rlperf calibrate logs``: a framework's constants and stages on this cluster, from the step metrics of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlperf.cli.output import AsJson, console, print_json, print_table, progress
from rlperf.units import human_share

if TYPE_CHECKING:
    from rlperf.calibrate.logs.fit import LogFit


def logs(
    log: Annotated[list[Path], typer.Argument(help="Step metrics: console log, JSONL, CSV, trainer state, tfevents.")],
    job: Annotated[Path, typer.Option(help="Job file with pinned pools, or the framework's own configuration.")],
    rollouts: Annotated[Path | None, typer.Option(help="Rollout dump of the same rl_steps, for their lengths.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json, for dumps that hold text only.")] = None,
    framework: Annotated[str | None, typer.Option(help="Framework of the log, where it is not recognised.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Cluster, where --job is a framework's configuration.")] = None,
    workload: Annotated[str | None, typer.Option(help="Lengths, where --job is a framework's configuration.")] = None,
    architecture: Annotated[str | None, typer.Option(help="Its model, where --job names none we know.")] = None,
    warm_up: Annotated[
        int, typer.Option(min=0, help="First rl_steps to leave out, which compile and fill caches.")
    ] = 1,
    out: Annotated[Path | None, typer.Option(help="File to write; default: where predictions of the job look.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run tells of this cluster, and what stays unknown; write a calibration file that carries both.

    Three rl_steps are enough. Jobs in the same folder find the file by themselves.

    Example: rlperf calibrate logs run.log --job job.yaml
    """
    from rlperf.files import calibrate_logs

    with progress("fitting"):
        fit, target = calibrate_logs(
            log, job, framework=framework, cluster=cluster, workload=workload, architecture=architecture,
            rollouts=rollouts, tokenizer=tokenizer, warm_up=warm_up, out=out,
        )  # fmt: skip
    if as_json:
        print_json(
            {
                "file": None if target is None else str(target),
                "rl_steps": fit.steps,
                "noise": dict(fit.noise),
                "constants": [vars(each) for each in fit.constants],
                "factors": [vars(each) for each in fit.factors],
                "spread": dict(fit.spread),
                "median_ape_before": dict(fit.before),
                "median_ape_after": dict(fit.after),
                "notes": list(fit.notes),
            }
        )
        return
    _show(fit)
    nothing = "the log tells nothing that another run could use: no file is written"
    found = "; jobs in the folder of this one find it by themselves" if out is None else ""
    wrote = nothing if target is None else f"wrote {target}{found}"
    console().print(wrote, soft_wrap=True, markup=False)


def _show(fit: LogFit) -> None:
    """The fit for people: what the log told of constants and stages, errors before and after, what stays uncertain."""
    rows = [
        (
            each.name,
            f"{each.shipped:.4g}",
            f"{each.value:.4g}",
            f"{each.low:.4g} .. {each.high:.4g}",
            human_share(each.share),
        )
        for each in (*fit.constants, *fit.factors)
    ]
    heads = ("constant [s] or stage [1]", fit.start, "here", "5 .. 95 %", "told by the log")
    print_table(heads, rows, title=f"{fit.steps} rl_steps")
    screen = console()
    for stage, error in fit.after.items():
        before, after, noise = (human_share(each, 1) for each in (fit.before[stage], error, fit.noise[stage]))
        told = f"{before} {fit.start}, {after} with what all configurations share"
        screen.print(f"{stage}: median error {told}; noise {noise}", soft_wrap=True)
    left = ", ".join(f"{stage} {human_share(sigma)}" for stage, sigma in fit.spread.items())
    screen.print(f"standard deviation left for other configurations: {left}", soft_wrap=True)
    for note in fit.notes:
        screen.print(note, markup=False)
