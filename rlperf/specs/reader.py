"""The border through which files come in: text, YAML, JSON and CSV with line numbers, pydantic's complaints as one
`SpecError` that lists them all, and `reading`, which turns whatever else fails in a reader into one.

Nothing that is read is executed, and nothing beside it is read: tags of YAML, constants that are no numbers, endless
files, nesting without end and aliases that multiply are refused here, for every reader.
"""

from __future__ import annotations

import csv
import json
import math
import re
import stat
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from rlperf.errors import Problem, RlperfError, SpecError, did_you_mean, failure, nearest
from rlperf.specs.meant import meant_field

Key = tuple[str | int, ...]
Spec = TypeVar("Spec", bound=BaseModel)

MOST_BYTES = 1 << 30
"""A text of this size is no configuration, log or table of ours; it would take several times as much memory."""
MOST_DEPTH = 100
"""A file nests no deeper."""
MOST_VALUES = 1_000_000
"""A file holds no more values, those counted again that an alias repeats."""
_HEAD = 1 << 24
"""What is read of a line to tell what a file holds [characters]."""
_UNSAFE_DEPTH = 5000
"""libyaml composes recursively on the C stack, which ends somewhere beyond 20,000 levels, and the process with it."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""What no name, path or number holds: control characters, and halves of characters."""

_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):  # type: ignore[misc]
    """Safe loader (libyaml's where it is built in) that leaves dates as text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class Document:
    """Parsed data with the line of every key."""

    def __init__(self, data: Any, lines: Mapping[Key, int], file: str, lends: frozenset[str] = frozenset()) -> None:
        self.data = data
        self.lines = lines
        self.file = file
        self.lends = lends
        """Names at the top below which something stands that aliases elsewhere repeat."""

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


@contextmanager
def reading(file: Path | str, line: int | None = None) -> Iterator[None]:
    """The one place where a reader's failure becomes an error with file and line, whatever the file did to it.

    Readers say in their own words what is wrong with a file; what they did not foresee (a value of another type, a
    broken archive, a number of a thousand digits) ends here. Wrap what looks at bytes of a user, nothing that computes.
    """
    try:
        yield
    except RlperfError:
        raise
    except Exception as error:
        raise SpecError(Problem(f"cannot be read: {failure(error)}", str(file), line)) from error
    except BaseException as error:
        # polars' readers panic on some damaged files; the panic is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise SpecError(Problem(f"cannot be read: {failure(error)}", str(file), line)) from error


def read_text(path: Path | str) -> str:
    """Text of a file, or a `SpecError` that says why not."""
    target = Path(path)
    try:
        status = target.stat()
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            raise SpecError(Problem("is a device, a file is due", str(target)))
        if status.st_size > MOST_BYTES:
            raise SpecError(Problem(f"has {status.st_size:,} bytes: at most {MOST_BYTES:,} are read", str(target)))
        if stat.S_ISFIFO(status.st_mode):
            return _piped((status.st_dev, status.st_ino), target)
        return target.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise SpecError(Problem("no such file", str(target), suggestion=_near(target))) from error
    except UnicodeDecodeError as error:
        raise SpecError(Problem("is not UTF-8 text", str(target))) from error
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(Problem(f"cannot be read: {failure(error)}", str(target))) from error


@cache
def _piped(_pipe: tuple[int, int], path: Path) -> str:
    """Text of a pipe, kept: it has it no second time, and who asks of a file asks more than once."""
    return path.read_text(encoding="utf-8")


def is_there(path: Path) -> bool:
    """Whether a path exists; one that no file system could hold (too long, with a NUL) does not."""
    return _asked(path.exists)


def below(folder: Path | str | None, path: Path) -> Path:
    """A relative path from ``folder`` where it leads to something from there, else as it stands."""
    inside = path if folder is None else Path(folder) / path
    return inside if is_there(inside) or not is_there(path) else path


def is_file(path: Path) -> bool:
    """Whether a path is a file, as in `is_there`."""
    return _asked(path.is_file)


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, as in `is_there`."""
    return _asked(path.is_dir)


