"""A sweep as one HTML page: what varied, the best points, figures, failures, and the meaning of the columns."""

from __future__ import annotations

from rlperf.plan.question.context import Context
from rlperf.report import html
from rlperf.report.provenance import constants_of, counts
from rlperf.report.style import short
from rlperf.report.sweep_figures import sweep_drawings
from rlperf.report.sweep_text import best_rows, cell, reason_rows, unlike
from rlperf.sweep import SweepResult

METHODS = {
    "screen": "closed forms: the best candidate of what each point leaves open",
    "events": "event simulation of the candidate that closed forms put first",
    "plan": "the whole planner at every point",
}


def sweep_page(found: SweepResult, context: Context | None = None) -> str:
    """The page of a sweep; ``context`` of its job adds where the constants are from."""
    sweep, base = found.checked.sweep, found.checked.base
    parts = [("Summary", _summary(found)), ("Best points", _best(found))]
    drawings = "".join(html.figure(drawing) for drawing in sweep_drawings(found))
    if drawings:
        parts.append(("Figures", drawings))
    failures = reason_rows(found, 50)
    if failures:
        rows = [(status, reason, f"{count:,}") for status, reason, count in failures]
        parts.append(("Points without a result", html.table(("status", "reason", "points"), rows)))
    parts.append(("Columns of the results", html.folded("name, unit and meaning of every column", html.table(
        ("column", "type", "unit", "meaning"), found.columns))))  # fmt: skip
    if context is not None:
        made = constants_of(context)
        words = ", ".join(f"{count} {kind}" for kind, count in counts(made).items())
        lines = [(c.where, c.name, c.value, c.standing, c.source) for c in made]
        inner = html.table(("file", "constant", "value", "standing", "source"), lines)
        parts.append(("Where the constants are from", html.paragraph("Of the sweep's job as it stands, before fields "
                      f"are varied: {words}.") + html.folded("every constant", inner)))  # fmt: skip
    lead = f"{base['architecture']} on {base['cluster']}; {METHODS[sweep.method]}"
    return html.page(sweep.name, lead, parts)


def _summary(found: SweepResult) -> str:
    items = [(f"{found.checked.points:,}", "points"), *((f"{n:,}", status) for status, n in found.counts.items())]
    rows = []
    for path in found.checked.varied:
        values = found.having([path]).frame[path].drop_nulls().unique(maintain_order=True).to_list()
        shown = ", ".join(cell("", value) for value in values[:12]) + (" ..." if len(values) > 12 else "")
        rows.append((path, str(len(values)), shown))
    body = html.facts(items) + html.table(("field", "values", ""), rows)
    if found.checked.sweep.method == "screen":
        body += html.paragraph(
            "Intervals of closed forms leave out how much rl_steps differ by the lengths drawn; method events has it.",
            "soft",
        )
    return body


def _best(found: SweepResult) -> str:
    heads, rows = best_rows(found, 5)
    if not rows:
        return html.paragraph("No point can be run; see the reasons below.", "warn")
    warning, turned = unlike(found), zip(heads, *rows, strict=True)
    body = html.paragraph(warning[0].upper() + warning[1:] + ".", "warn") if warning else ""
    return (
        body
        + html.table(("", *(f"{place}." for place in range(1, len(rows) + 1))), turned)
        + html.paragraph(f"Ordered by what the job minimises. {_fields(found)}", "soft")
    )


def _fields(found: SweepResult) -> str:
    return "Fields: " + "; ".join(f"{short(path)} = {path}" for path in found.checked.varied) + "."
