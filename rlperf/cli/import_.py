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
    from rlperf.cli.audited import assumed_of
    from rlperf.frameworks.carried import keys_file
    from rlperf.frameworks.imports import describe, import_config, job_of, job_text, keys_text, with_architecture
    from rlperf.specs.writer import write_atomic

    out = _target(out, force)
    imported = with_architecture(import_config(config, framework), architecture)
    job = job_of(imported, cluster=cluster, workload=workload, name=config[0].stem)
    write_atomic(out, job_text(job))
    write_atomic(keys_file(out), keys_text(imported))
    assumed = assumed_of(imported, cluster, workload)
    assumed += filter(None, [_shape_note(job.architecture)])
    assumed += [f"{base}, which is not here, states nothing beside the defaults" for base in imported.absent_bases]
    problems = [(item, "unknown key") for item in imported.unknown]
    problems += [(item, "not accepted") for item in imported.illegal]
    if as_json:
        print_json(
            {
                "framework": imported.adapter.name,
                "version": imported.target.version,
                "job": job.model_dump(mode="json", exclude_none=True),
                "unknown": [{"key": i.key, "where": i.where, "suggestion": i.suggestion} for i in imported.unknown],
                "not_accepted": [{"key": i.key, "where": i.where, "why": i.suggestion} for i in imported.illegal],
                "defaults": imported.filled(),
                "carried": imported.carried,
                "assumed": assumed,
            }
        )
        return
    screen = console()
    screen.print(describe(imported), soft_wrap=True)
    screen.print(f"{out}, and the keys that a job cannot state in {keys_file(out)}", soft_wrap=True)
    for item, what in problems:
        hint = f" ({item.suggestion})" if item.suggestion else ""
        screen.print(f"{item.where}: {what} {item.key}{hint}", soft_wrap=True, markup=False)
    if left := len(imported.filled()):
        screen.print(f"{left} performance keys left to the defaults of {imported.framework}")
    for text in assumed:
        screen.print(f"assumed: {text}")


def _shape_note(name: str) -> str:
    """Which shape stands for the name; empty where it is the shape's own, or not known on this machine."""
    from rlperf.errors import SpecError
    from rlperf.specs.profiles import architecture_reading

    try:
        return architecture_reading(name).note
    except SpecError:
        return ""
