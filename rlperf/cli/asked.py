"""How a command is asked: by a job file, by options that stand for one, or by neither (the shipped default job)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from rlperf.cli.output import default_job
from rlperf.errors import Problem, SpecError

if TYPE_CHECKING:
    from rlperf.api import Question
    from rlperf.specs.job import Job

_PANEL = "Without a file"


def _short(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=_PANEL)


@dataclass(frozen=True)
class AskedJob:
    """A job file, or the options that stand for one. Names of options are those of `rlperf.specs.short_job`."""

    file: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="Job file, plan.yaml, or a shipped job's name.")
    ] = None
    framework: Annotated[str | None, typer.Option(help="Instead of the job's: verl, nemo_rl ... (==version).")] = None
    model: Annotated[str | None, _short("Name, Hugging Face id or config.json.")] = None
    like: Annotated[str | None, _short("Family to read an unknown model_type as.")] = None
    gpus: Annotated[int | None, _short("How many devices.")] = None
    gpu: Annotated[str | None, _short("h100, mi300x ..., or a cluster. Default: h100.")] = None
    prompts: Annotated[int | None, _short("Prompts per rl_step. Default: 128.")] = None
    group: Annotated[int | None, _short("Responses per prompt. Default: 8.")] = None
    mini_batch: Annotated[int | None, _short("Prompts per update. Default: all.")] = None
    max_prompt: Annotated[str | None, _short("Tokens, as 2048 or 2k. Default: 2k.")] = None
    max_response: Annotated[str | None, _short("Tokens, as 16384 or 16k. Default: 16k.")] = None
    workload: Annotated[str | None, _short("Lengths: preset or file. Default: math.")] = None
    algorithm: Annotated[str | None, _short("grpo, dapo or ppo. Default: grpo.")] = None
    mode: Annotated[str | None, _short("One, or several to choose of: colocated,async.")] = None
    staleness: Annotated[int | None, _short("Versions behind: k_step_off, async. Default: 1.")] = None

    def short(self) -> dict[str, Any]:
        """The values of a job without a file that were given."""
        from rlperf.specs.short_job import SHORT

        given = {name: getattr(self, name) for name in SHORT}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def shipped(self) -> bool:
        """Whether the file is the name of a shipped job."""
        from rlperf.specs.presets import preset_rows

        return self.file is not None and not self.file.exists() and str(self.file) in preset_rows()

    @property
    def source(self) -> Path:
        """The job file: the default one where none is named."""
        return self.file or default_job()

    @property
    def folder(self) -> Path:
        """Where relative paths of the job start."""
        from rlperf.specs.own_files import folder_of

        return folder_of(self.source) if self.model is None else Path.cwd()

    def job(self, *, any_size: bool = False) -> Job | Path:
        """What to ask rlperf: a job made of options, a file under another framework, or a file as it stands.

        ``any_size``: the number of devices is what is asked for.

        Raises
        ------
        SpecError : a file and options that stand for one, or a model without a number of devices
        """
        from rlperf.api import job_of
        from rlperf.specs.presets import preset
        from rlperf.specs.short_job import short_job

        values = self.short()
        if self.model is None:
            alone = sorted(set(values) - {"framework"})
            if alone:
                if self.file is not None:
                    told = "such options state a job without a file"
                    hint = f"change {self.file} itself, or leave it out and give --model and --gpus"
                    raise SpecError(Problem(f"{options(alone)}: {told}", suggestion=hint))
                lack = " and ".join(("--model", *(() if "gpus" in alone else ("--gpus",))))
                told = "a job without a file is stated by --model and --gpus"
                raise SpecError(f"{options(alone)}: {told}; {lack} {'is' if 'gpus' in alone else 'are'} missing")
            changes = {"framework": self.framework} if self.framework else {}
            return preset(str(self.file), **changes) if self.shipped else job_of(self.source, changes)
        if self.file is not None:
            raise SpecError(f"either the file {self.file} or --model, not both")
        if self.gpus is None and not any_size:
            raise SpecError("--model needs --gpus, the number of devices")
        return short_job(**values)

    def question(self) -> Question:
        """The job with everything that its names stand for."""
        from rlperf.api import question_of

        return question_of(self.job(), self.folder)

    @property
    def displaces_plan(self) -> bool:
        """Whether the file is a plan of which the job alone is asked: a plan is of one framework."""
        from rlperf.plan.answer.reading import plan_in
        from rlperf.specs.job_document import read_job_document

        named = self.framework is not None and self.model is None and not self.shipped
        return named and plan_in(read_job_document(self.source)) is not None

    @property
    def label(self) -> str:
        """Where the job is from, for people."""
        return self.source.name if self.model is None else "options"


def options(names: Iterable[str]) -> str:
    """Names of values as the options that state them."""
    return ", ".join("--" + name.replace("_", "-") for name in names)


def asks_job(command: Callable[..., None], *, file: bool = True) -> Callable[..., None]:
    """A command whose first parameter is `AskedJob` takes that class's fields as its own argument and options.

    ``file``: it may read a job file too.
    """
    hints = get_type_hints(AskedJob, include_extras=True)
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    taken = {parameter.name for parameter in own}
    shared = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(AskedJob)
        if each.name not in taken and (file or each.name != "file")
    ]
    parameters = [*shared, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own)]

    @wraps(command)
    def run(**given: Any) -> None:
        asked = AskedJob(**{each.name: given.pop(each.name) for each in shared})
        command(asked, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    del run.__wrapped__  # typer would read the inner signature
    return run
