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
    count = len(costs)
    keep = np.zeros(count, dtype=np.bool_)
    groups = np.zeros(count, dtype=np.int64) if group is None else np.asarray(group)
    for each in np.unique(groups):
        rows = np.flatnonzero(groups == each)
        keep[rows] = _mask(np.asarray(costs[rows], dtype=np.float64))
    return keep


def _mask(costs: FloatArray) -> BoolArray:
    """Sweep in lexicographic order: a candidate can only be beaten by one that comes before it."""
    order = np.lexsort(costs.T[::-1])
    front: list[int] = []
    kept = np.zeros(len(costs), dtype=np.bool_)
    values = np.empty_like(costs)
    for index in order:
        row = costs[index]
        if front and bool((values[: len(front)] <= row).all(axis=1).any()):
            continue
        values[len(front)] = row
        front.append(index)
        kept[index] = True
    return kept
