"""slime (and its fork miles): Megatron and SGLang flags; ``train.py`` in step, ``train_async.py`` one step off.

The optimizer's batch counts samples; token budgets are per GPU, times context parallel. Unknown flags are ignored.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlperf.errors import ExportError, Problem, SpecError
from rlperf.frameworks.adapter import Emission, Limitation, Source, node_shape
from rlperf.frameworks.drafting import DRAFTS, drafting_of, read_sglang, sglang_drafts, sglang_running, with_drafts
from rlperf.frameworks.engine_arguments import SGLANG_CHUNK, sglang_prefill, whole_prompts
from rlperf.frameworks.fields import (
    DISTRIBUTED,
    NEGATED,
    OPTIMIZER,
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
from rlperf.frameworks.run import RolloutRun, Run, TrainerRun
from rlperf.frameworks.slime_model import model_flags
from rlperf.frameworks.writing import argument_array, defaults, script
from rlperf.specs.modes import mode_of_staleness
from rlperf.specs.profiles import load_architecture

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
"""The rollout function of slime v0.3.0 and later that generates through training and weight sync."""
_CONCURRENCY, _FILTER = "sglang-server-concurrency", "dynamic-sampling-filter-path"
_SPELT = {
    "sglang-data-parallel-size": "sglang-dp-size", "sglang-expert-parallel-size": "sglang-ep-size",
    "sglang-ep": "sglang-ep-size", "sglang-pipeline-parallel-size": "sglang-pp-size",
    "sglang-attention-data-parallel-size": "sglang-attn-dp-size",
    "sglang-disable-decode-cuda-graph": "sglang-disable-cuda-graph",
}  # fmt: skip
"""Other names of SGLang's arguments (arg_groups/fields/parallel.py, exec_.py of 0.5.23)."""
_CHUNKED = Unit(lambda value, _: int(value) > 0, lambda value, _: 1024 if value else -1)

FIELDS: tuple[Field, ...] = (
    *elsewhere("trainer.parked", "no-offload-train"),
    *elsewhere("trainer.scoring_token_budget", "max-tokens-per-gpu: log-prob passes take the train microbatches"),
    *elsewhere("rollout.tensor_parallel", "rollout-num-gpus-per-engine / sglang-pp-size"),
    *elsewhere("rollout.chunked_prefill", "sglang-chunked-prefill-size -1, sglang-max-prefill-tokens"),
    field("batch.prompts_per_step", "rollout-batch-size", note="prompts"),
    field("batch.group_size", "n-samples-per-prompt"),
    field("batch.stated_samples", "global-batch-size", read_only=True),
    field("batch.mini_batch", "global-batch-size", SAMPLES),
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
    field("trainer.zero_stage", "use-distributed-optimizer", DISTRIBUTED),
    field("trainer.activation_recompute", "recompute-granularity", RECOMPUTE),
    field("trainer.offload_optimizer", "optimizer-cpu-offload", note="optimizer in host memory"),
    field("trainer.dynamic", "use-dynamic-batch-size"),
    field("trainer.token_budget", "max-tokens-per-gpu", TOKENS_PER_DEVICE),
    field("trainer.chunked_loss", "log-probs-chunk-size", _CHUNKED, "tokens of logits at once"),
    field("trainer.microbatch", "micro-batch-size", note="samples"),
    field("trainer.optimizer", "optimizer", OPTIMIZER),
    field("trainer.router_replay", "use-routing-replay", replay_as("R2"), "R2: experts of the old policy's pass"),
    field("trainer.router_replay", "use-rollout-routing-replay", replay_as("R3"), "R3: those of the rollout"),
    field("rollout.replica", "rollout-num-gpus-per-engine", note="GPUs of one engine: TP x PP"),
    field("rollout.pipeline_parallel", "sglang-pp-size sglang-pipeline-parallel-size", one_as(1)),
    field("rollout.attention_data_parallel", "sglang-dp-size"),
    field("rollout.attention_dp_enabled", "sglang-enable-dp-attention"),
    field("rollout.expert_parallel", "sglang-ep-size sglang-expert-parallel-size"),
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
    field("rollout.rollout_dtype", "sglang-quantization",
          Unit(lambda value, _: value, lambda value, _: None if value in ("bf16", "fp16") else value)),
)  # fmt: skip

