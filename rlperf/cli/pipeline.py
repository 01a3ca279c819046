"""rlperf pipeline: standard schedules and the best plan found, side by side."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlperf.cli.output import AsJson, console, print_json
from rlperf.errors import SpecError
from rlperf.units import human_share

if TYPE_CHECKING:
    from rlperf.plan.pipeline import PipelinePlan, PipelineProblem
    from rlperf.sim.pipeline import MicrobatchSizes


def pipeline(
    profile: Annotated[Path, typer.Argument(help="Layer profiles (YAML).")],
    devices: Annotated[int, typer.Option("--devices", "-P", help="Devices of the pipeline.")],
    microbatches: Annotated[int | None, typer.Option("--microbatches", "-M", help="Micro-batches.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Profile in the file.")] = None,
    sizes: Annotated[str | None, typer.Option("--sizes", help="Relative sizes: 1,0.5,2.")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="Per device: '80 GB'.")] = None,
    bandwidth: Annotated[str | None, typer.Option("--bandwidth", help="Such as '50 GB/s'.")] = None,
    latency: Annotated[str, typer.Option("--latency", help="Such as '10 us'.")] = "0 s",
    overlap: Annotated[bool, typer.Option("--overlap/--no-overlap", help="Hide transfers.")] = True,
    stages_per_device: Annotated[int, typer.Option("--stages-per-device", help="At most.")] = 8,
    time_limit: Annotated[float, typer.Option("--time-limit", help="Search, seconds.")] = 24.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the search.")] = 0,
    resolution_ms: Annotated[float, typer.Option("--resolution-ms", help="Rounding; 0: none.")] = 0.01,
    trace: Annotated[Path | None, typer.Option("--trace", help="Perfetto (JSON).")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Write .svg or .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Partition, placement and schedule of a pipeline, planned together.

    Example: rlperf pipeline layers.yaml --devices 8 --microbatches 16
    """
    import numpy as np

    from rlperf.plan.pipeline import PipelineProblem, optimize
    from rlperf.specs.pipeline_profile import read_profile

    if figure is not None and figure.suffix not in (".svg", ".png"):
        raise SpecError(f"--figure {figure}: write .svg or .png")
    if not time_limit > 0.0:
        raise SpecError(f"--time-limit {time_limit}: must be positive")
    if resolution_ms < 0.0:
        raise SpecError(f"--resolution-ms {resolution_ms}: must not be negative")
    limit = _quantity("--memory", memory, "bytes")
    problem = PipelineProblem(
        profile=read_profile(profile, name, resolution_ms * 1e-3),
        microbatches=_microbatches(microbatches, sizes),
        devices=devices,
        memory_bytes=None if limit is None else np.full(max(devices, 0), limit),
        bandwidth_bytes_per_s=_quantity("--bandwidth", bandwidth, "bytes_per_s") or float("inf"),
        latency_s=_quantity("--latency", latency, "s") or 0.0,
        overlap=overlap,
        stages_per_device=stages_per_device,
    )
    plan = optimize(problem, time_limit_s=time_limit, seed=seed, progress=_progress())
    if trace is not None or figure is not None:
        _write(plan, problem, trace, figure)
    if as_json:
        print_json(_document(plan, problem))
    else:
        _show(plan, problem)


def _quantity(option: str, text: str | None, dimension: Any) -> float | None:
    from rlperf.units import parse_quantity

    if text is None:
        return None
    try:
        value = parse_quantity(text, dimension)
    except ValueError as error:
        raise SpecError(f"{option}: {error}") from error
    if value < 0.0 or (value == 0.0 and dimension != "s"):
        raise SpecError(f"{option} {text}: must be positive")
    return value


def _microbatches(count: int | None, sizes: str | None) -> MicrobatchSizes:
    import numpy as np

    from rlperf.sim.pipeline import MicrobatchSizes

    if sizes is None:
        if count is None:
            raise SpecError("--microbatches is missing: how many of one size; or --sizes 1,0.5,2 for different ones")
        return MicrobatchSizes.equal(count)
    try:
        values = np.array([float(part) for part in sizes.split(",")])
    except ValueError as error:
        raise SpecError(f"--sizes {sizes}: write numbers with commas between them, such as 1,0.5,2") from error
    if count is not None and count != values.size:
        raise SpecError(f"--microbatches {count}, but --sizes names {values.size}")
    return MicrobatchSizes(values, values**2)


