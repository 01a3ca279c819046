"""The files of a plan: plan.yaml, report.md, the figure, and the framework's config; a folder changes as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from rlperf.errors import Problem, SpecError
from rlperf.plan.answer.plan import Plan
from rlperf.plan.answer.reading import plan_in
from rlperf.report.plan_figure import timeline_figure
from rlperf.report.plan_text import markdown
from rlperf.specs.own_files import inputs_folder, standing_alone
from rlperf.specs.reader import read_document, validate
from rlperf.specs.writer import is_export, write_folder


def plan_yaml(plan: Plan) -> str:
    """A plan as YAML that `read_plan` reads back to an equal one, but for the seconds that planning took."""
    head = "# A plan written by rlperf: complete, re-loadable (rlperf export, rlperf predict, rlperf.Plan).\n"
    data = plan.model_dump(mode="json", exclude_none=True)
    return head + str(yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True))


def read_plan(path: Path | str) -> Plan:
    """A plan from its file."""
    document = read_document(path)
    if isinstance(document.data, dict) and {"architecture", "tasks"} & set(document.data):
        hint = f"`rlperf plan {path} --out plan/` makes one, and `rlperf report plan/` its page"
        raise SpecError(Problem("is a job, no plan", str(path), suggestion=hint))
    plan = plan_in(document) or validate(document, Plan)
    for index, phase in enumerate(plan.phases):
        said = phase.predicted
        if not said.low_s <= said.rl_step_s <= said.high_s:
            raise SpecError(Problem(f"phases.{index}.predicted: rl_step_s lies outside of low_s and high_s", str(path)))
    return plan


INPUTS = f"{inputs_folder('plan.yaml')}/"
OWN = ("plan.yaml", "report.md", "report.html", "timeline.svg", "timeline.png")


def plan_contents(
    plan: Plan, configs: Mapping[str, str] | None = None, *, folder: Path | None = None
) -> dict[str, str | bytes]:
    """Name -> content of plan.yaml, report.md, timeline.svg and timeline.png, and of ``configs`` in ``config/``.

    What the job takes from ``folder`` that rlperf does not ship (profiles, models, lengths) goes to ``plan.inputs/``.
    """
    job, own = standing_alone(plan.job, folder)
    asked, also = standing_alone(plan.asked, folder) if plan.asked else (None, {})
    contents: dict[str, str | bytes] = {
        "plan.yaml": plan_yaml(plan.model_copy(update={"job": job, "asked": asked})),
        "report.md": markdown(plan) + "\n![timeline](timeline.svg)\n",
        "timeline.svg": timeline_figure(plan, "svg"),
        "timeline.png": timeline_figure(plan, "png"),
    }
    contents |= {f"config/{name}": content for name, content in (configs or {}).items()}
    return contents | {f"{INPUTS}{name}": content for name, content in (own | also).items()}


def write_plan_files(
    plan: Plan, out: Path, configs: Mapping[str, str] | None = None, *, folder: Path | None = None
) -> list[Path]:
    """`plan_contents` in the folder ``out``.

    The folder changes in one step, and what an earlier plan left there goes: its files, its phases, its report.
    """
    return list(write_folder(out, plan_contents(plan, configs, folder=folder), _written_here))


def _written_here(name: str) -> bool:
    """Whether a file below the folder is of an earlier plan."""
    config = name.startswith("config/") and is_export(name.removeprefix("config/"))
    return name in OWN or name.startswith(INPUTS) or config
