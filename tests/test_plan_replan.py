"""Replanning against runs whose truth is known: the project's own simulator made their logs."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rlperf.api import ask
from rlperf.cli.main import app
from rlperf.errors import SpecError
from rlperf.plan.answer.replanned import Replan
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.scaled import scaled_seconds
from rlperf.plan.judge.stage_factors import NOISE, STAGES, Errors, StageFactor, stage_factors
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import Context, resolve
from rlperf.plan.replan import _factors, replan_job
from rlperf.plan.search.configuration import Configuration
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.job import Job
from rlperf.specs.step_log import StepLog
from rlperf.workload import LengthTable, concat

PROMPTS, GROUP, CAP = 64, 8, 8192
FACTORS = {"rollout": 1.2, "scoring": 0.9, "training": 0.85}
"""How far the truth is from the calibration."""


def job(**changes: object) -> Job:
    task = {
        "name": "math", "workload": "math", "prompts_per_step": PROMPTS, "group_size": GROUP,
        "max_prompt_tokens": 512, "max_response_tokens": CAP, "reward_s": "0 s",
    }  # fmt: skip
    base: dict[str, object] = {
        "architecture": "Qwen3-4B", "cluster": "dgx_h100", "tasks": [task], "trainer_backends": ["fsdp2"],
        "horizon": {"rl_steps": 60, "group": 20, "switch": "60 s"},
        "pools": [{"role": "trainer", "layout": {"tensor_parallel": 1, "context_parallel": 1, "ulysses": [1, 8]}}],
    }  # fmt: skip
    return Job.model_validate({**base, **changes})


def pinned(tensor_parallel: int, **changes: object) -> Job:
    layout = {"tensor_parallel": tensor_parallel, "pipeline_parallel": 1}
    return job(pools=[{"role": "rollout", "layout": layout}], **changes)


def lengths(rl_step: int, growth: float, seed: int = 0) -> LengthTable:
    """One rl_step of log-normal lengths whose location moves by ``growth`` per rl_step."""
    random = np.random.default_rng([seed, rl_step])
    prompts = random.integers(50, 300, PROMPTS)
    shared = random.normal(0.0, 0.4, (PROMPTS, 1))
    drawn = np.exp(np.log(400.0) + growth * rl_step + shared + random.normal(0.0, 0.5, (PROMPTS, GROUP)))
    table = LengthTable.from_groups(
        prompts.tolist(), np.clip(drawn, 1, CAP).astype(int).tolist(), max_response_tokens=CAP
    )
    return replace(table, rl_step=np.full(table.n, rl_step))


@dataclass
class Run:
    """A run that the simulator made: its question, what ran, and what its files say."""

    context: Context
    running: Configuration
    log: StepLog
    rollouts: LengthTable
    growth: float

    def judged(self, configuration: Configuration, first: int, last: int) -> Evaluation:
        return judged(self.context, configuration, [lengths(k, self.growth) for k in range(first, last + 1)])

    def truth_s(self, configuration: Configuration, first: int, last: int) -> float:
        """Seconds that rl_steps ``first`` to ``last`` really take, the rollout's and the trainer's errors included."""
        return float(true_seconds(self.judged(configuration, first, last))["rl_step_s"].sum())


def judged(context: Context, configuration: Configuration, tables: list[LengthTable]) -> Evaluation:
    demand = Demand("math", (0, 0), configuration.batch, tuple(tables), 0.0, 0.0, ())
    return Judge(context, context.tasks[0]).evaluate(demand, configuration)


def factors(context: Context, recorded: Evaluation, **stated: np.ndarray) -> dict[str, StageFactor]:
    """Stage factors by a log of the recorded rl_steps that states these columns."""
    log = StepLog.of(np.arange(len(recorded.seconds.rl_step_s)), **stated)
    return {each.stage: each for each in stage_factors(context, context.tasks[0], recorded, log)}


def true_seconds(evaluation: Evaluation) -> dict[str, np.ndarray]:
    seconds = evaluation.seconds
    stages = {f"{stage}_s": factor * getattr(seconds, f"{stage}_s") for stage, factor in FACTORS.items()}
    rest = sum(getattr(seconds, name) for name in ("weight_sync_s", "data_movement_s", "offload_s", "other_s"))
    return {**stages, "weight_sync_s": seconds.weight_sync_s, "rl_step_s": sum(stages.values()) + rest}


def run(running: Job, rl_steps: int, *, growth: float, noise: float, asked: Job | None = None, seed: int = 0) -> Run:
    """``rl_steps`` recorded rl_steps of the best configuration of ``running``."""
    context = ask(asked or job()).context
    configuration = evaluate_job(ask(running).context)[0].configuration
    tables = [lengths(k, growth) for k in range(rl_steps)]
    truth = true_seconds(judged(context, configuration, tables))
    random = np.random.default_rng(seed)
    noisy = {name: values * np.exp(random.normal(0.0, noise, rl_steps)) for name, values in truth.items()}
    log = StepLog.of(np.arange(rl_steps), framework="", source="", **noisy)
    return Run(context, configuration, log, concat(tables), growth)


def replanned(made: Run, at_step: int) -> Replan:
    return replan_job(made.context, made.running, made.log, made.rollouts, at_step)


@pytest.fixture(scope="module")
def wide() -> Run:
    """A run on one wide replica whose trainer recomputes everything: right for nobody."""
    return run(wide_job(), 20, growth=0.03, noise=0.03)


def wide_job() -> Job:
    trainer = {"role": "trainer", "layout": {"activation_recompute": "full", "ulysses": 8}}
    asked = pinned(8)
    return Job.model_validate({**asked.model_dump(), "pools": [*(p.model_dump() for p in asked.pools), trainer]})


@pytest.fixture(scope="module")
def recommended(wide: Run) -> Replan:
    return replanned(wide, 20)


def test_switches_where_it_pays(wide: Run, recommended: Replan) -> None:
    found = recommended
    assert found.verdict == "switch"
    assert found.at_step == 20
    assert 1.0 < found.low < found.gain < found.high
    assert any("tensor_parallel" in text for text in found.differs)
    chosen = found.stretches[0].configuration
    stay, switched = (wide.truth_s(each, 20, 59) for each in (wide.running, chosen))
    assert stay > switched + 60.0
    assert found.low <= stay / (switched + 60.0) <= found.high * 1.05
    now, end = found.lengths
    assert end.mean > 1.3 * now.mean
    assert found.sentence().startswith("switch, at rl_step 20, gain 1.")


def test_calibrates_the_stages_by_the_log(recommended: Replan) -> None:
    found = {factor.stage: factor for factor in recommended.factors}
    for stage, truth in FACTORS.items():
        assert found[stage].value == pytest.approx(truth, rel=0.04)
        assert found[stage].rl_steps == 12
    assert found["weight_sync"].value == pytest.approx(1.0, abs=0.03)


def test_stays_where_nothing_is_better() -> None:
    steady = run(job(), 12, growth=0.0, noise=0.03)
    found = replanned(steady, 12)
    assert found.verdict == "stay"
    assert found.stay_s * 48 == pytest.approx(steady.truth_s(steady.running, 12, 59), rel=0.02)


@pytest.mark.slow
def test_stays_where_the_switch_costs_more_than_it_saves(wide: Run) -> None:
    dear = wide.context.job.model_copy(update={"horizon": wide.context.job.horizon.model_copy(update={"switch": 1e5})})
    found = replanned(replace_context(wide, dear), 20)
    assert found.verdict == "stay"
    assert found.gain == 1.0
    assert "cost of switching included" in found.sentence()


def test_a_part_of_the_responses_stands_for_all(wide: Run, recommended: Replan) -> None:
    """A dump of every fourth prompt made scoring and training 3.4 times as slow as predicted, by no fault of theirs."""
    part = replace(wide, rollouts=wide.rollouts.where(wide.rollouts.group % 4 == 0))
    notes: list[str] = []
    context = part.context
    found = _factors(context, context.tasks[0], part.running, part.log, part.rollouts, 20, notes)
    for each, whole in zip(found, recommended.factors, strict=True):
        assert each.value == pytest.approx(whole.value, rel=0.08), each.stage
    assert f"math: groups redrawn from the recording for {PROMPTS} x {GROUP}" in notes


def test_a_log_of_other_lengths_than_the_rollouts_is_told(wide: Run) -> None:
    """Its stages were called slow, where the log was of responses twice as long."""
    of_steps = [wide.rollouts.step(step).response_tokens.mean() for step in wide.log.rl_step.tolist()]
    told = []
    for times in (1.0, 2.0):
        notes: list[str] = []
        log = replace(wide.log, response_tokens=times * np.array(of_steps))
        _factors(wide.context, wide.context.tasks[0], wide.running, log, wide.rollouts, 20, notes)
        told.append([note for note in notes if note.startswith("responses of the log have ")])
    assert not told[0] and len(told[1]) == 1


def replace_context(made: Run, asked: Job) -> Run:
    return replace(made, context=replace(made.context, job=asked))


@pytest.mark.slow
def test_stays_on_a_short_noisy_log_of_a_close_call() -> None:
    """Two rl_steps with 30 % noise, and a layout that is nearly as good: no certainty, no switch."""
    close = run(pinned(2), 2, growth=0.0, noise=0.3, asked=job(horizon={"rl_steps": 60, "group": 20, "switch": "5 s"}))
    found = replanned(close, 2)
    assert found.verdict == "stay"
    assert found.low < 1.0 or found.gain == 1.0


def test_few_rl_steps_leave_the_factor_near_one() -> None:
    one, many = (StageFactor("rollout", 0.3, 0.2, n, 0.1) for n in (1, 100))
    assert 1.0 < one.value < 1.08 < many.value < np.exp(0.3)
    assert one.sigma > many.sigma
    assert StageFactor("rollout", 0.3, 0.2, 0, 0.1).value == 1.0


def test_a_rollout_that_is_broken_recommends_no_layout_for_being_another() -> None:
    """2.5 times the prediction is no error that predictions have: other layouts are expected to take as long."""
    small, broken = (StageFactor("rollout", np.log(ratio), 0.03, 5, 0.15) for ratio in (1.2, 2.5))
    usual, alike = (Errors.expected((each,)) for each in (small, broken))
    assert usual.other["rollout"] < 0.6 * usual.ran["rollout"]
    assert alike.other["rollout"] == alike.ran["rollout"]


def test_stages_that_a_log_does_not_time_are_told_by_what_its_rl_steps_leave(wide: Run) -> None:
    """TRL times no update: of one 1.5 times as long nothing was heard, though every rl_step is stated.

    Each is what normal conditioning on the sum of their errors gives.
    """
    recorded = judged(wide.context, wide.running, [lengths(k, wide.growth) for k in range(3)])
    due = {stage: getattr(recorded.seconds, f"{stage}_s") for stage in STAGES}
    whole = recorded.seconds.rl_step_s + 0.5 * due["training"]
    timed = {"rollout_s": due["rollout"], "weight_sync_s": due["weight_sync"]}
    silent = factors(wide.context, recorded, **timed)
    told = factors(wide.context, recorded, rl_step_s=whole, **timed)
    assert silent["training"].value == 1.0 and silent["training"].rl_steps == 0 and told["training"].rl_steps == 3
    left = [stage for stage in ("scoring", "training") if due[stage].mean() > 0.0]
    rest = sum(due[stage] for stage in left)
    share, prior = (np.array([(due[s] / rest).mean() for s in left]), np.array([told[s].prior for s in left]))
    ratio = np.median(np.log(1.0 + 0.5 * due["training"] / rest))
    other = recorded.seconds.rl_step_s - rest
    noise = np.median(np.log((np.exp(NOISE) * whole - other) / (np.exp(-NOISE) * whole - other))) / 2.0
    gain = prior**2 * share / (noise**2 + ((share * prior) ** 2).sum())
    assert [told[s].mean for s in left] == pytest.approx(list(gain * ratio))
    assert [told[s].sigma for s in left] == pytest.approx(list(prior * np.sqrt(1.0 - gain * share)))
    assert told["training"].value > 1.02 and told["rollout"] == silent["rollout"]


def test_a_rollout_that_holds_the_weight_sync_is_as_predicted_with_it(wide: Run) -> None:
    """verl up to 0.6 times both as one: the rollout was 7 % slower than predicted."""
    recorded = judged(wide.context, wide.running, [lengths(k, wide.growth) for k in range(3)])
    due = recorded.seconds
    log = {f"{stage}_s": getattr(due, f"{stage}_s") for stage in ("scoring", "training")}
    log["rollout_s"] = due.rollout_s + due.weight_sync_s + due.offload_s
    found = factors(wide.context, recorded, rl_step_s=due.rl_step_s, **log)
    assert [found[stage].log_ratio for stage in STAGES] == pytest.approx([0.0] * 4, abs=1e-9)
    assert (found["rollout"].rl_steps, found["weight_sync"].rl_steps) == (3, 0)


def apart(mode: str) -> tuple[Context, Evaluation]:
    """Two devices roll out beside six that train, in less time; judged on three rl_steps."""
    pools = [
        {"role": "rollout", "devices": 2, "layout": {"tensor_parallel": 2}},
        {"role": "trainer", "devices": 6, "settings": {"token_budget": 16384}, "layout": {"tensor_parallel": 1}},
    ]
    context = ask(job(modes=[mode], pools=pools, limits={"staleness": 1})).context
    configuration = evaluate_job(context)[0].configuration
    return context, judged(context, configuration, [lengths(k, 0.0) for k in range(3)])


def test_a_total_tells_of_a_rollout_that_runs_beside_the_trainer() -> None:
    """What such a log calls rollout is a wait: how long the engines took, its rl_steps tell, where they wait for it."""
    context, recorded = apart("one_step_off")
    due = recorded.seconds
    assert (due.rollout_s > 1.5 * due.training_s).all()
    stated = {"training_s": due.training_s, "scoring_s": due.scoring_s, "rollout_s": 0.1 * due.rollout_s}
    slow = factors(context, recorded, rl_step_s=due.rl_step_s + 0.2 * due.rollout_s, **stated)["rollout"]
    assert slow.log_ratio == pytest.approx(np.log(1.2), rel=1e-3) and slow.by_total and slow.rl_steps == 3
    assert 1.1 < slow.value < 1.2
    # a trainer that every rl_step waits for hides the engines: they may be anything that is shorter
    held = 3.0 * due.rl_step_s
    hidden = factors(context, recorded, rl_step_s=1.001 * held, **{**stated, "training_s": held})["rollout"]
    assert hidden.value == pytest.approx(1.0, abs=0.01)


def test_a_rollout_scaled_is_that_of_engines_so_much_slower() -> None:
    """Its groups take as much longer as all of it does."""
    context, recorded = apart("async")
    stack = context.trainers[recorded.backend]
    slower = stack.framework.model_copy(update={"factors": stack.framework.factors.scaled({"rollout": 1.3})})
    engines = replace(context, trainers=(replace(stack, framework=slower),))
    scaled = scaled_seconds(
        context.of("async").site, context.tasks[0].architecture, recorded,
        {"rollout": 1.3, "scoring": 1.0, "training": 1.0},
    )  # fmt: skip
    expected = judged(engines, recorded.configuration, [lengths(k, 0.0) for k in range(3)]).seconds.rl_step_s
    assert list(scaled.rl_step_s) == pytest.approx(list(expected))
    assert (scaled.rl_step_s > recorded.seconds.rl_step_s).all()


def test_refuses_what_it_cannot_answer(wide: Run) -> None:
    for change, words in (({"switch": None}, "what a switch costs"), ({"rl_steps": 20}, r"not inside.*\(horizon: ")):
        horizon = wide.context.job.horizon.model_copy(update=change)
        with pytest.raises(SpecError, match=words):
            replanned(replace_context(wide, wide.context.job.model_copy(update={"horizon": horizon})), 20)
    job = wide.context.job
    two = job.model_copy(update={"tasks": (*job.tasks, job.tasks[0].model_copy(update={"name": "other"}))})
    with pytest.raises(SpecError, match=r"this one has 2 tasks \(replan each by itself"):
        replanned(replace(wide, context=resolve(two)), 20)
    late = replace(wide, log=StepLog.of([500], rollout_s=[1.0]))
    with pytest.raises(SpecError, match=r"no rl_step before 20 stands in both .* \(log 500 to 500, rollouts 0 to 19\)"):
        replanned(late, 20)


def write_run(made: Run, folder: Path, asked: Job) -> None:
    """The run's job, its CSV metrics in verl's words and its PolyTrace dump."""
    (folder / "job.json").write_text(asked.model_dump_json(exclude_none=True))
    names = {"rollout_s": "timing_s/gen", "training_s": "timing_s/update_actor", "rl_step_s": "timing_s/step"}
    with (folder / "log.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["step", *names.values()])
        for k in range(made.log.n):
            writer.writerow([k, *(float(getattr(made.log, column)[k]) for column in names)])
    dump = folder / "dump"
    dump.mkdir()
    for step in made.rollouts.steps().tolist():
        table = made.rollouts.step(step)
        lines = [
            json.dumps(
                {
                    "step": step, "rank": 0, "dp_rank": 0, "tp_rank": 0, "local_index": g,
                    "input": int(table.prompt_tokens[table.group == g][0]), "n_sampling": GROUP, "validate": False,
                    "output": table.response_tokens[table.group == g].tolist(),
                }
            )
            for g in np.unique(table.group).tolist()
        ]  # fmt: skip
        (dump / f"packed_lengths_step_{step}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_command(wide: Run, tmp_path: Path) -> None:
    asked = job(horizon={"rl_steps": 60, "switch": "60 s"})
    write_run(wide, tmp_path, asked)
    (tmp_path / "runs.json").write_text(wide_job().model_dump_json(exclude_none=True))
    arguments = [
        "replan", str(tmp_path / "job.json"), "--log", str(tmp_path / "log.csv"), "--rollouts", str(tmp_path / "dump"),
        "--at-step", "20", "--running", str(tmp_path / "runs.json"),
    ]  # fmt: skip
    answer = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert found["verdict"] == "switch"
    assert found["low"] > 1.0
    # no row times scoring: it is heard by what the rl_steps leave for it
    assert {stage["stage"]: stage["rl_steps"] for stage in found["stages"]}["scoring"] > 0
    assert any("does not time scoring" in note for note in found["notes"])
    dear = CliRunner().invoke(app, [*arguments, "--switch", "100 h"], catch_exceptions=False)
    assert dear.stdout.startswith("stay")
    with pytest.raises(SpecError, match="switch: 'soon' is not a quantity"):
        CliRunner().invoke(app, [*arguments, "--switch", "soon"], catch_exceptions=False)
