"""Recorded multi-turn rollouts (PolyTrace), predicted against measured: fit the engine on some files, score others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlperf.calibrate.requests.engine_trace import EngineTrace, TraceFit, fit_traces, predict_trace, read_engine_traces
from rlperf.calibrate.tables import Refusal
from rlperf.calibrate.validate import Outcome, PredictedFigure, Report, report_of
from rlperf.errors import Problem, SpecError


def report(paths: Sequence[Path], fit: Sequence[Path] = ()) -> Report:
    """Turn latencies and makespans of every complete replica in ``paths``, by constants fitted to ``fit``.

    A file that stands in both is marked as seen by the calibration. Replicas whose recording is incomplete are refused.
    """
    if not fit:
        raise SpecError(
            Problem(
                "kind engine_trace needs files to fit the engine's constants to",
                suggestion="name them with --fit, as in: rlperf validate step_1.jsonl --kind engine_trace "
                "--fit step_0.jsonl",
            )
        )
    engine = fit_traces(read_engine_traces(fit))
    seen = {path.resolve() for path in fit}
    predictions: list[PredictedFigure] = []
    refused: list[Refusal] = []
    rows = 0
    for path in paths:
        for trace in read_engine_traces([path]):
            rows += trace.trajectories.n_turns
            if trace.missing:
                reason = "the replica's recording is incomplete: its latencies come from requests that it does not show"
                refused += [Refusal(name, reason) for name in turn_names(trace)]
            else:
                predictions += _predictions(trace, engine, path.resolve() in seen, fit)
    files = ", ".join(str(path) for path in paths)
    return report_of("engine_trace", files, rows, Outcome(tuple(predictions), tuple(refused)))


def turn_names(trace: EngineTrace) -> list[str]:
    """Names of a trace's turns: rl_step, replica, trajectory in the file's order, turn."""
    first = trace.trajectories.offsets
    owner = trace.trajectories.turn_owner.tolist()
    return [
        f"step_{trace.rl_step}_replica_{trace.replica}_trajectory_{i}_turn_{row - int(first[i])}"
        for row, i in enumerate(owner)
    ]


def _predictions(trace: EngineTrace, engine: TraceFit, used: bool, fit: Sequence[Path]) -> list[PredictedFigure]:
    latency, makespan = predict_trace(trace, engine)
    group = f"step_{trace.rl_step}"
    calibration = "fit to " + ", ".join(path.name for path in fit)

    def row(name: str, metric: str, measured: float, predicted: float) -> PredictedFigure:
        low, high = predicted * engine.low, predicted * engine.high
        return PredictedFigure(
            name, group, metric, measured, predicted, low, high, calibration, used_in_calibration=used
        )  # fmt: skip

    rows = [
        row(name, "turn_latency_s", measured, predicted)
        for name, measured, predicted in zip(turn_names(trace), trace.latency_s.tolist(), latency.tolist(), strict=True)
    ]
    name = f"step_{trace.rl_step}_replica_{trace.replica}"
    return [*rows, row(name, "makespan_s", trace.makespan_s, makespan)]
