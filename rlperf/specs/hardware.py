"""Hardware: what the cost functions need of the machine in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rlperf.specs.calibration import (
    DecodeFit,
    DeviceCalibration,
    GemmFit,
    MoeFit,
    ScanFit,
    SparseFit,
    StreamsFit,
    load_device_calibration,
)
from rlperf.specs.cluster import Cluster, Device, Link
from rlperf.specs.network_calibration import NetworkCalibration, load_network_calibration
from rlperf.specs.profiles import load_cluster, load_device, load_link

Fit = TypeVar("Fit", GemmFit, DecodeFit, MoeFit, ScanFit, SparseFit, StreamsFit)
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
    """A relative's constants for a device, as far as both publish what they attain brought to what the device attains.

    A share of the data sheet carries over only between devices whose clocks and caches keep up alike: an L40S reaches
    less of its peak than an RTX PRO 6000. Products and attention over prompts go by the ratio of the attained shares of
    the peak (fp8 and narrower by that of fp8 where both state it), all that reads memory by that of bandwidth.
    """
    mine, theirs = device.attained, relative.attained
    if mine is None or theirs is None:
        return constants
    wide = _ratio(mine.bf16, device.peaks.bf16, theirs.bf16, relative.peaks.bf16) or 1.0
    narrow = _ratio(mine.fp8, device.peaks.fp8, theirs.fp8, relative.peaks.fp8) or wide
    read = _ratio(mine.memory, device.memory_bandwidth, theirs.memory, relative.memory_bandwidth) or 1.0

    def brought(fit: Fit, compute: float) -> Fit:
        changes = {"memory": min(fit.memory * read, max(fit.memory, BEST_READ))}
        if not isinstance(fit, DecodeFit | StreamsFit):
            changes["compute"] = fit.compute * compute
        return fit.model_copy(update=changes)

    def rate(dtype: str) -> float:
        return wide if dtype in ("bf16", "fp16") else narrow

    return constants.model_copy(
        update={
            "gemm": tuple(brought(fit, rate(fit.dtype)) for fit in constants.gemm),
            "prefill": tuple(fit.model_copy(update={"compute": fit.compute * wide}) for fit in constants.prefill),
            "decode": tuple(brought(fit, 1.0) for fit in constants.decode),
            "moe": tuple(brought(fit, rate(fit.dtype)) for fit in constants.moe),
            "scan": tuple(brought(fit, wide) for fit in constants.scan),
            "sparse": tuple(brought(fit, wide) for fit in constants.sparse),
            "streams": tuple(brought(fit, 1.0) for fit in constants.streams),
        }
    )


def with_relatives_kernels(
    constants: DeviceCalibration, device: Device, folder: Path | str | None = None
) -> DeviceCalibration:
    """A device's constants, and those of its relative for what was not timed on it: experts of a dtype, mixers."""
    relative = load_device_calibration(device.relative or device.name, folder=folder)
    own = {fit.dtype for fit in constants.moe}
    missing = {fit.dtype for fit in relative.moe if fit.dtype not in own and _has_units(device, fit.dtype)}
    scanned, chosen = {fit.mixer for fit in constants.scan}, {fit.mixer for fit in constants.sparse}
    lent, timed = at_published_rates(relative, device, load_device(relative.device, folder)), relative.device
    if constants.told:  # nothing of its mixers is told either
        lent = lent.model_copy(update={"scan": (), "sparse": (), "streams": ()})
    found: dict[str, list[MoeFit] | list[ScanFit] | list[SparseFit] | list[StreamsFit]] = {
        "moe": [fit for fit in lent.moe if fit.dtype in missing],
        "scan": [fit for fit in lent.scan if fit.mixer not in scanned],
        "sparse": [fit for fit in lent.sparse if fit.mixer not in chosen],
        "streams": [] if constants.streams else list(lent.streams),
    }
    changes = {
        name: (*getattr(constants, name), *(fit.model_copy(update={"timed_on": timed}) for fit in fits))
        for name, fits in found.items()
        if fits
    }
    return constants.model_copy(update=changes) if changes else constants


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
    calibration: Path | str | None = None,
    *,
    folder: Path | str | None = None,
) -> Hardware:
    """Hardware by names of profiles.

    Parameters
    ----------
    device : name of a device profile
    cluster : a cluster, or the name of its profile; without one, the generic node filled with the device
    calibration : a calibration file that goes before the search path
    folder : the job's folder, searched for profiles first
    """
    sheet = load_device(device, folder)
    named = cluster or f"generic:{sheet.name}"
    machine = named if isinstance(named, Cluster) else load_cluster(named, folder=folder)
    constants = load_device_calibration(sheet.name, relative=sheet.relative, file=calibration, folder=folder)
    if constants.extrapolated_from:
        constants = at_published_rates(constants, sheet, load_device(constants.extrapolated_from, folder))
    elif sheet.relative:
        constants = with_relatives_kernels(constants, sheet, folder)
    library = load_network_calibration(folder=folder)
    return Hardware(sheet, constants, machine, load_link(machine.network, folder), library)
