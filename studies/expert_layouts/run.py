"""What does a plan claim over the layout that an expert chose? ``python studies/expert_layouts/run.py [OUT.csv]``.

Every measured rl_step with a mean length names the layout of the people who tuned it. Its devices, batch, lengths,
dtypes, staleness and CUDA graphs are planned with everything else open, and the plan is put beside the expert's own
layout, both predicted. Needs the measured data (``RLPERF_DATA``, by default ``../shared/data`` beside the checkout); a
few minutes of one core. ``--bold`` plans without the price of leaving the beaten path.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "measured_best"))
import rl_steps
import run as measured_best

from rlperf.errors import InfeasibleError
from rlperf.layout import FloatArray
from rlperf.plan.answer.memory_uses import memory_uses
from rlperf.plan.judge.decisions import decide
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.stage_means import stage_means, stage_sigma_array
from rlperf.plan.planner import program_of
from rlperf.plan.question.context import Context
from rlperf.plan.question.words import layout_words
from rlperf.plan.search.solve import solve
from rlperf.sim.rl_step.uncertainty import OWN_SHARE, Comparison, compare_draws, unshared_error
from rlperf.specs.modes import MODES
from rlperf.specs.pool import PoolSpec

CLAIM = 0.2
"""Gain from which a claim has to be explained."""
STAGES = ("rollout", "scoring", "training", "weight sync", "rest")


@dataclass(frozen=True)
class Beside:
    """A plan beside an expert's layout, both predicted.

    Attributes
    ----------
    seen : a fit saw the configuration
    gain : 1 - the plan's rl_step over the expert's; ``low``, ``high``: 5th and 95th percentile of it, paired
    expert_memory, plan_memory : the trainer's peak over the device's memory [1]
    measured_s : what the expert's rl_step took [s]
    saved : share of the expert's rl_step that each stage takes less in the plan, largest first
    causes : what each choice of the plan takes off the expert's rl_step, one after the other (`KNOBS`)
    cause, cause_low : the choice that takes most, and the 5th percentile of what it takes; above 0: it holds
    refused : why the expert's layout cannot be predicted; empty where it can
    """

    row_id: str
    seen: bool
    expert: str = ""
    plan: str = ""
    measured_s: float = np.nan
    expert_s: float = np.nan
    plan_s: float = np.nan
    gain: float = np.nan
    low: float = np.nan
    high: float = np.nan
    expert_memory: float = np.nan
    plan_memory: float = np.nan
    saved: str = ""
    causes: str = ""
    cause: str = ""
    cause_low: float = np.nan
    refused: str = ""


def beside(row: rl_steps.Measured, *, bold: bool) -> Beside:
    """One measured configuration against what the planner would do in its place."""
    pinned, _ = row.context(pinned=True)
    try:
        expert = row.pinned()
    except InfeasibleError as error:
        return Beside(row.row.row_id, row.seen, refused=error.message)
    opened, facts = row.context(pinned=False)
    context = _as_the_expert(opened, row, expert, bold=bold)
    decisions = decide(context, facts, lambda _share, _text: None)
    plan = decisions[0].evaluations[solve(program_of(context, decisions)).chosen[0]]
    ratio = paired(context, plan, expert)
    expert_memory, plan_memory = _peak(pinned, expert), _peak(context, plan)
    parts = causes(context, pinned, plan, expert)
    largest = max(parts, key=lambda part: part.share)
    return Beside(
        row.row.row_id, row.seen, words(expert), words(plan), float(row.cells["measured_step_s"]),
        expert.rl_step_s, plan.rl_step_s,
        1.0 - 1.0 / ratio.ratio, 1.0 - 1.0 / ratio.low, 1.0 - 1.0 / ratio.high, expert_memory, plan_memory,
        _saved(stage_means(plan), stage_means(expert)),
        "; ".join(str(part) for part in parts if abs(part.share) >= 0.01), largest.knob, largest.low,
    )  # fmt: skip


def _as_the_expert(context: Context, row: rl_steps.Measured, expert: Evaluation, *, bold: bool) -> Context:
    """The open question at the expert's staleness, in every mode that it allows, CUDA graphs on or off as theirs.

    Hosts hold what the expert's own layout takes of them at least: rows do not state their memory, and it ran.
    """
    job, staleness, cluster = context.job, row.row.staleness, context.cluster
    ran = float(expert.held.host.ravel()[0]) * cluster.devices_per_node
    pools = tuple(
        pool.model_copy(update={"settings": pool.settings.model_copy(update={"cuda_graphs": row.row.cuda_graphs})})
        if pool.role == "rollout"
        else pool
        for pool in job.pools
    )
    wanted = ("colocated", "disaggregated", "one_step_off", "async")
    modes = tuple(mode for mode in wanted if MODES[mode].least_staleness <= staleness)
    limits = job.limits.model_copy(update={"staleness": staleness, "host_memory": max(cluster.host_memory, ran)})
    objective = job.objective.model_copy(update={"bold": bold})
    return replace(
        context, job=job.model_copy(update={"modes": modes, "limits": limits, "objective": objective, "pools": pools})
    )


def paired(context: Context, plan: Evaluation, expert: Evaluation) -> Comparison:
    """The expert's rl_step over the plan's on the same lengths, with the errors that the two do not share."""
    sigma = stage_sigma_array(context, plan)
    shared = plan.stack.backend == expert.stack.backend
    own = unshared_error(stage_means(plan), stage_means(expert), sigma, own_share=OWN_SHARE, shared=shared)
    return compare_draws(plan.seconds.rl_step_s, expert.seconds.rl_step_s, own=own)


KNOBS = (
    "engine settings",
    "engine layout",
    "token budget and packing",
    "recompute and offload",
    "trainer layout",
    "mode and split",
)
"""Choices in the order in which they are taken over from the plan."""


@dataclass(frozen=True)
class Cause:
    """Share of the expert's rl_step that one choice of the plan takes off it, with its 5th and 95th percentile."""

    knob: str
    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.knob} {self.share:+.1%} ({self.low:+.1%} .. {self.high:+.1%})"


