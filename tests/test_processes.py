"""Independent pieces of work over cores: the same answers in the same order, errors as they are, progress with each."""

from __future__ import annotations

import os

import pytest

from rlperf import processes
from rlperf.errors import RlperfError, SpecError
from rlperf.processes import over_cores
from rlperf.told import Tell

NAMES = ("one", "two", "three", "four")
PIECES = {name: name for name in NAMES}


def test_few_pieces_stay_in_this_process_and_progress_moves_within_them() -> None:
    def work(name: str, *, report: Tell) -> int:
        report(0.5, "half")
        return os.getpid()

    told: list[tuple[float, str]] = []
    assert over_cores(work, {name: name for name in NAMES[:2]}, lambda *said: told.append(said)) == [os.getpid()] * 2
    assert told == [(0.25, "one: half"), (0.75, "two: half")]
    assert over_cores(work, PIECES, lambda *_: None, each=0.5) == [os.getpid()] * 4  # pieces that are worth half a one


def test_pieces_of_which_two_cores_spare_little_stay_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 2)
    pieces = {str(number): number for number in range(7)}

    def work(_: int, *, report: Tell) -> int:
        return os.getpid()

    assert over_cores(work, pieces, lambda *_: None, each=0.5) == [os.getpid()] * 7


def test_many_pieces_go_to_other_processes_and_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 2)

    def work(name: str, *, report: Tell) -> tuple[str, int]:
        import os
        import time

        report(0.5, "half")
        time.sleep(1.0 if name == "one" else 0.0)
        return name, os.getpid()

    told: list[tuple[float, str]] = []
    found = over_cores(work, PIECES, lambda *said: told.append(said))
    assert tuple(name for name, _ in found) == NAMES
    assert os.getpid() not in {pid for _, pid in found}
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)
    assert told[0][1] == "one, two" and told[-1][1] == "done"  # who is at work
    assert any(text.startswith("one: half") for _, text in told)  # how far each is, from its process
    assert (0.875, "one: half") in told  # all others have ended

    def refuses(name: str, *, report: Tell) -> str:
        from rlperf.errors import SpecError

        raise SpecError(f"{name} is refused")

    with pytest.raises(SpecError, match="is refused"):
        over_cores(refuses, PIECES, lambda _share, _text: None)

    def dies(name: str, *, report: Tell) -> str:
        import os

        os._exit(9)

    with pytest.raises(RlperfError, match="a worker process was killed: out of memory"):
        over_cores(dies, PIECES, lambda _share, _text: None)
