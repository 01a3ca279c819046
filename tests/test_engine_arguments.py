"""Arguments of SGLang and vLLM that frameworks pass on: read as the engine reads them, counted, or said not to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rlperf.api import predict_job
from rlperf.errors import SpecError
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.carried import Carried
from rlperf.frameworks.export import export_run
from rlperf.frameworks.imports import Imported, import_config, job_of
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.run_of import from_job
from rlperf.specs.profiles import load_cluster, load_device
from tests.nested import nest

SLIME = (
    "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /ckpt/Qwen3-30B-A3B "
    "--rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --global-batch-size 512 "
    "--tensor-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
    "--use-dynamic-batch-size --max-tokens-per-gpu 10240 --rollout-num-gpus-per-engine 8 "
)
AREAL = {
    "actor.backend": "fsdp:d4", "rollout.backend": "sglang:d4", "actor.path": "Qwen/Qwen3-8B",
    "train_dataset.batch_size": 64, "gconfig.n_samples": 8, "gconfig.max_new_tokens": 4096, "cluster.n_nodes": 1,
    "cluster.n_gpus_per_node": 8, "actor.mb_spec.max_tokens_per_mb": 8192, "actor.gradient_checkpointing": True,
}  # fmt: skip


SHARE = "--sglang-mem-fraction-static 0.6 "


def slime(folder: Path, flags: str, share: str = SHARE) -> Imported:
    (folder / "run.sh").write_text(SLIME + share + flags + "\n")
    return import_config([folder / "run.sh"], "slime")


def areal(folder: Path, **keys: object) -> Imported:
    (folder / "run.yaml").write_text(yaml.safe_dump(nest({**AREAL, **keys}.items())))
    return import_config([folder / "run.yaml"], "areal")


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ("--sglang-ep 8", "--sglang-ep-size 8"),
        ("--sglang-expert-parallel-size 8", "--sglang-ep-size 8"),
        ("--sglang-data-parallel-size 8 --sglang-enable-dp-attention", "--sglang-attn-dp-size 8"),
        ("--sglang-attn-dp-size 8", "--sglang-dp-size 8 --sglang-enable-dp-attention"),
        ("--sglang-attention-data-parallel-size 8", "--sglang-dp-size 8 --sglang-enable-dp-attention"),
        ("--sglang-disable-decode-cuda-graph", "--sglang-disable-cuda-graph"),
    ],
)  # fmt: skip
def test_an_argument_of_sglang_counts_under_each_of_its_names(tmp_path: Path, flags: str, same: str) -> None:
    plain, other, usual = slime(tmp_path, ""), slime(tmp_path, flags), slime(tmp_path, same)
    assert other.run.rollout == usual.run.rollout != plain.run.rollout
    assert (other.unknown, set(other.carried) - set(plain.carried)) == ((), set())
    assert predict_job(job_of(other)).rl_step_s == predict_job(job_of(usual)).rl_step_s


def test_prompts_that_are_not_cut_are_bounded_together(tmp_path: Path) -> None:
    """``-1`` was no number of tokens a job could have: the import could not be predicted."""
    found = slime(tmp_path, "--sglang-chunked-prefill-size -1")
    assert (found.run.rollout.chunked_prefill, found.run.rollout.engine_token_budget) == (False, 16384)
    stated = slime(tmp_path, "--sglang-chunked-prefill-size -1 --sglang-max-prefill-tokens 4096")
    assert stated.run.rollout.engine_token_budget == 4096
    assert predict_job(job_of(found)).rl_step_s > 0
    assert "prefill_budget" not in {each.rule for each in audit(stated, predict=False).findings}, "one may be longer"
    assert areal(tmp_path).run.rollout.engine_token_budget == 32768, "AReaL's own max_prefill_tokens"
    cut = areal(tmp_path, **{"sglang.chunked_prefill_size": 2048}).run.rollout
    assert (cut.chunked_prefill, cut.engine_token_budget) == (None, 2048)


@pytest.mark.parametrize("framework", ["slime", "areal"])
def test_uncut_prompts_survive_an_export(tmp_path: Path, framework: str) -> None:
    run = slime(tmp_path, "--sglang-chunked-prefill-size -1").run if framework == "slime" else areal(tmp_path).run
    files = dict(export_run(run, adapter_of(framework), "main", "out").files)
    name = "out.sh" if framework == "slime" else "out.yaml"
    (tmp_path / name).write_text(files[name])
    again = import_config([tmp_path / name]).run.rollout
    assert (again.chunked_prefill, again.engine_token_budget) == (False, run.rollout.engine_token_budget)


def test_slime_sends_an_engine_no_more_than_its_concurrency(tmp_path: Path) -> None:
    plain, stated = slime(tmp_path, ""), slime(tmp_path, "--sglang-server-concurrency 512")
    assert plain.run.rollout.max_running == stated.run.rollout.max_running == 512, "its default holds unstated, too"
    assert predict_job(job_of(plain)).rl_step_s == predict_job(job_of(stated)).rl_step_s
    assert slime(tmp_path, "--sglang-max-running-requests 1024").run.rollout.max_running == 512
    assert slime(tmp_path, "--sglang-server-concurrency 64").run.rollout.max_running == 64
    wide = slime(tmp_path, "--sglang-server-concurrency 2048 --sglang-max-running-requests 1024").run
    assert wide.rollout.max_running == 1024
    text = dict(export_run(wide, adapter_of("slime"), "main", "out").files)["out.sh"]
    assert "--sglang-server-concurrency 1024" in text and "--sglang-max-running-requests 1024" in text


@pytest.mark.parametrize("sent", [0, -1])
def test_an_engine_that_is_sent_nothing_is_refused(tmp_path: Path, sent: int) -> None:
    with pytest.raises(SpecError, match=f"sglang-server-concurrency {sent}: an engine is sent no request"):
        slime(tmp_path, f"--sglang-server-concurrency {sent}")


def test_slime_scores_in_the_microbatches_that_it_trains(tmp_path: Path) -> None:
    """``--log-probs-max-tokens-per-gpu`` is parsed, and nothing reads it: it neither counts nor is written."""
    found = slime(tmp_path, "--log-probs-max-tokens-per-gpu 65536")
    assert found.run.trainer.scoring_token_budget == found.run.trainer.token_budget == 10240
    idle = [each for each in audit(found, predict=False).findings if each.rule == "idle_key"]
    assert [(each.severity, each.key) for each in idle] == [("hint", "log-probs-max-tokens-per-gpu")]
    larger = replace(found.run, trainer=found.run.trainer.having(scoring_token_budget=65536))
    text = dict(export_run(larger, adapter_of("slime"), "main", "out").files)["out.sh"]
    assert "--log-probs-max" not in text and "parsed and never used" in text


def test_what_changes_an_engine_and_is_not_counted_is_said(tmp_path: Path) -> None:
    found = slime(tmp_path, "--sglang-max-total-tokens 50000 --sglang-page-size 1 --sglang-enable-metrics")
    said = {each.key for each in audit(found, predict=False).findings if each.rule == "uncounted"}
    assert said == {"sglang-max-total-tokens", "sglang-page-size"}
    usual = areal(tmp_path, **{"sglang.cuda_graph_max_bs": None, "vllm.block_size": 16, "sglang.cpu_offload_gb": 8})
    said = {each.key for each in audit(usual, predict=False).findings if each.rule == "uncounted"}
    assert said == {"sglang.cpu_offload_gb"}, "defaults, and another engine's, are not"


VERL = {
    "data.train_batch_size": 64, "data.max_prompt_length": 1024, "data.max_response_length": 4096,
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B", "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    "actor_rollout_ref.actor.use_dynamic_bsz": True, "actor_rollout_ref.rollout.name": "sglang",
    "actor_rollout_ref.rollout.n": 8, "trainer.n_gpus_per_node": 8, "algorithm.adv_estimator": "grpo",
}  # fmt: skip
ROLLOUT = "actor_rollout_ref.rollout."


def verl(folder: Path, **keys: object) -> Imported:
    (folder / "run.yaml").write_text(yaml.safe_dump(nest({**VERL, **keys}.items())))
    return import_config([folder / "run.yaml"], "verl==0.9")


@pytest.mark.parametrize(
    ("flags", "cluster", "kept"),
    [
        ("", "dgx_h100", 512 + 8192 * 1.5 + 512 * 2 + 1024),
        ("", "dgx_h200", 512 + 8192 * 1.5 + 512 * 2 + 1024),
        ("--sglang-chunked-prefill-size 2048", "dgx_h100", 10 * 1024),
        ("--sglang-chunked-prefill-size 16384", "dgx_h100", 512 + 16384 * 1.5 + 512 * 2 + 1024),
        ("--sglang-disable-cuda-graph", "dgx_h100", 512 + 8192 * 1.5 + 1024),
        ("--sglang-dp-size 4 --sglang-enable-dp-attention", "dgx_h100", 512 + 8192 * 1.5 + 512 * (2 + 4.5 * 4) + 1024),
        ("--sglang-moe-a2a-backend deepep", "dgx_h100", 512 + 8192 * 1.5 + 512 * 2 + 1024 + 2048),
    ],
)  # fmt: skip
def test_sglang_takes_a_share_of_its_own_where_none_is_stated(
    tmp_path: Path, flags: str, cluster: str, kept: float
) -> None:
    """It was open, and so the planner's best: no run that the files start has it (sglang@0.5.23 memory_hook.py:270)."""
    imported = slime(tmp_path, flags, share="")
    memory = load_device(load_cluster(cluster).device).memory / 2**20
    (own,) = job_of(imported, cluster=cluster).pool("rollout").settings.memory_fraction or ()
    assert own == round(1 - kept / memory, 3)
    stated = slime(tmp_path, flags, share="--sglang-mem-fraction-static 0.6 ")
    assert job_of(stated, cluster=cluster).pool("rollout").settings.memory_fraction == (0.6,)


