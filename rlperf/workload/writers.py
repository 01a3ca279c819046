"""Length tables as PolyTrace files, so that a planned workload can be replayed on a cluster and read back here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rlperf.errors import SpecError
from rlperf.specs.writer import write_atomic
from rlperf.workload.lengths import LengthTable


def write_polytrace(
    table: LengthTable, folder: Path | str, *, data_parallel: int = 1, tensor_parallel: int = 1
) -> list[Path]:
    """One file per rl_step in the form of a recording: packed lengths, or multi-turn trajectories.

    data_parallel, tensor_parallel  replicas and ranks per replica of the rollout that the files describe: prompts are
                                    dealt to the replicas in contiguous blocks, rank = dp_rank * tensor_parallel
    """
    if data_parallel < 1 or tensor_parallel < 1:
        raise SpecError("data_parallel and tensor_parallel must be at least 1")
    target = Path(folder)
    written = []
    for step in table.steps():
        part = table.step(int(step))
        if part.multi_turn:
            name, lines = f"multiturn_workload_step_{step}.jsonl", _multi_turn_lines(part, int(step))
        else:
            name = f"packed_lengths_step_{step}.jsonl"
            lines = _packed_lines(part, int(step), data_parallel, tensor_parallel)
        written.append(write_atomic(target / name, "".join(json.dumps(line) + "\n" for line in lines)))
    return written


def write_workload(table: LengthTable, path: Path | str) -> Path:
    """All rl_steps in one workload file, ``{"<rl_step>": {"input": [...], "output_groups": [[...], ...]}}``."""
    if table.multi_turn:
        raise SpecError(
            "workload files hold single-turn lengths: write lengths with turns to a folder, or to .csv or .parquet"
        )
    content = {}
    for step in table.steps():
        part = table.step(int(step))
        groups = _groups(part)
        content[str(int(step))] = {
            "input": [int(part.prompt_tokens[rows[0]]) for rows in groups],
            "output_groups": [part.response_tokens[rows].tolist() for rows in groups],
        }
    return write_atomic(path, json.dumps(content) + "\n")


def _groups(part: LengthTable) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    order = np.argsort(part.group, kind="stable")
    edges = np.flatnonzero(np.diff(part.group[order])) + 1
    return list(np.split(order, edges))


def _packed_lines(part: LengthTable, step: int, replicas: int, ranks: int) -> list[dict[str, Any]]:
    groups = _groups(part)
    block = -(-len(groups) // replicas)
    return [
        {
            "step": step,
            "rank": i // block * ranks,
            "tp_rank": 0,
            "dp_rank": i // block,
            "local_index": i % block,
            "input": int(part.prompt_tokens[rows[0]]),
            "output": part.response_tokens[rows].tolist(),
            "n_sampling": int(rows.size),
            "validate": False,
        }
        for i, rows in enumerate(groups)
    ]


def _multi_turn_lines(part: LengthTable, step: int) -> list[dict[str, Any]]:
    if part.trajectory is None:
        return []
    order = np.lexsort((part.turn, part.trajectory))
    edges = np.flatnonzero(np.diff(part.trajectory[order])) + 1
    samples: dict[int, int] = {}
    lines = []
    for rows in np.split(order, edges):
        group = int(part.group[rows[0]])
        samples[group] = samples.get(group, -1) + 1
        lines.append(_trajectory_line(part, rows, step, group, samples[group]))
    return lines


def _trajectory_line(part: LengthTable, rows: Any, step: int, group: int, sample: int) -> dict[str, Any]:
    """One trajectory in the recording's fields; an engine latency was not measured and stands as 0."""
    zeros = np.zeros(part.n)
    cached = zeros if part.cached_tokens is None else part.cached_tokens
    append = zeros if part.append_tokens is None else part.append_tokens
    latency = zeros if part.tool_latency_s is None else part.tool_latency_s
    cap = part.max_response_tokens
    turns: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for k, i in enumerate(rows):
        last = k == len(rows) - 1
        prompt, tokens = int(part.prompt_tokens[i]), int(part.response_tokens[i])
        turns.append(
            {
                "turn": k,
                "generation_prompt_len": prompt,
                "prompt_tokens": prompt,
                "cached_tokens": int(cached[i]),
                "max_new_tokens": cap,
                "completion_tokens": tokens,
                "assistant_append_len": tokens,
                "assistant_loss_len": tokens,
                "total_len_after": prompt + tokens,
                "finish_reason": "stop" if last else "tool_calls",
                "tool_call_count": 0 if last else 1,
                "engine_latency_s": 0.0,
            }
        )
        if not last:
            calls.append(
                {
                    "turn": k,
                    "tool_name": "sampled",
                    "latency_s": float(latency[i]),
                    "response_token_len": int(append[i]),
                    "append_len": int(append[i]),
                    "loss_len": 0,
                    "status": "success",
                }
            )
    first = int(part.prompt_tokens[rows[0]])
    total = turns[-1]["total_len_after"]
    response = total - first if cap is None else min(total - first, cap)
    line = {
        "step": step,
        "prompt_len": first,
        "turns": turns,
        "tool_calls": calls,
        "finish_reason": "stop",
        "final_total_len": total,
        "final_response_len": response,
        "turn_count": len(turns),
        "tool_call_count": len(calls),
        "validate": False,
        "prompt_group_id": group,
        "sample_id": sample,
    }
    return line if cap is None else {**line, "max_response_len": cap}
