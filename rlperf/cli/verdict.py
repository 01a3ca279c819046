"""``rlperf verdict``: is this speed normal, and what to change first."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rlperf.cli.output import AsJson, console, print_json


def verdict(
    config: Annotated[list[Path], typer.Argument(help="YAML, launch script, overrides or flags; several are one.")],
    log: Annotated[Path | None, typer.Option(help="Step metrics of the run: console, JSONL, CSV, tfevents.")] = None,
    framework: Annotated[str | None, typer.Option(help="Framework (==version); default: recognised.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Cluster that it runs on; default: dgx_h100, assumed.")] = None,
    architecture: Annotated[
        str | None, typer.Option(help="Shipped name or config.json, where the checkpoint's path does not say.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Lengths: preset, model or trace; default: math, assumed.")
    ] = None,
    rollouts: Annotated[Path | None, typer.Option(help="Rollout dump of the run, for its lengths.")] = None,
    plan: Annotated[bool, typer.Option(help="Also ask the planner for the best on the same hardware.")] = True,
    as_json: AsJson = False,
) -> None:
    """Is this speed normal? One line, then at most three changes with the gain of each, in the framework's own keys.

    With --log the measured rl_step is held against what this hardware should take; without, the prediction against the
    best plan. Exit code 0: normal; 1: slow, or nothing could be predicted; 2: it cannot be read.

    Example: rlperf verdict run_grpo.yaml --log console.log --cluster dgx_h100
    """
    from rlperf.files import audit_config
    from rlperf.frameworks.verdict import lines_of, verdict_of

    found = audit_config(
        config, framework=framework, cluster=cluster, architecture=architecture, workload=workload, log=log,
        rollouts=rollouts, plan=plan,
    )  # fmt: skip
    said = verdict_of(found)
    if as_json:
        plain = None if said is None else {**asdict(said), "normal": said.normal, "line": said.line}
        print_json({"schema_version": 1, "verdict": plain, "notes": list(found.notes)})
    else:
        lines = ["no verdict: time could not be predicted", *found.notes] if said is None else lines_of(said)
        for line in lines:
            console().print(line, soft_wrap=True, markup=False)
        assumed = [t for t, given in (("cluster dgx_h100", cluster), ("workload math", workload)) if given is None]
        for text in assumed:
            console().print(f"assumed: {text}")
    if said is None or not said.normal:
        raise typer.Exit(1)
