"""Teachers, reward models and judges: closed form against events, brute force, metamorphic rules, keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import rlperf
from rlperf.api import ask, plan_job, predict_job
from rlperf.cost.engine_step import EngineLimits
from rlperf.errors import ExportError, InfeasibleError, SpecError
from rlperf.frameworks.adapter import Source, framework_facts
from rlperf.frameworks.export import plan_texts, write_job, write_plan
from rlperf.frameworks.expressible import as_framework_runs
from rlperf.frameworks.fields import Target
from rlperf.frameworks.imports import import_config, job_of, understand
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.run import BatchFacts, RolloutRun, Run, TrainerRun
from rlperf.frameworks.scorer_keys import misled, read_scorers, scorer_settings
from rlperf.frameworks.scorer_run import ScorerRun
from rlperf.layout import Layout
from rlperf.plan.answer.baseline import Defaults, _Judged, pinned_to
from rlperf.plan.compare import job_of_plan
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.question.context import resolve
from rlperf.plan.question.techniques import check_length
from rlperf.plan.search.rules import uneven_parts
from rlperf.plan.search.screen import Screened, screen
from rlperf.plan.search.splits import Split, splits
from rlperf.sim.rl_step import rollout_counted
from rlperf.sim.rl_step.compose import StepStages, compose_rl_step
from rlperf.sim.rl_step.engine import tabulate
from rlperf.sim.rl_step.modes import Execution, step_seconds
from rlperf.sim.rollout.closed_form import StepCensus
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.job import Job
from rlperf.specs.pool import Settings
from rlperf.specs.profiles import load_architecture
from rlperf.specs.scorer import Scorer
from rlperf.specs.short_job import short_job

TASK = {
    "name": "math",
    "workload": "math",
    "prompts_per_step": 32,
    "group_size": 4,
    "mini_batch": 32,
    "max_response_tokens": 4096,
}
JOB: dict[str, Any] = {
    "architecture": "Qwen3-4B",
    "cluster": "dgx_h100",
    "nodes": 1,
    "framework": "verl==0.9.1",
    "trainer_backends": ["megatron"],
    "tasks": [TASK],
    "modes": ["disaggregated"],
    "limits": {"staleness": 2},
    "pools": [
        {"role": "rollout", "devices": 2, "layout": {"tensor_parallel": 1}, "settings": {"memory_fraction": 0.8}},
        {"role": "trainer", "devices": 4, "layout": {"tensor_parallel": 2, "pipeline_parallel": 1}},
    ],
}
TEACHER = {"name": "big", "kind": "teacher", "architecture": "Qwen3-14B", "devices": 2, "overlap": True}


def judged(*scorers: dict[str, Any], **other: Any) -> tuple[Screened, Evaluation]:
    """The best candidate of the screen, and what the events say of it."""
    context = resolve(Job.model_validate({**JOB, **other, "scorers": list(scorers)}))
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,), keep=1)
    return found, Judge(context, task).evaluate(demand, found.configurations[0])


@pytest.fixture(scope="module")
def alone() -> float:
    return judged()[1].rl_step_s


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["disaggregated", "async"])
def test_closed_form_is_the_events(devices: int, overlap: bool, mode: str) -> None:
    """What scorers add to an rl_step, with the rollout's own difference between the two taken out: within 3 %."""
    bare, base = judged(modes=[mode])
    found, evaluation = judged({**TEACHER, "devices": devices, "overlap": overlap}, modes=[mode])
    ratio = base.rl_step_s / float(bare.rl_step_s[0])
    assert float(found.rl_step_s[0]) * ratio == pytest.approx(evaluation.rl_step_s, rel=0.03)
    assert evaluation.rl_step_s >= base.rl_step_s
    assert mode == "async" or evaluation.rl_step_s > base.rl_step_s + 5.0


def test_a_judge_that_writes_costs_more_than_one_that_reads(alone: float) -> None:
    steps = [
        judged({"name": "j", "kind": "judge", "architecture": "Qwen3-4B", "devices": 1, "response_tokens": n})[
            1
        ].rl_step_s
        for n in (1, 64, 512)
    ]
    assert alone < steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize(("stated", "said"), [({}, True), ({"response_tokens": 1}, False)])
def test_a_judge_of_whom_nobody_says_what_it_writes_is_told_to_write_one_token(
    stated: dict[str, int], said: bool
) -> None:
    judge = {"name": "j", "kind": "judge", "architecture": "Qwen3-4B", "devices": 1, **stated}
    asked = {**JOB, "framework": "slime", "limits": {}, "scorers": [judge]}
    assumed = rlperf.predict_job(Job.model_validate(asked)).assumed
    assert ("judge j: one token written a sequence, as no response_tokens are stated" in assumed) is said


