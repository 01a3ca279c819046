"""Kernel timings on the device at hand with plain PyTorch, in the form that `rlperf calibrate kernels` reads.

PyTorch is optional: it is imported when a measurement starts. Random data (zeros and constants run over 10 % faster),
device events, the median of several batches of launches. CUDA and ROCm (`torch.cuda`), Ascend (`torch_npu`) and Intel
(`torch.xpu`) devices. This file needs nothing else of rlperf, so that it can be copied alone to where the device is:
``python measure.py --out timings``. Long for that reason.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from rlperf.errors import SpecError
except ImportError:  # the file stands alone
    SpecError = type("SpecError", (ValueError,), {})  # type: ignore[misc,assignment]


SUITES = ("gemm", "attention", "decode", "moe", "stream", "collectives", "engine")
"""What can be measured; collectives need torchrun with two devices or more, engine needs vLLM."""
KERNELS = SUITES[:5]
"""Suites that need one device and PyTorch alone."""

GEMM_M = (1, 16, 64, 128, 256, 1024, 4096, 8192)
GEMM_WIDTHS = (1024, 2048, 4096, 8192, 12288)
PREFILL = ((1, 4, 16), (128, 512, 1024, 2048, 4096, 8192), ((8, 1), (16, 2), (32, 8), (32, 32)))
DECODE = ((1, 8, 64, 256), (512, 1024, 4096, 16384, 65536), ((8, 1), (16, 2), (32, 8)))
EXPERTS = ((2048, 768, 8, 128), (4096, 1536, 8, 128), (4096, 14336, 2, 8))
MESSAGES = tuple(2**power for power in range(10, 29, 2))


@dataclass(frozen=True)
class Backend:
    """How PyTorch reaches a device.

    Attributes
    ----------
    device : word for tensors: cuda (ROCm too), npu, xpu
    module : torch.cuda, torch.npu or torch.xpu
    graph : name of its graphs in the module; empty: none
    collectives : library of torch.distributed
    """

    device: str
    module: Any
    graph: str
    collectives: str


BACKENDS = (("cuda", "CUDAGraph", "nccl"), ("npu", "NPUGraph", "hccl"), ("xpu", "", "xccl"))
"""Devices in the order in which they are looked for."""


def backend_of(torch: Any) -> Backend:
    """The first kind of device that PyTorch finds; `SpecError` where it finds none."""
    for device, graph, collectives in BACKENDS:
        if device == "npu" and not hasattr(torch, "npu"):
            try:
                importlib.import_module("torch_npu")  # adds torch.npu
            except ImportError:
                continue
        module = getattr(torch, device, None)
        if module is not None and module.is_available():
            return Backend(device, module, graph, collectives)
    raise SpecError("measuring needs a GPU, and PyTorch finds none here")


@dataclass(frozen=True)
class Timer:
    """Median seconds of a function on the device."""

    torch: Any
    backend: Backend
    repeats: int = 5

    def seconds(self, run: Callable[[], object]) -> float:
        """Median over ``repeats`` batches; a batch has as many launches as fit into some 20 ms."""
        for _ in range(3):
            run()
        self.backend.module.synchronize()
        first = self._batch(run, 3)
        launches = max(3, min(200, int(0.02 / max(first, 1e-7))))
        return statistics.median(self._batch(run, launches) for _ in range(self.repeats))

    def _batch(self, run: Callable[[], object], launches: int) -> float:
        event = self.backend.module.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        for _ in range(launches):
            run()
        end.record()
        self.backend.module.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / launches

    def graphed(self, run: Callable[[], object]) -> float:
        """The same of a graph of 20 launches, so that the host does not show; eager where capture fails."""
        module = self.backend.module
        try:
            graph = getattr(module, self.backend.graph)()
            for _ in range(3):
                run()
            module.synchronize()
            with module.graph(graph):
                for _ in range(20):
                    run()
        except (RuntimeError, AttributeError, TypeError):
            return self.seconds(run)
        return self.seconds(graph.replay) / 20.0

    def tried(self, run: Callable[[], object], *shape: object) -> float | None:
        """The same, or None where the device cannot run it (it has too little memory, or no such kernel)."""
        try:
            return self.graphed(run)
        except RuntimeError as error:
            print(f"left out {shape}: {error}", file=sys.stderr)
            return None

    def random(self, *shape: int) -> Any:
        """Normal values in 16 bits on the device."""
        return self.torch.randn(*shape, device=self.backend.device, dtype=self.torch.bfloat16)


def require_torch() -> Any:
    """PyTorch, or a `SpecError` that says what is missing."""
    try:
        import torch
    except ImportError as error:
        raise SpecError(
            "measuring needs PyTorch, which is not installed: pip install torch (rlperf itself does not need it)"
        ) from error
    return torch


def device_name(backend: Backend) -> str:
    """Profile name of the device at hand where rlperf knows it, else the driver's name in lower case."""
    text = re.sub(r"[^a-z0-9]+", "_", backend.module.get_device_name().lower()).strip("_")
    try:
        from rlperf.specs.profiles import profile_names
    except ImportError:
        return text
    # drivers say SXM4-80GB where profiles say 80g_sxm, and nothing where an H100 is not PCIe
    words = {re.sub(r"^(sxm)\d$|^(\d+g)b$", r"\1\2", word) for word in text.split("_")}
    names = profile_names("devices")
    joined = [name for name in names if "_" in name and name.replace("_", "") in text.replace("_", "")]  # Ascend910B
    alike = joined or [name for name in names if name.split("_")[0] in words]
    ranked = sorted(alike, key=lambda name: (-len(set(name.split("_")) & words), not name.endswith("_sxm"), len(name)))
    return ranked[0] if ranked else text


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
    backend = backend_of(torch)
    if "collectives" in suites and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SpecError(
            "collectives need several devices: torchrun --nproc-per-node N $(which rlperf) calibrate measure ..."
        )
    timer, name = Timer(torch, backend), device_name(backend)
    platform = "rocm-" if getattr(getattr(torch, "version", None), "hip", None) else ""
    software = f"{platform}torch-{torch.__version__.split('+')[0]}"
    written: list[Path] = []
    for suite in suites:
        if suite == "engine":
            written += _engine(Path(folder), name, limit)
            continue
        columns, rows = _RUNNERS[suite](timer, limit)
        if suite == "collectives" and int(os.environ.get("RANK", "0")) != 0:
            continue
        table = [[name, software, *row] for row in rows]
        written.append(_write(Path(folder) / f"{suite}.csv", ["gpu", "src", *columns], table))
    return written


