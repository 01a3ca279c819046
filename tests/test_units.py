"""Quantities: text with units outside, SI floats inside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlperf.units import Dimension, format_quantity, human_bytes, human_seconds, parse_quantity


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 GB", "bytes", 80e9),
        ("80GiB", "bytes", 80 * 2**30),
        ("3.35 TB/s", "bytes_per_s", 3.35e12),
        ("400 Gb/s", "bytes_per_s", 50e9),
        ("400 Gbit/s", "bytes_per_s", 50e9),
        ("989.4 TFLOP/s", "flop_per_s", 989.4e12),
        ("1.83 GHz", "hz", 1.83e9),
        ("2 h", "s", 7200.0),
        ("1,000 us", "s", 1e-3),
        ("2.5 USD/h", "usd_per_hour", 2.5),
    ],
)
def test_reads_quantities(text: str, dimension: Dimension, value: float) -> None:
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "dimension", "complaint"),
    [
        (80, "bytes", "no unit"),
        ("80", "s", "no unit"),
        ("80 GB", "s", "is in bytes, but s is due"),
        ("80 furlongs", "bytes", "not a unit"),
        ("fast", "bytes_per_s", "not a quantity"),
        (True, "s", "not a quantity"),
        (None, "s", "not a quantity"),
    ],
)
def test_refuses_what_has_no_unit_or_the_wrong_one(text: object, dimension: Dimension, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_quantity(text, dimension)


@given(
    st.floats(min_value=1e-9, max_value=1e21),
    st.sampled_from(["bytes", "bytes_per_s", "flop_per_s", "flop", "s", "hz", "watt", "usd", "usd_per_hour", "tokens"]),
)
def test_text_reads_back_to_the_same_float(value: float, dimension: Dimension) -> None:
    assert parse_quantity(format_quantity(value, dimension), dimension) == pytest.approx(value, rel=1e-15)


def test_rates_of_products_are_read_as_data_sheets_print_them() -> None:
    for text in ("989 TFLOPS", "989 TFLOP/s", "989 TOPS"):
        assert parse_quantity(text, "flop_per_s") == 989e12


def test_text_for_people() -> None:
    assert [human_bytes(v) for v in (512, 4.1e10, 1.5e12)] == ["512 B", "41 GB", "1.5 TB"]
    assert [human_seconds(v) for v in (0, 3e-9, 12e-6, 0.25, 59.0, 3725.0)] == [
        "0 s", "3 ns", "12 us", "250 ms", "59 s", "1 h 2 min",
    ]  # fmt: skip
