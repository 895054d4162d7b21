"""A shape on a cluster -> its best layout and plan, with a bound for all its layouts.

While the graph is small each layout is solved by the method asked for; else by the chain DP, and
the best few by the method. Of layouts that take as long to within `_ORDER_SLACK` that with the
fewest boundaries between hosts is taken. The bound is the least of all layouts' bounds; where not
all were looked at, that of all devices on one host with the fastest link, or else of work alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import numpy as np

from ..runtime.errors import PlanError
from .cluster import ANY_HOST, Cluster
from .compare import ALL
from .cost_graph import costs_of
from .mapping import Layout, Shape, crossings, exchanged, layouts
from .problem import Problem, Rules
from .setting import Setting
from .solve import Solution, solve

_ORDER_SLACK = 0.002  # of the time, for fewer boundaries between hosts
_MOST_GROUPS_SOLVED = 2_000  # groups x layouts of one shape, by the method asked for
_MOST_WORK = 12_000  # groups x stages x layouts of one shape, by the chain DP
_FEWEST_LAYOUTS, _MOST_LAYOUTS = 3, 120
_MOST_RESOLVED = 3  # layouts, after the chain DP


@dataclass(frozen=True)
class Found:
    """A layout and its plan."""

    layout: Layout
    solution: Solution

    @property
    def objective_ms(self) -> float:
        return objective_ms(self.solution)


@dataclass(frozen=True)
class Tried:
    """The layouts of a shape that fit; whether these are all there are, and by the method asked."""

    found: tuple[Found, ...]
    are_all: bool
    is_final: bool

    @property
    def least(self) -> Found:
        return min(self.found, key=lambda one: one.objective_ms)


@dataclass(frozen=True)
class Search:
    """Shapes of one cluster: `how` are fields of their settings, `options` those of `solve`."""

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

    def tried(self, shape: Shape, *, is_asked: bool) -> Tried:
        """A shape on its layouts. Raises PlanError if it fits on none."""
        most = self._most_layouts(shape) if is_asked else 2
        ways, are_all = layouts(self.cluster, shape, most)
        is_small = len(self.graph) * len(ways) <= _MOST_GROUPS_SOLVED
        found = self._solved(ways, self.method if is_small else "chain")
        return Tried(tuple(found), are_all and len(found) == len(ways), is_small)

    def best(self, tried: Tried, shape: Shape) -> Found:
        """The best of a shape by the method asked for, with a bound for all its layouts."""
        found = sorted(tried.found, key=lambda one: one.objective_ms)
        if not tried.is_final:
            again = self._solved([one.layout for one in found[:_MOST_RESOLVED]], self.method)
            found = sorted(again, key=lambda one: one.objective_ms) + found[_MOST_RESOLVED:]
        if not tried.are_all and max(shape) == 1:
            found = [self._improved(found[0], self.method if tried.is_final else "chain"), *found]
        slack = min(self.options.get("prefer_modules", _ORDER_SLACK), _ORDER_SLACK) + 1e-9
        near = [one for one in found if one.objective_ms <= found[0].objective_ms * (1 + slack)]
        best = min(near, key=lambda one: crossings(self.cluster, one.layout))
        solution = self.solve(best.layout)
        if tried.are_all:
            bound_ms = min(_bound_ms(one.solution) for one in found)
        else:
            bound_ms = self.bound_ms(shape)
        return Found(best.layout, with_bound(solution, bound_ms))

    def bound_ms(self, shape: Shape) -> float:
        """A bound for every layout of a shape: all devices on one host with the fastest link."""
        fastest = self.cluster.fastest_link
        devices = tuple(replace(device, host="") for device in self.cluster.devices)
        together = replace(self.cluster, devices=devices, within={ANY_HOST: fastest}, between={})
        ways, are_all = layouts(together, shape, self._most_layouts(shape))
        if not are_all:
            return free_bound_ms(self.graph, self.cluster)
        search = replace(self, cluster=together)
        is_small = len(self.graph) * len(ways) <= _MOST_GROUPS_SOLVED
        found = search._solved(ways, self.method if is_small else "chain")
        return min(_bound_ms(one.solution) for one in found)

    def _solved(self, ways: Collection[Layout], method: str) -> list[Found]:
        """Those layouts that fit. Raises PlanError if none does."""
        # All methods are for the layout that is taken; for each it would take too long.
        method = "auto" if method == ALL else method
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

    def setting(self, layout: Layout) -> Setting:
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


def objective_ms(solution: Solution) -> float:
    """What plans are compared by: the milliseconds of a step for each of its micro-batches."""
    return solution.step_ms / solution.setting.micro_batches


def _bound_ms(solution: Solution) -> float:
    return solution.step_bound_ms / solution.setting.micro_batches


def with_bound(solution: Solution, bound_ms: float) -> Solution:
    """The solution with that bound of its objective, if it is below its own."""
    bound_ms = min(bound_ms, _bound_ms(solution))
    return replace(
        solution,
        lower_bound_ms=min(bound_ms, solution.lower_bound_ms),
        step_bound_ms=bound_ms * solution.setting.micro_batches,
    )


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
