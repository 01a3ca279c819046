"""AReaL without a cap of tokens: one microbatch of all that an update, or a pass, has on a rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlperf.api import ask
from rlperf.frameworks.areal.microbatches import cap_of
from rlperf.frameworks.export import write_file
from rlperf.frameworks.imports import import_config, job_of, job_text
from rlperf.frameworks.run import Run
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.predict import evaluate_job
from studies.round_trip.run import configs, trip

FILE = """experiment_name: one
trial_name: one
gconfig: {{n_samples: 8, max_new_tokens: 1024}}
train_dataset: {{batch_size: 128, max_length: 1024}}
actor: {{backend: "{trainer}", path: Qwen/Qwen2.5-1.5B-Instruct, gradient_checkpointing: true,
        ppo_n_minibatches: 4, recompute_logprob: true, mb_spec: {{{cap}}}}}
rollout: {{backend: "sglang:d8", max_head_offpolicyness: 2, consumer_batch_size: 128}}
cluster: {{n_nodes: 2, n_gpus_per_node: 8}}
"""
"""128 sequences on each of 8 ranks, in four updates."""


def read(folder: Path, cap: str = "", trainer: str = "fsdp:d8") -> Run:
    file = folder / "run.yaml"
    file.write_text(FILE.format(cap=cap, trainer=trainer))
    return import_config([file], "areal").run


def judged(folder: Path, cap: str = "", trainer: str = "fsdp:d8") -> Evaluation:
    read(folder, cap, trainer)
    job = job_of(import_config([folder / "run.yaml"], "areal"), cluster="dgx_h100")
    return evaluate_job(ask(job).context)[0]


@pytest.mark.parametrize(
    ("cap", "trainer", "update", "scored"),
    [
        ("", "fsdp:d8", 1, 1),
        ("n_mbs: 4", "fsdp:d8", 4, 4),
        ("n_mbs: 3, n_mbs_divisor: 2", "fsdp:d8", 4, 4),
        ("", "megatron:d4p2", 4, 4),  # Megatron takes at least two a stage
    ],
)
def test_without_a_cap_a_pass_is_as_many_microbatches_as_asked_for(
    cap: str, trainer: str, update: int, scored: int, tmp_path: Path
) -> None:
    found = judged(tmp_path, cap, trainer)
    assert np.all(found.updated.batches.count == update) and np.all(found.scored.batches.count == scored)


def test_no_cap_is_a_cap_that_nothing_reaches(tmp_path: Path) -> None:
    """In seconds and in memory, which is that of the sequences of a pass, and above what a cap leaves."""
    none, beyond = judged(tmp_path), judged(tmp_path, "max_tokens_per_mb: 10000000")
    assert none.rl_step_s == pytest.approx(beyond.rl_step_s, rel=1e-3)
    capped, (held, limit) = judged(tmp_path, "max_tokens_per_mb: 10240"), (none.held.peak, beyond.held.peak)
    assert float(held[0]) == float(limit[0]) > 2.0 * float(capped.held.peak[0])
    assert none.rl_step_s < capped.rl_step_s
    assert float(np.ravel(none.updated.batches.tokens).mean()) < 32 * 2048


def test_a_cap_beyond_any_count_is_none(tmp_path: Path) -> None:
    stated = read(tmp_path, "max_tokens_per_mb: 1000000000").trainer
    assert stated == read(tmp_path).trainer
    assert trip(tmp_path / "run.yaml", tmp_path) == 5


def test_no_cap_survives_export_and_import(tmp_path: Path) -> None:
    read(tmp_path)
    assert trip(tmp_path / "run.yaml", tmp_path) == 5
    job = tmp_path / "job.yaml"  # and without the imported keys beside the job
    job.write_text(job_text(job_of(import_config([tmp_path / "run.yaml"], "areal"))))
    job.with_suffix(".keys.yaml").unlink()
    again = import_config(configs(write_file(job, None, tmp_path / "plain")), "areal").run.trainer
    assert (again.token_budget, again.microbatch, again.scoring_microbatch) == (None, 32, 128)


def test_fewer_sequences_than_a_pass_has_are_a_cap_of_their_tokens(tmp_path: Path) -> None:
    run = read(tmp_path)
    assert cap_of(run) is None
    few = run.trainer.having(microbatch=2)
    assert cap_of(Run(batch=run.batch, trainer=few)) == 2 * 2048
