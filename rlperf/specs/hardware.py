"""Hardware: what the cost functions need of the machine in one frozen object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rlperf.specs.calibration import (
    AbsorptionFit,
    DecodeFit,
    DeviceCalibration,
    DispatchFit,
    ExchangeFit,
    GemmFit,
    LatentFit,
    MoeFit,
    PrefillFit,
    ScanFit,
    SparseFit,
    StreamsFit,
    load_device_calibration,
)
from rlperf.specs.calibration_files import calibration_names, find_calibration
from rlperf.specs.cluster import Attained, Cluster, Device, Link
from rlperf.specs.network_calibration import NetworkCalibration, load_network_calibration
from rlperf.specs.profiles import load_cluster, load_device, load_link, load_relative

Lent = PrefillFit | LatentFit | AbsorptionFit | MoeFit | DispatchFit | ExchangeFit | ScanFit | SparseFit | StreamsFit
Fit = TypeVar("Fit", GemmFit, DecodeFit, LatentFit, AbsorptionFit, MoeFit, ScanFit, SparseFit, StreamsFit)
BEST_READ = 0.95
"""Share of the data sheet's bandwidth beyond which no ratio brings a kernel."""


@dataclass(frozen=True)
class Hardware:
    """A device, its fitted constants, the cluster it stands in, that cluster's network link and the library on it."""

    device: Device
    calibration: DeviceCalibration
    cluster: Cluster
    network: Link
    library: NetworkCalibration


def in_nodes_of(hardware: Hardware, devices: int) -> Hardware:
    """The same devices in nodes of another size, with as many network ports per device."""
    cluster = hardware.cluster
    if devices == cluster.devices_per_node:
        return hardware
    rails = max(round(cluster.rails * devices / cluster.devices_per_node), 1)
    return replace(hardware, cluster=cluster.model_copy(update={"devices_per_node": devices, "rails": rails}))


def at_published_rates(constants: DeviceCalibration, device: Device, relative: Device) -> DeviceCalibration:
    """A relative's constants for a device, brought to what the device attains if both publish it.

    A share of the data sheet carries over only between devices whose clocks and caches keep up alike: an L40S reaches
    less of its peak than an RTX PRO 6000. Products and attention over prompts go by the ratio of the attained shares of
    the peak (fp8 and narrower by that of fp8 where both state it), all that reads memory by that of bandwidth. No
    product is brought beyond the peak of its dtype: where memory held a kernel on the relative, timings there tell
    little of its products, and shares above 1 would count on a device of slower ones (H20).
    """
    products = tuple(_narrow(fit, _peak(device) / _peak(relative)) for fit in constants.gemm)
    mine, theirs = device.attained or Attained(), relative.attained or Attained()
    wide = _ratio(mine.bf16, device.peaks.bf16, theirs.bf16, relative.peaks.bf16) or 1.0
    narrow = _ratio(mine.fp8, device.peaks.fp8, theirs.fp8, relative.peaks.fp8) or wide
    read = _ratio(mine.memory, device.memory_bandwidth, theirs.memory, relative.memory_bandwidth) or 1.0

    def brought(fit: Fit, compute: float) -> Fit:
        changes = {"memory": min(fit.memory * read, max(fit.memory, BEST_READ))}
        if not isinstance(fit, DecodeFit | StreamsFit):
            changes["compute"] = min(fit.compute * compute, 1.0)
        if isinstance(fit, SparseFit):
            changes["index_compute"] = min(fit.index_compute, 1.0)
        return fit.model_copy(update=changes)

    def rate(dtype: str) -> float:
        return wide if dtype in ("bf16", "fp16") else narrow

    return constants.model_copy(
        update={
            "gemm": tuple(brought(fit, rate(fit.dtype)) for fit in products),
            "decode": tuple(brought(fit, 1.0) for fit in constants.decode),
            **{
                name: tuple(fit.model_copy(update={"compute": fit.compute * wide}) for fit in getattr(constants, name))
                for name in ("prefill", "encoder", "latent_prefill")
            },
            "latent_decode": tuple(brought(fit, rate(fit.kv_dtype)) for fit in constants.latent_decode),
            "absorption": tuple(brought(fit, wide) for fit in constants.absorption),
            "moe": tuple(brought(fit, rate(fit.dtype)) for fit in constants.moe),
            "scan": tuple(brought(fit, wide) for fit in constants.scan),
            "sparse": tuple(brought(fit, wide) for fit in constants.sparse),
            "streams": tuple(brought(fit, 1.0) for fit in constants.streams),
        }
    )


def _narrow(fit: GemmFit, slower: float) -> GemmFit:
    """A product's constants for a device of ``slower`` times the peak of the one timed [1].

    What a tile computes that few tokens leave partly empty stands behind its read on the device timed, whose products
    of 1 to 64 tokens take equally long. Libraries have narrower ones (of 8 rows: swapped operands), of which those
    timings say nothing: the narrowest tile takes no longer than there.

    >>> _narrow(GemmFit.model_construct(rows=64.0), 0.25).rows, _narrow(GemmFit.model_construct(rows=64.0), 1.5).rows
    (16.0, 64.0)
    """
    return fit.model_copy(update={"rows": fit.rows * min(slower, 1.0)})


def _peak(device: Device) -> float:
    return device.peaks.bf16 or device.peaks.fp16 or 1.0


