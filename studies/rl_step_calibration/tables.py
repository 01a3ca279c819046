"""Tables of docs/guide/accuracy-rl-step.md that `rlperf validate` does not print: laws of lengths, and ordered pairs.

    python studies/rl_step_calibration/tables.py

Rows that no fit saw, dense and MoE, of the older groups (as that page's first table has them).
Measured rl_steps are found through RLPERF_DATA (default: ../shared/data beside the checkout).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.rl_step.assumed_lengths import AssumedLengths
from rlperf.calibrate.rl_step.predict import DEFAULT_LAW, StepPrediction, predict_step
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.calibrate.splits import is_new
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.validate_rl_step import seen, stratum
from rlperf.errors import InfeasibleError

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RLPERF_DATA", ROOT.parent / "shared" / "data")) / "measured" / "rl_step.csv"
LAWS = (
    DEFAULT_LAW,
    AssumedLengths("lognormal", 1.2),
    AssumedLengths("gamma", 1.0),
    AssumedLengths("lognormal", 0.8),
    AssumedLengths("gamma", 0.6),
    AssumedLengths("constant"),
)
"""Those of the table."""
DIFFER = 1.2
"""Ratio of measured rl_steps from which on a pair counts."""


def unseen(rows: Sequence[StepRow]) -> list[StepPrediction]:
    """Predictions of rl_steps of the older groups that no fit saw."""
    found = []
    for row in rows:
        if "step_s" not in row.measured or is_new("rl_step", row.row):
            continue
        try:
            prediction = predict_step(row)
        except InfeasibleError:
            continue
        if not seen(prediction):
            found.append(prediction)
    return found


def laws(rows: Sequence[StepRow]) -> None:
    for law in LAWS:
        found = [predict_step(row, law) for row in rows]
        ratio = np.array([one.rl_step_s / one.row.measured["step_s"] for one in found])
        staged = [one for one in found if "rollout_s" in one.row.measured]
        rollout = [one.stage_s("rollout_s") / one.row.measured["rollout_s"] for one in staged]
        error = 100.0 * np.abs(ratio - 1.0)
        print(
            f"{law!s:45s} n {len(ratio)}  median {np.median(error):.1f} %"
            f"  90th percentile {np.quantile(error, 0.9):.0f} %  bias {100.0 * np.median(ratio - 1.0):+.0f} %"
            f"  of {len(rollout)} rollouts {100.0 * (np.median(rollout) - 1.0):+.0f} %"
        )


def ordered(found: Sequence[StepPrediction]) -> None:
    """Pairs of one architecture: how many that differ are predicted in the right order."""
    right, wrong = 0, []
    for one, other in combinations(found, 2):
        measured = np.log(one.row.measured["step_s"] / other.row.measured["step_s"])
        if one.row.architecture.name != other.row.architecture.name or abs(measured) <= np.log(DIFFER):
            continue
        if measured * np.log(one.rl_step_s / other.rl_step_s) > 0.0:
            right += 1
        else:
            wrong.append((one.row.row_id, other.row.row_id))
    print(f"{right} of {right + len(wrong)} pairs in the right order; wrong: {wrong}")


def main() -> None:
    found = unseen([row for row in read_all(StepRow, read_table(DATA))[0] if row.measured])
    plain = [one for one in found if stratum(one.row) in ("dense", "MoE")]
    laws([one.row for one in plain])
    for some in (found, plain):
        ordered(some)


if __name__ == "__main__":
    main()
