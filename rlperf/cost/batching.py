"""Microbatches: what one replica feeds through its forward and backward passes in one optimizer update.

All that the trainer's cost needs of a batch is four numbers: the tokens of a microbatch, the sum of squares of its
sequence lengths (attention is quadratic in each *sequence*, not in the pack), its longest sequence, and how many
microbatches a replica runs. They come from fixed lengths, from moments (to screen) or from real lengths.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from rlperf.cost.differencing import balanced_partitions, fullest_partition
from rlperf.layout import BoolArray, FloatArray, IntArray, Layout


@dataclass(frozen=True)
class Microbatches:
    """Work of the slowest replica in one optimizer update; every field is float64 and broadcasts with a `Layout`.

    Attributes
    ----------
    tokens : tokens that one microbatch carries through the matrices, padding included [tokens per microbatch, replica]
    sum_squares : sum of the squared sequence lengths in it [tokens^2]
    max_len : longest sequence in it, the padded length where padded [tokens]
    count : microbatches per replica and optimizer update [1]
    """

    tokens: FloatArray
    sum_squares: FloatArray
    max_len: FloatArray
    count: FloatArray

    @classmethod
    def of(cls, tokens: ArrayLike, sum_squares: ArrayLike, max_len: ArrayLike, count: ArrayLike) -> Microbatches:
        """From plain numbers or arrays."""
        values = (np.asarray(v, dtype=np.float64) for v in (tokens, sum_squares, max_len, count))
        return cls(*values)

    def of_rows(self, mask: BoolArray) -> Microbatches:
        """Those of a mask, flat; every field broadcasts to its shape."""
        return Microbatches(**{name: np.broadcast_to(values, mask.shape)[mask] for name, values in vars(self).items()})

    @classmethod
    def fixed(cls, layout: Layout, sequence_tokens: ArrayLike, global_batch: ArrayLike) -> Microbatches:
        """Sequences of one length: ``layout.microbatch`` a forward, ``global_batch`` an optimizer update.

        >>> batch = Microbatches.fixed(Layout.of(data_parallel=4, microbatch=2), 4096, 64)
        >>> float(batch.tokens), float(batch.count)
        (8192.0, 8.0)
        """
        length = np.asarray(sequence_tokens, dtype=np.float64)
        each = np.asarray(layout.microbatch, dtype=np.float64)
        batch = np.asarray(global_batch, dtype=np.float64)
        count = np.maximum(np.ceil(batch / (layout.data_parallel * each) - 1e-9), 1.0)
        return cls.of(each * length, each * length * length, length, count)

    @classmethod
    def from_moments(
        cls,
        layout: Layout,
        sequences: ArrayLike,
        mean: ArrayLike,
        mean_square: ArrayLike,
        longest: ArrayLike,
        *,
        token_budget: ArrayLike | None = None,
        packing: bool = True,
        balanced: bool = True,
    ) -> Microbatches:
        r"""Closed form for screening, when only two moments and the maximum of the lengths are known.

        With a token budget B per replica a microbatch holds whole sequences; first-fit leaves about half a mean
        sequence free: :math:`m = \lceil N \bar l / (D (B - \bar l / 2)) \rceil`. Without one it holds
        ``layout.microbatch`` sequences, padded to the longest of them unless ``packing``; the expected maximum of k
        lengths is bounded by :math:`\min(l_{max}, \bar l + s \sqrt{2 \ln k})`. The slowest of D replicas with n
        sequences each is above the mean by :math:`\sqrt{2 \ln D}\, s / (\bar l \sqrt n)` when sequences come as
        drawn; balanced partitions leave about one n-th of that.

        Parameters
        ----------
        sequences : N, sequences per optimizer update over all replicas [1]
        mean, mean_square, longest : of prompt + response [tokens, tokens^2, tokens]
        token_budget : B, tokens per microbatch and replica (a budget per device times CP and Ulysses) [tokens]
        """
        n, average, square, top = (np.asarray(v, dtype=np.float64) for v in (sequences, mean, mean_square, longest))
        replicas = np.asarray(layout.data_parallel, dtype=np.float64)
        each = np.maximum(n / replicas, 1.0)
        spread = np.sqrt(np.maximum(square - average**2, 0.0))
        drawn = np.sqrt(2 * np.log(np.maximum(replicas, 1.0))) * spread / (average * np.sqrt(each))
        slowest = np.minimum(1.0 + (drawn / each if balanced else drawn), np.maximum(top / average, 1.0))
        if token_budget is not None:
            budget = np.maximum(np.asarray(token_budget, dtype=np.float64), top)
            usable = np.maximum(budget - average / 2, average)
            count = np.maximum(np.ceil(slowest * each * average / usable - 1e-9), 1.0)
            size = each / count
            return cls.of(size * slowest * average, size * slowest * square, np.broadcast_to(top, size.shape), count)
        size = np.minimum(np.asarray(layout.microbatch, dtype=np.float64), each)
        count = np.maximum(np.ceil(each / size - 1e-9), 1.0)
        padded = np.minimum(top, average + spread * np.sqrt(2 * np.log(np.maximum(size, 1.0))))
        if packing:
            return cls.of(size * slowest * average, size * slowest * square, padded, count)
        return cls.of(size * padded, size * padded**2, padded, count)

    @classmethod
    def from_lengths(
        cls,
        layout: Layout,
        lengths: ArrayLike,
        *,
        token_budget: float | None = None,
        packing: bool = True,
        balanced: bool = True,
    ) -> Microbatches:
        """From the real lengths of one optimizer update, partitioned as the frameworks do.

        Sequences go to the replicas in order, or by Karmarkar-Karp on their tokens when ``balanced`` (verl's
        ``balance_batch``). Each replica then cuts microbatches by count (``layout.microbatch`` in order, padded to
        the longest of each unless ``packing``) or by a token budget (a budget below the longest sequence grows to it).
        The result describes the slowest replica; its count x mean microbatch is what the update waits for.

        Parameters
        ----------
        lengths : prompt + response of every sequence of the update [tokens] ``[sequences]``
        token_budget : tokens per microbatch and replica; None cuts by count
        """
        table = np.asarray(lengths, dtype=np.float64).ravel()
        replicas, size = np.broadcast_arrays(layout.data_parallel, layout.microbatch)
        out = np.empty((4, *replicas.shape))
        for parts in np.unique(replicas):
            slowest = _slowest_replica(table, int(parts), balanced)
            for each in np.unique(size):
                mask = (replicas == parts) & (size == each)
                if mask.any():
                    numbers = _replica_numbers(table[slowest], int(each), token_budget, packing, float(table.max()))
                    out[:, mask] = np.asarray(numbers)[:, None]
        return cls.of(*out)


def _slowest_replica(table: FloatArray, parts: int, balanced: bool, *, alike: bool = False) -> IntArray:
    """``alike``: every replica holds as many sequences, where they divide."""
    if parts <= 1:
        return np.arange(table.size)
    equal = alike and table.size % parts == 0
    groups = _many_partitions(table, parts, equal) if balanced else split_in_order(table.size, parts)
    if groups is None:
        return _fullest(table.tobytes(), parts, equal)
    return groups[int(np.argmax([table[group].sum() for group in groups]))]


def _even_partitions(table: FloatArray, parts: int, *, equal_size: bool) -> list[IntArray]:
    """Sets of nearly equal sums; of many sequences by dealing."""
    groups = _many_partitions(table, parts, equal_size)
    return _balanced(table.tobytes(), parts, equal_size) if groups is None else groups


def _many_partitions(table: FloatArray, parts: int, equal_size: bool) -> list[IntArray] | None:
    """The same of so many sequences that they are not differenced; None: they are."""
    if table.size > MANY and table.size >= MANY_EACH * parts:
        return dealt_partitions(table, parts)
    if table.size * parts > MANY_PLACES and not equal_size:
        return greedy_partitions(table, parts)
    return None


@lru_cache(maxsize=256)
def _balanced(lengths: bytes, parts: int, equal_size: bool) -> list[IntArray]:
    """Remembered by value: whatever else is tried of a configuration, its sequences stay the same."""
    return balanced_partitions(np.frombuffer(lengths), parts, equal_size=equal_size)


@lru_cache(maxsize=256)
def _fullest(lengths: bytes, parts: int, equal_size: bool) -> IntArray:
    """The fullest of `_balanced`, whose sequences alone are told; remembered, too."""
    return fullest_partition(np.frombuffer(lengths), parts, equal_size=equal_size)


MANY, MANY_EACH = 32_768, 100
"""Sequences, and sequences per set, from which dealing does: sums within 5e-4 of differencing, 80 times faster."""

MANY_PLACES = 1 << 27
"""Sequences times sets from which the longest goes to the emptiest: differencing moves all sets for every sequence."""


def greedy_partitions(lengths: FloatArray, parts: int) -> list[IntArray]:
    """Partition into ``parts`` sets: the longest sequence that is left goes to the set with the fewest tokens.

    Graham 1969 (longest processing time first). Of 131,072 sequences over 8,192 sets the fullest has 0.08 % more than
    by differencing, with fewer than eight sequences a set no more (2 % less at four); 0.5 instead of 8 s.

    >>> [part.tolist() for part in greedy_partitions(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), 2)]
    [[0, 3, 4], [1, 2]]
    """
    table = np.asarray(lengths, dtype=np.float64)
    order = np.argsort(-table, kind="stable")
    parts = min(parts, order.size)  # the others stay empty: eight million devices need no heap
    emptiest, place = [(0.0, part) for part in range(parts)], np.empty(order.size, dtype=np.int64)
    for number, length in enumerate(table[order].tolist()):
        tokens, place[number] = emptiest[0]
        heapq.heapreplace(emptiest, (tokens + length, int(place[number])))
    members = np.argsort(place, kind="stable")
    cuts = np.searchsorted(place[members], np.arange(1, parts))
    return [part for part in np.split(order[members], cuts) if part.size]


def dealt_partitions(lengths: FloatArray, parts: int) -> list[IntArray]:
    """Partition into ``parts`` sets by dealing the sorted sequences out, forth and back.

    >>> [sorted(part.tolist()) for part in dealt_partitions(np.array([8.0, 7.0, 6.0, 5.0]), 2)]
    [[0, 3], [1, 2]]
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.float64), kind="stable")
    hand, place = np.divmod(np.arange(order.size), parts)
    place = np.where(hand % 2 == 1, parts - 1 - place, place)
    return [order[place == part] for part in range(parts)]


