"""``rlperf import``: an existing configuration or launch script as a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlperf.cli.audited import ArchitectureName, Config
from rlperf.cli.output import AsJson, console, print_json
from rlperf.errors import Problem, SpecError
from rlperf.specs.framework_names import LISTED

DEFAULT = Path("job.yaml")


def _target(out: Path | None, force: bool) -> Path:
    """Where the job goes: a file that the user did not name is not overwritten unasked."""
    if out is None and DEFAULT.exists() and not force:
        raise SpecError(Problem("is there already", str(DEFAULT), suggestion="name a file with --out, or add --force"))
    return out or DEFAULT


def import_(
    config: Config,
    framework: Annotated[str | None, typer.Option(help=f"{LISTED} (==version), or recognised.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Cluster that it runs on; the file does not say.")] = None,
    architecture: ArchitectureName = None,
    workload: Annotated[str | None, typer.Option(help="Length preset, model or trace; the file does not say.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The job file; what it cannot state goes beside it. Default: job.yaml.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a job.yaml that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read a framework's configuration into a job with pinned pools. Nothing of it is executed.

    Unknown keys are listed; what the file leaves out is filled with that version's own defaults.

    Example: rlperf import run_grpo.sh --cluster dgx_h100 --out job.yaml
    """
    from rlperf.files import import_config
    from rlperf.frameworks.imports import describe

    found = import_config(
        config, _target(out, force), framework=framework, cluster=cluster, architecture=architecture, workload=workload
    )
    if as_json:
        print_json(found.to_dict())
        return
    screen = console()
    job, keys = found.files
    screen.print(describe(found.imported), soft_wrap=True, markup=False)
    screen.print(f"{job}, and the keys that a job cannot state in {keys}", soft_wrap=True, markup=False)
    for note in found.notes():
        screen.print(note, soft_wrap=True, markup=False)
