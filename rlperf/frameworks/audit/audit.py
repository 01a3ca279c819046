"""Audit: a configuration against its framework's rules, the memory, the time model, its own log, and the best plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlperf.calibrate.logs.fit import logs_of
from rlperf.errors import InfeasibleError, Problem, RlperfError, SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.answer import Audit, too_large
from rlperf.frameworks.audit.beside_log import compared, log_findings
from rlperf.frameworks.audit.best import best_of
from rlperf.frameworks.audit.finding import Finding, key_of, sort
from rlperf.frameworks.audit.findings import (
    Cache,
    engine_findings,
    key_findings,
    memory_findings,
    padding_findings,
    rule_findings,
)
from rlperf.frameworks.audit.offers import Predict, WhatIf, gain_findings, repaired, what_ifs
from rlperf.frameworks.expressible import as_framework_runs
from rlperf.frameworks.imports import Imported, job_of, planned_workload, usual_workload
from rlperf.frameworks.run import ref
from rlperf.layout import Layout
from rlperf.plan.answer.host_memory import host_bytes
from rlperf.plan.answer.plan import Prediction
from rlperf.plan.answer.prediction import prediction_of
from rlperf.plan.judge.engine_cache import cache_shortage
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import Context, resolve
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.engine import least_cache, replica_memory
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES
from rlperf.specs.step_log import StepLog
from rlperf.told import Tell, quiet, within
from rlperf.units import human_bytes, human_seconds
from rlperf.workload import PRESETS

if TYPE_CHECKING:
    pass

MOST_OFFERED = 1 << 15
"""Sequences of an rl_step up to which offers are judged: each is a prediction that simulates all of them."""


def audit(
    imported: Imported,
    *,
    cluster: str | None = None,
    workload: str | None = None,
    log: StepLog | None = None,
    facts: FrameworkFacts | None = None,
    plan: bool = True,
    predict: bool = True,
    gains: bool = True,
    folder: Path | None = None,
    report: Tell | None = None,
) -> Audit:
    """Audit a configuration. Long because each argument is a question of its own.

    Parameters
    ----------
    cluster, workload : what it runs on and the lengths it meets; neither is in the file, both are assumed if not given
    log : step metrics of the run, against which the prediction is held
    facts : rules for the planner's alternative; without them it plans freely
    predict : also predict memory and time; without, only keys and rules are checked
    plan, gains : also ask the planner for the best on the same hardware; also what other settings would gain, as hints
    folder : where calibrations and profiles of one's own are, as plan and predict find them
    report : called with the share done and a text
    """
    tell = report or quiet
    given, imported = imported, predictable(imported)
    broken, notes = _rules(given)
    findings = key_findings(given) + broken
    unpredicted = Audit(imported, None, sort([*findings, *engine_findings(given, None)]), None)
    if not predict:
        return unpredicted
    try:
        job, context = _question(imported, cluster, workload, folder)
    except SpecError as error:
        notes.append(f"not predicted: {error.problems[0]}")
        measured = compared(None, log)
        return replace(unpredicted, notes=tuple(notes), unresolved=error.problems, measured=measured)
    notes += context.read_as
    predicted, evaluation, cache, failed = _predicted(imported, context)
    unjudged, best = "", None
    findings += engine_findings(given, cache, context.rollout_hardware.cluster.scale_up_domain)
    if failed is not None:
        notes.append(f"not predicted: {failed}")
        findings += _no_layout(imported, failed, cache, findings)
    lengths = workload or planned_workload(imported) or usual_workload(imported)[0]
    attempt = partial(_attempt, cluster=job.cluster, workload=lengths, folder=folder)
    if predicted is not None and evaluation is not None:
        asked = within(tell, 0.1, 0.15, "what would be gained by ")
        judged, unjudged = _judged(given, context, predicted, evaluation, cache, attempt if gains else None, asked)
        notes += [unjudged] if unjudged else []
        findings = _each_once([*findings, *judged])
    findings, mended = repaired(findings, given, attempt, within(tell, 0.25, 0.25, "what would mend "))
    then = mended and mended[1]
    notes += [f"with the settings above it fits: {human_seconds(then.rl_step_s)} per rl_step predicted"] if then else []
    short = "" if evaluation is None else cache_shortage(evaluation)
    if plan and predicted is not None:
        files, rest = imported.source.files, within(tell, 0.5, 0.5, "the best: ")
        holds = then if too_large(findings) or short else predicted  # what does not fit has no speed to miss
        # settings that a plan does not choose (a chunked loss) are those under which it fits
        fits = job if mended is None else _as_run(predictable(mended[0]), job.cluster, lengths, folder)
        best, note = best_of(fits, facts, holds.rl_step_s if holds else np.inf, files, folder, rest)
        notes += [note] if note else []
    found = Audit(imported, job, sort(findings), predicted, best, tuple(notes), unjudged=unjudged, shortage=short,
                  cautions=_otherwise(given, imported))  # fmt: skip
    return found if log is None else _beside_log(found, given, evaluation, log, lengths)


def _beside_log(found: Audit, given: Imported, evaluation: Evaluation | None, log: StepLog, workload: str) -> Audit:
    """The audit with what the log of the run says beside its prediction."""
    sharing = evaluation is not None and MODES[evaluation.configuration.mode].shares_devices
    against = compared(found.predicted, log, sharing=sharing)
    if found.predicted is not None:
        findings = [*found.findings, *log_findings(given, against, found.predicted, log)]
        found = replace(found, findings=sort(findings))
    if evaluation is None:
        return replace(found, measured=against)
    unlike, told = _other_lengths(evaluation, log, workload), _told(evaluation, log)
    unsaid = _unsaid_lengths(evaluation, log, workload)
    cautions = tuple(each for each in (*found.cautions, unlike, unsaid, told) if each)
    return replace(found, measured=against, cautions=cautions, unlike=bool(unlike))


def _predicted(
    imported: Imported, context: Context
) -> tuple[Prediction | None, Evaluation | None, Cache | None, Exception | None]:
    """The prediction with what stands behind it and what the engine's cache holds; or why there is none."""
    try:
        predicted, evaluation = _predict(context)
        return predicted, evaluation, _cache_of(evaluation), None
    except (InfeasibleError, ValueError, ZeroDivisionError) as error:
        return None, None, _cache(imported, context), error


