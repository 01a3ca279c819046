"""Length models judged on rl_steps that they have not seen, and what a law without any error of fit would reach.

Run: python studies/workload_fidelity/run.py [FOLDER OF POLYTRACE] [--more] [--write]   (default $RLPERF_DATA/polytrace)

``--more`` runs the splits that the guide leaves out, models judged on what they were fitted on, and the thresholds that
were tried for the tail, in place of the two parts of ``expected.csv``; ``--write`` records ``expected.csv`` and the
guide's tables, or ``expected_more.csv``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import NamedTuple, TypeAlias
from unittest.mock import patch

import numpy as np
import polars as pl

from rlperf.cli.output import progress
from rlperf.cli.rollout_layouts import rollouts
from rlperf.workload import LengthModel, read_recording
from rlperf.workload import tails as tail_laws
from rlperf.workload.fidelity import Rollouts, bias, bootstraps, coverage, fidelity, group_maximum, width_ratio
from rlperf.workload.fitting import fit_model
from rlperf.workload.lengths import Float, LengthTable
from rlperf.workload.records import Recording
from rlperf.workload.sampling import predictive_replicates, sample_lengths, sample_rl_steps

HERE = Path(__file__).parent
GUIDE = HERE.parent.parent / "docs" / "guide" / "workloads.md"
HELD_OUT_HEADER, PERFECT_HEADER = "| recording | fitted on | judged on |", "| recording | law of | rl_steps judged |"
MOST_BIAS, MOST_WIDTH = 0.03, 1.5
"""The criterion: a bias of at most 3 % and an interval of at most 1.5 bootstraps."""
MULTI_TURN = "search_r1_7b"
"""Its rollouts take 15 times as long to simulate as those without tools, so it gets fewer replicates."""


class Split(NamedTuple):
    """rl_steps of a recording to fit on and to judge on."""

    recording: str
    fitted_on: tuple[int, ...]
    judged_on: tuple[int, ...]


class PerfectCase(NamedTuple):
    """A recording whose fitted law is taken as the truth, and how many rl_steps are drawn from it to be judged."""

    recording: str
    fitted_on: tuple[int, ...]
    rl_steps: int


VIDEO = tuple(range(1, 16))
SPLITS = (
    Split("search_r1_7b", (0,), (1, 2)),
    Split("search_r1_7b", (0, 1), (2,)),
    Split("dapo_32b", (0, 1), (2, 3)),
    Split("dapo_32b", (2, 3), (0, 1)),
    Split("dapo_32b", (0, 2), (1, 3)),
    Split("dapo_32b", (0, 1, 2), (3,)),
    Split("dapo_32b", (1, 2, 3), (0,)),
    Split("video_7b", VIDEO[7:11], VIDEO[11:]),
    Split("video_7b", VIDEO[11:], VIDEO[7:11]),
    Split("video_7b", VIDEO[:7], VIDEO[7:]),
    Split("video_7b", VIDEO[::2], VIDEO[1::2]),
    Split("deepcoder_14b", (0,), (1, 2)),
    Split("deepcoder_14b", (0, 1), (2,)),
    Split("deepcoder_14b", (0, 2), (1,)),
    Split("deepcoder_14b", (1, 2), (0,)),
)
MORE_SPLITS = (
    Split("search_r1_7b", (1,), (0, 2)),
    Split("search_r1_7b", (2,), (0, 1)),
    Split("search_r1_7b", (0, 2), (1,)),
    Split("search_r1_7b", (1, 2), (0,)),
    Split("dapo_32b", (1, 3), (0, 2)),
    Split("dapo_32b", (0, 3), (1, 2)),
    Split("dapo_32b", (1, 2), (0, 3)),
    Split("dapo_32b", (0, 1, 3), (2,)),
    Split("dapo_32b", (0, 2, 3), (1,)),
    Split("video_7b", VIDEO[1::2], VIDEO[::2]),
    Split("video_7b", VIDEO[6::2], VIDEO[7:14:2]),
    Split("video_7b", VIDEO[:3], VIDEO[3:6]),
    Split("video_7b", VIDEO[3:6], VIDEO[:3]),
    Split("deepcoder_14b", (1,), (0, 2)),
    Split("deepcoder_14b", (2,), (0, 1)),
)
"""All other ways to fit on some and judge on the other rl_steps of search, dapo (two and two, three and one) and
deepcoder, and a few of video's many."""
IN_SAMPLE = (
    Split("search_r1_7b", (0, 1, 2), (0, 1, 2)),
    Split("dapo_32b", (0, 1, 2, 3), (0, 1, 2, 3)),
    Split("video_7b", VIDEO[7:], VIDEO[7:]),
    Split("deepcoder_14b", (0, 1, 2), (0, 1, 2)),
)
"""Judged on what it was fitted on: no validation, but it tells what the law itself leaves out."""
REFITTED = IN_SAMPLE[1:]
"""Of which recordings are drawn from the law and fitted again (search, with its tools, would take half an hour)."""
PERFECT = (
    PerfectCase("video_7b", VIDEO[7:], 4),
    PerfectCase("deepcoder_14b", (0, 1, 2), 2),
    PerfectCase("deepcoder_14b", (0, 1, 2), 1),
    PerfectCase("dapo_32b", (0, 1, 2, 3), 4),
    PerfectCase("dapo_32b", (0, 1, 2, 3), 2),
    PerfectCase("dapo_32b", (0, 1, 2, 3), 1),
    PerfectCase("search_r1_7b", (0, 1, 2), 1),
)
THRESHOLD_SHARES = (0.02, 0.05, 0.10)
THRESHOLD_SPLITS = tuple(split for split in SPLITS if split.recording in ("dapo_32b", "video_7b"))


