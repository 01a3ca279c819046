"""Answers as tables: plain rows for frames, and HTML for notebooks. Layout of pages belongs to `rlperf.report`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

    from rlperf.plan.answer.plan import Phase, Plan, Prediction


def frame(rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """Rows as a frame."""
    import polars as pl

    return pl.DataFrame(list(rows), infer_schema_length=None)


def prediction_row(prediction: Prediction) -> dict[str, Any]:
    """One flat row: names end in their unit, stages and memory with their role."""
    return {
        "rl_step_s": prediction.rl_step_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        **{f"{name}_s": seconds for name, seconds in prediction.stages_s.model_dump().items()},
        **{f"{role}_memory_bytes": use.total for role, use in prediction.memory_bytes.items()},
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "usd_per_step": prediction.usd_per_step,
        "trained_tokens": prediction.trained_tokens,
        "truncated_fraction": prediction.truncated_fraction,
        "fits": prediction.fits,
    }


def phase_row(phase: Phase) -> dict[str, Any]:
    """One flat row of a phase: what is run, with which degrees, and what it is predicted to do."""
    row: dict[str, Any] = {
        "tasks": ", ".join(phase.tasks),
        "first_rl_step": phase.rl_steps[0],
        "last_rl_step": phase.rl_steps[1],
        "mode": phase.mode,
        "staleness": phase.staleness,
        **phase.settings.model_dump(),
    }
    for pool in phase.pools:
        row[f"{pool.role}_devices"] = pool.devices
        row |= {f"{pool.role}_{name}": value for name, value in pool.layout.model_dump().items()}
        row[f"{pool.role}_backend"] = pool.settings.backend
    return {**row, **prediction_row(phase.predicted)}


def seconds_words(prediction: Prediction) -> str:
    """Mean and interval in words."""
    return f"{prediction.rl_step_s:.4g} s ({prediction.low_s:.4g} to {prediction.high_s:.4g} s)"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table as HTML.

    >>> table(["a"], [["<1>"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;1&gt;</td></tr></tbody></table>'
    """
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def prediction_html(prediction: Prediction) -> str:
    """A prediction for a notebook: the rl_step, its stages, and memory against its limit."""
    stages = [
        (name.replace("_", " "), f"{seconds:.3g} s", f"{seconds / prediction.rl_step_s:.0%}")
        for name, seconds in prediction.stages_s.model_dump().items()
        if seconds > 0
    ]
    memory = [
        (role, f"{use.total / 1e9:.1f} GB", f"{use.limit / 1e9:.1f} GB", "yes" if use.total <= use.limit else "no")
        for role, use in prediction.memory_bytes.items()
    ]
    usd = "" if prediction.usd_per_step is None else f", {prediction.usd_per_step:.3g} USD"
    return (
        f"<p><b>rl_step {seconds_words(prediction)}</b>, 5th to 95th percentile{usd}; "
        f"{prediction.tokens_per_s_per_device:,.0f} tokens/s per device</p>"
        + table(["stage", "time", "share"], stages)
        + table(["role", "memory per device", "limit", "fits"], memory)
    )


def phase_html(phase: Phase) -> str:
    """A phase for a notebook: its pools and its prediction."""
    degrees = []
    for pool in phase.pools:
        values = {n: v for n, v in pool.layout.model_dump().items() if v not in (0, 1, False, "none")}
        words = ", ".join(f"{name} {value}" for name, value in values.items()) or "one device per replica"
        degrees.append((pool.role, f"{pool.devices} x {pool.device}", pool.settings.backend, words))
    first, last = phase.rl_steps
    return (
        f"<p>{escape(', '.join(phase.tasks))}, rl_steps {first} to {last}: {phase.mode}</p>"
        + table(["role", "devices", "backend", "layout"], degrees)
        + prediction_html(phase.predicted)
    )


def plan_html(plan: Plan) -> str:
    """A plan for a notebook, phase by phase."""
    words = f"{plan.job.architecture} on {plan.job.cluster}, {plan.status}"
    head = f"<p><b>{escape(plan.job.name)}</b>: {escape(words)}</p>"
    return head + "".join(phase_html(phase) for phase in plan.phases)
