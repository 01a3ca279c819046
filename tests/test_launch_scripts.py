"""Shell as people's launch scripts use it: what a word becomes where no program has to run for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rlperf
from rlperf.errors import SpecError
from rlperf.frameworks.imports import import_config, job_of
from rlperf.frameworks.scripts.flow import commands, run
from rlperf.frameworks.sources import read_source
from rlperf.specs.profiles import load_architecture

PATH = "P=/data/models/Qwen3-8B.json"


@pytest.mark.parametrize(
    ("before", "word", "becomes"),
    [
        (PATH, "${P##*/}", "Qwen3-8B.json"),
        (PATH, "${P%.*}", "/data/models/Qwen3-8B"),
        (PATH, "${P//-/_}", "/data/models/Qwen3_8B.json"),
        (PATH, '"$(basename "$P" .json)"', "Qwen3-8B"),
        (PATH, "$(dirname $P)", "/data/models"),
        ("M=LLaMA", "${M,,}", "llama"),
        ("M=qwen", "${M^^}", "QWEN"),
        ("M=abcdef", "${M:1:3}", "bcd"),
        ("H=(a b c)", "${#H[@]}", "3"),
        ("H=(a b c)", "${H[1]}", "b"),
        ("declare -A H=([7b]=Qwen [8b]=Llama)\nK=8b", "${H[$K]}", "Llama"),
        ("N=4", "$(expr $N \\* 8)", "32"),
        ("N=4", "$(echo \"$N*8\" | bc)", "32"),
        ("N=4", "$((N > 2 ? 16 : 8))", "16"),
        ("let N=2*8", "$N", "16"),
        ("N=2", "$((N**10))", "1024"),
        ("", "$(seq 1 8 17)", "1 9 17"),
        ("M=Qwen3-8B\nif [[ $M =~ ^Qwen ]]; then T=4; else T=1; fi", "$T", "4"),
    ],
)  # fmt: skip
def test_what_needs_no_program_is_worked_out(before: str, word: str, becomes: str) -> None:
    [*_, command] = commands(f"{before}\npython3 train.py --m {word}")
    assert " ".join(each.text for each in command[3:]) == becomes


@pytest.mark.parametrize(
    "word", ["$(nvidia-smi -L | wc -l)", "$(basename $(pwd))", "${UNSET##*/}", "$(expr 2 + x)", "${H[7]}"]
)
def test_what_needs_one_stays_as_it_is_written(word: str) -> None:
    [command] = commands(f"H=(a b)\npython3 train.py --m {word}")
    assert command[3].text == word


def test_a_comment_between_the_words_of_a_command_is_none_of_them() -> None:
    [command] = commands("python3 train.py --tp 4 \\\n  `# not --tp 8` \\\n  --pp 2")
    assert [each.text for each in command] == ["python3", "train.py", "--tp", "4", "--pp", "2"]


def test_prose_in_a_document_does_not_swallow_the_launch_behind_it() -> None:
    prose = "cat > notes <<-'EOF'\n\tdon't run this by hand\n\tEOF\n"
    found = run(f"{prose}python3 train.py --tp 4").commands[-1].words
    assert [each.text for each in found] == ["python3", "train.py", "--tp", "4"] and found[0].line == 4
    job = 'cat > job.sh <<EOF\nsrun python3 train.py --name "a" --tp 4\nEOF\nsbatch job.sh\n'
    assert [each.text for each in commands(job)[1][-2:]] == ["--tp", "4"]  # the launch may stand in one


@pytest.mark.parametrize(
    "setting",
    [
        "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        "--custom-rm-path /data/rewards/reward.py",
        "custom_reward_function.path=recipe/r1/reward_score.py",
    ],
)
def test_a_reward_that_a_setting_names_is_no_program_of_its_own(setting: str, tmp_path: Path) -> None:
    """With one, ``ray start --head`` was taken for the launch: what trains a reward model rolls nothing out."""
    script = tmp_path / "run.sh"
    script.write_text(
        "ray start --head --num-gpus 8 --dashboard-host=0.0.0.0\n"
        f"ray job submit --address=http://127.0.0.1:8265 -- python3 train.py --rollout-batch-size 32 {setting}\n"
    )
    found = read_source([script])
    assert found.entry == "train.py" and found.keys["rollout-batch-size"] == 32
    assert "num-gpus" not in found.keys


def test_a_variable_that_grows_out_of_nothing_does_not_hold_itself() -> None:
    """``ARGS=""; ARGS="$ARGS a=1"; ...``: each use was filled in again and again, until the memory was gone."""
    grown = "".join(f'ARGS="$ARGS --k{i} {i}"\n' for i in range(40))
    for before in ('ARGS=""\n', "", "ARGS=\n"):
        [command] = commands(f"{before}{grown}python3 train.py $ARGS")
        assert [word.text for word in command[2:]] == [text for i in range(40) for text in (f"--k{i}", str(i))]


LAUNCH = "python3 -m verl.trainer.main_ppo data.train_batch_size=$B actor_rollout_ref.rollout.n=8"


@pytest.mark.parametrize(
    "script",
    [
        f'B=64\nsrun --ntasks=2 bash -c "ray status\n{LAUNCH} \\"\\$@\\""',
        f"export B=64\nssh worker0 'cd /verl && {LAUNCH}'",
        f'B=64\nCOMMAND="{LAUNCH}" CONTAINER=verl.sqsh sbatch --nodes=2 ray.sub',
        f'B=64\nexport COMMAND="{LAUNCH}"\nsbatch ray.sub',
        f'B=64\nsbatch --wrap="{LAUNCH}"',
        f'B=64\nCMD="{LAUNCH}"\necho "$CMD"\neval "$CMD" 2>&1 | tee log.txt',
    ],
    ids=["bash -c", "ssh", "in front of a command", "exported", "--wrap", "eval"],
)
def test_a_launch_that_another_program_is_given_as_text_is_read(script: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    prepared = "python3 examples/data_preprocess/gsm8k.py --local_dir /data\n"
    file.write_text(f'#!/bin/bash\n{prepared}{script}\necho "as in {LAUNCH} trainer.nnodes=9"\n')
    found = read_source([file])
    assert found.entry == "verl.trainer.main_ppo"
    assert found.keys == {"data.train_batch_size": 64, "actor_rollout_ref.rollout.n": 8}
    line = next(number for number, text in enumerate(file.read_text().splitlines(), 1) if LAUNCH[:20] in text)
    assert found.lines["data.train_batch_size"] == (str(file), line + 2 * ("eval" in script))


def test_files_that_a_script_writes_are_read_as_it_writes_them(tmp_path: Path) -> None:
    """With ``cat > grpo.yaml <<EOF`` no framework was recognised, as the file is not there yet."""
    script = tmp_path / "run.sh"
    script.write_text(
        "N=16\ncat > zero.yaml <<'EOF'\ndistributed_type: DEEPSPEED\nnum_processes: 4\nEOF\n"
        "tee grpo.yaml <<EOF > /dev/null\nnum_generations: $N\nmax_completion_length: ${L:-2048}\nEOF\n"
        "accelerate launch --config_file zero.yaml trl/scripts/grpo.py --config ./grpo.yaml --bf16\n"
    )
    found = read_source([script])
    assert found.keys == {"num_generations": 16, "max_completion_length": 2048, "bf16": True}
    assert found.launcher["num_processes"] == 4 and found.launcher["distributed_type"] == "DEEPSPEED"
    assert found.lines["num_generations"] == ("grpo.yaml", 1)


@pytest.mark.parametrize(
    "written",
    [
        "cat > grpo.yaml <<EOF\nnum_generations: $N\nEOF\ncat >> grpo.yaml <<EOF\nrun_name: \\$N\nEOF\n",
        "cat <<EOF | tee grpo.yaml\nnum_generations: $N\nEOF\ncat <<EOF | tee -a grpo.yaml\nrun_name: \\$N\nEOF\n",
        "mkdir -p out && cat >grpo.yaml <<-EOF\n\tnum_generations: $N\n\trun_name: \\$N\n\tEOF\n",
    ],
    ids=["appended", "tee behind a pipe", "tabs in front"],
)
def test_a_file_that_a_script_writes_holds_all_that_it_writes(written: str, tmp_path: Path) -> None:
    """What was appended was left out without a word; tabs in front, and an escaped ``$``, were as in the script."""
    script = tmp_path / "run.sh"
    script.write_text(f"N=16\n{written}accelerate launch trl/scripts/grpo.py --config grpo.yaml\n")
    assert read_source([script]).keys == {"num_generations": 16, "run_name": "$N"}


def test_a_program_that_a_script_writes_is_read(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "cat <<'PY' > train.py\nfrom trl import GRPOConfig\n# don't $ask\n"
        "args = GRPOConfig(num_generations=4, bf16=True)\nPY\naccelerate launch --num_processes 4 train.py\n"
    )
    assert read_source([script]).keys == {"num_generations": 4, "bf16": True}


def test_a_program_that_asks_the_environment_has_its_defaults_and_what_is_said(tmp_path: Path) -> None:
    """Model and numbers were "worked out by the program", and nothing was predicted."""
    program = tmp_path / "train.py"
    program.write_text(
        "import os\nMODEL = os.environ.get('MODEL', 'Qwen/Qwen2.5-3B')\nargs = GRPOConfig(\n"
        "    num_generations=int(os.getenv('N', '8')), learning_rate=float(os.environ['LR']), seed=int([1]),\n"
        "    max_completion_length=1024 * int(os.environ.get('K', 2)))\ntrainer = GRPOTrainer(model=MODEL, args=args)\n"
    )
    read = read_source([program])
    assert read.keys == {
        "num_generations": 8, "max_completion_length": 2048, "model_name_or_path": "Qwen/Qwen2.5-3B"
    }  # fmt: skip
    assert set(read.worked_out) == {"learning_rate", "seed"}
    said = read_source([program, "N=16", "K=4", "LR=1e-6", "MODEL=Qwen/Qwen3-8B"]).keys
    assert said == {
        "num_generations": 16, "learning_rate": 1e-6, "max_completion_length": 4096,
        "model_name_or_path": "Qwen/Qwen3-8B",
    }  # fmt: skip


def test_a_program_that_sets_its_configuration_afterwards_or_by_a_dictionary_is_read(tmp_path: Path) -> None:
    """``args.max_completion_length = 4096`` behind ``args = GRPOConfig(...)``, and ``**cfg``, were passed over."""
    program = tmp_path / "train.py"
    program.write_text(
        "cfg = {'num_generations': 4, 'bf16': True}\n"
        "def main():\n"
        "    args = GRPOConfig(output_dir='x', max_prompt_length=256, seed=1, **cfg, **dict(beta=0.1), **more)\n"
        "    args.max_completion_length = 4 * 1024\n    args.seed = 2\n    other.use_vllm = True\n"
        "    if large:\n        args.max_prompt_length = 2048\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    read = read_source([program])
    assert read.keys == {
        "output_dir": "x", "num_generations": 4, "bf16": True, "beta": 0.1, "max_completion_length": 4096, "seed": 2
    }  # fmt: skip
    assert read.worked_out == {"max_prompt_length": f"{program}:8"}
    program.write_text("args = GRPOConfig()\nif __name__ == '__main__':\n    args.num_generations = 16\n")
    assert read_source([program]).keys == {"num_generations": 16}


@pytest.mark.parametrize("reference", ["$MODEL", "${MODEL}", "${MODEL:?set MODEL first}"])
def test_a_model_that_only_the_environment_names_is_asked_for(reference: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    settings = "trainer.n_gpus_per_node=8 data.train_batch_size=64 algorithm.adv_estimator=grpo"
    script.write_text(
        f"MODEL={reference}\nM=$MODEL\n{LAUNCH.partition(' data')[0]} actor_rollout_ref.model.path=$M {settings}\n"
    )
    with pytest.raises(SpecError, match=r"its model is named by \$MODEL.*say MODEL=NAME behind the file"):
        job_of(import_config([script]))
    assert import_config([script, "MODEL=Qwen/Qwen3-8B"]).run.architecture == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("folder", ["$HOME/models", '"${ROOT:-${HOME}/verl}"/models', "$ROOT"])
@pytest.mark.parametrize("model", ["Qwen2.5-32B", "Qwen3-30B-A3B-Base"])
def test_a_model_in_a_folder_that_only_the_environment_names_is_known(folder: str, model: str, tmp_path: Path) -> None:
    """A checkpoint below ``$HOME``, as most scripts have it, was "named by $HOME, which it does not set"."""
    script = tmp_path / "run.sh"
    keys = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=vllm"
    script.write_text(f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path={folder}/{model} {keys}\n")
    shape = load_architecture(job_of(import_config([script])).architecture)
    assert shape == load_architecture(model)
    script.write_text(script.read_text().replace(model, "step_100/huggingface"))
    with pytest.raises(SpecError, match=r"its model is named by \$(HOME|ROOT).*--architecture NAME"):
        job_of(import_config([script]))


@pytest.mark.parametrize(
    ("said", "hint", "more"),
    [
        ("$WORLD", "say WORLD=VALUE behind the file, or state it in a second file", ["WORLD=4"]),
        ("$(wc -l < hosts)", "state it in a second file", ["more.txt"]),
    ],
)
def test_numbers_that_only_the_shell_knows_are_named(said: str, hint: str, more: list[str], tmp_path: Path) -> None:
    """It was "a value has the wrong type for verl: invalid literal for int() with base 10"."""
    script = tmp_path / "run.sh"
    keys = "actor_rollout_ref.model.path=Qwen/Qwen3-8B algorithm.adv_estimator=grpo trainer.experiment_name=$NAME"
    script.write_text(f"python3 -m verl.trainer.main_ppo {keys} trainer.nnodes={said}\n")
    with pytest.raises(SpecError) as found:
        import_config([script])
    [problem] = found.value.problems
    assert problem.message.startswith("trainer.nnodes is $") and "only the shell knows" in problem.message
    assert problem.line == 1 and (problem.suggestion or "").startswith(hint)
    (tmp_path / "more.txt").write_text("trainer.nnodes=4\n")
    named = [tmp_path / name if name.endswith(".txt") else name for name in more]
    assert import_config([script, *named]).run.devices == 32


def test_values_of_another_type_are_named_with_their_keys(tmp_path: Path) -> None:
    """They were "a value has the wrong type for verl: invalid literal for int() with base 10: 'all'", of no key."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {train_batch_size: 64}\nactor_rollout_ref: {model: {path: Qwen/Qwen3-8B}, rollout: {n: [8]}}\n"
        "trainer: {nnodes: all}\n"
    )
    with pytest.raises(SpecError) as found:
        import_config([file], "verl")
    assert [(each.message, each.line) for each in found.value.problems] == [
        ("actor_rollout_ref.rollout.n: [8] is not a number", 2), ("trainer.nnodes: 'all' is not a number", 3)
    ]  # fmt: skip


