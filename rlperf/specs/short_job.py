"""A job from a handful of values, for people who have no file yet: what `rlperf plan --model ...` and keyword arguments
mean. Everything else is a job's default, and the planner's choice."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from rlperf.errors import Problem, RlperfError, SpecError
from rlperf.specs.choice import plain
from rlperf.specs.cluster import Cluster
from rlperf.specs.job import Job
from rlperf.specs.labels import last_part
from rlperf.specs.modes import MODES
from rlperf.specs.profiles import is_path, load_cluster, load_device, profile_names
from rlperf.specs.reader import Document, read_document, validate
from rlperf.units import token_count

SHORT = (
    "model", "gpus", "gpu", "framework", "algorithm", "mode", "workload", "prompts", "group", "mini_batch",
    "max_prompt", "max_response", "like", "staleness",
)  # fmt: skip
"""Names of the values, as arguments of `short_job` and, with hyphens, as options of the command line."""


def tokens(text: str | int) -> int:
    """A number of tokens; ``k`` is 1,024, as context lengths are named.

    >>> tokens("16k"), tokens("1.5k"), tokens(4096)
    (16384, 1536, 4096)
    """
    count = None if isinstance(text, bool) else token_count(str(text))
    if count is None:
        raise SpecError(Problem(f"{text!r} is not a number of tokens: write it as 16384 or 16k"))
    return count


def task_name(workload: str) -> str:
    """What a task is called that has no name: as its lengths are.

    >>> task_name("math"), task_name("runs/lengths.jsonl")
    ('math', 'lengths')
    """
    return Path(workload).stem or "task"


def cluster_of(gpu: str, gpus: int | None) -> dict[str, Any]:
    """Fields of a job that stand for ``gpus`` devices: the shipped cluster of that device, or a generic one.

    Fewer devices than a node has are a node of that many; None is one node.

    >>> cluster_of("h100", 32)
    {'cluster': 'dgx_h100', 'nodes': 4}
    >>> cluster_of("l40s", 4)
    {'cluster': 'generic:l40s', 'nodes': 1, 'devices_per_node': 4}
    """
    cluster = _cluster_for(gpu)
    per_node = cluster.devices_per_node
    if gpus is None:
        gpus = per_node
    if gpus < 1:
        raise SpecError(Problem(f"gpus must be at least 1 (given: {gpus})"))
    named = gpu if is_path(gpu) and _is_cluster(gpu) else cluster.name
    fields: dict[str, Any] = {"cluster": named, "nodes": max(gpus // per_node, 1)}
    if gpus < per_node:
        return {**fields, "devices_per_node": gpus}
    if gpus % per_node:
        near = " or ".join(str(n * per_node) for n in (gpus // per_node, gpus // per_node + 1))
        raise SpecError(
            Problem(f"{gpus} {gpu} do not fill nodes of {per_node} ({cluster.name})", suggestion=f"write {near}")
        )
    return fields


def cluster_named(name: str) -> str:
    """A cluster's name, or for that of a device the cluster that `cluster_of` takes; other names as they are.

    >>> cluster_named("h100"), cluster_named("dgx_h200"), cluster_named("mine.yaml")
    ('dgx_h100', 'dgx_h200', 'mine.yaml')
    """
    if is_path(name) or ":" in name:
        return name
    try:
        return _cluster_for(name).name
    except SpecError:  # a cluster of the job's own folder, or a name that resolving the job refuses
        return name


def _cluster_for(gpu: str) -> Cluster:
    """The cluster of that name or file, or the first that ships with the device, or the generic one.

    Profiles of one's own are found from where one is.
    """
    here = Path.cwd()
    if gpu in profile_names("clusters", here) or (is_path(gpu) and _is_cluster(gpu)):
        return load_cluster(gpu, folder=here)
    device = load_device(gpu, here).name
    named = (load_cluster(name) for name in profile_names("clusters") if name != "generic")
    shipped = next((each for each in named if each.device == device), None)
    return shipped or load_cluster(f"generic:{gpu if is_path(gpu) else device}", folder=here)


def _is_cluster(path: str) -> bool:
    """Whether a profile's file is that of a cluster, which names its device."""
    data = read_document(Path(path).expanduser()).data
    return isinstance(data, dict) and "device" in data


