"""Per-request logs of a serving engine: read a folder, replay its arrivals through the event simulator.

A folder holds ``meta.json`` (model, engine settings; optionally the cache size and the device) and ``requests.jsonl``
(per request: input_toks, output_toks, arrival_time, queued_ts, scheduled_ts, first_token_ts, last_token_ts).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlperf.cost.engine_memory import engine_limits
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.cost.inference import engine_step_cost, scaled
from rlperf.errors import Problem, SpecError
from rlperf.layout import FloatArray, Layout
from rlperf.sim.rollout import EngineOptions, Trajectories, simulate_replica
from rlperf.specs.calibration import Spread, load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import architecture_reading, load_architecture, load_device, profile_names
from rlperf.specs.reader import parse_json, read_text, reading
from rlperf.units import MOST, MOST_COUNT

COLUMNS = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")


@dataclass(frozen=True, eq=False)
class RequestLog:
    """Requests of one engine run, in the order of the file; times are seconds after the first arrival.

    Attributes
    ----------
    names : request ids
    trajectories : one turn each, with arrival times
    first_token_s, last_token_s : recorded [s] ``[requests]``
    meta : settings of the run
    folder : where it was read
    """

    names: tuple[str, ...]
    trajectories: Trajectories
    first_token_s: FloatArray
    last_token_s: FloatArray
    meta: Mapping[str, Any]
    folder: Path

    @property
    def measured(self) -> RequestTimes:
        """Latency, TTFT and TPOT as recorded."""
        arrival, tokens = self.trajectories.arrival_s, self.trajectories.response_tokens
        return RequestTimes.of(arrival, self.first_token_s, self.last_token_s, tokens.astype(np.float64))


@dataclass(frozen=True, eq=False)
class RequestTimes:
    """What a client sees of each request [s] ``[requests]``; TPOT is not a number for responses of one token."""

    latency_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray

    @classmethod
    def of(cls, arrival: FloatArray, first: FloatArray, last: FloatArray, tokens: FloatArray) -> RequestTimes:
        """From arrival, first and last token, and tokens generated."""
        further = np.where(tokens > 1, tokens - 1.0, np.nan)
        return cls(last - arrival, first - arrival, (last - first) / further)


def read_request_log(folder: Path | str) -> RequestLog:
    """Read a folder of a request log.

    Wall clock (arrival_time) and the engine's clock (the others) are aligned at the request that was queued fastest:
    its arrival and queueing are taken as one moment.

    Raises
    ------
    SpecError : every missing file, damaged line and missing field
    """
    root, problems = Path(folder), list[Problem]()
    meta = _read_meta(root / "meta.json", problems)
    rows, names = _read_requests(root / "requests.jsonl", problems)
    if problems:
        raise SpecError(problems)
    table = dict(zip(COLUMNS, np.array(rows).T, strict=True))
    arrival = table["arrival_time"] + (table["queued_ts"] - table["arrival_time"]).min()
    start = arrival.min()
    trajectories = Trajectories.of(table["input_toks"], table["output_toks"], arrival_s=arrival - start)
    first, last = table["first_token_ts"] - start, table["last_token_ts"] - start
    return RequestLog(tuple(names), trajectories, first, last, meta, root)


def _read_meta(path: Path, problems: list[Problem]) -> dict[str, Any]:
    try:
        meta = parse_json(read_text(path), path)
    except SpecError as error:
        problems += error.problems
        return {}
    if not isinstance(meta, dict) or "model" not in meta:
        problems.append(Problem("field 'model' is missing", str(path)))
        return {}
    return meta


def _read_requests(path: Path, problems: list[Problem]) -> tuple[list[list[float]], list[str]]:
    rows: list[list[float]] = []
    names: list[str] = []
    try:
        lines = read_text(path).splitlines()
    except SpecError as error:
        problems += error.problems
        return rows, names
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            with reading(path, at):
                record = parse_json(line, path, at)
                rows.append([_number(record, key) for key in COLUMNS])
                names.append(str(record.get("request_id", at)))
        except SpecError as error:
            problems += error.problems
    if not rows and not problems:
        problems.append(Problem("no requests in this file", str(path)))
    return rows, names


def _number(record: Mapping[str, Any], key: str) -> float:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise ValueError(f"field {key!r} must be a number of at least 0, not {value!r:.40}")
    return float(value)


@dataclass(frozen=True, eq=False)
class ReplaySetup:
    """What a log is replayed with: the engine's cost and limits, the interval, what had to be assumed."""

    cost: EngineStepCost
    limits: EngineLimits
    options: EngineOptions
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
    settings = log.meta.get("engine_kwargs") or {}
    arch = load_architecture(str(log.meta["model"]))
    assumed += filter(None, [architecture_reading(str(log.meta["model"])).note])
    hardware = load_hardware(_device(log, assumed))
    engine = load_engine_calibration("vllm")
    layout = Layout.of(tensor_parallel=_count(settings.get("tensor_parallel_size", 1)))
    final = log.trajectories.final_tokens
    cost = engine_step_cost(arch, hardware, engine, layout, typical_context=float(final.mean()))
    cache = log.meta.get("kv_cache") or {}
    if not cache.get("num_kv_tokens"):
        assumed.append("cache size (from the device's memory and the engine's profile)")
    usual = engine_limits(arch, hardware, engine, layout)
    limits = EngineLimits(
        kv_tokens=float(_count(cache.get("num_kv_tokens") or usual.kv_tokens, MOST)),
        max_running=_count(settings.get("max_num_seqs") or usual.max_running),
        token_budget=_count(settings.get("max_num_batched_tokens") or usual.token_budget),
        block_tokens=_count(cache.get("block_size") or usual.block_tokens),
        chunked_prefill=True,
        prefix_caching=bool(cache.get("enable_prefix_caching", True)),
        watermark=0.0,
    )
    calibration = hardware.calibration
    # A request's time is the sum of many operators, whose errors partly cancel: the square root of one operator's
    # spread. A relative's constants err all in the same direction, so there they keep their full width.
    gemm = next((fit.quality.spread for fit in calibration.gemm if fit.dtype == "bf16"), calibration.spread)
    spread = calibration.spread if calibration.extrapolated else gemm.widened(0.5)
    names = f"{calibration.id}, {engine.id}"
    options = EngineOptions(async_scheduling=_async_scheduling(log, engine.async_scheduling, assumed))
    return ReplaySetup(cost, limits, options, spread, names, calibration.extrapolated, tuple(assumed))


