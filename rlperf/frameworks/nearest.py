"""The nearest layout that a framework can express, and what is lost by it."""

from __future__ import annotations

from dataclasses import replace

from rlperf.cost.stage_ends import stage_ends
from rlperf.errors import SpecError
from rlperf.frameworks.adapter import Limitation
from rlperf.frameworks.run import RolloutRun, Run, TrainerRun
from rlperf.specs.pool import Offload
from rlperf.specs.profiles import load_architecture

THIRD = "up to a third of the training time more"


def without_activation_offload(trainer: TrainerRun, lost: list[Limitation]) -> TrainerRun:
    """The trainer with full recompute in place of activations on the host."""
    if trainer.offload not in ("activations", "both"):
        return trainer
    lost.append(Limitation("activation offload", "full recompute", THIRD))
    left: Offload = "optimizer" if trainer.offload == "both" else "none"
    return trainer.having(activation_recompute="full", offload=left)


def without_selective_recompute(trainer: TrainerRun, lost: list[Limitation]) -> TrainerRun:
    """The trainer with full in place of selective recompute."""
    if trainer.activation_recompute != "selective":
        return trainer
    lost.append(Limitation("selective recompute", "full recompute", THIRD))
    return trainer.having(activation_recompute="full")


def without_ulysses(trainer: TrainerRun) -> TrainerRun:
    """The trainer with ring context parallel in place of Ulysses."""
    return trainer.having(context_parallel=trainer.sequence_split, ulysses=1)


def without_pipeline(rollout: RolloutRun) -> RolloutRun:
    """The engine with tensor parallel in place of its pipeline stages."""
    return rollout.having(tensor_parallel=rollout.tensor_parallel * rollout.pipeline_parallel, pipeline_parallel=1)


def wide_degrees(rollout: RolloutRun) -> list[tuple[str, int]]:
    """Degrees of an engine beside tensor and pipeline parallel, where it has them."""
    degrees = {"expert_parallel": rollout.expert_parallel, "attention_data_parallel": rollout.attention_data_parallel}
    return [(name, size) for name, size in degrees.items() if size > 1]


def plain_engine(rollout: RolloutRun, lost: list[Limitation]) -> RolloutRun:
    """An engine that knows tensor parallel alone; what that changes is added to ``lost``."""
    engine = without_pipeline(rollout)
    nearest = f"tensor parallel {engine.tensor_parallel}"
    if rollout.pipeline_parallel > 1:
        lost.append(Limitation(f"rollout pipeline_parallel {rollout.pipeline_parallel}", nearest, "more all-reduce"))
    for degree, size in wide_degrees(rollout):
        lost.append(Limitation(f"rollout {degree} {size}", nearest, "more KV and weight traffic"))
    return engine.having(expert_parallel=1, attention_data_parallel=1)


def most_dividing(share: int, most: int) -> int:
    """The largest number up to ``most`` that divides ``share`` (1 where none else does).

    >>> most_dividing(12, 5), most_dividing(7, 5), most_dividing(8, 100)
    (4, 1, 8)
    """
    return next(size for size in range(max(min(most, share), 1), 0, -1) if share % size == 0)


def with_stage_ends(run: Run) -> Run:
    """The run with the layers of its first and last pipeline stage stated where the layers do not divide."""
    trainer = run.trainer
    stated = trainer.first_stage_layers is not None or trainer.last_stage_layers is not None
    if stated:
        return run
    try:
        layers = load_architecture(run.architecture).layers
    except SpecError:
        return run
    first, last = stage_ends(layers, trainer.pipeline_parallel, None, None, trainer.virtual_pipeline)
    return replace(run, trainer=trainer.having(first_stage_layers=first or None, last_stage_layers=last or None))


def samples_within_budget(run: Run) -> int:
    """Samples of a microbatch within the token budget that divide those of an update per rank."""
    ranks = max(run.trainer.devices // run.trainer.replica_devices, 1)
    share = max(run.batch.mini * run.batch.group_size // ranks, 1)
    return most_dividing(share, max((run.trainer.token_budget or 1) // run.batch.longest_tokens, 1))
