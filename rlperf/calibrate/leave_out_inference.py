"""Engines and devices left out of what serves: the pool fitted anew without a group, and its rows predicted so.

The fit is the product's own, `rlperf.calibrate.serving.pool`, on every row of the table but the group's. The seen side
is no better informed about the row itself: it is predicted by the fit that saw the group but not the row's
configuration (one of `rlperf.calibrate.serving.pool.FOLDS` parts of all configurations). Every fit begins at what is
believed without a row; only how far the intervals go is the shipped profiles'.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlperf.calibrate.leave_out import LeftOutGroup, family_of, group_of, in_turn
from rlperf.calibrate.pooling import fit_pool
from rlperf.calibrate.serving.engines import measured_of
from rlperf.calibrate.serving.pool import ServingRows, configuration_of, fold_of, profiles_of
from rlperf.calibrate.serving.rows import NEEDED, CostTable, ServingCase, case_of, check
from rlperf.calibrate.serving.stack import Measured
from rlperf.calibrate.tables import Table, read_table
from rlperf.calibrate.validate import Outcome, PredictedFigure, Report, report_of
from rlperf.calibrate.validate_inference import predict_case, predict_rows, told_again
from rlperf.cost.layers import stack_of
from rlperf.errors import SpecError
from rlperf.layout import BoolArray
from rlperf.specs.calibration import DeviceCalibration, load_device_calibration
from rlperf.specs.calibration_files import calibration_names
from rlperf.specs.engine_calibration import EngineCalibration, load_engine_calibration
from rlperf.specs.hardware import at_published_rates, timed_relative
from rlperf.specs.profiles import load_device
from rlperf.told import Tell, quiet

LEAST = 8
"""Rows that have to be left for a fit."""


def predict_groups(
    path: Path, table: Table, by: str, tell: Tell = quiet, *, refits: Refits | None = None
) -> list[LeftOutGroup]:
    """Every group of served rows, with constants fitted with and without its rows; ``refits`` are the table's."""
    table.need(*NEEDED)
    fits = refits or Refits(table)
    names = sorted({served_group(case, by) for case in fits.cases} - {""})
    return [one for one in (fits.without(by, name) for name in in_turn(names, tell)) if one.left_out]


def served_group(case: ServingCase, by: str) -> str:
    """The group of a served row; a release is an engine with the first two numbers of its version."""
    if by == "configuration":
        return fold_of(case)
    if by == "version":
        return f"{case.engine.engine} {case.engine.release}" if case.engine.release else ""
    return family_of(case.arch.name) if by == "family" else group_of(case.row, by, "engine", "engine_version")


def served_cases(table: Table, costs: CostTable) -> list[Measured]:
    """Every row that can be predicted, with its primary metric.

    Not those whose attention nobody timed on the device nor on a relative: what they are off by is no engine's doing.
    """
    found: list[Measured] = []
    for row in table:
        try:
            case = case_of(row)
            check(case, costs)
        except SpecError:
            continue
        if not any(half.layer.untimed_on(case.hardware) for half in stack_of(case.arch).halves):
            found += measured_of(case)
    return found


def report_apart(path: Path, refits: Refits | None = None) -> Report:
    """`validate` of a table whose rows the shipped fit saw: each predicted by a fit without its configuration.

    Rows that no fit saw keep the prediction of the shipped constants. ``refits`` are the table's, where they are known.
    """
    table = read_table(path)
    shipped = predict_rows(path, table)
    apart = {(one.row_id, one.metric): one for one in (refits or Refits(table)).apart}
    predictions = tuple(apart.get((one.row_id, one.metric), one) for one in shipped.predictions)
    return report_of("inference", table.file, len(table), Outcome(predictions, shipped.refused))


