"""Which rows of tables of kernel timings do not show the kernels that their table is of, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

EAGER_FLOOR = 600e-6
"""What the host takes at most to launch the kernels of a layer of experts one by one (README of the tables) [s]."""
HOST_FLOOR = "launched one by one: the host's time, and not the kernels'"
_EAGER_TOKENS = 4096.0
"""Tokens from which on kernels launched one by one hide the host (README of the tables)."""
_LAUNCHED = {
    "sparse": (("gpu", "src", "model", "skip_indexer", "gemm_dtype"), 1.25),
    "engine_dispatch": (("gpu", "src", "backend", "phase", "comm_dtype"), 2.0),
}
"""Columns of what takes the host equally long, however large, and how many times the least that it took from which on
the device is what one waits for: of modules, as timings of B200 and GB200 side by side show, and judged."""
DISPATCHED = "deepepmoe"
"""SGLang's experts behind DeepEP, which bring each rank the tokens of its own experts."""

WIDE = "sparse_mla"
"""Attention over chosen keys of 16 bits (FlashMLA's of prompts)."""
EXCHANGE = "NVLinkOneSided"
"""Dispatch and combine of TensorRT-LLM that each device writes into the memory of the others, its first choice."""


def _number(row: Mapping[str, str], name: str) -> float:
    """A cell, 0 where it is blank; infinite where it is no number, which whoever reads the row says with its line."""
    try:
        return float(row.get(name) or 0.0)
    except ValueError:
        return float("inf")


def beside_the_point(kind: str, row: Mapping[str, str]) -> str:
    """Why a row does not show the kernels that its table is of; empty where it does."""
    if kind == "ranked_experts":
        if row["kernel"] != DISPATCHED:
            return "what the timed rank got is told in tokens, and not how many of its experts they chose"
        eager = row.get("phase") == "context" and _number(row, "latency_us") < 1e6 * EAGER_FLOOR
        return HOST_FLOOR if eager else ""
    if kind == "quantise" and "minus" in row["op"]:
        return "a difference of two timings: what finds the scales is told with the product behind it"
    if kind == "engine_dispatch" and "_v2" in row["backend"]:
        return "DeepEP's second version, which no plan takes"
    if kind == "chosen" and row["op"] in (WIDE, "mqa_logits") and row["q_len"] == "1":
        return "a kernel of prompts, which no decode runs"
    if kind == "exchange" and row["kernel"] != EXCHANGE:
        return "kernels that the engine runs where its one-sided ones cannot"
    if kind == "latent" and row.get("flag"):
        return f"flagged {row['flag']}"
    if kind == "sparse":
        if "dense_mha" in row["kernel"]:
            return "dense attention of short prompts"
        hidden = _number(row, "batch") * _number(row, "q_len") >= _EAGER_TOKENS
        if row.get("flag") and not (row["flag"] == "eager" and hidden):
            return HOST_FLOOR if row["flag"] == "eager" else f"flagged {row['flag']}"
    return ""


def beside(kind: str | None, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """`beside_the_point` of all rows of a table, which together tell what the host takes to launch them."""
    found = [beside_the_point(kind, row) if kind else "" for row in rows]
    if kind not in _LAUNCHED:
        return found
    names, margin = _LAUNCHED[kind]
    launched = [kind != "sparse" or row.get("flag") == "eager" for row in rows]
    alike = [tuple(row.get(name) or "" for name in names) for row in rows]
    taken = [_number(row, "latency_us") for row in rows]
    floors: dict[tuple[str, ...], float] = {}
    for name, why, each, took in zip(alike, found, launched, taken, strict=True):
        if each and why in ("", HOST_FLOOR):
            floors[name] = min(took, floors.get(name, np.inf))
    least = [margin * floors.get(name, 0.0) for name in alike]
    hidden = [each and took < bound for each, took, bound in zip(launched, taken, least, strict=True)]
    return [why or (HOST_FLOOR if each else "") for why, each in zip(found, hidden, strict=True)]
