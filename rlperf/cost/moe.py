"""Grouped expert products of a mixture-of-experts layer on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.cost.dtypes import dtype_of
from rlperf.cost.roofline import Array, as_float, gemm_fit, joined, sheet_peak, still_in_l2
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.calibration import MoeFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware

WIDE = 512
"""Experts beyond which engines choose with kernels of another kind, which take the largest scores one by one."""


def moe_fit(hw: Hardware, dtype: str, kernels: Sequence[str] = ()) -> tuple[MoeFit, bool]:
    """Constants of the expert kernel for a dtype, and whether they are a stand-in's.

    ``kernels`` are preferred in their order (``dtype:kernel`` counts for that dtype only); without one of them, the
    first fitted kernel of the dtype serves.
    """
    fits = hw.calibration.moe
    for name in (dtype, *dtype_of(dtype).stand_ins):
        same = [fit for fit in fits if fit.dtype == name]
        if same:
            wanted = [(fit.kernel, f"{dtype}:{fit.kernel}", f"{name}:{fit.kernel}") for fit in same]
            named = [fit for kernel in kernels for fit, names in zip(same, wanted, strict=True) if kernel in names]
            return (named or same)[0], name != dtype and not (dtype == "fp16" and name == "bf16")
    if fits:
        return fits[0], True
    dense, _ = gemm_fit(hw, dtype)
    grouped = MoeFit.model_construct(
        kernel="dense", dtype=dtype, fixed=dense.fixed, compute=dense.compute, memory=dense.memory,
        activation_memory=dense.memory,
    )  # fmt: skip
    return grouped, True


def touched_experts(pairs: Array, experts: Array) -> FloatArray:
    """Distinct experts that ``pairs`` uniform (token, expert) pairs reach, expected [1]: E (1 - (1 - 1/E)^pairs).

    >>> round(float(touched_experts(8, 128)), 2), float(touched_experts(1e6, 8))
    (7.78, 8.0)
    """
    p, e = as_float(pairs), np.maximum(as_float(experts), 1.0)
    return np.asarray(e * -np.expm1(p * np.log1p(-1.0 / np.maximum(e, 1.0 + 1e-12))))


POPULARITY = 2.0
"""Shape of the gamma law of how often experts are chosen, the same text after text (mean 1, variance 1/2); from kernels
timed under power-law routing, which touch 0.93 of the experts of uniform routing (median of 75 fits)."""


def popular_experts(tokens: Array, active: Array, experts: Array, shape: float = POPULARITY) -> FloatArray:
    r"""Expected number of distinct experts that tokens reach where some are chosen more often than others [1].

    .. math::

        E_t = E\left[1 - \left(1 + \frac{N y}{k}\right)^{-k}\right],\quad
        \left(1 + \frac{y}{k}\right)^{-k} = 1 - \frac{a}{E}

    Parameters
    ----------
    tokens : N [tokens]
    active : a, experts of a token, no two the same [1]
    experts : E [1]
    shape : k, of the gamma law of an expert's popularity (mean 1, variance 1/k); infinity is uniform routing

    Notes
    -----
    An expert of popularity g is passed by with exp(-N y g), which a gamma law of mean 1 averages to the power above. y
    makes one token reach exactly a.

    >>> [round(float(popular_experts(n, 4, 128)), 1) for n in (1, 8, 64, 8192)]
    [4.0, 27.4, 96.8, 128.0]
    >>> round(float(popular_experts(64, 4, 128, 1e6)), 1), round(float(popular_experts(5, 1, 1)), 6)
    (111.2, 1.0)
    """
    n, a, e = as_float(tokens), as_float(active), np.maximum(as_float(experts), 1.0)
    missed = np.maximum(1.0 - a / e, 1e-12) ** (-1.0 / shape) - 1.0
    return np.asarray(e * (1.0 - (1.0 + n * missed) ** -shape))


def busiest(pairs: Array, devices: Array) -> FloatArray:
    r"""(Token, expert) pairs of the busiest device over the mean, routed at random: :math:`1 + \sqrt{2 \ln d / n}`.

    ``pairs`` are n, the mean of a device, ``devices`` d. Everyone waits for the busiest: of 8 devices with 40 pairs
    each, one has 53. Largest of d counts of mean and variance n (leading term of normal extremes), at most all pairs.

    >>> [round(float(busiest(n, 8)), 2) for n in (5, 40, 4000)], float(busiest(40, 1))
    ([1.91, 1.32, 1.03], 1.0)
    """
    n, d = np.maximum(as_float(pairs), 1e-9), np.maximum(as_float(devices), 1.0)
    return np.asarray(np.minimum(1.0 + np.sqrt(2.0 * np.log(d) / n), d))


@dataclass(frozen=True)
class ExpertShape:
    """Routed experts of one layer; every number broadcasts.

    Attributes
    ----------
    width : of a token on its way to an expert and back [1]
    hidden : width of one expert [1]
    count, active : experts, and those that a token uses [1]
    matrices : of one expert: 3 with a gate, 2 without
    """

    width: Array
    hidden: Array
    count: Array
    active: Array
    matrices: int = 3


@dataclass(frozen=True)
class Dealt:
    """How (token, expert) pairs come to the devices.

    Attributes
    ----------
    skew : pairs of the busiest device over the mean [1]
    touched_share : touched experts over those that uniform routing touches [1]
    dispatched : an all-to-all brings each device its own tokens, so that it handles N / expert_parallel of them
    balanced : pairs are dealt out evenly, as benchmarks do, so that min(E, pairs) experts are touched
    arranged : tokens lie in the order of their experts already, in the dtype of the products; what inference kernels
        spend to bring them there and back (c_p, c_n) is not asked
    """

    skew: Array = 1.0
    touched_share: Array = 1.0
    dispatched: bool | BoolArray = False
    balanced: bool = False
    arranged: bool = False


EVENLY = Dealt()


def grouped_with(
    device: Device,
    fit: MoeFit,
    tokens: Array,
    experts: ExpertShape,
    expert_parallel: Array,
    expert_tensor_parallel: Array = 1,
    *,
    dtype: str = "bf16",
    dealt: Dealt = EVENLY,
    cached: bool = False,
) -> FloatArray:
    r"""Seconds of all expert products of one layer on the busiest of ``expert_parallel`` devices, given constants.

    .. math::

        t = t_0 + (t_c^q + t_w^q)^{1/q} + \frac{A}{W e_a} + \frac{N H c_n}{W}
            + c_p\,n + c_e\,E_t + c_h\,\frac{E}{e_p} + c_s \log_2(1 + N) + [E > 512]\,c_w,\quad
        t_c = \frac{6 n H w}{P e_c},\quad t_w = \frac{3 E_t H w\,b_w}{W e_m},\quad A = 2n(2H + 5w)

    Parameters
    ----------
    tokens : N, tokens of the whole expert-parallel group [tokens]; n = N x active / expert_parallel x skew
    experts : H its width, w its hidden over expert_tensor_parallel, E its count
    expert_parallel, expert_tensor_parallel : devices that share the experts; that share each expert [1]
    dealt : which device handles which tokens
    cached : weights stand in L2 from the last call, as in kernel benchmarks; in an engine they never do

    Notes
    -----
    c_n is the traffic of every token on every device that has gathered it, whatever its share of the experts:
    activations are quantised and permuted before, and results combined after [bytes per token and unit of H].
    c_h is what a kernel spends on every expert that the device holds, touched or not: grouped products with block
    scales go through the offsets of all groups. c_s is of kernels that route for themselves: they choose, count and
    sort their tokens; c_w, where more than `WIDE` experts are chosen from (how it grows with the tokens, 34 timings of
    one layer do not tell: 0 to 10 us a doubling fit alike).
    t_w counts the weights of *touched* local experts E_t only: E/ep (1 - (1 - ep/E)^n). 6 and 3, 5 become 4 and 2, 3
    without a gate.
    """
    kind = dtype_of(dtype)
    n, h, e = as_float(tokens), as_float(experts.width), as_float(experts.count)
    width = as_float(experts.hidden) / as_float(expert_tensor_parallel)
    parallel = as_float(expert_parallel)
    pairs = n * as_float(experts.active) / parallel * as_float(dealt.skew)
    routed = n * as_float(experts.active)
    local = np.minimum(e, routed) / parallel if dealt.balanced else touched_experts(pairs, e / parallel)
    local = np.maximum(local, np.minimum(1.0, e)) * as_float(dealt.touched_share)
    matrices = float(experts.matrices)
    bandwidth, own = device.memory_bandwidth, np.where(dealt.dispatched, n / parallel, n)
    compute_s = 2.0 * matrices * pairs * h * width / (sheet_peak(device, dtype) * fit.compute)
    weights = local * matrices * h * width * kind.weight_bytes
    weight_s = weights / (bandwidth * fit.memory)
    if cached:
        weight_s = still_in_l2(device, weight_s, weights, fit.cached)
    moved = pairs * (2.0 * h + (2.0 * matrices - 1.0) * width) * 2.0
    seconds = fit.fixed + joined(compute_s, weight_s, fit.exponent) + moved / (bandwidth * fit.activation_memory)
    brought = own * h * fit.token_bytes / bandwidth + np.log2(1.0 + own) * fit.per_doubling + pairs * fit.per_pair
    brought = brought + np.where(e > WIDE, fit.wide_choice, 0.0)
    seconds = seconds + local * fit.per_expert + e / parallel * fit.per_held_expert
    return np.where(n > 0, seconds if dealt.arranged else seconds + brought, 0.0)


def grouped_gemm_s(
    hw: Hardware,
    tokens: Array,
    experts: ExpertShape,
    expert_parallel: Array = 1,
    expert_tensor_parallel: Array = 1,
    *,
    dtype: str = "bf16",
    dealt: Dealt = EVENLY,
) -> FloatArray:
    """Seconds of the expert products of one layer with the device's constants: see `grouped_with`."""
    fit, _ = moe_fit(hw, dtype)
    return grouped_with(
        hw.device, fit, tokens, experts, expert_parallel, expert_tensor_parallel, dtype=dtype, dealt=dealt
    )
