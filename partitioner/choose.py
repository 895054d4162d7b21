"""A cost graph and a cluster -> how many stages and replicas, on which devices: the least time.

A shape says how many devices each stage has: `(1, 1, 1, 1)` is a pipeline of four, `(2, 2)` two
pipelines of two side by side, `(1, 2)` one of two whose second stage is replicated, `(4,)` plain
data parallelism and `(1,)` one device. Every shape that the cluster has devices for is solved on
every distinct layout of it (`mapping.py`) as a problem of its own: a stage with R devices takes
an R-th of the time and sums its gradients once a step. So all methods, the memory of each device
and all bounds hold for replicas as they do for single ranks. What stages of several devices
cannot be is a mixture of kinds with shares of their own: a stage is as slow as its slowest device.

While the graph is small each layout is solved by the method asked for; else by the chain DP, and
the best few by the method. Of shapes whose time differs by less than `_TIE` that with the fewest
devices is taken, and of those the one with the fewest stages.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import networkx as nx
import numpy as np

from ..runtime.errors import PlanError
from .cluster import ANY_HOST, Cluster
from .cost import costs_of
from .mapping import Layout, crossings, exchanged, layouts
from .problem import Problem, Rules
from .setting import Setting
from .solve import Solution, solve

_TIE = 0.01
_ORDER_SLACK = 0.002  # of the time, for fewer boundaries between hosts
_MOST_GROUPS_SOLVED = 2_000  # groups x layouts of one shape, by the method asked for
_MOST_WORK = 12_000  # groups x stages x layouts of one shape, by the chain DP
_FEWEST_LAYOUTS, _MOST_LAYOUTS = 3, 120
_MOST_GROUPS_COMPARED = 3_000  # of a graph whose other shapes are looked at when stages are given
_MOST_RESOLVED = 3  # layouts, after the chain DP
_MOST_DEVICES_IN_UNEQUAL_SHAPES = 6
_ALL_SHAPES = 16

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A layout and its plan."""

    layout: Layout
    solution: Solution

    @property
    def objective_ms(self) -> float:
        return objective_ms(self.solution)


@dataclass(frozen=True)
class Choice:
    """The plan taken, and the best of every shape that was looked at. `as_listed_ms` is what the
    shape taken has on the devices as the cluster lists them, if they fit so."""

    cluster: Cluster
    found: Found
    by_shape: Mapping[Shape, Found]
    as_listed_ms: float | None

    @property
    def layout(self) -> Layout:
        return self.found.layout

    @property
    def solution(self) -> Solution:
        return self.found.solution


@dataclass(frozen=True)
class _Tried:
    """The layouts of a shape that fit; whether these are all there are, and by the method asked."""

    found: tuple[Found, ...]
    are_all: bool
    is_final: bool

    @property
    def least(self) -> Found:
        return min(self.found, key=lambda one: one.objective_ms)


def choose(
    graph: nx.DiGraph,
    cluster: Cluster,
    *,
    stages: int | None = None,
    method: str = "auto",
    how: Mapping[str, Any] | None = None,
    **options: Any,
) -> Choice:
    """The plan with the least time on the devices of `cluster`, of `stages` stages if asked.

    `how` are fields of Setting, `options` those of `solve`. Raises PlanError when no layout fits
    into the memory of its devices, and for times of devices that the graph does not have.
    """
    _check_kinds(graph, cluster)
    if stages is not None and stages > len(cluster.devices):
        raise PlanError(
            f"{stages} stages asked, but there are {len(cluster.devices)} devices.",
            f"--stages {len(cluster.devices)}, or --stages auto",
        )
    search = _Search(graph, cluster, method, dict(how or {}), options)
    tried: dict[Shape, _Tried] = {}
    refused: PlanError | None = None
    is_asynchronous = cluster.setting([[0]], **search.how).is_asynchronous
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
    return Choice(cluster, best, {**least, shape: best}, as_listed_ms)


def shape_ms(
    graph: nx.DiGraph, cluster: Cluster, shape: Shape, how: Mapping[str, Any], **options: Any
) -> float | None:
    """What the best layout of one shape takes on other devices; None if it does not fit there."""
    try:
        search = _Search(graph, cluster, "chain", dict(how), options)
        return search.tried(shape, is_asked=True).least.objective_ms
    except PlanError:
        return None


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


def objective_ms(solution: Solution) -> float:
    """What plans are compared by: the milliseconds of a step for each of its micro-batches."""
    return solution.step_ms / solution.setting.micro_batches


def _bound_ms(solution: Solution) -> float:
    return solution.step_bound_ms / solution.setting.micro_batches


def _with_bound(solution: Solution, bound_ms: float) -> Solution:
    """The solution with that bound of its objective, if it is below its own."""
    bound_ms = min(bound_ms, _bound_ms(solution))
    return replace(
        solution,
        lower_bound_ms=min(bound_ms, solution.lower_bound_ms),
        step_bound_ms=bound_ms * solution.setting.micro_batches,
    )


