"""Phases of a plan as scripts: run one after another with stubbed programs, they are one run without gap or overlap."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from rlperf.api import plan_job
from rlperf.errors import SpecError
from rlperf.frameworks.adapter import Source, framework_facts
from rlperf.frameworks.export import export_run, write_plan
from rlperf.frameworks.fields import Target
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.phases import in_order
from rlperf.frameworks.registry import FRAMEWORKS, adapter_of
from rlperf.frameworks.run import Run
from rlperf.frameworks.sources import read_source
from rlperf.frameworks.writing import script
from rlperf.specs.job import Job

from .framework_samples import sample_run, with_values

STUB = '#!/bin/sh\nprintf "%s\\n" "${STUB_PHASE:-$*}" >> "$STUB_LOG"\n'
LENGTHS = (50, 30, 20)
"""rl_steps of three phases."""


@dataclass(frozen=True)
class Ends:
    """Keys of a framework: how long a run is (in ``counts`` of an rl_step), where it keeps, what it goes on from."""

    last: str
    kept: str
    goes_on: str
    data: str
    counts: str = "rl_steps"


ENDS = {
    "verl": Ends(
        "trainer.total_training_steps", "trainer.default_local_dir", "trainer.resume_mode", "data.train_files"
    ),
    "nemo_rl": Ends("grpo.max_num_steps", "checkpointing.checkpoint_dir", "checkpointing.checkpoint_dir", ""),
    "openrlhf": Ends("data.max_samples", "ckpt.path", "ckpt.load_enable", "data.prompt_dataset", "prompts"),
    "slime": Ends("num-rollout", "save", "load", "prompt-data"),
    "miles": Ends("num-rollout", "save", "load", "prompt-data"),
    "trl": Ends("max_steps", "output_dir", "resume_from_checkpoint", "dataset_name", "updates"),
    "skyrl": Ends("trainer.max_training_steps", "trainer.ckpt_path", "trainer.resume_mode", "data.train_data"),
    "rlinf": Ends("runner.max_steps", "runner.logger.log_path", "runner.resume_dir", "rollout.model.model_path"),
    "areal": Ends("total_train_steps", "trial_name", "recover.mode", "train_dataset.path"),
}
FOUND = {"verl": "auto", "openrlhf": True, "skyrl": "latest", "rlinf": "auto", "areal": "auto"}
"""What makes a framework look for the last checkpoint where it keeps its own; the others are given the place."""


def phases(framework: str, **later: Any) -> list[Run]:
    """Runs of three phases, on shared devices; the later ones differ by ``later``."""
    random = Random(30)
    facts, version = framework_facts(framework), key_table(framework).versions[-1]
    run = sample_run(random, framework, version)
    while (
        run.mode != "colocated"
        or run.trainer.virtual_pipeline * run.trainer.ulysses > 1
        or (run.trainer.backend != facts.backends[0])
    ):
        run = sample_run(random, framework, version)
    given = {name.replace("__", "."): value for name, value in later.items()}
    last = [sum(LENGTHS[: index + 1]) for index in range(len(LENGTHS))]
    ends = [{"run.rl_steps": a, "run.last_rl_step": b} for a, b in zip(LENGTHS, last, strict=True)]
    return in_order([with_values(run, {**end, **(given if index else {})}) for index, end in enumerate(ends)])


def exported(framework: str, runs: Iterable[Run], folder: Path) -> list[Source]:
    """The files of the runs, in a folder, as an import reads each."""
    version, found = key_table(framework).versions[-1], []
    for index, run in enumerate(runs, 1):
        files = export_run(run, adapter_of(framework), version, f"phase_{index:02d}").files
        for name, text in files.items():
            (folder / name).write_text(text)
        read = [name for name in sorted(files, key=lambda name: name.endswith(".sh")) if "accelerate" not in name]
        found.append(read_source([folder / name for name in read]))
    return found


@pytest.mark.parametrize("framework", ENDS)
def test_phases_follow_one_another_without_gap_or_overlap(framework: str, tmp_path: Path) -> None:
    ends, runs = ENDS[framework], phases(framework)
    each = {"rl_steps": 1, "prompts": runs[0].batch.prompts, "updates": runs[0].batch.updates}[ends.counts]
    keys = [source.keys for source in exported(framework, runs, tmp_path)]
    assert [one[ends.last] for one in keys] == [each * 50, each * 80, each * 100]
    assert len({str(one.get(ends.data)) for one in keys}) == len({str(one[ends.kept]) for one in keys}) == 1
    found = [one.get(ends.goes_on) for one in keys]
    kept = keys[0][ends.kept]
    if framework in FOUND:
        assert found[1:] == [FOUND[framework]] * 2
    elif framework == "trl":  # transformers names a checkpoint by the updates before it, and save_steps divides them
        assert found == [None, f"{kept}/checkpoint-{50 * each}", f"{kept}/checkpoint-{80 * each}"]
        assert all(one["max_steps"] % one["save_steps"] == 0 for one in keys)
    else:
        assert found[1:] == [kept] * 2
    names = [f"phase_{index:02d}.sh" for index in (1, 2, 3)]
    order = [f'STUB_PHASE={name} bash {name} "$@"' for name in names]
    (tmp_path / "run_all.sh").write_text(script([], ['cd "$(dirname "$0")"', *order]))
    assert _run_all(tmp_path) == names


def _run_all(folder: Path) -> list[str]:
    """The launches of a folder in the order in which their programs start, which are stubs, or what these are given."""
    stubs = folder / "stubs"
    stubs.mkdir()
    for name in ("python", "python3", "ray", "uv", "accelerate", "trl"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    (folder / "model.sh").write_text("MODEL_ARGS=()\n")
    checkout = {name: str(folder) for name in ("SLIME", "MILES", "AREAL", "NEMO_RL", "SKYRL", "RLINF")}
    given = {"PROGRAM": "p", "CONFIG_PATH": "c", "CONFIG": "c", "MODEL_SCRIPT": str(folder / "model.sh"), **checkout}
    given |= {"NODE_RANK": "0", "MASTER_ADDR": "node0"}
    environment = {"PATH": f"{stubs}:{os.environ['PATH']}", "STUB_LOG": str(folder / "log"), **given}
    subprocess.run(["bash", str(folder / "run_all.sh")], check=True, env=environment, cwd="/")
    return list(dict.fromkeys((folder / "log").read_text().splitlines()))


def written(framework: str, run: Run) -> tuple[Mapping[str, Any], list[str]]:
    """Keys of a run's files, and what they cannot express."""
    emission = export_run(run, adapter_of(framework), key_table(framework).versions[-1], "c").emission
    return {setting.key: setting.value for setting in emission.settings}, [lost.asked for lost in emission.limitations]


