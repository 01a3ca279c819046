"""AReaL's microbatches without a cap of their tokens: a whole pass of a rank, in as many parts as asked for."""

from __future__ import annotations

from math import lcm

from rlperf.frameworks.keytable import Flat
from rlperf.frameworks.run import Run, TrainerRun
from rlperf.units import MOST_COUNT

SPEC = "actor.mb_spec."


def parts_of(trainer: TrainerRun, flat: Flat) -> int:
    """Microbatches of a pass: ``n_mbs``, of a pipeline two a stage and as many for each (behaviour sheet, 2).

    >>> parts_of(TrainerRun(), {}), parts_of(TrainerRun(pipeline_parallel=2), {"actor.mb_spec.n_mbs": 5})
    (1, 6)
    """
    least, divisor = (int(flat.get(SPEC + name) or 1) for name in ("n_mbs", "n_mbs_divisor"))
    stages = trainer.pipeline_parallel
    multiple = lcm(divisor, stages)
    return -(-max(least, 2 * stages if stages > 1 else 1) // multiple) * multiple


def whole_passes(run: Run, flat: Flat) -> TrainerRun:
    """The trainer with the sequences of its microbatches where no cap is stated, which is 1e12 tokens then.

    An update's on every rank are cut into ``n_mbs`` parts (1 unless stated), and so are the rl_step's to be scored. A
    cap beyond any count of tokens (``1e9``) is none.
    """
    trainer, batch = run.trainer, run.batch
    if (trainer.token_budget or MOST_COUNT + 1) <= MOST_COUNT:
        return trainer
    ranks = (trainer.data_parallel or 1) * parts_of(trainer, flat)
    update, scored = (-(-prompts * batch.group_size // ranks) for prompts in (batch.mini, batch.prompts))
    return trainer.having(
        microbatch=update, scoring_microbatch=scored, token_budget=None, scoring_token_budget=None, dynamic=False
    )


def cap_of(run: Run) -> int | None:
    """``max_tokens_per_mb`` of a run: its token budget, or as many of its longest sequences as it counts.

    None, no cap, where those are all of a pass.
    """
    ours = run.trainer
    usual = whole_passes(run, {})
    if (ours.microbatch, ours.scoring_microbatch) == (usual.microbatch, usual.scoring_microbatch):
        return ours.token_budget
    return ours.token_budget or ours.samples * run.batch.longest_tokens
