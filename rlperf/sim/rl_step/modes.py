"""The closed form of the seconds of one rl_step: arrays of stage seconds in, arrays out.

What a mode is stands in `rlperf.specs.modes`; here stands one closed form for each `Form` of its table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlperf.cost.roofline import as_float
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.specs.modes import MODES, Form, mode_codes


@dataclass(frozen=True)
class Execution:
    """The mode with its knobs; every field may be an array over candidates.

    Attributes
    ----------
    mode : name of a mode, or its code `rlperf.specs.modes.ModeTraits.code` [1]
    staleness : k, weight versions that a trained sample may be behind; modes with a lag of their own ignore it [1]
    sync_interval : optimizer batches between two weight syncs (verl: trigger_parameter_sync_step) [1]
    in_flight_updates : 1 where engines take new weights without draining (only a pause for the swap) [flag]
    interrupt : 1 where running requests stop at a weight sync and recompute their KV cache [flag]
    by_group : 1 where an asynchronous staleness bound counts groups, in whatever order they end: one that takes
        long holds up no batch [flag]
    chunks : pieces in which a streamed batch reaches the trainer (mini-batches) [1]
    """

    mode: npt.ArrayLike
    staleness: npt.ArrayLike = 1
    sync_interval: npt.ArrayLike = 1
    in_flight_updates: npt.ArrayLike = 0
    interrupt: npt.ArrayLike = 0
    by_group: npt.ArrayLike = 0
    chunks: npt.ArrayLike = 4

    @property
    def form(self) -> IntArray:
        """`Form` of the mode, as it runs with or without updates in flight [1]."""
        rows = MODES.values()
        plain = np.array([row.form_where(False) for row in rows], dtype=np.int64)
        flowing = np.array([row.form_where(True) for row in rows], dtype=np.int64)
        codes = mode_codes(self.mode)
        return np.where(as_float(self.in_flight) > 0, flowing[codes], plain[codes])

    @property
    def lag(self) -> FloatArray:
        """Batches that rollout runs ahead: the mode's own, or the staleness bound [1]."""
        own = np.array([-1.0 if row.lag is None else row.lag for row in MODES.values()])[mode_codes(self.mode)]
        return np.where(own < 0, np.maximum(as_float(self.staleness), 0.0), own)

    @property
    def in_flight(self) -> FloatArray:
        """1 where engines take weights while they generate: as the mode says, or `in_flight_updates` [flag]."""
        said = {"drained": 0.0, "in_flight": 1.0, "framework": np.nan}
        return self._said([said[row.weights] for row in MODES.values()], self.in_flight_updates)

    @property
    def grouped(self) -> FloatArray:
        """1 where the staleness bound counts groups: as the mode says, or `by_group` [flag]."""
        said = {"batches": 0.0, "groups": 1.0, "framework": np.nan}
        return self._said([said[row.bound_counts] for row in MODES.values()], self.by_group)

    @property
    def shares_devices(self) -> FloatArray:
        """1 where rollout and training take turns on the same devices [flag]."""
        return np.array([float(row.shares_devices) for row in MODES.values()])[mode_codes(self.mode)]

    def _said(self, by_mode: list[float], otherwise: npt.ArrayLike) -> FloatArray:
        own = np.array(by_mode)[mode_codes(self.mode)]
        return np.where(np.isnan(own), as_float(otherwise), own)


def step_seconds(execution: Execution, stages: StageSeconds) -> FloatArray:
    r"""Seconds from one rl_step to the next, closed form.

    With R rollout makespan, R_s its seconds per batch under continuous refill, W = S + T + D + F the trainer's work
    (scoring and training, each until a critic on devices of its own has ended it, too; data movement, fixed), Y weight
    sync every i batches, E transitions, Q reward:

    .. math::

        serial   &: R + Q + W + Y/i \quad\text{(colocated, disaggregated)} \\
        barrier  &: \max(R + Q, W) + Y/i \quad\text{(one step off)} \\
        refilled &: \max\left(R_s + p,\; W + Y/i,\; \frac{R + Q + k h + W + Y/i}{k + 1}\right)
            \quad\text{(k steps off; one step off in flight, } k = 1) \\
        refilled &: \text{by group (async; k > 0) } \min(R, R_b) \text{ for } R \\
        streamed &: \max(R + Q + W/c,\; R_1 + W) + Y/i

    and E on top where rollout and training share devices.

    p is what a weight sync takes from an engine: swap/i where weights are taken in flight, Y/i where not or where
    running requests are interrupted; beside it recompute/i where they are, and (R - R_s)/i where neither: nothing
    new starts until they have ended, so every i-th batch ends with its own tail. h is p without that tail, and
    without Y where engines drain: what each of the k syncs during a batch's rollout holds it up. The third term is
    latency: at most k + 1 batches are under way between the start of their rollout and the end of their training.
    Where groups are counted, that many groups are: each for its own R_g, half a period until a batch of them is
    there, and the rest: (k + 1) P = R_g + P/2 + Q + k h + W + Y/i, from which R_b = R_g + P/2. Means of stages go in;
    `asynchronous.simulate` has the effect of their fluctuation. No more batches pass a scorer than it takes.

    Parameters
    ----------
    execution : mode and knobs, arrays that broadcast with ``stages`` [...]
    stages : seconds of the stages [s], shape [...]

    Returns
    -------
    Seconds per rl_step [s], broadcast shape.

    >>> times = StageSeconds.of(60.0, scoring_s=10.0, training_s=20.0, weight_sync_s=4.0, rollout_steady_s=40.0)
    >>> modes = ["colocated", "one_step_off", "async"]
    >>> step_seconds(Execution(modes, staleness=2), times).tolist()
    [94.0, 64.0, 64.0]
    """
    f = as_float
    rollout, reward = f(stages.rollout_s), f(stages.reward_s)
    work, steady = trainer_work_s(stages), _steady(stages)
    sync, pause, _ = sync_pauses(execution, stages)
    lag, grouped = execution.lag, execution.grouped
    chunks = np.maximum(f(execution.chunks), 1.0)
    first = first_chunk_s(execution, stages)
    through = latency_s(execution, stages, lag, grouped) / (lag + 1.0)
    forms = {
        Form.SERIAL: rollout + reward + work + sync,
        Form.BARRIER: np.maximum(rollout + reward, work) + sync,
        Form.REFILLED: np.maximum(np.maximum(steady + pause, work + sync), np.maximum(through, f(stages.scorer_s))),
        Form.STREAMED: np.maximum(rollout + reward + work / chunks, first + work) + sync,
    }
    form = execution.form
    period = np.select([form == each for each in forms], list(forms.values()))
    return np.asarray(period + execution.shares_devices * f(stages.offload_s), dtype=np.float64)


