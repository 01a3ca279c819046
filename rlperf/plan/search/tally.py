"""What a screen has looked at and what fell to what: counts by reason, and the nearest misses in words."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlperf.cost.reject import REASONS, Reject, count_reasons
from rlperf.layout import IntArray
from rlperf.plan.question.context import Context
from rlperf.plan.question.words import layout_words
from rlperf.plan.search.rollout_columns import awake_limits
from rlperf.plan.search.split_columns import ScreenedPairs, SplitColumns
from rlperf.plan.search.trainer_columns import peak_limit
from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.units import human_bytes, human_seconds, human_share, human_usd

_Limited = tuple[float, float | None, int]


@dataclass(eq=False)
class Tally:
    """What a screen has looked at so far.

    Attributes
    ----------
    candidates, rejected : columns and pairs that were refused or costed one by one, and how many fell to what
    combinations : whole configurations among which the best is found
    misses : nearest misses in words
    leanest, roomiest : of all splits the trainer that misses memory by least, GB and words; engine of the largest cache
    ruled : the framework's rules that engines broke, in words, of the first split that broke them
    limited : of a batch the fastest and the cheapest rl_step that limits alone refuse, (seconds, USD, devices)
    """

    candidates: int = 0
    combinations: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)
    leanest: tuple[float, str] | None = None
    roomiest: tuple[float, str] | None = None
    ruled: dict[str, str] = field(default_factory=dict)
    limited: dict[Batch, tuple[_Limited, _Limited]] = field(default_factory=dict)

    def truncated(self, context: Context, demand: Demand) -> None:
        """A batch that cuts too many responses, whatever the layout."""
        self._refuse({REASONS[Reject.LIMIT]: 1})
        cap, cut, most = (
            demand.batch.max_response_tokens,
            demand.truncated_fraction,
            context.job.limits.truncated_fraction,
        )
        words = f"a maximum of {cap:,} tokens cuts {human_share(cut, 1)} of the responses"
        self.misses.append(f"{words} (limit {human_share(most or 0.0, 1)})")

    def columns(self, source: SplitColumns, repeated: bool) -> None:
        """The columns of a split; ``repeated``: its trainer's have been counted before."""
        trainer = source.trainer
        self._look_at(source.rollout_flags)
        if not repeated:
            self._look_at(source.trainer_flags)
            self._look_at(trainer.dropped)
        self.combinations += source.rollout.possible * trainer.count
        ruled = _ruled(source)
        self.ruled = ruled | self.ruled
        trainer_miss, engine_miss = _trainer_miss(source), None if ruled else _engine_miss(source)
        self.leanest = min(filter(None, (self.leanest, trainer_miss)), default=None)
        self.roomiest = max(filter(None, (self.roomiest, engine_miss)), default=None)
        if not (ruled or trainer_miss or engine_miss):
            self.misses += _reasons(source)
        for one, column, own in zip(source.context.scorers, source.scorers, source.split.scorers, strict=True):
            if column is None:
                self.misses.append(f"no engine on {own or source.split.trainer} devices holds {one.scorer.name}")

    def pairs(self, source: SplitColumns, pairs: ScreenedPairs) -> None:
        """The pairs of a split that were made of the columns left."""
        self._look_at(pairs.flags)
        costed = np.isfinite(pairs.rl_step_s)
        if not costed.any():
            ruled = bool(len(pairs.flags)) and bool(np.all(pairs.flags & int(Reject.FRAMEWORK)))
            why = "the framework refuses them together" if ruled else "not together"
            self.misses.append(f"engine and trainer fit the device each alone, but {why}")
        elif (limited := costed & (pairs.flags == int(Reject.LIMIT))).any():
            self._limited(source, float(pairs.rl_step_s[limited].min()))

    def _limited(self, source: SplitColumns, taken: float) -> None:
        """An rl_step that limits alone refuse; of those of a batch the fastest and the cheapest are told."""
        batch, usd_per_s = source.demand.batch, source.split.usage(source.context).usd_per_s
        counts = source.context.job.limits.usd_per_step is not None and usd_per_s is not None
        found = (taken, taken * usd_per_s if counts and usd_per_s is not None else None, source.split.total)
        fastest, cheapest = self.limited.setdefault(batch, (found, found))
        fastest = min(fastest, found, key=lambda one: one[0])
        self.limited[batch] = (fastest, min(cheapest, found, key=lambda one: one[0] if one[1] is None else one[1]))

    def told(self) -> tuple[str, ...]:
        """The nearest misses in words, each once."""
        limited = []
        for batch, (fastest, cheapest) in self.limited.items():
            for word, (taken, usd, devices) in {"fastest": fastest, "cheapest": cheapest}.items():
                price = "" if usd is None else f" and {human_usd(usd)} USD on {devices} devices"
                if word == "fastest" or cheapest != fastest:
                    step = f"the {word} rl_step of {batch.prompts} x {batch.group_size}"
                    limited.append(f"{step} takes {human_seconds(taken)}{price}")
        nearest = [one[1] for one in (self.leanest, self.roomiest) if one]
        return tuple(dict.fromkeys([*self.misses, *nearest, *self.ruled.values(), *limited]))

    def _look_at(self, flags: IntArray) -> None:
        self.candidates += len(flags)
        self._refuse(count_reasons(flags))

    def _refuse(self, more: dict[str, int]) -> None:
        for reason, count in more.items():
            self.rejected[reason] = self.rejected.get(reason, 0) + count


