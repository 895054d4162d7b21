"""Finds the operations of a graph that are equal, so that a result for one holds for all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx

from ..capture import Capture, IfTraining
from ..capture.arguments import map_leaves, tensors_in
from ..profile.cache import describe_module
from .model_tensors import ModelTensors


@dataclass(frozen=True)
class _Input:
    """The place of a node among the inputs of another one."""

    position: int


class Kinds:
    """The kinds of the nodes of a graph, in the order in which they are computed.

    Two nodes have the same kind if they run the same operation with the same arguments, their
    floating-point inputs have the same layouts, and their other inputs are the same.

    first: the first node of the kind of each node
    """

    def __init__(self, capture: Capture, tensors: ModelTensors, changed: Collection[int]) -> None:
        self._capture, self._tensors, self._changed = capture, tensors, changed
        self._first_of_kind: dict[Any, fx.Node] = {}
        self.first: dict[fx.Node, fx.Node] = {}

    def add(self, node: fx.Node, given: Mapping[fx.Node, Any]) -> fx.Node:
        """The first node of the kind of `node`, whose inputs have the values `given`."""
        if self._is_single(node):
            first = node
        else:
            first = self._first_of_kind.setdefault(self._kind(node, given), node)
        self.first[node] = first
        return first

    def _is_single(self, node: fx.Node) -> bool:
        """True for a node that makes, reads or changes memory that is changed in place, or that
        runs only under a condition."""
        storages = node.meta["storages"].union(*(n.meta["storages"] for n in node.all_input_nodes))
        is_decided = "decision" in node.meta or any(r.is_decided for r in node.meta["regions"])
        return is_decided or not (storages | node.meta["mutates"]).isdisjoint(self._changed)

    def _kind(self, node: fx.Node, given: Mapping[fx.Node, Any]) -> Any:
        places = {source: _Input(position) for position, source in enumerate(given)}
        target = node.target
        if node.op == "call_module":
            target = describe_module(self._capture.model.get_submodule(str(target)))
        return (
            node.op,
            target,
            repr(map_leaves(partial(_written, places), (node.args, node.kwargs))),
            tuple(self._described(source, value) for source, value in given.items()),
            node.meta["regions"],
            requires_gradient(node),
        )

    def _described(self, source: fx.Node, value: Any) -> Any:
        is_parameter = self._tensors.is_parameter(source)
        tensors = list(tensors_in(value))
        if all(tensor.is_floating_point() for tensor in tensors):
            layouts = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
            return is_parameter, _structure(value), layouts
        return is_parameter, self.first.get(source) or self._content(source, value)

    def _content(self, source: fx.Node, value: Any) -> Any:
        """The facts that equal integer or boolean inputs have in common."""
        if source.op != "get_attr" or value.numel() >= _LARGE:
            return source
        content = b"" if value.is_meta else value.cpu().numpy().tobytes()
        return value.shape, value.dtype, content


def _written(places: Mapping[Any, _Input], leaf: Any) -> Any:
    if isinstance(leaf, fx.Node):
        return places.get(leaf, leaf)
    if isinstance(leaf, IfTraining):
        written = partial(_written, places)
        return IfTraining(map_leaves(written, leaf.train), map_leaves(written, leaf.eval))
    return leaf


def _structure(value: Any) -> str:
    """A value without the numbers in its tensors."""
    return repr(map_leaves(lambda leaf: ... if isinstance(leaf, Tensor) else leaf, value))


def requires_gradient(node: fx.Node) -> bool:
    """True if the value of a node is a tensor with a gradient, or a structure with one."""
    return any(tensor.requires_grad for tensor in tensors_in(node.meta.get("val")))


_LARGE = 2**20
"""Numbers of elements of tensors that are not compared."""
