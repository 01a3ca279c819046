"""Readers: every PolyTrace format, and fifteen damaged files that each name what is wrong, file and line."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from rlperf.errors import SpecError
from rlperf.workload import LengthTable, concat, fit_model, read_recording
from rlperf.workload.caps import infer_cap
from rlperf.workload.tables import read_table, write_table
from rlperf.workload.writers import write_polytrace, write_workload


def packed(step: int, index: int, prompt: int, output: list[int], **more: object) -> dict[str, object]:
    base = {"step": step, "rank": 0, "tp_rank": 0, "dp_rank": 0, "local_index": index, "input": prompt}
    return {**base, "output": output, "n_sampling": len(output), "validate": False, **more}


def trajectory(step: int, group: int, sample: int, turns: list[tuple[int, int]], **more: object) -> dict[str, object]:
    rows = [
        {"turn": k, "generation_prompt_len": p, "prompt_tokens": p, "cached_tokens": p // 2, "completion_tokens": c}
        for k, (p, c) in enumerate(turns)
    ]
    calls = [{"turn": k, "latency_s": 0.5 + k} for k in range(len(turns) - 1)]
    base = {"step": step, "prompt_len": turns[0][0], "max_response_len": 500, "max_model_len": 900, "turns": rows}
    return {
        **base,
        "tool_calls": calls,
        "prompt_group_id": group,
        "sample_id": sample,
        "turn_count": len(turns),
        **more,
    }


def write(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_packed_lengths(tmp_path: Path) -> None:
    write(tmp_path / "packed_lengths_step_10.jsonl", [packed(10, 0, 7, [5, 6]), packed(10, 1, 8, [9, 3])])
    write(tmp_path / "packed_lengths_step_2.jsonl", [packed(2, 0, 4, [1, 2]), packed(2, 1, 4, [2, 2], validate=True)])
    table = read_recording(tmp_path).lengths
    assert table.steps().tolist() == [2, 10]
    assert table.step(10).response_tokens.tolist() == [5, 6, 9, 3]
    assert table.step(10).group.tolist() == [0, 0, 1, 1]
    assert (table.n_groups, table.group_size) == (3, 2)


def test_multi_turn(tmp_path: Path) -> None:
    records = [trajectory(0, 4, s, [(10, 5), (25, 6)]) for s in (0, 1)]
    recording = read_recording(write(tmp_path / "multiturn_workload_step_0.jsonl", records))
    table = recording.lengths
    assert table.n == 4
    assert table.n_trajectories == 2
    assert table.append_tokens is not None
    assert table.append_tokens.tolist() == [10, 0, 10, 0]  # 25 - (10 + 5)
    assert table.tool_latency_s is not None
    assert table.tool_latency_s.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert (table.max_response_tokens, recording.max_context_tokens) == (500, 900)
    assert table.trajectories().response_tokens.tolist() == [11, 11]


def test_other_records(tmp_path: Path) -> None:
    write(
        tmp_path / "reward_timings_step_0.jsonl",
        [{"step": 0, "dp_rank": r, "batch_size": 8, "reward_time_s": 3.0 + r, "response_sum": 9} for r in (0, 1)],
    )
    kept = {"kept_prompt_indices": [0, 2], "used_prompt_indices": [0], "train_batch_size": 2}
    write(tmp_path / "dapo_filter_indices.jsonl", [{"workload_step": 0, "trainer_step": 1, "prompt_count": 4, **kept}])
    (tmp_path / "tools.log").write_text("Step3, Request ID: a-b, Tool: search, Latency: 0.25 seconds\n")
    (tmp_path / "w.json").write_text('{"0": {"input": [3, 4], "output": [1, 2, 3, 4]}}')
    (tmp_path / "d.json").write_text('{"math_task": {}}')
    found = read_recording(tmp_path)
    assert [r.reward_time_s for r in found.rewards] == [3.0, 4.0]
    assert (found.filters[0].kept, found.filters[0].used) == (2, 1)
    assert (found.tool_latencies[0].rl_step, found.tool_latencies[0].latency_s) == (3, 0.25)
    assert found.lengths.response_tokens.tolist() == [1, 2, 3, 4]
    assert len(found.distributions) == 1


def test_archive(tmp_path: Path) -> None:
    inside = write(tmp_path / "packed_lengths_step_1.jsonl", [packed(1, 0, 4, [3, 4])])
    archive = tmp_path / "trace.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(inside, "run/packed_lengths_step_1.jsonl")
    seen: list[int] = []
    table = read_recording(archive, progress=lambda done, total: seen.append(done)).lengths
    assert table.response_tokens.tolist() == [3, 4]
    assert seen[-1] == archive.stat().st_size


def test_compressed_and_broken_archives(tmp_path: Path) -> None:
    line = json.dumps(packed(1, 0, 4, [3, 4])) + "\n"
    path = tmp_path / "packed_lengths_step_1.jsonl.gz"
    path.write_bytes(gzip.compress(line.encode()))
    assert read_recording(path).lengths.response_tokens.tolist() == [3, 4]
    whole = gzip.compress(line.encode() * 200)
    for content in (whole[:40], whole[:12] + b"\xff" * 20 + whole[32:], b"no archive"):
        for name in ("broken.jsonl.gz", "broken.tar.gz"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(SpecError, match=name.split(".", maxsplit=1)[0]):
                read_recording(tmp_path / name)


GOOD = packed(0, 0, 10, [1, 2])
DAMAGED = {
    "truncated": (b'{"step": 0, "input": 10, "output": [1, 2', 1, "not valid JSON"),
    "empty": (b"", None, "empty"),
    "not_object": (b"[1, 2]\n", 1, "JSON object"),
    "binary": (b"\xff\xfe\x00\x01\n", 1, "UTF-8"),
    "missing_input": (json.dumps({"step": 0, "output": [1, 2]}).encode(), 1, "'input' is missing"),
    "negative": (json.dumps(packed(0, 0, 10, [5, -1])).encode(), 1, "at least 1"),
    "zero": (json.dumps(packed(0, 0, 10, [5, 0])).encode(), 1, "at least 1"),
    "text": (json.dumps(packed(0, 0, 10, [5, "7"])).encode(), 1, "'7'"),  # type: ignore[list-item]
    "float": (json.dumps(packed(0, 0, 10, [5, 7.5])).encode(), 1, "7.5"),  # type: ignore[list-item]
    "no_output": (json.dumps(packed(0, 0, 10, [])).encode(), 1, "output"),
    "incomplete": (json.dumps(packed(0, 3, 10, [5], n_sampling=2)).encode(), 1, "incomplete prompt group"),
    "duplicate": (f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}\n".encode(), 2, "duplicate"),
    "wrong_step": (json.dumps(packed(4, 0, 10, [5, 6])).encode(), 1, "file name says 0"),
    "stranger": (b'{"loss": 1.0}\n', 1, "not a record of lengths"),
    "nan": (b'{"step": 0, "input": NaN, "output": [1]}\n', 1, "whole number"),
    "bool": (json.dumps(packed(0, 0, True, [5, 6])).encode(), 1, "whole number"),
    "null_list": (json.dumps({"step": 0, "input": 3, "output": None}).encode(), 1, "list"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged(tmp_path: Path, name: str) -> None:
    content, line, text = DAMAGED[name]
    path = tmp_path / "packed_lengths_step_0.jsonl"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        read_recording(path)
    assert text in str(caught.value)
    assert caught.value.problems[0].file == str(path)
    assert caught.value.problems[0].line == line
    write(tmp_path / "packed_lengths_step_7.jsonl", [packed(7, 0, 10, [4, 6])])
    kept = read_recording(tmp_path, skip_damaged=True)
    assert len(kept.skipped) == 1
    assert kept.lengths.step(7).response_tokens.tolist() == [4, 6]


def test_every_problem_is_listed(tmp_path: Path) -> None:
    records = [packed(0, 0, 10, [1, -2]), packed(0, 1, 10, [3, 4]), packed(0, 2, -1, [3, 4])]
    path = write(tmp_path / "packed_lengths_step_0.jsonl", records)
    with pytest.raises(SpecError) as caught:
        read_recording(path)
    assert [p.line for p in caught.value.problems] == [1, 3]


def test_incomplete_multi_turn_groups(tmp_path: Path) -> None:
    """A recording cut short: every line is valid, but groups lack samples. They are named, or left out and counted."""
    records = [trajectory(5, g, s, [(10, 3)]) for g, s in ((0, 0), (0, 1), (0, 2), (1, 2), (2, 0))]
    path = write(tmp_path / "multiturn_workload_step_5.jsonl", records)
    with pytest.raises(SpecError, match="incomplete prompt group 1 of rl_step 5: 1 of 3") as caught:
        read_recording(path)
    assert len(caught.value.problems) == 2
    kept = read_recording(path, skip_damaged=True)
    assert (kept.skipped_groups, kept.lengths.n_trajectories, kept.lengths.n_groups) == (2, 3, 1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"turns": []}, "at least one turn"),
        ({"turn_count": 3}, "turn_count"),
        ({"prompt_group_id": -1}, "prompt_group_id"),
        ({"tool_calls": [{"turn": 0, "latency_s": -1.0}]}, "latency_s"),
        ({"turns": [{"prompt_tokens": 5, "completion_tokens": 0}]}, "completion_tokens"),
        ({"turns": [{"prompt_tokens": 5, "completion_tokens": 1, "cached_tokens": 6}]}, "cached_tokens"),
        ({"turns": [{"turn": 1, "prompt_tokens": 5, "completion_tokens": 1}]}, "turn 0 is due"),
    ],
)
def test_damaged_trajectories(tmp_path: Path, change: dict[str, object], text: str) -> None:
    record = {**trajectory(0, 0, 0, [(10, 5)]), **change}
    if "turns" in change:
        record.pop("turn_count")
    with pytest.raises(SpecError, match=text):
        read_recording(write(tmp_path / "multiturn_workload_step_0.jsonl", [record]))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"0": {"input": [1, 2], "output": [1, 2, 3]}}', "incomplete prompt group 1"),
        ('{"0": {"input": [1, 2], "output_groups": [[1, 2], [3]]}}', "incomplete prompt group 1"),
        ('{"0": {"input": [1, 2], "output_groups": [[1, 2]]}}', "2 prompts but 1 groups"),
        ('{"0": {"input": [0], "output": [1]}}', "at least 1 token"),
        ('{"a": {"input": [1], "output": [1]}}', "rl_step 'a'"),
        ("[]", "not a PolyTrace workload file"),
        ('{"0": ', "not valid JSON"),
    ],
)
def test_damaged_workload_files(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "math.json"
    path.write_text(content)
    with pytest.raises(SpecError, match=text):
        read_recording(path)


def test_damaged_logs_and_filters(tmp_path: Path) -> None:
    (tmp_path / "tools.log").write_text("Step1, something else\n")
    with pytest.raises(SpecError, match=r"tools\.log:1: not a tool latency"):
        read_recording(tmp_path)
    record = {"workload_step": 0, "trainer_step": 0, "prompt_count": 2, "kept_prompt_indices": [5]}
    path = write(tmp_path / "dapo_filter_indices.jsonl", [{**record, "used_prompt_indices": []}])
    with pytest.raises(SpecError, match="below prompt_count = 2"):
        read_recording(path)


def test_missing_files_cannot_be_skipped(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        read_recording(tmp_path / "nowhere", skip_damaged=True)
    with pytest.raises(SpecError, match="no files to read"):
        read_recording([])


def test_cap() -> None:
    rng = np.random.default_rng(0)
    free = rng.gamma(2.0, 500.0, 4000).astype(np.int64) + 1
    assert infer_cap(free) is None
    assert infer_cap(np.minimum(free, 1500)) == 1500
    assert infer_cap(np.array([200, 300, 16000])) == 16000  # one runaway at a round maximum
    assert infer_cap(np.array([200, 300, 15873])) is None
    assert infer_cap(np.zeros(0, np.int64)) is None


def test_stated_cap_below_a_recorded_response(tmp_path: Path) -> None:
    path = write(tmp_path / "packed_lengths_step_0.jsonl", [packed(0, 0, 3, [50, 60])])
    with pytest.raises(SpecError, match="max_response_tokens is 55"):
        read_recording(path, max_response_tokens=55)
    assert read_recording(path, max_response_tokens=60).lengths.truncated.tolist() == [False, True]


def make_table() -> LengthTable:
    tables = [LengthTable.from_groups([3, 4], [[5, 6], [7, 8]], rl_step=s, max_response_tokens=8) for s in (0, 4)]
    return concat(tables)


def test_polytrace_round_trip(tmp_path: Path) -> None:
    table = make_table()
    files = write_polytrace(table, tmp_path / "out", data_parallel=2, tensor_parallel=4)
    assert [f.name for f in files] == ["packed_lengths_step_0.jsonl", "packed_lengths_step_4.jsonl"]
    first = json.loads(files[0].read_text().splitlines()[1])
    assert (first["dp_rank"], first["rank"], first["local_index"]) == (1, 4, 0)
    back = read_recording(tmp_path / "out", max_response_tokens=8).lengths
    assert same(back, table)


def same(a: LengthTable, b: LengthTable) -> bool:
    names = ("prompt_tokens", "response_tokens", "group", "rl_step", "turn")
    return all((getattr(a, n) == getattr(b, n)).all() for n in names) and a.max_response_tokens == b.max_response_tokens


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_plain_tables(tmp_path: Path, suffix: str) -> None:
    table = make_table()
    back = read_table(write_table(table, tmp_path / f"t.{suffix}"))
    assert same(back, table)
    assert same(read_recording(tmp_path / f"t.{suffix}", max_response_tokens=8).lengths, table)


def test_workload_file_round_trip(tmp_path: Path) -> None:
    table = make_table()
    assert same(read_recording(write_workload(table, tmp_path / "w.json"), max_response_tokens=8).lengths, table)


def test_bad_tables(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,other\n3,4\n")
    with pytest.raises(SpecError, match="response_tokens is missing"):
        read_table(path)
    path.write_text("prompt_tokens,response_tokens\n3,4\n3,0\n")
    with pytest.raises(SpecError, match=r"t\.csv:3: column response_tokens must be at least 1"):
        read_table(path)
    path.write_text("prompt_tokens,response_tokens\n3,2\n3,four\n")
    with pytest.raises(SpecError, match=r"t\.csv:3: column response_tokens must hold whole numbers \(given: 'four'\)"):
        read_table(path)
    path.write_text("prompt_tokens,response_tokens\n")
    with pytest.raises(SpecError, match="holds no rows"):
        read_table(path)
    path.write_text("prompt_tokens;response_tokens\n3;4\n")
    with pytest.raises(SpecError, match=r"t\.csv:1: its columns stand apart by ';' \(write commas"):
        read_table(path)
    path.write_text("prompt_tokens,response_tokens\n3,\n3,4\n")
    with pytest.raises(SpecError, match="empty cell"):
        read_table(path)
    with pytest.raises(SpecError, match="written as"):
        write_table(make_table(), tmp_path / "t.xlsx")
    (tmp_path / "p.parquet").write_text("no parquet")
    with pytest.raises(SpecError, match=r"p\.parquet: cannot be read: parquet"):
        read_recording(tmp_path / "p.parquet")


WRONG_TABLES = {
    "prompt_tokens,response_tokens\n3,2.0\n3,2.5\n": r"3: column response_tokens must hold whole .* \(given: 2\.5\)",
    "prompt_tokens,response_tokens\n3,2.0\n3,nan\n": r"3: column response_tokens must hold whole .* \(given: 'nan'\)",
    "prompt_tokens,response_tokens\n3,2.0\n3,\n": "3: column response_tokens has an empty cell",
    "prompt_tokens,response_tokens,turn\n3,2,0\n5,2,1\n": "column turn says nothing without a column trajectory",
}


@pytest.mark.parametrize("text", WRONG_TABLES)
def test_a_table_says_which_row_is_wrong(tmp_path: Path, text: str) -> None:
    """A table of floats was refused by its first row, which was whole; turns of nobody were taken for responses."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(SpecError, match=WRONG_TABLES[text]):
        read_recording(tmp_path / "t.csv")


