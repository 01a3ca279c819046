"""A device's calibration: constants fitted to measurements, each with where it is from.

Rates are stored as fractions of the data sheet, so that a device without measurements can borrow from its nearest
relative.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field

from rlperf.errors import Problem, SpecError
from rlperf.specs.calibration_files import calibration_names, find_calibration, read_calibration
from rlperf.specs.frozen import Frozen
from rlperf.specs.reader import read_spec
from rlperf.units import NonNegativeInt, PositiveFloat, PositiveInt, Seconds

Z95 = 1.6448536269514722
"""Standard normal quantile of 95 %: `low` and `high` of any prediction lie as many standard deviations off."""


class Spread(Frozen):
    """Measured over predicted on left-out shapes: 5th and 95th percentile [1]."""

    low: PositiveFloat = 0.7
    high: PositiveFloat = 1.4

    def widened(self, factor: float) -> Spread:
        """The same interval, ``factor`` times as wide in the logarithm."""
        return Spread(low=self.low**factor, high=self.high**factor)

    def beside(self, sigma: float) -> Spread:
        """The same interval with a further, independent error of standard deviation ``sigma`` in the logarithm.

        >>> Spread(low=1.0, high=1.0).beside(0.1)
        Spread(low=0.848, high=1.179)
        """
        more = Z95 * sigma
        low, high = math.hypot(min(math.log(self.low), 0.0), more), math.hypot(max(math.log(self.high), 0.0), more)
        return Spread(low=round(math.exp(-low), 3), high=round(math.exp(high), 3))


class Quality(Frozen):
    """How well a fit does: number of rows, mean absolute % errors inside and left out, and the rows it saw."""

    n: NonNegativeInt = 0
    in_sample_mape: float | None = Field(None, description="[%]")
    left_out_mape: float | None = Field(None, description="[%], leave one value of the shape out in turn")
    left_out_rule: str = ""
    rows: str = Field("", description="which rows were used: file and filter, or split rule with its seed")
    spread: Spread = Spread()


class GemmFit(Frozen):
    """Constants of a matrix product by dtype; the form is `rlperf.cost.roofline.gemm_with`."""

    dtype: str
    kernel: str = ""
    fixed: Seconds = Field(description="kernel start and end")
    compute: PositiveFloat = Field(description="attainable share of the dense peak")
    memory: PositiveFloat = Field(description="attainable share of the memory bandwidth")
    exponent: PositiveFloat = Field(2.5, description="norm that joins compute and memory time")
    wave: float = Field(0.0, ge=0.0, description="weight of idle multiprocessors in the last wave of tiles")
    reuse: float = Field(
        0.0, ge=0.0, description="loss of small tiles: values of reuse at which a tile is half as fast"
    )
    split: Seconds = Field(0.0, description="reduction pass of a product split along k")
    rows: PositiveFloat = Field(64.0, description="rows of the narrowest tile, which few tokens leave partly empty")
    cached: float = Field(0.0, ge=0.0, description="extra rate of operands that are still in L2, over memory's")
    quantise_fixed: Seconds = Field(0.0, description="launch of the pass that quantises the activations")
    quantise_memory: float = Field(0.0, ge=0.0, description="share of the bandwidth in that pass; 0 = no such pass")
    quality: Quality = Quality()


class TileFit(Frozen):
    """What a flash kernel's tiles take in heads of another width than 128 and at the edge of a window.

    The form is `rlperf.cost.attention.flash_with`. As given here: FlashAttention-3 in heads of 64 beside 128 (arXiv
    2407.08608, figures 5 and 6), and nothing known of windows.
    """

    exponentials: PositiveFloat = Field(57.0, description="width of heads whose products take as long as exponentials")
    overlap: float = Field(1.0, ge=1.0, description="norm that joins the two: 1 = one after the other")
    moved_width: float = Field(1.0, ge=0.0, description="queries and output move as the width of a head to this power")
    cache_width: float = Field(1.0, ge=0.0, description="cache writes grow with the width of a head to this power")
    window_edge: float = Field(0.0, ge=0.0, description="keys beyond its window that a query's tile reads")
    quality: Quality = Quality()


class PrefillFit(Frozen):
    """Constants of flash attention over whole prompts; the form is `rlperf.cost.attention.flash_with`."""

    kernel: str
    kv_dtype: str = "bf16"
    width: PositiveInt = Field(128, description="of the heads that were timed")
    fixed: Seconds
    compute: PositiveFloat = Field(description="attainable share of the dense peak, long sequences")
    memory: PositiveFloat = Field(description="share of the bandwidth for queries and output")
    ramp_tokens: float = Field(
        0.0, ge=0.0, description="key length at which the rate is half of that of long sequences"
    )
    straggler: float = Field(0.0, ge=0.0, description="weight of the longest tile when tiles are few")
    cache_memory: PositiveFloat = Field(0.3, description="share of the bandwidth when keys and values are written")
    cache_exponent: float = Field(1.0, description="cache writes grow with kv_heads to this power")
    tiles: TileFit = TileFit()
    backward_flop: PositiveFloat = Field(description="backward FLOP over forward FLOP")
    backward_compute: PositiveFloat = Field(description="backward efficiency over forward, long sequences")
    backward_ramp_tokens: float = Field(description="further ramp of the backward pass")
    timed_on: str | None = Field(
        None, description="relative whose kernel stands here, where this device has none of it"
    )
    quality: Quality = Quality()


class WindowFit(Frozen):
    """How a decode kernel reads windows whose keys it does not split over multiprocessors."""

    fixed: Seconds = Field(description="kernel start and end")
    start: Seconds = Field(description="of one query head of a request, before it reads")
    bytes_per_clock: PositiveFloat = Field(description="that one multiprocessor reads, at the boost clock")
    memory: PositiveFloat = Field(description="share of the bandwidth that all of them reach together")
    quality: Quality = Quality()


class RoundsFit(Frozen):
    """What a decode kernel takes for windows of which a multiprocessor reads one key head's after the other."""

    fixed: Seconds = Field(description="kernel start and end, in place of those of full contexts")
    each: Seconds = Field(description="of every round of the multiprocessors after the first")
    quality: Quality = Quality()


