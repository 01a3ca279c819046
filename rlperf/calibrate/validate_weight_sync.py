"""Weight syncs, predicted against measured: rows of ``measured/weight_sync.csv`` and files in that form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlperf.calibrate.rl_framework import SyncObservation
from rlperf.calibrate.tables import Row, Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, Refusal
from rlperf.cost.weight_sync import SyncShape, sync_payload, weight_sync_s
from rlperf.errors import RlperfError, SpecError
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
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


@dataclass(frozen=True)
class SyncCase:
    """A row made ready: what is sent where, by which fit, and what had to be filled in."""

    observation: SyncObservation
    fit: WeightSyncFit
    owner: str
    assumed: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Predicted seconds."""
        o = self.observation
        return float(weight_sync_s(o.hardware, self.fit, o.payload, o.shape))

    @property
    def used(self) -> bool:
        """True where the fit saw this row."""
        return self.observation.row_id in self.fit.provenance.rows


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


def sync_case(row: Mapping[str, str]) -> SyncCase:
    """A row of weight_sync.csv as a case; blank cells are filled in and named in ``assumed``.

    Raises
    ------
    SpecError : unknown method, architecture, GPU or dtype
    """
    assumed: list[str] = []
    note = row.get("note", "").lower()

    def count(name: str, default: int, why: str) -> int:
        if row.get(name):
            return int(float(row[name]))
        assumed.append(f"{name}={default} ({why})")
        return default

    dtype = row.get("transfer_dtype") or "bf16"
    if dtype not in BYTES_PER_PARAMETER:
        raise SpecError(f"transfer_dtype {dtype!r} is none of {', '.join(BYTES_PER_PARAMETER)}")
    architecture = load_architecture(row["architecture"])
    per_node = count("gpus_per_node", 8, "a node of eight")
    rollout = count("n_rollout_gpus", per_node, "one node")
    trainer = count("n_trainer_gpus", rollout, "as many as rollout")
    shards = count("rollout_tensor_parallel", min(rollout, per_node), "one node per engine at most")
    owner, transport = sync_path(row["method"], row.get("source", ""))
    fit = sync_fit(owner, transport)
    offloaded = int("offload on" in note and "offload off" not in note)
    shape = SyncShape(
        trainer_devices=trainer,
        rollout_devices=rollout,
        trainer_shards=_trainer_shards(note, trainer),
        rollout_shards=shards,
        devices_per_node=per_node,
        nested=0,
        offloaded=offloaded,
    )
    observation = SyncObservation(
        row_id=row.get("row_id", ""),
        hardware=load_hardware(row["gpu"]),
        payload=sync_payload(architecture, BYTES_PER_PARAMETER[dtype]),
        shape=shape,
        measured_s=float(row["measured_s"]) if row.get("measured_s") else float("nan"),
    )
    return SyncCase(observation, fit, owner.lstrip(":"), tuple(assumed))


def _trainer_shards(note: str, trainer: int) -> int:
    """Devices over which the trainer splits one copy of the weights; a HSDP note says less than all of them."""
    shard = re.search(r"dp_shard=(\d+)", note)
    if not shard or "replicate" not in note:
        return trainer
    tensor = re.search(r"\btp(\d+)", note)
    return min(int(shard.group(1)) * (int(tensor.group(1)) if tensor else 1), trainer)


def predict_rows(path: Path, table: Table) -> Outcome:
    """Predict the seconds of every weight sync of a table."""
    table.need("method", "architecture", "gpu", "measured_s")
    predictions: list[PredictedFigure] = []
    refused: list[Refusal] = []
    for line in table:
        try:
            case = sync_case({**line.cells, "row_id": line.row_id})
        except RlperfError as error:
            refused.append(Refusal(line.row_id, str(error).splitlines()[0]))
            continue
        if not np.isfinite(case.observation.measured_s):
            refused.append(Refusal(line.row_id, "no measured time in the row"))
            continue
        predictions.append(_prediction(case, line))
    return Outcome(tuple(predictions), tuple(refused))


def _prediction(case: SyncCase, line: Row) -> PredictedFigure:
    provenance = case.fit.provenance
    return PredictedFigure(
        row_id=line.row_id,
        group=line.group,
        metric="sync_s",
        measured=case.observation.measured_s,
        predicted=case.seconds,
        low=case.seconds * provenance.low,
        high=case.seconds * provenance.high,
        calibration=f"{case.owner}/{case.fit.transport}",
        assumed=case.assumed,
        extrapolated=provenance.assumed,
        used_in_calibration=case.used,
        stratum=case.fit.transport,
    )
