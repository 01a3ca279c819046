"""Thirty layouts that cannot fit, each by arithmetic that needs no model, and rows that ran and therefore must fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlperf.cost.batching import Microbatches
from rlperf.cost.memory_risk import out_of_memory_risk
from rlperf.cost.trainer.memory import trainer_memory
from rlperf.cost.trainer_device import UpdateOptions
from rlperf.layout import Layout
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import load_trainer


@dataclass(frozen=True)
class Case:
    """A layout, the tokens of a microbatch and its number, and why it is over the limit."""

    architecture: str
    trainer: str
    device: str
    tokens: int
    microbatches: int
    why: str
    layout: dict[str, int] = field(default_factory=dict)


FSDP = {"zero_stage": 3, "activation_recompute": 2}
SP = {"sequence_parallel": 1}
CASES = (
    Case("Qwen2.5-7B", "megatron", "h100_sxm", 2048, 1, "7.6e9 x 18 bytes = 137 GB of states on one 80 GB device",
         {}),
    Case("Llama-3.1-8B", "megatron", "a100_80g_sxm", 4096, 8, "8.0e9 x 18 = 145 GB, replicated",
         {'data_parallel': 8}),
    Case("Llama-3.1-8B", "megatron", "h200_sxm", 4096, 8, "145 GB and 7 GB of activations on 151 GB",
         {'data_parallel': 8}),
    Case("Qwen2.5-14B", "fsdp2", "h100_sxm", 4096, 2, "14.8e9 x 16 / 2 = 118 GB",
         {**FSDP, 'data_parallel': 2}),
    Case("Qwen2.5-32B", "fsdp2", "h100_sxm", 4096, 2, "32.8e9 x 16 / 4 = 131 GB",
         {**FSDP, 'data_parallel': 4}),
    Case("Qwen2.5-32B", "megatron", "h100_sxm", 2048, 4, "32.8e9 x 18 / 4 = 147 GB",
         {**SP, 'tensor_parallel': 4}),
    Case("Qwen2.5-72B", "fsdp2", "h100_sxm", 4096, 2, "72.7e9 x 16 / 8 = 145 GB",
         {**FSDP, 'data_parallel': 8}),
    Case("Qwen2.5-72B", "megatron", "h100_sxm", 2048, 4, "72.7e9 x 18 / 8 = 164 GB",
         {**SP, 'tensor_parallel': 8}),
    Case("Llama-3-70B", "megatron", "h200_sxm", 2048, 4, "70.6e9 x 18 / 8 = 159 GB on 151",
         {**SP, 'tensor_parallel': 8}),
    Case("Llama-3-70B", "megatron", "h100_sxm", 2048, 4, "ZeRO 0 keeps 159 GB whatever the replicas",
         {**SP, 'tensor_parallel': 8, 'data_parallel': 4}),
    Case("Llama-3-70B", "megatron", "h100_sxm", 2048, 4, "70.6e9 x 18 / 8 = 159 GB",
         {**SP, 'tensor_parallel': 4, 'pipeline_parallel': 2}),
    Case("Llama-3.1-405B", "megatron", "h100_sxm", 2048, 8, "405e9 x 18 / 32 = 228 GB",
         {**SP, 'tensor_parallel': 8, 'pipeline_parallel': 4}),
    Case("Llama-3.1-405B", "fsdp2", "h100_sxm", 4096, 1, "405e9 x 16 / 64 = 101 GB",
         {**FSDP, 'data_parallel': 64}),
    Case("Mixtral-8x7B", "fsdp2", "h100_sxm", 4096, 1, "46.7e9 x 16 / 8 = 93 GB",
         {**FSDP, 'data_parallel': 8}),
    Case("Mixtral-8x7B", "megatron", "h100_sxm", 2048, 1, "experts: 45.1e9 / 8 x 18 = 101 GB",
         {'data_parallel': 8, 'expert_parallel': 8}),
    Case("Qwen3-30B-A3B", "megatron", "h100_sxm", 2048, 1, "experts: 29e9 / 4 x 18 = 130 GB",
         {'data_parallel': 4, 'expert_parallel': 4}),
    Case("Qwen3-235B-A22B", "fsdp2", "h100_sxm", 4096, 1, "235e9 x 16 / 32 = 118 GB",
         {**FSDP, 'data_parallel': 32}),
    Case("Qwen3-235B-A22B", "megatron", "h100_sxm", 2048, 1, "experts: 227e9 / 32 x 18 = 128 GB",
         {'data_parallel': 32, 'expert_parallel': 32}),
    Case("DeepSeek-V3", "megatron", "h100_sxm", 2048, 4, "experts: 656e9 / 128 x 18 = 92 GB",
         {'pipeline_parallel': 4, 'data_parallel': 32, 'expert_parallel': 32}),
    Case("DeepSeek-V3", "fsdp2", "h200_sxm", 4096, 1, "671e9 x 16 / 64 = 168 GB on 151",
         {**FSDP, 'data_parallel': 64}),
    Case("Qwen2.5-7B", "fsdp2", "h100_sxm", 65536, 1, "logits: 65536 x 152064 x (2 + 4 + 4) = 100 GB",
         {**FSDP, 'data_parallel': 8}),
    Case("Qwen2.5-1.5B", "fsdp2", "a100_80g_sxm", 60000, 1, "logits: 60000 x 151936 x (2 + 4 + 4) = 91 GB",
         {**FSDP, 'data_parallel': 8}),
    Case("Llama-3.1-8B", "fsdp2", "h100_sxm", 70000, 1, "logits: 70000 x 128256 x (2 + 4 + 4) = 90 GB",
         {**FSDP, 'data_parallel': 8}),
    Case("Qwen2.5-0.5B", "fsdp2", "a100_40g_sxm", 30000, 1, "logits: 30000 x 151936 x (2 + 4 + 4) = 46 GB on 43",
         {**FSDP, 'data_parallel': 8}),
    Case("Llama-3.1-8B", "fsdp2", "h100_sxm", 32768, 1, "no recompute: 32 layers x 32768 x 139 kB = 146 GB kept",
         {'data_parallel': 64, 'zero_stage': 3}),
    Case("Qwen2.5-7B", "megatron", "a100_80g_sxm", 65536, 1, "28 layers x 65536 x 157 kB / 2 = 144 GB kept",
         {**SP, 'tensor_parallel': 2, 'data_parallel': 32, 'zero_stage': 1}),
    Case("Llama-3-70B", "megatron", "h100_sxm", 32768, 64, "8 microbatches x 10 layers x 32768 x 275 kB / 8 = 90 GB",
         {**SP, 'tensor_parallel': 8, 'pipeline_parallel': 8, 'data_parallel': 8, 'zero_stage': 1}),
    Case("Qwen2.5-32B", "megatron", "h100_sxm", 16384, 32, "4 x 16 layers x 16384 x 8 x 5120 = 43 GB of residuals",
         {'tensor_parallel': 4, 'pipeline_parallel': 4, 'data_parallel': 8, 'zero_stage': 1}),
    Case("Qwen2.5-14B", "fsdp2", "l40s", 4096, 1, "14.8e9 x 16 / 4 = 59 GB on 48",
         {**FSDP, 'data_parallel': 4}),
    Case("Llama-3.1-405B", "megatron", "b200_sxm", 2048, 8, "228 GB on 193",
         {**SP, 'tensor_parallel': 8, 'pipeline_parallel': 4}),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.architecture}-{case.device}-{case.tokens}")
def test_over_limit(case: Case) -> None:
    hw = load_hardware(case.device)
    tokens = float(case.tokens)
    batch = Microbatches.of(tokens, tokens * min(tokens, 4096.0), min(tokens, 4096.0), case.microbatches)
    layout = Layout.of(**case.layout)
    parts = trainer_memory(load_architecture(case.architecture), hw, load_trainer(case.trainer), layout, batch)
    assert float(parts.total) > hw.device.usable_memory, case.why


def test_documented_logits_of_58_gib() -> None:
    """An issue of slime (#1951) reports 58 GiB of logits: 102 400 tokens x 151 936 x 4 bytes. Chunked, they fit."""
    hw, arch = load_hardware("h100_sxm"), load_architecture("Qwen3-4B")
    tokens = 58 * 2**30 / (4 * arch.vocab)
    batch = Microbatches.of(tokens, tokens * 8192.0, 8192.0, 4)
    layout = Layout.of(tensor_parallel=1, data_parallel=8, zero_stage=3, activation_recompute=2)
    whole = trainer_memory(arch, hw, load_trainer("fsdp2"), layout, batch)
    chunked = trainer_memory(arch, hw, load_trainer("fsdp2"), layout, batch, UpdateOptions(chunked_loss=True))
    assert float(whole.logits) >= 58 * 2**30
    assert float(whole.total) > hw.device.usable_memory > float(chunked.total)


def test_there_are_thirty() -> None:
    assert len(CASES) == len({(c.architecture, c.device, c.tokens, str(c.layout)) for c in CASES}) == 30


@pytest.mark.data
def test_rows_that_ran_fit(measured_data: Path) -> None:
    """Every timed training row ran. Rows with blank recompute or offload say nothing about memory."""
    from rlperf.calibrate.columns import read_all
    from rlperf.calibrate.splits import is_new
    from rlperf.calibrate.tables import read_table
    from rlperf.calibrate.trainers.costs import batches_of, stack
    from rlperf.calibrate.trainers.rows import TrainingRow

    file = measured_data / "measured" / "training.csv"
    table = read_table(file)
    new = {row.row_id for row in table if is_new("training", row)}
    ran = [row for row in read_all(TrainingRow, table)[0] if not row.assumed]
    wrong: list[str] = []
    sure = 0
    for indices in batches_of(ran):
        first = ran[indices[0]]
        layout, batch = stack([ran[i].layout for i in indices], [ran[i].microbatches for i in indices])
        parts = trainer_memory(first.architecture, first.hardware, first.trainer, layout, batch, first.options)
        limit, trainer = first.hardware.device.usable_memory, first.trainer
        risks = out_of_memory_risk(parts.total.ravel(), limit, trainer.memory_low, trainer.memory_high)
        wrong += [ran[i].row_id for i, risk in zip(indices, risks, strict=True) if risk > 0.5]
        sure += int((risks > 0.9).sum())
    came = [row.row_id for row in ran if row.row_id in new]
    assert len(ran) - len(came) > 500
    # four rows on A100 40 GB lie between the 39.49 GiB that a process sees and the data sheet's 40: p 0.52 to 0.58
    assert len(set(wrong) - new) <= 0.035 * (len(ran) - len(came))
    assert sure <= 0.02 * len(ran)
    # groups that nobody had in view: recipes that recompute parts of a layer which the table does not name
    assert len(set(wrong) & new) <= 0.10 * len(came)
