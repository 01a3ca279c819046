"""Seconds of all trainer backends fitted together, and the calibration files that follow from the fit.

``python -m rlperf.calibrate.trainers.timing_fits DATA OUT [BACKEND ...]`` reads ``DATA/measured/training.csv``, pools
the constants of every backend on two thirds of the configurations (`timing_part`) and writes
each calibration, or those named, as it is shipped into ``OUT/<backend>.yaml``: of `POOLED` all seconds and the
interval, of the others what the pool lends them (`LENT`) and what it leaves open; all else stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property

import numpy as np

from rlperf.calibrate.pooling import Pooled, fit_pool
from rlperf.calibrate.trainers.constants import (
    OF_DEVICE,
    OF_STACK,
    Timed,
    bounded,
    generation_of,
    labels_of,
    of_device,
    timed_as,
)
from rlperf.calibrate.trainers.costs import Knob, asked_fit, write_trainer
from rlperf.calibrate.trainers.doubt import Doubts
from rlperf.calibrate.trainers.rows import SPLIT_SEED, TrainingRow, digest, read_training_rows, timing_part
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.profiles import load_device, profile_names
from rlperf.specs.trainer_calibration import Doubt, Generation, TrainerCalibration, TrainerProvenance, load_trainer

BACKENDS = (
    "megatron", "megatron_legacy", "megatron_deepspeed", "megatron_bridge", "megatron_bridge_narrow", "nemo",
    "fsdp2", "torchtitan", "automodel", "fsdp_llm_foundry", "deepspeed_legacy",
)  # fmt: skip
"""Backends with constants of their own; others have a relative's."""

POOLED = ("megatron_bridge", "megatron_bridge_narrow", "torchtitan")
"""Backends that are shipped with the pool's seconds. The others keep fits of their own, beside which their RL
frameworks' overheads were told (docs/guide/accuracy-training.md)."""
LENT: Mapping[str, Mapping[str, str]] = {
    "megatron": {
        "timing.host_layer": "megatron",
        "timing.microbatch": "megatron",
        "timing.host_norm": "megatron_bridge",
        "timing.lora_bytes": "megatron_bridge",
        "generations.Hopper.flash2": "megatron",
        "generations.Blackwell.flash2": "megatron",
    },
    "fsdp2": {"generations.Hopper.sustained_fp8": "fsdp2"},
}
"""Constants that no row of a backend's own fit tells, and of whom in the pool's fit they are."""
JUDGED = ("h20_sxm",)
"""Devices whose rates are judged where a file states them: they are in no row."""
FOLDS = 4
PSEUDO = 12.0
"""Configurations of all backends that join those of one when its interval is read."""
LEAST = 1.06
"""No interval is narrower than what a rerun of the same job differs by, to either side."""
UNSEEN = 2.0
"""Width, in the logarithm, of the interval of a backend of which no row was seen, over that of all backends."""
DOUBT = "generations.*.doubt"
"""What intervals of single rows rest on, by its place in a file."""
LEFT_OPEN = (
    "what the timing fit of all backends to measured/training.csv leaves open: posterior of its constants, and what "
    "configurations differ by beside them"
)
FROM_POOL = "from the pool"
"""How the source of constants begins that are lent."""
SOURCE = "timing fit to measured/training.csv: constants pooled over backends, generations and devices"


