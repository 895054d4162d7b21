"""A file <-> a cost graph: our own JSON, and two published formats to read.

- ours: `{"format": "asyncpipe cost graph", "schema": 1, "name": .., "nodes": [..], "edges": [..]}`
  with the attributes that `costs_of` reads
- the JSON of github.com/msr-fiddle/dnn-partitioning (throughput inputs)
- `graph.txt` of PipeDream's profiler, github.com/msr-fiddle/pipedream
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import networkx as nx

from ...runtime.errors import PlanError
from ...runtime.serialization import Origin, known_fields, parse_json, read_text, shaped

MOST = 1e15
"""A cost, in milliseconds or bytes, is below this."""

T = TypeVar("T")


def checked(kind: type[T], raw: Any, origin: Origin, place: str) -> T:
    """The known fields of a part of a file. Raises the origin's error for a number that is not a
    valid cost.
    """
    part = replace(origin, where=f"{origin.where}: {place}")
    costs: Any = shaped(kind, known_fields(kind, raw), part)
    for name, value in asdict(costs).items():
        numbers = value.values() if isinstance(value, Mapping) else [value]
        for number in numbers:
            if isinstance(number, int | float) and not 0 <= number < MOST:
                raise part.refused(f": {name} has {number:g}, which is not a valid cost.")
    result: T = costs
    return result


def from_pipedream(text: str, name: str, origin: Origin) -> nx.DiGraph:
    """Nodes `id -- description -- key=value, ..`, edges `<tab>id -- id`; times in ms.

    Its inputs cost nothing and are left out, as its own optimizer does; an activation that is a
    list of tensors counts as their sum.
    """
    graph = nx.DiGraph(name=name)
    inputs = set()
    for number, line in enumerate(text.splitlines(), start=1):
        parts = line.strip().split(" -- ")
        if line.startswith("\t") and len(parts) == 2:
            source, target = parts
            if source not in inputs:
                graph.add_edge(source, target)
        elif len(parts) >= 3:
            node, description, costs = parts[:3]
            if description.startswith("Input"):
                inputs.add(node)
                continue
            graph.add_node(node, **_pipedream_costs(costs, number, origin), names=[description])
    if not len(graph):
        raise origin.refused(" is not a cost graph, or is damaged: it has no nodes.")
    unknown = [node for node, data in graph.nodes(data=True) if not data]
    if unknown:
        raise origin.refused(f": an edge names {unknown[0]}, which is not a node of the graph.")
    return _in_topological_order(graph)


_PIPEDREAM_KEYS = {
    "forward_ms": "forward_compute_time",
    "backward_ms": "backward_compute_time",
    "output_bytes": "activation_size",
    "param_bytes": "parameter_size",
}


def _pipedream_costs(text: str, line: int, origin: Origin) -> dict[str, float]:
    texts = dict(re.findall(r"(\w+)=(\[[^\]]{0,9999}\]|[^,]+)", text[:99_999]))
    costs = {}
    for name, key in _PIPEDREAM_KEYS.items():
        try:
            cost = sum(float(part) for part in texts.get(key, "").strip("[]").split("; "))
        except ValueError:
            cost = math.nan
        if not 0 <= cost < MOST:
            shown = repr(texts[key][:60]) if key in texts else "missing"
            raise origin.refused(f": line {line}: {key} is {shown}, not a cost.")
        costs[name] = int(cost) if name.endswith("bytes") else cost
    return costs


@dataclass(frozen=True)
class _PublishedNode:
    id: int
    name: str
    fpgaLatency: float
    cpuLatency: float
    isBackwardNode: int | bool
    size: float
    colorClass: int | str | None = None


@dataclass(frozen=True)
class _PublishedEdge:
    sourceId: int
    destId: int
    cost: float
    size: float = 0.0


@dataclass(frozen=True)
class _Published:
    maxFPGAs: int
    maxSizePerFPGA: float
    nodes: tuple[Any, ...]
    edges: tuple[Any, ...]
    maxCPUs: int = 0


def from_dnn_partitioning(raw: dict[str, Any], name: str, origin: Origin) -> nx.DiGraph:
    """Accelerator times (`fpgaLatency`), and CPU times as `times_on`; a color class, with its
    backward nodes, is one group.

    Edge costs are times already, the same for all edges out of a node. A value for an earlier group
    is a gradient. The forward edges order the groups, and the reversed backward edges order groups
    without a forward node; groups on a cycle are one. A node's `size` is all the memory that it
    needs. The devices of the file are in `graph.graph["devices"]`.
    """
    whole, nodes, edges = _published(raw, origin)
    colour = {
        id_: f"node {id_}" if node.colorClass is None else node.colorClass
        for id_, node in nodes.items()
    }
    in_forward = {colour[id_] for id_, node in nodes.items() if not node.isBackwardNode}
    order = nx.DiGraph()
    order.add_nodes_from(colour.values())
    for edge in edges:
        ends = edge.sourceId, edge.destId
        backward = [nodes[end].isBackwardNode for end in ends]
        source, target = (colour[end] for end in ends)
        if not any(backward):
            order.add_edge(source, target)
        elif all(backward) and not {source, target} <= in_forward:
            order.add_edge(target, source)
    fused = nx.condensation(order)
    group_of = {id_: fused.graph["mapping"][colour[id_]] for id_ in nodes}
    members: dict[int, list[_PublishedNode]] = {}
    for id_, node in nodes.items():
        members.setdefault(group_of[id_], []).append(node)
    devices = {
        "accelerators": whole.maxFPGAs,
        "cpus": whole.maxCPUs,
        "memory_bytes": whole.maxSizePerFPGA,
    }
    graph = nx.DiGraph(name=name, devices=devices)
    for group in nx.lexicographical_topological_sort(fused):
        of_group = members[group]
        forward_ms, backward_ms = _latencies((node, node.fpgaLatency) for node in of_group)
        graph.add_node(
            group,
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            times_on={"cpu": _latencies((node, node.cpuLatency) for node in of_group)},
            buffer_bytes=int(sum(node.size for node in of_group)),
            names=[node.name for node in of_group],
        )
    place = {group: index for index, group in enumerate(graph)}
    for edge in edges:
        _carry(graph, place, group_of, edge)
    return _renamed(graph, origin)


def _published(
    raw: Any, origin: Origin
) -> tuple[_Published, dict[int, _PublishedNode], list[_PublishedEdge]]:
    """The file's nodes by their numbers, and its edges, each between two of them."""
    whole = shaped(_Published, known_fields(_Published, raw), origin)
    nodes_of_file = [
        checked(_PublishedNode, node, origin, f"nodes[{place}]")
        for place, node in enumerate(whole.nodes)
    ]
    nodes = {node.id: node for node in nodes_of_file}
    if len(nodes) < len(nodes_of_file):
        raise origin.refused(": two of its nodes have one id.")
    edges = []
    for place, raw_edge in enumerate(whole.edges):
        edge = checked(_PublishedEdge, raw_edge, origin, f"edges[{place}]")
        if not {edge.sourceId, edge.destId} <= nodes.keys():
            raise origin.refused(f": edge {edge.sourceId} -> {edge.destId} names no node.")
        edges.append(edge)
    return whole, nodes, edges


