"""Replay of a request log: its engine as its settings describe it, its arrivals through the event simulator."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlperf.calibrate.requests.log import RequestLog, RequestTimes
from rlperf.calibrate.rl_step.software import dtype_named
from rlperf.cost.collectives import reaches_peers
from rlperf.cost.engine_memory import engine_limits
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.replica import Replica
from rlperf.errors import Problem, SpecError
from rlperf.layout import Layout
from rlperf.sim.rollout import EngineOptions, simulate_replica
from rlperf.specs.architecture import Architecture
from rlperf.specs.calibration import Spread
from rlperf.specs.engine_calibration import EngineCalibration, load_engine_calibration
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import architecture_reading, load_architecture, load_device, profile_names
from rlperf.specs.reader import reading
from rlperf.units import MOST, MOST_COUNT


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a vLLM engine as a log states them: those given (``engine_kwargs``), else those it resolved to.

    Attributes
    ----------
    tensor, pipeline, data : degrees; each data-parallel rank is an engine with its own queue, cache and limits
    spread_experts : ``enable_expert_parallel``
    token_budget, max_running, memory_fraction : None where not stated
    kv_tokens, block_tokens : cache of one rank [tokens], None where not stated
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    spread_experts: bool = False
    token_budget: int | None = None
    max_running: int | None = None
    memory_fraction: float | None = None
    kv_tokens: int | None = None
    block_tokens: int | None = None
    prefix_caching: bool = True
    async_scheduling: bool | None = None
    precision: str = ""
    cache_precision: str = ""

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> EngineSettings:
        """From a log's ``meta.json``."""
        given, cache = meta.get("engine_kwargs") or {}, meta.get("kv_cache") or {}
        resolved = meta.get("resolved_config") or {}
        parts = [one for one in resolved.values() if isinstance(one, Mapping)]

        def setting(name: str) -> Any:
            values = (one.get(name) for one in (given, cache, *parts))
            return next((value for value in values if value is not None), None)

        return cls(
            tensor=_count(setting("tensor_parallel_size")) or 1,
            pipeline=_count(setting("pipeline_parallel_size")) or 1,
            data=_count(setting("data_parallel_size")) or 1,
            spread_experts=bool(setting("enable_expert_parallel")),
            token_budget=_count(setting("max_num_batched_tokens")),
            max_running=_count(setting("max_num_seqs")),
            memory_fraction=setting("gpu_memory_utilization"),
            kv_tokens=_count(cache.get("num_kv_tokens") or None, MOST),
            block_tokens=_count(setting("block_size")),
            prefix_caching=setting("enable_prefix_caching") is not False,
            async_scheduling=setting("async_scheduling"),
            precision=str(setting("quantization") or ""),
            cache_precision=str(setting("kv_cache_dtype") or ""),
        )

    def layout(self, arch: Architecture) -> Layout:
        """Layout of one replica: data-parallel ranks of a mixture of experts share their experts and step together."""
        copies = self.data if arch.experts else 1
        devices = self.tensor * copies
        return Layout.of(
            tensor_parallel=devices,
            pipeline_parallel=self.pipeline,
            expert_parallel=devices if self.spread_experts and arch.experts else 1,
            attention_data_parallel=copies,
        )

    def replicas(self, arch: Architecture) -> int:
        """Engines that share nothing but the queue."""
        return 1 if arch.experts else self.data


def _count(value: Any, most: float = MOST_COUNT) -> int | None:
    """A stated number of something; None where nothing is stated."""
    if value is None:
        return None
    number = int(value)
    if not 1 <= number <= most:
        raise ValueError(f"{value!r:.40} is no count")
    return number


@dataclass(frozen=True, eq=False)
class ReplaySetup:
    """What a log is replayed with: the engine's costs and limits, the interval, what had to be assumed.

    Attributes
    ----------
    cost : seconds of an engine_step of one replica
    quick : the same at the lower end of what is not known of the machine: devices that reach each other directly
    replicas : equal engines that share the requests
    front_s, tokenise_s : of a request outside the engine and of each token of its prompt, where the log's clock is the
        client's [s]
    """

    cost: EngineStepCost
    quick: EngineStepCost
    limits: EngineLimits
    options: EngineOptions
    replicas: int
    front_s: float
    tokenise_s: float
    spread: Spread
    calibration: str
    extrapolated: bool
    assumed: tuple[str, ...]


def setup_of(log: RequestLog) -> ReplaySetup:
    """Cost and limits of a log's engine from its settings, the device profile and the shipped calibrations."""
    with reading(log.folder / "meta.json"):
        return _setup(log)


