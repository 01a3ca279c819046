"""rlperf compare: common draws, equal sides, plans as jobs, verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from rlperf.api import ask
from rlperf.cli.audited import assumed_lines
from rlperf.cli.main import app
from rlperf.comparing import _configuration, _job
from rlperf.frameworks.export import export_run, plan_texts
from rlperf.frameworks.imports import import_config
from rlperf.frameworks.imports import job_of as job_of_config
from rlperf.frameworks.registry import adapter_of
from rlperf.plan.answer.plan import Plan
from rlperf.plan.compare import compare_jobs, job_of_plan
from rlperf.sim.rl_step.uncertainty import drafted_sigma
from rlperf.specs.job import Job
from rlperf.workload import LengthTable
from rlperf.workload.bootstrap import bootstrap
from tests.framework_samples import sample_run

JOB = """
name: small
architecture: Qwen3-8B
cluster: dgx_h100
nodes: 1
framework: verl==0.9.1
tasks:
  - name: math
    workload: math
    prompts_per_step: 16
    group_size: 8
    max_prompt_tokens: 1024
    max_response_tokens: {cap}
modes: [colocated]
pools:
  - role: rollout
    devices: 8
    layout: {{tensor_parallel: {tensor}}}
    settings: {{max_running: {running}, memory_fraction: 0.6}}
  - role: trainer
    devices: 8
    layout: {{tensor_parallel: 2, pipeline_parallel: 1, context_parallel: 1, zero_stage: 1}}
    settings: {{backend: megatron, token_budget: 16384}}
