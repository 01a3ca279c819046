"""Length models as YAML files, and the presets that are shipped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.writer import write_atomic
from rlperf.workload.model import LengthModel

PRESETS = ("math", "programming", "searching", "tool_use", "image", "video", "mixed")
_FOLDER = Path(__file__).parent / "presets"
_OMITTED = (
    "turns",
    "filtering",
    "reward",
    "mixture",
    "max_context_tokens",
    "vision_fraction",
    "candidates",
    "alternatives",
)


def load_model(path_or_preset: Path | str) -> LengthModel:
    """A preset by name, or a model file.

    >>> load_model("math").provenance.kind
    'fitted'
    """
    name = str(path_or_preset)
    if name in PRESETS:
        return _preset(name)
    path = Path(path_or_preset)
    if not path.exists() and path.suffix not in (".yaml", ".yml"):
        hint = did_you_mean(name, PRESETS) or f"presets are {', '.join(PRESETS)}; a model file ends in .yaml"
        raise SpecError(Problem(f"{name!r} is neither a preset nor a file", suggestion=hint))
    return _load(path)


@lru_cache(maxsize=len(PRESETS))
def _preset(name: str) -> LengthModel:
    return _load(_FOLDER / f"{name}.yaml")


def _load(path: Path) -> LengthModel:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(Problem(f"cannot be read: {getattr(error, 'strerror', None) or error}", str(path))) from error
    try:
        content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        message = f"not valid YAML: {getattr(error, 'problem', error)}"
        raise SpecError(Problem(message, str(path), mark.line + 1 if mark else None)) from error
    if not isinstance(content, dict):
        raise SpecError(Problem("not a length model: an object with task, prompt and response is due", str(path)))
    try:
        return LengthModel.model_validate(content)
    except ValidationError as error:
        raise SpecError(_problems(error, path, text)) from error


def _problems(error: ValidationError, path: Path, text: str) -> list[Problem]:
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    found = []
    for entry in error.errors():
        where = entry["loc"]
        message = f"{'.'.join(map(str, where)) or 'length model'}: {entry['msg'].removeprefix('Value error, ')}"
        hint = did_you_mean(str(where[-1]), LengthModel.model_fields) if entry["type"] == "extra_forbidden" else None
        found.append(Problem(message, str(path), _line(root, where), hint))
    return found


def _line(node: Any, where: Sequence[int | str]) -> int:
    """Line of the deepest part of a path that the document has."""
    line = int(node.start_mark.line) + 1
    for key in where:
        children = node.value if isinstance(node.value, list) else []
        if isinstance(key, int) and key < len(children) and not isinstance(children[0], tuple):
            node = children[key]
        else:
            match = [pair for pair in children if isinstance(pair, tuple) and pair[0].value == str(key)]
            if not match:
                break
            line, node = int(match[0][0].start_mark.line) + 1, match[0][1]
            continue
        line = int(node.start_mark.line) + 1
    return line


def dump_model(model: LengthModel) -> str:
    """YAML text of a model; `load_model` reads it back to an equal one."""
    import yaml

    content = model.model_dump(mode="json")
    kept = {k: v for k, v in content.items() if k not in _OMITTED or v not in (None, [], 0.0)}
    return str(yaml.safe_dump(kept, sort_keys=False, width=120, allow_unicode=True))


def save_model(model: LengthModel, path: Path | str) -> Path:
    """Write a model as YAML, whole or not at all."""
    return write_atomic(path, dump_model(model))
