"""Text of configurations: YAML with a comment on each key, argument lists, launch scripts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import yaml

from rlperf.frameworks.fields import Setting
from rlperf.frameworks.keytable import Value

_NONE: Mapping[str, str] = MappingProxyType({})


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
    return text if _plain(text) else yaml.safe_dump(text, default_style='"', width=float("inf")).strip()


def hydra_value(value: Value) -> str:
    """A value in hydra's override grammar, in whose quotes only quotes are escaped, and slashes before them.

    >>> print(hydra_value("a: b"), hydra_value("it's"), hydra_value(["x", 1]), hydra_value(None))
    'a: b' 'it\\'s' [x,1] null
    """
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{hydra_value(below)}" for name, below in value.items()) + "}"
    if not isinstance(value, str) or _plain(value):
        return yaml_scalar(value)
    return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), value) + "'"


_WORDS = re.compile(r"[\w./@+-]+(?: [\w./@+-]+)*", re.ASCII)


@lru_cache(maxsize=4096)
def _plain(text: str) -> bool:
    """Whether a text may stand without quotes: words that YAML 1.1, and OmegaConf's wider numbers, read as that text.

    >>> _plain("full recompute"), _plain("1e-6"), _plain("on"), _plain("a: b"), _plain("-")
    (True, False, False, False, False)
    """
    if not _WORDS.fullmatch(text) or text[0] in "-+@.":
        return False
    try:
        float(text)
    except ValueError:
        return bool(yaml.safe_load(text) == text)
    return False


def comment(text: str) -> str:
    """Text for a comment: on one line, whatever stands in it.

    >>> comment("job\\nrm -rf /")
    'job rm -rf /'
    """
    return "".join(char if char.isprintable() else " " for char in text).rstrip()


def yaml_text(settings: Iterable[Setting], header: Sequence[str] = (), *, top: Sequence[str] = ()) -> str:
    """Nested YAML of dotted settings; each key with its reason as a comment. ``top``: raw lines after the header."""
    tree: dict[str, Value] = {}
    for setting in settings:
        here = tree
        *parents, leaf = setting.key.split(".")
        for name in parents:
            here = here.setdefault(name, {})
        here[leaf] = setting
    lines = [f"# {comment(line)}".rstrip() for line in header] + list(top)
    _emit(tree, 0, lines)
    return "\n".join(lines) + "\n"


def _emit(tree: Mapping[str, Value], depth: int, lines: list[str]) -> None:
    for name, below in tree.items():
        indent = "  " * depth
        if isinstance(below, Setting):
            text = f"{indent}{yaml_scalar(name)}: {yaml_scalar(below.value)}"
            lines.append(f"{text.ljust(56)}  # {comment(below.why)}" if below.why else text)
        else:
            lines.append(f"{indent}{yaml_scalar(name)}:")
            _emit(below, depth + 1, lines)


def flag_lines(settings: Iterable[Setting], variables: Mapping[str, str] = _NONE) -> list[str]:
    """One shell line per flag: ``--name value``; true is the bare flag, false and None leave it out.

    ``variables``: flag -> the variable of the script that holds its value

    >>> flag_lines([Setting("load", "-x"), Setting("save", "/a b")], {"save": "SAVE"})
    ['--load=-x', '--save "${SAVE}"']
    """
    lines = []
    for setting in settings:
        if setting.value is None or setting.value is False:
            continue
        name = shlex.quote(f"--{setting.key.removeprefix('--')}")
        if setting.value is True:
            lines.append(name)
        elif isinstance(setting.value, list | tuple):
            lines.append(" ".join([name, *(shell_word(flag_value(part)) for part in setting.value)]))
        else:
            text = flag_value(setting.value)
            word = f'"${{{variables[setting.key]}}}"' if setting.key in variables else shell_word(text)
            lines.append(f"{name}{'=' if _MISREAD.match(text) else ' '}{word}")
    return lines


_MISREAD = re.compile(r"-(?![\d.])|[A-Za-z_][\w./@-]*=")
"""A value that argparse takes for a flag, or a reader of scripts for an override, when it stands by itself."""


def flag_value(value: Value) -> str:
    """A flag's value as argparse reads it."""
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def shell_word(text: str) -> str:
    """``text`` as one word of bash: nothing in it is run; plain variables, which only the launch knows, are filled in.

    >>> print(shell_word("$HOME/$(reboot)"), shell_word("a b"), shell_word("x.py"))
    "${HOME}"'/$(reboot)' 'a b' x.py
    """
    parts, end = [], 0
    for match in _VARIABLE.finditer(text):
        parts += [shlex.quote(text[end : match.start()])] if match.start() > end else []
        parts.append(f'"${{{match[1] or match[2]}}}"')
        end = match.end()
    return "".join([*parts, shlex.quote(text[end:])] if end < len(text) or not parts else parts)


def defaults(named: Mapping[str, Value]) -> list[str]:
    """Lines that give variables their values where the environment has none."""
    return [f'[ -n "${{{name}:-}}" ] || {name}={shell_word(str(value))}' for name, value in named.items()]


def argument_array(name: str, settings: Sequence[Setting], variables: Mapping[str, str] = _NONE) -> list[str]:
    """A bash array of flags, one a line, each with its reason; ``variables`` as in `flag_lines`."""
    lines = [f"{name}=("]
    for setting in settings:
        for text in flag_lines([setting], variables):
            lines.append(f"  {text.ljust(52)} # {comment(setting.why)}" if setting.why else f"  {text}")
    return [*lines, ")"]


def script(header: Sequence[str], body: Sequence[str]) -> str:
    """A bash script that stops at the first error."""
    said = [f"# {comment(line)}".rstrip() for line in header]
    return "\n".join(["#!/usr/bin/env bash", *said, "set -euo pipefail", *body]) + "\n"
