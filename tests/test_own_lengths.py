"""Lengths that people bring: plain rows as JSON lines, a framework's dump with a tokenizer, and what they are told."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import rlperf
from rlperf.cli.workload import app
from rlperf.plan.compare import job_of_plan
from rlperf.plan.question.context import resolve
from rlperf.plan.question.demand import LengthSource
from rlperf.report.plan_html import plan_page
from rlperf.report.plan_text import markdown, print_plan
from rlperf.sim.rl_step.demand import Batch
from rlperf.workload import read_recording
from rlperf.workload.tables import read_table, write_table


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plain(n: int, **more: object) -> list[dict[str, object]]:
    return [{"prompt_tokens": 10 + k % 5, "response_tokens": 100 + 37 * k, "group": k // 4, **more} for k in range(n)]


def _source(task: dict[str, Any]) -> tuple[LengthSource, Batch]:
    asked = {"max_prompt_tokens": 1024, "max_response_tokens": 4096, **task}
    question = resolve(rlperf.Job(architecture="Qwen3-8B", cluster="dgx_h100", tasks=[asked]))
    return question.tasks[0].source, question.tasks[0].batches[0]


def test_prompts_may_be_told_apart_by_text_and_rl_steps_be_named_step(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt_tokens": 5, "response_tokens": 9, "group": uid, "step": step}
            for step in (3, 4) for uid in ("b7-x", "a1-y") for _ in range(2)]  # fmt: skip
    found = read_recording(written(tmp_path / "uid.jsonl", rows)).lengths
    assert found.rl_step.tolist() == [3] * 4 + [4] * 4
    assert found.group_size == 2


def test_plain_json_lines_are_read_like_the_csv(tmp_path: Path) -> None:
    found = read_recording(written(tmp_path / "own.jsonl", plain(32, id="x", max_response_tokens=5000))).lengths
    same = read_table(write_table(found, tmp_path / "own.csv"))
    assert found.max_response_tokens == same.max_response_tokens == 5000
    for name in ("prompt_tokens", "response_tokens", "group", "rl_step", "turn"):
        np.testing.assert_array_equal(getattr(found, name), getattr(same, name))
    assert found.group_size == 4
    text = read_recording(written(tmp_path / "text.jsonl", plain(32, max_response_tokens=" 5000"))).lengths
    assert text.max_response_tokens == 5000


def test_one_recorded_rl_step_is_drawn_from_more_than_once(tmp_path: Path) -> None:
    """32 of the 60 prompts of a dump stood for all rl_steps: 41.8 to 49.9 s each, whatever the seed's luck was."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = [
        {"prompt_tokens": 100, "response_tokens": int(n), "group": group, "max_response_tokens": 8192}
        for group, level in enumerate(rng.normal(6.3, 0.6, 60)) for n in rng.lognormal(level, 0.5, 8)
    ]  # fmt: skip
    recorded = np.array([row["response_tokens"] for row in rows])
    written(tmp_path / "own.jsonl", rows)
    task = {"name": "own", "workload": str(tmp_path / "own.jsonl"), "prompts_per_step": 32, "group_size": 8}
    source, batch = _source(task)
    means = []
    for seed in range(4):
        tables = source.demand(batch, None, seed).tables
        assert len(tables) == 4 and all(table.n == 256 and table.n_groups == 32 for table in tables)
        means.append(np.mean([table.response_tokens.mean() for table in tables]))
    np.testing.assert_allclose(means, recorded.mean(), rtol=0.03)
    source, shorter = _source({**task, "max_response_tokens": 500})
    cut = source.demand(shorter, None, 3).tables  # the same draws, cut
    for one, other in zip(tables, cut, strict=True):
        np.testing.assert_array_equal(np.minimum(one.response_tokens, 500), other.response_tokens)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"prompt_tokens": 5, "completion_tokens": 9}] * 512, r"'response_tokens' is missing.*511 more lines like it"),
        ([{"input": "why", "output": "because"}] * 512, r"--tokenizer tokenizer.json` \(and 511 more lines like it"),
        ([{"len": 5}] * 512, r"not a record of lengths.*511 more lines like it"),
        ([*plain(3), {"prompt_tokens": 5, "response_tokens": 0, "group": 0}], r":4: column response_tokens must be at"),
        ([*plain(3), {"prompt_tokens": 5, "response_tokens": "many", "group": 0}], r"response_tokens must hold whole"),
        ([*plain(3), {"prompt_tokens": None, "response_tokens": 4, "group": 0}], r":4: column prompt_tokens has an em"),
        (
            plain(3, tool_latency_s=None),
            r":1: column tool_latency_s has an empty cell \(leave tool_latency_s out, which",
        ),
        (plain(3, max_response_tokens="8k"), r"column max_response_tokens must be at least 1"),
    ],
)
def test_a_mistake_that_every_line_repeats_is_one_error(
    tmp_path: Path, rows: list[dict[str, object]], says: str
) -> None:
    with pytest.raises(rlperf.SpecError, match=says) as raised:
        read_recording(written(tmp_path / "own.jsonl", rows))
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_every_damaged_row_is_told_and_skipped_with_its_group_alone(tmp_path: Path, suffix: str) -> None:
    """One empty response cost the whole table, and was the only one named."""
    rows = plain(32)
    rows[5]["response_tokens"], rows[6]["response_tokens"], rows[20]["response_tokens"] = 0, "nan", 0
    file = written(tmp_path / f"own{suffix}", rows)
    if suffix == ".csv":
        file.write_text(
            "\n".join(["prompt_tokens, response_tokens ,group", *(", ".join(map(str, row.values())) for row in rows)])
        )
    with pytest.raises(rlperf.SpecError) as raised:
        read_recording(file)
    first = 7 if suffix == ".csv" else 6
    assert [problem.line for problem in raised.value.problems] == [first, first + 1]  # the third is like the first
    kept = read_recording(file, skip_damaged=True)
    assert [problem.line for problem in kept.skipped] == [first, first + 1, first + 15]
    assert sorted(set(kept.lengths.group.tolist())) == [0, 2, 3, 4, 6, 7]
    assert kept.lengths.n == 24
    assert kept.lengths.response_tokens[:5].tolist() == [100, 137, 174, 211, 396]


