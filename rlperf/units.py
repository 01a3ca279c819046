"""Quantities: SI floats inside, text with units outside.

``4.8 TB/s``, ``141 GB``, ``989.4 TFLOP/s``, ``15 ms``, ``2.5 USD/h``. Decimal prefixes are powers of 1000 (GB = 1e9),
binary ones of 1024 (GiB = 2**30). A bare number where a unit is due is refused.

This is also the border for numbers: what a file states is finite, not negative, and within `MOST` and `MOST_COUNT`. No
rate, size, time or price lies beyond, and what does (a typing error, a damaged file) would come back as an infinite or
undefined prediction, or as a table that no memory holds.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

MOST, LEAST = 1e24, 1e-18
"""No quantity is larger in SI units, or smaller and not zero."""
MOST_COUNT = 1 << 24
"""No number of devices, layers, prompts or tokens of one sequence is larger."""
PositiveInt = Annotated[int, Field(gt=0, le=MOST_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST_COUNT)]
PositiveFloat = Annotated[float, Field(ge=LEAST, le=MOST)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=MOST)]

Dimension = Literal["bytes", "bytes_per_s", "flop_per_s", "flop", "s", "hz", "watt", "usd", "usd_per_hour", "tokens"]

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _units() -> dict[str, tuple[Dimension, float]]:
    """Every unit text with its dimension and its factor to SI."""
    table: dict[str, tuple[Dimension, float]] = {}
    for prefix, factor in {**_DECIMAL, **_BINARY}.items():
        table[f"{prefix}B"] = ("bytes", factor)
        table[f"{prefix}B/s"] = ("bytes_per_s", factor)
        table[f"{prefix}bit/s"] = ("bytes_per_s", factor / 8)
        table[f"{prefix}b/s"] = ("bytes_per_s", factor / 8)
        table[f"{prefix}bps"] = ("bytes_per_s", factor / 8)
    for prefix, factor in _DECIMAL.items():
        for rate in ("FLOP/s", "OP/s", "FLOPS", "OPS"):  # data sheets print the latter
            table[f"{prefix}{rate}"] = ("flop_per_s", factor)
        table[f"{prefix}FLOP"] = ("flop", factor)
        table[f"{prefix}Hz"] = ("hz", factor)
        table[f"{prefix}W"] = ("watt", factor)
        table[f"{prefix}tokens"] = ("tokens", factor)
    for text, factor in _TIME.items():
        table[text] = ("s", factor)
    for text in ("USD", "$"):
        table[text] = ("usd", 1.0)
        table[f"{text}/h"] = ("usd_per_hour", 1.0)
    return table


UNITS = _units()
_QUANTITY = re.compile(r"^\s*([+-]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s].*?)?\s*$")


def parse_quantity(text: object, dimension: Dimension) -> float:
    """SI value of a text such as ``"4.8 TB/s"``.

    >>> parse_quantity("4.8 TB/s", "bytes_per_s")
    4800000000000.0
    >>> parse_quantity("80 GiB", "bytes") == 80 * 2**30
    True
    >>> parse_quantity("400 Gb/s", "bytes_per_s")
    50000000000.0
    >>> parse_quantity(80, "bytes")
    Traceback (most recent call last):
    ValueError: 80 has no unit: write it with one, such as '80 GB'
    >>> parse_quantity("5 m", "s")
    Traceback (most recent call last):
    ValueError: 'm' in '5 m' is not a unit that rlperf knows (ns, us, ms, s, min, h, d); write for example '15 s'
    """
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(f"{text!r} is not a quantity: write a number with a unit, such as {_example(dimension)!r}")
    match = _QUANTITY.match(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity: write a number with a unit, such as {_example(dimension)!r}")
    number, unit = match.groups()
    if unit is None:
        raise ValueError(f"{text} has no unit: write it with one, such as '{text} {_example(dimension).split()[1]}'")
    if unit not in UNITS:
        of_time = f" ({', '.join(each for each in _TIME if each.isascii())})" if dimension == "s" else ""
        raise ValueError(
            f"{unit!r} in {text!r} is not a unit that rlperf knows{of_time}; write for example {_example(dimension)!r}"
        )
    found, factor = UNITS[unit]
    if found != dimension:
        raise ValueError(f"{text!r} is in {found}, but {dimension} is due; write for example {_example(dimension)!r}")
    return _bounded(float(number.replace(",", "").replace("_", "")) * factor, text)


def _bounded(value: float, text: object) -> float:
    if value < 0.0:
        raise ValueError(f"{text!r} is negative")
    if value > MOST or 0.0 < value < LEAST:
        raise ValueError(f"{text!r} is beyond any quantity: between {LEAST:g} and {MOST:g} in SI units is due")
    return value


def _example(dimension: Dimension) -> str:
    return {
        "bytes": "80 GB",
        "bytes_per_s": "4.8 TB/s",
        "flop_per_s": "989 TFLOP/s",
        "flop": "1 TFLOP",
        "s": "15 s",
        "hz": "1.83 GHz",
        "watt": "700 W",
        "usd": "1000 USD",
        "usd_per_hour": "2.5 USD/h",
        "tokens": "1 Mtokens",
    }[dimension]


def format_quantity(value: float, dimension: Dimension) -> str:
    """Text with a unit that `parse_quantity` reads back to the same float.

    >>> format_quantity(4.8e12, "bytes_per_s")
    '4.8 TB/s'
    >>> format_quantity(85899345920.0, "bytes")
    '85.89934592 GB'
    """
    if dimension == "s":
        return f"{value!r} s"
    if dimension in ("usd", "usd_per_hour"):
        return f"{value!r} USD" + ("/h" if dimension == "usd_per_hour" else "")
    stem = {"bytes": "B", "bytes_per_s": "B/s", "flop_per_s": "FLOP/s", "flop": "FLOP", "hz": "Hz", "watt": "W"}.get(
        dimension, "tokens"
    )
    for prefix in ("E", "P", "T", "G", "M", "k"):
        factor = _DECIMAL[prefix]
        if abs(value) >= factor and float(repr(value / factor)) * factor == value:
            return f"{value / factor!r}".removesuffix(".0") + f" {prefix}{stem}"
    return f"{value!r}".removesuffix(".0") + f" {stem}"


def _annotated(dimension: Dimension) -> tuple[BeforeValidator, PlainSerializer]:
    return (
        BeforeValidator(lambda text: parse_quantity(text, dimension), json_schema_input_type=str),
        PlainSerializer(lambda value: format_quantity(value, dimension), return_type=str),
    )


# Field types for pydantic: they read text with a unit and write it back.
Bytes = Annotated[float, *_annotated("bytes")]
BytesPerSecond = Annotated[float, *_annotated("bytes_per_s")]
FlopPerSecond = Annotated[float, *_annotated("flop_per_s")]
Seconds = Annotated[float, *_annotated("s")]
Hertz = Annotated[float, *_annotated("hz")]
Watt = Annotated[float, *_annotated("watt")]
Usd = Annotated[float, *_annotated("usd")]
UsdPerHour = Annotated[float, *_annotated("usd_per_hour")]


def human_bytes(value: float) -> str:
    """Short text for people.

    >>> human_bytes(41.23e9), human_bytes(999.9e6), human_bytes(1.234e15)
    ('41.2 GB', '1 GB', '1,234 TB')
    """
    shown = float(f"{value:.3g}")
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(shown) >= 1000 * factor:
            return f"{value / factor:,.0f} {prefix}B"
        if abs(shown) >= factor:
            return f"{shown / factor:.3g} {prefix}B"
    return f"{value:.0f} B"


def human_seconds(value: float) -> str:
    """Short text for people: ``2 min 14 s``, ``13.2 s``, ``4.1 ms``, ``12 us``.

    >>> human_seconds(134.2), human_seconds(13.21), human_seconds(0.0041), human_seconds(0.9997), human_seconds(59.97)
    ('2 min 14 s', '13.2 s', '4.1 ms', '1 s', '1 min 0 s')
    >>> human_seconds(134.8), human_seconds(3599.7), human_seconds(5390.0)
    ('2 min 15 s', '1 h 0 min', '1 h 30 min')
    """
    value = float(f"{value:.3g}") if value < 60 else round(value)  # its unit is that of what is shown
    if value >= 3600:
        return "{} h {} min".format(*divmod(round(value / 60), 60))
    if value >= 60:
        return "{} min {} s".format(*divmod(round(value), 60))
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"


def human_usd(value: float) -> str:
    """Money for people, always with cents below a thousand: ``9.00``, ``1,235``; of less than a cent two digits.

    >>> human_usd(9.0), human_usd(25.46), human_usd(1234.6), human_usd(0.00123)
    ('9.00', '25.46', '1,235', '0.0012')
    """
    if 0 < abs(value) < 0.01:
        return f"{value:.2g}"
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


_MOST_TOKENS = 2.0**53
"""Above it a float does not tell whole numbers apart."""
_TOKENS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(k|K|Ki)?\s*")


def token_count(text: str) -> int | None:
    """A number of tokens as text; ``k`` is 1,024, as context lengths are named; None where it is none.

    >>> token_count("16k"), token_count("1.5k"), token_count("16384"), token_count("0.3")
    (16384, 1536, 16384, None)
    """
    found = _TOKENS.fullmatch(text)
    count = float(found[1]) * (1024 if found[2] else 1) if found else 0.0
    return int(count) if 1 <= count <= _MOST_TOKENS and count == int(count) else None


def human_share(share: float, digits: int = 0, *, sign: bool = False) -> str:
    """A share for people.

    >>> human_share(0.318), human_share(0.318, 1), human_share(0.05, sign=True)
    ('32 %', '31.8 %', '+5 %')
    """
    return f"{100 * share:{'+' if sign else ''}z.{digits}f} %"


def human_risk(probability: float) -> str:
    """A probability for people; what is all but impossible or certain has no digits.

    >>> human_risk(1e-9), human_risk(0.0042), human_risk(0.37), human_risk(1.0)
    ('below 0.01 %', '0.42 %', '37 %', 'above 99 %')
    """
    if probability > 0.99:
        return "above 99 %"
    return "below 0.01 %" if probability < 1e-4 else f"{100 * probability:.2g} %"


def with_probability(probability: float) -> str:
    """The same in a sentence.

    >>> with_probability(1.0), with_probability(0.37)
    ('with a probability above 99 %', 'with a probability of 37 %')
    """
    said = human_risk(probability)
    return f"with a probability {said}" if said[0] in "ab" else f"with a probability of {said}"