class DecodeFit(Frozen):
    """Constants of paged decode attention; the form is `rlperf.cost.attention.decode_with`."""

    kernel: str
    kv_dtype: str = "bf16"
    fixed: Seconds
    long_fixed: Seconds = Field(0.0, description="added where contexts are long enough to be split (4096 and more)")
    memory: PositiveFloat
    per_pair: Seconds = Field(0.0, description="per request and key/value head")
    per_head: Seconds = Field(0.0, description="per request and query head")
    per_request: Seconds = Field(0.0, description="per request")
    cached: float = Field(0.0, ge=0.0, description="extra rate of keys and values that are still in L2")
    window: WindowFit | None = Field(None, description="of a kernel that does not split the keys of a window")
    rounds: RoundsFit | None = Field(None, description="of a kernel that gives the window of a key head to one")
    in_windows: Quality | None = Field(
        None, description="how constants that full contexts told do in windows; None: nobody timed them there"
    )
    quality: Quality = Quality()

    @property
    def windows_timed(self) -> bool:
        """Whether timings of windows stand behind its constants."""
        return self.window is not None or self.rounds is not None or self.in_windows is not None


class LatentFit(Frozen):
    """Constants of absorbed decodes on the latent cache; the form is `rlperf.cost.latent.absorbed_with`."""

    kernel: str = Field(description="engine whose kernel was timed")
    kv_dtype: str = "bf16"
    fixed: Seconds
    long_fixed: Seconds = Field(0.0, description="added where contexts are long enough to be split (4096 and more)")
    compute: PositiveFloat = Field(description="attainable share of the dense peak of the cache's dtype")
    memory: PositiveFloat
    exponent: PositiveFloat = Field(2.0, description="norm that joins compute and memory time")
    per_head: Seconds = Field(0.0, description="per request and query head")
    cached: float = Field(0.0, ge=0.0, description="extra rate of latents that are still in L2")
    timed_on: str | None = Field(
        None, description="relative whose kernel stands here, where this device has none of it"
    )
    quality: Quality = Quality()


