"""What happens inside a rollout? A job's rollout event by event, and of modes that run ahead their steady state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rlperf.api import Jobs, judge, pinned_of
from rlperf.errors import SpecError
from rlperf.plan.answer import notebook
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.judge.timeline import steady_state
from rlperf.report.rollout import CAUSES, perfetto_trace, rollout_figure
from rlperf.sim.rl_step.asynchronous import AsyncResult
from rlperf.sim.rollout import RolloutResult, Trajectories
from rlperf.sim.rollout.routing import Routing, unknown_routing
from rlperf.specs.given import as_count, as_path
from rlperf.specs.writer import write_atomic
from rlperf.units import human_seconds

if TYPE_CHECKING:
    import polars as pl

STEADY_RL_STEPS = 50
"""rl_steps of which the steady state is told."""
REPLICA_HEAD = ("replica", "devices", "finish [s]", "mean running")
LOST_HEAD = ("lost to", "device seconds", "share")


@dataclass(frozen=True, eq=False)
class SimulatedJob:
    """One rollout of a job, every request of it.

    Attributes
    ----------
    job : its name
    rollout : the end of every trajectory [s] ``[trajectories]``, what each replica did along time ``[replicas]``, and
        device-seconds lost by cause
    steady : of a mode that runs ahead the steady state over many rl_steps: period, staleness, queue; else None
    assumed : warnings, and what the job leaves open
    files : the trace and the figure, where a folder was named
    """

    job: str
    rollout: RolloutResult
    steady: AsyncResult | None
    assumed: tuple[str, ...]
    files: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `rlperf simulate --json` prints it."""
        rollout = self.rollout
        return {
            "schema_version": 1,
            "makespan_s": rollout.makespan_s,
            "replica_finish_s": rollout.replica_finish_s.tolist(),
            "devices": rollout.devices.tolist(),
            "trajectories": len(rollout.finish_s),
            "generated_tokens": rollout.generated_tokens,
            "tokens_per_s": rollout.tokens_per_s,
            "mean_running": [timeline.mean_running for timeline in rollout.timelines],
            "preemptions": rollout.preemptions,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "lost_device_s": asdict(rollout.lost),
            "steady": None if self.steady is None else _steady_dict(self.steady),
            "job": self.job,
            "assumed": list(self.assumed),
            "files": [str(file) for file in self.files],
        }

    def to_frame(self) -> pl.DataFrame:
        """One row per replica: its devices, when it finished [s], mean of its running requests, tokens found cached."""
        columns = ("replica", "devices", "finish_s", "mean_running", "prefix_hit_tokens")
        rows = [
            dict(zip(columns, (r, int(devices), line.makespan_s, line.mean_running, line.hit_tokens), strict=True))
            for r, (devices, line) in enumerate(zip(self.rollout.devices, self.rollout.timelines, strict=True))
        ]
        return notebook.frame(rows, columns)

    @property
    def prefix_hit_tokens(self) -> int:
        """Prompt tokens that were found in the cache."""
        return sum(timeline.hit_tokens for timeline in self.rollout.timelines)

    @property
    def head(self) -> str:
        """What it comes to, in a line."""
        rollout = self.rollout
        return (
            f"{self.job}: {len(rollout.finish_s):,} trajectories, {rollout.generated_tokens:,} tokens in "
            f"{human_seconds(rollout.makespan_s)} ({rollout.tokens_per_s:,.0f} tokens/s)"
        )

    def replica_cells(self) -> list[tuple[str, ...]]:
        """Every replica under `REPLICA_HEAD`."""
        lines = zip(self.rollout.devices, self.rollout.timelines, strict=True)
        return [(str(r), str(n), f"{t.makespan_s:.1f}", f"{t.mean_running:.1f}") for r, (n, t) in enumerate(lines)]

    def lost_cells(self) -> list[tuple[str, ...]]:
        """Device-seconds without full batches by cause, under `LOST_HEAD`."""
        whole = self.rollout.all_devices * self.rollout.makespan_s
        lost = asdict(self.rollout.lost).items()
        return [(CAUSES[name], f"{each:,.0f}", f"{100 * each / whole:.1f} %") for name, each in lost]

    def notes(self) -> list[str]:
        """What is computed again, the steady state, and what was assumed."""
        found = [f"preemptions {self.rollout.preemptions:,}, prefix hits {self.prefix_hit_tokens:,} tokens"]
        found += [_steady_words(self.steady)] if self.steady else []
        return found + [f"assumed: {text}" for text in self.assumed]

    def __str__(self) -> str:
        lost = ", ".join(f"{share} {cause}" for cause, _, share in self.lost_cells())
        return "\n".join((self.head, f"lost of the device-seconds: {lost}", *self.notes()))

    def _repr_html_(self) -> str:
        tables = notebook.table(REPLICA_HEAD, self.replica_cells()) + notebook.table(LOST_HEAD, self.lost_cells())
        return notebook.table((self.head,), [(note,) for note in self.notes()]) + tables


