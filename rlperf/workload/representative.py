"""A few rl_steps that stand for many: means over them are told with the noise of many draws."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from rlperf.workload.lengths import Float, Int, LengthTable

SETS = 4096
"""Sets that are looked at; of so many the best is some five times closer to the mean of all draws than one set is."""


def representative(tables: Sequence[LengthTable], count: int) -> Int:
    """Indices ``[count]`` of those rl_steps whose means come closest to the means of all; the closest two first.

    The time of an rl_step follows its tokens, its longest response and, of agents, who waits longest for tools. The
    longest of a small batch of a heavy-tailed law differs by a quarter from draw to draw, and the mean of four of it by
    an eighth. Of ``SETS`` random sets of ``count`` draws that one is taken which minimises

        max_f |mean_set(x_f) - mean(x_f)| / sd(x_f)

    over statistics x_f of a draw: mean prompt, mean response cut at the pooled median, at the pooled 90 % quantile and
    not at all, the longest response and its square, so that their spread is kept too; and of agents the mean and the
    longest wait of a trajectory for its tools, and the square of that.

    Parameters
    ----------
    tables : one whole rl_step each, drawn alike
    """
    if len(tables) <= count:
        return np.arange(len(tables))
    told = _statistics([table.trajectories() for table in tables])
    spread = told.std(axis=0)
    told = (told - told.mean(axis=0)) / np.where(spread > 0.0, spread, 1.0)
    sets = np.random.default_rng(0).random((SETS, len(tables))).argpartition(count, axis=1)[:, :count]
    chosen = np.sort(_closest(told, sets))
    first = _closest(told, np.array(list(combinations(chosen.tolist(), min(count, 2)))))
    return np.concatenate([first, np.setdiff1d(chosen, first)])


def _closest(told: Float, sets: Int) -> Int:
    """Of ``sets`` ``[sets x members]`` that with the least of the statistics that is furthest from 0."""
    closest: Int = sets[np.abs(told[sets].mean(axis=1)).max(axis=1).argmin()]
    return closest


def _statistics(tables: Sequence[LengthTable]) -> Float:
    """``[rl_steps x statistics]``."""
    responses = [table.response_tokens for table in tables]
    half, most = np.quantile(np.concatenate(responses), (0.5, 0.9))
    longest = np.array([float(tokens.max()) for tokens in responses])
    cut = [[np.minimum(tokens, cap).mean() for cap in (half, most, np.inf)] for tokens in responses]
    prompts = [table.prompt_tokens.mean() for table in tables]
    told = [np.column_stack([prompts, cut]), _tail(longest)]
    waits = [table.tool_latency_s for table in tables if table.tool_latency_s is not None]
    if len(waits) == len(tables):
        told += [np.array([[each.mean()] for each in waits]), _tail(np.array([each.max() for each in waits]))]
    return np.hstack(told)


def _tail(longest: Float) -> Float:
    """The longest of every rl_step and its square ``[rl_steps x 2]``."""
    return np.column_stack([longest, np.square(longest)])
