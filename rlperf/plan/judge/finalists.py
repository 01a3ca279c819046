"""Which screened candidates the event simulator hears: the best, and some of every kind that closed forms misjudge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlperf.plan.question.context import Context
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.screen import Screened
from rlperf.specs.pool import Role

FASTEST = 3
"""Finalists that are fastest by themselves, however far off the beaten path: what a bold plan would be."""
ALIKE_BUT = {"activation_recompute": "none", "offload": "none", "microbatch": 1}
"""What layouts of one grid may differ in."""
ALIKE = 3
"""Best candidates that are judged although another of their grid is."""
RIVAL, FEW = 1.05, 3
"""How far above the best screened objective another mode, backend or variant may be that is judged as if it were
stated, and how many of every mode, backend and precision are, however far.

Of 40 jobs with one field of the batch open judged over screened objectives of its values are 4.9 % apart at most."""
NEAR = 1.03
"""How far above the best screened objective a candidate may be that stands for its numbers of trainer replicas and
stages."""


def finalists_of(context: Context, screened: Screened, share: int) -> list[Configuration]:
    """The best ``share`` candidates and the fastest by themselves; some of every mode, trainer backend and batch, or of
    rival tasks every device count, mode and variant.

    Closed forms are off by the number of trainer replicas, which wait for each other (a single one waits for none), and
    by that of stages, whose layers the judge shares out anew: the best of each two numbers is heard, too, where near.
    """
    if context.job.sharing == "devices":
        return _of_each_count(screened)
    best = [*_of_each_grid([*screened.configurations], share), *_of_each_alternative(screened, share)]
    best += [c for found in _beside_the_best(screened.configurations) for c in _of_each_grid(found, share)]
    fastest = [screened.configurations[i] for i in np.argsort(screened.objective, kind="stable")[:FASTEST]]
    near = [c for c, priced in zip(screened.configurations, screened.priced, strict=True)
            if priced <= NEAR * screened.priced[0]]  # fmt: skip
    replicas: dict[tuple[int, int], Configuration] = {}
    for configuration in near:
        layout = configuration.pool("trainer").layout
        replicas.setdefault((layout.data_parallel, layout.pipeline_parallel), configuration)
    return list(dict.fromkeys([*best, *fastest, *replicas.values(), *_of_each_recompute(near)]))


def _of_each_count(screened: Screened) -> list[Configuration]:
    """Of every device count, mode and variant a few."""
    kept: dict[tuple[object, ...], list[Configuration]] = {}
    for configuration in screened.configurations:
        alike = configuration.devices, configuration.mode, configuration.variant
        kept.setdefault(alike, []).append(configuration)
    return [c for found in kept.values() for c in _of_each_grid(found, FEW)]


def _of_each_alternative(screened: Screened, share: int) -> list[Configuration]:
    """Of every alternative that is near what would be judged if it were stated, and a few of every kind.

    What is open is then no worse than any of its values: closed forms of one backend are off otherwise than another's,
    and of a batch whose requests run at once otherwise than of one whose last ones wait.
    """
    kinds: dict[tuple[object, ...], list[Configuration]] = {}
    kept: dict[tuple[object, ...], list[Configuration]] = {}
    near: set[tuple[object, ...]] = set()
    for configuration, priced in zip(screened.configurations, screened.priced, strict=True):
        kinds.setdefault(configuration.kind, []).append(configuration)
        kept.setdefault(configuration.alternative, []).append(configuration)
        if priced <= RIVAL * screened.priced[0]:
            near.add(configuration.alternative)
    few = [configuration for own in kinds.values() for configuration in own[:FEW]]
    return few + [c for each, own in kept.items() if each in near for c in _of_each_grid(own, share)]


def _beside_the_best(found: Sequence[Configuration]) -> list[list[Configuration]]:
    """Candidates that have the best one's engines, and those that have its trainer.

    What is open in one pool takes no place from the other: trainers are judged as if the engines were stated.
    """
    first = found[0]
    same = [c for c in found if (c.mode, c.batch) == (first.mode, first.batch)]
    roles: tuple[Role, ...] = ("rollout", "trainer")
    return [[c for c in same if c.pool(role) == first.pool(role)] for role in roles]


def _of_each_grid(found: list[Configuration], most: int) -> list[Configuration]:
    """The best candidate of each of the ``most`` best grids, and the few best of all whatever they differ in.

    What differs in recompute, offload or token budget alone differs in events as it does in closed forms; were all of
    it judged, an open recompute would leave a third of the places to grids.
    """
    grids: dict[tuple[object, ...], Configuration] = {}
    for configuration in found:
        grids.setdefault(_grid(configuration), configuration)
    return [*[*grids.values()][:most], *found[: min(ALIKE, most)]]


def _of_each_recompute(found: list[Configuration]) -> list[Configuration]:
    """Of the few best grids the best candidate of each recompute.

    Closed forms score with the budget of training, and judged candidates with one of their own: what keeps activations
    trains by small microbatches and is only level with what recomputes once it scores by larger ones.
    """
    grids: dict[tuple[object, ...], dict[object, Configuration]] = {}
    for configuration in found:
        own = grids.setdefault(_grid(configuration), {})
        own.setdefault(configuration.pool("trainer").layout.activation_recompute, configuration)
    return [configuration for own in [*grids.values()][:ALIKE] for configuration in own.values()]


def _grid(configuration: Configuration) -> tuple[object, ...]:
    """What candidates of one grid have in common."""
    trainer, rollout = configuration.pool("trainer"), configuration.pool("rollout")
    degrees = trainer.layout.model_copy(update=ALIKE_BUT)
    return configuration.mode, configuration.batch, rollout.layout, trainer.settings.backend, degrees
