"""What every command shares: the console, machine output, progress, and how a job is found."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from rlperf.units import human_share

if TYPE_CHECKING:
    from rich.console import Console

TaskName = Annotated[str | None, typer.Option("--task", help="Which one, of a job with several tasks.")]
PhaseNumber = Annotated[int, typer.Option("--phase", min=1, help="Which phase of a plan.yaml, from 1.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]


_BOLD = re.compile(r"(\[/?bold(?: [a-z]+)?\])")


@cache
def _screen() -> type[Console]:
    """The console's class, made when it is first asked for: rich takes a while to import."""
    from rich.console import Console
    from rich.text import Text

    class Screen(Console):
        """Knows one mark, ``[bold]...[/bold]`` (``[bold yellow]``); brackets of names, paths and messages are text."""

        def render_str(self, text: str, *, markup: bool | None = None, **options: Any) -> Text:
            style, parts = "", []
            for part in _BOLD.split(text) if markup is not False else [text]:
                if markup is not False and _BOLD.fullmatch(part):
                    style = "" if part.startswith("[/") else part[1:-1]
                elif part:
                    parts.append(super().render_str(part, markup=False, **options))
                    if style:
                        parts[-1].stylize(style)
            return Text.assemble(*parts, justify=options.get("justify"), overflow=options.get("overflow"))

        def on_broken_pipe(self) -> None:
            """The reader of a pipe has left, which `rlperf.cli.main.run` takes for a good end."""
            raise BrokenPipeError

    return Screen


def console(*, error: bool = False) -> Console:
    """Console for people: stdout for results, stderr for progress and remarks."""
    return _screen()(stderr=error, highlight=False, emoji=False, soft_wrap=False)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Rows of text under their heads, as wide as the screen has room."""
    from rlperf.report.table import text_table

    screen = console()
    screen.print(text_table(heads, rows, screen.width, title=title))


def print_json(value: Mapping[str, Any]) -> None:
    """A form as one JSON document on stdout, the version of its schema in it."""
    write_json({"schema_version": 1, **value})


def write_json(value: Any) -> None:
    """One JSON document on stdout; not-a-number and infinities become null."""
    plain = not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    sys.stdout.write(json.dumps(_finite(value), indent=2, ensure_ascii=plain, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class Progress(Protocol):
    """Called with the share done (0 to 1) and what is going on."""

    def __call__(self, done: float, text: str = "") -> None: ...


QUIET_S = 10.0
"""Seconds between two lines on stderr, where it is no terminal."""


class _Lines:
    """Progress where nobody watches a bar: a line on stderr every `QUIET_S` seconds, none of quick work.

    A thread says it, so that one long step between two reports is not silent either.
    """

    def __init__(self, title: str) -> None:
        self._state = title, 0.0
        self._title, self._done = title, threading.Event()
        threading.Thread(target=self._say, daemon=True).start()

    def __call__(self, done: float, text: str = "") -> None:
        self._state = f"{self._title} {text}".rstrip(), max(done, self._state[1])  # a search may turn back, a bar not

    def end(self) -> None:
        """Say no more."""
        self._done.set()

    def _say(self) -> None:
        began = time.monotonic()
        while not self._done.wait(QUIET_S):
            text, done = self._state
            print(f"{text}: {human_share(done)}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A bar on stderr where it is a terminal, which vanishes when the work is done; elsewhere a line now and then."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    if not sys.stderr.isatty():
        lines = _Lines(title)
        try:
            yield lines
        finally:
            lines.end()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console(error=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def update(done: float, text: str = "") -> None:
            most = max(done, bar.tasks[task].completed)
            bar.update(task, completed=most, description=f"{title} {text}".strip())

        yield update


def default_job() -> Path:
    """The job that runs when none is named."""
    return Path(__file__).resolve().parent.parent / "specs" / "jobs" / "default.yaml"
