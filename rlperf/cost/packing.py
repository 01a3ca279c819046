"""Microbatches cut by a token budget over all data-parallel ranks at once, from the real lengths of a pass.

`batching` partitions sequences over ranks first and cuts each rank's share afterwards. Some frameworks do it the other
way round: they pack (or sort and cut) the sequences of all ranks together and deal the result out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from rlperf.cost.batching import bins_needed
from rlperf.layout import FloatArray

MANY = 4096
"""Sequences of which more pack as a sample of them does."""


def packed_bins(lengths: npt.ArrayLike, token_budget: float) -> int:
    """Bins of ``token_budget`` tokens that first-fit decreasing fills; a budget below the longest sequence grows to it.

    How many share a bin is what counts: two of 25 tokens in a budget of 65, whatever their sum would allow. Of many
    sequences every k-th of the sorted ones is packed, for k times as many bins.

    >>> packed_bins([25.0] * 8, 65.0), packed_bins([21.0] * 8, 65.0)
    (4, 3)
    """
    table = np.sort(np.asarray(lengths, np.float64).ravel())
    every = max(-(-table.size // MANY), 1)
    return every * bins_needed(table[every // 2 :: every], max(token_budget, float(table[-1])))


def packed_over_ranks(passes: Sequence[FloatArray], kinds: FloatArray) -> FloatArray:
    """Packed microbatches of a rank, bins of all dealt out evenly: (count, 0, 0), means over passes ``[3, kinds]``.

    ``kinds``: (ranks, token budget) ``[2, kinds]``

    >>> packed_over_ranks([np.array([6.0, 5.0, 4.0, 3.0])], np.array([[2.0], [9.0]]))[0].tolist()
    [1.0]
    """
    bins = {budget: np.array([packed_bins(part, budget) for part in passes]) for budget in set(kinds[1].tolist())}
    count = [np.ceil(bins[budget] / max(rank, 1.0)).mean() for rank, budget in kinds.T.tolist()]
    return np.array([count, np.zeros(len(count)), np.zeros(len(count))])


def sorted_over_ranks(passes: Sequence[FloatArray], kinds: FloatArray) -> FloatArray:
    """Sorted microbatches of a rank: (count, tokens, sum of squares) of each, means over passes ``[3, kinds]``."""
    cut = [
        np.mean([sorted_microbatches(part, int(rank), budget) for part in passes], axis=0)
        for rank, budget in kinds.T.tolist()
    ]
    count, tokens, squares = np.array(cut).T
    return np.array([count, tokens / count, squares / count])


PADDED_TO = 64
"""Tokens to whose multiples microbatches of sorted sequences are padded [tokens]."""


def sorted_microbatches(lengths: FloatArray, replicas: int, token_budget: float) -> tuple[float, float, float]:
    """Unpacked microbatches of sequences sorted by length: (count, tokens, sum of squares), padding included.

    The sequences of all replicas are sorted and dealt out in turn, so that every replica's microbatch has sequences of
    like length. All replicas cut at the same places, at which the number of sequences times the longest one on any
    replica, rounded up to `PADDED_TO`, would pass the budget, and pad to that length.

    >>> sorted_microbatches(np.array([100.0, 60.0, 60.0, 30.0]), 2, 256.0)
    (1.0, 256.0, 32768.0)
    """
    table, replicas = np.sort(lengths), max(replicas, 1)
    each = -(-table.size // replicas)
    longest = table[np.minimum(np.arange(1, each + 1) * replicas, table.size) - 1]
    budget = max(token_budget, float(table[-1]))
    padded = np.minimum(np.ceil(longest / PADDED_TO) * PADDED_TO, budget).tolist()
    count, members, tokens, squares = 1, 0, 0.0, 0.0
    for at, length in enumerate(padded):
        if members and (members + 1) * length > budget:
            tokens, squares = tokens + members * padded[at - 1], squares + members * padded[at - 1] ** 2
            count, members = count + 1, 0
        members += 1
    last = padded[-1]
    return float(count), tokens + members * last, squares + members * last**2


def slowest_in_step(lengths: FloatArray, each: int, ranks: int, *, packing: bool) -> tuple[float, float]:
    r"""Tokens and sum of squares of the microbatch that ``ranks`` ranks wait for, ``each`` sequences as they come.

    Ranks that gather weights or exchange tokens in every layer go through their k-th microbatches together, at the pace
    of the fullest: with m microbatches of sizes :math:`x_1 \le \dots \le x_m` dealt out at random, its mean is

    .. math:: \sum_i x_i \left(\binom{i}{r} - \binom{i - 1}{r}\right) \Big/ \binom{m}{r}

    for r ranks. Without ``packing`` a microbatch is padded to its longest sequence.

    >>> slowest_in_step(np.array([1.0, 2.0, 3.0, 4.0]), 1, 4, packing=True), slowest_in_step(
    ...     np.array([1.0, 2.0, 3.0, 4.0]), 2, 1, packing=False
    ... )
    ((4.0, 16.0), (6.0, 20.0))
    """
    table = lengths[: 4 * MANY]
    number = max(table.size // max(each, 1), 1)
    members = table[: number * each].reshape(number, -1)
    if not packing:
        members = np.broadcast_to(members.max(axis=1, keepdims=True), members.shape)
    tokens, squares = members.sum(axis=1), (members**2).sum(axis=1)
    order, waiting = np.argsort(tokens, kind="stable"), min(ranks, number)
    place = np.arange(waiting, number + 1)
    below = np.exp(
        gammaln(place + 1) - gammaln(place - waiting + 1) - gammaln(number + 1) + gammaln(number - waiting + 1)
    )
    weight = np.diff(below, prepend=0.0)
    slowest = order[waiting - 1 :]
    return float(tokens[slowest] @ weight), float(squares[slowest] @ weight)
