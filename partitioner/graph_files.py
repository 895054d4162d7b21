"""A file <-> a cost graph: our own JSON, and two published formats to read.

- ours: `{"format": "asyncpipe cost graph", "schema": 1, "name": .., "nodes": [..], "edges": [..]}`
  with the attributes that `costs_of` reads
- the JSON of github.com/msr-fiddle/dnn-partitioning (throughput inputs)
- `graph.txt` of PipeDream's profiler, github.com/msr-fiddle/pipedream
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import networkx as nx

from ..runtime.errors import PlanError

_FORMAT = "asyncpipe cost graph"
_SCHEMA = 1
_CURE = "Read are: asyncpipe's cost graph JSON, dnn-partitioning's JSON, PipeDream's graph.txt."


def read_graph(path: str | Path) -> nx.DiGraph:
    """Reads a cost graph, in whichever of the three formats the file is.

    Raises PlanError when the file is missing, is none of them, or is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise PlanError(f"{path} is not a file.", "--graph needs the path of a cost graph.")
    try:
        text = path.read_text(encoding="utf-8")
        if not text.lstrip().startswith("{"):
            return _from_pipedream(text, path.stem)
        raw = json.loads(text)
        if raw.get("format") == _FORMAT:
            return _from_ours(raw, path)
        if "maxFPGAs" in raw:
            return _from_dnn_partitioning(raw, path.stem)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"{path} is no cost graph, or damaged: {type(error).__name__}: {error}.", _CURE
        ) from error
    raise PlanError(f"{path} is JSON, but no cost graph.", _CURE)


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


def _from_ours(raw: dict[str, Any], path: Path) -> nx.DiGraph:
    if raw["schema"] != _SCHEMA:
        raise PlanError(
            f"{path} has schema {raw['schema']}, this version of asyncpipe reads {_SCHEMA}.",
            "Write the graph again with write_graph.",
        )
    rest = {key: raw[key] for key in raw.keys() - {"format", "schema", "nodes", "edges"}}
    graph = nx.DiGraph(**rest)
    for node in raw["nodes"]:
        graph.add_node(node.pop("name"), **node)
    for edge in raw["edges"]:
        source, target = edge.pop("source"), edge.pop("target")
        if source not in graph or target not in graph:
            raise ValueError(f"edge {source} -> {target} names no node")
        graph.add_edge(source, target, **edge)
    return graph


def _from_pipedream(text: str, name: str) -> nx.DiGraph:
    """Nodes `id -- description -- key=value, ..`, edges `<tab>id -- id`; times in ms.

    Its inputs cost nothing and are left out, as its own optimizer does; an activation that is a
    list of tensors counts as their sum.
    """
    graph = nx.DiGraph(name=name)
    inputs = set()
    for line in text.splitlines():
        parts = line.strip().split(" -- ")
        if line.startswith("\t"):
            source, target = parts
            if source not in inputs:
                graph.add_edge(source, target)
        elif len(parts) >= 3:
            node, description, costs = parts[:3]
            if description.startswith("Input"):
                inputs.add(node)
                continue
            cost = dict(re.findall(r"(\w+)=(\[.*?\]|[^,]+)", costs))
            graph.add_node(
                node,
                forward_ms=float(cost["forward_compute_time"]),
                backward_ms=float(cost["backward_compute_time"]),
                output_bytes=_total(cost["activation_size"]),
                param_bytes=_total(cost["parameter_size"]),
                names=[description],
            )
    if not len(graph):
        raise ValueError("it has no nodes")
    unknown = [node for node, data in graph.nodes(data=True) if not data]
    if unknown:
        raise ValueError(f"edges name {unknown[0]}, which is no node")
    return _in_topological_order(graph)


def _total(text: str) -> int:
    return int(sum(float(part) for part in text.strip("[]").split("; ")))


