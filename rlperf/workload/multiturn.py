"""Trajectories of several turns: how many, how long each, what the tools append, how long they take, what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlperf.errors import SpecError
from rlperf.workload.dependence import Grouped, draw_law, fit_dependence, law_covariance
from rlperf.workload.laws import Law
from rlperf.workload.lengths import Float, Int, LengthTable, Mask
from rlperf.workload.prompt_effects import PromptEffects
from rlperf.workload.select import TriedLaw, choose_law
from rlperf.workload.stages import law_in_seconds
from rlperf.workload.turn_links import correlated_effects, link_turns

_TOOL_FAMILIES = (("lognormal",), ("gamma",), ("lognormal",) * 2, ("lognormal",) * 3)
_LEAST_LATER = 200


@dataclass(frozen=True)
class MultiTurn:
    """Turns of a trajectory, for one task.

    turn_probability[k]  P(k + 1 turns)
    turn_icc             intra-class correlation of the number of turns within a prompt, in normal scores [1]
    first, middle, last  laws of the generated tokens of the first turn, of a later one, and of the one that ends it
    later                law of the third turn and those after it, where the trajectory goes on; None: as `middle`
    generation_icc       of the generated tokens of the first, a later and the last turn: share of the prompt in the
                         variance of y in `prompt_effects` [1]
    effect_corr          correlations of their prompt effects: first with later, later with last, first with last [1]
    forms                (spread_sd, spread_corr, dof) as in `prompt_effects`, of the first, a later, the last turn and
                         `later`
    carried              correlation of a trajectory's own part with that of the turn before [1]: of the second turn, of
                         a later one, and of the last one after two or more
    later_icc            as generation_icc, of `later`, which shares the effect of `middle`
    append               law of the tokens that the tools' answer and the chat template add after a turn
    latency_s            laws of the time [s] until the tools have answered, of turn 0, 1, ... (the last one repeats)
    cached_start         share of the first prompt that the engine finds cached (system prompt, siblings of the group)
    length_latency       correlation in normal scores of a turn's generated tokens with the tools' time after it [1]:
                         short turns end in one burst and queue at the tool, long ones find it idle
    max_turn_tokens      cap on one turn's generated tokens; None: none
    covariances          [p, p] of the parameters of first, middle, last and, if any, later; empty: not known
    """

    turn_probability: tuple[float, ...]
    turn_icc: float
    first: Law
    middle: Law
    last: Law
    generation_icc: tuple[float, float, float]
    append: Law
    latency_s: tuple[Law, ...]
    cached_start: float = 0.0
    max_turn_tokens: int | None = None
    later: Law | None = None
    later_icc: float = 0.0
    length_latency: float = 0.0
    effect_corr: tuple[float, float, float] = (0.0, 0.0, 0.0)
    forms: tuple[tuple[float, float, float], ...] = ((0.0, 0.0, 0.0),) * 4
    carried: tuple[float, float, float] = (0.0, 0.0, 0.0)
    covariances: tuple[tuple[tuple[float, ...], ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.turn_probability or abs(sum(self.turn_probability) - 1.0) > 1e-6 or min(self.turn_probability) < 0:
            raise SpecError("turn_probability must be shares that sum to 1")
        if not self.latency_s:
            raise SpecError("latency_s needs at least one law")
        shares = {"turn_icc": (self.turn_icc,), "generation_icc": self.generation_icc, "later_icc": (self.later_icc,)}
        correlations = {
            "length_latency": (self.length_latency,), "effect_corr": self.effect_corr, "carried": self.carried,
        }  # fmt: skip
        for least, stated in ((0.0, shares), (-1.0, correlations)):
            for name, values in stated.items():
                if not all(least <= value <= 1.0 for value in values):
                    raise SpecError(f"{name} must lie between {least:g} and 1")

    @property
    def mean_turns(self) -> float:
        return float(np.dot(np.arange(1, len(self.turn_probability) + 1), self.turn_probability))

    def effects(self, kind: int) -> PromptEffects:
        """Effects per prompt of the first (0), a later (1), the last (2) turn and those of law `later` (3)."""
        icc = (*self.generation_icc, self.later_icc)[kind]
        return PromptEffects(icc, 0.0, *self.forms[kind])

    def draw(self, trajectories: float, group_size: int, rng: np.random.Generator) -> MultiTurn:
        """Turns with parameters drawn from their error: the laws from theirs, the shares from a Dirichlet law.

        The Dirichlet law counts correlated trajectories as what they tell: trajectories / (1 + (group_size - 1) icc).
        """
        if not self.covariances:
            return self
        laws = [law for law in (self.first, self.middle, self.last, self.later) if law is not None]
        drawn = [draw_law(law, np.array(c), rng) for law, c in zip(laws, self.covariances, strict=True)]
        told = max(trajectories / (1.0 + (group_size - 1) * self.turn_icc), 1.0)
        weights = rng.standard_gamma(np.array(self.turn_probability) * told)
        return replace(
            self,
            turn_probability=tuple(float(w) for w in weights / weights.sum()),
            first=drawn[0],
            middle=drawn[1],
            last=drawn[2],
            later=drawn[3] if self.later is not None else None,
        )


def fit_multi_turn(table: LengthTable) -> tuple[MultiTurn, tuple[TriedLaw, ...]]:
    """Fit the turns of a recording; the comparison of families is that of the first turn's law."""
    if table.trajectory is None or table.append_tokens is None or table.tool_latency_s is None:
        lacks = [name for name in ("trajectory", "append_tokens", "tool_latency_s") if getattr(table, name) is None]
        raise SpecError(f"a multi-turn law needs a recording with turns: without {', '.join(lacks)}")
    first_rows, index = table._trajectory_index()
    turns = np.bincount(index)
    last_rows = table.turn == turns[index] - 1
    start = table.turn == 0
    per_turn_cap = _turn_cap(table.response_tokens)
    late = (table.turn >= 2) & ~last_rows
    apart = np.count_nonzero(late) >= _LEAST_LATER
    kinds = [start & ~last_rows, ~start & ~last_rows & ~(late & apart), last_rows, *([late] if apart else [])]
    fits = [
        _turn_law(table, rows if np.count_nonzero(rows) >= 30 else np.ones(table.n, bool), per_turn_cap)
        for rows in kinds
    ]
    group, _ = table.where(first_rows).group_index()
    scores, spread_sd = np.empty(table.n), np.empty(table.n)
    for rows, fit in zip(kinds, fits, strict=True):
        scores[rows] = fit.law.score(table.response_tokens[rows] - 0.5)
        spread_sd[rows] = fit.effects.spread_sd
    kind = np.where(last_rows, 2, np.where(late & apart, 3, np.minimum(table.turn, 1)))
    links = link_turns(scores, spread_sd, kind, table.turn, index, group[index])
    counts = np.bincount(turns)[1:]
    between = ~last_rows
    appended = table.append_tokens[between & (table.append_tokens > 0)]
    append = _positive_law(appended - 0.5) if appended.size >= 8 else Law.single("lognormal", 0.0, -1.0)
    cached = 0.0
    if table.cached_tokens is not None and start.any():
        cached = float(table.cached_tokens[start].sum() / table.prompt_tokens[start].sum())
    model = MultiTurn(
        turn_probability=tuple(float(c) for c in counts / counts.sum()),
        turn_icc=_ordinal_icc(turns, group),
        first=fits[0].law,
        middle=fits[1].law,
        last=fits[2].law,
        generation_icc=(fits[0].effects.icc, fits[1].effects.icc, fits[2].effects.icc),
        append=append,
        latency_s=_latency_laws(table, between),
        cached_start=cached,
        max_turn_tokens=per_turn_cap,
        later=fits[3].law if apart else None,
        later_icc=fits[3].effects.icc if apart else 0.0,
        length_latency=_length_latency(table, between),
        effect_corr=links.effect_corr,
        forms=tuple(
            (f.effects.spread_sd, f.effects.spread_corr, f.effects.dof)
            for f in (*fits[:3], fits[-1] if apart else fits[1])
        ),
        carried=links.carried,
        covariances=tuple(f.covariance for f in fits),
    )
    return model, fits[0].candidates


