"""What a trainer backend is: what it can do, and in numbers how it stores state, what it overlaps, how fast it runs.

One file per backend in ``calibrations/trainers`` of any folder on the search path; a job names it by the file's stem.
Capability, storage widths and schedules are facts from the backend's source or documentation; efficiencies and fixed
costs are fitted, with the rows they saw. A backend that nobody measured names a ``relative``, whose constants stand
where its own file states none, with an interval twice as wide.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, model_validator

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.calibration_files import calibration_names, find_calibration
from rlperf.specs.cluster import Device
from rlperf.specs.framework import facts_data
from rlperf.specs.framework_names import FRAMEWORKS
from rlperf.specs.frozen import Frozen
from rlperf.specs.profiles import stamp
from rlperf.specs.reader import read_document, read_spec, validate
from rlperf.specs.trainer_capability import Capability
from rlperf.specs.trainer_switches import Switches
from rlperf.units import Bytes, NonNegativeFloat, PositiveFloat, PositiveInt, Seconds


class TrainerProvenance(Frozen):
    """Where a group of constants is from."""

    constants: tuple[str, ...]
    source: str
    date: str = ""
    n: int = Field(0, description="measured configurations that a fit saw, 0 for a fact that was read")
    spread: str = Field("", description="of measured over predicted on those configurations")
    rows: str = Field("", description="rows used: file and filter, or the split rule with its seed")


class Doubt(Frozen):
    """How far measured seconds lie from those of a configuration that nobody timed: standard deviation of ln [1].

    What the fit of all backends leaves open of the constants, and what configurations differ by beside them.
    """

    dense: PositiveFloat = Field(description="models without experts, by a framework that the fit saw")
    experts: PositiveFloat = Field(description="mixtures of experts, likewise")
    dense_elsewhere: PositiveFloat = Field(description="models without experts, by a framework of which it saw no row")
    experts_elsewhere: PositiveFloat = Field(description="mixtures of experts, likewise")

    def of(self, *, experts: bool, known: bool) -> float:
        """Of a model with or without experts, by a framework that the fit saw or one that it did not."""
        if experts:
            return self.experts if known else self.experts_elsewhere
        return self.dense if known else self.dense_elsewhere


class Generation(Frozen):
    """Constants that belong to a device generation under this backend."""

    generation: str = Field(description="a device's name, or the beginning of its generation; * for any other")
    sustained: PositiveFloat = Field(0.9, description="sustained over short-burst rate of matrix products")
    sustained_fp8: PositiveFloat = Field(0.8, description="the same for 8-bit and narrower products")
    sustained_fp4: PositiveFloat = Field(0.6, description="the same for 4-bit products")
    moe_layer: Seconds = Field(
        0.0, description="added per MoE layer and microbatch by a stack that has no kernels for the device (flash2 too)"
    )
    attention: PositiveFloat = Field(1.0, description="time of this backend's attention kernel over the calibrated one")
    flash2: PositiveFloat = Field(1.3, description="the same where FlashAttention-2 runs instead")
    measured: bool = Field(True, description="false: nothing measured, borrowed or judged")
    doubt: Doubt | None = Field(None, description="of updates here; none where nothing was fitted")


class Storage(Frozen):
    """Bytes a parameter occupies, before sharding."""

    weight: PositiveFloat = Field(2.0, description="the copy that stays resident (or sharded, at ZeRO 3)")
    compute_weight: PositiveFloat = Field(2.0, description="the copy that enters the products, gathered at ZeRO 3")
    gradient: PositiveFloat = Field(4.0, description="accumulated gradient")
    optimizer: NonNegativeFloat = Field(12.0, description="master weight and moments")
    frozen_weight: PositiveFloat = Field(2.0, description="a weight that LoRA does not train")
    narrow_copy: NonNegativeFloat = Field(0.0, description="8-bit copies of the weights kept beside bf16 ones")
    gather: PositiveFloat = Field(2.0, description="bytes of a weight on the wire")
    reduce: PositiveFloat = Field(4.0, description="bytes of a gradient on the wire")


class Workspace(Frozen):
    """Memory beside states and stored activations."""

    weight_scratch: NonNegativeFloat = Field(
        0.0, description="bytes per parameter of one layer, without routed experts"
    )
    loss_scratch: NonNegativeFloat = Field(
        0.0, description="further bytes per parameter of one layer while the head is at work"
    )
    gathered_layers: NonNegativeFloat = Field(2.0, description="layers gathered at once at ZeRO 3")
    backward_dense: NonNegativeFloat = Field(0.5, description="working set of a layer's backward over its activations")
    backward_moe: NonNegativeFloat = Field(0.5, description="the same for the routed experts")
    recompute_dense: NonNegativeFloat = Field(1.5, description="working set of a recomputed layer over its activations")
    recompute_moe: NonNegativeFloat = Field(2.0, description="the same for the routed experts")
    selective: Literal["core", "operators"] = Field(
        "core",
        description="what selective recompute makes again: the attention core alone, or all but the outputs of every "
        "second product and of attention",
    )
    root_stays: bool = Field(
        False,
        description="ZeRO 3: embedding and head are one unit that stays gathered, beside the buffer it was gathered in",
    )
    logit_bytes: PositiveFloat = Field(16.0, description="bytes per logit at the loss")
    compiled_logit_bytes: PositiveFloat = Field(
        6.0, description="bytes per logit at a compiled loss: 16-bit logits, their gradient, the hole of such logits"
    )
    split_logit_bytes: PositiveFloat | None = Field(
        None,
        description="bytes per logit at an eager loss over a vocabulary that tensor parallel cuts; default: as whole",
    )
    scoring_logit_bytes: PositiveFloat | None = Field(
        None, description="bytes per logit of a scoring pass; default: half of those at the loss"
    )
    whole_logit_bytes: NonNegativeFloat = Field(
        0.0, description="bytes per logit that stand whole where the loss is chunked: half without gradients"
    )
    compiled_loss_since: str = Field("", description="year and month from which compiling covers the loss")
    chunked_logits: NonNegativeFloat = Field(2048.0, description="tokens per chunk where the loss is chunked or fused")
    optimizer_scratch: NonNegativeFloat = Field(0.0, description="temporaries of the update, bytes per owned parameter")
    fixed: Bytes = Field(0.0, description="libraries' workspaces that the allocator counts")
    context: Bytes = Field(
        "600 MB", validate_default=True, description="device context and NCCL, outside the allocator"
    )
    context_per_multiprocessor: Bytes = Field(
        "0 B", validate_default=True, description="grows with the device: local memory of resident threads"
    )
    engine_asleep: Bytes = Field(
        "0 B", validate_default=True, description="what a colocated engine that sleeps leaves behind: graphs, context"
    )
    engine_outside: Bytes = Field(
        "0.6 GB", validate_default=True, description="graphs and context of a running engine, outside its share"
    )
    engine_activation: NonNegativeFloat = Field(
        1.0, description="set aside for the largest batch and not used, over MLP"
    )
    engine_batch_tokens: PositiveFloat = Field(65536.0, description="largest batch that an engine prepares for")
    gradient_buffers: bool = Field(True, description="gradients are allocated once; otherwise by the first backward")
    fragmentation: NonNegativeFloat = Field(0.03, description="reserved over allocated, less one")


class Timing(Frozen):
    """Efficiencies and fixed costs of one optimizer update."""

    kernel_attention: Literal["flash", "unfused"] = "flash"
    batched_share: PositiveFloat = Field(0.5, description="share of the peak that unfused attention's products reach")
    flash1: NonNegativeFloat = Field(
        0.0, description="time of the first FlashAttention over the second's; 0: the backend's ``attention`` has it"
    )
    elementwise: PositiveFloat = Field(
        1.0, description="bytes moved by norms, rotary, activation, residual, over the minimum"
    )
    host_layer: Seconds = Field(0.0, description="host time to launch one layer's forward (dense), once per microbatch")
    host_moe_layer: Seconds = Field(0.0, description="host time and synchronisations of one MoE layer's forward")
    host_norm: PositiveFloat = Field(64.0, description="norm that joins host and device time; large: the longer one")
    graph_host: float = Field(
        0.4, gt=0, le=1, description="share of the launches that graphs of parts of a layer leave"
    )
    drop_host: float = Field(
        0.5, gt=0, le=1, description="share of a MoE layer's launches that is left where nothing waits for the router"
    )
    eager: PositiveFloat = Field(
        1.2, description="bytes that small passes move where they are not fused, over fused ones"
    )
    host_expert: Seconds = Field(
        0.0, description="host time per expert of a device and forward, where each expert's products are launched alone"
    )
    hybrid_host: float = Field(
        1.0, gt=0, le=1, description="share of a MoE layer's launches left where HybridEP hands tokens over in order"
    )
    wide_expert: float = Field(
        1.0, gt=0, le=1, description="share of an expert's launches and gaps left in 16 bits: nothing is cast"
    )
    moe_layer: Seconds = Field(0.0, description="added device time per MoE layer, forward and backward together")
    expert_gap: Seconds = Field(
        0.0, description="the same per expert of a device: gaps between its kernels, whatever their work"
    )
    arranged: bool = Field(
        False,
        description="expert products without what inference kernels spend on arranging tokens: permute has it all",
    )
    moe_pass: PositiveFloat = Field(1.0, description="time of the expert products over the kernel's")
    permute: PositiveFloat = Field(1.0, description="bytes moved by permutation and dispatch, over the minimum")
    fused_permute: PositiveFloat = Field(1.0, description="the same where the dispatcher permutes, over the others")
    microbatch: Seconds = Field(0.0, description="fixed per microbatch: loss, data, synchronisation")
    update: Seconds = Field(0.0, description="fixed per optimizer update: zero_grad, norm, logging")
    optimizer_bytes: PositiveFloat = Field(28.0, description="bytes moved per updated parameter")
    gradient_bytes: NonNegativeFloat = Field(
        12.0, description="bytes moved per held parameter to clear and scale gradients"
    )
    tensor_overlap: float = Field(0.0, ge=0, le=1, description="share of tensor-parallel traffic hidden if switched on")
    expert_overlap: float = Field(0.0, ge=0, le=1, description="share of expert all-to-all hidden if switched on")
    pipeline_overlap: float = Field(
        0.0, ge=0, le=1, description="share of stage-to-stage traffic hidden if switched on"
    )
    accumulate_bytes: NonNegativeFloat = Field(
        0.0, description="bytes moved per trained parameter and microbatch to add a gradient where no product does it"
    )
    data_overlap: float = Field(
        0.0, ge=0, le=1, description="share of compute under which gradient traffic can hide if switched on"
    )
    shard_overlap: float = Field(1.0, ge=0, le=1, description="share of compute under which ZeRO-3 traffic can hide")
    shard_messages: PositiveInt = Field(
        1,
        description="ZeRO-3 collectives of one layer: 1 where it is one unit, else one per matrix",
    )
    contention: NonNegativeFloat = Field(0.0, description="slow-down of compute while ZeRO-3 traffic runs under it")
    unpack_bytes: NonNegativeFloat = Field(
        0.0, description="bytes moved per gathered ZeRO-3 parameter to copy it out of the gathered buffer"
    )
    pack_bytes: NonNegativeFloat = Field(
        0.0, description="bytes moved per ZeRO-3 gradient to copy it into the buffer that is scattered"
    )
    collective: PositiveFloat = Field(1.0, description="time of a collective over the calibrated one")
    cross_entropy_bytes: PositiveFloat = Field(
        24.0, description="bytes moved per logit by the loss, forward and backward"
    )
    scoring_bytes: PositiveFloat | None = Field(
        None, description="bytes moved per logit by a log-probability pass; None: half of what the loss moves"
    )
    chunked_bytes: PositiveFloat = Field(
        24.0, description="the same of a chunked or fused loss, whose projection is made again in the backward"
    )
    lora_bytes: PositiveFloat = Field(6.0, description="bytes moved per value that enters or leaves an adapted matrix")
    lora_linear: Seconds = Field(0.0, description="fixed per adapted matrix and microbatch")
    lora_update: Seconds = Field(0.0, description="fixed per update of adapters, beside ``update``")
    host_adam: PositiveFloat = Field(6e9, description="bytes/s per device at which a host-side optimizer runs")
    recompute_stops_early: bool = Field(
        False, description="full recompute ends with the last value that the backward needs: not the down projection"
    )
    reduce_every_microbatch: bool = Field(False, description="ZeRO 2/3: gradients are reduced after every microbatch")


EXPERT_TIMING = (
    "host_moe_layer", "hybrid_host", "host_expert", "host_norm", "wide_expert", "moe_layer", "expert_gap", "arranged",
    "moe_pass", "permute", "fused_permute",
)  # fmt: skip
"""Fields of `Timing` that speak of MoE layers: launches of the host, gaps and products of experts, permutation."""


class TimedExperts(Frozen):
    """Layouts of the mixtures of experts whose updates were timed."""

    expert_parallel: tuple[PositiveInt, PositiveInt] = Field(description="least and most")
    devices: PositiveInt = Field(description="most")
    source: str


class TrainerCalibration(Frozen):
    """One trainer backend."""

    id: str
    title: str
    relative: str | None = Field(None, description="backend whose constants stand where none are stated here")
    capability: Capability
    storage: Storage = Storage()
    workspace: Workspace = Workspace()
    timing: Timing = Timing()
    switches: Switches = Field(Switches(), description="how it runs unless told otherwise")
    generations: tuple[Generation, ...] = ()
    low: PositiveFloat = Field(0.8, description="5th percentile of measured over predicted time")
    high: PositiveFloat = Field(1.25, description="95th percentile of measured over predicted time")
    memory_low: PositiveFloat = 0.92
    memory_high: PositiveFloat = 1.08
    timed_experts: TimedExperts | None = Field(
        None, description="where mixtures of experts were timed; elsewhere their interval is twice as wide (in ln)"
    )
    configurations: tuple[str, ...] = Field((), description="digests of the measured configurations that the fits saw")
    frameworks: tuple[str, ...] = Field((), description="frameworks whose rows the fit of its seconds saw")
    memory_configurations: tuple[str, ...] = Field((), description="the same for memory")
    provenance: tuple[TrainerProvenance, ...] = ()
    notes: str = ""

    @model_validator(mode="after")
    def _stands_alone_or_has_a_relative(self) -> TrainerCalibration:
        if self.relative is None and not (self.provenance and any(each.generation == "*" for each in self.generations)):
            raise ValueError("state a relative, or generations with an entry '*' (any other device) and a provenance")
        return self

    @property
    def extrapolated(self) -> bool:
        """Whether no measured time of this backend stands behind its seconds."""
        return not self.configurations

    def generation(self, device: Device) -> Generation:
        """Constants of a device: by its name, its chip's, the start of its generation, else those of ``*``."""
        by_name = {entry.generation.lower(): entry for entry in self.generations}
        for name in (device.name, device.chip):
            if name in by_name:
                return by_name[name]
        generation = device.generation.lower()
        return next((entry for name, entry in by_name.items() if generation.startswith(name)), by_name["*"])

    def entry(self, name: str) -> Generation:
        """The entry that stands under ``name``."""
        return next(entry for entry in self.generations if entry.generation == name)


