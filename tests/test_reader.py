"""The YAML reader: lines, all problems at once, suggestions; and files that are written whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from rlperf.errors import InfeasibleError, Problem, Rejection, SpecError, did_you_mean
from rlperf.specs.choice import Counts, Range
from rlperf.specs.job import Job, Task
from rlperf.specs.pool import LayoutChoice, PoolSpec
from rlperf.specs.reader import parse_document, read_document, read_spec, validate
from rlperf.specs.writer import write_atomic
from rlperf.units import Seconds

JOB = """\
architecture: Qwen3-8B
cluster: dgx_h100
tasks:
  - name: math
    workload: math
    prompts_per_step: 128
    max_response_tokens: 8192
"""


def problems_of(text: str, spec: type[BaseModel] = Job) -> list[str]:
    with pytest.raises(SpecError) as caught:
        validate(parse_document(text, "job.yaml"), spec)
    return [str(problem) for problem in caught.value.problems]


def test_a_job_with_defaults() -> None:
    job = validate(parse_document(JOB, "job.yaml"), Job)
    assert job.tasks[0].prompts_per_step == (128,)
    assert job.all_roles == ("rollout", "trainer", "reference")
    assert job.pool("trainer") == PoolSpec(role="trainer")


def test_every_problem_is_listed_with_its_line() -> None:
    text = JOB.replace("workload: math", "workloat: math") + "limits: {step: 300}\nnodes: -2\nfoo: 1\n"
    assert set(problems_of(text)) == {
        "job.yaml:4: tasks.0.workload: is missing",
        "job.yaml:5: tasks.0.workloat: unknown field (did you mean workload?)",
        "job.yaml:8: limits.step: 300 has no unit: write it with one, such as '300 s'",
        "job.yaml:9: nodes: Input should be greater than 0 (given: -2)",
        "job.yaml:10: foo: unknown field",
    }


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("cluster: dgx_h100", "cluster: dgx_h100\nalgorithm: GSPO", "GSPO has no critic and takes what grpo does"),
        ("128", "0", "tasks.0.prompts_per_step: 0 is not a positive whole number"),
        ("128", "[]", "the list is empty"),
        ("128", "{min: 64, max: 8, factor: 2}", r"max \(8\) is below min \(64\)"),
        ("128", "{min: 8, max: 64}", "give either factor or step"),
        ("128", "1.5", "1.5 is not a positive whole number"),
        ("8192", "'many'", "'many' is not a number of tokens: write it as 16384 or 16k"),
        ("name: math", "name: ''", "at least 1 character"),
        ("cluster: dgx_h100", "cluster: dgx_h100\nmodes: [async]", "modes: async needs limits.staleness"),
        ("cluster: dgx_h100", "cluster: dgx_h100\nalgorithm: sft", "algorithm"),
        ("cluster: dgx_h100", "cluster: dgx_h100\npools: [{role: trainer, settings: {max_running: 8}}]",
         "max_running cannot be set on a trainer pool"),
        ("cluster: dgx_h100", "cluster: dgx_h100\npools: [{role: trainer}, {role: trainer}]", "pools: several"),
        ("max_response_tokens: 8192", "max_response_tokens: 8192\n    mini_batch: 256", "256 prompts. is above"),
    ],
)  # fmt: skip
def test_bad_jobs(old: str, new: str, complaint: str) -> None:
    found = problems_of(JOB.replace(old, new))
    assert len(found) == 1, found
    assert re.search(complaint, found[0]), found


def test_a_field_in_the_wrong_place_is_told_its_own() -> None:
    text = JOB + "rl_steps: 100\noffload: none\n"
    assert [line.partition(": ")[2] for line in problems_of(text)] == [
        "rl_steps: unknown field (it belongs to run or horizon or tasks)",
        "offload: unknown field (it belongs to layout)",
    ]


def test_twice_named_tasks() -> None:
    task = "  - {name: math, workload: math, prompts_per_step: 8, max_response_tokens: 64}\n"
    assert "tasks: names stand twice: math" in problems_of(JOB + task)[0]


def test_fields_that_exclude_each_other_are_all_told_where_they_stand() -> None:
    text = JOB + "modes: [async, one_step_off]\npools: [{role: trainer}, {role: trainer}]\n"
    assert problems_of(text) == [
        "job.yaml:9: pools: several for one role: trainer",
        "job.yaml:8: modes: async and one_step_off need limits.staleness of at least 1: limits: {staleness: 1}",
    ]


def test_broken_yaml_and_missing_files(tmp_path: Path) -> None:
    assert problems_of("a: [1, 2\nb: 3\n")[0].startswith("job.yaml:2: is not valid YAML")
    assert problems_of("")[0] == "job.yaml: is empty"
    assert problems_of("a: 1\na: 2\n")[0] == "job.yaml:2: a: stands twice"
    (tmp_path / "job.yaml").write_text(JOB)
    with pytest.raises(SpecError, match=r"no such file \(did you mean job.yaml\?\)"):
        read_spec(tmp_path / "jab.yaml", Job)
    with pytest.raises(SpecError, match="cannot be read"):
        read_document(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not UTF-8"):
        read_document(tmp_path / "binary")


def test_ranges_and_lists_are_open() -> None:
    class Holder(BaseModel):
        model_config = ConfigDict(frozen=True)
        n: Counts
        wait: Seconds = 0.0

    assert Holder(n=8).n == (8,)  # type: ignore[arg-type]
    assert Holder(n=[8, 8, 16]).n == (8, 16)  # type: ignore[arg-type]
    assert Holder(n={"min": 2, "max": 9, "step": 3}).n == (2, 5, 8, 9)  # type: ignore[arg-type]
    assert Holder(n=[8, 16], wait="2 s").model_dump(mode="json") == {"n": [8, 16], "wait": "2.0 s"}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than"):
        Range(min=1, max=10**6, step=1).values()


def test_a_job_reads_back_from_its_own_dump() -> None:
    job = validate(parse_document(JOB + "limits: {step: 300 s}\nhorizon: {rl_steps: 20, switch: 60 s}\n", "j"), Job)
    assert Job.model_validate(job.model_dump(mode="json", exclude_none=True)) == job


def test_unknown_words_in_a_layout() -> None:
    with pytest.raises(ValueError, match="not one of none, selective, full"):
        LayoutChoice(activation_recompute="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zero_stage"):
        LayoutChoice(zero_stage=4)  # type: ignore[arg-type]
    assert Task(name="a", workload="math", prompts_per_step=4, max_response_tokens=8).group_size == (8,)  # type: ignore[arg-type]


def test_write_atomic_writes_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep" / "plan.yaml"
    write_atomic(target, "one")
    assert target.read_text() == "one"
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(SpecError, match="No space left"):
        write_atomic(target, "two")
    assert target.read_text() == "one"
    assert [p.name for p in target.parent.iterdir()] == ["plan.yaml"]


def test_errors_say_what_and_where() -> None:
    error = SpecError([Problem("is wrong", "a.yaml", 3, "write 4"), Problem("too")])
    assert str(error) == "a.yaml:3: is wrong (write 4)\ntoo"
    assert isinstance(error, ValueError)
    infeasible = InfeasibleError("nothing fits", [Rejection("device memory", 12)], "1.2 GB too much")
    assert infeasible.exit_code == 1
    assert "12 candidates: device memory" in str(infeasible)
    assert "nearest miss: 1.2 GB too much" in str(infeasible)
    assert did_you_mean("zzz", ["alpha"]) is None


def test_what_stands_in_another_form_is_told_in_words_of_the_file(tmp_path: Path) -> None:
    """`tasks: {name: m}` was no "valid tuple", and a share in percent no "valid number"."""
    file = tmp_path / "job.yaml"
    file.write_text(
        "architecture: Qwen3-8B\ncluster: dgx_h100\ntasks:\n  name: m\n  workload: math\n"
        "limits: {truncated_fraction: 5 %}\nhorizon: 5\n"
    )
    with pytest.raises(SpecError) as refused:
        read_spec(file, Job)
    said = {problem.message: (problem.line, problem.suggestion) for problem in refused.value.problems}
    assert said["tasks: a list is due"] == (3, "each entry begins with '- '")
    assert said["horizon: fields with values are due"] == (7, "name: value")
    (share,) = [found for message, found in said.items() if message.startswith("limits.truncated_fraction")]
    assert share == (6, "write 0.05")


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("pools: [{role: rollout, layout: {tp: 2}}]", "unknown field (here it is tensor_parallel)"),
        ("pools: [{role: rollout, layot: {}}]", "unknown field (did you mean layout?)"),
        ("model: Qwen3-8B", "unknown field (here it is architecture)"),
        ("zero_stage: 3", "unknown field (it belongs to layout)"),
        ("horizon: {rl_step: 2}", "unknown field (did you mean rl_steps?)"),
        ("algorithm: GRPO", "(did you mean grpo?)"),
    ],
)
def test_a_field_or_word_that_is_not_known_is_told_by_those_beside_it(field: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate(parse_document(field, "job.yaml"), Job)
    assert said in str(caught.value)
