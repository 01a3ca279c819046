"""Timings of the kernels of one layer in an engine, each against the operator that a step of a plan is charged.

Columns: gpu, src, model, tp, layer, unit (tokens or sequences), num, latency_us. An engine's own kernels are held
against `rlperf.cost.operators`; small passes of Hugging Face's code, kernel by kernel, against what an eager trainer is
charged.
"""

from __future__ import annotations

import numpy as np

from rlperf.calibrate.tables import Row, Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.cost.layers import stack_of
from rlperf.cost.operators import token_operators
from rlperf.cost.replica import Replica
from rlperf.cost.roofline import gemm_fit
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import Hardware
from rlperf.specs.trainer_calibration import TrainerCalibration, load_trainer

COLUMNS = ("gpu", "src", "model", "tp", "layer", "unit", "num", "latency_us")
EAGER = "fsdp2"
"""Trainer backend whose layers are Hugging Face's code, kernel by kernel."""

_OPERATORS = {
    "qkv_proj": "qkv",
    "o_proj": "output",
    "gate_up_proj": "ffn",
    "down_proj": "ffn",
    "lm_head": "head",
    "layernorm": "norm",
    "input_layernorm": "norm",
    "final_layernorm": "norm",
    "rope": "rope",
    "rotary_emb": "rope",
    "qk_norm": "rope",
    "act_fn": "activation",
    "sampler": "sampling",
}
_PRODUCTS = ("qkv", "output", "ffn", "head")
_PASSES = ("norm", "rope", "activation")
NO_EMBEDDING = "an engine_step is charged no embedding: a kernel of a few us once a step, among what the host takes"


def outcome(table: Table) -> Outcome:
    """All rows of a table."""
    return each_row(table, lambda row: [figure(row)])


def figure(row: Row) -> PredictedFigure:
    """Microseconds of one kernel, or of the kernels of one small operator."""
    layer, eager = row.text("layer"), "eager" in row.text("src")
    if layer == "embedding":
        raise SpecError(NO_EMBEDDING)
    if layer not in _OPERATORS:
        raise SpecError(f"layer {layer!r} is no operator that rlperf knows; known: {', '.join(_OPERATORS)}")
    name, hw, arch = _OPERATORS[layer], row.hardware(), row.architecture("model")
    if name == "activation" and arch.experts is not None:
        raise SpecError("the activation of routed experts is part of their kernel")
    seconds = _step_s(row, hw, arch, name)
    if eager and name in _PASSES:
        seconds = _eagerly(hw, load_trainer(EAGER), seconds)
    spread = (gemm_fit(hw, "bf16")[0] if name in _PRODUCTS else hw.calibration.stream).quality.spread
    group = f"{layer}, {'eager' if eager else 'engine'}"
    return PredictedFigure.of_kernel(row, hw, seconds, spread, group=group, stratum=f"{name}, {hw.device.name}")


def _step_s(row: Row, hw: Hardware, arch: Architecture, name: str) -> float:
    """Seconds of one operator of one layer in an engine_step of so many tokens, all of which are sampled."""
    number, tensor = float(row.count("num")), row.count("tp")
    replica = Replica.of(arch, hw, load_engine_calibration("vllm"), Layout.of(tensor_parallel=tensor))
    found = [each for each in token_operators(replica, number, number) if each.name == name]
    if name == "ffn":
        found = [found[0 if row.text("layer") == "gate_up_proj" else 1]]
    stack = stack_of(arch)
    times = {"norm": stack.norms, "head": 1, "sampling": 1, "rope": arch.layers * (2 if arch.qk_norm else 1)}
    total = sum((each.seconds for each in found), np.zeros(()))
    return float(np.asarray(total).reshape(-1)[0]) / times.get(name, arch.layers)


def _eagerly(hw: Hardware, trainer: TrainerCalibration, seconds: float) -> float:
    """The same bytes as often as an eager trainer is taken to move them."""
    fit, timing = hw.calibration.stream, trainer.timing
    return fit.small_fixed + (seconds - fit.small_fixed) * timing.elementwise * timing.eager
