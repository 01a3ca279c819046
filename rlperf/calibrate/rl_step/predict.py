"""Predict a measured rl_step: the row as a job, asked as any job is, with an interval that knows what was assumed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from rlperf.calibrate.rl_step.assumed_lengths import AssumedLengths
from rlperf.calibrate.rl_step.job import context_of
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.layout import FloatArray
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.timeline import execution_in, stages_of, step_view
from rlperf.plan.predict import pinned
from rlperf.plan.question.context import Context
from rlperf.plan.search.configuration import Configuration
from rlperf.sim.rl_step.compose import StepStages
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.modes import Execution
from rlperf.sim.rl_step.site import TrainerStack
from rlperf.sim.rl_step.timeline import Timeline
from rlperf.sim.rl_step.uncertainty import interval, stage_interval
from rlperf.specs.rl_calibration import FrameworkCalibration
from rlperf.workload import LengthTable
from rlperf.workload.bootstrap import bootstrap

DEFAULT_LAW = AssumedLengths("gamma", 0.6, 0.01)
"""Assumed where only a mean is published: a compact body, and 1 % that run away to the cap. An earlier
prototype did best with it on whole steps; docs/guide/accuracy-rl-step.md has the effect of the others."""

OTHER_LAWS = (AssumedLengths("lognormal", 1.2), AssumedLengths("gamma", 1.0), AssumedLengths("lognormal", 0.8))
"""Other plausible laws: how far the step moves between them is part of the interval."""
DRAWS = 4
"""Bootstrapped rl_steps behind an interval."""
STAGES = {"rollout_s": "rollout_s", "scoring_s": "scoring_s", "train_s": "training_s", "weight_sync_s": "weight_sync_s"}
"""Column of a measured stage -> the stage."""
REST = "rest_s"
"""What lies in none of the stages, where an rl_step publishes all of them and runs them in turn."""


@dataclass(frozen=True, eq=False)
class StepPrediction:
    """A predicted rl_step: the judged configuration of the row's job, and what stands behind it."""

    row: StepRow
    law: AssumedLengths
    context: Context
    evaluation: Evaluation
    judge: Judge

    @property
    def stack(self) -> TrainerStack:
        """The trainer's backend, and the framework with it."""
        return self.evaluation.stack

    @property
    def framework(self) -> FrameworkCalibration:
        """Behaviour and overheads of the framework."""
        return self.stack.framework

    @cached_property
    def execution(self) -> Execution:
        """The mode, as the framework runs it."""
        return execution_in(self.evaluation)

    @cached_property
    def stages(self) -> StepStages:
        """Seconds of the stages, replicas with their own ends."""
        return stages_of(self.evaluation)

    @cached_property
    def timeline(self) -> Timeline:
        """The rl_step as spans."""
        return step_view(self.evaluation).timeline

    @property
    def rl_step_s(self) -> float:
        """Seconds from one rl_step to the next."""
        return self.evaluation.rl_step_s

    def stage_s(self, metric: str) -> float:
        """Seconds under a column's name: step_s, rollout_s, scoring_s, train_s, weight_sync_s."""
        if metric == "step_s":
            return self.rl_step_s
        if metric == REST:
            return self.rl_step_s - sum(self.stage_s(name) for name in STAGES)
        if metric == "rollout_s":
            # where rollouts overlap, a stage's share of the rl_step is its throughput; what is measured is a batch
            return float(self.evaluation.rollout.makespan_s.mean())
        return float(getattr(self.evaluation.seconds, STAGES[metric]).mean())

    @cached_property
    def law_spread(self) -> float:
        """Standard deviation of ln(step) over plausible laws of the lengths [1]."""
        steps = [self.rl_step_s, *(self._under(law) for law in OTHER_LAWS)]
        return float(np.log(steps).std(ddof=1))

    def draws_s(self) -> FloatArray:
        """rl_steps of bootstrapped groups [s]."""
        random = np.random.default_rng(1)
        table = self.evaluation.demand.tables[0]
        return np.array([self._with(bootstrap(table, random)) for _ in range(DRAWS)])

    def interval(self) -> tuple[float, float]:
        """5th and 95th percentile of the rl_step [s]: groups, law of lengths, recompute if not stated, calibration."""
        extra = self.law_spread**2
        if not self.row.recompute_stated:
            # full recompute would repeat the forward, a third of the training: half of that is one standard deviation
            extra += float(np.log1p(self.stage_s("train_s") / 6.0 / self.rl_step_s)) ** 2
        extra += self.evaluation.unlike**2
        return interval(self.rl_step_s, self.draws_s(), self.framework, extra=float(np.sqrt(extra)))

    def stage_interval(self, metric: str) -> tuple[float, float]:
        """5th and 95th percentile of a stage [s]: once the mean length is given, its law moves the rollout alone."""
        if metric == REST:
            spread = self.framework.step.provenance
            return self.stage_s(metric) * spread.low, self.stage_s(metric) * spread.high
        lengths = self.law_spread if metric == "rollout_s" else 0.0
        site, trainer = self.context.site, self.evaluation.trainer
        mode = self.evaluation.configuration.mode
        return stage_interval(site, trainer, STAGES[metric], self.stage_s(metric), mode, lengths=lengths)

    def _under(self, law: AssumedLengths) -> float:
        """Seconds under another law of lengths."""
        return self._with(_demand(context_of(self.row, law, self.framework)).tables[0])

    def _with(self, table: LengthTable) -> float:
        """Seconds with other lengths."""
        demand = replace(self.evaluation.demand, tables=(table,))
        return self.judge.evaluate(demand, self.evaluation.configuration).rl_step_s


def predict_step(
    row: StepRow, law: AssumedLengths = DEFAULT_LAW, framework: FrameworkCalibration | None = None
) -> StepPrediction:
    """Predict one rl_step under a law of lengths; ``framework`` replaces the shipped calibration (fits use it).

    Raises
    ------
    InfeasibleError : the row's degrees cannot be laid out
    """
    context = context_of(row, law, framework)
    demand, configuration = _pinned(row) if law == DEFAULT_LAW else (_demand(context), _pinned(row)[1])
    judge = Judge(context, context.tasks[0])
    return StepPrediction(row, law, context, judge.evaluate(demand, configuration), judge)


@lru_cache(maxsize=512)
def _pinned(row: StepRow) -> tuple[Demand, Configuration]:
    """The configuration that the row's job pins, with its lengths: no constant of a fit changes it."""
    demand, configuration, _ = pinned(context_of(row, DEFAULT_LAW))
    return demand, configuration


def _demand(context: Context) -> Demand:
    """The lengths of the context's job."""
    task = context.tasks[0]
    return task.source.demand(task.batches[0], None, context.job.seed)
