"""Published names of known shapes: ``Qwen/Qwen3-30B-A3B-Instruct-2507`` is Qwen3-30B-A3B with longer positions.

Which names say the same shape is data (``labels.yaml``, each with its source), never a distance between words: a size
or an activated size that differs is another model. A name that leads nowhere is refused with those that hold all of
its parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pydantic import Field

from rlperf.specs.frozen import Frozen
from rlperf.specs.reader import read_spec

SHOWN = 6
"""Shapes named in a refusal."""
SAME_SIZE = 1.25
"""Ratio of two sizes up to which one may be meant by the other."""
_SIZE = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)b")
GIGABYTES = re.compile(r"(\d)_?gb\b")
"""``a100_80gb`` is ``a100_80g``."""
_GAP = re.compile(r"(?<=[a-z])_(?=\d)")
"""Between a word and the number behind it."""
_SOCKET = re.compile(r"^(sxm)\d$")
_TELLING_NOTHING = frozenset(
    {
        "nvidia", "geforce", "tesla", "amd", "instinct", "oam", "huawei", "intel",
        "hbm2", "hbm2e", "hbm3", "hbm3e", "ac", "blackwell", "generation", "edition",
    }
)  # fmt: skip
"""Words of drivers' names that no two devices differ in."""


def key(name: str) -> str:
    """How names are compared: case, spaces, hyphens and underscores do not matter.

    >>> key("Llama 3.1-8B ")
    'llama_3.1_8b'
    """
    return "_".join(name.strip().lower().replace("-", " ").replace("_", " ").split())


def closed(stem: str) -> str:
    """A key without the gap between a word and the number behind it: people write both ``Llama-3.1`` and ``llama3.1``.

    >>> closed("llama_3.1_8b"), closed("qwen3_8b"), closed("qwen_3_8b")
    ('llama3.1_8b', 'qwen3_8b', 'qwen3_8b')
    """
    return _GAP.sub("", stem)


def product_words(name: str) -> frozenset[str]:
    """The words that tell a device from others, in any order, of a profile's name or a driver's (nvidia-smi, rocm-smi).

    >>> sorted(product_words("NVIDIA A100-SXM4-80GB")), sorted(product_words("NVIDIA H100 80GB HBM3"))
    (['80g', 'a100', 'sxm'], ['80g', 'h100'])
    """
    words = (GIGABYTES.sub(r"\1g", word) for word in key(name).split("_"))
    return frozenset(_SOCKET.sub(r"\1", word) for word in words) - _TELLING_NOTHING


class Changes(Frozen):
    """What a label has otherwise than its shape: nothing that changes a layer."""

    max_positions: int | None = Field(None, gt=0)
    vocab: int | None = Field(None, gt=0)


class Words(Frozen):
    """Words at a name's start or end that leave the shape as it is; ``precision``: they say how numbers are stored."""

    words: tuple[str, ...]
    source: str
    precision: bool = False


class Equal(Frozen):
    """Labels of one shape, and where it is published that they have it."""

    shape: str
    labels: tuple[str, ...]
    source: str
    changes: Changes = Changes()


class Labels(Frozen):
    """Everything that is known of names; see ``labels.yaml``."""

    starts: tuple[Words, ...]
    endings: tuple[Words, ...]
    equal: tuple[Equal, ...]


@dataclass(frozen=True)
class LabelReading:
    """A name as read: the shape, what the label changes of it, and in words where the name is not the shape's own."""

    shape: str
    changes: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    precise: bool = False
    """The name says how numbers are stored."""


@cache
def labels() -> Labels:
    """The shipped table."""
    return read_spec(Path(__file__).with_name("labels.yaml"), Labels)


@cache
def _equal() -> dict[str, Equal]:
    found = {key(label): entry for entry in labels().equal for label in entry.labels}
    return {closed(stem): entry for stem, entry in found.items()} | found


@cache
def _endings() -> tuple[tuple[str, bool], ...]:
    """Endings and whether each is a precision, the longest first: ``_awq_int4`` goes before ``_int4``."""
    found = [("_" + key(word), entry.precision) for entry in labels().endings for word in entry.words]
    return tuple(sorted(found, key=lambda item: -len(item[0])))


@cache
def _starts() -> tuple[str, ...]:
    return tuple(key(word) + "_" for entry in labels().starts for word in entry.words)


def last_part(name: str) -> str:
    """The model's own part of a hub name, a folder or a Hugging Face cache.

    >>> last_part("Qwen/Qwen3-8B"), last_part("/models/Qwen3-8B/"), last_part("hub/models--Qwen--Qwen3-8B/snapshots/1a")
    ('Qwen3-8B', 'Qwen3-8B', 'Qwen3-8B')
    """
    parts = name.replace("\\", "/").rstrip("/").removesuffix("/config.json").split("/")
    cached = [part for part in parts if part.startswith("models--")]
    return cached[-1].rsplit("--", 1)[-1] if cached else parts[-1]


def _stems(name: str) -> Iterator[tuple[str, bool]]:
    """Keys that a name may stand for, the fullest first, and whether a precision was left out on the way."""
    stem, precise = key(last_part(name)), False
    while stem:
        yield stem, precise
        yield from ((stem.removeprefix(start), precise) for start in _starts() if stem.startswith(start))
        ending = next(((word, numeric) for word, numeric in _endings() if stem.endswith(word)), None)
        if ending is None:
            return
        stem, precise = stem.removesuffix(ending[0]), precise or ending[1]


