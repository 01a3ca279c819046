"""A plan and a prediction as tables for the terminal and as Markdown for a manager."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlperf.plan.answer.plan import GroupTime, Phase, Plan, Prediction, RunnerUp
from rlperf.plan.question.words import layout_words, pool_rows
from rlperf.report.plan_summary import percent, run_words, summary_lines
from rlperf.report.table import text_table
from rlperf.units import human_bytes, human_risk, human_seconds, human_usd

if TYPE_CHECKING:
    from rich.console import Console


def gain_words(prediction: Prediction) -> list[str]:
    """What every scorer costs and its place beside the rollout gains, and what techniques gain, a line each."""
    lines = [*prediction.gains]
    for use in prediction.scorers:
        took = f"{use.kind} {use.name}: {human_seconds(use.seconds)} of work"
        waits = f"the rl_step waits {human_seconds(use.waits_s)} for it"
        hidden = max(use.seconds - use.waits_s, 0.0)
        gained = f", {human_seconds(hidden)} hidden behind the rollout" if hidden > 0.01 * use.seconds else ""
        lines.append(f"{took}, {waits}{gained}")
    if critic := prediction.critic:
        took = f"critic on {critic.devices} devices: values {human_seconds(critic.values_s)}"
        took += f", updates {human_seconds(critic.training_s)}"
        lines.append(f"{took}; the trainer waits {human_seconds(critic.waits_s)} for it")
    return lines


def interval(prediction: Prediction | RunnerUp) -> str:
    """``41.2 s (36.0 .. 49.1 s)``."""
    low, high = human_seconds(prediction.low_s), human_seconds(prediction.high_s)
    return f"{human_seconds(prediction.rl_step_s)} ({low} .. {high})"


def stage_rows(prediction: Prediction) -> list[tuple[str, ...]]:
    """(stage, seconds, share of the rl_step) of every stage that takes time."""
    rows: list[tuple[str, ...]] = []
    for name, seconds in prediction.stages_s.model_dump().items():
        if seconds > 0:
            rows.append(
                (name.replace("_", " "), human_seconds(seconds), f"{100 * seconds / prediction.rl_step_s:.0f} %")
            )
    return rows


def waiting_words(prediction: Prediction) -> str:
    """Of pools that work at the same time, how long each waits for the other; empty where they take turns."""
    waits = {name.removesuffix("_waits"): share for name, share in prediction.idle_fraction.items() if "_waits" in name}
    if not waits:
        return ""
    said = (
        f"{pool} without work {percent(share)} of its device time" if share >= 5e-4 else f"{pool} always at work"
        for pool, share in waits.items()
    )
    return f"stages overlap; {', '.join(said)}"


def memory_rows(prediction: Prediction) -> list[tuple[str, ...]]:
    """(role, total of the device's memory, risk of running out, largest parts) of every role."""
    rows: list[tuple[str, ...]] = []
    for role, use in prediction.memory_bytes.items():
        largest = sorted(use.parts.items(), key=lambda item: -item[1])
        words = {name.replace("_", " ").replace(",", ""): value for name, value in largest[:4]}  # commas part parts
        parts = ", ".join(f"{name} {human_bytes(value)}" for name, value in words.items() if value > 0)
        rows.append(
            (
                role,
                f"{human_bytes(use.total)} of {human_bytes(use.limit)}",
                human_risk(use.risk),
                parts,
            )
        )
    return rows


def phase_title(phase: Phase) -> str:
    """Which tasks and rl_steps a phase covers, and its mode."""
    first, last = phase.rl_steps
    steps = f"rl_step {first}" if first == last else f"rl_steps {first} to {last}"
    return f"{', '.join(phase.tasks)}, {steps}: {phase.mode}" + (
        f", staleness {phase.staleness}" if phase.staleness else ""
    )


def group_words(phase: Phase) -> list[str]:
    """What each group of rl_steps takes, where a phase covers several."""
    return [
        f"{_span(group)}: {human_seconds(group.rl_step_s)} "
        f"({human_seconds(group.low_s)} .. {human_seconds(group.high_s)})"
        for group in phase.groups
    ]


def _span(group: GroupTime) -> str:
    return f"rl_steps {group.rl_steps[0]} to {group.rl_steps[1]}"


def batch_words(phase: Phase) -> str:
    """Batch settings of a phase in one line."""
    s = phase.settings
    at_once = f", {s.max_trajectories:,} trajectories at once" if s.max_trajectories else ""
    return (
        f"{s.prompts_per_step} prompts x {s.group_size}, mini-batch {s.mini_batch} prompts, "
        f"up to {s.max_prompt_tokens:,} + {s.max_response_tokens:,} tokens{at_once}"
    )


def runner_up_words(phase: Phase) -> str:
    """What the runner-up is, and whether it can be told apart."""
    if phase.runner_up is None:
        return "no other candidate is left"
    other = phase.runner_up
    of = f" of {_span(phase.groups[0])}" if phase.groups else ""
    words = f"runner-up{of} {100 * other.loss:+z.1f} % ({'; '.join(other.differs)}): {other.verdict}"
    words += f", {other.why_not}" if other.why_not else ""
    words += f"; {phase.tied} {'candidate' if phase.tied == 1 else 'candidates'} tied"
    return words + (f"; the simplest of them: {_first(phase.simplest)}" if phase.simplest else "")


def best_rows(phase: Phase) -> list[tuple[str, ...]]:
    """(rl_step, mode, engines, trainer, objective against the plan's, verdict) of the best choices.

    The plan comes first, then the runner-up and those after it, then the best of modes and backends that are not there.
    Of several groups of rl_steps all rows are of the first, in which the others were judged.
    """
    engines, trainer = (phase.pool(role) for role in ("rollout", "trainer"))
    said = phase.groups[0] if phase.groups else phase.predicted
    plan = (
        human_seconds(said.rl_step_s), phase.mode, layout_words(engines.layout),
        f"{trainer.settings.backend} {layout_words(trainer.layout)}", "",
        f"the plan in {_span(phase.groups[0])}" if phase.groups else "the plan",
    )  # fmt: skip
    others = [phase.runner_up, *phase.next_best] if phase.runner_up else []
    rest = [
        (human_seconds(other.rl_step_s), other.mode, other.layouts[0], f"{other.backend} {other.layouts[1]}",
         f"{100 * other.loss:+z.1f} %", other.verdict)
        for other in others
    ]  # fmt: skip
    return [plan, *rest]


BEST_COLUMNS = ("rl_step", "mode", "rollout", "trainer", "objective", "verdict")


def kind_rows(phase: Phase) -> list[tuple[str, ...]]:
    """Of `best_rows` the runner-up and the first of every mode and backend; nothing where there is one kind only."""
    rows, kinds = best_rows(phase), dict[tuple[str, str], int]()
    for place, row in enumerate(rows):
        kinds.setdefault((row[1], row[3].split()[0]), place)
    return [rows[place] for place in sorted({1, *kinds.values()})] if len(kinds) > 1 else []


def paired_words(others: Iterable[tuple[float, bool]]) -> str:
    """Why one that loses more may not be told apart where one that loses less may; empty where none does.

    ``others`` : of each what it loses, and whether it can be told from the first
    """
    told = list(others)
    apart = [loss for loss, sure in told if sure]
    close = [loss for loss, sure in told if not sure]
    if not apart or not close or max(close) <= min(apart):
        return ""
    return (
        "verdicts are of the difference to the plan, in which errors of what both do alike cancel: a larger loss may "
        "be the less certain one"
    )


def sensitivity_lines(phase: Phase) -> list[str]:
    """What a tenth more or less of an input does to the choice, in words."""
    lines = []
    for row in phase.sensitivity:
        head = f"{row.input} by {100 * abs(row.change):.0f} %: rl_step {human_seconds(row.rl_step_s)}"
        if row.switches_to:
            lines.append(f"{head}; then {_first(row.switches_to)} would be {100 * row.loss:.1f} % better")
        else:
            lines.append(f"{head}; the choice stands")
    return lines


def pareto_rows(phase: Phase) -> list[tuple[str, ...]]:
    """(rl_step, device-seconds, USD, memory, what differs) of the candidates that nothing beats in all of them."""
    return [
        (
            human_seconds(point.rl_step_s),
            f"{point.device_s:,.0f}",
            "-" if point.usd_per_step is None else human_usd(point.usd_per_step),
            percent(point.memory_share),
            _first(point.differs) if point.differs else "the plan",
        )
        for point in phase.pareto
    ]


def _first(words: tuple[str, ...], most: int = 3) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return "; ".join(words[:most]) + more


def print_warnings(prediction: Prediction, out: Console) -> None:
    """What to know before any other number."""
    for warning in prediction.warnings:
        out.print(f"[bold yellow]warning:[/bold yellow] {warning}")


def print_prediction(prediction: Prediction, out: Console) -> None:
    """Tables of one prediction."""
    out.print(f"[bold]rl_step {interval(prediction)}[/bold], 5th to 95th percentile")
    out.print(text_table(("stage", "time", "share"), stage_rows(prediction), out.width, right=2))
    if waits := waiting_words(prediction):
        out.print(waits)
    for line in gain_words(prediction):
        out.print(line)
    cost = "" if prediction.usd_per_step is None else f", {human_usd(prediction.usd_per_step)} USD per rl_step"
    rate = f"{prediction.tokens_per_s_per_device:,.0f} tokens/s per device"
    out.print(f"{rate}{cost}; {percent(prediction.truncated_fraction)} of responses cut")
    if prediction.run is not None:
        out.print(run_words(prediction.run))
    heads = ("role", "peak memory per device", "risk to run out", "largest parts")
    out.print(text_table(heads, memory_rows(prediction), out.width))
    if not prediction.fits:
        over = any(use.total > use.limit for use in prediction.memory_bytes.values())
        out.print("[bold]does not fit[/bold]" if over else "[bold]does not run as it stands[/bold]")
    for note in prediction.calibration.notes:
        out.print(f"- {note}")
    for line in prediction.advice:
        out.print(f"- {line}")


def print_operators(prediction: Prediction, out: Console) -> None:
    """Operators of each role with their share, bound and percentage of the speed of light."""
    from rich.table import Table

    table = Table()
    for name, justify in (
        ("role", "left"),
        ("operator", "left"),
        ("time", "right"),
        ("share", "right"),
        ("bound", "left"),
        ("of light", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in prediction.operators:
        table.add_row(
            row.role,
            row.operator,
            human_seconds(row.seconds),
            f"{100 * row.share:.0f} %",
            row.bound,
            f"{100 * row.speed_of_light:.0f} %" if row.speed_of_light else "-",
        )
    out.print(table)


def print_remarks(prediction: Prediction, out: Console) -> None:
    """What was assumed, and which calibrations stand behind the numbers."""
    use = prediction.calibration
    out.print("calibration: " + ", ".join(use.ids) + (" [bold](extrapolated)[/bold]" if use.extrapolated else ""))
    for line in (f"assumed: {text}" for text in prediction.assumed):
        out.print(f"- {line}")


def print_plan(plan: Plan, out: Console) -> None:
    """The whole plan for a terminal."""
    for phase in plan.phases:
        out.rule(phase_title(phase))
        print_warnings(phase.predicted, out)
        out.print(batch_words(phase))
        out.print(plan.lengths(phase), markup=False)
        out.print(
            text_table(("role", "devices", "layout", "settings"), pool_rows(phase.pools, phase.scorers), out.width)
        )
        print_prediction(phase.predicted, out)
        for line in group_words(phase):
            out.print(line)
        out.print(runner_up_words(phase))
        if kinds := kind_rows(phase):
            out.print(text_table(BEST_COLUMNS, kinds, out.width))
            others = [*filter(None, (phase.runner_up,)), *phase.next_best]
            shown = {(other.mode, other.backend): other for other in reversed(others)}
            if words := paired_words((other.loss, other.distinguishable) for other in shown.values()):
                out.print(words)
        for line in (*phase.binds, *(line for line in sensitivity_lines(phase) if "better" in line)):
            out.print(f"- {line}")
    out.rule()
    for line in summary_lines(plan):
        out.print(line)


def markdown(plan: Plan) -> str:
    """``report.md``: one page that a manager can read, the same whenever and wherever it is written."""
    lines = [f"# {plan.job.name}", "", f"{plan.job.architecture} on {plan.job.cluster}, {plan.job.algorithm}.", ""]
    for phase in plan.phases:
        lines += _phase_markdown(phase, plan.lengths(phase))
    lines += ["## How good is this plan", "", *(f"- {line}" for line in summary_lines(plan)), ""]
    every = [phase.predicted for phase in plan.phases]
    ids = dict.fromkeys(name for each in every for name in each.calibration.ids)
    lines += ["## What stands behind the numbers", "", f"- calibrations: {', '.join(ids)}"]
    if any(each.calibration.extrapolated for each in every):
        lines.append("- extrapolated: outside the calibrated range, intervals are wider")
    lines += dict.fromkeys(f"- {note}" for each in every for note in each.calibration.notes)
    lines += dict.fromkeys(f"- assumed: {text}" for each in every for text in each.assumed)
    lines += ["", "Intervals are the 5th and 95th percentile.", ""]
    return "\n".join(lines)


def _phase_markdown(phase: Phase, lengths: str) -> list[str]:
    predicted = phase.predicted
    cost = "" if predicted.usd_per_step is None else f", {human_usd(predicted.usd_per_step)} USD"
    lines = [
        f"## {phase_title(phase)}",
        "",
        *(line for warning in predicted.warnings for line in (f"**Warning**: {warning}.", "")),
        f"One rl_step takes **{interval(predicted)}**{cost}: "
        f"{predicted.tokens_per_s_per_device:,.0f} tokens/s per device.",
        "",
        f"Batch: {batch_words(phase)}; {lengths}.",
        "",
        *_table(("role", "devices", "layout", "settings"), pool_rows(phase.pools, phase.scorers)),
        "",
        *_table(("stage", "time", "share"), stage_rows(predicted)),
        "",
        *_table(("role", "memory per device", "risk to run out", "largest parts"), memory_rows(predicted)),
        "",
        *(f"- {line}" for line in group_words(phase)),
        f"- {runner_up_words(phase)}",
        "",
        *_table(BEST_COLUMNS, best_rows(phase)),
        "",
        *(f"- {line}" for line in (*gain_words(predicted), *phase.binds, *predicted.advice)),
        "",
        "If an input is off:",
        "",
        *(f"- {line}" for line in sensitivity_lines(phase)),
        "",
        *_table(("rl_step", "device-seconds", "USD", "memory of device", "what differs"), pareto_rows(phase)),
        "",
    ]  # fmt: skip
    return lines


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
