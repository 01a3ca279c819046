"""The published layer profile that the pipeline tests share."""

from __future__ import annotations

import numpy as np

from rlperf.specs.pipeline_profile import LayerProfile

# Published facts of the authors' simulator (arXiv 2509.23722): times in ms of nemotron-nano-v2-9b.
PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
TIMES = {
    "E": (0.7589, 2.8654, 0.0),
    "M": (2.6768, 4.2984, 1.7599),
    "-": (1.8477, 1.909, 1.6866),
    "*": (1.9254, 2.4534, 0.6547),
    "L": (14.2155, 15.7056, 0.0595),
}


def nemotron() -> LayerProfile:
    """nemotron-nano-v2-9b, rounded to 0.01 ms as the authors' simulator reads it."""
    kinds = tuple("E" + PATTERN + "L")
    f, b, w = (np.array([round(TIMES[k][i], 2) * 1e-3 for k in kinds]) for i in range(3))
    return LayerProfile.make("nemotron", kinds, f, b, w)
