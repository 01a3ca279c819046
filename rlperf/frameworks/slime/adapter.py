"""slime: Megatron and SGLang flags; ``train.py`` in step, ``train_async.py`` one step off.

The optimizer's batch counts samples; token budgets are per GPU, times context parallel. Unknown flags are ignored.
What a fork has otherwise it says by overriding (`rlperf.frameworks.miles`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlperf.errors import ExportError, SpecError
from rlperf.frameworks.adapter import Emission, Limitation, Source, node_shape
from rlperf.frameworks.drafting import DRAFTS, drafting_of, sglang_drafts, with_drafts
from rlperf.frameworks.engine_arguments import SGLANG_CHUNK, SGLANG_DISPATCH, whole_prompts
from rlperf.frameworks.fields import (
    DEEPEP,
    DISTRIBUTED,
    FLEX,
    FP8_FORMAT,
    FP8_RECIPE,
    NEGATED,
    OPTIMIZER,
    QUANTIZED_SGLANG,
    RECOMPUTE,
    SAMPLES,
    SGLANG_KV_DTYPE,
    TOKENS_PER_DEVICE,
    Field,
    Setting,
    Target,
    Unit,
    elsewhere,
    field,
    one_as,
    read_fields,
    replay_as,
    write_fields,
    zero_as,
)
from rlperf.frameworks.hub import hub_name
from rlperf.frameworks.keytable import Flat, Value, key_table
from rlperf.frameworks.nearest import with_stage_ends, without_activation_offload, without_ulysses
from rlperf.frameworks.run import BatchFacts, RolloutRun, Run, TrainerRun, ref
from rlperf.frameworks.slime.model import model_flags
from rlperf.frameworks.slime.reading import (
    ALSO_READ,
    ARCHITECTURE,
    BOUND,
    CONCURRENCY,
    DEFAULTS,
    ENDINGS,
    FILTER,
    SPELT,
    SlimeFacts,
    read_placement,
    read_settings,
    served_dtype,
    sglang_flag,
)
from rlperf.frameworks.writing import argument_array, defaults, script
from rlperf.specs.profiles import load_architecture

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
GROUPS_OF_AN_ENGINE = 512
"""Groups that it has under way, for every engine (slime/rollout/fully_async_rollout.py:59 of 624b824a)."""
"""The rollout function of slime v0.3.0 and later that generates through training and weight sync."""
_CHUNKED = Unit(lambda value, _: int(value) > 0, lambda value, _: 1024 if value else -1)
_DISTRIBUTED = replace(DISTRIBUTED, takes=frozenset({1}))
"""A flag that is set by default, so that none takes it back."""


def served(*dtypes: str) -> Unit:
    """Precisions that weights are quantised to on their way to the engines.

    A checkpoint says which, and engines start from it, too: one in 16 bits has 16 sent, to engines that hold others.
    SGLang sees by itself that its blocks are blocks.
    """
    return replace(
        QUANTIZED_SGLANG,
        write=lambda value, run: None if value == "fp8_block" else QUANTIZED_SGLANG.write(value, run),
        takes=frozenset({"bf16", *dtypes}),
    )


SERVED = ("fp8", "fp8_block", "int4_wo")
"""Of slime: megatron_utils/megatron_to_hf/processors."""


def _continues(over_provision: Value, _: Run) -> bool | None:
    """The flag that keeps what is interrupted; how much is in flight stands in over-sampling-batch-size."""
    return True if over_provision > 1.0 else None


FIELDS: tuple[Field, ...] = (
    *elsewhere("trainer.parked", "no-offload-train"),
    *elsewhere("trainer.scoring_token_budget", "max-tokens-per-gpu: log-prob passes take the train microbatches"),
    *elsewhere("rollout.tensor_parallel", "rollout-num-gpus-per-engine / sglang-pp-size"),
    *elsewhere("rollout.chunked_prefill", "sglang-chunked-prefill-size -1, sglang-max-prefill-tokens"),
    field("batch.prompts_per_step", "rollout-batch-size", note="prompts"),
    field("batch.group_size", "n-samples-per-prompt"),
    field("batch.stated_samples", "global-batch-size", read_only=True),
    field("batch.mini_batch", "global-batch-size", SAMPLES),
    field("batch.over_provision", "partial-rollout", Unit(lambda _, run: run.batch.over_provision, _continues),
          "with over-sampling-batch-size: what is unfinished goes on in the next rl_step"),
    field("batch.max_prompt_tokens", "rollout-max-prompt-len"),
    field("batch.max_response_tokens", "rollout-max-response-len"),
    field("batch.context_tokens", "rollout-max-context-len", note="prompt + response"),
    field("trainer.tensor_parallel", "tensor-model-parallel-size"),
    field("trainer.pipeline_parallel", "pipeline-model-parallel-size"),
    field("trainer.virtual_pipeline", "num-virtual-stages-per-pipeline-rank", one_as(None)),
    field("trainer.first_stage_layers", "decoder-first-pipeline-num-layers"),
    field("trainer.last_stage_layers", "decoder-last-pipeline-num-layers"),
    field("trainer.context_parallel", "context-parallel-size"),
    field("trainer.expert_parallel", "expert-model-parallel-size"),
    field("trainer.expert_tensor_parallel", "expert-tensor-parallel-size"),
    field("trainer.sequence_parallel", "sequence-parallel"),
    field("trainer.zero_stage", "use-distributed-optimizer", _DISTRIBUTED),
    field("trainer.activation_recompute", "recompute-granularity", RECOMPUTE),
    field("trainer.offload_optimizer", "optimizer-cpu-offload", note="optimizer in host memory"),
    field("trainer.dynamic", "use-dynamic-batch-size"),
    field("trainer.token_budget", "max-tokens-per-gpu", TOKENS_PER_DEVICE),
    field("trainer.chunked_loss", "log-probs-chunk-size", _CHUNKED, "tokens of logits at once"),
    field("trainer.microbatch", "micro-batch-size", note="samples"),
    field("trainer.optimizer", "optimizer", OPTIMIZER),
    field("trainer.compute_dtype", "fp8-format", FP8_FORMAT, "products of 8 bits; weights stay as they are"),
    field("trainer.compute_dtype", "fp8-recipe", FP8_RECIPE, "scales of blocks"),
    field("trainer.router_replay", "use-routing-replay", replay_as("R2"), "R2: experts of the old policy's pass"),
    field("trainer.router_replay", "use-rollout-routing-replay", replay_as("R3"), "R3: those of the rollout"),
    field("trainer.expert_dispatch", "moe-enable-deepep", DEEPEP, "how tokens reach experts"),
    field("trainer.expert_dispatch", "moe-token-dispatcher-type", FLEX, "how tokens reach experts"),
    field("rollout.replica", "rollout-num-gpus-per-engine", note="GPUs of one engine: TP x PP"),
    field("rollout.pipeline_parallel", "sglang-pp-size sglang-pipeline-parallel-size", one_as(1)),
    field("rollout.attention_data_parallel", "sglang-dp-size"),
    field("rollout.attention_dp_enabled", "sglang-enable-dp-attention"),
    field("rollout.expert_parallel", "sglang-ep-size sglang-expert-parallel-size"),
    field("rollout.expert_dispatch", "sglang-moe-a2a-backend", SGLANG_DISPATCH, "how tokens reach experts"),
    field("rollout.memory_fraction", "sglang-mem-fraction-static"),
    field("rollout.max_running", "sglang-max-running-requests", note="requests that an engine runs at once"),
    field("rollout.engine_token_budget", "sglang-chunked-prefill-size", SGLANG_CHUNK, "tokens per prefill chunk"),
    field("rollout.cuda_graphs", "sglang-disable-cuda-graph", NEGATED),
    field("rollout.prefix_caching", "sglang-disable-radix-cache", NEGATED),
    field("rollout.kv_dtype", "sglang-kv-cache-dtype", SGLANG_KV_DTYPE),
    field("rollout.speculation", "sglang-speculative-num-steps", DRAFTS),
    field("rollout.prefill_replicas", "prefill-num-servers", zero_as(None), "engines that read prompts for the others"),
    field("rollout.elastic", "use-fault-tolerance", note="engines that are gone are replaced, the others go on"),
    field("rollout.draft_training", "enable-mtp-training", note="the draft head is trained with the policy"),
    field("rollout.rollout_dtype", "sglang-quantization", served(*SERVED), "that of hf-checkpoint"),
)  # fmt: skip
_LORA = ref("trainer.lora_rank")
_OWN = {"rollout-batch-size", "rollout-num-gpus-per-engine", "rollout-max-response-len", "actor-num-gpus-per-node"}
"""Flags that only slime and its forks have."""


@dataclass(frozen=True)
class Slime:
    """The adapter. ``name`` is that of the Python package, too, in which its functions lie."""

    name: str = "slime"
    title: str = "slime"
    fields: tuple[Field, ...] = FIELDS
    unscored: int = 1
    """Updates of an rl_step up to which it leaves out the pass of the old policy by itself."""

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """Megatron and SGLang only; fully asynchronous rollouts have no bound on staleness."""
        if run.trainer.backend != "megatron":
            nearest = "trainer_backends: megatron, and plan again"
            raise ExportError("the trainer is Megatron", self.name, {"nearest": nearest})
        lost: list[Limitation] = []
        trainer = run.trainer
        if run.rollout.backend != "sglang":
            lost.append(
                Limitation(f"engine {run.rollout.backend}", "sglang", "rollout was predicted for another engine")
            )
        unbounded = run.traits.lag is None and key_table(self.name).find(BOUND, version) is None
        if unbounded:
            lost.append(Limitation(f"a staleness of at most {run.staleness}",
                                   "the first groups that end are trained", _staler(run)))  # fmt: skip
        if trainer.ulysses > 1:
            trainer = without_ulysses(trainer)
            ring = f"context parallel {trainer.context_parallel}"
            lost.append(Limitation("Ulysses", ring, "ring exchange in place of all-to-all"))
        trainer = without_activation_offload(trainer, lost)
        if trainer.scoring_token_budget not in (None, trainer.token_budget):
            lost.append(Limitation(f"scoring in microbatches of {trainer.scoring_token_budget} tokens", "training's",
                                   "log-probs-max-tokens-per-gpu is parsed and never used"))  # fmt: skip
            trainer = trainer.having(scoring_token_budget=trainer.token_budget)
        if trainer.lora_rank and not any(entry.at == _LORA for entry in self.fields):
            raise ExportError("no LoRA", self.name, {"nearest": "full training, or verl / NeMo-RL"})
        rollout = run.rollout.having(backend="sglang")
        batch = _beside_filter(run, lost)
        # one batch ahead is all that a file states: what reads it back knows no more
        staleness = 1 if unbounded else run.staleness
        return replace(run, staleness=staleness, batch=batch, trainer=trainer, rollout=rollout), tuple(lost)

    def emit(self, run: Run, target: Target) -> Emission:
        """All flags of a run."""
        run = replace(_with_derived(run), facts=self.asked(run))
        settings = write_fields(self.fields, run, target)
        model = [] if run.model_script else model_flags(run)
        own = {setting.key: setting for setting in settings}
        drafted = sglang_drafts(sglang_flag, drafting_of(run, self.name))
        settings = list(with_drafts(own, sglang_flag("speculative_num_steps"), drafted, target.has).values())
        settings += self._sent(run)
        settings += whole_prompts(run, sglang_flag)
        settings += [*self.placement(run, target), *self.training(run), *model, *self.data(run)]
        chosen = {s.key: s for s in settings}
        kept = [s for s in chosen.values() if s.value is not None and s.value is not False and target.has(s.key)]
        return Emission(tuple(kept), (), "train_async.py" if run.traits.runs_ahead else "train.py", (), run)

    def _sent(self, run: Run) -> list[Setting]:
        """How much an engine is sent at once: its requests, or trajectories where a plan bounds those under way."""
        most = run.batch.max_trajectories
        if most and run.batch.turns > 1:
            each = -(-most // (run.rollout.data_parallel or 1))
            return [Setting(CONCURRENCY, each, "trajectories under way of each engine, while their tools run, too")]
        if (run.rollout.max_running or 0) <= int(DEFAULTS[CONCURRENCY]):
            return []
        return [Setting(CONCURRENCY, run.rollout.max_running, f"requests that {self.name} sends to an engine")]

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.sh`` with the flags in arrays."""
        yours = {"hf-checkpoint": "HF_CHECKPOINT", "ref-load": "REF_LOAD", "prompt-data": "PROMPT_DATA"}
        stated = {setting.key for setting in emission.settings}
        arch_keys = {setting.key for setting in model_flags(emission.run) if setting.key in stated}
        given = {yours[s.key]: s.value for s in emission.settings if s.key in yours}
        flags = emission.settings
        checkout = f"{self.name.upper()}:?set {self.name.upper()} to your {self.name} checkout"
        body = [f'cd "${{{checkout}}}"', *defaults(given)]
        sourced = emission.run.model_script or _model_script(emission.run.architecture, self.name)
        if arch_keys:
            body += argument_array("MODEL_ARGS", [flag for flag in flags if flag.key in arch_keys])
        elif sourced:
            body += [*defaults({"MODEL_SCRIPT": sourced}), 'source "$MODEL_SCRIPT"  # sets MODEL_ARGS']
        else:
            asked = f"MODEL_SCRIPT:?no script of {self.name} is known that sets MODEL_ARGS of this model"
            body.append(f'source "${{{asked}}}"')
        body += argument_array("ARGS", [flag for flag in flags if flag.key not in arch_keys], yours)
        body += [
            'ray job submit --address="${RAY_ADDRESS:-http://127.0.0.1:8265}" \\',
            '  --runtime-env-json=\'{"env_vars":{"CUDA_DEVICE_MAX_CONNECTIONS":"1"}}\' -- \\',
            f'  python3 {shlex.quote(emission.entry)} "${{MODEL_ARGS[@]}}" "${{ARGS[@]}}" "$@"',
        ]
        return {f"{stem}.sh": script(header, body)}

    def detect(self, source: Source) -> float:
        """slime's own flags."""
        return 0.95 if len(_OWN & set(source.keys)) >= 2 else 0.0

    def target(self, source: Source, version: str | None) -> Target:
        """One backend."""
        table = key_table(self.name)
        return Target(table, table.version(version), "megatron")

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """Neutral values of the flags over the defaults."""
        flat: Flat = {**DEFAULTS, **{SPELT.get(key, key): value for key, value in source.keys.items()}}
        if (width := flat.get(sglang_flag("attn_dp_size"))) is not None:  # one flag for the two before it
            flat = {**flat, sglang_flag("dp_size"): width, sglang_flag("enable_dp_attention"): width != 1}
        start = Run(trainer=TrainerRun(backend="megatron"), rollout=RolloutRun(backend="sglang"))
        run, used = read_fields(self.fields, flat, target, start)
        run = read_placement(read_settings(run, flat), flat, source)
        return run.completed(), frozenset(used | ALSO_READ | ARCHITECTURE | set(SPELT))

    def asked(self, run: Run) -> SlimeFacts:
        """What rules ask of a run that is written."""
        return SlimeFacts(colocate=run.traits.shares_devices, asynchronous=run.traits.runs_ahead)

    def placement(self, run: Run, target: Target) -> list[Setting]:
        """Who gets which GPUs."""
        per_node = run.devices_per_node
        shape = node_shape(run.trainer.devices, per_node)
        if shape is None:
            raise ExportError(f"{run.trainer.devices} trainer GPUs fill no whole nodes of {per_node}", self.name)
        settings = [
            Setting("actor-num-nodes", shape[0]),
            Setting("actor-num-gpus-per-node", shape[1]),
            Setting("num-gpus-per-node", per_node),
        ]
        if run.traits.shares_devices:
            settings.append(Setting("colocate", True, "engine and trainer take turns on the same GPUs"))
            return [*settings, Setting("no-offload-train", run.trainer.parked is False, "states stay on the GPU")]
        settings.append(Setting("rollout-num-gpus", run.rollout.devices, "the engines' own GPUs"))
        return [*settings, *(self.endless(run, target) if run.traits.lag is None else ())]

    def endless(self, run: Run, target: Target) -> list[Setting]:
        """What makes rollouts go on through training and weight sync."""
        return [Setting("rollout-function-path", FULLY_ASYNC, "rollouts go on through training and sync")]

    def data(self, run: Run) -> list[Setting]:
        """Names and paths of models and data, how long the run is and what it goes on from."""
        return _data(run, self.name)

    def training(self, run: Run) -> list[Setting]:
        """The algorithm, and what a trainer of Megatron is told beside its layout."""
        reference = run.reference
        settings = [
            Setting("advantage-estimator", "ppo" if run.algorithm == "ppo" else "grpo"),
            Setting("use-kl-loss", reference, "a reference is scored, whatever the coefficient"),
            Setting("kl-loss-coef", 0.001 if reference else 0.0),
            Setting("lr", 1e-6, "yours"),
            Setting("lr-decay-style", "constant"),
            Setting("weight-decay", 0.1),
            Setting("attention-dropout", 0.0),
            Setting("hidden-dropout", 0.0),
            Setting("accumulate-allreduce-grads-in-fp32", True),
            Setting("attention-softmax-in-fp32", True),
            Setting("attention-backend", "flash"),
            Setting("balance-data", True, "even tokens per data-parallel rank"),
            Setting("use-rollout-logprobs", run.old_policy is False and run.batch.updates > self.unscored,
                    "the engine's log-probs serve: no pass of the old policy"),
        ]  # fmt: skip
        if run.trainer.activation_recompute == "full":
            settings += [Setting("recompute-method", "uniform"), Setting("recompute-num-layers", 1)]
        if run.trainer.offload_optimizer:
            settings += [Setting("overlap-cpu-optimizer-d2h-h2d", True), Setting("use-precision-aware-optimizer", True)]
        if FP8_FORMAT.write(run.trainer.compute_dtype, run):
            settings.append(Setting("transformer-impl", "transformer_engine", "whose products are of 8 bits"))
        if run.traits.runs_ahead:
            settings.append(Setting("update-weights-interval", 1))
        if run.algorithm == "dapo":
            settings += [
                Setting("eps-clip", 0.2),
                Setting("eps-clip-high", 0.28),
                Setting("over-sampling-batch-size", run.batch.generated_prompts or run.batch.prompts,
                        "groups rolled out until enough have a signal"),
                Setting(FILTER,
                        f"{self.name}.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"),
            ]  # fmt: skip
        elif run.batch.over_provision > 1.0:
            flight = "groups in flight; the first to end train"
            settings.append(Setting("over-sampling-batch-size", run.batch.flight, flight))
        return settings


