"""Acceptance of drafted tokens, fitted to published curves (rows of ``measured/speculation.csv``).

A curve is what one model with one head accepts for every number of drafts. All curves of a method share by how much
acceptance falls with depth; each has an acceptance of its first draft, brought to temperature 1 and averaged over
models, so that a model that was measured often counts once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np
import yaml

from rlperf.calibrate.tables import Row, Table
from rlperf.errors import SpecError
from rlperf.layout import FloatArray, IntArray
from rlperf.specs.calibration import Z95
from rlperf.specs.overhead import Provenance
from rlperf.specs.profiles import load_architecture
from rlperf.specs.speculation import Method, sees_far, tokens_per_step
from rlperf.specs.speculation_calibration import (
    AcceptanceFit,
    FrozenHead,
    SpeculationCalibration,
    load_speculation,
)

METHODS: tuple[tuple[str, Method], ...] = ((r"^MTP", "mtp"), (r"^EAGLE-?3", "eagle3"), (r"n-?gram", "ngram"))
"""Methods by the beginning of what a row calls them; others (DSpark, EAGLE-2) are nobody's here."""
FIRST, FALLS = np.linspace(0.2, 1.0, 321), np.linspace(0.6, 1.0, 161)
"""Where acceptance of the first draft and its fall with depth are looked for [1]."""
USUAL = 3
"""Drafts at which the spread between models and tasks is told."""
ONE_CURVE = 0.2
"""Spread of ln tokens of a method of which there is one curve: more than curves of the others differ by [1]."""
TAIL = "long-tail tokens/s"
"""Metric of rows that tell what a head loses that is not trained with its policy."""


@dataclass(frozen=True, eq=False)
class AcceptanceCurve:
    """Tokens per engine_step of one model and head by number of drafts ``[points]``, at a temperature of sampling.

    ``far``: the head was trained to draft several tokens in a row (`sees_far`).
    """

    method: Method
    model: str
    temperature: float
    drafts: IntArray
    tokens: FloatArray
    far: bool = True


def method_of(text: str) -> Method | None:
    """The method that a row names, None where it is none of ours.

    >>> method_of("MTP frozen"), method_of("EAGLE-3 (GQA draft)"), method_of("DSpark")
    ('mtp', 'eagle3', None)
    """
    return next((method for pattern, method in METHODS if re.search(pattern, text, re.IGNORECASE)), None)


def temperature_of(sampling: str) -> float:
    """Temperature that a row states, 1 where it states none.

    >>> temperature_of("thinking_on : temp 0.6 top_p 0.95"), temperature_of("thinking_on: temperature=1.0, x")
    (0.6, 1.0)
    """
    found = re.search(r"temp(?:erature)?\W{1,2}(\d+(?:\.\d+)?)", sampling)
    return float(found.group(1)) if found else 1.0


def curves_of(table: Table | Iterable[Row]) -> list[AcceptanceCurve]:
    """Curves of the rows of kind ``acceptance`` whose method rlperf knows."""
    points: dict[tuple[Method, str, str, str], list[tuple[int, float]]] = {}
    for row in table:
        method, length = method_of(row.text("method")), row.number("acceptance_length")
        if row.text("kind") != "acceptance" or method is None or length is None:
            continue
        key = (method, row.text("model"), row.text("method"), row.text("sampling"))
        points.setdefault(key, []).append((row.count("k"), length))
    found = []
    for (method, model, _, sampling), pairs in points.items():
        drafts, tokens = zip(*sorted(pairs), strict=True)
        at = temperature_of(sampling)
        found.append(AcceptanceCurve(method, model, at, np.array(drafts), np.array(tokens), far_of(method, model)))
    return found


def far_of(method: Method, model: str) -> bool:
    """Whether what drafts for a model by a method was trained to see far; a model that nobody knows counts as such."""
    if method != "mtp":
        return True
    try:
        arch = load_architecture(model)
    except SpecError:
        return True
    return sees_far(method, arch.family, arch.prediction_layers)


@dataclass(frozen=True)
class PooledAcceptance:
    """Acceptance of a method: first draft at temperature 1, fall with depth, spread of ln tokens over curves [1].

    ``falls_once``: the fall of heads that see one token ahead, None where no curve is of one.
    """

    first: float
    falls: float
    falls_once: float | None
    spread: float


def pool(curves: Sequence[AcceptanceCurve], slope: float) -> PooledAcceptance:
    """One method's curves together; ``slope``: by how much acceptance changes per unit of temperature [1].

    Heads that see far and those that do not share all but their fall with depth.
    """
    far = np.array([curve.far for curve in curves])
    off = np.array([_off(_tokens_table(), curve) for curve in curves])
    weight = np.array([1.0 / sum(other.model == curve.model for other in curves) for curve in curves])
    errors = weight[:, None] * off.min(axis=1)
    kinds = {kind: int(np.argmin(errors[far == kind].sum(axis=0))) for kind in (True, False) if (far == kind).any()}
    falls = np.array([kinds[curve.far] for curve in curves])
    first = np.array([FIRST[np.argmin(each[:, fall])] for each, fall in zip(off, falls, strict=True)])
    first = first - slope * np.array([curve.temperature - 1.0 for curve in curves])
    models = np.array([curve.model for curve in curves])
    pooled = float(np.mean([first[models == model].mean() for model in dict.fromkeys(models)]))
    yields = [tokens_per_step(a, float(FALLS[fall]), USUAL) for a, fall in zip(first.tolist(), falls, strict=True)]
    spread = float(np.std(np.log(yields), ddof=1)) if len(curves) > 1 else ONE_CURVE
    once = float(FALLS[kinds[False]]) if False in kinds else None
    return PooledAcceptance(pooled, float(FALLS[kinds.get(True, kinds.get(False, 0))]), once, spread)