def test_a_free_teacher_costs_nothing(alone: float) -> None:
    """The smallest model hides behind the rollout; the fewer sequences it reads, the closer to nothing."""
    small = {**TEACHER, "architecture": "SmolLM2-135M"}
    whole, part = (judged({**small, "share": share})[1].rl_step_s for share in (1.0, 0.05))
    assert alone <= part <= whole < 1.01 * alone


def test_more_devices_and_overlap_are_never_slower() -> None:
    steps = [judged({**TEACHER, "devices": n})[1].rl_step_s for n in (1, 2)]
    late = judged({**TEACHER, "overlap": False})[1]
    assert steps[1] <= steps[0] and steps[1] < late.rl_step_s
    assert float(late.beside.waits_s.mean()) == pytest.approx(late.scorers[0].makespan_s, rel=1e-6)


def test_the_head_that_drafts_for_a_judge_stays_as_good() -> None:
    """It is a policy that moves away from a head that is not trained."""
    judge = {"name": "j", "kind": "judge", "response_tokens": 64, "settings": {"speculation": "eagle3:3"}}
    context = resolve(Job.model_validate({**JOB, "scorers": [judge]}))
    arch, drafting = context.tasks[0].architecture, partial(Settings, speculation="eagle3:3")
    sites = context.scorers[0].context(context).site, context.site
    still, moving, trained = (
        tabulate(site, arch, drafting(draft_training=flag), Layout.of())[0].drafted
        for site, flag in ((sites[0], False), (sites[1], False), (sites[1], True))
    )
    assert still is not None and moving is not None and trained is not None
    assert still.tokens[3] == trained.tokens[3] > 1.1 * moving.tokens[3]


def test_teachers_that_share_the_sequences_take_less_than_one() -> None:
    """Two teachers of half the sequences each, on as many devices each: half the work, at the same time."""
    one = judged({**TEACHER, "devices": 1, "overlap": False})[1]
    half = {**TEACHER, "devices": 1, "overlap": False, "share": 0.5}
    two = judged(half, {**half, "name": "other"})[1]
    assert float(two.beside.waits_s.mean()) == pytest.approx(float(one.beside.waits_s.mean()) / 2.0, rel=0.1)
    moved = [float(each.seconds.data_movement_s.mean()) for each in (one, two)]
    assert moved[1] == pytest.approx(moved[0], rel=1e-9)  # every sequence is sent one teacher's numbers, not two's


def test_a_teacher_reads_every_token_through_its_head() -> None:
    reward = {**TEACHER, "kind": "reward", "overlap": False}
    teacher = {**TEACHER, "overlap": False}
    (_, read), (_, scored) = judged(reward), judged(teacher)
    assert scored.scorers[0].makespan_s > read.scorers[0].makespan_s
    many = judged({**teacher, "top_k": 64})[1]
    assert float(many.seconds.data_movement_s.mean()) > float(scored.seconds.data_movement_s.mean())


def test_a_reference_beside_the_trainer_is_not_scored_twice() -> None:
    _, base = judged()
    _, beside = judged({"name": "ref", "kind": "reference", "devices": 2, "overlap": True})
    assert float(beside.seconds.scoring_s.mean()) < float(base.seconds.scoring_s.mean())
    assert beside.held.host[0] < base.held.host[0]


OPEN = {
    "modes": ["colocated", "disaggregated"],
    "pools": [],
    "nodes": 1,
    "scorers": [
        {"name": "big", "kind": "teacher", "architecture": "Qwen3-14B", "overlap": True},
        {"name": "small", "kind": "reward", "architecture": "Qwen3-0.6B", "placement": "shared"},
    ],
}


@pytest.mark.slow
def test_devices_and_placement_are_chosen_as_brute_force_does() -> None:
    """Every placement and number of devices pinned in turn: none is better than what the screen finds open."""
    context = resolve(Job.model_validate({**JOB, **OPEN}))
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    best = screen(context, task, (demand,), keep=1)
    pinned = []
    for mode, placed in product(OPEN["modes"], ({"placement": "shared"}, *({"devices": n} for n in (1, 2, 3, 4, 6)))):
        scorers = [{**OPEN["scorers"][0], **placed}, OPEN["scorers"][1]]
        one = resolve(Job.model_validate({**JOB, **OPEN, "modes": [mode], "scorers": scorers}))
        found = screen(one, one.tasks[0], (demand,), keep=1, prune=False)
        pinned += found.rl_step_s[:1].tolist()
    assert float(best.rl_step_s[0]) == pytest.approx(min(pinned), rel=1e-12)
    assert all(split.total <= 8 for split in splits(context))


