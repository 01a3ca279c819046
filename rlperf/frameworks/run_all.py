"""``run_all.sh``: the phases of a plan in their order, tasks on parts of the devices at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlperf.frameworks.writing import script
from rlperf.plan.answer.plan import Plan


@dataclass(frozen=True)
class RunAll:
    """The script, and what a reader of it has to know."""

    text: str
    says: tuple[str, ...]


def run_all_of(plan: Plan, files: Sequence[Iterable[str]]) -> RunAll | None:
    """How the phases of a plan are run, whose files are given by name; None where there is one."""
    if len(plan.phases) < 2:
        return None
    launchers: dict[tuple[str, ...], list[str]] = {}
    body = [f'bash {name} "$@"' for names in files for name in names if name.endswith(".sh")]
    for phase, names in zip(plan.phases, files, strict=True):
        launchers.setdefault(phase.tasks, []).extend(name for name in names if name.endswith(".sh"))
    if len(launchers) == 1:
        says: tuple[str, ...] = ("Runs the phases in their order.",)
    elif plan.job.sharing == "devices":
        says, body = _at_once(launchers)
    else:
        says = _in_turn(plan)
    return RunAll(script(says, ['cd "$(dirname "$0")"', *body]), says)


def _at_once(launchers: dict[tuple[str, ...], list[str]]) -> tuple[tuple[str, ...], list[str]]:
    """Every task in the background on its own hosts; it fails where one of them does."""
    variables = [f"ON_{number}" for number in range(1, len(launchers) + 1)]
    of = ", ".join(f"{name} for {_plain(tasks)}" for name, tasks in zip(variables, launchers, strict=True))
    says = (
        "Starts all tasks at once, each on its own part of the hosts.",
        f"Yours to set: {of}: what runs a command there, such as `env RAY_ADDRESS=...` of its own cluster.",
    )
    body = [f': "${{{name}:?what runs a command on the hosts of {_plain(tasks)}}}"'
            for name, tasks in zip(variables, launchers, strict=True)]  # fmt: skip
    body.append("started=()")
    for name, scripts in zip(variables, launchers.values(), strict=True):
        each = " && ".join(f'${name} bash "$PWD/{script_name}" "$@"' for script_name in scripts)
        body += [f"( {each} ) &", "started+=($!)"]
    body += ["failed=0", 'for one in "${started[@]}"; do wait "$one" || failed=1; done', 'exit "$failed"']
    return says, body


def _in_turn(plan: Plan) -> tuple[str, ...]:
    """What one task after another is, and is not, of a plan in which they take turns."""
    often = plan.job.horizon.handover_every
    turns = "every rl_step" if often == 1 else f"every {often} rl_steps"
    return (
        "Runs the tasks one after another, each to its own end, and passes no checkpoint on: every phase starts from "
        "the model path that it is given.",
        f"The plan has the tasks take turns {turns}, which no script does here: for one policy, run a phase for as "
        "long as a turn and give its last checkpoint, as a Hugging Face folder, to the next as the model path.",
    )


def _plain(tasks: Sequence[str]) -> str:
    """Names of tasks on one line that nothing in a shell reads."""
    return re.sub(r"[^\w ,-]", "", " ".join(" and ".join(tasks).split()))
