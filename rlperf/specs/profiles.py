"""Finds and reads hardware profiles and architectures: by shipped name, or by path.

Search path, first match wins: an explicit path; the folder of the job; ``$RLPERF_PROFILES``; the user's configuration
folder (``$XDG_CONFIG_HOME/rlperf``, by default ``~/.config/rlperf``); what rlperf ships. Every folder on it is laid out
as ``devices/ links/ clusters/ calibrations/ architectures/``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rlperf.errors import Problem, SpecError, nearest
from rlperf.specs.architecture import Architecture
from rlperf.specs.cluster import Cluster, Device, Link
from rlperf.specs.given import as_path
from rlperf.specs.hf.config import from_hf, looks_like_hf
from rlperf.specs.labels import GIGABYTES, LabelReading, closed, key, last_part, meant_by, product_words, read_label
from rlperf.specs.reader import (
    below,
    is_file,
    is_folder,
    parse_json,
    problems_of,
    read_document,
    read_spec,
    read_text,
)

_Named = TypeVar("_Named")
PACKAGE = Path(__file__).resolve().parent.parent
_ALIASES = re.compile(r"^aliases:\s*\[(.*)\]\s*$", re.MULTILINE)


def profile_root() -> Path:
    """Folder of the shipped hardware profiles: inside the package (wheel) or beside it (checkout)."""
    return _shipped_with(PACKAGE)


@cache
def _shipped_with(package: Path) -> Path:
    for root in (package / "hwprofiles", package.parent / "hwprofiles"):
        if root.is_dir():
            return root
    raise SpecError("the shipped hardware profiles are missing: reinstall rlperf, or set RLPERF_PROFILES")


def search_path(folder: Path | str | None) -> tuple[Path, ...]:
    """Folders that are searched for profiles, in order; ``folder`` is the job's own."""
    named, config, home = (os.environ.get(name, "") for name in ("RLPERF_PROFILES", "XDG_CONFIG_HOME", "HOME"))
    anywhere = _everywhere(named, config, home, PACKAGE)
    return anywhere if folder is None else (Path(folder), *anywhere)


@cache
def _everywhere(named: str, config: str, _home: str, package: Path) -> tuple[Path, ...]:
    """The search path of every folder: asked for with each of the many names of a configuration."""
    roots = [Path(part) for part in named.split(os.pathsep) if part]
    return (*roots, Path(config or Path.home() / ".config") / "rlperf", _shipped_with(package))


def _files(kind: str, folder: Path | str | None) -> Iterator[Path]:
    """Profile files of a kind along the search path, nearest first."""
    suffix = "*.json" if kind == "architectures" else "*.yaml"
    for root in search_path(folder):
        yield from _listed(root / kind, suffix, stamp(root / kind))
    if kind == "architectures":
        yield from _shipped_architectures()


@cache
def _listed(folder: Path, suffix: str, _version: tuple[int, int]) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob(suffix)))


@cache
def _shipped_architectures() -> tuple[Path, ...]:
    return tuple(sorted((PACKAGE / "specs" / "architectures").glob("*.json"), key=lambda path: path.stem.lower()))


def profile_names(kind: str, folder: Path | str | None = None) -> tuple[str, ...]:
    """Names of every profile of a kind that can be loaded, sorted.

    >>> "h100_sxm" in profile_names("devices")
    True
    """
    return tuple(sorted({path.stem for path in _files(kind, folder)}, key=str.lower))


def find_profile(kind: str, name: str, folder: Path | str | None = None) -> Path:
    """File of a profile by name: case, spaces and hyphens do not matter; device aliases (``h100``) are followed.

    A device is found by the name that its driver prints, too (``NVIDIA A100-SXM4-80GB``).

    Raises
    ------
    SpecError : no such name; with the nearest one that exists
    """
    wanted = key(name)
    known: dict[str, Path] = {}
    for path in _files(kind, folder):
        known.setdefault(key(path.stem), path)
    if wanted in known:
        return known[wanted]
    aliases = {alias: path for path in known.values() for alias in _aliases(path)} if kind == "devices" else {}
    for spelling in (wanted, GIGABYTES.sub(r"\1g", wanted)):
        if spelling in aliases:
            return aliases[spelling]
    if kind == "devices":
        products = {product_words(each): path for each, path in (known | aliases).items()}
        if found := products.get(product_words(name)):
            return found
    noun = kind.split("/")[0].removesuffix("s") + (f" of {kind.split('/')[1]}" if "/" in kind else "")
    spelt = {key(path.stem): path.stem for path in known.values()} | {alias: alias for alias in aliases}
    alike = 0.7 if kind == "architectures" else 0.6
    # of a cluster the number says whose nodes it has: hgx_h200 is nearer to a dgx_h200 than to an hgx_h20
    of_it = [each for each in spelt if kind == "clusters" and re.findall(r"\d+", each) == re.findall(r"\d+", wanted)]
    near = nearest(wanted, of_it, alike=alike) or nearest(wanted, spelt, alike=alike)
    own = {
        "architectures": "the path of its config.json",
        "devices": "the path of a profile of your own",
        "links": "the path of a profile of your own",
    }
    files = own.get(kind, "")
    said, given = (f", or {files}", f"; or give {files}") if files else ("", "")
    listed = f"`rlperf profiles list {kind}` names all {len(known)}{given}"
    hint = f"did you mean {spelt[near]}{said}?" if near else listed
    raise SpecError(Problem(f"there is no {noun} named {name!r}", suggestion=hint))


