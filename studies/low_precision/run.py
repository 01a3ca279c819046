"""Published gains of fp8, predicted: `python studies/low_precision/run.py [OUT.csv]`.

Needs the measured data (``RLPERF_DATA``, by default ``../shared/data`` beside the checkout); seconds of one core. A
case is a pair of published runs that differ in nothing that is printed but the precision (and what its name says); its
gain is the seconds of the wider over those of the narrower. Rollouts alone were published without lengths and layouts:
their gain is the middle over all that these may be.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from rlperf.calibrate.rl_step.assumed_lengths import AssumedLengths
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.validate import predictor
from rlperf.cost.engine_memory import engine_memory
from rlperf.cost.engine_step import EngineLimits
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.replica import Replica
from rlperf.layout import FloatArray, Layout
from rlperf.sim.rl_step.overheads import engine_in_framework
from rlperf.sim.rollout.closed_form import take_census
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.rl_calibration import load_framework_calibration

METRICS = {"rl_step": "step_s", "training": "step_s"}
"""What is compared, by kind of table."""
SAME = 0.02
"""A gain of less is none: published and predicted both have no direction then."""


@dataclass(frozen=True)
class Case:
    """Two rows of one table, in bf16 and in a narrower type."""

    name: str
    kind: str
    wide: str
    narrow: str


CASES = (
    Case("NeMo-RL v0.5 GRPO, Llama-3.1-8B, 16 H100, fp8 rollout and training", "rl_step",
         "nemo_rl_v0_5_0011", "nemo_rl_v0_5_0021"),
    Case("NeMo-RL v0.6 GRPO, DeepSeek-V3, 512 H100, fp8 rollout (TP 32 to 16) and training", "rl_step",
         "nemo_rl_v0_6_0035", "nemo_rl_v0_6_0043"),
    Case("torchtitan, Llama-3.1-8B, 8 H100, fp8 products", "training", "torchtitan_0001", "torchtitan_0002"),
    Case("torchtitan, Llama-3.1-8B, 128 H100, fp8 products", "training", "torchtitan_0008", "torchtitan_0009"),
    Case("torchtitan, Llama-3.1-8B, 64 H100, TP 8, asynchronous, fp8 products", "training",
         "torchtitan_0025", "torchtitan_0027"),
    Case("torchtitan, Llama-3.1-8B, 64 H100, TP 8, fp8 products", "training", "torchtitan_0024", "torchtitan_0026"),
    Case("torchtitan, Llama-3.1-8B, 64 H100, TP 8, asynchronous, fp8 by rows", "training",
         "torchtitan_0025", "torchtitan_0029"),
    Case("torchtitan, Llama-3.1-8B, 64 H100, TP 8, fp8 by rows", "training", "torchtitan_0024", "torchtitan_0028"),
    Case("Megatron-Bridge 25.11, DeepSeek-V3, GB300, mxfp8", "training",
         "megatron_bridge_0237", "megatron_bridge_0238"),
    Case("llm-foundry, MPT-3B, 8 H100, amp_fp8, 32k tokens a sequence", "training",
         "llm_foundry_h100_0041", "llm_foundry_h100_0070"),
    Case("llm-foundry, MPT-3B, 8 H100, amp_fp8, 8k tokens a sequence", "training",
         "llm_foundry_h100_0043", "llm_foundry_h100_0071"),
    Case("llm-foundry, MPT-3B, 8 H100, amp_fp8, 512 tokens a sequence", "training",
         "llm_foundry_h100_0049", "llm_foundry_h100_0073"),
    Case("llm-foundry, MPT-1B, 8 H100, amp_fp8, 32k tokens a sequence", "training",
         "llm_foundry_h100_0051", "llm_foundry_h100_0074"),
    Case("llm-foundry, MPT-1B, 8 H100, amp_fp8, 512 tokens a sequence", "training",
         "llm_foundry_h100_0060", "llm_foundry_h100_0076"),
)  # fmt: skip


WIDE, NARROW = "bf16", "fp8_block"
GROUP, CAP, PROMPT = 16, 20480.0, 150
"""Responses to a prompt, most tokens of one as printed; tokens of a prompt presumed."""
MEANS, FRACTIONS = (1500.0, 3000.0, 6000.0, 9000.0), (0.5, 0.6, 0.7, 0.8, 0.9)
"""Mean response [tokens] from a base model's first rl_steps to its last; memory fraction from verl's default (0.5:
frameworks/behaviour/verl.md, section 4) to the engine's: neither is printed."""


@dataclass(frozen=True)
class RolloutCase:
    """``groups`` prompts of a rollout on so many devices, at any of the tensor parallel degrees; gain as published."""

    name: str
    architecture: str
    devices: int
    groups: int
    tensor_parallel: tuple[int, ...]
    published: float
    kind: str = "rollout"


