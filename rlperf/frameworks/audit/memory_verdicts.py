"""Published configurations that ran out of memory, or fitted: the probability of it that rlperf gives each.

``rlperf validate verdicts.jsonl --kind verdict``. A line holds a framework's own keys, model, device and verdict; it is
read by the framework's importer and predicted as any job is, with its trainer's microbatch at the lengths that are
plausible where a file states only the longest (`LENGTHS`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri

from rlperf.cost.batching import Microbatches
from rlperf.cost.memory_risk import out_of_memory_risk
from rlperf.cost.trainer.memory import trainer_memory
from rlperf.errors import Problem, RlperfError, SpecError
from rlperf.frameworks.adapter import Source
from rlperf.frameworks.imports import job_of, understand
from rlperf.layout import FloatArray, Layout
from rlperf.plan.answer.memory_uses import memory_uses
from rlperf.plan.judge.engine_cache import cache_shortage
from rlperf.plan.judge.evaluate import Holding
from rlperf.plan.predict import held_by_job
from rlperf.plan.question.context import Context, resolve
from rlperf.sim.rl_step.trainer_bytes import trainer_bytes
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import architecture_named, load_architecture
from rlperf.specs.trainer_calibration import load_trainer

SEED = "rlperf-trainers-1"
"""Of the split: sources with an even digest were looked at for mechanisms, the others are scored alone."""

LENGTHS = (0.39, 0.5)
"""Mean over longest tokens of a sequence, where lengths are not published: median over the groups of
``measured/rl_step.csv`` (0.16 to 1.0) and standard deviation of its logarithm."""
SPREAD = 0.6
"""Coefficient of variation of lengths (`rlperf.calibrate.rl_step.predict.DEFAULT_LAW`)."""
_QUANTILES = (np.arange(20) + 0.5) / 20.0

DEVICES = {"80 GB": "a100_80g_sxm", "a100": "a100_80g_sxm", "32 GB vGPU": "rtx_5090"}
"""Devices named by their memory: one of that size."""

SIZES = {"7B (": "Qwen2.5-7B"}
"""Models of which only the size is stated."""

_TRAINING = ("update", "train", "backward", "log_prob", "logits")
"""Words of a phase that is the trainer's."""
_ROLLOUT = ("rollout", "generation", "engine", "wake", "vllm", "sglang", "sync")
"""Words of a phase in which the engine is awake."""


@dataclass(frozen=True)
class MemoryVerdict:
    """One published configuration: what it was, and whether it ran out of memory."""

    id: str
    source: str
    framework: str
    model: str
    gpu: str
    devices: int
    config: Mapping[str, Any]
    ran_out: bool
    phase: str
    note: str
    line: int

    @property
    def apart(self) -> bool:
        """Whether nobody looked at it for mechanisms; configurations of one source are on one side.

        >>> MemoryVerdict("a", "repo#L1", "", "", "", 1, {}, True, "", "", 1).apart in (True, False)
        True
        """
        origin = self.source.split("#L")[0]
        return int(hashlib.sha256(f"{SEED}|{origin}".encode()).hexdigest()[:8], 16) % 2 == 1

    @property
    def device(self) -> str:
        """The name of its device's profile."""
        return DEVICES.get(self.gpu, self.gpu)

    @property
    def architecture(self) -> str:
        """The name of its model; where only a size is stated, one of that size."""
        return next((name for size, name in SIZES.items() if self.model.startswith(size)), self.model)

    @cached_property
    def phases(self) -> frozenset[str]:
        """Phases that may have run out: those that its words name, both where they name neither."""
        words = self.phase.lower()
        named = {"trainer"} if any(word in words for word in _TRAINING) else set()
        named |= {"rollout"} if any(word in words for word in _ROLLOUT) else set()
        return frozenset(named or {"trainer", "rollout"})


@dataclass(frozen=True)
class Risk:
    """What rlperf says of one: probability of running out of memory in the phases named [1], and the largest peak."""

    verdict: MemoryVerdict
    probability: float
    peak_bytes: float
    device_bytes: float
    role: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "id": self.verdict.id, "framework": self.verdict.framework, "apart": self.verdict.apart,
            "ran_out": self.verdict.ran_out, "probability": self.probability, "role": self.role,
            "peak_bytes": self.peak_bytes, "device_bytes": self.device_bytes,
        }  # fmt: skip


