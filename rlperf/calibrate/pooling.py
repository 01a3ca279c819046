r"""Partial pooling: constants that many groups of rows share, each group's own share as large as its rows prove.

The logarithms of the constants behind a row are those of the pool plus an effect of each group that the row is in
(its engine, its release, its device, ...),

.. math::

    \ln\theta_{ip} = \mu_p + \sum_k u_{k\,g_k(i)\,p},\quad u_{kgp} \sim N(0, \tau_{kp}^2),\quad
    \ln y_i = f_i(\ln\theta_i) + c_{j(i)} + \epsilon_i,

with c_j ~ N(0, \sigma_c^2) what the rows of one configuration have in common and no constant says, so that a hundred
rows of one configuration count as one where they repeat it. How far groups of a kind differ (tau) is estimated from the
rows themselves by expectation and maximisation (Dempster, Laird, Rubin 1977; Laird and Ware 1982); rows far off
count by Student's t (Lange, Little, Taylor 1989). f is followed along tangents (Gauss-Newton, each step damped until
the penalised misfit falls). What a group's rows cannot tell stays at the pool's value: its posterior spread is then
that of the prior.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.layout import BoolArray, FloatArray, IntArray

Predict = Callable[[FloatArray], FloatArray]
"""ln of what was measured ``[rows]``, from the logarithms of the constants of every row ``[rows, constants]``."""

FREEDOM = 4.0
"""Degrees of freedom of Student's t: rows off by many sigmas count linearly at most."""
STEP = 0.1
"""Step of the difference quotients, in the logarithm of a constant."""
LEAST = 0.01
"""No standard deviation falls below this: a kind of few groups has no evidence for none."""
THOUGHT = 0.05
"""A group more, imagined to differ by this much, keeps deviations of kinds with few groups from collapsing."""


@dataclass(frozen=True)
class Constant:
    """One constant: what is believed of it without a row, and how firmly (standard deviation of its logarithm)."""

    name: str
    start: float
    spread: float


@dataclass(frozen=True)
class Kind:
    """One way to group rows: which constants differ between its groups, and by how much (sd of ln) at ``most``."""

    name: str
    constants: tuple[str, ...]
    most: float = 0.5


@dataclass(frozen=True, eq=False)
class Levels:
    """The groups of a kind with their effects, ``[groups, constants]`` as `Kind.constants`.

    Attributes
    ----------
    kind : which
    names : of the groups, sorted
    effect, spread : posterior mean and standard deviation in the logarithm
    between : standard deviation between groups, which is also that of a group nobody has seen ``[constants]``
    rows : rows of every group that the fit saw ``[groups]``
    """

    kind: Kind
    names: tuple[str, ...]
    effect: FloatArray
    spread: FloatArray
    between: FloatArray
    rows: IntArray


@dataclass(frozen=True, eq=False)
class Pooled:
    """A fit: the pool's constants, every kind's groups, and what is left.

    Attributes
    ----------
    constants, mean : ``[constants]`` logarithms of the pool's values
    levels : by the name of the kind
    unit, noise : standard deviation of ln between configurations and within one, by stratum
    covariance : posterior, of ``mean`` and then of every kind's effects ``[effects, effects]``
    """

    constants: tuple[Constant, ...]
    mean: FloatArray
    levels: Mapping[str, Levels]
    unit: Mapping[str, float]
    noise: Mapping[str, float]
    covariance: FloatArray

    def logs(self, labels: Mapping[str, Sequence[str]], count: int) -> FloatArray:
        """Logarithms of the constants of rows ``[rows, constants]``; a group nobody fitted has the pool's values."""
        found = np.tile(self.mean, (count, 1))
        for name, level in self.levels.items():
            columns, index = _columns(self.constants, level.kind), _indices(level.names, labels[name])
            found[:, columns] += _padded(level.effect)[index]
        return found

    def variance(self, labels: Mapping[str, Sequence[str]], slopes: FloatArray) -> FloatArray:
        r"""Variance of ln predicted, from what rows leave open of the constants ``[rows]``.

        .. math:: a^T \Sigma a + \sum_k \sum_p s_p^2 \tau_{kp}^2

        a the slopes s over the effects of a row, the sum over kinds of whose groups a row's is none that was fitted.

        Parameters
        ----------
        slopes : of ln predicted over the logarithm of every constant ``[rows, constants]``
        """
        every, parts, strange = np.arange(len(slopes)), [slopes], np.zeros(len(slopes))
        for name, level in self.levels.items():
            columns, index = _columns(self.constants, level.kind), _indices(level.names, labels[name])
            part = np.zeros((len(slopes), len(level.names), len(columns)))
            part[every[index >= 0], index[index >= 0]] = slopes[index >= 0][:, columns]
            parts.append(part.reshape(len(slopes), -1))
            unknown = (index < 0) & (np.asarray(labels[name]) != "")
            strange += unknown * (slopes[:, columns] ** 2 @ level.between**2)
        over = np.hstack(parts)
        return np.asarray(np.einsum("ij,jk,ik->i", over, self.covariance, over) + strange)


