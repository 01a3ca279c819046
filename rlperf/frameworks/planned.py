"""What an exported file was planned for, and what no key of it says, as its header has it: written and read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from rlperf.frameworks.run import Run
from rlperf.plan.answer.plan import Phase
from rlperf.specs.job import Job, Task
from rlperf.specs.modes import MODES
from rlperf.specs.profiles import is_path

_SHARE = r"(?: \([\d,]+ prompts\))?"
_PLANNED_FOR = re.compile(
    r"^(?:# Job (?P<phase>.+)\.\n)?# Planned for (?P<cluster>\S+?)(?:, rollout on (?P<rollout>\S+))?: "
    rf"(?:.*; lengths of (?P<lengths>\S+?{_SHARE}(?:, [^\s\d]\S*?{_SHARE})*?)(?:, rewards (?P<reward>\S+) s)?"
    r"(?:, (?P<generated>[\d,]+) prompts rolled out)?(?:, (?P<at_once>[\d,]+) trajectories at once)?"
    r"(?:, (?P<accepted>\S+) of first drafts accepted)?\.$)?",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Planned:
    """What an exported file was planned for, as its header names it; empty where it does not.

    phase : its tasks, rl_steps and mode
    cluster, rollout : the job's cluster, and the rollout's where it has one of its own
    lengths : of its one task: a preset, or the name of a file that lay beside the job; of several, mixed, all of them
        with their shares (`mixed_lengths`)
    reward : seconds of its rewards, where the task stated them
    generated : prompts rolled out per rl_step, where the task stated them (DAPO)
    at_once : its trajectories under way, where the plan bounds them
    accepted : share of first drafts that its engines accept, where the job stated it
    """

    phase: str = ""
    cluster: str = ""
    rollout: str = ""
    lengths: str = ""
    reward: str = ""
    generated: str = ""
    at_once: str = ""
    accepted: str = ""

    @classmethod
    def of(cls, text: str) -> Planned | None:
        """What the header of a file's text states; None where it has none.

        >>> Planned.of("# Job j: math, async.\\n# Planned for dgx_h100: 8 x h100; lengths of math.").phase
        'j: math, async'
        >>> told = "lengths of math (96 prompts), code (32 prompts), 1,024 trajectories at once."
        >>> both = Planned.of(f"# Planned for dgx_h100: 8 x h100; {told}")
        >>> both.lengths, both.at_once
        ('math (96 prompts), code (32 prompts)', '1,024')
        """
        found = _PLANNED_FOR.search(text)
        return cls(**found.groupdict(default="")) if found else None

    @property
    def reward_s(self) -> float | None:
        """Seconds of rewards; None where none are stated."""
        return _number(self.reward)

    def told(self, run: Run) -> Run:
        """A run of the same lengths with what no key says of it; prompts that a key has rolled out stay."""
        batch = replace(
            run.batch,
            max_trajectories=_count(self.at_once) or run.batch.max_trajectories,
            generated_prompts=run.batch.generated_prompts or _count(self.generated),
        )
        accepted = _number(self.accepted) or run.rollout.draft_acceptance
        return replace(run, batch=batch, rollout=run.rollout.having(draft_acceptance=accepted))


def mixed_lengths(text: str) -> dict[str, int]:
    """Prompts of each length preset, where several are mixed in one batch; empty where they are not.

    >>> mixed_lengths("math (96 prompts), code (32 prompts), math (8 prompts)"), mixed_lengths("math")
    ({'math': 104, 'code': 32}, {})
    """
    found: dict[str, int] = {}
    for name, prompts in re.findall(r"(?:^|, )(\S+) \(([\d,]+) prompts\)(?=$|, )", text):
        found[name] = found.get(name, 0) + (_count(prompts) or 0)
    return found


def _number(text: str) -> float | None:
    """A number as headers write it; None where there is none, as people may have changed them."""
    try:
        return float(text) if math.isfinite(float(text)) else None
    except ValueError:
        return None


def _count(text: str) -> int | None:
    """The same of a whole number, with commas."""
    number = _number(text.replace(",", ""))
    return None if number is None else int(number)


def planned_for(phase: Phase, job: Job) -> str:
    """The devices and lengths of a phase, and what no key of a framework says of it, as `Planned` reads it."""
    pools = {pool.role: f"{pool.devices} x {pool.device}" for pool in phase.pools}
    shared = len(set(pools.values())) == 1 and MODES[phase.mode].shares_devices
    devices = next(iter(pools.values())) if shared else ", ".join(f"{role} {each}" for role, each in pools.items())
    clusters = ", rollout on ".join(_named(each) for each in (job.cluster, job.pool("rollout").cluster) if each)
    told = ", ".join(_told([task for task in job.tasks if task.name in phase.tasks], phase, job))
    return f"Planned for {clusters}: {devices}; lengths of {told}."


def _told(tasks: list[Task], phase: Phase, job: Job) -> list[str]:
    """Lengths of the tasks and, where they are several, their shares; and what is told beside them.

    No framework's key has shares: who runs the file lays out the data so. A batch waits for its slowest reward.
    """
    words = [_named(task.workload) for task in tasks]
    if len(tasks) > 1:
        words = [f"{name} ({task.prompts_per_step[0]:,} prompts)" for name, task in zip(words, tasks, strict=True)]
    rewards = [task.reward_s for task in tasks if task.reward_s is not None]
    rolled = [task.generated_prompts or 0 for task in tasks] if job.algorithm == "dapo" else []
    accepted, most = job.pool("rollout").settings.draft_acceptance, phase.settings.max_trajectories
    if len(rewards) == len(tasks):
        words.append(f"rewards {max(rewards):g} s")
    if rolled and all(rolled) and sum(rolled) > sum(task.prompts_per_step[0] for task in tasks):
        words.append(f"{sum(rolled):,} prompts rolled out")
    if most:
        words.append(f"{most:,} trajectories at once")
    if accepted:
        words.append(f"{accepted:g} of first drafts accepted")
    return words


def _named(profile: str) -> str:
    """A profile's name; of one in a file of its own the file's, for its folder is of this machine."""
    return Path(profile).name if is_path(profile) else profile
