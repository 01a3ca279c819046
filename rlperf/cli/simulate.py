"""``rlperf simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlperf.cli.output import AsJson, PhaseNumber, TaskName, console, default_job, print_json, print_table, progress
from rlperf.units import human_seconds

if TYPE_CHECKING:
    from rlperf.sim.rl_step.asynchronous import AsyncResult
    from rlperf.sim.rollout import RolloutResult

SCHEMA_VERSION = 1


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
    from rlperf.report.rollout import perfetto_trace, rollout_figure
    from rlperf.specs.writer import write_atomic

    with progress("simulating"):
        name, trajectories, result, steady, filled = _rollout(job or default_job(), routing, rl_step, phase, task)
        write_atomic(out / "trace.json", perfetto_trace(result, trajectories))
        write_atomic(out / "rollout.svg", rollout_figure(result, title=name).decode())
    summary = summary_of(result)
    summary |= {
        "steady": None if steady is None else steady_summary(steady),
        "job": name,
        "assumed": list(filled),
        "files": [str(out / n) for n in ("trace.json", "rollout.svg")],
    }
    if as_json:
        print_json(summary)
    else:
        _print(summary)


def _rollout(
    path: Path, routing: str, rl_step: int, phase: int, task: str | None
) -> tuple[str, Any, RolloutResult, AsyncResult | None, tuple[str, ...]]:
    """The job's rollout: name, trajectories, outcome, asynchronous steady state, and what was filled in."""
    from rlperf.api import judge
    from rlperf.errors import Problem, SpecError
    from rlperf.plan.judge.timeline import steady_state
    from rlperf.sim.rollout import Trajectories, simulate_rollout
    from rlperf.sim.rollout.routing import suggestion

    if suggestion(routing) != f"did you mean {routing}?":
        raise SpecError(Problem(f"unknown routing {routing!r}", suggestion=suggestion(routing)))
    job, evaluation, found = judge(path, phase=phase, task=task)
    tables = evaluation.demand.tables
    if rl_step >= len(tables):
        raise SpecError(f"--rl-step {rl_step}: this job has {len(tables)} rl_steps to simulate, 0 to {len(tables) - 1}")
    trajectories = Trajectories.from_table(tables[rl_step])
    pool = evaluation.configuration.pool("rollout")
    limits = evaluation.replicas.limits
    replicas = pool.layout.data_parallel
    result = simulate_rollout(
        trajectories, replicas, cost=evaluation.cost, limits=limits, devices_per_replica=pool.devices // replicas,
        routing=routing,  # type: ignore[arg-type]
        options=evaluation.replicas.options,
    )  # fmt: skip
    return job.name, trajectories, result, steady_state(evaluation), (*found.warnings, *found.assumed)


def summary_of(result: RolloutResult) -> dict[str, Any]:
    """The rollout as plain data."""
    from dataclasses import asdict

    return {
        "schema_version": SCHEMA_VERSION,
        "makespan_s": result.makespan_s,
        "replica_finish_s": result.replica_finish_s.tolist(),
        "devices": result.devices.tolist(),
        "trajectories": len(result.finish_s),
        "generated_tokens": result.generated_tokens,
        "tokens_per_s": result.tokens_per_s,
        "mean_running": [timeline.mean_running for timeline in result.timelines],
        "preemptions": result.preemptions,
        "prefix_hit_tokens": sum(timeline.hit_tokens for timeline in result.timelines),
        "lost_device_s": asdict(result.lost),
    }


def steady_summary(steady: AsyncResult) -> dict[str, Any]:
    """An asynchronous steady state as plain data; ``staleness`` is the share of samples so many versions behind."""
    counts = steady.staleness_counts
    return {
        "period_s": steady.period_s,
        "samples_per_s": steady.samples_per_s,
        "staleness_mean": steady.staleness_mean,
        "staleness": (counts / max(int(counts.sum()), 1)).tolist(),
        "queue_samples": steady.queue_samples,
        "trainer_busy": steady.trainer_busy,
        "slots_busy": steady.slots_busy,
    }


def _print(summary: dict[str, Any]) -> None:
    from rlperf.report.rollout import CAUSES

    screen = console()
    screen.print(
        f"[bold]{summary['job']}[/bold]: {summary['trajectories']:,} trajectories, "
        f"{summary['generated_tokens']:,} tokens in [bold]{human_seconds(summary['makespan_s'])}[/bold] "
        f"({summary['tokens_per_s']:,.0f} tokens/s)"
    )
    replicas = zip(summary["devices"], summary["replica_finish_s"], summary["mean_running"], strict=True)
    rows = [(str(r), str(n), f"{finish:.1f}", f"{running:.1f}") for r, (n, finish, running) in enumerate(replicas)]
    print_table(("replica", "devices", "finish [s]", "mean running"), rows)
    device_s = sum(summary["devices"]) * summary["makespan_s"]
    lost = summary["lost_device_s"].items()
    shares_lost = [(CAUSES[name], f"{each:,.0f}", f"{100 * each / device_s:.1f} %") for name, each in lost]
    print_table(("lost to", "device seconds", "share"), shares_lost)
    screen.print(f"preemptions {summary['preemptions']:,}, prefix hits {summary['prefix_hit_tokens']:,} tokens")
    if found := summary["steady"]:
        shares = ", ".join(f"{100 * share:.0f} % {behind}" for behind, share in enumerate(found["staleness"]) if share)
        screen.print(
            f"steady state over 50 rl_steps: [bold]{human_seconds(found['period_s'])}[/bold] each; "
            f"weight versions behind: {found['staleness_mean']:.2f} on average ({shares}); "
            f"{found['queue_samples']:,.0f} samples wait for the trainer, which is busy "
            f"{100 * found['trainer_busy']:.0f} % of the time; engines' slots {100 * found['slots_busy']:.0f} %"
        )
    for text in summary["assumed"]:
        screen.print(f"assumed: {text}")
    screen.print("written: " + ", ".join(summary["files"]) + " (open the trace in ui.perfetto.dev)")
