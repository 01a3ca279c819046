"""Verdict: is this speed normal? One line first, then at most three things to change, in the framework's own keys.

It is put together from what an audit finds: the prediction of the configuration as it is with its interval, the log's
means beside it, offers that were predicted one by one, and the planner's best on the same devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlperf.frameworks.audit.answer import Audit, best_words, risk_of
from rlperf.frameworks.audit.beside_log import Compared
from rlperf.frameworks.audit.finding import LIKELY
from rlperf.plan.answer.plan import Prediction
from rlperf.units import human_seconds, with_probability

CHANGES = 3
"""Changes that a verdict names at most."""
LEAST = 0.01
"""Smallest gain that is worth a change, as a share of the rl_step."""
FAR, MUCH = 1.5, 0.1
"""A stage stands out by itself that takes so many times its prediction, and such a share of the rl_step longer."""


@dataclass(frozen=True)
class Improvement:
    """Something to change: where, what, and the seconds of an rl_step that it is predicted to gain."""

    key: str
    advice: str
    gain_s: float


@dataclass(frozen=True)
class Verdict:
    """What the speed of a run or configuration is worth.

    Attributes
    ----------
    rl_step_s : measured where there is a log, else predicted [s]
    expected_s, low_s, high_s : what this hardware should take: the prediction, its 5th and 95th percentile [s]
    measured : whether ``rl_step_s`` is from a log
    unlike : whether that log is of other lengths than the prediction, so that neither says much of the other
    slowest : of the logged stages the one that exceeds its prediction by most seconds, where the rl_step is slow or the
        stage stands out (`FAR`, `MUCH`): other stages may make up for it
    changes : largest gain first, at most `CHANGES`
    best_s : the planner's best on the same devices, where it was asked [s]
    unjudged : changes that no prediction judged, and why; empty: all were
    fails : that the run ended out of memory by its log, or without a log more likely than not will; empty: it runs
    cautions : why the answer may mean little: it should run out of memory, the log is of other lengths, or it told the
        calibration
    """

    rl_step_s: float
    expected_s: float
    low_s: float
    high_s: float
    measured: bool
    slowest: Compared | None
    changes: tuple[Improvement, ...]
    best_s: float | None
    unjudged: str = ""
    fails: str = ""
    cautions: tuple[str, ...] = ()
    unlike: bool = False

    @property
    def normal(self) -> bool:
        """Whether it takes what this hardware should: no longer than the interval, or than 5 % beyond the best plan.

        What runs out of memory is not, however fast its rl_steps were until then.
        """
        return not self.fails and self.in_time

    @property
    def in_time(self) -> bool:
        """The same of the speed alone."""
        if self.measured:
            return self.unlike or self.rl_step_s <= self.high_s
        return self.best_s is None or self.rl_step_s <= 1.05 * self.best_s

    @property
    def line(self) -> str:
        """The answer in one line: that it fails, else how fast it is."""
        return f"fails: {self.fails}" if self.fails else self.speed

    @property
    def speed(self) -> str:
        """The speed against what it should be, in one line."""
        took, due = human_seconds(self.rl_step_s), human_seconds(self.expected_s)
        interval = f"{human_seconds(self.low_s)} .. {human_seconds(self.high_s)}"
        if not self.measured:
            said = f"{took} per rl_step is predicted ({interval})"
            if self.best_s is None:
                return f"not judged: {said}; a log of the run or the planner's best would tell"
            if self.in_time:
                return f"normal: {said}, and no plan on this hardware is 5 % faster"
            more = 100.0 * (self.rl_step_s / self.best_s - 1.0)
            return f"slow by {more:.0f} %: {said}, where this hardware can do {human_seconds(self.best_s)}"
        if self.unlike:
            return f"not comparable: {took} per rl_step; of responses of other lengths {due} ({interval}) is predicted"
        if self.rl_step_s < self.low_s:
            return f"faster than expected: {took} per rl_step, where this hardware should take {due} ({interval})"
        if self.in_time:
            return f"normal: {took} per rl_step, where this hardware should take {due} ({interval})"
        more = 100.0 * (self.rl_step_s / self.expected_s - 1.0)
        return f"slow by {more:.0f} %: {took} per rl_step, where this hardware should take {due} ({interval})"


def verdict_of(found: Audit) -> Verdict | None:
    """The verdict of an audited configuration, with or without its log; None where nothing could be predicted."""
    said = found.predicted
    if said is None:
        return None
    stages = [each for each in found.measured if each.stage != "rl_step"]
    whole = next((each for each in found.measured if each.stage == "rl_step"), None)
    step = said.rl_step_s if whole is None else whole.measured_s
    over = [(each.measured_s - each.predicted_s, each) for each in stages if each.predicted_s is not None]
    worst = max(over, key=lambda pair: pair[0], default=(0.0, None))
    told = whole is not None and not found.unlike and worst[0] > 0.0
    slow = told and (step > said.high_s or _stands_out(worst[1], step))
    best = found.best.phases[0].predicted.rl_step_s if found.best else None
    memory = _memory(said)
    fails = found.ended or (memory if whole is None else "")
    return Verdict(
        rl_step_s=step,
        expected_s=said.rl_step_s,
        low_s=said.low_s,
        high_s=said.high_s,
        measured=whole is not None,
        slowest=worst[1] if slow else None,
        changes=_changes(found, said.rl_step_s),
        best_s=best,
        unjudged=found.unjudged,
        fails=fails,
        cautions=(*([memory] if memory and memory != fails else []), *found.cautions),
        unlike=found.unlike,
    )


def _stands_out(stage: Compared | None, step_s: float) -> bool:
    """Whether a stage is slow, whatever the rl_step is."""
    if stage is None or stage.predicted_s is None:
        return False
    return stage.measured_s > max(FAR * stage.predicted_s, stage.predicted_s + MUCH * step_s)


def _memory(said: Prediction) -> str:
    """That a configuration more likely than not runs out of memory; empty where it does not."""
    if risk_of(said) <= LIKELY:
        return ""
    return f"runs out of device memory {with_probability(risk_of(said))}: `rlperf audit` says what frees it"


def _changes(found: Audit, step_s: float) -> tuple[Improvement, ...]:
    """Offers that were predicted, and the planner's best where it gains more than each; largest gain first."""
    offers = [Improvement(each.key, each.advice or each.message, each.gain_s) for each in found.findings if each.gain_s]
    if found.best is not None:
        advice = f"{best_words(found.best, found.job)} (`rlperf plan`, `rlperf export`)"
        gain_s = step_s - found.best.phases[0].predicted.rl_step_s
        if gain_s > LEAST * step_s + max((each.gain_s for each in offers), default=0.0):  # else it is that offer, again
            offers.append(Improvement("the planner's plan", advice, gain_s))
    worth = [each for each in offers if each.gain_s > LEAST * step_s]
    return tuple(sorted(worth, key=lambda each: -each.gain_s)[:CHANGES])


def reasons(found: Audit) -> list[str]:
    """Why nothing could be predicted: keys that will fail, with what mends them, and the audit's notes."""
    wrong = (each for each in found.findings if each.severity == "error")
    return [*(f"{each.key}: {each.message}" + f" ({each.advice})" * bool(each.advice) for each in wrong), *found.notes]


def lines_of(verdict: Verdict) -> Sequence[str]:
    """The verdict as text: the answer, where a slow run loses it, what to change."""
    before = "speed until then" if verdict.measured else "speed if it ran"
    lines = [verdict.line, *([f"{before}: {verdict.speed}"] if verdict.fails else []), *verdict.cautions]
    if verdict.slowest is not None:
        lines.append(f"look first at {verdict.slowest.words}")
    for number, change in enumerate(verdict.changes, 1):
        share = 100.0 * change.gain_s / verdict.expected_s
        words = change.advice if change.key in change.advice else f"{change.key}: {change.advice}"
        lines.append(f"{number}. {words} [gain {human_seconds(change.gain_s)}, {share:.0f} %]")
    if verdict.unjudged:
        lines.append(verdict.unjudged)
    elif not verdict.changes and not verdict.fails:
        lines.append("nothing to change is predicted to gain 1 %")
    return lines