@dataclass(frozen=True)
class TimingFit:
    """A fit of all backends to some rows, with what it misses where it does not look."""

    timed: Timed
    seen: BoolArray
    pooled: Pooled
    whole: TimingFit | None = None

    @classmethod
    def of(cls, timed: Timed, seen: BoolArray) -> TimingFit:
        """Fit the rows that are ``seen``."""
        return cls(timed, seen, fit_pool(timed.pool_rows, seen))

    def without(self, held: BoolArray) -> TimingFit:
        """The same without some rows, from what is believed without a row on: in ten seconds."""
        keep = self.seen & ~held
        return TimingFit(self.timed, keep, fit_pool(self.timed.pool_rows, keep), whole=self)

    @cached_property
    def predicted(self) -> FloatArray:
        """ln of the seconds of every row."""
        rows = self.timed.pool_rows
        return rows.predict(self.pooled.logs(rows.labels, len(rows.measured)))

    @cached_property
    def left_out(self) -> FloatArray:
        """ln(measured / predicted) of every seen row by a fit that saw no row of its fold of configurations.

        A fit without some rows has those of the whole one, as far as it sees them.
        """
        if self.whole is not None:
            return np.where(self.seen, self.whole.left_out, np.nan)
        digests = np.array([digest(row.configuration) for row in self.timed.rows])
        order = {name: place for place, name in enumerate(sorted(set(digests[self.seen].tolist())))}
        fold = np.array([order.get(name, -1) % FOLDS if name in order else -1 for name in digests])
        missed = np.full(len(digests), np.nan)
        for number in range(FOLDS):
            held = fold == number
            if held.any():
                missed[held] = (self.timed.pool_rows.measured - self.without(held).predicted)[held]
        return missed

    @cached_property
    def doubts(self) -> Doubts:
        """What the fit leaves open."""
        rows = self.timed.pool_rows
        logs = self.pooled.logs(rows.labels, len(rows.measured))
        return Doubts(self.pooled, self.timed.rows, rows.slopes(logs))

    def trainer(self, name: str) -> TrainerCalibration:
        """A backend with the fitted constants, on every device."""
        if name not in self._trainers:
            self._trainers[name] = self._trainer(load_trainer(name))
        return self._trainers[name]

    @cached_property
    def _trainers(self) -> dict[str, TrainerCalibration]:
        return {}

    def _trainer(self, base: TrainerCalibration) -> TrainerCalibration:
        name = base.id
        own = self._values(name, "", "")
        timing: dict[str, object] = {one.name: own[one.name] for one in OF_STACK if one.serves(name)}
        timing["arranged"] = True
        low, high = self.interval(name)
        update = {
            "timing": base.timing.model_copy(update=timing),
            "generations": self._generations(base),
            "low": low,
            "high": high,
            "configurations": tuple(sorted({digest(row.configuration) for row in self._rows(name)})),
            "frameworks": tuple(sorted({row.row.text("framework") for row in self._rows(name)})),
        }
        return base.model_copy(update=update)

    def interval(self, name: str) -> tuple[float, float]:
        """5th and 95th percentile of measured over predicted of configurations that a fit did not see.

        Those of the backend, each of one weight, and those of all backends with the weight of `PSEUDO` together: few
        rows say little about their own tails. A backend without a row has those of all, `UNSEEN` times as wide.
        """
        known = np.isfinite(self.left_out)
        mine = np.array([timed_as(row.backend) == timed_as(name) for row in self.timed.rows]) & known
        units = np.array([digest(row.configuration) for row in self.timed.rows])
        weight = np.zeros(len(units))
        weight[known] = _one_each(units[known]) * PSEUDO / len(set(units[known].tolist()))
        weight[mine] += _one_each(units[mine])
        order = np.argsort(self.left_out[known])
        sorted_weight = weight[known][order]
        share = (np.cumsum(sorted_weight) - 0.5 * sorted_weight) / sorted_weight.sum()
        low, high = np.interp([0.05, 0.95], share, self.left_out[known][order])
        wider = 1.0 if mine.any() else UNSEEN
        return min(float(np.exp(low * wider)), 1.0 / LEAST), max(float(np.exp(high * wider)), LEAST)

    def _rows(self, name: str) -> list[TrainingRow]:
        rows = zip(self.timed.rows, self.seen, strict=True)
        return [row for row, used in rows if used and timed_as(row.backend) == timed_as(name)]

    def _values(self, name: str, generation: str, device: str) -> Mapping[str, float]:
        logs = self.pooled.logs(labels_of(name, generation, device), 1)[0]
        return bounded(logs)

    def _generations(self, base: TrainerCalibration) -> tuple[Generation, ...]:
        """An entry for every device, every generation, and any other, as far as they differ."""
        devices = {row.device: generation_of(row.hardware.device) for row in self.timed.rows}
        known = {generation_of(row.hardware.device) for row in self._rows(base.id)}
        loops = {each.generation: each.moe_layer for each in base.generations}
        judged = [each for each in base.generations if each.generation in JUDGED]
        found = [
            each.model_copy(update={"doubt": self.doubts.of(base.id, generation_of(load_device(each.generation)), "")})
            for each in judged
        ]
        names = sorted(set(devices.values()))
        of_generation = {name: of_device(self._values(base.id, name, ""), name) for name in names}
        entries = [(device, device, name) for device, name in sorted(devices.items())]
        entries = [*entries, *((name, "", name) for name in of_generation), ("*", "", "")]
        for title, device, generation in entries:
            values = of_device(self._values(base.id, generation, device), generation)
            same = of_generation.get(generation, {})
            if device and all(np.isclose(values[one.name], same[one.name], rtol=0.01) for one in OF_DEVICE):
                continue
            update: dict[str, object] = dict(values)
            update |= {"moe_layer": loops.get(generation, 0.0), "measured": generation in known}
            update["doubt"] = self.doubts.of(base.id, generation, device)
            found.append(Generation(generation=title).model_copy(update=update))
        return tuple(found)


