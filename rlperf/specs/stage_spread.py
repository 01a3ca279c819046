"""How far the stages of rl_steps are off: spreads of predictions, and what a log of one's own cluster says of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from rlperf.specs.frozen import Frozen
from rlperf.specs.profiles import profile_root
from rlperf.specs.reader import read_spec
from rlperf.units import NonNegativeFloat, NonNegativeInt, PositiveFloat

STAGES = ("rollout", "scoring", "training", "weight_sync", "rest")
"""Stages with an error of their own; ``rest`` is what lies in none of the others."""
BANDS = ("rollout", "scoring", "training")
"""Stages with a band in `StageSpread`; the others' stand with their constants."""
SURPRISE = 2.5
"""Standard deviations of a prediction beyond which a miss is no matter of a cluster: what it is, no other has."""


class StageSpread(Frozen):
    """5th and 95th percentile of measured over predicted seconds of a stage, beside what its kernels are off by [1].

    ``whole``: all that a stage is off by, its kernels and reruns of one setup included.
    """

    source: str
    rollout: tuple[PositiveFloat, PositiveFloat]
    scoring: tuple[PositiveFloat, PositiveFloat]
    training: tuple[PositiveFloat, PositiveFloat]
    whole: bool = False


class StageFactors(Frozen):
    """Seconds of every stage on one cluster over what kernels and constants give, as a log of it says [1]."""

    rollout: PositiveFloat = 1.0
    scoring: PositiveFloat = 1.0
    training: PositiveFloat = 1.0
    weight_sync: PositiveFloat = 1.0
    rest: PositiveFloat = 1.0

    def scaled(self, ratios: Mapping[str, float]) -> StageFactors:
        """These times ``ratios``; stages without one stay."""
        return StageFactors(**{stage: getattr(self, stage) * ratios.get(stage, 1.0) for stage in STAGES})


class StagePrior(Frozen):
    """What is known of a stage's error before a log is read: standard deviations of ln(measured / predicted) [1].

    Attributes
    ----------
    between : of frameworks that nobody fitted around nothing, beside what the spread of their constants explains
    constants : of the constants that stand in the stage, over what their files state: most of what is unknown of them
        is what configurations differ by, and no cluster [1]
    within : of the configurations of one framework around their common error
    noise : of the rl_steps of one run around their mean
    rows, groups : measured configurations behind the first two, and frameworks
    """

    between: NonNegativeFloat
    constants: PositiveFloat
    within: PositiveFloat
    noise: PositiveFloat
    rows: NonNegativeInt
    groups: NonNegativeInt


class LogPrior(Frozen):
    """`StagePrior` of every stage."""

    rollout: StagePrior
    scoring: StagePrior
    training: StagePrior
    weight_sync: StagePrior
    rest: StagePrior


class LogPriors(Frozen):
    """Priors of frameworks with rl_steps of their own behind their constants, and of those without."""

    source: str
    noise_source: str
    fitted: LogPrior
    stranger: LogPrior


@cache
def load_log_prior(fitted: bool) -> LogPrior:
    """The shipped prior of a framework whose rl_steps were ``fitted``, or of one that nobody has measured.

    >>> load_log_prior(fitted=True).rollout.between < load_log_prior(fitted=False).rollout.between
    True
    """
    found = read_spec(profile_root() / "calibrations" / "log_prior.yaml", LogPriors)
    return found.fitted if fitted else found.stranger
