"""Which rows of ``measured/rl_step.csv`` are of one configuration: reruns and later releases of one setup."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from rlperf.calibrate.columns import stated
from rlperf.calibrate.tables import Row

_CONFIGURATION = (
    "framework", "architecture", "gpu", "n_gpus", "colocated", "rollout_gpus", "max_staleness", "prompts_per_step",
    "group_size", "seq_limit", "compute_dtype", "rollout_tensor_parallel", "trainer_tensor_parallel",
    "trainer_pipeline_parallel", "trainer_context_parallel", "trainer_expert_parallel",
)  # fmt: skip


def configuration_digest(key: str) -> str:
    """Short digest of a configuration, as calibrations list those that they saw.

    >>> len(configuration_digest("verl|Qwen2.5-7B"))
    12
    """
    return hashlib.blake2s(key.encode(), digest_size=6).hexdigest()


def configuration_key(cells: Mapping[str, str]) -> str:
    """Key of the configuration: equal for reruns and later releases of one setup."""
    row = Row("", "", 0, cells)
    return "|".join(stated(row, name) for name in _CONFIGURATION)
