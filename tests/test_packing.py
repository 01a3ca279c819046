"""Microbatches cut over all ranks at once: the bound against real packing, padding of sorted batches, stages."""

import csv
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest

from rlperf.calibrate.rl_step.predict import predict_step
from rlperf.calibrate.rl_step.rows import read_row
from rlperf.cost.batching import bins_needed
from rlperf.cost.packing import packed_bins, sorted_microbatches
from rlperf.specs.rl_calibration import load_framework_calibration

ROW = (
    "row_id,framework,architecture,gpu,n_gpus,osl_mean,seq_limit,zero_stage,sequence_packing\n"
    "a,NeMo-RL (vLLM + PyTorch DTensor),Llama-3.1-8B,h100_sxm,8,800,4096,3,0\n"
)


def test_bins_of_many_are_those_of_a_sample() -> None:
    lengths = np.minimum(np.random.default_rng(3).gamma(2.8, 600.0, 12_000), 4096.0)
    assert packed_bins(lengths, 4096.0) == pytest.approx(bins_needed(lengths, 4096.0), rel=0.01)


def test_long_sequences_do_not_share_bins() -> None:
    assert packed_bins(np.full(7, 2049.0), 4096.0) == 7
    assert packed_bins(np.full(7, 2048.0), 4096.0) == 4
    assert packed_bins(np.full(7, 5000.0), 4096.0) == 7


def test_sequences_above_a_third_of_the_budget_leave_room() -> None:
    """Agents of 22 to 29 thousand tokens in bins of 65,536: two in most, where their sum asks for 2.6 in each."""
    lengths = np.random.default_rng(5).uniform(22_000.0, 29_000.0, 256)
    assert lengths.sum() / 65_536.0 < 0.8 * packed_bins(lengths, 65_536.0)


def test_sorted_batches_carry_every_sequence_and_its_padding() -> None:
    lengths = np.random.default_rng(4).gamma(2.8, 300.0, 512)
    count, tokens, squares = sorted_microbatches(lengths, 8, 4096.0)
    assert 1.0 < tokens / (lengths.sum() / 8) < 1.3
    assert squares >= (lengths**2).sum() / 8
    assert count * 4096.0 >= tokens
    assert count >= packed_bins(lengths, 4096.0) // 8


def test_equal_lengths_need_no_padding() -> None:
    count, tokens, squares = sorted_microbatches(np.full(64, 512.0), 4, 4096.0)
    assert (count, tokens, squares) == (2.0, 16 * 512.0, 16 * 512.0**2)


def test_dynamic_batches_cost_their_padding() -> None:
    row = read_row(next(csv.DictReader(StringIO(ROW))))
    padded, packed = predict_step(row), predict_step(replace(row, packing=True))
    for stage in ("scoring_s", "train_s"):
        assert 1.04 < padded.stage_s(stage) / packed.stage_s(stage) < 1.3


def test_only_nemo_cuts_over_all_ranks() -> None:
    assert load_framework_calibration("nemo_rl", "megatron").training.batching == "all"
    assert load_framework_calibration("verl", "fsdp2").training.batching == "rank"
