"""What a user names beside what is due: a folder, a job, a launch script that names accelerate's config."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import rlperf
from rlperf.api import ask
from rlperf.cli import main
from rlperf.comparing import _names
from rlperf.frameworks.audit.answer import report
from rlperf.frameworks.export import write_file
from rlperf.frameworks.expressible import modes_words
from rlperf.frameworks.imports import describe, import_config, job_of
from rlperf.plan.answer.plan import MemoryUse
from rlperf.plan.answer.prediction import _against_preemption, _engine_knob
from rlperf.plan.answer.whole import WholeStep
from rlperf.plan.question.demand import batches
from rlperf.plan.size_target import SizeTarget
from rlperf.plan.sizing import SizeRow, Sizing
from rlperf.report.plan_files import read_plan
from rlperf.report.plan_text import paired_words
from rlperf.report.workload import recording_summary
from rlperf.specs.job import Task
from rlperf.specs.profiles import load_device
from rlperf.specs.short_job import cluster_named
from rlperf.workload.readers import read_recording

JOB = rlperf.short_job("Qwen3-8B", 16, "h100", framework="trl", max_response="2k", prompts=32, group=4)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl")
    rlperf.export_plan(rlperf.plan_job(JOB), folder)
    return folder


def test_a_launch_script_is_read_with_the_accelerate_config_that_it_names(exported: Path) -> None:
    script, both = (
        import_config([exported / "config.sh"]),
        import_config([exported / "config.yaml", exported / "config_accelerate.yaml"]),
    )
    assert script.run.devices == both.run.devices == 16
    assert script.run.trainer.zero_stage == both.run.trainer.zero_stage
    assert "assumed" not in describe(script)


@pytest.mark.parametrize(
    ("named", "backend", "stage", "absent"),
    [
        ("zero1", "deepspeed", 1, ()),
        ("examples/accelerate_configs/deepspeed_zero2.yaml", "deepspeed", 2, ()),
        ("fsdp2", "fsdp2", 3, ()),
        ("multi_gpu.yaml", "ddp", 0, ()),
        ("mine.yaml", "deepspeed", 3, ("mine",)),
    ],
)
def test_a_configuration_of_accelerate_that_is_not_here_is_known_by_its_name_or_told_of(
    named: str, backend: str, stage: int, absent: tuple[str, ...], tmp_path: Path
) -> None:
    """ZeRO-3 was taken whatever was named, without a word; ``--accelerate_config`` was "refused" as an unknown key."""
    keys = "--model_name_or_path Qwen/Qwen3-1.7B --num_generations 8 --use_vllm true --vllm_mode colocate"
    (tmp_path / "cli.sh").write_text(f"trl grpo --accelerate_config {named} --num_processes 4 {keys}\n")
    (tmp_path / "run.sh").write_text(f"accelerate launch --num_processes 4 --config-file={named} grpo.py {keys}\n")
    stated = {"model_name_or_path": "Qwen/Qwen3-1.7B", "num_generations": 8, "use_vllm": True}
    launched = {"accelerate_config": named, "num_processes": 4}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**launched, **stated}))
    for name in ("cli.sh", "run.sh", "run.yaml"):
        read = import_config([tmp_path / name])
        assert (read.run.trainer.backend, read.run.trainer.zero_stage, read.run.devices) == (backend, stage, 4)
        assert read.absent_bases == absent and not read.unknown
    (tmp_path / "other.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    both = import_config([tmp_path / "cli.sh", tmp_path / "other.yaml"])
    assert both.run.trainer.backend == "ddp" and both.absent_bases == ()


def test_the_command_line_stands_over_what_its_configuration_says_of_the_launch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("accelerate_config: zero3\nnum_processes: 8\nnum_generations: 8\nbeta: 0.1\n")
    (tmp_path / "run.sh").write_text("trl grpo --config run.yaml --num_processes 2 --accelerate_config zero1\n")
    read = import_config([tmp_path / "run.sh"])
    assert (read.run.devices, read.run.trainer.zero_stage) == (2, 1)


def test_devices_that_no_file_states_are_called_assumed(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tmp_path / "config.yaml"
    alone.write_text((exported / "config.yaml").read_text())
    assumed = "8 GPUs (assumed: name accelerate's config too, or a launch script that says --num_processes)"
    assert assumed in describe(import_config([alone]))
    launch = (exported / "config_accelerate.yaml").read_text()
    (tmp_path / "config_accelerate.yaml").write_text(re.sub(r"num_processes: \d+", "num_processes: 3", launch))
    monkeypatch.chdir(tmp_path)  # another's lies where the command is given
    beside = import_config([exported / "config.yaml"])  # what was exported with it states them
    assert beside.run.devices == 16 and "assumed" not in describe(beside)


def test_the_server_that_was_written_beside_an_exported_configuration_is_read_with_it(tmp_path: Path) -> None:
    """One engine was assumed for the eight of the plan: 23 min 26 s for 5 min 44 s."""
    plan = rlperf.plan_job(JOB.model_copy(update={"modes": ("disaggregated",)}))
    rlperf.export_plan(plan, tmp_path)
    for names in (["config.yaml"], ["config.sh"], ["config.sh", "config_server.sh"]):
        read = import_config([tmp_path / name for name in names])
        assert read.run.devices == 16 and "assumed" not in describe(read)
        seconds = rlperf.predict_job(job_of(read)).rl_step_s
        assert seconds == pytest.approx(plan.phases[0].predicted.rl_step_s, rel=1e-3)


def test_a_folder_is_told_by_its_files(exported: Path) -> None:
    with pytest.raises(rlperf.SpecError, match=r"is a folder \(name what runs: config.sh, config.yaml"):
        rlperf.audit_config(exported)


def test_a_job_or_plan_is_no_configuration(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("architecture: Qwen3-8B\ncluster: dgx_h100\ntasks: [{name: a, workload: math}]\n")
    with pytest.raises(rlperf.SpecError, match=r"a job or plan of rlperf, not a framework's .*rlperf export"):
        rlperf.audit_config(job)


@pytest.mark.parametrize(("running", "said"), [(512, True), (16, False)])
def test_preemption_is_advised_against_where_it_takes_time(running: int, said: bool) -> None:
    job = rlperf.short_job("Qwen2.5-32B", 8, "h200", max_response="8k", prompts=128, group=8).model_dump(
        mode="json", exclude_none=True
    )
    settings = {"max_running": running, "memory_fraction": 0.6}
    job["pools"] = [{"role": "rollout", "layout": {"tensor_parallel": 4}, "settings": settings}]
    predicted = rlperf.predict_job(job)
    words = [line for line in predicted.advice if "preemptions per rl_step take" in line]
    assert bool(words) == said == (predicted.idle_fraction["preemption"] >= 0.01)
    # halves of the 512 were judged: with 256 and 128 the rl_step takes longer, which was advised
    assert all(line.endswith(" % of the rollout: raise memory_fraction or tensor_parallel") for line in words)


def test_knobs_that_the_planner_set_are_not_advised_against() -> None:
    told = {
        "raise memory_fraction": {"role": "rollout", "settings": {"memory_fraction": 0.6}},
        "raise tensor_parallel, or lower max_running to 64": {
            "role": "rollout", "layout": {"tensor_parallel": 4}, "settings": {"max_running": 512}
        },
        "fewer requests at once would gain nothing": {"role": "rollout", "settings": {"max_running": 512}},
        "the planner chose max_running, memory_fraction and tensor_parallel with this counted": {
            "role": "rollout", "layout": {"tensor_parallel": [2, 4]}
        },
    }  # fmt: skip
    job = rlperf.short_job("Qwen3-8B", 8, "h100").model_dump(mode="json", exclude_none=True)
    for words, stated in told.items():
        context = ask(rlperf.Job.model_validate({**job, "pools": [stated]})).context
        assert _against_preemption(context, 64 if "lower" in words else None) == words


def test_a_knob_without_a_key_is_not_advised() -> None:
    """OpenRLHF and TRL take no number of running requests: it was advised to lower it."""
    context = ask(rlperf.short_job("Qwen3-8B", 8, "h100", framework="openrlhf")).context
    own = "; max_running is the framework's own"
    words = _against_preemption(context, None)
    assert words == f"the planner chose memory_fraction and tensor_parallel with this counted{own}"


@pytest.mark.parametrize(
    "text", ["algorithm: {a: 1}\nactor_rollout_ref: {b: 2}\n", "cluster: {n_nodes: 1}\nactor: {}\n"]
)
def test_a_frameworks_configuration_is_no_job(text: str, tmp_path: Path) -> None:
    """Its keys were listed as unknown fields of a job."""
    file = tmp_path / "config.yaml"
    file.write_text(text)
    for command in (rlperf.plan_job, rlperf.predict_job, lambda file: write_file(file, None, tmp_path / "out")):
        with pytest.raises(rlperf.SpecError, match=r"is a framework's configuration, no job \(`rlperf import "):
            command(file)
    file.write_text("nodes: 2\npools: []\n")
    with pytest.raises(rlperf.SpecError, match="architecture: is missing"):
        rlperf.plan_job(file)


@pytest.mark.parametrize("name", ["run.sh", "launch.txt", "launch"])
@pytest.mark.parametrize("head", ["", "#!/bin/bash\nset -x\n", "export A='b: {'\nCUDA_VISIBLE_DEVICES=0 "])
def test_a_launch_script_is_no_job(name: str, head: str, tmp_path: Path) -> None:
    script = tmp_path / name
    script.write_text(head + "python3 -m verl.trainer.main_ppo " + "data.train_batch_size=64 " * 40)
    for command in (rlperf.plan_job, rlperf.predict_job, lambda file: write_file(file, None, tmp_path / "out")):
        with pytest.raises(rlperf.SpecError, match=r"is a launch script, no job \(`rlperf import ") as refused:
            command(script)
        assert len(str(refused.value)) < 400
    text = tmp_path / "job.yaml"
    text.write_text("word " * 400)
    with pytest.raises(rlperf.SpecError) as refused:
        rlperf.plan_job(text)
    assert len(str(refused.value)) < 400 and "launch script" not in str(refused.value)
    with pytest.raises(rlperf.SpecError, match="no such file"):
        rlperf.plan_job(tmp_path / "missing.sh")


def test_what_a_run_has_written_is_no_job_and_a_job_no_plan(tmp_path: Path) -> None:
    for name, text in (
        ("lengths.jsonl", '{"prompt_tokens": 5}\n{"prompt_tokens": 6}\n'),
        ("run.log", "step:1 - a:2\n"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(rlperf.SpecError, match=rf"{name}: is what a run has written, no job \(`rlperf explain "):
            rlperf.plan_job(tmp_path / name)
    with pytest.raises(rlperf.SpecError, match="no such file"):
        rlperf.plan_job(tmp_path / "missing.jsonl")
    (tmp_path / "job.yaml").write_text("architecture: Qwen3-8B\ntasks: []\n")
    with pytest.raises(rlperf.SpecError, match=r"job.yaml: is a job, no plan \(`rlperf plan "):
        read_plan(tmp_path / "job.yaml")


@pytest.mark.parametrize("gpu", ["a100_80gb", "A100 80GB", "a100_80g"])
def test_gigabytes_of_a_device_are_spelt_either_way(gpu: str) -> None:
    assert load_device(gpu).name == "a100_80g_sxm"


def test_several_frameworks_are_told_how_they_are_ranked() -> None:
    with pytest.raises(rlperf.SpecError, match=r"ranked: rlperf plan --framework verl,slime, "):
        rlperf.plan_job(rlperf.short_job("Qwen3-8B", 8, framework="verl,slime"))


def test_the_cheapest_cluster_is_told_with_those_within_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace()
    monkeypatch.setattr(WholeStep, "of", lambda _: SimpleNamespace(rl_step_s=100.0, high_s=125.0))
    rows = [
        SizeRow(cluster, nodes, 8 * nodes, 100.0, 100.0, usd, meets)
        for cluster, nodes, usd, meets in (
            ("a", 1, 10.0, True), ("b", 2, 10.6, True), ("b", 1, 9.0, False), ("c", 4, 13.0, True), ("a", 2, 11.0, True)
        )
    ]  # fmt: skip
    found = Sizing(SizeTarget("step", 200.0), tuple(rows), rows[0], plan, by="usd")
    assert found.verdict == "1 node of a: the cheapest; dearer, but within the interval of its prediction: 2 x b (+6 %)"
    assert replace(found, rows=(rows[0], rows[3])).verdict == "1 node of a: the cheapest"
    passed_over = SizeRow("c", 3, 24, 100.0, 100.0, 8.8, True, off_path=True)
    on_path, odd = replace(rows[3], usd_per_step=10.3), replace(passed_over, cluster="d", usd_per_step=10.5)
    said = replace(found, rows=(*rows[:2], passed_over, on_path, odd)).verdict
    dearer = "dearer, but within the interval of its prediction: 4 x c (+3 %), 2 x b (+6 %)"
    assert said.endswith(f"; cheaper, but off the beaten path: 3 x c (-12 %); {dearer}")


def test_two_plans_are_told_apart_by_their_folders() -> None:
    assert _names(Path("q1/plan.yaml"), Path("q3/plan.yaml")) == ("q1/plan", "q3/plan")
    assert _names(Path("a/job.yaml"), Path("a/wider.yaml")) == ("job", "wider")
    assert _names(Path("job.yaml"), Path("job.yaml")) == ("job.yaml", "job.yaml")


def test_a_mini_batch_that_divides_nothing_is_told_with_those_that_do() -> None:
    with pytest.raises(rlperf.SpecError, match=r"100 does not divide prompts_per_step 512 .write 128 or 64."):
        batches(Task(name="math", workload="math", prompts_per_step=512, mini_batch=100, max_response_tokens=1024))


def test_a_price_may_be_that_of_a_device() -> None:
    assert [cluster_named(name) for name in ("h100", "dgx_h200", "theirs")] == ["dgx_h100", "dgx_h200", "theirs"]


def test_modes_that_a_framework_has_not_as_they_are_named_are_told() -> None:
    job = rlperf.short_job("Qwen3-8B", 16, mode="async")
    told = {}
    for framework, modes in (("areal", ("async",)), ("verl", ("colocated", "disaggregated")), ("verl", ("colocated",))):
        asked = job.model_copy(update={"framework": framework, "modes": modes})
        told[framework, modes] = modes_words(asked, ask(asked).context.job)
    assert list(told.values()) == [
        ("async at staleness 1: in files of areal that is one_step_off",),
        ("verl does not run disaggregated: not planned",), ()
    ]  # fmt: skip


def test_an_import_may_name_the_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, out = tmp_path / "run.sh", tmp_path / "job.yaml"
    script.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=/models/my5b "
                      "actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8\n")  # fmt: skip
    command = ["rlperf", "import", str(script), "--architecture", "Qwen3-4B", "--out", str(out)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as left:
        main.run()
    assert not left.value.code and "architecture: Qwen3-4B" in out.read_text()


def test_an_audit_says_how_many_responses_are_cut(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    keys = "data.train_batch_size=16 data.max_response_length=512 actor_rollout_ref.rollout.name=vllm"
    model = "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct trainer.n_gpus_per_node=8"
    script.write_text(f"python3 -m verl.trainer.main_ppo {keys} {model}\n")
    found = rlperf.audit_config(script, plan=False)
    assert any("of responses are cut at 512 tokens" in line for line in report(found))


def test_turns_are_shown_where_no_cached_tokens_are_recorded(tmp_path: Path) -> None:
    log = tmp_path / "agent.jsonl"
    row = {"rl_step": 0, "prompt_tokens": 100, "response_tokens": 50, "append_tokens": 10, "tool_latency_s": 2.0}
    turns = [(number // 2, number, turn) for number in range(4) for turn in range(3)]
    lines = [{**row, "group": group, "trajectory": number, "turn": turn} for group, number, turn in turns]
    log.write_text("\n".join(map(json.dumps, lines)))
    summary = recording_summary(read_recording([log]))
    assert summary["turns_per_trajectory"] == 3 and summary["tool_wait_s"]["mean"] == 2.0
    assert "cached_fraction" not in summary


@pytest.mark.parametrize(("group", "algorithm", "said"), [(1, "grpo", True), (2, "grpo", False), (1, "ppo", False)])
def test_a_group_of_one_has_nothing_to_be_better_than(group: int, algorithm: str, said: bool) -> None:
    found = rlperf.predict_job(
        model="Qwen2.5-1.5B", gpus=8, prompts=16, group=group, max_response="1k", algorithm=algorithm
    )
    assert any("no advantage" in words for words in found.warnings) == said


def test_a_larger_loss_that_is_less_certain_is_explained() -> None:
    assert "the less certain one" in paired_words([(0.264, True), (0.308, False)])
    assert not paired_words([(0.05, False), (0.264, True)]) and not paired_words([])


def test_the_mode_that_people_call_sync_is_named() -> None:
    with pytest.raises(rlperf.SpecError, match="did you mean colocated"):
        rlperf.short_job("Qwen3-8B", 8, mode="sync")


@pytest.mark.parametrize(("framework", "parks"), [("trl", False), ("verl", True)])
def test_parking_is_advised_where_files_can_say_it(framework: str, parks: bool) -> None:
    """TRL keeps its trainer's states on the devices: it was advised to park them all the same."""
    job = rlperf.short_job("Qwen3-32B", 8, framework=framework, max_response="8k").stated()
    trainer = {"layout": {"zero_stage": 3}, "settings": {"parked": False, "token_budget": 10240}}
    pools = [{"role": "rollout", "settings": {"memory_fraction": 0.9}}, {"role": "trainer", **trainer}]
    (line,) = [each for each in rlperf.predict_job({**job, "pools": pools}).advice if each.startswith("rollout is ")]
    assert ("(parked: true)" in line) == parks and "lower memory_fraction" in line


@pytest.mark.parametrize(
    ("cache", "advised"), [(20e9, "lower memory_fraction"), (5e9, "raise tensor_parallel, and lower")]
)
def test_wider_engines_are_advised_only_where_the_cache_is_too_small_to_give_way(cache: float, advised: str) -> None:
    """A cache fills the engine's share: narrower weights leave it more, and the device no less full."""
    parts = {"weights": 60e9 - cache, "kv cache": cache, "trainer, idle": 0.0}
    use = MemoryUse(total=80e9, low=79e9, high=81e9, limit=80e9, allowed=70e9, risk=0.9, parts=parts)
    context = ask(rlperf.short_job("Qwen3-8B", 8)).context
    assert _engine_knob(context, use).startswith(advised)
    assert ("tensor_parallel" in _engine_knob(context, use)) == (cache < use.total - use.allowed)
