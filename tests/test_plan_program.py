"""The integer program: its text, and equality of path, program and brute force."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from rlperf.api import ask
from rlperf.errors import InfeasibleError
from rlperf.plan.judge.decisions import decide
from rlperf.plan.planner import program_of
from rlperf.plan.search.formulation import Handover, Program, Slot, formulate, value_of
from rlperf.plan.search.solve import Solution, solve
from rlperf.specs.job import Job


def brute_force(program: Program) -> Solution:
    """Every combination: what solvers are held against."""
    best: tuple[float, tuple[int, ...]] = (float("inf"), ())
    for chosen in product(*(range(len(slot.cost)) for slot in program.slots)):
        best = min(best, (value_of(program, chosen), chosen))
    if not best[1]:
        raise InfeasibleError("no combination keeps the limits")
    return Solution(best[1], best[0], best[0], "brute force")


def _slot(name: str, cost: list[float], **rest: object) -> Slot:
    return Slot(name, np.array(cost), np.arange(len(cost)), **rest)  # type: ignore[arg-type]


def _rows(program: Program) -> dict[str, str]:
    return {row.name: str(row) for row in formulate(program).problem.constraints()}


def test_choose_row_takes_exactly_one_column_per_slot() -> None:
    assert _rows(Program((_slot("math", [3.0, 2.0]),))) == {"choose_math": "x_math_0 + x_math_1 = 1.0"}


def test_switch_rows_charge_a_configuration_that_was_not_there_before() -> None:
    program = Program((_slot("a", [1.0, 2.0]), _slot("b", [2.0, 1.0], previous=0, switch=5.0)))
    rows = _rows(program)
    assert rows["switch_b_0"] == "x_a_0 - x_b_0 + y_b_0 >= -0.0"
    assert rows["switch_b_1"] == "x_a_1 - x_b_1 + y_b_1 >= -0.0"
    assert str(formulate(program).problem.objective) == "x_a_0 + 2.0*x_a_1 + 2.0*x_b_0 + x_b_1 + 5.0*y_b_0 + 5.0*y_b_1"


def test_share_row_limits_devices_of_tasks_that_run_together() -> None:
    slots = tuple(_slot(n, [4.0, 2.0], share=np.array([8.0, 16.0]), share_group=0) for n in ("a", "b"))
    assert (
        _rows(Program(slots, share_limit=24.0))["share_0"] == "8.0*x_a_0 + 16.0*x_a_1 + 8.0*x_b_0 + 16.0*x_b_1 <= 24.0"
    )


def test_handover_rows_charge_layouts_that_differ_between_tasks() -> None:
    program = Program((_slot("a", [1.0, 2.0]), _slot("b", [2.0, 1.0])), handovers=(Handover(0, 1, 3.0),))
    assert _rows(program)["handover_a_b_1"] == "x_a_1 - x_b_1 + z_a_b_1 >= -0.0"
    assert value_of(program, (0, 0)) == 3.0 and value_of(program, (0, 1)) == 5.0
    found = solve(program)
    assert found.objective == pytest.approx(3.0) and len(set(found.chosen)) == 1


def test_budget_row_adds_up_over_all_slots() -> None:
    program = Program((_slot("a", [4.0, 2.0], budget=np.array([1.0, 3.0])),), budget_limit=2.0)
    assert _rows(program)["budget"] == "x_a_0 + 3.0*x_a_1 <= 2.0"


@dataclass(frozen=True)
class Kind:
    """What couples the slots of random programs: tasks that run at once, a budget, a switching cost, handovers."""

    name: str
    share: bool = False
    budget: bool = False
    switch: float = 4.0
    handovers: float = 0.0
    checkpoints: bool = False


KINDS = (
    Kind("one after the other"),
    Kind("free switching", switch=0.0),
    Kind("never switch", switch=1e6),
    Kind("at once", share=True),
    Kind("budget", budget=True),
    Kind("at once with a budget", share=True, budget=True),
    Kind("in turns", handovers=3.0),
    Kind("tied checkpoints", switch=0.0, checkpoints=True),
    Kind("in turns with tied checkpoints", handovers=3.0, checkpoints=True),
)


def _random_program(rng: np.random.Generator, kind: Kind) -> Program:
    """One to three tasks over one to three groups of rl_steps; configurations recur between groups, or do not."""
    tasks, groups = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    most = 4 if tasks * groups <= 6 else 3
    slots: list[Slot] = []
    for task in range(tasks):
        for group in range(groups):
            n = int(rng.integers(1, most + 1))
            slots.append(
                Slot(
                    f"t{task}g{group}",
                    rng.uniform(1, 10, n),
                    rng.integers(0, 4, n),
                    previous=len(slots) - 1 if group else None,
                    resumes=len(slots) - 1 if group else None,
                    checkpoint=rng.integers(0, 2, n) if kind.checkpoints else None,
                    switch=kind.switch * float(rng.uniform(0.2, 1)),
                    share=rng.integers(1, 9, n).astype(float) if kind.share else None,
                    share_group=group if kind.share else None,
                    budget=rng.uniform(0, 3, n) if kind.budget else None,
                )
            )
    share = float(rng.uniform(4, 6) * tasks) if kind.share else None
    budget = float(rng.uniform(1, 2) * len(slots)) if kind.budget else None
    handovers = [
        Handover(task * groups + group, (task + 1) % tasks * groups + group, kind.handovers * float(rng.uniform(0, 1)))
        for task in range(tasks if kind.handovers and tasks > 1 else 0)
        for group in range(groups)
    ]
    return Program(tuple(slots), share_limit=share, budget_limit=budget, handovers=tuple(handovers))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_equals_brute_force_on_random_programs(kind: Kind) -> None:
    """300 programs or so; the path where nothing couples the chains, the integer program everywhere."""
    rng = np.random.default_rng(7)
    infeasible = 0
    for _ in range(300 // len(KINDS)):
        program = _random_program(rng, kind)
        try:
            best = brute_force(program)
        except InfeasibleError:
            infeasible += 1
            with pytest.raises(InfeasibleError):
                solve(program)
            continue
        for method in ("program",) if kind.share or kind.budget or kind.handovers else ("auto", "program"):
            found = solve(program, method=method)
            assert found.objective == pytest.approx(best.objective, rel=1e-9)
            assert value_of(program, found.chosen) == pytest.approx(found.objective)
            assert found.gap <= 1e-6
    assert infeasible < 25


@pytest.mark.parametrize(
    ("mode", "sharing"),
    [("colocated", "time"), ("disaggregated", "time"), ("one_step_off", "time"), ("async", "time"),
     ("k_step_off", "time"), ("streaming", "time"), ("colocated", "devices")],
)  # fmt: skip
def test_equals_brute_force_on_small_jobs(mode: str, sharing: str) -> None:
    """Real columns: two tasks in two groups of rl_steps, the program's plan against every combination of columns."""
    tasks = [
        {"name": name, "workload": "math", "prompts_per_step": 8, "group_size": 4, "max_prompt_tokens": 512,
         "max_response_tokens": cap, "reward_s": "0 s"}
        for name, cap in (("long", 1024), ("short", 256))
    ]  # fmt: skip
    asked = Job.model_validate(
        {
            "architecture": "Qwen3-0.6B", "cluster": "dgx_h100", "nodes": 2, "tasks": tasks, "modes": [mode],
            "sharing": sharing,
            "limits": {"staleness": 1}, "horizon": {"rl_steps": 4, "group": 2, "switch": "1 s"},
            "trainer_backends": ["fsdp2"],
            "framework": "nemo_rl" if mode in ("disaggregated", "k_step_off") else "verl",
        }
    )  # fmt: skip
    question = ask(asked)
    decisions = decide(question.context, question.facts, lambda _done, _text: None)
    program = program_of(question.context, decisions)
    few = replace(program, slots=tuple(_first(slot, 6) for slot in program.slots))
    best, found = brute_force(few), solve(few)
    assert found.objective == pytest.approx(best.objective, rel=1e-9)
    assert found.gap <= 1e-6
    assert solve(program).objective <= best.objective * (1 + 1e-9)


