"""What the standard schedules make of a problem: the yardstick, and the floor under every plan."""

from __future__ import annotations

from dataclasses import dataclass

from rlperf.plan.pipeline.problem import PipelineProblem
from rlperf.sim.pipeline import (
    SCHEDULES,
    Orders,
    PipelineTimeline,
    even_partition,
    interleaved_1f1b,
    round_robin,
    simulate,
)

EMBEDDING, HEAD = "E", "L"


@dataclass(frozen=True)
class StandardSchedule:
    """One standard schedule on the uniform partition; ``timeline`` is None where it cannot run, ``reason`` says why."""

    name: str
    partition: tuple[int, ...]
    timeline: PipelineTimeline | None
    reason: str = ""

    @property
    def runs(self) -> bool:
        """Whether it exists for these numbers and fits the memory."""
        return self.timeline is not None and not self.reason


def uniform_partition(problem: PipelineProblem, stages: int) -> tuple[int, ...] | None:
    """Equal numbers of layers per stage, the embedding on top of the first and the head on top of the last stage.

    That is what frameworks do without further orders. None where there are fewer layers than stages.
    """
    kinds = problem.profile.kinds
    front = int(kinds[0] == EMBEDDING and len(kinds) > 1)
    back = int(kinds[-1] == HEAD and len(kinds) > 1)
    middle = len(kinds) - front - back
    if middle < stages:
        return None
    parts = list(even_partition(middle, stages))
    parts[0] += front
    parts[-1] += back
    return tuple(parts)


def standard_schedules(problem: PipelineProblem) -> tuple[StandardSchedule, ...]:
    """GPipe, 1F1B, ZB-H1 and interleaved 1F1B with 2, 3, .. stages per device, as far as they exist."""
    P, M = problem.devices, problem.microbatches.count
    results = []
    part = uniform_partition(problem, P)
    for name, (schedule, merged) in SCHEDULES.items():
        if part is None:
            results.append(StandardSchedule(name, (), None, "fewer layers than devices"))
        else:
            results.append(_run(problem, name, part, schedule(P, M), merged))
    for chunks in range(2, problem.stages_per_device + 1) if P > 1 else ():
        name = "interleaved 1F1B" if chunks == 2 else f"interleaved 1F1B v={chunks}"
        part = uniform_partition(problem, P * chunks)
        if part is None:
            if chunks == 2:
                results.append(StandardSchedule(name, (), None, f"fewer than {P * chunks} layers"))
            break
        if M % P:
            results.append(StandardSchedule(name, part, None, f"needs micro-batches in multiples of {P}"))
            break
        results.append(_run(problem, name, part, interleaved_1f1b(P, M, chunks), True))
    return tuple(results)


def _run(
    problem: PipelineProblem, name: str, partition: tuple[int, ...], orders: Orders, merged: bool
) -> StandardSchedule:
    costs = problem.stage_costs(partition)
    placement = round_robin(len(partition), problem.devices)
    timeline = simulate(costs, placement, orders, merged=merged, overlap=problem.overlap)
    over = problem.exceeds(timeline.peak_memory_bytes)
    return StandardSchedule(name, partition, timeline, over)