@dataclass(frozen=True)
class HeldOut:
    """A model on rl_steps that it was not fitted on, and a replay of the prompt groups that it was fitted on.

    `bias_least`, `bias_largest`: the layouts on which the bias is least and largest. `luck`: the bias that chance alone
    gives in 9 of 10 recordings as short as the judged one. `group_maximum`: relative error of E[max of a group] / E[L].
    """

    part: str
    recording: str
    fitted_on: str
    judged_on: str
    replicates: int
    bias: float
    bias_least: float
    bias_largest: float
    luck: float
    replay: float
    inside: float
    width: float
    replay_width: float
    group_maximum: float
    group_maximum_tolerance: float
    replay_group_maximum: float
    tokens: float


@dataclass(frozen=True)
class PerfectLaw:
    """How often recordings of `rl_steps` rl_steps, drawn from a law, find that very law faithful.

    `bias_met`, `width_met`, `both_met`: share of the recordings in which the law meets the criterion. `in_luck`: share
    in which its bias is at most `luck`. `mean_bias`: what the bootstrap's too short longest response leaves.
    """

    part: str
    recording: str
    fitted_on: str
    rl_steps: int
    replicates: int
    recordings: int
    bias_met: float
    width_met: float
    both_met: float
    median_bias: float
    mean_bias: float
    luck: float
    in_luck: float
    inside: float


@dataclass(frozen=True)
class Refitted:
    """Recordings drawn from a law, each fitted again and judged on itself: what `in_sample` is when the law is right.

    `mean_bias`, `bias_sd`: of the bias over the recordings, `below`: share of them with a bias below `in_sample`'s;
    `group_maximum`, `group_maximum_sd`: the same of the error of E[max of a group] / E[L].
    """

    part: str
    recording: str
    fitted_on: str
    rl_steps: int
    replicates: int
    recordings: int
    mean_bias: float
    bias_sd: float
    below: float
    group_maximum: float
    group_maximum_sd: float
    group_maximum_below: float


@dataclass(frozen=True)
class Threshold:
    """A split again with the tail's threshold fixed at one percentile (share of the lengths above it)."""

    part: str
    recording: str
    fitted_on: str
    judged_on: str
    replicates: int
    tail_share: float
    bias: float
    inside: float
    width: float


Row: TypeAlias = HeldOut | PerfectLaw | Refitted | Threshold


