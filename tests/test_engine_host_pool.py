"""Host time of engines pooled over rollouts: known constants, far rows, what is shipped and to whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.engine_host_pool import HOST, START, fit_host, framework_of, telling
from rlperf.calibrate.rl_step.framework import constant, overhead, with_constants
from rlperf.calibrate.rl_step.predict import predict_step
from rlperf.calibrate.rl_step.rows import StepRow, read_row
from rlperf.calibrate.tables import read_table
from rlperf.specs.engine_host import load_engine_hosts
from rlperf.specs.rl_calibration import load_framework_calibration

FRAMEWORKS = ("NeMo-RL (vLLM + Megatron-Core)", "verl (vLLM + FSDP2)", "slime (SGLang + Megatron-Core)")
TRUE = (2.5e-3, 4e-5)


def rollout(framework: str, model: str, prompts: int, host: tuple[float, float] = TRUE, factor: float = 1.0) -> StepRow:
    """A row whose rollout is what these host terms give, times a factor."""
    row = read_row(
        {
            "row_id": f"{framework[:4]}_{model}_{prompts}", "framework": framework, "architecture": model,
            "gpu": "h100_sxm", "n_gpus": "8", "colocated": "1", "max_staleness": "0", "osl_mean": "600",
            "prompts_per_step": str(prompts), "group_size": "16", "seq_limit": "2048", "measured_step_s": "50",
        }
    )  # fmt: skip
    truth = with_constants(load_framework_calibration(row.framework), dict(zip(HOST, host, strict=True)))
    return replace(row, measured={"rollout_s": factor * predict_step(row, framework=truth).stage_s("rollout_s")})


@pytest.fixture(scope="module")
def rows() -> list[StepRow]:
    """Many and few requests tell the two terms apart."""
    models = ("Qwen2.5-0.5B", "Llama-3.1-8B")
    return [rollout(framework, model, n) for framework in FRAMEWORKS for model in models for n in (8, 256)]


@pytest.mark.slow
def test_constants_that_all_frameworks_share_come_out(rows: list[StepRow]) -> None:
    found = fit_host(rows, "2026-11-24")
    assert [getattr(found, name).value for name in HOST] == pytest.approx(TRUE, rel=0.12)
    assert all(getattr(found, name).provenance.n == len(rows) for name in HOST)
    # a framework that nobody measured differs by more than the pool's mean is unsure
    assert found.engine_host.provenance.high > 1.9


def test_what_no_row_tells_stays_at_what_was_judged() -> None:
    few = fit_host([rollout(each, "Llama-3.1-8B", 1, host=(4e-3, START[1])) for each in FRAMEWORKS], "2026-11-24")
    assert few.engine_host.value > 2.0 * START[0]
    # two requests a replica: their own term may be anything
    assert few.engine_host_per_request.value == pytest.approx(START[1], rel=0.15)
    assert few.engine_host_per_request.provenance.high > few.engine_host.provenance.high


def test_a_row_far_off_counts_little(rows: list[StepRow]) -> None:
    far = rollout(FRAMEWORKS[1], "Llama-3.1-8B", 256, factor=4.0)
    found = fit_host([*rows, far], "2026-11-24")
    assert [getattr(found, name).value for name in HOST] == pytest.approx(TRUE, rel=0.35)


@pytest.mark.slow
def test_a_framework_left_out_says_nothing(rows: list[StepRow]) -> None:
    odd = [rollout(FRAMEWORKS[0], "Llama-3.1-8B", n, host=(2e-2, 4e-4)) for n in (8, 512)]
    others = [row for row in rows if framework_of(row) != "nemo_rl"]
    without, alone = fit_host([*others, *odd], "2026-11-24", "nemo_rl"), fit_host(others, "2026-11-24")
    assert [getattr(without, name).value for name in HOST] == [getattr(alone, name).value for name in HOST]
    assert fit_host([*others, *odd], "2026-11-24").engine_host.value > 1.2 * without.engine_host.value
    with pytest.raises(ValueError, match="no rollout of a framework but nemo_rl"):
        fit_host(odd, "2026-11-24", "nemo_rl")


def test_rollouts_bound_by_adapters_or_environments_tell_nothing(rows: list[StepRow]) -> None:
    served, held = replace(rows[0], lora_rank=32), replace(rows[0], max_trajectories=256)
    silent = replace(rows[0], measured={"step_s": 50.0})
    assert telling([served, held, silent, rows[0]]) == [rows[0]]


@pytest.mark.parametrize("name", ["miles", "slime", "areal", "openrlhf", "trl"])
def test_frameworks_that_nobody_fitted_have_the_pool_and_say_so(name: str) -> None:
    framework, pool = load_framework_calibration(name), load_engine_hosts().of_stranger(name)
    for each in HOST if name != "trl" else HOST[1:]:
        shipped, term = overhead(framework, each), getattr(pool, each)
        assert shipped.value == term.value
        assert (shipped.provenance.n, shipped.provenance.low) == (term.provenance.n, term.provenance.low)
        assert "pooled over the rollouts" in shipped.provenance.source and shipped.provenance.assumed
    assert constant(load_framework_calibration("trl"), "engine_host") == 3e-3  # inside the training process


def test_no_pool_holds_rows_of_the_framework_left_out() -> None:
    prefixes = {"nemo_rl": ("nemo", "mlperf"), "verl": ("verl", "play_verl", "rlinf", "skyrl"), "miles": ("miles",)}
    hosts = load_engine_hosts()
    assert {one.without for one in hosts.pools} == {"", *prefixes}
    every = set(hosts.of_stranger("mine").engine_host.provenance.rows)
    for framework, begins in prefixes.items():
        rows = set(hosts.of_stranger(framework).engine_host.provenance.rows)
        assert rows == {row for row in every if not row.startswith(begins)} != every


@pytest.mark.slow
@pytest.mark.data
def test_the_shipped_pool_is_what_its_rows_give(measured_data: Path) -> None:
    rows = read_all(StepRow, read_table(measured_data / "measured" / "rl_step.csv"))[0]
    for shipped in load_engine_hosts().pools:
        known = [row for row in rows if row.row_id in load_engine_hosts().of_stranger("").engine_host.provenance.rows]
        found = fit_host(known, shipped.engine_host.provenance.date, shipped.without)
        terms = [[getattr(pool, name).value for name in HOST] for pool in (found, shipped)]
        # engines that are fitted anew move one term against the other, and their sum at 64 requests little
        assert terms[0] == pytest.approx(terms[1], rel=0.15)
        assert np.dot(terms[0], (1.0, 64.0)) == pytest.approx(np.dot(terms[1], (1.0, 64.0)), rel=0.03)
        for name in HOST:
            assert getattr(found, name).provenance.rows == getattr(shipped, name).provenance.rows