def test_counts_of_phases_with_other_batches_add_up() -> None:
    """TRL counts updates and OpenRLHF prompts, which other phases may have otherwise."""
    for framework, counted in (("trl", "updates"), ("openrlhf", "prompts")):
        first = phases(framework)[0].batch
        halved = {"batch__prompts_per_step": first.prompts * 2, "batch__mini_batch": first.mini}
        runs = phases(framework, **halved)
        one, two = (getattr(runs[index].batch, counted) for index in (0, 1))
        assert two == 2 * one
        assert written(framework, runs[2])[0][ENDS[framework].last] == 50 * one + 50 * two


@pytest.mark.parametrize(
    ("framework", "key"),
    [("verl", "actor_rollout_ref.actor.megatron."), ("skyrl", "trainer.policy.megatron_config."), ("slime", None)],
)
def test_phases_with_other_layouts_write_checkpoints_that_any_layout_reads(framework: str, key: str | None) -> None:
    name = "dist-ckpt-optim-fully-reshardable" if key is None else f"{key}dist_ckpt_optim_fully_reshardable"
    plain = {"trainer.backend": "megatron", "trainer.zero_stage": 1, "trainer.context_parallel": 1,
             "trainer.tensor_parallel": 1, "trainer.pipeline_parallel": 1, "trainer.data_parallel": None}  # fmt: skip
    base = [with_values(run, plain) for run in phases(framework)]
    wide = [base[0], *(with_values(run, {"trainer.tensor_parallel": 2}) for run in base[1:])]
    for runs, asked in ((base, False), (wide, True)):
        for run in in_order([run.completed() for run in runs]):
            keys, lost = written(framework, run)
            assert bool(keys.get(name)) == asked
            assert not any("going on from" in each for each in lost)


