"""A plan's cards: what an rl_step of all tasks takes."""

from __future__ import annotations

from rlperf.plan.answer.plan import Plan
from rlperf.plan.answer.whole import WholeStep, tasks_of
from rlperf.units import human_risk, human_seconds, human_usd


def cards(plan: Plan) -> list[tuple[str, str]]:
    """(value, what it is) of the page's first lines."""
    whole = WholeStep.of(plan)
    step = "per rl_step" if len(tasks_of(plan)) == 1 else f"per rl_step of all {len(tasks_of(plan))} tasks"
    least, most = (f"{100 * share:.1f}" for share in whole.truncated)
    found = [
        (human_seconds(whole.rl_step_s), f"{step} ({human_seconds(whole.low_s)} to {human_seconds(whole.high_s)})"),
        (f"{whole.tokens_per_s_per_device:,.0f}", "trained tokens per second and device"),
        (f"{most} %" if least == most else f"{least} to {most} %", "of responses cut at the maximum length"),
    ]
    if whole.usd is not None:
        found.insert(1, (f"{human_usd(whole.usd)} USD", step))
    if plan.handovers is not None and plan.handovers.changes:
        found.insert(1, (human_seconds(plan.handovers.per_rl_step_s), "of it to change layouts between tasks"))
    memory = whole.memory_bytes.items()
    return found + [(human_risk(use.risk), f"risk to run out of memory, {role}") for role, use in memory]
