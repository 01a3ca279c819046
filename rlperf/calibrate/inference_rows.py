"""Rows of serving measurements made ready: architecture, hardware, engine, layout, load; and their prediction."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rlperf.calibrate.tables import Row
from rlperf.cost.dtypes import DTYPES
from rlperf.cost.engine_memory import engine_memory, max_running
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.inference import engine_step_cost, fixed_overhead_s, scaled, with_overhead
from rlperf.cost.operators import cached_token_held_s
from rlperf.cost.replica import Replica
from rlperf.cost.serving import Served, closed_loop, open_loop, static_batch
from rlperf.cost.uncertainty import serving_basis
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.calibration import EngineCalibration, load_engine_calibration
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_architecture

MODES = ("single_stream", "static_batch", "online_concurrency", "online_rate", "offline")
NEEDED = ("architecture", "gpu", "engine", "tensor_parallel", "gemm_dtype", "mode", "isl", "osl")


@dataclass(frozen=True)
class ServingCase:
    """One row: what runs where, under which load, and what had to be filled in.

    ``load`` is requests in flight per replica, or requests per second per replica where the mode is online_rate.
    """

    row: Row
    arch: Architecture
    hardware: Hardware
    engine: EngineCalibration
    tensor: int
    pipeline: int
    expert: int
    attention_data: int
    gemm_dtype: str
    kv_dtype: str
    mode: str
    isl: float
    osl: float
    load: float
    devices: int
    assumed: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """Layout of one replica."""
        return Layout.of(
            tensor_parallel=self.tensor,
            pipeline_parallel=self.pipeline,
            expert_parallel=self.expert,
            attention_data_parallel=self.attention_data,
        )

    @property
    def configuration(self) -> str:
        """What a split by configuration keeps together: everything but the load and the lengths."""
        parts = (
            self.engine.id, self.arch.name, self.hardware.device.name, self.gemm_dtype, self.tensor, self.pipeline,
            self.expert, self.attention_data, self.mode,
        )  # fmt: skip
        return "|".join(map(str, parts))

    @property
    def covered(self) -> bool:
        """Whether kernel tables stand behind every operator that matters."""
        return not serving_basis(self.arch, self.hardware, self.engine, gemm_dtype=self.gemm_dtype).extrapolated


@lru_cache(maxsize=256)
def _architecture(name: str) -> Architecture:
    return load_architecture(name)


@lru_cache(maxsize=64)
def _hardware(name: str) -> Hardware:
    return load_hardware(name)


def case_of(row: Row, engines: dict[str, EngineCalibration] | None = None) -> ServingCase:
    """A row as a case; `SpecError` says why it cannot be predicted.

    ``engines`` replaces profiles by id, for fits. Blank cells: expert parallel 1; attention data parallel 1, or what
    makes the weights fit; cache in fp8 where the engine's profile says so for the weights' dtype, else bf16.
    """
    assumed: list[str] = []
    arch, hardware = _architecture(row.text("architecture")), _hardware(row.text("gpu"))
    engine = load_engine_calibration(row.text("engine"), row.text("engine_version") or None)
    engine = (engines or {}).get(engine.id, engine)
    gemm_dtype = row.text("gemm_dtype", "bf16")
    kv_dtype = row.text("kv_dtype")
    if not kv_dtype:
        kv_dtype = "fp8" if gemm_dtype in engine.narrow_cache else "bf16"
        assumed.append(f"kv_dtype {kv_dtype}")
    if gemm_dtype == "bf16" and arch.checkpoint_dtype == "mxfp4":
        gemm_dtype = "mxfp4"  # its checkpoint holds the experts alone in mxfp4; bf16 names the other products
        assumed.append("experts in mxfp4, as in their checkpoint")
    if gemm_dtype not in DTYPES:
        raise SpecError(f"dtype {gemm_dtype} is not modelled")
    if DTYPES[gemm_dtype].peak == "fp8" and hardware.device.peaks.fp8 is None:
        raise SpecError(f"{hardware.device.name} has no {gemm_dtype} units")
    tensor, pipeline = row.count("tensor_parallel"), row.count("pipeline_parallel")
    given_copies = row.number("attention_data_parallel")
    expert = row.count("expert_parallel")
    if given_copies is not None:
        copies = int(given_copies)
    elif arch.experts and engine.expert_copies:
        copies = max(hardware.cluster.devices_per_node // tensor, 1)
        expert = tensor * copies
        assumed.append(f"attention_data_parallel {copies}, experts over the node")
    else:
        copies = _copies_that_fit(arch, hardware, engine, tensor, gemm_dtype, kv_dtype)
        assumed.append(f"attention_data_parallel {copies}")
    if arch.experts and not row.text("expert_parallel"):
        assumed.append(f"expert_parallel {expert}")
    devices = tensor * copies * pipeline
    mode = row.text("mode")
    isl, osl = row.number("isl"), row.number("osl")
    if mode not in MODES or isl is None or osl is None:
        raise SpecError(f"mode {mode!r} with isl {isl} and osl {osl} is not a load that rlperf knows")
    given = row.count("n_gpus", devices)
    load, assumed_load = _load(row, mode, given / devices)
    if assumed_load:
        assumed.append(assumed_load)
    return ServingCase(
        row, arch, hardware, engine, tensor * copies, pipeline, expert, copies, gemm_dtype, kv_dtype, mode,
        isl, osl, load, devices, tuple(assumed),
    )  # fmt: skip


def _requests_sent(row: Row) -> float:
    """Requests of the whole run where the note says so."""
    found = re.search(r"(\d+) requests", row.text("note"))
    return float(found.group(1)) if found else np.inf


def _load(row: Row, mode: str, replicas: float) -> tuple[float, str]:
    if mode == "single_stream":
        return 1.0, ""
    if mode == "online_rate":
        found = re.search(r"request rate ([\d.]+)/s", row.text("note"))
        if found is None:
            raise SpecError("online_rate without a request rate in the note")
        return float(found.group(1)) / replicas, ""
    number = row.number("concurrency")
    if mode == "offline":
        return (number or _requests_sent(row)) / replicas, "" if number else "batch that fits the cache"
    if number is None:
        raise SpecError(f"mode {mode} without a concurrency")
    return number / replicas, ""


def _copies_that_fit(
    arch: Architecture, hw: Hardware, engine: EngineCalibration, tensor: int, gemm_dtype: str, kv_dtype: str
) -> int:
    for copies in (1, 2, 4, 8):
        layout = Layout.of(
            tensor_parallel=tensor * copies, attention_data_parallel=copies, expert_parallel=tensor * copies
        )
        if bool(engine_memory(arch, hw, engine, layout, gemm_dtype=gemm_dtype, kv_dtype=kv_dtype).fits):
            return copies
    return 1


class CostTable:
    """Engine_step costs of cases, each distinct one computed once, with kernels as measured alone and no host time."""

    def __init__(self) -> None:
        self._costs: dict[tuple[object, ...], tuple[EngineStepCost, float]] = {}

    def cost(self, case: ServingCase) -> tuple[EngineStepCost, float]:
        """Cost of an engine_step with the engine's overheads, and the requests that fit at once."""
        key = (case.configuration, case.kv_dtype, case.isl, case.osl)
        settings = {"gemm_dtype": case.gemm_dtype, "kv_dtype": case.kv_dtype}
        if key not in self._costs:
            bare = with_overhead(case.engine)
            cost = engine_step_cost(
                case.arch, case.hardware, bare, case.layout, gemm_dtype=case.gemm_dtype, kv_dtype=case.kv_dtype,
                typical_context=case.isl + case.osl / 2.0,
            )  # fmt: skip
            slots = max_running(
                case.arch, case.hardware, bare, case.layout, case.isl, case.osl,
                gemm_dtype=case.gemm_dtype, kv_dtype=case.kv_dtype,
            )  # fmt: skip
            self._costs[key] = (cost, float(slots))
        found = self._costs[key]
        replica = Replica.of(case.arch, case.hardware, case.engine, case.layout, **settings)
        return overheads_added(found[0], replica), found[1]


