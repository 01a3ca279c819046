"""The files of a plan: plan.yaml, report.md, the figure, and the framework's config; a folder changes as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from rlperf.errors import Problem, SpecError
from rlperf.plan.answer.plan import Plan
from rlperf.report.plan_figure import timeline_figure
from rlperf.report.plan_text import markdown
from rlperf.specs.reader import read_spec
from rlperf.specs.writer import is_export, write_folder


def plan_yaml(plan: Plan) -> str:
    """A plan as YAML that `read_plan` reads back to an equal one, but for the seconds that planning took."""
    head = "# A plan written by rlperf: complete, re-loadable (rlperf export, rlperf predict, rlperf.Plan).\n"
    data = plan.model_dump(mode="json", exclude_none=True, exclude={"seconds"})
    return head + str(yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True))


def read_plan(path: Path | str) -> Plan:
    """A plan from its file."""
    plan = read_spec(path, Plan)
    for index, phase in enumerate(plan.phases):
        said = phase.predicted
        if not said.low_s <= said.rl_step_s <= said.high_s:
            raise SpecError(Problem(f"phases.{index}.predicted: rl_step_s lies outside of low_s and high_s", str(path)))
    return plan


OWN = ("plan.yaml", "report.md", "report.html", "timeline.svg", "timeline.png")


def write_plan_files(plan: Plan, out: Path, configs: Mapping[str, str] | None = None) -> list[Path]:
    """plan.yaml, report.md, timeline.svg and timeline.png in the folder ``out``, and ``configs`` in its ``config/``.

    The folder changes in one step, and what an earlier plan left there goes: its files, its phases, its report.
    """
    contents: dict[str, str | bytes] = {
        "plan.yaml": plan_yaml(plan),
        "report.md": markdown(plan) + "\n![timeline](timeline.svg)\n",
        "timeline.svg": timeline_figure(plan, "svg"),
        "timeline.png": timeline_figure(plan, "png"),
    }
    contents |= {f"config/{name}": content for name, content in (configs or {}).items()}
    return list(
        write_folder(
            out,
            contents,
            lambda name: name in OWN or (name.startswith("config/") and is_export(name.removeprefix("config/"))),
        )
    )
