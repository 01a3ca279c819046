"""Run: one configuration in rlperf's own words, between a Plan's phase, a Job and a framework's keys.

`Run` is a frozen object of typed groups; a value that a file may leave out is None there. The fields of a pool are the
attributes of `rlperf.specs.pool` and, after them, the words that frameworks have for the same things (an optimizer that
"sleeps", a "granularity" of recompute): written just before an export, read before an import says them in ours.

Key tables name a field as ``trainer.token_budget``; `ref` finds it, and fails at import where there is no such field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import gcd
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from rlperf.cost.stage_ends import stated_ends_fit
from rlperf.frameworks.scorer_run import ScorerRun
from rlperf.specs.architecture import Architecture
from rlperf.specs.framework import architecture_group
from rlperf.specs.job import Algorithm
from rlperf.specs.modes import MODES, Mode, ModeTraits
from rlperf.specs.pool import LayoutForm, Offload, Recompute, SettingsForm
from rlperf.specs.rl_calibration import Transport
from rlperf.specs.speculation import drafting

Value = Any


@dataclass(frozen=True)
class BatchFacts:
    """What one rl_step trains on. Counts of prompts: ``prompts_per_step``, ``mini_batch``; tokens: the maxima."""

    prompts_per_step: int | None = None
    group_size: int = 1
    mini_batch: int | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    over_provision: float = 1.0
    max_trajectories: int | None = None
    """Under way at once: a fact of the environment, or what a framework sends to its engines."""
    generated_prompts: int | None = None
    """Prompts rolled out per rl_step where groups without a signal are dropped (DAPO)."""
    generation_batch: int | None = None
    """Prompts of one generation batch, where whole ones follow until enough groups are left."""
    left_over: int = 0
    """Prompts whose responses are rolled out and then dropped, as they fill no optimizer update."""
    turns: int = 1
    """Most turns of a trajectory: above 1 tools answer in between."""
    context_tokens: int | None = None
    """Most tokens of one sequence, where a framework states it."""
    max_positions: int | None = None
    """Positions of the policy where its configuration is overridden."""
    stated_samples: int | None = None
    """Samples of an update as the file has them, which may be no multiple of the group."""

    @property
    def prompts(self) -> int:
        """Prompts of one rl_step; 1 where nothing is stated."""
        return self.prompts_per_step or 1

    @property
    def trained(self) -> int:
        """Prompts of one rl_step that are trained on."""
        return self.prompts - self.left_over

    @property
    def flight(self) -> int:
        """Prompts in flight at once, those of partial rollouts included; their responses are `group_size` each."""
        return max(round(self.prompts * self.over_provision), self.prompts)

    def in_whole_groups(self) -> BatchFacts:
        """As files say it: partial rollouts have a whole number of groups in flight."""
        return replace(self, over_provision=self.flight / self.prompts)

    @property
    def mini(self) -> int:
        """Prompts of one optimizer update."""
        return self.mini_batch or self.prompts

    @property
    def updates(self) -> int:
        """Optimizer updates of one rl_step."""
        return max(self.prompts // self.mini, 1)

    @property
    def longest_tokens(self) -> int:
        """Prompt and response at their maxima [tokens]."""
        return (self.max_prompt_tokens or 1) + (self.max_response_tokens or 1)

    def with_context(self) -> BatchFacts:
        """The batch with the context stated that prompt and response add up to."""
        return replace(self, context_tokens=self.longest_tokens)


class _Layout(LayoutForm[int, int, bool, Recompute, Offload]):
    """The layout of a pool, each degree at its default where nothing is stated."""


class _Settings(
    SettingsForm[str | None, bool | None, int | None, float | None, str | None, bool | None, int | None, int | None]
):
    """The settings of a pool; None where nothing is stated."""

    absent = True


class PoolRun(_Layout, _Settings):
    """Devices, layout and settings of a pool: the attributes of `rlperf.specs.pool`, of both roles."""

    absent = False
    devices: int = 1
    data_parallel: int | None = None  # type: ignore[assignment]
    """None until it follows from the devices."""
    microbatch: int | None = None  # type: ignore[assignment]
    """None where microbatches are filled by tokens, or the file states none."""

    def having(self, **values: Value) -> Self:
        """A copy with some fields replaced.

        >>> TrainerRun(tensor_parallel=4).having(offload="optimizer").offload
        'optimizer'
        """
        unknown = set(values) - set(type(self).model_fields)
        if unknown:
            raise LookupError(f"a pool has no {', '.join(sorted(unknown))}")
        return self.model_copy(update=values)

    @property
    def samples(self) -> int:
        """Samples of a microbatch; 1 where none is stated."""
        return self.microbatch or 1

    @property
    def sequence_split(self) -> int:
        """Devices that share one sequence beside tensor and pipeline parallel: ring context parallel x Ulysses."""
        return self.context_parallel * self.ulysses

    @property
    def replica_devices(self) -> int:
        """Devices of one replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.sequence_split


