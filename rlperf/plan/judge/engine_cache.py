"""What closed forms do not see of an engine: what it evicts and computes again, and who waits for a slot."""

from __future__ import annotations

from collections.abc import Sequence

from rlperf.layout import Layout
from rlperf.plan.judge.budgets import WORTH
from rlperf.plan.judge.evaluate import Evaluation, Holding, Judge
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.rollout_columns import FEWEST, awake_limits, memory_fractions
from rlperf.plan.search.trainer_columns import hosts_hold
from rlperf.sim.rl_step.engine import least_cache, short_cache
from rlperf.specs.modes import MODES

ANY = 1 << 30
"""Requests of an environment that sets no bound."""
RUNNING, NEAR_BY = (64, 96, 128, 192, 256), 4
"""Requests at once that people state, of a copy of the attention, and those between; how many times a plan's own they
are at most."""


def cache_shortage(evaluation: Evaluation | Holding) -> str:
    """Why the engine cannot run a single longest request, in words; empty where it can."""
    held, request = float(evaluation.memory.kv_tokens[0]), evaluation.demand.request_tokens
    words = f"the engine's cache holds {held:,.0f} tokens, a request up to {request:,.0f} and two blocks"
    return "" if held >= least_cache(request) else words


def with_more_cache(judge: Judge, evaluation: Evaluation) -> list[Configuration]:
    """The configuration with the largest share of memory for its engines that fits, and the largest on the beaten path.

    None where none computes again. Requests of one batch start together and are fully grown together, so that a cache
    for half-grown ones runs over; contexts whose tools run are evicted for those that decode. Two shares with equal
    closed forms are one to the screen, which keeps the smaller.
    """
    configuration, context = evaluation.configuration, judge.context
    if not _short(evaluation):
        return []
    now = configuration.pool("rollout").settings.memory_fraction or 0.0
    idle = float(evaluation.held.idle.ravel()[0]) if configuration.shares_memory else 0.0
    found: list[Configuration] = []
    for share in sorted((each for each in memory_fractions(context) if each > now), reverse=True):
        larger = configuration.with_rollout(memory_fraction=share)
        on_path = larger.departures <= configuration.departures
        if found and not on_path:
            continue
        memory = judge.holds(evaluation.demand, larger).memory
        if memory.awake_bytes[0] + idle <= awake_limits(context, memory.unbound_bytes + idle)[0]:
            found.append(larger)
            if on_path:
                break
    return found


def with_parked_trainer(judge: Judge, evaluation: Evaluation) -> Configuration | None:
    """The configuration with the trainer's states in host memory meanwhile, which leaves engines more.

    None where none computes again, where the job states it, and where hosts do not hold them. To closed forms, for
    which the smallest share is enough, it only costs the way there and back.
    """
    trainer, stated = evaluation.configuration.pool("trainer"), judge.context.job.pool("trainer").settings.parked
    if stated is not None or trainer.settings.parked is not False or not _short(evaluation):
        return None
    parked = evaluation.configuration.with_trainer(parked=True)
    host = judge.holds(evaluation.demand, parked).held.host
    return parked if hosts_hold(judge.context, Layout.of_values(trainer.layout), host).all() else None


def tuned_engines(judge: Judge, engines: Sequence[Evaluation]) -> list[Configuration]:
    """What is left to try of the best with each of the ``engines``: other numbers of requests at once."""
    running = [c for one in engines if (c := with_all_running(judge, one)) is not None]
    return [*running, *(c for one in engines for c in other_places(judge, one))]


def with_all_running(judge: Judge, evaluation: Evaluation) -> Configuration | None:
    """The configuration with all requests of a replica running from the start, or None where that is no faster.

    To closed forms the cache bounds what runs, so that more slots than it has room for are level, and are not asked
    about. In events the few that wait for a slot begin late, and the batch ends with them: where little is left to
    wait, to begin with all and preempt some is faster. Where several batches run at once, with those of one alone
    groups may end sooner.
    """
    configuration = evaluation.configuration
    slots = -(-_share(evaluation) // FEWEST) * FEWEST
    now, stated = configuration.pool("rollout").settings.max_running, judge.context.job.pool("rollout").settings
    if stated.max_running or now in (None, slots) or (now > slots and not MODES[configuration.mode].runs_ahead):
        return None
    whole = configuration.with_rollout(max_running=slots)
    tried = judge.evaluate(evaluation.demand, whole)
    few = short_cache(tried.memory.kv_tokens, evaluation.demand.request_tokens).any()
    fits = judge.peak(tried, whole) <= judge.room(tried)
    return whole if fits and not few and tried.rl_step_s < (1.0 - WORTH) * evaluation.rl_step_s else None


def other_places(judge: Judge, evaluation: Evaluation) -> list[Configuration]:
    """The configuration with other numbers of requests at once, where groups stream or batches run ahead.

    What the trainer waits for are the groups that end first, which end sooner beside fewer, or where the last to come
    are preempted. Closed forms see nobody preempted, and tell numbers apart by a percent or two: a stated one would be
    faster than what is planned where it is left open.
    """
    configuration, stated = evaluation.configuration, judge.context.job.pool("rollout").settings
    mode = MODES[configuration.mode]
    if stated.max_running or not (mode.streams or mode.runs_ahead):
        return []
    engine, share = configuration.pool("rollout"), _share(evaluation)
    now = min(engine.settings.max_running or share, share)
    every = (each * engine.layout.attention_data_parallel for each in RUNNING)
    near = [each for each in every if each != now and now <= NEAR_BY * each <= NEAR_BY**2 * now and each <= share]
    return _able(judge, evaluation, [configuration.with_rollout(max_running=each) for each in near])


def with_less_cache(judge: Judge, evaluation: Evaluation) -> list[Configuration]:
    """The configuration with smaller shares of memory for its engines, where groups stream: as in `other_places`."""
    configuration = evaluation.configuration
    now = configuration.pool("rollout").settings.memory_fraction or 0.0
    streams = MODES[configuration.mode].streams
    smaller = [each for each in memory_fractions(judge.context) if each < now] if streams else []
    return _able(judge, evaluation, [configuration.with_rollout(memory_fraction=each) for each in smaller])


def _able(judge: Judge, evaluation: Evaluation, tried: Sequence[Configuration]) -> list[Configuration]:
    """Those whose engines can run a single longest request."""
    return [each for each in tried if not cache_shortage(judge.holds(evaluation.demand, each))]


def _share(evaluation: Evaluation) -> int:
    """Requests of a replica that are rolled out at once."""
    batch, writers = evaluation.configuration.batch, evaluation.replicas.writers
    prompts = batch.generation_batch or batch.generated
    return min(-(-prompts * batch.group_size // writers), batch.under_way(writers) or ANY)


def _short(evaluation: Evaluation) -> bool:
    return any(result.short_of_cache for result in evaluation.rollouts)
