"""What is read of configurations: mandatory and legacy keys, numbers, filtered groups, turns, shell programs."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlperf
from rlperf.errors import SpecError, nearest
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.audit.findings import engine_findings, key_findings
from rlperf.frameworks.audit.repairs import broken_rules
from rlperf.frameworks.export import export_run, write_file
from rlperf.frameworks.imports import Imported, describe, import_config, job_of, job_text, keys_text
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.openrlhf import _placement
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.run_of import from_job
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import resolve
from rlperf.specs.job import Job
from rlperf.specs.profiles import load_architecture
from tests.nested import nest

from .framework_samples import with_values

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
VERL: dict[str, Any] = {
    "data.train_batch_size": 128, "data.max_prompt_length": 1024, "data.max_response_length": 4096,
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B", A + "ppo_mini_batch_size": 64, A + "use_dynamic_bsz": True,
    A + "ppo_max_token_len_per_gpu": 12288, R + "name": "vllm", R + "n": 8, R + "tensor_model_parallel_size": 2,
    R + "gpu_memory_utilization": 0.6, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8,
    "algorithm.adv_estimator": "grpo",
}  # fmt: skip


def _read(folder: Path, framework: str | None = "verl", /, **changes: Any) -> Imported:
    """verl's keys with ``changes`` (names with __ for a dot; None takes a key away)."""
    keys = {**VERL, **{name.replace("__", "."): value for name, value in changes.items()}}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(nest((key, value) for key, value in keys.items() if value is not None)))
    return import_config([file], framework)


def test_a_default_that_prints_whole_does_not_make_its_key_whole(tmp_path: Path) -> None:
    """top_p is 1 by default and 0.95 in 59 scripts; a count is still refused where it is used."""
    read = _read(tmp_path, "verl==0.9", actor_rollout_ref__rollout__top_p=0.95)
    assert read.illegal == ()
    with pytest.raises(SpecError, match=r"2\.5 is no batch\.group_size"):
        job_of(_read(tmp_path, "verl==0.9", actor_rollout_ref__rollout__n=2.5))


@pytest.mark.parametrize(("framework", "known"), [("verl==0.9", False), ("verl==0.5", True)])
def test_a_mandatory_key_that_nobody_states_is_an_error_that_says_so(
    framework: str, known: bool, tmp_path: Path
) -> None:
    read = _read(tmp_path, framework, actor_rollout_ref__rollout__name=None)
    found = {finding.rule: finding for finding in audit(read, plan=False, predict=False).findings}
    assert ("mandatory_key" in found) != known
    if known:
        assert job_of(read).engine == "vllm"
    else:
        assert (found["mandatory_key"].key, found["mandatory_key"].severity) == (R + "name", "error")
        with pytest.raises(SpecError, match=r"rollout\.name is mandatory and not stated"):
            job_of(read)


def test_a_file_without_a_mandatory_key_is_read_for_the_release_that_has_a_default_for_it(tmp_path: Path) -> None:
    """DAPO's published recipe names no engine: it ran where vllm was the default, and nowhere else."""
    read = _read(tmp_path, None, actor_rollout_ref__rollout__name=None)
    assert read.target.version == "0.5"
    found = {finding.rule: finding for finding in audit(read, plan=False, predict=False).findings}
    assert "mandatory_key" not in found
    assert found["newer_wants_it"].advice == f"set {R}name: vllm"
    named = audit(_read(tmp_path, "verl==0.5"), plan=False, predict=False).findings
    assert "newer_wants_it" not in {finding.rule for finding in named}


@pytest.mark.slow
def test_microbatches_over_all_gpus_count(tmp_path: Path) -> None:
    """64 samples over 8 GPUs with Ulysses 2 are 64 / 4 = 16 a forward, not one."""
    old = {"actor_rollout_ref__actor__use_dynamic_bsz": False, "actor_rollout_ref__actor__ppo_micro_batch_size": 64}
    read = _read(tmp_path, "verl==0.5", **old, actor_rollout_ref__actor__ulysses_sequence_parallel_size=2)
    assert read.run.trainer.microbatch == 16
    assert _read(tmp_path, "verl==0.5", **old).run.trainer.microbatch == 8
    old["actor_rollout_ref__actor__ppo_micro_batch_size"] = 512
    found = audit(_read(tmp_path, "verl==0.5", **old), cluster="dgx_h100", plan=False)
    assert "out_of_memory" in {finding.rule for finding in found.findings}


DAPO = {"algorithm__filter_groups__enable": True, "data__gen_batch_size": 384}


def test_groups_that_filtering_drops_are_rolled_out(tmp_path: Path) -> None:
    """DAPO generates whole batches of gen_batch_size prompts for train_batch_size: three times the rollout."""
    read = _read(tmp_path, "verl==0.5", **DAPO)
    assert read.unknown == ()
    job = job_of(read)
    assert (job.algorithm, job.tasks[0].generated_prompts, job.tasks[0].generation_batch) == ("dapo", 384, 384)
    plain = job_of(_read(tmp_path, "verl==0.5"))
    rollout = [rlperf.predict_job(each).stages_s.rollout for each in (job, plain)]
    assert rollout[0] > 1.5 * rollout[1]


def test_prompts_that_are_drawn_one_by_one_are_no_generation_batch(tmp_path: Path) -> None:
    """verl's V1 trainer (0.9) sets gen_batch_size to 1: how many prompts it rolls out is what its filter asks for."""
    read = _read(tmp_path, "verl==0.9", **DAPO)
    task = job_of(read).tasks[0]
    assert (task.generated_prompts, task.generation_batch) == (None, None)
    found = {each.key: each for each in audit(read, plan=False, gains=False).findings}
    assert "one by one" in found["data.gen_batch_size"].message
    single = audit(_read(tmp_path, "verl==0.9", **DAPO | {"data__gen_batch_size": 1}), plan=False, gains=False)
    assert "data.gen_batch_size" not in {each.key for each in single.findings}


