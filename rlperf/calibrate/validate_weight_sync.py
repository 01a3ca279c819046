"""Weight syncs, predicted against measured: rows of ``measured/weight_sync.csv`` and files in that form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import Guess, Reading, column, count, derived, one_of, positive, read, text
from rlperf.calibrate.rl_step.framework import SyncObservation
from rlperf.calibrate.tables import Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.cost.weight_sync import SyncShape, sync_payload, weight_sync_s
from rlperf.errors import SpecError
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware
from rlperf.specs.rl_calibration import WeightSyncFit, load_framework_calibration, load_transport

BYTES_PER_PARAMETER = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "nvfp4": 0.5625, "mxfp4": 0.53125}
"""Bytes of a parameter on the wire by transfer dtype; block formats with their scales."""

# How a row's weights travel, by words of its method and source, first match wins. What a method does not say is what
# its software does without a word (`_OWNERS`).
_TRANSPORTS = (
    (r"^broadcast; checkpoint-engine", "checkpoint_engine"),
    (r"^p2p.*checkpoint-engine", "checkpoint_engine_p2p"),
    (r"checkpoint-engine=false", "nccl"),
    (r"checkpoint-engine=true", "checkpoint_engine"),
    (r"delta_sharded", "delta"),
    (r"reshard", "shard_to_shard"),
    (r"rdma|nixl|mooncake|p2p", "rdma"),
    (r"packed broadcast", "packed_broadcast"),
    (r"colocated|cuda.?ipc", "colocated"),
    (r"disk", "disk"),
    (r"nccl|hccl|broadcast", "nccl"),
)
# Whose constants serve, and which path a transport's word means with them where it is another: (pattern, owner,
# {transport: path}). Owners with a colon are transport libraries, the others frameworks.
_OWNERS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (r"checkpoint-engine \(.*7185b55", ":checkpoint_engine_2025_09", {}),
    (r"checkpoint-engine \(", ":checkpoint_engine", {}),
    (r"nemo", "nemo_rl_megatron", {"nccl": "packed_broadcast", "": "packed_broadcast"}),
    (r"miles", "miles", {"nccl": "packed_broadcast", "": "colocated"}),
    (r"slime", "slime", {"nccl": "packed_broadcast", "": "colocated"}),
    (r"areal", "areal", {"": "nccl"}),
    (r"openrlhf", "openrlhf", {"": "nccl"}),
    (r"\btrl\b", "trl", {"": "colocated"}),
    (r"nccl full broadcast.*one_step_off", ":verl_one_step_off", {}),
    (r"verl.*megatron|megatron.*verl", "verl_megatron", {"": "nccl"}),
    (r"nccl full broadcast|delta_sharded|fsdp", "verl_fsdp", {"": "nccl"}),
    # verl's checkpoint_engine README: its bucketed engine over any of these libraries
    (r"verl", "verl_fsdp", dict.fromkeys(("nccl", "rdma"), "checkpoint_engine")),
    (r"", "nemo_rl_megatron", {"nccl": "packed_broadcast", "": "packed_broadcast"}),
)


def sync_path(method: str, source: str = "") -> tuple[str, str]:
    """(owner, transport) of a method in words: how weights travel first, then whose constants serve for it.

    >>> sync_path("delta_sharded; SGLang rollout; V1 separate_async")
    ('verl_fsdp', 'delta')
    >>> sync_path("NCCL reshard (point-to-point, sharded); NeMo-RL"), sync_path("P2P RDMA (mooncake); miles")
    (('nemo_rl_megatron', 'shard_to_shard'), ('miles', 'rdma'))
    """
    text = f"{method} | {source}".lower()
    transport = next((name for pattern, name in _TRANSPORTS if re.search(pattern, method.lower())), "")
    owner, means = next((owner, means) for pattern, owner, means in _OWNERS if re.search(pattern, text))
    if not transport and (not means or not re.search(r"nemo|slime|miles|areal|openrlhf|trl|verl", text)):
        raise SpecError(f"weight sync by {method!r} is not a path that rlperf knows")
    return owner, means.get(transport, transport)


def sync_fit(owner: str, transport: str) -> WeightSyncFit:
    """Constants of a path by its owner: a transport library where the owner begins with a colon, else a framework."""
    if owner.startswith(":"):
        return load_transport(owner[1:]).fit(transport)  # type: ignore[arg-type]
    return load_framework_calibration(owner).sync_fit(transport)  # type: ignore[arg-type]


def _trainer_shards(case: SyncCase) -> int:
    """Devices over which the trainer splits one copy of the weights; a HSDP note says less than all of them."""
    if case.trainer_pipeline * case.trainer_tensor > 1 and "fsdp" not in case.note:
        return case.trainer_pipeline * case.trainer_tensor
    shard = re.search(r"dp_shard=(\d+)", case.note)
    if not shard or "replicate" not in case.note:
        return case.trainer
    tensor = re.search(r"\btp(\d+)", case.note)
    return min(int(shard.group(1)) * (int(tensor.group(1)) if tensor else 1), case.trainer)


def _engine_shards(case: SyncCase) -> Guess[int]:
    return Guess(min(case.rollout, case.per_node), "one node per engine at most")


@dataclass(frozen=True)
class SyncCase(Reading):
    """A row made ready: what is sent where, by which fit, and what had to be filled in.

    Fields stand in the order in which they are found.
    """

    method: str = column(text)
    source: str = column(text, "")
    note: str = column(str.lower, "")
    dtype: str = column(one_of(tuple(BYTES_PER_PARAMETER)), "bf16", name="transfer_dtype")
    architecture: Architecture = derived(lambda case: case.row.architecture())
    hardware: Hardware = derived(lambda case: case.row.hardware())
    per_node: int = column(count, Guess(8, "a node of eight"), name="gpus_per_node")
    rollout: int = column(count, lambda case: Guess(case.per_node, "one node"), name="n_rollout_gpus")
    trainer: int = column(count, lambda case: Guess(case.rollout, "as many as rollout"), name="n_trainer_gpus")
    rollout_shards: int = column(count, _engine_shards, name="rollout_tensor_parallel")
    trainer_tensor: int = column(count, 1, name="trainer_tensor_parallel")
    trainer_pipeline: int = column(count, 1, name="trainer_pipeline_parallel")
    trainer_expert: int = column(count, 1, name="trainer_expert_parallel")
    trainer_shards: int = derived(_trainer_shards)
    measured_s: float = column(positive, float("nan"))
    path: tuple[str, str] = derived(lambda case: sync_path(case.method, case.source))
    fit: WeightSyncFit = derived(lambda case: sync_fit(*case.path))

    @property
    def owner(self) -> str:
        """Framework or transport library whose constants serve."""
        return self.path[0].lstrip(":")

    @property
    def observation(self) -> SyncObservation:
        """The row as fits see it."""
        shape = SyncShape(
            trainer_devices=self.trainer,
            rollout_devices=self.rollout,
            trainer_shards=self.trainer_shards,
            rollout_shards=self.rollout_shards,
            devices_per_node=self.per_node,
            nested=0,
            offloaded=int("offload on" in self.note and "offload off" not in self.note),
            pipeline_parallel=self.trainer_pipeline,
            expert_parallel=self.trainer_expert,
        )
        payload = sync_payload(self.architecture, BYTES_PER_PARAMETER[self.dtype])
        return SyncObservation(self.row_id, self.hardware, payload, shape, self.measured_s)

    @property
    def seconds(self) -> float:
        """Predicted seconds."""
        return self.seconds_with(self.fit)

    def seconds_with(self, fit: WeightSyncFit) -> float:
        """Seconds with other constants."""
        seen = self.observation
        return float(weight_sync_s(seen.hardware, fit, seen.payload, seen.shape))

    @property
    def used(self) -> bool:
        """True where the fit saw this row."""
        return self.row_id in self.fit.provenance.rows


def predict_rows(path: Path, table: Table) -> Outcome:
    """Predict the seconds of every weight sync of a table."""
    table.need("method", "architecture", "gpu", "measured_s")
    return each_row(table, lambda row: [figure(read(SyncCase, row))])


def figure(case: SyncCase) -> PredictedFigure:
    """The sync predicted with the constants that ship."""
    if not np.isfinite(case.measured_s):
        raise SpecError("no measured time in the row")
    provenance = case.fit.provenance
    return PredictedFigure(
        row_id=case.row_id,
        group=case.group,
        metric="sync_s",
        measured=case.measured_s,
        predicted=case.seconds,
        low=case.seconds * provenance.low,
        high=case.seconds * provenance.high,
        calibration=f"{case.owner}/{case.fit.transport}",
        assumed=case.assumed,
        extrapolated=provenance.assumed,
        used_in_calibration=case.used,
        stratum=case.fit.transport,
    )
