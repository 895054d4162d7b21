"""Devices -> groups of neighbors on one host, which run the stages of tensor ranks together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ...runtime.errors import PlanError
from ...runtime.formatting import counted
from ..graph.costs import LOCALHOST, Link, slowest_link
from .cluster import Cluster


def tensor_groups(cluster: Cluster, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The devices of each group of `ranks` neighbors on one host, by their numbers; devices that
    are left over on a host have none."""
    return tuple(
        group
        for host in cluster.hosts
        for group in _in_row(_devices_of(cluster, host), ranks)
        if len(group) == ranks
    )


def check_tensor_groups(cluster: Cluster, ranks: int) -> None:
    """Raises PlanError where no host has so many devices."""
    if ranks > 1 and not tensor_groups(cluster, ranks):
        most = max(len(_devices_of(cluster, host)) for host in cluster.hosts)
        raise PlanError(
            f"--tensor-parallel {ranks} is more than the {counted(most, 'device')} of a host, and "
            "sums over tensor ranks are too slow between hosts.",
            f"--tensor-parallel {most}" if most > 1 else "Leave --tensor-parallel out.",
        )


def link_of_sums(cluster: Cluster | None, ranks: int) -> Link:
    """The link over which tensor ranks sum: the slowest between neighbors of a group."""
    if cluster is None:
        return LOCALHOST
    links = [
        cluster.link(*pair) for group in tensor_groups(cluster, ranks) for pair in pairwise(group)
    ]
    return slowest_link(links or [LOCALHOST])


def grouped(cluster: Cluster, ranks: int) -> Cluster:
    """A cluster with a device for each tensor group: as slow as its slowest device, and with the
    smallest memory. Groups are joined by the links of their first devices."""
    if ranks == 1:
        return cluster
    groups = tensor_groups(cluster, ranks)
    members = [[cluster.devices[index] for index in group] for group in groups]
    first = {group[0]: number for number, group in enumerate(groups)}
    return replace(
        cluster,
        devices=tuple(
            replace(
                min(group, key=lambda device: device.speed),
                memory_bytes=min(device.memory_bytes for device in group),
            )
            for group in members
        ),
        pairs={
            (first[one], first[other]): link
            for (one, other), link in cluster.pairs.items()
            if one in first and other in first
        },
    )


def _devices_of(cluster: Cluster, host: str) -> list[int]:
    return [index for index, device in enumerate(cluster.devices) if device.host == host]


def _in_row(devices: list[int], size: int) -> Iterator[tuple[int, ...]]:
    """The devices in order, so many at a time."""
    for start in range(0, len(devices), size):
        yield tuple(devices[start : start + size])
