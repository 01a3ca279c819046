"""Weight syncs, predicted against measured: rows of ``measured/weight_sync.csv`` and files in that form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import Guess, Reading, column, count, derived, one_of, positive, read, text
from rlperf.calibrate.rl_framework import SyncObservation
from rlperf.calibrate.tables import Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.cost.weight_sync import SyncShape, sync_payload, weight_sync_s
from rlperf.errors import SpecError
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware
from rlperf.specs.rl_calibration import WeightSyncFit, load_framework_calibration, load_transport

BYTES_PER_PARAMETER = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "nvfp4": 0.5625, "mxfp4": 0.53125}
"""Bytes of a parameter on the wire by transfer dtype; block formats with their scales."""

# The path of a row by words of its method and source, first match wins: (pattern, owner, transport). Owners with a
# colon are transport libraries, the others frameworks.
_PATHS = (
    (r"^broadcast; checkpoint-engine.*7185b55", ":checkpoint_engine_2025_09", "checkpoint_engine"),
    (r"^p2p.*checkpoint-engine.*7185b55", ":checkpoint_engine_2025_09", "checkpoint_engine_p2p"),
    (r"^broadcast; checkpoint-engine", ":checkpoint_engine", "checkpoint_engine"),
    (r"^p2p.*checkpoint-engine", ":checkpoint_engine", "checkpoint_engine_p2p"),
    (r"checkpoint-engine=false.*megatron", "verl_megatron", "nccl"),
    (r"checkpoint-engine=true.*megatron", "verl_megatron", "checkpoint_engine"),
    (r"delta_sharded", "verl_fsdp", "delta"),
    (r"nccl full broadcast.*one_step_off", ":verl_one_step_off", "nccl"),
    (r"nccl full broadcast", "verl_fsdp", "nccl"),
    (r"^(nccl|nixl|mooncake|hccl)\b", "verl_fsdp", "checkpoint_engine"),
    (r"disk", "slime", "disk"),
    (r"slime", "slime", "colocated"),
    (r"nemo", "nemo_rl_megatron", "nccl"),
    (r"areal", "areal", "nccl"),
    (r"rdma", "verl_megatron", "rdma"),
)


def sync_path(method: str, source: str = "") -> tuple[str, str]:
    """(owner, transport) of a method in words.

    >>> sync_path("delta_sharded; SGLang rollout; V1 separate_async")
    ('verl_fsdp', 'delta')
    """
    text = f"{method} | {source}".lower()
    for pattern, owner, transport in _PATHS:
        if re.search(pattern, text):
            return owner, transport
    raise SpecError(f"weight sync by {method!r} is not a path that rlperf knows")


def sync_fit(owner: str, transport: str) -> WeightSyncFit:
    """Constants of a path by its owner: a transport library where the owner begins with a colon, else a framework."""
    if owner.startswith(":"):
        return load_transport(owner[1:]).fit(transport)  # type: ignore[arg-type]
    return load_framework_calibration(owner).sync_fit(transport)  # type: ignore[arg-type]


def _trainer_shards(case: SyncCase) -> int:
    """Devices over which the trainer splits one copy of the weights; a HSDP note says less than all of them."""
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
        )
        payload = sync_payload(self.architecture, BYTES_PER_PARAMETER[self.dtype])
        return SyncObservation(self.row_id, self.hardware, payload, shape, self.measured_s)

    @property
    def seconds(self) -> float:
        """Predicted seconds."""
        seen = self.observation
        return float(weight_sync_s(seen.hardware, self.fit, seen.payload, seen.shape))

    @property
    def used(self) -> bool:
        """True where the fit saw this row."""
        return self.row_id in self.fit.provenance.rows


def predict_rows(path: Path, table: Table) -> Outcome:
    """Predict the seconds of every weight sync of a table."""
    table.need("method", "architecture", "gpu", "measured_s")
    return each_row(table, lambda row: [_figure(read(SyncCase, row))])


def _figure(case: SyncCase) -> PredictedFigure:
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
