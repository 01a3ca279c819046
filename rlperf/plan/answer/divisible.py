"""A batch near the job's that divides over all devices, where the job's own does not, and what it would gain."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.question.pool import BatchSettings
from rlperf.plan.search.screen import screen
from rlperf.sim.rl_step.demand import Batch
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.modes import MODES, Mode
from rlperf.units import human_seconds

FAR = 0.2
"""No batch is named that differs by more than this share of the job's."""
WORTH = 0.03
"""Share of an rl_step that other layouts save there, at least: closed forms chose them, a percent or two off."""


def uneven_samples(mode: Mode, batch: Batch | BatchSettings, devices: int) -> int:
    """Samples of an update where they do not divide over the devices that share them; 0 where they do [1]."""
    samples = batch.mini_batch * batch.group_size
    return samples if MODES[mode].shares_devices and samples % devices else 0


def divisible_batch(
    context: Context, task: TaskContext, evaluation: Evaluation, facts: FrameworkFacts | None
) -> tuple[str, ...]:
    """What the nearest batches would gain whose samples all devices share evenly; nothing where the job's do.

    A plain data-parallel trainer wants as many samples of an update on every device. Where they are not, as with 1,024
    on three nodes or five, devices stay idle, or the plan takes degrees that nobody would want otherwise.
    """
    configuration, batch = evaluation.configuration, evaluation.configuration.batch
    devices, alone = context.cluster.devices, len(context.tasks) == 1 and len(task.batches) == 1 and not task.parts
    plain = batch.generated == batch.prompts and batch.samples is None and batch.lora_jobs == 1
    samples = uneven_samples(configuration.mode, batch, devices)
    if not (samples and alone and plain) or context.own_rollout:
        return ()
    for other in _near(batch, devices):
        opened = replace(task, batches=(other,))
        demand = task.source.demand(other, evaluation.demand.rl_steps, context.job.seed)
        screened = screen(context, opened, (demand,), facts, keep=1)
        if screened.configurations:
            judge = Judge(context, opened)
            found = judge.evaluate(demand, screened.configurations[0])
            # a larger batch by itself saves of every prompt, too: the tail of a rollout is shared by more; but its
            # samples need not divide over the devices of this layout, whose own do
            laid_out = judge.evaluate(demand, replace(configuration, batch=other)).rl_step_s
            as_it_is = min(laid_out, evaluation.rl_step_s * other.prompts / batch.prompts)
            if (saved := 1.0 - found.rl_step_s / as_it_is) > WORTH:
                uneven = f"{samples:,} samples an update do not divide over {devices} devices"
                return (f"batch: {uneven}; {_words(found, saved)}",)
    return ()


def _words(found: Evaluation, saved: float) -> str:
    prompts, mini = found.configuration.batch.prompts, found.configuration.batch.mini_batch
    written = f"prompts_per_step {prompts}" + (f" and mini_batch {mini}" if mini != prompts else "")
    takes = f"an rl_step takes {human_seconds(found.rl_step_s)}, {100 * saved:.0f} % less than laid out as here"
    return f"with {written} {takes}"


def _near(batch: Batch, devices: int) -> list[Batch]:
    """The next smaller and larger batch of as many updates that divide over ``devices``, the nearer first."""
    unit = devices // gcd(devices, batch.group_size)
    below = batch.mini_batch // unit * unit
    sizes = [mini for mini in (below, below + unit) if mini > 0 and abs(mini / batch.mini_batch - 1.0) <= FAR]
    sizes.sort(key=lambda mini: abs(mini - batch.mini_batch))
    prompts = [mini * (batch.prompts // batch.mini_batch) for mini in sizes]
    return [
        replace(batch, prompts=all_of, mini_batch=mini, generated=all_of)
        for mini, all_of in zip(sizes, prompts, strict=True)
    ]
