"""What a plan can minimise: one table row an objective, with its value, its unit, and what follows from asking for it.

A new objective is a row of `OBJECTIVES` and nothing else: job files name it, the screen ranks by it, the judge, the
program, sweeps and replanning count in it, and reports write its unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from rlperf.specs.choice import name_in

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spent:
    """What an rl_step takes.

    Attributes
    ----------
    rl_step_s : [s] ``[candidates]``
    devices : that it occupies
    usd_per_s : their price [USD/s]; None where no price is stated
    useful_tokens : trained tokens of responses that were not cut [tokens]
    """

    rl_step_s: FloatArray
    devices: float
    usd_per_s: float | None
    useful_tokens: float

    @property
    def usd(self) -> FloatArray:
        """Price of the rl_step; 0 where none is stated [USD] ``[candidates]``."""
        return self.rl_step_s * (self.usd_per_s or 0.0)

    @property
    def device_s_per_million_tokens(self) -> FloatArray:
        """Device-seconds per 1e6 useful tokens ``[candidates]``."""
        return self.rl_step_s * self.devices / max(self.useful_tokens, 1.0) * 1e6


@dataclass(frozen=True)
class ObjectiveTraits:
    """One objective.

    Attributes
    ----------
    meaning : in words
    unit : of its value
    value : to minimise, of an rl_step ``[candidates]``; proportional to its seconds
    needs_price : it means nothing without a price
    counts_devices : fewer devices may be better, so small clusters are tried, too
    per_token : rl_steps that train on different batches can be compared; several are no sum, but a mean over tokens
    """

    meaning: str
    unit: str
    value: Callable[[Spent], FloatArray]
    needs_price: bool = False
    counts_devices: bool = True
    per_token: bool = False

    def weights(self, rl_steps: Sequence[int], useful_tokens: Sequence[float]) -> list[float]:
        """What slots of so many rl_steps count in the value over all of them.

        useful_tokens : of an rl_step of each slot [tokens]

        >>> [OBJECTIVES[name].weights([10, 30], [3e6, 1e6]) for name in ("step_time", "token_time")]
        [[10.0, 30.0], [0.5, 0.5]]
        """
        if not self.per_token:
            return [float(count) for count in rl_steps]
        trained = [count * max(tokens, 1.0) for count, tokens in zip(rl_steps, useful_tokens, strict=True)]
        return [each / sum(trained) for each in trained]

    @property
    def adds_up(self) -> str:
        """What it does with several tasks, in words."""
        return "is the mean over the tokens of the tasks" if self.per_token else "adds up the tasks"


OBJECTIVES: dict[str, ObjectiveTraits] = {
    "step_time": ObjectiveTraits("seconds per rl_step", "s", lambda spent: spent.rl_step_s, counts_devices=False),
    "usd_per_step": ObjectiveTraits("USD per rl_step", "USD", lambda spent: spent.usd, needs_price=True),
    "token_time": ObjectiveTraits(
        "device-seconds per 1e6 useful trained tokens",
        "device-s a million tokens",
        lambda spent: spent.device_s_per_million_tokens,
        per_token=True,
    ),
}
"""The one table: name -> traits.

>>> spent = Spent(np.array([10.0]), devices=8, usd_per_s=0.01, useful_tokens=2e6)
>>> {name: traits.value(spent).tolist() for name, traits in OBJECTIVES.items()}
{'step_time': [10.0], 'usd_per_step': [0.1], 'token_time': [40.0]}
"""


Minimize = Annotated[str, *name_in(OBJECTIVES, "objective", "objectives")]
"""The name of an objective, in jobs."""