def test_sglang_under_verl_is_told_by_its_own_arguments(tmp_path: Path) -> None:
    """verl passes SGLang neither the token budget nor the prefix cache's switch: both were counted."""
    plain = verl(tmp_path).run.rollout
    vllms = {ROLLOUT + "max_num_batched_tokens": 1024, ROLLOUT + "enable_prefix_caching": False}
    found = verl(tmp_path, **vllms)
    assert found.run.rollout == plain
    idle = {each.key for each in audit(found, predict=False).findings if each.rule == "idle_key"}
    assert idle == set(vllms), "off is what someone wanted, and does not get"
    usual = verl(tmp_path, **{ROLLOUT + "enable_prefix_caching": True, ROLLOUT + "max_num_batched_tokens": 8192})
    assert not [each for each in audit(usual, predict=False).findings if each.rule == "idle_key"], "the defaults"
    own = {"chunked_prefill_size": 2048, "disable_radix_cache": True}
    told = verl(tmp_path, **{f"{ROLLOUT}engine_kwargs.sglang.{name}": value for name, value in own.items()})
    assert (told.run.rollout.engine_token_budget, told.run.rollout.prefix_caching) == (2048, False)
    vllm = verl(tmp_path, **{**vllms, ROLLOUT + "name": "vllm"})
    assert (vllm.run.rollout.engine_token_budget, vllm.run.rollout.prefix_caching) == (1024, False)
    assert not [each for each in audit(vllm, predict=False).findings if each.rule == "idle_key"]


