"""What else rlperf reads, beside `targets`: the form of the browser's page, verdicts on memory, folders of plans."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from studies.fuzz import seeds
from studies.fuzz.targets import Target, command

FORM = {
    "model": "Qwen3-0.6B", "gpus": 8, "gpu": "h100", "framework": "verl", "algorithm": "grpo", "mode": "colocated",
    "workload": "math", "prompts": 32, "group": 4, "mini_batch": 16, "max_prompt": "1k", "max_response": "2k",
    "like": "", "staleness": None,
}  # fmt: skip
VERDICT = {
    "id": "one", "source": "nobody#L1", "framework": "verl", "model": "Qwen2.5-7B", "gpu": "h100_sxm", "n_gpus": 8,
    "verdict": "fits", "phase": "actor update", "note": "",
    "config": {
        "data.max_prompt_length": 512, "data.max_response_length": 1024, "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.fsdp_config.param_offload": True, "actor_rollout_ref.rollout.n": 5,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.25,
    },
}  # fmt: skip


def _lines(row: dict[str, Any]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in (row, {**row, "id": "two", "verdict": "oom"})).encode()


def _asked(folder: Path) -> Any:
    """The form as its widgets fill it: texts and numbers; what they cannot hold is written as text."""
    from rlperf.api import ask, job_of
    from rlperf.ui.asked import PageForm

    form = PageForm()
    try:
        given = json.loads((folder / "form.json").read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):  # widgets hold no such thing
        return None
    for name in (each.name for each in fields(form)):
        value = given.get(name, getattr(form, name)) if isinstance(given, dict) else getattr(form, name)
        held = value is None or isinstance(value, str | int | float)
        setattr(form, name, value if held else json.dumps(value))
    form.file = ""
    return {"devices": ask(job_of(None, form.values()), to_plan=True).context.cluster.devices}


def _verdicts(folder: Path) -> Any:
    from rlperf.frameworks.audit.memory_verdicts import report

    return report(folder / "verdicts.jsonl").to_dict()


def beside() -> tuple[Target, ...]:
    """All of them."""
    plan = {"plan/plan.yaml": seeds.planned, "job.yaml": lambda: seeds.JOB.encode()}
    return (
        Target("form of the page", {"form.json": lambda: json.dumps(FORM, indent=1).encode()}, _asked, weight=4),
        Target("verdicts on memory", {"verdicts.jsonl": lambda: _lines(VERDICT)}, _verdicts, weight=1),
        Target("rlperf report of a plan's folder", plan, command("report", "{}/plan"), weight=1),
        Target("rlperf plan into a plan's folder", plan,
               command("plan", "{}/job.yaml", "--out", "{}/plan", results=False), weight=1),
    )  # fmt: skip
