"""Older releases: what a file of theirs means, where only what changed since is known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from rlperf.api import ask
from rlperf.cost.batching import Microbatches
from rlperf.cost.network import network_bytes_per_s
from rlperf.cost.trainer.scoring import scoring_pass
from rlperf.cost.trainer_device import UpdateOptions
from rlperf.cost.weight_sync import SyncShape, sync_payload, weight_sync_s
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.audit.repairs import in_keys
from rlperf.frameworks.export import write_file
from rlperf.frameworks.expressible import as_framework_runs
from rlperf.frameworks.fields import Target
from rlperf.frameworks.imports import Imported, describe, import_config, job_of, job_text, keys_text
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.releases import OPENRLHF_NAMES
from rlperf.frameworks.run import ref
from rlperf.layout import Layout
from rlperf.sim.rl_step.trainer_stage import _head_share
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.rl_calibration import load_framework_calibration
from rlperf.specs.trainer_calibration import load_trainer
from tests.nested import nest
from tests.test_frameworks_audit import AREAL, OPENRLHF, SLIME, TRL, VERL


def read(folder: Path, text: str, framework: str | None = None, name: str = "run.sh") -> Imported:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return import_config([folder / name], framework)


def old_flags(text: str) -> str:
    """A command line of OpenRLHF as 0.9 had it."""
    for old, new in sorted(OPENRLHF_NAMES.items(), key=lambda pair: -len(pair[1])):
        text = text.replace(f"--{new} ", f"--{old} ")
    return text.replace("--max_len 10240", "--prompt_max_len 2048")


def test_flags_of_openrlhf_until_0_9_mean_what_the_dotted_ones_mean(tmp_path: Path) -> None:
    dotted = "python3 -m " + OPENRLHF + " "
    old = old_flags(dotted)
    assert "--vllm_num_engines 4" in old
    assert "--generate_max_len 8192" in old
    ours, theirs = read(tmp_path / "a", old), read(tmp_path / "b", dotted)
    assert (ours.target.version, theirs.target.version) == ("0.9", "0.11")
    assert ours.run == theirs.run
    found = audit(ours, cluster="dgx_h100", plan=False, predict=False)
    assert [finding for finding in found.findings if finding.severity != "hint"] == []
    job = tmp_path / "job.yaml"
    job.write_text(job_text(job_of(ours)))
    job.with_suffix(".keys.yaml").write_text(keys_text(ours))
    written = write_file(job, None, tmp_path / "out")
    again = import_config([next(path for path in written if path.name == "config.sh")])
    assert again.target.version == "0.9"
    assert job_of(again) == job_of(ours)


def test_trl_of_before_has_other_defaults_and_a_length_of_prompts(tmp_path: Path) -> None:
    keys = {key: value for key, value in TRL.items() if key not in ("vllm_mode", "max_completion_length")}
    text = yaml.safe_dump({**keys, "max_prompt_length": 768})
    old = read(tmp_path, text, name="run.yaml")
    assert old.target.version == "0.27"
    assert (old.run.batch.max_prompt_tokens, old.run.batch.max_response_tokens) == (768, 256)
    assert not old.run.traits.shares_devices, "vLLM was a server unless told otherwise"
    new = read(tmp_path, yaml.safe_dump(keys), name="run.yaml")
    assert (new.target.version, new.run.batch.max_response_tokens) == ("1.16", 512)
    assert new.run.traits.shares_devices


def test_defaults_of_nemo_rl_by_release() -> None:
    table = key_table("nemo_rl")
    assert table.keys("0.5")["policy.logprob_batch_size"].default == 4
    assert "train_micro_batch_size" in str(table.keys("0.6")["policy.logprob_batch_size"].default)
    assert table.find("grpo.async_grpo.enabled", "0.3") is None
    assert "one_step_off" not in framework_facts("nemo_rl", "0.3").modes
    assert "one_step_off" in framework_facts("nemo_rl", "0.5").modes
    assert "async" not in framework_facts("slime", "0.2").modes


@pytest.mark.parametrize(
    ("framework", "asked", "read"),
    [("trl", "0.20.1", "0.27"), ("trl", "0.29.0", "0.28"), ("trl", "1.3", "1.0"), ("trl", "3.0", "1.16"),
     ("trl", "1.13", "1.11"), ("trl", "main", "1.16"), ("verl", "1.2", "main"), ("skyrl", "0.7", "0.4"),
     ("openrlhf", "0.8.5", "0.9"), ("openrlhf", "0.10.4", "0.10"), ("nemo_rl", "v0.5.0", "0.5"),
     ("slime", "0.2.4", "0.2"), ("slime", None, "main"), ("areal", "1.0.4", "1.0"), ("areal", "0.5", "1.0"),
     ("verl", "1", "main"), ("trl", "1", "1.0"), ("trl", "v2", "1.16")],
)  # fmt: skip
def test_a_release_is_read_as_the_last_that_changed_anything(framework: str, asked: str | None, read: str) -> None:
    assert key_table(framework).version(asked) == read


def test_a_release_newer_than_every_known_one_is_told(tmp_path: Path) -> None:
    said = "trl 1.20 is newer than every release that is known: taken for 1.16"
    job = job_of(read(tmp_path, yaml.safe_dump(TRL), "trl==1.20", "run.yaml"), cluster="dgx_h100")
    asked = {version: ask(job.model_copy(update={"framework": f"trl=={version}"})) for version in ("1.20", "1.16.3")}
    assert {version: question.context.warned for version, question in asked.items()} == {"1.20": (said,), "1.16.3": ()}
    assert said in describe(import_config([tmp_path / "run.yaml"], "trl==1.20"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**TRL, "of_tomorrow": 1}))
    told = [import_config([tmp_path / "run.yaml"], f"trl=={version}") for version in ("1.20", "1.16")]
    audits = [audit(each, cluster="dgx_h100", plan=False) for each in told]
    found = [next(one for one in each.findings if one.rule == "unknown_key").severity for each in audits]
    assert found == ["warning", "error"], "a key that is not known may be one of its own"
    assert "known" not in describe(import_config([tmp_path / "run.yaml"], "trl==1.16"))


def test_trl_forms_no_logits_since_1_15_and_its_liger_key_no_longer_says_so(tmp_path: Path) -> None:
    """`add_fused_lm_head` (1.15.0 trainer/grpo_trainer.py); `use_liger_kernel` patches layers alone since then."""
    read_by = {
        (version, liger): read(
            tmp_path, yaml.safe_dump({**TRL, "use_liger_kernel": liger}), f"trl=={version}", "run.yaml"
        )
        for version in ("1.14", "1.15", "1.16")
        for liger in (False, True)
    }
    chunked = {each: found.run.trainer.chunked_loss for each, found in read_by.items()}
    assert chunked == {each: each[0] != "1.14" or each[1] for each in read_by}
    assert all(not found.unknown and "use_liger_kernel" not in found.carried for found in read_by.values())
    job = job_of(read_by["1.16", False], cluster="dgx_h100")
    for version, keys in (("1.14", {"use_liger_kernel"}), ("1.16", set())):
        taken = as_framework_runs(
            job.model_copy(update={"framework": f"trl=={version}"}), framework_facts("trl", version)
        )
        assert taken.pool("trainer").settings.chunked_loss is True
        written = adapter_of("trl").emit(read_by["1.16", False].run, Target(key_table("trl"), version))
        assert {setting.key for setting in written.settings} & {"use_liger_kernel"} == keys


def test_trl_trains_adapters_of_rank_16_where_none_is_stated(tmp_path: Path) -> None:
    """`lora_r` of trl/trainer/model_config.py, 0.27.2 to 1.16.0: a file without it was taken for full fine-tuning."""
    for given, rank in (({}, None), ({"use_peft": True}, 16), ({"use_peft": True, "lora_r": 64}, 64)):
        found = read(tmp_path, yaml.safe_dump({**TRL, **given}), name="run.yaml")
        assert found.run.trainer.lora_rank == rank


def test_trl_takes_the_newer_name_of_gradient_checkpointing(tmp_path: Path) -> None:
    """transformers 5.24 training_args.py: the new name goes before the old one, which is true where none is stated."""
    old, new = "gradient_checkpointing", "activation_checkpointing"
    for given, recompute in (({}, "full"), ({new: False}, "none"), ({old: False}, "none"),
                             ({old: False, new: True}, "full")):  # fmt: skip
        found = read(tmp_path, yaml.safe_dump({**TRL, **given}), name="run.yaml")
        assert (found.unknown, found.run.trainer.activation_recompute) == ((), recompute)


def test_what_a_release_of_trl_refuses_is_found(tmp_path: Path) -> None:
    text = yaml.safe_dump({**TRL, "auto_find_batch_size": True})
    found = audit(read(tmp_path, text, "trl==1.16", "run.yaml"), plan=False, predict=False).findings
    assert [each.severity for each in found if each.key == "auto_find_batch_size"] == ["error"]
    rule = {version: [each for each in framework_facts("trl", version).rules_of() if each.id == "one_dense_server"]
            for version in ("0.28", "1.10", "1.11")}  # fmt: skip
    assert {version: len(each) for version, each in rule.items()} == {"0.28": 0, "1.10": 1, "1.11": 0}
    names = {
        "run": SimpleNamespace(mode="disaggregated"), "rollout": SimpleNamespace(data_parallel=np.array([1, 4])),
        "architecture": SimpleNamespace(experts=0),
    }  # fmt: skip
    kept = rule["1.10"][0].holds(names)
    assert kept is not None
    assert kept.tolist() == [True, False]


def test_an_unknown_key_of_a_release_that_is_known_in_part_is_no_error(tmp_path: Path) -> None:
    text = yaml.safe_dump({**TRL, "some_key_of_then": 1})
    levels = {
        version: [
            finding.severity
            for finding in audit(
                read(tmp_path, text, f"trl=={version}", "run.yaml"), plan=False, predict=False
            ).findings
            if finding.key == "some_key_of_then"
        ]
        for version in ("1.0", "main")
    }
    assert levels == {"1.0": ["warning"], "main": ["error"]}


def test_areal_1_0_lacks_what_came_since() -> None:
    table, chunked = key_table("areal"), ref("trainer.chunked_loss")
    since = "actor.logprobs_chunk_size teacher.train.megatron.enable_chunked_logits rollout.agent.drop_retry_orphans"
    for key in since.split():
        assert (table.find(key, "1.0"), table.lifetime(key)) == (None, "main"), key
    assert table.find("actor.mb_spec.max_tokens_per_mb", "1.0") is not None
    assert {entry.key(table, "1.0", "fsdp2") for entry in adapter_of("areal").fields if entry.at == chunked} == {None}


def test_keys_of_patch_releases_are_known(tmp_path: Path) -> None:
    keys = {**VERL, "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation": True}
    text = yaml.safe_dump(nest(keys.items()))
    assert read(tmp_path, text, "verl==0.9.1", "run.yaml").unknown == ()
    assert read(tmp_path, text, "verl==0.8", "run.yaml").unknown != ()
    more = f"python3 -m {OPENRLHF} --algo.advantage.is_correction_level token --algo.kl.unbiased_gradient"
    found = read(tmp_path, more)
    assert (found.target.version, found.unknown, found.illegal) == ("0.11", (), ())
    assert read(tmp_path, more.replace("level token", "level words"), "openrlhf==0.11.2").illegal != ()


@pytest.mark.parametrize(
    ("framework", "keys", "said"),
    [("areal", {**AREAL, "train_dataset.batch_size": -1}, ""), ("trl", {**TRL, "per_device_train_batch_size": -1}, ""),
     ("slime", SLIME.replace("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 1e308"),
      "pipeline-model-parallel-size: 1e+308 is no trainer.pipeline_parallel")],
)  # fmt: skip
def test_numbers_that_nothing_can_be_made_of_have_no_repair(
    tmp_path: Path, framework: str, keys: dict[str, object] | str, said: str
) -> None:
    shell = isinstance(keys, str)
    text = f"python3 {keys}" if isinstance(keys, str) else yaml.safe_dump(nest(keys.items()))
    found = read(tmp_path, text, framework, "run.sh" if shell else "run.yaml")
    assert ", ".join(found.run.wrong) == said
    assert framework == "trl" or in_keys(found, [(ref("trainer.microbatch"), 2)]) is None
    audit(found, cluster="dgx_h100", plan=False, predict=False)


def test_scripts_of_the_fully_asynchronous_recipe_are_of_a_release_that_knows_their_keys(tmp_path: Path) -> None:
    """All of the recipe's published scripts state ``use_rollout_log_probs``, which no release was known to take."""
    said = " ".join(f"async_training.{key}" for key in (
        "staleness_threshold=0.5", "trigger_parameter_sync_step=4", "require_batches=4", "partial_rollout=True",
        "use_rollout_log_probs=True", "checkpoint_engine.enable=True"))  # fmt: skip
    model = "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.hybrid_engine=False rollout.nnodes=1"
    (tmp_path / "run.sh").write_text(f"python -m recipe.fully_async_policy.fully_async_main {model} {said}\n")
    read = import_config([tmp_path / "run.sh"])
    assert (read.target.version, read.unknown, read.run.mode) == ("0.7", (), "async")


