"""Pairs of jobs of which the second cannot be worse: more or faster devices, one more choice, other words for the same.

Run: python -m studies.metamorphic.run [PAIRS] [SEED]   (500 pairs by default, about 15 minutes of one core)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from rlperf.api import ask, size_job
from rlperf.errors import InfeasibleError, RlperfError, SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import Context
from rlperf.specs.hardware import Hardware
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES

MODELS = ("Qwen2.5-1.5B", "Qwen3-4B", "Qwen2.5-7B", "Llama-3.1-8B", "Qwen3-14B", "Qwen2.5-32B", "Qwen3-30B-A3B")
CLUSTERS = ("dgx_a100", "dgx_h100", "dgx_h200", "mi300x_node")
ENGINES = ("vllm", "sglang")
TOLERANCE = 1e-3
"""How much worse the second may be: what the simulated rollouts of two layouts differ by chance."""
EXACT = 1e-9
"""The same where both ask the same question in other words."""

IN_VAIN = 30
"""First jobs in a row that nothing fits: the rule then asks for what cannot be, and would be tried for ever."""

Data = dict[str, Any]
Change = Callable[[Hardware], Hardware]
Jobs = Callable[[Random], Data]


@dataclass(frozen=True)
class Pair:
    """Two jobs, the second with ``change`` of its hardware; it may not be worse, or must be ``equal``."""

    rule: str
    words: str
    first: Data
    second: Data
    change: Change | None = None
    equal: bool = False
    scale: float = 1.0
    """Objective of the second over the first's, where they are equal."""
    sizes: tuple[Sequence[str], Sequence[str]] | None = None
    """Clusters that each is sized over; None: both are planned."""

    @property
    def excess(self) -> float | None:
        """How much worse the second is, as a share; None: the first cannot be planned.

        A second that cannot be planned is infinitely worse.
        """
        first, second = self._objectives()
        if first is None:
            return None
        ratio = float("inf") if second is None else second / (first * self.scale)
        return abs(ratio - 1.0) if self.equal else ratio - 1.0

    def _objectives(self) -> tuple[float | None, float | None]:
        if self.sizes:
            return cheapest(self.first, self.sizes[0]), cheapest(self.second, self.sizes[1])
        first = objective(self.first)
        return first, None if first is None else objective(self.second, self.change)

    def holds(self, excess: float) -> bool:
        """Whether the rule is kept."""
        return excess <= (EXACT if self.equal else TOLERANCE)


def objective(data: Data, change: Change | None = None) -> float | None:
    """The objective of a job's plan; None where nothing fits."""
    try:
        question = ask(Job.model_validate(data), to_plan=True)
    except SpecError:  # the framework cannot be asked for it: a dtype without a key
        return None
    context: Context = question.context
    if change is not None:
        hardware = change(context.hardware)
        context = replace(context, hardware=hardware, rollout_hardware=hardware)
    try:
        return plan_job(context, facts=question.facts).objective
    except InfeasibleError:
        return None


def cheapest(data: Data, clusters: Sequence[str]) -> float | None:
    """USD per rl_step of the cheapest of some clusters, up to two nodes of each; None where none runs the job."""
    try:
        best = size_job(Job.model_validate(data), "usd/step<=1000", clusters=clusters, most_nodes=2).best
    except SpecError:  # the framework cannot be asked for it
        return None
    return None if best is None else best.usd_per_step


# -- jobs -------------------------------------------------------------------------------------------------------------


def job(random: Random) -> Data:
    """A small job of any framework. It may leave the beaten path, so that the objective is all that is minimised."""
    framework = random.choice(FRAMEWORKS)
    facts = framework_facts(framework)
    mode = random.choice([mode for mode in facts.modes if framework not in MODES[mode].had_by])
    return {
        "architecture": random.choice(MODELS), "cluster": random.choice(CLUSTERS), "framework": framework,
        "nodes": random.choice([1, 2, 4] if MODES[mode].shares_devices else [2, 3, 4]), "modes": [mode],
        "engine": random.choice([name for name in facts.engines if name in ENGINES]),
        "algorithm": random.choice(["grpo", "dapo"]), "tasks": [task(random)],
        "limits": {"staleness": max(MODES[mode].least_staleness, 1)},
        "objective": {"minimize": "step_time", "bold": True},
    }  # fmt: skip


def task(random: Random, name: str = "t") -> Data:
    """A task of a preset; one in four has many long samples, which take most of the time."""
    prompts, lengths = ((64, 128), (4096, 8192)) if random.random() < 0.25 else ((32, 64), (1024, 2048))
    return {
        "name": name, "workload": random.choice(["math", "math", "programming", "searching", "tool_use"]),
        "prompts_per_step": random.choice(prompts), "group_size": random.choice([4, 8]), "mini_batch": 32,
        "max_prompt_tokens": 1024, "max_response_tokens": random.choice(lengths),
    }  # fmt: skip


