"""Options of the simulated engine beyond its limits: speculative decoding and the tool environment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlperf.errors import SpecError
from rlperf.layout import IntArray
from rlperf.specs.engine_calibration import EngineCalibration


@dataclass(frozen=True)
class Speculation:
    r"""Speculative decoding: k tokens are drafted and verified in one engine_step.

    Expected tokens per engine_step (Leviathan et al. 2023, arXiv 2211.17192, eq. 1), acceptances taken as independent:

    .. math:: m = (1 - a^{k+1}) / (1 - a)

    Attributes
    ----------
    draft_tokens : k
    acceptance : a, probability that a drafted token is accepted [1]
    draft_s : seconds that drafting adds to each decoding engine_step (all k tokens) [s]
    draft_per_request_s : the same, per decoding request [s]

    >>> round(Speculation(draft_tokens=3, acceptance=0.5).tokens_per_step, 4)
    1.875
    """

    draft_tokens: int
    acceptance: float
    draft_s: float = 0.0
    draft_per_request_s: float = 0.0

    def __post_init__(self) -> None:
        if self.draft_tokens < 1 or not 0.0 <= self.acceptance <= 1.0:
            raise SpecError("speculation: draft_tokens must be at least 1 and acceptance between 0 and 1")

    @property
    def tokens_per_step(self) -> float:
        """m, expected tokens emitted by one engine_step per request."""
        return float(sum(self.acceptance**i for i in range(self.draft_tokens + 1)))


@dataclass(frozen=True)
class EngineOptions:
    """What the engine does beyond `EngineLimits`.

    Attributes
    ----------
    speculation : speculative decoding, or None
    tool_concurrency : tool calls that may run at once for this replica (others queue in order); None = any
    trajectories : trajectories that this replica has under way at once, from their first turn to their last, whether
        they decode or wait for a tool; the next starts as one ends; None = any
    async_scheduling : an engine_step is scheduled while the one before it runs (vLLM since 0.14), so arrivals and the
        places of completed requests are seen one engine_step later; an idle engine sees them at once
    """

    speculation: Speculation | None = None
    tool_concurrency: int | None = None
    trajectories: int | None = None
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        if self.tool_concurrency is not None and self.tool_concurrency < 1:
            raise SpecError("tool_concurrency must be at least 1")
        if self.trajectories is not None and self.trajectories < 1:
            raise SpecError("trajectories must be at least 1")

    @classmethod
    def of(cls, engine: EngineCalibration) -> EngineOptions:
        """As an engine's profile has it."""
        return cls(async_scheduling=engine.schedules_ahead)

    @property
    def tokens_in_flight(self) -> int:
        """Tokens per request that a decoding engine_step computes: 1, or drafts and bonus token."""
        return 1 if self.speculation is None else self.speculation.draft_tokens + 1


@dataclass(frozen=True)
class DecodeClock:
    """Tokens that a decoding request has gained after c decoding engine_steps: tau(c) = floor(c m).

    All requests share the clock, so the expected value m of speculative decoding keeps contexts whole numbers and
    the sum of tau over a run of engine_steps is a difference of two entries. Without speculation tau(c) = c.
    """

    tokens_per_step: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether every engine_step gains exactly one token."""
        return self.tokens_per_step == 1.0

    def tau(self, steps: int) -> int:
        """floor(c m), with a guard against rounding just below a whole number."""
        return steps if self.plain else int(steps * self.tokens_per_step + 1e-9)

    def steps_for(self, tokens: int) -> int:
        """Smallest c with tau(c) >= tokens."""
        if self.plain:
            return tokens
        c = max(int(tokens / self.tokens_per_step) - 1, 0)
        while self.tau(c) < tokens:
            c += 1
        return c

    def last_step_within(self, tokens: int) -> int:
        """Largest c with tau(c) <= tokens."""
        return self.steps_for(tokens + 1) - 1

    def tau_sum(self, start: int, count: int) -> int:
        """Sum of tau(start) ... tau(start + count - 1)."""
        if self.plain:
            return count * start + count * (count - 1) // 2
        self._grow(start + count)
        return self._sums[start + count] - self._sums[start]

    @cached_property
    def _sums(self) -> list[int]:
        return [0]

    def _grow(self, size: int) -> None:
        if size >= len(self._sums):
            taus = self.tau_array(np.arange(max(2 * size, 1024), dtype=np.int64))
            self._sums[:] = [0, *np.cumsum(taus).tolist()]

    def tau_array(self, steps: IntArray) -> IntArray:
        """tau of many step counts."""
        if self.plain:
            return steps
        taus: IntArray = np.floor(steps * self.tokens_per_step + 1e-9).astype(np.int64)
        return taus
