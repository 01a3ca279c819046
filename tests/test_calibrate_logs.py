"""What a run's log says of a cluster: constants and stages move as they explain it, intervals say the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from rlperf.calibrate.logs.fit import LogFit, Told, calibration_text, fit_log
from rlperf.calibrate.logs.model import WHOLE, posterior
from rlperf.calibrate.logs.prior import Evidence, log_prior
from rlperf.calibrate.logs.stages import CONSTANTS, prior_widths, scaled_lengths
from rlperf.calibrate.rl_step.framework import constant, with_constants
from rlperf.cli.main import app
from rlperf.errors import SpecError
from rlperf.files import audit_config, calibrate_logs
from rlperf.frameworks.audit.verdict import verdict_of
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import Context, resolve
from rlperf.sim.rl_step.uncertainty import log_sigma
from rlperf.specs.job import Job
from rlperf.specs.own_files import own_calibrations
from rlperf.specs.rl_calibration import load_framework_calibration
from rlperf.specs.stage_spread import STAGES, LogPrior, StageFactors, StagePrior
from rlperf.specs.step_log import StepLog

HERE = {"rollout": 0.8, "scoring": 1.5, "training": 1.3, "weight_sync": 1.6, "rest": 2.0}
"""A cluster: its stages over what is shipped."""
PRIOR = LogPrior(
    **{stage: StagePrior(between=0.3, constants=1.0, within=0.1, noise=0.05, rows=9, groups=3) for stage in STAGES}
)
JOB = {
    "architecture": "Qwen2.5-7B", "cluster": "dgx_h100", "framework": "verl==0.9", "trainer_backends": "fsdp2",
    "reference": False, "nodes": 1,
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 32, "group_size": 8, "mini_batch": 32,
               "max_response_tokens": 2048, "max_prompt_tokens": 1024}],
    "pools": [
        {"role": "rollout", "devices": 8, "layout": {"tensor_parallel": 1},
         "settings": {"max_running": 128, "memory_fraction": 0.6}},
        {"role": "trainer", "devices": 8, "layout": {"zero_stage": 3, "activation_recompute": "full"},
         "settings": {"token_budget": 8192, "parked": True, "backend": "fsdp2"}},
    ],
}  # fmt: skip


def on_cluster(context: Context, factors: Mapping[str, float], constants: Mapping[str, float] | None = None) -> Context:
    """The context on a cluster whose stages and constants are others."""
    trainer = context.trainers[0]
    framework = with_constants(trainer.framework, constants or {})
    framework = framework.model_copy(update={"factors": StageFactors(**factors)})
    return replace(context, trainers=(replace(trainer, framework=framework),))


def run_on(
    context: Context,
    factors: Mapping[str, float],
    *,
    steps: int = 4,
    noise: float = 0.02,
    spread: float = 0.0,
    seed: int = 0,
    constants: Mapping[str, float] | None = None,
) -> StepLog:
    """Step metrics of the job on a cluster, with noise, and mean lengths that vary by ``spread``."""
    random = np.random.default_rng(seed)
    evaluation, _ = evaluate_job(context)
    there = on_cluster(context, factors, constants)
    own = evaluation.demand.tables[0]
    cap, mean = evaluation.demand.batch.max_response_tokens, own.response_tokens.mean()
    levels = np.linspace(1 - 2 * spread, 1 + 2 * spread, 5) if spread else np.ones(1)
    demand = replace(evaluation.demand, tables=tuple(scaled_lengths(own, mean * level, cap) for level in levels))
    seconds = Judge(there, there.tasks[0]).evaluate(demand, evaluation.configuration).seconds
    drawn = random.integers(0, len(levels), steps)

    def shaken(values: np.ndarray) -> np.ndarray:
        return values[drawn] * np.exp(noise * random.standard_normal(steps))

    stages = ("rollout_s", "scoring_s", "training_s", "weight_sync_s")
    columns = {name: shaken(getattr(seconds, name)) for name in stages}
    rest = shaken(seconds.data_movement_s + seconds.offload_s + seconds.other_s + seconds.reward_s)
    columns["rl_step_s"] = sum(columns.values(), start=rest)
    lengths = np.array([table.response_tokens.mean() for table in demand.tables])[drawn]
    return StepLog.of(np.arange(steps), framework="verl", source="run.log", response_tokens=lengths, **columns)


def told(fit: LogFit, name: str) -> Told:
    return next(each for each in (*fit.constants, *fit.factors) if each.name == name)


@pytest.fixture(scope="module")
def context() -> Context:
    return resolve(Job.model_validate(JOB))


@pytest.fixture(scope="module")
def fit(context: Context) -> LogFit:
    return fit_log(context, run_on(context, HERE), prior=PRIOR)


def test_three_rl_steps_tell_a_cluster(context: Context, fit: LogFit) -> None:
    """Most of every miss is taken over, what a single configuration may have of its own is not."""
    assert fit.steps == 3
    for stage in ("rollout", "scoring", "training", "weight_sync"):
        assert fit.after[stage] < 0.35 * fit.before[stage], stage
    for stage in STAGES:
        assert (told(fit, stage).value - 1.0) * (HERE[stage] - 1.0) >= 0.0, stage
        assert abs(np.log(told(fit, stage).value)) < abs(np.log(HERE[stage])), stage


def test_another_configuration_carries_the_posterior(context: Context, fit: LogFit) -> None:
    """A larger batch of longer updates on the same cluster: nearer than as shipped, in a narrower interval."""
    other = {**JOB, "tasks": [{**JOB["tasks"][0], "prompts_per_step": 96, "mini_batch": 48}]}  # type: ignore[dict-item, index]
    larger = resolve(Job.model_validate(other))
    there = evaluate_job(on_cluster(larger, HERE))[0]
    shipped = evaluate_job(larger)[0]
    trainer = larger.trainers[0]
    fitted = evaluate_job(replace(larger, trainers=(replace(trainer, framework=fit.calibration),)))[0]
    before, after = (abs(np.log(each.rl_step_s / there.rl_step_s)) for each in (shipped, fitted))
    assert after < 0.4 * before
    assert fitted.low_s < there.rl_step_s < fitted.high_s
    assert fitted.high_s / fitted.low_s < shipped.high_s / shipped.low_s
    spread = fit.calibration.step_spread
    assert log_sigma(spread.low, spread.high) == pytest.approx(fit.spread[WHOLE])
    # no log of one configuration tells what the next one has of its own
    assert all(fit.spread[stage] > 0.1 for stage in STAGES)


def test_a_stage_of_zeros_is_a_stage_that_the_log_lacks(context: Context) -> None:
    """Runs that print a timer of nothing: the fit is that of the others, not a division by no rl_steps."""
    log = run_on(context, HERE)
    nothing = replace(log, scoring_s=np.zeros(log.n))
    found = fit_log(context, nothing, prior=PRIOR)
    assert "scoring" not in found.after and "training" in found.after
    assert np.isfinite([each.value for each in (*found.constants, *found.factors)]).all()


@pytest.mark.slow
def test_few_noisy_rl_steps_stay_near_the_prior(context: Context) -> None:
    few, many = (
        fit_log(context, run_on(context, {**HERE, "training": 1.0}, steps=n, noise=0.4, seed=5), prior=PRIOR)
        for n in (3, 60)
    )
    assert told(few, "training").share < told(many, "training").share
    widths = [told(each, "training").high / told(each, "training").low for each in (few, many)]
    assert widths[0] > widths[1]
    assert few.spread["training"] > many.spread["training"]
    assert told(few, "training").low < 1.0 < told(few, "training").high


@pytest.mark.slow
def test_what_is_most_of_a_stage_explains_its_miss(context: Context) -> None:
    """Seconds per update that are most of the training move, where they are next to nothing the stage does."""
    heavy = on_cluster(context, {}, {"training.update": 60.0})
    found = fit_log(heavy, run_on(heavy, {}, constants={"training.update": 30.0}), prior=PRIOR)
    moved, stage = (abs(np.log(told(found, n).value / told(found, n).shipped)) for n in ("training.update", "training"))
    assert moved > 3 * stage
    light = fit_log(context, run_on(context, {"training": 0.6}), prior=PRIOR)
    moved, stage = (abs(np.log(told(light, n).value / told(light, n).shipped)) for n in ("training.update", "training"))
    assert stage > moved


@pytest.mark.slow
def test_lengths_that_vary_tell_fixed_seconds_from_a_factor(context: Context) -> None:
    """The same mean miss: proportional, or of fixed seconds; only lengths that vary show which."""
    truth, heavy = {"training.update": 20.0}, on_cluster(context, {}, {"training.update": 10.0})
    found = fit_log(heavy, run_on(heavy, {}, steps=40, spread=0.2, constants=truth), prior=PRIOR)
    alike = fit_log(heavy, run_on(heavy, {}, steps=40, spread=0.0, constants=truth), prior=PRIOR)
    assert told(found, "training.update").share > told(alike, "training.update").share
    near, far = (abs(np.log(told(each, "training.update").value / 20.0)) for each in (found, alike))
    assert near < far


def test_stages_that_the_log_lacks_stay_as_shipped(context: Context) -> None:
    log = run_on(context, HERE)
    part = StepLog.of(log.rl_step, framework="verl", source="x", training_s=log.training_s)
    found = fit_log(context, part, prior=PRIOR)
    assert told(found, "training").value > 1.1
    for stage in ("rollout", "scoring", "weight_sync", "rest"):
        assert told(found, stage).value == pytest.approx(1.0)
        assert told(found, stage).share == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(SpecError, match="neither a stage nor the rl_step"):
        fit_log(context, StepLog.of([1, 2, 3], response_tokens=[1.0, 1.0, 1.0]))


def test_a_log_of_whole_rl_steps_moves_the_stages_by_their_share(context: Context) -> None:
    """TRL states no stage: all are asked, those that take long most."""
    log = run_on(context, dict.fromkeys(STAGES, 1.3))
    found = fit_log(context, StepLog.of(log.rl_step, framework="trl", source="x", rl_step_s=log.rl_step_s), prior=PRIOR)
    assert found.after[WHOLE] < 0.6 * found.before[WHOLE]
    seconds = evaluate_job(context)[0].seconds
    by_size = sorted(("rollout", "scoring", "training"), key=lambda stage: getattr(seconds, f"{stage}_s").mean())
    assert sorted(by_size, key=lambda stage: told(found, stage).value) == by_size


def test_a_rollout_that_holds_the_weight_sync_is_compared_with_both(context: Context) -> None:
    log = run_on(context, {}, noise=0.0)
    evaluation = evaluate_job(context)[0]
    engine = log.rollout_s + log.weight_sync_s + float(evaluation.seconds.offload_s.mean())
    held = StepLog.of(log.rl_step, framework="verl", source="x", rollout_s=engine, training_s=log.training_s)
    found = fit_log(context, held, prior=PRIOR)
    assert any("taken to hold it" in note for note in found.notes)
    assert max(found.before.values()) < 0.01
    assert told(found, "rollout").value == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
def test_what_no_cluster_explains_is_said(context: Context) -> None:
    log = run_on(context, {"training": 10.0})
    found = fit_log(context, log, prior=PRIOR)
    assert any(note.startswith("training is") and "another reason" in note for note in found.notes)
    assert "another reason" in calibration_text(found)
    # and other configurations keep what is shipped for that stage
    assert told(found, "training").value == pytest.approx(1.0, abs=0.02)
    assert told(found, "training.update").value == pytest.approx(told(found, "training.update").shipped, rel=0.02)
    single = StepLog.of([1], framework="verl", source="x", rl_step_s=[100.0])
    assert any("three are wanted" in note for note in fit_log(context, single).notes)


def test_a_second_log_starts_where_the_first_ended(context: Context, fit: LogFit) -> None:
    again = replace(context, trainers=(replace(context.trainers[0], framework=fit.calibration),))
    second = fit_log(again, run_on(context, HERE, seed=3), prior=PRIOR)
    assert all(second.before[name] <= fit.after[name] + 0.05 for name in second.before)
    for stage in STAGES:
        assert told(second, stage).shipped == pytest.approx(told(fit, stage).value)
        assert told(second, stage).value == pytest.approx(getattr(second.calibration.factors, stage))


@pytest.mark.slow
def test_the_file_is_found_by_later_predictions(tmp_path: Path, context: Context) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    log = run_on(context, HERE, steps=6)
    metrics = {
        "timing_s/gen": log.rollout_s,
        "timing_s/old_log_prob": log.scoring_s,
        "timing_s/update_actor": log.training_s,
        "timing_s/update_weights": log.weight_sync_s,
        "timing_s/step": log.rl_step_s,
        "response_length/mean": log.response_tokens,
    }
    rows = [{"step": k, "data": {name: float(values[k]) for name, values in metrics.items()}} for k in range(log.n)]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["calibrate", "logs", str(tmp_path / "run.jsonl"), "--job", str(tmp_path / "job.yaml")]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {each["name"] for each in report["factors"]} == set(STAGES)
    assert set(report["spread"]) == {*STAGES, WHOLE}
    found = load_framework_calibration("verl==0.9", "fsdp2", tmp_path)
    assert found.id == "verl_fsdp_fitted"
    assert own_calibrations(tmp_path)[found.id] == tmp_path / "calibrations" / "frameworks" / "verl_fsdp.yaml"
    assert found.stage_spread.whole
    shipped, fitted = (resolve(Job.model_validate(JOB), folder=folder) for folder in (None, tmp_path))
    before, after = (evaluate_job(each)[0].seconds for each in (shipped, fitted))
    for stage in ("rollout_s", "scoring_s", "weight_sync_s"):
        measured, *predicted = (float(getattr(each, stage).mean()) for each in (log, before, after))
        assert abs(predicted[1] / measured - 1.0) < abs(predicted[0] / measured - 1.0), stage
    assert constant(fitted.trainers[0].framework, "step") > constant(shipped.trainers[0].framework, "step")
    # asked again the log is laid on what was shipped, as the first time: its rl_steps count once
    told_people = CliRunner().invoke(app, arguments)
    assert "left for other configurations" in told_people.output
    assert "as shipped" in told_people.output
    assert load_framework_calibration("verl==0.9", "fsdp2", tmp_path) == found


@pytest.mark.slow
def test_a_log_given_twice_tells_the_same_beside_a_trainer_that_it_did_not_tell(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, "trainer_backends": ["megatron", "fsdp2"]}))
    rows = [{"step": k, "data": {"timing_s/step": 40.0 + k}} for k in range(4)]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told_once, file = calibrate_logs(tmp_path / "run.jsonl", tmp_path / "job.yaml")
    assert file is not None
    before = file.read_text()
    told_twice, _ = calibrate_logs(tmp_path / "run.jsonl", tmp_path / "job.yaml")
    assert told_once.start == told_twice.start == "as shipped"
    assert file.read_text() == before and [each.name for each in file.parent.iterdir()] == ["verl_fsdp.yaml"]


@pytest.mark.slow
def test_a_log_that_tells_nothing_writes_no_file(tmp_path: Path) -> None:
    """rl_steps of two hours are no cluster's: a file would hold nothing but that the log was read."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    rows = [{"step": k, "data": {"timing_s/step": 7200.0 + k}} for k in range(4)]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = str(tmp_path / "job.yaml")
    said = CliRunner().invoke(app, ["calibrate", "logs", str(tmp_path / "run.jsonl"), "--job", job])
    assert said.exit_code == 0 and "no file is written" in said.stdout
    assert not (tmp_path / "calibrations").exists()


