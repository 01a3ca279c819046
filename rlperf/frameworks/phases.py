"""Phases of a plan one after another: what a later one goes on from, and whether it can read that checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlperf.frameworks.adapter import Limitation, framework_facts
from rlperf.frameworks.fields import Setting, Target
from rlperf.frameworks.run import Run


def in_order(runs: Sequence[Run]) -> list[Run]:
    """The runs of a plan's phases, each with the others on its data before and after it."""
    return [
        replace(
            run,
            before=tuple(other for other in runs[:index] if other.data == run.data),
            after=tuple(other for other in runs[index + 1 :] if other.data == run.data),
        )
        for index, run in enumerate(runs)
    ]


def enough_epochs(key: str, run: Run) -> Setting:
    """So many epochs that no data ends a phase before its rl_steps do."""
    return Setting(key, run.ends_at, "enough of any data: the steps end the run")


def checkpoints(run: Run, framework: str, target: Target) -> tuple[tuple[Setting, ...], tuple[Limitation, ...]]:
    """Settings that let one phase read the checkpoint of another, and what none of it can be read."""
    others, ours = (*run.before, *run.after), run.trainer.backend or ""
    if not others:
        return (), ()
    if run.before and run.before[-1].trainer.backend != ours:
        asked = f"going on from a checkpoint of {run.before[-1].trainer.backend} with {ours}"
        return (), (Limitation(asked, *_WEIGHTS_ALONE),)
    facts = framework_facts(framework, target.version)
    form, tied = facts.checkpoints.get(ours), facts.tied(ours)
    if form is not None and not tied:
        moved = any(_moved(run, other, form.tied) for other in others)
        return ((Setting(form.key, True, "phases have other layouts: any reads it"),) if moved else ()), ()
    if run.before and (moved_now := _moved(run, run.before[-1], tied)):
        asked = f"going on from the checkpoint of the phase before, which has another {', '.join(moved_now)}"
        return (), (Limitation(asked, *_WEIGHTS_ALONE),)
    return (), ()


_WEIGHTS_ALONE = (
    "its weights as a Hugging Face folder, which you convert and give as the model",
    "optimizer states are laid out by it: they start anew",
)


def _moved(run: Run, other: Run, names: Sequence[str]) -> list[str]:
    """Names of what two trainers have otherwise."""
    return [name for name in names if getattr(run.trainer, name) != getattr(other.trainer, name)]
