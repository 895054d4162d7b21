"""The sums over tensor ranks that a node of a cost graph ends in -> their milliseconds.

A node's forward and backward each make a number of sums of so many bytes together. A sum is priced
as a ring all-reduce, which sends the fewest bytes that a sum can: of t ranks each sends and
receives 2 (t - 1) / t of the bytes, in 2 (t - 1) messages (Patarasuk, Yuan: "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009). A gather of the ranks' parts is half a
sum of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import networkx as nx
import numpy as np

from ..profile.profiler import Profile
from ..tensor_parallel.sums import NodeSums
from .costs import Link

SUM_ATTRIBUTES = ("forward_sums", "forward_sum_bytes", "backward_sums", "backward_sum_bytes")
"""The attributes of a node: the sums of one micro-batch and the bytes of all of them."""


def sums_ms(sums: float, num_bytes: float, ranks: int, link: Link) -> float:
    """Milliseconds of so many sums over `ranks`, of `num_bytes` together.

    >>> sums_ms(2, 4e6, ranks=2, link=Link(latency_ms=0.5, bytes_per_s=1e9))
    6.0
    """
    if ranks == 1 or not sums:
        return 0.0
    return sums * float(link.all_reduce_ms(np.asarray(num_bytes / sums), ranks))


def with_sums(graph: nx.DiGraph, ranks: int, link: Link) -> nx.DiGraph:
    """A copy of the graph in which the times of nodes have those of their sums over so many tensor
    ranks, also on other kinds of devices. The attribute `sums_ms` has (forward, backward) of it."""
    timed: nx.DiGraph = graph.copy()
    for _, node in timed.nodes(data=True):
        forward, forward_bytes, backward, backward_bytes = (
            float(node.get(name, 0.0)) for name in SUM_ATTRIBUTES
        )
        forward_ms = sums_ms(forward, forward_bytes, ranks, link)
        backward_ms = sums_ms(backward, backward_bytes, ranks, link)
        if not forward_ms + backward_ms:
            continue
        node["forward_ms"] = node.get("forward_ms", 0.0) + forward_ms
        node["backward_ms"] = node.get("backward_ms", 0.0) + backward_ms
        node["sums_ms"] = (forward_ms, backward_ms)
        if "times_on" in node:
            node["times_on"] = {
                kind: (forward + forward_ms, backward + backward_ms)
                for kind, (forward, backward) in node["times_on"].items()
            }
    return timed


@dataclass(frozen=True)
class TensorSums:
    """The sums over tensor ranks of a captured model, by node, and the link that they go over."""

    ranks: int = 1
    link: Link = field(default_factory=Link)
    of_node: Mapping[str, NodeSums] = field(default_factory=dict)

    def added(self, graph: nx.DiGraph) -> nx.DiGraph:
        """The graph with the sums of the nodes in each group, and with their times."""
        if not self.of_node:
            return graph
        for _, group in graph.nodes(data=True):
            sums = [self.of_node[name] for name in group["names"] if name in self.of_node]
            if sums:
                group.update(
                    forward_sums=sum(each.forward.number for each in sums),
                    forward_sum_bytes=sum(each.forward.num_bytes for each in sums),
                    backward_sums=sum(each.backward.number for each in sums),
                    backward_sum_bytes=sum(each.backward.num_bytes for each in sums),
                )
        return with_sums(graph, self.ranks, self.link)

    def in_profile(self, profile: Profile) -> Profile:
        """The profile with the times of the sums of each node."""
        nodes = dict(profile.nodes)
        for name in self.of_node:
            forward_ms, backward_ms = self.times_ms(name)
            nodes[name] = replace(
                nodes[name],
                forward_ms=nodes[name].forward_ms + forward_ms,
                backward_ms=nodes[name].backward_ms + backward_ms,
            )
        return replace(profile, nodes=nodes)

    def times_ms(self, node: str) -> tuple[float, float]:
        """Milliseconds of a node's sums in forward and in backward."""
        if node not in self.of_node:
            return 0.0, 0.0
        of = self.of_node[node]
        forward_ms, backward_ms = (
            sums_ms(each.number, each.num_bytes, self.ranks, self.link)
            for each in (of.forward, of.backward)
        )
        return forward_ms, backward_ms
