"""Workloads for people: summaries, tables and figures of recordings, length models and their fidelity."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlperf.errors import SpecError
from rlperf.report.style import new_figure, saved
from rlperf.specs.writer import write_atomic
from rlperf.units import human_share
from rlperf.workload.fidelity import Fidelity, bias, coverage, group_max_ratio, width_ratio
from rlperf.workload.lengths import Float, LengthTable
from rlperf.workload.model import LengthModel
from rlperf.workload.multiturn import anova_icc
from rlperf.workload.records import Recording, reward_max_over_ranks
from rlperf.workload.sampling import forecast_lengths, mean_response_tokens, sample_lengths, truncated_fraction
from rlperf.workload.stages import Filtering

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

_P = (50, 90, 95, 99, 99.9)
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"
IF_ANY = ("skipped", "incomplete_groups")
"""Counts of what was left out, which the screen says where there is any."""


def recording_summary(recording: Recording) -> dict[str, Any]:
    """What a recording holds, as plain values."""
    table = recording.lengths
    summary: dict[str, Any] = {
        "schema_version": 1,
        "kind": "recording",
        "files": list(recording.files),
        "responses": table.n_trajectories if table.n else 0,
        "prompts": table.n_groups,
        "group_size": table.group_size if table.n else None,
        "rl_steps": [int(s) for s in table.steps()],
        "max_response_tokens": table.max_response_tokens,
        "max_response_tokens_inferred": recording.cap_inferred,
        "max_context_tokens": recording.max_context_tokens,
        "multi_turn": table.multi_turn,
        "columns_not_read": list(recording.unread),
        "skipped": len(recording.skipped),
        "incomplete_groups": recording.skipped_groups,
    }
    if table.n:
        summary |= _length_summary(table)
    if recording.rewards:
        per_step = reward_max_over_ranks(recording.rewards)
        summary["reward_s"] = {"rank_times": len(recording.rewards), "mean_of_slowest_rank": float(per_step.mean())}
    if recording.filters:
        law = Filtering.fit(recording.filters)
        summary["filtering"] = asdict(law) | {
            "generation_batches_per_trainer_step": float(law.generation_batches().mean())
        }
    if recording.tool_latencies:
        times = np.array([t.latency_s for t in recording.tool_latencies])
        summary["tool_latency_s"] = {"calls": int(times.size), "mean": float(times.mean()), **_percentiles(times)}
    if recording.distributions:
        summary["distributions"] = [sorted(d) for d in recording.distributions]
    return summary


def _length_summary(table: LengthTable) -> dict[str, Any]:
    rows = table.trajectories()
    group, _ = rows.group_index()
    responses = rows.response_tokens.astype(float)
    content: dict[str, Any] = {
        "prompt_tokens": {"mean": float(rows.prompt_tokens.mean()), **_percentiles(rows.prompt_tokens)},
        "response_tokens": {"mean": float(responses.mean()), **_percentiles(responses), "max": float(responses.max())},
        "truncated_fraction": float(table.truncated.sum() / table.n_trajectories),
        "icc_log_tokens": anova_icc(np.log(responses), group),
        "per_rl_step": [
            {
                "rl_step": int(s),
                "prompts": part.n_groups,
                "mean_tokens": float(part.trajectories().response_tokens.mean()),
                "max_tokens": int(part.trajectories().response_tokens.max()),
                "total_tokens": int(part.response_tokens.sum()),
            }
            for s in table.steps()
            for part in [table.step(int(s))]
        ],
    }
    content["group_max_ratio"] = group_max_ratio(table) if rows.n > table.n_groups else None
    if not table.multi_turn:
        return content
    content["turns_per_trajectory"] = table.n / table.n_trajectories
    if table.cached_tokens is not None:
        content["cached_fraction"] = float(table.cached_tokens.sum() / table.prompt_tokens.sum())
    if table.tool_latency_s is not None:
        waited = table.tool_latency_s[table.tool_latency_s > 0]
        content["tool_wait_s"] = {"mean": float(waited.mean()), **_percentiles(waited)} if waited.size else None
    return content


def _percentiles(values: Any) -> dict[str, float]:
    return {f"p{p:g}": float(v) for p, v in zip(_P, np.percentile(values, _P), strict=True)}


def model_summary(
    model: LengthModel, max_response_tokens: int | None = None, rl_step: int | None = None
) -> dict[str, Any]:
    """What a length model says, as plain values; shares and means at a cap with 5th and 95th percentile."""
    cap = max_response_tokens or model.max_response_tokens
    summary: dict[str, Any] = {
        "schema_version": 1,
        "kind": "model",
        "task": model.task,
        "provenance": model.provenance.headline(),
        "note": model.provenance.note,
        "assumed": model.provenance.kind == "assumed",
        "max_response_tokens": cap,
        "recorded_max_response_tokens": model.max_response_tokens,
    }
    if cap is not None:
        summary["truncated_fraction"] = truncated_fraction(model, cap)
    summary["mean_response_tokens"] = mean_response_tokens(model, cap)
    if model.mixture:
        summary["mixture"] = {s.task: s.share for s in model.mixture}
        return summary
    prompt, response = model.laws()
    if cap is not None and model.turns is None:
        low, high = model.interval(cap)
        summary |= {"truncated_fraction_low": float(low[0]), "truncated_fraction_high": float(high[0])}
        summary |= {"mean_response_tokens_low": float(low[1]), "mean_response_tokens_high": float(high[1])}
    quantiles = response.quantile(np.array(_P) / 100)
    summary |= {
        "law": response.name,
        "prompt_law": prompt.name,
        "mean_prompt_tokens": prompt.mean() + 0.5,
        "uncensored_quantiles": {f"p{p:g}": float(v) for p, v in zip(_P, quantiles, strict=True)},
        "goodness": {"ks": model.provenance.ks, "ks_prompts": model.provenance.ks_prompts},
        "icc": model.dependence.icc,
        "icc_se": model.dependence.icc_se,
        "beta": model.dependence.beta,
        "spread_sd": model.dependence.spread_sd,
        "spread_corr": model.dependence.spread_corr,
        "drift": model.drift.what_is_known(model.drift.rl_steps[-1]) if model.drift.rl_steps else "not recorded",
        "parameters": _parameters(model),
        "candidates": [asdict(c) for c in model.candidates],
    }
    if rl_step is not None:
        summary["forecast"] = forecast_lengths(model, rl_step, cap).model_dump()
    if model.turns is not None:
        summary["turns_per_trajectory"] = model.turns.mean_turns
        # of a model with turns the law above is of whole trajectories, and the laws tried are those of one turn
        summary["candidates_are_of"] = "tokens of one turn; law, of all that a trajectory generates"
    if model.filtering is not None:
        summary["filtering"] = asdict(model.filtering) | {"rollouts_per_trained": model.filtering.rollouts_per_trained}
    if model.reward is not None:
        summary["reward_s"] = asdict(model.reward)
    return summary


def _parameters(model: LengthModel) -> dict[str, dict[str, float | None]]:
    """Parameters of the response law with their standard errors; None where not known."""
    law = model.laws()[1]
    errors = np.sqrt(np.diag(np.array(model.response_covariance))) if model.response_covariance else None
    return {
        name: {"value": float(value), "se": None if errors is None else float(errors[i])}
        for i, (name, value) in enumerate(zip(law.parameter_names(), law.to_vector(), strict=True))
    }


TITLES = {"candidates": "laws tried for the responses, best first (least BIC); the first is taken"}


def print_summary(screen: Console, summary: dict[str, Any]) -> None:
    """A summary as tables."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    later: list[tuple[str, list[dict[str, Any]]]] = []
    for key, value in summary.items():
        if key == "schema_version" or value is None or (key in IF_ANY and not value):
            continue
        if isinstance(value, str | list | dict) and not _text(value):
            continue
        if isinstance(value, list) and isinstance(value[0], dict):
            later.append((key, value))
        else:
            table.add_row(key.replace("_", " "), _text(value))
    screen.print(table)
    for key, rows in later:
        grid = Table(title=TITLES.get(key, key.replace("_", " ")), title_justify="left")
        for name in rows[0]:
            grid.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right")
        for row in rows:
            grid.add_row(*(_text(v) for v in row.values()))
        screen.print(grid)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(_text(v) for v in value)
    return str(value)


