"""Why a candidate is out: one bit per reason, so that a mask and its reasons are the same array."""

from __future__ import annotations

from enum import IntFlag

import numpy as np

from rlperf.layout import IntArray


class Reject(IntFlag):
    """Reasons; a candidate keeps every one that applies and is counted under the first."""

    DEVICES = 1
    HEADS = 2
    LAYERS = 4
    EXPERTS = 8
    NODE = 16
    BUDGET = 32
    FRAMEWORK = 64
    MEMORY = 128
    KV = 256
    HOST_MEMORY = 512
    LIMIT = 1024
    STATE = 2048
    READERS = 4096


REASONS = {
    Reject.DEVICES: "degrees do not multiply up to the devices",
    Reject.READERS: "as many replicas read prompts as there are, and none writes",
    Reject.HEADS: "attention heads, widths or vocabulary do not divide by the degree",
    Reject.LAYERS: "layers do not divide into the pipeline stages",
    Reject.EXPERTS: "experts do not divide by the expert degrees",
    Reject.NODE: "tensor parallel group leaves the scale-up domain",
    Reject.BUDGET: "the token budget holds less than one longest sequence",
    Reject.FRAMEWORK: "the framework refuses the combination",
    Reject.MEMORY: "device memory",
    Reject.KV: "KV cache holds less than one longest sequence",
    Reject.HOST_MEMORY: "host memory",
    Reject.LIMIT: "a limit of the job",
    Reject.STATE: "Ulysses cuts sequences of layers that carry a state, which no trainer is known to hand over",
}
"""The reasons in words, in the order in which they are counted."""

_IN_ORDER = [(int(flag), words) for flag, words in REASONS.items()]


def count_reasons(flags: IntArray) -> dict[str, int]:
    """Number of candidates by their first reason; candidates without a reason are not counted.

    >>> count_reasons(np.array([0, 1, 128, 129]))
    {'degrees do not multiply up to the devices': 2, 'device memory': 1}
    """
    # few of the combinations occur, whatever the number of candidates
    count = np.bincount(np.asarray(flags, dtype=np.int64).ravel())
    left, found = np.flatnonzero(count).tolist(), dict[str, int]()
    for flag, words in _IN_ORDER:
        if hit := [each for each in left if each & flag]:
            found[words] = int(count[hit].sum())
            left = [each for each in left if not each & flag]
    return found
