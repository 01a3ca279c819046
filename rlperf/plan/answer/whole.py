"""What an rl_step of all tasks takes, over all phases and groups of rl_steps: whoever states one number asks here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlperf.plan.answer.phases import mean_prediction
from rlperf.plan.answer.plan import MemoryUse, Phase, Plan, Prediction
from rlperf.plan.answer.run_cost import Stretch
from rlperf.specs.pool import Role


@dataclass(frozen=True)
class WholeStep:
    """The mean rl_step of a plan, all its tasks together.

    Attributes
    ----------
    rl_step_s, low_s, high_s : seconds with handovers between the tasks; interval as the phases'
    tokens_per_s_per_device : trained, over the devices of the plan
    truncated : least and most responses cut of any task [1]
    stages_s : of all tasks, or of the slowest of those that run beside each other [s]
    trained_tokens : of all tasks [tokens]
    usd : price with handovers, None where one is missing; devices of tasks that run beside each other are paid for
        until the slowest has ended
    devices : of the plan
    memory_bytes : of the phase that is likeliest to run out, by role
    """

    rl_step_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_device: float
    truncated: tuple[float, float]
    stages_s: dict[str, float]
    trained_tokens: float
    usd: float | None
    devices: int
    memory_bytes: dict[Role, MemoryUse]

    @classmethod
    def of(cls, plan: Plan) -> WholeStep:
        """Tasks that take turns add up, those that run beside each other wait for the slowest."""
        tasks = [_mean([p for p in plan.phases if p.tasks == names]) for names in tasks_of(plan)]
        handed = plan.handovers.per_rl_step_s if plan.handovers else 0.0
        apart = plan.job.sharing == "devices"
        low, mean, high = (
            max(seconds) if apart else sum(seconds) + handed
            for seconds in ([getattr(task, name) for task in tasks] for name in ("low_s", "rl_step_s", "high_s"))
        )
        first = min(phase.rl_steps[0] for phase in plan.phases)  # a plan that was edited may begin later than at 0
        taken = [Stretch.of(phase).devices for phase in plan.phases if phase.rl_steps[0] == first]
        devices, tokens = sum(taken) if apart else max(taken), sum(task.trained_tokens for task in tasks)
        waited_for = [max(tasks, key=lambda task: task.rl_step_s)] if apart else tasks
        stages = [task.stages_s.model_dump() for task in waited_for]
        prices = [task.usd_per_step for task in tasks]
        memory: dict[Role, MemoryUse] = {}
        for role, use in (item for phase in plan.phases for item in phase.predicted.memory_bytes.items()):
            memory[role] = max(memory.get(role, use), use, key=lambda each: (each.risk, each.total))
        cut = [task.truncated_fraction for task in tasks]
        paid_for = [mean / task.rl_step_s if apart else mean / (mean - handed) for task in tasks]
        return cls(
            rl_step_s=mean,
            low_s=low,
            high_s=high,
            tokens_per_s_per_device=tokens / mean / devices,
            truncated=(min(cut), max(cut)),
            stages_s={name: sum(each[name] for each in stages) for name in stages[0]},
            trained_tokens=tokens,
            usd=None if None in prices else sum(n * (usd or 0.0) for n, usd in zip(paid_for, prices, strict=True)),
            devices=devices,
            memory_bytes=memory,
        )


def tasks_of(plan: Plan) -> list[tuple[str, ...]]:
    """Tasks of the plan's phases, those of one batch together."""
    return list(dict.fromkeys(phase.tasks for phase in plan.phases))


def _mean(phases: Sequence[Phase]) -> Prediction:
    """One task's mean rl_step over its phases."""
    counts = [phase.rl_steps[1] - phase.rl_steps[0] + 1 for phase in phases]
    return mean_prediction([phase.predicted for phase in phases], counts)
