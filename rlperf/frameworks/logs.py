"""Step metrics of each framework as a `StepLog`: console, file logger, trainer state, TensorBoard and wandb exports."""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlperf.errors import Problem, SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.specs.reader import csv_rows, parse_json, read_text, reading
from rlperf.specs.step_log import StepLog
from rlperf.units import MOST, MOST_COUNT

Metrics = dict[int, dict[str, float]]
"""rl_step -> metric -> value."""

_VERL = re.compile(r"\bstep:(\d+) - (.*)$")
_VERL_PAIR = re.compile(r"(?:^| - )([\w/@.()%+-]+):\s*(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?|nan|inf)")
_SLIME = re.compile(r"\bperf (\d+): (\{.*\})\s*$")
_OPENRLHF = re.compile(r"Global step (\d+): (\{.*\})\s*$")
_NEMO_STEP = re.compile(r"=+\s*Step (\d+)/\d+")
_NEMO_LINE = re.compile(r"•\s*([\w/ ]+?):\s*([\d.]+)s\b")
_AREAL_STEP = re.compile(r"\bEpoch \d+/\d+ Step \d+/\d+ Train step (\d+)", re.IGNORECASE)
_AREAL_CELL = re.compile(r"[│|]\s*([\w/]+)\s*[│|]\s*(-?[\d.]+(?:e[+-]?\d+)?)\s*(?=[│|])")


def read_log(paths: Sequence[Path | str], framework: str | None = None) -> StepLog:
    """Step metrics of one run, from one or several files of any known carrier; the framework is recognised.

    Raises
    ------
    SpecError : a file holds no step metrics that a framework's table knows
    """
    metrics: Metrics = {}
    for path in paths:
        with reading(path):
            for step, values in _metrics_of(Path(path)):
                _plausible(step, values, path)
                finite = {name: value for name, value in values.items() if not np.isinf(value)}
                metrics.setdefault(step, {}).update(finite)
    if not metrics:
        raise SpecError(
            Problem("holds no step metrics", str(paths[0]), suggestion="console log, JSONL, CSV, or tfevents")
        )
    chosen = framework or _recognised(metrics)
    if chosen is None:
        known = sorted({name for values in metrics.values() for name in values})[:5]
        raise SpecError(Problem(f"its metrics ({', '.join(known)} ...) belong to no known framework", str(paths[0])))
    return step_log(metrics, chosen, ", ".join(Path(path).name for path in paths))


_NO_MEMORY = re.compile(r"(?:CUDA|HIP|NPU) out of memory|OutOfMemoryError|CUDA error: out of memory")


def out_of_memory(path: Path | str) -> Problem | None:
    """The line where a log says that a device ran out of memory; None where it does not.

    Only text is searched: event files and tables hold numbers.
    """
    if Path(path).is_dir() or Path(path).suffix not in ("", ".log", ".txt", ".out", ".err"):
        return None
    lines = read_text(path).splitlines()
    found = [(number, match) for number, line in enumerate(lines, 1) if (match := _NO_MEMORY.search(line))]
    if not found:
        return None
    # the line that says how much was asked for tells more than the name of the error before it
    number, match = next((each for each in found if "Tried to allocate" in each[1].string), found[0])
    told = _sentences(match.string[match.start() :].strip()).rstrip(".") + _worker_call(lines[:number])
    hint = "`rlperf audit CONFIG --cluster NAME` says what takes the memory, and what frees it"
    return Problem(f"the run ended out of device memory: {told}", str(path), number, hint)


def _sentences(text: str, most: int = 200) -> str:
    """A text up to the end of its last sentence within ``most`` characters; cut there where it has none.

    >>> _sentences("Tried 2.50 GiB. GPU 3 is full.", 20)
    'Tried 2.50 GiB.'
    """
    if len(text) <= most:
        return text
    end = text.rfind(". ", 0, most)
    return text[: end + 1 if end > 0 else most]


_CALL = re.compile(r"ray::(\w+)\.(\w+)\(\)")
_FRAME = re.compile(r"\bFile \"[^\"]+\", line \d+, in (\w+)")


def _worker_call(lines: Sequence[str]) -> str:
    """Which call of which worker broke off, by the last one that Ray names; else the innermost function of a traceback.

    >>> _worker_call(["E: ray::WorkerDict.update_actor() (pid=1)", "out of memory"])
    '; in update_actor of WorkerDict'
    """
    near = lines[-_NEAR:]
    calls = [match for line in near if (match := _CALL.search(line))]
    if calls:
        return f"; in {calls[-1][2]} of {calls[-1][1]}"
    frames = [match[1] for line in near if (match := _FRAME.search(line))]
    return f"; in {frames[-1]}" if frames else ""


