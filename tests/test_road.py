"""docs/theory/road.md: the walks it names exist, hop by hop, and nobody walks beside the road."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "theory" / "road.md").read_text(encoding="utf-8")
CODE = re.compile(r"^`(rlperf\.[\w.]+)`$")
MOST = 6
"""Hops of a walk."""
DEPTH = 2
"""How deep inside what a function takes and returns a form may stand: a job's pool's layout."""
CALLERS = {
    "stage_seconds": {"plan/search/split_columns.py", "plan/judge/evaluate.py", "plan/judge/scaled.py"},
    "counted_seconds": {"plan/search/rollout_columns.py"},
    "closed_training": {"plan/search/trainer_columns.py"},
    "simulated_rollout": {"plan/judge/evaluate.py"},
    "simulated_training": {"plan/judge/evaluate.py"},
}
"""Functions of the road, and the only files outside `sim/rl_step` that call them."""


def script() -> ModuleType:
    spec = spec_from_file_location("road", ROOT / "docs" / "website" / "road.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROAD = script()
WALKS = ROAD.walks(PAGE)
HOPS = [(title, hop) for title, hops in WALKS for hop in hops]


def found(name: str) -> tuple[object, list[Any]]:
    """What a dotted name leads to, and the classes on the way."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            here: Any = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        owners = []
        for word in parts[end:]:
            here = getattr(here, word)
            owners.append(here)
        return here, [each for each in owners[:-1] if isinstance(each, type)]
    raise AssertionError(f"{name} is not there")


def parts_of(hint: Any) -> Iterator[type]:
    """Classes that stand in an annotation."""
    if isinstance(hint, type):
        yield hint
    for inner in get_args(hint):
        yield from parts_of(inner)


def within(hints: list[Any], depth: int) -> set[type]:
    """Classes in the annotations, and in the fields of those, so deep."""
    classes = {each for hint in hints for each in parts_of(hint)}
    if depth:
        ours = [each for each in classes if each.__module__.startswith("rlperf")]
        fields = [hint for each in ours for hint in get_type_hints(each).values()]
        fields += [hint for each in ours for hint in getattr(each, "__pydantic_fields__", {}).values()]
        classes |= within(fields, depth - 1)
    return classes


def speaks_of(name: str) -> set[type]:
    function, owners = found(name)
    assert inspect.isfunction(function), name
    return within([*get_type_hints(function).values(), *owners], DEPTH)


def test_walks_are_named_and_short() -> None:
    assert [title for title, _ in WALKS] == ["A layout", "A length", "A length", "A bandwidth", "A bandwidth"]
    for title, hops in WALKS:
        assert 3 <= len(hops) <= MOST, title
        first = CODE.match(hops[0].source)
        assert first is None, f"{title} starts at a file"
        for before, after in pairwise(hops):
            assert before.target == after.source, f"{title}: {before.target} is followed by {after.source}"


@pytest.mark.parametrize(("title", "hop"), HOPS, ids=[f"{title}-{hop.by.split('.')[-1]}" for title, hop in HOPS])
def test_a_hop_s_function_takes_and_gives_what_the_page_says(title: str, hop: Any) -> None:
    spoken = speaks_of(hop.by)
    for side in (hop.source, hop.target):
        named = CODE.match(side)
        if named:
            form, _ = found(named[1])
            assert form in spoken, f"{hop.by} knows no {named[1]}"


def calls(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in CALLERS):
        return set()
    tree = ast.parse(text)
    names = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {node.id if isinstance(node, ast.Name) else node.attr for node in names if not isinstance(node, ast.Call)
            and isinstance(node, ast.Name | ast.Attribute)}  # fmt: skip


def test_nobody_walks_beside_the_road() -> None:
    package, seen = ROOT / "rlperf", {name: set[str]() for name in CALLERS}
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).as_posix()
        if not place.startswith("sim/rl_step/"):
            for name in calls(path) & set(CALLERS):
                seen[name].add(place)
    assert seen == CALLERS
    for name in CALLERS:
        assert f".{name}`" in PAGE


def test_the_figures_are_of_this_page() -> None:
    for name, drawn in ROAD.figures(PAGE).items():
        shipped = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        words = set(re.findall(r">([\w.]+)</text>", drawn.decode()))
        assert words and words == set(re.findall(r">([\w.]+)</text>", shipped)), "run docs/website/road.py"
        assert f"images/{name}" in PAGE