def _judged(
    given: Imported, context: Context, predicted: Prediction, evaluation: Evaluation, cache: Cache | None,
    attempt: Predict | None, tell: Tell,
) -> tuple[list[Finding], str]:  # fmt: skip
    """Findings about memory, padding and what other settings would gain; and why gains are not judged, in words."""
    lengths = evaluation.demand.lengths(0)
    found = memory_findings(given, predicted) + host_findings(given, context, evaluation)
    found += padding_findings(given, predicted, lengths)
    if attempt is None:
        return found, ""
    offers = what_ifs(given, predicted, cache)
    unjudged = _unjudged(given, offers, lengths.size)
    return found + gain_findings(given, predicted, [] if unjudged else offers, attempt, tell), unjudged


def _each_once(findings: Sequence[Finding]) -> list[Finding]:
    """Findings without the cache that an engine lacks where it is said to be too large for the device."""
    large = any(each.rule == "out_of_memory" and each.role == "rollout" for each in findings)
    return [each for each in findings if not (large and each.rule == "kv_starvation" and each.severity == "error")]


def _no_layout(imported: Imported, error: Exception, cache: Cache | None, known: Sequence[Finding]) -> list[Finding]:
    """That the layout is none, unless the engine's cache or an error that is ``known`` already says why."""
    blocked = {each.rule for each in known if each.severity == "error"} - {"unknown_key", "illegal_value"}
    if blocked or not isinstance(error, InfeasibleError):
        return []
    if cache is not None and cache.tokens < cache.least:
        return []
    key = key_of(imported, ref("trainer.tensor_parallel"))
    message = f"{error.message}: {error.nearest_miss or 'no layout'}"
    return [Finding("error", key, message, when="worker", rule="layout")]