@cache
def _aliases(path: Path) -> tuple[str, ...]:
    """Aliases of a device file, found without parsing the whole file."""
    match = _ALIASES.search(read_text(path))
    return tuple(key(part.strip(" \"'")) for part in match.group(1).split(",")) if match else ()


def is_path(text: str) -> bool:
    """Whether a text names a file or folder, not a profile."""
    return text.endswith((".yaml", ".yml", ".json")) or "\\" in text or text.startswith((".", "~", "/"))


def _locate(kind: str, name_or_path: str | Path, folder: Path | str | None) -> Path:
    """A path as it is (relative ones from the job's folder first), a name through the search path."""
    if isinstance(name_or_path, Path) or is_path(name_or_path):
        return below(folder, Path(name_or_path).expanduser())
    return find_profile(kind, name_or_path, folder)


def stamp(path: Path) -> tuple[int, int]:
    """What changes when a file changes, so that a cached reading is never stale."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


@cache
def _device(path: Path, _version: tuple[int, int]) -> Device:
    """A device's file, which must have the name that clusters and plans will look it up by."""
    device = read_spec(path, Device)
    _check_name(device.name, path)
    return device


def _check_name(name: str, path: Path) -> None:
    if key(name) != key(path.stem):
        hint = f"rename the file to {name}{path.suffix}, or write `name: {path.stem}`"
        said = f"{name!r} is found by a file of that name alone"
        raise SpecError(read_document(path).problem(("name",), said, hint))


@cache
def _link(path: Path, _version: tuple[int, int]) -> Link:
    return read_spec(path, Link)


@cache
def _cluster(path: Path, _version: tuple[int, int]) -> Cluster:
    return read_spec(path, Cluster)


def load_device(name_or_path: str | Path, folder: Path | str | None = None) -> Device:
    """A device profile by name, alias or path.

    >>> load_device("h100").name
    'h100_sxm'
    """
    path = _locate("devices", name_or_path, folder)
    return _device(path, stamp(path))


def load_relative(device: Device, folder: Path | str | None) -> Device | None:
    """The device whose constants another borrows; None where it names none."""
    if not device.relative:
        return None
    look_up = partial(load_device, device.relative, folder)
    if key(device.name) not in map(key, profile_names("devices", folder)):  # its own file was given by path
        return look_up()
    return _named_in(_locate("devices", device.name, folder), "relative", look_up)


def load_link(name_or_path: str | Path, folder: Path | str | None = None) -> Link:
    """A network link profile by name or path."""
    path = _locate("links", name_or_path, folder)
    return _link(path, stamp(path))