def _columns(constants: Sequence[Constant], kind: Kind) -> IntArray:
    names = [one.name for one in constants]
    return np.asarray([names.index(name) for name in kind.constants], dtype=np.int64)


def _indices(names: Sequence[str], labels: Sequence[str]) -> IntArray:
    """Place of every label, -1 where a row says nothing (empty) or names a group that is not there."""
    place = {name: index for index, name in enumerate(names)}
    return np.asarray([place.get(label, -1) for label in labels], dtype=np.int64)


def _padded(effect: FloatArray) -> FloatArray:
    """Effects with those of no group at the end, where index -1 finds them."""
    return np.vstack([effect, np.zeros((1, effect.shape[1]))])


@dataclass(frozen=True, eq=False)
class Rows:
    """What a fit is made of; ``labels`` by kind, ``units`` the configurations, ``strata`` rows of one kind of noise.

    ``moved`` predicts with one constant after the other larger by `STEP` ``[rows, constants]``, where that is quicker
    in one call than in as many as there are constants.
    """

    predict: Predict
    measured: FloatArray
    constants: tuple[Constant, ...]
    kinds: tuple[Kind, ...]
    labels: Mapping[str, Sequence[str]]
    units: Sequence[str]
    strata: Sequence[str]
    moved: Predict | None = None

    @property
    def start(self) -> FloatArray:
        """Logarithms of what is believed without a row ``[rows, constants]``."""
        return np.tile(np.log([one.start for one in self.constants]), (len(self.measured), 1))

    def slopes(self, logs: FloatArray) -> FloatArray:
        """Slope of ln predicted over the logarithm of each constant ``[rows, constants]``."""
        value = self.predict(logs)
        if self.moved is not None:
            return np.asarray((self.moved(logs) - value[:, None]) / STEP)
        found = np.empty_like(logs)
        for column in range(logs.shape[1]):
            moved = logs.copy()
            moved[:, column] += STEP
            found[:, column] = (self.predict(moved) - value) / STEP
        return found


class _Design:
    """Where every effect stands in one vector, and the sums over configurations."""

    def __init__(self, rows: Rows, seen: BoolArray) -> None:
        self.rows, self.seen, self.first = rows, seen, len(rows.constants)
        self.names = {one.name: tuple(sorted(set(rows.labels[one.name]) - {""})) for one in rows.kinds}
        self.index = {one.name: _indices(self.names[one.name], rows.labels[one.name]) for one in rows.kinds}
        self.columns = {one.name: _columns(rows.constants, one) for one in rows.kinds}
        self.slices: dict[str, slice] = {}
        end = self.first
        for one in rows.kinds:
            begin, end = end, end + len(self.names[one.name]) * len(one.constants)
            self.slices[one.name] = slice(begin, end)
        self.size = end
        _, units = np.unique(np.asarray(rows.units)[seen], return_inverse=True)
        self.units = np.asarray(units, dtype=np.int64)
        self.strata, stratum = np.unique(np.asarray(rows.strata)[seen], return_inverse=True)
        self.stratum = np.asarray(stratum, dtype=np.int64)
        self.order = np.argsort(self.units, kind="stable")
        self.breaks = np.flatnonzero(np.diff(self.units[self.order], prepend=-1))
        self.unit_stratum = self.stratum[self.order][self.breaks]

    def per_unit(self, values: FloatArray) -> FloatArray:
        """Sums over the rows of every configuration."""
        return np.asarray(np.add.reduceat(values[self.order], self.breaks, axis=0))

    def matrix(self, slopes: FloatArray) -> FloatArray:
        """Slopes over all effects of the rows seen ``[seen, effects]``."""
        found = np.zeros((len(slopes), self.size))
        found[:, : self.first] = slopes
        every = np.arange(len(slopes))
        for name, place in self.slices.items():
            columns, index = self.columns[name], self.index[name]
            within = every[index >= 0]
            for offset, column in enumerate(columns):
                found[within, place.start + index[within] * len(columns) + offset] = slopes[within, column]
        return found[self.seen]

    def effects(self, name: str, vector: FloatArray) -> FloatArray:
        """One kind's part of a vector of effects ``[groups, constants]``."""
        return vector[self.slices[name]].reshape(len(self.names[name]), len(self.columns[name]))

    def logs(self, vector: FloatArray) -> FloatArray:
        """Logarithms of the constants of every row."""
        found = self.rows.start + vector[: self.first]
        for name, columns in self.columns.items():
            index = self.index[name]
            found[:, columns] += _padded(self.effects(name, vector))[index]
        return found