# argparse defaults that a reader needs: slime/utils/arguments.py, Megatron arguments.py, SGLang ServerArgs.
DEFAULTS: Mapping[str, Value] = {
    "actor-num-nodes": 1, "actor-num-gpus-per-node": 8, "rollout-num-gpus-per-engine": 1, "num-gpus-per-node": 8,
    "n-samples-per-prompt": 1, "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1, "expert-model-parallel-size": 1, "sequence-parallel": False,
    "use-distributed-optimizer": True, "optimizer-cpu-offload": False, "use-dynamic-batch-size": False,
    "sglang-dp-size": 1, "sglang-ep-size": 1, "sglang-disable-cuda-graph": False, "sglang-disable-radix-cache": False,
    "sglang-server-concurrency": 512,
    "colocate": False, "advantage-estimator": "grpo", "kl-loss-coef": 0.0, "kl-coef": 0.0,
    "sglang-enable-dp-attention": False,
}  # fmt: skip


@dataclass(frozen=True)
class Slime:
    """The adapter."""

    name: str = "slime"
    title: str = "slime"
    fields: tuple[Field, ...] = FIELDS

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """Megatron and SGLang only; fully asynchronous rollouts have no bound on staleness."""
        if run.trainer.backend != "megatron":
            raise ExportError(
                "the trainer is Megatron", "slime", {"nearest": "trainer_backends: megatron, and plan again"}
            )
        lost: list[Limitation] = []
        trainer = run.trainer
        if run.rollout.backend != "sglang":
            lost.append(
                Limitation(f"engine {run.rollout.backend}", "sglang", "rollout was predicted for another engine")
            )
        if run.traits.lag is None:
            lost.append(Limitation(f"a staleness of at most {run.staleness}",
                                   "the first groups that end are trained", "samples may be staler"))  # fmt: skip
        if trainer.ulysses > 1:
            trainer = without_ulysses(trainer)
            ring = f"context parallel {trainer.context_parallel}"
            lost.append(Limitation("Ulysses", ring, "ring exchange in place of all-to-all"))
        trainer = without_activation_offload(trainer, lost)
        if trainer.scoring_token_budget not in (None, trainer.token_budget):
            lost.append(Limitation(f"scoring in microbatches of {trainer.scoring_token_budget} tokens", "training's",
                                   "log-probs-max-tokens-per-gpu is parsed and never used"))  # fmt: skip
            trainer = trainer.having(scoring_token_budget=trainer.token_budget)
        if trainer.lora_rank:
            raise ExportError("no LoRA", "slime", {"nearest": "full training, or verl / NeMo-RL"})
        rollout = run.rollout.having(backend="sglang")
        # one batch ahead is all that a file states: what reads it back knows no more
        staleness = 1 if run.traits.lag is None else run.staleness
        return replace(run, staleness=staleness, trainer=trainer, rollout=rollout), tuple(lost)

    def emit(self, run: Run, target: Target) -> Emission:
        """All flags of a run."""
        run = _with_derived(run)
        settings = write_fields(self.fields, run, target)
        model = [] if run.model_script else model_flags(run)
        own = {setting.key: setting for setting in settings}
        drafted = sglang_drafts(_flag, drafting_of(run, "slime"))
        settings = list(with_drafts(own, _flag("speculative_num_steps"), drafted, target.has).values())
        if (run.rollout.max_running or 0) > int(DEFAULTS[_CONCURRENCY]):
            settings.append(Setting(_CONCURRENCY, run.rollout.max_running, "requests that slime sends to an engine"))
        settings += whole_prompts(run, _flag)
        chosen = {s.key: s for s in (*settings, *_placement(run), *_training(run), *model, *_data(run))}
        kept = [s for s in chosen.values() if s.value is not None and s.value is not False and target.has(s.key)]
        return Emission(tuple(kept), (), "train_async.py" if run.traits.runs_ahead else "train.py", (), run)

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.sh`` with the flags in arrays."""
        yours = {"hf-checkpoint": "HF_CHECKPOINT", "ref-load": "REF_LOAD", "prompt-data": "PROMPT_DATA"}
        stated = {setting.key for setting in emission.settings}
        arch_keys = {setting.key for setting in model_flags(emission.run) if setting.key in stated}
        given = {yours[s.key]: s.value for s in emission.settings if s.key in yours}
        flags = [replace(s, value=f"${yours[s.key]}") if s.key in yours else s for s in emission.settings]
        body = ['cd "${SLIME:?set SLIME to your slime checkout}"', *defaults(given)]
        sourced = emission.run.model_script or _model_script(emission.run.architecture)
        if arch_keys:
            body += argument_array("MODEL_ARGS", [flag for flag in flags if flag.key in arch_keys])
        elif sourced:
            body += [*defaults({"MODEL_SCRIPT": sourced}), 'source "$MODEL_SCRIPT"  # sets MODEL_ARGS']
        else:
            body.append('source "${MODEL_SCRIPT:?no script of slime is known that sets MODEL_ARGS of this model}"')
        body += argument_array("ARGS", [flag for flag in flags if flag.key not in arch_keys])
        body += [
            'ray job submit --address="${RAY_ADDRESS:-http://127.0.0.1:8265}" \\',
            '  --runtime-env-json=\'{"env_vars":{"CUDA_DEVICE_MAX_CONNECTIONS":"1"}}\' -- \\',
            f'  python3 {shlex.quote(emission.entry)} "${{MODEL_ARGS[@]}}" "${{ARGS[@]}}" "$@"',
        ]
        return {f"{stem}.sh": script(header, body)}

    def detect(self, source: Source) -> float:
        """slime's own flags."""
        own = {
            "rollout-batch-size",
            "rollout-num-gpus-per-engine",
            "rollout-max-response-len",
            "actor-num-gpus-per-node",
        }
        return 0.95 if len(own & set(source.keys)) >= 2 else 0.0

    def target(self, source: Source, version: str | None) -> Target:
        """One backend."""
        table = key_table(self.name)
        return Target(table, table.version(version), "megatron")

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """Neutral values of the flags over the defaults."""
        flat: Flat = {**DEFAULTS, **{_SPELT.get(key, key): value for key, value in source.keys.items()}}
        if (width := flat.get(_flag("attn_dp_size"))) is not None:  # one flag for the two before it
            flat = {**flat, _flag("dp_size"): width, _flag("enable_dp_attention"): width != 1}
        start = Run(trainer=TrainerRun(backend="megatron"), rollout=RolloutRun(backend="sglang"))
        run, used = read_fields(self.fields, flat, target, start)
        run = _read_placement(_read_settings(run, flat), flat, source)
        return run.completed(), frozenset(used | _ALSO_READ | _ARCHITECTURE | set(_SPELT))


