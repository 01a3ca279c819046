"""Arguments of engines that frameworks pass on: prompts that SGLang does not cut, and what is not counted.

Sources: sglang@0.5.23 arg_groups/fields/schedule.py, managers/schedule_policy.py; vllm@0.33.0 engine/arg_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlperf.frameworks.fields import Setting, Unit
from rlperf.frameworks.run import Run

SGLANG_CHUNK = Unit(
    lambda value, _: int(value) if int(value) > 0 else None,
    lambda value, run: -1 if run.rollout.chunked_prefill is False else value,
)
"""``chunked_prefill_size``: tokens of an engine step's prompts; none: prompts are not cut (`sglang_prefill`)."""
SGLANG_DISPATCH = Unit(
    lambda value, _: "nccl" if value in (None, "none", False) else "deepep",
    lambda value, _: "deepep" if value == "deepep" else None,
    "mooncake, nixl, mori and flashinfer count as deepep",
)
"""``moe_a2a_backend``: kernels that bring a token to its experts alone; none: all are gathered."""


def _admitting(run: Run) -> int:
    """Ranks of a replica that admit requests by themselves: vLLM's; SGLang divides its bound among them."""
    return 1 if run.rollout.backend == "sglang" else run.rollout.attention_data_parallel


OF_A_RANK = Unit(
    lambda value, run: int(value) * _admitting(run), lambda value, run: -(-int(value) // _admitting(run))
)  # fmt: skip
"""Requests of a replica, where vLLM's ``max_num_seqs`` is of every data-parallel rank (each has a scheduler of its own,
v1/engine/core.py) and SGLang's ``max_running_requests`` is of all (0.5.6 managers/tp_worker.py:289)."""
VLLM_DISPATCH = Unit(
    lambda value, _: "deepep" if str(value).startswith(("deepep", "pplx", "nixl", "mori", "flashinfer")) else "nccl",
    lambda value, _: "deepep_low_latency" if value == "deepep" else None,
    "pplx, nixl, mori and flashinfer count as deepep",
)
"""``all2all_backend``: likewise; vLLM gathers and scatters, unless another is named (config/parallel.py)."""
MAX_PREFILL = 16384
"""SGLang's own ``max_prefill_tokens``: prompts together, where none is cut; a longer one goes alone."""

UNCOUNTED: Mapping[str, str] = {
    "sglang": "max_total_tokens cpu_offload_gb cuda_graph_bs cuda_graph_max_bs cuda_graph_bs_decode page_size "
    "cuda_graph_max_bs_decode disable_cuda_graph_padding disable_overlap_schedule enable_mixed_chunk "
    "enable_torch_compile schedule_conservativeness disable_custom_all_reduce enable_two_batch_overlap "
    "enable_single_batch_overlap enable_hierarchical_cache num_continuous_decode_steps prefill_max_requests "
    "enable_dp_lm_head",
    "vllm": "cpu_offload_gb compilation_config cudagraph_capture_sizes max_cudagraph_capture_size swap_space "
    "num_gpu_blocks_override kv_cache_memory_bytes async_scheduling block_size disable_custom_all_reduce",
}
"""Arguments that change an engine's memory or speed, and that nothing of a job says."""
REPLACED: Mapping[str, str] = {
    "sglang": "tp_size pp_size",
    "vllm": "tensor_parallel_size pipeline_parallel_size data_parallel_size enable_expert_parallel",
}
"""Widths that verl passes itself and that its ``engine_kwargs`` replace (0.9.1, vllm_async_server.py:349)."""
OLDER_NAMES: Mapping[str, str] = {
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "enable_ep_moe": "ep_size",
    "enable_deepep_moe": "moe_a2a_backend deepep",
}
"""SGLang's arguments as releases before 0.5.2x call them, and what came after (its own words of deprecation)."""


def newer_name(key: str) -> str | None:
    """The name that SGLang's newer releases have for a key that its older ones know.

    >>> newer_name("sglang-cuda-graph-max-bs"), newer_name("sglang.page_size")
    ('sglang-cuda-graph-max-bs-decode', None)
    >>> newer_name("sglang-enable-deepep-moe")
    'sglang-moe-a2a-backend deepep'
    """
    section, dot, last = key.rpartition(".")
    new = OLDER_NAMES.get(_plain(last, "sglang")) if "sglang" in key else None
    if new is None:
        return None
    return f"{section}{dot}{new}" if "-" not in last else f"{section}{dot}sglang-{new.replace('_', '-')}"


def _plain(name: str, engine: str | None) -> str:
    return name.removeprefix(f"{engine}-").replace("-", "_")


def sglang_experts(run: Run) -> Mapping[str, Any]:
    """SGLang spreads experts over the whole engine wherever it dispatches to them (0.5.6 server_args.py:1546)."""
    return {"expert_parallel": run.rollout.tensor_parallel} if run.rollout.expert_dispatch == "deepep" else {}


def sglang_prefill(flat: Mapping[str, Any], name: Callable[[str], str]) -> dict[str, Any]:
    """What a pool states of prompts where SGLang cuts none: the bound on a batch of them; empty where it does."""
    chunk = flat.get(name("chunked_prefill_size"))
    if chunk is None or int(chunk) > 0:
        return {}
    whole = int(flat.get(name("max_prefill_tokens")) or MAX_PREFILL)
    return {"chunked_prefill": False, "engine_token_budget": whole}


def whole_prompts(run: Run, name: Callable[[str], str]) -> list[Setting]:
    """The key beside ``chunked_prefill_size: -1`` that bounds prompts together."""
    budget, cut = run.rollout.engine_token_budget, run.rollout.chunked_prefill is not False
    return [] if cut or budget is None else [Setting(name("max_prefill_tokens"), budget, "prompts at once, uncut")]


def uncounted(stated: Mapping[str, Any], usual: Mapping[str, Any], engine: str | None) -> Iterator[str]:
    """Keys, of those that nobody understood, that change an engine's memory or speed and are not at their default."""
    names = set(UNCOUNTED.get(str(engine), "").split())
    replaced = names | set(REPLACED.get(str(engine), "").split())
    for key, value in stated.items():
        _, passed, argument = key.partition("engine_kwargs.")
        owner, _, own = argument.partition(".")
        if passed and owner != engine:
            continue
        said = {_plain(part, engine) for part in (own if passed else key).split(".")}
        if said & (replaced if passed else names) and value not in (None, False) and value != usual.get(key):
            yield key
