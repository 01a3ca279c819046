"""The answer to whether a running job should change its layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from rlperf.plan.answer import notebook
from rlperf.plan.judge.stage_factors import StageFactor
from rlperf.plan.search.configuration import Configuration
from rlperf.units import human_seconds

if TYPE_CHECKING:
    import polars as pl

HEAD = ("stage", "measured / predicted", "rl_steps")


@dataclass(frozen=True)
class PlannedStretch:
    """rl_steps (first and last) with the configuration that the new plan runs in them."""

    rl_steps: tuple[int, int]
    configuration: Configuration


@dataclass(frozen=True)
class LengthForecast:
    """Mean response of an rl_step, 5th and 95th percentile, and what a forecast can know [tokens]."""

    rl_step: int
    mean: float
    low: float
    high: float
    known: str


@dataclass(frozen=True)
class Replan:
    """The recommendation.

    Attributes
    ----------
    at_step : first rl_step of another layout; where it says stay, the rl_step that was asked about
    gain, low, high : objective of staying over that of the new plan, switching costs included (1: nothing to gain)
    saved : of the objective over the remaining rl_steps, mean [seconds, USD or device-seconds per 1e6 tokens]
    stay_s, planned_s : mean rl_step over the remaining ones [s]
    differs : what the new plan's first other layout does otherwise
    """

    verdict: Literal["stay", "switch"]
    at_step: int
    gain: float
    low: float
    high: float
    saved: float
    stay_s: float
    planned_s: float
    differs: tuple[str, ...]
    stretches: tuple[PlannedStretch, ...]
    factors: tuple[StageFactor, ...]
    lengths: tuple[LengthForecast, ...]
    notes: tuple[str, ...]

    def sentence(self) -> str:
        """The recommendation in a line."""
        gain = f"gain {self.gain:.3f} ({self.low:.3f} .. {self.high:.3f})"
        if self.verdict == "switch":
            return f"switch, at rl_step {self.at_step}, {gain}"
        if self.gain == 1.0:
            return "stay: no other plan of the remaining rl_steps is faster, the cost of switching included"
        return f"stay: the best switch, at rl_step {self.at_step}, is not certain to pay: {gain}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `rlperf replan --json` prints it."""
        same = ("verdict", "at_step", "gain", "low", "high", "saved")
        return {
            "schema_version": 1,
            "sentence": self.sentence(),
            **{name: getattr(self, name) for name in same},
            "stay_step_s": self.stay_s,
            "planned_step_s": self.planned_s,
            "differs": list(self.differs),
            "phases": [
                {
                    "rl_steps": list(each.rl_steps),
                    "mode": each.configuration.mode,
                    "pools": [pool.model_dump(mode="json") for pool in each.configuration.pools],
                }
                for each in self.stretches
            ],
            "stages": [
                {
                    "stage": each.stage,
                    "measured_over_predicted": each.value,
                    "sigma": each.sigma,
                    "rl_steps": each.rl_steps,
                }
                for each in self.factors
            ],
            "lengths": [asdict(each) for each in self.lengths],
            "notes": list(self.notes),
        }

    def to_frame(self) -> pl.DataFrame:
        """One row per stage: measured over predicted, its standard deviation, and of how many rl_steps."""
        return notebook.frame(self.to_dict()["stages"], ("stage", "measured_over_predicted", "sigma", "rl_steps"))

    @property
    def step_words(self) -> str:
        """Mean rl_steps as it runs and as planned."""
        mean = f"{human_seconds(self.stay_s)} as it runs, {human_seconds(self.planned_s)} as planned"
        return f"rl_step, mean over the rest of the run: {mean}"

    def cells(self) -> list[tuple[str, ...]]:
        """Every stage under `HEAD`."""
        return [
            (each.stage.replace("_", " "), f"{each.value:.3f} +- {each.sigma:.3f}", str(each.rl_steps))
            for each in self.factors
        ]

    def told(self) -> list[str]:
        """How lengths go on, what of them can be known, and notes."""
        means = [
            f"rl_step {each.rl_step}: mean response {each.mean:,.0f} tokens ({each.low:,.0f} .. {each.high:,.0f})"
            for each in self.lengths
        ]
        return [*means, self.lengths[-1].known, *self.notes]

    def __str__(self) -> str:
        changes = (f"  {text}" for text in self.differs)
        stages = ("  ".join(cells) for cells in (HEAD, *self.cells()))
        return "\n".join((self.sentence(), self.step_words, *changes, *stages, *self.told()))

    def _repr_html_(self) -> str:
        head = f"<p><b>{escape(self.sentence())}</b></p>"
        lines = [(text,) for text in (*self.differs, *self.told())]
        return head + notebook.table((self.step_words,), lines) + notebook.table(HEAD, self.cells())
