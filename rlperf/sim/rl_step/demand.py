"""Demand: the lengths that an rl_step puts on its pools, as a few whole rl_steps, and the batch that they make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rlperf.cost.layers.vision import Images
from rlperf.errors import Problem, SpecError
from rlperf.layout import FloatArray
from rlperf.sim.rollout.tail import running_share
from rlperf.specs.architecture import Architecture
from rlperf.workload import LengthTable

ALIKE = 1.2
"""Ratio of mean response lengths up to which seconds of a log and of a prediction are compared without a word [1]."""


@dataclass(frozen=True)
class Batch:
    """What one rl_step trains on; ``prompts`` and ``mini_batch`` count prompts, ``generated`` those rolled out.

    ``max_trajectories``: that its environment has under way at once, over all replicas; None: any number
    ``generation_batch``: prompts that are rolled out at once, whole batches one after another; None: all
    ``lora_jobs``: that share the prompts evenly, each with updates of its own
    ``samples``: trained sequences per rl_step where they are not the responses, mean over rl_steps; None: they are
    """

    prompts: int
    group_size: int
    mini_batch: int
    max_prompt_tokens: int
    max_response_tokens: int
    generated: int
    over_provision: float = 1.0
    max_trajectories: int | None = None
    generation_batch: int | None = None
    lora_jobs: int = 1
    samples: int | None = None

    @property
    def rounds(self) -> int:
        """Generation batches that follow one another in an rl_step.

        >>> Batch(128, 8, 128, 100, 100, 512, generation_batch=256).rounds
        2
        """
        return 1 if self.generation_batch is None else -(-self.generated // self.generation_batch)

    @property
    def longest_tokens(self) -> int:
        """Prompt and response at their maxima [tokens]."""
        return self.max_prompt_tokens + self.max_response_tokens

    def under_way(self, replicas: int) -> int | None:
        """Trajectories that a replica has under way at most, of those that the environment allows.

        >>> Batch(64, 16, 64, 100, 100, 64, max_trajectories=256).under_way(24)
        11
        """
        return None if self.max_trajectories is None else -(-self.max_trajectories // replicas)

    @property
    def updates(self) -> int:
        """Optimizer updates of one pass over the batch; those of an rl_step: `Site.updates`."""
        return -(-self.prompts // self.mini_batch)

    @property
    def updates_of_a_job(self) -> int:
        """Those of one policy.

        >>> Batch(64, 8, 16, 9, 9, 64, lora_jobs=4).updates_of_a_job
        1
        """
        return self.updates // self.lora_jobs

    @property
    def sequences(self) -> int:
        """Trained sequences per rl_step."""
        return self.samples or self.prompts * self.group_size


@dataclass(frozen=True, eq=False)
class Demand:
    """Some rl_steps of one task: what is generated in each, and what of it is trained on.

    Attributes
    ----------
    tables : one whole rl_step each, ``[replicates]``
    truncated_fraction : responses cut at the maximum length [1]
    reward_s : seconds from the last response to the last reward, mean over rl_steps [s]
    notes : what was assumed about the lengths
    images : of its prompts; None where there are none, or no tower to see them
    of_tasks : what a mixed batch is made of, each cut at a maximum of its own
    """

    task: str
    rl_steps: tuple[int, int]
    batch: Batch
    tables: tuple[LengthTable, ...]
    truncated_fraction: float
    reward_s: float
    notes: tuple[str, ...]
    images: Images | None = None
    of_tasks: tuple[Demand, ...] = ()

    @cached_property
    def by_turn(self) -> Demand:
        """The same rl_steps as a trainer sees them to which every turn is a sample, with the context before it.

        Raises
        ------
        SpecError : prompts hold images, whose share of a context is not told
        """
        if self.images is not None:
            raise SpecError(Problem(f"{self.task}: turn_samples of prompts with images is not predicted"))
        tables = tuple(table.turns(self.batch.sequences) for table in self.tables)
        samples = max(round(float(np.mean([table.n for table in tables]))), 1)
        parts = tuple(part.by_turn for part in self.of_tasks)
        return replace(self, tables=tables, batch=replace(self.batch, samples=samples), of_tasks=parts)

    @property
    def _trained(self) -> slice:
        """Those trained on, of all that are rolled out."""
        return slice(None) if self.batch.samples else slice(self.batch.sequences)

    def lengths(self, replicate: int) -> FloatArray:
        """Prompt + response of every trained sequence of one replicate [tokens]."""
        return self._lengths[replicate]

    @cached_property
    def trajectories(self) -> tuple[LengthTable, ...]:
        """One entry per trajectory, of every replicate."""
        return tuple(table.trajectories() for table in self.tables)

    @cached_property
    def running_share(self) -> float:
        """Share of the samples of groups under way that run (`rlperf.sim.rollout.tail.running_share`) [1]."""
        return running_share([(each.group, each.response_tokens) for each in self.trajectories])

    def response_means(self) -> tuple[float, ...]:
        """Tokens of a response, mean [tokens]; of several turns both what is generated and that with what tools write.

        Frameworks log either, by the mask that they count.
        """
        tables = self.trajectories
        generated = float(np.mean([table.response_tokens.mean() for table in tables]))
        if all(table.append_tokens is None for table in tables):
            return (generated,)
        tools = [0.0 if table.append_tokens is None else float(table.append_tokens.mean()) for table in tables]
        return generated, generated + float(np.mean(tools))

    def unlike(self, tokens: float) -> bool:
        """Whether a run whose mean response has so many ``tokens`` is of other lengths, by more than `ALIKE`."""
        return min(max(tokens / each, each / tokens) for each in self.response_means()) > ALIKE

    @cached_property
    def _requests(self) -> tuple[FloatArray, ...]:
        """Prompt + response of everything that is rolled out, of every replicate [tokens]."""
        found = []
        for table in self.trajectories:
            total = table.prompt_tokens + table.response_tokens
            if table.append_tokens is not None:
                total = total + table.append_tokens
            found.append(np.asarray(total, dtype=np.float64))
        return tuple(found)

    @cached_property
    def _lengths(self) -> tuple[FloatArray, ...]:
        return tuple(total[self._trained] for total in self._requests)

    @cached_property
    def request_tokens(self) -> float:
        """Most tokens that one request holds in a cache: the batch's limits, or what turns and tools make of it."""
        most = max(float(tokens.max(initial=0.0)) for tokens in self._requests)
        return max(float(self.batch.longest_tokens), most)

    @cached_property
    def trained_tokens(self) -> float:
        """Prompt + response tokens trained per rl_step, mean over replicates [tokens]."""
        return float(np.mean([self.lengths(k).sum() for k in range(len(self.tables))]))

    @cached_property
    def prompt_tokens(self) -> float:
        """Prompt tokens trained per rl_step, once per sequence, mean over replicates [tokens]."""
        return float(np.mean([t.prompt_tokens[self._trained].sum() for t in self.trajectories]))

    def read_tokens(self, shared: bool) -> float:
        """Prompt tokens that engines read of requests that begin together, a group's once where ``shared`` [tokens]."""
        every = float(np.mean([t.prompt_tokens.sum(dtype=np.float64) for t in self.trajectories]))
        return every / self.batch.rounds / (self.batch.group_size if shared else 1)

    @cached_property
    def images_per_token(self) -> float:
        """Images per trained token, mean over replicates [1 / token]."""
        if self.images is None:
            return 0.0
        return self.images.share * self.prompt_tokens / self.images.tokens / self.trained_tokens

    def patches(self, architecture: Architecture) -> float:
        """Patches of one image, as the architecture's tower cuts it [1]."""
        return self.images.patches(architecture.vision) if self.images and architecture.vision else 0.0

    @cached_property
    def useful_tokens(self) -> float:
        """Trained tokens of responses that were not cut, mean over replicates [tokens]."""
        if self.of_tasks:
            return sum(part.useful_tokens for part in self.of_tasks)
        cap = self.batch.max_response_tokens
        kept = []
        for k, table in enumerate(self.trajectories):
            whole = table.response_tokens[self._trained] < cap
            kept.append(self.lengths(k)[whole].sum())
        return float(np.mean(kept))

    @cached_property
    def moments(self) -> LengthMoments:
        """Moments of the trained sequences over all replicates; the longest is the mean of their maxima."""
        per_step = [self.lengths(k) for k in range(len(self.tables))]
        joined = np.concatenate(per_step)
        longest = float(np.mean([lengths.max() for lengths in per_step]))
        return LengthMoments(float(joined.mean()), float((joined**2).mean()), longest)

    @cached_property
    def longest_padded(self) -> tuple[float, ...]:
        """Longest prompt and longest response of every replicate's trained sequences together [tokens]."""
        found = []
        for index, table in enumerate(self.trajectories):
            prompts = table.prompt_tokens[self._trained].astype(np.float64)
            found.append(float(prompts.max() + (self.lengths(index) - prompts).max()))
        return tuple(found)

    @cached_property
    def prompt_moments(self) -> tuple[float, float]:
        """Mean and mean square of the prompts of the trained sequences [tokens, tokens^2]."""
        prompts = np.concatenate([t.prompt_tokens[self._trained] for t in self.trajectories]).astype(np.float64)
        return float(prompts.mean()), float((prompts**2).mean())

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """What tells one replicate's lengths from all others, by value: the key of whatever is remembered of it."""
        return tuple(table.digest for table in self.tables)


@dataclass(frozen=True)
class LengthMoments:
    """Moments of trained sequences [tokens, tokens^2, tokens]."""

    mean: float
    mean_square: float
    longest: float
