"""Rollout on a cluster of its own: its nodes follow from the devices that the pool states."""

from __future__ import annotations

import pytest

from rlperf.api import ask
from rlperf.errors import SpecError
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
