"""The cores of a machine and its ranks -> the cores of each rank.

Whole cores: two ranks never share the threads of one. First every rank gets a memory node (that
of its GPU, where it is known), so that the fullest node is as empty as can be: one rank after
the other goes where it leaves most cores to each. Then the ranks of a node share its cores
evenly, in order, so that neighbours in the pipeline are near each other. With fewer ranks than
nodes each rank gets neighbouring nodes instead. It is a pure function; a rank then pins itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from .topology import Core, Topology

Cpus = frozenset[int]
T = TypeVar("T")


def share_cores(
    topology: Topology, ranks: int, near: Sequence[int | None] = ()
) -> tuple[Cpus, ...] | None:
    """The CPUs of each rank, distinct; `near` are the memory nodes of their GPUs.

    None where ranks had better share all: one rank, fewer cores than ranks, or a quota below the
    cores, under which the machine has other guests that may be on just these cores.

    >>> two_sockets = Topology(tuple(Core(cpu // 4, (cpu,)) for cpu in range(8)))
    >>> [sorted(cpus) for cpus in share_cores(two_sockets, 3)]
    [[0, 1], [2, 3], [4, 5, 6, 7]]
    """
    cores = topology.cores
    if ranks < 2 or len(cores) < ranks or topology.quota < len(cores):
        return None
    of_node = {node: [core for core in cores if core.node == node] for node in topology.nodes}
    wanted = [node if node in of_node else None for node in (*near, *[None] * ranks)][:ranks]
    if ranks < len(of_node) and not any(node is not None for node in wanted):
        nodes = list(of_node.values())
        return tuple(
            _cpus(core for node in part for core in node) for part in _even_parts(nodes, ranks)
        )
    node_of_rank = _nodes_of_ranks(of_node, wanted)
    parts = {
        node: iter(_even_parts(own, node_of_rank.count(node)))
        for node, own in of_node.items()
        if node in node_of_rank
    }
    return tuple(_cpus(next(parts[node])) for node in node_of_rank)


def near_cores(topology: Topology, shares: Sequence[Cpus]) -> tuple[Cpus, ...]:
    """The shares widened to all cores of the memory nodes that they touch."""
    widened = []
    for share in shares:
        nodes = {core.node for core in topology.cores if share & set(core.cpus)}
        widened.append(_cpus(core for core in topology.cores if core.node in nodes))
    return tuple(widened)


def _nodes_of_ranks(of_node: dict[int, list[Core]], wanted: list[int | None]) -> list[int]:
    """A node for each rank, as wanted where it has a core left."""
    taken = dict.fromkeys(of_node, 0)
    free = 0
    placed: list[int | None] = []
    for node in wanted:
        if node is not None and taken[node] < len(of_node[node]):
            taken[node] += 1
            placed.append(node)
        else:
            free += 1
            placed.append(None)
    rest: list[int] = []
    for _ in range(free):
        node = max(of_node, key=lambda n: (len(of_node[n]) // (taken[n] + 1), -taken[n], -n))
        taken[node] += 1
        rest.append(node)
    rest.sort()
    return [rest.pop(0) if node is None else node for node in placed]


def _even_parts(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Contiguous parts whose lengths differ by at most one."""
    borders = [len(items) * part // parts for part in range(parts + 1)]
    return [items[a:b] for a, b in zip(borders, borders[1:], strict=False)]


def _cpus(cores: Iterable[Core]) -> Cpus:
    return frozenset(cpu for core in cores for cpu in core.cpus)