@pytest.mark.slow
def test_a_log_among_several_is_not_counted_again(context: Context, fit: LogFit) -> None:
    first, other = run_on(context, HERE), run_on(context, HERE, seed=3)

    def on_top(found: LogFit) -> Context:
        return replace(context, trainers=(replace(context.trainers[0], framework=found.calibration),))

    second = fit_log(on_top(fit), other, prior=PRIOR)
    assert (fit.start, second.start) == ("as shipped", "after 1 earlier log")
    assert "after 1 earlier log" in calibration_text(second)
    assert "as shipped" not in calibration_text(second)
    for log in (first, replace(other, source="a copy of it")):
        with pytest.raises(SpecError, match=r"told by this log already, and by 1 other \("):
            fit_log(on_top(second), log, prior=PRIOR)
    third = fit_log(on_top(second), run_on(context, HERE, seed=4), prior=PRIOR)
    with pytest.raises(SpecError, match=r"and by 2 others \("):
        fit_log(on_top(third), first, prior=PRIOR)


@pytest.mark.slow
def test_verdicts_and_fits_read_the_folder_of_a_configuration(tmp_path: Path) -> None:
    keys = {
        "actor_rollout_ref.model.path": "nobody/knows-this", "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 8192, "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.actor.fsdp_config.strategy": "fsdp2", "data.train_batch_size": 32,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32, "actor_rollout_ref.rollout.n": 8,
        "data.max_prompt_length": 1024, "data.max_response_length": 2048, "trainer.n_gpus_per_node": 8,
        "actor_rollout_ref.actor.strategy": "fsdp2", "algorithm.adv_estimator": "grpo",
    }  # fmt: skip
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo " + " ".join(f"{key}={value}" for key, value in keys.items()) + "\n"
    )

    def seconds() -> float:
        found = audit_config(tmp_path / "run.sh", cluster="dgx_h100", architecture="Qwen2.5-7B", plan=False)
        assert found.predicted is not None, found.notes
        return found.predicted.rl_step_s

    before = seconds()
    rows = [{"step": k, "data": {"timing_s/step": 1.2 * before + 0.1 * k}} for k in range(4)]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"job": tmp_path / "run.sh", "cluster": "dgx_h100"}
    with pytest.raises(SpecError, match="knows-this"):
        calibrate_logs(tmp_path / "run.jsonl", **arguments)  # type: ignore[arg-type]
    fit, file = calibrate_logs(tmp_path / "run.jsonl", architecture="Qwen2.5-7B", **arguments)  # type: ignore[arg-type]
    assert file is not None and file.parent == tmp_path / "calibrations" / "frameworks"
    assert 1.02 * before < seconds() < 1.2 * before
    assert fit.start == "as shipped"

    def cautions(log: str) -> str:
        given = {"cluster": "dgx_h100", "architecture": "Qwen2.5-7B", "plan": False}
        verdict = verdict_of(audit_config(tmp_path / "run.sh", log=tmp_path / log, **given))  # type: ignore[arg-type]
        assert verdict is not None
        return " ".join(verdict.cautions)

    (tmp_path / "next.jsonl").write_text((tmp_path / "run.jsonl").read_text().replace('"step": 3', '"step": 4'))
    assert "that this log told, so that it is near by that alone" in cautions("run.jsonl")
    assert "that logs of this cluster told" in cautions("next.jsonl")
    file.unlink()
    assert "told" not in cautions("run.jsonl")


