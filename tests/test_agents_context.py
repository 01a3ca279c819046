"""Trajectories of several turns end where their context reaches what the files give an engine: prompt and response."""

from __future__ import annotations

import numpy as np
import pytest

from rlperf.plan.question.context import resolve
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.job import Job
from rlperf.workload import LengthTable, load_model, sample_lengths


def demand(workload: str, cap: int) -> Demand:
    job = Job.model_validate(
        {
            "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "framework": "verl",
            "tasks": [{"name": "t", "workload": workload, "prompts_per_step": 16, "group_size": 8,
                       "max_response_tokens": cap}],
        }
    )  # fmt: skip
    task = resolve(job).tasks[0]
    return task.source.demand(task.batches[0], None, 0)


@pytest.mark.parametrize("cap", [8192, 16384, 32768])
def test_no_context_is_longer_than_prompt_and_response_at_their_maxima(cap: int) -> None:
    """Agents with 16k tokens had contexts of 21k on average and up to 40k, for an engine that is told 18,432."""
    found = demand("software_engineering", cap)
    assert found.request_tokens == found.batch.longest_tokens == cap + 2048
    for table in found.tables:
        assert table.final_contexts.max() <= found.batch.longest_tokens
        assert table.append_tokens is not None and table.tool_latency_s is not None
        last = np.append(table.trajectory[1:] != table.trajectory[:-1], True)  # type: ignore[index]
        assert not table.append_tokens[last].any() and not table.tool_latency_s[last].any()


def test_those_that_outgrow_it_are_cut() -> None:
    short, middle, long = (demand("software_engineering", cap).truncated_fraction for cap in (8192, 16384, 32768))
    assert short > 0.9 > middle > 0.5 > 0.05 > long
    assert demand("searching", 8192).truncated_fraction == 0.0


def test_recorded_turns_are_cut_where_the_context_is_full() -> None:
    whole = sample_lengths(load_model("software_engineering"), 16, 4, seed=3)
    for most in (4096, 12_000, 20_000):
        cut = whole.within(most)
        assert cut.final_contexts.max() <= most or (cut.turn == 0).all()
        assert cut.n_groups == whole.n_groups and cut.trajectories().n == whole.trajectories().n
        rows = {(t, k): n for t, k, n in zip(cut.trajectory, cut.turn, cut.response_tokens, strict=True)}  # type: ignore[arg-type]
        for t, k, prompt, n in zip(
            whole.trajectory, whole.turn, whole.prompt_tokens, whole.response_tokens, strict=True
        ):  # type: ignore[arg-type]
            if prompt >= most and k > 0:
                assert (t, k) not in rows
            elif (t, k) in rows:
                assert rows[t, k] == max(min(n, most - prompt), 1)
    assert whole.within(1 << 20) is whole


def test_a_single_turn_knows_no_other_bound() -> None:
    table = LengthTable([10, 20], [5, 7], [0, 0], [0, 0], [0, 0])
    assert table.within(8) is table and table.final_contexts.tolist() == [15, 27]
