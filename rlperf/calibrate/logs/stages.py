"""What a log states beside what the simulator says of the same rl_steps, under any constants and stage factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from rlperf.calibrate.logs.model import ENGINE, WHOLE, Seconds
from rlperf.calibrate.rl_step.framework import constant, with_constants
from rlperf.layout import FloatArray
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.question.context import Context
from rlperf.plan.question.demand import as_batch
from rlperf.sim.rl_step.cuts import CutLengths
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.rollout_stage import RolloutEvents
from rlperf.sim.rl_step.stage_seconds import usual_sync_fit
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rl_step.uncertainty import log_sigma
from rlperf.specs.modes import MODES
from rlperf.specs.overhead import Overhead
from rlperf.specs.rl_calibration import FrameworkCalibration
from rlperf.specs.stage_spread import STAGES, LogPrior
from rlperf.specs.step_log import StepLog
from rlperf.workload.lengths import LengthTable

LEAST_S = 1e-6
"""Seconds up to which a stage is nothing: a log that states zeros tells no more than one that is silent."""
LEVELS = 5
"""Mean lengths at which rl_steps are simulated; those in between are interpolated."""
CONSTANTS: Mapping[str, str] = {
    "engine_host": "rollout",
    "engine_host_per_request": "rollout",
    "training.scoring_pass": "scoring",
    "training.update": "training",
    "training.moe_layer": "training",
    "training.host_layer": "training",
    "weight_sync.fixed": "weight_sync",
    "weight_sync.per_tensor": "weight_sync",
    "step": "rest",
    "sleep": "rest",
    "wake": "rest",
}
"""Constants of `FrameworkCalibration` that a log may move -> the stage that they stand in most."""


@dataclass(frozen=True, eq=False)
class Simulated:
    """The configuration that ran, at the lengths of the log, under any constants and stage factors.

    ``stated``: stages of the log; ``held``: its timer of the rollout holds weight sync and transitions too
    """

    context: Context
    evaluation: Evaluation
    demand: Demand
    at: _AtSteps
    stated: frozenset[str]
    held: bool
    _events: RolloutEvents = field(default_factory=RolloutEvents)
    _lengths: CutLengths = field(default_factory=CutLengths)

    @classmethod
    def of(
        cls, context: Context, evaluation: Evaluation, log: StepLog, lengths: LengthTable | None, notes: list[str]
    ) -> Simulated:
        """Of a judged configuration; the transport of its mode stands first, of which the constants speak."""
        demand, positions = _demand(evaluation.demand, log, lengths, notes)
        backend = int(evaluation.trainer.backend[0])
        shares = MODES[evaluation.configuration.mode].shares_devices
        stated = frozenset(log.stage_means())
        held = log.rollout_holds_sync(shares)
        if held:
            notes.append("no weight sync is stated: the rollout is taken to hold it, as an engine that wakes up does")
        front = transport_first(context, backend, shares)
        return cls(front, evaluation, demand, _AtSteps(positions, log.n), stated, held)

    @property
    def backend(self) -> int:
        """Index of the trainer that ran."""
        return int(self.evaluation.trainer.backend[0])

    @property
    def framework(self) -> FrameworkCalibration:
        """As shipped."""
        return self.context.trainers[self.backend].framework

    @property
    def overlaps(self) -> bool:
        """Whether stages run beside one another, so that a log's rollout is what the trainer waited."""
        return MODES[self.evaluation.configuration.mode].overlaps

    def seconds(self, constants: Mapping[str, float], factors: Mapping[str, float]) -> Seconds:
        """Stages, the rl_step and what the rollout's timer may hold, per rl_step of the log [s]."""
        moved = with_constants(
            self.framework, {name: ratio * constant(self.framework, name) for name, ratio in constants.items()}
        ).model_copy(update={"factors": self.framework.factors.scaled(factors)})
        trainers = list(self.context.trainers)
        trainers[self.backend] = replace(trainers[self.backend], framework=moved)
        context = replace(self.context, trainers=tuple(trainers))
        judged = Judge(context, context.tasks[0], self._events, self._lengths).evaluate(
            self.demand, self.evaluation.configuration
        )
        return {name: self.at(values) for name, values in self._named(judged.seconds).items()}

    def _named(self, seconds: StageSeconds) -> dict[str, FloatArray]:
        rest = seconds.data_movement_s + seconds.offload_s + seconds.other_s
        return {
            "rollout": seconds.rollout_s,
            "scoring": seconds.scoring_s,
            "training": seconds.training_s,
            "weight_sync": seconds.weight_sync_s,
            "rest": rest + (0.0 if "reward" in self.stated else seconds.reward_s),
            ENGINE: seconds.rollout_s + seconds.weight_sync_s + seconds.offload_s,
            WHOLE: seconds.rl_step_s,
        }


