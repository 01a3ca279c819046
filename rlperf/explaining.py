"""Why is it slow? One road from what is at hand (a job, a plan, logs, per-rank timings, recordings) to its causes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlperf.api import Jobs, Question, ask, given, job_of
from rlperf.calibrate.requests.engine_trace import read_engine_traces
from rlperf.diagnose.explain import Explanation, explain_graph
from rlperf.diagnose.graph import PerformanceGraph
from rlperf.diagnose.logs import graph_of_ranks, graph_of_steps, logged_steps, read_rank_timings, too_long
from rlperf.diagnose.peers import Thresholds
from rlperf.diagnose.predicted import PredictedSteps, explain_prediction
from rlperf.diagnose.recorded import graph_of_recording, graph_of_traces
from rlperf.diagnose.scaling import ScalingExplanation, explain_scales
from rlperf.diagnose.sources import scaled_job, steps_of_job, steps_of_plan
from rlperf.errors import Problem, SpecError
from rlperf.files import listed
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.expressible import frameworks_with
from rlperf.frameworks.logs.read import out_of_memory, read_log
from rlperf.plan.answer import notebook
from rlperf.plan.answer.plan import Plan
from rlperf.plan.answer.reading import plan_in
from rlperf.specs.given import as_count, as_share
from rlperf.specs.job import Job
from rlperf.specs.job_document import SCRIPTS, read_job_document
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.own_files import folder_of
from rlperf.specs.reader import first_record, read_document
from rlperf.units import human_seconds, human_share
from rlperf.workload import read_recording

if TYPE_CHECKING:
    import polars as pl

Notes = tuple[str, ...]
Source = Jobs | Plan | Sequence[Path | str]


@dataclass(frozen=True)
class Explained:
    """The causes; over several numbers of devices also what grows with them.

    ``ended`` : how the run ended where its log says that it broke off, in words
    """

    causes: Explanation
    scaling: ScalingExplanation | None = None
    ended: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `rlperf explain --json` prints it."""
        found, scaling = self.causes, self.scaling
        plain = {"schema_version": 1, **asdict(found), "critical_s": dict(found.critical_s), "ended": self.ended}
        if scaling is not None:
            plain["scaling"] = {
                "devices": scaling.devices,
                "rl_step_s": scaling.rl_step_s,
                "ideal_slope": scaling.ideal,
                "scaling_loss_s": scaling.scaling_loss_s,
                "activities": [asdict(a) for a in scaling.activities],
            }
        return plain

    def to_frame(self) -> pl.DataFrame:
        """One row per cause."""
        told = ("nature", "where", "loss_s", "joint_s", "share", "evidence")
        rows = [
            {"cause": each.kind, **{name: getattr(each, name) for name in told},
             "advice": "; ".join(map(str, each.advice))}
            for each in self.causes.causes
        ]  # fmt: skip
        return notebook.frame(rows, ("cause", *told, "advice"))

    def __str__(self) -> str:
        scaling = str(self.scaling) if self.scaling else ""
        return "\n".join(filter(None, (self.ended, scaling, str(self.causes))))

    def _repr_html_(self) -> str:
        rows = [
            (each.kind.replace("_", " "), each.nature_words, human_seconds(each.loss_s), human_share(each.share),
             f"{each.where}: {each.evidence}", "; ".join(map(str, each.advice)))
            for each in self.causes.causes
        ]  # fmt: skip
        head = f"<p>{escape(self.ended)} <b>rl_step {human_seconds(self.causes.rl_step_s)}</b></p>"
        head += f"<pre>{escape(str(self.scaling))}</pre>" if self.scaling else ""
        causes = notebook.table(("cause", "nature", "loss", "share", "where, evidence", "advice"), rows)
        notes = "".join(f"<p>note: {escape(note)}</p>" for note in self.causes.notes)
        return head + (causes if rows else "<p>nothing is abnormal</p>") + notes