class AbsorptionFit(Frozen):
    """Constants of the products that take a decode's queries to the latents, and its values back.

    The form is `rlperf.cost.latent.absorption_with`.
    """

    kernel: str = Field(description="engine whose products were timed")
    fixed: Seconds
    compute: PositiveFloat = Field(description="attainable share of the dense 16-bit peak")
    memory: PositiveFloat
    cached: float = Field(0.0, ge=0.0, description="extra rate of operands that are still in L2")
    timed_on: str | None = Field(
        None, description="relative whose kernel stands here, where this device has none of it"
    )
    quality: Quality = Quality()


class MoeFit(Frozen):
    """Constants of grouped expert products; the form is `rlperf.cost.moe.grouped_with`."""

    kernel: str
    dtype: str
    fixed: Seconds
    compute: PositiveFloat
    memory: PositiveFloat
    activation_memory: PositiveFloat = 0.6
    per_pair: Seconds = Field(0.0, description="routing and permutation, per (token, expert) pair")
    per_expert: Seconds = Field(0.0, description="per touched local expert")
    per_held_expert: Seconds = Field(0.0, description="per local expert, touched or not")
    per_doubling: Seconds = Field(0.0, description="routing and sorting in the kernel, per doubling of its tokens")
    wide_choice: Seconds = Field(0.0, description="choosing among more than 512 experts, beyond what others take")
    token_bytes: float = Field(0.0, ge=0.0, description="traffic of every token on every device, per hidden value")
    exponent: PositiveFloat = 2.0
    cached: float = Field(0.0, ge=0.0, description="extra rate of weights that are still in L2, over memory's")
    skew_exponent: float = Field(
        0.0, description="power-law routing: busiest device over mean = expert_parallel to this"
    )
    skew_touched: float = Field(1.0, description="power-law routing: touched experts over those of uniform routing")
    timed_on: str | None = Field(
        None, description="relative whose kernel stands here, where this device has none of it"
    )
    quality: Quality = Quality()


class ScanFit(Frozen):
    """Constants of a recurrent mixer's kernel; the forms are in `rlperf.cost.scan`."""

    kernel: str = Field(description="engine whose kernel was timed")
    mixer: str = Field(
        "gated_delta", description="gated_delta, kda or mamba; with the word convolution: what stands in front"
    )
    phase: str = Field(description="context (chunked scan over prompts) or generation (one step of the recurrence)")
    fixed: Seconds
    compute: PositiveFloat = Field(1.0, description="attainable share of the dense 16-bit peak in a scan")
    per_step: Seconds = Field(0.0, description="per token of one sequence: chunks wait for each other")
    per_block: Seconds = Field(0.0, description="of a convolution, per sequence and channel: a block of threads each")
    memory: PositiveFloat = Field(
        1.0, description="attainable share of the bandwidth: states of a step, passes of a scan (fused ones: above 1)"
    )
    cached: float = Field(
        0.0, ge=0.0, description="extra rate of what is still in L2: states of repeated steps, passes"
    )
    timed_on: str | None = Field(
        None, description="relative whose kernel stands here, where this device has none of it"
    )
    quality: Quality = Quality()