def simulate_job(
    job: Jobs | None = None, out: Path | str | None = None, *, routing: Routing = "round_robin", rl_step: int = 0,
    phase: int = 1, task: str | None = None, **values: Any,
) -> SimulatedJob:  # fmt: skip
    """One rollout of a job with pinned pools (or a plan), event by event; what is left open is filled in.

    Parameters
    ----------
    out : folder for a trace that Perfetto (ui.perfetto.dev) shows and a figure; made if it is not there
    routing : how requests find their replica, see `rlperf.sim.rollout.routing.Routing`
    rl_step : which of the job's sampled or recorded rl_steps, from 0
    phase : of a plan, from 1
    task : which one of a job that has several
    values : a job without a file, or fields in place of its own, see `rlperf.api.job_of`

    Raises
    ------
    SpecError : wrong fields or names; an rl_step, phase or task that is not there
    InfeasibleError : the pinned degrees cannot be laid out at all
    """
    if routing not in get_args(Routing):
        raise unknown_routing(routing)
    rl_step, folder = as_count(rl_step, "rl_step", 0), None if out is None else as_path(out, "out")
    asked, evaluation, predicted = judge(pinned_of(job, values), phase=phase, task=task)
    trajectories, rollout = _served(evaluation, routing, rl_step)
    texts: Mapping[str, str] = {}
    if folder is not None:
        figure = rollout_figure(rollout, title=asked.name).decode()
        texts = {"trace.json": perfetto_trace(rollout, trajectories), "rollout.svg": figure}
    return SimulatedJob(
        asked.name, rollout, steady_state(evaluation, STEADY_RL_STEPS), (*predicted.warnings, *predicted.assumed),
        tuple(write_atomic(folder / name, text) for name, text in texts.items() if folder),
    )  # fmt: skip


def _served(evaluation: Evaluation, routing: Routing, rl_step: int) -> tuple[Trajectories, RolloutResult]:
    """All trajectories of an rl_step, and what the judged replicas make of them."""
    tables, replicas = evaluation.demand.tables, evaluation.replicas
    if rl_step >= len(tables):
        last = len(tables) - 1
        raise SpecError(f"there is no rl_step {rl_step}: this job has {len(tables)} to simulate, 0 to {last}")
    trajectories = Trajectories.from_table(tables[rl_step])
    return trajectories, replicas.serve(trajectories, routing)


def _steady_dict(steady: AsyncResult) -> dict[str, Any]:
    """A steady state as plain data; ``staleness`` is the share of samples so many versions behind."""
    return {
        "period_s": steady.period_s,
        "samples_per_s": steady.samples_per_s,
        "staleness_mean": steady.staleness_mean,
        "staleness": _staleness(steady),
        "queue_samples": steady.queue_samples,
        "trainer_busy": steady.trainer_busy,
        "slots_busy": steady.slots_busy,
    }


def _staleness(steady: AsyncResult) -> list[float]:
    counts = steady.staleness_counts
    return [float(share) for share in counts / max(int(counts.sum()), 1)]


def _steady_words(steady: AsyncResult) -> str:
    shares = ", ".join(f"{100 * share:.0f} % {behind}" for behind, share in enumerate(_staleness(steady)) if share)
    return (
        f"steady state over {STEADY_RL_STEPS} rl_steps: {human_seconds(steady.period_s)} each; "
        f"weight versions behind: {steady.staleness_mean:.2f} on average ({shares}); "
        f"{steady.queue_samples:,.0f} samples wait for the trainer, which is busy "
        f"{100 * steady.trainer_busy:.0f} % of the time; engines' slots {100 * steady.slots_busy:.0f} %"
    )
