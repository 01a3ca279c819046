"""``run_all.sh``: the phases of a plan in their order, tasks on parts of the devices at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from rlperf.frameworks.adapter import Limitation
from rlperf.frameworks.writing import script
from rlperf.plan.answer.plan import Plan


@dataclass(frozen=True)
class RunAll:
    """The script, and what a reader of it has to know."""

    text: str
    says: tuple[str, ...]


def run_all_of(
    plan: Plan, files: Sequence[Iterable[str]], unreadable: Sequence[Sequence[Limitation]] = ()
) -> RunAll | None:
    """How the phases of a plan are run, whose files are given by name; None where there is one.

    ``unreadable`` : what each phase cannot read of the checkpoint of the one before it; default: nothing
    """
    if len(plan.phases) < 2:
        return None
    lost = unreadable or [()] * len(plan.phases)
    scripts = [[name for name in names if name.endswith(".sh")] for names in files]
    tasks = [phase.tasks for phase in plan.phases]
    several = len(set(tasks)) > 1
    if several and plan.job.sharing == "devices":
        says, body = _at_once(tasks, scripts, lost)
    else:
        says = _in_turn(plan) if several else ("Runs the phases in their order.",)
        body = [line for number, names in enumerate(scripts) for line in _phase(number + 1, names, lost[number])]
    says += tuple(f"Stops before phase {number}, which cannot read the checkpoint of the phase before it."
                  for number, each in enumerate(lost, 1) if each)  # fmt: skip
    if any(map(_is_server, chain(*scripts))):
        what = "what runs a command on the GPUs of rollout"
        says += (f"Yours to set: SERVER_ON: {what}, such as `env CUDA_VISIBLE_DEVICES=...`.",)
        body = [f': "${{SERVER_ON:?{what}}}"', *body]
    return RunAll(script(says, ['cd "$(dirname "$0")"', *body]), says)


def _is_server(name: str) -> bool:
    return name.endswith("_server.sh")


def _phase(number: int, names: Sequence[str], lost: Sequence[Limitation], on: str = "") -> list[str]:
    """Lines that run the scripts of a phase; ``on``: what runs a command on its hosts.

    A server is there while the phase is. Where the phase cannot read the checkpoint of the one before, it would fail or
    start anew: the lines stop until the user has said that it can start.
    """
    lines = [
        f': "${{PHASE_{number}_READY:?{_plain([each.asked])}, cannot be: give phase {number} {_plain([each.nearest])}, '
        'and a checkpoint folder of its own, then set this to 1}"'
        for each in lost
    ]
    for name in filter(_is_server, names):
        lines += [f'{on}$SERVER_ON bash "$PWD/{name}" &', "server=$!", "trap 'kill \"$server\"' EXIT"]
    lines += [f'{on}bash "$PWD/{name}" "$@"' for name in names if not _is_server(name)]
    if any(map(_is_server, names)):
        lines += ["trap - EXIT", 'kill "$server" || true', 'wait "$server" || true']
    return lines


def _at_once(
    tasks: Sequence[tuple[str, ...]], scripts: Sequence[Sequence[str]], lost: Sequence[Sequence[Limitation]]
) -> tuple[tuple[str, ...], list[str]]:
    """Every task in the background on its own hosts; it fails where one of them does."""
    hosts = {task: f"ON_{number}" for number, task in enumerate(dict.fromkeys(tasks), 1)}
    of = ", ".join(f"{name} for {_plain(task)}" for task, name in hosts.items())
    says = (
        "Starts all tasks at once, each on its own part of the hosts.",
        f"Yours to set: {of}: what runs a command there, such as `env RAY_ADDRESS=...` of its own cluster.",
    )
    body = [f': "${{{name}:?what runs a command on the hosts of {_plain(task)}}}"' for task, name in hosts.items()]
    body.append("started=()")
    for task, name in hosts.items():
        each = [line for number, names in enumerate(scripts) if tasks[number] == task
                for line in _phase(number + 1, names, lost[number], f"${name} ")]  # fmt: skip
        body += ["(", *(f"  {line}" for line in each), ") &", "started+=($!)"]
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
    return re.sub(r"[^\w ,:-]", "", " ".join(" and ".join(tasks).split()))