def in_turns(random: Random) -> Data:
    """A small job of two or three tasks, one after the other."""
    data = job(random)
    return {**data, "tasks": [task(random, name) for name in ("a", "b", "c")[: random.choice([2, 3])]]}


def with_pool(data: Data, role: str, part: str, **values: Any) -> Data:
    """The job with something stated of a pool."""
    pools = {pool["role"]: pool for pool in data.get("pools", [])}
    pool = pools.get(role, {"role": role})
    pools[role] = {**pool, part: {**pool.get(part, {}), **values}}
    return {**data, "pools": list(pools.values())}


# -- rules ------------------------------------------------------------------------------------------------------------

OPEN: tuple[tuple[str, str, str, tuple[Any, ...]], ...] = (
    ("rollout", "settings", "rollout_dtype", ("bf16", "fp8")),
    ("rollout", "settings", "kv_dtype", ("bf16", "fp8")),
    ("rollout", "settings", "prefix_caching", (True, False)),
    ("rollout", "settings", "memory_fraction", (0.5, 0.6, 0.7, 0.8, 0.9)),
    ("rollout", "settings", "max_running", (64, 256, 1024)),
    ("rollout", "layout", "tensor_parallel", (1, 2, 4, 8)),
    ("trainer", "layout", "tensor_parallel", (1, 2, 4, 8)),
    ("trainer", "layout", "pipeline_parallel", (1, 2, 4)),
    ("trainer", "layout", "context_parallel", (1, 2, 4)),
    ("trainer", "layout", "zero_stage", (1, 3)),
    ("trainer", "layout", "activation_recompute", ("none", "selective", "full")),
    ("trainer", "layout", "offload", ("none", "optimizer")),
    ("trainer", "settings", "token_budget", (8192, 16384, 32768)),
)
"""(role, part, name, values) of what a job may pin or leave open."""


def opened(random: Random, jobs: Jobs = job) -> Pair:
    """A pinned value, and several among which it is."""
    data = jobs(random)
    role, part, name, values = random.choice(OPEN)
    value = random.choice(values)
    first, second = (with_pool(data, role, part, **{name: each}) for each in (value, list(values)))
    return Pair("open", f"{role} {name} {value} -> {list(values)}", first, second)


def unpinned(random: Random, jobs: Jobs = job) -> Pair:
    """A pinned value that the planner tries by itself, and nothing said of it."""
    data = jobs(random)
    role, part, name, value = random.choice([
        ("rollout", "layout", "tensor_parallel", random.choice([1, 2, 4, 8])),
        ("rollout", "settings", "memory_fraction", random.choice([0.5, 0.7, 0.9])),
        ("rollout", "settings", "max_running", random.choice([64, 256])),
        ("trainer", "layout", "tensor_parallel", random.choice([1, 2, 4, 8])),
        ("trainer", "layout", "pipeline_parallel", random.choice([1, 2])),
        ("trainer", "layout", "context_parallel", random.choice([1, 2])),
    ])  # fmt: skip
    return Pair("unpin", f"{role} {name} {value}", with_pool(data, role, part, **{name: value}), data)


def opened_in_turns(random: Random) -> Pair:
    """A value of tasks that take turns, which share a layout: open among several, or left to the planner."""
    return replace(random.choice([opened, unpinned])(random, in_turns), rule="turns")


def both_opened(random: Random) -> Pair:
    """Two values pinned, and both open."""
    data = jobs = job(random)
    words = []
    for role, part, name, values in random.sample(OPEN, 2):
        value = random.choice(values)
        data, jobs = (with_pool(each, role, part, **{name: v}) for each, v in ((data, value), (jobs, list(values))))
        words.append(f"{role} {name} {value}")
    return Pair("both open", ", ".join(words), data, jobs)


def agents(random: Random) -> Pair:
    """Agents whose files say how many are under way: so many, or places, or memory, pinned; and open."""
    data = job(random)
    while data["framework"] not in ("slime", "areal"):
        data = job(random)
    own = {**data["tasks"][0], "workload": random.choice(["software_engineering", "searching", "tool_use"])}
    data = {**data, "tasks": [{**own, "max_prompt_tokens": 4096, "max_response_tokens": random.choice([2048, 8192])}]}
    few = random.choice([32, 64, 128])
    first = random.choice([
        {**data, "tasks": [{**data["tasks"][0], "max_trajectories": few}]},
        with_pool(data, "rollout", "settings", max_running=few),
        with_pool(data, "rollout", "settings", memory_fraction=random.choice([0.5, 0.7, 0.9])),
        with_pool(data, "rollout", "layout", tensor_parallel=random.choice([1, 2, 4])),
    ])  # fmt: skip
    return Pair("agents", f"{few}, {data['modes'][0]}", first, data)


