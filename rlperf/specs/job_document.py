"""A job's or plan's file, told apart from lengths, logs, launch scripts and configurations, which others read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rlperf.errors import Problem, SpecError
from rlperf.specs.job import Job
from rlperf.specs.reader import Document, is_file, parse_document, read_text

RECORDS = (".jsonl", ".csv", ".tsv", ".parquet", ".log")
"""Suffixes of what a run has written, which is no job."""
SCRIPTS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".py")
"""Suffixes of what launches a framework, which is no job."""
_COMMAND = re.compile(
    r"\A#!|^\s*(?:[A-Z_]+=\S+\s+)*(?:python3?|torchrun|accelerate|ray|srun|bash|uv|set|export)\s", re.M
)
"""What a line of a launch script begins with, and none of a job."""


def read_job_document(path: Path | str) -> Document:
    """A job's or plan's file; lengths, logs, scripts and configurations are told apart, and what reads them named."""
    if Path(path).suffix in RECORDS and is_file(Path(path)):
        hint = f"`rlperf explain {path}` reads a log, `rlperf plan --model ... --gpus ... --workload {path}` lengths"
        raise SpecError(Problem("is what a run has written, no job", str(path), suggestion=hint))
    text = read_text(path)
    hint = f"`rlperf import {path} --out job.yaml` makes one of it, `rlperf audit {path}` judges it as it is"
    launches = Path(path).suffix in SCRIPTS or _COMMAND.search(text) is not None
    try:
        document = parse_document(text, str(path))
    except SpecError:
        if not launches:
            raise
    else:
        if isinstance(document.data, dict) and _configures(document.data):
            raise SpecError(Problem("is a framework's configuration, no job", str(path), suggestion=hint))
        if isinstance(document.data, dict) or not launches:
            return document
    raise SpecError(Problem("is a launch script, no job", str(path), suggestion=hint))


def _configures(data: Mapping[str, object]) -> bool:
    """Whether keys are a framework's: sections that no job has, and nothing that a job, a plan or a sweep must have.

    >>> _configures({"actor_rollout_ref": {}, "algorithm": {}}), _configures({"nodes": 2, "modle": "Qwen3-8B"})
    (True, False)
    """
    sections = {name for name, value in data.items() if isinstance(value, dict)} - Job.model_fields.keys()
    return bool(sections) and not {"architecture", "tasks", "job"} & set(data)
