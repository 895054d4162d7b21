"""Two graphs that differ under `if self.training:` -> one graph with branches, or an error.

Nodes of one mode are in a region of that mode: `if self.training:` or its `else:`. If later nodes
read another value in each mode, a node selects the value of the mode:
`operator.getitem((train_value, evaluation_value), IfTraining(0, 1))`.

`modes_differ` is the error for two graphs that cannot be merged; it says where and why.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from ...runtime.errors import CaptureError
from .arguments import map_leaves
from .graph import is_external, tensor_spec
from .mode_merge import Different, Pair, add_meta, aligned, merged_arguments, unless
from .values import CallRecord, IfTraining, ModuleCall, Region

Calls = Mapping[ModuleCall, CallRecord]
_ALONE = (Region("training"), Region("evaluation"))


def branched(
    train: fx.Graph, train_calls: Calls, evaluation: fx.Graph, evaluation_calls: Calls
) -> tuple[fx.Graph, dict[ModuleCall, CallRecord]]:
    """One graph for two pruned graphs of symbolic sizes, and the module calls in terms of it.

    Raises Different if the results of the two modes cannot be one structure.
    """
    both = _Both(train, evaluation)
    both.write()
    calls = {
        call: both.record(record, evaluation_calls.get(call))
        for call, record in train_calls.items()
    }
    for call, record in evaluation_calls.items():
        if call not in calls:
            calls[call] = both.record(record, None, of=1)
    return both.graph, calls


class DifferentValues(Different):
    """A value with a different shape or dtype in each mode."""

    def __init__(self, train: fx.Node, evaluation: fx.Node) -> None:
        super().__init__()
        self.train, self.evaluation = train, evaluation


def _comes_from_outside(different: Different, reader: fx.Node) -> bool:
    """True if a module that runs in both modes gets a different shape in each: written once for
    each mode, it would not be one module."""
    if not isinstance(different, DifferentValues):
        return False
    calls = reader.meta["calls"]
    makers = (different.train, different.evaluation)
    return bool(calls) and any(maker.meta["calls"][: len(calls)] != calls for maker in makers)


class _Both:
    """Writes the merged graph. `side` 0 is training, 1 is evaluation."""

    def __init__(self, train: fx.Graph, evaluation: fx.Graph) -> None:
        self.graph = fx.Graph()
        self.sides = (list(train.nodes), list(evaluation.nodes))
        self.pairs = [pair for pair in aligned(train, evaluation) if not is_external(pair[0])]
        # The copy of each node of a side: as first made, and as later nodes read it.
        self.made: tuple[dict[fx.Node, fx.Node], ...] = ({}, {})
        self.now: tuple[dict[fx.Node, fx.Node], ...] = ({}, {})
        self.externals: dict[tuple[str, Any], fx.Node] = {}
        self.chosen: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

    def write(self) -> None:
        positions = [0, 0]
        for pair in [*self.pairs, None]:
            for side in (0, 1):
                end = len(self.sides[side]) if pair is None else None
                while positions[side] != end:
                    node = self.sides[side][positions[side]]
                    if pair is not None and node is pair[side]:
                        break
                    self._write_alone(side, node)
                    positions[side] += 1
            if pair is not None:
                self._write_pair(*pair)
                positions = [position + 1 for position in positions]

    def _write_pair(self, train: fx.Node, other: fx.Node) -> None:
        try:
            args = merged_arguments(train.args, other.args, self._choose)
            kwargs = merged_arguments(train.kwargs, other.kwargs, self._choose)
        except Different as different:
            if train.op == "output" or _comes_from_outside(different, train):
                raise
            self._write_alone(0, train)
            self._write_alone(1, other)
            return
        node = self._copy(train, args, kwargs)
        add_meta(node, other)
        self._stands_for(0, train, node)
        self._stands_for(1, other, node)

    def _write_alone(self, side: int, node: fx.Node) -> None:
        if is_external(node):
            self._external(side, node)
            return
        if node.op == "output":
            raise Different
        if node.target is unless:
            self._write_choice(node)
            return
        args = fx.node.map_arg(node.args, self.now[side].__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, self.now[side].__getitem__)
        copy = self._copy(node, args, kwargs)
        if not any(region.kind == "if" for region in node.meta["regions"]):
            copy.meta["regions"] = (_ALONE[side], *node.meta["regions"])
        if side == 1:
            _to_evaluation(copy)
        self._stands_for(side, node, copy)
        receiver = node.args[0] if node.args and node.meta["mutates"] else None
        if isinstance(receiver, fx.Node) and receiver.meta["val"] is node.meta["val"]:
            # It was changed in place: later nodes of both modes read the same tensor.
            self.now[side][node] = self.now[side][receiver]

    def _write_choice(self, node: fx.Node) -> None:
        """Writes the choice after a decision of training; evaluation, which never leaves anything
        out, reads its result too."""
        copy = self._copy(node, fx.node.map_arg(node.args, self.now[0].__getitem__), {})
        result = node.args[1]
        for train, other in self.pairs:
            if train is result:
                self.now[1][other] = copy
        self._stands_for(0, node, copy)

    def _external(self, side: int, node: fx.Node) -> None:
        key = (node.op, node.target)
        known = self.externals.get(key)
        if known is None:
            known = self._copy(node, node.args, node.kwargs)
            if side == 1:
                _to_evaluation(known)
            self.externals[key] = known
        elif side == 1:
            add_meta(known, node)
        else:
            known.meta["storages"] |= node.meta["storages"]
        self._stands_for(side, node, known)

    def _stands_for(self, side: int, node: fx.Node, copy: fx.Node) -> None:
        self.made[side][node] = self.now[side][node] = copy

    # Choosing

    def _choose(self, train: fx.Node, other: fx.Node) -> fx.Node:
        return self._choose_between(self.now[0][train], self.now[1][other])

    def _choose_between(self, train: fx.Node, other: fx.Node) -> fx.Node:
        if train is other:
            return train
        if (train, other) not in self.chosen:
            values = train.meta["val"], other.meta["val"]
            if not all(isinstance(value, Tensor) for value in values):
                raise Different
            if values[0].dtype != values[1].dtype or train.meta["shape"] != other.meta["shape"]:
                raise DifferentValues(train, other)
            later = max(train, other)
            with self.graph.inserting_after(later):
                node = self._add(
                    "call_function",
                    operator.getitem,
                    ((train, other), IfTraining(0, 1)),
                    like=train if values[0].requires_grad else other,
                    at=later,
                )
            node.meta["storages"] = train.meta["storages"] | other.meta["storages"]
            if "hint" in later.meta:
                node.meta["hint"] = later.meta["hint"]
            self.chosen[train, other] = node
        return self.chosen[train, other]

    # Nodes

    def _copy(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        copy = self.graph.create_node(node.op, node.target, args, kwargs)
        copy.meta = dict(node.meta)
        return copy

    def _add(self, op: str, target: Any, args: Any, *, like: fx.Node, at: fx.Node) -> fx.Node:
        """A node without a call in the model: its value is like that of one node, its place that of
        another."""
        node = self.graph.create_node(op, target, args)
        node.meta.update(
            like.meta, calls=at.meta["calls"], source=at.meta["source"],
            regions=_without_mode(at.meta["regions"]), random=False, mutates=frozenset(),
            touches=frozenset(), from_sizes=False,
        )  # fmt: skip
        node.meta.pop("hint", None)
        return node

    # Module calls

    def record(self, record: CallRecord, other: CallRecord | None, of: int = 0) -> CallRecord:
        """A module call in terms of this graph, with the result that readers of both modes see."""

        def copied(value: Any) -> Any:
            return fx.node.map_arg(value, self.made[of].get)

        result = fx.node.map_arg(record.result, self.now[of].get)
        if other is not None:
            try:
                result = merged_arguments(record.result, other.result, self._already_chosen)
            except Different:
                pass
        arguments = {name: copied(value) for name, value in record.arguments.items()}
        return CallRecord(record.type_name, record.module_path, arguments, result)

    def _already_chosen(self, train: fx.Node, other: fx.Node) -> fx.Node | None:
        """The choice between two results, if a reader made one; None for a pruned result."""
        mine, others = self.now[0].get(train), self.now[1].get(other)
        if mine is None or others is None:
            return mine
        return self.chosen.get((mine, others), mine)


def _without_mode(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    return tuple(region for region in regions if region not in _ALONE)


def _to_evaluation(node: fx.Node) -> None:
    """Marks the memory of a node that only evaluation has as evaluation's."""
    for key in ("storages", "mutates", "touches"):
        node.meta[key] = frozenset(-1 - storage for storage in node.meta[key])