def test_tables_as_notebooks_and_spreadsheets_write_them(tmp_path: Path) -> None:
    """Whole numbers as floats (pandas, once a column had a gap), tabs under .tsv; UTF-16 is named."""
    text = "group,prompt_tokens,response_tokens\n0.0,3.0,2.0\n0.0,3.0,4.0\n"
    (tmp_path / "t.csv").write_text(text)
    (tmp_path / "t.tsv").write_text(text.replace(",", "\t"))
    assert same(read_recording(tmp_path / "t.tsv").lengths, read_recording(tmp_path / "t.csv").lengths)
    (tmp_path / "t.csv").write_text(text, encoding="utf-16")
    with pytest.raises(SpecError, match=r"t\.csv: is UTF-16 text \(save it as UTF-8\)"):
        read_recording(tmp_path / "t.csv")


def test_turns_without_what_tools_take_say_so(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("prompt_tokens,response_tokens,turn,trajectory\n3,2,0,0\n5,2,1,0\n")
    with pytest.raises(SpecError, match="without tool_latency_s"):
        fit_model(read_recording(tmp_path / "t.csv").lengths)


def test_table_checks() -> None:
    with pytest.raises(SpecError, match="column group"):
        LengthTable(np.ones(2), np.ones(2), np.ones(3), np.ones(2), np.ones(2))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="2 prompts but 1 groups"):
        LengthTable.from_groups([1, 2], [[3]])
    with pytest.raises(SpecError, match="different maximum"):
        concat([LengthTable.from_groups([1], [[3]], max_response_tokens=c) for c in (5, 6)])
    ragged = LengthTable.from_groups([1, 2], [[3], [4, 5]])
    assert ragged.group_size is None
    assert ragged.group_sizes().tolist() == [1, 2]
    assert not ragged.truncated.any()
    with pytest.raises(ValueError, match="read-only"):
        ragged.group[0] = 1


