"""A run's log beside the prediction of its configuration: what each timer should have said, and what stands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlperf.frameworks.audit.finding import Finding, key_of
from rlperf.frameworks.imports import Imported
from rlperf.frameworks.run import ref
from rlperf.plan.answer.plan import Prediction
from rlperf.specs.step_log import StepLog
from rlperf.units import human_seconds

OVERLAP = 0.02
"""Stages that add up to this much more than the rl_step must overlap."""
PAUSED = 0.1
"""Validation and checkpoints that take more than this of an rl_step, in the mean over all, are told of [1]."""


@dataclass(frozen=True)
class Compared:
    """A stage (or the whole rl_step) as measured and as predicted [s]; None: it could not be predicted.

    ``of`` : what the log's timer is of, where it is not the stage alone
    """

    stage: str
    measured_s: float
    predicted_s: float | None
    of: str = ""

    @property
    def name(self) -> str:
        """The stage as people write it."""
        return self.stage if self.stage == "rl_step" else self.stage.replace("_", " ")

    @property
    def named(self) -> str:
        """The stage, and what of it is meant."""
        return f"{self.name} ({self.of})" if self.of else self.name

    @property
    def words(self) -> str:
        """``rollout: measured 93 s, predicted 81.2 s (it took 1.15 times that)``.

        >>> Compared("rl_step", 60.0, None).words, Compared("weight_sync", 2.0, 1.0).words[:11]
        ('rl_step: measured 1 min 0 s, not predicted', 'weight sync')
        """
        said = f"{self.named}: measured {human_seconds(self.measured_s)}, "
        if self.predicted_s is None:
            return said + "not predicted"
        ratio = f" (it took {self.measured_s / self.predicted_s:.2f} times that)" if self.predicted_s > 0 else ""
        return said + f"predicted {human_seconds(self.predicted_s)}{ratio}"


def compared(predicted: Prediction | None, log: StepLog | None, *, sharing: bool = False) -> tuple[Compared, ...]:
    """The log's mean seconds beside the prediction's, stage by stage, the rl_step last; none where there is no log.

    ``sharing`` : whether rollout and trainer take turns on the same devices
    """
    if log is None:
        return ()
    steady = log.settled()
    due, of = ({}, "") if predicted is None else _due(predicted, steady, sharing)
    means = {**steady.stage_means(), "rl_step": steady.mean("rl_step_s")}
    return tuple(
        Compared(stage, seconds, due.get(stage), of if stage == "rollout" else "")
        for stage, seconds in means.items()
        if seconds is not None
    )


def _due(predicted: Prediction, log: StepLog, sharing: bool) -> tuple[Mapping[str, float], str]:
    """Seconds that the log's timers should say by stage, and what that of the rollout is of.

    Where the rollout runs beside the trainer, most frameworks time what the trainer waited for it (verl, NeMo-RL,
    AReaL, SkyRL): stages of such a log add up to no more than its rl_step.
    """
    due = {**predicted.stages_s.model_dump(), "rl_step": predicted.rl_step_s}
    stated = log.stage_means()
    others = sum(seconds for stage, seconds in due.items() if stage not in ("rollout", "reward", "rl_step"))
    within = sum(stated.values()) <= (1.0 + OVERLAP) * (log.mean("rl_step_s") or 0.0)
    if within and due["rollout"] + others > (1.0 + OVERLAP) * predicted.rl_step_s:
        return {**due, "rollout": max(predicted.rl_step_s - others, 0.0)}, "what the trainer waited for it"
    if log.rollout_holds_sync(sharing):
        rest = 0.0 if "offload" in stated else due["offload"]
        return {**due, "rollout": due["rollout"] + due["weight_sync"] + rest}, "with the weight sync"
    return due, ""


def log_findings(
    imported: Imported, beside: tuple[Compared, ...], predicted: Prediction, log: StepLog
) -> list[Finding]:
    """Stages whose measured seconds lie far from the prediction, and measured lengths against the limits."""
    found = []
    for each in beside:
        expected = each.predicted_s or 0.0
        if each.stage == "rl_step" or expected <= 0.0:
            continue
        if each.measured_s > max(2.0 * expected, 0.05 * predicted.rl_step_s):
            message = f"{each.named} took {human_seconds(each.measured_s)} where {human_seconds(expected)} is predicted"
            advice = "`rlperf calibrate logs` fits this cluster; a bad node or link shows like this too"
            where = f"timing of {each.name}"
            found.append(Finding("hint", where, message, advice, "never", log.source, rule="slow_stage"))
    pause = float(np.nansum(log.pause_s)) / log.n
    if pause > PAUSED * (log.settled().mean("rl_step_s") or np.inf):
        message = f"they take {human_seconds(pause)} of every rl_step in the mean, beside its own seconds"
        where, advice = "timing of validation and checkpoints", "do them less often, or validate on fewer prompts"
        found.append(Finding("hint", where, message, advice, "never", log.source, rule="pauses"))
    cut = log.mean("truncated_fraction")
    if cut is not None and cut > 0.2:
        key = key_of(imported, ref("batch.max_response_tokens"))
        message = f"{100 * cut:.1f} % of the responses are cut at the maximum length"
        found.append(
            Finding("warning", key, message, "raise it, or penalise length", "never", log.source, rule="truncated")
        )
    return found
