"""Exported configurations: every key exists for the version, every value is legal, every rule holds; and back again."""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.util
import subprocess
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlperf.errors import ExportError, SpecError
from rlperf.frameworks.adapter import checked, framework_facts, states
from rlperf.frameworks.export import export_run, illegal_keys, refusals, write_plan
from rlperf.frameworks.fields import SGLANG_KV_DTYPE, Target, field
from rlperf.frameworks.keytable import flatten, key_table
from rlperf.frameworks.readback import read_back
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.run import Run, TrainerRun, ref
from rlperf.frameworks.scripts.flow import commands
from rlperf.frameworks.sources import read_source
from rlperf.plan.answer.plan import Phase, Plan, PredictedStages, Prediction
from rlperf.plan.question.pool import BatchSettings, PoolPlan
from rlperf.specs.job import Job
from rlperf.specs.pool import LayoutValues, SettingsValues
from tests.nested import nest

from .framework_samples import SHIPPED, sample_run, with_values
from .quick import slow_but
from .test_frameworks_phases import ENDS

VERL_VERSIONS = ("0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "main")
CASES = [(name, key_table(name).versions[-1]) for name in SHIPPED] + [("verl", v) for v in VERL_VERSIONS[:-1]]
KEPT = (
    "run.mode", "run.devices", "batch.prompts_per_step", "batch.group_size", "batch.mini_batch",
    "trainer.devices", "trainer.tensor_parallel", "trainer.pipeline_parallel", "trainer.expert_parallel",
    "trainer.data_parallel", "trainer.token_budget", "trainer.activation_recompute", "trainer.offload",
    "rollout.devices", "rollout.tensor_parallel", "rollout.data_parallel", "rollout.memory_fraction",
    "trainer.parked",
)  # fmt: skip


@pytest.mark.parametrize("count", slow_but((40, 200), 40))
@pytest.mark.parametrize(("framework", "version"), CASES)
def test_sampled_plans_export_with_known_keys_and_kept_rules(
    framework: str, version: str, count: int, tmp_path: Path
) -> None:
    random, adapter, table = Random(7), adapter_of(framework), key_table(framework)
    for index in range(count):
        run = sample_run(random, framework, version)
        phase = export_run(run, adapter, version, "config")
        target = Target(table, version, str(phase.emission.run.trainer.backend))
        assert illegal_keys(phase.emission.settings, target) == []
        if index % 20 == 0:
            back = _read_back(phase.files, framework, version, tmp_path)
            assert refusals(back, framework, version) == []
            adapted = phase.emission.run
            for at in map(ref, KEPT):
                if adapted.value(at) is not None and str(at) not in _not_stored(framework, adapted):
                    assert back.value(at) == adapted.value(at), (at, framework, version)


def _not_stored(framework: str, run: Run) -> set[str]:
    """Values that the framework's files do not hold."""
    missing: set[str] = {"trainer.parked"} if framework in ("nemo_rl", "areal") else set()
    if framework == "trl":
        # The server's GPUs and its share of their memory stand in the launch of the server.
        missing = {"trainer.token_budget", "rollout.devices", "rollout.data_parallel", "run.devices"}
        missing |= {"rollout.memory_fraction"} if run.mode == "disaggregated" else set()
    if framework == "areal":
        missing |= {"trainer.offload"} if run.trainer.backend == "megatron" else set()
    if run.trainer.token_budget is None:
        missing.add("trainer.token_budget")
    return missing


def _read_back(files: object, framework: str, version: str, folder: Path) -> Run:
    assert isinstance(files, dict)
    for name, text in files.items():
        (folder / name).write_text(text)
    configs = sorted(name for name in files if name.endswith(".yaml")) or [
        name for name in files if name.endswith(".sh")
    ]
    adapter = adapter_of(framework)
    source = read_source([folder / name for name in configs])
    run, _ = adapter.read(source, adapter.target(source, version))
    return run


@pytest.mark.parametrize("version", ["0.7", "0.8"])
@pytest.mark.parametrize("mode", ["one_step_off", "async", "streaming"])
def test_verl_recipes_are_read_from_their_yaml_alone_and_with_their_script(
    version: str, mode: str, tmp_path: Path
) -> None:
    """Their program stands in the script; in the YAML a rollout pool at the top is theirs, and nobody else's."""
    runs = (sample_run(Random(seed), "verl", version) for seed in range(100))
    run = next(run for run in runs if run.mode == mode)
    files = export_run(run, adapter_of("verl"), version, "config").files
    adapter = adapter_of("verl")
    for names in (["config.yaml"], ["config.sh"], ["config.yaml", "config.sh"]):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        source = read_source([tmp_path / name for name in names])
        back, _ = adapter.read(source, adapter.target(source, version))
        assert (back.mode, back.devices) == (mode, run.devices), names
    # a program that is not theirs reads no such section
    source = replace(read_source([tmp_path / "config.yaml"]), entry="verl.trainer.main_ppo")
    if mode == "one_step_off":
        assert adapter.read(source, adapter.target(source, version))[0].mode == "colocated"


def test_verl_configs_are_yaml_with_the_base_of_the_version() -> None:
    run = with_values(sample_run(Random(1), "verl", "0.9"), {"trainer.backend": "megatron", "trainer.zero_stage": 1})
    new = export_run(run, adapter_of("verl"), "0.9", "config").files["config.yaml"]
    assert yaml.safe_load(new)["defaults"][1] == {"override model_engine": "megatron"}


def test_batch_units_differ_by_framework() -> None:
    """64 prompts x 8 responses per update: verl says 64 prompts, NeMo-RL, slime and OpenRLHF say 512 samples."""
    base = with_values(sample_run(Random(3), "verl", "0.9"),
        {"batch.prompts_per_step": 128, "batch.group_size": 8, "batch.mini_batch": 64, "run.mode": "colocated",
         "trainer.backend": "megatron", "run.algorithm": "grpo", "trainer.expert_parallel": 1,
         "trainer.pipeline_parallel": 1, "trainer.virtual_pipeline": 1, "trainer.tensor_parallel": 1,
         "trainer.ulysses": 1, "trainer.context_parallel": 2, "trainer.token_budget": 40000, "trainer.devices": 16,
         "rollout.devices": 16, "run.devices": 16, "trainer.data_parallel": 8, "rollout.tensor_parallel": 2,
         "rollout.data_parallel": 8, "rollout.expert_parallel": 1, "rollout.attention_data_parallel": 1,
         "trainer.offload": "none", "trainer.zero_stage": 1, "run.architecture": "Qwen3-8B"}
    )  # fmt: skip
    expected = {
        "verl": (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            64,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            20000,
        ),
        "nemo_rl": ("policy.train_global_batch_size", 512, "policy.sequence_packing.train_mb_tokens", 40000),
        "openrlhf": ("train.batch_size", 512, "train.max_tokens_per_gpu", 20000),
        "slime": ("global-batch-size", 512, "max-tokens-per-gpu", 20000),
        "areal": ("actor.ppo_n_minibatches", 2, "actor.mb_spec.max_tokens_per_mb", 40000),
    }
    for framework, (batch, size, budget, tokens) in expected.items():
        phase = export_run(base, adapter_of(framework), key_table(framework).versions[-1], "config")
        written = {setting.key: setting.value for setting in phase.emission.settings}
        assert (written[batch], written[budget]) == (size, tokens), framework


def test_a_broken_rule_stops_the_export_before_a_file_is_written() -> None:
    run = with_values(sample_run(Random(5), "verl", "0.9"), {"trainer.token_budget": 512, "trainer.microbatch": None})
    with pytest.raises(ExportError, match="longest sequence") as caught:
        export_run(run, adapter_of("verl"), "0.9", "config")
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in caught.value.details


@pytest.mark.parametrize("mode", ["one_step_off", "async", "disaggregated"])
def test_what_a_version_cannot_run_is_said_with_the_nearest(mode: str) -> None:
    run = with_values(sample_run(Random(2), "verl", "0.5"), {"run.mode": mode})
    with pytest.raises(ExportError, match="nearest"):
        export_run(run, adapter_of("verl"), "0.5", "config")


def test_limitations_name_the_loss() -> None:
    run = with_values(
        sample_run(Random(2), "verl", "0.9"),
        {"trainer.backend": "fsdp2", "trainer.activation_recompute": "selective", "run.training_s": 90.0},
    )
    run = with_values(run, {f"trainer.{d}": 1 for d in ("tensor_parallel", "pipeline_parallel", "expert_parallel")})
    run = with_values(run, {"trainer.virtual_pipeline": 1, "trainer.context_parallel": 1, "trainer.ulysses": 1})
    run = with_values(run, {"trainer.data_parallel": run.trainer.devices})
    text = export_run(run, adapter_of("verl"), "0.9", "config").files["config.yaml"]
    assert "selective recompute with FSDP" in text
    assert "up to 30 s per rl_step" in text


@pytest.mark.parametrize(
    ("framework", "version", "engine", "unsaid"),
    [
        ("verl", "0.9", "vllm", set()),
        ("verl", "0.9", "sglang", set()),
        ("verl", "0.6", "vllm", {"rollout_dtype"}),
        ("slime", "main", "sglang", set()),
        ("nemo_rl", "main", "vllm", set()),
        ("nemo_rl", "main", "sglang", {"rollout_dtype", "kv_dtype"}),
        ("areal", "main", "vllm", {"rollout_dtype", "kv_dtype"}),
        ("areal", "main", "sglang", {"rollout_dtype"}),
        ("openrlhf", "0.11", "vllm", {"rollout_dtype", "kv_dtype"}),
        ("trl", "1.16", "vllm", {"rollout_dtype", "kv_dtype"}),
    ],
)
def test_precisions_of_the_engine_are_written_and_read_back_or_named_as_lost(
    framework: str, version: str, engine: str, unsaid: set[str], tmp_path: Path
) -> None:
    run = sample_run(Random(3), framework, version)
    asked = {"rollout.backend": engine, "rollout.rollout_dtype": "fp8", "rollout.kv_dtype": "fp8"}
    asked |= {"rollout.expert_parallel": 1, "rollout.attention_data_parallel": 1}
    found = export_run(with_values(run, asked), adapter_of(framework), version, "config")
    lost = {limitation.asked for limitation in found.emission.limitations if "dtype" in limitation.asked}
    assert lost == {f"rollout.{name} fp8" for name in unsaid}
    for name in ("rollout_dtype", "kv_dtype"):
        assert states(adapter_of(framework), version, engine, ref(f"rollout.{name}"), value="fp8") == (
            name not in unsaid
        )
    back = _read_back(found.files, framework, version, tmp_path)
    for name in {"rollout_dtype", "kv_dtype"} - unsaid:
        assert getattr(back.rollout, name) == "fp8", name


@pytest.mark.parametrize(("framework", "engine"), [("verl", "vllm"), ("verl", "sglang"), ("areal", "sglang")])
def test_an_engine_in_fp16_is_written_and_read_back(framework: str, engine: str, tmp_path: Path) -> None:
    """Devices without bf16 run nothing else; verl's files left it to its default, which is bf16."""
    asked = {"rollout.backend": engine, "rollout.rollout_dtype": "fp16"}
    found = export_run(with_values(sample_run(Random(3), framework, "main"), asked), adapter_of(framework), "main", "a")
    assert not [limitation for limitation in found.emission.limitations if "rollout_dtype" in limitation.asked]
    assert _read_back(found.files, framework, "main", tmp_path).rollout.rollout_dtype == "fp16"
    assert not states(adapter_of("skyrl"), "0.4", engine, ref("rollout.rollout_dtype"), value="fp16")


def test_how_far_slimes_groups_run_ahead_is_told() -> None:
    """Its asynchronous program bounds groups under way, 512 an engine, and no staleness."""
    values = {"run.mode": "async", "run.staleness": 1, "batch.prompts_per_step": 64, "batch.mini_batch": 64}
    values |= {"rollout.devices": 8, "rollout.tensor_parallel": 2, "rollout.data_parallel": 4}
    lost = adapter_of("slime").adapt(with_values(sample_run(Random(3), "slime", "main"), values), "main")[1]
    told = [each for each in lost if each.asked.startswith("a staleness")]
    assert len(told) == 1 and "2,048 groups are under way, those of 32 rl_steps" in told[0].loss


def test_sglang_is_told_which_8_bit_format() -> None:
    """Its server takes fp8_e4m3 or fp8_e5m2, no plain fp8; both are read as what the planner calls fp8."""
    run = with_values(sample_run(Random(3), "slime", "main"), {"rollout.kv_dtype": "fp8"})
    emission = export_run(run, adapter_of("slime"), "main", "config").emission
    assert {s.key: s.value for s in emission.settings}["sglang-kv-cache-dtype"] == "fp8_e4m3"
    assert SGLANG_KV_DTYPE.read("fp8_e5m2", run) == "fp8"


def test_unknown_framework_and_version_are_refused_with_a_hint() -> None:
    with pytest.raises(SpecError, match="did you mean verl"):
        adapter_of("verll")
    with pytest.raises(SpecError, match=r"not tabulated; known: [^(]*main$"):
        key_table("verl").version("0.2")  # no digit of which is one of 0.9 misspelt
    with pytest.raises(SpecError, match="did you mean main"):
        key_table("verl").version("mian")
    assert key_table("verl").version("v0.9.1") == "0.9"


def test_moved_keys_follow_the_version() -> None:
    old, new = (
        {s.key for s in export_run(with_values(sample_run(Random(4), "verl", "0.6"), {"run.mode": "colocated"}),
                                   adapter_of("verl"), version, "c").emission.settings}
        for version in ("0.6", "0.7")
    )  # fmt: skip
    assert "actor_rollout_ref.rollout.update_weights_bucket_megabytes" in old - new
    assert "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes" in new - old


@pytest.mark.skipif(
    importlib.util.find_spec("hydra") is None or importlib.util.find_spec("verl") is None,
    reason="verl's own config package and hydra-core are not installed",
)
def test_verl_composes_what_is_written(tmp_path: Path) -> None:
    """The framework's own composition: hydra over the trainer config of the installed verl."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    version = key_table("verl").version((package / "version" / "version").read_text().strip())
    random = Random(11)
    for index in range(40):
        phase = export_run(sample_run(random, "verl", version), adapter_of("verl"), version, f"c{index}")
        text = phase.files[f"c{index}.yaml"]
        for name in ("trainer", "experimental.fully_async_policy", "experimental.one_step_off_policy"):
            text = text.replace(f"pkg://verl.{name}.config", f"file://{package}/{name.replace('.', '/')}/config")
        (tmp_path / f"c{index}.yaml").write_text(text)
        GlobalHydra.instance().clear()
        with initialize_config_dir(config_dir=str(tmp_path), version_base=None):
            composed = compose(config_name=f"c{index}")
        for setting in phase.emission.settings:
            here = composed
            for part in setting.key.split("."):
                here = here[part]
            assert here == setting.value or isinstance(setting.value, list | dict)


@pytest.mark.parametrize("apart", [None, False, True])
def test_areal_gets_no_null_where_its_type_has_none(apart: bool | None) -> None:
    """Its structured configuration refuses one; of the nulls written, ``recompute_granularity`` alone is optional."""
    for seed in range(20):
        stated = {"trainer.turn_samples": apart, "rollout.rollout_dtype": ("bf16", "fp16", "fp8")[seed % 3]}
        run = with_values(sample_run(Random(seed), "areal"), stated)
        text = export_run(run, adapter_of("areal"), "main", "config").files["config.yaml"]
        flat = flatten(yaml.safe_load(text))
        assert {key for key, value in flat.items() if value is None} <= {"actor.megatron.recompute_granularity"}
        assert flat.get("rollout.agent.export_style") == ("individual" if apart else None)


def test_flatten_is_the_inverse_of_reading_yaml() -> None:
    text = export_run(sample_run(Random(8), "areal"), adapter_of("areal"), "main", "config").files["config.yaml"]
    flat = flatten(yaml.safe_load(text))
    assert flat["actor.backend"].startswith(("fsdp:", "megatron:"))


def _phase(run: Run, rl_steps: tuple[int, int]) -> Phase:
    """A phase as the planner states it."""
    settings = BatchSettings(**{name: getattr(run.batch, name) for name in BatchSettings.model_fields})
    pools = []
    for role, pool in (("rollout", run.rollout), ("trainer", run.trainer)):
        layout = LayoutValues(**{name: getattr(pool, name) for name in LayoutValues.model_fields})
        given = SettingsValues(**{name: getattr(pool, name, None) for name in SettingsValues.model_fields})
        pools.append(PoolPlan(role=role, devices=pool.devices, device="h100_sxm", layout=layout, settings=given))
    predicted = Prediction(
        rl_step_s=100.0, low_s=90.0, high_s=115.0, stages_s=PredictedStages(rollout=60.0, training=30.0),
        memory_bytes={},
        tokens_per_s_per_device=1.0, trained_tokens=1.0, truncated_fraction=0.0,
    )  # fmt: skip
    return Phase(
        tasks=("math",), rl_steps=rl_steps, mode="colocated", settings=settings, pools=tuple(pools), predicted=predicted
    )


@pytest.mark.parametrize("framework", SHIPPED)
def test_a_plan_of_several_phases_is_several_configs_and_their_order(framework: str, tmp_path: Path) -> None:
    version = key_table(framework).versions[-1]
    random = Random(30)
    run = sample_run(random, framework, version)
    while run.mode != "colocated" or run.trainer.virtual_pipeline > 1:
        run = sample_run(random, framework, version)
    longer = with_values(run, {"batch.max_response_tokens": 2 * (run.batch.max_response_tokens or 1)})
    if run.trainer.token_budget:
        longer = with_values(longer, {"trainer.token_budget": 4 * (run.trainer.token_budget or 1)})
    job = Job.model_validate(
        {"architecture": run.architecture, "cluster": "dgx_h100", "nodes": run.nodes,
         "framework": framework, "horizon": {"rl_steps": 80},
         "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 64, "max_response_tokens": 4096}]}
    )  # fmt: skip
    plan = Plan(
        job=job, status="optimal", objective=1.0, bound=1.0, mip_gap=0.0, candidates=2, rejected={}, screen_regret=0.0,
        phases=(_phase(run, (0, 49)), _phase(longer, (50, 79))),
    )  # fmt: skip
    written = write_plan(plan, None, tmp_path)
    names = {path.name for path in written}
    assert {"phase_01.sh", "phase_02.sh", "run_all.sh", "EXPORT.md"} <= names
    order = (tmp_path / "run_all.sh").read_text()
    assert order.index("phase_01.sh") < order.index("phase_02.sh")
    for path in written:
        if path.suffix == ".sh":
            subprocess.run(["bash", "-n", str(path)], check=True)
    second = adapter_of(framework)
    files = [path for path in written if path.name.startswith("phase_02") and path.suffix != ".md"]
    configs = [path for path in files if path.suffix == ".yaml"] or files
    source = read_source(configs)
    back, _ = second.read(source, second.target(source, version))
    assert back.batch.max_response_tokens == longer.batch.max_response_tokens
    ends = ENDS[framework]
    counted = {"rl_steps": 1, "prompts": run.batch.prompts, "updates": run.batch.updates}[ends.counts]
    assert source.keys[ends.last] == 80 * counted  # the first phase's rl_steps before its own
    assert "rl_steps 50 to 79" in (tmp_path / "EXPORT.md").read_text()


@pytest.mark.parametrize("framework", ["verl", "openrlhf", "areal"])
def test_ppo_has_a_critic_where_the_framework_has_one(framework: str) -> None:
    version = key_table(framework).versions[-1]
    run = with_values(sample_run(Random(17), framework, version), {"run.algorithm": "ppo"})
    keys = {setting.key for setting in export_run(run, adapter_of(framework), version, "c").emission.settings}
    assert any(key.startswith("critic.") for key in keys)
    for other in ("nemo_rl", "slime", "trl", "skyrl", "rlinf"):
        theirs = with_values(sample_run(Random(17), other), {"run.algorithm": "ppo"})
        with pytest.raises(ExportError, match="critic"):
            export_run(theirs, adapter_of(other), key_table(other).versions[-1], "c")


@pytest.mark.skipif(importlib.util.find_spec("openrlhf") is None, reason="OpenRLHF is not installed")
def test_openrlhf_parses_and_validates_what_is_written() -> None:
    """The framework's own argparse and checks, taken from its command line without importing its trainer."""
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "cli" / "train_ppo_ray.py").read_text()
    main = [node for node in ast.parse(text).body if isinstance(node, ast.If)][-1].body
    parsed = next(k for k, node in enumerate(main) if "parse_args" in (ast.get_source_segment(text, node) or ""))
    names: dict[str, object] = {"argparse": argparse, "datetime": datetime.datetime}
    _execute(main[:parsed], names)
    checks = [node for node in main[parsed + 1 :] if not isinstance(node, ast.ImportFrom)]
    checks = [node for node in checks if (ast.get_source_segment(text, node) or "") not in _NOT_CHECKS]
    parser = names["parser"]
    assert isinstance(parser, argparse.ArgumentParser)
    random = Random(5)
    for _ in range(60):
        script = export_run(sample_run(random, "openrlhf"), adapter_of("openrlhf"), "0.11", "c").files["c.sh"]
        words = [word.text for word in commands(script)[-1]]
        given = vars(
            parser.parse_args([w for w in words[words.index("openrlhf.cli.train_ppo_ray") + 1 :] if w != "$@"])
        )
        _execute(checks, {"args": _namespace(nest(given.items()))})


