"""A plan as one HTML page: what to run, what it will do, why, how sure that is, and what stands behind the numbers."""

from __future__ import annotations

from itertools import groupby

from rlperf.plan.answer.plan import Phase, Plan
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.question.words import pool_rows
from rlperf.report import html
from rlperf.report.plan_drawings import judged_drawings, plan_drawings
from rlperf.report.plan_summary import summary_lines
from rlperf.report.plan_text import (
    BEST_COLUMNS,
    batch_words,
    best_rows,
    gain_words,
    group_words,
    interval,
    memory_rows,
    phase_title,
    runner_up_words,
    stage_rows,
    waiting_words,
)
from rlperf.report.plan_whole import cards
from rlperf.report.provenance import ASSUMED, UsedConstant, constants_of, counts
from rlperf.report.rl_step import step_figure
from rlperf.report.rollout import CAUSES
from rlperf.report.style import Drawing
from rlperf.units import human_bytes, human_risk, human_seconds, human_share

Judged = tuple[Context, TaskContext, Evaluation]


def plan_page(plan: Plan, judged: tuple[Judged | None, ...] = (), missing: str = "") -> str:
    """The page of a plan; the arguments are those of `plan_parts`."""
    lead = f"{plan.job.architecture} on {plan.job.cluster}, {plan.job.algorithm} with {plan.job.framework}"
    return html.page(plan.job.name, lead, plan_parts(plan, judged, missing))


def plan_parts(plan: Plan, judged: tuple[Judged | None, ...] = (), missing: str = "") -> list[tuple[str, str]]:
    """(heading, HTML) of what the page of a plan shows.

    Parameters
    ----------
    judged : per phase, the context and the simulated rl_steps behind it; without them lengths, roofline and provenance
        are left out, and ``missing`` says why
    """
    seen = judged or (None,) * len(plan.phases)
    several = len(plan.phases) > 1
    parts: list[tuple[str, str]] = [("Summary", _summary(plan, missing))]
    for phase, found in zip(plan.phases, seen, strict=True):
        title = f"{phase_title(phase)}: " if several else ""
        drawings = {drawing.name: drawing for drawing in plan_drawings(phase)}
        if found is not None:
            drawings |= {drawing.name: drawing for drawing in judged_drawings(*found)}
        shown = _phase(phase, plan.lengths(phase), drawings, found)
        parts += [(title + name if several else name, content) for name, content in shown]
    parts.append(("How good the choice is", html.listing(summary_lines(plan))))
    contexts = [found[0] for found in seen if found is not None]
    if contexts:
        parts.append(("Where every constant is from", _provenance(constants_of(contexts[0]))))
    return parts


def _summary(plan: Plan, missing: str) -> str:
    warned = [
        f"Warning: {phase_title(phase) + ': ' if len(plan.phases) > 1 else ''}{words}."
        for phase in plan.phases
        for words in phase.predicted.warnings
    ]
    body = "".join(html.paragraph(words, "warn") for words in [*warned, *([missing] if missing else [])])
    body += html.facts(cards(plan))
    rows = []
    for phase in plan.phases:
        rows.append((phase_title(phase), batch_words(phase), interval(phase.predicted)))
        rows += [("", "", line) for line in group_words(phase)]
    return body + (html.table(("what", "batch", "one rl_step"), rows) if len(rows) > 1 else "")


def _phase(phase: Phase, lengths: str, drawings: dict[str, Drawing], found: Judged | None) -> list[tuple[str, str]]:
    predicted = phase.predicted

    def drawn(*names: str) -> str:
        return "".join(html.figure(drawings[name]) for name in names if name in drawings)

    pools = html.table(("role", "devices", "layout", "settings"), pool_rows(phase.pools, phase.scorers))
    pools = html.paragraph(f"{batch_words(phase)}; {lengths}.") + pools
    timeline = drawn("timeline") + html.table(("stage", "time", "share"), stage_rows(predicted)) + _idle(phase)
    if found is not None:
        timeline += _by_rank(found)
    memory = drawn("memory") + html.table(("role", "peak", "risk to run out", "largest parts"), memory_rows(predicted))
    memory += html.folded("every part", html.table(("role", "part", "per device"), [
        (role, part.replace("_", " "), human_bytes(size))
        for role, use in predicted.memory_bytes.items() for part, size in use.parts.items() if size > 0
    ]))  # fmt: skip
    return [
        ("Plan", pools),
        ("Timeline", timeline),
        ("Memory", memory),
        (
            "The ten best",
            html.table(BEST_COLUMNS, best_rows(phase)),
        ),
        ("Why", _why(phase) + drawn("pareto")),
        ("What takes the time", drawn("operators", "roofline", "lengths")),
        ("Sensitivity", drawn("sensitivity") + _sensitivity(phase)),
        ("Error bars", _errors(phase)),
    ]


