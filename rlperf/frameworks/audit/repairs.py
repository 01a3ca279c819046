"""Repairs: a change said in a framework's own keys, and read back as the framework would read it.

What is read back to the configuration as it was is no repair: no advice is a no-op.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import log

from rlperf.errors import RlperfError
from rlperf.frameworks.adapter import Source, framework_facts
from rlperf.frameworks.export import architecture_of
from rlperf.frameworks.fields import Target
from rlperf.frameworks.imports import Imported, check_keys, understand
from rlperf.frameworks.keytable import ABSENT, Flat, Value
from rlperf.frameworks.run import Ref, Run
from rlperf.specs.framework import Rule

_FACTORS = (2, 3, 4, 8, 16, 32)
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[a-z]\w+")
_QUOTED = re.compile(r"[\"'](\w+)[\"']")


@dataclass(frozen=True)
class Repair:
    """Keys with the values that they would get, and the configuration as it would then be read."""

    settings: Flat
    imported: Imported

    @property
    def words(self) -> str:
        """``set a.b: 4, c: true; leave out d``: what is nothing by default goes from its file; no flag takes null."""
        out = [key for key, value in self.settings.items() if value is None and self._goes(key)]
        put = [f"{key}: {as_yaml(value)}" for key, value in self.settings.items() if key not in out]
        told = ("set " + ", ".join(put) if put else "", "leave out " + ", ".join(out) if out else "")
        return "; ".join(filter(None, told))

    def _goes(self, key: str) -> bool:
        source, target = self.imported.source, self.imported.target
        spec = target.table.find(key, target.version, target.backend)
        return key in source.lines and spec is not None and spec.default in (None, ABSENT)


def as_yaml(value: Value) -> str:
    """A value as YAML has it.

    >>> as_yaml(None), as_yaml(True), as_yaml(0.85)
    ('null', 'true', '0.85')
    """
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def with_keys(imported: Imported, settings: Flat) -> Repair | None:
    """The configuration with keys set; None where the framework would read it as before, or refuse a key."""
    was = imported.source
    changed = {key: value for key, value in settings.items() if was.keys.get(key, ABSENT) != value}
    legal = check_keys(Source(changed), imported.target)
    if not changed or any(legal):
        return None
    source = replace(
        was,
        keys={**was.keys, **changed},
        additions=was.additions | frozenset(changed),
        words={key: word for key, word in was.words.items() if key not in changed},
    )
    try:
        again = understand(source, imported.framework)
    except (RlperfError, ValueError, TypeError, ArithmeticError):
        return None
    same = again.run == imported.run or again.run.wrong or again.run.missing
    return None if same else Repair(changed, again)


def in_keys(imported: Imported, changes: Iterable[tuple[Ref, Value]]) -> Repair | None:
    """A change of the run in the framework's own keys: what an export of it would write otherwise."""
    changed = tuple(changes)
    try:
        before, after = (_emitted(imported, run) for run in (imported.run, _on_its_devices(imported.run, changed)))
    except (RlperfError, ArithmeticError):  # no key says it, or a zero of the file stands where nothing divides
        return None
    settings = {key: value for key, value in after.items() if before.get(key, ABSENT) != value}
    stated = imported.source.keys  # what is not is at its default
    settings |= {key: imported.target.default(key) for key in before if key not in after and key in stated}
    repair = with_keys(imported, settings)
    if repair is None or all(repair.imported.run.value(at) == imported.run.value(at) for at, _ in changed):
        return None
    return repair


