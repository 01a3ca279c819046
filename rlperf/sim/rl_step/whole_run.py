"""A whole run: start-up, validation, checkpoints, failures and restarts around the rl_steps; goodput and money."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlperf.errors import SpecError
from rlperf.layout import FloatArray
from rlperf.sim.rl_step.spot import SpotFacts
from rlperf.units import human_seconds

_HOPELESS = 10.0  # failures expected within a stretch: it would be begun exp(10) times


@dataclass(frozen=True)
class RunFacts:
    """What surrounds the rl_steps; rates are the user's to state, none is built in.

    Attributes
    ----------
    rl_steps : of the run [1]
    devices : of the cluster [1]
    trained_tokens : per rl_step [tokens]
    start_up_s : processes, weights, compilation, once per (re)start [s]
    capture_s : CUDA graph capture, once per (re)start [s]
    warmup_s : extra time of the first rl_steps after a (re)start [s]
    checkpoint_every, checkpoint_s : rl_steps between checkpoints, and how long one blocks [1], [s]
    validation_every, validation_s : rl_steps between validation passes (0 = none), and how long one takes [1], [s]
    handover_s : changes between tasks that take turns, per rl_step [s]
    device_mtbf_s : mean seconds between failures of one device with its share of the node; None = no failures
    recovery_s : detection, replacement of the node and reading the checkpoint, beside the start-up [s]
    usd_per_device_hour : price [USD/h]; None = not asked
    spot : nodes that leave; where rollout goes on without them, the rl_steps hold what that costs (`elastic_step_s`)
    """

    rl_steps: int
    devices: int
    trained_tokens: float = 0.0
    start_up_s: float = 0.0
    capture_s: float = 0.0
    warmup_s: float = 0.0
    checkpoint_every: int = 0
    checkpoint_s: float = 0.0
    validation_every: int = 0
    validation_s: float = 0.0
    handover_s: float = 0.0
    device_mtbf_s: float | None = None
    recovery_s: float = 0.0
    usd_per_device_hour: float | None = None
    spot: SpotFacts | None = None

    def __post_init__(self) -> None:
        if self.rl_steps < 1 or self.devices < 1:
            raise SpecError("a run has at least one rl_step and one device")
        if self.device_mtbf_s is not None and self.device_mtbf_s <= 0:
            raise SpecError("device_mtbf_s must be positive")

    @property
    def departures_per_s(self) -> float:
        """Spot nodes that leave [1/s]."""
        return self.spot.nodes / self.spot.leaves_s if self.spot else 0.0

    @property
    def stops_per_s(self) -> float:
        """Failures that stop the run, and departures where it does not go on without the nodes [1/s]."""
        fails = 0.0 if self.device_mtbf_s is None else self.devices / self.device_mtbf_s
        return fails + (0.0 if self.spot is None or self.spot.elastic else self.departures_per_s)

    @property
    def restart_s(self) -> float:
        """Of a stop, mean: what a start takes, and the wait for a node in place of one that left [s]."""
        once = self.start_up_s + self.capture_s + self.warmup_s + self.recovery_s
        if self.spot is None or self.spot.elastic:
            return once
        return once + self.spot.returns_s * self.departures_per_s / self.stops_per_s


@dataclass(frozen=True)
class RunCost:
    """The run in time and money; ``goodput`` = seconds in rl_steps that count / all seconds [1].

    ``lost_s`` holds work that failures and spot nodes that left undid, and restarts; ``usd*`` are None without a price.
    """

    total_s: float
    start_up_s: float
    checkpoint_s: float
    validation_s: float
    handovers_s: float
    lost_s: float
    failures: float
    departures: float
    goodput: float
    device_hours: float
    tokens_per_s_per_device: float
    usd: float | None
    usd_per_rl_step: float | None
    usd_per_million_tokens: float | None


def whole_run(rl_step_s: npt.ArrayLike, facts: RunFacts) -> RunCost:
    r"""Expected time and cost of a run.

    With failures at rate lambda = devices / MTBF (exponential), to which nodes / M of spot nodes add where the run does
    not go on without them, a stretch of w seconds between checkpoints takes

    .. math:: E = \left(\frac{1}{\lambda} + R\right) \left(e^{\lambda w} - 1\right)

    in expectation: it fails exp(lambda w) - 1 times, each failure costs what was done since the checkpoint and the
    restart R (no failure falls into a restart; Daly 2006, Future Generation Computer Systems 22). w = rl_steps between
    checkpoints + the checkpoint; without checkpoints w is the whole run.

    Parameters
    ----------
    rl_step_s : seconds per rl_step, one number, or one per rl_step (lengths drift) [s] ``[]`` or ``[rl_steps]``

    >>> run = whole_run(100.0, RunFacts(rl_steps=10, devices=8, start_up_s=200.0, usd_per_device_hour=2.0))
    >>> run.total_s, round(run.goodput, 4), round(run.usd, 2)
    (1200.0, 0.8333, 5.33)
    """
    steps = np.broadcast_to(np.asarray(rl_step_s, np.float64), (facts.rl_steps,))
    useful = float(steps.sum())
    once = facts.start_up_s + facts.capture_s + facts.warmup_s
    checks = facts.rl_steps // facts.checkpoint_every if facts.checkpoint_every else 0
    passes = facts.rl_steps // facts.validation_every if facts.validation_every else 0
    checkpoint, validation = checks * facts.checkpoint_s, passes * facts.validation_s
    per_step = steps + validation / facts.rl_steps + facts.handover_s
    stretches = _stretches(per_step, facts)
    planned = float(stretches.sum())
    expected, stops = _with_failures(stretches, facts)
    elastic = facts.spot is not None and facts.spot.elastic
    departing = facts.departures_per_s / (facts.stops_per_s or 1.0)  # of the stops: 1 where nothing fails, to the bit
    departures = facts.departures_per_s * expected if elastic else departing * stops
    total = once + expected
    tokens = facts.trained_tokens * facts.rl_steps
    hours = total * facts.devices / 3600.0
    usd = None if facts.usd_per_device_hour is None else hours * facts.usd_per_device_hour
    return RunCost(
        total_s=total,
        start_up_s=once,
        checkpoint_s=checkpoint,
        validation_s=validation,
        handovers_s=facts.handover_s * facts.rl_steps,
        lost_s=expected - planned,
        failures=stops - (0.0 if elastic else departures),
        departures=departures,
        goodput=useful / total,
        device_hours=hours,
        tokens_per_s_per_device=tokens / (total * facts.devices),
        usd=usd,
        usd_per_rl_step=None if usd is None else usd / facts.rl_steps,
        usd_per_million_tokens=None if usd is None or not tokens else usd / (tokens / 1e6),
    )


def _stretches(per_step: FloatArray, facts: RunFacts) -> FloatArray:
    """Seconds from one checkpoint to the next, the checkpoint included; the last may have none [s]."""
    if not facts.checkpoint_every:
        return np.array([float(per_step.sum())])
    edges = np.arange(0, facts.rl_steps, facts.checkpoint_every)
    seconds = np.add.reduceat(per_step, edges)
    full = np.minimum(edges + facts.checkpoint_every, facts.rl_steps) - edges == facts.checkpoint_every
    return np.asarray(seconds + full * facts.checkpoint_s, np.float64)


def _with_failures(stretches: FloatArray, facts: RunFacts) -> tuple[float, float]:
    """Expected seconds and stops over all stretches."""
    rate = facts.stops_per_s
    if not rate:
        return float(stretches.sum()), 0.0
    longest = float(stretches.max())
    if rate * longest > _HOPELESS:
        raise SpecError(
            f"run: failures and departures stop it every {human_seconds(1.0 / rate)} on average, but "
            f"{human_seconds(longest)} of work lie between checkpoints: such a run does not end; "
            "state a larger device_mtbf or spot.leaves, or a smaller checkpoint_every"
        )
    growth = np.expm1(rate * stretches)
    return float(((1.0 / rate + facts.restart_s) * growth).sum()), float(growth.sum())


def best_checkpoint_s(checkpoint_s: float, stops_per_s: float) -> float:
    r"""Seconds of work between checkpoints that lose least, first order: :math:`\sqrt{2 C M}` (Young 1974).

    C seconds of a checkpoint, M seconds between stops of the run, one over ``stops_per_s``.

    >>> round(best_checkpoint_s(60.0, 1.0 / 7200.0), 1)
    929.5
    """
    return float(np.sqrt(2.0 * checkpoint_s / stops_per_s))
