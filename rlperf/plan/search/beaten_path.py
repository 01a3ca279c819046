"""The beaten path: what is known to work, how far a candidate lies off it, and what it must gain to be planned.

*Departures* are counted in doublings. A candidate is off the path by what it takes beyond what published recipes and
the frameworks' defaults take for a model and a device of its size:

==================================  ================================================================================
sequences cut small                 a ring or Ulysses leaves a rank fewer than `RANK_TOKENS` of the longest sequence
matrices cut small                  a trainer's tensor parallel beyond `TENSOR`, inside a domain of NVLink as outside
experts not spread                  a mixture of experts on fewer than `EXPERTS_SPREAD` devices
experts cut up, or spread far       expert tensor parallelism; expert parallelism beyond `experts_reach`
pipeline without need               more stages than the least that run with experts in a domain and nothing offloaded
pipeline without work               fewer microbatches than stages
pipeline cut oddly                  stages that are neither a power of two nor a divisor of the layers
replicas across nodes               an engine beyond the scale-up domains that leave room beside its weights
stages or copies in an engine       more stages than any that fits needs; copies of the attention
cache of a few requests             an engine without room for `FEW_LONGEST` of the longest
memory full beside a trainer        engines that take more than `SHARED_FRACTION` of devices on which a trainer waits
==================================  ================================================================================

*Doublings* of every degree but data parallel, and switches turned on, are how much there is to get wrong on the path.

A candidate off the path is taken where it beats those on it by more than the two can be told apart: by the interval of
the *difference* of two that are predicted alike (`OffPath.margin_s`). On the path a doubling must gain `DOUBLING`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.cost.parameters import routed_parameters
from rlperf.layout import OFFLOAD, BoolArray, FloatArray, IntArray, Layout
from rlperf.plan.search.candidates import WEIGHT_SHARE
from rlperf.sim.rl_step.uncertainty import CALIBRATED, OWN_SHARE
from rlperf.specs.architecture import Architecture
from rlperf.specs.calibration import Z95
from rlperf.specs.pool import ATTRIBUTES

RANK_TOKENS = 4096
"""Tokens of the longest sequence on a rank: no published run cuts it smaller (44 with a ring of Megatron-Bridge, NeMo,
MLPerf, torchtitan and SimuMax; the RL recipes of NeMo-RL: 8,192 over 2, 16,384 over 4)."""
TENSOR = 8
"""Devices over which trainers cut matrices at most: none of 1,010 published training runs has more, in domains of 64
and 72 devices either."""
EXPERTS_SPREAD = 4
"""Devices over which experts are spread at least: no published run of Megatron, NeMo-RL, slime or verl has fewer."""
SHARED_FRACTION = 0.7
"""Share of a device's memory that engines take at most beside a trainer that waits there: none of 46 published rl_steps
that state it has more (0.2 to 0.7, 38 of them 0.6), and frameworks' defaults are 0.3 (TRL), 0.5 (verl) and 0.6
(NeMo-RL). What communicators and fragments of a waiting trainer keep is in no data."""
EXPERT_BYTES = 6.0
"""Of a routed expert's parameter with its gradient: 2 and 4 [bytes]."""
DOUBLING = 0.005
"""Share of the objective that a doubling must gain: decides near-ties, for the simpler one."""
TIE = 1e-6
"""The same where a plan may be bold: decides between equals only."""
ROLLOUT_OWN, TRAINER_OWN = (float(OWN_SHARE[CALIBRATED.index(name)]) for name in ("rollout_s", "training_s"))
HOST_OPTIMIZER = 4.0
"""Doublings that an optimizer on the host counts for: it is another optimizer."""