def slowest_lengths(lengths: FloatArray, parts: int, *, alike: bool = False, balanced: bool = True) -> FloatArray:
    """Lengths of the fullest of ``parts`` replicas [tokens]: balanced ones, or those that sequences fill in order.

    ``alike``: each balanced one of as many sequences, where they divide.

    >>> slowest_lengths(np.array([5.0, 4.0, 3.0]), 2).tolist()
    [4.0, 3.0]
    >>> slowest_lengths(np.array([9.0, 2.0, 2.0, 1.0]), 2, alike=True).tolist()
    [9.0, 1.0]
    >>> slowest_lengths(np.array([1.0, 2.0, 2.0, 9.0]), 2, balanced=False).tolist()
    [2.0, 9.0]
    """
    table = np.asarray(lengths, dtype=np.float64)
    return table[_slowest_replica(table, parts, balanced, alike=alike)]


def slowest_slices(lengths: FloatArray, parts: int, updates: int) -> list[FloatArray]:
    """Lengths of the fullest replica of every update, where tokens are evened out over the whole batch once [tokens].

    Every replica holds equally many sequences, as far as they divide, and nearly equal tokens; an update takes the next
    slice of each replica's share, in the order of the batch (verl: ``_balance_batch``, then mini-batches of a shard).

    >>> [part.tolist() for part in slowest_slices(np.array([9.0, 1.0, 8.0, 2.0]), 2, 2)]
    [[9.0], [2.0]]
    """
    table = np.asarray(lengths, dtype=np.float64)
    if parts <= 1:
        return [table[part] for part in split_in_order(table.size, updates)]
    shares = _even_partitions(table, parts, equal_size=table.size % parts == 0)
    slices = [np.array_split(share[np.argsort(share, kind="stable")], updates) for share in shares]
    fullest = [max((each[update] for each in slices), key=lambda one: table[one].sum()) for update in range(updates)]
    return [table[one] for one in fullest]


