"""Rows of serving measurements made ready: architecture, hardware, engine, layout, load; and their prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Generic, TypeVar

import numpy as np

from rlperf.calibrate.columns import (
    Guess,
    Reading,
    cell,
    column,
    count,
    derived,
    number,
    one_of,
    positive,
    read,
    stated,
    text,
)
from rlperf.calibrate.serving.drafts import per_token, speculation_of
from rlperf.calibrate.serving.versions import version_of
from rlperf.calibrate.tables import Row
from rlperf.cost.basis import serving_basis
from rlperf.cost.dtypes import dtype_of
from rlperf.cost.engine_memory import engine_memory, max_running, request_bytes, weight_bytes
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.inference import ByTokens, tabulated, with_overhead
from rlperf.cost.replica import Replica
from rlperf.cost.serving import Load, Served, closed_loop, first_token_of_run_s, open_loop, queue_of, static_batch
from rlperf.errors import SpecError
from rlperf.layout import FloatArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.calibration import DeviceCalibration
from rlperf.specs.engine_calibration import EngineCalibration, load_engine_calibration, of_release
from rlperf.specs.hardware import Hardware

Number = TypeVar("Number", float, FloatArray)
MODES = ("single_stream", "static_batch", "online_concurrency", "online_rate", "offline")
CLIENTS = ("single_stream", "online_concurrency", "online_rate")
"""Modes whose requests come from clients over the network; the others hand them to the engine's process."""
OPTIONS = "options of the publication: attention data parallel, experts over all devices"
PRODUCT = "the printed devices are those times the ways of experts, as twins of the row show"
DRAWN = "lengths uniform in 0.8-1.0 of isl/osl"
INFERENCEX = ((1024.0, 1024.0), (1024.0, 8192.0), (8192.0, 1024.0))
"""Printed prompt and generated tokens of the loads of that benchmark [tokens]."""
NEW_PROMPTS = 5.0
"""New prompts of a run per prompt that each client sends, where a benchmark sends the same prompts again; for instance
100 prompts and 20 a client. Told by eight rows of Llama-3.1-8B, see docs/guide/accuracy-inference.md: 1.5 to 5.4."""
EACH = 10.0
"""Requests that each client of a benchmark sends in turn, where a row does not say how many a run has: those of
InferenceX, whose launch scripts set ``--num-prompts`` to ten times ``--max-concurrency`` (from memory: not given)."""
NEEDED = ("architecture", "gpu", "engine", "tensor_parallel", "gemm_dtype", "mode", "isl", "osl")


# -- what stands in where a cell is blank -----------------------------------------------------------------------------


def _engine(case: ServingCase) -> EngineCalibration:
    found = load_engine_calibration(case.row.text("engine"), case.version or None)
    return of_release(case.engines.get(found.id, found), found.release).on(case.hardware.device)


def _hardware(case: ServingCase) -> Hardware:
    found = case.row.hardware()
    return replace(found, calibration=case.constants.get(found.device.name, found.calibration))


def _cache_dtype(case: ServingCase) -> Guess[str]:
    if case.printed_dtype in case.engine.narrow_cache:
        return Guess("fp8", "as the engine's deployments in this dtype")
    return Guess("bf16", "default")


def _gemm_dtype(case: ServingCase) -> str | Guess[str]:
    dtype: str | Guess[str] = case.printed_dtype
    if dtype == "bf16" and case.arch.checkpoint_dtype == "mxfp4":
        # the checkpoint holds the experts alone in mxfp4; bf16 names the other products
        dtype = Guess("mxfp4", "experts, as in their checkpoint")
    name = dtype.value if isinstance(dtype, Guess) else dtype
    unit = dtype_of(name).peak
    if unit in ("fp8", "fp4") and getattr(case.hardware.device.peaks, unit) is None:
        raise SpecError(f"{case.hardware.device.name} has no {name} units")
    return dtype


