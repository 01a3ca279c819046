"""Where a sweep keeps its work: one file per task, named by a hash of all that decides its content.

A task's file is written whole or not at all, so a sweep that was killed goes on where it stopped: what is there is not
done again, and only files that the sweep's own tasks name are merged. The hash covers the settings of the points, the
job, every file that the job names, the profiles and calibrations on the search path, and the code.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlperf.errors import Problem, SpecError
from rlperf.specs.profiles import PACKAGE, search_path
from rlperf.specs.reader import is_file, is_folder, reading
from rlperf.specs.writer import write_atomic
from rlperf.sweep.columns import Column, columns_of, columns_text
from rlperf.sweep.space import Group
from rlperf.sweep.spec import Checked
from rlperf.version import __version__

if TYPE_CHECKING:
    import polars as pl

STALE_S = 600.0
"""A half-written file of this age belongs to nobody any more; a younger one may be another process's."""
FORMAT = 1
"""Version of a task's file."""
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
    def points(self) -> int:
        """Points of the task."""
        return sum(len(group.ids) for group in self.groups)


def task_of(groups: Iterable[Group], context: str) -> SweepTask:
    """A task with its name; ``context`` is the hash of everything that its groups share."""
    groups = tuple(groups)
    content = [[group.common, group.fields, group.ids, group.values] for group in groups]
    text = json.dumps([context, content], sort_keys=True, default=str)
    return SweepTask(hashlib.sha256(text.encode()).hexdigest()[:32], groups)


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
                points = pl.read_parquet(path, columns=["point"], glob=False)["point"].to_list()
                return sorted(points) == sorted(point for group in task.groups for point in group.ids)
        except SpecError:
            return False

    def put(self, key: str, content: bytes) -> None:
        """Write a task's rows."""
        write_atomic(self.path(key), content)

    def merge(self, checked: Checked, tasks: Iterable[SweepTask]) -> pl.DataFrame:
        """All rows of a sweep in the order of its points, written as Parquet and CSV with their columns' meaning."""
        import polars as pl

        parts = []
        for task in tasks:
            with reading(self.path(task.key)):
                parts.append(pl.read_parquet(self.path(task.key), glob=False))
        frame = pl.concat(parts).sort("point")
        write_atomic(self.folder / "results.parquet", parquet(frame))
        write_atomic(self.folder / "results.csv", frame.write_csv())
        write_atomic(self.folder / "columns.csv", columns_text(columns_of(checked)))
        given = {**checked.sweep.model_dump(mode="json"), "job": checked.base}
        write_atomic(self.folder / "sweep.json", json.dumps(given, indent=1, default=str) + "\n")
        return frame


def parquet(frame: pl.DataFrame) -> bytes:
    """A frame as Parquet."""
    stream = BytesIO()
    frame.write_parquet(stream, compression="zstd", statistics=False)
    return stream.getvalue()


def frame_of(rows: list[dict[str, Any]], columns: Iterable[Column]) -> pl.DataFrame:
    """Rows as a frame with fixed columns and types; what is not a number is empty."""
    import polars as pl

    types: dict[str, Any] = {"int": pl.Int64, "float": pl.Float64, "text": pl.String}
    made = {}
    for column in columns:
        values = [row.get(column.name) for row in rows]
        if column.kind == "text":
            values = [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
        elif column.kind == "float":
            values = [None if v is None or v != v else float(v) for v in values]
        made[column.name] = pl.Series(column.name, values, dtype=types[column.kind])
    return pl.DataFrame(made)
