"""Devices on hosts -> the neighbors that run a stage together as its tensor ranks."""

from __future__ import annotations

from itertools import combinations

import networkx as nx

from ...runtime.errors import PlanError
from ...runtime.formatting import counted, write_ms
from ..graph.costs import LOCALHOST, Link, slowest_link
from .cluster import Cluster

SHARED_MEMORY = Link(latency_ms=0.02, bytes_per_s=6e9)
"""Sums of two processes of one host over `shm`, as measured with 64 KiB to 16 MiB."""


def link_of_sums(cluster: Cluster | None, ranks: int) -> Link:
    """The link over which tensor ranks sum: the slowest between any two of a group, or between any
    two devices where no host has so many. Without a cluster it is the shared memory of a host."""
    if cluster is None:
        return SHARED_MEMORY
    groups = _groups(cluster, ranks) or [tuple(range(len(cluster.devices)))]
    links = [cluster.link(*pair) for group in groups for pair in combinations(group, 2)]
    return slowest_link(links or [LOCALHOST])


def check_tensor_groups(graph: nx.DiGraph, cluster: Cluster | None, ranks: int) -> None:
    """Raises PlanError, with the predicted cost, where tensor ranks would be on several hosts.
    `graph` has the sums of its nodes over the link between them."""
    if cluster is None or ranks == 1 or _groups(cluster, ranks):
        return
    most = max(map(len, _devices_of_hosts(cluster)))
    nodes = graph.nodes.values()
    sums_ms = sum(sum(node.get("sums_ms", (0.0, 0.0))) for node in nodes)
    whole_ms = sum(node["forward_ms"] + node["backward_ms"] for node in nodes)
    raise PlanError(
        f"--tensor-parallel {ranks} needs as many devices on a host, but the most are "
        f"{counted(most, 'device')}: over the link between hosts sums would take "
        f"{write_ms(sums_ms)} of the {write_ms(whole_ms)} of a micro-batch.",
        f"--tensor-parallel {most}" if most > 1 else "Leave --tensor-parallel out.",
    )


def _groups(cluster: Cluster, ranks: int) -> list[tuple[int, ...]]:
    """The devices of each group of neighbors on a host, by their numbers; those that are left over
    on a host have none."""
    return [
        tuple(devices[first : first + ranks])
        for devices in _devices_of_hosts(cluster)
        for first in range(0, len(devices) - ranks + 1, ranks)
    ]


def _devices_of_hosts(cluster: Cluster) -> list[list[int]]:
    return [
        [index for index, device in enumerate(cluster.devices) if device.host == host]
        for host in cluster.hosts
    ]