def _flag(name: str) -> str:
    """SGLang's argument as slime passes it on."""
    return "sglang-" + name.replace("_", "-")


@dataclass(frozen=True)
class SlimeFacts:
    """What rules ask beside the run: how it is launched, and flags that exclude each other."""

    colocate: bool
    asynchronous: bool
    rollout_stated: bool | None = None
    two_kl: bool | None = None
    over_sampling: int | None = None
    balance_by_flops: bool | None = None
    stated_samples: int | None = None


def _model_script(architecture: str) -> str | None:
    """The script of slime's own that states the flags of a model, where its shape was read from there."""
    try:
        source = load_architecture(architecture).source
    except SpecError:
        return None
    found = re.search(r"THUDM/slime\S*:(scripts/models/[\w.-]+\.sh)", source)
    return found[1] if found else None


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
    facts = SlimeFacts(colocate=run.traits.shares_devices, asynchronous=run.traits.runs_ahead)
    return replace(run, batch=batch, trainer=trainer, rollout=rollout, facts=facts)


def _placement(run: Run) -> list[Setting]:
    per_node = run.devices_per_node
    shape = node_shape(run.trainer.devices, per_node)
    if shape is None:
        raise ExportError(f"{run.trainer.devices} trainer GPUs fill no whole nodes of {per_node}", "slime")
    settings = [
        Setting("actor-num-nodes", shape[0]),
        Setting("actor-num-gpus-per-node", shape[1]),
        Setting("num-gpus-per-node", per_node),
    ]
    if run.traits.shares_devices:
        settings.append(Setting("colocate", True, "engine and trainer take turns on the same GPUs"))
        return [*settings, Setting("no-offload-train", run.trainer.parked is False, "states stay on the GPU")]
    settings.append(Setting("rollout-num-gpus", run.rollout.devices, "the engines' own GPUs"))
    if run.traits.lag is None:
        settings.append(Setting("rollout-function-path", FULLY_ASYNC, "rollouts go on through training and sync"))
    return settings


