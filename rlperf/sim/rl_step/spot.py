"""Spot nodes, which their provider takes back: what a run loses that goes on without them, or that starts again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlperf.errors import SpecError
from rlperf.layout import FloatArray
from rlperf.units import human_seconds

MOST_LOST = 5.0
"""Times the mean seconds until a node leaves that a rollout may take, at most: beyond, it is begun exp(5) times [1]."""


@dataclass(frozen=True)
class SpotFacts:
    """Nodes that leave, and for how long.

    Attributes
    ----------
    nodes : that may leave [1]
    leaves_s : mean seconds until one of them does (exponential) [s]
    returns_s : mean seconds until another takes its place [s]
    elastic : rollout goes on with the engines that are left; otherwise the run stops and starts again
    """

    nodes: int
    leaves_s: float
    returns_s: float = 0.0
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.leaves_s <= 0.0 or self.returns_s < 0.0:
            raise SpecError("spot nodes: needs one at least, leaves above 0 s and returns of 0 s or more")


def elastic_factor(rollout_s: npt.ArrayLike, spot: SpotFacts) -> FloatArray:
    r"""How much longer a rollout takes whose nodes leave while the others go on [1].

    .. math:: f = \left(1 + \frac{R}{M}\right) \frac{M}{w} \left(e^{w / M} - 1\right)

    w seconds of the rollout, M until a node leaves, R until another takes its place. The share M / (M + R) of the nodes
    is there (alternating renewals: Ross 1996, Stochastic Processes, theorem 3.4.4), and does the work of all. What a
    node has under way is begun anew elsewhere: work of w seconds without a checkpoint takes M (exp(w / M) - 1) (Daly
    2006, Future Generation Computer Systems 22). An upper bound, since responses shorter than the rollout lose less.

    >>> round(float(elastic_factor(600.0, SpotFacts(4, 6 * 3600.0, 1200.0))), 3)
    1.07
    """
    share = np.asarray(rollout_s, np.float64) / spot.leaves_s
    if np.any(share > MOST_LOST):
        longest = float(np.max(rollout_s))
        raise SpecError(
            f"run.spot: a node leaves every {human_seconds(spot.leaves_s)}, a rollout takes {human_seconds(longest)}: "
            "next to none ends; state more time between departures, or plan shorter rollouts"
        )
    again = np.where(share > 0.0, np.expm1(share) / np.maximum(share, 1e-300), 1.0)
    return np.asarray((1.0 + spot.returns_s / spot.leaves_s) * again, np.float64)


def elastic_step_s(
    rl_step_s: npt.ArrayLike, rollout_s: npt.ArrayLike, spot: SpotFacts, *, overlaps: bool, behind_s: float = 0.0
) -> FloatArray:
    r"""An rl_step with a rollout that takes `elastic_factor` times as long [s].

    Where rollout and trainer wait for each other the rollout's growth adds to the rl_step; where they overlap, it shows
    only once rollout is the longer: t' = max(t, f w + b), b (``behind_s``) what follows it in every rl_step.
    """
    step, rollout = np.asarray(rl_step_s, np.float64), np.asarray(rollout_s, np.float64)
    slower = elastic_factor(rollout, spot) * rollout
    return np.maximum(step, slower + behind_s) if overlaps else step + slower - rollout