def _model_script(architecture: str, framework: str) -> str | None:
    """The script of the framework's own that states the flags of a model, where its shape was read from there."""
    try:
        source = load_architecture(architecture).source
    except SpecError:
        return None
    found = re.search(rf"\b\w+/{framework}\S*:(scripts/models/[\w.-]+\.sh)", source)
    return found[1] if found else None


def _staler(run: Run) -> str:
    """How far samples may lie behind where their program bounds groups under way alone."""
    engines, prompts = run.rollout.data_parallel, run.batch.prompts_per_step
    if not engines or not prompts:
        return "samples may be staler"
    groups = GROUPS_OF_AN_ENGINE * engines
    return f"samples may be staler: {groups:,} groups are under way, those of {groups / prompts:.3g} rl_steps"


def _beside_filter(run: Run, lost: list[Limitation]) -> BatchFacts:
    """The batch as a file holds it: beside a filter, groups beyond a batch are those that it may drop."""
    batch = run.batch
    if run.algorithm == "dapo" and batch.over_provision > 1.0:
        lost.append(Limitation(f"over_provision {batch.over_provision:g} beside dynamic sampling", "every response is "
                               "waited for", "over-sampling-batch-size holds what the filter drops"))  # fmt: skip
        return replace(batch, over_provision=1.0)
    return batch