@dataclass(frozen=True)
class MemoryVerdictReport:
    """All that could be predicted, and why the others could not."""

    file: str
    risks: tuple[Risk, ...]
    refused: tuple[tuple[str, str], ...]

    def confusion(self, apart: bool) -> dict[str, int]:
        """Counts of one side of the split at probabilities of 0.5 and, for what fitted, 0.9."""
        chosen = [risk for risk in self.risks if risk.verdict.apart == apart]
        out = [risk.probability for risk in chosen if risk.verdict.ran_out]
        fits = [risk.probability for risk in chosen if not risk.verdict.ran_out]
        return {
            "ran out": len(out), "ran out, at risk (p > 0.5)": sum(p > 0.5 for p in out),
            "fitted": len(fits), "fitted, at risk (p > 0.5)": sum(p > 0.5 for p in fits),
            "fitted, called impossible (p > 0.9)": sum(p > 0.9 for p in fits),
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema_version": 1, "kind": "verdict", "file": self.file,
            "apart": self.confusion(True), "looked_at": self.confusion(False),
            "verdicts": [risk.to_dict() for risk in self.risks], "refused": [list(each) for each in self.refused],
        }  # fmt: skip


def report(path: Path) -> MemoryVerdictReport:
    """Predict every line of a file.

    Raises
    ------
    SpecError : the file cannot be read, or a line is no verdict
    """
    risks, refused = [], []
    for verdict in read_verdicts(path):
        try:
            risks.append(predicted_risk(verdict))
        except (RlperfError, ValueError, KeyError, TypeError, ArithmeticError) as error:
            refused.append((verdict.id, str(error).splitlines()[0]))
    return MemoryVerdictReport(str(path), tuple(risks), tuple(refused))


def read_verdicts(path: Path) -> Iterable[MemoryVerdict]:
    """The lines of a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(Problem(f"cannot be read: {error}", str(path))) from None
    for number, text in enumerate(lines, 1):
        try:
            row = json.loads(text)
            words = {name: row[name] for name in ("id", "source", "framework", "model", "gpu", "phase", "note")}
            if wrong := [name for name, value in words.items() if not isinstance(value, str)]:
                raise ValueError(f"{', '.join(wrong)}: no text")
            count = row["n_gpus"]
            yield MemoryVerdict(
                **words, devices=count if isinstance(count, int) else 0, config=dict(row["config"]),
                ran_out=row["verdict"] == "oom", line=number,
            )  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            raise SpecError(Problem(f"is no verdict: {error}", str(path), number)) from None


def predicted_risk(verdict: MemoryVerdict) -> Risk:
    """The probability of running out of memory.

    Raises
    ------
    SpecError, InfeasibleError : model, device or layout are not stated, or keys are none of the framework's
    """
    if "do not score" in verdict.note:
        raise SpecError("its source cannot tell host from device memory")
    if verdict.devices < 1:
        raise SpecError("the number of devices is not stated")
    if "seq_len" in verdict.config:
        return _fine_tuning(verdict)
    return _rl_step(verdict)


# -- supervised fine-tuning --------------------------------------------------------------------------------------------


def _fine_tuning(verdict: MemoryVerdict) -> Risk:
    """A trainer alone on full sequences, as transformers runs it: under tensor parallel its head gathers all logits."""
    config, device = verdict.config, load_hardware(verdict.device)
    tensor, context, microbatch = (_count(config.get(name, 1)) for name in ("tp", "cp", "micro_batch"))
    recompute = 2 if config.get("gradient_checkpointing", True) else 0
    layout = Layout.of(
        tensor_parallel=tensor, context_parallel=context, data_parallel=max(verdict.devices // tensor // context, 1),
        zero_stage=3, activation_recompute=recompute, microbatch=microbatch,
    )  # fmt: skip
    trainer = load_trainer("deepspeed" if "DeepSpeed" in verdict.framework else "fsdp2")
    batch = Microbatches.fixed(layout, float(config["seq_len"]), float(np.ravel(layout.data_parallel)[0] * microbatch))
    parts = trainer_memory(load_architecture(architecture_named(verdict.architecture)), device, trainer, layout, batch)
    peak = float(parts.total + parts.logits * (tensor - 1))
    memory = device.device.usable_memory
    risk = float(out_of_memory_risk(peak, memory, trainer.memory_low, trainer.memory_high))
    return Risk(verdict, risk, peak, memory, "trainer")


def _count(value: object) -> int:
    """A count, which may say that it is presumed.

    >>> _count("1 presumed"), _count(4)
    (1, 4)
    """
    return int(str(value).split()[0])


# -- a whole rl_step ---------------------------------------------------------------------------------------------------

_SHORT = ("actor.", "rollout.", "ref.", "model.")
"""Groups of verl's keys that reports name without the first part."""
_BARE = {
    "param_offload": "actor_rollout_ref.actor.fsdp_config.param_offload",
    "optimizer_offload": "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "enable_gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "use_remove_padding": "actor_rollout_ref.model.use_remove_padding",
}
_OPENRLHF = {
    "zero_stage": "ds.zero_stage", "micro_train_batch_size": "train.micro_batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size", "train_batch_size": "train.batch_size",
    "rollout_batch_size": "rollout.batch_size", "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "generate_max_len": "rollout.max_new_tokens", "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size", "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node", "ref_num_nodes": "ref.num_nodes",
    "ref_num_gpus_per_node": "ref.num_gpus_per_node", "colocate_all_models": "train.colocate_all",
}  # fmt: skip
"""Flags of releases before the dotted ones (`facts/openrlhf.tsv`)."""


