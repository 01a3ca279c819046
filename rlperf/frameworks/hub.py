"""Names of checkpoints on the Hugging Face hub, of architectures that rlperf ships under shorter ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from rlperf.errors import SpecError
from rlperf.specs.profiles import architecture_named, architecture_reading, is_path, load_architecture, profile_names

_CONFIG_OF = re.compile(r"model_configs/([\w.-]+?)--([\w.-]+?)_config\.json")
_NAMED = re.compile(r"\(([\w.-]+/[\w.-]+)\)")
_OWN_NAMES = {
    "CodeLlama-34B": "codellama/CodeLlama-34b-hf",
    "GLM-4.5-355B-A32B": "zai-org/GLM-4.5",
    "INTELLECT-3": "PrimeIntellect/INTELLECT-3",
    "Llama-2-7B": "meta-llama/Llama-2-7b-hf",
    "Llama-2-13B": "meta-llama/Llama-2-13b-hf",
    "Llama-2-70B": "meta-llama/Llama-2-70b-hf",
    "Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "Llama-3-70B": "meta-llama/Meta-Llama-3-70B",
    "Llama-3.3-70B": "meta-llama/Llama-3.3-70B-Instruct",
    "MiMo-7B-RL": "XiaomiMiMo/MiMo-7B-RL",
    "Nemotron-340B": "nvidia/Nemotron-4-340B-Base",
    "Nemotron-8B": "nvidia/nemotron-3-8b-base-4k",
    "Qwen2.5-VL-7B": "Qwen/Qwen2.5-VL-7B-Instruct",
    "SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M",
    "SmolLM2-360M": "HuggingFaceTB/SmolLM2-360M",
    "SmolLM2-1.7B": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
}
"""Checkpoints whose name is neither ours nor in the source of the shape (model cards)."""
_ORGANISATIONS = (
    ("qwen", "Qwen"),
    ("llama", "meta-llama"),
    ("deepseek", "deepseek-ai"),
    ("gemma", "google"),
    ("mixtral", "mistralai"),
    ("mistral", "mistralai"),
    ("ministral", "mistralai"),
    ("gpt-oss", "openai"),
    ("nvidia", "nvidia"),
    ("glm", "zai-org"),
    ("phi", "microsoft"),
    ("kimi", "moonshotai"),
    ("moonlight", "moonshotai"),
    ("minimax", "MiniMaxAI"),
)


def hub_name(architecture: str) -> str:
    """The Hugging Face repository of a shipped architecture name; a path stays the folder it names.

    >>> hub_name("Qwen3-8B"), hub_name("Llama-2-7B"), hub_name("/ckpt/mine/config.json"), hub_name("org/model")
    ('Qwen/Qwen3-8B', 'meta-llama/Llama-2-7b-hf', '/ckpt/mine', 'org/model')
    """
    if architecture.endswith("config.json"):
        return architecture.removesuffix("config.json").rstrip("/") or "."
    if "/" in architecture:
        return architecture
    if architecture in _OWN_NAMES:
        return _OWN_NAMES[architecture]
    if published := _published(architecture):
        return published
    lowered = architecture.lower()
    organisation = next((name for start, name in _ORGANISATIONS if lowered.startswith(start)), None)
    return f"{organisation}/{architecture}" if organisation else architecture


@cache
def _shipped() -> Mapping[str, str]:
    """Repository, in small letters -> the shipped architecture that `hub_name` writes it for."""
    return {hub_name(name).lower(): name for name in reversed(profile_names("architectures"))}


def architecture_at(checkpoint: str) -> str:
    """The architecture that a configuration's checkpoint names: what `hub_name` wrote, or as published names are read.

    >>> architecture_at("meta-llama/Llama-2-7b-hf"), architecture_at("/ckpt/Qwen3-8B")
    ('Llama-2-7B', 'Qwen3-8B')
    """
    spelt = checkpoint.lower(), "/".join(checkpoint.split("/")[-2:]).lower()
    alike = _alike(checkpoint)
    if alike and hub_name(alike).lower() in spelt:  # no two have one repository: the others need not be read
        return alike
    return _shipped().get(spelt[0]) or _shipped().get(spelt[1]) or architecture_named(checkpoint)


def _alike(checkpoint: str) -> str | None:
    """The shipped architecture that a checkpoint's name looks like, if any; no path."""
    try:
        shape = architecture_reading(checkpoint).shape if checkpoint else ""
    except SpecError:
        return None
    return None if "/" in shape or is_path(shape) else shape


def _published(architecture: str) -> str | None:
    """The repository that the source of the shape names, where it is one shape's own name."""
    try:
        found = load_architecture(architecture)
    except SpecError:
        return None
    if found.name != architecture:
        return None
    match = _CONFIG_OF.search(found.source)
    if match:
        return f"{match[1]}/{match[2]}"
    named = _NAMED.search(found.source)
    return named[1] if named else None
