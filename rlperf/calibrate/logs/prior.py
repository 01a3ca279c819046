r"""The prior of `fit_log`, from measured rl_steps: how far stages differ between groups, and within one.

A group is a framework (or a release of it, on a cluster of its own). Of its rows ``r`` and what they state,

.. math:: e = S_\theta \theta_g + S_a (a_g + b_r) + \varepsilon

e the logarithm of measured over predicted, S the slopes of the simulated seconds, :math:`\theta_g` the constants of the
group, as wide as their files say times ``constants`` of their stage; :math:`a_g` its stage errors with standard
deviations ``between``, :math:`b_r` those of a configuration with ``within``. All three are of greatest likelihood,
drawn gently to what is usual (`USUAL`; the files). A file's interval holds what configurations differ by, too: a log
that laid the error of its own configuration on host times carried it to all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.calibrate.logs.model import slopes_at
from rlperf.calibrate.logs.stages import CONSTANTS, Simulated, measured_stages, prior_widths
from rlperf.layout import FloatArray
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import Context
from rlperf.specs.stage_spread import STAGES, LogPrior, StagePrior
from rlperf.specs.step_log import StepLog

USUAL = 0.15
"""Standard deviation to which those without evidence are drawn [1]: between reruns (0.1) and strangers (0.3)."""
LOOSE, LOOSER = 1.0, 2.0
"""Standard deviation of the logarithm of how far a spread within groups may be from `USUAL`, and one that groups share
(or constants from what their files state), of which less is known [1]."""
LEAST, MOST = np.log(1e-3), np.log(4.0)
"""Logarithms of spreads that are looked for [1]."""
AUDIBLE = 0.1
"""Share of a figure from which on it counts as speaking of a stage [1]."""
NOISE: Mapping[str, float] = {"rollout": 0.10, "scoring": 0.04, "training": 0.04, "weight_sync": 0.16, "rest": 0.15}
"""Standard deviation of an rl_step around the mean of its run [1]; where it is from stands in the file."""

_STAGE_OF = np.array([STAGES.index(stage) for stage in CONSTANTS.values()])


@dataclass(frozen=True, eq=False)
class Evidence:
    """One measured configuration: what it states over what is predicted, and what that depends on.

    ``widths``: standard deviations of `CONSTANTS` in their order, 0 where there are none ``[constants]``; ``slopes``
    ``[stated, constants + stages]``;
    ``misses``: ln(measured / predicted) ``[stated]``; ``stated``: their names
    """

    group: str
    widths: FloatArray
    slopes: FloatArray
    misses: FloatArray
    stated: tuple[str, ...]


def evidence_of(context: Context, log: StepLog, group: str) -> Evidence:
    """A run that a row reports, as evidence."""
    evaluation, _ = evaluate_job(context)
    simulated = Simulated.of(context, evaluation, log, None, [])
    measured = measured_stages(simulated, log, [])
    widths = prior_widths(simulated.framework)
    slopes = slopes_at(simulated.seconds, tuple(widths), np.zeros(len(widths) + 2 * len(STAGES)))
    stated, place = tuple(measured), [*(list(CONSTANTS).index(name) for name in widths), *np.arange(-len(STAGES), 0)]
    own = np.zeros((len(stated), len(CONSTANTS) + len(STAGES)))
    own[:, place] = [slopes.of[name] for name in stated]
    misses = np.array([float(np.nanmean(np.log(measured[name]) - slopes.at[name])) for name in stated])
    return Evidence(group, np.array([widths.get(name, 0.0) for name in CONSTANTS]), own, misses, stated)


def log_prior(rows: Sequence[Evidence]) -> LogPrior:
    """Spreads between groups and within them, of greatest likelihood."""
    from scipy.optimize import minimize

    groups: dict[str, list[Evidence]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    count = len(STAGES)
    usual, loose = np.repeat([np.log(USUAL), np.log(USUAL), 0.0], count), np.repeat([LOOSER, LOOSE, LOOSER], count)

    def cost(logs: FloatArray) -> float:
        between, within, constants = np.exp(logs).reshape(3, count)
        pull = (((logs - usual) / loose) ** 2).sum()
        return float(pull + sum(_surprise(each, between, within, constants) for each in groups.values()))

    found = np.exp(minimize(cost, usual, method="L-BFGS-B", bounds=[(LEAST, MOST)] * usual.size).x)
    return LogPrior(
        **{
            stage: StagePrior(
                between=round(float(found[k]), 3),
                constants=round(float(found[2 * count + k]), 3),
                within=round(float(found[count + k]), 3),
                noise=NOISE[stage],
                rows=sum(_speaks_of(row, k) for row in rows),
                groups=len({row.group for row in rows if _speaks_of(row, k)}),
            )
            for k, stage in enumerate(STAGES)
        }
    )


def _speaks_of(row: Evidence, stage: int) -> bool:
    """Whether something that a row states moves with a stage."""
    return bool((np.abs(row.slopes[:, len(CONSTANTS) + stage]) > AUDIBLE).any())


def _surprise(rows: Sequence[Evidence], between: FloatArray, within: FloatArray, constants: FloatArray) -> float:
    """-2 ln likelihood of a group's rows, without its constant; standard deviations and shares by stage."""
    misses = np.concatenate([row.misses for row in rows])
    shared = np.vstack([row.slopes * np.concatenate([row.widths * constants[_STAGE_OF], between]) for row in rows])
    covariance = shared @ shared.T + np.diag(
        [NOISE.get(name, NOISE["rollout"]) ** 2 for row in rows for name in row.stated]
    )
    at = 0
    for row in rows:
        own = row.slopes[:, row.widths.size :]
        part = slice(at, at + row.misses.size)
        covariance[part, part] += (own * within**2) @ own.T
        at += row.misses.size
    _, determinant = np.linalg.slogdet(covariance)
    return float(determinant + misses @ np.linalg.solve(covariance, misses))
