"""A captured graph -> the graph as a person would have written it for just this case.

Operations that change nothing are left out: a move to the device where everything is anyway,
`positions + 0`, `x * 1.0`, `x[:, 0:]` are what a general model does in a special case. Modules
and tensors with several names get the one that the code around them has for them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from ..capture import Capture, LocalDevice, ModuleCall
from ..effects import is_mutating
from ..local_names import LocalNames
from ..split import StageGraph


def simplify(
    capture: Capture, stages: Sequence[StageGraph]
) -> tuple[Capture, tuple[StageGraph, ...]]:
    """A capture and stage graphs of new nodes with the old names. What crosses a boundary or
    is a result is kept as it is."""
    return _Simplifier(capture, stages).result()


class _Simplifier:
    def __init__(self, capture: Capture, stages: Sequence[StageGraph]) -> None:
        self._capture = capture
        self._stages = stages
        self._names = LocalNames(capture)
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, fx.Node] = {}
        nodes = capture.graph.nodes
        self._kept = {node for stage in stages for node in (*stage.inputs, *stage.outputs)}
        self._changed = {
            source for node in nodes if is_mutating(node) for source in node.all_input_nodes
        }
        self._changed_storages = {
            storage for node in nodes for storage in node.meta.get("mutates", ())
        }

    def result(self) -> tuple[Capture, tuple[StageGraph, ...]]:
        left_out = set()
        calls: dict[ModuleCall, ModuleCall] = {}
        for node in self._capture.graph.nodes:
            if node.op == "get_attr":
                continue
            source = self._same_as(node)
            if source is not None:
                new = self._new[node] = self._of(node, source)
                left_out.add(node)
                if new.op.startswith("call") and not new.meta.get("hint"):
                    new.meta["hint"] = node.meta.get("hint")  # it is now what the user named
                continue
            calls |= zip(node.meta.get("calls", ()), self._names.calls(node), strict=True)
            self._copy(node)
        records = {}
        for call, renamed in calls.items():
            if (record := self._capture.calls.get(call)) is not None:
                arguments, result = map(self._renewed, (record.arguments, record.result))
                records[renamed] = replace(record, arguments=arguments, result=result)
        stages = tuple(
            StageGraph(
                index=stage.index,
                nodes=tuple(self._new[node] for node in stage.nodes if node not in left_out),
                inputs=tuple(self._new[node] for node in stage.inputs),
                outputs=tuple(self._of(None, node) for node in stage.outputs),
            )
            for stage in self._stages
        )
        return replace(self._capture, graph=self._graph, calls=records), stages

    def _copy(self, node: fx.Node) -> None:
        made = self._graph.node_copy(node, lambda source: self._of(node, source))
        made.meta["calls"] = self._names.calls(node)
        if node.op == "call_module":
            made.target = self._names.module(node)
        elif node.op == "call_method" and node.target == "to":
            made.args, made.kwargs = _without_device(made)
        self._new[node] = made

    def _of(self, reader: fx.Node | None, source: fx.Node) -> fx.Node:
        """The new node for a value that is read."""
        if source.op != "get_attr":
            return self._new[source]
        is_known = reader is not None and reader.op != "output"
        name = self._names.tensor(reader, source) if reader and is_known else str(source.target)
        if name not in self._attributes:
            made = self._attributes[name] = self._graph.get_attr(name)
            made.meta = dict(source.meta)
        return self._attributes[name]

    def _renewed(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            known = value.op == "get_attr" or value in self._new
            return self._of(None, value) if known else None
        if isinstance(value, (tuple, list)):
            return tuple(map(self._renewed, value))
        if isinstance(value, dict):
            return {key: self._renewed(item) for key, item in value.items()}
        return value

    def _same_as(self, node: fx.Node) -> fx.Node | None:
        """The argument that a node gives back unchanged, if nothing tells the two apart."""
        source = _unchanged(node)
        if source is None or source.op == "get_attr" or node in self._kept | self._changed:
            return None
        storages = {*node.meta.get("storages", ()), *source.meta.get("storages", ())}
        return None if storages & self._changed_storages else source


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The argument whose values are those of the node's result."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), Tensor):
        return None
    is_floating = source.meta["val"].is_floating_point()
    other = node.args[1] if len(node.args) == 2 else None
    match node.op, node.target:
        case "call_method", "to":
            args, kwargs = _without_device(node)
            return source if len(args) == 1 and not kwargs else None
        case "call_function", operator.add:
            return source if not is_floating and type(other) is int and other == 0 else None
        case "call_function", operator.mul:
            return source if is_floating and type(other) is float and other == 1.0 else None
        case "call_function", operator.getitem:
            index = other if isinstance(other, tuple) else (other,)
            return source if all(map(_is_everything, index)) else None
    return None


def _is_everything(index: Any) -> bool:
    if not isinstance(index, slice):
        return False
    return index.start in (None, 0) and index.stop is None and index.step is None


def _without_device(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `x.to(...)` without the device, which is the one that x is on."""
    if any(isinstance(argument, LocalDevice) for argument in node.args[2:]):
        return node.args, dict(node.kwargs)
    args = tuple(argument for argument in node.args if not isinstance(argument, LocalDevice))
    kwargs = {
        name: value
        for name, value in node.kwargs.items()
        if not isinstance(value, LocalDevice) and name != "non_blocking"
    }
    return args, kwargs
