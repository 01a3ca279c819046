"""Older releases: what a file of theirs means, where only what changed since is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.audit.repairs import in_keys
from rlperf.frameworks.export import write_file
from rlperf.frameworks.imports import Imported, import_config, job_of, job_text, keys_text
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.releases import OPENRLHF_NAMES
from rlperf.frameworks.run import ref
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
    assert (new.target.version, new.run.batch.max_response_tokens) == ("main", 512)
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
    [("trl", "0.20.1", "0.27"), ("trl", "0.29.0", "0.28"), ("trl", "1.3", "1.0"), ("trl", "3.0", "main"),
     ("openrlhf", "0.8.5", "0.9"), ("openrlhf", "0.10.4", "0.10"), ("nemo_rl", "v0.5.0", "0.5"),
     ("slime", "0.2.4", "0.2"), ("slime", None, "main"), ("areal", "1.0.4", "1.0"), ("areal", "0.5", "1.0")],
)  # fmt: skip
def test_a_release_is_read_as_the_last_that_changed_anything(framework: str, asked: str | None, read: str) -> None:
    assert key_table(framework).version(asked) == read


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
