"""Responses to one prompt: three forms of dependence, their likelihood, their fit, and what turns share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from rlperf.workload import LengthModel, load_model, read_recording
from rlperf.workload.dependence import Dependence, Grouped, fit_dependence
from rlperf.workload.effect_likelihood import Scored, log_likelihood
from rlperf.workload.fitting import fit_model
from rlperf.workload.laws import Law
from rlperf.workload.lengths import Float
from rlperf.workload.model import LengthProvenance
from rlperf.workload.multiturn import anova_icc, fit_multi_turn
from rlperf.workload.prompt_effects import PromptEffects
from rlperf.workload.sampling import sample_lengths, sample_rl_steps
from rlperf.workload.turn_links import correlated_effects

from .quick import slow_but

LAW = Law.single("gamma", np.log(2.3), np.log(400))
SPREAD = PromptEffects(0.7, 0.3, spread_sd=0.6, spread_corr=0.7)
ODD = PromptEffects(0.2, 0.3, dof=2.6)
FORMS = pytest.mark.parametrize("effects", [SPREAD, ODD, PromptEffects(0.4, 0.3)], ids=["spread", "odd", "alike"])


def model_of(effects: PromptEffects) -> LengthModel:
    return LengthModel(
        task="test",
        provenance=LengthProvenance(kind="assumed", source="a test"),
        prompt=Law.single("lognormal", 5.5, np.log(0.4)),
        response=LAW,
        dependence=Dependence(
            effects.score_icc(),
            effects.beta,
            0.0,
            0.0,
            effects.spread_sd,
            effects.spread_corr,
            effects.dof,
            None if effects.alike else effects.icc,
        ),
    )


@FORMS
def test_scores_are_normal_whatever_the_form(effects: PromptEffects) -> None:
    """The law of lengths stays what it is, two responses correlate as stated, and y is found again from z."""
    rng = np.random.default_rng(1)
    z = effects.draw(rng.standard_normal(20_000), 2, rng)
    assert stats.kstest(z[:, 0], "norm").statistic < 0.012
    assert np.corrcoef(z.T)[0, 1] == pytest.approx(effects.score_icc(), abs=0.02)
    y = np.array([-3.0, -0.2, 0.0, 1.0, 4.0])
    assert effects.from_normal(effects.to_normal(y))[0] == pytest.approx(y, rel=1e-6, abs=1e-9)


def brute_force(effects: PromptEffects, y: Float, prompt: float) -> float:
    """Density of a group's y by plain sums over a fine grid of effect and spread."""
    grid = np.linspace(-7.0, 7.0, 1401)
    u, w = np.meshgrid(grid, grid[::20], indexing="ij")
    weight = stats.norm.pdf(u, effects.beta * prompt, np.sqrt(1 - effects.beta**2)) * stats.norm.pdf(w)
    t = effects.spread_corr * u + np.sqrt(1 - effects.spread_corr**2) * w
    sd = np.sqrt(1 - effects.icc) * np.exp(effects.spread_sd * (t - effects.spread_sd))
    law = stats.t(effects.dof) if effects.dof else stats.norm()
    density = np.prod([law.pdf((v - np.sqrt(effects.icc) * u) / sd) / sd for v in y], axis=0)
    return float(np.sum(weight * density) * (grid[1] - grid[0]) * (grid[20] - grid[0]))


@FORMS
def test_likelihood_is_the_integral_over_the_effects(effects: PromptEffects) -> None:
    y = np.array([0.9, 1.3, 0.4])
    z = effects.to_normal(y)
    _, log_h = effects.from_normal(z)
    data = Scored(z, np.zeros(3), np.zeros(3, np.int64), np.zeros(1, np.int64), np.array([0.8]), np.inf)
    exact = np.log(brute_force(effects, y, 0.8)) - log_h.sum()
    assert log_likelihood(effects, data)[0] == pytest.approx(exact, abs=2e-3)


@FORMS
def test_likelihood_of_responses_at_the_cap_is_their_probability(effects: PromptEffects) -> None:
    rng = np.random.default_rng(2)
    z = effects.draw(np.full(200_000, 0.8), 3, rng)
    cut = 0.9
    data = Scored(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), np.array([3], np.int64), np.array([0.8]), cut)
    share = float((z > cut).all(axis=1).mean())
    assert np.exp(log_likelihood(effects, data)[0]) == pytest.approx(share, rel=0.04)


@pytest.mark.slow
@FORMS
@pytest.mark.parametrize("cap", slow_but((None, 1500), None))
def test_the_form_and_its_parameters_are_found_again(effects: PromptEffects, cap: int | None) -> None:
    truth = model_of(effects)
    table = sample_rl_steps(truth, [0, 1, 2], 150, 8, max_response_tokens=cap, seed=3)
    ends = table.truncated
    x = np.where(ends, (cap or 0) - 1.0, np.maximum(table.response_tokens - 0.5, 0.5))
    index, count = table.group_index()
    prompts = truth.laws()[0].score(table.prompt_tokens[::8] - 0.5)
    data = Grouped.build(x, ends, index, prompts, None if cap is None else cap - 1.0)
    assert count == 450
    found = fit_dependence(LAW, data, odd=True)
    assert found.effects.alike == effects.alike
    assert (found.dof > 0, found.spread_sd > 0) == (effects.dof > 0, effects.spread_sd > 0)
    assert abs(found.icc - effects.score_icc()) < 4.0 * found.icc_se
    assert abs(found.beta - effects.beta) < 4.0 * found.beta_se
    if effects.spread_sd:
        assert abs(found.spread_sd - effects.spread_sd) < 4.0 * found.spread_sd_se
        assert abs(found.spread_corr - effects.spread_corr) < 4.0 * found.spread_corr_se
        assert 0.0 < found.spread_sd_se < 0.2
    if effects.dof:
        assert abs(found.dof - effects.dof) < 4.0 * found.dof_se
        assert 0.0 < found.dof_se < 1.5
    again = fit_model(table, like=truth).dependence
    assert again.effects.alike == effects.alike
    assert abs(again.icc - effects.score_icc()) < 4.0 * again.icc_se