_NOT_CHECKS = ("args = hierarchize(args)", "train(args)")


def _execute(nodes: list[ast.stmt], names: dict[str, object]) -> None:
    exec(compile(ast.Module(nodes, []), "train_ppo_ray.py", "exec"), names)


def _namespace(tree: dict[str, object]) -> SimpleNamespace:
    return SimpleNamespace(**{k: _namespace(v) if isinstance(v, dict) else v for k, v in tree.items()})


def test_what_no_key_states_is_read_back_and_named() -> None:
    """TRL has no key of vLLM's CUDA graphs; of what it does state nothing is named."""
    run = with_values(sample_run(Random(1), "trl"), {"rollout.cuda_graphs": False, "rollout.prefix_caching": True})
    phase = export_run(run, adapter_of("trl"), "1.16", "config")
    asked = [limitation.asked for limitation in phase.emission.limitations]
    assert "rollout.cuda_graphs = False" in asked
    named = ("zero_stage", "group_size", "memory_fraction", "devices", "prefix_caching")
    assert not any(name in words for words in asked for name in named), asked
    with pytest.raises(ExportError, match=r"no key of trl 1.16 states trainer\.shard_size"):
        export_run(with_values(run, {"trainer.shard_size": 2}), adapter_of("trl"), "1.16", "config")