@dataclass(eq=False)
class _Scales:
    """Standard deviations while they are being estimated, and the weight of every row seen."""

    between: dict[str, FloatArray]
    unit: FloatArray
    noise: FloatArray
    weight: FloatArray


TURNS = 8
"""Tangents that a fit follows at most."""


def fit_pool(rows: Rows, seen: BoolArray | None = None) -> Pooled:
    """Constants of the pool and of every group, from the rows that are ``seen`` (default: all).

    >>> rng = np.random.default_rng(0)
    >>> labels = [str(k) for k in range(40) for _ in range(20)]
    >>> truth = np.repeat(0.5 + 0.3 * rng.standard_normal(40), 20)
    >>> rows = Rows(
    ...     lambda logs: logs[:, 0], truth + 0.05 * rng.standard_normal(800), (Constant("a", 1.0, 1.0),),
    ...     (Kind("group", ("a",)),), {"group": labels}, [str(k) for k in range(800)], [""] * 800,
    ... )
    >>> found = fit_pool(rows)
    >>> bool(abs(found.mean[0] - 0.5) < 0.1), bool(0.2 < found.levels["group"].between[0] < 0.4)
    (True, True)
    """
    seen = np.ones(len(rows.measured), dtype=bool) if seen is None else seen
    design = _Design(rows, seen)
    scales = _first_scales(design)
    vector, idle = np.zeros(design.size), 0
    for _ in range(TURNS):
        logs = design.logs(vector)
        matrix = design.matrix(rows.slopes(logs))
        target = (rows.measured - rows.predict(logs))[seen] + matrix @ vector
        for _ in range(3):
            wanted, covariance = _solve(design, matrix, target, scales)
            _estimate(design, scales, wanted, covariance, target - matrix @ wanted)
        vector, gain = _advance(design, scales, vector, wanted, covariance)
        # one turn without gain may be a bend: the deviations have moved, and with them the next step
        idle = idle + 1 if gain < 1e-3 else 0
        if idle == 2:
            break
    return _pooled(design, scales, vector, covariance)


def _first_scales(design: _Design) -> _Scales:
    between = {one.name: np.full(len(one.constants), 0.5 * one.most) for one in design.rows.kinds}
    unit, noise = np.full(len(design.strata), 0.1), np.full(len(design.strata), 0.07)
    return _Scales(between, unit, noise, np.ones(int(design.seen.sum())))


def _precision(design: _Design, scales: _Scales) -> FloatArray:
    """1 / variance of every effect before a row is seen ``[effects]``."""
    parts = [np.asarray([one.spread**-2.0 for one in design.rows.constants])]
    for one in design.rows.kinds:
        parts.append(np.tile(np.maximum(scales.between[one.name], LEAST) ** -2.0, len(design.names[one.name])))
    return np.concatenate(parts)


def _common(design: _Design, scales: _Scales) -> tuple[FloatArray, FloatArray]:
    """Weight of every row, and by how much what a configuration has in common takes it back."""
    weight = scales.weight / scales.noise[design.stratum] ** 2
    variance = scales.unit[design.unit_stratum] ** 2
    return weight, variance / (1.0 + variance * design.per_unit(weight))


def _solve(design: _Design, matrix: FloatArray, target: FloatArray, scales: _Scales) -> tuple[FloatArray, FloatArray]:
    """Posterior mean and covariance of all effects along a tangent."""
    weight, shared = _common(design, scales)
    weighted = matrix * weight[:, None]
    sums = design.per_unit(weighted)
    system = matrix.T @ weighted - sums.T @ (sums * shared[:, None])
    system[np.diag_indices_from(system)] += _precision(design, scales)
    right = matrix.T @ (weight * target) - sums.T @ (shared * design.per_unit(weight * target))
    covariance = np.linalg.inv(system)
    return np.asarray(covariance @ right), np.asarray(covariance)