def _by_options(case: ServingCase) -> bool:
    """Whether the publication's options give every rank its own copy of the attention, whatever its table prints.

    TensorRT-LLM 1.0 prints the devices of a mixture of experts as tensor parallel; its options file sets
    ``enable_attention_dp``, and 1.1 publishes the same throughput as DEP (Qwen3-30B-A3B on two and eight RTX PRO 6000:
    8216 and 3973, then 8409 and 3985 tokens/s per device).
    """
    return bool(case.arch.experts) and case.printed_tensor > 1 and "sets enable_attention_dp" in case.note


def _counted(case: ServingCase) -> int:
    """How often `aic_silicon` counts the devices of a row: once, but where experts are spread over some of them only.

    It prints gpt-oss-120b of TensorRT-LLM on four H200, experts two ways, at the times per token of its own rows of two
    (all 15 within 2.7 %, 11 within 0.6 %; those of four take 11 to 27 % less), on four B200 at that of two (11.05 ms).
    """
    if case.row.group != "aic_silicon":
        return 1
    printed = case.printed_tensor * (cell(case.row, "attention_data_parallel", count) or 1)
    ways = cell(case.row, "expert_parallel", count) or 1
    return ways if ways < printed and printed % ways == 0 else 1


def _attention_tensor(case: ServingCase) -> int | Guess[int]:
    if _by_options(case):
        return Guess(1, OPTIONS)
    times = gcd(case.printed_tensor, _counted(case))
    return Guess(case.printed_tensor // times, PRODUCT) if times > 1 else case.printed_tensor


def _spreads(case: ServingCase) -> bool:
    """Whether the engine is taken to spread experts over the node, with a copy of the attention in each group.

    A reading of `aic_silicon`, whose times hardly depend on the devices that it prints; a user's rows run on theirs.
    """
    blank = case.row.group == "aic_silicon" and not stated(case.row, "attention_data_parallel")
    return blank and bool(case.arch.experts) and case.engine.expert_copies


def _copies(case: ServingCase) -> int | Guess[int]:
    """Attention data parallelism; where not printed what engines do with experts, or what makes the weights fit."""
    if _by_options(case):
        return Guess(case.printed_tensor, OPTIONS)
    if printed := cell(case.row, "attention_data_parallel", count):
        counted = _counted(case)
        times = counted // gcd(case.printed_tensor, counted)  # the tensor takes its part of it
        return Guess(printed // times, PRODUCT) if times > 1 else printed
    if _spreads(case):
        copies = max(case.hardware.cluster.devices_per_node // case.attention_tensor, 1)
        return Guess(copies, "experts over the node")
    at_hand = cell(case.row, "n_gpus", count) or np.inf
    for copies in (1, 2, 4, 8):
        tensor = case.attention_tensor * copies
        if copies > 1 and tensor * case.pipeline > at_hand:
            break
        layout = Layout.of(tensor_parallel=tensor, attention_data_parallel=copies, expert_parallel=tensor)
        memory = engine_memory(
            Replica.of(case.arch, case.hardware, case.engine, layout, case.gemm_dtype, case.kv_dtype)
        )
        if bool(memory.fits):
            return Guess(copies, "holds the weights")
    return Guess(1, "nothing holds the weights")


def _mean_length(case: ServingCase, printed: float) -> float | Guess[float]:
    """Mean tokens of a prompt or an answer: 0.9 of those printed where lengths are drawn from 0.8 to 1 of them.

    Notes of InferenceX's rows say so. `aic_silicon` prints the same three loads of it (see `INFERENCEX`) without the
    lengths drawn; there it is assumed.
    """
    if DRAWN in case.note:
        return 0.9 * printed
    load = case.printed_isl, case.printed_osl
    if case.row.group == "aic_silicon" and case.mode == "online_concurrency" and load in INFERENCEX:
        return Guess(0.9 * printed, DRAWN)
    return printed


def _repeated(case: ServingCase) -> float | Guess[float]:
    """Share of a run's prompts that the prefix cache holds since they were sent before: 1 - `NEW_PROMPTS` / clients.

    Of rows of `aic_silicon` with vLLM 0.12, which cannot have prefilled all their prompts: an 8B on one H200 would have
    done so at 75 % of the data sheet's peak beside its decodes (112 clients of 1000 / 100 tokens).
    """
    if case.row.group == "aic_silicon" and case.engine.engine == "vllm" and case.engine.release == "0.12":
        return Guess(max(1.0 - NEW_PROMPTS / case.load, 0.0), "the same prompts sent again")
    return 0.0


def _each(case: ServingCase) -> float | Guess[float]:
    """Requests that a client sends in turn; only the first token of a closed loop depends on it.

    Infinite where medians are published: the median request is none of those that the clients begin with.
    """
    if not case.closed_loop or not stated(case.row, "measured_ttft_ms") or "medians" in case.note:
        return np.inf
    if np.isfinite(case.requests_sent) and case.concurrency:
        return max(case.requests_sent / case.concurrency, 1.0)
    return Guess(EACH, "as InferenceX sends")


def _given_devices(case: ServingCase) -> int | Guess[int]:
    printed, times = cell(case.row, "n_gpus", count), _counted(case)
    if not printed or times == 1:
        return printed or case.devices
    return Guess(printed // times, PRODUCT)


def _expert(case: ServingCase) -> int | Guess[int]:
    if _by_options(case):
        return Guess(case.tensor, OPTIONS)
    if _spreads(case):
        return Guess(case.tensor, "experts over the node")
    printed = cell(case.row, "expert_parallel", count)
    return printed or (Guess(1, "default") if case.arch.experts else 1)


def _load(case: ServingCase) -> float | Guess[float]:
    """Requests in flight per replica, or requests a second per replica where the mode is online_rate."""
    replicas = case.given_devices / case.devices
    if case.mode == "single_stream":
        return 1.0
    if case.mode == "online_rate":
        found = re.search(r"request rate ([\d.]+)/s", case.note)
        if found is None:
            raise SpecError("online_rate without a request rate in the note")
        return float(found.group(1)) / replicas
    if case.mode == "offline":
        if case.concurrency:
            return case.concurrency / replicas
        return Guess(case.requests_sent / replicas, "batch that fits the cache")
    if case.concurrency is None:
        raise SpecError(f"mode {case.mode} without a concurrency")
    return case.concurrency / replicas


@dataclass(frozen=True)
class ServingCase(Reading):
    """One row: what runs where, under which load, and what had to be filled in.

    ``load`` is requests in flight per replica, or requests per second per replica where the mode is online_rate,
    ``cached`` the tokens of a prompt that the prefix cache has. ``engines`` replaces profiles by id and ``constants``
    those of devices by name, where some are left out. Fields stand in the order in which they are found.
    """

    engines: Mapping[str, EngineCalibration]
    constants: Mapping[str, DeviceCalibration]
    arch: Architecture = derived(lambda case: case.row.architecture())
    hardware: Hardware = derived(_hardware)
    version: str = column(text, lambda case: version_of(case.row), name="engine_version")
    engine: EngineCalibration = derived(_engine)
    printed_dtype: str = column(text, "bf16", name="gemm_dtype")
    kv_dtype: str = column(text, _cache_dtype)
    gemm_dtype: str = derived(_gemm_dtype)
    note: str = column(text, "")
    printed_tensor: int = column(count, 1, name="tensor_parallel")
    attention_tensor: int = derived(_attention_tensor, name="tensor_parallel")
    pipeline: int = column(count, 1, name="pipeline_parallel")
    attention_data: int = derived(_copies, name="attention_data_parallel")
    tensor: int = derived(lambda case: case.attention_tensor * case.attention_data)
    expert: int = derived(_expert, name="expert_parallel")
    devices: int = derived(lambda case: case.tensor * case.pipeline)
    given_devices: int = derived(_given_devices, name="n_gpus")
    mode: str = column(one_of(MODES))
    printed_isl: float = column(positive, name="isl")
    printed_osl: float = column(positive, name="osl")
    isl: float = derived(lambda case: _mean_length(case, case.printed_isl))
    osl: float = derived(lambda case: _mean_length(case, case.printed_osl))
    cached: float = column(number, 0.0, name="cached_tokens")
    concurrency: float | None = column(positive, None)
    load: float = derived(_load, name="concurrency")
    repeated: float = derived(_repeated, name="repeated_prompts")
    each: float = derived(_each, name="requests_of_each_client")
    speculation: str = column(text, lambda case: speculation_of(case.row))

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
    def closed_loop(self) -> bool:
        """Whether as many requests are in flight all the time, more than one."""
        return self.mode == "online_concurrency"

    @property
    def throughput(self) -> str:
        """How a run went that publishes nothing but its throughput; empty where a time per token is published."""
        measured = self.row.number
        rate_only = measured("measured_output_tokens_per_s_per_gpu") and not measured("measured_tpot_ms")
        return self.mode if rate_only else ""

    @property
    def covered(self) -> bool:
        """Whether kernel tables stand behind every operator that matters."""
        return not serving_basis(self.arch, self.hardware, self.engine, gemm_dtype=self.gemm_dtype).extrapolated

    @property
    def requests_sent(self) -> float:
        """Requests of the whole run where the note says so."""
        found = re.search(r"(\d+) requests", self.note)
        return float(found.group(1)) if found else np.inf


def case_of(
    row: Row,
    engines: Mapping[str, EngineCalibration] | None = None,
    constants: Mapping[str, DeviceCalibration] | None = None,
) -> ServingCase:
    """A row as a case; `SpecError` says why it cannot be predicted."""
    return read(ServingCase, row, engines=engines or {}, constants=constants or {})


class CostTable:
    """Engine_step costs of cases, each distinct one computed once."""

    def __init__(self) -> None:
        self._costs: dict[tuple[object, ...], tuple[EngineStepCost, float]] = {}
        self._by_tokens: dict[tuple[str, str, str], ByTokens] = {}

    def bare(self, case: ServingCase, scale: float = 1.0) -> tuple[EngineStepCost, float]:
        """Cost of an engine_step whose kernels take ``scale`` times as long as alone, with no host time; slots."""
        return self._found(case, with_overhead(case.engine, kernel_scale=scale), (scale,))

    def cost(self, case: ServingCase) -> tuple[EngineStepCost, float]:
        """Cost of an engine_step with the engine's overheads, and the requests that fit at once."""
        engine = case.engine.at(
            case.hardware.device.name, case.arch.family, case.arch.name, case.gemm_dtype, case.throughput
        )
        own = engine.overhead
        times = (own.step, own.per_layer, own.per_expert_layer, engine.per_request_s, own.uncaptured, own.kernel_scale)
        return self._found(case, engine, times)

    def _found(
        self, case: ServingCase, engine: EngineCalibration, key: tuple[object, ...]
    ) -> tuple[EngineStepCost, float]:
        where = case.configuration, case.engine.release, case.kv_dtype
        key = (*key, *where, case.speculation, case.isl, case.osl, case.cached)
        if key not in self._costs:
            replica = Replica.of(case.arch, case.hardware, engine, case.layout, case.gemm_dtype, case.kv_dtype)
            if where not in self._by_tokens:
                self._by_tokens[where] = ByTokens.of(replica)
            cost = tabulated(replica, self._by_tokens[where], typical_context=case.isl + case.osl / 2.0)
            cost = per_token(cost, replica, case.speculation)
            slots = float(max_running(replica, case.isl, case.osl))
            self._costs[key] = (cost.behind_prefix(case.cached), slots)
        return self._costs[key]


def _check(case: ServingCase, slots: float) -> None:
    """Refuse what no device holds, and requests that overfill the cache but did not wait for a first token."""
    once = case.load if case.mode == "static_batch" else 1.0
    if slots < once:
        hw = case.hardware
        replica = Replica.of(case.arch, hw, case.engine, case.layout, case.gemm_dtype, case.kv_dtype)
        cached = once / case.attention_data * float(request_bytes(replica, case.isl + case.osl))
        if (held := float(weight_bytes(replica)) + cached) > (has := hw.device.usable_memory):
            raise SpecError(
                f"{case.gemm_dtype} weights of {case.arch.name} and {once:g} x the cache of a request take "
                f"{held / 1e9:.2f} GB of each of {case.devices} {hw.device.name}, which have {has / 1e9:.2f}"
            )
    ttft, tpot = case.row.number("measured_ttft_ms"), case.row.number("measured_tpot_ms")
    queued = case.mode == "online_concurrency" and case.load > 2.5 * slots
    if queued and ttft and tpot and ttft < 0.2 * case.osl * tpot:
        raise SpecError("more requests than fit the cache, yet no queueing in the published time to first token")


@dataclass(frozen=True)
class Asked(Generic[Number]):
    """What is asked of an engine: how requests come, and numbers that are scalars of one case or arrays of many.

    ``many`` is how many come: clients of a closed loop, requests of a batch or queue, arrivals a second. ``sent`` are
    the requests of an open loop, ``each`` those of each client of a closed one, ``front_s`` what a request takes
    outside the engine [s].
    """

    loop: str
    load: Load
    many: Number
    sent: Number
    each: Number
    front_s: Number

    @property
    def kind(self) -> tuple[str, bool, bool]:
        """What those must share that are served together."""
        return self.loop, self.load.chunked, self.load.look_ahead


def asked_of(case: ServingCase, slots: float) -> Asked[float]:
    """What a case asks of an engine whose cache holds ``slots`` of its requests."""
    slots = max(float(np.floor(slots)), 1.0)
    many, share = case.load, 1.0 - case.repeated
    sent = case.requests_sent * case.devices / case.given_devices
    loop = case.mode if case.mode in ("static_batch", "online_rate") else "closed"
    if case.mode == "offline":
        # requests that all fit are prefilled one after the other and then decode: a request waits for half of them
        share = share * (0.5 if many <= slots else 1.0)
        many = slots = min(many, slots)
        if np.isfinite(sent):
            loop, many = "queue", sent
    load = Load(
        isl=max(case.isl - case.cached, 1.0),
        osl=case.osl,
        max_running=slots,
        token_budget=float(case.engine.token_budget),
        chunked=case.engine.chunked_prefill,
        look_ahead=case.engine.schedules_ahead,
        interference=1.0 if loop == "online_rate" else share,
    )
    front = case.engine.front_end + case.engine.tokenising * case.isl if case.mode in CLIENTS else 0.0
    return Asked(loop=loop, load=load, many=many, sent=sent, each=case.each, front_s=front)


def check(case: ServingCase, table: CostTable) -> None:
    """Refuse a case whose requests do not fit, as `serve` does first, at no more than the cost of its kernels."""
    _check(case, table.bare(case)[1])


def serve(case: ServingCase, table: CostTable) -> Served:
    """What the clients of this case see; of a closed loop over the whole run, its start included."""
    cost, slots = table.cost(case)
    _check(case, slots)
    asked = asked_of(case, slots)
    found = served(cost, asked)
    return replace(found, ttft_s=of_run_s(cost, asked, found)) if case.closed_loop else found


def of_run_s(cost: EngineStepCost, asked: Asked[float] | Asked[FloatArray], found: Served) -> FloatArray:
    """Mean time to first token of the runs of closed loops that are ``found`` to be served so [s]."""
    return first_token_of_run_s(cost, found, asked.many, asked.load, each=asked.each) + asked.front_s


def served(cost: EngineStepCost, asked: Asked[float] | Asked[FloatArray]) -> Served:
    """What clients see, of one case or of many whose costs are stacked."""
    if asked.loop == "static_batch":
        return static_batch(cost, asked.many, asked.load)
    if asked.loop == "online_rate":
        return open_loop(cost, asked.many, asked.load, sent=asked.sent).behind(asked.front_s)
    if asked.loop == "queue":
        return queue_of(cost, asked.many, asked.load)
    return closed_loop(cost, asked.many, asked.load).behind(asked.front_s)
