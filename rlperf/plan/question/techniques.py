"""Techniques that a job asks for and an architecture has no use for, or that nobody has built for it."""

from __future__ import annotations

from rlperf.cost.layers import stack_of
from rlperf.cost.layers.recurrent import Recurrent
from rlperf.errors import Problem, SpecError
from rlperf.specs.architecture import Architecture
from rlperf.specs.job import Job
from rlperf.specs.scorer import Scorer


def check_techniques(job: Job, architecture: Architecture) -> None:
    """Raise a `SpecError` for a setting of the trainer that the architecture cannot follow."""
    settings = job.pool("trainer").settings
    if settings.router_replay in ("R2", "R3") and architecture.experts is None:
        none = f"router_replay: {architecture.name} has no experts to route to"
        raise SpecError(Problem(none, suggestion="leave it out"))
    carries = any(isinstance(half.layer, Recurrent) for half in stack_of(architecture).halves)
    if settings.shared_prefix and carries:
        state = f"layers of {architecture.name} carry a state that no trainer hands to several responses"
        raise SpecError(Problem(f"shared_prefix: {state}", suggestion="leave it out"))


def check_length(job: Job, scorer: Scorer, architecture: Architecture) -> None:
    """Raise a `SpecError` where a scorer is asked to read more than it has positions for."""
    longest = max(task.max_prompt_tokens + max(task.max_response_tokens) for task in job.tasks)
    asked = longest + scorer.prompt_tokens + scorer.response_tokens
    if architecture.max_positions and asked > architecture.max_positions:
        has = f"the {architecture.max_positions:,} positions of {architecture.name}"
        words = f"scorer {scorer.name}: sequence, instructions and verdict of {asked:,} tokens are above {has}"
        raise SpecError(Problem(words, suggestion="lower max_response_tokens, or name another architecture"))
