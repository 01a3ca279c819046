"""Kernel timings from CSV files and nccl-tests output, as series of equal kind, device, kernel and dtype."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlperf.calibrate.rows_beside import beside
from rlperf.errors import Problem, SpecError
from rlperf.layout import FloatArray
from rlperf.specs.reader import csv_rows, read_text
from rlperf.units import MOST

DTYPE_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "bf16", "sq": "int8", "float8": "fp8",
    "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "w4a8_mxfp4",
}  # fmt: skip
DEVICE_NAMES = {"a100_sxm": "a100_80g_sxm"}
COLLECTIVE_NAMES = {"alltoall": "all_to_all", "allreduce": "all_reduce", "allgather": "all_gather"}

# Columns that tell what a file holds: kind, the columns that are its shape, the columns that must be there.
KINDS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "gemm": (("m", "n", "k"), frozenset({"gpu", "dtype", "m", "n", "k", "latency_us"})),
    "prefill": (
        ("batch", "seq_len", "num_heads", "num_kv_heads", "head_dim", "window_size"),
        frozenset({"gpu", "kernel", "kv_cache_dtype", "batch", "seq_len", "num_heads", "latency_us"}),
    ),
    "encoder": (
        ("batch", "seq_len", "num_heads", "head_dim"),
        frozenset({"gpu", "kernel", "attn_dtype", "batch", "seq_len", "num_heads", "head_dim", "latency_us"}),
    ),
    "decode": (
        ("batch", "kv_len", "num_heads", "num_kv_heads", "head_dim", "window_size"),
        frozenset({"gpu", "kernel", "kv_cache_dtype", "batch", "kv_len", "num_heads", "latency_us"}),
    ),
    "ranked_experts": (
        ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_ep_size"),
        frozenset({"gpu", "kernel", "dtype", "num_tokens", "rank0_num_tokens", "moe_ep_size", "latency_us"}),
    ),
    "moe": (
        ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
        frozenset({"gpu", "kernel", "dtype", "num_tokens", "inter_size", "moe_ep_size", "latency_us"}),
    ),
    "collective": (("num_gpus", "bytes"), frozenset({"gpu", "num_gpus", "bytes", "latency_us"})),
    "dispatch": (
        ("node_num", "hidden_size", "num_token", "num_topk", "num_experts"),
        frozenset({"gpu", "node_num", "num_token", "dispatch_us", "combine_us"}),
    ),
    "dispatch_normal": (
        ("node_num", "hidden_size", "num_token", "num_topk", "num_experts"),
        frozenset({"gpu", "node_num", "num_token", "dispatch_transmit_us", "combine_transmit_us"}),
    ),
    "engine_dispatch": (
        ("node_num", "hidden_size", "num_token", "num_topk", "num_experts"),
        frozenset({"gpu", "src", "backend", "phase", "comm_dtype", "ep_size", "node_num", "num_tokens", "latency_us"}),
    ),
    "exchange": (
        ("ep_size", "hidden_size", "num_tokens", "topk"),
        frozenset({"gpu", "kernel", "phase", "dtype", "ep_size", "hidden_size", "topk", "num_tokens", "latency_us"}),
    ),
    "scan": (
        ("batch", "seq_len", "num_v_heads", "head_k_dim", "head_v_dim"),
        frozenset({"gpu", "kernel", "phase", "batch", "seq_len", "num_v_heads", "latency_us"}),
    ),
    "kda": (
        ("batch", "seq_len", "num_heads", "head_dim"),
        frozenset({"gpu", "kernel", "phase", "batch", "seq_len", "num_heads", "head_dim", "d_conv", "latency_us"}),
    ),
    "mamba": (
        ("batch", "seq_len", "nheads", "head_dim", "d_state", "chunk_size"),
        frozenset({"gpu", "kernel", "phase", "batch", "seq_len", "nheads", "head_dim", "d_state", "latency_us"}),
    ),
    "streams": (
        ("num_tokens", "hidden_size", "hc_mult", "num_sites", "before"),
        frozenset({"gpu", "kernel", "op", "num_tokens", "hidden_size", "hc_mult", "num_sites", "latency_us"}),
    ),
    "chosen": (
        ("batch", "q_len", "past_len", "compress_ratio"),
        frozenset({"gpu", "kernel", "op", "model", "compress_ratio", "batch", "q_len", "past_len", "latency_us"}),
    ),
    "sparse": (
        ("num_heads", "batch", "q_len", "past_len"),
        frozenset({"gpu", "kernel", "phase", "model", "gemm_dtype", "kv_cache_dtype", "past_len", "latency_us"}),
    ),
    "latent": (
        ("num_heads", "batch", "q_len", "past_len"),
        frozenset({"gpu", "kernel", "phase", "attn_dtype", "kv_cache_dtype", "num_heads", "past_len", "latency_us"}),
    ),
    "absorption": (
        ("num_tokens", "num_heads"),
        frozenset({"gpu", "kernel", "op", "dtype", "num_tokens", "num_heads", "latency_us"}),
    ),
    "quantise": (("n_bytes",), frozenset({"gpu", "src", "kernel", "op", "m", "k", "latency_us"})),
    "stream": (("n_bytes",), frozenset({"gpu", "n_bytes", "latency_us"})),
}

CONVOLUTION = "convolution"
"""What stands behind a mixer's name where the timings are of the convolution in front of it."""
_CONVOLVED = {
    "scan": (("num_k_heads", "head_k_dim", 2.0), ("num_v_heads", "head_v_dim", 1.0)),
    "kda": (("num_heads", "head_dim", 3.0),),
    "mamba": (("nheads", "head_dim", 1.0), ("n_groups", "d_state", 2.0)),
}
"""Channels of the convolution in front of a recurrent mixer: heads, their width, and how many such parts there are."""
_UNSTATED = {"window_size": 0.0, "num_experts": 256.0}
"""What a row has where it does not say; widths of heads and states are 128 then."""

