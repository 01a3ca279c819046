r"""Overheads of a framework on one cluster, from the step metrics of a run.

Stage ``s`` of rl_step ``t`` is modelled as

.. math:: m_{st} = g_s\, p_{st} + \sum_k J_{sk}\, c_k + \varepsilon_{st}

m measured seconds; p what the simulator predicts without overheads, at the rl_step's lengths; g_s how far the physics
is off, known a priori to a few percent only; c_k >= 0 the overheads (`OVERHEADS`), J how often each occurs in the
stage; epsilon noise of a share sigma of m, estimated from the residuals. g and c have normal priors; the posterior is
their common least-squares solution and its covariance. Where lengths hardly vary, an overhead and an error of the
physics cannot be told apart: the interval then says so, and so does ``identified``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import yaml

from rlperf.calibrate.log_model import OVERHEADS, FittedOverhead, Stage, fitted_overhead, posterior, stage_errors
from rlperf.calibrate.rl_framework import constant, with_constants
from rlperf.errors import Problem, SpecError
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import Context
from rlperf.plan.search.configuration import Configuration
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.stage_seconds import usual_sync_fit
from rlperf.specs.modes import MODES
from rlperf.specs.rl_calibration import FrameworkCalibration, Overhead, Provenance
from rlperf.specs.step_log import StepLog
from rlperf.workload.lengths import LengthTable

FloatArray = npt.NDArray[np.float64]

LEVELS = 5
"""Mean lengths at which the physics is simulated; rl_steps in between are interpolated."""
MAX_STEPS = 400
PLAUSIBLE: Mapping[str, float] = {"engine_host": 0.032}
"""Most that an overhead can be [s]; a log that asks for more is slow for another reason."""


@dataclass(frozen=True, eq=False)
class LogFit:
    """The fit: constants, the calibration that carries them, and how well it describes the log.

    ``before`` and ``after``: median absolute error of the step's stages under the shipped and the fitted constants [1];
    ``noise``: standard deviation of a measurement over its value, by stage [1].
    """

    overheads: tuple[FittedOverhead, ...]
    calibration: FrameworkCalibration
    steps: int
    noise: Mapping[str, float]
    before: Mapping[str, float]
    after: Mapping[str, float]
    notes: tuple[str, ...]


def fit_log(context: Context, log: StepLog, lengths: LengthTable | None = None, *, warm_up: int = 1) -> LogFit:
    """Fit the framework's overheads to a run's step metrics.

    Parameters
    ----------
    context : of the job that was run, with pinned pools
    log : its step metrics; the first ``warm_up`` rl_steps (compilation, graph capture) are left out of long logs
    lengths : recorded lengths of the same rl_steps (a rollout dump); without them the job's workload is scaled to the
        mean lengths that the log states

    Raises
    ------
    SpecError : the log states no stage, or fewer than two rl_steps
    """
    notes: list[str] = []
    log = _usable(log, warm_up, notes)
    evaluation, filled = evaluate_job(context)
    notes += [f"assumed {text}" for text in filled]
    backend = int(evaluation.trainer.backend[0])
    context = _transport_first(context, backend, MODES[evaluation.configuration.mode].shares_devices)
    shipped = context.trainers[backend].framework
    stages = _stages(context, evaluation, backend, log, lengths, notes)
    if not stages:
        raise SpecError(Problem("the log states no stage that an overhead stands in", log.source))
    names = [name for name, stage in OVERHEADS.items() if any(stage == each.name for each in stages)]
    start = {name: constant(shipped, name) for name in names}
    mean, covariance, noise = posterior(stages, names, start)
    fitted = tuple(
        fitted_overhead(name, k, start[name], mean, covariance, log.n, PLAUSIBLE.get(name, np.inf))
        for k, name in enumerate(names)
    )
    for name in sorted(set(OVERHEADS) - set(names)):
        notes.append(f"{name} is not identified: the log does not state {OVERHEADS[name]} alone")
    values = {each.name: each.value for each in fitted}
    calibration = _calibration(shipped, fitted, log)
    return LogFit(
        overheads=fitted,
        calibration=calibration,
        steps=log.n,
        noise={stage.name: float(value) for stage, value in zip(stages, noise, strict=True)},
        before=stage_errors(stages, start),
        after=stage_errors(stages, values),
        notes=tuple(notes),
    )


def _transport_first(context: Context, backend: int, colocated: bool) -> Context:
    """The context with the transport of this mode in front: `with_constants` speaks of the first."""
    trainer = context.trainers[backend]
    used = usual_sync_fit(trainer.framework, colocated)
    others = tuple(fit for fit in trainer.framework.weight_sync if fit is not used)
    trainers = list(context.trainers)
    framework = trainer.framework.model_copy(update={"weight_sync": (used, *others)})
    trainers[backend] = replace(trainer, framework=framework)
    return replace(context, trainers=tuple(trainers))


def _usable(log: StepLog, warm_up: int, notes: list[str]) -> StepLog:
    if log.n > 3 * warm_up + 1:
        log = log.without_first(warm_up)
        notes.append(f"the first {warm_up} rl_step(s) left out: they compile and capture")
    if log.n < 2:
        raise SpecError(Problem(f"{log.n} rl_step(s) are too few for a fit", log.source))
    if log.n > MAX_STEPS:
        notes.append(f"the last {MAX_STEPS} of {log.n} rl_steps used")
        log = log.without_first(log.n - MAX_STEPS)
    return log


# -- physics ----------------------------------------------------------------------------------------------------------


def _stages(
    context: Context, evaluation: Evaluation, backend: int, log: StepLog, lengths: LengthTable | None, notes: list[str]
) -> list[Stage]:
    """Measured and predicted seconds of every stage that the log states."""
    demand, positions = _demand(evaluation.demand, log, lengths, notes)
    configuration = evaluation.configuration
    at = _at(positions, log.n)
    zero, one = (
        Judge(each, each.tasks[0]).evaluate(demand, configuration).seconds
        for each in (_with_overheads(context, backend, value) for value in (0.0, 1.0))
    )
    found = []
    overlapped = MODES[configuration.mode].overlaps
    if overlapped:
        notes.append("rollout in this mode is what the trainer waited: engine_host is not identified from it")
    elif log.mean("rollout_s") is not None:
        low, slope, host = _host_slope(context, demand, configuration, float(np.nanmean(log.rollout_s)))
        found.append(Stage("rollout", log.rollout_s, at(low) - at(slope) * host, {"engine_host": at(slope)}))
    for name in ("training.scoring_pass", "training.update", "weight_sync.fixed"):
        stage = OVERHEADS[name]
        before, after = getattr(zero, f"{stage}_s"), getattr(one, f"{stage}_s")
        measured: FloatArray = getattr(log, f"{stage}_s")
        # What a second of overhead adds to the stage is how often it occurs: passes, updates, syncs.
        if log.mean(f"{stage}_s") is not None and (after - before).mean() > 0:
            found.append(Stage(stage, measured, at(before), {name: at(after - before)}))
    rest = _rest(log)
    if rest is not None and not overlapped:
        known = sum(
            (at(getattr(zero, f"{name}_s")) for name in ("data_movement", "offload", "reward")
             if log.mean(f"{name}_s") is None),
            start=at(zero.other_s),
        )  # fmt: skip
        found.append(Stage("other", rest, known, {"step": at(one.other_s - zero.other_s)}))
    return found


def _rest(log: StepLog) -> FloatArray | None:
    """Seconds of the rl_step that no stated stage covers."""
    if log.mean("rl_step_s") is None or log.mean("training_s") is None:
        return None
    stages = ("rollout", "reward", "scoring", "training", "weight_sync", "data_movement", "offload")
    covered = np.nansum([getattr(log, f"{name}_s") for name in stages], axis=0)
    return np.asarray(log.rl_step_s - covered, np.float64)


def _with_overheads(context: Context, backend: int, value: float) -> Context:
    """The context with every fitted overhead but the engine's host time at ``value``; 0 leaves the physics."""
    trainer = context.trainers[backend]
    trainers = list(context.trainers)
    names = [name for name in OVERHEADS if name != "engine_host"]
    trainers[backend] = replace(trainer, framework=with_constants(trainer.framework, dict.fromkeys(names, value)))
    return replace(context, trainers=tuple(trainers))