class SparseFit(Frozen):
    """Constants of attention over chosen keys; the form is `rlperf.cost.sparse.chosen_with`."""

    kernel: str = Field(description="engine whose module was timed")
    mixer: str = Field(description="sparse, sparse_reusing, compressed or block_sparse")
    phase: str = Field(description="context (prompts) or generation")
    fixed: Seconds = Field(description="kernels of a module beyond its products, whatever its size")
    compute: PositiveFloat = Field(description="attainable share of the dense 16-bit peak over the chosen keys")
    memory: PositiveFloat = Field(description="attainable share of the bandwidth when chosen keys are read")
    index_compute: PositiveFloat = Field(1.0, description="attainable share of the fp8 peak when keys are scored")
    index_memory: PositiveFloat = Field(1.0, description="attainable share of the bandwidth of scores and index keys")
    index_fixed: Seconds = Field(0.0, description="kernels of a choice, whatever its size")
    per_choice: Seconds = Field(0.0, description="of a choice, per query that sees more keys than it may read")
    per_tile: Seconds = Field(0.0, description="of a query and 64 of its heads, in front of and behind its keys")
    passes: float = Field(0.0, ge=0.0, description="times that small passes move queries and outputs")
    cache: Literal["bf16"] | None = Field(None, description="cache that they are of, where its kernel is another one")
    narrow: PositiveFloat = Field(
        1.0, description="of compute with a cache of 8 bits, whose keys the kernel converts, over that of 16"
    )
    gather: PositiveFloat | None = Field(
        None,
        description="keys that queries of a prompt gather, as a share of the bandwidth (of L2: above 1); None: no time",
    )
    padded: float = Field(0.0, ge=0.0, le=1.0, description="share of the empty places of a choice that is computed too")
    timed_on: str | None = Field(
        None, description="relative whose kernels stand here, where this device has none of them"
    )
    quality: Quality = Quality()


class StreamsFit(Frozen):
    """Constants of hyper-connections; the form is `rlperf.cost.streams.mixing_with`."""

    kernel: str = Field(description="engine whose kernels were timed")
    before: Seconds = Field(description="of the kernels in front of a half of a layer")
    behind: Seconds = Field(description="of the kernel behind it")
    memory: PositiveFloat = Field(description="attainable share of the bandwidth")
    product: float = Field(0.0, ge=0.0, description="of the product in front, over the time of the bytes it moves")
    cached: float = Field(0.0, ge=0.0, description="extra rate of streams that are still in L2")
    timed_on: str | None = Field(
        None, description="relative whose kernels stand here, where this device has none of them"
    )
    quality: Quality = Quality()


class CollectivePoint(Frozen):
    """Constants of one group size: a low-latency protocol and a bandwidth protocol, the faster one runs.

    Bandwidths are shares of the scale-up (or, without one, host) bandwidth; ``root`` is [s / sqrt(byte)].
    """

    group: PositiveInt
    low_fixed: Seconds
    low_bandwidth: PositiveFloat
    fixed: Seconds
    bandwidth: PositiveFloat
    root: float = 0.0


class CollectiveFit(Frozen):
    """Constants of one collective inside a scale-up domain; the form is `rlperf.cost.collectives.domain_s`."""

    collective: str = Field(description="all_reduce, all_gather, reduce_scatter, all_to_all, point_to_point")
    implementation: str = "nccl"
    points: tuple[CollectivePoint, ...]
    across: Seconds = Field(0.0, description="per doubling of a group beyond those timed, from board to board")
    quality: Quality = Quality()


class DispatchFit(Frozen):
    """Expert dispatch and combine kernels (DeepEP-like) over ``group`` devices: t = fixed + E c + bytes / rate."""

    kernel: str = Field(description="deepep (a copy for every expert) or deepep_normal (one for a device or node)")
    operation: str = Field(description="dispatch or combine")
    group: PositiveInt
    within: PositiveInt
    fixed: Seconds
    per_expert: Seconds = Field(0.0, description="c, per expert of E in the layer: counts that are sent and waited for")
    rate: PositiveFloat = Field(description="share of the scale-up bandwidth (within a domain) or of the network's")
    timed_on: str | None = Field(None, description="relative whose kernel stands here")
    quality: Quality = Quality()


class ExchangeFit(Frozen):
    """An engine's own dispatch or combine in one domain of any size; `rlperf.cost.exchange.exchanged_with`."""

    kernel: str = Field(description="engine whose kernels were timed")
    operation: str = Field(description="dispatch or combine")
    fixed: Seconds
    per_doubling: Seconds = Field(0.0, description="per doubling of the devices")
    rate: PositiveFloat = Field(description="share of the scale-up bandwidth")
    timed_on: str | None = Field(None, description="relative whose kernel stands here")
    quality: Quality = Quality()


