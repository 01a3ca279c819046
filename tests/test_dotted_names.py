"""What the documentation, docstrings and comments call by name is there: dotted names and files."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = re.compile(r"(?<![\w/.-])rlperf(?:\.[A-Za-z_]\w*)+(?![\w/{*<-]|\.\w)")
FILE = re.compile(r"(?<![\w/.-])(?:rlperf|tests|studies|hwprofiles|docs)/[\w./-]*\w(?![\w{*])")
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted(path for top in ("rlperf", "tests", "studies", "docs/website") for path in (ROOT / top).rglob("*.py"))
MADE_UP = {"rlperf.nothing", "rlperf.cost.layers.retention"}
"""Names that tests ask for because they are not there, and of the file that a recipe adds."""


def there(name: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one: an attribute, or a field of a class."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("rlperf"):
                raise
            continue
        for word in parts[end:]:
            fields = getattr(found, "__dataclass_fields__", {}) | getattr(found, "model_fields", {})
            if not hasattr(found, word):
                return word in fields or word in getattr(found, "__annotations__", {})
            found = getattr(found, word)
        return True
    return False


def named(path: Path) -> set[str]:
    return set(NAME.findall(path.read_text(encoding="utf-8"))) - MADE_UP


def test_a_name_that_is_not_there_is_found_out() -> None:
    assert there("rlperf.sim.rl_step.stage_seconds.stage_seconds") and there("rlperf.layout.Layout.zero_stage")
    assert there("rlperf.specs.pool.PoolSpec.layout") and there("rlperf.plan_job")
    for gone in ("rlperf.sim.rl_step.stages.step_stages", "rlperf.layout.Layout.grid", "rlperf.nothing"):
        assert not there(gone)


def test_names_of_the_text_are_there() -> None:
    texts = [path for path in (*PAGES, *SOURCES) if path != Path(__file__)]
    where = [(name, path) for path in texts for name in sorted(named(path))]
    gone = {name for name in {name for name, _ in where} if not there(name)}
    assert [f"{path.relative_to(ROOT)}: {name}" for name, path in where if name in gone] == []
    assert len(where) > 500


def test_files_that_a_page_names_are_there() -> None:
    """A path below the checkout, or what a placeholder in capitals (``NAME.yaml``) stands for in a folder that is."""
    where = [(name, path) for path in PAGES for name in sorted(set(FILE.findall(path.read_text(encoding="utf-8"))))]
    files = [(name, path) for name, path in where if "NAME" not in name]
    assert [f"{path.relative_to(ROOT)}: {name}" for name, path in files if not (ROOT / name).exists()] == []
    assert len(files) > 100
