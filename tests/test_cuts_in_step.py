"""Ranks that meet in every layer wait for the fullest microbatch among them; those of a bin or of one length do not."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from rlperf.cost.packing import slowest_in_step
from rlperf.layout import Layout
from rlperf.sim.rl_step.cuts import CutLengths, Cuts, ranks_in_step
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.rl_calibration import load_framework_calibration
from tests.test_shared_prefix import demand_of

FRAMEWORK = load_framework_calibration("verl", "fsdp2")
LENGTHS = [500, 900, 1200, 2000, 2500, 4000, 6000, 8000]


def cuts(layout: Layout, **changes: object) -> Cuts:
    """By count, packed, every rank in step with every other."""
    one = Cuts(FRAMEWORK, layout, 1, np.array([0]), True, False, in_step=ranks_in_step(layout, 3))
    return replace(one, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def demand() -> Demand:
    return demand_of(500, LENGTHS, 16)


@pytest.mark.parametrize(("each", "ranks"), [(1, 1), (1, 3), (2, 2), (3, 2)])
@pytest.mark.parametrize("packing", [True, False])
def test_the_slowest_of_ranks_is_the_mean_over_all_orders(each: int, ranks: int, packing: bool) -> None:
    lengths = np.array([1.0, 5.0, 2.0, 7.0, 3.0, 4.0])
    groups = lengths.reshape(-1, each)
    sizes = groups.sum(axis=1) if packing else each * groups.max(axis=1)
    slowest = [max(order[:ranks]) for order in permutations(sizes.tolist())]
    assert slowest_in_step(lengths, each, ranks, packing=packing)[0] == pytest.approx(np.mean(slowest))


def test_who_is_in_step() -> None:
    layout = Layout.of(
        data_parallel=[8, 8, 8, 8, 8], zero_stage=[3, 3, 1, 1, 2], shard_size=[0, 4, 0, 0, 0],
        tensor_parallel=[1, 1, 2, 2, 1], expert_parallel=[1, 1, 8, 1, 1],
    )  # fmt: skip
    assert ranks_in_step(layout, 3).tolist() == [8, 4, 4, 1, 1]
    assert ranks_in_step(layout, 2).tolist() == [8, 4, 4, 1, 8]


def test_ranks_in_step_wait_in_closed_form_as_in_events(demand: Demand) -> None:
    layout = Layout.of(data_parallel=[8], microbatch=[2], zero_stage=[3])
    waits, alone = cuts(layout), cuts(layout, in_step=1)
    found, free = waits.closed(demand), alone.closed(demand)
    assert found.tokens.item() > 1.5 * free.tokens.item()
    assert found.count.item() == free.count.item()
    events = CutLengths().of(waits, demand)
    assert waits.closed(demand).tokens.item() == pytest.approx(events.tokens.item(), rel=0.03)
    assert waits.closed(demand).sum_squares.item() == pytest.approx(events.sum_squares.item(), rel=0.03)


def test_nobody_waits_for_bins_or_for_what_is_padded_alike(demand: Demand) -> None:
    layout = Layout.of(data_parallel=[8], microbatch=[2], zero_stage=[3])
    training = FRAMEWORK.training.model_copy(update={"pads": "limit"})
    limited = FRAMEWORK.model_copy(update={"training": training})
    for one in (
        cuts(layout, by_budget=True, token_budget=np.array([16_384])),
        cuts(layout, framework=limited, packing=False),
    ):
        assert one.closed(demand).tokens == replace(one, in_step=1).closed(demand).tokens
