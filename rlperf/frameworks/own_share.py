"""The share of a device's memory that engines take where nobody states one: of vLLM a number, of SGLang what is left.

Source: sglang@0.5.23 arg_groups/memory_hook.py:65, 0.5.10.post1 server_args.py:1165 in the same terms.
"""

from __future__ import annotations

from rlperf.frameworks.run import RolloutRun
from rlperf.specs.cluster import Device
from rlperf.specs.engine_calibration import load_engine_calibration

_MIB = 2**20
_CHUNKS = ((20, 2048), (60, 4096), (160, 8192))
"""Below so many GiB of memory, tokens of prompts that SGLang takes at once; 16,384 on larger devices."""
_CAPTURED = ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512))
"""Below so many GiB, the largest batch of its CUDA graphs below tensor parallel 4, and from there; 512 on larger."""


def own_share(rollout: RolloutRun, device: Device) -> float:
    """What an engine takes of a device's memory of its own accord [1].

    SGLang keeps free what it thinks that prompts, graphs and communication take, from 60 GiB on 10 GiB at least. Its
    graphs of prompts (8 MiB each, under 0.6 % of 80 GiB) and what it takes off for a vision tower are left out.

    >>> from rlperf.specs.profiles import load_device
    >>> engine = RolloutRun(backend="sglang", tensor_parallel=2)
    >>> [own_share(engine, load_device(name)) for name in ("h100_sxm", "h200_sxm", "l40s")]
    [0.834, 0.906, 0.849]
    """
    if rollout.backend != "sglang":
        return load_engine_calibration(rollout.backend or "vllm").memory_fraction
    memory = device.memory / _MIB
    wide, spread = rollout.tensor_parallel >= 4, rollout.attention_data_parallel
    chunk = next((tokens for below, tokens in _CHUNKS if memory < below * 1024), 16384)
    batch = next((most if wide else few for below, few, most in _CAPTURED if memory < below * 1024), 512)
    batch = 0 if rollout.cuda_graphs is False else batch
    kept = 512 + 1.5 * max(rollout.engine_token_budget or chunk, 2048) + 2 * batch
    kept += rollout.tensor_parallel * rollout.pipeline_parallel * 1024 / 8
    if spread > 1:
        kept += batch * spread * (4.5 if batch > 300 else 3)
    if memory > 60 * 1024:
        kept = max(kept, 10 * 1024)
    if batch and rollout.expert_dispatch == "deepep":
        kept += 2048
    return round((memory - kept) / memory, 3)
