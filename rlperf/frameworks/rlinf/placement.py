"""Where RLinf places its components: ranks of GPUs by component, in groups of nodes."""

from __future__ import annotations

from collections.abc import Mapping

from rlperf.frameworks.keytable import Flat

PLACED = "cluster.component_placement"


def placements(flat: Flat) -> dict[str, str]:
    """Component -> its ranks of GPUs as they are stated: ``actor,rollout: 0-7``, or a map with a node group."""
    found: dict[str, str] = {}
    for key, value in flat.items():
        if key.startswith(PLACED + ".") and value is not None:
            names = key.removeprefix(PLACED + ".")
            group, _, part = names.rpartition(".")
            if part == "placement":
                names = group
            elif part == "node_group" and group:
                continue
            found |= {name.strip(): str(value) for name in names.split(",")}
    return found


def grouped(flat: Flat) -> list[str]:
    """Placements in a group of nodes other than ``cluster``, which is RLinf's own word for all (scheduler/node.py)."""
    own = (key for key in flat if key.startswith(PLACED + ".") and key.endswith(".node_group"))
    return [key for key in own if flat[key] not in (None, "cluster")]


def ranks_of(placed: Mapping[str, str], role: str, devices: int) -> tuple[int, ...]:
    """Ranks of GPUs of a component as they are named: ``0-3``, ``all``, ``0-3:0-7,5``; behind a colon are processes."""
    stated, ranks = placed.get(role, ""), list[int]()
    for part in filter(None, (each.partition(":")[0].strip() for each in stated.split(","))):
        first, dash, last = part.partition("-")
        if part == "all":
            ranks += range(devices)
        elif first.isdecimal() and (last.isdecimal() and int(last) >= int(first) if dash else not last):
            ranks += range(int(first), min(int(last or first), int(first) + _MOST) + 1)
        else:
            raise ValueError(f"{PLACED}: {role}: {stated!r} is no range of ranks")
    return tuple(ranks)


_MOST = 1 << 20
"""Ranks of one range beyond which none is real."""
