"""PolyTrace files, folders and archives into one neutral recording: streaming, every problem with file and line."""

from __future__ import annotations

import codecs
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from rlperf.errors import Problem, SpecError
from rlperf.specs.given import as_path
from rlperf.specs.reader import MOST_BYTES, parse_json, reading
from rlperf.units import MOST
from rlperf.workload.caps import infer_cap
from rlperf.workload.formats import DamagedError, LengthColumns, incomplete_groups, multi_turn, packed_lengths
from rlperf.workload.lengths import Int, LengthTable, empty
from rlperf.workload.records import FilterBatch, Recording, RewardTiming, ToolLatency
from rlperf.workload.tables import NEEDED, PLAIN

Progress = Callable[[int, int], None]  # (bytes read, bytes in all, 0 where unknown)
Path_ = Path | str
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".log", ".csv", ".tsv", ".parquet")
TO_FILE = "write a table with write_csv or to_csv, and name the file"
_ARCHIVES = (".tar.gz", ".tgz", ".tar")
_STEP = re.compile(r"step_(\d+)\.jsonl$")
_TOOL_LINE = re.compile(r"Step\s*(\d+), Request ID: ([^,]+), Tool: ([^,]+), Latency: ([0-9.eE+-]+) seconds")
_MOST_PROBLEMS = 1000
_TEXT = ("output", "response", "completion")
MOST_LINE = 1 << 26
"""A record of this many bytes is none [bytes]."""


@dataclass
class _Sink:
    """What has been read so far, over all files."""

    columns: LengthColumns = field(default_factory=LengthColumns)
    tables: list[LengthTable] = field(default_factory=list)
    rewards: list[RewardTiming] = field(default_factory=list)
    filters: list[FilterBatch] = field(default_factory=list)
    latencies: list[ToolLatency] = field(default_factory=list)
    distributions: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the file being read: line -> plain record
    problems: list[Problem] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # columns of plain records
    progress: Progress | None = None
    done: int = 0
    total: int = 0

    def problem(self, message: str, file: str, line: int | None = None, suggestion: str | None = None) -> None:
        self.problems.append(Problem(message, file, line, suggestion))

    def table(self, table: LengthTable, problems: Sequence[Problem]) -> None:
        self.problems += problems
        if table.n:
            self.tables.append(table)

    def advance(self, size: int) -> None:
        self.done += size
        if self.progress is not None:
            self.progress(self.done, self.total)


def read_recording(
    paths: Path_ | Sequence[Path_],
    *,
    skip_damaged: bool = False,
    progress: Progress | None = None,
    max_response_tokens: int | None = None,
) -> Recording:
    """Read every PolyTrace format, told apart by content.

    paths                files, folders (searched recursively) or .tar.gz archives of them
    skip_damaged         leave damaged records and incomplete prompt groups out, and list them in `skipped`; without it
                         a `SpecError` lists them all
    progress             called with (bytes read, bytes in all)
    max_response_tokens  cap of the recording [tokens], where the files do not state it; None: stated by the records, or
                         inferred from the pile of responses of one length (`infer_cap`)
    """
    several = isinstance(paths, Iterable) and not isinstance(paths, Path | str) and not hasattr(paths, "columns")
    each: Iterable[object] = cast(Iterable[object], paths) if several else [paths]
    listed = [as_path(path, "recording", TO_FILE) for path in each]
    if not listed:
        raise SpecError("no files to read: name at least one PolyTrace file, folder or archive")
    sink = _Sink(progress=progress)
    found = [file for path in listed for file in _expand(path, sink)]
    sink.total = sum(f.stat().st_size for f in found)
    for file in found:
        _read_file(file, sink)
    return _finish(sink, skip_damaged, max_response_tokens)


def _expand(path: Path, sink: _Sink) -> list[Path]:
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith((*_SUFFIXES, *_ARCHIVES)))
        if not inside:
            sink.problem("no PolyTrace files in this folder", str(path), None, f"looked for {', '.join(_SUFFIXES)}")
        return sorted(inside, key=_natural)
    if not path.exists():
        sink.problem("no such file or folder", str(path))
        return []
    return [path]


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", str(path))]


