"""AReaL's allocation strings: ``sglang:d4t2p1``, ``fsdp:d4c2``, ``megatron:(attn:d2t2p2c1|ffn:d1t1p2e4)``."""

from __future__ import annotations

import re

from rlperf.errors import Problem, SpecError
from rlperf.frameworks.run import PoolRun, RolloutRun

_DEGREES = {"d": "data_parallel", "t": "tensor_parallel", "p": "pipeline_parallel", "c": "context_parallel",
            "s": "context_parallel", "e": "expert_parallel"}  # fmt: skip


def parse_allocation(text: str) -> tuple[str, dict[str, int]]:
    """Backend and degrees of an allocation string (areal/api/alloc_mode.py).

    >>> parse_allocation("sglang:d4t2p1")
    ('sglang', {'data_parallel': 4, 'tensor_parallel': 2, 'pipeline_parallel': 1})
    >>> parse_allocation("megatron:(attn:d1p2t4|ffn:d1p2e4)")[1]["expert_parallel"]
    4
    """
    backend, colon, body = text.strip().partition(":")
    if not colon:
        backend, body = "", backend
    hybrid = re.fullmatch(r"\(attn:([a-z0-9]+)\|ffn:([a-z0-9]+)\)", body)
    if not hybrid:
        return backend.strip(), _degrees(body, text)
    attention, experts = _degrees(hybrid[1], text), _degrees(hybrid[2], text)
    attention["expert_parallel"] = experts.get("expert_parallel", 1)
    attention["expert_tensor_parallel"] = experts.get("tensor_parallel", 1)
    return backend.strip(), attention


def with_backend(text: str) -> str:
    """An allocation with the trainer that older releases took where it names none.

    Releases before 1.0 chose FSDP where no stages and no spread experts are asked for, else Megatron; newer ones refuse
    (areal/api/alloc_mode.py, ``train_dims_only``: "Auto-backend selection is no longer supported").

    >>> [with_backend(text) for text in ("d4p1t2", "d2p4t2", "archon:d8")]
    ['fsdp:d4p1t2', 'megatron:d2p4t2', 'archon:d8']
    """
    backend, degrees = parse_allocation(text)
    if backend:
        return text
    staged = max(degrees.get("pipeline_parallel", 1), degrees.get("expert_parallel", 1)) > 1
    return f"{'megatron' if staged else 'fsdp'}:{text.strip()}"


def _degrees(body: str, text: str) -> dict[str, int]:
    if not re.fullmatch(r"([dtpcse]\d+)+", body):
        raise SpecError(
            Problem(f"{text!r} is not an allocation", suggestion="write for example sglang:d4t2 or fsdp:d8")
        )
    return {_DEGREES[letter]: int(number) for letter, number in re.findall(r"([dtpcse])(\d+)", body)}


def allocation(backend: str, pool: PoolRun) -> str:
    """The allocation string of a pool."""
    size = {"d": pool.data_parallel or 1, "t": pool.tensor_parallel, "p": pool.pipeline_parallel,
            "c": pool.sequence_split}  # fmt: skip
    plain = f"d{size['d']}" + "".join(f"{letter}{size[letter]}" for letter in "tpc" if size[letter] > 1)
    experts, etp = pool.expert_parallel, pool.expert_tensor_parallel
    if isinstance(pool, RolloutRun):
        return f"{backend}:d{size['d']}t{size['t']}" + (f"p{size['p']}" if size["p"] > 1 else "")
    if experts == 1 and etp in (1, size["t"]):
        return f"{backend}:{plain}"
    stage = size["d"] * size["t"] * size["c"]
    ffn = f"d{stage // (experts * etp)}" + (f"t{etp}" if etp > 1 else "") + (f"p{size['p']}" if size["p"] > 1 else "")
    return f"{backend}:(attn:{plain}|ffn:{ffn}e{experts})"
