"""What can go wrong, as types.

RlperfError
  SpecError(ValueError)   wrong input; lists every problem with file:line and a suggestion   exit code 2
  InfeasibleError         the input is right, but nothing satisfies it                       exit code 1
  SolverError             the integer program was not solved                                 exit code 3
  ExportError             a plan cannot be written for this framework                        exit code 2

Beside these the command line ends with 70 where rlperf itself is at fault (a traceback), 74 where the machine refuses
(disk full, output closed, out of memory) and 130 where it was interrupted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache


class RlperfError(Exception):
    """Base of every error that rlperf raises on purpose."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what the user gave: what, where, and what to do about it."""

    message: str
    file: str | None = None
    line: int | None = None
    suggestion: str | None = None

    def __str__(self) -> str:
        where = "" if self.file is None else f"{self.file}:{self.line}: " if self.line else f"{self.file}: "
        hint = f" ({self.suggestion})" if self.suggestion else ""
        return f"{where}{self.message}{hint}"


class SpecError(RlperfError, ValueError):
    """The input is wrong. ``problems`` lists everything found, not only the first."""

    def __init__(self, problems: str | Problem | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = Problem(problems)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(frozen=True)
class Rejection:
    """How many candidates fell to one reason."""

    reason: str
    count: int


class InfeasibleError(RlperfError):
    """Nothing satisfies the request: what was rejected and why, the nearest miss, and what would fit.

    ``lacks_memory`` : for want of device memory; ``fits`` : changes under each of which it fits, in words
    """

    exit_code = 1

    def __init__(
        self, message: str, rejections: Iterable[Rejection] = (), nearest_miss: str | None = None, *,
        lacks_memory: bool = False, fits: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.message = message
        self.rejections = tuple(rejections)
        self.nearest_miss = nearest_miss
        self.lacks_memory = lacks_memory
        self.fits = tuple(fits)
        counted = ((r, "candidate" if r.count == 1 else "candidates") for r in self.rejections)
        lines = [message, *(f"  {r.count:>9,d} {noun}: {r.reason}" for r, noun in counted)]
        if nearest_miss:
            lines.append(f"  nearest miss: {nearest_miss}")
        if self.fits:
            lines.append(f"  it fits {', or '.join(self.fits)}")
        super().__init__("\n".join(lines))


class SolverError(RlperfError):
    """The solver stopped without an answer (time limit, numerical trouble, missing solver)."""

    exit_code = 3


@dataclass
class ExportError(RlperfError):
    """The plan cannot be expressed for this framework and version."""

    message: str
    framework: str = ""
    details: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        head = f"{self.framework}: {self.message}" if self.framework else self.message
        return "\n".join([head, *(f"  {key}: {why}" for key, why in self.details.items())])


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """A suggestion for a misspelt name.

    >>> did_you_mean("hidden_sise", ["hidden_size", "layers"])
    'did you mean hidden_size?'
    """
    close = nearest(word, choices)
    return f"did you mean {close}?" if close else None


LONGEST_NAME = 200
"""Characters of a word that may be a misspelt name: matching takes time with their square."""


def nearest(word: str, choices: Iterable[str], *, alike: float = 0.6) -> str | None:
    """The choice that looks most like ``word``; None where none does, or where it is no name: too long, or no text.

    ``alike`` : share of characters that both must have in common, in their order
    """
    return None if not isinstance(word, str) or len(word) > LONGEST_NAME else _nearest(word, tuple(choices), alike)


@lru_cache(maxsize=256)
def _nearest(word: str, choices: tuple[str, ...], alike: float) -> str | None:
    """Kept: an audit reads a file again for every change that it tries, with the same unknown keys in it."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=alike)
    return close[0] if close else None


def failure(error: BaseException) -> str:
    """What went wrong, in one line.

    >>> failure(KeyError("seconds")), failure(RecursionError("maximum recursion depth exceeded"))
    ("'seconds' is missing", 'it is nested too deeply')
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, MemoryError):
        return "it takes more memory than there is"
    return f"{error}".strip().partition("\n")[0][:200] or type(error).__name__
