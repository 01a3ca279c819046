"""What each technique that a configuration uses gains or costs: the same configuration without it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlperf.cost.dtypes import dtype_of
from rlperf.plan.judge.at_once import (
    FEWER,
    most_at_once,
    refills,
    under_way,
    with_fewer_at_once,
    with_fewer_running,
)
from rlperf.plan.judge.engine_cache import cache_shortage
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.question.context import Context, TaskContext
from rlperf.specs.pool import Role
from rlperf.specs.speculation import NONE
from rlperf.units import human_bytes, human_seconds, human_share

NARROW, WIDE = {"rollout_dtype": "weights of the engine", "kv_dtype": "cache"}, "bf16"
"""Setting of the rollout that may be narrow -> what it is the type of; what it is compared with."""
SWITCHES: dict[tuple[Role, str], tuple[str | bool | None, str]] = {
    ("rollout", "draft_training"): (False, "the head that drafts trained with its policy"),
    ("rollout", "expert_dispatch"): ("nccl", "{} between the experts of engines"),
    ("trainer", "expert_dispatch"): ("nccl", "{} between the experts of the trainer"),
    ("trainer", "compute_dtype"): (WIDE, "training in {}"),
    ("trainer", "shared_prefix"): (False, "prompts of a group computed once"),
    ("trainer", "turn_samples"): (False, "a sample for every turn"),
    ("trainer", "lora_rank"): (None, "adapters of rank {}"),
    ("trainer", "router_replay"): ("none", "experts repeated as recorded"),
    ("trainer", "optimizer"): ("adam", "muon"),
}
"""Setting of a pool -> (what it is without the technique, what the technique is called, with the setting's value)."""


def gains(context: Context, task: TaskContext, evaluation: Evaluation, fewer: tuple[str, ...] = ()) -> tuple[str, ...]:
    """A line per technique: what takes how long with it, and what it would take without.

    ``fewer``: what `fewer_at_once` tells, before which nobody asks whether there are enough environments.
    """
    return (
        *_of_drafts(context, task, evaluation),
        *_of_precision(context, task, evaluation),
        *_of_partial_rollouts(context, task, evaluation),
        *_of_readers(context, task, evaluation),
        *_of_lending(context, task, evaluation),
        *_of_jobs(context, task, evaluation),
        *_of_switches(context, task, evaluation),
        *(fewer or environments(context, task, evaluation)),
    )


def _of_switches(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """The same of every setting of `SWITCHES` that is on; types as wide as what they are compared with are not."""
    lines = []
    for (role, name), (off, words) in SWITCHES.items():
        value = getattr(evaluation.configuration.pool(role).settings, name)
        wide = name.endswith("_dtype") and not dtype_of(value).weight_bytes < dtype_of(WIDE).weight_bytes
        shared = name == "lora_rank" and evaluation.demand.batch.lora_jobs > 1  # by jobs that need adapters: `_of_jobs`
        if value in (None, off) or wide or shared:
            continue
        without = _without(context, task, evaluation, role, name, off)
        lines.append(_line(words.format(value), role, evaluation, without))
    return tuple(lines)


def _of_drafts(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """The same of drafted tokens, for the rollout: with and without them, and how many an engine_step yields."""
    word, table = evaluation.configuration.pool("rollout").settings.speculation, evaluation.cost.drafted
    if word is None or table is None:
        return ()
    off = evaluation.configuration.with_rollout(speculation=NONE)
    without = Judge(context, task).evaluate(evaluation.demand, off)
    now, then = (human_seconds(float(e.seconds.rollout_s.mean())) for e in (evaluation, without))
    ratio = float(without.seconds.rollout_s.mean() / evaluation.seconds.rollout_s.mean())
    yields = f"{table.tokens[table.drafts[1]]:.1f} tokens per engine_step"
    return (f"drafts {word} ({yields}): rollout {now} instead of {then} ({ratio:.2f} times as fast)",)


def _of_precision(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """The same of an engine's narrow weights and cache, each by itself; the sync is what changes beside the rollout."""
    settings, lines = evaluation.configuration.pool("rollout").settings, []
    for name, words in NARROW.items():
        word = getattr(settings, name)
        if word is None or not dtype_of(word).weight_bytes < dtype_of(WIDE).weight_bytes:
            continue
        wide = evaluation.configuration.with_rollout(**{name: WIDE})
        without = Judge(context, task).evaluate(evaluation.demand, wide)
        if short := cache_shortage(without):  # its seconds would be those of requests that evict one another
            lines.append(f"{word} {words}: in {WIDE} this layout cannot run ({short})")
            continue
        (now, then), (sent, plain) = (
            [float(getattr(e.seconds, stage).mean()) for e in (evaluation, without)]
            for stage in ("rollout_s", "weight_sync_s")
        )
        line = f"{word} {words}: rollout {human_seconds(now)} instead of {human_seconds(then)} in {WIDE} of one layout"
        sync = (
            f", weight sync {human_seconds(sent)} instead of {human_seconds(plain)}" if name == "rollout_dtype" else ""
        )
        lines.append(f"{line} ({then / now:.2f} times as fast){sync}")
    return tuple(lines)


def _of_partial_rollouts(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """The same of groups in flight beyond those that are waited for."""
    batch = evaluation.demand.batch
    if batch.over_provision <= 1.0:
        return ()
    demand = replace(evaluation.demand, batch=replace(batch, over_provision=1.0))
    configuration = replace(evaluation.configuration, batch=demand.batch)
    without = Judge(context, task).evaluate(demand, configuration)
    now, then = (float(e.seconds.rollout_s.mean()) for e in (evaluation, without))
    words = f"partial rollouts ({batch.over_provision:g} times the groups in flight)"
    return (f"{words}: rollout {human_seconds(now)} instead of {human_seconds(then)} ({then / now:.2f} times as fast)",)


def _of_readers(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """The same of replicas that read prompts for the others, with what sending their cache takes."""
    replicas = evaluation.replicas
    if replicas.apart is None:
        return ()
    without = Judge(context, task).evaluate(
        evaluation.demand, evaluation.configuration.with_rollout(prefill_replicas=0)
    )
    now, then = (float(e.seconds.rollout_s.mean()) for e in (evaluation, without))
    contexts = np.concatenate([each.prompt_tokens for each in evaluation.served])
    wire_s = replicas.apart.message_s + replicas.apart.token_s * float(contexts.mean())
    words = f"prompts read by {replicas.readers} of {replicas.count} replicas"
    sent = f"{human_seconds(wire_s)} to send a context of {contexts.mean():,.0f} tokens"
    instead = f"rollout {human_seconds(now)} instead of {human_seconds(then)} ({then / now:.2f} times as fast)"
    return (f"{words} ({sent}): {instead}",)


def _of_lending(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """The same of engines on the trainer's devices while it waits; where it seldom waits long enough, that it does."""
    lent = evaluation.replicas.lent
    if not lent:
        return ()
    without = Judge(context, task).evaluate(evaluation.demand, evaluation.configuration.with_rollout(borrows=False))
    joined = int((evaluation.seconds.rollout_s < evaluation.rollout.makespan_s).sum())
    now, then = (float(e.seconds.rollout_s.mean()) for e in (evaluation, without))
    words = (
        f"{lent} engines on the trainer's devices while it waits, in {joined} of {len(evaluation.rollouts)} rl_steps"
    )
    return (f"{words}: rollout {human_seconds(now)} instead of {human_seconds(then)} ({then / now:.2f} times as fast)",)


def _of_jobs(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """What several LoRA jobs gain over the same pools serving one after the other."""
    batch = evaluation.demand.batch
    jobs = batch.lora_jobs
    if jobs == 1:
        return ()
    own = replace(batch, prompts=batch.prompts // jobs, generated=-(-batch.generated // jobs), lora_jobs=1)
    demand = task.source.demand(own, evaluation.demand.rl_steps, context.job.seed)
    alone = _without(context, task, replace(evaluation, demand=demand), "trainer", "lora_jobs", 1).rl_step_s
    now, then = human_seconds(evaluation.rl_step_s), human_seconds(jobs * alone)
    instead = f"{then} one after the other ({jobs * alone / evaluation.rl_step_s:.2f} times as fast)"
    return (f"{jobs} LoRA jobs of {own.prompts} prompts on one base: rl_step {now}, {instead}",)


ENOUGH = 1.02
"""A rollout this much longer than with any number of environments waits for none."""


def fewer_at_once(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """How many trajectories at once serve best, where contexts are evicted while their tools run."""
    fewer = with_fewer_at_once(Judge(context, task), evaluation)
    best = min(fewer, key=lambda each: each.rl_step_s, default=evaluation)
    if best.rl_step_s > FEWER * evaluation.rl_step_s:
        return ()
    at, most = best.demand.batch.max_trajectories or 0, most_at_once(evaluation)
    words = f"{at:,} trajectories at once (max_trajectories) instead of {most:,}: rl_step "
    instead = f"instead of {human_seconds(evaluation.rl_step_s)}"
    why = "since fewer contexts are evicted while their tools run"
    return (f"{words}{human_seconds(best.rl_step_s)} {instead}, {why}",)


def fewer_running(context: Context, task: TaskContext, evaluation: Evaluation) -> int | None:
    """How many requests at once in an engine serve better than the number that a job states; None: no fewer do."""
    if context.job.pool("rollout").settings.max_running is None or "max_running" in context.keyless:
        return None
    fewer = with_fewer_running(Judge(context, task), evaluation)
    best = min(fewer, key=lambda each: each.rl_step_s, default=evaluation)
    helps = best.rl_step_s <= FEWER * evaluation.rl_step_s
    return best.configuration.pool("rollout").settings.max_running if helps else None


def environments(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """How many environments at once serve best, where a job states how many there are: judged at doublings.

    The engines wait for environments until a doubling spares no more than `ENOUGH` of the rollout (where it runs ahead,
    of the rl_step, which may wait for the trainer), or until more contexts than their caches hold are under way.
    """
    batch, judge = evaluation.demand.batch, Judge(context, task)
    stated = batch.max_trajectories
    if stated is None:
        return ()
    whole, name = under_way(evaluation), "rl_step" if refills(evaluation) else "rollout"
    what = "environments" if task.task.max_trajectories else "trajectories"

    def seconds(most: int | None) -> float:
        demand = replace(evaluation.demand, batch=replace(batch, max_trajectories=most))
        found = judge.evaluate(demand, evaluation.configuration)
        return found.rl_step_s if name == "rl_step" else float(found.seconds.rollout_s.mean())

    now, free = seconds(stated), seconds(None)
    words = f"{stated:,} {what} at once: {name} {human_seconds(now)}, {human_seconds(free)} with any number"
    if task.task.max_trajectories is None:
        return (f"{words}, of which engines evict more contexts while their tools run",)
    best, enough, more = now, stated, stated
    while more < whole:
        more = min(2 * more, whole)
        then = seconds(more) if more < whole else free
        if then * ENOUGH > best:
            break
        best, enough = then, more
    if enough > stated:
        are = "serve best" if free > ENOUGH * best else "are enough"
        return (f"{words}; {enough:,} {are} ({human_seconds(best)})",)
    waits = "the rl_step waits for none" if name == "rl_step" else "the engines wait for none"
    return (f"{words}: {waits}",)


def _without(
    context: Context, task: TaskContext, evaluation: Evaluation, role: Role, name: str, off: str | bool | int | None
) -> Evaluation:
    """The configuration judged with one setting of a pool, and of the job's, turned off."""
    pools = tuple(
        pool.model_copy(update={"settings": pool.settings.model_copy(update={name: off})})
        if pool.role == role
        else pool
        for pool in context.job.pools
    )
    plain = replace(context, job=context.job.model_copy(update={"pools": pools}))
    configuration = evaluation.configuration
    change = configuration.with_rollout if role == "rollout" else configuration.with_trainer
    return Judge(plain, task).evaluate(evaluation.demand, change(**{name: off}))


def _line(words: str, role: Role, evaluation: Evaluation, without: Evaluation) -> str:
    now, then = (human_seconds(each.rl_step_s) for each in (evaluation, without))
    ratio = without.rl_step_s / evaluation.rl_step_s
    pace = f"{ratio:.2f} times as fast" if ratio >= 1.0 else f"{human_share(1.0 / ratio - 1.0, 1)} longer"
    stages, stages_s = ("rollout", _rollout_s) if role == "rollout" else ("scoring and training", _trainer_s)
    work = stages_s(without) / max(stages_s(evaluation), 1e-9)
    spared = float(without.held.peak[0] - evaluation.held.peak[0])
    memory = f", {human_bytes(spared)} a device spared" if spared > 1e8 else ""
    return f"{words}: rl_step {now} instead of {then} ({pace}), {stages} {work:.2f} times{memory}"


def _rollout_s(evaluation: Evaluation) -> float:
    return float(evaluation.seconds.rollout_s.mean())


def _trainer_s(evaluation: Evaluation) -> float:
    seconds = evaluation.seconds
    return float((seconds.scoring_s + seconds.training_s).mean())
