"""How good a plan is and what its run costs, in words."""

from __future__ import annotations

from rlperf.plan.answer.plan import DefaultsComparison, HandoverCost, Plan, RunTotals
from rlperf.specs.objectives import OBJECTIVES
from rlperf.units import human_seconds, human_usd


def percent(share: float) -> str:
    """``12.3 %``."""
    return f"{100 * share:.1f} %"


def amount(value: float, unit: str) -> str:
    """A number of an objective, as times and money are written elsewhere; others with four digits.

    >>> amount(477.61, "s"), amount(9.0, "USD"), amount(38450.2, "device-s a million tokens")
    ('7 min 58 s', '9.00 USD', '38,450 device-s a million tokens')
    """
    if unit in ("s", "USD"):
        return human_seconds(value) if unit == "s" else f"{human_usd(value)} USD"
    return f"{value:,.0f} {unit}" if abs(value) >= 1e4 else f"{value:,.4g} {unit}"


def summary_lines(plan: Plan) -> list[str]:
    """How good the plan is, in words."""
    unit = OBJECTIVES[plan.job.objective.minimize].unit
    regret = percent(plan.screen_regret)
    own = "is as good" if regret == percent(0.0) else f"would have lost {regret}"
    lines = [
        *at_once_words(plan),
        f"{plan.status}: objective {amount(plan.objective, unit)}{_bound_words(plan, unit)}; "
        f"gap {round(100 * plan.mip_gap, 4):.2g} % of the screened program; "
        f"{plan.candidates:,} candidates ({amount(plan.combinations, 'combinations')})",
        f"event simulation re-judged the best; the screen's own choice {own}",
    ]
    alike = plan.handovers is not None and not plan.handovers.changes
    if plan.static_objective is not None and not alike:
        more = plan.static_objective / plan.objective - 1.0
        words = f"{100 * more:+z.1f} %"
        if plan.static_low is not None and plan.static_high is not None:
            words += f", {100 * plan.static_low:+z.1f} .. {100 * plan.static_high:+z.1f} %"
        whole = "for all tasks and rl_steps" if plan.handovers else "over the whole horizon"
        lines.append(f"one layout {whole}: {amount(plan.static_objective, unit)} ({words})")
    if plan.switching is not None:
        gain = plan.switching
        words = f"{percent(gain.saves)} ({percent(gain.low)} .. {percent(gain.high)})"
        between = "tasks or groups" if plan.handovers else "groups"
        lines.append(f"changing layouts between {between} would save {words}: not certain, so one is kept")
    if plan.handovers is not None:
        lines.append(handover_words(plan.handovers, OBJECTIVES[plan.job.objective.minimize].adds_up))
    if plan.defaults is not None:
        lines.append(defaults_words(plan.defaults, unit))
    if plan.run is not None:
        lines.append(run_words(plan.run))
    if plan.rejected:
        most = sorted(plan.rejected.items(), key=lambda item: -item[1])
        lines.append("rejected: " + "; ".join(f"{reason} ({count:,})" for reason, count in most))
    return lines


def at_once_words(plan: Plan) -> list[str]:
    """Tasks that run at once: the slowest one's rl_step, and what the objective is of all of them."""
    tasks = list(dict.fromkeys(phase.tasks for phase in plan.phases))
    if plan.job.sharing != "devices" or len(tasks) < 2:
        return []
    slowest = max(plan.phases, key=lambda phase: phase.predicted.rl_step_s)
    took = f"the slowest rl_step, of {', '.join(slowest.tasks)}, takes {human_seconds(slowest.predicted.rl_step_s)}"
    adds_up = OBJECTIVES[plan.job.objective.minimize].adds_up
    return [f"{len(tasks)} tasks run at once on parts of the devices: {took}; the objective {adds_up}"]


def handover_words(handovers: HandoverCost, adds_up: str) -> str:
    """What tasks that take turns pay between them."""
    each = f"a change of layout between tasks takes {human_seconds(handovers.change_s)}"
    instead = "; in one batch with `sharing: mixed`, at once on parts of the devices with `sharing: devices`. "
    instead += f"The objective {adds_up}; files for them pass no checkpoint from task to task"
    if not handovers.changes:
        return f"the tasks take turns on one layout: {each}, and there is none{instead}"
    often = f"{handovers.changes:.3g} per rl_step of all tasks"
    return f"the tasks take turns: {each}, {often}, {human_seconds(handovers.per_rl_step_s)} of it{instead}"


def _bound_words(plan: Plan, unit: str) -> str:
    """What nothing that was judged falls below, where the beaten path made the plan take more."""
    less = 1.0 - plan.bound / plan.objective if plan.bound > 0.0 else 0.0
    if less < 5e-4:
        return ", the least of all that was judged"
    return f"; layouts further off the beaten path take {amount(plan.bound, unit)}, which is {percent(less)} less"


def defaults_words(found: DefaultsComparison, unit: str) -> str:
    """What the framework's defaults would take, and what the plan saves of it."""
    title = f"{found.framework}'s defaults" + (f" ({found.runs})" if found.runs else "")
    if found.objective is None or found.saves is None or found.low is None or found.high is None:
        return f"{title} do not run here: {found.why_not}"
    words = f"{title} would take {amount(found.objective, unit)}: the plan "
    if found.saves >= 0.0:
        words += f"saves {percent(found.saves)} ({percent(found.low)} .. {percent(found.high)})"
    else:
        words += f"takes {percent(-found.saves)} more ({percent(-found.high)} .. {percent(-found.low)})"
    words += "" if found.low > 0.0 or found.high < 0.0 else ", which cannot be told from nothing"
    return words + (f"; {'; '.join(found.notes)}" if found.notes else "")


def run_words(run: RunTotals) -> str:
    """The whole run: how long, how much of it counts, what it costs, and what would lose less."""
    words = f"the run of {run.rl_steps:,} rl_steps takes {human_seconds(run.total_s)} "
    words += f"({human_seconds(run.low_s)} .. {human_seconds(run.high_s)}), {run.device_hours:,.0f} device-hours, "
    words += f"goodput {percent(run.goodput)}"
    around = [("start-up", run.start_up_s), ("checkpoints", run.checkpoint_s), ("validation", run.validation_s)]
    around.append(("handovers", run.handovers_s))
    stops = [f"{run.failures:,.1f} failures"] * (run.failures >= 0.05)
    stops += ["restarts"] * (run.departures > 0.0 or not stops)  # where spot nodes that leave stop a run, too
    around.append((" and ".join(stops), run.lost_s))
    spent = ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in around if seconds > 0.0)
    words += f" (beside rl_steps: {spent})" if spent else ""
    if run.usd is not None:
        million = run.usd_per_million_tokens
        a_million = "" if million is None else f", {human_usd(million)} a million tokens"
        words += f"; {run.usd:,.0f} USD: {human_usd(run.usd_per_rl_step or 0.0)} an rl_step{a_million}"
    if run.on_demand_s is not None:
        words += f"; spot nodes leave {run.departures:,.1f} times; without spot nodes {human_seconds(run.on_demand_s)}"
        if run.on_demand_usd is not None:
            words += f" and {run.on_demand_usd:,.0f} USD"
    if run.best_checkpoint_every is not None:
        words += f"; a checkpoint every {run.best_checkpoint_every:,} rl_steps would lose least"
    return words
