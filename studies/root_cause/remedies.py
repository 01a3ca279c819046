"""Causes removed from the inputs of an rl_step, which is then simulated again: what a cause costs, not estimated on the
graph but by the simulators themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rlperf.diagnose.explain import FLOOR, Cause, Explanation, explain_graph, ranked, simulated
from rlperf.diagnose.peers import Thresholds, apart
from rlperf.diagnose.remedies import evened, without_long, without_tools
from rlperf.layout import FloatArray
from rlperf.sim.pipeline import StageCosts
from rlperf.sim.rollout import ReplicaCosts
from studies.root_cause.scenario import StepInputs, simulate_step


def remove(inputs: StepInputs, kind: str) -> StepInputs:
    """The inputs without a cause; kinds as in `Fault` and `structural_changes`.

    Raises
    ------
    KeyError : the kind cannot be removed from inputs (`REMOVABLE` lists those that can)
    """
    return REMOVABLE[kind](inputs)


def explain_inputs(inputs: StepInputs, *, floor: float = FLOOR, limits: Thresholds | None = None) -> Explanation:
    """Explain an rl_step whose inputs are known: seconds of causes by simulating again without them.

    Causes that no longer cost anything when simulated again are left out.
    """
    graph = simulate_step(inputs)
    found = explain_graph(graph, floor=floor, limits=limits)
    rl_step_s = graph.rl_step_s()

    def again(cause: Cause) -> Cause:
        if cause.kind not in REMOVABLE:
            return cause
        return simulated(cause, rl_step_s - simulate_step(remove(inputs, cause.kind)).rl_step_s(), rl_step_s)

    causes = [again(cause) for cause in found.causes]
    return replace(found, causes=ranked([c for c in causes if c.share >= floor]))


def _even_tools(inputs: StepInputs) -> StepInputs:
    """Tool latencies above the others' longest are the others' longest; of a slow replica, at its peers' median."""
    served = inputs.trajectories
    latency = served.tool_latency_s.copy()
    if not isinstance(inputs.routing, str):
        rank = np.asarray(inputs.routing)[served.turn_owner]
        medians = np.array([np.median(latency[rank == r]) for r in range(len(inputs.replicas))])
        typical = float(np.median(medians[medians > 0])) if (medians > 0).any() else 0.0
        slow = medians > Thresholds().tool * typical
        if typical > 0:
            latency = np.where(slow[rank], latency * typical / np.maximum(medians[rank], 1e-12), latency)
    count = apart(latency, Thresholds().gap)
    if count:
        order = np.argsort(-latency, kind="stable")
        latency[order[:count]] = latency[order[count]]
    return replace(inputs, trajectories=replace(served, tool_latency_s=latency))


