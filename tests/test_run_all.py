"""``run_all.sh`` of plans with several tasks: what is started when, and what is said of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rlperf.frameworks.run_all import RunAll, run_all_of
from rlperf.plan.answer.plan import Phase, Plan
from rlperf.specs.job import Job
from tests.test_plan_end_to_end import SMALL


def _order(sharing: str, *tasks: str) -> RunAll:
    first = SMALL["tasks"][0]  # type: ignore[index]
    job = Job.model_validate({**SMALL, "sharing": sharing, "tasks": [{**first, "name": name} for name in set(tasks)]})
    phases = tuple(Phase.model_construct(tasks=(name,)) for name in tasks)
    files = [(f"phase_{k + 1:02d}.yaml", f"phase_{k + 1:02d}.sh") for k in range(len(tasks))]
    found = run_all_of(Plan.model_construct(job=job, phases=phases), files)
    assert found is not None
    return found


def _run(folder: Path, order: RunAll, scripts: dict[str, str], **given: str) -> int:
    (folder / "run_all.sh").write_text(order.text)
    for name, text in scripts.items():
        (folder / name).write_text(text)
    environment = {"PATH": os.environ["PATH"], **given}
    return subprocess.run(["bash", str(folder / "run_all.sh")], env=environment, timeout=60, check=False).returncode


def test_tasks_on_parts_of_the_devices_start_at_once_each_on_its_hosts(tmp_path: Path) -> None:
    """The first waits for the second: one after the other it would wait for ever."""
    order = _order("devices", "math", "agent", "math")
    waits = 'until [ -e two ]; do sleep 0.05; done; echo "$RAY_ADDRESS" > one\n'
    scripts = {"phase_01.sh": waits, "phase_02.sh": 'echo "$RAY_ADDRESS" > two\n', "phase_03.sh": "cp one three\n"}
    hosts = {"ON_1": "env RAY_ADDRESS=here", "ON_2": "env RAY_ADDRESS=there"}
    assert _run(tmp_path, order, scripts, ON_1=hosts["ON_1"]) != 0 and not (tmp_path / "two").exists()
    assert _run(tmp_path, order, scripts, **hosts) == 0
    assert [(tmp_path / name).read_text() for name in ("one", "two", "three")] == ["here\n", "there\n", "here\n"]
    assert _run(tmp_path, order, {**scripts, "phase_02.sh": "touch two; exit 3\n"}, **hosts) == 1
    odd = _order("devices", "ma\nth", "ag`e`nt  two")  # says is a list of lines in EXPORT.md, too
    assert "ON_1 for ma th, ON_2 for agent two:" in odd.says[1] and not any("\n" in line for line in odd.says)


def test_tasks_that_take_turns_run_in_order_and_the_script_says_what_it_does_not_do(tmp_path: Path) -> None:
    order = _order("time", "math", "agent")
    assert _run(tmp_path, order, {"phase_01.sh": "touch one\n", "phase_02.sh": "[ -e one ]\n"}) == 0
    assert any("passes no checkpoint on" in line and line in order.text for line in order.says)
    groups = _order("time", "math", "math")
    assert groups.says == ("Runs the phases in their order.",)
