"""What a whole run costs: the rl_steps of a plan with everything around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from rlperf.layout import FloatArray
from rlperf.plan.answer.plan import Phase, Prediction, RunTotals
from rlperf.plan.question.context import Context
from rlperf.plan.question.pool import PoolPlan, ScorerPlan
from rlperf.sim.rl_step.spot import SpotFacts, elastic_step_s
from rlperf.sim.rl_step.whole_run import RunFacts, best_checkpoint_s, whole_run
from rlperf.specs.modes import MODES, Form, Mode
from rlperf.specs.rl_calibration import FrameworkCalibration


@dataclass(frozen=True)
class Stretch:
    """One configuration of a run: its prediction, and the rl_steps that it is for (first and last)."""

    rl_steps: tuple[int, int]
    mode: Mode
    pools: tuple[PoolPlan, ...]
    predicted: Prediction
    scorers: tuple[ScorerPlan, ...] = ()

    @classmethod
    def of(cls, phase: Phase) -> Stretch:
        """The stretch of a plan's phase."""
        return cls(phase.rl_steps, phase.mode, phase.pools, phase.predicted, phase.scorers)

    def pool(self, role: str) -> PoolPlan:
        """The pool that serves ``role``."""
        return next(pool for pool in self.pools if pool.role == role)

    @property
    def devices(self) -> int:
        """Devices that the stretch occupies."""
        trainer = self.pool("trainer").devices
        trainer += sum(scorer.own_devices for scorer in self.scorers) + sum(pool.own_devices for pool in self.pools)
        return trainer if MODES[self.mode].shares_devices else trainer + self.pool("rollout").devices


def run_totals(context: Context, stretches: Sequence[Stretch], *, handover_s: float = 0.0) -> RunTotals | None:
    """Time, goodput, device-hours and money of the job's ``run``; None where the job states none.

    Every rl_step takes what the stretch that covers it is predicted to take, those after the last what the last takes.
    Tasks that take turns add up, with what the changes between them take (``handover_s`` per rl_step); those that run
    beside each other wait for the slowest, and so do their devices, paid for. Start-up and graph capture are the
    framework's. ``low_s`` and ``high_s`` take all rl_steps at their 5th and 95th percentile: what a prediction is off
    by, it is off by every time. Where spot nodes are stated, rollouts that go on without them take longer, and the run
    with none that leave stands beside it.
    """
    run = context.job.run
    if run is None:
        return None
    count = run.rl_steps or context.job.horizon.rl_steps
    last = max(stretch.rl_steps[1] for stretch in stretches)
    apart = context.job.sharing == "devices"
    mean, low, high, steady, tokens, usd = (np.zeros(count) for _ in range(6))
    for stretch in stretches:
        at = np.minimum(np.arange(count), last)
        here = (at >= stretch.rl_steps[0]) & (at <= stretch.rl_steps[1])
        predicted = stretch.predicted
        spot, slower = _spot(context, stretch), 1.0
        if spot is not None and spot.elastic:
            slower = float(_elastic_s(context, stretch, spot)) / predicted.rl_step_s
        for sums, value in (
            (mean, slower * predicted.rl_step_s), (low, slower * predicted.low_s), (high, slower * predicted.high_s),
            (steady, predicted.rl_step_s),
        ):  # fmt: skip
            sums[here] = np.maximum(sums[here], value) if apart else sums[here] + value
        tokens[here] += predicted.trained_tokens
        price = np.nan if predicted.usd_per_step is None else predicted.usd_per_step
        usd[here] += price / predicted.rl_step_s if apart else price
    usd *= steady if apart else 1.0
    devices = sum(s.devices for s in stretches if s.rl_steps[1] == last) if apart else max(s.devices for s in stretches)
    calm = _facts(context, stretches[0], count, devices, float(tokens.mean()), float(usd.sum()), steady)
    calm = replace(calm, handover_s=handover_s)
    spot = _spot(context, stretches[0])
    facts = replace(calm, spot=spot, usd_per_device_hour=_usd_per_hour(context, stretches[0], calm))
    found, fast, slow = (whole_run(steps, facts) for steps in (mean, low, high))
    on_demand = whole_run(steady, calm) if spot else None
    return RunTotals(
        rl_steps=count,
        low_s=fast.total_s,
        high_s=slow.total_s,
        best_checkpoint_every=_best_every(facts, float(mean.mean())),
        on_demand_s=on_demand.total_s if on_demand else None,
        on_demand_usd=on_demand.usd if on_demand else None,
        **{name: value for name, value in asdict(found).items() if name in RunTotals.model_fields},
    )


