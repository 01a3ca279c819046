"""Intervals of serving predictions: residuals of left-out rows, wider where no measurement stands behind a part."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlperf.cost.dtypes import dtype_of
from rlperf.cost.layers import stack_of
from rlperf.cost.moe import moe_fit
from rlperf.cost.replica import NATIVE_MXFP4, roles_of
from rlperf.specs.architecture import Architecture
from rlperf.specs.calibration import Z95, Spread
from rlperf.specs.engine_calibration import EngineCalibration
from rlperf.specs.hardware import Hardware

WEIGHT_ONLY = frozenset({"mxfp4", "int4_wo", "int8_wo"})
"""Weight formats of which kernel tables hold experts at most."""
CALIBRATED_CONTEXT = 131072.0
"""Longest context of the decode tables [tokens]."""
CALIBRATED_PROMPT = 16384.0
"""Longest prompt of the prefill tables [tokens]."""
CALIBRATED_REQUESTS = 1024.0
"""Largest batch of the decode tables [requests]."""
UNTIMED = 2.3
"""Up to how many times as long where constants of a layer are judged (judged); beside what all rows are off by."""
ASSUMED = 1.5
"""The same for an architecture whose reader had to assume something (judged)."""


@dataclass(frozen=True)
class ServedLoad:
    """What an interval depends on beside architecture, device and engine.

    Attributes
    ----------
    context, prompt, running : largest [tokens, tokens, 1]; beyond the calibrated range the interval is wider by a
        tenth in the logarithm for every factor of two
    experts_apart : experts are spread over devices
    closed_loop : as many requests, of several clients, are in flight all the time: most of what engines were fitted to
    throughput : the figure is tokens per second of a load whose batch nobody states
    """

    context: float = 0.0
    prompt: float = 0.0
    running: float = 0.0
    experts_apart: bool = False
    closed_loop: bool = True
    throughput: bool = False

    @property
    def beyond(self) -> dict[str, tuple[float, float]]:
        """What lies beyond the calibrated range, with its limit."""
        found = {
            "context": (self.context, CALIBRATED_CONTEXT),
            "prompt": (self.prompt, CALIBRATED_PROMPT),
            "batch": (self.running, CALIBRATED_REQUESTS),
        }
        return {name: (value, limit) for name, (value, limit) in found.items() if value > limit}


PLAIN = ServedLoad()


@dataclass(frozen=True)
class Basis:
    """What a serving prediction rests on.

    Attributes
    ----------
    calibration : ids of the constants
    extrapolated : some operator has no measured table of its own
    reasons : which, in words
    spread : measured over predicted, 5th and 95th percentile
    """

    calibration: str
    extrapolated: bool
    reasons: tuple[str, ...]
    spread: Spread


def borrowed_weights(arch: Architecture, hw: Hardware, engine: EngineCalibration, gemm_dtype: str) -> str:
    """Why products of weight-only formats are not measured; empty where those of experts are, and no others occur."""
    roles = roles_of(arch, hw, gemm_dtype, engine.moe_kernels)
    if arch.experts is None or dtype_of(roles.projection).weights_alone:
        return f"{gemm_dtype} products have no kernel table"
    fit, stand_in = moe_fit(hw, roles.expert, engine.moe_kernels)
    if stand_in or fit.dtype not in own_dtypes(gemm_dtype):
        return f"{gemm_dtype} experts have no kernel table"
    return f"{gemm_dtype} experts were timed on {fit.timed_on}" if fit.timed_on else ""


def own_dtypes(gemm_dtype: str) -> tuple[str, ...]:
    """Dtypes that kernels of a weight format run in.

    >>> own_dtypes("mxfp4")
    ('mxfp4', 'w4a4_mxfp4', 'w4a8_mxfp4')
    """
    return (gemm_dtype, *NATIVE_MXFP4) if gemm_dtype == "mxfp4" else (gemm_dtype,)


def serving_basis(
    arch: Architecture, hw: Hardware, engine: EngineCalibration, load: ServedLoad = PLAIN, *, gemm_dtype: str = "bf16"
) -> Basis:
    """What stands behind predictions for an architecture on a device with an engine."""
    halves = stack_of(arch).halves
    reasons = list(dict.fromkeys(lack for half in halves if (lack := half.layer.lacks(hw, engine))))
    reasons += arch.assumed
    untimed = any(half.layer.untimed_on(hw) for half in halves)
    if untimed:
        reasons.append(f"kernels of its attention were timed neither on {hw.device.name} nor on a relative")
    if gemm_dtype in WEIGHT_ONLY and (reason := borrowed_weights(arch, hw, engine, gemm_dtype)):
        reasons.append(reason)
    if hw.calibration.told:
        reasons.append(f"kernels of {hw.calibration.extrapolated_from or hw.device.name} are told from served rows")
    if hw.calibration.extrapolated:
        reasons.append(hw.calibration.standing)
    spread = _spread(arch, hw, engine, load, bool(reasons))
    if arch.assumed:
        spread = spread.widened(ASSUMED)
    if untimed:
        spread = spread.beside(math.log(UNTIMED) / Z95)
    if beyond := load.beyond:
        reasons += [
            f"{name} of {value:g} is beyond the calibrated {limit:g}" for name, (value, limit) in beyond.items()
        ]
        spread = spread.widened(1.0 + 0.1 * math.log2(max(value / limit for value, limit in beyond.values())))
    names = f"{hw.calibration.id}, {engine.id}"
    return Basis(names, bool(reasons), tuple(reasons), spread)


def _spread(
    arch: Architecture, hw: Hardware, engine: EngineCalibration, load: ServedLoad, extrapolated: bool
) -> Spread:
    """Measured over predicted where nothing is assumed and nothing beyond the calibrated range."""
    served = engine.spread_served
    spread = engine.spread_extrapolated if extrapolated else engine.overhead.quality.spread
    if load.throughput:
        spread = engine.spread_throughput
    elif served is not None:
        spread = served.of(load.experts_apart, load.closed_loop, extrapolated)
    if served is not None and engine.strange(hw.device.name, arch.family):
        # how far groups differ and what a row misses in its group are independent
        more = served.stranger_throughput if load.throughput else served.stranger
        return spread.beside(more / Z95)
    return spread.widened(1.5) if hw.calibration.extrapolated and not engine.factors else spread
