"""Engines and devices left out of what serves: overheads fitted anew without a group, and its rows predicted so.

The fit is the product's own, `rlperf.calibrate.engines.fit_cases`, on the rows that the shipped profiles list (or, of a
table that they do not know, on its calibration split), less the group. The seen side is the shipped constants, which
that fit reproduces where nothing is left out. Rows that the shipped fits saw are scored on neither side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlperf.calibrate.engines import fit_cases, measured_of, split_of
from rlperf.calibrate.inference_rows import NEEDED, CostTable, ServingCase, case_of
from rlperf.calibrate.leave_out import LeftOutGroup, group_of
from rlperf.calibrate.serving_stack import Measured
from rlperf.calibrate.tables import Row, Table
from rlperf.calibrate.validate import PredictedFigure, each_row
from rlperf.calibrate.validate_inference import predict_case
from rlperf.errors import SpecError
from rlperf.specs.calibration import (
    DeviceCalibration,
    EngineCalibration,
    load_device_calibration,
    load_engine_calibration,
)
from rlperf.specs.hardware import at_published_rates
from rlperf.specs.profiles import load_device

LEAST = 4
"""Rows that a fit of three constants needs at least."""
POOLED = "calibration rows of all other engines"
REDUCED = "calibration rows outside the group that is left out"


def predict_groups(path: Path, table: Table, by: str) -> list[LeftOutGroup]:
    """Every group of served rows, as shipped and with constants that none of its rows entered."""
    table.need(*NEEDED)
    fits = Refits(table)
    names = sorted({served_group(case.row, by) for case in fits.cases} - {""})
    return [one for one in (fits.without(by, name) for name in names) if one.left_out]


def served_group(row: Row, by: str) -> str:
    """The group of a served row; a release is an engine with the first two numbers of its version.

    >>> served_group(Row("r", "g", 1, {"engine": "trtllm", "engine_version": "1.2.0rc6.post2"}), "version")
    'trtllm 1.2'
    """
    name = group_of(row, by, "engine", "engine_version")
    if by != "version" or not name:
        return name
    version = row.text("engine_version")
    found = re.match(r"\d+\.\d+", version)
    return f"{row.text('engine')} {found.group() if found else version.split('-')[0]}"


class Refits:
    """The rows of a table, which of them fits may see, and fits without a group; equal fits are done once."""

    def __init__(self, table: Table) -> None:
        self._costs = CostTable()
        self.cases: list[ServingCase] = []
        self._shipped: dict[tuple[str, str], PredictedFigure] = {}
        for one in each_row(table, self._read).predictions:
            self._shipped[one.row_id, one.metric] = one
        by_engine: dict[str, list[Measured]] = {}
        for case in self.cases:
            by_engine.setdefault(case.engine.id, []).extend(measured_of(case))
        self._allowed: list[Measured] = []
        for rows in by_engine.values():
            listed = [one for one in rows if one[0].row.row_id in one[0].engine.overhead.row_ids]
            split = listed or split_of(rows)
            # what was too little for a fit has constants by judgement: nothing of it was seen
            self._allowed += split if len(split) >= LEAST else []
        self._seen = {case.row.row_id for case, _, _ in self._allowed}
        self._seen |= {row for case in self.cases for row in case.hardware.calibration.served_rows}
        self._fits: dict[tuple[bool, frozenset[str]], EngineCalibration] = {}

    def _read(self, row: Row) -> list[PredictedFigure]:
        case = case_of(row)
        found = predict_case(case, self._costs)
        self.cases.append(case)
        return found

    def without(self, by: str, name: str) -> LeftOutGroup:
        """Predictions of a group's unseen rows with constants that none of its rows entered."""
        held = [case for case in self.cases if served_group(case.row, by) == name]
        kept = [one for one in self._allowed if served_group(one[0].row, by) != name]
        borrowed: list[str] = []
        constants: dict[str, DeviceCalibration] = {}
        if by == "device":
            constants = _relative(held[0], borrowed)
        engines: dict[str, EngineCalibration] = {}
        for case in {one.engine.id: one for one in held}.values():
            engines[case.engine.id] = self._engine(case.row, case.engine, kept, borrowed)
        costs = CostTable() if constants else self._costs  # tables are kept by the names of devices
        left = [
            figure
            for case in held
            if case.row.row_id not in self._seen
            for figure in predict_case(case_of(case.row, engines, constants), costs)
            if figure.metric != "ttft_ms" or not figure.used_in_calibration  # those that fitted `front_end`
        ]
        saw = [one.row_id for one in left if one.used_in_calibration]
        if saw:
            raise AssertionError(f"{saw[0]} was fitted although {by} {name} is left out")
        seen = tuple(self._shipped[one.row_id, one.metric] for one in left)
        in_fit = len({case.configuration for case in held if case.row.row_id in self._seen})
        return LeftOutGroup(name, in_fit, seen, tuple(left), "; ".join(borrowed))

    def _engine(
        self, row: Row, engine: EngineCalibration, kept: Sequence[Measured], borrowed: list[str]
    ) -> EngineCalibration:
        """The profile as it would be without the rows that are not kept: its own fit, a less exact one's, the pool's.

        A version without rows of its own is served by its engine's profile, settings included, as one that nobody
        measured is. An engine without any keeps its settings and takes overheads that are fitted to all other engines.
        """
        before = sum(one[0].engine.id == engine.id for one in self._allowed)
        own = [one for one in kept if one[0].engine.id == engine.id]
        if len(own) == before:
            return engine  # nothing of it is left out: the shipped constants never saw the group
        if len(own) >= LEAST:
            return self._fit(own, engine, pooled=False)
        parent = _less_exact(row, engine)
        if parent is not None and any(one[0].engine.id == parent.id for one in kept):
            borrowed.append(f"{_name(engine)}: {_name(parent)}")
            return self._engine(row, parent, kept, borrowed)
        if len(kept) < LEAST:
            raise SpecError(f"without the rows left out, {len(kept)} are left to fit {engine.id} to")
        borrowed.append(f"{_name(engine)}: overheads of the other engines")
        return self._fit(kept, engine, pooled=True)

    def _fit(self, cases: Sequence[Measured], engine: EngineCalibration, *, pooled: bool) -> EngineCalibration:
        key = (pooled, frozenset(case.row.row_id for case, _, _ in cases))
        if key not in self._fits:
            # how far an engine's rows lie from constants of others is what a pool's interval must hold
            fitted = (
                fit_cases(
                    cases, engine, rows=POOLED, costs=self._costs,
                    unit=lambda case: case.engine.id, rule="one engine profile left out in turn",
                )
                if pooled
                else fit_cases(cases, engine, rows=REDUCED, costs=self._costs)
            )  # fmt: skip
            self._fits[key] = fitted.engine
        found = self._fits[key]
        overhead = found.overhead.model_copy(update={"interference": engine.overhead.interference})
        return engine.model_copy(update={"overhead": overhead, "spread_extrapolated": found.spread_extrapolated})


def _name(engine: EngineCalibration) -> str:
    return re.sub(r"-\d{4}-\d\d-\d\d$", "", engine.id)


def _relative(case: ServingCase, borrowed: list[str]) -> dict[str, DeviceCalibration]:
    """A device's relative's constants in place of its own; nothing where it stands on a relative's anyway."""
    device, own = case.hardware.device, case.hardware.calibration
    borrowed.append(f"kernels of {own.extrapolated_from or device.relative or device.name}")
    if own.extrapolated or device.relative is None:
        return {}
    lent = load_device_calibration(device.relative).borrowed_by(device.name)
    return {device.name: at_published_rates(lent, device, load_device(device.relative))}


def _less_exact(row: Row, engine: EngineCalibration) -> EngineCalibration | None:
    """The profile that would serve a row if its engine's version had none of its own: vllm for vllm-0.12."""
    parts = row.text("engine_version").split(".")
    names = [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
    chain = {one.id: one for one in (load_engine_calibration(row.text("engine"), name or None) for name in names)}
    after = list(chain)[list(chain).index(engine.id) + 1 :]
    return chain[after[0]] if after else None
