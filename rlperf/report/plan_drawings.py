"""Figures of a plan: memory along the rl_step, roofline with its operators, lengths, Pareto front, sensitivity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlperf.cost.parameters import active_parameters, pair_flop
from rlperf.cost.roofline import sheet_flop_per_s
from rlperf.plan.answer.plan import MemoryUse, Phase, Prediction
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.question.context import Context, TaskContext
from rlperf.report.style import (
    LINES,
    MANY,
    MARKERS,
    PALETTE,
    STAGE_COLOURS,
    STAGE_HATCHES,
    WIDE,
    Drawing,
    new_figure,
    tidy,
)
from rlperf.specs.modes import MODES
from rlperf.units import human_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROLLING = ("rollout", "reward")
"""Stages in which a colocated engine is awake; in the others the trainer works."""
INTENSITIES = np.logspace(-1, 5, 200)


def plan_drawings(phase: Phase) -> list[Drawing]:
    """What a phase of a plan shows by itself."""
    predicted = phase.predicted
    made = [
        Drawing("timeline", "Stages of one rl_step; the black bar is the 5th to 95th percentile of its end.",
              lambda w: stage_bars(phase, w)),
        Drawing("memory", "Memory per device along one rl_step, by part, against the limit.",
              lambda w: memory_along(phase, w)),
    ]  # fmt: skip
    if predicted.operators:
        caption = "Seconds of one rl_step by operator; the hatched part is what the data sheet's peak would need."
        made.append(Drawing("operators", caption, lambda w: operator_bars(predicted, w)))
    if len(phase.pareto) > 1:
        caption = (
            "Judged candidates that none other beats in time, device-seconds and memory together; the star is the plan."
        )
        made.append(Drawing("pareto", caption, lambda w: pareto_points(phase, w)))
    if phase.sensitivity:
        caption = "The plan's rl_step when one input is off by a tenth."
        made.append(Drawing("sensitivity", caption, lambda w: sensitivity_bars(phase, w)))
    return made


def judged_drawings(context: Context, task: TaskContext, evaluation: Evaluation) -> list[Drawing]:
    """What needs the simulated rl_steps behind a plan."""
    return [
        Drawing("lengths", "Share of responses that are longer, over the judged rl_steps; dotted: the maximum.",
              lambda w: lengths(evaluation, w)),
        Drawing("roofline", "Operators on the device's roofline: intensity against the rate that each one reaches.",
              lambda w: roofline(context, task, evaluation, w)),
    ]  # fmt: skip


def stage_bars(phase: Phase, width: float) -> Figure:
    """Stages of one rl_step after each other, or by pool where they overlap."""
    predicted = phase.predicted
    stages = {name: s for name, s in predicted.stages_s.model_dump().items() if s > 0}
    rows = [("", stages)]
    if not MODES[phase.mode].shares_devices:
        rows = [
            ("rollout pool", {n: s for n, s in stages.items() if n in ROLLING}),
            ("trainer pool", {n: s for n, s in stages.items() if n not in ROLLING}),
        ]
    figure = new_figure(width, 1.5 + 0.5 * len(rows) + (0.5 if width < WIDE else 0.0))
    axes = figure.subplots()
    after = 0.0
    for row, (_, parts) in enumerate(rows):
        at = after if row and not MODES[phase.mode].overlaps else 0.0
        for name, seconds in parts.items():
            axes.barh(row, seconds, left=at, height=0.6, color=STAGE_COLOURS[name], edgecolor="white",
                      hatch=STAGE_HATCHES[name], label=name.replace("_", " "))  # fmt: skip
            at += seconds
        after = at
    error = [[predicted.rl_step_s - predicted.low_s], [predicted.high_s - predicted.rl_step_s]]
    axes.errorbar(predicted.rl_step_s, len(rows) - 1, xerr=error, color="black", capsize=4, fmt="|")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.tick_params(left=False)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    columns = 4 if width >= WIDE else 3
    figure.legend(loc="outside upper center", ncols=columns, fontsize="small", frameon=False)
    tidy(axes, grid=False)
    return figure


def memory_along(phase: Phase, width: float) -> Figure:
    """Bytes per device by part along the rl_step; colocated pools on one axis, else one panel per pool."""
    predicted = phase.predicted
    colocated = MODES[phase.mode].shares_devices
    panels = ["devices"] if colocated else ["rollout", "trainer"]
    figure = new_figure(width, 3.2 * len(panels) + (0.6 if width < WIDE else 0.2))
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        spans = _spans(predicted, panel, colocated)
        _draw_spans(axes, spans, wide=width >= WIDE)
        axes.set_ylabel("GB per device" if colocated else f"{panel}, GB per device")
    axes.set_xlabel("seconds since the rl_step began")
    return figure


def _spans(predicted: Prediction, panel: str, colocated: bool) -> list[tuple[float, float, MemoryUse]]:
    """(begin, end, memory in use) along the rl_step."""
    stages = predicted.stages_s.model_dump()
    rolling = sum(stages[name] for name in ROLLING)
    uses = {str(role): use for role, use in predicted.memory_bytes.items()}
    if colocated:
        return [(0.0, rolling, uses["rollout"]), (rolling, predicted.rl_step_s, uses["trainer"])]
    return [(0.0, predicted.rl_step_s, uses[panel])]


def _draw_spans(axes: Axes, spans: list[tuple[float, float, MemoryUse]], *, wide: bool) -> None:
    names = list(dict.fromkeys(n for _, _, use in spans for n, size in use.parts.items() if size > 1e7))
    for begin, end, use in spans:
        level = 0.0
        for index, name in enumerate(names):
            size = use.parts.get(name, 0.0) / 1e9
            if size <= 0:
                continue
            axes.fill_between([begin, end], level, level + size, color=MANY[index % len(MANY)], linewidth=0.4,
                              edgecolor="white", label=name)  # fmt: skip
            level += size
        axes.plot([begin, end], [use.limit / 1e9] * 2, color="black", linewidth=1.5)
        for edge in (use.low, use.high):
            axes.plot([begin, end], [edge / 1e9] * 2, color="black", linewidth=0.8, linestyle=":")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), [label.replace("_", " ") for label in unique], fontsize="x-small", frameon=False,
                ncols=4 if wide else 2, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # fmt: skip
    axes.set_ylim(0.0, 1.08 * max(max(use.limit, use.high) for _, _, use in spans) / 1e9)
    axes.set_xlim(spans[0][0], spans[-1][1])
    axes.spines[["top", "right"]].set_visible(False)


def operator_bars(predicted: Prediction, width: float) -> Figure:
    """Operators of every role by seconds, with the speed of light inside each bar."""
    rows = sorted(predicted.operators, key=lambda row: (row.role, -row.seconds))
    rows = [row for row in rows if row.share >= 0.005]
    figure = new_figure(width, 0.9 + 0.3 * len(rows))
    axes = figure.subplots()
    bounds = list(dict.fromkeys(row.bound for row in rows))
    seen: set[str] = set()
    for place, row in enumerate(rows):
        colour = PALETTE[bounds.index(row.bound)]
        axes.barh(
            place, row.seconds, color=colour, height=0.65, alpha=0.55, label=None if row.bound in seen else row.bound
        )
        axes.barh(place, row.seconds * row.speed_of_light, color=colour, height=0.65, hatch="//", edgecolor="white")
        seen.add(row.bound)
    axes.set_yticks(range(len(rows)), [f"{row.role}: {row.operator}" for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("seconds in one rl_step")
    axes.legend(title="bound by", fontsize="small", frameon=False, loc="lower right")
    tidy(axes)
    return figure


def pareto_points(phase: Phase, width: float) -> Figure:
    """Undominated candidates: rl_step against device-seconds, memory as colour."""
    figure = new_figure(width, 3.6)
    axes = figure.subplots()
    points = phase.pareto
    step, device = [p.rl_step_s for p in points], [p.device_s for p in points]
    share = [100 * p.memory_share for p in points]
    mark = axes.scatter(step, device, c=share, cmap="cividis", s=48, edgecolor="black", linewidth=0.5, zorder=2)
    plan = phase.predicted
    spent = plan.trained_tokens / plan.tokens_per_s_per_device
    axes.scatter([plan.rl_step_s], [spent], marker="*", s=260, color=PALETTE[1], zorder=3)
    axes.annotate("the plan", (plan.rl_step_s, spent), xytext=(12, 0), textcoords="offset points", va="center")
    axes.set_xlabel("rl_step [s]")
    axes.set_ylabel("device-seconds per rl_step")
    figure.colorbar(mark, ax=axes, label="fullest memory [% of the device]")
    tidy(axes)
    return figure


def sensitivity_bars(phase: Phase, width: float) -> Figure:
    """Bars of the rl_step's change when an input is off by its share."""
    figure = new_figure(width, 0.9 + 0.42 * len(phase.sensitivity))
    axes = figure.subplots()
    base = phase.predicted.rl_step_s
    for place, row in enumerate(phase.sensitivity):
        change = 100 * (row.rl_step_s / base - 1.0)
        slower = change > 0
        axes.barh(place, change, height=0.6, color=PALETTE[1] if slower else PALETTE[0], hatch="" if slower else "//",
                  edgecolor="white")  # fmt: skip
        told = "the choice stands" if not row.switches_to else f"{human_share(row.loss, 1)} above another"
        if width >= WIDE:
            axes.annotate(told, (change, place), xytext=(4 if slower else -4, 0), textcoords="offset points",
                          va="center", ha="left" if slower else "right", fontsize="x-small")  # fmt: skip
    names = [f"{row.input} by {human_share(abs(row.change))}" for row in phase.sensitivity]
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.invert_yaxis()
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.margins(x=0.35 if width >= WIDE else 0.05)
    axes.set_xlabel("change of the rl_step [%]")
    tidy(axes)
    return figure


