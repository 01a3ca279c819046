"""Kernel timings on the device at hand with plain PyTorch, in the form that `rlperf calibrate kernels` reads.

PyTorch is optional: it is imported when a measurement starts. Random data (zeros and constants run over 10 % faster),
device events, the median of several batches of launches.
"""

from __future__ import annotations

import csv
import io
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlperf.errors import SpecError
from rlperf.specs.writer import write_atomic

SUITES = ("gemm", "attention", "decode", "moe", "stream", "nccl")
"""What can be measured; nccl needs torchrun with two devices or more."""

GEMM_M = (1, 16, 64, 128, 256, 1024, 4096, 8192)
GEMM_WIDTHS = (1024, 2048, 4096, 8192, 12288)
PREFILL = ((1, 4, 16), (128, 512, 1024, 2048, 4096, 8192), ((8, 1), (16, 2), (32, 8), (32, 32)))
DECODE = ((1, 8, 64, 256), (512, 1024, 4096, 16384, 65536), ((8, 1), (16, 2), (32, 8)))
EXPERTS = ((2048, 768, 8, 128), (4096, 1536, 8, 128), (4096, 14336, 2, 8))
MESSAGES = tuple(2**power for power in range(10, 29, 2))


@dataclass(frozen=True)
class Timer:
    """Median seconds of a function on the device."""

    torch: Any
    repeats: int = 5

    def seconds(self, run: Callable[[], object]) -> float:
        """Median over ``repeats`` batches; a batch has as many launches as fit into some 20 ms."""
        cuda = self.torch.cuda
        for _ in range(3):
            run()
        cuda.synchronize()
        first = self._batch(run, 3)
        launches = max(3, min(200, int(0.02 / max(first, 1e-7))))
        return statistics.median(self._batch(run, launches) for _ in range(self.repeats))

    def _batch(self, run: Callable[[], object], launches: int) -> float:
        cuda = self.torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        for _ in range(launches):
            run()
        end.record()
        cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / launches

    def graphed(self, run: Callable[[], object]) -> float:
        """The same of a CUDA graph of 20 launches, so that the host does not show; eager where capture fails."""
        try:
            graph = self.torch.cuda.CUDAGraph()
            for _ in range(3):
                run()
            self.torch.cuda.synchronize()
            with self.torch.cuda.graph(graph):
                for _ in range(20):
                    run()
        except RuntimeError:
            return self.seconds(run)
        return self.seconds(graph.replay) / 20.0


def require_torch() -> Any:
    """PyTorch with a device, or a `SpecError` that says what is missing."""
    try:
        import torch
    except ImportError as error:
        raise SpecError(
            "measuring needs PyTorch, which is not installed: pip install torch (rlperf itself does not need it)"
        ) from error
    if not torch.cuda.is_available():
        raise SpecError("measuring needs a GPU, and PyTorch finds none here")
    return torch


def device_name(torch: Any) -> str:
    """Profile name of the device at hand where rlperf knows it, else the driver's name in lower case."""
    from rlperf.specs.profiles import profile_names

    text = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")
    words = set(text.split("_")) - {"nvidia", "gpu"}
    for name in sorted(profile_names("devices"), key=len, reverse=True):
        parts = name.split("_")
        if parts[0] in words and (len(parts) == 1 or set(parts[1:]) & words):
            return name
    for name in profile_names("devices"):
        if name.split("_")[0] in words:
            return name
    return text


def measure(suites: Sequence[str], folder: Path | str, *, limit: int | None = None) -> list[Path]:
    """Run suites and write one CSV each.

    Parameters
    ----------
    suites : of `SUITES`
    folder : where the files go
    limit : at most so many shapes a suite, evenly spread (a quick look)
    """
    unknown = sorted(set(suites) - set(SUITES))
    if unknown:
        raise SpecError(f"unknown suite {', '.join(unknown)}; known: {', '.join(SUITES)}")
    torch = require_torch()
    if "nccl" in suites and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SpecError(
            "the nccl suite needs several devices: torchrun --nproc-per-node N $(which rlperf) calibrate ..."
        )
    timer, name = Timer(torch), device_name(torch)
    software = f"torch-{torch.__version__.split('+')[0]}"
    written: list[Path] = []
    for suite in suites:
        columns, rows = _RUNNERS[suite](timer, limit)
        if suite == "nccl" and int(os.environ.get("RANK", "0")) != 0:
            continue
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["gpu", "src", *columns])
        writer.writerows([name, software, *row] for row in rows)
        written.append(write_atomic(Path(folder) / f"{suite}.csv", text.getvalue()))
    return written


def _some(shapes: list[tuple[Any, ...]], limit: int | None) -> list[tuple[Any, ...]]:
    if limit is None or len(shapes) <= limit:
        return shapes
    return [shapes[round(index * (len(shapes) - 1) / max(limit - 1, 1))] for index in range(limit)]


Rows = tuple[list[str], list[list[object]]]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 4)


