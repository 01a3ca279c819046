"""Devices, links and clusters: data sheets, read from YAML with a source for every number."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from rlperf.specs.frozen import Frozen
from rlperf.units import Bytes, BytesPerSecond, FlopPerSecond, Hertz, Seconds, UsdPerHour, Watt


class Peaks(Frozen):
    """Dense peak rates by data type; absent = the device has no such unit."""

    fp32: FlopPerSecond | None = None
    tf32: FlopPerSecond | None = None
    bf16: FlopPerSecond | None = None
    fp16: FlopPerSecond | None = None
    fp8: FlopPerSecond | None = None
    int8: FlopPerSecond | None = None
    fp4: FlopPerSecond | None = None


class ScaleUp(Frozen):
    """The fast links inside a scale-up domain (NVLink, xGMI, HCCS). ``bandwidth`` is per device and direction."""

    name: str
    bandwidth: BytesPerSecond
    domain: PositiveInt = Field(description="devices that reach each other at this rate; 2 = bridged pairs")
    pair_bandwidth: BytesPerSecond | None = Field(
        None, description="between two devices where the links form a full mesh without a switch; else as bandwidth"
    )


class Device(Frozen):
    """One accelerator as its data sheet describes it.

    ``sources`` maps a field name (or ``*`` for all the others) to where its number is from.
    """

    name: str
    title: str
    aliases: tuple[str, ...] = Field((), description="further names that find this profile; on one line in YAML")
    vendor: str
    generation: str = Field(description="architecture name, such as Hopper sm90")
    peaks: Peaks
    memory: Bytes = Field(description="what the driver reports where known")
    memory_bandwidth: BytesPerSecond
    memory_type: str
    l2_cache: Bytes | None = None
    multiprocessors: PositiveInt | None = None
    boost_clock: Hertz | None = None
    power: Watt | None = None
    scale_up: ScaleUp | None = None
    host_link: str = Field(description="PCIe4, PCIe5, NVLink-C2C ...")
    host_bandwidth: BytesPerSecond = Field(description="to host memory, per device and direction")
    network: str | None = Field(None, description="link profile of the network port that such devices ship with")
    confidence: Literal["high", "medium", "low"] = "high"
    relative: str | None = Field(
        None, description="device whose calibration serves where this one has none, or its own is left out"
    )
    sources: dict[str, str]
    notes: str = ""


class Link(Frozen):
    """A network link of a device: rate per direction, latency of one hop, and whether writes arrive in order."""

    name: str
    bandwidth: BytesPerSecond
    latency: Seconds
    in_order: bool = Field(True, description="protocols that flag every word or line need it; without, only bulk ones")
    source: str


class Cluster(Frozen):
    """Equal nodes of equal devices and the network between them.

    ``rails`` network ports a node (one each device on rail-optimised fabrics); ``oversubscription`` >= 1 divides the
    bandwidth that leaves a leaf switch; ``domain`` = devices in one scale-up domain (a node, or a rack on NVL72).
    """

    name: str
    device: str
    devices_per_node: PositiveInt
    domain: PositiveInt | None = Field(None, description="devices per scale-up domain; default: a node")
    nodes: PositiveInt = 1
    network: str = Field(description="name of a link profile")
    rails: NonNegativeInt = Field(8, description="network ports per node")
    oversubscription: float = Field(1.0, ge=1.0)
    host_memory: Bytes = Field(description="per node")
    host_cores: PositiveInt | None = Field(None, description="CPU cores per node")
    price: UsdPerHour | None = Field(None, description="per device and hour")
    sources: dict[str, str] = Field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Devices of the whole cluster."""
        return self.nodes * self.devices_per_node

    @property
    def scale_up_domain(self) -> int:
        """Devices that share the fast links."""
        return self.domain or self.devices_per_node
