"""One replica of a serving engine, and one operator of its engine_step: what layer kinds read and hand back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.cost.collectives import scale_up_bytes_per_s
from rlperf.cost.dtypes import dtype_of
from rlperf.cost.network import network_bytes_per_s
from rlperf.cost.roofline import Array, as_float, gemm_fit, gemm_known, sheet_flop_per_s, small_op_s
from rlperf.layout import FloatArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.calibration import GemmFit, MoeFit
from rlperf.specs.engine_calibration import EngineCalibration, has_reached
from rlperf.specs.hardware import Hardware, capability


@dataclass(frozen=True)
class Operator:
    """One operator of an engine_step, all layers together.

    Attributes
    ----------
    seconds : predicted [s]
    compute_s, memory_s, network_s : at the rates of the data sheet [s]; the largest is the speed of light
    """

    name: str
    seconds: FloatArray
    compute_s: FloatArray
    memory_s: FloatArray
    network_s: FloatArray

    def times(self, factor: Array) -> Operator:
        """The same so many times; 0 where it is not run."""
        n = as_float(factor)
        return Operator(self.name, n * self.seconds, n * self.compute_s, n * self.memory_s, n * self.network_s)


@dataclass(frozen=True)
class Roles:
    """Dtype of each kind of weights: checkpoints quantise some and leave others. ``output``: of the attention."""

    projection: str
    dense: str
    expert: str
    output: str
    head: str = "bf16"

    def of(self, weights: str, product: str) -> str:
        """Dtype of one ``product`` of a layer whose matrices are ``weights``.

        >>> roles = Roles(projection="bf16", dense="bf16", expert="nvfp4", output="nvfp4")
        >>> roles.of("projection", "output"), roles.of("projection", "qkv")
        ('nvfp4', 'bf16')
        """
        return self.output if product == "output" else str(getattr(self, weights))


BLOCK_SCALED = frozenset({"glm_moe_dsa", "qwen3_5_moe", "qwen3_next", "step3p7"})
"""Families whose publisher's fp8 checkpoints have block scales (128 x 128), besides those trained in fp8."""
KEEPS_FP8 = frozenset({"deepseek_v4"})
"""Families whose four-bit checkpoints hold all but the routed experts in fp8 with block scales: published so
(``expert_dtype``, ``weight_block_size`` of DeepSeek-V4-Pro), and left so by NVIDIA's nvfp4 (``*.attn.*`` excluded)."""
QUANTISED_BESIDE = {
    "deepseek_v3": ("dense", "output"),
    "deepseek_v32": ("dense", "output"),
    "kimi_k2": ("dense",),
}
"""What NVIDIA's nvfp4 checkpoints hold in nvfp4 beside the routed experts: dense and shared experts, and of attention
the output projection, as their lists of excluded modules say (DeepSeek-V3.2, whose layers V3's and R1's are;
Kimi-K2.5). GLM-5.2's and Gemma 4's exclude all of it."""


def roles_of(arch: Architecture, hw: Hardware, gemm_dtype: str, kernels: Sequence[str] = ()) -> Roles:
    """Which weights a checkpoint of ``gemm_dtype`` quantises; ``kernels`` are those of the engine's experts.

    fp8 and weight-only int8 quantise every product but the head. Four-bit checkpoints of mixtures of experts quantise
    the experts alone (attention and dense layers stay bf16) unless `KEEPS_FP8` or `QUANTISED_BESIDE` says more; those
    of dense models every product but the head. mxfp4 runs on native four-bit units where the device has them
    (`native_mxfp4`), else its weights are widened to bf16 on the fly.
    """
    if gemm_dtype == "mxfp4" and arch.experts is None:
        gemm_dtype = native_mxfp4(hw, hw.calibration.gemm)
    expert = gemm_dtype
    if gemm_dtype == "fp8" and (arch.checkpoint_dtype == "fp8" or arch.family in BLOCK_SCALED):
        expert = gemm_dtype = "fp8_block"
    if gemm_dtype == "mxfp4":
        expert = native_mxfp4(hw, hw.calibration.moe, kernels)
    rest = gemm_dtype
    if gemm_dtype in ("nvfp4", "mxfp4", "int4_wo") and arch.experts is not None:
        rest = "fp8_block" if arch.family in KEEPS_FP8 and gemm_dtype != "int4_wo" else "bf16"
    beside = QUANTISED_BESIDE.get(arch.family, ()) if gemm_dtype == "nvfp4" else ()
    dense, output = (expert if name in beside else rest for name in ("dense", "output"))
    return Roles(projection=rest, dense=dense, expert=expert, output=output)


NATIVE_MXFP4 = ("w4a4_mxfp4", "w4a8_mxfp4")
"""What mxfp4 weights are multiplied with on four-bit units: activations in mxfp4 (AMD) or mxfp8 (NVIDIA)."""


