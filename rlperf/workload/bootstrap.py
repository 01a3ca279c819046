"""Group bootstrap: rl_steps of whole prompt groups drawn with replacement from a recording.

Davison and Hinkley, Bootstrap Methods and their Application, 1997, sec. 3.8. Whole groups, since samples of one prompt
go together. A bootstrapped longest response can be no longer than the recorded one, so it is a little short of the
truth wherever the longest response decides.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlperf.workload.lengths import Int, LengthTable


def bootstrap(table: LengthTable, random: np.random.Generator, prompts: int | None = None) -> LengthTable:
    """One rl_step of ``prompts`` groups (default: as many as there are); a group drawn twice becomes two.

    >>> table = LengthTable.from_groups([10, 20, 30], [[5, 7], [6, 9], [1, 2]])
    >>> bootstrap(table, np.random.default_rng(0)).n_groups
    3
    """
    index, groups = table.group_index()
    order = np.argsort(index, kind="stable")
    sizes = np.bincount(index, minlength=groups)
    starts = np.r_[0, np.cumsum(sizes)[:-1]]
    chosen = random.integers(0, groups, groups if prompts is None else prompts)
    rows = order[_ranges(starts[chosen], sizes[chosen])]
    fresh = np.repeat(np.arange(chosen.size), sizes[chosen])
    drawn = replace(table.where(rows), group=fresh, rl_step=np.zeros(rows.size, np.int64))
    if table.trajectory is None:
        return drawn
    span = int(table.trajectory.max()) + 1
    return replace(drawn, trajectory=fresh * span + table.trajectory[rows])


def _ranges(starts: Int, sizes: Int) -> Int:
    """Concatenated ranges [s, s + size)."""
    ends = np.cumsum(sizes)
    return np.asarray(np.arange(ends[-1]) + np.repeat(starts - np.r_[0, ends[:-1]], sizes), np.int64)