QUANTISED_BYTES = 3.0
"""Of a value that a pass makes eight bits of: it is read in two bytes and written in one."""


@dataclass(frozen=True)
class Series:
    """Timings of one kernel on one device.

    Attributes
    ----------
    kind, device, kernel, dtype, variant : what was timed; variant is a collective, or how tokens were routed
    software : engine and version as the file names it
    shape : column name -> values ``[rows]``
    measured_s : seconds ``[rows]``
    row_ids : ``[rows]``
    """

    kind: str
    device: str
    kernel: str
    dtype: str
    variant: str
    software: str
    shape: Mapping[str, FloatArray]
    measured_s: FloatArray
    row_ids: tuple[str, ...]

    @property
    def name(self) -> str:
        """``kind/device/kernel/dtype/variant`` without what is empty."""
        return "/".join(part for part in (self.kind, self.device, self.kernel, self.dtype, self.variant) if part)

    def take(self, mask: np.ndarray) -> Series:
        """Rows of a mask."""
        shape = {name: values[mask] for name, values in self.shape.items()}
        ids = tuple(row for row, keep in zip(self.row_ids, mask, strict=True) if keep)
        return Series(
            self.kind, self.device, self.kernel, self.dtype, self.variant, self.software, shape,
            self.measured_s[mask], ids,
        )  # fmt: skip


def joined_series(first: Series, second: Series) -> Series:
    """Rows of both under the name of the first; their shapes have the same columns."""
    return replace(
        first,
        software=", ".join(dict.fromkeys((first.software, second.software))) if second.row_ids else first.software,
        shape={name: np.concatenate([values, second.shape[name]]) for name, values in first.shape.items()},
        measured_s=np.concatenate([first.measured_s, second.measured_s]),
        row_ids=first.row_ids + second.row_ids,
    )


