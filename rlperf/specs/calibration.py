"""Calibrations: constants fitted to measurements of one device or one engine, each with where it is from.

Rates are stored as fractions of the data sheet, so that a device without measurements can borrow from its nearest
relative. Search path of a calibration by name: an explicit file, the job's folder, the user's configuration folder,
the shipped profiles.

Long because a fit of a device, of an engine and of what groups of served rows show are one file format with one search
path, and each refers to the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.cluster import Device
from rlperf.specs.frozen import Frozen
from rlperf.specs.profiles import search_path
from rlperf.specs.reader import is_file, read_spec
from rlperf.units import Bytes, NonNegativeInt, PositiveFloat, PositiveInt, Seconds

Z95 = 1.6448536269514722
"""Standard normal quantile of 95 %: `low` and `high` of any prediction lie as many standard deviations off."""


class Spread(Frozen):
    """Measured over predicted on left-out shapes: 5th and 95th percentile [1]."""

    low: PositiveFloat = 0.7
    high: PositiveFloat = 1.4

    def widened(self, factor: float) -> Spread:
        """The same interval, ``factor`` times as wide in the logarithm."""
        return Spread(low=self.low**factor, high=self.high**factor)

    def beside(self, sigma: float) -> Spread:
        """The same interval with a further, independent error of standard deviation ``sigma`` in the logarithm.

        >>> Spread(low=1.0, high=1.0).beside(0.1)
        Spread(low=0.848, high=1.179)
        """
        more = Z95 * sigma
        low, high = math.hypot(min(math.log(self.low), 0.0), more), math.hypot(max(math.log(self.high), 0.0), more)
        return Spread(low=round(math.exp(-low), 3), high=round(math.exp(high), 3))


class Quality(Frozen):
    """How well a fit does: number of rows, mean absolute % errors inside and left out, and the rows it saw."""

    n: NonNegativeInt = 0
    in_sample_mape: float | None = Field(None, description="[%]")
    left_out_mape: float | None = Field(None, description="[%], leave one value of the shape out in turn")
    left_out_rule: str = ""
    rows: str = Field("", description="which rows were used: file and filter, or split rule with its seed")
    spread: Spread = Spread()


class GemmFit(Frozen):
    """Constants of a matrix product by dtype; the form is `rlperf.cost.roofline.gemm_with`."""

    dtype: str
    kernel: str = ""
    fixed: Seconds = Field(description="kernel start and end")
    compute: PositiveFloat = Field(description="attainable share of the dense peak")
    memory: PositiveFloat = Field(description="attainable share of the memory bandwidth")
    exponent: PositiveFloat = Field(2.5, description="norm that joins compute and memory time")
    wave: float = Field(0.0, ge=0.0, description="weight of idle multiprocessors in the last wave of tiles")
    reuse: float = Field(
        0.0, ge=0.0, description="loss of small tiles: values of reuse at which a tile is half as fast"
    )
    split: Seconds = Field(0.0, description="reduction pass of a product split along k")
    cached: float = Field(0.0, ge=0.0, description="extra rate of operands that are still in L2, over memory's")
    quantise_fixed: Seconds = Field(0.0, description="launch of the pass that quantises the activations")
    quantise_memory: float = Field(0.0, ge=0.0, description="share of the bandwidth in that pass; 0 = no such pass")
    quality: Quality = Quality()


class PrefillFit(Frozen):
    """Constants of flash attention over whole prompts; the form is `rlperf.cost.attention.flash_with`."""

    kernel: str
    kv_dtype: str = "bf16"
    fixed: Seconds
    compute: PositiveFloat = Field(description="attainable share of the dense peak, long sequences")
    memory: PositiveFloat = Field(description="share of the bandwidth for queries and output")
    ramp_tokens: float = Field(
        0.0, ge=0.0, description="key length at which the rate is half of that of long sequences"
    )
    straggler: float = Field(0.0, ge=0.0, description="weight of the longest tile when tiles are few")
    cache_memory: PositiveFloat = Field(0.3, description="share of the bandwidth when keys and values are written")
    cache_exponent: float = Field(1.0, description="cache writes grow with kv_heads to this power")
    head_dim_ramp: float = Field(0.0, ge=0.0, description="below width 128 the rate falls as 1 / (1 + this / head_dim)")
    backward_flop: PositiveFloat = Field(description="backward FLOP over forward FLOP")
    backward_compute: PositiveFloat = Field(description="backward efficiency over forward, long sequences")
    backward_ramp_tokens: float = Field(description="further ramp of the backward pass")
    quality: Quality = Quality()


class DecodeFit(Frozen):
    """Constants of paged decode attention; the form is `rlperf.cost.attention.decode_with`."""

    kernel: str
    kv_dtype: str = "bf16"
    fixed: Seconds
    long_fixed: Seconds = Field(0.0, description="added where contexts are long enough to be split (4096 and more)")
    memory: PositiveFloat
    per_pair: Seconds = Field(0.0, description="per request and key/value head")
    per_head: Seconds = Field(0.0, description="per request and query head")
    per_request: Seconds = Field(0.0, description="per request")
    cached: float = Field(0.0, ge=0.0, description="extra rate of keys and values that are still in L2")
    quality: Quality = Quality()


class MoeFit(Frozen):
    """Constants of grouped expert products; the form is `rlperf.cost.moe.grouped_with`."""

    kernel: str
    dtype: str
    fixed: Seconds
    compute: PositiveFloat
    memory: PositiveFloat
    activation_memory: PositiveFloat = 0.6
    per_pair: Seconds = Field(0.0, description="routing and permutation, per (token, expert) pair")
    per_expert: Seconds = Field(0.0, description="per touched local expert")
    per_held_expert: Seconds = Field(0.0, description="per local expert, touched or not")
    per_doubling: Seconds = Field(0.0, description="routing and sorting in the kernel, per doubling of its tokens")
    token_bytes: float = Field(0.0, ge=0.0, description="traffic of every token on every device, per hidden value")
    exponent: PositiveFloat = 2.0
    cached: float = Field(0.0, ge=0.0, description="extra rate of weights that are still in L2, over memory's")
    skew_exponent: float = Field(
        0.0, description="power-law routing: busiest device over mean = expert_parallel to this"
    )
    skew_touched: float = Field(1.0, description="power-law routing: touched experts over those of uniform routing")
    timed_on: str | None = Field(
        None, description="relative whose kernel stands here, where this device has none of it"
    )
    quality: Quality = Quality()


class ScanFit(Frozen):
    """Constants of a linear-attention kernel; the forms are in `rlperf.cost.scan`."""

    kernel: str = Field(description="engine whose kernel was timed")
    phase: str = Field(description="context (chunked scan over prompts) or generation (one step of the recurrence)")
    fixed: Seconds
    compute: PositiveFloat = Field(1.0, description="attainable share of the dense 16-bit peak in a scan")
    per_step: Seconds = Field(0.0, description="per token of one sequence: chunks wait for each other")
    memory: PositiveFloat = Field(1.0, description="attainable share of the bandwidth when states are read and written")
    cached: float = Field(0.0, ge=0.0, description="extra rate of states that are still in L2")
    timed_on: str | None = Field(
        None, description="relative whose kernel stands here, where this device has none of it"
    )
    quality: Quality = Quality()


class CollectivePoint(Frozen):
    """Constants of one group size: a low-latency protocol and a bandwidth protocol, the faster one runs.

    Bandwidths are shares of the scale-up (or, without one, host) bandwidth; ``root`` is [s / sqrt(byte)].
    """

    group: PositiveInt
    low_fixed: Seconds
    low_bandwidth: PositiveFloat
    fixed: Seconds
    bandwidth: PositiveFloat
    root: float = 0.0


class CollectiveFit(Frozen):
    """Constants of one collective inside a scale-up domain; the form is `rlperf.cost.collectives.domain_s`."""

    collective: str = Field(description="all_reduce, all_gather, reduce_scatter, all_to_all, point_to_point")
    implementation: str = "nccl"
    points: tuple[CollectivePoint, ...]
    quality: Quality = Quality()


class DispatchFit(Frozen):
    """Expert dispatch and combine kernels (DeepEP-like) over ``group`` devices: t = fixed + bytes / rate."""

    kernel: str
    operation: str = Field(description="dispatch or combine")
    group: PositiveInt
    within: PositiveInt
    fixed: Seconds
    rate: PositiveFloat = Field(description="share of the scale-up bandwidth (within a domain) or of the network's")
    quality: Quality = Quality()


class StreamFit(Frozen):
    """Memory-bound passes: large streams, and small unfused operators (norm, rope, activation)."""

    stream_memory: PositiveFloat = Field(description="attainable share of the bandwidth, large streams")
    small_fixed: Seconds = Field(description="one small operator inside a CUDA graph")
    small_memory: PositiveFloat = Field(description="attainable share of the bandwidth, small operators")
    scan_compute: PositiveFloat = Field(description="chunked scans of linear attention and Mamba over large products")
    quality: Quality = Quality()


class HostFit(Frozen):
    """Launches from eager code, and copies between host and device."""

    launch: Seconds = Field(description="per kernel from eager code")
    eager_collective: Seconds = Field(description="added to a collective launched from eager code")
    copy_memory: PositiveFloat = Field(description="attainable share of the host link")
    quality: Quality = Quality()


class DeviceCalibration(Frozen):
    """All fitted constants of one device."""

    id: str
    device: str
    source: str
    date: str
    software: str
    n: NonNegativeInt = Field(description="measurements behind the file")
    spread: Spread = Field(Spread(), description="over all operators")
    gemm: tuple[GemmFit, ...]
    prefill: tuple[PrefillFit, ...]
    decode: tuple[DecodeFit, ...]
    moe: tuple[MoeFit, ...] = ()
    collectives: tuple[CollectiveFit, ...]
    dispatch: tuple[DispatchFit, ...] = ()
    scan: tuple[ScanFit, ...] = ()
    stream: StreamFit
    host: HostFit
    notes: str = ""
    extrapolated_from: str | None = Field(None, description="device whose constants stand here, when not its own")
    served_rows: tuple[str, ...] = Field(
        (), description="served rows behind constants of kernels that nobody timed; they are never scored"
    )

    @property
    def extrapolated(self) -> bool:
        """Whether the constants are a relative's."""
        return self.extrapolated_from is not None

    @property
    def told(self) -> bool:
        """Whether served rows told the constants: no kernel of the device was timed."""
        return bool(self.served_rows)

    def borrowed_by(self, device: str) -> DeviceCalibration:
        """These constants for a device without measurements of its own; intervals are read twice as wide."""
        return self.model_copy(
            update={
                "id": f"{self.id}@{device}",
                "device": device,
                "extrapolated_from": self.device,
                "spread": self.spread.widened(2.0),
            }
        )


