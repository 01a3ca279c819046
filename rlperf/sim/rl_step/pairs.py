"""Pairs of a rollout and a trainer: what one rl_step is made of, for one candidate or a million."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rlperf.layout import BoolArray, IntArray
from rlperf.sim.rl_step.rollout_stage import RolloutStage
from rlperf.sim.rl_step.trainer_stage import TrainerStage

Rollout = TypeVar("Rollout", bound=RolloutStage, covariant=True)
Trainer = TypeVar("Trainer", bound=TrainerStage, covariant=True)


@dataclass(frozen=True, eq=False)
class Pairs(Generic[Rollout, Trainer]):
    """Columns of rollouts and of trainers, and which two make each pair.

    Attributes
    ----------
    rollout, trainer : the columns
    r, t : which of each ``[pairs]``
    """

    rollout: Rollout
    trainer: Trainer
    r: IntArray
    t: IntArray

    def __len__(self) -> int:
        return len(self.r)

    def take(self, chosen: IntArray | BoolArray) -> Pairs[Rollout, Trainer]:
        """Some of the pairs."""
        return replace(self, r=self.r[chosen], t=self.t[chosen])
