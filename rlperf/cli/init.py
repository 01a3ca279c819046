"""``rlperf init``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rlperf.cli.asked import AskedJob, asks_job
from rlperf.cli.output import console
from rlperf.errors import Problem, SpecError
from rlperf.specs.framework_names import LISTED


@asks_job
def init(
    asked: AskedJob,
    out: Annotated[Path, typer.Option("--out", "-o", help="The job file.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Write a commented job file; what no option states is asked: model, devices, framework, lengths, batch.

    Example: rlperf init

    Example: rlperf init --model Qwen3-8B --gpus 16 --gpu h100 --framework verl --max-response 16k --prompts 128
    """
    from rlperf.specs.short_job import job_text, short_job
    from rlperf.specs.writer import write_atomic

    if asked.file is not None:
        raise SpecError(f"init writes a job, it reads none: name the file with --out {asked.file}")
    if out.exists() and not force:
        raise SpecError(Problem("is there already", str(out), suggestion="name another with --out, or add --force"))
    job = short_job(**_answered(asked).short())
    write_atomic(out, job_text(job))
    console().print(f"wrote {out}; next: rlperf plan {out} --out plan/", soft_wrap=True, markup=False)


def _answered(asked: AskedJob) -> AskedJob:
    """The options with an answer for each of the five questions that they leave open."""
    if asked.model is None:
        asked = replace(asked, model=typer.prompt("Model (name, Hugging Face id or config.json)", "Qwen3-8B"))
    if asked.gpus is None:
        gpus, gpu = _devices(typer.prompt("Devices", f"16 {asked.gpu or 'h100'}"))
        asked = replace(asked, gpus=gpus, gpu=gpu or asked.gpu)
    if asked.framework is None:
        asked = replace(asked, framework=typer.prompt(f"Framework ({LISTED})", "verl"))
    if asked.max_response is None:
        asked = replace(asked, max_response=typer.prompt("Longest response in tokens", "16k"))
    if asked.prompts is None:
        prompts, group = _batch(typer.prompt("Batch, prompts x responses per prompt", f"128 x {asked.group or 8}"))
        asked = replace(asked, prompts=prompts, group=group or asked.group)
    return asked


def _devices(text: str) -> tuple[int, str | None]:
    """``32 h100``, ``32 x h100`` or ``32``."""
    words = text.replace(" x ", " ").split()
    if len(words) not in (1, 2) or not words[0].isdigit():
        raise SpecError(f"{text!r} is not a number of devices: write it as 32 h100")
    return int(words[0]), words[1] if words[1:] else None


def _batch(text: str) -> tuple[int, int | None]:
    """``128 x 8``, ``128x8`` or ``128``."""
    parts = [part.strip() for part in text.split("x")]
    if len(parts) not in (1, 2) or not all(part.isdigit() for part in parts):
        raise SpecError(f"{text!r} is not a batch: write it as 128 x 8")
    return int(parts[0]), int(parts[1]) if parts[1:] else None