def test_a_checkpoint_that_a_phase_cannot_read_is_named() -> None:
    """FSDP's files in verl are one a rank: half the ranks do not find theirs (fsdp_checkpoint_manager.py:213)."""
    runs = phases("verl")
    half = {"trainer.devices": runs[0].trainer.devices // 2, "trainer.data_parallel": None, "trainer.shard_size": 0}
    moved = in_order([runs[0], *(with_values(run, half).completed() for run in runs[1:])])
    lost = [[each for each in written("verl", run)[1] if "going on from" in each] for run in moved]
    assert [len(each) for each in lost] == [0, 1, 0] and "another devices" in lost[1][0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_checkpoints_that_any_layout_reads_have_a_key_in_the_release(framework: str) -> None:
    table = key_table(framework)
    for version in table.versions:
        facts = framework_facts(framework, version)
        for backend, form in facts.checkpoints.items():
            keyed = bool(form.key) and Target(table, version).has(form.key)
            assert facts.tied(backend) == (() if keyed else form.tied)
    assert framework_facts(framework).tied("no such trainer") == ()


def test_adapters_of_miles_go_on_from_their_own_folder() -> None:
    """With megatron-to-hf-mode bridge every run counts from 0 (miles 0.0.2 utils/arguments.py:1983)."""
    runs = phases("miles", trainer__lora_rank=16)
    keys = [written("miles", with_values(run, {"trainer.lora_rank": 16}))[0] for run in runs]
    assert [one["num-rollout"] for one in keys] == [50, 30, 20] and all("load" not in one for one in keys)
    adapters = [one.get("lora-adapter-path") for one in keys]
    assert adapters == [None, f"{keys[0]['save']}/iter_0000049/adapter", f"{keys[0]['save']}/iter_0000029/adapter"]


def test_releases_that_count_epochs_alone_say_so() -> None:
    """SkyRL ends by trainer.max_training_steps since 0.3: before, as many epochs as rl_steps would never end."""
    emission = export_run(phases("skyrl")[0], adapter_of("skyrl"), "0.2", "c").emission
    assert not {"trainer.epochs", "trainer.max_training_steps"} & {setting.key for setting in emission.settings}
    assert any(lost.asked == "an end after rl_step 50" for lost in emission.limitations)


def test_areal_keeps_no_shards_of_megatrons_optimizer() -> None:
    """recover.no_save_optim is "required" beside it (1.0.4 api/cli_args.py:2355); of FSDP all states are kept."""
    runs = phases("areal")
    ours = {"trainer.backend": "megatron", "trainer.zero_stage": 1, "trainer.data_parallel": None}
    sharded = in_order([with_values(run, ours).completed() for run in runs])
    for each, anew in ((runs, False), (sharded, True)):
        found = [written("areal", run) for run in each]
        assert all(
            bool(keys.get("recover.no_save_optim")) == anew == bool(keys.get("recover.no_load_optim"))
            for keys, _ in found
        )
        assert [any("optimizer states" in asked for asked in lost) for _, lost in found] == [False, anew, anew]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["slime", "openrlhf"])
def test_a_plan_that_changes_layouts_is_one_run(framework: str, tmp_path: Path) -> None:
    """Long responses in the middle rl_steps want engines of eight GPUs, equal short ones engines of one.

    The trainer's layout is open, and OpenRLHF's checkpoints are laid out by it: that of one phase reads the other's.
    """
    random, trace = np.random.default_rng(3), ["rl_step,group,prompt_tokens,response_tokens,max_response_tokens"]
    for rl_step, (mean, sigma) in enumerate([(2500, 0.2)] * 2 + [(500, 2.0)] * 2 + [(2500, 0.2)] * 2):
        lengths = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, size=(256, 16))
        trace += [f"{rl_step},{group},300,{min(max(int(n), 1), 24576)},24576"
                  for group, row in enumerate(lengths) for n in row]  # fmt: skip
    (tmp_path / "lengths.csv").write_text("\n".join(trace))
    task = {"name": "t", "workload": "lengths.csv", "prompts_per_step": 256, "group_size": 16,
            "max_prompt_tokens": 1024, "max_response_tokens": 24576}  # fmt: skip
    job = Job.model_validate({
        "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 4, "framework": framework, "modes": ["colocated"],
        "tasks": [task], "horizon": {"rl_steps": 6, "group": 2, "switch": "0 s"}, "objective": {"bold": True},
        "pools": [{"role": "rollout", "layout": {"tensor_parallel": [1, 8]}}, {"role": "trainer"}],
    })  # fmt: skip
    plan = plan_job(job, folder=tmp_path)
    widths = [phase.pool("rollout").layout.tensor_parallel for phase in plan.phases]
    assert widths == [1, 8, 1]
    write_plan(plan, None, tmp_path / "out", folder=tmp_path)
    found = [read_source([tmp_path / "out" / f"phase_0{number}.sh"]).keys for number in (1, 2, 3)]
    ends, each = ENDS[framework], {"rl_steps": 1, "prompts": 256}[ENDS[framework].counts]
    assert [keys[ends.last] for keys in found] == [2 * each, 4 * each, 6 * each]
    assert len({keys[ends.kept] for keys in found}) == 1
    assert [bool(keys.get(ends.goes_on)) for keys in found] == [False, True, True]
    given = [words for words in _run_all(tmp_path / "out") if f"--{ends.last} " in words]
    assert [int(words.partition(f"--{ends.last} ")[2].split()[0]) for words in given] == [
        keys[ends.last] for keys in found
    ]


def test_files_of_several_phases_are_no_one_configuration(tmp_path: Path) -> None:
    """`verdict phase_01.sh phase_02.sh` merged them, and judged the last one's batch without a word."""
    keys = "trainer.n_gpus_per_node=8 actor_rollout_ref.model.path=Qwen/Qwen3-0.6B"
    files = [tmp_path / f"phase_0{number}.sh" for number in (1, 2)]
    for file, task in zip(files, ("math", "code"), strict=True):
        head = f"# Job two: {task}, rl_steps 0 to 9, colocated.\n# Planned for dgx_h100: 8 x h100_sxm; lengths of math."
        file.write_text(f"{head}\npython3 -m verl.trainer.main_ppo {keys}\n")
    assert read_source([files[0], files[0]]).planned.phase == "two: math, rl_steps 0 to 9, colocated"
    with pytest.raises(SpecError, match=r"phase_02.sh: is not of the phase of the files before it \(two: code"):
        read_source(files)