def _read_file(path: Path, sink: _Sink) -> None:
    name = str(path)
    sink.files.append(name)
    try:
        with reading(path):
            _read_form(path, name, sink)
    except SpecError as error:
        sink.problems.extend(error.problems)


def _read_form(path: Path, name: str, sink: _Sink) -> None:
    if name.endswith(_ARCHIVES):
        _read_archive(path, sink)
    elif name.endswith((".csv", ".tsv", ".parquet")):
        from rlperf.workload.tables import read_frame, sound_rows

        frame = read_frame(path)
        sink.unread.update(set(frame.columns) - {*PLAIN})
        sink.table(*sound_rows(frame, name))
        sink.advance(path.stat().st_size)
    elif name.endswith(".gz"):
        with gzip.open(path, "rb") as stream:
            _read_stream(name.removesuffix(".gz"), stream, sink)
    else:
        with path.open("rb") as stream:
            _read_stream(name, stream, sink)


def _lines(stream: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; a compressed file may unpack to one line that no memory holds."""
    for number, raw in enumerate(iter(partial(stream.readline, MOST_LINE), b""), 1):
        if len(raw) >= MOST_LINE:
            raise ValueError(f"line {number} is longer than {MOST_LINE:,} bytes")
        yield number, raw


def _read_archive(path: Path, sink: _Sink) -> None:
    import tarfile

    sink.advance(path.stat().st_size)
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith((".jsonl", ".json", ".log")):
                stream = archive.extractfile(member)
                if stream is not None:
                    before = sink.progress
                    sink.progress = None  # members are counted through the archive's own size
                    _read_stream(f"{path}!{member.name}", stream, sink)
                    sink.progress = before


def _read_stream(name: str, stream: IO[bytes] | gzip.GzipFile, sink: _Sink) -> None:
    if name.endswith(".log"):
        _read_log(name, stream, sink)
    elif name.endswith(".json"):
        data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_BYTES:,} bytes")
        sink.advance(len(data))
        _read_json(name, data, sink)
    else:
        _read_lines(name, stream, sink)


def _read_lines(name: str, stream: IO[bytes] | gzip.GzipFile, sink: _Sink) -> None:
    match = _STEP.search(name)
    file_step = int(match.group(1)) if match else None
    decode = json.JSONDecoder().decode
    records, pending = 0, 0
    for line, raw in _lines(stream):
        pending += len(raw)
        if pending > 1 << 20:
            sink.advance(pending)
            pending = 0
        text = (raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw).strip()
        if not text:
            continue
        records += 1
        try:
            record = decode(text.decode())
            if type(record) is not dict:
                raise DamagedError("a JSON object is due on every line")
            _dispatch(record, sink, name, line, file_step)
        except DamagedError as reason:
            sink.problem(str(reason), name, line)
        except UnicodeDecodeError:
            sink.problem("not text: the line holds bytes that are no UTF-8", name, line)
        except (ValueError, RecursionError) as error:
            sink.problem(f"not valid JSON: {error}", name, line, _cut_hint(raw))
    sink.advance(pending)
    if sink.rows:
        _plain_rows(name, sink)
    if not records:
        sink.problem("the file is empty", name)


def _plain_rows(name: str, sink: _Sink) -> None:
    """Records of the neutral table's columns, a response a line."""
    import polars as pl

    from rlperf.workload.tables import sound_rows

    lines, rows = np.array(list(sink.rows), np.int64), list(sink.rows.values())
    sink.rows = {}
    try:
        with reading(name):
            sink.table(*sound_rows(pl.DataFrame(rows, infer_schema_length=None), name, lines))
    except SpecError as error:
        sink.problems.extend(error.problems)


def _cut_hint(raw: bytes) -> str | None:
    return None if raw.endswith(b"\n") else "the file ends in the middle of a record: was the recording cut short?"


def _dispatch(record: dict[str, Any], sink: _Sink, name: str, line: int, file_step: int | None) -> None:
    """Which format a record has, by the fields that only this format holds."""
    if any(isinstance(record.get(key), str) for key in _TEXT):
        tokenize = "`rlperf workload convert FILE -o lengths.parquet --tokenizer tokenizer.json`"
        raise DamagedError(f"holds text, not numbers of tokens: count them with {tokenize}")
    if "output" in record:
        packed_lengths(record, sink.columns, name, line, file_step)
    elif "turns" in record:
        multi_turn(record, sink.columns, name, line, file_step)
    elif "reward_time_s" in record:
        sink.rewards.append(RewardTiming.parse(record))
    elif "kept_prompt_indices" in record or "workload_step" in record:
        sink.filters.append(FilterBatch.parse(record))
    elif set(NEEDED) & set(record):
        missing = [key for key in NEEDED if key not in record]
        if missing:
            raise DamagedError(f"field {missing[0]!r} is missing; its fields: {_keys(record)}")
        sink.rows[line] = {key: record[key] for key in PLAIN if key in record}
        sink.unread.update(key for key in record if key not in PLAIN)
    else:
        expected = f"{' and '.join(map(repr, NEEDED))}, or 'output' (packed lengths), 'turns', 'reward_time_s'"
        raise DamagedError(f"not a record of lengths: due are {expected}; its fields: {_keys(record)}")


def _keys(record: dict[str, Any]) -> str:
    return ", ".join(sorted(map(str, record))[:8]) or "none"


def _read_log(name: str, stream: IO[bytes] | gzip.GzipFile, sink: _Sink) -> None:
    records, wrong, before = 0, list[tuple[str, int]](), len(sink.latencies)
    for line, raw in _lines(stream):
        sink.advance(len(raw))
        text = raw.decode("utf-8", "replace").strip()
        if not text:
            continue
        records += 1
        match = _TOOL_LINE.search(text)
        try:
            if match is None:
                raise ValueError
            latency = float(match.group(4))
            if not 0 <= latency <= MOST:
                raise ValueError
            sink.latencies.append(ToolLatency(int(match.group(1)), match.group(3).strip(), latency))
        except ValueError:
            wrong.append((text[:60], line))
    due = "due is Step{step}, Request ID: {uuid}, Tool: {name}, Latency: {x} seconds"
    if not records:
        sink.problem("the file is empty", name)
    elif len(wrong) == records and records > 1 and len(sink.latencies) == before:
        hint = (
            f"{due}; lengths are in rollout dumps, and what a console says of rl_steps is for `explain` and `verdict`"
        )
        sink.problem("holds no tool latency, which a .log is read for", name, None, hint)
    else:
        for text, line in wrong:
            sink.problem(f"not a tool latency: {text!r}", name, line, due)


def _read_json(name: str, data: bytes, sink: _Sink) -> None:
    from rlperf.workload.workload_files import workload_table

    if not data.strip():
        sink.problem("the file is empty", name)
        return
    content = parse_json(data, name)
    if isinstance(content, dict) and ("math_task" in content or "tool_calling_task" in content):
        sink.distributions.append(content)
        return
    sink.table(*workload_table(content, name))


def _finish(sink: _Sink, skip_damaged: bool, cap: int | None) -> Recording:
    cut = incomplete_groups(sink.columns)
    for message, line, _, key in cut:
        sink.problem(message, sink.columns.first_line[key][0], line)
    if sink.problems and (not skip_damaged or any(p.message.startswith("no such file") for p in sink.problems)):
        hint = "" if not skip_damaged else " (these cannot be skipped)"
        raise SpecError(_shortened(sink.problems, hint))
    table, samples = _table(sink, {(key[0], group) for _, _, group, key in cut})
    inferred = False
    caps = sink.columns.caps | {t.max_response_tokens for t in sink.tables if t.max_response_tokens is not None}
    if cap is None and len(caps) == 1:
        cap = next(iter(caps))
    elif cap is None and len(caps) > 1:
        raise SpecError(f"the recordings have different maximum response lengths ({sorted(caps)}): read them apart")
    elif cap is None and table.n:
        cap = infer_cap(table.response_tokens)
        inferred = cap is not None
    if cap is not None and not table.multi_turn and table.n and int(table.response_tokens.max()) > cap:
        longest = int(table.response_tokens.max())
        raise SpecError(f"max_response_tokens is {cap}, but a recorded response has {longest} tokens")
    contexts = sink.columns.context_caps
    return Recording(
        lengths=table.with_cap(cap),
        rewards=tuple(sink.rewards),
        filters=tuple(sink.filters),
        tool_latencies=tuple(sink.latencies),
        distributions=tuple(sink.distributions),
        max_context_tokens=max(contexts) if contexts else None,
        cap_inferred=inferred,
        skipped=tuple(sink.problems),
        skipped_groups=sum("incomplete prompt group" in p.message for p in sink.problems),
        files=tuple(sink.files),
        unread=tuple(sorted(sink.unread)),
        samples_read=samples,
    )


def _shortened(problems: list[Problem], hint: str) -> Iterable[Problem]:
    """One mistake that every line of a file repeats is one problem."""
    alike: dict[tuple[str, str | None], list[Problem]] = {}
    for problem in problems:
        alike.setdefault((problem.message, problem.file), []).append(problem)
    for (message, file), same in list(alike.items())[:_MOST_PROBLEMS]:
        lines = "line" if len(same) == 2 else "lines"
        more = f" (and {len(same) - 1:,} more {lines} like it)" if same[1:] else ""
        yield Problem(message + more, file, same[0].line, same[0].suggestion)
    if len(alike) > _MOST_PROBLEMS:
        yield Problem(f"and {len(alike) - _MOST_PROBLEMS} more problems{hint}")


def _table(sink: _Sink, drop: set[tuple[int, int]]) -> tuple[LengthTable, int]:
    """The length table of all files, without the groups to drop."""
    from rlperf.workload.lengths import concat

    columns = sink.columns
    parts = list(sink.tables)
    if columns.prompt:
        parts.insert(0, _from_columns(columns, drop))
    kept = [p for p in parts if p.n]
    table = concat(p.with_cap(None) for p in kept) if len(kept) > 1 else (kept[0] if kept else empty())
    return table, sum(p.n_trajectories for p in kept)


def _from_columns(columns: LengthColumns, drop: set[tuple[int, int]]) -> LengthTable:
    def ints(values: Any) -> Int:
        return np.frombuffer(values, np.int64) if len(values) else np.zeros(0, np.int64)

    n = len(columns.prompt)
    multi = columns.multi_turn
    if multi and len(columns.turn) != n:
        raise SpecError("single-turn and multi-turn recordings cannot be read into one table: read them apart")
    table = LengthTable(
        prompt_tokens=ints(columns.prompt),
        response_tokens=ints(columns.response),
        group=ints(columns.group),
        rl_step=ints(columns.step),
        turn=ints(columns.turn) if multi else np.zeros(n, np.int64),
        trajectory=ints(columns.trajectory) if multi else None,
        cached_tokens=ints(columns.cached) if multi else None,
        append_tokens=ints(columns.append) if multi else None,
        tool_latency_s=np.frombuffer(columns.latency, np.float64) if multi else None,
    )
    if not drop:
        return table
    width = int(table.group.max()) + 1
    lost = np.array([step * width + group for step, group in drop], np.int64)
    kept = table.where(~np.isin(table.rl_step * width + table.group, lost))
    return _dense(kept)


def _dense(table: LengthTable) -> LengthTable:
    """Groups renumbered densely within each rl_step."""
    from dataclasses import replace

    group = table.group.copy()
    for step in table.steps():
        rows = table.rl_step == step
        group[rows] = np.unique(group[rows], return_inverse=True)[1].reshape(-1)
    return replace(table, group=group)
