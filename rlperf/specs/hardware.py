"""Hardware: what the cost functions need of the machine in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass

from rlperf.specs.calibration import DeviceCalibration
from rlperf.specs.cluster import Cluster, Device, Link


@dataclass(frozen=True)
class Hardware:
    """A device, its fitted constants, the cluster it stands in and that cluster's network link."""

    device: Device
    calibration: DeviceCalibration
    cluster: Cluster
    network: Link
