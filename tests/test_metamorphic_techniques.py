"""The studies of techniques and of large jobs: every rule asks for what can be planned, and none is tried for ever."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from rlperf.api import ask
from rlperf.errors import SpecError
from rlperf.specs.job import Job
from studies.metamorphic import run
from studies.metamorphic.large import RULES as LARGE
from studies.metamorphic.run import IN_VAIN, Data, Pair, pairs
from studies.metamorphic.techniques import RULES

from .quick import slow_but


def test_both_jobs_of_every_rule_can_be_asked() -> None:
    """A first job may be refused (no key for it), never all of a rule; a second is refused with its first alone."""
    for rule in (*RULES, *LARGE):
        told = Counter[bool]()
        for seed in range(3):
            pair = rule(Random(seed))
            asked = [_asked(data) for data in (pair.first, pair.second)]
            assert asked[1] or not asked[0], pair
            assert pair.first != pair.second or pair.words, pair
            told[asked[0]] += 1
        assert told[True], rule


def _asked(data: Data) -> bool:
    try:
        ask(Job.model_validate(data), to_plan=True)
    except SpecError:
        return False
    return True


def test_what_a_framework_cannot_be_asked_for_has_no_cheapest_cluster() -> None:
    """The study ended there with an error after some 400 pairs."""
    asked = {**run.job(Random(0)), "framework": "rlinf", "algorithm": "dapo", "modes": ["colocated"], "nodes": 1}
    assert run.cheapest(asked, ["dgx_h100=2.0"]) is None


def test_a_rule_whose_jobs_nothing_fits_is_named_after_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "objective", lambda data, change=None: data["takes"])
    tried = []

    def rule(random: Random) -> Pair:
        tried.append(random)
        takes = 1.0 if len(tried) == IN_VAIN - 1 else None  # the count begins anew after one that fits
        return Pair("never", "", {"takes": takes}, {"takes": takes})

    with pytest.raises(AssertionError, match=rf"never: none of {IN_VAIN} first jobs in a row"):
        list(pairs(2, rules=(rule,)))
    assert len(tried) == 2 * IN_VAIN - 1


@pytest.mark.parametrize("number", slow_but(range(len(RULES + LARGE))))
def test_no_pair_of_the_study_is_violated(number: int) -> None:
    """One pair of each rule; ``python -m studies.metamorphic.techniques`` goes through as many as are asked for."""
    rule = (*RULES, *LARGE)[number]
    assert [pair for pair, excess in pairs(1, 7, (rule,)) if not pair.holds(excess)] == []