def _with_derived(run: Run) -> Run:
    run = with_stage_ends(run)
    ours, engine = run.trainer, run.rollout
    trainer = ours.having(
        offload_optimizer=ours.offload in ("optimizer", "both"),
        dynamic=ours.token_budget is not None,
        scoring_token_budget=ours.token_budget,
        microbatch=None if ours.token_budget else ours.samples,
    )
    rollout = engine.having(
        replica=engine.tensor_parallel * engine.pipeline_parallel,
        attention_dp_enabled=engine.attention_data_parallel > 1,
    )
    batch = run.batch.with_context()
    return replace(run, batch=batch, trainer=trainer, rollout=rollout)


def _served(model: str, dtype: str | None) -> Setting:
    """The checkpoint that engines start from, in the type that they serve."""
    word = next((word.upper() for word, served in ENDINGS.items() if dtype in (served, word)), None)
    stored = served_dtype(model)
    if word is None:
        cast = f"/ckpt/{model}-BF16" if dtype and stored else f"/ckpt/{model}"
        return Setting("hf-checkpoint", cast, "yours: cast to 16 bits" if dtype and stored else "yours")
    # models in four bits are published under their own name, or with one of many words
    own = stored == ENDINGS[word.lower()] or (word == "INT4" and not stored)
    named = model if own else f"{model}-{word}"
    return Setting("hf-checkpoint", f"/ckpt/{named}", f"yours: in {word}, to which weights for engines are quantised")