SHARDED = {"verl": {"fsdp2": {2, 3}, "megatron": {0, 1}}, "nemo_rl": {"fsdp2": {3}, "megatron": {0, 1}},
           "slime": {"megatron": {1}}, "trl": {"fsdp2": {2, 3}, "deepspeed": {0, 1, 2, 3}}}  # fmt: skip


@pytest.mark.parametrize(("framework", "backend"), [(name, each) for name, of in SHARDED.items() for each in of])
def test_a_zero_stage_is_planned_where_a_file_can_say_it(framework: str, backend: str) -> None:
    """Megatron's optimizer is distributed or not: stage 3, pinned, was planned and written as stage 1."""
    facts, run = framework_facts(framework), Run(trainer=TrainerRun(backend=backend))
    taken = {
        stage
        for stage in range(4)
        if not any(
            "zero_stage" in each
            for each in facts.refused(with_values(run, {"trainer.zero_stage": stage}).names(), backend)
        )
    }
    assert taken == SHARDED[framework][backend]


@pytest.mark.parametrize("framework", SHIPPED)
def test_a_field_under_a_key_of_no_version_is_refused(framework: str) -> None:
    adapter: Any = adapter_of(framework)
    with pytest.raises(LookupError, match=r"learn\.pp \(trainer\.pipeline_parallel\)"):
        checked(replace(adapter, fields=(*adapter.fields, field("trainer.pipeline_parallel", "learn.pp"))))


@pytest.mark.parametrize("framework", SHIPPED)
@pytest.mark.parametrize(("at", "value", "word"), [("batch.turns", 3, "turns"), ("run.algorithm", "dapo", "sampling")])
def test_what_a_file_does_not_say_of_the_rollout_is_named(framework: str, at: str, value: object, word: str) -> None:
    """Turns and filtered groups: read back as they were planned, coded by the user under a key, or named as lost."""
    if value not in framework_facts(framework).algorithms and at == "run.algorithm":
        pytest.skip(f"{framework} trains no {value}")
    version, adapter = key_table(framework).versions[-1], adapter_of(framework)
    phase = export_run(with_values(sample_run(Random(3), framework), {at: value}), adapter, version, "config")
    back = read_back(phase.files, adapter, version)
    said = any(word in each.asked for each in phase.emission.limitations)
    coded = word == "turns" and any("turns with your tools" in text for text in phase.files.values())
    assert said or coded or back.value(ref(at)) == value