def print_fidelity(screen: Console, result: Fidelity) -> None:
    """The measures of a fidelity run as tables."""
    from rich.table import Table

    screen.print(
        f"{result.task} ({result.provenance}); rl_steps {', '.join(map(str, result.rl_steps))}", soft_wrap=True
    )
    system = Table(title="simulated rollout time, recorded against sampled", title_justify="left")
    for name in ("layout", "bias", "in 90 % interval", "width / bootstrap"):
        system.add_column(name, justify="left" if name == "layout" else "right")
    for outcomes in (result.system, result.totals):
        for quantity in dict.fromkeys(o.quantity for o in outcomes):
            part = [o for o in outcomes if o.quantity == quantity]
            inside = f"{sum(o.inside for o in part)} of {len(part)}"
            system.add_row(
                quantity.replace("_", " "), human_share(bias(part), 1, sign=True), inside, f"{width_ratio(part):.2f}"
            )
    screen.print(system)
    screen.print(
        f"bias over all layouts {human_share(result.system_bias, 1, sign=True)}; luck alone gives up to "
        f"{human_share(result.system_bias_noise, 1)} in 9 of 10 recordings as short as this one",
        soft_wrap=True,
    )
    if result.baseline:
        screen.print(
            "resampling what the model was fitted on instead: bias "
            f"{human_share(bias(result.baseline), 1, sign=True)}, {human_share(coverage(result.baseline))} in its "
            f"interval, width / bootstrap {width_ratio(result.baseline):.2f}",
            soft_wrap=True,
        )
    marginals = Table(title="marginals", title_justify="left")
    for name in ("length", "KS", "Wasserstein / mean", "mean", "sampled", "p50", "p99", "p99.9"):
        marginals.add_column(name, justify="left" if name == "length" else "right")
    for m in result.marginals:
        pairs = [f"{_text(m.quantiles_recorded[i])} / {_text(m.quantiles_model[i])}" for i in (0, 3, 4)]
        name = m.name.replace("_", " ")
        marginals.add_row(
            name, f"{m.ks:.3f}", f"{m.wasserstein:.3f}", _text(m.mean_recorded), _text(m.mean_model), *pairs
        )
    screen.print(marginals)
    g = result.group_maximum
    if g is not None:
        screen.print(
            f"E[max of a group] / E[L]: recorded {g.recorded:.3f} [{g.low:.3f}, {g.high:.3f}], sampled {g.model:.3f} "
            f"({human_share(g.error, 1, sign=True)}; tolerance {human_share(g.tolerance, 1)})",
            soft_wrap=True,
            markup=False,
        )
    screen.print(
        f"at the cap: recorded {human_share(result.truncated_recorded, 2)}, "
        f"sampled {human_share(result.truncated_model, 2)}"
    )
    if result.known:
        screen.print(f"drift: {result.known}", soft_wrap=True)
    screen.print(
        "This compares simulated rollouts; it is not a replay on GPUs against measured seconds.", soft_wrap=True
    )


