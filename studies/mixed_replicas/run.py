"""Replicas of two tensor-parallel degrees in one rollout pool: what routing would have to know. See README.md.

python studies/mixed_replicas/run.py [--out results.csv]
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlperf.cost.engine_memory import engine_limits
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.replica import Replica
from rlperf.layout import FloatArray, IntArray, Layout
from rlperf.sim.rollout import ReplicaCosts, Trajectories, simulate_rollout
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.workload import load_model
from rlperf.workload.sampling import sample_lengths

Row = tuple[str, str, str, float]
LONG_SHARES = (0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Shares of the responses (or prompts) that go to the wider replicas; the best of them is taken, in hindsight."""


@dataclass(frozen=True)
class Case:
    """A policy, GPUs, and the responses of one rl_step."""

    name: str
    architecture: str
    devices: int
    degrees: tuple[int, ...]
    work: Trajectories

    def replicas(self, degree: int, count: int) -> list[ReplicaCosts]:
        """Equal replicas on H100 with vLLM's constants and limits."""
        arch, hw = load_architecture(self.architecture), load_hardware("h100_sxm")
        vllm, layout = load_engine_calibration("vllm"), Layout.of(tensor_parallel=degree)
        return [
            ReplicaCosts(
                engine_step_cost(Replica.of(arch, hw, vllm, layout)),
                engine_limits(Replica.of(arch, hw, vllm, layout)),
                degree,
            )
        ] * count


def preset(architecture: str, devices: int, degrees: tuple[int, ...], prompts: int, group: int) -> Case:
    """The shipped law of math responses up to 16,384 tokens, with what responses of one prompt share."""
    table = sample_lengths(
        load_model("math"), prompts, group, max_prompt_tokens=2048, max_response_tokens=16384, seed=0
    )
    return Case(f"{architecture}, math", architecture, devices, degrees, Trajectories.from_table(table))


def runaways() -> Case:
    """Short answers with 0.5 % runaways: the case that is made for a few wide replicas."""
    rng = np.random.default_rng(1)
    response = np.maximum(rng.gamma(2.0, 400.0, 8192), 1.0)
    response[rng.random(8192) < 0.005] = 16384
    work = Trajectories.of(150, response, group=np.arange(8192) // 8)
    return Case("Qwen2.5-7B, 0.5 % runaways", "Qwen2.5-7B", 16, (1, 2, 4), work)


def cases() -> list[Case]:
    """What is looked at."""
    return [
        preset("Qwen3-8B", 32, (1, 2, 4), 128, 16),
        preset("Qwen3-32B", 64, (4, 8), 128, 16),
        runaways(),
    ]


def seconds(case: Case, replicas: list[ReplicaCosts], routing: str | IntArray) -> float:
    """Makespan [s]."""
    return simulate_rollout(case.work, replicas, routing=routing).makespan_s  # type: ignore[arg-type]


def by_length(key: FloatArray, narrow: int, wide: int, share: float) -> IntArray:
    """The share with the largest ``key`` to the wide replicas, the others to the narrow ones, each round robin."""
    order = np.argsort(-key, kind="stable")
    count = round(share * len(key))
    chosen = np.empty(len(key), dtype=np.int64)
    chosen[order[:count]] = narrow + np.arange(count) % wide
    chosen[order[count:]] = np.arange(len(key) - count) % narrow
    return chosen


def mixed(case: Case, narrow: int, wide: int, share: float) -> dict[str, float]:
    """Makespan of one mix by what its router knows [s]."""
    width = int(case.devices * share) // wide
    count = (case.devices - width * wide) // narrow
    replicas = [*case.replicas(narrow, count), *case.replicas(wide, width)]
    tokens = case.work.generated_tokens.astype(np.float64)
    mean = (np.bincount(case.work.group, tokens) / np.bincount(case.work.group))[case.work.group]
    blind = [seconds(case, replicas, routing) for routing in ("least_loaded", "prefix_aware")]
    known = {
        name: min(seconds(case, replicas, by_length(key, count, width, each)) for each in LONG_SHARES)
        for name, key in (("prompt's mean known", mean), ("every length known", tokens))
    }
    return {"nothing known": min(blind), **known}


def run() -> list[Row]:
    """Best uniform pool, and the best mix of two degrees by what the router knows, relative to it."""
    rows: list[Row] = []
    for case in cases():
        alike = {d: seconds(case, case.replicas(d, case.devices // d), "round_robin") for d in case.degrees}
        best = min(alike.values())
        rows += [(case.name, f"all TP{degree}", "s", value) for degree, value in alike.items()]
        pairs = [(a, b) for i, a in enumerate(case.degrees) for b in case.degrees[i + 1 :]]
        found = [mixed(case, a, b, share) for a, b in pairs for share in (0.25, 0.5, 0.75)]
        for name in found[0]:
            rows.append((case.name, f"best mix, {name}", "over best uniform", min(each[name] for each in found) / best))
    return rows


def main() -> None:
    """Print the rows and, if asked, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = run()
    for case, what, unit, value in rows:
        print(f"{case:28s} {what:36s} {value:10.3f} {unit}")
    if arguments.out:
        with arguments.out.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(["case", "what", "unit", "value"])
            writer.writerows((case, what, unit, f"{value:.4g}") for case, what, unit, value in rows)


if __name__ == "__main__":
    main()