def measured_stages(simulated: Simulated, log: StepLog, notes: list[str]) -> dict[str, FloatArray]:
    """What the log states, by the names of `Simulated.seconds`; stages that were nothing in this run are left out."""
    shipped = simulated.seconds({}, {})
    found = {
        stage: getattr(log, f"{stage}_s")
        for stage in STAGES
        if stage in simulated.stated and float(shipped[stage].mean()) > LEAST_S
    }
    stated = log.mean("rl_step_s") is not None
    if simulated.overlaps:
        if found.pop("rollout", None) is not None:
            notes.append("rollout in this mode is what the trainer waited: the rl_step stands for it")
        return found | ({WHOLE: log.rl_step_s} if stated else {})
    if simulated.held:
        found[ENGINE] = found.pop("rollout")
    whole = {"rollout", "training"} <= simulated.stated
    if stated and whole and not simulated.held and "weight_sync" in simulated.stated:
        covered = ("rollout", "scoring", "training", "weight_sync", "reward")
        rest = log.rl_step_s - np.nansum([getattr(log, f"{name}_s") for name in covered], axis=0)
        found["rest"] = np.where(rest > 0, rest, np.nan)
    elif stated and not whole:
        found[WHOLE] = log.rl_step_s
    return {name: values for name, values in found.items() if (np.isfinite(values) & (values > LEAST_S)).any()}


def prior_widths(framework: FrameworkCalibration, prior: LogPrior | None = None) -> dict[str, float]:
    """Standard deviation of the logarithm of every constant that a log may move; those that are nothing stay so.

    ``prior``: how much of what the files state is between clusters; None: all
    """
    found = {}
    for name, stage in CONSTANTS.items():
        owner, _, attribute = name.rpartition(".")
        if constant(framework, name) <= 0.0:
            continue
        if owner == "weight_sync":
            provenance = framework.weight_sync[0].provenance
        else:
            held = getattr(framework.training if owner == "training" else framework, attribute)
            assert isinstance(held, Overhead)
            provenance = held.provenance
        share = 1.0 if prior is None else float(getattr(prior, stage).constants)
        found[name] = share * float(log_sigma(provenance.low, provenance.high))
    return found


def transport_first(context: Context, backend: int, colocated: bool) -> Context:
    """The context with the transport of this mode in front: `with_constants` speaks of the first."""
    trainer = context.trainers[backend]
    used = usual_sync_fit(trainer.framework, colocated)
    others = tuple(fit for fit in trainer.framework.weight_sync if fit is not used)
    trainers = list(context.trainers)
    framework = trainer.framework.model_copy(update={"weight_sync": (used, *others)})
    trainers[backend] = replace(trainer, framework=framework)
    return replace(context, trainers=tuple(trainers))


def _demand(demand: Demand, log: StepLog, lengths: LengthTable | None, notes: list[str]) -> tuple[Demand, FloatArray]:
    """A demand with one table per length level, and where each rl_step of the log lies between the levels."""
    if lengths is not None and lengths.n:
        recorded = [step for step in log.rl_step.tolist() if step in set(lengths.steps().tolist())]
        if len(recorded) == log.n:
            keep = np.unique(np.linspace(0, log.n - 1, min(log.n, 12)).round().astype(int))
            steps = [lengths.step(int(log.rl_step[k])) for k in keep]
            tables = tuple(steps if demand.of_tasks else as_batch(demand.task, steps, demand.batch, 0, notes))
            notes.append(f"lengths of {len(tables)} recorded rl_steps")
            return replace(demand, tables=tables), np.interp(np.arange(log.n), keep, np.arange(len(tables)))
        notes.append("the dump does not cover the logged rl_steps, and is left out")
    means = log.response_tokens
    own, logged = demand.response_means(), log.mean("response_tokens")
    assumed = (
        f"the job's workload is assumed ({' or with tools '.join(f'{mean:,.0f}' for mean in own)} tokens a response)"
    )
    if logged is None or any(table.multi_turn for table in demand.tables):
        # a mean says nothing of how turns and tools share it
        said = (
            "no lengths" if logged is None else f"{logged:,.0f} tokens a response of several turns, which is not scaled"
        )
        notes.append(f"the log states {said}: {assumed}")
        return demand, np.zeros(log.n)
    filled = np.where(np.isnan(means), np.nanmean(means), means)
    low, high = float(filled.min()), float(filled.max())
    levels = np.linspace(low, high, LEVELS) if high > 1.01 * low else np.array([filled.mean()])
    tables = tuple(scaled_lengths(demand.tables[0], level, demand.batch.max_response_tokens) for level in levels)
    return replace(demand, tables=tables), np.interp(filled, levels, np.arange(levels.size))


def scaled_lengths(table: LengthTable, mean: float, cap: int) -> LengthTable:
    """The table with its responses scaled to a mean, clipped at the cap (a few rounds: clipping lowers the mean)."""
    lengths = table.response_tokens.astype(np.float64)
    factor = 1.0
    for _ in range(8):
        clipped = np.clip(lengths * factor, 1, cap)
        factor *= mean / clipped.mean()
    return replace(table, response_tokens=np.clip(lengths * factor, 1, cap).round().astype(np.int64))


class _AtSteps:
    """Values at the rl_steps from values at the levels, by linear interpolation."""

    def __init__(self, positions: FloatArray, steps: int) -> None:
        self.positions = positions
        self.steps = steps

    def __call__(self, levels: npt.ArrayLike) -> FloatArray:
        values = np.atleast_1d(np.asarray(levels, np.float64))
        if values.size == 1 or not self.positions.any():
            return np.full(self.steps, float(values.mean() if not self.positions.any() else values[0]))
        return np.asarray(np.interp(self.positions, np.arange(values.size), values), np.float64)
