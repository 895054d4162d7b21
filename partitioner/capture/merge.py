"""The graph in training mode and the graph in evaluation mode -> one graph with readable names.

The two must be alike node by node; arguments that differ (a dropout probability, a `training`
flag) become `IfTraining`. Memory that is shared in one mode only (dropout in evaluation mode is
its own argument) counts as shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from ...runtime.errors import CaptureError
from .values import CallRecord, IfTraining, ModuleCall, Size

_STORAGES = ("storages", "mutates", "touches")


def merge(train: fx.Graph, evaluation: fx.Graph, sizes: Mapping[str, int]) -> None:
    """Writes into `train` what differs in `evaluation`, which was traced at those sizes.

    Raises CaptureError where the two modes do different things.
    """
    partner: dict[fx.Node, fx.Node] = {}
    train_nodes, evaluation_nodes = list(train.nodes), list(evaluation.nodes)
    for node, other in zip(train_nodes, evaluation_nodes, strict=False):
        if node.op != other.op or node.target != other.target:
            raise _differ(node, other)
        merged = _Arguments(partner, sizes)
        args = merged.merge(node.args, other.args)
        kwargs = merged.merge(node.kwargs, other.kwargs)
        if merged.is_different:
            raise _differ(node, other)
        if merged.is_changed:
            node.args, node.kwargs = args, kwargs
        partner[other] = node
        node.meta["random"] = node.meta["random"] or other.meta["random"]
        for key in _STORAGES:
            # Numbers of evaluation mode's memory are below zero to keep the two apart.
            shared = frozenset(-1 - storage for storage in other.meta.get(key, frozenset()))
            node.meta[key] = node.meta.get(key, frozenset()) | shared
    if len(train_nodes) != len(evaluation_nodes):
        shorter = min(len(train_nodes), len(evaluation_nodes))
        raise _differ(train_nodes[shorter - 1], evaluation_nodes[shorter - 1])


class _Arguments:
    """Merges arguments and remembers whether they can be, and whether anything differed."""

    def __init__(self, partner: Mapping[fx.Node, fx.Node], sizes: Mapping[str, int]) -> None:
        self.partner, self.sizes = partner, sizes
        self.is_changed = self.is_different = False

    def merge(self, train: Any, other: Any) -> Any:
        if isinstance(train, fx.Node) or isinstance(other, fx.Node):
            both = isinstance(train, fx.Node) and isinstance(other, fx.Node)
            self.is_different |= not both or self.partner.get(other) is not train
            return train
        if isinstance(train, (tuple, list)) and isinstance(other, (tuple, list)):
            if len(train) == len(other):
                items = [self.merge(a, b) for a, b in zip(train, other, strict=True)]
                return tuple(items) if isinstance(train, tuple) else items
        if isinstance(train, Mapping) and isinstance(other, Mapping):
            if list(train) == list(other):
                return {key: self.merge(train[key], other[key]) for key in train}
        if isinstance(train, slice) and isinstance(other, slice):
            return slice(
                self.merge(train.start, other.start),
                self.merge(train.stop, other.stop),
                self.merge(train.step, other.step),
            )
        if self._equal(train, other):
            return train
        if _has_node(train) or _has_node(other):
            self.is_different = True
            return train
        self.is_changed = True
        return IfTraining(train, other)

    def _equal(self, train: Any, other: Any) -> bool:
        if isinstance(train, Size) and isinstance(other, (int, float)):
            return train.evaluate(self.sizes) == other
        return type(train) is type(other) and bool(train == other)


def _has_node(value: Any) -> bool:
    found = []
    fx.node.map_arg(value, lambda node: found.append(node))
    return bool(found)


def _differ(train: fx.Node, evaluation: fx.Node) -> CaptureError:
    def place(node: fx.Node) -> str:
        source = node.meta.get("source")
        return f"{source[0]}:{source[1]}" if source else node.name

    return CaptureError(
        f"forward does other work in training than in evaluation, from {place(train)} "
        f"({_verb(train)}) in training and {place(evaluation)} ({_verb(evaluation)}) in "
        "evaluation on.",
        "Keep the module with `if self.training:` as one node: --leaf Class.",
    )


def _verb(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def renamed(
    graph: fx.Graph, calls: Mapping[ModuleCall, CallRecord]
) -> tuple[fx.Graph, dict[ModuleCall, CallRecord]]:
    """A copy of the graph whose nodes are named after variables, modules and functions."""
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
    return _verb(node)
