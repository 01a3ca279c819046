"""Rows of a training table (``measured/training.csv`` or a user's own in that form) as arguments of the cost functions.

A blank cell means *not published*: the framework's documented default stands in, or, for the microbatch and the
interleaving, a plausible value; every stand-in is named in ``assumed`` and widens the interval.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlperf.calibrate.tables import Row, Table, read_table
from rlperf.cost.batching import Microbatches
from rlperf.cost.dtypes import DTYPES
from rlperf.cost.trainer_memory import trainer_memory
from rlperf.errors import SpecError
from rlperf.layout import OFFLOAD, RECOMPUTE, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware, in_nodes_of, load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import TrainerCalibration, load_trainer

SPLIT_SEED = "rlperf-trainers-1"
CONFIGURATION = (
    "framework", "architecture", "gpu", "n_gpus", "compute_dtype", "tensor_parallel", "pipeline_parallel",
    "context_parallel", "expert_parallel", "zero_stage", "microbatch", "seq_len", "lora_rank", "activation_recompute",
)  # fmt: skip
"""Columns that make a configuration; repeats, batch sizes and releases of one stay on one side of the split."""

BACKENDS: tuple[tuple[str, str], ...] = (
    ("megatron-deepspeed", "megatron_deepspeed"),
    ("megatron-bridge", "megatron_bridge"),
    ("nemo (megatron", "nemo"),
    ("nemo automodel", "automodel"),
    ("megatron", "megatron"),
    ("llm-foundry", "fsdp_llm_foundry"),
    ("prime-rl", "fsdp2"),
    ("dtensor", "fsdp2"),
    ("torchtitan", "fsdp2"),
    ("fsdp2", "fsdp2"),
    ("fsdp", "fsdp2"),
    ("deepspeed", "deepspeed"),
    ("openrlhf", "deepspeed"),
    ("composer", "fsdp_llm_foundry"),
    ("nemo", "nemo"),
)
"""Beginning or part of a framework's name, and the backend whose constants serve."""

NO_COLUMN = " (no such column)"
"""Marks a default that stands because a table does not have the column at all: named, but no wider interval."""

USABLE, SURELY_OVER = 0.92, 1.15
"""Predicted over available memory beyond which keeping all activations is ruled out where a row does not say: the
usual headroom under FSDP; more where recipes recompute parts of a layer that no table names."""

CLUSTERS = (("gb200", "gb200_nvl72"), ("gb300", "gb300_nvl72"))
"""Devices that stand in rack-wide scale-up domains; the others stand in the generic node."""


@dataclass(frozen=True)
class TrainingRow:
    """One measured row, ready for `training_update` and `trainer_memory`."""

    row_id: str
    group: str
    configuration: str
    backend: str
    architecture: Architecture
    device: str
    hardware: Hardware
    trainer: TrainerCalibration
    layout: Layout
    microbatches: Microbatches
    dtype: str
    lora_rank: int | None
    chunked_loss: bool
    flash2: bool
    recompute_experts: bool
    expert_overlap: bool
    cuda_graph: bool
    note: str
    update_s: float | None
    peak_bytes: float | None
    assumed: tuple[str, ...] = field(default_factory=tuple)

    @property
    def used(self) -> bool:
        """Whether the backend's fit saw this configuration."""
        return digest(self.configuration) in self.trainer.configurations


@dataclass(frozen=True)
class RefusedRow:
    """A row for which nothing sensible can be predicted."""

    row_id: str
    group: str
    reason: str


def configuration_of(row: Mapping[str, str]) -> str:
    """Text that is equal for repeats and releases of one configuration."""
    return "|".join(row.get(name) or "" for name in CONFIGURATION)


def digest(configuration: str) -> str:
    """First 8 hex digits of sha256(seed | configuration): the order in which configurations are drawn for fits.

    >>> len(digest("x"))
    8
    """
    return hashlib.sha256(f"{SPLIT_SEED}|{configuration}".encode()).hexdigest()[:8]


def calibration_part(rows: Sequence[TrainingRow]) -> frozenset[str]:
    """Digests of the configurations that fits may see: every third of a group's, so floor(n / 3).

    A group's configurations are ordered by backend, device, kind of architecture and dtype, then by digest; the
    order spreads the third over those kinds, the digest draws within them.
    """
    by_group: dict[str, set[tuple[str, str, bool, str, str]]] = {}
    for row in rows:
        kind = (row.backend, row.device, row.architecture.experts is not None, row.dtype, digest(row.configuration))
        by_group.setdefault(row.group, set()).add(kind)
    return frozenset(kind[-1] for found in by_group.values() for kind in sorted(found)[2::3])