def _progress() -> Callable[[float], None]:
    """A line on stderr every two seconds."""
    last = time.monotonic()

    def report(done: float) -> None:
        nonlocal last
        if time.monotonic() - last >= 2.0:
            last = time.monotonic()
            sys.stderr.write(f"searching: {human_share(min(done, 1.0))}\n")

    return report


def _ms(value_s: float) -> float:
    """Milliseconds without the dust of binary fractions."""
    return round(value_s * 1e3, 9)


def _document(plan: PipelinePlan, problem: PipelineProblem) -> dict[str, Any]:
    runs = {s.name: _ms(s.timeline.makespan_s) for s in plan.standards if s.timeline is not None and s.runs}
    return {
        "name": problem.profile.name,
        "devices": problem.devices,
        "microbatches": problem.microbatches.count,
        "bound_ms": _ms(plan.work_bound_s),
        "proven_bound_ms": _ms(plan.bound_s),
        "best": {
            "makespan_ms": _ms(plan.makespan_s),
            "partition": list(plan.partition),
            "placement": list(plan.placement),
            "gap": plan.work_gap,
            "proven_gap": plan.gap,
            "optimal": plan.optimal,
            "source": plan.source,
            "bubble": plan.timeline.bubble,
            "busy_ms": [_ms(x) for x in plan.timeline.busy_s.tolist()],
            "peak_memory_bytes": plan.timeline.peak_memory_bytes.tolist(),
            "orders": [[f"{'FBW'[k]}{s}.{m}" for k, s, m in order] for order in plan.orders],
            "backward": "merged" if plan.timeline.merged else "split",
        },
        "schedules": runs,
        "not_run": {s.name: s.reason for s in plan.standards if not s.runs},
        "search": {"passes": plan.passes, "seconds": round(plan.seconds, 3)},
    }


def _show(plan: PipelinePlan, problem: PipelineProblem) -> None:
    from rich.table import Table

    from rlperf.units import human_bytes

    out = console()
    table = Table(
        title=f"{problem.profile.name}: {problem.devices} devices, {problem.microbatches.count} micro-batches"
    )
    for column in ("schedule", "makespan [ms]", "idle", "stages", "over 1F1B"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    memory = problem.profile.knows_memory
    if memory:
        table.add_column("peak memory", justify="right")
    base = next((s.timeline.makespan_s for s in plan.standards if s.name == "1F1B" and s.timeline), None)
    rows = [(s.name, s.timeline, s.reason) for s in plan.standards]
    rows.append((f"best ({plan.source})", plan.timeline, ""))
    for title, timeline, reason in rows:
        if timeline is None or reason:
            table.add_row(title, reason or "-")
            continue
        speed = "-" if base is None else f"{base / timeline.makespan_s:.2f}x"
        cells = [
            title,
            f"{timeline.makespan_s * 1e3:.2f}",
            human_share(timeline.bubble, 1),
            str(len(timeline.placement)),
            speed,
        ]
        table.add_row(*cells, *([human_bytes(float(timeline.peak_memory_bytes.max()))] if memory else []))
    out.print(table)
    distance = "proven optimal" if plan.optimal else f"at most {human_share(plan.gap, 1)} above the optimum"
    out.print(f"bound: {plan.work_bound_s * 1e3:.2f} ms (work), {plan.bound_s * 1e3:.2f} ms (proven); {distance}")
    out.print(f"partition: {' '.join(map(str, plan.partition))}")
    out.print(f"placement: {' '.join(map(str, plan.placement))}")


def _write(plan: PipelinePlan, problem: PipelineProblem, trace: Path | None, figure: Path | None) -> None:
    from rlperf.report.pipeline import pipeline_figure, pipeline_trace
    from rlperf.sim.pipeline import stage_costs
    from rlperf.specs.writer import write_atomic

    if trace is not None:
        costs = stage_costs(problem.profile, plan.partition, problem.microbatches)
        known = costs if problem.profile.knows_memory else None
        write_atomic(trace, pipeline_trace(plan.timeline, problem.profile.name, known))
    if figure is not None:
        standard = {s.name: s.timeline for s in plan.standards if s.name == "1F1B" and s.timeline is not None}
        write_atomic(figure, pipeline_figure({**standard, "best plan": plan.timeline}, figure.suffix[1:]))
