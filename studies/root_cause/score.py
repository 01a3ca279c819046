"""Score the diagnosis on planted faults and on clean runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rlperf.diagnose.explain import Cause
from rlperf.diagnose.scaling import explain_scales
from rlperf.diagnose.scenario import simulate_step
from studies.root_cause.plant import KINDS, SCALES, Plant, draw, inputs, plant, runs


@dataclass(frozen=True)
class Score:
    """One run: what was planted, what was reported, and the seconds of each."""

    number: int
    planted: tuple[Plant, ...]
    true_loss_s: tuple[float, ...]
    reported: tuple[Cause, ...]
    step_s: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """Place (1 = first) at which each planted fault is reported; 0 where it is not."""
        return tuple(_place(p, self.reported) for p in self.planted)


def _place(planted: Plant, reported: tuple[Cause, ...]) -> int:
    for place, cause in enumerate(reported, start=1):
        if cause.kind == planted.kind and (planted.kind in ("controller", "kv_cache") or _same_place(planted, cause)):
            return place
    return 0


def _same_place(planted: Plant, cause: Cause) -> bool:
    if planted.kind == "stage_imbalance":
        return cause.part == planted.part
    return cause.rank == planted.rank


def run(number: int, kinds: tuple[str, ...], seed: int) -> Score:
    """Draw a run, plant faults of ``kinds`` that cost at least 3 % of the rl_step each, explain it."""
    rng = np.random.default_rng([seed, number])
    base = draw(rng, need_tools="slow_tool" in kinds)
    for _ in range(20):
        plants = tuple(plant(kind, rng, base.colocated) for kind in kinds)
        true_loss = _true_losses(base, plants, seed + number)
        if all(loss >= 0.03 for loss in true_loss[1:]):
            break
    found = explain_scales(runs(base, plants, seed + number)).largest
    return Score(number, plants, tuple(true_loss[0] * loss for loss in true_loss[1:]), found.causes, found.step_s)


def _true_losses(base: object, plants: tuple[Plant, ...], seed: int) -> list[float]:
    """rl_step with all faults [s], and by which share each fault alone lengthens the healthy rl_step."""
    last = SCALES[-1]
    clean = simulate_step(inputs(base, last, (), seed)).step_s()  # type: ignore[arg-type]
    alone = [simulate_step(inputs(base, last, (p,), seed)).step_s() / clean - 1.0 for p in plants]  # type: ignore[arg-type]
    return [clean, *alone]


def kinds_of(number: int) -> tuple[str, ...]:
    """What is planted in run ``number`` of 200: 144 single faults (18 of each kind), then 56 double ones (two of each
    pair)."""
    if number < 144:
        return (KINDS[number % len(KINDS)],)
    pairs = list(combinations(KINDS, 2))
    return pairs[(number - 144) % len(pairs)]
