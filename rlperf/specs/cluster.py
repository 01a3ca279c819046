"""Devices, links and clusters: data sheets, read from YAML with a source for every number."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rlperf.errors import did_you_mean
from rlperf.specs.frozen import Frozen
from rlperf.units import (
    Bytes,
    BytesPerSecond,
    Dimension,
    FlopPerSecond,
    Hertz,
    PositiveInt,
    Seconds,
    UsdPerHour,
    Watt,
    parse_quantity,
)

_POSITIVE = Field(gt=0, allow_inf_nan=False)
"""Every rate, size and price divides something or is divided by: none may be zero or less."""
VENDORS = ("NVIDIA", "AMD", "Google", "Huawei", "Intel")
HOST_LINKS = ("PCIe3", "PCIe4", "PCIe5", "PCIe6", "NVLink-C2C")
"""What joins a device to its host."""


def _known_link(name: str) -> str:
    if name not in HOST_LINKS:
        hint = did_you_mean(name, HOST_LINKS)
        raise ValueError(f"{name!r} is none of {', '.join(HOST_LINKS)}" + (f": {hint}" if hint else ""))
    return name


def _within(least: str, most: str, dimension: Dimension) -> AfterValidator:
    """Far beyond any accelerator sold, on both sides: a thousandth or a thousandfold is a unit that was mistaken."""
    low, high = parse_quantity(least, dimension), parse_quantity(most, dimension)

    def checked(value: float) -> float:
        if not low <= value <= high:
            raise ValueError(f"no accelerator is so far from others ({least} to {most}): is its unit right?")
        return value

    return AfterValidator(checked)


def _vendor(name: str) -> str:
    """As others write it: facts of frameworks name vendors.

    >>> _vendor("Nvidia"), _vendor("mine")
    ('NVIDIA', 'mine')
    """
    return next((each for each in VENDORS if each.casefold() == name.strip().casefold()), name)


def _one(device: object) -> object:
    if isinstance(device, list | dict):
        hint = "write a cluster's file for each, and name one as the `cluster` of the rollout's pool"
        raise ValueError(f"a cluster has devices of one kind: {hint}")
    return device


_RATE = _within("5 TFLOP/s", "50000 TFLOP/s", "flop_per_s")


class Peaks(Frozen):
    """Dense peak rates by data type; absent = the device has no such unit."""

    fp32: Annotated[FlopPerSecond, _POSITIVE] | None = None
    tf32: Annotated[FlopPerSecond, _POSITIVE] | None = None
    bf16: Annotated[FlopPerSecond, _POSITIVE, _RATE] | None = None
    fp16: Annotated[FlopPerSecond, _POSITIVE, _RATE] | None = None
    fp8: Annotated[FlopPerSecond, _POSITIVE, _RATE] | None = None
    int8: Annotated[FlopPerSecond, _POSITIVE] | None = None
    fp4: Annotated[FlopPerSecond, _POSITIVE] | None = None


class Attained(Frozen):
    """Rates that published benchmarks reach on the device; a relative's shares give way to them."""

    bf16: Annotated[FlopPerSecond, _POSITIVE] | None = Field(None, description="largest dense products")
    fp8: Annotated[FlopPerSecond, _POSITIVE] | None = None
    memory: Annotated[BytesPerSecond, _POSITIVE] | None = Field(None, description="large reads")


class Torus(Frozen):
    """Links to the two neighbours along each axis instead of a switch (TPU)."""

    axes: PositiveInt = Field(description="2 or 3")
    link: Annotated[BytesPerSecond, _POSITIVE] = Field(description="between neighbours, per direction")
    side: PositiveInt = Field(description="devices along one axis before a group is laid along the next")
    wraps_from: PositiveInt = Field(description="length from which an axis is closed to a ring")
    hop: Annotated[Seconds, Field(ge=0)] = Field(description="from neighbour to neighbour")


class ScaleUp(Frozen):
    """The fast links inside a scale-up domain (NVLink, xGMI, HCCS). ``bandwidth`` is per device and direction."""

    name: str
    bandwidth: Annotated[BytesPerSecond, _POSITIVE]
    domain: PositiveInt = Field(description="devices that reach each other at this rate; 2 = bridged pairs")
    pair_bandwidth: Annotated[BytesPerSecond, _POSITIVE] | None = Field(
        None, description="between two devices where the links form a full mesh without a switch; else as bandwidth"
    )
    torus: Torus | None = Field(None, description="where the links form a torus without a switch")


