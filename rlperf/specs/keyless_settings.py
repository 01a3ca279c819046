"""What a framework runs where it has no key: of a pool, in some execution modes, on devices of some size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import Field

from rlperf.specs.frozen import Frozen
from rlperf.specs.modes import Mode
from rlperf.specs.pool import PoolSettings, Role


class KeylessSettings(Frozen):
    """Settings of a pool that a framework has no key for, as it runs them."""

    role: Role
    settings: PoolSettings
    versions: str = Field("", description="first-last, either end open; empty: all")
    modes: tuple[Mode, ...] = Field((), description="in which it does; empty: all")
    small_devices: bool | None = Field(
        None, description="on devices that its engine counts as small (`SmallDevices`), or on others; None: on all"
    )

    def applies(self, modes: Sequence[Mode], small: bool | None) -> bool:
        """Whether it may run in one of these modes (none: any) on such a device (None: any)."""
        here = not modes or not self.modes or bool(set(modes) & set(self.modes))
        return here and (small is None or self.small_devices in (None, small))


def running(
    runs: Iterable[KeylessSettings], role: Role, modes: Sequence[Mode] = (), small: bool | None = None
) -> dict[str, tuple[Any, ...]]:
    """Setting -> the values that may run: one, where modes and device decide it.

    >>> tokens = [KeylessSettings(role="rollout", settings=PoolSettings(engine_token_budget=n), small_devices=n < 9000)
    ...           for n in (8192, 16384)]
    >>> running(tokens, "rollout"), running(tokens, "rollout", small=True)
    ({'engine_token_budget': (8192, 16384)}, {'engine_token_budget': (8192,)})
    """
    found: dict[str, dict[Any, None]] = {}
    for each in runs:
        if each.role == role and each.applies(modes, small):
            for name, value in each.settings.stated().items():
                found.setdefault(name, {})[value] = None
    return {name: tuple(values) for name, values in found.items()}
