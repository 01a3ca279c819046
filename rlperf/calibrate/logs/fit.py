"""What a run's log says of this cluster: constants and stage factors of its framework, with what is left uncertain.

The prior is the shipped calibration: every constant as wide as its file states it, every stage as wide as groups that
nobody fitted were off (`rlperf.specs.stage_spread.LogPrior`). The log moves them in proportion to what they explain of
it (`rlperf.calibrate.logs.model`), so that three rl_steps already tell a cluster, and cannot overfit it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import yaml

from rlperf.calibrate.logs.model import WHOLE, Posterior, Seconds, posterior
from rlperf.calibrate.logs.stages import CONSTANTS, LEAST_S, Simulated, measured_stages, prior_widths
from rlperf.calibrate.rl_step.framework import constant, with_constants
from rlperf.errors import Problem, SpecError
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import Context
from rlperf.specs.calibration import Z95
from rlperf.specs.overhead import Provenance
from rlperf.specs.rl_calibration import FrameworkCalibration
from rlperf.specs.stage_spread import BANDS, STAGES, SURPRISE, LogPrior, StageSpread, load_log_prior
from rlperf.specs.step_log import StepLog
from rlperf.units import human_share
from rlperf.workload.lengths import LengthTable

MAX_STEPS = 400
TELLS = 0.005
"""Share of a variance [1] below which a log has told nothing: it is printed as 0 %."""
_LOG = "log "
"""What digests of logs begin with among a calibration's rows."""


@dataclass(frozen=True)
class Told:
    """A constant [s] or a stage's factor [1]: as shipped, as the log has it, with the 5th and 95th percentile.

    ``share``: of the variance that it had before, what the log took away [1]
    """

    name: str
    stage: str
    shipped: float
    value: float
    low: float
    high: float
    share: float


@dataclass(frozen=True, eq=False)
class LogFit:
    """The fit: what the log told, the calibration that carries it, and how well it describes the log.

    ``before`` and ``after``: median absolute error of the log's stages as shipped and with what all configurations
    share [1]; ``noise``: standard deviation of an rl_step around its mean, by stage [1]; ``spread``: standard deviation
    of ln(measured / predicted) that is left for another configuration, by stage and of the rl_step [1]; ``before_it``:
    other logs that the folder's calibration was told by.
    """

    constants: tuple[Told, ...]
    factors: tuple[Told, ...]
    calibration: FrameworkCalibration
    steps: int
    noise: Mapping[str, float]
    before: Mapping[str, float]
    after: Mapping[str, float]
    spread: Mapping[str, float]
    notes: tuple[str, ...]
    before_it: int = 0

    @property
    def tells(self) -> bool:
        """Whether the log told anything of any constant or stage."""
        return any(each.share >= TELLS for each in (*self.constants, *self.factors))

    @property
    def start(self) -> str:
        """What the log was laid on top of, in words."""
        many = "s" if self.before_it > 1 else ""
        return f"after {self.before_it} earlier log{many}" if self.before_it else "as shipped"


def fit_log(
    context: Context,
    log: StepLog,
    lengths: LengthTable | None = None,
    *,
    warm_up: int = 1,
    prior: LogPrior | None = None,
) -> LogFit:
    """What a run's step metrics say of its framework on this cluster.

    Parameters
    ----------
    context : of the job that was run, with pinned pools
    log : its step metrics; the first ``warm_up`` rl_steps (compilation, graph capture) are left out of longer logs
    lengths : recorded lengths of the same rl_steps (a rollout dump); without them the job's workload is scaled to the
        mean lengths that the log states
    prior : of the stages; None: the shipped one

    Raises
    ------
    SpecError : the log states neither a stage nor the rl_step, or the framework's calibration was told by it already
    """
    notes: list[str] = []
    evaluation, filled = evaluate_job(context)
    digest = log.digest  # of the whole log, before its warm-up is left out
    updates = context.site.updates(evaluation.configuration.batch)
    log = _usable(log.by_rl_step(updates), warm_up, notes)
    notes += [f"assumed {text}" for text in filled]
    simulated = Simulated.of(context, evaluation, log, lengths, notes)
    measured = measured_stages(simulated, log, notes)
    if not measured:
        raise SpecError(Problem("the log states neither a stage nor the rl_step", log.source))
    framework = simulated.framework
    _counted_once(framework, digest, log.source)
    prior = prior or load_log_prior(fitted=bool(framework.calibrated_on))
    # after a log its posterior stands in the files, which is of this cluster alone
    widths = prior_widths(framework, None if logs_of(framework) else prior)
    found = posterior(simulated.seconds, measured, widths, prior)
    within = {stage: float(getattr(prior, stage).within) for stage in STAGES}
    spread = {name: found.sigma(name, within) for name in (*STAGES, WHOLE)}
    notes += _surprises(found, log.n)
    fitted = _calibration(framework, found, spread, log, digest)
    return LogFit(
        constants=tuple(_told(found, k, name, constant(framework, name)) for k, name in enumerate(found.constants)),
        factors=tuple(
            _told(found, len(found.constants) + k, stage, getattr(framework.factors, stage))
            for k, stage in enumerate(STAGES)
        ),
        calibration=fitted,
        steps=log.n,
        noise=found.noise,
        before=_errors(measured, simulated.seconds({}, {})),
        after=_errors(measured, {name: np.exp(logs) for name, logs in found.slopes.at.items()}),
        spread=spread,
        notes=tuple(notes),
        before_it=len(logs_of(framework)),
    )


def logs_of(framework: FrameworkCalibration) -> tuple[str, ...]:
    """Digests of the logs that a calibration was told by; its other rows are what the shipped one was fitted to."""
    return tuple(row.removeprefix(_LOG) for row in framework.step_spread.rows if row.startswith(_LOG))


