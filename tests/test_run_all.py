"""``run_all.sh`` of plans with several tasks: what is started when, and what is said of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rlperf.frameworks.adapter import Limitation
from rlperf.frameworks.run_all import RunAll, run_all_of
from rlperf.plan.answer.plan import Phase, Plan
from rlperf.specs.job import Job
from tests.test_plan_end_to_end import SMALL


def _order(sharing: str, *tasks: str, server: bool = False, unreadable: int = 0) -> RunAll:
    first = SMALL["tasks"][0]  # type: ignore[index]
    job = Job.model_validate({**SMALL, "sharing": sharing, "tasks": [{**first, "name": name} for name in set(tasks)]})
    phases = tuple(Phase.model_construct(tasks=(name,)) for name in tasks)
    files = [(f"phase_{k + 1:02d}.yaml", f"phase_{k + 1:02d}.sh") for k in range(len(tasks))]
    if server:
        files = [(f"phase_{k + 1:02d}_server.sh", *names) for k, names in enumerate(files)]
    lost = [(Limitation("going on, `x`", "its weights", ""),) if k + 1 == unreadable else () for k in range(len(tasks))]
    found = run_all_of(Plan.model_construct(job=job, phases=phases), files, lost)
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


def test_a_phase_that_cannot_read_the_checkpoint_before_it_waits_for_its_user(tmp_path: Path) -> None:
    order = _order("time", "math", "math", unreadable=2)
    scripts = {"phase_01.sh": "touch one\n", "phase_02.sh": "touch two\n"}
    assert any("Stops before phase 2" in line and line in order.text for line in order.says)
    assert _run(tmp_path, order, scripts) != 0
    assert (tmp_path / "one").exists() and not (tmp_path / "two").exists()
    assert _run(tmp_path, order, scripts, PHASE_2_READY="1") == 0 and (tmp_path / "two").exists()


def test_a_server_is_there_while_its_phase_is(tmp_path: Path) -> None:
    """It does not end by itself: in line with the others it would let no phase start."""
    order = _order("time", "math", "math", server=True)
    serves = 'trap "touch ended_$N; exit" TERM; touch up_$N; while :; do sleep 0.02; done\n'
    scripts = {f"phase_0{n}_server.sh": f"N={n}; {serves}" for n in (1, 2)}
    first, second = (f"until [ -e up_{n} ]; do sleep 0.02; done\n" for n in (1, 2))
    scripts |= {"phase_01.sh": first, "phase_02.sh": f"[ -e ended_1 ] || exit 4\n{second}exit 3\n"}
    assert _run(tmp_path, order, scripts) != 0 and not (tmp_path / "up_1").exists()
    assert _run(tmp_path, order, scripts, SERVER_ON="env") == 3