_NEAR = 80
"""Lines before the last of an error that may hold its traceback."""


def _plausible(step: int, values: Mapping[str, float], path: Path | str) -> None:
    """Numbers that a run can print: no rl_step beyond counting, no metric beyond any quantity (NaN is one that failed).

    Infinities are left out, as NaN is: a framework prints both where it divides by nothing.
    """
    if not 0 <= step <= MOST_COUNT:
        raise SpecError(Problem(f"rl_step {step:.4g} is beyond any count", str(path)))
    wrong = next((name for name, value in values.items() if abs(value) > MOST and not np.isinf(value)), None)
    if wrong is not None:
        raise SpecError(Problem(f"{wrong} of rl_step {step} is beyond any quantity", str(path)))


def metric_table(framework: str) -> Mapping[str, str]:
    """Metric -> column of a framework."""
    return framework_facts(framework).metrics


def step_log(metrics: Metrics, framework: str, source: str) -> StepLog:
    """The metrics in neutral words. Several metrics of one column add up (two scoring passes); memory is in GiB."""
    table = metric_table(framework)
    metrics = {step: _plain(values, table) for step, values in metrics.items()}
    steps = [step for step in sorted(metrics) if set(metrics[step]) & set(table)]
    columns: dict[str, np.ndarray] = {}
    for metric, column in table.items():
        values = np.array([metrics[step].get(metric, np.nan) for step in steps])
        if np.isnan(values).all():
            continue
        if column.endswith("_s") and (values < 0).any():
            raise SpecError(Problem(f"{metric} is negative in rl_step {steps[int(np.argmax(values < 0))]}", source))
        if column.endswith("memory_bytes"):
            values = values * 2.0**30
        if column not in columns:
            columns[column] = values
        elif column.endswith("_s"):
            both = np.isnan(columns[column]) & np.isnan(values)
            columns[column] = np.where(both, np.nan, np.nansum([columns[column], values], axis=0))
        else:
            columns[column] = np.where(np.isnan(columns[column]), values, columns[column])
    stages = [values for name, values in columns.items() if name.endswith("_s") and name != "rl_step_s"]
    if "rl_step_s" not in columns and stages:
        columns["rl_step_s"] = np.nansum(stages, axis=0)
    if not np.nansum(columns.get("rl_step_s", np.ones(1))):
        raise SpecError(Problem("none of its rl_steps takes any time: every timer is 0", source))
    return StepLog.of(steps, framework=framework, source=source, **columns)


PREFIX = "train/"
"""What wandb and TensorBoard exports put before the metrics of OpenRLHF and TRL."""


def _plain(values: Mapping[str, float], known: Container[str]) -> dict[str, float]:
    """The metrics under the names of a framework's table."""
    return {
        (name.removeprefix(PREFIX) if name not in known and name.removeprefix(PREFIX) in known else name): value
        for name, value in values.items()
    }


def _recognised(metrics: Metrics) -> str | None:
    """The framework whose table knows most of what the rl_steps print, and something of it."""
    tables = {name: metric_table(name) for name in FRAMEWORKS}
    known = {
        name: sum(len(set(_plain(values, table)) & set(table)) for values in metrics.values())
        for name, table in tables.items()
    }
    best = max((count, name) for name, count in known.items())
    return best[1] if best[0] else None


