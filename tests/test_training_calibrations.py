"""Shipped trainer calibrations: they load, say where every constant is from, and keep inside sane bounds."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from rlperf.calibrate.timing_fits import BACKENDS, JUDGED, SOURCE
from rlperf.calibrate.trainer_constants import OF_DEVICE, OF_STACK
from rlperf.calibrate.trainer_fits import MEMORY_KNOBS
from rlperf.calibrate.trainer_rows import digest
from rlperf.calibrate.trainers import Knob, descend, write_trainer
from rlperf.errors import SpecError
from rlperf.specs.calibration import calibration_names
from rlperf.specs.profiles import load_device
from rlperf.specs.trainer_calibration import load_trainer

NAMES = tuple(calibration_names("trainers"))


@pytest.mark.parametrize("name", NAMES)
def test_every_constant_has_a_source(name: str) -> None:
    trainer = load_trainer(name)
    assert trainer.id == name
    named = [pattern for entry in trainer.provenance for pattern in entry.constants]
    stated = trainer.model_dump(exclude_defaults=True)
    for part in ("storage", "workspace", "timing"):
        for constant in stated.get(part, {}):
            assert any(fnmatch(f"{part}.{constant}", pattern) for pattern in named), f"{part}.{constant}"
    assert any(fnmatch("generations.*", pattern) for pattern in named)
    assert all(entry.source for entry in trainer.provenance)


@pytest.mark.parametrize("name", NAMES)
def test_constants_are_sane(name: str) -> None:
    trainer = load_trainer(name)
    assert trainer.low < 1 < trainer.high
    assert trainer.memory_low < 1 < trainer.memory_high
    for entry in trainer.generations:
        assert 0.3 < entry.sustained <= 1.15
        assert 0.3 < entry.sustained_fp8 <= 1.3
    assert 0.4 < trainer.timing.collective < 2.5 or "legacy" in name
    assert any(entry.generation == "*" for entry in trainer.generations)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_fitted_constants_lie_inside_their_bounds_and_name_their_rows(name: str) -> None:
    trainer = load_trainer(name)
    assert (len(trainer.configurations) > 0) == (name != "deepspeed")
    assert all(len(one) == 8 for one in trainer.configurations)
    if not any(entry.source.startswith(SOURCE) for entry in trainer.provenance):
        return
    for one in OF_STACK:
        if one.serves(name):
            assert one.low <= getattr(trainer.timing, one.name) <= one.high, one.name
    for entry in trainer.generations:
        if entry.generation not in JUDGED:
            assert all(one.low <= getattr(entry, one.name) <= one.high for one in OF_DEVICE), entry
    fits = [entry for entry in trainer.provenance if entry.source.startswith("timing fit")]
    assert len(fits) == 1
    assert fits[0].n == len(trainer.configurations)
    assert digest("x") == digest("x")


def test_a_device_goes_before_its_generation_and_that_before_any() -> None:
    assert load_trainer("megatron_bridge").generation(load_device("gb300")).generation == "gb300"
    trainer = load_trainer("nemo")
    assert trainer.generation(load_device("h200_sxm")).generation == "Hopper"
    assert trainer.generation(load_device("l40s")).generation == "*"


def test_unknown_backends_get_a_suggestion() -> None:
    with pytest.raises(SpecError, match="did you mean megatron"):
        load_trainer("megatrn")


def test_writing_and_reading_keeps_constants(tmp_path: object) -> None:
    from pathlib import Path

    for name in ("fsdp2", "peft"):
        target = Path(str(tmp_path)) / f"{name}.yaml"
        write_trainer(load_trainer(name), target)
        again = load_trainer(name, file=target)
        assert again.timing.collective == pytest.approx(load_trainer(name).timing.collective, rel=1e-3)
        for knob in MEMORY_KNOBS.get(name, ()):
            assert knob.read(again) == pytest.approx(knob.read(load_trainer(name)), rel=1e-3)
        assert again.configurations == load_trainer(name).configurations


def test_descent_finds_a_constant() -> None:
    import numpy as np

    start = load_trainer("megatron")
    knob = Knob("timing.collective", 0.1, 10.0)
    target = 2.7
    fit = descend(
        knob.write(start, 1.0), [knob], lambda t: np.array([knob.read(t)] * 3), np.array([target] * 3), ["a", "b", "c"],
        ridge=0.0, sweeps=6,
    )  # fmt: skip
    assert knob.read(fit.trainer) == pytest.approx(target, rel=0.03)
    assert fit.after < fit.before
    frozen = descend(
        knob.write(start, 1.0), [knob], lambda t: np.array([1.0]), np.array([2.0]), ["a"], ridge=1.0, sweeps=2
    )
    assert knob.read(frozen.trainer) == 1.0
