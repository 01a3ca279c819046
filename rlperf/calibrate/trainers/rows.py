"""Rows of a training table (``measured/training.csv`` or a user's own in that form) as arguments of the cost functions.

A blank cell means *not published*: the framework's documented default stands in, or, for the microbatch and the
interleaving, a plausible value; every stand-in is named in ``assumed`` and widens the interval.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import (
    Guess,
    Reading,
    cell,
    column,
    count,
    derived,
    one_of,
    positive,
    read_all,
    text,
    whole,
)
from rlperf.calibrate.tables import Refusal, read_table
from rlperf.calibrate.trainers.switches import of_note, of_recipe, recomputed
from rlperf.cost.batching import Microbatches
from rlperf.cost.dtypes import DTYPES
from rlperf.cost.trainer.memory import trainer_memory
from rlperf.cost.trainer_device import UpdateOptions
from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.layout import OFFLOAD, RECOMPUTE, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware, in_nodes_of
from rlperf.specs.trainer_calibration import TrainerCalibration, load_trainer
from rlperf.specs.trainer_switches import Switches

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
    ("torchtitan", "torchtitan"),
    ("fsdp2", "fsdp2"),
    ("fsdp", "fsdp2"),
    ("deepspeed", "deepspeed"),
    ("openrlhf", "deepspeed"),
    ("composer", "fsdp_llm_foundry"),
    ("nemo", "nemo"),
)
"""Beginning or part of a framework's name, and the backend whose constants serve."""

RELATIVES: tuple[tuple[str, str], ...] = (
    ("megascale", "nemo"),
    ("hai-llm", "megatron_bridge"),
    ("trl", "fsdp2"),
)
"""The same of frameworks of which no row was fitted, with the nearest backend: Megatron's descendants, or FSDP."""

SQUAD_TOKENS = 250.0
"""Tokens of a sample of SQuAD, paragraph and question (recalled: about 140 words a paragraph); attention over so few
costs next to nothing, whatever the figure."""

USABLE, SURELY_OVER = 0.92, 1.15
"""Predicted over available memory beyond which keeping all activations is ruled out where a row does not say: the
usual headroom under FSDP; more where recipes recompute parts of a layer that no table names."""

CLUSTERS = (("gb200", "gb200_nvl72"), ("gb300", "gb300_nvl72"))
"""Devices that stand in rack-wide scale-up domains; the others stand in the generic node."""


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


# -- what stands in where a cell is blank -----------------------------------------------------------------------------


def _backend(row: TrainingRow) -> str | Guess[str]:
    found = backend_of(row.row.cells)
    if found is None:
        name = row.row.text("framework")
        relative = next((backend for part, backend in RELATIVES if part in name.lower()), None)
        if relative is not None:
            return Guess(relative, f"nearest relative of {name}")
        hint = did_you_mean(name.lower(), [part for part, _ in BACKENDS])
        raise SpecError(Problem(f"framework {name!r} has no trainer calibration", suggestion=hint))
    return found


def _batch(row: TrainingRow) -> float:
    batch, length = (cell(row.row, name, positive) for name in ("global_batch", "seq_len"))
    if not (batch and length):
        raise SpecError("global batch or sequence length not published")
    return batch


def _hardware(row: TrainingRow) -> Hardware:
    found = row.row.hardware(cluster=dict(CLUSTERS).get(row.device))
    return in_nodes_of(found, row.devices_per_node or found.cluster.devices_per_node)