class TrainerRun(PoolRun):
    """A trainer, with frameworks' words for what it does; None where the framework has not the word."""

    dynamic: bool | None = None
    """Microbatches are filled by tokens, to the token budget."""
    scoring_dynamic: bool | None = None
    dynamic_batching: bool | None = None
    """Filled by tokens but padded (NeMo-RL)."""
    checkpointing: bool | None = None
    granularity: Recompute | None = None
    """How much checkpointing recomputes, where that is a key of its own."""
    offload_optimizer: bool | None = None
    offload_activations: bool | None = None
    offload_all: bool | None = None
    """Parameters and optimizer together."""
    parks_optimizer: bool | None = None
    parks_parameters: bool | None = None
    sleeps: bool | None = None
    replicas: int | None = None
    """HSDP replicas (NeMo-RL states them in place of the shard group)."""
    accumulation: int | None = None
    """Forwards per optimizer update (TRL)."""
    generation_steps: int | None = None
    """Forwards per rollout (TRL)."""
    budget_stated: bool | None = None
    microbatch_stated: bool | None = None

    @property
    def scoring_budget(self) -> int | None:
        """Tokens of a scoring microbatch: as stated, or those of training; None where scoring is cut by count."""
        return self.scoring_token_budget or (None if self.scoring_microbatch else self.token_budget)


class RolloutRun(PoolRun):
    """A rollout pool, with frameworks' words for what its engines do; None where the framework has not the word."""

    engine_context: int | None = None
    """Most tokens of one sequence that the engine takes."""
    replica: int | None = None
    """Devices of one engine (slime)."""
    engine_gpus: int | None = None
    num_engines: int | None = None
    async_engine: bool | None = None
    attention_dp_enabled: bool | None = None
    sleeps: bool | None = None
    elastic: bool | None = None
    """Rollout goes on with the engines that are left."""
    own_tensor_parallel: int | None = None
    """As NeMo-RL's file has it, where tensor and expert parallel mean something else."""
    own_expert_parallel: int | None = None


@dataclass(frozen=True)
class Ref:
    """The place of one value in a run: a field of its group. Made by `ref`."""

    group: str
    name: str

    def __str__(self) -> str:
        return f"{self.group}.{self.name}"


Changes = Mapping[Ref, Value]


