"""Hardware: what the cost functions need of the machine in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlperf.specs.calibration import DeviceCalibration, load_device_calibration
from rlperf.specs.cluster import Cluster, Device, Link
from rlperf.specs.network_calibration import NetworkCalibration, load_network_calibration
from rlperf.specs.profiles import load_cluster, load_device, load_link


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
    library = load_network_calibration(folder=folder)
    return Hardware(sheet, constants, machine, load_link(machine.network, folder), library)
