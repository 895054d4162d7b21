"""Small random cost graphs, and all ways to place them: what planners are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields

import networkx as nx
import numpy as np
from hypothesis import strategies as st

from asyncpipe.partitioner.graph.cost_graph import costs_of
from asyncpipe.partitioner.graph.costs import Link, StageSums
from asyncpipe.partitioner.graph.problem import Evaluation, Placement, Problem, Rules, evaluate
from asyncpipe.partitioner.graph.rank_model import Device, RankConfig


@st.composite
def graphs(draw: st.DrawFn, most: int = 8) -> nx.DiGraph:
    """DAGs of 3 to `most` nodes with skips, values with several readers and separate gradients."""
    num_nodes = draw(st.integers(3, most))
    graph = nx.DiGraph(name="random")
    times = st.integers(0, 9)
    for node in range(num_nodes):
        graph.add_node(node, forward_ms=draw(times), backward_ms=draw(times))
    for target in range(1, num_nodes):
        for source in draw(st.sets(st.integers(0, target - 1), max_size=3)):
            names = draw(st.sets(st.sampled_from(["x", "y"]), min_size=1))
            edge = {"tensors": {name: draw(st.integers(1, 5)) for name in names}}
            kind = draw(st.sampled_from(["paired", "own", "none"]))
            if kind == "paired":
                edge["grads"] = edge["tensors"]
            elif kind == "own":
                edge["grads"] = {"gradient": draw(st.integers(1, 5))}
            else:
                edge["grads"] = {}
            graph.add_edge(source, target, **edge)
    return graph


def contiguous(num_groups: int, stages: int) -> Iterator[list[int]]:
    """Every cut of the given order."""
    for cuts in itertools.combinations(range(1, num_groups), stages - 1):
        yield np.searchsorted(cuts, np.arange(num_groups), side="right").tolist()


def all_ordered(graph: nx.DiGraph, stages: int) -> Iterator[tuple[int, ...]]:
    """Every placement in which no edge goes backwards and no stage is empty."""
    position = {node: index for index, node in enumerate(graph)}
    for stage_of in itertools.product(range(stages), repeat=len(graph)):
        if len(set(stage_of)) == stages and all(
            stage_of[position[source]] <= stage_of[position[target]]
            for source, target in graph.edges
        ):
            yield stage_of


SEARCHED = [field for field in fields(StageSums) if field.name != "weight_ms"]
"""What scores depend on, which searches add up by themselves."""

LINKS = st.sampled_from(
    [
        Link(),
        Link(0.5, 1e3),
        Link(0.0, 500.0, duplex=1.6),
        Link(0.25, 1e3, overlap=True),
        Link(0.1, 2e3, overlap=True, duplex=2.0),
    ]
)


def problem_of(
    graph: nx.DiGraph, stages: int, link: Link | None = None, setting: RankConfig | None = None
) -> Problem:
    """The problem that `solve` makes of the same arguments, with free choice of cuts."""
    link = link or Link()
    setting = setting or RankConfig((Device(),) * stages, overlap=link.overlap)
    free = np.ones(len(graph) + 1, dtype=bool)
    return Problem(costs_of(graph, link), setting, Rules(free))


def evaluated(problem: Problem, stage_of: Sequence[int]) -> Evaluation:
    return evaluate(problem, Placement(tuple(stage_of)))


def best_ms(problem: Problem, placements: Iterator[Sequence[int]]) -> float:
    """The least bottleneck of those placements that fit; inf if none does."""
    found = (evaluated(problem, stage_of) for stage_of in placements)
    return min((one.bottleneck_ms for one in found if one.fits), default=np.inf)
