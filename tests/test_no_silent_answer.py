"""What used to be answered without a word: audits of nothing, one task of several, plans that no framework runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlperf.api import ask, judge, predict_job, size_job
from rlperf.errors import InfeasibleError, SpecError
from rlperf.frameworks.expressible import precision_words
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.plan.planner import plan_job
from rlperf.plan.question.contradictions import with_units
from rlperf.report.plan_files import plan_yaml
from rlperf.specs.framework import facts_data
from rlperf.specs.job import Job
from rlperf.specs.profiles import load_device
from rlperf.specs.short_job import short_job
from rlperf.techniques import gains

from .small_configs import PLAIN

TASK = {"workload": "math", "prompts_per_step": 16, "group_size": 4, "max_prompt_tokens": 512}
MATH, CODE = (
    {"name": "math", **TASK, "max_response_tokens": 1024},
    {"name": "code", **TASK, "max_response_tokens": 4096},
)
JOB = {"architecture": "Qwen3-0.6B", "cluster": "dgx_h100", "tasks": [MATH]}
SEVERAL = {**JOB, "tasks": [MATH, CODE]}
VERL = """\
data: {train_batch_size: 64, max_prompt_length: 512, max_response_length: 1024}
actor_rollout_ref:
  model: {path: %s}
  actor: {ppo_mini_batch_size: 64, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 16384}
  rollout: {name: vllm, n: 8, tensor_model_parallel_size: 1, gpu_memory_utilization: 0.6, max_model_len: 2048}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 8, nnodes: 1}
"""


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    from rlperf.cli.main import run

    monkeypatch.setattr("sys.argv", ["rlperf", *words])
    with pytest.raises(SystemExit) as stopped:
        run()
    streams = capsys.readouterr()
    return int(stopped.value.code or 0), streams.out, streams.err


@pytest.mark.parametrize("option", ["--cluster", "--architecture", "--workload"])
def test_an_audit_with_a_name_that_nobody_knows_is_wrong_input(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(VERL % "Qwen/Qwen3-0.6B")
    code, out, err = call(capsys, monkeypatch, "audit", str(tmp_path / "run.yaml"), option, "nope_9", "--no-plan")
    assert (code, out) == (2, "") and "nope_9" in err


def test_an_audit_passes_only_what_it_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for model, said, passes, strict in (
        ("Qwen/Qwen3-0.6B", "\npasses\n", True, 0), ("org/nobody-knows", "that is no pass\n", None, 1),
    ):  # fmt: skip
        (tmp_path / "run.yaml").write_text(VERL % model)
        words = ("audit", str(tmp_path / "run.yaml"), "--cluster", "dgx_h100", "--workload", "math", "--no-plan")
        code, out, err = call(capsys, monkeypatch, *words)
        assert code == 0 and out.endswith(said), (out, err)
        assert json.loads(call(capsys, monkeypatch, *words, "--json")[1])["passes"] is passes
        code, out, _ = call(capsys, monkeypatch, *words, "--strict")
        assert code == strict and (not strict or out.endswith("does not pass\n"))


def test_an_audit_says_that_rules_of_an_unknown_trainer_were_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text("model_engine: veomni\n" + VERL % "Qwen/Qwen3-0.6B")
    words = ("audit", str(tmp_path / "run.yaml"), "--framework", "verl", "--no-plan")
    code, out, _ = call(capsys, monkeypatch, *words)
    assert code == 0 and "keys hold, but rules were not checked" in out


@pytest.mark.parametrize("command", ["predict", "simulate", "explain"])
def test_one_task_of_several_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(SEVERAL))
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, monkeypatch, command, "job.yaml")
    assert (code, out) == (2, "") and "2 tasks (math, code)" in err and "--task" in err
    seconds = []
    for task in ("math", "code"):
        code, out, err = call(capsys, monkeypatch, command, "job.yaml", "--task", task, "--json")
        assert code == 0, err
        found = json.loads(out)
        seconds.append(found.get("makespan_s") or found.get("rl_step_s") or found["predicted"]["rl_step_s"])
    assert seconds[1] > 1.5 * seconds[0]
    assert "did you mean code?" in call(capsys, monkeypatch, command, "job.yaml", "--task", "cod")[2]


def test_a_plan_of_several_tasks_is_simulated_by_phase_or_by_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said to plan the job, which it was, and `predict --task` said the first phase whatever was asked."""
    layout = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "ulysses": 1, "zero_stage": 1}
    served = {"max_running": 64, "memory_fraction": 0.5}
    pools = [
        {"role": "rollout", "layout": {"tensor_parallel": 1}, "settings": served},
        {"role": "trainer", "layout": layout, "settings": {"token_budget": 8192}},
    ]
    tasks = [{**task, "prompts_per_step": 8, "group_size": 1} for task in SEVERAL["tasks"]]
    job = Job.model_validate({**SEVERAL, "tasks": tasks, "pools": pools, "modes": "colocated"})
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan_job(ask(job).context)))
    monkeypatch.chdir(tmp_path)
    seconds = []
    for words in (["--phase", "2"], ["--task", "code"]):
        code, out, err = call(capsys, monkeypatch, "simulate", "plan.yaml", "--json", *words)
        assert code == 0, err
        seconds.append(json.loads(out)["makespan_s"])
    math, code = (judge(tmp_path / "plan.yaml", task=task)[1].rollouts[0].makespan_s for task in ("math", "code"))
    assert seconds[0] == seconds[1] == pytest.approx(code) and code > 1.5 * math
    meant = judge(tmp_path / "plan.yaml")[2].assumed[0]  # a plan's first phase was predicted without a word
    assert meant == "phase 1 of 2 is meant, math, rl_steps 0 to 0 (phase or task name another)"
    assert "no phase 2 of code" in call(capsys, monkeypatch, "simulate", "plan.yaml", "--task=code", "--phase=2")[2]


