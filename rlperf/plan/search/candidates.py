"""Every layout worth asking about, for each role: a flat struct of arrays with the reasons that rule some of them out.

Rules here are arithmetic (divisibility, domains); memory and time come from the cost models, framework rules from data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlperf.cost.layers import stack_of
from rlperf.cost.parameters import parameters
from rlperf.cost.reject import Reject
from rlperf.cost.stage_ends import stated_ends_fit, uneven_ends
from rlperf.layout import OFFLOAD, RECOMPUTE, BoolArray, IntArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.pool import ATTRIBUTES, LayoutChoice, PoolSpec
from rlperf.specs.rule_expressions import evaluate
from rlperf.specs.trainer_capability import DEGREES, Capability, Degree

WEIGHT_SHARE = 0.6
"""Share of device memory beyond which bf16 weights leave too little for a cache: engines then span nodes."""


@dataclass(frozen=True)
class Shape:
    """What bounds the layouts of one role: the architecture, the devices it may take and their scale-up domain.

    ``memory`` is that of one device [bytes].
    """

    architecture: Architecture
    devices: int
    domain: int
    longest_tokens: int
    memory: float = 80e9

    @property
    def engine_reach(self) -> int:
        """Devices of the widest engine stage: a domain, or where that cannot hold the weights as many as can, or four.

        >>> from rlperf.specs.profiles import load_architecture
        >>> [Shape(load_architecture(m), 256, 8, 1).engine_reach for m in ("Qwen3-32B", "Qwen3-235B-A22B", "Kimi-K2")]
        [8, 32, 64]
        """
        domains = math.ceil(2.0 * parameters(self.architecture) / (WEIGHT_SHARE * self.memory * self.domain))
        return self.domain * (1 if domains == 1 else max(4, 1 << (domains - 1).bit_length()))


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4 ... up to ``limit``.

    >>> powers_of_two(12)
    [1, 2, 4, 8]
    """
    return [1 << k for k in range(max(limit, 1).bit_length())]


def divisors(number: int, limit: int | None = None) -> list[int]:
    """Divisors of ``number`` in ascending order, at most ``limit``.

    >>> divisors(12, 6)
    [1, 2, 3, 4, 6]
    """
    return [d for d in range(1, min(number, limit or number) + 1) if number % d == 0]


def _grid(**axes: list[int]) -> dict[str, IntArray]:
    """Dense flat columns of the product of the axes."""
    columns = np.meshgrid(*(np.asarray(v, dtype=np.int64) for v in axes.values()), indexing="ij")
    return dict(zip(axes, (c.ravel() for c in columns), strict=True))


def _given(choice: tuple[int, ...] | None) -> bool:
    """Whether the job states one value: of several the planner chooses, and none that leaves the scale-up domain."""
    return choice is not None and len(choice) == 1


def _axis(choice: tuple[int, ...] | None, default: list[int]) -> list[int]:
    return list(choice) if choice else default


def _codes(words: tuple[str, ...] | None, names: tuple[str, ...], default: list[int]) -> list[int]:
    return [names.index(word) for word in words] if words else default


# -- rollout ----------------------------------------------------------------------------------------------------


WIDTHS = (1, 2, 4)
"""Devices inside a scale-up domain that share the attention of a request, where its cache is copied to each."""


