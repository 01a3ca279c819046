"""Pipeline stages of a plan: which layers each stage takes, from the cost models' own layer times.

Uniform stages leave the last one with the output head and, in mixed architectures, some with heavier layers. Frameworks
that let the first and last stage be stated get the best such pair; what partition, placement and schedule together
could reach is said beside it (`rlperf.plan.pipeline`, after AdaPtis, arXiv 2509.23722).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlperf.cost.batching import Microbatches
from rlperf.cost.layers.vision import TowerWork, tower_seconds
from rlperf.cost.stage_ends import stages_between
from rlperf.cost.trainer.update import layer_table
from rlperf.layout import RECOMPUTE, Layout
from rlperf.plan.question.context import Context
from rlperf.plan.question.pool import PoolPlan
from rlperf.plan.search.configuration import Configuration
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.site import TrainerStack
from rlperf.specs.architecture import Architecture
from rlperf.specs.pipeline_profile import LayerProfile
from rlperf.specs.pool import SettingsValues

WORTH = 0.01
"""Stated stages are taken when they save at least this share of the pipeline's time."""
NOTEWORTHY = 0.05
"""An adaptive pipeline is mentioned when it would make an update at least this much faster."""
SEARCH_S = 0.5
ROUNDED = 1.0 + 1e-9
"""A bound and what it bounds are sums of the same times in another order."""
MOST_MICROBATCHES = 32
"""Longer pipelines repeat themselves: more micro-batches are simulated as this many."""


@dataclass(frozen=True)
class StageEnds:
    """Layers of the first and last stage, and the makespan of one update with them and with uniform stages [s]."""

    first: int
    last: int
    makespan_s: float
    uniform_s: float

    @property
    def factor(self) -> float:
        """Makespan over that of uniform stages [1]."""
        return self.makespan_s / self.uniform_s


def layer_profile(
    architecture: Architecture, context: Context, trainer: TrainerStack, layout: Layout, batches: Microbatches,
    demand: Demand | None = None, *, freeze_vision: bool = False,
) -> LayerProfile:  # fmt: skip
    """Times of every layer for one mean micro-batch, embedding (and vision tower) in front and head at the end.

    A layer's kind is its mixer and feed-forward; each kind is costed as an architecture made of it alone. Half of a
    backward is for the input and half for the weights; recompute adds the forward to the backward for the input.
    """
    pairs = list(zip(architecture.layer_mixers, architecture.layer_feed_forwards, strict=True))
    one = Microbatches.of(*(np.asarray(v, dtype=np.float64).ravel()[:1] for v in vars(batches).values()))
    times: dict[tuple[str, str], tuple[float, float]] = {}
    head = (0.0, 0.0)
    for mixer, half in dict.fromkeys(pairs):
        alone = architecture.model_copy(update={"mixers": (mixer,), "feed_forwards": (half,), "vision": None})
        layer, top = layer_table(alone, context.hardware, trainer.calibration, layout, one)
        times[mixer, half] = (float(np.ravel(layer.forward)[0]), float(np.ravel(layer.backward)[0]))
        head = (float(np.ravel(top.forward)[0]), float(np.ravel(top.backward)[0]))
    tower = (0.0, 0.0)
    if demand is not None:
        work = TowerWork(demand.images_per_token * one.tokens, demand.patches(architecture))
        seen = tower_seconds(architecture, context.hardware, trainer.calibration, layout, work, frozen=freeze_vision)
        tower = (float(np.ravel(seen[0])[0]), float(np.ravel(seen[1])[0]))
    again = 1.0 if int(np.ravel(layout.activation_recompute)[0]) == RECOMPUTE.index("full") else 0.0
    forward = [tower[0], *(times[pair][0] for pair in pairs), head[0]]
    backward = [tower[1], *(times[pair][1] for pair in pairs), head[1]]
    recompute = [0.0, *(again * times[pair][0] for pair in pairs), 0.0]
    letters = {pair: chr(ord("a") + index) for index, pair in enumerate(dict.fromkeys(pairs))}
    return LayerProfile.make(
        architecture.name,
        ("E", *(letters[pair] for pair in pairs), "L"),
        forward,
        [b / 2.0 + r for b, r in zip(backward, recompute, strict=True)],
        [b / 2.0 for b in backward],
    )


