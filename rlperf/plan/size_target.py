"""What a cluster has to reach: ``step<=300s``, ``usd/step<=5`` or ``run<=3d``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rlperf.errors import SpecError
from rlperf.plan.answer.plan import Plan
from rlperf.plan.answer.whole import WholeStep
from rlperf.units import human_seconds, parse_quantity

Measure = Literal["step", "usd/step", "run"]
_TARGET = re.compile(r"^\s*(step|usd/step|run)\s*<=?\s*(.+?)\s*$")


@dataclass(frozen=True)
class SizeTarget:
    """What the cluster has to reach: seconds per rl_step, USD per rl_step, or seconds of the whole run.

    >>> parse_target("step <= 300 s")
    SizeTarget(measure='step', limit=300.0)
    >>> parse_target("usd/step<=5"), parse_target("run < 3 d").limit
    (SizeTarget(measure='usd/step', limit=5.0), 259200.0)
    """

    measure: Measure
    limit: float

    def __str__(self) -> str:
        """``step at most 5 min 0 s``."""
        limit = f"{self.limit:g} USD" if self.measure == "usd/step" else human_seconds(self.limit)
        return f"{self.measure} at most {limit}"

    def value(self, plan: Plan) -> float:
        """Seconds of an rl_step of all tasks; of a run what the job states of it, else all rl_steps of its horizon."""
        if self.measure == "run" and plan.run is not None:
            return plan.run.total_s
        seconds = WholeStep.of(plan).rl_step_s
        return seconds * plan.job.horizon.rl_steps if self.measure == "run" else seconds


def parse_target(text: str) -> SizeTarget:
    """``step<=300s``, ``usd/step<=5`` or ``run<=3d``."""
    match = _TARGET.match(str(text))
    if match is None:
        raise SpecError(f"target {text!r} is not understood: write 'step<=300s', 'usd/step<=5' or 'run<=3d'")
    measure, amount = match.groups()
    try:
        if measure == "usd/step":
            limit = parse_quantity(amount.removesuffix("USD").removeprefix("$").strip() + " USD", "usd")
        else:
            limit = parse_quantity(amount, "s")
    except ValueError as error:
        raise SpecError(f"target {text!r}: {error}") from error
    if limit <= 0:
        raise SpecError(f"target {text!r}: the limit must be above 0")
    return SizeTarget(measure, limit)  # type: ignore[arg-type]
