"""Where calibrations of every kind are found, and how their files are read.

Search path of a calibration by name: the job's folder, the user's configuration folder, the shipped profiles.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import cast

from pydantic import BaseModel

from rlperf.specs.profiles import search_path, stamp
from rlperf.specs.reader import Spec, is_file, read_spec


def find_calibration(name: str, kind: str, folder: Path | str | None = None) -> Path | None:
    """File of a calibration by name and kind (devices, engines, frameworks) along the search path, or None."""
    for root in search_path(folder):
        path = root / "calibrations" / kind / f"{name}.yaml"
        if is_file(path):
            return path
    return None


def calibration_names(kind: str, folder: Path | str | None = None) -> list[str]:
    """Names of all calibrations of ``kind`` that can be found.

    >>> "h100_sxm" in calibration_names("devices")
    True
    """
    return sorted({path.stem for root in search_path(folder) for path in (root / "calibrations" / kind).glob("*.yaml")})


def read_calibration(path: Path, kind: type[Spec]) -> Spec:
    """The calibration in a file: read once, and again where a process has written it anew."""
    return cast(Spec, _read(path, kind, stamp(path)))


@cache
def _read(path: Path, kind: type[BaseModel], _version: tuple[int, int]) -> BaseModel:
    return read_spec(path, kind)