def load_cluster(
    name_or_path: str | Path,
    *,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    folder: Path | str | None = None,
) -> Cluster:
    """A cluster profile by name or path, or ``generic:DEVICE``: the generic node filled with that device.

    ``generic:DEVICE`` takes the network that its data sheet's systems ship with, and four devices a node where the
    scale-up domain spans nodes (NVL72), one where it has its host's memory. The device and the network must exist.

    >>> load_cluster("dgx_h100", nodes=2).devices
    16
    >>> load_cluster("generic:l40s").device
    'l40s'
    """
    as_path(name_or_path, "cluster")
    if isinstance(name_or_path, str) and name_or_path.lower().startswith("generic:"):
        cluster = _generic(_found_by_name(name_or_path.split(":", 1)[1].strip(), folder), folder)
        path = _locate("devices", cluster.device, folder)
    else:
        path = _cluster_file(name_or_path, folder)
        cluster = _cluster(path, stamp(path))
        if not (isinstance(name_or_path, Path) or is_path(name_or_path)):
            _check_name(cluster.name, path)
        _named_in(path, "device", partial(load_device, cluster.device, folder))
    _named_in(path, "network", partial(load_link, cluster.network, folder))
    changes = {"nodes": nodes, "devices_per_node": devices_per_node}
    for field, count in changes.items():
        if count is not None and count < 1:
            raise SpecError(Problem(f"{field} must be at least 1 (given: {count})"))
    if devices_per_node is not None:  # ports belong to devices: half a node has half of them
        changes["rails"] = max(cluster.rails * devices_per_node // cluster.devices_per_node, min(cluster.rails, 1))
    return cluster.model_copy(update={field: count for field, count in changes.items() if count is not None})


def _found_by_name(device: str, folder: Path | str | None) -> Device:
    """A device by name or path; that of a path has to be found by its name, by which plans and calibrations go on."""
    found = load_device(device, folder)
    if is_path(device) and key(found.name) not in map(key, profile_names("devices", folder)):
        hint = f"move it to devices/{found.name}.yaml beside the job, or into devices/ of a folder of RLPERF_PROFILES"
        raise SpecError(Problem(f"{device} is in no folder where profiles are looked for", suggestion=hint))
    return found


def _named_in(path: Path, field: str, look_up: Callable[[], _Named]) -> _Named:
    """What a field of a profile names; where nothing has the name, the error says where it stands, and where a file of
    the name lies beside the profile, how it is found."""
    try:
        return look_up()
    except SpecError as error:
        if any(problem.file is not None for problem in error.problems):
            raise
        document = read_document(path)
        kind = "links" if field == "network" else "devices"
        beside = (root for root in path.absolute().parents[:2] if is_file(root / kind / f"{document.data[field]}.yaml"))
        root = next(beside, None)
        hint = root and f"{kind}/ of {root} is not searched: set RLPERF_PROFILES={root}, or put it beside the job"
        said = [document.problem((field,), each.message, hint or each.suggestion) for each in error.problems]
        raise SpecError(said) from None


def _cluster_file(name_or_path: str | Path, folder: Path | str | None) -> Path:
    """The file of a cluster; where only a device has the name, the error says how to ask for that device."""
    try:
        return _locate("clusters", name_or_path, folder)
    except SpecError as error:
        try:
            device = find_profile("devices", str(name_or_path), folder)
        except SpecError:
            raise error from None
        hint = f"{device.stem} is a device: write generic:{device.stem}"
        shipped = [
            name for name in profile_names("clusters") if name != "generic" and load_cluster(name).device == device.stem
        ]
        hint += f", or {' or '.join(shipped)}, which has nodes as they are sold" if shipped else ""
        raise SpecError(Problem(error.problems[0].message, suggestion=hint)) from None


def _generic(device: Device, folder: Path | str | None) -> Cluster:
    path = find_profile("clusters", "generic", folder)
    template = _cluster(path, stamp(path))
    spans_nodes = device.scale_up is not None and device.scale_up.domain > template.devices_per_node
    per_node = 1 if device.unified_memory else 4 if spans_nodes else template.devices_per_node
    return template.model_copy(
        update={
            "host_memory": device.memory if device.unified_memory else template.host_memory,
            "name": f"generic:{device.name}",
            "device": device.name,
            "devices_per_node": per_node,
            "domain": device.scale_up.domain if spans_nodes and device.scale_up else None,
            "network": device.network or "roce_100",
            "rails": per_node if device.network else 1,
        }
    )


def architecture_names(folder: Path | str | None = None) -> tuple[str, ...]:
    """Names of all architectures that can be loaded by name.

    >>> {"Qwen2.5-7B", "DeepSeek-V3"} <= set(architecture_names())
    True
    """
    return profile_names("architectures", folder)


def load_architecture(
    name_or_path: str | Path, folder: Path | str | None = None, *, like: str | None = None
) -> Architecture:
    """An architecture: shipped name, Hugging Face ``config.json`` (or a folder that holds one), or our own JSON.

    ``like`` : family (a model_type that rlperf knows) by which a config.json of an unknown model_type is read

    A published name of a known shape (``labels.yaml``) is as good as the shape's own, and so is a folder of that name
    that is not on this machine; `architecture_reading` says then what was taken.

    >>> load_architecture("qwen/qwen2.5-7b-instruct").name
    'Qwen2.5-7B'
    >>> load_architecture("Qwen/Qwen3-30B-A3B-Instruct-2507").max_positions
    262144
    """
    as_path(name_or_path, "architecture")
    if not _is_here(name_or_path, folder):
        path, reading = _find_architecture(str(name_or_path), folder)
        return _changed(path, stamp(path), tuple(reading.changes.items()))
    path = _locate("architectures", Path(name_or_path), folder)
    path = path / "config.json" if is_folder(path) else path
    return _architecture(path, stamp(path), like)


def architecture_reading(
    name_or_path: str | Path, folder: Path | str | None = None, *, like: str | None = None
) -> LabelReading:
    """How `load_architecture` reads a name: the shape, what the label changes of it, a note where it is another's.

    A file states its shape itself: no changes, and a note only where its weights are packed for engines.

    >>> architecture_reading("Mixtral-8x7B-v0.1").note, architecture_reading("openai/gpt-oss-20b").note
    ('Mixtral-8x7B-v0.1: shape of Mixtral-8x7B', '')
    """
    if _is_here(name_or_path, folder):
        return LabelReading(str(name_or_path), note=load_architecture(name_or_path, folder, like=like).stored_note)
    return _find_architecture(str(name_or_path), folder)[1]


def architecture_named(name: str) -> str:
    """The shipped name where a hub name or folder is the shape's own, else the text: its label says more.

    >>> architecture_named("Qwen/Qwen3-8B"), architecture_named("Qwen/Qwen3-8B-FP8"), architecture_named("org/mine")
    ('Qwen3-8B', 'Qwen/Qwen3-8B-FP8', 'org/mine')
    """
    try:
        reading = architecture_reading(name) if name else LabelReading(name)
    except SpecError:
        return name
    return name if reading.note else reading.shape


def _is_here(name_or_path: str | Path, folder: Path | str | None) -> bool:
    """Whether a file is meant: one that exists, or one that no label stands for."""
    path = _locate("architectures", Path(name_or_path), folder)
    if is_file(path / "config.json" if is_folder(path) else path):
        return isinstance(name_or_path, Path) or is_path(name_or_path) or is_folder(path)
    named = isinstance(name_or_path, str) and not is_path(name_or_path)
    if named or (path.suffix == ".json" and path.name != "config.json"):
        return not named
    return read_label(str(name_or_path), _architecture_files(folder)[0]) is None


def _architecture_files(folder: Path | str | None) -> tuple[dict[str, str], dict[str, Path]]:
    """Names of shapes by key, and their files by name; the nearest on the search path wins."""
    own = tuple(path for root in search_path(folder) for path in sorted((root / "architectures").glob("*.json")))
    return _by_key_and_name(own)


@cache
def _by_key_and_name(own: tuple[Path, ...]) -> tuple[dict[str, str], dict[str, Path]]:
    """Those in front of the shipped ones: asked for many times a configuration, over hundreds of shipped files."""
    files = {key(path.stem): path for path in reversed((*own, *_shipped_architectures()))}
    names = {each: path.stem for each, path in files.items()}
    return {closed(each): name for each, name in names.items()} | names, {path.stem: path for path in files.values()}


def _find_architecture(name: str, folder: Path | str | None) -> tuple[Path, LabelReading]:
    known, files = _architecture_files(folder)
    reading = read_label(name, known)
    if reading is not None:
        return files[reading.shape], reading
    hint = meant_by(name, known)
    if hint is None:
        return find_profile("architectures", last_part(name), folder), LabelReading(last_part(name))
    raise SpecError(Problem(f"there is no architecture named {last_part(name)!r}", suggestion=hint))


@cache
def _changed(path: Path, version: tuple[int, int], changes: tuple[tuple[str, int], ...]) -> Architecture:
    """The architecture of a file with what a label has otherwise."""
    return _architecture(path, version).model_copy(update=dict(changes))


@cache
def _architecture(path: Path, _version: tuple[int, int], like: str | None = None) -> Architecture:
    data = _read_json(path)
    if looks_like_hf(data):
        name = last_part(str(path.absolute())) or "architecture" if path.name == "config.json" else path.stem
        source = f"Hugging Face configuration {path.name}"
        try:
            return from_hf(data, name=name, source=source, file=str(path), like=like)
        except SpecError:  # again, with the line of every field for the messages
            line = read_document(path).line
            return from_hf(data, name=name, source=source, file=str(path), line=line, like=like)
    required = [field for field, info in Architecture.model_fields.items() if info.is_required()]
    if not any(field in data for field in required):
        raise SpecError(
            Problem(
                "is neither a Hugging Face config.json (it has no model_type) nor an rlperf architecture "
                f"(it has none of {', '.join(required)})",
                str(path),
            )
        )
    try:
        return Architecture.model_validate(data)
    except ValidationError as error:
        raise SpecError(problems_of(error, read_document(path), Architecture)) from error


def _read_json(path: Path) -> dict[str, Any]:
    data = parse_json(read_text(path), path)
    if not isinstance(data, dict):
        raise SpecError(Problem(f"holds a {type(data).__name__} where an object is due", str(path), 1))
    return data
