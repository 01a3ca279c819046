"""Rollout on a cluster of its own: its nodes follow from the devices that the pool states."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlperf
from rlperf.api import ask, plan_job, size_job
from rlperf.errors import SpecError
from rlperf.frameworks.imports import import_config, job_of
from rlperf.plan.size_offers import offered_jobs
from rlperf.plan.sizing import Sizing
from rlperf.specs.job import Job


def job(**pool: object) -> Job:
    task = {"name": "m", "workload": "math", "prompts_per_step": 64, "group_size": 8, "max_response_tokens": "4k"}
    asked = {"architecture": "Qwen3-4B", "cluster": "dgx_h100", "modes": ["async"], "limits": {"staleness": 1}}
    pools = [{"role": "rollout", "cluster": "hgx_h20", **pool}]
    return Job.model_validate({**asked, "tasks": [task], "pools": pools})


@pytest.mark.parametrize(
    ("pool", "nodes"),
    [({"devices": 16}, 2), ({"devices": [8, 16, 20]}, 3), ({"devices": 8, "nodes": 4}, 4), ({"nodes": 2}, 2), ({}, 1)],
)
def test_nodes_follow_from_devices_unless_stated(pool: dict[str, object], nodes: int) -> None:
    assert ask(job(**pool)).context.rollout_hardware.cluster.nodes == nodes


def test_fewer_nodes_than_the_devices_need_are_refused() -> None:
    with pytest.raises(SpecError, match="1 node of hgx_h20: 8 devices, the pool asks for 16"):
        ask(job(devices=[8, 16], nodes=1))


def test_its_devices_have_a_price_of_their_own() -> None:
    """USD were asked of a rollout without a price: of an objective no plan was found, and a limit was not looked at."""
    usd = {"price": "2.5 USD/h", "objective": "usd_per_step"}
    with pytest.raises(SpecError, match=r"USD without a price of hgx_h20 .* to the rollout pool or its cluster"):
        ask(job().model_validate({**job().stated(), **usd}))
    context = ask(job().model_validate({**job(price="1 USD/h").stated(), **usd})).context
    assert context.usd_per_s(8, 16) == pytest.approx((8 * 1.0 + 16 * 2.5) / 3600.0)
    with pytest.raises(ValueError, match="price is of a cluster of the pool's own"):
        job(cluster=None, price="1 USD/h")


def test_size_prices_the_rollouts_cluster_and_asks_for_the_price_that_is_missing() -> None:
    with pytest.raises(SpecError, match=r"needs what a device of hgx_h20 costs \(state it: --price hgx_h20=") as error:
        size_job(job(), "usd/step<=1", clusters=["h100=2.5"], most_nodes=1)
    assert len(error.value.problems) == 1
    offered = [
        (each.cluster, each.price, each.pool("rollout").price) for each in offered_jobs(job(), ("h100=2.5", "h20=1"))
    ]
    assert offered == [("dgx_h100", 2.5, 1.0), ("hgx_h20", 1.0, 1.0)]


def test_size_counts_the_nodes_of_the_rollouts_cluster_too() -> None:
    """One node of it stood on every row: no number of the trainer's met the target."""
    trainer = {"role": "trainer", "layout": {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1}}

    def sized_for(**pool: object) -> Sizing:
        asked = job(**pool).stated()
        asked["pools"].append(trainer)
        return size_job(Job.model_validate(asked), "step<=40s", clusters=["h100=2.5"], most_nodes=4)

    alone, sized = sized_for(nodes=1), sized_for(price="1 USD/h")
    assert alone.best is None and all(row.rollout_nodes is None for row in alone.rows)
    assert sized.best is not None and sized.best.rollout_nodes is not None and sized.by == "usd"
    assert sized.best.rollout_nodes > 1
    assert sized.best.devices == 8 * (sized.best.nodes + sized.best.rollout_nodes)
    usd_per_s = 8 * (2.5 * sized.best.nodes + sized.best.rollout_nodes) / 3600.0
    assert sized.best.usd_per_step == pytest.approx(usd_per_s * (sized.best.rl_step_s or 0.0))
    assert sized.verdict.startswith(f"{sized.best.nodes} node")
    assert f" and {sized.best.rollout_nodes} of hgx_h20: the cheapest" in sized.verdict


def test_engines_over_two_nodes_leave_an_odd_one() -> None:
    """GLM-4.5 in 16 bits takes two nodes of H100 an engine: seven of them fitted nothing, where six did."""

    trainer = {"role": "trainer", "layout": {"tensor_parallel": 4, "pipeline_parallel": 24, "context_parallel": 1}}

    def planned(nodes: int) -> tuple[int, float]:
        task = {"name": "t", "workload": "math", "prompts_per_step": 128, "group_size": 8, "mini_batch": 64,
                "max_prompt_tokens": 1024, "max_response_tokens": 2048}  # fmt: skip
        found = plan_job(
            {
                "architecture": "GLM-4.5-355B-A32B", "cluster": "dgx_b200", "framework": "verl", "nodes": 24,
                "modes": ["streaming"], "tasks": [task], "limits": {"staleness": 1}, "objective": {"bold": True},
                "pools": [{"role": "rollout", "cluster": "dgx_h100", "nodes": nodes}, trainer],
            }
        ).phases[0]  # fmt: skip
        return found.pools[0].devices, found.predicted.rl_step_s

    six = planned(6)
    assert planned(7) == six and six[0] == 48


def test_what_is_exported_is_read_back_on_both_clusters(tmp_path: Path) -> None:
    job = rlperf.short_job("Qwen3-0.6B", 8, "h800", prompts=16, max_response="1k", mode="one_step_off")
    pool = {"role": "rollout", "cluster": "hgx_h20", "devices": 8, "layout": {"tensor_parallel": 1}}
    trainer = {"role": "trainer", "settings": {"backend": "fsdp2"}}
    plan = rlperf.plan_job(Job.model_validate({**job.stated(), "pools": [pool, trainer]}))
    rlperf.export_plan(plan, tmp_path)
    read = job_of(import_config([tmp_path / "config.yaml"]))
    assert (read.cluster, read.nodes, read.pool("rollout").cluster) == ("hgx_h800", 1, "hgx_h20")
    assert rlperf.predict_job(read).rl_step_s == pytest.approx(plan.objective)