def _training(run: Run) -> list[Setting]:
    reference = run.reference
    settings = [
        Setting("advantage-estimator", "grpo"),
        Setting("use-kl-loss", reference),
        Setting("kl-loss-coef", 0.001 if reference else 0.0, "0: no reference pass"),
        Setting("lr", 1e-6, "yours"),
        Setting("lr-decay-style", "constant"),
        Setting("weight-decay", 0.1),
        Setting("attention-dropout", 0.0),
        Setting("hidden-dropout", 0.0),
        Setting("accumulate-allreduce-grads-in-fp32", True),
        Setting("attention-softmax-in-fp32", True),
        Setting("attention-backend", "flash"),
        Setting("balance-data", True, "even tokens per data-parallel rank"),
    ]
    if run.trainer.activation_recompute == "full":
        settings += [Setting("recompute-method", "uniform"), Setting("recompute-num-layers", 1)]
    if run.trainer.offload_optimizer:
        settings += [Setting("overlap-cpu-optimizer-d2h-h2d", True), Setting("use-precision-aware-optimizer", True)]
    if run.traits.runs_ahead:
        settings.append(Setting("update-weights-interval", 1))
    if run.algorithm == "dapo":
        settings += [
            Setting("eps-clip", 0.2),
            Setting("eps-clip-high", 0.28),
            Setting("over-sampling-batch-size", run.batch.generated_prompts or run.batch.prompts,
                    "groups rolled out until enough have a signal"),
            Setting(_FILTER,
                    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"),
        ]  # fmt: skip
    return settings


def _data(run: Run) -> list[Setting]:
    model = hub_name(run.architecture).rpartition("/")[2]
    steps = run.last_rl_step or run.rl_steps
    settings = [
        Setting("hf-checkpoint", f"/ckpt/{model}", "yours"),
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
        kept = run.kept_in(f"/ckpt/{model}_slime")
        settings.append(Setting("save-interval", run.saves_every, "and at the end of the phase"))
        settings.append(Setting("save", kept, "yours; the same for every phase of a task"))
        settings.append(Setting("load", kept if run.resumes else None, "goes on where the phase before ended"))
    return settings


# -- reading ----------------------------------------------------------------------------------------------------------

_ALSO_READ = frozenset(
    {
        "actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus", "num-gpus-per-node", "colocate",
        "advantage-estimator", "kl-loss-coef", "use-kl-loss", "kl-coef", "hf-checkpoint", "num-steps-per-rollout",
        "over-sampling-batch-size", "update-weights-interval", "no-offload-train", "rollout-function-path",
        "dynamic-sampling-filter-path", "balance-by-flops", "log-probs-max-tokens-per-gpu", _CONCURRENCY,
        "sglang-max-prefill-tokens", "sglang-attn-dp-size",
    }
)  # fmt: skip
_ARCHITECTURE = frozenset(
    {
        "swiglu", "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "group-query-attention",
        "num-query-groups", "kv-channels", "qk-layernorm", "num-experts", "moe-router-topk", "moe-ffn-hidden-size",
        "vocab-size",
    }
)  # fmt: skip


def _read_settings(run: Run, flat: Flat) -> Run:
    """Trainer, engine and lengths in the words of a plan."""
    batch, response = run.batch, run.batch.max_response_tokens or 1024
    context = batch.context_tokens
    prompt = context - response if context and context > response else 2048
    etp = flat.get("expert-tensor-parallel-size") or run.trainer.tensor_parallel
    trainer = run.trainer.having(
        expert_tensor_parallel=int(etp),
        offload="optimizer" if run.trainer.offload_optimizer else "none",
        packing=True,
        budget_stated=run.trainer.token_budget is not None,
        # slime/utils/arguments.py:1869 parses log-probs-max-tokens-per-gpu, which nothing reads
        scoring_token_budget=run.trainer.token_budget if run.trainer.dynamic else None,
    )
    depth, replica = run.rollout.pipeline_parallel, run.rollout.replica or 1
    drafted = read_sglang(flat, _flag, own_layer=not flat.get(_flag("speculative_draft_model_path")))
    running = sglang_running(run.rollout.max_running, drafted)
    sent = int(flat[_CONCURRENCY])  # slime/rollout/sglang_rollout.py:94: so many of each engine, stated or not
    if sent < 1:
        raise SpecError(Problem(f"{_CONCURRENCY} {sent}: an engine is sent no request, and the rollout never ends"))
    running = min(running or sent, sent)
    rollout = run.rollout.having(tensor_parallel=max(replica // depth, 1), speculation=drafted, max_running=running)
    rollout = rollout.having(**sglang_prefill(flat, _flag))
    steps = flat.get("num-steps-per-rollout")
    mini = -(-batch.prompts // int(steps)) if steps and batch.mini_batch is None else batch.mini_batch
    sampled = flat.get("over-sampling-batch-size") if flat.get("dynamic-sampling-filter-path") else None
    more = isinstance(sampled, int) and sampled > batch.prompts
    batch = replace(batch, max_prompt_tokens=batch.max_prompt_tokens or prompt, mini_batch=mini)
    batch = replace(batch, generated_prompts=sampled if more else None)
    return replace(run, batch=batch, trainer=trainer, rollout=rollout)


def _read_placement(run: Run, flat: Flat, source: Source) -> Run:
    """Devices, mode, algorithm, and what rules ask."""
    per_node = int(flat["actor-num-gpus-per-node"])
    trainer = int(flat["actor-num-nodes"]) * per_node
    colocated, asynchronous = bool(flat["colocate"]), "async" in source.entry
    own = flat.get("rollout-num-gpus")
    rollout = trainer if colocated else int(own or 0)
    total = trainer if colocated else trainer + rollout
    per_node = max(per_node, min(int(flat["num-gpus-per-node"]), total))
    kl = float(flat.get("kl-loss-coef") or 0) + float(flat.get("kl-coef") or 0)
    fully = asynchronous and "fully_async_rollout" in str(flat.get("rollout-function-path"))
    steps, samples = flat.get("num-steps-per-rollout"), run.batch.prompts * run.batch.group_size
    return replace(
        run,
        architecture=_architecture_name(flat),
        model_script=next(iter(source.bases), None),
        algorithm="ppo" if flat["advantage-estimator"] == "ppo" else "dapo" if flat.get(_FILTER) else "grpo",
        reference=kl > 0,
        mode="async" if fully else mode_of_staleness(int(asynchronous), shares_devices=colocated),
        staleness=1 if asynchronous else 0,
        devices=total,
        nodes=-(-total // per_node),
        devices_per_node=per_node,
        trainer=run.trainer.having(devices=trainer, parked=not flat.get("no-offload-train") if colocated else None),
        rollout=run.rollout.having(devices=rollout),
        facts=SlimeFacts(
            colocate=colocated,
            asynchronous=asynchronous,
            rollout_stated=colocated or bool(own),
            two_kl=bool(flat.get("kl-loss-coef")) and bool(flat.get("kl-coef")),
            over_sampling=flat.get("over-sampling-batch-size") or run.batch.prompts,
            balance_by_flops=bool(flat.get("balance-by-flops")),
            stated_samples=-(-samples // int(steps)) if steps else None,
        ),
    )


def _architecture_name(flat: Flat) -> str:
    """The checkpoint folder's name, without what a converter appended."""
    name = str(flat.get("hf-checkpoint") or "").rstrip("/").rpartition("/")[2]
    return name.removesuffix("_torch_dist")


ADAPTER = Slime()
