"""Closed forms of asynchronous runs that the event simulation is held against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlperf.cost.roofline import as_float
from rlperf.layout import FloatArray


def async_staleness(
    concurrent: npt.ArrayLike,
    batch: npt.ArrayLike,
    queue: npt.ArrayLike,
    rate_ratio: npt.ArrayLike,
    tail: npt.ArrayLike,
) -> FloatArray:
    r"""Mean staleness of a trained sample in the steady state of an asynchronous run, closed form.

    .. math::

        s = \frac{C M}{B \max(1, \rho)} + \begin{cases} \rho & \rho < 1 \\ (2q + \rho - 1) / (2\rho) & \rho \ge 1
        \end{cases}

    Parameters
    ----------
    concurrent : C, samples being generated at once [samples]
    batch : B, samples per optimizer batch [samples]
    queue : q, capacity of the queue between rollout and trainer [batches]
    rate_ratio : rho, unobstructed rollout rate over trainer rate [1]
    tail : M, E[maximum of a group] / E[length] [1]

    Returns
    -------
    Weight versions between the start of a sample and its training [1]. It counts a group's wait for its last sample
    from the group's first token and takes all C as always busy, so it lies 5 to 10 % above the measured points;
    `rlperf.sim.rl_step.asynchronous.simulate` does not.

    >>> round(float(async_staleness(120, 240, 2, 0.63, 1.42)), 2)
    1.34
    """
    c, b, q, rho, m = (as_float(value) for value in (concurrent, batch, queue, rate_ratio, tail))
    waiting = np.where(rho < 1.0, rho, (2.0 * q + rho - 1.0) / (2.0 * rho))
    return np.asarray(c * m / (b * np.maximum(1.0, rho)) + waiting, dtype=np.float64)


def async_device_seconds(
    rollout_per_device: npt.ArrayLike, trainer_per_device: npt.ArrayLike, rate_ratio: npt.ArrayLike
) -> FloatArray:
    r"""Device-seconds per batch of an asynchronous run, closed form.

    N_T trainer devices of rate c_T [batches/s/device], N_R rollout devices of rate c_R, rho = c_R N_R / (c_T N_T):

    .. math:: (N_T + N_R) \cdot period = \frac{1}{\min(1, \rho)} \left(\frac{1}{c_T} + \frac{\rho}{c_R}\right)

    least at rho = 1.

    >>> float(async_device_seconds(0.01, 0.02, 1.0))
    150.0
    """
    c_r, c_t, rho = (as_float(value) for value in (rollout_per_device, trainer_per_device, rate_ratio))
    return np.asarray((1.0 / c_t + rho / c_r) / np.minimum(1.0, rho), dtype=np.float64)