def short_job(
    model: str,
    gpus: int | None = None,
    gpu: str = "h100",
    *,
    framework: str = "verl",
    algorithm: str = "grpo",
    mode: str | Sequence[str] = "colocated",
    workload: str = "math",
    prompts: int = 128,
    group: int = 8,
    mini_batch: int | None = None,
    max_prompt: str | int = 2048,
    max_response: str | int = 16384,
    like: str | None = None,
    staleness: int | None = None,
) -> Job:
    """A job of one task. Long because each argument is an option of the command line, and a word of a notebook.

    Parameters
    ----------
    model : shipped or published name, or path of a config.json
    gpus, gpu : how many (default: one node), and which (``h100``, ``mi300x``, or a cluster's name)
    framework : name, with ``==version`` if it matters
    mode : execution mode, or several of which the planner takes the best (``colocated,async``); ``limits.staleness`` is
        what they need
    workload : length preset, fitted model, or path of a trace
    prompts, group, mini_batch : prompts per rl_step, responses per prompt, prompts per update
    max_prompt, max_response : tokens; ``16k`` is 16,384
    like : family (``llama``, ``qwen3_moe``) that a config.json of an unknown model_type is read as
    staleness : policy versions that a trained sample may be behind, of modes that leave it open (default: 1)

    Raises
    ------
    SpecError : every value that is wrong

    >>> job = short_job("Qwen3-32B", 32, "h100", max_response="16k")
    >>> job.cluster, job.nodes, job.tasks[0].max_response_tokens
    ('dgx_h100', 4, (16384,))
    """
    gpus, staleness = plain(gpus), plain(staleness)
    several = mode.split(",") if isinstance(mode, str) else mode if isinstance(mode, Sequence) else [mode]
    texts = ("model", model), ("gpu", gpu), ("framework", framework), ("algorithm", algorithm), ("workload", workload)
    _check_types((*texts, *(("mode", each) for each in several)), gpus=gpus, staleness=staleness)
    modes = [each.strip() for each in several]
    task = {
        "name": task_name(workload), "workload": workload,
        "prompts_per_step": prompts, "group_size": group, "mini_batch": mini_batch,
        "max_prompt_tokens": tokens(max_prompt), "max_response_tokens": tokens(max_response),
    }  # fmt: skip
    whose = last_part(str(Path(model).expanduser().absolute()) if is_path(model) else model)
    data = {
        "name": f"{whose}-{gpus or 'node-of-'}{'x' if gpus else ''}{Path(gpu).stem if is_path(gpu) else gpu}",
        "architecture": model,
        **({"like": like} if like else {}),
        **cluster_of(gpu, gpus),
        "algorithm": algorithm,
        "framework": framework,
        "modes": modes,
        "limits": {"staleness": _staleness(modes, staleness)},
        "tasks": [{name: value for name, value in task.items() if value is not None}],
    }
    return validate(Document(data, {}, "options"), Job)


def _check_types(texts: Sequence[tuple[str, object]], **counts: object) -> None:
    """Keyword arguments come from notebooks, too: what is no text by its name, and what is no whole number."""
    wrong = [f"{name} must be text" for name, value in texts if not isinstance(value, str)]
    unlike = {name: n for name, n in counts.items() if isinstance(n, bool) or not isinstance(n, int | None)}
    wrong += [f"{name} must be a whole number (given: {count!r})" for name, count in unlike.items()]
    if wrong:
        raise SpecError([Problem(words) for words in wrong])


def options_for(job: Job) -> str:
    """The options of the command line that stand for a job, its layouts and trainer left open; empty where none do.

    >>> options_for(short_job("Qwen3-32B", 32, "h100", max_response="16k"))
    '--model Qwen3-32B --gpus 32 --gpu dgx_h100 --prompts 128 --max-prompt 2048 --max-response 16384'
    """
    task = job.tasks[0]
    try:
        per_node = job.devices_per_node or load_cluster(str(job.cluster)).devices_per_node
        given: dict[str, Any] = {
            "model": job.architecture, "gpus": (job.nodes or 1) * per_node, "gpu": job.cluster,
            "framework": job.framework, "algorithm": job.algorithm, "mode": ",".join(job.modes),
            "workload": task.workload,
            "prompts": task.prompts_per_step[0], "group": task.group_size[0],
            "mini_batch": task.mini_batch and task.mini_batch[0], "max_prompt": task.max_prompt_tokens,
            "max_response": task.max_response_tokens[0], "like": job.like,
        }  # fmt: skip
        again = short_job(**{name: value for name, value in given.items() if value is not None})
    except RlperfError:
        return ""
    theirs = {"name", "pools", "trainer_backends"}  # what is left open
    if again.model_dump(exclude=theirs) != job.model_dump(exclude=theirs):
        return ""
    usual = {name: each.default for name, each in signature(short_job).parameters.items()}
    always = ("model", "gpus", "gpu", "prompts", "max_prompt", "max_response")
    said = {name: value for name, value in given.items() if name in always or value not in (None, usual[name])}
    return " ".join(f"--{name.replace('_', '-')} {quote(str(value))}" for name, value in said.items())