def test_a_launch_script_given_for_a_log_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{LAUNCH}\n")
    with pytest.raises(SpecError, match=r"is a launch script, no job.*rlperf import"):
        rlperf.explain(script)


PARSED = """while [[ $# -gt 0 ]]; do
  case "$1" in
    --batch) B="$2"; shift 2;;
    --group) N="$2"; shift 2;;
    *) echo "unknown $1"; exit 1;;
  esac
done
python3 -m verl.trainer.main_ppo data.train_batch_size=${B:-64} actor_rollout_ref.rollout.n=${N:-8}
"""


@pytest.mark.parametrize(
    ("given", "batch", "group"),
    [([], 64, 8), (["1=--group", "2=16"], 64, 16), (["1=--group", "2=16", "3=--batch", "4=32"], 32, 16)],
)
def test_a_loop_over_arguments_runs_as_often_as_there_are_any(
    given: list[str], batch: int, group: int, tmp_path: Path
) -> None:
    """Without arguments it was taken once, and asked which branch of its case was meant."""
    script = tmp_path / "run.sh"
    script.write_text(PARSED)
    found = read_source([script, *given]).keys
    assert found == {"data.train_batch_size": batch, "actor_rollout_ref.rollout.n": group}


def test_options_that_nobody_gives_leave_their_defaults_and_others_are_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "N=8\nwhile getopts 'n:' opt; do\n  case $opt in n) N=$OPTARG ;; *) exit 1 ;; esac\ndone\n"
        'run() { echo "+ $*"; "$@"; }\nrun python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n="$N"\n'
    )
    assert read_source([script]).keys == {"actor_rollout_ref.rollout.n": 8}
    with pytest.raises(SpecError, match=r"its settings depend on .*case \$opt"):
        read_source([script, "1=-n", "2=16"])