def _replica_numbers(
    lengths: FloatArray, microbatch: int, token_budget: float | None, packing: bool, longest: float
) -> tuple[float, float, float, float]:
    """Tokens, sum of squares, longest and count of one replica's microbatches (means over them)."""
    if token_budget is not None and packing:
        # means over bins do not ask who is in which: the number of bins is enough
        count = float(bins_needed(lengths, max(token_budget, longest)))
        return float(lengths.sum()) / count, float((lengths**2).sum()) / count, float(lengths.max()), count
    if token_budget is not None:
        bins = pack_by_budget(lengths, max(token_budget, longest))
    else:
        bins = [np.arange(at, min(at + microbatch, lengths.size)) for at in range(0, lengths.size, microbatch)]
    tokens = np.array([lengths[b].sum() for b in bins])
    squares = np.array([(lengths[b] ** 2).sum() for b in bins])
    if not packing:
        number, top = np.array([b.size for b in bins], dtype=np.float64), np.array([lengths[b].max() for b in bins])
        tokens, squares = number * top, number * top**2
    return float(tokens.mean()), float(squares.mean()), float(lengths.max()), float(len(bins))


def split_in_order(sequences: int, parts: int) -> list[IntArray]:
    """Contiguous shares of equal number, as a data loader deals them out."""
    return [
        np.asarray(part, dtype=np.int64) for part in np.array_split(np.arange(sequences), max(parts, 1)) if part.size
    ]


