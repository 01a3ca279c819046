"""Words of a command line as the values that a framework's parser makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise

import yaml

from rlperf.frameworks.keytable import Value
from rlperf.frameworks.scripts.shell import Word

_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL)


def override_value(text: str) -> Value:
    r"""A value in hydra's override grammar: YAML-like, with ``{a:1}``, and quotes in which only quotes are escaped.

    >>> override_value("1e-6"), override_value(r"'it\'s'"), override_value("'null'"), override_value("{a:1}")
    (1e-06, "it's", 'null', {'a': 1})
    """
    if quoted := _QUOTED.fullmatch(text):
        return re.sub(r"(\\+)(?=$|')", lambda slashes: slashes[1][: len(slashes[1]) // 2], quoted[1])
    spaced = re.sub(r"([{,]\s*[\w.]+):(?=\S)", r"\1: ", text) if text.startswith("{") else text
    try:
        value = yaml.safe_load(spaced)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        return value if text.lstrip().startswith('"') else word_value(value)
    return text if value is not None and not isinstance(value, bool | int | float | str | list | dict) else value


def word_value(text: str) -> Value:
    """A word of the command line as number, flag, JSON or text.

    >>> word_value("8"), word_value("1e-6"), word_value("true"), word_value("512MB")
    (8, 1e-06, True, '512MB')
    """
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("null", "none"):
        return None
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return text if lowered.strip("+-") in ("nan", "inf", "infinity") or "_" in text else number
    if text[:1] in "[{":
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    return text


def serves(words: Sequence[Word]) -> bool:
    """Whether a command starts TRL's server of engines."""
    return "vllm-serve" in (word.text for word in words)


def served(words: Sequence[Word]) -> dict[str, Value]:
    """What ``trl vllm-serve`` is told, as ``vllm-serve.NAME``: GPUs that no key of the trainer speaks of."""
    flags = (
        (word.text[2:].partition("="), after.text) for word, after in pairwise(words) if word.text.startswith("--")
    )
    return {
        f"vllm-serve.{name.replace('-', '_')}": word_value(inline if equals else after)  # either spelling is taken
        for (name, equals, inline), after in flags
    }