def _count(value: Any, most: float = MOST_COUNT) -> int:
    number = int(value)
    if not 1 <= number <= most:
        raise ValueError(f"{value!r:.40} is no count")
    return number


def _async_scheduling(log: RequestLog, usual: bool, assumed: list[str]) -> bool:
    """As the resolved configuration says; otherwise the profile's default, which vLLM has since 0.14."""
    resolved = (log.meta.get("resolved_config") or {}).get("scheduler_config") or {}
    if "async_scheduling" in resolved:
        return bool(resolved["async_scheduling"])
    version = re.match(r"(\d+)\.(\d+)", str(log.meta.get("vllm_version", "")))
    default = usual and (version is None or (int(version[1]), int(version[2])) >= (0, 14))
    assumed.append(f"async_scheduling={default} (default of the version)")
    return default


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


def replay(log: RequestLog, setup: ReplaySetup, factor: float = 1.0) -> RequestTimes:
    """What a client would see of each request, with every cost ``factor`` times as long."""
    cost = setup.cost if factor == 1.0 else scaled(setup.cost, factor)
    timeline = simulate_replica(log.trajectories, cost, setup.limits, options=setup.options)
    tokens = log.trajectories.response_tokens.astype(np.float64)
    return RequestTimes.of(log.trajectories.arrival_s, timeline.first_token_s, timeline.finish_s, tokens)