@pytest.mark.slow
def test_generation_batches_follow_one_another(tmp_path: Path) -> None:
    """768 prompts at once end with their longest response, in two batches of 384 with that of each."""
    job = job_of(_read(tmp_path, "verl==0.5", **DAPO))

    def asked(**changes: int) -> Job:
        task = job.tasks[0].model_copy(update={"generated_prompts": 768, "generation_batch": None, **changes})
        return job.model_copy(update={"tasks": (task,)})

    at_once, in_turn, one = (
        resolve(asked(**changes))
        for changes in ({}, {"generation_batch": 384}, {"generated_prompts": 384, "generation_batch": 384})
    )
    assert [each.tasks[0].batches[0].rounds for each in (at_once, in_turn, one)] == [1, 2, 1]
    seconds = [evaluate_job(each)[0].seconds.rollout_s.mean() for each in (at_once, in_turn, one)]
    assert seconds[1] > seconds[0]
    assert seconds[1] == pytest.approx(2 * seconds[2], rel=0.05)
    # 500 prompts are wanted: two whole batches are rolled out
    assert resolve(asked(generated_prompts=500, generation_batch=384)).tasks[0].batches[0].generated == 768


def test_filtered_groups_are_exported_and_kept(tmp_path: Path) -> None:
    job = job_of(_read(tmp_path, "verl==0.5", **DAPO, reward_model__reward_manager="dapo"))
    for framework, key, value in (
        ("slime", "over-sampling-batch-size", 384),
        ("nemo_rl", "grpo.batch_multiplier", 3.0),
    ):
        version = key_table(framework).versions[-1]
        run = with_values(from_job(job, 8), {"trainer.backend": "megatron", "trainer.zero_stage": 1})
        found = {s.key: s.value for s in export_run(run, adapter_of(framework), version, "c").emission.settings}
        assert found[key] == value


def test_keys_of_the_recipe_survive_a_round_trip(tmp_path: Path) -> None:
    overlong = {f"reward_model__overlong_buffer__{name}": value
                for name, value in (("enable", True), ("len", 1024), ("penalty_factor", 1.0))}  # fmt: skip
    read = _read(tmp_path, "verl==0.5", **DAPO, **overlong)
    job = tmp_path / "job.yaml"
    job.write_text(job_text(job_of(read)))
    job.with_suffix(".keys.yaml").write_text(keys_text(read))
    files = write_file(job, None, tmp_path / "out")
    again = import_config([next(path for path in files if path.suffix == ".yaml")], "verl==0.5")
    assert dict(again.source.keys) == dict(read.source.keys)


@pytest.mark.parametrize(
    ("framework", "key"),
    [("verl==0.9", R + "multi_turn.enable"), ("nemo_rl", "grpo.max_rollout_turns"),
     ("openrlhf", "train.agent_func_path"), ("slime", "custom-generate-function-path"), ("areal", ""), ("trl", "")],
)  # fmt: skip
def test_turns_with_tools_are_no_single_turn(framework: str, key: str) -> None:
    engine = "sglang" if framework == "slime" else "vllm"
    backend = {"openrlhf": "deepspeed", "slime": "megatron", "trl": "deepspeed"}.get(framework, "fsdp2")
    task = {"name": "t", "workload": "tool_use", "prompts_per_step": 128, "group_size": 8, "max_response_tokens": 8192}
    pools = [{"role": "rollout", "devices": 8, "layout": {"tensor_parallel": 1}},
             {"role": "trainer", "devices": 8, "settings": {"packing": framework != "trl"},
              "layout": {"microbatch": 1, "zero_stage": 1 if backend == "megatron" else 3}}]  # fmt: skip
    job = Job.model_validate({"architecture": "Qwen3-4B", "cluster": "dgx_h100", "nodes": 1, "tasks": [task],
                              "framework": framework, "engine": engine, "trainer_backends": backend,
                              "pools": pools})  # fmt: skip
    name, _, version = framework.partition("==")
    emission = export_run(from_job(job, 8), adapter_of(name), key_table(name).version(version), "c").emission
    if key:
        assert key in {setting.key for setting in emission.settings}
    else:
        assert any("turns with tools" in lost.asked for lost in emission.limitations)
    of = {setting.key: setting.value for setting in emission.settings}
    # verl cuts a tool's answer to 256 characters where nothing is said: contexts would be a fraction of the plan's
    assert of.get(R + "multi_turn.max_tool_response_length") == (4 * 8192 if name == "verl" else None)


def test_tools_may_answer_as_much_as_a_response_holds_from_the_release_on_that_asks() -> None:
    def stated(version: str) -> set[str]:
        task = {
            "name": "t",
            "workload": "tool_use",
            "prompts_per_step": 32,
            "group_size": 8,
            "max_response_tokens": 8192,
        }
        trainer = {"role": "trainer", "devices": 8, "settings": {"packing": True}, "layout": {"zero_stage": 3}}
        pools = [{"role": "rollout", "devices": 8, "layout": {"tensor_parallel": 1}}, trainer]
        job = Job.model_validate({"architecture": "Qwen3-4B", "cluster": "dgx_h100", "nodes": 1, "tasks": [task],
                                  "framework": f"verl=={version}", "engine": "vllm", "trainer_backends": "fsdp2",
                                  "pools": pools})  # fmt: skip
        adapter, table = adapter_of("verl"), key_table("verl").version(version)
        return {setting.key for setting in export_run(from_job(job, 8), adapter, table, "c").emission.settings}

    key = R + "multi_turn.max_tool_response_length"
    assert [key in stated(version) for version in ("0.4", "0.5", "0.9")] == [False, True, True]


