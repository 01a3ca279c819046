"""The same of large mixtures of experts, many nodes, several tasks at once, and engines on a cluster of their own.

Run: python -m studies.metamorphic.large [PAIRS] [SEED]   (60 pairs by default)
"""

from __future__ import annotations

from functools import partial
from random import Random

from rlperf.frameworks.adapter import framework_facts
from rlperf.specs.modes import MODES
from studies.metamorphic.run import CLUSTERS, OPEN, Data, Pair, job, opened, report, task, unpinned, with_pool

MODELS = ("Qwen3-235B-A22B", "GLM-4.5-355B-A32B", "GLM-4.5-Air", "DeepSeek-V3", "gpt-oss-120b", "Qwen3-Next-80B-A3B")
NODES = {"dgx_h100": 8, "dgx_h200": 8, "dgx_b200": 8, "gb200_nvl72": 4, "mi300x_node": 8}
"""Clusters, and the devices of a node."""


def spread(random: Random) -> Data:
    """A job of `run.job` for any framework but TRL, whose server stands on one node."""
    data = job(random)
    while data["framework"] == "trl":
        data = job(random)
    return data


def large(random: Random) -> Data:
    """One for a large model, on 128 to 384 devices."""
    data = spread(random)
    cluster = random.choice(list(NODES))
    own = {**data["tasks"][0], "prompts_per_step": random.choice([128, 256, 512]), "mini_batch": 64}
    nodes = random.choice([128, 160, 192, 256, 320, 384]) // NODES[cluster]
    return {**data, "architecture": random.choice(MODELS), "cluster": cluster, "nodes": nodes, "tasks": [own]}


def several(random: Random, sharing: str) -> Data:
    """One of two tasks with groups and updates alike, on three to seven nodes."""
    data = spread(random)
    tasks = [{**task(random, name), "group_size": 8} for name in ("a", "b")]
    tasks = [{**each, "mini_batch": each["prompts_per_step"] // 2} for each in tasks]
    return {**data, "nodes": random.choice([3, 5, 6, 7]), "sharing": sharing, "tasks": tasks}


def a_node_more(random: Random) -> Pair:
    """Nodes that divide well, and one more, or a few."""
    data = large(random)
    more = data["nodes"] + random.choice([1, 1, 2, 3, 5])
    return Pair("nodes", f"{data['nodes']} -> {more}", data, {**data, "nodes": more})


def engines_apart(random: Random) -> Pair:
    """Engines on a cluster of their own, and a node more beside them, or of theirs."""
    data = large(random)
    facts = framework_facts(data["framework"])
    apart = [mode for mode in facts.modes if not MODES[mode].shares_devices]
    mode = random.choice([each for each in apart if data["framework"] not in MODES[each].had_by] or apart)
    nodes = random.choice([6, 8, 12, 16])
    pool = {"role": "rollout", "cluster": random.choice(CLUSTERS[1:]), "nodes": nodes}
    data |= {"modes": [mode], "pools": [pool], "limits": {"staleness": max(MODES[mode].least_staleness, 1)}}
    more = random.choice([{"nodes": data["nodes"] + 1}, {"pools": [{**pool, "nodes": nodes + 1}]}])
    return Pair("engines apart", f"one node more: {next(iter(more))}", data, {**data, **more})


def mixed_order(random: Random) -> Pair:
    """Tasks mixed in one batch, and the same listed the other way round."""
    data = several(random, "mixed")
    return Pair("mixed", "order of two tasks", data, {**data, "tasks": data["tasks"][::-1]}, equal=True)


def at_once(random: Random) -> Pair:
    """Tasks that run at once with a setting of the engine pinned, and open."""
    role, part, name, values = random.choice(OPEN[:3])
    data, value = several(random, "devices"), random.choice(values)
    first, second = (with_pool(data, role, part, **{name: each}) for each in (value, list(values)))
    return Pair("at once", f"{name} {value} -> {list(values)}", first, second)


RULES = (
    partial(opened, jobs=large), partial(unpinned, jobs=large), a_node_more, a_node_more, engines_apart, mixed_order,
    at_once,
)  # fmt: skip
"""Makers of pairs of `run.pairs`."""


if __name__ == "__main__":
    report(60, RULES, __doc__)
