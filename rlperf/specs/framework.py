"""What an RL framework *is*, as data: versions, scoring passes, overlaps, and validity rules over arrays of layouts.

A rule is an expression over named groups of values, for example ``batch.mini_batch * batch.group_size %
trainer.data_parallel == 0``. The groups are objects whose attributes are numbers, or arrays that broadcast together: a
`rlperf.layout.Layout` of a million candidates in the planner, the numbers of one configuration in audit and export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.architecture import Architecture
from rlperf.specs.framework_names import FACTS
from rlperf.specs.frozen import Frozen
from rlperf.specs.keyless_settings import KeylessSettings, running
from rlperf.specs.modes import MODES
from rlperf.specs.pool import Role
from rlperf.specs.reader import Document, is_file, read_document
from rlperf.specs.releases import in_release, versions_of
from rlperf.specs.rule_expressions import MissingValueError, asked_in, evaluate, names_in
from rlperf.units import NonNegativeInt, PositiveInt

BoolArray = npt.NDArray[np.bool_]
Stage = Literal["parse", "launch", "worker", "run", "never"]
"""When the framework itself notices: reading the file, before allocation, on the workers, while running, or never."""
NodeCounted = Literal["trainer", "rollout", "scorers", "cluster"]
NODE_COUNTED: dict[NodeCounted, str] = {
    "trainer": "trainer has",
    "rollout": "rollout has",
    "scorers": "a scorer has",
    "cluster": "all pools together have",
}
"""What a file may state as nodes of so many devices, in words: each pool by itself, or all of them together."""


class Rule(Frozen):
    """One validity rule.

    ``when`` (default: always) and ``require`` are expressions; a name that has no value leaves the rule unanswered.
    ``groups`` are the groups that the two speak of, so that the planner can ask those of one role alone.
    """

    id: str
    require: str
    when: str | None = None
    key: str = Field(description="the key of the framework to look at first")
    mend: str = Field("", description="the key that a repair tries first, where it is another")
    says: str = Field(description="what is wrong, with {group.name} filled in")
    advice: str = ""
    stage: Stage = "worker"
    source: str = Field(description="where in the framework's source, or in its documentation")
    versions: str = Field("", description="first-last, either end open; empty: all")
    backend: str = ""

    @cached_property
    def groups(self) -> frozenset[str]:
        """Groups of names that the rule needs."""
        return names_in(self.require) | (names_in(self.when) if self.when else frozenset())

    def asks_within(self, names: Mapping[str, object]) -> bool:
        """Whether every value that it asks for is in ``names``: an alternative (``or``) may go without one."""
        asked = asked_in(self.require) | (asked_in(self.when) if self.when else frozenset())
        return all(hasattr(names.get(group), name) for group, name in asked)

    def applies(self, version: str, versions: tuple[str, ...], backend: str = "") -> bool:
        """Whether the rule holds for a version (one of ``versions``, in order) and backend."""
        if self.backend and backend and self.backend != backend:
            return False
        return version in versions_of(self.versions, versions)

    def said(self, names: Mapping[str, object]) -> str:
        """The message with its values filled in; the rule's name where it speaks of more than is known."""
        try:
            return self.says.format_map(names)
        except (KeyError, AttributeError):
            return f"{self.key} (rule {self.id})"

    def holds(self, names: Mapping[str, object]) -> BoolArray | None:
        """Where the rule is kept, broadcast over the arrays in ``names``; None where a value is missing.

        >>> rule = Rule(id="r", key="k", says="", source="", require="rollout.tensor_parallel <= 8")
        >>> from types import SimpleNamespace
        >>> rule.holds({"rollout": SimpleNamespace(tensor_parallel=np.array([4, 16]))}).tolist()
        [True, False]
        """
        try:
            asked = None if self.when is None else np.asarray(evaluate(self.when, names), dtype=np.bool_)
            if asked is not None and not asked.any():
                return ~asked
            kept = np.asarray(evaluate(self.require, names), dtype=np.bool_)
        except MissingValueError:
            return None
        return kept if asked is None else kept | ~asked


