"""The border: what is read is finite, bounded and plain; what no reader foresaw is an error with file and line."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from rlperf.calibrate.kernel_tables import read_series
from rlperf.calibrate.requests.log import read_request_log
from rlperf.calibrate.tables import read_table
from rlperf.diagnose.logs import read_rank_timings
from rlperf.errors import InfeasibleError, SpecError, nearest
from rlperf.frameworks.logs.dumps import read_dump
from rlperf.frameworks.logs.read import read_log
from rlperf.frameworks.sources import read_source
from rlperf.specs.job import Job
from rlperf.specs.own_files import folder_of
from rlperf.specs.reader import (
    MOST_DEPTH,
    MOST_VALUES,
    csv_rows,
    parse_document,
    parse_json,
    read_text,
    reading,
    validate,
)
from rlperf.units import MOST, MOST_COUNT, parse_quantity
from rlperf.workload import load_model, read_recording
from rlperf.workload.formats import DamagedError, whole

JOB = {
    "architecture": "Qwen3-0.6B", "cluster": "dgx_h100",
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 16, "max_response_tokens": 1024}],
}  # fmt: skip


def refusal(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_document(text, "f.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: !!python/object/apply:os.system [ls]", "has a tag"),
        ("a: !!binary aGVsbG8=", "has a tag"),
        ("a: !mine 1", "has a tag"),
        ("a: !!int abc", "is not valid YAML"),
        ("a: " + "9" * 5000, "is not valid YAML"),
        ('a: "x\\0y"', r"holds '\x00'"),
        ('"a\\0": 1', "no plain name"),
        ("? [a]\n: b", "no plain name"),
        ("&a [*a]", "alias holds itself"),
        ("[" * 200_000, f"more than {MOST_DEPTH} levels"),
        ("- " * 200_000 + "a", f"more than {MOST_DEPTH} levels"),
        ("\n".join("  " * n + "a:" for n in range(150)), f"more than {MOST_DEPTH} levels"),
    ],
)  # fmt: skip
def test_yaml_is_plain_and_ends(text: str, complaint: str) -> None:
    said = refusal(text).replace("exceeded maximum nesting depth", f"more than {MOST_DEPTH} levels")  # PyYAML's own
    assert complaint in said


def test_aliases_that_multiply_are_refused_before_they_take_memory() -> None:
    bomb = "a: &a [1,1,1,1,1,1,1,1,1]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    assert len(bomb) < 500
    began = time.perf_counter()
    assert f"more than {MOST_VALUES:,} values" in refusal(bomb)
    assert time.perf_counter() - began < 20.0


def test_aliases_and_merges_that_people_write_are_read() -> None:
    data = parse_document("a: &x {d: 1}\nb:\n  <<: *x\n  e: 2\nc: [*x, *x]\n", "f.yaml").data
    assert data["b"] == {"d": 1, "e": 2} and data["c"] == [{"d": 1}, {"d": 1}]


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", "1e999"])
def test_no_form_holds_what_is_no_number(number: str) -> None:
    text = json.dumps(JOB)[:-1] + f', "objective": {{"minimize": "step_time", "risk": {number}}}}}'
    with pytest.raises(SpecError, match=r"is no number|a finite number"):
        validate(parse_document(text, "job.yaml"), Job)


@pytest.mark.parametrize("text", ["1e400 GB", "-3 GB", "1e30 GB", "1e-30 GB", "9" * 400 + " GB"])
def test_quantities_are_bounded(text: str) -> None:
    with pytest.raises(ValueError, match=r"is negative|beyond any quantity"):
        parse_quantity(text, "bytes")
    assert parse_quantity(f"{MOST:g} B", "bytes") == MOST and parse_quantity("0 B", "bytes") == 0.0


@pytest.mark.parametrize("value", [10**9, 10**30, 10**400, [[8]], {"a": 1}, float("nan"), None, [8, [16]]])
@pytest.mark.parametrize("name", ["prompts_per_step", "group_size", "max_response_tokens", "max_prompt_tokens"])
def test_counts_are_bounded_and_single(name: str, value: object) -> None:
    task = {**JOB["tasks"][0], name: value}  # type: ignore[dict-item]
    with pytest.raises(ValueError):  # noqa: PT011 - pydantic's and ours; that it is one of them is the point
        Job.model_validate({**JOB, "tasks": [task]})
    assert MOST_COUNT > 10_000_000


# -- what a reader did not foresee ------------------------------------------------------------------------------------


def test_a_failure_nobody_foresaw_has_file_and_line() -> None:
    for raised in (KeyError("x"), IndexError("i"), RecursionError(), OverflowError("big"), ZeroDivisionError("z")):
        with pytest.raises(SpecError, match=r"^run\.log:7: cannot be read: ."), reading("run.log", 7):
            raise raised
    with pytest.raises(InfeasibleError), reading("run.log"):
        raise InfeasibleError("an answer, no failure")


def test_devices_and_endless_files_are_not_read() -> None:
    with pytest.raises(SpecError, match="is a device"):
        read_text("/dev/zero")
    with pytest.raises(SpecError, match="cannot be read"):
        read_text("a" * 5000)
    with pytest.raises(SpecError, match="cannot be read"):
        read_text("a\0b")


def test_json_and_csv_name_the_line() -> None:
    with pytest.raises(SpecError, match=r"^t\.jsonl:4: is not valid JSON"):
        parse_json("9" * 5000, "t.jsonl", 4)
    with pytest.raises(SpecError, match=r"^t\.json: is not valid JSON: it is nested too deeply"):
        parse_json("[" * 100_000, "t.json")
    with pytest.raises(SpecError, match=r"^t\.csv:3: is not valid CSV"):
        list(csv_rows('a,b\n1,2\n"1,2\n', "t.csv"))


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def archive(name: str, content: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as made:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        made.addfile(member, io.BytesIO(content))
    return stream.getvalue()


RANKS = '{"stage": "rollout", "rank": %s, "seconds": %s, "tokens": %s}\n'


def test_every_reader_says_file_and_line(tmp_path: Path) -> None:
    wrong = written(tmp_path, "ranks.jsonl", RANKS % (0, 1.0, 5) + RANKS % (10**30, 1.0, 5))
    with pytest.raises(SpecError, match=r"ranks\.jsonl:2: "):
        read_rank_timings(wrong)
    for line in (RANKS % (0, "1e999", 5), RANKS % (0, 1.0, -5), RANKS % ("[]", 1, 1), "[1]\n", '{"stage": []}\n'):
        with pytest.raises(SpecError, match=r"r\.jsonl:1: "):
            read_rank_timings(written(tmp_path, "r.jsonl", line))
    with pytest.raises(SpecError, match=r"t\.csv:2: is not valid CSV"):
        read_table(written(tmp_path, "t.csv", 'row_id,gpu\n"a,b\n'))
    with pytest.raises(SpecError, match=r"k\.csv:2: has 3 cells for 6 columns"):
        read_series(written(tmp_path, "k.csv", "gpu,dtype,m,n,k,latency_us\nh100,bf16,1\n"))
    with pytest.raises(SpecError, match=r"k\.csv:2: is no timing of kind gemm"):
        read_series(written(tmp_path, "k.csv", "gpu,dtype,m,n,k,latency_us\nh100,bf16,1,nan,1,5\n"))
    written(tmp_path, "meta.json", b'{"model": "Qwen3-0.6B", "x": "\xff"}')
    written(tmp_path, "requests.jsonl", "[]\n")
    with pytest.raises(SpecError, match=r"meta\.json: is not UTF-8 text\n.*requests\.jsonl:1: "):
        read_request_log(tmp_path)
    written(tmp_path, "meta.json", '{"model": "Qwen3-0.6B"}')
    written(tmp_path, "requests.jsonl", '{"input_toks": 18446744073709551616, "output_toks": 9}\n')
    with pytest.raises(
        SpecError, match=r"requests\.jsonl:1: .*'input_toks' must be a number of at least 0 and at most"
    ):
        read_request_log(tmp_path)
    with pytest.raises(SpecError, match=r"dump\.jsonl:1: "):
        read_dump([written(tmp_path, "dump.jsonl", "[]\n")])
    for prompt in ("9", "9" * 400):
        with pytest.raises(SpecError, match=r"dump\.jsonl: holds a response of"):
            read_dump([written(tmp_path, "dump.jsonl", f'{{"seqlen": 5, "prompt_len": {prompt}}}\n')])
    with pytest.raises(SpecError, match=r"run\.jsonl: rl_step 1e\+30 is beyond"):
        read_log([written(tmp_path, "run.jsonl", '{"step": 1e30, "timing_s/gen": 3}\n')])
    with pytest.raises(SpecError, match=r"tfevents\.x: (cannot be read|holds no step metrics)"):
        read_log([written(tmp_path, "tfevents.x", b"\x05" + b"\0" * 11 + b"\xff" * 40)])
    with pytest.raises(SpecError, match=r"deep\.sh: "):
        read_source([written(tmp_path, "deep.sh", "python train.py --a " + "$(" * 5000)])


def test_archives_read_no_path_and_unpack_to_no_bomb(tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text("{}")
    line = json.dumps({"step": 0, "rank": 0, "local_index": 0, "input": 5, "output": [7, 8], "n_sampling": 2})
    outside = written(tmp_path, "a.tar.gz", archive("../../packed_lengths_step_0.jsonl", line.encode()))
    assert read_recording(outside).lengths.n == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "secret.jsonl"]
    bomb = written(tmp_path, "b.jsonl.gz", gzip.compress(b" " * (1 << 27)))
    with pytest.raises(SpecError, match=r"b\.jsonl\.gz: cannot be read: line 1 is longer"):
        read_recording(bomb)
    with pytest.raises(SpecError, match=r"c\.tar\.gz: cannot be read"):
        read_recording(written(tmp_path, "c.tar.gz", archive("x.jsonl", line.encode())[:-30]))


# -- the command line at the border -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("rlperf profiles list > /dev/full", 74, "error: No space left on device\n"),
        ("PYTHONIOENCODING=latin-1 LC_ALL=C rlperf profiles list > /dev/null", 0, ""),
        ("rlperf profiles list | head -1 > /dev/null; exit ${PIPESTATUS[0]}", 0, ""),
        ("rlperf profiles list --json | head -1 > /dev/null; exit ${PIPESTATUS[0]}", 0, ""),
    ],
)
def test_terminals_pipes_and_full_disks(line: str, code: int, said: str) -> None:
    line = line.replace("rlperf", f"{sys.executable} -m rlperf")
    found = subprocess.run(["/bin/bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stderr) == (code, said)


def test_a_pipe_is_read_once_and_asked_as_often_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    os.write(writer, b"a: 1")
    os.close(writer)
    pipe = f"/dev/fd/{reader}"
    assert read_text(pipe) == read_text(pipe) == "a: 1"
    assert folder_of(pipe) == tmp_path  # its names and relative paths start where it is read
    os.close(reader)


def test_a_defect_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlperf.cli import main

    def broken(**_: object) -> int:
        raise AssertionError("planted")

    monkeypatch.setattr(main, "app", broken)
    with pytest.raises(SystemExit) as stopped:
        main.run()
    said = capsys.readouterr().err
    assert stopped.value.code == 70 and "planted" in said and "defect of rlperf" in said
    codes = (Path(__file__).parent.parent / "docs" / "interfaces.md").read_text().partition("## Exit codes")[2]
    assert all(f"{code} " in codes.partition("##")[0] for code in (0, 1, 2, 3, 70, 74, 130))


@pytest.mark.parametrize("words", [["plan"], ["sweep", "s.yaml", "--out", "swept"]])
def test_who_interrupts_is_told_what_is_kept(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typer turns Ctrl-C into an exit code, without a word."""
    from rlperf.cli import main

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlperf.api.sweep_job", interrupted)
    monkeypatch.setattr("rlperf.api.load_job", interrupted)
    monkeypatch.setattr("sys.argv", ["rlperf", *words])
    with pytest.raises(SystemExit) as stopped:
        main.run()
    said = capsys.readouterr().err
    assert stopped.value.code == 130 and said.endswith("stopped\n")
    assert ("kept in swept: the same command goes on" in said) == (words[0] == "sweep")


