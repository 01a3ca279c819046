"""The command line: names of the commands, where each one lives, and what happens to errors. A command's module is
imported when it runs, so that ``rlperf --help`` stays fast."""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import sys
import traceback
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from rlperf.errors import Problem, RlperfError, SpecError, did_you_mean, failure, nearest
from rlperf.version import __version__


class Entry(NamedTuple):
    """Where a command lives (``module:attribute``; a function or a sub-application) and what it does, in one line."""

    target: str
    help: str


COMMANDS = {
    "init": Entry("rlperf.cli.init:init", "Write a commented job file by asking five questions."),
    "plan": Entry("rlperf.cli.plan:plan", "Best layouts, batches and lengths for a job."),
    "predict": Entry("rlperf.cli.predict:predict", "Step time, memory and cost of a given configuration."),
    "replan": Entry("rlperf.cli.replan:replan", "Whether a running job should change its layout for the rest."),
    "size": Entry("rlperf.cli.size:size", "The smallest or cheapest cluster that meets a target."),
    "sweep": Entry("rlperf.cli.sweep:sweep", "A grid or list over any job field, resumable, on a cluster too."),
    "ui": Entry("rlperf.cli.ui:ui", "A page in the browser: plan, what-ifs by slider, the config to take along."),
    "report": Entry("rlperf.cli.report:report", "One self-contained HTML page of a plan or a sweep."),
    "profiles": Entry("rlperf.cli.profiles:app", "Shipped devices, links, clusters, architectures, calibrations."),
    "validate": Entry("rlperf.cli.validate:validate", "Predicted against measured, for a file of measurements."),
    "workload": Entry("rlperf.cli.workload:app", "Read, fit, sample and check length workloads."),
    "calibrate": Entry("rlperf.cli.calibrate:app", "Fit constants from kernel measurements or framework logs."),
    "simulate": Entry("rlperf.cli.simulate:simulate", "Simulate a rollout event by event; trace and figure."),
    "compare": Entry("rlperf.cli.compare:compare", "Two jobs or plans under common random numbers."),
    "export": Entry("rlperf.cli.export:export", "Write a plan as a framework's config and launch command."),
    "import": Entry("rlperf.cli.import_:import_", "Read a framework's config or launch script into a job."),
    "verdict": Entry("rlperf.cli.verdict:verdict", "Is this speed normal, and what to change first."),
    "audit": Entry("rlperf.cli.audit:audit", "What is wrong with a framework config, and what to change first."),
    "schema": Entry("rlperf.cli.schema:schema", "JSON schema of a file that rlperf reads or writes."),
    "explain": Entry("rlperf.cli.explain:explain", "Why is it slow? Root causes of an rl_step, ranked."),
    "pipeline": Entry("rlperf.cli.pipeline:pipeline", "Partition, placement and schedule of a pipeline together."),
}


class _LazyGroup(TyperGroup):
    """Knows every command by name and imports only the one that runs."""

    listing = False
    """True while the help of the group is written, which wants names and one-line helps alone."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], COMMANDS) or "`rlperf --help` names them"
            raise SpecError(Problem(f"there is no command {args[0]!r}", suggestion=hint))
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        if self.listing:
            return typer.main.get_command(_stub(cmd_name, entry.help))
        module, attribute = entry.target.split(":")
        found = getattr(importlib.import_module(module), attribute)
        command = typer.main.get_command(found if isinstance(found, typer.Typer) else _single(found))
        command.name = cmd_name
        return command


def _single(function: Any) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", context_settings=HELP_NAMES)
    app.command()(function)
    return app


def _stub(name: str, text: str) -> typer.Typer:
    def command() -> None: ...

    app = typer.Typer(add_completion=False)
    app.command(name, help=text)(command)
    return app


HELP_NAMES = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, context_settings=HELP_NAMES)


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"rlperf {__version__}\n")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plan reinforcement learning of language models: which layout, batch and maximum length, before burning a cluster.

    Start with: rlperf plan
    """


DEFECT, REFUSED, INTERRUPTED = 70, 74, 130
"""Exit codes: sysexits.h's of an error of rlperf itself and of one of the machine (disk full, out of memory), and a
shell's of Ctrl-C."""


COLLECTED = 50_000
"""New objects before garbage is looked for: what a command loads stays, and going through all of it again and again
took a tenth of a plan's time."""


def run() -> None:
    """Entry point. Exit codes: 0 fine, 1 infeasible, 2 wrong input, 3 solver, 70 a defect of rlperf, 74 the machine
    refused (disk full, closed output, out of memory)."""
    gc.set_threshold(COLLECTED, 20, 100)
    closed = sys.stdout is None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who has called (``>&-``): what is written is lost, as it is asked
            setattr(sys, name, io.StringIO())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a letter that the terminal lacks is no reason to stop
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        if closed:
            raise OSError(errno.EBADF, "standard output is closed")
        if code == INTERRUPTED:  # where Typer has caught it: without a word
            code = _said("stopped", INTERRUPTED, "")
    except RlperfError as error:
        code = _said(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = _said("stopped", INTERRUPTED, "")
    except BrokenPipeError:
        code = 0  # the reader of a pipe (head, less) has left
        _point_nowhere()
    except (OSError, MemoryError) as error:
        code = _said(failure(error), REFUSED)
        _point_nowhere()
    except Exception as error:
        # A usage error of the command line (unknown option, missing argument) knows how to show itself.
        if hasattr(error, "possibilities"):
            code = _said(str(_no_such_option(error)), getattr(error, "exit_code", 2))
        elif hasattr(error, "show"):
            error.show()
            code = getattr(error, "exit_code", 2)
        else:
            traceback.print_exc()
            code = _said(
                "this is a defect of rlperf, not of your input: please report it with what stands above", DEFECT
            )
    sys.exit(code if isinstance(code, int) else 0)


def _no_such_option(error: Any) -> Problem:
    """An option that a command lacks: the one that looks like it, else the commands that have it. Click's own hint
    calls ``--floor`` near to ``--log``, since it counts the dashes."""
    context, name = error.ctx, error.option_name
    near = nearest(name.lstrip("-"), [each.lstrip("-") for each in _options(context.command)])
    others = ", ".join(command for command in COMMANDS if name in _options(_command(command)))
    help_ = f"`{context.command_path} -h` names its options"
    said = f"did you mean --{near}?" if near else f"it belongs to {others}; {help_}" if others else help_
    return Problem(f"{context.command_path} has no option {name}", suggestion=said)


def _command(name: str) -> Any:
    """A command as Click knows it."""
    return typer.main.get_command(app).get_command(None, name)  # type: ignore[attr-defined]


def _options(command: Any) -> set[str]:
    """Names of a command's options, those of a group's commands with them."""
    names = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return names.union(*(_options(each) for each in getattr(command, "commands", {}).values()))


def _said(text: str, code: int, head: str = "error: ") -> int:
    sys.stderr.write(f"{head}{text}\n")
    return code


def _point_nowhere() -> None:
    """Stdout to nothing, so that the interpreter's last flush cannot fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