def test_what_a_teacher_reads_is_counted_once_for_all_numbers_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was counted anew for each of them, and once more beside what lies on the trainer's: half of a screen."""
    counts, take = [], rollout_counted.take_census

    def counted(own: Trajectories, limits: EngineLimits) -> StepCensus:
        counts.append((own.prompt_tokens.tobytes(), own.response_tokens.tobytes(), limits))
        return take(own, limits=limits)

    monkeypatch.setattr(rollout_counted, "take_census", counted)
    open_devices = {key: value for key, value in TEACHER.items() if key != "devices"}
    pools = [
        {"role": "rollout", "layout": {"tensor_parallel": 1}},
        {"role": "trainer", "layout": {"tensor_parallel": 2}},
    ]
    context = resolve(Job.model_validate({**JOB, "scorers": [open_devices], "pools": pools}))
    task = context.tasks[0]
    screen(context, task, (task.source.demand(task.batches[0], None, 0),))
    assert len({split.scorers for split in splits(context)}) > 2
    assert len(counts) == len(set(counts)) > 4


def test_a_judge_in_turn_with_the_trainer_takes_the_memory_that_pays() -> None:
    """It had the least that holds its weights and one request, whatever that cost: verdicts were written in a queue."""
    judge = {"name": "j", "kind": "judge", "architecture": "Qwen3-32B", "prompt_tokens": 500, "response_tokens": 300}
    seconds = {}
    for share in (None, 0.5, 0.6, 0.7):
        settings = {"settings": {"memory_fraction": share}} if share else {}
        found, _ = judged({**judge, "placement": "shared", "layout": {"tensor_parallel": 2}, **settings})
        seconds[share] = float(found.rl_step_s[0])
    assert seconds[None] <= min(seconds.values()) * (1.0 + 1e-9)
    assert seconds[None] < 0.95 * seconds[0.5]


@pytest.mark.parametrize(
    ("framework", "kind", "hides"),
    [("verl==0.8", "teacher", False), ("verl==0.9.1", "teacher", True), ("verl==0.9.1", "judge", True),
     ("verl==0.9.1", "reference", False), ("nemo_rl", "teacher", False)],
)  # fmt: skip
def test_who_scores_while_others_generate_follows_the_framework(framework: str, kind: str, hides: bool) -> None:
    """verl's agent loop scores a sample as it ends since its V1 trainer; a reference waits for the trainer's batch."""
    scorer = {**TEACHER, "kind": kind, "architecture": None if kind == "reference" else "Qwen3-14B", "overlap": None}
    (stage,) = judged(scorer, framework=framework)[1].scorers
    assert stage.own and stage.overlap is hides


def test_what_is_left_beside_a_scorer_fills_nodes_where_files_count_them() -> None:
    """A teacher on half a node of four: 12 devices remain, which `trainer.nnodes` x `n_gpus_per_node` cannot say."""
    pools = [{key: value for key, value in pool.items() if key != "devices"} for pool in JOB["pools"]]
    pools[1]["settings"] = {"token_budget": 8192}
    words = {**JOB, "nodes": 2, "pools": pools, "scorers": [{**TEACHER, "devices": 4}]}
    plan = plan_job(Job.model_validate({**words, "modes": "colocated"}))
    assert [pool.devices for pool in plan.phases[0].pools if pool.role == "trainer"] == [8]
    assert "config.sh" in plan_texts(plan)
    apart = splits(resolve(Job.model_validate(words)))
    assert {split.rollout + split.trainer for split in apart} == {8, 12}


def test_stated_devices_that_fill_no_nodes_are_refused_in_words() -> None:
    pools = [{"role": "trainer", "devices": 12, "layout": {"tensor_parallel": 2}}]
    with pytest.raises(InfeasibleError, match="trainer has 12 devices, which fill no whole number of nodes of 8"):
        plan_job(Job.model_validate({**JOB, "nodes": 3, "pools": pools, "modes": "one_step_off"}))


def test_a_scorers_devices_that_fill_no_nodes_are_refused_before_an_export() -> None:
    """`distillation.nnodes` x `n_gpus_per_node` says no 12 GPUs of nodes of 8: it was planned, and had no file."""
    words = {**JOB, "nodes": 3, "modes": "one_step_off", "scorers": [{**TEACHER, "devices": 12}]}
    with pytest.raises(InfeasibleError, match="a scorer has 12 devices, which fill no whole number of nodes of 8"):
        plan_job(Job.model_validate({**words, "pools": [{**pool, "devices": 4} for pool in JOB["pools"]]}))


