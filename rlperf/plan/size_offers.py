"""Offers: the clusters that sizing tries, each at its price, and what is wrong with any before the first is planned."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlperf.errors import Problem, SpecError
from rlperf.plan.question.context import Context
from rlperf.plan.size_target import SizeTarget
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.specs.objectives import OBJECTIVES
from rlperf.specs.pool import PoolSpec
from rlperf.specs.short_job import cluster_named
from rlperf.units import parse_quantity

Resolve = Callable[[Job], tuple[Context, FrameworkFacts | None]]
"""Gives a job its context and its framework's rules."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True)
class Offer:
    """A cluster to try, and what one of its devices costs an hour [USD/h]; None: what its profile states."""

    cluster: str
    price: float | None = None

    @classmethod
    def of(cls, text: str) -> Offer:
        """``dgx_h100`` or ``dgx_h100=2.50``, with or without its unit.

        >>> Offer.of("dgx_h100=2.50 USD/h").price, Offer.of("a100 = 1.3").price, Offer.of("clusters/mine.yaml").price
        (2.5, 1.3, None)
        """
        name, equals, price = (part.strip() for part in text.partition("="))
        if not equals:
            return cls(name)
        try:
            found = parse_quantity(f"{price} USD/h" if _NUMBER.fullmatch(price) else price, "usd_per_hour")
        except ValueError as error:
            raise SpecError(f"the price of cluster {name}: {error}") from error
        if not 0.0 < found < math.inf:
            raise SpecError(f"the price of cluster {name} must be above 0")
        return cls(name, found)


def offers_named(clusters: object, prices: object) -> list[str]:
    """What a caller from Python gave for clusters and prices, as `Offer.of` reads it.

    >>> offers_named("h100", {"a100": 1.3})
    ['h100', 'a100=1.3']

    Raises
    ------
    SpecError : what is no list of names, or no prices by names
    """
    named = [clusters] if isinstance(clusters, str | Path) else clusters
    listed = list(named) if isinstance(named, Iterable) and not isinstance(named, Mapping) else [None]
    problems = []
    if not all(isinstance(name, str | Path) for name in listed):
        how = 'write ["h100", "dgx_a100"], and what they cost as prices'
        problems.append(Problem(f"clusters: names are due (given: {clusters!r})"[:200], suggestion=how))
    priced = {} if prices is None else prices
    if not isinstance(priced, Mapping):
        words = f"prices: USD per device and hour by clusters' names are due (given: {prices!r})"[:200]
        problems.append(Problem(words, suggestion='write {"h100": 2.5}'))
    if problems or not isinstance(priced, Mapping):
        raise SpecError(problems)
    return [*map(str, listed), *(f"{name}={usd}" for name, usd in priced.items())]


def offered_jobs(job: Job, clusters: Sequence[str]) -> list[Job]:
    """The job on each cluster to try, at the price of that cluster's devices; one named twice takes its last price."""
    prices: dict[str, float | None] = {}
    for offer in [Offer.of(text) for text in clusters] or [Offer(job.cluster, job.price)]:
        name = cluster_named(offer.cluster)
        prices[name] = offer.price or prices.get(name) or (job.price if name == job.cluster else None)
    changes: dict[str, Any] = {}
    if OBJECTIVES[job.objective.minimize].needs_price:  # of nodes that are paid for, the fastest plan is cheapest
        changes["objective"] = job.objective.model_copy(update={"minimize": "step_time"})
    changes["pools"] = tuple(_priced(pool, prices) for pool in job.pools)
    return [job.model_copy(update={**changes, "cluster": name, "price": usd}) for name, usd in prices.items()]


def _priced(pool: PoolSpec, prices: Mapping[str, float | None]) -> PoolSpec:
    """A pool at the price that is given for the cluster of its own, if any."""
    usd = None if pool.cluster is None else prices.get(cluster_named(pool.cluster))
    return pool if usd is None else pool.model_copy(update={"price": usd})


def unpriced_of(offered: Sequence[Job], target: SizeTarget, ask: Resolve) -> tuple[str, ...]:
    """Everything that is wrong with any cluster, before the first is planned; what has no price, where none is due."""
    problems: list[Problem] = []
    unpriced: dict[str, None] = {}
    for job in offered:
        try:
            unpriced |= dict.fromkeys(ask(job.model_copy(update={"nodes": 1}))[0].unpriced)
        except SpecError as error:
            problems += error.problems
    if target.measure == "usd/step":
        problems += map(_no_price, unpriced)
    if problems:
        raise SpecError(dict.fromkeys(problems))
    return tuple(sorted(unpriced))


def _no_price(cluster: str) -> Problem:
    hint = f"state it: --price {cluster}=2.50 in USD per device and hour, or price in the job or the cluster's file"
    return Problem(f"a USD target needs what a device of {cluster} costs", suggestion=hint)
