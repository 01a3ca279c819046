"""The neutral table of lengths that every reader fills and every simulator reads. Numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlperf.errors import SpecError

Int = NDArray[np.int64]
Float = NDArray[np.float64]
Mask = NDArray[np.bool_]

INT_COLUMNS = ("prompt_tokens", "response_tokens", "group", "rl_step", "turn")
OPTIONAL_INT = ("trajectory", "cached_tokens", "append_tokens")
OPTIONAL_FLOAT = ("tool_latency_s",)
COLUMNS = (*INT_COLUMNS, *OPTIONAL_INT, *OPTIONAL_FLOAT)
RECOUNT = 0.01
"""Share of tokens by which text may be counted short [1], judged.

A sampled sequence is not the one that a tokenizer makes of its text, and dumps leave special tokens out, so that of the
responses that were cut hardly any has the cap's count.
"""


@dataclass(frozen=True, eq=False)
class LengthTable:
    """Struct of arrays, one entry per sampled response; one entry per turn where a trajectory has several.

    prompt_tokens        [tokens], int64 [n]; of turn k > 0: the whole context at that turn (history and tool answers)
    response_tokens      [tokens], int64 [n]; generated in this entry
    group                int64 [n]; the prompt that the entry answers, dense within its rl_step
    rl_step              int64 [n]; as recorded. For DAPO recordings this counts generation batches
    turn                 int64 [n]; 0 for single turn
    max_response_tokens  [tokens]; cap of the recording. A response at the cap is censored: it would have gone on.
                         For several turns it caps the generated and the appended tokens of the whole trajectory
    trajectory           int64 [n] or None (then every entry is a trajectory of its own)
    cached_tokens        [tokens], int64 [n] or None; of prompt_tokens, found in the prefix cache when recorded
    append_tokens        [tokens], int64 [n] or None; the tool's answer that is appended after this turn
    tool_latency_s       [s], float64 [n] or None; time until the tool has answered after this turn

    >>> table = LengthTable.from_groups([10, 20], [[5, 7], [6, 9]], max_response_tokens=9)
    >>> table.n, table.n_groups, table.group_size, int(table.truncated.sum())
    (4, 2, 2, 1)
    """

    prompt_tokens: Int
    response_tokens: Int
    group: Int
    rl_step: Int
    turn: Int
    max_response_tokens: int | None = None
    task: str = ""
    source: str = ""
    trajectory: Int | None = None
    cached_tokens: Int | None = None
    tool_latency_s: Float | None = None
    append_tokens: Int | None = None

    def __post_init__(self) -> None:
        shape = np.shape(self.prompt_tokens)
        for name in COLUMNS:
            values = getattr(self, name)
            if values is None:
                continue
            array = np.asarray(values, np.float64 if name in OPTIONAL_FLOAT else np.int64).view()
            if array.ndim != 1 or array.shape != shape:
                raise SpecError(f"length table: column {name} has shape {array.shape}, prompt_tokens has {shape}")
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @cached_property
    def digest(self) -> bytes:
        """What tells these lengths from all others, by value; when they were recorded, and by whom, is no part of it.

        >>> tables = [LengthTable.from_groups([10], [[5, last]], max_response_tokens=9) for last in (7, 7, 8)]
        >>> tables[0].digest == tables[1].digest != tables[2].digest
        True
        """
        found = blake2b(digest_size=16)
        for name in sorted({field.name for field in fields(self)} - {"rl_step", "task", "source"}):
            values = getattr(self, name)
            if isinstance(values, np.ndarray):
                found.update(name.encode())
                found.update(np.ascontiguousarray(values).tobytes())
            elif isinstance(values, int | float | str):
                found.update(f"{name}={values}".encode())
        return found.digest()

    @classmethod
    def from_groups(
        cls,
        prompt_tokens: ArrayLike,
        response_tokens: ArrayLike | Sequence[ArrayLike],
        *,
        rl_step: int = 0,
        max_response_tokens: int | None = None,
    ) -> LengthTable:
        """Table of one rl_step from prompts [g] and their responses [g, n] (or g ragged lists)."""
        groups = [np.atleast_1d(np.asarray(r, np.int64)) for r in response_tokens]  # type: ignore[union-attr]
        sizes = np.array([g.size for g in groups], np.int64)
        prompts = np.asarray(prompt_tokens, np.int64)
        if prompts.shape != sizes.shape:
            raise SpecError(f"length table: {prompts.size} prompts but {sizes.size} groups of responses")
        n = int(sizes.sum())
        return cls(
            prompt_tokens=np.repeat(prompts, sizes),
            response_tokens=np.concatenate(groups) if groups else np.zeros(0, np.int64),
            group=np.repeat(np.arange(sizes.size), sizes),
            rl_step=np.full(n, rl_step, np.int64),
            turn=np.zeros(n, np.int64),
            max_response_tokens=max_response_tokens,
        )

    def __len__(self) -> int:
        return int(self.prompt_tokens.size)

    @property
    def n(self) -> int:
        """Number of entries (turns, where there are several)."""
        return len(self)

    @property
    def multi_turn(self) -> bool:
        return self.trajectory is not None

    def steps(self) -> Int:
        """The rl_steps in the table, ascending."""
        return np.unique(self.rl_step)

    def step(self, rl_step: int) -> LengthTable:
        """The entries of one rl_step."""
        return self.where(self.rl_step == rl_step)

    def where(self, mask: Mask | Int) -> LengthTable:
        """The entries that a mask (or an index array) selects."""
        return replace(self, **{k: v[mask] for k in COLUMNS if (v := getattr(self, k)) is not None})

    def with_cap(self, max_response_tokens: int | None) -> LengthTable:
        """The same entries, with the recording's cap stated by the caller."""
        return replace(self, max_response_tokens=max_response_tokens)

    def group_index(self) -> tuple[Int, int]:
        """Index [n] of the (rl_step, group) pair of each entry, dense over the whole table, and their number."""
        if not self.n:
            return np.zeros(0, np.int64), 0
        span = int(self.group.max()) + 1
        keys = self.rl_step * span + self.group
        if bool(np.all(keys[1:] >= keys[:-1])):  # in order, as recordings are: no sort needed
            index = np.cumsum(np.r_[False, keys[1:] != keys[:-1]])
            return index, int(index[-1]) + 1
        found, index = np.unique(keys, return_inverse=True)
        return index.reshape(-1).astype(np.int64), int(found.size)

    @property
    def n_groups(self) -> int:
        """Number of prompts, counted per rl_step."""
        return self.group_index()[1]

    def trajectories(self) -> LengthTable:
        """One entry per trajectory: its first prompt, and all it generated and all the tools appended.

        response_tokens are the *generated* tokens of all turns. Single-turn tables are returned as they are.
        """
        if self.trajectory is None:
            return self
        first, index = self._trajectory_index()
        latency = self.tool_latency_s
        return replace(
            self.where(first),
            response_tokens=np.bincount(index, self.response_tokens, first.size).astype(np.int64),
            append_tokens=self._sum_per(index, self.append_tokens, first.size),
            cached_tokens=self._sum_per(index, self.cached_tokens, first.size),
            tool_latency_s=None if latency is None else np.asarray(np.bincount(index, latency, first.size), np.float64),
        )

    @property
    def final_contexts(self) -> Int:
        """Longest context of each trajectory: the prompt of a turn, and what it generated [tokens]."""
        ends = self.prompt_tokens + self.response_tokens
        if self.trajectory is None:
            return ends
        first, index = self._trajectory_index()
        longest = np.zeros(first.size, np.int64)
        np.maximum.at(longest, index, ends)
        return longest

    def within(self, most: int) -> LengthTable:
        """Trajectories of several turns that end where their context reaches ``most`` tokens, in that turn.

        A first turn stays whatever its prompt, with one token at least.

        >>> tools = {"append_tokens": [3, 3, 0], "tool_latency_s": [1, 1, 0]}
        >>> table = LengthTable([4, 9, 15], [2, 3, 5], [0] * 3, [0] * 3, [0, 1, 2], trajectory=[7] * 3, **tools)
        >>> cut = table.within(11)
        >>> cut.prompt_tokens.tolist(), cut.response_tokens.tolist(), cut.append_tokens.tolist()
        ([4, 9], [2, 2], [3, 0])
        """
        if self.trajectory is None or int((self.prompt_tokens + self.response_tokens).max(initial=0)) < most:
            return self
        first, index = self._trajectory_index()
        full = np.where(self.prompt_tokens + self.response_tokens >= most, self.turn, np.iinfo(np.int64).max)
        ends = np.full(first.size, np.iinfo(np.int64).max)
        np.minimum.at(ends, index, full)  # the turn in which it is full
        # a tool's answer that leaves no room ends it with the turn before
        none_left = (self.prompt_tokens >= most) & (self.turn > 0)
        before = np.full(first.size, np.iinfo(np.int64).max)
        np.minimum.at(before, index, np.where(none_left, self.turn - 1, np.iinfo(np.int64).max))
        last = np.minimum(ends, before)[index]
        room = np.maximum(most - self.prompt_tokens, 1)
        stays, ended = self.turn <= last, self.turn == last
        latency = self.tool_latency_s
        made = replace(
            self,
            response_tokens=np.where(ended, np.minimum(self.response_tokens, room), self.response_tokens),
            append_tokens=None if self.append_tokens is None else np.where(ended, 0, self.append_tokens),
            tool_latency_s=None if latency is None else np.where(ended, 0.0, latency),
        )
        return made.where(np.flatnonzero(stays))

    def turns(self, most: int) -> LengthTable:
        """One entry per turn of the first ``most`` trajectories: its whole context, and what it generated.

        >>> table = LengthTable([4, 9], [2, 3], [0, 0], [0, 0], [0, 1], trajectory=[7, 7], append_tokens=[3, 0])
        >>> table.turns(1).prompt_tokens.tolist(), table.turns(1).response_tokens.tolist()
        ([4, 9], [2, 3])
        """
        if self.trajectory is None:
            return self.where(np.arange(min(self.n, most)))
        _, index = self._trajectory_index()
        kept = self.where(np.flatnonzero(index < most))
        return replace(kept, turn=np.zeros(kept.n, np.int64), trajectory=None, append_tokens=None, tool_latency_s=None)

    def _trajectory_index(self) -> tuple[Int, Int]:
        """Row of the first turn of each trajectory, and the trajectory [0, m) of each row."""
        assert self.trajectory is not None
        _, index = np.unique(self.trajectory, return_inverse=True)
        index = index.reshape(-1)
        order = np.lexsort((self.turn, index))
        starts = np.flatnonzero(np.r_[True, np.diff(index[order]) != 0]) if index.size else np.zeros(0, np.int64)
        return order[starts], index

    @staticmethod
    def _sum_per(index: Int, values: Int | None, size: int) -> Int | None:
        return None if values is None else np.bincount(index, values, size).astype(np.int64)

    @property
    def n_trajectories(self) -> int:
        return self.n if self.trajectory is None else int(np.unique(self.trajectory).size)

    def group_sizes(self) -> Int:
        """Trajectories per (rl_step, group)."""
        rows = self.trajectories()
        index, count = rows.group_index()
        return np.bincount(index, minlength=count).astype(np.int64)

    @property
    def group_size(self) -> int | None:
        """Responses per prompt, or None where groups differ."""
        sizes = np.unique(self.group_sizes())
        return int(sizes[0]) if sizes.size == 1 else None

    @property
    def least_cut(self) -> int | None:
        """Tokens that every response at the cap surely has; None without a cap.

        Where text was counted, those within `RECOUNT` of the cap stand at it, and nothing ends just below: of such a
        one no more is known than that it is longer than the longest that ended, at the least the share below the cap.

        >>> LengthTable.from_groups([10], [[5, 1000]], max_response_tokens=1000).least_cut
        990
        >>> LengthTable.from_groups([10], [[998, 1000]], max_response_tokens=1000).least_cut
        999
        """
        if self.max_response_tokens is None:
            return None
        ended = self.response_tokens[self.response_tokens < self.max_response_tokens]
        return max(int(ended.max(initial=0)) + 1, int(np.ceil((1.0 - RECOUNT) * self.max_response_tokens)))

    @property
    def truncated(self) -> Mask:
        """Entries [n] that reached the cap: their true length is unknown, only that it is longer."""
        if self.max_response_tokens is None:
            return np.zeros(self.n, np.bool_)
        if self.trajectory is None:
            return self.response_tokens >= self.max_response_tokens
        _, index = self._trajectory_index()
        added = self.response_tokens + (0 if self.append_tokens is None else self.append_tokens)
        full = np.bincount(index, added) >= self.max_response_tokens
        last = np.zeros(full.size, np.int64)
        np.maximum.at(last, index, self.turn)
        return np.asarray(full[index] & (self.turn == last[index]), np.bool_)