@pytest.mark.parametrize(("cut", "said"), [(None, "256 characters, some 64 tokens"), (10**6, ""), (4000, "4,000")])
def test_tools_whose_answers_verl_cuts_are_told_of(tmp_path: Path, cut: int | None, said: str) -> None:
    """A file that is not rlperf's leaves it to 256 characters, and was predicted with whole answers, without a word."""
    key = R + "multi_turn.max_tool_response_length"
    keys = {
        "actor_rollout_ref.model.path": "Qwen/Qwen3-4B", R + "name": "vllm", R + "multi_turn.enable": True,
        "data.train_batch_size": 32, "data.max_response_length": 8192, **({} if cut is None else {key: cut}),
    }  # fmt: skip
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo " + " ".join(f"{name}={value}" for name, value in keys.items())
    )
    found = rlperf.audit_config(tmp_path / "run.sh", cluster="dgx_h100", workload="tool_use", plan=False)
    told = [each.message for each in found.findings if each.key == key]
    assert [said in each for each in told] == [True] * bool(said)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_reward_model_that_a_trainer_of_its_own_runs_is_told_of(tmp_path: Path, enabled: bool) -> None:
    """verl's PPO examples up to 0.6 score with an 8B beside policy and critic; it was neither counted nor named."""
    flags = f"actor_rollout_ref.model.path=Qwen/Qwen2.5-7B data.train_batch_size=64 reward_model.enable={enabled}"
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae {flags}\n")
    found = audit(import_config([tmp_path / "run.sh"], "verl==0.6"), plan=False, predict=False).findings
    assert [each.rule for each in found if each.key == "reward_model.enable"] == ["uncounted"] * enabled


def test_a_model_that_sees_is_run_by_the_vision_program_of_nemo_rl() -> None:
    task = {"name": "t", "workload": "image", "prompts_per_step": 128, "group_size": 8, "max_response_tokens": 2048}
    pools = [{"role": role, "devices": 8} for role in ("rollout", "trainer")]
    pools[1]["layout"] = {"zero_stage": 3}
    job = Job.model_validate({"architecture": "Qwen2.5-VL-7B", "cluster": "dgx_h100", "nodes": 1, "tasks": [task],
                              "framework": "nemo_rl", "trainer_backends": "fsdp2", "pools": pools})  # fmt: skip
    phase = export_run(from_job(job, 8), adapter_of("nemo_rl"), "main", "c")
    written = {setting.key: setting.value for setting in phase.emission.settings}
    assert written["data.default.processor"] == "vlm_hf_data_processor"
    assert "run_vlm_grpo.py" in phase.files["c.sh"]
    assert written["policy.model_name"] == "Qwen/Qwen2.5-VL-7B-Instruct"


# -- shell programs ---------------------------------------------------------------------------------------------------

LAUNCH = """
case "$1" in
  7b|8b) MODEL=Qwen/Qwen3-8B; TP=2 ;;
  "32b") MODEL=Qwen/Qwen3-32B
    TP=8;;
  *) echo "usage: $0 7b|32b"; exit 1 ;;
esac
if [ -z "${NODES:-}" ]; then NODES=1; fi
if [[ "$NODES" -gt 1 && $TP -ge 8 ]]; then
  EXTRA=(actor_rollout_ref.rollout.n=16)
elif [ "$TP" = 2 ]; then
  EXTRA=(actor_rollout_ref.rollout.n=8)
else
  EXTRA=(actor_rollout_ref.rollout.n=4)
fi
launch() {
  local name=$1; shift
  python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL trainer.nnodes=$NODES \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$TP actor_rollout_ref.rollout.name=$name "${EXTRA[@]}"
}
unused() { python3 -m verl.trainer.main_ppo a.b=1 c.d=2 e.f=3 g.h=4 i.j=5 k.l=6 m.n=7; }
for engine in vllm sglang; do
  launch $engine
done
"""


