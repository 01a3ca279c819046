"""A PPO critic on devices of its own: closed form against events, brute force, metamorphic rules, memory, keys."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from rlperf.api import ask, plan_job
from rlperf.errors import ExportError, SpecError
from rlperf.files import audit_config
from rlperf.frameworks.export import write_job, write_plan
from rlperf.frameworks.imports import import_config, job_of
from rlperf.frameworks.run_of import from_job
from rlperf.plan.answer.memory_uses import memory_uses
from rlperf.plan.answer.prediction import critic_use
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.timeline import step_view
from rlperf.plan.predict import predict_job
from rlperf.plan.question.context import Context
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.screen import Screened, screen
from rlperf.plan.search.splits import splits
from rlperf.specs.job import Job

from .quick import slow_but

TASK = {
    "name": "math",
    "workload": "math",
    "prompts_per_step": 32,
    "group_size": 4,
    "mini_batch": 16,
    "max_response_tokens": 4096,
}
TRAINER = {
    "role": "trainer",
    "devices": 4,
    "layout": {"tensor_parallel": 1, "zero_stage": 3, "activation_recompute": "full"},
    "settings": {"token_budget": 8192},
}
MEGATRON = {**TRAINER, "layout": {"tensor_parallel": 2, "activation_recompute": "full"}}
ROLLOUT = {"role": "rollout", "devices": 4, "layout": {"tensor_parallel": 1}, "settings": {"memory_fraction": 0.8}}
JOB: dict[str, Any] = {
    "architecture": "Qwen3-4B",
    "cluster": "dgx_h100",
    "nodes": 2,
    "framework": "openrlhf",
    "algorithm": "ppo",
    "tasks": [TASK],
    "modes": ["disaggregated"],
    "limits": {"staleness": 2},
    "pools": [ROLLOUT, TRAINER],
}


def apart(devices: int | list[int] | None, **other: Any) -> dict[str, Any]:
    """The critic pool."""
    return {"role": "critic", "placement": "own", "devices": devices, **other}


def asked(*pools: dict[str, Any], **other: Any) -> Context:
    return ask(Job.model_validate({**JOB, **other, "pools": [*other.get("pools", JOB["pools"]), *pools]})).context


def judged(*pools: dict[str, Any], **other: Any) -> tuple[Context, Screened, Evaluation]:
    """The best candidate of the screen, and what the events say of it."""
    context = asked(*pools, **other)
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,), keep=1)
    return context, found, Judge(context, task).evaluate(demand, found.configurations[0])


@pytest.mark.parametrize("mode", ["disaggregated", "one_step_off", "k_step_off", "colocated"])
def test_closed_form_is_the_events(mode: str) -> None:
    """What a critic apart changes: with what rollout and training differ by anyway taken out, within 3 %."""
    # of those with a critic apart miles alone has one beside roles that share their devices
    where = {"framework": "miles", "engine": "sglang", "pools": [ROLLOUT, MEGATRON]} if mode == "colocated" else {}
    _, bare, base = judged(algorithm="grpo", modes=[mode], **where)
    for devices in (1, 2, 4, 8) if not where else (4,):
        _, found, evaluation = judged(apart(devices), modes=[mode], **where)
        ratio = base.rl_step_s / float(bare.rl_step_s[0])
        assert float(found.rl_step_s[0]) * ratio == pytest.approx(evaluation.rl_step_s, rel=0.03)
        assert step_view(evaluation).timeline.rl_step_s == pytest.approx(
            float(evaluation.seconds.rl_step_s[0]), rel=1e-6
        )


def test_a_critic_as_wide_as_the_trainer_takes_what_it_takes() -> None:
    """What both take in turn on the trainer's devices is the sum; values are one pass of three, without logits."""
    _, _, beside = judged(apart(4), modes=["one_step_off"])
    _, _, together = judged(modes=["one_step_off"])
    own, both = beside.trainer, together.trainer
    assert np.all(own.critic_s < own.training_s) and np.all(own.values_s < 0.5 * own.scoring_s)
    assert own.training_s + own.critic_s == pytest.approx(both.training_s, rel=1e-9)
    assert own.scoring_s + own.values_s == pytest.approx(both.scoring_s, rel=1e-9)
    assert not both.critic_s.any() and not both.values_s.any()


def test_more_devices_of_the_critic_are_never_slower() -> None:
    steps = [judged(apart(n))[2] for n in (1, 2, 4, 8)]
    seconds = [each.rl_step_s for each in steps]
    assert seconds == sorted(seconds, reverse=True) and seconds[1] < 0.9 * seconds[0]
    policy = steps[-1].trainer
    assert np.all(policy.critic_s < policy.training_s)
    assert steps[-1].seconds.training_s == pytest.approx(policy.training_s)
    _, _, grpo = judged(algorithm="grpo")
    # what is left of a critic that is never waited for: its values come back with the batch
    extra = float((steps[-1].seconds.data_movement_s - grpo.seconds.data_movement_s).mean())
    assert steps[-1].rl_step_s - grpo.rl_step_s == pytest.approx(extra, abs=1e-6)