def _latencies(times: Iterable[tuple[_PublishedNode, float]]) -> tuple[float, float]:
    """Forward and backward times of a group."""
    times_by_direction = [0.0, 0.0]
    for node, time_ms in times:
        times_by_direction[bool(node.isBackwardNode)] += time_ms
    return times_by_direction[0], times_by_direction[1]


def _carry(
    graph: nx.DiGraph,
    order: Mapping[int, int],
    group_of: Mapping[int, int],
    edge: _PublishedEdge,
) -> None:
    """Adds what one edge carries to the edge between its two groups, in program order."""
    source, target = group_of[edge.sourceId], group_of[edge.destId]
    if source == target:
        return
    along = order[source] < order[target]
    ends = (source, target) if along else (target, source)
    if not graph.has_edge(*ends):
        graph.add_edge(*ends, tensors={}, grads={}, transfer_ms={})
    data = graph.edges[ends]
    value = str(edge.sourceId)
    data["tensors" if along else "grads"][value] = int(edge.size)
    data["transfer_ms"][value] = edge.cost


def _renamed(graph: nx.DiGraph, origin: Origin) -> nx.DiGraph:
    """Groups named after their first member."""
    names = {group: graph.nodes[group]["names"][0] for group in graph}
    if len(set(names.values())) < len(names):
        raise origin.refused(": two of its groups have one name.")
    return nx.relabel_nodes(graph, names)


def _in_topological_order(graph: nx.DiGraph) -> nx.DiGraph:
    """The same graph with its nodes added in a topological order, if it has one."""
    if not nx.is_directed_acyclic_graph(graph):
        return graph
    ordered = nx.DiGraph(**graph.graph)
    ordered.add_nodes_from((node, graph.nodes[node]) for node in nx.topological_sort(graph))
    ordered.add_edges_from(graph.edges(data=True))
    return ordered


_FORMAT = "asyncpipe cost graph"
_SCHEMA = 1
_CURE = "Give a cost graph of asyncpipe (JSON), dnn-partitioning (JSON) or PipeDream (graph.txt)."


