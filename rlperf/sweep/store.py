"""Where a sweep keeps its work: one file per task, named by a hash of all that decides its content.

A task's file is written whole or not at all, so a sweep that was killed goes on where it stopped: what is there is not
done again, and only files that the sweep's own tasks name are merged. The hash covers the settings of the points, the
job, every file that the job names, the profiles and calibrations on the search path, and the code.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlperf.errors import Problem, SpecError
from rlperf.layout import IntArray
from rlperf.specs.profiles import PACKAGE, search_path
from rlperf.specs.reader import is_file, is_folder, reading
from rlperf.specs.writer import STALE_S, write_atomic
from rlperf.sweep.columns import Column, columns_of, columns_text
from rlperf.sweep.space import Group
from rlperf.sweep.spec import Checked
from rlperf.version import __version__

if TYPE_CHECKING:
    import polars as pl

FORMAT = 2
"""Version of a task's file."""
CHUNK = 100_000
"""Points of a finished sweep that are in memory at once while they are put in order."""
NAMED = ("architecture", "cluster", "workload", "framework", "engine")
"""Fields whose text may be the path of a file."""


@cache
def code_digest() -> str:
    """Hash of rlperf's own source, so that no result of other code is taken for one of this."""
    found = hashlib.sha256(__version__.encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def inputs_digest(checked: Checked) -> str:
    """Hash of the profiles that can be found and of every file that the job or an axis names."""
    found = hashlib.sha256(str(FORMAT).encode())
    for root in search_path(checked.folder):
        own = checked.folder is not None and root == checked.folder
        # of a job's own folder only what is laid out as profiles belongs to it
        patterns = ("devices/*", "links/*", "clusters/*", "architectures/*", "calibrations/*/*") if own else ("**/*",)
        for path in sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()}):
            found.update(path.name.encode() + path.read_bytes())
    for path in sorted(_named_files(checked)):
        found.update(str(path.name).encode() + path.read_bytes())
    return found.hexdigest()


def _named_files(checked: Checked) -> set[Path]:
    """Files, and files in folders, that a field of the job or a value of the sweep names."""
    texts: set[str] = set()

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, str(key))
        elif isinstance(value, list | tuple):
            for inner in value:
                walk(inner, name)
        elif isinstance(value, str) and name in NAMED:
            texts.add(value)

    walk(checked.base, "")
    for entry in checked.entries:
        for path, value in entry:
            walk(value, path.rpartition(".")[2])
    for path, values in checked.axes:
        walk(values, path.rpartition(".")[2])
    found: set[Path] = set()
    for text in texts:
        target = Path(text).expanduser()
        target = target if checked.folder is None or target.is_absolute() else checked.folder / target
        if is_file(target):
            found.add(target)
        elif is_folder(target):
            found.update(path for path in target.rglob("*") if path.is_file())
    return found


@dataclass(frozen=True)
class SweepTask:
    """Some groups that one process evaluates in one go; ``key`` names its file."""

    key: str
    groups: tuple[Group, ...]

    @property
    def ids(self) -> IntArray:
        """Index of each of its points in the sweep."""
        return np.concatenate([group.ids for group in self.groups])

    @property
    def points(self) -> int:
        """Points of the task."""
        return sum(len(group.ids) for group in self.groups)


def task_of(groups: Iterable[Group], context: str) -> SweepTask:
    """A task with its name; ``context`` is the hash of everything that its groups share."""
    groups = tuple(groups)
    found = hashlib.sha256(context.encode())
    for group in groups:
        said = [group.common, group.fields, len(group.ids), [coded.choices for coded in group.values]]
        found.update(json.dumps(said, sort_keys=True, default=str).encode())
        for numbers in (group.ids, *(coded.code for coded in group.values)):
            found.update(np.ascontiguousarray(numbers, dtype="<i8").tobytes())
    return SweepTask(found.hexdigest()[:32], groups)


def context_digest(checked: Checked) -> str:
    """Hash of what all tasks of a sweep share."""
    text = json.dumps([checked.base, checked.sweep.method, checked.varied], sort_keys=True, default=str)
    return hashlib.sha256((text + inputs_digest(checked) + code_digest()).encode()).hexdigest()