def _metrics_of(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """(rl_step, metrics) of a file in whichever form it is."""
    if path.is_dir():
        for file in sorted(path.rglob("*tfevents*")):
            yield from _tensorboard(file)
        return
    if "tfevents" in path.name:
        yield from _tensorboard(path)
        return
    text = read_text(path)
    if path.suffix == ".csv":
        yield from _table(text, path)
    elif path.suffix == ".json":
        yield from _json(text, path)
    elif path.suffix == ".jsonl":
        yield from _lines(text, path)
    else:
        yield from _console(text)


# -- carriers ---------------------------------------------------------------------------------------------------------


def _console(text: str) -> Iterator[tuple[int, dict[str, float]]]:
    """Console of verl, slime, OpenRLHF (one line a step), NeMo-RL and AReaL (a block a step)."""
    block: int | None = None
    for line in text.splitlines():
        verl, dump = _VERL.search(line), _SLIME.search(line) or _OPENRLHF.search(line)
        if verl:
            yield int(verl[1]), _numbers(dict(_VERL_PAIR.findall(verl[2])))
        elif dump:
            yield int(dump[1]), _literal_dict(dump[2])
        else:
            started = _NEMO_STEP.search(line) or _AREAL_STEP.search(line)
            block = int(started[1]) if started else block
            nemo = _NEMO_LINE.search(line)
            if block is not None and nemo:
                name = nemo[1].strip().replace(" ", "_").lower()
                full = "total_step_time" if name in ("total_step_time", "total") else name
                yield block, {f"timing/train/{full}": float(nemo[2])}
            elif block is not None:
                cells = _AREAL_CELL.findall(line)
                if cells:
                    yield block, _numbers(dict(cells))


def _literal_dict(text: str) -> dict[str, float]:
    """A printed Python dict of numbers; read as a literal, never evaluated."""
    plain = re.sub(r"\bnp\.\w+\(([^()]*)\)|\btensor\(([^()]*)\)", r"\1\2", text)
    plain = re.sub(r"\b(nan|inf)\b", "None", plain)
    try:
        found = ast.literal_eval(plain)
    except (ValueError, SyntaxError):
        return {}
    return _numbers(found) if isinstance(found, dict) else {}


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    """The numeric ones."""
    found = {}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            continue
        try:
            found[str(name)] = float(value)
        except ValueError:
            continue
    return found


def _json(text: str, path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Hugging Face trainer state, or ``{metric: {step: value}}`` (merged TensorBoard of NeMo-RL), or a list of rows."""
    data = parse_json(text, path)
    if isinstance(data, dict) and "log_history" in data:
        data = data["log_history"]
    if isinstance(data, list):
        for index, row in enumerate(data):
            if isinstance(row, dict):
                yield _step_of(row, index), _numbers(row)
        return
    for metric, by_step in data.items() if isinstance(data, dict) else ():
        if isinstance(by_step, dict):
            for step, value in by_step.items():
                if str(step).isdigit() and isinstance(value, int | float):
                    yield int(step), {metric: float(value)}


def _lines(text: str, path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """JSON lines: verl's file logger ``{"step", "data"}``, or one flat row a step (wandb history)."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        row = parse_json(line, path, number)
        if isinstance(row, dict):
            data = row.get("data")
            yield _step_of(row, number), _numbers(data if isinstance(data, dict) else row)


def _table(text: str, path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """CSV with one column a metric (wandb, TensorBoard); wandb's run prefix ``run - metric`` is dropped."""
    lines = list(csv_rows(text, path))
    if len(lines) < 2:
        raise SpecError(Problem("is empty", str(path)))
    for index, (_, cells) in enumerate(lines[1:]):
        row = dict(zip(lines[0][1], cells, strict=False))
        named = {name.rpartition(" - ")[2]: value for name, value in row.items() if name and value not in (None, "")}
        yield _step_of(named, index), _numbers(named)


def _step_of(row: Mapping[str, object], index: int) -> int:
    for name in ("step", "Step", "_step", "global_step", "training/global_step", "train/step", "rollout/step"):
        value = row.get(name)
        try:
            if value is not None:
                return int(float(str(value)))
        except (ValueError, OverflowError):
            continue
    return index


def _tensorboard(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Scalars of a TensorBoard event file.

    TFRecord framing (length, crc, data, crc) around ``Event`` messages: field 2 = step (varint), field 5 = summary,
    whose field 1 = value {1 = tag, 2 = simple_value (float), 8 = tensor {5 = float_val}}.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(Problem(f"cannot be read: {error.strerror or error}", str(path))) from error
    position = 0
    while position + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        record = data[position + 12 : position + 12 + length]
        position += 16 + length
        if len(record) < length:
            return
        step, values = 0, {}
        for number, value in _fields(record):
            if number == 2 and isinstance(value, int):
                step = value
            elif number == 5 and isinstance(value, bytes):
                values.update(_summary(value))
        if values:
            yield step, values


def _summary(message: bytes) -> dict[str, float]:
    found = {}
    for number, value in _fields(message):
        if number != 1 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, content in _fields(value):
            if inner == 1 and isinstance(content, bytes):
                tag = content.decode("utf-8", "replace")
            elif inner == 2 and isinstance(content, bytes):
                scalar = struct.unpack("<f", content)[0]
            elif inner == 8 and isinstance(content, bytes):
                scalar = _tensor_scalar(content) if scalar is None else scalar
        if tag and scalar is not None:
            found[tag] = float(scalar)
    return found


def _tensor_scalar(message: bytes) -> float | None:
    for number, value in _fields(message):
        if number in (4, 5) and isinstance(value, bytes) and len(value) >= 4:
            return float(struct.unpack_from("<f", value)[0])
    return None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message: varints as int, 32-bit, 64-bit and length-delimited as bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _varint(message, position)
            yield number, value
        else:
            size, position = (
                (_varint(message, position)) if kind == 2 else ({1: 8, 5: 4}.get(kind, len(message)), position)
            )
            yield number, message[position : position + size]
            position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value, shift = 0, 0
    while position < len(message):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, position
