"""What a plan needs beside its YAML to stand alone: profiles, models and lengths that rlperf does not ship.

They lie in ``plan.inputs/`` beside ``plan.yaml``, laid out as every folder of profiles, with ``workloads/``: both can
be moved together and are read from any folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rlperf.specs.job import Job
from rlperf.specs.profiles import profile_root, search_path
from rlperf.specs.reader import is_file, is_folder, is_pipe

MOST_BYTES = 1 << 28
"""Larger recordings stay where they are, and the plan keeps their absolute path."""
_ID = re.compile(r"^id: *(\S+)", re.MULTILINE)
_PROFILES = ("devices/*.yaml", "links/*.yaml", "clusters/*.yaml", "architectures/*.json", "calibrations/*/*.yaml")


def inputs_folder(file: Path | str) -> Path:
    """Where the inputs of a plan lie.

    >>> inputs_folder("run/plan.yaml").as_posix()
    'run/plan.inputs'
    """
    return Path(file).with_suffix(".inputs")


def folder_of(file: Path | str) -> Path:
    """The folder where names and relative paths of a job's or a plan's file start: of a pipe, where it is read."""
    if is_pipe(Path(file)):
        return Path.cwd()
    path = Path(file).resolve()
    inputs = inputs_folder(path)
    return inputs if inputs.is_dir() else path.parent


def own_calibrations(folder: Path | None) -> dict[str, Path]:
    """Calibrations that are not shipped, by their id: they stand in for shipped ones wherever ``folder`` is read."""
    roots = [root for root in reversed(search_path(folder)) if root != profile_root()]
    files = [path for root in roots for path in sorted(root.glob("calibrations/*/*.yaml"))]
    named = ((_ID.search(path.read_text(encoding="utf-8", errors="replace")), path) for path in files)
    return {found.group(1): path for found, path in named if found}


def standing_alone(job: Job, folder: Path | None) -> tuple[Job, dict[str, bytes]]:
    """The job with the paths of its own files below an inputs folder, and those files (path below it -> content).

    folder : where the job's own profiles are found
    """
    files = {}
    for root in reversed(search_path(folder)):
        if root != profile_root():
            files.update({path.relative_to(root).as_posix(): path.read_bytes() for path in _profiles(root)})

    def taken(text: str, kind: str) -> str:
        path = Path(text)
        if not path.is_absolute() or not (is_file(path) or is_folder(path)):
            return text
        if path.name == "config.json":  # the folder's name is the model's
            path = path.parent
        inside = {path / part: part for part in _parts(path, kind)}
        if sum(each.stat().st_size for each in inside) > MOST_BYTES:
            return text
        contents = {part.as_posix(): each.read_bytes() for each, part in inside.items()}
        name, count = f"{kind}/{path.name}", 1
        while any(files.get(_joined(name, part), content) != content for part, content in contents.items()):
            count += 1
            name = f"{kind}/{count}/{path.name}"
        files.update({_joined(name, part): content for part, content in contents.items()})
        return f"./{name}"

    tasks = tuple(
        task.model_copy(
            update={
                "workload": taken(task.workload, "workloads"),
                "architecture": task.architecture and taken(task.architecture, "architectures"),
            }
        )
        for task in job.tasks
    )
    pools = tuple(
        pool.model_copy(update={"cluster": pool.cluster and taken(pool.cluster, "clusters")}) for pool in job.pools
    )
    scorers = tuple(
        one.model_copy(update={"architecture": one.architecture and taken(one.architecture, "architectures")})
        for one in job.scorers
    )
    names = {"architecture": taken(job.architecture, "architectures"), "cluster": taken(job.cluster, "clusters")}
    return job.model_copy(update={**names, "tasks": tasks, "pools": pools, "scorers": scorers}), files


def _profiles(root: Path) -> Iterator[Path]:
    return (path for pattern in _PROFILES for path in sorted(root.glob(pattern)) if path.is_file())


def _parts(path: Path, kind: str) -> list[Path]:
    """Paths below ``path`` that belong to it: of a model's folder its shape alone, of a file the file."""
    if path.is_file():
        return [Path()]
    if kind == "architectures":
        return [Path("config.json")]
    return sorted(each.relative_to(path) for each in path.rglob("*") if each.is_file())


def _joined(name: str, part: str) -> str:
    return name if part == "." else f"{name}/{part}"