@cache
def facts_document(framework: str) -> Document | None:
    """The file of a framework's facts with its lines; None where there is none.

    Raises
    ------
    SpecError : it is no YAML, or no mapping
    """
    path = FACTS / f"{framework}.yaml"
    if not is_file(path):
        return None
    document = read_document(path)
    if not isinstance(document.data, dict):
        raise SpecError(Problem("holds no fields", str(path), 1))
    if fork := document.data.get("fork_of"):
        return Document(_forked(document, str(fork)), document.lines, document.file)
    return document


def _forked(document: Document, origin: str) -> dict[str, Any]:
    """Facts of a fork: what its file leaves out is its origin's; of those rules it has each that it cites a source for.

    Raises
    ------
    SpecError : the origin is unknown, or has no rule that the file cites
    """
    whole, own = facts_data(origin), dict(document.data)
    if not whole:
        raise SpecError(document.problem(("fork_of",), f"nothing is known of a framework named {origin!r}"))
    rules, cited = {rule["id"]: rule for rule in whole["rules"]}, own.pop("cites", {})
    if unknown := [name for name in cited if name not in rules]:
        hints = {name: did_you_mean(name, rules) for name in unknown}
        raise SpecError([document.problem(("cites", n), f"{origin} has no such rule", hints[n]) for n in unknown])
    shared = [{**rules[name], "source": source} for name, source in cited.items()]
    return {**whole, **own, "rules": [*own.get("rules", []), *shared]}


@cache
def facts_data(framework: str) -> dict[str, Any]:
    """The facts of a framework as its file states them; empty where there is none.

    >>> "vllm" in facts_data("verl")["engines"], facts_data("nobody's")
    (True, {})
    """
    document = facts_document(framework)
    return {} if document is None else dict(document.data)


Attention = Literal["flash", "flash2"]
"""Kernel of a trainer's attention from Hopper on: the newest, or the second FlashAttention's."""
Balance = Literal["update", "batch", "budget", "none"]
"""Over what a trainer evens out the tokens of its ranks: an update, the whole batch, an update if it is cut by tokens
(``budget``), or nothing."""
Pads = Literal["microbatch", "batch", "limit"]
"""To what unpacked sequences are padded: the longest of their microbatch, the longest prompt and response that a rank
generated, or the most that the job allows."""

Reduces = Literal["bf16", "fp32"]
"""In what gradients travel between ranks."""


UnderWay = PositiveInt | Literal["batch"]
"""Groups of samples that a program has under way at once, beside its bound on staleness: of every replica, or as many
as a batch has."""


Scored = Literal["all", "responses"]
"""Which tokens of a microbatch go through the head: all, padding too, or those of responses alone."""

OF_RELEASES = {
    "attention": "attention_kernel",
    "copied_gradients": "copied_gradients",
    "resident_reference": "resident_reference",
    "kept_weights": "kept_weights",
    "head_tokens": "head_tokens",
}
"""Facts by trainer backend and span of versions -> their names in `TrainerOverheads`."""


def trainer_facts(framework: str, backend: str, version: str) -> dict[str, str | int]:
    """What facts say of how a trainer computes in a release, under names of `TrainerOverheads`.

    Of the newest release where ``version`` is no number; what a framework's own facts leave open, its relative's say.

    >>> [trainer_facts("verl", "megatron", version) for version in ("0.5", "main")]
    [{'attention_kernel': 'flash'}, {'attention_kernel': 'flash2'}]
    >>> [trainer_facts("verl", "fsdp2", version).get("whole_gradients") for version in ("0.9.0", "0.9.1", "0.9")]
    [True, None, None]
    >>> [trainer_facts(*names, "").get("copied_gradients") for names in (("areal", "megatron"), ("verl", "megatron"))]
    [0, None]
    """
    data = facts_data(framework)
    found: dict[str, str | int] = trainer_facts(data["relative"], backend, "") if data.get("relative") else {}
    for fact, name in OF_RELEASES.items():
        for value in in_release(data.get(fact, {}).get(backend, {}), version):
            found[name] = value
    if {"all", version.strip().removeprefix("v")} & set(data.get("whole_gradients", {}).get(backend, ())):
        found["whole_gradients"] = True
    stated = {name: data.get(name, {}).get(backend) for name in ("pads", "balance", "reduces")}
    return found | {name: value for name, value in stated.items() if value}


