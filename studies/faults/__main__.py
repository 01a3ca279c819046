"""Commands killed at any moment: what they write is as it was or as it becomes, and asking again gives the same bytes.

    python -m studies.faults KILLS [SEED]

A kill takes away the process and leaves the files. So the folder that a command writes is copied before every touch of
a file in it (every opening, renaming, removal), which is what kills can leave, and the command is asked again in each
state that differs. Kills at random times stand beside that. Every run is a child forked from this process, which has
imported the commands before.

Results: README.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random

import polars as pl

from rlperf.cli.main import COMMANDS, run
from studies.fuzz import seeds

TOUCHES = ("open", "os.", "shutil.", "tempfile.", "ctypes.")
"""Audit events of what touches files; those that name the folder are counted."""


@dataclass(frozen=True)
class Command:
    """``words`` write ``out`` from ``files``; ``before``: files as they stand when the old state is written."""

    name: str
    words: tuple[str, ...]
    files: Mapping[str, str]
    before: Mapping[str, str]
    out: str = "out"


JOB = seeds.JOB.replace("mini_batch: [8, 16]", "mini_batch: 8")
OLD = JOB.replace("max_response_tokens: 1024", "max_response_tokens: 512")


def commands(plan: str, old_plan: str) -> tuple[Command, ...]:
    """Those that write a folder or a file."""
    more = "".join(line for line in seeds.KERNELS.splitlines(keepends=True)[:-1])
    return (
        Command("plan --out", ("plan", "{}/job.yaml", "--out", "{}/out"), {"job.yaml": JOB}, {"job.yaml": OLD}),
        Command("export", ("export", "{}/plan.yaml", "--out", "{}/out"), {"plan.yaml": plan}, {"plan.yaml": old_plan}),
        Command("sweep", ("sweep", "{}/sweep.yaml", "--out", "{}/out", "--workers", "1", "--no-figures"),
                {"sweep.yaml": seeds.SWEEP}, {}),
        Command("calibrate", ("calibrate", "kernels", "{}/kernels.csv", "--out", "{}/out.yaml", "--no-check"),
                {"kernels.csv": seeds.KERNELS}, {"kernels.csv": more}, "out.yaml"),
    )  # fmt: skip


def content(path: Path) -> dict[str, bytes]:
    """Files at or below a path, and what they hold; hidden ones are work that was not finished."""
    found = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()] if path.exists() else []
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in found if not p.name.startswith(".")}


def child(folder: Path, words: tuple[str, ...], touched: Callable[[], None] | None = None) -> int:
    """The command in a child process in this folder; ``touched`` is called before every touch of a file there."""
    pid = os.fork()
    if pid:
        return pid
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_RDWR)
    said = os.open(folder.with_name("said.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, place in enumerate((nowhere, nowhere, said)):
        os.dup2(place, stream)
    sys.argv = ["rlperf", *(word.replace("{}", str(folder)) for word in words)]
    if touched is not None:
        sys.addaudithook(partial(_told, str(folder), touched))
    try:
        run()
    except SystemExit as stopped:
        os._exit(stopped.code if isinstance(stopped.code, int) else 1)
    os._exit(0)


def _told(folder: str, touched: Callable[[], None], event: str, found: tuple[object, ...]) -> None:
    """What an audit event says of the folder."""
    if event.startswith(TOUCHES) and folder in str(found):
        touched()


def ended(pid: int) -> int:
    """Its exit code, negative: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def whole(folder: Path, command: Command, files: Mapping[str, str]) -> dict[str, bytes]:
    """What the command writes from these files where nothing stops it."""
    fresh(folder, files)
    if code := ended(child(folder, command.words)):
        raise RuntimeError(f"{command.name} ends with {code}: {folder.with_name('said.txt').read_text()}")
    return content(folder / command.out)


def fresh(folder: Path, files: Mapping[str, str]) -> None:
    """An empty folder with these files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)


def moments(folder: Path, command: Command) -> list[Path]:
    """The folder as it is before every touch of a file in it, and after the last: what a kill there leaves behind.

    Copies lie beside it, in order.
    """
    beside = folder.with_name(f"{folder.name}.moments")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    number, copying = 0, False

    def touched() -> None:
        nonlocal number, copying
        if not copying:
            copying = True  # which touches files, too
            shutil.copytree(folder, beside / f"{number:06d}")
            number, copying = number + 1, False

    ended(child(folder, command.words, touched))
    shutil.copytree(folder, beside / "last")
    return sorted(beside.iterdir())


def state(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def killed(folder: Path, command: Command, random: Random, seconds: float) -> bool:
    """Run the command and kill it at a random time; whether there was anything left to kill."""
    pid = child(folder, command.words)
    time.sleep(random.uniform(0.0, seconds))
    os.kill(pid, signal.SIGKILL)
    return ended(pid) < 0


def outcomes(command: Command, kills: int, random: Random, folder: Path) -> dict[str, int | str]:
    """Counts over the moments of one command, and over some kills of its process."""
    old = whole(folder, command, command.before) if command.before else {}
    before = folder.with_name("before")
    shutil.rmtree(before, ignore_errors=True)
    if command.before:
        shutil.copytree(folder, before)
    else:
        before.mkdir()
    began = time.monotonic()
    new = whole(folder, command, command.files)
    seconds = time.monotonic() - began
    if old == new:
        raise RuntimeError(f"{command.name}: the old state is the new one")
    found = dict.fromkeys(("moments", "old", "new", "part", "states", "resumed", "killed", "whole", "again"), 0)

    def back() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        for name, text in command.files.items():
            (folder / name).write_text(text)

    back()
    seen: list[dict[str, bytes]] = []
    for moment in moments(folder, command):
        left = content(moment / command.out)
        found["moments"] += 1
        found["new" if left == new else "old" if left == old else "part"] += 1
        if (now := state(moment)) not in seen:
            seen.append(now)
            shutil.rmtree(folder)
            shutil.copytree(moment, folder)
            ended(child(folder, command.words))
            found["states"] += 1
            found["resumed"] += content(folder / command.out) == new
    for _ in range(kills):
        back()
        found["killed"] += killed(folder, command, random, seconds)
        found["whole"] += content(folder / command.out) in (old, new)
        ended(child(folder, command.words))
        found["again"] += content(folder / command.out) == new
    return {"command": command.name, **found}


def planned(text: str) -> str:
    """plan.yaml of a job."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "job.yaml").write_text(text)
        if code := ended(child(Path(name), ("plan", "{}/job.yaml", "--out", "{}/out"))):
            raise RuntimeError(f"the job is not planned: {code}")
        return (Path(name) / "out" / "plan.yaml").read_text()


def main() -> None:
    """The table of counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, help="at random times, of each command")
    parser.add_argument("seed", nargs="?", type=int, default=0)
    asked = parser.parse_args()
    random = Random(asked.seed)
    for entry in COMMANDS.values():
        import_module(entry.target.partition(":")[0])
    with tempfile.TemporaryDirectory() as name:
        rows = [
            outcomes(command, asked.kills, random, Path(name) / "work")
            for command in commands(planned(JOB), planned(OLD))
        ]
    with pl.Config(tbl_cols=-1, tbl_width_chars=120):
        print(pl.DataFrame(rows))


if __name__ == "__main__":
    main()
