"""PolyTrace's workload files: ``{"<rl_step>": {"input": [...], "output": [...] | "output_groups": [[...], ...]}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlperf.errors import Problem
from rlperf.units import MOST_COUNT
from rlperf.workload.lengths import Int, LengthTable, concat, empty


def workload_table(content: Any, file: str) -> tuple[LengthTable, list[Problem]]:
    """The table of a workload file, and what is wrong with it; damaged rl_steps are left out."""
    if not isinstance(content, dict) or not content:
        due = '{"<rl_step>": {"input": [...], "output": [...]}}'
        hint = (
            "records of a table are written one a line, as JSON lines (.jsonl)" if isinstance(content, list) else None
        )
        return empty(), [Problem(f"not a PolyTrace workload file: due is {due}", file, suggestion=hint)]
    tables, problems = [], []
    for key, entry in content.items():
        where = f"rl_step {key!r}"
        if not re.fullmatch(r"-?\d{1,9}", str(key), re.ASCII) or not isinstance(entry, dict) or "input" not in entry:
            problems.append(Problem(f"{where}: a number with an object that holds 'input' and 'output' is due", file))
            continue
        found = _step(entry, int(key), where, file, problems)
        if found is not None:
            tables.append(found)
    return concat(tables), problems


def _step(entry: Mapping[str, Any], rl_step: int, where: str, file: str, problems: list[Problem]) -> LengthTable | None:
    prompts = _column(entry["input"], f"{where}: 'input'", file, problems)
    if prompts is None:
        return None
    if "output_groups" in entry:
        groups = entry["output_groups"]
        if not isinstance(groups, list) or len(groups) != prompts.size:
            count = len(groups) if isinstance(groups, list) else 0
            problems.append(Problem(f"{where}: {prompts.size} prompts but {count} groups in 'output_groups'", file))
            return None
        columns = [_column(g, f"{where}: group {i}", file, problems) for i, g in enumerate(groups)]
        largest = max((c.size for c in columns if c is not None), default=0)
        for i, column in enumerate(columns):
            if column is not None and column.size < largest:
                message = f"{where}: incomplete prompt group {i}: {column.size} of {largest} responses"
                problems.append(Problem(message, file))
        keep = [i for i, c in enumerate(columns) if c is not None and c.size == largest]
        return LengthTable.from_groups(
            prompts[keep], [c for c in columns if c is not None and c.size == largest], rl_step=rl_step
        )
    flat = _column(entry.get("output"), f"{where}: 'output'", file, problems)
    if flat is None:
        return None
    if flat.size % prompts.size:
        n = -(-flat.size // prompts.size)
        message = f"{where}: incomplete prompt group {flat.size // n}: {flat.size} responses for {prompts.size} prompts"
        problems.append(Problem(message, file))
        whole = flat.size // n
        prompts, flat = prompts[:whole], flat[: whole * n]
    return LengthTable.from_groups(prompts, flat.reshape(prompts.size, -1), rl_step=rl_step)


def _column(values: Any, where: str, file: str, problems: list[Problem]) -> Int | None:
    """Whole numbers of at least 1 token, or None and a problem."""
    if not isinstance(values, list) or not values:
        problems.append(Problem(f"{where} must be a non-empty list of lengths", file))
        return None
    if set(map(type, values)) != {int} or min(values) < 1 or max(values) > MOST_COUNT:
        wrong = next(v for v in values if type(v) is not int or not 1 <= v <= MOST_COUNT)
        problems.append(Problem(f"{where} must hold whole numbers of at least 1 token, not {wrong!r:.60}", file))
        return None
    return np.array(values, np.int64)
