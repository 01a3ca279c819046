"""Overheads of a serving engine from end-to-end rows: at most three constants, on a stated split of configurations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import yaml

from rlperf.calibrate.serving.rows import NEEDED, CostTable, ServingCase, case_of, check
from rlperf.calibrate.serving.stack import CONSTANTS, Measured, ServingStack
from rlperf.calibrate.statistics import absolute_percentage_errors, spread_of
from rlperf.calibrate.tables import Table, split_rank
from rlperf.errors import Problem, SpecError
from rlperf.layout import FloatArray
from rlperf.specs.calibration import Quality, Spread
from rlperf.specs.engine_calibration import EngineCalibration, EngineOverhead
from rlperf.specs.speculation import NONE

SPLIT = (
    "per engine, architecture, device and mode: the quarter of its configurations (dtype, layout) with the lowest "
    "blake2s hash, at least one where there are two; an engine without such takes a quarter of its (architecture, "
    "device) pairs"
)


@dataclass(frozen=True)
class EngineFit:
    """A fitted engine: its calibration, and errors on the rows it saw and on configurations left out in turn [%]."""

    engine: EngineCalibration
    rows: int
    in_sample_mape: float
    left_out_mape: float


def measured_cases(table: Table, engine_id: str) -> list[Measured]:
    """Every row of an engine that can be predicted and has a primary metric."""
    found: list[Measured] = []
    costs = CostTable()
    for case in _readable(table):
        if case.engine.id != engine_id:
            continue
        with suppress(SpecError):
            check(case, costs)
            found += measured_of(case)
    return found


def _readable(table: Table) -> Iterator[ServingCase]:
    """Rows whose engine, model, device and layout are known."""
    for row in table:
        with suppress(SpecError):
            yield case_of(row)


def measured_of(case: ServingCase) -> list[Measured]:
    """The case with its primary metric; none where the row publishes neither, or where tokens were drafted."""
    row = case.row
    if case.speculation != NONE:
        return []
    tpot, rate = row.number("measured_tpot_ms"), row.number("measured_output_tokens_per_s_per_gpu")
    if tpot:
        return [(case, "tpot_ms", tpot)]
    return [(case, "tokens_per_s_per_gpu", rate)] if rate else []


def calibration_cases(table: Table, engine_id: str) -> list[Measured]:
    """Rows of an engine in the calibration split (see `SPLIT`): whole configurations, the others are scored."""
    table.need(*NEEDED)
    table.need_one("measured_tpot_ms", "measured_output_tokens_per_s_per_gpu")
    found = measured_cases(table, engine_id)
    if not found:
        known = sorted({case.engine.id for case in _readable(table)})
        words = f"those that can be predicted are of {', '.join(known)}" if known else "none can be predicted"
        none = Problem(f"no row is of {engine_id}: {words}", table.file, suggestion="name it with --name")
        raise SpecError([none] if known else _unreadable(table))
    return split_of(found)


def _unreadable(table: Table) -> list[Problem]:
    """Why no row can be predicted, each reason with the first line that has it."""
    found: dict[str, Problem] = {}
    for row in table:
        try:
            case_of(row)
        except SpecError as error:
            for each in error.problems:
                found.setdefault(each.message, Problem(each.message, table.file, row.line, each.suggestion))
    return [*found.values()] or [Problem("holds no rows", table.file)]


def split_of(everything: Sequence[Measured]) -> list[Measured]:
    """Those of one engine's rows that fall into the calibration split."""
    groups: dict[tuple[str, str, str], set[str]] = {}
    for case, _, _ in everything:
        key = (case.arch.name, case.hardware.device.name, case.mode)
        groups.setdefault(key, set()).add(case.configuration)
    chosen: set[str] = set()
    for names in groups.values():
        if len(names) > 1:
            chosen.update(sorted(names, key=split_rank)[: -(-len(names) // 4)])
    if not chosen:  # one configuration each: whole architectures and devices are split instead
        pairs = sorted({_pair(case) for case, _, _ in everything}, key=split_rank)
        kept = set(pairs[: -(-len(pairs) // 4)])
        return [one for one in everything if _pair(one[0]) in kept]
    return [one for one in everything if one[0].configuration in chosen]


def _pair(case: ServingCase) -> str:
    return f"{case.arch.name}|{case.hardware.device.name}"


def fit_engine(table: Table, engine: EngineCalibration, *, name: str = "") -> EngineFit:
    """Fit three overheads of an engine on its calibration split: a fixed time, per_request, kernel_scale.

    Whether the fixed time goes with the layers (gaps between kernels), with the expert layers (routing) or with the
    engine_step (scheduler) is decided by the loss on the split.

    Every (architecture, device, mode) of the split weighs the same; left-out errors come from leaving out one
    architecture and device at a time. Extrapolated rows of the split give ``spread_extrapolated``.
    """
    cases = calibration_cases(table, engine.id)
    if len(cases) < 4:
        raise SpecError(f"engine {engine.id}: only {len(cases)} rows fall into the calibration split, 4 are needed")
    measured = np.asarray([value if metric == "tpot_ms" else 1.0 / value for _, metric, value in cases])
    covered = np.asarray([case.covered for case, _, _ in cases])
    fitted = np.ones(len(cases), dtype=bool)
    scored = covered if covered.sum() >= 4 else fitted
    stack = ServingStack(cases, CostTable())
    trials = {place: _fit(stack, measured, fitted, place) for place in PLACES}
    # a split of one or two architectures cannot tell the places apart: another than the layers must clearly win
    place = min(trials, key=lambda name: trials[name][1] * (MARGIN if name == "per_layer" else 1.0))
    parameters = trials[place][0]
    everything = stack.predicted(_constants(parameters, place))
    pairs = np.asarray([_pair(case) for case, _, _ in cases])
    left_out = _left_out(stack, measured, pairs, everything, place)
    errors = absolute_percentage_errors(everything, measured)[scored]
    held = absolute_percentage_errors(left_out, measured)[scored]
    quality = Quality(
        n=len(cases),
        in_sample_mape=round(float(errors.mean()), 2),
        left_out_mape=round(float(held.mean()), 2),
        left_out_rule="one architecture and device left out in turn",
        rows=f"{name or table.file}: {SPLIT}",
        spread=_wide(left_out[scored], measured[scored]),
    )
    other = ~covered if (~covered).sum() >= 4 else fitted
    overhead = EngineOverhead.model_validate(
        {
            place: f"{parameters[0] * PLACES[place] * 1e6:.4g} us",
            "per_request": f"{parameters[1] * 1e6:.4g} us",
            "kernel_scale": round(float(parameters[2]), 4),
            "row_ids": tuple(case.row.row_id for case, _, _ in cases),
            "quality": quality,
        }
    )
    changed = engine.model_copy(
        update={
            "overhead": overhead,
            "factors": (),
            "spread_served": None,
            "spread_extrapolated": _wide(left_out[other], measured[other]),
        }
    )
    return EngineFit(changed, len(cases), float(errors.mean()), float(held.mean()))


def _wide(prediction: FloatArray, measured: FloatArray) -> Spread:
    """Spread of few rows: at least `RERUN` either way."""
    found = spread_of(prediction, measured)
    return Spread(low=min(found.low, 1.0 / RERUN), high=max(found.high, RERUN))


RERUN = 1.14
"""The same configuration, released again a few months later, differs by up to this factor."""


def _left_out(
    stack: ServingStack, measured: FloatArray, groups: np.ndarray, everything: FloatArray, place: str
) -> FloatArray:
    result = everything.copy()
    names = np.unique(groups)
    for one in names if len(names) > 1 else ():
        held = groups == one
        parameters, _ = _fit(stack, measured, ~held, place)
        result[held] = stack.predicted(_constants(parameters, place))[held]
    return result


PLACES = {"per_layer": 1.0, "per_expert_layer": 1.0, "step": 60.0}
"""Where an engine's fixed time may sit, and a factor that brings all of them to one range (layers of a large model)."""


def _constants(parameters: FloatArray, place: str) -> FloatArray:
    """The fixed time at ``place`` over `PLACES` [s], seconds per request and factor on kernels, as `CONSTANTS`."""
    found = dict.fromkeys(CONSTANTS, 0.0)
    found.update({place: parameters[0] * PLACES[place], "per_request": parameters[1], "kernel_scale": parameters[2]})
    return np.asarray(list(found.values()))


MARGIN = 0.9
"""Another place than the layers must bring the loss below this share of theirs."""

LIMITS = np.log([[1e-8, 1e-8, 0.75], [6e-5, 1e-4, 1.25]])
"""Lower and upper limits of per_layer [s], per_request [s] and kernel_scale: what hosts and clocks can account for."""


def _weights(cases: Sequence[Measured]) -> FloatArray:
    """Square roots of row weights: equal for every architecture, device and mode."""
    groups = [(case.arch.name, case.hardware.device.name, case.mode) for case, _, _ in cases]
    sizes = {group: groups.count(group) for group in set(groups)}
    weights = [1.0 / sizes[group] for group in groups]
    return np.asarray(np.sqrt(np.asarray(weights) / np.mean(weights)), dtype=np.float64)


def _fit(stack: ServingStack, measured: FloatArray, rows: np.ndarray, place: str) -> tuple[FloatArray, float]:
    from scipy.optimize import least_squares

    truth = np.log(measured[rows])
    weights = _weights([stack.cases[int(index)] for index in np.flatnonzero(rows)])

    def residuals(z: FloatArray) -> FloatArray:
        found = stack.predicted(_constants(np.exp(z), place))[rows]
        return np.asarray(weights * (np.log(found) - truth), dtype=np.float64)

    start = np.log([5e-6, 5e-6, 1.0])
    result = least_squares(
        residuals, start, bounds=(LIMITS[0], LIMITS[1]), loss="soft_l1", f_scale=0.05, diff_step=[0.02], max_nfev=12
    )
    return np.asarray(np.exp(result.x), dtype=np.float64), float(result.cost)


def engine_text(engine: EngineCalibration) -> str:
    """YAML of an engine profile, times in microseconds."""
    data = engine.model_dump(mode="json", exclude_none=True)
    body = yaml.safe_dump(data, sort_keys=False, width=118, allow_unicode=True)
    body = _SECONDS.sub(lambda found: f"{float(found.group(1)) * 1e6:.4g} us", body)
    return f"# {engine.engine}: settings by its documentation, overheads fitted by `rlperf calibrate`.\n{body}"


_SECONDS = re.compile(r"(?<=: )([\d.e-]+) s$", flags=re.MULTILINE)
