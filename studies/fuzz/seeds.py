"""What is mutated: one small, sound input of every form that rlperf reads, as the files of a folder."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from rlperf.specs.profiles import profile_root

Files = Mapping[str, bytes]

JOB = """\
name: small
architecture: Qwen3-0.6B
cluster: dgx_h100
nodes: 1
price: 2.5 USD/h
framework: verl
engine: vllm
objective: {minimize: step_time, risk: 0.1}
limits: {step: 2 h, truncated_fraction: 1.0, staleness: 1}
horizon: {rl_steps: 2}
run: {rl_steps: 100, checkpoint_every: 20, checkpoint: 30 s, device_mtbf: 1000 h}
tasks:
  - name: math
    workload: math
    prompts_per_step: 16
    group_size: 4
    mini_batch: [8, 16]
    max_prompt_tokens: 512
    max_response_tokens: 1024
    reward_s: 2 s
pools:
  - role: rollout
    devices: 8
    layout: {tensor_parallel: [1, 2]}
    settings: {memory_fraction: 0.6, max_running: 64, kv_dtype: bf16}
  - role: trainer
    layout: {tensor_parallel: 1, activation_recompute: [none, full]}
    settings: {token_budget: 8192, compute_dtype: bf16}
modes: [colocated]
seed: 3
"""
SWEEP = """\
name: both
method: screen
job:
  architecture: Qwen3-0.6B
  cluster: dgx_h100
  tasks: [{name: math, workload: math, prompts_per_step: 16, group_size: 4, max_response_tokens: 1024}]
grid:
  tasks.0.prompts_per_step: [16, 32]
  nodes: {min: 1, max: 2, step: 1}
points:
  - {framework: verl}
"""
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 3072, "vocab_size": 32000, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 512, "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "layer_types": ["full_attention"] * 8,
}  # fmt: skip
VISION = {
    "model_type": "qwen2_5_vl", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000, "max_position_embeddings": 32768,
    "vision_config": {"depth": 4, "hidden_size": 256, "num_heads": 4, "intermediate_size": 512, "patch_size": 14,
                      "out_hidden_size": 1024, "spatial_merge_size": 2, "window_size": 112,
                      "fullatt_block_indexes": [1, 3]},
}  # fmt: skip
PIPELINE = """\
tiny:
  layers: E---L
  f: {E: 0.5, '-': 1.5, L: 1.0}
  b: {E: 0.5, '-': 2.0, L: 1.0}
  w: {E: 0.1, '-': 1.0, L: 0.5}
  activation_bytes: {'-': 20 MB}
  state_bytes: {'-': 100 MB}
  output_bytes: 4 MB
