"""Launches in the YAML of schedulers: Ray's and Kubernetes' (``apiVersion``), tasks with ``run`` or an ``entrypoint``.

What a container runs is its ``command`` with its ``args``; everything else that may be a launch is text of some words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rlperf.frameworks.keytable import Value

_SETTING = re.compile(r"(?:^|[\s'\"\[])(?:--[\w.-]+|\+*[\w./@-]+=\S)")
_SEPARATOR = re.compile(r"^---[ \t]*(?:#.*)?$", re.MULTILINE)
_PROGRAM = re.compile(r"\b(?:python3?|torchrun|accelerate|trl|uv)\s")


@dataclass(frozen=True)
class Manifest:
    """The launch that a scheduler's file states, under which keys, and the variables that it is started with."""

    launch: str
    at: tuple[str | int, ...]
    variables: dict[str, str] = field(default_factory=dict)


def manifest_of(data: Mapping[str, Value]) -> Manifest | None:
    """The launch with most settings; None of a file that is no scheduler's.

    >>> found = manifest_of({"run": "pip install verl\\npython3 train.py --n $N", "envs": {"N": 8}})
    >>> found.launch.splitlines()[-1], found.at, found.variables
    ('python3 train.py --n $N', ('run',), {'N': '8'})
    """
    if not {"apiVersion", "kind"} <= set(data) and not any(isinstance(data.get(n), str) for n in ("run", "entrypoint")):
        return None
    texts = [(text, at) for text, at in _texts(data, ()) if _PROGRAM.search(text)]
    if not texts:
        return None
    launch, at = max(texts, key=lambda each: len(_SETTING.findall(each[0])))
    nodes = {"SKYPILOT_NUM_NODES": str(data["num_nodes"])} if "num_nodes" in data else {}
    return Manifest(launch, at, {**nodes, **dict(_variables(data))})


def launching(text: str) -> str:
    """Of several documents in a scheduler's file the one with most settings, on the lines where it stands.

    >>> launching("apiVersion: v1\\nkind: Service\\n---\\napiVersion: v1\\nargs: [--n 8]\\n")
    '\\n\\n\\napiVersion: v1\\nargs: [--n 8]\\n'
    """
    documents = _SEPARATOR.split(text)
    if sum("apiVersion:" in one for one in documents) < 2:
        return text
    settings = [len(_SETTING.findall(one)) for one in documents]
    at = settings.index(max(settings))
    return "".join("\n" * one.count("\n") for one in documents[:at]) + documents[at]


def _texts(data: Value, at: tuple[str | int, ...]) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Texts of several words, and a container's command with its arguments as one."""
    if isinstance(data, str) and re.search(r"\s", data):
        yield data, at
    elif isinstance(data, list):
        for index, item in enumerate(data):
            yield from _texts(item, (*at, index))
    elif isinstance(data, dict):
        words = [str(word) for name in ("command", "args") if isinstance(data.get(name), list) for word in data[name]]
        if words:
            yield shlex.join(words), (*at, "args" if "args" in data else "command")
        for name, item in data.items():
            if name not in ("command", "args") or isinstance(item, str):
                yield from _texts(item, (*at, name))


def _variables(data: Value) -> Iterator[tuple[str, str]]:
    """``env: [{name: N, value: 8}]`` of containers, ``envs: {N: 8}`` of tasks."""
    if isinstance(data, list):
        for item in data:
            yield from _variables(item)
    elif isinstance(data, dict):
        if set(data) == {"name", "value"}:
            yield str(data["name"]), str(data["value"])
        for name, item in data.items():
            if name in ("env", "envs") and isinstance(item, dict):
                yield from ((str(key), str(value)) for key, value in item.items() if value is not None)
            else:
                yield from _variables(item)


_ASKED = re.compile(
    r"^#SBATCH\s+(?:--(nodes|gpus-per-node|gres|ntasks-per-node)[=\s]\s*(?:gpu:)?|-(N)\s*)(\d+)\s*$", re.MULTILINE
)
_SET = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"), "gres": ("SLURM_GPUS_ON_NODE",),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}  # fmt: skip


def allotted(text: str) -> dict[str, str]:
    """Variables that Slurm sets for a script by what its ``#SBATCH`` lines ask for (sbatch(1), output environment).

    >>> allotted("#SBATCH --nodes=2\\n#SBATCH --gres=gpu:8\\n#SBATCH --mem=64")
    {'SLURM_NNODES': '2', 'SLURM_JOB_NUM_NODES': '2', 'SLURM_GPUS_ON_NODE': '8'}
    """
    return {name: match[3] for match in _ASKED.finditer(text) for name in _SET[match[1] or match[2]]}
