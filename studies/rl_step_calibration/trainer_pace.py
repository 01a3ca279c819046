"""Pool how much longer training and scoring take under RL frameworks than trainer backends' own rows say.

    python studies/rl_step_calibration/trainer_pace.py            prints the pools beside what is shipped
    python studies/rl_step_calibration/trainer_pace.py --write    writes them into hwprofiles/calibrations

Measured rl_steps are found through RLPERF_DATA (default: ../shared/data beside the checkout).
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence
from pathlib import Path

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.trainer_pace_pool import STAGES, fit_paces
from rlperf.specs.trainer_pace import Pace, TrainerPace, load_trainer_paces

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RLPERF_DATA", ROOT.parent / "shared" / "data")) / "measured" / "rl_step.csv"
FILE = ROOT / "hwprofiles" / "calibrations" / "trainer_pace.yaml"
TRAINERS = ("megatron", "fsdp2")
"""Backends that rows of more than one framework state stages of."""


def text_of(pools: Sequence[TrainerPace]) -> str:
    lines = [
        "# Training and scoring over what a trainer backend's own seconds say, for a framework that nobody fitted:",
        "# written by studies/rl_step_calibration/trainer_pace.py --write",
        "pools:",
    ]
    for pool in pools:
        lines.append(f'  - trainer: {pool.trainer}\n    without: "{pool.without}"')
        for stage in STAGES:
            one: Pace = getattr(pool, stage)
            of = one.provenance
            where = f'source: "{of.source}", date: {of.date}, n: {of.n}, rows: [{", ".join(of.rows)}]'
            spread = f"low: {of.low:g}, high: {of.high:g}, assumed: true"
            lines.append(f"    {stage}: {{value: {one.value}, provenance: {{{where}, {spread}}}}}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    rows = [row for row in read_all(StepRow, read_table(DATA))[0] if row.measured]
    pools = [pool for trainer in TRAINERS for pool in fit_paces(rows, trainer, datetime.date.today().isoformat())]
    for pool in pools:
        shipped = load_trainer_paces().of_stranger(pool.without, pool.trainer)
        values = (
            f"{stage} {getattr(pool, stage).value} (shipped {getattr(shipped, stage).value if shipped else 'none'})"
            for stage in STAGES
        )
        print(f"{pool.trainer:9s} without {pool.without or 'none':8s}  {'  '.join(values)}")
    if asked.write:
        FILE.write_text(text_of(pools))


if __name__ == "__main__":
    main()
