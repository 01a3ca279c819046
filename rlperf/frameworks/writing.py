"""Text of configurations: YAML with a comment on each key, argument lists, launch scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence

from rlperf.frameworks.fields import Setting
from rlperf.frameworks.keytable import Value


def yaml_scalar(value: Value) -> str:
    """One value on one line as YAML 1.1 and OmegaConf both read it.

    >>> yaml_scalar(1e-06), yaml_scalar(None), yaml_scalar("a: b"), yaml_scalar([1, "x"])
    ('1.0e-06', 'null', '"a: b"', '[1, x]')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        mantissa, e, exponent = text.partition("e")
        return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}" if e else text
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_scalar, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{yaml_scalar(name)}: {yaml_scalar(below)}" for name, below in value.items()) + "}"
    text = str(value)
    return text if _plain(text) else json.dumps(text)


_RESERVED = {"true", "false", "yes", "no", "on", "off", "null", "~", ""}


def _plain(text: str) -> bool:
    """Whether a text may stand without quotes."""
    if text.lower() in _RESERVED or text[0] in "-?:,[]{}#&*!|>'\"%@`" or text != text.strip():
        return False
    if any(part in text for part in (": ", " #", "{", "}", "[", "]", ",", "\n", "$")) or text.endswith(":"):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def yaml_text(settings: Iterable[Setting], header: Sequence[str] = (), *, top: Sequence[str] = ()) -> str:
    """Nested YAML of dotted settings; each key with its reason as a comment. ``top``: raw lines after the header."""
    tree: dict[str, Value] = {}
    for setting in settings:
        here = tree
        *parents, leaf = setting.key.split(".")
        for name in parents:
            here = here.setdefault(name, {})
        here[leaf] = setting
    lines = [f"# {line}".rstrip() for line in header] + list(top)
    _emit(tree, 0, lines)
    return "\n".join(lines) + "\n"


def _emit(tree: Mapping[str, Value], depth: int, lines: list[str]) -> None:
    for name, below in tree.items():
        indent = "  " * depth
        if isinstance(below, Setting):
            text = f"{indent}{name}: {yaml_scalar(below.value)}"
            lines.append(f"{text.ljust(56)}  # {below.why}" if below.why else text)
        else:
            lines.append(f"{indent}{name}:")
            _emit(below, depth + 1, lines)


def flag_lines(settings: Iterable[Setting]) -> list[str]:
    """One shell line per flag: ``--name value``; true is the bare flag, false and None leave it out."""
    lines = []
    for setting in settings:
        if setting.value is None or setting.value is False:
            continue
        name = setting.key if setting.key.startswith("--") else f"--{setting.key}"
        if setting.value is True:
            lines.append(name)
        elif isinstance(setting.value, list | tuple):
            lines.append(" ".join([name, *(shlex.quote(flag_value(part)) for part in setting.value)]))
        else:
            lines.append(f"{name} {_quoted(flag_value(setting.value))}")
    return lines


def flag_value(value: Value) -> str:
    """A flag's value as argparse reads it."""
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _quoted(text: str) -> str:
    """Shell quoting that leaves ``${NAME:-default}`` to the shell."""
    return f'"{text}"' if text.startswith("${") else shlex.quote(text)


def argument_array(name: str, settings: Sequence[Setting], *, width: int = 52) -> list[str]:
    """A bash array of flags, one a line, each with its reason."""
    lines = [f"{name}=("]
    for setting in settings:
        for text in flag_lines([setting]):
            lines.append(f"  {text.ljust(width)} # {setting.why}" if setting.why else f"  {text}")
    return [*lines, ")"]


def script(header: Sequence[str], body: Sequence[str]) -> str:
    """A bash script that stops at the first error."""
    comment = [f"# {line}".rstrip() for line in header]
    return "\n".join(["#!/usr/bin/env bash", *comment, "set -euo pipefail", *body]) + "\n"
