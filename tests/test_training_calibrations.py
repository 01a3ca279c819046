"""Shipped trainer calibrations: they load, say where every constant is from, and keep inside sane bounds."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from rlperf.calibrate.trainer_fits import MEMORY_KNOBS
from rlperf.calibrate.trainers.constants import OF_DEVICE, OF_STACK
from rlperf.calibrate.trainers.costs import Knob, descend, write_trainer
from rlperf.calibrate.trainers.rows import digest, read_training_rows
from rlperf.calibrate.trainers.timing_fits import BACKENDS, JUDGED, SOURCE, fit_rows, shipped
from rlperf.errors import SpecError
from rlperf.specs.calibration_files import calibration_names
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
    assert trainer.configurations
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


def test_writing_and_reading_keeps_constants(tmp_path: Path) -> None:
    for name in ("fsdp2", "peft"):
        target = tmp_path / f"{name}.yaml"
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


@pytest.mark.data
@pytest.mark.slow
def test_shipped_files_are_what_the_fit_writes(measured_data: Path, tmp_path: Path) -> None:
    """To the day of the fit, and to the last digits that linear algebra differs by between machines."""
    fit = fit_rows(read_training_rows(measured_data / "measured" / "training.csv")[0])
    for name in BACKENDS:
        write_trainer(shipped(fit, name), tmp_path / f"{name}.yaml")
        written, kept = (
            each.model_dump(mode="json")
            for each in (load_trainer(name, file=tmp_path / f"{name}.yaml"), load_trainer(name))
        )
        for one in (*written["provenance"], *kept["provenance"]):
            one.pop("date")
        found, wanted = _leaves(written), _leaves(kept)
        assert found.keys() == wanted.keys(), name
        for place, value in wanted.items():
            told = isinstance(value, float)
            assert found[place] == (pytest.approx(value, rel=2e-3) if told else value), f"{name}{place}"


def _leaves(data: object, path: str = "") -> dict[str, object]:
    """Every value of a file by its place."""
    if isinstance(data, dict):
        return {key: value for name in data for key, value in _leaves(data[name], f"{path}.{name}").items()}
    if isinstance(data, list):
        return {key: value for place, one in enumerate(data) for key, value in _leaves(one, f"{path}.{place}").items()}
    return {path: data}