def test_concat_keeps_groups_of_one_step_apart() -> None:
    table = concat([LengthTable.from_groups([1], [[3, 4]]), LengthTable.from_groups([2], [[5, 6]])])
    assert table.group.tolist() == [0, 0, 1, 1]
    assert table.n_groups == 2


@pytest.mark.data
def test_recordings(measured_data: Path) -> None:
    """The public facts about the four recordings, from the README of the data."""
    folder = measured_data / "polytrace"
    coder = read_recording(folder / "deepcoder_14b")
    assert (coder.lengths.n_groups, coder.lengths.group_size, coder.lengths.max_response_tokens) == (48, 8, 16000)
    assert coder.lengths.response_tokens.mean() == pytest.approx(9820, abs=1)
    assert coder.lengths.truncated.mean() == pytest.approx(0.154, abs=1e-3)
    assert len(coder.rewards) == 6
    dapo = read_recording(folder / "dapo_32b")
    assert (dapo.lengths.n, int(dapo.lengths.response_tokens.max()), dapo.lengths.max_response_tokens) == (
        3072,
        10112,
        None,
    )
    assert sum(f.kept for f in dapo.filters) / sum(f.prompts for f in dapo.filters) == pytest.approx(0.316, abs=1e-3)
    video = read_recording(folder / "video_7b").lengths
    assert (video.n, video.max_response_tokens) == (7680, 16000)
    files = [folder / "search_r1_7b" / f"multiturn_workload_step_{k}.jsonl" for k in (0, 1, 2)]
    search = read_recording(files).lengths
    assert search.n / search.n_trajectories == pytest.approx(2.63, abs=0.01)
    assert search.trajectories().response_tokens.mean() == pytest.approx(204, abs=1)
    assert search.cached_tokens is not None
    assert search.cached_tokens.sum() / search.prompt_tokens.sum() == pytest.approx(0.60, abs=0.01)


@pytest.mark.data
def test_recording_cut_short(measured_data: Path) -> None:
    """step_5 of the search recording holds 47 trajectories of 39 groups, none of them complete."""
    path = measured_data / "polytrace" / "search_r1_7b" / "multiturn_workload_step_5.jsonl"
    with pytest.raises(SpecError, match="incomplete prompt group 0 of rl_step 5: 1 of 8 samples") as caught:
        read_recording(path)
    assert len(caught.value.problems) == 39
    kept = read_recording(path, skip_damaged=True)
    assert (kept.skipped_groups, kept.lengths.n) == (39, 0)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_columns_that_are_not_read_are_named(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt_tokens": 5, "response_tokens": 7 + i, "gruop": 0} for i in range(3)]
    plain = "prompt_tokens,response_tokens,gruop\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows)
    file = tmp_path / f"own{suffix}"
    file.write_text(plain if suffix == ".csv" else "".join(json.dumps(row) + "\n" for row in rows))
    assert read_recording(file).unread == ("gruop",)
