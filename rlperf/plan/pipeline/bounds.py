"""A bound that knows layers cannot be cut: the integer program of who holds how many layers of each kind."""

from __future__ import annotations

import numpy as np

from rlperf.plan.pipeline.problem import PipelineProblem

TIME_LIMIT_S = 3.0
"""What the solver may take [s]."""


def assignment_bound_s(problem: PipelineProblem) -> float:
    """No partition, placement and order ends before this [s].

    Devices are sorted by their first layer; device k then starts no sooner than h_k, the least time in which a
    micro-batch passes k layers (`PipelineProblem.bound_s`). With n[k, c] layers of class c (equal work u_c over all
    micro-batches) on device k, every plan satisfies

        sum_k n[k, c] = N_c,   sum_c u_c n[k, c] + h_k <= T,   n[0, class of layer 0] >= 1,   sum_c n[k, c] >= 1 or idle

    Contiguity, placement and precedence are left out, so the least T is a bound. Where the solver runs out of time its
    proven dual bound is used.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    load = problem.layer_load_s
    P = problem.devices
    scale = float(load.sum()) / P
    if scale <= 0.0:
        return problem.bound_s
    classes, member = np.unique(np.round(load / scale, 12), return_inverse=True)
    counts = np.bincount(member)
    C = classes.size
    size = P * C + 1  # n[k, c] row by row, then T
    total = np.zeros((C, size))
    for c in range(C):
        total[c, c : P * C : C] = 1.0
    ends = np.zeros((P, size))
    for k in range(P):
        ends[k, k * C : (k + 1) * C] = classes
    ends[:, -1] = -1.0
    # A device that stays empty has no head; such plans put the same work on fewer devices and are covered by T >= load.
    heads = np.asarray(problem.first_forward_s[:P]) / scale
    low, high = np.zeros(size), np.append(np.tile(counts.astype(np.float64), P), np.inf)
    low[member[0]] = 1.0
    cost = np.zeros(size)
    cost[-1] = 1.0
    result = milp(
        cost,
        constraints=[LinearConstraint(total, counts, counts), LinearConstraint(ends, -np.inf, -heads)],
        integrality=np.append(np.ones(P * C), 0),
        bounds=Bounds(low, high),
        options={"time_limit": TIME_LIMIT_S},
    )
    proven = getattr(result, "mip_dual_bound", None)
    if proven is None or not np.isfinite(proven):
        return problem.bound_s
    # The solver works to a relative tolerance; what it calls proven is lowered by as much.
    return max(problem.bound_s, float(proven) * scale * (1.0 - 1e-7))
