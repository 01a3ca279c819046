"""Step metrics of each framework as a `StepLog`: console, file logger, trainer state, TensorBoard and wandb exports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rlperf.errors import Problem, SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.logs.carriers import metrics_of
from rlperf.frameworks.registry import FRAMEWORKS, adapter_of, split_name
from rlperf.specs.reader import read_text, reading
from rlperf.specs.step_log import STAGES, FloatArray, StepLog
from rlperf.units import MOST, MOST_COUNT
from rlperf.workload.tables import NEEDED

Metrics = dict[int, dict[str, float]]
"""rl_step -> metric -> value."""


def read_log(paths: Sequence[Path | str], framework: str | None = None) -> StepLog:
    """Step metrics of one run, from one or several files of any known carrier; the framework is recognised.

    Raises
    ------
    SpecError : a file holds no step metrics that a framework's table knows
    """
    if not paths:
        raise SpecError(Problem("no log is named", suggestion="console log, JSONL, CSV, or tfevents"))
    metrics: Metrics = {}
    last, again = -1, -1
    for path in paths:
        with reading(path):
            for step, values in metrics_of(Path(path)):
                _plausible(step, values, path)
                here = metrics.setdefault(step, {})
                again = step if step < last else again if step == again else -1
                # a run that was started again repeats rl_steps, and warms up in the first that it repeats
                here.update({name: v for name, v in values.items() if _says(v, name in here, step == again)})
                last = step
    if not any(metrics.values()):
        raise SpecError(
            Problem("holds no step metrics", str(paths[0]), suggestion="console log, JSONL, CSV, or tfevents")
        )
    chosen = framework or _recognised(metrics)
    if chosen is None:
        known = sorted({name for values in metrics.values() for name in values})
        hint = f"`rlperf workload show {paths[0]}` reads lengths" if {*NEEDED} <= {*known} else None
        message = f"its metrics ({', '.join(known[:5])} ...) belong to no known framework"
        raise SpecError(Problem(message, str(paths[0]), suggestion=hint))
    return step_log(metrics, chosen, ", ".join(Path(path).name for path in paths))


def _says(value: float, known: bool, again: bool) -> bool:
    """Whether a value counts, beside one that is known; infinities and NaN are of divisions by nothing."""
    return not np.isinf(value) and not (known and (again or np.isnan(value)))


_NO_MEMORY = re.compile(r"(?:CUDA|HIP|NPU) out of memory|OutOfMemoryError|CUDA error: out of memory")


def out_of_memory(path: Path | str) -> Problem | None:
    """The line where a log says that a device ran out of memory; None where it does not.

    Only text is searched: event files and tables hold numbers.
    """
    if Path(path).is_dir() or Path(path).suffix not in ("", ".log", ".txt", ".out", ".err"):
        return None
    lines = read_text(path).splitlines()
    found = [(number, match) for number, line in enumerate(lines, 1) if (match := _NO_MEMORY.search(line))]
    if not found:
        return None
    # the line that says how much was asked for tells more than the name of the error before it
    number, match = next((each for each in found if "Tried to allocate" in each[1].string), found[0])
    told = _sentences(match.string[match.start() :].strip()).rstrip(".") + _worker_call(lines[:number])
    hint = "`rlperf audit CONFIG --cluster NAME` says what takes the memory, and what frees it"
    return Problem(f"the run ended out of device memory: {told}", str(path), number, hint)


def _sentences(text: str, most: int = 200) -> str:
    """A text up to the end of its last sentence within ``most`` characters; cut there where it has none.

    >>> _sentences("Tried 2.50 GiB. GPU 3 is full.", 20)
    'Tried 2.50 GiB.'
    """
    if len(text) <= most:
        return text
    end = text.rfind(". ", 0, most)
    return text[: end + 1 if end > 0 else most]


_CALL = re.compile(r"ray::(\w+)\.(\w+)\(\)")
_FRAME = re.compile(r"\bFile \"[^\"]+\", line \d+, in (\w+)")


def _worker_call(lines: Sequence[str]) -> str:
    """Which call of which worker broke off, by the last one that Ray names; else the innermost function of a traceback.

    >>> _worker_call(["E: ray::WorkerDict.update_actor() (pid=1)", "out of memory"])
    '; in update_actor of WorkerDict'
    """
    near = lines[-_NEAR:]
    calls = [match for line in near if (match := _CALL.search(line))]
    if calls:
        return f"; in {calls[-1][2]} of {calls[-1][1]}"
    frames = [match[1] for line in near if (match := _FRAME.search(line))]
    return f"; in {frames[-1]}" if frames else ""


_NEAR = 80
"""Lines before the last of an error that may hold its traceback."""


def _plausible(step: int, values: Mapping[str, float], path: Path | str) -> None:
    """Numbers that a run can print: no rl_step beyond counting, no metric beyond any quantity (NaN is one that failed).

    Infinities are left out, as NaN is: a framework prints both where it divides by nothing.
    """
    if not 0 <= step <= MOST_COUNT:
        raise SpecError(Problem(f"rl_step {step:.4g} is beyond any count", str(path)))
    wrong = next((name for name, value in values.items() if abs(value) > MOST and not np.isinf(value)), None)
    if wrong is not None:
        raise SpecError(Problem(f"{wrong} of rl_step {step} is beyond any quantity", str(path)))


def same_framework(log: StepLog, framework: str) -> StepLog:
    """The log, where the framework (with or without its release) writes such ones; a fork writes those of its origin.

    Raises
    ------
    SpecError : it is another framework's
    """
    expected = framework_facts(adapter_of(split_name(framework)[0]).name)
    if log.framework and metric_table(log.framework) != expected.metrics:
        message = f"is a log of {log.framework}, and what ran is of {expected.name}"
        raise SpecError(Problem(message, log.source, suggestion="name the configuration or job that wrote it"))
    return log


def metric_table(framework: str) -> Mapping[str, str]:
    """Metric -> column of a framework."""
    return framework_facts(framework).metrics


def step_log(metrics: Metrics, framework: str, source: str) -> StepLog:
    """The metrics in neutral words. Several metrics of one column add up (two scoring passes); memory is in GiB."""
    table = metric_table(framework)
    metrics = {step: _plain(values, table) for step, values in metrics.items()}
    steps = [step for step in sorted(metrics) if set(metrics[step]) & set(table)]
    found = {metric: np.array([metrics[step].get(metric, np.nan) for step in steps]) for metric in table}
    found = {metric: values for metric, values in found.items() if not np.isnan(values).all()}
    whole = _ended([values for metric, values in found.items() if table[metric] == "rl_step_s"], len(steps))
    steps, found = steps[:whole], {metric: values[:whole] for metric, values in found.items()}
    for metric, values in found.items():
        if table[metric].endswith("_s") and (values < 0).any():
            raise SpecError(Problem(f"{metric} is negative in rl_step {steps[int(np.argmax(values < 0))]}", source))
    found = _apart(found, framework_facts(framework).nested_metrics)
    columns = _columns(found, table)
    stages = {name: values for name, values in columns.items() if name.removesuffix("_s") in STAGES}
    if "rl_step_s" not in columns and stages:
        columns["rl_step_s"] = np.nansum(list(stages.values()), axis=0)
    elif "rl_step_s" in columns:
        pauses = [values for metric, values in found.items() if table[metric] == "pause_s"]
        columns["rl_step_s"] = _without_pauses(columns["rl_step_s"], stages, pauses)
    if not np.nansum(columns.get("rl_step_s", np.ones(1))):
        raise SpecError(Problem("none of its rl_steps takes any time: every timer is 0", source))
    of_updates = framework_facts(framework).metrics_of_updates
    return StepLog.of(steps, framework=framework, source=source, of_updates=of_updates, **columns)


def _ended(timers: Sequence[FloatArray], count: int) -> int:
    """How many of ``count`` rl_steps a log holds to their end, by its timers of the whole one ``[rl_steps]``.

    A run that goes on, or was killed, is in the midst of its last one, whose line may be cut within a number.
    """
    stated = np.flatnonzero(~np.isnan(timers).all(axis=0)) if timers else np.zeros(0)
    return int(stated[-1]) + 1 if stated.size else count


def _apart(found: Mapping[str, FloatArray], nested: Mapping[str, str]) -> dict[str, FloatArray]:
    """Metrics ``[rl_steps]`` less those that are parts of them: no second of a timer within another counts twice."""
    apart = dict(found)
    for inner, outer in nested.items():
        if inner in found and outer in found:
            apart[outer] = np.maximum(apart[outer] - np.nan_to_num(found[inner]), 0.0)
    return apart


def _columns(found: Mapping[str, FloatArray], table: Mapping[str, str]) -> dict[str, FloatArray]:
    """Metrics ``[rl_steps]`` by the columns that they speak of."""
    columns: dict[str, FloatArray] = {}
    for metric, values in found.items():
        column = table[metric]
        if column.endswith("memory_bytes"):
            values = values * 2.0**30
        if column not in columns:
            columns[column] = values
        elif column.endswith("_s"):
            both = np.isnan(columns[column]) & np.isnan(values)
            columns[column] = np.where(both, np.nan, np.nansum([columns[column], values], axis=0))
        else:
            columns[column] = np.where(np.isnan(columns[column]), values, columns[column])
    return columns


def _without_pauses(
    rl_step_s: FloatArray, stages: Mapping[str, FloatArray], pauses: Sequence[FloatArray]
) -> FloatArray:
    """Seconds of rl_steps ``[rl_steps]`` without the validation and checkpoints that their timer holds.

    Which timers it holds changes between releases (verl validates inside its step up to 0.6 and after it since), and no
    log says its release. What no stage covers tells: a pause that does not fit in there was not inside.
    """
    none = np.zeros(rl_step_s.size)
    covered = np.nansum([none, *stages.values()], axis=0)
    beside = np.nan_to_num(stages.get("rollout_s", none))  # where it runs beside the others
    rest = np.maximum(rl_step_s - np.where(covered > rl_step_s, covered - beside, covered), 0.0)
    inside = [pause for pause in map(np.nan_to_num, pauses) if not (rest[pause > 0] < pause[pause > 0]).any()]
    held: FloatArray = np.minimum(np.sum([none, *inside], axis=0), rest)
    return rl_step_s - held


PREFIX = "train/"
"""What wandb and TensorBoard exports put before the metrics of OpenRLHF and TRL."""


def _plain(values: Mapping[str, float], known: Mapping[str, str]) -> dict[str, float]:
    """The metrics under the names of a framework's table; no file's name, which may be one, has a ``/``."""
    if all(name in known for name in values):
        return dict(values)
    called = {name.replace("/", "_"): name for name in known}
    called |= {(PREFIX + name).replace("/", "_"): name for name in known} | {PREFIX + name: name for name in known}
    return {name if name in known else called.get(name, name): value for name, value in values.items()}


def _recognised(metrics: Metrics) -> str | None:
    """The framework whose table knows most of what the rl_steps print, and something of it."""
    tables = {name: metric_table(name) for name in FRAMEWORKS}
    known = {
        name: sum(len(set(_plain(values, table)) & set(table)) for values in metrics.values())
        for name, table in tables.items()
    }
    best = max((count, name) for name, count in known.items())
    return best[1] if best[0] else None
