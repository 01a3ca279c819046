"""Per-request logs of a serving engine: what a folder holds; `rlperf.calibrate.requests.replay` predicts it.

A folder holds ``meta.json`` (model, engine settings; optionally the cache size and the device) and ``requests.jsonl``
(per request: input_toks, output_toks, arrival_time, queued_ts, scheduled_ts, first_token_ts, last_token_ts; optionally
what it shares with others: cached_toks, found in the prefix cache as the engine recorded it, or prefix_id and
prefix_toks, a beginning that all requests of one id have).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlperf.errors import Problem, SpecError
from rlperf.layout import FloatArray
from rlperf.sim.rollout import Trajectories
from rlperf.specs.reader import parse_json, read_text, reading
from rlperf.units import MOST, MOST_COUNT

COLUMNS = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
SHARED = ("cached_toks", "prefix_toks")

SAME_S = 1e-5
"""An engine never takes requests off its socket this evenly [s]."""


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
    by_client : queueing was recorded as the arrival itself: the times are the client's, its way to the engine included
    """

    names: tuple[str, ...]
    trajectories: Trajectories
    first_token_s: FloatArray
    last_token_s: FloatArray
    meta: Mapping[str, Any]
    folder: Path
    by_client: bool = False

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
    rows, names, prefixes = _read_requests(root / "requests.jsonl", problems)
    if problems:
        raise SpecError(problems)
    table = dict(zip((*COLUMNS, *SHARED), np.array(rows).T, strict=True))
    later = table["queued_ts"] - table["arrival_time"]
    arrival = table["arrival_time"] + later.min()
    start = arrival.min()
    trajectories = Trajectories.of(table["input_toks"], table["output_toks"], arrival_s=arrival - start)
    trajectories = _sharing(trajectories, table["cached_toks"], table["prefix_toks"], prefixes)
    first, last = table["first_token_ts"] - start, table["last_token_ts"] - start
    return RequestLog(tuple(names), trajectories, first, last, meta, root, by_client=bool(np.ptp(later) < SAME_S))


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


def _read_requests(path: Path, problems: list[Problem]) -> tuple[list[list[float]], list[str], list[str]]:
    """Numbers of every request (`COLUMNS`, then `SHARED` or not a number), its name, and its prefix."""
    rows: list[list[float]] = []
    names: list[str] = []
    prefixes: list[str] = []
    try:
        lines = read_text(path).splitlines()
    except SpecError as error:
        problems += error.problems
        return rows, names, prefixes
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            with reading(path, at):
                record = parse_json(line, path, at)
                numbers = [_number(record, key) for key in COLUMNS]
                numbers += [np.nan if record.get(key) is None else _number(record, key) for key in SHARED]
                rows.append(numbers)
                names.append(str(record.get("request_id", at)))
                prefixes.append(str(record.get("prefix_id", f" {at}")))
        except SpecError as error:
            problems += error.problems
    if not rows and not problems:
        problems.append(Problem("no requests in this file", str(path)))
    return rows, names, prefixes


def _sharing(requests: Trajectories, cached: FloatArray, prefix: FloatArray, names: list[str]) -> Trajectories:
    """What requests find in the prefix cache: as recorded where any was, else what those of one prefix share.

    A prefix without a length is a whole prompt; a request without either shares nothing.
    """
    if not np.isnan(cached).all():
        return replace(requests, cached_tokens=np.nan_to_num(cached).astype(np.int64))
    if len(set(names)) == len(names):
        return requests
    _, group = np.unique(names, return_inverse=True)
    length = np.where(np.isnan(prefix), requests.prompt_tokens, prefix).astype(np.int64)
    return replace(requests, group=group.reshape(-1), shared_tokens=length)


def _number(record: Mapping[str, Any], key: str) -> float:
    value, most = record.get(key), MOST_COUNT if key.endswith("_toks") else MOST
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"field {key!r} must be a number of at least 0 and at most {most:,}, not {value!r:.40}")
    return float(value)
