"""The engine of a rollout pool in a framework's stack: cost table of an engine_step, memory of a replica, limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rlperf.cost.engine_memory import engine_memory, kv_bytes_per_request, kv_bytes_per_token
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.cost.inference import ByTokens, tabulated
from rlperf.cost.layers.vision import Images
from rlperf.cost.network import pair_hop_s
from rlperf.cost.replica import Replica as EngineReplica
from rlperf.cost.replica import batches_in_flight
from rlperf.cost.roofline import as_float, stream_s
from rlperf.cost.speculation import draft_memory, speculating
from rlperf.cost.weight_sync import adapter_payload, wire_bytes_per_s
from rlperf.layout import BoolArray, FloatArray, IntArray, Layout
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.overheads import adapter_seconds, engine_in_framework
from rlperf.sim.rl_step.site import Site
from rlperf.sim.rollout.apart import Apart
from rlperf.specs.architecture import Architecture
from rlperf.specs.pool import Settings
from rlperf.specs.speculation import DraftSetting, sees_far
from rlperf.specs.speculation_calibration import load_speculation

BLOCK_TOKENS = 16
"""Tokens of a cache block [tokens]."""


def engine_limits(settings: Settings, kv_tokens: float, max_running: int) -> EngineLimits:
    """Limits of a replica that caches ``kv_tokens`` and runs at most ``max_running`` requests."""
    return EngineLimits(
        kv_tokens=kv_tokens,
        max_running=max_running,
        token_budget=settings.engine_token_budget,
        chunked_prefill=settings.chunked_prefill,
        prefix_caching=settings.prefix_caching,
    )


Tabulated = dict[tuple[object, ...], EngineStepCost]
"""Cost tables by engine shape; what is served by how many replicas makes no difference to them."""


def tabulate(
    site: Site, architecture: Architecture, settings: Settings, layout: Layout, backend: int = 0,
    known: Tabulated | None = None, images: Images | None = None, read_tokens: float = math.inf,
) -> tuple[EngineStepCost, ...]:  # fmt: skip
    """Cost table of every engine shape in a flat layout, with the host's time in the framework's software stack.

    ``backend``: index of the trainer that the engine works with. The screen takes the first for all, since the host's
    time hardly differs between the backends of one framework; the judge takes the candidate's own.
    ``known``: tables that were made before, of one architecture and its images; new ones are added.
    ``read_tokens``: of prompts that all replicas read at first, which fill the batches of a pipeline.
    """
    gemm_dtype, kv_dtype = settings.rollout_dtype, settings.kv_dtype
    drafts = (settings.speculation, settings.draft_acceptance, settings.draft_training)
    framework, tables = site.trainers[backend].framework, {} if known is None else known
    costs, flat = [], layout.flat()
    together = batches_in_flight(flat.pipeline_parallel, read_tokens / flat.data_parallel, settings.engine_token_budget)
    shapes = np.stack(list(vars(replace(flat, data_parallel=np.ones_like(flat.data_parallel))).values()), axis=1)
    for index, (shape, batches) in enumerate(zip(shapes.tolist(), together.tolist(), strict=True)):
        key = (*shape, batches, gemm_dtype, kv_dtype, backend, *drafts)
        if key not in tables:
            row, hardware, engine = flat.take(index), site.rollout_hardware, site.engine
            replica = EngineReplica.of(architecture, hardware, engine, row, gemm_dtype, kv_dtype, batches)
            cost = tabulated(replica, ByTokens.of(replica), images=images, scores_prompts=site.scores_prompts)
            adapters = adapter_seconds(framework, architecture, site.engine) if site.adapter_rank else (0.0, 0.0)
            schedulers = float(np.max(replica.attention_data))
            plain = engine_in_framework(_with_jobs(cost, site, architecture, row), framework, adapters, schedulers)
            whole = _with_speculation(plain, site, replica, settings)
            tables[key] = whole.scaled(framework.factors.rollout)
        costs.append(tables[key])
    return tuple(costs)


def _adapter_bytes(site: Site, architecture: Architecture, layout: Layout) -> FloatArray:
    """A LoRA job's adapter on a device of each pipeline stage [bytes]: tensor parallelism splits one matrix of two."""
    if not site.adapter_rank:
        return np.zeros(())
    whole = adapter_payload(architecture, site.adapter_rank).dense_bytes
    return np.asarray(whole * (0.5 + 0.5 / layout.tensor_parallel), dtype=np.float64)


def _with_jobs(cost: EngineStepCost, site: Site, architecture: Architecture, layout: Layout) -> EngineStepCost:
    r"""The cost where requests of several LoRA jobs run together: every further adapter is read once per engine_step.

    .. math:: L(x) \mathrel{+}= (\min(x, N) - 1)^+ A / W

    N jobs, A bytes of an adapter on a device, W its memory's rate; x tokens belong to no more than x jobs. The kernels
    are those of one adapter, which group rows by it (Chen et al. 2024, Punica, arXiv 2310.18547).
    """
    if site.adapter_jobs == 1:
        return cost
    hw = site.rollout_hardware
    each_s = float(stream_s(hw, _adapter_bytes(site, architecture, layout)))
    more_s = np.maximum(np.minimum(cost.tokens, site.adapter_jobs) - 1.0, 0.0) * each_s
    mixed = None if cost.mixed_linear_s is None else cost.mixed_linear_s + more_s
    return replace(cost, linear_s=cost.linear_s + more_s, mixed_linear_s=mixed)


