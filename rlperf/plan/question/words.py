"""Layouts and lengths in words."""

from __future__ import annotations

from rlperf.plan.question.pool import ResponseTokens, TaskTokens
from rlperf.specs.pool import ATTRIBUTES, LayoutValues

SHORT = {each.name: each.short for each in ATTRIBUTES if each.short and each.name != "data_parallel"}
"""Degrees that are named only where they are above 1."""


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