def more_clusters(random: Random) -> Pair:
    """A cluster to be sized over, and two of them, at prices of their own."""
    data = {**job(random), "nodes": 1, "modes": ["colocated"]}
    one, other = (f"{name}={random.choice([1.0, 2.0, 4.0])}" for name in random.sample(CLUSTERS, 2))
    return Pair("size", f"{one} -> {one}, {other}", data, data, sizes=([one], [one, other]))


def more_modes(random: Random) -> Pair:
    """One mode, and one more to choose from."""
    data = {**job(random), "nodes": 2}
    facts = framework_facts(data["framework"])
    others = [mode for mode in facts.modes if mode not in data["modes"] and data["framework"] not in MODES[mode].had_by]
    both = [*data["modes"], random.choice(others)] if others else data["modes"]
    data["limits"] = {"staleness": max(1, *(MODES[mode].least_staleness for mode in both))}
    return Pair("modes", " + ".join(both), data, {**data, "modes": both})


def more_trainers(random: Random) -> Pair:
    """One trainer backend of the framework, and all of them."""
    data = job(random)
    backends = framework_facts(data["framework"]).backends
    one = random.choice(backends)
    return Pair("trainers", one, {**data, "trainer_backends": [one]}, {**data, "trainer_backends": list(backends)})


def more_batches(random: Random) -> Pair:
    """One mini-batch, group size, number of prompts or maximum length, or two of them, and several to choose from."""
    data = {**job(random), "objective": {"minimize": "token_time", "bold": True}}
    data["limits"] = {**data["limits"], "truncated_fraction": 1.0}
    one = several = {**data["tasks"][0], "mini_batch": 16}
    words = []
    prompts = random.choice([
        ("mini_batch", [mini for mini in (16, 32, 64, 128) if mini <= one["prompts_per_step"]]),
        ("prompts_per_step", random.choice([[32, 48, 64], [32, 64, 128]])),
    ])  # fmt: skip
    for name, values in random.sample([
        prompts, ("group_size", [4, 8, 16]), ("max_response_tokens", random.choice([[1024, 2048, 4096], [4096, 8192]])),
    ], random.choice([1, 1, 2])):  # fmt: skip
        value = random.choice(values)
        one, several, words = {**one, name: value}, {**several, name: values}, [*words, f"{name} {value} -> {values}"]
    return Pair("batches", ", ".join(words), {**data, "tasks": [one]}, {**data, "tasks": [several]})


def more_nodes(random: Random) -> Pair:
    """Some nodes, and more of them; not with TRL's server, which leaves trainers that need not divide the batch."""
    data = job(random)
    while data["framework"] == "trl" and not MODES[data["modes"][0]].shares_devices:
        data = job(random)
    more = data["nodes"] + random.choice([1, 2, data["nodes"]])
    return Pair("nodes", f"{data['nodes']} -> {more}", data, {**data, "nodes": more})


def better_device(random: Random) -> Pair:
    """A cluster, and the same with something better."""
    data, by = job(random), random.choice([1.1, 1.5, 2.0])
    name, change = random.choice([
        ("memory", lambda hw: _device(hw, memory=hw.device.memory * by, memory_usable=hw.device.usable_memory * by)),
        ("memory_bandwidth", lambda hw: _device(hw, memory_bandwidth=hw.device.memory_bandwidth * by)),
        ("host_bandwidth", lambda hw: _device(hw, host_bandwidth=hw.device.host_bandwidth * by)),
        ("peaks", lambda hw: _device(hw, peaks=_faster(hw.device.peaks, by))),
        ("network bandwidth", lambda hw: replace(hw, network=_wider(hw.network, by))),
        ("scale-up bandwidth", lambda hw: _device(hw, scale_up=_wider(hw.device.scale_up, by))),
        ("host memory", lambda hw: replace(hw, cluster=_more(hw.cluster, host_memory=hw.cluster.host_memory * by))),
    ])  # fmt: skip
    return Pair("device", f"{name} x {by}", data, data, change=change)


def _more(thing: Any, **changes: Any) -> Any:
    return thing.model_copy(update=changes)


def _device(hardware: Hardware, **changes: Any) -> Hardware:
    return replace(hardware, device=_more(hardware.device, **changes))


def _faster(peaks: Any, by: float) -> Any:
    return _more(peaks, **{kind: peak * by for kind, peak in peaks if isinstance(peak, float)})


def _wider(link: Any, by: float) -> Any:
    return _more(link, bandwidth=link.bandwidth * by)


