"""Predictions explained: the graph gives the planner's step time back, and what-ifs are the rollout simulated again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from rlperf import explaining
from rlperf.api import Question, ask
from rlperf.cli.explain import _print, explain
from rlperf.diagnose import graph as g
from rlperf.diagnose.advice import Advice
from rlperf.diagnose.explain import Cause, Explanation, Interaction
from rlperf.diagnose.predicted import PredictedSteps, explain_prediction
from rlperf.diagnose.sources import scaled_job, steps_of_job, steps_of_plan
from rlperf.errors import SpecError
from rlperf.explaining import able_here
from rlperf.frameworks.adapter import framework_facts
from rlperf.plan.answer.phases import phases_of
from rlperf.plan.answer.plan import Phase, Plan
from rlperf.plan.predict import evaluate_job, predict_job
from rlperf.plan.question.pool import BatchSettings
from rlperf.sim.rollout import simulate_rollout
from rlperf.specs.pool import PoolSpec
from rlperf.specs.profiles import load_device

JOB = """
name: small
architecture: Qwen3-8B
cluster: dgx_h100
nodes: {nodes}
framework: {framework}
tasks:
  - name: math
    workload: math
    prompts_per_step: 16
    group_size: 8
    max_prompt_tokens: 1024
    max_response_tokens: 4096
modes: [{mode}]
limits: {{staleness: {staleness}}}
trainer_backends: [fsdp2]
pools:
  - {{role: rollout, devices: {rollout}, layout: {{tensor_parallel: 1}}}}
  - {{role: trainer, devices: {trainer}, layout: {{zero_stage: 3, tensor_parallel: 1, pipeline_parallel: 1}}}}
