"""From a length model to the lengths of an rl_step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from rlperf.errors import SpecError
from rlperf.specs.given import as_count
from rlperf.workload.lengths import Float, Int, LengthTable, concat
from rlperf.workload.library import load_model
from rlperf.workload.model import Forecast, LengthModel
from rlperf.workload.multiturn import sample_turns

Drawing = TypeVar("Drawing", bound=Callable[..., Any])


def _of_sound_laws(drawing: Drawing) -> Drawing:
    """A `SpecError` where the numbers of a model have no meaning as parameters: nothing can be drawn from them."""

    @wraps(drawing)
    def sound(*args: Any, **values: Any) -> Any:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            try:
                return drawing(*args, **values)
            except FloatingPointError as error:
                raise SpecError(f"nothing can be drawn from the length model's laws: {error}") from error

    return cast("Drawing", sound)


@_of_sound_laws
def sample_lengths(
    model: LengthModel,
    prompts: int,
    group_size: int | None = None,
    *,
    rl_step: int | None = None,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
    seed: int = 0,
) -> LengthTable:
    """One rl_step of `prompts` x `group_size` responses, cut at `max_response_tokens`.

    z = shift(rl_step) + step_sd s + sqrt(1 - spread) z_prompt, s standard normal, spread the share of rl_steps in
    the variance, z_prompt by the effects per prompt (`prompt_effects`); L = min(ceil(F^-1(Phi(z))), cap).

    >>> sample_lengths(load_model("math"), 4, 2, max_response_tokens=1024).n
    8
    """
    size = as_count(model.group_size if group_size is None else group_size, "group_size")
    for name, cap in (("max_prompt_tokens", max_prompt_tokens), ("max_response_tokens", max_response_tokens)):
        if cap is not None:
            as_count(cap, name)
    rng = np.random.default_rng(as_count(seed, "seed", 0))
    return _sample_step(model, as_count(prompts, "prompts"), size, rl_step, max_prompt_tokens, max_response_tokens, rng)


def predictive_replicates(
    model: LengthModel,
    count: int,
    prompts: int,
    group_size: int | None = None,
    *,
    rl_step: int | None = None,
    max_response_tokens: int | None,
    seed: int,
    uncertain: bool = True,
) -> Iterator[LengthTable]:
    """Predictive replicates of an rl_step; `uncertain` also draws the parameters from their error."""
    for child in np.random.SeedSequence(seed).spawn(count):
        rng = np.random.default_rng(child)
        drawn = model.draw(rng) if uncertain else model
        yield sample_lengths(
            drawn,
            prompts,
            group_size,
            rl_step=rl_step,
            max_response_tokens=max_response_tokens,
            seed=int(rng.integers(2**31)),
        )


def truncated_fraction(model: LengthModel, max_response_tokens: int, *, rl_step: int | None = None) -> float:
    """P(L >= cap) of the uncensored law: the share of responses that this cap cuts off.

    ``rl_step`` : where lengths drift, in which one; None: in all that were recorded
    """
    if model.mixture or model.turns is not None:
        table = sample_lengths(model, 512, rl_step=rl_step, max_response_tokens=max_response_tokens)
        ended = np.bincount(table._trajectory_index()[1], table.truncated)
        return float(np.mean(ended > 0))
    if rl_step is not None and model.drift.trend:
        return _shifted(model, model.drift.shift(rl_step), max_response_tokens)[1]
    return model.laws()[1].survival(max_response_tokens - 1.0)


MOST_CAP = 1 << 20
"""The longest maximum that is proposed [tokens]."""


def cap_that_cuts(model: LengthModel, share: float, *, rl_step: int | None) -> int | None:
    """The least maximum length, in multiples of 1,024 tokens, that cuts at most ``share`` of responses.

    None where even `MOST_CAP` tokens cut more. ``rl_step`` : as in `truncated_fraction`.

    >>> from rlperf.workload import load_model
    >>> cap = cap_that_cuts(load_model("math"), 0.05, rl_step=None)
    >>> truncated_fraction(load_model("math"), cap) <= 0.05 < truncated_fraction(load_model("math"), cap - 1024)
    True
    """
    low, high = 0, MOST_CAP // 1024
    if truncated_fraction(model, MOST_CAP, rl_step=rl_step) > share:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        cut = truncated_fraction(model, middle * 1024, rl_step=rl_step)
        low, high = (low, middle) if cut <= share else (middle, high)
    return high * 1024


def mean_response_tokens(model: LengthModel, max_response_tokens: int | None = None) -> float:
    """E[min(L, cap)] [tokens]; for several turns of all generated tokens of a trajectory."""
    if model.mixture or model.turns is not None:
        table = sample_lengths(model, 512, max_response_tokens=max_response_tokens)
        return float(table.trajectories().response_tokens.mean())
    return model.laws()[1].mean(max_response_tokens) + 0.5


def _sample_step(
    model: LengthModel,
    prompts: int,
    group_size: int,
    rl_step: int | None,
    max_prompt_tokens: int | None,
    max_response_tokens: int | None,
    rng: np.random.Generator,
) -> LengthTable:
    if model.mixture:
        return _sample_mixture(model, prompts, group_size, rl_step, max_prompt_tokens, max_response_tokens, rng)
    prompt_tokens, score = _prompts(model, prompts, max_prompt_tokens, rng)
    group = np.repeat(np.arange(prompts), group_size)
    shift = model.drift.shift(model.drift.centre if rl_step is None else rl_step)
    shift += model.drift.step_sd * float(rng.standard_normal())
    step = 0 if rl_step is None else rl_step
    if model.turns is not None:
        cap = max_response_tokens or model.max_response_tokens
        table = sample_turns(
            model.turns,
            prompt_tokens[group],
            group,
            rng,
            shift=shift,
            max_response_tokens=cap,
            max_context_tokens=model.max_context_tokens,
        )
        return replace(
            table,
            rl_step=np.full(table.n, step),
            max_response_tokens=cap,
            task=model.task,
            source=model.provenance.kind,
        )
    z = _scores(model, score, group_size, shift, rng)
    tokens = np.ceil(model.laws()[1].from_score(z)).astype(np.int64)
    return LengthTable(
        prompt_tokens=prompt_tokens[group],
        response_tokens=np.clip(tokens, 1, max_response_tokens),
        group=group,
        rl_step=np.full(group.size, step),
        turn=np.zeros(group.size, np.int64),
        max_response_tokens=max_response_tokens,
        task=model.task,
        source=model.provenance.kind,
    )


def _prompts(model: LengthModel, n: int, longest: int | None, rng: np.random.Generator) -> tuple[Int, Float]:
    """Prompt lengths [n] and their normal scores; none longer than `longest`, as frameworks drop those."""
    from scipy.special import ndtri

    law = model.laws()[0]
    top = 1.0
    if longest is not None:
        top = float(law.tails(np.array([float(longest)]))[0][0])
        if top < 1e-6:
            raise SpecError(f"{model.task}: no prompt is as short as max_prompt_tokens = {longest}")
    score = np.asarray(ndtri(np.clip(rng.random(n) * top, 1e-12, 1 - 1e-12)))
    tokens = np.clip(np.ceil(law.from_score(score)).astype(np.int64), 1, longest)
    return tokens, score


def _scores(model: LengthModel, prompt: Float, n: int, shift: float, rng: np.random.Generator) -> Float:
    """Normal scores of the responses, [prompts x n]."""
    # The spread over rl_steps is part of the pooled law: it is taken from what the prompts share.
    effects = model.dependence.effects
    moved = min(model.drift.spread, model.dependence.icc)
    left = effects.less(moved / model.dependence.icc) if moved else effects
    return np.asarray(shift + np.sqrt(1.0 - moved) * left.draw(prompt, n, rng)).ravel()


def _sample_mixture(
    model: LengthModel,
    prompts: int,
    group_size: int,
    rl_step: int | None,
    max_prompt_tokens: int | None,
    max_response_tokens: int | None,
    rng: np.random.Generator,
) -> LengthTable:
    shares = np.array([s.share for s in model.mixture])
    exact = shares * prompts
    counts = np.floor(exact).astype(int)
    for i in np.argsort(counts - exact)[: prompts - int(counts.sum())]:
        counts[i] += 1
    parts = []
    for share, count in zip(model.mixture, counts, strict=True):
        if count:
            part = _sample_step(
                load_model(share.task), int(count), group_size, rl_step, max_prompt_tokens, max_response_tokens, rng
            )
            parts.append(as_turns(part).with_cap(max_response_tokens))
    return replace(concat(parts), task=model.task, source=model.provenance.kind)


def as_turns(table: LengthTable) -> LengthTable:
    """A single-turn table with the columns of several turns, so that both can stand in one table."""
    if table.multi_turn:
        return table
    zero = np.zeros(table.n, np.int64)
    return replace(
        table, trajectory=np.arange(table.n), cached_tokens=zero, append_tokens=zero, tool_latency_s=np.zeros(table.n)
    )


def forecast_lengths(
    model: LengthModel, rl_step: int, max_response_tokens: int | None = None, prompts: int | None = None
) -> Forecast:
    """Mean length and truncated share of a later rl_step, with an interval that is honest about few rl_steps.

    The interval is that of one rl_step's mean, with Student's t for few rl_steps.

    Var = step_sd^2 + (slope_se (rl_step - centre))^2 where the slope was looked for + icc / G + (1 - icc) / (G n)
    in normal scores [1]; G prompts of n responses.
    """
    from scipy.special import stdtrit

    cap, prompts = max_response_tokens or model.max_response_tokens, prompts or model.prompts_per_step
    drift, dep = model.drift, model.dependence
    steps = len(drift.rl_steps)
    slope = drift.slope_se * (rl_step - drift.centre) if drift.trend else 0.0
    prompts_part = dep.icc / prompts + (1.0 - dep.icc) / (prompts * model.group_size)
    fitted_part = 1.0 / float(np.sum(1.0 / np.square(drift.location_se))) if steps else 0.0
    spread = np.sqrt(drift.step_sd**2 * (1.0 + 1.0 / max(steps, 1)) + slope**2 + prompts_part + fitted_part)
    freedom = steps - (2 if drift.trend else 1)
    quantile = float(stdtrit(freedom, 0.95)) if 1 <= freedom < 200 else 1.645
    centre = drift.shift(rl_step)
    ends = [centre, centre - quantile * spread, centre + quantile * spread]
    mean, low, high = (_shifted(model, z, cap) for z in ends)
    return Forecast(
        rl_step=rl_step,
        mean_tokens=mean[0],
        mean_tokens_low=low[0],
        mean_tokens_high=high[0],
        truncated_fraction=mean[1],
        truncated_fraction_low=low[1],
        truncated_fraction_high=high[1],
        known=drift.what_is_known(rl_step) if steps else "no recording: the law is not tied to an rl_step",
    )


def _shifted(model: LengthModel, shift: float, cap: int | None) -> tuple[float, float]:
    """(mean tokens, truncated share) of the law moved by a shift in normal scores."""
    from scipy.special import ndtri

    z = np.asarray(ndtri((np.arange(20_000) + 0.5) / 20_000)) + shift
    tokens = np.ceil(model.laws()[1].from_score(z))
    if cap is None or model.turns is not None:
        return float(tokens.mean()), 0.0
    return float(np.minimum(tokens, cap).mean()), float(np.mean(tokens >= cap))


def sample_rl_steps(
    model: LengthModel,
    rl_steps: Iterable[int],
    prompts: int,
    group_size: int,
    *,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
    seed: int = 0,
) -> LengthTable:
    """Several rl_steps of one model in one table, each with its own draw of prompts."""
    numbers = list(rl_steps)
    seeds = np.random.SeedSequence(seed).generate_state(max(len(numbers), 1))
    parts = [
        sample_lengths(
            model,
            prompts,
            group_size,
            rl_step=step,
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            seed=int(own),
        )
        for step, own in zip(numbers, seeds, strict=False)
    ]
    return concat(parts)
