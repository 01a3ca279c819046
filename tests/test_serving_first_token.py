"""Time to first token of served requests: closed form against events, the way to the engine, limits by device."""

from __future__ import annotations

import numpy as np
import pytest

from rlperf.cost import serving
from rlperf.cost.engine_memory import engine_limits
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.cost.inference import engine_step_cost
from rlperf.layout import Layout
from rlperf.sim.rollout import EngineOptions, Trajectories, simulate_replica
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture

H100 = load_hardware("h100_sxm")
LLAMA = load_architecture("Llama-3.1-8B")
VLLM = load_engine_calibration("vllm")


def arrivals(rate: float, n: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(3).exponential(1.0 / rate, n))


def by_events(cost: EngineStepCost, rate: float, isl: int, osl: int, chunked: bool, look_ahead: bool) -> float:
    """Mean time to first token of random arrivals, event by event, without the ends of the run."""
    n = 16000  # of 4000, the mean still differs by 1.3 % between seeds
    requests = Trajectories.of(np.full(n, isl), np.full(n, osl), arrival_s=arrivals(rate, n))
    limits = EngineLimits(kv_tokens=np.inf, max_running=1024, chunked_prefill=chunked, prefix_caching=False)
    options = EngineOptions(async_scheduling=look_ahead)
    line = simulate_replica(requests, cost, limits, options=options)
    return float((line.first_token_s - requests.arrival_s)[200:-200].mean())


@pytest.mark.parametrize(("chunked", "look_ahead"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize(
    ("rate", "isl", "osl", "within"),
    [
        (1.0, 500, 250, 0.02),
        (20.0, 200, 200, 0.02),
        (6.0, 2000, 300, 0.05),
        (20.0, 500, 2, 0.03),
        (40.0, 500, 40, 0.12),
    ],
)
def test_first_tokens_of_random_arrivals_are_those_of_events(
    rate: float, isl: int, osl: int, within: float, chunked: bool, look_ahead: bool
) -> None:
    cost = engine_step_cost(LLAMA, H100, VLLM, Layout.of(), typical_context=isl + osl / 2)
    closed = serving.open_loop(cost, rate, isl, osl, chunked=chunked, look_ahead=look_ahead)
    events = by_events(cost, rate, isl, osl, chunked, look_ahead)
    assert float(closed.ttft_s) == pytest.approx(events, rel=within)


def test_first_token_by_hand() -> None:
    # decodes of 10 ms, prompts that add 10 ms each, 20 a second: rho 0.2, steps of 12.5 ms with a variance of 25 / 0.96
    step = EngineStepCost(tokens=np.array([0.0, 1e4]), linear_s=np.zeros(2), host_s=0.01, prefill_per_request_s=0.01)
    served = serving.open_loop(step, 20.0, 10, 20000, max_running=1e9, sent=1e9)
    square = 12.5 + 20e-3 * 100.0 / 0.96
    assert float(served.ttft_s) * 1e3 == pytest.approx(square / 2 + 10.0 + 10.0 + 0.2 * square, rel=1e-6)


def test_prefill_first_makes_the_first_token_earlier_and_the_others_later() -> None:
    cost = engine_step_cost(LLAMA, H100, VLLM, Layout.of(), typical_context=2000)
    mixed, first = (serving.open_loop(cost, 6.0, 2000, 300, chunked=chunked) for chunked in (True, False))
    assert float(first.ttft_s) < float(mixed.ttft_s) and float(first.tpot_s) > float(mixed.tpot_s)


def test_the_front_end_delays_the_first_token_alone() -> None:
    cost = engine_step_cost(LLAMA, H100, VLLM, Layout.of(), typical_context=600)
    inside = serving.open_loop(cost, 4.0, 500, 200)
    outside = inside.behind(0.005)
    assert float(outside.ttft_s - inside.ttft_s) == pytest.approx(0.005)
    assert (outside.tpot_s, outside.output_tokens_per_s) == (inside.tpot_s, inside.output_tokens_per_s)


def test_engines_set_themselves_smaller_limits_on_small_devices() -> None:
    found = {}
    for name in ("h100_sxm", "a100_80g_sxm", "l40s"):
        limits = engine_limits(LLAMA, load_hardware(name), VLLM, Layout.of())
        found[name] = (limits.token_budget, limits.max_running)
    assert found == {"h100_sxm": (8192, 1024), "a100_80g_sxm": (2048, 256), "l40s": (2048, 256)}


def test_loads_near_and_beyond_capacity_are_at_rest() -> None:
    # 10 steps of 1 ms and 0.1 ms a request: c = 10 r / (1000 - r) requests are in flight, and beyond 1000 a second all
    step = EngineStepCost(tokens=np.array([0.0, 1e4]), linear_s=np.zeros(2), host_s=1e-3, decode_per_request_s=1e-4)
    near, beyond, far = (
        serving.open_loop(step, rate, 10, 11, max_running=1e4, sent=4000.0) for rate in (980.0, 1020.0, 3000.0)
    )
    assert float(near.running) == pytest.approx(490.0, rel=0.01)
    assert float(beyond.tpot_s) == pytest.approx(float(far.tpot_s), rel=1e-6)
