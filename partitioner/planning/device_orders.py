"""A cluster -> the distinct orders of its devices along a pipeline.

Equal devices of one host are interchangeable, and so are equal hosts: of orders that differ in
nothing else, one is listed. While the distinct orders are few, all are listed. When they are many,
devices of one host and kind stay together, hosts are contiguous, and only the order of these blocks
varies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, permutations

from .cluster import Cluster

_MOST_SEQUENCES, _MOST_ALIKE = 120, 24

Order = tuple[int, ...]


def orders(cluster: Cluster, count: int, most: int) -> tuple[tuple[Order, ...], bool]:
    """Distinct orders of `count` of the devices, and whether the list is complete: while they are
    few.
    """
    alike = min(math.factorial(len(cluster.hosts)), _MOST_ALIKE)
    if _sequences(cluster, count) <= most * alike:
        complete = _distinct(cluster, all_orders(cluster, count))
        if len(complete) <= most:
            return complete, True
    return _distinct(cluster, block_orders(cluster, count))[:most], False


def is_listed(cluster: Cluster, count: int, most: int) -> bool:
    """There may be few enough orders to list them, `most` without those that differ in nothing."""
    return _sequences(cluster, count) <= most * _MOST_ALIKE


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
    exchanges = []
    for first in range(len(blocks)):
        for second in range(first + 1, len(blocks)):
            swapped = list(blocks)
            swapped[first], swapped[second] = blocks[second], blocks[first]
            exchanges.append(tuple(device for block in swapped for device in block))
    return _distinct(cluster, exchanges)


def all_orders(cluster: Cluster, count: int) -> Iterator[Order]:
    """Every sequence of kinds, each filled with the first free devices of its kind."""
    kinds = cluster.kinds
    members: dict[object, list[int]] = {}
    for device, kind in enumerate(kinds):
        members.setdefault(kind, []).append(device)
    left = [list(reversed(devices)) for devices in members.values()]

    def extend(chosen: list[int]) -> Iterator[Order]:
        if len(chosen) == count:
            yield tuple(chosen)
            return
        for devices in left:
            if devices:
                device = devices.pop()
                yield from extend([*chosen, device])
                devices.append(device)

    return extend([])


def block_orders(cluster: Cluster, count: int) -> Iterator[Order]:
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


def _distinct(cluster: Cluster, orders: Iterable[Order]) -> tuple[Order, ...]:
    bysignature: dict[object, Order] = {}
    for order in orders:
        bysignature.setdefault(signature(cluster, order), order)
    return tuple(bysignature.values())


def signature(cluster: Cluster, order: Iterable[int]) -> tuple[object, ...]:
    """An order with equal hosts named by their first appearance."""
    alike, kinds = cluster.alike_hosts, cluster.kinds
    seen: dict[str, int] = {}
    named: list[object] = []
    for device in order:
        host = cluster.devices[device].host
        if host not in seen:
            seen[host] = sum(1 for other in seen if alike[other] == alike[host])
        named.append((alike[host], seen[host], *kinds[device][1:]))
    return tuple(named)
