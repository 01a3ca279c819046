"""``rlperf replan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlperf.cli.output import AsJson, console, print_json, print_table, progress

if TYPE_CHECKING:
    from rlperf.plan.answer.plan import Plan
    from rlperf.plan.replan import Replan
    from rlperf.specs.job import Job

SCHEMA_VERSION = 1


def replan(
    job: Annotated[Path, typer.Argument(help="Job file, or the plan.yaml that the run follows.")],
    log: Annotated[list[Path], typer.Option(help="Step metrics: console log, JSONL, CSV, trainer state, tfevents.")],
    rollouts: Annotated[list[Path], typer.Option(help="Rollout dump of the framework, or PolyTrace files.")],
    at_step: Annotated[int, typer.Option(min=1, help="First rl_step that may run otherwise.")],
    running: Annotated[
        Path | None, typer.Option(help="What runs: plan, job or framework configuration. Default: what JOB plans.")
    ] = None,
    switch: Annotated[str | None, typer.Option(help="Cost of changing the layout, such as '10 min'.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json, for dumps that hold text only.")] = None,
    framework: Annotated[str | None, typer.Option(help="Framework of the log, where it is not recognised.")] = None,
    as_json: AsJson = False,
) -> None:
    """Whether a running job should change its layout for the rest of its rl_steps; only where it surely pays.

    Example: rlperf replan plan/plan.yaml --log run.log --rollouts rollouts/ --at-step 40
    """
    from rlperf.api import ask
    from rlperf.errors import SpecError
    from rlperf.frameworks.logs.dumps import read_rollouts
    from rlperf.frameworks.logs.read import read_log, same_framework
    from rlperf.plan.predict import evaluate_job
    from rlperf.plan.replan import replan_job
    from rlperf.specs.own_files import folder_of
    from rlperf.units import parse_quantity

    folder = folder_of(job)
    asked, runs = _jobs(job, running, at_step)
    if switch is not None:
        try:
            cost = parse_quantity(switch, "s")
        except ValueError as error:
            raise SpecError(f"--switch: {error}") from error
        asked = asked.model_copy(update={"horizon": asked.horizon.model_copy(update={"switch": cost})})
    steps = same_framework(read_log(log, framework), runs.framework)
    with progress("planning the remaining rl_steps"):
        question = ask(asked, folder=folder)
        at_work = ask(runs, folder=folder_of(running or job))
        current = evaluate_job(at_work.context, at_work.facts)[0].configuration
        cap, updates = max(asked.tasks[0].max_response_tokens), at_work.context.site.updates(current.batch)
        table = read_rollouts(rollouts, tokenizer=tokenizer, max_response_tokens=cap, updates=updates)
        found = replan_job(question.context, current, steps, table, at_step, facts=question.facts)
    if as_json:
        print_json(summary_of(found))
    else:
        _print(found)


def _jobs(path: Path, running: Path | None, at_step: int) -> tuple[Job, Job]:
    """The job whose rest is planned, and the one that runs, pinned."""
    from rlperf.api import plan_job
    from rlperf.frameworks.imports import read_job_or_config
    from rlperf.plan.compare import job_of_plan
    from rlperf.plan.question.context import with_trainers

    plan = _plan(path)
    asked = plan.job if plan else read_job_or_config(path)
    if running is None:
        plan = plan or plan_job(path)
        phase = next((p for p in plan.phases if p.rl_steps[0] <= at_step - 1 <= p.rl_steps[1]), plan.phases[0])
        runs = job_of_plan(plan, phase)
    else:
        runs = read_job_or_config(running, cluster=asked.cluster, workload=asked.tasks[0].workload)
    backends = tuple(dict.fromkeys(name for job in (asked, runs) for name in with_trainers(job).trainer_backends))
    return asked.model_copy(update={"trainer_backends": backends}), runs


def _plan(path: Path) -> Plan | None:
    """A plan where the file is one."""
    from rlperf.plan.answer.reading import plan_in
    from rlperf.specs.reader import read_document

    return plan_in(read_document(path)) if path.suffix in (".yaml", ".yml", ".json") else None


def summary_of(found: Replan) -> dict[str, Any]:
    """The recommendation as plain data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": found.verdict,
        "sentence": found.sentence(),
        "at_step": found.at_step,
        "gain": found.gain,
        "low": found.low,
        "high": found.high,
        "saved": found.saved,
        "stay_step_s": found.stay_s,
        "planned_step_s": found.planned_s,
        "differs": list(found.differs),
        "phases": [
            {
                "rl_steps": list(each.rl_steps),
                "mode": each.configuration.mode,
                "pools": [pool.model_dump(mode="json") for pool in each.configuration.pools],
            }
            for each in found.stretches
        ],
        "stages": [
            {
                "stage": each.stage,
                "measured_over_predicted": each.value,
                "sigma": each.sigma,
                "rl_steps": each.rl_steps,
            }
            for each in found.factors
        ],
        "lengths": [vars(each) for each in found.lengths],
        "notes": list(found.notes),
    }


def _print(found: Replan) -> None:
    from rlperf.units import human_seconds

    screen = console()
    screen.print(f"[bold]{found.sentence()}[/bold]")
    screen.print(
        f"rl_step, mean over the rest of the run: {human_seconds(found.stay_s)} as it runs, "
        f"{human_seconds(found.planned_s)} as planned"
    )
    for text in found.differs:
        screen.print(f"  {text}", markup=False)
    rows = [
        (each.stage.replace("_", " "), f"{each.value:.3f} +- {each.sigma:.3f}", str(each.rl_steps))
        for each in found.factors
    ]
    print_table(("stage", "measured / predicted", "rl_steps"), rows)
    for length in found.lengths:
        around = f"({length.low:,.0f} .. {length.high:,.0f})"
        screen.print(f"rl_step {length.rl_step}: mean response {length.mean:,.0f} tokens {around}")
    for text in (*(found.lengths[-1].known,), *found.notes):
        screen.print(text, markup=False)
