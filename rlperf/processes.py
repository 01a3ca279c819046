"""Independent pieces of work over the cores of this machine, in processes that end with the one that started them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeVar

from rlperf.errors import RlperfError
from rlperf.told import Tell, within

A = TypeVar("A")
B = TypeVar("B")
Asked = TypeVar("Asked", contravariant=True)
Answer = TypeVar("Answer", covariant=True)
FEW = 3
"""Pieces up to which other processes, which first load what this one has loaded, are not worth starting."""
SPARED = 2.0
"""Pieces that they have to spare this one: each works out for itself what pieces have in common, and two cores planned
seven tasks of half a piece each in 38 s of the processor, one in 23."""
_WATCH = "ends with its parent"


class Piece(Protocol[Asked, Answer]):
    """Work on one piece; both travel to another process, so it is a module's function (or a partial of one)."""

    def __call__(self, piece: Asked, /, *, report: Tell) -> Answer: ...


def cores() -> int:
    """Cores that this process may use, of its affinity and container; at most ``LOKY_MAX_CPU_COUNT``."""
    from joblib import cpu_count

    return int(cpu_count())


def over_cores(work: Piece[A, B], pieces: Mapping[str, A], report: Tell, *, each: float = 1.0) -> list[B]:
    """``work`` of every named piece, in their order: over all cores, or one after the other where that costs less.

    ``each`` : what the work of one piece is worth. An error that one of them raises is raised here. What only one
    piece needs belongs into it: what ``work`` itself holds travels with every piece.
    """
    names = list(pieces)
    part, whole = 1.0 / max(len(names), 1), each * len(names)
    few = whole <= FEW or _is_worker()
    if few or whole * (1.0 - 1.0 / min(cores(), len(names))) < SPARED:  # the dearest question last
        told = [within(report, k * part, part, f"{name}: ") for k, name in enumerate(names)]
        return [work(piece, report=own) for piece, own in zip(pieces.values(), told, strict=True)]
    from joblib import Parallel, delayed

    workers = min(cores(), len(names))
    parallel = Parallel(n_jobs=workers, return_as="generator_unordered", batch_size=1)
    found = dict[int, B]()
    with said_if_killed("ask for fewer at once"), _UnderWay(names, workers, report) as under_way:
        numbered = partial(_numbered, work, under_way.folder)
        for index, answer in parallel(
            delayed(worked)(numbered, one, os.getpid()) for one in enumerate(pieces.values())
        ):
            found[index] = answer
            under_way.ended(index)
    return [found[index] for index in range(len(names))]


def _numbered(work: Piece[A, B], folder: Path, one: tuple[int, A]) -> tuple[int, B]:
    return one[0], work(one[1], report=_Note(folder / str(one[0])))


HEARD_S = 0.5
"""Seconds between two looks at how far other processes are."""


class _Note:
    """How far a piece is, in a file that the process which started it reads; not more often than it looks."""

    def __init__(self, file: Path) -> None:
        self._file, self._next = file, 0.0

    def __call__(self, share: float, text: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + HEARD_S / 2.0
            whole = self._file.with_suffix(".new")
            whole.write_text(f"{share} {text}", encoding="utf-8")
            whole.replace(self._file)  # never half a note


class _UnderWay:
    """Tells which pieces are at work, and how far each is, until all have ended."""

    def __init__(self, names: Sequence[str], workers: int, report: Tell) -> None:
        self._names, self._workers, self._report = names, workers, report
        self._done, self._end, self._one = set[int](), threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> _UnderWay:
        self._held = TemporaryDirectory(prefix="rlperf-", ignore_cleanup_errors=True)
        self.folder = Path(self._held.name)
        self._tell()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._held.cleanup()

    def ended(self, index: int) -> None:
        """A piece has its answer."""
        with self._one:
            self._done.add(index)
        self._tell()

    def _listen(self) -> None:
        while not self._end.wait(HEARD_S):
            self._tell()

    def _tell(self) -> None:
        with self._one:
            left = [(index, name) for index, name in enumerate(self._names) if index not in self._done]
            notes = [(name, *self._note(index)) for index, name in left[: self._workers]]
            share = (len(self._done) + sum(done for _, done, _ in notes)) / len(self._names)
            words = ", ".join(f"{name}: {text}" if text else name for name, _, text in notes)
            self._report(share, words or "done")

    def _note(self, index: int) -> tuple[float, str]:
        try:
            share, _, text = (self.folder / str(index)).read_text(encoding="utf-8").partition(" ")
        except FileNotFoundError:  # it has not said anything yet
            return 0.0, ""
        return float(share), text


@contextmanager
def said_if_killed(hint: str) -> Iterator[None]:
    """A worker that the system ends, most often for memory, is an error in words with a hint."""
    from concurrent.futures.process import BrokenProcessPool

    try:
        yield
    except BrokenProcessPool as error:
        raise RlperfError(f"a worker process was killed: out of memory? {hint}") from error


def worked(work: Callable[[A], B], task: A, parent: int) -> B:
    """A task in a worker, which ends with the process that started it, however that ends."""
    if os.getppid() == parent and not _is_worker():
        threading.Thread(target=_end_with, args=(parent,), name=_WATCH, daemon=True).start()
    return work(task)


def _is_worker() -> bool:
    """Whether this process was started for one of these pieces: all cores are busy with the others then."""
    return any(thread.name == _WATCH for thread in threading.enumerate())


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
