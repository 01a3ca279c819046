"""Tasks mixed in one batch (``sharing: mixed``): rollouts share the engines, sequences the optimizer updates.

The mix is one task to the planner: as many prompts as all together, drawn from every task's own lengths and shuffled by
groups, so that an update sees each task in its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlperf.cost.layers.vision import Images
from rlperf.errors import Problem, SpecError
from rlperf.layout import IntArray
from rlperf.plan.question.demand import LengthSource, batches
from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.specs.job import Task
from rlperf.workload import LengthModel, LengthTable, concat


@dataclass(frozen=True)
class Part:
    """One task of a mix: its lengths, and the one batch that it states."""

    source: LengthSource
    batch: Batch


@dataclass(frozen=True, eq=False)
class MixedSource(LengthSource):
    """Lengths of several tasks in one rl_step."""

    parts: tuple[Part, ...] = ()

    def provenance(self) -> str:
        """Where the lengths are from, in a line."""
        return "mixed in one batch: " + "; ".join(part.source.provenance() for part in self.parts)

    @property
    def turns(self) -> int:
        """Most turns of a trajectory of any task."""
        return max(part.source.turns for part in self.parts)

    def reward_s(self, seed: int) -> tuple[float, str | None]:
        """The slowest task's reward time [s], and what was assumed about it."""
        found = [part.source.reward_s(seed) for part in self.parts]
        said = [note for _, note in found if note]
        return max(seconds for seconds, _ in found), "; ".join(said) or None

    @property
    def each(self) -> tuple[LengthSource, ...]:
        """Those of its tasks, in the order of `Demand.of_tasks`."""
        return tuple(part.source for part in self.parts)

    def drifts(self, rl_steps: int) -> bool:
        """Whether those of any task do."""
        return any(part.source.drifts(rl_steps) for part in self.parts)

    def _by_what_is_asked(self) -> list[int]:
        """Numbers of its tasks in an order that neither their names nor their places have a part in.

        What is shuffled lies otherwise in another draw for every order of the tasks.
        """

        def asked(index: int) -> tuple[object, ...]:
            part = self.parts[index]
            own = part.batch
            return part.source.task.workload, own.prompts, own.generated, own.max_prompt_tokens, own.max_response_tokens

        return sorted(range(len(self.parts)), key=asked)

    def _demand(self, batch: Batch, rl_steps: tuple[int, int] | None, seed: int) -> Demand:
        found = [part.source.demand(part.batch, rl_steps, seed) for part in self.parts]
        count = max(len(demand.tables) for demand in found)
        drawn = [(found[index], self.parts[index].batch) for index in self._by_what_is_asked()]
        tables = tuple(
            shuffled(
                [demand.tables[number % len(demand.tables)] for demand, _ in drawn],
                [own.prompts for _, own in drawn],
                batch,
                np.random.default_rng(seed + number),
            )
            for number in range(count)
        )
        sizes = [part.batch.generated * part.batch.group_size for part in self.parts]
        cut = float(np.average([demand.truncated_fraction for demand in found], weights=sizes))
        notes = dict.fromkeys(note for demand in found for note in demand.notes)
        reward = max(demand.reward_s for demand in found)
        name = self.task.name
        said, images = tuple(notes), _images(found)
        return Demand(name, rl_steps or (0, 0), batch, tables, cut, reward, said, images, of_tasks=tuple(found))


def shuffled(
    tables: Sequence[LengthTable], trained: Sequence[int], batch: Batch, rng: np.random.Generator
) -> LengthTable:
    """One rl_step of several: groups in a drawn order, those that are trained before those that a filter drops.

    Parameters
    ----------
    tables : one whole rl_step of every task
    trained : prompts of each that are trained on; they stand first
    batch : of all together
    """
    several = any(table.multi_turn for table in tables)
    joined = concat([_alike(table, batch.max_response_tokens, several) for table in tables])
    sizes = [table.n_groups for table in tables]
    first = np.concatenate([np.arange(size) < count for size, count in zip(sizes, trained, strict=True)])
    place = np.empty(len(first), dtype=np.int64)
    for kept, start in ((first, 0), (~first, int(first.sum()))):
        place[kept] = start + rng.permutation(int(kept.sum()))
    group = place[joined.group_index()[0]]
    order = np.argsort(group, kind="stable")
    joined = replace(joined.where(order), group=group[order])
    return joined if joined.trajectory is None else replace(joined, trajectory=_renumbered(joined.trajectory))