def doublings(layout: Layout, parked: IntArray, spread: int = 1) -> FloatArray:
    """How much there is to get wrong in a pool: doublings of every degree but data parallel, and switches turned on.

    ``spread``: devices over which experts are spread as a matter of course (`EXPERTS_SPREAD` in a trainer)

    >>> doublings(Layout.of(tensor_parallel=[1, 4], pipeline_parallel=[1, 2]), np.array([0, 1])).tolist()
    [0.0, 4.0]
    """
    usual = {"expert_parallel": spread}
    degrees = [getattr(layout, each.name) / usual.get(each.name, 1) for each in ATTRIBUTES if each.degree]
    total = sum((np.log2(np.maximum(degree, 1)) for degree in degrees), np.zeros(()))
    offloaded = HOST_OPTIMIZER * (layout.offload != 0)
    return np.asarray(total + offloaded + (parked > 0) + (layout.shard_size > 0), dtype=np.float64)


def trainer_departures(
    architecture: Architecture, layout: Layout, group: IntArray, fits: BoolArray, *,
    longest_tokens: int, microbatches: FloatArray, reach: float, domain: int,
) -> IntArray:  # fmt: skip
    """Departures of trainer columns of one number of devices ``[columns]``.

    Stages are needed, too, where experts beyond a scale-up domain, or states on the host, would spare them: recipes of
    DeepSeek-V3 on H100 have sixteen, though four fit beside experts over 32 devices.

    Parameters
    ----------
    group : columns that are compared, such as those of one backend; ``fits``: memory and framework take the column
    microbatches : of an optimizer update on one rank
    reach : devices over which experts are spread at most (`experts_reach`)
    domain : devices of a scale-up domain
    """
    most = max(longest_tokens // RANK_TOKENS, 1)
    off = _beyond(layout.context_parallel * layout.ulysses, most) + _beyond(layout.tensor_parallel, TENSOR)
    spread = layout.expert_parallel * layout.expert_tensor_parallel
    if architecture.experts is not None:
        least_spread = np.minimum(EXPERTS_SPREAD, layout.devices // layout.pipeline_parallel)
        off = off + _beyond(least_spread, spread) + _beyond(layout.expert_tensor_parallel, 1)
        off = off + _beyond(layout.expert_parallel, reach)
    stages = layout.pipeline_parallel
    off = off + ((stages > 1) & (microbatches < stages))
    off = off + (((stages & (stages - 1)) != 0) & (architecture.layers % stages != 0))
    group = np.unique(group, return_inverse=True)[1]
    nearest = fits & (off == _least(off, group, fits, off))
    inside, kept = spread <= domain, layout.offload == OFFLOAD.index("none")
    least = np.ones(len(group), dtype=np.int64)
    for alike in (nearest, nearest & inside, nearest & inside & kept):
        least = _least(stages, group, alike, least)
    return np.asarray(off + _beyond(stages, least), dtype=np.int64)


def experts_reach(architecture: Architecture, domain: int, memory: float) -> float:
    """Devices over which experts are spread at most: a scale-up domain, or those that weights and gradients fill [1].

    NeMo-RL spreads those of Qwen3-235B-A22B and DeepSeek-V3 over 16 H100, of nodes of eight, and Megatron-Bridge those
    of Kimi-K2 over 32.

    Parameters
    ----------
    domain : devices of a scale-up domain
    memory : of a device [bytes]
    """
    return max(float(domain), EXPERT_BYTES * routed_parameters(architecture) / memory)


def rollout_departures(
    layout: Layout, fits: BoolArray, domain: int, weight_share: FloatArray, short: BoolArray,
    group: IntArray | None = None,
) -> IntArray:  # fmt: skip
    """Departures of rollout columns of one number of devices: domains beyond need, stages, copies, a short cache.

    Needed are those where weights fill no more than `WEIGHT_SHARE`, if there are any: NeMo-RL serves Qwen3-235B-A22B on
    16 H100 and DeepSeek-V3 on 32, verl on 32 H20, though weights alone would fit half of the first and the last. None
    of these has stages, nor has any of 66 published rl_steps; of 38 of mixtures of experts none copies the attention.

    Parameters
    ----------
    domain : devices of a scale-up domain
    weight_share : of a device's memory that weights take [1]
    short : whether the cache holds a few requests only (`short_cache`)
    group : columns that are compared; None: all
    """
    domains = np.asarray(-(-layout.tensor_parallel * layout.pipeline_parallel // domain))
    together = np.zeros(len(domains), dtype=np.int64) if group is None else np.unique(group, return_inverse=True)[1]
    least = domains
    for alike in (fits, fits & (weight_share <= WEIGHT_SHARE)):
        least = _least(domains, together, alike, least)
    stages = np.broadcast_to(layout.pipeline_parallel, domains.shape)
    inside = _beyond(stages, _least(stages, together, fits, stages)) + (layout.attention_data_parallel > 1)
    return _beyond(domains, least) + inside + short


def crowding(memory_fraction: FloatArray | float, usual: float = SHARED_FRACTION) -> IntArray:
    """Departures of engines beside a trainer that waits on their devices: tenths of the memory beyond the usual share.

    >>> crowding(np.array([0.3, 0.7, 0.8, 0.9])).tolist(), int(crowding(0.9, 0.9))
    ([0, 0, 1, 2], 0)
    """
    tenths = 10.0 * (np.asarray(memory_fraction) - usual)
    return np.asarray(np.ceil(np.maximum(np.round(tenths, 6), 0.0)), dtype=np.int64)


def _least(values: IntArray, group: IntArray, fits: BoolArray, otherwise: IntArray) -> IntArray:
    """The least of the values that fit in the group of each, ``otherwise`` where none does ``[columns]``.

    Groups are numbered from 0.

    >>> fits, ones = np.array([True, False, False]), np.ones(3, dtype=np.int64)
    >>> _least(np.array([4, 2, 8]), np.array([0, 0, 1]), fits, ones).tolist()
    [4, 4, 1]
    """
    nothing = np.iinfo(np.int64).max
    least = np.full(group.max(initial=-1) + 1, nothing)
    np.minimum.at(least, group[fits], values[fits])
    found = least[group]
    return np.asarray(np.where(found == nothing, otherwise, found))


def _beyond(degree: IntArray | int, most: IntArray | float) -> IntArray:
    """Doublings of a degree above the most that is usual.

    >>> _beyond(np.array([1, 4, 6, 16]), 4).tolist()
    [0, 0, 1, 2]
    """
    return np.ceil(np.log2(np.maximum(degree / most, 1.0))).astype(np.int64)


@dataclass(frozen=True, eq=False)
class OffPath:
    """What leaving the path is priced by, of one pool; arrays ``[candidates]``.

    Attributes
    ----------
    seconds : that the pool takes of an rl_step [s]
    sigma : error of the constants behind them [1]
    own : share of it that is a layout's own (`OWN_SHARE`) [1]
    departures, doubled : how far off the path, and how many doublings on it
    """

    seconds: FloatArray
    sigma: FloatArray
    own: float
    departures: IntArray
    doubled: FloatArray

    @property
    def margin_s(self) -> FloatArray:
        r"""Seconds by which a candidate must beat a layout on the path to be told apart from it; 0 on the path [s].

        .. math:: \sqrt{2} z \omega \sigma t d

        The errors of device and software are in both and cancel; of the layouts' own, one is each's. Every departure d
        asks for as much as the first: it is held against the layout with one fewer, and what these share cancels.
        """
        return np.asarray(np.sqrt(2.0) * Z95 * self.own * self.sigma * self.seconds * self.departures)


def price(value: FloatArray, rl_step_s: FloatArray, pools: Sequence[OffPath], *, bold: bool) -> FloatArray:
    """What is added to the objective of candidates for leaving the beaten path ``[candidates]``.

    Parameters
    ----------
    value : objective, in proportion to ``rl_step_s``
    bold : only equals are decided, for the simpler
    """
    doubled = sum((pool.doubled for pool in pools), np.zeros(()))
    if bold:
        return np.asarray(TIE * doubled * value)
    # not in squares: what rivals share cancels, so that leaving in one pool costs the same whatever the other does
    margin = sum((pool.margin_s for pool in pools), np.zeros(()))
    return np.asarray((DOUBLING * doubled + margin / rl_step_s) * value)
