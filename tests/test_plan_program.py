"""The integer program: its text, and equality of path, program and brute force."""

from __future__ import annotations

import numpy as np
import pytest

from rlperf.errors import InfeasibleError
from rlperf.plan.formulation import Program, Slot, formulate, value_of
from rlperf.plan.solve import brute_force, solve


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


def test_budget_row_adds_up_over_all_slots() -> None:
    program = Program((_slot("a", [4.0, 2.0], budget=np.array([1.0, 3.0])),), budget_limit=2.0)
    assert _rows(program)["budget"] == "x_a_0 + 3.0*x_a_1 <= 2.0"


def _random_program(rng: np.random.Generator, *, coupled: bool) -> Program:
    tasks, groups = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    slots: list[Slot] = []
    for task in range(tasks):
        for group in range(groups):
            n = int(rng.integers(1, 5))
            slots.append(
                Slot(
                    f"t{task}g{group}",
                    rng.uniform(1, 10, n),
                    rng.integers(0, 4, n),
                    previous=len(slots) - 1 if group else None,
                    switch=float(rng.uniform(0, 4)),
                    share=rng.integers(1, 9, n).astype(float) if coupled else None,
                    share_group=group if coupled else None,
                    budget=rng.uniform(0, 3, n) if coupled else None,
                )
            )
    limits = {"share_limit": 10.0, "budget_limit": float(rng.uniform(1, 3) * len(slots))} if coupled else {}
    return Program(tuple(slots), **limits)


@pytest.mark.parametrize("coupled", [False, True])
def test_equals_brute_force_on_random_programs(coupled: bool) -> None:
    rng = np.random.default_rng(7)
    infeasible = 0
    for _ in range(40):
        program = _random_program(rng, coupled=coupled)
        try:
            best = brute_force(program)
        except InfeasibleError:
            infeasible += 1
            with pytest.raises(InfeasibleError):
                solve(program)
            continue
        for method in ("auto", "program"):
            found = solve(program, method=method)
            assert found.objective == pytest.approx(best.objective, rel=1e-9)
            assert value_of(program, found.chosen) == pytest.approx(found.objective)
            assert found.gap <= 1e-6
    assert infeasible < 30


def test_a_slot_without_columns_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="math: no column"):
        solve(Program((_slot("math", []),)))
