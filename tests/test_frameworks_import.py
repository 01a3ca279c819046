"""Existing configurations: read without a lost key, unknown keys named, exported again unchanged."""

from __future__ import annotations

import csv
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rlperf.api import ask
from rlperf.cli.main import app
from rlperf.errors import ExportError, SpecError
from rlperf.files import assumed_of
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.carried import Carried
from rlperf.frameworks.export import export_run, write_file
from rlperf.frameworks.fields import resolve
from rlperf.frameworks.imports import import_config, job_of, job_text, keys_text, usual_workload
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.run import Run
from rlperf.frameworks.run_of import from_job
from rlperf.frameworks.scripts.flow import commands
from rlperf.frameworks.sources import read_source
from rlperf.specs.job import Job
from rlperf.specs.reader import parse_document, validate

from .framework_samples import SHIPPED, sample_run, with_values

FRAMEWORK_OF = {
    "areal": "areal",
    "nemo": "nemo_rl",
    "openrlhf": "openrlhf",
    "slime": "slime",
    "trl": "trl",
    "verl": "verl",
}


def _exported_keys(folder: Path, files: tuple[Path, ...]) -> dict[str, Any]:
    configs = [path for path in files if path.suffix == ".yaml" and "accelerate" not in path.name]
    scripts = [path for path in files if path.suffix == ".sh"]
    return dict(read_source(configs or scripts).keys)


@pytest.mark.data
def test_every_accepted_example_survives_import_and_export(measured_data: Path, tmp_path: Path) -> None:
    examples = sorted((measured_data / "frameworks" / "examples").iterdir())
    assert len(examples) == 12
    for path in examples:
        imported = import_config([path])
        assert imported.adapter.name == FRAMEWORK_OF[path.name.split("_")[0]], path.name
        assert (imported.unknown, imported.illegal) == ((), ()), path.name
        job_file = tmp_path / path.stem / "job.yaml"
        job_file.parent.mkdir()
        job_file.write_text(job_text(job_of(imported)))
        job_file.with_suffix(".keys.yaml").write_text(keys_text(imported))
        written = write_file(job_file, None, tmp_path / path.stem / "out")
        found = _exported_keys(tmp_path, written)
        lost = {key: value for key, value in imported.source.keys.items()
                if key != "model_engine" and not _same(found.get(key), value)}  # fmt: skip
        assert lost == {}, path.name


def _same(found: Any, given: Any) -> bool:
    return bool(found == given) or str(found).endswith(f":-{given}}}") or found == [given]


@pytest.mark.data
def test_examples_say_the_same_in_neutral_words(measured_data: Path) -> None:
    examples = measured_data / "frameworks" / "examples"
    fsdp = import_config([examples / "verl_grpo_qwen3_8b_fsdp_8xh100.yaml"]).run
    assert (fsdp.batch.prompts_per_step, fsdp.batch.mini_batch) == (128, 64)
    # The optimizer waits on the host between the phases only: while training it is on the device.
    assert (fsdp.trainer.backend, fsdp.trainer.offload) == ("fsdp2", "none")
    assert (fsdp.trainer.parks_optimizer, fsdp.trainer.parked) == (True, False)
    split = import_config([examples / "verl_separate_async_qwen3_8b_2p2.yaml"]).run
    # 10,240 tokens per GPU times Ulysses 4.
    assert (split.trainer.token_budget, split.trainer.data_parallel) == (40960, 4)
    assert (split.trainer.devices, split.rollout.devices, split.mode) == (16, 16, "async")
    inherited = import_config([examples / "nemo_rl_async_1off_qwen3_30ba3b_4n8g.yaml"]).run
    # 512 samples per update / 32 samples per prompt, and the parent's layout.
    assert (inherited.batch.mini_batch, inherited.trainer.expert_parallel) == (16, 8)
    assert (inherited.mode, inherited.rollout.devices) == ("one_step_off", 16)
    slime = import_config([examples / "slime_grpo_qwen3_30b_a3b_8gpu.sh"]).run
    assert (slime.trainer.tensor_parallel, slime.rollout.tensor_parallel) == (4, 8)
    assert slime.batch.mini_batch == 32
    areal = import_config([examples / "areal_grpo_qwen2_5_7b_8gpu.yaml"]).run
    assert (areal.trainer.data_parallel, areal.rollout.data_parallel) == (4, 4)
    trl = import_config([examples / "trl_grpo_qwen2_5_7b_8gpu.yaml"]).run
    # 4 completions x 8 GPUs x 8 accumulations / 8 generations = 32 prompts an update, two updates a rollout.
    assert (trl.batch.mini_batch, trl.batch.prompts_per_step) == (32, 64)


