"""Files are written whole or not at all, and so is a folder of files that belong together."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rlperf.errors import Problem, SpecError

STALE_S = 600.0
"""Half-written work of this age belongs to nobody any more; younger may be another process's."""
MOST_CARRIED = 1000
"""Files of others that a folder's exchange takes along; a folder with more is written file by file."""
_AT_FDCWD, _EXCHANGE = -100, 2
_EXPORTS = re.compile(r"EXPORT\.md|run_all\.sh|(config|phase_\d+)(_[a-z]+)?\.(yaml|sh)")


def write_atomic(path: Path | str, content: str | bytes | Iterable[bytes], *, executable: bool = False) -> Path:
    """Write ``content`` (whole, or part after part) to ``path`` through a temporary file beside it and a rename;
    parents are made."""
    target = Path(path)
    parts = [content.encode()] if isinstance(content, str) else [content] if isinstance(content, bytes) else content
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.writelines(parts)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.chmod((0o777 if executable else 0o666) & ~_umask())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return target


def check_folder(folder: Path) -> None:
    """That a folder is none of another kind and can be made and written, as far as can be told before the work."""
    with _writing(folder):
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise SpecError(Problem("is a file, a folder is due", str(there)))
    if not os.access(there, os.W_OK | os.X_OK):
        raise SpecError(Problem("cannot be written: Permission denied", str(there)))


def write_folder(
    target: Path | str, files: Mapping[str, str | bytes], mine: Callable[[str], bool] = lambda _: True
) -> tuple[Path, ...]:
    """Make a folder hold ``files`` (path below it -> content), all at once; scripts (``.sh``) are executable.

    The files are written to a new folder beside it, which then takes its place in one step: whenever the process ends,
    the folder is the old one or the new one, and of two processes that write it the last wins with all its files.
    ``mine`` tells by its path below the folder whether a file of an earlier writing goes; files of others stay. Where a
    folder cannot be exchanged (the current one, a mount point), files are written one by one.

    Raises
    ------
    SpecError : it is a file, or the disk is full or read-only; the folder is then as it was
    """
    folder = Path(target)
    check_folder(folder)
    with _writing(folder):
        real = folder.resolve()
        real.parent.mkdir(parents=True, exist_ok=True)
        _sweep_left_overs(real)
        kept = _others(real, files, mine)
        if kept is None or Path.cwd().is_relative_to(real) or not os.access(real.parent, os.W_OK) or real.is_mount():
            _one_by_one(real, files, mine)
        else:
            _exchanged(real, files, kept)
    return tuple(folder / name for name in files)


def is_export(name: str) -> bool:
    """Whether a file has a name that an export gives: those of an earlier one go when a folder is written anew.

    >>> is_export("phase_02.sh"), is_export("config_accelerate.yaml"), is_export("data.yaml")
    (True, True, False)
    """
    return _EXPORTS.fullmatch(name) is not None


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpecError(Problem(f"cannot be written: {error.strerror or error}", str(target))) from error


def _others(folder: Path, files: Mapping[str, str | bytes], mine: Callable[[str], bool]) -> list[str] | None:
    """Files of others below the folder; None where there are too many, or what is no plain file."""
    found: list[str] = []
    for path in folder.rglob("*") if folder.is_dir() else ():
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()) or len(found) >= MOST_CARRIED:
            return None
        if path.is_file() and name not in files and not mine(name):
            found.append(name)
    return found


def _exchanged(folder: Path, files: Mapping[str, str | bytes], kept: list[str]) -> None:
    """Everything into a new folder beside it, and the two exchanged."""
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part"))
    try:
        for name, content in files.items():
            write_atomic(made / name, content, executable=name.endswith(".sh"))
        for name in kept:
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                (made / name).hardlink_to(folder / name)
            except OSError:
                shutil.copy2(folder / name, made / name)
        made.chmod(folder.stat().st_mode & 0o777 if folder.exists() else 0o777 & ~_umask())
        if not _swap(made, folder):
            _one_by_one(folder, files, lambda name: name not in kept)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _swap(made: Path, folder: Path) -> bool:
    """Put ``made`` in the place of ``folder`` in one step, what stood there in its; False where the system cannot."""
    with suppress(OSError):
        made.rename(folder)  # there is none yet, or an empty one
        return True
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux
    if rename is None:
        return False
    return int(rename(_AT_FDCWD, os.fsencode(made), _AT_FDCWD, os.fsencode(folder), _EXCHANGE)) == 0


def _one_by_one(folder: Path, files: Mapping[str, str | bytes], mine: Callable[[str], bool]) -> None:
    """Each file whole; then what is left of an earlier writing goes."""
    for name, content in files.items():
        write_atomic(folder / name, content, executable=name.endswith(".sh"))
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name not in files and mine(name) and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


def _sweep_left_overs(folder: Path) -> None:
    """Remove what a write of this folder left that was killed long ago."""
    for left in folder.parent.glob(f".{folder.name}.*.part"):
        with suppress(OSError):
            if left.is_dir() and time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
