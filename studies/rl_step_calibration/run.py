"""Fit what NeMo-RL adds around its stages, leave one configuration out in turn, and write the constants.

    python studies/rl_step_calibration/run.py            prints the fit, the shipped constants and what is left out
    python studies/rl_step_calibration/run.py --left-out leaves one configuration out in turn
    python studies/rl_step_calibration/run.py --write    also writes the constants into hwprofiles/calibrations

Measured rl_steps are found through RLPERF_DATA (default: ../shared/data beside the checkout).
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.rl_step.framework import constant, fit_framework, with_constants
from rlperf.calibrate.rl_step.predict import REST, predict_step
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.calibrate.tables import read_table
from rlperf.specs.rl_calibration import FrameworkCalibration, load_framework_calibration

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RLPERF_DATA", ROOT.parent / "shared" / "data")) / "measured" / "rl_step.csv"

# One configuration a line. Reruns (nemo_rl_v0_3_0007, _0008) of these are held out of fit and validation alike.
MEGATRON = (
    ("nemo_rl_v0_3_0000",),  # 8B on 8 H100: stages
    ("nemo_rl_v0_3_0005",),  # 30B-A3B on 64 H100: stages of a mixture of experts
    ("nemo_rl_v0_4_0009", "nemo_rl_v0_5_0020"),  # 32B one step off on 64 H100: the trainer alone sets the step
    ("nemo_rl_v0_5_0018",),  # 30B-A3B one step off on 32 H100: the same for experts
    ("nemo_rl_v0_4_0000", "nemo_rl_v0_5_0010"),  # 8B on 16 H100: two later releases
)
DTENSOR = (("nemo_rl_v0_3_0001",),)  # 8B on 8 H100: stages
STAGES = ("rollout_s", "scoring_s", "train_s", "weight_sync_s")
FREE = {
    "nemo_rl_megatron": (
        "engine_host", "engine_host_per_request", "step", "training.update", "training.scoring_pass",
        "training.moe_layer", "weight_sync.fixed", "weight_sync.per_tensor",
    ),
    "nemo_rl_dtensor": ("step", "weight_sync.fixed"),
}  # fmt: skip
# One configuration of the DTensor backend cannot tell these apart: the engine is the same, and so is the framework.
SHARED = (
    "engine_host", "engine_host_per_request", "training.update", "training.moe_layer", "weight_sync.per_tensor",
)  # fmt: skip


def measured_rows() -> dict[str, StepRow]:
    return {row.row_id: row for row in read_all(StepRow, read_table(DATA))[0]}


def errors(framework: FrameworkCalibration, rows: Sequence[StepRow], weight: float = 1.0) -> list[float]:
    """ln(predicted / measured) of every published stage and step of the rows, and of what lies in no stage."""
    found = []
    for row in rows:
        prediction = predict_step(row, framework=framework)
        stated = {name: value for name, value in row.measured.items() if name != REST}
        found += [weight * float(np.log(prediction.stage_s(name) / value)) for name, value in stated.items()]
        if all(name in row.measured for name in STAGES):
            rest = row.measured["step_s"] - sum(row.measured[name] for name in STAGES)
            stages = prediction.stages
            between = stages.data_movement_s + stages.other_s + stages.transitions.total_s
            found.append(0.5 * weight * float(np.log(between / rest)))  # whole seconds: rounded twice
    return found


def fit(start: FrameworkCalibration, sets: Sequence[Sequence[StepRow]]) -> FrameworkCalibration:
    """One weight a configuration: two releases of one count as one."""

    def residuals(candidate: FrameworkCalibration) -> list[float]:
        return [e for rows in sets for e in errors(candidate, rows, len(rows) ** -0.5)]

    return fit_framework(start, residuals, FREE[start.id])


def left_out(start: FrameworkCalibration, sets: Sequence[Sequence[StepRow]]) -> list[float]:
    """Measured over predicted rl_step of every configuration when the fit did not see it."""
    ratios = []
    for k, rows in enumerate(sets):
        others = [other for j, other in enumerate(sets) if j != k]
        found = fit(start, others)
        ratios += [row.measured["step_s"] / predict_step(row, framework=found).rl_step_s for row in rows]
    return ratios


def write(framework: FrameworkCalibration) -> None:
    """Replace the fitted numbers in the shipped file; comments and provenance stay."""
    path = ROOT / "hwprofiles" / "calibrations" / "frameworks" / f"{framework.id}.yaml"
    text = path.read_text()
    for name in dict.fromkeys((*FREE[framework.id], *SHARED)):
        owner, _, field = name.rpartition(".")
        value = float(f"{constant(framework, name):.3g}")
        if owner == "weight_sync":
            # whatever carries the tensors on, they are exported alike
            for transport in ("colocated", "nccl")[: 2 if field == "per_tensor" else 1]:
                pattern = rf"(transport: {transport}.*?\n    {field}: )\S+ m?s"
                text = re.sub(pattern, rf"\g<1>{value} s", text, count=1, flags=re.S)
        else:
            text = re.sub(rf"(\n *{field}: {{value: )\S+ m?s", rf"\g<1>{value} s", text, count=1)
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--left-out", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    rows = measured_rows()
    sets = {
        "nemo_rl_megatron": [[rows[name] for name in names] for names in MEGATRON],
        "nemo_rl_dtensor": [[rows[name] for name in names] for names in DTENSOR],
    }
    shared: dict[str, float] = {}
    for name, groups in sets.items():
        shipped = load_framework_calibration(name)
        found = fit(with_constants(shipped, shared), groups)
        shared = shared or {item: constant(found, item) for item in SHARED}
        print(name)
        for item in FREE[name]:
            print(f"  {item:24s} fitted {constant(found, item):.4g}   shipped {constant(shipped, item):.4g}")
        if asked.left_out and len(groups) > 1:
            ratios = np.array(left_out(shipped, groups))
            print(f"  left out in turn: measured / predicted {np.round(np.sort(ratios), 3).tolist()}")
        if asked.write:
            write(found)


if __name__ == "__main__":
    main()