@pytest.mark.parametrize("framework", SHIPPED)
def test_a_job_changed_after_import_changes_those_keys_alone(framework: str, tmp_path: Path) -> None:
    version = key_table(framework).versions[-1]
    adapter = adapter_of(framework)
    run = with_values(sample_run(Random(21), framework, version), {"run.mode": "colocated", "run.staleness": 0})
    devices = run.trainer.devices
    run = with_values(run, {"rollout.devices": devices, "run.devices": devices})
    run = with_values(run, {"rollout.data_parallel": devices // run.rollout.tensor_parallel})
    for name, text in export_run(run, adapter, version, "config").files.items():
        (tmp_path / name).write_text(text)
    file = tmp_path / ("config.sh" if framework in ("slime", "openrlhf") else "config.yaml")
    files = [file, *tmp_path.glob("*accelerate.yaml")]
    imported = import_config(files, framework)
    job = job_of(imported)
    again = with_values(from_job(job, 8), {"rollout.memory_fraction": 0.42})
    carried = Carried(framework, imported.target.version, imported.source)
    settings = export_run(again, adapter, version, "config", carried=carried).emission.settings
    changed = {s.key for s in settings if not _same(imported.source.keys.get(s.key), s.value)}
    expected = {
        "verl": "actor_rollout_ref.rollout.gpu_memory_utilization",
        "nemo_rl": "policy.generation.vllm_cfg.gpu_memory_utilization",
        "openrlhf": "vllm.gpu_memory_utilization",
        "slime": "sglang-mem-fraction-static",
        "areal": "sglang.mem_fraction_static",
        "trl": "vllm_gpu_memory_utilization",
    }[framework]
    alternative = {
        "nemo_rl": "policy.generation.sglang_cfg.mem_fraction_static",
        "areal": "vllm.gpu_memory_utilization",
    }
    assert changed in ({expected}, {alternative.get(framework, expected)})


def test_shell_scripts_are_read_not_run(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(
        """#!/bin/bash
set -x
export NODES=${NODES:-2}   # a comment with "quotes'
N=$((4 * 2)); touch /tmp/never && rm -rf "$HOME/never"
ARGS=(
  trainer.nnodes=$NODES   # inside the array
  "trainer.n_gpus_per_node=${N}"
)
ARGS+=(actor_rollout_ref.rollout.n=8 'data.train_files=["/a b/x.parquet"]')
NAME="$(date +%s)"
ray job submit --address="http://x:1" -- python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo "${ARGS[@]}" \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8 trainer.experiment_name=$NAME $@
"""
    )
    source = read_source([script])
    assert source.entry == "verl.trainer.main_ppo"
    assert source.keys["trainer.nnodes"] == 2
    assert source.keys["trainer.n_gpus_per_node"] == 8
    assert source.keys["data.train_files"] == ["/a b/x.parquet"]
    assert source.keys["actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype"] == "fp8"
    assert source.lines["trainer.nnodes"] == (str(script), 6)
    assert source.keys["trainer.experiment_name"] == "$(date +%s)"


def test_words_of_commands() -> None:
    text = "A='x y'\npython t.py --name $A --path \"$A/z\" --flag --list 1 2 && echo done"
    first = [word.text for word in commands(text)[0]]
    assert first == ["python", "t.py", "--name", "x", "y", "--path", "x y/z", "--flag", "--list", "1", "2"]


def test_inherited_yaml_with_override_and_resolvers(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(
        "grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 2}\n"
        "policy:\n  max_total_sequence_length: 100\n  train_micro_batch_size: 3\n"
        "  sequence_packing: {enabled: true, train_mb_tokens: '${mul:${policy.max_total_sequence_length}, "
        "${policy.train_micro_batch_size}}'}\n  megatron_cfg: {enabled: false, tensor_model_parallel_size: 8}\n"
    )
    child = tmp_path / "child.yaml"
    child.write_text(
        "defaults: parent.yaml\npolicy:\n  train_micro_batch_size: 5\n"
        "  megatron_cfg: {_override_: true, enabled: true}\n"
    )
    source = read_source([child])
    assert "policy.megatron_cfg.tensor_model_parallel_size" not in source.keys
    assert resolve(source.keys)["policy.sequence_packing.train_mb_tokens"] == 500
    assert source.lines["grpo.num_prompts_per_step"] == (str(tmp_path / "parent.yaml"), 1)


def test_defaults_come_from_the_named_version(tmp_path: Path) -> None:
    file = tmp_path / "c.txt"
    file.write_text("actor_rollout_ref.rollout.name=vllm\nactor_rollout_ref.rollout.n=8\ntrainer.nnodes=1\n")
    runs = [import_config([file], f"verl=={version}").run for version in ("0.8", "0.9")]
    assert [run.rollout.max_running for run in runs] == [1024, 256]


def test_the_newest_version_that_knows_the_keys_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("actor_rollout_ref: {rollout: {name: vllm, update_weights_bucket_megabytes: 512, n: 4}}\n")
    assert import_config([file]).target.version == "0.6"


def test_misspelt_and_moved_keys_are_named_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "actor_rollout_ref:\n  actor:\n    ppo_mini_batchsize: 64\n  rollout:\n    name: vllm\n"
        "    update_weights_bucket_megabytes: 512\n    n: many\n"
    )
    imported = import_config([file], "verl==0.9")
    assert [(item.key, item.suggestion) for item in imported.illegal] == [
        ("actor_rollout_ref.rollout.n", "'many' is not a number")
    ]
    with pytest.raises(SpecError, match="cannot be a job"):
        job_of(imported)
    found = {item.key: (item.where, item.suggestion) for item in imported.unknown}
    misspelt = found["actor_rollout_ref.actor.ppo_mini_batchsize"]
    assert misspelt == (f"{file}:3", "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?")
    assert "0.5 to 0.6" in str(found["actor_rollout_ref.rollout.update_weights_bucket_megabytes"][1])


def test_a_key_of_another_release_is_meant_rather_than_a_neighbour_in_its_section() -> None:
    """actor.behav_imp_weight_cap was taken for actor.optimizer.weight_decay: they share a section, and "weight"."""
    table = key_table("areal")
    (there,) = {each for each in table.keys("1.0") if each == "actor.behave_imp_weight_cap"} - set(table.keys("main"))
    said = f"did you mean {there}, which exists in 1.0?"
    assert (table.suggestion("actor.behav_imp_weight_cap", "main"), table.suggestion("actor.zzz", "main")) == (
        said,
        None,
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "a: 1\n", "no framework is recognised"),
        ("c.yaml", "- 1\n- 2\n", "mapping of keys is due"),
        ("c.yaml", "a: [1\n", "not valid YAML"),
        ("c.sh", "echo hello\n", "no command in it"),
        ("c.txt", "just words\n", "neither YAML"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=message):
        import_config([tmp_path / name])


def test_command_line_import_then_export(tmp_path: Path) -> None:
    run = sample_run(Random(13), "slime")
    (tmp_path / "run.sh").write_text(export_run(run, adapter_of("slime"), "main", "run").files["run.sh"])
    job = tmp_path / "job.yaml"
    result = CliRunner().invoke(app, ["import", str(tmp_path / "run.sh"), "--out", str(job), "--json"])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(job.read_text())["framework"] == "slime==main"
    validate(parse_document(job.read_text(), str(job)), Job)
    result = CliRunner().invoke(app, ["export", str(job), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "config.sh").stat().st_mode & 0o111


# -- measured configurations ------------------------------------------------------------------------------------------


def _cell(row: dict[str, str], name: str, default: int) -> int:
    return int(float(row[name])) if row[name] else default


def _measured_run(row: dict[str, str]) -> Run:
    """A measured row as a configuration; a blank cell takes the framework's default."""
    megatron = "Megatron" in row["framework"]
    trainer, rollout = _cell(row, "trainer_gpus", 8), _cell(row, "rollout_gpus", 8)
    colocated = row["colocated"] == "1"
    staleness = _cell(row, "max_staleness", 0)
    group = _cell(row, "group_size", 16)
    prompts = _cell(row, "prompts_per_step", 64)
    total = _cell(row, "seq_limit", 4096)
    # some frameworks cap prompt and response apart, and rows of those state the response's own limit
    response = _cell(row, "response_limit", max(total - 1024, total // 2))
    prompt = total - response
    values: dict[str, Any] = {
        "run.architecture": row["architecture"], "run.algorithm": "dapo" if row["algorithm"] == "DAPO" else "grpo",
        "run.reference": row["scoring_passes"] == "2", "run.staleness": staleness,
        "run.mode": "colocated" if colocated else "disaggregated" if not staleness else "one_step_off",
        "run.devices_per_node": _cell(row, "gpus_per_node", 8), "run.devices": trainer + (0 if colocated else rollout),
        "batch.prompts_per_step": prompts, "batch.group_size": group,
        "batch.mini_batch": max(_cell(row, "mini_batch", prompts * group) // group, 1),
        "batch.max_prompt_tokens": prompt, "batch.max_response_tokens": response,
        "trainer.devices": trainer, "trainer.backend": "megatron" if megatron else "fsdp2",
        "trainer.tensor_parallel": _cell(row, "trainer_tensor_parallel", 1),
        "trainer.pipeline_parallel": _cell(row, "trainer_pipeline_parallel", 1),
        "trainer.context_parallel": _cell(row, "trainer_context_parallel", 1),
        "trainer.expert_parallel": _cell(row, "trainer_expert_parallel", 1),
        "trainer.sequence_parallel": row["sequence_parallel"] == "1",
        "trainer.activation_recompute": row["activation_recompute"] or "none",
        "trainer.packing": row["sequence_packing"] != "0",
        "trainer.token_budget": _cell(row, "train_token_budget", _cell(row, "seq_limit", 4096)),
        "trainer.microbatch": _cell(row, "microbatch", 1), "trainer.zero_stage": 1 if megatron else 3,
        "rollout.devices": rollout, "rollout.backend": "vllm",
        "rollout.tensor_parallel": _cell(row, "rollout_tensor_parallel", 1),
        "rollout.pipeline_parallel": _cell(row, "rollout_pipeline_parallel", 1),
        "rollout.memory_fraction": float(row["rollout_memory_fraction"] or 0.6), "rollout.cuda_graphs": True,
    }  # fmt: skip
    return with_values(Run(), values).completed()


def _adapter_name(framework: str) -> str | None:
    """The adapter of a row's framework."""
    names = {"NeMo-RL": "nemo_rl", "verl": "verl", "miles": "miles"}
    return names.get(framework.split(" ")[0])


@pytest.mark.slow
@pytest.mark.data
def test_measured_configurations_import_without_a_lost_key_and_export_equal(
    measured_data: Path, tmp_path: Path
) -> None:
    """Every measured rl_step written down as a config: imported, made a job, exported: the same keys and values.

    Rows of frameworks that rlperf writes no configuration for (SkyRL, RLinf) are left out by name.
    """
    with (measured_data / "measured" / "rl_step.csv").open() as file:
        rows = [(row, _adapter_name(row["framework"])) for row in csv.DictReader(file)]
    written, uneven = 0, []
    for row, framework in rows:
        if framework is None:
            continue
        version = key_table(framework).versions[-1]
        run, adapter = _measured_run(row), adapter_of(framework)
        try:
            phase = export_run(run, adapter, version, "config")
        except ExportError as error:
            uneven.append((row["row_id"], str(error)))
            continue
        file = next(name for name in ("config.yaml", "config.sh") if name in phase.files)
        config = tmp_path / f"{row['row_id']}{Path(file).suffix}"
        config.write_text(phase.files[file])
        imported = import_config([config], framework)
        assert (imported.unknown, imported.illegal) == ((), ())
        job = job_of(imported, cluster="gb200_nvl72" if row["gpu"] == "gb200" else "dgx_h100")
        carried = Carried(framework, version, imported.source)
        again = export_run(from_job(job, run.devices_per_node), adapter, version, "c", carried=carried)
        found = {setting.key: setting.value for setting in again.emission.settings}
        assert found == dict(imported.source.keys), row["row_id"]
        written += 1
    assert written >= 60
    # One published row has pipeline stages without packing, which NeMo-RL's rules of today refuse, and one states
    # 16-way experts on eight devices.
    assert [row for row, _ in uneven] == ["nemo_rl_v0_5_0025", "nemo_rl_v0_6_0051"]


@pytest.mark.parametrize(
    ("model", "said", "workload"),
    [
        ("Qwen2.5-VL-7B-Instruct", "data.image_key=images", "image"),
        ("Qwen2.5-VL-7B-Instruct", "data.image_key=images data.video_key=videos", "math"),  # a dump has all defaults
        ("Qwen2.5-7B-Instruct", "data.image_key=images", "math"),
        ("Qwen2.5-7B-Instruct", "actor_rollout_ref.rollout.multi_turn.enable=True", "tool_use"),
        ("Qwen2.5-7B-Instruct", "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml", "tool_use"),
    ],
)
def test_lengths_that_stand_in_are_of_the_kind_that_the_file_states(
    model: str, said: str, workload: str, tmp_path: Path
) -> None:
    """Agents and prompts with images were predicted as math in one turn, without a word of tools or pixels."""
    (tmp_path / "run.sh").write_text(
        f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/{model} data.train_batch_size=64 {said}\n"
    )
    read = import_config([tmp_path / "run.sh"])
    assert usual_workload(read)[0] == job_of(read).tasks[0].workload == workload
    assert job_of(read, workload="video").tasks[0].workload == "video"
    assert assumed_of(read, None, None)[1].startswith(f"workload {workload}")


def test_positions_that_a_configuration_overrides_are_the_policys(tmp_path: Path) -> None:
    """Qwen2.5-Math-7B has 4,096: recipes that stretch it (verl's DAPO of a 7B) were refused as too long for it."""
    stated = "+actor_rollout_ref.model.override_config.max_position_embeddings=32768"
    rest = "actor_rollout_ref.model.path=Qwen/Qwen2.5-Math-7B data.train_batch_size=64 data.max_response_length=28672"
    length = "actor_rollout_ref.rollout.max_model_len=30720 data.max_prompt_length=2048"
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {rest} {length} {stated}\n")
    (tmp_path / "plain.sh").write_text(f"python3 -m verl.trainer.main_ppo {rest} {length}\n")
    with pytest.raises(SpecError, match="above the 4,096 positions"):
        ask(job_of(import_config([tmp_path / "plain.sh"])))
    read = import_config([tmp_path / "run.sh"])
    assert "context_positions" not in {each.rule for each in audit(read, plan=False, predict=False).findings}
    job = job_of(read)
    assert ask(job).context.tasks[0].batches[0].longest_tokens == 30720
    key = stated.removeprefix("+").partition("=")[0]
    for framework, said in (("verl", True), ("openrlhf", False)):
        version = key_table(framework).versions[-1]
        emission = export_run(from_job(job, 8), adapter_of(framework), version, "c").emission
        assert ({setting.key: setting.value for setting in emission.settings}.get(key) == 32768) is said
        assert any("max_positions" in lost.asked for lost in emission.limitations) is not said


@pytest.mark.parametrize(
    ("stated", "cluster", "name", "nodes"),
    [
        ("trainer.n_gpus_per_node=16 trainer.device=npu", None, "ascend_a3_supernode", 1),
        ("trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.device=npu", None, "ascend_910b_node", 2),
        ("trainer.n_gpus_per_node=16", None, "dgx_h100", 2),
        ("trainer.n_gpus_per_node=8 trainer.nnodes=2", "gb200_nvl72", "gb200_nvl72", 4),
        ("trainer.n_gpus_per_node=4 trainer.nnodes=2", None, "dgx_h100", 2),
    ],
)
def test_devices_and_nodes_are_those_that_the_file_has(
    stated: str, cluster: str | None, name: str, nodes: int, tmp_path: Path
) -> None:
    """A file for NPUs was predicted on H100, and nodes larger than the cluster's left no device for the rest."""
    model = "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B data.train_batch_size=64"
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {model} {stated}\n")
    read = import_config([tmp_path / "run.sh"])
    job = job_of(read, cluster=cluster)
    assert (job.cluster, job.nodes) == (name, nodes)
    assert cluster or assumed_of(read, None, None)[0].startswith(f"cluster {name}")
    assert ask(job).context.cluster.devices >= read.run.devices


@pytest.mark.parametrize(
    ("trainer", "rollout", "cluster", "nodes", "each"),
    [
        ((1, 6), (1, 2), None, 1, None),
        ((2, 6), (2, 2), None, 2, None),
        ((1, 2), (1, 2), None, 1, 4),
        ((1, 8), (1, 8), None, 2, None),
        ((1, 4), (1, 4), "gb200_nvl72", 2, None),
    ],
)
def test_pools_that_fit_into_a_node_stand_on_one(
    trainer: tuple[int, int], rollout: tuple[int, int], cluster: str | None, nodes: int, each: int | None,
    tmp_path: Path,
) -> None:  # fmt: skip
    """verl's one-step-off script on one node, 6 GPUs that train and 2 that serve, was a job of two nodes."""
    model = "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.rollout.name=vllm"
    pools = " ".join(
        f"{pool}.nnodes={number} {pool}.n_gpus_per_node={gpus}"
        for pool, (number, gpus) in (("trainer", trainer), ("rollout", rollout))
    )
    (tmp_path / "run.sh").write_text(f"python3 -m verl.experimental.one_step_off_policy.main_ppo {model} {pools}\n")
    job = job_of(import_config([tmp_path / "run.sh"]), cluster=cluster)
    assert (job.nodes, job.devices_per_node) == (nodes, each)
    assert [pool.devices for pool in job.pools] == [(rollout[0] * rollout[1],), (trainer[0] * trainer[1],)]


@pytest.mark.parametrize(
    "words",
    [
        "python3 train.py --hf-checkpoint /ckpt/Qwen3-8B --rollout-batch-size 32 --rollout-num-gpus-per-engine 1 {}",
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen3-8B --rollout_batch_size 32 --vllm_num_engines 8 {}",
    ],
)
def test_answers_by_a_function_of_ones_own_have_turns(words: str, tmp_path: Path) -> None:
    """slime's examples of search and tools, and OpenRLHF's agents, say no more of their turns than whose code it is."""
    flag = "--custom-generate-function-path yours.generate" if "train.py" in words else "--agent_func_path agent.py"
    for given, workload in (("", "math"), (flag, "tool_use")):
        (tmp_path / "run.sh").write_text(words.format(given) + "\n")
        assert usual_workload(import_config([tmp_path / "run.sh"]))[0] == workload


def test_a_reference_that_dapo_scores_stands_in_the_job(tmp_path: Path) -> None:
    """DAPO has none by default: one that slime's switch loads was lost on the way, and with it a pass of an rl_step."""
    filtered = "--dynamic-sampling-filter-path f --over-sampling-batch-size 64 --rollout-num-gpus-per-engine 1"
    given = f"--hf-checkpoint /ckpt/Qwen3-8B --rollout-batch-size 32 {filtered} --kl-loss-coef 0.0"
    for switch, scored in (("--use-kl-loss", True), ("", False)):
        (tmp_path / "run.sh").write_text(f"python3 train.py --colocate {given} {switch}\n")
        job = job_of(import_config([tmp_path / "run.sh"]))
        assert (job.algorithm, job.reference) == ("dapo", scored)
        assert validate(parse_document(job_text(job), "job.yaml"), Job) == job


@pytest.mark.parametrize(
    "command",
    [
        "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --per_device_train_batch_size 4",
        "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.train_files=x",
        "python3 -m verl.trainer.main_generation trainer.nnodes=1",
        "python3 -m openrlhf.cli.train_rm --pretrain Qwen3-8B --train_batch_size 256",
        "uv run examples/run_dpo.py policy.model_name=Qwen/Qwen3-8B",
        "python3 train_async.py --loss-type sft_loss --hf-checkpoint /ckpt/Qwen3-8B --rollout-batch-size 128",
    ],
)
def test_a_program_that_does_not_train_on_its_rollouts_is_refused(command: str, tmp_path: Path) -> None:
    """Fine-tuning and reward models were predicted as GRPO at its defaults, and passed."""
    (tmp_path / "run.sh").write_text(command + "\n")
    with pytest.raises(SpecError, match="does not train on what it rolls out"):
        import_config([tmp_path / "run.sh"])
    (tmp_path / "run.sh").write_text(f"{command}\ntrl grpo --model_name_or_path Qwen/Qwen2.5-0.5B --use_vllm true\n")
    assert import_config([tmp_path / "run.sh"]).adapter.name == "trl"


def test_what_hydra_puts_into_a_section_is_no_key(tmp_path: Path) -> None:
    """verl's own ppo_trainer.yaml, copied and edited, was refused for the unknown keys actor, model and ref."""
    groups = ["actor@actor_rollout_ref.actor: ${model_engine}_actor", "model@actor_rollout_ref.model: hf_model",
              "data@data: legacy_data", "legacy_reward_impl", "_self_"]  # fmt: skip
    file = tmp_path / "mine.yaml"
    text = "defaults:\n  - model_engine: megatron\n" + "".join(f"  - {each}\n" for each in groups)
    file.write_text(f"{text}data:\n  train_batch_size: 64\nactor_rollout_ref:\n  rollout:\n    n: 4\n    name: vllm\n")
    found = import_config([file])
    assert (found.adapter.name, found.unknown, found.absent_bases) == ("verl", (), ())
    assert (found.run.trainer.backend, found.run.batch.prompts, found.run.batch.group_size) == ("megatron", 64, 4)