def _replicas(row: TrainingRow) -> int:
    return max(row.devices // (row.tensor_parallel * row.pipeline_parallel * row.context_parallel), 1)


def _microbatch(row: TrainingRow) -> Guess[int]:
    """Sequences a forward where not printed: 1 in a pipeline, else up to 4 that divide a replica's share."""
    share = max(int(row.batch) // max(row.data_parallel, 1), 1)
    size = 1 if row.pipeline_parallel > 1 else next(size for size in (4, 2, 1) if share % size == 0)
    return Guess(size, "one in a pipeline, else what divides the batch")


def _interleaving(row: TrainingRow) -> Guess[int]:
    """Chunks per stage where not printed: none before 2021's paper or with one stage, else chunks of about 4 layers."""
    stages, layers = row.pipeline_parallel, row.architecture.layers
    if stages == 1 or "no interleaved schedule" in row.note:
        return Guess(1, "not interleaved")
    each = layers // stages
    chunks = (v for v in range(max(each // 4, 1), 0, -1) if layers % (stages * v) == 0)
    return Guess(next(chunks, 2 if each >= 4 else 1), "chunks of about four layers")


def _experts(row: TrainingRow) -> int | Guess[int]:
    """DeepEP moves tokens between expert-parallel ranks: a table that prints no degree beside it left it out."""
    if row.architecture.experts and row.printed_expert_parallel == 1 and "DeepEP" in row.note:
        return Guess(math.gcd(row.data_parallel, row.architecture.experts.count), "DeepEP between all ranks")
    return row.printed_expert_parallel


def _recompute(row: TrainingRow) -> Guess[str]:
    """A row whose recompute is not published ran: if keeping everything does not fit, it recomputed in full."""
    layout = _layout(row, "none")
    parts = trainer_memory(
        row.architecture,
        row.hardware,
        row.trainer,
        layout,
        Microbatches.fixed(layout, row.seq_len, row.batch),
        UpdateOptions(dtype=row.dtype, lora_rank=row.lora_rank),
    )
    limit = USABLE if row.zero_stage == 3 else SURELY_OVER
    if float(parts.total) <= limit * row.hardware.device.memory:
        return Guess("none", "it fits")
    return Guess("full", "none does not fit")


def _layout(row: TrainingRow, recompute: str) -> Layout:
    # simumax names its context parallelism a2a: Ulysses-style, over heads
    ulysses = row.context_parallel if "a2a (Ulysses" in row.note else 1
    return Layout.of(
        tensor_parallel=row.tensor_parallel,
        pipeline_parallel=row.pipeline_parallel,
        context_parallel=1 if ulysses > 1 else row.context_parallel,
        ulysses=ulysses,
        data_parallel=row.data_parallel,
        virtual_pipeline=row.virtual_pipeline,
        expert_parallel=row.expert_parallel,
        sequence_parallel=row.sequence_parallel,
        zero_stage=row.zero_stage,
        microbatch=row.microbatch,
        activation_recompute=RECOMPUTE.index(recompute),
        offload=OFFLOAD.index(row.offload),
    )


def _microbatches(row: TrainingRow) -> Microbatches:
    """Packs of samples that do not see each other where the note says that SQuAD was packed."""
    found = Microbatches.fixed(row.layout, row.seq_len, row.batch)
    if "SQuAD packed" not in row.note:
        return found
    return Microbatches.of(found.tokens, found.tokens * SQUAD_TOKENS, np.asarray(SQUAD_TOKENS), found.count)


def _switches(row: TrainingRow) -> Switches | Guess[Switches]:
    """The backend's, with what the row states; its recipe where a recipe is known to be missing."""
    cells = row.row.cells
    stated = of_note(row.note, row.row.text("source"))
    if "no matching recipe" not in row.note:
        return row.trainer.switches.changed(stated)
    name = cells.get("architecture") or ""
    recipe = of_recipe(cells.get("framework") or "", cells.get("framework_version") or "", name, row.device)
    return Guess(row.trainer.switches.changed(recipe).changed(stated), "as recipes of the release")


def _update_s(row: TrainingRow) -> float | None:
    """Seconds of one optimizer update: as printed, or from the trained tokens a second."""
    if row.step_s:
        return row.step_s
    return row.batch * row.seq_len / (row.rate * row.devices) if row.rate and row.devices else None


def _default_zero(row: TrainingRow) -> Guess[int]:
    return Guess(row.trainer.capability.usual_zero_stage, "the backend's")


@dataclass(frozen=True)
class TrainingRow(Reading):
    """One measured row, ready for `training_update` and `trainer_memory`.

    Fields stand in the order in which they are found; see `rlperf.calibrate.columns`.
    """

    backend: str = derived(_backend)
    batch: float = derived(_batch)
    seq_len: float = column(positive)
    architecture: Architecture = derived(lambda row: row.row.architecture())
    device: str = column(text, name="gpu")
    devices_per_node: int | None = column(count, None, name="gpus_per_node")
    hardware: Hardware = derived(_hardware)
    trainer: TrainerCalibration = derived(lambda row: load_trainer(row.backend))
    dtype: str = column(one_of(tuple(DTYPES)), "bf16", name="compute_dtype")
    note: str = column(text, "")
    devices: int = column(count, 1, name="n_gpus")
    tensor_parallel: int = column(count, Guess(1))
    pipeline_parallel: int = column(count, Guess(1))
    context_parallel: int = column(count, Guess(1))
    data_parallel: int = column(count, _replicas)
    virtual_pipeline: int = column(count, _interleaving)
    printed_expert_parallel: int = column(count, Guess(1), name="expert_parallel")
    expert_parallel: int = derived(_experts)
    sequence_parallel: int = column(whole, lambda row: Guess(int(row.tensor_parallel > 1), "on with tensor parallel"))
    zero_stage: int = column(whole, _default_zero)
    microbatch: int = column(count, _microbatch)
    offload: str = column(one_of(OFFLOAD), "none")
    lora_rank: int | None = column(count, None)
    activation_recompute: str = column(one_of(RECOMPUTE), _recompute)
    switches: Switches = derived(_switches)
    step_s: float | None = column(positive, None, name="measured_step_s")
    rate: float | None = column(positive, None, name="measured_tokens_per_s_per_gpu")
    update_s: float | None = derived(_update_s)
    peak_gb: float | None = column(positive, None, name="measured_peak_memory_gb")
    layout: Layout = derived(lambda row: _layout(row, row.activation_recompute))
    microbatches: Microbatches = derived(lambda row: _microbatches(row))

    @property
    def configuration(self) -> str:
        """Text that is equal for repeats and releases of one configuration."""
        return "|".join(self.row.cells.get(name) or "" for name in CONFIGURATION)

    @property
    def related(self) -> bool:
        """Whether its backend is but the nearest relative of its framework."""
        return backend_of(self.row.cells) is None

    @property
    def chunked_loss(self) -> bool:
        """Whether the loss is taken in chunks of the vocabulary, so that logits never stand whole."""
        return "task rl" in self.note or "Liger" in self.row.text("framework")

    @property
    def flash2(self) -> bool:
        """Whether attention is the second FlashAttention's: torchtitan's (torch.nn.functional) and NeMo's of 2024 is.

        NeMo's tables are of containers of early and mid 2024 (24.03 to 24.07), before the third and before
        TransformerEngine preferred cuDNN's on Hopper (recalled); no row states its kernel.
        """
        stack, version = self.row.text("framework"), self.row.text("framework_version")
        aged = stack == "NeMo (Megatron-Core)" and version.startswith("24.0")
        return "flash_attention_2" in self.note or "torchtitan" in stack or aged

    @property
    def flash1(self) -> bool:
        """Whether attention is the first FlashAttention's, as in llm-foundry's tables, begun before the second's."""
        return "llm-foundry" in self.row.text("framework")

    @property
    def options(self) -> UpdateOptions:
        """How it computes."""
        return UpdateOptions(
            dtype=self.dtype,
            lora_rank=self.lora_rank,
            chunked_loss=self.chunked_loss,
            recompute_experts=self.recompute_experts,
            attention_kernel="flash2" if self.flash2 else "flash1" if self.flash1 else "flash",
            compiled=self.compiled,
            compiled_loss=self.compiled_loss,
            recompute_modules=recomputed(self.note),
            switches=self.switches,
        )

    @property
    def compiled(self) -> bool:
        """Whether layers are compiled."""
        return "torch.compile True" in self.note

    @property
    def compiled_loss(self) -> bool:
        """Whether the loss is compiled with them: from some release on, which the benchmark's date stands for."""
        since = self.trainer.workspace.compiled_loss_since
        dated = re.search(r"20\d\d-?[01]\d", self.row.text("framework_version") or self.row.text("source"))
        return bool(self.compiled and since and dated and dated[0].replace("-", "") >= since)

    @property
    def recompute_experts(self) -> bool:
        """Whether the experts' activation function alone is recomputed."""
        return "moe_act" in self.note

    @property
    def peak_bytes(self) -> float | None:
        """Measured peak of one device."""
        return self.peak_gb * 1e9 if self.peak_gb else None

    @property
    def used(self) -> bool:
        """Whether the backend's fit saw this configuration."""
        return digest(self.configuration) in self.trainer.configurations


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
    return frozenset(kind for found in _ordered(rows) for kind in found[2::3])


def _ordered(rows: Sequence[TrainingRow]) -> list[list[str]]:
    """Digests of every group's configurations: by backend, device, kind of architecture and dtype, then by digest."""
    by_group: dict[str, set[tuple[str, str, bool, str, str]]] = {}
    for row in rows:
        kind = (row.backend, row.device, row.architecture.experts is not None, row.dtype, digest(row.configuration))
        by_group.setdefault(row.group, set()).add(kind)
    return [[kind[-1] for kind in sorted(found)] for found in by_group.values()]


def timing_part(rows: Sequence[TrainingRow]) -> frozenset[str]:
    """Digests of the configurations that fits of seconds may see: two of three of a group's, in the same order.

    What stays out is every third one from the first on: no part of it is in `calibration_part`.
    """
    return frozenset(kind for found in _ordered(rows) for place, kind in enumerate(found) if place % 3)


def read_training_rows(path: Path) -> tuple[list[TrainingRow], list[Refusal]]:
    """All rows of a file, with those that cannot be predicted and why."""
    return read_all(TrainingRow, read_table(path))