def test_a_teacher_of_many_nodes_may_take_three_of_them_or_most() -> None:
    """Powers of two up to half of the devices were all: a teacher much larger than the policy had no place."""
    words = {**JOB, "nodes": 5, "pools": [], "scorers": [{"name": "big", "kind": "teacher", "placement": "own"}]}
    assert {split.scorers for split in splits(resolve(Job.model_validate(words)))} >= {(8,), (24,), (32,)}


def test_devices_of_scorers_are_paid_for() -> None:
    context = resolve(Job.model_validate({**JOB, "price": "2 USD/h", "scorers": [TEACHER]}))
    split = next(s for s in splits(context) if s.scorers == (2,))
    assert split.usage(context).usd_per_s == pytest.approx(2.0 * 8 / 3600.0)
    assert judged(TEACHER)[1].configuration.devices == 8


def test_no_more_batches_pass_than_a_scorer_takes() -> None:
    """Refilled, the slowest scorer is a stage of its own; the timeline says the same."""
    stages = StepStages.of(
        [20.0], training_s=10.0, rollout_steady_s=15.0, reward_s=3.0, reward_apart=True, scorer_s=40.0
    )
    execution = Execution("async", staleness=4)
    assert float(step_seconds(execution, stages.times())) == pytest.approx(40.0)
    assert compose_rl_step(execution, stages).rl_step_s == pytest.approx(40.0)
    free = replace(stages, scorer_s=0.0)
    assert float(step_seconds(execution, free.times())) < 25.0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "reward", "top_k": 4}, "only a teacher"),
        ({"placement": "shared", "devices": 4}, "placement leaves only"),
        ({"layout": {"zero_stage": 3}}, "cannot be set on a scorer"),
    ],
)
def test_what_a_scorer_cannot_be(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Scorer.model_validate({"name": "a", "kind": "teacher", **wrong})


@pytest.mark.parametrize(
    ("framework", "scorer", "key"),
    [
        pytest.param(
            *("verl==0.9.1", TEACHER, "distillation.teacher_models.teacher_model.model_path"), marks=pytest.mark.slow
        ),
        (
            "verl==0.9.1",
            {**TEACHER, "kind": "judge", "response_tokens": 64},
            "reward.reward_model.enable_resource_pool",
        ),
        ("slime", {**TEACHER, "placement": "shared", "devices": None}, "opd-teacher-load"),
        # without a trainer's section its own TeacherConfig refuses the file at launch
        ("areal==1.0", {**TEACHER, "placement": "shared", "devices": None}, "teacher.train.backend"),
        pytest.param(
            "nemo_rl",
            TEACHER,
            "on_policy_distillation.non_colocated_teachers.default_teacher_cfg.tensor_model_parallel_size",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_export_states_scorers_and_import_reads_them(
    framework: str, scorer: dict[str, Any], key: str, tmp_path: Any
) -> None:
    job = {k: v for k, v in JOB.items() if k not in ("pools", "trainer_backends")}
    plan = plan_job(Job.model_validate({**job, "framework": framework, "modes": "colocated", "scorers": [scorer]}))
    assert key in plan_texts(plan)["EXPORT.md"]
    files = [f for f in write_plan(plan, None, tmp_path / "out") if f.suffix in (".yaml", ".sh")]
    (back,) = job_of(import_config(files, framework)).scorers
    chosen = plan.phases[0].scorers[0]
    assert (back.kind, back.architecture) == ("reward" if scorer["kind"] == "judge" else "teacher", "Qwen3-14B")
    if chosen.placement == "own":
        assert back.devices == (chosen.devices,)
    assert any(
        chosen.kind in row for row in plan.phases[0].predicted.scorers[0].model_dump().values() if isinstance(row, str)
    )


def test_a_framework_without_keys_refuses_by_name() -> None:
    run = Run(devices_per_node=8, scorers=(ScorerRun("big", "reward", "own", "Qwen3-14B", 2),))
    target = Target(key_table("areal"), key_table("areal").versions[-1])
    with pytest.raises(ExportError, match="reward big: devices of its own"):
        scorer_settings(run, "areal", target)
    twice = (ScorerRun("a", "reward", "own", "Qwen3-14B", 2), ScorerRun("b", "judge", "own", "Qwen3-8B", 2))
    target = Target(key_table("verl"), "0.9")
    with pytest.raises(ExportError, match="judge b: a second of its kind"):
        scorer_settings(replace(run, scorers=twice), "verl", target)


TEACHERS = [
    {**TEACHER, "name": "small", "architecture": "Qwen3-8B", "devices": 2, "share": 0.5, "top_k": 8},
    {**TEACHER, "name": "wide", "devices": 2, "share": 0.5, "top_k": 8, "layout": {"tensor_parallel": 2}},
]


def test_several_teachers_of_verl_have_an_entry_each_and_come_back(tmp_path: Any) -> None:
    """They were planned and refused at export; the shipped entry `teacher_model` is dropped beside others (0.9.1)."""
    budgets = {"token_budget": 8192, "scoring_token_budget": 8192}
    pools = [
        {"role": "rollout", "devices": 4, "layout": {"tensor_parallel": 1}, "settings": {"memory_fraction": 0.6}},
        {"role": "trainer", "devices": 4, "layout": {"zero_stage": 3}, "settings": budgets},
    ]
    engines = {"settings": {"memory_fraction": 0.8, "max_running": 64}}
    teachers = [{**each, **engines, "overlap": None} for each in TEACHERS]
    words = {**JOB, "modes": ["colocated"], "trainer_backends": ["fsdp2"], "pools": pools, "scorers": teachers}
    job = Job.model_validate({**words, "tasks": [{**TASK, "prompts_per_step": 40, "mini_batch": 40}]})
    files = [f for f in write_job(job, None, tmp_path / "out") if f.suffix in (".yaml", ".sh")]
    imported = import_config(files, "verl==0.9.1")
    assert not imported.unknown and not imported.illegal
    keys = {k.removeprefix("distillation."): v for k, v in imported.source.keys.items()}
    assert (keys["nnodes"], keys["n_gpus_per_node"], keys["distillation_loss.loss_mode"]) == (1, 4, "forward_kl_topk")
    # the widest first, so that replicas lie in nodes; a new entry has dummy weights unless it says otherwise
    assert [keys[f"teacher_models.teacher_{n}.key"] for n in (1, 2)] == ["wide", "small"]
    assert [keys[f"teacher_models.teacher_{n}.num_replicas"] for n in (1, 2)] == [1, 2]
    assert keys["teacher_models.teacher_2.inference.load_format"] == "auto"
    back = job_of(imported, cluster="dgx_h100")
    assert {(each.name, each.devices, each.share, each.top_k) for each in back.scorers} == {
        ("small", (2,), 0.5, 8),
        ("wide", (2,), 0.5, 8),
    }
    assert back.nodes == 1
    assert predict_job(back).rl_step_s == pytest.approx(predict_job(job).rl_step_s, rel=1e-9)


def test_what_a_file_says_of_teachers_and_verl_does_otherwise_is_told() -> None:
    """An entry of the shipped name is dropped beside others, and pools of another size are refused (0.9.1)."""
    there, own = "distillation.teacher_models.", "inference.tensor_model_parallel_size"
    keys = {
        "distillation.enabled": True, "distillation.nnodes": 1, "distillation.n_gpus_per_node": 8,
        **{f"{there}t{n}.{key}": value for n in (1, 2) for key, value in
           {"key": f"d{n}", "model_path": "Qwen/Qwen3-8B", "num_replicas": n, own: 2}.items()},
    }  # fmt: skip
    scorers, used = read_scorers(Run(), "verl", keys, Target(key_table("verl"), "0.9").defaults())
    assert [(each.name, each.devices, each.tensor_parallel) for each in scorers] == [("d1", 2, 2), ("d2", 4, 2)]
    assert used == set(keys)
    assert misled("verl", keys, scorers) == {
        "distillation.nnodes": (True, "1 x 8 devices, where replicas of all entries take 6")
    }
    shipped = f"{there}teacher_model.model_path"
    assert not misled("verl", {**keys, "distillation.n_gpus_per_node": 6, shipped: "Qwen/Qwen3-4B"}, scorers)[shipped][
        0
    ]
    assert key_table("verl").find(f"{there}t1.model_path", "0.9") and not key_table("verl").find(
        f"{there}t1.pat", "0.9"
    )


@pytest.mark.parametrize(
    ("scorers", "words"),
    [
        ([{**each, "share": 1.0} for each in TEACHERS], "one of its teachers, and share adds up to 2"),
        ([TEACHERS[0]], "sends every sequence to its scorer, and share adds up to 0.5"),
        ([TEACHERS[0], {**TEACHERS[1], "top_k": 1}], "one key for top_k"),
        ([{"name": n, "kind": k} for n, k in (("a", "reward"), ("b", "judge"))], "scorers a, b: verl has keys for one"),
    ],
)
def test_scorers_that_files_cannot_say_together_are_refused_before_planning(
    scorers: list[dict[str, Any]], words: str
) -> None:
    job = Job.model_validate({**JOB, "pools": [], "modes": ["colocated"], "scorers": scorers})
    with pytest.raises(SpecError, match=words):
        ask(job, to_plan=True)


@pytest.mark.parametrize(
    ("framework", "scorer", "words"),
    [
        ("verl", {"kind": "teacher", "placement": "shared"}, "for a teacher on the trainer's devices.*placement: own"),
        ("slime", {"kind": "reward"}, "slime main has no keys for a reward model.*verl or nemo_rl or openrlhf"),
        ("nemo_rl", {"kind": "judge", "placement": "own"}, "no keys for a judge .framework: verl"),
        ("openrlhf", {"kind": "reward", "placement": "own"}, "reward model on devices of its own.*placement: shared"),
    ],
)
def test_scorers_that_no_file_can_say_are_refused_before_planning(
    framework: str, scorer: dict[str, str], words: str
) -> None:
    """They were planned, and refused at export; a prediction tells them all the same."""
    named = {"framework": framework, "scorers": [{"name": "s", **scorer}], "pools": [], "modes": ["colocated"]}
    job = Job.model_validate({**JOB, "trainer_backends": [], **named})
    with pytest.raises(SpecError, match=words):
        ask(job, to_plan=True)
    assert ask(job, to_plan=False).context.scorers


@pytest.mark.parametrize(
    ("job", "words"),
    [({"algorithm": "dapo"}, "beside algo.dynamic_filtering_enable openrlhf loads no reward model.*verl or nemo_rl"),
     ({"workload": "software_engineering"}, "beside train.agent_func_path openrlhf loads no reward model")],
)  # fmt: skip
def test_a_reward_model_that_a_file_leaves_no_place_is_refused_before_planning(job: dict[str, str], words: str) -> None:
    """It was planned, and refused at export."""
    lengths = {"max_prompt_tokens": 8192, "max_response_tokens": 8192}
    tasks = [{**JOB["tasks"][0], **lengths, "workload": job.get("workload", "math")}]
    whole = {**JOB, "framework": "openrlhf", "trainer_backends": [], "pools": [], "modes": ["colocated"],
             "algorithm": job.get("algorithm", "grpo"), "tasks": tasks}  # fmt: skip
    asked = Job.model_validate({**whole, "scorers": [{"name": "s", "kind": "reward"}]})
    with pytest.raises(SpecError, match=words):
        ask(asked, to_plan=True)
    assert ask(asked).context.scorers
    ask(asked.model_copy(update={"scorers": ()}), to_plan=True)


def test_teachers_of_one_pool_fill_nodes_together() -> None:
    """`distillation.nnodes` x `n_gpus_per_node` holds all of them: eight and four leave part of a node."""
    facts, teachers = framework_facts("verl"), [Scorer.model_validate(each) for each in TEACHERS]
    assert uneven_parts(facts, Split("colocated", 16, 16, (8, 4)), 8, teachers) == {"scorers": (12,)}
    assert uneven_parts(facts, Split("colocated", 16, 16, (4, 4)), 8, teachers) == {}


def test_open_placements_are_those_that_files_can_say() -> None:
    """Both were planned, and the plan was lost where a file had no key for the better: verl's teachers have devices of
    their own, and OpenRLHF's reward models have them where `train.colocate_all` does not put all roles together."""

    def placed(framework: str, kind: str, **other: Any) -> tuple[str, ...]:
        words = {**JOB, "pools": [], "trainer_backends": [], "framework": framework, **other}
        job = Job.model_validate({**words, "scorers": [{"name": "a", "kind": kind}]})
        return as_framework_runs(job, framework_facts(framework)).scorers[0].placement

    assert placed("verl", "teacher", modes="colocated") == ("own",)
    assert placed("verl", "judge") == ("own", "shared")
    assert placed("slime", "teacher") == ("shared",)
    assert placed("openrlhf", "reward", modes="colocated") == ("shared",)
    assert placed("openrlhf", "reward", modes="one_step_off") == ("own",)
    assert placed("openrlhf", "reward", modes="one_step_off", algorithm="ppo") == ("shared",)
    assert placed("trl", "teacher", modes="colocated") == (
        "own",
        "shared",
    )  # it has no key for either: nothing is known


def test_a_scorer_is_seated_by_the_mode() -> None:
    words = {**JOB, "nodes": 2, "pools": [], "trainer_backends": [], "framework": "openrlhf"}
    job = Job.model_validate(
        {**words, "modes": ["colocated", "one_step_off"], "scorers": [{"name": "rm", "kind": "reward"}]}
    )
    found = splits(ask(job).context)
    assert {split.mode for split in found} == {"colocated", "one_step_off"}
    assert all((split.scorers == (0,)) == (split.mode == "colocated") for split in found)


def test_openrlhf_loads_a_reward_model_only_without_a_reward_function() -> None:
    """`reward.remote_url` was written beside the model, which is not loaded then (openrlhf/cli/train_ppo_ray.py)."""
    shape = {"devices": 8, "trainer": TrainerRun(backend="deepspeed", devices=8), "devices_per_node": 8}
    rollout = RolloutRun(backend="vllm", devices=8, data_parallel=8, tensor_parallel=1, num_engines=8)
    bare = Run(architecture="Qwen3-8B", batch=BatchFacts(32, 4, 32), rollout=rollout, **shape)  # type: ignore[arg-type]
    target = Target(key_table("openrlhf"), "0.11")
    adapter = adapter_of("openrlhf")

    def keys(*scorers: ScorerRun) -> set[str]:
        run = replace(bare, scorers=scorers)
        return {s.key for s in (*adapter.emit(run, target).settings, *scorer_settings(run, "openrlhf", target))}

    assert "reward.remote_url" in keys()
    beside = keys(ScorerRun("rm", "reward", "shared", "Qwen3-8B", 8))
    assert "reward.model_name_or_path" in beside and "reward.remote_url" not in beside
    with pytest.raises(ExportError, match="reward rm: devices of its own: 4; nearest: placement: shared"):
        keys(ScorerRun("rm", "reward", "own", "Qwen3-8B", 4))


@pytest.mark.parametrize(("together", "placement", "devices"), [(True, "shared", 0), (False, "own", 8)])
def test_a_reward_model_of_openrlhf_09_is_read_and_written(together: bool, placement: str, devices: int) -> None:
    """Its flags had no dots up to 0.9: the reward model of most of its examples was neither counted nor named."""
    keys: dict[str, Any] = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "vllm_num_engines": 4}
    model = {"reward_pretrain": "Qwen/Qwen3-8B", "reward_num_nodes": 1, "reward_num_gpus_per_node": 8}
    keys |= {"colocate_all_models": True} if together else {}

    def read(more: dict[str, Any]) -> tuple[ScorerRun, ...]:
        return understand(Source({**keys, **more}), "openrlhf==0.9").run.scorers

    (found,) = read(model)
    assert (found.kind, found.placement, found.devices) == ("reward", placement, devices)
    assert read({**model, "remote_rm_url": "reward.py"}) == read({**model, "agent_func_path": "agent.py"}) == ()
    run = Run(
        mode="colocated" if together else "disaggregated", devices_per_node=8, scorers=(replace(found, devices=8),)
    )
    written = {s.key: s.value for s in scorer_settings(run, "openrlhf", Target(key_table("openrlhf"), "0.9"))}
    assert written == model


@pytest.mark.parametrize(("together", "placement", "devices"), [(True, "shared", 0), (False, "own", 8)])
def test_a_reward_model_of_openrlhf_is_read_where_it_is_loaded(together: bool, placement: str, devices: int) -> None:
    """None was read, so that a file's own prediction had no reward model; an agent's turns were exported beside one."""
    keys: dict[str, Any] = {"actor.num_nodes": 1, "actor.num_gpus_per_node": 8, "train.colocate_all": together}
    model = {"reward.model_name_or_path": "Qwen/Qwen3-8B", "reward.num_nodes": 1, "reward.num_gpus_per_node": 8}

    def read(more: dict[str, Any]) -> tuple[ScorerRun, ...]:
        return understand(Source({**keys, **more}), "openrlhf==0.11").run.scorers

    assert read({key: given for key, given in model.items() if "num" in key}) == (), "PPO names devices and no model"
    (found,) = read(model)
    assert (found.kind, found.placement, found.devices) == ("reward", placement, devices)
    for other in ("reward.remote_url", "train.agent_func_path", "algo.dynamic_filtering_enable"):
        assert read({**model, other: "agent.py"}) == ()
        run = Run(
            mode="colocated" if together else "disaggregated", devices_per_node=8, scorers=(replace(found, devices=8),)
        )
        with pytest.raises(ExportError, match=f"beside {other} none is loaded"):
            scorer_settings(run, "openrlhf", Target(key_table("openrlhf"), "0.11"), {other})


def test_defaults_run_on_what_scorers_leave() -> None:
    """They were given the scorers' devices too, and had no layout beside them."""
    asked: list[int] = []

    def defaults(architecture: str, batch: Any, devices: int) -> Defaults:
        asked.append(devices)
        return Defaults.unknown("none", "nobody asks")

    context = resolve(Job.model_validate({**JOB, "scorers": [{**TEACHER, "devices": None}]}))
    _, chosen = judged(TEACHER)
    decision: Any = SimpleNamespace(task=context.tasks[0])
    stated, _, _ = _Judged(context, defaults).evaluate(decision, chosen)
    assert asked == [6], "eight less the teacher's two"
    pinned = pinned_to(context, replace(stated, backend="megatron"), chosen.configuration.scorers)
    assert {split.scorers for split in splits(pinned)} == {(2,)}


def test_a_scorer_reads_no_more_than_it_has_positions_for() -> None:
    job, short = Job.model_validate(JOB), load_architecture("Qwen3-14B").model_copy(update={"max_positions": 6144})
    check_length(job, Scorer(name="a", kind="judge"), short.model_copy(update={"max_positions": 6145}))
    with pytest.raises(SpecError, match="scorer a: sequence, instructions and verdict of 6,145 tokens"):
        check_length(job, Scorer(name="a", kind="judge"), short)


def test_sequences_end_as_the_simulated_ones_do() -> None:
    """The mean end of a sequence, from seconds of an engine_step alone."""
    _, evaluation = judged(TEACHER)
    ends, last = evaluation.scorers[0].ends[0].seconds(evaluation.rollout.take(slice(0, 1)))
    closed = ends[0] * float(evaluation.rollout.makespan_s[0]) / last[0]
    assert closed.mean() == pytest.approx(evaluation.rollouts[0].finish_s.mean(), rel=0.15)
    assert np.corrcoef(closed, evaluation.rollouts[0].finish_s)[0, 1] > 0.95


def test_what_is_scored_as_it_ends_is_told_of_every_rl_step() -> None:
    """Its first one stood for all: by 1 to 4 % another rl_step, by which of four lengths the longest is drawn."""
    (bare, base), (found, evaluation) = judged(), judged({**TEACHER, "devices": 1})
    assert len(evaluation.scorers[0].ends) == len(evaluation.rollouts) > 1
    ratio = base.rl_step_s / float(bare.rl_step_s[0])
    assert float(found.rl_step_s[0]) * ratio == pytest.approx(evaluation.rl_step_s, rel=0.01)


def test_a_plan_pinned_is_the_plan_with_its_scorers() -> None:
    """They stayed open in what a plan pins, by which plans are compared, and were served by an engine of no name."""
    small = {**TEACHER, "architecture": "Qwen3-4B", "devices": [1, 2]}
    plan = plan_job(Job.model_validate({**JOB, "modes": ["one_step_off"], "scorers": [small]}))
    pinned, (chosen,) = job_of_plan(plan), plan.phases[0].scorers
    assert (chosen.settings.backend, pinned.scorers[0].devices) == ("vllm", (chosen.devices,))
    assert Job.model_validate(pinned.stated()).scorers == pinned.scorers
    assert predict_job(pinned).rl_step_s == pytest.approx(plan.phases[0].predicted.rl_step_s)


def test_rewards_of_functions_are_hidden_in_a_rollout_behind_which_models_are_asked() -> None:
    """OpenRLHF 0.11: utils/agent.py:281 asks as a sample ends; a reward model is a pass when all have ended."""
    job = short_job("Qwen3-8B", 16, framework="openrlhf", max_response="8k", mode="disaggregated").stated()
    timed = {**job, "tasks": [{**job["tasks"][0], "reward_s": "60 s"}]}
    now, older = (plan_job({**timed, "framework": f"openrlhf=={v}"}).phases[0] for v in ("0.11", "0.10"))
    assert now.predicted.stages_s.reward == pytest.approx(12.0)
    assert older.predicted.stages_s.reward == pytest.approx(60.0)
    model = {"name": "rm", "kind": "reward", "architecture": "Qwen3-32B", "placement": "own"}
    waits = [plan_job({**job, "scorers": [{**model, "overlap": asked}]}).phases[0] for asked in (None, False)]
    assert waits[0].predicted.stages_s.reward == waits[1].predicted.stages_s.reward > 60.0
