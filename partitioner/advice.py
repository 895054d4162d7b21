"""A choice of devices -> what is said of it: boundaries between hosts, lone ranks, better shapes.

A rank that is alone on its host has no neighbour whose link is fast: in the middle of a pipeline
it pays for a slow link on both sides, one after the other, while its neighbours pay once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..runtime.plan import Candidate, RankSpec
from .choose import Choice, Found, Shape
from .cluster import Cluster
from .cost import Costs
from .mapping import lone_ranks, remote_edges, shape_name
from .solve import Solution

Trial = Callable[[Cluster, Shape], float | None]

_WORTH_SAYING = 0.005
_AS_FAST = 0.01


def sentences(choice: Choice, trial: Trial, stages: int | None) -> tuple[str, ...]:
    """What a user should know of where the stages are; `stages` is what was asked for."""
    return tuple(
        filter(
            None, (_hosts(choice), _order(choice), *_lone(choice, trial), _shape(choice, stages))
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


def candidates(choice: Choice, costs: Costs) -> tuple[Candidate, ...]:
    """The shapes that were not taken."""
    taken = choice.layout.shape
    return tuple(
        _candidate(shape_name(shape), found.solution, costs, _note(choice, found))
        for shape, found in sorted(choice.by_shape.items())
        if shape != taken
    )


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
        return f"none of {number} boundaries crosses hosts"
    pairs = ", ".join(dict.fromkeys(f"{left}-{right}" for left, right in edges))
    crosses = "boundaries cross" if len(edges) > 1 else "boundary crosses"
    return f"{len(edges)} of {number} {crosses} hosts ({pairs})"


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


def _lone(choice: Choice, trial: Trial) -> Iterator[str]:
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
    other_ms = trial(split, choice.layout.shape)
    if other_ms is None or other_ms > choice.found.objective_ms * (1 + _WORTH_SAYING):
        yield alone
        return
    gain = 1 - other_ms / choice.found.objective_ms
    than = f"{gain:.0%} less" if gain > _WORTH_SAYING else "no more"
    yield f"{alone}; --hosts {hosts} has no such rank and takes {than} ({other_ms:.2f} ms)"


def _without_lone_ranks(cluster: Cluster) -> Cluster | None:
    """The same devices with one of the fullest host moved to each host that has only one."""
    if len({kind[1:] for kind in cluster.kinds}) > 1:
        return None
    count = Counter(device.host for device in cluster.devices)
    for host in cluster.hosts:
        if count[host] == 1:
            fullest = max(
                (one for one in reversed(cluster.hosts) if one != host), key=count.__getitem__
            )
            if count[fullest] < 3:
                return None
            count[fullest] -= 1
            count[host] += 1
    device = cluster.devices[0]
    return replace(
        cluster,
        devices=tuple(
            replace(device, host=host) for host in cluster.hosts for _ in range(count[host])
        ),
    )


def _shape(choice: Choice, stages: int | None) -> str:
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


def _note(choice: Choice, found: Found) -> str:
    ratio = found.objective_ms / choice.found.objective_ms - 1
    return f"{ratio:+.1%} a micro-batch on {sum(found.layout.shape)} devices"


def _candidate(name: str, solution: Solution, costs: Costs, note: str) -> Candidate:
    at = solution.placement.stage_of
    crossing = sum(
        len({at[reader] for reader in value.readers} - {at[value.owner]})
        * (value.forward_bytes + value.backward_bytes)
        for value in costs.values
    )
    return Candidate(
        name=name,
        stages=solution.placement.stages,
        bottleneck_ms=solution.bottleneck_ms,
        step_ms=solution.step_ms,
        peak_bytes=max(solution.evaluation.rank_bytes),
        crossing_bytes=int(crossing),
        gap=solution.gap,
        seconds=0.0,
        note=note,
    )