def test_a_size_that_the_jobs_own_limits_refuse_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {**JOB, "price": "2 USD/h", "limits": {"usd_per_step": "0.0001 USD"}, "modes": "colocated"}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    monkeypatch.chdir(tmp_path)
    words = ("size", "job.yaml", "--target", "usd/step<=1", "--most-nodes", "1")
    code, _, err = call(capsys, monkeypatch, *words)
    assert code == 1 and "meets usd/step<=1 within the job's own limits (usd_per_step" in err


def test_a_size_that_nothing_meets_says_what_came_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps({**JOB, "price": "2 USD/h", "modes": "colocated"}))
    monkeypatch.chdir(tmp_path)
    words = ("size", "job.yaml", "--target", "usd/step<=0.000001", "--most-nodes", "1")
    code, out, err = call(capsys, monkeypatch, *words)
    assert code == 1 and re.search(r"; the nearest: [\d.]+ USD on 1 x dgx_h100", err), (out, err)
    with pytest.raises(SpecError, match="most_nodes must be at least 1"):
        size_job(Job.model_validate(JOB), "step<=1h", most_nodes=0)


def test_no_function_takes_the_first_task_for_all() -> None:
    with pytest.raises(SpecError, match="2 tasks"):
        predict_job(SEVERAL)
    assert judge(Job.model_validate(SEVERAL), task="code")[0].tasks[0].name == "code"


def test_a_task_that_shares_the_devices_is_said_to_be_alone() -> None:
    """`compare` of a plan with its own job let math "beat" itself by 56 %: by itself it had all devices."""
    job = Job.model_validate({**SEVERAL, "sharing": "devices", "nodes": 2})
    assert any(words.startswith("sharing: devices: a task by itself") for words in judge(job, task="math")[2].assumed)
    in_turns = Job.model_validate({**SEVERAL, "nodes": 2})
    assert not any(words.startswith("sharing") for words in judge(in_turns, task="math")[2].assumed)


def test_states_on_the_host_of_an_unknown_machine_say_how_much_of_it_they_take() -> None:
    """32B on eight RTX 5090 took 524 GB of a memory that nobody has stated: a template's, for servers."""
    words = {"model": "Qwen2.5-3B", "gpus": 4, "gpu": "rtx_4090", "prompts": 16, "group": 4, "max_response": "2k"}
    job = short_job(**words, framework="trl").stated()
    free = predict_job(job)
    [told] = [each for each in free.warnings if "host memory" in each]
    share = re.fullmatch(r"the trainer takes ([\d.]+) GB of a node's host memory, 1.1 TB assumed: .*", told)
    assert share is not None and float(share[1]) == pytest.approx(3.09 * 12, rel=0.02)  # float32 weights and moments
    enough, less = (
        predict_job({**job, "limits": {"host_memory": f"{times * float(share[1])} GB"}}) for times in (1.05, 0.95)
    )
    assert enough.rl_step_s == free.rl_step_s < less.rl_step_s  # of less, a layout that keeps them on the devices
    assert not any("host memory" in each for each in (*enough.warnings, *less.warnings))
    assert not any("host memory" in each for each in predict_job({**JOB, "cluster": "generic:h100_sxm"}).warnings)