def _setup(log: RequestLog) -> ReplaySetup:
    assumed: list[str] = []
    model = str(log.meta["model"])
    arch = load_architecture(model)
    assumed += filter(None, [architecture_reading(model).note])
    settings = EngineSettings.of(log.meta)
    engine = _engine(log, settings, assumed)
    hardware = load_hardware(_device(log, assumed))
    layout = settings.layout(arch)
    gemm_dtype, kv_dtype = _precision(settings, model, arch, assumed)
    final = log.trajectories.final_tokens

    def cost_on(machine: Hardware) -> EngineStepCost:
        replica = Replica.of(arch, machine, engine, layout, gemm_dtype, kv_dtype)
        return engine_step_cost(replica, typical_context=float(final.mean()))

    machine = _machine(hardware, log, int(layout.tensor_parallel.max()) * settings.pipeline, assumed)
    cost = cost_on(machine)
    served = Replica.of(arch, hardware, engine, layout, gemm_dtype, kv_dtype)
    usual = engine_limits(served, memory_fraction=settings.memory_fraction)
    if not settings.kv_tokens:
        assumed.append("cache size (from the device's memory and the engine's profile)")
    ranks = int(layout.attention_data_parallel.max())
    limits = EngineLimits(
        kv_tokens=ranks * float(settings.kv_tokens) if settings.kv_tokens else usual.kv_tokens,
        max_running=ranks * int(settings.max_running or usual.max_running),
        token_budget=ranks * int(settings.token_budget or usual.token_budget),
        block_tokens=int(settings.block_tokens or usual.block_tokens),
        chunked_prefill=True,
        prefix_caching=settings.prefix_caching,
        watermark=0.0,
    )
    calibration = hardware.calibration
    # A request's time is the sum of many operators, whose errors partly cancel: the square root of one operator's
    # spread. A relative's constants err all in the same direction, so there they keep their full width.
    gemm = next((fit.quality.spread for fit in calibration.gemm if fit.dtype == gemm_dtype), calibration.spread)
    return ReplaySetup(
        cost=cost,
        quick=cost if machine is hardware else cost_on(hardware),
        limits=limits,
        options=EngineOptions.of(engine),
        replicas=settings.replicas(arch),
        front_s=engine.front_end if log.by_client else 0.0,
        tokenise_s=engine.tokenising if log.by_client else 0.0,
        spread=calibration.spread if calibration.extrapolated else gemm.widened(0.5),
        calibration=f"{calibration.id}, {engine.id}",
        extrapolated=calibration.extrapolated,
        assumed=tuple(assumed),
    )


def _machine(hardware: Hardware, log: RequestLog, devices: int, assumed: list[str]) -> Hardware:
    """The log's node: over PCIe alone devices reach each other directly only where the log says that they do.

    NCCL takes the direct way only below one PCIe switch (on Intel hosts; src/graph/paths.cc), virtual machines mostly
    forbid it, and engines' own all-reduce needs it.
    """
    if devices == 1 or hardware.device.scale_up is not None or not reaches_peers(hardware):
        return hardware
    stated = (log.meta.get("hardware") or {}).get("peer_access")
    if stated is None:
        assumed.append("devices reach each other through host memory (hardware.peer_access is not stated)")
    cluster = hardware.cluster.model_copy(update={"peer_access": bool(stated)})
    return hardware if stated else replace(hardware, cluster=cluster)


_PRECISIONS = ((r"fp8", "fp8"), (r"nvfp4", "nvfp4"), (r"awq|gptq|w4a16|int4", "int4_wo"), (r"w8a16", "int8_wo"))
"""What names of checkpoints say of their weights."""


def _precision(settings: EngineSettings, model: str, arch: Architecture, assumed: list[str]) -> tuple[str, str]:
    """Dtypes of weights and cache: the engine's quantisation, else what the checkpoint's name says, else its own."""
    kv_dtype = "fp8" if settings.cache_precision.lower().startswith("fp8") else "bf16"
    name = re.sub(r"_(marlin|ct|wna16).*", "", settings.precision.lower())
    if name and name != "compressed-tensors":
        try:
            return dtype_named(name, "quantization"), kv_dtype
        except SpecError:
            assumed.append(f"weights as the checkpoint's name says (quantization {settings.precision} is not known)")
    for pattern, dtype in _PRECISIONS:
        if re.search(pattern, model.rsplit("/", 1)[-1].lower()):
            return dtype, kv_dtype
    return arch.checkpoint_dtype or "bf16", kv_dtype


def _engine(log: RequestLog, settings: EngineSettings, assumed: list[str]) -> EngineCalibration:
    """The engine of the log's release; it schedules ahead as its settings say, otherwise as the release does."""
    found = load_engine_calibration("vllm", str(log.meta.get("vllm_version", "")) or None)
    if settings.async_scheduling is not None:
        return found.model_copy(update={"async_scheduling": settings.async_scheduling, "async_since": ""})
    assumed.append(f"async_scheduling={found.schedules_ahead} (default of the version)")
    return found


def _device(log: RequestLog, assumed: list[str]) -> str:
    """Device profile that the log names; without a name in ``meta.json``, by the folder's."""
    stated = (log.meta.get("hardware") or {}).get("device_name")
    if not stated:
        assumed.append("device (from the folder's name)")
    text = _compressed(stated or log.folder.resolve().name)
    found: list[tuple[int, str]] = []
    for name in profile_names("devices"):
        device = load_device(name)
        keys = [_compressed(key) for key in (name, *device.aliases)]
        found += [(len(key), name) for key in keys if len(key) > 3 and key in text]
    if not found:
        raise SpecError(
            Problem(
                "the device is neither in meta.json (hardware.device_name) nor in the folder's name",
                str(log.folder),
                suggestion="`rlperf profiles list` names all devices",
            )
        )
    return max(found)[1]


def _compressed(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def replay(
    log: RequestLog, setup: ReplaySetup, factor: float = 1.0, cost: EngineStepCost | None = None
) -> RequestTimes:
    """What a client would see of each request, with every cost ``factor`` times as long.

    Requests go to the replicas in turn, in the order of their arrival. ``cost``: by default the setup's.
    """
    table = (setup.cost if cost is None else cost).scaled(factor)
    requests = log.trajectories
    order = np.argsort(requests.arrival_s, kind="stable")
    first, last = np.empty(len(requests)), np.empty(len(requests))
    for replica in range(min(setup.replicas, len(requests))):
        members = np.sort(order[replica :: setup.replicas])
        timeline = simulate_replica(requests.take(members), table, setup.limits, options=setup.options)
        first[members], last[members] = timeline.first_token_s, timeline.finish_s
    tokens = requests.response_tokens.astype(np.float64)
    front = setup.front_s + setup.tokenise_s * requests.prompt_tokens
    return RequestTimes.of(requests.arrival_s, first + front, last + front, tokens)
