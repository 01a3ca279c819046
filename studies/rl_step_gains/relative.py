"""Ratios of published rl_steps whose mean lengths are not stated: `python studies/rl_step_gains/relative.py`.

Rows of measured/rl_step_relative.csv (RLPERF_DATA, default ../shared/data beside the checkout), compared in pairs of
one table. The mean length is open; it is taken from a range, the same in both rows of a pair.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from rlperf.calibrate.rl_step.assumed_lengths import AssumedLengths
from rlperf.calibrate.rl_step.predict import predict_step
from rlperf.calibrate.rl_step.rows import read_row
from rlperf.layout import FloatArray

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RLPERF_DATA", ROOT.parent / "shared" / "data")) / "measured" / "rl_step_relative.csv"
LAWS = (AssumedLengths("gamma", 0.6, 0.01), AssumedLengths("lognormal", 1.2), AssumedLengths("gamma", 0.6))


@dataclass(frozen=True)
class Pair:
    """Rl_step of ``slow`` over that of ``fast``; what neither row states is written down here for both."""

    what: str
    slow: str
    fast: str
    means: tuple[float, ...]
    fast_changes: tuple[tuple[str, str], ...] = ()


AREAL = (("max_staleness", "4"), ("colocated", "0"))
PAIRS = (
    Pair("verl 7B colocated, 32 against 64 H20", "verl_0000", "verl_0002", (1000, 1500, 2500)),
    Pair("verl 30B-A3B colocated against fully async, 128 H20", "verl_0016", "verl_0017", (1500, 2500, 4000)),
    Pair("verl 7B tools colocated against fully async, 32 H20", "verl_0026", "verl_0027", (1500, 3000, 5000)),
    Pair("verl 7B short colocated against fully async, 16 H20", "verl_0024", "verl_0025", (500, 1000, 2000)),
    Pair("AReaL 1.5B sync against async, 128 H800", "areal_0033", "areal_0034", (6000, 10000), AREAL),
    Pair("AReaL 7B sync against async, 192 H800", "areal_0036", "areal_0037", (6000, 10000), AREAL),
    Pair("AReaL 14B sync against async, 256 H800", "areal_0039", "areal_0040", (6000, 10000), AREAL),
    Pair("AReaL 32B sync against async, 384 H800", "areal_0042", "areal_0043", (6000, 10000), AREAL),
    Pair("AReaL sync 7B on 192 against 1.5B on 128 H800", "areal_0036", "areal_0033", (6000, 10000)),
    Pair("AReaL sync 14B on 256 against 7B on 192 H800", "areal_0039", "areal_0036", (6000, 10000)),
    Pair("AReaL sync 32B on 384 against 14B on 256 H800", "areal_0042", "areal_0039", (6000, 10000)),
)


def completed(row: dict[str, str], changes: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The row with what its table leaves out: scoring passes, and for a split the paper's three quarters."""
    full = row | {"scoring_passes": row["scoring_passes"] or "1", "isl_mean": "200"} | dict(changes)
    if full.get("colocated") == "0" and not full.get("rollout_gpus"):
        gpus = int(full["n_gpus"])
        full |= {"rollout_gpus": str(3 * gpus // 4), "trainer_gpus": str(gpus - 3 * gpus // 4)}
    if row["framework"].startswith("AReaL"):
        # the paper's trainer (recollection); the table names none
        full |= {"framework": "AReaL (SGLang + Megatron-Core)"}
        full |= {} if "colocated" in dict(changes) else {"colocated": "1"}
    return full


def measured_s(row: dict[str, str]) -> float:
    """The step, or of a fully asynchronous row what its trainer does in turn (the step is not printed)."""
    if row["measured_step_s"]:
        return float(row["measured_step_s"])
    return sum(float(row[f"measured_{name}"] or 0.0) for name in ("rollout_s", "scoring_s", "train_s"))


def ratios(pair: Pair, rows: dict[str, dict[str, str]]) -> FloatArray:
    """Computed ratios [engines with CUDA graphs, and eager where that is open; lengths]."""
    slow, fast = completed(rows[pair.slow], ()), completed(rows[pair.fast], pair.fast_changes)
    # verl's engine ran eager by default before 0.6, and the one script of these tables that is known sets it
    engines = ("1", "0") if slow["group"] == "verl" else ("1",)
    found = []
    for graph, mean, law in product(engines, pair.means, LAWS):
        open_cells = {"osl_mean": str(mean), "cuda_graph": graph}
        steps = [predict_step(read_row(row | open_cells), law).rl_step_s for row in (slow, fast)]
        found.append(steps[0] / steps[1])
    return np.array(found).reshape(len(engines), -1)


def main() -> None:
    with DATA.open() as stream:
        rows = {row["row_id"]: row for row in csv.DictReader(stream)}
    right = 0
    for pair in PAIRS:
        found = ratios(pair, rows)
        published = measured_s(rows[pair.slow]) / measured_s(rows[pair.fast])
        right += (np.median(found) > 1.0) == (published > 1.0)
        inside = found.min() <= published <= found.max()
        apart = ", ".join(f"{np.median(ratio):.2f}" for ratio in found) if len(found) > 1 else ""
        print(
            f"{pair.what:55s} published {published:.2f}  computed {np.median(found):.2f} "
            f"({found.min():.2f}..{found.max():.2f})  {'inside' if inside else 'outside'}"
            + (f"  with graphs, eager: {apart}" if apart else "")
        )
    print(f"{right} of {len(PAIRS)} in the right order")


if __name__ == "__main__":
    main()