# -------------------------------------------------------------------- figures


def draw(path: Path | str, *, model: LengthModel | None = None, recording: Recording | None = None) -> Path:
    """Figure of a recording, a model, or both: CCDF with fit, drift bands, group correlation, turns, tool latency."""
    target = Path(path)
    form = target.suffix.lstrip(".")
    if form not in ("svg", "png", "pdf"):
        raise SpecError(f"{target}: figures are drawn as .svg, .png or .pdf")
    table = recording.lengths if recording is not None and recording.lengths.n else None
    if table is None and model is None:
        raise SpecError("nothing to draw: no lengths and no model")
    figure = new_figure(10.0, 7.0)
    axes = figure.subplots(2, 2)
    cap = None if table is None else table.max_response_tokens
    sampled = None
    if model is not None:
        cap = cap if table is not None else model.max_response_tokens
        sampled = sample_lengths(model, 1500, model.group_size, max_response_tokens=cap, seed=0)
    _draw_ccdf(axes[0, 0], table, model, sampled)
    _draw_drift(axes[0, 1], table, model)
    _draw_groups(axes[1, 0], table, sampled)
    _draw_turns(axes[1, 1], table, sampled)
    title = model.provenance.headline() if model is not None else "recorded lengths"
    figure.suptitle(f"{model.task}: {title}" if model is not None else title, fontsize=10)
    return write_atomic(target, saved(figure, form))


def _ccdf(values: Float) -> tuple[Float, Float]:
    ordered = np.sort(values)
    return ordered, 1.0 - np.arange(ordered.size) / ordered.size


