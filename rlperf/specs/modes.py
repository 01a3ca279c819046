"""Execution modes as data: how rollout and training share devices and time, one row of `MODES` each.

A mode is added by a row here, which names the frameworks that have it (or their facts do); everything else (what a
job may ask, how splits are searched, the closed form, the timeline, what is drawn) reads the row's traits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.choice import name_in

IntArray = npt.NDArray[np.int64]


class Form(IntEnum):
    """What a mode's rl_step waits for; `rlperf.sim.rl_step.modes.step_seconds` has a closed form of each.

    SERIAL : one after the other, rollout and the trainer's work
    BARRIER : the next batch is rolled out beside the trainer's work; both meet at every weight sync
    REFILLED : finished requests are replaced at once; rollout runs ahead of the trainer by so many batches
    STREAMED : pieces of a batch go to the trainer as they end; the weight sync waits for the last one
    """

    SERIAL = 0
    BARRIER = 1
    REFILLED = 2
    STREAMED = 3


@dataclass(frozen=True)
class ModeTraits:
    """One execution mode.

    Attributes
    ----------
    name : as a job says it
    says : what it is, in words
    form : what an rl_step waits for
    shares_devices : the same devices take turns; the engine sleeps and wakes, the trainer offloads and onloads
    lag : batches that rollout runs ahead of the trainer, weight versions that a sample is behind; None: as many as
        ``limits.staleness`` allows, which must be one at least
    in_flight_form : the form where engines take weights in flight; None: the same
    weights : whether engines drain (or are interrupted) at a weight sync, take weights in flight, or as the framework
        does it
    bound_counts : the staleness bound counts batches, groups in the order in which they end, or as the framework does
    had_by : frameworks that have it, beside those whose own facts say so -> how they run it, in words; their adapters
        have no key for it, so exports say that it is to be added by hand
    """

    name: str
    says: str
    form: Form
    shares_devices: bool = False
    lag: int | None = 0
    in_flight_form: Form | None = None
    weights: Literal["drained", "in_flight", "framework"] = "framework"
    bound_counts: Literal["batches", "groups", "framework"] = "batches"
    had_by: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def code(self) -> int:
        """Row number in `MODES`, for arrays over candidates."""
        return list(MODES).index(self.name)

    @property
    def overlaps(self) -> bool:
        """Rollout and the trainer's work run beside each other: a log's rollout is what the trainer waited."""
        return self.form is not Form.SERIAL

    @property
    def runs_ahead(self) -> bool:
        """Rollout of the next batches goes on while this one trains: samples are stale."""
        return self.lag != 0

    @property
    def streams(self) -> bool:
        """Pieces of a batch go to the trainer before its last response has ended."""
        return self.form is Form.STREAMED

    def lends(self, in_flight: bool) -> bool:
        """Whether the trainer has devices of its own that stand idle until a batch's last response has ended.

        >>> [name for name, mode in MODES.items() if mode.lends(False)], MODES["one_step_off"].lends(True)
        (['disaggregated', 'one_step_off'], False)
        """
        return not self.shares_devices and self.form_where(in_flight) in (Form.SERIAL, Form.BARRIER)

    @property
    def waits_for_groups(self) -> bool:
        """The rl_step depends on how long a group takes, not on whole rollouts alone."""
        return self.streams or self.bound_counts != "batches"

    @property
    def least_staleness(self) -> int:
        """What ``limits.staleness`` must allow."""
        return 1 if self.lag is None else self.lag

    def staleness(self, limit: int) -> int:
        """Policy versions that a trained sample may be behind, of those that ``limit`` allows.

        >>> [MODES[name].staleness(3) for name in ("colocated", "one_step_off", "async")]
        [0, 1, 3]
        """
        return limit if self.lag is None else min(self.lag, limit)

    def form_where(self, in_flight: bool) -> Form:
        """The form with or without weights taken in flight.

        >>> MODES["one_step_off"].form_where(True).name, MODES["one_step_off"].form_where(False).name
        ('REFILLED', 'BARRIER')
        """
        return self.in_flight_form if in_flight and self.in_flight_form is not None else self.form


MODES: dict[str, ModeTraits] = {
    row.name: row
    for row in (
        ModeTraits("colocated", "the same devices take turns", Form.SERIAL, shares_devices=True),
        ModeTraits("disaggregated", "own pools that wait for each other; nothing is stale", Form.SERIAL),
        ModeTraits(
            "one_step_off",
            "the next batch is rolled out while this one trains; both meet at every weight sync",
            Form.BARRIER,
            lag=1,
            in_flight_form=Form.REFILLED,  # engines that take weights while they generate need no meeting
        ),
        ModeTraits(
            "k_step_off",
            "up to limits.staleness further batches are under way; rollout refills continuously",
            Form.REFILLED,
            lag=None,
        ),
        ModeTraits(
            "async",
            "rollout never waits for a batch; a queue bounded by limits.staleness stands between",
            Form.REFILLED,
            lag=None,
            bound_counts="framework",
        ),
        ModeTraits("streaming", "pieces of a batch go to the trainer as they end, still on-policy", Form.STREAMED),
    )
}
"""The one table: name -> traits, in the order of their codes."""


def mode_traits(name: str) -> ModeTraits:
    """The row of a mode.

    Raises
    ------
    SpecError : no such mode

    >>> mode_traits("colocated").shares_devices, mode_traits("streaming").overlaps
    (True, True)
    """
    try:
        return MODES[name]
    except KeyError:
        hint = did_you_mean(name, MODES) or f"modes are {', '.join(MODES)}"
        raise SpecError(Problem(f"there is no execution mode {name!r}", suggestion=hint)) from None


_SYNONYMS = dict.fromkeys(("sync", "synchronous", "on_policy", "hybrid"), "colocated")
"""What people call a mode, and look for it under."""
Mode = Annotated[str, *name_in(MODES, "execution mode", "modes", _SYNONYMS)]
"""The name of a mode, in jobs and plans."""


def mode_codes(modes: npt.ArrayLike) -> IntArray:
    """Codes of modes given as names or codes.

    >>> mode_codes(["colocated", "streaming"]) == [MODES["colocated"].code, MODES["streaming"].code]
    array([ True,  True])
    >>> mode_codes("async").shape, mode_codes([0, 5]).tolist()
    ((), [0, 5])
    """
    values = np.asarray(modes)
    if values.dtype.kind != "U":
        return values.astype(np.int64)
    flat = [mode_traits(str(name)).code for name in values.ravel()]
    return np.array(flat, dtype=np.int64).reshape(values.shape)


def mode_of_staleness(staleness: float, *, shares_devices: bool = False, beyond: Mode = "async") -> Mode:
    """The mode of a run that is not named but described; ``beyond``: what more than one rl_step behind is.

    >>> [mode_of_staleness(n) for n in (0, 1, 4)], mode_of_staleness(2, shares_devices=True)
    (['disaggregated', 'one_step_off', 'async'], 'colocated')
    """
    if shares_devices:
        return "colocated"
    if staleness == 0:
        return "disaggregated"
    return "one_step_off" if staleness == 1 else beyond
