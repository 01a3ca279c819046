"""Recorded engine latencies of multi-turn rollouts (PolyTrace): read them, fit an engine's constants, predict others.

The files state what every turn asked for and how long the engine took, not what the engine is made of. Four constants
of `EngineStepCost` are fitted to the recording of one rl_step and predict the latencies of another:

    prefill  t = p_s (requests) + s (uncached tokens)          decode  t = d_0 + d_s (running requests)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.errors import Problem, SpecError
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout import Trajectories, simulate_replica
from rlperf.specs.reader import parse_json, read_text
from rlperf.workload.formats import DamagedError, LengthColumns, multi_turn, number

GROUPS_PER_REPLICA = 64
"""Recordings do not name the replica: 256 prompts went to 4 in contiguous shares (PolyTrace search_r1_7b)."""


@dataclass(frozen=True, eq=False)
class EngineTrace:
    """What one replica served in one rl_step.

    Attributes
    ----------
    rl_step, replica : which
    trajectories : what it served, with the recorded prefix hits
    latency_s : recorded seconds from the arrival of each turn to its end [s] ``[turns]``
    missing : trajectories of the replica's groups that the recording lacks; its latencies then cannot be explained
    """

    rl_step: int
    replica: int
    trajectories: Trajectories
    latency_s: FloatArray
    missing: int = 0

    @property
    def makespan_s(self) -> float:
        """Longest chain of engine and tool seconds of one trajectory [s]."""
        chain = self.latency_s + self.trajectories.tool_latency_s
        return float(np.add.reduceat(chain, self.trajectories.offsets[:-1]).max())


@dataclass(frozen=True)
class TraceFit:
    """Constants of a recorded engine (equation: module docstring).

    Attributes
    ----------
    decode_fixed_s, decode_per_request_s : d_0, d_s [s]
    prefill_per_request_s, prefill_per_token_s : p_s, s [s]
    low, high : measured over predicted on the fitted rows, 5th and 95th percentile [1]
    """

    decode_fixed_s: float
    decode_per_request_s: float
    prefill_per_request_s: float
    prefill_per_token_s: float
    low: float = float("nan")
    high: float = float("nan")

    @property
    def cost(self) -> EngineStepCost:
        """As seconds per engine_step; a decoding request passes the linear layers like a prompt token."""
        return EngineStepCost(
            tokens=np.array([0.0, 1.0]),
            linear_s=np.array([0.0, self.prefill_per_token_s]),
            decode_fixed_s=self.decode_fixed_s,
            decode_per_request_s=self.decode_per_request_s - self.prefill_per_token_s,
            prefill_per_request_s=self.prefill_per_request_s,
        )


RECORDED_LIMITS = EngineLimits(
    kv_tokens=np.inf, max_running=1_000_000, token_budget=16384, chunked_prefill=False, prefix_caching=False
)
"""SGLang as recorded: prefill first, prompts batched up to max_prefill_tokens = 16384 (its default), all requests of a
replica running at once; prefix hits are taken from the recording."""


def read_engine_traces(
    paths: Sequence[Path | str], *, groups_per_replica: int = GROUPS_PER_REPLICA
) -> list[EngineTrace]:
    """Traces of the files, one per rl_step and replica, in that order.

    Raises
    ------
    SpecError : every damaged or unreadable line of all files, with its place
    """
    problems: list[Problem] = []
    columns, latency = LengthColumns(), []
    for path in paths:
        try:
            lines = read_text(path).splitlines()
        except SpecError as error:
            problems += error.problems
            continue
        if not any(line.strip() for line in lines):
            problems.append(Problem("the file is empty", str(path)))
        for at, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = parse_json(line, path, at)
                if not isinstance(record, dict):
                    raise DamagedError("a line must be a JSON object")
                before = len(columns.prompt)
                multi_turn(record, columns, str(path), at, None)
                turns = record["turns"][: len(columns.prompt) - before]
                latency += [number(turn, "engine_latency_s") for turn in turns]
            except DamagedError as error:
                problems.append(Problem(str(error), str(path), at))
            except SpecError as error:
                problems += error.problems
    if problems:
        raise SpecError(problems)
    return _split(columns, np.array(latency), groups_per_replica)


def _split(columns: LengthColumns, latency: FloatArray, groups_per_replica: int) -> list[EngineTrace]:
    """One trace per rl_step and replica of the columns; sizes of groups tell whether trajectories are missing."""
    step, trajectory = np.array(columns.step), np.array(columns.trajectory)
    named = {dense: int(key[1][1]) for key, dense in _dense(columns).items()}
    group = np.array([named[pair] for pair in zip(step.tolist(), list(columns.group), strict=True)])
    size = max((max(samples) + 1 for samples in columns.samples.values()), default=0)
    replica = group // groups_per_replica
    traces = []
    for s, r in sorted(set(zip(step.tolist(), replica.tolist(), strict=True))):
        rows = np.flatnonzero((step == s) & (replica == r))
        trajectories = _trajectories(columns, rows, trajectory[rows], group[rows])
        missing = groups_per_replica * size - len(trajectories)
        traces.append(EngineTrace(s, r, trajectories, latency[rows], max(missing, 0)))
    return traces


def _dense(columns: LengthColumns) -> dict[tuple[int, tuple[str, int]], tuple[int, int]]:
    """(rl_step, key in the file) -> (rl_step, dense group)."""
    return {key: (key[0], dense) for key, dense in columns.groups.items()}


def _trajectories(columns: LengthColumns, rows: IntArray, trajectory: IntArray, group: IntArray) -> Trajectories:
    starts = np.flatnonzero(np.concatenate([[True], np.diff(trajectory) != 0]))
    return Trajectories(
        prompt_tokens=np.array(columns.prompt)[rows],
        response_tokens=np.array(columns.response)[rows],
        tool_latency_s=np.array(columns.latency)[rows],
        offsets=np.concatenate([starts, [len(rows)]]).astype(np.int64),
        group=group[starts],
        arrival_s=np.zeros(len(starts)),
        cached_tokens=np.array(columns.cached)[rows],
    )


def predict_trace(trace: EngineTrace, fit: TraceFit) -> tuple[FloatArray, float]:
    """Seconds of every turn ``[turns]``, and the replica's makespan [s]."""
    timeline = simulate_replica(trace.trajectories, fit.cost, RECORDED_LIMITS)
    return timeline.latency_s, timeline.makespan_s


