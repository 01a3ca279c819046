"""Layers of the first and the last pipeline stage where stages are uneven; those between hold equally many.

The ends hold the embedding and the loss beside their layers. Frameworks take the two numbers and work out the rest.
Where stages are interleaved, each of them, the ends too, divides into v chunks of equally many layers (Megatron-Core,
``get_num_layers_to_build``): uneven stages of v chunks are those of one for a v-th of the layers, v times.
"""

from __future__ import annotations

import numpy as np

from rlperf.layout import BoolArray, IntArray


def uneven_ends(layers: int, pipeline: IntArray, virtual: IntArray | int = 1) -> tuple[IntArray, IntArray]:
    """Layers of the first and the last stage when the others hold equally many and none holds more than ceil(l / p).

    The others hold ceil(l / p); where that leaves nothing for an end, floor(l / p), if the ends can take the rest.
    0 where neither works.

    >>> [int(n) for n in uneven_ends(61, np.array(8))]
    [7, 6]
    >>> [[int(n) for n in ends] for ends in uneven_ends(61, np.array([12, 32]))]
    [[6, 0], [5, 0]]
    >>> [[int(n) for n in ends] for ends in uneven_ends(94, np.array(8), np.array([1, 2, 3]))]
    [[11, 12, 0], [11, 10, 0]]
    """
    chunks: IntArray = np.asarray(virtual, dtype=np.int64)
    parts, inner = layers // chunks, np.maximum(pipeline - 2, 0)
    most, least = -(-parts // pipeline), parts // pipeline
    tight, loose = parts - most * inner, parts - least * inner
    left = np.where(tight >= 2, tight, np.where(loose <= 2 * most, loose, 0))
    left = np.where((pipeline > 1) & (layers % chunks == 0), left, 0)
    return (left - left // 2) * chunks, left // 2 * chunks


def stated_ends_fit(
    layers: int, pipeline: IntArray, virtual: IntArray, first: int | None, last: int | None
) -> BoolArray:
    """True where the stated layers of the first or last stage leave equally many for the others, in whole chunks.

    >>> stated_ends_fit(48, np.array([1, 2, 4, 8]), np.ones(4), 10, 14).tolist()
    [True, False, True, True]
    >>> stated_ends_fit(48, np.array([2, 4, 8]), np.ones(3), 12, None).tolist()
    [True, True, False]
    >>> stated_ends_fit(94, np.array([8, 8, 8]), np.array([1, 2, 4]), 12, 10).tolist()
    [True, True, False]
    """
    inner = pipeline - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    chunks = inner * virtual
    even = np.where(inner > 0, (rest >= chunks) & (rest % np.maximum(chunks, 1) == 0), rest == 0)
    whole = ((first or 0) % virtual == 0) & ((last or 0) % virtual == 0)
    return np.asarray((pipeline == 1) | (whole & even))


def stage_ends(
    layers: int, stages: int, first: int | None, last: int | None, virtual: int = 1
) -> tuple[int | None, int | None]:
    """Layers of both ends: as stated, or `uneven_ends` where the layers do not divide; None where they do.

    Where one end is stated, the other holds as many as the stages between. None, too, where nothing works.

    >>> stage_ends(48, 4, 9, None), stage_ends(61, 8, None, None), stage_ends(48, 4, None, None)
    ((9, 13), (7, 6), (None, None))
    >>> stage_ends(94, 8, None, None, virtual=2), stage_ends(96, 8, None, None, virtual=2)
    ((12, 10), (None, None))
    """
    if stages < 2 or (first is not None and last is not None):
        return first, last
    if first is not None or last is not None:
        other = (layers - (first or last or 0)) // (stages - 1)
        return first or other, last or other
    if layers % (stages * virtual) == 0:
        return None, None
    ends = uneven_ends(layers, np.asarray(stages), virtual)
    return (int(ends[0]), int(ends[1])) if ends[1] else (None, None)


def stages_between(layers: int, stages: int, first: int, last: int) -> tuple[int, ...] | None:
    """Layers of every stage with stated ends, or None where the others cannot hold equally many.

    >>> stages_between(48, 4, 9, 13), stages_between(48, 4, 9, 12), stages_between(13, 2, 7, 6)
    ((9, 13, 13, 13), None, (7, 6))
    """
    inner = max(stages - 2, 0)
    partition = (first, *([(layers - first - last) // max(inner, 1)] * inner), last)
    return partition if min(partition) >= 1 and sum(partition) == layers else None
