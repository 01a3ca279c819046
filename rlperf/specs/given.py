"""The border for what callers from Python give: paths and counts, or a `SpecError` that says what is due."""

from __future__ import annotations

from operator import index
from pathlib import Path
from typing import SupportsFloat, SupportsIndex, cast

from rlperf.errors import Problem, SpecError, failure


def as_path(given: object, what: str, hint: str | None = None) -> Path:
    """What a caller from Python gave for the file of ``what``; a `SpecError` where it is none.

    >>> as_path([1, 2], "job")
    Traceback (most recent call last):
    rlperf.errors.SpecError: job: a path, or an object of rlperf, is due (given: [1, 2])
    """
    if isinstance(given, str | Path):
        try:
            Path(given).stat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass  # whoever reads or writes it says so
        except (OSError, ValueError) as error:
            told = f"{what}: no file has this name: {failure(error)} (given: {str(given)[:40]!r} ...)"
            raise SpecError(Problem(told, suggestion=hint or "give its path, not its text")) from error
        return Path(given)
    short = len(said := repr(given)) <= 40 and "\n" not in said
    said = said if short else f"a {type(given).__name__}"  # a job prints as a page
    raise SpecError(Problem(f"{what}: a path, or an object of rlperf, is due (given: {said})", suggestion=hint))


def as_share(given: object, what: str) -> float:
    """The share that a caller from Python gave for ``what``; a `SpecError` where it is no number from 0 to 1.

    >>> as_share("a", "floor")
    Traceback (most recent call last):
    rlperf.errors.SpecError: floor: a number from 0 to 1 is due (given: 'a')
    """
    if isinstance(given, bool) or not isinstance(given, SupportsFloat) or not 0.0 <= float(given) <= 1.0:
        raise SpecError(f"{what}: a number from 0 to 1 is due (given: {given!r})"[:200])
    return float(given)


def as_count(given: object, what: str, least: int = 1) -> int:
    """The whole number that a caller from Python gave for ``what``; a `SpecError` where it is none, or below ``least``.

    >>> as_count(0, "draws")
    Traceback (most recent call last):
    rlperf.errors.SpecError: draws must be at least 1 (given: 0)
    """
    try:
        if isinstance(given, bool):
            raise TypeError
        count = index(cast(SupportsIndex, given))
    except TypeError:
        raise SpecError(f"{what}: a whole number is due (given: {given!r})"[:200]) from None
    if count < least:
        raise SpecError(f"{what} must be at least {least} (given: {count})")
    return count
