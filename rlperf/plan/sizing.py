"""The answer to how many devices a job needs: every cluster that was tried, and which of them meets the target."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from rlperf.plan.answer import notebook
from rlperf.plan.answer.plan import Plan
from rlperf.plan.answer.whole import WholeStep
from rlperf.plan.size_target import SizeTarget
from rlperf.units import human_seconds, human_share, human_usd

if TYPE_CHECKING:
    import polars as pl

HELPS = 0.05
"""Share of the rl_step that more nodes must save to be called a help."""


@dataclass(frozen=True)
class SizeRow:
    """One cluster that was tried: what it reaches (of all tasks together), or why it cannot run the job.

    ``usd_per_step`` : of every device of the nodes, whether the plan uses it or not
    ``off_path`` : its best layout is one that nobody runs, as seven stages are (`rlperf.plan.search.beaten_path`)
    ``rollout_nodes`` : of the rollout's own cluster, where the job leaves open how many; ``devices`` are of both
    """

    cluster: str
    nodes: int
    devices: int
    value: float | None
    rl_step_s: float | None
    usd_per_step: float | None
    meets: bool
    note: str = ""
    off_path: bool = False
    rollout_nodes: int | None = None


@dataclass(frozen=True)
class Floor:
    """What no number of a cluster's nodes beats, and from how many on more of them hardly help.

    ``enough_nodes`` : fewest of those tried that no larger number beats by more than `HELPS`; None: more still help
    ``waits_for`` : what an rl_step waits for however many nodes there are, in words
    """

    cluster: str
    rl_step_s: float
    enough_nodes: int | None
    waits_for: str


@dataclass(frozen=True)
class Sizing:
    """Every cluster tried, and the best that meets the target (None where none does).

    ``floors`` : of the clusters whose devices can hold the job's engines at all
    ``by`` : what was least of those that meet it: USD per rl_step, where all have a price, else devices
    ``unpriced`` : clusters that were tried, or that their rollout stands on, and that have no price
    """

    target: SizeTarget
    rows: tuple[SizeRow, ...]
    best: SizeRow | None
    plan: Plan | None
    floors: tuple[Floor, ...] = ()
    by: Literal["usd", "devices"] = "devices"
    unpriced: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `rlperf size --json` prints it."""
        return {
            "schema_version": 1,
            "target": asdict(self.target),
            "rows": [asdict(row) for row in self.rows],
            "best": None if self.best is None else asdict(self.best),
            "by": self.by,
            "unpriced": list(self.unpriced),
            "floors": [asdict(floor) for floor in self.floors],
            "plan": None if self.plan is None else self.plan.to_dict(),
        }

    def to_frame(self) -> pl.DataFrame:
        """One row per cluster that was tried."""
        return notebook.frame([asdict(row) for row in self.rows])

    @property
    def verdict(self) -> str:
        """What was found, in a line."""
        if self.best is None:
            return f"none{self.nearest and f' ({self.nearest})'}"
        return f"{self._named(self.best)}: {self._why(self.best)}"

    def _named(self, best: SizeRow) -> str:
        words = f"{best.nodes} node{'s' if best.nodes > 1 else ''} of {best.cluster}"
        if best.rollout_nodes is not None and self.plan is not None:
            words += f" and {best.rollout_nodes} of {self.plan.job.pool('rollout').cluster}"
        return words

    def _why(self, best: SizeRow) -> str:
        if self.by == "usd":
            return f"the cheapest{self._ties}"
        several = len({row.cluster for row in self.rows}) > 1 or best.rollout_nodes is not None
        if not several or not self.unpriced:
            return "the fewest devices"
        lack = f"{' and '.join(self.unpriced)} {'has' if len(self.unpriced) == 1 else 'have'} no price"
        how = f"--price {','.join(f'{name}=...' for name in self.unpriced)} in USD per device and hour"
        return f"the fewest devices; which is cheapest is not known, as {lack} (give {how})"

    @property
    def nearest(self) -> str:
        """What came nearest to a target that nothing meets; empty where nothing could be planned."""
        tried = [row for row in self.rows if row.value is not None]
        least = min(tried, key=lambda row: row.value or 0.0, default=None)
        if least is None or least.value is None:
            return ""
        reached = f"{human_usd(least.value)} USD" if self.target.measure == "usd/step" else human_seconds(least.value)
        return f"the nearest: {reached} on {least.nodes} x {least.cluster}"

    @property
    def passed_over(self) -> str:
        """Fewer devices that would do in a layout which nobody runs; empty where there are none."""
        rows = [row for row in self.rows if row.meets and row.off_path]
        least = min(rows, key=lambda row: row.devices, default=None)
        if least is None or self.best is None or self.best.off_path or least.devices >= self.best.devices:
            return ""
        return f"{least.nodes} x {least.cluster} would do, {least.note}"

    @property
    def tied(self) -> tuple[SizeRow, ...]:
        """Other clusters that meet the target within the best one's own interval of USD, the cheapest of each.

        Where the best are on the beaten path, nodes off it only as far as they are cheaper, beside those on it.
        """
        if self.by != "usd" or self.plan is None or self.best is None or self.best.usd_per_step is None:
            return ()
        whole = WholeStep.of(self.plan)
        least: dict[tuple[str, bool], SizeRow] = {}
        for row in sorted(self.rows, key=lambda row: row.usd_per_step or math.inf):
            off = row.off_path and not self.best.off_path
            high = self.best.usd_per_step * (1.0 if off else whole.high_s / whole.rl_step_s)
            if row.meets and row.cluster != self.best.cluster and (row.usd_per_step or math.inf) <= high:
                least.setdefault((row.cluster, off), row)
        return tuple(least.values())

    @property
    def _ties(self) -> str:
        """``; dearer, but within the interval of its prediction: 2 x dgx_h200 (+6 %)``, or cheaper and passed over."""
        if self.best is None or not self.best.usd_per_step:
            return ""
        said = ""
        for words, cheaper in (
            ("cheaper, but off the beaten path", True),
            ("dearer, but within the interval of its prediction", False),
        ):
            spent = ((row, (row.usd_per_step or 0.0) / self.best.usd_per_step - 1.0) for row in self.tied)
            more = [f"{row.nodes} x {row.cluster} ({human_share(over, sign=True)})"
                    for row, over in spent if (over < 0.0) == cheaper]  # fmt: skip
            said += f"; {words}: {', '.join(more)}" if more else ""
        return said

    @property
    def doubt(self) -> str:
        """That the target is met in the mean and not at the 95th percentile; empty where it is met at both."""
        if self.plan is None or self.target.measure != "step":
            return ""
        high = WholeStep.of(self.plan).high_s
        if high <= self.target.limit:
            return ""
        return f"met in the mean: at the 95th percentile an rl_step takes {human_seconds(high)}"

    def __str__(self) -> str:
        if self.best is None or self.best.rl_step_s is None:
            notes = dict.fromkeys(row.note for row in self.rows if row.note)
            return "; ".join([f"{self.target}: {self.verdict} of {len(self.rows)} clusters tried", *notes])
        cost = "" if self.best.usd_per_step is None else f", {human_usd(self.best.usd_per_step)} USD"
        takes = f"{human_seconds(self.best.rl_step_s)} per rl_step{cost}"
        return f"{self.target}: {self._named(self.best)}, {takes}: {self._why(self.best)}"

    def _repr_html_(self) -> str:
        head = ("cluster", "nodes", "devices", "rl_step", "USD per rl_step", "meets", "note")
        rows = [
            (r.cluster, r.nodes, r.devices, "-" if r.rl_step_s is None else human_seconds(r.rl_step_s),
             "-" if r.usd_per_step is None else human_usd(r.usd_per_step), "yes" if r.meets else "no", r.note)
            for r in self.rows
        ]  # fmt: skip
        return f"<p>{self.target}: <b>{escape(self.verdict)}</b></p>" + notebook.table(head, rows)
