"""Constants of all engines at once, partially pooled: what an engine, a release, a device or a family shows of its own.

The pool holds the host's times (per engine_step, layer, expert layer, running request) and knows that kernels take as
long in an engine as alone; engines differ in their times. On everything an engine_step takes there is a factor of its
release, device and family, of engine and device, engine and family, of a *path* (an engine's kernels for a family in a
dtype on a device) and of a *cell* (a path in a release, one architecture). Runs that publish nothing but a throughput
have one more, by how they ran, engine and device, so that what they take longer, whatever the reason, does not move
what times per token share. Each is as large as its rows prove
(`rlperf.calibrate.pooling`); what nobody has served takes the pool's, and its interval what leaving such groups out has
cost. ``rlperf calibrate serving ROWS --out FOLDER`` writes the profiles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from rlperf.calibrate.pooling import Constant, Kind, Levels, Pooled, Rows, fit_pool, left_out
from rlperf.calibrate.serving.rows import CostTable, ServingCase
from rlperf.calibrate.serving.stack import CONSTANTS, Measured, ServingStack
from rlperf.calibrate.statistics import absolute_percentage_errors, weighted_quantile
from rlperf.calibrate.tables import split_rank
from rlperf.cost.parameters import parameters
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.calibration import Quality, Spread
from rlperf.specs.engine_calibration import (
    EngineCalibration,
    EngineOverhead,
    Grouped,
    GroupFactor,
    LoadKind,
    ServingSpread,
    load_kind,
)

FOLDS = 6
"""Parts that the configurations are cut into: each row is predicted by a fit of the five that it is not in."""
BELIEVED = (
    Constant("step", 100e-6, 0.5),
    Constant("per_layer", 6e-6, 0.5),
    Constant("per_expert_layer", 6e-6, 0.5),
    Constant("per_request", 10e-6, 0.5),
    Constant("uncaptured", 300e-6, 0.5),
    Constant("factor", 1.0, 0.03),
)
"""What is believed of the pool without a row: hosts of today's engines, and kernels that take as long as alone."""
KINDS = (
    Kind("engine", ("per_layer", "per_expert_layer", "per_request", "uncaptured"), 0.5),
    Kind("release", ("factor",), 0.3),
    Kind("device", ("factor",), 0.3),
    Kind("family", ("factor",), 0.3),
    Kind("engine_device", ("factor",), 0.3),
    Kind("engine_family", ("factor",), 0.3),
    Kind("path", ("factor",), 0.3),
    Kind("cell", ("factor",), 0.3),
    Kind("throughput", ("factor",), 0.3),
)
RULE = f"configurations in {FOLDS} parts, by hash of their text: each predicted by a fit of the others"


@dataclass(frozen=True, eq=False)
class ServingRows:
    """Measured rows with the stack that predicts them and the pool's view of them."""

    cases: tuple[Measured, ...]
    stack: ServingStack
    rows: Rows

    @classmethod
    def of(cls, cases: Sequence[Measured], costs: CostTable | None) -> ServingRows:
        """From cases with their primary metrics."""
        stack = ServingStack(cases, costs or CostTable())

        def predict(logs: FloatArray) -> FloatArray:
            return np.asarray(np.log(stack.predicted(constants_of(logs))))

        labels = [labels_of(case) for case, _, _ in cases]
        rows = Rows(
            predict,
            np.log(stack.measured),
            BELIEVED,
            KINDS,
            {kind.name: [one[kind.name] for one in labels] for kind in KINDS},
            [f"{configuration_of(case)}|{case.engine.release}" for case, _, _ in cases],
            ["time per token" if metric == "tpot_ms" else "throughput" for _, metric, _ in cases],
        )
        return cls(tuple(cases), stack, rows)

    @property
    def folds(self) -> list[str]:
        """The part of every row, see `FOLDS`."""
        return [fold_of(case) for case, _, _ in self.cases]


def constants_of(logs: FloatArray) -> FloatArray:
    """Trial constants of a stack ``[rows, CONSTANTS]`` from those of a fit: the factor is on kernels and host alike."""
    values = np.exp(logs)
    return np.column_stack([values[:, :-1] * values[:, -1:], values[:, -1]])


def fold_of(case: ServingCase) -> str:
    """The part of the configurations that a row is in, see `FOLDS`; one shape under two names is in one part."""
    shape = f"{case.arch.family} {parameters(case.arch)}"
    text = configuration_of(case).replace(f"|{case.arch.name}|", f"|{shape}|")
    return f"part {split_rank(text) % FOLDS + 1}"


def configuration_of(case: ServingCase) -> str:
    """The configuration in words that no refit changes: profiles carry their date in their id."""
    return re.sub(r"-\d{4}-\d\d-\d\d(?=\|)", "", case.configuration)


