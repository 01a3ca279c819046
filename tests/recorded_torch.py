"""A stand-in for PyTorch whose kernels take as long as recorded ones: tensors have shapes, and a clock goes on."""

from __future__ import annotations

import csv
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Clock:
    """Seconds on the device; work inside a graph's capture counts when it is replayed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.captured: float | None = None

    def work(self, seconds: float) -> None:
        if self.captured is None:
            self.now += seconds
        else:
            self.captured += seconds


class Timings:
    """Recorded kernels of one device by their shape [s]; one that was not recorded is a RuntimeError."""

    def __init__(self, folder: Path, gpu: str, group: int = 8) -> None:
        self.gemm = self._read(folder / "gemm.csv", gpu, ("m", "n", "k"), dtype="bfloat16")
        heads = ("num_heads", "num_kv_heads")
        self.prefill = self._read(folder / "attn_prefill.csv", gpu, ("batch", "seq_len", *heads), kv_cache_dtype="bf16")
        self.decode = self._read(folder / "attn_decode.csv", gpu, ("batch", "kv_len", *heads), kv_cache_dtype="bf16")
        names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
        ours = {"dtype": "bfloat16", "moe_ep_size": "1", "moe_tp_size": "1", "distribution": "balanced"}
        self.moe = {
            (min(e, n * k), -(-n * k // min(e, n * k)), h, 2 * w): seconds
            for (n, h, w, k, e), seconds in self._read(folder / "moe.csv", gpu, names, **ours).items()
        }
        self.collectives = {
            name: self._read(folder / "nccl.csv", gpu, ("bytes",), collective=name, num_gpus=str(group))
            for name in ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
        }

    def _read(self, path: Path, gpu: str, names: tuple[str, ...], **same: str) -> dict[tuple[int, ...], float]:
        found: dict[tuple[int, ...], float] = {}
        with path.open() as file:
            for row in csv.DictReader(file):
                if row["gpu"] == gpu and all(row.get(key) == value for key, value in same.items()):
                    shape = tuple(int(float(row[name])) for name in names)
                    found.setdefault(shape, float(row["latency_us"]) * 1e-6)
        return found


class Tensor:
    """A shape; operations take recorded time."""

    def __init__(self, world: RecordedTorch, *shape: int) -> None:
        self.world, self.shape = world, shape

    def __matmul__(self, other: Tensor) -> Tensor:
        (m, k), (_, n) = self.shape, other.shape
        self.world.take(self.world.timings.gemm, (m, n, k))
        return Tensor(self.world, m, n)

    def __getitem__(self, key: Any) -> Tensor:
        return self

    def __mul__(self, other: Tensor) -> Tensor:
        return self

    def copy_(self, source: Tensor) -> None:
        self.world.clock.work(2e-6 + 4.0 * self.shape[0] / 2.9e12)


class RecordedTorch(types.ModuleType):
    """What `rlperf.calibrate.measure` asks of PyTorch."""

    __version__ = "2.9.0+recorded"

    def __init__(self, folder: Path, gpu: str, name: str, device: str = "cuda", group: int = 8) -> None:
        super().__init__("torch")
        self.timings, self.clock, self.group = Timings(folder, gpu, group), Clock(), group
        self.bfloat16 = "bf16"
        self.nn = types.SimpleNamespace(
            functional=types.SimpleNamespace(scaled_dot_product_attention=self._attend, silu=lambda x: x)
        )
        graph = {"cuda": "CUDAGraph", "npu": "NPUGraph"}.get(device, "")
        module = types.SimpleNamespace(
            is_available=lambda: True, synchronize=lambda: None, get_device_name=lambda: name, Event=self._event(),
            set_device=lambda rank: None, graph=self._capture, **({graph: lambda: Graph(self.clock)} if graph else {}),
        )  # fmt: skip
        if device != "cuda":
            self.cuda = types.SimpleNamespace(is_available=lambda: False)
        setattr(self, device, module)
        self.asked: list[str] = []
        self.distributed = types.SimpleNamespace(
            is_initialized=lambda: False, init_process_group=self.asked.append, get_world_size=lambda: group,
            all_reduce=lambda x: self._collective("all_reduce", x),
            all_gather_into_tensor=lambda x, part: self._collective("all_gather", x),
            reduce_scatter_tensor=lambda part, x: self._collective("reduce_scatter", x),
            all_to_all_single=lambda x, y: self._collective("alltoall", x),
        )  # fmt: skip

    def take(self, table: dict[tuple[int, ...], float], shape: tuple[int, ...]) -> None:
        if shape not in table:
            raise RuntimeError(f"{shape} was not recorded")
        self.clock.work(table[shape])

    def randn(self, *shape: int, device: str, dtype: str) -> Tensor:
        return Tensor(self, *shape)

    def empty_like(self, tensor: Tensor) -> Tensor:
        return Tensor(self, *tensor.shape)

    def bmm(self, x: Tensor, y: Tensor) -> Tensor:
        """The first of an expert layer's two products takes the recorded time of the fused kernel."""
        shape = (*x.shape, y.shape[2])
        if shape in self.timings.moe:
            self.take(self.timings.moe, shape)
        return Tensor(self, *x.shape[:2], y.shape[2])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, enable_gqa: bool = False) -> None:
        table = self.timings.prefill if is_causal else self.timings.decode
        self.take(table, (q.shape[0], k.shape[2], q.shape[1], k.shape[1]))

    def _collective(self, name: str, x: Tensor) -> None:
        self.take(self.timings.collectives[name], (2 * x.shape[0],))

    @contextmanager
    def _capture(self, graph: Graph) -> Iterator[None]:
        self.clock.captured = 0.0
        yield
        graph.seconds, self.clock.captured = self.clock.captured, None

    def _event(self) -> Callable[..., Any]:
        clock = self.clock

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = clock.now

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) * 1e3

        return Event


class Graph:
    """What was captured, replayed."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds = clock, 0.0

    def replay(self) -> None:
        self.clock.work(self.seconds)