def read_training_rows(path: Path) -> tuple[list[TrainingRow], list[RefusedRow]]:
    """All rows of a file, with those that cannot be predicted and why."""
    return training_rows(read_table(path), path)


def training_rows(table: Table, path: Path) -> tuple[list[TrainingRow], list[RefusedRow]]:
    """Rows of a table; architectures come from the folder ``architectures`` beside its own, then the shipped ones."""
    rows: list[TrainingRow] = []
    refused: list[RefusedRow] = []
    for row in table:
        found = _row(row, path.parent.parent / "architectures")
        if isinstance(found, RefusedRow):
            refused.append(found)
        else:
            rows.append(found)
    return rows, refused


def _architecture(name: str, folder: Path) -> Architecture:
    file = folder / f"{name}.json"
    return load_architecture(file if file.is_file() else name)


def backend_of(row: Mapping[str, str]) -> str | None:
    """Backend by the framework's name, and by its age where the same name covers two generations of software."""
    framework = (row.get("framework") or "").lower()
    name = next((backend for part, backend in BACKENDS if part in framework), None)
    version = row.get("framework_version") or ""
    if name == "megatron" and version[:4] in ("2019", "2020", "2021", "2022"):
        return "megatron_legacy"
    if name == "deepspeed" and version.startswith(("2020", "2021")):
        return "deepspeed_legacy"
    narrow = ("Moonlight", "DeepSeek", "Kimi")
    if name == "megatron_bridge" and (row.get("architecture") or "").startswith(narrow):
        return "megatron_bridge_narrow"
    return name


def _row(table_row: Row, folder: Path) -> TrainingRow | RefusedRow:
    row_id, group, row = table_row.row_id, table_row.group, table_row.cells
    backend = backend_of(row)
    if backend is None:
        return RefusedRow(row_id, group, f"framework {row.get('framework')!r} has no trainer calibration")
    batch, length = table_row.number("global_batch"), table_row.number("seq_len")
    if not batch or not length:
        return RefusedRow(row_id, group, "global batch or sequence length not published")
    try:
        arch = _architecture(table_row.text("architecture"), folder)
        device = table_row.text("gpu")
        hw = _hardware(device, dict(CLUSTERS).get(device))
        hw = in_nodes_of(hw, table_row.count("gpus_per_node", hw.cluster.devices_per_node))
        trainer = load_trainer(backend)
    except SpecError as error:
        return RefusedRow(row_id, group, error.problems[0].message)
    dtype = table_row.text("compute_dtype", "bf16").strip().lower()
    if dtype not in DTYPES:
        return RefusedRow(row_id, group, f"compute_dtype {dtype!r} is none of {', '.join(DTYPES)}")
    layout, assumed = _layout(table_row, arch, trainer, batch)
    if "activation_recompute=none" in assumed:
        layout, assumed = _recompute_that_fits(table_row, arch, hw, trainer, layout, dtype, assumed)
    note = row.get("note") or ""
    memory = table_row.number("measured_peak_memory_gb")
    # performance recipes capture graphs by default; a row without its recipe is taken to have done so
    recipe_unknown = "no matching recipe" in note
    assumed += ["cuda_graph=1"] if recipe_unknown else []
    rank = table_row.number("lora_rank")
    return TrainingRow(
        row_id=row_id,
        group=group,
        configuration=configuration_of(row),
        backend=backend,
        architecture=arch,
        device=device,
        hardware=hw,
        trainer=trainer,
        layout=layout,
        microbatches=Microbatches.fixed(layout, length, batch),
        dtype=dtype,
        lora_rank=int(rank) if rank else None,
        chunked_loss="task rl" in note or "Liger" in (row.get("framework") or ""),
        flash2="flash_attention_2" in note,
        recompute_experts="moe_act" in note,
        expert_overlap="all-to-all overlap: True" in note or "EP overlap on" in note or "(EP overlap" in note,
        cuda_graph=("CUDA graph" in note and "CUDA graph: none" not in note) or recipe_unknown,
        note=note,
        update_s=_step_s(table_row, batch, length),
        peak_bytes=memory * 1e9 if memory else None,
        assumed=tuple(assumed),
    )