def _least(found: Mapping[Shape, Found]) -> Shape:
    least_ms = min(one.objective_ms for one in found.values())
    near = [shape for shape, one in found.items() if one.objective_ms <= least_ms * (1 + _TIE)]
    return min(near, key=lambda shape: (sum(shape), len(shape), found[shape].objective_ms))


def free_bound_ms(graph: nx.DiGraph, cluster: Cluster) -> float:
    """A bound of every plan on any of the devices, in any order, replicated or not.

    With weights a_d of the devices that sum to 1, the slowest device takes at least the mean
    sum over d of a_d load_d, and a group adds to that at least its least a_d t_d. The weights are
    those of devices that could share the groups at will: a_d in proportion to 1 / (all on d).
    """
    everywhere = Problem(costs_of(graph), Setting(cluster.devices), Rules(np.ones(1, dtype=bool)))
    work_ms = np.stack([seen.work_ms for seen in everywhere.seen])
    if not work_ms.sum(axis=1).all():
        return 0.0
    weights = 1 / work_ms.sum(axis=1)
    return float((weights[:, None] * work_ms).min(axis=0).sum() / weights.sum())


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


@dataclass(frozen=True)
class _Search:
    graph: nx.DiGraph
    cluster: Cluster
    method: str
    how: Mapping[str, Any]
    options: Mapping[str, Any]

    def _most_layouts(self, shape: Shape) -> int:
        """Fewer where some devices would stay idle."""
        most = min(_MOST_LAYOUTS, _MOST_WORK // (len(shape) * len(self.graph)))
        are_idle = sum(shape) < len(self.cluster.devices)
        return max(_FEWEST_LAYOUTS, most // 4 if are_idle else most)

    def tried(self, shape: Shape, *, is_asked: bool) -> _Tried:
        """A shape on its layouts. Raises PlanError if it fits on none."""
        most = self._most_layouts(shape) if is_asked else _FEWEST_LAYOUTS
        ways, are_all = layouts(self.cluster, shape, most)
        is_small = len(self.graph) * len(ways) <= _MOST_GROUPS_SOLVED
        found = self._solved(ways, self.method if is_small else "chain")
        return _Tried(tuple(found), are_all and len(found) == len(ways), is_small)

    def best(self, tried: _Tried, shape: Shape) -> Found:
        """The best of a shape by the method asked for, with a bound for all its layouts."""
        found = sorted(tried.found, key=lambda one: one.objective_ms)
        if not tried.is_final:
            again = self._solved([one.layout for one in found[:_MOST_RESOLVED]], self.method)
            found = sorted(again, key=lambda one: one.objective_ms) + found[_MOST_RESOLVED:]
        if not tried.are_all and max(shape) == 1:
            found = [self._improved(found[0], self.method if tried.is_final else "chain"), *found]
        slack = min(self.options.get("prefer_modules", 0.0), _ORDER_SLACK) + 1e-9
        near = [one for one in found if one.objective_ms <= found[0].objective_ms * (1 + slack)]
        best = min(near, key=lambda one: crossings(self.cluster, one.layout))
        solution = self._solve(best.layout, self.method, self.options)
        if tried.are_all:
            bound_ms = min(_bound_ms(one.solution) for one in found)
        else:
            bound_ms = self._bound_of_all_ms(shape)
        return Found(best.layout, _with_bound(solution, bound_ms))

    def _bound_of_all_ms(self, shape: Shape) -> float:
        """A bound for every layout of a shape: all devices on one host with the fastest link."""
        fastest = self.cluster.fastest_link
        devices = tuple(replace(device, host="") for device in self.cluster.devices)
        together = replace(self.cluster, devices=devices, within={ANY_HOST: fastest}, between={})
        ways, are_all = layouts(together, shape, self._most_layouts(shape))
        if not are_all:
            return free_bound_ms(self.graph, self.cluster)
        search = replace(self, cluster=together, method="chain")
        return min(_bound_ms(one.solution) for one in search._solved(ways, "chain"))

    def _solved(self, ways: Collection[Layout], method: str) -> list[Found]:
        """Those layouts that fit. Raises PlanError if none does."""
        found, refused = [], None
        for layout in ways:
            try:
                solution = self._solve(layout, method, {**self.options, "prefer_modules": 0.0})
            except PlanError as error:
                refused = error
            else:
                found.append(Found(layout, solution))
        if not found:
            raise refused or PlanError("no device can be used.")
        return found

    def _improved(self, found: Found, method: str) -> Found:
        """Better by exchanges of two blocks of devices, as long as one helps and for so many."""
        left = self._most_layouts(found.layout.shape)
        while True:
            for order in exchanged(self.cluster, found.layout.devices):
                left -= 1
                if left < 0:
                    return found
                try:
                    other = self._solved([Layout(tuple((one,) for one in order))], method)[0]
                except PlanError:
                    continue
                if other.objective_ms < found.objective_ms * (1 - 1e-9):
                    found = other
                    break
            else:
                return found

    def _solve(self, layout: Layout, method: str, options: Mapping[str, Any]) -> Solution:
        return solve(
            self.graph,
            stages=layout.stages,
            method=method,
            link=self.cluster.slowest_link,
            setting=self.cluster.setting(layout.columns, **self.how),
            **options,
        )