def _counted_once(framework: FrameworkCalibration, digest: str, source: str) -> None:
    """Refuse a log that a calibration holds already: its steps would count twice."""
    told = logs_of(framework)
    if digest in told:
        others = len(told) - 1
        words = f", and by {others} other{'s' if others > 1 else ''}" if others else ""
        message = f"{framework.id} was told by this log already{words}"
        hint = "remove its file to begin anew, and give it every log once"
        raise SpecError(Problem(message, source, suggestion=hint))


def _usable(log: StepLog, warm_up: int, notes: list[str]) -> StepLog:
    settled = log.settled(warm_up)
    if settled.n < log.n:
        log = settled
        notes.append(f"the first {warm_up} rl_step(s) left out: they compile and capture")
    if log.n > MAX_STEPS:
        notes.append(f"the last {MAX_STEPS} of {log.n} rl_steps used")
        log = log.without_first(log.n - MAX_STEPS)
    return log


def _errors(measured: Seconds, predicted: Seconds) -> dict[str, float]:
    """Median absolute error of what the log states [1]."""
    found = {}
    for name, seconds in measured.items():
        known = np.isfinite(seconds) & (seconds > LEAST_S)
        found[name] = float(np.median(np.abs(predicted[name][known] / seconds[known] - 1.0)))
    return found


def _surprises(found: Posterior, steps: int) -> list[str]:
    """Stages that are further off than clusters are."""
    far = [
        f"{name} is {abs(value):.1f} standard deviations {'slower' if value > 0 else 'faster'} than clusters are: "
        "nothing is told by it. Look for another reason (settings, lengths, a bad node): `rlperf verdict` helps"
        for name, value in found.surprise.items()
        if abs(value) > SURPRISE
    ]
    if steps < 3:
        far.append(f"{steps} rl_step(s): three are wanted, since the scatter between them is part of the interval")
    return far


# -- the file ---------------------------------------------------------------------------------------------------------


def _told(found: Posterior, k: int, name: str, shipped: float) -> Told:
    """One unknown before and after."""
    half = Z95 * float(np.sqrt(found.covariance[k, k]))
    value = shipped * float(np.exp(found.mean[k]))
    stage = CONSTANTS.get(name, name)
    return Told(name, stage, shipped, value, value * np.exp(-half), value * np.exp(half), float(found.told[k]))


def _calibration(
    shipped: FrameworkCalibration, found: Posterior, spread: Mapping[str, float], log: StepLog, digest: str
) -> FrameworkCalibration:
    """The shipped calibration with what the log told, where it is from, and intervals of what is left."""
    import datetime

    source = f"step metrics of {log.source} ({log.framework})"
    today = datetime.date.today().isoformat()

    def provenance(sigma: float) -> Provenance:
        low, high = _bounds(sigma)
        return Provenance(source=source, date=today, n=log.n, low=low, high=high)

    values = {name: constant(shipped, name) * float(np.exp(found.mean[k])) for k, name in enumerate(found.constants)}
    changed = with_constants(shipped, values)
    top: dict[str, object] = {}
    training: dict[str, object] = {}
    for k, name in enumerate(found.constants):
        owner, _, attribute = name.rpartition(".")
        if owner == "weight_sync":
            continue
        held = getattr(changed.training if owner == "training" else changed, attribute)
        sigma = spread["rest"] if name == "step" else float(np.sqrt(found.covariance[k, k]))
        (training if owner == "training" else top)[attribute] = held.model_copy(
            update={"provenance": provenance(sigma)}
        )
    sync = changed.weight_sync[0].model_copy(update={"provenance": provenance(spread["weight_sync"])})
    factors = np.exp(found.mean[len(found.constants) :]).tolist()
    return changed.model_copy(
        update={
            **top,
            "id": shipped.id if shipped.id.endswith("_fitted") else f"{shipped.id}_fitted",
            "training": changed.training.model_copy(update=training),
            "weight_sync": (sync, *changed.weight_sync[1:]),
            "factors": shipped.factors.scaled(dict(zip(STAGES, factors, strict=True))),
            "stage_spread": StageSpread(
                source=source,
                whole=True,
                **{name: _bounds(spread[name]) for name in BANDS},
            ),
            "step_spread": provenance(spread[WHOLE]).model_copy(
                update={"rows": tuple(f"{_LOG}{each}" for each in (*logs_of(shipped), digest))}
            ),
            # the log is of this cluster's release, whichever that is
            "releases": (),
        }
    )


def _bounds(sigma: float) -> tuple[float, float]:
    """5th and 95th percentile of a factor whose logarithm has this standard deviation [1]."""
    return float(np.exp(-Z95 * sigma)), float(np.exp(Z95 * sigma))


def calibration_text(fit: LogFit) -> str:
    """The calibration file: loads back as a `FrameworkCalibration`."""
    told = [
        f"# {each.name}: {each.value:.4g} ({each.low:.4g} .. {each.high:.4g}), {fit.start} {each.shipped:.4g}; the log "
        f"took away {human_share(each.share)} of what was unknown of it"
        for each in (*fit.constants, *fit.factors)
    ]
    lines = [
        f"# told by {fit.steps} rl_steps; noise over value: "
        + ", ".join(f"{stage} {human_share(value, 1)}" for stage, value in fit.noise.items()),
        *told,
        *(f"# {note}" for note in fit.notes),
    ]
    # what is unset stays so: a switch that a framework does not name is the trainer's own
    data = fit.calibration.model_dump(mode="json", exclude_unset=True)
    if data["training"].get("batching") == "count":  # what the run's job asked for, and later ones may not
        del data["training"]["batching"]
    return "\n".join(lines) + "\n" + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)
