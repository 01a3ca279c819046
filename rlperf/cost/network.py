r"""Collectives across nodes, as NCCL runs them: trees and rings over the rails, in the protocol that is fastest.

With n devices, w of them in a node, N = n / w nodes, x bytes of buffer, s times over the bus (2 for all-reduce, 1 for
the others), r the line rate per device, L the link's latency:

.. math::

    t_{tree} = \max\left(t_w, \frac{c\, x}{w\, \phi_{tree}\, r}\right) + a
        + 2\,(w - 1)\,\Delta_{tree} + 2\,\lceil\log_2 N\rceil (h_{tree} + L)

    t_{ring} = \max\left(t_w, \frac{s x (n - 1) / n}{w\, \phi_{ring}\, r}\right) + a
        + s \left[(w - 1)\,\Delta_{ring} + ((N - 1)(w - 1) - 1)^+ d_{ring} + N (h_{ring} + L)\right]

c = 2, and 1 with two nodes: an inner node of a double binary tree receives half the buffer from each of two children on
the way up and sends it to both on the way down, while two nodes only exchange theirs. t_w is the measured time of the
same bytes inside one node; a and Delta are what the protocol starts and steps later than the one that such small
messages are measured with; d a step inside a node, h a hop between nodes. A ring hands every byte through all devices,
so its latency grows with n; a tree's grows with log N. The low-latency protocol moves bytes at a rate of its own. NCCL
takes the fastest of them: so does this.

Sources: NCCL's tuning model (src/graph/tuning.cc) for the latencies, published all-reduces for the shares phi; see
``hwprofiles/calibrations/networks/nccl.yaml``. Valid from one device a node to rail-optimised fabrics of equal nodes.
"""

from __future__ import annotations

import numpy as np

from rlperf.layout import FloatArray
from rlperf.specs.hardware import Hardware
from rlperf.specs.network_calibration import Protocol


def line_bytes_per_s(hw: Hardware) -> float:
    """Line rate per device and direction through the network: port x rails / devices per node / oversubscription."""
    rails = hw.cluster.rails / hw.cluster.devices_per_node
    return hw.network.bandwidth * rails / hw.cluster.oversubscription


def network_bytes_per_s(hw: Hardware) -> float:
    """Attainable rate per device and direction between pairs of devices on two nodes [bytes/s]."""
    return line_bytes_per_s(hw) * hw.library.pair


def pair_hop_s(hw: Hardware) -> float:
    """Latency of a message to one device on another node [s]: always in the bulk protocol."""
    return hw.library.bulk.ring_hop + hw.network.latency


def tree_s(
    hw: Hardware, near_s: FloatArray, x: FloatArray, n: FloatArray, inside: FloatArray, scale_up: float
) -> FloatArray:
    """All-reduce of ``x`` bytes by a tree over nodes [s]; ``near_s``: of the same buffer inside a node [s]."""
    nodes = n / inside
    far = np.where(nodes > 2.0, 2.0, 1.0) * x / inside / (hw.library.tree * line_bytes_per_s(hw))
    low = hw.library.low
    hops = 2.0 * np.ceil(np.log2(np.maximum(nodes, 1.0)))

    def after(protocol: Protocol) -> FloatArray:
        later = 2.0 * (inside - 1.0) * (protocol.tree_step - low.tree_step)
        return _start(protocol, low, inside) + later + hops * (protocol.tree_hop + hw.network.latency)

    return _fastest(hw, near_s, far, 2.0 * x * (n - 1.0) / n / scale_up, after(low), after(_wide(hw)))


def ring_s(
    hw: Hardware, near_s: FloatArray, x: FloatArray, n: FloatArray, inside: FloatArray, passes: float, scale_up: float
) -> FloatArray:
    """A collective of ``x`` bytes by a ring through all devices [s]; ``near_s``: its bytes inside a node [s]."""
    nodes = n / inside
    bus = passes * x * (n - 1.0) / n
    # one device a node is one flow a port, as between pairs; several share their ports ring by ring
    share = np.where(inside > 1.0, hw.library.ring, hw.library.pair)
    far = bus / inside / (share * line_bytes_per_s(hw))
    low = hw.library.low
    steps = np.maximum((nodes - 1.0) * (inside - 1.0) - 1.0, 0.0)

    def after(protocol: Protocol) -> FloatArray:
        later = (inside - 1.0) * (protocol.ring_step - low.ring_step) + steps * protocol.ring_step
        return _start(protocol, low, inside) + passes * (later + nodes * (protocol.ring_hop + hw.network.latency))

    return _fastest(hw, near_s, far, bus / scale_up, after(low), after(_wide(hw)))


def _wide(hw: Hardware) -> Protocol:
    """The protocol that reaches the line rate: one with flags where the network delivers in order."""
    return hw.library.line if hw.network.in_order else hw.library.bulk


def _start(protocol: Protocol, low: Protocol, inside: FloatArray) -> FloatArray:
    """Start beyond what the time inside a node holds already; all of it where a node has one device."""
    return np.where(inside > 1.0, protocol.start - low.start, protocol.start)


def _fastest(
    hw: Hardware, near: FloatArray, far: FloatArray, bus_s: FloatArray, after_low: FloatArray, after: FloatArray
) -> FloatArray:
    wide = np.maximum(near, far) + after
    if not hw.network.in_order:
        return wide
    # half of what LL sends are flags
    return np.minimum(wide, near + np.maximum(bus_s / hw.library.low_bandwidth, 2.0 * far) + after_low)
