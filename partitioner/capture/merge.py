"""The graph of training mode and the graph of evaluation mode -> one graph.

The two are alike node by node, as a rule; arguments that differ (a dropout probability, a
`training` flag) become `IfTraining`. Memory that is shared in one mode only (dropout in evaluation
mode is its own argument) counts as shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from torch import fx

from ...runtime.structure import is_named_tuple
from .graph import is_external
from .prune import prune
from .values import IfTraining, Size

Pair = tuple[fx.Node, fx.Node]
STORAGES = ("storages", "mutates", "touches")


class Different(Exception):
    """Two nodes, one of each mode, that cannot be one."""


def merge(train: fx.Graph, evaluation: fx.Graph) -> Pair | None:
    """Writes into `train` what differs in `evaluation`.

    Where the two modes do different things the result is where they part; the graphs are then
    pruned and otherwise unchanged.
    """
    difference = _merge_in_step(train, evaluation)
    if difference is not None:
        # Perhaps only what nobody needs is different.
        prune(train)
        prune(evaluation)
        difference = _merge_in_step(train, evaluation)
    return difference


def _merge_in_step(train: fx.Graph, evaluation: fx.Graph) -> Pair | None:
    """Merges graphs whose calls are alike one by one; else changes nothing and says where they
    part. Which parameter is read first does not matter."""
    pairs = common_externals(train, evaluation)
    nodes, others = calls_of(train), calls_of(evaluation)
    pairs += zip(nodes, others, strict=False)
    merged, difference = _mergeable(pairs)
    if difference is None and len(nodes) != len(others):
        difference = pairs[-1]
    if difference is None:
        _apply(merged)
    return difference


def calls_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something, and the output."""
    return [node for node in graph.nodes if not is_external(node)]


def common_externals(train: fx.Graph, evaluation: fx.Graph) -> list[Pair]:
    """The inputs, parameters, buffers and constants that both graphs have, by name."""
    named = {(node.op, node.target): node for node in train.nodes if is_external(node)}
    return [
        (named[node.op, node.target], node)
        for node in evaluation.nodes
        if (node.op, node.target) in named
    ]


_Merged = tuple[fx.Node, fx.Node, Any, Any]


def _mergeable(pairs: Iterable[Pair]) -> tuple[list[_Merged], Pair | None]:
    """The pairs that can be one node, with its arguments, and the first pair that cannot."""
    partner: dict[fx.Node, fx.Node] = {}
    merged: list[_Merged] = []
    first = None

    def same(train: fx.Node, other: fx.Node) -> fx.Node:
        if partner.get(other) is not train:
            raise Different
        return train

    for node, other in pairs:
        try:
            if (node.op, node.target) != (other.op, other.target):
                raise Different
            args = merged_arguments(node.args, other.args, same)
            kwargs = merged_arguments(node.kwargs, other.kwargs, same)
        except Different:
            first = first or (node, other)
            continue
        partner[other] = node
        merged.append((node, other, args, kwargs))
    return merged, first


def _apply(merged: Iterable[_Merged]) -> None:
    for node, other, args, kwargs in merged:
        if args != node.args or kwargs != node.kwargs:
            node.args, node.kwargs = args, kwargs
        add_meta(node, other)


def add_meta(node: fx.Node, other: fx.Node) -> None:
    """Adds what is known of a node in evaluation mode to what is known of it in training mode."""
    node.meta["random"] = node.meta["random"] or other.meta["random"]
    for key in STORAGES:
        # Numbers of evaluation mode's memory are below zero to keep the two apart.
        node.meta[key] |= frozenset(-1 - storage for storage in other.meta[key])


def aligned(train: fx.Graph, evaluation: fx.Graph) -> list[Pair]:
    """The nodes that the two graphs have in common: inputs, parameters and buffers by name, then
    calls in order."""

    calls = calls_of(train), calls_of(evaluation)
    return [*common_externals(train, evaluation), *common_calls(*calls)]


def common_calls(nodes: Sequence[fx.Node], others: Sequence[fx.Node]) -> list[Pair]:
    """The pairs of a longest common sequence, or nearly."""
    keys, other_keys = [*map(call_key, nodes)], [*map(call_key, others)]
    pairs: list[Pair] = []
    for block in SequenceMatcher(None, keys, other_keys, autojunk=False).get_matching_blocks():
        pairs += zip(nodes[block.a :][: block.size], others[block.b :][: block.size], strict=True)
    return pairs


def call_key(node: fx.Node) -> tuple[Any, ...]:
    """What two nodes have in common that may be the same call."""
    return node.op, node.target, node.meta["source"], node.meta["calls"]


def merged_arguments(
    train: Any,
    other: Any,
    same: Callable[[fx.Node, fx.Node], fx.Node | None],
) -> Any:
    """Arguments that do for both modes, `same` saying which node stands for two.

    Raises Different when there are none.
    """

    def merge(a: Any, b: Any) -> Any:
        return merged_arguments(a, b, same)

    if isinstance(train, fx.Node) and isinstance(other, fx.Node):
        return same(train, other)
    if isinstance(train, (tuple, list)) and isinstance(other, (tuple, list)):
        if len(train) == len(other):
            items = [merge(a, b) for a, b in zip(train, other, strict=True)]
            if is_named_tuple(train):
                return type(train)(*items)
            return tuple(items) if isinstance(train, tuple) else items
    if isinstance(train, Mapping) and isinstance(other, Mapping) and list(train) == list(other):
        return {key: merge(train[key], other[key]) for key in train}
    if isinstance(train, slice) and isinstance(other, slice):
        return slice(
            merge(train.start, other.start),
            merge(train.stop, other.stop),
            merge(train.step, other.step),
        )
    if _has_node(train) or _has_node(other):
        raise Different
    if type(train) is type(other) and bool(train == other):
        return train
    if isinstance(train, Size) or isinstance(other, Size):
        raise Different
    return IfTraining(train, other)


def _has_node(value: Any) -> bool:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return bool(found)
