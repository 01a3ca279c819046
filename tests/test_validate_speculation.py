"""``rlperf validate --kind speculation``: what is read of a row, what is refused, and how far predictions are off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.rl_step.rows import read_row
from rlperf.calibrate.speculation.acceptance import curves_of, far_of, fit_speculation
from rlperf.calibrate.speculation.gains import TIMED, cost_spread, mixed, told_gain
from rlperf.calibrate.speculation.rows import Drafting, draftings_of, framework_of, served_of, slots_of
from rlperf.calibrate.tables import Row, read_table
from rlperf.calibrate.validate import PredictedFigure, Report, validate_file
from rlperf.calibrate.validate_speculation import GAIN, TOKENS, TPOT, TRAINING_GAIN
from rlperf.errors import SpecError
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.speculation import DraftSetting, first_of, tokens_per_step
from rlperf.specs.speculation_calibration import load_speculation

COLUMNS = "model,gpu,n_gpus,engine,method,k,acceptance_length,sampling,concurrency,metric,with_spec,speedup,kind"


def row(**cells: str) -> Row:
    return Row("row", "group", 2, {"model": "Qwen3-8B", "gpu": "h100_sxm", "engine": "vLLM", **cells})


def judged(folder: Path, *lines: str) -> Report:
    file = folder / "curves.csv"
    file.write_text("\n".join((COLUMNS, *lines)) + "\n")
    return validate_file(file, "speculation")


@pytest.mark.parametrize(
    ("method", "k", "read"),
    [
        ("EAGLE-3", "4", Drafting("eagle3", 4, 4)),
        ("MTP (NextN)", "2 draft tokens", Drafting("mtp", 1, 1)),  # SGLang counts the token that they follow
        ("MTP", "steps 3, topk 1, 4 draft tokens", Drafting("mtp", 3, 3)),
        ("MTP", "steps 2, topk 2, 4 draft tokens", Drafting("mtp", 2, 3, ("a tree of 3 as 2 in a row",))),
    ],
)
def test_drafts_are_read_as_engines_count_them(method: str, k: str, read: Drafting) -> None:
    assert draftings_of(row(method=method, k=k)) == (read,)


def test_a_row_that_prints_no_number_of_drafts_is_told_for_every_usual_one() -> None:
    """One of three: the gain is the middle of all of them, and the interval holds each."""
    open_ = row(method="EAGLE-3", concurrency="64", kind="serving")
    assert [each.depth for each in draftings_of(open_)] == [1, 2, 3]
    told, known = told_gain(open_, load_speculation()), load_speculation()
    each = [told_gain(row(method="EAGLE-3", k=str(k), concurrency="64", kind="serving"), known) for k in (1, 2, 3)]
    assert told.gains.tolist() == [float(one.gains[0]) for one in each] and len(set(told.gains.tolist())) == 3
    middle, low, high = mixed(told.gains, 0.0)
    assert middle == np.median(told.gains) and low < middle < high


def test_cases_are_mixed_as_equally_likely() -> None:
    """Of one case the interval is that of its spread; apart cases widen it, and their middle is the median."""
    middle, low, high = mixed(np.array([2.0]), 0.1)
    assert middle == 2.0 and (low, high) == pytest.approx((2 * np.exp(-0.1645), 2 * np.exp(0.1645)), rel=0.01)
    assert mixed(np.array([1.0, 2.0, 4.0]), 0.1)[1:] == pytest.approx((0.9, 4.4), rel=0.05)


def test_engines_run_fewer_with_drafts_where_nobody_states_how_many() -> None:
    """SGLang 48; slime leaves it to the engine (whether a script states it no row says), verl states it always."""
    engine = load_engine_calibration("sglang")
    slime, verl = (framework_of(row(source=source)) for source in ("x@1:rlhf/slime/readme", "verl-project/verl@1:docs"))
    assert slots_of(engine, slime) == (1024, 48) and slots_of(engine, verl) == (1024,)
    assert slots_of(load_engine_calibration("vllm"), slime) == (1024,) and framework_of(row(source="mine")) is None


def test_waiting_that_the_printed_rate_tells_of_may_be_left_by_drafts() -> None:
    """Half of all cases: what the engine does not explain of a slow rollout is not shortened; a fast one has none."""
    cells = {"model": "MiMo-7B-RL", "gpu": "h200_sxm", "engine": "SGLang", "method": "MTP", "k": "2", "kind": "rl"}
    cells |= {"sampling": "max response 24k", "metric": "rollout tokens/s"}
    free, slow, fast = (
        told_gain(row(**cells, without_spec=rate), load_speculation()).gains for rate in ("", "1000", "100000")
    )
    assert len(slow) == 2 * len(free) and fast.tolist() == free.tolist()
    assert set(free.tolist()) < set(slow.tolist())
    left = sorted(set(slow.tolist()) - set(free.tolist()))
    assert all(abs(gain - 1.0) < abs(free - 1.0).max() for gain in left)


def test_requests_a_second_run_as_many_as_littles_law_says() -> None:
    """Twice the rate at twice the pace is as many running; without the milliseconds of a token nobody can tell."""
    cells = {"model": "DeepSeek-R1", "gpu": "h200_sxm", "engine": "vLLM TP8", "method": "MTP", "k": "1"}
    cells |= {"kind": "serving", "metric": TIMED, "acceptance_length": "1.82"}
    one, two, more = (
        told_gain(row(**cells, concurrency=f"{rate} requests/s", without_spec=pace), load_speculation()).gains
        for rate, pace in ((1, "50"), (2, "25"), (2, "50"))
    )
    assert one == pytest.approx(two, rel=1e-6) and not np.allclose(one, more, rtol=1e-3)
    with pytest.raises(SpecError, match="only beside the milliseconds"):
        told_gain(row(**cells, concurrency="1 requests/s"), load_speculation())


def test_a_replica_is_as_printed_or_as_small_as_its_weights_allow() -> None:
    printed = served_of(row(model="DeepSeek-R1", gpu="", engine="vLLM TP8 (Feb 2025)"))
    assert int(printed.layout.tensor_parallel) == 8 and printed.assumed == ("on h200_sxm",)
    assert printed.gemm_dtype == "fp8"
    assert int(served_of(row()).layout.tensor_parallel) == 1
    assert int(served_of(row(model="Llama-3.1-70B")).layout.tensor_parallel) == 4  # 141 GB and a quarter
    shared = served_of(row(engine="vLLM 0.20.0 TP4 EP"))
    assert int(shared.layout.expert_parallel) == 4


def test_every_row_is_predicted_or_refused_for_a_reason(tmp_path: Path) -> None:
    found = judged(
        tmp_path,
        "Qwen3-8B,h100_sxm,1,vLLM,EAGLE-3,3,2.5,,4,tokens/s,,1.9,serving",
        "Qwen3-8B,h100_sxm,1,vLLM,EAGLE-3,3,2.5,,4,TPOT ms,4.0,,serving",
        "MiMo-7B-RL,h200_sxm,,SGLang,MTP trained online,,,max response 2k,,training s,148,0.95,rl",
        "Qwen3-8B,h100_sxm,1,vLLM,EAGLE-3,3,,,4,tokens/s,,<=1.9,rl",
        "Qwen3-8B,h100_sxm,1,vLLM,DSpark,3,2.5,,4,acceptance only,,,acceptance",
        "Qwen3-8B,h100_sxm,1,TensorFlow,EAGLE-3,3,,,4,tokens/s,,1.9,serving",
        "Qwen3-8B,h100_sxm,1,vLLM,EAGLE-3,3,,,4,tokens/s,,,serving",
        "Qwen3-8B,h100_sxm,1,simulator,EAGLE-3,3,,,4,tokens/s,,2.0,simulated",
        "Qwen3-8B,h100_sxm,1,vLLM,n-gram,3,2.0,,4,acceptance only,,,acceptance",
    )
    metrics = [one.metric for one in found.predictions]
    assert metrics == [TOKENS, GAIN, TOKENS, TPOT, TRAINING_GAIN] and found.predicted == 3
    assert sorted(line for lines in found.refused_lines.values() for line in lines) == [5, 6, 7, 8, 9, 10]
    told = next(one for one in found.predictions if one.metric == GAIN)
    assert told.low < told.predicted < told.high and 1.5 < told.predicted < 2.5
    assert any("no acceptance of ngram" in reason for reason in found.refused)


def test_a_stated_length_is_taken_and_judges_cost_alone(tmp_path: Path) -> None:
    """Twice the tokens of an engine_step that costs the same is nearly twice the gain."""
    lines = [f"Qwen3-8B,h100_sxm,1,vLLM,EAGLE-3,3,{length},,1,tokens/s,,1.9,serving" for length in (1.5, 3.0)]
    few, many = (one.predicted for one in judged(tmp_path, *lines).predictions if one.metric == GAIN)
    assert 1.9 < many / few <= 2.0


def test_a_head_that_sees_one_token_ahead_falls_faster() -> None:
    assert far_of("mtp", "Qwen3.5-397B-A17B") and far_of("eagle3", "DeepSeek-V3")
    assert not far_of("mtp", "DeepSeek-V3") and not far_of("mtp", "MiMo-7B-RL")
    known, wanted = load_speculation(), DraftSetting("mtp", 5, 5)
    near, far = (known.tokens(wanted, trained=True, far=far).tokens for far in (False, True))
    assert near[1] == far[1] and all(a < b for a, b in zip(near[2:], far[2:], strict=True))


def test_what_few_curves_do_not_tell_stays_as_it_was(tmp_path: Path) -> None:
    lines = [f"Qwen3-{size}B,h100_sxm,1,vLLM,EAGLE-3,3,2.{size},,4,acceptance only,,,acceptance" for size in (4, 8)]
    (tmp_path / "own.csv").write_text("\n".join((COLUMNS, *lines)) + "\n")
    table, shipped = read_table(tmp_path / "own.csv"), load_speculation()
    found = fit_speculation(table, base=shipped)
    assert found.frozen == shipped.frozen
    kept = {fit.method: fit for fit in found.acceptance}
    assert kept.keys() == {fit.method for fit in shipped.acceptance}
    assert [name for name, fit in kept.items() if fit not in shipped.acceptance] == ["eagle3"]
    with pytest.raises(SpecError, match="no pair of rows"):
        fit_speculation(table)


def test_first_of_is_the_inverse_of_tokens_per_step() -> None:
    for first in np.linspace(0.05, 1.0, 9).tolist():
        for drafts in (1, 3, 8):
            assert first_of(tokens_per_step(first, 0.9, drafts), 0.9, drafts) == pytest.approx(first, abs=1e-9)


@pytest.mark.slow
@pytest.mark.data
def test_published_rows_are_predicted(measured_data: Path) -> None:
    """Heads of models left out; gains at the accepted length; milliseconds per token of a drafting engine."""
    found = validate_file(measured_data / "measured" / "speculation.csv", "speculation")
    by: dict[tuple[str, str], list[PredictedFigure]] = {}
    for one in found.predictions:
        if not one.used_in_calibration:
            by.setdefault((one.metric, one.group), []).append(one)

    def off(metric: str, group: str) -> np.ndarray:
        return np.array([abs(one.predicted / one.measured - 1.0) for one in by[metric, group]])

    assert len(off(TOKENS, "acceptance")) == 91 and np.median(off(TOKENS, "acceptance")) < 0.08
    assert np.median(off(GAIN, "serving")) < 0.12 and np.median(off(GAIN, "rl")) < 0.12
    for one in by[GAIN, "rl"]:
        assert (one.predicted > 1.0) == (one.measured > 1.0)
    gains = [*by[GAIN, "rl"], *by[GAIN, "serving"]]
    assert np.mean([one.low <= one.measured <= one.high for one in gains]) > 0.75
    assert off(TPOT, "serving").max() < 0.12
    assert off(TRAINING_GAIN, "rl").max() < 0.08
    inside = [one.low <= one.measured <= one.high for one in by[TOKENS, "acceptance"]]
    assert np.mean(inside) > 0.75
    assert sum(found.refused.values()) == 29  # DSpark, EAGLE-2, upper values, a simulation


def test_a_bound_says_nothing_of_the_spread_of_costs(tmp_path: Path) -> None:
    line = "Qwen3-8B,h100_sxm,1,vLLM,EAGLE-3,3,2.5,,4,tokens/s,,{gain},serving"
    file = tmp_path / "own.csv"
    file.write_text("\n".join((COLUMNS, *(line.format(gain=gain) for gain in ("1.9", "<=1.3", "0")))) + "\n")
    found = cost_spread(read_table(file), load_speculation())
    assert found is not None and found.provenance.n == 1


@pytest.mark.data
def test_how_far_costs_lie_off_is_told_by_other_sources(measured_data: Path) -> None:
    """The shipped spread is that of all rows; a source that is left out does not tell it."""
    table = read_table(measured_data / "measured" / "speculation.csv")
    known = load_speculation()
    every = cost_spread(table, known)
    assert every is not None and every.value == pytest.approx(known.cost.value, abs=1e-3)
    other = cost_spread(table, known, without="github.com/HabanaAI/vllm-fork/pull/1264")
    assert other is not None and other.provenance.n < every.provenance.n and other.value != every.value


@pytest.mark.data
def test_the_depth_of_heads_that_see_one_token_is_their_own(measured_data: Path) -> None:
    """The published 2.4 tokens of DeepSeek-R1 with three drafts, which no fit saw: one fall for all says 3.0."""
    known = fit_speculation(read_table(measured_data / "measured" / "speculation.csv"))
    fit = known.of("mtp")
    assert fit is not None and fit.falls_once is not None
    assert tokens_per_step(fit.first, fit.falls_once, 3) == pytest.approx(2.4, rel=0.12)
    assert tokens_per_step(fit.first, fit.falls, 3) > 2.4 * 1.25


@pytest.mark.data
def test_deep_drafts_are_told_better_by_two_kinds_of_heads(measured_data: Path) -> None:
    """Of models with another of their kind in the fit: both curves of Qwen3.5 and that of GLM-5.2, at 4 to 8 drafts."""
    table = read_table(measured_data / "measured" / "speculation.csv")
    errors = []
    for curve in (one for one in curves_of(table) if one.method == "mtp" and one.far):
        fit = fit_speculation(table, without=curve.model).of("mtp")
        assert fit is not None
        deep = curve.drafts >= 4
        told = np.array([tokens_per_step(fit.first, fit.fall(True), int(k)) for k in curve.drafts[deep]])
        errors += np.abs(told / curve.tokens[deep] - 1.0).tolist()
    assert len(errors) == 15 and np.mean(errors) < 0.15


def test_a_row_that_logs_its_accepted_length_is_predicted_at_it() -> None:
    cells = {
        "architecture": "Qwen3.5-35B-A3B", "framework": "miles (SGLang + Megatron-Core)", "gpu": "h200_sxm",
        "n_gpus": "8", "prompts_per_step": "8", "group_size": "8", "isl_mean": "150", "osl_mean": "1000",
        "seq_limit": "4096", "speculation": "eagle:3", "note": "EAGLE/MTP speculative decoding, accept length 2.5",
    }  # fmt: skip
    found = read_row(cells)
    assert found.speculation == "mtp:3" and found.draft_acceptance is not None
    known = load_speculation().tokens(DraftSetting("mtp", 3, 3), found.draft_acceptance)
    assert known.tokens[3] == pytest.approx(2.5)
    assert read_row({**cells, "note": ""}).draft_acceptance is None