def test_the_recipes_own_configuration_is_fully_asynchronous(tmp_path: Path) -> None:
    """Neither its name nor ``train_batch_size: 0`` stands in it: it was one step off, with a batch of 1,024."""
    own = {"staleness_threshold": 0.5, "trigger_parameter_sync_step": 4, "require_batches": 2}
    keys = {f"async_training.{name}": value for name, value in own.items()}
    keys |= {"defaults": ["ppo_trainer", "_self_"], "rollout.nnodes": 1, "data.gen_batch_size": 1,
             "actor_rollout_ref.actor.ppo_mini_batch_size": 32, "actor_rollout_ref.rollout.name": "vllm"}  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(nest(keys.items())))
    run = import_config([tmp_path / "mine.yaml"]).run
    assert (run.mode, run.batch.prompts) == ("async", 32 * 2 * 4)


def test_trl_sends_all_tensors_in_one_packed_broadcast_since_its_server_is_vllms() -> None:
    """Until 1.10 a request, a broadcast and a barrier a tensor; then one device's port, in the type that is kept."""
    ways = {version: load_framework_calibration(f"trl=={version}").weight_sync for version in ("1.10", "1.11", "main")}
    assert [tuple(fit.transport for fit in fits) for fits in ways.values()] == [
        ("colocated", "nccl"), ("colocated", "packed_broadcast"), ("colocated", "packed_broadcast"),
    ]  # fmt: skip
    packed, hardware = ways["main"][1], load_hardware("h100_sxm", "dgx_h100")
    model = load_architecture("Qwen3-8B")
    one_node, two_nodes = (SyncShape(8 * nodes, 8, trainer_shards=8 * nodes, rollout_shards=1) for nodes in (1, 2))
    payload = sync_payload(model, 4.0)
    near, far = (float(weight_sync_s(hardware, packed, payload, shape)) for shape in (one_node, two_nodes))
    # the port of the one that sends, and of two nodes the half of every tensor that lies on the other
    port = network_bytes_per_s(hardware)
    assert near == pytest.approx(1.0 + payload.tensors * 1.78e-5 + payload.bytes / (0.829 * port), rel=1e-6)
    assert far - near == pytest.approx(payload.bytes / 2 / port, rel=1e-6)


