"""What pools take of their devices' memory, by what it is spent on, and how likely that is too much."""

from __future__ import annotations

import numpy as np

from rlperf.cost.memory_risk import ENGINE_SPREAD, out_of_memory_risk
from rlperf.cost.trainer.memory import DEVICE_PARTS
from rlperf.plan.answer.plan import MemoryUse
from rlperf.plan.judge.evaluate import Evaluation, Holding
from rlperf.plan.question.context import Context
from rlperf.plan.search.rollout_columns import awake_limits
from rlperf.plan.search.trainer_columns import peak_limit
from rlperf.sim.rl_step.engine import ReplicaMemory
from rlperf.sim.rl_step.site import TrainerStack
from rlperf.sim.rl_step.trainer_bytes import TrainerBytes
from rlperf.specs.modes import MODES
from rlperf.specs.pool import Role


def memory_uses(context: Context, evaluation: Evaluation | Holding) -> dict[Role, MemoryUse]:
    """Peak bytes per device of the engine and the trainer, neighbours on shared devices included."""
    configuration = evaluation.configuration
    colocated = configuration.shares_memory
    trainer = context.trainers[evaluation.backend]
    held, beside = evaluation.held, float(evaluation.memory.asleep_bytes[0]) if colocated else 0.0
    uses: dict[Role, MemoryUse] = {
        "rollout": _engine_use(context, evaluation, held, colocated),
        "trainer": _trainer_use(context, trainer, held, beside, shared=context.site.critic_shared),
    }
    if evaluation.critic_held is not None:
        uses["critic"] = _trainer_use(context, trainer, evaluation.critic_held)
    return uses


def _engine_use(context: Context, evaluation: Evaluation | Holding, held: TrainerBytes, colocated: bool) -> MemoryUse:
    """While it generates, or receives weights on devices that it shares: whichever is nearer to what is allowed."""
    found = [_awake_use(context, evaluation, held, colocated)]
    if MODES[evaluation.configuration.mode].shares_devices:
        found.append(_waking_use(context, evaluation.memory, held))
    return max(found, key=lambda use: use.total - use.allowed)


def _waking_use(context: Context, memory: ReplicaMemory, held: TrainerBytes) -> MemoryUse:
    parts = {
        "weights": float(memory.weight_bytes[0]),
        "graphs and context": float(memory.asleep_bytes[0]),
        "trainer, sending": float(held.syncing.ravel()[0]),
    }
    return _used(context, parts, uncertain=sum(parts.values()) - parts["weights"])


def _awake_use(context: Context, evaluation: Evaluation | Holding, held: TrainerBytes, colocated: bool) -> MemoryUse:
    memory = evaluation.memory
    parts = {
        "weights": float(memory.weight_bytes[0]),
        "activation and graphs": float(memory.workspace_bytes[0]),
        "kv cache": float(memory.awake_bytes[0] - memory.weight_bytes[0] - memory.workspace_bytes[0]),
    }
    beside = float(memory.unbound_bytes[0])
    if colocated:
        parts["trainer, idle"] = float(held.idle.ravel()[0])
        beside += parts["trainer, idle"]
    return _used(context, parts, uncertain=beside)


def _used(context: Context, parts: dict[str, float], uncertain: float) -> MemoryUse:
    """Memory of an engine's device, of which some bytes may turn out more or fewer."""
    whole, device = sum(parts.values()), context.rollout_hardware.device.usable_memory
    low, high = ENGINE_SPREAD
    return MemoryUse(
        total=whole, low=whole - uncertain * (1.0 - low), high=whole + uncertain * (high - 1.0), limit=device,
        allowed=float(awake_limits(context, np.asarray(uncertain))),
        risk=float(out_of_memory_risk(uncertain, device - whole + uncertain, low, high)), parts=parts,
    )  # fmt: skip


def _trainer_use(
    context: Context, trainer: TrainerStack, held: TrainerBytes, asleep: float = 0.0, *, shared: bool = False
) -> MemoryUse:
    parts = {name: float(np.ravel(getattr(held.parts, name))[0]) for name in DEVICE_PARTS}
    if resident := float(held.reference.ravel()[0]):
        parts["reference"] = resident
    extra = float(held.peak.ravel()[0]) - sum(parts.values())
    if extra > 1.0:
        parts["critic" if shared else "scoring pass, beyond training"] = extra
    if asleep:
        parts["engine, asleep"] = asleep
    whole, device = sum(parts.values()), context.hardware.device.usable_memory
    low, high = trainer.calibration.memory_low, trainer.calibration.memory_high
    return MemoryUse(
        total=whole, low=low * whole, high=high * whole, limit=device, allowed=peak_limit(context, trainer),
        risk=float(out_of_memory_risk(whole, device, low, high)), parts=parts,
    )  # fmt: skip