def short_kernel(kind: str, name: str, software: str) -> str:
    """Short name of a kernel: engine and backend, without class names.

    >>> short_kernel("moe", "vllm_fp8moe_flashinfer_cutlass_flashinferexperts", "vllm-0.24.0")
    'vllm_flashinfer_cutlass'
    """
    if kind == "moe":
        engine = next((known for known in ("vllm", "sglang") if name.startswith(known)), "trtllm")
        backends = (
            "nongated",
            "flashinfer_trtllm",
            "flashinfer_cutlass",
            "marlin",
            "triton",
            "deepgemm",
            "min_latency",
        )
        for backend in (*backends, "cutlass"):
            if backend in name:
                return f"{engine}_{backend}"
        return f"{engine}_cutlass" if "torch_flow" in name else name
    if kind in ("scan", "kda", "mamba", "streams", "sparse", "latent", "absorption", "exchange", "chosen", "quantise"):
        return software.split("-")[0]
    if kind == "collective":
        return {"TRTLLM": "trtllm", "vLLM_custom_graph": "custom", "vLLM_custom_eager": "custom_eager"}.get(name, name)
    return name or software.split("-")[0]


def kind_of(columns: Iterable[str]) -> str | None:
    """What a file of these columns holds; None: no timings of kernels."""
    held = set(columns)
    return next((name for name, (_, needed) in KINDS.items() if needed <= held), None)


def _nearest_kind(columns: Iterable[str]) -> str:
    """What a file of no known kind lacks of the kind that it has most of, in whatever case; else all kinds.

    >>> _nearest_kind(["device", "M", "N", "K", "time_ms"])
    'of gemm its columns dtype, gpu, k, latency_us, m, n are due, of which it lacks dtype, gpu, k, latency_us, m, n'
    """
    held, columns = {each.strip().lower() for each in columns}, set(columns)
    shares = {name: len(needed & held) / len(needed) for name, (_, needed) in KINDS.items()}
    name = max(shares, key=lambda each: shares[each])
    if shares[name] < 0.5:
        return f"it knows columns of {', '.join(KINDS)}: `rlperf calibrate measure` writes such files"
    needed = sorted(KINDS[name][1])
    lacking = ", ".join(each for each in needed if each not in columns)
    return f"of {name} its columns {', '.join(needed)} are due, of which it lacks {lacking}"


def _as_row(header: Sequence[str], cells: Sequence[str], file: str, line: int) -> dict[str, str]:
    if len(cells) != len(header):
        raise SpecError(Problem(f"has {len(cells)} cells for {len(header)} columns", file, line))
    return dict(zip(header, cells, strict=True))


def read_series(path: Path | str) -> list[Series]:
    """All series of one file; a `SpecError` names every column or row that is wrong."""
    text = read_text(path)
    if "," not in text.split("\n", 1)[0] and "busbw" in text:
        return _nccl_tests(text, str(path))
    lines = csv_rows(text, path)
    header = next(lines, (1, []))[1]
    kind = kind_of(header)
    if kind is None:
        raise SpecError(Problem("holds no kernel timings that rlperf knows", str(path), 1, _nearest_kind(header)))
    groups: dict[tuple[str, ...], list[tuple[dict[str, str], int]]] = {}
    table = [(line, _as_row(header, cells, str(path), line)) for line, cells in lines]
    for (line, row), reason in zip(table, beside(kind, [row for _, row in table]), strict=True):
        if kind == "dispatch_normal":
            for each in ("dispatch", "combine"):
                row[f"{each}_us"] = str(float(row[f"{each}_transmit_us"]) + float(row.get(f"{each}_notify_us") or 0.0))
        if kind == "engine_dispatch":
            row |= {"num_token": row["num_tokens"], "num_topk": row["topk"]}
        if kind == "quantise":
            row["n_bytes"] = str(QUANTISED_BYTES * float(row["m"]) * float(row["k"]))
        if kind == "streams":
            row["before"] = str(int(row["op"].endswith("pre")))
        if reason:
            continue
        if kind in _CONVOLVED and "conv" in row["kernel"] and not _as_convolution(kind, row):
            continue
        for key in _keys(kind, row):
            groups.setdefault(key, []).append((row, line))
    if not groups:
        raise SpecError(Problem("holds no rows", str(path)))
    problems: list[Problem] = []
    series = [
        _series(CONVOLUTION if key[2].endswith(CONVOLUTION) else kind, key, rows, str(path), problems)
        for key, rows in groups.items()
    ]
    if problems:
        raise SpecError(problems)
    return [_as_scan(one) if one.kind in ("kda", "mamba") else _fastest(one) for one in series if one is not None]