def test_trl_puts_responses_alone_through_its_head_since_it_is_fused() -> None:
    """Labels of prompts and padding are -100, and hidden states without a label are dropped (1.16.0 utils.py:1645)."""
    demand = SimpleNamespace(trained_tokens=4 * 400.0, prompt_tokens=4 * 100.0)
    batches = Microbatches.of(1000.0, 1e6, 1000.0, 2.0)  # four sequences, each padded to 1,000, on two ranks
    for version, share in (("1.14", 1.0), ("1.16", 0.3)):
        stack = SimpleNamespace(framework=load_framework_calibration(f"trl=={version}", "fsdp2"))
        assert float(_head_share(stack, demand, Layout.of(data_parallel=2), batches, 1.0)) == pytest.approx(share)
    model, hardware, trainer = load_architecture("Qwen2.5-1.5B"), load_hardware("h100_sxm"), load_trainer("fsdp2")
    layout, held = Layout.of(data_parallel=8, zero_stage=3), Microbatches.of(65536.0, 65536.0 * 4096, 4096.0, 1.0)
    whole, third = (
        float(scoring_pass(model, hardware, trainer, layout, held, UpdateOptions(head_share=share)).forward_s)
        for share in (1.0, 0.3)
    )
    head = 2.0 * 65536 * model.vocab * model.hidden / 989.4e12
    assert whole - third > 0.7 * head  # its product at the data sheet's rate, at least


def test_a_key_that_areal_renamed_is_of_the_release_that_has_it(tmp_path: Path) -> None:
    """Until 1.0.4 rejection_sampling was behave_imp_weight_cap: scripts with it were "refused" by main."""
    text = yaml.safe_dump(nest({**AREAL, "actor.behave_imp_weight_cap": 5.0}.items()))
    found = read(tmp_path, text, name="grpo.yaml")
    assert (found.target.version, found.unknown) == ("1.0", ())
    (unknown,) = read(tmp_path, text, "areal==main", name="grpo.yaml").unknown
    assert unknown.suggestion == "exists in 1.0"