def _write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    """A CSV, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".partly")
    fresh.write_text(text.getvalue(), encoding="utf-8")
    fresh.replace(path)
    return path


def _some(shapes: list[tuple[Any, ...]], limit: int | None) -> list[tuple[Any, ...]]:
    if limit is None or len(shapes) <= limit:
        return shapes
    return [shapes[round(index * (len(shapes) - 1) / max(limit - 1, 1))] for index in range(limit)]


Rows = tuple[list[str], list[list[object]]]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 4)


def _gemm(timer: Timer, limit: int | None) -> Rows:
    shapes = [(m, n, k) for m in GEMM_M for n in GEMM_WIDTHS for k in GEMM_WIDTHS]
    rows: list[list[object]] = []
    for m, n, k in _some(shapes, limit):
        a = timer.random(m, k)
        copies = max(1, min(8, int(2.5e8 / (2 * n * k))))  # weights together larger than any L2
        b = [timer.random(k, n) for _ in range(copies)]

        def run(a: Any = a, b: list[Any] = b) -> None:
            for weight in b:
                a @ weight

        if seconds := timer.tried(run, m, n, k):
            rows.append(["bf16", m, n, k, _us(seconds / copies)])
    return ["dtype", "m", "n", "k", "latency_us"], rows


def _qkv(timer: Timer, batch: int, queries: int, keys: int, heads: int, groups: int) -> tuple[Any, Any, Any]:
    key, value = (timer.random(batch, groups, keys, 128) for _ in range(2))
    return timer.random(batch, heads, queries, 128), key, value


def _attention(timer: Timer, limit: int | None) -> Rows:
    attend = timer.torch.nn.functional.scaled_dot_product_attention
    shapes = [(b, s, *hg) for b in PREFILL[0] for s in PREFILL[1] for hg in PREFILL[2] if b * s <= 32768]
    rows: list[list[object]] = []
    for b, s, h, g in _some(shapes, limit):
        q, k, v = _qkv(timer, b, s, s, h, g)

        def run(q: Any = q, k: Any = k, v: Any = v, grouped: bool = h != g) -> None:
            attend(q, k, v, is_causal=True, enable_gqa=grouped)

        if seconds := timer.tried(run, b, s, h, g):
            rows.append(["torch_sdpa", "bf16", b, s, h, g, 128, _us(seconds)])
    return ["kernel", "kv_cache_dtype", "batch", "seq_len", "num_heads", "num_kv_heads", "head_dim", "latency_us"], rows


def _decode(timer: Timer, limit: int | None) -> Rows:
    attend = timer.torch.nn.functional.scaled_dot_product_attention
    shapes = [(b, s, *hg) for b in DECODE[0] for s in DECODE[1] for hg in DECODE[2] if b * s * hg[1] <= 2**22]
    rows: list[list[object]] = []
    for b, s, h, g in _some(shapes, limit):
        q, k, v = _qkv(timer, b, 1, s, h, g)

        def run(q: Any = q, k: Any = k, v: Any = v, grouped: bool = h != g) -> None:
            attend(q, k, v, enable_gqa=grouped)

        if seconds := timer.tried(run, b, s, h, g):
            rows.append(["torch_sdpa", "bf16", b, s, h, g, 128, _us(seconds)])
    return ["kernel", "kv_cache_dtype", "batch", "kv_len", "num_heads", "num_kv_heads", "head_dim", "latency_us"], rows


def _moe(timer: Timer, limit: int | None) -> Rows:
    """Grouped products with plain batched matmul over equally loaded experts (balanced routing)."""
    torch = timer.torch
    shapes = [(n, *expert) for expert in EXPERTS for n in (16, 64, 256, 1024, 4096)]
    rows: list[list[object]] = []
    for n, hidden, width, active, experts in _some(shapes, limit):
        touched = min(experts, n * active)
        each = -(-n * active // touched)
        x = timer.random(touched, each, hidden)
        up = timer.random(touched, hidden, 2 * width)
        down = timer.random(touched, width, hidden)

        def run(x: Any = x, up: Any = up, down: Any = down, width: int = width) -> None:
            y = torch.bmm(x, up)
            torch.bmm(torch.nn.functional.silu(y[..., :width]) * y[..., width:], down)

        if seconds := timer.tried(run, n, hidden, width, active, experts):
            rows.append(["torch_bmm", "bf16", n, hidden, width, active, experts, 1, 1, "balanced", _us(seconds)])
        del x, up, down
    shape = ["num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
    return ["kernel", "dtype", *shape, "distribution", "latency_us"], rows


def _stream(timer: Timer, limit: int | None) -> Rows:
    torch = timer.torch
    rows: list[list[object]] = []
    for (size,) in _some([(2**power,) for power in range(14, 33)], limit):
        source = timer.random(size // 2)
        target = torch.empty_like(source)

        def run(source: Any = source, target: Any = target) -> None:
            target.copy_(source)

        if seconds := timer.tried(run, size):
            rows.append(["copy", 2 * size, _us(seconds)])
    return ["kernel", "n_bytes", "latency_us"], rows


def _kinds(dist: Any) -> Iterator[tuple[str, Callable[[Any, Any, Any], object]]]:
    """Collectives by name, of a message, a tensor like it, and one device's part of it."""
    yield "all_reduce", lambda whole, other, part: dist.all_reduce(whole)
    yield "all_gather", lambda whole, other, part: dist.all_gather_into_tensor(whole, part)
    yield "reduce_scatter", lambda whole, other, part: dist.reduce_scatter_tensor(part, whole)
    yield "all_to_all", lambda whole, other, part: dist.all_to_all_single(other, whole)


