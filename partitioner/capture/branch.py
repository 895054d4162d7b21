"""Two graphs that differ under `if self.training:` -> one graph with branches.

What one mode does alone is in a region of that mode, which is `if self.training:` or its `else:`.
Where what follows reads another value in each mode, a node picks the one of the mode:
`operator.getitem((train_value, evaluation_value), IfTraining(0, 1))`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from .graph import is_external
from .merge import Different, add_meta, aligned, merged_arguments
from .skips import unless
from .values import CallRecord, IfTraining, ModuleCall, Region

Calls = Mapping[ModuleCall, CallRecord]
_ALONE = (Region("training"), Region("evaluation"))


def branched(
    train: fx.Graph, train_calls: Calls, evaluation: fx.Graph, evaluation_calls: Calls
) -> tuple[fx.Graph, dict[ModuleCall, CallRecord]]:
    """One graph for two pruned graphs of symbolic sizes, and the module calls in terms of it.

    Raises Different where what the two modes return cannot be one structure.
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
    """A value that has another shape or dtype in each mode."""

    def __init__(self, train: fx.Node, evaluation: fx.Node) -> None:
        super().__init__()
        self.train, self.evaluation = train, evaluation


def _comes_from_outside(different: Different, reader: fx.Node) -> bool:
    """Whether a module that runs in both modes is given another shape in each: written once a
    mode, it would be no module."""
    if not isinstance(different, DifferentValues):
        return False
    calls = reader.meta["calls"]
    makers = (different.train, different.evaluation)
    return bool(calls) and any(maker.meta["calls"][: len(calls)] != calls for maker in makers)


class _Both:
    """The graph being written. `side` 0 is training, 1 is evaluation."""

    def __init__(self, train: fx.Graph, evaluation: fx.Graph) -> None:
        self.graph = fx.Graph()
        self.sides = (list(train.nodes), list(evaluation.nodes))
        self.pairs = [pair for pair in aligned(train, evaluation) if not is_external(pair[0])]
        # The node that stands for a node of a side: when it was made, and now.
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
            # It was changed in place: both modes go on with the same tensor.
            self.now[side][node] = self.now[side][receiver]

    def _write_choice(self, node: fx.Node) -> None:
        """What a decision of training leaves out is done in evaluation, which chooses too."""
        copy = self._copy(node, fx.node.map_arg(node.args, self.now[0].__getitem__), {})
        made = node.args[1]
        for train, other in self.pairs:
            if train is made:
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
        """A node that the model does not have, of a value like that of one node, beside another."""
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
        """A module call in terms of this graph, with the result that both modes' readers see."""

        def made(value: Any) -> Any:
            return fx.node.map_arg(value, self.made[of].get)

        result = fx.node.map_arg(record.result, self.now[of].get)
        if other is not None:
            try:
                result = merged_arguments(record.result, other.result, self._already_chosen)
            except Different:
                pass
        arguments = {name: made(value) for name, value in record.arguments.items()}
        return CallRecord(record.type_name, record.module_path, arguments, result)

    def _already_chosen(self, train: fx.Node, other: fx.Node) -> fx.Node | None:
        """The choice between two results, if a reader has made it; None for a pruned one."""
        mine, others = self.now[0].get(train), self.now[1].get(other)
        if mine is None or others is None:
            return mine
        return self.chosen.get((mine, others), mine)


def _without_mode(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    return tuple(region for region in regions if region not in _ALONE)


def _to_evaluation(node: fx.Node) -> None:
    """Marks the memory of a node that evaluation alone has as that mode's."""
    for key in ("storages", "mutates", "touches"):
        node.meta[key] = frozenset(-1 - storage for storage in node.meta[key])