def _read(path: Path) -> TrainerCalibration:
    return _checked(path, stamp(path))


@cache
def _checked(path: Path, _version: tuple[int, int]) -> TrainerCalibration:
    document = read_document(path)
    found = validate(document, TrainerCalibration)
    problems = []
    if found.id != path.stem:
        problems.append(document.problem(("id",), f"{found.id!r} is not the file's stem", f"write id: {path.stem}"))
    known = FRAMEWORKS
    for name in found.capability.frameworks:
        if name not in known:
            hint = did_you_mean(name, known) or f"known: {', '.join(known)}"
            where = ("capability", "frameworks", name)
            problems.append(document.problem(where, "there is no such framework", hint))
    if problems:
        raise SpecError(problems)
    return found


def load_trainer(name: str, *, file: Path | str | None = None, folder: Path | str | None = None) -> TrainerCalibration:
    """A backend by name (the stem of its file), or from ``file``; what it leaves out is its relative's.

    Raises
    ------
    SpecError : no such backend (with the nearest name), or relatives in a circle

    >>> load_trainer("megatron").storage.optimizer
    12.0
    """
    found = read_spec(file, TrainerCalibration) if file is not None else _read(_path(name, folder))
    seen = [found.id]
    lineage = [found]
    while (relative := lineage[-1].relative) is not None:
        if relative in seen:
            raise SpecError(Problem(f"trainer {name!r}: relatives in a circle: {' - '.join([*seen, relative])}"))
        seen.append(relative)
        lineage.append(_relative(lineage[-1], relative, folder, file if lineage[1:] == [] else None))
    whole = lineage.pop()
    for one in reversed(lineage):
        whole = _borrowing(one, whole)
    return whole


