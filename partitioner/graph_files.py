"""A file <-> a cost graph: our own JSON, and two published formats to read.

- ours: `{"format": "asyncpipe cost graph", "schema": 1, "name": .., "nodes": [..], "edges": [..]}`
  with the attributes that `costs_of` reads
- the JSON of github.com/msr-fiddle/dnn-partitioning (throughput inputs)
- `graph.txt` of PipeDream's profiler, github.com/msr-fiddle/pipedream
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx

from ..runtime.errors import PlanError
from ..runtime.reading import Origin, known_fields, parse_json, read_text, shaped
from .published_graphs import checked, from_dnn_partitioning, from_pipedream

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
    origin = Origin(str(path), PlanError, _CURE)
    text = read_text(path, origin)
    if not text.lstrip().startswith("{"):
        return from_pipedream(text, path.stem, origin)
    raw = parse_json(text, origin)
    if raw.get("format") == _FORMAT:
        return _from_ours(raw, origin)
    if "maxFPGAs" in raw:
        return from_dnn_partitioning(raw, path.stem, origin)
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


@dataclass(frozen=True)
class _Node:
    """What is known of a node; the rest of it is the user's own."""

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
    rotation_bytes: float = 0.0
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
