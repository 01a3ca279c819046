"""How far a trainer is from the data sheet's peak: FLOP counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

import rlperf
from rlperf.api import ask
from rlperf.cost.parameters import active_parameters
from rlperf.cost.roofline import sheet_flop_per_s
from rlperf.plan.predict import evaluate_job
from rlperf.specs.job import Job
from tests.test_plan_end_to_end import SMALL


@pytest.mark.parametrize(("rank", "backwards"), [(None, 2.0), (16, 1.0)])
def test_the_speed_of_light_of_training_counts_pairs_and_the_gradients_that_are_made(
    rank: int | None, backwards: float
) -> None:
    """2 N per token and 4 x heads x width per visible pair and layer forwards; frozen products go backwards once."""
    job = Job.model_validate({**SMALL, "pools": [{"role": "trainer", "settings": {"lora_rank": rank}}]})
    found, arch = rlperf.predict_job(job), rlperf.load_architecture(str(SMALL["architecture"]))
    evaluation, _ = evaluate_job(ask(job).context)
    lengths = np.concatenate([evaluation.demand.lengths(k) for k in range(len(evaluation.demand.tables))])
    share = len(evaluation.demand.tables) * evaluation.configuration.pool("trainer").devices
    rows = {row.operator: row.seconds * row.speed_of_light for row in found.operators if row.role == "trainer"}
    peak = sheet_flop_per_s(ask(job).context.hardware, "bf16")
    pairs = 4.0 * arch.heads * arch.head_dim * arch.layers * (lengths * (lengths + 1.0) / 2.0).sum() / peak / share
    products = rows["forward"] - pairs
    assert products == pytest.approx(2.0 * active_parameters(arch) * lengths.sum() / peak / share)
    assert rows["backward"] == pytest.approx(backwards * products + 2.0 * pairs)
