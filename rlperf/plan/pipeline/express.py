"""What a framework with stage layouts can take over from a plan, and what it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from rlperf.plan.pipeline.optimize import PipelinePlan
from rlperf.plan.pipeline.standard import EMBEDDING, HEAD
from rlperf.sim.pipeline import round_robin
from rlperf.specs.pipeline_profile import LayerProfile


@dataclass(frozen=True)
class StageLayout:
    """A plan in the terms of Megatron-Core's pipelines: stage s on rank s mod P, layers listed per stage.

    layout : stages from first to last with | between them; E embedding, t layer, L head (the words of
        ``pipeline_model_parallel_layout``); None where the placement cannot be stated
    virtual_pipeline : stages per device
    first_stage_layers, last_stage_layers : where all other stages are equal (``num_layers_in_first_pipeline_stage``,
        ``num_layers_in_last_pipeline_stage``); else None
    beyond : what the plan needs and cannot be stated
    """

    layout: str | None
    virtual_pipeline: int | None
    first_stage_layers: int | None
    last_stage_layers: int | None
    beyond: tuple[str, ...]


def stage_layout(plan: PipelinePlan, profile: LayerProfile) -> StageLayout:
    """Megatron-Core's knobs for a plan, as far as they exist.

    Reference: Megatron-Core 0.13, ``TransformerConfig.pipeline_model_parallel_layout`` and ``num_layers_in_first_``/
    ``last_pipeline_stage``; its schedules are 1F1B and interleaved 1F1B with a merged backward.
    """
    devices, stages = len(plan.orders), len(plan.partition)
    beyond = []
    if not plan.timeline.merged:
        beyond.append("backward split into input and weight parts: the framework runs them as one")
    if plan.source not in {s.name for s in plan.standards} or plan.source in ("GPipe", "ZB-H1"):
        beyond.append("order of operations: the framework runs 1F1B or interleaved 1F1B only")
    if stages % devices or plan.placement != round_robin(stages, devices):
        beyond.append("placement: the framework puts stage s on rank s mod P")
        return StageLayout(None, None, None, None, tuple(beyond))
    words, at = [], 0
    for size in plan.partition:
        letters = ["E" if k == EMBEDDING else "L" if k == HEAD else "t" for k in profile.kinds[at : at + size]]
        runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
        words.append("".join(letter if n == 1 else f"{letter}*{n}" for letter, n in runs))
        at += size
    layers = [sum(k not in (EMBEDDING, HEAD) for k in part) for part in _parts(plan.partition, profile.kinds)]
    even = len(set(layers[1:-1])) <= 1 and stages == devices and stages > 1
    return StageLayout(
        layout="|".join(words),
        virtual_pipeline=stages // devices,
        first_stage_layers=layers[0] if even else None,
        last_stage_layers=layers[-1] if even else None,
        beyond=tuple(beyond),
    )


def _parts(partition: tuple[int, ...], kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    parts, at = [], 0
    for size in partition:
        parts.append(kinds[at : at + size])
        at += size
    return parts