"""


def question(folder: Path, mode: str = "colocated", nodes: int = 1) -> tuple[Question, Path]:
    half = 8 * nodes // (1 if mode == "colocated" else 2)
    path = folder / f"{mode}.yaml"
    stale = int(mode in ("one_step_off", "async"))
    framework = "nemo_rl" if mode == "disaggregated" else "verl==0.9.1"
    values = {"mode": mode, "nodes": nodes, "rollout": half, "trainer": half, "staleness": stale}
    path.write_text(JOB.format(framework=framework, **values))
    return ask(path), path


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Question, Path]:
    return question(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def steps(colocated: tuple[Question, Path]) -> PredictedSteps:
    return steps_of_job(colocated[0].context, colocated[0].facts)[0]


@pytest.mark.parametrize("mode", ["colocated", "disaggregated", "one_step_off"])
def test_the_graph_takes_as_long_as_the_prediction(tmp_path: Path, mode: str) -> None:
    asked, _ = question(tmp_path, mode)
    evaluation, _ = evaluate_job(asked.context, asked.facts)
    assert evaluation.configuration.mode == mode
    graph = PredictedSteps.of(evaluation).graph()
    assert graph.rl_step_s() == pytest.approx(evaluation.rl_step_s, rel=1e-9)
    assert graph.devices == 8


@pytest.mark.parametrize(("workload", "told"), [("tool_use", True), ("math", False)])
def test_where_the_bound_on_staleness_sets_the_pace_it_is_said(workload: str, told: bool, tmp_path: Path) -> None:
    """The trainer's losses read as if an rl_step kept all of them: of two batches under way it keeps less than half,
    since engines are slower with more under way."""
    path = tmp_path / "job.yaml"
    values = {"mode": "async", "nodes": 1, "rollout": 4, "trainer": 4, "staleness": 1}
    path.write_text(JOB.format(framework="verl==0.9.1", **values).replace("workload: math", f"workload: {workload}"))
    _, notes = steps_of_job(*ask(path).pair)
    assert (
        any("of a second less in scoring, training or weight sync an rl_step keeps 0.4 s" in n for n in notes) is told
    )


def test_losses_of_the_rollout_are_simulated_again(steps: PredictedSteps) -> None:
    found = explain_prediction(steps)
    tail = next(c for c in found.causes if c.kind == "tail")
    assert tail.method == "simulation"
    makespans = []
    for served, old in zip(steps.trajectories, steps.results, strict=True):
        tokens = np.minimum(served.response_tokens, np.round(served.response_tokens.mean() * 1.0))
        mean = served.response_tokens.mean()
        factor = np.minimum(mean / served.response_tokens, 1.0)
        tokens = np.maximum(np.round(served.response_tokens * factor), 1).astype(np.int64)
        again = simulate_rollout(
            replace(served, response_tokens=tokens), len(old.timelines), cost=steps.replicas.cost,
            limits=steps.replicas.limits, devices_per_replica=int(old.devices[0]),
        )  # fmt: skip
        makespans.append(old.makespan_s - again.makespan_s)
    assert tail.loss_s == pytest.approx(float(np.mean(makespans)), rel=1e-9)
    carried = next(a for a in tail.advice if a.knob == "partial_rollout")
    assert carried.predicted_by == "simulation"
    assert carried.gain_s is not None
    assert carried.gain_s > 0.0


def test_partial_rollouts_gain_what_a_job_with_them_gains(tmp_path: Path) -> None:
    """The slowest twentieth counted as absent: 25 s of an rl_step of which `--what-if` said 3 min 33 s."""
    path = tmp_path / "job.yaml"
    text = JOB.format(framework="slime", mode="colocated", nodes=1, rollout=8, trainer=8, staleness=1)
    path.write_text(text.replace("[fsdp2]", "[megatron]").replace("zero_stage: 3", "zero_stage: 1"))
    asked = ask(path)
    found = explain_prediction(steps_of_job(asked.context, asked.facts)[0])
    tail = next(cause for cause in found.causes if cause.kind == "tail")
    carried = next(each for each in tail.advice if each.knob == "partial_rollout")
    path.write_text(path.read_text().replace("prompts_per_step: 16", "prompts_per_step: 16\n    over_provision: 2.0"))
    partial = ask(path)
    gained = found.rl_step_s - evaluate_job(partial.context, partial.facts)[0].rl_step_s
    assert carried.gain_s == pytest.approx(gained, rel=0.1)
    skipped = explain_prediction(steps_of_job(asked.context, asked.facts)[0], able={"partial_rollout": False})
    assert not any(a.knob == "partial_rollout" for cause in skipped.causes for a in cause.advice)


def test_stages_of_a_prediction_are_exact_on_the_graph(steps: PredictedSteps) -> None:
    graph = steps.graph()
    free = replace(steps, weight_sync_s=np.zeros_like(steps.weight_sync_s))
    change = g.Change(np.where(graph.activity == g.WEIGHT_SYNC, 0.0, 1.0))
    assert graph.what_if_s(change) == pytest.approx(free.graph().rl_step_s(), rel=1e-12)


def test_an_asynchronous_prediction_is_explained(tmp_path: Path) -> None:
    asked, _ = question(tmp_path, "async")
    steps, _ = steps_of_job(asked.context, asked.facts)
    graph = steps.graph()
    assert graph.rl_step_s() >= steps.steady_s.mean()
    assert not (graph.activity == g.DECODE).any()
    assert explain_prediction(steps).causes is not None


def test_a_sync_beside_which_engines_go_on_is_counted_once(tmp_path: Path) -> None:
    """NeMo-RL's engines take weights in flight: they stand still for the swap, and explain says the plan's rl_step."""
    path = tmp_path / "job.yaml"
    path.write_text(
        JOB.format(framework="nemo_rl", mode="async", nodes=1, rollout=2, trainer=6, staleness=4).replace(
            "s_per_step: 16", "s_per_step: 96"
        )
    )
    asked = ask(path)
    evaluation, _ = evaluate_job(asked.context, asked.facts)
    steps = PredictedSteps.of(evaluation)
    assert (steps.steady_s < evaluation.rollout.steady_s).all()
    assert steps.graph().rl_step_s() == pytest.approx(evaluation.rl_step_s, rel=1e-9)


def test_one_step_off_in_flight_takes_what_its_prediction_says(tmp_path: Path) -> None:
    """Its batches flow into each other in NeMo-RL: both met at every sync, 205 s for the plan's 187."""
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(framework="nemo_rl", mode="one_step_off", nodes=1, rollout=4, trainer=4, staleness=1))
    asked = ask(path)
    evaluation, _ = evaluate_job(asked.context, asked.facts)
    assert evaluation.framework.in_flight_updates
    graph = PredictedSteps.of(evaluation).graph()
    assert graph.rl_step_s() == pytest.approx(evaluation.rl_step_s, rel=1e-9)


def test_a_mode_that_runs_ahead_is_not_advised_to_do_so(tmp_path: Path) -> None:
    asked, _ = question(tmp_path, "one_step_off")
    found = explain_prediction(steps_of_job(asked.context, asked.facts)[0], floor=0.0)
    actions = [each.action for cause in found.causes if cause.kind == "tail" for each in cause.advice]
    assert any("asynchronous" in action for action in actions)
    assert not any("one step off" in action for action in actions)
    assert not any(each.knob == "colocate" for cause in found.causes for each in cause.advice)


def test_degrees_that_a_layout_has_are_advised_on(steps: PredictedSteps) -> None:
    """FSDP alone was told to keep tensor_parallel inside a node, and to take less pipeline and context parallelism."""

    def advised(**layout: tuple[str, ...]) -> dict[str, str]:
        found = explain_prediction(replace(steps, **layout), floor=0.0)  # type: ignore[arg-type]
        (cause,) = (each for each in found.causes if each.kind == "exposed_communication")
        return {each.knob: each.action for each in cause.advice}

    assert steps.degrees == () and advised().keys() == {"overlap"}
    both = advised(degrees=("tensor_parallel", "context_parallel"))
    assert both["tensor_parallel"] == "less tensor_parallel or context_parallel"
    assert "ulysses" in advised(degrees=("ulysses",))


