"""Step metrics in what each framework prints: a line, a dict, a table or a block of lines per rl_step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

Row = tuple[int, dict[str, float]]
"""rl_step, metric -> value."""

_NUMBER = r"-?(?:[\d.]+(?:e[+-]?\d+)?|nan|inf)"
_PAINT = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RAY = re.compile(r"^\(\w+(?: [^()]*)? ?pid=\d+[^()]*\) ?")
"""What Ray puts before a worker's lines: ``(TaskRunner pid=7, ip=10.0.0.1)``."""
_VERL = re.compile(r"\bstep:(\d+) - (.*)$")
_VERL_PAIR = re.compile(rf"(?:^| - )([\w/@.()%+-]+):\s*(?:np\.\w+\()?({_NUMBER})")
_SLIME = re.compile(r"\bperf (\d+): (\{.*\})\s*$")
_OPENRLHF = re.compile(r"Global step (\d+): (\{.*\})\s*$")
_NEMO_STEP = re.compile(r"=+\s*Step (\d+)/\d+")
_NEMO_LINE = re.compile(r"•\s*([\w/ ]+?):\s*([\d.]+)s\b")
_NEMO_LENGTH = re.compile(r"•\s*Mean Generation Length:\s*([\d.]+)")
"""Beside the rewards of an rl_step (recalled): what its other loggers call mean_gen_tokens_per_sample."""
_AREAL_STEP = re.compile(r"\bEpoch \d+/\d+ Step \d+/\d+ Train step (\d+)", re.IGNORECASE)
_AREAL_CELL = re.compile(rf"[│|]\s*([\w/]+)\s*[│|]\s*({_NUMBER})\s*(?=[│|])")
_TRL = re.compile(r"(\{'[^{}]*'epoch': [^{}]*\})\s*$")
_TRL_STEP = "step_time"
_RLINF = re.compile(r"^Global Step:.*?(\d+)/\d+ \[([^\]]*)\]?")
_RLINF_PAIR = re.compile(rf"([\w/]+)=({_NUMBER})(?=,|$)")
_SKYRL_STEP = re.compile(r" - Step (\d+):\s*$")
_SKYRL_PAIR = re.compile(rf"^\s*\{{?'([^']+)': '?({_NUMBER})'?(?=[,}}])")
_SKYRL_TIMER = re.compile(r"(Started|Finished): '(\w+)'(?:, time cost: ([\d.]+)s)?")


def rows_of_console(text: str) -> Iterator[Row]:
    """(rl_step, metrics) of a console in the order in which it was printed; what belongs to no rl_step is left out.

    Of SkyRL's timers, which it prints whatever its logger is, only those that no printed dict holds are read.
    """
    lines = [_RAY.sub("", _PAINT.sub("", line).rstrip()) for line in text.splitlines()]
    yield from _lines_of_one_step(lines)
    yield from _blocks(lines)
    told = False
    for row in _skyrl_dicts(lines):
        told = told or any(name.startswith("timing/") for name in row[1])
        yield row
    if not told:
        yield from _skyrl_timers(lines)


def _lines_of_one_step(lines: list[str]) -> Iterator[Row]:
    """verl, slime and OpenRLHF say their rl_step; TRL's dicts are counted; RLinf's stand in its progress bar."""
    trl = 0
    for line in lines:
        if verl := _VERL.search(line):
            yield int(verl[1]), numbers(dict(_VERL_PAIR.findall(verl[2])))
        elif dump := _SLIME.search(line) or _OPENRLHF.search(line):
            yield int(dump[1]), _literal_dict(dump[2])
        elif bar := _RLINF.search(line):
            yield int(bar[1]), {_rlinf_name(name): float(value) for name, value in _RLINF_PAIR.findall(bar[2])}
        elif (logged := _TRL.search(line)) and _TRL_STEP in (values := _literal_dict(logged[1])):
            trl += 1
            yield trl, values


def _rlinf_name(shown: str) -> str:
    """A metric's name in RLinf's other loggers, by that in its progress bar.

    >>> _rlinf_name("actor/training_time"), _rlinf_name("response_length")
    ('time/actor/training', 'rollout/response_length')
    """
    return f"time/{shown.removesuffix('_time')}" if shown.endswith("_time") else f"rollout/{shown}"


def _blocks(lines: list[str]) -> Iterator[Row]:
    """NeMo-RL and AReaL: a line that says which rl_step, then its metrics in lines or cells of their own."""
    block: int | None = None
    for line in lines:
        started = _NEMO_STEP.search(line) or _AREAL_STEP.search(line)
        block = int(started[1]) if started else block
        if block is None:
            continue
        if nemo := _NEMO_LINE.search(line):
            name = nemo[1].strip().replace(" ", "_").lower()
            full = "total_step_time" if name in ("total_step_time", "total") else name
            yield block, {f"timing/train/{full}": float(nemo[2])}
        elif length := _NEMO_LENGTH.search(line):
            yield block, {"train/mean_gen_tokens_per_sample": float(length[1])}
        elif cells := _AREAL_CELL.findall(line):
            yield block, numbers(dict(cells))


def _skyrl_dicts(lines: list[str]) -> Iterator[Row]:
    """SkyRL's console logger: ``Step 3:``, then a dict over several lines; those of other processes may lie between."""
    step: int | None = None
    for line in lines:
        if started := _SKYRL_STEP.search(line):
            step = int(started[1])
        elif step is not None and (pair := _SKYRL_PAIR.search(line)):
            yield step, {pair[1]: float(pair[2])}
            step = None if line.endswith("}") else step


def _skyrl_timers(lines: list[str]) -> Iterator[Row]:
    """SkyRL's timers, those within ``step``, counted from the first rl_step of the log."""
    count, values = 0, dict[str, float]()
    for line in lines:
        if (timer := _SKYRL_TIMER.search(line)) is None:
            continue
        if timer[1] == "Started":
            values = {} if timer[2] == "step" else values
            continue
        name = f"timing/{timer[2]}"
        values[name] = values.get(name, 0.0) + float(timer[3] or 0.0)
        if timer[2] == "step":
            count += 1
            yield count, values
            values = {}


def _literal_dict(text: str) -> dict[str, float]:
    """A printed Python dict of numbers; read as a literal, never evaluated."""
    plain = re.sub(r"\bnp\.\w+\(([^()]*)\)|\btensor\(([^()]*)\)", r"\1\2", text)
    plain = re.sub(r"\b(nan|inf)\b", "None", plain)
    try:
        found = ast.literal_eval(plain)
    except (ValueError, SyntaxError):
        return {}
    return numbers(found) if isinstance(found, dict) else {}


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """The numeric ones, also where they are printed as text.

    >>> numbers({"loss": "0.5", "name": "run", "lr": 1})
    {'loss': 0.5, 'lr': 1.0}
    """
    found = {}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            continue
        try:
            found[str(name)] = float(value)
        except ValueError:
            continue
    return found
