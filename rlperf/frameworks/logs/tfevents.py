"""Scalars of TensorBoard event files, read without TensorBoard."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from rlperf.errors import Problem, SpecError


def scalars(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, tag -> value) of an event file, event by event.

    TFRecord framing (length, crc, data, crc) around ``Event`` messages: field 2 = step (varint), field 5 = summary,
    whose field 1 = value {1 = tag, 2 = simple_value (float), 8 = tensor {5 = float_val}}.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(Problem(f"cannot be read: {error.strerror or error}", str(path))) from error
    position = 0
    while position + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        record = data[position + 12 : position + 12 + length]
        position += 16 + length
        if len(record) < length:
            return
        step, values = 0, {}
        for number, value in _fields(record):
            if number == 2 and isinstance(value, int):
                step = value
            elif number == 5 and isinstance(value, bytes):
                values.update(_summary(value))
        if values:
            yield step, values


def _summary(message: bytes) -> dict[str, float]:
    found = {}
    for number, value in _fields(message):
        if number != 1 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, content in _fields(value):
            if inner == 1 and isinstance(content, bytes):
                tag = content.decode("utf-8", "replace")
            elif inner == 2 and isinstance(content, bytes):
                scalar = struct.unpack("<f", content)[0]
            elif inner == 8 and isinstance(content, bytes):
                scalar = _tensor_scalar(content) if scalar is None else scalar
        if tag and scalar is not None:
            found[tag] = float(scalar)
    return found


def _tensor_scalar(message: bytes) -> float | None:
    for number, value in _fields(message):
        if number in (4, 5) and isinstance(value, bytes) and len(value) >= 4:
            return float(struct.unpack_from("<f", value)[0])
    return None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message: varints as int, 32-bit, 64-bit and length-delimited as bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _varint(message, position)
            yield number, value
        else:
            size, position = (
                (_varint(message, position)) if kind == 2 else ({1: 8, 5: 4}.get(kind, len(message)), position)
            )
            yield number, message[position : position + size]
            position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value, shift = 0, 0
    while position < len(message):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, position