def test_sglang_under_verl_is_written_in_its_own_arguments(tmp_path: Path) -> None:
    run = verl(tmp_path).run
    run = replace(run, rollout=run.rollout.having(engine_token_budget=2048, prefix_caching=False))
    text = dict(export_run(run, adapter_of("verl"), "0.9", "out").files)["out.yaml"]
    told = yaml.safe_load(text)["actor_rollout_ref"]["rollout"]
    assert told["engine_kwargs"]["sglang"] == {"chunked_prefill_size": 2048, "disable_radix_cache": True}
    assert not {"max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill"} & set(told)


@pytest.mark.parametrize(
    ("engine", "told", "read"),
    [
        ("sglang", {"mem_fraction_static": 0.7, "max_running_requests": 64, "disable_cuda_graph": True, "ep_size": 2},
         {"memory_fraction": 0.7, "max_running": 64, "cuda_graphs": False, "expert_parallel": 2}),
        ("vllm", {"gpu_memory_utilization": 0.7, "max_num_seqs": 64, "enforce_eager": True,
                  "max_num_batched_tokens": 6144, "enable_prefix_caching": False, "enable_chunked_prefill": False},
         {"memory_fraction": 0.7, "max_running": 64, "cuda_graphs": False, "engine_token_budget": 6144,
          "prefix_caching": False, "chunked_prefill": False}),
    ],
)  # fmt: skip
def test_what_verl_passes_is_replaced_by_engine_kwargs(
    tmp_path: Path, engine: str, told: dict[str, object], read: dict[str, object]
) -> None:
    """They are spread last: a fraction stated there went unread, and the one beside it was predicted."""
    own = {ROLLOUT + "name": engine, ROLLOUT + "gpu_memory_utilization": 0.4, ROLLOUT + "max_num_seqs": 512}
    plain = verl(tmp_path, **own).run.rollout
    passed = {f"{ROLLOUT}engine_kwargs.{engine}.{name}": value for name, value in told.items()}
    found = verl(tmp_path, **own, **passed)
    assert {name: getattr(found.run.rollout, name) for name in read} == read
    assert not [each for each in audit(found, predict=False).findings if each.rule == "uncounted"]
    name = ROLLOUT + "name"
    other = {**own, name: "vllm" if engine == "sglang" else "sglang"}
    assert verl(tmp_path, **{**other, **passed}).run.rollout == verl(tmp_path, **other).run.rollout
    text = dict(export_run(found.run, adapter_of("verl"), "0.9", "out").files)["out.yaml"]
    written = yaml.safe_load(text)["actor_rollout_ref"]["rollout"]
    assert not set(told) & set(written.get("engine_kwargs", {}).get(engine, {})), "in verl's own keys"
    (tmp_path / "out.yaml").write_text(text)
    again = import_config([tmp_path / "out.yaml"], "verl==0.9").run.rollout
    for each in ("memory_fraction", "max_running", "cuda_graphs"):
        assert getattr(again, each) == read[each] != getattr(plain, each)


