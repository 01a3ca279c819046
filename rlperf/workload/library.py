"""Length models as YAML files, and the presets that are shipped."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.given import as_path
from rlperf.specs.reader import is_there, read_spec
from rlperf.specs.writer import write_atomic
from rlperf.workload.model import LengthModel

PRESETS = ("math", "programming", "searching", "tool_use", "software_engineering", "image", "video", "mixed")
_FOLDER = Path(__file__).parent / "presets"
_OMITTED = (
    "turns",
    "filtering",
    "reward",
    "mixture",
    "max_context_tokens",
    "vision_fraction",
    "image_tokens",
    "candidates",
    "alternatives",
)


def load_model(path_or_preset: Path | str) -> LengthModel:
    """A preset by name, or a model file.

    >>> load_model("math").provenance.kind
    'fitted'
    """
    path = as_path(path_or_preset, "length model")
    name = str(path_or_preset)
    if name in PRESETS:
        return _preset(name)
    if not is_there(path) and path.suffix not in (".yaml", ".yml"):
        hint = did_you_mean(name, PRESETS) or f"presets are {', '.join(PRESETS)}; a model file ends in .yaml"
        raise SpecError(Problem(f"{name!r} is neither a preset nor a file", suggestion=hint))
    return read_spec(path, LengthModel)


@lru_cache(maxsize=len(PRESETS))
def _preset(name: str) -> LengthModel:
    import yaml

    # Shipped files are known to be right: the fast loader, without line numbers.
    text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return LengthModel.model_validate(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def dump_model(model: LengthModel) -> str:
    """YAML text of a model; `load_model` reads it back to an equal one."""
    import yaml

    content = model.model_dump(mode="json")
    kept = {k: v for k, v in content.items() if k not in _OMITTED or v not in (None, [], 0.0)}
    return str(yaml.safe_dump(kept, sort_keys=False, width=120, allow_unicode=True))


def save_model(model: LengthModel, path: Path | str) -> Path:
    """Write a model as YAML, whole or not at all."""
    return write_atomic(path, dump_model(model))
