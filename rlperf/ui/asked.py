"""What the page asks rlperf: its form as a job, its sliders as changes of a plan. Knows no widget."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rlperf.alternatives import BASE, HEAD, changed_job, what_if
from rlperf.api import plan_job, sweep_job
from rlperf.errors import SpecError
from rlperf.frameworks.export import losses, plan_texts
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.frameworks.run import as_type
from rlperf.plan.answer.plan import Plan
from rlperf.plan.compare import job_of_plan
from rlperf.plan.question.words import layout_words
from rlperf.report.plan_files import plan_contents
from rlperf.specs.cluster import Cluster
from rlperf.specs.job import Algorithm, Job
from rlperf.specs.modes import MODES
from rlperf.specs.profiles import architecture_names, load_cluster, profile_names
from rlperf.sweep import Sweep
from rlperf.sweep.spec import Method
from rlperf.units import human_seconds
from rlperf.workload.library import PRESETS

DRAWS = 2
"""Common draws of the prompt groups behind a slider: few, since the answer is due in a second."""


NUMBERS = ("gpus", "prompts", "group", "mini_batch", "staleness")
"""Fields of the form that are whole numbers."""


@dataclass
class PageForm:
    """The fields of the page: arguments of `rlperf.plan_job`, or the path of a job's file, which then counts alone."""

    file: str = ""
    model: str = "Qwen3-8B"
    gpus: int = 16
    gpu: str = "dgx_h100"
    framework: str = "verl"
    algorithm: str = "grpo"
    mode: str = "colocated"
    workload: str = "math"
    prompts: int = 128
    group: int = 8
    mini_batch: int | None = None
    max_prompt: str = "2k"
    max_response: str = "16k"
    like: str = ""
    staleness: int | None = None

    def values(self) -> dict[str, Any]:
        """Arguments of `rlperf.plan_job`; a field that is left empty is its default.

        >>> PageForm(workload="", gpus=8).values()["gpus"], "workload" in PageForm(workload="").values()
        (8, False)
        """
        if not self.model:
            raise SpecError("no model: name one, or a job file")
        given = {name: value for name, value in vars(self).items() if name != "file" and value not in (None, "")}
        return {name: _whole(name, value) if name in NUMBERS else str(value) for name, value in given.items()}

    @property
    def folder(self) -> Path:
        """Where relative paths start."""
        return Path(self.file).expanduser().resolve().parent if self.file else Path.cwd()

    def plan(self) -> Plan:
        """What rlperf plans for it."""
        return plan_job(Path(self.file).expanduser()) if self.file else plan_job(**self.values())

    def having(self, moved: Mapping[str, int], asked: Alternatives) -> None:
        """Take over what sliders say: prompts, responses per prompt, response tokens, nodes."""
        self.prompts, self.group = moved["prompts"], moved["group"]
        self.mini_batch = self.prompts // asked.updates if asked.updates > 1 else None
        self.max_response, self.gpus = str(moved["max_response"]), moved["nodes"] * asked.devices_per_node


def _whole(name: str, value: object) -> int:
    """A whole number of the form, from a widget that knows no other than floats."""
    number = as_type(value, int)
    if isinstance(value, bool) or not number[1]:
        raise SpecError(f"{name.replace('_', ' ')}: {value!r} is no whole number")
    return int(number[0])


def choices() -> dict[str, tuple[str, ...]]:
    """What each field of the form offers; model, gpu and workload take other names and paths too.

    >>> "verl" in choices()["framework"], "dgx_h100" in choices()["gpu"]
    (True, True)
    """
    clusters = tuple(name for name in profile_names("clusters") if name != "generic")
    return {
        "model": architecture_names(),
        "gpu": (*clusters, *profile_names("devices")),
        "framework": FRAMEWORKS,
        "algorithm": Algorithm.__args__,  # type: ignore[attr-defined]
        "mode": tuple(MODES),
        "workload": tuple(PRESETS),
    }


@dataclass(frozen=True)
class Slider:
    """A number that can be moved: between ``low`` and ``high`` in steps, ``start`` is the plan's."""

    name: str
    words: str
    start: int
    low: int
    high: int
    step: int


@dataclass(frozen=True)
class Moved:
    """What the sliders say: the plan's own layouts under the change, and the best layouts for it.

    All times are the plan's rl_step times a ratio. ``kept``: rows as `rlperf.alternatives.WhatIfTable.cells` writes
    them, under ``head``; ``anew``: in words, empty where nothing is moved, found ``by`` closed forms, which know no
    batch of several tasks, or by planning
    """

    kept: list[tuple[str, ...]]
    anew: str
    head: tuple[str, ...] = HEAD
    by: str = "closed forms"


