"""Speculation, predicted against measured: rows of ``measured/speculation.csv`` and files in that form.

Tokens per engine_step are those that the other models' curves say. Gains are told at the accepted length that a row
states, so that they judge cost alone; where it states none, acceptance is the pooled one, of a frozen head in rollouts.
How far costs lie off is told by the rows of other sources.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from rlperf.calibrate.speculation.acceptance import TAIL, far_of, fit_speculation, method_of
from rlperf.calibrate.speculation.gains import TIMED, cost_spread, mixed, source_of, told_gain, trains
from rlperf.calibrate.speculation.rows import Drafting, architecture_of, draftings_of
from rlperf.calibrate.tables import Row, Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.cost.speculation import training_share
from rlperf.errors import SpecError
from rlperf.specs.calibration import Z95
from rlperf.specs.speculation import first_of, tokens_per_step
from rlperf.specs.speculation_calibration import AcceptanceFit, SpeculationCalibration, load_speculation

TOKENS, GAIN, TRAINING_GAIN, TPOT = "tokens_per_engine_step", "gain", "training_gain", "tpot_ms"
TRAINING = "training s"


def predict_rows(path: Path, table: Table) -> Outcome:
    """Predict every row of a table; ``path`` is not needed."""
    table.need("model", "method", "k", "kind")

    @cache
    def without(model: str) -> SpeculationCalibration:
        try:
            return fit_speculation(table, without=model)
        except SpecError:
            return load_speculation()

    @cache
    def spread(source: str) -> float:
        found = cost_spread(table, load_speculation(), without=source)
        return (found or load_speculation().cost).value

    return each_row(table, lambda row: _predict(row, without(row.text("model")), spread(source_of(row))))


def _predict(row: Row, known: SpeculationCalibration, spread: float) -> list[PredictedFigure]:
    kind, length = row.text("kind"), row.number("acceptance_length")
    if kind == "simulated":
        raise SpecError("a simulation of somebody else is no measurement")
    if row.text("speedup").startswith("<"):
        raise SpecError("an upper value alone")
    drafting, found = draftings_of(row)[-1], []
    if length is not None:
        found.append(_tokens(row, drafting, known, length))
    gain = row.number("speedup")
    if gain is not None and row.text("metric") == TRAINING:
        found.append(_training_gain(row, drafting, gain))
    elif gain is not None or (row.text("metric") == TIMED and row.number("with_spec") is not None):
        found.append(_speed(row, known, spread, gain))
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
    trained = trains(row)
    gain = 1.0 / (1.0 + training_share(architecture_of(row), drafting.method) * trained)
    return _figure(row, TRAINING_GAIN, measured, (gain, gain * 0.9, min(gain * 1.1, 1.0)), load_speculation(), ())


def _speed(row: Row, known: SpeculationCalibration, spread: float, gain: float | None) -> PredictedFigure:
    """Gain of a row, or its milliseconds per token where no gain is stated, at the tokens that it says or is told."""
    told = told_gain(row, known)
    sd = float(np.hypot(told.spread, spread))
    if gain is None:
        measured = row.number("with_spec")
        assert measured is not None
        return _figure(row, TPOT, measured, mixed(1e3 * told.token_s, sd), known, told.assumed)
    return _figure(row, GAIN, gain, mixed(told.gains, sd), known, told.assumed)


def _figure(
    row: Row, metric: str, measured: float, told: tuple[float, float, float], known: SpeculationCalibration,
    assumed: tuple[str, ...],
) -> PredictedFigure:  # fmt: skip
    """One figure; the tail with a frozen head gave the loss of frozen heads, so that it is no test of it."""
    predicted, low, high = told
    frozen = row.text("metric") == TAIL and not trains(row)
    return PredictedFigure(
        row_id=row.row_id, group=row.text("kind"), metric=metric, measured=measured, predicted=predicted, low=low,
        high=high, calibration=known.id, assumed=assumed, used_in_calibration=frozen,
        stratum=str(method_of(row.text("method"))),
    )  # fmt: skip