"""


def _lines(records: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


PACKED = _lines(
    [
        {"step": 0, "rank": 0, "dp_rank": 0, "local_index": i, "input": 40 + i, "output": [30 + i, 400, 55, 1024],
         "n_sampling": 4, "validate": False}
        for i in range(16)
    ]
)  # fmt: skip
TURNS = _lines(
    [
        {"step": 0, "prompt_group_id": group, "sample_id": sample, "turn_count": 2, "max_response_len": 512,
         "turns": [{"turn": 0, "prompt_tokens": 50, "completion_tokens": 20, "cached_tokens": 10,
                    "engine_latency_s": 0.5},
                   {"turn": 1, "prompt_tokens": 90, "completion_tokens": 30 + group, "engine_latency_s": 0.7}],
         "tool_calls": [{"turn": 0, "latency_s": 1.5}]}
        for group in range(4) for sample in range(2)
    ]
)  # fmt: skip
REWARDS = _lines([{"step": 0, "rank": r, "batch_size": 8, "reward_time_s": 1.5, "response_sum": 900} for r in range(2)])
TOOLS = b"".join(b"Step0, Request ID: r%d, Tool: search, Latency: 1.%d seconds\n" % (n, n) for n in range(5))
WORKLOAD = json.dumps({"0": {"input": [10, 20], "output": [5, 7, 9, 11]}, "1": {"input": [9], "output": [8, 9]}})
LENGTHS = "prompt_tokens,response_tokens,group,rl_step,max_response_tokens\n" + "".join(
    f"{20 + n},{50 + 7 * n},{n // 4},0,256\n" for n in range(16)
)
RANKS = _lines(
    [
        {"rl_step": s, "stage": stage, "rank": r, "seconds": 1.0 + r / 4, "tokens": 100}
        for s in (0, 1) for stage in ("rollout", "training") for r in range(4)
    ]
)  # fmt: skip
VERL_LOG = "".join(
    f"(TaskRunner pid=7) step:{s} - timing_s/gen:32.5 - timing_s/old_log_prob:3.5 - timing_s/update_actor:np.float64("
    f"14.25) - timing_s/step:57.0 - response_length/mean:128.0 - response_length/max:256.0\n"
    for s in (1, 2)
)
OTHER_LOGS = (
    "perf 3: {'perf/rollout_time': 30.5, 'perf/actor_train_time': 12.0, 'perf/step_time': 50.1}\n"
    "Global step 4: {'timing/generation': 3.0, 'timing/step_total': tensor(5.5)}\n"
    "========================= Step 3/100 =========================\n  • generation: 12.50s (60%)\n"
    "Epoch 1/2 Step 3/50 Train step 53\n│ timeperf/rollout │ 3.5 │\n"
)
STEP_CSV = "Step,run-3 - timing_s/gen,run-3 - timing_s/step\n1,32.5,57\n2,31.0,55\n"
STEP_JSON = json.dumps({"log_history": [{"step": 1, "step_time": 30.5, "profiling/Time/x": 1.5}, {"step": 2}]})
DUMP = _lines([{"task_id": 1, "seqlen": 90 + n, "prompt_len": 40, "tail_version": n % 2} for n in range(6)])
NEMO_DUMP = _lines([{"input_lengths": [8, 9], "token_loss_mask": [[0, 1, 1], [0, 0, 1]], "idx": [0, 1]}])
VERL_DUMP = _lines([{"input": "a", "output": "b c", "uid": "x_1", "step": 2}])
KERNELS = "gpu,dtype,kernel,m,n,k,latency_us\n" + "".join(
    f"h100_sxm,bf16,cublas,{64 * n},4096,4096,{9.5 + n}\n" for n in range(1, 12)
)
NCCL = (
    "# nThread 1 nGpus 2 all_reduce_perf\n#  Rank  0 Pid 1 on a device  0 [0x07] NVIDIA H100\n"
    "#  Rank  1 Pid 1 on a device  1 [0x0a] NVIDIA H100\n#  size count type redop root time algbw busbw #wrong\n"
    + "".join(f"  {1 << n}  {1 << n - 2}  float  sum  -1  {20 + n}.5  3.1  3.1  0\n" for n in range(10, 20))
)
TABLES = {
    "training": "framework,architecture,gpu,n_gpus,global_batch,seq_len,measured_step_s\n"
    "megatron,Qwen2.5-7B,h100_sxm,8,64,4096,9.5\nfsdp2,Qwen3-8B,a100_80g_sxm,8,32,2048,7\n",
    "memory": "framework,architecture,gpu,n_gpus,global_batch,seq_len,measured_peak_memory_gb\n"
    "fsdp2,Qwen2.5-7B,h100_sxm,8,64,4096,60\n",
    "inference": "architecture,gpu,engine,tensor_parallel,gemm_dtype,mode,isl,osl,concurrency,measured_tpot_ms\n"
    "Qwen2.5-7B,h100_sxm,vllm,1,bf16,static_batch,512,128,8,8.5\n",
    "rl_step": "framework,architecture,gpu,n_gpus,isl_mean,osl_mean,rollout_tensor_parallel,measured_step_s\n"
    "verl,Qwen2.5-7B,h100_sxm,8,256,1024,1,90\n",
    "weight_sync": "method,architecture,gpu,n_rollout_gpus,measured_s\nnccl,Qwen2.5-7B,h100_sxm,8,2.5\n",
    "kernels": KERNELS,
}
META = {
    "model": "meta-llama/Llama-3.1-8B", "vllm_version": "0.19.0", "hardware": {"device_name": "NVIDIA H100 SXM"},
    "engine_kwargs": {"tensor_parallel_size": 1, "max_num_seqs": 4, "max_num_batched_tokens": 2048},
    "kv_cache": {"num_kv_tokens": 40000, "block_size": 16},
}  # fmt: skip
REQUESTS = _lines(
    [
        {"request_id": f"r{i}", "input_toks": 50 + i, "output_toks": 9 + i, "arrival_time": 1000 + i / 10,
         "queued_ts": 7 + i / 10, "scheduled_ts": 7.1 + i / 10, "first_token_ts": 7.2 + i / 10,
         "last_token_ts": 8 + i / 10}
        for i in range(8)
    ]
)  # fmt: skip
VERL = """\
data: {train_batch_size: 64, max_prompt_length: 512, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-0.6B, use_remove_padding: true}
  actor:
    ppo_mini_batch_size: 64
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 16384
    fsdp_config: {param_offload: true, optimizer_offload: true}
  rollout: {name: vllm, n: 8, tensor_model_parallel_size: 1, gpu_memory_utilization: 0.6, max_model_len: 2048}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 8, nnodes: 1}