class Refits:
    """The rows of a table, and fits without a group of them.

    ``profiles`` are those whose settings and intervals hold, by id: the shipped ones, until others are put there.
    """

    def __init__(self, table: Table) -> None:
        costs = CostTable()
        self.served = ServingRows.of(served_cases(table, costs), costs)
        shipped = (load_engine_calibration(name) for name in calibration_names("engines"))
        self.profiles: Mapping[str, EngineCalibration] = {one.id: one for one in shipped}
        self.cases = [case for case, _, _ in self.served.cases]
        if len(self.cases) < LEAST:
            raise SpecError(f"{table.file}: {len(self.cases)} served rows are too few to leave any out")
        self._again = told_again(table)
        self._apart: dict[str, dict[tuple[str, str], PredictedFigure]] = {}

    def without(self, by: str, name: str) -> LeftOutGroup:
        """Predictions of a group's rows with constants that none of its rows entered."""
        held = np.asarray([served_group(case, by) == name for case in self.cases])
        mine = [case for case, one in zip(self.cases, held, strict=True) if one]
        borrowed: list[str] = []
        constants = _relative(mine[0], borrowed) if by == "device" else {}
        others = {case.engine.engine for case, one in zip(self.cases, held, strict=True) if not one}
        borrowed += [f"{one}: the pool's" for one in sorted({case.engine.engine for case in mine} - others)]
        left = [*self._part(name).values()] if by == "configuration" else self._predicted(held, constants)
        seen = {key: one for part in sorted({fold_of(case) for case in mine}) for key, one in self._part(part).items()}
        in_fit = 0 if by == "configuration" else len({configuration_of(case) for case in mine})
        same = tuple(seen[one.row_id, one.metric] for one in left)
        return LeftOutGroup(name, in_fit, same, tuple(left), "; ".join(borrowed))

    @property
    def apart(self) -> list[PredictedFigure]:
        """Figures of every row by a fit that did not see its configuration."""
        parts = sorted({fold_of(case) for case in self.cases})
        return [one for part in parts for one in self._part(part).values()]

    def _part(self, part: str) -> dict[tuple[str, str], PredictedFigure]:
        """Figures of one part of the configurations by a fit of the others."""
        if part not in self._apart:
            held = np.asarray([fold_of(case) == part for case in self.cases])
            self._apart[part] = {(one.row_id, one.metric): one for one in self._predicted(held, {})}
        return self._apart[part]

    def _predicted(self, held: BoolArray, constants: dict[str, DeviceCalibration]) -> list[PredictedFigure]:
        """Figures of rows by a fit of all others; rows that a device's own constants are told from are no measure."""
        if int((~held).sum()) < LEAST:
            raise SpecError(f"without the rows left out, {int((~held).sum())} are left to fit to")
        pooled = fit_pool(self.served.rows, ~held)
        mine = [case for case, one in zip(self.cases, held, strict=True) if one]
        names = {case.engine.id for case in mine}
        engines = profiles_of(pooled, self.served, ~held, [self.profiles[name] for name in sorted(names)])
        costs = CostTable()
        found = [
            figure
            for case in mine
            if case.row.row_id not in self._again and case.row.row_id not in case.hardware.calibration.served_rows
            for figure in predict_case(case_of(case.row, engines, constants), costs)
            if figure.metric != "ttft_ms" or not figure.used_in_calibration  # those that fitted `front_end`
        ]
        saw = [one.row_id for one in found if one.used_in_calibration]
        if saw:
            raise AssertionError(f"{saw[0]} was fitted although it is left out")
        return found


def _relative(case: ServingCase, borrowed: list[str]) -> dict[str, DeviceCalibration]:
    """A device's relative's constants in place of its own; nothing where it stands on a relative's anyway."""
    device, own = case.hardware.device, case.hardware.calibration
    related = timed_relative(device)
    borrowed.append(f"kernels of {own.extrapolated_from or related or device.name}")
    if own.extrapolated or related is None:
        return {}
    lent = load_device_calibration(related).borrowed_by(device.name)
    return {device.name: at_published_rates(lent, device, load_device(related))}
