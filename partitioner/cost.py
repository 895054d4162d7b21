"""A cost graph, a link and a placement -> what each stage computes, sends, receives and keeps.

Every planning method and every report uses the formulas of this module. Symbols: S is the set of
groups of one stage; group v takes f_v and b_v ms forward and backward; value t is made by group
o_t and read by the groups M_t; for one micro-batch

    c_t      = latency + bytes_t / bandwidth              forward, and the same for its gradient
    work(S)  = sum over v in S of f_v + b_v
    talk(S)  = sum over t of c_t where o_t is in S and M_t is not within S
             + sum over t of c_t where o_t is not in S and M_t meets S
    load(S)  = work(S) + talk(S), or max(work(S), talk(S)) on a link that overlaps with computing

This is the cost model of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN
Graph Operators" (NeurIPS 2020): a value is paid for once by the stage that makes it and once by
each stage that reads it. A rank that sends and receives pays for both, one after the other.
Memory of stage j of p, with W_j micro-batches in flight:

    memory(S) = params x (1 + gradient + optimizer copies + stashed versions) + buffers
              + W_j x saved + the largest single value
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import PlanError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Link:
    """What carries boundary tensors between two ranks, the same in both directions.

    `bytes_per_s` is the bandwidth of one direction. With `overlap` the transfers of one
    micro-batch go on while another one is computed.
    """

    latency_ms: float = 0.0
    bytes_per_s: float = math.inf
    overlap: bool = False

    def transfer_ms(self, num_bytes: float) -> float:
        """Time of one message of `num_bytes`; nothing is sent for no bytes."""
        return self.latency_ms + 1e3 * num_bytes / self.bytes_per_s if num_bytes else 0.0


# Gloo between two processes of one host, as measured on loopback with 0.1 to 4 MB.
LOCALHOST = Link(latency_ms=0.1, bytes_per_s=2e9)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a cut may have to carry, in positions of `Costs.groups`.

    `owner` stands before all `readers` for an activation and after them for a gradient that is
    a value of its own. `readers` is sorted and has neither doubles nor the owner.
    """

    name: str
    owner: int
    readers: tuple[int, ...]
    forward_bytes: float
    backward_bytes: float
    transfer_ms: float

    @property
    def span(self) -> tuple[int, int]:
        """First and last position that the value joins."""
        return min(self.owner, self.readers[0]), max(self.owner, self.readers[-1])


@dataclass(frozen=True)
class Costs:
    """A cost graph as arrays over its groups in topological order, for one link."""

    name: str
    groups: tuple[str, ...]
    labels: tuple[str, ...]
    forward_ms: Floats
    backward_ms: Floats
    values: tuple[Value, ...]
    modules: tuple[tuple[str, ...], ...]
    blocks: tuple[str, ...]
    has_params: NDArray[np.bool_]
    link: Link

    @cached_property
    def work_ms(self) -> Floats:
        return self.forward_ms + self.backward_ms

    @cached_property
    def cut_bytes(self) -> Floats:
        """Bytes that cross a cut before each position (0..n), both directions together."""
        crossing = np.zeros(len(self.groups) + 1)
        for value in self.values:
            first, last = value.span
            crossing[first + 1 : last + 1] += value.forward_bytes + value.backward_bytes
        return crossing

    @cached_property
    def cut_depth(self) -> Ints:
        """How many nested modules a cut before each position (0..n) tears, from the block down.

        0 stands between blocks. A module is torn where groups of it lie on both sides.
        """
        spans: dict[tuple[str, ...], list[int]] = {}
        for position, path in enumerate(self.modules):
            for level in range(1, len(path) + 1):
                spans.setdefault(path[:level], [position, position])[1] = position
        depth = np.zeros(len(self.groups) + 1, dtype=np.int64)
        for path, (first, last) in spans.items():
            torn = depth[first + 1 : last + 1]
            np.maximum(torn, len(path), out=torn)
        return depth


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Times of one stage for one micro-batch, and the bytes that pass its borders."""

    forward_ms: float
    backward_ms: float
    send_ms: float
    receive_ms: float
    overlap: bool

    @property
    def work_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def talk_ms(self) -> float:
        return self.send_ms + self.receive_ms

    @property
    def load_ms(self) -> float:
        if self.overlap:
            return max(self.work_ms, self.talk_ms)
        return self.work_ms + self.talk_ms


def costs_of(graph: nx.DiGraph, link: Link | None = None) -> Costs:
    """The arrays of a cost graph; what a node or edge does not say is zero.

    Nodes: `forward_ms`, `backward_ms`, `output_bytes`, `parameters` {name: bytes}, `modules`
    (enclosing modules from the block inwards), `block`, `label`. Edges: `tensors` {name: bytes}
    that go along it, `grads` {name: bytes} that come back, `transfer_ms` {name: ms} where times
    are known instead of bytes. An edge without `tensors` carries its source's `output_bytes`, and
    without `grads` as much comes back if the graph has backward times.

    Raises PlanError when the graph is empty, has a cycle or a cost that is no number >= 0.
    """
    link = link or Link()
    groups = program_order(graph)
    position = {group: index for index, group in enumerate(groups)}
    nodes = graph.nodes
    forward, backward = (
        np.array([_cost(group, nodes[group], key) for group in groups], dtype=np.float64)
        for key in ("forward_ms", "backward_ms")
    )
    return Costs(
        name=str(graph.graph.get("name", "the graph")),
        groups=tuple(map(str, groups)),
        labels=tuple(str(nodes[group].get("label", group)) for group in groups),
        forward_ms=forward,
        backward_ms=backward,
        values=_values(graph, position, link, has_backward=bool(backward.any())),
        modules=tuple(tuple(nodes[group].get("modules", ())) for group in groups),
        blocks=tuple(nodes[group].get("block", "") for group in groups),
        has_params=np.array([bool(parameters_of(nodes[group])) for group in groups]),
        link=link,
    )


def program_order(graph: nx.DiGraph) -> list[Any]:
    """The nodes in a topological order that keeps to the order in which they were added."""
    if not len(graph):
        raise PlanError("the graph has no nodes.")
    added = {node: index for index, node in enumerate(graph)}
    if all(added[source] < added[target] for source, target in graph.edges):
        return list(graph)
    try:
        return list(nx.lexicographical_topological_sort(graph, key=added.__getitem__))
    except nx.NetworkXUnfeasible as error:
        cycle = " -> ".join(str(source) for source, *_ in nx.find_cycle(graph))
        raise PlanError(f"the graph has a cycle: {cycle} -> ... .") from error


def parameters_of(node: Mapping[str, Any]) -> dict[str, int]:
    """A node's parameters and their bytes; one nameless entry if only a sum is known."""
    if "parameters" in node:
        return dict(node["parameters"])
    return {"": int(node["param_bytes"])} if node.get("param_bytes") else {}


