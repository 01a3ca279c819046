"""Is the measured best in the planner's tied set? ``python studies/measured_best/run.py [OUT.csv]``.

Needs the measured data (``RLPERF_DATA``, by default ``../shared/data`` beside the checkout). About two minutes of one
core; most of it plans the clusters of the measured rl_steps anew.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import rl_steps
import training

SAME = 1.0 + 1e-6
"""Predicted seconds up to which two layouts take equally long."""


@dataclass(frozen=True)
class Summary:
    """Figures of one table over its sets of configurations that differ in layout, mode or backend alone.

    Attributes
    ----------
    rows : *at hand* (groups in view when the cost model was settled), *unseen* (those of them of which no fit saw a
        row), or *new* (groups that came later)
    best_tied : share of sets whose measured best the planner cannot tell from its own first choice
    tied_share : share of the configurations that it cannot tell apart from its first choice, mean over sets
    first_is_best : share of sets whose first choice is the measured best
    own_no_slower : share of sets for which the planner's own layout is predicted no slower than any measured one
    """

    kind: str
    rows: str
    sets: int
    best_tied: float
    tied_share: float
    first_is_best: float
    median_regret: float
    p90_regret: float
    worst_regret: float
    own_no_slower: float
    own_median: float
    own_worst: float


def summary(rows: str, found: Sequence[training.Outcome]) -> Summary:
    """Figures over sets."""
    regret, own = np.array([each.regret for each in found]), np.array([each.own for each in found])
    return Summary(
        found[0].kind,
        rows,
        len(found),
        best_tied=float(np.mean([each.best_is_tied for each in found])),
        tied_share=float(np.mean([each.tied / each.layouts for each in found])),
        first_is_best=float(np.mean(regret == 0.0)),
        median_regret=float(np.median(regret)),
        p90_regret=float(np.quantile(regret, 0.9)),
        worst_regret=float(regret.max()),
        own_no_slower=float(np.mean(own <= SAME)),
        own_median=float(np.median(own)),
        own_worst=float(own.max()),
    )


def summaries(found: Sequence[training.Outcome]) -> list[Summary]:
    """All sets of groups that were at hand, those of them of which no fit saw a row, and groups that came later."""
    at_hand = [each for each in found if not each.new]
    parts = {"at hand": at_hand, "unseen": [each for each in at_hand if each.unseen]}
    parts["new"] = [each for each in found if each.new]
    return [summary(name, part) for name, part in parts.items() if part]


def measured_folder() -> Path:
    """Where the measured tables are."""
    root = Path(__file__).resolve().parents[2]
    return Path(os.environ.get("RLPERF_DATA", root.parent / "shared" / "data")) / "measured"


def main(out: Path | None) -> None:
    """Compute everything, say it, and write the summary."""
    folder = measured_folder()
    trained = training.outcomes(folder / "training.csv")
    steps = rl_steps.read(folder / "rl_step.csv")
    own = rl_steps.own_plans(steps)
    planned = {each.row_id: each.planned_s for each in own}
    stepped = rl_steps.outcomes(steps, planned)
    rows = summaries(trained) + summaries(stepped)
    for each in (*trained, *stepped):
        if each.regret > 0.1 or each.own > SAME or not each.best_is_tied:
            print(each)
    for plan in own:
        print(f"{plan.row_id}: {plan.refused or f'own plan / measured configuration, predicted: {plan.ratio:.3f}'}")
    for row in rows:
        print(row)
    ratios = np.array([plan.ratio for plan in own if not plan.refused])
    print(
        f"{len(ratios)} of {len(own)} measured configurations: own plan no slower for {np.mean(ratios <= SAME):.1%}, "
        f"median ratio {np.median(ratios):.2f}, worst {ratios.max():.3f}"
    )
    if out is not None:
        with out.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow([field.name for field in fields(Summary)])
            for row in rows:
                writer.writerow([f"{v:.4f}" if isinstance(v, float) else v for v in asdict(row).values()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="CSV to write")
    main(parser.parse_args().out)
