"""Declared columns: kinds, blanks, guesses with their reasons, and values worked out from what was found before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from rlperf.calibrate.columns import Guess, Reading, column, count, derived, flag, number, one_of, read, text, whole
from rlperf.calibrate.tables import Row
from rlperf.errors import SpecError


def _stages(row: Toy) -> Guess[int]:
    return Guess(2 if row.devices > 8 else 1, "by size")


@dataclass(frozen=True)
class Toy(Reading):
    """A few columns of every sort."""

    limit: int
    devices: int = column(count, name="n_gpus")
    dtype: str = column(one_of(("bf16", "fp8")), "bf16")
    stages: int = column(whole, _stages)
    share: float | None = column(number, None)
    packed: bool = column(flag, Guess(True, "default"))
    note: str = column(text, "")
    replicas: int = derived(lambda row: row.devices // row.stages)
    capped: int = derived(lambda row: Guess(row.limit, "at most") if row.replicas > row.limit else row.replicas)


def toy(**cells: str) -> Toy:
    return read(Toy, Row("r", "g", 7, cells), limit=4)


def test_cells_are_read_and_blanks_are_guessed_with_a_reason() -> None:
    found = toy(n_gpus="16", stages="-", packed="", dtype="FP8", note=" as it is ")
    assert (found.row_id, found.group, found.devices, found.dtype, found.note) == ("r", "g", 16, "fp8", "as it is")
    assert (found.stages, found.share, found.packed, found.replicas, found.capped) == (2, None, True, 8, 4)
    assert found.assumed == ("stages=2 (by size)", "packed=True (default)", "capped=4 (at most)")
    stated = toy(n_gpus="4.0", stages="4", packed="0", share="0.5")
    assert (stated.assumed, stated.packed, stated.share, stated.replicas) == ((), False, 0.5, 1)


def test_a_column_that_the_table_lacks_is_named_but_is_no_blank() -> None:
    assert toy(n_gpus="4", packed="").assumed == ("stages=1 (by size, no such column)", "packed=True (default)")
    assert toy(n_gpus="4", packed="").blanks == 1


def test_a_reading_is_an_ordinary_frozen_object() -> None:
    found = toy(n_gpus="4")
    assert replace(found, dtype="fp8").dtype == "fp8"
    with pytest.raises(AttributeError):
        found.dtype = "fp8"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({}, "n_gpus is not published"),
        ({"n_gpus": "n/a"}, "n_gpus is not published"),
        ({"n_gpus": "0"}, "n_gpus '0' is not a positive whole number"),
        ({"n_gpus": "4", "stages": "1.5"}, "stages '1.5' is not a whole number"),
        ({"n_gpus": "4", "share": "half"}, "share 'half' is not a number"),
        ({"n_gpus": "4", "packed": "2"}, "packed '2' is neither 0 nor 1"),
        ({"n_gpus": "4", "dtype": "fp9"}, "dtype 'fp9' is none of bf16, fp8: did you mean fp8"),
    ],
)
def test_cells_of_another_kind_say_what_they_are_not(cells: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        toy(**cells)
    assert caught.value.problems[0].line == 7
