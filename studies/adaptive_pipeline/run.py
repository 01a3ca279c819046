"""Speed-up of planned pipelines over the standard schedules, and what partition, placement and schedule are worth.

    python studies/adaptive_pipeline/run.py            # the whole table (some five minutes on one core)
    python studies/adaptive_pipeline/run.py --quick    # P = 4 only, short searches
    python studies/adaptive_pipeline/run.py --small 40 # search against exact search

Writes rlperf-out/adaptive_pipeline/{results,shares}.csv; expected.csv and expected_shares.csv are what they were.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from architectures import MADE  # noqa: E402

from rlperf.plan.pipeline import Freedom, PipelinePlan, PipelineProblem, optimize  # noqa: E402
from rlperf.plan.pipeline.exact import best_plan  # noqa: E402
from rlperf.sim.pipeline import MicrobatchSizes  # noqa: E402
from rlperf.specs.pipeline_profile import LayerProfile, profile_names, read_profile  # noqa: E402

OUT = HERE.parents[1] / "rlperf-out" / "adaptive_pipeline"

UNIFORM = ("llama3-8b", "llama3-70b")
"""Equal layers between embedding and head; every other profile counts as heterogeneous."""


def profiles() -> Iterator[LayerProfile]:
    """The measured profiles where they are at hand, then the made ones."""
    data = Path(os.environ.get("RLPERF_DATA", HERE.parents[2] / "shared" / "data")) / "pipeline" / "layer_profiles.yaml"
    if data.is_file():
        for name in profile_names(data):
            yield read_profile(data, name)
    for make in MADE:
        yield make()


def search_passes(problem: PipelineProblem, seconds: float) -> int:
    """List passes that take about ``seconds`` on one core; a number, so that the table can be made again."""
    return int(seconds / (1.6e-5 * (12 * problem.devices * problem.microbatches.count) ** 0.54))


def makespan(plan: PipelinePlan, name: str) -> float:
    """Makespan of a standard schedule [s]; nan where it cannot run."""
    return next((s.timeline.makespan_s for s in plan.standards if s.name == name and s.timeline), math.nan)


def row(profile: LayerProfile, devices: int, seconds: float) -> dict[str, str]:
    """One line of results.csv."""
    problem = PipelineProblem(profile, MicrobatchSizes.equal(2 * devices), devices)
    plan = optimize(problem, passes=search_passes(problem, seconds), time_limit_s=600.0)
    standards = [s.timeline for s in plan.standards if s.timeline is not None and s.runs]
    best = min(t.makespan_s for t in standards)
    one = next(s.timeline for s in plan.standards if s.name == "1F1B")
    assert one is not None
    tight = math.nan
    if profile.knows_memory:
        limited = PipelineProblem(
            profile, problem.microbatches, devices, np.full(devices, float(one.peak_memory_bytes.max()))
        )
        tight = optimize(limited, passes=search_passes(problem, seconds / 2), time_limit_s=600.0).makespan_s
    interleaved = makespan(plan, "interleaved 1F1B")
    return {
        "profile": profile.name,
        "heterogeneous": str(profile.name not in UNIFORM),
        "devices": str(devices),
        "microbatches": str(2 * devices),
        "one_f_one_b_ms": f"{one.makespan_s * 1e3:.2f}",
        "zb_h1_ms": f"{makespan(plan, 'ZB-H1') * 1e3:.2f}",
        "interleaved_ms": f"{interleaved * 1e3:.2f}",
        "best_standard_ms": f"{best * 1e3:.2f}",
        "plan_ms": f"{plan.makespan_s * 1e3:.2f}",
        "proven_bound_ms": f"{plan.bound_s * 1e3:.2f}",
        "gap": f"{plan.gap:.4f}",
        "over_interleaved": f"{interleaved / plan.makespan_s:.4f}",
        "over_best_standard": f"{best / plan.makespan_s:.4f}",
        "plan_in_1f1b_memory_ms": f"{tight * 1e3:.2f}",
    }


def shares(profile: LayerProfile, devices: int, seconds: float) -> dict[str, str]:
    """Shapley shares of the three decisions in the logarithm of the speed-up over uniform interleaved 1F1B.

    Each of the eight combinations of free and fixed decisions is searched; a decision's share is its mean gain over the
    six orders in which the three can be freed. Fixed: equal layers, round robin with two stages per device, and a
    greedy 1F1B rule with merged backward.
    """
    problem = PipelineProblem(profile, MicrobatchSizes.equal(2 * devices), devices)
    found: dict[tuple[bool, ...], float] = {}
    for free in product((False, True), repeat=3):
        plan = optimize(problem, freedom=Freedom(*free), passes=search_passes(problem, seconds), time_limit_s=600.0)
        found[free] = plan.makespan_s
    # More freedom includes less: a search that found less takes over what it includes.
    value = {
        free: -math.log(min(t for other, t in found.items() if all(a <= b for a, b in zip(other, free, strict=True))))
        for free in found
    }
    gain = [0.0, 0.0, 0.0]
    for order in permutations(range(3)):
        here = [False, False, False]
        for decision in order:
            before = value[tuple(here)]
            here[decision] = True
            gain[decision] += (value[tuple(here)] - before) / 6.0
    total = sum(gain)
    share = [g / total if total > 0.0 else 0.0 for g in gain]
    return {
        "profile": profile.name,
        "devices": str(devices),
        "speed_up": f"{math.exp(total):.4f}",
        "partition": f"{share[0]:.3f}",
        "placement": f"{share[1]:.3f}",
        "schedule": f"{share[2]:.3f}",
    }


def small(instances: int) -> None:
    """How often the search alone finds what the exact search proves, on random layers."""
    proven = equal = 0
    worst = 1.0
    for seed in range(instances):
        rng = np.random.default_rng(seed)
        layers, devices, count = int(rng.integers(3, 6)), int(rng.integers(2, 4)), int(rng.integers(2, 4))
        times = rng.integers(1, 10, (3, layers)).astype(np.float64)
        profile = LayerProfile.make("random", "T" * layers, *times)
        problem = PipelineProblem(profile, MicrobatchSizes.equal(count), devices)
        searched = optimize(problem, passes=500, time_limit_s=60.0, exact_nodes=0)
        exact = best_plan(problem, searched.makespan_s * (1.0 + 1e-6), max_nodes=60_000)
        if exact.proven:
            proven += 1
            equal += searched.makespan_s <= exact.makespan_s * (1.0 + 1e-9)
            worst = max(worst, searched.makespan_s / exact.makespan_s)
    print(f"{instances} small instances: {proven} proven, search optimal in {equal}, at worst {worst - 1.0:.2%} above")


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """A CSV file with the keys of the first row as head."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def mean(rows: list[dict[str, str]], column: str, only: bool) -> float:
    """Geometric mean of a column over the heterogeneous (or all other) profiles."""
    logs = [math.log(float(r[column])) for r in rows if (r["heterogeneous"] == "True") == only and r[column] != "nan"]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def main() -> None:
    """Make both tables and print the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--small", type=int, metavar="N", help="only compare search and exact search on N instances")
    arguments = parser.parse_args()
    if arguments.small:
        small(arguments.small)
        return
    quick = arguments.quick
    rows, parts = [], []
    for profile in profiles():
        for devices in (4,) if quick else (4, 8, 16):
            rows.append(row(profile, devices, 1.0 if quick else 5.0))
            print(*rows[-1].values(), flush=True)
        write(OUT / "results.csv", rows)
    for column in ("over_interleaved", "over_best_standard"):
        print(f"{column}: heterogeneous {mean(rows, column, True):.3f}, uniform {mean(rows, column, False):.3f}")
    for profile in profiles():
        if profile.name not in UNIFORM:
            for devices in (4,) if quick else (4, 8):
                parts.append(shares(profile, devices, 0.5 if quick else 1.0))
                print(*parts[-1].values(), flush=True)
    write(OUT / "shares.csv", parts)


if __name__ == "__main__":
    main()
