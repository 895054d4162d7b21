"""A cluster and a number of stages -> the ways to put pipelines on its devices.

A layout names the devices of every stage: one each, or as many each for pipelines side by side, or
more for some stages, which are replicated.
Devices of one host that are alike may change places, and so may hosts that are alike: of layouts
that differ in nothing else one is listed. While the distinct orders are few all are listed. When
they are many, devices of one host and kind stay together, hosts contiguous, and only the order of
these blocks is varied; a search may then improve the best by exchanging two blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise, permutations

from .cluster import Cluster

_MOST_SEQUENCES, _MOST_ALIKE = 120, 24

Order = tuple[int, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The devices of each stage, by their numbers in the cluster. With as many for each stage,
    the r-th of every stage are the r-th pipeline."""

    columns: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """How many devices each stage has."""
        return tuple(map(len, self.columns))

    @property
    def pipelines(self) -> int:
        """How many whole pipelines stand side by side, 0 if single stages are replicated."""
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
    """The distinct ways to have `shape[j]` devices for each stage j, up to `most`, and whether
    they are all."""
    if max(shape) == 1:
        found_orders, are_all = orders(cluster, len(shape), most)
        return tuple(Layout(tuple((one,) for one in order)) for order in found_orders), are_all
    are_all = _sequences(cluster, sum(shape)) <= most * _MOST_ALIKE
    sequences = (_all_orders if are_all else _block_orders)(cluster, sum(shape))
    found: dict[object, Layout] = {}
    for order in sequences:
        for layout in _layouts_of(order, shape):
            kinds = [{cluster.devices[index].kind for index in of} for of in layout.columns]
            if all(len(kinds_of_one) == 1 for kinds_of_one in kinds):
                found.setdefault(_layout_signature(cluster, layout), layout)
    return tuple(found.values())[:most], are_all and len(found) <= most


def _layouts_of(order: Order, shape: Sequence[int]) -> Iterator[Layout]:
    """Stage after stage in that order, and if all have as many pipeline after pipeline."""
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
        first = sorted(pipelines, key=lambda one: repr([kinds[index] for index in one]))
        return _signature(cluster, [index for pipeline in first for index in pipeline])
    columns = [sorted(column, key=lambda index: repr(kinds[index])) for column in layout.columns]
    return _signature(cluster, [index for column in columns for index in column])


def orders(cluster: Cluster, count: int, most: int) -> tuple[tuple[Order, ...], bool]:
    """Distinct orders of `count` of the devices, and whether they are all: while those are few."""
    alike = min(math.factorial(len(cluster.hosts)), _MOST_ALIKE)
    if _sequences(cluster, count) <= most * alike:
        found = _distinct(cluster, _all_orders(cluster, count))
        if len(found) <= most:
            return found, True
    return _distinct(cluster, _block_orders(cluster, count))[:most], False


def _sequences(cluster: Cluster, count: int) -> int:
    """At most so many distinct sequences of `count` devices."""
    members = Counter(cluster.kinds).values()
    distinct: int = math.factorial(sum(members)) // math.prod(map(math.factorial, members))
    return int(min(len(members) ** count, distinct))


def exchanged(cluster: Cluster, order: Order) -> tuple[Order, ...]:
    """The orders that differ from this one by an exchange of two blocks."""
    kinds = cluster.kinds
    blocks: list[list[int]] = []
    for device in order:
        if blocks and kinds[blocks[-1][-1]] == kinds[device]:
            blocks[-1].append(device)
        else:
            blocks.append([device])
    found = []
    for first in range(len(blocks)):
        for second in range(first + 1, len(blocks)):
            swapped = list(blocks)
            swapped[first], swapped[second] = blocks[second], blocks[first]
            found.append(tuple(device for block in swapped for device in block))
    return _distinct(cluster, found)


def crossings(cluster: Cluster, layout: Layout) -> tuple[int, int]:
    """How many boundaries lie between two hosts, and how many ranks have two of those."""
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


def _all_orders(cluster: Cluster, count: int) -> Iterator[Order]:
    """Every sequence of kinds, each filled with the first free devices of its kind."""
    kinds = cluster.kinds
    members: dict[object, list[int]] = {}
    for device, kind in enumerate(kinds):
        members.setdefault(kind, []).append(device)
    left = [list(reversed(devices)) for devices in members.values()]

    def extend(taken: list[int]) -> Iterator[Order]:
        if len(taken) == count:
            yield tuple(taken)
            return
        for devices in left:
            if devices:
                device = devices.pop()
                yield from extend([*taken, device])
                devices.append(device)

    return extend([])


def _block_orders(cluster: Cluster, count: int) -> Iterator[Order]:
    """Orders of whole hosts, the kinds of each together; the strongest devices if not all."""
    kinds = cluster.kinds
    strongest = sorted(
        range(len(cluster.devices)),
        key=lambda index: (-cluster.devices[index].speed, -cluster.devices[index].memory_bytes),
    )
    dropped = {
        tuple(sorted(strongest[:count])),
        tuple(range(count)),
        tuple(range(len(kinds) - count, len(kinds))),
    }
    for used in sorted(dropped):
        hosts: dict[str, dict[object, list[int]]] = {}
        for device in used:
            of_host = hosts.setdefault(cluster.devices[device].host, {})
            of_host.setdefault(kinds[device], []).append(device)
        for sequence in islice(permutations(hosts), _MOST_SEQUENCES):
            for turned in (False, True):
                order: list[int] = []
                for host in sequence:
                    blocks = list(hosts[host].values())
                    order += [
                        device for block in blocks[:: -1 if turned else 1] for device in block
                    ]
                yield tuple(order)


def _distinct(cluster: Cluster, found: Iterable[Order]) -> tuple[Order, ...]:
    by_signature: dict[object, Order] = {}
    for order in found:
        by_signature.setdefault(_signature(cluster, order), order)
    return tuple(by_signature.values())


def _signature(cluster: Cluster, order: Iterable[int]) -> tuple[object, ...]:
    """An order with hosts that are alike named by when they come first."""
    alike, kinds = cluster.alike_hosts, cluster.kinds
    seen: dict[str, int] = {}
    named: list[object] = []
    for device in order:
        host = cluster.devices[device].host
        if host not in seen:
            seen[host] = sum(1 for other in seen if alike[other] == alike[host])
        named.append((alike[host], seen[host], *kinds[device][1:]))
    return tuple(named)
