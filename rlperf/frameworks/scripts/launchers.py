"""What starts the processes of TRL's program, and what it is told of them: accelerate, torchrun, or nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rlperf.frameworks.keytable import Value
from rlperf.frameworks.scripts.typed import word_value

COUNTS = frozenset({"num_processes", "num_machines", "nproc_per_node", "nnodes"})
ACCELERATE = frozenset({"config_file", "accelerate_config"})
"""How a launch names accelerate's configuration: ``accelerate launch``, ``trl grpo`` (trl/cli/accelerate_config.py)."""
_KINDS = {"multi_gpu": "MULTI_GPU", "use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP"}
_DEEPSPEED = frozenset({"zero_stage", "offload_optimizer_device"})
_SWITCHES = frozenset({*_KINDS, "standalone", "no_python", "cpu", "quiet", "debug"})
_ALONE = re.compile(r"(?:.*/)?(?:python[\d.]*|uv|run|env|nohup|exec|time|-\w+|--[\w-]+|\w+=.*)$")
"""Words in front of a program that start it once."""
_TORCHRUN = re.compile(r"(?:^|/)torchrun$|^torch[.]distributed[.]")


def switch(text: str) -> bool:
    """Whether a flag of a launcher stands alone: what follows it is no value of it.

    >>> switch("--multi_gpu"), switch("--nproc_per_node=2"), switch("--nproc_per_node")
    (True, True, False)
    """
    return text.startswith("--") and ("=" in text or text[2:].replace("-", "_") in _SWITCHES)


def shipped(name: str) -> dict[str, Value]:
    """What a configuration of accelerate that TRL ships says of the trainer, by its name; of others nothing.

    trl/accelerate_configs of 0.27.0 and 1.16.0 alike; its examples write ``deepspeed_zero2`` for ``zero2``.

    >>> shipped("zero2"), shipped("multi_gpu"), shipped("mine")
    ({'distributed_type': 'DEEPSPEED', 'deepspeed_config.zero_stage': 2}, {'distributed_type': 'MULTI_GPU'}, {})
    """
    staged = re.fullmatch(r"(?:deepspeed_)?zero([123])", name)
    if staged:
        return {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": int(staged[1])}
    kind = {"fsdp1": "FSDP", "fsdp2": "FSDP", "multi_gpu": "MULTI_GPU", "single_gpu": "NO"}.get(name)
    return {"distributed_type": kind} if kind else {}


def counts(words: Sequence[str]) -> dict[str, Value]:
    """``--num_processes 8`` and its like, wherever they stand on the line.

    >>> counts(["torchrun", "--nproc-per-node=4", "train.py"])
    {'nproc_per_node': 4}
    """
    found = {name: value.strip("()") for name, value in _flags(words) if name in COUNTS}
    return {name: int(value) for name, value in found.items() if value.isdigit()}


def seen(visible: str) -> dict[str, Value]:
    """How many devices ``CUDA_VISIBLE_DEVICES`` leaves: the processes of a launcher that is told of no other number.

    >>> seen("0,1, 3"), seen("$GPUS"), seen("")
    ({'visible_devices': 3}, {}, {})
    """
    names = [name.strip() for name in visible.split(",")]
    return (
        {"visible_devices": len(names)} if all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", name) for name in names) else {}
    )


def started(before: Sequence[str]) -> dict[str, Value]:
    """What the words in front of a program say of its processes, as accelerate's config would.

    >>> started(["python", "-u"])
    {'num_processes': 1, 'distributed_type': 'NO'}
    >>> started(["accelerate", "launch", "--use_deepspeed", "--zero_stage", "2"])
    {'distributed_type': 'DEEPSPEED', 'deepspeed_config.zero_stage': 2}
    """
    if all(_ALONE.match(text) for text in before):
        return {"num_processes": 1, "distributed_type": "NO"}
    found: dict[str, Value] = {"distributed_type": "MULTI_GPU"} if any(map(_TORCHRUN.search, before)) else {}
    for name, value in _flags(before):
        found |= {"distributed_type": _KINDS[name]} if name in _KINDS else {}
        found |= {f"deepspeed_config.{name}": word_value(value)} if name in _DEEPSPEED else {}
    return found


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every flag with what is behind it, in either spelling."""
    for word, after in pairwise([*words, ""]):
        if word.startswith("--"):
            name, equals, inline = word[2:].partition("=")
            yield name.replace("-", "_"), inline if equals else after
