"""A small seed of `studies.fuzz`: whatever stands in a file, a clean answer or a clean refusal."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from random import Random

import pytest

from rlperf.errors import SpecError
from rlperf.ui.asked import PageForm
from rlperf.units import token_count
from studies.fuzz.beside import beside
from studies.fuzz.harness import CLEAN, HangError, at_most, judged, nonsense, tried
from studies.fuzz.mutate import mutated
from studies.fuzz.targets import Target, targets

INPUTS = 150
CHEAP = [target for target in (*targets(), *beside()) if target.weight > 1 and "predicted" not in target.name]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "in"


@pytest.mark.parametrize("target", CHEAP, ids=[target.name for target in CHEAP])
def test_what_is_mutated_is_sound(target: Target, here: Path) -> None:
    for name, content in target.files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content())
    assert judged(target, here).outcome == "answered"


def test_mutated_inputs_are_answered_or_refused(here: Path) -> None:
    random = Random(25)
    found = []
    for index in range(INPUTS):
        target = CHEAP[index % len(CHEAP)]
        for name, content in target.files.items():
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            made = mutated(content(), name, random) if name == target.file else content()
            (here / name).write_bytes(made)
        found.append(judged(target, here, index))
    bad = [verdict for verdict in found if verdict.outcome not in CLEAN]
    assert not bad, "\n".join(map(str, bad))
    assert {verdict.outcome for verdict in found} == set(CLEAN)


def test_an_input_is_the_same_every_time(here: Path) -> None:
    assert tried(7, 3, here) == tried(7, 3, here)


def test_the_harness_sees_what_it_is_for(here: Path) -> None:
    here.mkdir()

    def raises(error: BaseException) -> Target:
        def ask(_: Path) -> object:
            raise error

        return Target("planted", {}, ask)

    assert judged(raises(KeyError("x")), here).outcome == "traceback"
    assert judged(raises(MemoryError()), here).outcome == "memory"
    assert judged(Target("planted", {}, lambda _: {"rl_step_s": -1.0}), here).outcome == "nonsense"
    assert judged(Target("planted", {}, lambda _: {"a": [float("nan")]}), here).outcome == "nonsense"
    assert (
        judged(Target("planted", {}, lambda _: warnings.warn("numbers", RuntimeWarning, 1)), here).outcome
        == "traceback"
    )
    (here / "PWNED").touch()
    assert judged(Target("planted", {}, lambda _: None), here).outcome == "executed"
    assert nonsense({"a": {"usd": 1.0, "share": -0.5}}) == ""
    with pytest.raises(HangError), at_most(busy_s=60, still_s=0.2):
        time.sleep(5)
    with pytest.raises(HangError), at_most(busy_s=0.2, still_s=60):
        any(False for _ in iter(lambda: 0, 1))


@pytest.mark.parametrize("value", ["many", "[4]", 1e300, 2.5, True])
def test_the_page_refuses_what_is_no_whole_number(value: object) -> None:
    with pytest.raises(SpecError, match="is no whole number"):
        PageForm(gpus=value).values()  # type: ignore[arg-type]


def test_tokens_beyond_any_count_are_none() -> None:
    assert token_count("9" * 400) is None
