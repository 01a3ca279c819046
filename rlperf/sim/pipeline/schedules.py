"""The standard schedules as explicit orders, and the standard partitions and placements that go with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlperf.errors import SpecError
from rlperf.sim.pipeline.types import B, F, Op, Orders, W


def even_partition(layers: int, stages: int) -> tuple[int, ...]:
    """Near-equal numbers of layers: the first ``layers % stages`` stages hold one more.

    >>> even_partition(10, 4)
    (3, 3, 2, 2)
    """
    if not 1 <= stages <= layers:
        raise SpecError(f"{layers} layers cannot make {stages} stages")
    return tuple(layers // stages + (s < layers % stages) for s in range(stages))


def round_robin(stages: int, devices: int) -> tuple[int, ...]:
    """Stage s on device s mod P: the placement of interleaved 1F1B."""
    return tuple(s % devices for s in range(stages))


def v_shape(stages: int, devices: int) -> tuple[int, ...]:
    """Back and forth: 0 1 .. P-1 P-1 .. 1 0 0 1 .., the placement of the zero-bubble V schedules (arXiv 2405.15362).

    >>> v_shape(6, 3)
    (0, 1, 2, 2, 1, 0)
    """
    return tuple(s % devices if (s // devices) % 2 == 0 else devices - 1 - s % devices for s in range(stages))


def gpipe(devices: int, microbatches: int) -> Orders:
    """All forwards, then all backwards (merged). Reference: arXiv 1811.06965, figure 2c.

    Uniform stages: makespan = (M + P - 1)(F + B + W); every device holds M micro-batches.
    """
    ms = _numbers(devices, microbatches)
    return tuple((*((F, p, m) for m in ms), *((B, p, m) for m in ms)) for p in range(devices))


def one_f_one_b(devices: int, microbatches: int) -> Orders:
    """1F1B (PipeDream-flush), merged backward. Reference: arXiv 2104.04473, section 2.2 and figure 4 top.

    Device p warms up with min(P - 1 - p, M) forwards and then alternates F and B.
    Uniform stages: makespan = (M + P - 1)(F + B + W); device p holds min(P - p, M) micro-batches.
    """
    ms = _numbers(devices, microbatches)
    orders = []
    for p in range(devices):
        warmup = min(devices - 1 - p, microbatches)
        forward, backward = [(F, p, m) for m in ms], [(B, p, m) for m in ms]
        orders.append(_one_by_one(forward, backward, warmup))
    return tuple(orders)


def interleaved_1f1b(devices: int, microbatches: int, chunks: int) -> Orders:
    """Interleaved 1F1B with ``chunks`` stages v on each device, merged backward, stage s on device s mod P.

    Device p warms up with min(2 (P - 1 - p) + (v - 1) P, v M) forwards; micro-batches go through in groups of P.
    M must be a multiple of P. Uniform stages of F, B, W each: makespan = (v M + P - 1)(F + B + W).
    Reference: arXiv 2104.04473, section 2.2 and figure 4 bottom (Megatron-LM's ``virtual_pipeline``).
    """
    ms = _numbers(devices, microbatches)
    if chunks == 1:
        return one_f_one_b(devices, microbatches)
    if chunks < 1:
        raise SpecError(f"{chunks} chunks per device: at least 1 is due")
    if microbatches % devices:
        raise SpecError(f"interleaved 1F1B needs micro-batches in multiples of {devices} devices, not {microbatches}")
    groups = [ms[i : i + devices] for i in range(0, microbatches, devices)]
    orders = []
    for p in range(devices):
        forward = [(F, c * devices + p, m) for group in groups for c in range(chunks) for m in group]
        backward = [(B, c * devices + p, m) for group in groups for c in reversed(range(chunks)) for m in group]
        warmup = min(2 * (devices - 1 - p) + (chunks - 1) * devices, len(forward))
        orders.append(_one_by_one(forward, backward, warmup))
    return tuple(orders)


def zb_h1(devices: int, microbatches: int) -> Orders:
    """ZB-H1: 1F1B with the backward split, W put off just so far that memory stays that of 1F1B.

    Device p puts W off by min(p, M) micro-batches: the last device fills what would be its drain bubble.
    Uniform stages with F = B = W: makespan = M (F + B + W) + (P - 1)(F + B - W), for M >= P.
    Reference: arXiv 2401.10241, section 3.1 and table 2.
    """
    ms = _numbers(devices, microbatches)
    orders = []
    for p in range(devices):
        delay = min(p, microbatches)
        order: list[Op] = []
        backwards = 0
        for op in _one_by_one([(F, p, m) for m in ms], [(B, p, m) for m in ms], min(devices - 1 - p, microbatches)):
            order.append(op)
            if op[0] == B:
                backwards += 1
                if backwards > delay:
                    order.append((W, p, ms[backwards - 1 - delay]))
        order += [(W, p, m) for m in ms[microbatches - delay :]]
        orders.append(tuple(order))
    return tuple(orders)


def _one_by_one(forward: Sequence[Op], backward: Sequence[Op], warmup: int) -> tuple[Op, ...]:
    """``warmup`` forwards, then F and B in turn, then the rest of the backwards."""
    steady = len(forward) - warmup
    order = list(forward[:warmup])
    for i in range(steady):
        order += [forward[warmup + i], backward[i]]
    return (*order, *backward[steady:])


def _numbers(devices: int, microbatches: int) -> list[int]:
    """Those of the micro-batches."""
    if devices < 1 or microbatches < 1:
        raise SpecError(f"{devices} devices and {microbatches} micro-batches: at least 1 of each is due")
    return list(range(microbatches))


# Schedules with one stage per device; True where the backward is merged.
SCHEDULES: dict[str, tuple[Callable[[int, int], Orders], bool]] = {
    "GPipe": (gpipe, True),
    "1F1B": (one_f_one_b, True),
    "ZB-H1": (zb_h1, False),
}