ROLLOUTS = (
    RolloutCase("verl, DAPO, Qwen3-8B-Base, 8 H100, fp8 rollout, CUDA 12.6", "Qwen3-8B", 8, 96, (1, 2), 1.12),
    RolloutCase("verl, DAPO, Qwen3-8B-Base, 8 H100, fp8 rollout, CUDA 12.9", "Qwen3-8B", 8, 96, (1, 2), 1.18),
    RolloutCase("verl, DAPO, Qwen3-30B-A3B-Base, 16 H100, fp8 rollout", "Qwen3-30B-A3B", 16, 96, (2, 4), 1.35),
)
"""Recalled from verl's page on fp8 rollouts (docs/low_precision/fp8.md, late in 2025), of which no file is at hand:
up to 18 % with CUDA 12.9, over 35 % for the experts."""


@dataclass(frozen=True)
class Found:
    """One case: published and predicted gain, whether a fit saw one of the rows."""

    case: Case | RolloutCase
    published: float
    predicted: float
    seen: bool

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.published - 1.0

    @property
    def same_direction(self) -> bool:
        """Whether both gain, both lose, or both do neither."""
        return _direction(self.published) == _direction(self.predicted)

    def cells(self) -> dict[str, str]:
        """As a line of the expected file."""
        return {
            "case": self.case.name,
            "kind": self.case.kind,
            "published": f"{self.published:.3f}",
            "predicted": f"{self.predicted:.3f}",
            "error": f"{100.0 * self.error:+.1f} %",
            "direction": "same" if self.same_direction else "other",
            "seen": str(int(self.seen)),
        }


def _direction(gain: float) -> int:
    return 0 if abs(gain - 1.0) < SAME else 1 if gain > 1.0 else -1


def predict(data: Path, cases: Iterable[Case] = CASES) -> list[Found]:
    """Every case, its rows alone predicted."""
    found = []
    for case in cases:
        file = data / "measured" / f"{case.kind}.csv"
        table = read_table(file)
        pair = replace(table, rows=tuple(row for row in table if row.row_id in (case.wide, case.narrow)))
        outcome = predictor(case.kind)(file, pair)
        figures = {one.row_id: one for one in outcome.predictions if one.metric == METRICS[case.kind]}
        if set(figures) != {case.wide, case.narrow}:
            raise SystemExit(f"{case.name}: {[one.reason for one in outcome.refused]}")
        wide, narrow = figures[case.wide], figures[case.narrow]
        seen = wide.used_in_calibration or narrow.used_in_calibration
        found.append(Found(case, wide.measured / narrow.measured, wide.predicted / narrow.predicted, seen))
    return found


def told(case: RolloutCase) -> FloatArray:
    """Gains of fp8 over everything that a case leaves open ``[cases]`` [1]."""
    found = []
    for tensor, mean, fraction in product(case.tensor_parallel, MEANS, FRACTIONS):
        each = case.groups * GROUP * tensor // case.devices
        lengths = AssumedLengths().draw(each // GROUP, GROUP, mean, CAP).ravel().astype(np.int64)
        work = Trajectories.of(np.full(len(lengths), PROMPT), lengths)
        wide, narrow = (_rollout_s(case.architecture, work, tensor, fraction, dtype) for dtype in (WIDE, NARROW))
        found.append(wide / narrow)
    return np.array(found)


def rollouts(cases: Iterable[RolloutCase] = ROLLOUTS) -> list[Found]:
    """Every rollout that was published by itself; no fit saw one."""
    return [Found(case, case.published, float(np.median(told(case))), seen=False) for case in cases]


def _rollout_s(name: str, work: Trajectories, tensor: int, fraction: float, dtype: str) -> float:
    architecture, hardware, engine = load_architecture(name), load_hardware("h100_sxm"), load_engine_calibration("vllm")
    layout = Layout.of(tensor_parallel=tensor)
    memory = engine_memory(Replica.of(architecture, hardware, engine, layout, dtype), memory_fraction=fraction)
    cost = engine_step_cost(Replica.of(architecture, hardware, engine, layout, dtype))
    cost = engine_in_framework(cost, load_framework_calibration("verl"))
    limits = EngineLimits(kv_tokens=float(np.asarray(memory.kv_tokens).item()), max_running=engine.max_running)
    return float(take_census(work, limits).makespan_s(cost))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="CSV to write; default: the terminal")
    asked = parser.parse_args()
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    lines = [one.cells() for one in (*predict(Path(os.environ.get("RLPERF_DATA", beside))), *rollouts())]
    with asked.out.open("w", newline="") if asked.out else nullcontext(sys.stdout) as out:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    main()
