"""Whether the trainer scores the old policy before an update: what a framework does, and what its files say of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlperf.errors import SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.registry import adapter_of, split_name
from rlperf.plan.question.context import keys_of
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.modes import Mode
from rlperf.specs.releases import versions_of
from rlperf.specs.rl_calibration import load_framework_calibration
from rlperf.specs.trainer_calibration import load_trainer


def in_its_files(facts: FrameworkFacts, modes: Sequence[Mode]) -> bool | None:
    """What exported files say where a job says nothing; None: the framework's own rule, or modes that differ,
    each of which asks alone (`Context.of`).
    """
    if facts.old_policy_in and facts.version not in versions_of(facts.old_policy_in, facts.versions):
        return None
    stated = {facts.old_policy.get(mode, facts.old_policy.get("all")) for mode in modes}
    return stated.pop() if len(stated) == 1 else None


def ruled(framework: str, backend: str | None, updates: int, folder: Path | str | None = None) -> bool | None:
    """By the rule of a framework (with or without a release); None where nothing is known of it."""
    try:
        keys = keys_of(load_trainer(backend, folder=folder), framework) if backend else None
        rule = load_framework_calibration(framework, keys, folder).old_policy_pass
    except SpecError:
        return None
    return rule == "always" or (rule == "off_policy" and updates > 1)


def usual(
    framework: str, mode: Mode, backend: str | None, updates: int, folder: Path | str | None = None
) -> bool | None:
    """What is predicted of a job with one mode that says nothing."""
    name, version = split_name(framework)
    said = in_its_files(framework_facts(adapter_of(name).name, version), (mode,))
    return ruled(framework, backend, updates, folder) if said is None else said
