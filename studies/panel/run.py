"""Six plain questions, planned under every framework: how far is each layout from what has been published?

Run: python -m studies.panel.run [FRAMEWORK ...] (all by default; 1 to 2 s of the processor a plan). Every plan is
exported, imported and audited as well. Needs the measured tables (``RLPERF_DATA``, by default ``../shared/data`` beside
the checkout).
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from dataclasses import dataclass
from pathlib import Path

from rlperf.api import plan_job
from rlperf.errors import InfeasibleError, SpecError
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.plan.answer.plan import Plan
from rlperf.specs.short_job import short_job
from studies.round_trip.run import trip_of


@dataclass(frozen=True)
class Question:
    """What a user types, and the models whose published layouts are its size."""

    words: str
    model: str
    devices: int
    device: str
    alike: tuple[str, ...]
    algorithm: str = "grpo"


SMALL = ("Llama-3.1-8B", "Llama-3-8B", "Llama-2-7B", "Qwen2-7B", "Qwen2.5-7B")
QUESTIONS = (
    Question("7B on 8 A100", "Qwen2.5-7B", 8, "a100", SMALL),
    Question("8B on 16 H100", "Llama-3.1-8B", 16, "h100", SMALL),
    Question("32B, DAPO, on 32 A100", "Qwen2.5-32B", 32, "a100", ("Qwen3-32B", "Qwen2.5-32B"), "dapo"),
    Question("30B-A3B on 64 H100", "Qwen3-30B-A3B", 64, "h100", ("Qwen3-30B-A3B",)),
    Question("235B-A22B on 128 H100", "Qwen3-235B-A22B", 128, "h100", ("Qwen3-235B-A22B",)),
    Question("DeepSeek-V3 on 256 H100", "DeepSeek-V3", 256, "h100", ("DeepSeek-V3",)),
)
TRAINER = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
ENGINE = ("tensor_parallel", "pipeline_parallel")
Degrees = tuple[int, ...]


def recipes(folder: Path, alike: tuple[str, ...], role: str, names: tuple[str, ...]) -> dict[Degrees, str]:
    """Published degrees of a pool of models of a size, each with a row that has them; trainers' of any training."""
    tables = [("rl_step", f"{role}_")] + [("training", "")] * (role == "trainer")
    found: dict[Degrees, str] = {}
    for table, prefix in tables:
        with (folder / "measured" / f"{table}.csv").open() as stream:
            for row in csv.DictReader(stream):
                cells = [row.get(prefix + name, "") for name in names]
                if row["architecture"] in alike and cells[0] and not row["lora_rank"]:
                    found.setdefault(tuple(int(cell or 1) for cell in cells), row["row_id"])
    return found


def nearest(degrees: Degrees, known: dict[Degrees, str]) -> tuple[float, float, str]:
    """Doublings to the nearest published layout, all degrees together and the largest of one, and its row.

    >>> nearest((2, 1, 2), {(1, 1, 1): "a", (2, 1, 1): "b"})
    (1.0, 1.0, 'b')
    """
    best = (math.inf, math.inf, "")
    for other, row in known.items():
        apart = [abs(math.log2(mine / theirs)) for mine, theirs in zip(degrees, other, strict=True)]
        best = min(best, (sum(apart), max(apart), row))
    return best


def degrees_of(plan: Plan, role: str, names: tuple[str, ...]) -> Degrees:
    """Degrees of a pool of a plan; Ulysses counts as context parallelism."""
    layout = next(pool.layout for pool in plan.phases[0].pools if pool.role == role)
    found = [getattr(layout, name) for name in names]
    if "context_parallel" in names:
        found[names.index("context_parallel")] *= layout.ulysses
    return tuple(found)


def answer(question: Question, framework: str, folder: Path) -> str:
    """A line of the table: the plan, how far both pools are from what was published, and what its files lose."""
    job = short_job(
        question.model, question.devices, question.device, framework=framework, algorithm=question.algorithm
    )
    try:
        plan = plan_job(job)
    except (InfeasibleError, SpecError) as error:
        return f"refused: {str(error).partition(chr(10))[0]}"
    parts = [f"{plan.phases[0].mode}, {plan.objective:.0f} s"]
    for role, names in (("rollout", ENGINE), ("trainer", TRAINER)):
        own = degrees_of(plan, role, names)
        total, largest, row = nearest(own, recipes(folder, question.alike, role, names))
        parts.append(f"{role} {own}: {total:.1f} doublings ({largest:.1f} of one degree) from {row}")
    trip = trip_of(job, plan)
    parts.append("files the same" if trip.same else f"files: {trip.excess:+.1e}, {trip.lost}, {trip.findings}")
    return "; ".join(parts)


def main() -> None:
    """Every question under every framework."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", default=FRAMEWORKS, metavar="FRAMEWORK")
    frameworks = parser.parse_args().frameworks
    folder = Path(os.environ.get("RLPERF_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    for question in QUESTIONS:
        print(question.words)
        for framework in frameworks:
            print(f"  {framework}: {answer(question, framework, folder)}", flush=True)


if __name__ == "__main__":
    main()
