"""Step metrics from whatever carries them: consoles, JSON lines, trainer states, tables, TensorBoard event files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlperf.errors import Problem, SpecError
from rlperf.frameworks.logs.consoles import Row, numbers, rows_of_console
from rlperf.frameworks.logs.tfevents import scalars
from rlperf.specs.reader import csv_rows, parse_json, read_text

_STATED = ("step",)
_OWN = ("rollout/step", "train/global_step", "training/global_step", "trainer/global_step", "global_step", "train/step")
_COUNTED = ("Step", "_step")
"""Names of the rl_step: of loggers that say it, of a framework's own count, of wandb's, which counts calls."""
_CHART = ["Wall time", "Step", "Value"]
"""Columns of a chart that TensorBoard lets download."""


def metrics_of(path: Path) -> Iterator[Row]:
    """(rl_step, metrics) of a file or a folder of event files, in the order in which they were written.

    Raises
    ------
    SpecError : a file that cannot be read, or that holds several runs
    """
    if path.is_dir():
        for file in sorted(path.rglob("*tfevents*")):
            yield from scalars(file)
    elif "tfevents" in path.name:
        yield from scalars(path)
    elif path.suffix == ".csv":
        yield from _rows(_table(read_text(path), path))
    elif path.suffix == ".json":
        yield from _json(read_text(path), path)
    elif path.suffix == ".jsonl":
        yield from _rows(_lines(read_text(path), path))
    else:
        yield from rows_of_console(read_text(path))


def _rows(rows: Sequence[Mapping[str, object]]) -> Iterator[Row]:
    """(rl_step, metrics) of rows that each say their rl_step, by one name in the whole file.

    wandb makes a row of every call: one without the framework's own count (TRL's profiled functions) belongs to the
    next that has it, and several of one rl_step are its mean.
    """
    name = next((each for each in (*_STATED, *_OWN, *_COUNTED) if any(_count(row, each) for row in rows)), None)
    if name not in _OWN:
        for index, row in enumerate(rows):
            step = None if name is None else _count(row, name)
            yield (index if step is None else step[0]), numbers(row)
        return
    before: dict[str, list[float]] = {}
    for row in rows:
        step, values = _count(row, name), {k: v for k, v in numbers(row).items() if not np.isnan(v)}
        if step is None:
            for metric, value in values.items():
                before.setdefault(metric, []).append(value)
            continue
        yield step[0], {**{metric: float(np.mean(each)) for metric, each in before.items()}, **values}
        before = {}


def _count(row: Mapping[str, object], name: str) -> tuple[int] | None:
    """The rl_step that a row says under a name; None where it says none."""
    try:
        return None if row.get(name) is None else (int(float(str(row[name]))),)
    except (ValueError, OverflowError):
        return None


def _json(text: str, path: Path) -> Iterator[Row]:
    """Hugging Face trainer state, ``{metric: {step: value}}`` (merged TensorBoard of NeMo-RL), a list of rows, or one
    row (wandb's summary of a run: its last rl_step)."""
    data = parse_json(text, path)
    if isinstance(data, dict) and "log_history" in data:
        data = data["log_history"]
    if isinstance(data, list):
        yield from _rows([row for row in data if isinstance(row, dict)])
        return
    if not isinstance(data, dict):
        return
    for metric, by_step in data.items():
        if isinstance(by_step, dict):
            for step, value in by_step.items():
                if str(step).isdigit() and isinstance(value, int | float):
                    yield int(step), {metric: float(value)}
    if numbers(data):
        yield from _rows([data])


def _lines(text: str, path: Path) -> list[Mapping[str, object]]:
    """JSON lines: verl's file logger ``{"step", "data"}``, or one flat row a step (wandb history).

    A last line that does not end is one that a run was writing.
    """
    rows: list[Mapping[str, object]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, path, number)
        except SpecError:
            if rows and number == len(lines) and not text.endswith("\n"):
                break
            raise
        if isinstance(row, dict):
            data = row.get("data")
            rows.append({**data, "step": row.get("step", number)} if isinstance(data, dict) else row)
    return rows


def _table(text: str, path: Path) -> list[Mapping[str, object]]:
    """CSV with one column a metric; wandb's run prefix ``run - metric`` is dropped.

    TensorBoard's download of a chart has its metric in the file's name: ``run-.-tag-timing_s_gen.csv``.
    """
    lines = list(csv_rows(text, path))
    if len(lines) < 2:
        raise SpecError(Problem("is empty", str(path)))
    head = lines[0][1]
    runs = sorted({name.rpartition(" - ")[0] for name in head} - {""})
    plain = [name.rpartition(" - ")[2] for name in head]
    if plain == _CHART:
        if "-tag-" not in path.stem:
            hint = "keep the name that TensorBoard gives it, as run-NAME-tag-timing_s_gen.csv"
            raise SpecError(Problem("is a chart of TensorBoard that does not say of what", str(path), 1, hint))
        plain[-1] = path.stem.rpartition("-tag-")[2]
    if len(runs) > 1 and len(set(plain)) < len(plain):
        raise SpecError(
            Problem(f"holds {len(runs)} runs ({', '.join(runs[:3])}...)", str(path), 1, "export one run at a time")
        )
    found: list[Mapping[str, object]] = []
    for _, cells in lines[1:]:
        row = zip(plain, cells, strict=False)
        found.append({name: value for name, value in row if name and value not in (None, "")})
    return found
