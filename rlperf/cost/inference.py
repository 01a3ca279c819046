"""Prefill and decode of a serving engine: seconds of one engine_step, and of what it is made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.layers import stack_of
from rlperf.cost.layers.vision import Images, encode_s_per_token
from rlperf.cost.operators import decode_operators, head_operators, prefill_operators, token_operators
from rlperf.cost.replica import BEST_BANDWIDTH, Operator, Replica, in_engine, total, total_in_engine
from rlperf.cost.roofline import Array, as_float
from rlperf.layout import FloatArray
from rlperf.specs.architecture import Architecture
from rlperf.specs.engine_calibration import EngineCalibration

TOKEN_POINTS = np.array(
    [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384],
    dtype=np.float64,
)
"""Token counts at which an `EngineStepCost` tabulates what depends on tokens alone."""


def host_s(replica: Replica, running: Array) -> FloatArray:
    """Scheduler, sampling, gaps and launches of one engine_step that kernels do not hide [s].

    `fixed_overhead_s` + what shows of per_request x running (`EngineCalibration.per_request_s`), and without CUDA
    graphs the launches of every layer, unless the engine states what an eager kernel costs its host while the device
    works (`eager_s`). ``running``: requests of the replica; of copies of the attention each has a scheduler of its own
    (`Replica.scheduled`).
    """
    engine, layers = replica.engine, replica.arch.layers
    bare = not engine.cuda_graphs and engine.eager_call is None
    eager = engine.kernels_per_layer * layers * replica.hw.calibration.host.launch if bare else 0.0
    return fixed_overhead_s(replica) + engine.per_request_s * replica.scheduled(running) + eager


def eager_s(engine: EngineCalibration, arch: Architecture) -> float:
    """Host seconds in which one engine_step is issued kernel by kernel; 0 with CUDA graphs.

    The device works meanwhile, so an engine_step takes the longer of both: t = max(kernels x eager_call, device).
    """
    if engine.cuda_graphs or engine.eager_call is None:
        return 0.0
    extra = stack_of(arch).total(lambda layer: layer.extra_kernels)
    return engine.eager_call * (engine.kernels_per_layer * arch.layers + extra)


def uncaptured_layers(engine: EngineCalibration, arch: Architecture) -> FloatArray:
    """Layers that the host issues kernel by kernel in an engine_step with prompts, at `TOKEN_POINTS` ``[points]``.

    CUDA graphs hold decodes alone; where an engine cuts the model into pieces (vLLM: `captures_prompts`), its graphs
    hold prompts too, up to the largest bucket.
    """
    captured = max(engine.graph_buckets, default=0) if engine.cuda_graphs and engine.captures_prompts else 0
    return np.where(captured < TOKEN_POINTS, float(arch.layers), 0.0)


def fixed_overhead_s(replica: Replica) -> FloatArray:
    """step + per_layer x layers + per_expert_layer x layers with routed experts, spread ones with their own [s]."""
    own, routed = replica.engine.overhead, float(stack_of(replica.arch).routes.sum())
    each = own.per_expert_layer + np.where(replica.expert > 1.0, own.per_spread_layer, 0.0)
    return np.asarray(own.step + own.per_layer * replica.arch.layers + each * routed)


def padded(engine: EngineCalibration, running: Array) -> FloatArray:
    """Batch padded to the next CUDA-graph bucket; larger batches run as they are."""
    x = as_float(running)
    if not engine.cuda_graphs or not engine.graph_buckets:
        return x
    buckets = np.asarray(engine.graph_buckets, dtype=np.float64)
    index = np.searchsorted(buckets, x, side="left")
    return np.where((x > 0) & (index < len(buckets)), buckets[np.minimum(index, len(buckets) - 1)], x)


def decode_step_s(replica: Replica, running: Array, kv_tokens: Array) -> FloatArray:
    """Seconds of an engine_step in which ``running`` requests of a replica decode one token each.

    Parameters
    ----------
    replica : of a layout of any shape
    running : requests of the replica [1], broadcasts with the layout
    kv_tokens : cached tokens of all of them together [tokens]

    Returns
    -------
    seconds [s]: host + scale x (operators of tokens + attention)
    """
    engine, arch = replica.engine, replica.arch
    batch, scale = padded(engine, running), engine.overhead.kernel_scale
    device = total_in_engine(token_operators(replica, batch, batch), scale)
    device = device + total_in_engine(decode_operators(replica, running, kv_tokens), scale)
    return host_s(replica, running) + np.maximum(device, eager_s(engine, arch))


def prefill_s(replica: Replica, requests: Array, query_tokens: Array, kv_tokens: Array | None = None) -> FloatArray:
    """Seconds to prefill ``requests`` prompts in one engine_step.

    Parameters
    ----------
    query_tokens : new tokens of each [tokens]
    kv_tokens : visible tokens of each, cached prefix included [tokens]; default: the new ones
    """
    q = as_float(query_tokens)
    k = q if kv_tokens is None else as_float(kv_tokens)
    engine, arch, scale = replica.engine, replica.arch, replica.engine.overhead.kernel_scale
    device = total_in_engine(token_operators(replica, as_float(requests) * q, requests), scale)
    device = device + total_in_engine(prefill_operators(replica, requests, q, k), scale)
    layers = np.interp(as_float(requests) * q, TOKEN_POINTS, uncaptured_layers(engine, arch))
    issued = np.maximum(eager_s(engine, arch), engine.overhead.uncaptured * layers)
    return host_s(replica, requests) + np.maximum(device, issued)


@dataclass(frozen=True)
class OperatorRow:
    """One line of a breakdown: seconds, share of the engine_step, what binds it, and percent of the speed of light."""

    name: str
    seconds: float
    share: float
    bound: str
    percent_of_light: float


LATENCY_BOUND = 0.35
"""An operator whose ideal time is less than this share of its seconds is bound by latency."""


def breakdown(operators: list[Operator], scale: float, host: float) -> list[OperatorRow]:
    """Operators of a scalar layout as lines, equal names added up, the host last."""
    sums: dict[str, list[float]] = {}
    for one in operators:
        line = sums.setdefault(one.name, [0.0, 0.0, 0.0, 0.0])
        for place, value in enumerate((in_engine(one, scale), one.compute_s, one.memory_s, one.network_s)):
            line[place] += float(value)
    whole = sum(line[0] for line in sums.values()) + host
    rows = []
    for name, (seconds, *ideal) in sums.items():
        if seconds <= 0.0:
            continue
        best = max(ideal)
        kind = ("compute", "bandwidth", "network")[ideal.index(best)]
        bound = kind if best >= LATENCY_BOUND * seconds else "latency"
        rows.append(OperatorRow(name, seconds, seconds / whole, bound, 100.0 * min(best / seconds, 1.0)))
    rows.sort(key=lambda row: -row.seconds)
    if host > 0.0:
        rows.append(OperatorRow("host", host, host / whole, "latency", 0.0))
    return rows


def decode_breakdown(replica: Replica, running: float, kv_tokens: float) -> list[OperatorRow]:
    """Operators of one decode engine_step of a scalar layout; their seconds add up to `decode_step_s`."""
    engine = replica.engine
    batch = padded(engine, running)
    operators = token_operators(replica, batch, batch) + decode_operators(replica, running, kv_tokens)
    return breakdown(operators, engine.overhead.kernel_scale, _host_of(replica, running, operators))


def _host_of(replica: Replica, running: float, operators: list[Operator]) -> float:
    """Host seconds beside the operators of one engine_step: its own, and what eager calls exceed the device by."""
    engine, arch = replica.engine, replica.arch
    device = float(total_in_engine(operators, engine.overhead.kernel_scale))
    own = float(host_s(replica, running))
    return own + max(eager_s(engine, arch) - device, 0.0)


@dataclass(frozen=True)
class ByTokens:
    """Operators that tokens alone decide, no context and no overhead of the engine: one set serves many costs.

    Attributes
    ----------
    tabulated : at `TOKEN_POINTS`; prompts send one row a request through the head, not one a token, so it stands apart
    heads : at ``batch`` requests, and at twice as many
    """

    tabulated: tuple[Operator, ...]
    heads: tuple[Operator, ...]

    @classmethod
    def of(cls, replica: Replica) -> ByTokens:
        """Those of a scalar layout."""
        tabulated = token_operators(replica, TOKEN_POINTS, TOKEN_POINTS)
        batch = _batch(replica)
        return cls(
            tuple(one for one in tabulated if one.name not in _HEAD),
            tuple(head_operators(replica, np.array([batch, 2.0 * batch]))),
        )


def _batch(replica: Replica) -> float:
    """Running requests around which an engine_step is linearised [1]."""
    return 16.0 * float(np.max(replica.pipeline * replica.attention_data))


def engine_step_cost(
    replica: Replica, *, typical_context: float = 4096.0, images: Images | None = None
) -> EngineStepCost:
    """Tabulate a replica of a scalar layout for the rollout simulator; parameters are those of `tabulated`."""
    return tabulated(replica, ByTokens.of(replica), typical_context=typical_context, images=images)


def tabulated(
    replica: Replica,
    by_tokens: ByTokens,
    *,
    typical_context: float = 4096.0,
    images: Images | None = None,
    scores_prompts: bool = False,
) -> EngineStepCost:
    """Seconds of one scalar replica's engine_steps, from operators that may be shared with other overheads.

    Parameters
    ----------
    by_tokens : of this replica under any overheads
    typical_context : tokens of a running request at which what is not linear in context is linearised: sliding
        windows, and the fixed cost of split contexts; other terms are read off the operators in pairs [tokens]
    images : of the prompts, encoded where their tokens are prefilled (engines cache what the tower made of an image)
    scores_prompts : every prompt token goes through the head, since its log-probability is asked for
    """
    arch, hw, engine = replica.arch, replica.hw, replica.engine
    scale = engine.overhead.kernel_scale
    linear = total_in_engine(by_tokens.tabulated, scale)
    low, high = typical_context, 1.5 * typical_context
    batch = _batch(replica)

    def decode(running: float, context: float) -> tuple[float, float]:
        operators = decode_operators(replica, running, running * context)
        return float(total_in_engine(operators, scale)), sum(float(one.memory_s) for one in operators) / BEST_BANDWIDTH

    (near, light), (far, far_light), (twice, _) = decode(batch, low), decode(batch, high), decode(2.0 * batch, low)
    per_kv = (far - near) / (batch * (high - low))
    # the cache is read no faster than light wherever fixed parts leave room for it
    per_kv = max(per_kv, min(per_kv / scale, (far_light - light) / (batch * (high - low))))
    per_request = (twice - near) / batch - per_kv * low
    fixed = near - batch * (per_request + per_kv * low)
    heads = total_in_engine(by_tokens.heads, scale)
    head_each = float(heads[1] - heads[0]) / batch
    pre = _prefill_terms(replica, scale, typical_context)
    encoding = scale * encode_s_per_token(hw, arch.vision, images, float(np.max(replica.tensor)), engine.engine)
    # what hides the host's calls is all of the device's work; of attention only its fixed part counts here
    linear = np.maximum(linear, eager_s(engine, arch) - fixed)
    line = fixed + TOKEN_POINTS * (per_request + per_kv * low)
    return EngineStepCost(
        tokens=TOKEN_POINTS,
        linear_s=linear + _held_up_s(replica, scale, low, line),
        mixed_linear_s=np.maximum(linear, engine.overhead.uncaptured * uncaptured_layers(engine, arch)),
        host_s=float(np.max(host_s(replica, 0.0))) + float(heads[0]) - batch * head_each,
        host_per_request_s=float(np.max(replica.scheduled(engine.per_request_s))) + head_each,
        decode_fixed_s=fixed,
        decode_per_request_s=per_request,
        decode_per_kv_token_s=per_kv,
        prefill_fixed_s=pre[0],
        prefill_per_request_s=pre[1],
        prefill_per_token_s=encoding + head_each * scores_prompts,
        prefill_per_pair_s=pre[2],
        graph_buckets=np.asarray(engine.graph_buckets, dtype=np.float64) if engine.cuda_graphs else None,
    )


def _held_up_s(replica: Replica, scale: float, context: float, line: FloatArray) -> FloatArray:
    """What decodes of few requests take beyond the ``line`` through those of `_batch`, at `TOKEN_POINTS` [s].

    Where ``scale`` brings many requests no further than the memory's bandwidth (`in_engine`), their line has nothing
    left of what a kernel takes whatever it reads; few requests read too little to hide that. 0 everywhere else.
    """
    many = decode_operators(replica, 2.0 * _batch(replica), 2.0 * _batch(replica) * context)
    if total_in_engine(many, scale) <= scale * total(many) * (1.0 + 1e-9):
        return np.zeros_like(TOKEN_POINTS)
    few = np.minimum(TOKEN_POINTS, _batch(replica))
    alone = total_in_engine(decode_operators(replica, few, few * context), scale)
    return np.where(few < _batch(replica), alone - line, 0.0)


_HEAD = ("head", "sampling")


def _prefill_terms(replica: Replica, scale: float, context: float) -> tuple[float, float, float]:
    """Fixed, per-request and per-pair seconds of prefill attention, around prompts of ``context`` tokens."""

    def attention(requests: float, tokens: float) -> float:
        return float(total_in_engine(prefill_operators(replica, requests, tokens, tokens), scale))

    few = float(np.max(replica.pipeline * replica.attention_data))
    one, two = attention(few, context), attention(2.0 * few, context)
    long = attention(few, 2.0 * context)
    pairs = context * (context + 1.0) / 2.0
    more = context * (2.0 * context + 1.0) - pairs
    per_pair = max((long - one) / (few * more), 0.0)
    per_request = max((two - one) / few - per_pair * pairs, 0.0)
    return max(one - few * (per_request + per_pair * pairs), 0.0), per_request, per_pair


def with_overhead(
    engine: EngineCalibration,
    per_request: float = 0.0,
    kernel_scale: float = 1.0,
    *,
    step: float = 0.0,
    per_layer: float = 0.0,
    per_expert_layer: float = 0.0,
    uncaptured: float = 0.0,
) -> EngineCalibration:
    """The engine with other overheads, for fits [s, 1, s, s, s, s]; what it states of spread experts stays."""
    changes = {
        "step": step,
        "per_layer": per_layer,
        "per_expert_layer": per_expert_layer,
        "per_request": per_request,
        "uncaptured": uncaptured,
        "kernel_scale": kernel_scale,
    }
    return engine.model_copy(update={"overhead": engine.overhead.model_copy(update=changes), "factors": ()})
