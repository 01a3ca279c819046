"""One PolyTrace record at a time: what a line must hold, and what is wrong with it where it does not.

Formats are those of the public PolyTrace suite (RL in the Wild, arXiv 2509.25279). Every parser takes the decoded
record and appends to its sink's columns, or raises `DamagedError` with the reason; the reader adds file and line.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rlperf.units import MOST, MOST_COUNT


class DamagedError(Exception):
    """This record cannot be used; the message says why."""


@dataclass
class LengthColumns:
    """Growing columns of a length table; 8 bytes a number, so that 5 million samples need a few hundred MB."""

    prompt: array[int] = field(default_factory=lambda: array("q"))
    response: array[int] = field(default_factory=lambda: array("q"))
    group: array[int] = field(default_factory=lambda: array("q"))
    step: array[int] = field(default_factory=lambda: array("q"))
    turn: array[int] = field(default_factory=lambda: array("q"))
    trajectory: array[int] = field(default_factory=lambda: array("q"))
    cached: array[int] = field(default_factory=lambda: array("q"))
    append: array[int] = field(default_factory=lambda: array("q"))
    latency: array[float] = field(default_factory=lambda: array("d"))
    caps: set[int] = field(default_factory=set)
    context_caps: set[int] = field(default_factory=set)
    multi_turn: bool = False
    trajectories: int = 0
    groups: dict[tuple[int, Any], int] = field(default_factory=dict)  # (rl_step, key in the file) -> dense index
    groups_in: dict[int, int] = field(default_factory=dict)  # rl_step -> groups so far
    samples: dict[tuple[int, Any], dict[int, int]] = field(default_factory=dict)  # multi-turn: sample_id -> line
    first_line: dict[tuple[int, Any], tuple[str, int]] = field(default_factory=dict)

    def new_group(self, step: int, key: Any) -> int:
        """Dense index of a group within its rl_step."""
        found = self.groups.get((step, key))
        if found is None:
            found = self.groups_in.get(step, 0)
            self.groups_in[step] = found + 1
            self.groups[(step, key)] = found
        return found


def whole(record: Mapping[str, Any], key: str, least: int = 0, default: int | None = None) -> int:
    """A whole number >= least of a record."""
    value = record.get(key, default)
    if value is None:
        raise DamagedError(f"field {key!r} is missing")
    if type(value) is not int:
        raise DamagedError(f"field {key!r} must be a whole number, not {value!r:.60}")
    if not least <= value <= MOST_COUNT:
        raise DamagedError(f"field {key!r} must be at least {least} and at most {MOST_COUNT:,}, not {value!r:.30}")
    return value


def number(record: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number >= 0 of a record."""
    value = record.get(key, default)
    if value is None:
        raise DamagedError(f"field {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise DamagedError(f"field {key!r} must be a finite number of at least 0, not {value!r:.60}")
    return float(value)


def lengths(record: Mapping[str, Any], key: str) -> list[int]:
    """A non-empty list of whole numbers >= 1."""
    values = record.get(key)
    if type(values) is not list or not values:
        raise DamagedError(
            f"field {key!r} must be a list of response lengths" + ("" if key in record else "; it is missing")
        )
    for value in values:
        if type(value) is not int or not 1 <= value <= MOST_COUNT:
            raise DamagedError(f"field {key!r} must hold whole numbers of at least 1 token, not {value!r:.60}")
    return values


def packed_lengths(record: Mapping[str, Any], out: LengthColumns, file: str, line: int, file_step: int | None) -> None:
    """`packed_lengths_step_N.jsonl`: one prompt with its n responses."""
    step = whole(record, "step", default=file_step)
    if file_step is not None and step != file_step:
        raise DamagedError(f"field 'step' says {step}, the file name says {file_step}")
    prompt = whole(record, "input", least=1)
    values = lengths(record, "output")
    expected = record.get("n_sampling")
    if expected is not None and whole(record, "n_sampling", least=1) != len(values):
        raise DamagedError(
            f"incomplete prompt group: {_where(record, line)} has {len(values)} of n_sampling = {expected} responses"
        )
    rank, index = record.get("dp_rank", record.get("rank")), record.get("local_index")
    key = (step, ("packed", rank, index) if rank is not None and index is not None else ("line", file, line))
    if key in out.groups:
        raise DamagedError(
            f"duplicate: {_where(record, line)} of rl_step {step} is there already; read two recordings apart"
        )
    if record.get("validate") is True:
        return  # a validation prompt takes no part in the rl_step's rollout
    group = out.new_group(*key)
    n = len(values)
    out.prompt.extend([prompt] * n)
    out.response.extend(values)
    out.group.extend([group] * n)
    out.step.extend([step] * n)


def _where(record: Mapping[str, Any], line: int) -> str:
    if "local_index" in record:
        return f"prompt local_index {record['local_index']} of dp_rank {record.get('dp_rank', record.get('rank'))}"
    return f"the prompt of line {line}"


def multi_turn(record: Mapping[str, Any], out: LengthColumns, file: str, line: int, file_step: int | None) -> None:
    """`multiturn_workload_step_N.jsonl`: one trajectory with its turns and tool calls."""
    step = whole(record, "step", default=file_step)
    if file_step is not None and step != file_step:
        raise DamagedError(f"field 'step' says {step}, the file name says {file_step}")
    turns, calls = record.get("turns"), record.get("tool_calls", [])
    if type(turns) is not list or not turns or not all(isinstance(t, dict) for t in turns):
        raise DamagedError("field 'turns' must be a list with at least one turn")
    if type(calls) is not list or not all(isinstance(c, dict) for c in calls):
        raise DamagedError("field 'tool_calls' must be a list of tool calls")
    if "turn_count" in record and whole(record, "turn_count") != len(turns):
        raise DamagedError(f"field 'turn_count' says {record['turn_count']}, but {len(turns)} turns are recorded")
    group_id = whole(record, "prompt_group_id")
    sample = whole(record, "sample_id")
    key = (step, ("multiturn", group_id))
    if sample in out.samples.get(key, {}):
        raise DamagedError(f"duplicate: sample {sample} of prompt group {group_id}, rl_step {step} is there already")
    rows = _turn_rows(turns, _tool_times(calls))
    cap = whole(record, "max_response_len", least=1) if "max_response_len" in record else None
    context = whole(record, "max_model_len", least=1) if "max_model_len" in record else None
    if record.get("validate") is True:
        return
    out.multi_turn = True
    group = out.new_group(*key)
    out.samples.setdefault(key, {})[sample] = line
    out.first_line.setdefault(key, (file, line))
    if cap is not None:
        out.caps.add(cap)
    if context is not None:
        out.context_caps.add(context)
    for turn, (prompt, response, cached, append, latency) in enumerate(rows):
        out.prompt.append(prompt)
        out.response.append(response)
        out.cached.append(cached)
        out.append.append(append)
        out.latency.append(latency)
        out.turn.append(turn)
        out.group.append(group)
        out.step.append(step)
        out.trajectory.append(out.trajectories)
    out.trajectories += 1


def _tool_times(calls: list[dict[str, Any]]) -> dict[int, float]:
    """Time [s] until the tools have answered, per turn; the calls of one turn run side by side."""
    times: dict[int, float] = {}
    for call in calls:
        turn = whole(call, "turn")
        times[turn] = max(times.get(turn, 0.0), number(call, "latency_s", default=0.0))
    return times


def _turn_rows(turns: list[dict[str, Any]], times: dict[int, float]) -> list[tuple[int, int, int, int, float]]:
    """(prompt, response, cached, appended, tool time) of every turn."""
    rows = []
    for k, turn in enumerate(turns):
        if whole(turn, "turn", default=k) != k:
            raise DamagedError(f"turn {turn['turn']} stands where turn {k} is due")
        prompt_key = "generation_prompt_len" if "generation_prompt_len" in turn else "prompt_tokens"
        prompt, response = whole(turn, prompt_key, least=1), whole(turn, "completion_tokens", least=1)
        cached = whole(turn, "cached_tokens", default=0)
        if cached > prompt:
            raise DamagedError(f"turn {k}: cached_tokens {cached} exceed the prompt of {prompt} tokens")
        append = 0
        if k + 1 < len(turns):
            after = turns[k + 1]
            append = whole(after, "generation_prompt_len" if "generation_prompt_len" in after else "prompt_tokens")
            append -= prompt + response  # negative where the parser drops a malformed tool call from the history
        rows.append((prompt, response, cached, max(append, 0), times.get(k, 0.0)))
    return rows


def incomplete_groups(out: LengthColumns) -> list[tuple[str, int, int, tuple[int, Any]]]:
    """Multi-turn groups with fewer samples than the recording's group size: (message, line, group, key), file in key.

    The group size is the largest sample_id of any group, plus one: samples are numbered 0 .. n-1.
    """
    if not out.samples:
        return []
    size = max(max(s) for s in out.samples.values()) + 1
    found = []
    for key, samples in out.samples.items():
        if len(samples) < size:
            step, (_, group_id) = key
            lost = list(islice((i for i in range(size) if i not in samples), 9))
            missing = ", ".join(map(str, lost[:8])) + (" ..." if lost[8:] else "")
            message = (
                f"incomplete prompt group {group_id} of rl_step {step}: {len(samples)} of {size} samples"
                f" (missing sample_id {missing})"
            )
            found.append((message, out.first_line[key][1], out.groups[key], key))
    return found
