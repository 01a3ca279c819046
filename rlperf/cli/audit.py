"""``rlperf audit``: what is wrong with a framework configuration, and what to change first."""

from __future__ import annotations

from typing import Annotated

import typer

from rlperf.cli.audited import (
    AlsoPlan,
    ArchitectureName,
    ClusterName,
    Config,
    Framework,
    Log,
    Rollouts,
    WorkloadName,
    assumed_lines,
)
from rlperf.cli.output import AsJson, console, print_json, progress

UNPREDICTED = "keys and rules hold, but memory and time could not be predicted: that is no pass"
UNCHECKED = "keys hold, but rules were not checked, and memory and time not predicted: that is no pass"


def _share(value: float) -> float:
    """A probability; the range is checked here, for beside the option it makes the help too tall for a screen."""
    if not 0.0 <= value <= 1.0:
        raise typer.BadParameter(f"{value:g} is not between 0 and 1")
    return value


def audit(
    config: Config,
    framework: Framework = None,
    cluster: ClusterName = None,
    architecture: ArchitectureName = None,
    workload: WorkloadName = None,
    log: Log = None,
    rollouts: Rollouts = None,
    tokenizer: Annotated[str | None, typer.Option(help="For dumps of text: its tokenizer.json.")] = None,
    strict: Annotated[bool, typer.Option(help="Warnings fail the gate too.")] = False,
    most_risk: Annotated[
        float, typer.Option(metavar="<share>", callback=_share, help="Most risk of out of memory.")
    ] = 0.5,
    plan: AlsoPlan = True,
    as_json: AsJson = False,
) -> None:
    """Check a configuration before it costs GPU hours: rules, memory, keys without effect.

    Exit code 0: nothing fails; 1: an error, or memory above --most-risk
    (with --strict a warning or no prediction, too); 2: it cannot be read.

    Example: rlperf audit run_grpo.yaml --cluster dgx_h100
    """
    from rlperf.files import audit_config
    from rlperf.frameworks.audit.answer import report
    from rlperf.frameworks.imports import describe

    with progress("auditing") as bar:
        found = audit_config(
            config, framework=framework, cluster=cluster, architecture=architecture, workload=workload, log=log,
            rollouts=rollouts, tokenizer=tokenizer, plan=plan, report=bar,
        )  # fmt: skip
    passes = found.passes_at(most_risk)
    if strict and (passes is None or any(f.severity == "warning" for f in found.findings)):
        passes = False
    if as_json:
        print_json({**found.to_dict(), "passes": passes})
    else:
        screen = console()
        screen.print(describe(found.imported), soft_wrap=True)
        for line in report(found):
            screen.print(line, soft_wrap=True, markup=False)
        for line in assumed_lines(found.imported, cluster, workload or rollouts):
            screen.print(line)
        unknown = UNCHECKED if found.imported.run.wrong else UNPREDICTED
        screen.print({True: "passes", False: "does not pass", None: unknown}[passes], soft_wrap=True)
    if passes is False:
        raise typer.Exit(1)