def find_calibration(name: str, kind: str, folder: Path | str | None = None) -> Path | None:
    """File of a calibration by name and kind (devices, engines, frameworks) along the search path, or None."""
    for root in search_path(folder):
        path = root / "calibrations" / kind / f"{name}.yaml"
        if is_file(path):
            return path
    return None


def calibration_names(kind: str, folder: Path | str | None = None) -> list[str]:
    """Names of all calibrations of ``kind`` that can be found.

    >>> "h100_sxm" in calibration_names("devices")
    True
    """
    return sorted({path.stem for root in search_path(folder) for path in (root / "calibrations" / kind).glob("*.yaml")})


@cache
def _device_calibration(path: Path) -> DeviceCalibration:
    return read_spec(path, DeviceCalibration)


def load_device_calibration(
    device: str, *, relative: str | None = None, file: Path | str | None = None, folder: Path | str | None = None
) -> DeviceCalibration:
    """Constants of ``device``; without measurements, those of ``relative`` marked as extrapolated.

    ``file`` goes before the search path; ``folder`` is the job's folder.
    """
    if file is not None:
        found = read_spec(file, DeviceCalibration)
        return found if found.device == device else found.borrowed_by(device)
    path = find_calibration(device, "devices", folder)
    if path is not None:
        return _device_calibration(path)
    if relative:
        path = find_calibration(relative, "devices", folder)
        if path is not None:
            return _device_calibration(path).borrowed_by(device)
    names = calibration_names("devices", folder)
    raise SpecError(
        Problem(
            f"no calibration for device {device!r}" + (f" nor for its relative {relative!r}" if relative else ""),
            suggestion=did_you_mean(device, names) or "measure one with 'rlperf calibrate measure'",
        )
    )