_TENSOR = "a tensor"
TRAINING_CURE = 'Capture it for training alone: --mode train (mode="train" in Python)'


def modes_differ(
    train: fx.Graph, evaluation: fx.Graph, difference: Pair, why: Different, model: nn.Module
) -> CaptureError:
    """The error for two modes that no graph with branches can hold.

    `difference` are the first nodes of the modes that differ, `why` is the reason.
    """
    ours, theirs = (_result(graph) for graph in (train, evaluation))
    if ours != theirs:
        return CaptureError(
            f"{type(model).__name__}.forward returns {ours} in training and {theirs} in "
            "evaluation.",
            f"{TRAINING_CURE}; or return the same structure in both modes.",
        )
    if isinstance(why, DifferentValues):
        shapes = [tensor_spec(node) for node in (why.train, why.evaluation)]
        return CaptureError(
            f"the result of {_place(why.train)} is {shapes[0]} in training, and {shapes[1]} in "
            "evaluation, and modules that run in both modes read it.",
            f"{TRAINING_CURE}.",
        )
    cure = f"{TRAINING_CURE}."
    if (leaf := _module_of(difference, model)) is not None:
        cure = f"{TRAINING_CURE}; or keep the module that decides as one node: --leaf {leaf}."
    return CaptureError(
        "forward differs between training and evaluation, from "
        f"{_place(difference[0])} in training and {_place(difference[1])} in evaluation on, and "
        "later operations need both.",
        cure,
    )


def _result(graph: fx.Graph) -> str:
    """The structure of forward's result, such as `(a tensor, {aux: a tensor})`."""
    (output,) = graph.find_nodes(op="output")
    return _described(map_leaves(_kind, output.args[0]))


def _kind(leaf: Any) -> Any:
    return _TENSOR if isinstance(leaf, fx.Node) else leaf


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_described(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_described, value)) + ")"
    return str(value)


def _place(node: fx.Node) -> str:
    source = node.meta["source"]
    place = f"{source[0]}:{source[1]}" if source else node.name
    return f"{place} ({getattr(node.target, '__name__', node.target)})"


def _module_of(difference: Pair, model: nn.Module) -> str | None:
    """The class of the innermost module of both nodes; None if that is the model itself."""
    stacks = [[call.path for call in node.meta["calls"] if call.path] for node in difference]
    common = [one for one, other in zip(*stacks, strict=False) if one == other]
    return type(model.get_submodule(common[-1])).__name__ if common else None