def _turn_cap(tokens: Int) -> int | None:
    from rlperf.workload.caps import infer_cap

    return infer_cap(tokens)


@dataclass(frozen=True)
class _TurnFit:
    law: Law
    effects: PromptEffects
    covariance: tuple[tuple[float, ...], ...]
    candidates: tuple[TriedLaw, ...]


def _turn_law(table: LengthTable, rows: Mask, cap: int | None) -> _TurnFit:
    part = table.where(rows)
    censored = np.zeros(part.n, bool) if cap is None else part.response_tokens >= cap
    x = np.where(censored, (cap or 0) - 1.0, np.maximum(part.response_tokens - 0.5, 0.5))
    choice = choose_law(x, np.asarray(censored, np.bool_))
    law = choice.law
    group, count = part.group_index()
    limit = None if cap is None else cap - 1.0
    data = Grouped.build(x, np.asarray(censored, np.bool_), group, np.zeros(count), limit)
    covariance = tuple(tuple(float(v) for v in row) for row in law_covariance(law, data))
    return _TurnFit(law, fit_dependence(law, data, odd=True).effects, covariance, choice.candidates)


def _length_latency(table: LengthTable, between: Mask) -> float:
    """Rank correlation, as one of normal scores, of a turn's tokens with the tools' time after it, pooled over turns.

    r = 2 sin(pi r_s / 6), r_s Spearman's (Kruskal 1958, J. Am. Stat. Assoc. 53, 814).
    """
    from scipy.stats import rankdata

    assert table.tool_latency_s is not None
    answered = between & (table.tool_latency_s > 0)
    total, count = 0.0, 0
    for k in np.unique(table.turn[answered]):
        rows = answered & (table.turn == k)
        ranks = [rankdata(v[rows]) for v in (table.response_tokens, table.tool_latency_s)]
        size = int(np.count_nonzero(rows))
        if size < 30 or min(np.ptp(r) for r in ranks) == 0:
            continue
        total, count = total + size * float(np.corrcoef(ranks[0], ranks[1])[0, 1]), count + size
    return 2.0 * float(np.sin(np.pi / 6.0 * total / count)) if count else 0.0


