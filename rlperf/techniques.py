"""What should I switch on? Every technique that a job leaves off (or on), planned beside the job as it is.

`TECHNIQUES` is the table: one row per technique, with the fields of a job that it changes, what of it is measured and
what assumed. Command, tutorial and the guide's table read the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from rlperf.alternatives import BASE, Judged, changed_job, job_and_folder, judged_plan, planned
from rlperf.api import Jobs, ask, job_of
from rlperf.cost.dtypes import dtype_of
from rlperf.errors import InfeasibleError, Problem, RlperfError, SpecError, did_you_mean
from rlperf.frameworks.expressible import frameworks_with
from rlperf.plan.answer import notebook
from rlperf.plan.answer.plan import Plan
from rlperf.plan.compare import Side, compare_weighted
from rlperf.processes import over_cores
from rlperf.sim.remembered import Remembered
from rlperf.sim.rl_step.stages import STAGES
from rlperf.specs.architecture import Architecture
from rlperf.specs.given import as_count
from rlperf.specs.job import Job
from rlperf.specs.pool import Role
from rlperf.specs.speculation import NONE
from rlperf.told import Tell, quiet, within
from rlperf.units import human_seconds

if TYPE_CHECKING:
    import polars as pl

ROLLOUT, TRAINER = "pools.rollout.settings.", "pools.trainer.settings."
Fields = Mapping[str, Any]
Stage = Literal["rollout", "training", "rl_step"]
SMALL = 0.02
"""A change of the rl_step below this share is not worth a switch, and the table says what is in its way [1]."""
NOTHING = "nothing: "
"""What `Technique.measured` begins with where no run with and without it is known: its row says so."""
PLANNING = 0.95
"""Share of the work that planning is; the rest are the draws that plans are compared on [1]."""


@dataclass(frozen=True)
class Technique:
    """One row of the table.

    Attributes
    ----------
    name, stage : in words; what it makes shorter
    changes : the fields of a job that it changes, by the model
    key : the setting (``rollout.kv_dtype``) or the mode whose key a framework needs
    usual : it is on in a job that says nothing: what is planned anew is the job without it
    simulated : no closed form counts it: every engine is simulated, so that its plan takes longest
    measured, assumed : what stands behind its figures
    """

    name: str
    stage: Stage
    changes: Callable[[Architecture], Fields]
    key: str
    measured: str
    assumed: str
    usual: bool = False
    simulated: bool = False

    def called(self, name: str) -> bool:
        """Whether it is asked for: by its name, or by some words of its name or key (``fp8``, ``one_step_off``)."""
        return bool(_words(name)) and _words(name) <= _words(f"{self.name} {self.key}")


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", text.lower()))


def _drafts(architecture: Architecture) -> list[str]:
    method = "mtp" if architecture.prediction_layers else "eagle3"
    return [f"{method}:{drafts}" for drafts in (1, 2, 3, 5)]


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        "speculative decoding", "rollout", lambda arch: {ROLLOUT + "speculation": _drafts(arch)}, "rollout.speculation",
        "acceptance of 3 MTP and 3 EAGLE-3 models by depth; one RL rollout (miles)",
        "launches of drafts and rejection sampling; shape of an EAGLE-3 head; acceptance alike in RL",
    ),
    Technique(
        "and the draft head trained", "rollout",
        lambda arch: {ROLLOUT + "speculation": _drafts(arch), ROLLOUT + "draft_training": True},
        "rollout.draft_training", "one pair of rollouts with a frozen and a trained head (slime)",
        "its training is one layer and a head of work; its states are held and sent, its activations are not counted",
    ),
    Technique(
        "n-gram drafts", "rollout", lambda _: {ROLLOUT + "speculation": "ngram:4"}, "rollout.speculation",
        "nothing: state draft_acceptance", "drafting is free",
    ),
    Technique(
        "fp8 rollouts", "rollout", lambda _: {ROLLOUT + "rollout_dtype": "fp8"}, "rollout.rollout_dtype",
        "fp8 kernels and served rows; three published rollouts",
        "weights are converted at every sync at the rate of memory",
    ),
    Technique(
        "nvfp4 rollouts", "rollout", lambda _: {ROLLOUT + "rollout_dtype": "nvfp4"}, "rollout.rollout_dtype",
        "nvfp4 kernels and served rows on Blackwell", "nothing elsewhere: without a unit for four bits it is refused",
    ),
    Technique(
        "fp8 cache", "rollout", lambda _: {ROLLOUT + "kv_dtype": "fp8"}, "rollout.kv_dtype",
        "decode attention on fp8 caches", "nothing is lost to scales",
    ),
    Technique(
        "fp8 training", "training", lambda _: {TRAINER + "compute_dtype": "fp8"}, "trainer.compute_dtype",
        "fp8 kernels and training steps of Megatron", "RL trainers as pre-training ones",
    ),
    Technique(
        "partial rollouts", "rollout", lambda _: {"tasks.*.over_provision": 2.0, "limits.staleness": 1},
        "batch.over_provision",
        "events; one published range (APRIL)", "what goes on in the next rl_step is read anew",
    ),
    Technique(
        "prefill apart from decode", "rollout", lambda _: {ROLLOUT + "prefill_replicas": [1, 2, 4, 8]},
        "rollout.prefill_replicas", "nothing: kernels and engines, as in serving",
        "the cache of a prompt is sent at the link's rate when all of it is there", simulated=True,
    ),
    Technique(
        "one step off", "rl_step", lambda _: {"modes": ["one_step_off"], "limits.staleness": 1}, "one_step_off",
        "asynchronous rows of two frameworks", "staleness costs no learning",
    ),
    Technique(
        "and the trainer's devices lent", "rl_step",
        lambda _: {"modes": ["one_step_off"], "limits.staleness": 1, ROLLOUT + "borrows": True},
        "rollout.borrows", "nothing: kernels and engines, as in serving",
        "what moves is read again; engines wake with the trainer's weights as colocated ones", simulated=True,
    ),
    Technique(
        "fully asynchronous", "rl_step", lambda _: {"modes": ["async"], "limits.staleness": 4}, "async",
        "asynchronous rows of two frameworks", "staleness costs no learning",
    ),
    Technique(
        "shared prefix in training", "training", lambda _: {TRAINER + "shared_prefix": True}, "trainer.shared_prefix",
        "two published gains of verl, to one of which its cost is fitted",
        "the attention kernel reads a tree as it reads a pack",
    ),
    Technique(
        "router replay", "rl_step", lambda _: {TRAINER + "router_replay": "R3"}, "trainer.router_replay",
        "nothing: it costs, and steadies training", "indices move with the samples and are looked up once",
    ),
    Technique(
        "DeepEP in engines", "rollout", lambda _: {ROLLOUT + "expert_dispatch": "deepep"}, "rollout.expert_dispatch",
        "its kernels for decodes and prompts, on one to eight nodes of H100",
        "other devices across nodes; the faster kernel is taken",
    ),
    Technique(
        "DeepEP in training", "training", lambda _: {TRAINER + "expert_dispatch": "deepep"}, "trainer.expert_dispatch",
        "training steps of Megatron", "RL trainers as pre-training ones",
    ),
    Technique(
        "Muon", "training", lambda _: {TRAINER + "optimizer": "muon"}, "trainer.optimizer",
        "nothing: published FLOP at measured rates of products", "what ranks shard is gathered once, and not hidden",
    ),
    Technique(
        "prefix caching", "rollout", lambda _: {ROLLOUT + "prefix_caching": False}, "rollout.prefix_caching",
        "hits of recorded request logs", "blocks are found at no cost; a prompt's samples are dealt to all replicas",
        usual=True,
    ),
    Technique(
        "CUDA graphs", "rollout", lambda _: {ROLLOUT + "cuda_graphs": False}, "rollout.cuda_graphs",
        "eager rows of vLLM V0", "a call takes the host as long now; of engines but vLLM it is not hidden", usual=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Gain:
    """What a technique does to a job.

    Attributes
    ----------
    rl_step_s : with it, planned anew [s]
    gain, low, high : share of the rl_step without it that it saves, 5th and 95th percentile [1]
    engine_bytes, trainer_bytes : by how much weights and workspace of an engine, and a trainer's peak, grow per device
    frameworks : that have a key for it (newest versions)
    said : what the planner chose, what is in its way, or why there are no figures
    """

    name: str
    rl_step_s: float | None = None
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    engine_bytes: float = 0.0
    trainer_bytes: float = 0.0
    frameworks: tuple[str, ...] = ()
    said: str = ""


@dataclass(frozen=True)
class GainTable:
    """The job as it is [s], and every technique beside it."""

    rl_step_s: float
    rows: tuple[Gain, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"schema_version": 1, "rl_step_s": self.rl_step_s, "rows": [asdict(row) for row in self.rows]}

    def to_frame(self) -> pl.DataFrame:
        """One row per technique."""
        return notebook.frame([{**asdict(row), "frameworks": ", ".join(row.frameworks)} for row in self.rows])

    def cells(self) -> list[tuple[str, ...]]:
        """Cells of every row that has figures, under `HEAD`."""
        return [cells for row in self.rows if (cells := _cells(row))]

    def notes(self) -> list[str]:
        """A line each: who has a key for it, what was chosen, what is in its way, or why it has no figures."""
        return [_note(row) for row in self.rows]

    def __str__(self) -> str:
        return "\n".join(["  ".join(cells) for cells in self.cells()] + self.notes())

    def _repr_html_(self) -> str:
        return notebook.table(HEAD, self.cells()) + notebook.table(("note",), [(line,) for line in self.notes()])


HEAD = ("technique", "rl_step", "gain", "engine, trainer GB")


def _cells(row: Gain) -> tuple[str, ...]:
    if row.rl_step_s is None or row.gain is None or row.low is None or row.high is None:
        return ()
    memory = f"{row.engine_bytes / 1e9:+z.1f}, {row.trainer_bytes / 1e9:+z.1f}"
    between = f"{100 * row.gain:+z.1f} % ({100 * row.low:+z.0f} .. {100 * row.high:+z.0f})"
    return (row.name, human_seconds(row.rl_step_s), between, memory)


def _note(row: Gain) -> str:
    said = row.said if row.gain is not None else f"no figures: {row.said}"
    return f"{row.name} ({', '.join(row.frameworks) or 'no framework'})" + (f": {said}" if said else "")


def _chosen(names: Sequence[str]) -> list[Technique]:
    """The rows asked for, all where nothing is; a `SpecError` names what no row is called."""
    found = [[each for each in TECHNIQUES if each.called(name)] for name in names]
    known = [each.name for each in TECHNIQUES]
    there = f"there are {', '.join(known)}; one word of a name or key will do"
    unknown = [name for name, rows in zip(names, found, strict=True) if not rows]
    if unknown:
        raise SpecError(
            Problem(f"there is no technique named {name!r}", suggestion=did_you_mean(name, known) or there)
            for name in unknown
        )
    return [each for each in TECHNIQUES if not names or any(each in rows for rows in found)]


def gains(
    job: Jobs | None = None, names: tuple[str, ...] = (), *, draws: int = 2, folder: Path | None = None,
    report: Tell | None = None, **values: Any,
) -> GainTable:  # fmt: skip
    """Every technique (or those that words of ``names`` call) against the job, planned anew on the same drawn rl_steps.

    Parameters
    ----------
    draws : common draws of the prompt groups
    folder : of a job object, as in `rlperf.api.ask`; that of a file is its own
    report : called with the share done and a text
    values : a job without a file, see `rlperf.api.job_of`

    Raises
    ------
    SpecError : a name that no technique has; InfeasibleError : the job itself has no plan
    """
    chosen, draws = _chosen(names), as_count(draws, "draws")
    base, folder = job_and_folder(job_of(job, values), folder)
    architecture = ask(base, folder=folder, to_plan=True).context.tasks[0].architecture
    changes = {each.name: each.changes(architecture) for each in sorted(chosen, key=lambda each: not each.simulated)}
    asked: dict[str, tuple[str, Fields]] = {name: (name, fields) for name, fields in {BASE: {}, **changes}.items()}
    tell = report or quiet
    # no plan hangs on another: the job as it is beside its changes, and first what takes longest
    plans = over_cores(partial(_planned, base=base, folder=folder), asked, within(tell, 0.0, PLANNING))
    found = dict(zip(asked, plans, strict=True))
    plan = found[BASE]
    if isinstance(plan, RlperfError):
        raise plan
    pieces = {each.name: (each, changes[each.name], found[each.name]) for each in chosen}
    work = partial(_gain, base=plan, draws=draws, folder=folder)
    rows = over_cores(work, pieces, within(tell, PLANNING, 1.0 - PLANNING))
    return GainTable(_first(plan, draws, folder).rl_step_s, tuple(rows))


def _planned(asked: tuple[str, Fields], *, base: Job, folder: Path | None, report: Tell) -> Plan | RlperfError:
    """The plan of a job with some fields changed, or why there is none."""
    name, fields = asked
    if not fields:  # without the job's own plan there is nothing to compare with
        return planned(base, folder=folder, report=report)
    try:
        return planned(changed_job(base, fields, name), folder=folder, report=report)
    except (InfeasibleError, SpecError) as error:
        return error


_FIRST = Remembered[Judged](most=1)
"""The job as it is on common draws, which a process that judges several techniques works out once."""


def _first(plan: Plan, draws: int, folder: Path | None) -> Judged:
    key = draws, plan.model_dump_json(), folder
    return _FIRST.get(key, lambda: judged_plan(plan, draws, folder=folder))


def _gain(
    asked: tuple[Technique, Fields, Plan | RlperfError], *, base: Plan, draws: int, folder: Path | None, report: Tell
) -> Gain:
    """The row of a technique, what it changes and its plan, beside the job as it is.

    Memory, and what was chosen or is in its way, are of the phase that takes most.
    """
    technique, fields, found = asked
    value = fields.get(f"pools.{technique.key.replace('.', '.settings.')}")
    row = Gain(technique.name, frameworks=frameworks_with(technique.key, None if isinstance(value, list) else value))
    try:
        if isinstance(found, RlperfError):
            raise found
        now, then = _first(base, draws, folder), judged_plan(found, draws, folder=folder)
    except InfeasibleError as error:
        return replace(row, said=f"no plan: {(error.nearest_miss or error.message).partition('; ')[0]}")
    except SpecError as error:
        own, refusal = base.job.framework.partition("==")[0], error.problems[0]
        # of what has no key in the job's framework the row says which others have one: no hint is needed
        return replace(row, said=str(refusal) if own in row.frameworks else refusal.message)
    off, on = (then, now) if technique.usual else (now, then)
    step, before, after = compare_weighted(off.sides, on.sides), off.longest, on.longest
    unseen = "no run with it is measured" if technique.measured.startswith(NOTHING) else ""
    return replace(
        row,
        rl_step_s=on.rl_step_s,
        gain=1.0 - step.ratio,
        low=1.0 - step.high,
        high=1.0 - step.low,
        engine_bytes=float((_engine(after) - _engine(before)).item()),
        trainer_bytes=float((after.evaluation.held.peak - before.evaluation.held.peak).item()),
        said=", ".join(filter(None, (_lag(fields, after), _said(technique, before, after, step.ratio), unseen))),
    )


def _lag(fields: Fields, side: Side) -> str:
    """How stale what is trained on may be, where a technique sets it: the gain is of that many rl_steps.

    Of a mode that is what was planned; files without a key for the bound are planned with the least, and may exceed it.
    """
    asked = fields.get("limits.staleness")
    if asked is None or "modes" not in fields:
        return "" if asked is None else f"staleness {asked}"
    lacks = side.context.job.limits.staleness != asked
    exceeds = ", which its files do not bound: samples may be staler" if lacks else ""
    return f"staleness {side.evaluation.configuration.staleness}{exceeds}"


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values))


def _engine(side: Side) -> np.ndarray:
    memory = side.evaluation.memory
    return np.asarray(memory.weight_bytes + memory.workspace_bytes)


def _said(technique: Technique, first: Side, side: Side, ratio: float) -> str:
    """What was chosen; of what does not pay, what is in its way."""
    if technique.usual:
        return "on already"
    if side.evaluation.configuration == first.evaluation.configuration:
        return "the plan as it is has it"
    if runs := _narrower(technique, first, side):
        return f"the plan as it is has {runs}"
    words, replicas = "", side.evaluation.replicas
    if (drafts := _drafts_of(side)) != _drafts_of(first):
        words = str(drafts)
    if technique.key == "rollout.prefill_replicas":
        words = f"{replicas.readers} of {replicas.count} replicas read"
    if technique.key == "rollout.borrows":
        words = f"{replicas.lent} engines on the trainer's devices"
    if ratio < 1.0 - SMALL:
        return words
    why = _grown(first, side) if ratio > 1.0 + SMALL else ""
    if technique.stage != "rl_step":
        why = why or _in_the_way(technique, first)
    return ", ".join(part for part in (words, why) if part)


def _narrower(technique: Technique, first: Side, side: Side) -> str:
    """The dtype of the plan as it is, where a technique is one that is no narrower; empty: it is none of a dtype."""
    role, _, name = technique.key.partition(".")
    if not name.endswith("_dtype"):
        return ""
    now, then = (
        str(getattr(each.evaluation.configuration.pool(cast(Role, role)).settings.filled(), name))
        for each in (first, side)
    )
    bits = [round(8 * dtype_of(each).weight_bytes) for each in (now, then)]  # without the scales of blocks
    return now if bits[0] <= bits[1] else ""


def _drafts_of(side: Side) -> str:
    return side.evaluation.configuration.pool("rollout").settings.speculation or NONE


def _grown(first: Side, side: Side) -> str:
    """The stage that a technique makes longer by most, of one that costs more than it spares."""
    then, now = ({name: _mean(getattr(each.evaluation.seconds, name)) for name in STAGES} for each in (first, side))
    longer = max(STAGES, key=lambda name: now[name] - then[name])
    return f"{longer.removesuffix('_s').replace('_', ' ')} {human_seconds(now[longer] - then[longer])} longer"


def _in_the_way(technique: Technique, side: Side) -> str:
    """The rest of the rl_step, and of the tail's engine_steps the host's part, which the technique does not shorten."""
    seconds = side.evaluation.seconds
    stage_s = seconds.rollout_s if technique.stage == "rollout" else seconds.training_s
    share = float((stage_s / seconds.rl_step_s).mean())
    said = f"{technique.stage} is {100 * share:.0f} % of the rl_step"
    if technique.stage != "rollout":
        return said
    cost = side.evaluation.cost
    host = float(cost.host_s / cost.decode_s(1.0, 4096.0))
    return f"{said}, and the host is {100 * host:.0f} % of an engine_step in its tail"