class EngineOverhead(Frozen):
    """The constants of an engine that are fitted to end-to-end measurements."""

    step: Seconds = Field(0.0, description="scheduler and detokenising per engine_step, not hidden behind kernels")
    per_layer: Seconds = Field(0.0, description="gaps between kernels, per layer and engine_step")
    per_expert_layer: Seconds = Field(0.0, description="routing and gaps around experts, per mixture-of-experts layer")
    per_request: Seconds = Field(description="the same per running request")
    kernel_scale: PositiveFloat = Field(description="kernels inside the engine over the same kernels alone")
    row_ids: tuple[str, ...] = Field((), description="rows that the fit saw; they are never scored")
    quality: Quality = Quality()


class GroupFactor(Frozen):
    """What a group of served rows shows beside its engine's constants: ln of a factor on all of an engine_step.

    Factors of all groups that something is in add up. A group nobody has seen has none, and the spread of the entry
    whose ``group`` is empty: what leaving such groups out has cost.
    """

    kind: str = Field(description="release, device, family, path (family, dtype, device) or cell (with the release)")
    group: str
    log: float = 0.0
    spread: float = Field(ge=0, description="standard deviation of the logarithm")
    rows: NonNegativeInt = 0


class EngineMemoryFit(Frozen):
    """What a serving engine keeps beside weights and cache; the form is `rlperf.cost.engine_memory`."""

    activation_base: Bytes = Field(description="workspace of the profiling forward pass, dense")
    activation_moe: Bytes = Field(description="the same with experts")
    graphs: Bytes = Field(description="captured CUDA graphs")
    non_torch: Bytes = Field(description="driver context on one device")
    non_torch_parallel: Bytes = Field(description="added by communicators where several devices serve one replica")
    quality: Quality = Quality()