@pytest.mark.parametrize(
    ("given", "model", "samples"),
    [(["1=7b"], "Qwen/Qwen3-8B", 8), (["1=32b"], "Qwen/Qwen3-32B", 4), (["1=32b", "NODES=2"], "Qwen/Qwen3-32B", 16)],
)
def test_branches_of_a_script_are_taken_by_the_values_given(
    given: list[str], model: str, samples: int, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(LAUNCH)
    keys = import_config([tmp_path / "run.sh", *given], "verl==0.9").source.keys
    assert (keys["actor_rollout_ref.model.path"], keys[R + "n"], keys[R + "name"]) == (model, samples, "vllm")
    assert keys["trainer.nnodes"] == (2 if "NODES=2" in given else 1)


def test_branches_that_nobody_decides_are_listed(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(LAUNCH)
    with pytest.raises(SpecError, match=r"line 2: case \$1 has the branches 7b\|8b, 32b"):
        import_config([tmp_path / "run.sh"], "verl==0.9")
    undecided = "if grep -q big /proc/cpuinfo; then TP=8; else TP=2; fi\n"
    launch = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8"
    (tmp_path / "run.sh").write_text(f"{undecided}{launch} {R}tensor_model_parallel_size=$TP\n")
    with pytest.raises(SpecError, match="line 1: if grep -q big"):
        import_config([tmp_path / "run.sh"], "verl==0.9")
    (tmp_path / "run.sh").write_text(f"{undecided}{launch}\n")  # what does not hang on it is read
    assert import_config([tmp_path / "run.sh"], "verl==0.9").source.keys[R + "n"] == 8


SLIME = """NVLINKS=$(nvidia-smi topo -m | grep -c NV)
if [ "$NVLINKS" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi
ENVIRONMENT="{\\"env_vars\\": {\\"NCCL_NVLS_ENABLE\\": \\"${HAS_NVLINK}\\"}}"
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${ENVIRONMENT}" -- python3 train.py \\
  --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /ckpt/Qwen3-8B --rollout-batch-size 32 \\
  --n-samples-per-prompt 8 --num-rollout 9 --rollout-max-response-len 4096 --global-batch-size 256 \\
"""


def test_what_only_the_environment_of_a_ray_job_hangs_on_is_not_asked(tmp_path: Path) -> None:
    """slime's own scripts ask the node for its links, and tell NCCL of them."""
    script = tmp_path / "run.sh"
    script.write_text(SLIME + "  --rollout-num-gpus-per-engine 2\n")
    assert import_config([script], "slime").run.rollout.tensor_parallel == 2
    script.write_text(SLIME + "  --rollout-num-gpus-per-engine $((HAS_NVLINK + 1))\n")
    with pytest.raises(SpecError, match=r"line 2: if .* -gt 0"):
        import_config([script], "slime")
    # what a program would have said is taken from the command line
    assert import_config([script, "NVLINKS=4"], "slime").run.rollout.tensor_parallel == 2


def test_a_configuration_that_is_not_here_is_told_of_unless_it_is_named_too(tmp_path: Path) -> None:
    """Its values are not the defaults: an audit of the script alone speaks of another run."""
    script, folder = tmp_path / "run.sh", tmp_path / "config"
    keys = " ".join(f"{key}={str(value).lower()}" for key, value in VERL.items())
    command = f"python3 -m verl.trainer.main_ppo --config-path=config --config-name={{}} {keys}"
    script.write_text(command.format("ppo_trainer"))
    assert import_config([script], "verl").absent_bases == ()
    script.write_text(command.format("gsm8k_multiturn_grpo"))
    read = import_config([script], "verl")
    told = {one.rule: one for one in audit(read, plan=False, predict=False).findings}["absent_base"]
    assert (told.severity, told.key, read.run.batch.turns) == ("warning", "gsm8k_multiturn_grpo", 1)
    folder.mkdir()
    turns = {"actor_rollout_ref": {"rollout": {"multi_turn": {"enable": True, "max_assistant_turns": 5}}}}
    (folder / "gsm8k_multiturn_grpo.yaml").write_text(yaml.safe_dump(turns))
    read = import_config([script], "verl")  # the folder that the command names
    assert (read.absent_bases, read.run.batch.turns) == ((), 5)
    elsewhere = tmp_path / "given" / "gsm8k_multiturn_grpo.yaml"
    elsewhere.parent.mkdir()
    (folder / "gsm8k_multiturn_grpo.yaml").rename(elsewhere)
    read = import_config([elsewhere, script], "verl")
    assert (read.absent_bases, read.run.batch.turns) == ((), 5)


def test_a_server_that_the_same_script_starts_has_the_degrees_it_is_told(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    trainer = ("srun --nodes=4 accelerate launch --num_processes 32 train.py --model_name_or_path Qwen/Qwen2.5-72B "
               "--use_vllm true --vllm_mode server --num_generations 8 --max_completion_length 4096")  # fmt: skip
    server = "srun --nodes=1 trl vllm-serve --model Qwen/Qwen2.5-72B --tensor-parallel-size 8"
    for text in (f"{trainer} &\n{server} &\nwait\n", f"{server} &\n{trainer}\n"):
        script.write_text(text)
        run = import_config([script], "trl").run
        assert (run.devices, run.rollout.devices, run.rollout.tensor_parallel) == (40, 8, 8)
    script.write_text(f"{trainer}\n")
    assert "33 GPUs (1 assumed for the server" in describe(import_config([script], "trl"))


@pytest.mark.parametrize(
    ("launch", "nodes", "per_node"),
    [
        ("accelerate launch --num_machines 8 --num_processes 32", 8, 4),  # GB200: a node is a tray of four
        ("accelerate launch --num_processes 32", 4, 8),
        ("torchrun --nnodes 4 --nproc_per_node 8", 4, 8),  # 8 of 32 GPUs were read
        ("torchrun --nnodes=1:4 --nproc-per-node=4", 1, 4),  # elastic: nobody knows
    ],
)
def test_nodes_are_those_that_the_launcher_of_trl_counts(
    launch: str, nodes: int, per_node: int, tmp_path: Path
) -> None:
    """An exported plan for eight trays came back as four nodes of eight, which no tray has."""
    script = tmp_path / "job.sh"
    keys = "train.py --model_name_or_path Qwen/Qwen3-8B --use_vllm true --num_generations 8"
    script.write_text(f"{launch} {keys} --vllm_mode colocate\n")
    run = import_config([script], "trl").run
    assert (run.nodes, run.devices_per_node, run.devices) == (nodes, per_node, nodes * per_node)
    script.write_text(f"{launch} {keys} --vllm_mode server\ntrl vllm-serve --tensor-parallel-size 4\n")
    served = import_config([script], "trl").run
    assert served.devices == nodes * per_node + 4
    assert served.nodes * served.devices_per_node >= served.devices


def test_what_a_framework_never_tells_of_keeps_no_users_file_from_being_written(tmp_path: Path) -> None:
    """OpenRLHF's own script has a budget below its longest sequence: no plan has, and the file is the user's."""
    flags = ("--actor.model_name_or_path Qwen/Qwen3-4B --actor.num_nodes 1 --actor.num_gpus_per_node 8 "
             "--vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all --train.batch_size 1024 "
             "--train.dynamic_batch_enable --train.max_tokens_per_gpu 16192 --rollout.max_tokens_per_gpu 16192 "
             "--rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --data.max_len 74240 "
             "--rollout.max_new_tokens 64000 --ds.packing_samples --vllm.enable_sleep --ds.enable_sleep")  # fmt: skip
    script, job = tmp_path / "run.sh", tmp_path / "job.yaml"
    script.write_text(f"python3 -m openrlhf.cli.train_ppo_ray {flags}\n")
    read = import_config([script])
    found = {finding.key: finding.severity for finding in audit(read, plan=False, predict=False).findings}
    assert found["train.max_tokens_per_gpu"] == "warning"
    job.write_text(job_text(job_of(read)))
    (tmp_path / "job.keys.yaml").write_text(keys_text(read))
    files = rlperf.export_plan(job, tmp_path / "out")
    assert any("--train.max_tokens_per_gpu 16192" in one.read_text() for one in files)


@pytest.mark.parametrize("mark", [":", "."])  # AReaL-lite's examples of 0.3 have a dot behind the engine
@pytest.mark.parametrize(("trainer", "backend", "stages"), [("d4p1t1", "fsdp2", 1), ("d2p2t1", "megatron", 2)])
def test_an_allocation_without_a_trainer_is_read_as_older_releases_read_it(
    trainer: str, backend: str, stages: int, mark: str, tmp_path: Path
) -> None:
    file = tmp_path / "areal.yaml"
    file.write_text(
        f"allocation_mode: sglang{mark}d4p1t1+{trainer}\ncluster: {{n_nodes: 1, n_gpus_per_node: 8}}\n"
        "actor: {path: Qwen/Qwen2.5-1.5B}\ngconfig: {n_samples: 4, max_new_tokens: 1024}\n"
        "rollout: {max_head_offpolicyness: 2}\ntrain_dataset: {batch_size: 256}\n"
    )
    read = import_config([file])
    pool = read.run.trainer
    assert (pool.backend, pool.data_parallel, pool.pipeline_parallel) == (backend, 4 // stages, stages)
    assert (read.run.rollout.backend, read.run.rollout.devices) == ("sglang", 4)
    assert "deprecated_allocation" in {one.rule for one in audit(read, plan=False, predict=False).findings}


@pytest.mark.parametrize(
    ("base", "stated", "backend"),
    [
        ("grpo_math_8B_megatron", "", "megatron"),
        ("grpo_math_8B_megatron", "policy.dtensor_cfg.enabled=true", "fsdp2"),
        ("grpo_math_8B_megatron", "policy.megatron_cfg.enabled=false policy.dtensor_cfg.enabled=true", "fsdp2"),
        ("grpo_math_8B", "policy.megatron_cfg.enabled=true", "megatron"),
        ("grpo_math_8B", "", "fsdp2"),
    ],
)
def test_a_base_that_is_named_for_megatron_has_its_trainer(
    base: str, stated: str, backend: str, tmp_path: Path
) -> None:
    """NeMo-RL's ``*_megatron.yaml`` that is not here was read as FSDP, its tensor parallel passed over."""
    script = tmp_path / "run.sh"
    keys = f"policy.model_name=Qwen/Qwen3-8B policy.megatron_cfg.tensor_model_parallel_size=4 {stated}"
    script.write_text(f"uv run examples/run_grpo_math.py --config examples/configs/{base}.yaml {keys}\n")
    read = import_config([script])
    trainer = read.run.trainer
    assert (trainer.backend, trainer.tensor_parallel) == (backend, 4 if backend == "megatron" else 1)
    assert "one_backend" not in {each.rule for each in audit(read, plan=False, predict=False).findings}


def test_a_trainer_without_degrees_has_those_of_the_allocation(tmp_path: Path) -> None:
    """``actor.backend: fsdp`` beside ``allocation_mode``, as AReaL-lite's examples have it, was "not an allocation"."""
    file = tmp_path / "areal.yaml"
    file.write_text(
        "allocation_mode: sglang:d4p1t2+fsdp:d4c2\ncluster: {n_nodes: 2, n_gpus_per_node: 8}\n"
        "actor: {path: Qwen/Qwen2.5-7B, backend: fsdp}\ngconfig: {n_samples: 4}\ntrain_dataset: {batch_size: 256}\n"
    )
    pool = import_config([file]).run.trainer
    assert (pool.backend, pool.data_parallel, pool.sequence_split, pool.devices) == ("fsdp2", 4, 2, 8)
    file.write_text(file.read_text().replace("allocation_mode", "# allocation_mode"))
    with pytest.raises(SpecError, match="'fsdp' is not an allocation"):
        import_config([file])


def test_uneven_stages_raise_no_alarm_where_the_framework_takes_them(tmp_path: Path) -> None:
    """61 layers: slime and verl take the last stage's layers alone; AReaL spreads what is left over by itself."""
    flags = ("--actor-num-nodes 16 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /ckpt/DeepSeek-V3 "
             "--rollout-batch-size 128 --n-samples-per-prompt 8 --global-batch-size 1024 --num-rollout 9 "
             "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --rollout-max-response-len 4096 "
             "--decoder-last-pipeline-num-layers 13 --use-dynamic-batch-size --max-tokens-per-gpu 8192 "
             "--rollout-num-gpus-per-engine 64")  # fmt: skip
    (tmp_path / "run.sh").write_text(f"python3 train.py {flags}\n")
    read = import_config([tmp_path / "run.sh"], "slime")
    assert (read.run.trainer.first_stage_layers, read.run.trainer.last_stage_layers) == (None, 13)
    assert "megatron_layers" not in {f.rule for f in audit(read, plan=False, predict=False).findings}
    rules = {rule.id: rule for rule in framework_facts("areal").rules}
    deep = with_values(read.run, {"trainer.virtual_pipeline": 1}).names(load_architecture("DeepSeek-V3"))
    assert rules["megatron_layers"].holds(deep) == True  # noqa: E712


def test_a_config_group_on_a_line_of_its_own_is_no_variable(tmp_path: Path) -> None:
    (tmp_path / "o.txt").write_text("model_engine=megatron\nactor_rollout_ref.rollout.name=vllm\n")
    assert import_config([tmp_path / "o.txt"], "verl==0.9").run.trainer.backend == "megatron"


def test_nested_dicts_of_trl_are_its_keys(tmp_path: Path) -> None:
    text = "num_generations: 8\nper_device_train_batch_size: 8\nuse_vllm: true\nmodel_init_kwargs: {dtype: bfloat16}\n"
    (tmp_path / "c.yaml").write_text(text + "gradient_checkpointing_kwargs:\n  use_reentrant: false\n")
    assert import_config([tmp_path / "c.yaml"], "trl").unknown == ()


@pytest.mark.parametrize("number", [0, 1, 4])
def test_engines_that_read_prompts_for_the_others_are_counted(tmp_path: Path, number: int) -> None:
    flags = (
        "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2 --hf-checkpoint "
        "Qwen/Qwen3-8B --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 "
        f"--rollout-max-response-len 4096 --rollout-max-prompt-len 1024 --prefill-num-servers {number}"
    )
    file = tmp_path / "run.sh"
    file.write_text(f"python3 train.py {flags}\n")
    read = import_config([file], "slime")
    assert read.run.rollout.prefill_replicas == number
    found = [each.rule for each in engine_findings(read, None)]
    assert ("readers" in found) == (number == 4)  # of four engines none is left to write


def test_verl_says_by_a_switch_that_an_engine_of_each_group_reads_prompts(tmp_path: Path) -> None:
    for on in (False, True):
        read = _read(
            tmp_path, "verl==0.9", actor_rollout_ref__rollout__disaggregation__enabled=on, trainer__n_gpus_per_node=8,
            actor_rollout_ref__rollout__disaggregation__decode_replicas=3, trainer__nnodes=2,
            actor_rollout_ref__rollout__tensor_model_parallel_size=2,
        )  # fmt: skip
        assert read.run.rollout.prefill_replicas == (2 if on else 0)


@pytest.mark.parametrize(("writers", "whole"), [(3, True), (2, False)])
def test_engines_of_verl_that_are_no_whole_groups_are_refused(tmp_path: Path, writers: int, whole: bool) -> None:
    """Eight engines in groups of four, and of three: how many groups there are is no longer told by then."""
    read = _read(
        tmp_path, "verl==0.9", trainer__n_gpus_per_node=8, trainer__nnodes=2, **{
            f"actor_rollout_ref__rollout__{name}": value for name, value in {
                "name": "sglang", "tensor_model_parallel_size": 2, "disaggregation__enabled": True,
                "disaggregation__decode_replicas": writers, "disaggregation__prefill_replicas": 2,
                "disaggregation__decode_tensor_model_parallel_size": 4,
            }.items()
        }
    )  # fmt: skip
    findings = audit(read, plan=False, predict=False).findings
    assert ("prefill_whole" not in {each.rule for each in findings}) == whole
    unread = {each.key.rpartition(".")[2] for each in findings if each.rule == "uncounted"}
    assert unread >= {"prefill_replicas", "decode_tensor_model_parallel_size"}


def test_what_a_key_may_have_meant_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit reads a file again for every change that it tries: a file with five such keys took 20 s."""
    asked = []
    close = difflib.get_close_matches
    monkeypatch.setattr("difflib.get_close_matches", lambda *words, **how: asked.append(words) or close(*words, **how))
    names = [f"trainer.key_{number}" for number in range(50)]
    assert {nearest("trainer.key_8x", names) for _ in range(3)} == {"trainer.key_8"}
    assert len(asked) == 1


def test_a_base_of_nemo_rl_that_is_not_here_is_said_and_leaves_one_trainer(tmp_path: Path) -> None:
    """Recipes for Megatron name parents that switch DTensor off: both were on, "exactly one must be true"."""
    found = {}
    for parent in ("grpo_math_1B", "grpo_math_8B_megatron"):
        file = tmp_path / "run.yaml"
        file.write_text(f"defaults: ../../{parent}.yaml\npolicy: {{megatron_cfg: {{enabled: true}}}}\n")
        read = audit(import_config([file], "nemo_rl"), predict=False)
        found[parent] = {each.key for each in read.findings}
    assert "policy.megatron_cfg.enabled" in found["grpo_math_1B"] and "defaults" not in found["grpo_math_1B"]
    assert "policy.megatron_cfg.enabled" not in found["grpo_math_8B_megatron"]
    assert "defaults" in found["grpo_math_8B_megatron"]


def test_roles_of_areal_are_those_whose_section_a_file_has(tmp_path: Path) -> None:
    """Its KL coefficient is 0.1 by default: a reference that nobody loads was told. A teacher on engines of its
    own was not told at all."""
    pools = {"actor.backend": "fsdp:d4", "rollout.backend": "sglang:d4", "actor.path": "Qwen/Qwen3-8B"}
    plain = {**pools, "train_dataset.batch_size": 64, "gconfig.n_samples": 8, "gconfig.max_new_tokens": 1024}
    file, references = tmp_path / "run.yaml", []
    for beside in ({}, {"ref.backend": "fsdp:d4"}, {"ref.backend": "fsdp:d4", "actor.kl_ctl": 0.0}):
        file.write_text(yaml.safe_dump(nest({**plain, **beside}.items())))
        references.append(import_config([file], "areal").run.reference)
    assert references == [False, True, False]
    for kind, refused in (("train", False), ("rollout", True), (None, True)):
        teacher = {"teacher.train.path": "Qwen/Qwen3-32B", "teacher.train.backend": "fsdp:d4"}
        teacher |= {"teacher.engine_type": kind} if kind else {}
        file.write_text(yaml.safe_dump(nest({**plain, **teacher}.items())))
        assert bool(import_config([file], "areal").run.wrong) == refused


def test_a_server_of_trl_that_nobody_launches_here_has_its_own_memory(tmp_path: Path) -> None:
    """vllm_gpu_memory_utilization acts in colocate mode alone: 0.3 was taken, and raising it was the advice."""
    file = tmp_path / "run.yaml"
    keys = {"model_name_or_path": "Qwen/Qwen3-8B", "num_generations": 8, "use_vllm": True}
    fractions = []
    for mode in ("server", "colocate"):
        file.write_text(yaml.safe_dump({**keys, "max_completion_length": 1024, "vllm_mode": mode}))
        fractions.append(import_config([file], "trl").run.rollout.memory_fraction)
    assert fractions == [0.9, 0.3]


@pytest.mark.parametrize(("nodes", "per_node", "stated"), [(1, 8, None), (1, 4, 4), (2, 4, 4), (2, 8, None)])
def test_a_file_on_part_of_a_node_is_held_against_plans_on_that_part(
    nodes: int, per_node: int, stated: int | None, tmp_path: Path
) -> None:
    """Four GPUs of eight were beaten by "the planner's best on the same hardware" of eight."""
    read = _read(tmp_path, trainer__n_gpus_per_node=per_node, trainer__nnodes=nodes)
    job = job_of(read, cluster="dgx_h100")
    assert (job.nodes, job.devices_per_node) == (nodes, stated)
    found = audit(read, cluster="dgx_h100", workload="math", gains=False, plan=per_node == 4 and nodes == 1)
    if found.best is not None:
        assert all(pool.devices == per_node for pool in found.best.phases[0].pools)
    assert (found.best is not None) == (per_node == 4 and nodes == 1)


@pytest.mark.parametrize(
    ("flags", "nodes", "size"),
    [
        ("--actor.num_nodes 1 --actor.num_gpus_per_node 4 --vllm.num_engines 4 --vllm.tensor_parallel_size 1", 1, 8),
        ("--actor.num_nodes 2 --actor.num_gpus_per_node 4 --vllm.num_engines 8 --vllm.tensor_parallel_size 1", 4, 4),
    ],
)
def test_a_role_on_part_of_a_node_does_not_say_how_large_it_is(
    tmp_path: Path, flags: str, nodes: int, size: int
) -> None:
    script = tmp_path / "run.sh"
    plain = "--actor.model_name_or_path Qwen/Qwen3-8B --algo.advantage.estimator group_norm"
    script.write_text(f"python3 -m openrlhf.cli.train_ppo_ray {plain} {flags}\n")
    run = import_config([script]).run
    assert (run.nodes, run.devices_per_node) == (nodes, size)


def test_a_critic_that_fills_no_whole_nodes_is_written_by_its_product(tmp_path: Path) -> None:
    """OpenRLHF packs single GPUs: the default critic's 8 beside an actor on 3 x 6 was refused by our own export."""
    script = tmp_path / "run.sh"
    sizes = "--actor.num_nodes 3 --actor.num_gpus_per_node 6 --ref.num_nodes 3 --ref.num_gpus_per_node 6"
    plain = "--actor.model_name_or_path Qwen/Qwen3-8B --vllm.num_engines 6 --algo.advantage.estimator gae"
    script.write_text(f"python3 -m openrlhf.cli.train_ppo_ray {plain} {sizes}\n")
    run = import_config([script]).run
    assert (run.critic_devices, run.devices_per_node) == (8, 6)
    stated = {each.key: each.value for each in _placement(run)}
    assert (stated["critic.num_nodes"], stated["critic.num_gpus_per_node"]) == (2, 4)
    assert (stated["actor.num_nodes"], stated["actor.num_gpus_per_node"]) == (3, 6)


def test_functions_of_a_script_pass_their_arguments_on(tmp_path: Path) -> None:
    """Settings behind ``"$@"``, ``shift`` or a part of an array were lost without a word."""
    script = tmp_path / "run.sh"
    script.write_text(
        'launch() { MODEL=$1; shift; python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL "${@:1}"; }\n'
        "ARGS=(skipped data.train_batch_size=256 actor_rollout_ref.rollout.n=8)\n"
        'launch Qwen/Qwen3-8B actor_rollout_ref.rollout.name=vllm "${ARGS[@]:1}"\n'
    )
    run = import_config([script]).run
    assert (run.batch.prompts_per_step, run.batch.group_size, run.rollout.backend) == (256, 8, "vllm")
    assert run.architecture == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("words", ["model_engine=veomni", "--config-name ppo_torchtitan_trainer"])
def test_trainers_of_verl_that_nobody_costed_are_no_fsdp(words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"python3 -m verl.trainer.main_ppo {words} data.train_batch_size=64 "
                    "actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.name=vllm\n")  # fmt: skip
    with pytest.raises(SpecError, match="rlperf knows FSDP and Megatron"):
        job_of(import_config([file], "verl"))


def test_keys_of_a_trainer_that_nobody_costed_are_told_once(tmp_path: Path) -> None:
    """verl has them (trainer/config/actor/veomni_actor.yaml of 0.9.1): they are not read, and not unknown to it."""
    file = tmp_path / "run.sh"
    own = "actor_rollout_ref.actor.veomni.fsdp_size=-1 actor_rollout_ref.ref.veomni.param_offload=true"
    file.write_text(f"python3 -m verl.trainer.main_ppo model_engine=veomni data.train_batch_size=64 {own} "
                    "no.such.key=1 actor_rollout_ref.model.path=Qwen/Qwen3-8B\n")  # fmt: skip
    imported = import_config([file], "verl")
    assert [each.key for each in imported.unknown] == ["no.such.key"] and len(imported.unread) == 2
    (told,) = (each for each in key_findings(imported) if each.rule == "other_trainer")
    assert told.severity == "hint" and told.message.startswith("veomni: a trainer that rlperf does not know")


@pytest.mark.parametrize(("offload", "resident"), [({}, True), ({"ref": True}, False), ({"actor": True}, False)])
def test_a_reference_on_the_gpus_is_told(offload: dict[str, bool], resident: bool, tmp_path: Path) -> None:
    """Megatron's, which does as the actor's unless its own key says otherwise; FSDP's always waits on the host."""
    stated = {f"actor_rollout_ref.{role}.megatron.param_offload": value for role, value in offload.items()}
    megatron = {"model_engine": "megatron", A + "strategy": "megatron", A + "use_kl_loss": True, **stated}
    assert ("reference_resident" in broken_rules(_read(tmp_path, **megatron))) == resident
    assert "reference_resident" not in broken_rules(_read(tmp_path, **{A + "use_kl_loss": True}))


def test_files_of_plans_take_the_reference_to_the_host(tmp_path: Path) -> None:
    """As is predicted; those whose trainer keeps its states left the reference on the GPUs, too."""
    read = _read(tmp_path, model_engine="megatron", **{A + "strategy": "megatron"}).run
    for parked in (True, False):
        run = with_values(read, {"trainer.parked": parked, "trainer.backend": "megatron", "run.reference": True})
        text = export_run(run, adapter_of("verl"), "main", "config").files["config.yaml"]
        assert yaml.safe_load(text)["actor_rollout_ref"]["ref"]["megatron"]["param_offload"] is True


def test_two_launches_are_no_one_configuration(tmp_path: Path) -> None:
    """`verdict a.sh b.sh` merged them, and judged the second one's model, batch and devices without a word."""
    first, second = tmp_path / "first.sh", tmp_path / "second.sh"
    keys = " ".join(f"{key}={str(value).lower()}" for key, value in VERL.items())
    first.write_text(f"python3 -m verl.trainer.main_ppo {keys}\n")
    second.write_text(f"python3 -m verl.trainer.main_ppo {keys} trainer.nnodes=4\n")
    with pytest.raises(SpecError, match=r"second.sh: is a second launch, after .*first.sh: each is a configuration"):
        import_config([first, second])
    overrides = tmp_path / "overrides"  # what is no launch still joins one, and a launch named twice is one
    overrides.write_text("trainer.nnodes=2\n")
    assert import_config([first, first, overrides]).run.nodes == 2
    for program, tokens in (("first.py", 256), ("second.py", 512)):
        (tmp_path / program).write_text(f"from trl import GRPOConfig\nGRPOConfig(max_completion_length={tokens})\n")
    with pytest.raises(SpecError, match=r"second.py: is a second program, after .*first.py"):
        import_config([tmp_path / "first.py", tmp_path / "second.py"], "trl")


COLOCATED = (
    "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /root/Qwen3-4B "
    "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 4096 --global-batch-size {} "
    "--tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 9216 "
    "--rollout-num-gpus-per-engine 2\n"
)


def test_what_fills_no_update_of_slime_is_rolled_out_and_not_trained_on(tmp_path: Path) -> None:
    """A batch that did not divide was not predicted: slime trains two updates of 96 samples and drops 64 of 256."""
    script, job_file = tmp_path / "run.sh", tmp_path / "job.yaml"
    script.write_text(COLOCATED.format(96))
    imported = import_config([script])
    assert (imported.run.batch.prompts, imported.run.batch.trained, imported.run.updates) == (32, 24, 2)
    job = job_of(imported)
    (batch,) = resolve(job).tasks[0].batches
    assert (batch.prompts, batch.mini_batch, batch.generated) == (24, 12, 32)
    (evaluation, _), whole = evaluate_job(resolve(job)), COLOCATED.format(128)
    script.write_text(whole)
    divides, _ = evaluate_job(resolve(job_of(import_config([script]))))
    waited = divides.seconds.rollout_s  # for all 32 groups
    assert evaluation.seconds.rollout_s == pytest.approx(waited, rel=1e-9)
    assert evaluation.demand.trained_tokens == pytest.approx(0.75 * divides.demand.trained_tokens, rel=0.15)
    job_file.write_text(job_text(job))
    job_file.with_suffix(".keys.yaml").write_text(keys_text(imported))
    write_file(job_file, "slime", tmp_path / "out")
    written = (tmp_path / "out" / "config.sh").read_text()
    assert "--rollout-batch-size 32" in written and "--global-batch-size 96" in written


def test_updates_of_slime_that_are_no_whole_groups_are_named(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(COLOCATED.format(100))
    found = audit(import_config([script]), plan=False)
    assert "an update of 100 samples is no whole groups of 8" in " ".join(found.notes)
    assert "what is left over is rolled out, and dropped" in " ".join(each.message for each in found.findings)


def test_a_group_of_nobody_is_refused(tmp_path: Path) -> None:
    """verl's was a traceback, and slime's a wrong type."""
    verl = "actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.n=0"
    (tmp_path / "verl.sh").write_text(f"python3 -m verl.trainer.main_ppo {verl}\n")
    with pytest.raises(SpecError, match="group_size: Value error, 0 is not a positive whole number"):
        job_of(import_config([tmp_path / "verl.sh"]))
    (tmp_path / "run.sh").write_text(
        COLOCATED.replace("--n-samples-per-prompt 8", "--n-samples-per-prompt 0").format(256)
    )
    with pytest.raises(SpecError, match="a value is 0 where others are divided by it"):
        import_config([tmp_path / "run.sh"])