def _with_speculation(cost: EngineStepCost, site: Site, replica: EngineReplica, settings: Settings) -> EngineStepCost:
    """The cost with the tokens that the pool's settings draft."""
    wanted = DraftSetting.parse(settings.speculation)
    if wanted is None:
        return cost
    architecture = replica.arch
    far = sees_far(wanted.method, architecture.family, architecture.prediction_layers)
    keeps_up = settings.draft_training or not site.policy_moves
    yields = load_speculation().tokens(wanted, settings.draft_acceptance, keeps_up, far)
    return speculating(cost, replica, wanted, yields)


def apart_of(site: Site, architecture: Architecture, settings: Settings, layout: Layout) -> tuple[Apart | None, ...]:
    """Replicas that read prompts for the others, of every engine shape in a flat layout; None where each reads its own.

    A device of a reader sends its shard of the cache to the device of a writer that holds the same shard: over the fast
    links of a pool that stands in one node, else through its share of the network.
    """
    if not settings.prefill_replicas:
        return (None,) * layout.size
    hw, found = site.rollout_hardware, []
    for row in layout.rows():
        replica = EngineReplica.of(
            architecture, hw, site.engine, row, settings.rollout_dtype, settings.kv_dtype
        )  # fmt: skip
        devices, domain = as_float(row.devices), as_float(hw.cluster.scale_up_domain)
        rate = float(wire_bytes_per_s(hw, devices, domain))
        hop = pair_hop_s(hw) + float(kv_bytes_per_request(replica)) / rate
        found.append(Apart(settings.prefill_replicas, float(kv_bytes_per_token(replica)) / rate, hop))
    return tuple(found)


HALF_GROWN = 2.0
"""Requests in flight for each that the cache holds at its mean final length: on average they are half grown."""


@dataclass(frozen=True, eq=False)
class ReplicaMemory:
    """Bytes per device of one replica of each column [bytes], and the tokens its cache holds; ``[columns]``.

    ``unbound_bytes`` : of those awake what no share that the engine is told bounds: context, graphs ...
    """

    weight_bytes: FloatArray
    workspace_bytes: FloatArray
    cache_bytes: FloatArray
    awake_bytes: FloatArray
    unbound_bytes: FloatArray
    asleep_bytes: FloatArray
    kv_tokens: FloatArray

    @property
    def waking_bytes(self) -> FloatArray:
        """While weights arrive, and no cache is there yet."""
        return self.weight_bytes + self.asleep_bytes


def replica_memory(
    site: Site,
    architecture: Architecture,
    settings: Settings,
    layout: Layout,
    fraction: FloatArray,
    running: IntArray,
    demand: Demand,
) -> ReplicaMemory:
    """Memory of engines at a memory fraction; what a request holds whatever its length is taken off the cache first.

    Of ``running`` requests as many hold something as the cache has room for beside their tokens: engines let others
    wait until blocks are free.
    """
    gemm_dtype, kv_dtype = settings.rollout_dtype, settings.kv_dtype
    replica = EngineReplica.of(architecture, site.rollout_hardware, site.engine, layout, gemm_dtype, kv_dtype)
    found = engine_memory(replica, memory_fraction=fraction, cuda_graphs=settings.cuda_graphs)
    each = kv_bytes_per_request(replica)
    grown = each + kv_bytes_per_token(replica) * demand.moments.mean / HALF_GROWN
    most = found.kv_cache_bytes / np.maximum(grown, 1.0)
    held = np.minimum(running / replica.attention_data, most) * each
    weights, per_token = found.weights_bytes, np.ones(())
    wanted = DraftSetting.parse(settings.speculation)
    if wanted is not None:
        draft = draft_memory(replica, wanted, as_float(running))
        held = held + draft.weight_bytes + draft.held_bytes
        weights, per_token = weights + draft.weight_bytes, 1.0 + draft.cache_share
    others = (site.adapter_jobs - 1) * _adapter_bytes(site, architecture, layout) / layout.pipeline_parallel
    held, weights = held + others, weights + others
    share = np.maximum(1.0 - held / np.maximum(found.kv_cache_bytes, 1.0), 0.0)
    shape = np.shape(fraction)
    asleep = found.graphs_bytes + found.non_torch_bytes
    return ReplicaMemory(
        weight_bytes=np.broadcast_to(weights, shape),
        workspace_bytes=np.broadcast_to(found.activation_bytes + asleep, shape),
        cache_bytes=np.broadcast_to(found.kv_cache_bytes * share, shape),
        awake_bytes=np.broadcast_to(found.total_bytes, shape),
        unbound_bytes=np.broadcast_to(found.unbound_bytes, shape),
        asleep_bytes=np.broadcast_to(asleep, shape),
        kv_tokens=np.broadcast_to(found.kv_tokens * share / per_token, shape),
    )


def least_cache(request_tokens: float) -> float:
    """Cache that holds one request: two blocks beyond its tokens, for rounding and for what is drafted [tokens]."""
    return request_tokens + 2.0 * BLOCK_TOKENS


FEW_LONGEST = 4
"""Longest requests below which a cache is short: it preempts wherever lengths scatter. Of 60 measured rl_steps the
engine with the least room holds seven."""


def short_cache(kv_tokens: FloatArray, request_tokens: float) -> BoolArray:
    """Where a replica's cache of so many tokens holds no more than a few requests of the longest."""
    return np.asarray(kv_tokens < FEW_LONGEST * least_cache(request_tokens))


def cache_granted(kv_tokens: FloatArray, request_tokens: float) -> FloatArray:
    """Cache of a replica as it is simulated [tokens]: where not even one request fits, two are granted.

    Such a pool does not run; its seconds are predicted all the same, as if it did.
    """
    least = least_cache(request_tokens)
    return np.where(kv_tokens < least, np.maximum(kv_tokens, 2.0 * least), kv_tokens)
