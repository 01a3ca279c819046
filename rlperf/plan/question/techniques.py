"""Techniques that a job asks for and an architecture has no use for, or that nobody has built for it."""

from __future__ import annotations

from rlperf.cost.layers import stack_of
from rlperf.errors import Problem, SpecError
from rlperf.specs.architecture import Architecture
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES
from rlperf.specs.scorer import Scorer


def check_techniques(job: Job, architecture: Architecture) -> None:
    """Raise a `SpecError` for a setting of a pool that the architecture cannot follow."""
    settings = job.pool("trainer").settings
    if settings.router_replay in ("R2", "R3") and architecture.experts is None:
        none = f"router_replay: {architecture.name} has no experts to route to"
        raise SpecError(Problem(none, suggestion="leave it out"))
    dispatching = {job.pool(role).settings.expert_dispatch for role in ("rollout", "trainer")}
    if "deepep" in dispatching and architecture.experts is None:
        none = f"expert_dispatch: {architecture.name} has no experts to send tokens to"
        raise SpecError(Problem(none, suggestion="leave it out"))
    if settings.shared_prefix and stack_of(architecture).carries_state:
        state = f"layers of {architecture.name} carry a state that no trainer hands to several responses"
        raise SpecError(Problem(f"shared_prefix: {state}", suggestion="leave it out"))


LENT_HINT = "leave borrows out, or the other"


def untold_lending(job: Job, several_turns: bool, in_flight: bool) -> str:
    """What stands beside a trainer's lent devices and is not predicted with them, in words; empty where nothing does.

    ``in_flight``: the framework's engines take weights while they generate
    """
    pool = job.pool("rollout")
    if not any(pool.settings.borrows or ()):
        return ""
    busy = [mode for mode in job.modes if not MODES[mode].lends(in_flight)]
    beside = {
        f"mode {', '.join(busy)}, in which no trainer waits on devices of its own for a batch's last response": busy,
        "a rollout on a cluster of its own": pool.cluster,
        "prefill_replicas": any(pool.settings.prefill_replicas or ()),
        "scorers": job.scorers,
        "several turns": several_turns,
        "max_trajectories": any(task.max_trajectories for task in job.tasks),
        "over_provision": any(task.over_provision and max(task.over_provision) > 1.0 for task in job.tasks),
        "generation_batch": any(task.generation_batch for task in job.tasks),
    }
    named = [words for words, there in beside.items() if there]
    return f"borrows is not predicted with {'; nor with '.join(named)}" if named else ""


def check_length(job: Job, scorer: Scorer, architecture: Architecture) -> None:
    """Raise a `SpecError` where a scorer is asked to read more than it has positions for."""
    longest = max(task.max_prompt_tokens + max(task.max_response_tokens) for task in job.tasks)
    asked = longest + scorer.prompt_tokens + scorer.response_tokens
    if architecture.max_positions and asked > architecture.max_positions:
        has = f"the {architecture.max_positions:,} positions of {architecture.name}"
        words = f"scorer {scorer.name}: sequence, instructions and verdict of {asked:,} tokens are above {has}"
        raise SpecError(Problem(words, suggestion="lower max_response_tokens, or name another architecture"))
