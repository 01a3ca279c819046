"""What a rollout has to serve: trajectories of one or several turns, as flat columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlperf.errors import SpecError
from rlperf.layout import FloatArray, IntArray
from rlperf.workload.lengths import LengthTable


class Turns(NamedTuple):
    """The turns of one trajectory as plain numbers, and how many tokens of the first prompt its group shares."""

    prompt: list[int]
    response: list[int]
    tool_s: list[float]
    shared: int


@dataclass(frozen=True, eq=False)
class Trajectories:
    """Trajectories of one rl_step; turns of trajectory i are rows ``offsets[i]:offsets[i + 1]`` of the turn columns.

    Attributes
    ----------
    prompt_tokens : context before the turn: prompt, history and tool answers [tokens] ``[turns]``
    response_tokens : tokens generated in the turn, at least 1 [tokens] ``[turns]``
    tool_latency_s : seconds between the end of the turn and the next one's arrival [s] ``[turns]``
    offsets : first turn of each trajectory, and the number of turns ``[trajectories + 1]``
    group : trajectories of one group share their first prompt ``[trajectories]``
    arrival_s : when the first turn reaches the engine [s] ``[trajectories]``
    cached_tokens : of each turn's context, found in the prefix cache when recorded [tokens] ``[turns]``, or None
    shared_tokens : how much of the first prompt its group shares [tokens] ``[trajectories]``; None: all of it
    """

    prompt_tokens: IntArray
    response_tokens: IntArray
    tool_latency_s: FloatArray
    offsets: IntArray
    group: IntArray
    arrival_s: FloatArray
    cached_tokens: IntArray | None = None
    shared_tokens: IntArray | None = None

    @classmethod
    def of(
        cls,
        prompt_tokens: npt.ArrayLike,
        response_tokens: npt.ArrayLike,
        *,
        group: npt.ArrayLike | None = None,
        arrival_s: npt.ArrayLike = 0.0,
    ) -> Trajectories:
        """Single-turn trajectories; without ``group`` every one has a prompt of its own.

        >>> Trajectories.of(100, [5, 7, 9]).turns_per_trajectory.tolist()
        [1, 1, 1]
        """
        response = np.atleast_1d(np.asarray(response_tokens, dtype=np.int64))
        n = response.size
        return cls(
            prompt_tokens=np.broadcast_to(np.asarray(prompt_tokens, dtype=np.int64), (n,)).copy(),
            response_tokens=np.maximum(response, 1),
            tool_latency_s=np.zeros(n),
            offsets=np.arange(n + 1, dtype=np.int64),
            group=np.arange(n, dtype=np.int64) if group is None else np.asarray(group, dtype=np.int64),
            arrival_s=np.broadcast_to(np.asarray(arrival_s, dtype=np.float64), (n,)).copy(),
        )

    @classmethod
    def from_table(cls, table: LengthTable, *, recorded_cache: bool = False) -> Trajectories:
        """Trajectories of a length table, in the order of their first rows.

        ``recorded_cache`` keeps the recorded prefix hits (then the simulated engine takes them as given instead of
        finding its own). Groups of several rl_steps stay apart.
        """
        if table.n == 0:
            raise SpecError("rollout: the length table is empty")
        group, _ = table.group_index()
        if table.trajectory is None:
            made = cls.of(table.prompt_tokens, table.response_tokens, group=group)
            return replace(made, cached_tokens=table.cached_tokens) if recorded_cache else made
        names, first, index = np.unique(table.trajectory, return_index=True, return_inverse=True)
        rank = np.empty(len(names), dtype=np.int64)
        rank[np.argsort(first, kind="stable")] = np.arange(len(names))
        owner = rank[index.reshape(-1)]
        order = np.lexsort((table.turn, owner))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(names)))]).astype(np.int64)
        latency = table.tool_latency_s
        return cls(
            prompt_tokens=table.prompt_tokens[order],
            response_tokens=np.maximum(table.response_tokens[order], 1),
            tool_latency_s=np.zeros(table.n) if latency is None else np.nan_to_num(latency[order]),
            offsets=offsets,
            group=group[order][offsets[:-1]],
            arrival_s=np.zeros(len(names)),
            cached_tokens=table.cached_tokens[order] if recorded_cache and table.cached_tokens is not None else None,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_turns(self) -> int:
        """Turns of all trajectories together."""
        return len(self.prompt_tokens)

    @property
    def turns_per_trajectory(self) -> IntArray:
        """Turns of each trajectory ``[trajectories]``."""
        return np.diff(self.offsets)

    @property
    def single_turn(self) -> bool:
        """Whether every trajectory has one turn."""
        return self.n_turns == len(self)

    @property
    def turn_owner(self) -> IntArray:
        """Trajectory of each turn ``[turns]``."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.turns_per_trajectory)

    @property
    def generated_tokens(self) -> IntArray:
        """Tokens generated by each trajectory over all its turns [tokens] ``[trajectories]``."""
        return np.add.reduceat(self.response_tokens, self.offsets[:-1]) if len(self) else np.zeros(0, dtype=np.int64)

    def turns_of_each(self, shared: int) -> list[Turns]:
        """Every trajectory by itself."""
        columns = self.prompt_tokens.tolist(), self.response_tokens.tolist(), self.tool_latency_s.tolist()
        begins, ends = self.offsets[:-1].tolist(), self.offsets[1:].tolist()
        prompt, response, tool_s = columns
        parts = [slice(*each) for each in zip(begins, ends, strict=True)]
        return [Turns(prompt[part], response[part], tool_s[part], shared) for part in parts]

    @property
    def final_tokens(self) -> IntArray:
        """Context of each turn when it ends [tokens] ``[turns]``."""
        return self.prompt_tokens + self.response_tokens

    @property
    def beginnings(self) -> IntArray:
        """Tokens of each first prompt that others of its group may have left in the cache ``[trajectories]``.

        The last token of a prompt is always computed.

        >>> group = Trajectories.of([40, 90], [5, 5], group=[0, 0])
        >>> group.beginnings.tolist(), replace(group, shared_tokens=np.array([64, 64])).beginnings.tolist()
        ([39, 89], [39, 64])
        """
        whole: IntArray = np.maximum(self.prompt_tokens[self.offsets[:-1]] - 1, 0)
        return whole if self.shared_tokens is None else np.minimum(whole, self.shared_tokens)

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Trajectories:
        """The trajectories that an index array or a mask selects, in that order."""
        chosen = np.flatnonzero(index) if index.dtype == np.bool_ else np.asarray(index, dtype=np.int64)
        counts = self.turns_per_trajectory[chosen]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        rows = np.repeat(self.offsets[chosen] - offsets[:-1], counts) + np.arange(offsets[-1])
        return Trajectories(
            prompt_tokens=self.prompt_tokens[rows],
            response_tokens=self.response_tokens[rows],
            tool_latency_s=self.tool_latency_s[rows],
            offsets=offsets,
            group=self.group[chosen],
            arrival_s=self.arrival_s[chosen],
            cached_tokens=None if self.cached_tokens is None else self.cached_tokens[rows],
            shared_tokens=None if self.shared_tokens is None else self.shared_tokens[chosen],
        )
