"""Contexts whose tools run: how long a cache keeps them in the steady state, and what is read again of them.

Between two turns a context stays in the engine's prefix cache until those that run need its room; whoever was used
least recently goes first. In the steady state all that is told by one time x, the longest that a context is kept
(Che et al. 2002, "Hierarchical Web caching systems", section III: the characteristic time of such a cache): it is read
again where its tool takes longer. ``docs/theory/rollout.md`` has the equations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.layout import FloatArray
from rlperf.sim.rollout.tail import running_share
from rlperf.sim.rollout.trajectories import Trajectories

_PARTS = (np.arange(64) + 0.5) / 64
_STEP, _STEPS, _NEAR = 1.1, 48, 1e-6
"""Grid on which the first steady state is looked for, from that in which everything is kept to 90 times as long, and
how near numbers are found [1]."""


@dataclass(frozen=True, eq=False)
class BetweenTurns:
    """Waits of one rl_step's trajectories for their tools, the shortest first; what is summed is of one rl_step.

    Attributes
    ----------
    tool_s : how long each wait takes [s] ``[waits]``
    tool_total_s : all of them together [s]
    turns : waits of one rl_step, mean [1]
    held : token-seconds that contexts take whose waits are at most so long [tokens s] ``[waits + 1]``
    own : tokens of contexts that wait longer than each, beyond what their groups share [tokens] ``[waits + 1]``
    pairs : of these tokens with what stands before them, read again [1] ``[waits + 1]``
    shared : tokens of a context that its group has in common, mean [tokens]
    lengths : quantiles of what trajectories write, over their mean, the shortest first [1]
    of_groups : share of the trajectories of groups under way that are so themselves (`running_share`) [1]
    """

    tool_s: FloatArray
    tool_total_s: float
    turns: float
    held: FloatArray
    own: FloatArray
    pairs: FloatArray
    shared: float
    lengths: FloatArray
    of_groups: float

    @classmethod
    def of(cls, rl_steps: Sequence[Trajectories]) -> BetweenTurns:
        """From some rl_steps.

        >>> turns = np.array([4, 10]), np.array([2, 3]), np.array([5.0, 0.0])
        >>> agent = Trajectories(*turns, offsets=np.array([0, 2]), group=np.zeros(1, int), arrival_s=np.zeros(1))
        >>> waits = BetweenTurns.of([agent])  # a context of six tokens, three of them its group's, waits for 5 s
        >>> waits.held.tolist(), waits.own.tolist(), waits.pairs.tolist()
        ([0.0, 15.0], [3.0, 0.0], [13.5, 0.0])
        """
        tool, own, shared = [], [], []
        for each in rl_steps:
            waits = np.ones(each.n_turns, dtype=np.bool_)
            waits[each.offsets[1:] - 1] = False
            first = np.repeat(each.beginnings, each.turns_per_trajectory)[waits].astype(np.float64)
            tool.append(each.tool_latency_s[waits])
            own.append(np.maximum(each.final_tokens[waits] - first, 0.0))
            shared.append(first)
        n, seconds = len(rl_steps), np.concatenate(tool)
        order = np.argsort(seconds, kind="stable")
        seconds, tokens, before = seconds[order], np.concatenate(own)[order], np.concatenate(shared)[order]
        longer = _from_the_end(tokens / n)
        return cls(
            tool_s=seconds,
            tool_total_s=float(seconds.sum()) / n,
            turns=seconds.size / n,
            held=np.concatenate([[0.0], np.cumsum(tokens * seconds / n)]),
            own=longer,
            pairs=_from_the_end(tokens * (before + tokens / 2.0) / n),
            shared=float(np.mean([each.beginnings.mean() for each in rl_steps])),
            lengths=np.quantile(written := np.concatenate([each.generated_tokens for each in rl_steps]), _PARTS)
            / written.mean(),
            of_groups=running_share([(each.group, each.generated_tokens) for each in rl_steps]),
        )

    def kept_s(self, room: float, wait_s: float, rl_step_s: float) -> float:
        r"""x, the longest that a tool may take for its context to be kept; infinite where all are, -1 where none [s].

        .. math:: \frac{1}{T} \sum_j s_j \min(\tau_j + w,\ x + w) = \text{room}

        s_j own tokens of the context that waits tau_j for its tool and then w for its turn, T seconds of an rl_step.

        Parameters
        ----------
        room : tokens of the caches that those who run leave [tokens]
        wait_s : w, the same of every turn [s]
        """
        left = room * rl_step_s - wait_s * self.own[0]
        if left >= self.held[-1]:
            return float("inf")
        if left <= 0.0:
            return -1.0
        ends = self.held[1:] + self.tool_s * self.own[1:]
        index = int(ends.searchsorted(left))
        return float((left - self.held[index]) / self.own[index])

    def found(self, kept_s: float, wait_s: float, rl_step_s: float) -> tuple[float, float]:
        """Tokens and pairs of contexts that wait and will be found in the caches by their next turn, mean over time."""
        index = self.tool_s.size if kept_s == float("inf") else bisect_right(self.tool_s, kept_s)
        tokens = float(self.held[index] + wait_s * (self.own[0] - self.own[index])) / rl_step_s
        return tokens, tokens * float(self.pairs[0] / max(self.own[0], 1.0))

    def again(self, kept_s: float) -> tuple[float, float]:
        """Tokens and pairs that an rl_step reads again where contexts are kept for so long."""
        if kept_s == float("inf"):
            return 0.0, 0.0
        index = bisect_right(self.tool_s, kept_s)
        return float(self.own[index]), float(self.pairs[index])


def first_steady_s(takes_s: Callable[[float], float], kept_s: float) -> float:
    """The shortest rl_step that takes the engines as long as it lasts [s].

    ``takes_s``: of the length of an rl_step; ``kept_s``: what it is where every context is kept. Slower states may feed
    themselves, since what is read again makes contexts wait: engines that begin with short contexts stay in the first.
    """
    low = high = kept_s
    for _ in range(_STEPS):
        over = takes_s(high) - high
        if over <= _NEAR * high:
            break
        low, high = high, high * _STEP
    if low == high or over > 0.0:
        return high
    return crossing(lambda s: takes_s(s) - s, low, high)


def crossing(off: Callable[[float], float], low: float, high: float) -> float:
    """Where a function is 0, between numbers at which its signs differ."""
    from scipy.optimize import brentq  # half a second to load, which is for agents alone

    return float(brentq(off, low, high, rtol=_NEAR))


def _from_the_end(values: FloatArray) -> FloatArray:
    """Sums of all from each one on ``[values + 1]``.

    >>> _from_the_end(np.array([1.0, 2.0, 3.0])).tolist()
    [6.0, 5.0, 3.0, 0.0]
    """
    return np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])
