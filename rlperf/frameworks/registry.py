"""The frameworks that rlperf knows: facts in ``facts/NAME.yaml``, an adapter in ``NAME.py`` or, of several files, in
``NAME/``."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.frameworks.adapter import Adapter, checked
from rlperf.specs.framework_names import FRAMEWORKS as FRAMEWORKS

_ALIASES = {"nemo": "nemo_rl", "nemorl": "nemo_rl", "nemo_rl": "nemo_rl", "miles_rl": "miles", "skyrl_train": "skyrl"}


_NO_SOURCES = ("prime_rl", "roll")
"""Frameworks of which no package holds the sources (2026-11-27; the index's ``roll`` and ``primerl`` are others)."""


def split_name(text: str) -> tuple[str, str | None]:
    """``verl==0.9`` as name and version.

    >>> split_name("verl==0.9"), split_name("slime")
    (('verl', '0.9'), ('slime', None))
    """
    if "," in text:  # several, for `adapter_of` to refuse with their versions
        return text.strip(), None
    name, _, version = text.partition("==")
    return name.strip(), version.strip() or None


def adapter_of(name: str) -> Adapter:
    """The adapter of a framework.

    Raises
    ------
    SpecError : rlperf knows no such framework; with those it knows
    LookupError : a field of it stands under a key that it has in no version
    """
    wanted = name.strip().lower().replace("-", "_")
    wanted = _ALIASES.get(wanted, wanted)
    if "," in wanted:
        several = [each.strip() for each in name.split(",") if each.strip()]
        hint = f"ranked: rlperf plan --framework {','.join(several)}, rlperf.plan_frameworks(job, {several}) in Python"
        if len(several) < 2:
            raise SpecError(Problem(f"{name!r} is no name of a framework", suggestion="write it without the comma"))
        raise SpecError(Problem(f"{name!r} are several frameworks, one is due", suggestion=hint))
    if wanted in _NO_SOURCES:
        words = f"nothing is known of the keys of {name}: no package holds its sources"
        raise SpecError(Problem(words, suggestion=f"known: {', '.join(FRAMEWORKS)}"))
    if wanted not in FRAMEWORKS:
        hint = did_you_mean(wanted, FRAMEWORKS) or f"known: {', '.join(FRAMEWORKS)}"
        raise SpecError(Problem(f"there is no framework named {name!r}", suggestion=hint))
    return _adapter(wanted)


@cache
def _adapter(name: str) -> Adapter:
    return checked(import_module(f"rlperf.frameworks.{name}").ADAPTER)