def test_a_size_is_of_all_tasks() -> None:
    found = size_job(SEVERAL, "step<=300s", most_nodes=1)
    assert found.plan is not None and found.best is not None
    steps = [phase.predicted.rl_step_s for phase in found.plan.phases]
    assert len(steps) == 2 and found.best.rl_step_s == pytest.approx(sum(steps))


def test_predict_does_not_call_fit_what_plan_refuses() -> None:
    large = {**JOB, "architecture": "Llama-3.1-405B", "nodes": 64}
    question = ask(Job.model_validate(large))
    with pytest.raises(InfeasibleError):
        plan_job(question.context, facts=question.facts)
    found = predict_job(large)
    assert not found.fits and "nothing passes every rule and limit" in found.warnings[0]
    assert predict_job(JOB).fits


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ppo_is_planned_where_it_can_be_exported(framework: str, tmp_path: Path) -> None:
    from rlperf.errors import ExportError
    from rlperf.frameworks.export import write_plan

    job = {**JOB, "framework": framework, "algorithm": "ppo"}
    if facts_data(framework).get("critic_shared") == []:  # a critic has devices of its own there
        job |= {"modes": ["disaggregated"], "pools": [{"role": "critic", "placement": "own"}]}
    if "ppo" not in facts_data(framework).get("algorithms", ["ppo"]):
        with pytest.raises(SpecError, match=r"rlperf plans no ppo for .*: .*critic"):  # and why
            ask(Job.model_validate(job))
        return
    question = ask(Job.model_validate(job))
    try:
        write_plan(plan_job(question.context, facts=question.facts), None, tmp_path / "out")
    except ExportError as error:
        pytest.fail(f"planned, then refused: {error}")


def test_ppo_of_a_framework_that_is_planned_without_it_is_no_grpo(tmp_path: Path) -> None:
    from rlperf.frameworks.audit.audit import audit
    from rlperf.frameworks.imports import import_config

    flags = "--colocate --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 1 \\\n"
    flags += "--hf-checkpoint Qwen3-0.6B --rollout-batch-size 16 --n-samples-per-prompt 4 --global-batch-size 64 \\\n"
    flags += "--rollout-max-prompt-len 512 --rollout-max-response-len 1024 --use-dynamic-batch-size \\\n"
    (tmp_path / "run.sh").write_text(f"python3 train.py {flags}--max-tokens-per-gpu 4096 --advantage-estimator ppo\n")
    found = audit(import_config([tmp_path / "run.sh"]), cluster="dgx_h100", workload="math", plan=False, gains=False)
    assert found.predicted is None and found.passes is None
    said = next(note for note in found.notes if "ppo is not predicted for slime" in note)
    assert "--num-critic-only-steps alone is known" in said


def test_four_bit_products_need_a_unit_for_them() -> None:
    """An H100 has none: nvfp4 was offered there with the rates of fp8, and won."""
    four = {"pools": [{"role": "rollout", "settings": {"rollout_dtype": "nvfp4"}}]}
    with pytest.raises(SpecError, match=r"h100_sxm multiplies no nvfp4: .* \(fp8 where it has that; int4_wo or mxfp4 "):
        predict_job({**JOB, **four})
    assert predict_job({**JOB, **four, "cluster": "dgx_b200"}).rl_step_s > 0.0
    several = Job.model_validate(
        {**JOB, "pools": [{"role": "rollout", "settings": {"rollout_dtype": ["bf16", "nvfp4"]}}]}
    )
    taken = ask(several).job
    assert taken.pool("rollout").settings.rollout_dtype == ("bf16",), "`size` over two devices was refused for one"
    assert any("rollout_dtype nvfp4: not planned" in words for words in precision_words(several, taken))
    on_b200 = with_units(several, load_device("b200_sxm"))
    assert on_b200.pool("rollout").settings.rollout_dtype == ("bf16", "nvfp4")
    weights_alone = {"pools": [{"role": "rollout", "settings": {"rollout_dtype": "mxfp4"}}]}
    assert predict_job({**JOB, **weights_alone}).rl_step_s > 0.0
    named = {"pools": [{"role": "rollout", "settings": {"rollout_dtype": "int4"}}]}
    with pytest.raises(SpecError, match=r"^there is no dtype named 'int4' \(did you mean int4_wo\?\)$"):
        ask(Job.model_validate({**JOB, **named}), to_plan=True)
    offered = gains({**JOB, "framework": "slime", "cluster": "dgx_a100"}, ("fp8 training",)).rows[0]
    assert offered.rl_step_s is None and "multiplies no fp8" in offered.said
    unwritten = gains({**JOB, "framework": "slime", "cluster": "dgx_b200"}, ("nvfp4 rollouts",)).rows[0]
    assert unwritten.rl_step_s is None and "writes no rollout.rollout_dtype (nvfp4) for slime" in unwritten.said