def test_the_first_of_several_nodes_is_the_one_that_launches(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        'if [ "$NODE_RANK" -eq 0 ]; then\n  ray start --head\n  python3 -m verl.trainer.main_ppo a.b=1\n'
        "else\n  ray start --address=$HEAD:6379 --block\nfi\n"
    )
    assert read_source([script]).keys == {"a.b": 1}


MANIFESTS = {
    "ray.yaml": f"apiVersion: ray.io/v1\nkind: RayJob\nspec:\n  entrypoint: >-\n    {LAUNCH.replace('$B', '64')}\n",
    "task.yaml": f"num_nodes: 2\nenvs: {{B: 64}}\nsetup: |\n  pip install verl\nrun: |\n  {LAUNCH}\n",
    "pod.yaml": (
        "apiVersion: batch/v1\nkind: Job\nspec:\n  containers:\n  - command: [bash, -c]\n    args:\n    - |\n"
        f"      ray start --head\n      {LAUNCH}\n    env: [{{name: B, value: '64'}}]\n"
    ),
    "several.yaml": (
        "# of a queue\n---\napiVersion: v1\nkind: Service\nmetadata: {name: head}\n---\napiVersion: v1\nkind: Pod\n"
        "spec:\n  containers:\n  - command: [python3, -m, verl.trainer.main_ppo]\n    args:\n"
        "    - data.train_batch_size=64\n    - actor_rollout_ref.rollout.n=8\n"
    ),
}