def test_an_argument_that_a_job_changes_no_longer_replaces_it(tmp_path: Path) -> None:
    """An export of an imported job kept the old argument, which is spread over the key that was written."""
    passed = f"{ROLLOUT}engine_kwargs.sglang."
    given = verl(tmp_path, **{passed + "mem_fraction_static": 0.7, passed + "max_running_requests": 64})
    job = job_of(given)
    carried = Carried("verl", given.target.version, given.source)
    run = from_job(job, 8)
    run = replace(run, rollout=run.rollout.having(memory_fraction=0.42))
    text = export_run(run, adapter_of("verl"), given.target.version, "out", carried=carried).files["out.yaml"]
    (tmp_path / "out.yaml").write_text(text)
    again = import_config([tmp_path / "out.yaml"], "verl==0.9")
    assert (again.run.rollout.memory_fraction, again.run.rollout.max_running) == (0.42, 64)
    assert passed + "max_running_requests" in again.source.keys, "what nobody changed stays as it was written"


def test_widths_that_engine_kwargs_replace_are_said_not_to_count(tmp_path: Path) -> None:
    passed = {f"{ROLLOUT}engine_kwargs.{name}": 2 for name in ("sglang.tp_size", "vllm.tensor_parallel_size")}
    for engine, key in zip(("sglang", "vllm"), passed, strict=True):
        found = audit(verl(tmp_path, **{**passed, ROLLOUT + "name": engine}), predict=False).findings
        assert [each.key for each in found if each.rule == "uncounted"] == [key]


def test_an_older_name_of_an_argument_is_said_once_and_fails_no_gate(tmp_path: Path) -> None:
    """One key was an error (ignored) and a hint (changes what the engine holds)."""
    flags = "--sglang-cuda-graph-max-bs 64 --sglang-cuda-graph-bs 8 --sglang-page-sise 1"
    (tmp_path / "run.sh").write_text(SLIME + flags + "\n")
    found = audit(import_config([tmp_path / "run.sh"], "slime==main"), predict=False).findings
    about = [(each.key, each.severity, each.rule) for each in found if each.key.startswith("sglang-")]
    assert sorted(about) == [
        ("sglang-cuda-graph-bs", "warning", "older_name"),
        ("sglang-cuda-graph-max-bs", "warning", "older_name"),
        ("sglang-page-sise", "error", "unknown_key"),
    ]


@pytest.mark.parametrize(("version", "grouped"), [("0.7", True), ("0.8", False), ("0.9", False)])
def test_the_prefix_grouper_is_read_where_a_worker_reads_it(tmp_path: Path, version: str, grouped: bool) -> None:
    keys = {**VERL, "actor_rollout_ref.actor.use_prefix_grouper": True, ROLLOUT + "name": "vllm"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(nest(keys.items())))
    found = import_config([tmp_path / "run.yaml"], f"verl=={version}")
    assert bool(found.run.trainer.shared_prefix) is grouped
    rules = {each.rule for each in audit(found, predict=False).findings}
    assert ("idle_key" in rules) is not grouped and ("prefix_grouper_batches" in rules) is grouped
    shared = replace(found.run, trainer=found.run.trainer.having(shared_prefix=True, packing=False, dynamic=False))
    if not grouped:
        text = dict(export_run(shared, adapter_of("verl"), version, "out").files)["out.yaml"]
        assert "reads use_prefix_grouper in no worker" in text