def _from_dnn_partitioning(raw: dict[str, Any], name: str) -> nx.DiGraph:
    """Accelerator times (`fpgaLatency`), those of the CPU as `times_on`; a colour class, with its
    backward nodes, is one group.

    Edge costs are times already, the same for all edges out of a node. What goes to an earlier
    group is a gradient. The forward edges order the groups, and for a group that has no forward
    node the backward edges turned round; groups on a cycle are one. A node's `size` is all the
    memory that it needs. The devices of the file are in `graph.graph["devices"]`.
    """
    nodes = {node["id"]: node for node in raw["nodes"]}
    colour = {id_: node.get("colorClass", f"node {id_}") for id_, node in nodes.items()}
    in_forward = {colour[id_] for id_, node in nodes.items() if not node["isBackwardNode"]}
    order = nx.DiGraph()
    order.add_nodes_from(colour.values())
    for edge in raw["edges"]:
        ends = edge["sourceId"], edge["destId"]
        backward = [nodes[end]["isBackwardNode"] for end in ends]
        source, target = (colour[end] for end in ends)
        if not any(backward):
            order.add_edge(source, target)
        elif all(backward) and not {source, target} <= in_forward:
            order.add_edge(target, source)
    fused = nx.condensation(order)
    group_of = {id_: fused.graph["mapping"][colour[id_]] for id_ in nodes}
    members: dict[int, list[Any]] = {}
    for id_, node in nodes.items():
        members.setdefault(group_of[id_], []).append(node)
    devices = {
        "accelerators": int(raw["maxFPGAs"]),
        "cpus": int(raw.get("maxCPUs", 0)),
        "memory_bytes": float(raw["maxSizePerFPGA"]),
    }
    graph = nx.DiGraph(name=name, devices=devices)
    for group in nx.lexicographical_topological_sort(fused):
        of_group = members[group]
        forward_ms, backward_ms = _latencies(of_group, "fpgaLatency")
        graph.add_node(
            group,
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            times_on={"cpu": _latencies(of_group, "cpuLatency")},
            buffer_bytes=int(sum(node["size"] for node in of_group)),
            names=[node["name"] for node in of_group],
        )
    place = {group: index for index, group in enumerate(graph)}
    for edge in raw["edges"]:
        _carry(graph, place, group_of, edge)
    return _renamed(graph)


def _latencies(nodes: Iterable[Mapping[str, Any]], key: str) -> tuple[float, float]:
    """Forward and backward times of a group."""
    times = [0.0, 0.0]
    for node in nodes:
        times[bool(node["isBackwardNode"])] += node[key]
    return times[0], times[1]


def _carry(
    graph: nx.DiGraph,
    order: Mapping[int, int],
    group_of: Mapping[int, int],
    edge: Mapping[str, Any],
) -> None:
    """Adds what one edge carries to the edge between its two groups, in program order."""
    source, target = group_of[edge["sourceId"]], group_of[edge["destId"]]
    if source == target:
        return
    along = order[source] < order[target]
    ends = (source, target) if along else (target, source)
    if not graph.has_edge(*ends):
        graph.add_edge(*ends, tensors={}, grads={}, transfer_ms={})
    data = graph.edges[ends]
    value = str(edge["sourceId"])
    data["tensors" if along else "grads"][value] = int(edge.get("size", 0))
    data["transfer_ms"][value] = float(edge["cost"])


def _renamed(graph: nx.DiGraph) -> nx.DiGraph:
    """Groups named after their first member."""
    return nx.relabel_nodes(graph, {group: graph.nodes[group]["names"][0] for group in graph})


def _in_topological_order(graph: nx.DiGraph) -> nx.DiGraph:
    """The same graph with its nodes added in a topological order, if it has one."""
    if not nx.is_directed_acyclic_graph(graph):
        return graph
    ordered = nx.DiGraph(**graph.graph)
    ordered.add_nodes_from((node, graph.nodes[node]) for node in nx.topological_sort(graph))
    ordered.add_edges_from(graph.edges(data=True))
    return ordered