def with_relatives_kernels(
    constants: DeviceCalibration, device: Device, folder: Path | str | None, asked: tuple[str, ...] = ()
) -> DeviceCalibration:
    """A device's constants, and those of its relative for what was not timed on it: experts of a dtype, mixers, and
    attention kernels over prompts of its generation.

    What was not timed on the relative either is asked of the relative's own; ``asked`` names those whom it came from.
    What is told from served rows holds for all that was served: nothing timed elsewhere goes beside it.
    """
    asked = (*asked, device.name)
    nearest = None if constants.told else _nearest(device, asked, folder)
    if nearest is None:
        return constants
    related = load_device(nearest, folder)
    relative = load_device_calibration(related.name, folder=folder)
    relative = with_relatives_kernels(relative, related, folder, asked)
    alike = device.generation.split()[0] == related.generation.split()[0]
    own, prompts = {fit.dtype for fit in constants.moe}, {(fit.kernel, fit.kv_dtype) for fit in constants.prefill}
    missing = {fit.dtype for fit in relative.moe if fit.dtype not in own and _has_units(device, fit.dtype)}
    dispatched = {(fit.kernel, fit.group) for fit in constants.dispatch}
    scanned, chosen = ({(fit.mixer, fit.phase) for fit in fits} for fits in (constants.scan, constants.sparse))
    lent = at_published_rates(relative, device, related)
    found: dict[str, Sequence[Lent]] = {
        "prefill": [fit for fit in lent.prefill if alike and (fit.kernel, fit.kv_dtype) not in prompts],
        "encoder": () if constants.encoder else lent.encoder,
        "latent_prefill": () if constants.latent_prefill else lent.latent_prefill,
        "latent_decode": () if constants.latent_decode else lent.latent_decode,
        "absorption": () if constants.absorption else lent.absorption,
        "moe": [fit for fit in lent.moe if fit.dtype in missing],
        "scan": [fit for fit in lent.scan if (fit.mixer, fit.phase) not in scanned],
        "sparse": [fit for fit in lent.sparse if (fit.mixer, fit.phase) not in chosen],
        "streams": () if constants.streams else lent.streams,
        "dispatch": [fit for fit in lent.dispatch if alike and (fit.kernel, fit.group) not in dispatched],
        "exchange": () if constants.exchange else lent.exchange,
    }
    changes = {
        name: (
            *getattr(constants, name),
            *(fit.model_copy(update={"timed_on": fit.timed_on or relative.device}) for fit in fits),
        )
        for name, fits in found.items()
        if fits
    }
    return constants.model_copy(update=changes) if changes else constants


def _nearest(device: Device, asked: tuple[str, ...], folder: Path | str | None) -> str | None:
    """The timed relative of a device; where that was asked already, the first timed one that runs its kernels, or that
    has one of those asked for its own relative.

    What served rows told holds for the device that served: it lends no kernels.
    """
    related = timed_relative(device, folder)
    if not related or related not in asked:
        return related
    others = (load_device(name, folder) for name in calibration_names("devices", folder) if name not in asked)
    kin = (one.name for one in others if capability(one) == capability(device) or one.relative in asked)
    return next((name for name in kin if not load_device_calibration(name, folder=folder).told), None)


def capability(device: Device) -> str:
    """Generation and major compute capability of a device, which say what kernels it runs.

    >>> from rlperf.specs.profiles import load_device
    >>> [capability(load_device(name)) for name in ("b200_sxm", "gb300", "rtx_pro_6000_server")]
    ['Blackwell sm10', 'Blackwell sm10', 'Blackwell sm12']
    """
    words = device.generation.split()
    return f"{words[0]} {words[-1][:-1]}"


def lent_by(
    constants: DeviceCalibration, related: Device, device: Device, folder: Path | str | None = None
) -> DeviceCalibration:
    """Constants of a relative as those of a device that nobody timed, kernels that the relative borrows included."""
    whole = with_relatives_kernels(constants, related, folder, (device.name,))
    runs = tuple(fit for fit in whole.moe if not fit.timed_on or _has_units(device, fit.dtype))
    return at_published_rates(whole.model_copy(update={"moe": runs}), device, related)


def timed_relative(device: Device, folder: Path | str | None = None) -> str | None:
    """Whose constants a device borrows: the first of its relative, that one's relative and so on that was timed."""
    asked, related = {device.name}, device
    while kin := load_relative(related, folder):
        related = kin
        if find_calibration(related.name, "devices", folder) is not None:
            return related.name
        if related.name in asked:
            break
        asked.add(related.name)
    return device.relative


UNITS = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "w4a4_mxfp4": "fp4", "w4a8_mxfp4": "fp4"}
"""Units that a kernel of a dtype needs; those of weight-only formats and of 16 bits run anywhere."""


def _has_units(device: Device, dtype: str) -> bool:
    return dtype not in UNITS or getattr(device.peaks, UNITS[dtype]) is not None


def _ratio(mine: float | None, sheet: float | None, theirs: float | None, their_sheet: float | None) -> float | None:
    """Attained share of one data sheet over that of another; None where either is not known."""
    if not (mine and sheet and theirs and their_sheet):
        return None
    return (mine / sheet) / (theirs / their_sheet)


def load_hardware(
    device: str,
    cluster: Cluster | str | None = None,
    *,
    folder: Path | str | None = None,
) -> Hardware:
    """Hardware by names of profiles.

    Parameters
    ----------
    device : name of a device profile
    cluster : a cluster, or the name of its profile; without one, the generic node filled with the device
    folder : the job's folder, searched for profiles first
    """
    sheet = load_device(device, folder)
    named = cluster or f"generic:{sheet.name}"
    machine = named if isinstance(named, Cluster) else load_cluster(named, folder=folder)
    relative = timed_relative(sheet, folder)
    constants = load_device_calibration(sheet.name, relative=relative, folder=folder)
    if constants.extrapolated_from and not constants.timed:
        constants = lent_by(constants, load_device(constants.extrapolated_from, folder), sheet, folder)
    else:
        constants = with_relatives_kernels(constants, sheet, folder)
    library = load_network_calibration(folder)
    return Hardware(sheet, constants, machine, load_link(machine.network, folder), library)