def in_groups(count: int, devices: int, chunks: int) -> int:
    """Microbatches as interleaved chunks take them: in groups of as many as devices, a last one filled up."""
    return count if chunks == 1 else -(-count // devices) * devices


def makespan_s(profile: LayerProfile, layers: tuple[int, ...], count: int, chunks: int = 1) -> float:
    """1F1B with merged backward over stages of so many transformer layers; embedding and head at the ends [s].

    With several chunks the layers are those of each chunk of a device.
    """
    from rlperf.sim.pipeline import MicrobatchSizes, interleaved_1f1b, round_robin, simulate, stage_costs

    devices, every = len(layers), layers * chunks
    count = in_groups(count, devices, chunks)
    partition = (every[0] + 1, *every[1:-1], every[-1] + 1)
    costs = stage_costs(profile, partition, MicrobatchSizes.equal(count))
    orders = interleaved_1f1b(devices, count, chunks)
    found = simulate(costs, round_robin(devices * chunks, devices), orders, merged=True)
    return float(found.makespan_s)


def least_s(profile: LayerProfile, layers: tuple[int, ...], count: int, chunks: int = 1) -> float:
    """`makespan_s` is no less, whatever the order [s].

    A device waits until the stages before its first have passed a microbatch on, and when its last backward is done
    they still have theirs to do.
    """
    devices, every = len(layers), layers * chunks
    starts = np.cumsum([0, every[0] + 1, *every[1:-1]])
    work = np.add.reduceat(profile.forward_s + profile.backward_input_s + profile.backward_weight_s, starts)
    before = np.cumsum(work)[:devices] - work[:devices]
    loads = in_groups(count, devices, chunks) * work.reshape(chunks, devices).sum(axis=0)
    return float((before + loads).max())


def partitions(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every partition that states the first and last stage and leaves the others equal.

    >>> partitions(12, 3)[:3]
    [(1, 10, 1), (1, 9, 2), (2, 9, 1)]
    """
    if stages == 2:
        return [(first, layers - first) for first in range(1, layers)]
    found = []
    for middle in range(layers // (stages - 2), 0, -1):
        left = layers - middle * (stages - 2)
        if 2 <= left <= 2 * middle + 2:
            found += [(first, *([middle] * (stages - 2)), left - first) for first in range(1, left)]
    return found


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages, or the cost model's own when they do not divide: full ones and the rest on the last.

    Where nothing would be left for the last, the first ones hold one layer more than the others.

    >>> uniform(12, 4), uniform(61, 8), uniform(13, 6)
    ((3, 3, 3, 3), (8, 8, 8, 8, 8, 8, 8, 5), (3, 2, 2, 2, 2, 2))
    """
    full = -(-layers // stages)
    if full * (stages - 1) >= layers:
        least, more = divmod(layers, stages)
        return (*([least + 1] * more), *([least] * (stages - more)))
    return (*([full] * (stages - 1)), layers - full * (stages - 1))


def best_ends(profile: LayerProfile, layers: int, stages: int, count: int, chunks: int = 1) -> StageEnds:
    """The first and last stage whose simulated makespan is shortest; ``layers`` divide into ``chunks``.

    Partitions whose bound is above the shortest found are not simulated: of dozens two or three are.
    """
    batches = max(min(count, MOST_MICROBATCHES), 1)
    parts = layers // chunks
    middle = parts / stages
    near = [p for p in partitions(parts, stages) if max(p[0], p[-1]) <= middle + 2 and min(p) >= max(middle - 6, 1)]
    base = makespan_s(profile, uniform(parts, stages), batches, chunks)
    best, partition = math.inf, uniform(parts, stages)
    for least, one in sorted((least_s(profile, each, batches, chunks), each) for each in near):
        if least > best * ROUNDED:
            break
        best, partition = min((best, partition), (makespan_s(profile, one, batches, chunks), one))
    best = best if near else base
    return StageEnds(partition[0] * chunks, partition[-1] * chunks, best, base)


def stated_ends(
    profile: LayerProfile, layers: int, stages: int, count: int, settings: SettingsValues, chunks: int = 1
) -> StageEnds:
    """The makespan of the stages that a configuration states; their layers divide into ``chunks``."""
    batches = max(min(count, MOST_MICROBATCHES), 1)
    first, last = settings.first_stage_layers or 0, settings.last_stage_layers or 0
    base = makespan_s(profile, uniform(layers // chunks, stages), batches, chunks)
    partition = stages_between(layers // chunks, stages, first // chunks, last // chunks)
    return StageEnds(first, last, makespan_s(profile, partition, batches, chunks) if partition else base, base)


def adaptive_note(
    context: Context, architecture: Architecture, configuration: Configuration, batches: Microbatches, demand: Demand
) -> str:
    """What partition, placement and schedule together could reach, in words; empty where it is not worth a word."""
    from rlperf.plan.pipeline import PipelineProblem, beyond_frameworks, optimize, passes_within
    from rlperf.sim.pipeline import MicrobatchSizes

    pool = configuration.pool("trainer")
    if (profile := _uneven(context, architecture, pool, batches, demand)) is None:
        return ""
    stages, chunks = pool.layout.pipeline_parallel, pool.layout.virtual_pipeline
    count = in_groups(int(np.clip(np.ravel(batches.count)[0], 1, MOST_MICROBATCHES)), stages, chunks)
    if pool.settings.first_stage_layers:
        now = stated_ends(profile, architecture.layers, stages, count, pool.settings, chunks).makespan_s
    else:
        now = makespan_s(profile, uniform(architecture.layers // chunks, stages), count, chunks)
    problem = PipelineProblem(profile, MicrobatchSizes.equal(count), stages)
    if now / problem.bound_s - 1.0 < NOTEWORTHY:
        return ""
    # By passes and not by the clock: the line is the same on a slow machine and on a busy one.
    plan = optimize(problem, passes=passes_within(problem, SEARCH_S), time_limit_s=math.inf, exact_nodes=0)
    gain = now / float(plan.makespan_s) - 1.0
    if gain < NOTEWORTHY:
        return ""
    beyond = beyond_frameworks(plan)
    return f"pipeline: partition, placement and schedule together would make an update {100 * gain:.0f} % faster" + (
        f", but the framework cannot express it ({'; '.join(beyond)})" if beyond else ""
    )


def better_ends(
    context: Context, architecture: Architecture, pool: PoolPlan, batches: Microbatches, demand: Demand
) -> StageEnds | None:
    """The best first and last stage of a trainer's pool, or None where they are not worth it."""
    stages, chunks = pool.layout.pipeline_parallel, pool.layout.virtual_pipeline
    if architecture.layers % chunks or (profile := _uneven(context, architecture, pool, batches, demand)) is None:
        return None
    ends = best_ends(profile, architecture.layers, stages, int(np.ravel(batches.count)[0]), chunks)
    return None if ends.factor > 1.0 - WORTH else ends


def _uneven(
    context: Context, architecture: Architecture, pool: PoolPlan, batches: Microbatches, demand: Demand
) -> LayerProfile | None:
    """Layers of a pool whose first and last stage may hold others than those between; None where none may."""
    trainer = next(t for t in context.trainers if t.backend == pool.settings.backend)
    if pool.layout.pipeline_parallel < 2 or not trainer.calibration.capability.uneven_ends:
        return None
    layout, frozen = Layout.of_values(pool.layout), bool(pool.settings.freeze_vision)
    return layer_profile(architecture, context, trainer, layout, batches, demand, freeze_vision=frozen)
