"""From an evaluation to a `Prediction`: stages, memory by part, operators, what was assumed, what to turn first."""

from __future__ import annotations

from itertools import product

import numpy as np

from rlperf.cost.basis import serving_basis
from rlperf.cost.layers import stack_of
from rlperf.cost.trainer.knobs import first_knob
from rlperf.cost.trainer.memory import DEVICE_PARTS
from rlperf.cost.trainer.update import experts_timed
from rlperf.plan.answer.gains import fewer_at_once, fewer_running, gains
from rlperf.plan.answer.host_memory import host_note
from rlperf.plan.answer.memory_uses import memory_uses
from rlperf.plan.answer.plan import CalibrationUse, MemoryUse, PredictedStages, Prediction
from rlperf.plan.answer.shares import rollout_shares, trainer_shares
from rlperf.plan.answer.uses import CriticUse, ScorerUse
from rlperf.plan.judge.at_once import WORTH_A_WORD, evicted_share, lost_share, preemptions
from rlperf.plan.judge.engine_cache import cache_shortage
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.judge.timeline import step_view
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.search.splits import usage_of
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.stages import STAGES
from rlperf.sim.rl_step.trainer_bytes import TrainerBytes
from rlperf.specs.architecture import Architecture
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware
from rlperf.specs.modes import MODES
from rlperf.specs.pool import Role, of_role
from rlperf.specs.trainer_calibration import TrainerCalibration
from rlperf.units import human_bytes


def prediction_of(context: Context, task: TaskContext, evaluation: Evaluation, *, operators: bool = True) -> Prediction:
    """Everything that is predicted of one configuration."""
    seconds, demand, configuration = evaluation.seconds, evaluation.demand, evaluation.configuration
    step = evaluation.rl_step_s
    low, high = evaluation.low_s, evaluation.high_s
    stages = PredictedStages(**{name.removesuffix("_s"): float(getattr(seconds, name).mean()) for name in STAGES})
    memory = memory_uses(context, evaluation)
    over = [role for role, use in memory.items() if use.total > use.allowed]
    usd_per_s = usage_of(context, configuration).usd_per_s
    trained = demand.trained_tokens
    trainer = context.trainers[int(evaluation.trainer.backend[0])].calibration
    rows = (*rollout_shares(context, task, evaluation), *trainer_shares(context, task, evaluation)) if operators else ()
    unlike = _unlike(context, task, evaluation)
    fewer = fewer_at_once(context, task, evaluation) if operators else ()
    return Prediction(
        rl_step_s=step,
        low_s=low,
        high_s=high,
        stages_s=stages,
        memory_bytes=memory,
        tokens_per_s_per_device=trained / step / configuration.devices,
        usd_per_step=None if usd_per_s is None else step * usd_per_s,
        trained_tokens=trained,
        truncated_fraction=demand.truncated_fraction,
        scorers=scorer_uses(evaluation),
        critic=critic_use(context, evaluation),
        gains=gains(context, task, evaluation, fewer) if operators else (),
        idle_fraction=idle_fractions(evaluation),
        operators=rows,
        assumed=assumptions(context, evaluation),
        calibration=CalibrationUse(
            ids=_calibration_ids(context, evaluation),
            extrapolated=bool(unlike) or trainer.extrapolated,
            notes=(*_calibration_notes(context), *_unmeasured(trainer), *unlike),
        ),
        fits=not over and not cache_shortage(evaluation),
        warnings=(*_warnings(context, task, evaluation), *_unfiltered(context, evaluation)),
        advice=tuple(
            (*_too_much(evaluation, memory, over, context), *_evicting(context, task, evaluation, fewer=bool(fewer)))
            if operators
            else _too_much(evaluation, memory, over, context)
        ),
    )


def scorer_uses(evaluation: Evaluation) -> tuple[ScorerUse, ...]:
    """What every scorer takes of an rl_step: its work, and how long the rl_step waits for it."""
    return tuple(
        ScorerUse(
            name=plan.name,
            kind=plan.kind,
            seconds=stage.makespan_s,
            waits_s=float(exposed.mean()),
            memory_bytes=stage.awake_bytes,
        )
        for plan, stage, exposed in zip(
            evaluation.configuration.scorers, evaluation.scorers, evaluation.exposed_s, strict=True
        )
    )