def _gemm(timer: Timer, limit: int | None) -> Rows:
    torch = timer.torch
    shapes = [(m, n, k) for m in GEMM_M for n in GEMM_WIDTHS for k in GEMM_WIDTHS]
    rows: list[list[object]] = []
    for m, n, k in _some(shapes, limit):
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        copies = max(1, min(8, int(2.5e8 / (2 * n * k))))  # weights together larger than any L2
        b = [torch.randn(k, n, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]

        def run(a: Any = a, b: list[Any] = b) -> None:
            for weight in b:
                a @ weight

        rows.append(["bf16", m, n, k, _us(timer.graphed(run) / copies)])
    return ["dtype", "m", "n", "k", "latency_us"], rows


def _qkv(torch: Any, batch: int, queries: int, keys: int, heads: int, groups: int) -> tuple[Any, Any, Any]:
    def fill(length: int, count: int) -> Any:
        return torch.randn(batch, count, length, 128, device="cuda", dtype=torch.bfloat16)

    return fill(queries, heads), fill(keys, groups), fill(keys, groups)


def _attention(timer: Timer, limit: int | None) -> Rows:
    torch = timer.torch
    attend = torch.nn.functional.scaled_dot_product_attention
    shapes = [(b, s, *hg) for b in PREFILL[0] for s in PREFILL[1] for hg in PREFILL[2] if b * s <= 32768]
    rows: list[list[object]] = []
    for b, s, h, g in _some(shapes, limit):
        q, k, v = _qkv(torch, b, s, s, h, g)

        def run(q: Any = q, k: Any = k, v: Any = v, grouped: bool = h != g) -> None:
            attend(q, k, v, is_causal=True, enable_gqa=grouped)

        rows.append(["torch_sdpa", "bf16", b, s, h, g, 128, _us(timer.graphed(run))])
    return ["kernel", "kv_cache_dtype", "batch", "seq_len", "num_heads", "num_kv_heads", "head_dim", "latency_us"], rows


def _decode(timer: Timer, limit: int | None) -> Rows:
    torch = timer.torch
    attend = torch.nn.functional.scaled_dot_product_attention
    shapes = [(b, s, *hg) for b in DECODE[0] for s in DECODE[1] for hg in DECODE[2] if b * s * hg[1] <= 2**22]
    rows: list[list[object]] = []
    for b, s, h, g in _some(shapes, limit):
        q, k, v = _qkv(torch, b, 1, s, h, g)

        def run(q: Any = q, k: Any = k, v: Any = v, grouped: bool = h != g) -> None:
            attend(q, k, v, enable_gqa=grouped)

        rows.append(["torch_sdpa", "bf16", b, s, h, g, 128, _us(timer.graphed(run))])
    return ["kernel", "kv_cache_dtype", "batch", "kv_len", "num_heads", "num_kv_heads", "head_dim", "latency_us"], rows


def _moe(timer: Timer, limit: int | None) -> Rows:
    """Grouped products with plain batched matmul over equally loaded experts (balanced routing)."""
    torch = timer.torch
    shapes = [(n, *expert) for expert in EXPERTS for n in (16, 64, 256, 1024, 4096)]
    rows: list[list[object]] = []
    for n, hidden, width, active, experts in _some(shapes, limit):
        touched = min(experts, n * active)
        each = -(-n * active // touched)
        x = torch.randn(touched, each, hidden, device="cuda", dtype=torch.bfloat16)
        up = torch.randn(touched, hidden, 2 * width, device="cuda", dtype=torch.bfloat16)
        down = torch.randn(touched, width, hidden, device="cuda", dtype=torch.bfloat16)

        def run(x: Any = x, up: Any = up, down: Any = down, width: int = width) -> None:
            y = torch.bmm(x, up)
            torch.bmm(torch.nn.functional.silu(y[..., :width]) * y[..., width:], down)

        rows.append(["torch_bmm", "bf16", n, hidden, width, active, experts, 1, 1, "balanced", _us(timer.graphed(run))])
        del x, up, down
    shape = ["num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
    return ["kernel", "dtype", *shape, "distribution", "latency_us"], rows


def _stream(timer: Timer, limit: int | None) -> Rows:
    torch = timer.torch
    rows: list[list[object]] = []
    for (size,) in _some([(2**power,) for power in range(14, 33)], limit):
        source = torch.randn(size // 2, device="cuda").to(torch.bfloat16)
        target = torch.empty_like(source)

        def run(source: Any = source, target: Any = target) -> None:
            target.copy_(source)

        rows.append(["copy", 2 * size, _us(timer.graphed(run))])
    return ["kernel", "n_bytes", "latency_us"], rows


def _collectives(dist: Any) -> Iterator[tuple[str, Callable[[Any, Any], object]]]:
    yield "all_reduce", lambda x, parts: dist.all_reduce(x)
    yield "all_gather", lambda x, parts: dist.all_gather_into_tensor(x, parts)
    yield "reduce_scatter", lambda x, parts: dist.reduce_scatter_tensor(parts, x)


def _nccl(timer: Timer, limit: int | None) -> Rows:
    torch = timer.torch
    dist = torch.distributed
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    size = dist.get_world_size()
    rows: list[list[object]] = []
    for name, collective in _collectives(dist):
        for (message,) in _some([(value,) for value in MESSAGES], limit):
            x = torch.randn(message // 2, device="cuda").to(torch.bfloat16)
            parts = torch.empty(message // 2 // size, device="cuda", dtype=torch.bfloat16)

            def run(x: Any = x, parts: Any = parts, collective: Any = collective) -> None:
                collective(x, parts)

            rows.append([name, size, message, _us(timer.seconds(run))])
    return ["collective", "num_gpus", "bytes", "latency_us"], rows


_RUNNERS: dict[str, Callable[[Timer, int | None], Rows]] = {
    "gemm": _gemm,
    "attention": _attention,
    "decode": _decode,
    "moe": _moe,
    "stream": _stream,
    "nccl": _nccl,
}
