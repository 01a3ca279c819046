"""What would fit where nothing does for want of memory: the least change of each kind, every one screened.

Kinds, the least first: logits in chunks, states on the host, more devices, adapters in place of all weights, a smaller
model of the family. Each is tried by itself on the job as it is asked.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, get_args

from rlperf.errors import InfeasibleError, SpecError
from rlperf.plan.question.context import Context
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.screen import screen
from rlperf.plan.size_offers import Resolve
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.specs.pool import Offload
from rlperf.specs.profiles import architecture_names, architecture_reading, load_cluster
from rlperf.told import Tell, quiet

ON_A_NODE, NODES = (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of devices, and of nodes, that are tried."""
MOST_TIMES = 32
"""Times the job's devices at most."""
LORA_RANK = 32
_SIZE = re.compile(r"(.*?[-_])(\d+(?:\.\d+)?)B(-A\d+(?:\.\d+)?B)?")
"""A shipped name: its series, and its size in 1e9 parameters."""


def with_what_fits(error: InfeasibleError, job: Job, ask: Resolve, report: Tell | None = None) -> InfeasibleError:
    """The refusal with what would fit, where it is for want of memory; else as it is."""
    if not error.lacks_memory:
        return error
    fits = what_fits(job, ask, report or quiet)
    return InfeasibleError(error.message, error.rejections, error.nearest_miss, lacks_memory=True, fits=fits)


def what_fits(job: Job, ask: Resolve, report: Tell) -> tuple[str, ...]:
    """Changes of a job under each of which it has a candidate, in words; empty where none of them is enough."""

    def fits(changed: Job) -> Configuration | None:
        try:
            return first_candidate(*ask(changed))
        except SpecError:  # the framework has no key for it, or the batch does not divide
            return None

    found = []
    kinds = _chunked, _offloaded, _on_more, _with_adapters, _smaller
    for number, look in enumerate(kinds):
        report(number / len(kinds), "nothing fits: looking for what would")
        if words := look(job, fits):
            found.append(words)
    return tuple(found)


def first_candidate(context: Context, facts: FrameworkFacts | None) -> Configuration | None:
    """The best screened candidate of the job's first task, where all of its tasks have one."""
    best = None
    for task in context.tasks:
        rl_steps = (0, context.job.horizon.group - 1) if context.job.horizon.group else None
        demands = tuple(task.source.demand(batch, rl_steps, context.job.seed) for batch in task.batches)
        found = screen(context, task, demands, facts, keep=1).configurations
        if not found:
            return None
        best = best or found[0]
    return best


Fits = Callable[[Job], Configuration | None]


def _trainer_with(job: Job, part: str, **values: Any) -> Job:
    trainer = job.pool("trainer")
    changed = trainer.model_copy(update={part: getattr(trainer, part).model_copy(update=values)})
    others = tuple(pool for pool in job.pools if pool.role != "trainer")
    return job.model_copy(update={"pools": (*others, changed)})


def _chunked(job: Job, fits: Fits) -> str:
    """Logits that are never whole: of long sequences they are more than all weights."""
    stated = job.pool("trainer").settings.chunked_loss is not None
    found = None if stated else fits(_trainer_with(job, "settings", chunked_loss=True))
    return "" if found is None else "with the trainer's settings.chunked_loss: true"


def _offloaded(job: Job, fits: Fits) -> str:
    """States or activations on the host."""
    found = fits(_trainer_with(job, "layout", offload=get_args(Offload)))
    if found is None:
        return ""
    return f"with the trainer's layout.offload: {found.pool('trainer').layout.offload}"


def _on_more(job: Job, fits: Fits) -> str:
    """The fewest more devices of the kind; more of them fit what fewer do."""
    if any(pool.devices or pool.cluster for pool in job.pools):
        return ""
    try:
        now = load_cluster(job.cluster, nodes=job.nodes, devices_per_node=job.devices_per_node).devices
        node = load_cluster(job.cluster).devices_per_node
    except SpecError:  # a device of the job's own folder
        return ""
    tried = {*(n for n in ON_A_NODE if n < node), *(node * nodes for nodes in NODES)}
    counts = sorted(n for n in tried if now < n <= MOST_TIMES * now)

    def on(count: int) -> Job:
        nodes, each = (1, count) if count < node else (count // node, None)
        return job.model_copy(update={"nodes": nodes, "devices_per_node": each})

    least = bisect_left(counts, True, key=lambda count: fits(on(count)) is not None)
    return f"on {counts[least]} devices" if least < len(counts) else ""


def _with_adapters(job: Job, fits: Fits) -> str:
    """Adapters in place of all weights; on more devices, where those are fewer than all weights need."""
    if job.pool("trainer").settings.lora_rank:
        return ""
    adapted, words = _trainer_with(job, "settings", lora_rank=LORA_RANK), f"settings.lora_rank: {LORA_RANK}"
    if fits(adapted) is not None:
        return f"with LoRA (the trainer's {words})"
    more = _on_more(adapted, fits)
    return f"with LoRA {more} (the trainer's {words})" if more and more != _on_more(job, fits) else ""


def _smaller(job: Job, fits: Fits) -> str:
    """The largest shipped model of the series that is smaller."""
    names = _smaller_names(job.architecture)
    least = bisect_left(names, True, key=lambda name: fits(job.model_copy(update={"architecture": name})) is not None)
    return f"with {names[least]}" if least < len(names) else ""


def _smaller_names(name: str) -> Sequence[str]:
    """Shipped models of the same series, those below its size, the largest first.

    >>> _smaller_names("Qwen/Qwen2.5-7B-Instruct")
    ['Qwen2.5-3B', 'Qwen2.5-1.5B', 'Qwen2.5-0.5B']
    """
    try:
        series = _SIZE.fullmatch(architecture_reading(name).shape)
    except SpecError:
        return []
    if series is None:
        return []
    own, most, sizes = series[1], float(series[2]), dict[str, float]()
    for other in architecture_names():
        size = _SIZE.fullmatch(other)
        if size and size[1] == own and float(size[2]) < most:
            sizes[other] = float(size[2])
    return sorted(sizes, key=lambda other: -sizes[other])
