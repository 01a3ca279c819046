"""The plan against what its framework runs by default."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rlperf.api import ask, plan_job, predict_job
from rlperf.cost.parameters import parameters
from rlperf.frameworks.defaults import defaults_of
from rlperf.plan.answer.baseline import Defaults, pinned_to
from rlperf.plan.question.context import counting
from rlperf.report.plan_summary import summary_lines
from rlperf.specs.job import Job
from rlperf.specs.overhead import TrainerOverheads
from rlperf.specs.profiles import load_architecture
from rlperf.specs.rl_calibration import load_framework_calibration

SMALL: dict[str, object] = {
    "name": "small",
    "architecture": "Qwen3-4B",
    "cluster": "dgx_h100",
    "tasks": [
        {
            "name": "math", "workload": "math", "prompts_per_step": 32, "group_size": 4, "mini_batch": 16,
            "max_prompt_tokens": 512, "max_response_tokens": 2048,
        }
    ],
}  # fmt: skip


def job(**changes: object) -> Job:
    return Job.model_validate({**SMALL, **changes})


def stated(asked: Job, devices: int = 8) -> Defaults:
    context = ask(asked).context
    return defaults_of(context)(asked.architecture, context.tasks[0].batches[0], devices)


def test_defaults_are_those_of_the_version_and_not_of_the_job() -> None:
    pinned = {"role": "rollout", "layout": {"tensor_parallel": 8}, "settings": {"memory_fraction": 0.8}}
    found = stated(job(framework="verl==0.9.1", pools=[pinned]))
    rollout, trainer = found.pools
    # verl's own configuration: tensor_model_parallel_size 2, gpu_memory_utilization 0.5, gradient checkpointing on
    assert (rollout.layout.tensor_parallel, rollout.settings.memory_fraction) == ((2,), (0.5,))
    assert (trainer.layout.activation_recompute, trainer.layout.ulysses) == (("full",), (1,))
    assert rollout.devices == trainer.devices == (8,)
    # use_dynamic_bsz is off: microbatches of a sequence, however short
    assert (trainer.layout.microbatch, trainer.settings.token_budget) == ((1,), None)
    assert "one sequence" in " ".join(found.notes)


def test_a_release_without_the_key_holds_gradients_whole() -> None:
    """verl 0.9.0 on FSDP2 has no branch there (engine/fsdp/transformer_impl.py:673); 0.9.1 has a key, which is off."""
    trainer = {"role": "trainer", "layout": {"data_parallel": 8, "zero_stage": 3, "activation_recompute": "full"},
               "settings": {"backend": "fsdp2", "token_budget": 4096, "parked": True}}  # fmt: skip
    engine = {
        "role": "rollout",
        "layout": {"data_parallel": 8},
        "settings": {"max_running": 32, "memory_fraction": 0.5},
    }
    told = {}
    for release in ("0.9.0", "0.9.1", "0.9"):
        told[release] = predict_job(job(framework=f"verl=={release}", pools=[trainer, engine]))
    peak = {name: each.memory_bytes["trainer"].total for name, each in told.items()}
    whole = 4.0 * parameters(load_architecture("Qwen3-4B")) * (1.0 - 1.0 / 8.0)
    assert peak["0.9.0"] - peak["0.9.1"] == pytest.approx(whole, rel=0.1)
    assert peak["0.9"] == peak["0.9.1"]
    assert any("whole" in words for words in told["0.9.0"].assumed)
    assert told["0.9.0"].stages_s.training < told["0.9.1"].stages_s.training  # reduced once and not every microbatch


def test_microbatches_of_the_defaults_are_cut_as_the_framework_cuts_them() -> None:
    """By count; NeMo-RL deals out the bins of all ranks, and makes tokens of four sequences."""
    trainers = {name: stated(job(framework=name)).pools[1] for name in ("skyrl", "nemo_rl")}
    assert trainers["skyrl"].layout.microbatch == (1,) and trainers["skyrl"].settings.token_budget is None
    assert trainers["nemo_rl"].layout.microbatch is None
    assert trainers["nemo_rl"].settings.token_budget == (4 * 2560,)
    filling = ask(job(framework="skyrl")).context.trainers[0].framework
    counted = counting(filling, trainers["skyrl"])
    assert (filling.training.batching, counted.training.batching) == ("rank", "count")
    # a job that counts says nothing of defaults that fill by tokens
    budget = trainers["skyrl"].model_copy(update={"settings": trainers["nemo_rl"].settings})
    assert counting(counted, budget) == filling
    # sequences well below the limit, one by one: the longest one's tokens would hold several of them
    asked = {"framework": "skyrl", "tasks": [{**SMALL["tasks"][0], "max_response_tokens": 16_384}]}  # type: ignore[index]
    against = plan_job(job(**asked)).defaults
    assert against is not None and against.objective is not None
    filled = [pool.model_dump(mode="json", exclude_none=True) for pool in stated(job(**asked)).pools]
    filled[1]["settings"] |= {"token_budget": 16_896}
    assert against.objective > predict_job(job(pools=filled, **asked)).rl_step_s


def test_no_calibration_states_that_it_cuts_by_count() -> None:
    """Else a job that leaves microbatches free would overrule its file without a word."""
    own = load_framework_calibration("verl", "fsdp2").training
    stated = own.model_dump(exclude_unset=True) | {"batching": "count"}
    with pytest.raises(ValidationError, match="what a job asks for"):
        TrainerOverheads.model_validate(stated)
    assert TrainerOverheads.model_validate(stated | {"batching": "all"}).batching == "all"


def test_a_cache_that_holds_no_sequence_is_said() -> None:
    task = {**SMALL["tasks"][0], "max_response_tokens": 32_000}  # type: ignore[index]
    plan = plan_job(job(architecture="Qwen3-32B", nodes=4, tasks=[task]))
    assert plan.defaults is not None and plan.defaults.why_not is not None
    assert "the engine's cache holds" in plan.defaults.why_not
    assert "a request up to 32,512" in plan.defaults.why_not


def test_what_is_trained_stays_the_jobs() -> None:
    pools = [{"role": "rollout", "settings": {"kv_dtype": "fp8"}}, {"role": "trainer", "settings": {"lora_rank": 16}}]
    rollout, trainer = stated(job(pools=pools)).pools
    assert (rollout.settings.kv_dtype, trainer.settings.lora_rank) == (("fp8",), 16)


def test_a_precision_that_is_open_is_the_frameworks_own() -> None:
    found = stated(job(pools=[{"role": "rollout", "settings": {"kv_dtype": ["fp8", "bf16"]}}]))
    assert found.pools[0].settings.kv_dtype == ("bf16",)
    assert "its kv_dtype is bf16: the job leaves it open" in found.notes


@pytest.mark.parametrize("framework", ["verl", "nemo_rl", "openrlhf", "slime", "areal", "trl"])
def test_every_framework_has_defaults(framework: str) -> None:
    found = stated(job(framework=framework))
    assert found.why_not is None
    assert {pool.role for pool in found.pools} == {"rollout", "trainer"}
    assert not any("is no key" in note for note in found.notes)


def test_the_comparison_is_the_prediction_of_the_defaults() -> None:
    plan = plan_job(job())
    against = plan.defaults
    assert against is not None
    assert against.objective is not None and against.saves is not None
    assert against.low is not None and against.high is not None
    assert against.low < against.saves < against.high
    assert against.saves == pytest.approx(1.0 - plan.objective / against.objective, abs=1e-4)
    pools = [pool.model_dump(mode="json", exclude_none=True) for pool in stated(job()).pools]
    assert predict_job(job(pools=pools)).rl_step_s == pytest.approx(against.objective, rel=1e-9)
    assert any("defaults" in line and "saves" in line for line in summary_lines(plan))


def test_a_plan_that_is_pinned_to_the_defaults_saves_nothing() -> None:
    pools = [pool.model_dump(mode="json", exclude_none=True) for pool in stated(job()).pools]
    against = plan_job(job(pools=pools, modes=["colocated"], trainer_backends=["fsdp2"])).defaults
    assert against is not None and against.saves == pytest.approx(0.0, abs=1e-4)
    assert any("cannot be told from nothing" in line for line in summary_lines(plan_job(job(pools=pools))))


def test_defaults_that_do_not_fit_are_said_and_not_compared() -> None:
    plan = plan_job(job(framework="openrlhf", architecture="Qwen3-14B"))
    assert plan.defaults is not None and plan.defaults.objective is None and plan.defaults.saves is None
    assert "per device" in (plan.defaults.why_not or "")
    assert any("do not run here" in line for line in summary_lines(plan))


def test_the_margin_of_the_plan_is_not_asked_of_the_defaults() -> None:
    question = ask(job(limits={"out_of_memory_risk": 0.001}))
    assert pinned_to(question.context, stated(question.job)).job.limits.out_of_memory_risk == 1.0


def test_a_batch_that_the_framework_refuses_is_said() -> None:
    assert "data parallel size 24" in (stated(job(nodes=3), devices=24).why_not or "")


@pytest.mark.slow
def test_several_tasks_and_groups_are_summed() -> None:
    task = SMALL["tasks"][0]  # type: ignore[index]
    tasks = [task, {**task, "name": "code", "workload": "programming"}]
    plan = plan_job(job(tasks=tasks, horizon={"rl_steps": 20, "group": 10, "switch": "10 s"}))
    alone = [plan_job(job(tasks=[t], horizon={"rl_steps": 20, "group": 10, "switch": "10 s"})) for t in tasks]
    assert plan.defaults is not None and plan.defaults.objective is not None
    separate = [p.defaults.objective for p in alone if p.defaults is not None and p.defaults.objective is not None]
    assert plan.defaults.objective == pytest.approx(sum(separate), rel=1e-9)


def test_defaults_that_pad_and_run_close_to_the_limit_are_costed_as_they_run_and_said_to() -> None:
    """TRL pads eight completions a microbatch; logits of a 152k vocabulary, before 1.15, leave less than a plan may."""
    task = {
        "name": "math", "workload": "math", "prompts_per_step": 128, "group_size": 8, "mini_batch": 128,
        "max_prompt_tokens": 2048, "max_response_tokens": 768,
    }  # fmt: skip
    asked = job(framework="trl==1.14", architecture="Qwen2.5-0.5B", nodes=1, devices_per_node=1, tasks=[task])
    trainer = next(pool for pool in stated(asked, 1).pools if pool.role == "trainer")
    assert trainer.layout.microbatch == (8,)
    # beside states that stay on the devices an engine may take as little as TRL's own
    assert plan_job(asked).phases[0].pool("rollout").settings.memory_fraction == 0.3
    as_theirs = [{"role": "rollout", "settings": {"memory_fraction": 0.3}},
                 {"role": "trainer", "layout": {"activation_recompute": "full"}}]  # fmt: skip
    long = job(framework="trl==1.14", architecture="Qwen2.5-0.5B", nodes=1, devices_per_node=1, pools=as_theirs,
               tasks=[{**task, "max_response_tokens": 7168}])  # fmt: skip
    plan = plan_job(long)
    assert plan.defaults is not None and plan.defaults.saves is not None and plan.defaults.saves < 0.0
    assert any("its trainer runs out of memory with a probability of" in note for note in plan.defaults.notes)
    assert not any("max_running is not known" in note for note in plan.defaults.notes)  # of no key, as its facts say
    assert any("% more" in line for line in summary_lines(plan))