class Device(Frozen):
    """One accelerator as its data sheet describes it.

    ``sources`` maps a field name (or ``*`` for all the others) to where its number is from.
    """

    name: str
    title: str
    aliases: tuple[str, ...] = Field((), description="further names that find this profile; on one line in YAML")
    vendor: Annotated[str, AfterValidator(_vendor)]
    generation: str = Field(description="architecture name, such as Hopper sm90")
    peaks: Peaks
    attained: Attained | None = None
    reads_fp8: bool = Field(
        False, description="without a unit for it: whether engines keep weights and caches in fp8, widened as they read"
    )
    memory: Annotated[Bytes, _POSITIVE, _within("4 GB", "4 TB", "bytes")] = Field(
        description="of the data sheet, or what the driver reports"
    )
    memory_usable: Annotated[Bytes, _POSITIVE] | None = Field(
        None, description="what a process sees of it (cudaMemGetInfo), which limits keep to; left out: `memory`"
    )
    memory_bandwidth: Annotated[BytesPerSecond, _POSITIVE, _within("100 GB/s", "100 TB/s", "bytes_per_s")]
    memory_type: str
    l2_cache: Annotated[Bytes, _POSITIVE] | None = None
    multiprocessors: PositiveInt | None = None
    boost_clock: Annotated[Hertz, _POSITIVE] | None = None
    power: Annotated[Watt, _POSITIVE] | None = None
    scale_up: ScaleUp | None = None
    host_link: Annotated[str, AfterValidator(_known_link)] = Field(description="PCIe4, PCIe5, NVLink-C2C ...")
    host_bandwidth: Annotated[BytesPerSecond, _POSITIVE, _within("1 GB/s", "2 TB/s", "bytes_per_s")] = Field(
        description="to host memory, per device and direction"
    )
    unified_memory: bool = Field(
        False, description="its memory is its host's, too: what waits there takes of it (DGX Spark, MI300A)"
    )
    peer_access: bool = Field(
        True, description="whether its driver lets devices without fast links read each other's memory over PCIe"
    )
    network: str | None = Field(None, description="link profile of the network port that such devices ship with")
    confidence: Literal["high", "medium", "low"] = "high"
    relative: str | None = Field(
        None, description="device whose calibration serves where this one has none, or its own is left out"
    )
    chip: str | None = Field(None, description="device of the same chip with other memory: trains at the rates of that")
    sources: dict[str, str]
    notes: str = ""

    @model_validator(mode="after")
    def _usable_within_memory(self) -> Device:
        if self.memory_usable is not None and self.memory_usable > self.memory:
            raise ValueError("memory_usable is above memory: a process sees no more than the device has")
        return self

    @property
    def usable_memory(self) -> float:
        """Most that a process can hold of it, its context included [bytes]; `memory` where nobody recorded it."""
        return self.memory if self.memory_usable is None else min(self.memory, self.memory_usable)


class Link(Frozen):
    """A network link of a device: rate per direction, latency of one hop, and whether writes arrive in order."""

    name: str
    bandwidth: Annotated[BytesPerSecond, _POSITIVE]
    latency: Annotated[Seconds, Field(ge=0)]
    in_order: bool = Field(True, description="protocols that flag every word or line need it; without, only bulk ones")
    source: str


class Cluster(Frozen):
    """Equal nodes of equal devices and the network between them.

    ``rails`` network ports a node (one each device on rail-optimised fabrics); ``oversubscription`` >= 1 divides the
    bandwidth that leaves a leaf switch; ``domain`` = devices in one scale-up domain (a node, or a rack on NVL72).
    """

    name: str
    device: Annotated[str, BeforeValidator(_one)]
    devices_per_node: PositiveInt
    domain: PositiveInt | None = Field(None, description="devices per scale-up domain; default: a node")
    nodes: PositiveInt = 1
    network: str = Field(description="name of a link profile")
    rails: PositiveInt = Field(8, description="network ports per node")
    oversubscription: float = Field(1.0, ge=1.0, allow_inf_nan=False)
    peer_access: bool = Field(
        True,
        description="whether the host lets devices without fast links read each other's memory over PCIe (one switch, "
        "no virtual machine that forbids it); otherwise they go through host memory",
    )
    host_memory: Annotated[Bytes, _POSITIVE] = Field(description="per node")
    host_cores: PositiveInt | None = Field(None, description="CPU cores per node")
    price: Annotated[UsdPerHour, _POSITIVE] | None = Field(None, description="per device and hour")
    sources: dict[str, str] = Field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Devices of the whole cluster."""
        return self.nodes * self.devices_per_node

    @property
    def scale_up_domain(self) -> int:
        """Devices that share the fast links."""
        return self.domain or self.devices_per_node
