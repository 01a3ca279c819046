"""How batch size and maximum length change the rl_step: a sweep as users write it.

Run: python studies/batch_sweep/run.py [--write]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import polars as pl

import rlperf

HERE = Path(__file__).parent
PROMPTS = (64, 128, 256)
MAX_RESPONSE_TOKENS = (4096, 8192, 16384)


def job_of(prompts: int, max_response_tokens: int) -> rlperf.Job:
    """GRPO on math problems, Qwen3-8B on one DGX H100, engine and trainer pinned."""
    return rlperf.Job.model_validate(
        {
            "name": f"{prompts} prompts, {max_response_tokens} tokens",
            "architecture": "Qwen3-8B",
            "cluster": "dgx_h100",
            "framework": "verl==0.9.1",
            "trainer_backends": ["fsdp2"],
            "tasks": [
                {
                    "name": "math",
                    "workload": "math",
                    "prompts_per_step": prompts,
                    "group_size": 8,
                    "mini_batch": 64,
                    "max_response_tokens": max_response_tokens,
                }
            ],
            "pools": [
                {
                    "role": "rollout",
                    "layout": {"tensor_parallel": 2},
                    "settings": {"memory_fraction": 0.7, "max_running": 256},
                },
                {"role": "trainer", "layout": {"ulysses": 4, "activation_recompute": "full"}},
            ],
        }
    )  # fmt: skip


def sweep() -> pl.DataFrame:
    """One row per point."""
    rows = []
    for prompts in PROMPTS:
        for cap in MAX_RESPONSE_TOKENS:
            predicted = rlperf.predict_job(job_of(prompts, cap))
            rows.append(
                {
                    "prompts_per_step": prompts,
                    "max_response_tokens": cap,
                    "rl_step_s": round(predicted.rl_step_s, 2),
                    "low_s": round(predicted.low_s, 2),
                    "high_s": round(predicted.high_s, 2),
                    "rollout_s": round(predicted.stages_s.rollout, 2),
                    "training_s": round(predicted.stages_s.training, 2),
                    "truncated_fraction": round(predicted.truncated_fraction, 4),
                    "tokens_per_s_per_device": round(predicted.tokens_per_s_per_device, 1),
                    "fits": predicted.fits,
                }
            )
    return pl.DataFrame(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record expected.csv")
    asked = parser.parse_args()
    table = sweep()
    with pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_width_chars=140):
        print(table)
    if asked.write:
        table.write_csv(HERE / "expected.csv")
