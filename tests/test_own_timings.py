"""A card of one's own, timed in part: whose constants it runs on, and what its files are told when they are others'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.kernel_tables import read_series
from rlperf.calibrate.kernels import calibration_text, fit_device
from rlperf.cost.basis import serving_basis
from rlperf.cost.operators import decode_operators
from rlperf.cost.replica import Replica
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_architecture

SHEET = """name: mine
title: "a card of two generations ago"
vendor: NVIDIA
generation: "Ampere sm86"
peaks: {bf16: 150 TFLOP/s}
memory: 48 GB
memory_bandwidth: 696 GB/s
memory_type: GDDR6
host_link: PCIe4
host_bandwidth: 31.5 GB/s
relative: rtx_a6000 # which nobody timed either: its own relative is L40S
sources: {"*": "made up for this test"}
"""
PEAK, READ = 150e12, 696e9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "mine.yaml").write_text(SHEET)
    return tmp_path


def _write(path: Path, columns: str, rows: list[list[object]]) -> Path:
    path.write_text("\n".join([columns, *(",".join(map(str, row)) for row in rows)]))
    return path


def products(folder: Path) -> Path:
    rows: list[list[object]] = []
    for n, k in ((2560, 2560), (6144, 4096), (4096, 14336), (28672, 4096)):
        for m in (1, 8, 32, 64, 128, 512, 2048, 8192):
            work_s, read_s = 2.0 * m * n * k / (0.8 * PEAK), 2.0 * (m * k + n * k + m * n) / (0.85 * READ)
            rows.append(["mine", "bf16", m, n, k, 3.0 + 1e6 * max(work_s, read_s)])
    return _write(folder / "products.csv", "gpu,dtype,m,n,k,latency_us", rows)


def attention(folder: Path) -> list[Path]:
    """Prompts and decodes of 32 heads and 8 of keys, of 128."""
    shared = "gpu,kernel,kv_cache_dtype,batch,{},num_heads,num_kv_heads,head_dim,latency_us"
    prompts: list[list[object]] = []
    decodes: list[list[object]] = []
    for batch in (1, 2, 4, 8):
        for length in (512, 1024, 4096, 16384):
            work_s, read_s = 2.0 * batch * length**2 * 32 * 128 / (0.5 * PEAK), batch * length * 4096.0 / (0.8 * READ)
            prompts.append(["mine", "flash_attn_fa2", "bf16", batch, length, 32, 8, 128, 5.0 + 1e6 * work_s])
            decodes.append(["mine", "flash_attn_fa2", "bf16", batch, length, 32, 8, 128, 5.0 + 1e6 * read_s])
    return [
        _write(folder / "prompts.csv", shared.format("seq_len"), prompts),
        _write(folder / "decodes.csv", shared.format("kv_len"), decodes),
    ]


def _held(folder: Path, files: list[Path], **how: bool) -> None:
    calibration, _ = fit_device(files, check=False, folder=folder, **how)
    path = folder / "calibrations" / "devices" / "mine.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(calibration_text(calibration))


def test_a_card_timed_in_part_says_whose_constants_the_rest_are(folder: Path) -> None:
    """The file of its products alone called all that it had taken over its own, in the interval of what was timed; and
    a card whose relative was not timed either could not be fitted at all."""
    engine, arch = load_engine_calibration("vllm"), load_architecture("Qwen3-8B")
    lent = load_hardware("mine", folder=folder)
    assert lent.calibration.extrapolated_from == "l40s"
    for _ in range(2):  # fitted again, on what it is itself by now, it stays what it is
        _held(folder, [products(folder)])
        own = load_hardware("mine", folder=folder)
        assert (own.calibration.extrapolated_from, own.calibration.timed) == ("l40s", ("gemm",))
        assert own.calibration.gemm[0].compute == pytest.approx(0.8, rel=0.05)
    known, before = (serving_basis(arch, hardware, engine) for hardware in (own, lent))
    assert known.spread == before.spread and known.extrapolated
    assert "mine runs on the constants of l40s beside its own of gemm" in known.reasons
    for one, other in zip(*(_decoded(hardware) for hardware in (own, lent)), strict=True):
        assert one == pytest.approx(other, rel=1e-3)  # what it borrows is brought to it as for a card that nobody timed
    experts = {fit.dtype: fit for fit in own.calibration.moe}
    assert {fit.timed_on for fit in experts.values()} == {"l40s"}
    lends = {fit.dtype: fit for fit in lent.calibration.moe}
    assert experts["bf16"].compute == pytest.approx(lends["bf16"].compute)


def _decoded(hardware: Hardware) -> list[float]:
    replica = Replica.of(load_architecture("Qwen3-8B"), hardware, load_engine_calibration("vllm"), Layout.of(), "bf16")
    running = np.array([4.0, 64.0])
    return [float(value) for each in decode_operators(replica, running, running * 4096.0) for value in each.seconds]


@pytest.mark.parametrize("add", [False, True])
def test_a_card_with_timings_of_all_that_every_model_runs_stands_on_its_own(folder: Path, add: bool) -> None:
    _held(folder, [products(folder)], add=add)
    assert load_hardware("mine", folder=folder).calibration.timed == ("gemm",)
    prompts, decodes = attention(folder)
    _held(folder, [prompts], add=add)
    assert load_hardware("mine", folder=folder).calibration.timed == ("gemm", "prefill")
    _held(folder, [products(folder), prompts, decodes])
    own = load_hardware("mine", folder=folder).calibration
    assert (own.extrapolated_from, own.timed) == (None, ())
    assert own.spread.high < 1.2


def test_a_file_of_other_columns_is_told_what_is_due(tmp_path: Path) -> None:
    """Every column of every kind stood in one line of 1,500 characters."""
    other = _write(tmp_path / "mine.csv", "device,M,N,K,latency_us", [["mine", 1, 2, 3, 4.0]])
    with pytest.raises(SpecError, match=r"of gemm its columns .* are due, of which it lacks dtype, gpu, k, m, n"):
        read_series(other)
    strange = _write(tmp_path / "strange.csv", "a,b", [[1, 2]])
    with pytest.raises(SpecError, match="calibrate measure"):
        read_series(strange)