def _trainer_miss(source: SplitColumns) -> tuple[float, str] | None:
    """The trainer that misses device memory by least, where none fits: by how much [GB], and words."""
    trainer, flags = source.trainer, source.trainer_flags
    over = np.flatnonzero(flags == int(Reject.MEMORY))
    if not len(over) or (flags == 0).any():
        return None
    least = over[np.argmin(trainer.peak_bytes[over])]
    limit = peak_limit(source.context, source.context.trainers[int(trainer.backend[least])])
    more = float(trainer.peak_bytes[least] - limit) / 1e9
    words = layout_words(trainer.layout.take(least).values())
    return more, f"the leanest trainer ({words}) needs {more:.1f} GB more per device"


def _ruled(source: SplitColumns) -> dict[str, str]:
    """What the framework asks of engines that would fit, where none of them is left: rule and words."""
    rules = source.engine_rules
    if rules is None or (source.rollout_flags == 0).any():
        return {}
    found = rules.said(source.rollout.flags == 0)
    return {rule: f"engines that fit are none of {rules.facts.name}'s: {words}" for rule, words in found.items()}


def _engine_miss(source: SplitColumns) -> tuple[float, str] | None:
    """The engine with the largest cache, where none is left, or with the least too much beside it: tokens, words."""
    rollout, flags = source.rollout, source.rollout_flags
    short = np.flatnonzero((flags == int(Reject.KV)) | (flags == int(Reject.MEMORY)))
    if not len(short) or (flags == 0).any():
        return None
    over = rollout.awake_bytes[short] - awake_limits(source.context, rollout.unbound_bytes[short])
    beside = np.flatnonzero((rollout.kv_tokens[short] > 0) & (over > 0))
    if len(beside) and not (flags[short] == int(Reject.KV)).any():
        least = beside[np.argmin(over[beside])]
        share = f"at memory_fraction {rollout.memory_fraction[short[least]]:g} with what lies beside it"
        held = float(rollout.kv_tokens[short[least]])
        return held, f"the leanest engine {share} is {human_bytes(over[least])} too large"
    most = float(rollout.kv_tokens[short[over <= 0]].max(initial=0.0))
    return most, f"the roomiest engine caches {most:,.0f} tokens"


def _reasons(source: SplitColumns) -> list[str]:
    """The first role without a layout, and what most of its columns fall to, those of other numbers of devices last."""
    for role, flags in (("rollout", source.rollout_flags), ("trainer", source.trainer_flags)):
        if not (flags == 0).any():
            why = count_reasons(flags[(flags & int(Reject.DEVICES)) == 0]) or count_reasons(flags)
            most = f": {max(why, key=lambda reason: why[reason])}" if why else ""
            return [f"no {role} layout is left{most}"]
    return []
