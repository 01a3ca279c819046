"""``rlperf verdict``: is this speed normal, and what to change first."""

from __future__ import annotations

from dataclasses import asdict

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


def verdict(
    config: Config,
    log: Log = None,
    framework: Framework = None,
    cluster: ClusterName = None,
    architecture: ArchitectureName = None,
    workload: WorkloadName = None,
    rollouts: Rollouts = None,
    plan: AlsoPlan = True,
    as_json: AsJson = False,
) -> None:
    """Is this speed normal? One line, then at most three changes with the gain of each, in the framework's own keys.

    With --log the measured rl_step is held against what this hardware should take; without, the prediction against the
    best plan. Exit code 0: normal; 1: slow, out of memory, or nothing could be predicted; 2: it cannot be read.

    Example: rlperf verdict run_grpo.yaml --log console.log --cluster dgx_h100
    """
    from rlperf.files import audit_config
    from rlperf.frameworks.audit.verdict import lines_of, reasons, verdict_of

    with progress("judging") as bar:
        found = audit_config(
            config, framework=framework, cluster=cluster, architecture=architecture, workload=workload, log=log,
            rollouts=rollouts, plan=plan, report=bar,
        )  # fmt: skip
    said = verdict_of(found)
    if as_json:
        plain = None if said is None else {**asdict(said), "normal": said.normal, "line": said.line}
        print_json({"verdict": plain, "notes": list(found.notes) if said else reasons(found)})
    else:
        lines = ["no verdict: time could not be predicted", *reasons(found)] if said is None else lines_of(said)
        for line in (*lines, *assumed_lines(found.imported, cluster, workload or rollouts)):
            console().print(line, soft_wrap=True, markup=False)
    if said is None or not said.normal:
        raise typer.Exit(1)