def native_mxfp4(hw: Hardware, fits: Sequence[GemmFit | MoeFit], kernels: Sequence[str] = ()) -> str:
    """The dtype that products of mxfp4 weights run in: that of the kernels known, else NVIDIA's four bits.

    Of ``kernels``, named as in `rlperf.cost.moe.moe_fit`, the first that the device was timed with decides: units for
    four bits serve no engine that has no kernel for them there (Marlin widens mxfp4 on RTX PRO 6000, for vLLM and
    SGLang; TensorRT-LLM's CUTLASS does not).
    """
    if hw.device.peaks.fp4 is None:
        return "mxfp4"
    timed = {(fit.kernel, fit.dtype) for fit in fits}
    run = (dtype for name in kernels for dtype in (*NATIVE_MXFP4, "mxfp4")
           if (name.removeprefix(f"{dtype}:"), dtype) in timed)  # fmt: skip
    other = (fit.dtype for fit in fits if fit.dtype in NATIVE_MXFP4)
    return next(run, next(other, "nvfp4"))


@dataclass(frozen=True)
class Replica:
    """One replica of an engine: everything that stays while batches change. Degrees are float64 arrays.

    ``tensor_parallel`` are the devices of a stage; ``attention_data_parallel`` of them hold copies of the attention
    layers, so that attention is split over tensor_parallel / attention_data_parallel devices. Of a pipeline's stages as
    many work at once as there are ``batches`` of its requests (`batches_in_flight`).
    """

    arch: Architecture
    hw: Hardware
    engine: EngineCalibration
    roles: Roles
    kv_dtype: str
    tensor: FloatArray
    pipeline: FloatArray
    expert: FloatArray
    attention_data: FloatArray
    batches: FloatArray

    @classmethod
    def of(
        cls,
        arch: Architecture,
        hw: Hardware,
        engine: EngineCalibration,
        layout: Layout,
        gemm_dtype: str = "bf16",
        kv_dtype: str = "bf16",
        batches: FloatArray | None = None,
    ) -> Replica:
        """From a layout of any shape; ``batches`` in flight in its pipeline: one a stage unless stated."""
        tensor = as_float(layout.tensor_parallel)
        expert = np.minimum(as_float(layout.expert_parallel), tensor) if arch.experts else np.ones_like(tensor)
        return cls(
            arch=arch,
            hw=hw,
            engine=engine.at(hw.device.name, arch.family, arch.name, gemm_dtype),
            roles=roles_of(arch, hw, gemm_dtype, engine.moe_kernels),
            kv_dtype="bf16" if kv_dtype == "fp16" else kv_dtype,
            tensor=tensor,
            pipeline=as_float(layout.pipeline_parallel),
            expert=expert,
            attention_data=np.minimum(as_float(layout.attention_data_parallel), tensor),
            batches=as_float(layout.pipeline_parallel if batches is None else batches),
        )

    @property
    def attention_tensor(self) -> FloatArray:
        """Devices that share one copy of the attention layers [1]."""
        return np.maximum(self.tensor / self.attention_data, 1.0)

    @property
    def head_tensor(self) -> FloatArray:
        """Devices that share one output head: of an attention copy, or all (`EngineCalibration.gathers_rows`) [1]."""
        return self.tensor if self.engine.gathers_rows else self.attention_tensor

    def scheduled(self, requests: Array) -> FloatArray:
        """Of the replica's requests those of one scheduler [1]: each copy of the attention has a process of its own.

        vLLM runs an engine core a data-parallel rank (v1/engine/core.py, DPEngineCoreProc), SGLang a scheduler process
        (0.5.6 managers/data_parallel_controller.py:431), TensorRT-LLM an executor.
        """
        return as_float(requests) / self.attention_data

    def kv_heads(self, arch: Architecture) -> FloatArray:
        """Key/value heads of a layer on one device; they are copied where there are fewer than devices [1]."""
        return np.maximum(np.ceil(arch.kv_heads / self.attention_tensor), 1.0)

    def heads(self, arch: Architecture) -> FloatArray:
        """Query heads of a layer on one device; layers of one model may have different ones [1]."""
        return np.maximum(arch.heads / self.attention_tensor, 1.0)

    def within(self, group: FloatArray) -> FloatArray:
        """Devices of a group that share a scale-up domain [1]."""
        return np.minimum(group, float(self.hw.cluster.scale_up_domain))