def pack_by_budget(lengths: FloatArray, token_budget: float) -> list[IntArray]:
    """First-fit decreasing bins of at most ``token_budget`` tokens, then evened out over the same number of bins.

    verl's dynamic batches take the number of bins from the budget and balance their tokens; the packers of NeMo-RL
    and slime are first-fit. Both end with the same number within one bin.

    >>> [len(part) for part in pack_by_budget(np.array([6.0, 5.0, 4.0, 3.0]), 9.0)]
    [2, 2]
    """
    return balanced_partitions(lengths, bins_needed(lengths, token_budget))


def bins_needed(lengths: FloatArray, token_budget: float) -> int:
    """Bins of at most ``token_budget`` tokens that first-fit decreasing fills.

    >>> bins_needed(np.array([6.0, 5.0, 4.0, 3.0]), 9.0)
    2
    """
    return _bins_needed(np.sort(np.asarray(lengths, dtype=np.float64)).tobytes(), float(token_budget))


@lru_cache(maxsize=512)
def _bins_needed(ascending: bytes, token_budget: float) -> int:
    """Remembered by value, as `_balanced` is: plans beside each other cut the same passes by the same budgets."""
    free: list[float] = []
    fits: list[int] = []  # bins that hold the next one, the first on top
    full: list[tuple[float, int]] = []  # the others, until lengths fall to what is free: the emptiest on top
    for length in np.frombuffer(ascending)[::-1].tolist():
        while full and -full[0][0] >= length:
            heapq.heappush(fits, heapq.heappop(full)[1])
        if not fits:
            fits.append(len(free))
            free.append(token_budget)
        first = fits[0]
        free[first] -= length
        if free[first] < length:
            heapq.heappop(fits)
            heapq.heappush(full, (-free[first], first))
    return len(free)