def test_a_needed_column_of_another_name_is_the_one_to_rename(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("input_tokens,output_tokens\n5,9\n")
    with pytest.raises(rlperf.SpecError, match=r"rename input_tokens") as raised:
        read_recording(file)
    assert [problem.suggestion for problem in raised.value.problems] == ["rename input_tokens", "rename output_tokens"]


def turns(prompts: int, *, whole: bool = True) -> list[dict[str, object]]:
    """Two trajectories of two turns for each prompt, counted within it: tools append 7 tokens."""
    return [
        {"group": prompt, "trajectory": sample, "turn": turn, "response_tokens": 10 + prompt + turn,
         "prompt_tokens": 5 if turn == 0 or not whole else 5 + 10 + prompt + 7}
        for prompt in range(prompts) for sample in range(2) for turn in range(2)
    ]  # fmt: skip


def test_trajectories_counted_within_their_prompt_are_told_apart(tmp_path: Path) -> None:
    """Those of all prompts were one, of as many turns (rl_steps of 2 min 45 s for 39 s), and tools appended nothing."""
    table = read_recording(written(tmp_path / "own.jsonl", turns(3))).lengths
    assert table.trajectory is not None and table.append_tokens is not None
    assert len(np.unique(table.trajectory)) == 6
    assert table.append_tokens.tolist() == [7, 0] * 6
    named = [{**row, "trajectory": f"{row['group']}-{row['trajectory']}"} for row in turns(3)]
    alike = read_recording(written(tmp_path / "named.jsonl", named[::-1])).lengths
    assert alike.trajectory is not None and len(np.unique(alike.trajectory)) == 6
    alone = read_recording(written(tmp_path / "alone.jsonl", [{**row, "group": 0} for row in turns(1)])).lengths
    assert alone.n_groups == 1


def test_a_turn_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rlperf.SpecError, match="turn 0 of trajectory 0 stands twice"):
        read_recording(written(tmp_path / "own.jsonl", [{**row, "turn": 0} for row in turns(2)]))


def test_turns_that_begin_anew_have_nothing_appended(tmp_path: Path) -> None:
    assert read_recording(written(tmp_path / "own.jsonl", turns(3, whole=False))).lengths.append_tokens is None


def test_tools_whose_time_no_column_says_are_named(tmp_path: Path) -> None:
    written(tmp_path / "own.jsonl", turns(4))
    task = {"name": "own", "workload": "own.jsonl", "prompts_per_step": 4, "group_size": 2, "max_response_tokens": 64}
    job = {"architecture": "Qwen3-0.6B", "cluster": "dgx_h100", "nodes": 1, "tasks": [task]}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assumed = rlperf.predict_job(tmp_path / "job.yaml").assumed
    assert "own: recorded, 16 responses; no column tool_latency_s: tools take no time" in assumed