"""


def write(folder: Path, name: str, cap: int = 4096, tensor: int = 1, running: int = 128) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(JOB.format(cap=cap, tensor=tensor, running=running))
    return path


def test_bootstrapped_table_keeps_groups_whole() -> None:
    random = np.random.default_rng(0)
    table = LengthTable.from_groups(random.integers(10, 90, 20), random.integers(1, 500, (20, 4)))
    drawn = bootstrap(table, np.random.default_rng(1))
    assert drawn.n == table.n
    assert drawn.n_groups == 20
    known = {tuple(sorted(table.response_tokens[table.group == g].tolist())) for g in range(20)}
    for group in range(20):
        assert tuple(sorted(drawn.response_tokens[drawn.group == group].tolist())) in known


def test_a_job_against_itself_and_a_shorter_cap(tmp_path: Path) -> None:
    same, other = write(tmp_path, "same"), write(tmp_path, "short", cap=2048)
    question, shorter = ask(same), ask(other)
    alike = compare_jobs(question.context, question.context, draws=4)
    assert alike.step.ratio == 1.0
    assert not alike.step.apart
    found = compare_jobs(question.context, shorter.context, draws=4)
    assert found.step.apart
    assert found.step.high < 1.0
    assert found.first.stages_s.shape == found.second.stages_s.shape == (5,)
    # the same groups on both sides: the ratio varies less than either side
    ratio = np.log(found.second.draws_s / found.first.draws_s)
    assert ratio.std() < 1.2 * np.log(found.first.draws_s).std() + 1e-9


def test_what_one_side_alone_is_unsure_of_is_in_the_interval(tmp_path: Path) -> None:
    """compare left out whether drafts are accepted: 27 % (16 .. 38) faster, where `--what-if` said 21 % (5 .. 34)."""
    plain, drafting = write(tmp_path, "plain"), tmp_path / "drafting.yaml"
    drafting.write_text(plain.read_text().replace("{max_running", "{speculation: eagle3:3, max_running"))
    first, second = (ask(path).context for path in (plain, drafting))
    found = compare_jobs(first, second, draws=3)
    drafted = drafted_sigma(found.second.evaluation.cost, found.second.evaluation.seconds)
    assert drafted > 0.05
    assert np.log(found.step.high / found.step.ratio) >= 1.645 * drafted
    assert found.step.ratio == pytest.approx(found.second.evaluation.rl_step_s / found.first.evaluation.rl_step_s)
    alike = compare_jobs(second, second, draws=3).step
    assert (alike.low, alike.high) == pytest.approx((1.0, 1.0))


def test_rl_steps_of_other_work_are_compared_per_token(tmp_path: Path) -> None:
    """Half the prompts beat the whole batch by 75 %."""
    whole, half = write(tmp_path, "whole"), tmp_path / "half.yaml"
    half.write_text(whole.read_text().replace("prompts_per_step: 16", "prompts_per_step: 8"))
    first, second = (ask(path).context for path in (whole, half))
    found = compare_jobs(first, second, draws=3)
    assert found.step.ratio < 0.95
    said = found.verdict("whole", "half")
    assert said.startswith("not the same work: of whole ")
    assert said.endswith(found.device_token.sentence("whole", "half"))
    assert compare_jobs(first, first, draws=3).verdict("a", "b").startswith("a and b cannot")


def test_another_model_is_said_and_another_name_of_the_same_is_none(tmp_path: Path) -> None:
    """Two models were compared as if the one were a faster way to train the other."""
    file = write(tmp_path, "a")
    same, small = (Job.model_validate({**yaml.safe_load(file.read_text()), "architecture": each})
                   for each in ("Qwen/Qwen3-8B-Base", "Qwen3-4B"))  # fmt: skip
    a, b, c = (ask(each).context for each in (file, same, small))
    assert compare_jobs(a, b, draws=3).verdict("a", "b").startswith("a and b cannot be told apart")
    other = compare_jobs(a, c, draws=3)
    assert other.models == ("Qwen3-8B", "Qwen3-4B")
    assert other.verdict("a", "c").startswith("not the same model (Qwen3-8B, Qwen3-4B): c beats a ")


def test_command_line_speaks_json_and_words(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a"), write(tmp_path, "b", tensor=8)
    runner = CliRunner()
    machine = runner.invoke(app, ["compare", str(a), str(b), "--draws", "3", "--json"])
    assert machine.exit_code == 0
    data = json.loads(machine.stdout)
    assert data["step"]["low"] <= data["step"]["ratio"] <= data["step"]["high"]
    assert set(data["sides"][0]["stages_s"]) == {"rollout", "scoring", "training", "weight_sync", "rest"}
    for side in data["sides"]:  # the plan's own number, which its stages add up to, and not the mean of the draws
        assert side["rl_step_s"] == pytest.approx(sum(side["stages_s"].values()))
    assert "beats" in data["verdict"] or "cannot be told apart" in data["verdict"]
    people = runner.invoke(app, ["compare", str(a), str(b), "--draws", "3"])
    assert people.exit_code == 0
    assert "rl_step" in people.stdout


def test_a_plan_compares_as_the_job_that_it_pins(tmp_path: Path) -> None:
    from rlperf.plan.planner import plan_job

    path = write(tmp_path, "job")
    question = ask(path)
    plan: Plan = plan_job(question.context, facts=question.facts)
    pinned = job_of_plan(plan)
    assert pinned.pool("trainer").layout.tensor_parallel == (2,)
    again = ask(pinned)
    found = compare_jobs(question.context, again.context, (question.facts, again.facts), draws=3)
    assert found.step.ratio == pytest.approx(1.0, abs=0.02)
    assert found.second.filled == ()


def test_a_configuration_is_compared_on_the_other_sides_cluster(tmp_path: Path) -> None:
    """It was read as of H100, without a word: the file of a plan for A100 beat its plan by 88 %."""
    job, config = write(tmp_path, "a100"), tmp_path / "config.yaml"
    job.write_text(job.read_text().replace("dgx_h100", "dgx_a100"))
    config.write_text(
        export_run(sample_run(Random(3), "verl"), adapter_of("verl"), "0.9", "config").files["config.yaml"]
    )
    beside = _configuration(config, _job(job, None), None, "programming")
    assert beside.question.context.job.cluster == "dgx_a100"
    assert beside.taken == ("cluster dgx_a100, as of the other",)
    alone = _configuration(config, None, None, None)
    assert alone.question.context.job.cluster == "dgx_h100"
    assert alone.taken == ("cluster dgx_h100", "workload math")
    one = Job.model_validate(yaml.safe_load(job.read_text()))
    two = one.tasks[0].model_copy(update={"name": "code"})
    both = _job(one.model_copy(update={"sharing": "mixed", "tasks": (one.tasks[0], two)}), None)
    mixed = _configuration(config, both, None, None)  # whose lengths no one name says
    assert mixed.taken[1] == f"workload math, where the other's are of {one.tasks[0].name}, code"


def test_the_header_of_an_exported_plan_names_its_cluster(tmp_path: Path) -> None:
    """No key does: elsewhere the file of a plan for A100 was audited, imported and compared on H100."""
    from rlperf.plan.planner import plan_job

    path = write(tmp_path, "job")
    path.write_text(path.read_text().replace("dgx_h100", "dgx_a100"))
    question = ask(path)
    plan = plan_job(question.context, facts=question.facts)
    text = plan_texts(plan)["config.yaml"]
    assert "\n# Planned for dgx_a100: 8 x a100_80g_sxm; lengths of math.\n" in text, text[:400]
    config = tmp_path / "config.yaml"
    config.write_text(text)
    imported = import_config([config])
    assert job_of_config(imported).cluster == "dgx_a100"
    assert job_of_config(imported, cluster="dgx_h200").cluster == "dgx_h200"
    assert assumed_lines(imported, None, "math") == ["assumed: cluster dgx_a100, as the file's header says"]
    assert _configuration(config, _job(write(tmp_path, "other"), None), None, "math").taken == (
        "cluster dgx_a100, as its header says",
    )
    # what people run, and so audit, is the script beside it: its plan for B200 was out of memory on H100 with 99 %
    (tmp_path / "config.sh").write_text(plan_texts(plan)["config.sh"])
    assert job_of_config(import_config([tmp_path / "config.sh"])).cluster == "dgx_a100"
    config.write_text(text.replace("for dgx_a100:", "for nobody_knows:"))
    assert assumed_lines(import_config([config]), None, "math") == [
        "assumed: cluster dgx_h100, where the file's header has nobody_knows"
    ]


def test_the_header_of_an_exported_plan_names_the_rollouts_own_cluster(tmp_path: Path) -> None:
    """Its file was audited with both pools on the trainer's cluster: 11 min 27 s where the plan said 14 min 1 s."""
    run = sample_run(Random(3), "verl")
    files = export_run(run, adapter_of("verl"), "0.9", "config").files
    config = tmp_path / "config.yaml"
    header = "# Planned for hgx_h800, rollout on hgx_h20: rollout 64 x h20_sxm, trainer 64 x h800_sxm; lengths of math."
    config.write_text(f"{header}\n{files['config.yaml']}")
    imported = import_config([config])
    for asked, nodes in ((None, run.trainer.devices // 8), ("hgx_h800", run.trainer.devices // 8), ("dgx_h100", None)):
        job = job_of_config(imported, cluster=asked)
        assert job.pool("rollout").cluster == ("hgx_h20" if nodes else None)
        assert nodes is None or job.nodes == max(nodes, 1)
    told = "assumed: cluster hgx_h800 and rollout on hgx_h20, as the file's header says"
    assert told in assumed_lines(imported, None, "math")


def test_the_header_of_an_exported_plan_names_its_lengths(tmp_path: Path) -> None:
    """The file of a plan for agents was imported, audited and compared with the responses of math: 7 min for 11."""
    files = export_run(sample_run(Random(3), "verl"), adapter_of("verl"), "0.9", "config").files
    config = tmp_path / "config.yaml"
    for lengths, read in (("software_engineering", "software_engineering"), ("a, b", "math"), ("own.jsonl", "math")):
        config.write_text(f"# Planned for dgx_a100: 8 x a100; lengths of {lengths}.\n{files['config.yaml']}")
        imported = import_config([config])
        assert job_of_config(imported).tasks[0].workload == read
        assert job_of_config(imported, workload="searching").tasks[0].workload == "searching"
        told = (
            f"math, where the file's header has {lengths}" if read == "math" else f"{read}, as the file's header says"
        )
        assert assumed_lines(imported, "dgx_a100", None) == [f"assumed: workload {told}"]
        asked = _configuration(config, None, "dgx_a100", None)
        assert asked.question.context.job.tasks[0].workload == read


def test_the_header_of_an_exported_plan_states_its_rewards(tmp_path: Path) -> None:
    """Its file had those of the preset: 24.9 s beside the rollout where the plan had 3.7."""
    from rlperf.plan.planner import plan_job

    path = write(tmp_path, "job")
    path.write_text(path.read_text().replace("group_size", "reward_s: 20 s\n    group_size"))
    question = ask(path)
    config = tmp_path / "config.yaml"
    config.write_text(plan_texts(plan_job(question.context, facts=question.facts))["config.yaml"])
    assert "; lengths of math, rewards 20 s.\n" in config.read_text()
    damaged = tmp_path / "damaged.yaml"
    damaged.write_text(config.read_text().replace("rewards 20 s", "rewards e s, , trajectories at once"))
    assert job_of_config(import_config([damaged])).tasks[0].reward_s is None
    imported = import_config([config])
    assert job_of_config(imported).tasks[0].reward_s == 20.0
    assert job_of_config(imported, workload="programming").tasks[0].reward_s is None
    assert assumed_lines(imported, "dgx_h100", None)[1:] == ["assumed: rewards of 20 s, as its header says"]
    said = CliRunner().invoke(app, ["import", str(config), "--out", str(tmp_path / "imported.yaml"), "--json"])
    assert json.loads(said.stdout)["assumed"][1:] == ["workload math, as the file's header says",
                                                      "rewards of 20 s, as its header says"]  # fmt: skip
    found = _configuration(config, _job(path, None), None, None).question.context.job
    assert (found.tasks[0].workload, found.tasks[0].reward_s) == ("math", 20.0)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    from rlperf.errors import SpecError

    result = CliRunner().invoke(app, ["compare", str(tmp_path / "no.yaml"), str(write(tmp_path, "a"))])
    assert isinstance(result.exception, SpecError)
    assert "no.yaml" in str(result.exception)
