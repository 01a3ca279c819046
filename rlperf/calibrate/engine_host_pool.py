r"""Host time of engines, pooled over the rollouts of all frameworks: the prior of one that nobody fitted.

Seconds of a rollout are linear in the two host terms of a framework, a per engine_step and b per engine_step and
running request (`rlperf.sim.rl_step.overheads`), so that two differences give a row's whole response:

.. math::

    y_i = f_i + s_{ia} a_{g(i)} + s_{ib} b_{g(i)},\quad \ln\theta_{gp} = \mu_p + u_{gp},\quad
    \mu_p \sim N(\ln m_p, \sigma_p^2),\quad u_{gp} \sim N(0, \tau_p^2)

with f_i seconds without host time, g(i) the row's framework. ln of predicted over measured has a standard deviation of
`NOISE`, rows far off count linearly, and rows of one configuration share one weight. The deviations are stated, not
estimated as in `rlperf.calibrate.pooling`: four frameworks, two of one row, tell none.
Rows whose rollout is bound by something else that nobody measured apart are left out: environments that hold
trajectories up, and adapters served unmerged, whose own constant was fitted to these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlperf.calibrate.rl_step.framework import with_constants
from rlperf.calibrate.rl_step.predict import predict_step
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.layout import FloatArray
from rlperf.specs.calibration import Z95
from rlperf.specs.engine_host import EngineHost
from rlperf.specs.overhead import Overhead, Provenance
from rlperf.specs.rl_calibration import load_framework_calibration

HOST = ("engine_host", "engine_host_per_request")
START = (1.5e-3, 1e-5)
"""Judged before a row was seen [s]: an engine's scheduler, and one request's detokenising and scheduling in Python."""
UNSURE = (0.7, 1.0)
"""Standard deviations of the logarithm around `START`."""
BETWEEN = (0.4, 0.5)
"""Standard deviations of the logarithm between frameworks."""
NOISE = 0.12
"""Of ln(rollout): reruns, and the law of lengths that publications leave open."""


def telling(rows: Sequence[StepRow]) -> list[StepRow]:
    """Rows whose rollout tells host time."""
    return [row for row in rows if "rollout_s" in row.measured and row.max_trajectories is None and not row.lora_rank]


def framework_of(row: StepRow) -> str:
    """Framework whose calibration predicts the row; it is left out with that."""
    return load_framework_calibration(row.framework).framework


def fit_host(rows: Sequence[StepRow], date: str, without: str = "") -> EngineHost:
    """Host terms from the rows of `telling`, those that ``without``'s calibrations predict left out.

    Raises
    ------
    ValueError : no row is left
    """
    from scipy.optimize import least_squares

    kept = [row for row in telling(rows) if framework_of(row) != without]
    if not kept:
        raise ValueError(f"no rollout of a framework but {without} is at hand")
    residuals, groups = _residuals(kept)
    # soft L1: beyond two standard deviations a row counts linearly
    found = least_squares(residuals, np.zeros(2 * (groups + 1)), loss="soft_l1", f_scale=2.0)
    slopes = np.asarray(found.jac)
    own = np.diag(np.linalg.inv(slopes.T @ slopes))[:2] * np.square(UNSURE)
    mean, spread = np.exp(np.log(START) + found.x[:2] * UNSURE), np.sqrt(own + np.square(BETWEEN))
    first, second = (_overhead(value, sd, kept, without, date) for value, sd in zip(mean, spread, strict=True))
    return EngineHost(without=without, engine_host=first, engine_host_per_request=second)


def _overhead(value: float, spread: float, rows: Sequence[StepRow], without: str, date: str) -> Overhead:
    """A host term of a framework that is none of the rows'; three digits, for no more is known."""
    said = "the rollouts of several frameworks", "rlperf.calibrate.engine_host_pool"
    where = pooled(said, spread, [row.row_id for row in rows], without, date)
    return Overhead.model_validate({"value": f"{value:.3g} s", "provenance": where})


def pooled(said: tuple[str, str], spread: float, rows: Sequence[str], without: str, date: str) -> Provenance:
    """Where the constant of a framework that is none of the rows' is from; ``said``: over what, and by which module."""
    over, module = said
    left = f", those of {without} left out" if without else ""
    low, high = (float(f"{np.exp(sign * Z95 * spread):.2g}") for sign in (-1.0, 1.0))
    return Provenance(
        source=f"pooled over {over}{left} ({module})", date=date, n=len(rows), rows=tuple(rows), low=low, high=high,
        assumed=True,
    )  # fmt: skip


def _residuals(rows: Sequence[StepRow]) -> tuple[Callable[[FloatArray], FloatArray], int]:
    """Errors over their deviations, from unit normal deviations ``[frameworks + 1, 2]``, and how many frameworks."""
    stacks = [stack_of_row(row) for row in rows]
    names, group = np.unique(stacks, return_inverse=True)
    keys = [row.configuration for row in rows]
    weight = np.array([keys.count(key) ** -0.5 for key in keys]) / NOISE
    measured = np.log([row.measured["rollout_s"] for row in rows])
    base, slopes = _responses(rows)

    def residuals(flat: FloatArray) -> FloatArray:
        deviations = flat.reshape(-1, 2)
        host = np.exp(np.log(START) + deviations[0] * UNSURE + deviations[1:][group] * BETWEEN)
        return np.concatenate([(np.log(base + (host * slopes).sum(axis=1)) - measured) * weight, flat])

    return residuals, len(names)


def _responses(rows: Sequence[StepRow]) -> tuple[FloatArray, FloatArray]:
    """Seconds of every rollout without host time ``[rows]``, and per second of each host term ``[rows, 2]``."""
    steps = ((0.0, 0.0), (START[0], 0.0), (0.0, START[1]))
    found = np.array([[_rollout_s(row, host) for host in steps] for row in rows])
    return found[:, 0], (found[:, 1:] - found[:, :1]) / np.array(START)


def _rollout_s(row: StepRow, host: Sequence[float]) -> float:
    own = load_framework_calibration(row.framework)
    return predict_step(row, framework=with_constants(own, dict(zip(HOST, host, strict=True)))).stage_s("rollout_s")


def stack_of_row(row: StepRow) -> str:
    """A framework of one's own, also where another's calibration stands in."""
    return row.software.facts or framework_of(row)