class SmallDevices(Frozen):
    """What an engine sets itself where nobody does, on devices with less memory than ``below`` or of these names."""

    below: Bytes
    names: tuple[str, ...] = Field((), description="beginnings of names that count as small whatever their memory")
    token_budget: PositiveInt
    max_running: PositiveInt


class EngineCalibration(Frozen):
    """A serving engine: how it schedules, which kernels it runs, and its fitted overheads."""

    id: str
    engine: str
    source: str
    date: str
    software: str
    all_reduce: str = Field("nccl", description="implementation of all-reduce in decode, as in the device calibration")
    prefill_kernel: str | None = None
    decode_kernel: str | None = None
    moe_kernels: tuple[str, ...] = Field((), description="expert kernels, first choice first")
    cuda_graphs: bool = True
    graph_buckets: tuple[PositiveInt, ...] = Field((), description="batch sizes captured in CUDA graphs")
    fused_quantise: float = Field(0.0, ge=0, le=1, description="share of quantising passes fused into other kernels")
    router_passes: float = Field(5.0, ge=0.0, description="small kernels around the experts of a layer")
    expert_dispatch: str = Field("nccl", description="how attention-data-parallel ranks reach experts: nccl or deepep")
    kernels_per_layer: PositiveInt = Field(12, description="launches per layer from eager code")
    eager_call: Seconds | None = Field(
        None,
        description="host time of one eager kernel (Python, dispatch, launch), which runs while the device works; "
        "None: launches alone, none hidden",
    )
    narrow_cache: tuple[str, ...] = Field(
        (), description="weight dtypes with which published rows that leave the cache's dtype blank have an fp8 cache"
    )
    expert_copies: bool = Field(
        False, description="where a row leaves attention data parallel blank: experts over the node, attention copied"
    )
    cached_prompts: float = Field(
        0.0, ge=0, le=1, description="share of the prompts of published rows that the prefix cache holds already"
    )
    chunked_prefill: bool = True
    token_budget: PositiveInt = 8192
    max_running: PositiveInt = 256
    small_devices: SmallDevices | None = Field(None, description="limits where memory is small, instead of these")
    block_tokens: PositiveInt = 16
    prefix_caching: bool = True
    async_scheduling: bool = Field(
        False, description="an engine_step is scheduled while the one before it runs: changes are seen one step later"
    )
    front_end: Seconds = Field(
        0.0,
        description="of a request outside the engine's loop: HTTP, tokeniser, queues between processes, detokeniser",
    )
    front_end_fitted: bool = Field(
        False, description="its own rows of random arrivals fitted `front_end`: their first tokens are never scored"
    )
    reserves_output: bool = Field(False, description="admits a request only when its longest output fits as well")
    memory_fraction: float = Field(0.9, gt=0, le=1)
    overhead: EngineOverhead
    memory: EngineMemoryFit
    spread_extrapolated: Spread = Field(Spread(), description="where operators have no kernel table behind them")
    spread_throughput: Spread = Field(Spread(), description="of tokens per second where nobody states the batch")
    notes: str = ""
    release: str = Field("", description="first two numbers of the version that was asked for; empty: not said")
    factors: tuple[GroupFactor, ...] = ()
    _known: dict[tuple[str, ...], EngineCalibration] = PrivateAttr(default_factory=dict)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> EngineCalibration:
        """A copy, which remembers nothing of what the engine was asked for."""
        found = super().model_copy(update=update, deep=deep)
        found._known = {}
        return found

    def on(self, device: Device) -> EngineCalibration:
        """With the limits that it sets itself on a device.

        >>> from rlperf.specs.profiles import load_device
        >>> vllm = load_engine_calibration("vllm")
        >>> [vllm.on(load_device(name)).token_budget for name in ("h100_sxm", "a100_80g_sxm", "l40s")]
        [8192, 2048, 2048]
        """
        small = self.small_devices
        if small is None or not (device.memory < small.below or device.name.startswith(small.names)):
            return self
        return self.model_copy(update={"token_budget": small.token_budget, "max_running": small.max_running})

    def groups(self, device: str, family: str, architecture: str, dtype: str) -> dict[str, str]:
        """The group of every kind that an architecture in a dtype on a device belongs to.

        >>> load_engine_calibration("vllm", "0.12.0").groups("h200_sxm", "llama", "Llama-3.1-8B", "fp8")["path"]
        'llama fp8 h200_sxm'
        """
        return {
            "release": self.release,
            "device": device,
            "family": family,
            "path": f"{family} {dtype} {device}",
            "cell": f"{self.release or '-'} {architecture} {dtype} {device}",
        }

    def at(self, device: str, family: str, architecture: str, dtype: str) -> EngineCalibration:
        """The engine as it serves an architecture in a dtype on a device: its factors in its constants.

        Without factors it is itself, so asking twice changes nothing.
        """
        if not self.factors:
            return self
        key = (device, family, architecture, dtype)
        if key not in self._known:
            groups = self.groups(device, family, architecture, dtype)
            whole = math.exp(sum(one.log for one in self.factors if one.group and groups[one.kind] == one.group))
            own = self.overhead
            changes = {name: getattr(own, name) * whole for name in _TIMES}
            self._known[key] = self.model_copy(update={"overhead": own.model_copy(update=changes), "factors": ()})
        return self._known[key]

    def strange(self, device: str, family: str, architecture: str, dtype: str) -> tuple[GroupFactor, ...]:
        """Kinds of which nobody has seen the group that this is in, as the entries that say how far they spread.

        What a path (or a cell) has of its own is not asked where its device, family or release is strange already.
        """
        groups = self.groups(device, family, architecture, dtype)
        known = {(one.kind, one.group) for one in self.factors if one.group}
        others = [one for one in self.factors if not one.group]
        found = [one for one in others if one.kind in _WHOLE and (one.kind, groups[one.kind]) not in known]
        found = [one for one in found if one.kind != "release" or groups["release"]]
        if found:
            return tuple(found)
        return tuple(one for one in others if one.kind == "path" and (one.kind, groups[one.kind]) not in known)


