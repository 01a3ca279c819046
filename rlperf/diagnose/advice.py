"""Which knobs remove a cause."""

from __future__ import annotations

from dataclasses import dataclass

from rlperf.units import human_seconds


@dataclass(frozen=True)
class Advice:
    """A knob, what to do with it, and the seconds per rl_step that it wins at most (None: not predicted).

    ``predicted_by`` says where the gain comes from: ``simulation`` (the rl_step simulated again with the knob turned)
    or ``graph`` (the recorded durations replayed with the whole cause gone: an upper bound).
    """

    knob: str
    action: str
    gain_s: float | None = None
    predicted_by: str = "graph"

    def __str__(self) -> str:
        gain = ""
        if self.gain_s is not None:
            simulated, seconds = self.predicted_by == "simulation", human_seconds(self.gain_s)
            gain = f" ({seconds}, simulated)" if simulated else f" (at most {seconds})"
        return f"{self.knob}: {self.action}{gain}"


KNOBS: dict[str, tuple[tuple[str, str], ...]] = {
    "slow_device": (
        ("devices", "check clocks, temperature and ECC of that node; replace it or leave it out"),
        ("routing", "let faster replicas take more (least_loaded routing) until it is replaced"),
    ),
    "slow_link": (
        ("network", "check cable, NIC, switch port and rail of that link; NCCL topology and transport"),
        ("placement", "place pipeline neighbours and gradient groups so that they do not cross it"),
    ),
    "long_trajectory": (
        ("max_response_tokens", "lower the maximum length, or penalise overlong responses"),
        ("partial_rollout", "carry unfinished trajectories over to the next rl_step"),
        ("staleness", "let training start without them (one step off or asynchronous)"),
    ),
    "data_imbalance": (
        ("routing", "deal trajectories by tokens, not by count (least_loaded or prefix_aware; verl balance_batch)"),
        ("token_budget", "pack micro-batches by tokens (dynamic batching)"),
    ),
    "slow_tool": (
        ("tool_timeout", "bound the latency of a call and retry elsewhere"),
        ("tool_concurrency", "add tool workers; overlap tool calls with other trajectories' decoding"),
    ),
    "controller": (
        ("controller", "move serial work of the driver to workers: shard dispatch, tokenization, logging, batches"),
        ("data_parallel", "fewer, larger workers"),
    ),
    "stage_imbalance": (("partition", "move layers from that pipeline stage to the others (rlperf pipeline)"),),
    "kv_cache": (
        ("memory_fraction", "give the engine more memory (trainer offload, higher memory_fraction)"),
        ("kv_dtype", "store the cache in fp8"),
        ("tensor_parallel", "more devices per replica"),
        ("max_running", "lower it to stop preemption, where requests are evicted"),
    ),
    "slow_reward": (("reward", "add reward workers; bound sandbox time; overlap reward with the rollout"),),
    "tail": (
        ("partial_rollout", "carry unfinished trajectories over to the next rl_step"),
        ("staleness", "one step off or asynchronous: training runs beside the tail"),
        ("max_response_tokens", "lower the maximum length"),
        ("over_provisioning", "roll out more prompts and keep the first to end"),
    ),
    "rollout_imbalance": (("routing", "deal trajectories by expected tokens, or pull them (least_loaded)"),),
    "queueing": (
        ("max_running", "more requests at once, where the cache has room"),
        ("replicas", "more replicas, or fewer devices per replica"),
        ("engine", "an attention backend and CUDA graphs whose step does not grow with the running requests"),
    ),
    "tool": (
        ("tool_concurrency", "more tool workers; asynchronous tool calls"),
        ("max_trajectories", "more environments at once, where their number is bounded"),
    ),
    "reward": (
        ("reward", "overlap reward with the rollout, trajectory by trajectory"),
        ("reward_workers", "more workers per rank: the slowest rank counts"),
    ),
    "reward_imbalance": (("reward", "share the rewards of all ranks among one pool of workers"),),
    "dp_imbalance": (("token_budget", "balance tokens over data-parallel ranks and pack by tokens"),),
    "straggling_rank": (("devices", "find why one rank computes more slowly than its peers"),),
    "exposed_communication": (
        ("overlap", "overlap gradient and weight communication with compute"),
        ("tensor_parallel", "keep tensor_parallel inside a node; less pipeline_parallel or context_parallel"),
    ),
    "pipeline_bubble": (
        ("microbatch", "more micro-batches per rank"),
        ("virtual_pipeline", "interleave stages, or a zero-bubble schedule (rlperf pipeline)"),
        ("pipeline_parallel", "fewer stages"),
    ),
    "recompute": (("activation_recompute", "selective instead of full, where memory allows"),),
    "weight_sync": (("weight_sync", "bucketed or resharding transfer; in-flight updates; a larger sync interval"),),
    "data_movement": (("data_movement", "send tensors between workers directly, not through the controller"),),
    "offload": (("offload", "keep optimizer or weights on the device, where memory allows"),),
    "slowdown": (
        (
            "log",
            "look at what changed at that rl_step: longer responses, a restarted worker, an evaluation or a logger",
        ),
        (
            "devices",
            "measure the nodes anew: clocks, links and neighbours that were well before (nvidia-smi, nccl-tests)",
        ),
    ),
    "slow_step": (("log", "look at that rl_step: longer prompts, validation, a checkpoint, a restarted worker"),),
    "straggler": (("devices", "look at what that rank did at that place: a retry, a page fault, a neighbour's job"),),
    "other": (("profile", "time between the stages' timers: advantages, checkpoints, logging, kernel launches"),),
    "scaling": (("mode", "the stage does not get shorter with more devices: overlap it or shard it"),),
}


_COLOCATE = "rollout and trainer on the same devices: weights need not cross the network"
KNOBS_APART: dict[str, tuple[tuple[str, str], ...]] = {"weight_sync": (("colocate", _COLOCATE),)}
"""The same where rollout and trainer have devices of their own."""
KNOBS_UNTOLD: dict[str, tuple[tuple[str, str], ...]] = {
    "weight_sync": (("colocate", f"unless they take turns already, {_COLOCATE}"),)
}
"""The same where nothing tells whether they have: logs do not."""


def advice_for(kind: str, gain_s: float, *, shares_devices: bool | None) -> tuple[Advice, ...]:
    """Knobs of a cause, with the what-if as the most that they can win; ``shares_devices``: None where untold.

    >>> [advice.knob for advice in advice_for("weight_sync", 1.0, shares_devices=True)]
    ['weight_sync']
    """
    own = KNOBS_UNTOLD if shares_devices is None else {} if shares_devices else KNOBS_APART
    return tuple(Advice(knob, action, gain_s) for knob, action in (*KNOBS.get(kind, ()), *own.get(kind, ())))
