"""A shape on a cluster -> its best layout and plan, with a bound for all its layouts.

A layout names the devices of every stage: one each, the same number each for parallel pipelines, or
more for some stages, which are replicated. Equal devices of one host are interchangeable, and so
are equal hosts: of layouts that differ in nothing else, one is listed. While the distinct orders
are few, all are listed (`device_orders.py`). When they are many, some are, and a search of orders
continues from the best one: exact for few devices, by exchanges of devices and of blocks of equal
devices for many (`order_search.py`).

While the graph is small, the requested method solves each layout; otherwise the chain DP does, and
the method solves the best few. Shapes that are only compared are solved by the chain DP, without
moving cuts for a shorter step. Among layouts whose times are equal within `_ORDER_SLACK`, the one
with the fewest boundaries between hosts is chosen. The bound is the smallest of all layouts'
bounds; if not all layouts were solved, it is that of all devices on one host with the fastest link,
or else of work alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import networkx as nx
import numpy as np

from ...runtime.errors import PlanError
from ..graph.cost_graph import costs_of
from ..graph.problem import Problem, Rules
from ..graph.rank_model import RankConfig
from .cluster import ANY_HOST, Cluster, make_setting
from .compare_methods import ALL
from .device_orders import Order, all_orders, block_orders, exchanged, is_listed, orders, signature
from .keywords import PlanConfig
from .order_search import MOST_EXACT, searched_order
from .solve import QUICK, Solution, solve

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The devices of each stage, by their numbers in the cluster. With the same number for each
    stage, the r-th devices of all stages are the r-th pipeline.
    """

    columns: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of devices of each stage."""
        return tuple(map(len, self.columns))

    @property
    def pipelines(self) -> int:
        """The number of whole parallel pipelines, 0 if single stages are replicated."""
        return self.shape[0] if len(set(self.shape)) == 1 else 0

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices in the order of their ranks: pipeline after pipeline, or stage after
        stage where single stages are replicated."""
        in_turn = zip(*self.columns, strict=True) if self.pipelines else self.columns
        return tuple(device for some in in_turn for device in some)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage, positions in `devices`."""
        rank = {device: index for index, device in enumerate(self.devices)}
        return tuple(tuple(rank[device] for device in column) for column in self.columns)


def shape_name(shape: Sequence[int]) -> str:
    """A number of devices for each stage in words.

    >>> shape_name((1, 1)), shape_name((2, 2)), shape_name((1, 2)), shape_name((1,))
    ('2 stages', '2 stages x 2 replicas', '2 stages x 1-2 replicas', '1 stage')
    """
    stages = f"{len(shape)} stage{'s' * (len(shape) > 1)}"
    if len(set(shape)) > 1:
        return f"{stages} x {'-'.join(map(str, shape))} replicas"
    return stages if shape[0] == 1 else f"{stages} x {shape[0]} replicas"


def layouts(cluster: Cluster, shape: Sequence[int], most: int) -> tuple[tuple[Layout, ...], bool]:
    """The distinct layouts with `shape[j]` devices for each stage j, up to `most`, and whether the
    list is complete.
    """
    if max(shape) == 1:
        single, are_all = orders(cluster, len(shape), most)
        return tuple(map(_in_a_row, single)), are_all
    are_all = is_listed(cluster, sum(shape), most)
    sequences = (all_orders if are_all else block_orders)(cluster, sum(shape))
    distinct: dict[object, Layout] = {}
    for order in sequences:
        for layout in _layouts_of(order, shape):
            kinds = [{cluster.devices[index].kind for index in of} for of in layout.columns]
            if all(len(kinds_of_one) == 1 for kinds_of_one in kinds):
                distinct.setdefault(_layout_signature(cluster, layout), layout)
    return tuple(distinct.values())[:most], are_all and len(distinct) <= most


def _in_a_row(order: Order) -> Layout:
    """The layout with a device for each stage."""
    return Layout(tuple((device,) for device in order))


def _layouts_of(order: Order, shape: Sequence[int]) -> Iterator[Layout]:
    """Fills stage after stage in that order, or pipeline after pipeline if all stages have the same
    number.
    """
    ends = list(accumulate(shape))
    yield Layout(tuple(order[end - size : end] for end, size in zip(ends, shape, strict=True)))
    if len(set(shape)) == 1:
        stages = len(shape)
        pipelines = [order[first : first + stages] for first in range(0, len(order), stages)]
        yield Layout(tuple(zip(*pipelines, strict=True)))


def _layout_signature(cluster: Cluster, layout: Layout) -> object:
    """A layout without the order of pipelines, or of the replicas of single stages."""
    kinds = cluster.kinds
    if layout.pipelines:
        pipelines = zip(*layout.columns, strict=True)
        first = sorted(pipelines, key=lambda indices: repr([kinds[index] for index in indices]))
        return signature(cluster, [index for pipeline in first for index in pipeline])
    columns = [sorted(column, key=lambda index: repr(kinds[index])) for column in layout.columns]
    return signature(cluster, [index for column in columns for index in column])


def crossings(cluster: Cluster, layout: Layout) -> tuple[int, int]:
    """The number of boundaries between two hosts, and the number of ranks with two of those."""
    edges = borders = 0
    for pipeline in zip(*layout.columns, strict=False):
        hosts = [cluster.devices[device].host for device in pipeline]
        remote = [left != right for left, right in pairwise(hosts)]
        edges += sum(remote)
        borders += sum(left and right for left, right in pairwise(remote))
    return edges, borders


def remote_edges(cluster: Cluster, order: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """The hosts on both sides of each boundary that lies between two hosts."""
    hosts = [cluster.devices[device].host for device in order]
    return tuple((left, right) for left, right in pairwise(hosts) if left != right)


def lone_ranks(cluster: Cluster, order: Sequence[int]) -> tuple[int, ...]:
    """The ranks that are alone on their host in a pipeline over several hosts."""
    hosts = [cluster.devices[device].host for device in order]
    count = Counter(hosts)
    return tuple(rank for rank, host in enumerate(hosts) if count[host] == 1 and len(count) > 1)


_ORDER_SLACK = 0.002  # share of the time to give up for fewer boundaries between hosts
_MOST_GROUPS_SOLVED = 2_000  # groups x layouts of one shape, by the requested method
_MOST_WORK = 12_000  # groups x stages x layouts of one shape, by the chain DP
_FEWEST_LAYOUTS, _MOST_LAYOUTS = 3, 120
_MOST_RESOLVED = 3  # layouts, after the chain DP
_OF_DEVICES = ("devices", "links", "overlap", "replicas", "exchange")


@dataclass(frozen=True)
class LayoutResult:
    """A layout and its plan."""

    layout: Layout
    solution: Solution

    @property
    def objective_ms(self) -> float:
        return objective_ms(self.solution)


@dataclass(frozen=True)
class TriedLayout:
    """The layouts of a shape that fit; whether the list is complete and solved by the requested
    method.
    """

    results: tuple[LayoutResult, ...]
    are_all: bool
    is_final: bool

    @property
    def least(self) -> LayoutResult:
        return min(self.results, key=lambda result: result.objective_ms)


@dataclass(frozen=True)
class Search:
    """Shapes of one cluster.

    how: fields of their configurations
    options: the options of `solve`
    """

    graph: nx.DiGraph
    cluster: Cluster
    method: str
    how: Mapping[str, Any]
    options: Mapping[str, Any]

    def _most_layouts(self, shape: Shape) -> int:
        """Fewer layouts if some devices would stay idle."""
        most = min(_MOST_LAYOUTS, _MOST_WORK // (len(shape) * len(self.graph)))
        are_idle = sum(shape) < len(self.cluster.devices)
        return max(_FEWEST_LAYOUTS, most // 4 if are_idle else most)

    def tried(self, shape: Shape, *, is_asked: bool) -> TriedLayout:
        """A shape on its layouts, fewer ones if it is only compared with those that are asked for.
        Raises PlanError if it fits on none."""
        most = self._most_layouts(shape) if is_asked else 2
        ways, are_all = layouts(self.cluster, shape, most)
        is_small = len(self.graph) * len(ways) <= _MOST_GROUPS_SOLVED
        method = QUICK if not is_asked else self.method if is_small else "chain"
        results = self._solved(ways, method)
        if is_asked and not are_all and max(shape) == 1 < len(shape):
            results += self._reordered(results, method)
        return TriedLayout(tuple(results), are_all and len(results) == len(ways), is_small)

    def _reordered(self, results: Sequence[LayoutResult], method: str) -> list[LayoutResult]:
        """The plans on the devices in the listed order and in a searched one, if new and if they
        fit.
        """
        best = min(results, key=lambda result: result.objective_ms)
        solution, order = best.solution, best.layout.devices
        other = searched_order(
            solution.problem,
            solution.placement,
            order,
            self.cluster,
            lambda order: self.setting(_in_a_row(order)),
        )
        ways = {_in_a_row(order) for order in (tuple(range(len(order))), other)}
        try:
            return self._solved(ways - {result.layout for result in results}, method)
        except PlanError:
            return []

    def best(self, tried: TriedLayout, shape: Shape) -> LayoutResult:
        """The best layout of a shape by the requested method, with a bound for all its layouts."""
        results = sorted(tried.results, key=lambda result: result.objective_ms)
        if not tried.is_final:
            shortlist = [result.layout for result in results[:_MOST_RESOLVED]]
            results[:_MOST_RESOLVED] = sorted(
                self._solved(shortlist, self.method), key=lambda result: result.objective_ms
            )
        # The order of few devices is the best one for a load, but a step has to be simulated.
        is_exact = results[0].solution.setting.is_asynchronous and self._is_exact
        if not tried.are_all and max(shape) == 1 and not is_exact:
            method = self.method if tried.is_final else "chain"
            results.insert(0, self._improved(results[0], method))
        slack = min(self.options.get("prefer_modules", _ORDER_SLACK), _ORDER_SLACK) + 1e-9
        limit_ms = results[0].objective_ms * (1 + slack)
        near = [result for result in results if result.objective_ms <= limit_ms]
        best = min(near, key=lambda result: crossings(self.cluster, result.layout))
        solution = self.solve(best.layout)
        if tried.are_all:
            bound_ms = min(_bound_ms(result.solution) for result in results)
        else:
            bound_ms = self.bound_ms(shape)
        return LayoutResult(best.layout, with_bound(solution, bound_ms))

    @property
    def _is_exact(self) -> bool:
        return len(self.cluster.devices) <= MOST_EXACT

    def bound_ms(self, shape: Shape) -> float:
        """A bound for every layout of a shape: all devices on one host with the fastest link."""
        fastest = self.cluster.fastest_link
        devices = tuple(replace(device, host="") for device in self.cluster.devices)
        together = replace(
            self.cluster, devices=devices, within={ANY_HOST: fastest}, between={}, pairs={}
        )
        ways, are_all = layouts(together, shape, self._most_layouts(shape))
        if not are_all:
            return free_bound_ms(self.graph, self.cluster)
        search = replace(self, cluster=together)
        is_small = len(self.graph) * len(ways) <= _MOST_GROUPS_SOLVED
        results = search._solved(ways, self.method if is_small else "chain")
        return min(_bound_ms(result.solution) for result in results)

    def _solved(self, ways: Collection[Layout], method: str) -> list[LayoutResult]:
        """The given layouts that fit. Raises PlanError if none does."""
        # All methods run only on the chosen layout, because running them on each takes too long.
        method = "auto" if method == ALL else method
        results, refused = [], None
        for layout in ways:
            try:
                solution = self._solve(layout, method, {**self.options, "prefer_modules": 0.0})
            except PlanError as error:
                refused = error
            else:
                results.append(LayoutResult(layout, solution))
        if not results:
            raise refused or PlanError("no device can be used.")
        return results

    def _improved(self, result: LayoutResult, method: str) -> LayoutResult:
        """Exchanges two blocks of devices as long as an exchange helps, up to a limit."""
        left = self._most_layouts(result.layout.shape)
        while True:
            for order in exchanged(self.cluster, result.layout.devices):
                left -= 1
                if left < 0:
                    return result
                try:
                    other = self._solved([_in_a_row(order)], method)[0]
                except PlanError:
                    continue
                if other.objective_ms < result.objective_ms * (1 - 1e-9):
                    result = other
                    break
            else:
                return result

    def setting(self, layout: Layout) -> RankConfig:
        """The ranks of a layout and how they run."""
        return self.cluster.setting(layout.columns, **self.how)

    def solve(self, layout: Layout) -> Solution:
        """The plan of a layout, with cuts between blocks where that costs little."""
        return self._solve(layout, self.method, self.options)

    def _solve(self, layout: Layout, method: str, options: Mapping[str, Any]) -> Solution:
        return solve(
            self.graph,
            stages=layout.stages,
            method=method,
            link=self.cluster.slowest_link,
            setting=self.setting(layout),
            **options,
        )


def search_of(
    graph: nx.DiGraph,
    cluster: Cluster,
    stages: int | None,
    method: str,
    options: Mapping[str, Any],
) -> Search:
    """Separates the options of `solve`: those on how ranks run go into every setting."""
    running = {name: options[name] for name in PlanConfig.__annotations__ if name in options}
    base = make_setting(stages or 1, devices=cluster.devices, **running)
    return Search(
        graph,
        replace(cluster, devices=base.devices),
        method,
        {
            field.name: getattr(base, field.name)
            for field in fields(RankConfig)
            if field.name not in _OF_DEVICES
        },
        {name: value for name, value in options.items() if name not in running},
    )


def objective_ms(solution: Solution) -> float:
    """The objective that compares plans: milliseconds of a step per micro-batch."""
    return solution.step_ms / solution.setting.micro_batches


def _bound_ms(solution: Solution) -> float:
    return solution.step_bound_ms / solution.setting.micro_batches


def with_bound(solution: Solution, bound_ms: float) -> Solution:
    """The solution with that bound of its objective, if it is below the solution's own bound."""
    bound_ms = min(bound_ms, _bound_ms(solution))
    return replace(
        solution,
        lower_bound_ms=min(bound_ms, solution.lower_bound_ms),
        step_bound_ms=bound_ms * solution.setting.micro_batches,
    )


def free_bound_ms(graph: nx.DiGraph, cluster: Cluster) -> float:
    """A bound of every plan on any of the devices, in any order, replicated or not.

    With weights a_d of the devices that sum to 1, the slowest device takes at least the mean sum
    over d of a_d load_d, and a group adds to that at least its smallest a_d t_d. The weights are
    those of devices that could share the groups arbitrarily: a_d in proportion to 1 / (time of all
    groups on d).
    """
    everywhere = Problem(
        costs_of(graph), RankConfig(cluster.devices), Rules(np.ones(1, dtype=bool))
    )
    work_ms = np.stack([seen.work_ms for seen in everywhere.seen])
    if not work_ms.sum(axis=1).all():
        return 0.0
    weights = 1 / work_ms.sum(axis=1)
    return float((weights[:, None] * work_ms).min(axis=0).sum() / weights.sum())
