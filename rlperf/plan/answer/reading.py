"""Plans as they are read from their files."""

from __future__ import annotations

from rlperf.plan.answer.plan import Plan
from rlperf.plan.question.context import anchored
from rlperf.specs.own_files import folder_of
from rlperf.specs.reader import Document, validate


def plan_in(document: Document) -> Plan | None:
    """The plan that a document holds, its paths made absolute; None where it holds something else."""
    if not (isinstance(document.data, dict) and {"job", "phases"} <= set(document.data)):
        return None
    plan = validate(document, Plan)
    folder = folder_of(document.file)
    return plan.model_copy(
        update={"job": anchored(plan.job, folder), "asked": plan.asked and anchored(plan.asked, folder)}
    )
