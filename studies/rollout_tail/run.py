"""What the longest response does to a synchronous rollout, and what can be done about it. See README.md.

    python studies/rollout_tail/run.py [--out results.csv] [--traces DIR]

``--traces`` names a folder with PolyTrace recordings (dapo_32b, deepcoder_14b) for the policies; without it they run
on drawn lengths only.
"""

from __future__ import annotations

import argparse
import csv
import sys
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlperf.cost.engine_memory import engine_limits
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.replica import Replica
from rlperf.layout import Layout
from rlperf.sim.rollout import (
    GroupSource,
    PartialRollouts,
    Trajectories,
    simulate_replica,
    simulate_rollout,
)
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from studies.rollout_tail.policies import Synchronous, TailBatching, TailPolicy

Row = tuple[str, str, str, float]

VERL_658 = ((3768, 73.1), (6233, 118.6), (8412, 166.7))
"""Longest response [tokens] and rollout time [s] of three ranks of one rl_step (verl issue 658)."""
ROLLOUT_SHARE = 0.8
"""f, share of the rollout in an rl_step, for the bound on what removing the tail can gain."""


def engine(tensor_parallel: int) -> tuple[EngineStepCost, EngineLimits]:
    """Qwen2.5-7B on H100 with vLLM's defaults."""
    arch, hw, vllm = load_architecture("Qwen2.5-7B"), load_hardware("h100_sxm"), load_engine_calibration("vllm")
    layout = Layout.of(tensor_parallel=tensor_parallel)
    return engine_step_cost(Replica.of(arch, hw, vllm, layout)), engine_limits(Replica.of(arch, hw, vllm, layout))


def math_lengths(prompts: int, group: int, seed: int = 0) -> Trajectories:
    """Like production math RL: gamma(2.438, 195.4, 3847.2) (PolyTrace's published fit), 1 % runaways to 32k."""
    rng = np.random.default_rng(seed)
    n = prompts * group
    response = 195.4 + rng.gamma(2.438, 3847.2, n)
    response[rng.random(n) < 0.01] = 32768
    response = np.minimum(response, 32768).astype(np.int64)
    return Trajectories.of(np.repeat(rng.integers(60, 250, prompts), group), response, group=np.arange(n) // group)


def longest_response_rules() -> list[Row]:
    """Seconds per token from the first rank of verl issue 658 predict the other two from their longest response."""
    tokens, seconds = VERL_658[0]
    cost = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=seconds / tokens)
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for longest, measured in VERL_658[1:]:
        others = np.minimum(rng.gamma(2.0, 700.0, 127), longest - 1)
        made = simulate_replica(
            Trajectories.of(100, np.append(others, longest)), cost, EngineLimits(np.inf, max_running=256)
        )
        rows.append(("longest response", f"{longest} tokens", "predicted over measured", made.makespan_s / measured))
    return rows


def more_nodes_do_not_help() -> list[Row]:
    """One rl_step of 512 x 8 responses on 8 to 512 GPUs: rollout time against its floor, the longest one alone."""
    trajectories = math_lengths(512, 8)
    cost, limits = engine(tensor_parallel=2)
    longest = trajectories.take(np.array([int(np.argmax(trajectories.response_tokens))]))
    floor = simulate_replica(longest, cost, limits).makespan_s
    rows: list[Row] = [("more nodes", "longest response alone", "s", floor)]
    for replicas in (4, 8, 16, 32, 64, 128, 256):
        result = simulate_rollout(trajectories, replicas, cost=cost, limits=limits, devices_per_replica=2)
        rows.append(("more nodes", f"{2 * replicas} GPUs", "s", result.makespan_s))
    return rows


