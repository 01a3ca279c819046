"""Every constant behind a prediction: its value, whether it was fitted, read or assumed, and where it is from."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import NamedTuple

from pydantic import BaseModel

from rlperf.plan.question.context import Context
from rlperf.specs.calibration import DeviceCalibration, Quality
from rlperf.specs.cluster import Cluster, Device
from rlperf.specs.engine_calibration import EngineCalibration
from rlperf.specs.overhead import Provenance
from rlperf.specs.rl_calibration import FrameworkCalibration
from rlperf.specs.trainer_calibration import TrainerCalibration

FITTED, READ, ASSUMED = "fitted", "read", "assumed"
META = ("source", "sources", "date", "notes", "provenance", "quality", "id", "name", "title", "aliases", "rows", "n",
        "row_ids", "configurations", "memory_configurations", "schema_version", "software", "spread",
        "spread_extrapolated", "spread_served", "spread_throughput", "spread_first_token", "release", "step_spread",
        "kernel", "extrapolated_from", "confidence", "capability",
        "relative")  # fmt: skip
"""Fields that describe constants and are none."""


class UsedConstant(NamedTuple):
    """One constant. ``standing`` is fitted (to measurements), read (data sheet, documentation) or assumed."""

    where: str
    name: str
    value: str
    standing: str
    source: str


def constants_of(context: Context) -> list[UsedConstant]:
    """All constants that a job's predictions may read, file by file."""
    machines = [context.hardware] + ([context.rollout_hardware] if context.own_rollout else [])
    found: list[UsedConstant] = []
    for hardware in machines:
        found += _sheet(hardware.device, f"device {hardware.device.name}")
        found += _sheet(hardware.cluster, f"cluster {hardware.cluster.name}")
        found += _device(hardware.calibration)
    found += _engine(context.engine)
    for trainer in context.trainers:
        found += _trainer(trainer.calibration)
        found += _framework(trainer.framework)
    return list(dict.fromkeys(found))


def counts(found: list[UsedConstant]) -> dict[str, int]:
    """Constants by standing."""
    return {kind: sum(c.standing == kind for c in found) for kind in (FITTED, READ, ASSUMED)}


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return ", ".join(_value(part) for part in value[:8]) + (" ..." if len(value) > 8 else "")
    return str(value)


def _leaves(model: BaseModel, path: str = "") -> list[tuple[str, object, tuple[BaseModel, ...]]]:
    """(dotted name, value, models from the root to it) of every constant below a model."""
    found: list[tuple[str, object, tuple[BaseModel, ...]]] = []
    for name in type(model).model_fields:
        value = getattr(model, name)
        here = f"{path}.{name}" if path else name
        if name in META or value is None or value in ("", ()):
            continue
        if isinstance(value, BaseModel):
            found += [(n, v, (model, *chain)) for n, v, chain in _leaves(value, here)]
        elif isinstance(value, tuple) and isinstance(value[0], BaseModel):
            for index, entry in enumerate(value):
                own = f"{here}[{_label(entry, index)}]"
                found += [(n, v, (model, *chain)) for n, v, chain in _leaves(entry, own)]
        elif isinstance(value, int | float | str | tuple):
            found.append((here, value, (model,)))
    return found


def _label(entry: BaseModel, index: int) -> str:
    names = ("kernel", "dtype", "transport", "generation", "group", "name", "operation", "mode")
    words = [str(getattr(entry, name)) for name in names if getattr(entry, name, None)]
    return " ".join(words) or str(index)


def _sheet(model: Device | Cluster, where: str) -> list[UsedConstant]:
    rest = model.sources.get("*", "")
    return [
        UsedConstant(where, name, _value(value), READ, model.sources.get(name.partition(".")[0], rest))
        for name, value, _ in _leaves(model)
    ]


def _device(found: DeviceCalibration) -> list[UsedConstant]:
    borrowed = "" if found.extrapolated_from is None else f"borrowed from {found.extrapolated_from}: "
    rows = []
    for name, value, chain in _leaves(found):
        quality = _quality(chain)
        standing, source = _fit(quality, f"{found.source}, {found.date}")
        standing = ASSUMED if borrowed else standing
        rows.append(UsedConstant(f"calibration {found.id}", name, _value(value), standing, borrowed + source))
    return rows


def _fit(quality: Quality | None, source: str) -> tuple[str, str]:
    if quality is None:
        return READ, source
    if quality.n == 0:
        return ASSUMED, source
    left = "" if quality.left_out_mape is None else f", left out {quality.left_out_mape:.1f} %"
    inside = "" if quality.in_sample_mape is None else f", error inside {quality.in_sample_mape:.1f} %{left}"
    return FITTED, f"{source}; {quality.n} measurements{inside}; {quality.rows}"


def _engine(found: EngineCalibration) -> list[UsedConstant]:
    rows = []
    for name, value, chain in _leaves(found):
        quality = _quality(chain)
        standing, source = _fit(quality, f"{found.source}, {found.date}")
        rows.append(UsedConstant(f"engine {found.id}", name, _value(value), standing, source))
    return rows


def _trainer(found: TrainerCalibration) -> list[UsedConstant]:
    rows = []
    for name, value, _ in _leaves(found):
        plain = name.replace("[", ".").replace("]", "")
        named = [p for p in found.provenance if any(_covers(pattern, plain) for pattern in p.constants)]
        exact = [p for p in named if plain in p.constants]
        of = next(iter(exact or named), None)
        if of is None:
            rows.append(UsedConstant(f"trainer {found.id}", name, _value(value), ASSUMED, "default of the form"))
            continue
        standing = FITTED if of.n else ASSUMED if of.source.startswith("judged") else READ
        words = [of.source, of.date, f"{of.n} configurations" if of.n else "", of.spread, of.rows]
        rows.append(
            UsedConstant(f"trainer {found.id}", name, _value(value), standing, "; ".join(w for w in words if w))
        )
    return rows


def _covers(pattern: str, name: str) -> bool:
    return fnmatch(name, pattern) or name.startswith(f"{pattern}.")


def _framework(found: FrameworkCalibration) -> list[UsedConstant]:
    rows = []
    for name, value, chain in _leaves(found):
        of = _innermost(chain)
        if of is None:
            rows.append(
                UsedConstant(f"framework {found.id}", name, _value(value), READ, "the framework's own behaviour")
            )
            continue
        standing = ASSUMED if of.assumed else FITTED if of.n else READ
        spread = f"{of.low:g} to {of.high:g} times"
        words = f"{of.source}; {of.date}; {f'{of.n} measurements; ' if of.n else ''}{spread}"
        rows.append(UsedConstant(f"framework {found.id}", name.removesuffix(".value"), _value(value), standing, words))
    return rows


def _innermost(chain: tuple[BaseModel, ...]) -> Provenance | None:
    """Provenance of the innermost model that has one."""
    found = (getattr(model, "provenance", None) for model in reversed(chain))
    return next((each for each in found if isinstance(each, Provenance)), None)


def _quality(chain: tuple[BaseModel, ...]) -> Quality | None:
    """Quality of the innermost model that states one."""
    found = (getattr(model, "quality", None) for model in reversed(chain))
    return next((each for each in found if isinstance(each, Quality)), None)
