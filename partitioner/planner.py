"""What the user wants of stages and devices -> a plan of every graph that is asked about.

A plan is made more than once: stages are timed, and cut again with what was found. The devices
are chosen once, from the first graph; all further plans are made for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import networkx as nx

from ..runtime.errors import PlanError
from .advice import advised, shape_candidates, shape_sentence
from .choose import Choice, check_number, choose
from .cluster import ANY_HOST, Cluster
from .cluster_file import read_cluster
from .cost import LOCALHOST, Link
from .options import check_options
from .setting import Device
from .solve import Solution, solve
from .stages_per_rank import choose_stages, other_ways


@dataclass(frozen=True)
class Planner:
    """Plans on equal ranks, or on those of `choice`; `options` are those of `solve`."""

    stages: int | None
    options: Mapping[str, Any]
    choice: Choice | None = None

    @property
    def link(self) -> Link:
        """The slowest that a boundary may be on."""
        return self.choice.cluster.slowest_link if self.choice else LOCALHOST

    def plan(self, graph: nx.DiGraph) -> Solution:
        """The stages of a graph on these ranks."""
        if self.choice:
            return self.choice.again(graph)
        assert self.stages is not None
        return solve(graph, stages=self.stages, link=LOCALHOST, **self.options)

    def advised(self, graph: nx.DiGraph, solution: Solution) -> Solution:
        """The plan with what is to be said of other numbers of stages and of the devices."""
        if self.choice:
            return advised(self.choice, self.choice.bounded(graph, solution), self.stages)
        sentences, ways = other_ways(graph, solution, self.options)
        solution = replace(
            solution,
            explanation=(*solution.explanation, *sentences),
            candidates=(*solution.candidates, *ways),
        )
        if solution.setting.stages < len(solution.loads):
            return solution
        assert self.stages is not None
        equal = Cluster((Device(),) * self.stages, {ANY_HOST: LOCALHOST})
        try:
            options = {**self.options, "method": "chain"}
            options.pop("ranks", None)
            choice = choose(graph, equal, stages=self.stages, **options)
        except PlanError:  # the chain cannot do what the method could
            return solution
        if choice.layout.shape != (1,) * self.stages:
            return solution
        sentence = shape_sentence(choice, self.stages)
        return replace(
            solution,
            explanation=(*solution.explanation, *filter(None, [sentence])),
            candidates=(*solution.candidates, *shape_candidates(choice)),
        )


def planner_for(
    graph: nx.DiGraph, cluster: Cluster | None, stages: int | None, options: Mapping[str, Any]
) -> Planner:
    """Chooses the devices of `cluster`, if one is given, and else the number of stages on `ranks`
    of the options, if none is."""
    if cluster is None:
        return Planner(stages or choose_stages(graph, options), options)
    return Planner(stages, options, choose(graph, cluster, stages=stages, **options))


def cluster_of(
    devices: Cluster | str | Path | None, stages: int | None, ranks: int | None = None
) -> Cluster | None:
    """The devices that may be used; None for equal ranks.

    Raises PlanError when neither devices nor a number of stages or ranks are given.
    """
    if devices is None and stages is None and ranks is None:
        raise PlanError("neither stages nor devices are given.", "stages=4")
    check_options({"stages": stages, "ranks": ranks})
    if devices is None:
        return None
    cluster = devices if isinstance(devices, Cluster) else read_cluster(devices)
    check_number(cluster, stages)
    return cluster


def with_times_on(graph: nx.DiGraph, others: Mapping[str, nx.DiGraph]) -> nx.DiGraph:
    """The graph with the times that the same groups take on other kinds of devices."""
    for group, node in graph.nodes(data=True):
        times = {
            kind: (other.nodes[group]["forward_ms"], other.nodes[group]["backward_ms"])
            for kind, other in others.items()
        }
        if times:
            node["times_on"] = times
    return graph