def label(rl_steps: Sequence[int]) -> str:
    """`0, 1`, or `8-11` for more than three that follow one another, or `1-15 by 2`."""
    stride = rl_steps[1] - rl_steps[0] if len(rl_steps) > 3 else 0
    if len(rl_steps) > 3 and tuple(rl_steps) == tuple(range(rl_steps[0], rl_steps[-1] + 1, stride)):
        return f"{rl_steps[0]}-{rl_steps[-1]}" + (f" by {stride}" if stride > 1 else "")
    return ", ".join(map(str, rl_steps))


def recorded(data: Path, recording: str, rl_steps: Sequence[int]) -> Recording:
    """Some rl_steps of a PolyTrace recording."""
    kind = "multiturn_workload_step" if recording == MULTI_TURN else "packed_lengths_step"
    return read_recording([data / recording / f"{kind}_{step}.jsonl" for step in rl_steps])


def held_out(data: Path, split: Split, replicates: int = 0) -> HeldOut:
    """Fit on one part and judge on the other; 200 replicates, 100 of a recording with tools, unless stated."""
    replicates = replicates or (100 if split.recording == MULTI_TURN else 200)
    fitted = recorded(data, split.recording, split.fitted_on)
    judged = recorded(data, split.recording, split.judged_on).lengths
    system = rollouts(judged.multi_turn)
    found = fidelity(fit_model(fitted), judged, system, replicates=replicates, fitted_on=fitted.lengths)
    if found.group_maximum is None or found.baseline_group_max_ratio_error is None:
        raise ValueError(f"{split.recording}: these recordings have groups of several responses")
    layouts = sorted((bias([o for o in found.system if o.quantity == name]) for name in system.names), key=abs)
    return HeldOut(
        part="held_out" if not set(split.fitted_on) & set(split.judged_on) else "in_sample",
        recording=split.recording,
        fitted_on=label(split.fitted_on),
        judged_on=label(split.judged_on),
        replicates=replicates,
        bias=found.system_bias,
        bias_least=layouts[0],
        bias_largest=layouts[-1],
        luck=found.system_bias_noise,
        replay=bias(found.baseline),
        inside=found.interval_coverage,
        width=found.interval_width_ratio,
        replay_width=width_ratio(found.baseline),
        group_maximum=found.group_maximum.error,
        group_maximum_tolerance=found.group_maximum.tolerance,
        replay_group_maximum=found.baseline_group_max_ratio_error,
        tokens=bias(found.totals),
    )


def perfect_law(data: Path, case: PerfectCase, recordings: int = 0, replicates: int = 60) -> PerfectLaw:
    """Take the fitted law as the truth, draw recordings from it, and judge it on them as `fidelity` does.

    Its interval knows its parameters, so neither fit nor choice of law is part of what is found.
    """
    recordings = recordings or (12 if case.recording == MULTI_TURN else 40)
    table = recorded(data, case.recording, case.fitted_on).lengths
    law = fit_model(Recording(table))
    if law.drift.trend:
        raise ValueError(f"{case.recording}: rl_steps of a law with a trend are not alike")
    system = rollouts(table.multi_turn)
    prompts = table.step(case.fitted_on[0]).n_groups
    cap = table.max_response_tokens
    drawn = predictive_replicates(law, 2 * replicates, prompts, max_response_tokens=cap, seed=5, uncertain=False)
    true = seconds(drawn, system)
    low, high = np.quantile(true, (0.05, 0.95), axis=0)
    luck = float(np.mean((high - low) / true.mean(axis=0))) / 2.0 / case.rl_steps**0.5
    biases, widths, inside = np.empty(recordings), np.empty(recordings), np.empty(recordings)
    for k in range(recordings):
        steps = range(case.rl_steps)
        own = sample_rl_steps(
            law, steps, prompts, law.group_size, max_response_tokens=cap, seed=1000 * case.rl_steps + k
        )
        resampled = seconds(bootstraps(own, prompts, replicates, k), system)
        ends = np.quantile(resampled, (0.05, 0.95), axis=0)
        biases[k] = np.mean(true.mean(axis=0) / resampled.mean(axis=0) - 1.0)
        widths[k] = np.mean((high - low) / (ends[1] - ends[0]))
        times = seconds((own.step(step) for step in steps), system)
        inside[k] = np.mean((times >= low) & (times <= high))
    bias_met, width_met = np.abs(biases) <= MOST_BIAS, widths <= MOST_WIDTH
    return PerfectLaw(
        part="perfect_law",
        recording=case.recording,
        fitted_on=label(case.fitted_on),
        rl_steps=case.rl_steps,
        replicates=replicates,
        recordings=recordings,
        bias_met=float(bias_met.mean()),
        width_met=float(width_met.mean()),
        both_met=float((bias_met & width_met).mean()),
        median_bias=float(np.median(np.abs(biases))),
        mean_bias=float(biases.mean()),
        luck=luck,
        in_luck=float(np.mean(np.abs(biases) <= luck)),
        inside=float(inside.mean()),
    )