def tensor_parallel_pays_for_tails() -> list[Row]:
    """16 GPUs as 16 x TP1, 8 x TP2, 4 x TP4: short answers with 0.5 % runaways, against equal lengths of the same mean.

    Batches are large enough to be bound by compute and short enough for the cache, so that nothing but the tail and
    the collectives tells the degrees apart.
    """
    rng = np.random.default_rng(1)
    response = np.maximum(rng.gamma(2.0, 400.0, 8192), 1.0)
    response[rng.random(8192) < 0.005] = 16384
    heavy = Trajectories.of(150, response, group=np.arange(8192) // 8)
    mean = int(heavy.response_tokens.mean())
    equal = Trajectories.of(heavy.prompt_tokens, np.full(len(heavy), mean), group=heavy.group)
    rows: list[Row] = []
    for name, work in (("heavy tail", heavy), ("equal lengths", equal)):
        seconds = {}
        for degree in (1, 2, 4):
            cost, limits = engine(degree)
            seconds[degree] = simulate_rollout(work, 16 // degree, cost=cost, limits=limits).makespan_s
            rows.append(("tensor parallel", f"{name}, TP{degree}", "s", seconds[degree]))
        rows.append(("tensor parallel", f"{name}, TP2 over TP1", "speed-up", seconds[1] / seconds[2]))
    return rows


POLICIES: tuple[tuple[str, TailPolicy], ...] = (
    ("partial rollouts x1.5", PartialRollouts(1.5)),
    ("partial rollouts x2", PartialRollouts(2.0)),
    ("tail batching x1.25", TailBatching(1.25)),
    ("tail batching x1.5", TailBatching(1.5)),
)


def policies(name: str, source: Trajectories, groups: int, replicas: int, rl_steps: int = 24) -> list[Row]:
    """Gain of each policy over the synchronous rollout, against the bound 1 / (1 - f (1 - b)).

    b is what the rollout would take with its batch always full, over what it takes.
    """
    cost, limits = engine(tensor_parallel=2)
    serve = partial(simulate_rollout, replicas=replicas, cost=cost, limits=limits, devices_per_replica=2)
    base = Synchronous().run(GroupSource(source, 1), serve, groups, rl_steps)
    busy = full_batch_share(source, groups, replicas, cost, limits)
    bound = 1.0 / (1.0 - ROLLOUT_SHARE * (1.0 - busy))
    rows: list[Row] = [
        (f"policies, {name}", "busy b", "share", busy),
        (f"policies, {name}", "bound on the rl_step's gain", "x", bound),
    ]
    for label, policy in POLICIES:
        run = policy.run(GroupSource(source, 1), serve, groups, rl_steps)
        left = run.seconds_per_token / base.seconds_per_token
        rows += [
            (f"policies, {name}", f"{label}: rollout gain", "x", 1.0 / left),
            (f"policies, {name}", f"{label}: rl_step gain", "x", 1.0 / (1.0 - ROLLOUT_SHARE * (1.0 - left))),
            (f"policies, {name}", f"{label}: stale tokens", "share", run.stale_share),
            (f"policies, {name}", f"{label}: discarded tokens", "share", run.discarded_share),
        ]
    return rows


def full_batch_share(
    source: Trajectories, groups: int, replicas: int, cost: EngineStepCost, limits: EngineLimits
) -> float:
    """b: seconds to decode an rl_step's tokens with every place taken all the time, over the synchronous makespan."""
    batch = GroupSource(source, 2).draw(groups)
    result = simulate_rollout(batch, replicas, cost=cost, limits=limits)
    places = min(limits.max_running, 2 * len(batch) // replicas)  # over-provisioned policies run up to twice the batch
    context = float((batch.prompt_tokens + 0.5 * batch.response_tokens).mean())
    rl_step_s = float(cost.decode_s(places, places * context))
    return batch.response_tokens.sum() / replicas / places * rl_step_s / result.makespan_s


def recorded(folder: Path) -> list[tuple[str, Trajectories, int, int]]:
    """Recorded workloads: name, trajectories of all rl_steps, groups per rl_step, replicas."""
    from rlperf.workload import read_recording

    found = []
    for name, groups in (("dapo_32b", 96), ("deepcoder_14b", 16)):
        paths = sorted((folder / name).glob("packed_lengths_step_*.jsonl"))
        if paths:
            found.append((name, Trajectories.from_table(read_recording(paths).lengths), groups, 2))
    return found


def run(traces: Path | None = None) -> list[Row]:
    """All rows of the study."""
    rows = [*longest_response_rules(), *more_nodes_do_not_help(), *tensor_parallel_pays_for_tails()]
    rows += policies("drawn math", math_lengths(1024, 8, seed=3), groups=64, replicas=4)
    for name, source, groups, replicas in recorded(traces) if traces else []:
        rows += policies(name, source, groups, replicas)
    return rows


def main() -> None:
    """Print the rows and, if asked, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--traces", type=Path)
    arguments = parser.parse_args()
    rows = run(arguments.traces)
    for question, case, unit, value in rows:
        print(f"{question:26s} {case:44s} {value:10.3f} {unit}")
    if arguments.out:
        with arguments.out.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(["question", "case", "unit", "value"])
            writer.writerows((question, case, unit, f"{value:.4g}") for question, case, unit, value in rows)


if __name__ == "__main__":
    main()