def under_way_of(framework: str, version: str) -> dict[str, UnderWay]:
    """Groups that the programs of a release have under way at once, by execution mode; absent: no such limit.

    >>> under_way_of("verl", "0.8.0"), under_way_of("miles", "main"), under_way_of("slime", "0.3")
    ({'async': 16, 'streaming': 16}, {'async': 'batch'}, {})
    """
    told = {mode: in_release(spans, version) for mode, spans in facts_data(framework).get("under_way", {}).items()}
    return {mode: values[-1] for mode, values in told.items() if values}


class CheckpointForm(Frozen):
    """What a trainer's checkpoint is laid out by: a phase that has these values otherwise cannot go on from it."""

    tied: tuple[str, ...] = Field(description="names of layout values, and devices")
    key: str = Field("", description="of the framework: true writes optimizer states that any layout reads")
    versions: str = Field("", description="span that has the key; empty: all")
    source: str = Field(description="where in the framework's source")


class FrameworkFacts(Frozen):
    """A framework in one version and backend, for the planner and the cost of an rl_step."""

    name: str
    title: str
    versions: tuple[str, ...]
    version: str
    backends: tuple[str, ...]
    engines: tuple[str, ...]
    vendors: tuple[str, ...] = Field((), description="makers of the devices that its source has code for; none: any")
    algorithms: tuple[str, ...] = Field(("grpo", "dapo", "ppo"), description="that its trainers run; ppo has a critic")
    unplanned: dict[str, str] = Field({}, description="algorithm that is not planned for it -> why")
    unwritten: dict[str, str] = Field({}, description="setting that its files can hold and none gets -> why")
    modes: dict[str, str] = Field(description="execution mode -> how the framework runs it; absent: it cannot")
    instead: dict[str, str] = Field({}, description="execution mode that it lacks -> what it has in its place")
    scoring_passes: str = Field(description="which forward passes score a batch, in words")
    old_log_prob_pass: str = Field(description="always, never, or when there are several optimizer steps per batch")
    old_policy: dict[str, bool] = Field(
        {}, description="execution mode, or all -> whether exported files have the old policy scored; absent: its rule"
    )
    old_policy_in: str = Field("", description="span of versions whose files say so; empty: all")
    overlaps: tuple[str, ...] = Field((), description="stages that run beside each other, in words")
    states_stages: bool = Field(False, description="layers of the first and last pipeline stage can be stated")
    states_scoring: bool = Field(False, description="tokens of a scoring microbatch have a key of their own")
    states_trajectories: Literal["", "each", "groups"] = Field(
        "", description="what a key counts that bounds trajectories under way: each, or groups that run ahead, whole"
    )
    refills: Literal["", "batches", "none"] = Field(
        "",
        description="what is drawn for groups that filtering drops, where the trainer waits for it: whole batches; "
        "none: nothing is dropped",
    )
    counts_apart: bool = Field(False, description="on devices of its own a trainer's microbatches are cut by count")
    counts: str = Field("", description="span of versions whose microbatches are cut by count everywhere; empty: none")
    critic_apart: str = Field("", description="keys of a critic on devices of its own, trained beside the policy")
    critic_shared: tuple[str, ...] | None = Field(None, description="modes in which it may share the trainer's: all")
    whole_nodes: tuple[NodeCounted, ...] = Field((), description="what files state as nodes of so many devices")
    critic_beside: bool = Field(False, description="one of its own stands beside roles that share theirs, too")
    fork_of: str = Field("", description="framework whose facts hold where its own say nothing")
    runs: tuple[KeylessSettings, ...] = Field((), description="settings that it has no key for, as it runs them")
    unknown_keys: Literal["error", "ignored", "kept"] = "error"
    configurations: tuple[str, ...] = Field((), description="names (patterns) of its own that hold the known defaults")
    metrics: dict[str, str] = Field({}, description="metric of its log -> column of `StepLog`")
    metrics_of_updates: bool = Field(False, description="its log is of optimizer updates, not of rl_steps")
    untimed_stage: Literal["", "training"] = Field("", description="what no timer of its log times but the whole")
    nested_metrics: dict[str, str] = Field({}, description="metric of its log -> the one that holds it as a part")
    checkpoints: dict[str, CheckpointForm] = Field(
        {}, description="trainer backend -> what its checkpoints are tied to; absent: any layout reads them"
    )
    rules: tuple[Rule, ...] = ()
    sources: dict[str, str]
    relative: str = Field("", description="framework whose overheads it is predicted with until its own are measured")
    attention: dict[str, dict[str, Attention]] = Field({}, description="trainer backend -> span of versions -> kernel")
    copied_gradients: dict[str, dict[str, NonNegativeInt]] = Field(
        {},
        description="trainer backend -> span of versions -> ZeRO stage from which parked states take their gradients "
        "with them; absent: they are freed",
    )
    resident_reference: dict[str, dict[str, bool]] = Field(
        {},
        description="trainer backend -> span of versions -> whether the reference's weights stay on the devices; "
        "absent: they wait in host memory",
    )
    kept_weights: dict[str, dict[str, bool]] = Field(
        {},
        description="trainer backend -> span of versions -> whether weights, and a resident reference's, stay on the "
        "devices where states are parked; absent: they go with them",
    )
    head_tokens: dict[str, dict[str, Scored]] = Field(
        {}, description="trainer backend -> span of versions -> which tokens go through the head; absent: all"
    )
    sends: dict[str, Literal["nccl", "packed_broadcast"]] = Field(
        {}, description="span of versions -> how weights reach engines on devices of their own; absent: its usual way"
    )
    wide_weights: dict[str, dict[str, bool]] = Field(
        {},
        description="trainer backend -> span of versions -> whether engines on its devices are sent weights in the 32 "
        "bits in which it keeps them; absent: in 16",
    )
    reward_hidden: dict[str, float] = Field(
        {}, description="span of versions -> share of rewards' time under a rollout"
    )
    under_way: dict[str, dict[str, UnderWay]] = Field(
        {},
        description="execution mode -> span of versions -> most groups under way at once, a replica's or a ``batch``'s",
    )
    pads: dict[str, Pads] = Field({}, description="trainer backend -> padding unpacked, where a relative's differs")
    whole_gradients: dict[str, tuple[str, ...]] = Field(
        {},
        description="trainer backend -> releases that keep gradients whole between microbatches and have no key for "
        "it, or all",
    )
    reduces: dict[str, Reduces] = Field(
        {}, description="trainer backend -> in what it reduces gradients, where it accumulates them in another type"
    )
    balance: dict[str, Balance] = Field(
        {}, description="trainer backend -> over what it evens out its ranks, where its relative does otherwise"
    )

    def keyless(self, role: Role) -> frozenset[str]:
        """Settings of a pool that it has no key for."""
        return frozenset(running(self.runs, role))

    def tied(self, backend: str) -> tuple[str, ...]:
        """Layout values (and devices) that a phase must share with the one that it goes on from; none: any reads it."""
        form = self.checkpoints.get(backend)
        if form is None or (form.key and self.version in versions_of(form.versions, self.versions)):
            return ()
        return form.tied

    def rules_of(self, *groups: str, backend: str = "") -> tuple[Rule, ...]:
        """Rules of this version that speak of nothing but ``groups``; without groups, all."""
        told = (rule for rule in self.rules if not groups or rule.groups <= set(groups))
        return tuple(rule for rule in told if rule.applies(self.version, self.versions, backend))

    def objections(
        self, modes: Sequence[str], backends: Sequence[str], engine: str, algorithm: str = "grpo",
        *, critic_apart: bool = False,
    ) -> list[Problem]:  # fmt: skip
        """What of a job this version cannot run at all: the algorithm, modes, the engine, or every allowed trainer.

        The planner asks before it searches; a job that leaves one possible mode or backend open is fine as it is.
        """
        name, found = f"{self.name} {self.version}", []
        if algorithm not in self.algorithms:
            hint = f"algorithm: {' or '.join(self.algorithms)}, or another framework"
            found.append(Problem(f"rlperf plans no {algorithm} for {name}{self.why_not(algorithm)}", suggestion=hint))
        if critic_apart and not self.critic_apart:
            words = f"{name} has no keys for a critic on devices of its own that is trained beside the policy"
            found.append(
                Problem(words, suggestion="leave placement out of the critic pool, or framework: openrlhf or miles")
            )
        if algorithm == "ppo" and not self.with_critic(modes, apart=critic_apart):
            found.append(self._misplaced(modes, apart=critic_apart))
        if not set(modes) & set(self.modes):
            nearest = [f"instead of {mode} it has {self.instead[mode]}" for mode in modes if mode in self.instead]
            hint = "; ".join([*nearest, f"it runs {', '.join(self.modes)}"])
            found.append(Problem(f"{name} has no mode {', '.join(modes)}", suggestion=hint))
        if not set(backends) & set(self.backends):
            hint = f"trainer_backends: {', '.join(self.backends)}"
            found.append(Problem(f"{name} has no {', '.join(backends)} trainer", suggestion=hint))
        if engine.split("==")[0] not in self.engines:
            hint = f"engine: {' or '.join(self.engines)}"
            found.append(Problem(f"{name} does not roll out with {engine}", suggestion=hint))
        return found

    def with_critic(self, modes: Sequence[str], *, apart: bool) -> tuple[str, ...]:
        """Of these modes those in which a critic stands on devices of its own (``apart``), or on the trainer's."""
        if apart:
            return tuple(mode for mode in modes if self.critic_beside or not MODES[mode].shares_devices)
        return tuple(mode for mode in modes if self.critic_shared is None or mode in self.critic_shared)

    def _misplaced(self, modes: Sequence[str], *, apart: bool) -> Problem:
        """That in none of these modes a critic can stand where a job has it."""
        where = f"in mode {', '.join(modes)} {self.name} {self.version} trains a critic"
        if apart:
            others = ", ".join(self.with_critic(list(self.modes), apart=True))
            return Problem(
                f"{where} on the trainer's devices alone", suggestion=f"leave placement out, or modes: {others}"
            )
        shared = f", or modes: {', '.join(self.critic_shared)}" if self.critic_shared else ""
        return Problem(f"{where} on devices of its own", suggestion=f"a critic pool with placement: own{shared}")

    def why_not(self, algorithm: str) -> str:
        """Why an algorithm is not planned, after a colon; empty where its facts do not say."""
        return f": {self.unplanned[algorithm]}" if algorithm in self.unplanned else ""

    def pinned(self, names: Mapping[str, object], backends: Sequence[str]) -> list[str]:
        """What rules say of ``names`` (what a job states of its pools) that break them with every trainer backend.

        Of a name with several values, those rules that none of them keeps; rules that ask for more are left out.
        """
        refused = (self.refused(names, backend) for backend in backends)
        broken = [{rule for rule, where in each.items() if where.all()} for each in refused] or [set()]
        every = set.intersection(*broken)
        rules = [rule for rule in self.rules_of(*names) if rule.id in every and rule.asks_within(names)]
        return list(dict.fromkeys(rule.said(names) for rule in rules))

    def refused(
        self, names: Mapping[str, object], backend: str = "", *, about: tuple[str, ...] = ()
    ) -> dict[str, BoolArray]:
        """Rule id -> where it is broken, for every rule that the given groups can answer.

        The planner hands one role's open axes (``{"trainer": layout, "architecture": arch, ...}``) and masks what comes
        back; a rule that nobody breaks is left out. ``about``: only rules that speak of each of these groups.
        """
        broken: dict[str, BoolArray] = {}
        for rule in self.rules_of(*names, backend=backend):
            if not rule.groups.issuperset(about):
                continue
            kept = rule.holds(names)
            if kept is not None and not kept.all():
                broken[rule.id] = ~kept
        return broken


def architecture_group(architecture: Architecture) -> SimpleNamespace:
    """The group ``architecture`` of rule expressions."""
    return SimpleNamespace(
        heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        layers=architecture.layers,
        hidden=architecture.hidden,
        experts=architecture.experts.count if architecture.experts else 0,
        max_positions=architecture.max_positions,
        vocab=architecture.vocab,
    )