def causes(context: Context, pinned: Context, plan: Evaluation, expert: Evaluation) -> list[Cause]:
    """What each choice of the plan takes off the expert's rl_step when they are taken over one after the other.

    Where a choice alone is not possible beside what is still the expert's, its part is with the next one. Microbatches
    of a number of sequences are judged in the expert's question (``pinned``): the open one cuts by tokens.
    """
    theirs = expert.configuration
    judge, counting = (Judge(each, each.tasks[0]) for each in (context, pinned))
    states = [expert]
    for engines, trainer in _taken_over(plan, expert):
        pools = tuple(engines if pool.role == "rollout" else trainer.model_copy(update={"role": pool.role})
                      for pool in theirs.pools)  # fmt: skip
        asked = counting if trainer.settings.token_budget is None else judge
        states.append(asked.evaluate(plan.demand, replace(theirs, pools=pools)))
    states.append(plan)
    found = []
    for knob, before, after in zip(KNOBS, states[:-1], states[1:], strict=True):
        ratio = paired(context, after, before)
        part = [
            (1.0 - 1.0 / each) * before.rl_step_s / expert.rl_step_s for each in (ratio.ratio, ratio.low, ratio.high)
        ]
        found.append(Cause(knob, *part))
    return found


def _taken_over(plan: Evaluation, expert: Evaluation) -> list[tuple[PoolSpec, PoolSpec]]:
    """Engines and trainer of the expert with more and more of the plan's, in the order of `KNOBS`."""
    ours, theirs = plan.configuration, expert.configuration
    engines, trainer = theirs.pool("rollout"), theirs.pool("trainer")
    new_engines, new_trainer = ours.pool("rollout"), ours.pool("trainer")
    same_engines, same_trainer = engines.devices == new_engines.devices, trainer.devices == new_trainer.devices
    running = {name: getattr(new_engines.settings, name) for name in ("memory_fraction", "max_running", "cuda_graphs")}
    engines = engines.model_copy(update={"settings": engines.settings.model_copy(update=running)})
    steps = [(engines, trainer)]
    engines = new_engines if same_engines else engines
    steps.append((engines, trainer))
    budget = {name: getattr(new_trainer.settings, name) for name in ("token_budget", "scoring_token_budget", "packing")}
    trainer = trainer.model_copy(update={"settings": trainer.settings.model_copy(update=budget)})
    steps.append((engines, trainer))
    kept = {name: getattr(new_trainer.layout, name) for name in ("activation_recompute", "offload")}
    trainer = trainer.model_copy(update={"layout": trainer.layout.model_copy(update=kept)})
    return [*steps, (engines, trainer), (engines, new_trainer if same_trainer else trainer)]