def lengths(evaluation: Evaluation, width: float) -> Figure:
    """Survival curves of response and whole-sequence lengths."""
    demand = evaluation.demand
    responses = np.concatenate([np.asarray(t.response_tokens, np.float64) for t in demand.trajectories])
    trained = np.concatenate([demand.lengths(k) for k in range(len(demand.tables))])
    figure = new_figure(width, 3.2)
    axes = figure.subplots()
    for index, (values, label) in enumerate(((responses, "response"), (trained, "prompt and response"))):
        ordered = np.sort(values)
        share = 1.0 - np.arange(1, len(ordered) + 1) / len(ordered)
        axes.step(ordered, share, where="post", color=PALETTE[index], linestyle=LINES[index],
                  label=f"{label}: mean {ordered.mean():,.0f}, longest {ordered[-1]:,.0f}")  # fmt: skip
    axes.axvline(demand.batch.max_response_tokens, color="black", linestyle=":", linewidth=1.0)
    axes.set_xlabel("tokens")
    axes.set_ylabel("share that is longer")
    axes.set_ylim(0.0, 1.0)
    axes.legend(fontsize="small", frameon=False)
    tidy(axes)
    return figure


def roofline(context: Context, task: TaskContext, evaluation: Evaluation, width: float) -> Figure:
    """Rate over intensity [FLOP/byte] of the main operators, under the data sheet's roofs."""
    hw = context.rollout_hardware
    peak, bandwidth = sheet_flop_per_s(hw, "bf16"), hw.device.memory_bandwidth
    figure = new_figure(width, 4.4)
    axes = figure.subplots()
    roof = np.minimum(peak, INTENSITIES * bandwidth)
    axes.plot(INTENSITIES, roof / 1e12, color="black", linewidth=1.5, label=f"{hw.device.title}, bf16")
    reachable = peak * hw.calibration.gemm[0].compute
    axes.plot(INTENSITIES, np.minimum(reachable, INTENSITIES * bandwidth) / 1e12, color="black", linewidth=0.8,
              linestyle="--", label="reached by large matrix products")  # fmt: skip
    for index, (name, flop, moved, seconds) in enumerate(operators(task, evaluation)):
        axes.scatter(flop / moved, flop / seconds / 1e12, color=PALETTE[index % len(PALETTE)],
                     marker=MARKERS[index % len(MARKERS)], s=60, zorder=3, edgecolor="black", linewidth=0.5,
                     label=f"{name}: {100 * flop / seconds / min(peak, flop / moved * bandwidth):.0f} %")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte moved")
    axes.set_ylabel("TFLOP/s per device")
    axes.set_ylim(bottom=peak / 1e12 / 3e4)
    place: Any = "outside lower center" if width < WIDE else "outside right center"
    figure.legend(loc=place, title="share of the roof", fontsize="x-small", frameon=False)
    tidy(axes)
    return figure


