"""A cost graph of networkx -> the arrays of `Costs`; what is wrong with it is said here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import networkx as nx
import numpy as np

from ..runtime.errors import PlanError
from .cost import Costs, Floats, Held, Link, Value


def costs_of(graph: nx.DiGraph, link: Link | None = None) -> Costs:
    """The arrays of a cost graph; what a node or edge does not say is zero.

    Nodes: `forward_ms`, `backward_ms`, `weight_ms` of it (by default half where there are
    parameters, or where no node names any), `times_on` {kind of device: (forward ms, backward ms)},
    `output_bytes`, `parameters` {name: bytes} or `param_bytes`, `frozen` parameters {name: bytes},
    that need no gradient, of which a stage has one copy, `buffer_bytes`, `saved` {storage:
    bytes} or `saved_bytes`, `saved_as` {tensor: storage that it is in}, `transient_bytes` (or else
    `output_bytes`), `modules` (enclosing modules from the block inwards), `block`, `label`;
    `rotation_bytes` count where SOAP is the optimizer (`rotations.with_rotations`). The graph:
    `update_ms_per_byte` of parameters, which an optimizer takes for a step (`solve`).
    Edges: `tensors` {name: bytes} that go along it, `grads` {name: bytes} that come back,
    `transfer_ms` {name: ms} where times are known instead of bytes. An edge without `tensors`
    carries its source's `output_bytes`, and without `grads` as much comes back if the graph has
    backward times.

    Raises PlanError when the graph is empty, has a cycle or a cost that is no number >= 0.
    """
    link = link or Link()
    groups = _program_order(graph)
    position = {group: index for index, group in enumerate(groups)}
    nodes = graph.nodes
    forward, backward, buffers = (
        np.array([_cost(group, nodes[group], key) for group in groups], dtype=np.float64)
        for key in ("forward_ms", "backward_ms", "buffer_bytes")
    )
    values = _values(graph, position, has_backward=bool(backward.any()))
    transfer_ms = np.array([value.transfer_ms(link) for value in values], dtype=np.float64)
    return Costs(
        name=str(graph.graph.get("name", "the graph")),
        groups=tuple(map(str, groups)),
        labels=tuple(str(nodes[group].get("label", group)) for group in groups),
        forward_ms=forward,
        backward_ms=backward,
        weight_ms=_weight_ms(graph, groups, backward),
        edges=tuple(sorted((position[source], position[target]) for source, target in graph.edges)),
        values=values,
        send_ms=transfer_ms,
        receive_ms=transfer_ms,
        parameters=_held(_parameters_of(nodes[group]) for group in groups),
        saved=_held(_saved(nodes[group]) for group in groups),
        frozen=_held(_frozen(nodes[group]) for group in groups),
        buffer_bytes=buffers,
        transient_bytes=np.array([_transient(nodes[group]) for group in groups], dtype=np.float64),
        modules=tuple(tuple(nodes[group].get("modules", ())) for group in groups),
        blocks=tuple(nodes[group].get("block", "") for group in groups),
        has_params=np.array(
            [bool(_parameters_of(nodes[group]) or _frozen(nodes[group])) for group in groups]
        ),
        link=link,
        times_on=_times_on(graph, groups),
        update_ms=np.zeros(len(groups)),
        micro_batch_size=graph.graph.get("micro_batch_size"),
    )


def _program_order(graph: nx.DiGraph) -> list[Any]:
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


def _parameters_of(node: Mapping[str, Any]) -> dict[str, int]:
    """A node's parameters and their bytes; one nameless entry if only a sum is known."""
    if "parameters" in node:
        return dict(node["parameters"])
    return {"": int(node["param_bytes"])} if node.get("param_bytes") else {}


def _frozen(node: Mapping[str, Any]) -> Mapping[str, int]:
    return node.get("frozen") or {}


def _weight_ms(graph: nx.DiGraph, groups: Sequence[Any], backward_ms: Floats) -> Floats:
    """The part of each backward that makes gradients of weights."""
    has_params = [bool(_parameters_of(graph.nodes[group])) for group in groups]
    unknown = not any(has_params)
    found = np.zeros(len(groups))
    for index, (group, owns) in enumerate(zip(groups, has_params, strict=True)):
        node, whole_ms = graph.nodes[group], float(backward_ms[index])
        found[index] = whole_ms / 2 if owns or unknown else 0.0
        if "weight_ms" in node:
            found[index] = _cost(group, node, "weight_ms")
            if found[index] > whole_ms * (1 + 1e-9):
                raise PlanError(
                    f"node {group} has weight_ms = {found[index]:g}, which is a part of its "
                    f"backward_ms = {whole_ms:g} and cannot be more."
                )
    return found


def _held(named: Iterable[Mapping[str, int]]) -> tuple[Held, ...]:
    """What the groups name, once a name; a nameless size is its group's own."""
    groups: dict[str, list[int]] = {}
    sizes: dict[str, float] = {}
    for position, sizes_of_group in enumerate(named):
        for name, size in sizes_of_group.items():
            key = name or f"#{position}"
            groups.setdefault(key, []).append(position)
            sizes[key] = max(size, sizes.get(key, 0))
    return tuple(Held(tuple(groups[key]), size) for key, size in sizes.items() if size)


def _saved(node: Mapping[str, Any]) -> Mapping[str, int]:
    saved: Mapping[str, int] = node.get("saved", {"": node.get("saved_bytes", 0)})
    return saved


def _transient(node: Mapping[str, Any]) -> float:
    return float(node.get("transient_bytes", node.get("output_bytes", 0)))


def _times_on(graph: nx.DiGraph, groups: Sequence[Any]) -> dict[str, tuple[Floats, Floats]]:
    kinds = sorted(
        {kind for _, times in graph.nodes(data="times_on", default={}) for kind in times}
    )
    found = {}
    for kind in kinds:
        missing = [group for group in groups if kind not in graph.nodes[group].get("times_on", {})]
        if missing:
            raise PlanError(f"node {missing[0]} has no times on {kind}, other nodes have.")
        pairs = np.array([graph.nodes[group]["times_on"][kind] for group in groups], np.float64)
        found[kind] = (pairs[:, 0], pairs[:, 1])
    return found


def _cost(group: object, node: Mapping[str, Any], key: str) -> float:
    cost = node.get(key, 0.0)
    if not isinstance(cost, int | float) or not 0 <= cost < math.inf:
        raise PlanError(f"node {group} has {key} = {cost!r}, which is no time.")
    return float(cost)


def _values(
    graph: nx.DiGraph, position: Mapping[Any, int], *, has_backward: bool
) -> tuple[Value, ...]:
    """One value a tensor, however many edges carry it."""
    forward_bytes: dict[tuple[int, str], float] = {}
    backward_bytes: dict[tuple[int, str], float] = {}
    known_ms: dict[tuple[int, str], float] = {}
    nodes = {position[node]: data for node, data in graph.nodes(data=True)}
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
            known_ms=known_ms.get(key),
            is_saved=nodes[key[0]].get("saved_as", {}).get(key[1], key[1]) in _saved(nodes[key[0]]),
        )
        for key in sorted(readers)
    )
