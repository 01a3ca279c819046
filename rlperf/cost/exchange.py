"""Experts reached by an engine's own kernels inside one scale-up domain that goes beyond the host (NVL72)."""

from __future__ import annotations

import numpy as np

from rlperf.cost.collectives import link_bytes_per_s, reached
from rlperf.cost.roofline import Array, as_float
from rlperf.layout import FloatArray
from rlperf.specs.calibration import ExchangeFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware

OPERATIONS = ("dispatch", "combine")
SUMMED_BYTES = 2.0
"""Of a value on its way back, as outputs of experts are added up: 16 bits whatever the experts read."""


def exchange_fit(hw: Hardware, engine: str, operation: str) -> ExchangeFit | None:
    """Constants of an engine's own dispatch or combine; None where it was not timed."""
    fits = hw.calibration.exchange
    return next((fit for fit in fits if (fit.kernel, fit.operation) == (engine, operation)), None)


def has_exchange(hw: Hardware, engine: str) -> bool:
    """Whether an engine brings kernels of its own that a domain of several hosts runs.

    >>> from rlperf.specs.hardware import load_hardware
    >>> rack, tray = (load_hardware("gb200", cluster) for cluster in ("gb200_nvl72", None))
    >>> has_exchange(rack, "trtllm"), has_exchange(rack, "vllm"), has_exchange(load_hardware("b200_sxm"), "trtllm")
    (True, False, False)
    """
    beyond = hw.cluster.scale_up_domain > hw.cluster.devices_per_node
    return beyond and all(exchange_fit(hw, engine, each) for each in OPERATIONS)


def exchanged_with(device: Device, fit: ExchangeFit, moved: Array, group: Array) -> FloatArray:
    r"""Seconds of one dispatch or combine over g devices.

    .. math:: t = t_0 + t_1 \log_2 g + \frac{m\,(1 - 1/g)}{r}

    Parameters
    ----------
    moved : m, bytes of the copies of one device's tokens, of which its own share stays where it is [bytes]
    group : g, devices that hold the experts [1]
    """
    size = np.maximum(as_float(group), 1.0)
    beside = as_float(moved) * (1.0 - 1.0 / size)
    return np.asarray(fit.fixed + fit.per_doubling * np.log2(size) + beside / (fit.rate * link_bytes_per_s(device)))


def exchange_s(
    hw: Hardware, engine: str, tokens: Array, width: Array, active: Array, value_bytes: Array, group: Array
) -> FloatArray:
    """Seconds of an engine's own dispatch and combine of one layer (`has_exchange`): a copy to every device.

    Parameters
    ----------
    tokens : of one device [tokens]
    width, active : values of a token, experts that it chooses [1]
    value_bytes : of a value on its way to the experts, as they read it [bytes]
    group : devices that hold the experts, all in one domain [1]

    Notes
    -----
    A token goes once to every device that holds an expert of it, `reached` of them with experts chosen by chance.
    """
    n = as_float(tokens)
    values = n * reached(active, group) * as_float(width)
    seconds: FloatArray = np.zeros(())
    for operation, each in zip(OPERATIONS, (as_float(value_bytes), as_float(SUMMED_BYTES)), strict=True):
        fit = exchange_fit(hw, engine, operation)
        assert fit is not None
        seconds = seconds + exchanged_with(hw.device, fit, values * each, group)
    return np.where((n > 0) & (as_float(group) > 1.0), seconds, 0.0)