def labels_of(case: ServingCase) -> dict[str, str]:
    """The group of a row, by kind: those of `EngineCalibration.groups`, each of its engine."""
    engine, device, family = case.engine.engine, case.hardware.device.name, case.arch.family
    groups = case.engine.groups(device, family, case.arch.name, case.gemm_dtype, case.throughput)
    return {
        "engine": engine,
        "release": f"{engine} {groups['release']}" if groups["release"] else "",
        "device": device,
        "family": family,
        "engine_device": f"{engine} {device}",
        "engine_family": f"{engine} {family}",
        "path": f"{engine} {groups['path']}",
        "cell": f"{engine} {groups['cell']}",
        "throughput": f"{engine} {groups['throughput']}" if groups["throughput"] else "",
    }


def profiles_of(
    pooled: Pooled, served: ServingRows, seen: BoolArray, profiles: Sequence[EngineCalibration]
) -> dict[str, EngineCalibration]:
    """Profiles with the constants of a fit that saw some of the rows, by id; their intervals stay as they are."""
    return {one.id: _profile(pooled, served, seen, one) for one in profiles}


def _profile(pooled: Pooled, served: ServingRows, seen: BoolArray, profile: EngineCalibration) -> EngineCalibration:
    name = profile.engine
    logs = pooled.logs({kind.name: [name if kind.name == "engine" else ""] for kind in KINDS}, 1)[0]
    values = np.exp(logs)
    mine = [case for (case, _, _), one in zip(served.cases, seen, strict=True) if one and case.engine.id == profile.id]
    before = profile.overhead
    overhead = EngineOverhead.model_validate(
        {
            **{key: f"{values[place] * values[-1] * 1e6:.4g} us" for place, key in enumerate(CONSTANTS[:-1])},
            "kernel_scale": round(float(values[-1]), 4),
            "per_spread_layer": f"{before.per_spread_layer * 1e6:.4g} us",
            "row_ids": tuple(sorted(case.row.row_id for case in mine)),
            "quality": before.quality,
        }
    )
    factors = tuple(one for kind in get_args(Grouped) for one in _factors(pooled.levels, kind, name))
    return profile.model_copy(update={"overhead": overhead, "factors": factors, "release": ""})


BESIDE = {"device": "engine_device", "family": "engine_family"}
"""Kinds that an engine has an effect of its own on, beside that of all engines."""


def _factors(levels: Mapping[str, Levels], kind: Grouped, engine: str) -> list[GroupFactor]:
    """Factors of one kind as an engine's profile holds them: the effect of all engines and its own, added up."""
    level = levels[kind]
    own = levels.get(BESIDE.get(kind, ""))
    beside = levels["cell"] if kind == "path" else own  # a path that nobody served has no cell either
    between = float(np.hypot(level.between[0], beside.between[0] if beside is not None else 0.0))
    found = [GroupFactor(kind=kind, group="", spread=round(between, 4))]
    for name, log, spread, rows in zip(level.names, level.effect[:, 0], level.spread[:, 0], level.rows, strict=True):
        group = name
        if own is None:
            if not name.startswith(f"{engine} "):
                continue
            group = name.removeprefix(f"{engine} ")
        elif f"{engine} {name}" in own.names:
            place = own.names.index(f"{engine} {name}")
            log, spread = log + own.effect[place, 0], np.hypot(spread, own.spread[place, 0])
        elif rows:
            spread = np.hypot(spread, own.between[0])
        if rows:
            found.append(
                GroupFactor(
                    kind=kind, group=group, log=round(float(log), 4), spread=round(float(spread), 4), rows=int(rows)
                )
            )
    return found


def fit_serving(served: ServingRows, profiles: Sequence[EngineCalibration], file: str) -> dict[str, EngineCalibration]:
    """Every engine fitted to all rows; intervals from the rows predicted without their configuration."""
    rows = served.rows
    pooled = fit_pool(rows)
    logs = pooled.logs(rows.labels, len(rows.measured))
    inside, first = rows.predict(logs), served.stack.first_tokens_s(constants_of(logs))
    apart, _ = left_out(rows, served.folds, pooled)
    seen = np.ones(len(rows.measured), dtype=bool)
    spread = spread_served(served, apart)
    return {
        name: _with_quality(one, served, inside, apart, file).model_copy(
            update={"spread_served": spread, **first_token_spread(one, served, first)}
        )
        for name, one in profiles_of(pooled, served, seen, profiles).items()
    }