@dataclass(frozen=True)
class Run:
    """One configuration: what a framework's file says, in rlperf's words and units.

    The fields here are the group ``run`` of names; ``batch``, ``trainer`` and ``rollout`` are groups of their own.

    critic : name and value of what a critic has otherwise than the trainer; critic_devices : its own, 0: the trainer's
    rl_steps, last_rl_step : length and end of a phase of a plan, None: as long as the framework's own epochs;
        before, after : the other phases of a plan on the same data, whose name is ``data``, in order;
        checkpoint_every : rl_steps between checkpoints; training_s, rollout_s : predicted seconds of the phase
    recipe : an experimental program of the framework that an imported file starts
    weight_sync, in_flight : how weights travel, and whether engines take them as they generate, where that is stated
    model_script : a script of the framework that an imported launch sources for the model's flags
    facts : a framework's own frozen table of what only its rules ask
    missing : keys that have no default, must be stated, and are not
    wrong : what a file states in a type that its field has not, in words; the field is as if it were not stated
    """

    architecture: str = ""
    algorithm: Algorithm = "grpo"
    reference: bool = False
    mode: Mode = "colocated"
    staleness: int = 0
    devices: int = 1
    nodes: int = 1
    devices_per_node: int = 8
    rl_steps: int | None = None
    last_rl_step: int | None = None
    before: tuple[Run, ...] = ()
    after: tuple[Run, ...] = ()
    checkpoint_every: int | None = None
    data: str = "train"
    training_s: float | None = None
    rollout_s: float | None = None
    recipe: str | None = None
    model_script: str | None = None
    weight_sync: Transport | None = None
    in_flight: bool | None = None
    old_policy: bool | None = None
    batch: BatchFacts = BatchFacts()
    trainer: TrainerRun = field(default_factory=TrainerRun)
    rollout: RolloutRun = field(default_factory=RolloutRun)
    critic: tuple[tuple[str, Value], ...] = ()
    critic_devices: int = 0
    scorers: tuple[ScorerRun, ...] = ()
    facts: object = None
    missing: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def updates(self) -> int:
        """Optimizer updates of one rl_step, of every pass over its batch."""
        return self.batch.updates * (self.trainer.epochs or 1)

    @property
    def traits(self) -> ModeTraits:
        """What the run's mode is."""
        return MODES[self.mode]

    @property
    def together(self) -> bool:
        """Whether all that trains and scores shares devices: of the mode, or by a critic that takes turns."""
        return self.traits.shares_devices or (self.algorithm == "ppo" and not self.critic_devices)

    @property
    def resumes(self) -> bool:
        """Whether another phase was before this one."""
        return bool(self.rl_steps and self.last_rl_step and self.last_rl_step > self.rl_steps)

    @property
    def ends_at(self) -> int:
        """The rl_step through which a phase goes, counted from the run's first."""
        return self.last_rl_step or self.rl_steps or 0

    def through(self, each: Callable[[BatchFacts], int]) -> int:
        """What ``each`` counts of one rl_step, over all of them through this phase's last; phases may differ in it.

        >>> first = Run(rl_steps=50, last_rl_step=50, batch=BatchFacts(64))
        >>> second = Run(rl_steps=30, last_rl_step=80, batch=BatchFacts(96), before=(first,))
        >>> second.through(lambda batch: batch.prompts)
        6080
        """
        earlier = [(run.rl_steps or 0, each(run.batch)) for run in self.before]
        own = self.ends_at - sum(steps for steps, _ in earlier)
        return sum(steps * count for steps, count in earlier) + own * each(self.batch)

    def kept_in(self, folder: str) -> str:
        """Where checkpoints go: a folder for each task, as one task does not go on from the checkpoint of another.

        >>> Run().kept_in("checkpoints"), Run(data="code").kept_in("checkpoints")
        ('checkpoints', 'checkpoints/code')
        """
        return folder if self.data == "train" else f"{folder}/{self.data}"

    @property
    def saves_every(self) -> int:
        """rl_steps between checkpoints, of which one is the last of the phase.

        >>> Run(rl_steps=30, last_rl_step=80).saves_every, Run(rl_steps=50, last_rl_step=50).saves_every
        (10, 50)
        """
        each = self.checkpoint_every or self.rl_steps or 1
        return gcd(self.last_rl_step or each, each)

    def value(self, at: Ref) -> Value:
        """The value of a field; None where it is not stated."""
        return getattr(self if at.group == "run" else getattr(self, at.group), at.name)

    def having(self, changes: Changes | Iterable[tuple[Ref, Value]]) -> Run:
        """A copy with some fields replaced."""
        own: dict[str, Value] = {}
        below: dict[str, dict[str, Value]] = {}
        for at, value in changes.items() if isinstance(changes, Mapping) else changes:
            (own if at.group == "run" else below.setdefault(at.group, {}))[at.name] = value
        if "batch" in below:
            own["batch"] = replace(self.batch, **below["batch"])
        own |= {role: getattr(self, role).having(**below[role]) for role in ("trainer", "rollout") if role in below}
        return replace(self, **own)

    def completed(self) -> Run:
        """The run with the data parallel that follows from the devices, and a microbatch, where none is stated."""
        return replace(self, trainer=_completed(self.trainer), rollout=_completed(self.rollout))

    def names(self, architecture: Architecture | None = None) -> dict[str, object]:
        """Groups for `rlperf.specs.framework.Rule`, with the derived values that rules speak of."""
        run, batch = SimpleNamespace(**vars(self)), SimpleNamespace(**vars(self.batch))
        vars(run).update(vars(self.facts) if self.facts is not None else {})
        group, mini, stated = self.batch.group_size, self.batch.mini, self.batch.stated_samples
        if self.batch.prompts_per_step is not None:
            batch.samples = self.batch.prompts * group
            # Frameworks that count samples may state a number that is no multiple of the group: rules see it as it is.
            batch.mini_batch_samples = stated if stated and -(-stated // group) == mini else mini * group
        if self.batch.max_prompt_tokens is not None and self.batch.max_response_tokens is not None:
            batch.sequence_tokens = self.batch.longest_tokens
        groups: dict[str, object] = {"run": run, "batch": batch}
        for role, pool in (("trainer", self.trainer), ("rollout", self.rollout)):
            groups[role] = SimpleNamespace(**vars(pool), replica_devices=pool.replica_devices)
        vars(groups["rollout"]).update(drafting=drafting(self.rollout.speculation))
        if architecture is not None:
            groups["architecture"] = architecture_group(architecture)
            vars(groups["architecture"])["max_positions"] = self.batch.max_positions or architecture.max_positions
            vars(groups["trainer"]).update(self._ends(architecture.layers))
        return groups

    def _ends(self, layers: int) -> dict[str, int | bool]:
        """What rules ask of the layers that are stated of the first and the last pipeline stage."""
        trainer = self.trainer
        first, last = trainer.first_stage_layers or None, trainer.last_stage_layers or None
        stages, chunks = np.asarray(trainer.pipeline_parallel), np.asarray(trainer.virtual_pipeline)
        return {
            "ends_stated": first is not None or last is not None,
            "ends_fit": bool(stated_ends_fit(layers, stages, chunks, first, last)),
            "layers_between": layers - (first or 0) - (last or 0),
            "stages_between": trainer.pipeline_parallel - (first is not None) - (last is not None),
        }


@cache
def names_of_rules() -> Mapping[str, frozenset[str]]:
    """Group -> names that a rule may ask for; ``run`` has those of a framework's own table besides.

    >>> "heads" in names_of_rules()["architecture"], "samples" in names_of_rules()["batch"]
    (True, True)
    """
    whole = Run(batch=BatchFacts(prompts_per_step=1, max_prompt_tokens=1, max_response_tokens=1))
    small = Architecture(
        name="any", source="", hidden=1, layers=1, heads=1, kv_heads=1, head_dim=1, ffn_hidden=1, vocab=1
    )
    return {group: frozenset(vars(names)) for group, names in whole.names(small).items()}


P = TypeVar("P", bound=PoolRun)


def _completed(pool: P) -> P:
    parallel = pool.data_parallel if pool.data_parallel is not None else max(pool.devices // pool.replica_devices, 1)
    return pool.having(data_parallel=parallel, microbatch=1 if pool.microbatch is None else pool.microbatch)


# -- references -------------------------------------------------------------------------------------------------------

_GROUPS: Mapping[str, type] = {"run": Run, "batch": BatchFacts, "trainer": TrainerRun, "rollout": RolloutRun}


@cache
def types_of(group: str) -> Mapping[str, Any]:
    """Field -> type of a group, without the groups below it."""
    kind = _GROUPS[group]
    if issubclass(kind, PoolRun):
        return {name: info.annotation for name, info in kind.model_fields.items()}
    hints = get_type_hints(kind)
    return {name: hint for name, hint in hints.items() if hint not in _GROUPS.values()}


@cache
def ref(text: str) -> Ref:
    """The field of a run that ``text`` names.

    Raises
    ------
    LookupError : a run has no such field: a key table or a rule speaks of something that does not exist

    >>> str(ref("trainer.token_budget"))
    'trainer.token_budget'
    """
    group, _, name = text.partition(".")
    if group not in _GROUPS or name not in types_of(group):
        raise LookupError(f"a run has no {text}")
    return Ref(group, name)


def as_type(value: Value, kind: Any) -> tuple[Value, bool]:
    """``value`` as a field of type ``kind`` holds it, and whether it can.

    >>> as_type(8.0, int), as_type("8", int | None), as_type("many", int), as_type(1e308, int), as_type(1, float)
    ((8, True), (8, True), ('many', False), (1e+308, False), (1, True))
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = [word for one in kinds if get_origin(one) is Literal for word in get_args(one)]
    if words and value is not None:
        return value, value in words
    if value is None:
        return None, type(None) in kinds
    if bool in kinds or str in kinds:
        return value, isinstance(value, bool if bool in kinds else str)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value, False
    if float in kinds:
        return value if isinstance(value, int | float) else number, True
    return (int(number), True) if number.is_integer() and abs(number) < _MOST else (value, False)


_MOST = 2**53
"""No count of a configuration is as large; up to here a float is the whole number that it says."""
