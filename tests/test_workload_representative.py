"""A few rl_steps that stand for many."""

import numpy as np
import pytest

from rlperf.plan.question.demand import LengthSource, batches
from rlperf.specs.job import Task
from rlperf.workload import load_model
from rlperf.workload.lengths import LengthTable
from rlperf.workload.representative import representative
from rlperf.workload.sampling import sample_lengths


def draws(preset: str, first: int, count: int = 32) -> list[LengthTable]:
    model = load_model(preset)
    return [sample_lengths(model, 64, 8, max_response_tokens=32_768, seed=first + k) for k in range(count)]


def figures(tables: list[LengthTable]) -> np.ndarray:
    """Mean and longest response [tokens], mean over rl_steps."""
    responses = [table.trajectories().response_tokens for table in tables]
    return np.mean([(tokens.mean(), tokens.max()) for tokens in responses], axis=0)


@pytest.mark.parametrize("preset", ["math", "searching", "image"])
def test_chosen_rl_steps_tell_the_means_of_all_with_two_thirds_of_the_noise_of_as_many(preset: str) -> None:
    chosen, plain = [], []
    for first in range(0, 16_000, 1000):
        tables = draws(preset, first)
        chosen.append(figures([tables[k] for k in representative(tables, 4)]))
        plain.append(figures(tables[:4]))
    assert np.all(np.std(chosen, axis=0) < 2.0 / 3.0 * np.std(plain, axis=0))
    assert np.mean(chosen, axis=0) == pytest.approx(np.mean(plain, axis=0), rel=0.1)


@pytest.mark.parametrize("preset", ["searching", "tool_use"])
def test_chosen_rl_steps_wait_as_long_for_tools_as_all(preset: str) -> None:
    """Chosen by tokens alone they are further off than the first four: half the prompts took 5.6 % longer by that."""
    off = []
    for first in range(0, 8_000, 1000):
        tables = draws(preset, first)
        longest = np.array([np.max(table.trajectories().tool_latency_s) for table in tables])
        means = [longest[chosen].mean() for chosen in (representative(tables, 4), np.arange(4))]
        off.append(np.array(means) / longest.mean() - 1.0)
    chosen, plain = np.sqrt(np.mean(np.square(off), axis=0))
    assert chosen < 0.5 * plain


def test_where_there_are_no_more_all_are_taken() -> None:
    assert representative(draws("math", 0, 3), 4).tolist() == [0, 1, 2]
    alike = draws("math", 0, 1) * 6
    assert len(set(representative(alike, 4).tolist())) == 4


def source(**other: object) -> LengthSource:
    stated = {"name": "a", "workload": "searching", "prompts_per_step": 64, "group_size": 8, "mini_batch": 64}
    return LengthSource.open(Task.model_validate({**stated, "max_response_tokens": [1024, 8192], **other}))


def test_a_lower_maximum_cuts_the_same_rl_steps() -> None:
    """Another choice would make a lighter rl_step longer by chance."""
    asked = source()
    low, high = (asked.demand(batch, None, 0) for batch in batches(asked.task))
    for short, full in zip(low.trajectories, high.trajectories, strict=True):
        assert np.all(short.response_tokens <= full.response_tokens)
    assert len(low.tables) == 4


def test_half_the_prompts_are_not_slower_by_chance() -> None:
    """By four draws the longest of 256 responses was 3,040 tokens, of 512 only 1,710."""
    longest = []
    for prompts in (32, 64, 128):
        asked = source(prompts_per_step=prompts, mini_batch=prompts)
        tables = asked.demand(batches(asked.task)[1], None, 0).trajectories
        longest.append(np.mean([table.response_tokens.max() for table in tables]))
    assert longest == sorted(longest)