def rollout_layouts(shape: Shape, pool: PoolSpec) -> tuple[Layout, IntArray]:
    """Layouts of rollout replicas on exactly ``shape.devices`` devices, and their `Reject` flags ``[candidates]``.

    Tensor parallel inside a scale-up domain, unless a domain cannot hold the weights: then a replica spans several, its
    attention split over requests between them, or it is cut into a pipeline. A degree that the job states is given:
    Llama-3.1-405B has been served on two nodes of H100 with TP16 (Tulu 3, arXiv 2411.15124), and NeMo-RL's recipe of
    DeepSeek-V3 has TP32. Experts go over a whole stage or nowhere.
    """
    arch, choice = shape.architecture, pool.layout
    moe = arch.experts is not None
    # SGLang spreads experts over a replica wherever it dispatches to them, and vLLM dispatches to spread ones alone
    whole = [1] if pool.settings.expert_dispatch == "deepep" else [0, 1]
    columns = _grid(
        tensor_parallel=_axis(choice.tensor_parallel, divisors(shape.devices, shape.engine_reach)),
        pipeline_parallel=_axis(choice.pipeline_parallel, [p for p in (1, 2, 4) if shape.devices % p == 0]),
        expert_whole=whole if moe and not choice.expert_parallel else [0],
        expert_parallel=_axis(choice.expert_parallel, [1]),
        # the latent cache of MLA is copied to every tensor-parallel device, so engines split requests instead, to the
        # last device or to a few, on which the heads of a request are computed faster
        width=[0] if choice.attention_data_parallel else [0, *WIDTHS, shape.domain],
        attention_data_parallel=_axis(choice.attention_data_parallel, [1]),
    )
    tp, pp = columns["tensor_parallel"], columns["pipeline_parallel"]
    width, stated = columns.pop("width"), columns["attention_data_parallel"]
    split = np.where(width < shape.domain, stack_of(arch).copied_cache, tp > shape.domain)
    split &= (width > 0) & (tp % np.maximum(width, 1) == 0)
    adp = np.where(split, tp // np.maximum(width, 1), stated)
    ep = np.where(columns.pop("expert_whole") == 1, tp, columns["expert_parallel"])
    replica = tp * pp
    dp = np.asarray(choice.data_parallel) if choice.data_parallel else None
    data = np.maximum(shape.devices // replica, 1)
    columns |= {"expert_parallel": ep, "attention_data_parallel": adp}
    layout = Layout.of(**columns, data_parallel=data)
    layout, keep = _unique(layout)
    tp, pp, data, ep, adp = (
        np.broadcast_to(degree, keep.shape)
        for degree in (
            layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel, layout.expert_parallel,
            layout.attention_data_parallel,
        )
    )  # fmt: skip
    flags = np.zeros(keep.shape, dtype=np.int64)
    flags |= np.where(tp * pp * data != shape.devices, int(Reject.DEVICES), 0)
    if dp is not None:
        flags |= np.where(np.isin(data, dp), 0, int(Reject.DEVICES))
    flags |= np.where(heads_divide(arch, tp // adp, tp), 0, int(Reject.HEADS))
    flags |= np.where(pp > arch.layers, int(Reject.LAYERS), 0)
    if not _given(choice.tensor_parallel):
        flags |= np.where(tp > shape.domain * adp, int(Reject.NODE), 0)
    cut = np.maximum(tp // ep, 1) if moe else np.ones_like(ep)  # of experts that are not spread
    flags |= _expert_flags(arch, ep, cut, tp)
    # A pipeline inside one domain only adds bubbles to what tensor parallelism already offers.
    if not choice.pipeline_parallel:
        flags |= np.where((pp > 1) & (tp < shape.domain), int(Reject.LAYERS), 0)
    return layout, flags


# -- trainer ----------------------------------------------------------------------------------------------------


def trainer_layouts(shape: Shape, pool: PoolSpec, capability: Capability) -> tuple[Layout, IntArray]:
    """Layouts of the trainer on exactly ``shape.devices`` devices for one backend, and their `Reject` flags."""
    columns = _trainer_axes(shape, pool, capability)
    replica = (
        columns["tensor_parallel"] * columns["pipeline_parallel"] * columns["context_parallel"] * columns["ulysses"]
    )
    layout = Layout.of(**columns, data_parallel=np.maximum(shape.devices // replica, 1))
    flags = trainer_flags(shape, pool.layout, capability, layout)
    ends = pool.settings.first_stage_layers, pool.settings.last_stage_layers
    if ends != (None, None):
        fits = stated_ends_fit(shape.architecture.layers, layout.pipeline_parallel, layout.virtual_pipeline, *ends)
        flags = (flags & ~int(Reject.LAYERS)) | np.where(fits, 0, int(Reject.LAYERS))
    return layout, flags


PADDED = (1, 2, 4, 8)
"""Sequences of a padded microbatch that are worth asking about; packed ones are cut by tokens."""


def _trainer_axes(shape: Shape, pool: PoolSpec, capability: Capability) -> dict[str, IntArray]:
    """The product of a backend's axes: what the job states, else what its capability table lets the planner open."""
    choice = pool.layout
    opened = {name: _opened(name, shape) if capability.searches(name) else [_SHUT[name]] for name in DEGREES}
    if max(opened["pipeline_parallel"]) == 1:
        opened["virtual_pipeline"] = [1]
    stated = {name: _axis(getattr(choice, name), opened[name]) for name in DEGREES}
    if not shape.architecture.experts:  # Megatron takes the tensor degree for one that nobody stated, experts or not
        stated["expert_tensor_parallel"] = [1]
    recompute = [RECOMPUTE.index(word) for word in capability.activation_recompute.searched]
    columns = _grid(
        **stated,
        zero_stage=_axis(choice.zero_stage, list(capability.zero_stages.searched)),
        activation_recompute=_codes(choice.activation_recompute, RECOMPUTE, recompute),
        microbatch=_axis(choice.microbatch, list(PADDED) if pool.settings.packing is False else [1]),
        sequence_parallel=[int(flag) for flag in choice.sequence_parallel or (False,)],
        # last: trainer columns compare a layout with its twin
        offload=_codes(choice.offload, OFFLOAD, [OFFLOAD.index(word) for word in capability.offload.searched]),
    )
    if choice.sequence_parallel is None and capability.sequence_parallel == "with_tensor":
        columns["sequence_parallel"] = (columns["tensor_parallel"] > 1).astype(np.int64)
    if not choice.virtual_pipeline:
        keep = (columns["virtual_pipeline"] == 1) | (columns["pipeline_parallel"] > 1)
        columns = {name: values[keep] for name, values in columns.items()}
    return columns


_SHUT = {each.name: int(each.default or 0) for each in ATTRIBUTES if each.degree}
"""What stands where a degree is not opened."""


def _opened(degree: Degree, shape: Shape) -> list[int]:
    """Values of a degree that are worth asking about."""
    arch, devices, domain = shape.architecture, shape.devices, shape.domain
    match degree:
        case "tensor_parallel":
            return powers_of_two(min(domain, devices))
        case "pipeline_parallel":
            return divisors(devices, min(arch.layers, 32))
        case "virtual_pipeline":
            return [1, 2, 3, 4]
        case "context_parallel":
            return _context_degrees(shape)
        case "ulysses":
            return [degree for degree in powers_of_two(min(domain, devices)) if arch.heads % degree == 0]
        case "expert_parallel":
            experts = arch.experts.count if arch.experts else 1
            return [degree for degree in divisors(experts, 64) if devices % degree == 0]
        case "expert_tensor_parallel":
            return powers_of_two(min(domain, devices)) if arch.experts else [1]
        case "shard_size":
            return [0, domain] if devices > domain else [0]


def _context_degrees(shape: Shape) -> list[int]:
    """Ring degrees that leave at least 1,024 tokens of the longest sequence on a device."""
    most = max(shape.longest_tokens // 1024, 1)
    return powers_of_two(min(most, shape.devices, 32))


def trainer_flags(shape: Shape, choice: LayoutChoice, capability: Capability, layout: Layout) -> IntArray:
    """What a trainer layout must satisfy, as `Reject` flags; broadcast shape of ``layout``."""
    arch = shape.architecture
    tp, pp, vp = layout.tensor_parallel, layout.pipeline_parallel, layout.virtual_pipeline
    ep, etp, uly, cp = layout.expert_parallel, layout.expert_tensor_parallel, layout.ulysses, layout.context_parallel
    stage = layout.devices // pp
    flags = np.zeros(layout.shape, dtype=np.int64)
    flags |= np.where(layout.devices != shape.devices, int(Reject.DEVICES), 0)
    if choice.data_parallel:
        flags |= np.where(np.isin(layout.data_parallel, choice.data_parallel), 0, int(Reject.DEVICES))
    flags |= np.where(heads_divide(arch, tp * uly, tp), 0, int(Reject.HEADS))
    flags |= np.where(stages_divide(arch.layers, pp, vp), 0, int(Reject.LAYERS))
    flags |= np.where((vp > 1) & (pp == 1), int(Reject.LAYERS), 0)
    given = (_given(choice.tensor_parallel) | (tp == 1)) & (_given(choice.ulysses) | (uly == 1))
    flags |= np.where((tp * uly > shape.domain) & ~given, int(Reject.NODE), 0)
    flags |= np.where((uly > 1) & stack_of(arch).carries_state, int(Reject.STATE), 0)
    flags |= _expert_flags(arch, ep, etp, stage)
    flags |= np.where((layout.sequence_parallel == 1) & (tp == 1), int(Reject.FRAMEWORK), 0)
    everyone = layout.data_parallel * cp * uly
    flags |= np.where(
        (layout.shard_size > 0) & (everyone % np.maximum(layout.shard_size, 1) != 0), int(Reject.DEVICES), 0
    )
    return flags | np.where(capable(capability, layout), 0, int(Reject.FRAMEWORK))


def capable(capability: Capability, layout: Layout) -> BoolArray:
    """True where a backend has every degree and value that a layout takes, and none of its exclusions is met.

    >>> from rlperf.specs.trainer_calibration import load_trainer
    >>> layout = Layout.of(pipeline_parallel=np.array([1, 2]), zero_stage=3)
    >>> capable(load_trainer("fsdp2").capability, layout).tolist()
    [True, False]
    """
    able = np.ones(layout.shape, dtype=np.bool_)
    for name in DEGREES:
        if not capability.has(name):
            able &= getattr(layout, name) == _SHUT[name]
    able &= np.isin(layout.zero_stage, capability.zero_stages.all)
    able &= np.isin(
        layout.activation_recompute, [RECOMPUTE.index(word) for word in capability.activation_recompute.all]
    )
    able &= np.isin(layout.offload, [OFFLOAD.index(word) for word in capability.offload.all])
    if capability.sequence_parallel is None:
        able &= layout.sequence_parallel == 0
    for each in capability.requires:
        able &= np.asarray(evaluate(each.require, {"trainer": layout}), dtype=np.bool_)
    return able


def stages_divide(layers: int, pipeline: IntArray, virtual: IntArray) -> BoolArray:
    """True where layers divide into stages and chunks, or where first and last stage can take what is left over.

    Uneven stages (first and last layer counts stated) leave every chunk of every stage at least one layer. Stages that
    divide as they are do not become uneven for the sake of chunks: the fullest would hold a chunk more than the mean.

    >>> stages_divide(61, np.array([1, 4, 8, 61, 61]), np.array([1, 1, 1, 1, 2])).tolist()
    [True, True, True, True, False]
    >>> stages_divide(94, np.array([8, 8, 16, 2]), np.array([2, 3, 2, 2])).tolist()
    [True, False, True, False]
    """
    even = (layers % (pipeline * virtual) == 0) & (pipeline * virtual <= layers)
    return np.asarray(even | ((layers % pipeline > 0) & (uneven_ends(layers, pipeline, virtual)[1] >= 1)))


def heads_divide(arch: Architecture, degree: IntArray, tensor_parallel: IntArray) -> BoolArray:
    """True where the heads of every layer divide by ``degree`` (or replicate evenly), and widths by TP."""
    fits = stack_of(arch).divides(np.maximum(degree, 1), np.maximum(tensor_parallel, 1))
    return np.asarray(fits & (degree >= 1))


def _expert_flags(arch: Architecture, ep: IntArray, etp: IntArray, stage: IntArray) -> IntArray:
    if arch.experts is None:
        return np.where((ep > 1) | (etp > 1), int(Reject.EXPERTS), 0).astype(np.int64)
    fits = (arch.experts.count % ep == 0) & (stage % (ep * etp) == 0) & (arch.experts.hidden % etp == 0)
    return np.where(fits, 0, int(Reject.EXPERTS)).astype(np.int64)


def _unique(layout: Layout) -> tuple[Layout, IntArray]:
    """The layout without repeated rows, as flat columns."""
    flat = layout.flat()
    code = flat.tensor_parallel
    for degree in (flat.pipeline_parallel, flat.expert_parallel, flat.attention_data_parallel):
        code = code * (degree.max(initial=0) + 1) + degree
    index = np.sort(np.unique(code, return_index=True)[1])
    return flat.take(index), np.zeros(index.shape, dtype=np.int64)


FULL_BUDGET = 65536
"""Tokens of a microbatch beyond which a larger one is not tried by itself [tokens]. Of sequences of 3,072 tokens 16
gain 5 % of an rl_step of 30B-A3B over four, 32 another 0.1 %."""


def token_budgets(
    choice: tuple[int, ...] | None, longest_tokens: int, microbatch: tuple[int, ...] | None = None
) -> list[int]:
    """Tokens per packed microbatch and replica: what the user opens, else longest sequences.

    As many as a stated microbatch has, or 1, 2 and 4, and of what is longer than one powers of two and halfway between,
    up to `FULL_BUDGET` tokens: four short sequences do not fill a device, memory may end between one and two, and a
    shorter maximum keeps budgets near those of a longer one.

    >>> token_budgets(None, 18432), token_budgets(None, 5120)[:6]
    ([18432, 24576, 32768, 36864, 49152, 65536, 73728], [5120, 6144, 8192, 10240, 12288, 16384])
    """
    if choice:
        return list(choice)
    if microbatch:
        return [each * longest_tokens for each in microbatch]
    steps = sorted([*powers_of_two(FULL_BUDGET), *(3 * each // 2 for each in powers_of_two(FULL_BUDGET // 2))])
    own = (longest_tokens, 2 * longest_tokens, 4 * longest_tokens)
    return sorted({*own, *(each for each in steps if each > longest_tokens)})