def test_memory_is_that_of_one_network_on_either_pool() -> None:
    context, _, evaluation = judged(apart(2))
    uses = memory_uses(context, evaluation)
    shared_context, _, shared = judged(modes=["one_step_off"])
    assert set(uses) == {"rollout", "trainer", "critic"} and "critic" not in uses["trainer"].parts
    parts, both = evaluation.held.parts, memory_uses(shared_context, shared)["trainer"]
    assert both.total - uses["trainer"].total == pytest.approx(float(parts.states[0]))
    # ZeRO-3 over half as many devices: twice the optimizer on each
    assert uses["critic"].parts["optimizer"] == pytest.approx(2.0 * uses["trainer"].parts["optimizer"])
    assert uses["trainer"].parts["reference"] > 0.0  # OpenRLHF keeps it on the trainer's devices
    assert "reference" not in uses["critic"].parts


def test_a_critic_that_does_not_fit_is_refused_and_told() -> None:
    pools = [ROLLOUT, {**TRAINER, "devices": 8}]
    fits, full = (asked(apart(n), architecture="Qwen3-14B", pools=pools) for n in (4, 1))
    demand = full.tasks[0].source.demand(full.tasks[0].batches[0], None, 0)
    assert screen(fits, fits.tasks[0], (demand,)).configurations
    found = screen(full, full.tasks[0], (demand,))
    assert not found.configurations and found.rejected["device memory"] > 0
    told = predict_job(full)
    assert not told.fits and told.memory_bytes["trainer"].total < told.memory_bytes["trainer"].allowed
    assert any(line.startswith("critic is") for line in told.advice)


def test_layouts_that_the_critics_devices_cannot_hold_are_no_candidates() -> None:
    wide = [ROLLOUT, {**TRAINER, "layout": {"tensor_parallel": 2, "zero_stage": 2}}]
    even, odd = (asked(apart(n), pools=wide) for n in (2, 3))
    demand = even.tasks[0].source.demand(even.tasks[0].batches[0], None, 0)
    fits, found = (screen(each, each.tasks[0], (demand,)) for each in (even, odd))
    reason = "degrees do not multiply up to the devices"
    assert fits.configurations and not found.configurations
    assert found.rejected[reason] > fits.rejected.get(reason, 0)


OPEN: dict[str, Any] = {"nodes": 1, "modes": ["disaggregated", "one_step_off"], "pools": []}


@pytest.mark.parametrize("devices", slow_but((2, [1, 2, 3], None), 2))
def test_the_planner_chooses_as_brute_force_does(devices: int | list[int] | None) -> None:
    """Every split and layout pinned in turn, the critic's devices too: none is better than what is found open."""
    context = asked(apart(devices), **OPEN)
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    best = screen(context, task, (demand,), keep=1)
    counts = (1, 2, 3, 4, 6) if devices is None else np.ravel(devices).tolist()
    pinned = []
    for mode, own, rollout, tensor in product(OPEN["modes"], counts, range(1, 7), (1, 2, 4)):
        if own + rollout > 7:
            continue
        trainer = {"role": "trainer", "devices": 8 - own - rollout, "layout": {"tensor_parallel": tensor}}
        pools = [{"role": "rollout", "devices": rollout}, trainer]
        one = asked(apart(own), **{**OPEN, "modes": [mode], "pools": pools})
        found = screen(one, one.tasks[0], (demand,), keep=1, prune=False)
        pinned += found.objective[:1].tolist()
    assert float(best.objective.min()) == pytest.approx(min(pinned), rel=1e-12)
    assert all(split.total == 8 for split in splits(context))
    assert {split.critic for split in splits(context)} == set(counts)


def test_what_the_planner_chose_for_the_critic_is_said() -> None:
    context = asked(apart(None), **OPEN)
    told = predict_job(context)
    assert told.critic is not None and f"critic: devices {told.critic.devices}" in told.assumed
    with pytest.raises(SpecError, match="pool critic: devices is not pinned"):
        from_job(Job.model_validate({**JOB, "pools": [ROLLOUT, TRAINER, apart(None)]}), 8)


def test_pruning_loses_nothing_where_a_scorer_visits_the_trainer() -> None:
    """A scorer in turn with the trainer holds up the policy's scoring, not the critic's values."""
    teacher = {"name": "t", "kind": "teacher", "architecture": "Qwen3-0.6B", "placement": "shared"}
    context = asked(apart(1), **OPEN, scorers=[teacher])
    demand = context.tasks[0].source.demand(context.tasks[0].batches[0], None, 0)
    pruned, whole = (screen(context, context.tasks[0], (demand,), keep=1, prune=each) for each in (True, False))
    assert float(pruned.objective.min()) == pytest.approx(float(whole.objective.min()), rel=1e-12)