@pytest.mark.parametrize(
    ("framework", "known"), [("trl==0.1", "0.27"), ("slime==0.1", "0.2"), ("openrlhf==0.8.5", "0.9")]
)
def test_a_plan_for_a_release_before_all_that_are_known_is_refused(framework: str, known: str) -> None:
    name, _, asked = framework.partition("==")
    with pytest.raises(
        SpecError, match=rf"{name} {asked} is older than every release that is known \(known: {known}, "
    ):
        ask(Job.model_validate({**JOB, "framework": framework}), to_plan=True)
    ask(Job.model_validate({**JOB, "framework": f"{name}=={known}"}), to_plan=True)


def test_sizes_that_tensor_cores_do_not_take_as_they_lie_are_said(tmp_path: Path) -> None:
    def warned(**sizes: int) -> list[str]:
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**PLAIN, **sizes}))
        found = predict_job({**JOB, "architecture": str(file), "pools": pools})
        return [words.partition(": ")[0] for words in found.warnings if "slower than predicted" in words]

    layout, engine = {"tensor_parallel": 2}, {"backend": "vllm"}
    pools = [{"role": "rollout", "layout": layout, "settings": engine}]
    assert warned(vocab_size=1024) == []
    assert warned(vocab_size=1024, head_dim=60) == ["head_dim 60 is no multiple of 8"]
    assert warned(vocab_size=1024, intermediate_size=1022) == ["intermediate_size 1,022 is no multiple of 8"]
    odd = "vocab_size 1,000 over TP2 of the rollout is no multiple of 8 on a device"
    assert warned(vocab_size=1000) == [odd]
    # two copies of the attention have the whole table each; in SGLang they share the output head
    layout["attention_data_parallel"] = 2
    assert warned(vocab_size=1000) == []
    engine["backend"] = "sglang"
    assert warned(vocab_size=1000) == [odd]


def test_a_server_that_no_node_holds_is_refused_in_the_frameworks_words() -> None:
    pools = [{"role": "rollout", "devices": 16}, {"role": "trainer", "devices": 16}]
    job = Job.model_validate({**JOB, "framework": "trl", "nodes": 4, "modes": ["disaggregated"], "pools": pools})
    question = ask(job, to_plan=True)
    with pytest.raises(InfeasibleError, match="16 GPUs are more than its 8"):
        plan_job(question.context, facts=question.facts)


@pytest.mark.parametrize(
    ("framework", "opened", "left"),
    [
        ("areal", ["bf16", "fp8"], ("bf16",)),
        ("areal", ["fp8", "fp16"], ("fp16",)),
        ("slime", ["bf16", "fp8", "fp16"], ("bf16", "fp8")),
        ("openrlhf", ["bf16", "fp8"], ("bf16",)),
    ],
)
def test_of_open_values_those_are_planned_that_files_can_say(
    framework: str, opened: list[str], left: tuple[str, ...]
) -> None:
    """AReaL has words for engines in bf16 and fp16: asked for the first value alone, it was planned with fp8, too."""
    pools = [{"role": "rollout", "settings": {"rollout_dtype": opened}}]
    asked = Job.model_validate({**JOB, "framework": framework, "pools": pools})
    assert ask(asked, to_plan=True).context.job.pool("rollout").settings.rollout_dtype == left
