"""How many configurations import, predict, export again and then predict the same; and how many planned jobs do.

Run: python studies/round_trip/run.py FOLDER [PLANS]   (FOLDER: configurations; PLANS: sampled jobs per framework, 20)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

import rlperf
from rlperf.errors import RlperfError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.export import write_file, write_plan
from rlperf.frameworks.imports import import_config, job_of, job_text, keys_text
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES

SAME = 1e-9
STAGES = ("files", "imported", "predicted", "exported", "same")
MODELS = ("Qwen2.5-7B", "Qwen3-4B", "Qwen3-8B", "Llama-3.1-8B", "Qwen2.5-32B", "Qwen3-30B-A3B")


def configs(written: Sequence[Path]) -> list[Path]:
    """Of the files of an export those that an import reads: configurations before scripts."""
    read = [path for path in written if path.suffix in (".yaml", ".sh") and path.name != "run_all.sh"]
    return sorted(read, key=lambda path: (path.suffix == ".sh", path.name))


def trip(file: Path, folder: Path) -> int:
    """Stages of `STAGES` that a file passes: to an import, a prediction, an export, and to the same prediction."""
    passed = 1
    try:
        imported = import_config([file])
        job = job_of(imported)
        passed += 1
        seconds = rlperf.predict_job(job).rl_step_s
        passed += 1
        path = folder / "job.yaml"
        path.write_text(job_text(job))
        path.with_suffix(".keys.yaml").write_text(keys_text(imported))
        written = write_file(path, None, folder / "out")
        passed += 1
        again = rlperf.predict_job(job_of(import_config(configs(written), imported.framework))).rl_step_s
    except RlperfError as error:
        print(f"{file.name}: {error}", file=sys.stderr)
        return passed
    return passed + (abs(again / seconds - 1.0) <= SAME)


def files(folder: Path) -> pl.DataFrame:
    """Counts over the configurations of a folder."""
    passed = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with TemporaryDirectory() as scratch:
            passed.append(trip(file, Path(scratch)))
    return pl.DataFrame({name: [sum(each > index for each in passed)] for index, name in enumerate(STAGES)})


def sampled(framework: str, random: Random) -> Job:
    """A job that the framework can run: model, devices, mode, algorithm and batch at random."""
    facts = framework_facts(framework)
    mode = random.choice([mode for mode in facts.modes if framework not in MODES[mode].had_by])
    # slime's fully asynchronous rollouts have no bound that a file could state: exports name it as lost
    behind = 1 if framework == "slime" else random.choice([1, 2])
    algorithms = ["grpo", "dapo", *(["ppo"] if framework in ("verl", "openrlhf", "areal") else [])]
    task = {"name": "t", "workload": "math", "prompts_per_step": random.choice([64, 128]), "mini_batch": 32,
            "group_size": random.choice([8, 16]), "max_response_tokens": random.choice([4096, 8192])}  # fmt: skip
    job: dict[str, Any] = {
        "architecture": random.choice(MODELS), "cluster": random.choice(["dgx_a100", "dgx_h100", "dgx_h200"]),
        "nodes": random.choice([1, 2, 4]) if MODES[mode].shares_devices else random.choice([2, 4]),
        "framework": framework, "modes": mode, "algorithm": random.choice(algorithms), "tasks": [task],
        "limits": {"staleness": max(MODES[mode].least_staleness, behind)},
    }  # fmt: skip
    if framework != "slime" and random.random() < 0.2:
        job["pools"] = [{"role": "trainer", "settings": {"lora_rank": 32}}]
    return Job.model_validate(job)


def plans(framework: str, count: int) -> tuple[int, int, int]:
    """Jobs that are planned, plans that are exported, and exports that predict the plan's own rl_step."""
    random, planned, exported, same = Random(77), 0, 0, 0
    for _ in range(count):
        try:
            plan = rlperf.plan_job(sampled(framework, random))
            planned += 1
            with TemporaryDirectory() as scratch:
                read = import_config(configs(write_plan(plan, None, scratch)), plan.job.framework)
            exported += 1
            again = rlperf.predict_job(job_of(read, cluster=plan.job.cluster, workload="math")).rl_step_s
        except RlperfError as error:
            print(f"{framework}: {error}", file=sys.stderr)
            continue
        same += abs(again / plan.phases[0].predicted.rl_step_s - 1.0) <= SAME
    return planned, exported, same


def main() -> None:
    """Both tables."""
    print(files(Path(sys.argv[1])))
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    rows = [(name, *plans(name, count)) for name in FRAMEWORKS]
    print(pl.DataFrame(rows, schema=["framework", "planned", "exported", "same"], orient="row"))


if __name__ == "__main__":
    main()