def _data(run: Run, framework: str) -> list[Setting]:
    model = hub_name(run.architecture).rpartition("/")[2]
    steps = run.ends_at
    settings = [
        _served(model, run.rollout.rollout_dtype),
        Setting("ref-load", f"/ckpt/{model}_torch_dist", "yours"),
        Setting("prompt-data", f"/data/{run.data}.jsonl", "yours"),
        Setting("input-key", "prompt", "yours"),
        Setting("label-key", "label", "yours"),
        Setting("apply-chat-template", True),
        Setting("rollout-shuffle", True),
        Setting("rm-type", "deepscaler", "yours"),
        Setting(
            "custom-generate-function-path",
            "yours.generate" if run.batch.turns > 1 else None,
            "yours: the turns with your tools",
        ),
        Setting("num-rollout", steps, "rl_steps, through the last one of this phase")
        if steps
        else Setting("num-epoch", 1, "yours: how often the data are gone through"),
    ]
    if run.rl_steps:
        kept = run.kept_in(f"/ckpt/{model}_{framework}")
        settings.append(Setting("save-interval", run.saves_every, "and at the end of the phase"))
        settings.append(Setting("save", kept, "yours; the same for every phase of a task"))
        settings.append(Setting("load", kept if run.resumes else None, "goes on where the phase before ended"))
    return settings


ADAPTER = Slime()