def _facts(
    context: Context, first: Stretch, count: int, devices: int, tokens: float, usd: float, steps_s: FloatArray
) -> RunFacts:
    """The job's words about its run, with the framework's start-up; the price is that of the pools in use."""
    run = context.job.run
    assert run is not None
    framework = _framework(context, first)
    device_hours = float(steps_s.sum()) * devices / 3600.0
    return RunFacts(
        rl_steps=count,
        devices=devices,
        trained_tokens=tokens,
        start_up_s=framework.start_up.value,
        capture_s=framework.capture.value,
        checkpoint_every=run.checkpoint_every,
        checkpoint_s=run.checkpoint,
        validation_every=run.validation_every,
        validation_s=run.validation,
        device_mtbf_s=run.device_mtbf,
        recovery_s=run.recovery,
        usd_per_device_hour=None if np.isnan(usd) else usd / device_hours,
    )


def _framework(context: Context, stretch: Stretch) -> FrameworkCalibration:
    """The framework's behaviour with a stretch's trainer backend in its mode."""
    backend = stretch.pool("trainer").settings.backend
    return next(each.framework for each in context.trainers if each.backend == backend).in_mode(stretch.mode)


def _best_every(facts: RunFacts, rl_step_s: float) -> int | None:
    """rl_steps between checkpoints that lose least; None where nothing stops the run, or a checkpoint takes no time."""
    if not facts.stops_per_s or not facts.checkpoint_s:
        return None
    return max(round(best_checkpoint_s(facts.checkpoint_s, facts.stops_per_s) / rl_step_s), 1)


def _elastic_s(context: Context, stretch: Stretch, spot: SpotFacts) -> FloatArray:
    """An rl_step whose rollout goes on without spot nodes; behind it is what engines wait for [s].

    Those that are refilled wait for weights and read again what these void: what they do beside their rollout.
    """
    row, stages, step_s = MODES[stretch.mode], stretch.predicted.stages_s, stretch.predicted.rl_step_s
    waits = row.form_where(_framework(context, stretch).in_flight_updates) is Form.BARRIER
    busy_s = step_s * (1.0 - stretch.predicted.idle_fraction.get("rollout_waits", 0.0))
    behind = stages.reward + stages.weight_sync if waits else max(busy_s - stages.rollout, 0.0)
    return elastic_step_s(step_s, stages.rollout, spot, overlaps=row.overlaps, behind_s=behind)


def _spot(context: Context, stretch: Stretch) -> SpotFacts | None:
    """The job's spot nodes, as many as the pools take that have them."""
    stated = context.job.run.spot if context.job.run else None
    if stated is None:
        return None
    elastic = stated.pools == "rollout"
    devices = stretch.pool("rollout").devices if elastic else stretch.devices
    hardware = context.rollout_hardware if elastic else context.hardware
    nodes = -(-devices // hardware.cluster.devices_per_node)
    return SpotFacts(nodes, stated.leaves, stated.returns, elastic)


def _usd_per_hour(context: Context, stretch: Stretch, calm: RunFacts) -> float | None:
    """Price of a device and hour, those on spot nodes at theirs [USD/h]; None where one is missing."""
    stated, usual = context.job.run.spot if context.job.run else None, calm.usd_per_device_hour
    if stated is None or stated.price is None:
        return usual
    if stated.pools == "all":
        return stated.price
    rollout, rest = stretch.pool("rollout").devices, stretch.devices - stretch.pool("rollout").devices
    others = context.usd_per_s(0, rest)
    return None if others is None else (3600.0 * others + rollout * stated.price) / stretch.devices