def _on_its_devices(run: Run, changed: Iterable[tuple[Ref, Value]]) -> Run:
    """A run with changes, of other replicas as many as its devices hold: AReaL's strings state how many there are."""
    then = run.having(changed)
    for role in ("trainer", "rollout"):
        was, pool = getattr(run, role), getattr(then, role)
        if pool.replica_devices != was.replica_devices and pool.devices % pool.replica_devices == 0:
            then = then.having([(Ref(role, "data_parallel"), pool.devices // pool.replica_devices)])
    return then


def _emitted(imported: Imported, run: Run) -> dict[str, Value]:
    adapted, _ = imported.adapter.adapt(run, imported.target.version)
    target = Target(imported.target.table, imported.target.version, adapted.trainer.backend or imported.target.backend)
    return {setting.key: setting.value for setting in imported.adapter.emit(adapted, target).settings}


def broken_rules(imported: Imported) -> frozenset[str]:
    """Rules of the framework that a configuration breaks."""
    run = imported.run
    facts = framework_facts(imported.adapter.name, imported.target.version)
    try:
        return frozenset(facts.refused(run.names(architecture_of(run)), run.trainer.backend or ""))
    except (ValueError, TypeError):
        return frozenset({"unanswered"})


def for_rule(imported: Imported, rule: Rule, broken: frozenset[str], *, deeper: bool = True) -> Repair | None:
    """A key of a broken rule with the nearest value under which the rule holds and no other breaks.

    Where a value breaks one other rule, ``deeper`` also sets that rule's key.
    """
    nearly: tuple[Repair, str, frozenset[str]] | None = None
    tried = ({key: value} for key in (rule.mend, rule.key) if key for value in _near(imported, rule, key))
    for settings in tried:
        repair = with_keys(imported, settings)
        if repair is None or rule.id in (now := broken_rules(repair.imported)):
            continue
        if now < broken:
            return repair
        if len(fresh := now - broken) == 1:
            nearly = nearly or (repair, next(iter(fresh)), now)
    return _both(*nearly) if deeper and nearly else None


def _both(first: Repair, broken: str, now: frozenset[str]) -> Repair | None:
    """A repair together with that of the rule that it breaks."""
    facts = framework_facts(first.imported.adapter.name, first.imported.target.version)
    rule = next((each for each in facts.rules if each.id == broken), None)
    then = for_rule(first.imported, rule, now, deeper=False) if rule else None
    return then and Repair({**first.settings, **then.settings}, then.imported)


def _near(imported: Imported, rule: Rule, key: str) -> Iterator[Value]:
    """Other values of a key of a rule, the nearest first.

    A flag turned, the key's default, a word of the rule's advice, a number scaled or of the batch, a text's numbers.
    """
    default = imported.target.default(key)
    given = imported.source.keys.get(key, default)
    spec = imported.target.table.find(key, imported.target.version, imported.target.backend)
    kind = "" if spec is None else spec.kind.rstrip("?")
    refers = isinstance(given, str) and "${" in given
    if isinstance(given, bool) or kind in ("bool", "flag"):
        yield not given
    elif isinstance(given, float) and kind != "int":
        yield from (share for step in range(1, 10) for share in (given - step / 20, given + step / 20) if 0 < share < 1)
    elif isinstance(given, int) or refers or (given is None and kind in ("int", "")):
        yield from _numbers(given if isinstance(given, int) else None, imported.run)
    elif isinstance(given, str):
        for match in _NUMBER.finditer(given):
            for number in _numbers(int(match[0]), imported.run):
                yield f"{given[: match.start()]}{number}{given[match.end() :]}"
        if default not in (None, given):
            yield default
        named = [*_QUOTED.findall(rule.require), *_WORD.findall(rule.advice)]
        yield from (word for word in named if word != given)


def _numbers(given: int | None, run: Run) -> list[int]:
    batch, trainer = run.batch, run.trainer
    found = {1, 2, 4, 8, batch.longest_tokens, batch.prompts, batch.prompts * batch.group_size, batch.mini}
    found |= {-(-batch.longest_tokens // trainer.sequence_split), run.devices, trainer.samples, run.rollout.devices}
    if given is not None and given > 0:
        found |= {given * factor for factor in _FACTORS} | {given // factor for factor in _FACTORS}
        found |= set(range(max(given - 16, 1), given + 17))
        found |= {-(-given // unit) * unit for unit in (run.devices, batch.group_size, trainer.samples) if unit > 0}
    centre = log(max(given or 1, 1))
    return sorted((n for n in found if n >= 1 and n != given), key=lambda n: (abs(log(n) - centre), n))
