"""A folder changes as a whole: killed at any moment, full disk, read-only, two processes at once, old plans' files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from rlperf.errors import SpecError
from rlperf.specs import writer
from rlperf.specs.writer import STALE_S, check_folder, is_export, write_folder

JOB = """\
name: small
architecture: Qwen3-0.6B
cluster: dgx_h100
horizon: {rl_steps: 2, group: 1, switch: 1 s}
tasks:
  - {name: math, workload: math, prompts_per_step: 16, group_size: 4, max_prompt_tokens: 512, max_response_tokens: 1024}
"""


def version(number: int) -> dict[str, str]:
    """Files of one writing, every one of which says which; odd writings have a file more."""
    names = ["plan.yaml", "config/config.yaml", "config/config.sh", *(["config/phase_02.sh"] if number % 2 else [])]
    return dict.fromkeys(names, f"{number}\n" * 2000)


def found(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def is_whole(folder: Path) -> bool:
    held = found(folder)
    numbers = {text.split("\n", 1)[0] for text in held.values()}
    return len(numbers) == 1 and held == version(int(numbers.pop()))


def test_a_folder_that_is_killed_while_it_is_written_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    random, folder = Random(0), tmp_path / "out"
    write_folder(folder, version(0))
    for kill in range(1, 31):
        child = os.fork()
        if not child:
            number = 1000 * kill
            while True:
                write_folder(folder, version(number))
                number += 1
        until = time.monotonic() + 20.0
        while int((folder / "plan.yaml").read_text().split("\n", 1)[0]) < 1000 * kill and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(random.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert is_whole(folder), sorted(found(folder))
    left = list(tmp_path.glob(".out.*.part"))
    for path in left:
        os.utime(path, (0, time.time() - STALE_S - 1))
    write_folder(folder, version(1))
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "what killed writers left goes when it is old"


def test_two_processes_on_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    children = []
    for start in (1000, 2000):
        child = os.fork()
        if not child:
            try:
                for number in range(start, start + 60):
                    write_folder(folder, version(number))
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    seen = 0
    while seen < 100 and folder.exists():
        seen += 1
        time.sleep(0.002)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert is_whole(folder)


def test_files_of_others_stay_and_those_of_earlier_writings_go(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    write_folder(folder, {"phase_01.sh": "1", "phase_02.sh": "2", "EXPORT.md": "", "config.yaml": "x"}, is_export)
    (folder / "mine").mkdir()
    (folder / "mine" / "data.yaml").write_text("keep")
    (folder / "notes.txt").write_text("keep")
    assert os.access(folder / "phase_01.sh", os.X_OK) and not os.access(folder / "config.yaml", os.X_OK)
    write_folder(folder, {"config.sh": "3", "EXPORT.md": "new"}, is_export)
    assert found(folder) == {"config.sh": "3", "EXPORT.md": "new", "mine/data.yaml": "keep", "notes.txt": "keep"}


@pytest.mark.parametrize("stands", ["in it", "below it", "linked"])
def test_the_folder_that_one_stands_in_is_written_file_by_file(
    stands: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    (folder / "below").mkdir(parents=True)
    (folder / "phase_02.sh").write_text("old")
    if stands == "linked":
        (folder / "link").symlink_to(tmp_path)
    else:
        monkeypatch.chdir(folder if stands == "in it" else folder / "below")
    node = folder.stat().st_ino
    write_folder(folder, version(0), lambda name: is_export(name.removeprefix("config/")))
    assert folder.stat().st_ino == node and not (folder / "phase_02.sh").exists()
    assert (folder / "config" / "config.sh").read_text() == version(0)["config/config.sh"]


def test_without_an_exchange_by_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.ctypes, "CDLL", lambda *_, **__: object())
    folder = tmp_path / "out"
    for number in (1, 2):
        write_folder(folder, version(number))
        assert is_whole(folder) and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("place", ["tempfile.mkdtemp", "os.fdopen", "os.fsync"])
def test_a_disk_that_is_full_or_read_only_leaves_the_old(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    write_folder(folder, version(0))
    calls = 0

    def full(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 1 or place != "os.fsync":  # the first file fits, the second does not
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(place, full)
    with pytest.raises(SpecError, match=r"cannot be written: No space left on device"):
        write_folder(folder, version(1))
    monkeypatch.undo()
    assert is_whole(folder) and (folder / "plan.yaml").read_text().startswith("0\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(SpecError, match="is a file, a folder is due"):
        write_folder(folder / "plan.yaml", version(1))


def test_a_folder_that_cannot_be_written_is_refused_before_planning(tmp_path: Path) -> None:
    """The plan was made, printed, and then lost."""
    (tmp_path / "job.yaml").write_text(JOB)
    done = rlperf("plan", "job.yaml", "--out", "job.yaml/plan", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "job.yaml: is a file, a folder is due" in done.stderr
    with pytest.raises(SpecError, match=r"x{300}: cannot be written: File name too long"):
        check_folder(tmp_path / ("x" * 300))
    check_folder(tmp_path / "new" / "plan")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if not os.access(closed, os.W_OK):  # root may write anywhere
        with pytest.raises(SpecError, match="closed: cannot be written: Permission denied"):
            check_folder(closed / "plan")


def rlperf(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlperf", *words], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_planning_again_leaves_nothing_of_the_plan_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    folder = tmp_path / "the plan"
    assert rlperf("plan", "job.yaml", "--out", str(folder), cwd=tmp_path).returncode == 0
    for name in ("config/phase_02.sh", "config/phase_02.yaml", "config/run_all.sh", "report.html"):
        (folder / name).write_text("of an earlier plan")
    (folder / "config" / "reward.py").write_text("mine")
    before = {name: text for name, text in found_bytes(folder).items() if "phase_02" not in name and "all" not in name}
    assert rlperf("plan", "job.yaml", "--out", str(folder), cwd=tmp_path).returncode == 0
    after = found_bytes(folder)
    assert set(after) == set(before) - {"report.html"} and after["config/reward.py"] == b"mine"
    started = subprocess.Popen([sys.executable, "-m", "rlperf", "plan", "job.yaml", "--out", str(folder)], cwd=tmp_path)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert found_bytes(folder) == after


def found_bytes(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