HOST_GRID = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
"""Host seconds per engine step at which the rollout is simulated; in between it is interpolated."""


def _host_slope(
    context: Context, demand: Demand, configuration: Configuration, measured: float
) -> tuple[FloatArray, FloatArray, float]:
    """Rollout seconds near the host time that explains ``measured``, their slope per second of host time; that time.

    The host works beside the device, so the rollout is no straight line in its time: it is simulated on a grid and
    taken as straight between the two points around the measured mean.
    """
    curve = []
    for host in HOST_GRID:
        trainers = tuple(
            replace(each, framework=with_constants(each.framework, {"engine_host": host})) for each in context.trainers
        )
        changed = replace(context, trainers=trainers)
        curve.append(Judge(changed, changed.tasks[0]).evaluate(demand, configuration).seconds.rollout_s)
    means = [float(values.mean()) for values in curve]
    above = next((k for k, mean in enumerate(means) if mean > measured and k > 0), len(means) - 1)
    # Where the device hides the host, the slope is 0 and nothing is learnt; the next rising piece is the honest one.
    while above < len(means) - 1 and means[above] <= means[above - 1] * (1 + 1e-6):
        above += 1
    low, high = HOST_GRID[above - 1], HOST_GRID[above]
    return curve[above - 1], (curve[above] - curve[above - 1]) / (high - low), low