def _one_each(units: np.ndarray) -> FloatArray:
    """Weight of rows such that every configuration weighs 1."""
    _, index = np.unique(units, return_inverse=True)
    return np.asarray(1.0 / np.bincount(index)[index])


def provenance_of(fit: TimingFit, name: str) -> TrainerProvenance:
    """What a backend's constants rest on."""
    missed = [abs(fit.left_out[i]) for i, row in enumerate(fit.timed.rows) if np.isfinite(fit.left_out[i])
              and timed_as(row.backend) == timed_as(name)]  # fmt: skip
    served = tuple(f"timing.{one.name}" for one in OF_STACK if one.serves(name))
    mean = (
        f"mean |ln ratio| {np.mean(missed):.3f} on {len(missed)} rows, configurations left out in turn"
        if missed
        else ""
    )
    return TrainerProvenance(
        constants=(*served, *(f"generations.*.{one.name}" for one in OF_DEVICE), DOUBT),
        source=SOURCE if missed else f"{SOURCE}; no row is of this backend: those of the pool",
        date=date.today().isoformat(),
        n=len({digest(row.configuration) for row in fit._rows(name)}),
        spread=mean,
        rows=f"two of three configurations of each group by digest, seed {SPLIT_SEED}; digests in the file",
    )


def shipped(fit: TimingFit, name: str) -> TrainerCalibration:
    """A backend's file: what the fit says of it, what was seen, beside all that was read, judged or fitted apart."""
    return _pooled(fit, name) if name in POOLED else _with_own_fit(fit, name)


def _pooled(fit: TimingFit, name: str) -> TrainerCalibration:
    found = fit.trainer(name)
    others = tuple(each for each in _without_doubt(found) if not each.source.startswith("timing fit"))
    return found.model_copy(update={"provenance": (*others, provenance_of(fit, name))})


def _with_own_fit(fit: TimingFit, name: str) -> TrainerCalibration:
    """A backend that keeps its seconds but for those lent, with how far off they may be by the fit of all."""
    trainer, mine = load_trainer(name), provenance_of(fit, name)
    for path, owner in LENT.get(name, {}).items():
        knob = Knob(path, 0.0, np.inf)
        trainer = knob.write(trainer, knob.read(fit.trainer(owner)))
    entries = tuple(each.model_copy(update={"doubt": _doubt(fit, name, each)}) for each in trainer.generations)
    lent = {"date": mine.date, "n": mine.n, "spread": mine.spread}
    others = (
        each.model_copy(update=lent) if each.source.startswith(FROM_POOL) else each for each in _without_doubt(trainer)
    )
    doubt = mine.model_copy(update={"constants": (DOUBT,), "source": LEFT_OPEN, "spread": ""})
    frameworks = tuple(sorted({row.row.text("framework") for row in fit._rows(name)}))
    update = {"generations": entries, "frameworks": frameworks, "provenance": (*others, doubt)}
    return trainer.model_copy(update=update)


def _doubt(fit: TimingFit, name: str, entry: Generation) -> Doubt:
    """Of a backend under an entry: a device, a generation, or any other."""
    title = entry.generation
    if title == "*":
        return fit.doubts.of(name, "", "")
    if title in profile_names("devices"):
        return fit.doubts.of(name, generation_of(load_device(title)), title)
    return fit.doubts.of(name, title, "")


def _without_doubt(trainer: TrainerCalibration) -> list[TrainerProvenance]:
    return [each for each in trainer.provenance if DOUBT not in each.constants]


def fit_rows(rows: Sequence[TrainingRow]) -> TimingFit:
    """All backends fitted on two of three configurations of every group."""
    timed = Timed([row for row in rows if row.update_s])
    part = timing_part(timed.rows)
    return TimingFit.of(timed, np.array([digest(row.configuration) in part for row in timed.rows]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit and write; see the module."""
    asked = asked_fit(__doc__, arguments)
    rows, _ = read_training_rows(asked.data / "measured" / "training.csv")
    fit = fit_rows(rows)
    for name in asked.backends or BACKENDS:
        trainer = shipped(fit, name)
        write_trainer(trainer, asked.out / f"{name}.yaml")
        sys.stdout.write(f"{name}: {trainer.low:.2f} to {trainer.high:.2f}; {trainer.provenance[-1].spread}\n")


if __name__ == "__main__":
    main()