def spread_served(served: ServingRows, apart: FloatArray) -> ServingSpread | None:
    """Half the interval of every kind of load, from times per token predicted without their configuration ``apart``.

    From rows whose kernels all have tables; by how much the others miss more is a factor. Not from rows that the
    constants of their device were told from: no prediction of these is without them. A kind of fewer than `LEAST` rows
    has that of all; None where these are as few.
    """
    told = [case.row.row_id in case.hardware.calibration.served_rows for case, _, _ in served.cases]
    timed = served.stack.per_token & ~np.asarray(told)
    if timed.sum() < LEAST:
        return None
    cases = [case for (case, _, _), one in zip(served.cases, timed, strict=True) if one]
    missed = np.abs(served.rows.measured - apart)[timed]
    kinds = np.asarray([load_kind(case.expert > 1, case.closed_loop) for case in cases])
    weight, every = evenly([configuration_of(case) for case in cases]), np.ones(len(cases), dtype=bool)
    beyond = np.asarray([not case.covered for case in cases])

    def most(values: FloatArray, *parts: BoolArray) -> float:
        """What nine of ten rows are at most, of the first part that has enough of them."""
        chosen = next(one for one in (*parts, every) if one.sum() >= LEAST)
        return weighted_quantile(values[chosen], weight[chosen], 0.9)

    halves = {
        kind: round(max(most(missed, (kinds == kind) & ~beyond, kinds == kind), NARROWEST), 4)
        for kind in get_args(LoadKind)
    }
    share = missed / np.asarray([halves[kind] for kind in kinds])
    other = kinds == "other_loads"
    wider = [round(max(most(share, beyond & kind, beyond), 1.0), 3) for kind in (~other, other)]
    return ServingSpread(**halves, extrapolated=wider[0], extrapolated_other=wider[1], rows=len(cases))


def first_token_spread(engine: EngineCalibration, served: ServingRows, first_s: FloatArray) -> dict[str, Spread]:
    """`EngineCalibration.spread_first_token`, as an update, from what the engine's rows saw and ``first_s`` [s].

    No fit enters first tokens of closed loops, so that their rows need not be left out. Nothing where few say them.
    """
    ratio = np.asarray([
        float(np.log(1e-3 * measured / predicted))
        for (case, _, _), predicted in zip(served.cases, first_s, strict=True)
        if case.closed_loop and not case.repeated and case.engine.engine == engine.engine
        and (measured := case.row.number("measured_ttft_ms"))
    ])  # fmt: skip
    if len(ratio) < LEAST:
        return {}
    low, high = np.exp(np.quantile(ratio, [0.05, 0.95]))
    return {
        "spread_first_token": Spread(low=round(min(float(low), SURE), 3), high=round(max(float(high), 1 / SURE), 3))
    }


SURE = 0.95
"""No interval of first tokens is narrower on either side: where all rows of an engine are off to one side, so is most
of it, and what is predicted stays inside."""
NARROWEST = 0.02
"""Half of the narrowest interval, in the logarithm: runs of one load, measured twice, differ by so much."""


def evenly(configurations: Sequence[str]) -> FloatArray:
    """Weights with which each configuration counts like the root of its rows ``[rows]``.

    >>> evenly(["a", "a", "a", "a", "b"]).tolist()
    [0.5, 0.5, 0.5, 0.5, 1.0]
    """
    _, place, count = np.unique(np.asarray(configurations), return_inverse=True, return_counts=True)
    return np.asarray(count[place] ** -0.5)


LEAST = 40
"""Rows of a profile from which its own residuals are its interval; with fewer it has that of all rows of its engine."""


def _with_quality(
    engine: EngineCalibration, served: ServingRows, inside: FloatArray, apart: FloatArray, file: str
) -> EngineCalibration:
    """The profile with its errors and the 5th and 95th percentile of measured over predicted."""
    mine = np.asarray([case.engine.id == engine.id for case, _, _ in served.cases])
    if not mine.any():
        return engine
    near = mine if mine.sum() >= LEAST else np.asarray([c.engine.engine == engine.engine for c, _, _ in served.cases])
    near = near if near.sum() >= LEAST else np.ones(len(near), dtype=bool)
    timed = served.stack.per_token
    measured = np.exp(served.rows.measured)
    covered = np.asarray([case.covered for case, _, _ in served.cases])
    errors = [absolute_percentage_errors(np.exp(one), measured)[mine] for one in (inside, apart)]

    every = np.ones_like(timed)

    def spread(part: BoolArray, kind: BoolArray) -> Spread:
        wider = (near & part & kind, near & kind, kind, every)
        chosen = next(one for one in wider if one.sum() >= LEAST or one is every)
        ratio = (served.rows.measured - apart)[chosen]
        # of n rows the quantile of n + 1: what split conformal prediction asks for
        share = 0.05 * len(ratio) / (len(ratio) + 1.0)
        low, high = np.exp(np.quantile(ratio, [share, 1.0 - share]))
        return Spread(low=round(float(low), 3), high=round(float(high), 3))

    quality = Quality(
        n=int(mine.sum()),
        in_sample_mape=round(float(errors[0].mean()), 2),
        left_out_mape=round(float(errors[1].mean()), 2),
        left_out_rule=RULE,
        rows=f"{file}: every row that can be predicted, all engines in one fit",
        spread=spread(covered, timed),
    )
    overhead = engine.overhead.model_copy(update={"quality": quality})
    return engine.model_copy(
        update={
            "overhead": overhead,
            "spread_extrapolated": spread(~covered, timed),
            "spread_throughput": spread(every, ~timed),
        }
    )