def read_graph(path: str | Path) -> nx.DiGraph:
    """Reads a cost graph.

    - `path`: a file in one of three formats, recognized by its content: asyncpipe's own JSON,
      the JSON of dnn-partitioning (Tarnawski et al., NeurIPS 2020), or PipeDream's `graph.txt`
      (Narayanan et al., SOSP 2019).

    Returns a graph for `plan_graph`, with the attributes of `costs_of`. Raises PlanError when the
    file is missing, is in none of these formats, or is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise PlanError(f"{path} is not a file.", "--graph needs the path of a cost graph.")
    origin = Origin(str(path), PlanError, _CURE)
    text = read_text(path, origin)
    if not text.lstrip().startswith("{"):
        return from_pipedream(text, path.stem, origin)
    raw = parse_json(text, origin)
    if raw.get("format") == _FORMAT:
        return _from_ours(raw, origin)
    if "maxFPGAs" in raw:
        return from_dnn_partitioning(raw, path.stem, origin)
    raise PlanError(f"{path} is JSON, but not a cost graph.", _CURE)


def write_graph(graph: nx.DiGraph, path: str | Path) -> None:
    """Writes a cost graph as our JSON: one line a node and an edge, the same bytes each time."""
    nodes = [{"name": str(node), **data} for node, data in graph.nodes(data=True)]
    edges = [{"source": str(u), "target": str(v), **data} for u, v, data in graph.edges(data=True)]
    head = json.dumps({"format": _FORMAT, "schema": _SCHEMA, **graph.graph})[1:-1]
    Path(path).write_text(
        f'{{{head},\n"nodes": [\n{_lines(nodes)}\n],\n"edges": [\n{_lines(edges)}\n]}}\n',
        encoding="utf-8",
    )


def _lines(items: Iterable[Mapping[str, Any]]) -> str:
    return ",\n".join(json.dumps(item, ensure_ascii=False) for item in items)


@dataclass(frozen=True)
class _Node:
    """The known fields of a node; all others belong to the user."""

    name: str
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    weight_ms: float = 0.0
    times_on: Mapping[str, tuple[float, float]] | None = None
    output_bytes: float = 0.0
    parameters: Mapping[str, float] | None = None
    param_bytes: float = 0.0
    frozen: Mapping[str, float] | None = None
    buffer_bytes: float = 0.0
    saved: Mapping[str, float] | None = None
    saved_bytes: float = 0.0
    saved_as: Mapping[str, str] | None = None
    transient_bytes: float = 0.0
    live_bytes: float = 0.0
    rotation_bytes: float = 0.0
    forward_sums: float = 0.0
    forward_sum_bytes: float = 0.0
    backward_sums: float = 0.0
    backward_sum_bytes: float = 0.0
    modules: tuple[str, ...] = ()
    block: str = ""
    label: str = ""


@dataclass(frozen=True)
class _Edge:
    source: str
    target: str
    bytes: float = 0.0
    tensors: Mapping[str, float] | None = None
    grads: Mapping[str, float] | None = None
    transfer_ms: Mapping[str, float] | None = None


@dataclass(frozen=True)
class _Whole:
    nodes: tuple[Any, ...]
    edges: tuple[Any, ...]
    name: str = ""
    micro_batch_size: int | None = None


def _from_ours(raw: dict[str, Any], origin: Origin) -> nx.DiGraph:
    if raw.get("schema") != _SCHEMA:
        raise PlanError(
            f"{origin.where} has schema {raw.get('schema')!r:.20}, this version of asyncpipe reads "
            f"{_SCHEMA}.",
            "Write the graph again with write_graph.",
        )
    whole = shaped(_Whole, known_fields(_Whole, raw), origin)
    if whole.micro_batch_size is not None and whole.micro_batch_size < 1:
        raise origin.refused(f": micro_batch_size is {whole.micro_batch_size}.")
    graph = nx.DiGraph()
    graph.graph |= {key: raw[key] for key in raw if key not in _OF_THE_FILE}
    for place, node in enumerate(whole.nodes):
        name = checked(_Node, node, origin, f"nodes[{place}]").name
        if name in graph:
            raise origin.refused(f": node {name} is there twice.")
        graph.add_node(name)
        graph.nodes[name].update({key: node[key] for key in node if key != "name"})
    for place, edge in enumerate(whole.edges):
        ends = checked(_Edge, edge, origin, f"edges[{place}]")
        if ends.source not in graph or ends.target not in graph:
            raise origin.refused(f": edge {ends.source} -> {ends.target} names no node.")
        graph.add_edge(ends.source, ends.target)
        rest = {key: edge[key] for key in edge if key not in ("source", "target")}
        graph.edges[ends.source, ends.target].update(rest)
    return graph


_OF_THE_FILE = ("format", "schema", "nodes", "edges")