def stage_loads(costs: Costs, stage_of: Sequence[int], stages: int) -> tuple[StageLoad, ...]:
    """The load of every stage when group i is on stage `stage_of[i]`: the formulas above."""
    where = np.asarray(stage_of)
    forward = np.bincount(where, weights=costs.forward_ms, minlength=stages)
    backward = np.bincount(where, weights=costs.backward_ms, minlength=stages)
    send, receive = np.zeros(stages), np.zeros(stages)
    for value in costs.values:
        elsewhere = {int(where[reader]) for reader in value.readers} - {int(where[value.owner])}
        if elsewhere:
            send[where[value.owner]] += value.transfer_ms
            receive[list(elsewhere)] += value.transfer_ms
    return tuple(
        StageLoad(*times, overlap=costs.link.overlap)
        for times in zip(
            forward.tolist(), backward.tolist(), send.tolist(), receive.tolist(), strict=True
        )
    )


def stage_memory(
    nodes: Sequence[Mapping[str, Any]],
    *,
    in_flight: int,
    optimizer_copies: int = 2,
    stashed_versions: int = 0,
) -> tuple[int, int, int]:
    """Parameter bytes, saved bytes of one micro-batch, peak bytes of a stage's groups.

    Nodes: `parameters` or `param_bytes`, `buffer_bytes`, `saved` {storage: bytes} or
    `saved_bytes`, `output_bytes`. What several groups name is counted once. The peak is the last
    formula above, with Adam's two copies by default.
    """
    parameters: dict[str, int] = {}
    saved: dict[str, int] = {}
    for index, node in enumerate(nodes):
        parameters.update(_named(parameters_of(node), index))
        saved.update(_named(node.get("saved", {"": node.get("saved_bytes", 0)}), index))
    param_bytes, saved_bytes = sum(parameters.values()), sum(saved.values())
    buffer_bytes = int(sum(node.get("buffer_bytes", 0) for node in nodes))
    largest_bytes = int(max(node.get("output_bytes", 0) for node in nodes))
    copies = 1 + 1 + optimizer_copies + stashed_versions
    peak_bytes = param_bytes * copies + buffer_bytes + in_flight * saved_bytes + largest_bytes
    return param_bytes, saved_bytes, peak_bytes


def _named(sizes: Mapping[str, int], index: int) -> dict[str, int]:
    """Sizes under their names; a nameless one is this node's own."""
    return {name or f"#{index}": int(size) for name, size in sizes.items()}


def _cost(group: object, node: Mapping[str, Any], key: str) -> float:
    cost = node.get(key, 0.0)
    if not isinstance(cost, int | float) or not 0 <= cost < math.inf:
        raise PlanError(f"node {group} has {key} = {cost!r}, which is no time.")
    return float(cost)


def _values(
    graph: nx.DiGraph, position: Mapping[Any, int], link: Link, *, has_backward: bool
) -> tuple[Value, ...]:
    """One value a tensor, however many edges carry it."""
    forward_bytes: dict[tuple[int, str], float] = {}
    backward_bytes: dict[tuple[int, str], float] = {}
    known_ms: dict[tuple[int, str], float] = {}
    readers: dict[tuple[int, str], set[int]] = {}
    for source, target, edge in graph.edges(data=True):
        given = edge.get("bytes", graph.nodes[source].get("output_bytes", 0))
        tensors = edge.get("tensors", {str(source): given})
        grads = edge.get("grads", tensors if has_backward else {})
        for name, size in tensors.items():
            key = position[source], name
            forward_bytes[key] = max(size, forward_bytes.get(key, 0))
            readers.setdefault(key, set()).add(position[target])
        for name, size in grads.items():
            # The gradient of an activation goes where that came from, summed on the way out.
            paired = name in tensors
            key = position[source if paired else target], name
            backward_bytes[key] = max(size, backward_bytes.get(key, 0))
            readers.setdefault(key, set()).add(position[target if paired else source])
        for name, time_ms in edge.get("transfer_ms", {}).items():
            known_ms[position[source if name in tensors else target], name] = time_ms
    return tuple(
        Value(
            name=key[1],
            owner=key[0],
            readers=tuple(sorted(readers[key])),
            forward_bytes=forward_bytes.get(key, 0),
            backward_bytes=backward_bytes.get(key, 0),
            transfer_ms=known_ms.get(
                key,
                link.transfer_ms(forward_bytes.get(key, 0))
                + link.transfer_ms(backward_bytes.get(key, 0)),
            ),
        )
        for key in sorted(readers)
    )