def _as_convolution(kind: str, row: dict[str, str]) -> bool:
    """Adds channels and taps to a convolution's row; whether it states them."""
    parts = _CONVOLVED[kind]
    if not all(row.get(name) for each in parts for name in each[:2]) or not row.get("d_conv"):
        return False
    row["channels"] = str(sum(float(row[heads]) * float(row[width]) * number for heads, width, number in parts))
    row["taps"] = row["d_conv"]
    return True


def _as_scan(series: Series) -> Series:
    """Kimi Delta Attention and Mamba-2 as the scans that they are, under their own names."""
    shape = series.shape
    heads, values = shape.get("num_heads", shape.get("nheads")), shape["head_dim"]
    assert heads is not None
    same = {"batch": shape["batch"], "seq_len": shape["seq_len"], "num_v_heads": heads}
    same |= {"chunk_size": shape["chunk_size"]} if "chunk_size" in shape else {}
    state = {**same, "head_k_dim": shape.get("d_state", values), "head_v_dim": values}
    return _fastest(replace(series, kind="scan", dtype=series.kind, shape=state))


def _fastest(series: Series) -> Series:
    """Where an engine has several kernels for a shape, the fastest: it chooses by size."""
    if series.kind not in ("streams", "dispatch_normal") and series.dtype not in ("kda", "mamba"):
        return series
    table = np.stack([series.shape[name] for name in series.shape], axis=1)
    _, shape = np.unique(table, axis=0, return_inverse=True)
    best = np.full(shape.max() + 1, np.inf)
    np.minimum.at(best, shape.ravel(), series.measured_s)
    return series.take(series.measured_s <= best[shape.ravel()])


