"""``rlperf init``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from rlperf.cli.asked import AskedJob, asks_job
from rlperf.cli.output import console
from rlperf.errors import Problem, SpecError
from rlperf.specs.framework_names import LISTED


@partial(asks_job, file=False)
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

    if out.exists() and not force:
        raise SpecError(Problem("is there already", str(out), suggestion="name another with --out, or add --force"))
    job = short_job(**_answered(asked).short())
    write_atomic(out, job_text(job))
    console().print(f"wrote {out}; next: rlperf plan {out} --out plan/", soft_wrap=True, markup=False)


def _answered(asked: AskedJob) -> AskedJob:
    """The options with an answer for each of the five questions that they leave open.

    Each is checked when it is given: a wrong option ends the command, a wrong answer is asked for again.
    """
    from rlperf.specs.short_job import cluster_of, tokens

    model = partial(_model, like=asked.like)
    if asked.model is None:
        asked = replace(asked, model=_ask("Model (name, Hugging Face id or config.json)", "Qwen3-8B", model))
    else:
        model(asked.model)
    if asked.gpus is None:
        gpus, gpu = _ask("Devices", f"16 {asked.gpu or 'h100'}", _devices)
        asked = replace(asked, gpus=gpus, gpu=gpu or asked.gpu)
    else:
        cluster_of(asked.gpu or "h100", asked.gpus)
    if asked.framework is None:
        asked = replace(asked, framework=_ask(f"Framework ({LISTED})", "verl", _framework))
    else:
        _framework(asked.framework)
    if asked.max_response is None:
        asked = replace(asked, max_response=str(_ask("Longest response in tokens", "16k", tokens)))
    if asked.prompts is None:
        prompts, group = _ask("Batch, prompts x responses per prompt", f"128 x {asked.group or 8}", _batch)
        asked = replace(asked, prompts=prompts, group=group or asked.group)
    return asked


Answer = TypeVar("Answer")


def _ask(question: str, usual: str, read: Callable[[str], Answer]) -> Answer:
    """An answer as ``read`` has it; one that it refuses is asked for again."""

    def checked(text: str) -> Answer:
        try:
            return read(text)
        except SpecError as error:
            raise typer.BadParameter(str(error)) from error

    try:
        answer: Answer = typer.prompt(question, usual, value_proc=checked)
    except typer.Abort as abort:
        if sys.stdin.isatty():  # someone has stopped it
            raise
        missing = Problem(f"no answer to: {question}", suggestion="state all five as options: rlperf init --help")
        raise SpecError(missing) from abort
    return answer


def _model(name: str, like: str | None) -> str:
    from rlperf.specs.profiles import load_architecture

    load_architecture(name, like=like)
    return name


def _framework(name: str) -> str:
    from rlperf.frameworks.adapter import framework_facts
    from rlperf.frameworks.registry import adapter_of, split_name

    named, version = split_name(name)
    framework_facts(adapter_of(named).name, version)
    return name


def _devices(text: str) -> tuple[int, str | None]:
    """``32 h100``, ``32 x h100``, ``32x h100``, ``32xh100`` or ``32``."""
    answer = re.fullmatch(r"(\d+)(?:(?:\s*x\s+|\s+|x)(\S+))?", text.strip())
    if answer is None:
        raise SpecError(f"{text!r} is not a number of devices: write it as 32 h100")
    from rlperf.specs.short_job import cluster_of

    gpus, gpu = int(answer[1]), answer[2]
    cluster_of(gpu or "h100", gpus)
    return gpus, gpu


def _batch(text: str) -> tuple[int, int | None]:
    """``128 x 8``, ``128x8`` or ``128``."""
    parts = [part.strip() for part in text.split("x")]
    if len(parts) not in (1, 2) or not all(part.isdigit() for part in parts):
        raise SpecError(f"{text!r} is not a batch: write it as 128 x 8")
    if not all(int(part) for part in parts):
        raise SpecError(f"{text!r} is no batch: both are at least 1")
    return int(parts[0]), int(parts[1]) if parts[1:] else None
