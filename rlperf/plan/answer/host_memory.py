"""Memory of the nodes: what waits there of a trainer, and what is relied on where nobody stated a machine."""

from __future__ import annotations

import numpy as np

from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.question.context import Context
from rlperf.units import human_bytes


def host_bytes(context: Context, evaluation: Evaluation) -> float:
    """What a node holds of the trainer's states, and of a reference that waits there [bytes]."""
    devices = evaluation.configuration.pool("trainer").devices
    return float(np.max(evaluation.held.host)) * min(devices, context.cluster.devices_per_node)


def host_note(context: Context, evaluation: Evaluation) -> list[str]:
    """How much of a template's memory states on the host take; nothing where the job or a machine's file says it."""
    cluster, pool = context.cluster, evaluation.configuration.pool("trainer")
    away = pool.settings.parked or pool.layout.offload != "none"
    if not away or context.job.limits.host_memory or cluster.name != f"generic:{context.hardware.device.name}":
        return []
    held, whole = host_bytes(context, evaluation), human_bytes(cluster.host_memory)
    words = f"the trainer takes {human_bytes(held)} of a node's host memory, {whole} assumed"
    return [f"{words}: limits.host_memory says yours"] if held else []
