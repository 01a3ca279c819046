"""What of a pipeline's plan a framework cannot express."""

from __future__ import annotations

from rlperf.plan.pipeline.optimize import PipelinePlan
from rlperf.sim.pipeline import round_robin


def beyond_frameworks(plan: PipelinePlan) -> tuple[str, ...]:
    """What a plan needs that Megatron-Core has no key for; its stages of any layers have one.

    Reference: Megatron-Core 0.13, ``TransformerConfig.pipeline_model_parallel_layout``: stage s on rank s mod P, layers
    listed per stage; its schedules are 1F1B and interleaved 1F1B with a merged backward.
    """
    devices, stages = len(plan.orders), len(plan.partition)
    beyond = []
    if not plan.timeline.merged:
        beyond.append("backward split into input and weight parts: the framework runs them as one")
    if plan.source not in {s.name for s in plan.standards} or plan.source in ("GPipe", "ZB-H1"):
        beyond.append("order of operations: the framework runs 1F1B or interleaved 1F1B only")
    if stages % devices or plan.placement != round_robin(stages, devices):
        beyond.append("placement: the framework puts stage s on rank s mod P")
    return tuple(beyond)
