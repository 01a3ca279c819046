"""Score the diagnosis on planted faults and on clean runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rlperf.diagnose.explain import Cause
from rlperf.diagnose.scaling import explain_scales
from studies.root_cause.plant import KINDS, SCALES, Draw, Plant, draw, inputs, plant, runs
from studies.root_cause.scenario import simulate_step


@dataclass(frozen=True)
class Score:
    """One run: what was planted, what was reported, and the seconds of each."""

    number: int
    planted: tuple[Plant, ...]
    true_loss_s: tuple[float, ...]
    reported: tuple[Cause, ...]
    rl_step_s: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """Place (1 = first) at which each planted fault is reported; 0 where it is not."""
        return tuple(_place(p, self.reported) for p in self.planted)

    @property
    def false_faults(self) -> tuple[Cause, ...]:
        """Faults reported that were not planted."""
        kinds = {p.kind for p in self.planted}
        return tuple(c for c in self.reported if c.nature == "fault" and c.kind not in kinds)


def _place(planted: Plant, reported: tuple[Cause, ...]) -> int:
    for place, cause in enumerate(reported, start=1):
        if cause.kind == planted.kind and (planted.kind in ("controller", "kv_cache") or _same_place(planted, cause)):
            return place
    return 0


def _same_place(planted: Plant, cause: Cause) -> bool:
    if planted.kind == "stage_imbalance":
        return cause.part == planted.part
    return cause.rank == planted.rank


LEAST = 0.04
"""Share of the faulty rl_step that every planted fault costs, alone or as the last to be removed."""


def run(number: int, kinds: tuple[str, ...], seed: int) -> Score:
    """Draw a run and plant faults of ``kinds``, again until each costs `LEAST`; explain it."""
    rng = np.random.default_rng([seed, number])
    while True:
        base = draw(rng, need_tools="slow_tool" in kinds)
        plants = tuple(plant(kind, rng, base.colocated) for kind in kinds)
        true_loss = true_losses(base, plants, seed + number)
        if all(share >= LEAST for _, share in true_loss):
            break
    found = explain_scales(runs(base, plants, seed + number)).largest
    return Score(number, plants, tuple(loss for loss, _ in true_loss), found.causes, found.rl_step_s)


def true_losses(base: Draw, plants: tuple[Plant, ...], seed: int) -> list[tuple[float, float]]:
    """By simulating again without each fault at the largest scale: seconds that it costs in presence of the others, and
    the share of the faulty rl_step that it costs so or alone, whichever is more."""

    def rl_step_s(chosen: tuple[Plant, ...]) -> float:
        return simulate_step(inputs(base, SCALES[-1], chosen, seed)).rl_step_s()

    whole, clean = rl_step_s(plants), rl_step_s(()) if plants else 0.0
    found = []
    for one in plants:
        last = whole - rl_step_s(tuple(p for p in plants if p is not one))
        alone = rl_step_s((one,)) - clean
        found.append((last, max(last, alone) / whole))
    return found


def kinds_of(number: int) -> tuple[str, ...]:
    """What is planted in run ``number`` of 200: 144 single faults (18 of each kind), then 56 double ones (two of each
    pair)."""
    if number < 144:
        return (KINDS[number % len(KINDS)],)
    pairs = list(combinations(KINDS, 2))
    return pairs[(number - 144) % len(pairs)]