def is_pipe(path: Path) -> bool:
    """Whether a path is a pipe, as in `is_there`."""
    return _asked(path.is_fifo)


def _asked(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except (OSError, ValueError):
        return False


def parse_json(text: str | bytes, file: Path | str, line: int | None = None) -> Any:
    """JSON, or a `SpecError` with file and line; ``line`` is that of the text where it is one line of a file.

    >>> parse_json("[1, 2.5]", "a.json")
    [1, 2.5]
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(Problem(f"is not valid JSON: {error.msg}", str(file), line or error.lineno)) from error
    except UnicodeDecodeError as error:
        raise SpecError(Problem("is not UTF-8 text", str(file), line)) from error
    except (ValueError, RecursionError) as error:
        raise SpecError(Problem(f"is not valid JSON: {failure(error)}", str(file), line)) from error


def first_record(path: Path | str) -> dict[str, Any] | None:
    """The object on the first line of a JSONL file, to tell what it holds; None where there is no such thing."""
    try:
        with Path(path).open(encoding="utf-8") as stream:
            lines = iter(lambda: stream.readline(_HEAD), "")
            record = json.loads(next((line for line in lines if line.strip()), "null"))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def csv_rows(text: str, file: Path | str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of a CSV, the header too; blank lines and comments that begin with ``#`` are left out.

    A cell does not go over the end of its line: measured tables have none such, and a quote that is never closed would
    swallow the rest of the file.

    >>> list(csv_rows("a,b\\n# note\\n1,2\\n", "t.csv"))
    [(1, ['a', 'b']), (3, ['1', '2'])]
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            yield number, next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise SpecError(Problem(f"is not valid CSV: {error}", str(file), number)) from error


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
        _not_too_deep(text, file)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(error, file) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(Problem(f"is not valid YAML: {failure(error)}", file)) from error
    if node is None:
        raise SpecError(Problem("is empty", file))
    walked = _Walk(file)
    walked.walk(node, ())
    if walked.problems:
        raise SpecError(walked.problems)
    try:
        data = _Loader("").construct_document(node)  # _Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(error, file) from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise SpecError(Problem(f"is not valid YAML: {failure(error)}", file)) from error
    return Document(data, walked.lines, file, frozenset(walked.lends))


def _not_yaml(error: yaml.MarkedYAMLError, file: str) -> SpecError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else None
    return SpecError(Problem(f"is not valid YAML: {error.problem or error.context}", file, line))


def _not_too_deep(text: str, file: str) -> None:
    """Refuse nesting that would end the process. A level takes a bracket, or a column: few files can be that deep."""
    if text.count("[") + text.count("{") < _UNSAFE_DEPTH and all(len(n) < _UNSAFE_DEPTH for n in text.splitlines()):
        return
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise SpecError(Problem(f"is nested more than {MOST_DEPTH} levels deep", file))


_PLAIN = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map", "merge", "value")
)


class _Walk:
    """Lines of every key, and what a reader must not meet: keys that stand twice, tags, numbers without end."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[Key, int] = {}
        self.problems: list[Problem] = []
        self.values = 0
        self.lends: set[str] = set()
        self._first: dict[yaml.Node, Key] = {}

    def walk(self, node: yaml.Node, path: Key) -> None:
        """One node and everything below it."""
        self.lines.setdefault(path, node.start_mark.line + 1)
        self.values += 1
        first = self._first.setdefault(node, path)
        if first != path and first:
            self.lends.add(str(first[0]))
        if len(path) > MOST_DEPTH or self.values > MOST_VALUES:
            what = f"is nested more than {MOST_DEPTH} levels deep, or an alias holds itself"
            many = f"holds more than {MOST_VALUES:,} values with its aliases written out"
            raise SpecError(Problem(many if self.values > MOST_VALUES else what, self.file, node.start_mark.line + 1))
        if node.tag not in _PLAIN:
            self._problem(path, f"has a tag {node.tag!r}: plain values are due", node)
        if isinstance(node, yaml.MappingNode):
            self._mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self.lines[(*path, index)] = value.start_mark.line + 1
                self.walk(value, (*path, index))
        elif wrong := _CONTROL.search(node.value):
            self._problem(path, f"holds {wrong[0]!r}, which no name or number has", node)

    def _mapping(self, node: yaml.MappingNode, path: Key) -> None:
        seen: set[Hashable] = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            if not isinstance(key, yaml.ScalarNode) or _CONTROL.search(name) or key.tag not in _PLAIN:
                self._problem(path, "has a key that is no plain name", key)
            elif name in seen and name != "<<":
                self._problem((*path, name), "stands twice", key)
            seen.add(name)
            self.lines[(*path, name)] = key.start_mark.line + 1
            self.walk(value, (*path, name))

    def _problem(self, path: Key, message: str, node: yaml.Node) -> None:
        where = ".".join(map(str, path))
        text = f"{where}: {message}" if where else message
        self.problems.append(Problem(text, self.file, node.start_mark.line + 1))


def validate(document: Document, spec: type[Spec]) -> Spec:
    """The document as ``spec``; every complaint of pydantic with its line, misspelt keys with a suggestion."""
    undefined = [document.problem(path, f"{value} is no number") for path, value in _not_finite(document.data)]
    if undefined:
        raise SpecError(undefined)
    try:
        return spec.model_validate(document.data)
    except ValidationError as error:
        raise SpecError(problems_of(error, document, spec)) from error


def _not_finite(data: Any, path: Key = ()) -> Iterator[tuple[Key, float]]:
    """Infinities and not-a-numbers of parsed data, with their places: no form of ours holds one."""
    if isinstance(data, float):
        if not math.isfinite(data):
            yield path, data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from _not_finite(value, (*path, str(key)))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _not_finite(value, (*path, index))


def read_spec(path: Path | str, spec: type[Spec]) -> Spec:
    """Read and validate one file."""
    return validate(read_document(path), spec)


MOST_SHOWN = 80
"""Characters of a wrong value that a message repeats."""


_LIST, _FIELDS = ("a list is due", "each entry begins with '- '"), ("fields with values are due", "name: value")
_DUE = {"tuple_type": _LIST, "list_type": _LIST, "model_type": _FIELDS, "dict_type": _FIELDS}
"""Pydantic's words for what stands there in another form -> what a file is to hold, and how it is written."""
_QUOTED = re.compile(r"'([^']+)'")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


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
            message, suggestion = "unknown field", meant_field(item["loc"], spec)
        elif item["type"] == "missing":
            message = "is missing"
        elif item["type"] in _DUE:
            message, suggestion = _DUE[item["type"]]
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            given = item.get("input")
            if isinstance(given, str | int | float) and repr(given) not in message and str(given) not in message:
                said = repr(given)
                message += f" (given: {said if len(said) <= MOST_SHOWN else said[:MOST_SHOWN] + ' ...'})"
            if isinstance(given, str) and (percent := _PERCENT.fullmatch(given)):
                suggestion = f"write {float(percent[1]) / 100.0:g}"
            if isinstance(given, str) and item["type"] == "literal_error":
                suggestion = did_you_mean(given.lower(), _QUOTED.findall(item["msg"]))
        for line in message.split("\n"):
            where, said = _named_first(document, path, line)
            problem = document.problem(where, said, suggestion)
            problems.setdefault(str(problem), problem)
    return list(problems.values())


def _named_first(document: Document, path: Key, message: str) -> tuple[Key, str]:
    """Where the field stands that a message about several fields begins with (``run.spot: ...``)."""
    field, colon, rest = message.partition(": ")
    inside = (*path, *field.split("."))
    return (inside, rest) if colon and inside in document.lines else (path, message)


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