def _first(slot: Slot, count: int) -> Slot:
    """The slot's cheapest columns, and the fewest devices, so that something fits beside each other."""
    order = np.argsort(slot.cost if slot.share is None else slot.share, kind="stable")[:count]
    share = None if slot.share is None else slot.share[order]
    return replace(slot, cost=slot.cost[order], configuration=slot.configuration[order], share=share)


def test_a_slot_without_columns_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="math: no column"):
        solve(Program((_slot("math", []),)))


def test_the_solver_prints_nothing(tmp_path: Path) -> None:
    """HiGHS 1.16 greets on standard output, where ``rlperf plan --json`` has its answer; once in a process."""
    code = (
        "import numpy as np\n"
        "from rlperf.plan.search.formulation import Handover, Program, Slot\n"
        "from rlperf.plan.search.solve import solve\n"
        "slots = tuple(Slot(n, np.array([1.0, 2.0]), np.arange(2)) for n in 'ab')\n"
        "print(solve(Program(slots, handovers=(Handover(0, 1, 3.0),))).method)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout == "HiGHS\n"


def test_threads_that_solve_at_once_leave_standard_output_alone() -> None:
    """HiGHS prints its banner once a process, whoever comes first; what others print meanwhile arrives."""
    script = """
from concurrent.futures import ThreadPoolExecutor
import pulp
from rlperf.plan.search.solve import _run
def go(k):
    problem, x = pulp.LpProblem(f"p{k}"), pulp.LpVariable("x", 0, 1)
    problem += x
    problem += x >= 0.5
    _run(problem)
    return x.value()
with ThreadPoolExecutor(4) as threads:
    print(list(threads.map(go, range(8))))
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == f"{[0.5] * 8}\n"