def _estimate(design: _Design, scales: _Scales, vector: FloatArray, covariance: FloatArray, left: FloatArray) -> None:
    """One turn of expectation and maximisation: deviations between groups, between configurations, within one."""
    weight, shared = _common(design, scales)
    common = shared * design.per_unit(weight * left)
    rest = left - common[design.units]
    scales.weight = (FREEDOM + 1.0) / (FREEDOM + (rest / scales.noise[design.stratum]) ** 2)
    variance = np.diag(covariance)
    for one in design.rows.kinds:
        present = np.zeros(len(design.names[one.name]), dtype=bool)
        index = design.index[one.name][design.seen]
        present[index[index >= 0]] = True
        squares = (design.effects(one.name, vector) ** 2 + design.effects(one.name, variance))[present]
        # 0.05 of one more group: so that a kind of one or two groups does not collapse to none
        found = np.sqrt((squares.sum(axis=0) + THOUGHT**2) / (len(squares) + 1))
        scales.between[one.name] = np.clip(found, LEAST, one.most)
    effective = float(len(vector) - (_precision(design, scales) * variance).sum())
    kept = max(1.0 - effective / len(left), 0.3)
    unit_variance = 1.0 / (scales.unit[design.unit_stratum] ** -2.0 + design.per_unit(weight))
    for stratum in range(len(design.strata)):
        mine, units = design.stratum == stratum, design.unit_stratum == stratum
        free = max(float(mine.sum()) * kept - 0.5 * float(units.sum()), 0.3 * float(mine.sum()))
        scales.noise[stratum] = max(np.sqrt(float((scales.weight * rest**2)[mine].sum()) / free), LEAST)
        if units.any():
            scales.unit[stratum] = max(np.sqrt(float((common**2 + unit_variance)[units].mean())), LEAST)


DAMPING = (0.0, 0.1, 1.0, 10.0, 100.0)
"""Shares of an effect's own precision that hold a step back, tried in turn (Levenberg 1944, Marquardt 1963)."""
REACH = 1.5
"""No effect moves further in one step, in the logarithm."""


def _advance(
    design: _Design, scales: _Scales, vector: FloatArray, wanted: FloatArray, covariance: FloatArray
) -> tuple[FloatArray, float]:
    """A step towards ``wanted``, damped until the penalised misfit falls, and by what share that fell.

    Damped steps lead down however strongly effects hang together, where a step cut effect by effect need not: what two
    of them do to each other is lost.
    """
    weight, shared = _common(design, scales)
    prior = _precision(design, scales)

    def misfit(at: FloatArray) -> float:
        left = (design.rows.measured - design.rows.predict(design.logs(at)))[design.seen]
        sums = design.per_unit(weight * left)
        return float((weight * left**2).sum() - (shared * sums**2).sum() + (prior * at**2).sum())

    before, step = misfit(vector), wanted - vector
    precision = np.linalg.inv(covariance)
    for damping in DAMPING:
        held = precision + damping * np.diag(np.diag(precision))
        candidate = vector + np.clip(np.linalg.solve(held, precision @ step), -REACH, REACH)
        after = misfit(candidate)
        if after < before:
            return candidate, (before - after) / max(before, 1e-12)
    return vector, 0.0


def _pooled(design: _Design, scales: _Scales, vector: FloatArray, covariance: FloatArray) -> Pooled:
    spread = np.sqrt(np.diag(covariance))
    levels = {}
    for one in design.rows.kinds:
        index = design.index[one.name][design.seen]
        count = np.bincount(index[index >= 0], minlength=len(design.names[one.name]))
        effect, wide = design.effects(one.name, vector), design.effects(one.name, spread)
        levels[one.name] = Levels(one, design.names[one.name], effect, wide, scales.between[one.name], count)
    mean = np.log([one.start for one in design.rows.constants]) + vector[: design.first]
    by_stratum = [str(name) for name in design.strata]
    unit = dict(zip(by_stratum, scales.unit.tolist(), strict=True))
    noise = dict(zip(by_stratum, scales.noise.tolist(), strict=True))
    return Pooled(design.rows.constants, np.asarray(mean), levels, unit, noise, covariance)


def left_out(rows: Rows, groups: Sequence[str], whole: Pooled) -> tuple[FloatArray, dict[str, Pooled]]:
    """ln predicted of every row by a fit that saw no row of its group ``[rows]``, and the fit without each group.

    Every fit begins at what is believed without a row and takes nothing from another. Rows without a group (empty)
    are predicted by ``whole``.
    """
    names, fits = np.asarray(groups), {}
    result = rows.predict(whole.logs(rows.labels, len(names)))
    for name in sorted(set(groups) - {""}):
        held = names == name
        fits[name] = fit_pool(rows, ~held)
        result[held] = rows.predict(fits[name].logs(rows.labels, len(names)))[held]
    return result, fits