def looser_limit(random: Random) -> Pair:
    """A limit, and a looser one."""
    data = job(random)
    limits = data["limits"]
    name, tight, loose = random.choice([
        ("out_of_memory_risk", 0.001, 0.05), ("host_memory", "600 GB", "2 TB"), ("step", "5 min", "30 min"),
    ])  # fmt: skip
    jobs = [{**data, "limits": {**limits, name: value}} for value in (tight, loose)]
    return Pair("limit", f"{name} {tight} -> {loose}", jobs[0], jobs[1])


def lighter(random: Random) -> Pair:
    """A batch, and a smaller or shorter one."""
    data = job(random)
    own = data["tasks"][0]
    name = random.choice(["prompts_per_step", "max_response_tokens"])
    less = {**data, "tasks": [{**own, name: own[name] // 2, "mini_batch": 16}]}
    data = {**data, "tasks": [{**own, "mini_batch": 16}]}
    return Pair("lighter", f"half of {name}", data, less)


def cheaper(random: Random) -> Pair:
    """A price, and half of it."""
    data = {**job(random), "objective": {"minimize": "usd_per_step", "bold": True}}
    return Pair("price", "half", {**data, "price": "4 USD/h"}, {**data, "price": "2 USD/h"}, equal=True, scale=0.5)


def reordered(random: Random) -> Pair:
    """Tasks in another order, under other names."""
    data = in_turns(random)
    tasks = data["tasks"]
    back = [{**each, "name": f"z{number}"} for number, each in enumerate(reversed(tasks))]
    return Pair("order", f"{len(tasks)} tasks", data, {**data, "tasks": back}, equal=True)


def rewritten(random: Random) -> Pair:
    """The same quantities in other units."""
    data = {**job(random), "horizon": {"rl_steps": 20, "group": 10}}
    first = {**data, "horizon": {**data["horizon"], "switch": "5 min"}}
    second = {**data, "horizon": {**data["horizon"], "switch": "300 s"}}
    first["limits"] = {**data["limits"], "host_memory": "1 TB", "step": "2 h"}
    second["limits"] = {**data["limits"], "host_memory": "1000 GB", "step": "7200 s"}
    return Pair("units", "minutes as seconds, TB as GB", first, second, equal=True)


def fewer_tasks(random: Random) -> Pair:
    """Two tasks, and one of them."""
    data = job(random)
    tasks = [task(random, "a"), task(random, "b")]
    return Pair("tasks", "one of two", {**data, "tasks": tasks}, {**data, "tasks": tasks[:1]})


RULES: tuple[Callable[[Random], Pair], ...] = (
    opened, opened, both_opened, both_opened, unpinned, unpinned, agents, more_modes, more_trainers, more_batches,
    more_nodes, better_device, better_device, looser_limit, lighter, cheaper, more_clusters, reordered, rewritten,
    fewer_tasks, opened_in_turns,
)  # fmt: skip
"""Makers of pairs; what is opened most often stands several times."""


def pairs(
    count: int, seed: int = 0, rules: tuple[Callable[[Random], Pair], ...] = RULES
) -> Iterator[tuple[Pair, float]]:
    """So many pairs whose first can be planned, and by how much the second is worse; ``rules`` in turn.

    Raises
    ------
    AssertionError : a plan ended with an error, or `IN_VAIN` first jobs of a rule in a row have no plan
    """
    made = tried = vain = 0
    while made < count:
        random, tried = Random(seed * 1_000_003 + tried), tried + 1
        pair = rules[made % len(rules)](random)
        try:
            excess = pair.excess
        except RlperfError as error:
            raise AssertionError(f"{pair}: {error}") from error
        if excess is None:
            vain += 1
            if vain == IN_VAIN:
                raise AssertionError(
                    f"{pair.rule}: none of {IN_VAIN} first jobs in a row can be planned, at last {pair}"
                )
            continue
        made, vain = made + 1, 0
        yield pair, excess


def report(count: int, rules: tuple[Callable[[Random], Pair], ...], says: str | None) -> None:
    """Every violation, and how many pairs of each rule there were; ``count``: pairs where none are asked for."""
    parser = argparse.ArgumentParser(description=says, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="?", type=int, default=count)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    asked = parser.parse_args()
    found: dict[str, list[float]] = {}
    with suppress(KeyboardInterrupt):  # what was run until then is told
        for pair, excess in pairs(asked.pairs, asked.seed, rules):
            found.setdefault(pair.rule, []).append(excess)
            if not pair.holds(excess):
                print(f"VIOLATION {pair.rule} {pair.words}: {excess:+.3%}\n  {pair.first}\n  {pair.second}", flush=True)
    for rule, excesses in found.items():
        print(f"{rule}: {len(excesses)} pairs, worst {max(excesses):+.4%}")


if __name__ == "__main__":
    report(500, RULES, __doc__)
