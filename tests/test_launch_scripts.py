"""Shell as people's launch scripts use it: what a word becomes where no program has to run for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlperf.frameworks.scripts.flow import commands, commands_run
from rlperf.frameworks.sources import read_source

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
    found = commands_run(f"{prose}python3 train.py --tp 4")[-1].words
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
