"""The framework's validity rules over columns: which candidates it would refuse, before they are ever planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import numpy as np

from rlperf.cost.reject import Reject
from rlperf.layout import BoolArray, IntArray, Layout
from rlperf.plan.search.rollout_columns import RolloutColumns
from rlperf.plan.search.splits import Split
from rlperf.plan.search.trainer_columns import TrainerColumns
from rlperf.sim.rl_step.demand import Batch
from rlperf.specs.architecture import Architecture
from rlperf.specs.framework import FrameworkFacts, NodeCounted, architecture_group
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.scorer import Scorer
from rlperf.specs.speculation import drafting


def batch_names(batch: Batch) -> SimpleNamespace:
    """The group ``batch`` of rule expressions."""
    return SimpleNamespace(
        prompts_per_step=batch.prompts,
        group_size=batch.group_size,
        mini_batch=batch.mini_batch,
        max_prompt_tokens=batch.max_prompt_tokens,
        max_response_tokens=batch.max_response_tokens,
        samples=batch.prompts * batch.group_size,
        mini_batch_samples=batch.mini_batch * batch.group_size,
        sequence_tokens=batch.longest_tokens,
    )


def _trainer_names(
    layout: Layout, token_budget: IntArray, architecture: Architecture, lora_rank: int | None = None
) -> SimpleNamespace:
    """The group ``trainer`` of rule expressions; a pipeline that is uneven states its ends."""
    return SimpleNamespace(
        **vars(layout),
        devices=layout.devices,
        replica_devices=layout.replica_devices,
        token_budget=token_budget,
        dynamic=True,
        lora_rank=lora_rank,
        ends_stated=architecture.layers % (layout.pipeline_parallel * layout.virtual_pipeline) > 0,
        ends_fit=True,  # or the column is rejected before
    )


def node_flags(facts: FrameworkFacts, part: NodeCounted, devices: IntArray, per_node: int) -> IntArray:
    """`Reject.FRAMEWORK` where a pool leaves part of a node, and files count devices by node ``[any]``."""
    uneven = (devices > per_node) & (devices % per_node > 0) & (part in facts.whole_nodes)
    return np.where(uneven, int(Reject.FRAMEWORK), 0)


def uneven_parts(
    facts: FrameworkFacts, split: Split, per_node: int, scorers: Sequence[Scorer]
) -> dict[NodeCounted, tuple[int, ...]]:
    """Parts of a split that leave part of a node, where files count devices by node, with their devices.

    ``scorers`` : of the job; several of a kind are stated as one pool
    """
    of_kind: dict[str, int] = {}
    for scorer, devices in zip(scorers, split.scorers, strict=True):
        of_kind[scorer.kind] = of_kind.get(scorer.kind, 0) + devices
    parts: dict[NodeCounted, tuple[int, ...]] = {
        "rollout": (split.rollout,), "trainer": (split.trainer,), "scorers": tuple(of_kind.values()),
        "cluster": (split.total,),
    }  # fmt: skip
    flags = {
        part: node_flags(facts, part, np.array(counts, dtype=np.int64), per_node) for part, counts in parts.items()
    }
    found = {part: tuple(np.array(parts[part])[own > 0].tolist()) for part, own in flags.items()}
    return {part: counts for part, counts in found.items() if counts}


BUDGET_RULE = "token_budget"
BOTH = ("rollout", "trainer")
"""Groups of the rules that pairs of columns are asked for; what speaks of one of them is known of columns."""


def takes_longer(facts: FrameworkFacts | None, job: Job) -> bool:
    """Whether stated budgets below the longest sequence run: where such a one is a microbatch of its own.

    The framework's rule about it is then one that it never notices (slime, miles, OpenRLHF); others stop.
    """
    if facts is None or not job.pool("trainer").settings.token_budget:
        return False
    return any(rule.id == BUDGET_RULE and rule.stage == "never" for rule in facts.rules_of())


def trainer_rule_flags(
    facts: FrameworkFacts | None,
    columns: TrainerColumns,
    backends: tuple[str, ...],
    architecture: Architecture,
    batch: Batch,
    devices_per_node: int,
    *,
    longer: bool = False,
) -> tuple[IntArray, IntArray]:
    """`Reject.FRAMEWORK` where a rule that speaks of trainer, batch and architecture alone is broken ``[columns]``.

    First of the rules that do not speak of the batch, then of all; ``longer``: as `takes_longer` says
    """
    alone = np.zeros(columns.count, dtype=np.int64)
    if facts is None:
        return alone, alone
    alone |= node_flags(facts, "trainer", columns.layout.devices, devices_per_node)
    trainer, flags = _trainer_names(columns.layout, columns.token_budget, architecture), alone.copy()
    names: dict[str, object] = {"trainer": trainer, "architecture": architecture_group(architecture)}
    names |= {"run": SimpleNamespace(critic_devices=columns.critic), "batch": batch_names(batch)}
    refused, rules = facts.refused(names), {rule.id: rule for rule in facts.rules}
    for rule, broken in refused.items():
        if longer and rule == BUDGET_RULE:
            continue
        own = [index for index, backend in enumerate(backends) if rules[rule].backend in ("", backend)]
        here = np.where(broken & np.isin(columns.backend, own), int(Reject.FRAMEWORK), 0)
        flags |= here
        if "batch" not in rules[rule].groups:
            alone |= here
    return alone, flags


def _engine_names(layout: Layout, engine: str) -> SimpleNamespace:
    """What the group ``rollout`` of rule expressions has of a layout and its engine."""
    return SimpleNamespace(
        **vars(layout), backend=engine, devices=layout.devices, replica_devices=layout.replica_devices
    )


def refused_engines(facts: FrameworkFacts, architecture: Architecture, engine: str, layout: Layout) -> BoolArray:
    """Where a rule is broken that asks nothing but an engine's layout, whatever the mode and batch ``[layouts]``."""
    names: dict[str, object] = {"rollout": _engine_names(layout, engine)}
    names["architecture"] = architecture_group(architecture)
    refused = np.zeros(layout.shape, dtype=np.bool_)
    for rule in facts.rules_of(*names):
        if "rollout" in rule.groups and not rule.backend and rule.asks_within(names):
            kept = rule.holds(names)
            refused |= False if kept is None else ~kept
    return refused


