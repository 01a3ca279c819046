"""What is measured, judged or read of a framework's overheads, and where each is from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlperf.specs.framework import Attention, Balance, Pads, Reduces, Scored
from rlperf.specs.frozen import Frozen
from rlperf.specs.trainer_switches import Batching, Switches
from rlperf.units import BytesPerSecond, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seconds


class Provenance(Frozen):
    """Where a constant is from. ``low`` and ``high``: 5th and 95th percentile of measured over predicted [1]."""

    source: str
    date: str
    n: NonNegativeInt = Field(0, description="measurements behind it; 0 = none")
    rows: tuple[str, ...] = Field((), description="row ids of the measured data that were used")
    low: PositiveFloat = 0.5
    high: PositiveFloat = 2.0
    assumed: bool = Field(False, description="nobody measured it: taken over from a relative, or judged")
    taken_from: str = Field("", description="framework whose measurement it is, where it was taken over from another")


class Overhead(Frozen):
    """Seconds of one overhead: value per rl_step (or per unit that its field names) and where it is from."""

    value: Seconds
    provenance: Provenance


class Rate(Frozen):
    """A rate with where it is from."""

    value: BytesPerSecond
    provenance: Provenance


class ServedAdapters(Frozen):
    """LoRA adapters that engines serve beside the frozen weights, what that costs per adapted product and engine_step.

    Attributes
    ----------
    launches : further kernels of one product, issued one by one where there are no CUDA graphs [1]
    eager_row : per running request, where there are no CUDA graphs
    graph : per product, where CUDA graphs hold its kernels
    with_base : every weight sync sends the frozen weights, too
    """

    launches: PositiveInt
    eager_row: Overhead
    graph: Overhead
    with_base: bool = False


class LogitBytes(Frozen):
    """Bytes per logit that a framework's loss holds at once, counted from its source.

    Attributes
    ----------
    update, scoring : in an optimizer update, and in a log-probability pass
    whole : in an update, what stands whole although the loss is chunked
    entropy : in an update whose loss has an entropy term; None: as without
    trainers : backends that it was counted of; empty: all of its calibration's
    """

    update: PositiveFloat
    scoring: PositiveFloat
    whole: NonNegativeFloat = 0.0
    entropy: PositiveFloat | None = None
    trainers: tuple[str, ...] = ()
    source: str


class LossBytes(Frozen):
    """Bytes per logit that a framework's loss reads and writes, counted from its source.

    Attributes
    ----------
    update, scoring : in forward and backward of an optimizer update, and in a log-probability pass (mean of the passes)
    """

    update: PositiveFloat
    scoring: PositiveFloat
    source: str


class TrainerOverheads(Frozen):
    """What the framework adds to its trainer backend's own seconds (those are in ``calibrations/trainers``).

    Attributes
    ----------
    update : per optimizer update: data to the ranks, statistics, learning-rate schedule, metrics back
    scoring_pass : per log-probability pass: mode switch, results back
    host_layer : host time that this framework's model code takes to launch one dense layer's forward, once per
        microbatch, where it is longer than the device's (a backward is two more); None: as the backend
    reference_bytes : bytes per parameter of the weights of a device that change places with the reference policy's,
        which wait in host memory; 0 where the reference is a model of its own
    reference_rate : bytes per second and device of these copies; None = free
    moe_layer : per MoE layer, microbatch and forward (a backward: two more), beside the backend's launches and gaps
    experts_as : backend of the same library whose timed seconds of MoE layers count (`EXPERT_TIMING`), where the
        trainer's own rows tell them apart worse; None: the trainer's own
    prefix_update, prefix_pass : per layer and microbatch of an update, of a scoring pass, in which prompts are shared:
        taking prompts and responses apart and putting them together again; None: nobody measured it, and it is free
    balance : over what token loads of ranks are evened out: every optimizer ``update``, the whole ``batch`` once, an
        update where microbatches are cut by tokens (``budget``), or nothing (``none``): sequences go as they come
    batching : which sequences are cut into microbatches together. ``rank``: each rank's own, packed by tokens, else by
        count; ``count``, which a job may ask of it: by count if packed, too; ``all``: those of all ranks, by tokens
    pads : to what unpacked sequences are padded: the longest of their ``microbatch``, the longest prompt and response
        of their rank's ``batch``, or the job's ``limit``
    switches : what it sets otherwise than the backend does (overlap, dispatcher of experts)
    parks_optimizer : offloaded optimizer states come to the device once for all updates of an rl_step and go back
        after them, and the weights with them, which also come and go for every scoring pass of the policy; without,
        optimizer states stay in host memory and its cores run every update
    parking_rate : bytes per second and device of states that come and go for a phase; None: that of pinned host memory
    gradients : in what gradients are accumulated and reduced, if not as the backend's calibration has it
    reduces : in what they are reduced, if not in what they are accumulated (set by `FrameworkCalibration.running`)
    fused_gradients : whether products add to the accumulated gradient themselves; without, each is added in a pass
    pipeline_padding : with pipeline stages, packed microbatches are padded to the token budget (equal shapes)
    logits : bytes per logit that its loss holds, if not as the backend's calibration has them
    loss : bytes per logit that its loss moves, if not as the backend's calibration has them
    attention_kernel : of its trainer from Hopper on (set by `FrameworkCalibration.running`)
    copied_gradients : ZeRO stage from which parked states take their gradients to the host; None: they are freed, and
        made anew (set there, too)
    resident_reference : the reference's weights stay on the devices; without, they wait in host memory (set there, too)
    kept_weights : parking takes gradients and optimizer alone: weights, and such a reference's, stay (set there, too)
    whole_gradients : gradients wait unsharded for an update's last microbatch whatever a job says (set there, too)
    head_tokens : which tokens of a microbatch go through the head, padding and prompts too or not (set there, too)
    skew_exponent : busiest expert-parallel device over the mean = expert_parallel ** this, real routers [1]
    """

    update: Overhead
    scoring_pass: Overhead
    host_layer: Overhead | None = None
    reference_bytes: NonNegativeFloat = 0.0
    reference_rate: Rate | None = None
    moe_layer: Overhead
    experts_as: str | None = None
    prefix_update: Overhead | None = None
    prefix_pass: Overhead | None = None
    balance: Balance = "update"
    batching: Batching = "rank"
    pads: Pads = "microbatch"
    switches: Switches = Switches()
    gradients: Literal["bf16", "fp32"] | None = None
    reduces: Reduces | None = None
    parks_optimizer: bool = False
    parking_rate: Rate | None = None
    fused_gradients: bool = True
    pipeline_padding: bool = False
    logits: LogitBytes | None = None
    loss: LossBytes | None = None
    attention_kernel: Attention = "flash"
    copied_gradients: NonNegativeInt | None = None
    resident_reference: bool = False
    kept_weights: bool = False
    whole_gradients: bool = False
    head_tokens: Scored = "all"
    skew_exponent: float = Field(0.1, ge=0.0)
    skew_source: str = (
        "NeMo-RL's calibration rows prefer 0 to 0.1 (x1.0 to x1.2 at EP8) to the 0.25 of kernel tables with power-law "
        "routing; routers under training are balanced by a loss"
    )