def _even_devices(inputs: StepInputs) -> StepInputs:
    """Replicas as fast as the median replica, and training as the median rank, token for token."""
    seconds = np.array([float(r.cost.decode_s(32.0, 32e3)) for r in inputs.replicas])
    typical = inputs.replicas[int(np.argsort(seconds, kind="stable")[(len(seconds) - 1) // 2])]
    replicas = tuple(
        ReplicaCosts(typical.cost, r.limits, r.devices) if s > float(np.median(seconds)) else r
        for r, s in zip(inputs.replicas, seconds, strict=True)
    )
    tokens = inputs.microbatch_tokens
    rate = np.array([c.forward_s.sum(axis=1) / tokens[d].sum() for d, c in enumerate(inputs.trainer)])
    factor = np.minimum(np.median(rate, axis=0) / rate, 1.0)
    trainer = tuple(_scaled(c, f[:, None]) for c, f in zip(inputs.trainer, factor, strict=True))
    scoring = inputs.scoring_s / inputs.scored_tokens
    return replace(
        inputs,
        replicas=replicas,
        trainer=trainer,
        scoring_s=np.minimum(scoring, np.median(scoring)) * inputs.scored_tokens,
        optimizer_s=np.minimum(inputs.optimizer_s, np.median(inputs.optimizer_s)),
    )


def _even_links(inputs: StepInputs) -> StepInputs:
    """Transfers at the median rate of all links; weight and gradient sync at their peers' median."""
    tokens = inputs.microbatch_tokens
    rate = np.array([c.transfer_s.sum(axis=1) / tokens[d].sum() for d, c in enumerate(inputs.trainer)])
    typical = float(np.median(rate)) if rate.size else 0.0
    factor = np.minimum(typical / np.maximum(rate, 1e-30), 1.0)
    trainer = tuple(
        replace(c, transfer_s=c.transfer_s * f[:, None]) for c, f in zip(inputs.trainer, factor, strict=True)
    )
    return replace(
        inputs,
        trainer=trainer,
        weight_sync_s=np.minimum(inputs.weight_sync_s, np.median(inputs.weight_sync_s)),
        gradient_sync_s=np.minimum(inputs.gradient_sync_s, np.median(inputs.gradient_sync_s)),
    )


def _even_stages(inputs: StepInputs) -> StepInputs:
    """Every pipeline stage has the mean of the stages, on the median rank."""
    work = np.median([c.work_s for c in inputs.trainer], axis=0)
    factor = (work.mean() / work)[:, None]
    return replace(inputs, trainer=tuple(_scaled(c, factor) for c in inputs.trainer))


def _even_ranks(inputs: StepInputs) -> StepInputs:
    """Every data-parallel rank scores and trains the mean tokens at its own rate."""
    tokens = inputs.microbatch_tokens.sum(axis=1)
    factor = tokens.mean() / tokens
    return replace(
        inputs,
        trainer=tuple(
            replace(_scaled(c, np.asarray(f)), transfer_s=c.transfer_s * f)
            for c, f in zip(inputs.trainer, factor, strict=True)
        ),
        microbatch_tokens=inputs.microbatch_tokens * factor[:, None],
        scoring_s=inputs.scoring_s * inputs.scored_tokens.mean() / inputs.scored_tokens,
        scored_tokens=np.full(tokens.size, inputs.scored_tokens.mean()),
    )


def _even_split(inputs: StepInputs) -> StepInputs:
    """Trajectories dealt in equal numbers and tokens: longest first to the replica with the fewest tokens."""
    tokens = inputs.trajectories.generated_tokens
    load, count = np.zeros(len(inputs.replicas)), np.zeros(len(inputs.replicas))
    most = -(-tokens.size // len(inputs.replicas))
    owner = np.empty(tokens.size, dtype=np.int64)
    for i in np.argsort(-tokens, kind="stable"):
        owner[i] = int(np.argmin(np.where(count < most, load, np.inf)))
        load[owner[i]] += tokens[i]
        count[owner[i]] += 1
    return replace(_even_ranks(inputs), routing=owner)


def _scaled(costs: StageCosts, factor: FloatArray) -> StageCosts:
    return replace(
        costs,
        forward_s=costs.forward_s * factor,
        backward_input_s=costs.backward_input_s * factor,
        backward_weight_s=costs.backward_weight_s * factor,
    )


def _more_cache(inputs: StepInputs) -> StepInputs:
    return replace(
        inputs, replicas=tuple(replace(r, limits=replace(r.limits, kv_tokens=np.inf)) for r in inputs.replicas)
    )


def _no_communication(inputs: StepInputs) -> StepInputs:
    free = tuple(replace(c, transfer_s=np.zeros_like(c.transfer_s)) for c in inputs.trainer)
    return replace(inputs, trainer=free, gradient_sync_s=np.zeros_like(inputs.gradient_sync_s))


def _no_recompute(inputs: StepInputs) -> StepInputs:
    kept = 1.0 - inputs.recompute_share
    less = tuple(
        replace(c, backward_input_s=c.backward_input_s * kept, backward_weight_s=c.backward_weight_s * kept)
        for c in inputs.trainer
    )
    return replace(inputs, trainer=less, recompute_share=0.0)


REMOVABLE: dict[str, Callable[[StepInputs], StepInputs]] = {
    "slow_device": _even_devices,
    "straggling_rank": _even_devices,
    "slow_link": _even_links,
    "long_trajectory": lambda i: replace(i, trajectories=without_long(i.trajectories)),
    "data_imbalance": _even_split,
    "slow_tool": _even_tools,
    "stage_imbalance": _even_stages,
    "kv_cache": _more_cache,
    "slow_reward": lambda i: replace(i, reward_s=np.minimum(i.reward_s, np.median(i.reward_s))),
    "tail": lambda i: replace(i, trajectories=evened(i.trajectories)),
    "tool": lambda i: replace(i, trajectories=without_tools(i.trajectories)),
    "reward": lambda i: replace(i, reward_s=np.zeros_like(i.reward_s)),
    "reward_imbalance": lambda i: replace(i, reward_s=np.full_like(i.reward_s, i.reward_s.mean())),
    "dp_imbalance": _even_ranks,
    "exposed_communication": _no_communication,
    "recompute": _no_recompute,
    "weight_sync": lambda i: replace(i, weight_sync_s=np.zeros_like(i.weight_sync_s)),
    "data_movement": lambda i: replace(i, data_movement_s=0.0),
    "offload": lambda i: replace(i, offload_s=0.0),
    "controller": lambda i: replace(i, controller_s=0.0),
}
"""How each cause is removed from the inputs."""
