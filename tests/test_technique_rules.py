"""What must hold of techniques whatever the model, device and load: each rule on drawn cases."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlperf.cost.engine_memory import engine_memory
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.replica import Replica
from rlperf.cost.speculation import speculating
from rlperf.layout import Layout
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.speculation import DraftSetting
from rlperf.specs.speculation_calibration import Yield, load_speculation

MODELS = ("Qwen3-8B", "MiMo-7B-RL", "Qwen3-30B-A3B", "DeepSeek-V3")
DEVICES = ("h100_sxm", "h20_sxm", "b200_sxm", "a100_80g_sxm")
ENGINES = ("vllm", "sglang")

models, devices, engines = (st.sampled_from(names) for names in (MODELS, DEVICES, ENGINES))
drafts = st.integers(1, 8)
running, context = st.integers(1, 1500), st.integers(0, 30_000)
shares = st.floats(0.0, 1.0)


EIGHT = Layout.of(tensor_parallel=8)


@cache
def plain(model: str, device: str, engine: str) -> EngineStepCost:
    return engine_step_cost(
        Replica.of(load_architecture(model), load_hardware(device), load_engine_calibration(engine), EIGHT)
    )


@cache
def replica(model: str, device: str, engine: str) -> Replica:
    return Replica.of(load_architecture(model), load_hardware(device), load_engine_calibration(engine), EIGHT)


def drafted(model: str, device: str, engine: str, low: int, high: int, acceptance: float) -> EngineStepCost:
    wanted = DraftSetting("eagle3", low, high)
    yields = load_speculation().tokens(wanted, acceptance)
    return speculating(plain(model, device, engine), replica(model, device, engine), wanted, yields)


def seconds(cost: EngineStepCost, b: int, tokens: int) -> float:
    return float(cost.decode_s(float(b), float(b) * tokens))


@settings(max_examples=40, deadline=None)
@given(models, devices, engines, drafts, running, context, shares, shares)
def test_more_acceptance_is_never_slower(
    model: str, device: str, engine: str, k: int, b: int, tokens: int, one: float, other: float
) -> None:
    few, many = sorted((one, other))
    slow, fast = (drafted(model, device, engine, k, k, share) for share in (few, many))
    assert seconds(fast, b, tokens) <= seconds(slow, b, tokens) * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(models, devices, engines, drafts, running, context)
def test_no_draft_is_none_and_a_number_that_may_be_none_is_never_slower(
    model: str, device: str, engine: str, k: int, b: int, tokens: int
) -> None:
    """The latter at the context at which a number that switches is chosen."""
    none, free = plain(model, device, engine), drafted(model, device, engine, 0, k, 0.7)
    table = free.drafted
    assert table is not None
    zero = replace(free, drafted=replace(table, drafts=np.zeros_like(table.drafts)))
    assert seconds(zero, b, tokens) == pytest.approx(seconds(none, b, tokens), rel=1e-9)
    assert seconds(free, b, 4096) <= seconds(none, b, 4096) * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(models, devices, engines, drafts, running, context, shares)
def test_drafts_that_nobody_computes_are_never_slower_than_those_of_a_head(
    model: str, device: str, engine: str, k: int, b: int, tokens: int, share: float
) -> None:
    certain = Yield(tuple(1.0 + share * drafts for drafts in range(k + 1)), 0.0)
    free, head = (
        speculating(plain(model, device, engine), replica(model, device, engine), DraftSetting(method, k, k), certain)
        for method in ("ngram", "eagle3")
    )
    assert seconds(free, b, tokens) <= seconds(head, b, tokens) * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(drafts, st.booleans())
def test_a_trained_head_yields_at_least_what_a_frozen_one_does(k: int, far: bool) -> None:
    known = load_speculation()
    for method in ("mtp", "eagle3"):
        wanted = DraftSetting(method, k, k)
        frozen, trained = (known.tokens(wanted, None, trained, far).tokens for trained in (False, True))
        assert all(a <= b for a, b in zip(frozen, trained, strict=True))
        assert all(1.0 <= tokens <= depth + 1.0 for depth, tokens in enumerate(trained))


@settings(max_examples=40, deadline=None)
@given(models, devices, st.sampled_from((1, 2, 4, 8)), st.floats(0.3, 0.95), st.sampled_from(("bf16", "fp8")))
def test_narrow_weights_and_caches_never_need_more_memory(
    model: str, device: str, tensor: int, fraction: float, kv: str
) -> None:
    """fp8 weights and an fp8 cache never need more memory than bf16 ones, and never leave room for fewer tokens."""
    hw, engine, layout = load_hardware(device), load_engine_calibration("vllm"), Layout.of(tensor_parallel=tensor)
    architecture = load_architecture(model)

    def held(gemm: str, cache_dtype: str) -> tuple[float, float]:
        found = engine_memory(Replica.of(architecture, hw, engine, layout, gemm, cache_dtype), memory_fraction=fraction)
        return float(found.weights_bytes), float(found.kv_tokens)

    (wide, few), (narrow, many), (_, most) = held("bf16", kv), held("fp8", kv), held("fp8", "fp8")
    assert narrow <= wide and few <= many <= most
    assert narrow < wide  # every model here has products that fp8 narrows
