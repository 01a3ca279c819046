"""Layouts, settings and lengths in words."""

from __future__ import annotations

from collections.abc import Iterable

from rlperf.plan.question.pool import PoolPlan, ResponseTokens, ScorerPlan, TaskTokens
from rlperf.specs.pool import ATTRIBUTES, LayoutValues

SHORT = {each.name: each.short for each in ATTRIBUTES if each.short and each.name != "data_parallel"}
"""Degrees that are named only where they are above 1."""


USUAL = {each.name: each.default for each in ATTRIBUTES if each.part == "settings"} | {"cuda_graphs": True}
"""Settings that are named only where they differ from this."""


def layout_words(layout: LayoutValues) -> str:
    """Degrees of a layout in one line.

    >>> layout_words(LayoutValues(tensor_parallel=4, data_parallel=2, zero_stage=1, activation_recompute="full"))
    'TP4 DP2, ZeRO-1, recompute full'
    """
    degrees = [f"{short}{getattr(layout, name)}" for name, short in SHORT.items() if getattr(layout, name) > 1]
    words = [" ".join([*degrees, f"DP{layout.data_parallel}"])]
    if layout.zero_stage:
        words.append(f"ZeRO-{layout.zero_stage}" + (f" over {layout.shard_size}" if layout.shard_size else ""))
    if layout.activation_recompute != "none":
        words.append(f"recompute {layout.activation_recompute}")
    if layout.offload != "none":
        words.append(f"offload {layout.offload}")
    return ", ".join(words)


def token_words(said: ResponseTokens | TaskTokens | None, cap: int, cut: float) -> str:
    """Lengths of responses, of which the share ``cut`` ends at ``cap`` tokens."""
    known = f"mean {said.mean:,.0f}, 95th percentile {said.p95:,.0f}, " if said else ""
    return f"{known}cap {cap:,} ({100 * cut:.1f} % cut)"


def settings_words(pool: PoolPlan | ScorerPlan) -> str:
    """Settings of a pool in one line; what is usual is left out."""
    given = pool.settings.stated()
    backend = given.pop("backend")
    if given.get("scoring_token_budget") == given.get("token_budget"):
        given.pop("scoring_token_budget", None)
    if given.pop("parked", False):
        backend += ", states parked on the host"
    if isinstance(pool, PoolPlan) and pool.role != "rollout" and given.get("token_budget") is None:
        backend += f", microbatch {pool.layout.microbatch}"
    words = [f"{name.replace('_', ' ')} {_value(value)}" for name, value in given.items() if USUAL.get(name) != value]
    return ", ".join([backend, *words])


def pool_rows(pools: Iterable[PoolPlan], scorers: Iterable[ScorerPlan]) -> list[tuple[str, ...]]:
    """(roles, devices, layout, settings), pools that are alike in one row."""
    rows: list[tuple[str, ...]] = []
    for pool in pools:
        own = ", its own" if pool.own_devices else ""
        rest = (f"{pool.devices} x {pool.device}{own}", layout_words(pool.layout), settings_words(pool))
        if rows and rows[-1][1:] == rest:
            rows[-1] = (f"{rows[-1][0]}, {pool.role}", *rest)
        else:
            rows.append((pool.role, *rest))
    for scorer in scorers:
        turns = ", in turn" if scorer.placement == "shared" else ""
        where = f"{scorer.devices} x {scorer.device}{turns}"
        rows.append((f"{scorer.kind} {scorer.name}", where, layout_words(scorer.layout), settings_words(scorer)))
    return rows


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)