def read_label(name: str, known: Mapping[str, str]) -> LabelReading | None:
    """What a name stands for among ``known`` (key -> name of a shape); None where nothing says so.

    >>> known = {key(name): name for name in ("Qwen3-30B-A3B", "Qwen3-32B")}
    >>> read_label("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", known).changes
    {'max_positions': 262144}
    >>> read_label("Qwen3-30B", known) is None
    True
    """
    short = last_part(name)
    for stem, precise in _stems(name):
        own = known.get(stem) or known.get(closed(stem))
        entry = _equal().get(stem) or _equal().get(closed(stem))
        shape = own or (known.get(key(entry.shape)) if entry else None)
        if shape is None:
            continue
        changes = entry.changes.model_dump(exclude_none=True) if entry and not own else {}
        if closed(key(short)) == closed(key(shape)):
            return LabelReading(shape, precise=precise)
        notes = [f"{short}: shape of {shape}"]
        notes += [f"with {field} {value:,}" for field, value in changes.items()]
        notes += ["the precision is what the job states, not the name"] if precise else []
        return LabelReading(shape, changes, "; ".join(notes), precise)
    return None


def could_be(name: str, known: Mapping[str, str]) -> tuple[str, ...]:
    """Shapes and labels that hold every part of a name that leads nowhere: what it may have left out.

    >>> could_be("Mixtral", {key(name): name for name in ("Mixtral-8x7B", "Mixtral-8x22B", "Qwen3-8B")})
    ('Mixtral-8x22B', 'Mixtral-8x7B')
    """
    wanted = {frozenset(stem.split("_")) for stem, _ in _stems(name)}
    shortest = min(wanted, key=len, default=frozenset())
    if not shortest:
        return ()
    shapes = {shape for stem, shape in known.items() if shortest < set(stem.split("_"))}
    shapes |= {
        known[key(entry.shape)]
        for label, entry in _equal().items()
        if shortest < set(label.split("_")) and key(entry.shape) in known
    }
    return tuple(sorted(shapes, key=str.lower))


def named_in(name: str, known: Mapping[str, str]) -> tuple[str, ...]:
    """Shapes whose whole name stands in one that leads nowhere, as whole words: what a checkpoint was tuned from.

    >>> named_in("my-qwen3-8b-cold-start", {key(name): name for name in ("Qwen3-8B", "Qwen3-8", "Qwen2.5-7B")})
    ('Qwen3-8B',)
    """
    words = f"_{key(last_part(name))}_"
    found = {shape for stem, shape in known.items() if f"_{stem}_" in words and _SIZE.search(stem)}
    return tuple(sorted(found, key=lambda shape: (-len(shape), shape)))


def size_of(name: str) -> float | None:
    """Parameters that a name states [10^9], experts multiplied out; None where it states none.

    >>> size_of("Qwen3-30B-A3B"), size_of("Mixtral-8x7B"), size_of("GLM-5")
    (30.0, 56.0, None)
    """
    found = next(filter(None, map(_SIZE.fullmatch, key(last_part(name)).split("_"))), None)
    return float(found[2]) * int(found[1] or 1) if found else None


def of_other_sizes(name: str, known: Mapping[str, str]) -> tuple[tuple[str, float], ...]:
    """Shapes that have all parts of a name but its size, and the ratio of the two, the nearest size first.

    >>> of_other_sizes("Qwen3-9000B", {key(name): name for name in ("Qwen3-8B", "Qwen3-30B-A3B", "Qwen2.5-7B")})
    (('Qwen3-30B-A3B', 300.0), ('Qwen3-8B', 1125.0))
    """
    wanted = size_of(name)
    if not wanted:
        return ()
    rest = "_".join(part for part in key(last_part(name)).split("_") if not _SIZE.fullmatch(part))
    sizes = {shape: size for shape in could_be(rest, known) if (size := size_of(shape))}
    ratios = {shape: max(size / wanted, wanted / size) for shape, size in sizes.items()}
    return tuple(sorted(ratios.items(), key=lambda item: (item[1], len(item[0]))))


def meant_by(name: str, known: Mapping[str, str]) -> str | None:
    """What a name that leads nowhere may mean, by its parts: shapes that say more, or the same of another size."""
    near = could_be(name, known)
    if near[1:]:
        return f"it could be {' or '.join(near[:SHOWN])}{_more(near)}: say which"
    if near:
        return f"did you mean {near[0]}?"
    if within := named_in(name, known):
        return f"did you mean {within[0]}, or the path of its config.json?"
    others = of_other_sizes(name, known)
    if not others:
        return None
    if others[0][1] <= SAME_SIZE:
        return f"did you mean {others[0][0]}, or the path of its config.json?"
    named = ", ".join(shape for shape, _ in others[:SHOWN])
    return f"there are {named}{_more(others)}; or give the path of its config.json"


def _more(found: Sequence[object]) -> str:
    return f" or {len(found) - SHOWN} more" if len(found) > SHOWN else ""