def test_devices_of_the_critic_are_counted_and_paid_for() -> None:
    context, _, evaluation = judged(apart(2), price="2 USD/h")
    configuration: Configuration = evaluation.configuration
    assert configuration.devices == 10 and configuration.pool("critic").layout.data_parallel == 2
    (split,) = splits(context)
    assert split.usage(context).usd_per_s == pytest.approx(2.0 * 10 / 3600.0)
    use = critic_use(context, evaluation)
    assert use is not None and use.devices == 2 and use.waits_s > 0.0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"framework": "verl"}, "no keys for a critic on devices of its own"),
        ({"framework": "slime", "engine": "sglang"}, "no keys for a critic on devices of its own"),
        ({"algorithm": "grpo"}, "grpo trains no critic"),
        ({"modes": ["colocated"]}, "in mode colocated openrlhf .* trains a critic on the trainer's devices alone"),
        ({"pools": [ROLLOUT, TRAINER, apart(16)]}, "the critic takes all 16 devices"),
        ({"pools": [ROLLOUT, TRAINER, apart(2, layout={"tensor_parallel": 2})]}, r"layout \(tensor_parallel\)"),
        ({"pools": [ROLLOUT, TRAINER, apart(2, settings={"lora_rank": 8})]}, r"settings \(lora_rank\)"),
        ({"pools": [ROLLOUT, TRAINER, {"role": "critic", "devices": 2}]}, "planned on the trainer's devices"),
        ({}, "in mode disaggregated openrlhf .* trains a critic on devices of its own"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], words: str) -> None:
    pools = [] if not wrong or "pools" in wrong else [apart(2)]
    with pytest.raises(SpecError, match=words):
        asked(*pools, **wrong)


def test_only_a_critic_is_placed() -> None:
    with pytest.raises(ValueError, match="placement is a critic's to state, not of a reference pool"):
        Job.model_validate({**JOB, "pools": [{"role": "reference", "placement": "own", "devices": 2}]})


@pytest.mark.slow
def test_openrlhf_is_written_and_read_back(tmp_path: Any) -> None:
    plan = plan_job(Job.model_validate({**JOB, "pools": [apart(4)], "nodes": 2}))
    (phase,) = plan.phases
    files = [path for path in write_plan(plan, None, tmp_path / "out") if path.suffix == ".sh"]
    text = files[0].read_text()
    assert "--critic.num_gpus_per_node 4" in text and "colocate_all" not in text and "NOT EXPRESSED" not in text
    imported = import_config(files, "openrlhf")
    back = job_of(imported)
    assert back.pool("critic").apart and back.pool("critic").devices == (4,) and imported.run.devices == 16
    assert predict_job(ask(back).context).critic == phase.predicted.critic
    found = audit_config(files, framework="openrlhf", cluster="dgx_h100", workload="math")
    assert not [each for each in found.findings if each.severity == "error"]
    assert found.best is not None and found.best.phases[0].pool("critic").own_devices  # as the files have it
    asleep = tmp_path / "asleep.sh"
    asleep.write_text(text.replace("  --actor.num_nodes 1\n", "  --actor.num_nodes 1\n  --ds.enable_sleep\n"))
    slow = audit_config([asleep], framework="openrlhf", cluster="dgx_h100", workload="math").findings
    assert ("critic_sleep", "warning") in {(each.rule, each.severity) for each in slow}
    with pytest.raises(ExportError, match="no keys for a critic on devices of its own"):
        write_plan(plan, "verl", tmp_path / "verl")
    written = write_job(back, "openrlhf", tmp_path / "again")
    assert "--critic.num_gpus_per_node 4" in next(p for p in written if p.suffix == ".sh").read_text()


def test_a_shared_critic_is_written_as_openrlhf_shares_it(tmp_path: Any) -> None:
    """Beside engines of their own by colocate_all, which leaves the engines out in asynchronous modes alone."""
    job = Job.model_validate({**JOB, "pools": [ROLLOUT, TRAINER], "modes": ["one_step_off"]})
    files = [path for path in write_plan(plan_job(job), None, tmp_path / "out") if path.suffix == ".sh"]
    assert "--train.colocate_all" in files[0].read_text()
    back = import_config(files, "openrlhf").run
    assert back.critic_devices == 0 and back.mode == "one_step_off" and back.devices == 8


def test_modes_whose_files_place_a_critic_elsewhere_are_not_planned() -> None:
    """With both modes open a search could take the one that no file can say, and its export refused."""
    stated = {"modes": ["one_step_off", "disaggregated"]}
    assert asked(**stated).job.modes == ("one_step_off",)
    assert asked(apart(4), **stated).job.modes == ("one_step_off", "disaggregated")
    assert asked(algorithm="grpo", **stated).job.modes == ("one_step_off", "disaggregated")
