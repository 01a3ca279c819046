"""Writes what rl_steps, weight syncs and memory lose with groups left out: docs/website/groups_left_out.py [DATA]

Tables of docs/guide/accuracy-rl-step.md and accuracy-training.md; serving and the seconds of training have scripts of
their own. DATA is found as in ``accuracy.py``. Two minutes of one core.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import accuracy

from rlperf.calibrate.leave_out import ALL, GROUPS, LeaveOutLine, leave_out

GUIDE = accuracy.ROOT / "docs" / "guide"
STAGES = {
    "step_s": "rl_step",
    "rollout_s": "rollout",
    "scoring_s": "scoring",
    "train_s": "training",
    "weight_sync_s": "weight sync",
}
SYNCS = {
    "transport": "a transport (packed broadcast, shard to shard, remote memory)",
    "framework": "a framework (NeMo-RL, miles)",
}
MEMORY = ("framework", "device", "family")


def stage_row(name: str, one: LeaveOutLine) -> str:
    """A stage with its framework in the fit, and without: errors, and how many lie inside an interval how wide."""
    gone = one.left_out
    return (
        f"| {name} | {one.rows} | {one.seen.median:.1f} % | {gone.median:.1f} % | {gone.mean:.1f} % | "
        f"{gone.p90:.1f} % | {100 * gone.inside:.0f} % | {gone.width:.0f} % |"
    )


def sync_row(name: str, one: LeaveOutLine) -> str:
    """Weight syncs with a group left out."""
    gone = one.left_out
    return f"| {name} | {one.rows} | {gone.median:.0f} % | {gone.mean:.0f} % | {gone.p90:.0f} % |"


def memory_row(name: str, one: LeaveOutLine, mean: LeaveOutLine) -> str:
    """Peaks with a group left out, over all rows and over groups."""
    inside = ", ".join(f"{100 * each.inside:.0f}" for each in (one.seen, one.left_out, one.pooled))
    return (
        f"| {name} | {one.rows} | {one.seen.median:.1f} / {one.seen.mean:.1f} % | "
        f"{one.left_out.median:.1f} / {one.left_out.mean:.1f} % | "
        f"{mean.left_out.median:.1f} / {mean.left_out.mean:.1f} % | {inside} % |"
    )


def _line(lines: Sequence[LeaveOutLine], group: str, metric: str = "") -> LeaveOutLine:
    return next(one for one in lines if one.group == group and (not metric or one.metric == metric))


def main() -> None:
    """Leave every group out and write the tables."""
    measured = accuracy.data_folder() / "measured"
    steps = leave_out(measured / "rl_step.csv", "rl_step", "framework").lines
    syncs = {by: leave_out(measured / "weight_sync.csv", "weight_sync", by).lines for by in SYNCS}
    peaks = {by: leave_out(measured / "training.csv", "memory", by).lines for by in MEMORY}
    page = GUIDE / "accuracy-rl-step.md"
    text = accuracy.with_rows(
        page.read_text(),
        "| framework left out in turn |",
        [stage_row(name, _line(steps, ALL, metric)) for metric, name in STAGES.items()],
    )
    rows = [sync_row(name, _line(syncs[by], ALL)) for by, name in SYNCS.items()]
    page.write_text(accuracy.with_rows(text, "| left out in turn |", rows))
    page = GUIDE / "accuracy-training.md"
    rows = [memory_row(by, _line(peaks[by], ALL), _line(peaks[by], GROUPS)) for by in MEMORY]
    page.write_text(accuracy.with_rows(page.read_text(), "| left out | rows | seen | left out |", rows))


if __name__ == "__main__":
    main()