def _other_lengths(evaluation: Evaluation, log: StepLog, workload: str) -> str:
    """That a log's responses are not those that were predicted with, and what would make them so; or empty."""
    logged = log.mean("response_tokens") or math.nan
    if not evaluation.demand.unlike(logged):
        return ""
    means = evaluation.demand.response_means()
    tools = "".join(f" ({more:,.0f} with what tools write)" for more in means[1:])
    return (
        f"not alike: responses of the log have {logged:,.0f} tokens in the mean, those predicted with ({workload}) "
        f"{means[0]:,.0f}{tools}: {_ITS_OWN}"
    )


def _unsaid_lengths(evaluation: Evaluation, log: StepLog, workload: str) -> str:
    """That nobody knows whether a log's responses are those that were predicted with, a preset's; or empty."""
    if workload not in PRESETS or log.mean("response_tokens") is not None:
        return ""
    mean = evaluation.demand.response_means()[0]
    return f"the log does not say how long its responses are, those of {workload} are {mean:,.0f} tokens: {_ITS_OWN}"


_ITS_OWN = "name a rollout dump of the run (--rollouts) or its lengths (--workload)"


def _told(evaluation: Evaluation, log: StepLog) -> str:
    """That logs told the calibration which this one is held against; or empty."""
    told = logs_of(evaluation.stack.framework)
    if not told:
        return ""
    whose = "this log told, so that it is near by that alone" if log.digest in told else "logs of this cluster told"
    return f"predicted with a calibration that {whose}: move calibrations/ away for what is shipped"


def _unjudged(given: Imported, offers: Sequence[WhatIf], sequences: int) -> str:
    """What usually costs time and is not judged, since that would take long; empty: all of it is."""
    if sequences <= MOST_OFFERED or not offers:
        return ""
    keys = ", ".join(dict.fromkeys(key_of(given, offer.at) for offer in offers))
    return (
        f"gains not predicted: an rl_step has {sequences:,} sequences, and changes are judged up to {MOST_OFFERED:,}; "
        f"a smaller batch would tell what these gain: {keys}"
    )


def _rules(imported: Imported) -> tuple[list[Finding], list[str]]:
    """Broken rules, or why none was asked: a value of the wrong type, which is among the key findings already."""
    try:
        if imported.run.wrong:
            raise ValueError(imported.run.wrong[0])
        return rule_findings(imported), []
    except (ValueError, TypeError) as error:
        return [], [f"rules not checked: {error}"]


def predictable(imported: Imported) -> Imported:
    """The configuration as the nearest that is predicted: with a token budget, and no engine that reads for others
    where nothing tells what that is worth (`rlperf.plan.question.contradictions.untold`): what it holds is the same."""
    run = imported.run
    if run.rollout.prefill_replicas and run.batch.turns > 1 and run.traits.runs_ahead:
        imported = replace(imported, run=replace(run, rollout=run.rollout.having(prefill_replicas=None)))
    return with_budget(imported)


def _otherwise(given: Imported, imported: Imported) -> tuple[str, ...]:
    """That engines are predicted without those that read for others, where they are."""
    if imported.run.rollout.prefill_replicas == given.run.rollout.prefill_replicas:
        return ()
    gains = f"of turns that run ahead ({given.run.mode}) nothing tells what engines gain that read for others"
    return (f"predicted as if every engine read its own prompts: {gains}",)


def with_budget(imported: Imported) -> Imported:
    """Padded microbatches of a fixed size as the token budget that their longest sequences take."""
    run = imported.run
    if run.trainer.token_budget is not None or run.trainer.microbatch is None or run.trainer.packing is not False:
        return imported
    longest = run.batch.longest_tokens
    budget = run.trainer.samples * longest
    scoring = (run.trainer.scoring_microbatch or run.trainer.samples) * longest
    trainer = run.trainer.having(token_budget=budget, scoring_token_budget=scoring)
    return replace(imported, run=replace(run, trainer=trainer))


