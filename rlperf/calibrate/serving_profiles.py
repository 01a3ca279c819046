"""The run that fits every serving engine and writes their profiles: ``rlperf calibrate serving``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date

import numpy as np
import yaml

from rlperf.calibrate.leave_out import reach_of_interval
from rlperf.calibrate.leave_out_inference import LEAST, Refits, served_group
from rlperf.calibrate.serving.engines import engine_text
from rlperf.calibrate.serving.pool import configuration_of, evenly, fit_serving
from rlperf.calibrate.statistics import weighted_quantile
from rlperf.calibrate.tables import Table
from rlperf.calibrate.validate import PredictedFigure
from rlperf.specs.calibration_files import calibration_names
from rlperf.specs.engine_calibration import EngineCalibration, GroupFactor, load_engine_calibration

STRANGERS = ("version", "device", "family", "engine")
"""Groups that are left out to tell how much wider a stranger's interval has to be."""
METRICS = {"tpot_ms": "stranger", "tokens_per_s_per_gpu": "stranger_throughput"}
"""Metric -> what its strangers' intervals have beside the load's own."""


@dataclass(frozen=True, eq=False)
class ServingProfiles:
    """Profiles by the name of their file, and how many rows their fit saw."""

    engines: Mapping[str, EngineCalibration]
    rows: int


def calibrate_serving(table: Table, *, file: str = "", today: str | None = None) -> ServingProfiles:
    """Fit all engines to all rows of a table that can be predicted, with the intervals of strangers.

    Profiles of engines without a row in the table, and settings, stay as they are.
    """
    shipped = {name: load_engine_calibration(name) for name in calibration_names("engines")}
    fits = Refits(table)
    found = {case.engine.id for case in fits.cases}
    fitted = fit_serving(fits.served, [one for one in shipped.values() if one.id in found], file or table.file)
    # strangers' intervals are those of the fit as yet: what they have to be wider by can be read off
    fits.profiles = fitted
    strangers = _strangers(fits)
    day = today or date.today().isoformat()
    engines = {
        name: _widened(fitted[one.id], strangers).model_copy(update={"id": f"{name}-{day}", "date": day})
        for name, one in shipped.items()
        if one.id in found
    }
    return ServingProfiles(engines, len(fits.cases))


def _widened(engine: EngineCalibration, strangers: Mapping[str, float]) -> EngineCalibration:
    spread = engine.spread_served and engine.spread_served.model_copy(update=strangers)
    return engine.model_copy(update={"spread_served": spread})


def _strangers(fits: Refits) -> dict[str, float]:
    r"""Half of what strangers' intervals have beside a load's own, so that of rows left out with their group nine of
    ten lie inside.

    .. math:: |\ln(y / \hat y)| \le \sqrt{h^2 + s^2}, \quad h \text{ half of a row's interval without it}

    Every kind of group counts alike. Nothing where no group leaves enough rows to fit to.
    """
    names = {case.row.row_id: configuration_of(case) for case in fits.cases}
    kinds = [_left_out(fits, by) for by in STRANGERS]
    found = {}
    for metric, field in METRICS.items():
        parts = [[one for one in figures if one.metric == metric] for figures in kinds]
        beyond = np.asarray([_beyond(one) for part in parts for one in part])
        if len(beyond):
            weights = np.concatenate([evenly([names[one.row_id] for one in part]) for part in parts])
            found[field] = round(weighted_quantile(beyond, weights, 0.9), 3)
    return found


def _left_out(fits: Refits, by: str) -> list[PredictedFigure]:
    """Rows of every group that leaves enough others to fit to, predicted without their group."""
    rows = Counter(served_group(case, by) for case in fits.cases)
    groups = sorted(name for name in rows if name and len(fits.cases) - rows[name] >= LEAST)
    return [one for name in groups for one in fits.without(by, name).left_out]


def _beyond(one: PredictedFigure) -> float:
    """What has to come beside the half of a figure's interval, squares adding, for it to lie inside, in ln [1]."""
    missed = abs(float(np.log(one.measured / one.predicted)))
    return float(np.sqrt(max(missed**2 - reach_of_interval(one) ** 2, 0.0)))


def profile_text(engine: EngineCalibration) -> str:
    """YAML of a profile; factors one a line."""
    text = (
        engine_text(engine.model_copy(update={"factors": ()})).replace("factors: []\n", "").replace("release: ''\n", "")
    )
    return text + "factors:\n" + "".join(f"- {line}\n" for line in _lines(engine.factors)) if engine.factors else text


def _lines(factors: Iterable[GroupFactor]) -> list[str]:
    return [
        yaml.safe_dump(one.model_dump(), default_flow_style=True, sort_keys=False, width=1000).strip()
        for one in factors
    ]
