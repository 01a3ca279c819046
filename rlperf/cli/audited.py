"""What commands about a framework's configuration are asked: its files, and what they do not say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rlperf.frameworks.imports import Imported

Config = Annotated[
    list[Path], typer.Argument(help="YAML, launch script, TRL's program, overrides or flags; several are one.")
]
Framework = Annotated[str | None, typer.Option(help="Framework (==version); default: recognised.")]
ClusterName = Annotated[
    str | None, typer.Option(help="Cluster that it runs on; default: its header says, or dgx_h100.")
]
ArchitectureName = Annotated[str | None, typer.Option(help="Name or config.json, if the path does not say.")]
WorkloadName = Annotated[str | None, typer.Option(help="Lengths: preset, model or trace; else as the file hints.")]
Log = Annotated[
    list[Path] | None,
    typer.Option(metavar="<path>", help="Step metrics of the run (several: one run): console, JSONL, CSV, tfevents."),
]
Rollouts = Annotated[Path | None, typer.Option(help="Rollout dump of the run, for its lengths.")]
AlsoPlan = Annotated[bool, typer.Option(help="Also ask the planner for the best on the same hardware.")]


def assumed_lines(imported: Imported, cluster: str | None, lengths: str | Path | None) -> list[str]:
    """Lines that say what stands for names that were not given; ``lengths``: a workload, or rollouts of the run."""
    from rlperf.files import assumed_of

    return [f"assumed: {each}" for each in assumed_of(imported, cluster, lengths)]
