"""The framework's validity rules over columns: which candidates it would refuse, before they are ever planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from rlperf.cost.reject import Reject
from rlperf.layout import BoolArray, IntArray, Layout
from rlperf.plan.search.rollout_columns import RolloutColumns
from rlperf.plan.search.splits import Split
from rlperf.plan.search.trainer_columns import TrainerColumns
from rlperf.sim.rl_step.demand import Batch
from rlperf.sim.rl_step.pairs import Pairs
from rlperf.specs.architecture import Architecture
from rlperf.specs.framework import FrameworkFacts, NodeCounted, architecture_group
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.scorer import Scorer


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


def takes_longer(facts: FrameworkFacts | None, job: Job) -> bool:
    """Whether a stated budget below the longest sequence runs: where such a one is a microbatch of its own.

    The framework's rule about it is then one that it never notices (slime, miles, OpenRLHF); others stop.
    """
    if facts is None or len(job.pool("trainer").settings.token_budget or ()) != 1:
        return False
    return any(rule.id == BUDGET_RULE and rule.stage == "never" for rule in facts.rules_of())


def trainer_rule_flags(
    facts: FrameworkFacts | None,
    columns: TrainerColumns,
    backends: tuple[str, ...],
    architecture: Architecture,
    batch: Batch | None,
    devices_per_node: int,
    *,
    longer: bool = False,
) -> IntArray:
    """`Reject.FRAMEWORK` where a rule that speaks of trainer, batch and architecture alone is broken ``[columns]``.

    ``batch`` None: of the rules that do not speak of it; ``longer``: as `takes_longer` says
    """
    flags = np.zeros(columns.count, dtype=np.int64)
    if facts is None:
        return flags
    flags |= node_flags(facts, "trainer", columns.layout.devices, devices_per_node)
    trainer = _trainer_names(columns.layout, columns.token_budget, architecture)
    names: dict[str, object] = {"trainer": trainer, "architecture": architecture_group(architecture)}
    names["run"] = SimpleNamespace(critic_devices=columns.critic)
    names |= {} if batch is None else {"batch": batch_names(batch)}
    for index, backend in enumerate(backends):
        for rule, broken in facts.refused(names, backend).items():
            if longer and rule == BUDGET_RULE:
                continue
            here = (columns.backend == index) & np.broadcast_to(broken, flags.shape)
            flags |= np.where(here, int(Reject.FRAMEWORK), 0)
    return flags


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
        return {
            "rollout": SimpleNamespace(
                **vars(layout),
                backend=self.engine,
                devices=layout.devices,
                replica_devices=layout.replica_devices,
                max_running=columns.max_running[r],
                memory_fraction=columns.memory_fraction[r],
                prefill_replicas=self.job.pool("rollout").settings.filled().prefill_replicas,
            ),
            "batch": batch_names(self.batch),
            "architecture": architecture_group(self.architecture),
            "run": SimpleNamespace(
                mode=self.mode, async_enabled=MODES[self.mode].runs_ahead, devices_per_node=self.per_node
            ),
        }

    def broken(self) -> dict[str, BoolArray]:
        """Rule id -> columns that break it ``[columns]``."""
        names = self.names(np.arange(self.columns.count))
        of_each = [self.facts.refused(names, backend, about="rollout") for backend in self.backends]
        return {
            rule: np.broadcast_to(where, (self.columns.count,))
            for rule, where in (of_each[0] if of_each else {}).items()
            if all(rule in each for each in of_each)
        }

    def flags(self) -> IntArray:
        """`Reject.FRAMEWORK` where one is broken ``[columns]``."""
        refused = np.zeros(self.columns.count, dtype=np.bool_)
        for where in self.broken().values():
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


def pair_rule_flags(
    facts: FrameworkFacts, pairs: Pairs[RolloutColumns, TrainerColumns], backends: tuple[str, ...],
    architecture: Architecture, batch: Batch, job: Job, engine_name: str, split: Split,
    devices_per_node: int,
) -> IntArray:  # fmt: skip
    """`Reject.FRAMEWORK` where a rule that speaks of the rollout, alone or with the trainer, is broken ``[pairs]``."""
    rollout, trainer, r, t = pairs.rollout, pairs.trainer, pairs.r, pairs.t
    uneven = uneven_parts(facts, split, devices_per_node, job.scorers)
    flags = np.full(len(pairs), int(Reject.FRAMEWORK) if uneven else 0, dtype=np.int64)
    engines = EngineRules(
        facts, rollout, backends, architecture, batch, job, engine_name, split.mode, devices_per_node
    )  # fmt: skip
    names = engines.names(r)
    names["trainer"] = _trainer_names(
        trainer.layout.take(t), trainer.token_budget[t], architecture, job.pool("trainer").settings.lora_rank
    )
    for index, backend in enumerate(backends):
        for broken in facts.refused(names, backend, about="rollout").values():
            here = (trainer.backend[t] == index) & np.broadcast_to(broken, flags.shape)
            flags |= np.where(here, int(Reject.FRAMEWORK), 0)
    return flags
