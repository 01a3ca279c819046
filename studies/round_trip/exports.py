"""Exports of sampled runs for the frameworks' own parsers (`parsers.py`): what searches kept, for each release.

Run: python -m studies.round_trip.exports FOLDER FRAMEWORK COUNT SEED [RELEASE ...]   (0.3 s of the processor each)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from rlperf.api import ask
from rlperf.errors import ExportError, SpecError
from rlperf.frameworks.export import write_plan
from rlperf.plan.answer.plan import Plan
from rlperf.specs.job import Job
from studies.round_trip.run import drawn
from studies.round_trip.sample import EIGHT_BITS, sampled

EACH = 3
"""Configurations of one job."""


def varied(framework: str, random: Random) -> Iterator[Job]:
    """Sampled jobs, every fourth of which trains adapters, in eight bits where it can, or by a chunked loss."""
    eight: dict[str, Any] = {"compute_dtype": "fp8"} if framework in EIGHT_BITS else {}
    turns: tuple[dict[str, Any], ...] = ({}, {"lora_rank": 32}, eight, {"chunked_loss": True})
    while True:
        for settings in turns:
            document = sampled(framework, random, few=True).model_dump(mode="json", exclude_unset=True)
            document["pools"][1].setdefault("settings", {}).update(settings)
            yield Job.model_validate(document)


def plans(framework: str, seed: int) -> Iterator[Plan]:
    """What searches of such jobs kept, ``EACH`` of a job; jobs that no file could say are left out."""
    random = Random(f"{framework} {seed}")
    for job in varied(framework, random):
        try:
            question = ask(job, to_plan=True)
        except SpecError:
            continue
        yield from drawn(question, random, EACH)


def main() -> None:
    """A folder for each release and export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("framework")
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("releases", nargs="*", default=["main"])
    asked = parser.parse_args()
    found = plans(asked.framework, asked.seed)
    for number in range(asked.count):
        plan = next(found)
        for release in asked.releases:
            try:
                write_plan(plan, f"{asked.framework}=={release}", asked.folder / release / f"{number:03d}")
            except ExportError as error:
                print(number, release, error)


if __name__ == "__main__":
    main()
