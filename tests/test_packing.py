"""Microbatches cut over all ranks at once: the bound against real packing, padding of sorted batches, stages."""

import csv
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest

from rlperf.calibrate.rl_step_predict import predict_step
from rlperf.calibrate.rl_step_rows import read_row
from rlperf.cost.batching import bins_needed
from rlperf.cost.packing import least_bins, packed_count, sorted_microbatches
from rlperf.specs.rl_calibration import load_framework_calibration

ROW = (
    "row_id,framework,architecture,gpu,n_gpus,osl_mean,seq_limit,zero_stage,sequence_packing\n"
    "a,NeMo-RL (vLLM + PyTorch DTensor),Llama-3.1-8B,h100_sxm,8,800,4096,3,0\n"
)


@pytest.mark.parametrize(("mean", "budget"), [(900.0, 4096.0), (1800.0, 4096.0), (3400.0, 4096.0), (6000.0, 30000.0)])
def test_bound_is_what_first_fit_needs(mean: float, budget: float) -> None:
    lengths = np.minimum(np.random.default_rng(3).gamma(2.8, mean / 2.8, 512), budget)
    packed = bins_needed(lengths, budget)
    assert least_bins(lengths, budget) <= packed <= np.ceil(1.03 * least_bins(lengths, budget))


def test_long_sequences_do_not_share_bins() -> None:
    assert least_bins(np.full(7, 2049.0), 4096.0) == 7
    assert least_bins(np.full(7, 2048.0), 4096.0) == 4
    assert packed_count(np.full(7, 2048.0), 3, 4096.0) == 2


def test_sorted_batches_carry_every_sequence_and_its_padding() -> None:
    lengths = np.random.default_rng(4).gamma(2.8, 300.0, 512)
    count, tokens, squares = sorted_microbatches(lengths, 8, 4096.0)
    assert 1.0 < tokens / (lengths.sum() / 8) < 1.3
    assert squares >= (lengths**2).sum() / 8
    assert count * 4096.0 >= tokens
    assert count >= packed_count(lengths, 8, 4096.0)


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
