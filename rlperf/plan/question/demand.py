"""Demand: the lengths that a task puts on the cluster in a group of rl_steps, as a few whole rl_steps.

A recorded rl_step is used as it is where the batch is the recorded one; another batch is drawn from its groups, whole
groups at a time, so that what samples of one prompt share is kept. A maximum length above the recording's asks the
fitted length model, because a response that was cut says only that it would have gone on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import NoReturn

import numpy as np

from rlperf.cost.layers.vision import Images
from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.layout import BoolArray
from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.specs.job import ImageTokens, Task
from rlperf.specs.reader import below, is_there
from rlperf.units import human_share
from rlperf.workload import PRESETS, LengthModel, LengthTable, Recording, concat, load_model, read_recording
from rlperf.workload.fitting import fit_model
from rlperf.workload.records import reward_max_over_ranks
from rlperf.workload.representative import representative
from rlperf.workload.sampling import cap_that_cuts, sample_lengths
from rlperf.workload.stages import Filtering

REPLICATES = 4
"""rl_steps drawn per group of rl_steps: enough that one runaway does not decide, few enough to stay fast."""
MOST_SEQUENCES = 1 << 17
"""Sequences of one rl_step; each is simulated, and no run has had as many."""
DRAWN = 8
"""Demands that a source remembers."""
DRAWS, DRAWN_SEQUENCES = 64, 32_768
"""Draws that those few stand for, and the sequences of them all: as many as take a fraction of a second."""
UNCUT = 1 << 17
"""A maximum length that draws are told apart at [tokens]."""
LARGE, LARGE_REPLICATES = 65_536, 2
"""Trajectories above which an rl_step is an average of its own, and how many of them then stand for all."""


def _generated(task: Task, prompts: int, per_trained: float) -> int:
    """Prompts rolled out for those trained on: as stated, or as many as filtering asks for, in whole batches."""
    if task.generation_batch is None:
        return max(task.generated_prompts or round(prompts * per_trained), prompts)
    wanted = max(task.generated_prompts or 0, round(prompts * per_trained), prompts)
    return -(-wanted // task.generation_batch) * task.generation_batch


def batches(task: Task, generated_per_trained: float = 1.0) -> list[Batch]:
    """Every combination of the batch settings that the task leaves open.

    ``generated_per_trained``: prompts rolled out per prompt trained on, where filtering drops some (DAPO).
    """
    found = []
    opened = product(
        task.prompts_per_step, task.group_size, task.max_response_tokens, task.over_provision,
        task.max_trajectories or (None,),
    )  # fmt: skip
    for prompts, group, cap, over, most in opened:
        for mini in task.mini_batch or (prompts,):
            if mini <= prompts and prompts % mini == 0:
                generated = _generated(task, prompts, generated_per_trained)
                if (sequences := generated * group * over) > MOST_SEQUENCES:
                    simulated = f"at most {MOST_SEQUENCES:,} are simulated"
                    raise SpecError(f"task {task.name}: {sequences:,.0f} sequences in an rl_step, {simulated}")
                limits = task.max_prompt_tokens, cap, generated, over, most, task.generation_batch
                found.append(Batch(prompts, group, mini, *limits))
    if not found:
        prompts = max(task.prompts_per_step)
        near = [n for n in range(1, prompts + 1) if prompts % n == 0]
        near.sort(key=lambda n: abs(n - max(task.mini_batch or (prompts,))))
        raise SpecError(
            f"task {task.name}: mini_batch {', '.join(map(str, task.mini_batch or ()))} does not divide "
            f"prompts_per_step {', '.join(map(str, task.prompts_per_step))} (write {' or '.join(map(str, near[:2]))})"
        )
    return found


def shared_out(task: Task, found: list[Batch], jobs: int) -> list[Batch]:
    """Batches whose prompts several LoRA jobs share evenly; an update holds prompts of one.

    Raises
    ------
    SpecError : no batch can be shared out so
    """
    if jobs == 1:
        return found
    own = [replace(each, lora_jobs=jobs) for each in found if each.prompts % jobs == 0]
    if task.mini_batch is None:
        return [replace(each, mini_batch=each.prompts // jobs) for each in own] or _not_shared(task, jobs)
    return [each for each in own if each.prompts // jobs % each.mini_batch == 0] or _not_shared(task, jobs)


def _not_shared(task: Task, jobs: int) -> NoReturn:
    said = f"task {task.name}: prompts_per_step {task.prompts_per_step} and mini_batch {task.mini_batch}"
    raise SpecError(f"{said} give {jobs} LoRA jobs no whole updates of their own")


@dataclass(frozen=True, eq=False)
class LengthSource:
    """Where a task's lengths come from: a recording with its fitted model, or a model alone."""

    task: Task
    recording: Recording | None
    fit: Callable[[], LengthModel]
    sees: bool = True
    _drawn: dict[tuple[Batch, tuple[int, int] | None, int], Demand] = field(default_factory=dict, repr=False)
    _stand_for_many: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, task: Task, folder: Path | None = None, *, sees: bool = True) -> LengthSource:
        """Read the workload of a task: a preset, a fitted model file, or recorded files below ``folder``.

        ``sees``: the policy has a vision tower; without one, tokens of images count as text.
        """
        if task.workload in PRESETS:
            _nothing_recorded(task, "a preset")
            return cls(task, None, lambda: load_model(task.workload), sees)
        path = below(folder, Path(task.workload).expanduser())
        if not is_there(path):
            known = f"a path, or one of {', '.join(PRESETS)}"
            meant = did_you_mean(task.workload, PRESETS)
            hint = f"{meant} It is {known}" if meant else known
            raise SpecError(Problem(f"task {task.name}: no such workload: {task.workload!r}", suggestion=hint))
        if path.is_file() and path.suffix in (".yaml", ".yml"):
            _nothing_recorded(task, "a fitted law")
            model = load_model(path)
            return cls(task, None, lambda: model, sees)
        recording = read_recording([path])
        table = recording.lengths
        if task.rl_steps:
            missing = sorted(set(task.rl_steps) - set(table.steps().tolist()))
            if missing:
                raise SpecError(Problem(f"task {task.name}: rl_steps {missing} are not in the recording", str(path)))
            recording = replace(recording, lengths=concat([table.step(step) for step in task.rl_steps]))
        if recording.lengths.n == 0:
            raise SpecError(Problem(f"task {task.name}: the recording is empty", str(path)))
        return cls(task, recording, lambda: fit_model(recording), sees)

    @cached_property
    def model(self) -> LengthModel:
        """The length model: shipped, read or fitted to the recording when it is first asked for."""
        return self.fit()

    @property
    def table(self) -> LengthTable | None:
        """The recorded lengths, if any."""
        return None if self.recording is None else self.recording.lengths

    def provenance(self) -> str:
        """Where the lengths are from, in a line."""
        if self.recording is not None:
            unread = ", ".join(self.recording.unread[:8])
            said = f"{self.task.name}: recorded, {self.recording.lengths.n:,} responses"
            if self.turns > 1 and self.recording.lengths.tool_latency_s is None:
                said += "; no column tool_latency_s: tools take no time"
            return said + (f"; columns that are not read: {unread}" if unread else "")
        return f"{self.task.name}: lengths {self.model.provenance.headline()}"

    @property
    def each(self) -> tuple[LengthSource, ...]:
        """One of every task: of a mixed batch several."""
        return (self,)

    @property
    def turns(self) -> int:
        """Most turns of a trajectory; 1: its prompts are answered at once."""
        if self.table is not None:
            several = self.table.trajectory
            return 1 if several is None else int(np.unique(several, return_counts=True)[1].max(initial=1))
        return 1 if self.model.turns is None else len(self.model.turns.turn_probability)

    def generated_per_trained(self) -> float:
        """Prompts rolled out per prompt trained on; above 1 where a DAPO workload says what filtering drops."""
        filtering = None
        if self.recording is not None and self.recording.filters:
            filtering = Filtering.fit(self.recording.filters)
        elif self.recording is None:
            filtering = self.model.filtering
        return 1.0 if filtering is None else filtering.rollouts_per_trained

    def reward_s(self, seed: int) -> tuple[float, str | None]:
        """Mean reward time of an rl_step [s], and what was assumed about it."""
        if self.task.reward_s is not None:
            return self.task.reward_s, None
        if self.recording is not None and self.recording.rewards:
            return float(reward_max_over_ranks(self.recording.rewards).mean()), None
        law = None if self.recording is not None else self.model.reward
        if law is not None:
            return float(law.sample(64, seed).mean()), f"{self.task.name}: reward time from the workload's law"
        return 0.0, f"{self.task.name}: no reward time stated, 0 s taken"

    def images(self) -> tuple[Images | None, str | None]:
        """Images of the prompts, stated by the task or by a workload that is not a recording; what was assumed."""
        stated = self.task.images
        if stated is None and self.recording is None and self.model.vision_fraction:
            stated = ImageTokens(share=self.model.vision_fraction, tokens=self.model.image_tokens)
        if stated is None or not stated.share:
            return None, None
        share = f"{self.task.name}: {human_share(stated.share)} of a prompt's tokens are images"
        if not self.sees:
            return None, f"{share}, counted as text: the architecture has no vision tower"
        words = f"{share} (or pairs of frames) of {stated.tokens:,.0f} tokens"
        return Images(stated.share, stated.tokens), words if self.task.images is None else None

    def demand(self, batch: Batch, rl_steps: tuple[int, int] | None, seed: int) -> Demand:
        """The lengths of ``batch`` in a group of rl_steps (first, last); None: whenever, all that was recorded.

        The mini-batch changes no length: batches that differ in it alone share their tables.
        """
        key = (replace(batch, mini_batch=batch.prompts), rl_steps, seed)
        if key not in self._drawn:
            if len(self._drawn) >= DRAWN:
                self._drawn.pop(next(iter(self._drawn)))
            self._drawn[key] = self._demand(key[0], rl_steps, seed)
        return replace(self._drawn[key], batch=batch)

    def _demand(self, batch: Batch, rl_steps: tuple[int, int] | None, seed: int) -> Demand:
        notes = [self.provenance()]
        cap = batch.max_response_tokens
        recorded_cap = None if self.table is None else self.table.max_response_tokens
        beyond = recorded_cap is not None and cap > recorded_cap and self._cut_fraction() > 0
        recorded = [] if self.table is None or beyond else self._within(rl_steps)
        if recorded:
            kept = np.linspace(0, len(recorded) - 1, _replicates(batch, len(recorded))).round().astype(int)
            if len(kept) < len(recorded):
                notes.append(f"{self.task.name}: {len(kept)} of {len(recorded)} recorded rl_steps, as each is large")
            recorded = [recorded[k] for k in kept]
            each = -(-_replicates(batch, REPLICATES) // len(recorded))
            tables = tuple(as_batch(self.task.name, recorded, batch, seed, notes, each))
        else:
            middle = _middle(rl_steps)
            tables = tuple(self._sampled(batch, middle, seed + k) for k in self._draws(batch, seed))
            if beyond:
                law = f"lengths above the recorded maximum ({recorded_cap}) from its fitted law"
                notes.append(f"{self.task.name}: {law}")
            elif self.table is not None:
                notes.append(f"{self.task.name}: rl_steps beyond the recording are forecast from its fitted law")
        cut = float(np.mean([np.mean(_cut(table, batch)) for table in tables]))
        # trajectories of turns end where the context is full that files give the engine; the same ones, whatever it is
        tables = tuple(table.within(batch.longest_tokens) for table in tables)
        reward, assumed = self.reward_s(seed)
        images, seen = self.images()
        notes += [note for note in (assumed, seen) if note]
        return Demand(
            self.task.name, rl_steps or (0, 0), batch, tables, cut, reward, tuple(dict.fromkeys(notes)), images
        )

    def drifts(self, rl_steps: int) -> bool:
        """Whether the first so many rl_steps reach past the recorded ones, along a trend of their lengths."""
        return self._goes_on(rl_steps - 1)

    def _goes_on(self, rl_step: int) -> bool:
        """Whether lengths follow a trend to an rl_step past the recorded ones."""
        if self.table is not None and rl_step <= int(self.table.steps().max()):
            return False
        try:
            return self.model.drift.trend
        except SpecError:  # every recorded response was cut: no law is known
            return False

    def cap_that_cuts(self, share: float, rl_steps: tuple[int, int] | None) -> int | None:
        """The least maximum length [tokens] that cuts at most ``share`` of responses; None where none is known to.

        ``rl_steps`` : of which group, as in `demand`
        """
        inside = [] if self.table is None else self._within(rl_steps)
        if inside and self._cut_fraction() <= share:
            longest = np.concatenate([table.trajectories().response_tokens for table in inside])
            return int(np.ceil(np.quantile(longest, 1.0 - share) / 1024.0)) * 1024
        try:
            return cap_that_cuts(self.model, share, rl_step=_middle(rl_steps))
        except SpecError:  # every recorded response was cut: no law is known
            return None

    def _cut_fraction(self) -> float:
        return 0.0 if self.table is None else float(np.mean(self.table.truncated))

    def _sampled(self, batch: Batch, rl_step: int | None, seed: int) -> LengthTable:
        return sample_lengths(
            self.model,
            batch.generated,
            batch.group_size,
            rl_step=rl_step,
            max_prompt_tokens=batch.max_prompt_tokens,
            max_response_tokens=batch.max_response_tokens,
            seed=seed,
        )

    def _draws(self, batch: Batch, seed: int) -> tuple[int, ...]:
        """Draws that stand for many; whatever cuts a response and whenever it is, the same ones."""
        count = _replicates(batch, REPLICATES)
        many = min(DRAWN_SEQUENCES // (batch.generated * batch.group_size), DRAWS)
        if many <= count:
            return tuple(range(count))
        key = (batch.generated, batch.group_size, batch.max_prompt_tokens, seed)
        if key not in self._stand_for_many:
            uncut = replace(batch, max_response_tokens=UNCUT)
            drawn = [self._sampled(uncut, None, seed + k) for k in range(many)]
            self._stand_for_many[key] = tuple(representative(drawn, count).tolist())
        return self._stand_for_many[key]

    def _within(self, rl_steps: tuple[int, int] | None) -> list[LengthTable]:
        """Recorded rl_steps that stand for a group: those inside; none where its middle lies past them, on a trend."""
        assert self.table is not None
        middle = _middle(rl_steps)
        if middle is not None and self._goes_on(middle):
            return []
        steps = self.table.steps()
        inside = steps if rl_steps is None else steps[(steps >= rl_steps[0]) & (steps <= rl_steps[1])]
        return [self.table.step(int(step)) for step in inside]


def _nothing_recorded(task: Task, what: str) -> None:
    """``rl_steps`` chooses among recorded ones, and says nothing of when a task runs."""
    if task.rl_steps:
        words = f"task {task.name}: rl_steps are those of a recording to use, and {task.workload} is {what}"
        hint = "leave them out; the rl_steps that are planned are horizon.rl_steps, of all tasks"
        raise SpecError(Problem(words, suggestion=hint))


def _middle(rl_steps: tuple[int, int] | None) -> int | None:
    """The rl_step that stands for a group (first, last) beyond the recorded ones."""
    return None if rl_steps is None else (rl_steps[0] + rl_steps[1]) // 2


def as_batch(
    task: str, recorded: Sequence[LengthTable], batch: Batch, seed: int, notes: list[str], each: int = 1
) -> list[LengthTable]:
    """Recorded rl_steps as ``batch`` has them: as they are where they hold it, else drawn from their groups.

    ``each`` : rl_steps drawn from one that is recorded: few recorded ones are drawn from until one draw's luck is small
    """
    tables = [_clipped(table, batch) for table in recorded]
    if all(t.n_groups == batch.generated and t.group_size == batch.group_size for t in tables):
        return tables
    rng = np.random.default_rng(seed)
    notes.append(f"{task}: groups redrawn from the recording for {batch.generated} x {batch.group_size}")
    if batch.group_size > 1 and any(t.n_groups == t.trajectories().n for t in tables):
        notes.append(f"{task}: the recording has no groups: members of one are drawn apart")
    return [drawn for table in recorded for drawn in _redraws(table, batch, rng, each)]


def _replicates(batch: Batch, most: int) -> int:
    """Whole rl_steps that stand for a group of them."""
    return min(most, LARGE_REPLICATES) if batch.generated * batch.group_size > LARGE else most


def _cut(table: LengthTable, batch: Batch) -> BoolArray:
    """Which trajectories end at a maximum: of what they write, or of turns the engine's of their context."""
    written = table.trajectories().response_tokens >= batch.max_response_tokens
    return written | (table.final_contexts >= batch.longest_tokens) if table.multi_turn else np.asarray(written)


def _clipped(table: LengthTable, batch: Batch) -> LengthTable:
    """Recorded lengths under the batch's maxima: longer responses are cut, longer prompts too."""
    if table.multi_turn:
        return table
    return replace(
        table,
        prompt_tokens=np.minimum(table.prompt_tokens, batch.max_prompt_tokens),
        response_tokens=np.minimum(table.response_tokens, batch.max_response_tokens),
        max_response_tokens=batch.max_response_tokens,
    )


def _redraws(table: LengthTable, batch: Batch, rng: np.random.Generator, count: int) -> list[LengthTable]:
    """Several draws that stand for many; the same ones whatever the maximum lengths are."""
    many = min(DRAWN_SEQUENCES // (batch.generated * batch.group_size), DRAWS) if count > 1 else 1
    drawn = [_redrawn(table, batch, rng) for _ in range(max(many, count))]
    return [_clipped(drawn[k], batch) for k in representative(drawn, count)]


def _redrawn(table: LengthTable, batch: Batch, rng: np.random.Generator) -> LengthTable:
    """``batch.generated`` groups of ``batch.group_size`` drawn with replacement: groups first, members inside them."""
    index, groups = table.group_index()
    if table.multi_turn:
        return _redrawn_trajectories(table, batch, rng)
    if groups == table.n and batch.group_size > 1:
        return _grouped(table, batch, rng)
    order = np.argsort(index, kind="stable")
    starts = np.searchsorted(index[order], np.arange(groups + 1))
    picked = rng.choice(groups, batch.generated, replace=batch.generated > groups)
    rows = []
    for group in picked:
        members = order[starts[group] : starts[group + 1]]
        rows.append(rng.choice(members, batch.group_size, replace=batch.group_size > members.size))
    flat = np.concatenate(rows)
    drawn = table.where(flat)
    return replace(drawn, group=np.repeat(np.arange(batch.generated), batch.group_size))


def _grouped(table: LengthTable, batch: Batch, rng: np.random.Generator) -> LengthTable:
    """Groups of a recording that has none: members are responses to different prompts, not one response many times.

    What members of a group share is not in such a recording, so they are drawn apart; each has its first one's prompt.
    """
    count = batch.generated * batch.group_size
    drawn = table.where(rng.choice(table.n, count, replace=count > table.n))
    groups = np.repeat(np.arange(batch.generated), batch.group_size)
    prompts = drawn.prompt_tokens[groups * batch.group_size]
    return replace(drawn, group=groups, prompt_tokens=prompts)


def _redrawn_trajectories(table: LengthTable, batch: Batch, rng: np.random.Generator) -> LengthTable:
    """The same for several turns: whole trajectories move together."""
    assert table.trajectory is not None
    first = table.trajectories()
    index, groups = first.group_index()
    picked = rng.choice(groups, batch.generated, replace=batch.generated > groups)
    _, dense = np.unique(table.trajectory, return_inverse=True)
    order = np.argsort(dense, kind="stable")
    turns = np.split(order, np.cumsum(np.bincount(dense))[:-1])
    drawn: list[int] = []
    for group in picked:
        members = np.flatnonzero(index == group)
        drawn += rng.choice(members, batch.group_size, replace=batch.group_size > members.size).tolist()
    sizes = [turns[member].size for member in drawn]
    numbers = np.arange(len(drawn))
    return replace(
        table.where(np.concatenate([turns[member] for member in drawn])),
        rl_step=np.zeros(sum(sizes), np.int64),
        group=np.repeat(numbers // batch.group_size, sizes),
        trajectory=np.repeat(numbers, sizes),
    )
