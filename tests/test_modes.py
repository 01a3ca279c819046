"""Execution modes as data: all six are planned, predicted, explained and exported; a seventh is one row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlperf.api import ask, judge, plan_job
from rlperf.diagnose.predicted import PredictedSteps, explain_prediction
from rlperf.errors import SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.export import write_plan
from rlperf.frameworks.imports import import_config
from rlperf.plan.judge.timeline import execution_in, stages_of, steady_state, step_view
from rlperf.sim.rl_step.compose import compose_rl_step
from rlperf.sim.rl_step.modes import Execution, step_seconds
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rollout.tail import last_of_groups
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES, Form, ModeTraits, mode_codes, mode_traits

from .recipes import recipe

SMALL: dict[str, object] = {
    "name": "small",
    "architecture": "Qwen3-0.6B",
    "cluster": "dgx_h100",
    "tasks": [
        {
            "name": "math", "workload": "math", "prompts_per_step": 128, "group_size": 4, "mini_batch": 32,
            "max_prompt_tokens": 512, "max_response_tokens": 1024,
        }
    ],
    "limits": {"staleness": 3},
    "pools": [
        {"role": "rollout", "devices": 4, "layout": {"tensor_parallel": [1, 2]}},
        {"role": "trainer", "devices": 4, "layout": {"tensor_parallel": [1, 2], "context_parallel": 1}},
    ],
}  # fmt: skip
HAVE = (
    ("colocated", "verl"), ("disaggregated", "nemo_rl"), ("one_step_off", "slime"), ("k_step_off", "nemo_rl"),
    ("k_step_off", "openrlhf"), ("async", "areal"), ("async", "slime"), ("streaming", "verl"), ("streaming", "nemo_rl"),
)  # fmt: skip
KEYS = {
    ("k_step_off", "nemo_rl"): "max_trajectory_age_steps: 3",
    ("k_step_off", "openrlhf"): "--train.async_queue_size 3",
    ("async", "areal"): "max_head_offpolicyness: 3",
    ("async", "slime"): "--rollout-function-path slime.rollout.fully_async_rollout",
    ("streaming", "verl"): "staleness_threshold: 0.0",
    ("streaming", "nemo_rl"): "min_groups_for_streaming_train: 32",
}
"""What the exported files of a mode and framework must say."""


def job(mode: str, framework: str = "verl", **changes: object) -> Job:
    return Job.model_validate({**SMALL, "modes": [mode], "framework": framework, **changes})


@pytest.mark.parametrize(("mode", "framework"), HAVE)
def test_every_mode_is_planned_predicted_drawn_and_exported(mode: str, framework: str, tmp_path: Path) -> None:
    plan = plan_job(job(mode, framework))
    phase = plan.phases[0]
    bounded = mode != "async" or framework != "slime"  # whose files bound nothing: planned as they read back
    assert (phase.mode, phase.staleness) == (mode, MODES[mode].staleness(3 if bounded else 1))
    _, evaluation, prediction = judge(plan)
    assert prediction.rl_step_s == pytest.approx(phase.predicted.rl_step_s, rel=1e-9)
    view = step_view(evaluation)
    assert view.timeline.rl_step_s == pytest.approx(float(evaluation.seconds.rl_step_s[0]), rel=1e-6)
    assert (len(view.timeline.pools) == 1) == MODES[mode].shares_devices
    assert (steady_state(evaluation, 3) is not None) == MODES[mode].runs_ahead
    assert explain_prediction(PredictedSteps.of(evaluation)).causes
    files = [path for path in write_plan(plan, framework, tmp_path) if path.suffix in (".yaml", ".sh")]
    text = "\n".join(path.read_text() for path in files)
    assert KEYS.get((mode, framework), "") in text
    config = next(path for path in files if framework not in ("verl", "nemo_rl", "areal") or path.suffix == ".yaml")
    read = import_config([config], framework).run
    assert (read.mode, read.staleness) == (mode, phase.staleness)


@pytest.mark.parametrize("staleness", [2, 4, 16])
@pytest.mark.parametrize("framework", ["nemo_rl", "areal"])
def test_events_agree_with_the_closed_form_where_lengths_are_mixed(framework: str, staleness: int) -> None:
    """Few prompts with long tails on several replicas, from latency (2) to full engines (16).

    The events draw from all judged rl_steps, not from one of 32 prompts whose mean is 13 % off, let engines hold what
    they can and recompute interrupted requests in full budgets: 8 to 17 % apart before.
    """
    task = {**SMALL["tasks"][0], "prompts_per_step": 32, "mini_batch": 32, "max_response_tokens": 16384}  # type: ignore[index]
    mode = "k_step_off" if framework == "nemo_rl" else "async"
    asked = job(mode, framework, tasks=[task], limits={"staleness": staleness}, nodes=1)
    _, evaluation, _ = judge(asked)
    found = steady_state(evaluation, rl_steps=200)  # of 50 draws the mean scatters by 2 %
    assert found is not None
    assert found.period_s == pytest.approx(evaluation.rl_step_s, rel=0.06 if staleness == 2 else 0.02)


def test_a_rollout_that_engines_drain_is_told_with_its_tail() -> None:
    """Its log times it so: 32B of OpenRLHF two batches ahead had 6 min 39 s, beside 15 s of sync in 7 min 36 s."""
    evaluations = {name: judge(job("k_step_off", name, limits={"staleness": 2}))[1] for name in ("openrlhf", "nemo_rl")}
    drained, flowing = evaluations["openrlhf"], evaluations["nemo_rl"]
    longer = drained.rollout.makespan_s > 1.01 * drained.rollout.steady_s
    assert longer.all() and not drained.framework.in_flight_updates and flowing.framework.in_flight_updates
    assert drained.seconds.rollout_s == pytest.approx(drained.rollout.makespan_s, rel=1e-9)
    assert flowing.seconds.rollout_s == pytest.approx(flowing.rollout.steady_s)


@pytest.mark.slow
def test_tools_of_agents_are_in_events_and_what_the_trainer_waits_for_on_the_graph() -> None:
    """Tools write 2.3 tokens for each generated one, which engines read and keep: 208 s without, 320 s with.

    Closed forms are where docs/theory/rollout.md has them for agents that run ahead.
    """
    task = {"name": "swe", "workload": "software_engineering", "prompts_per_step": 32, "group_size": 8,
            "mini_batch": 16, "max_prompt_tokens": 8192, "max_response_tokens": 16384, "reward_s": "30 s"}  # fmt: skip
    _, evaluation, _ = judge(job("async", "verl", tasks=[task], limits={"staleness": 2}, nodes=2))
    found, graph = steady_state(evaluation), PredictedSteps.of(evaluation).graph()
    assert found is not None
    assert found.period_s > 260.0
    assert 0.80 < evaluation.rl_step_s / found.period_s < 1.10
    assert graph.rl_step_s() == pytest.approx(evaluation.rl_step_s, rel=2e-3)


def test_streaming_is_explained_as_predicted() -> None:
    for framework in ("verl", "nemo_rl"):
        _, evaluation, _ = judge(job("streaming", framework))
        graph = PredictedSteps.of(evaluation).graph()
        assert graph.rl_step_s() == pytest.approx(evaluation.rl_step_s, rel=1e-9)
        serial = evaluation.seconds
        in_turn = sum(
            getattr(serial, f"{name}_s").mean()
            for name in ("rollout", "reward", "scoring", "training", "weight_sync", "data_movement", "other")
        )
        assert evaluation.rl_step_s < in_turn
        # with the groups' own ends, as the engine's events have them
        ends = last_of_groups(evaluation.served[0].group, evaluation.rollouts[0].finish_s)[0]
        stages = replace(stages_of(evaluation), group_finish_s=ends)
        assert compose_rl_step(execution_in(evaluation), stages).rl_step_s == pytest.approx(
            float(evaluation.seconds.rl_step_s[0]), rel=0.06
        )


def test_a_mode_that_a_framework_lacks_is_refused_by_name() -> None:
    with pytest.raises(
        SpecError, match=r"areal main has no mode k_step_off.*instead of k_step_off it has async"
    ) as told:
        ask(job("k_step_off", "areal"))
    assert "it runs colocated, disaggregated, one_step_off, async" in str(told.value)
    with pytest.raises(SpecError, match=r"trl 1.16 has no mode async.*instead of async it has disaggregated"):
        ask(job("async", "trl", trainer_backends=["fsdp2"]))
    with pytest.raises(SpecError, match=r"verl 0.6 has no mode streaming.*it runs colocated"):
        ask(job("streaming", "verl==0.6"))
    with pytest.raises(ValueError, match="there is no execution mode 'k_steps_off'"):
        job("k_steps_off")
    with pytest.raises(SpecError, match="did you mean k_step_off"):
        mode_traits("k_steps_off")


def test_every_framework_says_of_every_mode_what_it_has() -> None:
    """Of a mode whose row says who has it, facts need no word."""
    said = {name for name, row in MODES.items() if not row.had_by}
    assert len(said) >= 6
    for framework in ("verl", "nemo_rl", "openrlhf", "slime", "areal", "trl"):
        facts = framework_facts(framework)
        given = {name for name, row in MODES.items() if framework in row.had_by}
        assert (set(facts.modes) | set(facts.instead)) - given == said
        assert not set(facts.modes) & set(facts.instead)
    for mode in said:
        assert any(mode in framework_facts(name).modes for name in ("verl", "nemo_rl"))


@pytest.mark.parametrize(("mode", "least"), [("one_step_off", 1), ("k_step_off", 1), ("async", 1), ("streaming", 0)])
def test_one_staleness_rule(mode: str, least: int) -> None:
    assert MODES[mode].least_staleness == least
    made = job(mode, limits={"staleness": least})
    assert made.modes == (mode,)
    if least:
        with pytest.raises(ValueError, match=f"modes: {mode} needs limits.staleness of at least {least}"):
            job(mode, limits={"staleness": least - 1})


READS = {
    "rollout_steady_s": lambda mode: mode.runs_ahead,
    "recompute_s": lambda mode: mode.runs_ahead,
    "rollout_group_s": lambda mode: mode.waits_for_groups,
    "offload_s": lambda mode: mode.shares_devices,
}
"""What a rollout column is compared by (`rlperf.plan.search.fronts`), beside its makespan: traits must say so."""


@given(
    st.sampled_from(list(MODES)),
    st.sampled_from(list(READS)),
    st.lists(st.floats(1.0, 100.0), min_size=8, max_size=8),
    st.floats(0.0, 50.0),
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1), st.integers(1, 8), st.integers(1, 3)),
)
def test_an_rl_step_reads_what_columns_are_compared_by(
    mode: str, name: str, seconds: list[float], more: float, how: tuple[int, int, int, int, int]
) -> None:
    rollout, steady, group, recompute, transition, training, sync, swap = seconds
    times = StageSeconds.of(
        rollout_s=rollout, rollout_steady_s=min(steady, rollout), rollout_group_s=min(group, rollout),
        recompute_s=recompute, offload_s=transition, training_s=training, weight_sync_s=sync, swap_s=swap,
    )  # fmt: skip
    *flags, chunks, staleness = how
    execution = Execution(mode, staleness, 1, *flags, chunks)
    before = float(step_seconds(execution, times))
    raised = replace(times, **{name: getattr(times, name) + more})
    if name in ("rollout_steady_s", "rollout_group_s"):
        raised = replace(raised, **{name: min(getattr(raised, name), rollout)})
    after = float(step_seconds(execution, raised))
    assert after >= before * (1 - 1e-12)
    if not READS[name](MODES[mode]):
        assert after == before
    # a longer rollout whose groups begin to end as early: 2 R_g - R stays
    longer = replace(times, rollout_s=rollout + more, rollout_group_s=min(group, rollout) + more / 2.0)
    assert float(step_seconds(execution, longer)) >= before * (1 - 1e-12)


@pytest.fixture
def two_steps_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModeTraits]:
    """The recipe of the documentation: one row in the table, which names the framework that has it."""
    row: ModeTraits = eval(recipe("rlperf/specs/modes.py"), {"ModeTraits": ModeTraits, "Form": Form})
    monkeypatch.setitem(MODES, row.name, row)
    framework_facts.cache_clear()
    yield row
    monkeypatch.undo()
    framework_facts.cache_clear()


def test_a_mode_is_added_by_a_row(two_steps_off: ModeTraits, tmp_path: Path) -> None:
    plan = plan_job(job("two_steps_off", "slime"))
    write_plan(plan, "slime", tmp_path)
    assert "mode two_steps_off (--its-flag)" in (tmp_path / "EXPORT.md").read_text()
    assert "NOT EXPRESSED: mode two_steps_off (--its-flag)" in (tmp_path / "config.sh").read_text()
    assert "train_async.py" in (tmp_path / "config.sh").read_text()
    phase = plan.phases[0]
    assert (phase.mode, phase.staleness) == ("two_steps_off", 2)
    _, evaluation, prediction = judge(plan)
    assert prediction.rl_step_s == pytest.approx(phase.predicted.rl_step_s, rel=1e-9)
    view = step_view(evaluation)
    assert view.timeline.rl_step_s == pytest.approx(float(evaluation.seconds.rl_step_s[0]), rel=1e-6)
    steady = steady_state(evaluation, 3)
    assert steady is not None
    assert not evaluation.framework.in_flight_updates
    # slime's own modes drain or are interrupted; this one takes weights in flight, as its row says
    times = StageSeconds.of(rollout_s=60.0, rollout_steady_s=40.0, training_s=10.0, weight_sync_s=8.0, swap_s=1.0)
    k_step, toy = step_seconds(Execution(["k_step_off", "two_steps_off"], staleness=2), times)
    assert (k_step, toy) == pytest.approx((40.0 + 20.0 + 8.0, 41.0))
    assert mode_codes(list(MODES)).tolist() == list(range(len(MODES)))
    with pytest.raises(SpecError, match="verl main has no mode two_steps_off"):
        ask(job("two_steps_off", "verl"))
    assert "two_steps_off" in Job.model_json_schema()["properties"]["modes"]["anyOf"][0].get("enum", [])


@pytest.mark.parametrize(
    ("mode", "framework"),
    [("colocated", "verl"), ("disaggregated", "nemo_rl"), ("streaming", "verl"), ("one_step_off", "slime"),
     ("async", "slime")],
)  # fmt: skip
def test_weights_in_flight_where_nothing_is_in_flight_are_told(mode: str, framework: str) -> None:
    """`in_flight_updates: true` of a job whose modes all wait for the weights was passed over without a word."""
    seconds = {}
    for flag in (False, True):
        asked = job(mode, framework, limits={"staleness": 1}, in_flight_updates=flag)
        seconds[flag] = judge(asked)[1].rl_step_s
        told = any("in_flight_updates changes nothing" in note for note in ask(asked).context.read_as)
        assert told is (flag and not MODES[mode].runs_ahead)
    assert MODES[mode].runs_ahead or seconds[True] == seconds[False]