def batches_in_flight(pipeline: Array, prompt_tokens: Array, token_budget: float) -> FloatArray:
    r"""Batches of a replica's requests that the stages of its pipeline work on at once, in a rollout [1].

    .. math:: m = \min\left(P, \max(1, s / c)\right)

    P stages (``pipeline``), s ``prompt_tokens`` that the replica reads before its requests decode, c ``token_budget``
    of a batch. A scheduler passes over a request whose token is in flight and fills a batch up with prompts, so what
    was read together decodes together, and prompts that fit in one batch leave all stages but one idle. A group's
    prompt is read once where prefixes are cached: most rollouts read little. Requests that keep arriving (a served
    load) spread over the batches by themselves, P of them. Sources: vLLM's ``v1/core/sched/scheduler.py`` (running
    requests are skipped, nothing moves between batches); SGLang's batches are bounded besides, by
    ``max_running_requests`` over the stages, which seldom binds.

    >>> [float(batches_in_flight(4, tokens, 8192)) for tokens in (1e3, 2e4, 1e6)]
    [1.0, 2.44140625, 4.0]
    """
    return np.minimum(as_float(pipeline), np.maximum(as_float(prompt_tokens) / token_budget, 1.0))


def total(operators: Iterable[Operator]) -> FloatArray:
    """Seconds of all operators together [s]."""
    return np.asarray(sum((one.seconds for one in operators), start=np.zeros(())), dtype=np.float64)


BEST_BANDWIDTH = 0.95
"""Share of the data sheet's bandwidth that no factor takes a kernel beyond; the best that any is measured at."""


def in_engine(one: Operator, scale: float) -> FloatArray:
    r"""Seconds of an operator inside an engine that runs kernels ``scale`` times as long as alone [s].

    .. math:: t' = \max\left(s t,\ \min\left(t, \max(t_c, t_m / 0.95, t_n)\right)\right)

    No engine computes above the data sheet's peak nor reads above its bandwidth: what is faster than light alone (it
    finds its operands in the cache) is no faster in an engine.
    """
    if scale >= 1.0:
        return scale * one.seconds
    if one.network_s.any():
        light = one.network_s
    else:
        light = np.maximum(one.compute_s, one.memory_s / BEST_BANDWIDTH)
    return np.asarray(np.maximum(scale * one.seconds, np.minimum(one.seconds, light)))


def total_in_engine(operators: Iterable[Operator], scale: float) -> FloatArray:
    """Seconds of all operators together inside an engine, see `in_engine` [s]."""
    return np.asarray(sum((in_engine(one, scale) for one in operators), start=np.zeros(())), dtype=np.float64)


def gemm_operator(replica: Replica, name: str, count: float, m: Array, n: Array, k: Array, dtype: str) -> Operator:
    """``count`` matrix products in a row."""
    hw, kind = replica.hw, dtype_of(dtype)
    fit, _ = gemm_fit(hw, dtype)
    if replica.engine.fused_quantise and fit.quantise_memory:
        fit = fit.model_copy(update={"quantise_fixed": fit.quantise_fixed * (1.0 - replica.engine.fused_quantise)})
    rows, columns, inner = as_float(m), as_float(n), as_float(k)
    moved = rows * inner * kind.activation_bytes + columns * inner * kind.weight_bytes + rows * columns * 2.0
    seconds = count * gemm_known(hw.device, fit, rows, columns, inner, dtype)
    if replica.engine.slow_products and replica.engine.release:
        seconds = seconds * _slowed(replica, rows, dtype)
    return Operator(
        name,
        seconds,
        count * 2.0 * rows * columns * inner / sheet_flop_per_s(hw, dtype),
        count * moved / hw.device.memory_bandwidth,
        np.zeros(()),
    )


def _slowed(replica: Replica, rows: FloatArray, dtype: str) -> FloatArray:
    """Times that products of ``rows`` take as long as timed in the engine's release, see `SlowProducts` [1]."""
    times = np.ones_like(rows)
    for one in replica.engine.slow_products:
        here = one.dtype == dtype and one.capability == capability(replica.hw.device)
        if here and not has_reached(replica.engine.release, one.before):
            times = np.where((rows > one.above) & (rows <= one.up_to), one.times, times)
    return times


def memory_operator(replica: Replica, name: str, count: float, n_bytes: Array) -> Operator:
    """``count`` small passes that move ``n_bytes`` each."""
    moved = as_float(n_bytes)
    zero = np.zeros(())
    sheet = count * moved / replica.hw.device.memory_bandwidth
    return Operator(name, count * small_op_s(replica.hw, moved), zero, sheet, zero)


def network_operator(replica: Replica, name: str, count: float, seconds: FloatArray, n_bytes: Array) -> Operator:
    """``count`` collectives of ``seconds`` each that move ``n_bytes``."""
    rate = max(scale_up_bytes_per_s(replica.hw), network_bytes_per_s(replica.hw))
    zero = np.zeros(())
    return Operator(name, count * seconds, zero, zero, count * as_float(n_bytes) / rate)
