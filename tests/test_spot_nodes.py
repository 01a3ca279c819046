"""Spot nodes as a setting of a job: what the run costs with them, who can go on without one, and what files say."""

from __future__ import annotations

from typing import Any

import pytest

import rlperf
from rlperf.api import ask
from rlperf.errors import SpecError
from rlperf.frameworks.export import plan_texts
from rlperf.plan.answer.plan import RunTotals
from rlperf.report.plan_summary import run_words
from rlperf.sim.rl_step.spot import SpotFacts
from rlperf.sim.rl_step.whole_run import RunFacts, whole_run
from rlperf.specs.job import Job

ROLLOUT = {"pools": "rollout", "leaves": "4 h", "returns": "10 min", "price": "1 USD/h"}


def job(spot: dict[str, Any] | None, **changes: Any) -> Job:
    """Qwen3-8B on two nodes of H100 at 3 USD an hour, by slime with pools of their own."""
    run = {"rl_steps": 500, "checkpoint_every": 20, "checkpoint": "30 s", "recovery": "5 min", "spot": spot}
    task = {"name": "t", "workload": "math", "prompts_per_step": 64, "group_size": 8, "max_response_tokens": 8192}
    pools = [{"role": role, "devices": 8, "layout": {"tensor_parallel": 2}} for role in ("rollout", "trainer")]
    return Job.model_validate({
        "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "framework": "slime", "price": "3 USD/h",
        "modes": "disaggregated", "tasks": [task], "pools": pools, "run": run, **changes,
    })  # fmt: skip


def test_tasks_that_share_the_devices_state_no_spot_nodes() -> None:
    with pytest.raises(ValueError, match=r"run\.spot: tasks that share the devices"):
        job(ROLLOUT, sharing="devices")


def totals(asked: Job) -> RunTotals:
    found = rlperf.plan_job(asked).run
    assert found is not None
    return found


def test_a_rollout_on_spot_nodes_is_slower_and_cheaper_and_the_report_says_both() -> None:
    on_demand, spot = totals(job(None)), totals(job(ROLLOUT))
    assert spot.on_demand_s == pytest.approx(on_demand.total_s) and spot.on_demand_usd == pytest.approx(on_demand.usd)
    assert on_demand.on_demand_s is None and on_demand.departures == 0.0
    assert spot.total_s > on_demand.total_s and spot.failures == 0.0
    assert spot.usd == pytest.approx(spot.device_hours * 2.0)  # half of the devices at 1 USD, half at 3
    assert spot.departures == pytest.approx((spot.total_s - spot.start_up_s) / (4 * 3600.0))
    assert "spot nodes leave" in run_words(spot) and f"{spot.on_demand_usd:,.0f} USD" in run_words(spot)
    dear = totals(job({**ROLLOUT, "price": "3 USD/h"}))
    assert dear.usd is not None and on_demand.usd is not None and dear.usd > on_demand.usd


def test_engines_that_are_refilled_lose_what_leaves_of_all_that_they_do() -> None:
    """What a weight sync takes from them stood beside departures as if it were spare: departures cost nothing."""
    changes: dict[str, Any] = {"modes": "async", "limits": {"staleness": 1}}
    spot = job({**ROLLOUT, "leaves": "12 h"}, **changes)
    plan = rlperf.plan_job(spot)
    predicted = plan.phases[0].predicted
    assert predicted.idle_fraction["rollout_waits"] < 1e-3 and predicted.stages_s.rollout < 0.99 * predicted.rl_step_s
    assert plan.run is not None and plan.run.on_demand_s is not None
    lost = (plan.run.total_s - plan.run.on_demand_s) / (500 * predicted.rl_step_s)
    absent = 600.0 / (12 * 3600.0)
    assert 0.9 * absent * predicted.stages_s.rollout / predicted.rl_step_s < lost < 2.0 * absent


@pytest.mark.parametrize("nodes", [2, 3, 5, 7, 16, 36])
@pytest.mark.parametrize("leaves_s", [2e4, 7e4, 3.6e8])
def test_where_nothing_fails_no_failure_is_told(nodes: int, leaves_s: float) -> None:
    """Departures taken off as many stops left -1e-20 failures."""
    spot = SpotFacts(nodes=nodes, leaves_s=leaves_s)
    found = whole_run(197.0, RunFacts(rl_steps=20, devices=8, spot=spot))
    assert found.failures == 0.0 and found.departures > 0.0


def test_where_all_nodes_may_leave_the_run_starts_again_and_checkpoints_help() -> None:
    every = {"pools": "all", "leaves": "8 h", "returns": "10 min"}
    found = totals(job(every))
    assert found.departures > 0.5 and found.lost_s > 0.0 and found.best_checkpoint_every is not None
    assert "restarts" in run_words(found) and "0.0 failures" not in run_words(found)  # which took 7 h 52 min
    seldom = job(every)
    assert seldom.run is not None
    rare = totals(seldom.model_copy(update={"run": seldom.run.model_copy(update={"checkpoint_every": 60})}))
    assert rare.lost_s > found.lost_s


def test_only_a_framework_with_a_key_goes_on_and_its_file_says_so() -> None:
    texts = "\n".join(plan_texts(rlperf.plan_job(job(ROLLOUT))).values())
    assert "--use-fault-tolerance" in texts
    assert "--use-fault-tolerance" not in "\n".join(plan_texts(rlperf.plan_job(job(None))).values())
    for framework in ("verl", "nemo_rl", "areal", "openrlhf", "trl"):  # in a mode of theirs or not: each by name
        with pytest.raises(SpecError, match=f"{framework} .*no key for a rollout that goes on"):
            ask(job(ROLLOUT, framework=framework), to_plan=True)
    ask(job({**ROLLOUT, "pools": "all"}, framework="verl", modes="colocated", pools=[]), to_plan=True)


def test_a_rollout_that_shares_its_devices_has_no_nodes_of_its_own() -> None:
    with pytest.raises(ValueError, match="no nodes of its own in mode colocated"):
        job(ROLLOUT, modes="colocated")