_TIMES = ("step", "per_layer", "per_expert_layer", "per_request", "kernel_scale")
_WHOLE = ("release", "device", "family")


@cache
def _engine_calibration(path: Path) -> EngineCalibration:
    return read_spec(path, EngineCalibration)


def load_engine_calibration(
    engine: str, version: str | None = None, *, file: Path | str | None = None, folder: Path | str | None = None
) -> EngineCalibration:
    """Profile of a serving engine by name (vllm, sglang, trtllm, ...) along the search path, or from ``file``.

    With a version, the most exact name wins: ``vllm-0.12.0``, ``vllm-0.12``, ``vllm-0``, ``vllm``.
    """
    if file is not None:
        return read_spec(file, EngineCalibration)
    parts = version.removeprefix("v").split(".") if version else []
    names = [f"{engine}-{'.'.join(parts[:end])}" for end in range(len(parts), 0, -1)]
    found = (find_calibration(name, "engines", folder) for name in [*names, engine])
    path = next((one for one in found if one is not None), None)
    if path is None:
        names = calibration_names("engines", folder)
        raise SpecError(
            Problem(
                f"no engine profile named {engine!r}",
                suggestion=did_you_mean(engine, names) or f"known: {', '.join(names)}",
            )
        )
    return of_release(_engine_calibration(path), release_of(version or ""))


def of_release(engine: EngineCalibration, release: str) -> EngineCalibration:
    """The engine in a release (see `release_of`); the same object for the same question."""
    if engine.release == release:
        return engine
    known = engine._known
    if (release,) not in known:
        known[release,] = engine.model_copy(update={"release": release})
    return known[release,]


def release_of(version: str) -> str:
    """The release of a version as people write it: its first two numbers, or the word that it starts with.

    >>> [release_of(one) for one in ("0.12.1", "v0.19.0rc2", "1.2.0rc6.post2", "nightly-2026", "")]
    ['0.12', '0.19', '1.2', 'nightly', '']
    """
    found = re.match(r"v?(\d+\.\d+)|([a-z]+)", version.strip().lower())
    return (found.group(1) or found.group(2)) if found else ""
