"""The same of techniques: drafts, environments, teachers, readers, lent devices. No job gets worse by being given more.

Run: python -m studies.metamorphic.techniques [PAIRS] [SEED]   (100 pairs by default)
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from studies.metamorphic.run import Data, Pair, job, report, with_pool


def of(framework: str, random: Random, **changes: object) -> Data:
    """A job of `run.job` for one framework, in turns on shared devices unless ``changes`` say otherwise."""
    data = {**job(random), "framework": framework, "engine": "sglang" if framework == "slime" else "vllm"}
    return {**data, "modes": ["colocated"], "nodes": random.choice([1, 2]), "limits": {"staleness": 1}, **changes}


def drafting(random: Random) -> tuple[Data, str]:
    """A job for a framework whose engines keep a head over their sleep, and a number of drafts."""
    return of(random.choice(["nemo_rl", "slime"]), random), f"eagle3:{random.choice([1, 2, 3, 5, 7])}"


def acceptance(random: Random) -> Pair:
    """A share of drafts that is accepted, and a larger one."""
    data, drafts = drafting(random)
    low = random.uniform(0.2, 0.8)
    high = random.uniform(low, 1.0)
    first, second = (
        with_pool(data, "rollout", "settings", speculation=drafts, draft_acceptance=share) for share in (low, high)
    )
    return Pair("acceptance", f"{drafts}, {low:.2f} -> {high:.2f}", first, second)


def no_drafts(random: Random) -> Pair:
    """None, and no drafts of a head."""
    data, _ = drafting(random)
    first, second = (with_pool(data, "rollout", "settings", speculation=word) for word in ("none", "eagle3:0"))
    return Pair("no drafts", "none = eagle3:0", first, second, equal=True)


def drafts_or_none(random: Random) -> Pair:
    """Drafts, or none, stated; and both to choose from."""
    data, drafts = drafting(random)
    word = random.choice([drafts, "none"])
    first, second = (with_pool(data, "rollout", "settings", speculation=words) for words in ([word], ["none", drafts]))
    return Pair("drafts or none", f"{word} -> none, {drafts}", first, second)


def environments(random: Random) -> Pair:
    """So many environments at once, and more of them, or any number."""
    data = of(random.choice(["verl", "nemo_rl", "slime", "openrlhf"]), random)
    own = {**data["tasks"][0], "workload": random.choice(["searching", "tool_use"])}
    few = random.choice([16, 32, 64])
    jobs = [{**data, "tasks": [{**own, "max_trajectories": most}]} for most in (few, random.choice([2 * few, None]))]
    return Pair("environments", f"{few} -> {jobs[1]['tasks'][0]['max_trajectories']}", jobs[0], jobs[1])


def teacher(random: Random) -> Pair:
    """A teacher, and a smaller one (verl sends an only teacher every sequence)."""
    data = of("verl", random, nodes=2)
    scorer = {"name": "t", "kind": "teacher", "architecture": "Qwen3-8B", "placement": "own"}
    smaller = random.choice(["Qwen3-4B", "Qwen3-1.7B"])
    jobs = [{**data, "scorers": [each]} for each in (scorer, {**scorer, "architecture": smaller})]
    return Pair("teacher", smaller, jobs[0], jobs[1])


def no_teacher(random: Random) -> Pair:
    """A teacher, and none: whatever is beside it costs nothing less."""
    data = of("verl", random, nodes=2)
    scorer = {"name": "t", "kind": "teacher", "architecture": "Qwen3-1.7B", "placement": "own"}
    return Pair("no teacher", "one -> none", {**data, "scorers": [scorer]}, data)


def readers(random: Random) -> Pair:
    """Every replica reads its own prompts, or some read for the others; and both to choose from."""
    data = of("slime", random)
    number = random.choice([0, 1, 2])
    first, second = (with_pool(data, "rollout", "settings", prefill_replicas=words) for words in ([number], [0, 1, 2]))
    return Pair("readers", f"{number} -> 0, 1, 2", first, second)


def lent(random: Random) -> Pair:
    """The trainer keeps its devices while it waits, or lends them; and both to choose from."""
    data = of("verl==main", random, modes=["one_step_off"], nodes=2)
    data["tasks"][0]["workload"] = random.choice(["math", "programming"])
    word = random.choice([False, True])
    first, second = (with_pool(data, "rollout", "settings", borrows=words) for words in ([word], [False, True]))
    return Pair("lent", f"{word} -> both", first, second)


RULES: tuple[Callable[[Random], Pair], ...] = (
    acceptance, no_drafts, drafts_or_none, environments, teacher, no_teacher, readers, lent,
)  # fmt: skip


if __name__ == "__main__":
    report(100, RULES, __doc__)