@pytest.mark.slow
def test_alike_is_seldom_taken_for_another_form() -> None:
    forms = []
    for seed in range(8):
        table = sample_lengths(model_of(PromptEffects(0.4)), 80, 8, seed=seed)
        data = Grouped.build(table.response_tokens - 0.5, table.truncated, table.group, np.zeros(80), None)
        forms.append(fit_dependence(LAW, data).effects.alike)
    assert sum(forms) >= 7


def test_short_lengths_on_one_token_make_no_spread() -> None:
    """Groups in which all say the same few tokens are equal by rounding, not by a spread that goes to zero."""
    short = model_of(PromptEffects(0.4)).model_copy(update={"response": Law.single("gamma", np.log(4.0), np.log(0.6))})
    table = sample_lengths(short, 300, 8, seed=4)
    data = Grouped.build(table.response_tokens - 0.5, table.truncated, table.group, np.zeros(300), None)
    assert fit_dependence(short.laws()[1], data).spread_sd < 0.3


def test_the_share_of_rl_steps_comes_out_of_the_prompts() -> None:
    left = PromptEffects(0.5).less(0.4)
    assert left.icc == pytest.approx((0.5 - 0.2) / (1.0 - 0.2))
    assert ODD.less(1.0).icc == 0.0
    drawn = model_of(ODD).dependence.draw(np.random.default_rng(0))
    assert drawn == model_of(ODD).dependence  # its icc is stated without an error
    moved = replace(drawn, icc_se=0.05).draw(np.random.default_rng(0))
    assert moved.effects.score_icc() == pytest.approx(moved.icc, rel=0.03)


@pytest.mark.slow
def test_turns_that_share_prompts_and_trajectories() -> None:
    """Prompt effects that resemble each other, own parts that carry on and forms per turn are found again."""
    preset = load_model("searching")
    assert preset.turns is not None
    forms = ((0.6, -0.2, 0.0), (0.4, 0.0, 0.0), (0.0, 0.0, 3.0), (0.0, 0.0, 0.0))
    turns = replace(preset.turns, effect_corr=(0.4, 0.5, 0.1), carried=(0.4, 0.2, 0.3), forms=forms, later=None)
    truth = preset.model_copy(update={"turns": turns})
    table = sample_rl_steps(truth, [0, 1], 160, 8, max_response_tokens=3000, seed=7)
    found, _ = fit_multi_turn(table)
    assert found.effect_corr == pytest.approx((0.4, 0.5, 0.1), abs=0.15)
    assert found.carried == pytest.approx((0.4, 0.2, 0.3), abs=0.1)
    assert found.forms[0][0] == pytest.approx(0.6, abs=0.15)
    assert found.forms[2][2] == pytest.approx(3.0, abs=1.2)


@pytest.mark.slow
def test_turns_that_share_nothing_are_found_to() -> None:
    preset = load_model("searching")
    assert preset.turns is not None
    independent = replace(preset.turns, effect_corr=(0.0,) * 3, carried=(0.0,) * 3)
    alone, _ = fit_multi_turn(
        sample_rl_steps(
            preset.model_copy(update={"turns": independent}), [0, 1, 2], 256, 8, max_response_tokens=3000, seed=8
        )
    )
    assert np.abs(alone.effect_corr).max() < 0.2
    assert np.abs(alone.carried).max() < 0.1


def test_effects_whose_correlations_contradict_each_other_stay_normal() -> None:
    drawn = correlated_effects((0.9, 0.9, -0.9), 20_000, np.random.default_rng(0)).effect
    assert drawn.std(axis=1) == pytest.approx(1.0, abs=0.02)
    exact = correlated_effects((0.3, 0.5, 0.0), 50_000, np.random.default_rng(0)).effect
    assert np.corrcoef(exact)[(0, 1, 0), (1, 2, 2)] == pytest.approx((0.3, 0.5, 0.0), abs=0.02)


@pytest.mark.slow
@pytest.mark.data
def test_recordings_ask_for_the_forms(measured_data: Path) -> None:
    """deepcoder's long prompts spread more, and no group is all at the cap."""
    coder = read_recording(measured_data / "polytrace" / "deepcoder_14b").lengths
    model = fit_model(coder)
    assert model.dependence.spread_sd > 0.3
    assert model.dependence.spread_corr > 0.3
    sampled = sample_lengths(model, 4000, 8, max_response_tokens=16000, seed=0)
    plain = model.model_copy(update={"dependence": Dependence(model.dependence.icc, model.dependence.beta, 0.0, 0.0)})
    alike = sample_lengths(plain, 4000, 8, max_response_tokens=16000, seed=0)

    def all_capped(tokens: Float) -> float:
        return float((tokens.reshape(-1, 8) >= 16000).all(axis=1).mean())

    assert all_capped(coder.response_tokens) == 0.0  # of 48 groups
    assert all_capped(sampled.response_tokens) < 0.7 * all_capped(alike.response_tokens)
    dapo = fit_model(read_recording(measured_data / "polytrace" / "dapo_32b").lengths)
    assert dapo.dependence.spread_sd > 0.05
    assert 0.05 < dapo.dependence.icc < 0.13
    index, _ = coder.group_index()
    assert model.dependence.icc == pytest.approx(anova_icc(coder.response_tokens.astype(float), index), abs=0.06)