def _relative(
    own: TrainerCalibration, relative: str, folder: Path | str | None, file: Path | str | None
) -> TrainerCalibration:
    """The backend that another names as its relative; a name that nobody knows is a mistake in that file."""
    try:
        path = _path(relative, folder)
    except SpecError as error:
        stated = read_document(file or _path(own.id, folder))
        mine = [stated.problem(("relative",), each.message, each.suggestion) for each in error.problems]
        raise SpecError(mine) from None
    return _read(path)


def trainer_names(folder: Path | str | None = None) -> list[str]:
    """Backends that a job can name: every calibration along the search path.

    >>> {"deepspeed", "fsdp2", "megatron"} <= set(trainer_names())
    True
    """
    return calibration_names("trainers", folder)


def _path(name: str, folder: Path | str | None) -> Path:
    path = find_calibration(name, "trainers", folder)
    if path is None:
        names = trainer_names(folder)
        served = sorted({backend for name in FRAMEWORKS for backend in facts_data(name)["backends"]})
        raise SpecError(
            Problem(
                f"there is no trainer backend named {name!r}",
                suggestion=did_you_mean(name, names) or f"frameworks have {', '.join(served)}",
            )
        )
    return path


_INTERVALS = ("low", "high", "memory_low", "memory_high")


def _borrowing(own: TrainerCalibration, relative: TrainerCalibration) -> TrainerCalibration:
    """A backend with its relative's constants where it states none; intervals not stated are twice as wide (in ln)."""
    parts = {
        name: getattr(relative, name).model_copy(update=_stated(getattr(own, name)))
        for name in ("storage", "workspace", "timing", "switches")
    }
    wider = {name: getattr(relative, name) ** 2 for name in _INTERVALS if name not in own.model_fields_set}
    named = {each.generation for each in own.generations}
    borrowed = TrainerProvenance(
        constants=("*",),
        source=f"judged: taken from {relative.id} where not stated here, intervals twice as wide",
    )
    return own.model_copy(
        update={
            **parts,
            **wider,
            "generations": (*own.generations, *(each for each in relative.generations if each.generation not in named)),
            "provenance": (*own.provenance, borrowed),
        }
    )


def _stated(part: BaseModel) -> dict[str, object]:
    return {name: getattr(part, name) for name in part.model_fields_set}
