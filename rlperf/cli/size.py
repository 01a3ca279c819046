"""``rlperf size``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rlperf.cli.asked import AskedJob, asks_job
from rlperf.cli.output import AsJson, console, print_json, print_table, progress
from rlperf.errors import InfeasibleError, Problem, SpecError

if TYPE_CHECKING:
    from rlperf.plan.sizing import Sizing
    from rlperf.specs.job import Limits


@asks_job
def size(
    asked: AskedJob,
    target: Annotated[str, typer.Option("--target", "-t", help="step<=300s, usd/step<=5 or run<=3d")],
    cluster: Annotated[
        list[str] | None, typer.Option(metavar="<str>", help="To try; repeat for several. Default: the job's.")
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(metavar="<str>", help="To try at USD a device and hour: h100=2.5,a100=1.3.")
    ] = None,
    most_nodes: Annotated[int, typer.Option(help="Largest number of nodes.", min=1)] = 64,
    as_json: AsJson = False,
) -> None:
    """The smallest or cheapest cluster on which a job meets a target.

    Every device of the nodes is billed. Also: the floor that no nodes beat.

    Example: rlperf size job.yaml --target "step<=10min" --price h100=2.5,h200=3.1,a100=1.3
    """
    from rlperf.api import load_job, size_job

    job, prices = asked.job(any_size=True), _prices(price or ())
    with progress("sizing") as bar:
        found = size_job(job, target, clusters=cluster or (), prices=prices, most_nodes=most_nodes, report=bar)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)
    if found.best is None:
        unplanned = any(row.rl_step_s is None for row in found.rows)
        own = _own_limits(load_job(job).limits) if unplanned else ""
        nearest = f"; {found.nearest}" if found.nearest else ""
        raise InfeasibleError(f"no cluster of at most {most_nodes} nodes meets {target}{own}{nearest}")


def _own_limits(limits: Limits) -> str:
    """What the job itself bounds besides the target, in words: nothing slower or dearer is ever planned."""
    from rlperf.units import human_seconds, human_usd

    stated = [] if limits.step is None else [f"step {human_seconds(limits.step)}"]
    stated += [] if limits.usd_per_step is None else [f"usd_per_step {human_usd(limits.usd_per_step)} USD"]
    return f" within the job's own limits ({', '.join(stated)})" if stated else ""


def _prices(texts: Sequence[str]) -> dict[str, str]:
    """Prices by the name of a cluster or device."""
    found: dict[str, str] = {}
    for text in (part for each in texts for part in each.split(",")):
        name, equals, usd = text.partition("=")
        if not (equals and name.strip() and usd.strip()):
            raise SpecError(Problem(f"--price {text!r} names no price", suggestion="write it as h100=2.5,a100=1.3"))
        if found.setdefault(name.strip(), usd.strip()) != usd.strip():
            raise SpecError(Problem(f"--price states two prices of {name.strip()}", suggestion="state one"))
    return found


def _print(found: Sizing) -> None:
    from rlperf.plan.sizing import HELPS
    from rlperf.report.plan_text import print_plan
    from rlperf.units import human_seconds, human_usd

    two = any(row.rollout_nodes for row in found.rows)
    heads = ("cluster", "nodes", *(["rollout nodes"] if two else []), "devices", "rl_step", "USD", "meets")
    rows = [
        (
            row.cluster, str(row.nodes), *([str(row.rollout_nodes or "-")] if two else []), str(row.devices),
            "-" if row.rl_step_s is None else human_seconds(row.rl_step_s),
            "-" if row.usd_per_step is None else human_usd(row.usd_per_step),
            "yes" if row.meets else "no",
        )
        for row in found.rows
    ]  # fmt: skip
    print_table(heads, rows)
    out = console()
    for (cluster, note), nodes in _notes(found).items():
        out.print(f"{', '.join(map(str, nodes))} x {cluster}: {note}", markup=False)
    for floor in found.floors:
        least = f"no number of {floor.cluster} nodes brings an rl_step below {human_seconds(floor.rl_step_s)}"
        out.print(f"{least}: {floor.waits_for}", markup=False)
        if floor.enough_nodes is not None:
            beyond = f"beyond {floor.enough_nodes} nodes of {floor.cluster}"
            out.print(f"{beyond} more of them save less than {100 * HELPS:.0f} %", markup=False)
    if found.best is not None and found.plan is not None:
        out.print(f"[bold]{found.verdict}[/bold]")
        for words in filter(None, (found.doubt, found.passed_over)):
            out.print(words, markup=False)
        print_plan(found.plan, out)


def _notes(found: Sizing) -> dict[tuple[str, str], list[int]]:
    """Numbers of nodes by their cluster and what is to be said of them: too long for a column."""
    noted: dict[tuple[str, str], list[int]] = {}
    for row in found.rows:
        if row.note:
            noted.setdefault((row.cluster, row.note), []).append(row.nodes)
    return noted
