"""Around the lengths: reward time, DAPO survival, tokens of images and videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.errors import SpecError
from rlperf.workload.laws import Law
from rlperf.workload.lengths import Float, Int
from rlperf.workload.records import FilterBatch, RewardTiming


@dataclass(frozen=True)
class RewardLaw:
    """Reward time of one data-parallel rank, log-normal [s]; independent of the tokens in all recordings read.

    An rl_step waits for the slowest rank: T = max over ranks.
    """

    mu: float
    sigma: float
    ranks: int
    n: int

    @classmethod
    def fit(cls, timings: Sequence[RewardTiming]) -> RewardLaw:
        times = np.log([max(t.reward_time_s, 1e-6) for t in timings])
        if times.size < 2:
            raise SpecError(f"reward times: {times.size} recorded, a law needs at least 2")
        ranks = len({t.rank for t in timings})
        return cls(float(times.mean()), float(times.std(ddof=1)), ranks, int(times.size))

    def sample(self, rl_steps: int, seed: int = 0) -> Float:
        """Reward time [s] of each rl_step: the largest of its ranks. The law's own error (few records) is drawn too."""
        rng = np.random.default_rng(seed)
        sigma = self.sigma * np.sqrt((self.n - 1) / rng.chisquare(self.n - 1, rl_steps))
        mu = self.mu + sigma / np.sqrt(self.n) * rng.standard_normal(rl_steps)
        draws = rng.standard_normal((self.ranks, rl_steps))
        return np.asarray(np.exp(mu + sigma * draws).max(axis=0))


@dataclass(frozen=True)
class Filtering:
    """DAPO's dynamic sampling: a prompt survives where its responses are not all right or all wrong.

    Survival of a generation batch is beta-binomial with mean `survival` and between-batch correlation `rho`.
    """

    survival: float
    rho: float
    generation_prompts: int
    train_prompts: int
    prompts: int
    batches: int

    @classmethod
    def fit(cls, batches: Sequence[FilterBatch]) -> Filtering:
        kept = np.array([b.kept for b in batches], np.float64)
        n = np.array([b.prompts for b in batches], np.float64)
        p = float(kept.sum() / n.sum())
        rho = 0.0
        if kept.size > 1 and 0 < p < 1:
            spread = float(np.sum((kept / n - p) ** 2) / (kept.size - 1))
            rho = float(np.clip((spread / (p * (1 - p)) - np.mean(1 / n)) / (1 - np.mean(1 / n)), 0.0, 0.99))
        return cls(p, rho, int(np.median(n)), max(b.train_prompts for b in batches), int(n.sum()), int(kept.size))

    def generation_batches(self) -> Int:
        """Generation batches that each of many trainer steps needs to gather `train_prompts` survivors."""
        rng, trainer_steps = np.random.default_rng(0), 10_000
        gathered = np.zeros(trainer_steps, np.int64)
        count = np.zeros(trainer_steps, np.int64)
        for _ in range(1000):
            open_ = gathered < self.train_prompts
            if not open_.any():
                break
            p = np.full(trainer_steps, self.survival)
            if self.rho > 0:
                strength = 1.0 / self.rho - 1.0
                p = rng.beta(self.survival * strength, (1.0 - self.survival) * strength, trainer_steps)
            gathered += np.where(open_, rng.binomial(self.generation_prompts, p), 0)
            count += open_
        return count

    @property
    def rollouts_per_trained(self) -> float:
        """Responses generated per response trained on (expected), the surplus of the last batch included."""
        return float(self.generation_batches().mean() * self.generation_prompts / max(self.train_prompts, 1))


def law_in_seconds(law: Law) -> Law:
    """A law fitted on milliseconds, as a law of seconds."""
    from dataclasses import replace

    return replace(law, log_scale=law.log_scale + float(np.log(1e-3)))