@dataclass(frozen=True)
class EngineRules:
    """Rules about the rollout that no trainer answers, asked of columns.

    Attributes
    ----------
    backends : of the trainers; a rule counts where it holds with each of them
    per_node : devices of a node
    """

    facts: FrameworkFacts
    columns: RolloutColumns
    backends: tuple[str, ...]
    architecture: Architecture
    batch: Batch
    job: Job
    engine: str
    mode: Mode
    per_node: int

    def names(self, r: IntArray) -> dict[str, object]:
        """What rules may ask of columns ``r``: all but the group ``trainer``."""
        columns, layout = self.columns, self.columns.layout.take(r)
        settings = self.job.pool("rollout").settings.filled()
        return {
            "rollout": SimpleNamespace(
                **vars(_engine_names(layout, self.engine)),
                max_running=columns.max_running[r],
                memory_fraction=columns.memory_fraction[r],
                prefill_replicas=settings.prefill_replicas,
                drafting=drafting(settings.speculation),
                draft_training=settings.draft_training,
            ),
            "batch": batch_names(self.batch),
            "architecture": architecture_group(self.architecture),
            "run": SimpleNamespace(
                mode=self.mode, async_enabled=MODES[self.mode].runs_ahead, devices_per_node=self.per_node
            ),
        }

    @cached_property
    def of_each(self) -> list[dict[str, BoolArray]]:
        """Rule id -> columns that break it ``[columns]``, with each trainer."""
        every = self.facts.refused(self.names(np.arange(self.columns.count)), about=("rollout",))
        broken = {rule: np.broadcast_to(where, (self.columns.count,)) for rule, where in every.items()}
        of_one = {rule.id: rule.backend for rule in self.facts.rules if rule.backend}
        return [
            {rule: where for rule, where in broken.items() if of_one.get(rule, backend) == backend}
            for backend in self.backends
        ]

    def broken(self) -> dict[str, BoolArray]:
        """Rule id -> columns that break it, with each of the trainers ``[columns]``."""
        first = self.of_each[0] if self.of_each else {}
        return {rule: where for rule, where in first.items() if all(rule in each for each in self.of_each)}

    def flags(self) -> IntArray:
        """`Reject.FRAMEWORK` where one is broken ``[columns]``."""
        return self._flagged(self.broken())

    @cached_property
    def beside(self) -> IntArray:
        """`Reject.FRAMEWORK` where one is broken that holds with the trainer at hand ``[trainers][columns]``."""
        return np.stack([self._flagged(each) for each in self.of_each])

    def _flagged(self, broken: dict[str, BoolArray]) -> IntArray:
        refused = np.zeros(self.columns.count, dtype=np.bool_)
        for where in broken.values():
            refused |= where
        return np.where(refused, int(Reject.FRAMEWORK), 0)

    def said(self, among: BoolArray) -> dict[str, str]:
        """The rule that most of the columns ``among`` break, and its words; none where they break none."""
        broken = {rule: where & among for rule, where in self.broken().items() if (where & among).any()}
        if not broken:
            return {}
        most = max(broken, key=lambda rule: int(broken[rule].sum()))
        names = self.names(np.flatnonzero(broken[most])[0])
        return {rule.id: rule.said(names) for rule in self.facts.rules_of(*names) if rule.id == most}


def pair_rule_flags(engines: EngineRules, trainer: TrainerColumns, r: IntArray, t: IntArray, split: Split) -> IntArray:
    """`Reject.FRAMEWORK` where a rule that speaks of the rollout, alone or with the trainer, is broken ``[pairs]``."""
    facts, job = engines.facts, engines.job
    if uneven_parts(facts, split, engines.per_node, job.scorers):
        return np.full(len(r), int(Reject.FRAMEWORK), dtype=np.int64)
    backend = trainer.backend[t]
    flags = engines.beside[backend, r]
    if not any(rule.groups.issuperset(BOTH) for rule in facts.rules):
        return flags
    names = engines.names(r)
    names["trainer"] = _trainer_names(
        trainer.layout.take(t), trainer.token_budget[t], engines.architecture, job.pool("trainer").settings.lora_rank
    )
    for index, name in enumerate(engines.backends):
        for broken in facts.refused(names, name, about=BOTH).values():
            here = (backend == index) & np.broadcast_to(broken, flags.shape)
            flags |= np.where(here, int(Reject.FRAMEWORK), 0)
    return flags
