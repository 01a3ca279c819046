"""``rlperf simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rlperf.cli.output import AsJson, PhaseNumber, TaskName, console, default_job, print_json, print_table, progress

if TYPE_CHECKING:
    from rlperf.sim.rollout.routing import Routing
    from rlperf.simulating import SimulatedJob


def simulate(
    job: Annotated[Path | None, typer.Argument(help="Job file with pinned pools, or a plan.yaml.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for trace and figure; made if it is not there.")] = Path("simulate"),
    routing: Annotated[
        str, typer.Option(help="round_robin, static_group, least_loaded or prefix_aware")
    ] = "round_robin",
    rl_step: Annotated[int, typer.Option(min=0, help="Which of the job's sampled or recorded rl_steps.")] = 0,
    phase: PhaseNumber = 1,
    task: TaskName = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one rollout of a job event by event; write a trace for Perfetto and a figure.

    Of asynchronous modes the steady state too: its period, staleness and queue. What the job leaves open is filled in
    as by `rlperf predict`.

    Example: rlperf simulate job.yaml --out rollout
    """
    from rlperf.simulating import simulate_job

    how = cast("Routing", routing)
    with progress("simulating"):
        found = simulate_job(job or default_job(), out, routing=how, rl_step=rl_step, phase=phase, task=task)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)


def _print(found: SimulatedJob) -> None:
    from rlperf.simulating import LOST_HEAD, REPLICA_HEAD

    screen = console()
    screen.print(found.head, style="bold", markup=False)
    print_table(REPLICA_HEAD, found.replica_cells())
    print_table(LOST_HEAD, found.lost_cells())
    for note in found.notes():
        screen.print(note, markup=False)
    screen.print(f"written: {', '.join(map(str, found.files))} (open the trace in ui.perfetto.dev)", markup=False)
