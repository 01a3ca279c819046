"""Rollouts simulated per second on one core, and side by side with a public serving simulator.

    python studies/benchmarks/rollout.py [--vidur PYTHON]

CPU seconds, best of several runs. ``--vidur`` names a Python in which ``pip install vidur==0.0.26`` was done; both then
simulate the same requests with the same cost and prefill-first scheduling, and their makespans are compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.sim.rollout import (
    Trajectories,
    simulate_replica,
    simulate_rollout,
    take_census,
)

SEQUENCES = 1024
TOKENS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192], dtype=np.float64)
COST = EngineStepCost(
    tokens=TOKENS,
    linear_s=5e-3 + 2e-5 * TOKENS,
    host_s=1e-3,
    host_per_request_s=1e-6,
    decode_fixed_s=1e-5,
    decode_per_request_s=1e-7,
    decode_per_kv_token_s=1e-9,
    prefill_fixed_s=1e-4,
    prefill_per_request_s=1e-5,
    prefill_per_pair_s=1e-11,
    graph_buckets=np.array([1.0, 2.0, 4.0, *range(8, 257, 8)]),
)


@dataclass(frozen=True)
class Measured:
    """One line of the table."""

    name: str
    target_per_s: float | None
    rollouts_per_s: float
    detail: str


def responses(rng: np.random.Generator, size: int | tuple[int, int]) -> np.ndarray:
    """Long-tailed responses like those of math RL: gamma, mean 9,300 tokens, cut at 32k."""
    return np.minimum(rng.gamma(2.4, 3800.0, size).astype(np.int64) + 200, 32768)


def single_turn(seed: int = 0, size: int = SEQUENCES) -> Trajectories:
    """128 prompts of 8 responses."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(rng.integers(60, 300, size // 8), 8)
    return Trajectories.of(prompt, responses(rng, size), group=np.arange(size) // 8)


def multi_turn(trajectories: int, seed: int = 0) -> Trajectories:
    """One to four turns with tool calls in between, groups of 8, like search agents."""
    rng = np.random.default_rng(seed)
    turns = rng.integers(1, 5, trajectories)
    offsets = np.concatenate([[0], np.cumsum(turns)])
    response = rng.gamma(1.5, 60.0, offsets[-1]).astype(np.int64) + 10
    first = np.repeat(rng.integers(200, 400, trajectories // 8), 8)
    grown = np.concatenate([[0], np.cumsum(response + 600)])[:-1]
    starts = np.repeat(offsets[:-1], turns)
    return Trajectories(
        prompt_tokens=np.repeat(first, turns) + grown - grown[starts],
        response_tokens=response,
        tool_latency_s=rng.exponential(0.4, offsets[-1]),
        offsets=offsets,
        group=np.arange(trajectories) // 8,
        arrival_s=np.zeros(trajectories),
    )


def best(run: Callable[[], object], repeats: int) -> float:
    """Least CPU seconds of several runs, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return max(min(times), 1e-9)


def events(name: str, target: float, limits: EngineLimits, repeats: int) -> Measured:
    """Rollouts of one replica with 1,024 sequences per second by events."""
    trajectories = single_turn()
    found = simulate_replica(trajectories, COST, limits)
    seconds = best(lambda: simulate_replica(trajectories, COST, limits), repeats)
    return Measured(name, target, 1.0 / seconds, f"{found.preemptions} preemptions, {found.makespan_s:.0f} s simulated")


def small_replicas() -> Measured:
    """512 replicas with two requests each: what every replica takes beside its events."""
    trajectories = single_turn()
    limits = EngineLimits(kv_tokens=5e4, max_running=256)
    seconds = best(lambda: simulate_rollout(trajectories, 512, cost=COST, limits=limits), 3)
    return Measured("512 replicas of two requests", 4.0, 1.0 / seconds, f"{1e3 * seconds / 512:.2f} ms a replica")


def closed_forms() -> list[Measured]:
    """One workload at many costs."""
    census = take_census(single_turn(), EngineLimits(kv_tokens=4e6, max_running=256))
    layouts = 20_000
    scale = 1.0 + np.random.default_rng(2).random(layouts)
    stack = EngineStepCost(TOKENS, scale[:, None] * COST.linear_s, *(scale * getattr(COST, n) for n in SCALARS))
    many = layouts / best(lambda: census.makespan_s(stack), 5)
    return [Measured("closed form, census x layouts", 100_000, many, "queue and prefix cache, exact")]


SCALARS = (
    "host_s", "host_per_request_s", "decode_fixed_s", "decode_per_request_s", "decode_per_kv_token_s",
    "prefill_fixed_s", "prefill_per_request_s", "prefill_per_pair_s",
)  # fmt: skip


def agents() -> Measured:
    """8 replicas with 2,048 multi-turn trajectories each."""
    trajectories = multi_turn(8 * 2048)
    limits = EngineLimits(kv_tokens=5e5, max_running=256)
    seconds = best(lambda: simulate_rollout(trajectories, 8, cost=COST, limits=limits, routing="static_group"), 2)
    detail = f"{trajectories.n_turns:,} turns, cache limit: {seconds:.2f} s a rollout"
    return Measured("8 replicas x 2,048 multi-turn", 1.0, 1.0 / seconds, detail)


PEER_CASES = (
    ("256 requests, 64 at once", 256, 64, 10**6),
    ("1,024 requests, 256 at once", 1024, 256, 10**6),
    ("1,024 requests, cache limit", 1024, 256, 4000),
)
"""Name, requests, max_running, blocks of 16 tokens."""


def side_by_side(python: Path) -> list[str]:
    """The same requests in Vidur: makespans and CPU seconds."""
    script = Path(__file__).with_name("rollout_vidur.py")
    head = (
        f"{'prefill first, no prefix caching':34s} {'rlperf':>22s} {'Vidur 0.0.26':>22s} {'makespan':>9s} {'speed':>6s}"
    )
    lines = [head]
    rng = np.random.default_rng(0)
    linear = {"host_s": 5e-3, "per_token_s": 2e-5, "per_request_s": 1e-6, "per_key_s": 1e-8}
    cost = EngineStepCost(
        np.array([0.0, 1.0]), np.array([0.0, 2e-5]), 5e-3, decode_per_request_s=1e-6, decode_per_kv_token_s=1e-8
    )
    for name, size, running, blocks in PEER_CASES:
        prompt = rng.integers(60, 300, size)
        response = np.minimum(rng.gamma(2.4, 150.0, size).astype(np.int64) + 2, 2000)
        limits = EngineLimits(16.0 * blocks, running, 8192, chunked_prefill=False, prefix_caching=False)
        trajectories = Trajectories.of(prompt, response)
        makespan = simulate_replica(trajectories, cost, limits).makespan_s
        seconds = best(lambda t=trajectories, m=limits: simulate_replica(t, cost, m), 3)
        asked = {
            "prompt": prompt.tolist(), "response": response.tolist(), "blocks": blocks, "max_running": running,
            "token_budget": 8192, "cost": linear,
        }  # fmt: skip
        done = subprocess.run([python, script], input=json.dumps(asked), capture_output=True, text=True, check=False)
        line = f"{name:34s} {makespan:9.3f} s {1e3 * seconds:7.2f} ms"
        if done.returncode:
            lines.append(f"{line}  stops with {(done.stderr.splitlines() or ['no message'])[-1]}")
            continue
        other = json.loads(done.stdout.splitlines()[-1])
        gap = 100.0 * (makespan / other["makespan_s"] - 1.0)
        line += f" {other['makespan_s']:9.3f} s {1e3 * other['cpu_s']:7.0f} ms {gap:+8.3f}%"
        lines.append(f"{line} {other['cpu_s'] / seconds:5.0f}x")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vidur", type=Path, help="Python of an environment with vidur==0.0.26")
    arguments = parser.parse_args()
    rows = [
        events("single turn, all at once", 1500, EngineLimits(np.inf, SEQUENCES), 200),
        events("single turn, queue of 256 places", 1500, EngineLimits(np.inf, 256), 60),
        events("cache limit, no preemption, prefix", 200, EngineLimits(3.2e6, 256), 40),
        events("cache limit, 5 % preempted, prefix", 200, EngineLimits(4e6, SEQUENCES), 8),
        events("cache limit, half preempted, prefix", 200, EngineLimits(2e6, SEQUENCES), 5),
        events("cache of 50 responses, prefix", 10, EngineLimits(4.3e5, 256), 3),
        small_replicas(),
        *closed_forms(),
        agents(),
    ]
    print(f"{'rollouts of 1,024 sequences':38s} {'per second':>12s} {'asked':>9s}")
    for row in rows:
        asked = f"{row.target_per_s:,.0f}" if row.target_per_s else ""
        print(f"{row.name:38s} {row.rollouts_per_s:12,.1f} {asked:>9s}  {row.detail}")
    if arguments.vidur:
        print()
        print("\n".join(side_by_side(arguments.vidur)))


if __name__ == "__main__":
    main()