def planned_anew(job: Job, files: Sequence[str]) -> str:
    """The command that plans a job with layouts and trainer left open; empty where there is none.

    No option says that a job has no KL term: where it alone differs, the job is imported from its own files.

    >>> job = short_job("Qwen3-32B", 32, "h100").model_copy(update={"reference": False})
    >>> planned_anew(job, ["run.sh"])
    'rlperf import run.sh --cluster dgx_h100 --workload math --out job.yaml, planned without trainer_backends and pools'
    """
    if asked := options_for(job):
        return f"rlperf plan {asked} --out plan/"
    if not files or not options_for(job.model_copy(update={"reference": True})):
        return ""
    given = {"cluster": job.cluster, "workload": job.tasks[0].workload}
    said = [*map(quote, files), *(f"--{name} {quote(str(value))}" for name, value in given.items())]
    return f"rlperf import {' '.join(said)} --out job.yaml, planned without trainer_backends and pools"


def _staleness(modes: Sequence[str], stated: int | None) -> int:
    """The limit as stated, or the least that the modes need; one that nobody knows, or none, is the job's to refuse."""
    if not modes or not set(modes) <= set(MODES):
        return 0
    traits = [MODES[mode] for mode in modes]
    if stated is None:
        return max(each.least_staleness for each in traits)
    if any(each.staleness(stated) == stated for each in traits):
        return stated
    open_modes = " or ".join(name for name, each in MODES.items() if each.lag is None)
    lag = max(each.lag or 0 for each in traits)
    behind = f"mode {', '.join(modes)} trains on samples {lag} policy versions behind, not {stated}"
    raise SpecError(Problem(f"staleness: {behind}", suggestion=f"leave it out, or mode {open_modes}"))


def job_text(job: Job) -> str:
    """The job as a commented file for somebody who will go on from it; it reads back as the same job."""
    task = job.tasks[0]
    plain = job.model_dump(mode="json")
    batch = plain["tasks"][0]
    lines = [
        "# A scalar is pinned, a list or range is open, what is left out is the planner's choice.",
        "# All fields: docs/interfaces.md, or `rlperf schema job`.",
        f"name: {_scalar(job.name)}",
        f"architecture: {_scalar(job.architecture)}    # shipped or published name, or the path of a config.json",
        *([f"like: {_scalar(job.like)}    # family that an unknown model_type is read as"] if job.like else []),
        f"cluster: {_scalar(job.cluster)}    # of `rlperf profiles list`, or generic:DEVICE, or a file",
        f"nodes: {job.nodes}",
        *([f"devices_per_node: {job.devices_per_node}"] if job.devices_per_node else []),
        f"algorithm: {job.algorithm}    # grpo, dapo, ppo",
        f"framework: {_scalar(job.framework)}    # with ==version if it matters",
        f"modes: [{', '.join(job.modes)}]    # several are compared: {', '.join(MODES)}",
        f"limits: {{staleness: {job.limits.staleness}}}    # policy versions that a trained sample may be behind",
        "objective: step_time    # or usd_per_step, ... with {minimize: step_time, risk: 1} the 95th percentile counts",
        "tasks:",
        f"  - name: {task.name}",
        f"    workload: {_scalar(task.workload)}    # preset, fitted model, or your own lengths (JSONL, CSV, Parquet)",
        f"    prompts_per_step: {batch['prompts_per_step']}    # times group_size = responses per rl_step",
        f"    group_size: {batch['group_size']}",
        *([f"    mini_batch: {batch['mini_batch']}    # prompts per optimizer update"] if task.mini_batch else []),
        f"    max_prompt_tokens: {task.max_prompt_tokens}",
        f"    max_response_tokens: {batch['max_response_tokens']}    # a list lets the planner choose: [8192, 16384]",
        "# pools:    # pin or open what you know already",
        "#   - {role: rollout, layout: {tensor_parallel: [2, 4]}}",
        "#   - {role: trainer, layout: {pipeline_parallel: 1}}",
        "# horizon: {rl_steps: 200}    # of the run, where a number of rl_steps is known",
    ]
    return "\n".join(lines) + "\n"


def _scalar(text: str) -> str:
    """A text as YAML writes it, quoted where it must be."""
    return yaml.safe_dump(text, allow_unicode=True, width=1000).split("\n...")[0].rstrip("\n")