def _peak(context: Context, evaluation: Evaluation) -> float:
    use = memory_uses(context, evaluation)["trainer"]
    return use.total / use.limit


def _saved(plan: FloatArray, expert: FloatArray) -> str:
    """Share of the expert's rl_step that the plan saves, by stage."""
    shares = sorted(zip((expert - plan) / expert.sum(), STAGES, strict=True), reverse=True)
    return "; ".join(f"{name} {share:+.1%}" for share, name in shares if abs(share) >= 0.01)


def words(evaluation: Evaluation) -> str:
    """A configuration in a line."""
    engine, trainer = (evaluation.configuration.pool(role) for role in ("rollout", "trainer"))
    return (
        f"{evaluation.configuration.mode}: {engine.devices} {layout_words(engine.layout)} | {trainer.devices} "
        f"{trainer.settings.backend} {layout_words(trainer.layout)} budget {trainer.settings.token_budget}"
    )


def summary(found: list[Beside]) -> str:
    """The figures of a table of comparisons."""
    known = [each for each in found if not each.refused]
    gain, memory = (np.array([getattr(each, name) for each in known]) for name in ("gain", "plan_memory"))
    theirs = np.array([each.expert_memory for each in known])
    claims = [each for each in known if each.gain > CLAIM]
    holding = sum(each.cause_low > 0.0 for each in claims)
    predicted = np.array([each.expert_s / each.measured_s for each in claims])
    return (
        f"{len(found)} configurations, {len(found) - len(known)} refused; gain over the expert's layout: median "
        f"{np.median(gain):.1%}, mean {gain.mean():.1%}, 90th percentile {np.quantile(gain, 0.9):.1%}, "
        f"{len(claims)} above {CLAIM:.0%} (largest cause above 0 at its 5th percentile in {holding}; expert's own "
        f"layout predicted at {np.median(predicted):.2f} of what it took in the median), "
        f"{np.count_nonzero(gain < 0)} below 0; "
        f"trainer's peak over the device: plan median "
        f"{np.median(memory):.0%}, {np.count_nonzero(memory > 0.9)} above 90 %, expert median {np.median(theirs):.0%}"
    )


def in_both_pools(row: rl_steps.Measured) -> bool:
    """Whether some devices train and generate in turn while others only generate, which no mode here says."""
    found = row.row
    return not MODES[found.mode].shares_devices and found.rollout_devices + found.trainer_devices > found.devices


def main(out: Path | None, bold: bool) -> None:
    """Compute everything, say it, and write one line per configuration."""
    found = []
    for row in rl_steps.read(measured_best.measured_folder() / "rl_step.csv"):
        if in_both_pools(row):
            continue
        found.append(beside(row, bold=bold))
        print(found[-1], flush=True)
    for name, part in {"all": found, "unseen": [each for each in found if not each.seen]}.items():
        print(f"{name}: {summary(part)}")
    if out is not None:
        with out.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow([field.name for field in fields(Beside)])
            writer.writerows(
                [f"{v:.4f}" if isinstance(v, float) else v for v in asdict(each).values()] for each in found
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="CSV to write")
    parser.add_argument("--bold", action="store_true")
    asked = parser.parse_args()
    main(asked.out, asked.bold)