def operators(task: TaskContext, evaluation: Evaluation) -> list[tuple[str, float, float, float]]:
    """(name, FLOP, bytes moved, seconds) per device of the main operators, from the costs behind the prediction.

    Matrix products of one engine_step with b tokens on t devices: 2 N b / t FLOP; 2 N / t bytes of weights and 4 bytes
    per activation (in and out of each layer, hidden width h, L layers), N active parameters. Decode attention: per
    cached token 2 (q + v) FLOP of all attention layers, and its bytes of cache. Training: 6 N FLOP per token against
    the weights read three times per microbatch.
    """
    arch, cost = task.architecture, evaluation.cost
    pool = evaluation.configuration.pool("rollout")
    degree = pool.layout.tensor_parallel * pool.layout.pipeline_parallel
    active, found = float(active_parameters(arch)), []
    most = float(pool.settings.max_running or 256)
    for tokens, name in ((1.0, "decode, 1 request"), (min(32.0, most), "decode, 32 requests"),
                         (most, f"decode, {most:.0f} requests"),
                         (float(pool.settings.engine_token_budget or 8192), "prefill chunk")):  # fmt: skip
        activations = 4.0 * tokens * arch.hidden * arch.layers / degree
        found.append((name, 2.0 * active * tokens / degree, 2.0 * active / degree + activations,
                      float(cost.linear(tokens))))  # fmt: skip
    cached = float(evaluation.memory.cache_bytes[0] / max(evaluation.memory.kv_tokens[0], 1.0))
    if cost.decode_per_kv_token_s > 0:
        flop = pair_flop(arch) / degree
        found.append(("decode attention, per cached token", flop, cached, float(cost.decode_per_kv_token_s)))
    training = evaluation.training
    busy = float(np.ravel(training.forward_s)[0] + np.ravel(training.backward_s)[0])
    trainer = evaluation.configuration.pool("trainer")
    updates = evaluation.demand.batch.updates
    tokens = float(evaluation.demand.lengths(0).sum()) / updates / trainer.devices
    batches = float(np.ravel(evaluation.microbatches.count)[0])
    share = trainer.layout.tensor_parallel * trainer.layout.pipeline_parallel
    moved = 3.0 * 2.0 * active / share * batches + 12.0 * tokens * arch.hidden * arch.layers
    found.append(("training, forward and backward", 6.0 * active * tokens, moved, busy))
    return [row for row in found if row[3] > 0]
