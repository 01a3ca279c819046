"""Memory of a serving engine: weights, cache, activations, CUDA graphs; from it capacity of the cache, max_running."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.cost.dtypes import dtype_of
from rlperf.cost.engine_step import EngineLimits
from rlperf.cost.layers import stack_of
from rlperf.cost.parameters import embedding_parameters, routed_parameters, tower_parameters
from rlperf.cost.replica import Replica
from rlperf.cost.roofline import Array, as_float
from rlperf.layout import FloatArray


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one device of a replica, and what the cache of the replica holds; arrays broadcast.

    Attributes
    ----------
    weights_bytes, activation_bytes, graphs_bytes, non_torch_bytes, kv_cache_bytes : on one device [bytes]
    total_bytes : all of them: what the engine takes of the device [bytes]
    unbound_bytes : of them what no share that the engine is told bounds [bytes]
    kv_tokens : cached tokens of the whole replica [tokens]; 0 where the weights do not fit
    """

    weights_bytes: FloatArray
    activation_bytes: FloatArray
    graphs_bytes: FloatArray
    non_torch_bytes: FloatArray
    kv_cache_bytes: FloatArray
    kv_tokens: FloatArray
    unbound_bytes: FloatArray

    @property
    def total_bytes(self) -> FloatArray:
        """Everything together [bytes]."""
        parts = (self.weights_bytes, self.activation_bytes, self.graphs_bytes, self.non_torch_bytes)
        return np.asarray(sum(parts, start=self.kv_cache_bytes), dtype=np.float64)

    @property
    def fits(self) -> np.ndarray:
        """Whether weights and workspace leave room for a cache."""
        return np.asarray(self.kv_tokens > 0)


def weight_bytes(replica: Replica) -> FloatArray:
    """Weights on one device [bytes]: attention copies per attention-data-parallel rank, experts split over all.

    Parameters by kind x bytes of the dtype that the checkpoint gives this kind / devices that share it. What tensor
    parallelism copies lies on every device: routers, the down projections of latent attention, heads beyond those
    that there are. Every copy of the attention has the table of tokens, and the output head as well or all share one
    (vLLM's copies are engines of their own; SGLang 0.5.23, ``models/deepseek_v2.py:2943, 3291``).
    """
    arch, roles = replica.arch, replica.roles
    at, devices = replica.attention_tensor, replica.tensor
    stage = float(routed_parameters(arch)) * dtype_of(roles.expert).weight_bytes / devices
    for half in stack_of(arch).halves:
        stage = stage + half.count * half.layer.bytes_on(at, roles)
    towers = float(tower_parameters(arch)) * 2.0
    head = 0.0 if arch.head_is_table else float(arch.head_outputs * arch.hidden)
    ends = (float(embedding_parameters(arch)) - head) / at + head / replica.head_tensor
    return stage / replica.pipeline + ends * dtype_of(roles.head).weight_bytes + towers


def kv_bytes_per_token(replica: Replica) -> FloatArray:
    """Cache of one token on one device that holds its request [bytes]."""
    halves = stack_of(replica.arch).halves
    held = sum((half.count * half.layer.cache_bytes_per_token(replica) for half in halves), np.zeros(()))
    return held / replica.pipeline


def kv_bytes_per_request(replica: Replica) -> FloatArray:
    """What a request holds whatever its length, on one device [bytes]: sliding windows and recurrent states."""
    halves = stack_of(replica.arch).halves
    held = sum((half.count * half.layer.cache_bytes_per_request(replica) for half in halves), np.zeros(()))
    return held / replica.pipeline


def recorded_bytes(replica: Replica) -> FloatArray:
    """What a request holds for every drafted token beside its cache, on one device [bytes]: recurrent states."""
    halves = stack_of(replica.arch).halves
    held = sum((half.count * half.layer.recorded_bytes(replica) for half in halves), np.zeros(()))
    return held / replica.pipeline