_HARDWARE: dict[tuple[str, str | None], Hardware] = {}


def _hardware(device: str, cluster: str | None) -> Hardware:
    if (device, cluster) not in _HARDWARE:
        _HARDWARE[device, cluster] = load_hardware(device, cluster)
    return _HARDWARE[device, cluster]


def _step_s(table_row: Row, batch: float, length: float) -> float | None:
    step = table_row.number("measured_step_s")
    if step:
        return step
    rate, devices = table_row.number("measured_tokens_per_s_per_gpu"), table_row.number("n_gpus")
    return batch * length / (rate * devices) if rate and devices else None


def _layout(table_row: Row, arch: Architecture, trainer: TrainerCalibration, batch: float) -> tuple[Layout, list[str]]:
    """Layout of a row; blank degrees are filled in and named."""
    assumed: list[str] = []
    row = table_row.cells

    def degree(name: str, default: int) -> int:
        value = table_row.number(name)
        if value is None:
            assumed.append(f"{name}={default}" + ("" if name in row else NO_COLUMN))
            return default
        return int(value)

    devices = int(table_row.number("n_gpus") or 1)
    tp, pp, cp = (degree(name, 1) for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"))
    dp = int(table_row.number("data_parallel") or max(devices // (tp * pp * cp), 1))
    recompute = row.get("activation_recompute") or ""
    if recompute not in RECOMPUTE:
        assumed.append("activation_recompute=none")
        recompute = "none"
    virtual = degree("virtual_pipeline", _interleaving(row, arch, pp))
    note = row.get("note") or ""
    # simumax names its context parallelism a2a: Ulysses-style, over heads
    ulysses = cp if "a2a (Ulysses" in note else 1
    experts = degree("expert_parallel", 1)
    if arch.experts and experts == 1 and "DeepEP" in note:
        # DeepEP moves tokens between expert-parallel ranks: a table that prints no degree beside it left it out
        experts = math.gcd(dp, arch.experts.count)
        assumed.append(f"expert_parallel={experts}")
    layout = Layout.of(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        context_parallel=1 if ulysses > 1 else cp,
        ulysses=ulysses,
        data_parallel=dp,
        virtual_pipeline=virtual,
        expert_parallel=experts,
        sequence_parallel=degree("sequence_parallel", 1 if tp > 1 else 0),
        zero_stage=degree("zero_stage", trainer.capability.usual_zero_stage),
        microbatch=degree("microbatch", _microbatch(batch, dp, pp)),
        activation_recompute=RECOMPUTE.index(recompute),
        offload=OFFLOAD.index(row.get("offload") or "none"),
    )
    return layout, assumed


def _recompute_that_fits(
    table_row: Row, arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout, dtype: str,
    assumed: list[str],
) -> tuple[Layout, list[str]]:  # fmt: skip
    """A row whose recompute is not published ran: if keeping everything does not fit, it recomputed in full."""
    batch = Microbatches.fixed(layout, table_row.number("seq_len") or 1.0, table_row.number("global_batch") or 1.0)
    rank = int(table_row.number("lora_rank") or 0) or None
    parts = trainer_memory(arch, hw, trainer, layout, batch, dtype=dtype, lora_rank=rank)
    limit = USABLE if int(layout.zero_stage) == 3 else SURELY_OVER
    if float(parts.total) <= limit * hw.device.memory:
        return layout, assumed
    full = layout.with_(activation_recompute=RECOMPUTE.index("full"))
    return full, [entry.replace("recompute=none", "recompute=full (none does not fit)") for entry in assumed]


def _interleaving(row: Mapping[str, str], arch: Architecture, stages: int) -> int:
    """Chunks per stage where not printed: none before 2021's paper or with one stage, else chunks of about 4 layers."""
    if stages == 1 or "no interleaved schedule" in (row.get("note") or ""):
        return 1
    each = arch.layers // stages
    return next((v for v in range(max(each // 4, 1), 0, -1) if arch.layers % (stages * v) == 0), 2 if each >= 4 else 1)


def _microbatch(batch: float, replicas: int, stages: int) -> int:
    """Sequences a forward where not printed: 1 in a pipeline, else up to 4 that divide a replica's share."""
    share = max(int(batch) // max(replicas, 1), 1)
    return 1 if stages > 1 else next(size for size in (4, 2, 1) if share % size == 0)
