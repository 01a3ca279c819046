"""One mutated input at a time: what becomes of it, and which of many is which."""

from __future__ import annotations

import math
import shutil
import signal
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from rlperf.errors import RlperfError
from studies.fuzz.beside import beside
from studies.fuzz.mutate import mutated
from studies.fuzz.targets import RefusedError, Target, TracebackError, plain, targets

HANG_S, STILL_S = 20, 600
CLEAN = ("answered", "refused")
FAILURES = ("traceback", "hang", "memory", "nonsense", "executed", "killed")
NOT_NEGATIVE = ("_s", "bytes", "usd", "tokens", "usd_per_step", "parameters", "devices")


@dataclass(frozen=True)
class Verdict:
    """What became of an input: one of CLEAN or FAILURES, where in rlperf, and in which words."""

    index: int
    target: str
    outcome: str
    where: str = ""
    words: str = ""


class HangError(BaseException):
    """No answer in time; no exception, so that no reader takes it for its own."""


@contextmanager
def at_most(busy_s: float, still_s: float) -> Iterator[None]:
    """Raise `HangError` inside after so many seconds of the processor, or of the clock."""

    def ring(*_: object) -> None:
        raise HangError

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, busy_s), (signal.ITIMER_REAL, signal.SIGALRM, still_s))
    before = [signal.signal(rung, ring) for _, rung, _ in timers]
    try:
        for timer, _, seconds in timers:
            signal.setitimer(timer, seconds)
        yield
    finally:
        for (timer, rung, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(rung, handler)


@cache
def _drawn() -> tuple[Target, ...]:
    """Targets as often as they are to be drawn; those of weight 1 are whole commands and audits, which take long."""
    return tuple(
        target for target in (*targets(), *beside()) for _ in range(target.weight * (3 if target.weight > 1 else 1))
    )


def place(error: BaseException) -> str:
    """The innermost line of rlperf in a traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/rlperf/" in f.filename.replace("\\\\", "/")]
    if not frames:
        return "?"
    last = frames[-1]
    return f"{last.filename.rpartition('/rlperf/')[2]}:{last.lineno}"


def nonsense(value: Any, name: str = "") -> str:
    """The first number of an answer that is none, or negative where none can be; empty where all is sound."""
    if isinstance(value, dict):
        return next((found for key, item in value.items() if (found := nonsense(item, str(key)))), "")
    if isinstance(value, list):
        return next((found for item in value if (found := nonsense(item, name))), "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    wrong = not math.isfinite(value) or (value < 0 and name.endswith(NOT_NEGATIVE))
    return f"{name} = {value}" if wrong else ""


def made(seed: int, index: int, folder: Path) -> Target:
    """Write the input of this number into the folder; the target that it is for. The same every time."""
    random = Random(f"{seed}:{index}")
    target = random.choice(_drawn())
    if folder.exists():
        shutil.rmtree(folder)
    for name, content in target.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(mutated(content(), name, random) if name == target.file else content())
    return target


def judged(target: Target, folder: Path, index: int = -1) -> Verdict:
    """Ask the target, and say what became of it."""
    here = Path.cwd()
    try:
        with at_most(HANG_S, STILL_S), warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy warns where a number stops being one
            answer = plain(target.ask(folder))
    except RefusedError as error:
        return Verdict(index, target.name, "refused", words=str(error.args[1])[:200])
    except RlperfError as error:
        return Verdict(index, target.name, "refused", words=str(error)[:200])
    except HangError as error:
        return Verdict(index, target.name, "hang", place(error))
    except MemoryError as error:
        return Verdict(index, target.name, "memory", place(error))
    except TracebackError as error:
        lines = str(error).strip().split("\n")
        at = [line for line in lines if "/rlperf/" in line and "File " in line]
        where = at[-1].split("/rlperf/")[-1].replace('", line ', ":").split(",")[0] if at else "?"
        return Verdict(index, target.name, "traceback", where, "\n".join(lines[-3:-1])[:300])
    except Exception as error:
        return Verdict(index, target.name, "traceback", place(error), f"{type(error).__name__}: {error}"[:300])
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Verdict(index, target.name, "traceback", place(error), f"{type(error).__name__}: {error}"[:300])
    if any((root / "PWNED").exists() for root in (here, folder)):
        return Verdict(index, target.name, "executed")
    wrong = nonsense(answer)
    return Verdict(index, target.name, "nonsense" if wrong else "answered", words=wrong)


def tried(seed: int, index: int, folder: Path) -> Verdict:
    """Input number ``index`` of a seed: made, asked, judged."""
    return judged(made(seed, index, folder), folder, index)


def sound(folder: Path) -> list[Verdict]:
    """Every target with its own files as they are: all must be answered, or mutating them means nothing."""
    found = []
    for target in (*targets(), *beside()):
        if folder.exists():
            shutil.rmtree(folder)
        for name, content in target.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content())
        found.append(judged(target, folder))
    return found
