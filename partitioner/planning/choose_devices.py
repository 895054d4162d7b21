"""A cost graph and a cluster -> the fastest number of stages and replicas, and their devices.

A shape gives the number of devices of each stage: `(1, 1, 1, 1)` is a pipeline of four, `(2, 2)`
two parallel pipelines of two, `(1, 2)` one pipeline of two whose second stage is replicated, `(4,)`
plain data parallelism and `(1,)` one device. Every shape for which the cluster has devices is
solved on every distinct layout of it (`device_layouts.py`) as a separate problem: a stage with R
devices takes an R-th of the time and sums its gradients once a step. So all methods, the memory of
each device and all bounds apply to replicas as they do to single ranks. Replicas of a stage on
devices of different kinds have equal shares: a stage is as slow as its slowest device.

Among shapes whose time differs by less than `_TIE`, the one with the fewest devices is chosen, and
among those the one with the fewest stages.

`advised` adds findings on the choice: boundaries between hosts, lone ranks, better shapes. A rank
that is alone on its host has no neighbor with a fast link: in the middle of a pipeline it pays for
a slow link on both sides, one after the other, while its neighbors pay once.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import networkx as nx

from ...runtime.errors import PlanError
from ...runtime.formatting import counted, write_ms, write_share
from ...runtime.plan.findings import Candidate
from ...runtime.plan.setting import RankSpec
from ...runtime.plan.sharing import GRADIENTS
from .cluster import Cluster, check_number
from .device_layouts import (
    Layout,
    LayoutResult,
    Search,
    Shape,
    TriedLayout,
    lone_ranks,
    remote_edges,
    search_of,
    shape_name,
    with_bound,
)
from .solve import QUICK, Solution

_TIE = 0.01
_MOST_GROUPS_COMPARED = 3_000  # of a graph whose other shapes are solved when stages are given
_MOST_DEVICES_IN_UNEQUAL_SHAPES = 6
_ALL_SHAPES = 16


@dataclass(frozen=True)
class DeviceChoice:
    """The chosen plan, and the best plan of every shape that was solved.

    `as_listed_ms` is the time of the chosen shape on the devices in the order of the cluster, if it
    fits there.
    """

    search: Search
    result: LayoutResult
    by_shape: Mapping[Shape, LayoutResult]
    as_listed_ms: float | None

    @property
    def cluster(self) -> Cluster:
        return self.search.cluster

    @property
    def layout(self) -> Layout:
        return self.result.layout

    @property
    def solution(self) -> Solution:
        return self.result.solution

    def least_ms(self, cluster: Cluster) -> float | None:
        """The time of the chosen shape on the best layout of other devices, None if
        nothing fits.
        """
        search = replace(self.search, cluster=cluster, method="chain")
        try:
            return search.tried(self.layout.shape, is_asked=True).least.objective_ms
        except PlanError:
            return None

    def again(self, graph: nx.DiGraph) -> Solution:
        """The plan of the chosen layout under other costs of the same graph."""
        return replace(self.search, graph=graph).solve(self.layout)

    def bounded(self, graph: nx.DiGraph, solution: Solution) -> Solution:
        """A plan of the chosen layout, with a bound that holds for the other layouts of its
        shape.
        """
        search = replace(self.search, graph=graph)
        return with_bound(solution, search.bound_ms(self.layout.shape))


def choose(
    graph: nx.DiGraph,
    cluster: Cluster,
    *,
    stages: int | None = None,
    method: str = "auto",
    **options: Any,
) -> DeviceChoice:
    """The plan with the smallest time on the devices of `cluster`, with `stages` stages if given.

    `options` are those of `solve`. Raises PlanError when no layout fits into the memory of its
    devices, and when the graph does not have the times of a kind of device.
    """
    _check_kinds(graph, cluster)
    check_number(cluster, stages)
    search = search_of(graph, cluster, stages, method, options)
    tried: dict[Shape, TriedLayout] = {}
    refused: dict[Shape, PlanError] = {}
    for shape in _shapes_of(search, stages):
        is_asked = stages in (None, len(shape))
        try:
            tried[shape] = search.tried(shape, is_asked=is_asked)
        except PlanError as error:
            if is_asked:
                refused[shape] = error
    least = {shape: one.least for shape, one in tried.items()}
    eligible = {shape: one for shape, one in least.items() if stages in (None, len(shape))}
    if not eligible:
        # Replicas need no more memory, and may share some of it out.
        most = max(refused, key=max, default=None)
        raise refused[most] if most else PlanError("no device can be used.")
    shape = _least(eligible)
    best = search.best(tried[shape], shape)
    listed = tuple(range(sum(shape)))
    as_listed = (result for result in tried[shape].results if result.layout.devices == listed)
    as_listed_ms = next((result.objective_ms for result in as_listed), None)
    return DeviceChoice(search, best, {**least, shape: best}, as_listed_ms)


def beside_other_shapes(
    graph: nx.DiGraph, cluster: Cluster, solution: Solution, options: Mapping[str, Any]
) -> DeviceChoice:
    """A plan on equal devices as the choice, beside quick plans of the other shapes. `options` are
    those of `solve`.
    """
    layout = Layout(solution.placement.ranks_of_stage)
    search = search_of(graph, cluster, layout.stages, QUICK, options)
    own = LayoutResult(layout, solution)
    by_shape = {layout.shape: own}
    for shape in _shapes_of(search, layout.stages):
        if shape != layout.shape:
            with suppress(PlanError):
                by_shape[shape] = search.tried(shape, is_asked=False).least
    return DeviceChoice(search, own, by_shape, None)


def _shapes_of(search: Search, stages: int | None) -> Iterator[Shape]:
    """The shapes to solve: for a large graph only those with `stages` stages, if given."""
    setting = search.setting(Layout(((0,),)))
    unequal = setting.is_asynchronous and setting.zero < GRADIENTS
    for shape in shapes(len(search.cluster.devices), stages, unequal=unequal):
        if stages in (None, len(shape)) or len(search.graph) <= _MOST_GROUPS_COMPARED:
            yield shape


def shapes(devices: int, stages: int | None = None, *, unequal: bool = True) -> tuple[Shape, ...]:
    """All shapes of at most that many devices; for many devices only those that use all or single
    ones.

    With `stages`, other numbers of stages appear only with equal replicas. `unequal`: single stages
    may be replicated, which only asynchronous schedules support, without shared gradients.
    """
    distinct: dict[Shape, None] = {}
    for depth in range(1, devices + 1):
        most = devices // depth
        for replicas in range(1, most + 1) if devices <= _ALL_SHAPES else {1, most}:
            distinct[(replicas,) * depth] = None
        few = devices <= _MOST_DEVICES_IN_UNEQUAL_SHAPES
        if unequal and few and stages in (None, depth):
            for ends in combinations(range(1, devices), depth - 1):
                cuts = (0, *ends, devices)
                distinct[tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False))] = None
    return tuple(distinct)


def _least(result_of: Mapping[Shape, LayoutResult]) -> Shape:
    least_ms = min(result.objective_ms for result in result_of.values())
    near = [
        shape for shape, result in result_of.items() if result.objective_ms <= least_ms * (1 + _TIE)
    ]
    return min(near, key=lambda shape: (sum(shape), len(shape), result_of[shape].objective_ms))


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


_WORTH_SAYING = 0.005
_AS_FAST = 0.01
_MOST_SHOWN = 8


def advised(choice: DeviceChoice, solution: Solution, stages: int | None) -> Solution:
    """The solution with findings on its devices; `stages` is the requested number."""
    ranks = choice.layout.ranks
    return replace(
        solution,
        explanation=(*solution.explanation, *sentences(choice, stages)),
        candidates=(*solution.candidates, *shape_candidates(choice)),
        rank_specs=rank_specs(choice),
        stage_ranks=tuple(
            tuple(rank for position in of_stage for rank in ranks[position])
            for of_stage in solution.placement.ranks_of_stage
        ),
    )


def sentences(choice: DeviceChoice, stages: int | None) -> tuple[str, ...]:
    """Findings on the devices of the stages, for the user; `stages` is the requested number."""
    return tuple(
        filter(
            None,
            (
                _left_over(choice.cluster),
                _hosts(choice),
                _order(choice),
                *_lone(choice),
                shape_sentence(choice, stages),
            ),
        )
    )


def rank_specs(choice: DeviceChoice) -> tuple[RankSpec, ...]:
    """The device of every process, in the order of processes."""
    cluster = choice.cluster
    return tuple(
        RankSpec(
            device=cluster.devices[index].name,
            memory_bytes=(
                None
                if cluster.devices[index].memory_bytes == float("inf")
                else int(cluster.devices[index].memory_bytes)
            ),
            host=cluster.devices[index].host,
            number=number,
        )
        for index in choice.layout.devices
        for number in cluster.places(index)
    )


def shape_candidates(choice: DeviceChoice) -> tuple[Candidate, ...]:
    """The best plans of the shapes that were not chosen."""
    others = [shape for shape in choice.by_shape if shape != choice.layout.shape]
    best = sorted(others, key=lambda shape: choice.by_shape[shape].objective_ms)[:_MOST_SHOWN]
    return tuple(_candidate(choice, choice.by_shape[shape]) for shape in sorted(best))


def _left_over(cluster: Cluster) -> str:
    """The devices that are in no group of tensor ranks, by host."""
    if not cluster.left_over:
        return ""
    idle = " and ".join(
        f"{counted(number, 'device')} of {host or 'the host'}"
        for host, number in Counter(cluster.left_over).items()
    )
    verb = "stays" if len(cluster.left_over) == 1 else "stay"
    return f"{idle} {verb} idle: {len(cluster.members[0])} tensor ranks of a stage are on one host"


def _hosts(choice: DeviceChoice) -> str:
    """The number of boundaries between hosts, and the hosts of each."""
    if len(choice.cluster.hosts) == 1:
        return ""
    pipelines = list(zip(*choice.layout.columns, strict=False))
    edges = [edge for pipeline in pipelines for edge in remote_edges(choice.cluster, pipeline)]
    number = sum(len(pipeline) - 1 for pipeline in pipelines)
    if not number:
        return ""
    if not edges:
        return f"boundaries between hosts: none of {number}"
    pairs = ", ".join(dict.fromkeys(f"{left}-{right}" for left, right in edges))
    return f"boundaries between hosts: {len(edges)} of {number} ({pairs})"


def _order(choice: DeviceChoice) -> str:
    """The time on the devices in the order of the cluster."""
    best_ms, listed_ms = choice.result.objective_ms, choice.as_listed_ms
    if listed_ms is None or listed_ms <= best_ms * (1 + _WORTH_SAYING):
        return ""
    named = [_named(choice.cluster, device) for device in choice.layout.devices]
    order = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in _runs(named))
    return (
        f"the devices are in the order {order}: in the listed order the bottleneck stage would "
        f"take {write_ms(listed_ms)} ({write_share(listed_ms / best_ms - 1)} more)"
    )


def _named(cluster: Cluster, index: int) -> str:
    device = cluster.devices[index]
    names = {device.name for device in cluster.devices}
    return device.name if len(names) > 1 or not device.host else device.host


def _runs(names: list[str]) -> Iterator[tuple[str, int]]:
    start = 0
    for position in range(1, len(names) + 1):
        if position == len(names) or names[position] != names[start]:
            yield names[start], position - start
            start = position


def _lone(choice: DeviceChoice) -> Iterator[str]:
    """Ranks alone on their host, and a split of the ranks over the hosts that has no such rank."""
    cluster, order = choice.cluster, choice.layout.devices
    lone = lone_ranks(cluster, order)
    if not lone:
        return
    where = " and ".join(f"rank {rank} on {cluster.devices[order[rank]].host}" for rank in lone)
    alone = (
        f"{where} {'is' if len(lone) == 1 else 'are'} alone: all that passes there crosses hosts"
    )
    split = _without_lone_ranks(cluster)
    if split is None or len(order) < len(cluster.devices):
        yield alone
        return
    count = Counter(device.host for device in split.devices)
    hosts = ",".join(f"{host}:{count[host]}" for host in split.hosts)
    other_ms = choice.least_ms(split)
    if other_ms is None or other_ms > choice.result.objective_ms * (1 + _WORTH_SAYING):
        yield alone
        return
    gain = 1 - other_ms / choice.result.objective_ms
    than = f"{write_share(gain)} less" if gain > _WORTH_SAYING else "no more"
    yield f"{alone}; --hosts {hosts} has no such rank and takes {than} ({write_ms(other_ms)})"


def _without_lone_ranks(cluster: Cluster) -> Cluster | None:
    """The same devices, where each host with a single one receives another from the least full host
    that can give one.
    """
    if len({kind[1:] for kind in cluster.kinds}) > 1:
        return None
    count = Counter(device.host for device in cluster.devices)
    for host in cluster.hosts:
        if count[host] == 1:
            givers = [other for other in cluster.hosts if count[other] > 2]
            if not givers:
                return None
            count[min(givers, key=count.__getitem__)] -= 1
            count[host] += 1
    device = cluster.devices[0]
    return replace(
        cluster,
        devices=tuple(
            replace(device, host=host) for host in cluster.hosts for _ in range(count[host])
        ),
    )


def shape_sentence(choice: DeviceChoice, stages: int | None) -> str:
    """Reports if another shape would be faster or need fewer devices."""
    chosen, best_ms = choice.layout.shape, choice.result.objective_ms
    others = {shape: result for shape, result in choice.by_shape.items() if shape != chosen}
    if not others:
        return ""
    if stages is None:
        shape = min(others, key=lambda other: others[other].objective_ms)
        return (
            f"{_in_words(chosen)} chosen from {len(others) + 1} ways to use the devices; the next "
            f"best is {_in_words(shape)} with {write_ms(others[shape].objective_ms)} per "
            "micro-batch"
        )
    shape = min(others, key=lambda other: others[other].objective_ms)
    other_ms = others[shape].objective_ms
    if other_ms < best_ms * (1 - _AS_FAST):
        return (
            f"according to the same cost model, {_in_words(shape)} would be "
            f"{write_share(1 - other_ms / best_ms)} faster: {write_ms(other_ms)} per micro-batch"
        )
    fewer = [
        shape
        for shape, result in others.items()
        if sum(shape) < sum(chosen) and result.objective_ms <= best_ms * (1 + _AS_FAST)
    ]
    if not fewer:
        return ""
    shape = min(fewer, key=lambda shape: (sum(shape), len(shape)))
    return (
        f"{_in_words(shape)} would be as fast: {write_ms(others[shape].objective_ms)} per "
        f"micro-batch on {sum(shape)} instead of {sum(chosen)} devices"
    )


def _in_words(shape: Shape) -> str:
    return shape_name(shape) + (" (no pipeline)" if len(shape) == 1 else "")


def _candidate(choice: DeviceChoice, result: LayoutResult) -> Candidate:
    solution, shape = result.solution, result.layout.shape
    more = result.objective_ms / choice.result.objective_ms - 1
    number = sum(shape)
    return Candidate(
        name=shape_name(shape),
        stages=len(shape),
        bottleneck_ms=solution.bottleneck_ms,
        step_ms=solution.step_ms,
        peak_bytes=max(solution.evaluation.rank_bytes),
        crossing_bytes=solution.crossing_bytes,
        gap=solution.gap,
        seconds=0.0,
        note=f"{write_share(abs(more))} {'more' if more > 0 else 'less'} time per micro-batch, on "
        f"{number} device{'s' * (number > 1)}",
    )