def _positive_law(x: Float) -> Law:
    return choose_law(x, np.zeros(x.size, bool), families=_TOOL_FAMILIES, smallest_sigma=0.01, piled=True).law


def _latency_laws(table: LengthTable, between: Mask) -> tuple[Law, ...]:
    """One law per turn while a turn has at least 50 answers; the rest share the last."""
    assert table.tool_latency_s is not None
    laws: list[Law] = []
    answered = between & (table.tool_latency_s > 0)
    latest = int(table.turn.max()) if table.n else 0
    for k in range(latest + 1):
        here = answered & (table.turn == k)
        enough = np.count_nonzero(answered & (table.turn == k + 1)) >= 50
        if not enough:
            here = answered & (table.turn >= k)
        if np.count_nonzero(here) >= 8:
            laws.append(law_in_seconds(_positive_law(table.tool_latency_s[here] * 1e3)))
        if not enough:
            break
    return tuple(laws) or (law_in_seconds(Law.single("lognormal", 0.0, -1.0)),)


def _ordinal_icc(turns: Int, group: Int) -> float:
    """Latent intra-class correlation of a count: that whose thresholded normals have the recorded ANOVA correlation."""
    recorded = anova_icc(turns.astype(np.float64), group)
    if recorded <= 0.0:
        return 0.0
    edges = np.quantile(
        np.random.default_rng(1).standard_normal(200_001), np.cumsum(np.bincount(turns)[1:]) / turns.size
    )
    rng = np.random.default_rng(2)
    shared, own = rng.standard_normal((4000, 1)), rng.standard_normal((4000, 8))
    low, high = 0.0, 0.995
    for _ in range(12):
        middle = 0.5 * (low + high)
        z = np.sqrt(middle) * shared + np.sqrt(1 - middle) * own
        value = np.searchsorted(edges[:-1], z.ravel())
        low, high = (
            (middle, high)
            if anova_icc(value.astype(float), np.repeat(np.arange(4000), 8)) < recorded
            else (low, middle)
        )
    return 0.5 * (low + high)


def anova_icc(values: Float, group: Int) -> float:
    """One-way intra-class correlation (Shrout and Fleiss 1979, ICC(1,1)), unequal groups; 0 where undefined."""
    group = np.unique(group, return_inverse=True)[1].reshape(-1)
    n = np.bincount(group).astype(np.float64)
    k, total = n.size, float(n.sum())
    if k < 2 or total <= k:
        return 0.0
    means = np.bincount(group, values) / n
    between = float(np.sum(n * (means - values.mean()) ** 2)) / (k - 1)
    within = float(np.sum((values - means[group]) ** 2)) / (total - k)
    typical = (total - float((n**2).sum()) / total) / (k - 1)
    denominator = between + (typical - 1) * within
    return (between - within) / denominator if denominator > 0 else 0.0