@pytest.mark.parametrize("name", list(MANIFESTS))
def test_the_launch_in_a_schedulers_file_is_read(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(MANIFESTS[name])
    found = read_source([file])
    assert found.entry == "verl.trainer.main_ppo"
    assert found.keys == {"data.train_batch_size": 64, "actor_rollout_ref.rollout.n": 8}
    line = found.lines["data.train_batch_size"][1]
    assert line and re.match(r" *(entrypoint|run|args):", MANIFESTS[name].splitlines()[line - 1])


def test_a_configuration_that_is_named_and_not_here_is_told(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo.yaml train_dataset.batch_size=8\n"
    )
    with pytest.raises(SpecError, match=r"and gsm8k_grpo, which it names, is not here .*name that file as well"):
        import_config([script])
    script.write_text("python3 -m areal.launcher.local train.py --config gsm8k_grpo.yaml gconfig.n_samples=8\n")
    assert import_config([script]).adapter.name == "areal"


CONFIGURATION = """\
cat > grpo.yaml <<EOF
data: {{train_batch_size: {0}}}
actor_rollout_ref: {{rollout: {{name: vllm}}, actor: {{ppo_mini_batch_size: {0}}}, model: {{path: Qwen/Qwen3-8B}}}}
EOF
"""
STARTS = "python -m verl.trainer.main_ppo --config-path . --config-name grpo trainer.nnodes=2\n"


@pytest.mark.parametrize(
    ("script", "prompts"),
    [
        (f'N=256\nbash -c "\n{CONFIGURATION.format("$N")}{STARTS}"\n', 256),
        (f"bash -c '\n{CONFIGURATION.format(32)}'\n{STARTS}", 32),
        (f"if [ ! -f grpo.yaml ]; then\n{CONFIGURATION.format(64)}fi\n{STARTS}", 64),
    ],
    ids=["launched with it", "written by another", "where there is none"],
)
def test_a_file_that_is_written_within_is_read(script: str, prompts: int, tmp_path: Path) -> None:
    """It was taken for a configuration that is not here, so that another release's defaults were predicted."""
    (tmp_path / "run.sh").write_text(script)
    read = import_config([tmp_path / "run.sh"])
    assert (read.run.batch.prompts_per_step, read.run.architecture, read.absent_bases) == (prompts, "Qwen/Qwen3-8B", ())


def test_a_file_that_branches_write_otherwise_is_asked_for(tmp_path: Path) -> None:
    small, large = CONFIGURATION.format(64), CONFIGURATION.format(128)
    script = tmp_path / "run.sh"
    script.write_text(f"case $SIZE in\nsmall)\n{small};;\n*)\n{large};;\nesac\n{STARTS}")
    with pytest.raises(SpecError, match=r"its settings depend on line 1: case \$SIZE has the branches small, \*"):
        import_config([script])
    assert import_config([script, Path("SIZE=small")]).run.batch.prompts_per_step == 64
    script.write_text(f"{small}if [ -f /there ]; then\n{large}fi\n{STARTS}")
    with pytest.raises(SpecError, match=r"depend on line 5: if \[ -f /there \]"):
        import_config([script])


def test_a_program_of_unsloth_is_refused_by_name(tmp_path: Path) -> None:
    """It patches TRL: its kernels, its engine and its memory are none that TRL's times hold for."""
    program = tmp_path / "train.py"
    program.write_text("from unsloth import FastLanguageModel\nfrom trl import GRPOConfig\nargs = GRPOConfig(seed=1)\n")
    with pytest.raises(SpecError, match=r"train.py:1: trains with Unsloth"):
        import_config([program])


def test_sections_of_yaml_anchors_are_no_unknown_keys(tmp_path: Path) -> None:
    """NeMo-RL keeps keys that it does not know; a section that only names values for others is meant so."""
    file = tmp_path / "grpo.yaml"
    text = (
        "mine: {model: &model Qwen/Qwen3-8B, lengths: &lengths 4096}\n"
        "policy: {model_name: *model, max_total_sequence_length: *lengths, strange: 3}\n"
        "grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 8}\n"
    )
    file.write_text(text)
    assert [each.key for each in import_config([file], "nemo_rl").unknown] == ["policy.strange"]
    file.write_text(text.replace("*model", "Qwen/Qwen3-8B").replace("*lengths", "4096"))
    assert {each.key for each in import_config([file], "nemo_rl").unknown} == {
        "mine.model", "mine.lengths", "policy.strange"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "nodes", "gpus"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\n", "SLURM_NNODES", "SLURM_GPUS_PER_NODE"),
        ("#SBATCH -N 4\n#SBATCH --gres=gpu:8\n", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE"),
    ],
)
def test_what_a_script_asks_slurm_for_is_what_it_is_started_with(
    asked: str, nodes: str, gpus: str, tmp_path: Path
) -> None:
    """verl's own script for Slurm has its nodes and GPUs from it: "which only the shell knows"."""
    script = tmp_path / "run.slurm.sh"
    keys = "actor_rollout_ref.model.path=Qwen/Qwen3-8B algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=vllm"
    launch = f"srun python3 -m verl.trainer.main_ppo {keys} trainer.nnodes=${nodes} trainer.n_gpus_per_node=${{{gpus}}}"
    script.write_text(f"#!/bin/bash\n{asked}{launch}\n")
    run = import_config([script]).run
    assert (run.nodes, run.devices) == (4, 32)
    assert import_config([script, f"{nodes}=2"]).run.devices == 16
    script.write_text(script.read_text().replace("#SBATCH", "# SBATCH"))
    with pytest.raises(SpecError, match=f"{nodes}}}, which only the shell knows"):
        import_config([script])


def test_a_module_of_deepspeeds_launcher_is_the_program(tmp_path: Path) -> None:
    """``module`` was "an unknown key, OpenRLHF refuses it"."""
    script = tmp_path / "run.sh"
    flags = "--actor.model_name_or_path Qwen/Qwen3-8B --actor.num_gpus_per_node 8 --rollout.batch_size 64"
    script.write_text(f"deepspeed --num_gpus 8 --module openrlhf.cli.train_ppo_ray {flags}\n")
    source = read_source([script])
    assert source.entry == "openrlhf.cli.train_ppo_ray" and "module" not in source.keys and len(source.keys) == 3
