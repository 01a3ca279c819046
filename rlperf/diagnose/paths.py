"""Backtracking: from the end of an rl_step along waiting edges to a root, in words.

ScalAna's backtracking (arXiv 2009.01692, section III-C) follows the dependence by which a vertex really waited: at a
barrier to the rank that came last, at a queue to its slowest source, inside a rank to the vertex before.
"""

from __future__ import annotations

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.diagnose.faults import Fault
from rlperf.layout import BoolArray, IntArray
from rlperf.units import human_seconds

MOST_HOPS = 6


def fault_path(graph: g.PerformanceGraph, fault: Fault) -> tuple[str, ...]:
    """From the end of the rl_step back to the fault; where it is hidden behind something else, from its own end."""
    path = graph.critical_path()
    on_path = np.flatnonzero(fault.vertices[path])
    words: list[str] = []
    if on_path.size:
        at = int(on_path[np.argmax(graph.duration_s[path[on_path]])])
        words += _waits(graph, path[at:])
        root = int(path[at])
    else:
        affected = np.flatnonzero(fault.vertices)
        if not affected.size:
            return (f"{fault.where}: {fault.evidence}",)
        root = int(affected[np.argmax(graph.end_s[affected])])
        words += ["not on the critical path now: something slower hides it"]
    words.append(f"{graph.name(root)}: {_seconds(graph, path, fault.vertices)}")
    words.append(f"root: {fault.kind.replace('_', ' ')} at {fault.where}, {fault.evidence}")
    return tuple(words)


def structural_path(graph: g.PerformanceGraph, name: str, change: g.Change) -> tuple[str, tuple[str, ...]]:
    """Where a structural cost shows on the critical path, and the path there, in words."""
    path = graph.critical_path()
    changed = np.abs(change.scale - 1.0) > 1e-12
    if change.keep is not None and not changed.any():
        # Only waits are removed: what they wait for is the root.
        changed[graph.edge_source[~change.keep]] = True
    elif change.keep is not None:
        changed[graph.edge_target[~change.keep]] = True
    on_path = np.flatnonzero(changed[path])
    if not on_path.size:
        return "off the critical path", (f"{name.replace('_', ' ')} shows only where other causes are removed",)
    at = int(on_path[np.argmax(graph.duration_s[path[on_path]])])
    longest = int(path[at])
    words = [*_waits(graph, path[at:]), f"{graph.name(longest)}: {_seconds(graph, path, changed)}"]
    return graph.name(longest), tuple(words)


def _seconds(graph: g.PerformanceGraph, path: IntArray, mask: BoolArray) -> str:
    own = path[mask[path]]
    step = max(np.unique(graph.rl_step).size, 1)
    return f"{human_seconds(float(graph.duration_s[own].sum()) / step)} of the critical path"


def _waits(graph: g.PerformanceGraph, path: IntArray) -> list[str]:
    """Barriers between a root and the end of its rl_step, the last first: who came last there and by how much."""
    path = path[graph.rl_step[path] == graph.rl_step[path[0]]]
    words = [f"the rl_step ends with {graph.name(int(path[-1]))}"] if graph.activity[path[-1]] != g.BARRIER else []
    seen: set[str] = set()
    for before, at in zip(path[-2::-1].tolist(), path[:0:-1].tolist(), strict=True):
        if graph.activity[at] != g.BARRIER or graph.activity[before] == g.BARRIER:
            continue
        ends = graph.end_s[graph.edge_source[graph.edge_target == at]]
        late = float(graph.end_s[before] - np.median(ends))
        text = f"{ends.size} wait for {graph.name(before)}, {human_seconds(late)} after the median"
        if ends.size > 1 and late > 0 and text not in seen:
            words.append(text)
            seen.add(text)
    return words[:MOST_HOPS] if len(words) <= MOST_HOPS else [*words[: MOST_HOPS - 1], f"... {words[-1]}"]