class StreamFit(Frozen):
    """Memory-bound passes: large streams, and small unfused operators (norm, rope, activation)."""

    stream_memory: PositiveFloat = Field(description="attainable share of the bandwidth, large streams")
    small_fixed: Seconds = Field(description="one small operator inside a CUDA graph")
    small_memory: PositiveFloat = Field(description="attainable share of the bandwidth, small operators")
    scan_compute: PositiveFloat = Field(description="chunked scans of linear attention and Mamba over large products")
    quality: Quality = Quality()


class HostFit(Frozen):
    """Launches from eager code, and copies between host and device."""

    launch: Seconds = Field(description="per kernel from eager code")
    eager_collective: Seconds = Field(description="added to a collective launched from eager code")
    copy_memory: PositiveFloat = Field(description="attainable share of the host link")
    quality: Quality = Quality()


class DeviceCalibration(Frozen):
    """All fitted constants of one device."""

    id: str
    device: str
    source: str
    date: str
    software: str
    n: NonNegativeInt = Field(description="measurements behind the file")
    spread: Spread = Field(Spread(), description="over all operators")
    gemm: tuple[GemmFit, ...]
    prefill: tuple[PrefillFit, ...]
    decode: tuple[DecodeFit, ...]
    latent_prefill: tuple[PrefillFit, ...] = Field((), description="prompts of latent attention, by engine")
    encoder: tuple[PrefillFit, ...] = Field((), description="vision towers, by engine and width of heads")
    latent_decode: tuple[LatentFit, ...] = ()
    absorption: tuple[AbsorptionFit, ...] = ()
    moe: tuple[MoeFit, ...] = ()
    collectives: tuple[CollectiveFit, ...]
    dispatch: tuple[DispatchFit, ...] = ()
    exchange: tuple[ExchangeFit, ...] = ()
    scan: tuple[ScanFit, ...] = ()
    sparse: tuple[SparseFit, ...] = ()
    streams: tuple[StreamsFit, ...] = ()
    stream: StreamFit
    host: HostFit
    notes: str = ""
    extrapolated_from: str | None = Field(None, description="device whose constants stand here, when not its own")
    timed: tuple[str, ...] = Field((), description="kinds of its own timings beside those of extrapolated_from")
    served_rows: tuple[str, ...] = Field(
        (), description="served rows behind constants of kernels that nobody timed; they are never scored"
    )

    @property
    def extrapolated(self) -> bool:
        """Whether the constants are a relative's."""
        return self.extrapolated_from is not None

    @property
    def standing(self) -> str:
        """What a device without all timings of its own runs on, in words."""
        own = f" beside its own of {', '.join(self.timed)}" if self.timed else ""
        return f"{self.device} runs on the constants of {self.extrapolated_from}{own}"

    @property
    def told(self) -> bool:
        """Whether served rows told the constants: no kernel of the device was timed."""
        return bool(self.served_rows)

    def borrowed_by(self, device: str) -> DeviceCalibration:
        """These constants for a device without measurements of its own; intervals are read twice as wide."""
        return self.model_copy(
            update={
                "id": f"{self.id}@{device}",
                "device": device,
                "extrapolated_from": self.device,
                "spread": self.spread.widened(2.0),
            }
        )


def load_device_calibration(
    device: str, *, relative: str | None = None, file: Path | str | None = None, folder: Path | str | None = None
) -> DeviceCalibration:
    """Constants of ``device``; without measurements, those of ``relative`` marked as extrapolated.

    ``file`` goes before the search path; ``folder`` is the job's folder.
    """
    if file is not None:
        found = read_spec(file, DeviceCalibration)
        return found if found.device == device else found.borrowed_by(device)
    path = find_calibration(device, "devices", folder)
    if path is not None:
        return read_calibration(path, DeviceCalibration)
    if relative:
        path = find_calibration(relative, "devices", folder)
        if path is not None:
            return read_calibration(path, DeviceCalibration).borrowed_by(device)
    timed = ", ".join(calibration_names("devices", folder))
    raise SpecError(
        Problem(
            f"no calibration for device {device!r}" + (f" nor for its relative {relative!r}" if relative else ""),
            suggestion=f"measure one with 'rlperf calibrate measure', or let its profile name a relative of: {timed}",
        )
    )
