"""What an audit looks for: keys, rules, memory, the engine's settings, padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.finding import LIKELY, SURELY, Finding, Severity, key_of
from rlperf.frameworks.audit.repairs import for_rule, in_keys
from rlperf.frameworks.audit.uncounted import idle_or_uncounted
from rlperf.frameworks.engine_arguments import newer_name
from rlperf.frameworks.export import architecture_of, said
from rlperf.frameworks.fields import MANDATORY
from rlperf.frameworks.imports import Imported, other_trainers, unstated
from rlperf.frameworks.run import Run, ref
from rlperf.plan.answer.plan import Prediction
from rlperf.sim.rl_step.engine import FEW_LONGEST
from rlperf.specs.releases import versions_of
from rlperf.units import human_bytes, with_probability

PHASES = {"rollout": "rollout", "trainer": "training", "critic": "the critic's training"}
"""Pools by the phase in which they take memory."""


def key_findings(imported: Imported) -> list[Finding]:
    """Keys that the version does not know (refused, ignored or kept without effect), and values it does not accept."""
    name, version = imported.adapter.title, imported.target.version
    reaction = framework_facts(imported.adapter.name, version).unknown_keys
    effect = {
        "error": f"{name} {version} refuses it",
        "ignored": f"{name} ignores it: the setting does nothing",
        "kept": f"{name} keeps it without a word: the setting does nothing",
    }[reaction]
    when = "parse" if reaction == "error" else "never"
    text = f"unknown key; {effect}"
    level: Severity = "error"
    if version in imported.target.table.partial or imported.newer:
        level, text = "warning", f"not among the keys that are known of {name} {version}"
    newer = {item.key: newer_name(item.key) for item in imported.unknown}
    found = [
        Finding(level, item.key, text, item.suggestion or "", when, item.where, rule="unknown_key")
        for item in imported.unknown
        if newer[item.key] is None
    ]  # fmt: skip
    found += [
        Finding("warning", item.key, "SGLang's older name, for the releases that older images pin"
                + ("" if item.key in imported.understood else "; it is not counted"),
                f"with a newer SGLang: {newer[item.key]}", when, item.where, rule="older_name")
        for item in imported.unknown
        if newer[item.key] is not None
    ]  # fmt: skip
    if imported.unread:
        first, names = imported.unread[0], ", ".join(other_trainers(imported.run))
        text = f"{names}: a trainer that rlperf does not know; its keys are not read ({len(imported.unread)})"
        found.append(
            Finding("hint", first.key.rpartition(".")[0], text, "", "never", first.where, rule="other_trainer")
        )
    found += [
        Finding(
            "error", item.key, f"value not accepted: {item.suggestion}", "", "parse", item.where, rule="illegal_value"
        )
        for item in imported.illegal
    ]
    found += [
        Finding("error", key, "mandatory, and not stated", _choices(imported, key), "parse", rule="mandatory_key")
        for key in imported.run.missing
    ]
    return found + _newer_wants(imported) + _absent_bases(imported) + _worked_out(imported)


def _worked_out(imported: Imported) -> list[Finding]:
    """Keys that count, and whose values the program works out."""
    read = {key for entry in imported.adapter.fields for key in entry.keys}
    usual = imported.target.defaults()
    return [
        Finding("warning", key, f"worked out by the program: taken at its default, {usual.get(key)}", "",
                "never", where, rule="worked_out")
        for key, where in imported.source.worked_out.items()
        if key in read
    ]  # fmt: skip


def _absent_bases(imported: Imported) -> list[Finding]:
    """Configurations that nobody named here: what they state is not read."""
    text = f"is not here: what it states is taken at the defaults of {imported.adapter.title} {imported.target.version}"
    advice = "name it too, before what builds on it"
    return [Finding("warning", base, text, advice, "never", rule="absent_base") for base in imported.absent_bases]


def _newer_wants(imported: Imported) -> list[Finding]:
    """Keys with a default in the release that a file was read for, which the newest has none for."""
    target, adapter = imported.target, imported.adapter
    newest = replace(target, version=target.table.versions[-1])
    wanted = unstated(adapter, imported.source, newest)
    known = target.table.keys(target.version, target.backend)
    usual = {key: known[key].default for key in wanted if key in known and known[key].default != MANDATORY}
    text = f"by default in {adapter.title} {target.version}; newer releases want it stated"
    return [
        Finding("hint", key, f"{value} {text}", f"set {key}: {value}", "never", rule="newer_wants_it")
        for key, value in usual.items()
    ]


def _choices(imported: Imported, key: str) -> str:
    """What may stand under a mandatory key, where it names an engine."""
    engines = framework_facts(imported.adapter.name, imported.target.version).engines
    named = any(str(entry.at) == "rollout.backend" and key in entry.keys for entry in imported.adapter.fields)
    return f"one of {', '.join(engines)}" if named else ""


def rule_findings(imported: Imported) -> list[Finding]:
    """Validity rules that are broken: most of them the framework would notice only on the workers."""
    run = imported.run
    names = run.names(architecture_of(run))
    facts = framework_facts(imported.adapter.name, imported.target.version)
    broken = frozenset(facts.refused(names, run.trainer.backend or ""))
    found = []
    for rule in facts.rules:
        if rule.id in broken:
            repair = for_rule(imported, rule, broken)
            advice = "; ".join(filter(None, (repair.words if repair else "", rule.advice)))
            found.append(
                Finding("error" if rule.stage != "never" else "warning", rule.key, said(rule, names), advice,
                        rule.stage, imported.where(rule.key), None, rule.id, repair.settings if repair else {})
            )  # fmt: skip
    return found


def memory_findings(imported: Imported, predicted: Prediction) -> list[Finding]:
    """Which phase does not fit and by how much; which leaves memory unused."""
    found = []
    fixed = imported.run.trainer.token_budget is None
    for role, use in predicted.memory_bytes.items():
        knob = ref("rollout.memory_fraction") if role == "rollout" else ref("trainer.token_budget")
        key = key_of(imported, ref("trainer.microbatch") if role != "rollout" and fixed else knob)
        largest = max(use.parts, key=lambda part: use.parts[part])
        phase = PHASES[role]
        spread = f"{human_bytes(use.low)} .. {human_bytes(use.high)}"
        size = f"{human_bytes(use.total)} of {human_bytes(use.limit)} ({spread})"
        where = imported.where(key)
        risk = with_probability(use.risk)
        if use.risk > SURELY:
            over = human_bytes(use.total - use.limit)
            advice = next(
                (text for text in predicted.advice if text.startswith(role)), f"{largest} is the largest part"
            )
            message = f"out of GPU memory in {phase} {risk}: {size}, {over} too much; {largest} is the largest part"
            found.append(Finding("error", key, message, advice, "run", where, rule="out_of_memory", role=role))
        elif use.total > use.allowed:
            level: Severity = "warning" if use.risk > LIKELY else "hint"
            message = f"may run out of GPU memory in {phase} {risk}: {size}"
            advice = f"{largest} is the largest part"
            found.append(Finding(level, key, message, advice, "run", where, rule="tight_memory", role=role))
    return found


@dataclass(frozen=True)
class Cache:
    """What the KV cache of a replica holds: tokens, requests of mean final length; ``least``: tokens of the longest."""

    tokens: float
    requests: float
    least: float

    @property
    def roomy(self) -> bool:
        """Whether it holds more than a few requests of the longest."""
        return self.tokens >= FEW_LONGEST * self.least


def requests_of(run: Run) -> float:
    """Requests that an engine gets at once, those of groups among them that a filter will drop."""
    batch = run.batch
    prompts = batch.generation_batch or max(batch.generated_prompts or 0, batch.flight)
    return prompts * batch.group_size / (run.rollout.data_parallel or 1)


def engine_findings(imported: Imported, cache: Cache | None, domain: int = 0) -> list[Finding]:
    """Settings of the engine that do nothing or fight each other; no prediction needed.

    ``domain``: devices that fast links of the cluster join, which may be several nodes (NVL72); 0: not known
    """
    run = imported.run
    found = []
    longest = run.batch.longest_tokens
    if cache is not None and cache.tokens < cache.least:
        key = key_of(imported, ref("rollout.memory_fraction"))
        message = f"the KV cache holds {cache.tokens:,.0f} tokens, less than one sequence of {cache.least:,.0f}"
        advice = "raise it, or tensor parallel; the engine refuses to start"
        found.append(Finding("error", key, message, advice, "worker", imported.where(key), rule="kv_starvation"))
    running = run.rollout.max_running
    few = cache is not None and cache.tokens >= cache.least and not cache.roomy
    if cache is not None and few and running and cache.requests < min(0.5 * running, requests_of(run)):
        key = key_of(imported, ref("rollout.memory_fraction"))
        message = f"{running} requests may run at once, but the KV cache holds {cache.requests:.0f} of mean length"
        # an engine's own bound that no key of the framework changes: what its preemptions cost is predicted
        settable = key_of(imported, ref("rollout.max_running")) != str(ref("rollout.max_running"))
        level: Severity = "warning" if settable else "hint"
        advice = "expect preemption: raise it, or tensor parallel" + (", or run fewer at once" if settable else "")
        found.append(Finding(level, key, message, advice, "never", imported.where(key), rule="kv_starvation"))
    # until 0.6 prompt + response was what it is left at (vllm_rollout_spmd.py:195, async_sglang_server.py:83 of 0.6.1)
    unset = imported.adapter.name == "verl" and run.batch.context_tokens is None
    if unset and imported.target.version in versions_of("0.7-", imported.target.table.versions):
        key = key_of(imported, ref("batch.context_tokens"))
        message = "left at the model's maximum: requests may grow past prompt + response, and graphs are sized for it"
        settings = {key: longest}
        advice = f"set {key}: {longest}"
        found.append(Finding("hint", key, message, advice, "never", rule="max_model_len", settings=settings))
    readers, replicas = run.rollout.prefill_replicas or 0, run.rollout.data_parallel or 1
    if readers >= replicas:
        key = key_of(imported, ref("rollout.prefill_replicas"))
        message = f"{readers} engines read prompts, and of {replicas} none is left to write"
        found.append(Finding("error", key, message, "let fewer read", "launch", imported.where(key), rule="readers"))
    found += idle_or_uncounted(imported)
    found += _across_nodes(imported, max(run.devices_per_node, domain))
    chunked = run.rollout.chunked_prefill
    # SGLang takes a longer prompt alone (managers/schedule_policy.py of 0.5.23)
    uncut = chunked is False and run.rollout.backend != "sglang"
    if uncut and (run.rollout.engine_token_budget or 1 << 30) < (run.batch.max_prompt_tokens or 1):
        key = key_of(imported, ref("rollout.engine_token_budget"))
        message = "below the longest prompt, without chunked prefill"
        repair = in_keys(imported, [(ref("rollout.chunked_prefill"), True)])
        found.append(
            Finding("error", key, message, repair.words if repair else "turn it on", "worker", imported.where(key),
                    None, "prefill_budget", repair.settings if repair else {})
        )  # fmt: skip
    return found


def _across_nodes(imported: Imported, near: int) -> Iterator[Finding]:
    """Tensor-parallel groups wider than the ``near`` devices that fast links join.

    Of copies of the attention each adds up among its own devices, and what goes to experts and back is no all-reduce.
    """
    run = imported.run
    alone = {"rollout": run.rollout.attention_data_parallel, "trainer": 1}
    for at in (ref("rollout.tensor_parallel"), ref("trainer.tensor_parallel")):
        width = run.value(at) // alone[at.group]
        if width > near:
            key = key_of(imported, at)
            message = f"tensor parallel {width} spans nodes of {near} GPUs: an all-reduce per layer over the network"
            # a model that fills a node has no better: it costs time where it need not be, and nothing fails
            advice, rule = f"at most {near}, where weights leave room", "tp_across_nodes"
            yield Finding("hint", key, message, advice, "never", imported.where(key), rule=rule)


def padding_findings(imported: Imported, predicted: Prediction, lengths: npt.NDArray[np.float64]) -> list[Finding]:
    """Microbatches of a fixed number of samples, padded to their longest: the share of the work that is padding.

    share = 1 - mean / E[max of k], k samples a microbatch in the order they come; the gain is that share of training
    and scoring.
    """
    run = imported.run
    micro = run.trainer.samples
    if run.trainer.token_budget is not None or run.trainer.packing is not False or lengths.size < micro:
        return []
    whole = lengths[: lengths.size // micro * micro].reshape(-1, micro)
    batch = run.batch.longest_tokens
    # One sample a microbatch is padded to the batch's common length where the framework pads before it splits.
    padded = float(whole.max(axis=1).mean()) if micro > 1 else float(batch)
    share = 1.0 - float(whole.mean()) / padded
    stages = predicted.stages_s
    gain = share * (stages.training + stages.scoring)
    repair = in_keys(imported, [(ref("trainer.packing"), True)])
    if repair is None:  # the framework has no key that packs
        return []
    key = key_of(imported, ref("trainer.packing"))
    message = f"microbatches of {micro} are padded: {100 * share:.0f} % of what training computes is padding"
    return [
        Finding("hint", key, message, repair.words, "never", imported.where(key), gain, "no_packing", repair.settings)
    ]