@dataclass(frozen=True)
class Alternatives:
    """What-ifs of a plan's first phase."""

    plan: Plan
    folder: Path
    sliders: tuple[Slider, ...] = field(init=False)

    def __post_init__(self) -> None:
        batch, nodes = self.plan.phases[0].settings, self.plan.job.nodes or self._cluster.nodes
        of_task = () if self.mixed else (
            _around("max_response", "longest response, tokens", batch.max_response_tokens),
            _around("prompts", "prompts per rl_step", batch.prompts_per_step, self.updates),
            _around("group", "responses per prompt", batch.group_size),
        )  # fmt: skip
        object.__setattr__(self, "sliders", (*of_task, Slider("nodes", "nodes", nodes, 1, max(4 * nodes, 8), 1)))

    @property
    def mixed(self) -> bool:
        """Whether its batch is made of several tasks, each of which states a part of it: none has a slider."""
        return len(self.plan.phases[0].tasks) > 1

    @property
    def _cluster(self) -> Cluster:
        return load_cluster(self.plan.job.cluster, folder=self.folder)

    @property
    def devices_per_node(self) -> int:
        """Devices of a node of the job's cluster."""
        return self.plan.job.devices_per_node or self._cluster.devices_per_node

    @property
    def updates(self) -> int:
        """Optimizer updates of an rl_step."""
        batch = self.plan.phases[0].settings
        return max(batch.prompts_per_step // batch.mini_batch, 1)

    @property
    def start(self) -> dict[str, int]:
        """Where the sliders stand for the plan itself."""
        return {slider.name: slider.start for slider in self.sliders}

    def changes(self, moved: Mapping[str, int]) -> dict[str, Any]:
        """The fields of the job that sliders change; an rl_step keeps its number of updates."""
        fields = {} if self.mixed else {
            "tasks.0.max_response_tokens": moved["max_response"],
            "tasks.0.prompts_per_step": moved["prompts"],
            "tasks.0.mini_batch": moved["prompts"] // self.updates,
            "tasks.0.group_size": moved["group"],
        }  # fmt: skip
        if moved["nodes"] != self.start["nodes"]:
            fields["nodes"] = moved["nodes"]
        return fields

    def moved(self, moved: Mapping[str, int]) -> Moved:
        """What rlperf says to a change: `rlperf.what_if` of the plan's layouts, and a sweep of one point.

        With other nodes the plan's layouts have no place, so only the second is asked.
        """
        fields = self.changes(moved)
        kept: list[tuple[str, ...]] = []
        if "nodes" not in fields:
            pinned = job_of_plan(self.plan)
            changed = {"moved": fields} if moved != self.start else {}
            table = what_if(pinned, changed, plan=False, draws=DRAWS, folder=self.folder)
            names = {BASE: "the plan", "moved": "the plan's layouts, moved"}
            kept = [(names[cells[0]], *cells[1:]) for cells in table.cells()]
        anew = "" if moved == self.start else self._anew(fields)
        return Moved(kept, anew, by="planning" if self.mixed else "closed forms")

    @property
    def _rl_step_s(self) -> float:
        """The plan's rl_step, of which the page states one time: what else is asked of it counts as a ratio."""
        return self.plan.phases[0].predicted.rl_step_s

    @property
    def _job(self) -> Job:
        """What the plan was asked for, with the tasks of its first phase alone."""
        return self.plan.job.of_task(None if self.mixed else self.plan.phases[0].tasks[0])

    def planned(self, moved: Mapping[str, int]) -> Plan:
        """The plan that takes the place of this one under a change."""
        return plan_job(changed_job(self._job, self.changes(moved), "the sliders"), folder=self.folder)

    def _swept(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        # a sweep varies something: nodes as they are, where nothing is moved
        asked = {path: [value] for path, value in {"nodes": self.start["nodes"], **fields}.items()}
        method: Method = "plan" if self.mixed else "screen"
        sweep = Sweep(job=self._job.stated(), grid=asked, method=method)
        return sweep_job(sweep, workers=1, folder=self.folder).frame.row(0, named=True)

    @cached_property
    def _scale(self) -> float:
        """The plan's rl_step over what the same closed forms say where nothing is moved."""
        row = self._swept(self.changes(self.start))
        return self._rl_step_s / row["rl_step_s"] if row["status"] == "ok" else 1.0

    def _anew(self, fields: Mapping[str, Any]) -> str:
        row = self._swept(fields)
        if row["status"] != "ok":
            return f"no layout: {row['reason']}"
        low, step, high = (human_seconds(self._scale * row[name]) for name in ("low_s", "rl_step_s", "high_s"))
        degrees = ", ".join(
            f"{role} TP{row[f'{role}_tensor_parallel']} PP{row[f'{role}_pipeline_parallel']}" for role in POOLS
        )
        return f"{step} ({low} .. {high}) on {row['devices']} devices: {degrees}"


POOLS = ("rollout", "trainer")


def _around(name: str, words: str, start: int, multiple: int = 1) -> Slider:
    """A slider from an eighth of a value to twice it; every stop is a multiple of ``multiple``.

    >>> _around("group", "", 8), _around("prompts", "", 128, 2).step
    (Slider(name='group', words='', start=8, low=1, high=16, step=1), 16)
    """
    step = max(start // multiple // 8, 1) * multiple
    low = start % step or step
    return Slider(name, words, start, low, 2 * start - (2 * start - low) % step, step)


def summary(plan: Plan) -> str:
    """Roles, devices and layouts of a plan's first phase in one line."""
    first = plan.phases[0]
    pools = (f"{pool.role} {pool.devices} x {pool.device} {layout_words(pool.layout)}" for pool in first.pools[:2])
    return "; ".join(pools)


def lost(plan: Plan, folder: Path) -> tuple[str, ...]:
    """What the framework's files cannot say of a plan, in words."""
    return losses(plan, None, folder=folder)


def archive(plan: Plan, folder: Path) -> bytes:
    """A ZIP of what ``rlperf plan --out`` writes: plan.yaml, report.md, the figure, and the framework's config."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in plan_contents(plan, plan_texts(plan, folder=folder), folder=folder).items():
            packed.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)
    return stream.getvalue()
