"""What was written is read again: values of the plan that the framework's own files do not hold are named as lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from rlperf.frameworks.adapter import Adapter, Limitation, read_run
from rlperf.frameworks.fields import Field
from rlperf.frameworks.keyless import POOLS
from rlperf.frameworks.run import Ref, Run, Value, ref
from rlperf.frameworks.sources import read_source
from rlperf.plan.answer.plan import Phase
from rlperf.specs.pool import ATTRIBUTES, TOLD, of_role

GENERATED = ref("batch.generated_prompts")
USUAL = {each.name: each.default for each in ATTRIBUTES} | {"cuda_graphs": True, "expert_dispatch": "nccl"}
"""What runs where neither a key nor the facts of a framework say otherwise; CUDA graphs are on in every engine, and
experts are dispatched to by nobody that is not told to."""
_OF_THE_RUN = (
    *map(ref, ("run.reference", "run.old_policy", "run.mode", "run.critic_devices")),
    *map(ref, ("batch.prompts_per_step", "batch.group_size", "batch.mini_batch", "batch.over_provision")),
    *map(ref, ("batch.max_prompt_tokens", "batch.max_response_tokens")),
    GENERATED,
)


def read_back(files: Mapping[str, str], adapter: Adapter, version: str) -> Run:
    """The run that a framework makes of rendered files, by the adapter's own reader."""
    configs = sorted(files, key=lambda name: (name.endswith(".sh"), name))
    with TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        source = read_source([Path(folder) / name for name in configs])
    return read_run(adapter, source, adapter.target(source, version))[0]


def unstated(
    planned: Run, back: Run, said: Sequence[Limitation], fields: Iterable[Field],
    runs: Mapping[Ref, Sequence[Value]] = MappingProxyType({}),
) -> list[Limitation]:  # fmt: skip
    """A limitation for every value that reads otherwise than it was planned, where none that was ``said`` speaks of it.

    What follows from others (data parallel, the ends of a pipeline), and a value that is not stated and is what every
    framework starts from, or may run (``runs``, `keyless_values`), is no loss. Nor are the prompts that are rolled out
    where files that state none filter groups: they follow from what that drops, and the header names them.
    """
    lost = []
    if planned.algorithm == "ppo" != back.algorithm:
        lost.append(Limitation("algorithm ppo", back.algorithm, "no critic, which the plan has"))
    unread = {entry.at for entry in fields if entry.unread and entry.backend in ("", planned.trainer.backend)}
    for at in _compared(planned):
        value, read = planned.value(at), back.value(at)
        if at in unread:
            continue
        usual = runs.get(at, (USUAL.get(at.name),))
        if value is None or value == read or (read is None and value in usual):
            continue
        filters = back.algorithm == "dapo" and not any("dynamic sampling" in one.asked for one in said)
        if any(_speaks_of(one, at, value) for one in said) or (at == GENERATED and read is None and filters):
            continue
        nearest = "no key states it, the framework's own default runs" if read is None else f"its files say {read}"
        lost.append(Limitation(f"{at} = {value}", nearest, "seconds and memory were predicted for the plan's"))
    return lost + _scoring(planned, back.trainer.scoring_budget)


def _scoring(planned: Run, read: int | None) -> list[Limitation]:
    """Where packed training alone is cut by tokens: files that cut both so, otherwise than by as many whole lengths."""
    ours, count = planned.trainer, planned.trainer.scoring_microbatch
    if count is None or ours.token_budget is None or ours.scoring_token_budget is not None:
        return []
    if read in (None, count * planned.batch.longest_tokens):
        return []
    asked = f"scoring in microbatches of {count} sequences"
    return [Limitation(asked, f"of {read} tokens", "seconds and memory were predicted for the plan's")]


def _compared(run: Run) -> Iterator[Ref]:
    yield from _OF_THE_RUN
    for pool in POOLS:
        if pool == "trainer" or not run.traits.shares_devices:
            yield ref(f"{pool}.devices")
        for each in of_role(pool):
            by_tokens = pool == "trainer" and run.trainer.token_budget is not None and each.name == "microbatch"
            if each.decided != "derived" and each.name not in ("data_parallel", *TOLD) and not by_tokens:
                yield ref(f"{pool}.{each.name}")


def _speaks_of(limitation: Limitation, at: Ref, value: Value) -> bool:
    """Whether a limitation names the field, or its value (``fsdp2 trainer``, ``mode async``)."""
    words = limitation.asked.replace("_", " ")
    return at.name.replace("_", " ") in words or (isinstance(value, str) and value in limitation.asked)


def own_maxima(phase: Phase) -> list[Limitation]:
    """Tasks of a mixed batch that end earlier than the longest of them: files have one maximum for all."""
    cap = phase.settings.max_response_tokens
    return [
        Limitation(
            f"max_response_tokens {each.max_response_tokens:,} of {each.task}", f"{cap:,}, the batch's",
            "responses longer than predicted, unless your rollout ends them (max_tokens of each prompt)",
        )
        for each in (phase.responses.tasks if phase.responses else ())
        if each.max_response_tokens < cap
    ]  # fmt: skip
