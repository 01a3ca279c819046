"""Expert kernels whose timings hold odd picks of an autotuner, told of all devices of a generation together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlperf.calibrate.expert_fits import fit_moe
from rlperf.calibrate.kernel_seconds import evenly, expert_seconds
from rlperf.calibrate.kernel_tables import Series
from rlperf.calibrate.shared_experts import fit_shared, with_shared
from rlperf.specs.calibration import MoeFit, load_device_calibration
from rlperf.specs.profiles import load_device

TRUE = MoeFit.model_validate(
    {
        "kernel": "trtllm_cutlass", "dtype": "w4a8_mxfp4", "fixed": "20 us", "compute": 0.8, "memory": 0.8,
        "activation_memory": 0.7, "per_pair": "0.0005 us", "exponent": 4.0, "per_expert": "0.02 us",
        "token_bytes": 18.0,
    }
)  # fmt: skip
SHAPES = [(n, ep) for n in (1, 16, 64, 256, 1024, 4096, 16384) for ep in (1, 8, 32)]


def timings(device: str, odd: slice) -> tuple[Series, np.ndarray]:
    """Timings of gpt-oss's layer by `TRUE`, some of them three times as slow, and which are not."""
    n, ep = np.array(SHAPES, dtype=np.float64).T
    alike = {"hidden_size": 2880.0, "inter_size": 2880.0, "topk": 4.0, "num_experts": 128.0, "moe_tp_size": 1.0}
    shape = {"num_tokens": n, "moe_ep_size": ep, **{name: np.full_like(n, value) for name, value in alike.items()}}
    ids = tuple(f"{device}_{i}" for i in range(len(n)))
    series = Series("moe", device, TRUE.kernel, TRUE.dtype, "balanced", "trtllm-1.3.0", shape, np.ones_like(n), ids)
    every = np.ones(len(n), dtype=bool)
    seconds = expert_seconds(series, load_device(device), evenly(series))(TRUE, every)
    clean = every.copy()
    clean[odd] = False
    return Series(**{**vars(series), "measured_s": np.where(clean, seconds, 3.0 * seconds)}), clean


def test_odd_picks_of_one_device_are_told_by_the_others() -> None:
    """Seven of 21 timings of each are three times as slow: the middle ones of B200 bend its own fit."""
    bent, clean = timings("b200_sxm", slice(7, 14))
    shared = fit_shared([bent, timings("gb200", slice(0, 4))[0], timings("gb300", slice(17, 21))[0]], check=False)
    own = fit_moe(bent, load_device("b200_sxm"), check=False).constants

    def worst(fit: MoeFit) -> float:
        said = expert_seconds(bent, load_device("b200_sxm"), evenly(bent))(fit, clean)
        return float(np.abs(said / bent.measured_s[clean] - 1.0).max())

    assert worst(shared["b200_sxm", TRUE.kernel, TRUE.dtype]) < 0.05 < 0.1 < worst(own)


def test_single_tokens_count_however_they_were_routed() -> None:
    """A kernel that routes for itself, timed alone with one token under power-law routing only: told of that, too."""
    n = np.array([1.0, 1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0])
    truth = TRUE.model_copy(update={"kernel": "vllm_triton", "dtype": "mxfp4"})
    alike = {"hidden_size": 2880.0, "inter_size": 2880.0, "topk": 4.0, "num_experts": 32.0, "moe_ep_size": 1.0}
    shape = {"num_tokens": n, "moe_tp_size": np.array([8.0, 1.0] * 4), **{k: np.full(8, v) for k, v in alike.items()}}
    ids = tuple(f"row_{i}" for i in range(8))
    series = Series("moe", "h100_sxm", "vllm_triton", "mxfp4", "balanced", "vllm-0.24.0", shape, np.ones(8), ids)
    device, one = load_device("h100_sxm"), n == 1.0
    seconds = expert_seconds(series, device, evenly(series))(truth, np.ones(8, dtype=bool))
    every = replace(series, measured_s=np.where(one, 2.5 * seconds, seconds))
    skewed = replace(every.take(one), variant="power_law_1.2")

    def missed(fit: MoeFit) -> float:
        said = expert_seconds(every, device, evenly(every))(fit, one)
        return float(np.abs(np.log(said / every.measured_s[one])).mean())

    balanced = every.take(~one)
    with_them = fit_moe(balanced, device, skewed, check=False)
    assert len(with_them.series.measured_s) == 8
    assert missed(with_them.constants) < 0.5 * missed(fit_moe(balanced, device, check=False).constants)
    spread = replace(skewed, shape={**skewed.shape, "moe_ep_size": np.full(2, 8.0)})
    assert len(fit_moe(balanced, device, spread, check=False).series.measured_s) == 6  # whose device is the busiest?


def test_a_kernel_of_one_device_keeps_its_own_constants() -> None:
    assert not fit_shared([timings("b200_sxm", slice(0, 0))[0]], check=False)
    assert not fit_shared([timings(name, slice(0, 0))[0] for name in ("b200_sxm", "rtx_pro_6000_server")], check=False)


def test_a_lent_kernel_is_that_of_the_device_that_lends_it() -> None:
    held = load_device_calibration("gb300")
    lent = held.model_copy(update={"moe": (TRUE.model_copy(update={"timed_on": "gb300", "fixed": 1.0}),)})
    told = with_shared(lent, {("gb300", TRUE.kernel, TRUE.dtype): TRUE}).moe[0]
    assert (told.fixed, told.timed_on) == (TRUE.fixed, "gb300")
    assert with_shared(lent, {("gb200", TRUE.kernel, TRUE.dtype): TRUE}) == lent