def refitted(data: Path, split: Split, recordings: int = 20, replicates: int = 60) -> Refitted:
    """Draw recordings from the fitted law, fit each again and judge it on itself, as `in_sample` does the real one."""
    table = recorded(data, split.recording, split.fitted_on).lengths
    law = fit_model(Recording(table))
    prompts = table.step(split.fitted_on[0]).n_groups
    cap, system = table.max_response_tokens, rollouts()

    def errors(model: LengthModel, own: LengthTable, count: int) -> tuple[float, float]:
        drawn = seconds(predictive_replicates(model, count, prompts, max_response_tokens=cap, seed=0), system)
        resampled = seconds(bootstraps(own, prompts, count, 1), system)
        group = group_maximum(own, sample_lengths(model, 2500, model.group_size, max_response_tokens=cap, seed=0))
        assert group is not None
        return float(np.mean(drawn.mean(axis=0) / resampled.mean(axis=0) - 1.0)), group.error

    real = errors(law, table, 200)
    found = np.empty((recordings, 2))
    for k in range(recordings):
        own = sample_rl_steps(law, split.fitted_on, prompts, law.group_size, max_response_tokens=cap, seed=7000 + k)
        found[k] = errors(fit_model(Recording(own)), own, replicates)
    return Refitted(
        part="refitted",
        recording=split.recording,
        fitted_on=label(split.fitted_on),
        rl_steps=len(split.fitted_on),
        replicates=replicates,
        recordings=recordings,
        mean_bias=float(found[:, 0].mean()),
        bias_sd=float(found[:, 0].std()),
        below=float(np.mean(found[:, 0] < real[0])),
        group_maximum=float(found[:, 1].mean()),
        group_maximum_sd=float(found[:, 1].std()),
        group_maximum_below=float(np.mean(found[:, 1] < real[1])),
    )


def seconds(tables: Iterator[LengthTable] | list[LengthTable], system: Rollouts) -> Float:
    """Rollout time [s] of every table on every layout ``[tables, layouts]``."""
    return np.array([system.seconds(table) for table in tables])


def fixed_threshold(data: Path, split: Split, share: float, replicates: int = 200) -> Threshold:
    """The split with a tail above the same percentile everywhere, whether the tail's law fits there or not."""
    judged = recorded(data, split.recording, split.judged_on).lengths
    # The rule tries these shares from the largest on and ends with the last: a single one is taken as it is.
    with patch.object(tail_laws, "TAIL_SHARES", (share,)):
        model = fit_model(recorded(data, split.recording, split.fitted_on))
    found = fidelity(model, judged, rollouts(), replicates=replicates)
    steps = label(split.fitted_on), label(split.judged_on)
    width, inside = found.interval_width_ratio, coverage(found.system)
    return Threshold("threshold", split.recording, *steps, replicates, share, found.system_bias, inside, width)