def test_what_too_few_or_equal_responses_cannot_tell(tmp_path: Path) -> None:
    """One response was fitted with a spread of 2 % and no word; equal ones were cut by a maximum that nobody stated."""
    rows = plain(32)
    few = rlperf.workload.fit_model(written(tmp_path / "few.jsonl", rows[:1])).provenance.note
    assert few.startswith("1 response is too few to tell how lengths spread")
    assert "too few" not in rlperf.workload.fit_model(written(tmp_path / "more.jsonl", rows)).provenance.note
    alike = [{"prompt_tokens": 5, "response_tokens": 512}] * 200
    with pytest.raises(rlperf.SpecError, match="state the maximum that they had as max_response_tokens"):
        rlperf.workload.fit_model(written(tmp_path / "alike.jsonl", alike))
    stated = [{**row, "max_response_tokens": 4096} for row in alike]
    assert rlperf.workload.fit_model(written(tmp_path / "stated.jsonl", stated)).response.mean() == pytest.approx(
        512, 0.01
    )


def test_a_list_of_records_is_told_to_be_lines(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps(plain(4)))
    with pytest.raises(rlperf.SpecError, match="one a line, as JSON lines"):
        read_recording(file)


def test_a_dump_of_text_is_counted_with_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="rlperf[tokenizer] is not installed")
    words = {word: k for k, word in enumerate(["[UNK]", "why", "because", "of", "it"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    answers = ("because of it", "it")
    dump = written(tmp_path / "3.jsonl", [{"input": "why it", "output": answer} for answer in answers])
    out = tmp_path / "lengths.csv"
    asked = ["convert", str(dump), "-o", str(out), "--tokenizer", str(tmp_path / "tokenizer.json")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    table = read_table(out)
    assert (table.prompt_tokens.tolist(), table.response_tokens.tolist()) == ([2, 2], [3, 1])
    assert table.n_groups == 1
    refused = CliRunner().invoke(app, ["show", str(dump)])
    assert "--tokenizer" in str(refused.exception)


def test_a_plan_warns_when_a_quarter_of_responses_is_cut(tmp_path: Path) -> None:
    own = str(written(tmp_path / "own.jsonl", plain(64)))
    short = rlperf.short_job("Qwen3-8B", 8, workload=own, prompts=8, group=4, max_response=1024)
    long = rlperf.short_job("Qwen3-8B", 8, workload=own, prompts=8, group=4, max_response=3072)
    warned = rlperf.predict_job(short)
    assert warned.truncated_fraction > 0.25
    assert warned.warnings == (
        f"{100 * warned.truncated_fraction:.1f} % of responses are cut at 1,024 tokens and lose their reward: "
        "max_response_tokens 3,072 would cut 5 %",
    )
    assert rlperf.predict_job(long).warnings == ()


def test_a_warning_stands_before_the_layout(tmp_path: Path, undrawn: None) -> None:
    own = str(written(tmp_path / "own.jsonl", plain(64)))
    plan = rlperf.plan_job(rlperf.short_job("Qwen3-8B", 8, workload=own, prompts=8, group=4, max_response=1024))
    screen = StringIO()
    print_plan(plan, Console(file=screen, width=120))
    for text in (screen.getvalue(), markdown(plan), plan_page(plan)):
        assert text.count("of responses are cut at 1,024") == 1
        assert text.index("of responses are cut at 1,024") < text.index("mini-batch 8 prompts") < text.index("TP")


def test_rollouts_are_judged_as_recorded_with_their_cap_and_turns(tmp_path: Path) -> None:
    """An audit lost both on the way: turns were refused, and responses that end alike below the cap seemed cut."""
    plan = rlperf.plan_job(model="Qwen2.5-1.5B", gpus=8, max_response="8k", prompts=16, group=4)
    config, rng = rlperf.export_plan(plan, tmp_path / "config")[0], np.random.default_rng(0)
    heads = "rl_step,group,trajectory,turn,prompt_tokens,response_tokens,max_response_tokens"
    alike = [f"{n // 64},{n // 4},{n},0,200,{min(rng.integers(100, 2000), 1500)},8192" for n in range(192)]
    turns = [f"{n // 128},{n // 8},{n // 2},{n % 2},200,{rng.integers(100, 2000)},8192" for n in range(384)]
    for name, rows in (("alike", alike), ("turns", turns)):
        (tmp_path / f"{name}.csv").write_text("\n".join([heads, *rows]) + "\n")
        found = rlperf.audit_config(config, rollouts=tmp_path / f"{name}.csv", plan=False).predicted
        assert found is not None and not any("fitted law" in words for words in found.assumed)
        tasks = tuple(
            task.model_copy(update={"workload": str(tmp_path / f"{name}.csv")}) for task in job_of_plan(plan).tasks
        )
        told = rlperf.predict_job(job_of_plan(plan).model_copy(update={"tasks": tasks}))
        assert found.stages_s.rollout == pytest.approx(told.stages_s.rollout, rel=1e-6)
