"""Eager engines: the host issues kernel by kernel while the device works; an engine_step takes the longer."""

from __future__ import annotations

import numpy as np
import pytest

from rlperf.cost.inference import decode_breakdown, decode_step_s, eager_s, engine_step_cost, prefill_s
from rlperf.cost.replica import Replica
from rlperf.layout import Layout
from rlperf.specs.engine_calibration import EngineCalibration, load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture

H100 = load_hardware("h100_sxm")
DENSE, LATENT = load_architecture("Llama-3.1-8B"), load_architecture("DeepSeek-V3")


def engine(graphs: bool) -> EngineCalibration:
    return load_engine_calibration("vllm").model_copy(update={"cuda_graphs": graphs})


def test_turning_graphs_off_costs_an_8b_what_was_measured() -> None:
    # cost-model notes: 8.4 ms eager against 5.1 ms with CUDA graphs, one request
    layout = Layout.of(tensor_parallel=1)
    eager, captured = (
        float(decode_step_s(Replica.of(DENSE, H100, engine(graphs), layout), 1.0, 512.0)) for graphs in (False, True)
    )
    assert eager - captured == pytest.approx(8.4e-3 - 5.1e-3, rel=0.1)


def test_a_busy_device_hides_the_host() -> None:
    layout = Layout.of(tensor_parallel=1)
    few, many = (
        [float(prefill_s(Replica.of(DENSE, H100, engine(g), layout), 1.0, tokens)) for g in (True, False)]
        for tokens in (16.0, 8e3)
    )
    assert few[1] > few[0]
    assert many[1] == pytest.approx(many[0], rel=1e-12)


def test_latent_attention_and_experts_take_more_calls_per_layer() -> None:
    assert eager_s(engine(True), LATENT) == 0.0
    dense, latent = (eager_s(engine(False), arch) / arch.layers for arch in (DENSE, LATENT))
    assert dense == pytest.approx(12 * 25e-6)
    assert latent == pytest.approx(25e-6 * (12 * 61 + 7 * 61 + 17 * 58) / 61)


@pytest.mark.parametrize("running", [1.0, 8.0, 64.0])
def test_the_table_of_the_simulator_agrees_and_the_breakdown_adds_up(running: float) -> None:
    layout, eager = Layout.of(tensor_parallel=8, expert_tensor_parallel=8), engine(False)
    hw = load_hardware("h200_sxm")
    exact = float(decode_step_s(Replica.of(LATENT, hw, eager, layout, "fp8"), running, running * 1024.0))
    table = engine_step_cost(Replica.of(LATENT, hw, eager, layout, "fp8"), typical_context=1024.0)
    assert float(table.decode_s(running, running * 1024.0)) == pytest.approx(exact, rel=0.1)
    lines = decode_breakdown(Replica.of(LATENT, hw, eager, layout, "fp8"), running, running * 1024.0)
    assert np.sum([line.seconds for line in lines]) == pytest.approx(exact, rel=1e-9)