def concat(tables: Iterable[LengthTable]) -> LengthTable:
    """One table of several. Groups stay apart by their rl_step; trajectories are renumbered.

    Tables of one rl_step that come from different recordings get their groups renumbered one after the other.
    """
    parts = [t for t in tables if t.n] or [empty()]
    caps = {t.max_response_tokens for t in parts}
    if len(caps) > 1:
        raise SpecError(
            f"length tables with different maximum response lengths cannot be joined: {sorted(map(str, caps))}"
        )
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        present = [getattr(t, name) is not None for t in parts]
        columns[name] = np.concatenate([getattr(t, name) for t in parts]) if all(present) else None
        if any(present) and not all(present):
            raise SpecError(f"length tables with and without column {name} cannot be joined")
    columns["group"] = _shifted_groups(parts)
    if columns["trajectory"] is not None:
        columns["trajectory"] = _shifted_trajectories(parts)
    return LengthTable(
        **columns,
        max_response_tokens=parts[0].max_response_tokens,
        task=parts[0].task,
        source=", ".join(dict.fromkeys(t.source for t in parts if t.source)),
    )


def _shifted_groups(parts: Sequence[LengthTable]) -> Int:
    """Groups of every part; a part that continues an rl_step already seen starts after that step's last group."""
    used: dict[int, int] = {}
    shifted = []
    for table in parts:
        groups = table.group.copy()
        for step in table.steps():
            rows = table.rl_step == step
            offset = used.get(int(step), 0)
            groups[rows] += offset
            used[int(step)] = int(groups[rows].max()) + 1
        shifted.append(groups)
    return np.concatenate(shifted)


def _shifted_trajectories(parts: Sequence[LengthTable]) -> Int:
    shifted, offset = [], 0
    for table in parts:
        assert table.trajectory is not None
        _, dense = np.unique(table.trajectory, return_inverse=True)
        shifted.append(dense.reshape(-1) + offset)
        offset += int(dense.max()) + 1
    return np.concatenate(shifted)


def empty() -> LengthTable:
    """A table without entries."""
    none = np.zeros(0, np.int64)
    return LengthTable(none, none, none, none, none)