@pytest.mark.slow
def test_names_are_text_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks of rich, formulas of matplotlib, tags of HTML and icons: a name may hold them all."""
    from rlperf.cli import main

    name = "we[/x]ird [red]$a $b {{x}} <script>alert(1)</script> :smile: 漢"
    pools = [{"role": role, "layout": {"tensor_parallel": 1}} for role in ("rollout", "trainer")]
    pinned = {"modes": ["colocated"], "trainer_backends": ["fsdp2"], "pools": pools}
    (tmp_path / "job.yaml").write_text(json.dumps({**JOB, **pinned, "name": name}, ensure_ascii=False))
    commands = (["plan", "--out", "o"], ["predict", "--figure", "o/step.svg"], ["simulate", "--out", "s"], ["explain"])
    monkeypatch.chdir(tmp_path)
    for words in (*([c[0], "job.yaml", *c[1:]] for c in commands), ["report", "o"]):
        monkeypatch.setattr("sys.argv", ["rlperf", *words])
        with pytest.raises(SystemExit) as stopped:
            main.run()
        streams = capsys.readouterr()
        assert stopped.value.code == 0, streams.err
        if words[0] in ("plan", "predict", "simulate"):
            assert "we[/x]ird [red]$a $b {{x}} <script>" in streams.out
            assert ":smile:" in "".join(streams.out.split("\n"))
    page = (tmp_path / "o" / "report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    for figure in ("o/timeline.svg", "s/rollout.svg"):
        assert "<script" not in (tmp_path / figure).read_text()


def test_a_count_of_hundreds_of_digits_and_a_word_of_a_million_letters_are_refused_at_once() -> None:
    record = {"rl_step": 10**400}
    with pytest.raises(DamagedError, match="not 1000"):
        whole(record, "rl_step")
    began = time.perf_counter()
    assert nearest("a" * 1_000_000, ["b" * 1_000]) is None
    assert time.perf_counter() - began < 1.0


@pytest.mark.parametrize(
    ("name", "value"), [("length_latency", 1e300), ("turn_icc", -0.5), ("carried", [0.0, 2.0, 0.0])]
)
def test_correlations_of_turns_are_correlations(tmp_path: Path, name: str, value: object) -> None:
    stated = yaml.safe_load((files("rlperf.workload") / "presets" / "tool_use.yaml").read_text())
    stated["turns"][name] = value
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(stated))
    with pytest.raises(SpecError, match=rf"{name} must lie between"):
        load_model(tmp_path / "model.yaml")
