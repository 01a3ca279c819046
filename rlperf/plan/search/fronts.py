"""What makes one column dominate another: criteria to be no worse in, among the columns that may be compared.

The argument why leaving out dominated columns loses nothing stands in ``docs/theory/planner.md``.
"""

from __future__ import annotations

import numpy as np

from rlperf.layout import RECOMPUTE, FloatArray, IntArray
from rlperf.plan.search.pareto import pareto_mask
from rlperf.plan.search.rollout_columns import RolloutColumns
from rlperf.plan.search.trainer_columns import TrainerColumns
from rlperf.specs.modes import MODES, Mode


def rollout_criteria(columns: RolloutColumns, alive: IntArray, mode: Mode) -> tuple[IntArray, FloatArray]:
    """(group, criteria ``[columns][criteria]``): columns that the weight sync tells apart are not compared."""
    layout = columns.layout.take(alive)
    group = layout.tensor_parallel * 1000 + layout.pipeline_parallel * 10 + (layout.expert_parallel > 1)
    criteria = [columns.makespan_s[alive]]
    if MODES[mode].runs_ahead:
        criteria += [columns.steady_s[alive], columns.recompute_s[alive]]
        criteria += [] if columns.ahead_s is None else list(columns.ahead_s[alive].T)
    if MODES[mode].streams:
        assert columns.ends_s is not None
        criteria += list(columns.ends_s[alive].T)
    elif MODES[mode].waits_for_groups:
        criteria.append(columns.group_s[alive])
    if MODES[mode].shares_devices or columns.lent_s is not None:
        criteria += [columns.awake_bytes[alive], columns.asleep_bytes[alive], columns.transition_s[alive]]
        criteria.append(columns.waking_bytes[alive])
    if columns.lent_s is not None:
        criteria += list(columns.lent_s[alive].T)
    criteria += [columns.departures[alive].astype(np.float64), columns.doubled[alive]]
    return group, np.stack(criteria, axis=1)


def trainer_criteria(
    columns: TrainerColumns, alive: IntArray, mode: Mode, *, visited: bool = False, scored_apart: bool = False,
    lends: bool = False,
) -> tuple[IntArray, FloatArray]:  # fmt: skip
    """(group, criteria): compared within equal shards and backend, on which weight sync and overheads depend, and
    within equal rings and recompute.

    ``visited``: scorers take turns with the trainer, and need room beside it. ``scored_apart``: the judge may give
    scoring a larger budget than training's, with which columns are timed here, so that training counts by itself, too.
    ``lends``: engines wake on its devices.
    """
    layout = columns.layout.take(alive)
    shards = np.where(layout.zero_stage >= 3, layout.shards, 1) * layout.tensor_parallel * layout.pipeline_parallel
    backend = columns.backend[alive]
    group = (shards * 64 + layout.tensor_parallel) * (backend.max(initial=0) + 1) + backend
    # closed forms tell budgets of one grid apart, but not a ring from replicas, or recompute, by less than a percent
    group = (group * 2 + columns.parked[alive]) * len(RECOMPUTE) + layout.activation_recompute
    group = group * (layout.devices.max(initial=0) + 1) + layout.context_parallel * layout.ulysses
    criteria = [columns.busy_s[alive]]
    if scored_apart:
        criteria.append(columns.trained_s[alive])
    if MODES[mode].shares_devices or lends:
        criteria += [columns.peak_bytes[alive], columns.idle_bytes[alive], columns.syncing_bytes[alive]]
    elif visited:
        criteria.append(columns.idle_bytes[alive])
        if columns.values_s.any():  # scorers stand in the way of the trainer's own scoring, not of a critic's values
            criteria.append((columns.trained_s + columns.scoring_s)[alive])
    # replicas wait for each other, which closed forms do not see, whether they meet in every layer or once an update
    criteria += [each.astype(np.float64) for each in (layout.data_parallel, columns.departures[alive])]
    criteria.append(columns.doubled[alive])
    return group, np.stack(criteria, axis=1)


def undominated(alive: IntArray, group: IntArray, criteria: FloatArray, key: IntArray | None = None) -> IntArray:
    """Those of the columns ``alive`` that no other of their group, and of their key, dominates.

    Parameters
    ----------
    group, criteria : of the columns that are alive ``[alive]``, ``[alive][criteria]``
    key : of all columns, not negative for those alive ``[columns]``; None: one for all
    """
    if key is not None and len(alive):
        group = key[alive] * (group.max() + 1) + group
    return np.asarray(alive[pareto_mask(criteria, group)])
