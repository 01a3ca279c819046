"""Plant 200 faults in simulated rl_steps, explain them, and score; 50 clean runs; time of a large graph.

python studies/root_cause/run.py            scores and compares with expected.csv
python studies/root_cause/run.py --write    scores and writes expected.csv
python studies/root_cause/run.py --seed 7   scores other runs, held out: no threshold was set while looking at them
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from rlperf.diagnose import graph as g  # noqa: E402
from rlperf.diagnose.explain import explain_graph  # noqa: E402
from studies.root_cause.score import Score, kinds_of, run  # noqa: E402

SEED = 2026
FAULTY, CLEAN = 200, 50


def row(score: Score) -> dict[str, str]:
    """One line of expected.csv."""
    estimated = [f"{score.reported[place - 1].loss_s:.2f}" if place else "" for place in score.ranks]
    return {
        "run": str(score.number),
        "planted": " ".join(p.kind for p in score.planted),
        "places": " ".join(map(str, score.ranks)),
        "rl_step_s": f"{score.rl_step_s:.2f}",
        "true_loss_s": " ".join(f"{loss:.2f}" for loss in score.true_loss_s),
        "reported_loss_s": " ".join(estimated),
        "false_faults": " ".join(c.kind for c in score.false_faults),
    }


def summary(scores: list[Score]) -> dict[str, float]:
    """The figures that the README states."""
    single = [s for s in scores if len(s.planted) == 1]
    double = [s for s in scores if len(s.planted) == 2]
    clean = [s for s in scores if not s.planted]
    found = [
        (loss, s.reported[place - 1].loss_s)
        for s in single
        for loss, place in zip(s.true_loss_s, s.ranks, strict=True)
        if place
    ]
    error = [abs(estimate - loss) / loss for loss, estimate in found]
    return {
        "single, root ranked first": float(np.mean([s.ranks == (1,) for s in single])),
        "double, both in the first three": float(np.mean([all(0 < r <= 3 for r in s.ranks) for s in double])),
        "clean runs with a fault reported": float(sum(bool(s.false_faults) for s in clean)),
        "faulty runs with a fault that was not planted": float(sum(bool(s.false_faults) for s in single + double)),
        "seconds reported, median error": float(np.median(error)),
        "seconds reported, 95th percentile of the error": float(np.quantile(error, 0.95)),
    }


def large_graph_s(ranks: int = 1024, stages: int = 50) -> float:
    """Seconds to explain a graph of 1,024 ranks x 50 stages."""
    rng = np.random.default_rng(0)
    kinds = (g.REWARD, g.SCORING, g.TRAINING, g.COMMUNICATION, g.OPTIMIZER, g.WEIGHT_SYNC)
    build = g.GraphBuilder(("devices",), 8 * ranks)
    now, last = 0.0, None
    for stage in range(stages):
        seconds = rng.normal(1.0, 0.02, ranks)
        seconds[77] *= 2.0 if stage == 20 else 1.0
        work = build.add(
            kinds[stage % 6], now, now + seconds, work=1.0, after=last, at=g.Place(rank=np.arange(ranks), part=stage)
        )
        now += float(seconds.max())
        last = build.barrier(work, now)
    graph = build.freeze()
    begin = time.perf_counter()
    found = explain_graph(graph)
    assert found.causes[0].rank == 77
    return time.perf_counter() - begin


def main() -> int:
    """Score everything; 1 where a line differs from expected.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record expected.csv")
    parser.add_argument("--seed", type=int, default=SEED)
    asked = parser.parse_args()
    seed = asked.seed
    scores = [run(n, kinds_of(n), seed) for n in range(FAULTY)] + [run(1000 + n, (), seed) for n in range(CLEAN)]
    rows = [row(score) for score in scores]
    for name, value in summary(scores).items():
        print(f"{name}: {value:.3g}")
    print(f"1,024 ranks x 50 stages explained in {large_graph_s():.2f} s")
    if seed != SEED:
        missed = [s for s in scores if not all(0 < r <= len(s.planted) + (len(s.planted) == 2) for r in s.ranks)]
        for score in missed:
            print("missed:", row(score))
        return 0
    table = HERE / "expected.csv"
    if asked.write:
        with table.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return 0
    with table.open(encoding="utf-8") as stream:
        known = list(csv.DictReader(stream))
    different = [new["run"] for new, old in zip(rows, known, strict=True) if new["places"] != old["places"]]
    print(f"{len(different)} runs differ from expected.csv" + (f": {', '.join(different)}" if different else ""))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
