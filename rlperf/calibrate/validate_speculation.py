"""Speculation, predicted against measured: rows of ``measured/speculation.csv`` and files in that form.

Tokens per engine_step are those that the other models' curves say. Gains are told at the accepted length that a row
states, so that they judge cost alone; where it states none, acceptance is the pooled one, of a frozen head in rollouts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from rlperf.calibrate.speculation import TAIL, far_of, fit_speculation, method_of
from rlperf.calibrate.speculation_rows import (
    OF_A_ROLLOUT,
    PRESUMED_CONTEXT,
    DraftedOn,
    Drafting,
    architecture_of,
    drafting_of,
    rollout_of,
    running_of,
    served_of,
)
from rlperf.calibrate.tables import Row, Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.speculation import speculating, training_share
from rlperf.errors import SpecError
from rlperf.sim.rollout.closed_form import take_census
from rlperf.specs.calibration import Z95
from rlperf.specs.speculation import first_of, tokens_per_step
from rlperf.specs.speculation_calibration import (
    AcceptanceFit,
    SpeculationCalibration,
    Yield,
    load_speculation,
)

TOKENS, GAIN, TRAINING_GAIN, TPOT = "tokens_per_engine_step", "gain", "training_gain", "tpot_ms"
TRAINING = "training s"
TIMED = "TPOT ms"
COST_SPREAD = 0.1
"""Standard deviation of ln of a ratio of two engine_steps, judged: most of an engine's own error is in both."""


def predict_rows(path: Path, table: Table) -> Outcome:
    """Predict every row of a table; ``path`` is not needed."""
    table.need("model", "method", "k", "kind")

    @cache
    def without(model: str) -> SpeculationCalibration:
        try:
            return fit_speculation(table, without=model)
        except SpecError:
            return load_speculation()

    return each_row(table, lambda row: _predict(row, without(row.text("model"))))


def _predict(row: Row, known: SpeculationCalibration) -> list[PredictedFigure]:
    kind, length = row.text("kind"), row.number("acceptance_length")
    if kind == "simulated":
        raise SpecError("a simulation of somebody else is no measurement")
    if row.text("speedup").startswith("<"):
        raise SpecError("an upper value alone")
    drafting, found = drafting_of(row), []
    if length is not None:
        found.append(_tokens(row, drafting, known, length))
    gain = row.number("speedup")
    if gain is not None and row.text("metric") == TRAINING:
        found.append(_training_gain(row, drafting, gain))
    elif gain is not None or (row.text("metric") == TIMED and row.number("with_spec") is not None):
        found.append(_speed(row, drafting, known, length, gain))
    if not found:
        raise SpecError("neither an accepted length nor a speed is stated")
    return found


def _fit(known: SpeculationCalibration, drafting: Drafting) -> AcceptanceFit:
    fit = known.of(drafting.method)
    if fit is None:
        raise SpecError(f"speculation: no acceptance of {drafting.method} drafts is known")
    return fit


def _tokens(row: Row, drafting: Drafting, known: SpeculationCalibration, measured: float) -> PredictedFigure:
    """Tokens per engine_step with the row's model left out of the fit; the spread is that of three drafts, by depth."""
    fit, k = _fit(known, drafting), drafting.depth
    usual = known.frozen.drafts
    falls = fit.fall(far_of(drafting.method, row.text("model")))
    middle = tokens_per_step(fit.first, falls, usual)
    low, high = (
        tokens_per_step(first_of(middle * np.exp(side * Z95 * fit.spread), falls, usual), falls, k)
        for side in (-1.0, 1.0)
    )
    predicted = tokens_per_step(fit.first, falls, k)
    return _figure(row, TOKENS, measured, (predicted, low, high), known, drafting.assumed)


def _training_gain(row: Row, drafting: Drafting, measured: float) -> PredictedFigure:
    """Seconds of training without over with: a head that is trained adds its work, a frozen one nothing."""
    trained = _trains(row)
    gain = 1.0 / (1.0 + training_share(architecture_of(row), drafting.method) * trained)
    return _figure(row, TRAINING_GAIN, measured, (gain, gain * 0.9, min(gain * 1.1, 1.0)), load_speculation(), ())


def _trains(row: Row) -> bool:
    return "trained" in row.text("method").lower()


def _speed(
    row: Row, drafting: Drafting, known: SpeculationCalibration, length: float | None, gain: float | None
) -> PredictedFigure:
    """Gain of a row, or its milliseconds per token where no gain is stated, at the tokens that it says or is told."""
    served = served_of(row)
    rollout = row.text("kind") == OF_A_ROLLOUT
    far = far_of(drafting.method, row.text("model"))
    found = _yield(drafting, known, length, trained=_trains(row) or not rollout, far=far)
    plain = engine_step_cost(
        served.arch, served.hw, served.engine, served.layout, gemm_dtype=served.gemm_dtype
    )  # fmt: skip
    drafted = speculating(plain, served.replica, drafting.setting, replace(found, spread=0.0))
    (slow, fast), assumed = _seconds(row, served, (plain, drafted))
    sd = Z95 * float(np.hypot(found.spread, COST_SPREAD))
    assumed = (*drafting.assumed, *served.assumed, *assumed)
    if gain is None:
        measured = row.number("with_spec")
        assert measured is not None
        return _figure(row, TPOT, measured, _around(1e3 * fast, sd), known, assumed)
    return _figure(row, GAIN, gain, _around(slow / fast, sd), known, assumed)


def _seconds(
    row: Row, served: DraftedOn, costs: tuple[EngineStepCost, EngineStepCost]
) -> tuple[tuple[float, float], tuple[str, ...]]:
    """Seconds without and with drafts: of a replica's rollout, or of one token of the requests that are served."""
    if row.text("kind") == OF_A_ROLLOUT:
        work, assumed = rollout_of(row)
        census = take_census(work, EngineLimits(kv_tokens=np.inf, max_running=served.engine.max_running))
        slow, fast = (float(census.makespan_s(cost)) for cost in costs)
        return (slow, fast), assumed
    running, assumed = running_of(row)
    slow, fast = (float(cost.decode_s(running, running * PRESUMED_CONTEXT)) for cost in costs)
    return (slow, fast), (*assumed, f"{PRESUMED_CONTEXT:g} cached tokens a request")


def _yield(
    drafting: Drafting, known: SpeculationCalibration, length: float | None, *, trained: bool, far: bool
) -> Yield:
    """Tokens per engine_step where ``width`` tokens are verified and ``depth`` of them stand in a row."""
    stated = (1.0,) * drafting.width
    if length is not None:
        return Yield((*stated, length), 0.0)
    told = known.tokens(drafting.setting, trained=trained, far=far)
    return Yield((*stated, told.tokens[drafting.depth]), told.spread)


def _around(value: float, sd: float) -> tuple[float, float, float]:
    return value, value * float(np.exp(-sd)), value * float(np.exp(sd))


def _figure(
    row: Row, metric: str, measured: float, told: tuple[float, float, float], known: SpeculationCalibration,
    assumed: tuple[str, ...],
) -> PredictedFigure:  # fmt: skip
    """One figure; the tail with a frozen head gave the loss of frozen heads, so that it is no test of it."""
    predicted, low, high = told
    frozen = row.text("metric") == TAIL and not _trains(row)
    return PredictedFigure(
        row_id=row.row_id, group=row.text("kind"), metric=metric, measured=measured, predicted=predicted, low=low,
        high=high, calibration=known.id, assumed=assumed, used_in_calibration=frozen,
        stratum=str(method_of(row.text("method"))),
    )  # fmt: skip
