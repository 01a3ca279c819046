"""Expressions of validity rules: numbers and arrays under the names of groups, and nothing that could run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache, reduce
from typing import Any

import numpy as np

from rlperf.errors import SpecError


class MissingValueError(LookupError):
    """An expression asks for a value that nobody stated."""


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, choices: reduce(np.logical_or, (np.asarray(value == choice) for choice in choices)),
    ast.NotIn: lambda value, choices: ~reduce(np.logical_or, (np.asarray(value == choice) for choice in choices)),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": np.minimum, "max": np.maximum, "ceil": np.ceil}


@cache
def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise SpecError(f"rule expression {expression!r}: {error.msg}") from error


@cache
def names_in(expression: str) -> frozenset[str]:
    """Groups that an expression speaks of.

    >>> sorted(names_in("trainer.devices % rollout.devices == 0"))
    ['rollout', 'trainer']
    """
    return frozenset(group for group, _ in asked_in(expression))


@cache
def asked_in(expression: str) -> frozenset[tuple[str, str]]:
    """(group, name) of every value that an expression asks for."""
    return frozenset(
        (node.value.id, node.attr)
        for node in ast.walk(_parse(expression))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )


def evaluate(expression: str, names: Mapping[str, object]) -> Any:
    """Value of an expression of ``+ - * / // %``, comparisons, ``and or not``, ``min max ceil`` and ``group.name``.

    Raises
    ------
    MissingValueError : a group or name has no value
    SpecError : anything else than the above stands in the expression

    >>> from types import SimpleNamespace
    >>> evaluate("a.x % 4 == 0 and not a.flag", {"a": SimpleNamespace(x=np.array([4, 6]), flag=False)}).tolist()
    [True, False]
    """
    # A zero divisor only stands where ``when`` excludes the candidate; numpy answers 0 there.
    with np.errstate(divide="ignore", invalid="ignore"):
        return _value(_parse(expression), names)


def _value(node: ast.expr, names: Mapping[str, object]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return _look_up(names, node.value.id, node.attr)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return np.logical_not(_value(node.operand, names))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, names)
    if isinstance(node, ast.BoolOp):
        return _logical(node, names)
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops):
        values = [_value(part, names) for part in (node.left, *node.comparators)]
        pairs = zip(node.ops, values, values[1:], strict=False)
        return reduce(np.logical_and, (_COMPARE[type(op)](left, right) for op, left, right in pairs))
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(part, names) for part in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*(_value(part, names) for part in node.args))
    raise SpecError(f"rule expressions know no {ast.unparse(node)!r}")


def _logical(node: ast.BoolOp, names: Mapping[str, object]) -> Any:
    """``and`` / ``or`` over arrays; a decided left side (all false, all true) leaves the right side unread.

    A later alternative of ``or`` that nobody states a value for is not fulfilled.
    """
    conjunction = isinstance(node.op, ast.And)
    result: Any = None
    for part in node.values:
        try:
            value = _value(part, names)
        except MissingValueError:
            if conjunction or result is None:
                raise
            continue
        result = value if result is None else (np.logical_and if conjunction else np.logical_or)(result, value)
        if not np.any(result) if conjunction else np.all(result):
            return result
    return result


def _look_up(names: Mapping[str, object], group: str, name: str) -> Any:
    if group not in names or name.startswith("_"):
        raise MissingValueError(f"{group}.{name}")
    holder = names[group]
    value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
    if value is None:
        raise MissingValueError(f"{group}.{name}")
    return np.asarray(value) if isinstance(value, int | float) else value
