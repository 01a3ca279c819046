"""What is measured of speculative decoding: acceptance by method, and what a head loses that lags its policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

from rlperf.errors import Problem, SpecError
from rlperf.specs.calibration_files import read_calibration
from rlperf.specs.frozen import Frozen
from rlperf.specs.overhead import Provenance
from rlperf.specs.profiles import find_profile
from rlperf.specs.speculation import DraftSetting, Method, first_of, tokens_per_step
from rlperf.units import PositiveFloat, PositiveInt


class AcceptanceFit(Frozen):
    """Acceptance of a method's drafts at temperature 1, pooled over models.

    Attributes
    ----------
    first, falls : see `tokens_per_step` [1]
    falls_once : of heads that were trained to see one token ahead and are applied again for every further one (see
        `sees_far`); where it is not known, ``falls`` stands for it [1]
    spread : standard deviation of the logarithm of tokens per engine_step over models and tasks [1]
    """

    method: Method
    first: PositiveFloat
    falls: PositiveFloat
    falls_once: PositiveFloat | None = None
    spread: PositiveFloat
    provenance: Provenance

    def fall(self, far: bool) -> float:
        """By how much acceptance falls with depth, of a head that sees far or one token ahead [1]."""
        return self.falls if far or self.falls_once is None else self.falls_once


class FrozenHead(Frozen):
    """What a head yields that is not trained with its policy.

    Attributes
    ----------
    value : its tokens per engine_step over those of a head that is, at ``drafts`` drafts [1]
    """

    value: PositiveFloat
    drafts: PositiveInt = 3
    provenance: Provenance

    def first(self, trained: float, falls: float) -> float:
        r"""Acceptance of the first draft, where that of a trained head is ``trained`` [1].

        A policy that has moved away lowers the acceptance of every draft, so that deep drafts lose most: a' solves
        m(k; a', d) = v m(k; a, d), see `tokens_per_step`; 0 where even none accepted yields more.
        """
        return first_of(self.value * tokens_per_step(trained, falls, self.drafts), falls, self.drafts, trained)


class CostSpread(Frozen):
    """How far ratios of two engine_steps, with drafts and without, lie off published ones.

    Attributes
    ----------
    value : standard deviation of the logarithm [1]
    """

    value: PositiveFloat
    provenance: Provenance


@dataclass(frozen=True)
class Yield:
    """Tokens per engine_step for 0, 1, ... drafts, and the standard deviation of their logarithm [1]."""

    tokens: tuple[float, ...]
    spread: float


class SpeculationCalibration(Frozen):
    """What is measured of speculative decoding.

    Attributes
    ----------
    acceptance : by method; one that is missing is not known
    frozen : tokens per engine_step of a head that is not trained with its policy, over those of one that is
    cost : how far gains lie off at a known acceptance
    """

    id: str
    acceptance: tuple[AcceptanceFit, ...]
    frozen: FrozenHead
    cost: CostSpread

    def of(self, method: Method) -> AcceptanceFit | None:
        """The fit of a method, or None."""
        return next((fit for fit in self.acceptance if fit.method == method), None)

    def sigma(self, spread: float) -> float:
        r"""Standard deviation of ln seconds that drafted tokens add [1].

        .. math:: s = \sqrt{s_a^2 + s_c^2}

        ``spread``: s_a, of the tokens that an engine_step yields, which differ between models (0 where acceptance is
        stated); s_c how far gains lie off at a known acceptance (`CostSpread`).
        """
        return hypot(spread, self.cost.value)

    def tokens(
        self, wanted: DraftSetting, stated: float | None = None, trained: bool = False, far: bool = True
    ) -> Yield:
        """Tokens per engine_step for 0 ... ``wanted.most`` drafts.

        ``stated``: the share of first drafts that are accepted, as an engine has logged it; ``trained``: the head is
        trained with its policy; ``far``: the head sees far (`sees_far`).

        Raises
        ------
        SpecError : nobody has measured the method, and the job does not state it
        """
        fit = self.of(wanted.method)
        if fit is None and stated is None:
            raise SpecError(
                Problem(
                    f"speculation: no acceptance of {wanted.method} drafts is known",
                    suggestion="state what your engine logs: settings: {draft_acceptance: 0.6}",
                )
            )
        falls = fit.fall(far) if fit else 1.0
        first = stated if stated is not None else fit.first if fit else 0.0
        if stated is None and not trained:
            first = self.frozen.first(first, falls)
        mean = tuple(tokens_per_step(first, falls, drafts) for drafts in range(wanted.most + 1))
        return Yield(mean, fit.spread if fit and stated is None else 0.0)


def load_speculation() -> SpeculationCalibration:
    """``calibrations/speculation.yaml``, nearest first on the search path: `rlperf calibrate speculation` writes it."""
    return read_calibration(find_profile("calibrations", "speculation"), SpeculationCalibration)
