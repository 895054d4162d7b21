"""A cost graph and a cluster -> how many stages and replicas, on which devices: the least time.

A shape says how many devices each stage has: `(1, 1, 1, 1)` is a pipeline of four, `(2, 2)` two
pipelines of two side by side, `(1, 2)` one of two whose second stage is replicated, `(4,)` plain
data parallelism and `(1,)` one device. Every shape that the cluster has devices for is solved on
every distinct layout of it (`layout_search.py`) as a problem of its own: a stage with R devices
takes an R-th of the time and sums its gradients once a step. So all methods, the memory of each
device and all bounds hold for replicas as they do for single ranks. What stages of several devices
cannot be is a mixture of kinds with shares of their own: a stage is as slow as its slowest device.

Of shapes whose time differs by less than `_TIE` that with the fewest devices is taken, and of
those the one with the fewest stages.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

import networkx as nx

from ..runtime.errors import PlanError
from .cluster import Cluster
from .layout_search import Found, Search, Tried, with_bound
from .mapping import Layout, Shape
from .running import Running, make_setting
from .setting import Setting
from .solve import Solution

_TIE = 0.01
_MOST_GROUPS_COMPARED = 3_000  # of a graph whose other shapes are looked at when stages are given
_MOST_DEVICES_IN_UNEQUAL_SHAPES = 6
_ALL_SHAPES = 16
_OF_DEVICES = ("devices", "links", "overlap", "replicas", "exchange")


@dataclass(frozen=True)
class Choice:
    """The plan taken, and the best of every shape that was looked at. `as_listed_ms` is what the
    shape taken has on the devices as the cluster lists them, if they fit so."""

    search: Search
    found: Found
    by_shape: Mapping[Shape, Found]
    as_listed_ms: float | None

    @property
    def cluster(self) -> Cluster:
        return self.search.cluster

    @property
    def layout(self) -> Layout:
        return self.found.layout

    @property
    def solution(self) -> Solution:
        return self.found.solution

    def least_ms(self, cluster: Cluster) -> float | None:
        """What the shape taken has on the best layout of other devices, None if it does not fit."""
        search = replace(self.search, cluster=cluster, method="chain")
        try:
            return search.tried(self.layout.shape, is_asked=True).least.objective_ms
        except PlanError:
            return None

    def again(self, graph: nx.DiGraph) -> Solution:
        """The plan of the layout taken under other costs of the same graph."""
        return replace(self.search, graph=graph).solve(self.layout)

    def bounded(self, graph: nx.DiGraph, solution: Solution) -> Solution:
        """A plan of the layout taken, with a bound that holds for its shape's other layouts."""
        search = replace(self.search, graph=graph)
        return with_bound(solution, search.bound_ms(self.layout.shape))


def choose(
    graph: nx.DiGraph,
    cluster: Cluster,
    *,
    stages: int | None = None,
    method: str = "auto",
    **options: Any,
) -> Choice:
    """The plan with the least time on the devices of `cluster`, of `stages` stages if asked.

    `options` are those of `solve`. Raises PlanError when no layout fits into the memory of its
    devices, and for times of devices that the graph does not have.
    """
    _check_kinds(graph, cluster)
    check_number(cluster, stages)
    search = _search(graph, cluster, stages, method, options)
    tried: dict[Shape, Tried] = {}
    refused: PlanError | None = None
    is_asynchronous = search.setting(Layout(((0,),))).is_asynchronous
    for shape in shapes(len(cluster.devices), stages, unequal=is_asynchronous):
        is_asked = stages in (None, len(shape))
        if not is_asked and len(graph) > _MOST_GROUPS_COMPARED:
            continue
        try:
            tried[shape] = search.tried(shape, is_asked=is_asked)
        except PlanError as error:
            if is_asked:
                refused = refused or error
    least = {shape: one.least for shape, one in tried.items()}
    eligible = {shape: one for shape, one in least.items() if stages in (None, len(shape))}
    if not eligible:
        raise refused or PlanError("no device can be used.")
    shape = _least(eligible)
    best = search.best(tried[shape], shape)
    listed = tuple(range(sum(shape)))
    as_listed = (one for one in tried[shape].found if one.layout.devices == listed)
    as_listed_ms = next((one.objective_ms for one in as_listed), None)
    return Choice(search, best, {**least, shape: best}, as_listed_ms)


def check_number(cluster: Cluster, stages: int | None) -> None:
    """Raises PlanError where there are fewer devices than stages are asked for."""
    number = len(cluster.devices)
    if stages is not None and stages > number:
        there = f"there {'is' if number == 1 else 'are'} {number} device{'s' * (number > 1)}"
        raise PlanError(
            f"{stages} stages asked, but {there}.", f"--stages {number}, or leave --stages out."
        )


def _search(
    graph: nx.DiGraph, cluster: Cluster, stages: int | None, method: str, options: dict[str, Any]
) -> Search:
    """The options told apart: how ranks run goes into every setting."""
    running = {name: options[name] for name in Running.__annotations__ if name in options}
    base = make_setting(stages or 1, devices=cluster.devices, **running)
    return Search(
        graph,
        replace(cluster, devices=base.devices),
        method,
        {
            field.name: getattr(base, field.name)
            for field in fields(Setting)
            if field.name not in _OF_DEVICES
        },
        {name: value for name, value in options.items() if name not in running},
    )


def shapes(devices: int, stages: int | None = None, *, unequal: bool = True) -> tuple[Shape, ...]:
    """All shapes of at most that many devices; of many devices those that use all or single ones.

    With `stages`, of other numbers of stages only those with equal replicas. `unequal`: single
    stages may be replicated, which the schedule of a synchronous pipeline does not provide for.
    """
    found: dict[Shape, None] = {}
    for depth in range(1, devices + 1):
        most = devices // depth
        for replicas in range(1, most + 1) if devices <= _ALL_SHAPES else {1, most}:
            found[(replicas,) * depth] = None
        few = devices <= _MOST_DEVICES_IN_UNEQUAL_SHAPES
        if unequal and few and stages in (None, depth):
            for ends in combinations(range(1, devices), depth - 1):
                cuts = (0, *ends, devices)
                found[tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False))] = None
    return tuple(found)


def _least(found: Mapping[Shape, Found]) -> Shape:
    least_ms = min(one.objective_ms for one in found.values())
    near = [shape for shape, one in found.items() if one.objective_ms <= least_ms * (1 + _TIE)]
    return min(near, key=lambda shape: (sum(shape), len(shape), found[shape].objective_ms))


def _check_kinds(graph: nx.DiGraph, cluster: Cluster) -> None:
    known = sorted(
        {kind for _, times in graph.nodes(data="times_on", default={}) for kind in times}
    )
    for device in cluster.devices:
        if device.kind is not None and device.kind not in known:
            near = difflib.get_close_matches(device.kind, known, n=1)
            meant = f"Did you mean {near[0]}? " if near else ""
            has = f"It has times on {', '.join(known)}" if known else "Give the device a speed"
            raise PlanError(
                f"the graph has no times on {device.kind}, the kind of {device.name}.",
                f"{meant}{has}.",
            )
