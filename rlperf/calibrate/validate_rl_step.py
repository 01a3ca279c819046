"""RL steps, predicted against measured: rows of ``measured/rl_step.csv`` and files in that form."""

from __future__ import annotations

from pathlib import Path

from rlperf.calibrate.columns import read
from rlperf.calibrate.rl_step.configuration import configuration_digest
from rlperf.calibrate.rl_step.predict import REST, STAGES, StepPrediction, predict_step
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.calibrate.tables import Row, Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.cost.parameters import parameters
from rlperf.errors import SpecError
from rlperf.sim.rl_step.stage_seconds import usual_sync_fit
from rlperf.specs.modes import MODES

NEEDED = ("framework", "architecture", "gpu", "n_gpus", "osl_mean")


def predict_rows(path: Path, table: Table) -> Outcome:
    """Predict the seconds of every rl_step, and of its stages where they are published.

    The law of lengths that was assumed stands in ``assumed`` of every prediction.
    """
    table.need(*NEEDED)
    table.need_one("measured_step_s", *(f"measured_{stage}" for stage in STAGES))
    return each_row(table, _figures)


def _figures(line: Row) -> list[PredictedFigure]:
    row = read(StepRow, line)
    if not row.measured:
        raise SpecError("no measured time in the row")
    return predictions_of(predict_step(row))


def predictions_of(found: StepPrediction) -> list[PredictedFigure]:
    """The whole step first, then its published stages."""
    row = found.row
    low, high = found.interval()
    bounds = {"step_s": (low, high)}
    for stage in (*STAGES, REST):
        if stage in row.measured:
            bounds[stage] = found.stage_interval(stage)
    return [
        PredictedFigure(
            row_id=row.row_id,
            group=row.group,
            metric=metric,
            measured=row.measured[metric],
            predicted=found.stage_s(metric),
            low=bounds[metric][0],
            high=bounds[metric][1],
            calibration=", ".join((found.framework.id, found.stack.calibration.id, row.hardware.calibration.id)),
            assumed=(f"response lengths: {found.law}, cut at {row.longest_response:.0f} tokens", *row.assumed),
            extrapolated=row.hardware.calibration.extrapolated or not found.framework.calibrated_on,
            used_in_calibration=seen(found, metric),
            stratum=stratum(row) if metric == "step_s" else release_stratum(row),
        )
        for metric in row.measured
        if metric in bounds
    ]


def seen(found: StepPrediction, metric: str = "step_s") -> bool:
    """Whether the framework's fit saw this configuration (reruns and releases of it count as seen), or this stage."""
    framework, mode = found.framework, found.evaluation.configuration.mode
    if configuration_digest(found.row.configuration) in framework.calibrated_on:
        return True
    stages = {
        "step_s": framework.step.provenance,
        "scoring_s": framework.training.scoring_pass.provenance,
        "train_s": framework.training.update.provenance,
        "weight_sync_s": usual_sync_fit(framework, MODES[mode].shares_devices).provenance,
    }
    if framework.adapters is not None and found.row.lora_rank:
        stages["rollout_s"] = framework.adapters.eager_row.provenance
    return metric in stages and found.row.row_id in stages[metric].rows


def release_stratum(row: StepRow) -> str:
    """Framework with its trainer, and release, by which stages are summed up: ``nemo_rl_megatron v0.3``."""
    return f"{row.framework} {row.release}".strip()


def stratum(row: StepRow) -> str:
    """Strata of the accuracy table: what is reported apart is named, the rest is dense or MoE.

    DeepSeek-V3 (latent attention, sixteen-way pipelines and experts at a tiny batch) and the 70B DTensor path stand
    apart; other frameworks than NeMo-RL too, because nothing of theirs was fitted.
    """
    if row.architecture.latent is not None:
        return "DeepSeek-V3"
    if row.framework == "nemo_rl_dtensor" and parameters(row.architecture) > 3e10:
        return "DTensor 70B"
    if any(text.startswith("framework=") for text in row.assumed):
        return "other frameworks"
    if not row.framework.startswith("nemo"):
        return f"{row.framework}, nothing fitted"
    return "MoE" if row.architecture.experts else "dense"