def _by_rank(found: Judged) -> str:
    from rlperf.plan.judge.timeline import step_view

    svg = step_figure(step_view(found[2]).timeline)
    caption = "The first judged rl_step, replica by replica and stage by stage."
    return html.folded("replica by replica", html.picture(caption, svg))


def _idle(phase: Phase) -> str:
    if waits := waiting_words(phase.predicted):
        return html.paragraph(f"{waits}.")
    lost = {name: share for name, share in phase.predicted.idle_fraction.items() if share >= 0.001}
    if not lost:
        return ""
    words = ", ".join(f"{CAUSES.get(name, name)} {100 * share:.1f} %" for name, share in lost.items())
    return html.paragraph(f"Of the rollout's device-seconds, not spent in full batches: {words}.")


def _why(phase: Phase) -> str:
    body = html.listing(
        [
            *gain_words(phase.predicted),
            *phase.binds,
            *phase.predicted.advice,
            runner_up_words(phase),
        ]
    )
    if phase.ties:
        shown = [", ".join(differs) or "equal in every layout" for differs in phase.ties]
        body += html.paragraph(f"{phase.tied} candidates cannot be told from the plan; the best of them:")
        body += html.listing(shown)
    return body


def _sensitivity(phase: Phase) -> str:
    rows = [
        (f"{row.input} by {human_share(abs(row.change))}", human_seconds(row.rl_step_s),
         "stands" if not row.switches_to else f"{human_share(row.loss, 1)} above: {', '.join(row.switches_to)}")
        for row in phase.sensitivity
    ]  # fmt: skip
    return html.table(("input", "rl_step", "the choice"), rows) if rows else html.paragraph("not computed")


def _errors(phase: Phase) -> str:
    predicted = phase.predicted
    use = predicted.calibration
    body = html.paragraph(
        f"One rl_step takes {interval(predicted)}, 5th to 95th percentile: errors of the stages' calibrations by their "
        "share of the rl_step, of the framework around them, of reruns, and of the lengths drawn."
    )
    rows = [
        (role, *(human_bytes(each) for each in (m.total, m.low, m.high, m.allowed, m.limit)), human_risk(m.risk))
        for role, m in predicted.memory_bytes.items()
    ]
    body += html.table(("memory per device", "predicted", "5th", "95th", "allowed", "device", "risk to run out"), rows)
    if use.extrapolated:
        body += html.paragraph("Outside what was measured: intervals are wider.", "warn")
    body += html.paragraph(f"Calibrations: {', '.join(use.ids)}.", "soft")
    notes = [*use.notes, *(f"assumed: {text}" for text in predicted.assumed)]
    return body + (html.listing(notes) if notes else "")


def _provenance(found: list[UsedConstant]) -> str:
    number = counts(found)
    body = html.facts([(str(count), kind) for kind, count in number.items()])
    body += html.paragraph(
        "Fitted: to measurements, which validation then leaves out. Read: from data sheets, documentation or source "
        "code. Assumed: nobody measured it; it was judged or taken over from a relative."
    )
    assumed = [c for c in found if c.standing == ASSUMED]
    head = ("constant", "value", "standing", "source")
    if assumed:
        rows = [(f"{c.where}: {c.name}", c.value, c.standing, c.source) for c in assumed]
        body += html.folded(f"assumed ({len(assumed)})", html.table(head, rows))
    for where, group in groupby(found, key=lambda c: c.where):
        rows = [(c.name, c.value, c.standing, c.source) for c in group]
        body += html.folded(f"{where} ({len(rows)})", html.table(head, rows))
    return body