# -- the model --------------------------------------------------------------------------------------------------------


def test_the_posterior_of_a_linear_stage_is_normal_conditioning() -> None:
    """One stage, no constant: mean and variance by hand."""

    def simulate(constants: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, np.ndarray]:
        found = {stage: np.full(4, 10.0 * factors[stage]) for stage in STAGES}
        return found | {WHOLE: np.full(4, 10.0 * sum(factors.values()))}

    seconds = 10.0 * np.exp(np.array([0.25, 0.15, 0.2, 0.2]))
    found = posterior(simulate, {"training": seconds}, {}, PRIOR)
    at = STAGES.index("training")
    noise = np.sqrt((2 * 0.05**2 + 4 * 0.00125) / 5)
    behind = 0.1**2 + noise**2 / 4
    assert found.noise["training"] == pytest.approx(noise)
    assert found.mean[at] == pytest.approx(0.2 * 0.3**2 / (0.3**2 + behind))
    assert found.covariance[at, at] == pytest.approx(1 / (1 / 0.3**2 + 1 / behind))
    within = dict.fromkeys(STAGES, 0.1)
    assert found.sigma("training", within) == pytest.approx(np.sqrt(found.covariance[at, at] + 0.1**2))


@pytest.mark.slow
def test_spreads_of_groups_are_found_again() -> None:
    """Two hundred groups of three configurations that state a stage each way."""
    random = np.random.default_rng(0)
    between, within = {"rollout": 0.1, "training": 0.4}, {"rollout": 0.3, "training": 0.05}
    slopes = np.zeros((2, len(CONSTANTS) + len(STAGES)))
    rows = []
    for k, stage in enumerate(between):
        slopes[k, len(CONSTANTS) + STAGES.index(stage)] = 1.0
    for group in range(200):
        shared = [between[stage] * random.standard_normal() for stage in between]
        for _ in range(3):
            misses = [a + within[s] * random.standard_normal() for a, s in zip(shared, within, strict=True)]
            rows.append(Evidence(str(group), np.zeros(len(CONSTANTS)), slopes, np.array(misses), tuple(between)))
    found = log_prior(rows)
    for stage, noise in (("rollout", 0.1), ("training", 0.04)):
        prior = getattr(found, stage)
        assert prior.between == pytest.approx(between[stage], rel=0.3)
        assert np.hypot(prior.within, noise) == pytest.approx(np.hypot(within[stage], 0.0), rel=0.15)
        assert (prior.rows, prior.groups) == (600, 200)
    assert found.scoring.rows == 0


