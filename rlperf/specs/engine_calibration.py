"""An engine's calibration: overheads of its steps, what groups of served rows show, memory beside weights and cache."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.calibration import Quality, Spread
from rlperf.specs.calibration_files import calibration_names, find_calibration, read_calibration
from rlperf.specs.cluster import Device
from rlperf.specs.frozen import Frozen
from rlperf.specs.reader import read_spec
from rlperf.units import Bytes, NonNegativeInt, PositiveFloat, PositiveInt, Seconds


class EngineOverhead(Frozen):
    """The constants of an engine that are fitted to end-to-end measurements."""

    step: Seconds = Field(0.0, description="scheduler and detokenising per engine_step, not hidden behind kernels")
    per_layer: Seconds = Field(0.0, description="gaps between kernels, per layer and engine_step")
    per_expert_layer: Seconds = Field(0.0, description="routing and gaps around experts, per mixture-of-experts layer")
    per_spread_layer: Seconds = Field(
        0.0, description="beside it where experts are spread over devices: a device's own among all choices; not fitted"
    )
    per_request: Seconds = Field(description="the same per running request")
    uncaptured: Seconds = Field(
        0.0, description="issuing the kernels of a layer in an engine_step with prompts, while the device works"
    )
    kernel_scale: PositiveFloat = Field(description="kernels inside the engine over the same kernels alone")
    row_ids: tuple[str, ...] = Field((), description="rows that the fit saw; they are never scored")
    quality: Quality = Quality()


Grouped = Literal["release", "device", "family", "path", "cell", "throughput"]


class GroupFactor(Frozen):
    """What a group of served rows shows beside its engine's constants: ln of a factor on all of an engine_step.

    Factors of all groups that something is in add up. A group nobody has seen has none; the entry whose ``group`` is
    empty says how far groups of its kind differ.
    """

    kind: Grouped = Field(
        description="path: family, dtype and device together; cell: with the release, too; throughput: of runs that "
        "publish nothing else, by how they ran and the device, which no other load has"
    )
    group: str
    log: float = 0.0
    spread: float = Field(ge=0, description="standard deviation of the logarithm")
    rows: NonNegativeInt = 0


LoadKind = Literal["usual", "experts_apart", "other_loads"]


def load_kind(experts_apart: bool, closed_loop: bool) -> LoadKind:
    """Which half width of `ServingSpread` a load has."""
    return ("experts_apart" if experts_apart else "usual") if closed_loop else "other_loads"


class ServingSpread(Frozen):
    """Half the interval of seconds per token, in the logarithm, by what is known of a load before it is served.

    The 90th percentile of what rows left out with their configuration missed (Mondrian conformal prediction: Vovk,
    Gammerman, Shafer 2005, section 4.5), each configuration counting like the root of its rows; of all engines.
    """

    usual: PositiveFloat = Field(description="closed loops on kernels with tables, experts not spread over devices")
    experts_apart: PositiveFloat = Field(description="the same, experts spread over devices")
    other_loads: PositiveFloat = Field(description="single streams, batches, requests at random; with tables, too")
    extrapolated: float = Field(1.0, ge=1, description="times as wide in closed loops where a kernel has no table")
    extrapolated_other: float = Field(1.0, ge=1, description="the same of other loads")
    stranger: float = Field(
        0.0, ge=0, description="beside it where nobody has served the device, family, release or engine (squares add)"
    )
    stranger_throughput: float = Field(0.0, ge=0, description="the same of throughput")
    rows: NonNegativeInt = 0

    def of(self, experts_apart: bool = False, closed_loop: bool = True, extrapolated: bool = False) -> Spread:
        """The interval of a load on an engine, release, device and family that were served.

        >>> spread = ServingSpread(usual=0.2, experts_apart=0.4, other_loads=0.3, extrapolated=1.5)
        >>> spread.of(), spread.of(experts_apart=True, closed_loop=False).high, spread.of(extrapolated=True).high
        (Spread(low=0.819, high=1.221), 1.35, 1.35)
        """
        half: float = getattr(self, load_kind(experts_apart, closed_loop))
        if extrapolated:
            half *= self.extrapolated if closed_loop else self.extrapolated_other
        return Spread(low=round(math.exp(-half), 3), high=round(math.exp(half), 3))


class EngineMemoryFit(Frozen):
    """What a serving engine keeps beside weights and cache; the form is `rlperf.cost.engine_memory`."""

    activation_per_word: Bytes = Field(description="workspace of the profiling pass for a word of the vocabulary")
    graphs: Bytes = Field(description="captured CUDA graphs")
    non_torch: Bytes = Field(description="driver context on one device")
    non_torch_parallel: Bytes = Field(description="added by communicators where several devices serve one replica")
    quality: Quality = Quality()


class FusedNorms(Frozen):
    """All-reduces that have the norm behind them inside."""

    capability: str = Field(description="devices that have them, by generation and major number")
    since: str = Field("", description="first release that does so by itself; empty: every one, a release not said too")
    up_to: dict[PositiveInt, Bytes] = Field(
        {}, description="largest message by devices of the group, other groups have none; empty: any"
    )


class SlowProducts(Frozen):
    """Matrix products for which an old release picks another kernel than the one that was timed, by their rows."""

    capability: str = Field(description="devices where it does, by generation and major number")
    dtype: str
    before: str = Field(description="first release that does not; one that nobody says does not")
    above: NonNegativeInt = Field(description="rows of the product up to which it does not")
    up_to: PositiveInt = Field(description="rows up to which it does")
    times: PositiveFloat = Field(description="as long as timed")


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
    fused_norms: tuple[FusedNorms, ...] = Field((), description="all-reduces that have the next norm in them")
    slow_products: tuple[SlowProducts, ...] = ()
    prefill_kernel: str | None = None
    decode_kernel: str | None = None
    moe_kernels: tuple[str, ...] = Field((), description="expert kernels, first choice first")
    cuda_graphs: bool = True
    graph_buckets: tuple[PositiveInt, ...] = Field((), description="batch sizes captured in CUDA graphs")
    captures_prompts: bool = Field(False, description="graphs hold prompts too, up to the last bucket")
    fused_quantise: float = Field(0.0, ge=0, le=1, description="share of quantising passes fused into other kernels")
    expert_dispatch: Literal["nccl", "deepep"] = Field(
        "nccl", description="how attention-data-parallel ranks reach experts; a pool's setting replaces it"
    )
    own_exchange: bool = Field(
        True,
        description="where nobody says, experts of one domain of several hosts are reached by kernels of the engine's "
        "own, if it was timed with them; a pool that states how they are reached does without",
    )
    kernels_per_layer: PositiveInt = Field(12, description="launches per layer from eager code")
    eager_call: Seconds | None = Field(
        None,
        description="host time of one eager kernel (Python, dispatch, launch), which runs while the device works; "
        "None: launches alone, none hidden",
    )
    narrow_cache: tuple[str, ...] = Field(
        (), description="weight dtypes with which published rows that leave the cache's dtype blank have an fp8 cache"
    )
    joins_shared_expert: bool = Field(
        False, description="one shared expert without a gate is run as one more of the routed, where none are spread"
    )
    expert_copies: bool = Field(
        False, description="where a row leaves attention data parallel blank: experts over the node, attention copied"
    )
    gathers_rows: bool = Field(
        False,
        description="beside attention data parallel the output head is split over all devices, which see the rows of "
        "all; else every copy of the attention has a head of its own",
    )
    chunked_prefill: bool = True
    token_budget: PositiveInt = 8192
    max_running: PositiveInt = 256
    ranks_admit: bool = Field(False, description="max_running is that of each attention-data-parallel rank")
    max_drafting: PositiveInt | None = Field(
        None, description="requests at once where tokens are drafted and nobody states a number; None: as without"
    )
    small_devices: SmallDevices | None = Field(None, description="limits where memory is small, instead of these")
    block_tokens: PositiveInt = 16
    prefix_caching: bool = True
    async_scheduling: bool = Field(
        False, description="an engine_step is scheduled while the one before it runs: changes are seen one step later"
    )
    async_since: str = Field("", description="first release that does so by default; empty: every one")
    shown: float = Field(
        1.0, gt=0, le=1, description="share of the host's time per request that shows where it does so; judged"
    )
    front_end: Seconds = Field(
        0.0, description="of a request outside the engine's loop: HTTP, queues between processes, detokeniser"
    )
    tokenising: Seconds = Field(0.0, description="of a token of a prompt that comes as text, before the engine has it")
    front_end_fitted: bool = Field(
        False, description="its own rows of random arrivals fitted `front_end`: their first tokens are never scored"
    )
    reserves_output: bool = Field(False, description="admits a request only when its longest output fits as well")
    memory_fraction: float = Field(0.9, gt=0, le=1)
    fraction_of: Literal["device", "free", "static"] = Field(
        "device",
        description="whose share memory_fraction is: of the device, all that the engine takes; of what weights and "
        "workspace leave free, its cache; of what is free when it starts, static weights and cache",
    )
    frees_windows: bool = Field(True, description="cache of tokens that no sliding window sees any more is freed")
    overhead: EngineOverhead
    memory: EngineMemoryFit
    spread_extrapolated: Spread = Field(Spread(), description="where operators have no kernel table behind them")
    spread_served: ServingSpread | None = Field(
        None, description="the interval of seconds per token, of all engines; None: this engine's own two"
    )
    spread_throughput: Spread = Field(Spread(), description="of tokens per second where nobody states the batch")
    spread_first_token: Spread = Field(
        Spread(), description="of the first tokens of closed loops, whose clients all begin at once"
    )
    notes: str = ""
    release: str = Field("", description="first two numbers of the version that was asked for; empty: not said")
    factors: tuple[GroupFactor, ...] = ()
    _known: dict[tuple[str, ...], EngineCalibration] = PrivateAttr(default_factory=dict)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> EngineCalibration:
        """A copy, which remembers nothing of what the engine was asked for."""
        found = super().model_copy(update=update, deep=deep)
        found._known = {}
        return found

    @property
    def schedules_ahead(self) -> bool:
        """Whether `async_scheduling` holds for the release; one that nobody says is the newest.

        >>> [load_engine_calibration("vllm", one).schedules_ahead for one in ("0.11", "0.14", "")]
        [False, True, True]
        """
        return self.async_scheduling and (not self.release or has_reached(self.release, self.async_since))

    @property
    def request_share(self) -> float:
        """Share of the host's time per request that shows in an engine_step [1]."""
        return self.shown if self.schedules_ahead else 1.0

    @property
    def per_request_s(self) -> float:
        """Host time per running request that shows in an engine_step [s]."""
        return self.overhead.per_request * self.request_share

    def on(self, device: Device) -> EngineCalibration:
        """With the limits that it sets itself on a device.

        >>> from rlperf.specs.profiles import load_device
        >>> vllm = load_engine_calibration("vllm")
        >>> [vllm.on(load_device(name)).token_budget for name in ("h100_sxm", "a100_80g_sxm", "l40s")]
        [8192, 2048, 2048]
        """
        small = self.small_devices
        if small is None or not self.counts_as_small(device):
            return self
        return self.model_copy(update={"token_budget": small.token_budget, "max_running": small.max_running})

    def counts_as_small(self, device: Device) -> bool:
        """Whether it sets itself the limits of a small device."""
        small = self.small_devices
        return small is not None and (device.memory < small.below or device.name.startswith(small.names))

    def drafting(self) -> EngineCalibration:
        """With the limit that it sets itself where tokens are drafted.

        >>> [load_engine_calibration(name).drafting().max_running for name in ("sglang", "vllm")]
        [48, 1024]
        """
        return self if self.max_drafting is None else self.model_copy(update={"max_running": self.max_drafting})

    def groups(self, device: str, family: str, architecture: str, dtype: str, throughput: str = "") -> dict[str, str]:
        """The group of every kind that an architecture in a dtype on a device belongs to.

        ``throughput`` says how a run went that published nothing else; empty: any other load.

        >>> load_engine_calibration("vllm", "0.12.0").groups("h200_sxm", "llama", "Llama-3.1-8B", "fp8")["path"]
        'llama fp8 h200_sxm'
        """
        return {
            "release": self.release,
            "device": device,
            "family": family,
            "path": f"{family} {dtype} {device}",
            "cell": f"{self.release or '-'} {architecture} {dtype} {device}",
            "throughput": f"{throughput} {device}" if throughput else "",
        }

    def at(self, device: str, family: str, architecture: str, dtype: str, throughput: str = "") -> EngineCalibration:
        """The engine as it serves an architecture in a dtype on a device: its factors in its constants.

        Without factors it is itself, so asking twice changes nothing.
        """
        if not self.factors:
            return self
        key = (device, family, architecture, dtype, throughput)
        if key not in self._known:
            groups = self.groups(*key)
            whole = math.exp(sum(one.log for one in self.factors if one.group and groups[one.kind] == one.group))
            own = self.overhead
            changes = {name: getattr(own, name) * whole for name in _TIMES}
            self._known[key] = self.model_copy(update={"overhead": own.model_copy(update=changes), "factors": ()})
        return self._known[key]

    def strange(self, device: str, family: str) -> tuple[str, ...]:
        """Kinds of which nobody has served the group that this is in: release, device, family, or the engine itself.

        >>> load_engine_calibration("vllm", "0.19.0").strange("h200_sxm", "llama")
        ()
        >>> load_engine_calibration("vllm", "7.1").strange("a40", "llama")
        ('release', 'device')
        """
        if not self.factors:
            return ()  # pooled with nobody
        known = {(one.kind, one.group) for one in self.factors if one.group}
        asked = {"release": self.release, "device": device, "family": family}
        found = tuple(kind for kind, group in asked.items() if group and (kind, group) not in known)
        return found if self.overhead.row_ids else (*found, "engine")


_TIMES = ("step", "per_layer", "per_expert_layer", "per_request", "uncaptured", "kernel_scale")


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
    return of_release(read_calibration(path, EngineCalibration), release_of(version or ""))


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


def has_reached(release: str, first: str) -> bool:
    """Whether a release is ``first`` or a later one, as builds without a number are; one that nobody said is not.

    >>> [has_reached(one, "0.17") for one in ("0.9", "0.17", "1.0", "nightly", "")], has_reached("", "")
    ([False, True, True, True, False], True)
    """
    numbers = [[int(number) for number in re.findall(r"\d+", one)] for one in (release, first)]
    return not first or (bool(release) and (not numbers[0] or numbers[0] >= numbers[1]))
