"""Collectives: inside a scale-up domain from fitted constants, across nodes as `rlperf.cost.network` says."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from rlperf.cost.network import network_bytes_per_s, pair_hop_s, ring_s, tree_s
from rlperf.cost.roofline import Array, as_float, joined
from rlperf.layout import FloatArray
from rlperf.specs.calibration import CollectiveFit, CollectivePoint
from rlperf.specs.cluster import Device, Torus
from rlperf.specs.hardware import Hardware

STEPS_OVERLAP = 1.5
"""Norm that joins the time of a collective's steps from board to board with that of its bytes: all-reduces of 16 GB300
on four boards take 48 us up to 1 MB, 60 at 4 MB and 85 at 8 MB, whose bytes alone take 27 and 52 (n = 46)."""


def link_bytes_per_s(device: Device) -> float:
    """Data-sheet rate of the fast links per device and direction [bytes/s]; that of the host link without them."""
    return device.scale_up.bandwidth if device.scale_up else device.host_bandwidth


def scale_up_bytes_per_s(hw: Hardware) -> float:
    """Data-sheet rate between devices of one scale-up domain [bytes/s], see `link_bytes_per_s`."""
    return link_bytes_per_s(hw.device)


def bus_share(collective: str, group: Array) -> FloatArray:
    """Bus bytes over message bytes: 2 (n-1)/n for all-reduce, (n-1)/n for the others, 1 point to point.

    >>> float(bus_share("all_reduce", 8)), float(bus_share("all_gather", 2))
    (1.75, 0.5)
    """
    n = np.maximum(as_float(group), 1.0)
    if collective == "point_to_point":
        return np.ones_like(n)
    return np.asarray((2.0 if collective == "all_reduce" else 1.0) * (n - 1.0) / n)


def collective_fit(hw: Hardware, collective: str, implementation: str = "nccl") -> CollectiveFit:
    """Constants of a collective; a missing one is served by all_gather (all move bytes once, except all_reduce)."""
    fits = hw.calibration.collectives
    for name, kind in ((collective, implementation), (collective, "nccl"), ("all_gather", "nccl")):
        for fit in fits:
            if fit.collective == name and fit.implementation == kind:
                return fit
    return fits[0]


class _Constants(NamedTuple):
    """Those of `CollectivePoint`, of as many group sizes as are asked for."""

    low_fixed: FloatArray
    low_bandwidth: FloatArray
    fixed: FloatArray
    bandwidth: FloatArray
    root: FloatArray


@cache
def _measured(points: tuple[CollectivePoint, ...]) -> tuple[FloatArray, FloatArray]:
    """log2 of the measured group sizes [group size], and their constants [constant, group size]."""
    places = np.log2([point.group for point in points])
    return places, np.array([[getattr(point, name) for point in points] for name in _Constants._fields])


def point_with(point: CollectivePoint | _Constants, bus_bytes: Array, bytes_per_s: Array) -> FloatArray:
    r"""Seconds of a collective for one group size: the faster of two protocols, smoothly.

    .. math:: t = (u^{-16} + v^{-16})^{-1/16},\quad u = a_1 + x / b_1,\quad v = a_2 + x / b_2 + c \sqrt{x}

    Parameters
    ----------
    bus_bytes : x, bytes over the busiest link [bytes]; 2 (n-1)/n of the buffer for all-reduce, (n-1)/n for the others
    bytes_per_s : of the link on the data sheet [bytes/s]; b_1 and b_2 are shares of it
    """
    x, rate = as_float(bus_bytes), as_float(bytes_per_s)
    low = point.low_fixed + x / (point.low_bandwidth * rate)
    bulk = point.fixed + x / (point.bandwidth * rate) + point.root * np.sqrt(np.maximum(x, 0.0))
    faster = np.minimum(low, bulk)
    return np.asarray(faster * (1.0 + (faster / np.maximum(low, bulk)) ** 16) ** (-1 / 16))


def domain_s(
    hw: Hardware, collective: str, bus_bytes: Array, devices: Array, implementation: str = "nccl"
) -> FloatArray:
    """Seconds of a collective inside one scale-up domain [s]; 0 for 0 bytes.

    `point_with` at the measured group sizes, interpolated in log2 of the group and kept beyond the largest. A full mesh
    or a torus has no switch that adds up (NVLS): NCCL's all-reduce is a reduce-scatter and an all-gather there.

    Devices without fast links that may not read each other's memory (`reaches_peers`) go through host memory, by NCCL,
    for engines' own kernels need peer access: every byte crosses PCIe twice, in turn, so that a pair takes twice as
    long as directly, and no group is faster than its pairs (NCCL's shared-memory transport, src/transport/shm.cc).
    """
    if reaches_peers(hw):
        return _direct_s(hw, collective, bus_bytes, devices, implementation)
    pair = 2.0 * _direct_s(hw, collective, bus_bytes, 2.0)
    return np.maximum(pair, _direct_s(hw, collective, bus_bytes, devices))


def reaches_peers(hw: Hardware) -> bool:
    """Whether devices of a node read each other's memory: over fast links, or over PCIe where driver and host let them.

    >>> from rlperf.specs.hardware import load_hardware
    >>> [reaches_peers(load_hardware(name)) for name in ("h100_sxm", "l40s", "rtx_4090")]
    [True, True, False]
    """
    return hw.device.scale_up is not None or (hw.device.peer_access and hw.cluster.peer_access)


def _direct_s(
    hw: Hardware, collective: str, bus_bytes: Array, devices: Array, implementation: str = "nccl"
) -> FloatArray:
    """`domain_s` between devices that reach each other."""
    torus = hw.device.scale_up.torus if hw.device.scale_up else None
    if collective == "all_reduce" and implementation == "nccl" and (torus or _mesh_bytes_per_s(hw)):
        return 2.0 * _direct_s(hw, "all_gather", as_float(bus_bytes) / 2.0, devices)
    fit = collective_fit(hw, collective, implementation)
    group = np.maximum(as_float(devices), 1.0)
    rate: FloatArray | float = scale_up_bytes_per_s(hw)
    if mesh := _mesh_bytes_per_s(hw):
        rate = np.minimum(rate, mesh * np.maximum(group - 1.0, 1.0))
    elif torus:
        rate = torus_bytes_per_s(torus, collective, group)
    x, size, rate = np.broadcast_arrays(as_float(bus_bytes), np.log2(group), rate)
    places, constants = _measured(fit.points)
    index = np.searchsorted(places[1:-1], size)
    lower = point_with(_Constants(*constants[:, index]), x, rate)
    if len(places) > 1:
        upper = point_with(_Constants(*constants[:, index + 1]), x, rate)
        share = (size - places[index]) / (places[index + 1] - places[index])
        share = np.minimum(np.maximum(share, 0.0), 1.0)
        lower = lower + share * (upper - lower)
    if torus:
        lower = lower + torus_hops(torus, group) * torus.hop
    beyond = np.maximum(size - places[-1], 0.0) * fit.across
    if beyond.any():  # steps from board to board take their time while large messages hide it
        start = min(fit.points[-1].low_fixed, fit.points[-1].fixed)
        moving = np.maximum(lower - start, 0.0)
        lower = np.where(beyond > 0, joined(moving, start + beyond, STEPS_OVERLAP), lower)
    return np.where(x > 0, lower, 0.0)


def torus_bytes_per_s(torus: Torus, collective: str, group: FloatArray) -> FloatArray:
    r"""Rate per device and direction of a collective over a group of a torus [bytes/s].

    A group of n is laid along k axes, each of length l = n^(1/k): as few as ``side`` devices an axis allow. All axes
    and, where an axis is closed to a ring, both directions work at once, each on its part of the buffer:

    .. math:: r = k\,d\,b,\quad d = 2 \text{ (ring) or } 1 \text{ (line)}

    An all-to-all sends to devices l/4 (ring) or l/2 hops away on average, along every axis: :math:`r = 4\,d\,b / l`.
    Source: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapters "TPUs" and "Sharding"; recalled.

    >>> v5p = Torus.model_construct(axes=3, link=90e9, side=4, wraps_from=4, hop=1e-6)
    >>> [float(torus_bytes_per_s(v5p, "all_gather", np.array(n))) / 1e9 for n in (4.0, 16.0, 64.0)]
    [180.0, 360.0, 540.0]
    """
    used, length = _laid(torus, group)
    ways = np.where(length >= torus.wraps_from, 2.0, 1.0)
    if collective == "all_to_all":
        return 4.0 * ways * torus.link / np.maximum(length, 4.0)
    if collective == "point_to_point":
        return np.full_like(used, torus.link)
    return used * ways * torus.link


def torus_hops(torus: Torus, group: FloatArray) -> FloatArray:
    """Neighbours that a message passes to reach everyone: half a ring or a whole line along each axis [1]."""
    used, length = _laid(torus, group)
    return used * np.where(length >= torus.wraps_from, length / 2.0, length - 1.0)


def _laid(torus: Torus, group: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Axes that a group is laid along, and its length along each."""
    used = np.clip(np.ceil(np.log(group) / np.log(torus.side) - 1e-9), 1.0, float(torus.axes))
    return used, np.round(group ** (1.0 / used), 6)


def _mesh_bytes_per_s(hw: Hardware) -> float:
    """Rate between two devices of a full mesh without a switch [bytes/s]; 0 where there is a switch or no fast link."""
    link = hw.device.scale_up
    return float(link.pair_bandwidth or 0.0) if link else 0.0


def _hierarchical_s(
    hw: Hardware, collective: str, message_bytes: Array, group: Array, within: Array, passes: float, implementation: str
) -> FloatArray:
    """``passes`` = times the buffer crosses the bus: 2 for all-reduce, 1 for the others."""
    x, n = as_float(message_bytes), np.maximum(as_float(group), 1.0)
    inside = np.clip(as_float(within), 1.0, n)
    moving = (x > 0) & (n > 1.0)
    if not moving.any():
        return np.zeros(np.broadcast_shapes(x.shape, n.shape, inside.shape))
    near = domain_s(hw, collective, passes * x * (inside - 1.0) / inside, inside, implementation)
    across = n > inside
    if across.any():
        near = np.where(across, _across_s(hw, collective, x, n, inside, passes), near)
    return np.where(moving, near, 0.0)


def _across_s(
    hw: Hardware, collective: str, x: FloatArray, n: FloatArray, inside: FloatArray, passes: float
) -> FloatArray:
    """Across nodes, always by NCCL: engines' own kernels need every device in one scale-up domain."""
    scale_up = scale_up_bytes_per_s(hw)
    whole = domain_s(hw, collective, passes * x * (n - 1.0) / n, inside)
    ring = ring_s(hw, np.where(inside > 1.0, whole, 0.0), x, n, inside, passes, scale_up)
    if collective != "all_reduce":
        return ring
    near = domain_s(hw, collective, passes * x * (inside - 1.0) / inside, inside)
    return np.minimum(ring, tree_s(hw, near, x, n, inside, scale_up))


def all_reduce_s(
    hw: Hardware, message_bytes: Array, group: Array, within: Array, *, implementation: str = "nccl"
) -> FloatArray:
    """Seconds of an all-reduce.

    Parameters
    ----------
    message_bytes : the full buffer of one device (the size argument of nccl-tests) [bytes]
    group : devices that take part [1]
    within : how many of them share a scale-up domain [1]
    implementation : "nccl", or an engine's own kernel ("custom", captured in CUDA graphs)

    Notes
    -----
    Bus bytes are 2 x (n-1)/n. Across nodes: the faster of a tree and a ring, `rlperf.cost.network`. An engine's kernels
    are for small messages and it hands large ones to NCCL (vLLM's ``should_custom_ar``; from memory), so that none
    takes longer: up to 1 GB engines were timed within a fifth of NCCL, but for two GB200 in one release, 2.7 times.
    """
    by_nccl = _hierarchical_s(hw, "all_reduce", message_bytes, group, within, 2.0, "nccl")
    if implementation == "nccl":
        return by_nccl
    return np.minimum(by_nccl, _hierarchical_s(hw, "all_reduce", message_bytes, group, within, 2.0, implementation))


def all_gather_s(hw: Hardware, message_bytes: Array, group: Array, within: Array) -> FloatArray:
    """Seconds of an all-gather; ``message_bytes`` = the gathered buffer, bus bytes x (n-1)/n (see `all_reduce_s`)."""
    return _hierarchical_s(hw, "all_gather", message_bytes, group, within, 1.0, "nccl")


def reduce_scatter_s(hw: Hardware, message_bytes: Array, group: Array, within: Array) -> FloatArray:
    """Seconds of a reduce-scatter; ``message_bytes`` = the buffer before it is scattered (see `all_reduce_s`)."""
    return _hierarchical_s(hw, "reduce_scatter", message_bytes, group, within, 1.0, "nccl")


def all_to_all_s(hw: Hardware, message_bytes: Array, group: Array, within: Array) -> FloatArray:
    """Seconds of an all-to-all; ``message_bytes`` = all that one device sends, its own share included [bytes].

    What leaves the node is (n - within) / n of the buffer, at the device's own share of the network.
    """
    x, n = as_float(message_bytes), np.maximum(as_float(group), 1.0)
    inside = np.clip(as_float(within), 1.0, n)
    moving = (x > 0) & (n > 1.0)
    if not moving.any():
        return np.zeros(np.broadcast_shapes(x.shape, n.shape, inside.shape))
    near = domain_s(hw, "all_to_all", x * (inside - 1.0) / n, inside)
    far = x * (n - inside) / n / network_bytes_per_s(hw) + pair_hop_s(hw) * (n > inside)
    return np.where(moving, np.maximum(near, far), 0.0)


def point_to_point_s(hw: Hardware, n_bytes: Array, within: Array) -> FloatArray:
    """Seconds to send ``n_bytes`` to one other device; ``within`` true (or > 1) inside a scale-up domain."""
    x = as_float(n_bytes)
    near = domain_s(hw, "point_to_point", x, 2.0)
    far = pair_hop_s(hw) + x / network_bytes_per_s(hw)
    flag = np.asarray(within)
    inside = flag if flag.dtype == np.bool_ else as_float(flag) > 1.0
    return np.where(x > 0, np.where(inside, near, far), 0.0)


def host_copy_s(hw: Hardware, n_bytes: Array) -> FloatArray:
    """Seconds to copy between device and pinned host memory: bytes / (host link x fitted share) [s]."""
    return as_float(n_bytes) / (hw.device.host_bandwidth * hw.calibration.host.copy_memory)


def dispatch_combine_s(
    hw: Hardware, tokens: Array, hidden: Array, active: Array, experts: Array, group: Array, within: Array
) -> FloatArray:
    r"""Seconds of one expert dispatch and combine with kernels like DeepEP's, the faster of two kinds.

    .. math:: t = \sum_{dispatch, combine} t_0 + E\,c_E + \frac{n\,c\,H\,b}{r}

    Parameters
    ----------
    tokens : n, tokens of one device [tokens]
    hidden, active, experts : H, k, E, width, experts per token and of the layer [1]; b = 1 byte out (fp8), 2 back
    group, within : devices, and how many of them share a scale-up domain [1]

    Notes
    -----
    Low-latency kernels (decodes) send c = k copies of a token, normal ones (prompts) one to every node that its experts
    reach (`reached`), or to every device in one node. Counts of every expert are sent and waited for (c_E; 64 experts
    and more were timed for it). Measured groups are interpolated in log2 of the group. A device without measurements
    takes an all-to-all of the copies, and so do groups over more nodes than were measured.
    """
    n, size = as_float(tokens), as_float(group)
    inside = np.minimum(as_float(within), size)
    places = np.where(size > inside, size / inside, size)
    values, count = n * as_float(hidden), as_float(experts)
    seconds = _dispatched_s(hw, "deepep", values * as_float(active), count, size, inside)
    if any(fit.kernel == "deepep_normal" for fit in hw.calibration.dispatch):
        normal = _dispatched_s(hw, "deepep_normal", values * reached(active, places), count, size, inside)
        seconds = np.minimum(seconds, normal)
    return np.where((n > 0) & (size > 1.0), seconds, 0.0)


def reached(active: Array, places: Array) -> FloatArray:
    """Of so many devices or nodes those that a token's experts lie on, in the mean [1]: n (1 - (1 - 1/n)^k).

    >>> float(reached(8, 1)), round(float(reached(8, 8)), 2)
    (1.0, 5.25)
    """
    n = np.maximum(as_float(places), 1.0)
    return np.asarray(n * (1.0 - (1.0 - 1.0 / n) ** as_float(active)))


_STARTS = ("fixed", "per_expert")
"""What a dispatch takes whatever it moves."""


def _dispatched_s(
    hw: Hardware, kernel: str, values: FloatArray, experts: FloatArray, size: FloatArray, inside: FloatArray
) -> FloatArray:
    """Seconds of both kernels of a kind that move so many ``values`` a device."""
    seconds: FloatArray = np.zeros(())
    for operation, value_bytes in (("dispatch", 1.0), ("combine", 2.0)):
        moved = values * value_bytes
        swap = all_to_all_s(hw, moved, size, inside)
        fits = [fit for fit in hw.calibration.dispatch if (fit.kernel, fit.operation) == (kernel, operation)]
        if not fits:
            seconds = seconds + swap
            continue
        timed = sorted(fits, key=lambda fit: fit.group)
        at, places = np.log2(np.maximum(size, 1.0)), np.log2([float(fit.group) for fit in timed])
        fixed, counted = (np.interp(at, places, [getattr(fit, name) for fit in timed]) for name in _STARTS)
        each = np.interp(at, places, [1.0 / (fit.rate * scale_up_bytes_per_s(hw)) for fit in timed])
        beyond = (size > timed[-1].group) & (size > inside)
        seconds = seconds + np.where(beyond, swap, fixed + experts * counted + moved * each)
    return seconds
