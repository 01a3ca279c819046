"""The performance graph: replayed exactly, ordered right, the same for networkx."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest

from rlperf.diagnose import graph as g
from rlperf.errors import SpecError


def random_graph(seed: int, vertices: int = 60) -> g.PerformanceGraph:
    """Random edges from lower to higher numbers, random durations, gaps and rl_steps; times by brute force."""
    rng = np.random.default_rng(seed)
    pairs = [(u, v) for v in range(1, vertices) for u in range(v) if rng.random() < 0.06]
    duration, gap = rng.uniform(0, 3, vertices), rng.uniform(0, 0.2, vertices)
    end = longest(vertices, pairs, duration, gap)
    build = g.GraphBuilder(("devices",), 8)
    for v in range(vertices):
        build.add(int(rng.integers(0, 18)), end[v] - duration[v], end[v], at=g.Place(rank=int(rng.integers(0, 4))))
    for u, v in pairs:
        build.edge(np.array([u]), np.array([v]))
    return build.freeze()


def longest(vertices: int, pairs: list[tuple[int, int]], duration: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """Ends by the definition, vertex by vertex."""
    end = np.zeros(vertices)
    for v in range(vertices):
        ready = max((end[u] for u, w in pairs if w == v), default=0.0)
        end[v] = ready + gap[v] + duration[v]
    return end


@pytest.mark.parametrize("seed", range(8))
def test_a_replay_is_the_longest_path(seed: int) -> None:
    graph = random_graph(seed)
    pairs = list(zip(graph.edge_source.tolist(), graph.edge_target.tolist(), strict=True))
    rng = np.random.default_rng(seed)
    assert graph.replay(graph.unchanged()) == pytest.approx(graph.end_s, abs=1e-12)
    scale = rng.uniform(0, 1.5, graph.vertices)
    expected = longest(graph.vertices, pairs, graph.duration_s * scale, graph.gap_s)
    assert graph.replay(g.Change(scale)) == pytest.approx(expected, abs=1e-12)
    keep = rng.random(len(pairs)) < 0.7
    kept = [pair for pair, yes in zip(pairs, keep, strict=True) if yes]
    expected = longest(graph.vertices, kept, graph.duration_s, graph.gap_s)
    assert graph.replay(g.Change(np.ones(graph.vertices), keep)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_critical_path_is_bound_all_the_way(seed: int) -> None:
    graph = random_graph(seed)
    path = graph.critical_path()
    assert path[-1] == np.argmax(graph.end_s)
    edges = set(zip(graph.edge_source.tolist(), graph.edge_target.tolist(), strict=True))
    assert all((int(u), int(v)) in edges for u, v in itertools.pairwise(path))
    total = graph.duration_s[path].sum() + graph.gap_s[path].sum()
    assert total == pytest.approx(graph.end_s.max(), abs=1e-12)


def test_networkx_gets_the_same_graph() -> None:
    graph = random_graph(3)
    shown = graph.to_networkx()
    assert nx.is_directed_acyclic_graph(shown)
    assert shown.number_of_nodes() == graph.vertices
    assert shown.number_of_edges() == graph.edge_source.size
    slack = [s for _, _, s in shown.edges(data="slack_s")]
    assert min(slack) == 0.0
    weighted = nx.DiGraph()
    weighted.add_nodes_from(shown)
    for u, v in shown.edges:
        weighted.add_edge(u, v, weight=graph.duration_s[u] + graph.gap_s[v])
    # The longest path of networkx counts sources' durations; add the last vertex and the first one's gap by hand.
    path = graph.critical_path()
    length = sum(weighted[u][v]["weight"] for u, v in itertools.pairwise(path))
    best = nx.dag_longest_path_length(weighted)
    assert length + graph.gap_s[path[0]] + graph.duration_s[path[-1]] == pytest.approx(graph.end_s.max())
    assert best >= length - 1e-9


def test_a_circle_is_refused() -> None:
    build = g.GraphBuilder(("devices",))
    index = build.add(g.REWARD, np.zeros(3), np.ones(3))
    build.edge(index, np.roll(index, 1))
    with pytest.raises(SpecError, match="circle"):
        build.freeze().rl_step_s(build.freeze().replay(build.freeze().unchanged()))
    build = g.GraphBuilder(("devices",))
    build.edge(build.add(g.REWARD, 0.0, 1.0), np.array([5]))
    with pytest.raises(SpecError, match="does not exist"):
        build.freeze().replay(g.Change(np.ones(1)))
