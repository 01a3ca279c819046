"""StageSeconds: what an rl_step is made of, for one candidate or a million; the one noun for seconds of stages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlperf.layout import FloatArray


def _none() -> FloatArray:
    return np.zeros(())


@dataclass(frozen=True, eq=False)
class StageSeconds:
    """Seconds of the stages of one batch (one rl_step); arrays that broadcast together.

    Attributes
    ----------
    rollout_s : makespan of a batch rolled out alone, its tail included; of an rl_step in which finished requests are
        replaced at once (``rl_step_s`` is known), what the batch takes the engines [s]
    scoring_s : all log-probability passes, and the critic's values; where it has devices of its own, until both end [s]
    training_s : all optimizer updates of the batch, and the critic's; on devices of its own, until both end [s]
    weight_sync_s : trainer to engines [s]
    reward_s : reward time not hidden behind the rollout [s]
    data_movement_s : batch to the trainer and back [s]
    offload_s : sleep, wake, offload, onload; only where rollout and training share devices [s]
    other_s : all that a framework spends per rl_step in no stage (advantages, logging, controller) [s]
    rollout_steady_s : seconds per batch when finished requests are replaced at once; None = ``rollout_s`` [s]
    rollout_group_s : from the start of a group to its last response, mean; None = ``rollout_s`` [s]
    rollout_first_s : how long the chunks of a streamed batch hold its trainer up; None = until the first is complete,
        as if groups ended evenly until ``rollout_s``, on average after ``rollout_group_s``
        (`modes.first_chunk_s`) [s]
    recompute_s : prefill of the interrupted requests after a weight sync [s]
    swap_s : pause of an engine that takes weights in flight [s]
    scorer_s : what a batch takes the slowest scorer on devices of its own: no more batches pass it [s]
    rl_step_s : from one rl_step to the next, where a mode has put the stages in order [s]
    """

    rollout_s: FloatArray
    scoring_s: FloatArray = field(default_factory=_none)
    training_s: FloatArray = field(default_factory=_none)
    weight_sync_s: FloatArray = field(default_factory=_none)
    reward_s: FloatArray = field(default_factory=_none)
    data_movement_s: FloatArray = field(default_factory=_none)
    offload_s: FloatArray = field(default_factory=_none)
    other_s: FloatArray = field(default_factory=_none)
    rollout_steady_s: FloatArray | None = None
    rollout_group_s: FloatArray | None = None
    rollout_first_s: FloatArray | None = None
    recompute_s: FloatArray = field(default_factory=_none)
    swap_s: FloatArray = field(default_factory=_none)
    scorer_s: FloatArray = field(default_factory=_none)
    rl_step_s: FloatArray = field(default_factory=_none)

    @classmethod
    def of(cls, rollout_s: npt.ArrayLike, **stages: npt.ArrayLike | None) -> StageSeconds:
        """From plain numbers or arrays.

        >>> float(StageSeconds.of(60.0, training_s=20.0, other_s=1.0).training_s)
        20.0
        """
        arrays = {name: np.asarray(value, np.float64) for name, value in stages.items() if value is not None}
        return cls(np.asarray(rollout_s, np.float64), **arrays)


STAGES = (
    "rollout_s", "reward_s", "scoring_s", "training_s", "weight_sync_s", "data_movement_s", "offload_s", "other_s",
)  # fmt: skip
"""The stages that an rl_step consists of, as they are shown."""