def _question(
    imported: Imported, cluster: str | None, workload: str | None, folder: Path | None
) -> tuple[Job, Context]:
    """The job that a configuration is, and what stands behind it.

    Raises
    ------
    SpecError : what is not known of it, or an algorithm that is not predicted for its framework
    """
    facts, algorithm = framework_facts(imported.adapter.name, imported.target.version), imported.run.algorithm
    if algorithm not in facts.algorithms:
        only = f"only {', '.join(facts.algorithms)}{facts.why_not(algorithm)}"
        raise SpecError(Problem(f"{algorithm} is not predicted for {facts.name}, {only}"))
    job = _as_run(imported, cluster, workload, folder)
    return job, resolve(job, folder=folder)


def _as_run(imported: Imported, cluster: str | None, workload: str | None, folder: Path | None) -> Job:
    """The job that a configuration is, with what its framework runs where it says nothing: as it is predicted alone."""
    facts = framework_facts(imported.adapter.name, imported.target.version)
    return as_framework_runs(job_of(imported, cluster=cluster, workload=workload), facts, folder)


def _predict(context: Context) -> tuple[Prediction, Evaluation]:
    """The prediction, and the evaluation behind it."""
    evaluation, _ = evaluate_job(context)
    return prediction_of(context, context.tasks[0], evaluation, operators=False), evaluation


def _cache_of(evaluation: Evaluation) -> Cache:
    """What the KV cache of one replica holds."""
    return _holding(evaluation.demand, float(evaluation.memory.kv_tokens[0]))


def _holding(demand: Demand, tokens: float) -> Cache:
    """A cache of so many tokens, for the requests that are made of it."""
    return Cache(tokens, tokens / float(demand.lengths(0).mean()), least_cache(demand.request_tokens))


def _cache(imported: Imported, context: Context) -> Cache | None:
    """What the engine's cache holds where the whole cannot be predicted, because it does not fit."""
    run, task = imported.run, context.tasks[0]
    layout = Layout.of(
        tensor_parallel=run.rollout.tensor_parallel,
        pipeline_parallel=run.rollout.pipeline_parallel,
        expert_parallel=run.rollout.expert_parallel,
        attention_data_parallel=run.rollout.attention_data_parallel,
    )
    settings = context.job.pool("rollout").settings.filled()
    fraction, running = settings.memory_fraction or context.engine.memory_fraction, run.rollout.max_running or 1
    try:
        demand = task.source.demand(task.batches[0], None, context.job.seed)
        memory = replica_memory(
            context.site, task.architecture, settings, layout, np.array([fraction]), np.array([running]), demand
        )
    except (RlperfError, ValueError, ZeroDivisionError):
        return None
    return _holding(demand, float(memory.kv_tokens[0]))


def _attempt(imported: Imported, cluster: str, workload: str, folder: Path | None) -> Prediction | None:
    """The prediction of a configuration; None where it cannot be laid out."""
    try:
        return _predict(resolve(_as_run(predictable(imported), cluster, workload, folder), folder=folder))[0]
    except (RlperfError, ValueError, ZeroDivisionError):
        return None


def host_findings(imported: Imported, context: Context, evaluation: Evaluation) -> list[Finding]:
    """Host memory that parked or offloaded states take, against the node's."""
    run, cluster = imported.run, context.cluster
    held = host_bytes(context, evaluation)
    if held <= cluster.host_memory:
        return []
    key = key_of(imported, ref("trainer.parked" if run.trainer.parked else "trainer.offload"))
    message = f"offloaded states take {human_bytes(held)} of the node's {human_bytes(cluster.host_memory)} host memory"
    return [Finding("error", key, message, "shard over more nodes, or keep them on the GPU", "run",
                    imported.where(key), rule="host_memory")]  # fmt: skip