def _steady(stages: StageSeconds) -> FloatArray:
    return as_float(stages.rollout_s if stages.rollout_steady_s is None else stages.rollout_steady_s)


def trainer_work_s(stages: StageSeconds) -> FloatArray:
    """W: what is done with a batch between its reward and the weight sync [s]."""
    parts = (stages.scoring_s, stages.training_s, stages.data_movement_s, stages.other_s)
    return np.asarray(sum(as_float(part) for part in parts), dtype=np.float64)


def first_group_s(rollout_s: npt.ArrayLike, group_s: npt.ArrayLike) -> FloatArray:
    """When groups begin to end, if they end evenly until the rollout does: a = 2 R_g - R, R_g their mean end [s].

    >>> first_group_s(60.0, [20.0, 40.0]).tolist()
    [0.0, 20.0]
    """
    return np.maximum(2.0 * as_float(group_s) - as_float(rollout_s), 0.0)


def first_chunk_s(execution: Execution, stages: StageSeconds) -> FloatArray:
    """R_1 of `step_seconds`, when the first of c chunks is complete: a + (R - a) / c, a of `first_group_s` [s].

    >>> times = StageSeconds.of(rollout_s=60.0, rollout_group_s=40.0)
    >>> first_chunk_s(Execution("streaming", chunks=[1, 4]), times).tolist()
    [60.0, 30.0]
    """
    if stages.rollout_first_s is not None:
        return as_float(stages.rollout_first_s)
    rollout = as_float(stages.rollout_s)
    begin = 0.0 if stages.rollout_group_s is None else first_group_s(rollout, stages.rollout_group_s)
    begin = np.minimum(begin, rollout)
    return np.asarray(begin + (rollout - begin) / np.maximum(as_float(execution.chunks), 1.0), dtype=np.float64)


def drained_s(execution: Execution, stages: StageSeconds) -> FloatArray:
    """A batch's share of the tails with which engines run empty for a weight sync, where they do [s].

    >>> times = StageSeconds.of(rollout_s=60.0, rollout_steady_s=40.0)
    >>> [drained_s(Execution("async", in_flight_updates=flag), times).tolist() for flag in (0, 1)]
    [20.0, 0.0]
    """
    tail = np.maximum(as_float(stages.rollout_s) - _steady(stages), 0.0)
    runs_on = np.maximum(execution.in_flight, as_float(execution.interrupt))
    return np.asarray((1.0 - runs_on) * tail / np.maximum(as_float(execution.sync_interval), 1.0))


def sync_pauses(execution: Execution, stages: StageSeconds) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(Y/i, p, h) of `step_seconds`: a batch's share of a weight sync, and what it takes from engine and batch [s]."""
    f = as_float
    interval = np.maximum(f(execution.sync_interval), 1.0)
    sync = f(stages.weight_sync_s) / interval
    interrupt = f(execution.interrupt)
    runs_on = execution.in_flight * (1.0 - interrupt)  # requests that are interrupted wait for all of the weights
    held = (runs_on * f(stages.swap_s) + interrupt * f(stages.recompute_s)) / interval
    tail = drained_s(execution, stages)
    return sync, held + tail + (1.0 - runs_on) * sync, held + interrupt * sync


def latency_s(execution: Execution, stages: StageSeconds, lag: npt.ArrayLike, grouped: npt.ArrayLike) -> FloatArray:
    """From the start of a batch's rollout to the end of its training, with ``lag`` batches in front of it [s].

    >>> times = StageSeconds.of(rollout_s=60.0, rollout_group_s=20.0, training_s=10.0)
    >>> [float(latency_s(Execution("async"), times, 1, grouped)) for grouped in (0, 1)]
    [70.0, 40.0]
    """
    k, rollout = as_float(lag), as_float(stages.rollout_s)
    sync, _, held = sync_pauses(execution, stages)
    rest = as_float(stages.reward_s) + trainer_work_s(stages) + sync + k * held
    group = rollout if stages.rollout_group_s is None else as_float(stages.rollout_group_s)
    batch = np.minimum(rollout, group + (group + rest) / (2.0 * k + 1.0))
    return np.asarray(np.where((as_float(grouped) > 0) & (k >= 1.0), batch, rollout) + rest, dtype=np.float64)