def _collectives(timer: Timer, limit: int | None) -> Rows:
    torch, backend = timer.torch, timer.backend
    dist = torch.distributed
    backend.module.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group(backend.collectives)
    size = dist.get_world_size()
    rows: list[list[object]] = []
    for name, collective in _kinds(dist):
        for (message,) in _some([(value,) for value in MESSAGES], limit):
            whole, part = timer.random(message // 2), timer.random(message // 2 // size)
            given = whole, torch.empty_like(whole), part

            def run(given: Any = given, collective: Any = collective) -> None:
                collective(*given)

            if seconds := timer.tried(run, name, message):
                rows.append([name, size, message, _us(seconds)])
    return ["collective", "num_gpus", "bytes", "latency_us"], rows


ENGINE_MODEL = "Llama-3.2-1B"
"""Shape whose weights are drawn at random: a file of that name is known to rlperf."""
ENGINE_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENGINE_LOADS = tuple((isl, running) for isl in (128, 1024, 4096) for running in (1, 8, 64, 256))
ENGINE_TOKENS = (32, 160)
"""Tokens of a short and of a long generation: their difference has no prompt in it."""


def _engine(folder: Path, device: str, limit: int | None) -> list[Path]:
    """The decode loop of vLLM on a model with random weights, in the form that `rlperf calibrate engine` reads."""
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise SpecError("the engine suite needs vLLM, which is not installed: pip install vllm") from error
    home = folder / ENGINE_MODEL
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps(ENGINE_CONFIG, indent=1), encoding="utf-8")
    engine = vllm.LLM(
        model=str(home), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192,
        enable_prefix_caching=False,
    )  # fmt: skip
    rows: list[list[object]] = []
    for number, (isl, running) in enumerate(_some(list(ENGINE_LOADS), limit)):
        short, long = (_generation_s(vllm, engine, isl, running, tokens) for tokens in ENGINE_TOKENS)
        each = (long - short) / (ENGINE_TOKENS[1] - ENGINE_TOKENS[0])
        rows.append([
            f"measured_{number:04d}", "measured", "vllm", vllm.__version__, ENGINE_MODEL, device, 1, 1, 1, 1, 1,
            "bf16", "bf16", "static_batch", isl + ENGINE_TOKENS[0], ENGINE_TOKENS[1] - ENGINE_TOKENS[0], running,
            round(each * 1e3, 4), "exact", "rlperf calibrate measure",
        ])  # fmt: skip
    return [_write(folder / "engine.csv", _ENGINE_COLUMNS, rows)]


