"""Rules of the house that no linter states: sizes, reasons for exceptions, and what may be remembered by what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

FILES = sorted((ROOT / "rlperf").rglob("*.py"))
MOST_LINES, MOST_FILE_LINES = 60, 450
REASON = "Long because"
"""What a docstring says where a function or a file is longer, with the reason."""


@cache
def tree_of(file: Path) -> ast.Module:
    """A file of the package, parsed once for all rules."""
    return ast.parse(file.read_text(encoding="utf-8"))


def within(tree: ast.AST) -> Iterator[ast.AST]:
    """What stands below a node, but for the insides of expressions: no function does, and they are nine in ten."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node
            yield from within(node)


def long_parts(text: str, tree: ast.Module) -> list[str]:
    """Functions of a file, and the file itself, that are too long and do not say why."""
    found = [
        f"{node.lineno} {node.name}: {lines} lines"
        for node in within(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MOST_LINES
        and REASON not in (ast.get_docstring(node) or "")
    ]
    lines = text.count("\n")
    if lines > MOST_FILE_LINES and REASON not in (ast.get_docstring(tree) or ""):
        found.append(f"{lines} lines")
    return found


def test_functions_and_files_are_short_or_say_why_not() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{part}"
        for file in FILES
        for part in long_parts(file.read_text(encoding="utf-8"), tree_of(file))
    ]
    assert not long, "\n".join(long)


def test_the_rule_needs_a_reason() -> None:
    def found(text: str) -> list[str]:
        return long_parts(text, ast.parse(text))

    body = "    x = 1\n" * MOST_LINES
    assert found(f"def f():\n{body}") == ["1 f: 61 lines"]
    assert found(f'def f():\n    """Long because it is a toy."""\n{body}') == []
    assert found("x = 1\n" * (MOST_FILE_LINES + 1)) == ["451 lines"]


def test_nothing_is_remembered_by_identity() -> None:
    """An id() outlives what it named: a cache keyed by it can answer for another object."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in FILES
        if re.search(r"\bid\(", file.read_text(encoding="utf-8"))
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id"
    ]
    assert not found, "\n".join(found)


def test_shares_are_printed_in_one_form() -> None:
    """32% stood beside 32 %: `human_share` writes them, no format of Python's."""
    assert not [str(file) for file in FILES if re.search(r"\.\d%[}\"']", file.read_text(encoding="utf-8"))]


SLOW = ("scipy.optimize", "scipy.stats", "matplotlib")
"""What takes as long to load as a small plan: where it is called, for those who call it."""


def test_what_is_slow_to_load_is_loaded_where_it_is_called() -> None:
    early = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in FILES
        for node in tree_of(file).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.startswith(SLOW) for name in [getattr(node, "module", None) or "", *(a.name for a in node.names)])
    ]
    assert not early


def test_functions_take_few_arguments_or_say_why_not() -> None:
    """More than nine want a noun; commands of the command line have an argument for each option."""
    many = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}: {len(names)}"
        for file in FILES
        if "cli" not in file.parts
        for node in within(tree_of(file))
        if isinstance(node, ast.FunctionDef)
        and len(names := [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")]) > 9
        and REASON not in (ast.get_docstring(node) or "")
    ]
    assert not many, "\n".join(many)