def _draw_ccdf(axes: Axes, table: LengthTable | None, model: LengthModel | None, sampled: LengthTable | None) -> None:
    """P(length >= x): recorded, and the uncensored law beyond the cap."""
    if table is not None:
        axes.step(
            *_ccdf(table.trajectories().response_tokens.astype(float)), color=BLUE, where="post", label="recorded"
        )
    if model is not None and model.response is not None and model.turns is None:
        low, high = model.response.quantile(np.array([1e-3, 1 - 1e-4]))
        x = np.geomspace(max(low, 1.0), high, 300)
        axes.plot(x, model.response.tails(x)[1], color=ORANGE, label=f"law ({model.response.name})")
    elif sampled is not None:
        axes.step(*_ccdf(sampled.trajectories().response_tokens.astype(float)), color=ORANGE, label="sampled")
    cap = table.max_response_tokens if table is not None else None
    if cap is not None:
        axes.axvline(cap, color=GREY, linestyle=":", label=f"maximum {cap}")
    axes.set(xscale="log", yscale="log", xlabel="response tokens", ylabel="P(longer)", ylim=(1e-4, 1.1))
    axes.legend(fontsize=7)


def _draw_drift(axes: Axes, table: LengthTable | None, model: LengthModel | None) -> None:
    """Mean and 5 - 95 % of every rl_step; the model's forecast as a band."""
    if table is not None:
        steps = table.steps()
        parts = [table.step(int(s)).trajectories().response_tokens for s in steps]
        bands = np.array([np.percentile(p, (5, 95)) for p in parts])
        axes.fill_between(steps, bands[:, 0], bands[:, 1], color=BLUE, alpha=0.2, label="recorded, 5 - 95 %")
        axes.plot(steps, [p.mean() for p in parts], color=BLUE, marker="o", markersize=3, label="recorded mean")
        axes.plot(steps, [p.max() for p in parts], color=GREY, marker="x", linestyle="", label="longest")
    if model is not None and model.response is not None and model.drift.rl_steps:
        first, last = model.drift.rl_steps[0], model.drift.rl_steps[-1]
        ahead = np.unique(np.linspace(first, last + max(3, (last - first) // 2), 12).astype(int))
        found = [forecast_lengths(model, int(s)) for s in ahead]
        low, high = [f.mean_tokens_low for f in found], [f.mean_tokens_high for f in found]
        axes.fill_between(ahead, low, high, color=ORANGE, alpha=0.25, label="mean, forecast 5 - 95 %")
    axes.set(xlabel="rl_step", ylabel="response tokens", yscale="log")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def _draw_groups(axes: Axes, table: LengthTable | None, sampled: LengthTable | None) -> None:
    """Longest against mean response of every group: how much the responses to one prompt resemble each other."""
    for source, colour, label in ((sampled, ORANGE, "sampled"), (table, BLUE, "recorded")):
        if source is None:
            continue
        rows = source.trajectories()
        index, count = rows.group_index()
        mean = np.bincount(index, rows.response_tokens) / np.bincount(index)
        largest = np.zeros(count)
        np.maximum.at(largest, index, rows.response_tokens.astype(float))
        icc = anova_icc(np.log(rows.response_tokens), index)
        axes.scatter(mean[:1000], largest[:1000], s=5, alpha=0.5, color=colour, label=f"{label}, icc {icc:.2f}")
    axes.set(xscale="log", yscale="log", xlabel="mean of the group [tokens]", ylabel="longest of the group [tokens]")
    axes.legend(fontsize=7)


def _draw_turns(axes: Axes, table: LengthTable | None, sampled: LengthTable | None) -> None:
    """Tool latency for several turns; else the prompts."""
    multi = any(t is not None and t.multi_turn for t in (table, sampled))
    for source, colour, label in ((table, BLUE, "recorded"), (sampled, ORANGE, "sampled")):
        if source is None:
            continue
        if multi and source.tool_latency_s is not None:
            waited = np.asarray(source.tool_latency_s[source.tool_latency_s > 0], np.float64)
            if waited.size:
                turns = source.n / source.n_trajectories
                axes.step(*_ccdf(waited), color=colour, where="post", label=f"{label}, {turns:.2f} turns a trajectory")
        elif not multi:
            axes.step(*_ccdf(source.prompt_tokens.astype(float)), color=colour, where="post", label=label)
    axes.set(xlabel="tool latency [s]" if multi else "prompt tokens", ylabel="P(longer)", yscale="log", xscale="log")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


__all__ = ["draw", "model_summary", "print_fidelity", "print_summary", "recording_summary"]
