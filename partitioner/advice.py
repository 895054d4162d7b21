"""A choice of devices -> what is said of it: boundaries between hosts, lone ranks, better shapes.

A rank that is alone on its host has no neighbour whose link is fast: in the middle of a pipeline
it pays for a slow link on both sides, one after the other, while its neighbours pay once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ..runtime.plan import Candidate, RankSpec
from .choose import Choice
from .cluster import Cluster
from .layout_search import Found
from .mapping import Shape, lone_ranks, remote_edges, shape_name
from .solve import Solution

_WORTH_SAYING = 0.005
_AS_FAST = 0.01
_MOST_SHOWN = 8


def advised(choice: Choice, solution: Solution, stages: int | None) -> Solution:
    """The solution with what is said of its devices; `stages` is what was asked for."""
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


def sentences(choice: Choice, stages: int | None) -> tuple[str, ...]:
    """What a user should know of where the stages are; `stages` is what was asked for."""
    return tuple(
        filter(
            None, (_hosts(choice), _order(choice), *_lone(choice), shape_sentence(choice, stages))
        )
    )


def rank_specs(choice: Choice) -> tuple[RankSpec, ...]:
    """The device of every rank, in the order of ranks."""
    devices = [choice.cluster.devices[index] for index in choice.layout.devices]
    return tuple(
        RankSpec(
            device=device.name,
            memory_bytes=None if device.memory_bytes == float("inf") else int(device.memory_bytes),
            host=device.host,
        )
        for device in devices
    )


def shape_candidates(choice: Choice) -> tuple[Candidate, ...]:
    """The best shapes that were not taken."""
    others = [shape for shape in choice.by_shape if shape != choice.layout.shape]
    best = sorted(others, key=lambda shape: choice.by_shape[shape].objective_ms)[:_MOST_SHOWN]
    return tuple(_candidate(choice, choice.by_shape[shape]) for shape in sorted(best))


def _hosts(choice: Choice) -> str:
    """How many boundaries lie between hosts, and between which."""
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


def _order(choice: Choice) -> str:
    """What the devices would take as they are listed."""
    best_ms, listed_ms = choice.found.objective_ms, choice.as_listed_ms
    if listed_ms is None or listed_ms <= best_ms * (1 + _WORTH_SAYING):
        return ""
    named = [_named(choice.cluster, device) for device in choice.layout.devices]
    order = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in _runs(named))
    return (
        f"the devices are in the order {order}: as listed the slowest stage would take "
        f"{listed_ms:.2f} ms ({listed_ms / best_ms - 1:.0%} more)"
    )


def _named(cluster: Cluster, index: int) -> str:
    device = cluster.devices[index]
    names = {one.name for one in cluster.devices}
    return device.name if len(names) > 1 or not device.host else device.host


def _runs(names: list[str]) -> Iterator[tuple[str, int]]:
    start = 0
    for position in range(1, len(names) + 1):
        if position == len(names) or names[position] != names[start]:
            yield names[start], position - start
            start = position


def _lone(choice: Choice) -> Iterator[str]:
    """Ranks alone on their host, and a split of the ranks over the hosts that has none."""
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
    if other_ms is None or other_ms > choice.found.objective_ms * (1 + _WORTH_SAYING):
        yield alone
        return
    gain = 1 - other_ms / choice.found.objective_ms
    than = f"{gain:.0%} less" if gain > _WORTH_SAYING else "no more"
    yield f"{alone}; --hosts {hosts} has no such rank and takes {than} ({other_ms:.2f} ms)"


def _without_lone_ranks(cluster: Cluster) -> Cluster | None:
    """The same devices with one of the least full host that can give one moved to each host that
    has only one."""
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


def shape_sentence(choice: Choice, stages: int | None) -> str:
    """Whether another shape would be better or do with fewer devices."""
    taken, best_ms = choice.layout.shape, choice.found.objective_ms
    others = {shape: one for shape, one in choice.by_shape.items() if shape != taken}
    if not others:
        return ""
    if stages is None:
        shape = min(others, key=lambda one: others[one].objective_ms)
        return (
            f"{_in_words(taken)} chosen of {len(others) + 1} ways to use the devices; the next is "
            f"{_in_words(shape)} with {others[shape].objective_ms:.2f} ms a micro-batch"
        )
    shape = min(others, key=lambda one: others[one].objective_ms)
    other_ms = others[shape].objective_ms
    if other_ms < best_ms * (1 - _AS_FAST):
        return (
            f"{_in_words(shape)} would be {1 - other_ms / best_ms:.0%} faster by the same costs: "
            f"{other_ms:.2f} ms a micro-batch"
        )
    fewer = [
        shape
        for shape, one in others.items()
        if sum(shape) < sum(taken) and one.objective_ms <= best_ms * (1 + _AS_FAST)
    ]
    if not fewer:
        return ""
    shape = min(fewer, key=lambda one: (sum(one), len(one)))
    return (
        f"{_in_words(shape)} would be as fast: {others[shape].objective_ms:.2f} ms a micro-batch "
        f"on {sum(shape)} instead of {sum(taken)} devices"
    )


def _in_words(shape: Shape) -> str:
    return shape_name(shape) + (" (no pipeline)" if len(shape) == 1 else "")


def _candidate(choice: Choice, found: Found) -> Candidate:
    solution, shape = found.solution, found.layout.shape
    more = found.objective_ms / choice.found.objective_ms - 1
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
        note=f"{abs(more):.0%} {'more' if more > 0 else 'less'} time a micro-batch, on {number} "
        f"device{'s' * (number > 1)}",
    )
