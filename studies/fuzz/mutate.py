"""Mutations: bytes, numbers and words of a text, places of a YAML or JSON tree, cells of a table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import yaml

NUMBERS = (
    "0", "-1", "-0.0", "1e999", "-1e999", ".nan", "nan", "inf", ".inf", "1e30", "-1e30", "1e-30", "0.5", "3", "1000000",
    "1000000000", "9" * 30, "9" * 5000, "18446744073709551616", "1e18", "0x10", "1_000", "1,5", "",
)  # fmt: skip
WORDS = (
    "", "nope", "[/x]", "[bold", "$a and $b", "a\\nb", "a\nb: c", '"\\0"', "é漢", "../../etc/passwd", "a" * 5000,
    "null", "$(touch PWNED)", "`touch PWNED`", "{{x}}", "{0}", "%s", "<script>alert(1)</script>", "true", "[]", "{}",
    "[[1]]", "!!python/object/apply:os.system ['touch PWNED']",
    "!!binary aGk=", "&a [*a]", "*a", "~", "-", "'", '"', ":", "#",
    "[" * 300, "{" * 300, "$((1/0))", "${A:-${A}}", "${A", "2030-01-01", "/dev/null", ".", "\ufeff", "fp9", "int3",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 7, 10**6, 10**9, 10**18, 10**30, -(10**9), 0.5, -0.5, 1e-30, 1e30, 1e300,
    float("nan"), float("inf"), float("-inf"), "", "nope", "0", "-3 s", "0 s", "1e400 GB", "-5 GB/s", "0 GB/s", "nan s",
    "[/x] $a $b", "a\nb", "a" * 5000, [], [[]], [[8]], {}, {"min": 1, "max": 10**9, "step": 1}, {"a": {"b": [1]}},
    [1, "x", None], [None], list(range(50)), "../../x", "generic:nope", "generic:h100", "$(touch PWNED)",
)  # fmt: skip


def mutated(content: bytes, name: str, random: Random) -> bytes:
    """The content of a file with one to three mutations that suit it."""
    for _ in range(random.choice((1, 1, 2, 3))):
        ways: list[Callable[[bytes, Random], bytes]] = [in_bytes]
        if not name.endswith((".gz", ".tgz", ".parquet")) and "tfevents" not in name:
            ways += [in_lines, in_numbers, in_numbers, in_words]
            ways += [in_tree] * 5 * name.endswith((".yaml", ".json")) + [in_records] * 5 * name.endswith(".jsonl")
            ways += [in_cells] * 4 * name.endswith(".csv")
        content = random.choice(ways)(content, random)
    return content


def in_bytes(content: bytes, random: Random) -> bytes:
    """A slice lost, repeated, or overwritten."""
    at, size = random.randrange(len(content) + 1), random.choice((1, 1, 2, 8, 64, 1000))
    way = random.randrange(5)
    if way == 0:
        return content[:at] + content[at + size :]
    if way == 1:
        return content[: at + size] + content[at:]
    if way == 2:
        return content[:at]
    if way == 3:
        return (
            content[:at]
            + random.choice((b"\0", b"\xff", b"\r", b"\t", b"\n", b" " * 99, b"'", b'"', b","))
            + content[at:]
        )
    return content[:at] + random.randbytes(min(size, 8)) + content[at + min(size, 8) :]


def in_lines(content: bytes, random: Random) -> bytes:
    """A line lost, repeated, moved or indented."""
    lines = content.split(b"\n")
    at, way = random.randrange(len(lines)), random.randrange(4)
    line = lines.pop(at)
    if way == 1:
        lines[at:at] = [line] * random.choice((2, 2, 20))
    elif way == 2:
        lines.insert(random.randrange(len(lines) + 1), line)
    elif way == 3:
        lines.insert(at, b"  " + line)
    return b"\n".join(lines)


def _replaced(content: bytes, pattern: str, choices: tuple[str, ...], random: Random) -> bytes:
    text = content.decode("utf-8", "surrogateescape")
    found = list(re.finditer(pattern, text))
    if not found:
        return content
    match = random.choice(found)
    text = text[: match.start()] + random.choice(choices) + text[match.end() :]
    return text.encode("utf-8", "surrogateescape")


def in_numbers(content: bytes, random: Random) -> bytes:
    """A number that is none, or beyond all."""
    return _replaced(content, r"-?\d+(?:\.\d+)?", NUMBERS, random)


def in_words(content: bytes, random: Random) -> bytes:
    """A word that is another language's syntax."""
    return _replaced(content, r"[A-Za-z_][\w./-]*", WORDS, random)


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in inner for place in _places(value, (*path, key)))] if path or inner else []


def _changed(data: Any, random: Random) -> Any:
    """The tree with one place replaced, lost, wrapped or renamed."""
    places = [place for place in _places(data) if place]
    if not places:
        return random.choice(VALUES)
    *path, last = random.choice(places)
    holder = data
    for key in path:
        holder = holder[key]
    way = random.randrange(8)
    if way == 0:
        del holder[last]
    elif way == 1:
        holder[last] = [holder[last]]
    elif way == 2 and isinstance(holder, dict):
        holder[random.choice(("nope", "name", "", "a" * 300, str(last) + "s"))] = holder.pop(last)
    elif way == 3 and isinstance(holder, list):
        holder += holder * random.choice((1, 20))
    else:
        holder[last] = random.choice(VALUES)
    return data


def in_tree(content: bytes, random: Random) -> bytes:
    """A place of a YAML or JSON tree with another value."""
    try:
        data = yaml.load(content.decode(), Loader=yaml.CSafeLoader)
        made = _changed(data, random)
        if content.lstrip()[:1] in (b"{", b"["):
            return json.dumps(made).encode()
        return yaml.dump(made, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True).encode()
    except Exception:  # what is no tree any more
        return in_bytes(content, random)


def in_records(content: bytes, random: Random) -> bytes:
    """A place of one of the lines of JSON with another value."""
    lines = content.splitlines()
    if not lines:
        return in_bytes(content, random)
    at = random.randrange(len(lines))
    try:
        lines[at] = json.dumps(_changed(json.loads(lines[at]), random)).encode()
    except Exception:
        return in_bytes(content, random)
    return b"\n".join(lines) + b"\n"


def in_cells(content: bytes, random: Random) -> bytes:
    """A cell of a table with another text."""
    lines = [line.split(b",") for line in content.split(b"\n")]
    line = random.choice(lines)
    line[random.randrange(len(line))] = random.choice((*NUMBERS, *WORDS)).encode()
    return b"\n".join(b",".join(line) for line in lines)