def test_constants_of_clusters_differ_by_less_than_their_files_say() -> None:
    """Host times stated within a half that differ by a tenth: a log of one configuration moves others by that tenth."""
    random, engine = np.random.default_rng(0), list(CONSTANTS).index("engine_host")
    widths, slopes = np.zeros(len(CONSTANTS)), np.zeros((1, len(CONSTANTS) + len(STAGES)))
    widths[engine], slopes[0, engine], slopes[0, len(CONSTANTS)] = 0.5, 1.0, 0.05
    rows = []
    for group in range(40):
        shared = 0.1 * random.standard_normal()
        misses = [shared + 0.1 * random.standard_normal() for _ in range(3)]  # the second is an rl_step's noise
        rows += [Evidence(str(group), widths, slopes, np.array([miss]), ("rollout",)) for miss in misses]
    found = log_prior(rows).rollout
    assert found.constants == pytest.approx(0.2, rel=0.25)
    framework = load_framework_calibration("verl_fsdp")
    prior = PRIOR.model_copy(update={"rollout": found})
    assert prior_widths(framework, prior)["engine_host"] == found.constants * prior_widths(framework)["engine_host"]


def test_a_written_calibration_leaves_out_how_its_job_cut_microbatches(tmp_path: Path) -> None:
    """Later jobs say by themselves whether they count sequences; a file that says it is refused."""
    counting = {"role": "trainer", "layout": {"microbatch": 2}, "settings": {"packing": True}}
    counted = resolve(Job.model_validate({**JOB, "pools": [counting]}))
    assert counted.trainers[0].framework.training.batching == "count"
    file = tmp_path / "calibrations" / "frameworks" / "verl_fsdp.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(calibration_text(fit_log(counted, run_on(counted, HERE), prior=PRIOR)))
    assert resolve(Job.model_validate(JOB), folder=tmp_path).trainers[0].framework.training.batching == "rank"
    again = resolve(counted.job, folder=tmp_path).trainers[0].framework
    assert again.training.batching == "count" and again.id.endswith("_fitted")


def test_a_written_calibration_predicts_as_the_fit_did(context: Context, tmp_path: Path) -> None:
    """Its file stated every switch that the framework leaves to its trainer: training got faster where told slower."""
    found = fit_log(context, run_on(context, HERE), prior=PRIOR)
    file = tmp_path / "calibrations" / "frameworks" / "verl_fsdp.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(calibration_text(found))
    first = context.trainers[0]
    read = resolve(Job.model_validate(JOB), folder=tmp_path)
    assert read.trainers[0].calibration.switches == first.calibration.switches
    meant = replace(context, trainers=(replace(first, framework=found.calibration),))
    stages = [evaluate_job(each)[0].seconds for each in (read, meant)]
    for stage in ("rollout_s", "scoring_s", "training_s"):
        assert getattr(stages[0], stage).mean() == pytest.approx(getattr(stages[1], stage).mean(), rel=1e-4)
