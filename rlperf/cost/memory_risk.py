r"""Probability of running out of memory: a predicted peak is a median, its interval the spread of what is measured.

.. math:: P = \Phi\left(-\ln(M / b) / \sigma\right)

sigma is ln(h) / 1.645 where the memory is more than what is predicted, -ln(l) / 1.645 where it is less;
b predicted bytes, M the memory they have, l and h the 5th and 95th percentile of measured over predicted peaks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from rlperf.layout import FloatArray
from rlperf.specs.calibration import Z95

PHASES = 2.0
"""Phases of an rl_step that can run out of memory, each with an even part of a run's risk: rollout and training."""

ENGINE_SPREAD = (1.0 / 1.08, 1.08)
"""5th and 95th percentile of what an engine holds beside its share, over what is predicted: start-up breakdowns of one
class of model scatter by 8 % (``memory/vllm_engine_memory.csv``, 8 breakdowns)."""


def out_of_memory_risk(
    uncertain: npt.ArrayLike, capacity: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike
) -> FloatArray:
    """Probability that ``uncertain`` predicted bytes need more than ``capacity`` [1]; arrays broadcast.

    Parameters
    ----------
    capacity : memory that is left for them, certain neighbours taken off [bytes]
    low, high : 5th and 95th percentile of measured over predicted bytes [1]

    >>> [round(float(out_of_memory_risk(100.0, has, 0.93, 1.07)), 4) for has in (100.0, 107.0, 93.0)]
    [0.5, 0.05, 0.95]
    """
    room = np.log(np.maximum(np.asarray(capacity, np.float64), 1e-9) / np.maximum(np.asarray(uncertain), 1e-9))
    spread = np.where(room > 0, np.log(high), -np.log(low)) / Z95
    return np.asarray(ndtr(-room / np.maximum(spread, 1e-9)), dtype=np.float64)


def spread_at(risk: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike) -> FloatArray:
    """Actual over predicted bytes that are exceeded with probability ``risk`` [1]; arrays broadcast.

    >>> round(float(spread_at(0.05, 0.93, 1.07)), 6), round(float(spread_at(0.005, 0.93, 1.07)), 3)
    (1.07, 1.112)
    """
    z = -ndtri(np.asarray(risk, np.float64))
    return np.asarray(np.exp(z / Z95 * np.where(z > 0, np.log(high), -np.log(low))), dtype=np.float64)