def sample_turns(
    model: MultiTurn,
    prompt_tokens: Int,
    group: Int,
    rng: np.random.Generator,
    *,
    shift: float,
    max_response_tokens: int | None,
    max_context_tokens: int | None,
) -> LengthTable:
    """Turns of trajectories with given prompts [m] and groups [m].

    A trajectory ends early where its context would outgrow `max_context_tokens`; a turn at `max_turn_tokens` or at
    `max_response_tokens`, whichever is smaller.
    """
    m = prompt_tokens.size
    groups = int(group.max()) + 1 if m else 0
    turns = _draw_turns(model, group, groups, rng)
    prompts = correlated_effects(model.effect_corr, groups, rng)
    own = np.zeros(m)
    context = prompt_tokens.astype(np.int64)
    cached = np.floor(context * model.cached_start).astype(np.int64)
    alive = np.arange(m)
    caps = [c for c in (model.max_turn_tokens, max_response_tokens) if c is not None]
    rows: list[tuple[Int, Int, Int, Int, Float, int, Int]] = []
    for k in range(int(turns.max()) if m else 0):
        last = turns[alive] == k + 1
        kept = 0.0 if k == 0 else np.where(last, model.carried[2] if k > 1 else 0.0, model.carried[min(k, 2) - 1])
        own[alive] = kept * own[alive] + np.sqrt(1.0 - kept**2) * rng.standard_normal(alive.size)
        law, effects, kind = _ongoing(model, k)
        going_on, ending = prompts.of(kind, group[alive]), prompts.of(2, group[alive])
        score = np.where(last, model.effects(2).scores(*ending, own[alive]), effects.scores(*going_on, own[alive]))
        tokens = np.where(last, model.last.from_score(shift + score), law.from_score(shift + score))
        generated = np.maximum(np.ceil(tokens).astype(np.int64), 1)
        if caps:
            generated = np.minimum(generated, min(caps))
        if max_context_tokens is not None:
            room = max_context_tokens - context[alive]
            last = last | (generated >= room)
            generated = np.clip(generated, 1, np.maximum(room, 1))
        append = np.ceil(model.append.from_score(rng.standard_normal(alive.size))).astype(np.int64)
        waiting = model.length_latency * score + np.sqrt(1.0 - model.length_latency**2) * rng.standard_normal(
            alive.size
        )
        latency = model.latency_s[min(k, len(model.latency_s) - 1)].from_score(waiting)
        after = context[alive] + generated + append
        if max_context_tokens is not None:
            last = last | (after >= max_context_tokens)
        append, latency = np.where(last, 0, append), np.where(last, 0.0, latency)
        rows.append((alive, context[alive], generated, cached[alive], latency, k, append))
        cached[alive] = np.maximum(context[alive] + generated - 1, 0)
        context[alive] += generated + append
        alive = alive[~last]
        if not alive.size:
            break
    return _assemble(rows, group)


def _ongoing(model: MultiTurn, turn: int) -> tuple[Law, PromptEffects, int]:
    """(law, effects, which prompt effect) of a turn after which the trajectory goes on."""
    if turn == 0:
        return model.first, model.effects(0), 0
    if turn >= 2 and model.later is not None:
        return model.later, model.effects(3), 1
    return model.middle, model.effects(1), 1


def _draw_turns(model: MultiTurn, group: Int, groups: int, rng: np.random.Generator) -> Int:
    from scipy.special import ndtr

    z = np.sqrt(model.turn_icc) * rng.standard_normal(groups)[group]
    z = z + np.sqrt(1.0 - model.turn_icc) * rng.standard_normal(group.size)
    edges = np.cumsum(model.turn_probability)[:-1]
    return np.asarray(np.searchsorted(edges, ndtr(z), side="right") + 1, np.int64)


def _assemble(rows: Sequence[tuple[Int, Int, Int, Int, Float, int, Int]], group: Int) -> LengthTable:
    trajectory = np.concatenate([r[0] for r in rows])
    turn = np.concatenate([np.full(r[0].size, r[5], np.int64) for r in rows])
    order = np.lexsort((turn, trajectory))

    def column(i: int) -> Int:
        return np.concatenate([np.asarray(r[i]) for r in rows])[order]

    return LengthTable(
        prompt_tokens=column(1),
        response_tokens=column(2),
        group=group[trajectory[order]],
        rl_step=np.zeros(trajectory.size, np.int64),
        turn=turn[order],
        trajectory=trajectory[order],
        cached_tokens=column(3),
        append_tokens=column(6),
        tool_latency_s=np.concatenate([r[4] for r in rows])[order],
    )