@dataclass(frozen=True)
class Store:
    """The folder of a sweep: ``parts/`` while it runs, results and the meaning of their columns in the end."""

    folder: Path

    @classmethod
    def open(cls, folder: Path) -> Store:
        """The folder, made where it is missing; left-overs of a write that was cut off are removed."""
        if folder.exists() and not folder.is_dir():
            raise SpecError(Problem("is a file, a folder is due", str(folder)))
        try:
            (folder / "parts").mkdir(parents=True, exist_ok=True)
            for left in [*folder.glob(".*.part"), *(folder / "parts").glob(".*.part")]:
                if time.time() - left.stat().st_mtime > STALE_S:
                    left.unlink(missing_ok=True)
        except OSError as error:
            raise SpecError(Problem(f"cannot be written: {error.strerror or error}", str(folder))) from error
        return cls(folder)

    def path(self, key: str) -> Path:
        """File of a task."""
        return self.folder / "parts" / f"{key}.parquet"

    def has(self, task: SweepTask) -> bool:
        """Whether a task's rows are there, all of them: a file that was cut off or overwritten is made again."""
        import polars as pl

        path = self.path(task.key)
        if not is_file(path):
            return False
        try:
            with reading(path):
                points = pl.read_parquet(path, columns=["point"], glob=False)["point"].to_numpy()
                return np.array_equal(np.sort(points), np.sort(task.ids))
        except SpecError:
            return False

    def put(self, key: str, content: bytes) -> None:
        """Write a task's rows."""
        write_atomic(self.path(key), content)

    def merge(self, checked: Checked, tasks: Iterable[SweepTask]) -> Path:
        """All rows of a sweep in the order of its points, written as Parquet and CSV with their columns' meaning.

        `CHUNK` points at a time are in memory, read from the parts that have any of them.
        """
        spans = [(int(task.ids.min()), int(task.ids.max()), self.path(task.key)) for task in tasks]
        chunks: list[Path] = []
        try:
            write_atomic(self.folder / "results.csv", self._ordered(spans, checked.points, chunks))
            target = self.folder / "results.parquet"
            write_atomic(target, chunks[0].read_bytes() if len(chunks) == 1 else self._joined(chunks))
        finally:
            for chunk in chunks:
                chunk.unlink(missing_ok=True)
        write_atomic(self.folder / "columns.csv", columns_text(columns_of(checked)))
        given = {**checked.sweep.model_dump(mode="json"), "job": checked.base}
        write_atomic(self.folder / "sweep.json", json.dumps(given, indent=1, default=str) + "\n")
        return target

    def _ordered(self, spans: list[tuple[int, int, Path]], points: int, chunks: list[Path]) -> Iterator[bytes]:
        """The table as CSV, chunk by chunk in the order of points; each chunk is left as Parquet and named in
        ``chunks``. ``spans``: smallest and largest point of each part, and its file."""
        import polars as pl

        for start in range(0, points, CHUNK):
            rows = []
            for path in [path for low, high, path in spans if low < start + CHUNK and high >= start]:
                with reading(path):
                    found = pl.read_parquet(path, glob=False)
                rows.append(found.filter(pl.col("point").is_between(start, start + CHUNK - 1)))
            frame = pl.concat(rows).sort("point")
            chunks.append(self.folder / "parts" / f".{start}.chunk.part")
            chunks[-1].write_bytes(parquet(frame))
            yield frame.write_csv(include_header=start == 0).encode()

    def _joined(self, chunks: list[Path]) -> Iterator[bytes]:
        """Chunks as one Parquet file, a row group each."""
        import polars as pl

        path = self.folder / "parts" / ".joined.part"
        chunks.append(path)
        pl.scan_parquet(chunks[:-1], glob=False).sink_parquet(
            path, compression="zstd", statistics=False, row_group_size=CHUNK
        )
        with path.open("rb") as stream:
            yield from iter(partial(stream.read, 1 << 24), b"")


def parquet(frame: pl.DataFrame) -> bytes:
    """A frame as Parquet."""
    stream = BytesIO()
    frame.write_parquet(stream, compression="zstd", statistics=False)
    return stream.getvalue()


def frame_of(values: Mapping[str, Sequence[Any]], columns: Iterable[Column], height: int) -> pl.DataFrame:
    """Values by column as a frame of ``height`` rows with fixed columns and types; what is not a number is empty, what
    is no text in a column of text stands as JSON, and a column without values is empty."""
    import polars as pl

    types: dict[str, Any] = {"int": pl.Int64, "float": pl.Float64, "text": pl.String}
    made = []
    for column in columns:
        given = values.get(column.name)
        if given is None:
            made.append(pl.Series(column.name, [None], dtype=types[column.kind]).new_from_index(0, height))
            continue
        if column.kind == "text" and not isinstance(given, np.ndarray):
            given = [v if v is None or isinstance(v, str) else json.dumps(v) for v in given]
        elif column.kind == "float" and not isinstance(given, np.ndarray):
            given = [None if v is None else float(v) for v in given]
        found = pl.Series(column.name, given, strict=False).cast(types[column.kind])
        made.append(found.fill_nan(None) if column.kind == "float" else found)
    return pl.DataFrame(made)
