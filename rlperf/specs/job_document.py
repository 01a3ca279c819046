"""A job's or plan's file, told apart from lengths, logs and launch scripts, which other commands read."""

from __future__ import annotations

import re
from pathlib import Path

from rlperf.errors import Problem, SpecError
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
    """A job's or plan's file; lengths, logs and launch scripts are told apart, and what reads them named."""
    if Path(path).suffix in RECORDS and is_file(Path(path)):
        hint = f"`rlperf explain {path}` reads a log, `rlperf plan --model ... --gpus ... --workload {path}` lengths"
        raise SpecError(Problem("is what a run has written, no job", str(path), suggestion=hint))
    text = read_text(path)
    launches = Path(path).suffix in SCRIPTS or _COMMAND.search(text) is not None
    try:
        document = parse_document(text, str(path))
        if isinstance(document.data, dict) or not launches:
            return document
    except SpecError:
        if not launches:
            raise
    hint = f"`rlperf import {path} --out job.yaml` makes one of it, `rlperf audit {path}` judges it as it is"
    raise SpecError(Problem("is a launch script, no job", str(path), suggestion=hint))