"""
VERL_SCRIPT = """\
#!/usr/bin/env bash
set -x
MODEL=${MODEL:-Qwen/Qwen3-0.6B}
N=$((4 * 2))
ARGS=(
    data.train_batch_size=64 data.max_prompt_length=512
    data.max_response_length=1024  # tokens
)
python3 -m verl.trainer.main_ppo "${ARGS[@]}" algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.rollout.n=$N actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 "$@"
"""
NEMO = """\
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 16}
policy:
  model_name: Qwen/Qwen3-0.6B
  train_global_batch_size: 512
  train_micro_batch_size: 1
  max_total_sequence_length: 8192
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1}
  generation: {max_new_tokens: 7168, vllm_cfg: {tensor_parallel_size: 2, gpu_memory_utilization: 0.6}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
SLIME = """\
python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /ckpt/Qwen3-0.6B \\
  --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 4096 --global-batch-size 256 \\
  --tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 10240 \\
  --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
"""
MILES = """\
python3 train_async.py --actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 4 \\
  --hf-checkpoint /ckpt/Qwen3-0.6B --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 4096 \\
  --global-batch-size 256 --use-dynamic-batch-size --max-tokens-per-gpu 10240 --rollout-num-gpus-per-engine 2 \\
  --advantage-estimator ppo --critic-num-nodes 1 --critic-num-gpus-per-node 2 --fully-async --max-weight-staleness 2 \\
  --update-weight-transfer-mode p2p --num-rollout 100
"""
OPENRLHF = """\
python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen3-0.6B --actor.num_nodes 1 \\
  --actor.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all \\
  --algo.advantage.estimator group_norm --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 \\
  --train.batch_size 512 --train.dynamic_batch_enable --train.max_tokens_per_gpu 12288 --data.max_len 5120 \\
  --rollout.max_new_tokens 4096 --ds.zero_stage 3
"""
AREAL = """\
experiment_name: e
trial_name: t
cluster: {n_nodes: 1, n_gpus_per_node: 8}
rollout: {backend: 'sglang:d2t2', max_head_offpolicyness: 2}
actor: {backend: 'fsdp:d4', path: Qwen/Qwen3-0.6B, mb_spec: {max_tokens_per_mb: 10240}, ppo_n_minibatches: 2}
train_dataset: {batch_size: 128, max_length: 1024, path: d, type: rl}
gconfig: {n_samples: 8, max_new_tokens: 4096}
"""
SKYRL = """\
: "${NUM_GPUS:=8}"
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base trainer.policy.model.path=Qwen/Qwen3-0.6B \\
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS generator.inference_engine.num_engines=$NUM_GPUS \\
  trainer.placement.ref_num_gpus_per_node=$NUM_GPUS trainer.train_batch_size=128 trainer.policy_mini_batch_size=64 \\
  generator.n_samples_per_prompt=8 trainer.max_prompt_length=1024 generator.max_turns=1 \\
  generator.sampling_params.max_generate_length=4096 trainer.max_tokens_per_microbatch=8192 \\
  generator.inference_engine.max_num_seqs=256 trainer.policy.sequence_parallel_size=2
"""
RLINF = """\
cluster: {num_nodes: 1, component_placement: {"actor,rollout,reward": 0-7}}
runner: {task_type: reasoning, seq_length: 5120, enable_dynamic_batch_size: true, max_tokens_per_mbs: 10240}
algorithm: {adv_type: grpo, group_size: 8, n_minibatches: 4, kl_beta: 0.0, recompute_logprobs: true,
  logprob_forward_micro_batch_size: 2,
  sampling_params: {max_new_tokens: "${subtract:${runner.seq_length}, ${data.max_prompt_length}}"}}
rollout: {return_logprobs: false, rollout_backend: sglang, tensor_parallel_size: 2, gpu_memory_utilization: 0.6,
  enforce_eager: false, max_running_requests: 128, model: {model_path: Qwen/Qwen3-0.6B}}
data: {rollout_batch_size: 128, max_prompt_length: 1024}
actor: {training_backend: megatron, offload_weight: true, offload_optimizer: true,
  model: {tensor_model_parallel_size: 2, sequence_parallel: true, recompute_granularity: full}}
"""
TRL = """\
model_name_or_path: Qwen/Qwen3-0.6B
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
num_generations: 8
max_completion_length: 4096
use_vllm: true
vllm_mode: colocate
vllm_tensor_parallel_size: 2
vllm_gpu_memory_utilization: 0.35
bf16: true
"""


def event_file() -> bytes:
    """A TensorBoard event file with two scalars a step."""

    def field(number: int, kind: int, payload: bytes) -> bytes:
        return bytes([number << 3 | kind]) + (bytes([len(payload)]) if kind == 2 else b"") + payload

    records = b""
    for step in (1, 2):
        values = b"".join(
            field(1, 2, field(1, 2, tag) + field(2, 5, struct.pack("<f", seconds)))
            for tag, seconds in ((b"timing_s/gen", 32.5), (b"timing_s/step", 57.0))
        )
        event = field(2, 0, bytes([step])) + field(5, 2, values)
        records += struct.pack("<Q", len(event)) + b"\0" * 4 + event + b"\0" * 4
    return records


def archive() -> bytes:
    """A gzipped tar of a recording."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as made:
        for name, content in (("a/packed_lengths_step_0.jsonl", PACKED), ("a/tools.log", TOOLS)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def parquet() -> bytes:
    """A recording as a Parquet table."""
    import polars as pl

    stream = io.BytesIO()
    pl.read_csv(io.BytesIO(LENGTHS.encode())).write_parquet(stream)
    return stream.getvalue()


@cache
def planned() -> bytes:
    """plan.yaml of the small job."""
    from rlperf.api import plan_job
    from rlperf.report.plan_files import plan_yaml

    with TemporaryDirectory() as name:
        file = Path(name) / "job.yaml"
        file.write_text(JOB)
        return plan_yaml(plan_job(file)).encode()


@cache
def swept() -> Files:
    """The folder of a sweep that has run."""
    from rlperf.api import sweep_job

    with TemporaryDirectory() as name:
        file = Path(name) / "sweep.yaml"
        file.write_text(SWEEP)
        sweep_job(file, Path(name) / "out", workers=1)
        names = ("results.parquet", "sweep.json")
        return {f"out/{each}": (Path(name) / "out" / each).read_bytes() for each in names}


def profile(kind: str, name: str) -> bytes:
    """A shipped profile."""
    return (profile_root() / kind / f"{name}.yaml").read_bytes()


def length_model() -> bytes:
    """A shipped length model."""
    from rlperf.workload.library import dump_model, load_model

    return dump_model(load_model("tool_use")).encode()


def text(content: str) -> Callable[[], bytes]:
    """A seed that stands here."""
    return lambda: content.encode()


def gzipped() -> bytes:
    """A recording, compressed."""
    return gzip.compress(PACKED)