def study(data: Path, more: bool = False) -> pl.DataFrame:
    """All rows of `expected.csv`, or of `expected_more.csv`."""
    splits = (*MORE_SPLITS, *IN_SAMPLE) if more else SPLITS
    tasks: list[tuple[str, Callable[[], Row]]] = [(one.recording, partial(held_out, data, one)) for one in splits]
    if more:
        tasks += [(f"{one.recording} fitted again", partial(refitted, data, one)) for one in REFITTED]
        tasks += [
            (f"{one.recording} above {1 - share:.0%}", partial(fixed_threshold, data, one, share))
            for one in THRESHOLD_SPLITS
            for share in THRESHOLD_SHARES
        ]
    else:
        tasks += [(f"law of {one.recording}", partial(perfect_law, data, one)) for one in PERFECT]
    rows: list[Row] = []
    with progress("workload fidelity") as bar:
        for name, task in tasks:
            bar(len(rows) / len(tasks), name)
            rows.append(task())
    return frame(rows)


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    """One table of all parts; measures that a part lacks stay empty."""
    parts = dict.fromkeys(row.part for row in rows)
    tables = [pl.DataFrame([asdict(row) for row in rows if row.part == part]) for part in parts]
    return pl.concat(tables, how="diagonal").with_columns(pl.selectors.float().round(5))


def criterion(bias: pl.Expr, width: pl.Expr) -> pl.Expr:
    """Whether rows of a table meet the criterion."""
    return (bias.abs() <= MOST_BIAS) & (width <= MOST_WIDTH)


def guide(table: pl.DataFrame) -> list[str]:
    """The rows of the tables in docs/guide/workloads.md."""
    lines = []
    for row in table.filter(pl.col("part") == "held_out").iter_rows(named=True):
        ends = f"({percent(row['bias_least'])}, {percent(row['bias_largest'])})"
        cells = (
            row["recording"],
            row["fitted_on"],
            row["judged_on"],
            f"{percent(row['bias'])} % {ends}",
            f"{100 * row['luck']:.0f} %",
            f"{percent(row['replay'])} %",
            f"{100 * row['inside']:.0f} %",
            f"{row['width']:.2f}",
            f"{percent(row['group_maximum'])} %",
            f"{percent(row['tokens'])} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    for row in table.filter(pl.col("part") == "perfect_law").iter_rows(named=True):
        shares = [f"{100 * row[name]:.0f} %" for name in ("bias_met", "width_met", "both_met", "in_luck", "inside")]
        biases = [f"{100 * row['median_bias']:.1f} %", f"{percent(row['mean_bias'])} %"]
        cells = (row["recording"], row["fitted_on"], str(row["rl_steps"]), *shares[:3], *biases, *shares[3:])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_guide(rows: Sequence[str]) -> None:
    """Put the rows in place of those of the guide's two tables; its text is written by hand."""
    lines, rest = GUIDE.read_text().splitlines(), list(rows)
    for header, count in ((HELD_OUT_HEADER, len(SPLITS)), (PERFECT_HEADER, len(PERFECT))):
        first = next(k for k, line in enumerate(lines) if line.startswith(header)) + 2
        last = next(k for k in range(first, len(lines)) if not lines[k].startswith("|"))
        lines[first:last], rest = rest[:count], rest[count:]
    GUIDE.write_text("\n".join(lines) + "\n")


def percent(share: float) -> str:
    """In percent, with its sign; a decimal below 10 %."""
    return f"{100 * share:+.1f}" if abs(share) < 0.0995 else f"{100 * share:+.0f}"


def main() -> None:
    """Print the rows and, if asked, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record expected.csv")
    parser.add_argument("--more", action="store_true")
    usual = Path(os.environ.get("RLPERF_DATA", "../shared/data")) / "polytrace"
    parser.add_argument("polytrace", nargs="?", type=Path, default=usual)
    asked = parser.parse_args()
    more = asked.more
    table = study(asked.polytrace, more)
    with pl.Config(tbl_cols=-1, tbl_rows=-1, tbl_width_chars=240):
        for part in table.partition_by("part"):
            print(part.select(column.name for column in part if column.null_count() < part.height))
    print("\n".join(guide(table)))
    print(f"{process_time():.0f} s of processor time")
    if asked.write:
        table.write_csv(HERE / ("expected_more.csv" if more else "expected.csv"))
        if not more:
            write_guide(guide(table))


if __name__ == "__main__":
    main()