def test_a_plan_is_explained_like_its_job(colocated: tuple[Question, Path], steps: PredictedSteps) -> None:
    asked, _ = colocated
    evaluation, _ = evaluate_job(asked.context, asked.facts)
    batch, chosen = evaluation.configuration.batch, evaluation.configuration
    settings = BatchSettings(
        prompts_per_step=batch.prompts, group_size=batch.group_size, mini_batch=batch.mini_batch,
        max_prompt_tokens=batch.max_prompt_tokens, max_response_tokens=batch.max_response_tokens,
    )  # fmt: skip
    phase = Phase(
        tasks=("math",), rl_steps=(0, 0), mode="colocated", settings=settings, pools=chosen.pools,
        predicted=predict_job(asked.context, facts=asked.facts),
    )  # fmt: skip
    plan = Plan(
        job=asked.job, status="optimal", objective=1.0, bound=1.0, mip_gap=0.0, candidates=1, rejected={},
        screen_regret=0.0, phases=(phase,),
    )  # fmt: skip
    found, notes = steps_of_plan(plan, ask(plan.job).context)
    assert notes == ()
    longer = phase.model_copy(update={"tasks": ("code",), "rl_steps": (0, 9)})
    tasks = (*plan.job.tasks, plan.job.tasks[0].model_copy(update={"name": "code"}))
    both = plan.model_copy(update={"job": plan.job.model_copy(update={"tasks": tasks}), "phases": (phase, longer)})
    assert [each.tasks for each in phases_of(both, "math")] == [("math",)], "explain took no notice of --task"
    with pytest.raises(SpecError, match="the job has no task 'maths'"):
        explaining.explain(both, task="maths")
    assert found.graph().rl_step_s() == pytest.approx(steps.graph().rl_step_s(), rel=1e-12)
    wrong = phase.model_copy(update={"settings": settings.model_copy(update={"group_size": 3})})
    with pytest.raises(SpecError, match="none that its job allows"):
        steps_of_plan(plan.model_copy(update={"phases": (wrong,)}), ask(plan.job).context)


def test_a_job_at_another_scale(colocated: tuple[Question, Path]) -> None:
    asked, _ = colocated
    cluster = asked.context.cluster
    larger = scaled_job(asked.job, cluster, 32)
    assert larger.nodes == 4
    assert [pool.devices for pool in larger.pools] == [(32,), (32,)]
    with pytest.raises(SpecError, match="do not fill nodes"):
        scaled_job(asked.job, cluster, 12)


def test_the_command_explains_a_job_at_scales(colocated: tuple[Question, Path]) -> None:
    app = typer.Typer()
    app.command()(explain)
    result = CliRunner().invoke(app, [str(colocated[1]), "--scale", "8,16", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["scaling"]["devices"] == [8, 16]
    assert found["scaling"]["ideal_slope"] == -1.0
    assert found["scaling"]["rl_step_s"][0] > found["scaling"]["rl_step_s"][1]
    assert {"tail", "weight_sync"} <= {cause["kind"] for cause in found["causes"]}
    assert all(cause["nature"] == "structure" for cause in found["causes"])
    result = CliRunner().invoke(app, [str(colocated[1])])
    assert result.exit_code == 0, result.output
    assert "by design" in result.stdout


def test_times_are_said_as_every_other_command_says_them(capsys: pytest.CaptureFixture[str]) -> None:
    advice = (Advice("staleness", "train beside the tail", 146.1), Advice("partial_rollout", "carry over", 24.5))
    tail = Cause("tail", "structure", "rollout", 146.1, 146.1, 0.29, "waits", ("rollout: the last",), advice)
    found = Explanation(499.3, 4.99, (tail,), (("decode", 348.3),), (Interaction(("tail", "host"), 150.0, 9.0),))
    _print(found, None)
    said = " ".join(capsys.readouterr().out.split())
    for time in ("rl_step 8 min 19 s", "below 4.99 s", "decode 5 min 48 s", "at most 2 min 26 s", "at most 24.5 s",
                 "together 2 min 30 s"):  # fmt: skip
        assert time in said, said


def test_advice_is_for_those_who_can_follow_it(colocated: tuple[Question, Path], steps: PredictedSteps) -> None:
    """Partial rollouts were advised to verl, which has no key for them, and fp8 caches where nothing reads them."""
    asked = colocated[0]
    every = {"partial_rollout", "kv_dtype", "colocate", "split", "staleness", "routing"}

    def left(question: Question) -> set[str]:
        return {knob for knob in every if able_here(question).get(knob, True)}

    assert left(asked) == every - {"partial_rollout"}  # verl
    assert "partial_rollout" in left(replace(asked, facts=framework_facts("slime")))
    old = replace(asked.context.rollout_hardware, device=load_device("ascend_910b"))
    assert "kv_dtype" not in left(replace(asked, context=replace(asked.context, rollout_hardware=old)))
    own = asked.job.model_copy(update={"pools": (PoolSpec(role="rollout", cluster="hgx_h20"),)})
    assert not {"colocate", "split"} & left(replace(asked, context=replace(asked.context, job=own)))

    def advised(able: dict[str, bool]) -> set[str]:
        return {each.knob for cause in explain_prediction(steps, able=able).causes for each in cause.advice}

    assert advised({}) and not advised(dict.fromkeys(advised({}), False))