def _tokens_table() -> FloatArray:
    """`tokens_per_step` over the grid ``[first, falls, k]``, k up to 16."""
    depth = np.arange(16, dtype=np.float64)
    each = FIRST[:, None, None] * FALLS[None, :, None] ** depth
    accepted = np.cumprod(each, axis=2).cumsum(axis=2)
    return np.concatenate([np.ones((len(FIRST), len(FALLS), 1)), 1.0 + accepted], axis=2)


def temperature_slope(curves: Sequence[AcceptanceCurve]) -> float:
    """Change of the first draft's acceptance per unit of temperature within methods, never upwards [1]."""
    table = _tokens_table()
    rows = []
    for method in sorted({curve.method for curve in curves}):
        own = [curve for curve in curves if curve.method == method]
        at = [float(FIRST[np.argmin(_off(table, curve).min(axis=1))]) for curve in own]
        heat = np.array([curve.temperature for curve in own])
        rows.append((heat - heat.mean(), np.array(at) - np.mean(at)))
    heat, first = (np.concatenate(part) for part in zip(*rows, strict=True))
    return min(float((heat * first).sum() / max((heat**2).sum(), 1e-9)), 0.0)


def _off(table: FloatArray, curve: AcceptanceCurve) -> FloatArray:
    return np.asarray(((np.log(table[:, :, curve.drafts]) - np.log(curve.tokens)) ** 2).mean(axis=2))


def fit_speculation(
    table: Table, *, without: str = "", name: str = "", base: SpeculationCalibration | None = None
) -> SpeculationCalibration:
    """Acceptance of every method with curves, and what a frozen head loses.

    Parameters
    ----------
    without : a model that is left out
    base : where methods without a curve, and a frozen head without its pair, are taken over from

    Notes
    -----
    The spread of costs stays as it is known: gains tell it (`rlperf.calibrate.speculation.gains.cost_spread`).
    """
    curves = [curve for curve in curves_of(table) if curve.model != without]
    if not curves:
        raise SpecError(f"{table.file}: no row of kind acceptance by a method that rlperf knows")
    slope, day = temperature_slope(curves), date.today().isoformat()
    fits = []
    for method in sorted({curve.method for curve in curves}):
        own = [curve for curve in curves if curve.method == method]
        found = pool(own, slope)
        models = ", ".join(sorted({curve.model for curve in own}))
        provenance = Provenance(
            source=f"{name or table.file}: curves of {models}, brought to temperature 1 by {slope:.3f} per unit",
            date=day, n=sum(len(curve.drafts) for curve in own),
            low=float(np.exp(-Z95 * found.spread)), high=float(np.exp(Z95 * found.spread)),
        )  # fmt: skip
        fits.append(
            AcceptanceFit(method=method, first=found.first, falls=found.falls, falls_once=found.falls_once,
                          spread=found.spread, provenance=provenance)
        )  # fmt: skip
    told = {fit.method for fit in fits}
    fits += [fit for fit in base.acceptance if fit.method not in told] if base else []
    frozen = _frozen(table, name, day, base)
    cost = (base or load_speculation()).cost
    return SpeculationCalibration(id=f"speculation-{day}", acceptance=tuple(fits), frozen=frozen, cost=cost)


def _frozen(table: Table, name: str, day: str, base: SpeculationCalibration | None) -> FrozenHead:
    """Tokens per second of a frozen head over those of a trained one, where the batch is one request."""
    tails = {row.text("method"): row.number("with_spec") for row in table if row.text("metric") == TAIL}
    frozen = next((value for method, value in tails.items() if value and "frozen" in method), None)
    trained = next((value for method, value in tails.items() if value and "trained" in method), None)
    if base is not None and not (frozen and trained):
        return base.frozen
    if not frozen or not trained:
        raise SpecError(f"{table.file}: no pair of rows '{TAIL}' with a frozen and with a trained head")
    source = f"{name or table.file}: '{TAIL}' of MiMo-7B-RL, frozen over trained MTP; one pair, 3 drafts presumed"
    return FrozenHead(value=frozen / trained, provenance=Provenance(source=source, date=day, n=1, low=0.85, high=1.1))


def calibration_text(found: SpeculationCalibration) -> str:
    """YAML of the calibration."""
    data = found.model_dump(mode="json", exclude_defaults=True)
    for fit in data["acceptance"]:
        fit.update({key: round(fit[key], 4) for key in ("first", "falls", "falls_once", "spread") if key in fit})
    for each in (*data["acceptance"], data["frozen"], data["cost"]):
        each["provenance"].update({key: round(each["provenance"][key], 3) for key in ("low", "high")})
    for each in (data["frozen"], data["cost"]):
        each["value"] = round(each["value"], 4)
    body = yaml.safe_dump(data, sort_keys=False, width=118, allow_unicode=True)
    return f"# Speculative decoding, written by `rlperf calibrate speculation`.\n{body}"