def _renumbered(trajectory: IntArray) -> IntArray:
    """Trajectories numbered in the order in which they stand."""
    _, first, index = np.unique(trajectory, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[index.reshape(-1)]


def _alike(table: LengthTable, cap: int, several: bool) -> LengthTable:
    """The table with the columns and the cap of the mix; its own cap has cut it already."""
    n = table.n
    none = None if not several else np.zeros(n, dtype=np.int64)
    latency = None if not several else np.zeros(n)
    return replace(
        table,
        rl_step=np.zeros(n, dtype=np.int64),
        max_response_tokens=cap,
        cached_tokens=None,
        trajectory=np.arange(n) if several and table.trajectory is None else table.trajectory,
        append_tokens=none if table.append_tokens is None else table.append_tokens,
        tool_latency_s=latency if table.tool_latency_s is None else table.tool_latency_s,
    )


def _images(found: Sequence[Demand]) -> Images | None:
    """Images of all prompts together: their share of the prompt tokens, and the mean size of one."""
    tokens = [demand.images.share * demand.prompt_tokens if demand.images else 0.0 for demand in found]
    if not sum(tokens):
        return None
    count = sum(t / demand.images.tokens for t, demand in zip(tokens, found, strict=True) if demand.images)
    return Images(sum(tokens) / sum(demand.prompt_tokens for demand in found), sum(tokens) / count)


def mixed(tasks: Sequence[tuple[Task, LengthSource, Sequence[Batch]]]) -> tuple[Task, MixedSource, list[Batch]]:
    """Tasks with their lengths and batches as one task, and its batches: one for each number of trajectories at once.

    Raises
    ------
    SpecError : a task that leaves its batch open, or what one batch cannot have twice
    """
    problems = [
        Problem(f"task {task.name} leaves its batch open", suggestion="state one value of each setting")
        for task, _, found in tasks
        if len({replace(batch, max_trajectories=None) for batch in found}) > 1
    ]
    each = [found[0] for _, _, found in tasks]
    for name, values in (
        ("group_size", [batch.group_size for batch in each]),
        ("updates per rl_step (prompts_per_step / mini_batch)", [batch.updates for batch in each]),
        ("over_provision", [batch.over_provision for batch in each]),
        ("max_trajectories", [_numbers(task.max_trajectories) for task, _, _ in tasks]),
        ("architecture", [task.architecture for task, _, _ in tasks]),
    ):
        if len(set(values)) > 1:
            theirs = ", ".join(
                f"{task.name} {value or 'unset'}" for (task, _, _), value in zip(tasks, values, strict=True)
            )
            hint = "state the same in all, or sharing: time"
            problems.append(Problem(f"tasks of a mixed batch have one {name}: {theirs}", suggestion=hint))
    problems += [
        Problem(
            f"task {task.name}: generation_batch is that of a batch of its own", suggestion="state generated_prompts"
        )
        for (task, _, _), batch in zip(tasks, each, strict=True)
        if batch.generation_batch is not None
    ]
    if problems:
        raise SpecError(problems)
    words = (
        f"{b.prompts} x {b.group_size} {task.workload} ({b.max_prompt_tokens} + {b.max_response_tokens})"
        for (task, _, _), b in zip(tasks, each, strict=True)
    )
    whole = Task(
        name=" + ".join(task.name for task, _, _ in tasks),
        workload=", ".join(words),
        architecture=tasks[0][0].architecture,
        prompts_per_step=(sum(batch.prompts for batch in each),),
        group_size=(each[0].group_size,),
        mini_batch=(sum(batch.mini_batch for batch in each),),
        generated_prompts=sum(batch.generated for batch in each),
        max_prompt_tokens=max(batch.max_prompt_tokens for batch in each),
        max_response_tokens=(max(batch.max_response_tokens for batch in each),),
        over_provision=(each[0].over_provision,),
        max_trajectories=tasks[0][0].max_trajectories,
    )
    parts = tuple(Part(source, batch) for (_, source, _), batch in zip(tasks, each, strict=True))
    source = MixedSource(whole, None, _no_law, all(part.source.sees for part in parts), parts=parts)
    return whole, source, batches(whole)


def _numbers(given: tuple[int, ...] | None) -> str:
    """Numbers that a task leaves open, as a sentence has them.

    >>> _numbers((256, 512)), _numbers(None)
    ('256 or 512', '')
    """
    return " or ".join(map(str, given or ()))


def _no_law() -> LengthModel:
    raise SpecError("a mixed batch has no length law of its own: ask of its tasks one by one")
