"""What a whole run of a judged configuration costs: its rl_steps with everything around them."""

from __future__ import annotations

from dataclasses import dataclass

from rlperf.plan.context import Context
from rlperf.plan.evaluate import Evaluation
from rlperf.sim.rl_step.whole_run import RunCost, RunFacts, whole_run


@dataclass(frozen=True)
class Surroundings:
    """What the user states about a run; nothing of it is built in, and 0 or None means that it is left out.

    Attributes
    ----------
    checkpoint_every, checkpoint_s : rl_steps between checkpoints; seconds that one blocks [1], [s]
    validation_every, validation_s : rl_steps between validation passes; seconds of one [1], [s]
    device_mtbf_s : mean seconds between failures of one device [s]
    recovery_s : from a failure to the restart, beside the start-up [s]
    """

    checkpoint_every: int = 0
    checkpoint_s: float = 0.0
    validation_every: int = 0
    validation_s: float = 0.0
    device_mtbf_s: float | None = None
    recovery_s: float = 0.0


def run_cost(context: Context, evaluation: Evaluation, around: Surroundings, rl_steps: int | None = None) -> RunCost:
    """Time, goodput, device-hours and money of ``rl_steps`` (default: the job's horizon) of one configuration.

    Start-up and graph capture are the framework's; lengths stay as they are over the run.
    """
    job, configuration = context.job, evaluation.configuration
    framework = context.trainers[int(evaluation.trainer.backend[0])].framework
    price = job.price if job.price is not None else context.cluster.price
    facts = RunFacts(
        rl_steps=rl_steps or job.horizon.rl_steps,
        devices=configuration.devices,
        trained_tokens=evaluation.demand.trained_tokens,
        start_up_s=framework.start_up.value,
        capture_s=framework.capture.value,
        checkpoint_every=around.checkpoint_every,
        checkpoint_s=around.checkpoint_s,
        validation_every=around.validation_every,
        validation_s=around.validation_s,
        device_mtbf_s=around.device_mtbf_s,
        recovery_s=around.recovery_s,
        usd_per_device_hour=price,
    )
    return whole_run(evaluation.step_s, facts)
