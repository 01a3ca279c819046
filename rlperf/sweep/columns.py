"""Columns of a sweep's results: name, type, unit and meaning of each. The table is written beside the results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from rlperf.specs.pool import Attribute, Role, of_role
from rlperf.sweep.space import ROLES
from rlperf.sweep.spec import Checked


class Column(NamedTuple):
    """One column: ``kind`` is float, int or text."""

    name: str
    kind: str
    unit: str
    meaning: str


class DecidedColumn(NamedTuple):
    """A column that says what the planner has decided of a pool."""

    role: Role
    attribute: Attribute

    @property
    def name(self) -> str:
        """Of a layout with its role in front; a setting has a name of its own."""
        own = self.attribute.part == "settings" and self.attribute.owner != "both"
        return self.attribute.name if own else f"{self.role}_{self.attribute.name}"

    @property
    def written(self) -> tuple[str, str, str]:
        """Type, unit and meaning."""
        kind = {"count": "int", "flag": "int", "fraction": "float", "word": "text"}[self.attribute.kind]
        return kind, "flag" if self.attribute.kind == "flag" else self.attribute.unit, self.attribute.words


DECIDED = tuple(
    DecidedColumn(role, each)
    for role in ROLES
    for each in of_role(role)
    if each.decided == "searched" and (role, each.name) != ("rollout", "backend")  # the engine is the job's
)
RESULTS = (
    Column("status", "text", "", "ok; infeasible (nothing fits); wrong (the settings contradict each other); failed"),
    Column("reason", "text", "", "why there is no result; empty where there is one"),
    Column("rl_step_s", "float", "s", "one rl_step, mean"),
    Column("low_s", "float", "s", "5th percentile of the rl_step"),
    Column("high_s", "float", "s", "95th percentile of the rl_step"),
    Column("rollout_s", "float", "s", "rollout stage"),
    Column("reward_s", "float", "s", "reward stage, as far as it is not hidden"),
    Column("scoring_s", "float", "s", "scoring stage: old and reference log-probabilities"),
    Column("training_s", "float", "s", "training stage: all optimizer updates"),
    Column("weight_sync_s", "float", "s", "weights from the trainer to the engines"),
    Column("data_movement_s", "float", "s", "batch through the controller"),
    Column("offload_s", "float", "s", "colocated pools handing the devices over"),
    Column("other_s", "float", "s", "fixed overheads"),
    Column("usd_per_step", "float", "USD", "price of one rl_step; empty where no price is stated"),
    Column("device_s", "float", "s", "devices x rl_step"),
    Column("tokens_per_s_per_device", "float", "tokens/s", "trained tokens per second and device"),
    Column("trained_tokens", "float", "tokens", "prompt and response tokens trained per rl_step"),
    Column("truncated_fraction", "float", "1", "responses cut at the maximum length"),
    Column(
        "objective_value",
        "float",
        "s, USD or device-s per 1e6 tokens",
        "what the job minimises, without the price of the beaten path",
    ),
    Column("bottleneck", "text", "", "the stage with the most seconds"),
    Column("mode", "text", "", "execution mode"),
    Column("devices", "int", "1", "devices of all pools"),
    Column("rollout_memory_bytes", "float", "bytes", "peak per rollout device, neighbours included"),
    Column("rollout_memory_limit_bytes", "float", "bytes", "most that it may be at the job's out_of_memory_risk"),
    Column("trainer_memory_bytes", "float", "bytes", "peak per trainer device, neighbours included"),
    Column("trainer_memory_limit_bytes", "float", "bytes", "most that it may be at the job's out_of_memory_risk"),
    *(Column(each.name, *each.written) for each in DECIDED),
)
"""What every point has, after its number (``point``) and what it sets."""


def columns_of(checked: Checked) -> tuple[Column, ...]:
    """All columns of a sweep: the point's number, what it sets, what was found."""
    settings = [
        Column(path, _kind(_all_values(checked, path)), "as in the job", "set by the sweep; empty: as in the job")
        for path in checked.varied
    ]
    return (Column("point", "int", "", "number of the point in the sweep, from 0"), *settings, *RESULTS)


def _all_values(checked: Checked, path: str) -> Iterable[Any]:
    axes = dict(checked.axes)
    return axes[path] if path in axes else [dict(entry)[path] for entry in checked.entries if path in dict(entry)]


def _kind(values: Iterable[Any]) -> str:
    kinds = {type(value) for value in values}
    if kinds <= {int}:
        return "int"
    return "float" if kinds <= {int, float} else "text"


def columns_text(columns: Iterable[Column]) -> str:
    """``columns.csv``: the table of columns."""
    rows = ["column,type,unit,meaning"]
    rows += [",".join(_quoted(cell) for cell in column) for column in columns]
    return "\n".join(rows) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text