def fit_traces(traces: Sequence[EngineTrace], evaluations: int = 120) -> TraceFit:
    """Constants that minimise WAPE of the turns plus mean error of the makespans, by Nelder-Mead on logarithms.

    Traces with missing trajectories are left out: their latencies come from requests that the recording does not show.
    """
    from scipy.optimize import minimize

    whole = [trace for trace in traces if not trace.missing]
    if not whole:
        raise SpecError("engine trace: no replica with all its trajectories to fit to")
    measured = np.concatenate([trace.latency_s for trace in whole])
    spans = np.array([trace.makespan_s for trace in whole])

    def predicted(logs: FloatArray) -> tuple[FloatArray, FloatArray]:
        fit = _fit_of(logs)
        turns, makespans = zip(*(predict_trace(trace, fit) for trace in whole), strict=True)
        return np.concatenate(turns), np.array(makespans)

    def error(logs: FloatArray) -> float:
        turns, makespans = predicted(logs)
        wape = np.abs(turns - measured).sum() / measured.sum()
        return float(wape + np.abs(makespans / spans - 1.0).mean())

    found = minimize(error, _start(whole), method="Nelder-Mead", options={"maxfev": evaluations})
    turns, _ = predicted(found.x)
    low, high = np.quantile(measured / turns, [0.05, 0.95])
    return replace(_fit_of(found.x), low=float(low), high=float(high))


def _fit_of(logs: FloatArray) -> TraceFit:
    fixed, request, prompt, token = np.exp(logs).tolist()
    return TraceFit(fixed, request, prompt, token)


def _start(traces: Sequence[EngineTrace]) -> FloatArray:
    """First guess, as logarithms: the best of a coarse grid of proportions, each scaled to the recorded seconds."""
    trace = traces[0]
    best, least = np.zeros(4), np.inf
    for request, prefill, token in product((0.5, 0.1, 0.02), (0.0, 1.0, 4.0), (0.003, 0.03, 0.3)):
        shape = np.array([1.0, request, prefill * request + 1e-3, token * request])
        predicted = predict_trace(trace, _fit_of(np.log(shape)))[0]
        scale = float(np.median(trace.latency_s / predicted))
        error = float(np.abs(scale * predicted - trace.latency_s).sum())
        if error < least:
            best, least = np.log(shape * scale), error
    return best
