"""A graph as it was traced -> the same graph with nodes named after variables and modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from .values import CallRecord, ModuleCall


def renamed(
    graph: fx.Graph, calls: Mapping[ModuleCall, CallRecord]
) -> tuple[fx.Graph, dict[ModuleCall, CallRecord]]:
    """A copy of the graph with readable names, and the module calls in terms of it.

    A node is named after the first variable that held its value, else after its module or its
    function. Names are those that fx makes unique, in program order.
    """
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copy = result.create_node(
            node.op,
            node.target,
            fx.node.map_arg(node.args, copies.__getitem__),
            fx.node.map_arg(node.kwargs, copies.__getitem__),
            name=_name(node),
        )
        if node.op == "placeholder":
            # fx would rename an input called `input`.
            copy.name = node.target
        copy.meta = node.meta
        copies[node] = copy
    return result, {call: _moved(record, copies) for call, record in calls.items()}


def _moved(record: CallRecord, copies: Mapping[fx.Node, fx.Node]) -> CallRecord:
    def move(value: Any) -> Any:
        return fx.node.map_arg(value, copies.get)

    arguments = {name: move(value) for name, value in record.arguments.items()}
    return CallRecord(record.type_name, record.module_path, arguments, move(record.result))


def _name(node: fx.Node) -> str:
    hint = node.meta.get("hint")
    if hint:
        return str(hint)
    if node.op == "call_module":
        *parents, last = str(node.target).split(".")
        return f"{parents[-1]}_{last}" if last.isdigit() and parents else last
    if node.op == "get_attr":
        return str(node.target).replace(".", "_")
    if node.op == "output":
        return "output"
    return str(getattr(node.target, "__name__", node.target))
