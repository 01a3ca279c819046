"""Microbatches cut by a token budget over all data-parallel ranks at once, from the real lengths of a pass.

`batching` partitions sequences over ranks first and cuts each rank's share afterwards. Some frameworks do it the other
way round: they pack (or sort and cut) the sequences of all ranks together and deal the result out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlperf.layout import FloatArray


def least_bins(lengths: npt.ArrayLike, token_budget: float) -> int:
    r"""Bins of ``token_budget`` tokens that a good packer needs: Martello and Toth's bound, without packing.

    For every threshold a: what is longer than B - a has a bin to itself, what is longer than B/2 one that only shorter
    sequences share, and of those the ones of at least a fill the room left and then bins of their own:

    .. math:: \max_a\; |J_1| + |J_2| + \lceil (\Sigma J_3 - (|J_2| B - \Sigma J_2)) / B \rceil^+

    (Martello and Toth 1990, Discrete Applied Mathematics 28, bound L2.) First-fit decreasing over hundreds of sequences
    ends within a few percent of it.

    >>> least_bins([6.0, 5.0, 4.0, 3.0], 9.0), least_bins([5.0, 5.0, 5.0], 9.0)
    (2, 3)
    """
    table = np.sort(np.minimum(np.asarray(lengths, np.float64).ravel(), token_budget))
    if not table.size:
        return 0
    sums = np.concatenate([[0.0], np.cumsum(table)])
    half = int(np.searchsorted(table, token_budget / 2.0, side="right"))
    least = np.concatenate([[0.0], table[:half]])
    large = np.searchsorted(table, token_budget - least, side="right")
    medium, small = large - half, np.searchsorted(table[:half], least, side="left")
    room = medium * token_budget - (sums[large] - sums[half])
    rest = np.ceil((sums[half] - sums[small] - room) / token_budget - 1e-9)
    return int((table.size - large + medium + np.maximum(rest, 0.0)).max())


def packed_count(lengths: FloatArray, replicas: int, token_budget: float) -> int:
    """Packed microbatches of every replica, bins of all sequences dealt out evenly.

    >>> packed_count(np.array([6.0, 5.0, 4.0, 3.0]), 2, 9.0)
    1
    """
    return max(-(-least_bins(lengths, max(token_budget, float(lengths.max()))) // max(replicas, 1)), 1)


def sorted_microbatches(
    lengths: FloatArray, replicas: int, token_budget: float, multiple: int = 64
) -> tuple[float, float, float]:
    """Unpacked microbatches of sequences sorted by length: (count, tokens, sum of squares), padding included.

    The sequences of all replicas are sorted and dealt out in turn, so that every replica's microbatch has sequences of
    like length. All replicas cut at the same places, at which the number of sequences times the longest one on any
    replica, rounded up to ``multiple``, would pass the budget, and pad to that length.

    >>> sorted_microbatches(np.array([100.0, 60.0, 60.0, 30.0]), 2, 256.0)
    (1.0, 256.0, 32768.0)
    """
    table, replicas = np.sort(lengths), max(replicas, 1)
    each = -(-table.size // replicas)
    longest = table[np.minimum(np.arange(1, each + 1) * replicas, table.size) - 1]
    budget = max(token_budget, float(table[-1]))
    padded = np.minimum(np.ceil(longest / multiple) * multiple, budget).tolist()
    count, members, tokens, squares = 1, 0, 0.0, 0.0
    for at, length in enumerate(padded):
        if members and (members + 1) * length > budget:
            tokens, squares = tokens + members * padded[at - 1], squares + members * padded[at - 1] ** 2
            count, members = count + 1, 0
        members += 1
    last = padded[-1]
    return float(count), tokens + members * last, squares + members * last**2