def overheads_added(cost: EngineStepCost, replica: Replica) -> EngineStepCost:
    """A bare cost with the scale and host times of the replica's engine."""
    own = replica.engine.overhead
    found = scaled(cost, own.kernel_scale)
    return replace(
        found,
        decode_per_kv_token_s=found.decode_per_kv_token_s + cached_token_held_s(replica),
        host_s=found.host_s + fixed_overhead_s(replica.engine, replica.arch),
        host_per_request_s=found.host_per_request_s + own.per_request,
    )


def _check(case: ServingCase, slots: float) -> None:
    """Requests that overfill the cache must queue; refuse a row whose time to first token shows that none did."""
    ttft, tpot = case.row.number("measured_ttft_ms"), case.row.number("measured_tpot_ms")
    queued = case.mode == "online_concurrency" and case.load > 2.5 * slots
    if queued and ttft and tpot and ttft < 0.2 * case.osl * tpot:
        raise SpecError("more requests than fit the cache, yet no queueing in the published time to first token")


def serve(case: ServingCase, table: CostTable) -> Served:
    """What the clients of this case see."""
    cost, slots = table.cost(case)
    _check(case, slots)
    engine = case.engine
    budget = float(engine.token_budget)
    if case.mode == "static_batch":
        return static_batch(cost, case.load, case.isl, case.osl, token_budget=budget)
    slots = max(float(np.floor(slots)), 1.0)
    if case.mode == "online_rate":
        sent = _requests_sent(case.row) * case.devices / case.row.count("n_gpus", case.devices)
        return open_loop(cost, case.load, case.isl, case.osl, max_running=slots, token_budget=budget, sent=sent)
    load, share = case.load, engine.overhead.interference
    if case.mode == "offline":
        # requests that all fit are prefilled one after the other and then decode: a request waits for half of them
        share = share * (0.5 if load <= slots else 1.0)
        load = min(load, slots)
    return closed_loop(
        cost, load, case.isl, case.osl,
        max_running=slots, token_budget=budget, chunked=engine.chunked_prefill, interference=share,
    )  # fmt: skip
