"""Grouped expert products of a mixture-of-experts layer on one device."""

from __future__ import annotations

import numpy as np

from rlperf.cost.dtypes import dtype_of
from rlperf.cost.roofline import Array, as_float, gemm_fit, sheet_flop_per_s
from rlperf.layout import FloatArray
from rlperf.specs.calibration import MoeFit
from rlperf.specs.hardware import Hardware


def moe_fit(hw: Hardware, dtype: str, kernel: str | None = None) -> tuple[MoeFit, bool]:
    """Constants of the expert kernel for a dtype, and whether they are a stand-in's."""
    fits = hw.calibration.moe
    for name in (dtype, *dtype_of(dtype).stand_ins):
        same = [fit for fit in fits if fit.dtype == name]
        if same:
            chosen = next((fit for fit in same if fit.kernel == kernel), same[0])
            return chosen, name != dtype and not (dtype == "fp16" and name == "bf16")
    if fits:
        return fits[0], True
    dense, _ = gemm_fit(hw, dtype)
    return (
        MoeFit(
            kernel="grouped",
            dtype=dtype,
            fixed=f"{dense.fixed * 6!r} s",
            compute=dense.compute * 0.8,
            memory=dense.memory,
        ),
        True,
    )


def touched_experts(pairs: Array, experts: Array) -> FloatArray:
    """Expected number of distinct experts that ``pairs`` uniform (token, expert) pairs reach: E (1 - (1 - 1/E)^pairs).

    >>> round(float(touched_experts(8, 128)), 2), float(touched_experts(1e6, 8))
    (7.78, 8.0)
    """
    p, e = as_float(pairs), np.maximum(as_float(experts), 1.0)
    return np.asarray(e * -np.expm1(p * np.log1p(-1.0 / np.maximum(e, 1.0 + 1e-12))))


def grouped_gemm_s(
    hw: Hardware,
    tokens: Array,
    hidden: Array,
    expert_hidden: Array,
    experts: Array,
    active: Array,
    expert_parallel: Array = 1,
    expert_tensor_parallel: Array = 1,
    *,
    dtype: str = "bf16",
    gated: bool = True,
    skew: Array = 1.0,
    kernel: str | None = None,
) -> FloatArray:
    r"""Seconds of all expert products of one layer on the busiest of ``expert_parallel`` devices.

    .. math:: t = t_0 + (t_c^q + t_w^q)^{1/q} + A / (W e_a) + c_p \cdot pairs + c_e \cdot touched

    Parameters
    ----------
    tokens : tokens of the whole expert-parallel group [tokens]
    hidden, expert_hidden : widths of the residual stream and of one expert [1]
    experts, active : number of experts, and of those a token uses [1]
    expert_parallel, expert_tensor_parallel : devices that share the experts; that share each expert [1]
    skew : tokens of the busiest device over the mean [1]

    Notes
    -----
    t_w counts the weights of *touched* local experts only. Constants: `MoeFit`.
    """
    fit, _ = moe_fit(hw, dtype, kernel)
    kind = dtype_of(dtype)
    n, h, e = as_float(tokens), as_float(hidden), as_float(experts)
    width = as_float(expert_hidden) / as_float(expert_tensor_parallel)
    parallel = as_float(expert_parallel)
    pairs = n * as_float(active) / parallel * as_float(skew)
    local = touched_experts(n * as_float(active), e) / parallel
    matrices = 3.0 if gated else 2.0
    bandwidth = hw.device.memory_bandwidth
    compute_s = 2.0 * matrices * pairs * h * width / (sheet_flop_per_s(hw, dtype) * fit.compute)
    weight_s = local * matrices * h * width * kind.weight_bytes / (bandwidth * fit.memory)
    moved = pairs * (2.0 * h + (2.0 * matrices - 1.0) * width) * 2.0
    q = fit.exponent
    longer = np.maximum(np.maximum(compute_s, weight_s), 1e-30)
    joined = longer * (1.0 + (np.minimum(compute_s, weight_s) / longer) ** q) ** (1.0 / q)
    seconds = (
        fit.fixed + joined + moved / (bandwidth * fit.activation_memory) + pairs * fit.per_pair + local * fit.per_expert
    )
    return np.where(n > 0, seconds, 0.0)
