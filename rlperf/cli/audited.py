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
    return [f"assumed: {each}" for each in assumed_of(imported, cluster, lengths)]


def assumed_of(imported: Imported, cluster: str | None, lengths: str | Path | None) -> list[str]:
    """The same in words alone."""
    from rlperf.frameworks.imports import (
        planned_cluster,
        planned_reward,
        planned_rollout,
        planned_workload,
        usual_cluster,
        usual_workload,
    )
    from rlperf.units import human_seconds

    def named(planned: str | None, otherwise: str, theirs: str) -> str:
        if planned:
            return f"{planned}, as the file's header says"
        return f"{otherwise}, where the file's header has {theirs}" if theirs else otherwise

    device, workload, header = planned_cluster(imported), planned_workload(imported), imported.source.planned
    known, lengths_known = (", ".join(filter(None, each(imported))) for each in (usual_cluster, usual_workload))
    rollout = planned_rollout(imported, cluster)
    device = f"{device} and rollout on {rollout}" if device and rollout else device
    defaults = ((f"cluster {named(device, known, header.cluster)}", cluster),
                (f"workload {named(workload, lengths_known, header.lengths)}", lengths))  # fmt: skip
    found = [text for text, given in defaults if given is None]
    reward = planned_reward(imported, lengths if isinstance(lengths, str) else None)
    return found if reward is None else [*found, f"rewards of {human_seconds(reward)}, as its header says"]