def request_bytes(replica: Replica, tokens: Array) -> FloatArray:
    """What a request of so many tokens holds on one device [bytes]."""
    halves, held = stack_of(replica.arch).halves, as_float(tokens)
    each = sum((half.count * half.layer.cache_bytes(replica, held) for half in halves), np.zeros(()))
    return each / replica.pipeline


def engine_memory(
    replica: Replica, *, memory_fraction: Array | None = None, cuda_graphs: bool | None = None
) -> EngineMemory:
    """Memory of one device and cache capacity of the replica.

    Parameters
    ----------
    replica : of a layout of any shape
    memory_fraction : share of the device's memory that the engine is told; default: the engine's own

    Notes
    -----
    cache = fraction x memory - weights - activations - graphs - non_torch, at least 0; where the fraction is of what is
    free (`fraction_of`), fraction x (memory - weights - ...); where it is of weights and cache, fraction x (memory -
    non_torch) - weights, and activations and graphs lie beside it (SGLang 0.5.10 ``server_args.py:1154``,
    ``model_executor/model_runner_kv_cache_mixin.py:171``; of its own accord it leaves what it thinks they take,
    ``server_args.py:1281``, so that its own share is of the device). The constants of the last three come from start-up
    breakdowns of vLLM (see the engine's profile).
    """
    engine, device, memory = replica.engine, replica.hw.device, replica.engine.memory
    graphs = engine.cuda_graphs if cuda_graphs is None else cuda_graphs
    fraction = engine.memory_fraction if memory_fraction is None else as_float(memory_fraction)
    weights = weight_bytes(replica)
    # logits of a full batch of 1,024 requests, about ten copies in fp32 while they are sampled, whatever the experts
    activation = np.full_like(weights, memory.activation_per_word * replica.arch.vocab)
    activation = np.minimum(activation, 0.1 * device.usable_memory)  # small cards profile with smaller budgets
    captured = np.full_like(weights, memory.graphs if graphs else 0.0)
    other = memory.non_torch + np.where(replica.tensor * replica.pipeline > 1.0, memory.non_torch_parallel, 0.0)
    taken = weights + activation + captured + other
    whole = device.usable_memory
    if engine.fraction_of == "free":
        cache = fraction * (whole - taken)
    elif engine.fraction_of == "static" and memory_fraction is not None:
        cache = fraction * (whole - other) - weights
    else:
        cache = fraction * whole - taken
    cache = np.maximum(cache, 0.0)
    tokens = cache / np.maximum(kv_bytes_per_token(replica), 1e-9) * replica.attention_data
    unbound = captured + other + (activation if engine.fraction_of == "static" else 0.0)
    return EngineMemory(weights, activation, captured, other, cache, tokens, unbound)


def max_running(replica: Replica, isl: Array, osl: Array) -> FloatArray:
    """Requests of ``isl`` + ``osl`` tokens that a replica runs at once [1].

    The cache over what a request holds on average, isl + osl / 2 (all of isl + osl where the engine reserves it),
    at most the engine's own limit, that of each rank where ranks admit; 0 where the weights do not fit.
    """
    memory, engine = engine_memory(replica), replica.engine
    held = as_float(isl) + as_float(osl) * (1.0 if engine.reserves_output else 0.5)
    fit = memory.kv_cache_bytes / np.maximum(request_bytes(replica, held), 1.0) * replica.attention_data
    admitting = replica.attention_data if engine.ranks_admit else 1.0
    return np.minimum(np.floor(fit), float(engine.on(replica.hw.device).max_running) * admitting)


def engine_limits(replica: Replica, *, memory_fraction: float | None = None) -> EngineLimits:
    """What bounds the running batch of one replica of a scalar layout, for the rollout simulator."""
    memory = engine_memory(replica, memory_fraction=memory_fraction)
    engine = replica.engine.on(replica.hw.device)
    return EngineLimits(
        kv_tokens=float(memory.kv_tokens),
        max_running=engine.max_running,
        token_budget=engine.token_budget,
        block_tokens=engine.block_tokens,
        chunked_prefill=engine.chunked_prefill,
        prefix_caching=engine.prefix_caching,
    )