def explain(
    source: Source,
    *,
    scale: Sequence[int] = (),
    floor: float = 0.01,
    token_s: float | None = None,
    task: str | None = None,
) -> Explained:
    """Root causes of an rl_step's time, ranked, with the path to each and the knobs that remove it.

    Parameters
    ----------
    source : a job or plan (object, dict or file), or files: framework logs (several tables are one), per-rank timings,
        PolyTrace recordings
    scale : numbers of devices; a job is predicted at each, of several logs it is one each
    floor : smallest share of an rl_step to report
    token_s : seconds per generated token, for recordings of lengths only [s]
    task : which one of a job that has several; of a plan, what takes the most time of it, default: of all

    Raises
    ------
    SpecError : files that are missing or say nothing, numbers of devices that do not fit
    """
    floor, scale = as_share(floor, "floor"), tuple(as_count(devices, "scale") for devices in scale)
    if isinstance(source, Mapping):
        source = given(source)
    if isinstance(source, Plan):
        return _of_plan(source, ask(source.job), floor, task)
    if isinstance(source, Job | Mapping):
        return _of_job(source if isinstance(source, Job) else job_of(source, {}), None, scale, floor, task)
    paths = listed(source)
    missing = [Problem("no such file or folder", str(path)) for path in paths if not path.exists()]
    if missing or not paths:
        raise SpecError(missing or "nothing to explain: name a job, a plan, or the files of a run")
    if paths[0].suffix in SCRIPTS:
        read_job_document(paths[0])  # which tells what reads it
    if paths[0].suffix in (".yaml", ".yml"):
        if len(paths) > 1:
            raise SpecError("one job or plan at a time; logs may be several, with scale: the devices of each")
        plan = plan_in(read_document(paths[0]))
        folder = folder_of(paths[0])
        if plan is None or scale:
            return _of_job(paths[0], folder, scale, floor, task)
        return _of_plan(plan, ask(plan.job, folder=folder), floor, task)
    return _of_files(paths, scale, floor, token_s)


def _of_plan(plan: Plan, question: Question, floor: float, task: str | None) -> Explained:
    steps, notes = steps_of_plan(plan, question.context, task)
    return Explained(explain_prediction(steps, floor=floor, notes=notes, able=able_here(question)))


def _of_job(job: Job | Path, folder: Path | None, scale: Sequence[int], floor: float, task: str | None) -> Explained:
    question = ask(job, task=task)
    if not scale:
        steps, notes = steps_of_job(*question.pair)
        return Explained(explain_prediction(steps, floor=floor, notes=notes, able=able_here(question)))
    if len(scale) < 2:
        raise SpecError("scale needs at least two numbers of devices")
    jobs = [scaled_job(question.job, question.context.cluster, devices) for devices in sorted(scale)]
    predicted = [steps_of_job(*ask(each, folder=folder).pair) for each in jobs]
    found = _at_scales(predicted, floor)
    return replace(found, causes=_advised(found.causes, able_here(question)))


_KEYED = {"partial_rollout": "batch.over_provision", "over_provisioning": "batch.over_provision"}
"""Advice that needs a key of the framework -> the setting."""


def able_here(question: Question) -> dict[str, bool]:
    """Advice that a job's framework, its devices or its pools may not let follow -> whether they do."""
    device, apart = question.context.rollout_hardware.device, question.job.pool("rollout").cluster is not None
    able = _able(question.facts.name, question.facts.modes)
    able["kv_dtype"] = able["kv_dtype"] and (device.peaks.fp8 is not None or device.reads_fp8)
    return able | {"colocate": able["colocate"] and not apart, "split": not apart}


def _able(framework: str, modes: Iterable[Mode]) -> dict[str, bool]:
    """Advice that a framework may not let follow -> whether it does, in modes that it has."""
    traits = [MODES[mode] for mode in modes]
    return {
        **{knob: framework in frameworks_with(key) for knob, key in _KEYED.items()},
        "kv_dtype": framework in frameworks_with("rollout.kv_dtype", "fp8"),
        "staleness": any(each.runs_ahead for each in traits),
        "colocate": any(each.shares_devices for each in traits),
    }


def _advised(found: Explanation, able: Mapping[str, bool]) -> Explanation:
    """Without advice that nobody is able to follow."""
    causes = (replace(c, advice=tuple(a for a in c.advice if able.get(a.knob, True))) for c in found.causes)
    return replace(found, causes=tuple(causes))


def _at_scales(predicted: list[tuple[PredictedSteps, Notes]], floor: float) -> Explained:
    last, notes = predicted[-1]
    graphs = [steps.graph() for steps, _ in predicted]
    found = explain_scales(graphs, floor=floor, limits=replace(Thresholds(), serial=math.inf), notes=notes)
    largest = explain_prediction(last, floor=floor, notes=notes)
    known = {(c.kind, c.where) for c in largest.causes}
    faults = tuple(c for c in found.largest.faults if (c.kind, c.where) not in known)
    return Explained(replace(largest, causes=(*faults, *largest.causes)), found)