def critic_use(context: Context, evaluation: Evaluation) -> CriticUse | None:
    """What a critic on devices of its own takes of an rl_step, and how long the trainer waits for it."""
    if not context.site.critic_apart:
        return None
    own = evaluation.trainer
    late = np.maximum(own.values_s - own.scoring_s, 0.0) + np.maximum(own.critic_s - own.training_s, 0.0)
    return CriticUse(
        devices=int(own.critic[0]),
        values_s=float(own.values_s.mean()),
        training_s=float(own.critic_s.mean()),
        waits_s=float(late.mean()),
    )


MANY_CUT, FEW_CUT = 0.25, 0.05
"""Shares of responses cut at the maximum length: above the first a plan warns, and names what cuts the second."""


def _warnings(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """What the numbers do not say, and what a run would waste: groups of one, responses that are cut."""
    job = context.job
    alone = evaluation.demand.batch.group_size == 1 and job.algorithm != "ppo"
    words = f"group_size 1: {job.algorithm} holds a response against its group, so there is no advantage to learn from"
    cut = _cut(task, evaluation, timed=job.horizon.group is not None)
    odd = _odd_sizes(context, task.architecture, evaluation)
    return (*context.warned, *([words] if alone else []), *cut, *host_note(context, evaluation), *odd)


TENSOR_CORE = 8
"""Values of 16 bits that a row must be a multiple of for tensor cores to read it as it lies (16 bytes)."""


def _odd_sizes(context: Context, architecture: Architecture, evaluation: Evaluation) -> tuple[str, ...]:
    """Sizes of the model, by their keys, that tensor cores do not take as they lie: whole, or cut by TP.

    Copies of the attention cut what they hold among their own devices; an output head that they share, among all.
    """
    pools = {pool.role: pool.layout for pool in evaluation.configuration.pools if pool.role in ("rollout", "trainer")}
    experts = architecture.experts
    cut = {"intermediate_size": architecture.ffn_hidden, "vocab_size": architecture.vocab}
    whole = {"head_dim": architecture.head_dim, "moe_intermediate_size": experts.hidden if experts else 0}
    words = [f"{key} {size:,} is no multiple of {TENSOR_CORE}"
             for key, size in {**whole, **cut}.items() if size > 1 and size % TENSOR_CORE]  # fmt: skip
    for key, (role, layout) in product(cut, pools.items()):
        shared = role == "rollout" and key == "vocab_size" and context.engine.gathers_rows
        copies = layout.attention_data_parallel or 1
        degrees = {max(layout.tensor_parallel // copies, 1), layout.tensor_parallel if shared else 1}
        words += [
            f"{key} {cut[key]:,} over TP{degree} of the {role} is no multiple of {TENSOR_CORE} on a device"
            for degree in sorted(degrees)
            if cut[key] % TENSOR_CORE == 0 and cut[key] % (TENSOR_CORE * degree)
        ]
    return tuple(f"{each}: kernels pad it or run slower than predicted" for each in words)


def _cut(task: TaskContext, evaluation: Evaluation, *, timed: bool) -> tuple[str, ...]:
    """Tasks of which many responses are cut, and what cuts few; ``timed``: in these rl_steps alone."""
    words, whole = [], evaluation.demand
    first, last = whole.rl_steps
    when = f"in rl_steps {first} to {last} " if timed else ""
    parts = zip(task.source.each, whole.of_tasks, strict=True) if whole.of_tasks else [(task.source, whole)]
    for source, demand in parts:
        cut, cap = demand.truncated_fraction, demand.batch.max_response_tokens
        if cut <= MANY_CUT:
            continue
        whose = f"responses of {demand.task}" if whole.of_tasks else "responses"
        enough = source.cap_that_cuts(FEW_CUT, (first, last) if timed else None)
        better = "" if enough is None else f": max_response_tokens {enough:,} would cut {100 * FEW_CUT:.0f} %"
        words.append(f"{when}{100 * cut:.1f} % of {whose} are cut at {cap:,} tokens and lose their reward{better}")
    return tuple(words)


def idle_fractions(evaluation: Evaluation) -> dict[str, float]:
    """Share of device-seconds without full work, by cause.

    Where the rollout runs ahead of the trainer it is never emptied, so a drained rollout says nothing of it: each pool
    waits for the other one.
    """
    if MODES[evaluation.configuration.mode].runs_ahead:
        return {f"{pool}_waits": share for pool, share in step_view(evaluation).idle_share.items()}
    causes = ("tail", "imbalance", "tool_wait", "prefill_stall", "preemption")
    return {cause: lost_share(evaluation, cause) for cause in causes}


def assumptions(context: Context, evaluation: Evaluation) -> tuple[str, ...]:
    """What was filled in, in words."""
    stack = context.trainers[int(evaluation.trainer.backend[0])]
    framework = stack.framework
    notes = [*context.read_as, *evaluation.demand.notes]
    result, replicas = evaluation.rollouts[0], evaluation.configuration.pool("rollout").layout.data_parallel
    simulated = len(result.members) + len(result.readers)
    if simulated < replicas:
        which = "the fullest, that of the longest response, others evenly"
        notes.append(f"{simulated} of {replicas} rollout replicas simulated: {which}")
    notes += [note for device in {each.device.name: each.device for each in _machines(context)}.values()
              if (note := _memory_note(device))]  # fmt: skip
    notes += [f"{each.cluster.name}: its device names no network: one port of {each.cluster.network} a node"
              for each in _machines(context) if _portless(each)]  # fmt: skip
    if framework.training.whole_gradients:
        whole = "holds gradients whole between the microbatches of an update and has no key for it"
        each = f"{stack.calibration.storage.reduce:g} bytes a parameter on every device"
        notes.append(f"{context.job.framework} {whole}: {each}")
    if framework.assumed:
        notes.append(f"{framework.id}: nobody measured {', '.join(framework.assumed)}")
    if evaluation.configuration.pool("rollout").settings.chunked_prefill is False:
        notes.append("costed as if it were on: rollout chunked_prefill: false")
    notes += [f"judge {each.name}: one token written a sequence, as no response_tokens are stated"
              for each in context.job.scorers
              if each.kind == "judge" and "response_tokens" not in each.model_fields_set]  # fmt: skip
    if short := cache_shortage(evaluation):
        notes.append(f"{short}: simulated as if it held two")
    if "reference" in context.job.all_roles:
        where = "stays there" if framework.training.resident_reference else "waits in host memory"
        notes.append(f"the reference policy is scored on the trainer's devices and {where}")
    return tuple(notes)


def _memory_note(device: Device) -> str:
    """What is not known of how much of a device a process sees; empty where it was recorded."""
    if device.memory_usable is None:
        return (
            f"{device.name}: memory as on its data sheet; of devices where it was recorded a process sees 1 to 8 % less"
        )
    source = device.sources.get("memory_usable", "")
    seen = f"{device.name}: a process sees {human_bytes(device.usable_memory)}"
    return f"{seen} of it, {source}" if source.startswith("assumed") else ""


def _portless(hardware: Hardware) -> bool:
    """Whether several generic nodes of a device have a network that nobody stated."""
    generic, nodes = hardware.cluster.name == f"generic:{hardware.device.name}", hardware.cluster.nodes
    return generic and nodes > 1 and hardware.device.network is None


def _unfiltered(context: Context, evaluation: Evaluation) -> tuple[str, ...]:
    """That dynamic sampling (DAPO) drops nothing, where neither the task nor its workload says how much it drops."""
    batch, name = evaluation.demand.batch, evaluation.demand.task
    tasks = [task for task in context.job.tasks if task.name == name] or context.job.tasks  # one batch of all: mixed
    unstated = any(task.generated_prompts is None for task in tasks)
    if context.job.algorithm != "dapo" or batch.generated > batch.prompts or not unstated:
        return ()
    return (
        f"{name}: assumed that dynamic sampling drops no group, {batch.generated:,} prompts rolled out for "
        f"{batch.prompts:,} trained on: each that it drops makes the rollout longer; state the task's "
        "generated_prompts in a job file",
    )


def _calibration_ids(context: Context, evaluation: Evaluation) -> tuple[str, ...]:
    """Calibrations in use: devices, engine, trainer and framework."""
    trainer = context.trainers[int(evaluation.trainer.backend[0])]
    devices = [hardware.calibration.id for hardware in _machines(context)]
    return tuple(dict.fromkeys([*devices, context.engine.id, trainer.calibration.id, trainer.framework.id]))


def _calibration_notes(context: Context) -> tuple[str, ...]:
    doubtful = [hw.device.name for hw in _machines(context) if hw.device.confidence == "low"]
    sheets = [f"the data sheet of {name} is of low confidence: see 'rlperf profiles show {name}'" for name in doubtful]
    return tuple(sheets)


def _unmeasured(trainer: TrainerCalibration) -> tuple[str, ...]:
    """That no measured update stands behind a trainer's seconds, and how wide its interval therefore is."""
    if not trainer.extrapolated:
        return ()
    whose = f"constants of {trainer.relative}" if trainer.relative else "constants read and judged"
    return (f"no update of {trainer.id} was measured: {whose}, {trainer.low:.2f} to {trainer.high:.2f} of its seconds",)


def _unlike(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """What of the architecture, its precision or the devices no measurement stands behind; the interval is wider."""
    engine, dtype = context.engine, evaluation.rollout.weight_dtype
    reasons = serving_basis(task.architecture, context.rollout_hardware, engine, gemm_dtype=dtype).reasons
    halves = stack_of(task.architecture).halves
    trained = ["updates of such layers were never timed"] if any(h.layer.unmeasured_training for h in halves) else []
    trainer = evaluation.stack.calibration
    if not experts_timed(task.architecture, trainer, evaluation.trainer.layout).all():
        pool = evaluation.configuration.pool("trainer")
        trained.append(
            f"{trainer.id} was never timed with mixtures of experts at expert parallel "
            f"{pool.layout.expert_parallel} on {pool.devices} devices"
        )
    borrowed = [f"the trainer's {hw.calibration.standing}"
                for hw in _machines(context)[:1] if context.own_rollout and hw.calibration.extrapolated]  # fmt: skip
    return tuple(f"{reason}: the interval is wider" for reason in (*reasons, *trained, *borrowed))


def _machines(context: Context) -> tuple[Hardware, ...]:
    """Hardware of the pools, each once."""
    return (context.hardware, context.rollout_hardware) if context.own_rollout else (context.hardware,)


def _too_much(evaluation: Evaluation, memory: dict[Role, MemoryUse], over: list[Role], context: Context) -> list[str]:
    """The first knob to turn where it does not fit, of every pool that is ``over``."""
    found = []
    for role in over:
        use = memory[role]
        more = human_bytes(use.total - use.allowed)
        held = evaluation.critic_held if role == "critic" else evaluation.held
        if role == "rollout" or held is None:
            knob = _engine_knob(context, use)
        else:
            knob = _trainer_knob(context, evaluation, use, held)
        found.append(f"{role} is {more} over what the risk allows: {knob}")
    return found


def _evicting(context: Context, task: TaskContext, evaluation: Evaluation, *, fewer: bool) -> list[str]:
    """What engines lose where they compute again what they evicted, and what helps.

    A knob that the planner has set itself is not advised against, and none that files of the framework lack, nor fewer
    requests or trajectories at once where they were judged to take longer (``fewer`` of the latter says otherwise).
    """
    if (share := evicted_share(evaluation)) < WORTH_A_WORD:
        return []
    each = preemptions(evaluation)
    if each < 1.0:
        what, helps = "contexts evicted while their tools ran", _against_eviction(context, evaluation.demand, fewer)
    else:
        what = f"{each:,.0f} preemptions per rl_step"
        helps = _against_preemption(context, fewer_running(context, task, evaluation))
    return [f"{what} take {100 * share:.1f} % of the rollout: {helps}"]


def _against_preemption(context: Context, running: int | None) -> str:
    """What helps against evicted requests, of what the job states; where it states nothing, whose choice it is.

    ``running``: a smaller number at once with which the rl_step was judged to be shorter; None: there is none
    """
    raised, keyed = _more_cache(context), "max_running" not in context.keyless
    helps = [f"raise {raised}"] * bool(raised) + [f"lower max_running to {running}"] * (running is not None)
    if not helps and keyed and not _open(context.job.pool("rollout").settings.max_running):
        return "fewer requests at once would gain nothing"
    chosen = f"the planner chose {'max_running, ' * keyed}memory_fraction and tensor_parallel with this counted"
    kept = "" if keyed else "; max_running is the framework's own"
    return (", or ".join(helps) or chosen) + kept


def _against_eviction(context: Context, demand: Demand, fewer: bool) -> str:
    """The same against contexts evicted while their tools run, which fewer places in the engine do not spare."""
    raised, tasks = _more_cache(context), context.job.tasks
    own = [task for task in tasks if task.name == demand.task] or tasks  # one batch of all: mixed
    if demand.batch.max_trajectories is not None and any(_open(task.max_trajectories) for task in own):
        return "the planner chose max_trajectories with this counted"
    helps = [f"raise {raised}"] * bool(raised) + ["lower max_trajectories"] * fewer
    return ", or ".join(helps) or "fewer trajectories at once would gain nothing"


def _more_cache(context: Context) -> str:
    """What the job states of that gives engines more cache."""
    stated = context.job.pool("rollout")
    of_cache = {"memory_fraction": stated.settings.memory_fraction, "tensor_parallel": stated.layout.tensor_parallel}
    return " or ".join(name for name, value in of_cache.items() if not _open(value))


def _open(value: object) -> bool:
    """Whether a job leaves a value to the planner: it states none, or several."""
    return value is None or (isinstance(value, tuple) and len(value) != 1)


def _trainer_knob(context: Context, evaluation: Evaluation, use: MemoryUse, held: TrainerBytes) -> str:
    """What frees enough of the trainer's memory, or of a critic's, at the least cost in time."""
    settings, stated = evaluation.configuration.pool("trainer").settings, context.job.pool("trainer")
    asked = {**stated.layout.model_dump(), **stated.settings.model_dump()}
    searched = [each.name for each in of_role("trainer") if each.decided == "searched"]
    parts = held.parts
    scalar = parts.with_(**{name: np.ravel(getattr(parts, name))[0] for name in (*DEVICE_PARTS, "host")})
    engine = use.parts.get("engine, asleep", 0.0)
    knob = first_knob(
        evaluation.trainer.layout.take(0), scalar, use.allowed - engine - use.parts.get("reference", 0.0),
        microbatch_tokens=float(settings.token_budget or 4096), chunked_loss=bool(settings.chunked_loss),
        set_by_planner=[name for name in searched if _open(asked[name])],
    )  # fmt: skip
    if knob is None:
        return "more devices"
    return f"{knob.setting} frees up to {human_bytes(knob.frees_bytes)} ({knob.why})"


def _engine_knob(context: Context, use: MemoryUse) -> str:
    """What makes room beside the engine."""
    if use.parts.get("trainer, idle", 0.0) > use.total - use.allowed and "parked" not in context.keyless:
        return "park the trainer's states in host memory (parked: true), or lower memory_fraction"
    if use.parts["weights"] > use.allowed:
        return "raise tensor_parallel: the weights alone are more"
    if "kv cache" not in use.parts:
        return "raise tensor_parallel, or split the trainer's weights further: both stand there in a weight sync"
    if use.parts["kv cache"] > use.total - use.allowed:  # narrower weights leave more of the share to it, not to others
        return "lower memory_fraction"
    return "raise tensor_parallel, and lower memory_fraction: all of the cache is less than that"