def _keys(kind: str, row: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    device = DEVICE_NAMES.get(row["gpu"], row["gpu"])
    software = row.get("src") or row.get("nccl_version") or ""
    name = row.get("kernel") or row.get("impl") or ""
    dtype = row.get("kv_cache_dtype") if kind in ("prefill", "decode", "latent") else row.get("dtype")
    dtype = DTYPE_NAMES.get(dtype or "", dtype or "")
    if kind == "collective":
        collective = row.get("collective") or "all_reduce"
        yield (
            device,
            short_kernel(kind, name or "nccl", software),
            "",
            COLLECTIVE_NAMES.get(collective, collective),
            software,
        )
    elif kind in ("dispatch", "dispatch_normal"):
        own = "deepep" if kind == "dispatch" else "deepep_normal"
        for operation in ("dispatch", "combine"):
            yield device, own, "", f"{operation}@{row['node_num']}", software
    elif kind == "engine_dispatch":
        own = "deepep" if row["backend"].endswith("_ll") else "deepep_normal"
        sent = {"default": "bf16", "fp4": "nvfp4"}.get(row["comm_dtype"], row["comm_dtype"])
        sent = DTYPE_NAMES.get(sent, sent)
        yield device, own, f"{software.split('-')[0]}/{sent}", f"{row['phase']}@{row['node_num']}", software
    elif kind == "sparse":
        part = row.get("attn_kind") or ("reusing" if row.get("skip_indexer") == "1" else "")
        gemm = DTYPE_NAMES.get(row["gemm_dtype"], row["gemm_dtype"])
        variant = "/".join((row["model"], part, row["phase"]))
        yield device, short_kernel(kind, name, software), f"{gemm}/{row['kv_cache_dtype']}", variant, software
    elif kind == "chosen":
        phase = "generation" if row["q_len"] == "1" else "context"
        variant = "/".join((row["op"], row["model"], row.get("score_mode") or "", phase))
        yield device, short_kernel(kind, name, software), "", variant, software
    elif kind == "encoder":
        dtype = DTYPE_NAMES.get(row["attn_dtype"], row["attn_dtype"])
        yield device, software.split("-")[0], dtype, row["head_dim"], software
    elif kind == "streams":
        yield device, short_kernel(kind, name, software), "", "", software
    else:
        variant = row.get("phase" if kind in ("scan", "kda", "mamba", "latent", "exchange") else "distribution") or ""
        if kind in _CONVOLVED and "conv" in name:
            dtype = f"{dtype or 'gated_delta'} {CONVOLUTION}" if kind == "scan" else f"{kind} {CONVOLUTION}"
        yield device, short_kernel(kind, name, software), dtype, variant, software


def _series(
    kind: str, key: tuple[str, ...], rows: Sequence[tuple[dict[str, str], int]], file: str, problems: list[Problem]
) -> Series | None:
    device, kernel, dtype, variant, software = key
    names = KINDS[kind][0] if kind in KINDS else ("batch", "seq_len", "channels", "taps")
    time = f"{variant.split('@')[0]}_us" if kind.startswith("dispatch") else "latency_us"
    values: list[list[float]] = []
    for row, line in rows:
        try:
            numbers = [float(row.get(name) or _UNSTATED.get(name, 128.0)) for name in names] + [float(row[time])]
            if not all(0 <= number <= MOST for number in numbers) or numbers[-1] <= 0:
                raise ValueError("a count or time that is negative, or beyond any")
            values.append(numbers)
        except (ValueError, TypeError) as error:
            problems.append(Problem(f"is no timing of kind {kind}: {error}", file, line))
    if not values:
        return None
    table = np.asarray(values, dtype=np.float64)
    stem = Path(file).stem
    return Series(
        kind, device, kernel, dtype, variant, software,
        {name: table[:, column] for column, name in enumerate(names)},
        table[:, -1] * 1e-6,
        tuple(f"{stem}_{line:05d}" for _, line in rows[: len(values)]),
    )  # fmt: skip


def _nccl_tests(text: str, file: str) -> list[Series]:
    """Output of nccl-tests: size, count, type, ..., time (us), algbw, busbw; the first time column is out of place."""
    name = re.search(r"(all_reduce|all_gather|reduce_scatter|alltoall|sendrecv)(?=_perf)?", text)
    ranks = len(re.findall(r"^#\s+Rank\s+\d+", text, re.MULTILINE))
    device = re.search(r"device\s+\S+\s+\[[^\]]*\]\s+(.+)$", text, re.MULTILINE)
    if name is None or ranks < 2:
        raise SpecError(Problem("is nccl-tests output without the collective's name or its '# Rank' lines", file))
    hosts = set(re.findall(r"^#\s+Rank.*\bon\s+(\S+)\s+device", text, re.MULTILINE))
    if len(hosts) > 1:
        hint = "run it inside one node; put bus bandwidths across nodes into a CSV for 'rlperf validate --kind kernels'"
        raise SpecError(Problem(f"is of {len(hosts)} nodes: a device's constants are those of one", file, None, hint))
    sizes, times = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        parts = line.split()
        if len(parts) >= 8 and parts[0].isdecimal() and parts[1].isdecimal():
            rest = [
                part for part in parts[3:] if not part.isalpha() or part in ("nan", "inf")
            ]  # data type and operation are words
            if len(rest) >= 3 and float(parts[0]) > 0:
                word = rest[1] if rest[0] == "-1" else rest[0]
                size, timed = float(parts[0]), re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", word)
                if size > MOST or timed is None or not 0 < float(word) <= MOST:
                    raise SpecError(Problem(f"a time of {word} us for {size:g} bytes is none", file, number))
                sizes.append(size)
                times.append(float(word) * 1e-6)
    if not sizes:
        raise SpecError(Problem("is nccl-tests output without result lines", file))
    collective = COLLECTIVE_NAMES.get(name.group(1), name.group(1)).replace("sendrecv", "point_to_point")
    x = np.asarray(sizes)
    return [
        Series(
            "collective", device.group(1).strip() if device else "", "nccl", "", collective, "nccl-tests",
            {"num_gpus": np.full(len(x), float(ranks)), "bytes": x}, np.asarray(times),
            tuple(f"{Path(file).stem}_{index:05d}" for index in range(len(x))),
        )
    ]  # fmt: skip
