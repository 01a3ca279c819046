"""The run that fits every serving engine and writes their profiles: ``rlperf calibrate serving``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date

import numpy as np
import yaml

from rlperf.calibrate.engines import engine_text
from rlperf.calibrate.leave_out_inference import Refits, served_group
from rlperf.calibrate.pooling import Pooled
from rlperf.calibrate.serving_pool import fit_serving, stranger_spread
from rlperf.calibrate.tables import Table
from rlperf.specs.calibration import calibration_names
from rlperf.specs.engine_calibration import EngineCalibration, GroupFactor, load_engine_calibration

STRANGERS = {"release": "version", "device": "device", "family": "family"}
"""Kinds whose strangers' spread is what leaving one out has cost, and the groups that are left out for it."""


@dataclass(frozen=True, eq=False)
class ServingProfiles:
    """Profiles by the name of their file, the fit behind them, and how many rows it saw."""

    engines: Mapping[str, EngineCalibration]
    pooled: Pooled
    rows: int


def calibrate_serving(table: Table, *, file: str = "", today: str | None = None) -> ServingProfiles:
    """Fit all engines to all rows of a table that can be predicted, with the intervals of strangers.

    Profiles of engines without a row in the table, and settings, stay as they are.
    """
    shipped = {name: load_engine_calibration(name) for name in calibration_names("engines")}
    fits = Refits(table)
    found = {case.engine.id for case in fits.cases}
    fit = fit_serving(fits.served, [one for one in shipped.values() if one.id in found], file=file or table.file)
    # with intervals of the fit, and none for strangers, what strangers need beside them can be read off
    fits.profiles = {name: _strangers(one, dict.fromkeys(STRANGERS, 0.0)) for name, one in fit.engines.items()}
    spreads = {kind: _spread(fits, by) for kind, by in STRANGERS.items()}
    day = today or date.today().isoformat()
    engines = {
        name: _strangers(fit.engines[one.id], spreads).model_copy(update={"id": f"{name}-{day}", "date": day})
        for name, one in shipped.items()
        if one.id in found
    }
    return ServingProfiles(engines, fit.pooled, len(fits.cases))


def _strangers(engine: EngineCalibration, spreads: Mapping[str, float]) -> EngineCalibration:
    factors = tuple(
        one.model_copy(update={"spread": round(spreads[one.kind], 4)}) if not one.group and one.kind in spreads else one
        for one in engine.factors
    )
    return engine.model_copy(update={"factors": factors})


def _spread(fits: Refits, by: str) -> float:
    """What rows left out with their group miss beyond their interval; every group counts the same."""
    names = sorted({served_group(case, by) for case in fits.cases} - {""})
    groups = [[one for one in fits.without(by, name).left_out if one.metric == "tpot_ms"] for name in names]
    figures = [one for group in groups for one in group]
    weight = np.concatenate([np.full(len(group), 1.0 / max(len(group), LEAST)) for group in groups])
    measured, predicted, low, high = (
        np.asarray([getattr(one, name) for one in figures]) for name in ("measured", "predicted", "low", "high")
    )
    own = np.log(np.where(measured > predicted, high / predicted, predicted / low))
    return stranger_spread(np.log(measured / predicted), own, weight)


LEAST = 10
"""Rows from which a group counts as one."""


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
