"""Dominance: which candidates can never be part of a best plan. The argument stands in ``docs/theory/planner.md``."""

from __future__ import annotations

import numpy as np

from rlperf.layout import BoolArray, FloatArray, IntArray


def pareto_mask(costs: FloatArray, group: IntArray | None = None) -> BoolArray:
    """Candidates that no other candidate of their group beats; of equal ones the first stays.

    ``a`` beats ``b`` when it is no worse in every column and better in one, or equal and earlier.

    Parameters
    ----------
    costs : what is to be small ``[candidates, criteria]``
    group : only candidates of equal group are compared ``[candidates]``; None: all

    >>> pareto_mask(np.array([[1.0, 5.0], [2.0, 2.0], [3.0, 3.0], [2.0, 2.0]])).tolist()
    [True, True, False, False]
    """
    values = np.asarray(costs, dtype=np.float64)
    groups = np.zeros(len(values), dtype=np.int64) if group is None else np.asarray(group)
    # a candidate can only be beaten by one that comes before it
    left = _lexicographic(values, groups)
    # criteria lie one behind another, as they are compared
    ranked, of_group = np.ascontiguousarray(values[left].T), groups[left]
    kept, first = np.zeros(len(values), dtype=np.bool_), np.ones(len(values), dtype=np.bool_)
    while len(left):
        # the first that is left of each group is beaten by none; it goes, and what it beats
        first = first[: len(left)]
        np.not_equal(of_group[1:], of_group[:-1], out=first[1:])
        leaders = first.nonzero()[0]
        kept[left[leaders]] = True
        leader = leaders[first.cumsum() - 1]
        beaten = (ranked.take(leader, axis=1) <= ranked).all(axis=0)
        stays = (~(beaten | first)).nonzero()[0]
        left, of_group, ranked = left[stays], of_group[stays], ranked.take(stays, axis=1)
    return kept


def _lexicographic(values: FloatArray, groups: IntArray) -> IntArray:
    """Order by group and then by all columns, of equal ones the first before ``[rows]``.

    Few rows are equal in the first column, and only those are sorted by the others.

    >>> _lexicographic(np.array([[2.0, 1.0], [1.0, 3.0], [1.0, 2.0]]), np.zeros(3, dtype=np.int64)).tolist()
    [2, 1, 0]
    """
    order = np.lexsort((values[:, 0], groups))
    first, of_group = values[order, 0], groups[order]
    same = (first[1:] == first[:-1]) & (of_group[1:] == of_group[:-1])
    if same.any():
        before, behind = np.append(False, same), np.append(same, False)
        tied = np.flatnonzero(before | behind)
        run = np.cumsum(~before)[tied]
        order[tied] = order[tied][np.lexsort((*values[order[tied]].T[:0:-1], run))]
    return order
