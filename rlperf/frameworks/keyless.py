"""What no key of a framework states: fields under keys that it never had, and degrees that a plan may not take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlperf.frameworks.fields import Field
from rlperf.frameworks.keytable import KeyTable
from rlperf.frameworks.run import Ref, Run, ref
from rlperf.specs.framework import Rule
from rlperf.specs.pool import of_role

POOLS = ("trainer", "rollout")
ZERO = ref("trainer.zero_stage")


def misspelled(fields: Iterable[Field], table: KeyTable) -> list[str]:
    """``field: key`` of every key that is in no version of the table, with what it may have meant."""
    wrong = []
    for entry in fields:
        for key in entry.keys:
            if not any(table.find(key, version) for version in table.versions):
                near = table.suggestion(key, table.versions[-1])
                wrong.append(f"{key} ({entry.at})" + (f", {near}" if near else ""))
    return wrong


def degrees() -> list[Ref]:
    """What of a layout an export has to state: every degree that does not follow from others, and the ZeRO stage."""
    named = [ref(f"{pool}.{each.name}") for pool in POOLS for each in of_role(pool, "layout") if each.degree]
    return [*(at for at in named if at.name != "data_parallel"), ZERO]


def keyless_rules(
    fields: Sequence[Field], table: KeyTable, version: str, empty: Mapping[str, Run | None], said: Sequence[Rule] = ()
) -> list[Rule]:
    """A rule for each degree that has no key with a trainer backend; ``empty``: what runs there where nothing is said.

    So has one whose key holds some values alone (ZeRO stages of Megatron: its optimizer is distributed, or not).
    Where what runs is not known, no degree is taken, and the ZeRO stage is left to the export, which reads what it
    wrote. What a rule of the facts has already ``said`` in better words is not said again. The planner leaves out what
    breaks a rule, a pinned degree is refused by its name, and an export stops.
    """
    rules = []
    for at in degrees():
        stated = [entry for entry in fields if entry.at == at]
        usual: dict[str, tuple[int, ...]] = {}
        for name, run in empty.items():
            here = [entry.unit.takes for entry in stated if entry.states(table, version, name)]
            if here and None not in here:
                usual[name] = tuple(sorted({int(value) for takes in here for value in takes or ()}))
            elif not here and (run or at != ZERO):
                usual[name] = ((run or Run()).value(at),)
        if len(usual) == len(empty) and len(set(usual.values())) == 1:
            usual = {"": next(iter(usual.values()))}
        rules += [_rule(at, values, backend, table, version) for backend, values in usual.items()]
    return [rule for rule in rules if not any(_covers(other, rule, table, version) for other in said)]


def _covers(other: Rule, rule: Rule, table: KeyTable, version: str) -> bool:
    """Whether a rule of the facts refuses all that a derived one does."""
    parts = other.require.split(" and ")
    here = other.applies(version, table.versions) and other.backend in ("", rule.backend)
    return here and other.when is None and rule.require in parts


def _rule(at: Ref, values: tuple[int, ...], backend: str, table: KeyTable, version: str) -> Rule:
    there = " or ".join(map(str, values))
    return Rule(
        id=f"no_key_{at.group}_{at.name}" + (f"_{backend}" if backend else ""),
        require=" or ".join(f"{at} == {value}" for value in values),
        key=str(at),
        says=f"no key of {table.framework} {version} states {at} ({{{at}}}); it is {there} there",
        stage="parse",
        source=f"facts/{table.framework}.tsv",
        backend=backend,
    )
