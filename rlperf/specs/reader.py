"""YAML and JSON read with line numbers; pydantic's complaints become one `SpecError` that lists them all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from rlperf.errors import Problem, SpecError, did_you_mean, nearest

Key = tuple[str | int, ...]
Spec = TypeVar("Spec", bound=BaseModel)


_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):  # type: ignore[misc]
    """Safe loader (libyaml's where it is built in) that leaves dates as text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class Document:
    """Parsed data with the line of every key."""

    def __init__(self, data: Any, lines: Mapping[Key, int], file: str) -> None:
        self.data = data
        self.lines = lines
        self.file = file

    def line(self, path: Key) -> int | None:
        """Line of the deepest part of ``path`` that stands in the file."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None

    def problem(self, path: Key, message: str, suggestion: str | None = None) -> Problem:
        """A problem at ``path`` of this document."""
        where = ".".join(map(str, path))
        return Problem(f"{where}: {message}" if where else message, self.file, self.line(path), suggestion)


def read_text(path: Path | str) -> str:
    """Text of a file, or a `SpecError` that says why not."""
    target = Path(path)
    try:
        return target.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise SpecError(Problem("no such file", str(target), suggestion=_near(target))) from error
    except UnicodeDecodeError as error:
        raise SpecError(Problem("is not UTF-8 text", str(target))) from error
    except OSError as error:
        raise SpecError(Problem(f"cannot be read: {error.strerror or error}", str(target))) from error


def _near(missing: Path) -> str | None:
    """A file of the same folder with nearly that name; equal endings make no two names alike."""
    here = missing.parent.iterdir() if missing.parent.is_dir() else ()
    names = {entry.stem: entry.name for entry in here}
    stem = nearest(missing.stem, names)
    return f"did you mean {names[stem]}?" if stem else None


def read_document(path: Path | str) -> Document:
    """Parse a YAML (or JSON) file."""
    return parse_document(read_text(path), str(path))


def parse_document(text: str, file: str) -> Document:
    """Parse YAML (or JSON) text; ``file`` is its name in messages."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise SpecError(Problem(f"is not valid YAML: {error.problem or error.context}", file, line)) from error
    except yaml.YAMLError as error:
        raise SpecError(Problem(f"is not valid YAML: {error}", file)) from error
    if node is None:
        raise SpecError(Problem("is empty", file))
    lines: dict[Key, int] = {}
    problems: list[Problem] = []
    _walk(node, (), lines, problems, file)
    if problems:
        raise SpecError(problems)
    try:
        data = yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader
    except yaml.YAMLError as error:
        raise SpecError(Problem(f"is not valid YAML: {error}", file)) from error
    return Document(data, lines, file)


def _walk(node: yaml.Node, path: Key, lines: dict[Key, int], problems: list[Problem], file: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[Hashable] = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key)
            if name in seen and name != "<<":
                problems.append(
                    Problem(f"{'.'.join(map(str, (*path, name)))}: stands twice", file, key.start_mark.line + 1)
                )
            seen.add(name)
            lines[(*path, name)] = key.start_mark.line + 1
            _walk(value, (*path, name), lines, problems, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, index)] = value.start_mark.line + 1
            _walk(value, (*path, index), lines, problems, file)


def validate(document: Document, spec: type[Spec]) -> Spec:
    """The document as ``spec``; every complaint of pydantic with its line, misspelt keys with a suggestion."""
    try:
        return spec.model_validate(document.data)
    except ValidationError as error:
        raise SpecError(problems_of(error, document, spec)) from error


def read_spec(path: Path | str, spec: type[Spec]) -> Spec:
    """Read and validate one file."""
    return validate(read_document(path), spec)


def problems_of(error: ValidationError, document: Document, spec: type[BaseModel]) -> list[Problem]:
    """Pydantic's errors as problems with lines, each once."""
    problems: dict[str, Problem] = {}
    items = error.errors(include_url=False)
    for item in items:
        # A list whose only entries are wrong is also called too short: an echo of the entries' own problems.
        if item["type"] == "too_short" and any(
            len(i["loc"]) > len(item["loc"]) and i["loc"][: len(item["loc"])] == item["loc"] for i in items
        ):
            continue
        path = _data_path(document.data, item["loc"])
        suggestion = None
        if item["type"] == "extra_forbidden":
            message = "unknown field"
            word, places = str(item["loc"][-1]), _field_places(spec)
            here = places.get(word)
            suggestion = f"it belongs to {' or '.join(here)}" if here else did_you_mean(word, places)
        elif item["type"] == "missing":
            message = "is missing"
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            given = item.get("input")
            if isinstance(given, str | int | float) and repr(given) not in message and str(given) not in message:
                message += f" (given: {given!r})"
        problem = document.problem(path, message, suggestion)
        problems.setdefault(str(problem), problem)
    return list(problems.values())


def _data_path(data: Any, location: Sequence[str | int]) -> Key:
    """The part of a pydantic location that names places in the data (tags of unions are left out)."""
    path: list[str | int] = []
    here = data
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if isinstance(here, Mapping) and (part in here or last):
            path.append(part)
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            path.append(part)
            here = here[part]
    return tuple(path)


def _field_places(spec: type[BaseModel]) -> dict[str, list[str]]:
    """Every field reachable from ``spec``, and the fields that it stands under."""
    places: dict[str, list[str]] = {}
    pending: list[tuple[Any, str]] = [(spec, "the top")]
    seen: set[tuple[Any, str]] = set()
    while pending:
        kind, parent = pending.pop()
        if (kind, parent) in seen:
            continue
        seen.add((kind, parent))
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for name, field in kind.model_fields.items():
                places.setdefault(name, []).append(parent)
                pending.append((field.annotation, name))
        else:
            pending.extend(
                (arg, parent)
                for arg in getattr(kind, "__args__", ())
                if isinstance(arg, type) or hasattr(arg, "__args__")
            )
    return dict(sorted(places.items()))
