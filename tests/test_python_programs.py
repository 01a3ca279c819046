"""TRL's Python programs as configurations: what stands in them as a value, and what they work out."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlperf.errors import SpecError
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.imports import describe, import_config, job_of

PROGRAM = """from trl import GRPOConfig, GRPOTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype="auto")
WIDTH = 2
group = 4 * WIDTH
args = GRPOConfig(
    output_dir="out", per_device_train_batch_size=8, gradient_accumulation_steps=4, num_generations=group,
    max_completion_length=4 * 1024, use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=WIDTH,
    vllm_gpu_memory_utilization=cli.share, learning_rate=cli.rate, gradient_checkpointing=True,
)
trainer = GRPOTrainer(model=model, args=args, reward_funcs=reward, peft_config=LoraConfig(r=32, lora_alpha=64))
"""


def test_what_stands_in_a_program_is_read_with_its_line(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    read = import_config([program])
    run = read.run
    assert (read.adapter.name, run.architecture, run.trainer.lora_rank) == ("trl", "Qwen/Qwen3-8B", 32)
    assert (run.batch.group_size, run.rollout.tensor_parallel, run.batch.max_response_tokens) == (8, 2, 4096)
    assert read.where("num_generations") == f"{program}:6"
    assert job_of(read).architecture == "Qwen3-8B"
    told = {one.key: one for one in audit(read, plan=False, predict=False).findings if one.rule == "worked_out"}
    assert [(key, one.where) for key, one in told.items()] == [("vllm_gpu_memory_utilization", f"{program}:8")]


def test_weights_of_few_bits_are_told_of(tmp_path: Path) -> None:
    """A program of QLoRA was predicted as one of 16 bits without a word."""
    program, line = tmp_path / "train.py", "quantised = BitsAndBytesConfig(load_in_4bit=True)\n"
    program.write_text(PROGRAM.replace("WIDTH = 2\n", line + "WIDTH = 2\n"))
    (config := tmp_path / "train.yaml").write_text("model_name_or_path: Qwen/Qwen3-8B\nload_in_4bit: true\n")
    for file in (program, config):
        found = {one.key: one for one in audit(import_config([file], "trl"), plan=False, predict=False).findings}
        assert found["load_in_4bit"].rule == "uncounted" and "in 4 bits" in found["load_in_4bit"].message


def test_a_script_brings_the_program_that_it_launches(tmp_path: Path) -> None:
    """With the processes of its launcher, and its flags over what stands in the program."""
    (tmp_path / "train.py").write_text(PROGRAM)
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch --num_processes 4 train.py --per_device_train_batch_size 16\n")
    run = import_config([script]).run
    assert (run.devices, run.batch.prompts_per_step) == (4, 32)  # 4 x 16 x 4 samples, 8 of a prompt


@pytest.mark.parametrize(
    ("before", "devices"),
    [("CUDA_VISIBLE_DEVICES=4,5,6,7 trl vllm-serve --model m &\nCUDA_VISIBLE_DEVICES=0,1 ", 2),
     ("CUDA_VISIBLE_DEVICES=0,1 nvidia-smi\n", 8), ("export CUDA_VISIBLE_DEVICES=$GPUS\n", 8)],
)  # fmt: skip
def test_devices_that_another_command_sees_are_not_the_launchers(before: str, devices: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    script = tmp_path / "run.sh"
    script.write_text(f"{before}accelerate launch train.py\n")
    read = import_config([script])
    assert read.run.trainer.devices == devices and ("assumed: name" in describe(read)) == (devices == 8)


@pytest.mark.parametrize(
    ("launch", "devices", "backend"),
    [
        ("python -u train.py", 1, "ddp"),
        ("export CUDA_VISIBLE_DEVICES=0\nuv run python3 train.py", 1, "ddp"),
        ("export CUDA_VISIBLE_DEVICES=0,1\naccelerate launch --multi_gpu train.py", 2, "ddp"),
        ("env CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=gpu train.py", 2, "ddp"),
        ("export CUDA_VISIBLE_DEVICES=0,1,2\naccelerate launch --num_processes 2 --multi_gpu train.py", 2, "ddp"),
        ("python train.py --deepspeed zero3.json", 1, "deepspeed"),
        ("torchrun --nproc_per_node 2 train.py", 2, "ddp"),
        ("python -m torch.distributed.run --nproc_per_node=2 train.py", 2, "ddp"),
        ("torchrun --standalone train.py --nproc_per_node 2", 2, "ddp"),
        ("accelerate launch --num_processes 2 train.py", 2, "deepspeed"),
        ("accelerate launch --num_processes=2 --multi_gpu train.py", 2, "ddp"),
        ("accelerate launch --num_processes=2 --use_fsdp train.py", 2, "fsdp2"),
    ],
)
def test_a_launch_without_a_config_says_how_many_processes_and_how_they_train(
    launch: str, devices: int, backend: str, tmp_path: Path
) -> None:
    """``python train.py`` was eight GPUs under DeepSpeed: 32 prompts, and a quarter of the memory of one."""
    (tmp_path / "train.py").write_text(PROGRAM.replace("WIDTH = 2", "WIDTH = 1").replace("4 * WIDTH", "8"))
    script = tmp_path / "run.sh"
    script.write_text(f"{launch}\n")
    read = import_config([script])
    assert (read.run.devices, read.run.trainer.backend, read.run.batch.prompts_per_step) == (
        devices,
        backend,
        4 * devices,
    )
    told = describe(read)
    assert "assumed" not in told and ("1 GPU," in told) == (devices == 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import slime\nexecute()\n", "makes no GRPOConfig .name what it launches"),
        ("args = GRPOConfig(**settings)\n", "states no value in its GRPOConfig"),
        ("args = GRPOConfig(\n", "is no Python"),
    ],
)
def test_other_programs_are_refused_with_what_to_name(text: str, message: str, tmp_path: Path) -> None:
    program = tmp_path / "run.py"
    program.write_text(text)
    with pytest.raises(SpecError, match=message):
        import_config([program])


def test_a_program_without_an_engine_says_so_and_whose_model_it_is_asks_for_its_name(tmp_path: Path) -> None:
    """TRL generates by transformers unless told otherwise: it was predicted on vLLM, or beside a server's GPUs."""
    program = tmp_path / "train.py"
    for engine in ("", ", use_vllm=True, vllm_mode='colocate'"):
        program.write_text(
            f"from trl import GRPOConfig, GRPOTrainer\nargs = GRPOConfig(output_dir='x', num_generations=8{engine})\n"
            "trainer = GRPOTrainer(model=model, reward_funcs=f, args=args, train_dataset=d)\n"
        )
        found = audit(import_config([program], "trl==0.27"), plan=False)
        assert (found.imported.run.mode, found.imported.run.devices) == ("colocated", 8)
        rules = {each.key: each.severity for each in found.findings if each.rule == "generates_itself"}
        assert rules == ({} if engine else {"use_vllm": "warning"})
        assert any("its model is not named (--architecture" in note for note in found.notes)
