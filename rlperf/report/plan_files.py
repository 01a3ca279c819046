"""The files of a plan: plan.yaml, report.md, the figure, and the framework's config. All or none is written."""

from __future__ import annotations

from pathlib import Path

import yaml

from rlperf.errors import Problem, SpecError
from rlperf.plan.answer.plan import Plan
from rlperf.report.plan_figure import timeline_figure
from rlperf.report.plan_text import markdown
from rlperf.specs.reader import read_spec
from rlperf.specs.writer import write_atomic


def plan_yaml(plan: Plan) -> str:
    """A plan as YAML that `read_plan` reads back to an equal one."""
    head = "# A plan written by rlperf: complete, re-loadable (rlperf export, rlperf predict, rlperf.Plan).\n"
    data = plan.model_dump(mode="json", exclude_none=True)
    return head + str(yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True))


def read_plan(path: Path | str) -> Plan:
    """A plan from its file."""
    return read_spec(path, Plan)


def write_plan_files(plan: Plan, out: Path) -> list[Path]:
    """plan.yaml, report.md, timeline.svg and timeline.png in the folder ``out``."""
    if out.exists() and not out.is_dir():
        raise SpecError(Problem("is a file, a folder is due", str(out)))
    contents: dict[str, str | bytes] = {
        "plan.yaml": plan_yaml(plan),
        "report.md": markdown(plan) + "\n![timeline](timeline.svg)\n",
        "timeline.svg": timeline_figure(plan, "svg"),
        "timeline.png": timeline_figure(plan, "png"),
    }
    return [write_atomic(out / name, content) for name, content in contents.items()]
