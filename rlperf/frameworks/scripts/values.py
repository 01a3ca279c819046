"""Text that the shell makes of text: operations on a variable's value, arithmetic, and commands that only compute.

Nothing is executed: what a command says is worked out here for those whose answer is in their words (``basename``,
``dirname``, ``expr``, ``seq``, ``echo``, ``echo ... | bc``). Bash's manual, "Shell Parameter Expansion".
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

OPERATION = re.compile(r"\$\{([A-Za-z_]\w*)(##?|%%?|//?|,,?|\^\^?|:(?=[\d ]))((?:[^{}$]|\{[^{}]*\})*)\}")
"""``${NAME##*/}``, ``${NAME%.json}``, ``${NAME//-/_}``, ``${NAME,,}``, ``${NAME:0:3}``: name, operator, the rest."""
COMMAND = re.compile(r"\$\(\s*((?:basename|dirname|expr|seq|echo)\s[^()`$]*)\)|`\s*(#[^`]*|(?:basename|expr)\s[^`$]*)`")
"""A command that may only compute, of words that are known; or a comment between the words of another."""


def operated(value: str, sign: str, rest: str) -> str:
    """The value of a variable under an operator of ``${NAME...}``.

    >>> [operated("/a/Qwen3-8B.json", *each) for each in (("##", "*/"), ("%", ".json"), ("//", "-/_"))]
    ['Qwen3-8B.json', '/a/Qwen3-8B', '/a/Qwen3_8B.json']
    >>> operated("Llama", ",,", ""), operated("qwen", "^", ""), operated("abcdef", ":", "1:3")
    ('llama', 'Qwen', 'bcd')
    """
    if sign in (",,", "^^"):
        return value.lower() if sign == ",," else value.upper()
    if sign in (",", "^"):
        return (value[:1].lower() if sign == "," else value[:1].upper()) + value[1:]
    if sign == ":":
        start, _, count = rest.partition(":")
        end = None if not count.strip() else int(start) + int(count) if int(count) >= 0 else int(count)
        return value[int(start) : end]
    if sign in ("#", "##", "%", "%%"):
        return _without_end(value, sign, rest)
    found, _, instead = rest.partition("/")
    pattern = re.escape(found).replace(r"\*", ".*").replace(r"\?", ".")
    return re.sub(pattern, lambda _: instead, value, count=0 if sign == "//" else 1)


def _without_end(value: str, sign: str, pattern: str) -> str:
    """Without the shortest, or longest, beginning (``#``) or end (``%``) that matches."""
    lengths = range(len(value) + 1)
    for length in reversed(lengths) if len(sign) == 2 else lengths:
        start = sign[0] == "#"
        part = value[:length] if start else value[len(value) - length :]
        if fnmatchcase(part, pattern):
            return value[length:] if start else value[: len(value) - length]
    return value


def computed(command: str) -> str | None:
    """What a command of known words says; None where it would have to run.

    >>> said = ("basename /a/Qwen3-8B", "expr 2 + 3", "seq 2 4", 'echo "3*8" | bc', "# no word")
    >>> [computed(each) for each in said]
    ['Qwen3-8B', '5', '2 3 4', '24', '']
    >>> computed("seq 1 x") is computed("echo 1 | sort") is None
    True
    """
    if command.startswith("#"):
        return ""
    try:
        name, *words = shlex.split(command)
    except ValueError:
        return None
    said = " ".join(words)
    if name == "echo":
        text, pipe, program = said.partition("|")
        return said if not pipe else arithmetic(text) if program.strip() in ("bc", "bc -l") else None
    if name == "expr":
        return arithmetic(said)
    if name == "seq":
        numbers = [int(word) for word in words if re.fullmatch(r"-?\d+", word)]
        if len(numbers) != len(words) or not 1 <= len(numbers) <= 3:
            return None
        first, step, last = (1, 1, *numbers) if len(numbers) == 1 else (numbers[0], *([1, *numbers[1:]][-2:]))
        return " ".join(map(str, range(first, last + (1 if step > 0 else -1), step or 1)))
    if not words or "|" in words:
        return None
    if name == "basename":
        last_part = PurePosixPath(words[0]).name
        return last_part.removesuffix(words[1]) if len(words) > 1 else last_part
    return str(PurePosixPath(words[0]).parent)


def arithmetic(text: str) -> str | None:
    """Whole-number arithmetic as the shell does it; None for anything else.

    >>> [arithmetic(each) for each in ("2 * (3 + 4)", "7 / 2", "2**10", "8 > 4 ? 16 : 2", "1.5 * 2", "A + 1")]
    ['14', '3', '1024', '16', None, None]
    """
    chosen = re.fullmatch(r"([^?:]+)\?([^?:]+):([^?:]+)", text)
    if chosen:
        holds, *branches = (arithmetic(part) for part in chosen.groups())
        return None if holds is None else branches[0] if holds != "0" else branches[1]
    if not re.fullmatch(r"[\d\s+\-*/%()<>=!]+", text):
        return None
    try:
        return str(_whole(ast.parse(text.strip().replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


_SIGNS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_MOST_POWER = 64


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole(node.operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SIGNS:
        return int(_SIGNS[type(node.ops[0])](_whole(node.left), _whole(node.comparators[0])))
    if isinstance(node, ast.BinOp):
        left, right = _whole(node.left), _whole(node.right)
        if type(node.op) in _SIGNS:
            return _SIGNS[type(node.op)](left, right)
        if isinstance(node.op, ast.Pow) and 0 <= right <= _MOST_POWER:
            return int(left**right)
    raise ValueError("not whole-number arithmetic")
