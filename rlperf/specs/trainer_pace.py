"""Training and scoring of RL frameworks that nobody fitted, over what their trainer backend's seconds say."""

from __future__ import annotations

from functools import cache

from rlperf.specs.frozen import Frozen
from rlperf.specs.overhead import Provenance
from rlperf.specs.profiles import profile_root
from rlperf.specs.reader import read_spec
from rlperf.units import PositiveFloat


class Pace(Frozen):
    """Measured over predicted seconds of a stage, pooled over frameworks [1], and where it is from."""

    value: PositiveFloat
    provenance: Provenance


class TrainerPace(Frozen):
    """How much longer the stages of one trainer backend take under an RL framework than under pretraining.

    Attributes
    ----------
    trainer : backend
    without : framework whose rows the pool did not see; empty: it saw all
    training, scoring : of optimizer updates and of log-probability passes
    """

    trainer: str
    without: str = ""
    training: Pace
    scoring: Pace


class TrainerPaces(Frozen):
    """The pools of every backend that enough frameworks tell of."""

    pools: tuple[TrainerPace, ...]

    def of_stranger(self, framework: str, trainer: str) -> TrainerPace | None:
        """What the rows of all other frameworks say; None: of this backend they say nothing."""
        found = {one.without: one for one in self.pools if one.trainer == trainer}
        return found.get(framework, found.get(""))


@cache
def load_trainer_paces() -> TrainerPaces:
    """The shipped pools.

    >>> paces = load_trainer_paces()
    >>> paces.of_stranger("slime", "megatron").without, paces.of_stranger("trl", "ddp")
    ('', None)
    """
    return read_spec(profile_root() / "calibrations" / "trainer_pace.yaml", TrainerPaces)