def _verl_keys(verdict: MemoryVerdict) -> dict[str, Any]:
    """Full keys; microbatches of all devices (releases before 0.3) as those of one; GRPO where no critic is named."""
    keys: dict[str, Any] = {
        "trainer.n_gpus_per_node": min(verdict.devices, 8), "trainer.nnodes": max(verdict.devices // 8, 1),
        "algorithm.adv_estimator": "gae" if any(key.startswith("critic.") for key in verdict.config) else "grpo",
        "actor_rollout_ref.model.path": verdict.architecture, "actor_rollout_ref.rollout.name": "vllm",
    }  # fmt: skip
    for name, value in verdict.config.items():
        full = _BARE.get(name, f"actor_rollout_ref.{name}" if name.startswith(_SHORT) else name)
        keys[full] = value
    ulysses = int(keys.get("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 1))
    for group in ("actor.ppo", "rollout.log_prob", "ref.log_prob"):
        old = f"actor_rollout_ref.{group}_micro_batch_size"
        if old in keys:
            keys[f"{old}_per_gpu"] = max(int(keys.pop(old)) * ulysses // verdict.devices, 1)
    if "actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in keys:
        keys.setdefault("actor_rollout_ref.actor.use_dynamic_bsz", True)
    return keys


_NODES: tuple[tuple[str, str, tuple[str, str, str]], ...] = (
    ("nemo", "nemo_rl", ("policy.model_name", "cluster.num_nodes", "cluster.gpus_per_node")),
    ("slime", "slime", ("hf-checkpoint", "actor-num-nodes", "actor-num-gpus-per-node")),
    ("areal", "areal", ("actor.path", "cluster.n_nodes", "cluster.n_gpus_per_node")),
    ("trl", "trl", ("model_name_or_path", "", "")),
)
"""Words of a framework's name, its importer, and its keys of model, nodes and devices of a node."""

LEAST = 3
"""Keys below which a report states too little to be predicted."""


def _source(verdict: MemoryVerdict) -> tuple[str, Source]:
    """The framework whose importer reads a configuration, and its keys; model and devices are the verdict's."""
    name, config = verdict.framework.lower(), verdict.config
    if "verl" in name:
        return "verl", Source(_verl_keys(verdict))
    if "openrlhf" in name:
        # the two lengths of before 0.10 are one of the dotted flags: beside it, the prompt's would be read for both
        keys = {_OPENRLHF.get(key, key): value for key, value in config.items() if key != "prompt_max_len"}
        longest = int(config.get("prompt_max_len", 0)) + int(config.get("generate_max_len", 0))
        return "openrlhf", Source({**keys, "actor.model_name_or_path": verdict.architecture, "data.max_len": longest})
    for word, importer, (model, nodes, devices) in _NODES:
        if word in name:
            sizes = {nodes: max(verdict.devices // 8, 1), devices: min(verdict.devices, 8)} if nodes else {}
            stated = {model: verdict.architecture, **sizes, **config}
            return importer, Source(stated, launcher={"num_processes": verdict.devices})
    raise SpecError(f"no importer reads {verdict.framework}")


def _rl_step(verdict: MemoryVerdict) -> Risk:
    name, source = _source(verdict)
    imported = understand(source, name)
    own = [key for key in verdict.config if key not in {each.key for each in imported.unknown}]
    if len(own) < LEAST:
        raise SpecError(f"states {len(own)} keys of {name}: too little to be predicted")
    keys, job = source.keys, job_of(imported, cluster=f"generic:{verdict.device}")
    context = resolve(job)
    holding = held_by_job(context)
    uses = memory_uses(context, holding)
    entropy = bool(keys.get("actor_rollout_ref.actor.entropy_coeff", 0))
    found: dict[str, tuple[float, float]] = {}
    if "trainer" in verdict.phases:
        peaks = _peaks(context, holding, entropy) + uses["trainer"].parts.get("engine, asleep", 0.0)
        trainer = context.trainers[holding.backend].calibration
        risk = out_of_memory_risk(peaks, uses["trainer"].limit, trainer.memory_low, trainer.memory_high)
        found["trainer"] = (float(risk.mean()), float(np.median(peaks)))
    if "rollout" in verdict.phases:
        risk_of_engine = 1.0 if cache_shortage(holding) else uses["rollout"].risk
        found["rollout"] = (risk_of_engine, uses["rollout"].total)
    role = max(found, key=lambda each: found[each][0])
    probability = 1.0 - float(np.prod([1.0 - risk for risk, _ in found.values()]))
    return Risk(verdict, probability, found[role][1], context.hardware.device.usable_memory, role)


def _peaks(context: Context, holding: Holding, entropy: bool) -> FloatArray:
    """Peaks of training over the lengths that are plausible [bytes] ``[quantiles]``; of a token budget, one.

    As many sequences of these lengths take less when they are scored, where nothing waits for a backward pass.
    """
    stack, pool = context.trainers[holding.backend], holding.configuration.pool("trainer")
    settings = context.job.pool("trainer").settings.filled()
    demand, layout = holding.demand, Layout.of_values(pool.layout).take(0)
    longest, sequences = float(demand.batch.longest_tokens), float(np.ravel(layout.microbatch)[0])
    logits = stack.framework.training.logits
    if entropy and logits is not None:
        space = stack.calibration.workspace.model_copy(update={"logit_bytes": logits.entropy or logits.update})
        stack = replace(stack, calibration=stack.calibration.model_copy(update={"workspace": space}))
    if settings.token_budget:
        tokens = np.array([float(settings.token_budget)])
    elif settings.packing:
        median, sigma = LENGTHS
        mean = np.minimum(median * np.exp(sigma * ndtri(_QUANTILES)), 1.0)
        tokens = sequences * longest * np.minimum(mean * (1.0 + 3.0 * SPREAD / np.sqrt(sequences)), 1.0)
    else:
        tokens = np.array([sequences * longest])
    filled = settings.model_copy(update={"packing": True, "token_budget": None, "scoring_microbatch": None})
    filling = stack.framework.training.model_copy(update={"batching": "rank"})  # by tokens: those of `tokens`
    stack = replace(stack, framework=stack.framework.model_copy(update={"training": filling}))
    held = trainer_bytes(
        context.site, stack, context.tasks[0].architecture, demand, layout, filled, tokens,
        np.asarray(int(bool(pool.settings.parked))),
    )  # fmt: skip
    return np.ravel(np.broadcast_to(held.peak, tokens.shape))


def text(found: MemoryVerdictReport) -> str:
    """The report as text: both sides of the split in counts and in calibration, then every configuration."""
    lines = [f"{found.file}: {len(found.risks)} of {len(found.risks) + len(found.refused)} verdicts predicted"]
    for apart, words in ((True, "kept apart, scored alone"), (False, "looked at for mechanisms")):
        chosen = [risk for risk in found.risks if risk.verdict.apart == apart]
        lines += ["", words, *(f"  {count:4d} {name}" for name, count in found.confusion(apart).items())]
        lines += _calibration(chosen)
    lines += ["", f"{'':40s} ran out    p    peak      of GB"]
    for risk in found.risks:
        verdict, said = risk.verdict, "yes" if risk.verdict.ran_out else "no"
        sizes = f"{risk.peak_bytes / 1e9:7.1f} {risk.device_bytes / 1e9:7.1f}"
        lines.append(f"{verdict.id[:40]:40s} {said:7s} {risk.probability:4.2f} {sizes} {risk.role}")
    return "\n".join([*lines, *(f"refused {name}: {why}" for name, why in found.refused)])


def _calibration(risks: list[Risk]) -> list[str]:
    """Of those that were given a probability within some bounds, how many ran out."""
    lines = []
    for low, high in ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1.0)):
        inside = [risk for risk in risks if low <= risk.probability < high or risk.probability == high == 1.0]
        if inside:
            said = np.mean([risk.probability for risk in inside])
            share = np.mean([risk.verdict.ran_out for risk in inside])
            lines.append(f"  p {low:.1f} to {high:.1f}: {said:.2f} in the mean, {share:.2f} of {len(inside)} ran out")
    return lines
