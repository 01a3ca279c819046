"""What is written into scripts and YAML is quoted: exported files run with stubbed programs, and run nothing else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import yaml

from rlperf.errors import ExportError
from rlperf.frameworks.export import export_run, write_file
from rlperf.frameworks.fields import Setting
from rlperf.frameworks.imports import import_config, job_of, job_text, keys_text
from rlperf.frameworks.keytable import flatten, key_table
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.scripts.typed import override_value
from rlperf.frameworks.writing import yaml_scalar, yaml_text

from .framework_samples import SHIPPED, sample_run, with_values

MODEL = '/ckpt/$(touch ran)/`touch ran`/it\'s "mine"; touch ran'
STUB = '#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done >> "$STUB_LOG"\n'


def _launched(folder: Path, script: str) -> list[str]:
    """The words that an exported script hands to its program; every program of a launch is a stub."""
    stubs, log = folder / "stubs", folder / "words"
    stubs.mkdir(exist_ok=True)
    for name in ("python", "python3", "ray", "uv", "accelerate", "trl"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    checkout = {name: str(folder) for name in ("SLIME", "MILES", "AREAL", "NEMO_RL", "SKYRL", "RLINF")}
    environment = {"PATH": f"{stubs}:{os.environ['PATH']}", "STUB_LOG": str(log), "HOME": "/opt/me", **checkout}
    environment |= {"NEMO_RL_SINGLE_CONTROLLER": "controller.py", "PROGRAM": "p", "CONFIG_PATH": "c", "CONFIG": "c"}
    environment |= {"NODE_RANK": "1", "MASTER_ADDR": "node0"}
    models = folder / "scripts" / "models"
    models.mkdir(parents=True, exist_ok=True)
    (models / "mine.sh").write_text("MODEL_ARGS=(--of-the-checkout)\n")
    environment["MODEL_SCRIPT"] = str(models / "mine.sh")
    subprocess.run(["bash", str(folder / script)], check=True, env=environment, cwd=folder)
    assert not list(folder.rglob("ran"))
    return log.read_text().split("\0")[:-1]


@pytest.mark.parametrize("framework", SHIPPED)
def test_nothing_in_a_name_is_run(framework: str, tmp_path: Path) -> None:
    version = key_table(framework).versions[-1]
    run = with_values(sample_run(Random(3), framework), {"run.architecture": MODEL})
    emission = export_run(run, adapter_of(framework), version, "config", ["job\ntouch ran"]).emission
    emission = replace(emission, entry="train.py; touch ran")
    emission = replace(emission, settings=tuple(replace(s, why=s.why + "\ntouch ran") for s in emission.settings))
    files = adapter_of(framework).render(emission, "config", ["job of\ntouch ran\nactor: mine"])
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        if name.endswith(".yaml"):
            stated = yaml.safe_load(text)
            assert "actor" not in stated or isinstance(stated["actor"], dict)
    words = _launched(tmp_path, "config.sh")
    if framework in ("slime", "openrlhf"):
        assert any(word in (MODEL, f"/ckpt/{MODEL.rpartition('/')[2]}") for word in words)
    else:
        assert MODEL in "".join(str(value) for value in _texts(yaml.safe_load(files["config.yaml"])))
    assert framework == "trl" or any("train.py; touch ran" in word for word in words)


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_of_several_nodes_of_trl_is_told_where_the_first_is(nodes: int, tmp_path: Path) -> None:
    """Without an address accelerate would look for a host called "None" (its utils/launch.py)."""
    random, run = Random(3), sample_run(Random(3), "trl")
    while run.mode != "colocated" or run.nodes != nodes:
        run = sample_run(random, "trl")
    for name, text in export_run(run, adapter_of("trl"), key_table("trl").versions[-1], "config").files.items():
        (tmp_path / name).write_text(text)
    words = _launched(tmp_path, "config.sh")
    told = words[words.index("config_accelerate.yaml") + 1 : words.index("-m")]
    meeting = ["--machine_rank", "1", "--main_process_ip", "node0", "--main_process_port", "29500"]
    assert told == (meeting if nodes > 1 else [])
    assert import_config([tmp_path / "config.sh"]).run.devices == run.devices


def test_engines_of_trl_that_its_server_cannot_start_are_refused() -> None:
    """`trl vllm-serve` starts all of its engines on one node (trl/scripts/vllm_serve.py:455 of 1.9.2)."""
    random, run = Random(3), sample_run(Random(3), "trl")
    while run.mode != "disaggregated" or run.rollout.devices != 8:
        run = sample_run(random, "trl")
    assert export_run(run, adapter_of("trl"), "1.16", "config").files
    wide = with_values(run, {"rollout.devices": 16, "rollout.data_parallel": None}).completed()
    with pytest.raises(ExportError, match="16 GPUs are more than its 8"):
        export_run(wide, adapter_of("trl"), "1.16", "config")


def test_what_areal_is_told_beside_its_file_is_added_to_it(tmp_path: Path) -> None:
    """Hydra refuses an override of a key that the file lacks, unless it is marked as added."""
    files = export_run(sample_run(Random(3), "areal"), adapter_of("areal"), "1.0", "config").files
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    told = [word.partition("=")[0] for word in _launched(tmp_path, "config.sh") if "=" in word]
    assert [key for key in told if not key.startswith("++")] == [] != told


NAMES = (
    ("-x", "--x", "a=b"),
    ("yes", "null", "1e3"),
    ("007", "{}", "[1]"),
    ("a\nb: c", "é\u2028中 50% #no", "$(touch ran)`touch ran`; touch ran"),
    ('it\'s "mine" \\', "\\n\\' {a: 1} ${", "${HOME}/x"),
)
"""What a model, data or a project may be called."""
NAMED = {
    "verl": ("actor_rollout_ref.model.path", "data.train_files", "trainer.experiment_name"),
    "nemo_rl": ("policy.model_name", "logger.wandb.project", "logger.wandb.name"),
    "openrlhf": ("actor.model_name_or_path", "data.prompt_dataset", "reward.remote_url"),
    "slime": ("hf-checkpoint", "prompt-data", "wandb-project"),
    "miles": ("hf-checkpoint", "prompt-data", "wandb-project"),
    "trl": ("model_name_or_path", "dataset_name", "run_name"),
    "skyrl": ("trainer.policy.model.path", "trainer.project_name", "trainer.run_name"),
    "rlinf": ("rollout.model.model_path", "runner.experiment_name", "runner.output_dir"),
    "areal": ("actor.path", "train_dataset.path", "experiment_name"),
}


def _stated(framework: str, words: Sequence[str], folder: Path) -> dict[str, str]:
    """Key -> value as the framework gets it: from its file, or from the words that its program is started with."""
    if framework in ("openrlhf", "slime", "miles"):
        pairs = zip(words, [*words[1:], ""], strict=True)
        return dict(word[2:].split("=", 1) if "=" in word else (word[2:], after) for word, after in pairs)
    if framework in ("skyrl", "rlinf"):
        read = yaml.safe_load if framework == "skyrl" else override_value
        return {key.lstrip("+"): read(text) for key, _, text in (word.partition("=") for word in words) if text}
    return flatten(yaml.safe_load((folder / "config.yaml").read_text()))


@pytest.mark.parametrize("framework", NAMED)
def test_names_of_any_text_arrive_as_they_are(framework: str, tmp_path: Path) -> None:
    """Nothing of a name is run, its program or file gets the name, and an import reads the name."""
    adapter, emission = adapter_of(framework), None
    random = Random(3)
    while emission is None:
        with suppress(ExportError):
            run = sample_run(random, framework)
            emission = export_run(run, adapter, key_table(framework).versions[-1], "config").emission
    for number, names in enumerate(NAMES):
        folder = tmp_path / str(number)
        folder.mkdir()
        own = {setting.key: setting for setting in emission.settings}
        own |= {key: Setting(key, name, name) for key, name in zip(NAMED[framework], names, strict=True)}
        files = adapter.render(replace(emission, settings=tuple(own.values())), "config", [*names])
        for name, text in files.items():
            (folder / name).write_text(text)
        stated = _stated(framework, _launched(folder, "config.sh"), folder)
        configs = [folder / name for name in sorted(files, key=lambda name: name.endswith(".sh"))]
        read = import_config([path for path in configs if "accelerate" not in path.name], framework).source.keys
        by_shell = not (folder / "config.yaml").exists() or framework in ("skyrl", "rlinf")
        for key, name in zip(NAMED[framework], names, strict=True):
            assert stated[key] == (name.replace("${HOME}", "/opt/me") if by_shell else name)
            asked = name.replace("${HOME}", "${oc.env:HOME}") if framework in ("skyrl", "rlinf") else name
            assert read[key] == asked


def _texts(data: object) -> list[str]:
    if isinstance(data, dict):
        return [text for value in data.values() for text in _texts(value)]
    return [data] if isinstance(data, str) else []


IMPORTED = {
    "verl": "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 "
            "'actor_rollout_ref.model.path=/m/$(touch ran)/Qwen3-8B' data.train_files=$HOME/train.parquet "
            "actor_rollout_ref.actor.use_dynamic_bsz=true trainer.nnodes=1 trainer.n_gpus_per_node=8 "
            "actor_rollout_ref.actor.ppo_mini_batch_size=64 data.train_batch_size=128",
    "openrlhf": "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path '/m/$(touch ran)/Qwen3-8B' "
                "--data.prompt_dataset $HOME/train.jsonl --vllm.num_engines 8 --train.colocate_all "
                "--ds.packing_samples --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 "
                "--actor.num_gpus_per_node 8 "
                "--ref.num_gpus_per_node 8 --train.dynamic_batch_enable --data.max_len 8192",
    "slime": "python3 train.py --colocate --hf-checkpoint '/m/$(touch ran)/Qwen3-8B' --prompt-data $HOME/train.jsonl "
             "--rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 4096 "
             "--use-dynamic-batch-size --max-tokens-per-gpu 8192 --actor-num-gpus-per-node 8 --actor-num-nodes 1 "
             "--num-rollout 100 ${MODEL_ARGS[@]}",
}  # fmt: skip


@pytest.mark.parametrize("framework", IMPORTED)
def test_what_was_harmless_in_a_script_is_harmless_after_import_and_export(framework: str, tmp_path: Path) -> None:
    source = tmp_path / "run.sh"
    source.write_text(
        'source "$SLIME/scripts/models/qwen3-8B.sh"\n' * (framework == "slime") + IMPORTED[framework] + "\n"
    )
    imported = import_config([source], framework)
    job = tmp_path / "job.yaml"
    job.write_text(job_text(job_of(imported)))
    job.with_suffix(".keys.yaml").write_text(keys_text(imported))
    written = write_file(job, None, tmp_path)
    words = _launched(tmp_path, "config.sh")
    if framework == "verl":
        text = next(path for path in written if path.name == "config.yaml").read_text()
        assert yaml.safe_load(text)["data"]["train_files"] == "${oc.env:HOME}/train.parquet"
        assert yaml.safe_load(text)["actor_rollout_ref"]["model"]["path"] == "/m/$(touch ran)/Qwen3-8B"
    else:
        assert "/m/$(touch ran)/Qwen3-8B" in words
        assert "/opt/me/train.jsonl" in words
    if framework == "slime":
        assert "--of-the-checkout" in words
        assert "MODEL_SCRIPT=scripts/models/qwen3-8B.sh" in (tmp_path / "config.sh").read_text()


@pytest.mark.parametrize(
    "text",
    ["a\nb: c", "x: y", "# no comment", "- item", "${a}", "yes", "1_000", "0x1F", "12:30:00", "2026-11-22", "é\u2028z",
     "\U0001f600", "\x85", "'", '"', "\\", "!!python/name:x", "&a", "*a", "~", "null", "1e-6", ".5", "a #b", " a", ""],
)  # fmt: skip
def test_every_text_reads_back_as_that_text(text: str) -> None:
    assert yaml.safe_load(f"k: {yaml_scalar(text)}") == {"k": text}
    written = yaml_text([Setting(f"a.{text.replace('.', '')}", text, why=text)], [text])
    assert yaml.safe_load(written) == {"a": {text.replace(".", ""): text}}