def _of_files(paths: list[Path], scale: tuple[int, ...], floor: float, token_s: float | None) -> Explained:
    recorded = _recorded(paths, token_s)
    if recorded is not None:
        return Explained(explain_graph(recorded[0], floor=floor, notes=recorded[1]))
    tables = not scale and all(path.suffix == ".csv" for path in paths)  # wandb exports one of each metric
    if not tables and (len(scale) not in (0, len(paths)) or (len(paths) > 1 and not scale)):
        raise SpecError(f"{len(paths)} logs need scale, with as many numbers of devices")
    broke = [problem for path in paths if (problem := out_of_memory(path))]
    ended = "; ".join(map(str, broke))
    try:
        runs = [paths] if tables else [[path] for path in paths]
        logs = [_log(run, devices) for run, devices in zip(runs, scale or (0,), strict=True)]
    except SpecError as error:  # a run that broke off before its first rl_step has no metrics to complain of
        raise SpecError(broke or error.problems) from error
    graphs, notes = [each.graph for each in logs], tuple(dict.fromkeys(note for each in logs for note in each.notes))
    able = _able(logs[-1].framework, framework_facts(logs[-1].framework).modes) if logs[-1].framework else {}
    if len(graphs) == 1:
        return Explained(_advised(explain_graph(graphs[0], floor=floor, notes=notes), able), ended=ended)
    found = explain_scales(graphs, floor=floor, notes=notes)
    return Explained(_advised(found.largest, able), found, ended)


def _recorded(sources: list[Path], token_s: float | None) -> tuple[PerformanceGraph, Notes] | None:
    """The graph of PolyTrace files; None where the sources are something else."""
    first = sources[0]
    if first.is_dir() and any(first.rglob("*tfevents*")):
        return None
    archive = first.name.endswith((".tar.gz", ".tgz", ".tar"))
    inside = sorted(first.rglob("*.jsonl")) if first.is_dir() else [] if archive else [first]
    head = first_record(inside[0]) if inside else None
    known = head is not None and {"turns", "output", "reward_time_s"} & head.keys()
    if not (first.is_dir() or archive or known):
        return None
    files = [f for path in sources for f in (sorted(path.rglob("*.jsonl")) if path.is_dir() else [path])]
    if not files:
        raise SpecError(Problem("holds nothing to explain: no logs, no event files, no recordings", str(first)))
    if head is not None and "turns" in head:
        return graph_of_traces(read_engine_traces(files))
    recording = read_recording(sources, skip_damaged=True)
    if not recording.lengths.n and not recording.rewards:
        read_recording(sources)  # says what is wrong with all that was left out: text instead of lengths, say
        raise SpecError(Problem("holds no lengths and no times", str(first)))
    return graph_of_recording(recording, token_s=token_s)


@dataclass(frozen=True)
class _Logged:
    """The graph of a log's rl_steps or of its ranks, what of the log it leaves out, and whose it is if it tells."""

    graph: PerformanceGraph
    notes: Notes = ()
    framework: str = ""


def _log(paths: Sequence[Path], devices: int) -> _Logged:
    head = first_record(paths[0])
    if head is not None and "stage" in head:
        return _Logged(graph_of_ranks(read_rank_timings(paths[0]), devices))
    log = read_log(paths)
    steady = log.settled()
    notes = [f"rl_step {log.rl_step[0]} left out: the first one compiles, captures and starts up"]
    notes = notes if steady.n < log.n else []
    paused = steady.pause_s[steady.pause_s > 0]
    if paused.size:
        notes.append(
            f"validation and checkpoints after {paused.size} of {steady.n} rl_steps left out: "
            f"{human_seconds(float(paused.sum()) / steady.n)} per rl_step in the mean"
        )
    untimed, stated = framework_facts(log.framework).untimed_stage, steady.stage_means()
    if untimed and stated and untimed not in stated:
        covered = np.nansum([getattr(steady, f"{stage}_s") for stage in stated], axis=0)
        steady = replace(steady, **{f"{untimed}_s": np.maximum(steady.rl_step_s - covered, 0.0)})
        notes.append(
            f"{log.framework} times no {untimed}: what its timers leave of an rl_step is taken for it, scoring too"
        )
    steps = logged_steps(steady)
    return _Logged(graph_of_steps(steps, devices), (*notes, *too_long(steps)), log.framework)
