"""One word, one thing: no two classes of the package share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import rlperf

PACKAGE = Path(rlperf.__file__).parent


def test_no_two_public_classes_share_a_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                # Microbatches and MicroBatches are one name to a reader, so case does not tell classes apart.
                found[node.name.lower()].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(found) > 300
    assert not {name: places for name, places in found.items() if len(places) > 1}