_ENGINE_COLUMNS = (
    "row_id", "group", "engine", "engine_version", "architecture", "gpu", "n_gpus", "tensor_parallel",
    "pipeline_parallel", "expert_parallel", "attention_data_parallel", "gemm_dtype", "kv_dtype", "mode", "isl", "osl",
    "concurrency", "measured_tpot_ms", "quality", "source",
)  # fmt: skip


def _generation_s(vllm: Any, engine: Any, isl: int, running: int, tokens: int) -> float:
    """Seconds of a batch of equal requests, the fastest of three; the first of all compiles and captures."""
    prompts = [{"prompt_token_ids": [(17 * row + 3 * i) % 30000 + 3 for i in range(isl)]} for row in range(running)]
    wanted = vllm.SamplingParams(
        max_tokens=tokens, min_tokens=tokens, ignore_eos=True, temperature=1.0, detokenize=False
    )
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        engine.generate(prompts, wanted, use_tqdm=False)
        best = min(best, time.perf_counter() - start)
    return best


_RUNNERS: dict[str, Callable[[Timer, int | None], Rows]] = {
    "gemm": _gemm,
    "attention": _attention,
    "decode": _decode,
    "moe": _moe,
    "stream": _stream,
    "collectives": _collectives,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """What `rlperf calibrate measure` does, for a machine without rlperf."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("timings"))
    parser.add_argument("--suite", action="append", choices=SUITES)
    parser.add_argument("--limit", type=int)
    given = parser.parse_args(arguments)
    for path in measure(given.suite or KERNELS, given.out, limit=given.limit):
        print(path)


if __name__ == "__main__":
    main()