def _demand(demand: Demand, log: StepLog, lengths: LengthTable | None, notes: list[str]) -> tuple[Demand, FloatArray]:
    """A demand with one table per length level, and where each rl_step of the log lies between the levels."""
    if lengths is not None and lengths.n:
        recorded = [step for step in log.rl_step.tolist() if step in set(lengths.steps().tolist())]
        if len(recorded) == log.n:
            keep = np.unique(np.linspace(0, log.n - 1, min(log.n, 12)).round().astype(int))
            tables = tuple(lengths.step(int(log.rl_step[k])) for k in keep)
            notes.append(f"lengths of {len(tables)} recorded rl_steps")
            return replace(demand, tables=tables), np.interp(np.arange(log.n), keep, np.arange(len(tables)))
        notes.append("the dump does not cover the logged rl_steps: lengths scaled to the log's means instead")
    means = log.response_tokens
    own = float(np.mean([table.response_tokens.mean() for table in demand.tables]))
    if log.mean("response_tokens") is None:
        notes.append(f"the log states no lengths: the job's workload is assumed ({own:.0f} tokens a response)")
        return demand, np.zeros(log.n)
    filled = np.where(np.isnan(means), np.nanmean(means), means)
    low, high = float(filled.min()), float(filled.max())
    levels = np.linspace(low, high, LEVELS) if high > 1.01 * low else np.array([filled.mean()])
    tables = tuple(_scaled(demand.tables[0], level, demand.batch.max_response_tokens) for level in levels)
    return replace(demand, tables=tables), np.interp(filled, levels, np.arange(levels.size))


def _scaled(table: LengthTable, mean: float, cap: int) -> LengthTable:
    """The table with its responses scaled to a mean, clipped at the cap (a few rounds: clipping lowers the mean)."""
    lengths = table.response_tokens.astype(np.float64)
    factor = 1.0
    for _ in range(8):
        clipped = np.clip(lengths * factor, 1, cap)
        factor *= mean / clipped.mean()
    return replace(table, response_tokens=np.clip(lengths * factor, 1, cap).round().astype(np.int64))


class _at:  # noqa: N801 - reads like the preposition it is
    """Values at the rl_steps from values at the levels, by linear interpolation."""

    def __init__(self, positions: FloatArray, steps: int) -> None:
        self.positions = positions
        self.steps = steps

    def __call__(self, levels: npt.ArrayLike) -> FloatArray:
        values = np.atleast_1d(np.asarray(levels, np.float64))
        if values.size == 1 or not self.positions.any():
            return np.full(self.steps, float(values.mean() if not self.positions.any() else values[0]))
        return np.asarray(np.interp(self.positions, np.arange(values.size), values), np.float64)


# -- the file ---------------------------------------------------------------------------------------------------------


def _calibration(shipped: FrameworkCalibration, fitted: Sequence[FittedOverhead], log: StepLog) -> FrameworkCalibration:
    """The shipped calibration with the fitted constants, where they are from and how wide they are."""
    import datetime

    today = datetime.date.today().isoformat()
    # An implausible constant stays as shipped; one that may be next to nothing is stated by the middle of its interval,
    # because what is around a value is stated as ratios to it.
    kept = [each for each in fitted if each.value <= PLAUSIBLE.get(each.name, np.inf)]
    values = {each.name: each.value if each.value > 0.1 * each.high else 0.5 * (each.low + each.high) for each in kept}
    changed = with_constants(shipped, values)
    top: dict[str, object] = {"id": f"{shipped.id}_fitted" if not shipped.id.endswith("_fitted") else shipped.id}
    training = changed.training
    for each in kept:
        value = max(values[each.name], 1e-9)
        provenance = Provenance(
            source=f"step metrics of {log.source} ({log.framework})",
            date=today,
            n=log.n,
            low=max(each.low / value, 0.02),
            high=max(each.high / value, 1.0),
            assumed=not each.identified,
        )
        owner, _, field = each.name.rpartition(".")
        if owner == "weight_sync":
            first = changed.weight_sync[0].model_copy(update={"provenance": provenance})
            top["weight_sync"] = (first, *changed.weight_sync[1:])
            continue
        holder = training if owner == "training" else changed
        held = getattr(holder, field)
        assert isinstance(held, Overhead)
        update = {field: held.model_copy(update={"provenance": provenance})}
        if owner == "training":
            training = training.model_copy(update=update)
        else:
            top.update(update)
    return changed.model_copy(update={**top, "training": training})


def calibration_text(fit: LogFit) -> str:
    """The calibration file: loads back as a `FrameworkCalibration`."""
    lines = [
        f"# fitted to {fit.steps} rl_steps; noise over value: "
        + ", ".join(f"{stage} {value:.1%}" for stage, value in fit.noise.items()),
        *(
            f"# {each.name}: {each.value:.4g} s ({each.low:.4g} .. {each.high:.4g}), shipped {each.shipped:.4g}"
            + ("" if each.identified else "; NOT identified: " + each.reason)
            for each in fit.overheads
        ),
        *(f"# {note}" for note in fit.notes),
    ]
    data = fit.calibration.model_dump(mode="json", exclude_none=True)
    return "\n".join(lines) + "\n" + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)
